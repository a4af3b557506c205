"""The exchange before a formula's clients agree: questions, answers, the agreement, and a client's check of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pymc as pm

from fedppl.data import frames, missing
from fedppl.data.frames import is_text
from fedppl.formulas import checks
from fedppl.formulas.agreement import FEWEST_PARTS, OTHER, Agreement, Told, as_texts, tell
from fedppl.formulas.declare import Formula
from fedppl.formulas.design import standing_for_all
from fedppl.formulas.families import BINARY, LEVEL, REAL, TIME
from fedppl.formulas.predictor import coords
from fedppl.formulas.terms import variable
from fedppl.model.summaries import Estimate, Table, normal
from fedppl.types import Array, DataError, DeclarationError

logger = logging.getLogger(__name__)


# Largest root mean square distance of a client's rows from the agreed mean, in agreed sds. A column that varies at one
# of nine hundred clients of equal size, and is constant at the others, comes to 30.
MOST_APART = 30.0
_EXAMPLE_ROWS = 32


class Asked(NamedTuple):
    """Columns that clients are asked for: all, those that are always levels, and those without a scale."""

    names: tuple[str, ...]
    levels: tuple[str, ...]
    unscaled: tuple[str, ...]


def asked(built: Formula) -> Asked:
    """Columns that a formula asks for. A response needs mean and sd if its family has priors on its scale."""
    response, family = built.terms.response.columns[:1], built.family
    names = tuple(dict.fromkeys([*built.terms.columns, *response]))
    levels = (*built.terms.levels, *built.levels, *response[: family.outcome is LEVEL])
    scaled = built.terms.response.kind != "proportion" and family.outcome.scaled
    unscaled = () if scaled else tuple(name for name in response if name not in built.terms.columns)
    return Asked(names, tuple(dict.fromkeys(levels)), unscaled)


def rows_of(built: Formula, data: Any, whose: str) -> dict[str, Array]:
    """A client's columns by name; refuse missing columns and missing values."""
    table = frames.of_formula(data, whose)
    factor = [name for name in (built.terms.client,) if name is not None and name not in built.columns]
    if absent := [name for name in built.columns if name not in table.names]:
        raise DeclarationError(f"{whose} lacks the columns {absent} of the formula.")  # the server may read this text
    checks.no_constants(built, table.names, whose)
    columns = frames.raw(table, (*built.columns, *factor), whose)
    checks.one_factor_a_client(built, {whose: columns})
    columns = {name: values for name, values in columns.items() if name not in factor}
    checks.limits(built, columns, whose)
    rows: dict[str, Array] = missing.complete({whose: columns}, "error")[whose]
    check_rows(built, rows, whose)
    return rows


def check_rows(built: Formula, rows: Mapping[str, Any], whose: str) -> None:
    """Refuse a client's columns that do not fit the formula, before anything is sent."""
    checks.rows(f"client {whose!r}", {name: rows[name] for name in built.columns}, built.terms.response)
    checks.truths(whose, rows, built.terms, asked(built).levels)


def sized(built: Formula, rows: Mapping[str, Any]) -> Mapping[str, Any]:
    """A client's columns with the middle of an interval as its time."""
    response = built.terms.response
    return {**rows, response.columns[0]: checks.size_of(response, rows)} if built.family.outcome is TIME else rows


def answered(built: Formula, rows: Mapping[str, Any], min_count: float) -> dict[str, Told]:
    """A client's summaries, without sums of outcomes whose scale is not needed."""
    question = asked(built)
    summaries = tell(sized(built, rows), question.names, question.levels, min_count)
    for name in question.unscaled:
        if not summaries[name].text:
            summaries[name] = Told(summaries[name].rows, withheld=summaries[name].rows > 0)
    return summaries


# Summaries in sums over a cohort: exact, since nobody sees a client's own, and of levels that all know beforehand -----


def listed(built: Formula) -> dict[str, tuple[str, ...]]:
    """Levels of columns by the declaration, which says which columns have levels; or DeclarationError."""
    question = asked(built)
    if lacking := [name for name in question.levels if name not in built.levels]:
        why = "nobody can learn names of levels in a sum without learning who has them"
        remedy = f"name them all: fedppl.formula(..., levels={{{lacking[0]!r}: [...]}})"
        raise DeclarationError(f"secure sums, and columns {lacking} have levels that are not named: {why}; {remedy}.")
    return {name: tuple(built.levels[name]) for name in question.names if name in built.levels}


def in_sum(built: Formula, rows: Mapping[str, Any]) -> dict[str, Told]:
    """A client's summaries for a sum, of listed levels alone; DeclarationError where a column has others."""
    levels = listed(built)
    if texts := [name for name in asked(built).names if name not in levels and is_text(np.asarray(rows[name]))]:
        remedy = f"give numbers, or name its levels: fedppl.formula(..., levels={{{texts[0]!r}: [...]}})"
        raise DeclarationError(f"secure sums, and columns {texts} are texts here without levels=; {remedy}.")
    columns = answered(built, rows, 1)
    for name, names in levels.items():
        columns[name] = columns[name]._replace(levels={level: columns[name].levels.get(level, 0) for level in names})
    return columns


def flat(built: Formula, columns: Mapping[str, Told]) -> tuple[list[int], list[float]]:
    """Summaries as counts, of rows and of each listed level, and as sums, of numbers and of their squares."""
    counts, sums = [next(iter(columns.values())).rows], []
    for name, column in columns.items():
        counts += column.levels.values()
        sums += [] if column.text or name in asked(built).unscaled else [column.total, column.squares]
    return counts, sums


def of_sum(built: Formula, counts: Sequence[int], sums: Sequence[float], fewest: float) -> dict[str, Told]:
    """A cohort's summaries, the inverse of `flat`; levels with fewer than `fewest` rows are withheld, but outcomes'."""
    levels, question, outcome = listed(built), asked(built), built.terms.response.columns[0]
    (rows, *of_levels), of_numbers = counts, iter(sums)
    told, left = {}, iter(of_levels)
    for name in question.names:
        if name not in levels:
            hidden = name in question.unscaled
            total, squares = (0.0, 0.0) if hidden else (next(of_numbers), next(of_numbers))
            few = rows < FEWEST_PARTS * fewest
            told[name] = Told(rows, withheld=True) if few or hidden else Told(rows, total, squares)
            continue
        counted = {level: next(left) for level in levels[name]}
        unlisted = rows - sum(counted.values())
        if name == outcome and unlisted >= fewest:
            raise DataError(
                f"outcomes {name!r} of {unlisted} rows are not in levels={list(counted)[:8]}; name them too."
            )
        kept = {level: count for level, count in counted.items() if count >= fewest or name == outcome}
        told[name] = Told(rows, levels=kept, withheld=rows > sum(kept.values()), text=True)
    return told


def sizes(built: Formula) -> tuple[int, int]:
    """How many counts and sums there are."""
    blank = {name: Told(0, levels=dict.fromkeys(names, 0), text=True) for name, names in listed(built).items()}
    counts, sums = flat(built, {name: blank.get(name, Told(0)) for name in asked(built).names})
    return len(counts), len(sums)


# A client's rows, and what comes of the agreement ---------------------------------------------------------------------


def without_rare(agreement: Agreement, rows: Mapping[str, Any], fewest: float) -> tuple[dict[str, Any], int]:
    """A client's columns without rows of unlisted levels, if these are fewer than `fewest`; and their number.

    Such rows would disclose themselves. More rows get the level "other" if there is one, else the client takes no part.
    """
    count = max((len(values) for values in rows.values() if np.ndim(values)), default=0)
    gone = np.zeros(count, dtype=bool)
    for name, column in agreement.columns.items():
        if not column.levels or name not in rows:
            continue
        values = np.asarray(rows[name])
        unknown = ~np.isin(as_texts(values), column.levels) & ~np.asarray(pd.isna(values))
        others = agreement.others and OTHER in column.levels and (fewest == np.inf or unknown.sum() >= fewest)
        if unknown.sum() < fewest and not others and unknown.shape == gone.shape:
            gone |= unknown
    kept = {name: values[~gone] if np.shape(values)[:1] == (count,) else values for name, values in rows.items()}
    return kept, int(gone.sum())


def contradiction(built: Formula, rows: Mapping[str, Any], read: Mapping[str, Any]) -> str | None:
    """What in an agreement contradicts a client's own rows, or None; `read` has the builder's arrays.

    Agreed constants set the widths of priors, and so what counts as far from the prior.
    """
    design = built.design
    assert design is not None
    levels, read = asked(built).levels, built.by_role(read)
    for name, column in design.agreement.columns.items():
        if bool(column.levels) != (is_text(rows[name]) or name in levels):
            return f"{name!r} is {'levels' if column.levels else 'numbers'} in it, and the other kind here"
    labels = [label for name in built.terms.common for label in design.labels[name]]
    apart = np.zeros(0)
    if labels:
        apart = np.sqrt(np.mean((read["common"] - design.center) ** 2, axis=0)) / design.scale
    for number, sizes in enumerate(design.group_scale):
        apart = np.append(apart, np.sqrt(np.mean(read[f"effects_{number}"] ** 2, axis=0)) / sizes)
        labels += [f"{label} of {':'.join(built.terms.groups[number].factor)}" for label in design.group_labels[number]]
    for label, value in zip(labels, apart, strict=True):
        if not value <= MOST_APART:
            return f"rows lie {value:.3g} agreed sds from the agreed mean in {label!r}, above {MOST_APART:g}"
    return _other_outcomes(built, np.asarray(sized(built, rows)[built.terms.response.columns[0]]))


def _other_outcomes(built: Formula, outcomes: Array) -> str | None:
    """Describe outcomes of another size than the agreed one, where priors depend on it; else None."""
    name = built.terms.response.columns[0]
    if name in asked(built).unscaled or built.family.outcome is LEVEL:
        return None
    assert built.design is not None
    column, values = built.design.agreement.columns[name], outcomes.astype(float)
    if built.family.outcome is REAL:
        ratio = float(np.sqrt(np.mean((values - column.mean) ** 2)) / column.sd)
    else:
        own_mean = float(np.mean(values))
        ratio = 1.0 if not own_mean > 0 else own_mean / column.mean if column.mean > 0 else np.inf
    if not 1 / MOST_APART <= ratio <= MOST_APART:
        return f"outcomes {name!r} are {ratio:.3g} times as large as the agreed ones"
    return None


def example(built: Formula) -> dict[str, Array]:
    """Made-up rows from the agreement, enough to build the model."""
    assert built.design is not None
    agreement, response = built.design.agreement, built.terms.response
    rows = {}
    frame = standing_for_all(built.terms, agreement).iloc[:_EXAMPLE_ROWS]
    for name in frame:
        rows[str(name)] = np.asarray(frame[name], dtype=object if agreement.columns[str(name)].levels else float)
    for group in built.terms.groups:
        rows |= {name: np.full(_EXAMPLE_ROWS, "all", dtype=object) for name in group.factor if name not in rows}
    place, column = np.arange(_EXAMPLE_ROWS), agreement.columns[response.columns[0]]
    values = built.family.outcome.example(place, column.mean, column.sd)
    if column.levels:
        values = np.array(column.levels, dtype=object)[place % len(column.levels)]
    beside: dict[str, Any] = (
        {"interval": 2.0 * values, "survival": (place // 2) % 2} if built.family.outcome is TIME else {}
    )
    beside |= {"proportion": np.full(_EXAMPLE_ROWS, 2)}
    rows[response.columns[0]] = values
    rows |= {name: beside[response.kind] for name in response.columns[1:]}
    return rows if built.weights is None else {**rows, built.weights: np.ones(_EXAMPLE_ROWS)}


# Clients of a formula with an estimate of its coefficients, or a table of counts, in place of rows --------------------

KINDS = ("rows", "estimate")
_OURS = "told_{}"  # names of containers, distinct from those of variables


@dataclass(frozen=True, eq=False)
class EstimateOf:
    """Builder for clients with an estimate of coefficients of a formula: β + u_k, with the client's effects.

    The linear predictor is computed at made-up rows: the first has 0 in all columns, each other one 1 in a column. The
    first is the intercept, and the difference of another row from it is a coefficient.
    """

    formula: Formula

    @property
    def __name__(self) -> str:
        """Name of the builder in messages."""
        return self.formula.__name__

    def read(self, client_id: str, data: Any) -> Any:
        """The builder's arrays from an estimate; such arrays are returned as they are."""
        if not isinstance(data, Estimate):
            return data
        design, what = self.formula.spec.design, f"client {client_id!r}"
        common = [label for labels in design.labels.values() for label in labels]
        effects = self.formula.spec.effects
        own_labels = {label for one in effects if one.by_client for label in one.labels}
        known = ({"Intercept"} & {*self.formula.coefficients}) | {*common} | own_labels
        short = {name: labels[0] for name, labels in design.labels.items() if len(labels) == 1}
        given = [name if name in known else variable(name) for name in data.names]
        names = [short.get(name, name) for name in given]
        if unknown := [name for name in names if name not in known]:
            raise DataError(f"{what}: an estimate of {unknown}; coefficients are {sorted(known)}.")
        if len(set(names)) < len(names):
            raise DataError(f"{what}: the estimate names a coefficient twice: {list(data.names)}.")
        rows = ["Intercept", *names]
        arrays: dict[str, Any] = {"common": _columns(rows, common)} if common else {"rows": np.zeros(len(rows))}
        for number, one in enumerate(effects):
            arrays[f"effects_{number}"] = _columns(rows, design.group_labels[number]) * float(one.by_client)
            if not one.by_client:  # a group without effect stands for groups within the client
                arrays |= {f"row_{number}": np.zeros(len(rows), dtype=np.int64), f"of_{number}": np.zeros(1, dtype=int)}
        arrays["slope"] = np.array([float(name != "Intercept") for name in names])
        arrays |= {"estimate": data.estimate, "covariance": data.covariance}
        return {_OURS.format(name): value for name, value in arrays.items()}

    def __call__(self, **data: Any) -> pm.Model:
        """One client's model."""
        with pm.Model(coords=coords(self.formula.spec)) as model:
            containers = {name.removeprefix(_OURS.format("")): pm.Data(name, value) for name, value in data.items()}
            eta, _ = self.formula.variables(containers)
            if eta.ndim != 1:
                raise DeclarationError(f"{self.__name__} has several predictors, and takes no estimates; give rows.")
            coefficients = eta[1:] - eta[0] * containers["slope"]
            name = f"{self.formula.terms.response.variable}_summary"
            normal(coefficients, containers["estimate"], containers["covariance"], name=name)
        return model


def kind_of(client_id: str, data: Any) -> str:
    """Whether a client of a formula gives rows or an estimate."""
    read = isinstance(data, Mapping) and _OURS.format("estimate") in data
    return KINDS[isinstance(data, Estimate) or read]


def as_rows(formula: Formula, clients: Any) -> Any:
    """Clients' data with tables of counts as tables of rows."""
    if not isinstance(clients, Mapping) or not any(isinstance(given, Table) for given in clients.values()):
        return clients
    if formula.family.outcome is not BINARY:
        raise DataError(f"tables of events need a family like 'bernoulli', and this one is {formula.family.name!r}.")
    response, as_tables = formula.terms.response.columns[0], dict(clients)
    for k, given in clients.items():
        if isinstance(given, Table):
            as_tables[k] = frames.of_formula(given.rows(response), f"client {str(k)!r}")
    return as_tables


def _columns(rows: list[str], labels: Sequence[str]) -> Array:
    """Rows of a design: 1 in the intercept's column, and where a row has the column's name."""
    return np.array([[float(label in (row, "Intercept")) for label in labels] for row in rows])
