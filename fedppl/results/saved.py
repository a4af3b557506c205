"""A fit in a NetCDF file, which ArviZ reads too: the shared posterior, the rounds, and the server's last state.

Of clients it has what they sent, and more only where the caller asks for it.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr

from fedppl.contracts import AnyAlgorithm, Point, Posterior, Sampler, SharedReader
from fedppl.gaussian import Gaussian
from fedppl.model.declaration import FederatedModel
from fedppl.numerics.streams import stream
from fedppl.results import idata
from fedppl.results.records import Ended, Record, rounds_dataset, unarrived
from fedppl.results.shared import corrected, weighted_points
from fedppl.settings import one_line, shown
from fedppl.storage import codec
from fedppl.types import Array, DataError, DeclarationError, Layout, Status, Variable

if TYPE_CHECKING:  # it is loaded when the first file is read
    import h5py


logger = logging.getLogger(__name__)

_GROUP, _STATE, _FORMAT = "fedppl", "state", 4
_INCLUDED = ("personal", "clients")


class Saved(NamedTuple):
    """What a file holds."""

    algorithm: str
    settings: Mapping[str, str]
    agreement: Any  # of a formula's clients
    written: Mapping[str, str]  # a declaration as text: a formula
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
    """Write what all clients share, and the server's state; of clients what `include` names, and never rows.

    The file is read back before it replaces another, and deleted where it cannot be read.
    """
    target = _target(path)
    if include is not None and include not in _INCLUDED:
        raise DeclarationError(f'include={shown(include)} must be None, "personal" or "clients".')
    personal = personal_of(fit, stored=include is not None)
    drawn = drawn_of(fit, client) if include == "clients" else {}
    names = [name for name in ("posterior", "point_estimate", "fit", "rounds") if name in result]
    groups = {name: idata.as_dataset(result, name) for name in names}
    groups |= {f"client_{k}": draws for k, draws in enumerate(drawn.values())}
    groups = {name: _plain(group) for name, group in groups.items()}
    content = _content(fit, personal, list(drawn), groups)
    groups[_GROUP] = _state_group(codec.encode(content), fit.algorithm.name, include)
    _write(groups, target, private=include is not None)
    if include is not None:
        what = "draws of clients' local variables" if drawn else "clients' personal states"
        logger.warning("%s holds %s: it is confidential", target, what)


def _content(fit: Ended, personal: Kept, drawn: list[str], groups: Mapping[str, xr.Dataset]) -> dict[str, Any]:
    """All that `Saved` has beside the groups, and digests of these."""
    points = _points(fit)
    return {
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
        raise DataError(
            f"{str(path)!r} is no fit that fedppl saved, or is damaged ({_reason(error)}); use a copy, or fit again."
        ) from error


def _read(path: Path) -> Saved:
    require_plain(path)
    groups = idata.read(path)
    state = groups.pop(_GROUP)
    if int(state.attrs["format"]) != _FORMAT:
        raise DataError(f"it has format {int(state.attrs['format'])}, and this version of fedppl reads {_FORMAT}")
    raw = np.asarray(state[_STATE]).astype(np.uint8).tobytes()
    if hashlib.sha256(raw).hexdigest() != state.attrs["digest"]:
        raise DataError("the server's state is not what was saved")
    content = content_of(codec.decode(raw))
    if changed := [name for name, saved in content["groups"].items() if digest(groups[name]) != saved]:
        raise DataError(f"{changed} are not what was saved")
    variables, prior, is_gaussian = content["layout"]
    drawn = {client_id: groups[f"client_{k}"] for k, client_id in enumerate(content["drawn"])}
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
        {name: groups[name] for name in content["groups"] if not name.startswith("client_")},
        Kept(content["personal"], content["withheld"]),
        drawn,
    )


def require_same(saved: Saved, algorithm: AnyAlgorithm, declaration: FederatedModel) -> None:
    """Refuse another algorithm or declaration than the file's."""
    shared = declaration.shared
    if (saved.algorithm, dict(saved.settings)) != (algorithm.name, dict(algorithm.settings)):
        listed = ", ".join(f"{name}={value}" for name, value in saved.settings.items())
        raise DeclarationError(
            f"the file is of {saved.algorithm}({listed}), and algorithm= is {algorithm!r}; pass the one that ran."
        )
    if (names := tuple(variable.name for variable in saved.layout.variables)) != shared:
        raise DeclarationError(f"the file is of a fit that shares {list(names)}, and this model shares {list(shared)}.")
    theirs, ours = saved.written, _written(declaration)
    if other := [name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)]:
        before, here = (", ".join(f"{k} {one_line(one.get(k), 300)}" for k in sorted(other)) for one in (theirs, ours))
        raise DeclarationError(f"the file is of a fit with {before}, and this model has {here}; pass what was fitted.")


def _written(declaration: FederatedModel) -> dict[str, str]:
    """A builder's declaration as text, where it is a formula."""
    return dict(getattr(declaration.builder, "written", {}))


def _target(path: Any) -> Path:
    """The path of a file that can be written; checked before draws are made for it."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise DeclarationError(f"path={shown(path)} must be the path of a file, such as 'run.nc'.")
    target = Path(os.fsdecode(path))
    if target.is_dir() or not target.parent.is_dir():
        why = "is a folder" if target.is_dir() else "lies in a folder that does not exist"
        raise DeclarationError(f"path={str(target)!r} {why}; name a file, such as 'run.nc'.")
    return target


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
            raise DeclarationError(
                f"this fit cannot be saved: it cannot be read back ({_reason(error)}). Write fit.idata by its "
                "to_netcdf, or start the fit with checkpoint=."
            ) from error
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _state_group(raw: bytes, algorithm: str, include: str | None) -> xr.Dataset:
    """The group with the encoded content, which `load` reads first."""
    attrs = {"algorithm": algorithm, "format": _FORMAT, "digest": hashlib.sha256(raw).hexdigest()}
    attrs["confidential"] = {
        None: "no: of clients it has what they sent alone",
        "personal": "yes: it holds clients' personal states",
        "clients": "yes: it holds draws of clients' local variables",
    }[include]
    return xr.Dataset({_STATE: ("byte", np.frombuffer(raw, dtype=np.uint8))}, attrs=attrs)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, DataError) else f"{type(error).__name__}: {text}"


def _points(fit: Ended) -> Array:
    """Points of φ that results are computed from."""
    shared = fit.algorithm.result.shared
    if unarrived(fit):
        return np.zeros((0, fit.layout.size))
    if isinstance(shared, Posterior):
        weighted = weighted_points(shared.gaussian(fit.state), corrected(fit))
        return np.zeros((0, fit.layout.size)) if weighted is None else weighted.points
    return shared.estimate(fit.state)[None] if isinstance(shared, Point) else np.zeros((0, fit.layout.size))


def _reader(
    points: Array, values: Mapping[str, Array], dims: Mapping[str, Any], coords: Mapping[str, Any]
) -> SharedReader:
    """A reader of φ for the saved points alone."""

    def constrain(wanted: Array) -> Mapping[str, Array]:
        # Points are computed anew, with other last digits on another machine.
        if np.shape(wanted) != points.shape or not np.allclose(wanted, points, rtol=1e-9, atol=1e-9):
            raise DataError(
                "this fit was loaded without its clients' data, and new draws need one of them: "
                "fedppl.load(path, model, clients=...)."
            )
        return values

    return SharedReader(constrain, {k: None if v is None else tuple(v) for k, v in dims.items()}, coords)


def _plain(group: xr.Dataset) -> xr.Dataset:
    """What NetCDF can hold: texts for objects."""
    changed = {name: group[name].astype(str) for name in group.variables if group[name].dtype == object}
    attrs = {name: int(value) if isinstance(value, bool | np.bool_) else value for name, value in group.attrs.items()}
    return group.assign(changed).assign_attrs(attrs)


# A client's part of a file: its personal state, and draws of its posterior --------------------------------------------

_MOST = 2**31  # bytes of draws in a file
DRAWS, CHAINS = 1000, 4  # of a client's posterior, unless others are asked for


class Kept(Mapping[str, Any]):
    """Personal states by client; an error for those that are not in the file.

    Without its state a client would count as a new one, with other numbers.
    """

    def __init__(self, stored: Mapping[str, Any], withheld: Sequence[str]) -> None:
        self.stored, self.withheld = dict(stored), tuple(withheld)

    def __getitem__(self, key: str) -> Any:
        """The client's personal state."""
        if key in self.withheld:
            raise DeclarationError(
                f"the personal state of client {key!r} is not in the file, and its posterior depends on it. Where the "
                'fit was made, save it with include="personal" (confidential), or go on there.'
            )
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
        if personal.withheld:
            _ = personal[personal.withheld[0]]  # raises the error
        return personal
    if not fit.algorithm.result.reads_personal:
        return Kept({}, ())
    return Kept({}, (*(k for k, value in personal.stored.items() if value is not None), *personal.withheld))


def drawn_of(fit: Ended, client: Callable[[str], Any]) -> dict[str, xr.Dataset]:
    """Draws of every client's posterior."""
    drawn: dict[str, xr.Dataset] = {}
    total = 0
    for client_id in fit.client_ids:
        drawn[client_id] = idata.as_dataset(client(client_id), "posterior")
        total += drawn[client_id].nbytes
        if total > _MOST:
            raise DeclarationError(
                f"draws of {len(drawn)} of {len(fit.client_ids)} clients take {total / 2**30:.1f} GiB, more than "
                f'{_MOST / 2**30:.1f}. Save with include="personal" and bring the data back, or write fit.client(id, '
                "draws=...) to a file of each client."
            )
    return drawn


def stored_draws(
    fit: Ended, client_id: str, *, predict: Any, groups: Any, draws: int, chains: int, random_seed: int | None
) -> Any:
    """Posterior of a client whose data are not here: the draws in the file, or an error with the remedy."""
    if fit.drawn is None:
        raise DeclarationError(
            f"client {client_id!r} is a site of its own, and its posterior is drawn there. Give the site's client_app "
            "a folder=, which has it when the run is over."
        )
    remedy = "fedppl.load(path, model, clients=...) with the client's data draws anew."
    if client_id not in fit.drawn:
        raise DeclarationError(
            f"the data of client {client_id!r} are not here, and no draws of it were saved: {remedy} A file that "
            'fit.save wrote with include="clients" has draws.'
        )
    if predict is not None or groups:
        what = "predictions" if predict is not None else f"groups={groups!r}"
        raise DeclarationError(f"the data of client {client_id!r} are not here, and {what} need them: {remedy}")
    if (draws, chains) != (DRAWS, CHAINS) or random_seed not in (None, fit.seed):
        raise DeclarationError(
            f"of client {client_id!r} only the saved draws are here, {CHAINS} chains of {DRAWS} by the fit's seed: "
            f"leave draws=, chains= and random_seed= out, or {remedy}"
        )
    return idata.from_groups({"posterior": fit.drawn[client_id].copy(deep=True)})


# Checks of a file's content: types and shapes first, then that the state gives finite numbers -------------------------

_CONTENT: dict[str, type | tuple[type, ...]] = {
    "algorithm": str,
    "settings": dict,
    "agreement": object,
    "written": dict,
    "state": object,
    "layout": list,
    "fingerprint": str,
    "density": tuple,
    "clients": tuple,
    "records": list,
    "status": Status,
    "message": str,
    "seed": int,
    "seconds": (float, int),
    "told": dict,
    "points": np.ndarray,
    "values": dict,
    "dims": dict,
    "coords": dict,
    "personal": dict,
    "withheld": tuple,
    "drawn": list,
    "groups": dict,
}


def content_of(content: Any) -> dict[str, Any]:
    """The content of a file, where it is complete and of the right types."""
    _require(type(content) is dict and set(content) == set(_CONTENT), "it holds something else")
    for name, kind in _CONTENT.items():
        _require(isinstance(content[name], kind), f"{name!r} is of type {type(content[name]).__name__}")
    clients, layout = content["clients"], content["layout"]
    _texts("clients", clients)
    _texts("settings", (*content["settings"], *content["settings"].values()))
    _texts("written", (*content["written"], *content["written"].values()))
    _texts("groups", (*content["groups"], *content["groups"].values()))
    _require(len(set(clients)) == len(clients) > 0, "its clients are none, or not distinct")
    for name in ("withheld", "drawn", "personal", "told"):
        _require(set(content[name]) <= set(clients), f"{name!r} names clients that are none")
    _require(0 <= content["seed"], "its seed is negative")
    _require(all(type(one) is Record for one in content["records"]), "its records are none")
    _require(len(layout) == 3 and type(layout[0]) is tuple and type(layout[2]) is bool, "its layout is none")
    size = sum(_size(variable) for variable in layout[0])
    prior, points = layout[1], content["points"]
    _require(type(prior) is Gaussian and _finite(prior, size), f"its prior is none of {size} coordinates")
    _require(points.ndim == 2 and points.shape[1] == size, f"its points have not {size} coordinates")
    for name, values in content["values"].items():
        right = isinstance(values, np.ndarray) and values.ndim >= 1 and len(values) == len(points)
        _require(right, f"the values of {name!r} are none of its points")
    checked: dict[str, Any] = content
    return checked


def require_sound(fit: Ended) -> None:
    """Raise `DataError` for a state that is not of the algorithm, or does not give finite numbers."""
    started = fit.algorithm.init(fit.layout, fit.client_ids, stream((fit.seed, 0, 0)))
    if type(started) is not type(fit.state):
        raise DataError(
            f"its state is {type(fit.state).__name__}, and {fit.algorithm.name} has {type(started).__name__}"
        )
    result, size = fit.algorithm.result, fit.layout.size
    try:
        arrived = not unarrived(fit)
        shared = result.shared if arrived or isinstance(result.shared, Posterior) else None
        if isinstance(shared, Posterior):  # one that was broken off has finite numbers too
            _require(_finite(shared.gaussian(fit.state), size), "its posterior has missing or infinite numbers")
        elif isinstance(shared, Point):
            point = np.asarray(shared.estimate(fit.state), dtype=float)
            _require(point.shape == (size,) and np.all(np.isfinite(point)), "its estimate is not all finite")
        elif isinstance(shared, Sampler):
            draw = np.asarray(shared.draw(fit.state, 1, stream((fit.seed, 1))), dtype=float)
            _require(draw.shape == (1, size) and np.all(np.isfinite(draw)), "its draws are not all finite")
        if arrived:
            _ = result.final_message(fit.state, fit.client_ids[0])
        _ = result.details(fit.state), rounds_dataset(fit.records, fit.client_ids)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"its state cannot be read: {type(error).__name__}: {error!s:.200}") from error


def _size(variable: Any) -> int:
    """Number of coordinates of a variable, by whole numbers that cannot overflow."""
    _require(type(variable) is Variable and type(variable.name) is str, "a variable is none")
    shape, dims = variable.shape, variable.dims
    _require(type(shape) is tuple and all(type(n) is int and n >= 0 for n in shape), "the shape of a variable is none")
    _require(dims is None or type(dims) is tuple, "the dims of a variable are none")
    _require(type(variable.transform) is str and type(variable.binary) is bool, "a variable is none")
    return math.prod(shape)


def _finite(prior: Gaussian, size: int) -> bool:
    """Whether a Gaussian has finite natural parameters of so many coordinates."""
    linear, precision = (np.asarray(part) for part in prior)
    right = linear.shape == (size,) and precision.shape in ((size, size), (size,))
    return bool(right and np.all(np.isfinite(linear)) and np.all(np.isfinite(precision)))


def _texts(name: str, values: Any) -> None:
    _require(all(type(one) is str for one in values), f"{name!r} are no texts")


def _require(holds: Any, rule: str) -> None:
    if not holds:
        raise DataError(rule)


# Checks of a NetCDF file before it is read: no links, and no more memory than its size accounts for -------------------

# Bytes that a file may take in memory: so many, or so many times its size. Files of fedppl are not compressed.
_LEAST, _TIMES = 2**28, 16
_FILTERS = {1, 2, 3}  # deflate, shuffle, fletcher32
_DEEPEST = 8


def require_plain(path: Path) -> None:
    """Refuse links, data in other files, filters that are not NetCDF's, and more bytes than the file can account for.

    Raises
    ------
    DataError
        By the first rule that is broken.
    OSError, RuntimeError, KeyError
        Where HDF5 cannot make sense of the file.
    """
    import h5py

    size = path.stat().st_size
    most = max(_LEAST, _TIMES * size)
    with h5py.File(path, "r") as file:
        root, declared = file["/"], 0
        seen, waiting = {root}, [(root, 0)]
        while waiting:
            node, depth = waiting.pop()
            _require(depth <= _DEEPEST, f"groups are nested more than {_DEEPEST} deep")
            declared += _attributes(node, size, most)
            if isinstance(node, h5py.Dataset):
                declared += _values(node, size, most)
            else:
                for name in node:
                    _require(type(node.get(name, getlink=True)) is h5py.HardLink, f"{name!r} is a link to elsewhere")
                    child = node[name]
                    _require(child not in seen, f"{name!r} stands in it twice")
                    seen.add(child)
                    waiting.append((child, depth + 1))
            _require(declared <= most, f"it declares {declared:.3g} bytes or more, and has {size}")


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


def _values(dataset: h5py.Dataset, size: int, most: int) -> int:
    """Bytes that a dataset takes in memory."""
    import h5py

    name, width = dataset.name, max(int(dataset.dtype.itemsize), 1)
    _require(not dataset.is_virtual and not dataset.external, f"{name!r} has its values in another file")
    properties = dataset.id.get_create_plist()
    filters = {properties.get_filter(k)[0] for k in range(properties.get_nfilters())}
    _require(properties.get_nfilters() == len(filters), f"{name!r} is packed twice by one filter")
    # In HDF5 a text takes a place that points to it; many may point to one.
    declared = math.prod(int(n) for n in dataset.shape or ()) * width
    chunk = math.prod(dataset.chunks or ()) * width if dataset.chunks else 0
    _require(chunk <= 16 * max(declared, 2**20), f"{name!r} has chunks of {chunk:.3g} bytes for {declared:.3g}")
    _require(filters <= _FILTERS, f"{name!r} is packed by a filter that NetCDF has not")
    _require(declared <= most, f"{name!r} declares {declared:.3g} bytes, and the file has {size}")
    text = h5py.check_string_dtype(dataset.dtype)
    _require(text is not None or dataset.dtype.kind in "iuf", f"{name!r} holds neither numbers nor texts")
    if text is not None and text.length is None:
        declared += _texts_of(dataset, max(1, most // max(size, 1)), most)
    return declared


def _texts_of(dataset: h5py.Dataset, step: int, most: int) -> int:
    """Bytes of texts, read in parts that fit in memory even if each text is as long as the file."""
    total = 0
    for lead in np.ndindex(dataset.shape[:-1]):
        for start in range(0, dataset.shape[-1] if dataset.shape else 1, step):
            place = (*lead, slice(start, start + step)) if dataset.shape else ()
            total += sum(len(text) for text in np.ravel(dataset[place]))
            _require(total <= most, f"{dataset.name!r} has texts of more than {most} bytes")
    return total


def _attributes(node: Any, size: int, most: int) -> int:
    """Bytes that the attributes of a group or a dataset may take."""
    import h5py

    total = 0
    for name in node.attrs:
        attribute = h5py.h5a.open(node.id, name.encode(errors="surrogateescape"))
        count = math.prod(int(n) for n in attribute.shape)
        # A text, or a list of references, is no longer than the file.
        largest = count * (size if attribute.dtype.kind == "O" else attribute.dtype.itemsize)
        _require(largest <= most, f"the attribute {name!r} of {node.name!r} declares more than a file of {size} bytes")
        texts = h5py.check_string_dtype(attribute.dtype) is not None
        total += sum(len(text) for text in np.ravel(node.attrs[name])) if texts else count * attribute.dtype.itemsize
        _require(total <= most, f"the attributes of {node.name!r} have more than {most} bytes")
    return total
