r"""A log density that is known at some points, as a proposal: a smooth function through them that the server samples.

.. math:: \hat s(z) = -\tfrac12 |z|^2 + \text{quadratic}(z) + \sum_i c_i\, |z - z_i|^3

Clients' values are dear, and their sum is smooth: of the surrogate thousands of draws cost nothing, and a few values at
some of them say what it leaves. Of many coordinates values lie far apart, and what bends between them a spline does not
tell: there a polynomial of the fourth degree comes first, once there are values enough, and the spline adds the rest.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RBFInterpolator

from fedppl.numerics import importance
from fedppl.numerics import tolerances as tol
from fedppl.numerics.coordinates import Places
from fedppl.numerics.importance import normalise, quadratic_terms, weighted_moments
from fedppl.numerics.integral import chunks, some_of
from fedppl.numerics.proposals import Proposal, log_density_of_t, log_mixture, points_of, propose, whitened
from fedppl.types import Array


class Candidates(NamedTuple):
    """Points of a mixture, in scrambles."""

    u: Array  # (N, m)
    log_density: Array  # (N,)
    scramble: NDArray[np.intp]  # (N,)


class Base(NamedTuple):
    """What a spline adds to: a normal; for heavy tails a t, beside a spline in arsinh z; or a polynomial."""

    is_drawn_in: bool
    coefficients: Array | None  # of the polynomial's terms


class Surrogate(NamedTuple):
    """A cubic radial spline with a quadratic, in coordinates in which the posterior has mean 0 and covariance I."""

    mean: Array  # (m,)
    root: Array  # (m, m)
    base: Base
    spline: RBFInterpolator
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
    log_integral_error: float  # standard, by leaving out one scramble at a time
    mean: Array  # (m,)
    covariance: Array  # (m, m)


def mixture(
    mean: Array, covariance: Array, per_scramble: int, wide: float, outer: tuple[Proposal, ...] = ()
) -> tuple[Proposal, ...]:
    """A t as wide as a posterior with these moments, a part of the points of a wider one, and others in its tails.

    Without points far out a surrogate's tails are made up.
    """
    far, out = max(1, int(wide * per_scramble)), per_scramble // tol.OUTER_PART if outer else 0
    own = propose(mean, tol.ROOM * covariance, max(1, per_scramble - far - out))
    others = [one._replace(per_scramble=max(1, out // len(outer))) for one in outer]
    return own, propose(mean, tol.ROOM * tol.WIDE**2 * covariance, far), *others


def candidates(of: tuple[Proposal, ...], folded: Places, stream: int) -> Candidates:
    """Points of a mixture, those of all parts in turn, scramble after scramble."""
    parts = [
        points_of(one, tol.PARTS_OF_MIXTURE * stream + number).reshape(tol.SCRAMBLES, -1, len(one.mean))
        for number, one in enumerate(of)
    ]
    u = np.concatenate(parts, axis=1)
    count = u.shape[1]
    u = u[:, np.random.default_rng(0).permutation(count)].reshape(-1, u.shape[2])
    u[:, folded] = np.abs(u[:, folded])
    return Candidates(u, log_candidates(of, u, folded), np.repeat(np.arange(tol.SCRAMBLES), count))


def log_candidates(of: tuple[Proposal, ...], u: Array, folded: Places) -> Array:
    """Log density of a mixture, folded, at points (S, m): the sum over mirror images."""
    signs = np.array(list(itertools.product((0.0, 1.0), repeat=len(folded))))
    total, logs = sum(one.per_scramble for one in of), []
    for one in of:
        of_images = _log_along(one, u, folded, signs) if len(one.bend) else _log_t(one, u, folded, signs)
        logs.append(of_images + np.log(one.per_scramble / total))
    return np.asarray(np.logaddexp.reduce(logs, axis=0))


def _log_along(one: Proposal, u: Array, folded: Places, signs: Array) -> Array:
    """Of points along a side, image by image."""
    logs = np.full(len(u), -np.inf)
    for sign in signs:
        image = u.copy()
        image[:, folded] *= 1.0 - 2.0 * sign
        logs = np.logaddexp(logs, log_mixture((one,), image))
    return logs


def _log_t(one: Proposal, u: Array, folded: Places, signs: Array) -> Array:
    """Of a t, whose images have squared distances that are a quadratic in the signs."""
    z, turn = whitened(u, one.mean, one.root), -2.0 * np.linalg.inv(one.root)[:, folded]
    rows, columns = np.triu_indices(len(folded), 1)
    first = (2.0 * z @ turn + u[:, folded] * np.sum(turn**2, axis=0)) * u[:, folded]
    both = 2.0 * (turn.T @ turn)[rows, columns] * u[:, folded[rows]] * u[:, folded[columns]]
    apart = first @ signs.T + both @ (signs[:, rows] * signs[:, columns]).T  # (S, images)
    squared = np.maximum(np.sum(z**2, axis=1)[:, None] + apart, 0.0)
    power = -0.5 * (tol.DEGREES + u.shape[1])
    beside = np.sum(((tol.DEGREES + squared) / (tol.DEGREES + squared[:, :1])) ** power, axis=1)
    return np.asarray(log_density_of_t(z, one.root) + np.log(beside))


def fitted(u: Array, values: Array, mean: Array, covariance: Array, *, heavy: bool = False) -> Surrogate | None:
    """A surrogate through values (S,) at points (S, m) of a posterior with about these moments; None of too few.

    Of what a spline may add to, what tells a quarter of the values best by the others is taken: a normal, where tails
    are heavy a t, of many coordinates a polynomial.
    """
    m = len(mean)
    high = np.flatnonzero(values > np.max(values, initial=-np.inf) - tol.DEEP - tol.DEEPER * m)
    if len(high) < tol.VALUES_A_TERM * (m + 1) * (m + 2) / 2:
        return None
    root = np.asarray(np.linalg.cholesky(covariance))
    z, values = whitened(u[high], mean, root), values[high]
    kinds = ["normal", *(["t"] if heavy else [])]
    most = tol.COMPARED
    if m >= tol.MANY and len(z) >= (m + 1) * (m + 2) * (m + 3) // 6 + m * (m + 1) // 2:  # as many as terms
        kinds, most = [*kinds, "polynomial"], tol.MOST_VALUES
    try:
        kind = min(kinds, key=lambda one: _missed(z, values, one, most)) if len(kinds) > 1 else kinds[0]
        own = _base(kind, z, values)
        some = _thinned(z) if len(z) > tol.MOST_VALUES else np.arange(len(z))
        spline = _spline(z[some], values[some], own)
    except np.linalg.LinAlgError:  # points that coincide, or lie in a plane
        return None
    distance = np.sum(z[some] ** 2, axis=1)
    order = np.argsort(distance, kind="stable")
    highest = np.maximum.accumulate(values[some][order][::-1])[::-1]
    return Surrogate(mean, root, own, spline, np.sqrt(distance[order]), highest)


def _base(kind: str, z: Array, values: Array) -> Base:
    """What a spline adds to: a polynomial by least squares through high values, where points far out count less."""
    if kind != "polynomial":
        return Base(kind == "t", None)
    high = values > values.max() - tol.HIGH - z.shape[1]
    z, values = z[high], values[high]
    far = np.sum(z**2, axis=1) / z.shape[1] - tol.FAR_OUT
    weights = 1.0 / (1.0 + np.maximum(far, 0.0))
    terms = _polynomial_terms(z) * weights[:, None]
    size = np.sqrt(np.mean(terms**2, axis=0))
    terms /= size
    few = (z.shape[1] + 1) * (z.shape[1] + 2) // 2  # terms of a quadratic
    ridge = np.where(np.arange(len(size)) < few, tol.QUADRATIC_RIDGE, tol.RIDGE) * len(z)
    rest = (values + 0.5 * np.sum(z**2, axis=1)) * weights
    return Base(False, np.linalg.solve(terms.T @ terms + np.diag(ridge), terms.T @ rest) / size)


def _polynomial_terms(z: Array) -> Array:
    """Terms of a quadratic, then of the third degree and products of two squares, at points (S, m).

    Beyond most of the posterior's mass the latter stay as they are on the way there: they would make up peaks.
    """
    reach = np.sqrt(tol.REACH * z.shape[1])
    near = z * np.minimum(1.0, reach / np.maximum(np.linalg.norm(z, axis=1), tol.TINY))[:, None]
    rows, columns = np.triu_indices(z.shape[1])
    products = near[:, rows] * near[:, columns]
    cubes = [products[:, rows >= i] * near[:, i : i + 1] for i in range(z.shape[1])]
    return np.concatenate([quadratic_terms(z), *cubes, products**2], axis=1)


def _values_of_base(base: Base, z: Array) -> Array:
    """Values of a base at points (S, m)."""
    squared: Array = np.sum(z**2, axis=1)
    if base.is_drawn_in:
        return np.asarray(-0.5 * (tol.DEGREES + z.shape[1]) * np.log1p(squared / tol.DEGREES))
    if base.coefficients is None:
        return -0.5 * squared
    return np.asarray(_polynomial_terms(z) @ base.coefficients - 0.5 * squared)


def _spline(z: Array, values: Array, base: Base) -> RBFInterpolator:
    """Of what a base leaves of the values, and beside a polynomial of what a normal leaves."""
    at = np.arcsinh(z) if base.is_drawn_in else z
    bases = [base] if base.coefficients is None else [base, Base(False, None)]
    rest = np.stack([values - _values_of_base(one, z) for one in bases], axis=1)
    return RBFInterpolator(at, rest, kernel="cubic", degree=2, smoothing=tol.SMOOTHING)


def _values_of(base: Base, spline: RBFInterpolator, z: Array) -> Array:
    """Values at points (S, m). A polynomial that is far above a spline alone makes up a peak."""
    rest = spline(np.arcsinh(z) if base.is_drawn_in else z)
    own = np.asarray(rest[:, 0] + _values_of_base(base, z))
    if base.coefficients is None:
        return own
    return np.asarray(np.minimum(own, rest[:, 1] - 0.5 * np.sum(z**2, axis=1) + tol.ABOVE))


def _missed(z: Array, values: Array, kind: str, most: int) -> float:
    """Mean error at a quarter of the values, by the others; of none more than some log units."""
    held_out = np.arange(len(z)) % tol.PARTS == tol.PARTS - 1
    own = _base(kind, z[~held_out], values[~held_out])
    known, rest = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    some = known[some_of(len(known), most - most // tol.PARTS)]
    few = rest[some_of(len(rest), tol.COMPARED)]
    spline = _spline(z[some], values[some], own)
    missed = np.abs(_values_of(own, spline, z[few]) - values[few])
    return float(np.mean(np.minimum(missed, tol.MOST_MISSED)))


def _thinned(z: Array) -> Places:
    """As many as a surrogate goes through: those far out, where few are, and some of the others."""
    order = np.argsort(-np.sum(z**2, axis=1), kind="stable")
    far, near = order[: tol.MOST_VALUES // 2], np.sort(order[tol.MOST_VALUES // 2 :])
    return np.sort(np.concatenate([far, near[some_of(len(near), tol.MOST_VALUES - tol.MOST_VALUES // 2)]]))


def log_surrogate(of: Surrogate, u: Array) -> Array:
    """The surrogate at points (S, m). Beyond all values it falls as it does at the edge, or faster than e^-r.

    Between values far out a spline may rise without cause, and in directions without any at the edge: it is no higher
    than those that are about as far out.
    """
    z = whitened(u, of.mean, of.root)
    distance, reach = np.sqrt(np.sum(z**2, axis=1)), of.distance[-1]
    out = np.flatnonzero(distance > reach)
    edge = z.copy()
    edge[out] *= (reach / distance[out])[:, None]
    logs = _no_higher(of, edge)
    if len(out):
        inner = _no_higher(of, tol.EDGE * edge[out])
        slope = np.maximum((inner - logs[out]) / ((1.0 - tol.EDGE) * reach), tol.LEAST_SLOPE)
        logs[out] -= slope * (distance[out] - reach)
    return logs


def _no_higher(of: Surrogate, z: Array) -> Array:
    """The spline, where no value is higher than those that are about as far out."""
    as_far = np.searchsorted(of.distance, tol.EDGE * np.sqrt(np.sum(z**2, axis=1)))
    some = chunks(len(z), tol.NUMBERS_AT_ONCE // tol.MOST_VALUES)
    values = np.concatenate([np.zeros(0), *(_values_of(of.base, of.spline, z[chunk]) for chunk in some)])
    return np.asarray(np.minimum(values, of.highest[as_far] + tol.HIGHER))


def drawn(of: Surrogate, by: tuple[Proposal, ...], folded: Places, stream: int) -> Drawn:
    """Candidates of a mixture, weighted by the surrogate."""
    at = candidates(by, folded, stream)
    logs = log_surrogate(of, at.u)
    log_weights, _ = importance.smoothed(logs - at.log_density)
    weights = normalise(log_weights)
    moments = weighted_moments(at.u, weights)
    log_integral = float(np.logaddexp.reduce(log_weights) - np.log(len(log_weights)))
    error = float(importance.jackknife(np.log1p(-np.bincount(at.scramble, weights))))
    return Drawn(at.u, at.log_density, logs, weights, at.scramble, log_integral, error, *moments)


def walked(of: Surrogate, drawn: Drawn, folded: Places, steps: int, stream: int) -> Drawn:
    """Draws of a surrogate moved on by differential evolution, the halves of each scramble in turn, by the other half.

    Of many coordinates few candidates of a mixture have all of the weight, and what is drawn from them are copies.
    """
    m, rng = len(of.mean), np.random.default_rng(stream)
    x = np.stack([rng.permutation(drawn.u[one]) for one in resampled(drawn, tol.WALKERS)])
    logs = log_surrogate(of, x.reshape(-1, m)).reshape(x.shape[:2])
    halves = slice(None, tol.WALKERS // 2), slice(tol.WALKERS // 2, None)
    for _ in range(steps):
        for own, other in (halves, halves[::-1]):
            first, shift = rng.integers(1, tol.WALKERS // 2, (2, *logs[:, own].shape))
            second = (first + shift) % (tol.WALKERS // 2)
            apart = np.subtract(*(np.take_along_axis(x[:, other], one[..., None], 1) for one in (first, second)))
            length = tol.WALK_STEP / np.sqrt(2.0 * m) * (1.0 + tol.WALK_JITTER * rng.standard_normal(first.shape))
            there = x[:, own] + length[..., None] * apart
            there[..., folded] = np.abs(there[..., folded])
            new = log_surrogate(of, there.reshape(-1, m)).reshape(first.shape)
            moves = np.log(rng.random(first.shape)) < new - logs[:, own]
            x[:, own], logs[:, own] = np.where(moves[..., None], there, x[:, own]), np.where(moves, new, logs[:, own])
    u, densities = x.reshape(-1, m), logs.reshape(-1)
    weights = np.full(len(u), 1.0 / len(u))
    moments = weighted_moments(u, weights)
    scramble, log_integral = np.repeat(np.arange(tol.SCRAMBLES), tol.WALKERS), drawn.log_integral
    log_proposal, error = densities - log_integral, drawn.log_integral_error
    return Drawn(u, log_proposal, densities, weights, scramble, log_integral, error, *moments)


def resampled(of: Drawn, each: int) -> list[Places]:
    """Places of so many draws of each scramble, by systematic resampling."""
    draws = []
    for scramble in range(tol.SCRAMBLES):
        places = np.flatnonzero(of.scramble == scramble)
        shares = np.cumsum(of.weights[places])
        at = np.searchsorted(shares / shares[-1], (np.arange(each) + 0.5) / each)
        draws.append(places[np.minimum(at, len(places) - 1)])
    return draws


def moments_of(of: Surrogate, mean: Array, covariance: Array, folded: Places, stream: int) -> tuple[Array, Array]:
    """Moments of a surrogate, by candidates about its own mean: begun about another."""
    for _ in range(tol.MOMENT_FITS):
        draws = drawn(of, mixture(mean, covariance, tol.MOMENT_CANDIDATES, tol.MOMENT_WIDE), folded, stream)
        kept = importance.telling(draws.weights, len(mean))
        new = kept * draws.covariance + (1.0 - kept) * covariance
        moved = np.max(np.abs(draws.mean - mean) / np.sqrt(np.diag(new)))
        widened = np.max(np.abs(0.5 * np.log(np.diag(new) / np.diag(covariance))))
        mean, covariance = mean + kept * (draws.mean - mean), new
        if max(moved, widened) < tol.STEADY:
            break
    return mean, covariance
