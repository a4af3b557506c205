"""What is refused before a grid or a search begins."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fedppl.contracts import AnyAlgorithm
from fedppl.engine.answer import require_fit
from fedppl.model.declaration import FederatedModel
from fedppl.run.start import require_declared
from fedppl.search.loss import Clients, Loss, require_held_out
from fedppl.settings import shown
from fedppl.types import DeclarationError


def require_keywords(build: Callable[..., AnyAlgorithm], values: Mapping[str, Any]) -> None:
    """Refuse settings that a function does not have, and too few of them, where its signature can be read."""
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**values)
    except TypeError as error:
        raise DeclarationError(
            f"{shown(build)} cannot be called with the settings {list(values)}: {error}; it takes "
            f"{', '.join(signature.parameters)}. Fix what is common by functools.partial."
        ) from error


def require_usable(
    model: FederatedModel,
    clients: Clients,
    algorithms: Mapping[str, AnyAlgorithm],
    validation: Clients,
    loss: Loss | None,
) -> None:
    """Refuse before the first fit what would else be refused after some of them: candidates, and validation data."""
    for name, algorithm in algorithms.items():
        with named(name):
            require_declared(model, algorithm)
    kernel = any(algorithm.needs.kernel for algorithm in algorithms.values())
    models = model.enrol(clients, kernel=kernel)
    for name, algorithm in algorithms.items():
        with named(name):
            for client in models.values():
                require_fit(algorithm, client)
    for client_id, data in validation.items():
        require_held_out(model, models[str(client_id)], data, loss, kernel=kernel)


@contextlib.contextmanager
def named(candidate: str) -> Iterator[None]:
    """Say which candidate an error is about."""
    try:
        yield
    except DeclarationError as error:
        raise DeclarationError(f"candidate {candidate!r}: {error}") from error
