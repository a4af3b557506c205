"""Who is asked in a round: everyone, a fixed number, or each with a probability. Never no one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import binom

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
    """Ask each client with a probability, given that at least one is asked.

    Examples
    --------
    >>> import numpy as np
    >>> bernoulli(1.0)(["a", "b", "c"], np.random.default_rng(0))
    ('a', 'b', 'c')
    """
    if not 0 < probability <= 1:
        raise DeclarationError(f"participation={probability} must be a probability above 0 and at most 1.")

    def choose(clients: Sequence[str], rng: np.random.Generator) -> tuple[str, ...]:
        # The number asked from the binomial without its zero, so that a small probability is not drawn for ever.
        count = len(clients)
        none = float(binom.pmf(0, count, probability))
        number = int(binom.ppf(none + (1.0 - none) * rng.uniform(), count, probability))
        return fixed_size(min(max(number, 1), count))(clients, rng)

    return choose


def _asked(choose: Participation, word: str, clients: Sequence[str], rng: np.random.Generator) -> tuple[str, ...]:
    """What a function chose, or an error that says what it must be."""
    try:
        return tuple(choose(clients, rng))
    except TypeError as error:
        raise DeclarationError(
            f"{word}= is a function that cannot be used ({error}); pass one of (clients, rng) that returns clients."
        ) from error


def as_participation(value: Participation | int | float | None, word: str = "participation") -> Participation:
    """Read the keyword: None for all, an int for a fixed size, a float for a probability, or a function."""
    if value is None:
        return all_clients
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        if value < 1:
            raise DeclarationError(f"{word}={value} clients a round must be at least 1.")
        return fixed_size(int(value))
    if isinstance(value, float | np.floating):
        if not 0 < value <= 1:
            raise DeclarationError(f"{word}={value} must be a probability above 0 and at most 1.")
        return bernoulli(float(value))
    if callable(value):
        return functools.partial(_asked, value, word)
    raise DeclarationError(f"{word}={value!r}: pass a number of clients, a probability or a function.")
