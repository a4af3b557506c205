"""Checks of a formula's names, priors and rows, and outcomes in the numbers that a family takes."""

from __future__ import annotations

import ast
import difflib
import itertools
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from fedppl.data import frames, missing
from fedppl.data.frames import EXACT, as_level, is_number, is_text
from fedppl.formulas import expressions, predictor
from fedppl.formulas.agreement import OTHER, Agreement, coded
from fedppl.formulas.families import BINARY, COUNT, LEVEL, NEVER, TIME, Family
from fedppl.formulas.priors import Prior
from fedppl.formulas.terms import Response, Terms
from fedppl.settings import shown
from fedppl.types import Array, DataError, DeclarationError

logger = logging.getLogger(__name__)

_CLIENTS = ("client", "site")  # names of clients in formulas that need no column
_LARGEST_LOG = 700.0  # exp of more overflows
_DATE = re.compile(  # 2024-03-01, 2024/3/1, also with a time, 1/3/2024, 1.3.2024
    r"\s*(?:\d{4}([-/])\d{1,2}\1\d{1,2}(?:[ T]\d{1,2}:\d{2}\S*)?|\d{1,2}([-/.])\d{1,2}\2\d{4})\s*$"
)
_MANY = 20  # levels above which a column looks like an identifier or numbers


def mapping(name: str, value: Any, example: str) -> dict[str, Any]:
    """A setting that is a mapping by name, or None."""
    if value is not None and not isinstance(value, Mapping):
        raise DeclarationError(f"{name}={shown(value)} must be a mapping, such as {example}.")
    return dict(value or {})


def constants(given: Mapping[str, Any]) -> None:
    """Refuse constants that are neither numbers nor functions."""
    for name, value in given.items():
        if callable(value):
            continue
        try:
            array = np.asarray(value)
        except ValueError:  # lists of different lengths
            array = np.asarray(None)
        if array.dtype.kind not in "biuf" or np.any(np.isnan(array)):
            raise DeclarationError(f"constants={{{name!r}: {shown(value)}}}: give a number, a list or a function.")


def no_constants(built: Any, names: Collection[Any], what: str) -> None:
    """Refuse columns of the names of constants, since the formula may mean either."""
    numbers = {name for name, value in built.constants.items() if not callable(value)}
    read = {name for tree in built.terms.trees.values() for name in expressions.columns(tree, ())}
    if both := sorted(numbers & read & {*names}):
        given = f"constants={{{both[0]!r}: {shown(built.constants[both[0]])}}}"
        raise DeclarationError(f"{what} has the columns {both}, and {given} the same name; rename one of the two.")


def order_of(name: str, levels: Any) -> tuple[str, ...]:
    """Check an order of levels: texts, each once."""
    if isinstance(levels, str | Set) or not isinstance(levels, Iterable):  # a set has another order in each process
        raise DeclarationError(f"levels={{{name!r}: {shown(levels)}}} must be a list of levels in their order.")
    listed = list(levels)
    if none := [level for level in listed if frames.is_missing(level)]:
        raise DeclarationError(f"levels={{{name!r}: ...}} names {none[0]!r}, which is a missing value; leave it out.")
    order = tuple(map(as_level, listed))
    if len(set(order)) < len(order):
        raise DeclarationError(f"levels={{{name!r}: {list(order)}}} names a level twice; name each once.")
    return order


def prior(name: str, given: Prior, default: Prior | None) -> None:
    """Refuse a prior that does not fit the variable."""
    if given.is_discrete:
        raise DeclarationError(f"priors[{name!r}]={given!r} is discrete; choose a continuous distribution.")
    extra = sorted({"observed", "dims", "shape", "size", "total_size"} & set(given.parameters))
    if extra:
        raise DeclarationError(f"priors[{name!r}] has {extra}, which the formula sets; leave them out.")
    if default is not None and default.name == "Beta" and not given.is_of_shares:
        example = 'fedppl.Prior("Beta", alpha=2, beta=2)'
        raise DeclarationError(f"priors[{name!r}]={given!r} has values beyond 0 and 1; pass one such as {example}.")
    if default is not None and not default.has_negative and given.has_negative:
        raise DeclarationError(f"priors[{name!r}]={given!r} has negative values; pass one without, a HalfNormal.")


def lengths(name: str, given: Prior, labels: Sequence[str], levels: Sequence[str] = ()) -> None:
    """Refuse parameters of a prior for another number of coefficients (each has all `levels`)."""
    count = len(labels)
    allowed = {(), (1,), (count,), *itertools.product({1, count}, {1, len(levels)} - {0})}
    allowed |= {(len(levels),)} if count == 1 else set()
    for parameter, value in given.parameters.items():
        if (shape := np.shape(value)) not in allowed:
            columns_of = f", or a column for each of {list(levels)[:8]}" if levels else ""
            counted = f"{shape[0]} values" if len(shape) == 1 else f"shape {shape}"
            entries = f"one, or a list of {count} entries: {list(labels)[:8]}{columns_of}"
            raise DeclarationError(f"priors[{name!r}] has {counted} of {parameter!r}; give {entries}.")


def columns(wanted: Iterable[str], found: Iterable[Any], what: str) -> None:
    """Refuse a table that lacks columns of the formula."""
    known = [str(name) for name in found]
    if not (absent := [name for name in wanted if name not in known]):
        return
    lower = {name.casefold(): name for name in known}
    close = {name: difflib.get_close_matches(name.casefold(), lower, n=1) for name in absent}
    meant = "".join(f", {name!r} may be {lower[one[0]]!r}" for name, one in close.items() if one)
    remedy = "Rename them, or give constants by fedppl.formula(..., constants={...})"
    raise DataError(f"{what} lacks the columns {absent} of the formula; it has {sorted(known)[:20]}{meant}. {remedy}.")


def refuse(wrong: Any, name: str, values: Any, what: str, rule: str) -> None:
    """Refuse the first row that breaks a rule."""
    if np.any(wrong):
        where = int(np.argmax(wrong))
        raise DataError(f"{what}: {name!r} is {float(values[where]):.12g} in row {where}, and {rule}.")


def offsets(family: Family, terms: Terms, values: Array, what: str) -> None:
    """Refuse offsets of a logarithm so far apart that means of two rows have no ratio among numbers."""
    apart = float(np.ptp(values))
    if family.link.predicted.startswith("log of") and apart > _LARGEST_LOG:
        offsets_of = " + ".join(terms.offsets)
        rule = f"offsets of family {family.name!r} are logarithms"
        raise DataError(f"{what}: {offsets_of} differs by {apart:.3g} between rows; {rule}, write offset(np.log(x)).")


def rows(what: str, data: Mapping[str, Any], response: Response, unread: Collection[str] = ()) -> None:
    """Refuse columns without one value per row, without rows, or, but in those `unread`, infinite or complex ones."""
    endless, count = response.columns[1:2] if response.kind == "interval" else (), {}  # may be infinite
    for name, column in data.items():
        values = np.asarray(column)
        if values.ndim != 1:
            raise DataError(f"{what}: column {name!r} has shape {values.shape}; give one value a row.")
        if values.dtype.kind == "c" and name not in unread:
            raise DataError(f"{what}: column {name!r} is complex, and data must be real; give its parts as columns.")
        if values.dtype.kind == "f" and name not in (*endless, *unread):
            refuse(np.isinf(values), name, values, what, "values are finite; correct or drop such rows")
        count[name] = len(values)
    if len(set(count.values())) > 1:
        raise DataError(f"{what}: columns have different numbers of rows, {count}; give one value of each a row.")
    if 0 in count.values():
        raise DataError(f"{what}: there are no rows; give one row or more, or leave the client out.")


def truths(client_id: str, data: Mapping[str, Any], terms: Terms, levels: Collection[str]) -> None:
    """Refuse booleans, the numbers 1 and 0, where R's two levels span more: `0 + flag`, or `x:flag` without x."""
    columns = {name: np.asarray(data[name]) for name in terms.columns if isinstance(terms.trees.get(name), ast.Name)}
    flags = {name for name, values in columns.items() if values.dtype == bool and name not in levels}
    flags |= {name for name, tree in terms.trees.items() if expressions.is_truth(tree)}
    if not flags:
        return
    coded = {name for name, values in columns.items() if name in levels or is_text(values)}
    for one in terms.sums:
        as_levels, as_numbers = (
            [
                (term, frozenset((name, short or name in flags) for name, short in zip(*product, strict=True)), product)
                for term, products in one.products(dict.fromkeys(named, "ab"))
                for product in products
            ]
            for named in (flags | coded, coded)
        )
        spanned = {columns_of for _, columns_of, _ in as_numbers}
        for term, columns_of, product in as_levels:
            full = flags & {name for name, short in zip(*product, strict=True) if not short}
            if columns_of not in spanned:  # levels of the term have columns that numbers lack
                full |= flags & set(term)
            if full:
                flag = min(full)
                name = flag if flag.isidentifier() else f"`{flag}`"
                remedy = f"write C({name})" if flag in columns else "compute a column of texts before"
                what = f"{flag!r} is True or False, and {':'.join(term)!r} needs a column for each"
                raise DataError(f"client {client_id!r}: {what}; {remedy}, or give the numbers 0 and 1 for one column.")


def ordered(name: str, clients: Mapping[Any, Mapping[str, Any]]) -> None:
    """Refuse an ordinal outcome of unknown order: of texts without levels=, or of fractions."""
    levels: set[str] = set()
    for client_id, data in clients.items():
        values = np.asarray(data[name])
        if is_text(values):
            levels |= set(values.astype(str).tolist())
        else:
            rule = "levels of an ordinal outcome are whole numbers or texts; cut it into levels, or take another family"
            fractions = values.astype(float) != np.floor(values.astype(float))
            refuse(fractions, name, values, f"client {str(client_id)!r}", rule)
    if not all(map(is_number, levels)):
        remedy = f"fedppl.formula(..., levels={{{name!r}: [lowest, ..., highest]}})"
        raise DeclarationError(f"{name!r} has levels {sorted(levels)[:8]}, whose order is not known; pass {remedy}.")


def odd_levels(agreement: Agreement, declared: Iterable[str]) -> list[str]:
    """Messages on levels that look like a mistake; refuse dates, and many numbers with a typing error such as "72 y".

    In columns that are `declared` levels may be numbers or dates.
    """
    messages = []
    for name, column in agreement.columns.items():
        levels, count = column.levels, len(column.levels)
        texts = [level for level in levels if not is_number(level)]
        if name not in declared and count > _MANY and len(texts) <= count // 5:
            but = f"all but {shown(texts[:3])}" if texts else "all"
            remedy = f"pandas.to_numeric({name}), or pass fedppl.formula(..., levels={{{name!r}: [...]}})"
            raise DataError(f"{name!r} is of texts with {count} levels, {but} are numbers; convert it, {remedy}.")
        dates = [level for level in levels if _DATE.match(level)]
        if name not in declared and dates and {*levels} <= {*dates, OTHER}:
            remedy = f"use pandas.to_datetime, or C({name}) for a level each"
            raise DataError(f"{name!r} is of texts that are dates, {shown(dates[:3])}; {remedy}.")
        groups: dict[str, list[str]] = {}
        for level in levels:
            groups.setdefault(level.strip().casefold(), []).append(level)
        if alike := [same for same in groups.values() if len(same) > 1]:
            messages.append(f"levels {alike[0]} of {name!r} differ by blanks or capitals; recode what is one level")
        if name not in declared and any("." in level and is_number(level) for level in levels):
            messages.append(f"{name!r} is of texts that are numbers, and has {count} levels; make numbers of it")
        elif count > max(_MANY, agreement.rows // 2):
            messages.append(f"{name!r} has {count} levels in {agreement.rows} rows; is it an identifier?")
    return messages


def collinear(parts: Iterable[Array], labels: Sequence[str], has_intercept: bool) -> list[str]:
    """Names of columns that are linearly dependent on others, and the intercept, over all rows."""
    size, count, total = len(labels), 0, np.zeros(len(labels))
    gram, dependent = np.zeros((size, size)), np.zeros(0, dtype=int)
    for part in parts:
        count, total, gram = count + len(part), total + part.sum(axis=0), gram + part.T @ part
        if count <= size:
            continue
        spread = gram - np.outer(total, total) / count if has_intercept else gram
        root = np.sqrt(np.maximum(np.diag(gram), 1e-300))
        values, vectors = np.linalg.eigh(spread / np.outer(root, root))
        flat = vectors[:, values < 1e-10 * values.max(initial=1e-300)]  # directions without variance
        dependent = np.flatnonzero(np.any(np.abs(flat) > 1e-3, axis=1))
        if not len(dependent):
            break
    return [labels[i] for i in dependent]


def tables(built: Any, data: Any, by: Any) -> None:
    """Refuse tables without the columns of a formula, and a by= that is not the factor of the effects.

    Where the factor is no column, which may be a typing error, it warns that effects vary by client.
    """
    factor = built.terms.client
    for client_id, table in frames.tables_of(data).items():
        what = "the table" if table is data else f"client {str(client_id)!r}"
        columns(built.columns, table.names, what)
        no_constants(built, table.names, what)
        if table is data and factor in table.names and by not in (factor, [factor], (factor,)):
            group = by if isinstance(by, str) else "client"
            said = f"effects of {built.text!r} vary by {factor!r}, and clients by by={by!r}"
            raise DataError(f"{said}; pass by={factor!r}, or write (1 | {group}), or (1 | client/group) within.")
        if table is data and factor not in (None, by, *_CLIENTS, *table.names):
            said = "the table has no column %r, so that (... | %s) is of the clients, which by=%r tells apart"
            logger.warning(said, factor, factor, by)


def one_factor_a_client(built: Any, clients: Mapping[Any, Any]) -> None:
    """Refuse clients with several values in a column of the factor's name, since effects vary by client."""
    factor, seen = built.terms.client, dict[str, str]()
    for client_id, data in clients.items():
        if factor not in data:
            continue
        whose, column = f"client {str(client_id)!r}", np.ravel(np.asarray(data[factor])).tolist()
        values = sorted({str(one) for one in column if one == one})
        wrong = ""
        if len(values) > 1:
            wrong = f"{whose} has {len(values)} values of {factor!r}, {shown(values[:4])}"
        elif values and (first := seen.setdefault(values[0], str(client_id))) != str(client_id):
            wrong = f"clients {first!r} and {str(client_id)!r} have the same {factor!r}, {values[0]!r}"
        if wrong:
            remedy = f"write (1 | client/{factor}) for groups within clients, or give a table for each {factor}"
            raise DataError(f"{wrong}, and effects of {built.text!r} vary by client: {remedy}.")


def limits(built: Any, data: Mapping[str, Any], what: str) -> None:
    """Refuse missing upper limits of intervals, since dropping them would drop rows without an event."""
    response = built.terms.response
    name = response.columns[-1]
    gone = missing.missing_rows(data.get(name)) if response.kind == "interval" else None
    if gone is not None and gone.any():
        remedy = "without an event yet it is inf, .fillna(np.inf)"
        raise DataError(f"{what}: {name!r} is missing in {int(gone.sum())} rows; {remedy}.")


def say_what_cannot_be_told(built: Any, parts: Sequence[Mapping[str, Any]], count: int) -> None:
    """Warn of coefficients that the data do not identify, so that their priors decide; `parts` are arrays of rows."""
    design, terms, names_of = built.design, built.terms, built.containers
    if terms.client is not None and count == 1:
        said = "there is one client, so that the sd of (... | %s) keeps its prior; leave it out, or give more clients"
        logger.warning(said, terms.client)
    labels = [label for name in terms.common for label in design.labels[name]]
    has_intercept = predictor.has_intercept(terms, built.family)
    center = design.center if has_intercept else 0.0  # without it rounding of a large mean looks like dependence
    common = ((part[names_of["common"]] - center) / design.scale for part in parts if labels)
    if flat := collinear(common, labels, has_intercept):
        logger.warning("columns %s are collinear: only their priors tell them apart; leave one out", flat)
    for number, (names, group) in enumerate(zip(design.group_labels, terms.groups, strict=True)):
        if len(group.factor) > 1:
            continue
        varies = np.zeros(len(names), dtype=bool)
        for part in parts:
            if varies[1:].all():
                break
            varies |= np.ptp(part[names_of[f"effects_{number}"]], axis=0) > 0
        if same := [name for name, varied in zip(names[1:], varies[1:], strict=True) if not varied]:
            logger.warning("effects %s vary within no client; leave them out of (... | %s)", same, *group.factor)


# A client's outcomes in the numbers that a family takes ---------------------------------------------------------------

_COUNTED = "counts are exact up to 2**53; correct such rows, or give the column in a larger unit"


def outcome(
    family: Family, response: Response, data: Mapping[str, Any], agreement: Agreement, what: str
) -> dict[str, Array]:
    """Outcomes, and numbers of trials where the family has some, as arrays of the builder."""
    if family.outcome is TIME:
        return times(response, data, what)
    name = response.columns[0]
    values = np.asarray(data[name])
    if family.outcome is LEVEL or (family.outcome is BINARY and is_text(values)):
        column = agreement.columns[name]
        texts = coded(column, values, agreement, f"{what}: column {name!r}")
        places = {level: place for place, level in enumerate(column.levels)}
        return {"outcome": np.array([places[text] for text in texts.tolist()])}
    if is_text(values):
        remedy = "convert them, or choose family 'bernoulli' for two levels, 'ordinal' for more"
        raise DataError(f"{what}: {name!r} has texts, and family {family.name!r} needs numbers; {remedy}.")
    rule = f"outcomes of family {family.name!r} are {family.outcome.rule}; correct such rows, or choose another family"
    refuse(~family.outcome.holds(values.astype(float)), name, values, what, rule)
    if family.outcome is COUNT:
        refuse(values > EXACT, name, values, what, _COUNTED)
    arrays = {"outcome": values.astype(np.int64 if family.outcome.whole else float)}
    if response.kind == "proportion":
        arrays["trials"] = _trials(arrays["outcome"], data[response.columns[1]], response, what)
    return arrays


def require_two(family: Family, name: str, agreement: Agreement) -> None:
    """Refuse an outcome of texts without exactly two levels where a family has two."""
    levels = agreement.columns[name].levels
    if family.outcome is BINARY and levels and len(levels) != 2:
        remedy = "recode rows, or choose family 'ordinal' or 'categorical'"
        raise DataError(f"{name!r} has the levels {list(levels)[:8]}, and family {family.name!r} needs two; {remedy}.")


def new_rows(family: Family, response: Response, data: Mapping[str, Any], rows: int, what: str) -> dict[str, Array]:
    """Arrays that the likelihood reads beside the outcome, at rows whose outcome is predicted."""
    if family.outcome is TIME:
        without = {"lower": np.ones(rows), "upper": np.ones(rows)}
        return without if response.kind == "interval" else {"limit": np.full(rows, NEVER)}
    if response.kind != "proportion":
        return {}
    return {"trials": _trials(np.zeros(rows), data[response.columns[1]], response, what)}


def weights(name: str, column: Any, what: str) -> Array:
    """Weights of rows: the number of rows that each stands for."""
    values = _numbers(name, column, what, "the weights are numbers above 0")
    refuse(~((values > 0) & np.isfinite(values)), name, values, what, "weights are finite and above 0; drop others")
    return values.astype(float)


def _numbers(name: str, column: Any, what: str, rule: str) -> Array:
    """A column of numbers; refuse texts."""
    values = np.asarray(column)
    if is_text(values):
        raise DataError(f"{what}: {name!r} has texts, and {rule}; recode its rows.")
    return values


def _trials(successes: Array, column: Any, response: Response, what: str) -> Array:
    name = response.columns[1]
    trials = _numbers(name, column, what, "trials are whole numbers")
    wrong = ~(trials >= np.maximum(successes, 1)) | (trials != np.floor(trials))
    rule = f"trials are whole numbers, at least 1 and at least the successes {response.columns[0]!r}"
    refuse(wrong, name, trials, what, rule)
    refuse(trials > EXACT, name, trials, what, _COUNTED)
    return trials.astype(np.int64)


# A client's times until an event in the numbers that survival families take -------------------------------------------


def times(response: Response, data: Mapping[str, Any], what: str) -> dict[str, Array]:
    """Times and their limits; or the times between which events are, and the times that were observed."""
    rule = "a time or an event is a number"
    first, second = (_numbers(name, data[name], what, rule).astype(float) for name in response.columns)
    return (_between if response.kind == "interval" else _right)(response.columns, first, second, what)


def require_times(family: Family, at: Any) -> None:
    """Refuse a time for outcomes that are none."""
    if family.outcome is not TIME:
        raise DeclarationError(f"at={shown(at)} is a time, and outcomes of family {family.name!r} are none.")


def size_of(response: Response, data: Mapping[str, Any]) -> Array:
    """Times for the scale that clients agree on; for an interval its middle."""
    first, second = (np.asarray(data[name]) for name in response.columns)
    if response.kind != "interval" or is_text(first) or is_text(second):
        return first
    first, second = first.astype(float), second.astype(float)  # sums of small whole numbers overflow
    return np.asarray(np.where(np.isfinite(second), (first + second) / 2.0, first))


def _right(names: tuple[str, ...], time: Array, event: Array, what: str) -> dict[str, Array]:
    refuse(~((time > 0) & (time < NEVER)), names[0], time, what, "times are above 0 and finite; correct such rows")
    refuse(~np.isin(event, (0, 1)), names[1], event, what, "events are 1, or 0 where there was none until the time")
    return {"outcome": time, "limit": np.where(event == 1, NEVER, time)}


def _between(names: tuple[str, ...], lower: Array, upper: Array, what: str) -> dict[str, Array]:
    refuse(~((lower >= 0) & (lower < NEVER)), names[0], lower, what, "times are from 0, and finite; correct such rows")
    rule = f"it is above 0 and not below {names[0]!r}; correct such rows"
    refuse(~((upper > 0) & (upper >= lower)), names[1], upper, what, rule)
    far = (upper >= NEVER) & np.isfinite(upper)
    refuse(far, names[1], upper, what, f"times are below {NEVER:.2g}, or inf where there was no event")
    nothing = (lower == 0) & ~(upper < NEVER)
    refuse(nothing, names[1], upper, what, f"from {names[0]!r} = 0 this has no information; drop such rows")
    return {"outcome": lower, "lower": lower, "upper": np.minimum(upper, NEVER)}
