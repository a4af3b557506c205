"""Columns that are other ones at one client than at the others: swapped, in another unit, or of other levels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl.formulas.agreement import Told, beyond
from fedppl.types import Array

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
