"""From a client's rows to the columns that coefficients belong to, the same at all clients. The edge to formulae."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from formulae.environment import Environment
from formulae.matrices import DesignMatrices
from formulae.model_description import model_description

from fedppl.formulas.agreement import Agreement, coded, is_text
from fedppl.formulas.far import left_by_others, touched
from fedppl.formulas.moments import Moments, moments, standing_for_all
from fedppl.formulas.terms import Group, Terms
from fedppl.types import Array, DataError, DeclarationError

_AGREED = "the agreed columns"


@dataclass(frozen=True)
class Design:
    """How rows become columns.

    Attributes
    ----------
    matrices
        Of formulae, evaluated at rows that stand for all clients' and are nobody's.
    labels
        Names of the columns of each common term, by term.
    group_labels
        Names of the effects of each group.
    center, scale
        Means and sds of the columns of the common terms over rows that stand for all, (p,).
    group_scale
        Sizes of the effects' columns, by group.
    offset_center
        Mean of the sum of the offsets over these rows.
    splines
        Terms ``bs(...)`` as they are before their columns are centred, by name.
    left
        What other columns leave of `scale` where columns in products are far from 0; elsewhere `scale`, (p,).
    """

    terms: Terms
    agreement: Agreement
    matrices: Any
    labels: Mapping[str, tuple[str, ...]]
    group_labels: tuple[tuple[str, ...], ...]
    center: Array
    scale: Array
    group_scale: tuple[Array, ...]
    offset_center: float
    splines: Mapping[str, Any]
    left: Array = dataclasses.field(default_factory=lambda: np.ones(0))

    def common(self, frame: pd.DataFrame, what: str) -> Array:
        """Columns of the common terms, (n, p)."""
        found = self.matrices.common.terms if self.matrices.common is not None else {}
        return self._columns([found[name] for name in self.terms.common], frame, what)

    def offset(self, frame: pd.DataFrame, what: str) -> Array:
        """Sum of the offsets, (n,)."""
        found = [_evaluated(self.matrices.common.terms[name], frame, what)[:, 0] for name in self.terms.offsets]
        return np.asarray(np.sum(found, axis=0))

    def group(self, number: int, frame: pd.DataFrame, what: str) -> Array:
        """Columns of the effects of a group, (n, q)."""
        group = self.terms.groups[number]
        return self._columns(_expressions(self.matrices, group), frame, what)

    def side_by_side(self, frame: pd.DataFrame, what: str | None) -> Array:
        """Columns of the common terms, the sum of the offsets, and columns of the effects of all groups, (n, all).

        Without a `what` nothing is refused, and they may be no numbers.
        """
        whose = _AGREED if what is None else what
        offset = [self.offset(frame, whose)[:, None]] if self.terms.offsets else []
        groups = [self.group(number, frame, whose) for number in range(len(self.terms.groups))]
        with np.errstate(all="ignore"):
            return np.concatenate([self.common(frame, whose), *offset, *groups], axis=1)

    def _columns(self, terms: Sequence[Any], frame: pd.DataFrame, what: str) -> Array:
        """Columns of terms, (n, theirs), of rows that lie within the bounds of splines."""
        for name in {str(getattr(term, "name", "")) for term in terms} & set(self.splines):
            values = _evaluated(self.splines[name], frame, what)
            # A basis of splines is within 0 and 1 between its bounds, and nowhere else.
            outside = np.any((values < -1e-9) | (values > 1 + 1e-9), axis=1)
            if what != _AGREED and np.any(outside):
                raise DataError(
                    f"{what}: row {int(np.argmax(outside))} lies outside of the bounds of {name!r}; widen lower_bound "
                    "and upper_bound, the same at all clients."
                )
        return np.concatenate([np.zeros((len(frame), 0)), *(_evaluated(t, frame, what) for t in terms)], axis=1)


def build(terms: Terms, agreement: Agreement, constants: Mapping[str, Any]) -> Design:
    """The design that all clients share, from what they agreed on."""
    frame = standing_for_all(terms, agreement)
    described = model_description(terms.right)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of functions at rows that nobody has
        try:
            known = Environment([{"np": np, **constants}])
            matrices = DesignMatrices(described, frame, known)
            splines = _before_centring(matrices, terms, frame, known)
        except Exception as error:
            raise DeclarationError(
                f"the formula {terms.right!r} cannot be evaluated: {error}; functions take columns of numbers, what is "
                "no column is given by constants={...}, and what needs more is computed as a column before."
            ) from error
        found = matrices.common.terms if matrices.common is not None else {}
        labels = {name: tuple(map(str, found[name].labels)) for name in terms.common}
        design = Design(terms, agreement, matrices, labels, (), np.zeros(0), np.ones(0), (), 0.0, {})
        common = [_moments(design, found[name]) for name in terms.common]
        groups = [[_moments(design, one) for one in _expressions(matrices, group)] for group in terms.groups]
        offset = _mean_offset(design, frame) if terms.offsets else 0.0
    effects = tuple(
        tuple(label for one in _expressions(matrices, group) for label in _labels(one)) for group in terms.groups
    )
    center, scale = (np.concatenate([np.zeros(0), *(one[k] for one in common)]) for k in range(2))
    sizes = tuple(np.concatenate([one.size for one in group]) for group in groups)
    offset = offset if np.isfinite(offset) else 0.0
    found = Design(terms, agreement, matrices, labels, effects, center, scale, sizes, offset, splines)
    return dataclasses.replace(found, left=_left(found))


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


def _moments(design: Design, term: Any) -> Moments:
    """Moments of a term's columns over rows that stand for all."""
    read = {str(name) for name in getattr(term, "var_names", ())}
    return moments(read, design.terms, design.agreement, lambda frame: design._columns([term], frame, _AGREED))


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


def _expressions(matrices: Any, group: Group) -> list[Any]:
    """What varies by a group's factor, in the order of the formula."""
    return [term.expr for term in matrices.group.terms.values() if _factor(term) == group.factor]


def _factor(term: Any) -> tuple[str, ...]:
    return tuple(str(component.name) for component in term.factor.components)


def _labels(expression: Any) -> tuple[str, ...]:
    return tuple(str(label) for label in getattr(expression, "labels", None) or ("Intercept",))


def _evaluated(term: Any, frame: pd.DataFrame, what: str) -> Array:
    """Columns of a term, (n, its own)."""
    try:
        with np.errstate(all="ignore"):  # what is not finite is told below
            values = np.asarray(term.eval_new_data(frame), dtype=float)
    except Exception as error:
        raise DataError(f"{what}: {getattr(term, 'name', 'a term')!r} cannot be computed: {error}") from error
    values = values.reshape(len(frame), -1)
    if what != _AGREED and np.any(wrong := ~np.isfinite(values).all(axis=1)):
        where = int(np.argmax(wrong))
        read = [f"{name} is {frame[name].iloc[where]}" for name in sorted(map(str, term.var_names)) if name in frame]
        value = values[where][~np.isfinite(values[where])][0]
        raise DataError(
            f"{what}: {getattr(term, 'name', 'a term')!r} is {value} in row {where}, where {', '.join(read)}; correct "
            "such rows, or change the function."
        )
    return values


def _before_centring(matrices: Any, terms: Terms, frame: pd.DataFrame, known: Environment) -> dict[str, Any]:
    """Every ``bs(...)`` as it is with ``center=False``, by the name that it has in the formula."""
    every = [matrices.common.terms[name] for name in terms.common] if matrices.common is not None else []
    every += [one for group in terms.groups for one in _expressions(matrices, group)]
    found = {}
    for name in {str(getattr(term, "name", "")) for term in every}:
        if name.startswith("bs("):
            plain = re.sub(r",\s*(center|intercept)\s*=\s*\w+", "", name)[:-1] + ", center=False)"
            (found[name],) = DesignMatrices(model_description(f"0 + {plain}"), frame, known).common.terms.values()
    return found
