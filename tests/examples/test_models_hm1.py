"""The declarations of HM1 against densities written by hand, and under the algorithms that read them."""

from __future__ import annotations

import doctest
import functools
from typing import Any

import numpy as np
import pytest
from scipy import special, stats

import fedppl
from fedppl import gaussian
from fedppl.models import hm1

NAMES = ("level", "slope", "bend")


def client(rows: int, seed: int, *, binary: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    X = hm1.polynomial(np.arange(rows), 2, rows)
    mean = X @ np.array([1.0, 0.5, -1.5])
    return {"X": X, "y": (rng.normal(size=rows) < mean).astype(int) if binary else mean + 0.2 * rng.normal(size=rows)}


def known_noise(data: dict[str, Any], theta: np.ndarray, local: np.ndarray) -> float:
    assert local.shape == (0,)
    return float(stats.norm(data["X"] @ theta, 0.3).logpdf(data["y"]).sum())


def unknown_noise(data: dict[str, Any], theta: np.ndarray, local: np.ndarray) -> float:
    (log_sigma,) = local
    prior = stats.norm(-1.0, 0.5).logpdf(log_sigma)
    return float(prior + stats.norm(data["X"] @ theta, np.exp(log_sigma)).logpdf(data["y"]).sum())


def logistic(data: dict[str, Any], theta: np.ndarray, local: np.ndarray) -> float:
    assert local.shape == (0,)
    return float(stats.bernoulli(special.expit(data["X"] @ theta)).logpmf(data["y"]).sum())


CASES = {
    "known noise": (functools.partial(hm1.linear_regression, noise_sd=0.3), known_noise),
    "unknown noise": (
        functools.partial(hm1.linear_regression, log_sigma_mean=-1.0, log_sigma_sd=0.5, coefficients=NAMES),
        unknown_noise,
    ),
    "logistic": (functools.partial(hm1.logistic_regression, coefficients=NAMES), logistic),
}


def data_of(case: str) -> dict[str, dict[str, Any]]:
    return {name: client(rows, rows, binary=case == "logistic") for name, rows in (("small", 4), ("large", 30))}


@functools.cache
def enrolled(case: str) -> dict[str, fedppl.model.client.ClientModel]:
    return fedppl.FederatedModel(CASES[case][0], hm1.SHARED).enrol(data_of(case))


@pytest.mark.parametrize("case", CASES)
def test_log_density_is_the_one_written_by_hand_at_clients_of_every_size(case: str, rng: np.random.Generator) -> None:
    clients, by_hand = data_of(case), CASES[case][1]
    for client_id, model in enrolled(case).items():
        for _ in range(3):
            theta, local = rng.normal(size=3), 0.7 * rng.normal(size=model.local_size)
            np.testing.assert_allclose(
                model.log_site(theta, local)[0], by_hand(clients[client_id], theta, local), rtol=1e-8
            )


@pytest.mark.parametrize("case", CASES)
def test_the_declared_prior_is_standard_normal_and_labelled(case: str) -> None:
    for model in enrolled(case).values():
        assert model.layout.labels == tuple(f"theta[{i}]" for i in range(3))
        assert model.layout.prior_is_gaussian
        np.testing.assert_allclose(gaussian.mean(model.layout.prior), np.zeros(3), atol=1e-12)
        np.testing.assert_allclose(model.layout.prior.precision, np.eye(3), atol=1e-12)
        assert [variable.name for variable in model.local] == (["log_sigma"] if case == "unknown noise" else [])
        expected = ["0", "1", "2"] if case == "known noise" else list(NAMES)
        assert list(model.pymc_model().coords["coefficient"]) == expected


def test_one_client_alone_has_the_posterior_of_ridge_regression() -> None:
    """Known noise: N(θ; 0, I) N(y; Xθ, σ²) has precision XᵀX / σ² + I."""
    data = client(12, 3)
    model = fedppl.FederatedModel(CASES["known noise"][0], hm1.SHARED)
    fit = fedppl.fit(model, {"engine": data}, fedppl.EP(), progressbar=False, random_seed=1)
    precision = data["X"].T @ data["X"] / 0.09 + np.eye(3)
    np.testing.assert_allclose(fit.posterior.precision, precision, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(fit.posterior.linear, data["X"].T @ data["y"] / 0.09, rtol=1e-6)


def test_results_are_labelled_and_sigma_stays_at_the_client() -> None:
    model, clients = fedppl.FederatedModel(CASES["unknown noise"][0], hm1.SHARED), data_of("unknown noise")
    fit = fedppl.fit(model, clients, fedppl.EP(), progressbar=False, random_seed=1)
    assert list(fit.idata["posterior"].data_vars) == ["theta"]
    own = fit.client("large", draws=200, chains=1)["posterior"]
    np.testing.assert_allclose(own["sigma"].values, np.exp(own["log_sigma"].values), rtol=1e-12)
    assert list(own["theta"].coords["coefficient"].values) == list(NAMES)
    assert 0.1 < float(own["sigma"].mean()) < 0.35  # 0.2, from 30 rows


def test_hm1_gives_every_client_its_own_theta() -> None:
    model = fedppl.FederatedModel(CASES["unknown noise"][0], hm1.SHARED)
    clients = {f"engine {k}": client(20, k) for k in range(3)}
    fit = fedppl.fit(model, clients, fedppl.HM1(report=["sigma"]), progressbar=False, random_seed=1)
    assert fit.status.ok, fit.message
    found = fit.idata["fit"]
    assert found["theta"].shape == (3, 3)
    assert np.ptp(found["theta"].values, axis=0).min() > 0.0
    assert np.all(np.diag(found["correlation"].values) > 1 - 1e-9)
    sigma = fit.idata["rounds"]["sigma"].values[-1]
    assert np.all((sigma > 0.1) & (sigma < 0.35))  # 0.2, from 20 rows


def test_polynomials_are_powers_of_the_scaled_cycle() -> None:
    X = hm1.polynomial(range(1, 6), 3, 10.0)
    for j in range(4):
        np.testing.assert_allclose(X[:, j], (np.arange(1, 6) / 10) ** j, rtol=1e-14)
    assert hm1.polynomial([3.0], 0, 1.0).tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hm1.polynomial([1.0], 1.5, 1.0), "degree=1.5 must be a whole number"),
        (lambda: hm1.polynomial([1.0], -1, 1.0), "degree=-1"),
        (lambda: hm1.polynomial([1.0], 1, 0.0), "scale=0.0 must be positive"),
        (lambda: hm1.polynomial([[1.0]], 1, 1.0), "pass a vector"),
        (lambda: hm1.linear_regression(**client(4, 1), noise_sd=0.0), "noise_sd=0.0"),
        (lambda: hm1.linear_regression(**client(4, 1), log_sigma_sd=-1.0), "log_sigma_sd=-1.0"),
    ],
)
def test_wrong_options_say_what_is_possible(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(hm1).failed == 0
