"""Who is asked in a round: everyone, a fixed number, or each with a probability. Never no one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedppl.types import DeclarationError

__all__ = ["Participation", "all_clients", "as_participation", "bernoulli", "fixed_size"]

Participation = Callable[[Sequence[str], np.random.Generator], tuple[str, ...]]


def all_clients(clients: Sequence[str], rng: np.random.Generator) -> tuple[str, ...]:
    """Ask every client every round."""
    del rng
    return tuple(clients)


def fixed_size(size: int) -> Participation:
    """Ask `size` clients, drawn without replacement.

    Examples
    --------
    >>> import numpy as np
    >>> len(fixed_size(2)(["a", "b", "c"], np.random.default_rng(0)))
    2
    """
    if size < 1:
        raise DeclarationError(f"participation={size} clients a round must be at least 1.")

    def choose(clients: Sequence[str], rng: np.random.Generator) -> tuple[str, ...]:
        chosen = set(rng.choice(len(clients), size=min(size, len(clients)), replace=False).tolist())
        return tuple(client for i, client in enumerate(clients) if i in chosen)

    return choose


def bernoulli(probability: float) -> Participation:
    """Ask each client with a probability; an empty round is drawn again."""
    if not 0 < probability <= 1:
        raise DeclarationError(f"participation={probability} must be a probability above 0 and at most 1.")

    def choose(clients: Sequence[str], rng: np.random.Generator) -> tuple[str, ...]:
        while True:
            asked = rng.uniform(size=len(clients)) < probability
            if np.any(asked):
                return tuple(client for client, ask in zip(clients, asked, strict=True) if ask)

    return choose


def as_participation(value: Participation | int | float | None) -> Participation:
    """Read the keyword: None for all, an int for a fixed size, a float for a probability, or a function."""
    if value is None:
        return all_clients
    if isinstance(value, bool):
        raise DeclarationError(f"participation={value}: pass a number of clients, a probability or a function.")
    if isinstance(value, int):
        return fixed_size(value)
    if isinstance(value, float):
        return bernoulli(value)
    return value
