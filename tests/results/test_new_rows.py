"""Predictions at new rows: what outcomes are on average, and at clients that no row is known of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytest
from numpy.testing import assert_allclose
from scipy.special import expit

import fedppl
from fedppl import DataError, DeclarationError, FederatedModel
from fedppl.formulas.families import LEVEL, TIME
from fedppl.model.interpreted import PYTHON_MODE
from fedppl.results import idata, predicting
from fedppl.testing import normal_means
from tests.support.markers import slow_but
from tests.support.tables import FAMILIES, agreed

QUIET: Any = {"progressbar": False, "random_seed": 1}
NEW = pd.DataFrame({"age": [40.0, 60.0, 50.0], "arm": ["drug", "none", "drug"], "ward": ["v", "v", "u"], "of": 5})
PARTIAL = {"site_partial": 0.6, "site_ward_partial": 0.5}


def tiled(value: Any, count: int) -> Any:
    return np.broadcast_to(np.asarray(value, dtype=float), (1, count, *np.shape(value)))


@pytest.mark.parametrize("family", slow_but(FAMILIES, "binomial", "weibull"))
def test_means_are_what_outcomes_are_on_average_at_a_client_without_rows(family: str) -> None:
    """Both take one more client with wards of its own from the hierarchy; outcomes scatter about their means."""
    model = agreed(f"{FAMILIES[family].response} ~ age * arm + (1 | site/ward)", family)
    built, count = model.builder, 4000
    spec, width = built.spec, max(len(built.spec.levels), 1)
    levels = len(spec.scales.levels)
    values = {
        "Intercept": 0.2,
        "age": 0.004,
        "arm": [0.3],
        "age:arm": [-0.002],
        "site_sd": 0.4,
        "site_ward_sd": 0.3,
        **PARTIAL,
        **FAMILIES[family].beside,
    }
    shapes = {rv.name: rv.shape.eval(mode=PYTHON_MODE) for rv in built(**built.read_unseen("new", NEW)).free_RVs}
    first = 1 if width > 1 else None
    draws = {
        k: tiled(np.broadcast_to(np.ravel(values[k])[:first].squeeze(), tuple(shapes[k])), count) for k in built.shared
    }
    known = idata.posterior_dataset(draws, {}, {})
    fit: Any = SimpleNamespace(declaration=model, clients={})
    there = predicting.rows_at(fit, "new", NEW, None)
    at = 3.0 if spec.family.outcome is TIME else None
    whole, drawn, inputs = predicting.predicted(there, known, built.shared, 1, "response", None)
    again, expected, _ = predicting.predicted(there, known, built.shared, 1, "mean", at)
    assert whole["site_ward_z"].shape[2:] == (2, width) and set(whole.data_vars) == set(again.data_vars)
    assert "outcome" not in inputs and len(next(iter(inputs.values()))) == 3
    (name,), (of,) = expected.data_vars, drawn.data_vars
    assert str(name) == f"{of}_{'survival' if at else 'mean'}"
    outcomes = drawn[of].values[0] / (5 if family == "binomial" else 1)
    if at is not None:
        outcomes = outcomes > at
    if levels and spec.family.outcome is LEVEL:
        outcomes = outcomes[..., None] == np.arange(levels)
        assert list(expected[name][f"{of}_level"].values) == list(spec.scales.levels)
    difference = outcomes - expected[name].values[0]
    assert np.all(np.abs(difference.mean(axis=0)) < 4.5 * difference.std(axis=0) / np.sqrt(count) + 1e-12)
    assert np.all(np.std(expected[name].values, axis=1) > 0)


def test_a_new_client_scatters_by_the_sd_between_clients() -> None:
    """mu | y is N(m, v), θ of a new client N(m, v + 1/2²), and its outcome N(m, v + 1/2² + 1)."""
    fit = fedppl.fit(*normal_means(), **QUIET)
    at = {"y": np.zeros(2)}
    v = float(1 / fit.posterior.precision[0, 0])
    m = v * float(fit.posterior.linear[0])
    mean = fit.predict(None, at, kind="mean")
    for values, variance in (
        (mean["posterior"]["theta"], v + TAU**2),
        (mean["predictions"]["obs_mean"][..., 0], v + TAU**2),
        (fit.predict(None, at)["predictions"]["obs"][..., 1], v + TAU**2 + 1.0),
        (fit.new_client(None, predict=at)["predictions"]["obs"][..., 1], v + TAU**2 + 1.0),
    ):
        assert values.mean().item() == pytest.approx(m, abs=4.5 * np.sqrt(variance / 4000))
        assert values.var().item() == pytest.approx(variance, rel=4.5 * np.sqrt(2 / 4000))
    own = fit.predict("client 0", at, kind="mean", random_seed=3)
    assert_allclose(own["predictions"]["obs_mean"][..., 0], own["posterior"]["theta"])
    with pytest.raises(DeclarationError, match=r"fit\.predict\(None, new_data\)"):
        fit.predict("client 9", at)
    anywhere = fit.new_client(None)["posterior"]["theta"]
    assert anywhere.var().item() == pytest.approx(v + TAU**2, rel=4.5 * np.sqrt(2 / 4000))
    with pytest.raises(DeclarationError, match="kind='risk' must be"):
        fit.predict(None, at, kind="risk")
    with pytest.raises(DeclarationError, match="at=3"):
        fit.predict("client 0", at, kind="mean", at=3)
    with pytest.raises(DataError, match="inf at index"):
        fit.predict(None, {"y": np.array([0.0, np.inf])})


TAU = 0.5


def regression(x: Any, z: Any, y: Any) -> Any:
    """A client's mean depends on what the client is, z."""
    with pm.Model() as model:
        theta = pm.Normal("theta", pm.Normal("mu", 0, 2) + pm.Data("z", z), 0.5)
        pm.Gamma("y_", mu=pm.math.exp(0.1 * theta * pm.Data("x", x)), sigma=1.0, observed=pm.Data("y", y))
    return model


@pytest.mark.slow
def test_nothing_but_outcomes_may_be_left_out_for_a_client_without_rows() -> None:
    rng = np.random.default_rng(2)
    clients = {k: {"x": rng.normal(size=9), "z": np.float64(k), "y": rng.gamma(1.0, size=9)} for k in range(3)}
    fit = fedppl.fit(FederatedModel(regression, ["mu"]), clients, fedppl.EP(), **QUIET)
    found = fit.predict(None, {"x": [0.0, 1.0], "z": 40.0}, kind="mean")
    assert found["posterior"]["theta"].mean() > 30 and found["predictions"]["y__mean"].shape == (4, 1000, 2)
    assert_allclose(found["predictions"]["y__mean"][..., 1], np.exp(0.1 * found["posterior"]["theta"]))
    with pytest.raises(DeclarationError, match=r"\['theta'\] depend on predictors .*predict=\{"):
        fit.new_client(None)
    with pytest.raises(DeclarationError, match="kinds that are declared"):  # there kind= is that of the client
        fit.new_client(None, predict={"x": [0.0], "z": 40.0}, kind="mean")
    with pytest.raises(DataError, match=r"lack \['z'\], which the model reads"):
        fit.predict(None, {"x": [0.0, 1.0]})
    with pytest.raises(DataError, match=r"number of outcomes \['y'\] cannot be told"):
        fit.predict(None, {"x": 0.0, "z": 40.0})


def graded(y: Any) -> Any:
    with pm.Model() as model:
        eta = pm.Normal("eta", pm.Normal("mu", 0, 1), 1)
        pm.OrderedLogistic("grade", eta=eta, cutpoints=[-1.0, 1.0], observed=pm.Data("y", y))
    return model


def cut(y: Any) -> Any:
    with pm.Model() as model:
        theta = pm.Normal("theta", pm.Normal("mu", 0, 1), 1)
        pm.Censored("seen", pm.Normal.dist(theta, 1), lower=None, upper=2.0, observed=pm.Data("y", y))
    return model


@pytest.mark.slow
def test_means_of_builders_are_pymcs_or_what_they_name() -> None:
    data = {k: {"y": np.random.default_rng(k).integers(0, 3, 9)} for k in range(3)}
    levels = fedppl.fit(FederatedModel(graded, ["mu"]), data, fedppl.EP(), **QUIET)
    own = levels.predict(1, {"y": [0, 0]}, kind="mean")
    expected = np.stack([expit(-1 - own["posterior"]["eta"]), expit(own["posterior"]["eta"] - 1)], axis=-1)
    assert_allclose(own["predictions"]["grade_mean"].values[:, :, 1, [0, 2]], expected, rtol=1e-6)
    with cut(np.zeros(2)) as model:
        with pytest.raises(DeclarationError, match=r'pm\.Deterministic\("seen_mean"'):
            predicting.declare_means(model)
        pm.Deterministic("seen_mean", 2 * model["theta"])
        assert predicting.declare_means(model) == ["seen_mean"]


def test_one_patient_may_be_given_by_scalars() -> None:
    built = agreed("died ~ age + arm", "bernoulli").builder
    one, same = (built.read_unseen("new", new) for new in ({"age": 50, "arm": "drug"}, NEW.iloc[2:].drop(columns="of")))
    assert all(np.array_equal(one[name], same[name]) for name in one) and set(one) == set(same)
    many = built.read_unseen("new", {"age": [50.0, 60.0], "arm": "drug"})
    assert many["common"].shape == (2, 2)
    with pytest.raises(DataError, match="column 'arm'"):
        built.read_unseen("new", {"age": 50, "arm": "dRug"})
