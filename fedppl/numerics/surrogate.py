r"""A log density that is known at some points, as a proposal: a smooth function through them that the server samples.

.. math:: \hat s(z) = -\tfrac12 |z|^2 + \text{quadratic}(z) + \sum_i c_i\, |z - z_i|^3

Clients' values are dear, and their sum is smooth: of the surrogate thousands of draws cost nothing, and a few values at
some of them say what it leaves. A scale whose logarithm has a long left tail is taken itself, folded at 0, where the
density is smooth and ends.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RBFInterpolator

from fedppl.numerics import importance, region
from fedppl.numerics.importance import effective_size, normalise, weighted_moments
from fedppl.numerics.proposals import Proposal, log_mixture, points_of, propose
from fedppl.types import Array

Places = NDArray[np.intp]

MOST_FOLDED = 6
_WIDE = 2.5  # times as wide as the posterior, a part of the candidates
_ROOM = 1.3  # times the posterior's variances, the others
_PARTS = 16  # of a mixture at most, each with a stream of its own
WIDER = 0.5 * _ROOM * (1.0 + _WIDE**2)  # times the posterior's variances, those of candidates
_DEEP, _DEEPER = 40.0, 2.0  # log units below the largest value down to which values count, and for each coordinate
_MOST = 2000  # values that a surrogate goes through
_PER_TERM = 1.3  # values for each coefficient of a quadratic, the least
_MOST_MISSED = 3.0  # log units
_COMPARED = 512  # values by which two kinds of splines are compared: more take as long as the splines themselves
_SMOOTHING = 1e-3  # of the cubic kernel's own units: values are known to some thousandths of a log unit
_AT_ONCE = 2**22  # distances that are held at a time
_EDGE = 0.9  # of the farthest value's distance, from where on a slope is taken for extrapolation
_HIGHER = 1.0  # log units that a surrogate may lie above the highest value that is as far out
_LEAST_SLOPE = 1.0  # log units for each sd that a tail falls by beyond all values
_TIMES, _EACH = 3, 128  # moments of a surrogate are looked for so often, by so many candidates of a scramble
_STEADY = 0.1  # sds, and of a log sd, by which these move when they are there


class Candidates(NamedTuple):
    """Points of a mixture, in scrambles."""

    u: Array  # (N, m)
    log_density: Array  # (N,)
    scramble: NDArray[np.intp]  # (N,)


class Surrogate(NamedTuple):
    """A cubic radial spline with a quadratic, in coordinates in which the posterior has mean 0 and covariance I."""

    mean: Array  # (m,)
    root: Array  # (m, m)
    spline: RBFInterpolator
    is_drawn_in: bool  # whether it is in arsinh z, beside a t in place of a normal: for heavy tails
    distance: Array  # (S,) of the values from the mean, ascending
    highest: Array  # (S,) value of those that are as far out, or farther


class Drawn(NamedTuple):
    """Candidates with weights of a surrogate."""

    u: Array  # (N, m)
    log_proposal: Array  # (N,)
    log_density: Array  # (N,) of the surrogate, not normalised
    weights: Array  # (N,) sum to 1
    scramble: NDArray[np.intp]
    log_integral: float
    mean: Array  # (m,)
    covariance: Array  # (m, m)


def unfolded(u: Array, folded: Places) -> Array:
    """φ of u."""
    phi = u.copy()
    phi[:, folded] = np.log(u[:, folded])
    return phi


def as_folded(phi: Array, folded: Places) -> Array:
    """u of φ: scales themselves in the place of their logarithms."""
    u = phi.copy()
    u[:, folded] = np.exp(phi[:, folded])
    return u


def log_slope(phi: Array, folded: Places) -> Array:
    """log |dφ / du|, (S,): what is added to a log density in φ for one in u."""
    return np.asarray(-phi[:, folded].sum(axis=1))


def mixture(
    mean: Array, covariance: Array, per_scramble: int, wide: float, outer: tuple[Proposal, ...] = ()
) -> tuple[Proposal, ...]:
    """A t as wide as a posterior with these moments, a part of the points of a wider one, and others in its tails.

    Without points far out a surrogate's tails are made up.
    """
    far, out = max(1, int(wide * per_scramble)), per_scramble // 4 if outer else 0
    own = propose(mean, _ROOM * covariance, max(1, per_scramble - far - out))
    others = [one._replace(per_scramble=max(1, out // len(outer))) for one in outer]
    return own, propose(mean, _ROOM * _WIDE**2 * covariance, far), *others


def candidates(of: tuple[Proposal, ...], folded: Places, stream: int) -> Candidates:
    """Points of a mixture, those of all parts in turn, scramble after scramble."""
    parts = [
        points_of(one, _PARTS * stream + number).reshape(region.SCRAMBLES, -1, len(one.mean))
        for number, one in enumerate(of)
    ]
    u = np.concatenate(parts, axis=1)
    count = u.shape[1]
    u = u[:, np.random.default_rng(0).permutation(count)].reshape(-1, u.shape[2])
    u[:, folded] = np.abs(u[:, folded])
    return Candidates(u, log_candidates(of, u, folded), np.repeat(np.arange(region.SCRAMBLES), count))


def log_candidates(of: tuple[Proposal, ...], u: Array, folded: Places) -> Array:
    """Log density of a mixture, folded, at points (S, m)."""
    logs = np.full(len(u), -np.inf)
    for signs in itertools.product((1.0, -1.0), repeat=len(folded)):
        image = u.copy()
        image[:, folded] *= np.array(signs)
        logs = np.logaddexp(logs, log_mixture(of, image))
    return logs


def fitted(u: Array, values: Array, mean: Array, covariance: Array, *, heavy: bool = False) -> Surrogate | None:
    """A surrogate through values (S,) at points (S, m) of a posterior with about these moments; None of too few.

    Where tails are heavy, far points are drawn in if a quarter of the values is told better so by the others.
    """
    m = len(mean)
    high = np.flatnonzero(values > np.max(values, initial=-np.inf) - _DEEP - _DEEPER * m)
    if len(high) > _MOST:
        high = _thinned(u[high], mean, covariance, high)
    if len(high) < _PER_TERM * (m + 1) * (m + 2) / 2:
        return None
    root = np.asarray(np.linalg.cholesky(covariance))
    z = np.asarray(np.linalg.solve(root, (u[high] - mean).T).T, dtype=float)
    distance = np.sum(z**2, axis=1)
    try:
        is_drawn_in = heavy and _missed(z, values[high], is_drawn_in=True) < _missed(z, values[high], is_drawn_in=False)
        spline = _spline(z, values[high], is_drawn_in=is_drawn_in)
    except np.linalg.LinAlgError:  # points that coincide, or lie in a plane
        return None
    order = np.argsort(distance, kind="stable")
    highest = np.maximum.accumulate(values[high][order][::-1])[::-1]
    return Surrogate(mean, root, spline, is_drawn_in, np.sqrt(distance[order]), highest)


def _base(z: Array, *, is_drawn_in: bool) -> Array:
    """Beside which a spline has little to tell: a normal, or a t."""
    squared: Array = np.sum(z**2, axis=1)
    if is_drawn_in:
        return np.asarray(-0.5 * (region.DEGREES + z.shape[1]) * np.log1p(squared / region.DEGREES))
    return -0.5 * squared


def _spline(z: Array, values: Array, *, is_drawn_in: bool) -> RBFInterpolator:
    rest = values - _base(z, is_drawn_in=is_drawn_in)
    return RBFInterpolator(np.arcsinh(z) if is_drawn_in else z, rest, kernel="cubic", degree=2, smoothing=_SMOOTHING)


def _missed(z: Array, values: Array, *, is_drawn_in: bool) -> float:
    """Mean error at a quarter of some of the values, by the others; of none more than some log units."""
    some = np.unique(np.linspace(0, len(z) - 1, min(len(z), _COMPARED)).astype(np.intp))
    z, values = z[some], values[some]
    held_out = np.arange(len(z)) % 4 == 3
    told = _spline(z[~held_out], values[~held_out], is_drawn_in=is_drawn_in)
    at = np.arcsinh(z[held_out]) if is_drawn_in else z[held_out]
    missed = np.abs(told(at) + _base(z[held_out], is_drawn_in=is_drawn_in) - values[held_out])
    return float(np.mean(np.minimum(missed, _MOST_MISSED)))


def _thinned(u: Array, mean: Array, covariance: Array, places: Places) -> Places:
    """As many as a surrogate goes through: those far out, where few are, and some of the others."""
    away = np.sum((u - mean) * np.linalg.solve(covariance, (u - mean).T).T, axis=1)
    order = np.argsort(-away, kind="stable")
    far, near = order[: _MOST // 2], np.sort(order[_MOST // 2 :])
    kept = near[np.unique(np.linspace(0, len(near) - 1, _MOST - _MOST // 2).astype(int))]
    return np.sort(places[np.concatenate([far, kept])])


def log_surrogate(of: Surrogate, u: Array) -> Array:
    """The surrogate at points (S, m). Beyond all values it falls as it does at the edge, or faster than e^-r.

    Between values far out a spline may rise without cause, and in directions without any at the edge: it is no higher
    than those that are about as far out.
    """
    z = np.asarray(np.linalg.solve(of.root, (u - of.mean).T).T, dtype=float)
    distance, reach = np.sqrt(np.sum(z**2, axis=1)), of.distance[-1]
    out = np.flatnonzero(distance > reach)
    edge = z.copy()
    edge[out] *= (reach / distance[out])[:, None]
    logs = _no_higher(of, edge)
    if len(out):
        inner = _no_higher(of, _EDGE * edge[out])
        slope = np.maximum((inner - logs[out]) / ((1.0 - _EDGE) * reach), _LEAST_SLOPE)
        logs[out] -= slope * (distance[out] - reach)
    return logs


def _no_higher(of: Surrogate, z: Array) -> Array:
    """The spline, where no value is higher than those that are about as far out."""
    as_far = np.searchsorted(of.distance, _EDGE * np.sqrt(np.sum(z**2, axis=1)))
    return np.asarray(np.minimum(_inside(of, z), of.highest[as_far] + _HIGHER))


def _inside(of: Surrogate, z: Array) -> Array:
    chunk = max(1, _AT_ONCE // _MOST)
    at = np.arcsinh(z) if of.is_drawn_in else z
    parts = [of.spline(at[first : first + chunk]) for first in range(0, len(z), chunk)]
    return np.asarray(np.concatenate([np.zeros(0), *parts]) + _base(z, is_drawn_in=of.is_drawn_in))


def drawn(of: Surrogate, by: tuple[Proposal, ...], folded: Places, stream: int) -> Drawn:
    """Candidates of a mixture, weighted by the surrogate."""
    at = candidates(by, folded, stream)
    logs = log_surrogate(of, at.u)
    log_weights, _ = importance.smoothed(logs - at.log_density)
    weights = normalise(log_weights)
    moments = weighted_moments(at.u, weights)
    log_integral = float(np.logaddexp.reduce(log_weights) - np.log(len(log_weights)))
    return Drawn(at.u, at.log_density, logs, weights, at.scramble, log_integral, moments.mean, moments.covariance)


def moments_of(of: Surrogate, mean: Array, covariance: Array, folded: Places, stream: int) -> tuple[Array, Array]:
    """Moments of a surrogate, by candidates about its own mean: begun about another."""
    m = len(mean)
    for _ in range(_TIMES):
        found = drawn(of, mixture(mean, covariance, _EACH, 0.5), folded, stream)
        kept = min(1.0, effective_size(found.weights) / (10.0 * m))  # few points do not tell a covariance
        new = kept * found.covariance + (1.0 - kept) * covariance
        moved = np.max(np.abs(found.mean - mean) / np.sqrt(np.diag(new)))
        widened = np.max(np.abs(0.5 * np.log(np.diag(new) / np.diag(covariance))))
        mean, covariance = found.mean, new
        if max(moved, widened) < _STEADY:
            break
    return mean, covariance
