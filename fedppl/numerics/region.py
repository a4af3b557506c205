"""The region within which clients answer points, a box around the prior's mean, and the mass beyond it.

Points beyond the box are not asked for. The others are points of the proposal truncated to the box. The balance
heuristic counts all points that were drawn, so that the truncation needs no constant of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.special import gammaln, ndtr, ndtri

from fedppl import gaussian
from fedppl.gaussian import Gaussian
from fedppl.numerics.streams import cached, uniform
from fedppl.types import Array

_STEP = np.sqrt(2.0)
_SLOWEST = 0.9  # share that a tail keeps with a step
_LEAST_POWER = 2.1  # of a tail; with 2 it has no variance


class Beyond(NamedTuple):
    """Bounds on a posterior's mass beyond the region, by coordinate, lower side and upper."""

    mass: Array  # (m, 2)
    effect: Array  # (m, 2) of that mass on a mean in sds, or on a log sd


def within(prior: Gaussian, radius: float, points: Array) -> NDArray[np.bool_]:
    """Which points (S, m) are at most so many prior sds from the prior's mean in every coordinate, (S,) bool."""
    if not np.isfinite(radius):
        return np.ones(len(points), dtype=bool)
    lower, upper = _edges(prior, radius)
    return np.asarray(np.all((points >= lower) & (points <= upper), axis=1))


def beyond(prior: Gaussian, radius: float, q: Gaussian, points: Array, weights: Array) -> Beyond:
    """Bound the mass that a posterior, as weighted points (S, m) within the region, and its Gaussian q have beyond it.

    A tail that falls like a power of the distance from the mean, or faster, loses at least the same share with each
    step of the distance by √2. With ρ the mass in the last step over that in the one before, the mass beyond is at most
    that in the last step times ρ / (1 − ρ).
    """
    m = points.shape[1]
    if not np.isfinite(radius):
        return Beyond(np.zeros((m, 2)), np.zeros((m, 2)))
    mean = weights @ points
    sd = np.sqrt(np.maximum(weights @ (points - mean) ** 2, 1e-300))
    mean_of_q, sd_of_q = gaussian.mean(q), gaussian.standard_deviations(q)
    mass, of_q, power = np.zeros((m, 2)), np.zeros((m, 2)), np.zeros((m, 2))
    away, away_of_q = np.zeros((m, 2)), np.zeros((m, 2))
    for side, edge in enumerate(_edges(prior, radius)):
        sign = 2.0 * side - 1.0
        reach = sign * (edge - mean)  # the mean itself lies within
        out = sign * (points - mean)
        inner = weights @ ((out > reach / 2) & (out <= reach / _STEP))
        outer = weights @ (out > reach / _STEP)
        ratio = np.minimum(outer / np.maximum(inner, 1e-300), _SLOWEST)  # a far tail has too few points for it
        power[:, side] = -2.0 * np.log2(np.maximum(ratio, 1e-12))
        mass[:, side] = np.minimum(outer * ratio / (1.0 - ratio), 1.0)
        away[:, side] = np.maximum(reach, 0.0) / sd
        away_of_q[:, side] = np.abs(edge - mean_of_q) / sd_of_q
        of_q[:, side] = ndtr(-sign * (edge - mean_of_q) / sd_of_q)
    return Beyond(np.maximum(mass, of_q), np.maximum(_effect(mass, away, power), _effect(of_q, away_of_q, np.inf)))


def _effect(mass: Array, away: Array, power: Array | float) -> Array:
    """Bound the effect on a log sd, which exceeds that on a mean, of mass beyond an edge that is e sds away.

    A tail that falls as an exponential has its mean at e + 1 sds at most. One that falls as a power α has a mean square
    of e² α / (α − 2), with α at least `_LEAST_POWER`: the power of a tail with hardly any mass is not known well.
    """
    times = 1.0 / (1.0 - 2.0 / np.maximum(power, _LEAST_POWER))
    return np.asarray(mass * np.maximum(0.5 * ((away + 1.0) ** 2 + 1.0), 0.5 * away**2 * times))


def _edges(prior: Gaussian, radius: float) -> tuple[Array, Array]:
    center, sd = gaussian.mean(prior), gaussian.standard_deviations(prior)
    return np.asarray(center - radius * sd), np.asarray(center + radius * sd)


# The multivariate t: quasi-random points of independent scrambles, and its density. Its tails reach beyond q's --------

DEGREES = 5.0
SCRAMBLES = 8  # independent ones, whose estimates' spread is the error


@cached(most_bytes=2**27)
def standard_points(size: int, count: int, stream: int) -> Array:
    """Points of a standard multivariate t, `count` of each scramble one after the other, (scrambles x count, size)."""
    each = uniform(size + 1, count, stream, SCRAMBLES)
    return np.asarray(ndtri(each[:, 1:]) * np.sqrt(DEGREES / stats.chi2.ppf(each[:, :1], DEGREES)))


@cached(most_bytes=2**27)
def points_along(size: int, count: int, stream: int, degrees: float) -> Array:
    """Points whose first coordinate is the absolute value of a t with few degrees; the others are a multivariate t."""
    each = uniform(size + 1, count, stream, SCRAMBLES)
    others = ndtri(each[:, 2:]) * np.sqrt(DEGREES / stats.chi2.ppf(each[:, :1], DEGREES))
    return np.column_stack([stats.t.isf(0.5 * each[:, 1], degrees), others])


def log_density(white: Array, root: Array) -> Array:
    """Log density of mean + root t at points whose t is `white`, (S, m): (S,)."""
    return np.asarray(_log_standard(white, DEGREES) - np.linalg.slogdet(root)[1])


def middle(degrees: float) -> float:
    """Median of the absolute value of a t."""
    return float(stats.t.ppf(0.75, degrees))


def log_density_along(white: Array, root: Array, degrees: float) -> Array:
    """Log density of mean + root z where z is as `points_along` are, at points whose z is `white`: (S,)."""
    parts = np.log(2.0) + _log_standard(white[:, :1], degrees) + _log_standard(white[:, 1:], DEGREES)
    return np.asarray(np.where(white[:, 0] >= 0, parts - np.linalg.slogdet(root)[1], -np.inf))


def _log_standard(white: Array, degrees: float) -> Array:
    m = white.shape[1]
    constant = gammaln((degrees + m) / 2) - gammaln(degrees / 2) - 0.5 * m * np.log(degrees * np.pi)
    return np.asarray(constant - 0.5 * (degrees + m) * np.log1p(np.sum(white**2, axis=1) / degrees))
