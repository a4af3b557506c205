"""Moments from gradients: a quadratic by Stein's identities, exact moments under it, and what it leaves out.

Under z ~ N(0, I), E[∇g] and E[∇∇ᵀg] = E[∇g zᵀ] are the quadratic that carries a log weight g's effect on mean and
covariance to first order. Gradients at S >= 4 (m + 1) points give it, where values would take more points than it has
coefficients, which grow with m².
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedppl.numerics.importance import WeightedMoments, normalise, pareto_k, weighted_moments
from fedppl.types import Array


class SteinMoments(NamedTuple):
    """Moments of N(0, I) times the weights, and how far to trust them."""

    moments: WeightedMoments
    remainder: float  # sd of the log weights about the quadratic
    pareto_k: float  # of the weights that the quadratic leaves
    error: float  # largest error of a mean to expect, of points and of a quadratic that is far from nought, in sds
    off: Array  # (S, m) what the quadratic leaves of the gradients


def skewness(z: Array, off: Array, root: Array) -> Array:
    """Skewness of every coordinate of root z under the weights, to first order in them, (m,).

    Stein's identity once more: E[(uᵀz)³ g] − 3 E[(uᵀz) g] = E[uᵀ∇g ((uᵀz)² − 1)] for unit vectors u.
    """
    along = (root / np.linalg.norm(root, axis=1)[:, None]).T
    return np.asarray(np.mean((off @ along) * ((z @ along) ** 2 - 1.0), axis=0))


def departure(off: Array, root: Array) -> float:
    """`_importance.departure` from what the quadratic leaves of the gradients, (S, m)."""
    along = off @ (root / np.linalg.norm(root, axis=1)[:, None]).T
    return float(np.sqrt(np.max(np.mean(along**2, axis=0))))


def points_for(size: int, points: int) -> int:
    """Raise the number of points to what the quadratic needs."""
    return max(points, 4 * (size + 1))


def stein_moments(z: Array, log_weights: Array, gradients: Array) -> SteinMoments | None:
    """Moments at whitened points z (S, m) from log weights (S,) and their gradients (S, m); None if not integrable."""
    count, m = z.shape
    linear = gradients.mean(axis=0)
    hessian = gradients.T @ z / count
    hessian = (hessian + hessian.T) / 2
    values, vectors = np.linalg.eigh(np.eye(m) - hessian)
    if values[0] < 0.05:
        return None
    curved = z @ hessian
    rest = log_weights - z @ linear - 0.5 * np.sum(curved * z, axis=1)
    rest = rest - rest.mean()
    weights = normalise(rest)
    # What the weights do to first order is in the quadratic already; the same estimate of it from values is taken out.
    beyond = weighted_moments(z, weights)
    shift = beyond.mean - rest @ z / count
    spread = beyond.covariance - (z * rest[:, None]).T @ z / count
    root = vectors / np.sqrt(values)
    root, inverse = root @ vectors.T, root @ root.T
    covariance = root @ spread @ root.T
    found = WeightedMoments(inverse @ linear + root @ shift, (covariance + covariance.T) / 2)
    if not np.linalg.eigvalsh(found.covariance)[0] > 0:
        return None
    off = gradients - linear - curved
    # What one point adds to the mean by its gradient and by its weight, were points independent; and the remainder's
    # mean gradient under the quadratic, to first order, which is taken to be what it is under N(0, I): zero.
    beyond_first = weights - (1.0 + rest) / count
    parts = (off / count) @ inverse + (beyond_first[:, None] * z) @ root.T
    quadratic = log_weights - rest
    bias = inverse @ (off.T @ (quadratic - quadratic.mean())) / count
    variance = np.sum(parts**2, axis=0) + bias**2
    error = float(np.sqrt(np.max(variance / np.diag(found.covariance))))
    return SteinMoments(found, float(np.std(rest)), pareto_k(rest), error, off)
