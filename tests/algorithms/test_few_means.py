"""Means of few clients under vague priors of their sd: tails that fall slowly, along a funnel, against quadrature."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytest
from scipy import stats

import fedppl
from fedppl.types import Array
from tests.support.markers import slow_but

PRIORS = {
    "uniform": (lambda: pm.Uniform("tau", 0, 1000), lambda tau: np.log(tau) + np.log1p(-tau / 1000) - np.log(1000)),
    "half-Cauchy": (lambda: pm.HalfCauchy("tau", 5), lambda tau: np.log(tau) + stats.halfcauchy.logpdf(tau, scale=5)),
    "precision": (
        lambda: 1 / pm.math.sqrt(pm.Gamma("precision", 0.01, 0.01)),
        lambda tau: stats.gamma.logpdf(tau**-2.0, 0.01, scale=100) + np.log(2 * tau**-2.0),
    ),
}


def data_of(sizes: list[int]) -> dict[str, Any]:
    rng = np.random.default_rng(74)
    return {f"c{k}": {"y": 100 + 5 * rng.normal() + 3 * rng.normal(size=n)} for k, n in enumerate(sizes)}


def sd_of_mean(data: dict[str, Any], log_prior: Any, grid: Array) -> float:
    """Of mu, by the trapezium rule over what tau and sigma are on the unconstrained space; mu by hand."""
    sigma = np.exp(np.linspace(-5, 6, 500))
    tau, noise = np.meshgrid(grid, sigma, indexing="ij")
    logs = log_prior(tau) + stats.halfcauchy.logpdf(noise, scale=5) + np.log(noise)
    known, pulled = np.full(tau.shape, 1e-6), np.zeros(tau.shape)
    for rows in data.values():
        y, n = rows["y"], len(rows["y"])
        variance = tau**2 + noise**2 / n
        logs -= (n - 1) * np.log(noise) + np.sum((y - y.mean()) ** 2) / (2 * noise**2)
        logs -= 0.5 * np.log(variance) + y.mean() ** 2 / (2 * variance)
        known, pulled = known + 1 / variance, pulled + y.mean() / variance
    logs += pulled**2 / (2 * known) - 0.5 * np.log(known)
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    mean = np.sum(weights * pulled / known)
    return float(np.sqrt(np.sum(weights * (1 / known + (pulled / known) ** 2)) - mean**2))


CASES = [
    pytest.param("uniform", [3, 4, 5, 6], 2, marks=pytest.mark.slow),
    pytest.param("uniform", [3, 4, 5, 6], 1, marks=pytest.mark.slow),
    ("half-Cauchy", [3, 4, 5], 2),
    pytest.param("half-Cauchy", [3, 4, 5], 1, marks=pytest.mark.slow),
    ("precision", [5, 6, 7], 4),  # an sd that grew by a fifth stands still by chance
    pytest.param("precision", [3, 4, 5, 6], 1, marks=pytest.mark.slow),
]


@pytest.mark.filterwarnings("ignore::fedppl.ConvergenceWarning")
@pytest.mark.parametrize(("prior", "sizes", "seed"), CASES)
def test_a_mean_of_few_clients_has_its_sd_or_is_not_converged(prior: str, sizes: list[int], seed: int) -> None:
    declared, log_prior = PRIORS[prior]

    def client(y: Any) -> pm.Model:
        with pm.Model() as model:
            y = pm.Data("y", y)
            theta = pm.Normal("theta", pm.Normal("mu", 0, 1000), declared())
            pm.Normal("obs", theta, pm.HalfCauchy("sigma", 5), observed=y)
        return model

    data, x = data_of(sizes), np.linspace(-16, 14, 1200)
    exact = sd_of_mean(data, log_prior, 1000 / (1 + np.exp(-x)) if prior == "uniform" else np.exp(x))
    shared = ["mu", "precision" if prior == "precision" else "tau", "sigma"]
    fit = fedppl.fit(fedppl.FederatedModel(client, shared), data, progressbar=False, random_seed=seed)
    ratio = float(fit.summary().loc["mu", "sd"]) / exact
    assert abs(ratio - 1) < 0.05 or not fit.status.ok
    assert fit.status.ok or prior != "half-Cauchy"  # the others' tails fall as 1 / x² to a thousand


SLOPES = {"sites": 4, "noise": 1.0, "prior": 2.0, "scale": 1.5}


def slopes(x: Any, arm: Any, y: Any) -> pm.Model:
    """Slopes in two arms, which a site's effect moves together."""
    with pm.Model() as model:
        x, arm, y = pm.Data("x", x), pm.Data("arm", arm), pm.Data("y", y)
        b, tau = pm.Normal("b", 0, SLOPES["prior"], shape=2), pm.HalfNormal("tau", SLOPES["scale"])
        own = pm.Normal("u", 0, tau)
        pm.Normal("obs", (b[0] * (1 - arm) + b[1] * arm + own) * x, SLOPES["noise"], observed=y)
    return model


def quadrature(data: dict[str, Any]) -> tuple[Array, Array]:
    """Means and sds of both slopes and tau: over tau by the trapezium rule, the rest by hand."""
    taus = np.exp(np.linspace(-12, 2.5, 3000))
    logs = stats.halfnorm.logpdf(taus, scale=SLOPES["scale"]) + np.log(taus)
    known = np.tile(np.eye(2) / SLOPES["prior"] ** 2, (len(taus), 1, 1))
    pulled = np.zeros((len(taus), 2))
    for rows in data.values():
        x, design = rows["x"], np.column_stack([(1 - rows["arm"]) * rows["x"], rows["arm"] * rows["x"]])
        shrunk = taus**2 / (1.0 + taus**2 * (x @ x))  # of the covariance's inverse, along x
        known += design.T @ design - shrunk[:, None, None] * np.outer(x @ design, x @ design)
        pulled += rows["y"] @ design - shrunk[:, None] * (x @ rows["y"]) * (x @ design)
        logs += 0.5 * shrunk * (x @ rows["y"]) ** 2 - 0.5 * np.log1p(taus**2 * (x @ x))
    covariance = np.linalg.inv(known)
    means = np.einsum("tij,tj->ti", covariance, pulled)
    logs += 0.5 * np.einsum("ti,ti->t", pulled, means) - 0.5 * np.linalg.slogdet(known)[1]
    weights = np.exp(logs - logs.max()) / np.sum(np.exp(logs - logs.max()))
    first = np.column_stack([means, taus])
    second = np.column_stack([np.diagonal(covariance, axis1=1, axis2=2) + means**2, taus**2])
    return weights @ first, np.sqrt(weights @ second - (weights @ first) ** 2)


@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_slopes_that_few_sites_move_together(seed: int) -> None:
    """Given tau they are normal, and their margins are not: some of their kurtoses are above 10."""
    rng, data = np.random.default_rng(seed), {}
    for k in range(SLOPES["sites"]):
        n = int(rng.integers(20, 50))
        x, arm = rng.normal(size=n), rng.integers(0, 2, n).astype(float)
        y = (0.4 + 0.3 * arm + 0.02 * rng.normal()) * x + rng.normal(size=n)
        data[f"s{k}"] = {"x": x, "arm": arm, "y": y}
    model = fedppl.FederatedModel(slopes, shared=["b", "tau"])
    fit = fedppl.fit(model, data, fedppl.Sums(), random_seed=seed, progressbar=False)
    assert fit.status.ok
    mean, sd = quadrature(data)
    summary = fit.summary()
    assert np.max(np.abs(summary["mean"] - mean) / sd) < 0.03
    assert np.max(np.abs(summary["sd"] / sd - 1.0)) < 0.03
    assert len(fit.state.phase.evaluated.points) < 4000  # in coordinates that do not spread with tau it takes 10,000


@pytest.mark.parametrize("seed", slow_but([1, 3], 3))
def test_skewness_is_not_that_of_points_that_only_a_surrogate_has(seed: int) -> None:
    """Of the mean of three clinics under a vague prior of their spread: 0.03 by quadrature."""
    clinics = {f"c{k}": {"y": np.repeat([1, 0], [some, 15 - some])} for k, some in enumerate([10, 4, 2])}

    def clinic(y: Array) -> pm.Model:
        with pm.Model() as model:
            mu, tau, z = pm.Normal("mu", 0, 10), pm.HalfCauchy("tau", 2.5), pm.Normal("z")
            pm.Bernoulli("outcome", logit_p=mu + tau * z, observed=pm.Data("y", y))
        return model

    fit = fedppl.fit(fedppl.FederatedModel(clinic, shared=["mu", "tau"]), clinics, random_seed=seed)
    assert fit.status.ok
    assert abs(fit.idata["fit"]["skewness"].sel(rows="mu").item()) < 0.5
