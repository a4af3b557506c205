"""Columns, levels, constants and calls at the edge of what a formula reads: right, or refused with a word."""

from __future__ import annotations

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
    with pytest.raises(DeclarationError, match="number a row"):
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
