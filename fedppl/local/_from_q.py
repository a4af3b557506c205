"""Moments of a client's tilted distribution by importance sampling from the global q, or one near it.

Where q and the client's site are right already, the log weights are constant and the moments of q have no error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts import Moments, Target
from fedppl.local import _marginal
from fedppl.local import tolerances as tol
from fedppl.numerics import importance
from fedppl.numerics.importance import (
    controlled_moments,
    departure,
    effective_size,
    enough_points,
    has_enough_points,
    normalise,
    pareto_k,
    skewness,
)
from fedppl.numerics.streams import stream_of, whitened_points
from fedppl.types import Array, LocalFailure


class Factor(NamedTuple):
    """Log weights of a client's factor against its site in q, at points (S, m)."""

    values: Callable[[Array], Array]  # (S,)
    gradients: Callable[[Array], tuple[Array, Array]]  # (S,) and (S, m)


def moments(factor: Factor, mean: Array, root: Array, points: int, stream: int) -> Moments | None:
    """Moments under q = N(mean, root rootᵀ) times the weights; None where no weight is finite."""
    if has_enough_points(len(mean)):
        return _from_values(factor, mean, root, points, stream)
    return _from_gradients(factor, mean, root, points, stream)


def trusted(moments: Moments, limit: float) -> bool:
    """Whether weights have enough effective points, and a small Pareto k unless they hardly vary."""
    relative = moments.diagnostics["relative_ess"]
    return relative > tol.LEAST_RELATIVE and (moments.diagnostics["pareto_k"] <= limit or relative > tol.FULL_RELATIVE)


def _from_values(factor: Factor, mean: Array, root: Array, points: int, stream: int) -> Moments | None:
    for multiple, largest in tol.REMAINDERS:
        key = (len(mean), multiple * enough_points(len(mean), points), stream)
        z = whitened_points(*key)
        log_weights = factor.values(mean + z @ root.T)
        if not np.any(np.isfinite(log_weights)):
            return None
        weights = normalise(log_weights)
        white, remainder, error = controlled_moments(z, log_weights, weights, key)
        if remainder <= largest:
            break
    quality = {
        "ess": effective_size(weights),
        "relative_ess": effective_size(weights) / len(z),
        "pareto_k": pareto_k(log_weights),
        "remainder": remainder,
        "mc_error": error,
        "departure": departure(z, log_weights, key, root),
        "mode_failures": float(np.sum(~np.isfinite(log_weights))),
    }
    return _coloured(white.mean, white.covariance, mean, root, skewness(mean + z @ root.T, weights), quality)


def _from_gradients(factor: Factor, mean: Array, root: Array, points: int, stream: int) -> Moments | None:
    fitted = None
    for multiple, largest in tol.GRADIENT_REMAINDERS:
        z = whitened_points(len(mean), multiple * importance.enough_gradients(len(mean), points), stream)
        log_weights, gradients = factor.gradients(mean + z @ root.T)
        if not np.all(np.isfinite(log_weights)) or not np.all(np.isfinite(gradients)):
            return None
        fitted = importance.stein_moments(z, log_weights, gradients @ root)
        if fitted is None or fitted.remainder <= largest:
            break
    if fitted is None:
        return None
    relative = float(np.exp(-(fitted.remainder**2)))  # of log-normal weights
    quality = {
        "ess": relative * len(z),
        "relative_ess": relative,
        "pareto_k": fitted.pareto_k,
        "remainder": fitted.remainder,
        "mc_error": fitted.error,
        "departure": importance.departure_by_gradients(fitted.off, root),
        "mode_failures": 0.0,
    }
    skewed = importance.skewness_by_gradients(z, fitted.off, root)
    return _coloured(fitted.moments.mean, fitted.moments.covariance, mean, root, skewed, quality)


def _coloured(
    mean: Array, covariance: Array, center: Array, root: Array, skewed: Array, quality: dict[str, float]
) -> Moments:
    """Moments of z as those of center + root z."""
    inverse = np.linalg.inv(root)
    try:
        precision = inverse.T @ np.linalg.inv(covariance) @ inverse
    except np.linalg.LinAlgError:  # one point has all the weight, and `relative_ess` is too small
        precision = np.zeros_like(root)
    coloured = root @ covariance @ root.T
    return Moments(center + root @ mean, (coloured + coloured.T) / 2, (precision + precision.T) / 2, skewed, quality)


# A client's factor against its site in q, its own variables integrated by Laplace's approximation ---------------------


def against_site(target: Target, mean: Array, difference: Callable[[Array], Array] | None) -> Factor:
    """Log weights under q, from expansions at its mean; `difference` is the known error of Laplace's approximation."""
    client, global_, cavity, share = target
    site = gaussian.quotient(global_, cavity)

    def values(draws: Array) -> Array:
        logs = _marginal.values(client, draws, mean, share) - gaussian.log_kernel(site, draws)
        return logs if difference is None else logs + difference(draws)

    def gradients(draws: Array) -> tuple[Array, Array]:
        log_factor, slopes = _marginal.gradients(client, draws, mean, share)
        return log_factor - gaussian.log_kernel(site, draws), slopes - site.linear + draws @ site.precision

    return Factor(values, gradients)


def departure_of(target: Target) -> dict[str, float]:
    """How far the factor departs from a Gaussian, for inferences that draw: their draws are too few to estimate it."""
    if target.client.kink or not gaussian.is_proper(target.global_):
        return {}
    mean, root = gaussian.affine(target.global_)
    try:
        weighted = moments(
            against_site(target, mean, None), mean, root, tol.DEPARTURE_POINTS, stream_of(target.client.client_id)
        )
    except (LocalFailure, ArithmeticError, np.linalg.LinAlgError):
        return {}
    value = np.nan if weighted is None else weighted.diagnostics["departure"]
    return {"departure": value} if np.isfinite(value) else {}
