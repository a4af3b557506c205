"""Where the points of a correction lie: multivariate t's around q or around what was found, and out into its tails."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedppl.numerics import student
from fedppl.numerics.importance import WeightedMoments, weighted_moments
from fedppl.types import Array

_SKEWED = 0.15  # skewness from which a coordinate has points of its own in its longer tail
_MOST_TAILS = 6
_HEAVY = 1.2  # times a normal's fourth moment
_LEAST_SHARE = 0.1  # of a coordinate's second moment, with which one of its sides has points of its own
_SHIFT, _WIDER = 2.5, 2.5  # sds that they are moved by along it, and times that they are as wide


class Proposal(NamedTuple):
    """A multivariate t, and how many of its points there are."""

    mean: Array  # (m,)
    root: Array  # (m, m), of x = mean + root z
    per_scramble: int
    is_along: bool = False  # whether the first coordinate of z is positive, and has heavier tails by itself


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
    """Where weighted points (S, m) have heavy tails, the t's that are best for second moments; nothing elsewhere.

    One in all directions, whose moments are those of the points under weights times squared distance from the mean; and
    where single coordinates have heavy tails, as many points again along these.
    """
    mean, covariance = weighted_moments(points, weights)
    fourth = weights @ ((points - mean) ** 2 / np.diag(covariance)) ** 2
    order = np.argsort(-fourth, kind="stable")[:_MOST_TAILS]
    heavy = [int(i) for i in order if fourth[i] > _HEAVY * 3.0]
    if count < 1 or not (heavy or has_heavy_tails(points, weights)):
        return ()
    each = 2 ** int(np.log2(max(count // max(4 * len(heavy), 1), 1)))  # Sobol's points are balanced in such numbers
    moments = _far(points, weights * _squared_distances(points, weights), covariance)
    sides = [_along(i, sign, points, weights, covariance, each) for i in heavy for sign in (-1.0, 1.0)]
    along = tuple(one for one in sides if one is not None)
    return propose(moments.mean, moments.covariance, max(1, count // 2) if along else count), *along


def _far(points: Array, weights: Array, covariance: Array) -> WeightedMoments:
    moments = weighted_moments(points, weights / weights.sum())
    # one far point may have nearly all of these weights
    return moments._replace(covariance=moments.covariance + 0.1 * covariance)


def _along(i: int, sign: float, points: Array, weights: Array, covariance: Array, count: int) -> Proposal | None:
    """Best for the second moment of coordinate i on one side of its mean; None where that side has hardly any of it.

    Along it a t with few degrees, across it what the points have out there: in a funnel the log of a scale is larger on
    both sides of a location. A multivariate t of m dimensions falls by m powers more along an axis than its marginal
    does: hardly any of its points are far along one axis and in the middle of all others, where independent tails are.
    """
    away = sign * (points[:, i] - weights @ points[:, i])
    shares = weights * away**2
    is_here = away > 0
    if shares[is_here].sum() < _LEAST_SHARE * shares.sum():
        return None
    shares = np.where(is_here, shares, 0.0)
    moments = _far(points, shares, covariance)
    order = np.array([i, *(j for j in range(len(covariance)) if j != i)])
    root = np.linalg.cholesky(moments.covariance[np.ix_(order, order)])
    slope = root[:, 0] / root[0, 0]
    nearest = np.argsort(away, kind="stable")
    middle = away[nearest][np.searchsorted(np.cumsum(shares[nearest]), 0.5 * shares.sum())]
    root[:, 0] = slope * sign * middle / student.MIDDLE
    root[:, 1:] *= np.sqrt((student.DEGREES - 2.0) / student.DEGREES)
    back, along = np.empty_like(root), np.empty_like(slope)
    back[order], along[order] = root, slope
    start = moments.mean - along * (moments.mean[i] - weights @ points[:, i])
    return Proposal(start, back, count, is_along=True)


def has_heavy_tails(points: Array, weights: Array) -> bool:
    """Whether fourth moments of weighted points (S, m) exceed a normal's: Mardia's kurtosis."""
    m = points.shape[1]
    return bool(weights @ _squared_distances(points, weights) ** 2 > _HEAVY * m * (m + 2))


def _squared_distances(points: Array, weights: Array) -> Array:
    mean, covariance = weighted_moments(points, weights)
    root = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
    return np.asarray(np.sum(whitened(points, mean, root) ** 2, axis=1))


def points_of(proposal: Proposal, stream: int) -> Array:
    """Points of a proposal, scramble after scramble, (scrambles x count, m)."""
    standard = student.points_along if proposal.is_along else student.standard_points
    z = standard(len(proposal.mean), proposal.per_scramble, stream)
    return np.asarray(proposal.mean + z @ proposal.root.T)


def log_mixture(proposals: tuple[Proposal, ...], points: Array) -> Array:
    """Log density of the proposals' mixture by their numbers of points, at points (S, m): the balance heuristic."""
    total = sum(one.per_scramble for one in proposals)
    logs = []
    for mean, root, count, is_along in proposals:
        log_density = student.log_density_along if is_along else student.log_density
        logs.append(log_density(whitened(points, mean, root), root) + np.log(count / total))
    return np.asarray(np.logaddexp.reduce(logs, axis=0))


def scrambles(proposals: tuple[Proposal, ...]) -> Array:
    """Which of the independent scrambles each of the proposals' points is of, (S,)."""
    return np.concatenate([np.repeat(np.arange(student.SCRAMBLES), one.per_scramble) for one in proposals])


def whitened(points: Array, mean: Array, root: Array) -> Array:
    """z of points = mean + root z."""
    return np.asarray(np.linalg.solve(root, (points - mean).T).T, dtype=np.float64)
