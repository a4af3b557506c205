"""A formula as one client's PyMC model: common coefficients shared, a client's own effects local."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from fedppl.data import frames
from fedppl.formulas import design as designs
from fedppl.formulas.agreement import Agreement
from fedppl.formulas.design import Design
from fedppl.formulas.families import Family, Scales
from fedppl.formulas.outcomes import outcome
from fedppl.formulas.priors import Prior
from fedppl.formulas.terms import Group, Terms
from fedppl.types import Array, DataError, DeclarationError

_WIDE = 2.5  # prior sds of coefficients, in the units of outcome and column
_CORRELATION = 2.0  # η of LKJ


@dataclass(frozen=True, eq=False)
class Formula:
    """A formula with its family and priors; once clients agree, the builder of a model.

    Attributes
    ----------
    text, terms, family
        What was declared.
    priors
        The user's own, by name of a variable.
    correlated
        Whether effects of one factor have a correlation.
    levels
        Orders of levels, by column.
    constants
        What the formula names that is no column.
    design
        What clients agreed on; None before.
    """

    text: str
    terms: Terms
    family: Family
    priors: Mapping[str, Prior] = field(default_factory=dict)
    correlated: bool = True
    levels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    design: Design | None = None

    @property
    def __name__(self) -> str:
        """How messages call the builder."""
        return f"formula({self.text!r}, family={self.family.name!r})"

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are read: right of ~, of the response, and of nested factors."""
        nested = [name for group in self.terms.groups for name in group.factor[1:]]
        return tuple(dict.fromkeys([*self.terms.columns, *self.terms.response.columns, *nested]))

    @property
    def has_intercept(self) -> bool:
        """Whether there is one."""
        return self.terms.intercept and self.family.intercept

    @property
    def shared(self) -> tuple[str, ...]:
        """Names of the variables that all clients share."""
        spreads = [self._spread(number)[0] for number in range(len(self.terms.groups))]
        beside = self.family.parameters(Scales(0.0, 1.0, ("a", "b")))
        return (*(["Intercept"] if self.has_intercept else []), *self.terms.common, *spreads, *beside)

    def agreed(self, agreement: Agreement) -> Formula:
        """The same with what clients agreed on."""
        return dataclasses.replace(self, design=designs.build(self.terms, agreement, self.constants))

    def read(self, client_id: str, data: Any) -> dict[str, Any]:
        """A client's rows as the builder takes them; what is such already stays as it is."""
        if isinstance(data, Mapping) and set(data) <= set(self._containers()) and len(data) > 0:
            return dict(data)
        design, what = self._agreed(), f"client {client_id!r}"
        held = frames.raw(data, None, what)
        if not isinstance(held, Mapping) or not held:
            raise DataError(f"{what}: data are {type(data).__name__}; pass a data frame, or arrays by column.")
        table = designs.table(held, self.terms, design.agreement, what)
        found: dict[str, Any] = {"rows": np.zeros(len(table))}
        if self.terms.common:
            found = {"common": design.common(table, what)}
        if self.terms.offsets:
            found["offset"] = design.offset(table, what)
        for number, group in enumerate(self.terms.groups):
            found[f"effects_{number}"] = design.group(number, table, what)
            if len(group.factor) > 1:
                names, rows = np.unique(_labels(group, held, what), return_inverse=True)
                found[f"row_{number}"], found[f"of_{number}"] = rows, np.arange(len(names))
        if any(name in held for name in self.terms.response.columns):
            found |= outcome(self.family, self.terms.response, held, design.agreement, what)
        return found

    def _containers(self) -> list[str]:
        found = ["common" if self.terms.common else "rows", *(["offset"] if self.terms.offsets else []), "outcome"]
        found += ["trials"] if self.terms.response.kind == "proportion" else []
        for number, group in enumerate(self.terms.groups):
            found += [f"effects_{number}", *([f"row_{number}", f"of_{number}"] if len(group.factor) > 1 else [])]
        return found

    def __call__(self, **data: Any) -> pm.Model:
        """One client's model."""
        design = self._agreed()
        if "outcome" not in data:
            raise DataError(f"the data lack {list(self.terms.response.columns)}, the response of {self.text!r}.")
        with pm.Model(coords=self._coords(design)) as model:
            held = {name: pm.Data(name, value) for name, value in data.items()}
            eta = self._common(design, held)
            for number in range(len(self.terms.groups)):
                eta = eta + self._effects(design, number, held)
            beside = self.family.parameters(self._scales(design))
            parameters = {name: self._prior(name, prior).declared(name) for name, prior in beside.items()}
            self.family.likelihood(self.terms.response.columns[0], eta, parameters, held)
        return model

    def _common(self, design: Design, held: Mapping[str, Any]) -> Any:
        """The linear predictor of what all clients share."""
        coefficients = [
            pt.atleast_1d(prior.declared(name, **_dims(name, design.labels[name])))
            for name, prior in self._coefficients(design).items()
        ]
        beta = pt.concatenate(coefficients) if coefficients else None
        eta = held["rows"] if beta is None else held["common"] @ beta
        if self.has_intercept:
            eta = eta + self._intercept(design, beta)
        return eta + held["offset"] if "offset" in held else eta

    def _coefficients(self, design: Design) -> dict[str, Prior]:
        """Priors of the common terms."""
        unit, at, found = self.family.unit(self._scales(design)), 0, {}
        for name in self.terms.common:
            count = len(design.labels[name])
            sd = _WIDE * unit / design.scale[at : at + count]
            found[name] = self._prior(name, Prior("Normal", mu=0.0, sigma=sd if count > 1 else float(sd[0])))
            at += count
        return found

    def _intercept(self, design: Design, beta: Any) -> Any:
        """Its own prior is of where columns are at their means, wherever 0 of them may be; a user's is of itself."""
        if "Intercept" in self.priors:
            return self.priors["Intercept"].declared("Intercept")
        scales = self._scales(design)
        center = self.family.center(scales) - (0.0 if beta is None else pt.dot(design.center, beta))
        return pm.Normal("Intercept", center, _WIDE * self.family.unit(scales))

    def _spread(self, number: int) -> tuple[str, bool]:
        """The shared variable of a group's sds, and whether it has their correlation too."""
        group = self.terms.groups[number]
        several = len(group.expressions) > 1 if self.design is None else len(self.design.group_labels[number]) > 1
        correlated = self.correlated and several
        return f"{_tag(group)}_{'covariance' if correlated else 'sd'}", correlated

    def _effects(self, design: Design, number: int, held: Mapping[str, Any]) -> Any:
        """What varies by a factor: local, with shared sds and correlation."""
        group, labels = self.terms.groups[number], design.group_labels[number]
        name, correlated = self._spread(number)
        tag, prior = _tag(group), self._sds(design, number)
        if correlated:
            sds = prior.distribution(shape=len(labels))
            root, correlation, sd = pm.LKJCholeskyCov(
                name, eta=_CORRELATION, n=len(labels), sd_dist=sds, store_in_trace=False
            )
            pm.Deterministic(f"{tag}_sd", sd, dims=f"{tag}_effect")
            pm.Deterministic(f"{tag}_corr", correlation[np.tril_indices(len(labels), -1)], dims=f"{tag}_pair")
        else:
            root = pt.diag(pt.atleast_1d(prior.declared(name, **_dims(f"{tag}_effect", labels))))
        columns = held[f"effects_{number}"]
        if len(group.factor) == 1:
            z = pm.Normal(f"{tag}_z", 0.0, 1.0, shape=len(labels))
            return columns @ pm.Deterministic(f"{tag}_effects", root @ z, dims=f"{tag}_effect")
        z = pm.Normal(f"{tag}_z", 0.0, 1.0, shape=(held[f"of_{number}"].shape[0], len(labels)))
        effects = pm.Deterministic(f"{tag}_effects", z @ root.T)
        return (columns * effects[held[f"row_{number}"]]).sum(axis=1)

    def _sds(self, design: Design, number: int) -> Prior:
        unit = self.family.unit(self._scales(design))
        sizes = unit / design.group_scale[number]
        default = Prior("HalfNormal", sigma=sizes if len(sizes) > 1 else float(sizes[0]))
        return self._prior(self._spread(number)[0], default)

    def _prior(self, name: str, default: Prior) -> Prior:
        return self.priors.get(name, default)

    def _scales(self, design: Design) -> Scales:
        column = design.agreement.columns[self.terms.response.columns[0]]
        return Scales(column.mean, column.sd, column.levels)

    def _agreed(self) -> Design:
        if self.design is None:
            raise DeclarationError(
                f"clients have not agreed on the levels and scales of {self.text!r} yet; call fedppl.fit with their "
                "data, fedppl.agree, or fedppl.Flower.agree where clients are sites of their own."
            )
        return self.design

    def _coords(self, design: Design) -> dict[str, list[str]]:
        found = {name: _short(labels) for name, labels in design.labels.items() if _dims(name, labels)}
        for number, group in enumerate(self.terms.groups):
            labels = design.group_labels[number]
            found[f"{_tag(group)}_effect"] = list(labels)
            if self._spread(number)[1]:
                pairs = zip(*np.tril_indices(len(labels), -1), strict=True)
                found[f"{_tag(group)}_pair"] = [f"{labels[j]}, {labels[i]}" for i, j in pairs]
        return {f"{name}_dim" if name in design.labels else name: labels for name, labels in found.items()}


def _tag(group: Group) -> str:
    return "_".join(group.factor)


def _dims(name: str, labels: Sequence[str]) -> dict[str, Any]:
    """Of a variable with several entries, or with one that is named like a level and not like itself."""
    is_effect = name.endswith("_effect")
    if len(labels) == 1 and (is_effect or labels[0] == name):
        return {}
    return {"dims": name if is_effect else f"{name}_dim"}


def _short(labels: Sequence[str]) -> list[str]:
    """Levels alone, where labels are name[level] or interactions of such."""
    levels = [", ".join(re.findall(r"\[([^\[\]]+)\]", label)) for label in labels]
    return levels if all(levels) and len(set(levels)) == len(levels) else list(labels)


def _labels(group: Group, held: Mapping[str, Any], what: str) -> Array:
    """Names of nested groups, row by row."""
    absent = [name for name in group.factor[1:] if name not in held]
    if absent:
        raise DataError(f"{what} lacks the columns {absent}, by which effects vary.")
    parts = [np.asarray(held[name]).astype(str) for name in group.factor[1:]]
    return np.array([":".join(row) for row in zip(*parts, strict=True)])
