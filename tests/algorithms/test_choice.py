"""Which algorithm a fit has that names none."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytest

import fedppl
from fedppl.run.loop import MOST_SHARED
from fedppl.testing import normal_means
from fedppl.types import DeclarationError
from tests.support import problems

OPEN = fedppl.Policy(sums="optional", rows=0, few_rows=0, parameters_per_row=math.inf, events=0, requests=math.inf)


def chosen(caplog: pytest.LogCaptureFixture, model: Any, data: Any, **keywords: Any) -> str:
    """Name of the algorithm by which the first round is, and what the log says of it, once."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "fedppl.run.loop"):
        step = next(fedppl.rounds(model, data, random_seed=1, **keywords))
    said = [record.getMessage() for record in caplog.records if record.name == "fedppl.run.loop"]
    assert len(said) == 1
    assert said[0].startswith(f"the fit is by {type(step.state).__name__.removesuffix('State')}")
    return said[0]


def coefficients(count: int) -> fedppl.FederatedModel:
    def builder(X: Any, y: Any) -> pm.Model:
        with pm.Model() as model:
            X, y, beta = pm.Data("X", X), pm.Data("y", y), pm.Normal("beta", 0, 1, shape=count)
            pm.Normal("obs", X @ beta, 1.0, observed=y)
        return model

    return fedppl.FederatedModel(builder, ["beta"])


def kinked(y: Any) -> pm.Model:
    with pm.Model() as model:
        y, mu = pm.Data("y", y), pm.Normal("mu", 0, 1)
        pm.Normal("obs", pm.Laplace("theta", mu, 1.0), 1.0, observed=y)
    return model


@problems.few_rounds
@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({}, "few coordinates"),
        ({"engine": fedppl.InProcess(workers=1)}, "few coordinates"),
        ({"engine": fedppl.InProcess(policy=OPEN)}, "policy"),
        ({"participation": 2}, "participation="),
        ({"reporting": 0.5}, "reporting="),
        ({"deadline": 60.0}, "deadline="),
    ],
)
def test_all_clients_have_to_be_asked_here(keywords: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    said = chosen(caplog, *normal_means(3), **keywords)
    assert reason in said
    assert said.startswith("the fit is by Sums" if reason == "few coordinates" else "the fit is by EP")


@problems.few_rounds
def test_few_coordinates_have_to_be_shared(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(1)
    for count in (MOST_SHARED, MOST_SHARED + 1):
        data = {k: {"X": rng.normal(size=(40, count)), "y": rng.normal(size=40)} for k in "ab"}
        said = chosen(caplog, coefficients(count), data)
        assert said.startswith("the fit is by Sums") == (count <= MOST_SHARED)
    assert f"{MOST_SHARED + 1} coordinates" in said


@problems.few_rounds
def test_densities_have_to_be_smooth(caplog: pytest.LogCaptureFixture) -> None:
    """Else it is as with EP by name, whatever that says."""
    model, data = fedppl.FederatedModel(kinked, ["mu"]), normal_means(2)[1]
    with pytest.raises(DeclarationError) as by_name:
        next(fedppl.rounds(model, data, fedppl.EP(), random_seed=1))
    with caplog.at_level(logging.INFO, "fedppl.run.loop"), pytest.raises(DeclarationError) as by_default:
        next(fedppl.rounds(model, data, random_seed=1))
    assert str(by_default.value) == str(by_name.value)
    assert "the fit is by EP, not by Sums" in caplog.text


def test_a_fit_says_by_which_it_is_and_is_read_again_as_such(tmp_path: Path) -> None:
    model, data = normal_means(3)
    keywords: dict[str, Any] = {"progressbar": False, "random_seed": 1}
    first = fedppl.fit(model, data, **keywords)
    other = fedppl.fit(model, data, fedppl.EP(), **keywords)
    for fit in (first, other):
        fit.save(tmp_path / "fit.nc")
        assert fedppl.load(tmp_path / "fit.nc", model).algorithm.name == fit.algorithm.name
        assert fedppl.fit(model, data, start=fit, **keywords).algorithm.name == fit.algorithm.name
    assert (first.algorithm.name, other.algorithm.name) == ("Sums", "EP")


def test_a_warning_points_to_the_call() -> None:
    def root(y: Any) -> pm.Model:
        with pm.Model() as model:
            mu, theta = pm.Normal("mu", 1, 1), pm.Normal("theta", 0, 1)
            pm.Normal("obs", theta + pm.math.sqrt(mu), 1, observed=pm.Data("y", y))
        return model

    clients = {name: {"y": np.random.default_rng(k).normal(1, 1, 6)} for k, name in enumerate("abc")}
    with pytest.warns(fedppl.ConvergenceWarning) as told:
        found = fedppl.fit(fedppl.FederatedModel(root, ["mu"]), clients, progressbar=False, random_seed=1)
    assert found.algorithm.name == "Sums" and not found.status.ok
    assert [warning.filename for warning in told] == [__file__]
