"""Slopes of a formula's columns in closed form, wherever a function's domain ends and however small its rows are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from scipy.interpolate import BSpline

import fedppl
from fedppl import DeclarationError
from fedppl.formulas.predictor import derivatives, rows_of, slope

_RNG = np.random.default_rng(6)
_SMALL = np.concatenate([[1e-6, 0.02, 0.25, 0.25], np.exp(_RNG.normal(1, 1, 34)), [1500.0, 3e6]])  # positive
_FROM_0 = np.concatenate([[0.0, 0.0, 1e-9], np.exp(_RNG.normal(1, 2, 36)), [1e6]])
_FAR = 1.7e9 + _RNG.uniform(0, 1e5, 40)
_AGES = np.concatenate([[0.0, 80.0, 30.0], _RNG.uniform(0, 80, 37)])
_KNOTS = [30.0, 60.0]


def _found(text: str, x: Any, **constants: Any) -> Any:
    frame = pd.DataFrame({"site": np.repeat(list("abcd"), 10), "x": x, "z": _RNG.normal(size=40)})
    frame["y"] = _RNG.normal(size=40)
    spec = fedppl.agree(fedppl.formula(text, constants=constants), frame, by="site").model.builder.spec
    column = spec.design.agreement.columns["x"]
    table = frame[list(spec.terms.columns)]
    return derivatives(spec.design.side_by_side, table, "x", column.sd, "rows"), frame, column


@pytest.mark.parametrize(
    ("text", "x", "right"),
    [
        ("np.log(x)", _SMALL, lambda x: 1 / x),
        ("I(1 / x)", _SMALL, lambda x: -1 / x**2),
        ("np.sqrt(x)", _SMALL, lambda x: 0.5 / np.sqrt(x)),
        ("np.log1p(x)", _FROM_0, lambda x: 1 / (1 + x)),
        ("I(x ** 3)", _FROM_0, lambda x: 3 * x**2),
        ("np.exp(-x)", _FROM_0, lambda x: -np.exp(-x)),
        ("np.abs(x)", _FAR, lambda x: np.ones_like(x)),
        ("np.maximum(x, 5)", _FROM_0, lambda x: 1.0 * (x > 5)),
    ],
)
def test_slopes_are_those_of_the_function_at_every_row(text: str, x: Any, right: Any) -> None:
    found, *_ = _found(f"y ~ {text} + z", x)
    assert_allclose(found[:, 0], right(x), rtol=1e-5, atol=1e-9)
    assert_allclose(found[:, 1], 0.0)


def test_slopes_of_centred_columns_of_offsets_and_of_effects_are_found_too() -> None:
    found, frame, column = _found("y ~ scale(x) * z + offset(np.log(x)) + (1 + center(x) | site)", _FAR)
    x, z = frame["x"].to_numpy(), frame["z"].to_numpy()
    # scale(x), z, scale(x):z, the offset, the intercept's effect and the slope's
    expected = [np.full(40, 1 / column.sd), 0 * z, z / column.sd, 1 / x, 0 * z, np.ones(40)]
    assert_allclose(found.T, expected, rtol=1e-5, atol=1e-12)


def test_slopes_of_splines_at_their_bounds_are_from_within() -> None:
    """Columns are combinations of a basis and a constant, however they are centred, and slopes of its derivatives."""
    text = "y ~ bs(x, knots=k, lower_bound=0, upper_bound=80)"
    found, frame, _ = _found(text, _AGES, k=_KNOTS)
    built = fedppl.agree(fedppl.formula(text, constants={"k": _KNOTS}), frame, by="site").model.builder
    places = np.concatenate([np.zeros(4), _KNOTS, np.full(4, 80.0)])
    bases = [BSpline(places, np.eye(6)[k], 3) for k in range(6)]
    values, slopes = (np.stack([one(_AGES) for one in of], axis=1) for of in (bases, [b.derivative() for b in bases]))
    combined, *_ = np.linalg.lstsq(values, built.spec.design.common(frame[["x"]], "rows"), rcond=None)
    assert_allclose(found, slopes @ combined, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("text", "at"), [("np.sqrt(x)", 0.0), ("I(x > 1500)", None), ("np.floor(x)", None)])
def test_a_function_without_a_slope_is_refused(text: str, at: float | None) -> None:
    x = np.arange(40.0) if at is None else _FROM_0
    x = np.where(x == 39.0, 1500.0, x) if "1500" in text else x
    with pytest.raises(DeclarationError, match="'x' has no finite slope in row"):
        _found(f"y ~ {text}", x)


_OUTCOMES = {
    "bernoulli": lambda n: np.arange(n) % 2,
    "gamma": lambda n: 1.0 + np.arange(n) % 3,
    "ordinal": lambda n: np.arange(n) % 3,
    "categorical": lambda n: np.array(list("abc"))[np.arange(n) % 3],
}


@pytest.mark.parametrize("family", _OUTCOMES)
def test_mean_slopes_are_the_chain_rules(family: str) -> None:
    """Of η = b log x: with the logit p(1 − p) b / x, with the log μ b / x; sums of probabilities have none."""
    x = np.exp(np.random.default_rng(1).normal(0, 2, 40))
    frame = pd.DataFrame({"site": np.repeat(list("abcd"), 10), "x": x, "y": _OUTCOMES[family](40)})
    levels = {"levels": {"y": [0, 1, 2]}} if family == "ordinal" else {}
    model = fedppl.formula("y ~ np.log(x)", family, **levels)
    built = fedppl.agree(model, frame, by="site").model.builder
    arrays = built.read("all", frame)
    rows = rows_of(built.spec, {key: arrays[name] for key, name in built.containers.items() if name in arrays})
    b, a = np.array([0.7, -0.4]), np.array([0.3, 0.1])
    draws = {"np.log(x)": b, "Intercept": a, "alpha": np.ones(2)}
    if family == "ordinal":
        draws |= {"threshold": np.array([[-1.0, 1.0], [-0.5, 2.0]])}
    if family == "categorical":
        draws = {"np.log(x)": np.array([[0.7, 0.2], [-0.4, 0.1]]), "Intercept": np.array([[0.3, 0.0], [0.1, 1.0]])}
    found = slope(built.spec, rows, "x", draws, None)["slope"]
    if family in ("bernoulli", "gamma"):
        eta = a[:, None] + b[:, None] * np.log(x)
        p = 1 / (1 + np.exp(-eta))
        inner = p * (1 - p) if family == "bernoulli" else np.exp(eta)
        assert_allclose(found, np.mean(inner * b[:, None] / x, axis=1), rtol=1e-6)
        return
    assert found.shape == (2, 3)
    assert_allclose(found.sum(axis=1), 0.0, atol=1e-9)
    if family == "ordinal":
        below = 1 / (1 + np.exp(-(draws["threshold"][:, 0, None] - b[:, None] * np.log(x))))
        assert_allclose(found[:, 0], np.mean(-below * (1 - below) * b[:, None] / x, axis=1), rtol=1e-6)
    else:
        both, first = draws["np.log(x)"], draws["Intercept"]
        weight = np.exp(first[:, None, :] + both[:, None, :] * np.log(x)[None, :, None])
        p = weight / (1 + weight.sum(axis=-1, keepdims=True))
        mean = np.sum(p * both[:, None, :], axis=-1, keepdims=True)
        assert_allclose(found[:, 1:], np.mean(p * (both[:, None, :] - mean) / x[None, :, None], axis=1), rtol=1e-6)
