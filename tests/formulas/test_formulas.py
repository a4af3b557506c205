"""Formulas: the same as the model written by hand, whatever levels and rows a client has, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytest
from numpy.testing import assert_allclose
from scipy.interpolate import BSpline
from scipy.special import expit

import fedppl
from fedppl import DataError, DeclarationError, FederatedModel, Prior
from fedppl.formulas import checks
from fedppl.formulas.agreement import agreed, tell
from fedppl.formulas.formula import ready
from fedppl.model.interpreted import PYTHON_MODE
from fedppl.results import diagnostics
from tests.support import problems
from tests.support.tables import FAMILIES

RNG = np.random.default_rng(7)


def trial(sites: int = 4) -> pd.DataFrame:
    """A table with unequal sites, one of which has no row of the highest dose."""
    rng = np.random.default_rng(1)
    parts = []
    for k, rows in enumerate(rng.integers(6, 30, size=sites)):
        dose = rng.choice(["high", "low", "none"] if k else ["low", "none"], size=rows)
        age = rng.normal(50 + k, 9, size=rows)
        eta = 0.3 * rng.normal() + 0.04 * (age - 50) + 0.8 * (dose == "high")
        parts.append(
            pd.DataFrame(
                {
                    "site": f"s{k}",
                    "age": age,
                    "dose": dose,
                    "grade": rng.integers(1, 4, size=rows),
                    "ward": rng.choice(["a", "b"], size=rows),
                    "hours": rng.uniform(1, 5, size=rows),
                    "y": eta + rng.normal(size=rows),
                    "died": (rng.random(rows) < expit(eta)).astype(int),
                    "cases": rng.poisson(np.exp(0.3 * eta)),
                    "of": rng.integers(1, 9, size=rows),
                    "cost": rng.gamma(2.0, np.exp(0.2 * eta)),
                    "share": expit(eta + rng.normal(size=rows)),
                    "kind": rng.choice(["death", "home", "ward"], size=rows),
                }
            )
        )
    frame = pd.concat(parts, ignore_index=True)
    frame["healed"] = np.minimum(frame["cases"], frame["of"])
    return frame


FRAME = trial()


def fit(model: FederatedModel, data: Any = FRAME, **keywords: Any) -> Any:
    keywords = {"progressbar": False, "random_seed": 1, "by": "site", **keywords}
    return fedppl.fit(model, data, **keywords)


def by_hand(age: Any, high: Any, low: Any, none: Any, died: Any) -> pm.Model:
    """What `died ~ age + dose + (1 | site)` declares, on scales that were worked out by hand."""
    shares = {level: float(np.mean(FRAME["dose"] == level)) for level in ("low", "none")}
    sd_age = float(np.std(FRAME["age"]))
    with pm.Model() as model:
        age, low, none = pm.Data("age", age), pm.Data("low", low), pm.Data("none", none)
        pm.Data("high", high)
        b_age = pm.Normal("age_", 0, 2.5 / sd_age)
        b_dose = pm.Normal("dose_", 0, SD_DOSE, shape=2)
        center = -float(FRAME["age"].mean()) * b_age - MEAN_DOSE @ b_dose
        intercept = pm.Normal("intercept", center, 2.5)
        sd = pm.HalfNormal("sd", 1.0)
        z = pm.Normal("z")
        del shares
        eta = intercept + b_age * age + b_dose[0] * low + b_dose[1] * none + sd * z
        pm.Bernoulli("died_", logit_p=eta, observed=pm.Data("died", died))
    return model


MEAN_DOSE = np.zeros(2)
SD_DOSE = np.ones(2)


@problems.of_q
def test_it_is_the_model_written_by_hand() -> None:
    global MEAN_DOSE, SD_DOSE
    # By EP: the points of sums depend on the last digits of the way to the mode.
    found = fit(fedppl.formula("died ~ age + dose + (1 | site)", family="bernoulli"), algorithm=fedppl.EP())
    design = found.declaration.builder.design
    # Shares are those of all rows up to one in the rows that stand for them.
    exact = np.array([np.mean(FRAME["dose"] == level) for level in ("low", "none")])
    assert_allclose(design.center[1:], exact, atol=1 / 256)
    assert_allclose([design.center[0], design.scale[0]], [FRAME["age"].mean(), np.std(FRAME["age"])], rtol=1e-9)
    MEAN_DOSE, SD_DOSE = design.center[1:], 2.5 / design.scale[1:]
    clients = {
        site: {
            "age": rows["age"].to_numpy(),
            **{level: (rows["dose"] == level).to_numpy(float) for level in ("high", "low", "none")},
            "died": rows["died"].to_numpy(),
        }
        for site, rows in FRAME.groupby("site")
    }
    declared = FederatedModel(by_hand, ["intercept", "age_", "dose_", "sd"])
    hand = fedppl.fit(declared, clients, fedppl.EP(), progressbar=False, random_seed=1)
    assert all(diagnostics.matched(one.status, one.message) for one in (found, hand))
    assert_allclose(found.posterior.linear, hand.posterior.linear, rtol=1e-6)
    assert_allclose(found.posterior.precision, hand.posterior.precision, rtol=1e-6, atol=1e-8)
    assert list(found.summary().index) == ["Intercept", "age", "dose[low]", "dose[none]", "site_sd"]


@pytest.mark.parametrize("family", [name for name, one in FAMILIES.items() if one.log_density])
def test_a_family_has_the_density_that_scipy_has(family: str) -> None:
    example = FAMILIES[family]
    right = "age * dose + np.log(hours) + offset(hours) + (1 + age | site) + (1 | site/ward)"
    declared = fedppl.formula(f"{example.response} ~ {right}", family=family, **example.keywords)
    model = fedppl.agree(declared, FRAME, by="site").model
    rows = FRAME[FRAME["site"] == "s2"].reset_index(drop=True)
    built = model.builder(**model.read("s2", rows))
    assert set(model.shared) < {variable.name for variable in built.free_RVs}
    rng = np.random.default_rng(3)
    point = {name: 0.2 * rng.normal(size=np.shape(value)) for name, value in built.initial_point().items()}
    named = dict(zip(built.value_vars, built.free_RVs, strict=True))
    for variable, rv in named.items():
        if rv.name in example.beside:
            transform = built.rvs_to_transforms[rv]
            value = np.asarray(example.beside[rv.name])
            point[variable.name] = (
                value if transform is None else transform.forward(value, *rv.owner.inputs).eval(mode=PYTHON_MODE)
            )
    free = {rv.name: point[variable.name] for variable, rv in named.items()}
    levels = np.stack([rows["dose"] == "low", rows["dose"] == "none"], axis=1).astype(float)
    age = rows["age"].to_numpy()
    eta = rows["hours"].to_numpy() + free["np.log(hours)"] * np.log(rows["hours"]) + free["age"] * age
    eta = eta + levels @ free["dose"] + (age[:, None] * levels) @ free["age:dose"] + free.get("Intercept", 0.0)
    effects = built.replace_rvs_by_values([built["site_effects"], built["site_ward_effects"]])
    of_point = pytensor.function(built.value_vars, effects, mode=PYTHON_MODE, on_unused_input="ignore")
    site, wards = of_point(**point)
    eta = eta + site[0] + site[1] * age + wards[np.unique(rows["ward"], return_inverse=True)[1], 0]
    name = example.response.removeprefix("prop(").partition(",")[0]
    found = built.compile_logp(vars=[built[name]], sum=False, mode=PYTHON_MODE)(point)[0]
    assert example.log_density is not None
    assert_allclose(found, example.log_density(rows, eta.to_numpy(), example.beside), rtol=1e-8, atol=1e-14)


def test_the_prior_of_an_intercept_allows_for_offsets() -> None:
    """Counts over thousands of days: the rate is far below 1, and so is the middle of its prior."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"site": np.repeat(["a", "b"], 40), "exposure": rng.normal(8.0, 0.3, 80)})
    frame["cases"] = rng.poisson(np.exp(frame["exposure"] - 7))
    declared = fedppl.formula("cases ~ offset(exposure) + (1 | site)", family="poisson")
    model = fedppl.agree(declared, frame, by="site").model
    built = model.builder(**model.read("a", frame[frame["site"] == "a"]))
    middle = np.log(frame["cases"].mean()) - frame["exposure"].mean()
    assert built["Intercept"].owner.op.dist_params(built["Intercept"].owner)[0].eval(mode=PYTHON_MODE) == pytest.approx(
        middle, abs=1e-6
    )
    assert "offsets" in str(model.describe().loc["Intercept", "prior"])


def test_the_prior_of_an_intercept_allows_for_logs_of_skewed_columns() -> None:
    """Cities of very different size: the mean of the logs is far from the log of the mean."""
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"site": np.repeat(["a", "b"], 400), "people": np.exp(rng.normal(9.0, 1.2, 800))})
    frame["cases"] = rng.poisson(frame["people"] * 1e-3)
    declared = fedppl.formula("cases ~ offset(np.log(people)) + (1 | site)", family="poisson")
    model = fedppl.agree(declared, frame, by="site").model
    built = model.builder(**model.read("a", frame[frame["site"] == "a"]))
    middle = np.log(frame["cases"].mean()) - np.log(frame["people"]).mean()
    # Known are the mean and the sd of people: what is far off is off by the spread of logs that they tell.
    assert built["Intercept"].owner.op.dist_params(built["Intercept"].owner)[0].eval(mode=PYTHON_MODE) == pytest.approx(
        middle, abs=0.3
    )


def test_effects_of_a_client_are_a_multivariate_normal() -> None:
    model = fedppl.agree(fedppl.formula("y ~ age + (1 + age | site)"), FRAME, by="site").model
    built = model.builder(**model.read("s1", FRAME[FRAME["site"] == "s1"]))
    with built:
        names = ("site_effects", "site_sd", "site_corr")
        drawn = pm.draw([built[name] for name in names], 4000, random_seed=1, mode=PYTHON_MODE)
    scaled = drawn[0] / drawn[1]
    assert_allclose(np.std(scaled, axis=0), 1.0, atol=0.06)
    assert np.corrcoef((scaled[:, 0] * scaled[:, 1]), drawn[2][:, 0])[0, 1] > 0.2
    assert built.coords["site_pair"] == ("Intercept, age",)


def test_the_readme_s_code_runs_as_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    scope: dict[str, Any] = {}
    for part in page.split("```python\n")[1:]:
        exec(part.partition("```")[0], scope)
    printed, shown = capsys.readouterr().out, page.split("```text\n")[1].partition("```")[0]
    assert shown.splitlines()[0] == "converged" == printed.splitlines()[0]
    rows = [
        line.split() for line in shown.splitlines() if line.split()[0] in ("Intercept", "age", "arm[drug]", "site_sd")
    ]
    assert len(rows) == 4
    found = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line}
    for name, mean, sd, *_ in rows:  # rounding of another machine, and nothing else
        assert np.array(found[name][:2], dtype=float) == pytest.approx([float(mean), float(sd)], abs=0.02), name


# --- what clients agree on --------------------------------------------------------------------------------------


def test_a_client_tells_counts_and_sums_alone() -> None:
    rows = {"age": np.array([1.0, 2.0, 4.0]), "dose": np.array(["a", "b", "a"], dtype=object), "id": np.arange(3)}
    told = tell(rows, ["age", "dose"], [], 1)
    numbers = {"rows": 3, "total": 7.0, "squares": 21.0, "levels": {}, "withheld": False, "text": False}
    assert told["age"]._asdict() == numbers
    assert told["dose"] == (3, 0.0, 0.0, {"a": 2, "b": 1}, False, True)
    few = tell(rows, ["dose"], [], 2)["dose"]
    assert few == (4, 0.0, 0.0, {"a": 4}, False, True)  # 2 to 6 rows have "a"; of "b" nothing is said
    assert set(told) == {"age", "dose"}


@pytest.mark.parametrize("gone", [np.nan, None, pd.NA])
def test_a_missing_text_is_no_level(gone: Any) -> None:
    rows = {"arm": np.array(["a", gone, "b"], dtype=object), "y": np.arange(3.0)}
    model = fedppl.formula("y ~ arm + (1 | site)")
    with pytest.raises(DataError, match="'arm' in 1 rows at client 'A'"):
        fedppl.agree(model, {"A": rows})
    found = fedppl.agree(model, {"A": rows, "B": {"arm": np.array(["a", "b"]), "y": np.ones(2)}}, missing="drop")
    assert found.columns.loc["arm", "levels"] == ("a", "b")
    with pytest.raises(DataError, match="'arm' has no value in row 1"):
        found.model.read("N", rows)


def test_pandas_own_missing_value_is_missing_in_tables_too() -> None:
    """It has no truth, so that comparing it with itself is an error."""
    names = np.repeat(["A", "B"], 4)
    kinds = {
        "string": pd.array(["a", pd.NA, "b", "a"] * 2, dtype="string"),
        "texts": pd.Series(["a", pd.NA, "b", "a"] * 2, dtype=object),
        "numbers": pd.Series([1.0, pd.NA, 3.5, 2.0] * 2, dtype=object),
    }
    model = fedppl.formula("y ~ x + (1 | site)")
    for column in kinds.values():
        frame = pd.DataFrame({"site": names, "y": np.arange(8.0), "x": column})
        with pytest.raises(DataError, match="'x' in 1 rows at client 'A'"):
            fedppl.agree(model, frame, by="site")
        found = fedppl.agree(model, frame, by="site", missing="drop").columns.loc["x"]
        assert found["levels"] == ("a", "b") or found["mean"] == pytest.approx(6.5 / 3)
    frame = pd.DataFrame({"site": pd.array([*names[:7], pd.NA], dtype="string"), "y": np.arange(8.0), "x": names})
    with pytest.raises(DataError, match="missing in 1 of 8 rows"):
        fedppl.agree(model, frame, by="site")


def test_a_number_is_one_level_whatever_stands_beside_it() -> None:
    clients = {k: {"dose": np.array(dose), "y": np.arange(2.0)} for k, dose in {"A": [1.0, 2.0], "B": [1, 1.5]}.items()}
    found = fedppl.agree(fedppl.formula("y ~ C(dose) + (1 | site)"), clients)
    assert found.columns.loc["dose", "levels"] == ("1", "1.5", "2")
    assert found.model.read("A", {"dose": np.array([2.0, 1.0]), "y": np.ones(2)})["common"].tolist() == [
        [0.0, 1.0],
        [0.0, 0.0],
    ]


def test_effects_of_a_factor_stand_in_one_place() -> None:
    with pytest.raises(DeclarationError, match="correlated=False"):
        fedppl.formula("y ~ x + (1 | site) + (0 + x | site)")


def test_columns_far_from_zero_are_not_collinear(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(3)
    rows = {"t": rng.normal(1.7e9, 1e4, 60), "x": rng.normal(size=60), "y": rng.normal(size=60)}
    model = fedppl.formula("y ~ t + x + (1 | site)")
    built = fedppl.agree(model, {"A": rows}).model.builder
    checks.say_what_cannot_be_told(built, [built.read("A", rows)], 1)
    assert "collinear" not in caplog.text
    checks.say_what_cannot_be_told(built, [built.read("A", {**rows, "x": 2.0 * rows["t"]})], 1)
    assert "collinear" in caplog.text


def test_one_client_and_a_name_that_is_no_column_are_told(caplog: pytest.LogCaptureFixture) -> None:
    frame = pd.DataFrame({"y": np.arange(6.0), "x": [1.0, 0, 2, 1, 0, 3], "place": list("aaabbb")})

    def said(formula: str, rows: pd.DataFrame) -> str:
        caplog.clear()
        ready(fedppl.formula(formula), rows, "place", "error")
        return caplog.text

    assert "no column 'hospital'" in said("y ~ x + (1 | hospital)", frame)
    assert "there is one client" in said("y ~ x + (1 | place)", frame[:3])
    for formula in ("y ~ x + (1 | place)", "y ~ x + (1 | site)"):
        assert not said(formula, frame)


def test_rows_of_withheld_levels_are_refused_or_others() -> None:
    model = fedppl.formula("y ~ dose + (1 | site)")
    rare = FRAME.assign(dose=np.where(np.arange(len(FRAME)) == 3, "double", FRAME["dose"]))
    with pytest.raises(DataError, match='levels of too few rows.*withheld="other"'):
        fedppl.agree(model, rare, by="site", min_count=2)
    found = fedppl.agree(model, rare, by="site", min_count=2, withheld="other")
    assert found.columns.loc["dose", "levels"] == ("high", "low", "none", "other")
    held = found.model.read("s0", rare[rare["site"] == "s0"])["common"]
    assert held[:, -1].sum() >= 1 and "double" not in str(found.columns)


def test_levels_are_in_one_order_everywhere() -> None:
    told = {
        "a": {"x": tell({"x": np.array(["10", "9"])}, ["x"], [], 1)["x"]},
        "b": {"x": tell({"x": np.array([9, 11])}, ["x"], ["x"], 1)["x"]},
    }
    assert agreed(told).columns["x"].levels == ("9", "10", "11")
    assert agreed(told, {"x": ["11", "10", "9"]}).columns["x"].levels == ("11", "10", "9")
    with pytest.raises(DataError, match="lacks"):
        agreed(told, {"x": ["11", "10"]})


def test_transformations_take_the_constants_of_all_clients() -> None:
    model = fedppl.agree(fedppl.formula("y ~ center(age) + scale(hours) + C(grade)"), FRAME, by="site").model
    rows = FRAME[FRAME["site"] == "s1"]
    found = model.read("s1", rows)["common"]
    assert_allclose(found[:, 0], rows["age"] - FRAME["age"].mean(), atol=1e-9)
    assert_allclose(found[:, 1], (rows["hours"] - FRAME["hours"].mean()) / np.std(FRAME["hours"]), atol=1e-9)
    assert_allclose(found[:, 2:], np.stack([rows["grade"] == 2, rows["grade"] == 3], axis=1))


def test_splines_have_knots_that_all_know() -> None:
    constants = {"knots": [45.0, 55.0], "low": 0.0, "high": 120.0}
    text = "y ~ bs(age, knots=knots, lower_bound=low, upper_bound=high, center=False)"
    model = fedppl.agree(fedppl.formula(text, constants=constants), FRAME, by="site").model
    found = model.read("s1", FRAME[FRAME["site"] == "s1"])["common"]
    full = np.r_[[0.0] * 4, 45.0, 55.0, [120.0] * 4]
    expected = BSpline.design_matrix(FRAME.loc[FRAME["site"] == "s1", "age"], full, 3).toarray()
    assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("right", ["{}", "1 + ({} | site)"])
@pytest.mark.parametrize("more", ["", ", center=True"])
def test_centred_splines_are_combinations_of_the_same_basis_at_all_clients(right: str, more: str) -> None:
    constants = {"knots": [45.0, 55.0]}
    declared, plain = (
        fedppl.formula(
            "y ~ " + right.format(f"bs(age, knots=knots, lower_bound=0, upper_bound=120{kind})"), constants=constants
        )
        for kind in (more, ", center=False")
    )
    declared, plain = (fedppl.agree(one, FRAME, by="site").model for one in (declared, plain))
    name = "common" if right == "{}" else "effects_0"
    ways = []
    for site in ("s1", "s2"):
        rows = FRAME[FRAME["site"] == site]
        centred, basis = (one.read(site, rows)[name] for one in (declared, plain))
        ways.append(np.linalg.lstsq(basis, centred, rcond=None)[0])
        assert_allclose(basis @ ways[0], centred, atol=1e-10)
    beyond = FRAME.assign(age=FRAME["age"] * np.where(FRAME.index == 3, 10, 1))
    with pytest.raises(DataError, match="row 3 lies outside of the bounds"):
        declared.read("s1", beyond)


def test_a_name_may_have_commas() -> None:
    found = fit(fedppl.formula("y ~ poly(age, 2, raw=True) + (1 | site)"))
    assert found.status.ok


def test_a_column_in_another_unit_is_named(caplog: pytest.LogCaptureFixture) -> None:
    grams = FRAME.assign(hours=np.where(FRAME["site"] == "s3", 1000.0, 1.0) * FRAME["hours"])
    found = fedppl.agree(fedppl.formula("y ~ hours"), grams, by="site")
    assert len(found.strange) == 1 and "'hours' at client 's3'" in found.strange[0] and "one unit" in caplog.text


# --- priors -----------------------------------------------------------------------------------------------------


def test_a_prior_of_ones_own() -> None:
    priors = {"age": Prior("Normal", mu=1.0, sigma=1e-3), "site_sd": Prior("Exponential", lam=3.0)}
    found = fit(fedppl.formula("y ~ age + (1 | site)", priors=priors)).summary()
    assert found.loc["age", "mean"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.slow
def test_a_far_origin_of_a_column_changes_nothing_but_the_intercept() -> None:
    model = fedppl.formula("died ~ age + (1 | site)", family="bernoulli")
    here, far = fit(model).summary(), fit(model, FRAME.assign(age=FRAME["age"] + 2000.0)).summary()
    for name in ("age", "site_sd"):  # each is known within 0.05 sds
        assert abs(far.loc[name, "mean"] - here.loc[name, "mean"]) < 0.07 * here.loc[name, "sd"]
        assert far.loc[name, "sd"] == pytest.approx(here.loc[name, "sd"], rel=0.07)


# --- results ----------------------------------------------------------------------------------------------------


def test_results_are_asked_with_data_frames() -> None:
    found = fit(fedppl.formula("died ~ age + dose + (1 | site)", family="bernoulli"))
    new = pd.DataFrame({"age": [40.0, 60.0], "dose": ["high", "none"]})
    assert found.predict("s1", new, draws=50)["predictions"]["died"].shape == (4, 50, 2)
    assert found.new_client(FRAME[FRAME["site"] == "s0"], draws=50)["posterior"]["site_effects"].shape == (4, 50, 1)
    with pytest.raises(DataError, match=r"levels \['triple'\]"):
        found.predict("s1", new.assign(dose="triple"))
    with pytest.raises(DataError, match=r"lacks the columns \['age'\]"):
        found.predict("s1", new[["dose"]])


@pytest.mark.parametrize(
    ("formula", "keywords", "told"),
    [
        ("y", {}, "no formula"),
        ("y ~ age +", {}, "cannot be read"),
        ("np.log(y) ~ age", {}, "column of its own"),
        ("y ~ (1 | site) + (1 | ward)", {}, "within the other"),
        ("y ~ site + (1 | site)", {}, "coefficients of their own too"),
        ("y ~ bs(age, df=4)", {}, "from the rows of each client"),
        ("y ~ poly(age, 2)", {}, "raw=True"),
        ("y ~ center(np.log(age))", {}, "compute a column"),
        ("y ~ C(grade, levels=order)", {"constants": {"order": [1, 2]}}, "C\\(column\\) alone"),
        ("y ~ age", {"family": "normal"}, "choose one of"),
        ("y ~ age", {"family": "binomial"}, "prop\\(successes, trials\\)"),
        ("prop(healed) ~ age", {"family": "binomial"}, "2 columns"),
        ("y ~ age", {"priors": {"age": 3}}, "is no prior"),
        ("y ~ age", {"priors": {"weight": Prior("Normal")}}, "shared variables are"),
        ("y ~ age", {"levels": {"weight": ["a"]}}, "formula's columns"),
    ],
)
def test_what_would_mean_another_thing_at_each_client_is_refused(formula: str, keywords: Any, told: str) -> None:
    with pytest.raises(DeclarationError, match=told):
        fedppl.formula(formula, **keywords)


@pytest.mark.parametrize(
    ("formula", "family", "changes", "told"),
    [
        ("y ~ weight", "gaussian", {}, r"lacks the columns \['weight'\]"),
        ("y ~ age", "gaussian", {"age": 3.0}, "eave it out of the formula"),
        ("y ~ dose", "gaussian", {"dose": "low"}, "eave it out of the formula"),
        ("age ~ dose", "bernoulli", {}, "are 0 or 1"),
        ("age ~ dose", "poisson", {}, "whole numbers from 0"),
        ("y ~ age", "gamma", {}, "above 0"),
        ("prop(of, cases) ~ age", "binomial", {}, "at least the successes"),
        ("y ~ age", "gaussian", {"age": [np.nan] * len(FRAME)}, "values are missing"),
        ("dose ~ age", "gaussian", {}, "has texts"),
    ],
)
def test_rows_that_do_not_fit_name_the_client(formula: str, family: str, changes: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        fit(fedppl.formula(formula, family), FRAME.assign(**changes))


def test_kinds_that_differ_between_clients_are_named() -> None:
    parts = {site: rows for site, rows in FRAME.groupby("site")}
    parts["s1"] = parts["s1"].assign(age="old")
    with pytest.raises(DataError, match=r"'age' has numbers at .* and texts at \['s1'\]"):
        fit(fedppl.formula("y ~ age"), parts, by=None)


def test_a_model_that_nobody_agreed_on_says_so() -> None:
    with pytest.raises(DeclarationError, match="have not agreed"):
        fedppl.formula("y ~ age").enrol({"a": FRAME})
