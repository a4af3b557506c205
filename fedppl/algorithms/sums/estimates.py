"""Moments of a posterior by several stages: what each says, what they say together, and draws put right by it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedppl.numerics import region
from fedppl.numerics.importance import normalise, weighted_moments
from fedppl.numerics.surrogate import Drawn
from fedppl.types import Array

BY_CHANCE = 2.5  # standard errors by which a surrogate may differ from what weights say by chance, of many moments
_TILTS = 10  # Newton steps
_FAR_OUT = 5.0  # sds
_WIDENS = 1.5  # times the sd of another coordinate where a scale is high, with which it is no coordinate itself


class Estimate(NamedTuple):
    """First and second moments (2 m,) of the posterior in fixed units, and without each scramble, (scrambles, 2 m)."""

    moments: Array
    without: Array
    points: float  # effective ones


class Unit(NamedTuple):
    """Center (m,) and lengths (m,) of the units that moments are in."""

    center: Array
    length: Array


def moments_of(u: Array, weights: Array, unit: Unit) -> Array:
    """First and second moments (2 m,) of weighted points (S, m)."""
    z = (u - unit.center) / unit.length
    return np.concatenate([weights @ z, weights @ z**2])


def pooled(estimates: tuple[Estimate, ...]) -> Estimate:
    """The last stage's estimate, with those before it that agree with it, each by its number of effective points.

    Not by its variance, which is too small of a stage that missed a tail.
    """
    last = estimates[-1]
    agree = [one for one in estimates[:-1] if _agree(one, last)] + [last]
    shares = np.array([one.points for one in agree])
    shares = shares / shares.sum()
    moments = np.einsum("s,sm->m", shares, np.stack([one.moments for one in agree]))
    without = np.einsum("s,sjm->jm", shares, np.stack([one.without for one in agree]))
    return Estimate(moments, without, sum(one.points for one in agree))


def _agree(one: Estimate, other: Estimate) -> bool:
    """Whether two stages say the same: a surrogate whose tails were made up says something else, of a small error."""
    by_chance = float(np.hypot(chance_of(one), chance_of(other)))
    return float(np.max(np.abs(sizes(one.moments, other.moments)))) <= BY_CHANCE * by_chance


def chance_of(one: Estimate) -> float:
    """Standard error of a mean or a log sd, in posterior sds."""
    return jackknife([sizes(left, one.moments) for left in one.without])


def sizes(moments: Array, other: Array) -> Array:
    """Means less those of others, in their sds, and log sds less theirs, (2 m,)."""
    (mean, second), (center, square) = np.split(moments, 2), np.split(other, 2)
    variance, own = np.maximum(square - center**2, 1e-12), np.maximum(second - mean**2, 1e-12)
    return np.concatenate([(mean - center) / np.sqrt(variance), 0.5 * np.log(own / variance)])


def jackknife(without: list[Array]) -> float:
    """Largest standard error: points within a scramble are no independent sample."""
    return float(np.max(np.sqrt(len(without) - 1.0) * np.std(np.stack(without), axis=0)))


def tilted(of: Drawn, target: Array, unit: Unit) -> Drawn | None:
    """Draws whose weights are changed as little as gives them these moments, by exp(λ z + κ z²); None where none do.

    Far out z stays as it is on the way there: a candidate without weight would get all of it.
    """
    own = Unit(of.mean, np.sqrt(np.diag(of.covariance)))
    mean, second = np.split(target, 2)
    shift, ratio = (unit.center + unit.length * mean - own.center) / own.length, unit.length / own.length
    wanted = np.concatenate([shift, ratio**2 * (second - mean**2) + shift**2])
    z = (of.u - own.center) / own.length
    features, near = (np.concatenate([one, one**2], axis=1) for one in (z, np.clip(z, -_FAR_OUT, _FAR_OUT)))
    tilt, weights = np.zeros(features.shape[1]), of.weights
    for _ in range(_TILTS):
        there = weights @ features
        curved = ((features - there) * weights[:, None]).T @ near
        tilt = tilt + np.linalg.lstsq(curved, wanted - there, rcond=1e-8)[0]
        weights = normalise(np.log(np.maximum(of.weights, 1e-300)) + near @ tilt)
    if not np.allclose(weights @ features, wanted, atol=1e-4):
        return None
    moments = weighted_moments(of.u, weights)
    return of._replace(weights=weights, mean=moments.mean, covariance=moments.covariance)


def chance_of_draws(of: Drawn) -> float:
    """Standard error of moments of a surrogate by its draws."""
    unit = Unit(of.mean, np.sqrt(np.diag(of.covariance)))
    whole = moments_of(of.u, of.weights, unit)
    kept = [np.where(of.scramble != one, of.weights, 0.0) for one in range(region.SCRAMBLES)]
    return jackknife([sizes(moments_of(of.u, weights / weights.sum(), unit), whole) for weights in kept])


def widens(points: Array, weights: Array, i: int) -> bool:
    """Whether another coordinate spreads more where coordinate i is low than where it is high, quarter by quarter."""
    order = np.argsort(points[:, i], kind="stable")
    shares = np.cumsum(weights[order])
    ends = order[shares <= 0.25], order[shares >= 0.75]
    if min(len(end) for end in ends) < 2:
        return False
    low, high = (weighted_moments(points[end], weights[end] / weights[end].sum()).covariance for end in ends)
    others = np.arange(points.shape[1]) != i
    return bool(np.any(np.diag(low)[others] > _WIDENS**2 * np.diag(high)[others]))
