"""The linear predictor in PyMC, with default priors, and mean outcomes at draws in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


class Spec(NamedTuple):
    """All that defines the predictor of a formula, once clients agreed."""

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


def has_intercept(terms: Terms, family: Family) -> bool:
    """Whether there is an intercept."""
    return terms.intercept and family.intercept


def tag(group: Group) -> str:
    """First part of the names of a group's variables."""
    return variable("_".join(group.factor))


def spreads(group: Group, count: int, *, correlated: bool) -> tuple[str, ...]:
    """Names of the shared variables of a group: sds, and partial correlations if there are several effects."""
    return (f"{tag(group)}_sd", *([f"{tag(group)}_partial"] if correlated and count > 1 else []))


def effect_labels(spec: Spec, number: int) -> tuple[str, ...]:
    """Names of the effects of a group, by level of the outcome where levels have their own predictors."""
    labels = spec.design.group_labels[number]
    return tuple(f"{label}:{level}" for label in labels for level in spec.levels) if spec.levels else labels


def coefficients(spec: Spec) -> dict[str, Prior]:
    """Priors of the common terms."""
    unit, start, priors = spec.family.unit(spec.scales), 0, {}
    for name in spec.terms.common:
        count = len(spec.design.labels[name])
        sd: Any = _WIDE * unit / spec.design.left[start : start + count]
        sd = float(sd[0]) if count == 1 else sd[:, None] if spec.levels else sd
        given = spec.priors.get(name)
        default = Prior("Normal", mu=0.0, sigma=sd)
        priors[name] = default if given is None else given.by_rows() if spec.levels and count > 1 else given
        start += count
    return priors


def intercept(spec: Spec) -> Prior:
    """Default prior of the predictor at the means of columns and offsets, or a user's prior of the intercept."""
    default = Prior("Normal", mu=spec.family.center(spec.scales), sigma=_WIDE * spec.family.unit(spec.scales))
    return spec.priors.get("Intercept", default)


def sds(spec: Spec, number: int) -> Prior:
    """Prior of the sds of a group's effects."""
    sizes = spec.family.unit(spec.scales) / np.repeat(spec.design.group_scale[number], max(len(spec.levels), 1))
    default = Prior("HalfNormal", sigma=sizes if len(sizes) > 1 else float(sizes[0]))
    return spec.priors.get(spreads_of(spec, number)[0], default)


def partials(spec: Spec, number: int) -> Prior:
    """Prior of (1 + r) / 2 of a group's partial correlations r, with which correlations are LKJ(η).

    The correlation of effects i and j given effects 0 to j - 1 is r; (1 + r) / 2 has Beta(a, a) with
    a = η + (d - 2 - j) / 2.
    """
    count = len(effect_labels(spec, number))
    a = CORRELATION + (count - 2 - np.tril_indices(count, -1)[1]) / 2
    shape = float(a[0]) if len(a) == 1 else a
    return spec.priors.get(spreads_of(spec, number)[1], Prior("Beta", alpha=shape, beta=shape))


def spreads_of(spec: Spec, number: int) -> tuple[str, ...]:
    """`spreads` of a group."""
    return spreads(spec.terms.groups[number], len(effect_labels(spec, number)), correlated=spec.correlated)


def spread_labels(spec: Spec) -> dict[str, tuple[str, ...]]:
    """What the entries of sds and partial correlations belong to, by their names."""
    labels: dict[str, tuple[str, ...]] = {}
    for number, group in enumerate(spec.terms.groups):
        names, pairs = spreads_of(spec, number), coords(spec).get(f"{tag(group)}_pair", [])
        labels |= dict(zip(names, (effect_labels(spec, number), tuple(pairs)), strict=False))
    return labels


def coords(spec: Spec) -> dict[str, list[str]]:
    """Labels of all dims."""
    by_dim = {f"{k}_dim": list(spec.design.entries[k]) for k, own in spec.design.labels.items() if is_labelled(k, own)}
    by_dim |= {dim: list(spec.levels) for dim in spec.level_dim}
    for number, group in enumerate(spec.terms.groups):
        labels = effect_labels(spec, number)
        by_dim[f"{tag(group)}_effect"] = list(labels)
        if len(spreads_of(spec, number)) > 1:
            pairs = zip(*np.tril_indices(len(labels), -1), strict=True)
            by_dim[f"{tag(group)}_pair"] = [f"{labels[j]}, {labels[i]}" for i, j in pairs]
    return by_dim


def is_labelled(name: str, labels: Sequence[str]) -> bool:
    """Whether a coefficient has several entries, or one that is named after a level."""
    return tuple(labels) != (name,)


def linear_predictor(spec: Spec, data: Mapping[str, Any]) -> tuple[Any, Any]:
    """η in the open model, (n,) or (n, levels), and its value without intercept at the means of the columns."""
    parts = []
    for name, prior in coefficients(spec).items():
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
        prior, dims = intercept(spec), spec.level_dim or None
        if "Intercept" in spec.priors:
            eta = eta + prior.declared("Intercept", dims=dims)
        else:
            mu, sigma = prior.parameters["mu"] - middle, prior.parameters["sigma"]
            eta = eta + pm.Normal("Intercept", mu, sigma, dims=dims)
    if "offset" in data:
        eta = eta + data["offset"]
    for number in range(len(spec.terms.groups)):
        eta = eta + _effects(spec, number, data)
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


def _effects(spec: Spec, number: int, data: Mapping[str, Any]) -> Any:
    """Effects that vary by a factor: local, with shared sds and correlations."""
    group, labels = spec.terms.groups[number], effect_labels(spec, number)
    names, start = spreads_of(spec, number), tag(group)
    sd = pt.atleast_1d(sds(spec, number).declared(names[0], dims=f"{start}_effect" if len(labels) > 1 else None))
    root: Any = None
    if len(names) > 1:
        partial = partials(spec, number).declared(names[1], dims=f"{start}_pair")
        root = _correlation_root(partial, len(labels))
        pairs = zip(*np.tril_indices(len(labels), -1), strict=True)
        correlations = pt.stack([(root[i] * root[j]).sum() for i, j in pairs])
        pm.Deterministic(f"{start}_corr", correlations, dims=f"{start}_pair")

    def scaled(z: Any) -> Any:  # effects with covariance D R D
        return sd * z if root is None else z @ (sd[:, None] * root).T

    columns, width = data[f"effects_{number}"], len(spec.design.group_labels[number])
    if len(group.factor) == 1:
        z = pm.Normal(f"{start}_z", 0.0, 1.0, shape=len(labels))
        effects = pm.Deterministic(f"{start}_effects", scaled(z), dims=f"{start}_effect")
        return columns @ (effects.reshape((width, len(spec.levels))) if spec.levels else effects)
    z = pm.Normal(f"{start}_z", 0.0, 1.0, shape=(data[f"of_{number}"].shape[0], len(labels)))
    effects = pm.Deterministic(f"{start}_effects", scaled(z))[data[f"row_{number}"]]
    if spec.levels:
        return (columns[:, :, None] * effects.reshape((-1, width, len(spec.levels)))).sum(axis=1)
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
    first = next(iter(arrays.values())) if "outcome" not in arrays else arrays["outcome"]
    columns = {
        name: designs.from_plain(name, arrays[f"column_{name}"], spec.design.agreement) for name in spec.terms.columns
    }
    groups = {number: arrays[f"row_{number}"] for number, one in enumerate(spec.terms.groups) if len(one.factor) > 1}
    weights = np.asarray(arrays.get("weights", np.ones(len(first))), dtype=float)
    return Rows(pd.DataFrame(columns, index=np.arange(len(first))), groups, weights)


def at_levels(spec: Spec, rows: Rows, column: str, draws: Mapping[str, Array], at: float | None) -> dict[str, Array]:
    """Mean outcome with all rows at each level, or at 0 and 1, and differences from the first; each (S,) or (S, K)."""
    levels = spec.design.agreement.columns[column].levels
    at_each: dict[str, Any] = {"0": 0.0, "1": 1.0}  # of a column of truths, which are numbers
    if levels:
        at_each = {
            one: pd.Categorical([one] * len(rows.table), categories=list(levels), ordered=True) for one in levels
        }
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

    def of(part: slice) -> Array:
        places = {number: one[part] for number, one in rows.groups.items()}
        along = _eta(spec, slopes[part], places, draws)
        eta = _eta(spec, columns[part], places, draws) + _intercept_at(spec, draws)

        def largest(values: Array) -> Array:  # over the predictors: the step is in the direction of their derivatives
            return np.max(np.abs(values), axis=-1, keepdims=True) if spec.levels else np.abs(values)

        size = largest(along)
        step = _STEP * np.maximum(1.0, largest(eta)) * along / np.where(size > 0, size, 1.0)
        high, low = (_mean(spec, eta + sign * step, draws, at) for sign in (1.0, -1.0))
        rate = size / (2.0 * np.where(size > 0, largest(step), 1.0))
        return np.asarray((high - low) * (rate if high.ndim == rate.ndim else rate[..., None]))

    return {"slope": _over_rows(spec, rows, draws, of)}


def averaged(spec: Spec, rows: Rows, draws: Mapping[str, Array], at: float | None) -> Array:
    """Mean outcome over rows at each draw, (S,), or (S, K) for an outcome with levels."""
    columns = spec.design.side_by_side(rows.table, _WHOSE)

    def of(part: slice) -> Array:
        places = {number: one[part] for number, one in rows.groups.items()}
        return _mean(spec, _eta(spec, columns[part], places, draws) + _intercept_at(spec, draws), draws, at)

    return _over_rows(spec, rows, draws, of)


def _over_rows(spec: Spec, rows: Rows, draws: Mapping[str, Array], of: Callable[[slice], Array]) -> Array:
    """Weighted mean over rows of a function that is (S, n, ...) for a part of the rows."""
    count, size = len(rows.table), len(next(iter(draws.values())))
    width = max(len(spec.scales.levels), 1) * max(len(spec.scales.cuts), 1)
    step = max(1, _AT_ONCE // (size * width))
    parts = [slice(start, start + step) for start in range(0, count, step)]
    total: Any = sum(np.tensordot(of(part), rows.weights[part], axes=(1, 0)) for part in parts)
    return np.asarray(total / rows.weights.sum())


def by_row(spec: Spec, rows: Rows, draws: Mapping[str, Array], at: float | None) -> Array:
    """Mean outcome of each row at each draw, (S, n), or (S, n, K) for an outcome with levels."""
    columns = spec.design.side_by_side(rows.table, _WHOSE)
    return _mean(spec, _eta(spec, columns, rows.groups, draws) + _intercept_at(spec, draws), draws, at)


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
    for number, group in enumerate(spec.terms.groups):
        width = len(effect_labels(spec, number)) // max(len(spec.levels), 1)
        own_columns, effects = columns[:, start : start + width], draws[f"{tag(group)}_effects"]
        start += width
        if len(group.factor) == 1:
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
        raise DeclarationError(
            f"{what}: a function of {column!r} has no finite slope in row {row}, where {column!r} is {x[row]:.6g}; use "
            "one that has, such as np.log1p, or compare two values by fit.client(id, predict=...)."
        )
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
