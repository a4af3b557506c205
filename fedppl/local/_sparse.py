r"""log f_k by sparse grids about the mode, where θ has four to eight coordinates that depend on each other given φ.

.. math:: \int p(y_k, \theta \mid \varphi)\, d\theta = \sum_l w_l\, r(z_l), \qquad \theta = \theta^* + L^{-T} z

Smolyak's combination of Gauss-Hermite rules has some hundred nodes where a product has thousands, and where sampled
ones leave an error. It is for integrands that are near to a normal one times a polynomial: two levels have to agree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from fedppl.contracts import ClientView
from fedppl.local import _marginal
from fedppl.numerics import pairs
from fedppl.numerics.integral import Signed, by_sparse_grid
from fedppl.numerics.pairs import Densities, Laplace
from fedppl.types import Array

FEWEST, MOST = 4, 8  # coordinates
_LEVELS = (4, 5)  # that are taken, each held against the next
_LOOKED_AT = 16  # points at which both are computed


def by_two_levels(client: ClientView, points: Array, center: Array, enough: float) -> tuple[Array, Array] | None:
    """log f_k at points (S, m), NaN where there is no mode, and its errors; None where two levels differ.

    Those at the points where both are computed, of which half may differ by `enough` but for a constant, are errors of
    the points that are near to them.
    """
    about, of = _marginal.near(client, points, center), client.view(_marginal.densities)
    some = np.unique(np.linspace(0, len(points) - 1, _LOOKED_AT).astype(np.int64))
    who, d = np.zeros(len(points), dtype=np.int64), client.local_size
    at = Laplace(*(part[some] for part in about))
    low = summed(of, at, points[some], who[some], by_sparse_grid(d, _LEVELS[0]))
    for level in _LEVELS:
        high = summed(of, at, points[some], who[some], by_sparse_grid(d, level + 1))
        apart = high - low
        told = np.isfinite(apart)
        if np.sum(told) < 0.5 * len(some):
            return None
        varying = np.where(told, apart - np.median(apart[told]), 0.0)
        if 1.48 * np.median(np.abs(varying[told])) < enough:
            values = summed(of, about, points, who, by_sparse_grid(d, level))
            scale = np.maximum(np.std(points, axis=0), 1e-300)
            nearest = cKDTree(points[some] / scale).query(points / scale)[1]
            return values, np.where(np.isfinite(values), varying[nearest], 0.0)
        low = high
    return None


def summed(of: Densities, about: Laplace, phi: Array, who: NDArray[np.int64], rule: Signed) -> Array:
    """Logarithms of integrals, pair by pair (N,), by a rule some of whose weights are negative; NaN of none above 0."""

    def total(terms: Array) -> Array:
        highest = np.max(terms, axis=1, keepdims=True)
        return np.asarray(highest + np.log(np.exp(terms - highest) @ rule.weights[:, None]))

    found = pairs.by_nodes(of, about, phi, who, rule.nodes, total)[:, 0]
    return np.where(np.isfinite(found), found, np.nan)
