"""Random formulas have the columns' span that patsy's matrix of the pooled rows has, whatever levels a client lacks."""

from __future__ import annotations

import random
from typing import Any

import formulaic
import numpy as np
import pandas as pd
import patsy
import pytest
from numpy.testing import assert_allclose

import fedppl
from fedppl import DataError, DeclarationError
from fedppl.types import Array
from tests.support.markers import slow_but

PER_CASE = 40
ROWS = 480
FACTORS, NUMBERS = ("a", "b", "c", "e"), ("x", "z")
COMPUTED = (
    "np.log(w)", "I(x**2)", "I(x * z)", "np.sin(2 * np.pi * w / 12)", "center(x)", "scale(z)", "C(k)",
    "I(center(x)**2)", "bs(w, knots=[2.0, 3.0], lower_bound=0.5, upper_bound=5.0)",
    "np.exp(np.sqrt(w) - 1)", "`% fat`", "np.log(`mg/dL`)",
)  # fmt: skip
# What only we and patsy call otherwise.
IN_PATSY = {"`% fat`": "Q('% fat')", "np.log(`mg/dL`)": "np.log(Q('mg/dL'))"}


def table(seed: int) -> pd.DataFrame:
    """Rows of four sites, of which each but the last lacks a level of some factors."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"site": np.repeat(["s1", "s2", "s3", "s4"], ROWS // 4)})
    for name in FACTORS:
        levels = [f"{name}{place}" for place in range(int(rng.integers(2, 4)))]
        column = rng.choice(levels, ROWS)
        for site in ("s1", "s2", "s3"):
            if rng.random() < 0.4:
                column[frame["site"] == site] = rng.choice(levels[:-1], ROWS // 4)
        frame[name] = column
    for name in NUMBERS:
        frame[name] = rng.normal(1.0, 1.0, ROWS)
    frame["w"], frame["k"] = rng.uniform(0.6, 4.9, ROWS), rng.integers(1, 4, ROWS)
    frame["% fat"], frame["mg/dL"] = rng.normal(20.0, 3.0, ROWS), rng.uniform(1.0, 9.0, ROWS)
    return frame.assign(y=rng.normal(size=ROWS))


def written(rng: random.Random, depth: int, names: list[str]) -> str:
    """A random expression."""
    if depth == 0 or rng.random() < 0.25:
        return rng.choice(names)
    sign = rng.choice(["+", "+", "*", "*", ":", "/", "-", "**"])
    left, right = (written(rng, depth - 1, names) for _ in range(2))
    if sign == "**":
        return f"({left} + {right} + {rng.choice(names)})**{rng.choice([2, 2, 3])}"
    if sign == "+":
        return f"{left} + {right}"
    return f"({left}) - ({right})" if sign == "-" else f"({left}){sign}({right})"


def with_intercept(rng: random.Random, inner: str) -> str:
    return rng.choice(["{}", "{}", "0 + {}", "{} - 1", "-1 + {}", "{} + 0", "1 + {}"]).format(inner)


def some(rng: random.Random) -> str:
    """A random right-hand side, or what varies by site."""
    names = [*FACTORS[: rng.randint(2, 4)], *NUMBERS]
    if rng.random() < 0.4:
        names = [*names[:3], *rng.sample(COMPUTED, 2)]
    return with_intercept(rng, written(rng, rng.choice([2, 3]), names))


def span(columns: Array) -> Array:
    if columns.shape[1] == 0:
        return columns
    scaled = columns / np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
    u, sizes, _ = np.linalg.svd(scaled, full_matrices=False)
    return np.asarray(u[:, sizes > 1e-8 * sizes[0]])


def ours(formula: str, frame: pd.DataFrame) -> tuple[Array, Array]:
    """Common columns with the intercept, and effects' columns, of all rows in their order."""
    built: Any = fedppl.agree(fedppl.formula(formula), frame, by="site").model.builder
    parts = [built.read(str(site), rows) for site, rows in frame.groupby("site")]
    common = np.concatenate([np.asarray(part.get("common", np.zeros((len(part["outcome"]), 0)))) for part in parts])
    if built.terms.intercept:
        common = np.column_stack([np.ones(len(common)), common])
    names = [tuple(label for one in built.design.labels.values() for label in one), *built.design.group_labels]
    assert all(len(set(one)) == len(one) for one in names)
    return common, np.concatenate([part.get("effects_0", np.zeros((len(part["outcome"]), 0))) for part in parts])


def right(inner: str, frame: pd.DataFrame) -> Array | None:
    """Patsy's matrix; None of what it cannot read, or is too large to compare."""
    for name, other in IN_PATSY.items():
        inner = inner.replace(name, other)
    try:
        found = np.asarray(patsy.dmatrix(inner, frame))
    except patsy.PatsyError:
        return None
    return found if found.shape[1] < ROWS // 3 else None


def wrong(found: Array, expected: Array) -> str:
    mine, other = span(found), span(expected)
    if mine.shape[1] != other.shape[1] or not np.allclose(other @ (other.T @ mine), mine, atol=1e-6):
        return f"{mine.shape[1]} dimensions, right are {other.shape[1]}"
    if found.shape[1] > max(mine.shape[1], expected.shape[1]):
        return f"{found.shape[1]} columns of {mine.shape[1]} dimensions, patsy has {expected.shape[1]}"
    return ""


@pytest.mark.parametrize(
    "inner",
    ["a*b*x", "0 + a:b + x:a", "a/b - a", "(a + b + x)**2 - a:b", "a:b:c", "x:z + b/x", "-1 + c*b", "b:a + c:b - x"],
)
def test_columns_are_those_of_formulaic_in_its_order(inner: str) -> None:
    frame = table(3)
    expected = formulaic.Formula(inner).get_model_matrix(frame)
    assert_allclose(ours(f"y ~ {inner}", frame)[0], np.asarray(expected, dtype=float))
    built: Any = fedppl.agree(fedppl.formula(f"y ~ {inner}"), frame, by="site").model.builder
    labels = [label for one in built.design.labels.values() for label in one]
    assert [label.replace("[T.", "[") for label in expected.columns if label != "Intercept"] == labels


@pytest.mark.parametrize("case", slow_but(range(50), 0, 1))
def test_random_formulas_span_what_patsy_spans(case: int) -> None:
    compared, refused, problems = 0, [], []
    seed = case * 10_000
    while compared < PER_CASE:
        seed += 1
        rng, frame = random.Random(seed), table(seed)
        common, effects = some(rng), some(rng) if rng.random() < 0.6 else None
        expected = [right(one, frame) for one in (common, effects or "1")]
        if expected[0] is None or expected[1] is None or 0 in (expected[1].shape[1], expected[0].shape[1]):
            continue
        compared += 1
        formula = f"y ~ {common}" + ("" if effects is None else f" + ({effects} | site)")
        try:
            found = ours(formula, frame)
        except (DataError, DeclarationError) as error:
            refused.append(f"{formula}: {error}")
            continue
        for one, other in zip(found, expected[: 1 + (effects is not None)], strict=False):
            if what := wrong(one, other):
                problems.append(f"{formula}: {what}")
    assert not problems
    assert len(refused) <= 2, refused  # a sum of nothing that something is nested in: (x - x)/z


@pytest.mark.parametrize("truth", ["flag", "I(x > 1)", "I((x > 0) & (z < 2))"])
@pytest.mark.parametrize("inner", ["{}", "{} * x", "x + {}:x", "a * {}", "a / {}", "0 + a + {}", "({} + x + a)**2"])
def test_truths_are_numbers_where_these_span_what_two_levels_span(truth: str, inner: str) -> None:
    frame = table(1).assign(flag=np.arange(ROWS) % 3 == 0)
    text = inner.format(truth)
    common, effects = ours(f"y ~ {text} + ({text} | site)", frame)
    expected = right(text, frame)
    assert expected is not None
    assert not wrong(common, expected) and not wrong(effects, expected)


@pytest.mark.parametrize("truth", ["flag", "I(x > 1)", "I((x > 0) & (z < 2))"])
@pytest.mark.parametrize("inner", ["0 + {}", "x:{}", "a:{}", "{}:a", "x + {}:a", "0 + {}:x", "{} / a"])
def test_truths_that_would_have_two_columns_are_refused(truth: str, inner: str) -> None:
    frame = table(1).assign(flag=np.arange(ROWS) % 3 == 0)
    text = inner.format(truth)
    for formula in (f"y ~ {text}", f"y ~ 1 + ({text} | site)"):
        with pytest.raises(DataError, match="numbers 0 and 1"):
            ours(formula, frame)
    same = text.replace("flag", "C(flag)")
    if "C(flag)" in same:
        expected = right(same, frame)
        assert expected is not None and not wrong(ours(f"y ~ {same}", frame)[0], expected)
    else:
        ours(f"y ~ {text.replace(truth, 'number')}", frame.assign(number=1.0 * frame["flag"]))
