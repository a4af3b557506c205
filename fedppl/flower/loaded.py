"""What a site's `load_data` has returned, and a digest that is another where the data are others.

What can be told of no content, such as a lazy frame, which pickles to a plan, has no digest.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.lib.npyio import NpzFile

from fedppl.data import columns, frames

_PLAIN = (str, bytes, bool, int, float, complex, type(None), decimal.Decimal, np.generic)
_TIMES = (datetime.date, datetime.time, datetime.timedelta, pd.Period, type(pd.NA))  # with their subclasses of pandas


def settled(loaded: Any) -> Any:
    """Data that are read from their file when they are asked for, read now: what is looked at is what is used."""
    if isinstance(loaded, NpzFile):
        return dict(loaded)
    return loaded.load() if isinstance(loaded, xr.Dataset) else loaded


def digest(loaded: Any) -> str:
    """Digest of data: of names, dtypes, shapes and values.

    Raises
    ------
    TypeError
        If it is not known what the data are made of.
    """
    state = hashlib.sha256()
    _add(state, loaded, "the data")
    return state.hexdigest()


def _add(state: Any, value: Any, where: str) -> None:
    _head(state, type(value).__qualname__)
    if isinstance(value, xr.Dataset):  # a mapping too, but not to its coordinates
        for name, variable in value.variables.items():
            _head(state, name, variable.dims)
            _add_array(state, variable.to_numpy(), f"{where}[{name!r}]")
    elif isinstance(value, Mapping):
        _head(state, len(value))
        for name, one in value.items():
            _head(state, name)
            _add(state, one, f"{where}[{name!r}]")
    elif isinstance(value, tuple | list) and any(not isinstance(one, _PLAIN) for one in value):
        _head(state, len(value))
        for i, one in enumerate(value):
            _add(state, one, f"{where}[{i}]")
    elif isinstance(value, pd.Series | pd.Index) or frames.is_frame(value):
        if isinstance(columns.read(value), columns.narwhals().LazyFrame):
            raise TypeError(f"{where} are a lazy frame, and a worker has to see values; collect it in load_data")
        pickle.Pickler(_Writer(state), protocol=5).dump(value)
    elif isinstance(value, np.ma.MaskedArray):
        _add_array(state, np.ma.getmaskarray(value), where)
        _add_array(state, np.ma.getdata(value), where)
    else:
        _add_array(state, np.asarray(value), where)  # as models see it


def _add_array(state: Any, array: Any, where: str) -> None:
    _head(state, array.dtype.descr, array.shape)
    if not array.dtype.hasobject:
        state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.nbytes else b"")
        return
    for one in array.ravel().tolist():
        if not isinstance(one, _PLAIN + _TIMES):
            raise TypeError(
                f"{where} hold {type(one).__name__}, and a worker has to see values; return arrays of numbers, or texts"
            )
        _head(state, type(one).__qualname__, one)


def _head(state: Any, *parts: Any) -> None:
    """Add short parts, so that no other parts have the same bytes."""
    text = repr(parts).encode(errors="surrogatepass")
    state.update(len(text).to_bytes(8, "little") + text)


class _Writer:
    """A file for `pickle` whose bytes go to a digest: large data are not copied."""

    def __init__(self, state: Any) -> None:
        self.write = state.update
