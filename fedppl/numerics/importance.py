"""Importance sampling from a Gaussian: weighted moments, by values or gradients of the log weights, and their tails."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import exprel

from fedppl.numerics import tolerances as tol
from fedppl.numerics.streams import cached, whitened_points
from fedppl.types import Array


def normalise(log_weights: Array) -> Array:
    """Self-normalised weights; log weights of −inf give 0."""
    weights: Array = np.exp(log_weights - np.max(log_weights))
    return np.asarray(weights / weights.sum())


def control_coefficients(features: Array, weights: Array, control: Array) -> Array:
    r"""Coefficients (n,) of a control variate for means of features (S, n), by least squares of points' influences.

    .. math:: \beta = \frac{\sum_i w_i (h_i - \bar h_w)\, c_i (h_i - \bar h_c)}{\sum_i c_i^2 (h_i - \bar h_c)^2}

    Both weights (S,) sum to 1. A control with tails of its own makes up moments: it gets a coefficient near 0.
    """
    influence, own = (part[:, None] * (features - part @ features) for part in (weights, control))
    least_squares = np.sum(influence * own, axis=0) / np.maximum(np.sum(own**2, axis=0), tol.TINY)
    return np.asarray(np.clip(least_squares, 0.0, tol.MOST_CONTROL))


def effective_size(weights: Array) -> float:
    """1 / Σ w², between 1 and the number of points."""
    return float(1.0 / np.sum(weights**2))


def telling(weights: Array, size: int) -> float:
    """How far weighted points tell a covariance of so many coordinates, from 0 to 1."""
    return min(1.0, effective_size(weights) / (tol.EACH_TELLS * size))


def jackknife(without: Array) -> Array:
    """Standard errors (...) of estimates, by those without one scramble each (scrambles, ...).

    Points within a scramble are no independent sample.
    """
    return np.asarray(np.sqrt(len(without) - 1.0) * np.std(without, axis=0))


def enough_points(size: int, points: int) -> int:
    """Raise the number of points to what `controlled_moments` needs."""
    return max(points, tol.QUADRATIC_POINTS * (1 + size + size * (size + 1) // 2))


def has_enough_points(size: int) -> bool:
    """Whether not too many values suffice for a quadratic in `size` coordinates; beyond, gradients are cheaper."""
    return enough_points(size, 0) <= tol.MOST_POINTS_OF_VALUES


def quadratic_terms(z: Array) -> Array:
    """Terms of a quadratic at points (S, m): 1, z, and products of two, (S, 1 + m + m (m + 1) / 2)."""
    rows, columns = np.triu_indices(z.shape[1])
    return np.concatenate([np.ones((len(z), 1)), z, z[:, rows] * z[:, columns]], axis=1)


def second_derivatives(coefficients: Array, size: int) -> Array:
    """Second derivatives (m, m) of the quadratic with these coefficients of its terms."""
    upper = np.zeros((size, size))
    upper[np.triu_indices(size)] = coefficients[1 + size :]
    return upper + upper.T


@cached(most_bytes=tol.DESIGN_BYTES)
def _design(size: int, points: int, stream: int) -> Array:
    """Terms of a quadratic in z at the whitened points."""
    return quadratic_terms(whitened_points(size, points, stream))


@cached(most_bytes=tol.DESIGN_BYTES)
def _inverse_gram(size: int, points: int, stream: int) -> Array:
    """(DᵀD)⁻¹ of the design D, well-conditioned for whitened points and far smaller than D's pseudo-inverse."""
    design = _design(size, points, stream)
    return np.asarray(np.linalg.inv(design.T @ design))


def _quadratic(log_weights: Array, key: tuple[int, int, int]) -> tuple[Array, Array]:
    """Coefficients and values of the quadratic fitted to the log weights."""
    design = _design(*key)
    coefficients = _inverse_gram(*key) @ (log_weights @ design)
    return coefficients, design @ coefficients


def controlled_moments(
    z: Array, log_weights: Array, weights: Array, key: tuple[int, int, int]
) -> tuple[WeightedMoments, float, float]:
    """Moments under a standard normal times weights, with the quadratic part of the log weights integrated exactly.

    A quadratic g is fitted to the log weights. Normal x e^g has exact moments; the points estimate only the difference
    that the remainder makes, with the estimate under e^g as control variate. Near a converged site the remainder is
    small, and a client's error far below 1 / sqrt(points).

    Returns the moments, the sd of the remainder, and the error of the mean in sds, 0 where the remainder is small.
    """
    plain = weighted_moments(z, weights)
    own = weights[:, None] * (z - plain.mean)  # what each point adds to the mean

    def error(parts: Array) -> float:
        """Largest standard error of a mean, in sds, as of independent points."""
        variance = np.maximum(np.diag(plain.covariance), tol.TINY)
        return float(np.sqrt(np.max(np.sum(parts**2, axis=0) / variance)))

    if not np.all(np.isfinite(log_weights)):
        remainder = float(np.std(log_weights[np.isfinite(log_weights)]))
        return plain, remainder, error(own)
    coefficients, fitted = _quadratic(log_weights, key)
    remainder = float(np.std(log_weights - fitted))
    m = z.shape[1]
    precision = np.eye(m) - second_derivatives(coefficients, m)
    if not _exceeds_least(precision):
        return plain, remainder, error(own)
    covariance = np.linalg.inv(precision)
    mean = covariance @ coefficients[1 : 1 + m]
    by_quadratic = normalise(fitted)
    control = weighted_moments(z, by_quadratic)
    controlled = covariance + plain.covariance - control.covariance
    if not _exceeds_least(controlled):
        return plain, remainder, error(own)
    moments = WeightedMoments(mean + plain.mean - control.mean, (controlled + controlled.T) / 2)
    if remainder < tol.LARGE_REMAINDER:
        return moments, remainder, 0.0
    return moments, remainder, error(own - by_quadratic[:, None] * (z - control.mean))


def departure(z: Array, log_weights: Array, key: tuple[int, int, int], root: Array) -> float:
    """Largest departure of the log weights from a quadratic, over coordinates of root z.

    With ρ the remainder and u a unit vector, E[(uᵀ∇ρ)²] = ½ E[ρ² ((uᵀz)² − 1)] for a cubic: to second order in ρ the
    relative excess of the variance along u over the Gaussian's. Its square root, which is returned, adds up over
    clients whose factors depart alike.
    """
    if not np.all(np.isfinite(log_weights)):
        return float("inf")
    remainder = log_weights - _quadratic(log_weights, key)[1]
    along = z @ (root / np.linalg.norm(root, axis=1)[:, None]).T
    excess = 0.5 * np.mean(remainder[:, None] ** 2 * (along**2 - 1.0), axis=0)
    return float(np.sqrt(max(float(excess.max()), 0.0)))


def _exceeds_least(matrix: Array) -> bool:
    """Whether every eigenvalue is above `tol.LEAST_EIGENVALUE`."""
    try:
        np.linalg.cholesky(matrix - tol.LEAST_EIGENVALUE * np.eye(len(matrix)))
    except np.linalg.LinAlgError:
        return False
    return True


class WeightedMoments(NamedTuple):
    """Moments of a weighted sample."""

    mean: Array  # (m,)
    covariance: Array  # (m, m)


def weighted_moments(points: Array, weights: Array) -> WeightedMoments:
    """Mean and covariance of points (S, m) under weights (S,)."""
    mean = weights @ points
    centred = points - mean
    covariance = (centred * weights[:, None]).T @ centred
    return WeightedMoments(mean, (covariance + covariance.T) / 2)


def skewness(points: Array, weights: Array, farthest: float = 0.0) -> Array:
    """Skewness of every coordinate of points (S, m) under weights (S,), (m,).

    Without the points that lie farthest from the mean and have at most a share `farthest` of the weight in all.
    """
    centred = points - weights @ points
    if farthest:
        order = np.argsort(-np.abs(centred), axis=0, kind="stable")
        is_kept = np.cumsum(weights[order], axis=0) > farthest
        np.put_along_axis(centred, order, np.take_along_axis(centred, order, axis=0) * is_kept, axis=0)
    return np.asarray(weights @ centred**3 / np.maximum(weights @ centred**2, tol.TINY) ** 1.5)


def resample(weights: Array, draws: int, rng: np.random.Generator) -> Array:
    """Indices of `draws` systematic draws, in random order."""
    positions = (np.arange(draws) + rng.uniform()) / draws
    indices = np.minimum(np.searchsorted(np.cumsum(weights), positions), len(weights) - 1)
    return np.asarray(rng.permutation(indices))


# The upper tail of importance weights: its shape, by a generalised Pareto, and weights smoothed by it -----------------


class _Tail(NamedTuple):
    """A generalised Pareto fitted to the largest weights, in units of the largest of all."""

    shape: float
    scale: float
    threshold: float  # weight from which the tail begins
    size: int


def _tail(ordered: Array) -> _Tail | None:
    """Empirical-Bayes fit (Zhang and Stephens 2009) to ascending finite log weights; None where these are equal."""
    size = len(ordered)
    count = int(min(tol.TAIL_SHARE * size, tol.TAIL_ROOT * np.sqrt(size)))
    threshold = float(np.exp(ordered[-count - 1] - ordered[-1]))
    excess = np.exp(ordered[-count:] - ordered[-1]) - threshold
    if ordered[-1] - ordered[0] < tol.EQUAL_WEIGHTS or excess[-1] <= 0:
        return None
    guesses = tol.TAIL_GUESSES + int(np.sqrt(count))
    quartile = max(excess[int(count / 4 + 0.5) - 1], tol.TINY)
    b = 1 - np.sqrt(guesses / (np.arange(1, guesses + 1) - 0.5))
    b = b / (tol.TAIL_SPREAD * quartile) + 1 / excess[-1]
    k = np.mean(np.log1p(-b[:, None] * excess), axis=1)
    log_likelihood = count * (np.log(-b / k) - k - 1)
    weights = np.exp(log_likelihood - log_likelihood.max())
    rate = float(weights @ b / weights.sum())
    shape = float(np.mean(np.log1p(-rate * excess)))
    # The weak prior of Vehtari et al. (2024).
    by_prior = (count * shape + tol.TAIL_PRIOR * tol.TAIL_PRIOR_WEIGHT) / (count + tol.TAIL_PRIOR_WEIGHT)
    return _Tail(by_prior, -shape / rate, threshold, count)


def pareto_k(log_weights: Array) -> float:
    """Tail shape of importance weights: below 0.5 good, above 0.7 their moments cannot be trusted.

    Constant weights give −inf, fewer than 25 finite ones inf.
    """
    finite = log_weights[np.isfinite(log_weights)]
    if len(finite) < tol.FEWEST_WEIGHTS:
        return np.inf
    tail = _tail(np.sort(finite))
    return -np.inf if tail is None else tail.shape


def limit(count: int) -> float:
    """The largest shape with which so many weights are trusted: min(1 − 1 / log10 S, 0.7).

    >>> limit(100), limit(1024)
    (0.5, 0.6678...)
    """
    return float(min(1.0 - 1.0 / np.log10(max(count, 10)), tol.MOST_K))


def smoothed(log_weights: Array) -> tuple[Array, float]:
    """Log weights (S,), the largest replaced by expected order statistics of the fitted tail, and its shape.

    None exceeds the largest given (Vehtari et al. 2024). Log weights of −inf stay.
    """
    logs = np.array(log_weights, dtype=float)
    where = np.flatnonzero(np.isfinite(logs))
    order = where[np.argsort(logs[where], kind="stable")]
    if len(order) < tol.FEWEST_WEIGHTS:
        return logs, np.inf
    largest = logs[order[-1]]
    tail = _tail(logs[order])
    if tail is None:
        return logs, -np.inf
    survival = np.log1p(-(np.arange(tail.size) + 0.5) / tail.size)  # log of 1 − p
    excess = -tail.scale * survival * exprel(-tail.shape * survival)
    logs[order[-tail.size :]] = np.minimum(largest + np.log(tail.threshold + excess), largest)
    return logs, tail.shape


# Moments from gradients: a quadratic by Stein's identities, its exact moments, and a correction for the remainder -----

# Under z ~ N(0, I), E[∇g] and E[∇∇ᵀg] = E[∇g zᵀ] give the quadratic that carries a log weight g's effect on mean and
# covariance to first order. Gradients at 4 (m + 1) points suffice; values take as many as there are coefficients, ~ m².


class SteinMoments(NamedTuple):
    """Moments of N(0, I) times the weights, and their errors."""

    moments: WeightedMoments
    remainder: float  # sd of the log weights about the quadratic
    pareto_k: float  # of the weights by the remainder
    error: float  # largest expected error of a mean in sds, from the points and from a large quadratic
    off: Array  # (S, m) residuals of the gradients from the quadratic


def skewness_by_gradients(z: Array, off: Array, root: Array) -> Array:
    """Skewness of every coordinate of root z under the weights, to first order in them, (m,).

    By Stein's identity: E[(uᵀz)³ g] − 3 E[(uᵀz) g] = E[uᵀ∇g ((uᵀz)² − 1)] for unit vectors u.
    """
    along = (root / np.linalg.norm(root, axis=1)[:, None]).T
    return np.asarray(np.mean((off @ along) * ((z @ along) ** 2 - 1.0), axis=0))


def departure_by_gradients(off: Array, root: Array) -> float:
    """`departure` from residuals of the gradients, (S, m)."""
    along = off @ (root / np.linalg.norm(root, axis=1)[:, None]).T
    return float(np.sqrt(np.max(np.mean(along**2, axis=0))))


def enough_gradients(size: int, points: int) -> int:
    """Raise the number of points to what `stein_moments` needs."""
    return max(points, tol.GRADIENT_POINTS * (size + 1))


def stein_moments(z: Array, log_weights: Array, gradients: Array) -> SteinMoments | None:
    """Moments at whitened points z (S, m) from log weights (S,) and their gradients (S, m); None if not integrable."""
    count, m = z.shape
    linear = gradients.mean(axis=0)
    hessian = gradients.T @ z / count
    hessian = (hessian + hessian.T) / 2
    values, vectors = np.linalg.eigh(np.eye(m) - hessian)
    if values[0] < tol.LEAST_EIGENVALUE:
        return None
    curved = z @ hessian
    remainder = log_weights - z @ linear - 0.5 * np.sum(curved * z, axis=1)
    remainder = remainder - remainder.mean()
    weights = normalise(remainder)
    # The quadratic has the weights' first-order effect already, so that their estimate of it is subtracted.
    by_weights = weighted_moments(z, weights)
    shift = by_weights.mean - remainder @ z / count
    spread = by_weights.covariance - (z * remainder[:, None]).T @ z / count
    root = vectors / np.sqrt(values)
    root, inverse = root @ vectors.T, root @ root.T
    covariance = root @ spread @ root.T
    moments = WeightedMoments(inverse @ linear + root @ shift, (covariance + covariance.T) / 2)
    if not np.linalg.eigvalsh(moments.covariance)[0] > 0:
        return None
    residuals = gradients - linear - curved
    # Each point's share of the mean, by its gradient and its weight, as if points were independent; and to first order
    # the remainder's mean gradient under the quadratic, which the moments take to be zero, as under N(0, I).
    second_order = weights - (1.0 + remainder) / count
    parts = (residuals / count) @ inverse + (second_order[:, None] * z) @ root.T
    quadratic = log_weights - remainder
    bias = inverse @ (residuals.T @ (quadratic - quadratic.mean())) / count
    variance = np.sum(parts**2, axis=0) + bias**2
    error = float(np.sqrt(np.max(variance / np.diag(moments.covariance))))
    return SteinMoments(moments, float(np.std(remainder)), pareto_k(remainder), error, residuals)
