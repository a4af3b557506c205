"""The bound's parameters as two flat vectors, shared and a unit's own, and Adam on them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, logit

from fedppl.coregional.bound import Globals, Unit, UnitClientState, gradient
from fedppl.coregional.roles import Roles
from fedppl.types import Array, LocalFailure

# Where γ is not to be told from 0 or 1 in double precision.
_ODDS = 30.0
_LOST = "the bound has no finite gradient; lower learning_rate="


class Adam(NamedTuple):
    """Running moments of a gradient."""

    first: Array
    second: Array
    steps: float


def fresh(size: int) -> Adam:
    """Adam before its first step."""
    return Adam(np.zeros(size), np.zeros(size), 0.0)


def adam_step(x: Array, slope: Array, adam: Adam, rate: float) -> tuple[Array, Adam]:
    """One step uphill (Kingma and Ba, Algorithm 1)."""
    count = adam.steps + 1
    first, second = 0.9 * adam.first + 0.1 * slope, 0.999 * adam.second + 0.001 * slope**2
    step = (first / (1 - 0.9**count)) / (np.sqrt(second / (1 - 0.999**count)) + 1e-8)
    return x + rate * step, Adam(first, second, count)


def flatten(shared: Globals) -> Array:
    """m, the roots C of S = C C' with the diagonal on the log scale, logit γ, the kernels' parameters, log σ_w."""
    points = shared.mean.shape[1]
    root = np.linalg.cholesky(shared.covariance)
    diagonal = np.arange(points)
    root[:, diagonal, diagonal] = np.log(root[:, diagonal, diagonal])
    lower = np.tril_indices(points)
    odds = np.clip(logit(shared.inclusion), -_ODDS, _ODDS)
    return np.concatenate(
        [shared.mean.ravel(), root[:, lower[0], lower[1]].ravel(), odds, shared.kernel, [shared.log_slab_sd]]
    )


def unflatten(x: Array, role: Roles) -> Globals:
    """The inverse of `flatten`; without selection every γ is 1."""
    latents, points = role.latents, role.points
    lower, diagonal = np.tril_indices(points), np.arange(points)
    sizes = (latents * points, latents * len(lower[0]), latents, len(role.kernel))
    mean, packed, odds, kernel, slab = np.split(x, np.cumsum(sizes))
    root = np.zeros((latents, points, points))
    root[:, lower[0], lower[1]] = packed.reshape(latents, -1)
    root[:, diagonal, diagonal] = np.exp(root[:, diagonal, diagonal])
    gamma = np.ones(latents) if role.included is None else expit(odds)
    return Globals(mean.reshape(latents, points), root @ np.swapaxes(root, 1, 2), gamma, kernel, float(slab[0]))


def flatten_unit(unit: UnitClientState) -> Array:
    """μ, log τ and log σ_m."""
    return np.concatenate([unit.mean, 0.5 * np.log(unit.variance), [unit.log_noise_sd]])


def unflatten_unit(x: Array) -> UnitClientState:
    """The inverse of `flatten_unit`."""
    latents = (len(x) - 1) // 2
    return UnitClientState(x[:latents], np.exp(2 * x[latents:-1]), float(x[-1]))


def slopes(unit: Unit, x: Array, own: Array, share: float, rows: Any = None) -> tuple[Array, Array]:
    """Gradient of V_m, with its share of the priors of what is shared, in the coordinates of the two vectors."""
    role = unit.roles
    shared, state = unflatten(x, role), unflatten_unit(own)
    pull = functools.partial(unit.kernel_gradient, shared.kernel, rows=rows)
    design = unit.design(shared.kernel, rows)
    try:
        slope = gradient(design, shared, state, unit.noise, role.log_odds, share, pull)
    except np.linalg.LinAlgError as error:
        raise LocalFailure(_LOST) from error
    lower = np.tril_indices(role.points)
    kernel = slope.kernel - share * role.kernel_precision @ (shared.kernel - role.kernel_mean)
    held, prior = role.slab_prior.held, role.slab_prior
    slab = 0.0 if held else slope.log_slab_sd - share * prior.precision * (shared.log_slab_sd - prior.mean)
    odds = np.zeros(role.latents) if role.included is None else slope.log_odds
    root = slope.root[:, lower[0], lower[1]].ravel()
    shared_slope = np.concatenate([slope.mean.ravel(), root, odds, kernel, np.array([slab])])
    own_slope = np.concatenate([slope.unit_mean, slope.unit_log_sd, np.array([slope.log_noise_sd])])
    if not (np.all(np.isfinite(shared_slope)) and np.all(np.isfinite(own_slope))):
        raise LocalFailure(_LOST)
    return shared_slope, own_slope
