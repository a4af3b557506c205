"""A fit in a NetCDF file, which ArviZ reads too: the shared posterior, the rounds, and the server's last state.

Of clients it has what they sent, and more only where the caller asks for it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from fedppl.contracts import AnyAlgorithm, Point, SharedReader
from fedppl.model.declaration import FederatedModel
from fedppl.results import idata
from fedppl.results.records import Ended, unarrived
from fedppl.results.shared import Drawing, weighted_points
from fedppl.settings import file_to_write, one_line, one_of, shown
from fedppl.storage import codec
from fedppl.types import Array, DataError, DeclarationError, Layout

logger = logging.getLogger(__name__)

_GROUP, _STATE, _FORMAT = "fedppl", "state", 10
_FIELDS = ("state", "client_ids", "records", "status", "message", "seed", "seconds")
_INCLUDED = {  # keyword to the note in the file
    None: "no: of clients it has what they sent alone",
    "personal": "yes: it holds clients' personal states",
    "clients": "yes: it holds draws of clients' local variables",
}


class Saved(NamedTuple):
    """A file's content."""

    algorithm: str
    settings: Mapping[str, str]
    agreement: Any  # of a formula's clients
    written: Mapping[str, str]  # a declaration as text: a formula
    groups: Mapping[str, xr.Dataset]
    fields: Mapping[str, Any]  # of `Fit`, but for those that the call gives


def save(fit: Any, path: str | os.PathLike[str], *, include: str | None = None) -> None:
    """Write the fit to a NetCDF file: what all clients share, the rounds and the server's last state.

    `fedppl.load` reads it, and so does ``az.from_netcdf``. Clients' rows are never in it.

    Parameters
    ----------
    path
        The file, such as ``"run.nc"``; one that is there is replaced.
    include
        Confidential parts of clients to write: None for nothing, "personal" for their personal states where the
        algorithm has these, "clients" for draws of their posteriors too.

    Raises
    ------
    DeclarationError
        If the path is none, or what `include` names is not here.
    """
    target = file_to_write(path, "run.nc")
    if include is not None:
        one_of("include", include, ("personal", "clients"), "None for neither")
    personal = personal_of(fit, stored=include is not None)
    drawn = drawn_of(fit) if include == "clients" else {}
    names = [name for name in ("posterior", "point_estimate", "fit", "rounds") if name in fit.idata]
    groups = {name: _plain(idata.as_dataset(fit.idata, name)) for name in names}
    groups |= {f"client_{k}": _plain(draws) for k, draws in enumerate(drawn.values())}
    content = _content(fit, personal, list(drawn), groups)
    raw = codec.encode(content)
    attrs = {"algorithm": fit.algorithm.name, "format": _FORMAT, "digest": hashlib.sha256(raw).hexdigest()}
    attrs["confidential"] = _INCLUDED[include]
    groups[_GROUP] = xr.Dataset({_STATE: ("byte", np.frombuffer(raw, dtype=np.uint8))}, attrs=attrs)
    _write(groups, target, private=include is not None)
    if include is not None:
        what = "draws of clients' local variables" if drawn else "clients' personal states"
        logger.warning("%s holds %s: it is confidential", target, what)


def _content(fit: Ended, personal: Kept, drawn: list[str], groups: Mapping[str, xr.Dataset]) -> dict[str, Any]:
    """All that `Saved` has beside the groups, and digests of these."""
    points = _points(fit)
    return {
        **{name: getattr(fit, name) for name in _FIELDS},
        "algorithm": fit.algorithm.name,
        "settings": dict(fit.algorithm.settings),
        "agreement": fit.declaration.agreement,
        "written": _written(fit.declaration),
        "layout": [getattr(fit.layout, field.name) for field in dataclasses.fields(fit.layout)],
        "told": {k: dict(v) for k, v in fit.told.items()},
        "points": points,
        "values": {k: np.asarray(v) for k, v in fit.reader.constrain(points).items()} if len(points) else {},
        "dims": {k: list(v) if v is not None else None for k, v in fit.reader.dims.items()},
        "coords": {k: np.asarray(v).tolist() for k, v in fit.reader.coords.items()},
        "personal": dict(personal.stored),
        "withheld": personal.withheld,
        "drawn": drawn,
        "groups": {name: digest(group) for name, group in groups.items() if group.data_vars},
    }


def read(path: str | os.PathLike[str]) -> Saved:
    """Read what `save` wrote. No code is in it, and none runs."""
    if not isinstance(path, str | os.PathLike) or not Path(path).is_file():
        raise DataError(f"{shown(path)} is no file; pass the path that fit.save was given.")
    try:
        return _read(Path(path))
    except Exception as error:  # any, from bytes that are no fit
        what = f"is no fit that fedppl saved, or is damaged ({_reason(error)})"
        raise DataError(f"{str(path)!r} {what}; use a copy, or fit again.") from error


def _read(path: Path) -> Saved:
    groups = idata.read(path)
    state = groups.pop(_GROUP)
    if int(state.attrs["format"]) != _FORMAT:
        raise DataError(f"it has format {int(state.attrs['format'])}, and this version of fedppl reads {_FORMAT}")
    raw = np.asarray(state[_STATE]).astype(np.uint8).tobytes()
    if hashlib.sha256(raw).hexdigest() != state.attrs["digest"]:
        raise DataError("the server's state is not what was saved")
    content = codec.decode(raw)
    if changed := [name for name, saved in content["groups"].items() if digest(groups[name]) != saved]:
        raise DataError(f"{changed} are not what was saved")
    fields = {name: content[name] for name in _FIELDS} | {
        "layout": Layout(*content["layout"]),
        "told": content["told"],
        "reader": _reader(*(content[name] for name in ("points", "values", "dims", "coords"))),
        "personal": Kept(content["personal"], content["withheld"]),
        "drawn": {client_id: groups[f"client_{k}"] for k, client_id in enumerate(content["drawn"])},
    }
    shared = {name: groups[name] for name in content["groups"] if not name.startswith("client_")}
    about = {name: content[name] for name in ("algorithm", "settings", "agreement", "written")}
    return Saved(**about, groups=shared, fields=fields)


def require_same(saved: Saved, algorithm: AnyAlgorithm, declaration: FederatedModel) -> None:
    """Refuse another algorithm or declaration than the file's."""
    shared = declaration.shared
    if (saved.algorithm, dict(saved.settings)) != (algorithm.name, dict(algorithm.settings)):
        listed = ", ".join(f"{name}={value}" for name, value in saved.settings.items())
        raise DeclarationError(
            f"the file is of {saved.algorithm}({listed}), and algorithm= is {algorithm!r}; pass the one that ran."
        )
    if (names := tuple(variable.name for variable in saved.fields["layout"].variables)) != shared:
        raise DeclarationError(f"the file is of a fit that shares {list(names)}, and this model shares {list(shared)}.")
    theirs, ours = saved.written, _written(declaration)
    if other := [name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)]:
        before, here = (", ".join(f"{k} {one_line(one.get(k), 300)}" for k in sorted(other)) for one in (theirs, ours))
        raise DeclarationError(f"the file is of a fit with {before}, and this model has {here}; pass what was fitted.")
    if not _alike(saved.agreement, declaration.agreement):
        raise DeclarationError("another declaration: agreed levels or scales are not the file's; pass what was fitted.")


_ROUNDING = 1e-9  # of the largest number beside it: sums over rows depend on their order, and means may be 0


def _alike(agreed: Any, other: Any, size: float = 0.0) -> bool:
    """Whether two agreements are the same but for rounding."""
    if isinstance(agreed, Mapping) and isinstance(other, Mapping):
        return agreed.keys() == other.keys() and all(_alike(agreed[key], other[key]) for key in agreed)
    if isinstance(agreed, list | tuple) and isinstance(other, list | tuple):
        size = max((abs(value) for value in agreed if isinstance(value, float) and np.isfinite(value)), default=0.0)
        return len(agreed) == len(other) and all(_alike(*pair, size) for pair in zip(agreed, other, strict=True))
    if isinstance(agreed, float | np.ndarray) and isinstance(other, float | np.ndarray):
        one, second = np.asarray(agreed), np.asarray(other)
        if one.dtype.kind == second.dtype.kind == "f" and one.shape == second.shape:
            return bool(np.allclose(one, second, rtol=_ROUNDING, atol=_ROUNDING * size, equal_nan=True))
        return np.array_equal(one, second)
    return bool(agreed == other)


def _written(declaration: FederatedModel) -> dict[str, str]:
    return dict(getattr(declaration.builder, "written", {}))


def _write(groups: Mapping[str, xr.Dataset], target: Path, *, private: bool) -> None:
    """Write all of it or nothing; a confidential file is readable by its owner alone."""
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        if private:
            partial.touch(mode=0o600)
        idata.write(idata.from_groups(groups), partial)
        try:
            _read(partial)
        except Exception as error:
            remedy = "use fit.idata.to_netcdf, or fit with checkpoint=."
            raise DeclarationError(f"this fit cannot be read back ({_reason(error)}); {remedy}") from error
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, DataError) else f"{type(error).__name__}: {text}"


def _points(fit: Ended) -> Array:
    """Points of φ that results are computed from."""
    shared, arrived = fit.algorithm.result.shared, not unarrived(fit)
    if arrived and isinstance(shared, Point):
        return shared.estimate(fit.state)[None]
    weighted = weighted_points(fit) if arrived else None
    return np.zeros((0, fit.layout.size)) if weighted is None else weighted.points


def _reader(
    points: Array, values: Mapping[str, Array], dims: Mapping[str, Any], coords: Mapping[str, Any]
) -> SharedReader:
    """A reader of φ for the saved points alone."""

    def constrain(wanted: Array) -> Mapping[str, Array]:
        # Points are computed anew, with other last digits on another machine.
        if np.shape(wanted) != points.shape or not np.allclose(wanted, points, rtol=1e-9, atol=1e-9):
            raise DataError("new draws need a client's data, which are not here; use fedppl.load(..., clients=...).")
        return values

    return SharedReader(constrain, {k: None if v is None else tuple(v) for k, v in dims.items()}, coords)


def or_rebuilt(reader: SharedReader, rebuild: Callable[[], SharedReader]) -> SharedReader:
    """The reader of a file, and for other points one that is made when they are first asked for."""
    anew = functools.cache(rebuild)

    def constrain(wanted: Array) -> Mapping[str, Array]:
        try:
            return reader.constrain(wanted)
        except DataError:  # not the points of the file
            return anew().constrain(wanted)

    return reader._replace(constrain=constrain)


def _plain(group: xr.Dataset) -> xr.Dataset:
    """What NetCDF can hold: texts for objects."""
    changed = {name: group[name].astype(str) for name in group.variables if group[name].dtype == object}
    flags = {name: int(value) for name, value in group.attrs.items() if isinstance(value, bool | np.bool_)}
    return group.assign(changed).assign_attrs(flags)


# A client's part of a file: its personal state, and draws of its posterior --------------------------------------------

_MOST = 2**31  # bytes of draws in a file
DRAWS, CHAINS = 1000, 4  # of a client's posterior, unless others are asked for


class Kept(Mapping[str, Any]):
    """Personal states by client; an error for those not in the file: such clients would count as new ones."""

    def __init__(self, stored: Mapping[str, Any], withheld: Sequence[str]) -> None:
        self.stored, self.withheld = dict(stored), tuple(withheld)

    def __getitem__(self, key: str) -> Any:
        """The client's personal state."""
        if key in self.withheld:
            remedy = 'save where the fit was made with include="personal" (confidential).'
            raise DeclarationError(f"the personal state of client {key!r} is not in the file; {remedy}")
        return self.stored[key]

    def __iter__(self) -> Iterator[str]:
        """Over clients whose states are here."""
        return iter(self.stored)

    def __len__(self) -> int:
        """Number of these."""
        return len(self.stored)


def personal_of(fit: Ended, *, stored: bool) -> Kept:
    """Personal states to store; else only the ids of clients whose posteriors depend on theirs."""
    personal = fit.personal if isinstance(fit.personal, Kept) else Kept(fit.personal, ())
    if stored:
        for client_id in personal.withheld:
            _ = personal[client_id]  # raises the error
        return personal
    held = [client_id for client_id, value in personal.stored.items() if value is not None]
    return Kept({}, [*held, *personal.withheld] if fit.algorithm.result.reads_personal else ())


def drawn_of(fit: Any) -> dict[str, xr.Dataset]:
    """Draws of every client's posterior."""
    drawn: dict[str, xr.Dataset] = {}
    for client_id in fit.client_ids:
        drawn[client_id] = idata.as_dataset(fit.client(client_id), "posterior")
        if (size := sum(draws.nbytes for draws in drawn.values())) > _MOST:
            taken = f"{size / 2**30:.1f} GiB, more than {_MOST / 2**30:.1f}"
            count = f"{len(drawn)} of {len(fit.client_ids)} clients"
            raise DeclarationError(f'draws of {count} take {taken}; save with include="personal".')
    return drawn


def stored_draws(fit: Ended, client_id: str, drawing: Drawing, *, predict: Any, groups: Any) -> Any:
    """Posterior of a client whose data are not here: the draws in the file, or an error with the remedy."""
    if fit.drawn is None:
        remedy = "its posterior is drawn there, into a file in the folder= of its client_app: read it there"
        raise DeclarationError(f"client {client_id!r} is a site of its own; {remedy}.")
    reason = ""
    if client_id not in fit.drawn:
        reason = "no draws of it were saved"
    elif predict is not None or groups:
        reason = f"{'predictions' if predict is not None else f'groups={groups!r}'} need them"
    elif drawing != (DRAWS, CHAINS, fit.seed):
        reason = f"only the saved draws are here, {CHAINS} chains of {DRAWS} by the fit's seed"
    if reason:
        remedy = "use fedppl.load(path, model, clients=...)"
        raise DeclarationError(f"the data of client {client_id!r} are not here, and {reason}: {remedy}.")
    return idata.from_groups({"posterior": fit.drawn[client_id].copy(deep=True)})


def digest(group: xr.Dataset) -> str:
    """Digest of names, dims and values, the same before a file is written and after: of any width and order.

    >>> digest(xr.Dataset({"x": ("d", [1, 2])})) == digest(xr.Dataset({"x": ("d", [1.0, 2.0])}))
    True
    """
    state = hashlib.sha256()
    for name in sorted(map(str, group.variables)):
        variable = group.variables[name]
        values = _comparable(np.asarray(variable.values))
        head = repr((name, tuple(map(str, variable.dims)), values.shape)).encode(errors="surrogatepass")
        for part in (head, values.tobytes()):
            state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def _comparable(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers as float64 with one NaN, and all else as texts, each after its length."""
    if values.dtype.kind in "biuf":
        reals = np.ascontiguousarray(values, dtype="<f8")
        return np.where(np.isnan(reals), np.nan, reals)
    if values.dtype.kind in "mM":
        values = values.astype(f"{values.dtype.kind}8[ns]")
    texts = [str(value).encode(errors="surrogatepass") for value in values.ravel()]
    return np.frombuffer(b"".join(len(text).to_bytes(8, "little") + text for text in texts), dtype=np.uint8)
