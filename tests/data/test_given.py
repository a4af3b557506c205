"""Draws of θ given φ and a client's rows: by the distribution that quadrature has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytest
from scipy import stats
from scipy.special import expit, log_expit

import fedppl
from fedppl.contracts import ClientView
from fedppl.local import conditional_draws

_DRAWS = 20_000


def client_of(successes: list[int], rows: list[int]) -> ClientView:
    """Log odds of its own for each of a client's wards, which binomial counts tell."""

    def wards(y: Any, n: Any) -> pm.Model:
        with pm.Model() as model:
            y, n = pm.Data("y", y), pm.Data("n", n)
            mu, tau = pm.Normal("mu", 0, 2), pm.HalfNormal("tau", 2)
            pm.Binomial("obs", n=n, logit_p=pm.Normal("theta", mu, tau, shape=len(successes)), observed=y)
        return model

    declared = fedppl.FederatedModel(wards, ["mu", "tau"])
    return declared.enrol({"A": {"y": np.array(successes), "n": np.array(rows)}})["A"]


def below(x: Any, phi: Any, successes: int, rows: int) -> Any:
    """Distribution function of a ward's log odds at x, by the trapezium rule."""
    mu, tau = phi[0], np.exp(phi[1])
    grid = mu + tau * np.linspace(-9, 9, 20_001)
    log_density = successes * np.log(expit(grid)) + (rows - successes) * np.log(expit(-grid))
    log_density += stats.norm.logpdf(grid, mu, tau)
    density = np.exp(log_density - log_density.max())
    total = np.cumsum(density) - 0.5 * density
    return np.interp(x, grid, total / density.sum())


@pytest.mark.parametrize(
    ("successes", "rows"),
    [
        pytest.param([0], [2], marks=pytest.mark.slow),
        ([1], [40]),
        ([30], [70]),
        pytest.param([90, 700], [400, 1000], marks=pytest.mark.slow),
        pytest.param([3, 0, 2, 9], [4, 5, 9, 9], marks=pytest.mark.slow),
        pytest.param([40, 35, 52, 61, 70, 20], [100, 100, 100, 100, 100, 50], marks=pytest.mark.slow),
    ],
)
def test_given_phi_wards_are_drawn_from_their_own_posterior(successes: list[int], rows: list[int]) -> None:
    phi = np.array([0.3, np.log(1.4)])
    client = client_of(successes, rows)
    theta = conditional_draws.draw_given(client, np.tile(phi, (_DRAWS, 1)), phi, np.random.default_rng(1))
    least = 0.001 / len(successes)
    for i, (y, n) in enumerate(zip(successes, rows, strict=True)):
        u = below(theta[:, i], phi, y, n)
        assert stats.kstest(u, "uniform").pvalue > least
        # the ends too, which a test of distributions hardly looks at
        assert stats.binomtest(int(np.sum((u < 0.01) | (u > 0.99))), _DRAWS, 0.02).pvalue > least


def test_where_laplaces_approximation_holds_fewer_candidates_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    phi, asked = np.tile([0.3, 1.5], (50, 1)), []

    def counting(compute: Any) -> Any:
        def count(client: Any, phi: Any, theta: Any) -> Any:
            asked.append(len(theta))
            return compute(client, phi, theta)

        return count

    for name in ("_values", "_outputs"):
        monkeypatch.setattr(conditional_draws, name, counting(getattr(conditional_draws, name)))
    for successes, rows, least, most in ((300, 700, 4, 10), (0, 5, 50, 100)):
        asked.clear()
        conditional_draws.draw_given(client_of([successes], [rows]), phi, phi[0], np.random.default_rng(2))
        assert least < sum(asked) < most


def heavy(y: Any) -> pm.Model:
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 2)
        pm.Bernoulli("obs", logit_p=pm.Cauchy("theta", mu, 1), observed=pm.Data("y", y))
    return model


@pytest.mark.slow
def test_tails_that_fall_slowly_are_drawn_to_their_ends() -> None:
    """Three zeros and a Cauchy prior: a hundredth lies below -30."""
    client = fedppl.FederatedModel(heavy, ["mu"]).enrol({"A": {"y": np.zeros(3, dtype=int)}})["A"]
    theta = conditional_draws.draw_given(client, np.zeros((_DRAWS, 1)), np.zeros(1), np.random.default_rng(3))[:, 0]
    u = np.linspace(-10, 10, 200_001)
    grid = np.sinh(u)
    density = np.exp(3 * log_expit(-grid) + stats.cauchy.logpdf(grid)) * np.cosh(u)
    below = np.cumsum(density) / density.sum()
    assert np.interp(0.01, below, grid) < -25
    found = np.interp(theta, grid, below)
    assert stats.kstest(found, "uniform").pvalue > 0.01
    assert stats.binomtest(int(np.sum(found < 0.02)), _DRAWS, 0.02).pvalue > 0.01


def counts(y: Any) -> pm.Model:
    with pm.Model() as model:
        y, mu = pm.Data("y", y), pm.Normal("mu", 0, 2)
        pm.Poisson("obs", pm.math.exp(pm.Normal("theta", mu, 3.0, shape=25)), observed=y)
    return model


@pytest.mark.slow
def test_many_coordinates_are_drawn_as_well_as_one() -> None:
    y = np.repeat([0, 1, 2, 3, 5], 5)
    client = fedppl.FederatedModel(counts, ["mu"]).enrol({"A": {"y": y}})["A"]
    theta = conditional_draws.draw_given(client, np.full((2000, 1), -1.0), np.zeros(1), np.random.default_rng(4))
    grid = np.linspace(-25, 8, 100_001)
    for value in np.unique(y):
        logs = value * grid - np.exp(grid) + stats.norm.logpdf(grid, -1, 3)
        below = np.cumsum(np.exp(logs)) / np.exp(logs).sum()
        assert stats.kstest(np.interp(theta[:, y == value].ravel(), grid, below), "uniform").pvalue > 0.002


def turned(y: Any) -> pm.Model:
    """Both coordinates in each row."""
    with pm.Model() as model:
        y, mu = pm.Data("y", y), pm.Normal("mu", 0, 2)
        theta = pm.Normal("theta", mu, 2.0, shape=2)
        pm.Bernoulli("obs", logit_p=3 * (theta @ np.array([[0.8, 0.6], [-0.6, 0.8]]).T), observed=y)
    return model


@pytest.mark.slow
def test_coordinates_that_hang_on_each_other() -> None:
    client = fedppl.FederatedModel(turned, ["mu"]).enrol({"A": {"y": np.array([0, 0])}})["A"]
    theta = conditional_draws.draw_given(client, np.zeros((_DRAWS, 1)), np.zeros(1), np.random.default_rng(5))
    axis = np.linspace(-14, 14, 1401)
    one, other = np.meshgrid(axis, axis, indexing="ij")
    logs = stats.norm.logpdf(one, 0, 2) + stats.norm.logpdf(other, 0, 2)
    logs += log_expit(-3 * (0.8 * one + 0.6 * other)) + log_expit(-3 * (-0.6 * one + 0.8 * other))
    weights = np.exp(logs - logs.max())
    for i in range(2):
        below = np.cumsum(weights.sum(axis=1 - i)) / weights.sum()
        assert stats.kstest(np.interp(theta[:, i], axis, below), "uniform").statistic < 0.02


def own_spread(y: Any) -> pm.Model:
    """Five effects and their sd, all of the client's own."""
    with pm.Model() as model:
        y, mu, sd = pm.Data("y", y), pm.Normal("mu", 0, 2), pm.HalfNormal("sd", 2)
        pm.Normal("obs", mu + sd * pm.Normal("z", 0, 1, shape=5), 1.0, observed=y)
    return model


@pytest.mark.parametrize(
    "y", [pytest.param([0.3, -0.2, 0.5, 0.1, -0.4], marks=pytest.mark.slow), [2.0, -1.5, 0.5, 3.0, -2.0]]
)
def test_a_sd_of_a_clients_own_effects_is_drawn_into_its_long_tail(y: list[float]) -> None:
    client = fedppl.FederatedModel(own_spread, ["mu"]).enrol({"A": {"y": np.array(y)}})["A"]
    theta = conditional_draws.draw_given(client, np.zeros((8000, 1)), np.zeros(1), np.random.default_rng(6))
    grid = np.linspace(-14, 4, 6001)
    sd = np.exp(grid)
    logs = stats.halfnorm.logpdf(sd, scale=2) + grid
    logs += stats.norm.logpdf(np.array(y)[:, None], 0, np.sqrt(1 + sd**2)).sum(axis=0)
    weights = np.exp(logs - logs.max())
    mean = weights @ grid / weights.sum()
    spread = np.sqrt(weights @ (grid - mean) ** 2 / weights.sum())
    log_sd = theta[:, 0]
    assert abs(log_sd.mean() - mean) < 0.1 * spread
    assert abs(log_sd.std() / spread - 1) < 0.08  # a tail that falls as a density of 1 does, and trajectories are few


def effects(y: Any, error: Any) -> pm.Model:
    """Centered effects with a sd of their own: the mode is in the neck of the funnel, the mass is not."""
    with pm.Model() as model:
        y, error = pm.Data("y", y), pm.Data("error", error)
        tau = pm.math.exp(pm.Normal("log_tau", 0, 1))
        pm.Normal("obs", pm.Normal("theta", pm.Normal("mu", 0, 3), tau, shape=y.shape), error, observed=y)
    return model


@pytest.mark.parametrize("size", [pytest.param(3, marks=pytest.mark.slow), 8])
def test_a_funnel_is_drawn_where_its_mass_is(size: int) -> None:
    rng, draws = np.random.default_rng(0), 2000
    y, error = rng.normal(size=size), 0.5 + rng.uniform(0, 1, size)
    client = fedppl.FederatedModel(effects, ["mu"]).enrol({"A": {"y": y, "error": error}})["A"]
    theta = conditional_draws.draw_given(client, np.zeros((draws, 1)), np.zeros(1), np.random.default_rng(7))
    grid = np.linspace(-9, 9, 8001)
    scale = np.sqrt(np.exp(2 * grid) + error[:, None] ** 2)
    logs = stats.norm.logpdf(grid) + stats.norm.logpdf(y[:, None], 0, scale).sum(axis=0)
    weights = np.exp(logs - logs.max()) / np.exp(logs - logs.max()).sum()
    assert stats.kstest(np.interp(theta[:, 0], grid, np.cumsum(weights)), "uniform").pvalue > 0.01
    # The effects too: exact given log tau, and averaged over it.
    spread = weights @ (np.exp(2 * grid) / (np.exp(2 * grid) + error[0] ** 2))
    assert abs(theta[:, 1].mean() - spread * y[0]) < 4 * theta[:, 1].std() / np.sqrt(draws)


def wards(y: Any, ward: Any) -> pm.Model:
    """A funnel with two sds of the client's own: of effects, and of rows."""
    with pm.Model() as model:
        y, ward = pm.Data("y", y), pm.Data("ward", ward)
        tau, sigma = (pm.math.exp(pm.Normal(name, 0, 1)) for name in ("log_tau", "log_sigma"))
        theta = pm.Normal("theta", pm.Normal("mu", 0, 3), tau, shape=8)
        pm.Normal("obs", theta[ward], sigma, observed=y)
    return model


@pytest.mark.slow
def test_a_funnel_with_two_sds_of_its_own_is_drawn_where_its_mass_is() -> None:
    rng, rows, draws = np.random.default_rng(0), 3, 1000
    ward = np.repeat(np.arange(8), rows)
    y = 0.2 * rng.normal(size=8)[ward] + rng.normal(size=len(ward))
    client = fedppl.FederatedModel(wards, ["mu"]).enrol({"A": {"y": y, "ward": ward}})["A"]
    theta = conditional_draws.draw_given(client, np.zeros((draws, 1)), np.zeros(1), np.random.default_rng(8))
    axes = np.linspace(-7, 4, 600), np.linspace(-1.5, 1.5, 300)
    log_tau, log_sigma = np.meshgrid(*axes, indexing="ij")
    logs = stats.norm.logpdf(log_tau) + stats.norm.logpdf(log_sigma)
    for k in range(8):
        mean, squares = y[ward == k].mean(), np.sum((y[ward == k] - y[ward == k].mean()) ** 2)
        logs -= (rows - 1) * log_sigma + 0.5 * squares * np.exp(-2 * log_sigma)
        logs += stats.norm.logpdf(mean, 0, np.sqrt(np.exp(2 * log_tau) + np.exp(2 * log_sigma) / rows))
    weights = np.exp(logs - logs.max()) / np.exp(logs - logs.max()).sum()
    for i, axis in enumerate(axes):
        below = np.cumsum(weights.sum(axis=1 - i))
        assert stats.kstest(np.interp(theta[:, i], axis, below), "uniform").pvalue > 0.005
