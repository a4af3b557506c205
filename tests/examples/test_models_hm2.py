"""The declared models of FedLin against densities written by hand."""

from __future__ import annotations

import doctest
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytest
from scipy import integrate, special, stats

import fedppl
from fedppl.model.interpreted import PYTHON_MODE
from fedppl.models import hm2
from tests.support import problems
from tests.support.markers import slow_but

NAMES = ("age", "dose", "weight")


def gaussian_client(rows: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, 3))
    return {"X": X, "y": X @ np.array([1.0, 0.0, -0.5]) + 0.3 * rng.normal(size=rows)}


def count_client(rows: int, seed: int, largest: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"X": rng.normal(size=(rows, 3)), "y": rng.integers(0, largest + 1, size=rows)}


def hierarchical_terms(phi: np.ndarray, theta: np.ndarray) -> float:
    mu, log_tau = phi[:3], phi[3:]
    return float(stats.norm(mu, np.exp(log_tau / 2)).logpdf(theta).sum())


def regression(data: dict[str, Any], phi: np.ndarray, local: np.ndarray) -> float:
    theta, log_sigma = local[:3], local[3]
    prior = hierarchical_terms(phi, theta) + stats.norm(0, 1).logpdf(log_sigma)
    return float(prior + stats.norm(data["X"] @ theta, np.exp(log_sigma)).logpdf(data["y"]).sum())


def known_noise(data: dict[str, Any], phi: np.ndarray, theta: np.ndarray) -> float:
    return hierarchical_terms(phi, theta) + float(stats.norm(data["X"] @ theta, 0.3).logpdf(data["y"]).sum())


def logistic(data: dict[str, Any], phi: np.ndarray, theta: np.ndarray) -> float:
    chance = special.expit(data["X"] @ theta)
    return hierarchical_terms(phi, theta) + float(stats.bernoulli(chance).logpmf(data["y"]).sum())


def poisson(data: dict[str, Any], phi: np.ndarray, theta: np.ndarray) -> float:
    return hierarchical_terms(phi, theta) + float(stats.poisson(np.exp(data["X"] @ theta)).logpmf(data["y"]).sum())


def penalised(
    log_prior: Callable[[np.ndarray, float], float], data: dict[str, Any], phi: np.ndarray, theta: np.ndarray
) -> float:
    sigma = np.exp(phi[1] / 2)
    likelihood = stats.norm(data["X"] @ theta, sigma).logpdf(data["y"]).sum()
    return float(log_prior(theta, sigma / np.exp(phi[0])) + likelihood)


def lasso(theta: np.ndarray, scale: float) -> float:
    return float(stats.laplace(0, scale).logpdf(theta).sum())


def ridge(theta: np.ndarray, scale: float) -> float:
    return float(stats.norm(0, scale).logpdf(theta).sum())


def elastic_net(theta: np.ndarray, scale: float, mixing: float = 0.3) -> float:
    """Normalise by quadrature, on θ itself, so that the dependence on the scale is checked too."""

    def kernel(t: float) -> float:
        return np.exp(-mixing * abs(t / scale) - 0.5 * (1 - mixing) * (t / scale) ** 2)

    half, _ = integrate.quad(kernel, 0, 40 * scale, epsabs=0, epsrel=1e-11, limit=200)
    return float(sum(np.log(kernel(t)) for t in theta) - len(theta) * np.log(2 * half))


def elastic_net_density(t: float, scale: float, mixing: float) -> float:
    return float(np.exp(elastic_net(np.array([t]), scale, mixing)))


def horseshoe(data: dict[str, Any], phi: np.ndarray, local: np.ndarray) -> float:
    z, log_omega = local[:3], local[3:]
    omega = np.exp(log_omega)
    scale = np.exp(phi[1] / 2 - phi[0])
    theta = z * scale * np.sqrt(4 * omega**2 / (4 + scale**2 * omega**2))
    prior = stats.norm.logpdf(z).sum() + (stats.halfcauchy.logpdf(omega) + log_omega).sum()
    return float(prior + stats.norm(data["X"] @ theta, np.exp(phi[1] / 2)).logpdf(data["y"]).sum())


PENALISED = functools.partial(hm2.penalised_regression, coefficients=NAMES)
CASES = {
    "regression": (hm2.hierarchical_regression, gaussian_client, regression),
    "known noise": (functools.partial(hm2.hierarchical_regression, noise_sd=0.3), gaussian_client, known_noise),
    "logistic": (hm2.logistic_regression, functools.partial(count_client, largest=1), logistic),
    "poisson": (hm2.poisson_regression, functools.partial(count_client, largest=4), poisson),
    "lasso": (functools.partial(PENALISED, prior="lasso"), gaussian_client, functools.partial(penalised, lasso)),
    "ridge": (functools.partial(PENALISED, prior="ridge"), gaussian_client, functools.partial(penalised, ridge)),
    "elastic net": (
        functools.partial(PENALISED, prior="elastic net", mixing=0.3),
        gaussian_client,
        functools.partial(penalised, elastic_net),
    ),
    "horseshoe": (functools.partial(PENALISED, prior="horseshoe"), gaussian_client, horseshoe),
}


def enrolled(case: str) -> tuple[dict[str, Any], dict[str, fedppl.model.client.ClientModel]]:
    builder, client, _ = CASES[case]
    shared = hm2.HIERARCHICAL_SHARED if client is not gaussian_client else hm2.PENALISED_SHARED
    if case in ("regression", "known noise"):
        shared = hm2.HIERARCHICAL_SHARED
    clients = {"small": client(rows=4, seed=1), "large": client(rows=30, seed=2)}
    return clients, fedppl.FederatedModel(builder, shared).enrol(clients, kernel=False)


# The lasso has all parts of the penalised ones but their priors, the logistic one all of the others.
@pytest.mark.parametrize("case", slow_but(CASES, "lasso", "logistic", "known noise"))
def test_log_density_is_the_one_written_by_hand_at_clients_of_every_size(case: str, rng: np.random.Generator) -> None:
    clients, models = enrolled(case)
    by_hand = CASES[case][2]
    for client_id, model in models.items():
        for _ in range(3):
            phi, local = 0.7 * rng.normal(size=model.shared_size), 0.7 * rng.normal(size=model.local_size)
            expected = by_hand(clients[client_id], phi, local)
            np.testing.assert_allclose(model.log_site(phi, local)[0], expected, rtol=1e-8)


@pytest.mark.parametrize("case", CASES)
def test_shared_layout_and_labels_are_as_declared(case: str) -> None:
    _, models = enrolled(case)
    model = models["small"]
    if model.shared_size == 2:
        assert model.layout.labels == ("log_lambda", "log_sigma2")
        np.testing.assert_allclose(model.layout.prior.precision, np.eye(2), atol=1e-12)
        assert list(model.pymc_model().coords["predictor"]) == list(NAMES)
    else:
        assert model.layout.labels == (*(f"mu[{i}]" for i in range(3)), *(f"tau_log__[{i}]" for i in range(3)))
        np.testing.assert_allclose(model.layout.prior.precision, np.eye(6), atol=1e-12)
        assert list(model.pymc_model().coords["predictor"]) == ["0", "1", "2"]
    assert model.layout.prior_is_gaussian
    assert all(variable.dims in (("predictor",), None, ()) for variable in (*model.layout.variables, *model.local))


@pytest.mark.parametrize("prior", hm2.PRIORS)
def test_half_cauchy_hyper_priors_keep_the_shared_names(prior: str) -> None:
    builder = functools.partial(PENALISED, prior=prior, hyper="half-Cauchy", lambda_scale=2.0, sigma2_scale=9.0)
    model = builder(**gaussian_client(4, 1))
    free = {rv.name: rv for rv in model.free_RVs}
    assert set(hm2.PENALISED_SHARED) <= set(free)
    assert model.rvs_to_transforms[free["log_lambda"]] is None
    if prior != "lasso":
        return
    u = np.array([-3.0, 0.2, 4.0])
    # The density of log λ is that of λ times λ, and of log σ² that of σ times σ / 2.
    expected = stats.halfcauchy(0, 2).logpdf(np.exp(u)) + u
    np.testing.assert_allclose([pm.logp(free["log_lambda"], v).eval(mode=PYTHON_MODE) for v in u], expected, rtol=1e-8)
    expected = stats.halfcauchy(0, 3).logpdf(np.exp(u / 2)) + u / 2 - np.log(2)
    np.testing.assert_allclose([pm.logp(free["log_sigma2"], v).eval(mode=PYTHON_MODE) for v in u], expected, rtol=1e-8)
    (client,) = (
        fedppl.FederatedModel(builder, hm2.PENALISED_SHARED)
        .enrol({"one": gaussian_client(4, 1)}, kernel=False)
        .values()
    )
    assert not client.layout.prior_is_gaussian


def test_plain_horseshoe_is_the_limit_of_a_wide_slab(rng: np.random.Generator) -> None:
    data = gaussian_client(4, 1)
    plain = hm2.penalised_regression(**data, prior="horseshoe", slab=None)
    wide = hm2.penalised_regression(**data, prior="horseshoe", slab=1e6)
    at = {plain["z"]: rng.normal(size=3), plain["omega"]: np.array([0.1, 1.0, 9.0])}
    at |= {plain["log_lambda"]: 0.3, plain["log_sigma2"]: -0.2}
    values = plain["theta"].eval(at, mode=PYTHON_MODE)
    np.testing.assert_allclose(values, list(at.values())[0] * list(at.values())[1] * np.exp(-0.1 - 0.3))
    np.testing.assert_allclose(
        wide["theta"].eval({wide[v.name]: value for v, value in at.items()}, mode=PYTHON_MODE), values, rtol=1e-8
    )


def test_elastic_net_draws_follow_its_density() -> None:
    mixing, scale = 0.3, 0.5
    draws = hm2._elastic_net_draws(np.array(scale), mixing, np.random.default_rng(1), size=(20_000,))
    density = functools.partial(elastic_net_density, scale=scale, mixing=mixing)
    first, _ = integrate.quad(lambda t: 2 * t * density(t), 0, 20)
    second, _ = integrate.quad(lambda t: 2 * t**2 * density(t), 0, 20)
    assert np.mean(np.abs(draws)) == pytest.approx(first, rel=0.03)
    assert np.mean(draws**2) == pytest.approx(second, rel=0.03)
    assert abs(np.mean(draws > 0) - 0.5) < 0.02
    model = hm2.penalised_regression(**gaussian_client(4, 1), prior="elastic net")
    assert pm.draw(model["theta"], random_seed=1, mode=PYTHON_MODE).shape == (3,)


def test_elastic_net_ends_are_lasso_and_ridge() -> None:
    value, scale = np.array([0.4, -1.2]), 0.5
    near_lasso = hm2._elastic_net_logp(value, scale, 1 - 1e-9).eval(mode=PYTHON_MODE)
    np.testing.assert_allclose(near_lasso, stats.laplace(0, scale).logpdf(value), rtol=1e-6)
    near_ridge = hm2._elastic_net_logp(value, scale, 1e-9).eval(mode=PYTHON_MODE)
    np.testing.assert_allclose(near_ridge, stats.norm(0, scale).logpdf(value), rtol=1e-6)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"prior": "Lasso"}, "'lasso', 'ridge'"),
        ({"hyper": "cauchy"}, "'half-Cauchy'"),
        ({"mixing": 1.0}, 'prior="lasso"'),
        ({"sigma2_scale": 0.0}, "must be positive"),
        ({"slab": -1.0}, "must be positive"),
    ],
)
def test_wrong_options_say_what_is_possible(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hm2.penalised_regression(**gaussian_client(4, 1), **option)


@pytest.mark.parametrize("prior", ["lasso", "elastic net"])
def test_nested_laplace_is_refused_where_the_prior_has_a_kink(prior: str) -> None:
    model = fedppl.FederatedModel(functools.partial(PENALISED, prior=prior, mixing=0.3), hm2.PENALISED_SHARED)
    clients = {"one": gaussian_client(30, 1)}
    with pytest.raises(fedppl.DeclarationError, match="NUTS"):
        fedppl.fit(model, clients, fedppl.EP(), progressbar=False)


@problems.few_rounds
def test_lasso_fits_with_nuts_and_results_are_labelled() -> None:
    model = fedppl.FederatedModel(functools.partial(PENALISED, prior="lasso"), hm2.PENALISED_SHARED)
    clients = {"one": gaussian_client(30, 1), "two": gaussian_client(40, 2)}
    nuts = fedppl.local.NUTS(draws=150, tune=200, chains=1, rhat_limit=1.5)
    fit = fedppl.fit(model, clients, fedppl.EP(local=nuts), rounds=2, progressbar=False, random_seed=1)
    assert not fit.records[-1].failures
    result = fit.client("one", predict={"X": np.eye(3)}, draws=200, chains=1)
    assert list(result["posterior"]["theta"].coords["predictor"].values) == list(NAMES)
    means = result["posterior"]["theta"].mean(("chain", "draw")).values
    np.testing.assert_allclose(means, [1.0, 0.0, -0.5], atol=0.3)
    assert result["predictions"]["response"].sizes["row"] == 3


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(hm2).failed == 0
