"""Builders of several kinds of clients: which of them a client has, and that all of them share one layout."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedppl import gaussian
from fedppl.data import frames
from fedppl.model.client import ClientModel
from fedppl.model.enrolment import argument_names, builder_name
from fedppl.settings import shown, takes
from fedppl.types import DataError, DeclarationError, Layout

Builders = Mapping[str, Callable[..., Any]]
Kind = Mapping[str, str] | Callable[[str, Any], str | None] | None

ONLY = ""  # the kind of clients where there is one


def as_builders(builder: Any) -> dict[str, Callable[..., Any]]:
    """Builders by kind; one alone is of the kind `ONLY`."""
    found = dict(builder) if isinstance(builder, Mapping) else {ONLY: builder}
    if not found or not all(isinstance(kind, str) for kind in found):
        raise DeclarationError(f'builder={shown(builder)} must be a function, or functions by kind: {{"full": ...}}.')
    for kind, one in found.items():
        if not callable(one):
            whose = f" of kind {kind!r}" if isinstance(builder, Mapping) else ""
            raise DeclarationError(
                f"builder{whose} is {type(one).__name__}, not a function; pass a function from one client's data to a "
                "pm.Model, not the model itself."
            )
    return found


def as_kind(kind: Any, builders: Builders) -> Kind:
    """Check the keyword `kind`."""
    if kind is None:
        return None
    if len(builders) == 1:
        raise DeclarationError('kind= is for several builders: FederatedModel({"full": ..., "summary": ...}, ...).')
    if isinstance(kind, Mapping):
        found = {str(client_id): one for client_id, one in kind.items()}
        for client_id, one in found.items():
            _known(one, builders, f"kind of client {client_id!r}")
        return found
    if not (callable(kind) and takes(kind, 2)):
        raise DeclarationError(f"kind={shown(kind)} is neither kinds by client id nor a function of (client_id, data).")
    found_by: Callable[[str, Any], str | None] = kind
    return found_by


def _known(kind: Any, builders: Builders, what: str) -> str:
    if not isinstance(kind, str) or kind not in builders:
        raise DeclarationError(f"{what} is {shown(kind)}; the kinds that are declared are {list(builders)}.")
    return kind


def kind_of(client_id: str, data: Any, builders: Builders, kind: Kind, said: str | None = None) -> str:
    """The kind of a client: as it was `said`, as the declaration says, or by the names of its data."""
    if said is not None:
        return _known(said, builders, f"client {client_id!r}: kind")
    if len(builders) == 1:
        return next(iter(builders))
    named = kind.get(client_id) if isinstance(kind, Mapping) else None if kind is None else kind(client_id, data)
    if named is not None:
        return _known(named, builders, f"client {client_id!r}: kind")
    fitting = [one for one, builder in builders.items() if _fits(data, builder)]
    if len(fitting) == 1:
        return fitting[0]
    takes_names = "; ".join(f"{one!r} takes {list(argument_names(b) or ['any'])}" for one, b in builders.items())
    which = "no builder" if not fitting else f"the builders of kinds {fitting}"
    raise DataError(
        f"client {client_id!r}: {which} can be told by its data, which are {_about(data)} ({takes_names}); give it the "
        f'arrays of one, or say kind={{"{client_id}": ...}}.'
    )


def _fits(data: Any, builder: Callable[..., Any]) -> bool:
    """Whether a builder's arguments are these data; other columns of a frame are left alone."""
    try:
        parameters = inspect.signature(builder).parameters.values()
    except (TypeError, ValueError):
        return True
    named = {p.name: p.default is p.empty for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    needed = {name for name, needs in named.items() if needs}
    if isinstance(data, tuple):
        return len(needed) <= len(data) <= len(named)
    if (keys := _names(data)) is None:
        return False
    of_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return needed <= keys and (frames.is_frame(data) or of_any or keys <= set(named))


def _names(data: Any) -> set[str] | None:
    if frames.is_frame(data):
        return set(map(str, frames.names_of(data)))
    return set(map(str, data)) if isinstance(data, Mapping) else None


def _about(data: Any) -> str:
    names = _names(data)
    return (
        f"{type(data).__name__} of {len(data)}"
        if isinstance(data, tuple)
        else f"{sorted(names)}"
        if names
        else (type(data).__name__)
    )


def knowing(kinds: Mapping[str, str], kind: Kind) -> Kind:
    """The same rule for kinds, with these clients' known."""
    if kind is None or isinstance(kind, Mapping):
        return {**(kind or {}), **kinds}
    if isinstance(kind, functools.partial) and kind.func is _remembered:
        before, rule = kind.args
        return functools.partial(_remembered, {**before, **kinds}, rule)
    return functools.partial(_remembered, dict(kinds), kind)


def _remembered(kinds: Mapping[str, str], kind: Callable[[str, Any], str | None], client_id: str, data: Any) -> Any:
    return kinds[client_id] if client_id in kinds else kind(client_id, data)


def without_empty(data: Any) -> Any:
    """A client's part of one table of all kinds, without the columns that have no value there."""
    if not isinstance(data, Mapping):
        return data
    return {name: values for name, values in data.items() if not _empty(np.asarray(values))}


def _empty(values: Any) -> bool:
    return values.dtype.kind == "f" and values.size > 0 and bool(np.all(np.isnan(values)))


def names_of(builders: Builders) -> tuple[str, ...] | None:
    """What all builders call their data; None where one takes any name."""
    found = [argument_names(builder) for builder in builders.values()]
    if any(names is None for names in found):
        return None
    return tuple(dict.fromkeys(name for names in found for name in names or ()))


def listed(builders: Builders) -> str:
    """How a declaration shows its builders."""
    names = {kind: builder_name(one) for kind, one in builders.items()}
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return "{" + ", ".join(f"{k!r}: {v}" for k, v in names.items()) + "}"


def require_one_layout(first: ClientModel, other: ClientModel) -> None:
    """Refuse kinds that declare the shared variables differently, naming the kinds and the difference."""
    if first.layout.fingerprint == other.layout.fingerprint:
        return
    kinds = f"kinds {first.declared.kind!r} and {other.declared.kind!r}"
    for ours, theirs in zip(first.layout.variables, other.layout.variables, strict=True):
        for field in ours._fields:
            mine, another = getattr(ours, field), getattr(theirs, field)
            if mine != another:
                raise DeclarationError(
                    f"{kinds} differ: shared variable {ours.name!r} has {field} {mine} in the first and {another} in "
                    "the second; declare what is shared by one function that all builders call."
                )
    raise DeclarationError(
        f"{kinds} differ in the prior of what is shared: {_apart(first.layout, other.layout)}; declare what is shared "
        "by one function that all builders call."
    )


def _apart(ours: Layout, theirs: Layout) -> str:
    """Where two priors of one shape differ most."""
    mean, sd = gaussian.mean(ours.prior), gaussian.standard_deviations(ours.prior)
    others, other_sd = gaussian.mean(theirs.prior), gaussian.standard_deviations(theirs.prior)
    apart = np.abs(others - mean) / sd + np.abs(np.log(other_sd / sd))
    place = int(np.argmax(apart))
    if not apart[place] > 1e-5:
        return "its density about one mean and covariance, or correlations"
    return (
        f"{ours.labels[place]} has mean {mean[place]:.6g} and sd {sd[place]:.6g} in the first, {others[place]:.6g} and "
        f"{other_sd[place]:.6g} in the second"
    )
