"""Columns so far from 0 that what they are multiplied with cannot be told from what stands alone."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pandas as pd

from fedppl.formulas.agreement import Agreement
from fedppl.formulas.moments import grid
from fedppl.formulas.terms import Terms
from fedppl.types import Array

SAID = 8.0  # means, in sds, that are said before a fit, and with which priors reckon
SUSPECT = 3.0  # and where it did not arrive
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
        for group in terms.groups:
            if any(_stands_in(name, one) for one in group.expressions):
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
    read = {name for one in products for name in terms.columns if _names(name, one)}
    others = {one for one in terms.common if {name for name in terms.columns if _names(name, one)} <= read}
    return [one for one in terms.common if one in products | (others if products else set())]


def left_by_others(
    some: list[str], terms: Terms, agreement: Agreement, columns: Callable[[pd.DataFrame], Array]
) -> Array:
    """Sds of what others and a constant leave of each column of `some` terms, (p,); NaN of what they determine."""
    read = {name for one in some for name in terms.columns if _names(name, one)}
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
    those = [one for one in terms.common if _stands_in(name, one)]
    several = [one for one in those if _is_product(name, one, terms.columns)]
    return those if several else []


def _names(name: str, term: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", term) is not None


def _stands_in(name: str, term: str) -> bool:
    """Whether a term reads a column as it is, and not its distance from the mean."""
    column = rf"`?{re.escape(name)}`?"
    left = re.sub(rf"\b(center|scale|standardize)\(\s*{column}\s*\)", "", term)
    return _names(name, left)


def _is_product(name: str, term: str, columns: tuple[str, ...]) -> bool:
    """Whether a term is a power of a column, or a product with others."""
    others = [one for one in columns if one != name and _names(one, term)]
    return bool(others) or "**" in term or re.search(r"\b(poly|np\.(square|power))\(", term) is not None
