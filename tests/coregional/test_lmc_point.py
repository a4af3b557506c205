"""Coordinate ascent with point coefficients: each part is at the mode, and so is the whole; what it takes for known."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.optimize import minimize
from scipy.stats import multivariate_normal, norm

import fedppl
from fedppl import curves
from fedppl.coregional.bound import Design, UnitClientState, bound_of_sums, joint_covariance, rescale, size_factor
from fedppl.coregional.unit import best_unit, statistics
from fedppl.coregional.view import unit_of
from fedppl.models import fedlmc_ss
from fedppl.types import DeclarationError
from tests.coregional.test_lmc_ascent import assert_highest
from tests.coregional.test_lmc_bound import LATENTS, RANDOM, units
from tests.support import problems

NEW = np.linspace(-0.1, 1.1, 9)
# Without a selection.
SHARED = RANDOM.shared._replace(inclusion=np.ones(LATENTS))


def log_posterior(design: Design, w: Any, log_sd: float, mean: Any, covariance: Any, slab_sd: float) -> float:
    """E log p(y | w, v) + log p(w) of one unit, and its prior of log σ apart, each term as it is written."""
    wide = np.moveaxis(w[:, None, None] * design.projection, 0, 1).reshape(len(design.response), -1)
    spread = sum(np.trace((x := w[k] * design.projection[k]) @ covariance[k] @ x.T) for k in range(len(w)))
    left = np.sum(w[:, None] ** 2 * design.conditional)
    error = design.response - wide @ np.ravel(mean)
    value = -0.5 * np.exp(-2 * log_sd) * (error @ error + spread + left)
    value -= len(error) * (log_sd + 0.5 * np.log(2 * np.pi))
    return float(value - 0.5 * w @ w / slab_sd**2 - len(w) * (np.log(slab_sd) + 0.5 * np.log(2 * np.pi)))


def divergence(mean: Any, covariance: Any) -> float:
    """KL(q(v) ‖ N(0, I))."""
    terms = (np.trace(S) + m @ m - len(m) - np.linalg.slogdet(S)[1] for m, S in zip(mean, covariance, strict=True))
    return 0.5 * float(sum(terms))


def test_a_units_coefficients_and_noise_are_at_the_mode() -> None:
    for client in units().values():
        view = client.view(unit_of)
        design = view.design(SHARED.kernel)
        own, _ = best_unit(design, SHARED, view.noise, view.noise.mean, 300, spread=0.0)
        assert np.all(own.variance == 0.0)

        def value(x: Any, design: Design = design, view: Any = view) -> float:
            there = log_posterior(design, x[:-1], x[-1], SHARED.mean, SHARED.covariance, np.exp(SHARED.log_slab_sd))
            return there + view.noise.log_density(float(x[-1]))

        assert_highest(value, np.append(own.mean, own.log_noise_sd))


def point_units() -> list[UnitClientState]:
    return [own._replace(variance=np.zeros(LATENTS)) for own in RANDOM.units]


def totals_of(own: list[UnitClientState]) -> dict[str, Any]:
    totals: dict[str, Any] = {}
    for client, one in zip(units().values(), own, strict=True):
        view = client.view(unit_of)
        for key, value in statistics(view.design(SHARED.kernel), one, view.noise).items():
            totals[key] = totals.get(key, 0.0) + value
    return totals


def test_the_bound_is_the_posterior_of_the_coefficients() -> None:
    """From sums alone: expected log likelihood, log priors of what is estimated, minus the divergence of q(v)."""
    wanted = -divergence(SHARED.mean, SHARED.covariance)
    for client, own in zip(units().values(), point_units(), strict=True):
        view = client.view(unit_of)
        at = own.mean, own.log_noise_sd, SHARED.mean, SHARED.covariance, np.exp(SHARED.log_slab_sd)
        wanted += log_posterior(view.design(SHARED.kernel), *at) + view.noise.log_density(own.log_noise_sd)
    found = bound_of_sums(totals_of(point_units()), SHARED, np.full(LATENTS, np.inf))
    assert_allclose(found, wanted, rtol=1e-10)


def test_sizes_are_at_the_bounds_maximum() -> None:
    """v times c and w by c: a point has no entropy that would shrink with it."""
    no_odds = np.full(LATENTS, np.inf)

    def value(log_factor: Any) -> float:
        factor = np.exp(log_factor)
        own = [one._replace(mean=one.mean / factor) for one in point_units()]
        mean, covariance = SHARED.mean * factor[:, None], SHARED.covariance * factor[:, None, None] ** 2
        return bound_of_sums(totals_of(own), SHARED._replace(mean=mean, covariance=covariance), no_odds)

    totals = totals_of(point_units())
    factor = size_factor(totals, SHARED, 0.0)
    assert np.max(np.abs(np.log(factor))) > 0.05
    assert_highest(value, np.log(factor))
    assert_allclose(bound_of_sums(*rescale(totals, SHARED, 0.0), no_odds), value(np.log(factor)), rtol=1e-10)


@functools.cache
def fitted(rounds: int = 100) -> fedppl.Fit:
    """Kernels fixed, so that all that is left is at a maximum in closed form."""
    algorithm = curves.PointAscent(warmup=2, kernel_rate=0.0, initial_kernel="prior", tolerance=1e-12)
    model, data = problems.coregional_all_model(), problems.coregional()[1]
    return fedppl.fit(model, data, algorithm, rounds=rounds, progressbar=False, random_seed=1)


@problems.few_rounds
def test_no_round_lowers_the_bound() -> None:
    bound = np.array([record.info["bound"] for record in fitted().records])
    assert np.all(np.diff(bound[3:]) > -1e-9) and bound[-1] > bound[3] + 1.0


@pytest.mark.slow
@problems.few_rounds
def test_of_one_function_the_fit_is_at_the_maximum_of_the_evidence() -> None:
    """v integrated out: log N(y; 0, W W' + Σ) of all units' rows, less what v leaves open, with the priors; by BFGS."""
    builder = functools.partial(problems.coregional_builder, latents=1, inclusion=None)
    model = fedppl.FederatedModel(builder, fedlmc_ss.SHARED_WITHOUT_SELECTION)
    algorithm = curves.PointAscent(warmup=2, kernel_rate=0.0, tolerance=1e-12)
    fit = fedppl.fit(model, problems.coregional()[1], algorithm, rounds=400, progressbar=False, random_seed=1)
    views = [client.view(unit_of) for client in fit.clients.values()]
    designs, count = [view.design(fit.state.shared.kernel) for view in views], len(views)
    y = np.concatenate([view.response for view in views])

    def negative(x: Any) -> float:
        w, log_sd = x[:count], x[count:]
        W = np.concatenate([one * d.projection[0] for one, d in zip(w, designs, strict=True)])
        noise = np.concatenate([np.full(len(d.response), np.exp(2 * s)) for s, d in zip(log_sd, designs, strict=True)])
        value = multivariate_normal(np.zeros(len(y)), W @ W.T + np.diag(noise)).logpdf(y) + norm.logpdf(w).sum()
        for one, s, design, view in zip(w, log_sd, designs, views, strict=True):
            value += view.noise.log_density(float(s)) - 0.5 * np.exp(-2 * s) * one**2 * design.conditional.sum()
        return -float(value)

    own = [fit.personal[name] for name in fit.clients]
    start = np.array([*[one.mean[0] for one in own], *[one.log_noise_sd for one in own]])
    assert negative(start * 1.1) > negative(start) + 0.05
    best = minimize(negative, start, method="BFGS")
    assert_allclose(-negative(start), -best.fun, atol=1e-5)
    assert_allclose(best.x, start, atol=5e-3)
    slab = views[0].roles.slab_prior.log_density(0.0)
    assert_allclose(fit.records[-1].info["bound"], slab - negative(start), atol=1e-4)


@problems.few_rounds
def test_coefficients_count_as_known_and_slab_sd_as_given() -> None:
    fit = fitted()
    found = curves.coefficients(fit, ["unit 0"])
    assert np.all(found["sd"] == 0.0)
    assert float(curves.selection(fit)["slab_sd"]) == pytest.approx(1.0, rel=1e-12)
    w, shared = found["mean"].values[0], fit.state.shared
    design = fit.clients["unit 0"].view(unit_of).at(shared.kernel, {"X": NEW})
    wide = np.moveaxis(w[:, None, None] * design.projection, 0, 1).reshape(len(NEW), -1)
    joint = joint_covariance(fit.state.phase.totals, shared.inclusion)
    variance = np.sum((wide @ joint) * wide, axis=1) + w**2 @ design.conditional
    said = curves.predict(fit, "unit 0", {"X": NEW})
    assert_allclose(said["mean"], wide @ shared.mean.ravel(), rtol=1e-8)
    assert_allclose(said["function_sd"], np.sqrt(variance), rtol=1e-6)
    drawn = fit.client("unit 0", draws=50, chains=1, random_seed=2)["posterior"]["w"].values[0]
    assert_allclose(drawn, np.broadcast_to(w, drawn.shape), atol=1e-4)


@problems.few_rounds
def test_a_new_units_coefficients_are_at_the_mode_given_the_functions() -> None:
    """Equation 17, with the declared prior of w."""
    fit, data = fitted(), problems.coregional(4, seed=5)[1]["unit 3"]
    view = fit.declaration.enrol({"new": data}, kernel=False)["new"].view(unit_of)
    shared = fit.state.shared
    design = view.design(shared.kernel)
    at = design.projection @ shared.mean[:, :, None]

    def negative(x: Any) -> float:
        value = log_posterior(design, x[:-1], x[-1], shared.mean, shared.covariance, 1.0)
        return -value - view.noise.log_density(float(x[-1]))

    best = minimize(negative, np.append(np.zeros(LATENTS), -1.0), method="BFGS", options={"gtol": 1e-6})
    said = curves.predict(fit, data, {"X": data["X"]}, fixed=True)
    assert_allclose(said["mean"], best.x[:-1] @ at[:, :, 0], atol=2e-3)


def test_a_selection_is_refused() -> None:
    model, data = problems.coregional()
    with pytest.raises(DeclarationError, match=r"\['included'\] are discrete"):
        fedppl.fit(model, data, curves.PointAscent(), progressbar=False)
