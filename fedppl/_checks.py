"""Checks of a client against the declaration and against the other clients. Each error names client and remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedppl import _graph
from fedppl.types import Array, DataError, DeclarationError, Variable

if TYPE_CHECKING:
    from fedppl.model import ClientModel

__all__ = ["containers", "mismatch", "other_prior", "require_same_layout", "require_same_variables", "require_start"]


def containers(client_id: str, parts: _graph.Parts, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
    """Order a client's arrays like the model's containers, in the containers' types."""
    ordered = []
    for container in parts.data:
        value, dtype = np.asarray(arrays[container.name]), container.type.dtype
        if value.ndim != container.type.ndim:
            raise DataError(
                f"client {client_id!r}: {container.name!r} has {value.ndim} dimensions {value.shape}, but the model's "
                f"container has {container.type.ndim}; reshape this client's {container.name!r}."
            )
        cast = value.astype(dtype)
        if not np.array_equal(cast, value):
            raise DataError(
                f"client {client_id!r}: {container.name!r} holds {value.dtype} values that {dtype} cannot hold exactly "
                f"(the container took its type from another client); give {container.name!r} one type at all clients."
            )
        ordered.append(np.asarray(cast, order="C"))
    return tuple(ordered)


def mismatch(client_id: str, arrays: Mapping[str, Any], error: Exception) -> DataError:
    """Say that the model could not be evaluated on a client's data, with the shapes and what to look at."""
    shapes = {name: np.shape(value) for name, value in arrays.items()}
    message = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    remedy = "Give this client the same columns as the others, one row of each array per observation."
    if isinstance(error, IndexError):
        remedy = "An integer of its data points outside an array of the model: number groups 0 to n - 1."
    rows = {name: len(value) for name, value in arrays.items() if np.ndim(value)}
    if len(set(rows.values())) > 1:
        remedy = (
            f"Its arrays have different numbers of rows, {rows}: give one row of each array per observation, or look "
            "at what indexes them."
        )
    return DataError(
        f"client {client_id!r}: the model cannot be evaluated on data of shapes {shapes}: {message}. {remedy}"
    )


def require_start(client: ClientModel, phi: Array) -> None:
    """Evaluate the log density once: shapes that do not fit and impossible data show here, not in round 7."""
    try:
        client.template.check_indices(np.concatenate([phi, client.initial]), client.inputs)
        if client.layout.binary or client.template.has_own_gradients:
            # Algorithms for these models have their own gradients: compiling the density would be for this call alone.
            value, gradient = client.log_density(phi, client.initial), np.zeros(0)
        else:
            value, gradient, _ = client.log_site(phi, client.initial)
    except (ValueError, TypeError, IndexError) as error:
        raise mismatch(client.client_id, client.arrays, error) from error
    if not np.isfinite(value) or not np.all(np.isfinite(gradient)):
        raise DataError(
            f"client {client.client_id!r}: the log density at the starting point is {value}; this client's data are "
            "impossible under the model (a negative count, a class that does not exist?) or the start is. "
            f"Check the data{_whole_numbers(client.arrays)}, or set `initval=` on the variable."
        )


def _whole_numbers(arrays: Mapping[str, Any]) -> str:
    """Between what the integers among a client's data lie: a class that does not exist shows there."""
    found = [
        f"{name!r} holds integers from {np.min(value)} to {np.max(value)}"
        for name, value in arrays.items()
        if np.issubdtype(np.asarray(value).dtype, np.integer) and np.size(value)
    ]
    return f" ({'; '.join(found)})" if found else ""


def require_same_layout(reference: ClientModel | None, client: ClientModel) -> None:
    """Refuse a client whose shared block differs, naming the difference."""
    if reference is None or reference.layout.fingerprint == client.layout.fingerprint:
        return
    ours, theirs = reference.layout.variables, client.layout.variables
    require_same_variables(reference.client_id, ours, client.client_id, theirs, client.arrays)
    raise other_prior(reference.client_id, client.client_id)


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


def other_prior(reference_id: str, client_id: str) -> DeclarationError:
    """Say that two clients' builds differ in the prior of the shared variables."""
    return DeclarationError(
        f"client {client_id!r}: the shared prior differs from the one at client {reference_id!r}; "
        "the builder lets client data into the prior of a shared variable. Use the same constants at all clients."
    )
