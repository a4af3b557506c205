"""Checks of clients' data: by themselves, against the model, and of clients with each other. Errors name the remedy."""

from __future__ import annotations

import difflib
import hashlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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

_EXACT = 2**53  # a float holds all whole numbers up to here
_INTEGERS = 2.0**31  # PyMC keeps integers in 32 bits, and truncates larger ones silently


def as_arrays(client_id: str, data: Any) -> dict[str, Any]:
    """Convert one client's data to numeric arrays without missing values; refuse other data."""
    if not isinstance(data, Mapping):
        raise DataError(
            f'client {client_id!r}: data are {type(data).__name__}; pass a mapping from name to array, {{"X": ...}}.'
        )
    if not data:
        raise DataError(f"client {client_id!r}: no data; leave the client out or give it its arrays.")
    arrays = {}
    for name, value in data.items():
        if not isinstance(name, str):
            raise DataError(f"client {client_id!r}: the name {name!r} is not a text; pass {str(name)!r}.")
        what = f"client {client_id!r}: {name!r}"
        if np.ma.is_masked(value):
            raise DataError(f"{what} has masked values; drop or impute them before the fit.")
        try:
            array = np.array(value)  # a copy: later rounds must see the data of the first
        except (ValueError, TypeError, RuntimeError) as error:  # torch's are RuntimeErrors
            remedy = "give rows of one length" if isinstance(error, ValueError) else "pass an array of NumPy"
            raise DataError(f"{what} is no array: {error}; {remedy}.") from error
        if array.dtype.kind not in "biufc":
            dtype = f"is a {type(value).__name__} of dtype" if array.dtype == object else "has dtype"
            raise DataError(
                f"{what} {dtype} {array.dtype}, which is not numeric; encode it as numbers in an array, "
                "by one code at all sites."
            )
        if array.dtype.kind == "c":
            raise DataError(f"{what} has dtype {array.dtype}, and data must be real; pass two arrays, of its parts.")
        if array.size == 0:
            raise DataError(f"{what} has shape {array.shape}, that is zero rows; leave the client out.")
        if array.dtype.kind == "f":
            refuse(np.isnan(array), what, array, "; drop or impute missing values before the fit")
        elif array.dtype.kind in "iu":
            rule = ", and whole numbers are exact up to 2**53; use larger units, or number identifiers from 0"
            refuse((array > _EXACT) | (array < -_EXACT), what, array, rule)
        arrays[name] = array
    return arrays


def refuse(wrong: Any, what: str, values: Any, rule: str) -> None:
    """Refuse the first entry that breaks a rule."""
    if np.any(wrong):
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise DataError(f"{what} holds {values[where]} at index {where}{rule}.")


def needs_same_keys(clients: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse clients whose data have other names than most."""
    count: defaultdict[tuple[str, ...], int] = defaultdict(int)
    for arrays in clients.values():
        count[tuple(sorted(arrays))] += 1
    usual = max(count, key=lambda keys: count[keys])
    for client_id, arrays in clients.items():
        if tuple(sorted(arrays)) != usual:
            raise DataError(
                f"client {client_id!r}: data keys {sorted(arrays)} differ from the other clients' {list(usual)}; "
                "rename or complete this client's data."
            )


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
    if reals == dtypes or any(dtype.kind == "c" for dtype in dtypes):
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
    what = f"new inputs {name!r}"
    if np.ma.is_masked(value):
        raise DataError(f"{what} have masked values; drop or impute them.")
    try:
        new = np.asarray(value)
    except ValueError as error:
        raise DataError(f"{what} are no array: {error}; give rows of one length.") from error
    if new.dtype.kind not in "biuf":
        raise DataError(f"{what} have dtype {new.dtype}; pass real numbers.")
    if new.ndim != len(shape) or new.shape[1:] != shape[1:] or not new.size:
        raise DataError(
            f"{what} have shape {new.shape}, the client's have {shape}; give them at least one row and the same "
            "columns."
        )
    if not np.all(np.isfinite(new)):
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(new))[0])
        raise DataError(
            f"{what} hold missing or infinite values, {new[where]} at index {where} first; drop or impute them."
        )
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
    indices = _expressions([graph.logp], data, {graph.x})
    of_deterministics = _expressions(
        parts.model.deterministics, {v: v.name for v in parts.data}, set(parts.model.basic_RVs)
    )
    replace = dict(zip(parts.data, graph.inputs, strict=False))
    indices |= (
        dict(zip(clone_replace(list(of_deterministics), replace), of_deterministics.values(), strict=True))
        if of_deterministics
        else {}
    )
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


def require_not_negative(client_id: str, indices: Indices, arrays: Mapping[str, Any], inputs: Sequence[Any]) -> None:
    """Refuse data that index from the end."""
    if not indices.names:
        return
    for names, value in zip(indices.names, indices.values(*inputs), strict=True):
        index = np.asarray(value)
        if not np.any(index < 0):
            continue
        where = tuple(int(i) for i in np.argwhere(index < 0)[0])
        same = [name for name in names or arrays if np.array_equal(arrays[name], index)]
        if same:
            what = f"{same[0]!r} holds {index[where]} at index {where}, and the model takes it for an index"
        elif names:
            what = f"the model computes the index {index[where]} from {', '.join(map(repr, names))}, at {where}"
        else:
            continue  # the model's own constant
        raise DataError(
            f"client {client_id!r}: {what}, and a negative index counts from the end. Number groups 0 to n - 1; where "
            "it stands for no group, index by pt.maximum(index, 0) and mask those rows."
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


def require_arguments(client_id: str, builder: Callable[..., Any], arrays: Mapping[str, Any]) -> None:
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
        raise DeclarationError(
            f"{call} takes {positional} by position only, and data are passed by name; remove the / from its arguments."
        )
    if not unknown and not missing:
        return
    problems, remedies = [], []
    if unknown:
        lower = {name.casefold(): name for name in missing}
        close = {name: difflib.get_close_matches(name.casefold(), lower, n=1) for name in unknown}
        problems.append(f"has no argument for {_quoted(unknown)} of its data")
        spelt = [f"rename {name!r} to {lower[matches[0]]!r}" for name, matches in close.items() if matches]
        remedies.append(
            "; ".join(spelt) or f"drop {_quoted(unknown)} from the data, or add it to the builder's arguments"
        )
    if missing:
        problems.append(f"needs {_quoted(missing)}, which its data {sorted(arrays)} lack")
        if not any(repr(name) in remedy for name in missing for remedy in remedies):
            remedies.append(f"add {_quoted(missing)} to the data, or give the arguments defaults")
    raise DataError(f"client {client_id!r}: {call} {' and '.join(problems)}; {'; '.join(remedies)}.")


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def containers(client_id: str, parts: _graph.Parts, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
    """A client's arrays in the order and the types of the model's containers."""
    ordered = []
    observed = _graph.observed_through(parts)
    for container in parts.data:
        value, what = np.asarray(arrays[container.name]), f"client {client_id!r}: {container.name!r}"
        if (rv := observed.get(container)) is not None:  # bounds and inputs need not be finite
            rule = f", and {rv.name!r}, which is observed there, must be finite; drop or correct such values"
            refuse(~np.isfinite(value), what, value, rule)
        if value.ndim != container.type.ndim:
            raise DataError(
                f"{what} has {value.ndim} dimensions {value.shape}, the container {container.type.ndim}; reshape it."
            )
        ordered.append(np.asarray(held_exactly(what, value, container.type.dtype), order="C"))
    return tuple(ordered)


def held_exactly(what: str, value: Any, dtype: str) -> Any:
    """Cast values to a container's type; refuse if that changes a value."""
    with np.errstate(invalid="ignore"):
        cast = value.astype(dtype)
    rule = (
        f", which the container's type, {dtype}, cannot hold exactly. The type comes from the builder and its first "
        "data; give numbers of that type, or one type at all clients"
    )
    refuse(cast != value, what, value, rule)
    return cast


def mismatch(client_id: str, arrays: Mapping[str, Any], error: Exception, apart: str = "") -> DataError:
    """Error of a model that cannot be evaluated on a client's data, with the shapes and a remedy.

    `apart` says which outcomes differ in shape from their distribution, where that is known.
    """
    shapes = {name: np.shape(value) for name, value in arrays.items()}
    message = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    remedy = "Give this client the same columns as the others, one row of each array per observation."
    if type(error).__name__ == "ParameterValueError":
        remedy = "A distribution's parameter leaves its domain on these data: look at sign and size of what it reads."
    elif isinstance(error, IndexError):
        remedy = "An integer of its data points outside an array of the model: number groups 0 to n - 1."
        if "boolean" in message:
            remedy = "True and False select entries: for an index give integers, for a mask one entry for each of them."
    rows = {name: len(value) for name, value in arrays.items() if np.ndim(value)}
    if len(set(rows.values())) > 1:
        remedy = (
            f"Its arrays have different numbers of rows, {rows}: give one row of each array per observation, or look "
            "at what indexes them."
        )
    elif apart:
        message, remedy = apart, "Give one outcome for each of these, or declare a distribution of that shape."
    return DataError(
        f"client {client_id!r}: the model cannot be evaluated on data of shapes {shapes}: {message}. {remedy}"
    )


def require_same_variables(
    reference_id: str,
    reference: tuple[Variable, ...],
    client_id: str,
    variables: tuple[Variable, ...],
    arrays: Mapping[str, Any],
) -> None:
    """Refuse a client whose shared variables differ in shape, transform or dims."""
    for known, variable in zip(reference, variables, strict=True):
        if known != variable:
            field = next(f for f in known._fields if getattr(known, f) != getattr(variable, f))
            shapes = {name: np.shape(value) for name, value in arrays.items()}
            raise DataError(
                f"client {client_id!r}: shared variable {known.name!r} has {field} {getattr(variable, field)}, but "
                f"{getattr(known, field)} at client {reference_id!r}. This client's data have shapes {shapes}: give it "
                f"the same columns as the others, or make {known.name!r} local."
            )


def ignored_data(client_id: str, builder: Any, parts: _graph.Parts, names: Iterable[str]) -> DeclarationError:
    """Error of a model whose observed variables do not depend on the data."""
    free = [rv.name for rv in parts.local if any(v in parts.data for v in ancestors([rv]))]
    hint = f" {_quoted(free)} has no observed=, and is a local variable." if free else ""
    return DeclarationError(
        f"client {client_id!r}: the builder {builder_name(builder)} makes no use of its data: none of {_quoted(names)} "
        f"reaches what is observed ({_quoted(rv.name for rv in parts.model.observed_RVs)}).{hint} Pass the data on, "
        "with observed=y for example."
    )


def other_prior(reference_id: str, client_id: str) -> DeclarationError:
    """Error of two clients' builds that differ in the shared prior."""
    return DeclarationError(
        f"client {client_id!r}: the shared prior differs from the one at client {reference_id!r}; it depends on client "
        "data or on random numbers. Use the same constants at all clients, and make random starting values, such as a "
        "network's, outside of the builder."
    )


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
