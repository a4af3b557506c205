"""What is checked before a run begins, and a run that is ready to begin or to go on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedppl import settings
from fedppl.contracts import AnyAlgorithm, EngineFactory
from fedppl.data.grouped import Table
from fedppl.engine.answer import require_fit, say_unused
from fedppl.engine.inprocess import InProcess
from fedppl.model.client import ClientModel
from fedppl.model.declaration import FederatedModel
from fedppl.model.stack import samples
from fedppl.results.fit import Fit
from fedppl.run._algorithm import require_algorithm
from fedppl.run._run import Run, keep_at
from fedppl.run.choice import Choice, decided
from fedppl.run.participation import Participation, as_participation
from fedppl.run.table import enrolled
from fedppl.storage import checkpoint as checkpoints
from fedppl.types import DeclarationError

# Data by client, rows of one table, or none where an engine finds clients elsewhere.
Clients = Mapping[str, Mapping[str, Any]] | Table | None


def start(
    model: FederatedModel,
    clients: Clients,
    algorithm: AnyAlgorithm | Choice,
    limit: int | None,
    engine: EngineFactory | None,
    participation: Participation | int | float | None,
    reporting: Participation | int | float | None,
    checkpoint: str | Path | None,
    deadline: float | None,
    random_seed: int | np.random.Generator | None,
    begin: Fit | None = None,
) -> Run:
    """Check everything that can be checked before work begins, and resume if there is something to resume."""
    if isinstance(algorithm, Choice) and algorithm.why_not:
        algorithm = decided(algorithm, {})
    first = algorithm.first if isinstance(algorithm, Choice) else algorithm
    require_declared(model, first)
    count = len(clients.client_ids) if isinstance(clients, Table) else None
    count = len(clients) if isinstance(clients, Mapping) else count
    require_settings(limit, participation, reporting, checkpoint, deadline, count)
    if begin is not None:
        _require_start(begin, first)
    if engine is not None and (not callable(engine) or settings.not_called(engine)):
        raise DeclarationError(
            f"engine={settings.shown(engine)} is no engine"
            + (settings.not_called(engine) or "; pass one that is built, like fedppl.InProcess().")
        )
    if checkpoint is not None:
        checkpoints.require_writable(checkpoint)
    seed = seed_of(random_seed)
    models: Mapping[str, ClientModel] = {}
    if isinstance(clients, Table):
        models = enrolled(model, clients, np.random.default_rng((seed, 0)))
    elif clients is not None:
        models = model.enrol(clients, kernel=first.needs.kernel)
    if isinstance(algorithm, Choice):
        algorithm = decided(algorithm, models)
        if algorithm is not first:
            models = dict(models)  # those that are asked one by one are made once
    for client in samples(models):
        require_fit(algorithm, client)
    if models:
        say_unused(algorithm, next(iter(samples(models))))
    moving = (engine or InProcess())(algorithm, models)
    if not callable(getattr(moving, "exchange", None)):
        raise DeclarationError(
            f"engine={settings.shown(engine)} gave {settings.shown(moving)}, which cannot exchange messages; pass one "
            "that is built, like fedppl.InProcess()."
        )
    try:
        run = Run(algorithm, moving, models, seed)
        if (found := tuple(variable.name for variable in run.layout.variables)) != model.shared:
            raise DeclarationError(
                f"the sites share {list(found)}, this model shares {list(model.shared)}; run the same declaration at "
                "the sites and at the server."
            )
        if begin is not None:
            _take_over(run, begin)
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


def _require_start(begin: Any, algorithm: AnyAlgorithm) -> None:
    """Refuse to begin from what is no fit, from a fit by another algorithm, and where nothing can be taken over."""
    if not isinstance(begin, Fit):
        raise DeclarationError(f"start={settings.shown(begin)} must be a fit, or None.")
    if algorithm.result.resume is None:
        raise DeclarationError(
            f"{algorithm.name} begins anew each time; leave start= out. For more rounds on the same data, pass "
            "checkpoint= from the first call on."
        )
    if begin.algorithm.name != algorithm.name:
        raise DeclarationError(f"start= is a fit by {begin.algorithm.name}, and this one is by {algorithm.name}.")


def _take_over(run: Run, begin: Fit) -> None:
    """Begin with what another fit of the same declaration knows."""
    assert run.algorithm.result.resume is not None
    if run.layout.fingerprint != begin.layout.fingerprint:
        raise DeclarationError(
            f"start= is a fit that shares {[v.name for v in begin.layout.variables]}, and this one "
            f"{[v.name for v in run.layout.variables]}, or the same with another prior or shape; start from a fit of "
            "the same declaration."
        )
    run.state = run.algorithm.result.resume(run.state, begin.state)


def require_declared(model: Any, algorithm: Any) -> None:
    """Refuse what is no declaration, and what is no algorithm that is built."""
    if not isinstance(model, FederatedModel):
        remedy = "wrap the builder: FederatedModel(builder, shared=[...])"
        if isinstance(getattr(model, "model", None), FederatedModel):
            remedy = "pass its .model"
        elif isinstance(model, str) and "~" in model:
            remedy = f"declare it: fedppl.formula({model!r})"
        elif isinstance(model, Mapping):
            remedy = "the model comes first, then the data: fedppl.fit(model, data)"
        raise DeclarationError(f"model is {type(model).__name__}; {remedy}.")
    require_algorithm(algorithm)


def require_settings(
    limit: Any, participation: Any, reporting: Any, checkpoint: Any, deadline: Any, count: int | None = None
) -> None:
    """Refuse settings of a run that cannot be meant, for so many clients where that is known; no file is touched."""
    if limit is not None:
        settings.whole("rounds", limit)
    if checkpoint is not None and not isinstance(checkpoint, str | os.PathLike):
        raise DeclarationError(f"checkpoint={settings.shown(checkpoint)} must be the path of a file.")
    as_participation(participation, clients=count), as_participation(reporting, "reporting", count)
    if deadline is not None:
        settings.positive("deadline", deadline, "it is in seconds; None waits for ever")


def require_callback(callback: Any) -> None:
    """Refuse a callback that is no function of one round."""
    if callback is not None and not (callable(callback) and settings.takes(callback, 1)):
        raise DeclarationError(f"callback={settings.shown(callback)} is not a function of one Round; pass one that is.")


def seed_of(random_seed: int | np.random.Generator | None) -> int:
    """The number that all random streams of a run begin with."""
    if random_seed is None:
        return int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
    if isinstance(random_seed, np.random.Generator):
        return int(random_seed.integers(2**63))
    if isinstance(random_seed, int | np.integer) and not isinstance(random_seed, bool) and random_seed >= 0:
        return int(random_seed)
    raise DeclarationError(f"random_seed={random_seed!r} must be a non-negative int, a Generator or None.")
