"""Columns so far from 0 that what they are multiplied with cannot be told from what stands alone."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from fedppl.formulas import expressions
from fedppl.formulas.agreement import Agreement
from fedppl.formulas.moments import grid
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
