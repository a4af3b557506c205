"""log f_k from draws of NUTS: closed forms, quadrature, what the errors say, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.polynomial.hermite_e import hermegauss
from scipy import stats
from scipy.special import expit, logsumexp

import fedppl
from fedppl import FederatedModel, gaussian
from fedppl.contracts import Factor
from fedppl.local import nuts
from fedppl.testing import normal_means
from fedppl.types import LocalFailure, Status

NUTS = fedppl.local.NUTS(draws=400, tune=400)
RNG = np.random.default_rng(0)


def log_factor(client: Any, points: Any, center: Any, local: Any = NUTS) -> Factor:
    found: Factor = local.factor(client, points, center, 0.0)
    return found


def varying(values: Any) -> Any:
    return values - np.median(values)


def test_log_densities_of_a_gaussian_model_are_those_in_closed_form() -> None:
    model, clients = normal_means(4)
    client = model.enrol(clients)["client 1"]
    y = clients["client 1"]["y"]
    center = np.array([y.mean()])
    points = center + 0.6 * RNG.standard_t(5, size=(256, 1))
    found = log_factor(client, points, center)
    covariance = np.eye(len(y)) + 0.25
    exact = stats.multivariate_normal(np.zeros(len(y)), covariance).logpdf(y - points)
    assert np.max(np.abs(found.values - exact)) < 0.02
    assert np.std(varying(found.values - exact)) < 0.003
    assert np.max(np.abs(found.errors)) < 0.05


def test_without_local_variables_they_are_the_models_own() -> None:
    def plain(y: Any) -> pm.Model:
        with pm.Model() as model:
            pm.Normal("obs", pm.Normal("mu", 0, 2), 1, observed=pm.Data("y", y))
        return model

    y = np.array([0.5, 1.5])
    client = FederatedModel(plain, ["mu"]).enrol({"a": {"y": y}, "b": {"y": y}})["a"]
    points = np.linspace(-2, 3, 11)[:, None]
    found = log_factor(client, points, np.zeros(1))
    np.testing.assert_allclose(found.values, stats.norm.logpdf(y - points).sum(axis=1))
    assert not np.any(found.errors)
    assert NUTS.draw_given is not None
    assert NUTS.draw_given(client, points, np.zeros(1), RNG).shape == (11, 0)


def wards(y: Any) -> pm.Model:
    """Random intercepts of three wards, four patients each; their mean and the log of their sd are shared."""
    with pm.Model() as model:
        mu, tau = pm.Normal("mu", 0, 1.5), pm.LogNormal("tau", -0.3, 0.5)
        theta = pm.Normal("theta", mu, tau, shape=3)
        pm.Bernoulli("obs", logit_p=theta[:, None], observed=pm.Data("y", y))
    return model


OUTCOMES = np.array([[0, 1, 1, 1], [0, 0, 1, 0], [1, 1, 1, 1]])


def by_quadrature(points: Any, y: Any) -> Any:
    """log f at (mu, log tau)."""
    z, weights = hermegauss(60)
    theta = points[:, :1] + np.exp(points[:, 1:]) * z  # (S, 60)
    ones, zeros = y.sum(axis=1), (1 - y).sum(axis=1)
    with np.errstate(divide="ignore"):
        logs = ones[:, None, None] * np.log(expit(theta)) + zeros[:, None, None] * np.log(expit(-theta))
    return logsumexp(logs + np.log(weights / weights.sum()), axis=2).sum(axis=0)


def test_log_densities_of_random_intercepts_are_those_of_quadrature() -> None:
    client = FederatedModel(wards, ["mu", "tau"]).enrol({"a": {"y": OUTCOMES}, "b": {"y": OUTCOMES}})["a"]
    center = np.array([0.6, -0.3])
    points = center + RNG.standard_t(5, size=(256, 2)) * np.array([0.6, 0.4])
    found, exact = log_factor(client, points, center), by_quadrature(points, OUTCOMES)
    weights = np.exp(-0.5 * np.sum(((points - center) / [0.6, 0.4]) ** 2, axis=1))
    misses = found.values - exact - np.average(found.values - exact, weights=weights)
    assert np.sqrt(np.average(misses**2, weights=weights)) < 0.03
    assert abs(np.average(found.values - exact, weights=weights)) < 0.05  # its constant is right too
    told = found.errors - np.average(found.errors, weights=weights)
    assert 0.2 < np.sqrt(np.average(told**2, weights=weights) / np.average(misses**2, weights=weights)) < 5


def test_draws_of_local_variables_given_the_shared_ones_are_theirs() -> None:
    model, clients = normal_means(4)
    client = model.enrol(clients)["client 1"]
    y = clients["client 1"]["y"]
    phi = np.repeat([[y.mean() - 0.5], [y.mean() + 0.5]], 400, axis=0)
    assert NUTS.draw_given is not None
    theta = NUTS.draw_given(client, phi, phi[0], RNG)[:, 0].reshape(2, 400)
    precision = 4.0 + len(y)
    for row, mu in zip(theta, (y.mean() - 0.5, y.mean() + 0.5), strict=True):
        mean = (4.0 * mu + y.sum()) / precision
        assert abs(row.mean() - mean) < 4 / np.sqrt(400 * precision)
        assert row.std() * np.sqrt(precision) == pytest.approx(1, abs=4 / np.sqrt(800))


@pytest.mark.slow
def test_a_correction_with_nuts_is_exact_up_to_what_it_says() -> None:
    """Means of a Gaussian model, whose posterior and evidence are known; only where it is asked for."""
    model, clients = normal_means(4)
    asked = fedppl.EP(local=NUTS, correction=fedppl.Correction(points=512), tolerance=0.05)
    found = fedppl.fit(model, clients, asked, progressbar=False, random_seed=1)
    assert found.status is Status.CONVERGED
    exact = fedppl.fit(model, clients, fedppl.EP(correction=None), progressbar=False, random_seed=1).posterior
    mean, sd = gaussian.mean(exact)[0], gaussian.standard_deviations(exact)[0]
    told = found.idata["fit"]
    assert abs(float(told["corrected_mean"][0]) - mean) < 0.02 * sd
    assert float(told["corrected_covariance"][0, 0]) ** 0.5 == pytest.approx(sd, rel=0.02)
    y = np.concatenate([data["y"] for data in clients.values()])
    same = np.concatenate([np.full(len(data["y"]), k) for k, data in enumerate(clients.values())])
    covariance = np.eye(len(y)) + 0.25 * (same[:, None] == same) + 100.0
    evidence = stats.multivariate_normal(np.zeros(len(y)), covariance).logpdf(y)
    assert abs(found.log_evidence.value - evidence) < max(4 * found.log_evidence.error, 0.02) < 0.2
    state = fedppl.EP(local=NUTS).init(found.layout, ("a", "b"), np.random.default_rng(0))
    assert not state.plan.corrects


def test_draws_that_do_not_mix_are_refused_with_the_remedy() -> None:
    def two(y: Any) -> pm.Model:
        with pm.Model() as model:
            mu = pm.Normal("mu", 0, 1)
            theta = pm.Normal("theta", 0, 30)
            pm.Normal("obs", mu + pm.math.abs(theta), 0.05, observed=pm.Data("y", y))
        return model

    client = FederatedModel(two, ["mu"]).enrol({"a": {"y": np.full(9, 20.0)}, "b": {"y": np.full(9, 20.0)}})["a"]
    with pytest.raises(LocalFailure, match=r"draws=.*NUTS.*standardised"):
        log_factor(client, RNG.normal(size=(64, 1)), np.zeros(1), fedppl.local.NUTS(draws=20, tune=20))


def test_the_two_sides_of_a_bridge_agree_on_a_known_constant() -> None:
    """A normal whose integral is e³, by nodes of a t that is too wide and draws that know no constant."""
    nodes, draws = 3.0 * RNG.standard_t(5, size=512), RNG.normal(size=512)
    joined = np.concatenate([nodes, draws])
    log_t, marginal = stats.t(5, scale=3.0).logpdf(joined), stats.norm.logpdf(joined) + 3.0
    weights = nuts._log_weights(log_t, marginal, 512, 300.0, np.ones(1024, dtype=bool))
    assert logsumexp(weights + marginal) == pytest.approx(3.0, abs=0.2)
    by_mean = np.exp(logsumexp(weights + marginal, b=joined**2) - logsumexp(weights + marginal))
    assert by_mean == pytest.approx(1.0, abs=0.2)
