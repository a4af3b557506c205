"""How short sds may be: the estimate against closed forms, and against exact posteriors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from scipy.special import expit

import fedppl
from fedppl import Status, gaussian
from fedppl.algorithms.ep._rounds import of_q_alone
from fedppl.algorithms.ep._state import Taken
from fedppl.numerics import importance as _importance
from fedppl.numerics import stein as _stein
from fedppl.results import departure
from fedppl.testing import normal_means
from tests.support import problems


def test_a_cubic_departs_by_its_coefficient() -> None:
    # ρ = t (z³ − 3z) / 6 has ∇ρ = t (z² − 1) / 2, and E[(∇ρ)²] = t² / 2
    t, key = 0.3, (1, 4096, 5)
    z = _importance.whitened_points(*key)
    rho, gradients = t * (z[:, 0] ** 3 - 3 * z[:, 0]) / 6, t * (z**2 - 1) / 2
    # (z² − 1)² and z² ρ² have sds of a few over 64 = sqrt(4096) independent points
    assert_allclose(_importance.departure(z, rho, key, np.eye(1)), t / np.sqrt(2), rtol=0.1)
    assert_allclose(_stein.departure(gradients, np.eye(1)), t / np.sqrt(2), rtol=0.1)


def test_a_quadratic_does_not_depart() -> None:
    key = (2, 64, 1)
    z = _importance.whitened_points(*key)
    assert _importance.departure(z, z[:, 0] - 0.3 * z[:, 0] * z[:, 1], key, np.eye(2)) < 1e-9


def test_one_client_has_nothing_in_common_with_others() -> None:
    assert departure.shortfall({"alone": {"departure": 3.0}}) == 0.0
    assert departure.shortfall({"a": {}, "b": {}}) == 0.0


def means(y: Any) -> Any:
    with pm.Model() as model:
        y = pm.Data("y", y)
        mu, tau = pm.Normal("mu", 0, 10), pm.HalfNormal("tau", 2)
        pm.Normal("obs", pm.Normal("theta", mu, tau), 1.0, observed=y)
    return model


@problems.of_q
@pytest.mark.parametrize("count, said", [(5, True), (12, True), (60, False)])
def test_the_mean_of_few_clients_is_told_to_be_too_sure(count: int, said: bool) -> None:
    rng = np.random.default_rng(count)
    theta = rng.normal(size=count)
    theta = (theta - theta.mean()) / theta.std(ddof=1)
    clients = {f"client {k}": {"y": theta[k] + rng.normal(size=100)} for k in range(count)}
    fit = fedppl.fit(
        fedppl.FederatedModel(means, shared=["mu", "tau"]),
        clients,
        fedppl.EP(correction=None),
        progressbar=False,
        random_seed=1,
    )
    mu, log_tau = np.meshgrid(np.linspace(-8, 8, 1201), np.linspace(-5, 3, 601), indexing="ij")
    tau = np.exp(log_tau)
    log_density = stats.norm.logpdf(mu, 0, 10) + stats.halfnorm.logpdf(tau, 0, 2) + log_tau
    for data in clients.values():
        log_density += stats.norm.logpdf(data["y"].mean(), mu, np.sqrt(tau**2 + 0.01))
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    exact = np.sqrt(np.sum(weights * mu**2) - np.sum(weights * mu) ** 2)
    short = 1 - gaussian.standard_deviations(fit.posterior)[0] / exact
    told = fit.summary().attrs["sd_shortfall"]
    assert short / 2 < told < 2 * short + 0.01
    assert ("too small" in fit.message) is said
    assert fit.status.ok is (told < 0.1)


@problems.of_q
def test_hospitals_that_do_not_differ_are_not_called_converged_without_a_correction() -> None:
    """Three of them know little of how much they differ: a first estimate says 8 %, and half of an sd is missing."""
    rng = np.random.default_rng(21)
    frame = pd.DataFrame({"site": np.repeat(list("abc"), 300), "dose": rng.normal(size=900)})
    frame["ill"] = rng.random(900) < expit(0.3 * frame["dose"])
    model = fedppl.formula("ill ~ dose + (1 | site)", family="bernoulli")
    plain, better = (
        fedppl.fit(model, frame, algorithm, by="site", progressbar=False, random_seed=1)
        for algorithm in (fedppl.EP(correction=None), fedppl.EP())
    )
    sd = np.sqrt(np.diag(better.idata["fit"]["corrected_covariance"].values))
    assert better.status.ok and np.max(sd / gaussian.standard_deviations(plain.posterior)) > 1.2
    assert plain.status is Status.STALLED and "Correction(" in plain.message


def test_a_skewness_that_several_have_is_not_called_converged() -> None:
    """One client's own is in the moments that are matched, and noise of draws is no skewness."""
    model, clients = normal_means(4)
    state = fedppl.fit(model, clients, fedppl.EP(correction=None), progressbar=False, random_seed=1).state

    def status(skewness: float, without: float, error: float = 0.0) -> Status:
        told = state._replace(
            skewness=np.array([skewness]), skewness_without=np.array([without]), errors=np.full(4, error)
        )
        return of_q_alone(Taken(told, None, Status.CONVERGED)).status  # type: ignore[arg-type]

    assert status(-0.5, -0.4) is Status.STALLED
    assert status(-0.5, -0.01) is Status.CONVERGED and status(-0.5, 0.4) is Status.CONVERGED
    assert status(0.2, 0.15) is Status.CONVERGED and status(0.5, 0.4, error=0.05) is Status.CONVERGED


def test_a_clients_word_neither_ends_a_run_nor_hides_what_others_say() -> None:
    honest = {name: {"departure": 0.3} for name in "abc"}
    alone = departure.shortfall(honest)
    for told in (-1e3, 1e200, -np.inf, np.inf, np.nan):
        assert 0.9 * alone <= departure.shortfall({**honest, "d": {"departure": told}}) <= 1.0
