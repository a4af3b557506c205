"""The linear predictor in PyMC, with default priors, and mean outcomes at draws in NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt

from fedppl.formulas import design as designs
from fedppl.formulas.design import Design
from fedppl.formulas.families import Family, Scales
from fedppl.formulas.priors import Prior
from fedppl.formulas.terms import Group, Terms, variable
from fedppl.types import Array, DeclarationError

_WIDE = 2.5  # prior sds of coefficients, in the units of outcome and column
CORRELATION = 2.0  # η of LKJ


class Effects(NamedTuple):
    """Effects that vary by a factor, and the priors of what clients share of them."""

    name: str  # first part of the names of the variables
    by_client: bool  # or by groups within each client
    labels: tuple[str, ...]  # by level of the outcome where levels have their own predictors
    sd: Prior
    partial: Prior | None  # of (1 + r) / 2 of partial correlations r; None without correlations

    @property
    def pairs(self) -> tuple[str, ...]:
        """Labels of correlations."""
        return tuple(f"{self.labels[j]}, {self.labels[i]}" for i, j in _pairs(len(self.labels)))


@dataclass(frozen=True, eq=False)
class Spec:
    """All that defines the predictor of a formula, once clients agreed; priors are the user's own or default ones."""

    terms: Terms
    family: Family
    design: Design
    scales: Scales
    priors: Mapping[str, Prior]  # the user's own
    correlated: bool

    @property
    def levels(self) -> tuple[str, ...]:
        """Levels of the outcome that have their own predictors; empty with one predictor."""
        return self.scales.levels[1:] if self.family.several else ()

    @property
    def level_dim(self) -> tuple[str, ...]:
        """Dim of these levels."""
        return (f"{self.terms.response.variable}_level",) if self.family.several else ()

    @functools.cached_property
    def intercept(self) -> Prior:
        """Prior of the intercept: by default of the predictor at the means of columns and offsets."""
        default = Prior("Normal", mu=self.family.center(self.scales), sigma=_WIDE * self.family.unit(self.scales))
        return self.priors.get("Intercept", default)

    @functools.cached_property
    def coefficients(self) -> dict[str, Prior]:
        """Priors of the common terms."""
        start, priors = 0, {}
        for name in self.terms.common:
            count, given = len(self.design.labels[name]), self.priors.get(name)
            sd: Any = _WIDE * self.family.unit(self.scales) / self.design.left[start : start + count]
            sd = float(sd[0]) if count == 1 else sd[:, None] if self.levels else sd
            default = Prior("Normal", mu=0.0, sigma=sd)
            priors[name] = default if given is None else given.by_rows() if self.levels and count > 1 else given
            start += count
        return priors

    @functools.cached_property
    def effects(self) -> tuple[Effects, ...]:
        """Effects by group."""
        return tuple(map(self._effects, self.terms.groups, self.design.group_labels, self.design.group_scale))

    def _effects(self, group: Group, labels: tuple[str, ...], sizes: Array) -> Effects:
        if self.levels:
            labels = tuple(f"{label}:{level}" for label in labels for level in self.levels)
            sizes = np.repeat(sizes, len(self.levels))
        sd, *partial = spreads(group, len(labels), correlated=self.correlated)
        scale: Any = self.family.unit(self.scales) / sizes
        of_sd = self.priors.get(sd, Prior("HalfNormal", sigma=scale if len(scale) > 1 else float(scale[0])))
        of_partial = None
        if partial:
            # Correlations are LKJ(η) where (1 + r) / 2 of the correlation r of effects i and j given effects 0 to j - 1
            # has Beta(a, a) with a = η + (d - 2 - j) / 2.
            a: Any = CORRELATION + (len(labels) - 2 - np.array([j for _, j in _pairs(len(labels))])) / 2
            a = float(a[0]) if len(a) == 1 else a
            of_partial = self.priors.get(partial[0], Prior("Beta", alpha=a, beta=a))
        return Effects(tag(group), len(group.factor) == 1, labels, of_sd, of_partial)


def _pairs(count: int) -> list[tuple[int, int]]:
    """Places below the diagonal of a matrix, by row."""
    return [(i, j) for i in range(count) for j in range(i)]


def has_intercept(terms: Terms, family: Family) -> bool:
    """Whether there is an intercept."""
    return terms.intercept and family.intercept


def tag(group: Group) -> str:
    """First part of the names of a group's variables."""
    return variable("_".join(group.factor))


def spreads(group: Group, count: int, *, correlated: bool) -> tuple[str, ...]:
    """Names of the shared variables of a group: sds, and partial correlations if there are several effects."""
    return (f"{tag(group)}_sd", *([f"{tag(group)}_partial"] if correlated and count > 1 else []))


def coords(spec: Spec) -> dict[str, list[str]]:
    """Labels of all dims."""
    by_dim = {f"{k}_dim": list(spec.design.entries[k]) for k, own in spec.design.labels.items() if is_labelled(k, own)}
    by_dim |= {dim: list(spec.levels) for dim in spec.level_dim}
    for one in spec.effects:
        by_dim[f"{one.name}_effect"] = list(one.labels)
        if one.partial is not None:
            by_dim[f"{one.name}_pair"] = list(one.pairs)
    return by_dim


def is_labelled(name: str, labels: Sequence[str]) -> bool:
    """Whether a coefficient has several entries, or one that is named after a level."""
    return tuple(labels) != (name,)


def linear_predictor(spec: Spec, data: Mapping[str, Any]) -> tuple[Any, Any]:
    """η in the open model, (n,) or (n, levels), and its value without intercept at the means of the columns."""
    parts = []
    for name, prior in spec.coefficients.items():
        labels = spec.design.labels[name]
        dims = (*([f"{name}_dim"] if is_labelled(name, labels) else []), *spec.level_dim)
        beta = prior.declared(name, dims=dims or None)
        parts.append(beta.reshape((len(labels), len(spec.levels))) if spec.levels else pt.atleast_1d(beta))
    middle: Any = spec.design.offset_center
    if parts:
        beta = pt.concatenate(parts)
        middle = middle + pt.dot(spec.design.center, beta)
        eta = data["common"] @ beta
    else:
        eta = data["rows"][:, None] if spec.levels else data["rows"]
    if has_intercept(spec.terms, spec.family):
        given, of_levels = spec.intercept.parameters, spec.level_dim or None
        if "Intercept" in spec.priors:
            eta = eta + spec.intercept.declared("Intercept", dims=of_levels)
        else:
            eta = eta + pm.Normal("Intercept", given["mu"] - middle, given["sigma"], dims=of_levels)
    if "offset" in data:
        eta = eta + data["offset"]
    for number, one in enumerate(spec.effects):
        eta = eta + _declared(one, spec.levels, number, data)
    return eta, middle


def _correlation_root(partial: Any, count: int) -> Any:
    """The lower triangular root of a correlation matrix from (1 + r) / 2 of its partial correlations.

    It uses single numbers: arrays of constants in a graph may be a client's data, and are not shared.
    """
    rows, at = [], 0
    for i in range(count):
        row, left = [], pt.as_tensor_variable(1.0)  # sd of effect i given those before j
        for _ in range(i):
            row.append((2 * partial[at] - 1) * left)
            left = left * 2 * pt.sqrt(partial[at] * (1 - partial[at]))
            at += 1
        rows.append(pt.stack([*row, left, *([0.0] * (count - 1 - i))]))
    return pt.stack(rows)


def _declared(one: Effects, levels: Sequence[str], number: int, data: Mapping[str, Any]) -> Any:
    """Effects that vary by a factor: local, with shared sds and correlations."""
    count, dim = len(one.labels), f"{one.name}_effect"
    sd = pt.atleast_1d(one.sd.declared(f"{one.name}_sd", dims=dim if count > 1 else None))
    root: Any = None
    if one.partial is not None:
        root = _correlation_root(one.partial.declared(f"{one.name}_partial", dims=f"{one.name}_pair"), count)
        correlations = pt.stack([(root[i] * root[j]).sum() for i, j in _pairs(count)])
        pm.Deterministic(f"{one.name}_corr", correlations, dims=f"{one.name}_pair")

    def scaled(z: Any) -> Any:  # effects with covariance D R D
        return sd * z if root is None else z @ (sd[:, None] * root).T

    columns, width = data[f"effects_{number}"], count // max(len(levels), 1)
    if one.by_client:
        z = pm.Normal(f"{one.name}_z", 0.0, 1.0, shape=count)
        effects = pm.Deterministic(f"{one.name}_effects", scaled(z), dims=dim)
        return columns @ (effects.reshape((width, len(levels))) if levels else effects)
    z = pm.Normal(f"{one.name}_z", 0.0, 1.0, shape=(data[f"of_{number}"].shape[0], count))
    effects = pm.Deterministic(f"{one.name}_effects", scaled(z))[data[f"row_{number}"]]
    if levels:
        return (columns[:, :, None] * effects.reshape((-1, width, len(levels)))).sum(axis=1)
    return (columns * effects).sum(axis=1)


# Mean outcomes over rows in NumPy, at draws of the variables and at changed columns -----------------------------------

_AT_ONCE = 2_000_000  # numbers in memory
_WHOSE = "rows of a client"
_STEP = 1e-5  # of the linear predictor, relative to its size (at least 1)


class Rows(NamedTuple):
    """A client's rows: the columns right of ~, the groups, and the weights."""

    table: pd.DataFrame
    groups: Mapping[int, Array]  # places in nested groups, by number of the group
    weights: Array


def rows_of(spec: Spec, arrays: Mapping[str, Any]) -> Rows:
    """The rows that arrays of the builder were made from."""
    count, agreed = len(next(iter(arrays.values()))), spec.design.agreement.columns
    columns = {name: arrays[f"column_{name}"] for name in spec.terms.columns}
    for name, values in columns.items():
        if agreed[name].levels:
            columns[name] = designs.categories(agreed[name], values.astype(int))
    groups = {number: arrays[f"row_{number}"] for number, one in enumerate(spec.effects) if not one.by_client}
    weights = np.asarray(arrays.get("weights", np.ones(count)), dtype=float)
    return Rows(pd.DataFrame(columns, index=np.arange(count)), groups, weights)


def at_levels(spec: Spec, rows: Rows, column: str, draws: Mapping[str, Array], at: float | None) -> dict[str, Array]:
    """Mean outcome with all rows at each level, or at 0 and 1, and differences from the first; each (S,) or (S, K)."""
    agreed = spec.design.agreement.columns[column]
    at_each: dict[str, Any] = {"0": 0.0, "1": 1.0}  # of a column of truths, which are numbers
    if agreed.levels:
        codes = np.zeros(len(rows.table), dtype=int)
        at_each = {level: designs.categories(agreed, codes + place) for place, level in enumerate(agreed.levels)}
    means = {
        name: averaged(spec, rows._replace(table=rows.table.assign(**{column: values})), draws, at)
        for name, values in at_each.items()
    }
    first, *others = means
    return means | {f"{name} - {first}": means[name] - means[first] for name in others}


def slope(spec: Spec, rows: Rows, column: str, draws: Mapping[str, Array], at: float | None) -> dict[str, Array]:
    """Mean derivative of the outcome by a column, along the derivative of the linear predictor."""
    columns = spec.design.side_by_side(rows.table, _WHOSE)
    sd = spec.design.agreement.columns[column].sd
    slopes = derivatives(spec.design.side_by_side, rows.table, column, sd, _WHOSE)

    def largest(values: Array) -> Array:  # over the predictors: the step is in the direction of their derivatives
        return np.max(np.abs(values), axis=-1, keepdims=True) if spec.levels else np.abs(values)

    def of(part: slice, places: Mapping[int, Array]) -> Array:
        along = _eta(spec, slopes[part], places, draws)
        eta = _eta(spec, columns[part], places, draws) + _intercept_at(spec, draws)
        size = largest(along)
        step = _STEP * np.maximum(1.0, largest(eta)) * along / np.where(size > 0, size, 1.0)
        high, low = (_mean(spec, eta + sign * step, draws, at) for sign in (1.0, -1.0))
        rate = size / (2.0 * np.where(size > 0, largest(step), 1.0))
        return np.asarray((high - low) * (rate if high.ndim == rate.ndim else rate[..., None]))

    return {"slope": _over_rows(spec, rows, draws, of)}


def averaged(spec: Spec, rows: Rows, draws: Mapping[str, Array], at: float | None) -> Array:
    """Mean outcome over rows at each draw, (S,), or (S, K) for an outcome with levels."""
    columns = spec.design.side_by_side(rows.table, _WHOSE)
    return _over_rows(spec, rows, draws, lambda part, places: _outcomes(spec, columns[part], places, draws, at))


def by_row(spec: Spec, rows: Rows, draws: Mapping[str, Array], at: float | None) -> Array:
    """Mean outcome of each row at each draw, (S, n), or (S, n, K) for an outcome with levels."""
    return _outcomes(spec, spec.design.side_by_side(rows.table, _WHOSE), rows.groups, draws, at)


def _over_rows(
    spec: Spec, rows: Rows, draws: Mapping[str, Array], of: Callable[[slice, Mapping[int, Array]], Array]
) -> Array:
    """Weighted mean over rows of a function of a part of them and its places in groups, (S, n, ...)."""
    count, size = len(rows.table), len(next(iter(draws.values())))
    width = max(len(spec.scales.levels), 1) * max(len(spec.scales.cuts), 1)
    step = max(1, _AT_ONCE // (size * width))
    total: Any = 0.0
    for part in (slice(start, start + step) for start in range(0, count, step)):
        places = {number: one[part] for number, one in rows.groups.items()}
        total = total + np.tensordot(of(part, places), rows.weights[part], axes=(1, 0))
    return np.asarray(total / rows.weights.sum())


def _outcomes(
    spec: Spec, columns: Array, places: Mapping[int, Array], draws: Mapping[str, Array], at: float | None
) -> Array:
    """Mean outcomes at columns of `Design.side_by_side`, (S, n) or (S, n, K)."""
    return _mean(spec, _eta(spec, columns, places, draws) + _intercept_at(spec, draws), draws, at)


def _mean(spec: Spec, eta: Array, draws: Mapping[str, Array], at: float | None) -> Array:
    """Mean outcomes at linear predictors, (S, n) or (S, n, K)."""
    parameters = {name: draws[name][:, None] for name in spec.family.parameters(spec.scales)}
    return spec.family.mean(eta, parameters, spec.scales, at)


def _intercept_at(spec: Spec, draws: Mapping[str, Array]) -> Any:
    """Draws of the intercept, (S, 1) or (S, 1, levels)."""
    tail = (len(spec.levels),) if spec.levels else ()
    return draws["Intercept"].reshape(-1, 1, *tail) if has_intercept(spec.terms, spec.family) else 0.0


def _eta(spec: Spec, columns: Array, places: Mapping[int, Array], draws: Mapping[str, Array]) -> Array:
    """The linear predictor without its intercept, (S, n) or (S, n, levels), from `Design.side_by_side`."""
    size, count = len(next(iter(draws.values()))), len(columns)
    tail = (len(spec.levels),) if spec.levels else ()
    eta, start = np.zeros((size, count, *tail)), 0
    for name in spec.terms.common:
        width = len(spec.design.labels[name])
        eta = eta + _times(columns[:, start : start + width], draws[name].reshape(size, width, *tail))
        start += width
    if spec.terms.offsets:
        eta, start = eta + columns[:, start], start + 1
    for number, one in enumerate(spec.effects):
        width = len(one.labels) // max(len(spec.levels), 1)
        own_columns, effects = columns[:, start : start + width], draws[f"{one.name}_effects"]
        start += width
        if one.by_client:
            eta = eta + _times(own_columns, effects.reshape(size, width, *tail))
        else:
            effects_of_rows = effects[:, places[number]].reshape(size, count, width, *tail)
            eta = eta + np.sum(own_columns.reshape(*own_columns.shape, *(1 for _ in tail)) * effects_of_rows, axis=2)
    return eta


def _times(columns: Array, beta: Array) -> Array:
    """Columns (n, p) by coefficients (S, p, ...): (S, n, ...)."""
    return np.asarray(np.moveaxis(np.tensordot(columns, beta, axes=(1, 1)), 0, 1))


_STEPS = 10.0 ** -np.arange(2.0, 16.0)  # in sds of the column
_ROUNDING = 4.0 * float(np.finfo(float).eps)
_EXACT = 1e-4  # relative to the slope


def derivatives(
    columns: Callable[[pd.DataFrame, str | None], Array], table: pd.DataFrame, column: str, sd: float, what: str
) -> Array:
    """Derivatives of ``columns(table, what)`` by a column, (n, q); refuse rows where no step is accurate.

    A function's length scale differs between rows, as the logarithm's, and its domain may end at one, as a spline's. So
    each row takes, of many steps, the one that agrees best with a step ten times as long, but for rounding; one-sided
    where the domain ends.
    """
    x = table[column].to_numpy(dtype=float)
    here = columns(table, what)
    best, error, before = np.zeros_like(here), np.full(here.shape, np.inf), np.full(here.shape, np.nan)
    negligible = 1e-2 * (np.abs(here) + 1.0) / sd  # slope
    for step in _STEPS * sd:
        with np.errstate(all="ignore"):
            quotient, size = _difference(columns, table, column, x, here, step)
            estimate = np.abs(quotient - before) + _ROUNDING * (size + np.abs(x[:, None] * quotient)) / step
            estimate = estimate / (np.abs(quotient) + negligible)
        better = estimate < error
        best, error, before = np.where(better, quotient, best), np.where(better, estimate, error), quotient
    unknown = ~(error <= _EXACT)
    if np.any(unknown):
        row = int(np.argmax(unknown.any(axis=1)))
        where = f"in row {row}, where {column!r} is {x[row]:.6g}"
        remedy = "use one that has, such as np.log1p, or compare values by fit.client(id, predict=...)"
        raise DeclarationError(f"{what}: a function of {column!r} has no finite slope {where}; {remedy}.")
    return best


def _difference(
    columns: Any, table: pd.DataFrame, column: str, x: Array, here: Array, step: float
) -> tuple[Array, Array]:
    """Difference quotients of rows, and sizes of the values; NaN where neither side is in the domain."""
    ends = {k: x + k * step for k in (1, -1)}
    sides = {k: _within(columns, table, column, end) for k, end in ends.items()}
    size = np.maximum(np.abs(here), np.fmax(np.abs(sides[1]), np.abs(sides[-1])))
    quotient = (sides[1] - sides[-1]) / (ends[1] - ends[-1])[:, None]
    for k in (1, -1):
        one_sided = np.isfinite(sides[k]).all(axis=1) & ~np.isfinite(sides[-k]).all(axis=1)
        if not np.any(one_sided):
            continue
        rows = table[one_sided].reset_index(drop=True)
        far = _within(columns, rows, column, x[one_sided] + 2 * k * step)
        # Second order, one-sided.
        quotient[one_sided] = (4.0 * sides[k][one_sided] - far - 3.0 * here[one_sided]) / (2.0 * k * step)
    return quotient, size


def _within(columns: Any, table: pd.DataFrame, column: str, values: Array) -> Array:
    """Columns at other values of one; NaN in rows outside of a function's domain."""
    values_there = np.asarray(columns(table.assign(**{column: values}), None))
    values_there[~np.isfinite(values_there).all(axis=1)] = np.nan
    return values_there
