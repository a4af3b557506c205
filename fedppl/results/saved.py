"""A fit in a NetCDF file, which ArviZ reads too: the shared posterior, the rounds, and the server's last state.

Of clients there is what they let out, and more only where the caller asks for it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from fedppl.contracts import AnyAlgorithm, Point, Posterior, SharedReader
from fedppl.model.declaration import FederatedModel
from fedppl.results import idata, netcdf
from fedppl.results.arrival import Ended, unarrived
from fedppl.results.kept import Kept, drawn_of, personal_of
from fedppl.results.measure import measure
from fedppl.results.shared import corrected
from fedppl.results.sound import content_of
from fedppl.settings import one_line, shown
from fedppl.storage import codec
from fedppl.types import Array, DataError, DeclarationError, Layout

logger = logging.getLogger(__name__)

_GROUP, _STATE, _FORMAT = "fedppl", "state", 3
_INCLUDED = ("personal", "clients")


class Saved(NamedTuple):
    """What a file holds."""

    algorithm: str
    settings: Mapping[str, str]
    agreement: Any  # of a formula's clients
    written: Mapping[str, str]  # a declaration that can be written down: a formula
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
    personal: Mapping[str, Any]
    drawn: Mapping[str, xr.Dataset]


def save(
    fit: Ended, result: Any, path: str | os.PathLike[str], include: str | None, client: Callable[[str], Any]
) -> None:
    """Write what all clients share and the server knows; of a client's rows nothing, of what is its own what is asked.

    The file is read back before it takes the place of another: what would come back otherwise is not kept.
    """
    target = _target(path)
    if include is not None and include not in _INCLUDED:
        raise DeclarationError(f'include={shown(include)} must be None, "personal" or "clients".')
    kept = personal_of(fit, stored=include is not None)
    drawn = drawn_of(fit, client) if include == "clients" else {}
    points = _points(fit)
    groups = {
        name: idata.as_dataset(result, name)
        for name in ("posterior", "point_estimate", "fit", "rounds")
        if name in result
    }
    groups |= {f"client_{k}": one for k, one in enumerate(drawn.values())}
    groups = {name: _plain(group) for name, group in groups.items()}
    content = {
        "algorithm": fit.algorithm.name,
        "settings": dict(fit.algorithm.settings),
        "agreement": fit.declaration.agreement,
        "written": _written(fit.declaration),
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
        "personal": dict(kept.stored),
        "withheld": kept.withheld,
        "drawn": list(drawn),
        "groups": netcdf.digests(groups),
    }
    groups[_GROUP] = _own(codec.encode(content), fit.algorithm.name, include)
    _write(groups, target, private=include is not None)
    if include is not None:
        what = "draws of clients' local variables" if drawn else "what clients keep to themselves"
        logger.warning("%s holds %s: it is confidential", target, what)


def read(path: str | os.PathLike[str]) -> Saved:
    """What `save` wrote. No code is in it, and none runs."""
    if not isinstance(path, str | os.PathLike) or not Path(path).is_file():
        raise DataError(f"{shown(path)} is no file; pass the path that fit.save was given.")
    try:
        return _read(Path(path))
    except Exception as error:  # whatever bytes that are no fit lead to
        raise DataError(
            f"{str(path)!r} is no fit that fedppl saved, or is damaged ({_said(error)}); take it from a copy, or fit "
            "again."
        ) from error


def _read(path: Path) -> Saved:
    netcdf.require_plain(path)
    found = idata.read(path)
    own = found.pop(_GROUP)
    if int(own.attrs["format"]) != _FORMAT:
        raise DataError(f"it has format {int(own.attrs['format'])}, and this version of fedppl reads {_FORMAT}")
    raw = np.asarray(own[_STATE]).astype(np.uint8).tobytes()
    if hashlib.sha256(raw).hexdigest() != own.attrs["digest"]:
        raise DataError("the server's state is not what was saved")
    content = content_of(codec.decode(raw))
    if changed := [name for name, told in content["groups"].items() if netcdf.digest(found[name]) != told]:
        raise DataError(f"{changed} are not what was saved")
    variables, prior, is_gaussian = content["layout"]
    drawn = {client_id: found[f"client_{k}"] for k, client_id in enumerate(content["drawn"])}
    return Saved(
        content["algorithm"],
        content["settings"],
        content["agreement"],
        content["written"],
        content["state"],
        Layout(variables, prior, is_gaussian, content["fingerprint"], content["density"]),
        content["clients"],
        tuple(content["records"]),
        content["status"],
        content["message"],
        content["seed"],
        content["seconds"],
        content["told"],
        _reader(content["points"], content["values"], content["dims"], content["coords"]),
        {name: found[name] for name in content["groups"] if not name.startswith("client_")},
        Kept(content["personal"], content["withheld"]),
        drawn,
    )


def require_same(saved: Saved, algorithm: AnyAlgorithm, declaration: FederatedModel) -> None:
    """Refuse an algorithm or a declaration that the file is not of."""
    shared = declaration.shared
    if (saved.algorithm, dict(saved.settings)) != (algorithm.name, dict(algorithm.settings)):
        listed = ", ".join(f"{name}={value}" for name, value in saved.settings.items())
        raise DeclarationError(
            f"the file is of {saved.algorithm}({listed}), and algorithm= is {algorithm!r}; pass the one that ran."
        )
    if (found := tuple(variable.name for variable in saved.layout.variables)) != shared:
        raise DeclarationError(f"the file is of a fit that shares {list(found)}, and this model shares {list(shared)}.")
    theirs, ours = saved.written, _written(declaration)
    if other := [name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)]:
        was, now = (", ".join(f"{k} {one_line(one.get(k), 300)}" for k in sorted(other)) for one in (theirs, ours))
        raise DeclarationError(f"the file is of a fit with {was}, and this model has {now}; pass what was fitted.")


def _written(declaration: FederatedModel) -> dict[str, str]:
    """What a builder says of itself that is more than a function: a formula."""
    return dict(getattr(declaration.builder, "written", {}))


def _target(path: Any) -> Path:
    """The path of a file that can be there; found out before draws are made for it."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise DeclarationError(f"path={shown(path)} must be the path of a file, such as 'run.nc'.")
    target = Path(os.fsdecode(path))
    if target.is_dir() or not target.parent.is_dir():
        why = "is a folder" if target.is_dir() else "lies in a folder that does not exist"
        raise DeclarationError(f"path={str(target)!r} {why}; name a file, such as 'run.nc'.")
    return target


def _write(groups: Mapping[str, xr.Dataset], target: Path, *, private: bool) -> None:
    """All of it or nothing; what is confidential is its owner's alone."""
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        if private:
            partial.touch(mode=0o600)
        idata.write(idata.from_groups(groups), partial)
        try:
            _read(partial)
        except Exception as error:
            raise DeclarationError(
                f"this fit cannot be saved: {_said(error)}, once it is read back. Write fit.idata by its to_netcdf, or "
                "start the fit with checkpoint=."
            ) from error
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _own(raw: bytes, algorithm: str, include: str | None) -> xr.Dataset:
    """The group that `load` begins with."""
    attrs = {"algorithm": algorithm, "format": _FORMAT, "digest": hashlib.sha256(raw).hexdigest()}
    attrs["confidential"] = {
        None: "no: nothing of clients beside what they let out",
        "personal": "yes: it holds what clients keep to themselves",
        "clients": "yes: it holds draws of clients' local variables",
    }[include]
    return xr.Dataset({_STATE: ("byte", np.frombuffer(raw, dtype=np.uint8))}, attrs=attrs)


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, DataError) else f"{type(error).__name__}: {text}"


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
        # Points are computed anew, and another machine's last digits may differ.
        if np.shape(wanted) != points.shape or not np.allclose(wanted, points, rtol=1e-9, atol=1e-9):
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
