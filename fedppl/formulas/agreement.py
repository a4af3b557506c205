"""What clients agree on before a formula means the same at all: levels, and constants to centre and scale by.

One exchange: counts of levels, and of numeric columns counts, sums and sums of squares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl.types import Array, DataError

OTHER = "other"


class Told(NamedTuple):
    """What one client tells of one column."""

    rows: int
    total: float  # Σ x of a numeric column
    squares: float  # Σ x²
    levels: Mapping[str, int]  # of another column, with at least so many rows as the policy wants
    withheld: int  # rows of levels with fewer


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


def tell(data: Mapping[str, Any], names: Sequence[str], levels: Sequence[str], min_count: int) -> dict[str, Told]:
    """What a client tells of its columns; of `levels` those of numbers too."""
    found = {}
    for name in names:
        values = np.asarray(data[name])
        if is_text(values) or name in levels:
            labels, counts = np.unique(as_texts(values), return_counts=True)
            seen = {str(label): int(n) for label, n in zip(labels, counts, strict=True) if n >= min_count}
            found[name] = Told(len(values), 0.0, 0.0, seen, int(len(values) - sum(seen.values())))
        else:
            reals = np.asarray(values, dtype=float)
            found[name] = Told(len(reals), float(reals.sum()), float(np.sum(reals**2)), {}, 0)
    return found


def agreed(
    told: Mapping[str, Mapping[str, Told]], order: Mapping[str, Sequence[str]] | None = None, *, others: bool = False
) -> Agreement:
    """What comes of it: the same levels in the same order at all clients, means and sds over all rows.

    Raises
    ------
    DataError
        If a column is numeric at one client and text at another, rows are of levels that were withheld and have no
        other, or a column has one value alone.
    """
    columns = {}
    for name in next(iter(told.values())):
        parts = {client_id: one[name] for client_id, one in told.items()}
        text = [client_id for client_id, one in parts.items() if one.levels or one.withheld]
        if text and len(text) < len(parts):
            odd = sorted(set(parts) - set(text))
            raise DataError(
                f"column {name!r} has numbers at {odd[:3]} and texts at {text[:3]}; give all clients one kind."
            )
        found = _levels(name, parts, others=others) if text else _constants(name, parts)
        columns[name] = _ordered(name, found, list(map(str, (order or {})[name]))) if name in (order or {}) else found
    rows = sum(next(iter(one.values())).rows for one in told.values()) if columns else 0
    return Agreement(columns, rows, others)


def _levels(name: str, parts: Mapping[str, Told], *, others: bool) -> Column:
    counts: dict[str, int] = {}
    for one in parts.values():
        for level, n in one.levels.items():
            counts[level] = counts.get(level, 0) + n
    withheld = {client_id: one.withheld for client_id, one in parts.items() if one.withheld}
    if withheld and not others:
        raise DataError(
            f"column {name!r} has rows of levels that too few rows have: {dict(list(withheld.items())[:5])} by client. "
            'Say withheld="other" to make one level of them, lower min_count, or merge levels before.'
        )
    levels = sorted(counts, key=_order)
    if withheld:
        levels = [*(level for level in levels if level != OTHER), OTHER]
        counts[OTHER] = counts.get(OTHER, 0) + sum(withheld.values())
    if len(levels) < 2:
        raise DataError(f"column {name!r} has the level {levels} alone at all clients; leave it out of the formula.")
    total = sum(counts.values())
    return Column(tuple(levels), tuple(counts[level] / total for level in levels), 0.0, 1.0)


def _ordered(name: str, column: Column, order: list[str]) -> Column:
    """In the order that the user gave; levels that nobody has stay."""
    if set(column.levels) - set(order):
        raise DataError(
            f"levels={{{name!r}: {order}}} lacks {sorted(set(column.levels) - set(order))}, which clients have."
        )
    shares = dict(zip(column.levels, column.shares, strict=True))
    return Column(tuple(order), tuple(shares.get(level, 0.0) for level in order), 0.0, 1.0)


def _constants(name: str, parts: Mapping[str, Told]) -> Column:
    rows = sum(one.rows for one in parts.values())
    mean = sum(one.total for one in parts.values()) / rows
    variance = max(sum(one.squares for one in parts.values()) / rows - mean**2, 0.0)
    if not variance > 1e-12 * mean**2:
        raise DataError(
            f"column {name!r} is {mean:.6g} in all rows of all clients; leave it out of the formula, which has an "
            "intercept."
        )
    return Column((), (), float(mean), float(np.sqrt(variance)))


def strange(told: Mapping[str, Mapping[str, Told]]) -> list[str]:
    """Numeric columns that are on another scale at one client than at all others, in words."""
    found = []
    for name in next(iter(told.values())):
        size = {k: np.sqrt(one[name].squares / max(one[name].rows, 1)) for k, one in told.items()}
        middle = float(np.median([value for value in size.values() if value > 0] or [0.0]))
        for client_id, value in size.items():
            if len(size) > 2 and middle > 0 and value > 0 and not 1 / 30 < value / middle < 30:
                found.append(f"{name!r} at client {client_id!r} is of size {value:.3g}, at most others of {middle:.3g}")
    return found


def coded(column: Column, values: Array, agreement: Agreement, what: str) -> Array:
    """A client's texts as the levels that all know."""
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


def is_text(values: Any) -> bool:
    """Whether a column holds texts."""
    return np.asarray(values).dtype.kind in "OUS"


def as_texts(values: Array) -> Array:
    """Levels as texts; whole numbers without a fraction."""
    if not is_text(values) and np.all(values == np.floor(values.astype(float))):
        return values.astype(np.int64).astype(str)
    return values.astype(str)


def _order(level: str) -> tuple[float, str]:
    """Numbers by size, then texts by letters."""
    try:
        return float(level), level
    except ValueError:
        return np.inf, level
