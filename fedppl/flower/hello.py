"""How a site introduces itself: what it runs and what is shared, never what it holds. NumPy only.

What is read raises `Malformed` and nothing else, whatever was sent; its text names the field and the rule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts import SharedReader
from fedppl.flower.decode import LABELS_LENGTH, LINE_LENGTH, NAME_LENGTH, brief, parsed, reading, require
from fedppl.flower.decode import name as checked_name
from fedppl.flower.decode import text as one_text
from fedppl.flower.wire import Parcel
from fedppl.gaussian import Gaussian
from fedppl.model.fingerprint import PROBES, fingerprint
from fedppl.numerics.prior import DENSE
from fedppl.types import Layout, Message, Variable

# Of the shared prior's means and sds: nobody declares others, and their squares overflow.
_IMPLAUSIBLE = 1e100
_VARIABLES = 1_000  # and as many deterministics, dims and settings
_COORDINATES = 10**7  # of shared networks; 16 bytes each in an introduction


class Terms(NamedTuple):
    """What two sides have to run alike, before any array is looked at; no variables where nothing is known of them."""

    client_id: str
    version: str
    settings: Mapping[str, str]
    variables: tuple[Variable, ...] | None


class Hello(NamedTuple):
    """How a site introduces itself: what it runs, never what it holds."""

    client_id: str
    version: str
    settings: Mapping[str, str]
    layout: Layout
    dims: Mapping[str, tuple[str | None, ...] | None]
    coords: Mapping[str, Sequence[Any]]

    @property
    def terms(self) -> Terms:
        """What it runs."""
        return Terms(self.client_id, self.version, self.settings, self.layout.variables)


def pack_hello(
    client_id: str, version: str, settings: Mapping[str, str], layout: Layout, reader: SharedReader
) -> Parcel:
    """Describe a site's shared parameters."""
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
        "dims": json.dumps(dict(reader.dims)),
        "coords": json.dumps(labels(reader.coords)),
    }
    return arrays, texts


def labels(coords: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Coordinates' labels as JSON can hold them."""
    return {name: [_plain(value) for value in values] for name, values in coords.items()}


def _plain(value: Any) -> Any:
    own = value.item() if isinstance(value, np.generic) else value
    return own if isinstance(own, str | int | float) else str(own)


def unpack_terms(texts: Mapping[str, str]) -> Terms:
    """Read what a site runs."""
    with reading("'variables'"):
        told = parsed(texts, "variables")
        require(type(told) is list and 0 < len(told) <= _VARIABLES, f"'variables' is no list of 1 to {_VARIABLES}")
        variables = tuple(_variable(one) for one in told)
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
    """Read a site's introduction; its prior is one, and its fingerprint is that of what it says."""
    client_id, version, settings, told = unpack_terms(texts)
    variables = told or ()
    is_gaussian = parsed(texts, "prior_is_gaussian")
    require(type(is_gaussian) is bool, "'prior_is_gaussian' is neither true nor false")
    prior, density = _prior(arrays, sum(variable.size for variable in variables))
    own = one_text(texts, "fingerprint", NAME_LENGTH)
    with reading("'fingerprint'"):
        found = fingerprint(variables, prior, is_gaussian, density)
    require(own == found, f"'fingerprint' is {brief(own)}, but what it says of its model has {found}")
    coords = _mapping(texts, "coords", LABELS_LENGTH)
    for name, values in coords.items():
        _require_labels(name, values)
    for variable in variables:
        for dim, length in zip(variable.dims or (), variable.shape, strict=False):
            # A simplex has one entry more than free coordinates.
            fits = dim not in coords or len(coords[dim]) - length in (0, 1)
            require(fits, f"'coords' of {dim!r} do not have the length of {variable.name!r}, {length}")
    dims = {name: _dims(value, f"'dims' of {name!r}") for name, value in _mapping(texts, "dims").items()}
    return Hello(client_id, version, settings, Layout(variables, prior, is_gaussian, found, density), dims, coords)


def _mapping(texts: Mapping[str, str], field: str, *longest: int) -> dict[str, Any]:
    told = parsed(texts, field, *longest)
    require(type(told) is dict and len(told) <= _VARIABLES, f"{field!r} is no mapping of {_VARIABLES} names at most")
    return {checked_name(name, f"a name in {field!r}"): value for name, value in told.items()}


def _variable(told: Any) -> Variable:
    require(type(told) is list and len(told) == len(Variable._fields), "'variables' holds no variable")
    name, shape, transform, dims, binary = told
    field = "a name in 'variables'"
    field = f"'variables' {checked_name(name, field)!r}"
    lengths = type(shape) is list and len(shape) <= 8 and all(type(n) is int and 0 <= n <= _COORDINATES for n in shape)
    require(lengths, f"{field} has shape {brief(shape)}, expected lengths")
    require(type(transform) is str and transform.isprintable(), f"{field} has no transform")
    require(len(transform) <= NAME_LENGTH and type(binary) is bool, f"{field} has no transform, or no kind")
    along = _dims(dims, f"{field} in 'dims'")
    require(along is None or len(along) == len(shape), f"{field} has dims {brief(dims)} and shape {brief(shape)}")
    return Variable(name, tuple(shape), transform, along, binary)  # type: ignore[arg-type]


def _dims(told: Any, field: str) -> tuple[str | None, ...] | None:
    if told is None:
        return None
    require(type(told) is list and len(told) <= 8, f"{field} is {brief(told)}, expected names of dims")
    return tuple(None if one is None else checked_name(one, field) for one in told)


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
    """The shared prior: symmetric, positive definite, and of numbers that can be computed with."""
    names = ("prior_linear", "prior_precision", "prior_density")
    require(set(arrays) == {*names}, f"it holds {[brief(name) for name in sorted(arrays)[:8]]}, expected {list(names)}")
    for name in names:
        kind, shape = arrays[name].dtype, arrays[name].shape
        require(kind == np.float64 and len(shape) == 1, f"{name!r} is of type {kind} and shape {shape}, not a vector")
    linear, precision, density = (arrays[name] for name in names)
    require(len(linear) == size, f"'prior_linear' has length {len(linear)}, its variables {size} coordinates")
    expected = size * (size + 1) // 2 if size <= DENSE else size  # a triangle, or by coordinate
    require(len(precision) == expected, f"'prior_precision' has length {len(precision)}, expected {expected}")
    require(len(density) == PROBES and not np.isnan(density).any(), f"'prior_density' is not {PROBES} numbers")
    with reading("'prior_precision'"):
        for name, value in (("prior_linear", linear), ("prior_precision", precision)):
            require(bool(np.isfinite(value).all()), f"{name!r} is not all finite")
        prior = Gaussian(linear, gaussian.unpack_triangle(precision) if size <= DENSE else precision)
        require(bool(gaussian.is_proper(prior)), "'prior_precision' is not positive definite")
        mean, sd = gaussian.mean(prior), gaussian.standard_deviations(prior)
        sober = np.all(np.abs(mean) < _IMPLAUSIBLE) and np.all((sd > 1 / _IMPLAUSIBLE) & (sd < _IMPLAUSIBLE))
        require(bool(sober), f"'prior_linear' and 'prior_precision' have means or sds beyond {_IMPLAUSIBLE:g}")
    return prior, tuple(float(value) for value in density)
