"""Predictions at rows of a client that brought none: all at once drawn from the hierarchy, given what is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import xarray as xr
from pytensor.graph.traversal import ancestors

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.arrays import as_arrays
from fedppl.model.client import ClientModel, dims_and_coords, model_at
from fedppl.model.enrolment import mismatch
from fedppl.model.indices import read_indices, require_not_negative
from fedppl.model.quiet import quiet
from fedppl.results import idata, means
from fedppl.results.arrival import Ended
from fedppl.results.forward import draw_outcomes
from fedppl.results.rows import has_rows
from fedppl.settings import some_of
from fedppl.types import Array, DataError, DeclarationError


class At(NamedTuple):
    """New rows of a client of which the fit saw none, and the builder that takes them."""

    name: str
    builder: Any
    given: Mapping[str, Any]  # arrays of new inputs
    arrays: Mapping[str, Any]  # with something in the place of outcomes


def rows_at(fit: Ended, name: str, given: Any, kind: str | None) -> At:
    """Read new inputs as those of a client that is not among the others, or of which only a summary is known."""
    kind = _kind_with_rows(fit) if kind is None else fit.declaration.kind_of(name, given, kind)
    builder = fit.declaration.declared_as(kind).builder
    own = getattr(builder, "read_unseen", None)
    if own is not None:
        arrays = dict(own(name, given))
        return At(name, builder, {key: arrays[key] for key in arrays if not key.startswith("outcome")}, arrays)
    read = as_arrays(name, fit.declaration.read(name, given, kind))
    return At(name, builder, read, {**read, **_outcomes(fit, name, read, kind)})


def anywhere(fit: Ended, name: str) -> At:
    """Of no rows at all: variables of a client's own that depend on none, as the model of one that is here has them."""
    one = next(iter(fit.clients.values()), None)
    if one is None:
        raise DeclarationError("no client's model is here; say at which rows it is to be predicted: predict={...}.")
    at = At(name, one.declared.builder, {}, one.arrays)
    model = model_at(at.builder, name, at.arrays)
    if by_rows := [rv.name for rv in model.free_RVs if _reads(model, rv)]:
        raise DeclarationError(
            f"data=None is a client without rows, and its {by_rows} depend on what the client is: say at which rows it "
            "is to be predicted, predict={...}, or fit.predict(None, frame)."
        )
    return at


def _reads(model: Any, variable: Any) -> bool:
    """Whether a variable depends on data, or on what is observed."""
    return bool({*model.data_vars, *model.observed_RVs} & {*ancestors([variable])})


def require_own(at: At, client: ClientModel) -> None:
    """Refuse rows whose model has variables of the client's own that its summary says nothing of."""
    own = {variable.name for variable in client.local}
    lost = [
        v.name for v in model_at(at.builder, at.name, at.arrays).free_RVs if v.name not in own | {*client.layout.slices}
    ]
    if lost:
        raise DeclarationError(
            f"client {at.name!r} brought a summary, whose model has the variables {sorted(own)} and not {lost}, which "
            "rows depend on; declare what is a client's own by one function that all builders call."
        )


def predicted(
    at: At, known: xr.Dataset, shared: tuple[str, ...], seed: int, kind: str, times: Any
) -> tuple[xr.Dataset, xr.Dataset, xr.Dataset]:
    """Draws of all variables, of what is predicted, and the inputs: what `known` has not is drawn given what it has."""
    model = model_at(at.builder, at.name, at.arrays)
    dims, coords = dims_and_coords(model)
    kept = {
        name: np.asarray(known[name].values)
        for name, shape in _shapes(model).items()
        if name in known and known[name].shape[2:] == shape
    }
    if lost := [name for name in shared if name not in kept]:
        raise DataError(f"{at.name!r}: {lost} have another shape here than in the fit; give the same columns.")
    posterior = idata.posterior_dataset(kept, dims, coords)
    formula = kind == "mean" and hasattr(at.builder, "expected")
    with model, quiet():
        outcomes = [] if formula else means.declared(model) if kind == "mean" else [v.name for v in model.observed_RVs]
        every = [*model.free_RVs, *model.deterministics]
        if not at.given:  # no rows: nothing that depends on any
            outcomes, every = [], [v for v in every if not _reads(model, v)]
        more = [v.name for v in every if v.name not in {*kept, *outcomes}]
        drawn = _drawn(model, at, posterior, [*more, *outcomes], seed)
    whole = idata.posterior_dataset({**kept, **{name: drawn[name] for name in more}}, dims, coords, {"client": at.name})
    inputs = idata.posterior_dataset({k: np.asarray(v)[None, None] for k, v in at.given.items()}, dims, coords)
    if formula:
        found = means.of_formula(at.builder, at.arrays, whole, times, at.name)
    else:
        found = idata.posterior_dataset({n: drawn[n] for n in outcomes}, dims, coords, {"client": at.name})
    return whole, found, inputs.isel(chain=0, draw=0, drop=True, missing_dims="ignore")


def _drawn(model: Any, at: At, posterior: xr.Dataset, names: list[str], seed: int) -> dict[str, Array]:
    """By PyMC: variables that no draws are given of, from their distribution given those that there are."""
    if not names:
        return {}
    try:
        require_not_negative(at.name, read_indices(model), dict(at.arrays), ())
        group = draw_outcomes(model, posterior, seed % 2**32, (), names)
    except (IndexError, ValueError, AssertionError) as error:
        if isinstance(error, DataError):
            raise
        raise mismatch(at.name, at.given, error) from error
    return {name: np.asarray(group[name].values) for name in names}


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    sizes = pm.draw([rv.shape for rv in model.free_RVs], mode=interpreted.PYTHON_MODE)
    return {rv.name: tuple(int(n) for n in size) for rv, size in zip(model.free_RVs, sizes, strict=True)}


def _kind_with_rows(fit: Ended) -> str:
    """The kind of clients that bring rows, where there is one."""
    kinds = list(fit.declaration.builders)
    if len(kinds) == 1 or hasattr(fit.declaration.builder, "read_unseen"):
        return kinds[0]
    found = list(dict.fromkeys(client.kind for client in fit.clients.values() if has_rows(client)))
    if len(found) != 1:
        raise DeclarationError(
            f"rows of a client without any are of a kind, and clients with rows are of {found or kinds}; ask a client "
            "that brought rows, or take a fit whose clients with rows are of one kind."
        )
    return found[0]


def _outcomes(fit: Ended, name: str, given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Zeros in the place of outcomes that are left out, as another client has them: nothing else may be left out."""
    one = next((client for client in fit.clients.values() if client.kind == kind), None)
    if one is None:  # the builder says what it lacks
        return {}
    model, lengths = one.pymc_model(), {len(value) for value in given.values() if np.ndim(value)}
    read = {rv: _graph.values_read([rv]) for rv in model.observed_RVs}
    inputs = {variable.name for of in read.values() for variable in of}
    left_out = [key for key in one.arrays if key not in given]
    known = {variable.name for variable in model.data_vars} - inputs
    if wrong := [key for key in left_out if key not in known or not np.ndim(one.arrays[key])]:
        raise DataError(
            f"{name!r}: new data lack {some_of(wrong)}, which the model reads, and of a client without rows nothing is "
            "known; give all but the outcomes."
        )
    if left_out and len(lengths) != 1:
        raise DataError(
            f"{name!r}: the number of outcomes {some_of(left_out)} cannot be told from new data with {sorted(lengths)} "
            "rows; give them too: their values are not read."
        )
    old = {key: np.asarray(one.arrays[key]) for key in left_out}
    return {key: np.zeros((*lengths, *value.shape[1:]), value.dtype) for key, value in old.items()}
