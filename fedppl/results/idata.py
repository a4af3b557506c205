"""The edge to ArviZ: the only file that knows whether results are InferenceData (0.x) or DataTree (1.x)."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import xarray as xr

from fedppl.types import Array

_IS_TREE = int(importlib.metadata.version("arviz").split(".")[0]) >= 1
LOO_DDOF = int(_IS_TREE)  # of the variance over rows, in its standard error of elpd


def from_groups(groups: Mapping[str, xr.Dataset]) -> Any:
    """Assemble ArviZ's own container from one Dataset a group."""
    kept = {name: group for name, group in groups.items() if group.data_vars}
    if _IS_TREE:
        return xr.DataTree.from_dict(kept)
    return az.InferenceData(**kept)


def as_dataset(result: Any, name: str | None = None) -> xr.Dataset:
    """A group as a Dataset: of a container by its name, or already taken out of one."""
    group = result if name is None or isinstance(result, xr.Dataset) else result[name]
    return group if isinstance(group, xr.Dataset) else group.to_dataset()


def write(result: Any, path: Path) -> None:
    """Write a result to a NetCDF file, uncompressed."""
    result.to_netcdf(str(path), engine="h5netcdf", **({} if _IS_TREE else {"compress": False}))


def read(path: Path) -> dict[str, xr.Dataset]:
    """Groups of a NetCDF file, in memory."""
    with xr.open_datatree(path, engine="h5netcdf") as tree:
        return {name: group.to_dataset().load() for name, group in tree.children.items()}


def dataset(
    values: Mapping[str, Any],
    dims: Mapping[str, Sequence[str] | None],
    coords: Mapping[str, Any],
    attrs: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Build a Dataset from arrays with named dims, by default numbered ones, with those coords that are used."""
    arrays = {name: np.asarray(value) for name, value in values.items()}
    variables = {k: (tuple(dims.get(k) or (f"{k}_dim_{i}" for i in range(v.ndim))), v) for k, v in arrays.items()}
    used = {dim for names, _ in variables.values() for dim in names}
    used_coords = {dim: np.asarray(labels) for dim, labels in coords.items() if dim in used}
    return xr.Dataset(variables, coords=used_coords, attrs={"inference_library": "fedppl", **(attrs or {})})


def data_dataset(values: Mapping[str, Any], dims: Mapping[str, Any], coords: Mapping[str, Any]) -> xr.Dataset:
    """Dataset of a model's data with its dims and those of its coords that are as long."""
    one_draw = posterior_dataset({name: np.asarray(value)[None, None] for name, value in values.items()}, dims, coords)
    return one_draw.isel(chain=0, draw=0, drop=True, missing_dims="ignore")


def posterior_dataset(
    draws: Mapping[str, Array],
    dims: Mapping[str, tuple[str, ...] | None],
    coords: Mapping[str, Any],
    attrs: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Dataset of draws (chain, draw, *shape) with the model's dims and coords, as ArviZ lays out a posterior."""
    all_dims: dict[str, tuple[str, ...]] = {}
    all_coords: dict[str, Any] = dict(coords)
    for name, values in draws.items():
        own = dims.get(name) or tuple(f"{name}_dim_{axis}" for axis in range(values.ndim - 2))
        all_dims[name] = ("chain", "draw", *own)
        for dim, length in zip(all_dims[name], values.shape, strict=True):
            labels = all_coords.get(dim)
            if labels is None or len(labels) != length:
                all_coords[dim] = np.arange(length)
    return dataset(draws, all_dims, all_coords, attrs)


def mark_estimates(posterior: xr.Dataset, names: Sequence[str]) -> xr.Dataset:
    """Mark variables that are point estimates, equal in all draws."""
    for name in names:
        posterior[name].attrs["point_estimate"] = 1
    if names:
        posterior.attrs["fedppl_point_estimates"] = ", ".join(names)
    return posterior


def chain_diagnostics(draws: Array) -> tuple[float, float]:
    """Largest R̂, of one chain that of its two halves, and smallest bulk ESS of draws (chain, draw, coordinate)."""
    if draws.shape[-1] == 0:
        return 1.0, float(draws.shape[0] * draws.shape[1])
    half = draws.shape[1] // 2
    halves = draws if len(draws) > 1 else np.concatenate([draws[:, :half], draws[:, half : 2 * half]])
    columns = range(draws.shape[-1])
    axes = {"chain_axis": 0, "draw_axis": 1} if _IS_TREE else {}
    with np.errstate(all="ignore"):  # a coordinate may be constant
        rhat = max(float(az.rhat(halves[..., i], **axes)) for i in columns)
        return rhat, min(float(az.ess(draws[..., i], **axes)) for i in columns)


def leave_one_out(group: xr.Dataset, name: str) -> tuple[Array, Array, float]:
    """Leave one row out, by ArviZ, of independent draws: elpd and Pareto k of every row, and the limit of good k."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of large k, which are counted
        both = from_groups({"posterior": group[[name]], "log_likelihood": group[[name]]})
        result = az.loo(both, var_name=name, pointwise=True, reff=1.0)
    elpd = result.elpd_i if _IS_TREE else result.loo_i
    return np.ravel(elpd), np.ravel(result.pareto_k), float(result.good_k)
