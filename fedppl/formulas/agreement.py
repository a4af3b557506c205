"""Agreement of clients on levels, and on means and sds to centre and scale by, so that a formula means the same at all.

One exchange: clients send counts of levels, and counts, sums and sums of squares of numeric columns.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedppl.data.frames import is_text
from fedppl.types import Array, DataError

_LARGEST = 1e150  # largest mean square whose square does not overflow
OTHER = "other"
_MOST_TIMES = 10.0  # times the others' median of rows that a client counts for at most
_MEDIANS = 5  # clients from which on medians bound the influence of one that lies
_MAD = 1.4826  # sd of a normal distribution per median absolute deviation
_TAIL = 10  # one value in so many at each end of a column is clipped
_SMALLEST = 1e-150  # smallest sd
FEWEST_PARTS = 4  # times `min_count` rows that a client needs to send sums


class Told(NamedTuple):
    """Summary of one column at one client; of fewer rows than the policy requires, its kind alone."""

    rows: int  # 0 where they are too few
    total: float = 0.0  # Σ x of a numeric column
    squares: float = 0.0  # Σ x²
    levels: Mapping[str, int] = {}  # rows by level of another column, of levels with enough rows
    withheld: bool = False  # whether enough rows have levels that are not listed, or sums of numbers are withheld
    text: bool = False


class Column(NamedTuple):
    """The agreed levels, or mean and sd, of a column."""

    levels: tuple[str, ...]  # empty for a numeric column; the first is the reference
    shares: tuple[float, ...]  # shares of all rows, by level
    mean: float = 0.0
    sd: float = 1.0


class Agreement(NamedTuple):
    """Agreed columns by name."""

    columns: Mapping[str, Column]
    rows: int
    others: bool  # whether rows of withheld levels get the level "other"


def tell(
    data: Mapping[str, Any], names: Sequence[str], levels: Sequence[str], min_count: float, *, here: bool = False
) -> dict[str, Told]:
    """Summaries of a client's columns; columns named in `levels` are levels though they be numbers.

    Levels of fewer than `min_count` rows leave no trace, unless their rows together reach it or are `here`, in this
    process. Numbers of rows are rounded down to its multiples, those of levels to multiples of twice it, so that a rare
    level's rows, moved from a level with a round number of them, change no count. Of numbers the `min_count` - 1
    largest and smallest are clipped, or a tenth at each end; sds are rounded to powers of √2, means to halves of sds.
    With 1 all is exact.
    """
    summaries = {}
    for name in names:
        values = np.asarray(data[name])
        text = is_text(values) or name in levels
        if len(values) < min_count:
            summaries[name] = Told(0, text=text)
        elif text:
            labels, counts = np.unique(as_texts(values), return_counts=True)
            by_label = zip(labels.tolist(), counts.tolist(), strict=True)
            counted = {label: _window(n, min_count) for label, n in by_label if n >= min_count}
            left_out = int(counts[counts < min_count].sum())
            rows = max(_whole(len(values), min_count), sum(counted.values()))
            summaries[name] = Told(rows, levels=counted, withheld=left_out >= (1 if here else min_count), text=True)
        else:
            summaries[name] = _sums(np.asarray(values, dtype=float), min_count)
    return summaries


def _sums(reals: Array, min_count: float) -> Told:
    with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite are refused when pooled
        if min_count <= 1:
            return Told(len(reals), float(reals.sum()), float(np.sum(reals**2)))
        rows, few = _whole(len(reals), min_count), int(min_count) - 1
        if len(reals) < FEWEST_PARTS * min_count:  # most of so few rows would be clipped
            return Told(rows, withheld=True)
        ordered = np.sort(reals)
        for beyond_them in (max(few, len(reals) // _TAIL), few):
            low, high = float(ordered[beyond_them]), float(ordered[-beyond_them - 1])
            if low < high:
                break
        else:
            return Told(rows, rows * low, rows * low**2)
        clipped = np.clip(reals, low, high)
        sd = float(2.0 ** (np.round(2.0 * np.log2(max(clipped.std(), _SMALLEST))) / 2.0))
        mean = float(np.round(clipped.mean() / (sd / 2.0)) * (sd / 2.0))
        return Told(rows, rows * mean, rows * (sd**2 + mean**2))


def raised(summary: Told, min_count: float) -> Told:
    """An earlier summary, reduced to a larger `min_count`."""
    if summary.rows < min_count:
        return Told(0, text=summary.text)
    levels = {level: _window(n, min_count) for level, n in summary.levels.items() if n >= min_count}
    rows = max(_whole(summary.rows, min_count), sum(levels.values()))
    part = rows / summary.rows if summary.rows else 1.0
    withheld = summary.withheld or len(levels) < len(summary.levels)
    return Told(rows, summary.total * part, summary.squares * part, levels, withheld, summary.text)


def _whole(count: int, min_count: float) -> int:
    """Round down to a multiple of `min_count`."""
    step = max(int(min_count), 1)
    return count // step * step


def _window(count: int, min_count: float) -> int:
    """Round to the multiple of 2 `min_count` whose window has a count; windows end `min_count` - 1 below multiples."""
    few = int(min_count)
    return count if few <= 1 else max(2 * few, (count + few - 1) // (2 * few) * 2 * few)


def agreed(
    clients: Mapping[str, Mapping[str, Told]],
    order: Mapping[str, Sequence[str]] | None = None,
    *,
    others: bool = False,
    unscaled: Sequence[str] = (),
    closed: Sequence[str] = (),
    constant: Collection[str] = (),
    listed: Mapping[str, Sequence[str] | None] | None = None,
    believed: bool = True,
) -> Agreement:
    """Pool clients' summaries: the same levels in the same order at all clients, and means and sds over all rows.

    By column, `order` has all levels in their order, and `listed` an order of levels of which some may not occur. With
    `others` rows of withheld levels get the level "other", except in `closed` columns, which are outcomes. Columns that
    are `unscaled` need no mean and sd; `constant` ones may have one value. Unless `believed` a client counts for at
    most ten times the median of the others' rows, from five clients on for it, and means and sds are medians.
    """
    order, listed, rows = order or {}, listed or {}, 0
    columns: dict[str, Column] = {}
    for name, parts in by_column(clients):
        parts = parts if believed else bounded(parts)
        rows = sum(summary.rows for summary in parts.values()) if not columns else rows
        text = [client_id for client_id, summary in parts.items() if summary.text]
        if text and len(text) < len(parts):
            numeric = sorted(set(parts) - set(text))
            raise DataError(f"column {name!r} has numbers at {numeric[:3]} and texts at {text[:3]}; give one kind.")
        if name in order:
            columns[name] = _ordered(name, parts, list(map(str, order[name])))
        elif text:
            columns[name] = _levels(name, parts, listed.get(name) or (), others=others, closed=name in closed)
        else:
            needed, varies = name not in unscaled, name not in constant
            columns[name] = _constants(name, parts, needed=needed, varies=varies, middle=not believed)
    return Agreement(columns, rows, others)


def by_column(clients: Mapping[str, Mapping[str, Told]]) -> Iterator[tuple[str, dict[str, Told]]]:
    """Summaries of each column by client."""
    for name in next(iter(clients.values()), {}):
        yield name, {client_id: summaries[name] for client_id, summaries in clients.items()}


def bounded(parts: Mapping[str, Told]) -> dict[str, Told]:
    """Clients' summaries of a column, scaled down to the rows that each may count for."""
    times, scaled = _MOST_TIMES if len(parts) < _MEDIANS else 1.0, dict(parts)
    for client_id, told in parts.items():
        most = times * _others_rows(parts, client_id)
        if told.rows > most:
            part = most / told.rows
            levels = {level: max(round(n * part), 1) for level, n in told.levels.items()}
            total, squares = told.total * part, told.squares * part
            scaled[client_id] = Told(round(most), total, squares, levels, told.withheld, told.text)
    return scaled


def _others_rows(parts: Mapping[str, Told], client_id: str) -> float:
    rows = [summary.rows for other, summary in parts.items() if other != client_id and summary.rows]
    return float(np.median(rows)) if rows else np.inf


def _levels(name: str, parts: Mapping[str, Told], listed: Sequence[str], *, others: bool, closed: bool) -> Column:
    counts = sum((Counter(summary.levels) for summary in parts.values()), Counter[str]())
    # The number of withheld rows is not known: it is estimated by rows without a listed level, and is at least one.
    withheld = {
        client_id: max(item.rows - sum(item.levels.values()), 1)
        for client_id, item in parts.items()
        if item.withheld or not item.rows
    }
    if withheld and not others:
        remedy = 'lower min_count, name them in formula(levels=...), or pass withheld="other"'
        raise DataError(f"column {name!r} has levels of too few rows, at clients {list(withheld)[:5]}; {remedy}.")
    levels = [item for item in listed if item in counts] + sorted(set(counts) - set(listed), key=_order)
    if withheld and not closed:
        levels = [*(level for level in levels if level != OTHER), OTHER]
        counts[OTHER] += sum(withheld.values())
    if len(levels) < 2:
        remedy = "leave it out of the formula, name rare levels in formula(levels=...), or lower min_count"
        raise DataError(f"column {name!r} has only the levels {levels} with enough rows; {remedy}.")
    total = sum(counts.values())
    return Column(tuple(levels), tuple(counts[level] / total for level in levels))


def _ordered(name: str, parts: Mapping[str, Told], order: list[str]) -> Column:
    """Levels in the user's order, with those that do not occur."""
    counts = sum((Counter(summary.levels) for summary in parts.values()), Counter[str]())
    if missing := sorted(set(counts) - set(order)):
        if any(re.fullmatch(r"-?\d*\.\d*[1-9]\d*(e-?\d+)?", level) for level in missing):
            raise DataError(f"levels={{{name!r}: {order}}}: it holds numbers with fractions; leave it out of levels=.")
        raise DataError(f"levels={{{name!r}: {order}}} lacks {missing[:8]}, which clients have; name them too.")
    total = sum(counts.values())
    return Column(tuple(order), tuple(counts[level] / total if total else 1 / len(order) for level in order))


def _constants(name: str, parts: Mapping[str, Told], *, needed: bool, varies: bool, middle: bool) -> Column:
    telling = [summary for summary in parts.values() if summary.rows and not summary.withheld]
    if not telling:
        if not needed:
            return Column((), ())
        remedy = "lower min_count, also of sites' policies, or join several clients to one"
        rule = f"it takes {FEWEST_PARTS} times min_count rows"
        raise DataError(f"no client can send a summary of column {name!r}: {rule}; {remedy}.")
    mean, square = _middle(telling) if middle and len(telling) >= _MEDIANS else _pooled(telling)
    if not square < _LARGEST or (needed and varies and mean != 0 and square < 1 / _LARGEST):
        raise DataError(
            f"column {name!r} has the mean square {square:.3g}, which over- or underflows; give it in another unit."
        )
    variance = max(square - mean**2, 0.0)
    if not variance > 1e-12 * mean**2:
        if not needed or not varies:
            return Column((), (), float(mean))
        remedy = "leave it out of the formula, or subtract the same constant everywhere; a response has to vary"
        raise DataError(f"column {name!r} is {mean:.6g} in all rows, up to rounding; {remedy}.")
    return Column((), (), float(mean), float(np.sqrt(variance)))


def _pooled(telling: Sequence[Told]) -> tuple[float, float]:
    """Mean and mean square over all rows."""
    rows = sum(summary.rows for summary in telling)
    return sum(summary.total for summary in telling) / rows, sum(summary.squares for summary in telling) / rows


def _middle(telling: Sequence[Told]) -> tuple[float, float]:
    """Mean and mean square by medians over clients, which no single client moves far."""
    rows, total, squares = np.array([summary[:3] for summary in telling], dtype=float).T
    means = total / rows
    mean = float(np.median(means))
    variance = float(np.median(np.maximum(squares / rows - means**2, 0.0)))
    variance += float(_MAD * np.median(np.abs(means - mean))) ** 2
    if not variance > 1e-12 * mean**2:  # the column varies at few clients only
        return _pooled(telling)
    return mean, variance + mean**2


def coded(column: Column, values: Array, agreement: Agreement, what: str) -> Array:
    """A client's texts as agreed levels."""
    require_present(values, what)
    texts = as_texts(values)
    unknown = sorted(set(np.unique(texts).tolist()) - set(column.levels))
    if unknown and OTHER in column.levels and agreement.others:
        return np.where(np.isin(texts, column.levels), texts, OTHER)
    if unknown:
        raise DataError(f"{what} has the levels {unknown[:4]}; agreed are {list(column.levels)[:10]}; recode its rows.")
    return np.asarray(texts)


def require_present(values: Any, what: str) -> None:
    """Refuse rows whose level is missing."""
    gone = np.asarray(pd.isna(np.asarray(values)))
    if np.any(gone):
        raise DataError(f"{what} has no value in row {int(np.argmax(gone))}; drop such rows, or impute them.")


def as_texts(values: Array) -> Array:
    """Levels as texts; whole numbers without a decimal point, also in a column of reals."""
    if is_text(values):
        return values.astype(str)
    reals = values.astype(float)
    is_whole = (reals == np.floor(reals)) & (np.abs(reals) < 2**53)
    return np.where(is_whole, np.where(is_whole, reals, 0.0).astype(np.int64).astype(str), values.astype(str))


def _order(level: str) -> tuple[float, str]:
    """Numbers by size, then texts by letters."""
    try:
        size = float(level)
    except ValueError:
        return np.inf, level
    return (np.inf if np.isnan(size) else size), level  # "nan" is sorted as a text


# Columns that differ at one client from the others: swapped, in another unit, or with other levels --------------------

# Distance of a client's mean from the others', in sds within or between clients, and in its standard errors.
_AWAY = 6.0
_APART, _NEAR = 4.0, 1.5  # the same for logarithms of sizes and sds, and of means, with few clients
_SCALE = 30.0  # ratio of sizes
_SPREAD = 10.0  # ratio of sds within clients
_BEYOND = 3.0  # ratio to the most extreme sd of the others
_MANY = 30  # clients above which one does not move medians
_FEW = 8  # clients below which a median of deviations is useless
_SHOWN = 5  # levels in a message


def strange(summaries: Mapping[str, Mapping[str, Told]]) -> list[str]:
    """Messages on numeric columns of a client with another scale or location than at the others, of three or more.

    A client is named by its mean, 6 sds within and between clients and 6 standard errors away, by a tenfold sd that is
    also three times each other's, or by a thirtyfold root mean square, unless other clients have such ratios, as of
    counts.
    """
    messages = []
    for name, of_all in by_column(summaries):
        numeric = {k: one for k, one in of_all.items() if one.rows and not one.text and not one.withheld}
        if len(numeric) < 3:
            continue
        rows, total, squares = np.array([one[:3] for one in numeric.values()], dtype=float).T
        mean, square = total / rows, squares / rows
        variance = np.maximum(square - mean**2, 0.0) * rows / np.maximum(rows - 1, 1)
        # A difference of two large numbers is rounding.
        sd = np.where(variance > 1e-12 * square, np.sqrt(variance), 0.0)
        moments = np.array([rows, mean, sd, np.sqrt(square)])
        usual = None if len(rows) <= _MANY else _usual(moments[1:], few=False)
        for place, client_id in enumerate(numeric):
            odd = usual or _usual(np.delete(moments[1:], place, axis=1), few=True)
            if why := odd(moments[:, place]):
                messages.append(f"{name!r} at client {client_id!r} {why}")
    return messages


def strange_levels(summaries: Mapping[str, Mapping[str, Told]]) -> list[str]:
    """Messages on columns of which one client has no level of another, while all others share some."""
    messages = []
    for name, parts in by_column(summaries):
        kept = {k: told.levels for k, told in parts.items() if told.levels}
        clients = Counter(level for levels in kept.values() for level in levels)
        apart = [k for k, levels in kept.items() if all(clients[level] == 1 for level in levels)]
        if len(apart) == 1 and len(kept) > 2:
            own_levels = sorted(kept[apart[0]])
            others = sorted(set(clients) - set(own_levels))[:_SHOWN]
            shown = f"the levels {own_levels[:_SHOWN]}, and no other has one of them: {others}"
            messages.append(f"{name!r} at client {apart[0]!r} has {shown}")
    return messages


def strange_sizes(clients: Mapping[str, Mapping[str, Told]]) -> list[str]:
    """Messages on clients with more than ten times as many rows as the median of the others, one per client."""
    messages: dict[str, str] = {}
    for _, parts in by_column(clients):
        for k, told in parts.items():
            if told.rows > _MOST_TIMES * (others := _others_rows(parts, k)):
                rows = f"{told.rows} rows, the median of the others is {others:g}"
                messages.setdefault(k, f"client {k!r} tells of {rows}")
    return list(messages.values())


def _apart(values: Array, within: float, few: float) -> float:
    """Log of the largest plausible ratio of a value to the median of `values` of one sign.

    Counts differ by factors, and moments may come from few large rows. 0 where signs differ, or of fewer than two.
    """
    some = values[values != 0]
    if len(some) < 2 or np.ptp(np.sign(some)):
        return 0.0
    logs = np.log(np.abs(some))
    farthest = float(np.sort(np.abs(logs - np.median(logs)))[-2])
    return 2.0 * within + max((_AWAY if len(logs) >= _FEW else few) * _between(logs), 2.0 * farthest)


def _usual(others: Array, *, few: bool) -> Callable[[Array], str | None]:
    """What describes a client's odd column, None if it is not odd, from its rows, mean, sd and root mean square.

    `others` are means, sds and root mean squares (3, K) of the other clients, or of all where there are not `few`.
    """
    means, sds, sizes = others
    usual_mean, usual_sd, some = float(np.median(means)), float(np.median(sds)), sizes[sizes > 0]
    usual_size = float(np.median(some)) if len(some) else 0.0
    relative = np.minimum(sds, 1e3 * np.abs(means)) / np.where(means != 0, np.abs(means), 1.0)
    within = min(float(np.sqrt(np.log1p(np.median(relative) ** 2))), 1.0)  # sd of logarithms of a client's rows
    between, least, most = _between(means), sds[sds > 0].min(initial=np.inf), sds.max()
    apart_sizes, apart_sds = _apart(sizes, within, _APART), _apart(sds, within, _APART)
    # Means near 0 have large ratios by chance; real ratios show in sds, too.
    apart_means = min(_apart(means, within, _NEAR), _apart(sds, within, _NEAR))

    def like(value: float, usual: float, apart: float) -> bool:
        return bool(usual and value / usual > 0 and abs(np.log(value / usual)) <= apart)

    def odd(own: Array) -> str | None:
        rows, mean, sd, size = own.tolist()
        as_large = like(size, usual_size, apart_sizes)
        if usual_size > 0 and size > 0 and not as_large and not 1 / _SCALE < size / usual_size < _SCALE:
            return f"is of size {size:.3g}, at most others of {usual_size:.3g}"
        if usual_sd == 0:  # constant within clients: there is no scale for differences
            return None
        wide = max(usual_sd, between, sd / np.sqrt(rows))
        if abs(mean - usual_mean) > _AWAY * wide and rows > 1 and not like(mean, usual_mean, apart_means):
            return f"has the mean {mean:.3g}, at most others {usual_mean:.3g} with sds of {usual_sd:.3g}"
        slack = _SPREAD * np.exp(4.0 / np.sqrt(max(rows - 1, 1)))  # four standard errors of a log sd
        alone = not few or sd > _BEYOND * most or sd < least / _BEYOND
        if sd > 0 and alone and not like(sd, usual_sd, apart_sds) and not 1 / slack < sd / usual_sd < slack:
            return f"has the sd {sd:.3g}, at most others {usual_sd:.3g}"
        return None

    return odd


def _between(means: Array) -> float:
    """Sd between the others' means: robust with enough of them, and inflated with few."""
    if len(means) < _FEW:
        return float(np.std(means, ddof=1)) * (1.0 + 4.0 / (len(means) - 1))
    return float(1.5 * _MAD * np.median(np.abs(means - np.median(means))))
