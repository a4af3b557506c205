"""The bound of FedLMC-SS: against the declared log density by Monte Carlo, a dense form, and finite differences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose
from pytensor.graph.replace import vectorize_graph
from scipy.stats import norm, qmc

from fedppl.coregional.bound import (
    Globals,
    UnitClientState,
    bound_of_sums,
    curves,
    design_slopes,
    flatten,
    flatten_unit,
    unflatten,
    unflatten_unit,
    unit_bound,
)
from fedppl.coregional.unit import slopes, statistics
from fedppl.coregional.view import unit_of
from fedppl.model.client import ClientModel
from fedppl.model.interpreted import PYTHON_MODE
from tests.support import problems
from tests.support.markers import slow_but

LATENTS, POINTS = 3, 6
SIZES = (5, 8, 12)


@functools.cache
def units() -> dict[str, ClientModel]:
    """Three small units of different sizes."""
    rng = np.random.default_rng(3)
    data = {}
    for rows in SIZES:
        x = rng.uniform(size=rows)
        data[f"{rows} rows"] = {"X": x, "y": np.sin(6 * x) * rng.normal() + 0.3 * rng.normal(size=rows)}
    models: dict[str, ClientModel] = problems.coregional()[0].enrol(data, kernel=False)
    return models


class Parameters(NamedTuple):
    """All that the bound is a function of."""

    shared: Globals
    units: list[UnitClientState]


def parameters(seed: int, gamma: Any, log_noise_sd: float, spread: float = 1.0) -> Parameters:
    """Random ones, with the inclusion probabilities and the noise given."""
    rng = np.random.default_rng(seed)
    root = 0.3 * spread * np.tril(rng.normal(size=(LATENTS, POINTS, POINTS)), -1)
    root[:, range(POINTS), range(POINTS)] = np.exp(spread * 0.3 * rng.normal(size=(LATENTS, POINTS)) - 0.3)
    shared = Globals(
        spread * rng.normal(size=(LATENTS, POINTS)),
        root @ np.swapaxes(root, 1, 2),
        np.asarray(gamma, dtype=float),
        np.log(0.3) + 0.3 * rng.normal(size=LATENTS),
        0.2 * rng.normal(),
    )
    own = [
        UnitClientState(
            spread * rng.normal(size=LATENTS), np.exp(rng.normal(size=LATENTS) - 1.0), log_noise_sd + 0.2 * rng.normal()
        )
        for _ in SIZES
    ]
    return Parameters(shared, own)


RANDOM = parameters(1, [0.3, 0.9, 0.6], 1.0)
# γ near 0, 0.5 and 1 under noise so large that nothing hides a divergence counted once too often.
ADVERSARIAL = {
    "undecided and decided": parameters(2, [1e-3, 0.5, 0.999], 2.0),
    "all decided": parameters(3, [1e-3, 0.999, 1e-4], 3.0),
    "narrow": parameters(4, [0.5, 0.02, 0.97], 2.0, spread=0.3),
    "nearly certain": parameters(5, [1e-6, 1 - 1e-6, 0.5], 4.0, spread=1.5),
}
PARAMETERS = {"random": RANDOM, **ADVERSARIAL}
# Where Monte Carlo is too noisy to tell anything.
PRECISE = {"little noise": parameters(8, [0.3, 0.9, 1e-3], -2.0)}
EVERYWHERE = {**PARAMETERS, **PRECISE}
every_point = pytest.mark.parametrize("name", EVERYWHERE)


def shares() -> list[float]:
    return [rows / sum(SIZES) for rows in SIZES]


def bounds(at: Parameters) -> list[float]:
    """V_m of each unit, r_m = n_m / Σ n."""
    return [
        unit_bound(view.design(at.shared.kernel), at.shared, own, view.noise, view.roles.log_odds, share)
        for view, own, share in zip((c.view(unit_of) for c in units().values()), at.units, shares(), strict=True)
    ]


# --- the declared model's own log density -------------------------------------------------------------------------


@functools.cache
def declared_densities() -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """PyMC's log p(y, w, σ, residual | φ) and log p(v, included) of many draws at once, for one kernel and one α."""
    model = next(iter(units().values())).pymc_model()
    value = {name: model.rvs_to_values[model[name]] for name in ("v", "included", "w", "residual")}
    points = [model.rvs_to_values[model[name]] for name in ("noise_sd", "lengthscale", "slab_sd")]
    many = {name: pt.tensor(name, dtype="float64", shape=(None,) * (value[name].ndim + 1)) for name in value}
    many.pop("included")
    site, prior = (
        vectorize_graph(model.logp(vars=[model[name] for name in names], sum=True), {value[k]: many[k] for k in many})
        for names in (("w", "noise_sd", "residual", "output"), ("v", "included"))
    )
    compiled = functools.partial(pytensor.function, mode=PYTHON_MODE, on_unused_input="ignore")
    of_site = compiled([*many.values(), value["included"], *points], site)
    of_prior = compiled([many["v"], value["included"]], prior)
    return model, of_site, of_prior


def site_densities(client: ClientModel, v: Any, alpha: Any, w: Any, residual: Any, at: Globals, noise: float) -> Any:
    """log p(y_m, w, σ_m, residual | φ), (S,), by PyMC."""
    model, of_site, _ = declared_densities()
    for name, value in client.arrays.items():
        model[name].set_value(value)
    return of_site(v, w, residual, alpha, noise, at.kernel, at.log_slab_sd)


def test_a_units_log_density_is_pymcs() -> None:
    """At one point each: what an algorithm is handed, and what the Monte Carlo below evaluates."""
    rng, at = np.random.default_rng(5), RANDOM.shared
    alpha = np.array([1, 0, 1])
    for client in units().values():
        v, w = rng.normal(size=(1, LATENTS, POINTS)), rng.normal(size=(1, LATENTS))
        residual = rng.normal(size=(1, client.rows))
        phi = np.concatenate([v.ravel(), alpha, at.kernel, [at.log_slab_sd]])
        local = {"w": w[0], "noise_sd": np.array([-0.4]), "residual": residual[0]}
        theta = np.concatenate([local[variable.name] for variable in client.local])
        found = site_densities(client, v, alpha, w, residual, at, -0.4)
        assert_allclose(found, client.log_site(phi, theta)[0], rtol=1e-10)


def monte_carlo(at: Parameters, replicates: int = 16, draws: int = 16) -> tuple[float, float]:
    """E_q[log p − log q] of all units together and its standard error; exact over α, by scrambled points over the rest.

    The shared v and α are counted once, hyperparameters and σ_m are points, of which only σ_m's prior is counted.
    """
    rng, shared = np.random.default_rng(11), at.shared
    models, root = list(units().values()), np.linalg.cholesky(shared.covariance)
    slab, estimates = np.exp(shared.log_slab_sd), []
    for _ in range(replicates):
        points = qmc.Sobol(LATENTS * POINTS + sum(LATENTS + rows for rows in SIZES), rng=rng).random(draws)
        z = norm.ppf(points)
        standard, z = z[:, : LATENTS * POINTS].reshape(draws, LATENTS, POINTS), z[:, LATENTS * POINTS :]
        v = shared.mean + np.einsum("lqp,slp->slq", root, standard)
        log_q_v = norm.logpdf(standard).sum(axis=(1, 2)) - np.log(np.diagonal(root, axis1=1, axis2=2)).sum()
        value = np.zeros(draws)
        for alpha in np.ndindex(*(2,) * LATENTS):
            used = np.array(alpha, dtype=bool)
            chance = np.prod(np.where(used, shared.inclusion, 1 - shared.inclusion))
            log_ratio = declared_densities()[2](v, used.astype(np.int64)) - log_q_v - np.log(chance)
            place = 0
            for client, own in zip(models, at.units, strict=True):
                standard_w, residual = np.split(z[:, place : place + LATENTS + client.rows], [LATENTS], axis=1)
                place += LATENTS + client.rows
                mean, sd = np.where(used, own.mean, 0.0), np.where(used, np.sqrt(own.variance), slab)
                w = mean + sd * standard_w
                log_ratio += site_densities(
                    client, v, used.astype(np.int64), w, residual, shared, own.log_noise_sd
                ) - np.sum(norm.logpdf(w, mean, sd), axis=1)
                log_ratio -= norm.logpdf(residual).sum(axis=1)
            value += chance * log_ratio
        estimates.append(value.mean())
    return float(np.mean(estimates)), float(np.std(estimates, ddof=1) / np.sqrt(replicates))


@pytest.mark.parametrize("name", slow_but(PARAMETERS, "random", "narrow"))
def test_the_bound_is_the_expectation_of_the_declared_log_density(name: str) -> None:
    """Within 3 standard errors; a divergence of the selection that each unit counts in full is off by more than 3."""
    at = PARAMETERS[name]
    found, (estimate, error) = sum(bounds(at)), monte_carlo(at)
    assert abs(found - estimate) < 3 * error, (found, estimate, error)
    gamma = at.shared.inclusion
    once = float(np.sum(gamma * np.log(gamma / 0.5) + (1 - gamma) * np.log((1 - gamma) / 0.5)))
    counted_by_each = found - (len(SIZES) - 1) * once
    assert error < 0.4
    if name in ADVERSARIAL:
        assert error < 0.2
        assert abs(counted_by_each - estimate) > 6 * error
        assert abs(found + once - estimate) > 3 * error  # nor is it left out


# --- a dense form, straight from the equations --------------------------------------------------------------------


def dense_matrices(x: Any, points: Any, log_scales: Any) -> tuple[Any, Any]:
    """B = k(x, Z) chol(K_ZZ)⁻ᵀ (L, n, Q) and what it leaves of k(x, x) = 1 (L, n), squared exponential."""
    projection, conditional = [], []
    for scale in np.exp(log_scales):
        within = np.exp(-0.5 * (points[:, None] - points) ** 2 / scale**2) + 1e-6 * np.eye(len(points))
        across = np.exp(-0.5 * (np.asarray(x)[:, None] - points) ** 2 / scale**2)
        projection.append(across @ np.linalg.inv(np.linalg.cholesky(within)).T)
        conditional.append(np.maximum(1.0 - np.sum(projection[-1] ** 2, axis=1), 1e-10))
    return np.array(projection), np.array(conditional)


GRID = np.linspace(0, 1, POINTS)  # of problems.coregional
NOISE_PRIOR = norm(np.log(0.3), 2.0)  # of log σ_m, which fedlmc_ss.unit declares
SELECTION_PRIOR = 0.5


def dense_bound(data: Mapping[str, Mapping[str, Any]], at: Parameters, grid: Any = GRID) -> float:
    """The centralised bound: all rows of all units in one list, each divergence counted once; loops throughout."""
    shared, total = at.shared, 0.0
    slab = np.exp(2 * shared.log_slab_sd)
    for one, own in zip(data.values(), at.units, strict=True):
        projection, conditional = dense_matrices(one["X"], grid, shared.kernel)
        noise = np.exp(2 * own.log_noise_sd)
        total += NOISE_PRIOR.logpdf(own.log_noise_sd)
        for n, y in enumerate(one["y"]):
            first, second = 0.0, 0.0
            for j, gamma in enumerate(shared.inclusion):
                row = projection[j, n]
                a, s = row @ shared.mean[j], conditional[j, n] + row @ shared.covariance[j] @ row
                first += gamma * own.mean[j] * a
                second += gamma * (own.mean[j] ** 2 + own.variance[j]) * (a**2 + s) - (gamma * own.mean[j] * a) ** 2
            total += -0.5 * np.log(2 * np.pi * noise) - 0.5 * (y**2 - 2 * y * first + first**2 + second) / noise
        for j, gamma in enumerate(shared.inclusion):
            ratio = (own.variance[j] + own.mean[j] ** 2) / slab
            total -= gamma * 0.5 * (ratio - 1.0 - np.log(own.variance[j] / slab))
    for j, gamma in enumerate(shared.inclusion):
        for chance, prior in ((gamma, SELECTION_PRIOR), (1 - gamma, 1 - SELECTION_PRIOR)):
            total -= chance * np.log(chance / prior) if chance > 0 else 0.0
        S, m = shared.covariance[j], shared.mean[j]
        total -= 0.5 * (np.trace(S) + m @ m - len(m) - np.linalg.slogdet(S)[1])
    return float(total)


@every_point
def test_the_units_terms_add_up_to_the_central_bound(name: str) -> None:
    at = EVERYWHERE[name]
    data = {client_id: client.arrays for client_id, client in units().items()}
    assert_allclose(sum(bounds(at)), dense_bound(data, at), rtol=1e-10, atol=1e-8)


@every_point
def test_the_servers_bound_from_sums_of_statistics_is_the_units(name: str) -> None:
    """At any q(v), q(α) and σ_w, not only at those that the units were sent."""
    at, totals = EVERYWHERE[name], dict[str, Any]()
    for client, own in zip(units().values(), at.units, strict=True):
        view = client.view(unit_of)
        for key, value in statistics(view.design(at.shared.kernel), own, view.noise).items():
            totals[key] = totals.get(key, 0.0) + value
    log_odds = view.roles.log_odds
    assert_allclose(bound_of_sums(totals, at.shared, log_odds), sum(bounds(at)), rtol=1e-10, atol=1e-8)
    moved = parameters(9, [0.2, 0.7, 0.4], 0.0).shared._replace(kernel=at.shared.kernel)
    assert_allclose(
        bound_of_sums(totals, moved, log_odds), sum(bounds(at._replace(shared=moved))), rtol=1e-10, atol=1e-8
    )


def test_without_selection_nothing_is_paid_for_it() -> None:
    """π = 1 and γ = 1: log odds are infinite, and the bound is that at γ → 1 under an even prior, plus L log 2."""
    at = parameters(6, np.ones(LATENTS), 0.0)
    view, own = next(iter(units().values())).view(unit_of), at.units[0]
    design = view.design(at.shared.kernel)
    without = unit_bound(design, at.shared, own, view.noise, np.full(LATENTS, np.inf), 0.3)
    even = unit_bound(design, at.shared, own, view.noise, np.zeros(LATENTS), 0.3)
    assert_allclose(without - even, 0.3 * LATENTS * np.log(2), rtol=1e-12)


def test_batches_are_right_on_average() -> None:
    """Three batches that make up all rows: the mean of their bounds, and of their statistics, is that of all rows."""
    at, view = RANDOM, units()["12 rows"].view(unit_of)
    own, kernel = at.units[2], at.shared.kernel
    batches = np.random.default_rng(4).permutation(12).reshape(3, 4)
    designs = [view.design(kernel, np.sort(rows)) for rows in batches]
    terms = [unit_bound(design, at.shared, own, view.noise, view.roles.log_odds, 0.4) for design in designs]
    whole = unit_bound(view.design(kernel), at.shared, own, view.noise, view.roles.log_odds, 0.4)
    assert np.ptp(terms) > 0.1
    assert_allclose(np.mean(terms), whole, rtol=1e-12)
    parts = [statistics(design, own, view.noise) for design in designs]
    for key, value in statistics(view.design(kernel), own, view.noise).items():
        assert_allclose(np.mean([part[key] for part in parts], axis=0), value, rtol=1e-9, atol=1e-12, err_msg=key)


# --- gradients and coordinates ------------------------------------------------------------------------------------


def difference(function: Callable[[Any], float], x: Any, step: float = 1e-5) -> Any:
    """Central differences along every coordinate."""
    return np.array([(function(x + step * e) - function(x - step * e)) / (2 * step) for e in np.eye(len(x))])


@pytest.mark.parametrize("rows", [None, [1, 4, 6, 9]])
@every_point
def test_gradients_are_those_of_finite_differences(name: str, rows: list[int] | None) -> None:
    """Every coordinate of the shared vector and of the unit's own, with their share of the priors of ℓ and σ_w."""
    at, view, share = EVERYWHERE[name], units()["12 rows"].view(unit_of), 0.37
    role = view.roles
    ell = norm(role.kernel_mean, 1 / np.sqrt(np.diag(role.kernel_precision)))
    slab = norm(role.slab_prior.mean, role.slab_prior.precision**-0.5)

    def value(x: Any, own: Any) -> float:
        shared = unflatten(x, role)
        design = view.design(shared.kernel, None if rows is None else np.array(rows))
        bound = unit_bound(design, shared, unflatten_unit(own), view.noise, role.log_odds, share)
        return float(bound + share * (ell.logpdf(shared.kernel).sum() + slab.logpdf(shared.log_slab_sd)))

    x, own = flatten(at.shared), flatten_unit(at.units[2])
    found = slopes(view, x, own, share, None if rows is None else np.array(rows))
    expected = difference(lambda x: value(x, own), x), difference(lambda own: value(x, own), own)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.max(np.abs(theirs)) > 0.1
        assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_the_gradient_of_the_kernels_by_hand() -> None:
    """As the ascent takes it, without the divergences: of the likelihood alone."""
    at, view = RANDOM, units()["8 rows"].view(unit_of)
    own, shared = at.units[1], at.shared

    def value(kernel: Any) -> float:
        design = view.design(kernel)
        return unit_bound(design, shared._replace(kernel=kernel), own, view.noise, view.roles.log_odds, 0.0)

    design = view.design(shared.kernel)
    slope = design_slopes(design, shared, own, curves(design, shared))
    found = view.kernel_gradient(shared.kernel, slope.projection, slope.variance)
    assert_allclose(found, difference(value, shared.kernel), rtol=1e-6)


@every_point
def test_flat_coordinates_lead_there_and_back(name: str) -> None:
    at, role = EVERYWHERE[name], units()["5 rows"].view(unit_of).roles
    x = flatten(at.shared)
    assert x.shape == (LATENTS * (POINTS + POINTS * (POINTS + 1) // 2 + 2) + 1,)
    for ours, theirs in zip(unflatten(x, role), at.shared, strict=True):
        assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)
    assert_allclose(flatten(unflatten(x, role)), x, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(unflatten_unit(flatten_unit(at.units[0])), at.units[0], strict=True):
        assert_allclose(ours, theirs, rtol=1e-12)


def test_certain_indicators_have_finite_coordinates() -> None:
    at, role = parameters(7, [0.0, 1.0, 0.5], 0.0), units()["5 rows"].view(unit_of).roles
    x = flatten(at.shared)
    assert np.all(np.isfinite(x))
    assert_allclose(unflatten(x, role).inclusion, [0.0, 1.0, 0.5], atol=1e-12)
    view, own = units()["5 rows"].view(unit_of), flatten_unit(at.units[0])
    assert all(np.all(np.isfinite(slope)) for slope in slopes(view, x, own, 0.3))


def test_curves_have_the_moments_of_their_draws() -> None:
    """Latent functions B v + √k r with v ~ N(m, S): means and variances within 4 standard errors."""
    at, view, rng = RANDOM.shared, units()["8 rows"].view(unit_of), np.random.default_rng(8)
    design, count = view.design(at.kernel), 40_000
    root = np.linalg.cholesky(at.covariance)
    v = at.mean + np.einsum("lqp,slp->slq", root, rng.normal(size=(count, LATENTS, POINTS)))
    draws = np.einsum("lnq,slq->sln", design.projection, v)
    draws += np.sqrt(design.conditional) * rng.normal(size=draws.shape)
    found = curves(design, at)
    assert_allclose((draws.mean(axis=0) - found.mean) / np.sqrt(found.variance), 0, atol=4 / np.sqrt(count))
    assert_allclose(draws.var(axis=0) / found.variance, 1, atol=4 * np.sqrt(2 / count))
