"""The round loop: a round at a time, or a whole fit; `front` is how users call it.

Engines move messages and algorithms compute; everything in between is in this folder, once.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from fedppl import gaussian, settings
from fedppl.contracts import AnyAlgorithm, Posterior
from fedppl.engine.guard import REFUSED
from fedppl.local import integrate
from fedppl.model.declaration import FederatedModel
from fedppl.model.stack import samples
from fedppl.numerics import mirrors
from fedppl.results import departure, records
from fedppl.results.arrival import unarrived
from fedppl.results.fit import Fit
from fedppl.results.records import Record, ever_used
from fedppl.run._prior_check import posterior_of_all, prior_conflict
from fedppl.run.one_round import Round, one_round, without_numbers
from fedppl.run.progress import Progress
from fedppl.run.start import Choice, Clients, Options, Run, require_callback, save
from fedppl.run.start import start as begin
from fedppl.settings import some_of
from fedppl.types import Array, ConvergenceWarning, DeclarationError, Status

logger = logging.getLogger(__name__)


def rounds(
    model: FederatedModel, clients: Clients, algorithm: AnyAlgorithm | Choice, options: Options
) -> Iterator[Round]:
    """See `fedppl.rounds`."""
    return _all(begin(model, clients, algorithm, options))


def fit(
    model: FederatedModel,
    clients: Clients,
    algorithm: AnyAlgorithm | Choice,
    options: Options,
    *,
    callback: Callable[[Round], bool | None] | None = None,
    progressbar: bool = True,
    stacklevel: int = 3,
) -> Fit:
    """See `fedppl.fit`; `stacklevel` is that of who called it, for warnings."""
    require_callback(callback)
    choice = algorithm if isinstance(algorithm, Choice) else None
    with Progress(options.rounds, show=progressbar) as progress:
        progress.say("checking and compiling")
        run = begin(model, clients, algorithm, options)
        algorithm = run.algorithm
        run.progress = progress
        progress.say(f"{len(run.clients)} clients are ready")
        started = time.perf_counter()
        try:
            stopped = _followed(run, callback)
        except BaseException:
            run.engine.close()
            raise
    try:
        status, message = _ending(run, stopped=stopped)
        if status in (Status.STALLED, Status.MAX_ROUNDS):
            message = "; ".join(filter(None, (model.advice, message)))
        told = f"fit ended with status {status.value}" + (f": {message}" if message else "")
        # What is said as a warning below, or was said in its round, is not said twice.
        caveat = bool(run.message) and not run.records[-1].mild
        loud = caveat if status.ok else not algorithm.result.tests_convergence
        logger.log(logging.WARNING if loud else logging.INFO, told, extra={"status": status.value})
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
            personal={one: run.personal[one] for one in run.clients if one in run.personal} if run.personal else {},
            seed=run.seed,
            seconds=time.perf_counter() - started,
        )
        if status is Status.INTERRUPTED and not run.models:
            logger.warning("sites are not told that the run is over: with a checkpoint the same call goes on")
        elif not (reason := unarrived(result)):
            final = functools.partial(algorithm.result.final_message, run.state)
            said = run.engine.conclude(final, run.name, run.seed, status)
            if any(said.values()):  # once: a site that is told again that the run is over says nothing
                run.told = {**run.told, **{client_id: words for client_id, words in said.items() if words}}
                save(run)
            result = dataclasses.replace(result, told=run.told)
        elif not run.models:
            logger.warning("sites are not asked to draw their posteriors: %s", reason, extra={"status": status.value})
        if not run.models:
            try:
                _ = result.idata  # while a site can still be asked for the way back to the constrained space
            except RuntimeError as error:  # a site that lies about that does not cost the fit
                logger.error("fit.idata is not there: %s", error, extra={"status": status.value})
    finally:
        run.engine.close()
    if choice is not None and options.checkpoint is None and _goes_on(choice, run, status, stopped):
        logger.info("%s did not do, and the fit goes on by %s: %s", choice.first.name, choice.other.name, message)
        again = Options(options.rounds, options.engine, random_seed=run.seed)
        shown: dict[str, Any] = {"callback": callback, "progressbar": progressbar, "stacklevel": stacklevel + 1}
        return fit(model, clients, choice.other, again, **shown)
    if algorithm.result.tests_convergence and not status.ok:
        warnings.warn(ConvergenceWarning(told, result), stacklevel=stacklevel)
    return result


_MOST_AGAIN = 2000  # clients of whom single ones can be asked, one after the other


def _goes_on(choice: Choice, run: Run, status: Status, stopped: str) -> bool:
    """Whether the other algorithm of a choice may do where the first, which nobody asked for, did not.

    Where it is known where the posterior lies, and not what it is like there. A search that found several modes, or
    none, has said what there is to say.
    """
    return (
        status is Status.STALLED
        and not stopped
        and run.algorithm is choice.first
        and choice.first is not choice.other
        and not choice.first.result.preliminary(run.state)
        and len(run.clients) <= _MOST_AGAIN
    )


def _followed(run: Run, callback: Callable[[Round], bool | None] | None) -> str:
    """Run to the end; what stopped it before, if something did: "the callback", or "Ctrl-C"."""
    try:
        for step in _run(run):
            if callback is not None and says_stop(callback(step), step.number):
                return "the callback"
    except KeyboardInterrupt:
        if not run.records:  # there is nothing to give
            raise
        return "Ctrl-C"
    return ""


def says_stop(answer: Any, number: int) -> bool:
    """What a callback's value means."""
    if answer is not None and not isinstance(answer, bool | np.bool_):
        raise DeclarationError(
            f"the callback returned {settings.shown(answer)} in round {number}; return True to stop, False or None to "
            "go on, such as bool(np.all(...)) for an array."
        )
    return bool(answer)


def _all(run: Run) -> Iterator[Round]:
    """The rounds of a run; the engine is closed when the last is done or the caller stops."""
    try:
        yield from _run(run)
    finally:
        run.engine.close()


def _run(run: Run) -> Iterator[Round]:
    """Ask, wait, check, update, record; until converged or out of rounds."""
    result = run.algorithm.result
    while not run.records or run.records[-1].status is Status.RUNNING:
        if run.limit is not None and run.counted >= run.limit and not result.closing(run.state):
            # Sites keep account of a run's rounds, and what is not saved could not be asked of them again.
            if not run.engine.has_sites():
                run.state, run.saves = result.out_of_rounds(run.state), False
            if not result.closing(run.state):
                return
        yield one_round(run)


_NOISE = 0.05  # of a mean, in sds, above which clients draw


def _distinct(reasons: Iterable[str]) -> str:
    """At most three reasons that differ in more than their numbers."""
    return "; ".join(list({without_numbers(reason): reason for reason in sorted(reasons)}.values())[:3])


def _last_reasons(records: Sequence[Record], clients: Iterable[str]) -> list[str]:
    """The last reason of each of these clients for not having sent what was asked for."""
    last = {client_id: reason for record in records for client_id, reason in record.failures.items()}
    return [last[client_id] for client_id in clients if client_id in last]


def _too_short(run: Run) -> tuple[str, bool]:
    """Say that sds of a Gaussian may be too small, and whether by more than is known of one that could be corrected."""
    shared = run.algorithm.result.shared
    if not isinstance(shared, Posterior):
        return "", False
    short, can = departure.shortfall(run.infos), shared.without is not None
    noise = run.records[-1].info.get("mc_error", 0.0)
    trusted = departure.NOISY if isinstance(noise, float) and noise > _NOISE else departure.TRUSTED
    return departure.sentence(short, departure.CORRECTION if can else "fedppl.EP()", trusted), can and short >= trusted


def _ending(run: Run, *, stopped: str = "") -> tuple[Status, str]:
    """Say how the run ended, or what stopped it, with the setting to change; who never replied, and who fell back."""
    status, message = run.records[-1].status if run.records else Status.RUNNING, run.message
    infos = run.infos
    fallen = "; ".join(
        filter(
            None,
            (
                records.sentence(infos, len(run.clients)),
                records.earlier((r.infos for r in run.records if not r.closing), sum(r.seconds for r in run.records)),
            ),
        )
    )
    if status is Status.CONVERGED:
        another, (short, unknown) = _mirror_image(run), _too_short(run)
        told = (another, short, message, prior_conflict(run), records.unchecked(infos), fallen)
        return Status.STALLED if another or unknown else status, "; ".join(filter(None, told))
    silent = set(run.clients) - ever_used(run.records, run.clients)
    if len(silent) == len(run.clients):
        reasons = _distinct(reason for record in run.records for reason in record.failures.values())
        return Status.STALLED, f"no client ever sent a usable reply: {reasons}"
    last = run.records[-1]
    lost = ""
    # What the algorithm was not told, as of sums; where rounds ran out, failing clients may be why.
    unnamed = bool(set(last.failures) - silent) and bool(run.algorithm.replies.summed(run.state))
    if last.failures and (status is Status.RUNNING or not message or not last.used or unnamed):
        who = some_of(last.failures)
        lost = f"{len(last.failures)} of {last.n_asked} clients, {who}, sent no usable reply in the last round"
        lost = f"{lost}: {_distinct(last.failures.values())}"
    never = silent - {client_id for record in run.records for client_id in (*record.asked, *record.failures)}
    if never:
        message = f"clients {sorted(never)[:5]} were never asked, see participation=; {message}"
    if silent - never:
        why = _distinct(_last_reasons(run.records, silent - never))
        message = f"clients {sorted(silent - never)[:5]} never sent a usable reply: {why}; {message}"
    searching = run.algorithm.result.preliminary(run.state)
    if searching and (missing := {k: why for record in run.records for k, why in record.reasons.items()}):
        missed = f"at points of the search clients {sorted(missing)[:5]} had no answer: {_distinct(missing.values())}"
        lost = "; ".join(filter(None, (lost, missed)))
    # What a site does not allow no setting mends that the algorithm could name.
    refused = REFUSED in last.failures.values()
    message = "; ".join(filter(None, (lost, message) if refused else (message, lost)))
    if stopped and searching and status is Status.RUNNING:
        early = "the start, whose rounds do not count, was not at its end: let it go on"
        message = "; ".join(filter(None, (early, lost)))
    if status is Status.RUNNING:
        by = f" by {stopped}" if stopped else ""
        status = Status.INTERRUPTED if stopped == "Ctrl-C" else Status.MAX_ROUNDS
        asked = f" of {run.limit}" if run.counted <= (run.limit or 0) else ""  # a checkpoint may have had more
        message = f"stopped{by} after {run.counted}{asked} rounds: {message or 'raise rounds='}"
    return status, "; ".join(filter(None, (message, fallen)))


_MOST = 20_000  # densities of clients, at images


def _mirror_image(run: Run) -> str:
    """Say along which coordinate there is another mode; empty where none is, or none can be told."""
    shared = posterior_of_all(run)
    if shared is None or not 0 < len(run.models) <= _MOST:
        return ""
    one = next(iter(run.models.values()))
    if one.prior.gaussian.precision.ndim == 1:
        return ""
    corrected, q = shared.corrected(run.state), shared.gaussian(run.state)
    if corrected is None:
        center, sd, known = gaussian.mean(q), gaussian.standard_deviations(q), None
    else:
        center, sd = corrected.mean, np.sqrt(np.diag(corrected.covariance))
        known = corrected.points, corrected.weights
    patterns = mirrors.signs(one.layout)[: _MOST // len(run.models)]
    stacks, prior = integrate.stacks(run.models), one.prior

    def log_posterior(points: Array) -> Array:
        values = np.asarray(prior.log_density(points), dtype=float) + integrate.log_density(stacks, points)
        return np.where(np.isnan(values), -np.inf, values)

    found = mirrors.unseen(log_posterior, center, sd, patterns, known)
    if found is None:
        return ""
    labels = [one.layout.labels[k] for k in found[0]]
    return (
        f"the posterior has several modes: with the sign of {' and '.join(labels[:4])} changed the density is about "
        f"{found[1]:.2g} of both, and what was found has none of it. Declare the model so that one is left: positive "
        "(pm.HalfNormal), or by a prior that rules the other out"
    )
