"""Messages between a site and the server, written as named arrays and texts, and read. NumPy only.

Reading raises `Malformed` and nothing else; its text names the field and the rule.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts import Failure, Reply, Request, SharedReader
from fedppl.flower.decode import (
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
    whole_number,
)
from fedppl.formulas.agreement import Agreement, Column, Told
from fedppl.gaussian import Gaussian
from fedppl.model.checks import PROBES, fingerprint
from fedppl.numerics.prior import DENSE
from fedppl.run.one_round import why_no_info
from fedppl.settings import one_line
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
    report = one_text(texts, "report", default="1")
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


def unpack_conclusion(texts: Mapping[str, str]) -> tuple[str, str, int, Status]:
    """Read the message that a run is over: client id, run, seed of the client's draws, and the run's status."""
    status = one_text(texts, "status", NAME_LENGTH)
    require(status in set(Status), f"'status' is {brief(status)!r}, expected one of a run's")
    client_id, run = (checked_name(one_text(texts, field), f"{field!r}") for field in ("client_id", "run"))
    return client_id, run, whole_number(texts, "seed"), Status(status)


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
    reason = one_line(one_text(texts, "reason", default=""), LINE_LENGTH)
    return Reply(client_id, nonce, one_text(texts, "fingerprint", NAME_LENGTH), arrays, info, reason)


# How a site introduces itself: its version, settings, shared variables and prior, but no data -------------------------

_IMPLAUSIBLE = 1e100  # no honest mean, sd or sum is as large, and its square would overflow
_VARIABLES = 1_000  # and as many deterministics, dims and settings
_COORDINATES = 10**7  # of shared networks; 16 bytes each in an introduction


class Terms(NamedTuple):
    """What two sides must have in common, checked before any array is read."""

    client_id: str
    version: str
    settings: Mapping[str, str]
    variables: tuple[Variable, ...]


class Hello(NamedTuple):
    """A site's introduction. It holds no data."""

    client_id: str
    version: str
    settings: Mapping[str, str]
    layout: Layout
    coords: Mapping[str, Sequence[Any]]

    @property
    def terms(self) -> Terms:
        """The part that holds no arrays."""
        return Terms(self.client_id, self.version, self.settings, self.layout.variables)


def pack_hello(
    client_id: str, version: str, settings: Mapping[str, str], layout: Layout, reader: SharedReader
) -> Parcel:
    """Write a site's introduction."""
    precision = layout.prior.precision
    arrays = {
        "prior_linear": layout.prior.linear,
        "prior_precision": precision if precision.ndim == 1 else gaussian.pack_triangle(precision),
        "prior_density": np.array(layout.density),
    }
    texts = {
        "client_id": client_id,
        "version": version,
        "settings": json.dumps(dict(settings)),
        "variables": json.dumps([tuple(variable) for variable in layout.variables]),
        "prior_is_gaussian": json.dumps(layout.prior_is_gaussian),
        "fingerprint": layout.fingerprint,
        "coords": json.dumps(labels(reader.coords)),
    }
    return arrays, texts


def labels(coords: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Labels of dims as JSON can hold them."""
    return {name: [_plain(value) for value in values] for name, values in coords.items()}


def _plain(value: Any) -> Any:
    scalar = value.item() if isinstance(value, np.generic) else value
    return scalar if isinstance(scalar, str | int | float) else str(scalar)


def unpack_terms(texts: Mapping[str, str]) -> Terms:
    """Read the part of an introduction that holds no arrays."""
    with reading("'variables'"):
        rows = parsed(texts, "variables")
        require(type(rows) is list and 0 < len(rows) <= _VARIABLES, f"'variables' is no list of 1 to {_VARIABLES}")
        variables = tuple(_variable(row) for row in rows)
        names = [variable.name for variable in variables]
        require(len({*names}) == len(names), "'variables' has one name twice")
        size = sum(variable.size for variable in variables)
        require(0 < size <= _COORDINATES, f"'variables' has {size} coordinates, expected {_COORDINATES} at most")
    settings = _mapping(texts, "settings")
    for name, value in settings.items():
        require(type(value) is str and len(value) <= LINE_LENGTH, f"'settings': {name!r} is no line of text")
    client_id, version = (one_text(texts, field, NAME_LENGTH) for field in ("client_id", "version"))
    return Terms(client_id, version, settings, variables)


def unpack_hello(arrays: Message, texts: Mapping[str, str]) -> Hello:
    """Read a site's introduction; its prior must be proper, and its fingerprint that of its variables and prior."""
    client_id, version, settings, variables = unpack_terms(texts)
    is_gaussian = parsed(texts, "prior_is_gaussian")
    require(type(is_gaussian) is bool, "'prior_is_gaussian' is neither true nor false")
    prior, density = _prior(arrays, sum(variable.size for variable in variables))
    digest = one_text(texts, "fingerprint", NAME_LENGTH)
    with reading("'fingerprint'"):
        expected = fingerprint(variables, prior, is_gaussian, density)
    require(digest == expected, f"'fingerprint' is {brief(digest)}, but what it says of its model has {expected}")
    coords = _mapping(texts, "coords", LABELS_LENGTH)
    for name, values in coords.items():
        _require_labels(name, values)
    for variable in variables:
        for dim, length in zip(variable.dims or (), variable.shape, strict=False):
            # A simplex has one entry more than free coordinates.
            fits = dim not in coords or len(coords[dim]) - length in (0, 1)
            require(fits, f"'coords' of {dim!r} do not have the length of {variable.name!r}, {length}")
    return Hello(client_id, version, settings, Layout(variables, prior, is_gaussian, expected, density), coords)


def _mapping(texts: Mapping[str, str], field: str, *longest: int) -> dict[str, Any]:
    mapping = parsed(texts, field, *longest)
    require(
        type(mapping) is dict and len(mapping) <= _VARIABLES, f"{field!r} is no mapping of {_VARIABLES} names at most"
    )
    return {checked_name(name, f"a name in {field!r}"): value for name, value in mapping.items()}


def _variable(row: Any) -> Variable:
    require(type(row) is list and len(row) == len(Variable._fields), "'variables' holds no variable")
    name, shape, transform, dims, binary = row
    field = "a name in 'variables'"
    field = f"'variables' {checked_name(name, field)!r}"
    lengths = type(shape) is list and len(shape) <= 8 and all(type(n) is int and 0 <= n <= _COORDINATES for n in shape)
    require(lengths, f"{field} has shape {brief(shape)}, expected lengths")
    require(type(transform) is str and transform.isprintable(), f"{field} has no transform")
    require(len(transform) <= NAME_LENGTH and type(binary) is bool, f"{field} has no transform, or no kind")
    dims_of = _dims(dims, f"{field} in 'dims'")
    require(dims_of is None or len(dims_of) == len(shape), f"{field} has dims {brief(dims)} and shape {brief(shape)}")
    return Variable(name, tuple(shape), transform, dims_of, binary)  # type: ignore[arg-type]


def _dims(names: Any, field: str) -> tuple[str | None, ...] | None:
    if names is None:
        return None
    require(type(names) is list and len(names) <= 8, f"{field} is {brief(names)}, expected names of dims")
    return tuple(None if name is None else checked_name(name, field) for name in names)


def _require_labels(dim: str, values: Any) -> None:
    require(dim not in ("chain", "draw"), f"'coords' has the dim {dim!r}, which draws have")
    require(type(values) is list, f"'coords' of {dim!r} is of type {type(values).__name__}, expected labels")
    for value in values:
        kind = type(value)
        require(kind in (str, int, float, bool), f"'coords' of {dim!r} has a label of type {kind.__name__}")
        require(kind is not str or _writable(value), f"'coords' of {dim!r} has a label that cannot be written")
        require(kind is not int or abs(value) < 2**63, f"'coords' of {dim!r} has an integer of more than 63 bits")


def _writable(value: str) -> bool:
    return len(value) <= LINE_LENGTH and not any("\ud800" <= c <= "\udfff" or c == "\0" for c in value)


def _prior(arrays: Message, size: int) -> tuple[Gaussian, tuple[float, ...]]:
    """Read the shared prior and its probed densities; the precision must be positive definite."""
    names = ("prior_linear", "prior_precision", "prior_density")
    require(set(arrays) == {*names}, f"it holds {[brief(name) for name in sorted(arrays)[:8]]}, expected {list(names)}")
    for name in names:
        kind, shape = arrays[name].dtype, arrays[name].shape
        require(kind == np.float64 and len(shape) == 1, f"{name!r} is of type {kind} and shape {shape}, not a vector")
    linear, precision, density = (arrays[name] for name in names)
    require(len(linear) == size, f"'prior_linear' has length {len(linear)}, its variables {size} coordinates")
    expected = size * (size + 1) // 2 if size <= DENSE else size  # a triangle, or by coordinate
    require(len(precision) == expected, f"'prior_precision' has length {len(precision)}, expected {expected}")
    require(len(density) == 2 * PROBES and not np.isnan(density).any(), f"'prior_density' is not {2 * PROBES} numbers")
    with reading("'prior_precision'"):
        for name, value in (("prior_linear", linear), ("prior_precision", precision)):
            require(bool(np.isfinite(value).all()), f"{name!r} is not all finite")
        prior = Gaussian(linear, gaussian.unpack_triangle(precision) if size <= DENSE else precision)
        require(bool(gaussian.is_proper(prior)), "'prior_precision' is not positive definite")
        mean, sd = gaussian.mean(prior), gaussian.standard_deviations(prior)
        plausible = np.all(np.abs(mean) < _IMPLAUSIBLE) and np.all((sd > 1 / _IMPLAUSIBLE) & (sd < _IMPLAUSIBLE))
        require(bool(plausible), f"'prior_linear' and 'prior_precision' have means or sds beyond {_IMPLAUSIBLE:g}")
    return prior, tuple(float(value) for value in density)


# Before a run by a formula: a site's summary of its columns, and the agreement of all. As JSON ------------------------

_LEVELS = 1_000  # of one column
_COLUMNS = 1_000
_ROUNDING = 1e-9  # relative, of sums that are added in another order
_ROWS = 2**53


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
    require(type(given) is list and len(given) == len(Told._fields), f"{field} is no list of {len(Told._fields)}")
    rows, total, squares, levels, withheld, text = given
    kinds = type(levels) is dict and type(withheld) is bool and type(text) is bool
    require(kinds, f"{field} has no levels, or no kind")
    for what, count in {"rows": rows, **{brief(level): n for level, n in levels.items()}}.items():
        require(type(count) is int and 0 <= count < _ROWS, f"{field} has {brief(count)} for {what!r}, no count")
    for what, number in {"total": total, "squares": squares}.items():
        _require_number(number, f"{field}, {what!r}")
    _require_levels(list(levels), field)
    if text:
        require(sum(levels.values()) <= rows, f"{field} has levels of {sum(levels.values())} rows, and {rows} rows")
        require(not total and not squares, f"{field} has levels, and sums too")
    else:
        require(not levels, f"{field} has numbers, and levels too")
        idle = not rows or withheld
        require(not idle or (not total and not squares), f"{field} has sums of rows that it does not tell")
        possible = idle or total**2 / rows <= squares * (1 + _ROUNDING)
        require(bool(possible), f"{field} has a sum of squares that is less than its sum allows")
    return Told(rows, float(total), float(squares), dict(levels), withheld, text)


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
    rows, others, columns = parts["rows"], parts["others"], parts["columns"]
    require(type(rows) is int and 0 <= rows < _ROWS, f"'rows' is {brief(rows)}, no count")
    require(type(others) is bool, "'others' is neither true nor false")
    _require_names(columns, names, "columns")
    return Agreement({name: _column(columns[name], f"column {name!r}") for name in names}, rows, others)


def _column(given: Any, field: str) -> Column:
    require(type(given) is list and len(given) == len(Column._fields), f"{field} is no list of {len(Column._fields)}")
    levels, shares, mean, sd = given
    require(type(levels) is list and type(shares) is list, f"{field} has no levels, or no shares")
    _require_levels(levels, field)
    require(len(levels) != 1 and len(shares) == len(levels), f"{field} has {len(levels)} levels, {len(shares)} shares")
    for number in (*shares, mean, sd):
        _require_number(number, field)
    require(sd > 0 and sd**2 > 0, f"{field} has the sd {brief(sd)}, expected one above 0")
    parts = all(0 <= share <= 1 for share in shares) and (not shares or math.isclose(sum(shares), 1, abs_tol=1e-6))
    require(parts, f"{field} has shares that are no parts of 1")
    return Column(tuple(levels), tuple(map(float, shares)), float(mean), float(sd))


def digest(agreement: Agreement) -> str:
    """A digest of an agreement."""
    return hashlib.sha256(pack_agreement(agreement).encode()).hexdigest()[:32]


def _require_names(mapping: Any, names: Sequence[str], field: str) -> None:
    require(type(mapping) is dict and len(mapping) <= _COLUMNS, f"{field!r} is no mapping of {_COLUMNS} names at most")
    if set(mapping) != set(names):
        shown = [brief(name) for name in sorted(mapping)[:8]]
        raise Malformed(f"{field!r} is of {shown}, expected {sorted(names)[:8]}")


def _require_levels(levels: Sequence[Any], field: str) -> None:
    require(len(levels) <= _LEVELS, f"{field} has {len(levels)} levels, expected {_LEVELS} at most")
    for level in levels:
        checked_name(level, f"a level of {field}", NAME_LENGTH)
    require(len(set(levels)) == len(levels), f"{field} has one level twice")


def _require_number(number: Any, field: str) -> None:
    plausible = type(number) in (int, float) and abs(number) < _IMPLAUSIBLE
    require(plausible, f"{field} has {brief(number)}, expected a number below {_IMPLAUSIBLE:g}")
