"""A formula as the builder of one client's PyMC model, and a client's rows as its arrays."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr

from fedppl.data import frames
from fedppl.formulas import checks, expressions, predictor
from fedppl.formulas import design as designs
from fedppl.formulas.agreement import Agreement, as_texts, require_present
from fedppl.formulas.checks import new_rows, outcome, weights
from fedppl.formulas.design import SUSPECT, Design, far_from_zero
from fedppl.formulas.families import TIME, Family, Scales, declare
from fedppl.formulas.predictor import Spec, by_row, has_intercept, rows_of, spreads, tag
from fedppl.formulas.priors import Prior
from fedppl.formulas.terms import Group, Terms, variable
from fedppl.model.interpreted import untraced
from fedppl.settings import between, shown
from fedppl.types import Array, DataError, DeclarationError


class Expected(NamedTuple):
    """Mean outcomes: their name, draws (S, n, ...), and labels of the dims after the rows."""

    name: str
    draws: Array
    coords: Mapping[str, Sequence[Any]]


@dataclass(frozen=True, eq=False)
class Formula:
    """A formula with its family and priors, and the builder of a model once clients agreed."""

    text: str  # text, terms and family are what was declared
    terms: Terms
    family: Family
    priors: Mapping[str, Prior] = field(default_factory=dict)  # the user's own, by name of a variable
    correlated: bool = True  # whether effects of one factor have a correlation
    levels: Mapping[str, Sequence[str]] = field(default_factory=dict)  # orders of levels, by column
    # orders of categories in clients' tables, by column; None where they differ
    orders: Mapping[str, Sequence[str] | None] = field(default_factory=dict, kw_only=True)
    constants: Mapping[str, Any] = field(default_factory=dict)  # names in the formula that are not columns
    weights: str | None = None  # the column of weights
    design: Design | None = None  # None before clients agreed

    @property
    def __name__(self) -> str:
        """Name of the builder in messages."""
        return f"formula({self.text!r}, family={self.family.name!r})"

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are read: right of ~, the response, nested factors, and weights."""
        more = [] if self.weights is None else [self.weights]
        return tuple(dict.fromkeys([*self.terms.columns, *self.terms.response.columns, *self.terms.nested, *more]))

    @property
    def shared(self) -> tuple[str, ...]:
        """Names of the variables that all clients share."""
        if self.design is not None:
            counts = [len(one.labels) for one in self.spec.effects]
        else:  # of several levels at least two
            counts = [len(one.expressions) + self.family.several for one in self.terms.groups]
        by_group = [spreads(*one, correlated=self.correlated) for one in zip(self.terms.groups, counts, strict=True)]
        return (*self.coefficients, *itertools.chain(*by_group), *self.family.parameters(self.scales))

    @property
    def behind(self) -> tuple[str, ...]:
        """Partial correlations, in whose place results show correlations."""
        return tuple(f"{tag(group)}_partial" for group in self.terms.groups)

    @property
    def coefficients(self) -> list[str]:
        """Names of the variables that are coefficients."""
        return [*(["Intercept"] if has_intercept(self.terms, self.family) else []), *self.terms.common]

    @property
    def varying(self) -> list[str]:
        """Names of the coefficients that clients' effects are added to."""
        effects = {label for one in self.spec.effects if one.by_client for label in one.labels}
        return [name for name in self.coefficients if effects & {*_labels(self.spec, name)}]

    def effect(self, name: str, *, exponentiate: bool) -> str:
        """Name of a coefficient in a paper, or of exp of it; an interaction of ratios is a ratio of ratios."""
        link, order = self.family.link, _order(self.spec, name)
        if not link.ratio and not exponentiate:
            return "difference" if order else "mean"
        if not link.ratio:
            family = self.family.name
            raise DeclarationError(f"exponentiate=True: {family!r} has differences of means; leave it out.")
        ratio = (link.base, link.ratio, f"ratio of {link.ratio.replace('ratio', 'ratios', 1)}")[min(order, 2)]
        ratio = ratio.format(*self.spec.scales.levels[:1])
        return ratio if exponentiate else f"log {ratio}"

    def totals(self, group: Any) -> xr.Dataset:
        """A client's coefficients, the sums of common ones and its effects, from draws of its posterior."""
        by_name: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for one in self.spec.effects:
            if one.by_client:
                draws = group[f"{one.name}_effects"].transpose("chain", "draw", ...).values
                own |= {label: draws[..., place] for place, label in enumerate(one.labels)}
        for name in self.coefficients:
            total = group[name].transpose("chain", "draw", ...)
            flat = np.array(total.values, dtype=float).reshape(*total.shape[:2], -1)
            for place, label in enumerate(_labels(self.spec, name)):
                flat[..., place] += own.get(label, 0.0)
            by_name[name] = total.copy(data=flat.reshape(total.shape))
        return xr.Dataset(by_name, attrs=dict(group.attrs))

    @property
    def written(self) -> dict[str, str]:
        """The declaration as texts, equal for equal declarations, without levels, which clients agree on."""
        priors = {name: [prior.name, _plain(prior.parameters)] for name, prior in sorted(self.priors.items())}
        texts = {"formula": self.text, "family": self.family.name, "priors": str(priors), "weights": str(self.weights)}
        return {**texts, "correlated": str(self.correlated), "constants": str(_plain(self.constants))}

    @property
    def outcome_levels(self) -> dict[str, list[str]]:
        """Levels of an outcome with levels, whose draws are places of levels from 0."""
        levels = self.spec.scales.levels
        return {self.terms.response.variable: list(levels)} if levels else {}

    @property
    def lacks_order(self) -> bool:
        """Whether the outcome's levels have an order that the formula does not give."""
        return self.family.ordered and self.terms.response.columns[0] not in self.levels

    @property
    def advice(self) -> str:
        """Advice on columns that may spoil a fit."""
        return "" if self.design is None else "; ".join(far_from_zero(self.design, SUSPECT)[:3])

    @property
    def scales(self) -> Scales:
        """Moments and levels of the outcome, made up before clients agreed."""
        cuts = tuple(map(float, self.constants["cuts"])) if self.family.has_cuts else ()
        if self.design is None:
            return Scales(0.0, 1.0, ("a", "b", "c"), cuts)
        column = self.design.agreement.columns[self.terms.response.columns[0]]
        return Scales(column.mean, column.sd, column.levels, cuts)

    @functools.cached_property
    def spec(self) -> Spec:
        """The definition of the linear predictor."""
        if self.design is None:
            remedy = "call fedppl.fit, fedppl.agree, or fedppl.Flower.agree for sites"
            raise DeclarationError(f"clients have not agreed on levels and scales of {self.text!r}; {remedy}.")
        return Spec(self.terms, self.family, self.design, self.scales, self.priors, self.correlated)

    def agreed(self, agreement: Agreement) -> Formula:
        """The same formula with the clients' agreement."""
        design = designs.build(self.terms, agreement, self.constants)
        built = dataclasses.replace(self, design=design)
        if unknown := sorted(set(self.priors) - set(built.shared)):
            raise DeclarationError(f"priors of {unknown}: shared variables are {list(built.shared)}; name these.")
        entries: dict[str, Any] = {name: (labels, built.spec.levels) for name, labels in design.labels.items()}
        for one in built.spec.effects:
            entries |= {f"{one.name}_sd": (one.labels, ()), f"{one.name}_partial": (one.pairs, ())}
        for name in entries.keys() & self.priors:
            checks.lengths(name, self.priors[name], *entries[name])
        return built

    def describe(self) -> pd.DataFrame:
        """A row for each shared variable: its prior, entries, reference, meaning, and what the prior comes from."""
        if self.design is not None:
            known = _described(self.spec)
        else:
            default = "by default wide, on the scales that clients agree on"
            texts = {name: repr(prior) for name, prior in self.priors.items()}
            known = {name: (texts.get(name, default), None, None, None) for name in self.shared}
        rows = {name: (*told, self._meaning(name), source) for name, (*told, source) in known.items()}
        return pd.DataFrame.from_dict(rows, orient="index", columns=_COLUMNS, dtype=object)

    def _meaning(self, name: str) -> str:
        predicted, beside = self.family.link.predicted, self.family.parameters(self.scales)
        if name == "Intercept":
            return f"{predicted} where columns are 0 or at their reference"
        if name in self.terms.common:
            return f"change of the {predicted}"
        if name in beside:
            return beside[name].meaning
        factor = next(one.factor for one in self.terms.groups if name in (f"{tag(one)}_{what}" for what in _SPREADS))
        return f"{_SPREADS[name.rpartition('_')[2]]} of effects by {':'.join(factor)}"

    def read(self, client_id: str, data: Any) -> dict[str, Any]:
        """The builder's arrays from a client's rows; such arrays are returned as they are."""
        return self._read(client_id, data, new=False)

    def read_new(self, client_id: str, data: Any, known: Mapping[str, Any]) -> dict[str, Any]:
        """The builder's arrays from new rows of a client with known arrays; an outcome in them is not read."""
        return self._read(client_id, data, self.by_role(known), new=True)

    def read_unseen(self, client_id: str, data: Any) -> dict[str, Any]:
        """The builder's arrays from rows of a new client, with zeros for outcomes; groups are numbered anew."""
        arrays = self._read(client_id, data, new=True)
        dtype = np.int64 if self.family.outcome.whole else float
        zeros = np.zeros(len(next(iter(arrays.values()))), dtype=dtype)
        return {self.containers["outcome"]: zeros, **arrays}

    def expected(self, arrays: Mapping[str, Any], draws: Mapping[str, Array], at: Any = None) -> Expected:
        """Mean outcomes at each row and draw (S, ...): risks, rates, probabilities of levels.

        For times they are medians, or the probability of no event until `at`, which may be several times.
        """
        if at is not None:
            checks.require_times(self.family, at)
        if not np.size(at):
            raise DeclarationError(f"at={shown(at)} has no time; give one or more, such as at=[30, 90].")
        spec = self.spec
        rows = rows_of(spec, self.by_role(arrays))
        name = self.terms.response.variable
        if at is None:
            means, levels = by_row(spec, rows, draws, None), spec.scales.levels
            what = "median" if self.family.outcome is TIME else "mean"
            by_level = {f"{name}_level": list(levels)} if means.ndim > 2 else {}
            return Expected(f"{name}_{what}", means, by_level)
        times = [between("at", time, 0.0, np.inf) for time in np.ravel(at).tolist()]
        means = np.stack([by_row(spec, rows, draws, time) for time in times], axis=-1)
        alone = np.ndim(at) == 0
        return Expected(f"{name}_survival", means[..., 0] if alone else means, {} if alone else {"time": times})

    def _read(self, client_id: str, data: Any, known: Mapping[str, Any] | None = None, *, new: bool) -> dict[str, Any]:
        if isinstance(data, Mapping) and data and set(data) <= set(self.containers.values()):
            return dict(data)
        what, terms = f"client {client_id!r}", self.terms
        given = frames.of_formula(_as_rows(data) if new else data, what)
        needed = (*terms.columns, *terms.nested, *terms.response.trials) if new else self.columns
        checks.columns(needed, given.names, what)
        columns = frames.raw(given, [name for name in self.columns if name in given.names] or None, what)
        return self.of_columns(client_id, columns, known, new=new)

    def of_columns(
        self, client_id: str, columns: Mapping[str, Array], known: Mapping[str, Any] | None = None, *, new: bool = False
    ) -> dict[str, Any]:
        """The builder's arrays from columns; `new` rows have no outcome, and their groups may be in `known` arrays."""
        design, what, response = self.spec.design, f"client {client_id!r}", self.terms.response
        wanted = {name: columns[name] for name in self.columns if name in columns} or columns  # of `y ~ 1` any
        read_of_new = {*self.terms.columns, *self.terms.nested, *response.trials}
        checks.rows(what, wanted, response, set(columns) - read_of_new if new else ())
        table = designs.table(columns, self.terms, design.agreement, what)
        rows = len(table)
        arrays: dict[str, Any] = {"rows": np.zeros(rows)}
        if self.terms.common:
            arrays = {"common": design.common(table, what)}
        if self.terms.offsets:
            arrays["offset"] = design.offset(table, what)
            if not new:
                checks.offsets(self.family, self.terms, arrays["offset"], what)
        arrays |= {f"column_{name}": designs.plain(table[name]) for name in self.terms.columns}
        for number, group in enumerate(self.terms.groups):
            arrays[f"effects_{number}"] = design.group(number, table, what)
            if len(group.factor) > 1:
                arrays |= numbered(number, group, columns, known, what)
        if new:
            arrays |= new_rows(self.family, response, columns, rows, what)
        else:
            arrays |= outcome(self.family, response, columns, design.agreement, what)
        if self.weights is not None:
            arrays["weights"] = np.ones(rows) if new else weights(self.weights, columns[self.weights], what)
        return {self.containers[name]: value for name, value in arrays.items()}

    @property
    def positive(self) -> dict[str, Prior]:
        """Default priors of sds and other parameters of restricted range, by name."""
        priors: dict[str, Prior] = {}
        for one in self.terms.groups:
            sd, partial = spreads(one, 2, correlated=True)
            priors |= {sd: Prior("HalfNormal", sigma=1.0), partial: Prior("Beta", alpha=2.0, beta=2.0)}
        return {**priors, **self.family.priors(self.scales)}

    @functools.cached_property
    def containers(self) -> dict[str, str]:
        """Names of the builder's arrays by role; another name where a column or a variable has it."""
        kind = self.terms.response.kind
        roles = ["common" if self.terms.common else "rows", *(["offset"] if self.terms.offsets else []), "outcome"]
        roles += {"proportion": ["trials"], "survival": ["limit"], "interval": ["lower", "upper"]}.get(kind, [])
        roles += [f"column_{name}" for name in self.terms.columns]
        roles += [] if self.weights is None else ["weights"]
        for number, group in enumerate(self.terms.groups):
            roles += [f"effects_{number}", *([f"row_{number}", f"of_{number}"] if len(group.factor) > 1 else [])]
        taken = {*self.columns, *self.shared}
        return {name: variable(f"{name}_of_rows" if name in taken else name) for name in roles}

    def by_role(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays of the builder by their roles."""
        return {role: arrays[name] for role, name in self.containers.items() if name in arrays}

    @untraced()
    def __call__(self, **data: Any) -> pm.Model:
        """One client's model."""
        names = self.containers
        if names["outcome"] not in data:
            raise DataError(f"the data lack {list(self.terms.response.columns)}, the response of {self.text!r}.")
        with pm.Model(coords=predictor.coords(self.spec)) as model:
            containers = {key: pm.Data(names[key], value) for key, value in self.by_role(data).items()}
            eta, parameters = self.variables(containers)
            drawn = self.family.likelihood(eta, parameters, containers, self.spec.scales)
            declare(self.terms.response.variable, drawn, containers["outcome"], containers.get("weights"))
        return model

    def variables(self, data: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Declare the linear predictor, and the parameters beside it, in the open model."""
        spec = self.spec
        eta, at_means = predictor.linear_predictor(spec, data)
        beside = self.family.priors(spec.scales)
        if "threshold" in beside:  # as for an intercept, at the means of the columns
            beside = {"threshold": beside["threshold"].with_(mu=at_means)}
        return eta, {name: self.priors.get(name, prior).declared(name) for name, prior in beside.items()}


def _as_rows(data: Any) -> Any:
    """Single values by name as a row; beside columns of several rows a value is repeated."""
    if not isinstance(data, Mapping):
        return data
    single = {name for name, value in data.items() if _is_single(value)}
    lengths = {len(value) for name, value in data.items() if name not in single} or {1}
    if len(lengths) > 1 or not single:
        return data
    count = lengths.pop()
    return {name: [value] * count if name in single else value for name, value in data.items()}


def _is_single(value: Any) -> bool:
    """Whether a value stands for one row: a number, a text, a time."""
    if (dimensions := getattr(value, "ndim", None)) is not None:
        return bool(dimensions == 0)
    return isinstance(value, str | bytes) or not hasattr(value, "__len__")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as numbers, texts or lists of them; other values by name."""
    plain = {}
    for name, value in sorted(values.items()):
        array = np.asarray(value)
        named = getattr(value, "__qualname__", type(value).__qualname__)
        plain[name] = array.tolist() if array.dtype.kind in "biufU" else named
    return plain


# Groups within a client, numbered; new rows find known groups by name -------------------------------------------------


def numbered(
    number: int, group: Group, data: Mapping[str, Any], known: Mapping[str, Any] | None, what: str
) -> dict[str, Array]:
    """The group of each row, and a hash of each group's name; for new rows the place among known groups."""
    for name in group.factor[1:]:
        require_present(data[name], f"{what}: column {name!r}")
    texts = [as_texts(np.asarray(data[name])) for name in group.factor[1:]]
    names, rows = np.unique([_joined(row) for row in zip(*texts, strict=True)], return_inverse=True)
    # Hashes as whole numbers that a float holds exactly.
    digests = [hashlib.blake2b(name.encode(), digest_size=6).digest() for name in names.tolist()]
    marks = [float(int.from_bytes(digest, "little")) for digest in digests]
    if known is None:
        return {f"row_{number}": rows, f"of_{number}": np.array(marks)}
    places = {mark: place for place, mark in enumerate(np.asarray(known[f"of_{number}"], dtype=float).tolist())}
    if unknown := [name for name, mark in zip(names.tolist(), marks, strict=True) if mark not in places]:
        groups = ":".join(group.factor[1:])
        raise DataError(f"{what}: the groups {unknown[:4]} of {groups} have no rows among its data; leave them out.")
    return {f"row_{number}": np.array([places[mark] for mark in marks])[rows]}


def _joined(levels: Sequence[str]) -> str:
    """A unique name of a group: colons in levels are escaped."""
    several = len(levels) > 1
    return ":".join(one.replace("\\", "\\\\").replace(":", "\\:") if several else one for one in levels)


# Description of a formula's model: variables with their priors, and names of coefficients in a paper ------------------

_COLUMNS = ["prior", "entries", "reference", "meaning", "from"]


def _described(spec: Spec) -> dict[str, tuple[str, Any, Any, Any]]:
    """Prior, entries, reference and source of each shared variable, by name."""
    terms, family, scales, priors = spec.terms, spec.family, spec.scales, spec.priors
    outcome, same, rows = terms.response.columns[0], "the same for all data", {}
    mean, sd = f"mean of {outcome} ({scales.mean:.3g})", f"sd of {outcome} ({scales.sd:.3g})"
    unit = sd if family.unit(scales) == scales.sd and not family.link.ratio else "1"
    first = f"{outcome}={scales.levels[0]}" if spec.levels else None
    if has_intercept(terms, family):
        source = f"{mean}, 2.5 times {unit}" if _depends(family.center, scales) else f"2.5 times {unit}"
        rows["Intercept"] = (repr(spec.intercept) + _at(spec, "Intercept"), spec.levels, first, source)
    known = spec.design.agreement.columns
    for name, prior in spec.coefficients.items():
        labels = spec.design.labels[name]
        entries = spec.design.entries[name] if predictor.is_labelled(name, labels) else ()
        if spec.levels:
            entries = tuple(f"{one}, {level}" for one in entries or (name,) for level in spec.levels)
        own_levels = next((column.levels for key, column in known.items() if variable(key) == name), ())
        reference = ", ".join([*own_levels[:1], *([first] if first else [])]) or None
        read = [column for one in terms.factors[name] for column in expressions.columns(terms.trees[one], ())]
        shares = ", by shares of levels" if any(known[one].levels for one in read if one in known) else ""
        source = f"2.5 times {unit} / sd of the column over all rows{shares}"
        rows[name] = (repr(prior), entries, reference, source)
    for one in spec.effects:
        source = f"{unit} / root mean square of the effect's column over all rows"
        rows[f"{one.name}_sd"] = (repr(one.sd), one.labels, None, source)
        if one.partial is not None:
            name = f"{one.name}_partial"
            lkj = "" if name in priors else f": correlations are LKJ(eta={predictor.CORRELATION:g})"
            rows[name] = (repr(one.partial) + lkj, one.pairs, None, same)
    of_entries = {
        "threshold": tuple(f"{a} | {b}" for a, b in itertools.pairwise(scales.levels)),
        "piece": tuple(f"after {cut:g}" for cut in scales.cuts),
    }
    for name, prior in family.priors(scales).items():
        source = same
        if _depends(lambda other: repr(family.priors(other)[name]), scales):  # noqa: B023  # called at once
            source = f"2 times {sd}" if prior.name == "HalfNormal" else f"{mean} and {sd}"
        at = _at(spec, name) if name == "threshold" else ""
        rows[name] = (_shown(priors.get(name, prior)) + at, of_entries.get(name, ()), None, source)
    return {
        name: (prior, entries or None, reference, "priors=" if name in priors else source)
        for name, (prior, entries, reference, source) in rows.items()
    }


def _at(spec: Spec, name: str) -> str:
    """Text: the point where the predictor has a default prior; empty for a prior of the user."""
    moved = [*(["columns"] if spec.terms.common else []), *(["offsets"] if spec.terms.offsets else [])]
    return f" where {' and '.join(moved)} are at their means" if moved and name not in spec.priors else ""


def _depends(of: Callable[[Scales], Any], scales: Scales) -> bool:
    """Whether a function of `scales` depends on them."""
    other = scales._replace(mean=0.5 * scales.mean + 0.1, sd=0.7 * scales.sd)
    return bool(of(scales) != of(other))


_SPREADS = {"sd": "sd", "partial": "(1 + r) / 2 of partial correlations r"}


def _shown(prior: Prior) -> str:
    """Text of a prior without settings for PyMC."""
    hidden = ("initval", "default_transform", "shape")
    return repr(Prior(prior.name, **{key: value for key, value in prior.parameters.items() if key not in hidden}))


def _order(spec: Spec, name: str) -> int:
    """How many differences a coefficient is made of: 0 of an intercept, 2 or more of an interaction.

    A factor with all its levels, as in ``0 + arm`` or the slopes of ``arm/age``, is compared with no reference.
    """
    known = spec.design.agreement.columns
    orders = [
        sum(less or factor not in known or not known[factor].levels for factor, less in zip(*one, strict=True))
        for coded in spec.design.coding[0]
        if coded.term and variable(":".join(coded.term)) == name
        for one in coded.products
    ]
    return max(orders, default=0)


def _labels(spec: Spec, name: str) -> list[str]:
    """Entries of a coefficient by the names of effects, in the order of the flat array."""
    labels = ["Intercept"] if name == "Intercept" else list(spec.design.labels[name])
    return [f"{label}:{level}" for label in labels for level in spec.levels] if spec.levels else labels
