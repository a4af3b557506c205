"""From a client's rows to the columns that coefficients belong to, the same at all clients."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedppl.formulas import expressions, values
from fedppl.formulas.agreement import Agreement, coded, is_text
from fedppl.formulas.far import Moments, left_by_others, moments, standing_for_all, touched
from fedppl.formulas.terms import Product, Terms, variable
from fedppl.types import Array, DataError, DeclarationError

_AGREED = "the agreed columns"


class Coded(NamedTuple):
    """Columns of a term: products of those of its factors; none of an intercept."""

    term: tuple[str, ...]
    products: tuple[Product, ...]


@dataclass(frozen=True)
class Design:
    """How rows become columns."""

    terms: Terms
    agreement: Agreement
    constants: Mapping[str, Any]  # what the formula names that is no column
    # terms of the common part, and of the effects of each group, with the products that their columns are
    coding: tuple[tuple[Coded, ...], ...]
    labels: Mapping[str, tuple[str, ...]]  # names of the columns of each common term, by term
    entries: Mapping[str, tuple[str, ...]]  # what tells them apart: levels and places alone where these do, by term
    group_labels: tuple[tuple[str, ...], ...]  # names of the effects of each group
    center: Array  # and scale: means and sds of the columns of the common terms over rows that stand for all, (p,)
    scale: Array
    group_scale: tuple[Array, ...]  # sizes of the effects' columns, by group
    offset_center: float  # mean of the sum of the offsets over these rows
    # what other columns leave of `scale` where columns in products are far from 0; elsewhere `scale`, (p,)
    left: Array = dataclasses.field(default_factory=lambda: np.ones(0))

    def common(self, frame: pd.DataFrame, what: str | None) -> Array:
        """Columns of the common terms, (n, p)."""
        return self._columns([one for one in self.coding[0] if one.term], frame, what)

    def offset(self, frame: pd.DataFrame, what: str | None) -> Array:
        """Sum of the offsets, (n,)."""
        found = [self._factor(name, frame, what)[:, 0] for name in self.terms.offsets]
        return np.asarray(np.sum(found, axis=0))

    def group(self, number: int, frame: pd.DataFrame, what: str | None) -> Array:
        """Columns of the effects of a group, (n, q)."""
        return self._columns(self.coding[1 + number], frame, what)

    def side_by_side(self, frame: pd.DataFrame, what: str | None) -> Array:
        """Columns of the common terms, the sum of the offsets, and columns of the effects of all groups, (n, all).

        Without a `what` nothing is refused, and they are no numbers where a function ends.
        """
        offset = [self.offset(frame, what)[:, None]] if self.terms.offsets else []
        groups = [self.group(number, frame, what) for number in range(len(self.terms.groups))]
        with np.errstate(all="ignore"):
            return np.concatenate([self.common(frame, what), *offset, *groups], axis=1)

    def _columns(self, terms: Sequence[Coded], frame: pd.DataFrame, what: str | None) -> Array:
        """Columns of terms, (n, theirs)."""
        factors = {
            name: self._factor(name, frame, what) for name in dict.fromkeys(itertools.chain(*(t.term for t in terms)))
        }
        products = [_product(one, factors, len(frame)) for term in terms for one in term.products]
        return np.concatenate([np.zeros((len(frame), 0)), *products], axis=1)

    def _factor(self, name: str, frame: pd.DataFrame, what: str | None) -> Array:
        """Columns of a factor, (n, its own): of levels one for each."""
        column = self.agreement.columns.get(name)
        if column is not None and column.levels and isinstance(self.terms.trees[name], ast.Name):
            codes = frame[name].cat.codes.to_numpy()
            return np.asarray(codes[:, None] == np.arange(len(column.levels)), dtype=float)
        rows = values.Rows(frame, self.agreement, self.constants, what, what == _AGREED)
        return _evaluated(name, self.terms.trees[name], rows)


def build(terms: Terms, agreement: Agreement, constants: Mapping[str, Any]) -> Design:
    """The design that all clients share, from what they agreed on."""
    frame = standing_for_all(terms, agreement)
    levels = {name: column.levels for name, column in agreement.columns.items() if column.levels}
    coding = tuple(tuple(itertools.starmap(Coded, one.products(levels))) for one in terms.sums)
    design = Design(terms, agreement, constants, coding, {}, {}, (), np.zeros(0), np.ones(0), (), 0.0)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of functions at rows that nobody has
        widths = _require_rowwise(design, frame)
        common = [_moments(design, one) for one in coding[0] if one.term]
        groups = [[_moments(design, one) for one in part] for part in coding[1:]]
        offset = _mean_offset(design, frame) if terms.offsets else 0.0
    own = [tuple(label for one in part for label in _labels(one, levels, widths)) for part in coding[1:]]
    of_terms = [_labels(one, levels, widths) for one in coding[0] if one.term]
    for part in ([one for term in of_terms for one in term], *own):
        _require_distinct(part)
    labels = dict(zip(terms.common, of_terms, strict=True))
    parts = [_labels(one, levels, widths, whole=False) for one in coding[0] if one.term]
    apart = [own if all(own) and len(set(own)) == len(own) else long for own, long in zip(parts, of_terms, strict=True)]
    entries = dict(zip(terms.common, apart, strict=True))
    center, scale = (np.concatenate([np.zeros(0), *(one[k] for one in common)]) for k in range(2))
    sizes = tuple(np.concatenate([one.size for one in group]) for group in groups)
    offset = offset if np.isfinite(offset) else 0.0
    found = Design(terms, agreement, constants, coding, labels, entries, tuple(own), center, scale, sizes, offset)
    return dataclasses.replace(found, left=_left(found))


def _require_distinct(labels: Sequence[str]) -> None:
    """Refuse columns that are called alike, by a level of one and the name of another."""
    if twice := sorted({one for one in labels if labels.count(one) > 1}):
        raise DeclarationError(
            f"two coefficients of the formula are called {twice[0]!r}; rename the column, or a level of it."
        )


def _left(design: Design) -> Array:
    some = touched(design.terms, design.agreement)
    if not some:
        return design.scale
    names = [name for name in design.terms.common for _ in design.labels[name]]
    those = np.isin(names, some)
    with np.errstate(all="ignore"):
        found = left_by_others(
            some, design.terms, design.agreement, lambda frame: design.common(frame, _AGREED)[:, those]
        )
    left = np.array(design.scale)
    left[those] = np.where(np.isfinite(found), np.minimum(found, left[those]), left[those])
    return left


def _moments(design: Design, term: Coded) -> Moments:
    """Moments of a term's columns over rows that stand for all."""
    read = {name for one in term.term for name in expressions.columns(design.terms.trees[one], design.constants)}
    return moments(read, design.terms, design.agreement, lambda frame: design._columns([term], frame, _AGREED))


def _require_rowwise(design: Design, frame: pd.DataFrame) -> dict[str, int]:
    """Refuse factors that cannot be computed, or look at other rows than their own; the widths of the others."""
    widths = {}
    for name, tree in design.terms.trees.items():
        column = design.agreement.columns.get(name)
        if column is not None and column.levels and isinstance(tree, ast.Name):
            continue
        rows = values.Rows(frame, design.agreement, design.constants, _AGREED, stand_for_all=True)
        try:
            widths[name] = values.columns(tree, rows).shape[1]
            if name in design.terms.offsets and widths[name] != 1:
                raise DeclarationError(f"it has {widths[name]} columns, and an offset is one number a row")
            values.require_rowwise(tree, rows)
        except Exception as error:
            raise DeclarationError(
                f"{name} cannot be evaluated: {error}; functions take columns of numbers, what is no column is given "
                "by constants={...}, and what needs more is computed as a column before."
            ) from error
    return widths


def _mean_offset(design: Design, frame: pd.DataFrame) -> float:
    """Mean of the sum of the offsets, of log-normal columns where it is not known of uniform ones below 0."""
    values = design.offset(frame, _AGREED)
    if not np.all(np.isfinite(values)):
        values = design.offset(standing_for_all(design.terms, design.agreement, positive=True), _AGREED)
    return float(np.nanmean(values))


def table(data: Mapping[str, Any], terms: Terms, agreement: Agreement, what: str) -> pd.DataFrame:
    """The columns that a formula reads right of ~, texts as levels that were agreed on."""
    absent = [name for name in terms.columns if name not in data]
    if absent:
        raise DataError(f"{what} lacks the columns {absent} of the formula; it has {sorted(data)[:20]}.")
    held = {}
    for name in terms.columns:
        column, values = agreement.columns[name], np.asarray(data[name])
        if column.levels:
            levels = coded(column, values, agreement, f"{what}: column {name!r}")
            held[name] = pd.Categorical(levels, categories=list(column.levels), ordered=True)
        elif is_text(values):
            raise DataError(f"{what}: column {name!r} has texts, and clients agreed on numbers; recode its rows.")
        else:
            held[name] = values.astype(float)
    rows = len(next(iter(data.values())))
    return pd.DataFrame(held, index=np.arange(rows))


def plain(column: pd.Series) -> Array:
    """A column of the table as numbers: of levels their places."""
    return np.asarray(column.cat.codes if isinstance(column.dtype, pd.CategoricalDtype) else column, dtype=float)


def from_plain(name: str, values: Array, agreement: Agreement) -> pd.Series:
    """The column of the table that has these numbers."""
    levels = agreement.columns[name].levels
    if not levels:
        return pd.Series(values)
    return pd.Series(pd.Categorical.from_codes(values.astype(int), list(levels), ordered=True))


def _product(product: Product, factors: Mapping[str, Array], rows: int) -> Array:
    """Products of the columns of factors, the first factor's running fastest."""
    found = None
    for name, is_short in zip(*product, strict=True):
        own = factors[name][:, int(is_short) :]
        found = own if found is None else (own[:, :, None] * found[:, None, :]).reshape(rows, -1)
    return np.ones((rows, 1)) if found is None else found


def _labels(
    term: Coded, levels: Mapping[str, Sequence[str]], widths: Mapping[str, int], *, whole: bool = True
) -> tuple[str, ...]:
    """Names of a term's columns; levels and places alone where it is not the `whole`."""

    def own(name: str, is_short: bool) -> Iterable[str]:
        several = widths.get(name, 2) > 1
        places = levels[name][int(is_short) :] if name not in widths else [str(place) for place in range(widths[name])]
        if not whole:
            return places if several else [""]
        return [f"{variable(name)}[{place}]" for place in places] if several else [variable(name)]

    if not term.term:
        return ("Intercept",)
    return tuple(
        (":" if whole else ", ").join(part for part in reversed(parts) if part)
        for product in term.products
        for parts in itertools.product(*(own(*one) for one in reversed(list(zip(*product, strict=True)))))
    )


def _evaluated(name: str, tree: ast.expr, rows: values.Rows) -> Array:
    """Columns of a factor, (n, its own), that are finite."""
    try:
        with np.errstate(all="ignore"):  # what is not finite is told below
            found = values.columns(tree, rows)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{rows.what or _AGREED}: {name!r} cannot be computed: {error}") from error
    if rows.what is not None and not rows.stand_for_all and np.any(wrong := ~np.isfinite(found).all(axis=1)):
        where = int(np.argmax(wrong))
        frame = rows.frame
        value = found[where][~np.isfinite(found[where])][0]
        if isinstance(tree, ast.Name):
            raise DataError(f"{rows.what}: {name!r} is {value} in row {where}; correct or drop such rows.")
        read = [f"{one} is {frame[one].iloc[where]}" for one in sorted(expressions.columns(tree, rows.constants))]
        raise DataError(
            f"{rows.what}: {name!r} is {value} in row {where}, where {', '.join(read)}; correct such rows, or change "
            "the function."
        )
    return found
