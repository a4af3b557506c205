"""Where the points of a correction lie: multivariate t's around q or around what was found, and out into its tails."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl.numerics import region
from fedppl.numerics.importance import WeightedMoments, weighted_moments
from fedppl.types import Array

_SKEWED = 0.15  # skewness from which a coordinate has points of its own in its longer tail
_MOST_TAILS = 6
_HEAVY = 1.2  # times a normal's fourth moment
_LEAST_SHARE = 0.1  # of a coordinate's second moment, with which one of its sides has points of its own
# Degrees along a side: those with which second moments of a t with more than 2.5 have a variance, where nine tenths of
# a second moment reach more than so many times as far as half of it; else those of tails that fall faster.
_OF_POWERS, _POWER, _OF_OTHERS = 1.0, 2.5, 3.0
_FEW = 0.1  # of a covariance that is added out there: one far point may have nearly all of the weights
_SHIFT, _WIDER = 2.5, 2.5  # sds that they are moved by along it, and times that they are as wide


class Proposal(NamedTuple):
    """A multivariate t, and how many of its points there are; or points along one side of a coordinate.

    There z₁ ≥ 0 has heavier tails by itself, and x = mean + root z + bend log(1 + z₁): in a funnel the log of a scale
    rises with the log of a location's distance, along correlated tails a coordinate rises with the distance itself.
    """

    mean: Array  # (m,)
    root: Array  # (m, m), of x = mean + root z
    per_scramble: int
    bend: Array = np.zeros(0)  # (m,) for points along a side; (0,) for a t
    degrees: float = 0.0  # of z₁ along a side


def propose(mean: Array, covariance: Array, count: int) -> Proposal:
    """The t with these moments."""
    scale = (region.DEGREES - 2.0) / region.DEGREES
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
    return moments._replace(covariance=moments.covariance + _FEW * covariance)


def _along(i: int, sign: float, points: Array, weights: Array, covariance: Array, count: int) -> Proposal | None:
    """Best for the second moment of coordinate i on one side of its mean; None where that side has hardly any of it.

    Along it a t with few degrees, across it what the points have out there. A multivariate t of m dimensions falls by m
    powers more along an axis than its marginal does: hardly any of its points are far along one axis and in the middle
    of all others, where independent tails are.
    """
    away = sign * (points[:, i] - weights @ points[:, i])
    is_here = away > 0
    shares = np.where(is_here, weights * away**2, 0.0)
    if shares.sum() < _LEAST_SHARE * (weights @ away**2):
        return None
    nearest = np.argsort(away, kind="stable")
    reached = np.searchsorted(np.cumsum(shares[nearest]), [0.5 * shares.sum(), 0.9 * shares.sum()])
    middle, far = away[nearest][reached]
    degrees = _OF_POWERS if far > _POWER * middle else _OF_OTHERS
    scale = float(middle) / region.middle(degrees)
    m = len(covariance)
    start, along, bend, root = points[0].copy(), np.zeros(m), np.zeros(m), np.zeros((m, m))
    start[i], along[i] = weights @ points[:, i], sign * scale
    others = [j for j in range(m) if j != i]
    shares, z = shares[is_here] / shares.sum(), away[is_here] / scale
    left = np.zeros((len(z), len(others)))
    for place, j in enumerate(others):
        straight, bent = (_line(feature, points[is_here, j], shares) for feature in (z, np.log1p(z)))
        is_bent = shares @ bent.left**2 < shares @ straight.left**2
        start[j], (bend if is_bent else along)[j], left[:, place] = bent if is_bent else straight
    root[:, 0] = along
    if others:
        spread = (left * shares[:, None]).T @ left + _FEW * covariance[np.ix_(others, others)]
        root[others, 1:] = np.linalg.cholesky(spread * (region.DEGREES - 2.0) / region.DEGREES)
    return Proposal(start, root, count, bend, degrees)


class _Line(NamedTuple):
    intercept: float
    slope: float
    left: Array  # (S,) of y


def _line(x: Array, y: Array, weights: Array) -> _Line:
    x_mean, y_mean = weights @ x, weights @ y
    slope = (weights @ ((x - x_mean) * (y - y_mean))) / ((1.0 + _FEW) * (weights @ (x - x_mean) ** 2) + 1e-300)
    return _Line(float(y_mean - slope * x_mean), float(slope), y - y_mean - slope * (x - x_mean))


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
    mean, root, count, bend, degrees = proposal
    if not len(bend):
        return np.asarray(mean + region.standard_points(len(mean), count, stream) @ root.T)
    z = region.points_along(len(mean), count, stream, degrees)
    return np.asarray(mean + z @ root.T + np.log1p(z[:, :1]) * bend)


def log_mixture(proposals: tuple[Proposal, ...], points: Array) -> Array:
    """Log density of the proposals' mixture by their numbers of points, at points (S, m): the balance heuristic."""
    total = sum(one.per_scramble for one in proposals)
    logs = []
    for mean, root, count, bend, degrees in proposals:
        if len(bend):
            straight = points - np.log1p(_distance(points, mean, root))[:, None] * bend
            log_density = region.log_density_along(whitened(straight, mean, root), root, degrees)
        else:
            log_density = region.log_density(whitened(points, mean, root), root)
        logs.append(log_density + np.log(count / total))
    return np.asarray(np.logaddexp.reduce(logs, axis=0))


def _distance(points: Array, mean: Array, root: Array) -> Array:
    """z₁ of points along a side, by the coordinate that depends on nothing else; 0 on the other side."""
    i = int(np.flatnonzero(~np.any(root[:, 1:], axis=1))[0])
    return np.asarray(np.maximum((points[:, i] - mean[i]) / root[i, 0], 0.0))


def scrambles(proposals: tuple[Proposal, ...]) -> NDArray[np.intp]:
    """Which of the independent scrambles each of the proposals' points is of, (S,)."""
    return np.concatenate([np.repeat(np.arange(region.SCRAMBLES), one.per_scramble) for one in proposals])


def whitened(points: Array, mean: Array, root: Array) -> Array:
    """z of points = mean + root z."""
    return np.asarray(np.linalg.solve(root, (points - mean).T).T, dtype=np.float64)
