"""Rows of many clients as one table, grouped by client, without an object per client."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedppl.data import frames
from fedppl.data import missing as gaps
from fedppl.data.frames import Opened, id_of, keys_of, require_ids, rows_first
from fedppl.types import Array, DataError

FEWEST = 50  # clients from which on data are read as one table
MANY = 1000  # clients from which on each is not examined by itself


@dataclass(frozen=True, eq=False)
class Table(Mapping[str, dict[str, Array]]):
    """Rows of all clients, and a mapping from client id to its arrays.

    Attributes
    ----------
    client_ids
        Clients in the order of their rows.
    begins
        (K + 1,) where each client's rows begin, and where the last one's end.
    columns
        Arrays by name, a row (N, ...) for each.
    """

    client_ids: tuple[str, ...]
    begins: NDArray[np.int64]
    columns: Mapping[str, Array]
    __hash__ = object.__hash__  # a mapping has none, and a table is equal to itself alone

    def rows(self, k: int) -> dict[str, Array]:
        """The arrays of the client in place k."""
        return {name: column[self.begins[k] : self.begins[k + 1]] for name, column in self.columns.items()}

    def __getitem__(self, client_id: str) -> dict[str, Array]:
        """The arrays of a client."""
        return self.rows(self.places[client_id])

    def __iter__(self) -> Iterator[str]:
        """Ids in the order of their rows."""
        return iter(self.client_ids)

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.client_ids)

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """Places of clients by id."""
        return {client_id: k for k, client_id in enumerate(self.client_ids)}

    @property
    def counts(self) -> NDArray[np.int64]:
        """Numbers of rows, (K,)."""
        return np.diff(self.begins)


def of_frame(
    data: Any, by: Hashable | Sequence[Hashable], names: Sequence[str] | None, *, texts: bool = False
) -> Table:
    """Group the rows of one opened table by a column, or columns; clients are in the order of first appearance.

    With `texts` columns of texts become arrays of objects; without, they are refused.
    """
    if not isinstance(data, Opened):
        more = ", or make a table of it, pandas.DataFrame(data)" if isinstance(data, Mapping) else ""
        raise DataError(f"by={by!r} is for one table, and data are {type(data).__name__}; leave by= out{more}.")
    keys = keys_of(by, data.names, getattr(getattr(data.native, "index", None), "names", ()) or ())
    wanted = list(names) if names is not None else [name for name in data.names if name not in keys]
    table = rows_first(data, keys, wanted)
    of_keys = [table.column(key) for key in keys]
    codes = [pd.factorize(np.asarray(key.to_numpy()) if hasattr(key, "to_numpy") else key)[0] for key in of_keys]
    if not len(codes[0]):
        raise DataError("the table has no rows; there is nothing to fit.")
    if empty := int(np.sum(np.min(codes, axis=0) < 0)):
        raise DataError(f"by={list(keys)} is missing in {empty} of {len(codes[0])} rows; fill it in, or drop them.")
    numbers = codes[0]
    for code in codes[1:]:
        numbers = pd.factorize(numbers * (code.max() + 1) + code)[0]
    numbers, first = numbers.astype(np.int64), np.unique(numbers, return_index=True)[1]
    firsts = [key[first] for key in of_keys]
    values = zip(*(one.to_list() if hasattr(one, "to_list") else one.tolist() for one in firsts), strict=True)
    ids = [id_of(value, keys) for value in values]
    require_ids(dict.fromkeys(ids))
    order, begins = np.argsort(numbers, kind="stable"), _begins(np.bincount(numbers))
    columns = frames.columns(table, wanted, "data", texts=texts)
    arrays = {str(name): np.ascontiguousarray(column[order]) for name, column in columns.items()}
    return Table(tuple(map(str, ids)), begins, arrays)


def of_clients(clients: Mapping[Any, Any]) -> Table | None:
    """Concatenate the arrays of clients; None where they are not rows of one table."""
    first = next(iter(clients.values()), None)
    if first is None or any(not isinstance(data, Mapping) or set(first) != set(data) for data in clients.values()):
        return None
    values = [value for data in clients.values() for value in data.values()]
    if any(np.ma.isMaskedArray(value) or frames.has_categories(value) for value in values):
        return None  # NumPy would join what lies below the masks, and values of categories
    for client_id, data in clients.items():
        frames.require_alignment(data, f"client {str(client_id)!r}")
    arrays = {str(name): [np.asarray(data[name]) for data in clients.values()] for name in first}
    lengths = {tuple(len(array) if array.ndim else 0 for array in of_name) for of_name in arrays.values()}
    kinds = [{(array.dtype.kind, array.shape[1:]) for array in of_name} for of_name in arrays.values()]
    of_numbers = all(len(kind) == 1 and next(iter(kind))[0] in "biuf" for kind in kinds)
    if len(lengths) != 1 or 0 in (counts := lengths.pop()) or not of_numbers:
        return None
    columns = {name: np.concatenate(of_name) for name, of_name in arrays.items()}
    require_ids(clients)
    table = Table(tuple(map(str, clients)), _begins(counts), columns)
    return None if gaps.gaps(columns) else table


def complete(clients: Mapping[Any, Any], missing: str) -> Any:
    """Clients' data without rows that have missing values, as `missing.complete` leaves them; a table stays one."""
    if not isinstance(clients, Table):
        return gaps.complete(clients, missing)
    if not gaps.gaps(clients.columns):
        return clients
    kept = gaps.complete(clients, missing).values()
    columns = {name: np.concatenate([arrays[name] for arrays in kept]) for name in clients.columns}
    counts = [len(next(iter(arrays.values()))) for arrays in kept]
    return Table(clients.client_ids, _begins(counts), columns)


def _begins(counts: Any) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)])
