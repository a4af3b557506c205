"""Predictions for a client that is known take what is its own as it is, whatever data the priors of that read."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytest
from numpy.testing import assert_allclose

import fedppl
from fedppl.results import idata
from fedppl.results.at_client import pymc_groups
from fedppl.results.predicting import predictions

_LEVEL, _SLOPE, _WARDS, _WEIGHTS = 7.0, 2.0, np.array([10.0, -20.0, 30.0, -40.0]), np.array([1.0, 2.0])


def _everything(z: Any, w: Any, x: Any, ward: Any, y: Any) -> pm.Model:
    """Variables of a client, of its wards and of its rows; priors that read a scalar, a matrix and rows."""
    with pm.Model() as model:
        z, w, ward = pm.Data("z", z), pm.Data("w", w), pm.Data("ward", ward)
        x, y = pm.Data("x", x), pm.Data("y", y)
        g = pm.Normal("g", 0, 1)
        level = pm.Normal("level", 100 + g * z, 1.0)
        slope = pm.Normal("slope", 100 + g * x.mean() + g * w.sum(), 1.0)
        wards = pm.Normal("wards", 500 + w @ pm.math.stack([g, g]), 1.0)
        sized = pm.Normal("sized", 900.0, 1.0, shape=w.shape[0])
        counted = pm.Normal("counted", 700.0, 1.0, shape=ward.max() + 1)
        residual = pm.Normal("residual", 0.0, 3.0, shape=x.shape[0])
        mean = level + slope * x + wards[ward] + sized[ward] + counted[ward] + residual
        pm.Normal("obs", mean, 1e-3, observed=y)
    return model


def _client(rows: int = 8) -> tuple[Any, Any, dict[str, Any]]:
    rng = np.random.default_rng(3)
    data = {
        "z": np.array(0.5),
        "w": np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [2.0, 0.0]]),
        "x": rng.normal(size=rows),
        "ward": np.arange(rows) % 4,
        "y": rng.normal(size=rows),
    }
    client = fedppl.FederatedModel(_everything, ["g"]).enrol({"a": data, "b": data})["a"]
    own = {"g": 1.0, "level": _LEVEL, "slope": _SLOPE, "wards": _WARDS, "sized": 0 * _WARDS, "counted": 0 * _WARDS}
    own["residual"] = np.full(rows, 50.0)
    draws = {name: np.tile(value, (1, 200, *(1 for _ in np.shape(value)))) for name, value in own.items()}
    return client, idata.posterior_dataset(draws, {}, {}, {}), data


@pytest.mark.parametrize("rows", [3, 4, 8])  # as many as wards, and as many as before
@pytest.mark.parametrize("beside", [(), ("z",), ("z", "w")])
def test_what_is_the_clients_stays_and_what_is_of_rows_is_drawn_anew(rows: int, beside: tuple[str, ...]) -> None:
    client, posterior, data = _client()
    x, ward = np.linspace(-1, 1, rows), np.arange(rows)[::-1] % 4
    new = {"x": x, "ward": ward, **{name: data[name] for name in beside}}
    found = predictions(client, posterior, new, 1)[0]["obs"]
    assert_allclose(found.mean(("chain", "draw")), _LEVEL + _SLOPE * x + _WARDS[ward], atol=5 * 3 / np.sqrt(200))
    assert_allclose(found.std(("chain", "draw")), 3.0, rtol=5 / np.sqrt(400))


def test_as_many_wards_as_rows_are_not_taken_for_rows() -> None:
    client, posterior, _ = _client(rows=4)
    found = predictions(client, posterior, {"x": np.zeros(2), "ward": np.array([3, 0])}, 1)[0]["obs"]
    assert_allclose(found.mean(("chain", "draw")), _LEVEL + _WARDS[[3, 0]], atol=5 * 3 / np.sqrt(200))


def test_another_predictor_of_the_client_is_another_clients_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    client, posterior, _ = _client()
    new = {"x": np.zeros(2), "ward": np.array([0, 1]), "z": np.array(3.0)}
    with caplog.at_level(logging.WARNING, "fedppl"):
        found = predictions(client, posterior, new, 1)[0]["obs"]
    assert_allclose(found.mean(("chain", "draw")), 103.0 + _WARDS[:2], atol=5 * np.sqrt(10 / 200))
    assert "['level']" in caplog.text and "['z']" in caplog.text


def test_replicates_keep_all_that_the_posterior_has() -> None:
    client, posterior, data = _client()
    found = pymc_groups(client, posterior, ("posterior_predictive",), 1)["posterior_predictive"]["obs"]
    mean = _LEVEL + _SLOPE * data["x"] + _WARDS[data["ward"]] + 50.0
    assert_allclose(found.mean(("chain", "draw")), mean, atol=1e-3)


@pytest.mark.slow
def test_groups_within_groups_of_a_client_are_predicted_at_their_own_means() -> None:
    """Beds in wards: with noise of .1 beside sds of 5 and 3 a bed's rows tell its mean, and so do new rows."""
    rng, rows = np.random.default_rng(2), []
    for site in "abc":
        for ward in range(3):
            for bed in range(2):
                level = 20 + rng.normal(0, 5) + rng.normal(0, 3)
                rows += [(site, f"w{ward}", f"b{bed}", level + rng.normal(0, 0.1)) for _ in range(4)]
    frame = pd.DataFrame(rows, columns=["site", "ward", "bed", "y"])
    model = fedppl.formula("y ~ 1 + (1 | site/ward/bed)")
    fit = fedppl.fit(model, frame, by="site", progressbar=False, random_seed=1)
    own = frame[frame["site"] == "b"]
    means = own.groupby(["ward", "bed"])["y"].mean()
    new = means.reset_index()[["ward", "bed"]].iloc[::-1]
    for found in (fit.predict("b", new, draws=100), fit.new_client(own.drop(columns="site"), predict=new, draws=100)):
        drawn = idata.as_dataset(found, "predictions")["y"]
        assert_allclose(drawn.mean(("chain", "draw")), means.to_numpy()[::-1], atol=0.15)
        assert float(drawn.std(("chain", "draw")).max()) < 0.2
