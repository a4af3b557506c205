"""What one unit computes: its parameters given the shared ones, its statistics, and all when the rounds are over."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from fedppl import gaussian
from fedppl.contracts import ClientView, Draws
from fedppl.coregional.bound import (
    Curves,
    Design,
    Globals,
    LogScale,
    Roles,
    UnitClientState,
    curves,
    diagonal_blocks,
    gradient,
    log_variance,
    scale_mode,
    squared_residual,
    unflatten,
    unflatten_unit,
)
from fedppl.coregional.view import CoregionalUnit, unit_of
from fedppl.settings import shown
from fedppl.types import Array, DeclarationError, LocalFailure, Message

SELECTED = 0.5  # probability above which a function is selected
_NEW_UNIT_SWEEPS = 50
_LOG_2PI = float(np.log(2 * np.pi))
_NO_GRADIENT = "the bound has no finite gradient; lower learning_rate="


def coefficients(
    design: Design, curve: Curves, inclusion: Array, log_slab_sd: float, log_noise_sd: float
) -> tuple[Array, Array]:
    """μ and τ² that maximise the bound given everything else, each (L,)."""
    rate = design.scale * np.exp(-2 * log_noise_sd)
    gram = rate * (curve.mean @ curve.mean.T)
    fit = rate * (curve.mean @ design.response)
    total = np.diag(gram) + rate * curve.variance.sum(axis=1) + np.exp(-2 * log_slab_sd)
    across = gram - np.diag(np.diag(gram))
    # The system is symmetric in √γ μ; coefficients with γ = 0 follow from the others.
    root = np.sqrt(inclusion)
    scaled = np.linalg.solve(np.diag(total) + root[:, None] * across * root, root * fit)
    return (fit - across @ (root * scaled)) / total, 1.0 / total


def best_unit(
    design: Design, shared: Globals, noise: LogScale, log_noise_sd: float, sweeps: int = 20, *, spread: float = 1.0
) -> tuple[UnitClientState, Curves]:
    """ψ_m given the shared parameters: coefficients, with `spread` 0 for point estimates, and noise in turn."""
    curve = curves(design, shared.mean, shared.covariance)
    unit = UnitClientState(np.zeros(0), np.zeros(0), log_noise_sd)
    for _ in range(sweeps):
        before = unit.log_noise_sd
        mean, variance = coefficients(design, curve, shared.inclusion, shared.log_slab_sd, before)
        unit = UnitClientState(mean, spread * variance, before)
        square = squared_residual(design, curve, shared.inclusion, unit)
        after = scale_mode(design.scale * len(design.response), design.scale * square, noise)
        unit = unit._replace(log_noise_sd=after)
        if abs(after - before) < 1e-6:
            break
    return unit, curve


def coefficient_covariance(
    design: Design, curve: Curves, joint: Array, log_slab_sd: float, log_noise_sd: float
) -> Array:
    """Covariance (L, L) of w given that all L functions are used, as in a regression on uncertain curves."""
    # The mean field leaves it out; where curves are alike on a unit's rows it is most of the uncertainty elsewhere.
    latents, rows, points = design.projection.shape
    rate = design.scale * np.exp(-2 * log_noise_sd)
    second = curve.mean @ curve.mean.T + np.diag(design.conditional.sum(axis=1))
    wide = np.moveaxis(design.projection, 0, 1).reshape(rows, latents * points)
    second += ((wide.T @ wide) * joint).reshape(latents, points, latents, points).sum(axis=(1, 3))
    return np.linalg.inv(rate * second + np.exp(-2 * log_slab_sd) * np.eye(latents))


def random_unit(
    latents: int, log_noise_sd: float, rng: np.random.Generator, *, log_sd: float = 0.0, spread: float = 1.0
) -> UnitClientState:
    """Random coefficients of this size at the start, which break the symmetry between latent functions."""
    size = float(np.exp(log_sd))
    return UnitClientState(size * rng.normal(size=latents), np.full(latents, spread * size**2 * 1e-2), log_noise_sd)


def towards(before: UnitClientState, after: UnitClientState, rate: float) -> UnitClientState:
    """A natural-gradient step of q(w_m), or of point estimates, and of log σ_m towards the maximum of a mini-batch."""
    log_noise_sd = (1 - rate) * before.log_noise_sd + rate * after.log_noise_sd
    if not np.any(after.variance):
        return UnitClientState((1 - rate) * before.mean + rate * after.mean, after.variance, log_noise_sd)
    precision = (1 - rate) / before.variance + rate / after.variance
    linear = (1 - rate) * before.mean / before.variance + rate * after.mean / after.variance
    return UnitClientState(linear / precision, 1.0 / precision, log_noise_sd)


def statistics(design: Design, unit: UnitClientState, noise: LogScale) -> dict[str, Array]:
    """A unit's statistics, whose sums over units the server needs to maximise the bound over q(v), q(α) and σ_w.

    ``precision`` (LQ, LQ) and ``linear`` (L, Q) are of v, without the factors γ; ``penalty`` (L,) is the cost of a used
    function beside them, ``second`` (L,) is μ² + τ², ``log_variance`` (L,) is log τ², ``constant`` the rest.
    """
    latents, rows, points = design.projection.shape
    rate = design.scale * np.exp(-2 * unit.log_noise_sd)
    weighted = np.moveaxis(unit.mean[:, None, None] * design.projection, 0, 1).reshape(rows, latents * points)
    precision = rate * (weighted.T @ weighted)
    blocks = precision.reshape(latents, points, latents, points)
    for place, projection in enumerate(design.projection):
        blocks[place, :, place, :] += rate * unit.variance[place] * (projection.T @ projection)
    linear = rate * unit.mean[:, None] * (np.swapaxes(design.projection, 1, 2) @ design.response)
    count, second = design.scale * len(design.response), unit.mean**2 + unit.variance
    return {
        "precision": precision,
        "linear": linear,
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


def slopes(unit: CoregionalUnit, x: Array, unit_x: Array, share: float, rows: Any = None) -> tuple[Array, Array]:
    """Gradient of V_m with its share of the priors of shared parameters, in the coordinates of the two vectors."""
    role = unit.roles
    shared, state = unflatten(x, role), unflatten_unit(unit_x)
    pull = functools.partial(unit.kernel_gradient, shared.kernel, rows=rows)
    design = unit.design(shared.kernel, rows)
    try:
        slope = gradient(design, shared, state, unit.noise, role.log_odds, share, pull)
    except np.linalg.LinAlgError as error:
        raise LocalFailure(_NO_GRADIENT) from error
    lower = np.tril_indices(role.points)
    kernel = slope.kernel - share * role.kernel_precision @ (shared.kernel - role.kernel_mean)
    prior = role.slab_prior
    slab = 0.0 if prior.is_fixed else slope.log_slab_sd - share * prior.precision * (shared.log_slab_sd - prior.mean)
    odds = np.zeros(role.latents) if role.included is None else slope.log_odds
    root = slope.root[:, lower[0], lower[1]].ravel()
    shared_slope = np.concatenate([slope.mean.ravel(), root, odds, kernel, np.array([slab])])
    unit_slope = np.concatenate([slope.unit_mean, slope.unit_log_sd, np.array([slope.log_noise_sd])])
    if not (np.all(np.isfinite(shared_slope)) and np.all(np.isfinite(unit_slope))):
        raise LocalFailure(_NO_GRADIENT)
    return shared_slope, unit_slope


def own_fit(unit: CoregionalUnit) -> tuple[Array, float]:
    """Kernels (p,) of sparse Gaussian processes of one unit's rows, one a latent function, and the median log σ."""
    mean, latents = unit.roles.kernel_mean, unit.roles.latents
    spread = 1.0 / np.sqrt(np.diag(unit.roles.kernel_precision))
    scale = unit.roles.slab_prior.mean  # of outputs, on the log scale
    level = scale + float(np.clip(np.log(np.std(unit.response) / np.exp(scale) + 1e-3), -3.0, 3.0))
    lowest, kernel, log_noise_sd = np.inf, mean, unit.noise.mean
    # Far outside the priors' range, and below where the square of an exponential overflows.
    bounds = [*zip(mean - 6 * spread, mean + 6 * spread, strict=True), *[(-15.0, 15.0)] * (2 * latents)]
    for shift in (0.0, -1.0, 1.0):  # of the length-scale: a curve that is all noise is a mode too
        start = np.concatenate([mean + shift * spread, np.full(latents, level), np.full(latents, level - 1.5)])
        optimum = minimize(
            _negative_evidence, start, (unit,), jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 60}
        )
        if np.isfinite(optimum.fun) and optimum.fun < lowest:
            lowest, kernel = optimum.fun, optimum.x[: len(mean)]
            log_noise_sd = float(np.median(optimum.x[-latents:]))
    return kernel, log_noise_sd


def _negative_evidence(x: Array, unit: CoregionalUnit) -> tuple[float, Array]:
    """Minus Titsias' bound with the priors of the estimates, summed over the kernels, and its gradient."""
    mean, precision, slab_prior = unit.roles.kernel_mean, unit.roles.kernel_precision, unit.roles.slab_prior
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
    # The curve is as large as its coefficient, which is not known even where σ_w is fixed.
    size_prior = slab_prior._replace(precision=min(slab_prior.precision, 1.0))
    for prior, at, into in ((size_prior, log_sd, d_log_sd), (unit.noise, log_noise, d_log_noise)):
        value -= 0.5 * prior.precision * np.sum((at - prior.mean) ** 2)
        into -= prior.precision * (at - prior.mean)
    return -float(value), -np.concatenate([d_kernel, d_log_sd, d_log_noise])


# How a fit is read in the end: predictions in closed form, draws, a new unit ------------------------------------------


class Fitted(NamedTuple):
    """Shared parameters at the end of a fit, with the covariance of v over all latent functions."""

    shared: Globals
    joint: Array  # (LQ, LQ)
    has_replied: bool = False  # whether the unit's own rows are in these
    spread: float = 1.0  # of coefficients' variances; 0 for point estimates


class Coefficients(NamedTuple):
    """q(w | α = 1) of one unit, with a covariance of its own."""

    mean: Array  # (L,)
    covariance: Array  # (L, L)
    log_noise_sd: float


def final_message(shared: Globals, joint: Array, *, has_replied: bool, point: bool = False) -> Message:
    """What a unit needs when the rounds are over; one that has not replied, such as a new one, is fitted anew."""
    return {
        "has_replied": np.array(float(has_replied)),
        "mean": shared.mean,
        "joint": gaussian.pack_triangle(joint),
        "inclusion": shared.inclusion,
        "kernel": shared.kernel,
        "log_slab_sd": np.array(shared.log_slab_sd),
        **({"point": np.array(1.0)} if point else {}),
    }


def unpack(message: Message) -> Fitted:
    """Read `final_message`."""
    mean = np.asarray(message["mean"], dtype=float)
    joint = gaussian.unpack_triangle(np.asarray(message["joint"], dtype=float))
    # The mean field's covariances are inverses of the precision's blocks, smaller than the blocks of `joint`.
    blocks = np.linalg.inv(diagonal_blocks(np.linalg.inv(joint), len(mean)))
    inclusion, kernel = (np.asarray(message[name], dtype=float) for name in ("inclusion", "kernel"))
    shared = Globals(mean, blocks, inclusion, kernel, float(message["log_slab_sd"]))
    return Fitted(shared, joint, bool(message["has_replied"]), 0.0 if "point" in message else 1.0)


def selected_only(fitted: Fitted) -> Fitted:
    """The model of a new unit: the selected functions with probability 1, the others with 0."""
    shared = fitted.shared
    return fitted._replace(shared=shared._replace(inclusion=np.where(shared.inclusion > SELECTED, 1.0, 0.0)))


def with_latents(fitted: Fitted, latents: Iterable[int]) -> Fitted:
    """The model that uses these latent functions with probability 1, and no others."""
    numbers = list(latents) if isinstance(latents, Iterable) else [None]
    shared, count = fitted.shared, len(fitted.shared.inclusion)
    are_numbers = all(np.asarray(number).dtype.kind in "iuf" and not np.ndim(number) for number in numbers)
    chosen = {float(number) for number in numbers} if are_numbers else set()
    if not chosen or not chosen <= set(range(count)):
        raise DeclarationError(
            f"latents={shown(latents)} must be some of the numbers 0 to {count - 1}; of a mask, np.flatnonzero(mask)."
        )
    return fitted._replace(shared=shared._replace(inclusion=np.isin(np.arange(count), list(chosen)).astype(float)))


def settled(
    unit: CoregionalUnit, fitted: Fitted, log_noise_sd: float | None, *, fixed: bool = False
) -> tuple[Coefficients, Fitted]:
    """A unit's own parameters from its rows, and the shared ones as it uses them."""
    if not fitted.has_replied:
        return settle_new(unit, fitted, fixed=fixed)
    return _settle(unit, fitted, unit.noise.mean if log_noise_sd is None else log_noise_sd), fitted


def _settle(unit: CoregionalUnit, fitted: Fitted, log_noise_sd: float) -> Coefficients:
    """A unit's own parameters given the shared ones, from this start of the noise."""
    shared = fitted.shared
    design = unit.design(shared.kernel)
    state, curve = best_unit(design, shared, unit.noise, log_noise_sd, spread=fitted.spread)
    covariance = coefficient_covariance(design, curve, fitted.joint, shared.log_slab_sd, state.log_noise_sd)
    return Coefficients(state.mean, fitted.spread * covariance, state.log_noise_sd)


def settle_new(unit: CoregionalUnit, fitted: Fitted, *, fixed: bool) -> tuple[Coefficients, Fitted]:
    """Parameters of a unit that took no part, from its own rows and the shared functions (section 4.3).

    `fixed` is equation 17, where these stay as they are; else q(v) of the others is the unit's prior of v. Coefficients
    have their prior and a posterior, where equation 17 has parameters.
    """
    if fixed:
        return _settle(unit, fitted, unit.noise.mean), fitted
    shared, noise = fitted.shared, unit.noise.mean
    latents, points = shared.mean.shape
    design = unit.design(shared.kernel)
    used = np.repeat(shared.inclusion, points)
    prior = np.linalg.inv(fitted.joint)
    linear, precision = prior @ shared.mean.ravel(), prior
    for _ in range(_NEW_UNIT_SWEEPS):
        state, _ = best_unit(design, shared, unit.noise, noise, spread=fitted.spread)
        sums = statistics(design, state, unit.noise)
        precision = prior + used[:, None] * sums["precision"] * used
        solved = np.linalg.solve(precision, linear + used * sums["linear"].ravel())
        mean: Array = np.asarray(solved, dtype=float).reshape(latents, points)
        blocks = np.linalg.inv(diagonal_blocks(precision, latents))
        has_converged = np.max(np.abs(mean - shared.mean)) < 1e-6 and abs(state.log_noise_sd - noise) < 1e-6
        shared, noise = shared._replace(mean=mean, covariance=blocks), state.log_noise_sd
        if has_converged:
            break
    joint = np.linalg.inv(precision)
    fitted = fitted._replace(shared=shared, joint=(joint + joint.T) / 2, has_replied=True)
    return _settle(unit, fitted, noise), fitted


def predictive(design: Design, fitted: Fitted, weights: Coefficients) -> tuple[Array, Array]:
    """Mean and variance (n,) of f at the design's inputs: the law of total variance over w, α, v and the residual."""
    shared = fitted.shared
    latents, rows, points = design.projection.shape
    curve, gamma = curves(design, shared.mean, shared.covariance), shared.inclusion
    mean = (gamma * weights.mean) @ curve.mean
    pair = np.outer(gamma, gamma)
    np.fill_diagonal(pair, gamma)
    product = pair * (np.outer(weights.mean, weights.mean) + weights.covariance)  # E s s'
    variance = np.zeros(rows)
    blocks = fitted.joint.reshape(latents, points, latents, points)
    for first in range(latents):
        for second in range(first, latents):
            if product[first, second] == 0.0:
                continue
            cross = design.projection[first] @ blocks[first, :, second, :]
            across = np.sum(cross * design.projection[second], axis=1)
            term = product[first, second] * (across + curve.mean[first] * curve.mean[second])
            variance += term if first == second else 2.0 * term
    variance += np.diag(product) @ design.conditional
    return mean, np.maximum(variance - mean**2, 0.0)


def sample(role: Roles, message: Message, count: int, rng: np.random.Generator) -> Array:
    """Draws (count, m) of the shared parameters: q(v), q(α), estimates of kernels and σ_w, equal in all draws."""
    fitted = unpack(message)
    phi = np.zeros((count, len(role.is_binary)))
    root = np.linalg.cholesky(fitted.joint + 1e-12 * np.eye(len(fitted.joint)))
    phi[:, role.v] = fitted.shared.mean.ravel() + rng.normal(size=(count, len(root))) @ root.T
    if role.included is not None:
        phi[:, role.included] = rng.random((count, role.latents)) < fitted.shared.inclusion
    phi[:, role.kernel] = fitted.shared.kernel
    phi[:, role.slab] = fitted.shared.log_slab_sd
    return phi


def estimated(role: Roles) -> Array:
    """Whether a coordinate of φ is a point estimate (m,): the kernels' parameters and σ_w."""
    is_estimate = np.zeros(len(role.is_binary), dtype=bool)
    is_estimate[role.kernel] = is_estimate[role.slab] = True
    return is_estimate


def draw(
    client: ClientView,
    personal: UnitClientState | None,
    message: Message,
    draws: int,
    chains: int,
    rng: np.random.Generator,
) -> Draws:
    """Draws of the shared and of the unit's own variables from the variational posterior."""
    unit, count = client.view(unit_of), draws * chains
    fitted = unpack(message)
    fitted = fitted if fitted.has_replied else selected_only(fitted)
    q, fitted = settled(unit, fitted, None if personal is None else personal.log_noise_sd)
    shared, role = fitted.shared, unit.roles
    phi = sample(role, final_message(shared, fitted.joint, has_replied=True), count, rng)
    used = np.ones((count, role.latents)) if role.included is None else phi[:, role.included]
    w = np.broadcast_to(q.mean, (count, role.latents))
    if fitted.spread:
        root = np.linalg.cholesky(q.covariance + 1e-12 * np.eye(role.latents))
        w = w + rng.normal(size=(count, role.latents)) @ root.T
    unused = np.exp(shared.log_slab_sd) * rng.normal(size=w.shape)
    values = {
        "w": np.where(used > 0.5, w, unused),
        "noise_sd": np.full((count, 1), q.log_noise_sd),
        "residual": rng.normal(size=(count, len(unit.response))),
    }
    local = np.concatenate([values[variable.name] for variable in client.local], axis=1)
    is_estimate = estimated(role)
    names = [name for name, places in client.layout.slices.items() if is_estimate[places].all()]
    names += ["noise_sd"] if fitted.spread else ["w", "noise_sd"]
    return Draws(phi.reshape(chains, draws, -1), local.reshape(chains, draws, -1), {}, tuple(names))
