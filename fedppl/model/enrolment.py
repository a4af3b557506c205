"""Checks of a client's data against its model, and of clients with each other. Each error names client and remedy."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from pytensor.graph.traversal import ancestors

from fedppl.model import graph as _graph
from fedppl.types import DataError, DeclarationError, Variable


def builder_name(builder: Any) -> str:
    """What a reader would call a builder: a function, a partial of one, or an object that is called."""
    inner = getattr(builder, "func", builder)
    return str(getattr(inner, "__name__", type(inner).__name__))


def argument_names(builder: Callable[..., Any]) -> tuple[str, ...] | None:
    """Names of the builder's arguments, in order; None where it takes any, or cannot be read."""
    try:
        parameters = inspect.signature(builder).parameters.values()
    except (TypeError, ValueError):
        return None
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else tuple(p.name for p in parameters)


def require_arguments(client_id: str, builder: Callable[..., Any], arrays: Mapping[str, Any]) -> None:
    """Refuse data that the builder's arguments do not fit, before it is called; what cannot be read is called."""
    try:
        signature = inspect.signature(builder)
    except (TypeError, ValueError):
        return
    kinds = inspect.Parameter
    parameters = signature.parameters.values()
    named = {p.name: p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    missing = [name for name, p in named.items() if p.default is p.empty and name not in arrays]
    unknown = [name for name in arrays if name not in named]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        unknown = []
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    listed = ", ".join(str(p.replace(annotation=p.empty, default=p.empty)) for p in parameters)
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
        spelt = [f"rename {name!r} to {lower[found[0]]!r}" for name, found in close.items() if found]
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
    """Order a client's arrays like the model's containers, in the containers' types."""
    ordered = []
    observed = _graph.observed_through(parts)
    for container in parts.data:
        value, dtype = np.asarray(arrays[container.name]), container.type.dtype
        if (rv := observed.get(container)) is not None:
            _require_finite(client_id, container.name, value, rv)
        if value.ndim != container.type.ndim:
            raise DataError(
                f"client {client_id!r}: {container.name!r} has {value.ndim} dimensions {value.shape}, but the model's "
                f"container has {container.type.ndim}; reshape this client's {container.name!r}."
            )
        ordered.append(np.asarray(held_exactly(f"client {client_id!r}: {container.name!r}", value, dtype), order="C"))
    return tuple(ordered)


def held_exactly(what: str, value: Any, dtype: str) -> Any:
    """The values in a container's type, which cuts off no fraction, sign or digit."""
    with np.errstate(invalid="ignore"):
        cast = value.astype(dtype)
    if not np.array_equal(cast, value):
        where = tuple(int(i) for i in np.argwhere(cast != value)[0])
        raise DataError(
            f"{what} holds {value[where]} at index {where}, which the container's type, {dtype}, cannot hold exactly. "
            "It has its type from the builder and from the data that the model was built with; give such numbers as "
            "these hold, or one type at all clients."
        )
    return cast


def _require_finite(client_id: str, name: str, value: Any, rv: Any) -> None:
    """Outcomes are finite; bounds and inputs need not be."""
    if not np.all(np.isfinite(value)):
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(value))[0])
        raise DataError(
            f"client {client_id!r}: {name!r} holds {value[where]} at index {where}, and {rv.name!r}, which is observed "
            "there, must be finite; drop or correct such values before the fit."
        )


def mismatch(client_id: str, arrays: Mapping[str, Any], error: Exception, apart: str = "") -> DataError:
    """Say that the model could not be evaluated on a client's data, with the shapes and what to look at.

    `apart` says which outcomes do not have the shape of their distribution, where that is known.
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
    for ours, theirs in zip(reference, variables, strict=True):
        if ours != theirs:
            what = next(f for f in ours._fields if getattr(ours, f) != getattr(theirs, f))
            shapes = {name: np.shape(value) for name, value in arrays.items()}
            raise DataError(
                f"client {client_id!r}: shared variable {ours.name!r} has {what} {getattr(theirs, what)}, but "
                f"{getattr(ours, what)} at client {reference_id!r}; shared layouts must be equal. This client's "
                f"data have shapes {shapes}: give it the same columns as the others, or make {ours.name!r} local."
            )


def private_prior(client_id: str) -> DeclarationError:
    """Say that a client's prior of the shared variables changes with its data; this text travels, so without them."""
    return DeclarationError(
        f"client {client_id!r}: the shared prior changes when this client's data are changed; the builder lets client "
        "data into the prior of a shared variable, and a prior leaves the client. Use constants that are the same at "
        "all clients."
    )


def ignored_data(client_id: str, builder: Any, parts: _graph.Parts, names: Iterable[str]) -> DeclarationError:
    """Say that a fit would be the same whatever the data are."""
    free = [rv.name for rv in parts.local if any(v in parts.data for v in ancestors([rv]))]
    hint = f" {_quoted(free)} has no observed=, and is a local variable." if free else ""
    return DeclarationError(
        f"client {client_id!r}: the builder {builder_name(builder)} makes no use of its data: none of {_quoted(names)} "
        f"reaches what is observed ({_quoted(rv.name for rv in parts.model.observed_RVs)}), so that the fit would be "
        f"the same for any data.{hint} Pass the data on, with observed=y for example."
    )


def other_model(client_id: str) -> DeclarationError:
    """Say that two builds on the same data differ."""
    return DeclarationError(
        f"client {client_id!r}: the builder, called twice on the same data, gives two models; it draws random numbers, "
        "or keeps or changes something between calls. Give it all that it needs as arguments, or fixed beforehand."
    )


def other_prior(reference_id: str, client_id: str) -> DeclarationError:
    """Say that two clients' builds differ in the prior of the shared variables."""
    return DeclarationError(
        f"client {client_id!r}: the shared prior differs from the one at client {reference_id!r}; "
        "the builder lets client data, or numbers drawn at random, into the prior of a shared variable. Use the same "
        "constants at all clients, and make what starts at random, such as a network, outside of the builder."
    )
