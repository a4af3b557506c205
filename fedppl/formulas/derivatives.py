"""Derivatives of a formula's columns by one of those that it reads, row by row, by differences within their domain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from fedppl.types import Array, DataError, DeclarationError

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

    Raises
    ------
    DeclarationError
        If none is small enough in a row: a function rises without bound there, or jumps.
    """
    x = table[column].to_numpy(dtype=float)
    here = columns(table, what)
    best, error, before = np.zeros_like(here), np.full(here.shape, np.inf), np.full(here.shape, np.nan)
    nothing = 1e-2 * (np.abs(here) + 1.0) / sd  # of a slope, beside those that count
    for step in _STEPS * sd:
        with np.errstate(all="ignore"):
            found, size = _difference(columns, table, column, x, here, step, what)
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
    columns: Any, table: pd.DataFrame, column: str, x: Array, here: Array, step: float, what: str
) -> tuple[Array, Array]:
    """A difference quotient of each row, and the size of what it is of; NaN where no side is in the domain."""
    ends = {k: x + k * step for k in (1, -1)}
    sides = {k: _within(columns, table, column, end, what) for k, end in ends.items()}
    size = np.maximum(np.abs(here), np.fmax(np.abs(sides[1]), np.abs(sides[-1])))
    found = (sides[1] - sides[-1]) / (ends[1] - ends[-1])[:, None]
    for k in (1, -1):
        alone = np.isfinite(sides[k]).all(axis=1) & ~np.isfinite(sides[-k]).all(axis=1)
        if not np.any(alone):
            continue
        rows = table[alone].reset_index(drop=True)
        far = _within(columns, rows, column, x[alone] + 2 * k * step, what)
        # Of second order from one side.
        found[alone] = (4.0 * sides[k][alone] - far - 3.0 * here[alone]) / (2.0 * k * step)
    return found, size


def _within(columns: Any, table: pd.DataFrame, column: str, values: Array, what: str) -> Array:
    """Columns at other values of one; NaN in rows that lie outside of a function's domain."""
    moved = table.assign(**{column: values})
    found = columns(moved, None)
    some = np.flatnonzero(np.isfinite(found).all(axis=1))
    allowed = np.zeros(len(moved), dtype=bool)
    allowed[_allowed(columns, moved, some, what)] = True
    found[~allowed] = np.nan
    return np.asarray(found)


def _allowed(columns: Any, table: pd.DataFrame, rows: Any, what: str) -> Any:
    """Those of the rows that are refused neither with the others nor alone."""
    if not len(rows):
        return rows
    try:
        columns(table.iloc[rows].reset_index(drop=True), what)
    except DataError:
        halves = np.array_split(rows, 2) if len(rows) > 1 else []
        return np.concatenate([rows[:0], *(_allowed(columns, table, half, what) for half in halves)])
    return rows
