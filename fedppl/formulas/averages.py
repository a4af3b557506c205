"""Outcomes that a formula expects, averaged over rows, in NumPy: at draws of its variables and at changed columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedppl.formulas import design as designs
from fedppl.formulas.predictor import Spec, effect_labels, has_intercept, tag
from fedppl.types import Array, DeclarationError

_AT_ONCE = 2_000_000  # numbers
_WHOSE = "rows of a client"
_STEP = 1e-5  # of the linear predictor, in its size and at least in 1


class Rows(NamedTuple):
    """A client's rows: the columns right of ~, the groups, and how many rows each stands for."""

    table: pd.DataFrame
    groups: Mapping[int, Array]  # places in nested groups, by number of the group
    weights: Array


def rows_of(spec: Spec, arrays: Mapping[str, Any]) -> Rows:
    """The rows that arrays of the builder were made from."""
    first = next(iter(arrays.values())) if "outcome" not in arrays else arrays["outcome"]
    columns = {
        name: designs.from_plain(name, arrays[f"column_{name}"], spec.design.agreement) for name in spec.terms.columns
    }
    groups = {number: arrays[f"row_{number}"] for number, one in enumerate(spec.terms.groups) if len(one.factor) > 1}
    weights = np.asarray(arrays.get("weights", np.ones(len(first))), dtype=float)
    return Rows(pd.DataFrame(columns, index=np.arange(len(first))), groups, weights)


def at_levels(spec: Spec, rows: Rows, column: str, draws: Mapping[str, Array], at: float | None) -> dict[str, Array]:
    """Mean outcome were all rows of each level, and differences from the reference: name to (S,) or (S, K)."""
    levels = spec.design.agreement.columns[column].levels
    found = {}
    for level in levels:
        same = pd.Categorical([level] * len(rows.table), categories=list(levels), ordered=True)
        found[level] = averaged(spec, rows._replace(table=rows.table.assign(**{column: same})), draws, at)
    return found | {f"{level} - {levels[0]}": found[level] - found[levels[0]] for level in levels[1:]}


def slope(spec: Spec, rows: Rows, column: str, draws: Mapping[str, Array], at: float | None) -> dict[str, Array]:
    """Mean derivative of the outcome by a column: that of the linear predictor, and the outcome's along it."""
    columns = spec.design.side_by_side(rows.table, _WHOSE)
    sd = spec.design.agreement.columns[column].sd
    slopes = derivatives(spec.design.side_by_side, rows.table, column, sd, _WHOSE)

    def of(part: slice) -> Array:
        places = {number: one[part] for number, one in rows.groups.items()}
        eta = _eta(spec, columns[part], places, draws) + _intercept(spec, draws)
        along = _eta(spec, slopes[part], places, draws)
        # Of several predictors the direction: the step is theirs together.
        size = np.max(np.abs(along), axis=-1, keepdims=True) if spec.levels else np.abs(along)
        step = _STEP * np.maximum(1.0, np.abs(eta).max(axis=-1, keepdims=True) if spec.levels else np.abs(eta))
        step = step * along / np.where(size > 0, size, 1.0)
        high, low = (_mean(spec, eta + sign * step, draws, at) for sign in (1.0, -1.0))
        apart = np.where(size > 0, np.max(np.abs(step), axis=-1, keepdims=True) if spec.levels else np.abs(step), 1.0)
        rate = size / (2.0 * apart)
        return np.asarray((high - low) * (rate if high.ndim == rate.ndim else rate[..., None]))

    return {"slope": _over_rows(spec, rows, draws, of)}


def averaged(spec: Spec, rows: Rows, draws: Mapping[str, Array], at: float | None) -> Array:
    """Mean outcome over rows at every draw, (S,), or (S, K) of each level of an outcome that has levels."""
    columns = spec.design.side_by_side(rows.table, _WHOSE)

    def of(part: slice) -> Array:
        places = {number: one[part] for number, one in rows.groups.items()}
        return _mean(spec, _eta(spec, columns[part], places, draws) + _intercept(spec, draws), draws, at)

    return _over_rows(spec, rows, draws, of)


def _over_rows(spec: Spec, rows: Rows, draws: Mapping[str, Array], of: Callable[[slice], Array]) -> Array:
    """Weighted mean over rows of what is (S, n, ...) for some of them."""
    count, size = len(rows.table), len(next(iter(draws.values())))
    width = max(len(spec.scales.levels), 1) * max(len(spec.scales.cuts), 1)
    step = max(1, _AT_ONCE // (size * width))
    parts = [slice(start, start + step) for start in range(0, count, step)]
    total: Any = sum(np.tensordot(of(part), rows.weights[part], axes=(1, 0)) for part in parts)
    return np.asarray(total / rows.weights.sum())


def by_row(spec: Spec, rows: Rows, draws: Mapping[str, Array], at: float | None) -> Array:
    """Mean outcome of every row at every draw, (S, n), or (S, n, K) of each level of an outcome that has levels."""
    columns = spec.design.side_by_side(rows.table, _WHOSE)
    return _mean(spec, _eta(spec, columns, rows.groups, draws) + _intercept(spec, draws), draws, at)


def _mean(spec: Spec, eta: Array, draws: Mapping[str, Array], at: float | None) -> Array:
    """Outcomes at these linear predictors, (S, n) or (S, n, K)."""
    parameters = {name: draws[name][:, None] for name in spec.family.parameters(spec.scales)}
    return spec.family.mean(eta, parameters, spec.scales, at)


def _intercept(spec: Spec, draws: Mapping[str, Array]) -> Any:
    """Draws of it, (S, 1) or (S, 1, levels)."""
    tail = (len(spec.levels),) if spec.levels else ()
    return draws["Intercept"].reshape(-1, 1, *tail) if has_intercept(spec.terms, spec.family) else 0.0


def _eta(spec: Spec, columns: Array, places: Mapping[int, Array], draws: Mapping[str, Array]) -> Array:
    """The linear predictor without its intercept, (S, n) or (S, n, levels), of all columns side by side."""
    size, count = len(next(iter(draws.values()))), len(columns)
    tail = (len(spec.levels),) if spec.levels else ()
    eta, at = np.zeros((size, count, *tail)), 0
    for name in spec.terms.common:
        width = len(spec.design.labels[name])
        eta = eta + _times(columns[:, at : at + width], draws[name].reshape(size, width, *tail))
        at += width
    if spec.terms.offsets:
        eta, at = eta + columns[:, at], at + 1
    for number, group in enumerate(spec.terms.groups):
        width = len(effect_labels(spec, number)) // max(len(spec.levels), 1)
        own, effects = columns[:, at : at + width], draws[f"{tag(group)}_effects"]
        at += width
        if len(group.factor) == 1:
            eta = eta + _times(own, effects.reshape(size, width, *tail))
        else:
            of_rows = effects[:, places[number]].reshape(size, count, width, *tail)
            eta = eta + np.sum(own.reshape(*own.shape, *(1 for _ in tail)) * of_rows, axis=2)
    return eta


def _times(columns: Array, beta: Array) -> Array:
    """Columns (n, p) by coefficients (S, p, ...): (S, n, ...)."""
    return np.asarray(np.moveaxis(np.tensordot(columns, beta, axes=(1, 1)), 0, 1))


_STEPS = 10.0 ** -np.arange(2.0, 16.0)  # in sds of the column
_ROUNDING = 4.0 * float(np.finfo(float).eps)
_EXACT = 1e-4  # relative to the slope


def derivatives(
    columns: Callable[[pd.DataFrame, str | None], Array], table: pd.DataFrame, column: str, sd: float, what: str
) -> Array:
    """Derivatives of ``columns(table, what)`` by a column, (n, q).

    A function has a length of its own at every row, as the logarithm does, and may end there, as the square root does
    at 0 and a spline at its bounds. So each row is given, of many steps, the one that agrees best with a step ten times
    as long, rounding being counted; to one side alone where the other is beyond the function's domain.

    Raises `DeclarationError` if none is small enough in a row: a function rises without bound there, or jumps.
    """
    x = table[column].to_numpy(dtype=float)
    here = columns(table, what)
    best, error, before = np.zeros_like(here), np.full(here.shape, np.inf), np.full(here.shape, np.nan)
    nothing = 1e-2 * (np.abs(here) + 1.0) / sd  # of a slope, beside those that count
    for step in _STEPS * sd:
        with np.errstate(all="ignore"):
            found, size = _difference(columns, table, column, x, here, step)
            wrong = np.abs(found - before) + _ROUNDING * (size + np.abs(x[:, None] * found)) / step
            wrong = wrong / (np.abs(found) + nothing)
        better = wrong < error
        best, error, before = np.where(better, found, best), np.where(better, wrong, error), found
    unknown = ~(error <= _EXACT)
    if np.any(unknown):
        row = int(np.argmax(unknown.any(axis=1)))
        raise DeclarationError(
            f"{what}: a function of {column!r} has no finite slope in row {row}, where {column!r} is {x[row]:.6g}: it "
            "rises without bound there, or jumps. Marginal effects are mean slopes; use a function that has one "
            "everywhere, such as np.log1p, or compare outcomes at two values of the column, by fit.client(id, "
            "predict=...)."
        )
    return best


def _difference(
    columns: Any, table: pd.DataFrame, column: str, x: Array, here: Array, step: float
) -> tuple[Array, Array]:
    """A difference quotient of each row, and the size of what it is of; NaN where no side is in the domain."""
    ends = {k: x + k * step for k in (1, -1)}
    sides = {k: _within(columns, table, column, end) for k, end in ends.items()}
    size = np.maximum(np.abs(here), np.fmax(np.abs(sides[1]), np.abs(sides[-1])))
    found = (sides[1] - sides[-1]) / (ends[1] - ends[-1])[:, None]
    for k in (1, -1):
        alone = np.isfinite(sides[k]).all(axis=1) & ~np.isfinite(sides[-k]).all(axis=1)
        if not np.any(alone):
            continue
        rows = table[alone].reset_index(drop=True)
        far = _within(columns, rows, column, x[alone] + 2 * k * step)
        # Of second order from one side.
        found[alone] = (4.0 * sides[k][alone] - far - 3.0 * here[alone]) / (2.0 * k * step)
    return found, size


def _within(columns: Any, table: pd.DataFrame, column: str, values: Array) -> Array:
    """Columns at other values of one; NaN in rows that lie outside of a function's domain."""
    found = np.asarray(columns(table.assign(**{column: values}), None))
    found[~np.isfinite(found).all(axis=1)] = np.nan
    return found
