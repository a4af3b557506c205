"""What the server computes in the coordinate ascent, from sums of the units' statistics alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.special import expit

from fedppl.coregional.bound import Globals, divergence_of_inducing, divergence_of_selection
from fedppl.coregional.roles import LogScale, Roles
from fedppl.coregional.unit import scale_mode
from fedppl.types import Array


def bound(totals: Mapping[str, Array], shared: Globals, log_odds: Array) -> float:
    """Σ_m V_m at any q(v), q(α) and σ_w, from the units' statistics; the units' own parameters are in those."""
    return bound_from(selection_terms(totals, shared), totals, shared, log_odds)


def bound_from(terms: tuple[Array, Array], totals: Mapping[str, Array], shared: Globals, log_odds: Array) -> float:
    """Σ_m V_m from what `selection_terms` gives."""
    (gain, gram), gamma = terms, shared.inclusion
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
    return terms_from(gram, np.einsum("lqlp->lqp", blocks), totals, shared)


def terms_from(gram: Array, own: Array, totals: Mapping[str, Array], shared: Globals) -> tuple[Array, Array]:
    """The same from the forms m_l' P_lk m_k (L, L) and the blocks P_ll (L, Q, Q)."""
    gain = (
        np.sum(shared.mean * totals["linear"], axis=1)
        - 0.5 * (np.diag(gram) + np.sum(own * shared.covariance, axis=(1, 2)))
        - totals["penalty"]
        - slab_cost(totals, shared.log_slab_sd)
    )
    return gain, gram - np.diag(np.diag(gram))


def slab_cost(totals: Mapping[str, Array], log_slab_sd: float) -> Array:
    """Σ_m KL(q(w_ml | α_l = 1) ‖ N(0, σ_w²)), (L,)."""
    count = totals["units"]
    return np.asarray(
        count * (log_slab_sd - 0.5) + 0.5 * (np.exp(-2 * log_slab_sd) * totals["second"] - totals["log_variance"])
    )


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


def _system(totals: Mapping[str, Array], inclusion: Array) -> Array:
    """Precision (LQ, LQ) of all of v given the selection: cross products have γ_l γ_k, blocks γ_l."""
    latents = len(inclusion)
    points = totals["linear"].shape[1]
    factor = np.outer(inclusion, inclusion)
    np.fill_diagonal(factor, inclusion)
    factors = np.kron(factor, np.ones((points, points)))
    return np.asarray(factors * totals["precision"] + np.eye(latents * points))


def inducing(totals: Mapping[str, Array], inclusion: Array) -> tuple[Array, Array]:
    """Means (L, Q) of q(v), all at once, and its covariances (L, Q, Q): the bound's maximum over both."""
    latents, points = totals["linear"].shape
    system = _system(totals, inclusion)
    solved = np.linalg.solve(system, (inclusion[:, None] * totals["linear"]).ravel())
    mean: Array = np.asarray(solved, dtype=float).reshape(latents, points)
    own = np.einsum("lqlp->lqp", system.reshape(latents, points, latents, points))
    covariance = np.linalg.inv(own)
    return mean, (covariance + np.swapaxes(covariance, 1, 2)) / 2


def size_factor(totals: Mapping[str, Array], shared: Globals, spread: float = 1.0) -> Array:
    """The c (L,) that trades the size of each latent function against that of its coefficients for the best bound.

    v_l times c and every unit's w_ml by c leave all curves as they are, and the bound's divergences have one best c:
    with x = c², −s x / 2 + b log x / 2 − d / (2 x) is highest where s x² − b x − d = 0. Coordinate ascent alone creeps
    along this direction (parameter-expanded variational Bayes, Qi and Jaakkola 2006). Units need not be told: given
    the new v, their best coefficients are the old ones by c. `spread` is the share of units whose coefficients have a
    variance, which shrinks with them: 0 for point estimates.
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
    """Covariance (LQ, LQ) of v across latent functions as well, which the mean field leaves out."""
    joint = np.linalg.inv(_system(totals, inclusion))
    return np.asarray((joint + joint.T) / 2)


def slab(totals: Mapping[str, Array], inclusion: Array, prior: LogScale) -> float:
    """The log σ_w that maximises the bound with its prior; the prior's median where that holds it."""
    if prior.held:
        return prior.mean
    return scale_mode(float(totals["units"] * inclusion.sum()), float(inclusion @ totals["second"]), prior)


def maximise(
    totals: Mapping[str, Array], shared: Globals, role: Roles, *, sweeps: int, select: bool
) -> tuple[Mapping[str, Array], Globals]:
    """Selection, inducing variables, sizes and σ_w in turn, each at the bound's maximum given the others."""
    for _ in range(sweeps):
        if select and np.all(np.isfinite(role.log_odds)):
            gamma = selection(*selection_terms(totals, shared), shared.inclusion, role.log_odds)
            shared = shared._replace(inclusion=gamma)
        mean, covariance = inducing(totals, shared.inclusion)
        totals, shared = rescale(totals, shared._replace(mean=mean, covariance=covariance))
        shared = shared._replace(log_slab_sd=slab(totals, shared.inclusion, role.slab_prior))
    return totals, shared


def median(values: Array, weights: Array) -> Array:
    """Weighted median of the rows of values (K, p): a unit with few rows has little say, an empty one has none."""
    order = np.argsort(values, axis=0)
    share = np.cumsum(weights[order], axis=0) / max(weights.sum(), 1e-300)
    place = np.argmax(share >= 0.5, axis=0)
    return np.asarray(np.take_along_axis(values, np.take_along_axis(order, place[None], axis=0), axis=0)[0])
