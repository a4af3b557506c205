"""Columns so far from 0 that what they are multiplied with cannot be told from what stands alone."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from fedppl.formulas import expressions
from fedppl.formulas.agreement import Agreement, Column, Told, beyond
from fedppl.formulas.terms import Terms
from fedppl.types import Array

SAID = 8.0  # means, in sds, that are said before a fit, and with which priors reckon
SUSPECT = 3.0  # and where it did not arrive
_POWERS = (expressions.POLYNOMIAL, "np.square", "np.power")
_ALL_BUT_NOTHING = 1e-7  # of a column, which the others determine


def far_from_zero(terms: Terms, agreement: Agreement, left: Array, scale: Array, least: float) -> list[str]:
    """Numeric columns with a mean of more than `least` sds, in effects or in products without `center`, in words.

    Effects (1 + x | site) of such a column have an intercept at x = 0, far from all rows, which see but the sum of it
    and of the slope's part: two sds and a correlation are all but one number. So it is with coefficients of x and of
    x² or x:z, of which others leave `left` of the sd `scale` of a column.
    """
    found = []
    for name in _far(terms, agreement, least):
        column = agreement.columns[name]
        far = f"{name!r} is far from 0, {column.mean:.6g} on average with an sd of {column.sd:.3g}"
        for group, own in zip(terms.groups, terms.sums[1:], strict=True):
            if any(_stands_in(name, one, terms) for one in own.terms):
                of = "/".join(group.factor)
                found.append(
                    f"{far}, and has effects by {of!r}, which cannot be told from those of the intercept there: write "
                    f"(1 + center({name}) | {of})"
                )
        products = _products(name, terms)
        if products and np.any(scale > least * left):
            found.append(
                f"{far}, and stands in {products[:4]}, whose coefficients cannot be told from others' there: write "
                f"center({name}) in its place"
            )
    return found


def touched(terms: Terms, agreement: Agreement) -> list[str]:
    """Common terms of columns that stand in powers or products far from 0."""
    products = {one for name in _far(terms, agreement, SAID) for one in _products(name, terms)}
    read = {name for one in products for name in _read(terms, terms.factors[one])}
    return [one for one in terms.common if products and _read(terms, terms.factors[one]) <= read]


def left_by_others(
    some: list[str], terms: Terms, agreement: Agreement, columns: Callable[[pd.DataFrame], Array]
) -> Array:
    """Sds of what others and a constant leave of each column of `some` terms, (p,); NaN of what they determine."""
    read = {name for one in some for name in _read(terms, terms.factors[one])}
    frame, weight = grid(read, terms, agreement)
    values = columns(frame)
    usable = np.isfinite(values).all(axis=1)
    values, weight = values[usable], weight[usable] / max(weight[usable].sum(), 1e-300)
    apart = values - weight @ values
    sd = np.sqrt(weight @ apart**2)
    found = np.full(len(sd), np.nan)
    if len(values) > len(sd) and np.all(sd > 0):
        root = np.linalg.qr(np.sqrt(weight)[:, None] * apart / sd, mode="r")
        if np.min(np.abs(np.diag(root))) > _ALL_BUT_NOTHING:
            found = sd / np.linalg.norm(np.linalg.inv(root), axis=1)
    return found


def _far(terms: Terms, agreement: Agreement, least: float) -> list[str]:
    columns = {name: agreement.columns[name] for name in terms.columns}
    return [name for name, one in columns.items() if not one.levels and abs(one.mean) > least * one.sd]


def _products(name: str, terms: Terms) -> list[str]:
    """Common terms with a column as it is, where it stands in powers or with others."""
    those = [one for one, factors in terms.factors.items() if _stands_in(name, factors, terms)]
    return those if any(_is_product(terms.factors[one], terms) for one in those) else []


def _read(terms: Terms, factors: Sequence[str]) -> set[str]:
    return {name for one in factors for name in expressions.columns(terms.trees[one], ())} & {*terms.columns}


def _stands_in(name: str, factors: Sequence[str], terms: Terms) -> bool:
    """Whether a term reads a column as it is, and not its distance from the mean."""
    return any(name in expressions.columns(terms.trees[one], (), without=expressions.CENTRED) for one in factors)


def _is_product(factors: Sequence[str], terms: Terms) -> bool:
    """Whether a term is a power of a column, or a product with others."""
    nodes = [node for one in factors for node in ast.walk(terms.trees[one])]
    powers = any(isinstance(node, ast.Pow) or expressions.calls(node) in _POWERS for node in nodes)
    return powers or len(_read(terms, factors)) > 1


# Rows that stand for all clients' and are nobody's, and moments of columns over them, from what was agreed on ---------

_ROWS = 256  # of the rows that stand for all
_MOST = 4096  # of those on a grid, where its levels alone are not more


class Moments(NamedTuple):
    """Of the columns of a term, (p,) each."""

    mean: Array
    sd: Array
    size: Array  # root mean square


def moments(
    read: Collection[str], terms: Terms, agreement: Agreement, columns: Callable[[pd.DataFrame], Array]
) -> Moments:
    """Moments of what `columns` computes from the columns `read` of a formula, (rows, p), these being independent.

    On a grid of all their levels, however rare, and of numbers with their mean and sd, each row with the product of
    its levels' shares for a weight: exact of levels, of numbers, and of products of them. Rows at which a function is
    no number count for nothing.
    """
    frame, weight = grid(read, terms, agreement)
    values = columns(frame)
    counted = np.isfinite(values)
    weights = np.where(counted, weight[:, None], 0.0)
    total = weights.sum(axis=0)
    weights = weights / np.where(total > 0, total, 1.0)
    values = np.where(counted, values, 0.0)
    mean = np.sum(weights * values, axis=0)
    sd, size = (np.sqrt(np.sum(weights * of**2, axis=0)) for of in (values - mean, values))
    # What is left of a constant is rounding, and says nothing of a scale.
    return Moments(mean, np.where(sd > 1e-12 * size, sd, 1.0), np.where(size > 0, size, 1.0))


def standing_for_all(terms: Terms, agreement: Agreement, positive: bool = False) -> pd.DataFrame:
    """Rows with the means, sds, levels and shares that clients agreed on, their columns independent of each other.

    Numbers are uniform, or log-normal where the mean is above 0 and they shall be `positive`.
    """
    rng, held = np.random.default_rng(0), {}
    for name in terms.columns:
        column = agreement.columns[name]
        if column.levels:
            ends = np.cumsum(column.shares) * _ROWS
            codes = rng.permutation(np.searchsorted(ends, np.arange(_ROWS) + 0.5).clip(max=len(ends) - 1))
            held[name] = _categories(column, codes)
        else:
            z = rng.permutation(np.linspace(-1.0, 1.0, _ROWS))
            if positive and column.mean > 0:
                spread = np.log1p((column.sd / column.mean) ** 2)
                quantiles = special.ndtri(np.argsort(np.argsort(z)) / _ROWS + 0.5 / _ROWS)
                held[name] = np.exp(np.log(column.mean) - 0.5 * spread + np.sqrt(spread) * quantiles)
            else:
                held[name] = column.mean + column.sd * z / np.std(z)  # so that center and scale find what was agreed
    return _with_factors(held, _ROWS, terms)


def grid(read: Collection[str], terms: Terms, agreement: Agreement) -> tuple[pd.DataFrame, Array]:
    """Rows with all combinations of the columns that are read, others as they may be, and their weights."""
    of_levels = [name for name in terms.columns if name in read and agreement.columns[name].levels]
    of_numbers = [name for name in terms.columns if name in read and not agreement.columns[name].levels]
    combined = np.prod([len(agreement.columns[name].levels) for name in of_levels], initial=1)
    width = int(np.clip((_MOST / combined) ** (1 / max(len(of_numbers), 1)), 2, _ROWS))
    z = np.linspace(-1.0, 1.0, width)
    z = z / np.std(z)
    ranges = [*(range(len(agreement.columns[name].levels)) for name in of_levels), *(range(width) for _ in of_numbers)]
    places = dict(zip([*of_levels, *of_numbers], np.array(list(product(*ranges)), dtype=int).T, strict=True))
    rows = int(np.prod([len(one) for one in ranges], initial=1))
    held, weight = {}, np.ones(rows)
    for name in terms.columns:
        column, place = agreement.columns[name], places.get(name)
        if column.levels:
            codes = np.zeros(rows, dtype=int) if place is None else place
            held[name] = _categories(column, codes)
            weight = weight if place is None else weight * np.array(column.shares)[codes]
        else:
            held[name] = column.mean + column.sd * (np.zeros(rows) if place is None else z[place])
    return _with_factors(held, rows, terms), weight


def _categories(column: Column, codes: Array) -> pd.Categorical:
    return pd.Categorical.from_codes(codes, list(column.levels), ordered=True)


def _with_factors(held: dict[str, object], rows: int, terms: Terms) -> pd.DataFrame:
    for name in {name for group in terms.groups for name in group.factor} - set(held):
        held[name] = np.full(rows, "all", dtype=object)
    return pd.DataFrame(held, index=np.arange(rows))


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
