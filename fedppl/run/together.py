"""A fit of many clients at once, where all are in this process, rows of one table, and of one compiled density.

Some clients, chosen at random, are enrolled and fitted as any others are, with every check and refusal; what they share
serves all. Who cannot be fitted so is told why, and asked one by one.
"""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.contracts import AnyAlgorithm, Posterior, Report
from fedppl.contracts.many import Passed
from fedppl.data.grouped import Table
from fedppl.engine.answer import require_fit
from fedppl.local.many import cores, moments, ways, without_density
from fedppl.model.declaration import FederatedModel
from fedppl.model.stack import ClientsOf, Stack, stacked, why_not
from fedppl.results import departure
from fedppl.results.fit import Fit
from fedppl.results.records import Record
from fedppl.run._algorithm import numbers_and_texts
from fedppl.run._prior_check import contradicted
from fedppl.run._run import Run
from fedppl.run.loop import says_stop
from fedppl.run.one_round import Round, one_round
from fedppl.run.progress import Progress
from fedppl.run.start import require_callback, seed_of, start
from fedppl.types import Array, ConvergenceWarning, Status

logger = logging.getLogger(__name__)

FEWEST = 50  # clients from which loops over all of them are worth their compiling
_FIRST = 128  # clients that the search begins with
_LARGE = 8.0  # times the median's rows: where other modes are, such clients decide
_JUDGED_BY = 4  # clients that tell whether there is a way to integrate what is their own
_ROUNDS = 80  # in which these are to be fitted
_MOST_SHARED = 20  # coordinates, as for a correction: a quadratic of more has too many coefficients
_MOST_ONE_BY_ONE = 20_000  # clients that are asked one by one where they cannot be fitted at once


def fit(
    model: FederatedModel,
    table: Table,
    algorithm: AnyAlgorithm,
    *,
    callback: Callable[[Round], bool | None] | None,
    progressbar: bool,
    random_seed: int | np.random.Generator | None,
) -> Fit | None:
    """Fit all clients at once, or None where that cannot be; the log says why.

    Raises
    ------
    DeclarationError, DataError
        As `fedppl.fit` does.
    """
    assert algorithm.together is not None and isinstance(algorithm.result.shared, Posterior)
    require_callback(callback)
    started, seed = time.perf_counter(), seed_of(random_seed)
    rng = np.random.default_rng((seed, 0))
    chosen = np.sort(_chosen(table.counts, rng))
    with Progress(show=progressbar, what="Pass") as progress:
        progress.say(f"checking and compiling; {len(chosen)} of {len(table.client_ids)} clients are fitted first")
        few = start(
            model,
            _data(table, chosen),
            algorithm,
            limit=None,
            engine=None,
            participation=None,
            reporting=None,
            checkpoint=None,
            deadline=None,
            random_seed=seed,
        )
        try:
            stack = _stack(model, table, few, chosen)
            if stack is None:
                return None
            if not _arrived(few):
                _one_by_one(table, "the first clients' search did not arrive")
                return None
        finally:
            few.engine.close()
        state = algorithm.init(stack.layout, stack.client_ids, np.random.default_rng((seed, 1)))
        records: list[Record] = []
        last, since = None, time.perf_counter()
        try:
            for last in algorithm.together(stack, state, few.state, len(chosen), rng, cores()):
                seconds = time.perf_counter() - since
                records.append(_record(len(records) + 1, last, seconds))
                told = f"{last.clients} clients: {last.report.message or last.report.status.value}"
                logger.info("pass %d: %s, %.1f s", len(records), told, seconds, extra={"round": len(records)})
                progress.update(len(records), told)
                step = Round(len(records), last.state, last.report.info, last.report.status, told, records[-1])
                if callback is not None and says_stop(callback(step), step.number) and last.state is None:
                    last = _stopped(last, Status.MAX_ROUNDS, f"the callback after pass {step.number}")
                    break
                since = time.perf_counter()
        except KeyboardInterrupt:
            if last is None:  # there is nothing to give
                raise
            if last.state is None:
                last = _stopped(last, Status.INTERRUPTED, f"Ctrl-C after pass {len(records)}")
    assert last is not None
    if last.state is None and last.report.status is Status.STALLED and len(stack) <= _MOST_ONE_BY_ONE:
        _one_by_one(table, str(last.report.message))
        return None
    message = last.report.message or ""
    if last.report.status in (Status.STALLED, Status.MAX_ROUNDS):
        message = "; ".join(filter(None, (model.advice, message)))
    if last.report.status is Status.CONVERGED and last.state is not None:
        mean = gaussian.mean(algorithm.result.shared.gaussian(last.state))
        message = "; ".join(filter(None, (message, contradicted(list(few.models.values()), mean))))
    found = Fit(
        algorithm=algorithm,
        state=state if last.state is None else last.state,
        layout=stack.layout,
        declaration=model,
        client_ids=stack.client_ids,
        clients=ClientsOf(stack, functools.partial(moments, nodes=last.way, workers=cores())),
        reader=stack.like.reader(),
        records=tuple(records),
        status=last.report.status,
        message=message,
        personal={},
        seed=seed,
        seconds=time.perf_counter() - started,
    )
    if found.status is not Status.CONVERGED:
        said = f"fit ended with status {found.status.value}: {found.message}"
        warnings.warn(ConvergenceWarning(said, found), stacklevel=3)
    return found


def _stopped(last: Passed, status: Status, what: str) -> Passed:
    """A last pass that is not the end of the search: there is no posterior yet."""
    return Passed(last.clients, Report(last.report.info, status, f"stopped by {what}, before there was a posterior"))


def _one_by_one(table: Table, reason: str) -> None:
    """Say why clients are not asked at once; of very many that is a matter of hours."""
    count = len(table.client_ids)
    level = logging.WARNING if count > _MOST_ONE_BY_ONE else logging.INFO
    logger.log(level, "%d clients are asked one by one, not all at once: %s", count, reason)


def _chosen(counts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Clients to begin with: some at random, and in the place of some of these, those that have far more rows."""
    chosen: NDArray[np.int64] = rng.choice(len(counts), min(_FIRST, len(counts)), replace=False).astype(np.int64)
    large = np.argsort(-counts, kind="stable")[: _FIRST // 4]
    large = large[counts[large] > _LARGE * np.median(counts)]
    others = chosen[~np.isin(chosen, large)]
    return np.concatenate([large, others[: len(chosen) - len(large)]]).astype(np.int64)


def _data(table: Table, places: NDArray[np.int64]) -> dict[str, dict[str, Array]]:
    return {table.client_ids[k]: table.rows(int(k)) for k in places}


def _stack(model: FederatedModel, table: Table, few: Run, chosen: NDArray[np.int64]) -> Stack | None:
    """All clients, checked as one; None where they are none of one kind, which the log tells."""
    counts = table.counts
    extremes = {int(np.argmin(counts)), int(np.argmax(counts))} - set(map(int, chosen))
    models = dict(few.models)
    if extremes:  # numbers of rows tell which lengths follow them
        models |= model.enrol(_data(table, np.array(sorted(extremes))))
    clients = list(models.values())
    for client in clients[-len(extremes) :] if extremes else ():
        require_fit(few.algorithm, client)
    reason = why_not(clients)
    if few.layout.size > _MOST_SHARED:
        reason = f"they share {few.layout.size} coordinates, and {_MOST_SHARED} are the most"
    elif not reason and not ways(clients[:_JUDGED_BY]):
        reason = "several local variables depend on each other"
    if reason:
        _one_by_one(table, reason)
        return None
    stack = stacked(model, table, clients[0])
    phi = np.ascontiguousarray(clients[0].template.functions["shared start"])
    for k in without_density(stack, phi, cores())[:1]:
        model.enrol(_data(table, np.array([k])))  # who enrols it alone says what is wrong with it
    return stack


def _arrived(few: Run) -> bool:
    """Fit the first clients until there is a q; whether that came to an end."""
    for _ in range(_ROUNDS):
        done = one_round(few)
        if done.status is not Status.RUNNING or not few.algorithm.result.preliminary(few.state):
            return done.status is Status.RUNNING or departure.matched(done.status, done.message)
    return False


def _record(number: int, passed: Passed, seconds: float) -> Record:
    return Record(
        number=number,
        asked=(),
        failures={},
        infos={},
        info=numbers_and_texts(passed.report.info),
        bytes_down={},
        bytes_up={},
        released="",
        seconds=seconds,
        status=passed.report.status,
        message=passed.report.message or "",
        together=passed.clients,
    )
