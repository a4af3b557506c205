"""Columns so far from 0 that what they are multiplied with cannot be told from what stands alone."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from fedppl.formulas import expressions
from fedppl.formulas.agreement import Agreement, Column
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
