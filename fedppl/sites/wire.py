"""Messages between a site and the server, written as named arrays and texts, and read. NumPy only.

Reading raises `Malformed` and nothing else; its text names the field and the rule.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts import Failure, Reply, Request
from fedppl.formulas.agreement import Agreement, Column, Told
from fedppl.gaussian import Gaussian
from fedppl.model.checks import fingerprint
from fedppl.run.one_round import why_no_info
from fedppl.settings import one_line, plain, some_of
from fedppl.sites.decode import (
    LABELS_LENGTH,
    LINE_LENGTH,
    NAME_LENGTH,
    Malformed,
    Parcel,
    brief,
    checked_name,
    one_text,
    parsed,
    reading,
    require,
    require_few,
    whole_number,
)
from fedppl.types import Layout, Message, Status, Variable


def pack_request(request: Request) -> Parcel:
    """Write a request; integers are texts, since they may need more than 63 bits."""
    texts = {
        "client_id": request.client_id,
        "nonce": str(request.nonce),
        "round": str(request.round),
        "seed": json.dumps(list(request.seed)),
        "run": request.run,
        "report": str(int(request.report)),
    }
    return request.message, texts


def unpack_request(arrays: Message, texts: Mapping[str, str]) -> Request:
    """Read a request."""
    seed = parsed(texts, "seed")
    valid = type(seed) is list and len(seed) <= 8 and all(type(number) is int and number >= 0 for number in seed)
    require(valid, f"'seed' is {brief(seed)}, expected whole numbers")
    report = one_text(texts, "report")
    require(report in ("0", "1"), f"'report' is {brief(report)!r}, expected 0 or 1")
    return Request(
        client_id=checked_name(one_text(texts, "client_id"), "'client_id'"),
        nonce=whole_number(texts, "nonce"),
        round=whole_number(texts, "round"),
        seed=tuple(seed),
        message=arrays,
        run=checked_name(one_text(texts, "run"), "'run'"),
        report=report == "1",
    )


class Over(NamedTuple):
    """The message that a run is over."""

    client_id: str
    run: str
    seed: int  # of the client's draws
    status: Status
    message: Message


def unpack_conclusion(arrays: Message, texts: Mapping[str, str]) -> Over:
    """Read the message that a run is over."""
    status = one_text(texts, "status", NAME_LENGTH)
    require(status in set(Status), f"'status' is {brief(status)!r}, expected one of a run's")
    client_id, run = (checked_name(one_text(texts, field), f"{field!r}") for field in ("client_id", "run"))
    return Over(client_id, run, whole_number(texts, "seed"), Status(status), arrays)


def pack_reply(reply: Reply | Failure) -> Parcel:
    """Write a reply, or the part of a failure that may travel."""
    if isinstance(reply, Failure):
        reason = one_line(reply.reason, LINE_LENGTH)
        return {}, {"client_id": reply.client_id, "nonce": str(reply.nonce), "failure": reason}
    texts = {
        "client_id": reply.client_id,
        "nonce": str(reply.nonce),
        "fingerprint": reply.fingerprint,
        "info": json.dumps(dict(reply.info)),
        "reason": one_line(reply.reason, LINE_LENGTH),
    }
    return reply.message, texts


def unpack_reply(arrays: Message, texts: Mapping[str, str]) -> Reply | Failure:
    """Read a reply."""
    client_id, nonce = one_text(texts, "client_id", NAME_LENGTH), whole_number(texts, "nonce")
    if "failure" in texts:
        return Failure(client_id, nonce, one_line(one_text(texts, "failure"), LINE_LENGTH))
    infos = parsed(texts, "info", finite=False)
    numbers = type(infos) is dict and all(type(value) in (int, float) for value in infos.values())
    require(numbers, "'info' is not numbers by name")
    info = {name: float(value) for name, value in infos.items()}
    if reason := why_no_info(info):
        raise Malformed(reason)
    reason = one_line(one_text(texts, "reason"), LINE_LENGTH)
    return Reply(client_id, nonce, one_text(texts, "fingerprint", NAME_LENGTH), arrays, info, reason)


# How a site introduces itself: its version, settings, shared variables and prior, but no data -------------------------
# What it says is held against the server's own, and not used.

SERVER = "the server"
_NAMES = 1_000  # of dims, settings or columns


class Terms(NamedTuple):
    """What a server expects of every site's introduction."""

    settings: Mapping[str, str]  # of the algorithm
    layout: Layout
    coords: Mapping[str, Sequence[Any]]  # labels of dims


def pack_hello(client_id: str, terms: Terms) -> Parcel:
    """Write a site's introduction."""
    layout, precision = terms.layout, terms.layout.prior.precision
    arrays = {
        "prior_linear": layout.prior.linear,
        "prior_precision": precision if precision.ndim == 1 else gaussian.pack_triangle(precision),
        "prior_density": np.array(layout.density),
    }
    texts = {
        "client_id": client_id,
        "version": version("fedppl"),
        "settings": json.dumps(dict(terms.settings)),
        "variables": json.dumps(layout.variables),
        "prior_is_gaussian": json.dumps(layout.prior_is_gaussian),
        "fingerprint": layout.fingerprint,
        "coords": json.dumps(_labels(terms.coords)),
    }
    return arrays, texts


def shapes_of_hello(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Shapes of an introduction's arrays."""
    size = layout.size
    precision = size * (size + 1) // 2 if layout.prior.precision.ndim == 2 else size
    return {"prior_linear": (size,), "prior_precision": (precision,), "prior_density": (len(layout.density),)}


def _labels(coords: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Labels of dims as JSON can hold them."""
    return {
        name: [value if isinstance(value, str | int | float) else str(value) for value in map(plain, values)]
        for name, values in coords.items()
    }


def other_version(texts: Mapping[str, str]) -> str | None:
    """Whether a site runs another version, or None; asked first, since the version decides how the rest is written."""
    ours, theirs = version("fedppl"), one_text(texts, "version", NAME_LENGTH)
    if theirs == ours:
        return None
    return f"it runs fedppl {brief(theirs)}, {SERVER} runs {ours}; install one version everywhere"


def other_terms(terms: Terms, texts: Mapping[str, str]) -> str | None:
    """Where a site's settings or shared variables differ from the server's, or None."""
    ours, theirs = terms.settings, _mapping(parsed(texts, "settings"), "settings")
    require(all(type(value) is str for value in theirs.values()), "'settings' are not texts by name")
    changed = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if changed:
        changes = (
            f"{brief(name)} {brief(theirs.get(name))} instead of {brief(ours.get(name))}" for name in changed[:5]
        )
        return f"its algorithm has {'; '.join(changes)}: 'settings' must be the same everywhere"
    rows, their_rows = json.loads(json.dumps(terms.layout.variables)), parsed(texts, "variables")
    if their_rows == rows:
        return None
    with reading("'variables'"):
        names, their_names = ([brief(row[0]) for row in each] for each in (rows, their_rows))
        if names != their_names:
            return f"it shares {some_of(their_names)}, {SERVER} shares {some_of(names)}"
        fields = [
            (name, *parts)
            for name, row, their_row in zip(names, rows, their_rows, strict=True)
            for parts in zip(Variable._fields, row, their_row, strict=True)
        ]
        name, field, mine, other = next(each for each in fields if each[2] != each[3])
        return f"its shared variable {name!r} has {field} {brief(other)}, at {SERVER} it has {brief(mine)}"


def other_model(terms: Terms, arrays: Message, texts: Mapping[str, str]) -> str | None:
    """Where a site's prior or labels differ from the server's, or None; its fingerprint must be of what it says."""
    layout, is_gaussian = terms.layout, parsed(texts, "prior_is_gaussian")
    require(type(is_gaussian) is bool, "'prior_is_gaussian' is neither true nor false")
    for name, value in arrays.items():
        wrong = np.isnan(value) if name == "prior_density" else ~np.isfinite(value)
        require(value.dtype == np.float64 and not wrong.any(), f"{name!r} is not finite, or of type {value.dtype}")
    with reading("'prior_precision'"):
        linear, precision, density = (arrays[name] for name in shapes_of_hello(layout))
        is_matrix = layout.prior.precision.ndim == 2
        prior = Gaussian(linear, gaussian.unpack_triangle(precision) if is_matrix else precision)
        require(bool(gaussian.is_proper(prior)), "'prior_precision' is not positive definite")
        said = one_text(texts, "fingerprint", NAME_LENGTH)
        found = fingerprint(layout.variables, prior, is_gaussian, list(density))
        require(said == found, f"'fingerprint' is {brief(said)}, but what its 'prior_...' arrays say has {found}")
        if found != layout.fingerprint:
            where = "one of them is Gaussian" if is_gaussian != layout.prior_is_gaussian else _apart(layout, prior)
            remedy = "constants of the prior must be the same everywhere, and not depend on data"
            return f"its shared prior is another than at {SERVER} ({where}): {remedy}"
    return _other_labels(layout, _labels(terms.coords), _mapping(parsed(texts, "coords", LABELS_LENGTH), "coords"))


def _apart(layout: Layout, prior: Gaussian) -> str:
    """Where two priors of one shape differ most, in words."""
    (mean, sd), (others, other_sd) = (
        (gaussian.mean(each), gaussian.standard_deviations(each)) for each in (layout.prior, prior)
    )
    apart = np.abs(others - mean) / sd + np.abs(np.log(other_sd / sd))
    if not apart.max() > 1e-6:
        return "in correlations, or in its density about one mean and covariance"
    k = int(np.argmax(apart))
    return f"{layout.labels[k]} has mean {others[k]:.4g} and sd {other_sd[k]:.4g}, there {mean[k]:.4g} and {sd[k]:.4g}"


def _other_labels(layout: Layout, ours: Mapping[str, list[Any]], theirs: Mapping[str, Any]) -> str | None:
    """The first shared dim whose labels differ, in words; dims without labels are not compared."""
    require(not {"chain", "draw"} & set(theirs), "'coords' has a dim that draws have")
    for dim in sorted({dim for variable in layout.variables for dim in variable.dims or () if dim}):
        if dim in ours and dim in theirs and ours[dim] != theirs[dim]:
            with reading("'coords'"):
                pairs = enumerate(zip_longest(ours[dim], theirs[dim]))
                of_first = ((k, brief(mine), brief(other)) for k, (mine, other) in pairs if mine != other)
                k, mine, other = next(of_first, (0, "of a list", f"of a {type(theirs[dim]).__name__}"))
            remedy = "give the columns of the data one order, and coords one order, everywhere"
            return f"its dim {dim!r} has label {other!r} in place {k}, at {SERVER} it is {mine!r}: {remedy}"
    return None


def _mapping(mapping: Any, field: str) -> dict[str, Any]:
    require(type(mapping) is dict and len(mapping) <= _NAMES, f"{field!r} is no mapping of {_NAMES} names at most")
    return {checked_name(name, f"a name in {field!r}"): value for name, value in mapping.items()}


# Before a run by a formula: a site's summary of its columns, and the agreement of all. As JSON ------------------------

_LEVELS = 1_000  # of one column
_ROUNDING = 1e-9  # relative, of sums that are added in another order


def pack_told(columns: Mapping[str, Told]) -> str:
    """Write a site's summary of columns."""
    for name, column in columns.items():
        _require_levels(list(column.levels), f"column {name!r}")
    return json.dumps({name: list(column) for name, column in columns.items()})


def unpack_told(texts: Mapping[str, str], names: Sequence[str]) -> dict[str, Told]:
    """Read a site's summary of these columns; numbers that no rows could have are refused."""
    columns = parsed(texts, "told", LABELS_LENGTH)
    _require_names(columns, names, "told")
    return {name: _told(columns[name], f"column {name!r}") for name in names}


def _told(given: Any, field: str) -> Told:
    kinds = ("count", "number", "number", "mapping", "flag", "flag")
    rows, total, squares, levels, withheld, text = _row(given, kinds, field)
    _require_levels(list(levels), field)
    _row(list(levels.values()), ["count"] * len(levels), field)
    if text:
        told = sum(levels.values())
        plausible = told <= rows and not total and not squares
        require(plausible, f"{field} has levels of {told} rows, and {rows} rows, or sums too")
    else:
        require(not levels, f"{field} has numbers, and levels too")
        idle = not rows or withheld
        require(not idle or (not total and not squares), f"{field} has sums of rows that it does not tell")
        possible = idle or total**2 / rows <= squares * (1 + _ROUNDING)
        require(bool(possible), f"{field} has a sum of squares that is less than its sum allows")
    return Told(rows, float(total), float(squares), levels, withheld, text)


def pack_agreement(agreement: Agreement) -> str:
    """Write an agreement."""
    columns = {
        name: [list(column.levels), list(column.shares), column.mean, column.sd]
        for name, column in agreement.columns.items()
    }
    return json.dumps({"columns": columns, "rows": agreement.rows, "others": agreement.others})


def unpack_agreement(texts: Mapping[str, str], names: Sequence[str]) -> Agreement:
    """Read an agreement on these columns."""
    parts = parsed(texts, "agreement", LABELS_LENGTH)
    _require_names(parts, ("columns", "rows", "others"), "agreement")
    rows, others = _row([parts["rows"], parts["others"]], ("count", "flag"), "'rows' or 'others'")
    _require_names(parts["columns"], names, "columns")
    return Agreement({name: _column(parts["columns"][name], f"column {name!r}") for name in names}, rows, others)


def _column(given: Any, field: str) -> Column:
    levels, shares, mean, sd = _row(given, ("list", "list", "number", "number"), field)
    _require_levels(levels, field)
    require(len(levels) != 1 and len(shares) == len(levels), f"{field} has {len(levels)} levels, {len(shares)} shares")
    _row(shares, ["number"] * len(shares), field)
    require(sd > 0 and sd**2 > 0, f"{field} has the sd {brief(sd)}, expected one above 0")
    parts = all(0 <= share <= 1 for share in shares) and (not shares or math.isclose(sum(shares), 1, abs_tol=1e-6))
    require(parts, f"{field} has shares that are no parts of 1")
    return Column(tuple(levels), tuple(map(float, shares)), float(mean), float(sd))


def digest(agreement: Agreement) -> str:
    """A digest of an agreement."""
    return hashlib.sha256(pack_agreement(agreement).encode()).hexdigest()[:32]


def _require_names(mapping: Any, names: Sequence[str], field: str) -> None:
    require(type(mapping) is dict and len(mapping) <= _NAMES, f"{field!r} is no mapping of {_NAMES} names at most")
    if set(mapping) != set(names):
        shown = [brief(name) for name in sorted(mapping)[:8]]
        raise Malformed(f"{field!r} is of {shown}, expected {sorted(names)[:8]}")


def _require_levels(levels: Sequence[Any], field: str) -> None:
    require_few(len(levels), _LEVELS, f"levels of {field}")
    for level in levels:
        checked_name(level, f"a level of {field}")
    require(len(set(levels)) == len(levels), f"{field} has one level twice")


_IS: Mapping[str, Callable[[Any], bool]] = {
    "count": lambda value: type(value) is int and 0 <= value < 2**53,
    "flag": lambda value: type(value) is bool,
    "list": lambda value: type(value) is list,
    "mapping": lambda value: type(value) is dict,
    "number": lambda value: type(value) in (int, float) and abs(value) < 1e100,  # whose square does not overflow
}


def _row(values: Any, kinds: Sequence[str], field: str) -> list[Any]:
    """A list of values of these kinds."""
    require(type(values) is list and len(values) == len(kinds), f"{field} is no list of {len(kinds)}")
    for value, kind in zip(values, kinds, strict=True):
        require(_IS[kind](value), f"{field} has {brief(value)}, expected a {kind}")
    return list(values)
