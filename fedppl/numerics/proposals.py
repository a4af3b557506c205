"""Where the points of a correction lie: multivariate t's around q or around what was found, and out into its tails."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedppl.numerics import student
from fedppl.numerics.importance import weighted_moments
from fedppl.types import Array

_SKEWED = 0.15  # skewness from which a coordinate has points of its own in its longer tail
_MOST_TAILS = 6
_HEAVY = 1.2  # times a normal's fourth moment
_SHIFT, _WIDER = 2.5, 2.5  # sds that they are moved by along it, and times that they are as wide


class Proposal(NamedTuple):
    """A multivariate t, and how many of its points there are."""

    mean: Array  # (m,)
    root: Array  # (m, m), lower-triangular
    per_scramble: int


def propose(mean: Array, covariance: Array, count: int) -> Proposal:
    """The t with these moments."""
    scale = (student.DEGREES - 2.0) / student.DEGREES
    return Proposal(mean, np.asarray(np.linalg.cholesky(covariance * scale), dtype=np.float64), count)


def with_tails(mean: Array, covariance: Array, count: int, skewness: Array) -> tuple[Proposal, ...]:
    """The t with these moments, and where coordinates are skewed as many points again along their longer tails.

    The logarithm of a scale has a tail that falls as exp(x) only, along that coordinate alone: of the points of a t in
    several dimensions hardly any lie there, and an error that comes from the points does not show what is missing.
    """
    order = np.argsort(-np.abs(skewness), kind="stable")[:_MOST_TAILS]
    tails = [int(i) for i in order if abs(skewness[i]) > _SKEWED and count > 1]
    each = 2 ** int(np.log2(max(count // 2 / max(len(tails), 1), 1.0)))  # Sobol's points are balanced in such numbers
    found = [propose(mean, covariance, count - count // 2 if tails else count)]
    for i in tails:
        shifted, wider = mean.copy(), covariance.copy()
        shifted[i] += np.sign(skewness[i]) * _SHIFT * np.sqrt(covariance[i, i])
        wider[i, i] *= _WIDER**2
        found.append(propose(shifted, wider, each))
    return tuple(found)


def beyond(points: Array, weights: Array, count: int) -> tuple[Proposal, ...]:
    """Where weighted points (S, m) have heavy tails, the t that is best for second moments; nothing elsewhere.

    Its moments are those of the points under weights times squared distance from their mean.
    """
    squared = _squared_distances(points, weights)
    if not _is_heavy(squared, weights, points.shape[1]) or count < 1:
        return ()
    mean, covariance = weighted_moments(points, weights * squared / (weights @ squared))
    # one far point may have nearly all of these weights
    return (propose(mean, covariance + 0.1 * weighted_moments(points, weights).covariance, count),)


def has_heavy_tails(points: Array, weights: Array) -> bool:
    """Whether fourth moments of weighted points (S, m) exceed a normal's: Mardia's kurtosis."""
    return _is_heavy(_squared_distances(points, weights), weights, points.shape[1])


def _squared_distances(points: Array, weights: Array) -> Array:
    mean, covariance = weighted_moments(points, weights)
    root = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
    return np.asarray(np.sum(whitened(points, mean, root) ** 2, axis=1))


def _is_heavy(squared: Array, weights: Array, m: int) -> bool:
    return bool(weights @ squared**2 > _HEAVY * m * (m + 2))


def points_of(proposal: Proposal, stream: int) -> Array:
    """Points of a proposal, scramble after scramble, (scrambles x count, m)."""
    t = student.standard_points(len(proposal.mean), proposal.per_scramble, stream)
    return np.asarray(proposal.mean + t @ proposal.root.T)


def log_mixture(proposals: tuple[Proposal, ...], points: Array) -> Array:
    """Log density of the proposals' mixture by their numbers of points, at points (S, m): the balance heuristic."""
    total = sum(count for _, _, count in proposals)
    logs = [
        student.log_density(whitened(points, mean, root), root) + np.log(count / total)
        for mean, root, count in proposals
    ]
    return np.asarray(np.logaddexp.reduce(logs, axis=0))


def scrambles(proposals: tuple[Proposal, ...]) -> Array:
    """Which of the independent scrambles each of the proposals' points is of, (S,)."""
    return np.concatenate([np.repeat(np.arange(student.SCRAMBLES), count) for _, _, count in proposals])


def whitened(points: Array, mean: Array, root: Array) -> Array:
    """z of points = mean + root z."""
    return np.asarray(np.linalg.solve(root, (points - mean).T).T, dtype=np.float64)
