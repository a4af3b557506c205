"""Simulation-based calibration of declared models: what is calibrated, what is not, and what cannot be simulated."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_array_equal

import fedppl
from fedppl import DeclarationError, FederatedModel
from fedppl.results.at_client import outcomes, truths
from fedppl.testing import normal_means
from tests.support import problems

GAUSSIAN = fedppl.EP()


def test_a_gaussian_model_is_calibrated() -> None:
    """Its posterior is exact: 20 transforms are uniform, whatever else is wrong would be in the simulation."""
    found = fedppl.calibrate(*normal_means(3), GAUSSIAN, data_sets=20, random_seed=1)
    assert set(found["status"].values) == {"converged"}
    assert float(found["p_adjusted"].min()) > 0.01
    assert found["pit"].shape == (20, 1)
    again = fedppl.calibrate(*normal_means(3), GAUSSIAN, data_sets=5, random_seed=1)
    assert_array_equal(again["pit"], found["pit"][:5])


def test_a_posterior_of_another_model_is_not() -> None:
    """Data with noise of 10 under a model that has noise of 1."""

    def noisy(shared: Any, client_id: str, data: Any, rng: np.random.Generator) -> Any:
        return {"y": shared["mu"] + rng.normal(0, 10, size=len(data["y"]))}

    model, clients = normal_means(3)
    found = fedppl.calibrate(model, clients, GAUSSIAN, data_sets=25, simulate=noisy, progressbar=False, random_seed=1)
    assert float(found["p_value"].max()) < 1e-3


@pytest.mark.slow
def test_schools_by_weighted_points(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fedppl"):
        found = fedppl.calibrate(*problems.schools(), fedppl.Sums(), data_sets=10, random_seed=2)
    assert not caplog.records  # what each fit says is in the result
    assert list(found["rows"].values) == ["mu", "tau_log__"]
    assert float(found["p_adjusted"].min()) > 0.01
    axes = pytest.importorskip("matplotlib.pyplot").subplots()[1]
    assert fedppl.plots.calibration(found, ax=axes) is axes
    assert len(axes.lines) == 2


def pulled(y: Any) -> pm.Model:
    with pm.Model() as model:
        y, mu = pm.Data("y", y), pm.Normal("mu")
        pm.Potential("pull", -(mu**2))
        pm.Normal("obs", mu, 1, observed=y)
    return model


def flat(y: Any) -> pm.Model:
    with pm.Model() as model:
        pm.Normal("obs", pm.Normal("mu", 0, 5) + pm.Flat("theta"), 1, observed=pm.Data("y", y))
    return model


def test_what_cannot_be_simulated_or_read_is_refused() -> None:
    model, clients = normal_means(2)
    with pytest.raises(DeclarationError, match="has a pm.Potential"):
        fedppl.calibrate(FederatedModel(pulled, ["mu"]), clients, GAUSSIAN, data_sets=2)
    with pytest.raises(DeclarationError, match="has no posterior of the shared variables"):
        fedppl.calibrate(model, clients, fedppl.averaging.FedAvg(learning_rate=0.1), data_sets=2)
    with pytest.raises(DeclarationError, match="rounds=None must be a whole number"):
        fedppl.calibrate(model, clients, GAUSSIAN, data_sets=2, rounds=None)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="returned None; return its data"):
        fedppl.calibrate(model, clients, GAUSSIAN, data_sets=2, simulate=lambda *given: None)
    for wrong, said in (
        (lambda *given: 1 / 0, "'client 0' in data set 1 failed with ZeroDivisionError"),
        (lambda shared, client_id, data, rng: {"y": data["y"][:2]}, r"in data set 1 returned 'y' with shape \(2,\)"),
        (lambda shared, client_id, data, rng: {"y": [[1.0], [1.0, 2.0]]}, "returned 'y' that is no array"),
        (lambda shared, client_id, data, rng: {"y": np.nan * data["y"]}, "data set 1 of 2: client 'client 0'"),
    ):
        with pytest.raises((DeclarationError, fedppl.DataError), match=said):
            fedppl.calibrate(model, clients, GAUSSIAN, data_sets=2, simulate=wrong)
    with pytest.raises(DeclarationError, match="is not what fedppl.calibrate returned"):
        fedppl.plots.calibration(3)
    with pytest.raises(DeclarationError, match="cannot be drawn from"):
        fedppl.calibrate(FederatedModel(flat, ["mu"]), clients, GAUSSIAN, data_sets=2)
    for settings in ({"data_sets": 1}, {"simulate": 3}, {"simulate": lambda data: data}, {"random_seed": -1}):
        with pytest.raises(DeclarationError):
            fedppl.calibrate(model, clients, GAUSSIAN, **{"data_sets": 2, **settings})  # type: ignore[arg-type]


def test_measurements_that_were_whole_numbers_are_drawn_as_measurements() -> None:
    model, clients = normal_means(3)
    whole = {name: {"y": np.round(data["y"]).astype(int)} for name, data in clients.items()}
    found = fedppl.calibrate(model, whole, GAUSSIAN, data_sets=5, random_seed=1)
    assert_array_equal(
        found["pit"], fedppl.calibrate(model, clients, GAUSSIAN, data_sets=5, progressbar=False, random_seed=1)["pit"]
    )


def test_outcomes_are_those_of_the_shared_variables_also_where_these_have_dims() -> None:
    """y ~ N(a + Xμ, I + ¼ XXᵀ), whose quadratic form has mean n and variance 2 n at every draw."""
    model, clients = problems.regression(1)
    (client,) = model.enrol(clients, kernel=False).values()
    rng = np.random.default_rng(3)
    drawn = truths(client, 200, rng)
    y = outcomes(client, drawn.values, rng)["y"]
    X = clients["clinic 0"]["X"]
    residual = y - drawn.values["a"][:, None] - drawn.values["mu"] @ X.T
    quadratic = np.einsum("si,ij,sj->s", residual, np.linalg.inv(np.eye(len(X)) + 0.25 * X @ X.T), residual)
    error = np.sqrt(2 * len(X) / len(y))
    assert quadratic.mean() == pytest.approx(len(X), abs=4 * error)
