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
_SHIFT, _WIDER = 2.5, 2.5  # sds that they are moved by along it, and times that they are as wide
_NONE = np.zeros(0)


class Proposal(NamedTuple):
    """A multivariate t, and how many of its points there are."""

    mean: Array  # (m,)
    root: Array  # (m, m), of x = mean + root z
    per_scramble: int
    sides: Array = _NONE  # (3,) of the first coordinate of z, where it has heavier tails: share of one side, and scales


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

    One for each coordinate whose tails are heavy, and where only directions between axes have them, one in all. Their
    moments are those of the points under weights times squared distance from the mean.
    """
    mean, covariance = weighted_moments(points, weights)
    fourth = weights @ ((points - mean) ** 2 / np.diag(covariance)) ** 2
    order = np.argsort(-fourth, kind="stable")[:_MOST_TAILS]
    heavy = [int(i) for i in order if fourth[i] > _HEAVY * 3.0]
    each = 2 ** int(np.log2(max(count // max(len(heavy), 1), 1)))  # Sobol's points are balanced in such numbers
    if count < 1:
        return ()
    if heavy:
        return tuple(_along(i, points, weights, covariance, each) for i in heavy)
    if not has_heavy_tails(points, weights):
        return ()
    moments = _far(points, weights * _squared_distances(points, weights), covariance)
    return (propose(moments.mean, moments.covariance, count),)


def _far(points: Array, weights: Array, covariance: Array) -> WeightedMoments:
    moments = weighted_moments(points, weights / weights.sum())
    # one far point may have nearly all of these weights
    return moments._replace(covariance=moments.covariance + 0.1 * covariance)


def _along(i: int, points: Array, weights: Array, covariance: Array, count: int) -> Proposal:
    """Best for the second moment of coordinate i: a t with few degrees along it, others as they are out there.

    Each of its sides has the share of the second moment that it has, and is as wide: a logarithm has one long tail.
    A multivariate t of m dimensions falls by m powers more along an axis than its marginal does: hardly any of its
    points are far along one axis and in the middle of all others, which is where independent heavy tails are.
    """
    center = float(weights @ points[:, i])
    shares = weights * (points[:, i] - center) ** 2
    moments = _far(points, shares, covariance)
    order = np.array([i, *(j for j in range(len(covariance)) if j != i)])
    root = np.linalg.cholesky(moments.covariance[np.ix_(order, order)])
    slope = root[:, 0] / root[0, 0]
    root[:, 0] = slope
    root[:, 1:] *= np.sqrt((student.DEGREES - 2.0) / student.DEGREES)
    back, along = np.empty_like(root), np.empty_like(slope)
    back[order], along[order] = root, slope
    is_lower = points[:, i] < center
    share = np.clip(shares[is_lower].sum() / shares.sum(), 0.05, 0.95)
    away = np.abs(points[:, i] - center)
    scales = [_middle(away[side], shares[side]) / student.MIDDLE for side in (is_lower, ~is_lower)]
    return Proposal(moments.mean - along * (moments.mean[i] - center), back, count, np.array([share, *scales]))


def _middle(values: Array, weights: Array) -> float:
    """Half of the weight is below."""
    order = np.argsort(values, kind="stable")
    return float(values[order][np.searchsorted(np.cumsum(weights[order]), 0.5 * weights.sum())])


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
    size, count = len(proposal.mean), proposal.per_scramble
    if len(proposal.sides):
        z = student.points_across(size, count, stream).copy()
        z[:, 0] = student.two_sided(z[:, 0], proposal.sides)
    else:
        z = student.standard_points(size, count, stream)
    return np.asarray(proposal.mean + z @ proposal.root.T)


def log_mixture(proposals: tuple[Proposal, ...], points: Array) -> Array:
    """Log density of the proposals' mixture by their numbers of points, at points (S, m): the balance heuristic."""
    total = sum(one.per_scramble for one in proposals)
    logs = []
    for mean, root, count, sides in proposals:
        z = whitened(points, mean, root)
        log_density = student.log_density_along(z, root, sides) if len(sides) else student.log_density(z, root)
        logs.append(log_density + np.log(count / total))
    return np.asarray(np.logaddexp.reduce(logs, axis=0))


def scrambles(proposals: tuple[Proposal, ...]) -> Array:
    """Which of the independent scrambles each of the proposals' points is of, (S,)."""
    return np.concatenate([np.repeat(np.arange(student.SCRAMBLES), one.per_scramble) for one in proposals])


def whitened(points: Array, mean: Array, root: Array) -> Array:
    """z of points = mean + root z."""
    return np.asarray(np.linalg.solve(root, (points - mean).T).T, dtype=np.float64)
