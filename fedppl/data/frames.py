"""Read clients' data: data frames with a grouping column, frames by client or tuples become arrays by name.

Frames are those of pandas, polars, pyarrow and whatever else narwhals reads, and xarray's Datasets.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import difflib
import functools
import itertools
import numbers
import os
import unicodedata
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import xarray as xr

from fedppl.settings import shown
from fedppl.types import Array, DataError

if TYPE_CHECKING:
    import narwhals.stable.v2 as nw

_EPOCH = np.datetime64("1970-01-01", "us")
EXACT = 2**53  # larger whole numbers are not all floats
_DAY = np.timedelta64(1, "D")
_OF_ONE_KIND = "biufcmMU"  # kinds of arrays in which nothing is of another kind: numbers, dates, texts

Categories = Mapping[str, tuple[Any, ...]]


@functools.cache
def narwhals() -> Any:
    """Import narwhals when the first table comes: that takes a tenth of the time of importing fedppl."""
    import narwhals.stable.v2 as nw

    return nw


def read(data: Any) -> Any:
    """Convert a frame to one of narwhals; other data stay as they are. Duplicate column names are refused."""
    from narwhals.exceptions import DuplicateError

    try:
        return narwhals().from_native(data, pass_through=True)
    except DuplicateError as error:
        raise DataError(f"two columns of the table have one name; rename or drop one. {error}") from error


@dataclass(frozen=True, eq=False)
class Opened:
    """A user's table, converted once: a data frame of narwhals, a Dataset of xarray, or a formula's columns by name."""

    native: Any  # as the user gave it
    source: Any
    names: list[Any]  # of its columns

    def column(self, name: Any) -> Any:
        """A column, as a Series of narwhals or an array."""
        if isinstance(self.source, xr.Dataset):
            return self.source[name].to_numpy()
        if isinstance(self.source, dict):
            self.source[name] = column = _as_column(self.source[name])  # once
            return column
        return self.source.get_column(name)


def opened(data: Any, by: Any = None, *, of_formula: bool = False) -> Any:
    """Convert a table, or those of a mapping or of groups, once; other data stay as they are.

    For a formula a client's columns by name become a table too: its builder takes no other arrays.
    """
    if type(data).__name__.endswith("GroupBy"):
        if by is not None:
            raise DataError(f"by={shown(by)} is for one table, and data are grouped by clients already; leave by= out.")
        data = _of_groups(data)
    if isinstance(data, xr.Dataset):
        return Opened(data, data, [str(name) for name in (*data.data_vars, *data.coords)])
    if isinstance(data, Mapping):
        by_client = dict(data)
        for k, one in data.items():
            if not isinstance(one, Mapping) or isinstance(one, xr.Dataset):
                by_client[k] = opened(one)
            elif of_formula:
                by_client[k] = _of_columns(one, f"client {str(k)!r}")
        return by_client
    if data is None or isinstance(data, Opened | tuple | np.ndarray):
        return data
    nw, frame = narwhals(), read(data)
    frame = frame.collect() if isinstance(frame, nw.LazyFrame) else frame
    return Opened(data, frame, list(frame.columns)) if isinstance(frame, nw.DataFrame) else data


def _of_columns(data: Mapping[Any, Any], whose: str) -> Opened:
    require_alignment(data, whose)
    return Opened(data, dict(data), list(data))


def _as_column(values: Any) -> Any:
    """Values as an array where all are numbers, dates or texts, or not one a row, else as a Series of narwhals."""
    if type(values) is np.ndarray and values.dtype.kind in _OF_ONE_KIND:
        return values
    if isinstance(values, np.ndarray) and values.dtype.kind == "S":
        return np.char.decode(values)  # texts of HDF5
    nw = narwhals()
    if isinstance(values, nw.Series):
        return values
    if isinstance(values, pd.Index | pd.api.extensions.ExtensionArray):
        values = pd.Series(values)
    if isinstance(values, pd.Series) and isinstance(values.dtype, np.dtype | pd.StringDtype):
        values = values.to_numpy(dtype=object if isinstance(values.dtype, pd.StringDtype) else None)
    elif not isinstance(values, np.ndarray | list | tuple):
        values = nw.from_native(values, series_only=True, pass_through=True)
        if isinstance(values, nw.Series):
            return values
        values = np.asarray(values)  # of what NumPy reads, or a single object
    with contextlib.suppress(ValueError):  # rows of different lengths
        array = values if np.ma.isMaskedArray(values) else np.asarray(values)
        kind = array.dtype.kind
        of_one_kind = kind in _OF_ONE_KIND and (kind != "U" or array is values)  # a list of "a" and nan is of two
        if array.ndim != 1 or kind == "V" or (of_one_kind and not np.ma.isMaskedArray(array)):
            return np.asarray(array)
        if not np.ma.isMaskedArray(array) and pd.api.types.infer_dtype(values, skipna=False) == "string":
            return np.asarray(values, dtype=object)
    return nw.from_native(pd.Series(values), series_only=True)


def is_frame(data: Any) -> bool:
    """Whether data are a table with named columns; a lazy one is not collected."""
    if isinstance(data, Opened | xr.Dataset):
        return True
    if data is None or isinstance(data, Mapping | tuple | np.ndarray):
        return False
    nw = narwhals()
    return isinstance(read(data), nw.DataFrame | nw.LazyFrame)


def tables_of(data: Any) -> dict[Any, Opened]:
    """One table, or the tables of clients."""
    tables = {"": data} if isinstance(data, Opened) else data if isinstance(data, Mapping) else {}
    return {k: table for k, table in tables.items() if isinstance(table, Opened)}


def categories(data: Any, names: Sequence[str] | None) -> Categories:
    """Categories by column; refuse tables whose categories differ, since one number would have several meanings."""
    known: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for client_id, table in tables_of(data).items():
        for name in table.names:
            order = _categories_of(table.column(name)) if names is None or name in names else None
            if order is not None and known.setdefault(name, (client_id, order))[1] != order:
                first, expected = known[name]
                places = (
                    f"{list(expected)[:8]} at client {str(first)!r}, {list(order)[:8]} at client {str(client_id)!r}"
                )
                remedy = "set the same, column.cat.set_categories([...])"
                raise DataError(f"column {name!r} has the categories {places}; {remedy}.")
    return {name: order for name, (_, order) in known.items()}


def order(data: Any, name: str) -> tuple[str, ...] | None:
    """Order of the categories of a column in one table, or in the tables of all clients; None without an order."""
    by_client = _orders(data, name, chosen=True)
    if None in by_client.values():
        return None
    if len(set(by_client.values())) > 1:
        remedy = "column.cat.set_categories([...], ordered=True)"
        raise DataError(f"the categories of {name!r} have different orders, {by_client}; set the same, {remedy}.")
    return next(iter(by_client.values()), None)


def orders(data: Any, names: Sequence[str]) -> dict[str, tuple[str, ...] | None]:
    """Orders of the categories of columns in one table, or in the tables of all clients; None where they differ.

    Columns without categories are left out, and columns whose categories are in the order of first appearance.
    """
    by_name = {name: set(_orders(data, name, chosen=False).values()) for name in names}
    return {name: found.pop() if len(found) == 1 else None for name, found in by_name.items() if found - {None}}


def _orders(data: Any, name: str, *, chosen: bool) -> dict[str, tuple[str, ...] | None]:
    """Categories of a column by client, None unless their order was chosen, as of pandas' ordered ones.

    Without `chosen`, categories of pandas that are not ordered count as well, in the order in which they are listed.
    """
    by_client: dict[str, tuple[str, ...] | None] = {}
    for k, table in tables_of(data).items():
        if name not in table.names or isinstance(table.source, xr.Dataset):
            continue
        column, by_client[str(k)] = table.column(name), None
        if (found := _categories_of(column)) is not None:
            is_listed = not chosen and column.implementation.is_pandas_like()
            if is_listed or isinstance(column.dtype, narwhals().Enum):
                by_client[str(k)] = tuple(map(as_level, found))
    return by_client


def known(client_id: str, data: Any, *, names: Sequence[str] | None, orders: Categories) -> Any:
    """One client's data by name; categories and texts are numbered in the given `orders`."""
    return named(data, names, f"client {client_id!r}", orders)


def named(data: Any, names: Sequence[str] | None, whose: str, orders: Categories | None = None) -> Any:
    """One client's data by name: a mapping as it is, the columns `names` of a frame, or a tuple in their order.

    With `names` None a frame gives all its columns. Errors begin with `whose`.
    """
    if is_frame(data):
        return columns(data, names, whose, orders=orders)
    if isinstance(data, tuple):
        if names is None or len(data) > len(names):
            known = "any name" if names is None else f"{len(names)}: {list(names)}"
            raise DataError(f"{whose}: data are a tuple of {len(data)}, and the builder takes {known}; pass a mapping.")
        data = dict(zip(names, data, strict=False))
    for name, value in data.items() if isinstance(data, Mapping) else ():
        if has_categories(value):
            remedy = "pass a frame, or its .to_numpy() for values and .cat.codes for places"
            raise DataError(f"{whose}: {name!r} has categories, which a data frame alone numbers; {remedy}.")
    return data


def has_categories(values: Any) -> bool:
    """Whether values are pandas' categories, of which NumPy sees the values and a data frame the places."""
    return isinstance(getattr(values, "dtype", None), pd.CategoricalDtype)


def raw(data: Any, names: Sequence[str] | None, whose: str) -> dict[str, Array]:
    """One client's columns of a formula by name, with texts and categories as texts; None where a text is missing."""
    return columns(of_formula(data, whose), names, whose, texts=True)


def of_formula(data: Any, whose: str) -> Opened:
    """One client's table, from a frame or columns by name; refuse other data."""
    if isinstance(data, Opened) or is_frame(data):
        table: Opened = opened(data)
        return table
    if isinstance(data, Mapping) and data:
        return _of_columns(data, whose)
    what = shown(data) if isinstance(data, str | Mapping) else f"of type {type(data).__name__}"
    raise DataError(f"{whose}: data are {what}; pass a data frame, or a mapping from column to values.")


def columns(
    frame: Any, names: Sequence[str] | None, whose: str, *, texts: bool = False, orders: Categories | None = None
) -> dict[str, Array]:
    """Columns of a frame as arrays of numbers or booleans.

    Categories are numbered in their order, or in `orders` where given. Dates and times are days since 1970, durations
    are days, missing values are NaN. Texts are refused, since clients would number them differently; with `texts` they
    and categories are arrays of objects.
    """
    table = opened(frame)
    wanted = table.names if names is None else [name for name in names if name in table.names]
    if names is not None and not wanted:
        raise DataError(f"{whose}: the frame has the columns {table.names[:20]}, none of {list(names)}; rename them.")
    arrays = {}
    for name in wanted:
        column, what = table.column(name), f"{whose}: column {name!r}"
        arrays[name] = _in_texts(column, what) if texts else numeric(column, what, (orders or {}).get(name))
    return arrays


def _in_texts(column: Any, what: str) -> Array:
    """A column as numbers, or as texts where it has some; what is not one value a row stays, to be refused by shape."""
    if isinstance(column, np.ndarray) and (column.ndim != 1 or column.dtype.kind in "biufcU"):
        return column
    return as_texts(column) if is_text(column) else numeric(column, what, of_formula=True)


def by_name(clients: Mapping[Any, Any], names: Sequence[str] | None) -> dict[Any, Any]:
    """Arrays by name of every client, with their missing values."""
    require_by_client(clients, names)
    arrays = {k: named(data, names, f"client {str(k)!r}") for k, data in clients.items()}
    for k, data in arrays.items():
        require_alignment(data, f"client {str(k)!r}")
    return arrays


def given(data: Any) -> Any:
    """Clients' data without a column of clients: a mapping from client to data; other data stay as they are."""
    if isinstance(data, Opened):
        raise DataError("data are one table; say by=, the column that tells clients apart, or pass {id: table}.")
    if isinstance(data, str | os.PathLike):
        raise DataError(f"clients are {str(data)!r}; read the file first, such as pandas.read_csv, and say by=.")
    if isinstance(data, Mapping):
        require_ids(data)
    return data


def _of_groups(data: Any) -> dict[Any, Any]:
    """Read the groups of pandas, polars or xarray; refuse rows that are in no group."""
    if not isinstance(data, Iterable):
        raise DataError(f"data are a {type(data).__name__}; collect() the frame before it is grouped.")
    groups = {key[0] if isinstance(key, tuple) and len(key) == 1 else key: frame for key, frame in data}
    whole = getattr(data, "obj", None)
    if whole is not None and (lost := len(whole) - sum(len(frame) for frame in groups.values())) > 0:
        raise DataError(f"{lost} of {len(whole)} rows are in no group; say whose they are, or drop them.")
    return groups


def rows_first(table: Opened, keys: Sequence[Any], names: Sequence[str]) -> Opened:
    """Transpose a Dataset so that the dim of the clients' column comes first."""
    data = table.source
    if not isinstance(data, xr.Dataset):
        return table
    dims = {data[key].dims for key in keys}
    if len(dims) != 1 or len(dim := next(iter(dims))) != 1:
        raise DataError(f"by={list(keys)} has the dims {sorted(dims)}; in a Dataset it has one, that of the rows.")
    for name in names:
        if name in data and dim[0] not in data[name].dims:
            what = f"{name!r} has the dims {data[name].dims}, and by={list(keys)} runs over {dim[0]!r}"
            raise DataError(f"{what}; give every client its own data, {{id: {{name: array}}}}.")
    return replace(table, source=data.transpose(dim[0], ...))


def require_by_client(clients: Mapping[Any, Any], names: Sequence[str] | None) -> None:
    """Refuse the arrays of one client in place of a mapping from client to data."""
    plain = not any(isinstance(value, Mapping) or is_frame(value) for value in clients.values())
    if names and clients and plain and set(clients) <= set(names):
        what = f"data have the model's names {list(clients)} in place of clients' ids"
        raise DataError(f'{what}; pass {{"some client": data}}, or a data frame with by=.')


def require_alignment(data: Any, whose: str) -> None:
    """Refuse Series whose indices have the same labels in different orders: rows are matched by position."""
    items = data.items() if isinstance(data, Mapping) else ()
    series = [(name, value.index) for name, value in items if isinstance(value, pd.Series)]
    for name, b in series[1:]:
        first, a = series[0]
        if len(a) == len(b) and not a.equals(b) and a.is_unique and b.is_unique and a.symmetric_difference(b).empty:
            what = f"{whose}: {first!r} and {name!r} have the same index in different orders"
            raise DataError(f"{what}; make one frame, pandas.DataFrame({{...}}), or pass .to_numpy(), by position.")


# Columns as arrays of numbers ----------------------------------------------------------------------------------------


def is_text(column: Any) -> bool:
    """Whether a column holds texts or categories."""
    nw = narwhals()
    if not isinstance(column, nw.Series):
        return np.asarray(column).dtype.kind in "OUS"
    if isinstance(column.dtype, nw.Categorical | nw.Enum | nw.String):
        return True
    return column.dtype == nw.Object and any(isinstance(value, str) for value in column.to_list())


def as_texts(column: Any) -> Array:
    """Texts, None where one is missing."""
    nw = narwhals()
    values = column.to_list() if isinstance(column, nw.Series) else np.asarray(column).tolist()
    array = np.empty(len(values), dtype=object)
    array[:] = [None if is_missing(value) else as_level(value) for value in values]
    return array


def as_level(value: Any) -> str:
    """A level as a text; whole numbers and booleans become whole numbers, as levels of numeric columns are."""
    number = float(value) if isinstance(value, numbers.Real | np.bool_) else np.nan
    return str(int(number)) if number.is_integer() and abs(number) < EXACT else str(value)


def _categories_of(column: Any) -> tuple[Any, ...] | None:
    """Categories of a column in their order; None without categories."""
    nw = narwhals()
    if isinstance(column, nw.Series) and isinstance(column.dtype, nw.Categorical | nw.Enum):
        return tuple(column.cat.get_categories().to_list())
    return None


def numeric(column: Any, what: str, known: Sequence[Any] | None = None, *, of_formula: bool = False) -> Array:
    """Numbers of a column; `known` are categories in the order of all clients. A formula takes texts as well."""
    nw = narwhals()
    if not isinstance(column, nw.Series):
        return _of_numpy(np.asarray(column), what)
    kind = column.dtype
    if isinstance(kind, nw.Categorical | nw.Enum) or (known is not None and kind == nw.String):
        return _codes(column, known or _categories_of(column) or (), what)
    if kind == nw.Decimal or ((kind.is_numeric() or kind == nw.Boolean) and column.null_count()):
        return _of_numpy(column.cast(nw.Float64).to_numpy(), what)
    if kind.is_numeric() or kind == nw.Boolean or (kind.is_temporal() and kind != nw.Time):
        return _of_numpy(column.to_numpy(), what)
    values = column.to_list()
    if all(map(is_missing, values)):
        return np.full(len(values), np.nan)
    if kind == nw.Unknown and (array := np.asarray(column.to_native())).dtype.kind in "biufc":  # sparse, complex
        return array
    plain = [np.nan if is_missing(value) else value for value in values]
    if kind == nw.Object and all(isinstance(value, numbers.Real | decimal.Decimal | np.generic) for value in plain):
        return _of_numpy(np.array(plain, dtype=float), what)
    raise _not_numeric(what, str(kind), values, of_formula=of_formula)


def _of_numpy(values: Array, what: str) -> Array:
    if values.dtype.kind in "biufc":
        return values
    spans: Any = values.astype("datetime64[us]") - _EPOCH if values.dtype.kind == "M" else values
    if spans.dtype.kind == "m":
        return np.where(np.isnat(spans), np.nan, spans / _DAY)
    raise _not_numeric(what, str(values.dtype), values.ravel()[:20].tolist())


def _codes(column: nw.Series[Any], order: Sequence[Any], what: str) -> Array:
    """Places among the categories, in their order."""
    places = {value: float(place) for place, value in enumerate(order)}
    values = column.to_list()
    if unknown := sorted({repr(v) for v in values if v is not None and v == v and v not in places}):
        listed = ", ".join(unknown[:4])
        raise DataError(f"{what} has the unknown categories {listed}; known are {list(order)[:10]}; fit again.")
    codes = np.array([places.get(value, np.nan) for value in values])  # what is missing is no category
    return codes if np.any(np.isnan(codes)) else codes.astype(np.int64)


def _not_numeric(what: str, kind: str, values: Sequence[Any], *, of_formula: bool = False) -> DataError:
    present = [value for value in values if not is_missing(value)]
    examples = ", ".join(sorted({repr(value) for value in present})[:4])
    odd = [value for value in present if not is_number(value)]
    if present and not odd:
        remedy = "convert its texts to numbers, .astype(float) in pandas"
    elif len(odd) < len(present) and all(isinstance(value, str) for value in odd):
        remedy = f"correct {sorted(set(odd))[:4]}, or make them missing by pandas.to_numeric(column, errors='coerce')"
    elif any(isinstance(value, datetime.date) for value in present):
        remedy = "convert it to times of one zone, pandas.to_datetime(column, utc=True)"
    elif any(isinstance(value, list | tuple | np.ndarray | dict) or hasattr(value, "to_list") for value in present):
        remedy = "give one number a row, in several columns, or an array by name"
    elif any(hasattr(value, "to_timestamp") for value in present):
        remedy = "convert its periods to times, column.dt.to_timestamp()"
    elif of_formula:
        remedy = "give its values as numbers, or as levels by texts, .astype(str) in pandas"
    else:
        remedy = "number its values alike at all clients, or use fedppl.formula, which agrees on levels"
    return DataError(f"{what} has the type {kind} ({examples}), which is not numeric; {remedy}.")


def is_number(value: Any) -> bool:
    """Whether a value, or a text, is a number."""
    try:
        float(value if not isinstance(value, bytes) else "")
    except (TypeError, ValueError):
        return False
    return True


# Clients' ids, and the columns of a table that hold them --------------------------------------------------------------


def require_clients(clients: Any, of_a_table: str) -> None:
    """Refuse clients that are not a mapping, or empty; `of_a_table` says what to do with a data frame."""
    if not isinstance(clients, Mapping) or not clients:
        what = "no clients" if isinstance(clients, Mapping) else f"clients are {type(clients).__name__}"
        raise DataError(f"{what}: pass a mapping from client id to its data, {of_a_table}.")
    require_ids(clients)


def require_ids(clients: Mapping[Any, Any]) -> None:
    """Refuse invalid ids, and ids whose texts are equal or differ by blanks alone.

    >>> require_ids({"a": {}, 1: {}})
    """
    by_text: dict[str, Any] = {}
    for client_id in clients:
        parts, text = client_id if isinstance(client_id, tuple) else (client_id,), str(client_id).strip()
        is_odd = not text or any(unicodedata.category(sign) in ("Cc", "Cs") for sign in str(client_id))
        if is_odd or any(is_missing(part) or isinstance(part, bytes | frozenset) for part in parts):
            rule = "a text that is not empty and without control characters, a number, or a tuple of these"
            raise DataError(f"a client's id is {client_id!r}; name the client by {rule}, or drop its rows.")
        if (other := by_text.setdefault(text, client_id)) is not client_id:
            raise DataError(
                f"client ids {other!r} and {client_id!r} are not distinct as texts without blanks; rename one."
            )


def is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, NaT or NA, whose truth value is undefined."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    try:
        return bool(value != value)
    except (TypeError, ValueError):  # as of an array, which is no single value
        return False


def keys_of(by: Any, known: Sequence[Any], index: Iterable[Any] = ()) -> list[Any]:
    """Columns that by= names, among the `known` columns of a table."""
    if isinstance(by, tuple) and by in known:  # of a pandas table with several levels of names
        return [by]
    keys = [by] if isinstance(by, str) or not isinstance(by, Sequence) else list(by)
    if not keys:
        raise DataError("by=[] names no column; name the column, or columns, that tell clients apart.")
    try:
        set(keys)
    except TypeError as error:  # arrays and Series
        kind = next((type(key).__name__ for key in keys if not isinstance(key, Hashable)), type(keys[0]).__name__)
        raise DataError(f"by= is of type {kind}; put the values into a column, and pass its name.") from error
    if absent := [key for key in keys if key not in known]:
        lower = {str(name).casefold(): name for name in reversed(known)}
        close = difflib.get_close_matches(str(absent[0]).casefold(), lower, n=1)
        remedy = f"name one of them{f', such as {lower[close[0]]!r}' if close else ''}"
        if levels := [name for name in absent if name in list(index)]:
            remedy = f"{levels} is in its index: pass frame.reset_index()"
        raise DataError(f"by={shown(absent)} is no column of the table; its columns are {list(known)[:20]}; {remedy}.")
    if len(set(keys)) < len(keys):
        raise DataError(f"by={keys} names a column twice; name each once.")
    return keys


def id_of(key: tuple[Any, ...], by: Sequence[Any]) -> Any:
    """A client's id from a group's values: floats become whole numbers, a single value stands without its tuple."""
    plain = tuple(int(part) if isinstance(part, float) and part == int(part) else part for part in key)
    if real := [part for part in plain if isinstance(part, float)]:
        raise DataError(f"by={list(by)} holds the number {real[0]!r}; name a column of texts, whole numbers or dates.")
    return plain[0] if len(plain) == 1 else plain


def require_order(names: Sequence[str], estimate: Any, covariance: Any) -> None:
    """Refuse pandas' labels in another order than the names, or than one another: values are taken by position."""
    axes = {"names": list(names)}
    for what, values in (("estimate", estimate), ("covariance", covariance)):
        for axis in ("index", "columns"):
            labels = getattr(values, axis, None)
            if isinstance(labels, pd.Index) and labels.inferred_type != "integer":  # numbers of rows name nothing
                axes[f"{what}.{axis}"] = list(labels)
    for (one, first), (other, second) in itertools.combinations(axes.items(), 2):
        place = {label: k for k, label in enumerate(first)}
        if moved := [label for k, label in enumerate(second) if place.get(label, k) != k]:
            places = f"another place in {other}, {second[:8]}, than in {one}, {first[:8]}"
            remedy = "order both by names, estimate[names] and covariance.loc[names, names]"
            raise DataError(f"an estimate: {moved[0]!r} is at {places}; {remedy}.")
