"""Checks of a client whose model is built: at its start, and against the other clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedppl.model._impossible import impossible_outcome
from fedppl.model._shapes import apart
from fedppl.model.client import ClientModel
from fedppl.model.enrolment import mismatch, other_prior, require_same_variables
from fedppl.model.indices import require_not_negative
from fedppl.types import Array, DataError


def require_start(client: ClientModel, phi: Array, *, kernel: bool) -> None:
    """Evaluate the log density once: shapes that do not fit and impossible data show here, not in round 7.

    With `kernel` its gradient too, compiled; without, nothing is compiled for this call alone.
    """
    require_whole(client)
    infinite = _infinite(client.arrays)
    try:
        known = client.template.check_indices(np.concatenate([phi, client.initial]), client.inputs)
        require_not_negative(client.client_id, client.template.indices, client.arrays, client.inputs)
        with np.errstate(invalid="ignore"):
            possible = infinite is None or np.isfinite(_density(client, phi, known))
        if infinite is not None and not possible:
            raise _holds_infinite(client, infinite)
        large = client.layout.prior.precision.ndim == 1  # for algorithms that bring gradients of their own, or for none
        if kernel and not client.layout.binary and not large:
            value, gradient, _ = client.log_site(phi, client.initial)
        else:
            value, gradient = _density(client, phi, known), np.zeros(0)
    except DataError:
        raise  # said already
    except (ValueError, TypeError, IndexError, AssertionError) as error:  # PyTensor asserts that shapes fit
        if infinite is not None:
            raise _holds_infinite(client, infinite) from error
        unfit = apart(client.template.parts, client.arrays)
        raise mismatch(client.client_id, client.arrays, error, unfit) from error
    if not np.isfinite(value) or not np.all(np.isfinite(gradient)):
        if outcome := impossible_outcome(client, phi):
            raise DataError(
                f"client {client.client_id!r}: the log density at the starting point is {value}: {outcome}. Correct "
                "the data (a covariate or an exposure of that row, where the outcome is possible), or declare a "
                "distribution that has such outcomes; if one is possible elsewhere, set `initval=` on the variable."
            )
        raise DataError(
            f"client {client.client_id!r}: the log density at the starting point is {value}; this client's data are "
            "impossible under the model (a negative count, a class that does not exist?) or the start is. "
            f"Check the data{_whole_numbers(client.arrays)}, or set `initval=` on the variable."
        )


def _holds_infinite(client: ClientModel, infinite: tuple[str, tuple[int, ...]]) -> DataError:
    name, where = infinite
    return DataError(
        f"client {client.client_id!r}: {name!r} holds {client.arrays[name][where]} at index {where}, and with "
        "it the log density is not finite; drop or impute such values (a bound that binds no row may be "
        "infinite: then another value of this client is impossible under the model)."
    )


def _density(client: ClientModel, phi: Array, known: float | None) -> float:
    """The log density at the start, if it is not known."""
    return client.log_density(phi, client.initial) if known is None else known


def require_whole(client: ClientModel) -> None:
    """Refuse fractions where a discrete distribution is observed: PyMC cuts them off, and the fit is of other data."""
    model = client.template.parts.model
    for rv in model.observed_RVs:
        node = model.rvs_to_values[rv].owner
        name = node.inputs[0].name if node is not None and len(node.inputs) == 1 else None
        if name is None or name not in client.arrays or not rv.type.dtype.startswith(("int", "uint", "bool")):
            continue
        values = np.asarray(client.arrays[name])
        if not np.all(values == np.round(values)):
            raise DataError(
                f"client {client.client_id!r}: {name!r} holds {values[values != np.round(values)][0]}, and {rv.name!r} "
                "is a discrete distribution of whole numbers; round the data, or declare a continuous distribution."
            )


def _infinite(arrays: Mapping[str, Any]) -> tuple[str, tuple[int, ...]] | None:
    """Name and place of the first infinite value."""
    for name, value in arrays.items():
        if np.any(found := np.isinf(value)):
            return name, tuple(int(i) for i in np.argwhere(found)[0])
    return None


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
