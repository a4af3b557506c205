"""How short sds may be: the estimate against closed forms, and against exact posteriors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose
from scipy import stats

import fedppl
from fedppl import Status, gaussian
from fedppl.algorithms.ep._rounds import refused
from fedppl.numerics import importance as _importance
from fedppl.numerics.streams import whitened_points
from fedppl.results import diagnostics
from fedppl.testing import normal_means
from tests.support import problems


def test_a_cubic_departs_by_its_coefficient() -> None:
    # ρ = t (z³ − 3z) / 6 has ∇ρ = t (z² − 1) / 2, and E[(∇ρ)²] = t² / 2
    t, key = 0.3, (1, 4096, 5)
    z = whitened_points(*key)
    rho, gradients = t * (z[:, 0] ** 3 - 3 * z[:, 0]) / 6, t * (z**2 - 1) / 2
    # (z² − 1)² and z² ρ² have sds of a few over 64 = sqrt(4096) independent points
    assert_allclose(_importance.departure(z, rho, key, np.eye(1)), t / np.sqrt(2), rtol=0.1)
    assert_allclose(_importance.departure_by_gradients(gradients, np.eye(1)), t / np.sqrt(2), rtol=0.1)


def test_a_quadratic_does_not_depart() -> None:
    key = (2, 64, 1)
    z = whitened_points(*key)
    assert _importance.departure(z, z[:, 0] - 0.3 * z[:, 0] * z[:, 1], key, np.eye(2)) < 1e-9


def test_one_client_has_nothing_in_common_with_others() -> None:
    assert diagnostics.shortfall({"alone": {"departure": 3.0}}) == 0.0
    assert diagnostics.shortfall({"a": {}, "b": {}}) == 0.0


def means(y: Any) -> Any:
    with pm.Model() as model:
        y = pm.Data("y", y)
        mu, tau = pm.Normal("mu", 0, 10), pm.HalfNormal("tau", 2)
        pm.Normal("obs", pm.Normal("theta", mu, tau), 1.0, observed=y)
    return model


def drawn(count: int, differ: float) -> dict[str, Any]:
    """Data of clients whose means have exactly this sd."""
    rng = np.random.default_rng(count)
    theta = rng.normal(size=count)
    theta = differ * (theta - theta.mean()) / theta.std(ddof=1)
    return {f"client {k}": {"y": theta[k] + rng.normal(size=100)} for k in range(count)}


def fit_of_q(clients: dict[str, Any]) -> fedppl.Fit:
    model = fedppl.FederatedModel(means, shared=["mu", "tau"])
    return fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)


def missing(fit: fedppl.Fit, clients: dict[str, Any]) -> Any:
    """The part of the sds of mu and log tau that q lacks, by quadrature."""
    mu, log_tau = np.meshgrid(np.linspace(-8, 8, 1201), np.linspace(-12, 3, 901), indexing="ij")
    tau = np.exp(log_tau)
    log_density = stats.norm.logpdf(mu, 0, 10) + stats.halfnorm.logpdf(tau, 0, 2) + log_tau
    for data in clients.values():
        log_density += stats.norm.logpdf(data["y"].mean(), mu, np.sqrt(tau**2 + 0.01))
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    exact = [np.sqrt(np.sum(weights * x**2) - np.sum(weights * x) ** 2) for x in (mu, log_tau)]
    return 1 - gaussian.standard_deviations(fit.posterior) / exact


@problems.of_q
@pytest.mark.parametrize("count, said", [(5, True), (12, True), pytest.param(60, False, marks=pytest.mark.slow)])
def test_the_mean_of_few_clients_is_told_to_be_too_sure(count: int, said: bool) -> None:
    clients = drawn(count, 1.0)
    fit = fit_of_q(clients)
    short, told = missing(fit, clients)[0], fit.summary().attrs["sd_shortfall"]
    assert short / 2 < told < 2 * short + 0.01
    assert ("too small" in fit.message) is said
    assert fit.status.ok is (told < 0.1)


@problems.of_q
@pytest.mark.parametrize("count", [3, 6])
def test_clients_that_do_not_differ_are_not_called_converged(count: int) -> None:
    """Few of them know little of how much they differ: what is missing is more than an estimate of first order says."""
    clients = drawn(count, 0.0)
    fit = fit_of_q(clients)
    assert max(missing(fit, clients)) > 0.12
    assert fit.status is Status.STALLED and "fedppl.Sums()" in fit.message
    assert diagnostics.matched(fit.status, fit.message)


def test_a_skewness_that_several_have_is_not_called_converged() -> None:
    """One client's own is in the moments that are matched, and noise of draws is no skewness."""
    model, clients = normal_means(4)
    state = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1).state

    def is_refused(skewness: float, without: float, error: float = 0.0) -> bool:
        told = state._replace(
            skewed=state.skewed._replace(total=np.array([skewness]), without=np.array([without])),
            clients=state.clients._replace(errors=np.full(4, error)),
        )
        return bool(refused(told, None))

    assert is_refused(-0.5, -0.4)
    assert not is_refused(-0.5, -0.01) and not is_refused(-0.5, 0.4)
    assert not is_refused(0.2, 0.15) and not is_refused(0.5, 0.4, error=0.05)


def test_a_clients_word_neither_ends_a_run_nor_hides_what_others_say() -> None:
    honest = {name: {"departure": 0.3} for name in "abc"}
    alone = diagnostics.shortfall(honest)
    for told in (-1e3, 1e200, -np.inf, np.inf, np.nan):
        assert 0.9 * alone <= diagnostics.shortfall({**honest, "d": {"departure": told}}) <= 1.0
