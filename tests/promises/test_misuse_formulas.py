"""Formulas, families, priors and rows that people write by mistake: nothing is compiled for any of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytest

import fedppl
from fedppl import DataError, Prior
from fedppl.formulas import checks
from fedppl.formulas.formula import ready
from tests.support.mistakes import Mistake, refused, row

_RNG = np.random.default_rng(0)
ROWS_OF_ALL = 24
FRAME = pd.DataFrame(
    {
        "site": np.repeat(list("abc"), 8),
        "ward": np.tile(list("uv"), 12),
        "x": _RNG.normal(size=ROWS_OF_ALL),
        "y": _RNG.normal(size=ROWS_OF_ALL),
        "arm": np.tile(["c", "c", "d"], 8),
        "dose": np.tile(["low", "mid", "high"], 8),
        "k": np.tile([0, 1, 2, 3], 6),
        "n": 5,
        "one": 1.0,
    }
)


DAYS = pd.date_range("2024-03-01", periods=ROWS_OF_ALL).strftime("%Y-%m-%d").tolist()
AGES = [str(age) for age in range(30, 53)]


def aged(*, last: str, **more: Any) -> Callable[[], Any]:
    """A column of ages that came as texts."""
    return lambda: agreed("y ~ age", data=FRAME.assign(age=[*AGES, last]), **more)


def text(formula: str, family: str = "gaussian", **more: Any) -> Callable[[], Any]:
    return lambda: fedppl.formula(formula, family, **more)


def agreed(formula: str, family: str = "gaussian", data: Any = FRAME, **more: Any) -> Any:
    by = "site" if isinstance(data, pd.DataFrame) else None
    return fedppl.agree(fedppl.formula(formula, family, **more), data, by=by)


def at_a(formula: str, family: str = "gaussian", data: pd.DataFrame = FRAME, **more: Any) -> Callable[[], Any]:
    """What the builder gets of the first client's rows."""
    return lambda: agreed(formula, family, data, **more).model.read("a", data[data["site"] == "a"])


def of(formula: str, family: str = "gaussian", **more: Any) -> Callable[[], Any]:
    return lambda: agreed(formula, family, **more)


def new_of(formula: str, data: Any, family: str = "gaussian") -> Callable[[], Any]:
    """What the builder gets of new rows of a client."""
    return lambda: agreed(formula, family).model.builder.read_new("a", data, {})


def prior(name: str, given: Any, formula: str = "y ~ x + dose") -> Callable[[], Any]:
    return lambda: agreed(formula, priors={name: given})


ROWS: dict[str, Mistake] = {
    # --- numbers that came as texts
    "ages as texts": row(aged(last="53"), "'age'", "24 levels", "to_numeric"),
    "one cell that is no number": row(aged(last="72 y"), "'72 y'", "to_numeric", "levels="),
    "dates as texts": row(
        lambda: agreed("y ~ visit", data=FRAME.assign(visit=DAYS)),
        "'visit'",
        "to_datetime",
        "C(visit)",
    ),
    "times of days as texts": row(
        lambda: agreed("y ~ visit", data=FRAME.assign(visit=[f"{day}T08:30:00Z" for day in DAYS])),
        "'visit'",
        "to_datetime",
    ),
    "dates as texts, days first": row(
        lambda: agreed("y ~ visit", data=FRAME.assign(visit=[f"{day[8:]}/{day[5:7]}/{day[:4]}" for day in DAYS])),
        "'visit'",
        "to_datetime",
    ),
    # --- syntax
    "no tilde": row(text("y = x"), "'y = x'", "y ~ age"),
    "a number": row(lambda: fedppl.formula(3), "formula=3", "y ~ age"),  # type: ignore[arg-type]
    "nothing on the right": row(text("y ~"), "'y ~'", "y ~ 1"),
    "nothing on the left": row(text("~ x"), "name of a column"),
    "an open sum": row(text("y ~ x +"), "'y ~ x +'", "write it like"),
    "an open parenthesis": row(text("y ~ (x"), "'y ~ (x'", "write it like"),
    "effects without parentheses": row(text("y ~ x | site"), "parentheses", "(1 | site)"),
    "two bars": row(text("y ~ (1 + x || site)"), "correlated=False"),
    "a power of R": row(text("y ~ x^2"), "I(x**2)"),
    "a power of a column": row(text("y ~ x ** 2"), "I(x**2)"),
    "a power within effects": row(text("y ~ (x**2 | site)"), "I(x**2)"),
    "nested by %in%": row(text("y ~ x %in% z"), "a/b"),
    "all columns": row(text("y ~ ."), "name the columns"),
    "a coding": row(text("y ~ C(arm, Treatment)"), "C(column) alone", "levels="),
    "levels in C": row(text("y ~ C(arm, levels=['d', 'c'])"), "C(column) alone", "levels="),
    "a number times a column": row(text("y ~ x + 5*z"), "number 5", "I(5*x)"),
    "a smooth of mgcv": row(text("y ~ s(x)"), "'s'", "bs(x", "constants={'s': function}"),
    "a logarithm without np": row(text("y ~ log(x)"), "'log'", "np.log(x)"),
    "a function that NumPy lacks": row(text("y ~ np.logg(x)"), "'np.logg'", "compute a column"),
    "a quoted column of patsy": row(text("y ~ Q('x')"), "'Q'", "compute a column"),
    "splines of each client": row(text("y ~ bs(x, df=4)"), "knots=", "constants="),
    "splines within a function": row(
        text("y ~ np.exp(bs(x, knots=k, lower_bound=0, upper_bound=9))"), "bs()", "term of its own"
    ),
    "polynomials of each client": row(text("y ~ poly(x, 2)"), "raw=True"),
    "a response computed": row(text("np.log(y) ~ x"), "column of its own"),
    "two responses": row(text("y + x ~ z"), "the response 'y + x'", "column"),
    "cbind": row(text("cbind(k, n) ~ x"), "'cbind(k, n)'", "prop("),
    "the response on both sides": row(text("y ~ x + y"), "['y']", "both sides", "leave them out"),
    "two factors beside each other": row(text("y ~ (1 | site) + (1 | ward)"), "(1 | site/ward)"),
    "a factor twice": row(text("y ~ site + (1 | site)"), "['site']", "leave one out"),
    # --- families
    "an alias": row(text("y ~ x", "normal"), "'normal'", "mean 'gaussian'"),
    "logistic": row(text("y ~ x", "logistic"), "mean 'bernoulli'"),
    "a misspelt family": row(text("y ~ x", "poison"), "mean 'poisson'"),
    "a distribution for a family": row(lambda: fedppl.formula("y ~ x", pm.Normal), "Normal", "'gaussian'"),  # type: ignore[arg-type]
    "a list for a family": row(lambda: fedppl.formula("y ~ x", ["gaussian"]), "['gaussian']", "choose"),  # type: ignore[arg-type]
    "arguments in another order": row(text("gaussian", "y ~ x"), "family='y ~ x'", "choose"),
    "successes without trials": row(text("k ~ x", "binomial"), "prop(successes, trials)"),
    "trials for another family": row(text("prop(k, n) ~ x"), "a column", "binomial"),
    # --- names of columns
    "called like the intercept": row(text("y ~ Intercept"), "['Intercept']", "rename"),
    "called like a parameter": row(text("y ~ sigma"), "['sigma']", "rename these"),
    "called like a spread": row(text("y ~ site_sd + (1 | site)"), "['site_sd']", "rename"),
    # --- settings
    "priors in a list": row(text("y ~ x", priors=[Prior("Normal")]), "priors=", "mapping"),
    "levels in a list": row(text("y ~ arm", levels=["c", "d"]), "levels=['c', 'd']", "mapping"),
    "constants in a list": row(text("y ~ x", constants=[1]), "constants=[1]", "mapping"),
    "a level for levels": row(text("y ~ arm", levels={"arm": "c"}), "'c'", "list of levels"),
    "a level twice": row(text("y ~ arm", levels={"arm": ["c", "d", "d"]}), "twice", "once"),
    "levels of another column": row(text("y ~ arm", levels={"dose": ["low"]}), "['dose']", "name some"),
    "levels of numbers": row(of("y ~ x", levels={"x": [0, 1]}), "levels={'x'", "numbers with fractions"),
    "a level left out": row(of("y ~ arm", levels={"arm": ["c", "e"]}), "['d']", "name them too"),
    "correlated by a text": row(text("y ~ x", correlated="no"), "correlated='no'", "True or False"),
    "a constant that nobody gave": row(
        of("y ~ bs(x, knots=knots, lower_bound=-9, upper_bound=9)"), "['knots']", "constants={'knots': ...}"
    ),
    # --- priors
    "numbers for a prior": row(prior("x", (0, 1)), "priors['x']=(0, 1)", "fedppl.Prior("),
    "PyMC's own": row(prior("x", pm.Normal), "priors['x']", "fedppl.Prior("),
    "a prior of nothing": row(prior("b_x", Prior("Normal")), "['b_x']", "'x'"),
    "a distribution of another name": row(lambda: Prior("Gaussian", mu=0), "'Gaussian'", "'Normal'"),
    "by position": row(lambda: Prior("Normal", 0, 1), "[0, 1]", "mu=0, sigma=1"),
    "sd for sigma": row(lambda: Prior("Normal", mu=0, sd=1), "'sd'", "pm.Normal"),
    "a mixture of nothing": row(lambda: Prior("Mixture", w=[0.5, 0.5], comp_dists=[]), "comp_dists", "pm.Mixture"),
    "a scale below zero": row(lambda: Prior("Normal", mu=0, sigma=-1), "sigma=-1", "positive"),
    "a scale of NaN": row(lambda: Prior("Normal", sigma=np.nan), "sigma=nan", "give one"),
    "a text for a mean": row(lambda: Prior("Normal", mu="0"), "mu='0'", "numbers"),
    "LKJ": row(lambda: Prior("LKJCholeskyCov", eta=2), "LKJCholeskyCov", "site_sd", "site_partial"),
    "bounds the wrong way round": row(lambda: Prior("Uniform", lower=1, upper=0), "lower=1, upper=0", "below"),
    "a discrete prior": row(prior("x", Prior("Poisson", mu=1)), "priors['x']", "continuous"),
    "a normal sd": row(prior("sigma", Prior("Normal", sigma=1)), "priors['sigma']", "HalfNormal"),
    "a uniform sd below zero": row(
        prior("site_sd", Prior("Uniform", lower=-1, upper=1), "y ~ (1 | site)"), "priors['site_sd']", "HalfNormal"
    ),
    "an observed prior": row(prior("x", Prior("Normal", observed=3)), "['observed']", "leave them out"),
    "as many means as levels": row(prior("dose", Prior("Normal", mu=[0, 0, 0])), "3 values of 'mu'", "2 entries"),
    # --- columns of the data
    "a column of another case": row(of("y ~ X"), "['X']", "'X' may be 'x'", "Rename"),
    "a response that is not there": row(of("yy ~ x"), "['yy']", "Rename"),
    "a group that is not there": row(of("y ~ (1 | site/warrd)"), "'warrd' may be 'ward'"),
    "a factor that is no column": row(
        lambda: fedppl.agree(fedppl.formula("y ~ (1 | hospital)"), FRAME), "by=['hospital']", "name one of them"
    ),
    "effects by a group within clients": row(of("y ~ (1 | ward)"), "'ward'", "by='site'", "(1 | site)"),
    "a name of two words": row(text("y ~ a b"), "'y ~ a b'", "operator", "backquotes"),
    "no operator": row(text("y ~ x (1 | site)"), "operator between"),
    "a comma": row(text("y ~ x, arm"), "'y ~ x, arm'", "signs"),
    "a parenthesis too many": row(text("y ~ x) + arm"), "parentheses do not match"),
    "a constant": row(of("y ~ one"), "'one' is 1", "leave it out"),
    "effects of a constant": row(of("y ~ (one | site)"), "'one' is 1", "leave it out"),
    "a response of no size": row(of("y ~ x", data=FRAME.assign(y=FRAME["y"] * 1e-200)), "'y'", "another unit"),
    "a constant response": row(of("one ~ x"), "'one' is 1", "response"),
    "one level": row(of("y ~ arm", data=FRAME.assign(arm="c")), "only the levels ['c']", "leave it out"),
    "infinity": row(of("y ~ x", data=FRAME.assign(x=[np.inf, *FRAME["x"][1:]])), "client 'a'", "'x' is inf", "drop"),
    "complex numbers": row(of("y ~ x", data=FRAME.assign(x=FRAME["x"] + 1j)), "'x' is complex", "real"),
    "numbers here, texts there": row(
        of("y ~ x", data={"a": FRAME[:8], "b": FRAME[8:].assign(x="u")}), "'x'", "['b']", "one kind"
    ),
    "a gap": row(of("y ~ arm", data=FRAME.assign(arm=[None, *FRAME["arm"][1:]])), "'arm' in 1 rows", 'missing="drop"'),
    "a logarithm below zero": row(at_a("y ~ np.log(x)"), "'np.log(x)' is nan in row", "where x is -", "correct"),
    "beyond the bounds": row(
        at_a("y ~ bs(x, knots=k, lower_bound=0, upper_bound=9)", data=FRAME.drop(columns="k"), constants={"k": [0.5]}),
        "'a'", "outside", "lower_bound",
    ),
    "an offset of texts": row(of("y ~ offset(arm)"), "offset(arm)", "columns of numbers"),
    "the mean of texts": row(of("y ~ center(arm)"), "center(arm)", "columns of numbers"),
    # --- outcomes
    "counts as yes and no": row(at_a("k ~ x", "bernoulli"), "'k' is 2", "0 or 1", "another family"),
    "three levels as yes and no": row(of("dose ~ x", "bernoulli"), "'dose'", "two", "'ordinal'"),
    "texts as numbers": row(at_a("arm ~ x"), "'arm' has texts", "'bernoulli'"),
    "reals as counts": row(at_a("y ~ x", "poisson"), "'y' is", "whole numbers", "another family"),
    "zero of a gamma": row(at_a("k ~ x", "gamma"), "'k' is 0", "above 0", "another family"),
    "more successes than trials": row(
        at_a("prop(n, k) ~ x", "binomial", FRAME.assign(n=FRAME["k"] * 2)), "'k' is 0 in row 0", "trials are"
    ),
    "trials as texts": row(at_a("prop(k, arm) ~ x", "binomial"), "'arm' has texts", "whole numbers"),
    "levels without an order": row(of("dose ~ x", "ordinal"), "'dose'", "order is not known", "levels={'dose'"),
    "reals as levels": row(of("y ~ x", "ordinal"), "'y' is", "cut it into levels"),
    # --- agree
    "no grouping column": row(lambda: fedppl.agree(fedppl.formula("y ~ x"), FRAME), "by="),
    "columns for clients": row(of("y ~ x", data={"x": [1.0, 2.0], "y": [1.0, 2.0]}), "['x', 'y']", "by="),
    "no clients": row(of("y ~ x", data={}), "an empty dict", "id"),
    "a list of frames": row(of("y ~ x", data=[FRAME]), "list", "by="),
    "a number and its text": row(of("y ~ x", data={1: FRAME[:8], "1": FRAME[8:]}), "1 and '1'", "rename"),
    "columns of two lengths": row(
        of("y ~ x", data={"a": {"x": [1.0, 2.0, 3.0], "y": [1.0, 2.0]}}), "'x': 3, 'y': 2", "each a row"
    ),
    "a matrix for a column": row(of("y ~ x", data={"a": {"x": np.ones((2, 2)), "y": [1.0, 2.0]}}), "(2, 2)", "a row"),
    "no rows": row(of("y ~ x", data={"a": FRAME[:0], "b": FRAME}), "'a'", "no rows", "leave the client out"),
    "no new rows": row(new_of("y ~ x", {"x": []}), "'a'", "no rows", "one row or more"),
    "no new rows of a formula without columns": row(new_of("y ~ 1", FRAME[:0][["arm"]]), "no rows", "one row or more"),
    "new rows beyond all bounds": row(new_of("y ~ x", {"x": [np.inf], "y": [0.0]}), "'x'", "finite"),
    "new trials beyond all bounds": row(new_of("prop(k, n) ~ x", {"x": [1.0], "n": [np.inf]}, "binomial"), "'n'"),
    "new rows of two lengths": row(new_of("y ~ x", {"y": [1.0, 2.0], "x": [1.0]}), "'y': 2", "each a row"),
    "a declaration in PyMC": row(
        lambda: fedppl.agree(fedppl.FederatedModel(lambda y: None, ["mu"]), FRAME, by="site"), "fedppl.formula"
    ),
    # --- fit
    "a formula's text": row(lambda: fedppl.rounds("y ~ x", FRAME, by="site"), "fedppl.formula('y ~ x')"),  # type: ignore[arg-type]
    "what was agreed on": row(lambda: fedppl.rounds(agreed("y ~ x"), FRAME, by="site"), "pass its .model"),
    "clients that have not agreed": row(lambda: fedppl.formula("y ~ x").enrol({"a": FRAME}), "fedppl.agree"),
    "another column than the formula's": row(
        lambda: fedppl.rounds(fedppl.formula("y ~ x + (1 | site)"), FRAME, by="ward"), "by='ward'", "by='site'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_formulas_that_cannot_be_meant_are_refused_in_words(name: str) -> None:
    refused(ROWS[name])


def test_powers_of_sums_and_computations_are_left_alone() -> None:
    for formula in ("y ~ (x + arm)**2", "y ~ I(x**2)", "y ~ {x**2}", "y ~ np.exp(x) + (1 + x | site)", "y ~ x - 1"):
        fedppl.formula(formula)
    assert fedppl.formula("y ~ f(x)", constants={"f": np.exp}).shared == ("Intercept", "f(x)", "sigma")


def test_trials_and_offsets_may_be_the_same_in_all_rows() -> None:
    for formula, family in (("prop(k, n) ~ x", "binomial"), ("k ~ x + offset(np.log(n))", "poisson")):
        found = at_a(formula, family)()
        assert set(found) >= {"outcome"} and len(found["outcome"]) == 8


def test_times_may_be_beyond_all_bounds_and_columns_called_like_arrays(caplog: pytest.LogCaptureFixture) -> None:
    frame = FRAME.assign(low=1.0 + FRAME["k"], high=np.where(FRAME["k"] > 1, np.inf, 3.0), common=FRAME["x"])
    fedppl.agree(fedppl.formula('Surv(low, high, "interval") ~ x', family="weibull"), frame, by="site")
    assert said("y ~ common + (1 + common | site)", frame, caplog) == []


def test_outcomes_of_new_rows_are_not_read() -> None:
    """Whatever they are."""
    for outcome in (np.inf, 1j, "unknown"):
        assert set(new_of("y ~ x", {"x": [1.0], "y": [outcome]})()) >= {"common"}
    assert new_of("prop(k, n) ~ x", {"x": [1.0], "n": [4.0], "k": [np.inf]}, "binomial")()["trials"] == [4]


def test_integers_are_levels_of_an_ordinal_outcome_in_their_order() -> None:
    assert agreed("k ~ x", "ordinal").columns.loc["k", "levels"] == ("0", "1", "2", "3")


def test_ordered_categories_say_the_order_of_an_ordinal_outcome() -> None:
    order = ["low", "some", "high"]
    column = pd.Categorical(np.array(order)[FRAME["k"] % 3], order, ordered=True)
    model, frame = fedppl.formula("pain ~ x", "ordinal"), FRAME.assign(pain=column)
    by_site = dict(tuple(frame.groupby("site")))
    for data, by in ((frame, "site"), (by_site, None)):
        assert fedppl.agree(model, data, by=by).columns.loc["pain", "levels"] == tuple(order)
    turned = by_site["b"].assign(pain=by_site["b"]["pain"].cat.reorder_categories(order[::-1], ordered=True))
    with pytest.raises(fedppl.DataError, match="different orders"):
        fedppl.agree(model, {**by_site, "b": turned})
    with pytest.raises(fedppl.DeclarationError, match="order is not known"):
        fedppl.agree(model, frame.assign(pain=column.as_unordered()), by="site")


def said(formula: str, frame: pd.DataFrame, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="fedppl"):
        ready(fedppl.formula(formula), frame, "site", "error")
    return [record.getMessage() for record in caplog.records]


def test_columns_that_rows_do_not_tell_apart_are_said(caplog: pytest.LogCaptureFixture) -> None:
    frame = FRAME.assign(twice=2 * FRAME["x"] + 1, of_site=FRAME["site"].map({"a": 1.0, "b": 2.0, "c": 4.0}))
    assert said("y ~ x + arm + (1 + x | site)", frame, caplog) == []
    (one,) = said("y ~ x + arm + twice", frame, caplog)
    assert "['x', 'twice']" in one and "leave one out" in one
    assert said("y ~ 0 + x + twice", frame, caplog) == []  # without an intercept they differ
    (one,) = said("y ~ x + (of_site | site)", frame, caplog)
    assert "['of_site']" in one and "leave them out" in one


def test_a_dependence_that_some_clients_have_is_none_of_all() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=20)
    same, other = np.column_stack([x, x]), rng.normal(size=(20, 2))
    assert checks.collinear([same, same], ["u", "v"], True) == ["u", "v"]
    assert checks.collinear([same, other], ["u", "v"], True) == []
    assert checks.collinear([other[:2]], ["u", "v"], True) == []  # too few rows to say


def test_levels_that_look_like_a_mistake_are_said(caplog: pytest.LogCaptureFixture) -> None:
    wrong = {
        "blanks": (FRAME.assign(arm=["c ", *FRAME["arm"][1:]]), "recode"),
        "capitals": (FRAME.assign(arm=["C", *FRAME["arm"][1:]]), "recode"),
        "numbers": (FRAME.assign(arm=FRAME["x"].round().astype(str)), "make numbers of it"),
        "identifiers": (FRAME.assign(arm=[f"id {i}" for i in range(ROWS_OF_ALL)]), "identifier"),
    }
    for frame, words in wrong.values():
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="fedppl"):
            found = agreed("y ~ arm", data=frame)
        assert words in "".join(found.strange) and "'arm'" in caplog.text
    assert agreed("y ~ arm + dose").strange == ()


@pytest.mark.parametrize("missing", ["error", "drop"])
@pytest.mark.parametrize("kind", ["a frame", "frames", "arrays"])
def test_an_interval_without_an_upper_limit_has_none_yet(missing: str, kind: str) -> None:
    """Left out, those who had no event yet would make survival shorter."""
    frame = pd.DataFrame({"site": list("aabb"), "low": [1.0, 2.0, 3.0, 4.0], "high": [2.0, np.nan, np.nan, 6.0]})
    model = fedppl.formula('Surv(low, high, "interval") ~ 1', family="weibull")
    frames = {name: one.drop(columns="site") for name, one in frame.groupby("site")}
    arrays = {name: {column: one[column].to_numpy() for column in one} for name, one in frames.items()}
    data: Any = {"a frame": frame, "frames": frames, "arrays": arrays}[kind]
    by, whose = ("site", "the table") if kind == "a frame" else (None, "client 'a'")
    with pytest.raises(fedppl.DataError, match=rf"^{whose}: 'high' is missing in [12] rows.*inf"):
        fedppl.fit(model, data, by=by, missing=missing, progressbar=False)
    with pytest.raises(fedppl.DataError, match=r"'high' is missing in [12] rows.*inf"):
        fedppl.agree(model, data, by=by, missing=missing)


def test_levels_of_a_column_of_numbers_are_refused_without_its_rows() -> None:
    frame = pd.DataFrame({"site": list("aabb"), "x": [0.25, -1.5, 2.75, 1e-7], "y": [1.0, 2.0, 0.5, 0.7]})
    with pytest.raises(DataError, match="numbers with fractions") as error:
        fedppl.agree(fedppl.formula("y ~ x", levels={"x": [1, 2]}), frame, by="site")
    assert "2.75" not in str(error.value)


def test_numbers_that_are_meant_as_levels_are_taken() -> None:
    assert aged(last="53", levels={"age": [*AGES, "53"]})().model is not None
