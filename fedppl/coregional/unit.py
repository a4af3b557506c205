"""What one unit computes in the coordinate ascent: its own parameters given the shared ones, and its statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from fedppl.coregional.bound import (
    Curves,
    Design,
    Globals,
    Unit,
    UnitClientState,
    curves,
    log_variance,
    squared_residual,
)
from fedppl.coregional.roles import LogScale
from fedppl.types import Array

_LOG_2PI = float(np.log(2 * np.pi))


def scale_mode(count: float, square: float, prior: LogScale) -> float:
    """The log σ that maximises −count · log σ − square / (2 σ²) + log p(log σ), a concave function."""
    x = prior.mean
    if count > 0 and square > 0:
        x = (count * 0.5 * np.log(square / count) + prior.precision * prior.mean) / (count + prior.precision)
    for _ in range(100):
        pulled = square * np.exp(-2 * x)
        slope = -count + pulled - prior.precision * (x - prior.mean)
        step = slope / (2 * pulled + prior.precision)
        x += float(np.clip(step, -2.0, 2.0))
        if abs(step) < 1e-12:
            break
    return float(x)


def coefficients(
    design: Design, curve: Curves, inclusion: Array, log_slab_sd: float, log_noise_sd: float
) -> tuple[Array, Array]:
    """μ and τ² that maximise the bound given everything else, each (L,)."""
    rate = design.scale * np.exp(-2 * log_noise_sd)
    gram = rate * (curve.mean @ curve.mean.T)
    fit = rate * (curve.mean @ design.response)
    own = np.diag(gram) + rate * curve.variance.sum(axis=1) + np.exp(-2 * log_slab_sd)
    across = gram - np.diag(np.diag(gram))
    # Symmetric in √γ μ; those with γ = 0 follow from the others.
    root = np.sqrt(inclusion)
    scaled = np.linalg.solve(np.diag(own) + root[:, None] * across * root, root * fit)
    mean = (fit - across @ (root * scaled)) / own
    return mean, 1.0 / own


def point_coefficients(
    design: Design, curve: Curves, inclusion: Array, log_slab_sd: float, log_noise_sd: float
) -> tuple[Array, Array]:
    """w at the bound's mode where it is a parameter, with its prior, and no variance, each (L,)."""
    mean, _ = coefficients(design, curve, inclusion, log_slab_sd, log_noise_sd)
    return mean, np.zeros_like(mean)


def best_unit(
    design: Design,
    shared: Globals,
    noise: LogScale,
    log_noise_sd: float,
    sweeps: int = 20,
    *,
    solve: Callable[..., tuple[Array, Array]] = coefficients,
) -> tuple[UnitClientState, Curves]:
    """ψ_m given the shared parameters: coefficients, by `solve`, and noise in turn, each at its own maximum."""
    curve = curves(design, shared.mean, shared.covariance)
    unit = UnitClientState(np.zeros(0), np.zeros(0), log_noise_sd)
    for _ in range(sweeps):
        before = unit.log_noise_sd
        mean, variance = solve(design, curve, shared.inclusion, shared.log_slab_sd, before)
        unit = UnitClientState(mean, variance, before)
        square = squared_residual(design, curve, shared.inclusion, unit)
        after = scale_mode(design.scale * len(design.response), design.scale * square, noise)
        unit = unit._replace(log_noise_sd=after)
        if abs(after - before) < 1e-6:
            break
    return unit, curve


def coefficient_covariance(
    design: Design, curve: Curves, joint: Array, log_slab_sd: float, log_noise_sd: float
) -> Array:
    """Covariance (L, L) of w given that all L functions are used: of the regression on curves that are not known.

    Mean-field coefficients are independent; those of curves that look alike on a unit's rows are not, and away from
    the rows that is most of the uncertainty. `joint` (LQ, LQ) is the covariance of v over all latent functions.
    """
    latents, rows, points = design.projection.shape
    rate = design.scale * np.exp(-2 * log_noise_sd)
    second = curve.mean @ curve.mean.T + np.diag(design.conditional.sum(axis=1))
    wide = np.moveaxis(design.projection, 0, 1).reshape(rows, latents * points)
    gram = (wide.T @ wide) * joint
    second += gram.reshape(latents, points, latents, points).sum(axis=(1, 3))
    return np.linalg.inv(rate * second + np.exp(-2 * log_slab_sd) * np.eye(latents))


def random_unit(latents: int, log_noise_sd: float, rng: np.random.Generator) -> UnitClientState:
    """Coefficients to start from, which break the symmetry between latent functions."""
    return UnitClientState(rng.normal(size=latents), np.full(latents, 1e-2), log_noise_sd)


def scaled(unit: UnitClientState, log_slab_sd: float) -> UnitClientState:
    """Coefficients of scale 1 in units of the outputs."""
    factor = float(np.exp(log_slab_sd))
    return unit._replace(mean=factor * unit.mean, variance=factor**2 * unit.variance)


def random_point(latents: int, log_noise_sd: float, rng: np.random.Generator) -> UnitClientState:
    """The same without a variance."""
    return random_unit(latents, log_noise_sd, rng)._replace(variance=np.zeros(latents))


def towards(before: UnitClientState, after: UnitClientState, rate: float) -> UnitClientState:
    """A natural-gradient step of q(w_m), and of log σ_m, towards what a mini-batch alone would have."""
    precision = (1 - rate) / before.variance + rate / after.variance
    linear = (1 - rate) * before.mean / before.variance + rate * after.mean / after.variance
    log_noise_sd = (1 - rate) * before.log_noise_sd + rate * after.log_noise_sd
    return UnitClientState(linear / precision, 1.0 / precision, log_noise_sd)


def point_towards(before: UnitClientState, after: UnitClientState, rate: float) -> UnitClientState:
    """Part of the way from one point to another."""
    mean = (1 - rate) * before.mean + rate * after.mean
    return UnitClientState(mean, after.variance, (1 - rate) * before.log_noise_sd + rate * after.log_noise_sd)


def no_covariance(design: Design, curve: Curves, joint: Array, log_slab_sd: float, log_noise_sd: float) -> Array:
    """Covariance (L, L) of coefficients that are estimates."""
    return np.zeros((len(design.projection),) * 2)


class Own(NamedTuple):
    """What a unit does with its own parameters."""

    start: Callable[[int, float, np.random.Generator], UnitClientState]
    best: Callable[..., tuple[UnitClientState, Curves]]
    towards: Callable[[UnitClientState, UnitClientState, float], UnitClientState]
    covariance: Callable[[Design, Curves, Array, float, float], Array]


POSTERIOR = Own(random_unit, best_unit, towards, coefficient_covariance)
POINT = Own(random_point, functools.partial(best_unit, solve=point_coefficients), point_towards, no_covariance)


def statistics(design: Design, unit: UnitClientState, noise: LogScale) -> dict[str, Array]:
    """What the server needs of a unit to maximise the bound over q(v), q(α) and σ_w: its sum over units is enough.

    ``precision`` (LQ, LQ) and ``linear`` (L, Q) are of v, without the factors γ; ``penalty`` (L,) is what a used
    function costs beside them, ``second`` (L,) is μ² + τ², ``log_variance`` (L,) is log τ², ``constant`` the rest.
    """
    latents, rows, points = design.projection.shape
    rate = design.scale * np.exp(-2 * unit.log_noise_sd)
    weighted = np.moveaxis(unit.mean[:, None, None] * design.projection, 0, 1).reshape(rows, latents * points)
    precision = rate * (weighted.T @ weighted)
    blocks = precision.reshape(latents, points, latents, points)
    for place, own in enumerate(design.projection):
        blocks[place, :, place, :] += rate * unit.variance[place] * (own.T @ own)
    linear = rate * unit.mean[:, None] * (np.swapaxes(design.projection, 1, 2) @ design.response)
    return {"precision": precision, "linear": linear, **scalars(design, unit, noise)}


def scalars(design: Design, unit: UnitClientState, noise: LogScale) -> dict[str, Array]:
    """The part of a unit's statistics that has no Q: numbers for each latent function, and for the unit."""
    count = design.scale * len(design.response)
    rate = design.scale * np.exp(-2 * unit.log_noise_sd)
    second = unit.mean**2 + unit.variance
    return {
        "penalty": 0.5 * rate * second * design.conditional.sum(axis=1),
        "second": second,
        "log_variance": log_variance(unit),
        "constant": np.array(
            -count * (unit.log_noise_sd + 0.5 * _LOG_2PI)
            - 0.5 * rate * float(design.response @ design.response)
            + noise.log_density(unit.log_noise_sd)
        ),
        "units": np.array(1.0),
    }


class OwnFit(NamedTuple):
    """A unit's own Gaussian process, one for each latent function's kernel."""

    kernel: Array  # (p,)
    log_sd: Array  # (L,) of the function
    log_noise_sd: Array  # (L,)
    log_evidence: float


def own_fit(unit: Unit, kernel_prior: tuple[Array, Array], slab_prior: LogScale) -> OwnFit:
    """Fit a sparse Gaussian process to one unit's own rows, nothing exchanged: Titsias' bound, at its highest mode.

    The bound is maximised from three length-scales, since a curve that is noise alone is a mode as well.
    """
    mean, precision = kernel_prior
    spread = 1.0 / np.sqrt(np.diag(precision))
    latents = unit.roles.latents
    scale = slab_prior.mean  # of outputs, on the log scale
    level = scale + float(np.clip(np.log(np.std(unit.response) / np.exp(scale) + 1e-3), -3.0, 3.0))
    best = OwnFit(mean, np.zeros(latents), np.full(latents, unit.noise.mean), -np.inf)
    # Far beyond what priors allow, and short of where the squares of an exponential overflow.
    bounds = [*zip(mean - 6 * spread, mean + 6 * spread, strict=True), *[(-15.0, 15.0)] * (2 * latents)]
    for shift in (0.0, -1.0, 1.0):
        start = np.concatenate([mean + shift * spread, np.full(latents, level), np.full(latents, level - 1.5)])
        found = minimize(
            _negative_evidence,
            start,
            (unit, mean, precision, slab_prior),
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"maxiter": 60},
        )
        if np.isfinite(found.fun) and -found.fun > best.log_evidence:
            size = len(mean)
            best = OwnFit(found.x[:size], found.x[size:-latents], found.x[-latents:], float(-found.fun))
    return best


def _negative_evidence(
    x: Array, unit: Unit, mean: Array, precision: Array, slab_prior: LogScale
) -> tuple[float, Array]:
    """Minus Titsias' bound with the priors of what is estimated, summed over the kernels, and its gradient."""
    latents, size = unit.roles.latents, len(mean)
    kernel, log_sd, log_noise = x[:size], x[size:-latents], x[-latents:]
    design = unit.design(kernel)
    y, rows = design.response, len(design.response)
    rate, square_sd = np.exp(-2 * log_noise), np.exp(2 * log_sd)
    wide = np.exp(log_sd)[:, None, None] * design.projection
    inner = np.eye(wide.shape[2]) + rate[:, None, None] * (np.swapaxes(wide, 1, 2) @ wide)
    inverse = np.linalg.inv(inner)
    c = rate[:, None] * (inverse @ (np.swapaxes(wide, 1, 2) @ y)[:, :, None])[:, :, 0]
    error = y - (wide @ c[:, :, None])[:, :, 0]
    missed = 0.5 * rate * square_sd * design.conditional.sum(axis=1)
    value = (
        -rows * (log_noise + 0.5 * _LOG_2PI)
        - 0.5 * np.linalg.slogdet(inner)[1]
        - 0.5 * (rate * np.sum(error**2, axis=1) + np.sum(c**2, axis=1))
        - missed
    ).sum()
    d_wide = rate[:, None, None] * (error[:, :, None] * c[:, None, :] - wide @ inverse)
    d_log_sd = np.sum(d_wide * wide, axis=(1, 2)) - 2.0 * missed
    trace = wide.shape[2] - np.trace(inverse, axis1=1, axis2=2)
    d_log_noise = -rows + trace + rate * np.sum(error**2, axis=1) + 2.0 * missed
    d_conditional = np.broadcast_to((-0.5 * rate * square_sd)[:, None], design.conditional.shape)
    d_kernel = unit.kernel_gradient(
        kernel, np.exp(log_sd)[:, None, None] * d_wide, np.ascontiguousarray(d_conditional)
    ) - precision @ (kernel - mean)
    value -= 0.5 * (kernel - mean) @ precision @ (kernel - mean)
    # The curve is as large as its coefficient, which is not known where σ_w is held.
    size_prior = slab_prior._replace(precision=min(slab_prior.precision, 1.0))
    for prior, at, into in ((size_prior, log_sd, d_log_sd), (unit.noise, log_noise, d_log_noise)):
        value -= 0.5 * prior.precision * np.sum((at - prior.mean) ** 2)
        into -= prior.precision * (at - prior.mean)
    return -float(value), -np.concatenate([d_kernel, d_log_sd, d_log_noise])
