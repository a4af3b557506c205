"""Checks of a client whose model is built: at its start, and against the other clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from pytensor.graph.replace import clone_replace

from fedppl.model import graph as _graph
from fedppl.model import interpreted
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
        unfit = _apart(client.template.parts, client.arrays)
        raise mismatch(client.client_id, client.arrays, error, unfit) from error
    if not np.isfinite(value) or not np.all(np.isfinite(gradient)):
        if outcome := _impossible_outcome(client, phi):
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


# What outcomes of a distribution are, by the name of PyTensor's random variable, and which values break that: where
# none does, a parameter is at fault, as an exposure of 0 is.
_COUNTS: tuple[str, Callable[[float], bool]] = "counts are not negative", lambda y: y < 0
_POSITIVE: tuple[str, Callable[[float], bool]] = "outcomes are positive", lambda y: y <= 0
_RULES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "bernoulli": ("outcomes are 0 or 1", lambda y: y not in (0, 1)),
    "beta": ("outcomes lie between 0 and 1", lambda y: not 0 < y < 1),
    "binomial": ("outcomes lie between 0 and n", lambda y: y != 0),
    "categorical": (
        "classes are numbered from 0, and the last has a number one less than there are classes",
        lambda y: y != 0,
    ),
    "exponential": ("outcomes are not negative", lambda y: y < 0),
    "gamma": _POSITIVE,
    "geometric": ("outcomes are 1, 2, ...", lambda y: y < 1),
    "halfnormal": ("outcomes are not negative", lambda y: y < 0),
    "inverse_gamma": _POSITIVE,
    "lognormal": _POSITIVE,
    "negative_binomial": _COUNTS,
    "poisson": _COUNTS,
    "weibull": _POSITIVE,
}


def _impossible_outcome(client: ClientModel, phi: Array) -> str:
    """The first outcome whose log density is minus infinity, with its place and the rule; "" where none is found."""
    template, layout = client.template, client.layout
    try:
        x, inputs, outputs = _graph.observed_graph(template.parts, layout.variables, client.local)
        function = interpreted.python_function([x, *inputs], outputs)
        found = function(np.concatenate([phi, client.initial]), *client.inputs)
    except Exception:  # a reason is looked for, of a failure that is told in any case
        return ""
    names = {rv: container.name for container, rv in _graph.observed_through(template.parts).items()}
    for rv, each in zip(template.parts.model.observed_RVs, found, strict=True):
        values = client.arrays.get(names.get(rv, ""))
        if not np.any(np.isneginf(each)) or values is None or np.shape(values) != np.shape(each):
            continue
        place = tuple(int(i) for i in np.argwhere(np.isneginf(each))[0])
        value = np.asarray(values)[place]
        at = f" in row {place[0] if len(place) == 1 else place}" if place else ""
        rule, breaks = _RULES.get(getattr(rv.owner.op, "name", None) or "", ("", lambda y: False))
        return f"{names[rv]!r} is {value}{at}, " + (
            f"and {rule}" if breaks(float(value)) else "which has no density there"
        )
    return ""


def _apart(parts: _graph.Parts, arrays: Mapping[str, Any]) -> str:
    """Name an observed variable whose values have another shape than its distribution has; "" where none shows.

    Parameters
    ----------
    parts
        The model; lengths of dims are those that it was built with.
    arrays
        The client's data.
    """
    for rv in parts.model.observed_RVs:
        if rv.owner is None or getattr(rv.owner.op, "ndim_supp", None) != 0:
            continue
        parameters = rv.owner.op.dist_params(rv.owner)
        behind = rv.owner.op.ndims_params
        try:
            replace, inputs = _graph._inputs_for(parts)
            if len(inputs) != len(parts.data):
                continue
            shown = [parts.model.rvs_to_values[rv].shape, *(one.shape for one in parameters)]
            function = interpreted.python_function(inputs, clone_replace(shown, replace, rebuild_strict=False))
            given = (np.asarray(arrays[v.name]).astype(v.type.dtype) for v in parts.data)
            value, *found = (tuple(int(n) for n in one) for one in function(*given))
            batches = [one[: len(one) - inner] for one, inner in zip(found, behind, strict=True)]
            wanted = np.broadcast_shapes(*batches)
        except Exception:  # what says more about an error is no error itself
            continue
        while wanted[:1] == (1,) and value[:1] != (1,) and all(one[:1] == (1,) for one in found):  # axes that PyMC adds
            wanted, found = wanted[1:], [one[1:] for one in found]
        if wanted != value:
            widest = max(found, key=len)
            has = f"{wanted}" if widest == wanted else f"{wanted} (of a parameter of shape {widest})"
            return f"{rv.name!r} is observed with shape {value}, and its distribution has outcomes of shape {has}"
    return ""
