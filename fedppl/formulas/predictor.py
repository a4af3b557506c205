"""The linear predictor in PyMC: common coefficients shared, a client's own effects local. Priors by default."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from fedppl.formulas.design import Design
from fedppl.formulas.family import Family, Scales
from fedppl.formulas.priors import Prior
from fedppl.formulas.terms import Group, Terms, variable

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
