"""What servers share that average over clients: weights that are positive, weighted averages, how far something moved.

A client's reply holds ``weighted``, its weight times what is averaged, and ``weight``, so that sums over the clients
are all that the server needs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedppl.types import Array, Message

_MOST = 1e12  # rows, clients or steps that one reply may stand for


def weighted(value: Array, weight: float) -> dict[str, Array]:
    """What a client sends to be averaged.

    >>> weighted(np.array([1.0, 3.0]), 2.0)
    {'weighted': array([2., 6.]), 'weight': array(2.)}
    """
    return {"weighted": weight * value, "weight": np.array(weight)}


def average(total: Message) -> Array:
    """Weighted average over the clients, from the sums of what they sent.

    >>> average({"weighted": np.array([2.0, 6.0]), "weight": np.array(2.0)})
    array([1., 3.])
    """
    return np.asarray(total["weighted"] / total["weight"])


def not_positive(reply: Message, **least: float) -> str | None:
    """Why a reply is rejected in which a number is not above the least that is given, or None.

    >>> not_positive({"weight": np.array(0.0)}, weight=0)
    "'weight' is 0, and must be positive"
    """
    for name, bound in least.items():
        if not float(reply[name]) > bound:
            return f"{name!r} is {float(reply[name]):.3g}, and must be positive"
    return None


def not_counted(reply: Message, *names: str) -> str | None:
    """Why a reply is rejected in which a number of rows, of clients or of steps is none, or None.

    >>> not_counted({"weight": np.array(0.5)}, "weight")
    "'weight' is 0.5, and must be a whole number from 1 to 1e+12"
    """
    for name in names:
        value = float(reply[name])
        if not 1.0 <= value <= _MOST or value != np.round(value):
            return f"{name!r} is {value:.3g}, and must be a whole number from 1 to {_MOST:.0e}"
    return None


def negative(reply: Message, name: str) -> str | None:
    """Why a reply is rejected in which a distance is negative, or None."""
    value = float(reply[name])
    return None if value >= 0 else f"{name!r} is {value:.3g}, and must not be negative"


def reject_weight(state: Any, reply: Message) -> str | None:
    """A weight must be positive."""
    return not_positive(reply, weight=0)


def relative_change(before: Array, after: Array) -> float:
    """Largest |Δφ| / (1 + |φ|) over coordinates; 0 where there are none.

    >>> relative_change(np.array([0.0, 1.0]), np.array([1.0, 1.0]))
    0.5
    """
    return float(np.max(np.abs(after - before) / (1.0 + np.abs(after)), initial=0.0))


def root_mean_square_change(before: Array, after: Array) -> float:
    """Root mean square of Δφ over coordinates.

    >>> root_mean_square_change(np.zeros(2), np.array([2.0, 2.0]))
    2.0
    """
    return float(np.sqrt(np.mean((after - before) ** 2)))
