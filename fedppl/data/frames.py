"""Clients' data as people have them: data frames with a grouping column, frames by client, tuples; to arrays by name.

pandas, polars, pyarrow and whatever else narwhals reads, and xarray's Datasets.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from fedppl.types import Array, DataError

if TYPE_CHECKING:
    import narwhals.stable.v2 as nw

_EPOCH = np.datetime64("1970-01-01", "us")
_DAY = np.timedelta64(1, "D")


@functools.cache
def _narwhals() -> Any:
    """Loaded when the first table comes: it takes a tenth of what importing all of fedppl does."""
    import narwhals.stable.v2 as nw

    return nw


def is_frame(data: Any) -> bool:
    """Whether data are a table with named columns."""
    if isinstance(data, xr.Dataset) or data is None:
        return data is not None
    if isinstance(data, Mapping | tuple | np.ndarray):  # of which narwhals makes none either
        return False
    nw = _narwhals()
    return isinstance(nw.from_native(data, pass_through=True), nw.DataFrame | nw.LazyFrame)


def column_names(frame: Any) -> set[str]:
    """Names of a frame's columns."""
    if isinstance(frame, xr.Dataset):
        return {str(name) for name in (*frame.data_vars, *frame.coords)}
    return {str(name) for name in _narwhals().from_native(frame).collect_schema()}


def named(data: Any, names: Sequence[str] | None, whose: str) -> Any:
    """One client's data by name: mappings as they are, columns of a frame, and arrays in the order of `names`.

    Parameters
    ----------
    data
        A mapping, a frame, or a tuple of arrays.
    names
        The names that are wanted, in their order: of a frame these columns alone. None for whatever there is.
    whose
        Beginning of errors, such as ``client 'a'``.
    """
    if is_frame(data):
        return columns(data, names, whose)
    if isinstance(data, tuple):
        if names is None or len(data) > len(names):
            known = "the builder takes any name" if names is None else f"the builder takes {len(names)}: {list(names)}"
            raise DataError(
                f"{whose}: data are a tuple of {len(data)}, and {known}; pass a mapping from name to array."
            )
        return dict(zip(names, data, strict=False))
    return data


def raw(data: Any, names: Sequence[str] | None, whose: str) -> Any:
    """One client's data by name with texts as they are, and categories as their texts; None where a text is missing."""
    if is_frame(data):
        return columns(data, names, whose, texts=True)
    return {name: np.asarray(value) for name, value in data.items()} if isinstance(data, Mapping) else data


def columns(frame: Any, names: Sequence[str] | None, whose: str, *, texts: bool = False) -> dict[str, Array]:
    """Columns of a frame as arrays of numbers or of booleans.

    Categories are numbered in the order that they have; dates and times are days since 1970, durations days; what is
    missing is NaN. Texts have no numbers that all clients would agree on, and are refused, unless `texts` are wanted:
    then they, and categories, are arrays of objects.
    """
    if isinstance(frame, xr.Dataset):
        found = [str(name) for name in (*frame.data_vars, *frame.coords)]
        table: Any = {name: frame[name].to_numpy() for name in found}
    else:
        nw = _narwhals()
        read = nw.from_native(frame)
        eager = read.collect() if isinstance(read, nw.LazyFrame) else read
        found, table = list(eager.columns), eager
    wanted = found if names is None else [name for name in names if name in found]
    if names is not None and not wanted:
        raise DataError(f"{whose}: the frame has the columns {found[:20]}, and {list(names)} are wanted; rename them.")
    text = {name for name in wanted if texts and _is_text(table[name])}
    return {
        name: _texts(table[name]) if name in text else _numbers(table[name], f"{whose}: column {name!r}")
        for name in wanted
    }


def _is_text(column: Any) -> bool:
    nw = _narwhals()
    if not isinstance(column, nw.Series):
        return np.asarray(column).dtype.kind in "OUS"
    if isinstance(column.dtype, nw.Categorical | nw.Enum | nw.String):
        return True
    return column.dtype == nw.Object and any(isinstance(value, str) for value in column.to_list())


def _texts(column: Any) -> Array:
    """Texts, None where one is missing."""
    nw = _narwhals()
    values = column.to_list() if isinstance(column, nw.Series) else np.asarray(column).tolist()
    found = np.empty(len(values), dtype=object)
    found[:] = [None if value is None or value != value else str(value) for value in values]
    return found


def _numbers(column: Any, what: str) -> Array:
    nw = _narwhals()
    if not isinstance(column, nw.Series):
        return _of_numpy(np.asarray(column), what)
    kind = column.dtype
    if isinstance(kind, nw.Categorical | nw.Enum):
        return _codes(column)
    if kind.is_numeric() or kind == nw.Boolean:
        if not column.null_count():
            return _of_numpy(column.to_numpy(), what)
        return _of_numpy(column.cast(nw.Float64).to_numpy(), what)
    if kind.is_temporal() and kind != nw.Time:
        return _of_numpy(column.to_numpy(), what)
    values = column.to_list()
    if kind == nw.Object and any(value is not None for value in values):
        plain = [np.nan if value is None else value for value in values]
        if all(isinstance(value, bool | int | float | np.generic) for value in plain):
            return _of_numpy(np.array(plain, dtype=float), what)
    raise _not_numeric(what, str(kind), values)


def _of_numpy(values: Array, what: str) -> Array:
    if values.dtype.kind in "biufc":
        return values
    if values.dtype.kind == "M":
        return np.asarray(_days(values.astype("datetime64[us]") - _EPOCH))
    if values.dtype.kind == "m":
        return np.asarray(_days(values))
    raise _not_numeric(what, str(values.dtype), values.ravel()[:20].tolist())


def _days(spans: Any) -> Array:
    days: Array = spans / _DAY
    return np.where(np.isnat(spans), np.nan, days)


def _codes(column: nw.Series[Any]) -> Array:
    """Places among the categories, in their order."""
    places = {value: float(place) for place, value in enumerate(column.cat.get_categories().to_list())}
    values = [places.get(value, np.nan) for value in column.to_list()]  # what is missing is no category
    codes = np.array(values)
    return codes if np.any(np.isnan(codes)) else codes.astype(np.int64)


def _not_numeric(what: str, kind: str, values: Sequence[Any]) -> DataError:
    shown = sorted({repr(value) for value in values if value is not None})[:4]
    return DataError(
        f"{what} has the type {kind} ({', '.join(shown)}), and a model computes with numbers: declare the model by "
        "fedppl.formula, which agrees on levels, or number its values alike at all clients."
    )


def by_client(
    data: Any, by: Hashable | Sequence[Hashable] | None, names: Sequence[str] | None, *, texts: bool = False
) -> Any:
    """Clients' data from one table and the column, or columns, that say whose each row is.

    Groups that pandas or polars have made already, and mappings from client to data, need no column. The order is that
    of first appearance. Missing values in the column are an error.
    """
    if by is None:
        if is_frame(data):
            raise DataError("data are one table; say by=, the column that tells clients apart, or pass {id: table}.")
        if type(data).__name__.endswith("GroupBy"):
            return {_unwrapped(key): frame for key, frame in data}
        return data
    if not is_frame(data):
        raise DataError(f"by={by!r} is for one table, and data are {type(data).__name__}; leave by= out.")
    keys = [by] if isinstance(by, str) or not isinstance(by, Sequence) else list(by)
    ids, first = _groups(data, keys)
    order = np.argsort(ids, kind="stable")
    ends = np.flatnonzero(np.diff(ids[order])) + 1
    table = columns(data, names if names is not None else _others(data, keys), "data", texts=texts)
    split = {name: np.split(values[order], ends) for name, values in table.items()}
    return {key: {name: parts[place] for name, parts in split.items()} for place, key in enumerate(first)}


def _groups(data: Any, keys: Sequence[Any]) -> tuple[Array, list[Any]]:
    """For each row the number of its group, in the order of first appearance, and the groups' names."""
    if isinstance(data, xr.Dataset):
        found: Iterable[str] = [str(name) for name in (*data.data_vars, *data.coords)]
        lists = {key: data[key].to_numpy().tolist() for key in keys if key in found}
    else:
        nw = _narwhals()
        read = nw.from_native(data)
        eager = read.collect() if isinstance(read, nw.LazyFrame) else read
        found = eager.columns
        lists = {key: eager[key].to_list() for key in keys if key in found}
    absent = [key for key in keys if key not in lists]
    if absent:
        raise DataError(f"by={absent} is no column of the table; its columns are {list(found)[:20]}.")
    rows = list(zip(*(lists[key] for key in keys), strict=True))
    if not rows:
        raise DataError("the table has no rows; there is nothing to fit.")
    empty = sum(any(value is None or value != value for value in row) for row in rows)
    if empty:
        raise DataError(f"by={list(keys)} is missing in {empty} of {len(rows)} rows; say whose they are, or drop them.")
    numbers: dict[Any, int] = {}
    ids = np.array([numbers.setdefault(row, len(numbers)) for row in rows])
    return ids, [_unwrapped(row) for row in numbers]


def _unwrapped(key: Any) -> Any:
    return key[0] if isinstance(key, tuple) and len(key) == 1 else key


def _others(data: Any, keys: Sequence[Any]) -> list[str]:
    is_dataset = isinstance(data, xr.Dataset)
    found = (*data.data_vars, *data.coords) if is_dataset else _narwhals().from_native(data).collect_schema()
    return [str(name) for name in found if name not in keys]
