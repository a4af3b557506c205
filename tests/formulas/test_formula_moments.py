"""Means and sds of a formula's columns, from agreed shares, means and sds: in closed form, however rare a level is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

import fedppl
from fedppl.formulas import predictor

_ROWS, _RARE = 5000, 2


def _frame() -> pd.DataFrame:
    rng = np.random.default_rng(8)
    frame = pd.DataFrame({"site": np.repeat(list("abcde"), _ROWS // 5), "x": rng.normal(20, 3, _ROWS)})
    frame["g"] = rng.permutation(["rare"] * _RARE + ["many"] * 3000 + ["some"] * (_ROWS - 3000 - _RARE))
    frame["h"] = rng.permutation(["no"] * (_ROWS - 20) + ["yes"] * 20)
    frame["z"] = rng.uniform(0, 1, _ROWS)
    frame["y"] = 1e-6 * rng.normal(size=_ROWS)
    return frame


def _spec(text: str, frame: pd.DataFrame, **more: Any) -> predictor.Spec:
    spec: predictor.Spec = fedppl.agree(fedppl.formula(text, **more), frame, by="site").model.builder.spec
    return spec


def _sd(spec: predictor.Spec, name: str) -> np.ndarray:
    return np.ravel(spec.coefficients[name].parameters["sigma"])


def test_a_level_of_two_rows_has_a_prior_on_the_scale_of_its_column() -> None:
    frame = _frame()
    spec, unit = _spec("y ~ g + h + x", frame), frame["y"].std(ddof=0)
    shares = np.array([_RARE, _ROWS - 3000 - _RARE]) / _ROWS
    assert_allclose(_sd(spec, "g"), 2.5 * unit / np.sqrt(shares * (1 - shares)))
    assert_allclose(spec.design.center, [*shares, 20 / _ROWS, frame["x"].mean()])
    assert_allclose(_sd(spec, "x"), 2.5 * unit / frame["x"].std(ddof=0))


def test_interactions_have_the_moments_of_products_of_independent_columns() -> None:
    frame = _frame()
    spec, unit = _spec("y ~ g * h * center(x) + x:z", frame), frame["y"].std(ddof=0)
    p, q = _RARE / _ROWS, 20 / _ROWS
    labels = [label for name in spec.terms.common for label in spec.design.labels[name]]
    sd = dict(zip(labels, spec.design.scale, strict=True))
    rare = next(label for label in labels if label.count("rare") and "yes" in label and "x" not in label)
    assert sd[rare] == pytest.approx(np.sqrt(p * q * (1 - p * q)))
    slope = next(label for label in labels if label.count("rare") and "yes" in label and "x" in label)
    assert sd[slope] == pytest.approx(np.sqrt(p * q) * frame["x"].std(ddof=0))
    m, s = frame[["x", "z"]].mean(), frame[["x", "z"]].std(ddof=0)
    both = np.sqrt((m.x**2 + s.x**2) * (m.z**2 + s.z**2) - (m.x * m.z) ** 2)
    assert sd["x:z"] == pytest.approx(both)
    assert _sd(spec, "x:z")[0] == pytest.approx(2.5 * unit / both)


def test_effects_have_sizes_of_their_own_columns() -> None:
    frame = _frame()
    spec = _spec("y ~ 1 + (1 + g + x | site)", frame)
    sizes = dict(zip(spec.design.group_labels[0], spec.design.group_scale[0], strict=True))
    assert sizes["Intercept"] == 1.0
    assert sizes["g[rare]"] == pytest.approx(np.sqrt(_RARE / _ROWS))
    assert sizes["x"] == pytest.approx(np.sqrt(np.mean(frame["x"] ** 2)))


def test_a_level_that_nobody_has_and_columns_of_any_unit_have_a_prior_too() -> None:
    frame = _frame().assign(tiny=lambda d: 1e-14 * d["z"])
    spec = _spec("y ~ g + tiny", frame, levels={"g": ["many", "some", "rare", "none"]})
    unit = frame["y"].std(ddof=0)
    assert _sd(spec, "g")[-1] == pytest.approx(2.5 * unit)
    assert _sd(spec, "tiny")[0] == pytest.approx(2.5 * unit / frame["tiny"].std(ddof=0))
