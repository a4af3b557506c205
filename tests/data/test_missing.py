"""Outcomes that are missing: rows without one are left out where that is exact, and refused where it is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import fedppl
from fedppl import DataError, DeclarationError, FederatedModel

RNG = np.random.default_rng(3)


def line(x: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y", y)
        pm.Normal("obs", x * pm.Normal("slope", 0, 3), 1, observed=y)
    return model


def centred(x: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y", y)
        pm.Normal("obs", (x - x.mean()) * pm.Normal("slope", 0, 3), 1, observed=y)
    return model


def by_row(x: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y", y)
        z = pm.Normal("z", 0, 1, shape=x.shape[0])
        pm.Normal("obs", x * pm.Normal("slope", 0, 3) + z.cumsum(), 1, observed=y)
    return model


def weighted(x: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y", y)
        slope = pm.Normal("slope", 0, 3)
        pm.Normal("obs", x * slope, 1, observed=y)
        pm.Potential("also", -(slope**2) * pm.math.sum(x**2))
    return model


def joint(x: Any, y: Any) -> pm.Model:
    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y", y)
        pm.MvNormal("obs", x * pm.Normal("slope", 0, 3), pt.eye(x.shape[0]), observed=y)
    return model


X = RNG.normal(size=12)
Y = 2 * X + RNG.normal(size=12)
GAPS = np.where(np.arange(12) % 5 == 1, np.nan, Y)  # three of them


def given(builder: Any, data: Any, missing: str = "drop_outcomes") -> dict[str, Any]:
    """What clients take part with. Nothing is compiled."""
    found: dict[str, Any] = fedppl.given.clients(FederatedModel(builder, ["slope"]), data, None, missing)[1]
    return found


def test_rows_without_an_outcome_are_left_out_and_predicted_afterwards() -> None:
    model, kept = FederatedModel(line, ["slope"]), ~np.isnan(GAPS)
    data = {"a": {"x": X, "y": GAPS}, "b": {"x": X, "y": Y}}
    found = fedppl.fit(model, data, missing="drop_outcomes", progressbar=False, random_seed=1)
    # A normal likelihood of known variance: precision and mean in closed form, over the rows that have an outcome.
    precision = 1 / 9 + np.sum(X[kept] ** 2) + np.sum(X**2)
    assert_allclose(found.posterior.precision, [[precision]], rtol=1e-6)
    assert_allclose(found.posterior.linear, [np.sum((X * Y)[kept]) + np.sum(X * Y)], rtol=1e-6)
    assert found.predict("a", {"x": X[~kept]}, draws=20)["predictions"]["obs"].shape == (4, 20, 3)


def test_what_is_left_out_is_the_rows_alone() -> None:
    found = given(line, {"a": {"x": np.where(np.isnan(GAPS), np.nan, X), "y": GAPS}, "b": {"x": X, "y": Y}})
    assert_array_equal(found["a"]["x"], X[~np.isnan(GAPS)])  # what else such a row lacks says nothing either
    assert_array_equal(found["b"]["y"], Y)
    masked = given(line, {"a": {"x": X, "y": np.ma.array(Y, mask=np.isnan(GAPS))}})
    assert_array_equal(masked["a"]["y"], Y[~np.isnan(GAPS)])


@pytest.mark.parametrize("builder", [centred, by_row, weighted, joint])
def test_rows_that_depend_on_each_other_are_refused(builder: Any) -> None:
    with pytest.raises(DataError, match='rows that are independent.*missing="drop"'):
        given(builder, {"a": {"x": X, "y": GAPS}})


def test_predictors_that_are_missing_are_counted_and_refused() -> None:
    with pytest.raises(
        DataError, match=r"'x' in 4 rows at client 'a', 'x' in 1 rows at client 'b'.*\['y'\].*impute predictors"
    ):
        lacking = {k: {"x": np.where(np.arange(12) < n, np.nan, X), "y": Y} for k, n in {"a": 4, "b": 1}.items()}
        given(line, lacking)
    with pytest.raises(DataError, match="all its outcomes.*leave the client out"):
        given(line, {"a": {"x": X, "y": np.full(12, np.nan)}, "b": {"x": X, "y": Y}})


FRAME = pd.DataFrame(
    {
        "site": np.repeat(["a", "b"], 20),
        "age": RNG.normal(60, 9, 40),
        "pain": RNG.choice(["little", "some", "much"], 40),
        "cases": RNG.poisson(3.0, 40).astype(float),
        "healed": RNG.integers(0, 5, 40).astype(float),
        "of": np.full(40, 5.0),
    }
)


@pytest.mark.parametrize(("formula", "family"), [("pain ~ age", "ordinal"), ("prop(healed, of) ~ age", "binomial")])
def test_a_formula_leaves_out_rows_without_its_response(formula: str, family: str) -> None:
    order = {"levels": {"pain": ["little", "some", "much"]}} if family == "ordinal" else {}
    model = fedppl.formula(formula, family, **order)
    column = "pain" if family == "ordinal" else "healed"
    gaps = FRAME.copy()
    gaps.loc[[1, 4, 30], column] = None
    agreed, clients = fedppl.given.clients(model, gaps, "site", "drop_outcomes")
    other, expected = fedppl.given.clients(model, FRAME.drop(index=[1, 4, 30]), "site", "error")
    assert agreed.builder.design.agreement == other.builder.design.agreement
    for name in ("a", "b"):
        read, wanted = agreed.read(name, clients[name]), other.read(name, expected[name])
        assert read.keys() == wanted.keys()
        for key in read:
            assert_allclose(read[key], wanted[key])
    gaps.loc[[7, 8], "age"] = np.nan
    with pytest.raises(DataError, match="'age' in 2 rows at client 'a'.*impute predictors before"):
        fedppl.given.clients(model, gaps, "site", "drop_outcomes")


def test_nothing_is_imputed_and_the_old_word_says_so() -> None:
    with pytest.raises(DeclarationError, match="nothing is imputed.*drop_outcomes"):
        fedppl.given.clients(None, {}, None, "impute")
