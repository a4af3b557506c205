"""A quadrature by trapezoids, held against the one whose nodes lie between its nodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedppl.numerics.integral import Rule, between_trapezoids, by_trapezoids
from fedppl.types import Array

_LOOKED_AT = 16  # points at which both are computed
_ALIKE = 0.001  # log units within which they are the same, but for a constant


def by_two_rules(compute: Callable[[Array, Rule], tuple[Array, Array]], points: Array) -> tuple[Array, Array]:
    """Logarithms of integrals at points (S, m), and what is not known of how they vary.

    What one rule tells of its own error holds for smooth functions. Where both differ at some of the points, as about a
    kink or a spike, they are averaged at all, and half of their difference is an error.
    """
    values, errors = compute(points, by_trapezoids())
    some = np.unique(np.linspace(0, len(points) - 1, _LOOKED_AT).astype(int))
    if _apart(compute(points[some], between_trapezoids())[0] - values[some]) < _ALIKE:
        return values, errors
    half = 0.5 * (compute(points, between_trapezoids())[0] - values)
    known = np.isfinite(half)
    middle = np.median(half[known]) if np.any(known) else 0.0
    return values + half, np.where(known, errors + half - middle, 0.0)


def _apart(differences: Array) -> float:
    known = differences[np.isfinite(differences)]
    return float(np.max(np.abs(known - np.median(known)))) if len(known) else 0.0
