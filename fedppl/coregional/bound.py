r"""The variational bound of FedLMC-SS, one term a unit, and its gradient.

With v_l the white inducing variables, q(v_l) = N(m_l, S_l), q(α_l) = Bernoulli(γ_l), q(w_l | α_l = 1) = N(μ_l, τ_l²),

.. math:: a_{nl} = B_{nl} m_l, \quad s_{nl} = k_{nl} + B_{nl} S_l B_{nl}^\top, \quad
          E f_n = \sum_l \gamma_l \mu_l a_{nl}, \quad
          E f_n^2 = (E f_n)^2 + \sum_l [\gamma_l (\mu_l^2 + \tau_l^2)(a_{nl}^2 + s_{nl}) - (\gamma_l \mu_l a_{nl})^2]

where B = A chol(K_ZZ). Equation 16 of Gao and Chung, read literally, counts the Bernoulli part of the coefficients'
divergence once a unit; the indicators are shared, so here it is counted once in all, r_m of it in each unit's term.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from scipy.special import expit, xlogy

from fedppl.coregional.roles import LogScale, Roles
from fedppl.types import Array

# log τ² of a Gaussian whose entropy is 0.
_NO_ENTROPY = -1.0 - float(np.log(2 * np.pi))


class Design(NamedTuple):
    """What a unit's rows are to the latent functions at given kernel parameters."""

    projection: Array  # (L, n, Q) B = A chol(K_ZZ)
    conditional: Array  # (L, n) variance of a latent function given all of v
    response: Array  # (n,)
    scale: float  # rows of the unit for each one here: more than 1 in a mini-batch


class Unit(Protocol):
    """What the numerics see of one unit; `fedppl.coregional.view.CoregionalUnit` is one."""

    roles: Roles
    noise: LogScale
    response: Array

    def design(self, kernel: Array, rows: Any = None) -> Design:
        """The design of all rows, or of some."""

    def kernel_gradient(self, kernel: Array, projection: Array, conditional: Array, rows: Any = None) -> Array:
        """Pull gradients with respect to the design's two arrays back to the kernel's parameters, (p,)."""


class Globals(NamedTuple):
    """What all units share: q(v), q(α), and estimates of the kernels' parameters and of σ_w."""

    mean: Array  # (L, Q) m
    covariance: Array  # (L, Q, Q) S
    inclusion: Array  # (L,) γ
    kernel: Array  # (p,) on the unconstrained space
    log_slab_sd: float


class UnitClientState(NamedTuple):
    """ψ_m, which stays at the unit: q(w_m | α = 1) and the estimate of σ_m."""

    mean: Array  # (L,) μ
    variance: Array  # (L,) τ², 0 for point estimates
    log_noise_sd: float


class Curves(NamedTuple):
    """First two moments of the latent functions at a unit's rows."""

    mean: Array  # (L, n) a
    variance: Array  # (L, n) s


def density(
    design: Design, role: Roles, phi: Array, w: Array, log_noise_sd: float, residual: Array, noise: LogScale
) -> float:
    """log p(y, w, σ, residual | φ) of one unit, with log σ as the coordinate of σ."""
    v = phi[role.v].reshape(role.latents, role.points)
    weight = w if role.included is None else w * phi[role.included]
    mean = weight @ np.einsum("lnq,lq->ln", design.projection, v)
    f = mean + np.sqrt(weight**2 @ design.conditional + 1e-12) * residual
    value = _normal(design.response, f, log_noise_sd) + _normal(w, 0.0, phi[role.slab]) + _normal(residual, 0.0, 0.0)
    return value + noise.log_density(log_noise_sd)


def _normal(x: Array, mean: Any, log_sd: float) -> float:
    """log N(x; mean, sd² I)."""
    return float(-x.size * (log_sd + 0.5 * np.log(2 * np.pi)) - 0.5 * np.exp(-2 * log_sd) * np.sum((x - mean) ** 2))


def curves(design: Design, mean: Array, covariance: Array) -> Curves:
    """Means a and variances s of the latent functions at the rows."""
    projection = design.projection
    spread = np.sum((projection @ covariance) * projection, axis=2)
    return Curves((projection @ mean[:, :, None])[:, :, 0], design.conditional + spread)


def squared_residual(design: Design, curve: Curves, inclusion: Array, unit: UnitClientState) -> float:
    """E Σ (y − f)² over the rows at hand."""
    weight = inclusion * unit.mean
    second = inclusion * (unit.mean**2 + unit.variance)
    error = design.response - weight @ curve.mean
    square = np.sum(curve.mean**2, axis=1)
    return float(error @ error + second @ (square + curve.variance.sum(axis=1)) - weight**2 @ square)


def expected_log_likelihood(design: Design, curve: Curves, inclusion: Array, unit: UnitClientState) -> float:
    """E log p(y | f) of the unit, scaled up from the rows at hand."""
    count = len(design.response)
    square = squared_residual(design, curve, inclusion, unit)
    value = -count * (unit.log_noise_sd + 0.5 * np.log(2 * np.pi)) - 0.5 * np.exp(-2 * unit.log_noise_sd) * square
    return float(design.scale * value)


def log_variance(unit: UnitClientState) -> Array:
    """log τ² (L,), by which the entropy of q(w) counts; that of a point estimate counts as 0."""
    nothing = np.full(unit.variance.shape, _NO_ENTROPY)
    return np.asarray(np.log(unit.variance, out=nothing, where=unit.variance > 0))


def slab_divergence(unit: UnitClientState, log_slab_sd: float) -> Array:
    """KL(N(μ_l, τ_l²) ‖ N(0, σ_w²)) of each coefficient, (L,); −log N(μ_l; 0, σ_w²) of a point estimate."""
    second = (unit.mean**2 + unit.variance) * np.exp(-2 * log_slab_sd)
    return np.asarray(0.5 * (second - 1.0 - log_variance(unit)) + log_slab_sd)


def divergence_of_selection(inclusion: Array, log_odds: Array) -> float:
    """Σ_l KL(Bernoulli(γ_l) ‖ Bernoulli(π)); 0 where nothing is selected."""
    if np.all(np.isinf(log_odds)):
        return 0.0
    prior = expit(log_odds)
    terms = xlogy(inclusion, inclusion / prior) + xlogy(1 - inclusion, (1 - inclusion) / (1 - prior))
    return float(np.sum(terms))


def divergence_of_inducing(mean: Array, covariance: Array) -> float:
    """Σ_l KL(N(m_l, S_l) ‖ N(0, I)), which is KL(q(u_l) ‖ p(u_l)) too."""
    sign, log_determinants = np.linalg.slogdet(covariance)
    if np.any(sign <= 0):
        return np.inf
    trace = np.trace(covariance, axis1=1, axis2=2).sum()
    return float(0.5 * (trace + np.sum(mean**2) - mean.size - log_determinants.sum()))


def unit_bound(
    design: Design, shared: Globals, unit: UnitClientState, noise: LogScale, log_odds: Array, share: float
) -> float:
    """V_m of equation 16, with r_m = share; the prior of log σ_m is counted, those of what is shared are not."""
    curve = curves(design, shared.mean, shared.covariance)
    once = divergence_of_selection(shared.inclusion, log_odds) + divergence_of_inducing(shared.mean, shared.covariance)
    return (
        expected_log_likelihood(design, curve, shared.inclusion, unit)
        - float(shared.inclusion @ slab_divergence(unit, shared.log_slab_sd))
        + noise.log_density(unit.log_noise_sd)
        - share * once
    )


class Gradient(NamedTuple):
    """Gradient of V_m in unconstrained coordinates."""

    mean: Array  # (L, Q)
    root: Array  # (L, Q, Q) of S = C C', with the diagonal of C on the log scale
    log_odds: Array  # (L,) of γ
    kernel: Array  # (p,)
    log_slab_sd: float
    unit_mean: Array  # (L,)
    unit_log_sd: Array  # (L,) of τ
    log_noise_sd: float


def gradient(
    design: Design,
    shared: Globals,
    unit: UnitClientState,
    noise: LogScale,
    log_odds: Array,
    share: float,
    pull: Callable[[Array, Array], Array],
) -> Gradient:
    """Gradient of `unit_bound`; `pull` takes gradients of the design's arrays back to the kernels' parameters."""
    projection, response, scale = design.projection, design.response, design.scale
    a, s = curves(design, shared.mean, shared.covariance)
    gamma, mu, t = shared.inclusion, unit.mean, unit.mean**2 + unit.variance
    weight = gamma * mu
    error = response - weight @ a
    rate = scale * np.exp(-2 * unit.log_noise_sd)
    d_a = rate * (weight[:, None] * error - (gamma * t - weight**2)[:, None] * a)
    d_s = np.broadcast_to((-0.5 * rate * gamma * t)[:, None], a.shape)
    root = np.linalg.cholesky(shared.covariance)
    inner = np.swapaxes(projection, 1, 2) @ (d_s[:, :, None] * projection)
    d_covariance = inner - 0.5 * share * np.eye(shared.mean.shape[1])
    d_root = np.tril(2.0 * d_covariance @ root)
    diagonal = np.arange(shared.mean.shape[1])
    d_root[:, diagonal, diagonal] = d_root[:, diagonal, diagonal] * root[:, diagonal, diagonal] + share
    d_projection = d_a[:, :, None] * shared.mean[:, None, :] + 2.0 * d_s[:, :, None] * (projection @ shared.covariance)
    fit, square, total = a @ error, np.sum(a**2, axis=1), np.sum(a**2 + s, axis=1)
    d_gamma = rate * (mu * fit - 0.5 * t * total + gamma * mu**2 * square) - slab_divergence(unit, shared.log_slab_sd)
    chance = gamma * (1.0 - gamma)
    d_odds = np.zeros_like(gamma)
    if not np.all(np.isinf(log_odds)):
        inside = chance > 0
        odds = np.log(gamma[inside] / (1 - gamma[inside]))
        d_odds[inside] = chance[inside] * (d_gamma[inside] - share * (odds - log_odds[inside]))
    slab = np.exp(-2 * shared.log_slab_sd)
    d_mu = rate * (gamma * fit - gamma * mu * total + gamma**2 * mu * square) - gamma * mu * slab
    d_log_sd = -rate * gamma * unit.variance * total - gamma * (unit.variance * slab - 1.0)
    residual = squared_residual(design, Curves(a, s), gamma, unit)
    return Gradient(
        mean=(np.swapaxes(projection, 1, 2) @ d_a[:, :, None])[:, :, 0] - share * shared.mean,
        root=d_root,
        log_odds=d_odds,
        kernel=pull(d_projection, np.ascontiguousarray(d_s)),
        log_slab_sd=float(gamma @ (t * slab - 1.0)),
        unit_mean=d_mu,
        unit_log_sd=d_log_sd,
        log_noise_sd=rate * residual - scale * len(response) - noise.precision * (unit.log_noise_sd - noise.mean),
    )
