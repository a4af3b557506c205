r"""The variational bound of FedLMC-SS: its parameters, a unit's term with its gradient, and its maximum from sums.

With v_l the white inducing variables, q(v_l) = N(m_l, S_l), q(α_l) = Bernoulli(γ_l), q(w_l | α_l = 1) = N(μ_l, τ_l²),

.. math:: a_{nl} = B_{nl} m_l, \quad s_{nl} = k_{nl} + B_{nl} S_l B_{nl}^\top, \quad
          E f_n = \sum_l \gamma_l \mu_l a_{nl}, \quad
          E f_n^2 = (E f_n)^2 + \sum_l [\gamma_l (\mu_l^2 + \tau_l^2)(a_{nl}^2 + s_{nl}) - (\gamma_l \mu_l a_{nl})^2]

where B = A chol(K_ZZ). Equation 16 of Gao and Chung, read literally, counts the Bernoulli part of the coefficients'
divergence once a unit; the indicators are shared, so here it is counted once in all, r_m of it in each unit's term.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, logit, rel_entr, wrightomega
from scipy.stats import norm

from fedppl.types import Array

_FIXED = 1e6  # precision of a log scale above which no data move the scale by more than about 1e-3 of itself
_NO_ENTROPY = -1.0 - float(np.log(2 * np.pi))  # log τ² of a Gaussian whose entropy is 0
_ODDS = 30.0  # log odds beyond which γ is 0 or 1 in double precision


class LogScale(NamedTuple):
    """Prior N(mean, 1 / precision) of the log of a scale."""

    mean: float
    precision: float

    @property
    def is_fixed(self) -> bool:
        """Whether the prior is so narrow that the scale is a constant, which no update moves."""
        return self.precision > _FIXED

    def log_density(self, log_scale: float) -> float:
        """log p(log σ)."""
        return float(0.5 * np.log(self.precision / (2 * np.pi)) - 0.5 * self.precision * (log_scale - self.mean) ** 2)


class Roles(NamedTuple):
    """Where each kind of shared parameter lies in φ, and its prior."""

    latents: int
    points: int  # Q
    v: Any  # (L Q,) places
    included: Any  # (L,) places, or None: every latent function is used
    slab: int
    kernel: Any  # (p,) places of the kernels' parameters
    is_binary: Any  # (m,)
    log_odds: Array  # (L,) of the prior inclusion; infinite without selection
    kernel_mean: Array  # (p,)
    kernel_precision: Array  # (p, p)
    slab_prior: LogScale


class Design(NamedTuple):
    """How a unit's rows depend on the latent functions, at given kernel parameters."""

    projection: Array  # (L, n, Q) B = A chol(K_ZZ)
    conditional: Array  # (L, n) variance of a latent function given all of v
    response: Array  # (n,)
    scale: float  # rows of the unit over rows here: above 1 in a mini-batch

    @property
    def wide(self) -> Array:
        """(n, L Q) projections of all latent functions side by side."""
        latents, rows, points = self.projection.shape
        return np.moveaxis(self.projection, 0, 1).reshape(rows, latents * points)


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
    value = norm.logpdf(design.response, f, np.exp(log_noise_sd)).sum() + norm.logpdf(residual).sum()
    return float(value + norm.logpdf(w, 0.0, np.exp(phi[role.slab])).sum() + noise.log_density(log_noise_sd))


def curves(design: Design, shared: Globals) -> Curves:
    """Means a and variances s of the latent functions at the rows."""
    spread = np.sum((design.projection @ shared.covariance) * design.projection, axis=2)
    return Curves((design.projection @ shared.mean[:, :, None])[:, :, 0], design.conditional + spread)


def squared_residual(design: Design, curve: Curves, inclusion: Array, unit: UnitClientState) -> float:
    """E Σ (y − f)² over the rows at hand."""
    weight = inclusion * unit.mean
    second = inclusion * (unit.mean**2 + unit.variance)
    error = design.response - weight @ curve.mean
    square = np.sum(curve.mean**2, axis=1)
    return float(error @ error + second @ (square + curve.variance.sum(axis=1)) - weight**2 @ square)


def log_variance(unit: UnitClientState) -> Array:
    """log τ² (L,), on which the entropy of q(w) depends; a point estimate has entropy 0."""
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
    return float(np.sum(rel_entr(inclusion, prior) + rel_entr(1 - inclusion, 1 - prior)))


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
    """V_m of equation 16, with r_m = share; it includes the prior of log σ_m, and no prior of shared parameters."""
    square = squared_residual(design, curves(design, shared), shared.inclusion, unit)
    spread = unit.log_noise_sd + 0.5 * np.log(2 * np.pi)
    fit = -len(design.response) * spread - 0.5 * np.exp(-2 * unit.log_noise_sd) * square
    once = divergence_of_selection(shared.inclusion, log_odds) + divergence_of_inducing(shared.mean, shared.covariance)
    return (
        float(design.scale * fit)
        - float(shared.inclusion @ slab_divergence(unit, shared.log_slab_sd))
        + noise.log_density(unit.log_noise_sd)
        - share * once
    )


class DesignSlopes(NamedTuple):
    """Gradient of the expected log likelihood of a unit's rows."""

    mean: Array  # (L, n) in the curves' means a
    variance: Array  # (L, n) in their variances s, and in the conditional variance
    projection: Array  # (L, n, Q) in the projection


def design_slopes(design: Design, shared: Globals, unit: UnitClientState, curve: Curves) -> DesignSlopes:
    """Gradient of E log p(y | f) in the curves' moments and in the design."""
    rate, weight = design.scale * np.exp(-2 * unit.log_noise_sd), shared.inclusion * unit.mean
    second = shared.inclusion * (unit.mean**2 + unit.variance)
    error = design.response - weight @ curve.mean
    mean = rate * (weight[:, None] * error - (second - weight**2)[:, None] * curve.mean)
    variance = np.repeat(-0.5 * rate * second[:, None], len(error), axis=1)
    spread = 2.0 * variance[:, :, None] * (design.projection @ shared.covariance)
    return DesignSlopes(mean, variance, mean[:, :, None] * shared.mean[:, None, :] + spread)


# The bound's parameters as two flat vectors, shared and a unit's own --------------------------------------------------


def flatten(shared: Globals) -> Array:
    """m, the roots C of S = C C' with the diagonal on the log scale, logit γ, the kernels' parameters, log σ_w."""
    root, diagonal = np.linalg.cholesky(shared.covariance), np.arange(shared.mean.shape[1])
    root[:, diagonal, diagonal] = np.log(root[:, diagonal, diagonal])
    odds = np.clip(logit(shared.inclusion), -_ODDS, _ODDS)
    packed = root[:, *np.tril_indices(len(diagonal))].ravel()
    return np.concatenate([shared.mean.ravel(), packed, odds, shared.kernel, [shared.log_slab_sd]])


def roots(x: Array, role: Roles) -> Array:
    """The roots C (L, Q, Q) in the vector of `flatten`."""
    lower, diagonal = np.tril_indices(role.points), np.arange(role.points)
    root = np.zeros((role.latents, role.points, role.points))
    start, size = role.latents * role.points, role.latents * len(lower[0])
    root[:, *lower] = x[start : start + size].reshape(role.latents, -1)
    root[:, diagonal, diagonal] = np.exp(root[:, diagonal, diagonal])
    return root


def unflatten(x: Array, role: Roles) -> Globals:
    """The inverse of `flatten`; without selection every γ is 1."""
    latents, root = role.latents, roots(x, role)
    mean = x[: latents * role.points].reshape(latents, role.points)
    odds, kernel, _ = np.split(x[-latents - len(role.kernel) - 1 :], [latents, -1])
    gamma = np.ones(latents) if role.included is None else expit(odds)
    return Globals(mean, root @ root.mT, gamma, kernel, float(x[-1]))


def flatten_unit(unit: UnitClientState) -> Array:
    """μ, log τ and log σ_m."""
    return np.concatenate([unit.mean, 0.5 * np.log(unit.variance), [unit.log_noise_sd]])


def unflatten_unit(x: Array) -> UnitClientState:
    """The inverse of `flatten_unit`."""
    latents = (len(x) - 1) // 2
    return UnitClientState(x[:latents], np.exp(2 * x[latents:-1]), float(x[-1]))


# What the server computes in the coordinate ascent, from sums of the units' statistics alone --------------------------


def scale_mode(count: float, square: float, prior: LogScale) -> float:
    """The log σ that maximises −count · log σ − square / (2 σ²) + log p(log σ), a concave function."""
    mean, precision = prior.mean, prior.precision
    # With u = square / σ², the slope is 0 where u + (precision / 2) log u is known: a value of Wright's omega function.
    u = 0.0
    if square > 0:
        u = 0.5 * precision * wrightomega(np.log(2 * square / precision) + 2 * (count / precision - mean))
    if u == 0:  # of no residual at all; further down σ⁻² would overflow
        return mean - min(count / precision, 200.0)
    return float(0.5 * np.log(square / u))


def bound_of_sums(totals: Mapping[str, Array], shared: Globals, log_odds: Array) -> float:
    """Σ_m V_m at any q(v), q(α) and σ_w, from the units' statistics, which depend on the units' own parameters."""
    (gain, gram), gamma = selection_terms(totals, shared), shared.inclusion
    return float(
        totals["constant"]
        + gamma @ gain
        - 0.5 * gamma @ gram @ gamma
        - divergence_of_selection(gamma, log_odds)
        - divergence_of_inducing(shared.mean, shared.covariance)
    )


def selection_terms(totals: Mapping[str, Array], shared: Globals) -> tuple[Array, Array]:
    """The bound is γ'c − γ'Mγ / 2 − KL(γ ‖ π) and terms without γ: c (L,), and M (L, L) with a diagonal of zeros."""
    latents, points = shared.mean.shape
    blocks = totals["precision"].reshape(latents, points, latents, points)
    gram = np.einsum("lq,lqkp,kp->lk", shared.mean, blocks, shared.mean, optimize=True)
    slab = shared.log_slab_sd
    slab_cost = totals["units"] * (slab - 0.5) + 0.5 * (np.exp(-2 * slab) * totals["second"] - totals["log_variance"])
    gain = (
        np.sum(shared.mean * totals["linear"], axis=1)
        - 0.5 * (np.diag(gram) + np.sum(diagonal_blocks(totals["precision"], latents) * shared.covariance, axis=(1, 2)))
        - totals["penalty"]
        - slab_cost
    )
    return gain, gram - np.diag(np.diag(gram))


def selection(gain: Array, gram: Array, inclusion: Array, log_odds: Array, sweeps: int = 50) -> Array:
    """γ by coordinate ascent, one latent function at a time; each step is exact, so the bound never falls."""
    gamma = inclusion.copy()
    for _ in range(sweeps):
        before = gamma.copy()
        for place in range(len(gamma)):
            gamma[place] = expit(log_odds[place] + gain[place] - gram[place] @ gamma)
        if np.max(np.abs(gamma - before)) < 1e-10:
            break
    return gamma


def diagonal_blocks(matrix: Any, latents: int) -> Any:
    """Blocks (L, Q, Q) on the diagonal of a matrix (LQ, LQ)."""
    points = len(matrix) // latents
    return np.einsum("lqlp->lqp", matrix.reshape(latents, points, latents, points))


def by_block(factor: Array, points: int) -> Array:
    """Factors (L, L) of the blocks of a matrix (LQ, LQ), for each of its entries."""
    return np.asarray(np.kron(factor, np.ones((points, points))), dtype=float)


def used_together(inclusion: Array) -> Array:
    """E α α' (L, L): γ_l γ_k, and γ_l on the diagonal."""
    pair = np.outer(inclusion, inclusion)
    np.fill_diagonal(pair, inclusion)
    return pair


def _system(totals: Mapping[str, Array], inclusion: Array) -> Array:
    """Precision (LQ, LQ) of all of v given the selection."""
    points = totals["linear"].shape[1]
    return by_block(used_together(inclusion), points) * totals["precision"] + np.eye(inclusion.size * points)


def inducing(totals: Mapping[str, Array], inclusion: Array) -> tuple[Array, Array]:
    """Means (L, Q) of q(v), all at once, and its covariances (L, Q, Q): the bound's maximum over both."""
    latents, points = totals["linear"].shape
    system = _system(totals, inclusion)
    mean = np.linalg.solve(system, (inclusion[:, None] * totals["linear"]).ravel()).reshape(latents, points)
    covariance = np.linalg.inv(diagonal_blocks(system, latents))
    return np.asarray(mean, dtype=float), (covariance + np.swapaxes(covariance, 1, 2)) / 2


def size_factor(totals: Mapping[str, Array], shared: Globals, spread: float = 1.0) -> Array:
    """The c (L,) by which each latent function grows, and its coefficients shrink, for the best bound.

    Curves stay as they are: with x = c² the bound has −s x / 2 + b log x / 2 − d / (2 x). Coordinate ascent alone is
    slow here (parameter-expanded variational Bayes, Qi and Jaakkola 2006). `spread` is 0 for point estimates.
    """
    gamma, points = shared.inclusion, shared.mean.shape[1]
    size = np.trace(shared.covariance, axis1=1, axis2=2) + np.sum(shared.mean**2, axis=1)
    excess = points - gamma * spread * totals["units"]
    cost = gamma * (np.exp(-2 * shared.log_slab_sd) * totals["second"] + 2.0 * totals["penalty"])
    root = np.sqrt(excess**2 + 4 * size * cost)
    return np.asarray(np.sqrt(np.where(cost > 0, (excess + root) / (2 * size), 1.0)))


def rescale(totals: Mapping[str, Array], shared: Globals, spread: float = 1.0) -> tuple[dict[str, Array], Globals]:
    """Shared parameters with every latent function at its best size, and the statistics that belong to them."""
    factor = size_factor(totals, shared, spread)
    across = np.repeat(1.0 / factor, shared.mean.shape[1])
    changed = {
        **totals,
        "precision": across[:, None] * totals["precision"] * across,
        "linear": totals["linear"] / factor[:, None],
        "penalty": totals["penalty"] / factor**2,
        "second": totals["second"] / factor**2,
        "log_variance": totals["log_variance"] - 2.0 * spread * totals["units"] * np.log(factor),
    }
    mean, covariance = shared.mean * factor[:, None], shared.covariance * (factor**2)[:, None, None]
    return changed, shared._replace(mean=mean, covariance=covariance)


def joint_covariance(totals: Mapping[str, Array], inclusion: Array) -> Array:
    """Covariance (LQ, LQ) of v across latent functions too, which the mean field leaves out."""
    joint = np.linalg.inv(_system(totals, inclusion))
    return np.asarray((joint + joint.T) / 2)


def best_slab(totals: Mapping[str, Array], inclusion: Array, prior: LogScale) -> float:
    """The log σ_w that maximises the bound with its prior; the prior's median where the prior fixes it."""
    if prior.is_fixed:
        return prior.mean
    return scale_mode(float(totals["units"] * inclusion.sum()), float(inclusion @ totals["second"]), prior)


def maximise(
    totals: Mapping[str, Array], shared: Globals, role: Roles, *, sweeps: int, select: bool, spread: float = 1.0
) -> tuple[Mapping[str, Array], Globals]:
    """Selection, inducing variables, sizes and σ_w in turn, each at the bound's maximum given the others."""
    for _ in range(sweeps):
        if select and np.all(np.isfinite(role.log_odds)):
            gamma = selection(*selection_terms(totals, shared), shared.inclusion, role.log_odds)
            shared = shared._replace(inclusion=gamma)
        mean, covariance = inducing(totals, shared.inclusion)
        totals, shared = rescale(totals, shared._replace(mean=mean, covariance=covariance), spread)
        if spread:  # with point estimates σ_w would go to 0
            shared = shared._replace(log_slab_sd=best_slab(totals, shared.inclusion, role.slab_prior))
    return totals, shared
