"""What one unit computes: its parameters given the shared ones, its statistics, and all when the rounds are over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import logit

from fedppl import gaussian
from fedppl.contracts import ClientView, Draws
from fedppl.coregional import bound
from fedppl.coregional.bound import Curves, Design, Globals, LogScale, Roles, UnitClientState
from fedppl.coregional.view import CoregionalUnit, unit_of
from fedppl.settings import shown
from fedppl.types import Array, DeclarationError, LocalFailure, Message, Rng

SELECTED = 0.5  # probability above which a function is selected
_NEW_UNIT_SWEEPS = 50
_LOG_2PI = float(np.log(2 * np.pi))


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
    curve = bound.curves(design, shared)
    for _ in range(sweeps):
        before = log_noise_sd
        mean, variance = coefficients(design, curve, shared.inclusion, shared.log_slab_sd, before)
        unit = UnitClientState(mean, spread * variance, before)
        square = bound.squared_residual(design, curve, shared.inclusion, unit)
        log_noise_sd = bound.scale_mode(design.scale * len(design.response), design.scale * square, noise)
        if abs(log_noise_sd - before) < 1e-6:
            break
    return unit._replace(log_noise_sd=log_noise_sd), curve


def coefficient_covariance(
    design: Design, curve: Curves, joint: Array, log_slab_sd: float, log_noise_sd: float
) -> Array:
    """Covariance (L, L) of w given that all L functions are used, as in a regression on uncertain curves."""
    # The mean field leaves it out; where curves are alike on a unit's rows it is most of the uncertainty elsewhere.
    latents, _, points = design.projection.shape
    rate, wide = design.scale * np.exp(-2 * log_noise_sd), design.wide
    second = curve.mean @ curve.mean.T + np.diag(design.conditional.sum(axis=1))
    second += ((wide.T @ wide) * joint).reshape(latents, points, latents, points).sum(axis=(1, 3))
    return np.linalg.inv(rate * second + np.exp(-2 * log_slab_sd) * np.eye(latents))


def random_unit(
    latents: int, log_noise_sd: float, rng: Rng, *, log_sd: float = 0.0, spread: float = 1.0
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
    rate, wide = design.scale * np.exp(-2 * unit.log_noise_sd), design.wide
    products = rate * np.outer(unit.mean, unit.mean) + np.diag(rate * unit.variance)  # of E w w'
    count, second = design.scale * len(design.response), unit.mean**2 + unit.variance
    return {
        "precision": bound.by_block(products, design.projection.shape[2]) * (wide.T @ wide),
        "linear": rate * unit.mean[:, None] * (design.projection.mT @ design.response),
        "penalty": 0.5 * rate * second * design.conditional.sum(axis=1),
        "second": second,
        "log_variance": bound.log_variance(unit),
        "constant": np.array(
            -count * (unit.log_noise_sd + 0.5 * _LOG_2PI)
            - 0.5 * rate * float(design.response @ design.response)
            + noise.log_density(unit.log_noise_sd)
        ),
        "units": np.array(1.0),
    }


def slopes(unit: CoregionalUnit, x: Array, unit_x: Array, share: float, rows: Any = None) -> tuple[Array, Array]:
    """Gradient of V_m with its share of the priors of shared parameters, in the coordinates of the two vectors."""
    role, shared, own = unit.roles, bound.unflatten(x, unit.roles), bound.unflatten_unit(unit_x)
    root, prior, diagonal = bound.roots(x, role), role.slab_prior, np.arange(role.points)
    design, gamma, slab = unit.design(shared.kernel, rows), shared.inclusion, np.exp(-2 * shared.log_slab_sd)
    curve = bound.curves(design, shared)
    slope = bound.design_slopes(design, shared, own, curve)
    rate, second = design.scale * np.exp(-2 * own.log_noise_sd), own.mean**2 + own.variance
    error = design.response - (gamma * own.mean) @ curve.mean
    fit, square = curve.mean @ error, np.sum(curve.mean**2, axis=1)
    total = np.sum(curve.mean**2 + curve.variance, axis=1)
    # Of q(v), q(α), the kernels and σ_w, in the order of `flatten`.
    d_mean = (design.projection.mT @ slope.mean[:, :, None])[:, :, 0] - share * shared.mean
    inner = design.projection.mT @ (slope.variance[:, :, None] * design.projection)
    d_root = 2.0 * (inner - 0.5 * share * np.eye(role.points)) @ root
    d_root[:, diagonal, diagonal] = d_root[:, diagonal, diagonal] * root[:, diagonal, diagonal] + share
    d_odds = np.zeros(role.latents)
    if not np.all(np.isinf(role.log_odds)):
        d_gamma = rate * (own.mean * fit - 0.5 * second * total + gamma * own.mean**2 * square)
        d_gamma -= bound.slab_divergence(own, shared.log_slab_sd)
        inside = (gamma > 0) & (gamma < 1)
        odds = logit(gamma[inside]) - role.log_odds[inside]
        d_odds[inside] = (gamma * (1.0 - gamma))[inside] * (d_gamma[inside] - share * odds)
    d_kernel = unit.kernel_gradient(shared.kernel, slope.projection, slope.variance, rows)
    d_kernel -= share * role.kernel_precision @ (shared.kernel - role.kernel_mean)
    d_slab = gamma @ (second * slab - 1.0) - share * prior.precision * (shared.log_slab_sd - prior.mean)
    # Of the unit's own coefficients and noise.
    d_weight = rate * gamma * (fit - own.mean * total + gamma * own.mean * square) - gamma * own.mean * slab
    d_weight_sd = -rate * gamma * own.variance * total - gamma * (own.variance * slab - 1.0)
    residual = bound.squared_residual(design, curve, gamma, own)
    d_noise = rate * residual - design.scale * len(error) - unit.noise.precision * (own.log_noise_sd - unit.noise.mean)
    packed = d_root[:, *np.tril_indices(role.points)].ravel()
    of_shared = np.concatenate([d_mean.ravel(), packed, d_odds, d_kernel, [0.0 if prior.is_fixed else d_slab]])
    of_unit = np.concatenate([d_weight, d_weight_sd, [d_noise]])
    if not (np.all(np.isfinite(of_shared)) and np.all(np.isfinite(of_unit))):
        raise LocalFailure("the bound has no finite gradient; lower learning_rate=")
    return of_shared, of_unit


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
    d_conditional = np.repeat((-0.5 * rate * square_sd)[:, None], rows, axis=1)
    d_kernel = unit.kernel_gradient(kernel, np.exp(log_sd)[:, None, None] * d_wide, d_conditional)
    d_kernel -= precision @ (kernel - mean)
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


def message_of(shared: Globals, **others: Any) -> Message:
    """Shared parameters and others as arrays; what is None is left out."""
    return {name: np.asarray(value) for name, value in {**shared._asdict(), **others}.items() if value is not None}


def shared_in(message: Message, covariance: Array) -> Globals:
    """The shared parameters in a message, with covariances (L, Q, Q) that come in another form."""
    mean, inclusion, kernel = (np.asarray(message[name], dtype=float) for name in ("mean", "inclusion", "kernel"))
    return Globals(mean, covariance, inclusion, kernel, float(message["log_slab_sd"]))


def unpack(message: Message) -> Fitted:
    """Read the final message."""
    joint = gaussian.unpack_triangle(message["joint"])
    # The mean field's covariances are inverses of the precision's blocks, smaller than the blocks of `joint`.
    blocks = np.linalg.inv(bound.diagonal_blocks(np.linalg.inv(joint), len(message["inclusion"])))
    has_replied, spread = bool(message["has_replied"]), 0.0 if "point" in message else 1.0
    return Fitted(shared_in(message, blocks), joint, has_replied, spread)


def settled(
    unit: CoregionalUnit,
    fitted: Fitted,
    log_noise_sd: float | None,
    latents: Iterable[int] | None = None,
    *,
    fixed: bool = False,
) -> tuple[Coefficients, Fitted]:
    """A unit's own parameters from its rows, and the shared ones as it uses them.

    `latents` alone are used, with probability 1; by default, at a unit that took no part, those that are selected. Its
    rows update q(v), unless the latent functions are `fixed`, as in equation 17.
    """
    noise, shared = unit.noise.mean, fitted.shared
    if latents is not None:
        shared = shared._replace(inclusion=_asked_for(latents, len(shared.inclusion)))
    elif not fitted.has_replied:
        shared = shared._replace(inclusion=(shared.inclusion > SELECTED).astype(float))
    fitted = fitted._replace(shared=shared)
    if not (fitted.has_replied or fixed):
        fitted, noise = _updated(unit, fitted)
    elif fitted.has_replied and log_noise_sd is not None:
        noise = log_noise_sd
    shared, design = fitted.shared, unit.design(fitted.shared.kernel)
    state, curve = best_unit(design, shared, unit.noise, noise, spread=fitted.spread)
    covariance = coefficient_covariance(design, curve, fitted.joint, shared.log_slab_sd, state.log_noise_sd)
    return Coefficients(state.mean, fitted.spread * covariance, state.log_noise_sd), fitted


def _asked_for(latents: Iterable[int], count: int) -> Array:
    """Which latent functions these numbers name, 0 or 1 each (L,)."""
    numbers = [np.asarray(one) for one in latents] if isinstance(latents, Iterable) else []
    if not numbers or not all(one.ndim == 0 and one.dtype.kind in "iuf" and one in range(count) for one in numbers):
        raise DeclarationError(
            f"latents={shown(latents)} must be some of the numbers 0 to {count - 1}; of a mask, np.flatnonzero(mask)."
        )
    return np.isin(np.arange(count), numbers).astype(float)


def _updated(unit: CoregionalUnit, fitted: Fitted) -> tuple[Fitted, float]:
    """q(v) with the rows of a unit that took no part, whose prior of v is q(v) of the others, and log σ (section 4.3).

    Coefficients have their prior and a posterior, where equation 17 has parameters.
    """
    shared, noise = fitted.shared, unit.noise.mean
    design, used = unit.design(shared.kernel), np.repeat(shared.inclusion, shared.mean.shape[1])
    prior = np.linalg.inv(fitted.joint)
    linear, precision = prior @ shared.mean.ravel(), prior
    for _ in range(_NEW_UNIT_SWEEPS):
        before = shared.mean, noise
        state, _ = best_unit(design, shared, unit.noise, noise, spread=fitted.spread)
        sums, noise = statistics(design, state, unit.noise), state.log_noise_sd
        precision = prior + used[:, None] * sums["precision"] * used
        solved = np.linalg.solve(precision, linear + used * sums["linear"].ravel())
        mean = np.asarray(solved, dtype=float).reshape(shared.mean.shape)
        blocks = np.linalg.inv(bound.diagonal_blocks(precision, len(mean)))
        shared = shared._replace(mean=mean, covariance=blocks)
        if np.max(np.abs(mean - before[0])) < 1e-6 and abs(noise - before[1]) < 1e-6:
            break
    joint = np.linalg.inv(precision)
    return fitted._replace(shared=shared, joint=(joint + joint.T) / 2, has_replied=True), noise


def predictive(design: Design, fitted: Fitted, weights: Coefficients) -> tuple[Array, Array]:
    """Mean and variance (n,) of f at the design's inputs: the law of total variance over w, α, v and the residual."""
    shared, wide = fitted.shared, design.wide
    curve = bound.curves(design, shared).mean
    mean = (shared.inclusion * weights.mean) @ curve
    products = np.outer(weights.mean, weights.mean) + weights.covariance
    products *= bound.used_together(shared.inclusion)  # E s s'
    square = np.sum((wide @ (bound.by_block(products, design.projection.shape[2]) * fitted.joint)) * wide, axis=1)
    square += np.sum((products @ curve) * curve, axis=0) + np.diag(products) @ design.conditional
    return mean, np.maximum(square - mean**2, 0.0)


def sample(role: Roles, shared: Globals, joint: Array, count: int, rng: Rng) -> Array:
    """Draws (count, m) of the shared parameters: q(v), q(α), estimates of kernels and σ_w, equal in all draws."""
    phi = np.zeros((count, len(role.is_binary)))
    root = np.linalg.cholesky(joint + 1e-12 * np.eye(len(joint)))
    phi[:, role.v] = shared.mean.ravel() + rng.normal(size=(count, len(root))) @ root.T
    if role.included is not None:
        phi[:, role.included] = rng.random((count, role.latents)) < shared.inclusion
    phi[:, role.kernel] = shared.kernel
    phi[:, role.slab] = shared.log_slab_sd
    return phi


def estimated(role: Roles) -> Array:
    """Whether a coordinate of φ is a point estimate (m,): the kernels' parameters and σ_w."""
    is_estimate = np.zeros(len(role.is_binary), dtype=bool)
    is_estimate[role.kernel] = is_estimate[role.slab] = True
    return is_estimate


def draw(
    client: ClientView, personal: UnitClientState | None, message: Message, draws: int, chains: int, rng: Rng
) -> Draws:
    """Draws of the shared and of the unit's own variables from the variational posterior."""
    unit, count = client.view(unit_of), draws * chains
    fitted = unpack(message)
    q, fitted = settled(unit, fitted, None if personal is None else personal.log_noise_sd)
    shared, role = fitted.shared, unit.roles
    phi = sample(role, shared, fitted.joint, count, rng)
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
