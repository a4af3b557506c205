"""Who is asked in a round: everyone, a fixed number, or each with a probability. Never no one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.stats import binom

from fedppl.settings import between, shown, whole
from fedppl.types import DeclarationError

Participation = Callable[[Sequence[str], np.random.Generator], tuple[str, ...]]


def all_clients(clients: Sequence[str], rng: np.random.Generator) -> tuple[str, ...]:
    """Ask every client every round.

    Parameters
    ----------
    clients
        Ids of the clients.
    rng
        Generator of the round, which is not used.

    Returns
    -------
    tuple of str
        All ids, in their order.

    Raises
    ------
    TypeError
        For `clients` that cannot be iterated over.

    Examples
    --------
    >>> import numpy as np
    >>> all_clients(["a", "b"], np.random.default_rng(0))
    ('a', 'b')

    Notes
    -----
    *When this fails.* A round is as slow as the slowest client, and waits for a client that is away up to the
    ``deadline=`` of the fit.
    """
    return tuple(clients)


def fixed_size(size: int) -> Participation:
    """Ask `size` clients, drawn without replacement.

    Parameters
    ----------
    size
        Number of clients a round, at least 1.

    Returns
    -------
    Callable
        Function of (clients, rng) that returns ids in the clients' order, for ``participation=`` of `fedppl.fit`.

    Raises
    ------
    DeclarationError
        For a `size` that is not a whole number, or below 1.

    Examples
    --------
    >>> import numpy as np
    >>> len(fixed_size(2)(["a", "b", "c"], np.random.default_rng(0)))
    2

    Notes
    -----
    *When this fails.* With a `size` above the number of clients all of them are asked, and nothing is said;
    ``participation=size``, the number itself, is refused then. In few rounds some clients may never be asked: of K
    clients one is left out of all T rounds with the probability (1 − size / K)^T.
    """
    size = whole("size", size)

    def choose(clients: Sequence[str], rng: np.random.Generator) -> tuple[str, ...]:
        chosen = set(rng.choice(len(clients), size=min(size, len(clients)), replace=False).tolist())
        return tuple(client for i, client in enumerate(clients) if i in chosen)

    return choose


def bernoulli(probability: float) -> Participation:
    r"""Ask each client with a probability, given that at least one is asked.

    .. math:: P(A) = \frac{p^{|A|} (1 - p)^{K - |A|}}{1 - (1 - p)^K}, \qquad A \ne \emptyset

    Parameters
    ----------
    probability
        Probability p of each client, above 0 and at most 1.

    Returns
    -------
    Callable
        Function of (clients, rng) that returns ids in the clients' order, for ``participation=`` of `fedppl.fit`.

    Raises
    ------
    DeclarationError
        For a `probability` outside (0, 1].

    Examples
    --------
    >>> import numpy as np
    >>> bernoulli(1.0)(["a", "b", "c"], np.random.default_rng(0))
    ('a', 'b', 'c')

    Notes
    -----
    *When this fails.* Since no round is without clients, each client is asked with probability p / (1 − (1 − p)^K),
    which is well above p where p K is small. The number of clients differs from round to round, and with it the noise
    of algorithms that average.
    """
    probability = between("probability", probability, 0, 1, "(]")

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
        chosen: Any = choose(clients, rng)
        # A text would be read letter by letter, and letters may be clients too.
        asked = None if isinstance(chosen, str | bytes) else tuple(chosen)
    except TypeError as error:
        raise DeclarationError(
            f"{word}= is a function that cannot be used ({error}); pass one of (clients, rng) that returns clients."
        ) from error
    if asked is None or not all(isinstance(client, str) for client in asked):
        raise DeclarationError(
            f"{word}= is a function that returned {shown(chosen)}; return a list of clients' ids, such as clients[:1]."
        )
    return asked


def as_participation(
    value: Participation | int | float | None, word: str = "participation", clients: int | None = None
) -> Participation:
    """Read the keyword: None for all, an int for a fixed size, a float for a probability, or a function.

    Where it is known how many `clients` there are, more than these are refused.
    """
    if value is None:
        return all_clients
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        size = whole(word, value, hint="it is a number of clients a round")
        if clients is not None and size > clients:
            raise DeclarationError(
                f"{word}={size} is more than there are clients, {clients}; pass at most {clients}, a probability such "
                "as 0.5, or None for all."
            )
        return fixed_size(size)
    if isinstance(value, float | np.floating):
        return bernoulli(between(word, value, 0, 1, "(]", "a float is a probability, an int a number of clients"))
    if callable(value):
        return functools.partial(_asked, value, word)
    raise DeclarationError(f"{word}={shown(value)} must be a number of clients, a probability, a function or None.")
