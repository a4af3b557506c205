"""Rows that stand for all clients' and are nobody's, and moments of columns over them, from what was agreed on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from fedppl.formulas.agreement import Agreement, Column
from fedppl.formulas.terms import Terms
from fedppl.types import Array

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
