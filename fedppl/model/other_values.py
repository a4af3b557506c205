"""Other values that entries of a client's arrays might have had, column by column, of the size of what rows differ by.

What follows from a column's tails would tell of few rows whatever is computed of it: no value moves out of the bulk of
its column, and none further than that is wide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl.model._public import is_whole
from fedppl.types import Array

_FEW_VALUES = 10  # of a column that tells levels apart, rather than sizes
_TIMES = 16  # of a rare outcome half of the rows without it are to have it once
_TAIL = 0.05  # of the different values of a column, at each end
_FAINT, _FAINTER = 1e-3, 1e-6  # of the largest direction: below are squares of changes; of little ones, rounding
_LITTLE = 1e-7  # sds of a column: less than what lies between two of 2,000 values, and nine digits above rounding


class Alteration(NamedTuple):
    """An array as it is looked at, and with all of its entries changed; (n, ...) both."""

    name: str
    before: Array
    after: Array
    far: bool  # whether values go far from where they are
    faint: float  # of the largest direction of what changes: below it are powers of changes, and rounding


def alterations(name: str, value: Array) -> list[Alteration]:
    """Ways to change an array, each in columns whose changes are of one size; none where nothing changes."""
    changed = []
    for change in (_levels, _sizes, _steps, _little):
        before, after = value.copy(), value.copy()
        for place in np.ndindex(value.shape[1:]):
            here = (slice(None), *place)
            before[here], after[here] = change(value[here])
        if not np.array_equal(before, after):
            changed.append(Alteration(name, before, after, change is _sizes, _FAINTER if change is _little else _FAINT))
    return changed


def all_other(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Data of the same kind in which every entry has changed that has another value in its column to change to.

    Whole numbers keep to the values that there are, for they may be levels that a builder counts.
    """
    others = {}
    for name, value in arrays.items():
        after = np.array(value)
        if after.ndim:
            for place in np.ndindex(after.shape[1:]):
                here = (slice(None), *place)
                known, rank = np.unique(after[here], return_inverse=True)
                column = known[(rank + max(len(known) // 2, 1)) % len(known)]
                after[here] = _little(_steps(column)[1] if len(known) > len(column) // 2 else column)[1]
        others[name] = after
    return others


def repeated_rows(arrays: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Data in which rows have what others have, several times: in their order, then half of them what the others do."""
    rng = np.random.default_rng(3)
    lengths = {len(value) for value in arrays.values() if np.ndim(value)}
    for number in range(2 * _TIMES):
        taken = {}
        for length in lengths:
            order, taken[length] = rng.permutation(length), np.minimum(np.arange(length) + 1 + number, length - 1)
            if number >= _TIMES:
                taken[length] = np.arange(length)
                taken[length][order[: length // 2]] = order[length // 2 : 2 * (length // 2)]
        yield {name: value[taken[len(value)]] if np.ndim(value) else value for name, value in arrays.items()}


def _levels(column: Array) -> tuple[Array, Array]:
    """Of few values each goes to the next."""
    known, place = np.unique(column, return_inverse=True)
    if len(known) > _FEW_VALUES:
        return column, column
    return column, known[(place + 1) % len(known)]


def _sizes(column: Array) -> tuple[Array, Array]:
    """Of many values each goes to one that is far from it in order, both within the bulk."""
    known, place = np.unique(column, return_inverse=True)
    count = len(known)
    if count <= _FEW_VALUES or not np.all(np.isfinite(known)):
        return column, column
    low, high = (known[round(share * (count - 1))] for share in (_TAIL, 1.0 - _TAIL))
    return np.clip(column, low, high), np.clip(known[(place + count // 2) % count], low, high)


def _steps(column: Array) -> tuple[Array, Array]:
    """Of many whole numbers each goes one towards the middle, where order statistics stay what they are but for it."""
    if not is_whole(column) or len(np.unique(column)) <= _FEW_VALUES:
        return column, column
    inwards = np.where(column < np.median(column), 1, -1)
    return column, (column + inwards).astype(column.dtype)


def _little(column: Array) -> tuple[Array, Array]:
    """Reals move up or down, each by itself, by so little that they stay in their order, and outlying ones by less.

    What a square of theirs changes by is then of the size of the others'.
    """
    if is_whole(column) or not np.all(np.isfinite(column)):
        return column, column
    sign = np.random.default_rng(5).choice([-1.0, 1.0], size=len(column))
    low, middle, high = np.quantile(column, [0.25, 0.5, 0.75])
    away = np.abs(column - middle) / ((high - low) or np.std(column) or 1.0)
    return column, column + sign * (_LITTLE * np.std(column)) / np.maximum(1.0, away)


def altered_at(alteration: Alteration, rows: Any) -> Array:
    """The array in which these rows have changed."""
    value = alteration.before.copy()
    value[rows] = alteration.after[rows]
    return value
