"""Losses on held-out rows against closed forms and brute force, then how rows are split and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats
from scipy.special import logsumexp

import fedppl
from fedppl import DataError, DeclarationError, gaussian
from fedppl.models import hm2
from fedppl.testing import normal_means
from tests.support import problems

DRAWS = 4000
FAST = functools.partial(fedppl.averaging.FedAvg, learning_rate=0.1, steps=5)


@functools.cache
def split() -> tuple[Any, Any, Any]:
    model, clients = problems.regression()
    return model, *fedppl.search.holdout(clients, 0.3, random_seed=4)


@functools.cache
def fitted(build: Callable[[], Any] = fedppl.EP, rounds: int = 20) -> fedppl.Fit:
    return fedppl.fit(*split()[:2], build(), rounds=rounds, progressbar=False, random_seed=1)


# --- the loss ---------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_log_predictive_density_of_a_gaussian_model() -> None:
    """y_val ~ N(Zm, ZCZᵀ + I) with m, C of (μ, a, β) given all training rows; the tolerance is 4 standard errors."""
    _, training, validation = split()
    fit, posterior = fitted(), problems.regression_posterior(training)
    exact, variance, rng = 0.0, 0.0, np.random.default_rng(2)
    for client_id, data in validation.items():
        cavity = gaussian.quotient(posterior, problems.regression_site(training[client_id]))
        mean, covariance = problems.regression_joint(training[client_id], cavity)
        Z = np.column_stack([np.zeros((len(data["y"]), 2)), np.ones(len(data["y"])), data["X"]])
        predictive = stats.multivariate_normal(Z @ mean, Z @ covariance @ Z.T + np.eye(len(Z)))
        term = -predictive.logpdf(data["y"])
        w = np.exp(stats.norm.logpdf(data["y"], rng.multivariate_normal(mean, covariance, 20_000) @ Z.T).sum(axis=1))
        error = np.std(w) / np.mean(w) / np.sqrt(DRAWS)
        alone = fedppl.search.validation_loss(fit, {client_id: data}, draws=DRAWS)
        assert abs(alone.total - term) < 4 * error
        assert alone.rows == len(data["y"])
        exact, variance = exact + term, variance + error**2
    found = fedppl.search.validation_loss(fit, validation, draws=DRAWS)
    assert abs(found.total - exact) < 4 * np.sqrt(variance)
    assert found.rows == sum(len(data["y"]) for data in validation.values())
    assert found.mean == found.total / found.rows


def test_of_a_point_it_is_the_likelihood_and_not_the_prior_of_local_variables() -> None:
    """β is local with a prior of its own: Σ -log N(y; a + Xβ, 1) at the client's β."""
    fit, total = fitted(FAST, 3), 0.0
    for client_id, data in split()[2].items():
        at = fit.client(client_id, draws=1, chains=1)["posterior"]
        mean = at["a"].values.item() + data["X"] @ at["beta"].values[0, 0]
        total -= stats.norm.logpdf(data["y"], mean).sum()
    assert fedppl.search.validation_loss(fit, split()[2]).total == pytest.approx(total, rel=1e-10)


@problems.few_rounds
@pytest.mark.parametrize("name", ["noise", pytest.param("transforms", marks=pytest.mark.slow)])
def test_it_is_what_the_clients_own_draws_give(name: str) -> None:
    """Local scales, ordered and positive variables: equal to an average over the draws of `Fit.client`."""
    model, clients = problems.ALL[name]()
    training, validation = fedppl.search.holdout(clients, 0.3, random_seed=1)
    algorithm = fedppl.EP() if name == "noise" else fedppl.averaging.FedAvg(learning_rate=1e-3)
    fit = fedppl.fit(model, training, algorithm, rounds=2, progressbar=False, random_seed=1)
    total = 0.0
    for client_id, data in validation.items():
        of = {k: np.asarray(v.values)[0] for k, v in fit.client(client_id, draws=40, chains=1)["posterior"].items()}
        if name == "noise":
            mean, sd = of["theta"] @ data["X"].T, np.exp(of["log_sigma"])
        else:
            mean = (of["z"] + of["p"][:, 1:]) @ data["X"].T + of["cuts"].sum(axis=1)[:, None]
            sd = of["sigma"]
        total -= logsumexp(stats.norm.logpdf(data["y"], mean, sd[:, None]).sum(axis=1)) - np.log(40)
    assert fedppl.search.validation_loss(fit, validation, draws=40).total == pytest.approx(total, rel=1e-8)


def test_sums_over_clients_do_not_depend_on_their_order() -> None:
    fit, validation = fitted(), split()[2]
    alone = [fedppl.search.validation_loss(fit, {client_id: validation[client_id]}) for client_id in validation]
    together = fedppl.search.validation_loss(fit, validation)
    assert together.total == pytest.approx(sum(one.total for one in alone), rel=1e-14)
    assert fedppl.search.validation_loss(fit, dict(reversed(validation.items()))) == together


def test_another_loss_gets_the_clients_posterior_and_its_rows() -> None:
    def squared(posterior: Any, data: Any) -> float:
        coefficients = posterior["beta"].mean(("chain", "draw")).values
        return float(np.sum((data["y"] - posterior["a"].mean().item() - data["X"] @ coefficients) ** 2))

    fit, total = fitted(), 0.0
    for client_id, data in split()[2].items():
        total += squared(fit.client(client_id, draws=50, chains=1)["posterior"], data)
    assert fedppl.search.validation_loss(fit, split()[2], loss=squared, draws=50).total == pytest.approx(
        total, rel=1e-12
    )
    with pytest.raises(DeclarationError, match=r"shape \(2,\); return the sum"):
        fedppl.search.validation_loss(fit, split()[2], loss=lambda posterior, data: np.zeros(2))  # type: ignore[arg-type, return-value]


def test_as_many_held_out_rows_as_coefficients_are_no_trouble() -> None:
    """Three rows, three predictors: θ has as many entries as there are rows, but not one a row."""
    rng = np.random.default_rng(3)
    clients = {k: {"X": rng.normal(size=(n, 3)), "y": rng.normal(size=n)} for k, n in (("a", 15), ("b", 20))}
    training, validation = fedppl.search.holdout(clients, 0.2, random_seed=1)
    assert validation["a"]["X"].shape == (3, 3)
    model = fedppl.FederatedModel(functools.partial(hm2.hierarchical_regression, noise_sd=1.0), hm2.HIERARCHICAL_SHARED)
    fit = fedppl.fit(
        model, training, fedppl.averaging.FedAvg(learning_rate=0.05), rounds=2, progressbar=False, random_seed=1
    )
    theta = fit.client("a", draws=1, chains=1)["posterior"]["theta"].values[0, 0]
    expected = -stats.norm.logpdf(validation["a"]["y"], validation["a"]["X"] @ theta).sum()
    assert fedppl.search.validation_loss(fit, {"a": validation["a"]}).total == pytest.approx(expected, rel=1e-10)


# --- splitting --------------------------------------------------------------------------------------------------------


def test_holdout_splits_rows_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    data = {"X": rng.normal(size=(10, 2)), "y": np.arange(10), "center": np.array([1.0, 2.0]), "scale": 3.0}
    training, validation = fedppl.search.holdout({"a": data, "b": data}, 0.25, random_seed=1)
    for client_id in "ab":
        kept, held = training[client_id], validation[client_id]
        assert (len(kept["y"]), len(held["y"])) == (8, 2)
        assert_array_equal(np.sort(np.concatenate([kept["y"], held["y"]])), data["y"])
        assert np.all(np.diff(kept["y"]) > 0)
        for part in (kept, held):
            assert_array_equal(part["X"], data["X"][part["y"]])  # type: ignore[index]
            assert_array_equal(part["center"], data["center"])
            assert part["scale"] == 3.0
    assert np.any(validation["a"]["y"] != validation["b"]["y"])
    alone = fedppl.search.holdout({"b": data}, 0.25, random_seed=1)[1]
    assert_array_equal(alone["b"]["y"], validation["b"]["y"])
    three = fedppl.search.holdout({"c": {"y": np.arange(3)}, "d": {"y": np.arange(2)}}, 0.9, random_seed=1)
    assert [[len(part[k]["y"]) for k in "cd"] for part in three] == [[1, 1], [2, 1]]
    named = fedppl.search.holdout({"a": {"y": np.arange(9), "w": np.ones(4)}}, rows=["y"], random_seed=1)[1]
    assert (len(named["a"]["y"]), len(named["a"]["w"])) == (2, 4)


@pytest.mark.parametrize(
    ("clients", "settings", "message"),
    [
        ({"a": {"y": np.ones(1)}}, {}, "client 'a' has 1 row, which cannot be split"),
        ({"a": {"y": 1.0}}, {}, "client 'a': arrays of shapes .* name those in rows="),
        ({"a": {"y": np.ones(5), "w": np.ones(4)}}, {}, "client 'a': arrays of shapes"),
        ({"a": {"y": np.ones(5), "w": np.ones(4)}}, {"rows": ["y", "w"]}, "must name arrays of one length"),
        ({"a": {"y": np.ones(5)}}, {"rows": ["z"]}, "'z': 'absent'"),
        (
            {k: {"X": np.ones((n, 3)), "y": np.ones(n), "w": np.ones(3)} for k, n in (("a", 9), ("b", 3))},
            {},
            r"client 'b': \['X', 'w', 'y'\] have one length",
        ),
        ({"a": {"y": np.array([1.0, np.nan])}}, {}, "client 'a': 'y' holds nan"),
        ({}, {}, "no clients: pass a mapping"),
        ({"a": {"y": np.ones(5)}}, {"random_seed": None}, "random_seed=None would hold out other rows"),
        ({"a": {"y": np.ones(5)}}, {"random_seed": "a"}, "random_seed='a' must be"),
        ({"a": {"y": np.ones(5)}}, {"fraction": 1.0}, "fraction=1.0 must lie between 0 and 1"),
    ],
)
def test_what_cannot_be_split_is_refused(clients: Any, settings: Any, message: str) -> None:
    with pytest.raises((DataError, DeclarationError), match=message):
        fedppl.search.holdout(clients, **{"random_seed": 1, **settings})


# --- what is refused --------------------------------------------------------------------------------------------------


def test_held_out_data_that_are_not_like_the_training_data_are_refused() -> None:
    fit, validation = fitted(), split()[2]
    for data, message in (
        ({"X": np.ones((2, 2))}, r"keys \['X'\], training data \['X', 'y'\]"),
        ({"X": np.ones((2, 9)), "y": np.ones(2)}, "'clinic 0'"),
    ):
        with pytest.raises((DataError, DeclarationError), match=message):
            fedppl.search.validation_loss(fit, {**validation, "clinic 0": data})


def test_fits_without_a_loss_are_refused() -> None:
    fit, validation = fitted(), split()[2]
    for of, data, settings, message in (
        (dataclasses.replace(fit, clients={}), validation, {}, "sites of their own"),
        (None, validation, {}, "fit is NoneType"),
        (fit, validation, {"loss": len}, "loss=.* is not a function of .posterior, data"),
        (fit, {}, {}, "no validation data"),
        (fit, {"nobody": validation["clinic 0"]}, {}, "'nobody', which did not take part"),
        (fit, validation, {"draws": 0}, "draws=0"),
    ):
        with pytest.raises((DataError, DeclarationError), match=message):
            fedppl.search.validation_loss(of, data, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["counts", "schools"])
def test_an_effect_a_row_or_no_rows_at_all_need_a_loss_of_their_own(name: str) -> None:
    model, clients = problems.ALL[name]()
    fit = fedppl.fit(
        model, clients, fedppl.averaging.FedAvg(learning_rate=1e-3), rounds=1, progressbar=False, random_seed=1
    )
    first = next(iter(clients))
    data = {k: v[:2] if np.ndim(v) else v for k, v in clients[first].items()}
    with pytest.raises(DeclarationError, match=re.escape(f"client {first!r}: the density of held-out rows")):
        fedppl.search.validation_loss(fit, {first: data})
    found = fedppl.search.validation_loss(
        fit, {first: data}, loss=lambda posterior, held: float(posterior["mu"].mean())
    )
    assert_allclose(found.total, fit.estimate["mu"])


def test_the_model_of_the_documentation_is_split_by_default() -> None:
    training, validation = fedppl.search.holdout(normal_means()[1], random_seed=1)
    assert {len(data["y"]) for data in training.values()} == {16}
    assert {len(data["y"]) for data in validation.values()} == {4}
