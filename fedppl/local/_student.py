"""Importance sampling from a multivariate t that is fitted anew to its own weighted points.

For a density that a Gaussian q does not cover: one client alone, or one whose factor hardly overlaps with q.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedppl.numerics import student
from fedppl.numerics.importance import WeightedMoments, effective_size, normalise, weighted_moments
from fedppl.numerics.pareto import pareto_k
from fedppl.numerics.student import DEGREES, SCRAMBLES, standard_points
from fedppl.types import Array

_FITS = 8
_FIRST, _LAST = 256, 1024  # points a scramble, while it is fitted and in the end
_LEAST = 50  # points that must be left of the weights, for each coefficient of a mean


class StudentSample(NamedTuple):
    """Weighted points of the density, and how far to trust them."""

    points: Array  # (S, m)
    log_proposal: Array  # (S,) log density of the t at the points
    log_weights: Array  # (S,)
    moments: WeightedMoments
    ess: float
    pareto_k: float
    error: float  # largest standard error of a mean, in sds


def sample(
    log_density: Callable[[Array], Array], mean: Array, covariance: Array, stream: int, limit: float
) -> StudentSample | None:
    """Weighted points of exp(log_density), from (m,) and (m, m) to begin with; None where none can be trusted."""
    m = len(mean)
    if SCRAMBLES * _LAST < _LEAST * (m + 1):
        return None
    found = None
    for fit in range(_FITS):
        found = _weighted(log_density, mean, covariance, _FIRST, stream)
        if found is None:
            return None
        settled = found.pareto_k < limit and found.ess > 0.3 * len(found.points)
        mean, covariance = found.moments
        if found.ess < 10 * m:  # too few to say how wide: their own spread, and part of the proposal's
            covariance = covariance + 0.5 * np.diag(np.diag(covariance)) / max(found.ess / m, 1.0)
        if settled and fit > 0:
            break
    found = _weighted(log_density, mean, covariance, _LAST, stream)
    if found is None or found.pareto_k > limit or found.ess < _LEAST * (m + 1) or not found.error < 0.1:
        return None
    return found


def _weighted(
    log_density: Callable[[Array], Array], mean: Array, covariance: Array, count: int, stream: int
) -> StudentSample | None:
    m = len(mean)
    try:
        root = np.asarray(np.linalg.cholesky(covariance * (DEGREES - 2.0) / DEGREES), dtype=np.float64)
    except np.linalg.LinAlgError:
        return None
    t = standard_points(m, count, stream)
    points = mean + t @ root.T
    log_proposal = student.log_density(t, root)
    log_weights = log_density(points) - log_proposal
    if not np.any(np.isfinite(log_weights)):
        return None
    log_weights = np.where(np.isfinite(log_weights), log_weights, -np.inf)
    weights = normalise(log_weights)
    moments = weighted_moments(points, weights)
    sd = np.sqrt(np.maximum(np.diag(moments.covariance), 1e-300))
    # Each scramble is a sample of its own: with self-normalised weights, the spread of Σ w (x − mean) over them.
    parts = (weights[:, None] * (points - moments.mean)).reshape(SCRAMBLES, count, m).sum(axis=1)
    error = float(np.max(np.sqrt(SCRAMBLES * parts.var(axis=0, ddof=1)) / sd))
    return StudentSample(
        points, log_proposal, log_weights, moments, effective_size(weights), pareto_k(log_weights), error
    )
