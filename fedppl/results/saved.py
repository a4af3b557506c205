"""A fit in a NetCDF file, which ArviZ reads too: the shared posterior, the rounds, and the server's last state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from fedppl.contracts import AnyAlgorithm, Point, Posterior, SharedReader
from fedppl.results import idata
from fedppl.results.arrival import Ended, unarrived
from fedppl.results.measure import measure
from fedppl.results.shared import corrected
from fedppl.settings import shown
from fedppl.storage import codec
from fedppl.types import Array, DataError, DeclarationError, Layout

_GROUP, _STATE, _FORMAT = "fedppl", "state", 1


class Saved(NamedTuple):
    """What a file holds."""

    algorithm: str
    settings: Mapping[str, str]
    agreement: Any  # of a formula's clients
    state: Any
    layout: Layout
    client_ids: tuple[str, ...]
    records: tuple[Any, ...]
    status: Any
    message: str
    seed: int
    seconds: float
    told: Mapping[str, Any]
    reader: SharedReader
    groups: Mapping[str, xr.Dataset]


def save(fit: Ended, groups: Any, agreement: Any, path: str | os.PathLike[str]) -> None:
    """Write what all clients share and the server knows; nothing of a client's rows, draws or local variables."""
    if not isinstance(path, str | os.PathLike):
        raise DeclarationError(f"path={shown(path)} must be the path of a file, such as 'run.nc'.")
    points = _points(fit)
    content = {
        "format": _FORMAT,
        "algorithm": fit.algorithm.name,
        "settings": dict(fit.algorithm.settings),
        "agreement": agreement,
        "state": fit.state,
        "layout": [fit.layout.variables, fit.layout.prior, fit.layout.prior_is_gaussian],
        "fingerprint": fit.layout.fingerprint,
        "density": fit.layout.density,
        "clients": fit.client_ids,
        "records": list(fit.records),
        "status": fit.status,
        "message": fit.message,
        "seed": fit.seed,
        "seconds": fit.seconds,
        "told": {k: dict(v) for k, v in fit.told.items()},
        "points": points,
        "values": {k: np.asarray(v) for k, v in fit.reader.constrain(points).items()} if len(points) else {},
        "dims": {k: list(v) if v is not None else None for k, v in fit.reader.dims.items()},
        "coords": {k: np.asarray(v).tolist() for k, v in fit.reader.coords.items()},
    }
    raw = np.frombuffer(codec.encode(content), dtype=np.uint8)
    found = {
        name: idata.as_dataset(groups, name)
        for name in ("posterior", "point_estimate", "fit", "rounds")
        if name in groups
    }
    found[_GROUP] = xr.Dataset({_STATE: ("byte", raw)}, attrs={"algorithm": fit.algorithm.name, "format": _FORMAT})
    partial = Path(path).with_name(Path(path).name + ".partial")
    idata.write(idata.from_groups({name: _plain(group) for name, group in found.items()}), partial)
    partial.replace(path)


def read(path: str | os.PathLike[str]) -> Saved:
    """What `save` wrote. No code is in it, and none runs."""
    if not isinstance(path, str | os.PathLike) or not Path(path).is_file():
        raise DataError(f"{shown(path)} is no file; pass the path that fit.save was given.")
    try:
        found = idata.read(Path(path))
        raw = np.asarray(found.pop(_GROUP)[_STATE]).astype(np.uint8).tobytes()
        content = codec.decode(raw)
        if content["format"] != _FORMAT:
            raise DataError(f"{str(path)!r} has format {content['format']}; this version of fedppl reads {_FORMAT}.")
        variables, prior, is_gaussian = content["layout"]
        layout = Layout(variables, prior, is_gaussian, content["fingerprint"], content["density"])
        reader = _reader(content["points"], content["values"], content["dims"], content["coords"])
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise DataError(f"{str(path)!r} is no fit that fedppl saved, or is damaged ({error}).") from error
    return Saved(
        content["algorithm"],
        content["settings"],
        content["agreement"],
        content["state"],
        layout,
        tuple(content["clients"]),
        tuple(content["records"]),
        content["status"],
        content["message"],
        content["seed"],
        content["seconds"],
        content["told"],
        reader,
        found,
    )


def require_same(saved: Saved, algorithm: AnyAlgorithm, shared: tuple[str, ...]) -> None:
    """Refuse an algorithm or a declaration that the file is not of."""
    if (saved.algorithm, dict(saved.settings)) != (algorithm.name, dict(algorithm.settings)):
        listed = ", ".join(f"{name}={value}" for name, value in saved.settings.items())
        raise DeclarationError(
            f"the file is of {saved.algorithm}({listed}), and algorithm= is {algorithm!r}; pass the one that ran."
        )
    if (found := tuple(variable.name for variable in saved.layout.variables)) != shared:
        raise DeclarationError(f"the file is of a fit that shares {list(found)}, and this model shares {list(shared)}.")


def _points(fit: Ended) -> Array:
    """Points of φ that results are computed from."""
    shared = fit.algorithm.result.shared
    if unarrived(fit):
        return np.zeros((0, fit.layout.size))
    if isinstance(shared, Posterior):
        measured = measure(shared.gaussian(fit.state), corrected(fit))
        return np.zeros((0, fit.layout.size)) if measured is None else measured.points
    return shared.estimate(fit.state)[None] if isinstance(shared, Point) else np.zeros((0, fit.layout.size))


def _reader(
    points: Array, values: Mapping[str, Array], dims: Mapping[str, Any], coords: Mapping[str, Any]
) -> SharedReader:
    """How draws of φ are read, for the points that were saved."""

    def constrain(wanted: Array) -> Mapping[str, Array]:
        if not np.array_equal(np.asarray(wanted), points):
            raise DataError(
                "this fit was loaded without its clients' data, and new draws need one of them to be read: "
                "fedppl.load(path, model, clients=...)."
            )
        return values

    return SharedReader(constrain, {k: None if v is None else tuple(v) for k, v in dims.items()}, coords)


def _plain(group: xr.Dataset) -> xr.Dataset:
    """What NetCDF can hold: texts for objects."""
    changed = {name: group[name].astype(str) for name in group.variables if group[name].dtype == object}
    attrs = {name: int(value) if isinstance(value, bool | np.bool_) else value for name, value in group.attrs.items()}
    return group.assign(changed).assign_attrs(attrs)
