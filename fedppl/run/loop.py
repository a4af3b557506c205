"""A fit: checked and started, and run a round at a time; `front` is how users call it.

Engines move messages and algorithms compute; everything in between is in this folder, once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian, settings
from fedppl.contracts import Algorithm, AnyAlgorithm, EngineFactory, LocalInference, Posterior
from fedppl.data.tables import Table
from fedppl.engine.answer import require_fit, say_unused
from fedppl.engine.guard import REFUSED
from fedppl.engine.inprocess import InProcess, Threads
from fedppl.local.integrate import cores
from fedppl.local.many import moments, nodes_for, without_density
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.model.client import ClientModel
from fedppl.model.declaration import FederatedModel
from fedppl.model.stack import samples, stacked, why_not
from fedppl.results import diagnostics
from fedppl.results.fit import Fit
from fedppl.results.records import ever_used, unarrived
from fedppl.run.conflicts import mirror_image, prior_conflict
from fedppl.run.one_round import Round, as_participation, one_round, without_numbers
from fedppl.run.progress import Participation, Progress, Run, keep_at, save
from fedppl.settings import not_called, shown, some_of, takes
from fedppl.storage import checkpoint as checkpoints
from fedppl.types import Array, ConvergenceWarning, DeclarationError, Status

logger = logging.getLogger(__name__)

# Data by client, rows of one table, or none where an engine finds clients elsewhere.
Clients = Mapping[str, Mapping[str, Any]] | Table | None


def rounds(
    model: FederatedModel, clients: Clients, algorithm: AnyAlgorithm | Choice, options: Options
) -> Iterator[Round]:
    """See `fedppl.rounds`; the engine is closed when the last round is done or the caller stops."""
    run = start(model, clients, algorithm, options)

    def each() -> Iterator[Round]:
        with contextlib.closing(run.engine):
            yield from _run(run)

    return each()


def fit(
    model: FederatedModel,
    clients: Clients,
    algorithm: AnyAlgorithm | Choice,
    options: Options,
    *,
    callback: Callable[[Round], bool | None] | None = None,
    progressbar: bool = True,
) -> Fit:
    """See `fedppl.fit`."""
    require_callback(callback)
    settings.flag("progressbar", progressbar)
    with contextlib.ExitStack() as closing:
        with Progress(options.rounds, show=progressbar) as progress:
            progress.say("checking and compiling")
            run = start(model, clients, algorithm, options)
            closing.callback(run.engine.close)
            algorithm = run.algorithm
            run.progress = progress
            progress.say(f"{len(run.clients)} clients are ready")
            started = time.perf_counter()
            stopped = _run_to_end(run, callback)
        status, message = _ending(run, stopped=stopped)
        advice = "" if status is Status.INTERRUPTED else model.advice
        message = "; ".join(filter(None, (advice, message)))
        text = f"fit ended with status {status.value}" + (f": {message}" if message else "")
        # Warnings that follow below, or that were logged in their round, are not logged as warnings again.
        caveat = bool(advice) or (bool(run.message) and not run.records[-1].mild)
        is_warning = caveat if status.ok else not algorithm.result.tests_convergence
        logger.log(
            logging.WARNING if is_warning else logging.INFO, text, extra={"run": run.name, "status": status.value}
        )
        result = Fit(
            algorithm=algorithm,
            state=run.state,
            layout=run.layout,
            declaration=model.knowing({client.client_id: client.kind for client in samples(run.models)}),
            client_ids=run.clients,
            clients=run.models,
            reader=run.engine.reader(),
            records=tuple(run.records),
            status=status,
            message=message,
            personal={k: run.personal[k] for k in run.clients if k in run.personal} if run.personal else {},
            seed=run.seed,
            seconds=time.perf_counter() - started,
        )
        result = _concluded(run, result)
    if algorithm.result.tests_convergence and not status.ok:
        warnings.warn(ConvergenceWarning(text, result), stacklevel=3)  # the caller of `fedppl.fit`
    return result


def _concluded(run: Run, result: Fit) -> Fit:
    """The fit with what sites send at its end, once they have their final messages."""
    if result.status is Status.INTERRUPTED and not run.models:
        logger.warning("sites are not told that the run is over: with a checkpoint the same call goes on")
    elif not (reason := unarrived(result)):
        final = functools.partial(run.algorithm.result.final_message, run.state)
        messages = run.engine.conclude(final, run.name, run.seed, result.status)
        if messages:  # a site sends its message once, and nothing where it is asked again
            new = {name: message for name, message in messages.items() if message or name not in run.told}
            run.told = {**run.told, **new}
            save(run)
        result = dataclasses.replace(result, told=run.told)
    elif not run.models:
        extra = {"run": run.name, "status": result.status.value}
        logger.warning("sites are not asked to draw their posteriors: %s", reason, extra=extra)
    return result


def _run_to_end(run: Run, callback: Callable[[Round], bool | None] | None) -> str:
    """Run to the end; returns what stopped it before, "the callback" or "Ctrl-C", or an empty text."""
    try:
        for step in _run(run):
            stops: Any = callback(step) if callback is not None else None
            if not isinstance(stops, bool | np.bool_ | None):
                remedy = "return True to stop, False or None to go on"
                raise DeclarationError(f"the callback returned {shown(stops)} in round {step.number}; {remedy}.")
            if stops:
                return "the callback"
    except KeyboardInterrupt:
        if not run.records:
            raise
        return "Ctrl-C"
    return ""


def _run(run: Run) -> Iterator[Round]:
    while not run.records or run.records[-1].status is Status.RUNNING:
        if run.limit is not None and run.counted >= run.limit:
            return
        yield one_round(run)


_NOISE = 0.05  # of a mean, in sds, above which clients draw


def _distinct(reasons: Iterable[str]) -> str:
    """At most three reasons that differ in more than their numbers."""
    return "; ".join(list({without_numbers(reason): reason for reason in sorted(reasons)}.values())[:3])


def _sd_shortfall(run: Run) -> tuple[str, bool]:
    """A sentence where sds of a Gaussian may be too small, and whether the fit is not to be called converged for it."""
    shared = run.algorithm.result.shared
    if not isinstance(shared, Posterior):
        return "", False
    short, has_without = diagnostics.shortfall(run.infos), shared.without is not None
    noise = run.records[-1].info.get("mc_error", 0.0)
    remedy = diagnostics.exact(at_sites=run.engine.has_sites())
    trusted = diagnostics.NOISY if isinstance(noise, float) and noise > _NOISE else diagnostics.TRUSTED
    return diagnostics.shortfall_sentence(short, remedy, trusted), has_without and short >= trusted


def _ending(run: Run, *, stopped: str = "") -> tuple[Status, str]:
    """How the run ended, or what stopped it, with the setting to change, clients without replies, and fallbacks."""
    status, message = run.records[-1].status if run.records else Status.RUNNING, run.message
    fell_back = diagnostics.fallback_sentence(run.infos, len(run.clients))
    if status is Status.CONVERGED:
        another, (short, is_wrong) = mirror_image(run), _sd_shortfall(run)
        spread = gaussian.standard_deviations(run.layout.prior) if is_wrong else np.zeros(run.layout.size)
        cause, laplace = diagnostics.hardly_a_prior(run.layout.labels, spread), diagnostics.unchecked_laplace(run.infos)
        doubts = another, short, cause, message, prior_conflict(run), laplace, fell_back
        return Status.STALLED if another or is_wrong else status, "; ".join(filter(None, doubts))
    silent = set(run.clients) - ever_used(run.records, run.clients)
    if len(silent) == len(run.clients):
        reasons = _distinct(reason for record in run.records for reason in record.failures.values())
        return Status.STALLED, f"no client ever sent a usable reply: {reasons}"
    searching = run.algorithm.result.preliminary(run.state)
    missing = _missing_replies(run, silent, searching, message)
    never = silent - {client_id for record in run.records for client_id in (*record.asked, *record.failures)}
    if never:
        message = f"clients {sorted(never)[:5]} were never asked, see participation=; {message}"
    if silent - never:
        last = {client_id: reason for record in run.records for client_id, reason in record.failures.items()}
        why = _distinct(last[client_id] for client_id in silent - never if client_id in last)
        message = f"clients {sorted(silent - never)[:5]} never sent a usable reply: {why}; {message}"
    # The algorithm names no setting for what a site does not allow.
    refused = REFUSED in run.records[-1].failures.values()
    message = "; ".join(filter(None, (missing, message) if refused else (message, missing)))
    if stopped and searching and status is Status.RUNNING:
        early = "the start, whose rounds do not count, was not at its end: let it go on"
        message = "; ".join(filter(None, (early, missing)))
    if status is Status.RUNNING:
        by = f" by {stopped}" if stopped else ""
        status = Status.INTERRUPTED if stopped == "Ctrl-C" else Status.MAX_ROUNDS
        limit = f" of {run.limit}" if run.counted <= (run.limit or 0) else ""  # a checkpoint may have had more
        message = f"stopped{by} after {run.counted}{limit} rounds: {message or 'raise rounds='}"
    return status, "; ".join(filter(None, (message, fell_back)))


def _missing_replies(run: Run, silent: set[str], searching: bool, message: str) -> str:
    """Clients without a usable reply in the last round, or without an answer at some points, with the reasons."""
    last, missing, is_sum = run.records[-1], "", bool(run.algorithm.replies.summed(run.state))
    # Failures that the algorithm does not know of, as of sums; where rounds ran out, they may be the reason.
    unnamed = is_sum and bool(set(last.failures) - silent)
    if last.failures and (run.records[-1].status is Status.RUNNING or not message or not last.used or unnamed):
        missing = f"{len(last.failures)} of {last.n_asked} clients, {some_of(last.failures)}, sent no usable reply in "
        missing += f"the last round: {_distinct(last.failures.values())}"
    kinds = [record.reasons for record in run.records]
    if is_sum and not missing:  # who failed in a round that was void
        kinds += [record.failures for record in run.records]
    reasons = {k: why for kind in kinds for k, why in kind.items() if k not in silent}
    if (searching or is_sum) and reasons:
        unanswered = f"in some rounds {some_of(sorted(reasons))} had no answer, or not at all points: "
        missing = "; ".join(filter(None, (missing, unanswered + _distinct(reasons.values()))))
    return missing


# The start of a run: checks before work begins -----------------------------------------------------------------------


def start(model: FederatedModel, clients: Clients, algorithm: AnyAlgorithm | Choice, options: Options) -> Run:
    """Check everything that can be checked before work begins, and resume from a checkpoint that exists."""
    first = algorithm.first if isinstance(algorithm, Choice) else algorithm
    _require_options(model, clients, first, options)
    seed = seed_of(options.random_seed)
    models: Mapping[str, ClientModel] = {}
    if isinstance(clients, Table):
        models = enrolled(model, clients, np.random.default_rng((seed, 0)))
    elif clients is not None:
        models = model.enrol(clients, kernel=first.needs.kernel)
    if isinstance(algorithm, Choice):
        algorithm = decided(algorithm, models)
        if algorithm is not first:
            models = dict(models)  # clients that are asked one by one are made once
    for client in samples(models):
        require_fit(algorithm, client)
    if models:
        say_unused(algorithm, next(iter(samples(models))))
    engine = (options.engine or InProcess())(algorithm, models)
    if not callable(getattr(engine, "exchange", None)):
        gave = f"engine={shown(options.engine)} gave {shown(engine)}, no engine"
        raise DeclarationError(f"{gave}; pass one like fedppl.InProcess().")
    try:
        name = getattr(engine, "run", "")  # of a run that an earlier call began: this one asks the same
        seed = int(name, 16) if name and options.random_seed is None else seed
        run = Run(algorithm, engine, models, seed, name)
        if (names := tuple(run.layout.slices)) != model.shared:
            which = f"the sites share {list(names)}, this model {list(model.shared)}"
            raise DeclarationError(f"{which}; run the same declaration everywhere.")
        if options.start is not None:
            _take_over(run, options.start)
        run.limit, run.deadline = options.rounds, options.deadline
        run.participation = as_participation(options.participation, clients=len(run.clients))
        run.reporting = as_participation(options.reporting, "reporting", len(run.clients))
        asking = {"participation": options.participation, "reporting": options.reporting}
        run.settings |= {name: settings.named(value) for name, value in asking.items()}
        if options.checkpoint is not None:
            keep_at(run, Path(options.checkpoint), seed_given=options.random_seed is not None)
    except BaseException:
        engine.close()
        raise
    return run


def _require_options(model: Any, clients: Clients, algorithm: AnyAlgorithm, options: Options) -> None:
    """Refuse options that cannot be meant, before any client is enrolled."""
    require_declared(model, algorithm)
    require_settings(options, len(clients) if isinstance(clients, Mapping) else None)
    engine = options.engine
    if options.start is not None:
        _require_start(options.start, algorithm)
    if engine is not None and (not callable(engine) or not_called(engine) or not takes(engine, 2)):
        remedy = not_called(engine) or "; pass one that is built, like fedppl.InProcess()."
        raise DeclarationError(f"engine={shown(engine)} is no engine{remedy}")
    if options.checkpoint is not None:
        checkpoints.require_writable(options.checkpoint)


def _require_start(begin: Any, algorithm: AnyAlgorithm) -> None:
    """Refuse to start from what is no fit, from a fit by another algorithm, and where a state cannot be taken over."""
    if not isinstance(begin, Fit):
        raise DeclarationError(f"start={shown(begin)} must be a fit, or None.")
    if algorithm.result.resume is None:
        more = "For more rounds on the same data, pass checkpoint= from the first call on."
        raise DeclarationError(f"{algorithm.name} begins anew each time; leave start= out. {more}")
    if begin.algorithm.name != algorithm.name:
        raise DeclarationError(f"start= is a fit by {begin.algorithm.name}, and this one is by {algorithm.name}.")


def _take_over(run: Run, begin: Fit) -> None:
    assert run.algorithm.result.resume is not None
    if run.layout.fingerprint != begin.layout.fingerprint:
        other = f"{[*begin.layout.slices]}, and this one {[*run.layout.slices]}, with another prior or shape"
        remedy = "Fit the same declaration: fedppl.fit(before.declaration, data, start=before)."
        raise DeclarationError(f"start= is a fit that shares {other}. {remedy}")
    run.state = run.algorithm.result.resume(run.state, begin.state)


def require_declared(model: Any, algorithm: Any) -> None:
    """Refuse what is no declaration, or no algorithm."""
    if not isinstance(model, FederatedModel):
        remedy = "wrap the builder: FederatedModel(builder, shared=[...])"
        if isinstance(getattr(model, "model", None), FederatedModel):
            remedy = "pass its .model"
        elif isinstance(model, str) and "~" in model:
            remedy = f"declare it: fedppl.formula({model!r})"
        elif isinstance(model, Mapping):
            remedy = "the model comes first, then the data: fedppl.fit(model, data)"
        raise DeclarationError(f"model is {type(model).__name__}; {remedy}.")
    if not isinstance(algorithm, Algorithm):
        remedy = not_called(algorithm) or "; pass one that is built, like fedppl.EP()."
        if isinstance(algorithm, LocalInference):
            remedy = " but how clients compute; pass fedppl.EP(local=...)."
        raise DeclarationError(f"algorithm={shown(algorithm)} is no algorithm{remedy}")
    noise = algorithm.disclosure.noise_multiplier
    if noise is not None and not 0 < noise < np.inf:
        raise DeclarationError(f"{algorithm.name}: disclosure.noise_multiplier={noise} must be positive, or None.")


def require_settings(options: Options, count: int | None = None) -> None:
    """Refuse settings of a run that cannot be meant, for so many clients where their number is known."""
    if options.rounds is not None:
        settings.whole("rounds", options.rounds)
    if options.checkpoint is not None and not isinstance(options.checkpoint, str | os.PathLike):
        raise DeclarationError(f"checkpoint={shown(options.checkpoint)} must be the path of a file.")
    for word in ("participation", "reporting"):
        as_participation(getattr(options, word), word, count)
    if options.deadline is not None:
        settings.positive("deadline", options.deadline, "it is in seconds; None waits for ever")


def require_callback(callback: Any) -> None:
    """Refuse a callback that is no function of one round."""
    if callback is not None and not (callable(callback) and takes(callback, 1)):
        raise DeclarationError(f"callback={shown(callback)} is not a function of one Round; pass one that is.")


def seed_of(random_seed: int | np.random.Generator | None) -> int:
    """The seed of all random streams of a run."""
    if random_seed is None:
        return int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
    if isinstance(random_seed, np.random.Generator):
        return int(random_seed.integers(2**63))
    if isinstance(random_seed, int | np.integer) and not isinstance(random_seed, bool) and random_seed >= 0:
        return int(random_seed)
    raise DeclarationError(f"random_seed={random_seed!r} must be a non-negative int, a Generator or None.")


# Clients of one table as one stack: a sample is enrolled with all checks, for all ------------------------------------

_ENROLLED = 128  # clients, chosen at random: a fault of one in fifty is found in .92 of all runs
_JUDGED_BY = 4  # clients by which is decided whether there is a rule to integrate local variables
_MANY = 20_000  # clients that take hours to enrol one by one


def enrolled(model: FederatedModel, table: Table, rng: np.random.Generator) -> Mapping[str, ClientModel]:
    """Clients by id, as a stack where that is possible; else each is enrolled, with the reason in the log."""
    counts = table.counts
    chosen = rng.choice(len(counts), min(_ENROLLED, len(counts)), replace=False)
    # The smallest and the largest client show which lengths depend on numbers of rows.
    places = np.unique([*chosen, np.argmin(counts), np.argmax(counts)])
    clients = list(model.enrol(_data(table, places)).values())
    reason = why_not(clients)
    if not reason and nodes_for(clients[:_JUDGED_BY]) is None:
        reason = "several local variables depend on each other"
    if reason:
        level = logging.WARNING if len(counts) > _MANY else logging.INFO
        logger.log(level, "%d clients are enrolled one by one: %s", len(counts), reason)
        return model.enrol(table)
    stack = stacked(model, table, clients[0], functools.partial(moments, workers=cores()))
    phi = np.ascontiguousarray(clients[0].template.functions["shared start"])
    for k in without_density(stack, phi, cores())[:1]:
        model.enrol(_data(table, np.array([k])))  # raises the error with the reason
    return stack


def _data(table: Table, places: NDArray[np.int64]) -> dict[str, dict[str, Array]]:
    return {table.client_ids[k]: table.rows(int(k)) for k in places}


# The algorithm of a fit that names none: decided by the call and the declaration, before the first round --------------

MOST_SHARED = 20  # coordinates: with more, few points of a proposal have all the weight


class Options(NamedTuple):
    """Settings of a run, as `fedppl.fit` has them."""

    rounds: int | None = 20
    engine: EngineFactory | None = None
    participation: Participation | int | float | None = None
    reporting: Participation | int | float | None = None
    checkpoint: str | Path | None = None
    deadline: float | None = None
    random_seed: int | np.random.Generator | None = None
    start: Fit | None = None


class Choice(NamedTuple):
    """Two algorithms, between which clients' models decide."""

    first: AnyAlgorithm
    other: AnyAlgorithm


def by_call(first: AnyAlgorithm, other: AnyAlgorithm, data: Any, options: Options) -> AnyAlgorithm | Choice:
    """The other algorithm where the call rules out `first`, which needs all clients in this process; else both.

    Where sums are secure it is `first`: the other asks for single replies.
    """
    if getattr(options.engine, "secure", False):
        logger.info("the fit is by %s: the engine's sums are secure", first.name)
        return first
    keywords = [f"{k}=" for k in ("participation", "reporting", "deadline") if getattr(options, k) is not None]
    reason, begin = "", options.start
    if data is None or not is_here(options.engine):
        reason = "clients are not in this process, or have a policy"
    elif keywords:
        reason = f"with {' and '.join(keywords)} not all clients may answer in a round"
    elif begin is not None and not (isinstance(begin, Fit) and begin.algorithm.name == first.name):
        reason = "start= is not a fit by it"
    return _other(first, other, reason) if reason else Choice(first, other)


def _other(first: AnyAlgorithm, other: AnyAlgorithm, reason: str) -> AnyAlgorithm:
    logger.info("the fit is by %s, not by %s: %s", other.name, first.name, reason)
    return other


def is_here(engine: Any) -> bool:
    """Whether clients are in this process, without a policy."""
    return engine is None or (isinstance(engine, Threads) and engine.policy is None)


def lies_side_by_side(algorithm: Any, engine: Any) -> bool:
    """Whether an algorithm can lay clients side by side in this process."""
    batch = getattr(algorithm, "batch", None)
    return is_here(engine) and batch is not None and batch.stacks is not None


def decided(choice: Choice, models: Mapping[str, ClientModel]) -> AnyAlgorithm:
    """The algorithm, with the reason in the log."""
    if reason := _why_not(choice.first, models):
        return _other(*choice, reason)
    logger.info("the fit is by %s: few coordinates are shared, and densities are smooth", choice.first.name)
    return choice.first


def _why_not(algorithm: AnyAlgorithm, models: Mapping[str, ClientModel]) -> str:
    local = NestedLaplace()
    for client in samples(models):
        if client.layout.size > MOST_SHARED:
            return f"{client.layout.size} coordinates are shared, and it is for {MOST_SHARED} at most"
        try:
            require_fit(algorithm, client)
            local.check(client)
        except DeclarationError as error:
            return str(error)
    return ""
