"""What an algorithm's functions returned, as arrays of the shape they promise: what fits by size alone is not taken."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedppl.contracts import Draws
from fedppl.settings import shown
from fedppl.types import Array, DeclarationError


def shaped(algorithm: str, function: str, value: Any, shape: tuple[int, ...]) -> Array:
    """Numbers of this shape, or an error that names who returned something else.

    >>> shaped("Mine", "Point.estimate", [1.0, 2.0], (2,))
    array([1., 2.])
    """
    try:
        found = np.asarray(value, dtype=float)
    except (TypeError, ValueError):
        raise DeclarationError(
            f"{algorithm}: {function} returned {shown(value)}; return numbers of shape {shape}."
        ) from None
    if found.shape != shape:
        raise DeclarationError(f"{algorithm}: {function} returned shape {found.shape}; return shape {shape}.")
    return found


def draws_of(algorithm: str, value: Any, leading: tuple[int, int], shared: int, local: int) -> Draws:
    """Draws with axes chain, draw, coordinate."""
    if not isinstance(value, Draws):
        raise DeclarationError(f"{algorithm}: Result.draw returned {shown(value)}; return fedppl.contracts.Draws.")
    return value._replace(
        shared=shaped(algorithm, "Result.draw", value.shared, (*leading, shared)),
        local=shaped(algorithm, "Result.draw", value.local, (*leading, local)),
    )
