"""Outcomes that a formula expects, averaged over rows, in NumPy: at draws of its variables and at changed columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedppl.formulas import design as designs
from fedppl.formulas.predictor import Spec, effect_labels, has_intercept, tag
from fedppl.types import Array

_STEP = 1e-3  # of a derivative, in sds of the column
_AT_ONCE = 2_000_000  # numbers


class Rows(NamedTuple):
    """A client's rows: the columns right of ~, the groups, and how many rows each stands for."""

    table: pd.DataFrame
    groups: Mapping[int, Array]  # places in nested groups, by number of the group
    weights: Array


def rows_of(spec: Spec, arrays: Mapping[str, Any]) -> Rows:
    """The rows that arrays of the builder were made from."""
    first = next(iter(arrays.values())) if "outcome" not in arrays else arrays["outcome"]
    columns = {
        name: designs.from_plain(name, arrays[f"column_{name}"], spec.design.agreement) for name in spec.terms.columns
    }
    groups = {number: arrays[f"row_{number}"] for number, one in enumerate(spec.terms.groups) if len(one.factor) > 1}
    weights = np.asarray(arrays.get("weights", np.ones(len(first))), dtype=float)
    return Rows(pd.DataFrame(columns, index=np.arange(len(first))), groups, weights)


def at_levels(spec: Spec, rows: Rows, column: str, draws: Mapping[str, Array], at: float | None) -> dict[str, Array]:
    """Mean outcome were all rows of each level, and differences from the reference: name to (S,) or (S, K)."""
    levels = spec.design.agreement.columns[column].levels
    found = {}
    for level in levels:
        same = pd.Categorical([level] * len(rows.table), categories=list(levels), ordered=True)
        found[level] = averaged(spec, rows._replace(table=rows.table.assign(**{column: same})), draws, at)
    return found | {f"{level} - {levels[0]}": found[level] - found[levels[0]] for level in levels[1:]}


def slope(spec: Spec, rows: Rows, column: str, draws: Mapping[str, Array], at: float | None) -> dict[str, Array]:
    """Mean derivative of the outcome by a column."""
    step = _STEP * spec.design.agreement.columns[column].sd
    tables = [rows.table.assign(**{column: rows.table[column] + sign * step}) for sign in (1.0, -1.0)]
    high, low = (averaged(spec, rows._replace(table=table), draws, at) for table in tables)
    return {"slope": (high - low) / (2.0 * step)}


def averaged(spec: Spec, rows: Rows, draws: Mapping[str, Array], at: float | None) -> Array:
    """Mean outcome over rows at every draw, (S,), or (S, K) of each level of an outcome that has levels."""
    count, size = len(rows.table), len(next(iter(draws.values())))
    width = max(len(spec.scales.levels), 1) * max(len(spec.scales.cuts), 1)
    step = max(1, _AT_ONCE // (size * width))
    total: Any = 0.0
    for start in range(0, count, step):
        part = slice(start, start + step)
        places = {number: one[part] for number, one in rows.groups.items()}
        eta = _eta(spec, Rows(rows.table.iloc[part].reset_index(drop=True), places, rows.weights[part]), draws)
        total = total + np.tensordot(_mean(spec, eta, draws, at), rows.weights[part], axes=(1, 0))
    return np.asarray(total / rows.weights.sum())


def by_row(spec: Spec, rows: Rows, draws: Mapping[str, Array], at: float | None) -> Array:
    """Mean outcome of every row at every draw, (S, n), or (S, n, K) of each level of an outcome that has levels."""
    return _mean(spec, _eta(spec, rows, draws), draws, at)


def _mean(spec: Spec, eta: Array, draws: Mapping[str, Array], at: float | None) -> Array:
    parameters = {name: draws[name][:, None] for name in spec.family.parameters(spec.scales)}
    return spec.family.mean(eta, parameters, spec.scales, at)


def _eta(spec: Spec, rows: Rows, draws: Mapping[str, Array]) -> Array:
    """The linear predictor, (S, n) or (S, n, levels)."""
    design, what, size = spec.design, "rows of a client", len(next(iter(draws.values())))
    tail = (len(spec.levels),) if spec.levels else ()
    eta = np.zeros((size, len(rows.table), *tail))
    if spec.terms.common:
        beta = [draws[name].reshape(size, len(design.labels[name]), *tail) for name in spec.terms.common]
        eta = eta + _times(design.common(rows.table, what), np.concatenate(beta, axis=1))
    if has_intercept(spec.terms, spec.family):
        eta = eta + draws["Intercept"].reshape(size, 1, *tail)
    if spec.terms.offsets:
        eta = eta + design.offset(rows.table, what)
    for number, group in enumerate(spec.terms.groups):
        effects = draws[f"{tag(group)}_effects"]
        own = (len(effect_labels(spec, number)) // max(len(spec.levels), 1), *tail)
        columns = design.group(number, rows.table, what)
        if len(group.factor) == 1:
            eta = eta + _times(columns, effects.reshape(size, *own))
        else:
            of_rows = effects[:, rows.groups[number]].reshape(size, len(rows.table), *own)
            eta = eta + np.sum(columns.reshape(*columns.shape, *(1 for _ in tail)) * of_rows, axis=2)
    return eta


def _times(columns: Array, beta: Array) -> Array:
    """Columns (n, p) by coefficients (S, p, ...): (S, n, ...)."""
    return np.asarray(np.moveaxis(np.tensordot(columns, beta, axes=(1, 1)), 0, 1))
