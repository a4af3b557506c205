"""What a posterior by sums is used for: moments against quadrature, evidence, comparisons, clients and newcomers."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose
from scipy import stats

import fedppl
from fedppl import DeclarationError, FederatedModel, gaussian
from fedppl.numerics.importance import weighted_moments
from fedppl.testing import normal_means
from fedppl.types import Status
from tests.support import problems


def fit(model: FederatedModel, clients: Any, algorithm: Any = None, **settings: Any) -> fedppl.Fit:
    return fedppl.fit(model, clients, algorithm or fedppl.Sums(), progressbar=False, **{"random_seed": 1, **settings})


def test_of_a_gaussian_model_the_evidence_is_exact_and_the_posterior_is_q() -> None:
    model, clients = normal_means(4)
    found = fit(model, clients)
    y = np.concatenate([data["y"] for data in clients.values()])
    same = np.concatenate([np.full(len(data["y"]), k) for k, data in enumerate(clients.values())])
    covariance = np.eye(len(y)) + 0.25 * (same[:, None] == same) + 100.0
    assert found.log_evidence.value == pytest.approx(
        stats.multivariate_normal(np.zeros(len(y)), covariance).logpdf(y), abs=1e-6
    )
    assert found.log_evidence.error < 1e-6
    assert found.status is Status.CONVERGED
    table, sd = found.summary(), gaussian.standard_deviations(found.posterior)
    assert_allclose(table["sd"], sd, rtol=1e-3)  # of quasi-random points
    assert np.max(np.abs(table["mean"] - gaussian.mean(found.posterior)) / sd) < 1e-3


def test_schools_are_those_of_quadrature() -> None:
    model, clients = problems.schools()
    found, exact = fit(model, clients), problems.schools_quadrature()
    moments, at = found.idata["fit"], found.layout.labels.index("tau_log__")
    sd = float(np.sqrt(moments["covariance_matrix"][at, at]))
    assert abs(float(moments["mean_vector"][at]) - exact["log_tau_mean"]) < 0.05 * exact["log_tau_sd"]
    assert sd / exact["log_tau_sd"] == pytest.approx(1, abs=0.03)
    assert float(moments["skewness"][at]) == pytest.approx(exact["log_tau_skew"], abs=0.15)
    assert found.message == ""
    table, draws = found.summary(), found.idata["posterior"]
    assert table.loc["tau", "mean"] == pytest.approx(float(draws["tau"].mean()), rel=0.05)
    assert table.loc["tau", "ci_high"] == pytest.approx(float(draws["tau"].quantile(0.975)), rel=0.1)
    assert draws.attrs["unique"] > 500 and draws.attrs["pareto_k"] < 0.7


def scales(y: Any) -> pm.Model:
    """Two small values of unknown sd: what a Gaussian of log tau says of tau² has no end."""
    with pm.Model() as model:
        tau = pm.HalfNormal("tau", 5)
        pm.Deterministic("variance", tau**2)
        pm.Normal("obs", 0, tau, observed=pm.Data("y", y))
    return model


@pytest.mark.parametrize("y", [[0.3, -0.5], [2.0]])
def test_what_has_heavy_tails_under_a_gaussian_is_that_of_quadrature(y: list[float]) -> None:
    found = fit(FederatedModel(scales, ["tau"]), {"a": {"y": np.array(y)}})
    log_tau = np.linspace(-8, 5, 20001)
    tau = np.exp(log_tau)
    weights = np.exp(log_tau - tau**2 / 50 - len(y) * log_tau - 0.5 * np.sum(np.square(y)) / tau**2)
    weights /= weights.sum()
    table = found.summary()
    for name, values in (("tau", tau), ("variance", tau**2)):
        mean = weights @ values
        sd = np.sqrt(weights @ (values - mean) ** 2)
        row = table.loc[name]
        assert abs(row["mean"] - mean) < max(4 * row["mcse_mean"], 0.01 * sd) < 0.2 * sd
        assert abs(row["sd"] - sd) < max(4 * row["mcse_sd"], 0.01 * sd) < 0.4 * sd
        assert found.estimate[name] == row["mean"]


# --- evidence and comparisons -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_evidence_of_schools_is_that_of_quadrature(seed: int) -> None:
    from benchmarks._exactness import eight_schools

    _, _, evidence = eight_schools.quadrature(5.0, lambda x: stats.halfcauchy(scale=5).logpdf(np.exp(x)) + x)
    clients = {f"school{k}": {"y": eight_schools.EFFECTS[[k]], "s": eight_schools.ERRORS[[k]]} for k in range(8)}
    found = fit(FederatedModel(eight_schools.wide, ["mu", "tau"]), clients, random_seed=seed).log_evidence
    assert abs(found.value - evidence) < 4 * found.error < 0.01


def flat_local(y: Any) -> pm.Model:
    with pm.Model() as model:
        y = pm.Data("y", y)
        mu = pm.Normal("mu", 0, 2)
        theta = pm.Flat("theta")
        pm.Normal("obs", pm.math.stack([mu + theta, theta]), 1, observed=y)
    return model


def test_improper_priors_have_no_evidence() -> None:
    rng = np.random.default_rng(1)
    found = fit(FederatedModel(flat_local, ["mu"]), {k: {"y": rng.normal(size=(9, 2))} for k in "abc"})
    with pytest.raises(DeclarationError, match="normalising constant"):
        _ = found.log_evidence


def fixed_tau(effect: Any, error: Any) -> pm.Model:
    with pm.Model() as model:
        effect, error = pm.Data("effect", effect), pm.Data("error", error)
        mu = pm.Normal("mu", 0, 5)
        theta = pm.Normal("theta", mu, 0.1)
        pm.Normal("obs", theta, error, observed=effect)
    return model


def test_models_are_compared_by_their_evidence() -> None:
    model, clients = problems.schools()
    pooled = fit(FederatedModel(fixed_tau, ["mu"]), clients)
    hierarchical = fit(model, clients)
    y, s = (np.array([float(np.ravel(data[name])[0]) for data in clients.values()]) for name in ("effect", "error"))
    exact = stats.multivariate_normal(np.zeros(8), np.diag(s**2 + 0.01) + 25.0).logpdf(y)
    table = fedppl.compare({"hierarchical": hierarchical, "pooled": pooled})
    assert table.loc["pooled", "log_evidence"] == pytest.approx(exact, abs=1e-6)
    assert list(table["rank"]) == [0, 1] and table["probability"].sum() == pytest.approx(1)
    assert table.loc["hierarchical", "probability"] / table.loc["pooled", "probability"] == pytest.approx(
        np.exp(hierarchical.log_evidence.value - exact)
    )


def test_other_data_are_not_compared() -> None:
    model, clients = normal_means(3)
    ours = fit(model, clients)
    fewer = fit(model, {k: v for k, v in list(clients.items())[:2]})
    with pytest.raises(fedppl.DataError, match="not of the same clients"):
        fedppl.compare({"a": ours, "b": fewer})
    shorter = fit(model, {k: {"y": v["y"][:5]} for k, v in clients.items()})
    with pytest.raises(fedppl.DataError, match="20 observations in fit"):
        fedppl.compare({"a": ours, "b": shorter})
    moved = fit(model, {k: {"y": v["y"] + 3.0} for k, v in clients.items()})
    for table in (fedppl.compare, fedppl.loo_compare):
        with pytest.raises(fedppl.DataError, match="same units"):
            table({"a": ours, "b": moved})
    turned = fit(model, {k: {"y": v["y"][::-1]} for k, v in clients.items()})
    assert fedppl.compare({"a": ours, "b": turned})["probability"].tolist() == pytest.approx([0.5, 0.5])
    with pytest.raises(fedppl.DataError, match="in this order"):
        fedppl.loo_compare({"a": ours, "b": turned})
    with pytest.raises(DeclarationError, match="two or more fits"):
        fedppl.compare({"a": ours})
    with pytest.raises(DeclarationError, match="no texts"):  # of 1 and "1" one would be lost
        fedppl.compare({1: ours, "1": turned})  # type: ignore[dict-item]


# --- clients and newcomers ----------------------------------------------------------------------------------------


def given_shared(found: fedppl.Fit, effect: float, error: float) -> tuple[Any, Any, Any, Any]:
    """Weights of the posterior's points, and mu, tau and the mean and precision of a school's theta at each."""
    posterior, names = found.state.phase.posterior, found.layout.labels
    mu, tau = posterior.points[:, names.index("mu")], np.exp(posterior.points[:, names.index("tau_log__")])
    precision = 1 / tau**2 + 1 / error**2
    return posterior.weights, np.hypot(tau, error), (mu / tau**2 + effect / error**2) / precision, precision


def test_a_clients_own_variables_are_those_of_the_posterior() -> None:
    """theta of a school given tau and mu is Gaussian, so its moments are known from the points."""
    model, clients = problems.schools()
    found = fit(model, clients)
    client_id = next(iter(clients))
    effect, error = (float(np.ravel(clients[client_id][name])[0]) for name in ("effect", "error"))
    weights, _, mean, precision = given_shared(found, effect, error)
    exact = weighted_moments(mean[:, None], weights)
    spread = float(np.sqrt(weights @ (1 / precision) + exact.covariance[0, 0]))
    theta = found.client(client_id)["posterior"]["theta"]
    assert abs(float(theta.mean()) - exact.mean[0]) < 4 * spread / np.sqrt(4000)
    assert float(theta.std()) == pytest.approx(spread, rel=4 / np.sqrt(2 * 1000))


def test_a_newcomer_is_weighed_by_its_own_data() -> None:
    """A ninth school drawn from the posterior of eight: by the weighted points."""
    model, clients = problems.schools()
    found = fit(model, clients)
    effect, error = 40.0, 8.0
    weights, sd, mean, _ = given_shared(found, effect, error)
    mu = found.state.phase.posterior.points[:, found.layout.labels.index("mu")]
    weights = weights * stats.norm(mu, sd).pdf(effect)
    weights /= weights.sum()
    theta = found.new_client({"effect": np.array([effect]), "error": np.array([error])})["posterior"]["theta"]
    drawn = 4 * float(theta.std()) / np.sqrt(1 / np.sum(weights**2))
    assert_allclose(float(theta.mean()), float(weights @ mean), atol=drawn)


def test_a_newcomer_beyond_the_points_is_drawn_from_q_and_told_so(caplog: pytest.LogCaptureFixture) -> None:
    model, clients = problems.schools()
    found = fit(model, clients)
    with caplog.at_level(logging.WARNING, logger="fedppl"):
        drawn = found.new_client({"effect": np.array(300.0), "error": np.array(1.0)})
    assert "from the Gaussian q" in caplog.text and drawn["posterior"].attrs["fedppl_from_q"] == 1
