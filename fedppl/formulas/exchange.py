"""What a formula asks its clients before they agree, what each answers, and what a client holds against the result."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pymc as pm

from fedppl.data import frames, missing
from fedppl.formulas import checks
from fedppl.formulas.agreement import OTHER, Agreement, Told, agreed, as_texts, is_text, tell
from fedppl.formulas.declare import Formula
from fedppl.formulas.design import standing_for_all
from fedppl.formulas.predictor import coords, has_intercept
from fedppl.formulas.terms import variable
from fedppl.model.summaries import Estimate, Table, normal
from fedppl.types import Array, DataError, DeclarationError

logger = logging.getLogger(__name__)


# How much farther from the agreed mean a client's rows may lie than the agreed sd says, in root mean square. A column
# of one client in nine hundred of equal size, and of no other, comes to 30.
MOST_APART = 30.0
_EXAMPLE_ROWS = 32


class Asked(NamedTuple):
    """Columns that clients are asked for: all, those that are levels whatever they hold, and those without a scale."""

    names: tuple[str, ...]
    levels: tuple[str, ...]
    unscaled: tuple[str, ...]


def asked(built: Formula) -> Asked:
    """What a formula asks. Means and sds of a response matter where its family has priors on its scale."""
    response, family = built.terms.response.columns[:1], built.family
    names = tuple(dict.fromkeys([*built.terms.columns, *response]))
    levels = (*built.terms.levels, *built.levels, *response[: family.outcome == "level"])
    scaled = built.terms.response.kind != "proportion" and family.outcome in (
        "real",
        "positive",
        "unit",
        "count",
        "time",
    )
    unscaled = () if scaled else tuple(name for name in response if name not in built.terms.columns)
    return Asked(names, tuple(dict.fromkeys(levels)), unscaled)


def rows_of(built: Formula, data: Any, whose: str) -> dict[str, Array]:
    """A client's columns by name, as the formula reads them; none may be missing, and no value in them."""
    held = frames.raw(data, built.columns if frames.is_frame(data) else None, whose)
    if not isinstance(held, Mapping) or not held:
        raise DataError(f"{whose}: data are {type(data).__name__}; pass a data frame, or arrays by column.")
    if absent := [name for name in built.columns if name not in held]:
        raise DeclarationError(f"{whose} lacks the columns {absent} of the formula.")
    checks.one_factor_a_client(built, {whose: data})
    checks.limits(built, held, whose)
    rows: dict[str, Array] = missing.complete({whose: held}, built.columns, "error", texts=True)[whose]
    check_rows(built, rows, whose)
    return rows


def check_rows(built: Formula, rows: Mapping[str, Any], whose: str) -> None:
    """Refuse a client's columns that the formula cannot take, before anything is told of them."""
    response = built.terms.response
    endless = response.columns[1:2] if response.kind == "interval" else ()  # a time that is later than any
    checks.rows(whose, rows, [name for name in built.columns if name not in endless])
    checks.truths(whose, rows, built.terms, asked(built).levels)


def sized(built: Formula, rows: Mapping[str, Any]) -> Mapping[str, Any]:
    """A client's columns with times as they are on average, where an interval alone is known of them."""
    response = built.terms.response
    return {**rows, response.columns[0]: checks.size_of(response, rows)} if built.family.outcome == "time" else rows


def answered(built: Formula, rows: Mapping[str, Any], min_count: float) -> dict[str, Told]:
    """What a client tells, of outcomes whose scale nobody needs no sums."""
    what = asked(built)
    found = tell(sized(built, rows), what.names, what.levels, min_count)
    for name in what.unscaled:
        if not found[name].text:
            found[name] = Told(found[name].rows, 0.0, 0.0, {}, found[name].rows > 0)
    return found


def without_rare(agreement: Agreement, rows: Mapping[str, Any], fewest: float) -> tuple[dict[str, Any], int]:
    """A client's columns without rows of levels that nobody told, where those are fewer than `fewest`; how many.

    That there are some would show: in whether the client takes part, and in its replies, where they are of a level
    of their own. Of more the level "other" is made where there is one, or the client takes no part.
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


def together(built: Formula, told: Mapping[str, Mapping[str, Told]], *, others: bool, believed: bool = True) -> Formula:
    """The formula with what comes of all that clients told."""
    outcomes, unscaled, constant = built.terms.response.columns, asked(built).unscaled, built.may_be_constant
    found = agreed(
        told,
        built.levels,
        others=others,
        unscaled=unscaled,
        closed=outcomes,
        constant=constant,
        listed=built.orders,
        believed=believed,
    )
    for name in [name for name, order in built.orders.items() if order is None and found.columns[name].levels]:
        logger.warning(
            "tables of clients have the categories of %r in different orders, or some have none: its levels are %s; "
            "say levels={%r: [...]} for another order, of which the first is the reference",
            name,
            list(found.columns[name].levels),
            name,
        )
    checks.require_two(built.family, outcomes[0], found, "all clients together")
    return built.agreed(found)


def contradiction(built: Formula, rows: Mapping[str, Any], read: Mapping[str, Any]) -> str | None:
    """What of an agreement is out of all proportion to a client's own rows, or None; `read` is as the builder has them.

    Whoever chooses the constants chooses how wide priors are, and with them what "far from the prior" means.
    """
    design = built.design
    assert design is not None
    what = asked(built)
    for name, column in design.agreement.columns.items():
        if bool(column.levels) != (is_text(rows[name]) or name in what.levels):
            return f"{name!r} is {'levels' if column.levels else 'numbers'} in it, and here the other"
    labels = [label for name in built.terms.common for label in design.labels[name]]
    common = np.asarray(read.get("common", np.zeros((1, 0))), dtype=float)
    apart = np.sqrt(np.mean((common - design.center) ** 2, axis=0)) / design.scale if common.size else np.zeros(0)
    for number, sizes in enumerate(design.group_scale):
        effects = np.asarray(read[f"effects_{number}"], dtype=float)
        apart = np.append(apart, np.sqrt(np.mean(effects**2, axis=0)) / sizes)
        labels += [f"{label} of {':'.join(built.terms.groups[number].factor)}" for label in design.group_labels[number]]
    for label, value in zip(labels, apart, strict=True):
        if not value <= MOST_APART:
            return f"rows lie {value:.3g} agreed sds from the agreed mean in {label!r}, at most {MOST_APART:g} wanted"
    return _other_outcomes(built, np.asarray(sized(built, rows)[built.terms.response.columns[0]]))


def _other_outcomes(built: Formula, outcomes: Array) -> str | None:
    """Whether outcomes are of another size than the agreed one, where priors depend on it."""
    name = built.terms.response.columns[0]
    if name in asked(built).unscaled or built.family.outcome == "level":
        return None
    assert built.design is not None
    column, values = built.design.agreement.columns[name], outcomes.astype(float)
    if built.family.outcome == "real":
        ratio = float(np.sqrt(np.mean((values - column.mean) ** 2)) / column.sd)
    else:
        own = float(np.mean(values))
        ratio = 1.0 if not own > 0 else own / column.mean if column.mean > 0 else np.inf
    if not 1 / MOST_APART <= ratio <= MOST_APART:
        return f"outcomes {name!r} are {ratio:.3g} times as large as the agreed ones"
    return None


def example(built: Formula) -> dict[str, Array]:
    """Made-up rows of the form that clients' have, from what they agreed on: nobody's, enough to build the model."""
    assert built.design is not None
    agreement: Agreement = built.design.agreement
    frame = standing_for_all(built.terms, agreement).iloc[:_EXAMPLE_ROWS]
    held = {str(name): np.asarray(frame[name], dtype=_kind(agreement, name)) for name in frame}
    name, outcome = built.terms.response.columns[0], built.family.outcome
    column, place = agreement.columns[name], np.arange(_EXAMPLE_ROWS)
    if outcome == "time":
        held[name] = column.mean * (1.0 + place % 2)
        held[built.terms.response.columns[1]] = (
            2.0 * held[name] if built.terms.response.kind == "interval" else (place // 2) % 2
        )
    elif column.levels:
        held[name] = np.array(column.levels, dtype=object)[place % len(column.levels)]
    elif outcome in ("real", "unit"):
        held[name] = column.mean + column.sd * (place % 3 - 1.0) if outcome == "real" else 0.25 + 0.25 * (place % 3)
    else:
        held[name] = place % 2 + (outcome == "positive") * 1.0
    if built.terms.response.kind == "proportion":
        held[built.terms.response.columns[1]] = np.full(_EXAMPLE_ROWS, 2)
    return held if built.weights is None else {**held, built.weights: np.ones(_EXAMPLE_ROWS)}


def _kind(agreement: Agreement, name: Any) -> Any:
    column = agreement.columns.get(name)
    return object if column is None or column.levels else float


# Clients of a formula that give an estimate of its coefficients, or a table of counts, in place of rows ---------------

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
