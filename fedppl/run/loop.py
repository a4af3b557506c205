"""The round loop: who is asked, with which random stream, what counts as a reply, what is recorded.

Engines move messages and algorithms compute; everything in between is here, once.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedppl import settings
from fedppl.contracts import Algorithm, AnyAlgorithm, EngineFactory, Reply, Request
from fedppl.engine.answer import REFUSED, require_fit, say_unused
from fedppl.engine.inprocess import InProcess
from fedppl.model.declaration import FederatedModel
from fedppl.numerics.streams import stream
from fedppl.results import departure, fallbacks
from fedppl.results.arrival import unarrived
from fedppl.results.fit import Fit
from fedppl.results.records import Record
from fedppl.run._run import Run, add, keep_at, save
from fedppl.run.participation import Participation, as_participation
from fedppl.run.progress import Progress
from fedppl.run.replies import n_bytes, one_line, received, released, why_not
from fedppl.storage import checkpoint as checkpoints
from fedppl.types import ConvergenceWarning, DataError, DeclarationError, Message, Status

__all__ = ["Round", "fit", "rounds"]

logger = logging.getLogger(__name__)

# A converged fit whose sds may be too small by more than this part is told as a warning.
_SHORT = 0.1


class Round(NamedTuple):
    """One round: its number, the server's state and diagnostics, and what each asked client did."""

    number: int
    state: Any
    info: Any
    status: Status
    message: str
    record: Record

    @property
    def failures(self) -> dict[str, str]:
        """Reason by client id for every client whose old site was kept."""
        return dict(self.record.failures)


def rounds(
    model: FederatedModel,
    clients: Mapping[str, Mapping[str, Any]] | None,
    algorithm: AnyAlgorithm,
    *,
    rounds: int | None = None,
    engine: EngineFactory | None = None,
    participation: Participation | int | float | None = None,
    reporting: Participation | int | float | None = None,
    checkpoint: str | Path | None = None,
    deadline: float | None = None,
    random_seed: int | np.random.Generator | None = None,
) -> Iterator[Round]:
    """Run a federated algorithm a round at a time, for scripts that look in between.

    Parameters
    ----------
    model
        The declaration.
    clients
        Client id to that client's data, name to array. None where the data are at sites and the engine finds
        them, as Flower's does.
    algorithm
        For example ``fedppl.EP()``.
    rounds
        Stop after this many rounds in all; None runs until converged or the caller stops. Rounds of a start that has
        a budget of its own, as EP's warm start has, do not count.
    engine
        What moves the messages; by default ``fedppl.InProcess()``.
    participation
        None for all clients, an int for that many a round, a float for a probability, or a function
        ``(clients, rng) -> clients``.
    reporting
        Which of the clients that are asked send a reply, in the same words; None for all. The others hear the
        broadcast, update what they keep to themselves if the algorithm has such a thing, a personal head for example,
        and send only word that they did.
    checkpoint
        File to write the state to after every round, and to resume from when it exists. A resumed run gives
        the same numbers as an uninterrupted one. A salted digest tells whether a client's data are still those that the
        run began with: here it is in the file, a site keeps its own. Other data are refused, of a finished run too, and
        so are another algorithm, settings, `participation` or `reporting`. Functions are told apart by their names.
        `rounds` and `deadline` may change. The records of all rounds are beside it, in a file with ``.records`` added
        to its name. They are signed with the owner's key (the file at ``FEDPPL_KEY_FILE``, else ``fedppl/key`` in the
        user's configuration folder, made on first use) and read with that key only. Both files are as confidential as
        what clients send and keep.
    deadline
        Seconds to wait for replies in a round.
    random_seed
        Seed of every random stream.

    Yields
    ------
    Round

    Raises
    ------
    DeclarationError, DataError
        Before the first round.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> model, clients = normal_means()
    >>> [step.number for step in fedppl.rounds(model, clients, fedppl.EP(warm_start=False), rounds=2)]
    [1, 2]

    Notes
    -----
    *When this fails.* A client that fails keeps its old site; `Round.failures` says why. A run that does not
    converge ends with status "max_rounds" and a message that names the setting to change.
    """
    return _all(
        _start(model, clients, algorithm, rounds, engine, participation, reporting, checkpoint, deadline, random_seed)
    )


def fit(
    model: FederatedModel,
    clients: Mapping[str, Mapping[str, Any]] | None,
    algorithm: AnyAlgorithm,
    *,
    rounds: int = 20,
    engine: EngineFactory | None = None,
    participation: Participation | int | float | None = None,
    reporting: Participation | int | float | None = None,
    checkpoint: str | Path | None = None,
    callback: Callable[[Round], bool | None] | None = None,
    deadline: float | None = None,
    progressbar: bool = True,
    random_seed: int | np.random.Generator | None = None,
) -> Fit:
    """Fit a hierarchy across clients whose data stay where they are.

    Parameters
    ----------
    model, clients, algorithm, engine, participation, reporting, checkpoint, deadline, random_seed
        As in `rounds`.
    rounds
        Largest number of rounds, those of EP's warm start not counted.
    callback
        Called with every Round; return True to stop.
    progressbar
        Whether to show progress.

    Returns
    -------
    Fit
        Posterior of the shared parameters, per-client posteriors, diagnostics and status.

    Raises
    ------
    DeclarationError, DataError
        Before the first round.

    Warns
    -----
    ConvergenceWarning
        Once at the end, where the algorithm tests for convergence and did not see it; the text names the remedy, and
        the warning's attribute ``fit`` is the fit, for those to whom warnings are errors.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> model, clients = normal_means()
    >>> fit = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)
    >>> fit.status
    <Status.CONVERGED: 'converged'>

    Notes
    -----
    *When this fails.* Look at `Fit.message`, `Fit.summary` and ``fit.idata["rounds"]``: not converging is a status and
    a warning. A fit that was broken off before there was a posterior has none, and says so when it is asked for it.
    """
    if callback is not None and not (callable(callback) and settings.takes(callback, 1)):
        raise DeclarationError(f"callback={settings.shown(callback)} is not a function of one Round; pass one that is.")
    run = _start(model, clients, algorithm, rounds, engine, participation, reporting, checkpoint, deadline, random_seed)
    started, stopped = time.perf_counter(), False
    try:
        with Progress(rounds, show=progressbar) as progress:
            for step in _run(run):
                note = fallbacks.note(step.record.infos)
                progress.update(step.number, step.status.value, step.record.info, len(step.failures), note)
                if callback is not None and _says_stop(callback(step), step.number):
                    stopped = True
                    break
        status, message = _status(run, rounds, stopped=stopped)
        told = f"fit ended with status {status.value}" + (f": {message}" if message else "")
        # What is said as a warning below, or was said in its round, is not said twice.
        caveat = bool(run.message) and not run.records[-1].mild
        caveat = caveat or departure.shortfall(run.infos) > _SHORT
        loud = caveat if status.ok else not algorithm.result.tests_convergence
        logger.log(logging.WARNING if loud else logging.INFO, told, extra={"status": status.value})
        result = Fit(
            algorithm=algorithm,
            state=run.state,
            layout=run.layout,
            declaration=model,
            client_ids=run.clients,
            clients=run.models,
            reader=run.engine.reader(),
            records=tuple(run.records),
            status=status,
            message=message,
            personal=_in_order(run.engine.personal(), run.clients),
            seed=run.seed,
            seconds=time.perf_counter() - started,
        )
        if not (reason := unarrived(result)):
            final = functools.partial(algorithm.result.final_message, run.state)
            refused = run.engine.conclude(final, run.name, run.seed, status)
            if refused and run.records[-1].number == run.resumed:  # a finished run, that nobody was asked in
                told_by = "; ".join(f"client {client_id!r}: {why}" for client_id, why in refused.items())
                raise DataError(f"checkpoint {str(run.checkpoint)!r} cannot be used, {told_by}.")
        elif not run.models:
            logger.warning("sites are not asked to draw their posteriors: %s", reason, extra={"status": status.value})
        if not run.models:
            try:
                _ = result.idata  # while a site can still be asked for the way back to the constrained space
            except RuntimeError as error:  # a site that lies about that does not cost the fit
                logger.error("fit.idata is not there: %s", error, extra={"status": status.value})
    finally:
        run.engine.close()
    if algorithm.result.tests_convergence and not status.ok:
        warnings.warn(ConvergenceWarning(told, result), stacklevel=2)
    return result


def _says_stop(answer: Any, number: int) -> bool:
    """What a callback's value means."""
    if answer is not None and not isinstance(answer, bool | np.bool_):
        raise DeclarationError(
            f"the callback returned {settings.shown(answer)} in round {number}; return True to stop, False or None to "
            "go on, such as bool(np.all(...)) for an array."
        )
    return bool(answer)


def _start(
    model: FederatedModel,
    clients: Mapping[str, Mapping[str, Any]] | None,
    algorithm: AnyAlgorithm,
    limit: int | None,
    engine: EngineFactory | None,
    participation: Participation | int | float | None,
    reporting: Participation | int | float | None,
    checkpoint: str | Path | None,
    deadline: float | None,
    random_seed: int | np.random.Generator | None,
) -> Run:
    """Check everything that can be checked before work begins, and resume if there is something to resume."""
    if not isinstance(model, FederatedModel):
        raise DeclarationError(
            f"model is {type(model).__name__}; wrap the builder: FederatedModel(builder, shared=[...])."
        )
    if not isinstance(algorithm, Algorithm):
        raise DeclarationError(
            f"algorithm={settings.shown(algorithm)} is no algorithm"
            + (settings.not_called(algorithm) or "; pass one that is built, like fedppl.EP().")
        )
    if limit is not None:
        settings.whole("rounds", limit)
    if engine is not None and (not callable(engine) or settings.not_called(engine)):
        raise DeclarationError(
            f"engine={settings.shown(engine)} is no engine"
            + (settings.not_called(engine) or "; pass one that is built, like fedppl.InProcess().")
        )
    if checkpoint is not None and not isinstance(checkpoint, str | os.PathLike):
        raise DeclarationError(f"checkpoint={settings.shown(checkpoint)} must be the path of a file.")
    if checkpoint is not None:
        checkpoints.require_writable(checkpoint)
    count = len(clients) if isinstance(clients, Mapping) else None
    as_participation(participation, clients=count), as_participation(reporting, "reporting", count)
    if deadline is not None:
        settings.positive("deadline", deadline, "it is in seconds; None waits for ever")
    seed = _seed(random_seed)
    models = {} if clients is None else model.enrol(clients, kernel=algorithm.needs.kernel)
    for client in models.values():
        require_fit(algorithm, client)
    if models:
        say_unused(algorithm, next(iter(models.values())))
    moving = (engine or InProcess())(algorithm, models)
    try:
        run = Run(algorithm, moving, models, seed)
        if (found := tuple(variable.name for variable in run.layout.variables)) != model.shared:
            raise DeclarationError(
                f"the sites share {list(found)}, this model shares {list(model.shared)}; run the same declaration at "
                "the sites and at the server."
            )
        run.limit, run.deadline = limit, deadline
        run.participation = as_participation(participation, clients=len(run.clients))
        run.reporting = as_participation(reporting, "reporting", len(run.clients))
        asking = {"participation": participation, "reporting": reporting}
        run.settings |= {name: settings.named(value) for name, value in asking.items()}
        if checkpoint is not None:
            keep_at(run, Path(checkpoint), seed_given=random_seed is not None)
    except BaseException:
        moving.close()
        raise
    return run


def _seed(random_seed: int | np.random.Generator | None) -> int:
    if random_seed is None:
        return int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
    if isinstance(random_seed, np.random.Generator):
        return int(random_seed.integers(2**63))
    if isinstance(random_seed, int | np.integer) and not isinstance(random_seed, bool) and random_seed >= 0:
        return int(random_seed)
    raise DeclarationError(f"random_seed={random_seed!r} must be a non-negative int, a Generator or None.")


def _client_key(client_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(client_id.encode(), digest_size=8).digest(), "little")


def _all(run: Run) -> Iterator[Round]:
    """The rounds of a run; the engine is closed when the last is done or the caller stops."""
    try:
        yield from _run(run)
    finally:
        run.engine.close()


def _run(run: Run) -> Iterator[Round]:
    """Ask, wait, check, update, record; until converged or out of rounds."""
    while run.limit is None or run.counted < run.limit:
        if run.records and run.records[-1].status is not Status.RUNNING:
            return
        yield _one_round(run)


def _one_round(run: Run) -> Round:
    preliminary = run.algorithm.result.preliminary(run.state)
    number = len(run.records) + 1
    # Sorted, so that the same clients are asked whatever order an engine finds them in.
    chosen = set(run.participation(tuple(sorted(run.clients)), stream((run.seed, number, 0))))
    asked = tuple(client_id for client_id in run.clients if client_id in chosen)
    if chosen - set(run.clients) or not asked:
        raise DeclarationError(
            f"participation chose {sorted(chosen)} in round {number}; choose from {list(run.clients)}."
        )
    told = set(run.reporting(tuple(sorted(asked)), stream((run.seed, number, 1))))
    if told - set(asked) or not told:
        raise DeclarationError(f"reporting chose {sorted(told)} in round {number}; choose from {list(asked)}.")
    shapes = run.algorithm.replies.shapes(run.state)
    requests = {
        client_id: Request(
            client_id,
            nonce=secrets.randbits(63),
            round=number,
            seed=(run.seed, number, _client_key(client_id)),
            message=run.algorithm.broadcast(run.state, client_id),
            run=run.name,
            report=client_id in told,
            shapes=shapes if client_id in told else {},
        )
        for client_id in asked
    }
    started = time.perf_counter()
    answers = run.engine.exchange(requests, run.deadline)
    seconds = time.perf_counter() - started
    replies: dict[str, Message] = {}
    infos: dict[str, Mapping[str, float]] = {}
    failures: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for client_id, request in requests.items():
        reply = answers.get(client_id)
        reason = why_not(reply, request, run.layout, shapes if request.report else {})
        if reason is None and isinstance(reply, Reply) and request.report:
            reason = run.algorithm.replies.reject(run.state, reply.message)
        if reason is None and isinstance(reply, Reply):
            infos[client_id] = reply.info
            if reply.reason:
                reasons[client_id] = one_line(reply.reason)
            if request.report:
                replies[client_id] = reply.message
        else:
            failures[client_id] = str(reason)
    _log(number, failures, run.said)
    fallbacks.log(number, infos, fallbacks.fallen(run.infos))
    together = run.algorithm.replies.summed(run.state)
    run.state, report = run.algorithm.update_server(run.state, received(replies, summed=together))
    record = Record(
        number=number,
        asked=tuple(asked),
        failures=failures,
        infos=infos,
        info={k: v for k, v in report.info._asdict().items() if isinstance(v, int | float | str)},
        bytes_down={client_id: n_bytes(request.message) for client_id, request in requests.items()},
        bytes_up={client_id: n_bytes(message) for client_id, message in replies.items()},
        released=released(replies, infos),
        seconds=seconds,
        status=report.status,
        silent=tuple(client_id for client_id in asked if client_id not in told),
        preliminary=preliminary,
        reasons=reasons,
        message=run.message if report.message is None else report.message,
        mild=report.mild,
    )
    add(run, record)
    logger.info(
        "round %d: %s, %d of %d replies",
        number,
        report.status.value,
        len(replies),
        len(told),
        extra={
            "round": number,
            "status": report.status.value,
            "replies": len(replies),
            "asked": len(asked),
            "reporting": len(told),
        },
    )
    save(run)
    return Round(number, run.state, report.info, record.status, record.message, record)


def _in_order(values: Mapping[str, Any], clients: tuple[str, ...]) -> dict[str, Any]:
    return {client_id: values[client_id] for client_id in clients if client_id in values}


def _log(number: int, failures: Mapping[str, str], said: set[tuple[str, str]]) -> None:
    """Say who was skipped and why; clients that share a reason share a line where they are many.

    What was said of a client in an earlier round, numbers aside, is no warning any more.
    """
    by_reason: dict[str, list[str]] = {}
    for client_id, reason in failures.items():
        by_reason.setdefault(reason, []).append(client_id)
    for reason, together in by_reason.items():
        few = len(together) <= 5
        for clients in [[client_id] for client_id in together] if few else [together]:
            names = clients[0] if few else f"{', '.join(clients[:3])} and {len(clients) - 3} others"
            keys = {(client_id, _without_numbers(reason)) for client_id in clients}
            logger.log(
                logging.DEBUG if keys <= said else logging.WARNING,
                "round %d, client %s skipped: %s",
                number,
                names,
                reason,
                extra={"round": number, "client": names, "status": "skipped", "reason": reason},
            )
            said |= keys


def _without_numbers(reason: str) -> str:
    return re.sub(r"\d[\d.]*(e[+-]?\d+)?", "#", reason)


def _distinct(reasons: Iterable[str]) -> str:
    """At most three reasons that differ in more than their numbers."""
    return "; ".join(list({_without_numbers(reason): reason for reason in sorted(reasons)}.values())[:3])


def _last_reasons(records: Sequence[Record], clients: Iterable[str]) -> list[str]:
    """The last reason of each of these clients for not having sent what was asked for."""
    last = {client_id: reason for record in records for client_id, reason in record.failures.items()}
    return [last[client_id] for client_id in clients if client_id in last]


def _status(run: Run, limit: int, *, stopped: bool = False) -> tuple[Status, str]:
    """Say how the run ended, with the setting to change; who never replied, and who fell back."""
    status, message = run.records[-1].status if run.records else Status.RUNNING, run.message
    infos = run.infos
    fallen = "; ".join(
        filter(
            None,
            (
                fallbacks.sentence(infos, len(run.clients)),
                fallbacks.earlier((r.infos for r in run.records), sum(r.seconds for r in run.records)),
            ),
        )
    )
    if status is Status.CONVERGED:
        told = (message, departure.sentence(infos), fallbacks.unchecked(infos), fallen)
        return status, "; ".join(filter(None, told))
    silent = set(run.clients) - {client_id for record in run.records for client_id in record.infos}
    if len(silent) == len(run.clients):
        reasons = _distinct(reason for record in run.records for reason in record.failures.values())
        return Status.STALLED, f"no client ever sent a usable reply: {reasons}"
    last = run.records[-1]
    lost = ""
    # What the algorithm was not told; where rounds ran out, failing clients may be why.
    if last.failures and (status is Status.RUNNING or not message or not last.bytes_up):
        lost = f"{len(last.failures)} of {len(last.asked)} clients sent no usable reply in the last round"
        lost = f"{lost}: {_distinct(last.failures.values())}"
    never = silent - {client_id for record in run.records for client_id in record.asked}
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
        by = " by the callback" if stopped else ""
        status = Status.MAX_ROUNDS
        message = f"stopped{by} after {run.counted} of {limit} rounds: {message or 'raise rounds='}"
    return status, "; ".join(filter(None, (message, fallen)))
