"""Local variables most of which are Gaussian given few: which these are, and the integral against its closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import logsumexp
from scipy.stats import norm, t

from fedppl import FederatedModel
from fedppl.local import _conditional, _marginal, log_factors
from fedppl.types import Array
from tests.support import problems

STEPS = np.linspace(-5.0, 5.0, 801)  # sds of log sigma's prior: the trapezium rule is exact there


def client_of(rows: int, seed: int = 3) -> tuple[Any, dict[str, Array]]:
    """A regression with a noise sd of its own (θ, log σ), as `problems.noise_builder` declares it."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, 2))
    data = {"X": X, "y": X @ [1.0, -0.5] + 0.6 * rng.normal(size=rows)}
    return FederatedModel(problems.noise_builder, ["mu", "log_tau"]).enrol({"a": data})["a"], data


def exact(phi: Array, data: dict[str, Array]) -> Array:
    """log f at rows (μ, log τ): given σ, y ~ N(Xμ, τ² X Xᵀ + σ² I)."""
    X, y = data["X"], data["y"]
    log_sigma = -0.5 + 0.5 * STEPS
    values, vectors = np.linalg.eigh(X @ X.T)
    found = []
    for *mu, log_tau in phi:
        variance = np.exp(2 * log_tau) * values + np.exp(2 * log_sigma)[:, None]
        rest = vectors.T @ (y - X @ mu)
        terms = norm.logpdf(rest, 0, np.sqrt(variance)).sum(axis=1) + norm.logpdf(log_sigma, -0.5, 0.5)
        found.append(logsumexp(terms) + np.log(log_sigma[1] - log_sigma[0]))
    return np.array(found)


def two_sds(y: Any, z: Any) -> pm.Model:
    """Two measurements of one normal effect, each with an sd that the client alone knows of."""
    with pm.Model() as model:
        y, z = pm.Data("y", y), pm.Data("z", z)
        theta = pm.Normal("theta", pm.Normal("mu"), 1)
        for name, values in (("a", y), ("b", z)):
            pm.Normal(f"of_{name}", theta, pm.math.exp(pm.Normal(f"log_{name}", 0, 0.5)), observed=values)
    return model


def binary(X: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        theta = pm.Normal("theta", pm.Normal("mu", shape=3), 1, shape=3)
        pm.Bernoulli("obs", logit_p=X @ theta, observed=y)
    return model


def nearly(y: Any) -> pm.Model:
    """What is Gaussian but for a term that shows far from the mode alone."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        theta = pm.Normal("theta", pm.Normal("mu"), 1, shape=2)
        pm.Normal("obs", theta.sum(), 1.0, observed=y)
        pm.Potential("tail", -1e-4 * pm.math.log(1.0 + theta[0] ** 2))
    return model


@pytest.mark.parametrize("rows", [3, 12, 200])
def test_the_integral_is_that_of_the_closed_form_with_its_constant(rows: int) -> None:
    client, data = client_of(rows)
    which = _conditional.conditioning(client)
    assert which is not None
    assert_array_equal(which, [2])
    center = np.array([0.8, -0.4, -1.0])
    phi = center + np.random.default_rng(0).standard_t(5, size=(40, 3)) * [0.4, 0.4, 0.6]
    found, errors = _conditional.integrated(client, phi, _marginal.near(client, phi, center), which)
    missed = np.abs(found - exact(phi, data))
    assert np.median(missed) < 1e-5 and missed.max() < 5e-4  # far out, with three rows
    assert np.all(missed < 2e-5 + 3.0 * np.abs(errors))
    laplace = _marginal.near(client, phi, center)[0] - exact(phi, data)
    assert np.std(laplace) > 20 * np.std(found - exact(phi, data))
    assert_allclose(log_factors.factor(client, phi, center, 0.0).values, exact(phi, data), atol=5e-4)


@pytest.mark.slow
def test_two_coordinates_are_integrated_on_a_grid() -> None:
    rng = np.random.default_rng(1)
    y, z = 0.3 + rng.normal(size=9), 0.3 + 2.0 * rng.normal(size=7)
    client = FederatedModel(two_sds, ["mu"]).enrol({"a": {"y": y, "z": z}})["a"]
    which = _conditional.conditioning(client)
    assert which is not None
    assert_array_equal(which, [1, 2])
    phi = np.linspace(-1.5, 2.0, 7)[:, None]
    found, _ = _conditional.integrated(client, phi, _marginal.near(client, phi, np.zeros(1)), which)
    grid = 0.5 * np.linspace(-6, 6, 241)
    a, b = (one.ravel() for one in np.meshgrid(grid, grid))
    expected = []
    for mu in phi[:, 0]:
        logs = norm.logpdf(a, 0, 0.5) + norm.logpdf(b, 0, 0.5)
        precision, linear, constant = 1.0, mu, norm.logpdf(0) - 0.5 * mu**2
        for values, log_sd in ((y, a), (z, b)):
            precision = precision + len(values) * np.exp(-2 * log_sd)
            linear = linear + values.sum() * np.exp(-2 * log_sd)
            constant = (
                constant + len(values) * (norm.logpdf(0) - log_sd) - 0.5 * (values**2).sum() * np.exp(-2 * log_sd)
            )
        logs = logs + constant + 0.5 * linear**2 / precision + 0.5 * np.log(2 * np.pi / precision)
        expected.append(logsumexp(logs) + 2 * np.log(grid[1] - grid[0]))
    assert_allclose(found, expected, atol=1e-4)


def test_where_the_others_are_not_gaussian_nothing_is_found() -> None:
    rng = np.random.default_rng(2)
    X = rng.normal(size=(20, 3))
    client = FederatedModel(binary, ["mu"]).enrol({"a": {"X": X, "y": rng.integers(0, 2, 20)}})["a"]
    assert _conditional.conditioning(client) is None and not _conditional.is_gaussian(client)


def test_a_term_that_shows_far_from_the_mode_is_seen() -> None:
    client = FederatedModel(nearly, ["mu"]).enrol({"a": {"y": np.array([0.2, 0.9])}})["a"]
    assert not _conditional.is_gaussian(client)


def test_without_the_coordinates_that_are_not_gaussian_all_is_exact() -> None:
    model, clients = problems.regression()
    client = model.enrol(dict([next(iter(clients.items()))]))
    assert all(_conditional.is_gaussian(one) and _conditional.conditioning(one) is None for one in client.values())


def schools(centred: bool) -> Any:
    """Measurements of effects with a sd of their own that only this client has: a funnel in (log τ, effects)."""

    def declare(y: Any, error: Any) -> pm.Model:
        with pm.Model() as model:
            y, error = pm.Data("y", y), pm.Data("error", error)
            mu, tau = pm.Normal("mu", 0, 3), pm.math.exp(pm.Normal("log_tau", 0, 1))
            if centred:
                theta = pm.Normal("theta", mu, tau, shape=y.shape)
            else:
                theta = mu + tau * pm.Normal("z", 0, 1, shape=y.shape)
            pm.Normal("obs", theta, error, observed=y)
        return model

    return declare


@pytest.mark.parametrize("centred", [True, False], ids=["centred", "not centred"])
@pytest.mark.parametrize("size", [3, 8])
def test_a_funnel_is_integrated_where_its_mass_is(size: int, centred: bool) -> None:
    rng = np.random.default_rng(0)
    y, error = rng.normal(size=size), 0.5 + rng.uniform(0, 1, size)
    client = FederatedModel(schools(centred), ["mu"]).enrol({"a": {"y": y, "error": error}})["a"]
    which = _conditional.conditioning(client)
    assert which is not None
    assert_array_equal(which, [0])
    grid = np.linspace(-9, 9, 8001)
    phi = np.linspace(-3, 3, 25)[:, None]
    scale = np.sqrt(np.exp(2 * grid) + error[:, None] ** 2)
    logs = np.array([norm.logpdf(grid) + norm.logpdf(y[:, None], mu, scale).sum(axis=0) for mu in phi[:, 0]])
    expected = logsumexp(logs, axis=1) + np.log(grid[1] - grid[0])
    found, errors = _conditional.integrated(client, phi, _marginal.near(client, phi, np.zeros(1)), which)
    assert_allclose(found, expected, rtol=0, atol=1e-3)
    assert np.all(np.abs(found - expected) < 1e-4 + 3.0 * np.abs(errors))


def heavy(nu: float, scale: float) -> Any:
    """A shift of most of its mass at 0, where rows say 5."""

    def declare(y: Any) -> pm.Model:
        with pm.Model() as model:
            y = pm.Data("y", y)
            theta = pm.Normal("theta", pm.Normal("mu", 0, 3), 1)
            pm.Normal("obs", theta + pm.StudentT("shift", nu=nu, mu=0, sigma=scale), 1, observed=y)
        return model

    return declare


@pytest.mark.parametrize(
    ("nu", "scale", "known"), [pytest.param(4.0, 1.0, 1e-3, marks=pytest.mark.slow), (1.0, 0.05, np.inf)]
)
def test_what_a_heavy_tail_leaves_unknown_is_said(nu: float, scale: float, known: float) -> None:
    y = np.array([5.0, 5.5, 4.8])
    client = FederatedModel(heavy(nu, scale), ["mu"]).enrol({"a": {"y": y}})["a"]
    which = _conditional.conditioning(client)
    assert which is not None
    phi, shift = np.linspace(-3, 3, 13)[:, None], np.linspace(-60, 60, 400_001)
    inside = -np.log(2 * np.pi) - 0.5 * np.log(3) - 0.5 * np.sum((y - y.mean()) ** 2)
    prior = t.logpdf(shift, nu, 0, scale)
    logs = [prior + norm.logpdf(y.mean(), mu + shift, np.sqrt(4 / 3)) + inside for mu in phi[:, 0]]
    expected = logsumexp(logs, axis=1) + np.log(shift[1] - shift[0])
    found, errors = _conditional.integrated(client, phi, _marginal.near(client, phi, np.zeros(1)), which)
    missed = found - expected
    assert np.abs(missed).max() < known
    assert np.ptp(missed) < 1e-4 + 3.0 * np.ptp(errors)


def far_apart(y: Any) -> pm.Model:
    """Two modes, thirty sds from each other, each of them a Gaussian."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        theta = pm.Normal("theta", pm.Normal("mu", 0, 3), 1)
        shift = pm.NormalMixture("shift", [0.5, 0.5], [-3, 3], [0.2, 0.2])
        pm.Normal("obs", theta + shift, 1, observed=y)
    return model


def test_a_mode_thirty_sds_away_makes_no_gaussian() -> None:
    client = FederatedModel(far_apart, ["mu"]).enrol({"a": {"y": np.array([0.2, -0.3, 0.5])}})["a"]
    assert not _conditional.is_gaussian(client) and _conditional.conditioning(client) is None
