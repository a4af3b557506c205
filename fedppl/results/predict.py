"""Predictive draws on new inputs, by PyMC, at the client."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr

from fedppl.model import graph as _graph
from fedppl.model.client import ClientModel
from fedppl.model.declaration import FederatedModel
from fedppl.model.enrolment import held_exactly, mismatch
from fedppl.model.indices import read_indices, require_not_negative
from fedppl.model.quiet import quiet
from fedppl.results import idata, means
from fedppl.results.forward import containers_of_rows, draw_outcomes, drawn_anew, reads
from fedppl.types import DataError, DeclarationError

logger = logging.getLogger(__name__)


def new_inputs(declaration: FederatedModel, client: ClientModel, given: Any) -> Mapping[str, Any]:
    """New inputs by name, as the client's builder takes them."""
    read = declaration.read_new(client.client_id, given, client.arrays, client.kind)
    if not isinstance(read, Mapping):
        raise DeclarationError(f'new data are {type(read).__name__}; pass a mapping from name to array: {{"X": ...}}.')
    return read


def predictions(
    client: ClientModel,
    posterior: xr.Dataset,
    new_data: Mapping[str, Any],
    seed: int,
    coords: Mapping[str, Any],
    kind: str = "response",
    at: Any = None,
) -> tuple[xr.Dataset, xr.Dataset]:
    """Draw the observed variables, or their means, at new inputs for every posterior draw: (predictions, inputs).

    Outcomes that `new_data` leaves out are filled with zeros of the new length: nothing reads them. Inputs with a
    row per observation may not be left out.
    """
    model = client.pymc_model()
    containers = {variable.name: variable for variable in model.data_vars}
    if not containers:
        raise DataError(
            f"client {client.client_id!r}: the builder has no pm.Data container, so inputs cannot be exchanged for new "
            "ones. Put the data into pm.Data."
        )
    unknown = sorted(set(new_data) - set(containers))
    if unknown or not new_data:
        raise DataError(
            f"new data {sorted(new_data)} must name containers of the model: {sorted(containers)}. Where it has no "
            "inputs, give the outcomes: their number is that of the predictions, and their values are not read."
        )
    values = {}
    for name, value in new_data.items():
        if np.ma.is_masked(value):
            raise DataError(f"new data {name!r} have masked values; drop or impute them.")
        old, new = client.arrays[name], np.asarray(value)
        if new.ndim != old.ndim or new.shape[1:] != old.shape[1:]:
            raise DataError(
                f"new data {name!r} has shape {new.shape}, but the client's has {old.shape}; give it the same columns."
            )
        if new.dtype.kind not in "biuf":
            raise DataError(
                f"new data {name!r} has dtype {new.dtype}, which is not numeric and real; encode it as numbers."
            )
        if new.size == 0:
            raise DataError(f"new data {name!r} has shape {new.shape}, that is zero rows; give one row or more.")
        if not np.all(np.isfinite(new)):
            raise DataError(f"new data {name!r} holds missing or infinite values; drop or impute them.")
        values[name] = held_exactly(f"new data {name!r}", new, containers[name].type.dtype)
    anew = _fill(model, client, values)
    renewed = {
        dim: np.arange(len(value))
        for name, value in values.items()
        for dim in (model.named_vars_to_dims.get(name) or ())[:1]
        if model.coords.get(dim) is not None and len(model.coords[dim]) != len(value)
    }
    dims = {name: tuple(d) for name, d in model.named_vars_to_dims.items()}
    inputs = {name: values[name] for name in new_data}
    input_dims = {k: dims.get(k) or tuple(f"{k}_dim_{i}" for i in range(v.ndim)) for k, v in inputs.items()}
    told = idata.dataset(inputs, input_dims, {})
    if kind == "mean" and hasattr(client.declared.builder, "expected"):
        return means.of_formula(client.declared.builder, values, posterior, at, client.client_id), told
    with model, quiet():
        pm.set_data(values, coords=renewed)
        names = means.declared(model) if kind == "mean" else [variable.name for variable in model.observed_RVs]
        posterior = posterior.drop_vars(names, errors="ignore")
        try:
            require_not_negative(client.client_id, read_indices(model), values, ())
            drawn = draw_outcomes(model, posterior, seed % 2**32, anew, names, predictions=True)
        except (IndexError, ValueError, AssertionError) as error:
            if isinstance(error, DataError):
                raise
            raise mismatch(client.client_id, {name: values[name] for name in new_data}, error) from error
    all_coords = {**coords, **renewed}
    arrays = {name: np.asarray(drawn[name]) for name in names}
    drawn = idata.posterior_dataset(arrays, dims, all_coords, {"client": client.client_id})
    levels = getattr(client.declared.builder, "outcome_levels", {})  # of what is more than a function: formulas
    for name in levels.keys() & drawn.data_vars.keys():
        drawn[name].attrs["levels"] = levels[name]
    return drawn, told


def _fill(model: Any, client: ClientModel, values: dict[str, Any]) -> list[str]:
    """Fill in what new data leave out and nothing reads; returns the names of variables that are drawn anew."""
    found, of_rows, given = reads(model), containers_of_rows(model), sorted(values)
    vectors = [name for name in given if np.ndim(values[name])]
    of = [name for name in vectors if name in of_rows] or vectors
    lengths = {(len(client.arrays[name]), len(values[name])) for name in of}
    before, after = lengths.pop() if len(lengths) == 1 else (None, None)
    as_long = [name for name, old in client.arrays.items() if np.ndim(old) and len(old) == before]
    left_out = [name for name in as_long if name in of_rows and name not in values]
    others = [k for k in values if k not in of_rows and not np.array_equal(values[k], client.arrays[k])]
    rows = [*(name for name in given if name in of_rows), *left_out]
    dims = [dim for name in rows for dim in (model.named_vars_to_dims.get(name) or ())[:1]]
    anew, told = drawn_anew(found, [*rows, *dims], others)
    if told:
        logger.warning(
            "client %s: %s are drawn anew, from their prior at the new values of %s: those are of another client",
            *(client.client_id, told, others),
        )
    stay = {rv for rv in model.free_RVs if rv.name not in anew}
    read = {rv: {one.name for one in _graph.values_read([rv], stay)} for rv in model.observed_RVs}
    for name in left_out:
        readers = [repr(rv.name) for rv, names in read.items() if name in names]
        if not readers:
            values[name] = np.zeros((after, *client.arrays[name].shape[1:]), dtype=model[name].type.dtype)
        elif after != before:
            raise DataError(
                f"new data {given} leave out {name!r}, which has a row per observation and which the "
                f"distribution of {', '.join(readers)} reads; give its {after} new rows too."
            )
    return anew
