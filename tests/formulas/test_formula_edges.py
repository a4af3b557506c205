"""Columns, levels, constants and calls at the edge of what a formula reads: right, or refused with a word."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedppl
from fedppl import DataError, DeclarationError
from fedppl.formulas.agreement import _order

ROWS = 24
RNG = np.random.default_rng(2)
FRAME = pd.DataFrame(
    {
        "site": np.repeat(["n", "s"], ROWS // 2),
        "x": RNG.normal(size=ROWS),
        "w": RNG.uniform(1.0, 3.0, ROWS),
        "a": RNG.normal(size=ROWS),
        "k": np.tile([1, 2, 3], ROWS // 3),
        "arm": np.tile(["old", "new"], ROWS // 2),
        "y": RNG.normal(size=ROWS),
    }
)
SPLINE = "bs(w, knots={}, lower_bound={}, upper_bound=9)"


def agreed(formula: str, frame: Any = FRAME, by: str | None = "site", **more: Any) -> Any:
    return fedppl.agree(fedppl.formula(formula, **more), frame, by=by).model.builder


def two(values: Any) -> Any:
    return np.stack([values, values**2], axis=1)


@pytest.mark.parametrize(
    ("text", "constants"),
    [
        ("offset(poly(w, 2, raw=True))", {}),
        (f"offset({SPLINE.format('[2]', 0)})", {}),
        ("offset(C(k))", {}),
        ("offset(f(w))", {"f": two}),
    ],
)
def test_offsets_of_several_columns_are_refused_and_not_cut_to_the_first(text: str, constants: Any) -> None:
    with pytest.raises(DeclarationError, match="number a row|several columns"):
        agreed(f"y ~ x + {text}", constants=constants)


@pytest.mark.parametrize(("knots", "low"), [("w", 0), ("[2, x]", 0), ("f(w)", 0), ("[2]", "w"), ("[2]", "f(w)")])
def test_knots_and_bounds_out_of_rows_are_refused(knots: str, low: Any) -> None:
    text = SPLINE.format(knots, low)
    with pytest.raises(DeclarationError, match="columns of each client"):
        fedppl.formula("y ~ " + text, constants={"f": np.sort} if "f(" in text else {})


def test_a_spline_without_knots_is_a_polynomial() -> None:
    built = agreed("y ~ " + SPLINE.format("[]", 0))
    found = built.read("n", FRAME[:12])["common"]
    w = FRAME["w"].to_numpy()[:12]
    powers = np.vander(w, 4)
    assert found.shape == (12, 3)
    assert np.allclose(powers @ np.linalg.lstsq(powers, found)[0], found)


@pytest.mark.parametrize(
    "text",
    [
        "poly(degree=2, raw=True)",
        "poly(w, degree=2, degree=3, raw=True)",
        SPLINE.format("[2]", 0)[:-1] + ", include_intercept=x)",
        SPLINE.format("[2]", 0)[:-1] + ", center=0)",
    ],
)
def test_calls_whose_arguments_would_be_passed_over_are_refused(text: str) -> None:
    with pytest.raises(DeclarationError, match="once|True or False"):
        fedppl.formula("y ~ " + text)


@pytest.mark.parametrize("name", ["I", "C", "bs", "poly", "offset", "center", "scale"])
def test_constants_are_not_called_as_functions_of_formulas(name: str) -> None:
    for text in (f"{name}(x)", f"{name}(k=x)", f"{name}()"):
        with pytest.raises(DeclarationError, match="other names"):
            fedppl.formula(f"y ~ {text}", constants={name: np.exp})


def test_constants_have_any_name() -> None:
    for name, text in (("é", "é"), ("a b", "`a b`")):
        built = agreed(f"y ~ I(x * {text})", constants={name: 3.0})
        assert np.allclose(built.read("n", FRAME[:12])["common"][:, 0], 3.0 * FRAME["x"][:12])


def test_a_function_with_complex_values_is_refused() -> None:
    with pytest.raises(DeclarationError, match="complex"):
        agreed("y ~ f(x)", constants={"f": lambda values: values * 1j})


@pytest.mark.parametrize("name", ["quoted__61", "quoted__zz", "quoted__ff"])
def test_a_name_like_those_that_stand_for_quoted_ones_is_a_column(name: str) -> None:
    frame = FRAME.assign(**{name: FRAME["w"]})
    for text in (f"np.log({name})", f"np.log(`{name}`)"):
        built = agreed(f"y ~ {text}", frame)
        assert np.allclose(built.read("n", frame[:12])["common"][:, 0], np.log(FRAME["w"][:12]))
        with pytest.raises(DataError, match=name):
            agreed(f"y ~ {text}")


@pytest.mark.parametrize("text", ["x:w + `x:w`", "arm + `arm[old]`"])
@pytest.mark.parametrize("where", ["{}", "1 + ({} | site)"])
def test_coefficients_that_would_be_called_alike_are_refused(text: str, where: str) -> None:
    frame = FRAME.assign(**{"x:w": FRAME["x"], "arm[old]": FRAME["x"]})
    with pytest.raises(DeclarationError, match="rename"):
        agreed("y ~ " + where.format(text), frame)


def test_groups_whose_names_have_colons_are_apart() -> None:
    frame = FRAME.assign(ward=np.tile(["a:b", "a", "a"], 8), bed=np.tile(["c", "b:c", "b"], 8))
    built = agreed("y ~ x + (1 | site/ward/bed)", frame)
    found = built.read("n", frame[:12])
    assert len(found["of_2"]) == 3 and list(found["row_2"][:3]) != [0, 0, 1]


@pytest.mark.parametrize("kind", [float, bool, int, object])
def test_levels_of_categories_are_those_of_the_same_numbers(kind: Any) -> None:
    values = np.tile([0, 1], ROWS // 2).astype(kind)
    parts = {"n": FRAME[:12].assign(q=values[:12]), "s": FRAME[12:].assign(q=pd.Categorical(values[12:]))}
    tables = {name: part.drop(columns="site") for name, part in parts.items()}
    built = agreed("y ~ C(q)", tables, None)
    assert built.design.agreement.columns["q"].levels == ("0", "1")
    same = FRAME.assign(q=pd.Categorical(values))
    built = agreed("y ~ q", same, levels={"q": [kind(1), kind(0)]} if kind is not object else {"q": [1, 0]})
    assert built.design.agreement.columns["q"].levels == ("1", "0")
    row = {"q": kind(1) if kind is not object else 1, "y": 0.0}
    assert built.read_new("n", row, {})["common"].tolist() == [[0.0]]


@pytest.mark.parametrize(
    "row",
    [
        {"x": [1.0, 2.0], "arm": "old", "k": [1, 2, 3]},
        {"x": np.ones((2, 2)), "arm": "old", "k": 1},
        {"x": 1.0, "arm": [["old"]], "k": 1},
    ],
)
def test_new_rows_without_one_value_a_row_are_refused(row: Any) -> None:
    built = agreed("y ~ x + arm + k")
    with pytest.raises(DataError, match="one value"):
        built.read_new("n", row, {})
    with pytest.raises(DataError, match="one value"):
        built.read("n", {**row, "y": [0.0, 1.0]})


@pytest.mark.parametrize(
    "levels", [("nan", "b", "a", "10", "9"), ("9", "a", "nan", "10", "b"), ("b", "10", "nan", "9", "a")]
)
def test_a_level_called_nan_has_its_place_among_the_texts(levels: tuple[str, ...]) -> None:
    assert sorted(levels, key=_order) == ["9", "10", "a", "b", "nan"]


def test_names_with_brackets_colons_and_slashes_keep_their_numbers_and_their_meaning() -> None:
    rng = np.random.default_rng(7)
    frame = pd.DataFrame(
        {"site": np.repeat(["n", "s"], 60), "dose [mg]": rng.normal(size=120), "CD4:CD8": rng.normal(size=120)}
    )
    frame["arm [x]"], frame["y/n"] = rng.choice(["old", "[z], 2"], 120), rng.integers(0, 2, 120)
    model = fedppl.formula("`y/n` ~ `dose [mg]` * `CD4:CD8` + `arm [x]`", family="bernoulli")
    fit = fedppl.fit(model, frame, by="site", progressbar=False, random_seed=1)
    found, logs = fedppl.table(fit, exponentiate=True).frame, fedppl.table(fit).frame
    names = ["Intercept", "dose [mg]", "CD4:CD8", "arm [x][old]", "dose [mg]:CD4:CD8"]
    assert list(found.index) == names and list(fit.summary(var_names=names).index) == names
    assert list(found["what"]) == ["odds", *["odds ratio"] * 3, "ratio of odds ratios"]
    np.testing.assert_allclose(found["ci_low"], np.exp(logs["ci_low"].to_numpy(float)), rtol=1e-6)
    new = {"dose [mg]": 0.0, "CD4:CD8": 1.0, "arm [x]": "old"}
    assert "y∕n_mean" in fit.predict("n", new, kind="mean", draws=20, random_seed=1)["predictions"]


@pytest.mark.parametrize("text", ["offset()", "offset(x, w)", "offset(x, `a b`)"])
def test_an_offset_has_one_argument(text: str) -> None:
    with pytest.raises(DeclarationError, match="offset takes 1 argument") as caught:
        fedppl.formula(f"y ~ x + {text}")
    assert text in str(caught.value)


@pytest.mark.parametrize("value", ["3", None, np.nan, [1.0, np.nan], [[1], [1, 2]], {"a": 1}])
def test_constants_are_numbers_or_functions(value: Any) -> None:
    with pytest.raises(DeclarationError, match="'q'.*give a number"):
        fedppl.formula("y ~ I(x * q)", constants={"q": value})


def test_a_constant_beside_a_column_of_its_name_is_refused_where_it_is_read() -> None:
    by_client = {
        k: {name: part[name] for name in part} for k, part in FRAME.drop(columns="site").groupby(FRAME["site"])
    }
    for data, by in ((FRAME, "site"), (by_client, None)):
        with pytest.raises(DeclarationError, match=r"\['k'\].*'k': 3.*rename"):
            agreed("y ~ I(x * k)", data, by, constants={"k": 3})
        assert agreed("y ~ k(x)", data, by, constants={"k": np.exp}).design is not None  # a call is no column


def test_errors_of_a_factor_end_once() -> None:
    for text, constants in ((SPLINE.format("[20]", 0), {}), ("f(x)", {"f": lambda values: values - values.mean()})):
        with pytest.raises(DeclarationError) as caught:
            agreed(f"y ~ {text}", constants=constants)
        assert ".;" not in str(caught.value) and ". ;" not in str(caught.value)


@pytest.mark.parametrize("family", ["poisson", "binomial"])
def test_counts_beyond_whole_numbers_are_refused_by_column_and_value(family: str) -> None:
    name, text = ("y", "y ~ x") if family == "poisson" else ("t", "prop(y, t) ~ x")
    frame = FRAME.assign(y=1.0, t=3.0)
    frame["y"] = np.tile([0.0, 1.0], ROWS // 2)
    frame.loc[3, name] = 1e19
    with pytest.raises(DataError, match=rf"{name!r} is 1e\+19 in row 3.*unit"):
        fedppl.fit(fedppl.formula(text, family=family), frame, by="site", progressbar=False)


def test_offsets_whose_exp_has_no_number_are_refused_by_name() -> None:
    frame = FRAME.assign(y=np.tile([1, 2], ROWS // 2), n=np.linspace(1.0, 4000.0, ROWS))
    with pytest.raises(DataError, match=r"offset\(n\) differs by .*np\.log"):
        fedppl.fit(fedppl.formula("y ~ x + offset(n)", family="poisson"), frame, by="site", progressbar=False)
    for family, text in (("gaussian", "offset(n)"), ("poisson", "offset(np.log(n))"), ("poisson", "offset(n + 5000)")):
        near = frame if family == "gaussian" or "log" in text else frame.assign(n=frame["n"] / 10)
        assert len(agreed(f"y ~ x + {text}", near, family=family).read("n", near[:12])["offset"]) == 12


@pytest.mark.parametrize("kind", ["uint8", "int8", "float"])
def test_the_middle_of_an_interval_is_that_of_the_numbers(kind: str) -> None:
    low, high = np.full(ROWS, 100, kind), np.tile([120, 101], ROWS // 2).astype(kind)
    built = agreed('Surv(low, high, "interval") ~ 1', FRAME.assign(low=low, high=high), family="weibull")
    assert built.design.agreement.columns["low"].mean == 105.25


# --- columns by name are read as a data frame of them is --------------------------------------------------------------

N = 6  # rows of a client
DAYS = pd.date_range("2024-01-01", periods=N)
Y = np.array([0.1, -0.4, 0.9, 0.3, -0.2, 0.6])
# Columns of six rows as one may have them, by name; their frame is made by pandas.
COLUMNS: dict[str, Any] = {
    "numbers": np.arange(N) * 1.5,
    "whole numbers": list(range(N)),
    "an index": pd.Index([3, 1, 2, 3, 1, 2]),
    "objects": np.array([1, 2, 3, 1, 2, 3], dtype=object),
    "objects, a Series": pd.Series([1, 2, 3, 1, 2, 3], dtype=object),
    "decimals": [decimal.Decimal(k) for k in range(N)],
    "none": [None, 1, 2, 3, 1, 2],
    "nan": [np.nan, 1, 2, 3, 1, 2],
    "booleans": [True, False] * 3,
    "booleans and none": [True, False, None, True, False, True],
    "Int64": pd.array([None, 1, 2, 3, 1, 2], dtype="Int64"),
    "boolean": pd.Series([None, True, False, True, False, True], dtype="boolean"),
    "dates": DAYS.to_numpy(),
    "dates of nanoseconds, a Series": pd.Series(DAYS).astype("datetime64[ns]"),
    "dates, one missing": np.array([*DAYS.to_numpy()[:-1], np.datetime64("NaT", "s")]),
    "dates of a zone": pd.Series(DAYS.tz_localize("UTC")),
    "times of Python": [datetime.datetime(2024, 1, k + 1) for k in range(N)],
    "spans": (DAYS - DAYS[0]).to_numpy().astype("timedelta64[ms]"),
    "a mask": np.ma.array(np.arange(N) * 1.5, mask=np.arange(N) == 1),
    "a mask of whole numbers": np.ma.array(np.arange(N), mask=np.arange(N) == 1),
    "a mask of dates": np.ma.array(DAYS.to_numpy(), mask=np.arange(N) == 1),
    "a mask of texts": np.ma.array(["b", "zz", "a", "b", "a", "b"], mask=np.arange(N) == 1),
    "texts": np.array(["b", "a", "c", "b", "a", "c"]),
    "texts, a list": ["b", "a", "c", "b", "a", "c"],
    "texts and none": ["b", None, "a", "b", "a", "b"],
    "texts and nan": ["b", np.nan, "a", "b", "a", "b"],
    "texts, a Series": pd.Series(["b", None, "a", "b", "a", "b"]),
    "texts and numbers": ["b", 1, 2.0, "b", 1, 2.5],
    "categories": pd.Series(pd.Categorical(["b", "a"] * 3, categories=["b", "a"])),
    "categories, no Series": pd.Categorical(["b", None, "a"] * 2, categories=["b", "a"]),
    "categories of numbers": pd.Categorical([7, 3] * 3, categories=[7, 3]),
    "categories of numbers, ordered": pd.Series(pd.Categorical([7, 3] * 3, categories=[7, 3], ordered=True)),
}


def seen(data: Any, missing: str, family: str = "gaussian", text: str = "y ~ x") -> Any:
    """What clients agree on, and the arrays of client "a"."""
    model = fedppl.agree(fedppl.formula(text, family=family), data, missing=missing)
    arrays = model.model.read("a", data["a"]) if missing == "error" else {}
    return model.model.builder.design.agreement, {name: np.asarray(one).tolist() for name, one in arrays.items()}


def same_as_frame(make: Callable[[Any], Any], values: Any, **more: Any) -> None:
    """Columns by name at two clients mean what their data frames mean."""
    named = {k: make(values) for k in "ab"}
    assert seen(named, **more) == seen({k: pd.DataFrame(one) for k, one in named.items()}, **more)


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_column_by_name_is_that_of_a_frame(kind: str) -> None:
    values = COLUMNS[kind]
    frame = {"a": pd.DataFrame({"x": values, "y": Y}), "b": pd.DataFrame({"x": values, "y": Y})}
    gone = frame["a"]["x"].isna().any()
    same_as_frame(lambda one: {"x": one, "y": Y}, values, missing="drop" if gone else "error")
    if gone:
        for data in (frame, {k: {"x": values, "y": Y} for k in "ab"}):
            with pytest.raises(DataError, match=r"'x' in [123] rows at client 'a'"):
                fedppl.agree(fedppl.formula("y ~ x"), data)


def test_dates_by_name_are_days_since_1970() -> None:
    for unit in ("D", "ms", "ns"):
        found, arrays = seen({k: {"x": DAYS.to_numpy().astype(f"M8[{unit}]"), "y": Y} for k in "ab"}, "error")
        assert found.columns["x"].mean == 19723 + 2.5  # 2024-01-01 is day 19723
        assert [row for (row,) in arrays["common"]] == [19723.0 + k for k in range(N)]


@pytest.mark.parametrize("family", ["bernoulli", "ordinal", "categorical"])
def test_an_outcome_of_a_series_keeps_the_order_of_its_categories(family: str) -> None:
    values = pd.Series(pd.Categorical(["yes", "no", "no"] * 2, categories=["yes", "no"], ordered=True))
    same_as_frame(lambda one: {"ok": one, "x": Y}, values, missing="error", family=family, text="ok ~ x")
    found, arrays = seen({k: {"ok": values, "x": Y} for k in "ab"}, "error", family, "ok ~ x")
    assert found.columns["ok"].levels == ("yes", "no")  # alphabetically "no" would be the first
    assert arrays["outcome"] == [0, 1, 1, 0, 1, 1]


def test_new_rows_by_name_are_those_of_a_frame() -> None:
    clients = {k: {"day": DAYS.to_numpy(), "arm": ["p", "q"] * 3, "y": Y} for k in "ab"}
    built = agreed("y ~ day + arm", clients, None)
    day = DAYS.to_numpy()[3]
    expected = built.read_new("a", pd.DataFrame({"day": [day] * 2, "arm": ["p", "q"]}), {})["common"]
    assert expected.tolist() == [[19726.0, 0.0], [19726.0, 1.0]]
    for one in (day, pd.Timestamp(day), datetime.datetime(2024, 1, 4), np.array(day), [day, day], pd.Series([day] * 2)):
        assert built.read_new("a", {"day": one, "arm": ["p", "q"]}, {})["common"].tolist() == expected.tolist()
    odd = {"day": one, "arm": ["p", "q"], "unread": [datetime.date(2024, 1, 1)] * 2}
    assert built.read_new("a", odd, {})["common"].tolist() == expected.tolist()
    masked = {"day": np.ma.array([day, day], mask=[False, True]), "arm": "p"}
    for read in (lambda data: built.read_new("a", data, {}), lambda data: built.read("new", {**data, "y": [0.0, 0.0]})):
        with pytest.raises(DataError, match="'day' is nan in row 1|one value a row"):
            read(masked)
    with pytest.raises(DataError, match="'arm' has no value in row 1"):
        built.read_new("a", {"day": day, "arm": ["p", None]}, {})


def test_series_in_different_orders_are_refused_of_a_formula_too() -> None:
    rows = {"x": pd.Series(Y), "y": pd.Series(Y).iloc[::-1]}
    model = fedppl.formula("y ~ x")
    built = agreed("y ~ x", {"a": {"x": Y, "y": Y}}, None)
    for call in (lambda: fedppl.agree(model, {"a": rows}), lambda: built.read("a", rows)):
        with pytest.raises(DataError, match=r"^client 'a': .*different orders.*to_numpy\(\)"):
            call()


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ([datetime.date(2024, 1, k + 1) for k in range(N)], "to_datetime"),
        ([datetime.time(k) for k in range(N)], "texts"),
        ([b"a", b"b"] * 3, "texts"),
        ([[1], [1, 2]] * 3, "one number a row"),
        (np.zeros(N, dtype=[("a", float), ("b", float)]), "one number a row"),
        (np.zeros((N, 2)), "one value a row"),
        (np.ma.array(np.zeros((N, 2)), mask=True), "one value a row"),
        ({1, 2}, "one value a row"),
        (None, "one value a row"),
        (3.0, "one value a row"),
    ],
)
def test_a_column_by_name_that_is_none_is_refused_with_the_remedy(values: Any, remedy: str) -> None:
    with pytest.raises(DataError, match=f"client 'b'.*'x'.*{remedy}") as caught:
        fedppl.agree(fedppl.formula("y ~ x"), {"a": {"x": Y, "y": Y}, "b": {"x": values, "y": Y}})
    assert "fedppl.formula" not in str(caught.value)  # which it is


@pytest.mark.parametrize(
    "data",
    [None, 3, "a.csv", (Y, Y), [1, 2], np.stack([Y, Y]), pd.Series(Y), pd.DataFrame({"x": Y, "y": Y}).to_records()],
)
def test_a_client_that_has_no_columns_is_refused(data: Any) -> None:
    model, rows = fedppl.formula("y ~ x"), {"x": Y, "y": Y}
    built = fedppl.agree(model, {"a": rows, "b": rows}).model
    for call in (
        lambda: fedppl.agree(model, {"a": rows, "b": data}),
        lambda: fedppl.fit(model, {"a": rows, "b": data}, progressbar=False),
        lambda: built.read("b", data),
    ):
        with pytest.raises(DataError, match="client 'b'.*mapping from column to values"):
            call()
