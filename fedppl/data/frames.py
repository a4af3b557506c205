"""Clients' data as people have them: data frames with a grouping column, frames by client, tuples; to arrays by name.

pandas, polars, pyarrow and whatever else narwhals reads, and xarray's Datasets.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from fedppl.data import columns as columns_
from fedppl.data.columns import Categories, eager, narwhals, read
from fedppl.data.ids import id_of, is_missing, keys_of, require_ids
from fedppl.types import Array, DataError


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
    found = {name: columns_.categories(table[name]) for name in table.columns if names is None or name in names}
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
        own = columns_.order(eager(one)[name])
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
                found[name].add(columns_.order(table[name], chosen=False))
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
    text = {name for name in wanted if texts and columns_.is_text(table[name])}
    return {
        name: columns_.texts(table[name])
        if name in text
        else columns_.numeric(table[name], f"{whose}: column {name!r}", (orders or {}).get(name))
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


def require_clients(clients: Mapping[Any, Any], names: Sequence[str] | None) -> None:
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
