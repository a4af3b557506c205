"""Fits that do not arrive say why, and what they say to do about it works."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pymc as pm
import pytest

import fedppl
from fedppl.contracts import Moments, Target
from fedppl.results import diagnostics
from fedppl.testing import normal_means
from fedppl.types import LocalFailure, Status
from tests.support import problems
from tests.support.markers import slow_but


def fitted(builder: Any, shared: list[str], data: dict[str, Any], **settings: Any) -> fedppl.Fit:
    clients = {client_id: {"y": y} for client_id, y in data.items()}
    return run(fedppl.FederatedModel(builder, shared), clients, **settings)


def run(model: Any, clients: Any, algorithm: Any = None, **settings: Any) -> fedppl.Fit:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedppl.ConvergenceWarning)
        return fedppl.fit(model, clients, algorithm or fedppl.EP(), progressbar=False, random_seed=1, **settings)


def outcomes(seed: int = 0, clients: int = 3, rows: int = 20, shift: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {f"client {k}": shift + rng.normal(size=rows) for k in range(clients)}


either = pytest.mark.parametrize("algorithm", [fedppl.EP, fedppl.Sums])
either_slowly = pytest.mark.parametrize("algorithm", slow_but([fedppl.EP, fedppl.Sums], fedppl.Sums))
CONSTANT = {f"client {k}": np.full(20, 3.0) for k in range(3)}


# --- a scale that goes to zero ------------------------------------------------------------------------------------


def with_noise(sigma: Any) -> Any:
    def builder(y: Any) -> pm.Model:
        with pm.Model() as model:
            y = pm.Data("y", y)
            pm.Normal("obs", pm.Normal("mu", 0, 5), sigma(), observed=y)
        return model

    return builder


def with_local_noise(sigma: Any) -> Any:
    def builder(y: Any) -> pm.Model:
        with pm.Model() as model:
            y = pm.Data("y", y)
            theta = pm.Normal("theta", pm.Normal("mu", 0, 5), pm.HalfNormal("tau", 1))
            pm.Normal("obs", theta, sigma(), observed=y)
        return model

    return builder


SIGMAS = {
    "half normal": lambda: pm.HalfNormal("sigma", 1),
    "half Cauchy": lambda: pm.HalfCauchy("sigma", 2.5),
    "log": lambda: pm.math.exp(pm.Normal("log_sigma", 0, 1)),
}


@either
@pytest.mark.parametrize("prior", SIGMAS)
def test_outcomes_without_any_spread_are_told_with_their_scale(prior: str, algorithm: Any) -> None:
    shared = ["mu", "log_sigma" if prior == "log" else "sigma"]
    fit = fitted(with_noise(SIGMAS[prior]), shared, CONSTANT, algorithm=algorithm())
    assert fit.status is Status.STALLED
    assert "sigma goes to 0" in fit.message and "constant" in fit.message and "InverseGamma" in fit.message
    assert "versions" not in fit.message and "local variables" not in fit.message


@either_slowly
def test_one_client_without_any_spread_is_named(algorithm: Any) -> None:
    shared, data = ["mu", "tau"], {**outcomes(), "client 1": CONSTANT["client 1"]}
    fit = fitted(with_local_noise(SIGMAS["half normal"]), shared, data, algorithm=algorithm())
    assert fit.status is Status.STALLED
    assert "['client 1']" in fit.message and "sigma goes to 0" in fit.message and "InverseGamma" in fit.message


@problems.of_q
@pytest.mark.parametrize("builder", [with_noise, pytest.param(with_local_noise, marks=pytest.mark.slow)])
def test_a_prior_that_keeps_the_scale_from_zero_helps(builder: Any) -> None:
    shared = ["mu", "sigma"] if builder is with_noise else ["mu", "tau"]
    fit = fitted(
        builder(lambda: pm.InverseGamma("sigma", 3, 1)), shared, {**outcomes(), **CONSTANT}, algorithm=fedppl.EP()
    )
    assert diagnostics.matched(fit.status, fit.message)


# --- symmetry -----------------------------------------------------------------------------------------------------


def squared(mean: Any) -> Any:
    def builder(y: Any) -> pm.Model:
        with pm.Model() as model:
            y = pm.Data("y", y)
            pm.Normal("obs", mean() ** 2, 1, observed=y)
        return model

    return builder


def mixture(y: Any) -> pm.Model:
    with pm.Model() as model:
        y = pm.Data("y", y)
        mu = pm.Normal("mu", 0, 5, shape=2)
        parts = [pm.Normal.dist(mu[0], 1), pm.Normal.dist(mu[1], 1)]
        pm.Mixture("obs", w=np.array([0.5, 0.5]), comp_dists=parts, observed=y)
    return model


@either
def test_a_saddle_is_told_as_one_and_a_sign_helps(algorithm: Any) -> None:
    data = outcomes(shift=4.0)
    fit = fitted(squared(lambda: pm.Normal("mu", 0, 5)), ["mu"], data, algorithm=algorithm())
    assert fit.status is Status.STALLED
    assert "mu = 0" in fit.message and "several modes" in fit.message and "HalfNormal" in fit.message
    fit = fitted(squared(lambda: pm.HalfNormal("mu", 5)), ["mu"], data, algorithm=algorithm())
    assert fit.status is Status.CONVERGED
    assert float(fit.idata["posterior"]["mu"].mean()) == pytest.approx(2.0, abs=0.1)


@pytest.mark.slow
def test_labels_that_may_be_exchanged_are_told() -> None:
    rng = np.random.default_rng(0)
    fit = fitted(mixture, ["mu"], {f"c{k}": 1 + rng.normal(size=20) + 3 * rng.choice([-1, 1], 20) for k in range(3)})
    assert fit.status is Status.STALLED
    assert "mu[0]" in fit.message and "mu[1]" in fit.message and "ordered" in fit.message


# --- factors without a peak ---------------------------------------------------------------------------------------


def precisions(prior: Any) -> Any:
    def builder(y: Any) -> pm.Model:
        with pm.Model() as model:
            y = pm.Data("y", y)
            theta = pm.Normal("theta", pm.Normal("mu", 0, 100), tau=prior("between"))
            pm.Normal("obs", theta, tau=prior("within"), observed=y)
        return model

    return builder


def own_scale(prior: Any, sd: Any = lambda scale: scale) -> Any:
    """One θ at a client, with a scale of its own."""

    def builder(y: Any) -> pm.Model:
        with pm.Model() as model:
            y = pm.Data("y", y)
            theta = pm.Normal("theta", pm.Normal("mu", 0, 5), sd(prior()))
            pm.Normal("obs", theta, 1, observed=y)
        return model

    return builder


@either_slowly
def test_a_prior_that_is_hardly_one_is_named(algorithm: Any) -> None:
    shared, data = ["mu", "between", "within"], outcomes()
    fit = fitted(precisions(lambda name: pm.Gamma(name, 0.001, 0.001)), shared, data, algorithm=algorithm())
    assert fit.status is Status.STALLED
    assert "between" in fit.message and "all but improper" in fit.message and "Gamma(2" in fit.message
    helped = fitted(precisions(lambda name: pm.Gamma(name, 2, 0.5)), shared, outcomes(), algorithm=fedppl.Sums())
    assert helped.status is Status.CONVERGED


@pytest.mark.slow
def test_a_scale_of_one_value_is_told_as_what_it_is() -> None:
    fit = fitted(own_scale(lambda: pm.HalfNormal("scale", 1)), ["mu"], outcomes())
    assert fit.status is Status.STALLED
    assert "single value" in fit.message and "InverseGamma" in fit.message and "versions" not in fit.message
    assert fitted(own_scale(lambda: pm.InverseGamma("scale", 3, 1)), ["mu"], outcomes()).status is Status.CONVERGED


@pytest.mark.slow
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_factor_that_is_hardly_one_is_no_converged_fit(shift: float) -> None:
    """What stops first depends on rounding; who is to blame is named in any case."""
    builder = own_scale(lambda: pm.Gamma("scale", 0.001, 0.001), lambda scale: 1 / pm.math.sqrt(scale))
    fit = fitted(builder, ["mu"], outcomes(shift=shift))
    assert not fit.status.ok
    assert "client 0" in fit.message


# --- what is kept for the message ---------------------------------------------------------------------------------


def test_the_reason_of_an_expansion_that_failed_after_a_step_is_kept() -> None:
    inner, asked = fedppl.local.NestedLaplace(), {"client 0": 0}

    def expand(client: Any, point: Any, share: float) -> Any:
        if client.client_id in asked and np.any(point != 0):
            raise LocalFailure("the disk is full; free some space")
        assert inner.expand is not None
        return inner.expand(client, point, share)

    model, clients = normal_means()
    fit = run(model, clients, fedppl.EP(local=inner._replace(expand=expand)))
    assert fit.status is Status.STALLED
    assert "['client 0']" in fit.message and "the disk is full; free some space" in fit.message
    assert "the disk is full" in str(fit.idata["rounds"]["reason"].values[-1, 0])


def test_warnings_that_are_errors_have_the_fit() -> None:
    model, clients = problems.noise()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(fedppl.ConvergenceWarning) as caught:
            fedppl.fit(model, clients, fedppl.EP(), rounds=2, progressbar=False, random_seed=1)
    fit = caught.value.fit
    assert fit.status is Status.MAX_ROUNDS and fit.message in str(caught.value)
    assert len(fit.records) > 2


def test_errors_are_counted_by_visits_where_few_clients_are_asked() -> None:
    """Each mean has an error of .3 sd: no average of v replies of each of 4 clients is better than .6 / √v."""
    inner = fedppl.local.NestedLaplace()

    def tilted(target: Target, rng: np.random.Generator) -> Moments:
        found = inner.tilted(target, rng)
        return found._replace(diagnostics={**found.diagnostics, "mc_error": 0.3})

    model, clients = normal_means(4)
    algorithm = fedppl.EP(local=inner._replace(tilted=tilted))
    fit = run(model, clients, algorithm, rounds=200, participation=1)
    assert fit.status is Status.CONVERGED
    visits = np.zeros(4)
    for record in fit.records:
        if not record.preliminary:
            visits[[list(clients).index(client_id) for client_id in record.infos]] += 1
    assert np.sqrt(np.sum(0.3**2 / visits)) <= 0.2
