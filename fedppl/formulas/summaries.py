"""Clients of a formula that give an estimate of its coefficients, or a table of counts, in place of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm

from fedppl.formulas.declare import Formula
from fedppl.formulas.predictor import coords, has_intercept
from fedppl.formulas.terms import variable
from fedppl.model.summaries import Estimate, Table, normal
from fedppl.types import Array, DataError, DeclarationError

KINDS = ("rows", "estimate")
_OURS = "told_{}"  # names of containers, apart from those of variables


@dataclass(frozen=True, eq=False)
class EstimateOf:
    """Builder for clients that give an estimate of coefficients of a formula: β + u_k, with the client's own effects.

    The linear predictor is computed at made-up rows: the first has 0 in all columns, each other one 1 in a column. What
    one of them adds to the first is a coefficient, and the first is the intercept.
    """

    formula: Formula

    @property
    def __name__(self) -> str:
        """How messages call the builder."""
        return self.formula.__name__

    def read(self, client_id: str, data: Any) -> Any:
        """An estimate as the builder takes it; what is such already stays as it is."""
        if not isinstance(data, Estimate):
            return data
        design, what = self.formula.spec.design, f"client {client_id!r}"
        common = [label for labels in design.labels.values() for label in labels]
        effects = [set(labels) for labels in design.group_labels]
        own = [labels for labels, group in zip(effects, self.formula.terms.groups, strict=True) if _own(group)]
        first = ["Intercept"] if has_intercept(self.formula.terms, self.formula.family) else []
        known = {*first, *common, *set().union(*own)}
        short = {name: labels[0] for name, labels in design.labels.items() if len(labels) == 1}
        given = [name if name in known else variable(name) for name in data.names]
        names = [short.get(name, name) for name in given]
        if unknown := [name for name in names if name not in known]:
            raise DataError(
                f"{what}: an estimate of {unknown}; the coefficients of {self.formula.text!r} are {sorted(known)}."
            )
        if len(set(names)) < len(names):
            raise DataError(f"{what}: the estimate names a coefficient twice: {list(data.names)}.")
        rows = ["Intercept", *names]
        found: dict[str, Any] = {"rows": np.zeros(len(rows))}
        if common:
            found = {"common": _columns(rows, common, always=False)}
        for number, group in enumerate(self.formula.terms.groups):
            labels = design.group_labels[number]
            found[f"effects_{number}"] = _columns(rows, labels, always=True) * float(_own(group))
            if not _own(group):  # of groups within the client nothing is said: one that does nothing stands for them
                found |= {f"row_{number}": np.zeros(len(rows), dtype=np.int64), f"of_{number}": np.zeros(1, dtype=int)}
        found["slope"] = np.array([float(name != "Intercept") for name in names])
        found |= {"estimate": data.estimate, "covariance": data.covariance}
        return {_OURS.format(name): value for name, value in found.items()}

    def __call__(self, **data: Any) -> pm.Model:
        """One client's model."""
        with pm.Model(coords=coords(self.formula.spec)) as model:
            held = {name.removeprefix(_OURS.format("")): pm.Data(name, value) for name, value in data.items()}
            eta, _ = self.formula.variables(held)
            if eta.ndim != 1:
                raise DeclarationError(f"{self.__name__} has several predictors, and takes no estimates.")
            told = eta[1:] - eta[0] * held["slope"]
            name = f"{self.formula.terms.response.variable}_summary"
            normal(told, held["estimate"], held["covariance"], name=name)
        return model


def kind_of(client_id: str, data: Any) -> str:
    """Whether a client of a formula gives rows or an estimate."""
    read = isinstance(data, Mapping) and _OURS.format("estimate") in data
    return KINDS[isinstance(data, Estimate) or read]


def as_rows(formula: Formula, clients: Any) -> Any:
    """Clients' data with the rows of those that gave a table of counts."""
    if not isinstance(clients, Mapping) or not any(isinstance(one, Table) for one in clients.values()):
        return clients
    if formula.family.outcome != "binary":
        raise DataError(f"tables of events are of a family like 'bernoulli', and this one is {formula.family.name!r}.")
    response = formula.terms.response.columns[0]
    return {k: one.rows(response) if isinstance(one, Table) else one for k, one in clients.items()}


def _own(group: Any) -> bool:
    """Whether effects vary by client, and not by groups within one."""
    return len(group.factor) == 1


def _columns(rows: list[str], labels: Any, *, always: bool) -> Array:
    """Rows of a design: 1 where a row is of the column's name, and in the intercept's column where that is `always`."""
    return np.array([[float(row == label or (always and label == "Intercept")) for label in labels] for row in rows])
