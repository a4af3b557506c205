"""What may be written in a formula, what it means, and that a formula's text runs nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

import fedppl
from fedppl import DataError, DeclarationError
from fedppl.formulas.expressions import FUNCTIONS
from fedppl.formulas.terms import parse

RNG = np.random.default_rng(5)
ROWS = 96
FRAME = pd.DataFrame(
    {
        "site": np.repeat(list("abcd"), ROWS // 4),
        "x": RNG.normal(3.0, 1.0, ROWS),
        "z": RNG.normal(size=ROWS),
        "w": RNG.uniform(1.0, 5.0, ROWS),
        "arm": np.tile(["old", "new"], ROWS // 2),
        "ward": np.tile(list("uuvv"), ROWS // 4),
        "k": np.tile([1, 2, 3], ROWS // 3),
        "flag": np.tile([True, False, False], ROWS // 3),
        "time to event": RNG.uniform(1.0, 9.0, ROWS),
        "kg/m2": RNG.normal(25.0, 3.0, ROWS),
        "% fat": RNG.normal(20.0, 3.0, ROWS),
        "class": RNG.normal(size=ROWS),
        "µg": RNG.normal(size=ROWS),
        "sepal.length": RNG.normal(size=ROWS),
        "y": RNG.normal(size=ROWS),
    }
)


def agreed(formula: str, frame: pd.DataFrame = FRAME, by: str = "site", **more: Any) -> Any:
    return fedppl.agree(fedppl.formula(formula, **more), frame, by=by).model.builder


def columns(formula: str, frame: pd.DataFrame = FRAME, **more: Any) -> Any:
    """Common columns of all rows, each client's read by itself."""
    built = agreed(formula, frame, **more)
    return np.concatenate([built.read(str(site), rows)["common"] for site, rows in frame.groupby("site")])


# --- a formula is data ------------------------------------------------------------------------------------------------

CODE = (
    "np.log(np.lib._npyio_impl.os.system('echo > {path}') + x)",
    "np.f2py.os.system('echo > {path}')",
    "np.savetxt('{path}', x)",
    "np.save('{path}', x)",
    "I(np.savetxt('{path}', x))",
    "I(open('{path}', 'w').write('x') + x)",
    "I(__import__('os').system('echo > {path}') * x)",
    "np.log([open('{path}', 'w') for _ in x])",
    "I((lambda: open('{path}', 'w'))())",
    "f(open('{path}', 'w'))",
    "f(x, key=open('{path}', 'w'))",
    "f.__globals__(x)",
    "f.__call__.__globals__['open']('{path}', 'w')",
    "offset(open('{path}', 'w'))",
    "{{open('{path}', 'w')}}",
    "bs(x, knots=open('{path}', 'w'), lower_bound=0, upper_bound=9)",
    "bs(x, knots=[open('{path}', 'w')], lower_bound=0, upper_bound=9)",
    "poly(x, open('{path}', 'w'), raw=True)",
    "center(open('{path}', 'w'))",
    "x:np.save('{path}', x)",
    "(np.save('{path}', x) | site)",
    "np.where(x > 0, x, np.save('{path}', x))",
    "I(f'{{open(chr(102))}}')",
    "I(x if x else open('{path}', 'w'))",
    "I(x := 3)",
    "I(x.__class__.__mro__)",
    "I(x[0])",
    "np.log(x, out=z)",
    "np.log(x, z)",
    "np.add(x, z, w)",
    "np.add.at(x, 0, 1)",
    "np.frompyfunc(f, 1, 1)(x)",
    "f(*x)",
    "f(**x)",
)


@pytest.mark.parametrize("text", CODE)
def test_the_text_of_a_formula_runs_nothing(text: str, tmp_path: Path) -> None:
    path = tmp_path / "written"
    more = {"constants": {"f": np.exp}} if "f(" in text or "f." in text else {}
    before = FRAME.copy()
    with pytest.raises(DeclarationError):
        agreed("y ~ " + text.format(path=path), **more)
    assert not path.exists()
    pd.testing.assert_frame_equal(FRAME, before)


@given(st.text("xz `'\"()[]{}|~+-*/:%^.,019abnp_=<>&\\\n;@#$!?é", max_size=30))
@settings(max_examples=300, deadline=None)
def test_a_text_is_a_formula_or_refused(text: str) -> None:
    try:
        parse("y ~ " + text)
    except DeclarationError as error:
        assert str(error)


@pytest.mark.parametrize(
    "text",
    [
        "(a + b)**99",
        "I(" * 300 + "x" + ")" * 300,
        "I(" + "-" * 400 + "x)",
        "I(x" + "+x" * 5000 + ")",
        "*".join("abcdefghijklmnopqrstuvw"),
    ],
)
def test_a_text_does_not_keep_a_site_busy(text: str) -> None:
    with pytest.raises(DeclarationError):
        parse("y ~ " + text)


def test_huge_powers_are_no_numbers_and_not_computed_as_whole_ones() -> None:
    built = agreed("y ~ I(9**9**9**9 * x)")
    with pytest.raises(DataError, match="is inf in row 0"):
        built.read("a", FRAME[:3])


# --- functions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("np.sin(2 * np.pi * k / 12)", np.sin(2 * np.pi * FRAME["k"] / 12)),
        ("I((x > 3) & (z < 0))", (FRAME["x"] > 3) & (FRAME["z"] < 0)),
        ("I((x > 3) + (z < 0))", (FRAME["x"] > 3) * 1.0 + (FRAME["z"] < 0)),
        ("np.where(x > 3, x - 3, 0)", np.maximum(FRAME["x"] - 3, 0)),
        ("np.clip(z, -1, 1)", FRAME["z"].clip(-1, 1)),
        ("I(-w ** 2 // 3 % 2)", -(FRAME["w"] ** 2) // 3 % 2),
        ("I(center(x)**2)", (FRAME["x"] - FRAME["x"].mean()) ** 2),
        ("np.exp(scale(x) / 2)", np.exp((FRAME["x"] - FRAME["x"].mean()) / FRAME["x"].std(ddof=0) / 2)),
        ("standardize(x)", (FRAME["x"] - FRAME["x"].mean()) / FRAME["x"].std(ddof=0)),
        ("center(`time to event`)", FRAME["time to event"] - FRAME["time to event"].mean()),
        ("{x ** 2}", FRAME["x"] ** 2),
        ("f(x, times=half)", FRAME["x"] * 0.5),
        ("f(arm)", FRAME["arm"] == "old"),
        ("np.log(`class`**2) ", np.log(FRAME["class"] ** 2)),
        ("np.exp(µg)", np.exp(FRAME["µg"])),
        ("I(`sepal.length` / `kg/m2`)", FRAME["sepal.length"] / FRAME["kg/m2"]),
    ],
)
def test_functions_are_computed_row_by_row_with_what_all_know(text: str, right: Any) -> None:
    def f(column: Any, times: float = 1.0) -> Any:
        return column == "old" if str(column.dtype) == "category" else column * times

    constants = {name: one for name, one in {"f": f, "half": 0.5}.items() if f"{name}(" in text or name in text}
    constants = constants if text.startswith("f(") else {}
    constants.pop("half", None) if "half" not in text else None
    found = columns("y ~ " + text, constants=constants)
    assert_allclose(found[:, 0], np.asarray(right, dtype=float), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("text", ["I(k & 2)", "I((flag & x) > 1)", "I(z | (x > 1))", "y + I(flag & k)"])
def test_signs_of_truths_refuse_numbers(text: str) -> None:
    """To Python they are bits there, to R truths; and & binds more tightly than a comparison."""
    assert columns("y ~ I(flag & (x > 3))").sum() == (FRAME["flag"] & (FRAME["x"] > 3)).sum()
    with pytest.raises(DataError, match="truths"):
        columns("w ~ " + text)


def test_an_order_of_levels_is_no_set_and_a_function_has_a_column() -> None:
    with pytest.raises(DeclarationError, match="order"):
        fedppl.formula("k ~ x", "ordinal", levels={"k": {1, 2, 3}})
    with pytest.raises(DeclarationError, match="shape"):
        agreed("y ~ f(x)", constants={"f": lambda x: np.zeros((len(x), 0))})


def test_every_function_on_the_list_has_one_value_a_row_and_looks_at_no_other() -> None:
    for name, one in FUNCTIONS.items():
        assert isinstance(one, np.ufunc) and one.nout == 1, name
        assert one.signature is None, name  # else it sums over rows


@pytest.mark.parametrize(
    "text",
    [
        "np.mean(x)",
        "I(x - np.mean(x))",
        "I(x / np.max(x))",
        "np.cumsum(x)",
        "np.sort(x)",
        "np.log(np.sum(x))",
        "np.exp(I(x - np.median(x)))",
        "x:np.argsort(z)",
        "I(np.exp(x) / np.linalg.norm(x))",
        "offset(np.mean(x))",
        "center(np.log(x))",
        "np.log(center(x + z))",
        "scale(I(x))",
    ],
)
@pytest.mark.parametrize("where", ["{}", "z + ({} | site)"])
def test_what_looks_at_all_rows_is_refused_at_every_depth(text: str, where: str) -> None:
    if "offset" in text and "|" in where:
        return
    with pytest.raises(DeclarationError, match="column"):
        fedppl.formula("y ~ " + where.format(text))


ACROSS = {
    "z-scores": lambda v: (v - np.mean(v)) / np.std(v),
    "shares of the largest": lambda v: v / v.max(),
    "from the first": lambda v: v - v.iloc[0],
    "ranks": lambda v: v.rank(),
    "sums until here": lambda v: np.cumsum(v),
    "the row before": lambda v: v.shift().fillna(0.0),
    "above the median": lambda v: (v > v.median()) * 1.0,
    "a number for all": lambda v: v * 0 + len(v),
}


@pytest.mark.parametrize("name", ACROSS)
@pytest.mark.parametrize(
    "text", ["f(x)", "I(f(x) * z)", "np.log(f(x) + 100)", "offset(f(x))", "arm:f(x)", "(f(x) | site)"]
)
def test_functions_of_the_user_s_that_look_across_rows_are_refused(name: str, text: str) -> None:
    with pytest.raises(DeclarationError, match="function of single rows"):
        agreed("y ~ z + " + text, constants={"f": ACROSS[name]})


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("I(x / 100)", ("I(x ∕ 100)",)),
        ("`kg/m2` + `% fat`", ("kg∕m2", "% fat")),
        ("class + µg + `sepal.length`", ("class", "µg", "sepal.length")),
        ("`kg/m2`:arm", ("kg∕m2:arm",)),
    ],
)
def test_any_column_may_be_named_and_variables_have_no_slash(text: str, names: tuple[str, ...]) -> None:
    prior = fedppl.Prior("Normal", mu=0.0, sigma=0.25)
    built = agreed("y ~ " + text, priors={names[0].replace("∕", "/"): prior})
    assert built.terms.common == names and prior.parameters == built.priors[names[0]].parameters
    model = built(**built.read("a", FRAME[:24]))
    assert set(names) <= {variable.name for variable in model.free_RVs}
    assert not [name for name in [*model.named_vars, *model.coords] if "/" in name]


def test_a_response_and_factors_may_have_any_name() -> None:
    frame = FRAME.rename(columns={"y": "mg/dL", "ward": "a ward/b", "site": "my site"})
    built = agreed("`mg/dL` ~ x + (x | `my site`/`a ward/b`)", frame, by="my site")
    model = built(**built.read("a", frame[:24]))
    assert {"mg∕dL", "my site_sd", "my site_a ward∕b_sd"} <= set(model.named_vars)
    survival = parse("Surv(`time to event`, died) ~ x").response
    assert survival.columns == ("time to event", "died")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("draw", "y ~ {} + (1 | site)"),
        ("chain", "y ~ {}"),
        ("sample", "y ~ {}"),
        ("site_effect", "y ~ {} + (1 + {} | site)"),
        ("site_pair", "y ~ {} + (1 + x | site)"),
        ("arm_dim", "y ~ {} + arm"),
        ("x_dim_0", "y ~ {} + x"),
        ("site_corr", "y ~ {} + (x | site)"),
        ("draw", "{} ~ x"),
        ("site_ward_effects", "y ~ {} + (1 | site/ward)"),
    ],
)
def test_names_that_results_have_are_refused_beforehand(name: str, text: str) -> None:
    with pytest.raises(DeclarationError, match="rename these columns"):
        fedppl.formula(text.format(name, name))


# --- terms and effects ------------------------------------------------------------------------------------------------


def test_a_treatment_has_an_effect_and_one_that_varies_by_centre() -> None:
    for text in ("y ~ arm + (1 | site/arm)", "y ~ arm + (1 | site) + (1 | site:arm)"):
        built = agreed(text)
        read = built.read("a", FRAME[:24])
        assert read["common"].shape == (24, 1) and len(read["of_1"]) == 2
        assert len(np.unique(read["row_1"][read["common"][:, 0] == 0])) == 1
    with pytest.raises(DeclarationError, match="leave it out of"):
        fedppl.formula("y ~ (arm | site/arm)")


@pytest.mark.parametrize(
    "text",
    [
        "(1 | site/ward) + (0 + x | site)",
        "(1 | site) + (0 + x | site/ward)",
        "(x | site) + (z | site:ward) + (0 + arm | site)",
    ],
)
def test_effects_that_are_written_as_independent_are_refused(text: str) -> None:
    with pytest.raises(DeclarationError, match="correlated=False"):
        fedppl.formula("y ~ x + " + text)


def test_effects_that_stand_twice_are_there_once() -> None:
    groups = parse("y ~ (1 + x | site) + (1 | site/ward)").groups
    assert [(one.factor, one.expressions) for one in groups] == [(("site",), ("1", "x")), (("site", "ward"), ("1",))]


@pytest.mark.parametrize("text", ["x + z - 1", "x + z + 0", "0 + x + z", "-1 + z + x"])
def test_effects_without_a_level(text: str) -> None:
    built = agreed(f"y ~ x + ({text} | site)")
    assert set(built.design.group_labels[0]) == {"x", "z"} and built.terms.intercept
    assert built.shared == ("Intercept", "x", "site_sd", "site_partial", "sigma")


def test_offsets_are_summed_wherever_they_stand() -> None:
    for text in (
        "offset(np.log(w)) + offset(z) + x",
        "offset(z) + x + offset(np.log(w))",
        "x + offset(z) + offset(np.log(w))",
    ):
        read = agreed("y ~ " + text).read("a", FRAME[:24])
        assert_allclose(read["offset"], np.log(FRAME["w"][:24]) + FRAME["z"][:24])
    for text in ("x - offset(z)", "x:offset(z)", "(offset(z) | site)", "(x + offset(z))*arm"):
        with pytest.raises(DeclarationError, match="summand of its own"):
            fedppl.formula("y ~ " + text)


def test_one_column_is_numbers_or_levels() -> None:
    for text in ("C(k) + k", "C(k) + I(k**2)", "x:C(k) + np.log(k)"):
        with pytest.raises(DeclarationError, match="levels in one place"):
            fedppl.formula("y ~ " + text)
    assert agreed("y ~ C(`k`)*x").terms.common == ("k", "x", "k:x")


def test_texts_that_are_dates_are_levels_where_a_formula_says_so() -> None:
    days = np.resize(["2024-03-01", "2024-03-08", "2024-03-15"], len(FRAME))
    data = FRAME.assign(day=days)
    for text in ("y ~ x + C(day)", "y ~ x + (1 | site/day)"):
        assert fedppl.agree(fedppl.formula(text), data, by="site").clients
    assert fedppl.agree(fedppl.formula("day ~ x", family="categorical"), data, by="site").clients
    with pytest.raises(DataError, match="'day'.*dates"):
        fedppl.agree(fedppl.formula("y ~ x + (day | site)"), data, by="site")


@pytest.mark.parametrize(
    ("text", "levels", "names"),
    [
        ("C(k)", {"k": [1.0, 3.0, 2.0]}, ("1", "3", "2")),
        ("flag", {"flag": [True, False]}, ("1", "0")),
        ("C(k)", {"k": np.array([2, 1, 3])}, ("2", "1", "3")),
    ],
)
def test_levels_are_those_of_the_column_however_they_are_written(
    text: str, levels: Any, names: tuple[str, ...]
) -> None:
    (name,) = levels
    assert agreed("y ~ " + text, levels=levels).design.agreement.columns[name].levels == names


# --- clients and orders -----------------------------------------------------------------------------------------------


def test_clients_with_several_values_of_the_factor_are_refused() -> None:
    inner = FRAME.assign(hospital=FRAME["site"] + FRAME["ward"])
    tables = {f"net {site}": rows for site, rows in inner.groupby("site")}
    arrays = {
        name: {column: rows[column].to_numpy() for column in ("hospital", "x", "y")} for name, rows in tables.items()
    }
    for data in (tables, inner.groupby("site"), arrays):
        with pytest.raises(DataError, match=r"2 values of 'hospital'.*\(1 \| client/hospital\)"):
            fedppl.agree(fedppl.formula("y ~ x + (1 | hospital)"), data)
        assert fedppl.agree(fedppl.formula("y ~ x + (1 | client/hospital)"), data).clients
    by_hospital = dict(tuple(inner.groupby("hospital")))
    assert len(fedppl.agree(fedppl.formula("y ~ x + (1 | hospital)"), by_hospital).clients) == 8
    with pytest.raises(DataError, match="the same 'site'"):
        fedppl.agree(fedppl.formula("y ~ x + (1 | site)"), by_hospital)


def test_the_frame_s_categories_are_the_order_of_levels(caplog: pytest.LogCaptureFixture) -> None:
    arm = pd.Categorical(FRAME["arm"], ["old", "rare", "new"])
    frame = FRAME.assign(
        arm=arm, band=pd.cut(FRAME["w"], [0, 2, 10, 50]), healed=pd.Categorical(FRAME["arm"], ["old", "new"])
    )
    assert agreed("y ~ arm*x", frame).design.labels["arm"] == ("arm[new]",)
    assert agreed("y ~ band", frame).design.agreement.columns["band"].levels == ("(0, 2]", "(2, 10]")
    outcome = fedppl.agree(fedppl.formula("healed ~ x", "bernoulli"), frame, by="site").columns.loc["healed", "levels"]
    assert outcome == ("old", "new")
    tables = dict(tuple(frame.groupby("site")))
    for data in (tables, frame.groupby("site")):
        assert fedppl.agree(fedppl.formula("y ~ arm"), data).columns.loc["arm", "levels"] == ("old", "new")
    assert agreed("y ~ arm", frame, levels={"arm": ["new", "old"]}).design.labels["arm"] == ("arm[old]",)
    assert not caplog.records
    mixed = {**tables, "b": tables["b"].assign(arm=tables["b"]["arm"].astype(str))}
    turned = {**tables, "b": tables["b"].assign(arm=tables["b"]["arm"].cat.reorder_categories(["new", "rare", "old"]))}
    for data in (mixed, turned):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="fedppl"):
            assert fedppl.agree(fedppl.formula("y ~ arm"), data).columns.loc["arm", "levels"] == ("new", "old")
        assert "'arm'" in caplog.text and "levels=" in caplog.text
