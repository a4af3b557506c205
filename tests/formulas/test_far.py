"""Columns far from 0 in effects, powers and interactions: said before the fit, and first where it has not arrived."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedppl

_RNG = np.random.default_rng(4)
_FRAME = pd.DataFrame({"site": np.repeat(list("abcd"), 10), "arm": _RNG.choice(["no", "yes"], 40)})
_FRAME["day"] = 2.45e6 + _RNG.uniform(0, 30, 40)
_FRAME["age"] = _RNG.normal(60, 9, 40)
_FRAME["ward"] = _RNG.choice(["x", "y"], 40)
_FRAME["y"] = _RNG.normal(size=40)


def _said(text: str, caplog: Any) -> str:
    with caplog.at_level(logging.WARNING, "fedppl"):
        built = fedppl.agree(fedppl.formula(text), _FRAME, by="site").model
    assert not caplog.text or built.advice  # of what is said before it is said afterwards too
    return str(caplog.text)


@pytest.mark.parametrize(
    "text",
    [
        "y ~ day + (1 + day | site)",
        "y ~ (0 + day | site)",
        "y ~ age + (1 + age:day | site)",
        "y ~ 1 + (1 + day | site/ward)",
        "y ~ day * arm",
        "y ~ center(age):day + age",
        "y ~ day + I(day ** 2)",
        "y ~ poly(day, 2, raw=True)",
    ],
)
def test_what_is_far_from_0_is_to_be_centred(text: str, caplog: pytest.LogCaptureFixture) -> None:
    said = _said(text, caplog)
    assert "'day' is far from 0" in said and "center(day)" in said and "'age'" not in said


@pytest.mark.parametrize(
    "text",
    [
        "y ~ day + age * arm + (1 + age | site)",
        "y ~ day + center(day):arm + (1 + center(day) | site)",
        "y ~ scale(day) * arm + I(age ** 2)",
        "y ~ np.log(day) + offset(day)",
        "y ~ day + I((day - 2450015) ** 2)",
    ],
)
def test_what_is_centred_or_stands_alone_is_left(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert not _said(text, caplog)


@pytest.mark.slow
def test_a_fit_that_has_not_arrived_names_it_first() -> None:
    frame = _FRAME.assign(y=0.1 * (_FRAME["day"] - 2.45e6) + _RNG.normal(size=40))
    with pytest.warns(fedppl.ConvergenceWarning, match="center"):
        formula = fedppl.formula("y ~ day + (1 + day | site)")
        fit = fedppl.fit(formula, frame, by="site", rounds=1, progressbar=False, random_seed=1)
    assert not fit.status.ok and fit.message.startswith("'day' is far from 0") and "center(day)" in fit.message


def test_a_power_of_a_year_has_the_coefficients_of_least_squares() -> None:
    """What years leave of their square is a thousandth of it, and its prior is on that scale."""
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"site": np.repeat(list("abcd"), 50), "year": rng.integers(2000, 2021, 200).astype(float)})
    frame["y"] = 0.1 * (frame["year"] - 2010) ** 2 + rng.normal(size=200)
    model = fedppl.formula("y ~ year + I(year ** 2)")
    fit = fedppl.fit(model, frame, by="site", progressbar=False, random_seed=1)
    centred = frame["year"] - 2010
    x = np.stack([np.ones(200), centred, centred**2], axis=1)
    coefficients, squares, *_ = np.linalg.lstsq(x, frame["y"], rcond=None)
    sd = np.sqrt(squares[0] / 197 * np.linalg.inv(x.T @ x)[2, 2])
    found = fit.summary().loc["I(year ** 2)", ["mean", "sd"]].astype(float)
    assert fit.status.ok and "contradict" not in fit.message
    assert abs(found["mean"] - coefficients[2]) < 0.1 * sd and found["sd"] == np.clip(found["sd"], 0.95 * sd, 1.05 * sd)


def test_priors_elsewhere_are_on_the_scale_of_their_own_column() -> None:
    design = fedppl.agree(fedppl.formula("y ~ age * arm + I(age ** 2)"), _FRAME, by="site").model.builder.design
    np.testing.assert_array_equal(design.left, design.scale)
    design = fedppl.agree(fedppl.formula("y ~ day * arm"), _FRAME, by="site").model.builder.design
    p, sd = (_FRAME["arm"] == "yes").mean(), _FRAME["day"].std(ddof=0)
    # Of day what arm:day leaves is its variance where arm is "no"; of arm and of arm:day what is apart from a line.
    expected = [np.sqrt(1 - p) * sd, np.nan, np.sqrt(p * (1 - p)) * sd]
    np.testing.assert_allclose(design.left[[0, 2]], [expected[0], expected[2]], rtol=1e-3)
    assert design.left[1] < 1e-4 * design.scale[1]
