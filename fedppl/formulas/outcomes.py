"""A client's outcomes in the numbers that a family takes, or what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedppl.formulas.agreement import Agreement, coded, is_text
from fedppl.formulas.family import Family
from fedppl.formulas.survival import NEVER
from fedppl.formulas.terms import Response
from fedppl.types import Array, DataError

_RULES: Mapping[str, tuple[str, Callable[[Array], Any]]] = {
    "real": ("finite numbers", np.isfinite),
    "positive": ("above 0", lambda y: y > 0),
    "unit": ("between 0 and 1, both excluded", lambda y: (y > 0) & (y < 1)),
    "binary": ("0 or 1", lambda y: (y == 0) | (y == 1)),
    "count": ("whole numbers from 0", lambda y: (y >= 0) & (y == np.floor(y))),
}


def outcome(
    family: Family, response: Response, data: Mapping[str, Any], agreement: Agreement, what: str
) -> dict[str, Array]:
    """Outcomes, and numbers of trials where the family has them, as arrays of the builder."""
    absent = [name for name in response.columns if name not in data]
    if absent:
        raise DataError(f"{what} lacks {absent} of the response {list(response.columns)}.")
    if family.outcome == "time":
        return times(response, data, what)
    name = response.columns[0]
    values = np.asarray(data[name])
    if family.outcome == "level":
        column = agreement.columns[name]
        texts = coded(column, values, agreement, f"{what}: column {name!r}")
        places = {level: place for place, level in enumerate(column.levels)}
        return {"outcome": np.array([places[text] for text in texts.tolist()])}
    if family.outcome == "binary" and is_text(values):
        column = agreement.columns[name]
        return {"outcome": (coded(column, values, agreement, what) == column.levels[1]).astype(np.int64)}
    if is_text(values):
        raise DataError(
            f"{what}: {name!r} has texts, and family {family.name!r} wants numbers; make numbers of them, or choose "
            "family 'bernoulli' for two levels, 'ordinal' for more."
        )
    rule, holds = _RULES[family.outcome]
    wrong = ~holds(values.astype(float))
    if np.any(wrong):
        where = int(np.argmax(wrong))
        raise DataError(
            f"{what}: {name!r} is {values[where]} in row {where}, and outcomes of family {family.name!r} are {rule}; "
            "correct such rows, or choose another family."
        )
    found = {"outcome": values.astype(np.int64 if family.outcome in ("binary", "count") else float)}
    if response.kind == "proportion":
        found["trials"] = _trials(found["outcome"], np.asarray(data[response.columns[1]]), response, what)
    return found


def require_two(family: Family, name: str, agreement: Agreement, what: str) -> None:
    """Refuse an outcome of texts that are more than two, or one, where a family has two."""
    levels = agreement.columns[name].levels
    if family.outcome == "binary" and levels and len(levels) != 2:
        raise DataError(
            f"{what}: {name!r} has the levels {list(levels)[:8]}, and family {family.name!r} wants two; recode its "
            "rows to two, or choose family 'ordinal' where they have an order and 'categorical' where they have none."
        )


def new_rows(family: Family, response: Response, data: Mapping[str, Any], rows: int, what: str) -> dict[str, Array]:
    """What the likelihood reads beside the outcome, at rows of which it is predicted."""
    if family.outcome == "time":
        return unlimited(response, rows)
    if response.kind != "proportion":
        return {}
    name = response.columns[1]
    if name not in data:
        raise DataError(f"{what} lacks {name!r}, the numbers of trials, of which successes are predicted; add it.")
    return {"trials": _trials(np.zeros(rows), np.asarray(data[name]), response, what)}


def weights(name: str, data: Mapping[str, Any], what: str) -> Array:
    """Numbers of rows that each row stands for."""
    if name not in data:
        raise DataError(f"{what} lacks the weights {name!r}.")
    found = np.asarray(data[name])
    if is_text(found):
        raise DataError(f"{what}: the weights {name!r} are texts; give numbers above 0.")
    wrong = ~((found > 0) & np.isfinite(found))
    if np.any(wrong):
        where = int(np.argmax(wrong))
        raise DataError(
            f"{what}: the weight {name!r} is {found[where]} in row {where}; weights are finite and above 0: leave out "
            "rows that are to count for nothing."
        )
    return found.astype(float)


def _trials(successes: Array, trials: Array, response: Response, what: str) -> Array:
    if is_text(trials):
        raise DataError(f"{what}: {response.columns[1]!r} has texts, and trials are whole numbers; correct the column.")
    wrong = ~(trials >= np.maximum(successes, 1)) | (trials != np.floor(trials))
    if np.any(wrong):
        where = int(np.argmax(wrong))
        raise DataError(
            f"{what}: {response.columns[0]!r} is {successes[where]} of {response.columns[1]!r} {trials[where]} in row "
            f"{where}; trials are whole numbers, at least 1 and at least the successes."
        )
    return trials.astype(np.int64)


# A client's times until an event in the numbers that survival families take, or what is wrong with them ---------------


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
