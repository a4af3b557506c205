"""Which algorithm a fit has that names none: the call and the declaration decide, once, before the first round."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedppl.contracts import AnyAlgorithm, EngineFactory
from fedppl.engine.answer import require_fit
from fedppl.engine.inprocess import Threads
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.model.client import ClientModel
from fedppl.model.stack import samples
from fedppl.results.fit import Fit
from fedppl.run.participation import Participation
from fedppl.types import DeclarationError

logger = logging.getLogger(__name__)

MOST_SHARED = 20  # coordinates: of more, few points of a proposal have all the weight


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
    """Two algorithms of which clients' models decide, unless the call has said already why not the first."""

    first: AnyAlgorithm
    other: AnyAlgorithm
    why_not: str


def by_call(first: AnyAlgorithm, other: AnyAlgorithm, data: Any, options: Options) -> Choice:
    """What is known before clients are: `first` needs all of them, here, and nothing that single replies tell."""
    given = [name for name in ("participation", "reporting", "deadline") if getattr(options, name) is not None]
    reason, begin = "", options.start
    if data is None or not is_here(options.engine):
        reason = "clients are not in this process, or have a policy"
    elif given:
        reason = f"with {' and '.join(f'{name}=' for name in given)} not all clients may answer in a round"
    elif begin is not None and not (isinstance(begin, Fit) and begin.algorithm.name == first.name):
        reason = "start= is not a fit by it"
    return Choice(first, other, reason)


def is_here(engine: Any) -> bool:
    """Whether clients are in this process, with nothing to refuse."""
    return engine is None or (isinstance(engine, Threads) and engine.policy is None)


def lies_side_by_side(algorithm: Any, engine: Any) -> bool:
    """Whether an algorithm can lay clients side by side where they are."""
    batch = getattr(algorithm, "batch", None)
    return is_here(engine) and batch is not None and batch.stacks is not None


def decided(choice: Choice, models: Mapping[str, ClientModel]) -> AnyAlgorithm:
    """The algorithm, with the reason in the log."""
    reason = choice.why_not or _why_not(choice.first, models)
    if reason:
        logger.info("the fit is by %s, not by %s: %s", choice.other.name, choice.first.name, reason)
        return choice.other
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
