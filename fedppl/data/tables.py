"""Rows of many clients as one table, grouped by client, without an object per client."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from fedppl.data import frames
from fedppl.data.frames import eager, id_of, keys_of, require_ids
from fedppl.data.missing import OUTCOMES
from fedppl.types import Array

logger = logging.getLogger(__name__)

FEWEST = 50  # clients from which on data are read as one table
MANY = 1000  # clients from which on each is not examined by itself
_NAMED = 8  # clients in a line of the log


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of all clients.

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

    def rows(self, k: int) -> dict[str, Array]:
        """The arrays of the client in place k."""
        return {name: column[self.begins[k] : self.begins[k + 1]] for name, column in self.columns.items()}

    def each(self) -> dict[str, dict[str, Array]]:
        """The arrays of every client."""
        return {client_id: self.rows(k) for k, client_id in enumerate(self.client_ids)}

    @property
    def counts(self) -> NDArray[np.int64]:
        """Numbers of rows, (K,)."""
        return np.diff(self.begins)


def of_frame(
    data: Any,
    by: Hashable | Sequence[Hashable],
    names: Sequence[str] | None,
    missing: str,
    fewest: int,
    *,
    texts: bool = False,
) -> Table | None:
    """Group the rows of one data frame by a column, or columns; None where it has to be read client by client.

    That is with fewer clients than `fewest`, with data that are not a data frame, and with missing values that are not
    dropped. With `texts` columns of texts become arrays of objects; without, they are refused.
    """
    if isinstance(data, xr.Dataset) or not frames.is_frame(data) or missing == OUTCOMES:
        return None
    keys = keys_of(by, frames.names_of(data), getattr(getattr(data, "index", None), "names", ()) or ())
    wanted = list(names) if names is not None else [name for name in frames.names_of(data) if name not in keys]
    table = eager(data)
    numbers, first = _numbered([table.get_column(key).to_numpy() for key in keys])
    if len(first) < fewest or np.any(numbers < 0):
        return None
    columns = frames.columns(table, wanted, "data", texts=texts)
    whose = zip(*(table.get_column(key)[first].to_list() for key in keys), strict=True)
    ids = [id_of(key_values, keys) for key_values in whose]
    gone = np.any([_missing(column) for column in columns.values()], axis=0)
    if np.any(gone):
        if missing != "drop":
            return None
        kept = np.zeros(len(first), dtype=bool)
        kept[numbers[~gone]] = True
        if not np.all(kept):
            return None
        lost, had = (np.bincount(rows, minlength=len(first)) for rows in (numbers[gone], numbers))
        where = np.flatnonzero(lost)
        logger.warning(
            "%d of %d rows are left out, at %d clients: values are missing: %s%s",
            gone.sum(),
            len(gone),
            len(where),
            ", ".join(f"{lost[k]} of {had[k]} at client {str(ids[k])!r}" for k in where[:_NAMED]),
            f", and {len(where) - _NAMED} others" if len(where) > _NAMED else "",
        )
        numbers, columns = numbers[~gone], {name: column[~gone] for name, column in columns.items()}
    order = np.argsort(numbers, kind="stable")
    begins = np.concatenate([[0], np.cumsum(np.bincount(numbers, minlength=len(first)))])
    require_ids(dict.fromkeys(ids))
    arrays = {name: np.ascontiguousarray(column[order]) for name, column in columns.items()}
    return Table(tuple(map(str, ids)), begins, arrays)


def of_clients(clients: Mapping[Any, Any]) -> Table | None:
    """Concatenate the arrays of clients; None where they are not rows of one table."""
    first = next(iter(clients.values()), None)
    if not isinstance(first, Mapping) or any(set(first) != set(data) for data in clients.values() if data is not first):
        return None
    parts: dict[str, list[Array]] = {str(name): [] for name in first}
    counts = []
    for data in clients.values():
        arrays = [np.asarray(data[name]) for name in parts]
        lengths = {len(array) if array.ndim else -1 for array in arrays}
        if len(lengths) != 1 or -1 in lengths or 0 in lengths:
            return None
        counts.append(lengths.pop())
        for arrays_of_name, array in zip(parts.values(), arrays, strict=True):
            arrays_of_name.append(array)
    for arrays_of_name in parts.values():
        if (
            len({(array.dtype.kind, array.shape[1:]) for array in arrays_of_name}) > 1
            or arrays_of_name[0].dtype.kind not in "biuf"
        ):
            return None
    columns = {name: np.concatenate(arrays_of_name) for name, arrays_of_name in parts.items()}
    if any(np.any(_missing(column)) for column in columns.values()):
        return None
    require_ids(clients)
    return Table(tuple(map(str, clients)), np.concatenate([[0], np.cumsum(counts)]), columns)


def _missing(column: Array) -> NDArray[np.bool_]:
    """Which rows have a missing value."""
    if column.dtype.kind not in "fO":
        return np.zeros(len(column), dtype=bool)
    return np.asarray(pd.isna(column).any(axis=tuple(range(1, column.ndim))))


def _numbered(keys: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group number of each row, in the order of first appearance, and the first row of each group.

    Rows with a missing key have the number -1.
    """
    codes = [pd.factorize(key)[0] for key in keys]
    numbers = codes[0].astype(np.int64)
    for code in codes[1:]:
        gone = (numbers < 0) | (code < 0)
        numbers = pd.factorize(numbers * (code.max(initial=0) + 1) + code)[0].astype(np.int64)
        numbers[gone] = -1
    groups, first = np.unique(numbers, return_index=True)
    first = first[groups >= 0]
    order = np.argsort(first)
    if len(codes) > 1:  # numbers may have gaps where a key is missing
        again = np.full(int(numbers.max(initial=0)) + 1, -1)
        again[groups[groups >= 0][order]] = np.arange(len(order))
        numbers = np.where(numbers < 0, -1, again[numbers])
    return numbers, first[order]
