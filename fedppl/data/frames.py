"""Read clients' data: data frames with a grouping column, frames by client or tuples become arrays by name.

Frames are those of pandas, polars, pyarrow and whatever else narwhals reads, and xarray's Datasets.
"""

from __future__ import annotations

import datetime
import decimal
import difflib
import functools
import numbers
import os
import unicodedata
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import xarray as xr

from fedppl.settings import shown
from fedppl.types import Array, DataError

if TYPE_CHECKING:
    import narwhals.stable.v2 as nw

_EPOCH = np.datetime64("1970-01-01", "us")
_EXACT = 2**53  # larger whole numbers are not all floats
_DAY = np.timedelta64(1, "D")

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


def eager(data: Any) -> Any:
    """Convert a frame to one of narwhals, and collect a lazy one."""
    frame = read(data)
    return frame.collect() if isinstance(frame, narwhals().LazyFrame) else frame


def is_frame(data: Any) -> bool:
    """Whether data are a table with named columns."""
    if isinstance(data, xr.Dataset) or data is None:
        return data is not None
    if isinstance(data, Mapping | tuple | np.ndarray):  # of which narwhals makes none either
        return False
    nw = narwhals()
    return isinstance(read(data), nw.DataFrame | nw.LazyFrame)


def names_of(data: Any) -> list[Any]:
    """Names of a frame's columns."""
    if isinstance(data, xr.Dataset):
        return [str(name) for name in (*data.data_vars, *data.coords)]
    return list(read(data).collect_schema())


def categories(data: Any, names: Sequence[str] | None) -> Categories:
    """Categories of the categorical columns of a frame, by name."""
    if not is_frame(data) or isinstance(data, xr.Dataset):
        return {}
    table = eager(data)
    by_name = {name: _categories_of(table[name]) for name in table.columns if names is None or name in names}
    return {name: order for name, order in by_name.items() if order is not None}


def common_categories(clients: Any, names: Sequence[str] | None) -> Categories:
    """Categories of clients' frames; refuse categories that differ, since one number would have several meanings."""
    if not isinstance(clients, Mapping):
        return {}
    known: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for client_id, data in clients.items():
        for name, order in categories(data, names).items():
            first, expected = known.setdefault(name, (client_id, order))
            if expected != order:
                raise DataError(
                    f"column {name!r} has the categories {list(expected)[:8]} at client {str(first)!r} and "
                    f"{list(order)[:8]} at client {str(client_id)!r}; set the same everywhere, "
                    "column.cat.set_categories([...])."
                )
    return {name: order for name, (_, order) in known.items()}


def order(data: Any, name: str) -> tuple[str, ...] | None:
    """Order of the categories of a column in one table, or in the tables of all clients; None without an order."""
    tables = {"": data} if is_frame(data) else data if isinstance(data, Mapping) else {}
    by_client: dict[str, tuple[str, ...]] = {}
    for client_id, table in tables.items():
        if not is_frame(table) or isinstance(table, xr.Dataset) or name not in names_of(table):
            continue
        categories_here = _order_of(eager(table)[name])
        if categories_here is None:
            return None
        by_client[str(client_id)] = categories_here
    if len(set(by_client.values())) > 1:
        raise DataError(
            f"clients have the categories of {name!r} in different orders, {by_client}; give all the same, "
            "column.cat.set_categories([...], ordered=True)."
        )
    return next(iter(by_client.values()), None)


def orders(data: Any, names: Sequence[str]) -> dict[str, tuple[str, ...] | None]:
    """Orders of the categories of columns in one table, or in the tables of all clients; None where they differ.

    Columns without categories are left out, and columns whose categories are in the order of first appearance.
    """
    tables = {"": data} if is_frame(data) else data if isinstance(data, Mapping) else {}
    by_name: dict[str, set[tuple[str, ...] | None]] = {name: set() for name in names}
    for one in tables.values():
        table = None if not is_frame(one) or isinstance(one, xr.Dataset) else eager(one)
        for name in names:
            if table is not None and name in table.columns:
                by_name[name].add(_order_of(table[name], chosen=False))
    return {
        name: next(iter(all_orders)) if len(all_orders) == 1 else None
        for name, all_orders in by_name.items()
        if all_orders - {None}
    }


def known(client_id: str, data: Any, *, names: Sequence[str] | None, orders: Categories) -> Any:
    """One client's data by name; categories and texts are numbered in the given `orders`."""
    whose = f"client {client_id!r}"
    return columns(data, names, whose, orders=orders) if is_frame(data) else named(data, names, whose)


def named(data: Any, names: Sequence[str] | None, whose: str) -> Any:
    """One client's data by name: a mapping as it is, the columns `names` of a frame, or a tuple in their order.

    With `names` None a frame gives all its columns. Errors begin with `whose`.
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
    """One client's data by name, with texts and categories as texts; None where a text is missing."""
    if is_frame(data):
        return columns(data, names, whose, texts=True)
    return {name: np.asarray(value) for name, value in data.items()} if isinstance(data, Mapping) else data


def columns(
    frame: Any, names: Sequence[str] | None, whose: str, *, texts: bool = False, orders: Categories | None = None
) -> dict[str, Array]:
    """Columns of a frame as arrays of numbers or booleans.

    Categories are numbered in their order, or in `orders` where given. Dates and times are days since 1970, durations
    are days, missing values are NaN. Texts are refused, since clients would number them differently; with `texts` they
    and categories are arrays of objects.
    """
    if isinstance(frame, xr.Dataset):
        names_found = [str(name) for name in (*frame.data_vars, *frame.coords)]
        table: Any = {name: frame[name].to_numpy() for name in names_found}
    else:
        table = eager(frame)
        names_found = list(table.columns)
    wanted = names_found if names is None else [name for name in names if name in names_found]
    if names is not None and not wanted:
        raise DataError(
            f"{whose}: the frame has the columns {names_found[:20]}, and {list(names)} are wanted; rename them."
        )
    text = {name for name in wanted if texts and is_text(table[name])}
    return {
        name: as_texts(table[name])
        if name in text
        else numeric(table[name], f"{whose}: column {name!r}", (orders or {}).get(name))
        for name in wanted
    }


def by_client(
    data: Any, by: Hashable | Sequence[Hashable] | None, names: Sequence[str] | None, *, texts: bool = False
) -> Any:
    """Split one table into clients' data by the column, or columns, that identify clients.

    Groups of pandas or polars, and mappings from client to data, need no column. Clients are in the order of first
    appearance. Missing values in the column are an error.
    """
    if by is None:
        return _given(data)
    if not is_frame(data):
        more = ", or make a table of it, pandas.DataFrame(data)" if isinstance(data, Mapping) else ""
        raise DataError(f"by={by!r} is for one table, and data are {type(data).__name__}; leave by= out{more}.")
    keys = keys_of(by, names_of(data), getattr(getattr(data, "index", None), "names", ()) or ())
    wanted = list(names) if names is not None else [str(name) for name in names_of(data) if name not in keys]
    if isinstance(data, xr.Dataset):
        data = _rows_first(data, keys, wanted)
    ids, first = _groups(data, keys)
    order = np.argsort(ids, kind="stable")
    ends = np.flatnonzero(np.diff(ids[order])) + 1
    table = columns(data, wanted, "data", texts=texts)
    split = {name: np.split(values[order], ends) for name, values in table.items()}
    clients = {key: {name: parts[place] for name, parts in split.items()} for place, key in enumerate(first)}
    require_ids(clients)
    return clients


def _given(data: Any) -> Any:
    """Clients' data without a column of clients: a mapping from client to data, or groups of a frame."""
    if is_frame(data):
        raise DataError("data are one table; say by=, the column that tells clients apart, or pass {id: table}.")
    if type(data).__name__.endswith("GroupBy"):
        data = _of_groups(data)
    if isinstance(data, Mapping):
        require_ids(data)
        return data
    if isinstance(data, str | os.PathLike):
        raise DataError(f"clients are {str(data)!r}; read the file first, such as pandas.read_csv, and say by=.")
    return data


def _of_groups(data: Any) -> dict[Any, Any]:
    """Read the groups of pandas, polars or xarray; refuse rows that are in no group."""
    if not isinstance(data, Iterable):
        raise DataError(f"data are a {type(data).__name__}; collect() the frame before it is grouped.")
    groups = {key[0] if isinstance(key, tuple) and len(key) == 1 else key: frame for key, frame in data}
    whole = getattr(data, "obj", None)
    if whole is not None and (lost := len(whole) - sum(len(frame) for frame in groups.values())) > 0:
        raise DataError(
            f"{lost} of {len(whole)} rows are in no group, where the grouping column is missing; say whose they are, "
            "or drop them before they are grouped."
        )
    return groups


def _rows_first(data: xr.Dataset, keys: Sequence[Any], names: Sequence[str]) -> xr.Dataset:
    """Transpose a Dataset so that the dim of the clients' column comes first."""
    dims = {data[key].dims for key in keys}
    if len(dims) != 1 or len(dim := next(iter(dims))) != 1:
        raise DataError(f"by={list(keys)} has the dims {sorted(dims)}; in a Dataset it has one, that of the rows.")
    for name in names:
        if name in data and dim[0] not in data[name].dims:
            raise DataError(
                f"{name!r} has the dims {data[name].dims}, and by={list(keys)} runs over {dim[0]!r}; give every client "
                "its own data, {id: {name: array}}, where an array has no rows of clients."
            )
    return data.transpose(dim[0], ...)


def require_by_client(clients: Mapping[Any, Any], names: Sequence[str] | None) -> None:
    """Refuse the arrays of one client in place of a mapping from client to data."""
    plain = not any(isinstance(value, Mapping) or is_frame(value) for value in clients.values())
    if names and clients and plain and set(clients) <= set(names):
        raise DataError(
            f"data have the model's names {list(clients)} in place of clients' ids; pass "
            '{"some client": data}, or a data frame with by=.'
        )


def require_alignment(client_id: Any, data: Any) -> None:
    """Refuse Series whose indices have the same labels in different orders: rows are matched by position."""
    if not isinstance(data, Mapping):
        return
    series = {name: value for name, value in data.items() if isinstance(value, pd.Series)}
    for name, value in series.items():
        first, other = next(iter(series.items()))
        a, b = other.index, value.index
        if len(a) == len(b) and not a.equals(b) and a.is_unique and b.is_unique and a.symmetric_difference(b).empty:
            raise DataError(
                f"client {str(client_id)!r}: {first!r} and {name!r} have the same index in different orders, and rows "
                "are matched by position; make one frame, pandas.DataFrame({...}), or pass .to_numpy()."
            )


def _groups(data: Any, keys: Sequence[Any]) -> tuple[Array, list[Any]]:
    """Group number of each row, in the order of first appearance, and the ids of the groups."""
    if isinstance(data, xr.Dataset):
        lists = {key: data[key].to_numpy().tolist() for key in keys}
    else:
        table = eager(data)
        lists = {key: table.get_column(key).to_list() for key in keys}
    rows = list(zip(*(lists[key] for key in keys), strict=True))
    if not rows:
        raise DataError("the table has no rows; there is nothing to fit.")
    empty = sum(any(map(is_missing, row)) for row in rows)
    if empty:
        raise DataError(f"by={list(keys)} is missing in {empty} of {len(rows)} rows; say whose they are, or drop them.")
    numbers: dict[Any, int] = {}
    ids = np.array([numbers.setdefault(row, len(numbers)) for row in rows])
    return ids, [id_of(row, keys) for row in numbers]


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
    return str(int(number)) if number.is_integer() and abs(number) < _EXACT else str(value)


def _categories_of(column: Any) -> tuple[Any, ...] | None:
    """Categories of a column in their order; None without categories."""
    nw = narwhals()
    if isinstance(column, nw.Series) and isinstance(column.dtype, nw.Categorical | nw.Enum):
        return tuple(column.cat.get_categories().to_list())
    return None


def _order_of(column: Any, *, chosen: bool = True) -> tuple[str, ...] | None:
    """Categories of a column whose order was chosen, such as pandas' ordered ones; else None.

    Without `chosen`, categories of pandas that are not ordered count as well, in the order in which they are listed.
    """
    nw = narwhals()
    if not isinstance(column, nw.Series):
        return None
    listed = not chosen and isinstance(column.dtype, nw.Categorical) and column.implementation.is_pandas_like()
    ordered = isinstance(column.dtype, nw.Enum) or listed
    return tuple(map(as_level, _categories_of(column) or ())) if ordered else None


def numeric(column: Any, what: str, known: Sequence[Any] | None = None) -> Array:
    """Numbers of a column; `known` are categories in the order of all clients."""
    nw = narwhals()
    if not isinstance(column, nw.Series):
        return _of_numpy(np.asarray(column), what)
    kind = column.dtype
    if isinstance(kind, nw.Categorical | nw.Enum) or (known is not None and kind == nw.String):
        return _codes(column, known or _categories_of(column) or (), what)
    if kind == nw.Decimal:
        return _of_numpy(column.cast(nw.Float64).to_numpy(), what)
    if kind.is_numeric() or kind == nw.Boolean:
        if not column.null_count():
            return _of_numpy(column.to_numpy(), what)
        return _of_numpy(column.cast(nw.Float64).to_numpy(), what)
    if kind.is_temporal() and kind != nw.Time:
        return _of_numpy(column.to_numpy(), what)
    values = column.to_list()
    if all(map(is_missing, values)):
        return np.full(len(values), np.nan)
    if kind == nw.Unknown and (array := np.asarray(column.to_native())).dtype.kind in "biufc":  # sparse, complex
        return array
    plain = [np.nan if is_missing(value) else value for value in values]
    if kind == nw.Object and all(isinstance(value, numbers.Real | decimal.Decimal | np.generic) for value in plain):
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


def _codes(column: nw.Series[Any], order: Sequence[Any], what: str) -> Array:
    """Places among the categories, in their order."""
    places = {value: float(place) for place, value in enumerate(order)}
    values = column.to_list()
    unknown = sorted({repr(v) for v in values if v is not None and v == v and v not in places})
    if unknown:
        raise DataError(
            f"{what} has the unknown categories {', '.join(unknown[:4])}; known are {list(order)[:10]}: recode the "
            "rows, or fit again with all categories."
        )
    codes = np.array([places.get(value, np.nan) for value in values])  # what is missing is no category
    return codes if np.any(np.isnan(codes)) else codes.astype(np.int64)


def _not_numeric(what: str, kind: str, values: Sequence[Any]) -> DataError:
    present = [value for value in values if not is_missing(value)]
    examples = sorted({repr(value) for value in present})[:4]
    return DataError(f"{what} has the type {kind} ({', '.join(examples)}), which is not numeric; {_remedy(present)}.")


def _remedy(values: Sequence[Any]) -> str:
    odd = [value for value in values if not is_number(value)]
    if values and not odd:
        return "convert its texts to numbers, .astype(float) in pandas"
    if len(odd) < len(values) and all(isinstance(value, str) for value in odd):
        return f"correct {sorted(set(odd))[:4]}, or make them missing by pandas.to_numeric(column, errors='coerce')"
    if any(isinstance(value, datetime.date) for value in values):
        return "convert it to times of one zone, pandas.to_datetime(column, utc=True)"
    if any(isinstance(value, list | tuple | np.ndarray | dict) or hasattr(value, "to_list") for value in values):
        return "give one number a row, in several columns, or an array by name"
    if any(hasattr(value, "to_timestamp") for value in values):
        return "convert its periods to times, column.dt.to_timestamp()"
    return "number its values alike at all clients, or use fedppl.formula, which agrees on levels"


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
    if not isinstance(clients, Mapping):
        raise DataError(
            f"clients are {type(clients).__name__}; pass a mapping from client id to its data, {of_a_table}."
        )
    if not clients:
        raise DataError("no clients: pass a mapping from client id to that client's data.")
    require_ids(clients)


def require_ids(clients: Mapping[Any, Any]) -> None:
    """Refuse invalid ids, and ids whose texts are equal or differ by blanks alone.

    >>> require_ids({"a": {}, 1: {}})
    """
    for client_id in clients:
        _require_id(client_id)
    texts = [str(client_id) for client_id in clients]
    if len(set(texts)) < len(texts):
        raise DataError(f"client ids {list(clients)[:20]} are not distinct as strings; rename them.")
    stripped: dict[str, str] = {}
    for text in texts:
        other = stripped.setdefault(text.strip(), text)
        if other != text:
            raise DataError(
                f"client ids {other!r} and {text!r} differ by blanks alone; strip them, such as "
                "frame[column].str.strip(), or rename one."
            )


def _require_id(client_id: Any) -> None:
    parts = client_id if isinstance(client_id, tuple) else (client_id,)
    for part in parts:
        if is_missing(part):
            raise DataError(f"a client's id is {client_id!r}; name the client, or drop its rows.")
        if isinstance(part, bytes):
            raise DataError(f"client id {client_id!r} is of bytes; decode it: {part!r}.decode().")
        if isinstance(part, frozenset):
            raise DataError(f"client id {client_id!r} is a set, which has no order; pass a text or a tuple.")
    if odd := [sign for sign in str(client_id) if unicodedata.category(sign) in ("Cc", "Cs")]:
        raise DataError(f"client id {client_id!r} has the control character {odd[0]!r}; leave it out.")
    if not str(client_id).strip():
        raise DataError(f"a client's id is {client_id!r}, an empty text; name the client, or drop its rows.")


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
    for key in keys:
        if not _is_name(key):
            raise DataError(
                f"by= is of type {type(key).__name__}, not the name of a column; put the values into a column of the "
                "table, and pass its name."
            )
    absent = [key for key in keys if key not in known]
    if absent:
        levels = [name for name in absent if name in list(index)]
        close = difflib.get_close_matches(str(absent[0]).casefold(), [str(name).casefold() for name in known], n=1)
        meant = [name for name in known if close and str(name).casefold() == close[0]]
        remedy = f"name one of them{f', such as {meant[0]!r}' if meant else ''}"
        if levels:
            remedy = f"{levels} is in its index: pass frame.reset_index()"
        raise DataError(f"by={shown(absent)} is no column of the table; its columns are {list(known)[:20]}; {remedy}.")
    if len(set(keys)) < len(keys):
        raise DataError(f"by={keys} names a column twice; name each once.")
    return keys


def _is_name(key: Any) -> bool:
    """Whether a key can be looked up; arrays and Series cannot."""
    if getattr(key, "ndim", 0) != 0:
        return False
    try:
        hash(key)
    except TypeError:
        return False
    return True


def id_of(key: tuple[Any, ...], by: Sequence[Any]) -> Any:
    """A client's id from a group's values: floats become whole numbers, a single value stands without its tuple."""
    plain = tuple(int(part) if isinstance(part, float) and part == int(part) else part for part in key)
    if any(isinstance(part, float) for part in plain):
        raise DataError(
            f"by={list(by)} holds the number {next(part for part in plain if isinstance(part, float))!r}; name a "
            "column of texts, whole numbers or dates."
        )
    return plain[0] if len(plain) == 1 else plain
