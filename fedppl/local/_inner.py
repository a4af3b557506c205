r"""What Laplace's approximation over θ leaves out of log f_k, as a quadratic in φ.

.. math:: \Delta(\phi) = \log \int p(y_k, \theta \mid \phi)\, d\theta - \log f_k^{\text{Laplace}}(\phi)

The integral is adaptive: Gauss-Hermite nodes around the mode of θ, in units of the curvature there, up to three
coordinates, and quasi-random points with importance weights beyond. The same nodes serve all φ, so that what they miss
is smooth in φ and mostly a constant, which moves no moment; random points are nearly always of a client's own, so that
errors of clients do not add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedppl.numerics.importance import whitened_points
from fedppl.numerics.integral import SIZES, Rule, by_grid, by_points
from fedppl.types import Array

_POINTS = 256  # where a grid has too many coordinates
# Relative ESS of importance weights below which they say nothing, and above which all; in between Δ counts in part, so
# that it comes and goes without a jump. So it does by the share of the integral that outermost nodes have, beyond which
# there may be as much again.
_NOTHING, _ALL = 0.1, 0.3
_MOST, _LITTLE = 0.3, 0.15
_QUADRATIC = 8  # shared coordinates up to which Δ is a quadratic; beyond, a linear function
_ROUNDING = 1e-7
_CURVED = 1e-3  # Δ, in log units at one sd of q, from which its curvature is looked at

Difference = Callable[[Array], Array]


class LeftOut(NamedTuple):
    """Δ about q as far as it is known."""

    difference: Difference | None  # a quadratic, in points (S, m); None where it is nothing, or not known
    trust: float  # the part of Δ that it is, by how well it is known: 0 where nothing is known


def rule_of(size: int, stream: int) -> Rule:
    """A grid of few coordinates, points of the client's stream of more."""
    return by_grid(size, SIZES[size]) if size in SIZES else by_points(size, _POINTS, stream)


def trusted(found: Array, relative: Array, shares: Array, size: int) -> tuple[Array, float] | None:
    """Δ at points (S,) by a rule's integrals, and how far to trust it; None where one is not known."""
    if not np.all(np.isfinite(found)):
        return None
    if size in SIZES:
        return found, float(np.clip((_MOST - shares[:, 1].max()) / (_MOST - _LITTLE), 0.0, 1.0))
    if relative.min() < _NOTHING:
        return None
    return found, float(np.clip((relative.min() - _NOTHING) / (_ALL - _NOTHING), 0.0, 1.0))


def left_out(
    difference: Callable[[Array], tuple[Array, float] | None], mean: Array, root: Array, stream: int
) -> LeftOut:
    """Δ about q = N(mean, root rootᵀ), up to a constant, from its values at points (S, m) and how far to trust them."""
    m = len(mean)
    z = whitened_points(m, 2 * (m + 1), stream)
    known = difference(mean + z @ root.T)
    if known is None:
        return LeftOut(None, 0.0)
    found, trust = known
    linear, curved = found @ z / len(z), np.zeros((m, m))  # of antithetic points: what is even in z drops out
    half = len(z) // 2
    even = float(np.std((found[:half] + found[half:]) / 2))
    if max(float(np.linalg.norm(linear)), even) < _ROUNDING:
        return LeftOut(None, 1.0)
    if m <= _QUADRATIC and max(float(np.linalg.norm(linear)), even) > _CURVED:
        z = whitened_points(m, (m + 1) * (m + 2), stream)
        again = difference(mean + z @ root.T)
        if again is not None:
            rows, columns = np.triu_indices(m)
            design = np.concatenate([np.ones((len(z), 1)), z, z[:, rows] * z[:, columns]], axis=1)
            coefficients = np.linalg.lstsq(design, again[0], rcond=None)[0]
            linear, curved[rows, columns] = coefficients[1 : 1 + m], coefficients[1 + m :]
            trust = min(trust, again[1])
    inverse = np.linalg.inv(root)

    def quadratic(phi: Array) -> Array:
        white = (phi - mean) @ inverse.T
        return np.asarray(trust * (white @ linear + np.sum((white @ curved) * white, axis=1)))

    return LeftOut(quadratic, trust)
