"""What clients agree on before a formula means the same at all: levels, and constants to centre and scale by.

One exchange: counts of levels, and of numeric columns counts, sums and sums of squares.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedppl.types import Array, DataError

_LARGEST = 1e150  # of a mean square, whose own square is a number still
OTHER = "other"
_MOST_TIMES = 10.0  # as many rows as the others' median a client may tell of, and count for
_MEDIANS = 5  # clients, from where on one of them that lies is left out by a median
_MAD = 1.4826  # sds of a normal distribution in a median of distances
_TAIL = 10  # a part so large at each end of a column counts as what is next
_SMALLEST = 1e-150  # of a sd
_FEWEST_PARTS = 4  # times as many rows as are told of, so that sums leave


class Told(NamedTuple):
    """What one client tells of one column; of fewer rows than the policy wants, nothing but its kind."""

    rows: int  # 0 where they are too few to be told
    total: float  # Σ x of a numeric column
    squares: float  # Σ x²
    levels: Mapping[str, int]  # of another column, with at least so many rows as the policy wants
    withheld: bool  # whether so many rows have levels that are not told, or a numeric column's sums are not told
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

    What fewer than `min_count` rows have leaves no trace: whether no row has a level, or some but fewer, the same is
    told. Rows of such levels are as if they were not there, unless those of all of them together are so many. Rows are
    told in whole multiples of `min_count`, rounded down; those of levels in multiples of twice as many, which the rows
    of a rare level do not move where they are taken from a level with a round number of rows.

    Of numbers the `min_count` - 1 largest count as the next, and the smallest likewise; a tenth of them, where they
    then still differ. Their sd is told as a power of the square root of 2, their mean in halves of it: constants to
    centre and scale by need no more. With a `min_count` of 1 all is exact.
    """
    found = {}
    for name in names:
        values = np.asarray(data[name])
        text = is_text(values) or name in levels
        if len(values) < min_count:
            found[name] = Told(0, 0.0, 0.0, {}, False, text)
        elif text:
            labels, counts = np.unique(as_texts(values), return_counts=True)
            seen = {
                str(label): _window(int(n), min_count)
                for label, n in zip(labels, counts, strict=True)
                if n >= min_count
            }
            many = int(counts[counts < min_count].sum()) >= min_count
            found[name] = Told(max(_whole(len(values), min_count), sum(seen.values())), 0.0, 0.0, seen, many, True)
        else:
            found[name] = _sums(np.asarray(values, dtype=float), min_count)
    return found


def rare(told: Told, values: Array) -> Told:
    """The same where rows are here: `withheld` says whether any has a level that is not told."""
    few = told.text and told.rows > 0 and not set(np.unique(as_texts(values)).tolist()) <= set(told.levels)
    return told._replace(withheld=few) if told.text else told


def _sums(reals: Array, min_count: float) -> Told:
    with np.errstate(over="ignore", invalid="ignore"):  # who puts them together refuses what is no number
        if min_count <= 1:
            return Told(len(reals), float(reals.sum()), float(np.sum(reals**2)), {}, False)
        rows, few = _whole(len(reals), min_count), int(min_count) - 1
        if len(reals) < _FEWEST_PARTS * min_count:  # of so few rows, those that count as others are most
            return Told(rows, 0.0, 0.0, {}, True)
        ordered = np.sort(reals)
        for beyond_them in (max(few, len(reals) // _TAIL), few):
            low, high = float(ordered[beyond_them]), float(ordered[-beyond_them - 1])
            if low < high:
                break
        else:
            return Told(rows, rows * low, rows * low**2, {}, False)
        clipped = np.clip(reals, low, high)
        sd = float(2.0 ** (np.round(2.0 * np.log2(max(clipped.std(), _SMALLEST))) / 2.0))
        mean = float(np.round(clipped.mean() / (sd / 2.0)) * (sd / 2.0))
        return Told(rows, rows * mean, rows * (sd**2 + mean**2), {}, False)


def raised(told: Told, min_count: float) -> Told:
    """What was told before, as far as a larger `min_count` lets it be told again."""
    if told.rows < min_count:
        return Told(0, 0.0, 0.0, {}, False, told.text)
    levels = {level: _window(n, min_count) for level, n in told.levels.items() if n >= min_count}
    rows = max(_whole(told.rows, min_count), sum(levels.values()))
    part = rows / told.rows if told.rows else 1.0
    withheld = told.withheld or len(levels) < len(told.levels)
    return Told(rows, told.total * part, told.squares * part, levels, withheld, told.text)


def _whole(count: int, min_count: float) -> int:
    """The largest multiple of `min_count` that is not larger."""
    step = max(int(min_count), 1)
    return count // step * step


def _window(count: int, min_count: float) -> int:
    """The multiple of 2 `min_count` whose window holds a count; windows end `min_count` - 1 below their multiples."""
    few = int(min_count)
    return count if few <= 1 else max(2 * few, (count + few - 1) // (2 * few) * 2 * few)


def agreed(
    told: Mapping[str, Mapping[str, Told]],
    order: Mapping[str, Sequence[str]] | None = None,
    *,
    others: bool = False,
    unscaled: Sequence[str] = (),
    closed: Sequence[str] = (),
    constant: Collection[str] = (),
    listed: Mapping[str, Sequence[str] | None] | None = None,
    believed: bool = True,
) -> Agreement:
    """What comes of it: the same levels in the same order at all clients, means and sds over all rows that were told.

    What is told is by client, and column. Known before are levels in their `order`, and orders of those that are
    `listed`, of which rows need not have all, by column. Rows of withheld levels are of the level "other" with
    `others`, but for columns that are `closed`, which are outcomes. Nobody needs mean and sd of columns that are
    `unscaled`; those that may be `constant` may have the same value in all rows.

    Clients' numbers of rows are what they say where these are `believed`, as where all are here. Else none counts for
    more than ten times the median of the others, from five clients on for no more than it, and means and sds are
    medians.

    Raises `DataError` if a column is numeric at one client and text at another, rows are of levels that were withheld
    and have no other, a column has one value alone, or no client tells of it.
    """
    columns = {}
    for name in next(iter(told.values())):
        parts = {client_id: one[name] for client_id, one in told.items()}
        parts = parts if believed else bounded(parts)
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
            middle = not believed and len(parts) >= _MEDIANS
            columns[name] = _constants(
                name, parts, needed=name not in unscaled, varies=name not in constant, middle=middle
            )
    first = {client_id: next(iter(one.values())) for client_id, one in told.items()} if columns else {}
    rows = sum(one.rows for one in (first if believed else bounded(first)).values())
    return Agreement(columns, rows, others)


def bounded(parts: Mapping[str, Told]) -> dict[str, Told]:
    """What clients tell of a column, each scaled down to the rows that it may count for beside the others."""
    most = _MOST_TIMES if len(parts) < _MEDIANS else 1.0
    return {client_id: _scaled(one, most * _others_rows(parts, client_id)) for client_id, one in parts.items()}


def beyond(parts: Mapping[str, Told]) -> dict[str, tuple[int, float]]:
    """Clients that tell of more than ten times as many rows as the median of the others: theirs, and that."""
    found = {client_id: (one.rows, _others_rows(parts, client_id)) for client_id, one in parts.items()}
    return {client_id: (own, others) for client_id, (own, others) in found.items() if own > _MOST_TIMES * others}


def _others_rows(parts: Mapping[str, Told], client_id: str) -> float:
    rows = [one.rows for other, one in parts.items() if other != client_id and one.rows]
    return float(np.median(rows)) if rows else np.inf


def _scaled(told: Told, most: float) -> Told:
    if told.rows <= most:
        return told
    part = most / told.rows
    levels = {level: max(round(n * part), 1) for level, n in told.levels.items()}
    return told._replace(rows=round(most), total=told.total * part, squares=told.squares * part, levels=levels)


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
        raise DataError(
            f"column {name!r} has the levels {levels} alone that enough rows have, at all clients; leave it out of the "
            "formula, an outcome has to vary. Where others are rare say all of them in formula(levels=...), or lower "
            "min_count, at sites that of their policies too."
        )
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


def _constants(name: str, parts: Mapping[str, Told], *, needed: bool, varies: bool, middle: bool = False) -> Column:
    telling = [one for one in parts.values() if one.rows and not one.withheld]
    if not telling:
        if not needed:
            return Column((), (), 0.0, 1.0)
        raise DataError(
            f"no client tells of column {name!r}: all have too few rows, or too few with another value than most. "
            "Lower min_count, at sites that of their policies too, or bring several together as one client."
        )
    mean, square = _middle(telling) if middle and len(telling) >= _MEDIANS else _pooled(telling)
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


def _pooled(telling: Sequence[Told]) -> tuple[float, float]:
    """Mean and mean square over all rows."""
    rows = sum(one.rows for one in telling)
    return sum(one.total for one in telling) / rows, sum(one.squares for one in telling) / rows


def _middle(telling: Sequence[Told]) -> tuple[float, float]:
    """The same by medians over clients, which none of them moves far: of means, of variances, and of distances."""
    means = np.array([one.total / one.rows for one in telling])
    within = np.array([one.squares / one.rows for one in telling]) - means**2
    mean = float(np.median(means))
    variance = float(np.median(np.maximum(within, 0.0))) + float(_MAD * np.median(np.abs(means - mean))) ** 2
    if not variance > 1e-12 * mean**2:  # one that few clients have in another way
        return _pooled(telling)
    return mean, variance + mean**2


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
        size = float(level)
    except ValueError:
        return np.inf, level
    return (np.inf if np.isnan(size) else size), level  # "nan" is a text: no number would have a place beside it


# Columns that are other ones at one client than at the others: swapped, in another unit, or of other levels -----------


# Between a client's mean and the others', in sds within clients and between them; and in its own standard errors.
_AWAY = 6.0
_APART, _NEAR = 4.0, 1.5  # the same of logarithms of sizes and sds, and of means, where few make the second wide
_SCALE = 30.0  # between sizes
_SPREAD = 10.0  # between sds within clients
_BEYOND = 3.0  # any of them
_MANY = 30  # clients: of more, one does not move their medians
_WIDEST = 100  # columns of an array
_FEW = 8  # clients: of fewer, a median of deviations says nothing
_SHOWN = 5  # levels in a message


class _Moments(NamedTuple):
    clients: list[str]
    rows: Array
    mean: Array
    sd: Array
    size: Array  # root mean square


class _Others(NamedTuple):
    """What a client is held against."""

    size: float
    mean: float
    sd: float
    between: float
    least: float  # sds
    most: float
    apart: tuple[float, float, float]  # of their sizes, means and sds, as `_apart` has it


def strange(told: Mapping[str, Mapping[str, Told]]) -> list[str]:
    """Numeric columns of a client that are on another scale than at the others, or elsewhere, in words.

    Named is who has a mean farther from the others' median than 6 of the larger of two sds, within clients and between
    the others' means, and than 6 standard errors of its own; who has a sd a tenth or ten times the median of the
    others', beyond what so few rows do by chance, and a third or three times any of them; and whose root mean square is
    a thirtieth or thirty times as large; and in none of these only another multiple than others are of each other, as
    counts and what else has a logarithm for a link are. Two clients are too few to tell which of them is odd.
    """
    found = []
    for name in next(iter(told.values()), {}):
        kept = {k: one[name] for k, one in told.items() if not one[name].text}
        kept = {k: one for k, one in kept.items() if one.rows and not one.withheld}
        if len(kept) < 3:
            continue
        rows = np.array([one.rows for one in kept.values()], dtype=float)
        mean = np.array([one.total for one in kept.values()]) / rows
        square = np.array([one.squares for one in kept.values()]) / rows
        variance = np.maximum(square - mean**2, 0.0) * rows / np.maximum(rows - 1, 1)
        # What is left where two large numbers were taken from each other says nothing.
        sd = np.where(variance > 1e-12 * square, np.sqrt(variance), 0.0)
        moments = _Moments(list(kept), rows, mean, sd, np.sqrt(square))
        everyone = _others(moments, np.ones(len(rows), dtype=bool)) if len(rows) > _MANY else None
        for place, client_id in enumerate(moments.clients):
            others = everyone or _others(moments, np.arange(len(rows)) != place)
            if why := _odd(moments, place, others):
                found.append(f"{name!r} at client {client_id!r} {why}")
    return found


def strange_levels(told: Mapping[str, Mapping[str, Told]]) -> list[str]:
    """Columns of which a client has no level that another has, while all the others have some in common, in words."""
    found = []
    for name in next(iter(told.values()), {}):
        kept = {k: one[name].levels for k, one in told.items() if one[name].levels}
        clients = Counter(level for levels in kept.values() for level in levels)
        apart = [k for k, levels in kept.items() if all(clients[level] == 1 for level in levels)]
        if len(apart) == 1 and len(kept) > 2:
            here = sorted(kept[apart[0]])
            others = sorted(set(clients) - set(here))
            found.append(
                f"{name!r} at client {apart[0]!r} has the levels {here[:_SHOWN]}, and no other has one of them: "
                f"{others[:_SHOWN]}"
            )
    return found


def strange_sizes(told: Mapping[str, Mapping[str, Told]]) -> list[str]:
    """Clients that tell of many times as many rows as the others, in words; each once."""
    found: dict[str, str] = {}
    for name in next(iter(told.values()), {}):
        for client_id, (own, others) in beyond({k: one[name] for k, one in told.items()}).items():
            found.setdefault(
                client_id, f"client {client_id!r} tells of {own} rows, the median of the others is {others:g}"
            )
    return list(found.values())


def strange_arrays(clients: Mapping[Any, Any]) -> list[str]:
    """The same of arrays by client and name: of reals, in one dimension, or with few columns in two."""
    if len(clients) < 3 or not all(isinstance(data, Mapping) for data in clients.values()):
        return []
    told: dict[str, dict[str, Told]] = {}
    for client_id, data in clients.items():
        told[str(client_id)] = {}
        for name, value in data.items():
            array = value if isinstance(value, np.ndarray) else np.zeros(0)
            if array.dtype.kind != "f" or array.ndim not in (1, 2) or len(array) < 2:
                continue
            table = array.reshape(len(array), -1)
            if 0 < table.shape[1] <= _WIDEST and np.all(np.isfinite(table)):
                names = [str(name)] if array.ndim == 1 else [f"{name}[:, {k}]" for k in range(table.shape[1])]
                with np.errstate(over="ignore"):
                    sums = zip(names, table.sum(axis=0), (table**2).sum(axis=0), strict=True)
                told[str(client_id)] |= {
                    key: Told(len(array), float(x), float(xx), {}, False) for key, x, xx in sums if np.isfinite(xx)
                }
    common = set.intersection(*(set(one) for one in told.values()))
    return strange({k: {name: one[name] for name in one if name in common} for k, one in told.items()})


def _others(all_of: _Moments, chosen: Array) -> _Others:
    size, mean, sd = all_of.size[chosen], all_of.mean[chosen], all_of.sd[chosen]
    some, spread = size[size > 0], sd[sd > 0]
    relative = np.minimum(sd, 1e3 * np.abs(mean)) / np.where(mean != 0, np.abs(mean), 1.0)
    within = min(float(np.sqrt(np.log1p(np.median(relative) ** 2))), 1.0)  # of logarithms of a client's rows
    return _Others(
        float(np.median(some)) if len(some) else 0.0,
        float(np.median(mean)),
        float(np.median(sd)),
        _between(mean),
        float(spread.min(initial=np.inf)),
        float(spread.max(initial=0.0)),
        # Means near 0 are multiples of each other by chance; where all grows by multiples sds do, too.
        (
            _apart(size, within, _APART),
            min(_apart(mean, within, _NEAR), _apart(sd, within, _NEAR)),
            _apart(sd, within, _APART),
        ),
    )


def _apart(values: Array, within: float, few: float) -> float:
    """How many times as large or small as their median one may be, as a logarithm, where all have one sign.

    Counts and what grows exponentially differ by multiples, some by many, and where rows of a client do its moments are
    of few of them. 0 where signs differ, or few are there.
    """
    some = values[values != 0]
    if len(some) < 2 or np.ptp(np.sign(some)):
        return 0.0
    logs = np.log(np.abs(some))
    farthest = float(np.sort(np.abs(logs - np.median(logs)))[-2])
    return 2.0 * within + max((_AWAY if len(logs) >= _FEW else few) * _between(logs), 2.0 * farthest)


def _odd(all_of: _Moments, place: int, others: _Others) -> str | None:
    """What is odd about one client's column, or None."""
    rows, mean, sd, size = (float(part[place]) for part in all_of[1:])
    ratios = [
        own / of if of else 0.0 for own, of in zip((size, mean, sd), (others.size, others.mean, others.sd), strict=True)
    ]
    as_others = [r > 0 and abs(np.log(r)) <= apart for r, apart in zip(ratios, others.apart, strict=True)]
    if others.size > 0 and size > 0 and not as_others[0] and not 1 / _SCALE < size / others.size < _SCALE:
        return f"is of size {size:.3g}, at most others of {others.size:.3g}"
    if others.sd == 0:  # a column of clients, not of rows: nothing says how far two may be apart
        return None
    wide = max(others.sd, others.between, sd / np.sqrt(rows))
    if abs(mean - others.mean) > _AWAY * wide and rows > 1 and not as_others[1]:
        return f"has the mean {mean:.3g}, at most others {others.mean:.3g} with sds of {others.sd:.3g}"
    slack = _SPREAD * np.exp(4.0 / np.sqrt(max(rows - 1, 1)))  # log of a sd has this error, four times over
    few = len(all_of.clients) <= _MANY  # of many, all are among the others
    alone = not few or sd > _BEYOND * others.most or sd < others.least / _BEYOND
    if sd > 0 and alone and not as_others[2] and not 1 / slack < sd / others.sd < slack:
        return f"has the sd {sd:.3g}, at most others {others.sd:.3g}"
    return None


def _between(means: Array) -> float:
    """How far means of the others lie apart: robustly where there are enough of them, and more where they are few."""
    if len(means) < _FEW:
        return float(np.std(means, ddof=1)) * (1.0 + 4.0 / (len(means) - 1))
    return float(1.5 * 1.4826 * np.median(np.abs(means - np.median(means))))
