"""A client's times until an event in the numbers that survival families take, or what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedppl.formulas.agreement import is_text
from fedppl.formulas.survival import NEVER
from fedppl.formulas.terms import Response
from fedppl.types import Array, DataError


def times(response: Response, data: Mapping[str, Any], what: str) -> dict[str, Array]:
    """Times and their limits; or the times between which events are, and where in this each was seen."""
    first, second = (_numbers(name, data[name], what) for name in response.columns)
    return (_between if response.kind == "interval" else _right)(response.columns, first, second, what)


def size_of(response: Response, data: Mapping[str, Any]) -> Array:
    """Times as they are on average, for the scale that clients agree on: of an interval its middle."""
    first, second = (np.asarray(data[name]) for name in response.columns)
    if response.kind != "interval" or is_text(first) or is_text(second):
        return first
    return np.asarray(np.where(np.isfinite(second), (first + second) / 2.0, first))


def unlimited(response: Response, rows: int) -> dict[str, Array]:
    """What stands in the place of limits at new rows, of which the times themselves are predicted."""
    if response.kind == "interval":
        return {"lower": np.ones(rows), "upper": np.ones(rows)}
    return {"limit": np.full(rows, NEVER)}


def _right(names: tuple[str, ...], time: Array, event: Array, what: str) -> dict[str, Array]:
    _refuse(~((time > 0) & (time < NEVER)), names[0], time, what, "times are above 0 and finite")
    _refuse(~np.isin(event, (0, 1)), names[1], event, what, "events are 1, or 0 where there was none until the time")
    return {"outcome": time, "limit": np.where(event == 1, NEVER, time)}


def _between(names: tuple[str, ...], lower: Array, upper: Array, what: str) -> dict[str, Array]:
    _refuse(~((lower >= 0) & (lower < NEVER)), names[0], lower, what, "times are from 0, and finite")
    _refuse(
        ~((upper > 0) & (upper >= lower)), names[1], upper, what, f"it is above 0 and not below {names[0]!r}", lower
    )
    far = (upper >= NEVER) & np.isfinite(upper)
    _refuse(far, names[1], upper, what, f"times are below {NEVER:.2g}, or inf where there was no event", lower)
    nothing = (lower == 0) & ~(upper < NEVER)
    _refuse(nothing, names[1], upper, what, "from 0 to ever tells nothing of a time; leave the row out", lower)
    return {"outcome": lower, "lower": lower, "upper": np.minimum(upper, NEVER)}


def _refuse(wrong: Any, name: str, values: Array, what: str, rule: str, beside: Array | None = None) -> None:
    if np.any(wrong):
        where = int(np.argmax(wrong))
        more = "" if beside is None else f" after {beside[where]:g}"
        raise DataError(f"{what}: {name!r} is {values[where]:g}{more} in row {where}, and {rule}; correct such rows.")


def _numbers(name: str, values: Any, what: str) -> Array:
    if is_text(values):
        raise DataError(f"{what}: {name!r} has texts, and a time or an event is a number; recode its rows.")
    return np.asarray(values, dtype=float)
