"""The round loop: a round at a time, or a whole fit; `front` is how users call it.

Engines move messages and algorithms compute; everything in between is in this folder, once.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedppl import settings
from fedppl.contracts import AnyAlgorithm, EngineFactory
from fedppl.model.declaration import FederatedModel
from fedppl.results.arrival import unarrived
from fedppl.results.fit import Fit
from fedppl.run._ending import ending
from fedppl.run._run import Run, save
from fedppl.run.one_round import Round, one_round
from fedppl.run.participation import Participation
from fedppl.run.progress import Progress
from fedppl.run.start import require_callback
from fedppl.run.start import start as begin
from fedppl.types import ConvergenceWarning, DeclarationError, Status

logger = logging.getLogger(__name__)


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
    start: Fit | None = None,
) -> Iterator[Round]:
    """See `fedppl.rounds`."""
    return _all(
        begin(
            model,
            clients,
            algorithm,
            rounds,
            engine,
            participation,
            reporting,
            checkpoint,
            deadline,
            random_seed,
            start,
        )
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
    start: Fit | None = None,
) -> Fit:
    """See `fedppl.fit`."""
    require_callback(callback)
    with Progress(rounds, show=progressbar) as progress:
        progress.say("checking and compiling")
        run = begin(
            model,
            clients,
            algorithm,
            rounds,
            engine,
            participation,
            reporting,
            checkpoint,
            deadline,
            random_seed,
            start,
        )
        run.progress = progress
        progress.say(f"{len(run.clients)} clients are ready")
        started = time.perf_counter()
        try:
            stopped = _followed(run, callback)
        except BaseException:
            run.engine.close()
            raise
    try:
        status, message = ending(run, rounds, stopped=stopped)
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
            declaration=model.knowing({name: client.kind for name, client in run.models.items()}),
            client_ids=run.clients,
            clients=run.models,
            reader=run.engine.reader(),
            records=tuple(run.records),
            status=status,
            message=message,
            personal=_in_order(run.personal, run.clients),
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
    if algorithm.result.tests_convergence and not status.ok:
        warnings.warn(ConvergenceWarning(told, result), stacklevel=3)
    return result


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


def _in_order(values: Mapping[str, Any], clients: tuple[str, ...]) -> dict[str, Any]:
    return {client_id: values[client_id] for client_id in clients if client_id in values}
