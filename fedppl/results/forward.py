"""Outcomes drawn from a declared model at draws of its variables, by PyMC, and which of these belong to rows."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import xarray as xr
from pytensor.graph.basic import clone_get_equiv
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.tensor.shape import Shape, Shape_i

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.interpreted import quiet
from fedppl.results import idata


def draw_outcomes(
    model: Any,
    posterior: xr.Dataset,
    seed: int,
    anew: Iterable[str] = (),
    names: Iterable[str] | None = None,
    *,
    predictions: bool = False,
) -> xr.Dataset:
    """Draws of the observed variables, or of those of these names, one a draw of the posterior.

    Every variable of the posterior stays as it is but those in `anew`, which are drawn given the others. Left to
    itself, PyMC draws anew what reads data or dims of which it is not told that they have not changed.
    """
    stays = [rv.name for rv in model.free_RVs if rv.name in posterior and rv.name not in set(anew)]
    draws = posterior[stays]
    labels = [name for name in draws.coords if name not in ("chain", "draw")]  # the model's own are told below
    groups = {"posterior": draws.drop_vars(labels), "constant_data": _as_it_is(model)}
    known = inspect.signature(pm.sample_posterior_predictive).parameters
    with model, quiet():
        found = pm.sample_posterior_predictive(
            idata.from_groups(groups),
            var_names=[rv.name for rv in model.observed_RVs] if names is None else list(names),
            random_seed=seed,
            progressbar=False,
            compile_kwargs={"mode": interpreted.PYTHON_MODE},
            predictions=predictions,
            **({"freeze_vars": stays} if stays and "freeze_vars" in known else {}),
        )
    return idata.as_dataset(found, "predictions" if predictions else "posterior_predictive")


def _as_it_is(model: Any) -> xr.Dataset:
    """The model's data and coords."""
    values = {variable.name: np.asarray(variable.get_value()) for variable in model.data_vars}
    dims = {name: tuple(f"{name}_dim_{axis}" for axis in range(value.ndim)) for name, value in values.items()}
    coords = {dim: np.asarray(labels) for dim, labels in model.coords.items() if labels is not None}
    return idata.dataset(values, dims, {}).assign_coords(coords)


class Reads(NamedTuple):
    """What a variable reads of containers, without what other variables read for it."""

    shape: frozenset[str]  # whose lengths are its own
    values: frozenset[str]
    variables: frozenset[str]


def reads(model: Any) -> dict[str, Reads]:
    """Of every free variable what it reads, by name."""
    return {rv.name: _reads(model, rv) for rv in model.free_RVs}


def containers_of_rows(model: Any) -> frozenset[str]:
    """Containers that are as long as the outcomes, as the graph has it, whatever lengths they happen to have."""
    found: set[str] = set()
    for rv in model.observed_RVs:
        found |= {variable.name for variable in _graph.values_read([model.rvs_to_values[rv]]) if variable.name}
        for part in (rv, *rv.owner.inputs):
            found |= _lengths(model, part)
    return frozenset(found & {variable.name for variable in model.data_vars})


def drawn_anew(found: Mapping[str, Reads], rows: Iterable[str], others: Iterable[str]) -> tuple[list[str], list[str]]:
    """Variables that new data have drawn anew, and those of them that are no rows'.

    Those that have an entry for each row, as a residual has, are those of other rows now. What is a client's own stays,
    also where its prior reads rows (a mean of a column), since the client is the same; but where the prior reads a
    predictor of the client or of its groups, among `others`, which has another value, that is another client's.
    """
    changed = {*rows, *others}
    of_rows = {name for name, one in found.items() if one.shape & changed}
    told = {name for name, one in found.items() if one.values & set(others)} - of_rows
    anew = of_rows | told
    while more := {name for name, one in found.items() if one.variables & anew} - anew:
        anew |= more
    return [name for name in found if name in anew], [name for name in found if name in told]


def _reads(model: Any, rv: Any) -> Reads:
    others = {one for one in model.free_RVs if one is not rv}
    read = _graph.values_read(rv.owner.inputs, others)
    containers = {variable.name for variable in read & set(model.data_vars)}
    return Reads(
        frozenset(_lengths(model, rv)), frozenset(containers), frozenset(variable.name for variable in read & others)
    )


def _lengths(model: Any, variable: Any) -> set[str]:
    """Containers and dims whose lengths are a variable's."""
    if not getattr(variable.type, "ndim", 0):
        return set()
    shape = [pt.as_tensor(variable.shape)[axis] for axis in range(variable.type.ndim)]
    # Of a copy: rewriting changes a graph where it stands, and this one is the model's own.
    copies = clone_get_equiv([], shape, copy_inputs=False, copy_orphans=False)
    shape = [copies[length] for length in shape]
    dims = {copies.get(length, length): dim for dim, length in model.dim_lengths.items()}
    data, found, seen = set(model.data_vars), set(), set()
    waiting: list[Any] = list(rewrite_graph(shape, include=("ShapeOpt", "canonicalize")))
    while waiting:
        part = waiting.pop()
        if part in seen or part in data:  # what reads values is as long as they say, and stays so
            continue
        seen.add(part)
        if part in dims:
            found.add(dims[part])
        if part.owner is None:
            continue
        if isinstance(part.owner.op, Shape | Shape_i) and part.owner.inputs[0] in data:
            found.add(part.owner.inputs[0].name)
        else:
            waiting.extend(part.owner.inputs)
    return found
