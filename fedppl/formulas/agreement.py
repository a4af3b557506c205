"""What clients agree on before a formula means the same at all: levels, and constants to centre and scale by.

One exchange: counts of levels, and of numeric columns counts, sums and sums of squares.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedppl.types import Array, DataError

_LARGEST = 1e150  # of a mean square, whose own square is a number still
OTHER = "other"
_FEW_VALUES = 6


class Told(NamedTuple):
    """What one client tells of one column; of fewer rows than the policy wants, nothing but its kind."""

    rows: int  # 0 where they are too few to be told
    total: float  # Σ x of a numeric column
    squares: float  # Σ x²
    levels: Mapping[str, int]  # of another column, with at least so many rows as the policy wants
    withheld: bool  # whether rows have levels that are not told, or a numeric column's sums are not told
    text: bool = False


class Column(NamedTuple):
    """What all know of a column."""

    levels: tuple[str, ...]  # none of a numeric column; the first is the reference
    shares: tuple[float, ...]  # of all rows, by level
    mean: float
    sd: float


class Agreement(NamedTuple):
    """What all clients know, by column."""

    columns: Mapping[str, Column]
    rows: int
    others: bool  # whether rows of withheld levels are of the level "other"


def tell(data: Mapping[str, Any], names: Sequence[str], levels: Sequence[str], min_count: float) -> dict[str, Told]:
    """What a client tells of its columns; of `levels` those of numbers too.

    No number of rows between 1 and `min_count` - 1 leaves, nor can one of levels be had as a difference. Rows are told
    in whole multiples of `min_count`, rounded down, and so are those of levels: what is between them may be rows of
    levels that are not told, or what was rounded off. Sums are those of so many rows, with a sd of two digits and a
    mean that ends where the sd does, since exact ones would tell how many rows there are. They are withheld where fewer
    than `min_count` rows have another value than most: a sum of such tells how many; and where a column has few values,
    of which one is that rare. With a `min_count` of 1 all is
    exact.
    """
    found = {}
    for name in names:
        values = np.asarray(data[name])
        text = is_text(values) or name in levels
        if len(values) < min_count:
            found[name] = Told(0, 0.0, 0.0, {}, False, text)
        elif text:
            labels, counts = np.unique(as_texts(values), return_counts=True)
            every = {str(label): int(n) for label, n in zip(labels, counts, strict=True)}
            seen = _rounded(every, min_count)
            found[name] = Told(_whole(len(values), min_count), 0.0, 0.0, seen, len(seen) < len(every), True)
        else:
            found[name] = _sums(np.asarray(values, dtype=float), min_count)
    return found


def _sums(reals: Array, min_count: float) -> Told:
    counts = np.unique(reals, return_counts=True)[1]
    others = len(reals) - int(counts.max(initial=0))
    # An sd of equal numbers is rounding error, which depends on how many there are.
    rows = _whole(len(reals), min_count)
    # Of few values a mean and a sd are two equations for how many rows have each.
    rare = 1 < len(counts) <= _FEW_VALUES and bool(np.any(counts < min_count))
    if 0 < others < min_count or rare:
        return Told(rows, 0.0, 0.0, {}, True)
    with np.errstate(over="ignore", invalid="ignore"):  # who puts them together refuses what is no number
        if min_count <= 1:
            return Told(rows, float(reals.sum()), float(np.sum(reals**2)), {}, False)
        mean, sd = (reals.mean(), reals.std()) if others else (reals[0], np.float64(0.0))
        if 0 < sd < np.inf:
            step = 10.0 ** (np.floor(np.log10(sd)) - 1)
            mean, sd = np.round(mean / step) * step, np.round(sd / step) * step
        return Told(rows, float(rows * mean), float(rows * (sd**2 + mean**2)), {}, False)


def raised(told: Told, min_count: float) -> Told:
    """What was told before, as far as a larger `min_count` lets it be told again."""
    if told.rows < min_count:
        return Told(0, 0.0, 0.0, {}, False, told.text)
    rows, levels = _whole(told.rows, min_count), _rounded(told.levels, min_count)
    part = rows / told.rows if told.rows else 1.0
    withheld = told.withheld or len(levels) < len(told.levels)
    return Told(rows, told.total * part, told.squares * part, levels, withheld, told.text)


def _rounded(counts: Mapping[str, int], min_count: float) -> dict[str, int]:
    return {level: _whole(n, min_count) for level, n in counts.items() if n >= min_count}


def _whole(count: int, min_count: float) -> int:
    """The largest multiple of `min_count` that is not larger."""
    step = max(int(min_count), 1)
    return count // step * step


def agreed(
    told: Mapping[str, Mapping[str, Told]],
    order: Mapping[str, Sequence[str]] | None = None,
    *,
    others: bool = False,
    unscaled: Sequence[str] = (),
    closed: Sequence[str] = (),
    constant: Collection[str] = (),
    listed: Mapping[str, Sequence[str] | None] | None = None,
) -> Agreement:
    """What comes of it: the same levels in the same order at all clients, means and sds over all rows that were told.

    Parameters
    ----------
    told
        By client, and column.
    order
        Levels that are known before, by column, in their order.
    others
        Whether rows of withheld levels are of the level "other".
    unscaled
        Columns whose mean and sd nobody needs.
    closed
        Columns that have no level "other": outcomes.
    constant
        Columns that may have the same value in all rows.
    listed
        Orders of levels, of which rows need not have all, by column.

    Raises
    ------
    DataError
        If a column is numeric at one client and text at another, rows are of levels that were withheld and have no
        other, a column has one value alone, or no client tells of it.
    """
    columns = {}
    for name in next(iter(told.values())):
        parts = {client_id: one[name] for client_id, one in told.items()}
        text = [client_id for client_id, one in parts.items() if one.text]
        if text and len(text) < len(parts):
            odd = sorted(set(parts) - set(text))
            raise DataError(
                f"column {name!r} has numbers at {odd[:3]} and texts at {text[:3]}; give all clients one kind."
            )
        if name in (order or {}):
            columns[name] = _ordered(name, parts, list(map(str, (order or {})[name])))
        elif text:
            own = list((listed or {}).get(name) or ())
            columns[name] = _levels(name, parts, own, others=others, closed=name in closed)
        else:
            columns[name] = _constants(name, parts, needed=name not in unscaled, varies=name not in constant)
    rows = sum(next(iter(one.values())).rows for one in told.values()) if columns else 0
    return Agreement(columns, rows, others)


def _counts(parts: Mapping[str, Told]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in parts.values():
        for level, n in one.levels.items():
            counts[level] = counts.get(level, 0) + n
    return counts


def _levels(name: str, parts: Mapping[str, Told], listed: Sequence[str], *, others: bool, closed: bool) -> Column:
    counts = _counts(parts)
    # Of how many rows is not known: those that are not told among the levels, and one where that is none.
    withheld = {
        client_id: max(one.rows - sum(one.levels.values()), 1)
        for client_id, one in parts.items()
        if one.withheld or not one.rows
    }
    if withheld and not others:
        raise DataError(
            f"column {name!r} has rows of levels that too few rows have, at clients {list(withheld)[:5]}. Say "
            'withheld="other" to make one level of them, lower min_count, say the levels in formula(levels=...), or '
            "merge some before."
        )
    levels = [one for one in listed if one in counts] + sorted(set(counts) - set(listed), key=_order)
    if withheld and not closed:
        levels = [*(level for level in levels if level != OTHER), OTHER]
        counts[OTHER] = counts.get(OTHER, 0) + sum(withheld.values())
    if len(levels) < 2:
        remedy = "leave it out of the formula; an outcome has to vary"
        if withheld:
            remedy = (
                "say all its levels in formula(levels=...), or lower min_count, at sites that of their policies too"
            )
        told = " that enough rows have" if withheld else ""
        raise DataError(f"column {name!r} has the levels {levels} alone{told} at all clients; {remedy}.")
    total = sum(counts.values())
    return Column(tuple(levels), tuple(counts[level] / total for level in levels), 0.0, 1.0)


def _ordered(name: str, parts: Mapping[str, Told], order: list[str]) -> Column:
    """Levels that the user named, in that order; those that nobody has stay."""
    counts = _counts(parts)
    if missing := sorted(set(counts) - set(order)):
        if any(re.fullmatch(r"-?\d*\.\d*[1-9]\d*(e-?\d+)?", one) for one in missing):
            raise DataError(
                f"levels={{{name!r}: {order}}}, and {name!r} holds numbers with fractions; leave it out of levels=, or "
                "cut it into levels as a column before."
            )
        raise DataError(
            f"levels={{{name!r}: {order}}} lacks {missing[:8]}, which clients have; name them too, or "
            "recode their rows."
        )
    total = sum(counts.values())
    return Column(
        tuple(order), tuple(counts.get(one, 0) / total if total else 1 / len(order) for one in order), 0.0, 1.0
    )


def _constants(name: str, parts: Mapping[str, Told], *, needed: bool, varies: bool) -> Column:
    telling = [one for one in parts.values() if one.rows and not one.withheld]
    if not telling:
        if not needed:
            return Column((), (), 0.0, 1.0)
        raise DataError(
            f"no client tells of column {name!r}: all have too few rows, or too few with another value than most. "
            "Lower min_count, at sites that of their policies too, or bring several together as one client."
        )
    rows = sum(one.rows for one in telling)
    mean = sum(one.total for one in telling) / rows
    square = sum(one.squares for one in telling) / rows
    if not square < _LARGEST or (needed and varies and mean != 0 and square < 1 / _LARGEST):
        raise DataError(
            f"column {name!r} has a mean square of {square:.3g}, which leaves no digits for products; give it in "
            "another unit."
        )
    variance = max(square - mean**2, 0.0)
    if not variance > 1e-12 * mean**2:
        if not needed or not varies:
            return Column((), (), float(mean), 1.0)
        raise DataError(
            f"column {name!r} is {mean:.6g} in all rows of all clients, as far as their sums and sums of squares tell; "
            "where it varies about that, subtract the same constant everywhere. Else leave it out of the formula, "
            "which has an intercept; as a response it leaves nothing to be explained."
        )
    return Column((), (), float(mean), float(np.sqrt(variance)))


def coded(column: Column, values: Array, agreement: Agreement, what: str) -> Array:
    """A client's texts as the levels that all know."""
    require_present(values, what)
    texts = as_texts(values)
    unknown = sorted(set(np.unique(texts).tolist()) - set(column.levels))
    if unknown and OTHER in column.levels and agreement.others:
        return np.where(np.isin(texts, column.levels), texts, OTHER)
    if unknown:
        raise DataError(
            f"{what} has the levels {unknown[:4]}, and clients agreed on {list(column.levels)[:10]}; agree again with "
            "this client among them, or recode its rows."
        )
    return np.asarray(texts)


def require_present(values: Any, what: str) -> None:
    """Refuse rows whose level is missing: what stands for it would be taken for a level."""
    gone = np.asarray(pd.isna(np.asarray(values)))
    if np.any(gone):
        raise DataError(f"{what} has no value in row {int(np.argmax(gone))}; drop such rows, or impute them before.")


def is_text(values: Any) -> bool:
    """Whether a column holds texts."""
    return np.asarray(values).dtype.kind in "OUS"


def as_texts(values: Array) -> Array:
    """Levels as texts; whole numbers without a fraction, whatever numbers stand beside them."""
    if is_text(values):
        return values.astype(str)
    reals = values.astype(float)
    is_whole = (reals == np.floor(reals)) & (np.abs(reals) < 2**53)
    return np.where(is_whole, np.where(is_whole, reals, 0.0).astype(np.int64).astype(str), values.astype(str))


def _order(level: str) -> tuple[float, str]:
    """Numbers by size, then texts by letters."""
    try:
        return float(level), level
    except ValueError:
        return np.inf, level
