"""Priors without moments on a client's own variables: integrals reach far enough, and say what they leave out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from scipy.special import logsumexp

import fedppl
from fedppl import FederatedModel
from fedppl.local import log_factors
from fedppl.numerics.integral import beyond
from fedppl.types import Array
from tests.support.markers import slow_but

X = np.array([-1.0, 0.0, 1.0])
POINTS = np.linspace(-6.0, 3.0, 46)
POINTS_OF_SUM = np.linspace(-2.5, 2.5, 501)
_u = np.linspace(-16.8, 16.8, 641)  # θ out to 1e7
WIDE, WIDTHS = np.sinh(_u), np.log(np.cosh(_u) * (_u[1] - _u[0]))


def level(y: Any) -> pm.Model:
    with pm.Model() as model:
        theta = pm.Cauchy("theta", pm.Normal("mu", 0, 2), 2.5)
        pm.Bernoulli("obs", logit_p=theta, observed=pm.Data("y", y))
    return model


def line(y: Any) -> pm.Model:
    with pm.Model() as model:
        y = pm.Data("y", y)
        slope, theta = pm.Cauchy("slope", 0, 2.5), pm.Cauchy("theta", pm.Normal("mu", 0, 2), 2.5)
        pm.Bernoulli("obs", logit_p=theta + slope * X, observed=y)
    return model


def of_level(mu: float) -> float:
    """log f_k of three zeros."""
    return float(logsumexp(stats.cauchy.logpdf(WIDE, mu, 2.5) - 3.0 * np.logaddexp(0.0, WIDE) + WIDTHS))


_ODDS = -sum(np.logaddexp(0.0, WIDE[:, None] + WIDE * x) for x in X) + WIDTHS[:, None] + WIDTHS


def of_line(mu: float) -> float:
    prior = stats.cauchy.logpdf(WIDE, mu, 2.5)[:, None] + stats.cauchy.logpdf(WIDE, 0, 2.5)
    return float(logsumexp(_ODDS + prior))


@pytest.mark.parametrize(("builder", "truth"), [(level, of_level), pytest.param(line, of_line, marks=pytest.mark.slow)])
def test_log_densities_under_cauchy_priors_are_those_of_quadrature(builder: Any, truth: Any) -> None:
    (client,) = FederatedModel(builder, ["mu"]).enrol({"a": {"y": np.zeros(3, dtype=int)}}).values()
    compute = log_factors.factor
    found = compute(client, POINTS[:, None], np.array([-1.5]), 0.0)
    wrong = found.values - np.array([truth(mu) for mu in POINTS])
    assert np.max(np.abs(wrong)) < 0.005
    assert np.all(np.abs(wrong) < 1e-3 + 3 * (np.abs(found.errors) + abs(found.constant.alike)))


def test_evidence_under_cauchy_priors_is_that_of_quadrature() -> None:
    """All that is left out has one sign at all clients: it adds up, in the evidence and in its error."""
    clients = {f"c{k}": {"y": np.zeros(3, dtype=int)} for k in range(6)}
    fit = fedppl.fit(FederatedModel(line, ["mu"]), clients, fedppl.Sums(), progressbar=False, random_seed=1)
    mu = np.linspace(-18, 12, 121)
    logs = 6 * np.array([of_line(one) for one in mu]) + stats.norm.logpdf(mu, 0, 2)
    truth = float(logsumexp(logs) + np.log(mu[1] - mu[0]))
    weights = np.exp(logs - logsumexp(logs))
    mean = weights @ mu
    assert fit.status is fedppl.Status.CONVERGED
    found = fit.log_evidence
    assert abs(found.value - truth) < 3 * found.error and found.error < 0.05
    posterior = fit.summary().iloc[0]
    assert_allclose(posterior["mean"], mean, atol=0.1 * np.sqrt(weights @ (mu - mean) ** 2))
    assert_allclose(posterior["sd"], np.sqrt(weights @ (mu - mean) ** 2), rtol=0.05)


@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
def test_two_nodes_tell_what_lies_beyond_where_tails_are_powers(power: float) -> None:
    steps = np.linspace(0.0, 8.0, 25)  # of u; z = sinh u has a density z^-(power + 1) far out
    terms = np.exp(-power * steps) * (steps[1] - steps[0])
    found, unknown = beyond(terms[None, -1:], terms[None, -2:-1])
    left = np.exp(-power * (steps[-1] + 0.5 * (steps[1] - steps[0]))) / power  # from halfway to the next node
    assert_allclose(found[0], left, rtol=0.05)
    assert (unknown[0] < found[0]) == (power > 0.6)  # slower ones are not told from none


def test_what_does_not_fall_is_not_known() -> None:
    share: Array = np.array([[0.01]])
    found, unknown = beyond(share, share)
    assert unknown[0] == found[0] >= share[0, 0]


@pytest.mark.parametrize("degrees", slow_but([1, 3]))
def test_a_ridge_that_data_leave_is_integrated_along_itself(degrees: int) -> None:
    """Two t's of which one row tells the sum: narrow across, and with heavy tails along neither coordinate."""

    def of_a_sum(y: Any) -> pm.Model:
        with pm.Model() as model:
            t, v = (pm.StudentT(name, nu=degrees, mu=0, sigma=1) for name in "tv")
            pm.Normal("obs", pm.Normal("mu", 0, 1) + t + v, 0.05, observed=pm.Data("y", y))
        return model

    (client,) = FederatedModel(of_a_sum, ["mu"]).enrol({"a": {"y": np.array([0.5])}}).values()
    compute = log_factors.factor
    points = np.linspace(-1.0, 2.0, 25)
    found = compute(client, points[:, None], np.array([0.0]), 0.0)
    wide = np.sinh(np.linspace(-14, 14, 20001))
    width = np.log(np.cosh(np.linspace(-14, 14, 20001)) * 0.0014)
    near = np.linspace(-0.4, 0.4, 161)  # of the row's error, eight sds
    inner = [
        logsumexp(stats.t.logpdf(wide, degrees) + stats.t.logpdf(s - wide, degrees) + width) for s in POINTS_OF_SUM
    ]
    of_sum = np.interp(0.5 - points[:, None] - near, POINTS_OF_SUM, inner)
    truth = logsumexp(of_sum + stats.norm.logpdf(near, 0, 0.05) + np.log(0.005), axis=1)
    wrong = found.values - truth
    assert np.max(np.abs(wrong)) < 0.003
    assert np.all(np.abs(wrong) < 1e-3 + 3 * (np.abs(found.errors) + abs(found.constant.alike)))
