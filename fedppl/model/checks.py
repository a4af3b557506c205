"""Checks of clients' data: by themselves, against the model, and of clients with each other. Errors name the remedy."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Constant
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors

from fedppl import gaussian
from fedppl.gaussian import Gaussian
from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.types import Array, DataError, DeclarationError, Variable

# What PyTensor and PyMC raise where shapes or types of data do not fit a model
UNFIT = (ValueError, TypeError, IndexError, AssertionError)
_EXACT = 2**53  # a float holds all whole numbers up to here
_INTEGERS = 2.0**31  # PyMC keeps integers in 32 bits, and truncates larger ones silently


@contextlib.contextmanager
def naming(client_id: str) -> Iterator[None]:
    """Name a client in errors of its data and its declaration, unless they name one."""
    try:
        yield
    except (DataError, DeclarationError) as error:
        if str(error).startswith(("client '", 'client "')):
            raise
        kind = DataError if isinstance(error, DataError) else DeclarationError  # not a class of the builder's own
        raise kind(f"client {client_id!r}: {error}") from error


def as_arrays(client_id: str, data: Any) -> dict[str, Any]:
    """Convert one client's data to numeric arrays without missing values; refuse other data."""
    with naming(client_id):
        if not isinstance(data, Mapping):
            raise DataError(f'data are {type(data).__name__}; pass a mapping from name to array, {{"X": ...}}.')
        if not data:
            raise DataError("no data; leave the client out or give it its arrays.")
        if odd := [name for name in data if not isinstance(name, str)]:
            raise DataError(f"the name {odd[0]!r} is not a text; pass {str(odd[0])!r}.")
        return {name: _client_array(name, value) for name, value in data.items()}


def _client_array(name: str, value: Any) -> Any:
    array, what = _real(repr(name), value), repr(name)
    if array.size == 0:
        raise DataError(f"{what} has shape {array.shape}, that is zero rows; leave the client out.")
    if array.dtype.kind == "f":
        refuse(np.isnan(array), what, array, "; drop or impute missing values before the fit")
    elif array.dtype.kind in "iu":
        rule = ", and whole numbers are exact up to 2**53; use larger units, or number identifiers from 0"
        refuse((array > _EXACT) | (array < -_EXACT), what, array, rule)
    return array


def _real(what: str, value: Any) -> Any:
    """A copy of values as a real array, so that later rounds see the data of the first."""
    if np.ma.is_masked(value):
        raise DataError(f"{what} has masked values; drop or impute them before the fit.")
    try:
        array = np.array(value)
    except (ValueError, TypeError, RuntimeError) as error:  # torch's are RuntimeErrors
        raise DataError(f"{what} is no array: {error}; pass an array of NumPy, with rows of one length.") from error
    if array.dtype.kind not in "biuf":
        dtype = f"{array.dtype} (a {type(value).__name__})"
        raise DataError(
            f"{what} has dtype {dtype}, which is not numeric and real; encode it as an array of numbers, one code at "
            "all clients."
        )
    return array


def place_of(wrong: Any) -> tuple[int, ...]:
    """Index of the first entry that is true."""
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def refuse(wrong: Any, what: str, values: Any, rule: str) -> None:
    """Refuse the first entry that breaks a rule."""
    if np.any(wrong):
        where = place_of(wrong)
        raise DataError(f"{what} holds {values[where]} at index {where}{rule}.")


def needs_same_keys(clients: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse clients whose data have other names than most."""
    keys = {client_id: sorted(arrays) for client_id, arrays in clients.items()}
    usual = list(Counter(map(tuple, keys.values())).most_common(1)[0][0])
    for client_id in keys:
        if keys[client_id] != usual:
            what = f"client {client_id!r}: data keys {keys[client_id]}"
            raise DataError(f"{what} differ from other clients' {usual}; rename or complete them.")


def group_by_columns(clients: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Group client ids by all but the leading axis of their arrays, the largest group first."""
    groups: defaultdict[tuple[tuple[str, int, tuple[int, ...]], ...], list[str]] = defaultdict(list)
    for client_id, arrays in clients.items():
        key = tuple((name, array.ndim, array.shape[1:]) for name, array in sorted(arrays.items()))
        groups[key].append(client_id)
    return sorted(groups.values(), key=len, reverse=True)


def one_type(clients: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Give each name one type at all clients that holds all values exactly.

    Integers at one client and reals at another become integers where all values are whole: an index must stay an
    integer, and a column that had missing values is a column of reals. Integers of more than 32 bits become reals.
    """
    changed = {client_id: dict(arrays) for client_id, arrays in clients.items()}
    for name in next(iter(clients.values())):
        dtypes = {arrays[name].dtype for arrays in clients.values()}
        dtype = _common(dtypes, [arrays[name] for arrays in clients.values()])
        if dtypes == {dtype}:
            continue
        for arrays in changed.values():
            arrays[name] = arrays[name].astype(dtype)
    return changed


def _common(dtypes: set[Any], arrays: list[Any]) -> Any:
    reals = {dtype for dtype in dtypes if dtype.kind == "f"}
    if reals == dtypes:
        return np.result_type(*dtypes)
    if not all(np.all(fits_integers(a)) for a in arrays if a.dtype.kind != "b"):
        return np.dtype(np.float64)
    if len(dtypes) == 1:
        return next(iter(dtypes))
    if dtypes - reals == {np.dtype(bool)} and all(np.all((a == 0) | (a == 1)) for a in arrays):
        return np.dtype(bool)
    integers = np.result_type(*(dtypes - reals))
    return np.dtype(np.int64) if reals or integers.kind != "i" else integers


def fits_integers(array: Any) -> Any:
    """Which entries are whole numbers of at most 32 bits."""
    whole = array == np.floor(array) if array.dtype.kind == "f" else True
    return whole & (array >= -_INTEGERS) & (array < _INTEGERS)


# Checks of new inputs for predictions, one rule for all families ------------------------------------------------------


def new_inputs(
    inputs: Any, dtypes: Mapping[str, str], held: Mapping[str, Any], unread: Collection[str] = ()
) -> dict[str, Any]:
    """New inputs by name, in the types of the model's containers; refuse inputs that do not fit.

    `dtypes` are of the containers that predictions read. New inputs have the columns of the client's arrays `held`, and
    may have `unread` ones, such as the outcome.
    """
    if not isinstance(inputs, Mapping):
        raise DataError(f'new inputs are {type(inputs).__name__}; pass a mapping from name to array: {{"X": ...}}.')
    if set(inputs) - set(unread) != set(dtypes):
        names = sorted(map(str, inputs))
        raise DataError(f"new inputs {names} must be {sorted(dtypes)}, the containers that predictions are made from.")
    return {name: _new_input(name, inputs[name], dtype, np.shape(held[name])) for name, dtype in dtypes.items()}


def _new_input(name: str, value: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Check one input: real, finite, not masked, one row or more, and the client's columns."""
    what = f"new input {name!r}"
    new = _real(what, value)
    if new.ndim != len(shape) or new.shape[1:] != shape[1:] or not new.size:
        raise DataError(f"{what} has shape {new.shape}, the client's {shape}; give a row or more of the same columns.")
    refuse(~np.isfinite(new), what, new, "; drop or impute missing or infinite values")
    return held_exactly(what, new, dtype) if np.dtype(dtype).kind in "biu" else new.astype(dtype)


# Indices that a model computes from data: a negative one counts from the end and raises no error ----------------------


class Indices(NamedTuple):
    """Index expressions: the containers that each is computed from, and their values as a function of the inputs.

    A constant array has no container: it is the model's own, or a client's array that the builder put into the graph.
    """

    names: tuple[tuple[str, ...], ...]
    values: Callable[..., Sequence[Any]]


def site_indices(graph: _graph.SiteGraph, parts: _graph.Parts) -> Indices:
    """Indices in log p(y, θ | φ) and in deterministics, as a function of the graph's inputs."""
    data = dict(zip(graph.inputs, (v.name for v in parts.data), strict=False))
    parameters = {rv: rv.type() for rv in parts.model.basic_RVs}
    replace = dict(zip(parts.data, graph.inputs, strict=False))
    deterministics = clone_replace(list(parts.model.deterministics), {**replace, **parameters})
    indices = _expressions([graph.logp, *deterministics], data, {graph.x, *parameters.values()})
    values = interpreted.python_function(graph.inputs, list(indices)) if indices else lambda *inputs: ()
    return Indices(tuple(indices.values()), values)


def read_indices(model: Any) -> Indices:
    """Indices in a PyMC model at its containers' present values; the function has no arguments."""
    read = [*model.basic_RVs, *model.deterministics]
    indices = _expressions(read, {v: v.name for v in model.data_vars}, set(model.basic_RVs))
    return Indices(tuple(indices.values()), interpreted.python_function([], list(indices)))


def _expressions(
    outputs: Iterable[Any], containers: Mapping[Any, str], parameters: set[Any]
) -> dict[Any, tuple[str, ...]]:
    """Indices that depend on no parameter, each with the containers whose values (not only shapes) it reads."""
    indices: dict[Any, tuple[str, ...]] = {}
    for variable in ancestors(list(outputs)):
        node = variable.owner
        if node is None or "Subtensor" not in type(node.op).__name__:
            continue
        for index in _of_entries(node):
            if not getattr(index.type, "dtype", "").startswith("int") or parameters & set(ancestors([index])):
                continue
            read = _graph.values_read([index])
            names = tuple(sorted(containers[v] for v in read if v in containers))
            if names or (isinstance(index, Constant) and np.ndim(index.data) and np.any(index.data < 0)):
                indices[index if hasattr(index.type, "ndim") else pt.tensor_from_scalar(index)] = names
    return indices


def _of_entries(node: Any) -> list[Any]:
    """Inputs of an indexing operation that select entries; bounds of slices may be negative."""
    given = list(node.inputs[2 if "Inc" in type(node.op).__name__ else 1 :])
    entries = []
    for item in getattr(node.op, "idx_list", None) or [None] * len(given):
        taken = sum(part is not None for part in (item.start, item.stop, item.step)) if isinstance(item, slice) else 1
        entries += [] if isinstance(item, slice) else given[:taken]
        given = given[taken:]
    return [*entries, *given]


def require_not_negative(indices: Indices, arrays: Mapping[str, Any], inputs: Sequence[Any]) -> None:
    """Refuse data that index from the end."""
    for names, value in zip(indices.names, indices.values(*inputs), strict=True):
        index = np.asarray(value)
        same = [name for name in names or arrays if np.array_equal(arrays[name], index)]
        if not np.any(index < 0) or not (names or same):  # or it is the model's own constant
            continue
        where = place_of(index < 0)
        what = f"the model computes the index {index[where]} from {quoted(names)}, at {where}"
        if same:
            what = f"{same[0]!r} holds {index[where]} at index {where}"
        raise DataError(
            f"{what}, an index that counts from the end; number groups 0 to n - 1 (pt.maximum(index, 0) for rows of "
            "none)."
        )


# Checks of a client's data against its model, and of clients with each other ------------------------------------------


def builder_name(builder: Any) -> str:
    """Name of a builder for messages: of a function, a partial, or a callable object."""
    inner = getattr(builder, "func", builder)
    return str(getattr(inner, "__name__", type(inner).__name__))


def parameters(builder: Any) -> list[inspect.Parameter] | None:
    """The builder's parameters; None if it has no signature."""
    try:
        return list(inspect.signature(builder).parameters.values())
    except (TypeError, ValueError):
        return None


def argument_names(builder: Callable[..., Any]) -> tuple[str, ...] | None:
    """Names of the builder's arguments in order; None if it takes any name, or has no signature."""
    known = parameters(builder)
    return None if known is None or any(p.kind is p.VAR_KEYWORD for p in known) else tuple(p.name for p in known)


def require_arguments(builder: Callable[..., Any], arrays: Mapping[str, Any]) -> None:
    """Refuse data that do not fit the builder's arguments; a builder without a signature is not checked."""
    if (known := parameters(builder)) is None:
        return
    named = {p.name: p for p in known if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    missing = [name for name, p in named.items() if p.default is p.empty and name not in arrays]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known)
    unknown = [] if takes_any else [name for name in arrays if name not in named]
    positional = [p.name for p in known if p.kind is p.POSITIONAL_ONLY]
    listed = ", ".join(str(p.replace(annotation=p.empty, default=p.empty)) for p in known)
    call = f"the builder {builder_name(builder)}({listed})"
    if positional:
        raise DeclarationError(f"{call} takes {positional} by position alone, and data are named; remove the /.")
    if not unknown and not missing:
        return
    lower = {name.casefold(): name for name in missing}
    close = {name: difflib.get_close_matches(name.casefold(), lower, n=1) for name in unknown}
    spelt = [f"rename {name!r} to {lower[matches[0]]!r}" for name, matches in close.items() if matches]
    problems, remedies = [], spelt
    if unknown:
        problems.append(f"has no argument for {quoted(unknown)} of its data")
        remedies = spelt or [f"drop {quoted(unknown)} from the data, or add it to the builder's arguments"]
    if missing:
        problems.append(f"needs {quoted(missing)}, which its data {sorted(arrays)} lack")
        if not spelt:
            remedies = [*remedies, f"add {quoted(missing)} to the data, or give the arguments defaults"]
    raise DataError(f"{call} {' and '.join(problems)}; {'; '.join(remedies)}.")


def quoted(names: Iterable[str]) -> str:
    """Names in quotes, for messages."""
    return ", ".join(map(repr, names))


def containers(client_id: str, parts: _graph.Parts, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
    """A client's arrays in the order and the types of the model's containers."""
    ordered = []
    observed = _graph.observed_through(parts)
    with naming(client_id):
        for container in parts.data:
            value, what, ndim = np.asarray(arrays[container.name]), repr(container.name), container.type.ndim
            if (rv := observed.get(container)) is not None:  # bounds and inputs need not be finite
                rule = f", and {rv.name!r}, which is observed there, must be finite; drop or correct such values"
                refuse(~np.isfinite(value), what, value, rule)
            if value.ndim != ndim:
                raise DataError(f"{what} has {value.ndim} dimensions {value.shape}, the container {ndim}; reshape it.")
            ordered.append(np.asarray(held_exactly(what, value, container.type.dtype), order="C"))
    return tuple(ordered)


def held_exactly(what: str, value: Any, dtype: str) -> Any:
    """Cast values to a container's type; refuse if that changes a value."""
    with np.errstate(invalid="ignore"):
        cast = value.astype(dtype)
    rule = f", which the container's type {dtype} cannot hold exactly; give one type at all clients"
    refuse(cast != value, what, value, rule)
    return cast


def mismatch(arrays: Mapping[str, Any], error: Exception, apart: str = "") -> DataError:
    """Error of a model that cannot be evaluated on a client's data, with the shapes and a remedy.

    `apart` says which outcomes differ in shape from their distribution, where that is known.
    """
    message = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    remedy = "Give the same columns as the other clients, and one row of each array per observation."
    if type(error).__name__ == "ParameterValueError":
        remedy = "A parameter leaves its domain on these data: look at sign and size of what it reads."
    elif isinstance(error, IndexError):
        remedy = "An index points outside an array of the model: number groups 0 to n - 1."
        if "boolean" in message:
            remedy = "True and False select entries: for an index give integers."
    rows = {name: len(value) for name, value in arrays.items() if np.ndim(value)}
    if len(set(rows.values())) > 1:
        remedy = f"Its arrays have different numbers of rows, {rows}: give one row of each array per observation."
    elif apart:
        message, remedy = apart, "Give one outcome for each of these, or declare a distribution of that shape."
    return DataError(f"the model cannot be evaluated on data of shapes {shapes_of(arrays)}: {message}. {remedy}")


def shapes_of(arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of arrays by name."""
    return {name: np.shape(value) for name, value in arrays.items()}


def require_same_variables(
    reference_id: str, reference: tuple[Variable, ...], variables: tuple[Variable, ...], arrays: Mapping[str, Any]
) -> None:
    """Refuse a client whose shared variables differ in shape, transform or dims from those of a reference."""
    for known, variable in zip(reference, variables, strict=True):
        if known != variable:
            field, here, there = difference(variable, known)
            what = f"shared variable {known.name!r} has {field} {here}, but {there} at client {reference_id!r}"
            remedy = f"give the same columns as the others (here {shapes_of(arrays)})"
            raise DataError(f"{what}; make {known.name!r} local, or {remedy}.")


def difference(a: Variable, b: Variable) -> tuple[str, Any, Any]:
    """The first field in which two variables differ, and its values."""
    return next((field, x, y) for field, x, y in zip(a._fields, a, b, strict=True) if x != y)


# The digest by which sites and server compare declarations; a server computes it from what a site sends ---------------

PROBES = 3  # points at which densities of the shared prior are compared


def probes(variables: Sequence[Variable], prior: Gaussian) -> Array:
    """Points (3, m) about N_0 at which two declarations' prior densities are compared."""
    center, sd = gaussian.mean(prior), gaussian.standard_deviations(prior)
    points: Array = center + sd * np.random.default_rng(0).normal(size=(PROBES, len(center)))
    binary = np.repeat([variable.binary for variable in variables], [variable.size for variable in variables])
    points[:, binary] = points[:, binary] > center[binary]
    return points


def fingerprint(variables: Sequence[Variable], prior: Gaussian, is_gaussian: bool, density: Sequence[Any]) -> str:
    """Digest of the shared variables, N_0, whether that is the prior, and `Layout.density`.

    Numbers are in units of the prior and rounded, so that builds of one model on two machines agree. The digest has 128
    bits, so that nobody can search for another prior with the same one.
    """
    digest = hashlib.sha256()
    for variable in variables:
        digest.update(repr(tuple(variable)).encode())
    digest.update(repr(bool(is_gaussian)).encode())
    center, sd = gaussian.mean(prior), gaussian.standard_deviations(prior)
    scaled = sd[:, None] * prior.precision * sd if prior.precision.ndim == 2 else prior.precision * sd**2
    for numbers in (np.ravel(scaled), center / sd, np.asarray(density, dtype=np.float64)):
        with np.errstate(over="ignore", invalid="ignore"):  # an implausible density
            digest.update((np.round(numbers, 5) + 0.0).astype("<f8").tobytes())
    mantissa, exponent = np.frexp(sd)
    digest.update(np.ldexp(np.round(mantissa, 6), exponent).astype("<f8").tobytes())
    return digest.hexdigest()[:32]
