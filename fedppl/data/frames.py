"""Clients' data as people have them: data frames with a grouping column, frames by client, tuples; to arrays by name.

pandas, polars, pyarrow and whatever else narwhals reads, and xarray's Datasets.
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
_EXACT = 2**53  # from where on a real is no longer every whole number
_DAY = np.timedelta64(1, "D")

Categories = Mapping[str, tuple[Any, ...]]


@functools.cache
def narwhals() -> Any:
    """Loaded when the first table comes: it takes a tenth of what importing all of fedppl does."""
    import narwhals.stable.v2 as nw

    return nw


def read(data: Any) -> Any:
    """A frame as narwhals has it, what is none as it is; names that stand twice are refused."""
    from narwhals.exceptions import DuplicateError

    try:
        return narwhals().from_native(data, pass_through=True)
    except DuplicateError as error:
        raise DataError(f"two columns of the table have one name; rename or drop one. {error}") from error


def eager(data: Any) -> Any:
    """A frame as narwhals has it, collected where it is a lazy one."""
    found = read(data)
    return found.collect() if isinstance(found, narwhals().LazyFrame) else found


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
    """By name the categories of those of a frame's columns that have some."""
    if not is_frame(data) or isinstance(data, xr.Dataset):
        return {}
    table = eager(data)
    found = {name: _categories_of(table[name]) for name in table.columns if names is None or name in names}
    return {name: order for name, order in found.items() if order is not None}


def common_categories(clients: Any, names: Sequence[str] | None) -> Categories:
    """The categories of clients' frames, which have to be the same at all: else one number has several meanings."""
    if not isinstance(clients, Mapping):
        return {}
    known: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for client_id, data in clients.items():
        for name, order in categories(data, names).items():
            first, expected = known.setdefault(name, (client_id, order))
            if expected != order:
                raise DataError(
                    f"column {name!r} has the categories {list(expected)[:8]} at client {str(first)!r} and "
                    f"{list(order)[:8]} at client {str(client_id)!r}, and they are numbered in their order; give all "
                    "the same, column.cat.set_categories([...])."
                )
    return {name: order for name, (_, order) in known.items()}


def order(data: Any, name: str) -> tuple[str, ...] | None:
    """The order that a table, or the tables of all clients, give the categories of a column; None without one."""
    tables = {"": data} if is_frame(data) else data if isinstance(data, Mapping) else {}
    found: dict[str, tuple[str, ...]] = {}
    for client_id, one in tables.items():
        if not is_frame(one) or isinstance(one, xr.Dataset) or name not in names_of(one):
            continue
        own = _order_of(eager(one)[name])
        if own is None:
            return None
        found[str(client_id)] = own
    if len(set(found.values())) > 1:
        raise DataError(
            f"clients have the categories of {name!r} in different orders, {found}; give all the same, "
            "column.cat.set_categories([...], ordered=True)."
        )
    return next(iter(found.values()), None)


def orders(data: Any, names: Sequence[str]) -> dict[str, tuple[str, ...] | None]:
    """The categories of columns in the order that a table, or the tables of all clients, give; None where they differ.

    Columns that have none anywhere are left out; so are those whose categories are in the order of first appearance.
    """
    tables = {"": data} if is_frame(data) else data if isinstance(data, Mapping) else {}
    found: dict[str, set[tuple[str, ...] | None]] = {name: set() for name in names}
    for one in tables.values():
        table = None if not is_frame(one) or isinstance(one, xr.Dataset) else eager(one)
        for name in names:
            if table is not None and name in table.columns:
                found[name].add(_order_of(table[name], chosen=False))
    return {name: next(iter(own)) if len(own) == 1 else None for name, own in found.items() if own - {None}}


def known(client_id: str, data: Any, *, names: Sequence[str] | None, orders: Categories) -> Any:
    """One client's data by name, categories and texts numbered in orders that are known."""
    whose = f"client {client_id!r}"
    return columns(data, names, whose, orders=orders) if is_frame(data) else named(data, names, whose)


def named(data: Any, names: Sequence[str] | None, whose: str) -> Any:
    """One client's data by name: mappings as they are, columns of a frame, and tuples in the order of `names`.

    Of a frame these columns alone; None for whatever there is. Errors begin with `whose`.
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


def columns(
    frame: Any, names: Sequence[str] | None, whose: str, *, texts: bool = False, orders: Categories | None = None
) -> dict[str, Array]:
    """Columns of a frame as arrays of numbers or of booleans.

    Categories are numbered in the order that they have; dates and times are days since 1970, durations days; what is
    missing is NaN. Texts have no numbers that all clients would agree on, and are refused, unless `texts` are wanted:
    then they, and categories, are arrays of objects. `orders` are of categories that are known.
    """
    if isinstance(frame, xr.Dataset):
        found = [str(name) for name in (*frame.data_vars, *frame.coords)]
        table: Any = {name: frame[name].to_numpy() for name in found}
    else:
        table = eager(frame)
        found = list(table.columns)
    wanted = found if names is None else [name for name in names if name in found]
    if names is not None and not wanted:
        raise DataError(f"{whose}: the frame has the columns {found[:20]}, and {list(names)} are wanted; rename them.")
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
    """Clients' data from one table and the column, or columns, that say whose each row is.

    Groups that pandas or polars have made already, and mappings from client to data, need no column. The order is that
    of first appearance. Missing values in the column are an error.
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
    found = {key: {name: parts[place] for name, parts in split.items()} for place, key in enumerate(first)}
    require_ids(found)
    return found


def _given(data: Any) -> Any:
    """Clients' data that need no column: a mapping from client to data, or groups made already."""
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
    """Groups that pandas, polars or xarray have made; rows that are in none are no rows to leave out in silence."""
    if not isinstance(data, Iterable):
        raise DataError(f"data are a {type(data).__name__}; collect() the frame before it is grouped.")
    found = {key[0] if isinstance(key, tuple) and len(key) == 1 else key: frame for key, frame in data}
    whole = getattr(data, "obj", None)
    if whole is not None and (lost := len(whole) - sum(len(frame) for frame in found.values())) > 0:
        raise DataError(
            f"{lost} of {len(whole)} rows are in no group, where the grouping column is missing; say whose they are, "
            "or drop them before they are grouped."
        )
    return found


def _rows_first(data: xr.Dataset, keys: Sequence[Any], names: Sequence[str]) -> xr.Dataset:
    """A Dataset whose arrays have the dim of the clients' column first."""
    dims = {data[key].dims for key in keys}
    if len(dims) != 1 or len(one := next(iter(dims))) != 1:
        raise DataError(f"by={list(keys)} has the dims {sorted(dims)}; in a Dataset it has one, that of the rows.")
    for name in names:
        if name in data and one[0] not in data[name].dims:
            raise DataError(
                f"{name!r} has the dims {data[name].dims}, and by={list(keys)} runs over {one[0]!r}; give every client "
                "its own data, {id: {name: array}}, where an array has no rows of clients."
            )
    return data.transpose(one[0], ...)


def require_by_client(clients: Mapping[Any, Any], names: Sequence[str] | None) -> None:
    """Refuse one client's arrays where clients by id are wanted."""
    plain = not any(isinstance(value, Mapping) or is_frame(value) for value in clients.values())
    if names and clients and plain and set(clients) <= set(names):
        raise DataError(
            f"data have the names {list(clients)}, which the model's data have, where ids of clients are wanted; pass "
            '{"some client": data}, or a data frame with by=.'
        )


def require_alignment(client_id: Any, data: Any) -> None:
    """Refuse Series whose indices have the same labels in another order: arrays go by position."""
    if not isinstance(data, Mapping):
        return
    series = {name: value for name, value in data.items() if isinstance(value, pd.Series)}
    for name, value in series.items():
        first, other = next(iter(series.items()))
        a, b = other.index, value.index
        if len(a) == len(b) and not a.equals(b) and a.is_unique and b.is_unique and a.symmetric_difference(b).empty:
            raise DataError(
                f"client {str(client_id)!r}: {first!r} and {name!r} have the same index in another order, and rows go "
                "by position; make one frame of them, pandas.DataFrame({...}), or pass .to_numpy()."
            )


def _groups(data: Any, keys: Sequence[Any]) -> tuple[Array, list[Any]]:
    """For each row the number of its group, in the order of first appearance, and the groups' names."""
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


# Columns as arrays of numbers, or what is wrong with them -------------------------------------------------------------


def is_text(column: Any) -> bool:
    """Whether a column holds texts, categories among them."""
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
    found = np.empty(len(values), dtype=object)
    found[:] = [None if is_missing(value) else as_level(value) for value in values]
    return found


def as_level(value: Any) -> str:
    """A level as a text: whole numbers and truths as whole numbers, as those of columns of numbers are."""
    number = float(value) if isinstance(value, numbers.Real | np.bool_) else np.nan
    return str(int(number)) if number.is_integer() and abs(number) < _EXACT else str(value)


def _categories_of(column: Any) -> tuple[Any, ...] | None:
    """The categories of a column in their order; None where it has none."""
    nw = narwhals()
    if isinstance(column, nw.Series) and isinstance(column.dtype, nw.Categorical | nw.Enum):
        return tuple(column.cat.get_categories().to_list())
    return None


def _order_of(column: Any, *, chosen: bool = True) -> tuple[str, ...] | None:
    """The categories of a column in their order, such as pandas' ordered ones; None where nobody chose it.

    Where it need not be `chosen`, pandas' categories without an order have one too: that in which they are listed.
    """
    nw = narwhals()
    if not isinstance(column, nw.Series):
        return None
    listed = not chosen and isinstance(column.dtype, nw.Categorical) and column.implementation.is_pandas_like()
    ordered = isinstance(column.dtype, nw.Enum) or listed
    return tuple(map(as_level, _categories_of(column) or ())) if ordered else None


def numeric(column: Any, what: str, known: Sequence[Any] | None = None) -> Array:
    """Numbers of a column; `known` are categories in the order that all clients have."""
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
    if kind == nw.Unknown and (found := np.asarray(column.to_native())).dtype.kind in "biufc":  # sparse, complex
        return found
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
            f"{what} has the categories {', '.join(unknown[:4])}, and clients were given with {list(order)[:10]}; give "
            "it those, or fit again with all of them."
        )
    codes = np.array([places.get(value, np.nan) for value in values])  # what is missing is no category
    return codes if np.any(np.isnan(codes)) else codes.astype(np.int64)


def _not_numeric(what: str, kind: str, values: Sequence[Any]) -> DataError:
    present = [value for value in values if not is_missing(value)]
    shown = sorted({repr(value) for value in present})[:4]
    return DataError(
        f"{what} has the type {kind} ({', '.join(shown)}), and a model computes with numbers: {_remedy(present)}."
    )


def _remedy(values: Sequence[Any]) -> str:
    odd = [value for value in values if not is_number(value)]
    if values and not odd:
        return "its texts are numbers; convert the column, .astype(float) in pandas"
    if len(odd) < len(values) and all(isinstance(value, str) for value in odd):
        return (
            f"{sorted(set(odd))[:4]} are none; correct them, or have pandas.to_numeric(column, errors='coerce') take "
            "them for missing"
        )
    if any(isinstance(value, datetime.date) for value in values):
        return "make times of one zone of it, pandas.to_datetime(column, utc=True)"
    if any(isinstance(value, list | tuple | np.ndarray | dict) or hasattr(value, "to_list") for value in values):
        return "give one number a row, in as many columns as there are numbers, or an array of them by name"
    if any(hasattr(value, "to_timestamp") for value in values):
        return "make times of its periods, column.dt.to_timestamp()"
    return "declare the model by fedppl.formula, which agrees on levels, or number its values alike at all clients"


def is_number(value: Any) -> bool:
    """Whether a value, or what a text says, is a number."""
    try:
        float(value if not isinstance(value, bytes) else "")
    except (TypeError, ValueError):
        return False
    return True


# Clients' ids: what may be one, which columns of a table have them, and what rows they belong to ----------------------


def require_clients(clients: Any, of_a_table: str) -> None:
    """Refuse what is no mapping from ids to data, or has none; `of_a_table` says what to do with a data frame."""
    if not isinstance(clients, Mapping):
        raise DataError(
            f"clients are {type(clients).__name__}; pass a mapping from client id to its data, {of_a_table}."
        )
    if not clients:
        raise DataError("no clients: pass a mapping from client id to that client's data.")
    require_ids(clients)


def require_ids(clients: Mapping[Any, Any]) -> None:
    """Refuse ids that are none, and those that are told apart by nothing that their texts have.

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
            raise DataError(f"client id {client_id!r} is of bytes, and ids are texts; decode them: {part!r}.decode().")
        if isinstance(part, frozenset):
            raise DataError(f"client id {client_id!r} is a set, which has no order; pass a text or a tuple.")
    if odd := [sign for sign in str(client_id) if unicodedata.category(sign) in ("Cc", "Cs")]:
        raise DataError(f"client id {client_id!r} has {odd[0]!r}, which is no letter or sign; leave it out.")
    if not str(client_id).strip():
        raise DataError(f"a client's id is {client_id!r}, an empty text; name the client, or drop its rows.")


def is_missing(value: Any) -> bool:
    """None, NaN, NaT and NA: the last has no truth."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    try:
        return bool(value != value)
    except (TypeError, ValueError):  # as of an array, which is no single value
        return False


def keys_of(by: Any, found: Sequence[Any], index: Iterable[Any] = ()) -> list[Any]:
    """The columns that by= names, out of those that were found."""
    if isinstance(by, tuple) and by in found:  # of a pandas table with several levels of names
        return [by]
    keys = [by] if isinstance(by, str) or not isinstance(by, Sequence) else list(by)
    if not keys:
        raise DataError("by=[] names no column; name the column, or columns, that tell clients apart.")
    for key in keys:
        if not _is_name(key):
            raise DataError(
                f"by= is of type {type(key).__name__}, which is no name of a column; put the values into a column of "
                "the table, and pass its name."
            )
    absent = [key for key in keys if key not in found]
    if absent:
        levels = [name for name in absent if name in list(index)]
        close = difflib.get_close_matches(str(absent[0]).casefold(), [str(name).casefold() for name in found], n=1)
        meant = [name for name in found if close and str(name).casefold() == close[0]]
        remedy = f"name one of them{f', such as {meant[0]!r}' if meant else ''}"
        if levels:
            remedy = f"{levels} is in its index: pass frame.reset_index()"
        raise DataError(f"by={shown(absent)} is no column of the table; its columns are {list(found)[:20]}; {remedy}.")
    if len(set(keys)) < len(keys):
        raise DataError(f"by={keys} names a column twice; name each once.")
    return keys


def _is_name(key: Any) -> bool:
    """What can be looked up: no array or Series, which have a hash of no use or none."""
    if getattr(key, "ndim", 0) != 0:
        return False
    try:
        hash(key)
    except TypeError:
        return False
    return True


def id_of(key: tuple[Any, ...], by: Sequence[Any]) -> Any:
    """A group's values as a client's id: whole numbers without a fraction, one value alone without its tuple."""
    plain = tuple(int(one) if isinstance(one, float) and one == int(one) else one for one in key)
    if any(isinstance(one, float) for one in plain):
        raise DataError(
            f"by={list(by)} holds the number {next(one for one in plain if isinstance(one, float))!r}, and clients are "
            "told apart by texts, whole numbers or dates; name a column of these."
        )
    return plain[0] if len(plain) == 1 else plain
