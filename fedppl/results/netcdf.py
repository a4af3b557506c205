"""A NetCDF file, looked through before it is read: it leads nowhere else, and takes no more than it holds."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from fedppl.types import DataError

if TYPE_CHECKING:  # it is loaded when the first file is read
    import h5py

# Bytes that a file may ask for in memory: so many, or so many times its own. Files of ours are not compressed.
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
            one, depth = waiting.pop()
            _require(depth <= _DEEPEST, f"groups are nested more than {_DEEPEST} deep")
            declared += _attributes(one, size, most)
            if isinstance(one, h5py.Dataset):
                declared += _values(one, size, most)
            else:
                for name in one:
                    _require(type(one.get(name, getlink=True)) is h5py.HardLink, f"{name!r} is a link to elsewhere")
                    found = one[name]
                    _require(found not in seen, f"{name!r} stands in it twice")
                    seen.add(found)
                    waiting.append((found, depth + 1))
            _require(declared <= most, f"it declares {declared:.3g} bytes or more, and has {size}")


def digest(group: xr.Dataset) -> str:
    """Digest of names, dims and values, whatever their width and order: alike before a file is written and after.

    >>> digest(xr.Dataset({"x": ("d", [1, 2])})) == digest(xr.Dataset({"x": ("d", [1.0, 2.0])}))
    True
    """
    state = hashlib.sha256()
    for name in sorted(map(str, group.variables)):
        variable = group.variables[name]
        values = _plain(np.asarray(variable.values))
        head = repr((name, tuple(map(str, variable.dims)), values.shape)).encode(errors="surrogatepass")
        for part in (head, values.tobytes()):
            state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def digests(groups: Mapping[str, xr.Dataset]) -> dict[str, str]:
    """Of each group that holds something."""
    return {name: digest(group) for name, group in groups.items() if group.data_vars}


def _plain(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Reals as float64 with one NaN, and all else as texts, whose lengths stand before them."""
    if values.dtype.kind in "biuf":
        reals = np.ascontiguousarray(values, dtype="<f8")
        return np.where(np.isnan(reals), np.nan, reals)
    if values.dtype.kind in "mM":
        values = values.astype(f"{values.dtype.kind}8[ns]")
    texts = [str(one).encode(errors="surrogatepass") for one in values.ravel()]
    return np.frombuffer(b"".join(len(one).to_bytes(8, "little") + one for one in texts), dtype=np.uint8)


def _values(one: h5py.Dataset, size: int, most: int) -> int:
    """Bytes that a dataset takes in memory."""
    import h5py

    _require(not one.is_virtual and not one.external, f"{one.name!r} has its values in another file")
    made = one.id.get_create_plist()
    filters = {made.get_filter(k)[0] for k in range(made.get_nfilters())}
    _require(made.get_nfilters() == len(filters), f"{one.name!r} is packed twice by one filter")
    chunk = math.prod(one.chunks or ()) * max(int(one.dtype.itemsize), 1) if one.chunks else 0
    held = math.prod(int(n) for n in one.shape or ()) * max(int(one.dtype.itemsize), 1)
    _require(chunk <= 16 * max(held, 2**20), f"{one.name!r} has chunks of {chunk:.3g} bytes for {held:.3g}")
    _require(filters <= _FILTERS, f"{one.name!r} is packed by a filter that NetCDF has not")
    count: int = math.prod(int(n) for n in one.shape or ())
    # In HDF5 a text takes a place that points to it; many may point to one.
    declared = count * max(int(one.dtype.itemsize), 1)
    _require(declared <= most, f"{one.name!r} declares {declared:.3g} bytes, and the file has {size}")
    text = h5py.check_string_dtype(one.dtype)
    _require(text is not None or one.dtype.kind in "iuf", f"{one.name!r} holds neither numbers nor texts")
    if text is not None and text.length is None:
        declared += _texts(one, max(1, most // max(size, 1)), most)
    return declared


def _texts(one: h5py.Dataset, step: int, most: int) -> int:
    """Bytes of texts, of which no more are read at once than fit in where each were as long as the file."""
    total = 0
    for lead in np.ndindex(one.shape[:-1]):
        for start in range(0, one.shape[-1] if one.shape else 1, step):
            place = (*lead, slice(start, start + step)) if one.shape else ()
            total += sum(len(text) for text in np.ravel(one[place]))
            _require(total <= most, f"{one.name!r} has texts of more than {most} bytes")
    return total


def _attributes(one: Any, size: int, most: int) -> int:
    """Bytes that the attributes of a group or a dataset may take."""
    import h5py

    total = 0
    for name in one.attrs:
        found = h5py.h5a.open(one.id, name.encode(errors="surrogateescape"))
        count = math.prod(int(n) for n in found.shape)
        # A text, or a list of references, is no longer than the file.
        most_of_it = count * (size if found.dtype.kind == "O" else found.dtype.itemsize)
        _require(
            most_of_it <= most, f"the attribute {name!r} of {one.name!r} declares more than a file of {size} bytes"
        )
        texts = h5py.check_string_dtype(found.dtype) is not None
        total += sum(len(text) for text in np.ravel(one.attrs[name])) if texts else count * found.dtype.itemsize
        _require(total <= most, f"the attributes of {one.name!r} have more than {most} bytes")
    return total


def _require(holds: Any, rule: str) -> None:
    if not holds:
        raise DataError(rule)
