"""The linear predictor in PyMC: common coefficients shared, a client's own effects local. Priors by default."""

from __future__ import annotations

import functools
import operator
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
    """All that the predictor of a formula is made of, once clients agree."""

    terms: Terms
    family: Family
    design: Design
    scales: Scales
    priors: Mapping[str, Prior]  # the user's own
    correlated: bool

    @property
    def levels(self) -> tuple[str, ...]:
        """Levels of the outcome that have a predictor of their own, none where there is one for all."""
        return self.scales.levels[1:] if self.family.several else ()

    @property
    def level_dim(self) -> tuple[str, ...]:
        """Dim of these levels."""
        return (f"{self.terms.response.variable}_level",) if self.family.several else ()


def has_intercept(terms: Terms, family: Family) -> bool:
    """Whether there is one."""
    return terms.intercept and family.intercept


def tag(group: Group) -> str:
    """How the variables of a group begin."""
    return variable("_".join(group.factor))


def spreads(group: Group, count: int, *, correlated: bool) -> tuple[str, ...]:
    """Names of the shared variables of a group's sds, and of their correlations where it has some."""
    return (f"{tag(group)}_sd", *([f"{tag(group)}_partial"] if correlated and count > 1 else []))


def effect_labels(spec: Spec, number: int) -> tuple[str, ...]:
    """Names of the effects of a group; of each level of the outcome where these have predictors of their own."""
    labels = spec.design.group_labels[number]
    return tuple(f"{label}:{level}" for label in labels for level in spec.levels) if spec.levels else labels


def coefficients(spec: Spec) -> dict[str, Prior]:
    """Priors of the common terms."""
    unit, at, found = spec.family.unit(spec.scales), 0, {}
    for name in spec.terms.common:
        count = len(spec.design.labels[name])
        sd: Any = _WIDE * unit / spec.design.left[at : at + count]
        sd = float(sd[0]) if count == 1 else sd[:, None] if spec.levels else sd
        own = spec.priors.get(name)
        default = Prior("Normal", mu=0.0, sigma=sd)
        found[name] = default if own is None else own.by_rows() if spec.levels and count > 1 else own
        at += count
    return found


def intercept(spec: Spec) -> Prior:
    """Prior of the predictor where columns and offsets are at their means; a user's is of the intercept itself."""
    default = Prior("Normal", mu=spec.family.center(spec.scales), sigma=_WIDE * spec.family.unit(spec.scales))
    return spec.priors.get("Intercept", default)


def at_means(spec: Spec) -> str:
    """Where the predictor has the prior of `intercept`, wherever 0 of columns and offsets may be."""
    moved = [*(["columns"] if spec.terms.common else []), *(["offsets"] if spec.terms.offsets else [])]
    return f" where {' and '.join(moved)} are at their means" if moved else ""


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
    found: dict[str, tuple[str, ...]] = {}
    for number, group in enumerate(spec.terms.groups):
        names, pairs = spreads_of(spec, number), coords(spec).get(f"{tag(group)}_pair", [])
        found |= dict(zip(names, (effect_labels(spec, number), tuple(pairs)), strict=False))
    return found


def coords(spec: Spec) -> dict[str, list[str]]:
    """Labels of all dims."""
    found = {f"{k}_dim": list(spec.design.entries[k]) for k, own in spec.design.labels.items() if is_labelled(k, own)}
    found |= {dim: list(spec.levels) for dim in spec.level_dim}
    for number, group in enumerate(spec.terms.groups):
        labels = effect_labels(spec, number)
        found[f"{tag(group)}_effect"] = list(labels)
        if len(spreads_of(spec, number)) > 1:
            pairs = zip(*np.tril_indices(len(labels), -1), strict=True)
            found[f"{tag(group)}_pair"] = [f"{labels[j]}, {labels[i]}" for i, j in pairs]
    return found


def is_labelled(name: str, labels: Sequence[str]) -> bool:
    """Whether a coefficient has several entries, or one that is named like a level and not like itself."""
    return tuple(labels) != (name,)


def linear_predictor(spec: Spec, held: Mapping[str, Any]) -> tuple[Any, Any]:
    """η in the model that is open, (n,), or (n, levels) where levels have one each; and its part `at_means`."""
    beta = _beta(spec)
    middle: Any = spec.design.offset_center
    if beta is not None:
        middle = middle + pt.dot(spec.design.center, beta)
    eta = held["rows"] if beta is None else held["common"] @ beta
    if beta is None and spec.levels:
        eta = eta[:, None]
    if has_intercept(spec.terms, spec.family):
        eta = eta + _intercept(spec, middle)
    if "offset" in held:
        eta = eta + held["offset"]
    for number in range(len(spec.terms.groups)):
        eta = eta + _effects(spec, number, held)
    return eta, middle


def _beta(spec: Spec) -> Any:
    """All common coefficients, (p,) or (p, levels)."""
    parts = []
    for name, prior in coefficients(spec).items():
        count = len(spec.design.labels[name])
        dims = (*((f"{name}_dim",) if is_labelled(name, spec.design.labels[name]) else ()), *spec.level_dim)
        variable = prior.declared(name, **({"dims": dims} if dims else {}))
        parts.append(variable.reshape((count, len(spec.levels))) if spec.levels else pt.atleast_1d(variable))
    return pt.concatenate(parts) if parts else None


def _intercept(spec: Spec, middle: Any) -> Any:
    dims = {"dims": spec.level_dim} if spec.levels else {}
    prior = intercept(spec)
    if "Intercept" in spec.priors:
        return prior.declared("Intercept", **dims)
    return pm.Normal("Intercept", prior.parameters["mu"] - middle, prior.parameters["sigma"], **dims)


def _rotated(root: Any, z: Any) -> Any:
    """Rows of z as effects with covariance L Lᵀ."""
    return z @ root.T


def _correlation_root(partial: Any, count: int) -> Any:
    """The lower triangular root of a correlation matrix from (1 + r) / 2 of its partial correlations.

    Of numbers one by one: arrays of constants in a graph may be a client's data, and what depends on them is not
    shared.
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


def _effects(spec: Spec, number: int, held: Mapping[str, Any]) -> Any:
    """What varies by a factor: local, with shared sds and correlation."""
    group, labels = spec.terms.groups[number], effect_labels(spec, number)
    names, start = spreads_of(spec, number), tag(group)
    dims = {"dims": f"{start}_effect"} if len(labels) > 1 else {}
    sd = pt.atleast_1d(sds(spec, number).declared(names[0], **dims))
    scaled: Callable[[Any], Any] = functools.partial(operator.mul, sd)
    if len(names) > 1:
        partial = partials(spec, number).declared(names[1], dims=f"{start}_pair")
        root = _correlation_root(partial, len(labels))
        pairs = zip(*np.tril_indices(len(labels), -1), strict=True)
        correlations = pt.stack([(root[i] * root[j]).sum() for i, j in pairs])
        pm.Deterministic(f"{start}_corr", correlations, dims=f"{start}_pair")
        scaled = functools.partial(_rotated, sd[:, None] * root)
    columns, width = held[f"effects_{number}"], len(spec.design.group_labels[number])
    if len(group.factor) == 1:
        z = pm.Normal(f"{start}_z", 0.0, 1.0, shape=len(labels))
        effects = pm.Deterministic(f"{start}_effects", scaled(z), dims=f"{start}_effect")
        return columns @ (effects.reshape((width, len(spec.levels))) if spec.levels else effects)
    z = pm.Normal(f"{start}_z", 0.0, 1.0, shape=(held[f"of_{number}"].shape[0], len(labels)))
    effects = pm.Deterministic(f"{start}_effects", scaled(z))[held[f"row_{number}"]]
    if spec.levels:
        return (columns[:, :, None] * effects.reshape((-1, width, len(spec.levels)))).sum(axis=1)
    return (columns * effects).sum(axis=1)


# Outcomes that a formula expects, averaged over rows, in NumPy: at draws of its variables and at changed columns ------

_AT_ONCE = 2_000_000  # numbers
_WHOSE = "rows of a client"
_STEP = 1e-5  # of the linear predictor, in its size and at least in 1


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
    """Mean derivative of the outcome by a column: that of the linear predictor, and the outcome's along it."""
    columns = spec.design.side_by_side(rows.table, _WHOSE)
    sd = spec.design.agreement.columns[column].sd
    slopes = derivatives(spec.design.side_by_side, rows.table, column, sd, _WHOSE)

    def of(part: slice) -> Array:
        places = {number: one[part] for number, one in rows.groups.items()}
        eta = _eta(spec, columns[part], places, draws) + _intercept_at(spec, draws)
        along = _eta(spec, slopes[part], places, draws)
        # Of several predictors the direction: the step is theirs together.
        size = np.max(np.abs(along), axis=-1, keepdims=True) if spec.levels else np.abs(along)
        step = _STEP * np.maximum(1.0, np.abs(eta).max(axis=-1, keepdims=True) if spec.levels else np.abs(eta))
        step = step * along / np.where(size > 0, size, 1.0)
        high, low = (_mean(spec, eta + sign * step, draws, at) for sign in (1.0, -1.0))
        apart = np.where(size > 0, np.max(np.abs(step), axis=-1, keepdims=True) if spec.levels else np.abs(step), 1.0)
        rate = size / (2.0 * apart)
        return np.asarray((high - low) * (rate if high.ndim == rate.ndim else rate[..., None]))

    return {"slope": _over_rows(spec, rows, draws, of)}


def averaged(spec: Spec, rows: Rows, draws: Mapping[str, Array], at: float | None) -> Array:
    """Mean outcome over rows at every draw, (S,), or (S, K) of each level of an outcome that has levels."""
    columns = spec.design.side_by_side(rows.table, _WHOSE)

    def of(part: slice) -> Array:
        places = {number: one[part] for number, one in rows.groups.items()}
        return _mean(spec, _eta(spec, columns[part], places, draws) + _intercept_at(spec, draws), draws, at)

    return _over_rows(spec, rows, draws, of)


def _over_rows(spec: Spec, rows: Rows, draws: Mapping[str, Array], of: Callable[[slice], Array]) -> Array:
    """Weighted mean over rows of what is (S, n, ...) for some of them."""
    count, size = len(rows.table), len(next(iter(draws.values())))
    width = max(len(spec.scales.levels), 1) * max(len(spec.scales.cuts), 1)
    step = max(1, _AT_ONCE // (size * width))
    parts = [slice(start, start + step) for start in range(0, count, step)]
    total: Any = sum(np.tensordot(of(part), rows.weights[part], axes=(1, 0)) for part in parts)
    return np.asarray(total / rows.weights.sum())


def by_row(spec: Spec, rows: Rows, draws: Mapping[str, Array], at: float | None) -> Array:
    """Mean outcome of every row at every draw, (S, n), or (S, n, K) of each level of an outcome that has levels."""
    columns = spec.design.side_by_side(rows.table, _WHOSE)
    return _mean(spec, _eta(spec, columns, rows.groups, draws) + _intercept_at(spec, draws), draws, at)


def _mean(spec: Spec, eta: Array, draws: Mapping[str, Array], at: float | None) -> Array:
    """Outcomes at these linear predictors, (S, n) or (S, n, K)."""
    parameters = {name: draws[name][:, None] for name in spec.family.parameters(spec.scales)}
    return spec.family.mean(eta, parameters, spec.scales, at)


def _intercept_at(spec: Spec, draws: Mapping[str, Array]) -> Any:
    """Draws of it, (S, 1) or (S, 1, levels)."""
    tail = (len(spec.levels),) if spec.levels else ()
    return draws["Intercept"].reshape(-1, 1, *tail) if has_intercept(spec.terms, spec.family) else 0.0


def _eta(spec: Spec, columns: Array, places: Mapping[int, Array], draws: Mapping[str, Array]) -> Array:
    """The linear predictor without its intercept, (S, n) or (S, n, levels), of all columns side by side."""
    size, count = len(next(iter(draws.values()))), len(columns)
    tail = (len(spec.levels),) if spec.levels else ()
    eta, at = np.zeros((size, count, *tail)), 0
    for name in spec.terms.common:
        width = len(spec.design.labels[name])
        eta = eta + _times(columns[:, at : at + width], draws[name].reshape(size, width, *tail))
        at += width
    if spec.terms.offsets:
        eta, at = eta + columns[:, at], at + 1
    for number, group in enumerate(spec.terms.groups):
        width = len(effect_labels(spec, number)) // max(len(spec.levels), 1)
        own, effects = columns[:, at : at + width], draws[f"{tag(group)}_effects"]
        at += width
        if len(group.factor) == 1:
            eta = eta + _times(own, effects.reshape(size, width, *tail))
        else:
            of_rows = effects[:, places[number]].reshape(size, count, width, *tail)
            eta = eta + np.sum(own.reshape(*own.shape, *(1 for _ in tail)) * of_rows, axis=2)
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
    """Derivatives of ``columns(table, what)`` by a column, (n, q).

    A function has a length of its own at every row, as the logarithm does, and may end there, as the square root does
    at 0 and a spline at its bounds. So each row is given, of many steps, the one that agrees best with a step ten times
    as long, rounding being counted; to one side alone where the other is beyond the function's domain.

    Raises `DeclarationError` if none is small enough in a row: a function rises without bound there, or jumps.
    """
    x = table[column].to_numpy(dtype=float)
    here = columns(table, what)
    best, error, before = np.zeros_like(here), np.full(here.shape, np.inf), np.full(here.shape, np.nan)
    nothing = 1e-2 * (np.abs(here) + 1.0) / sd  # of a slope, beside those that count
    for step in _STEPS * sd:
        with np.errstate(all="ignore"):
            found, size = _difference(columns, table, column, x, here, step)
            wrong = np.abs(found - before) + _ROUNDING * (size + np.abs(x[:, None] * found)) / step
            wrong = wrong / (np.abs(found) + nothing)
        better = wrong < error
        best, error, before = np.where(better, found, best), np.where(better, wrong, error), found
    unknown = ~(error <= _EXACT)
    if np.any(unknown):
        row = int(np.argmax(unknown.any(axis=1)))
        raise DeclarationError(
            f"{what}: a function of {column!r} has no finite slope in row {row}, where {column!r} is {x[row]:.6g}: it "
            "rises without bound there, or jumps. Marginal effects are mean slopes; use a function that has one "
            "everywhere, such as np.log1p, or compare outcomes at two values of the column, by fit.client(id, "
            "predict=...)."
        )
    return best


def _difference(
    columns: Any, table: pd.DataFrame, column: str, x: Array, here: Array, step: float
) -> tuple[Array, Array]:
    """A difference quotient of each row, and the size of what it is of; NaN where no side is in the domain."""
    ends = {k: x + k * step for k in (1, -1)}
    sides = {k: _within(columns, table, column, end) for k, end in ends.items()}
    size = np.maximum(np.abs(here), np.fmax(np.abs(sides[1]), np.abs(sides[-1])))
    found = (sides[1] - sides[-1]) / (ends[1] - ends[-1])[:, None]
    for k in (1, -1):
        alone = np.isfinite(sides[k]).all(axis=1) & ~np.isfinite(sides[-k]).all(axis=1)
        if not np.any(alone):
            continue
        rows = table[alone].reset_index(drop=True)
        far = _within(columns, rows, column, x[alone] + 2 * k * step)
        # Of second order from one side.
        found[alone] = (4.0 * sides[k][alone] - far - 3.0 * here[alone]) / (2.0 * k * step)
    return found, size


def _within(columns: Any, table: pd.DataFrame, column: str, values: Array) -> Array:
    """Columns at other values of one; NaN in rows that lie outside of a function's domain."""
    found = np.asarray(columns(table.assign(**{column: values}), None))
    found[~np.isfinite(found).all(axis=1)] = np.nan
    return found
