"""What a partition looks like: rows of every label at every client, as a table and as stacked bars."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from fedppl.data import frames
from fedppl.data.columns import eager
from fedppl.data.ids import id_of, keys_of, require_ids
from fedppl.data.missing import OUTCOMES
from fedppl.settings import one_of, shown, whole
from fedppl.types import Array, DataError, DeclarationError

if TYPE_CHECKING:
    import pandas as pd


def table(partition: Partition, labels: Any) -> pd.DataFrame:
    """Rows of every label at every client, and their total: a row for each client.

    Parameters
    ----------
    partition
        What `label_skew` and its like returned.
    labels
        Label of every row that was divided, (n,), in the same order.

    Returns
    -------
    pandas.DataFrame
        A row for each client; a column "rows", then one for each label in rising order.

    Raises
    ------
    DataError
        If there are not as many labels as rows, or they are none: not one for every row, of several types, or numbers
        that are missing or infinite.
    DeclarationError
        If `partition` is none.

    Examples
    --------
    >>> from fedppl.data import label_skew
    >>> labels = np.repeat([0, 1], 30)
    >>> int(table(label_skew(labels, 4, 1, random_seed=0), labels)["rows"].sum())
    60

    Notes
    -----
    *When this fails.* Only the number of labels is checked: those of other rows, or in another order, are counted all
    the same. Outcomes that are no classes have a column for every value: bin them first.
    """
    import pandas as pd

    if not isinstance(partition, Partition):
        raise DeclarationError(
            f"partition is {type(partition).__name__}; pass what label_skew and its like return, then the labels."
        )
    y = require_column("labels", labels)
    held = sum(len(at) for at in partition.rows.values())
    if len(y) != held:
        raise DataError(f"{len(y)} labels for a partition of {held} rows; pass those of the rows that were divided.")
    known = np.unique(y)
    counts = {name: [int(np.sum(y[at] == label)) for label in known] for name, at in partition.rows.items()}
    found = pd.DataFrame.from_dict(counts, orient="index", columns=known.tolist())
    if "rows" in found:
        raise DataError("a label is called 'rows', as the column of counts is; call it something else.")
    found.insert(0, "rows", [len(at) for at in partition.rows.values()])
    return found.rename_axis(index="client", columns="label")


def plot(partition: Partition, labels: Any, ax: Any = None) -> Any:
    """Draw rows of every label at every client as stacked bars; the axes are returned.

    Parameters
    ----------
    partition, labels
        As in `table`.
    ax
        Matplotlib axes; by default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    DataError, DeclarationError
        As in `table`.
    ModuleNotFoundError
        If matplotlib is not installed.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("Agg")
    >>> from fedppl.data import label_skew
    >>> labels = np.repeat([0, 1, 2], 40)
    >>> axes = plot(label_skew(labels, 6, 2, random_seed=1), labels)
    >>> len(axes.patches)  # a bar for each of 3 labels at each of 6 clients
    18

    Notes
    -----
    *When this fails.* There are 20 colours: with more labels they repeat, and there is no legend. Bars stand in the
    order of the clients and have no names; `table` has the ids and the numbers.
    """
    import matplotlib.pyplot as plt

    counts = table(partition, labels).drop(columns="rows")
    axes = plt.subplots(figsize=(max(6.0, 0.18 * len(counts)), 3.5), layout="constrained")[1] if ax is None else ax
    bottom, colours = np.zeros(len(counts)), plt.get_cmap("tab20")
    for k, label in enumerate(counts.columns):
        axes.bar(
            np.arange(len(counts)), counts[label], bottom=bottom, width=0.9, color=colours(k % 20), label=str(label)
        )
        bottom += counts[label].to_numpy()
    axes.set(xlabel="client", ylabel="rows", xlim=(-0.6, len(counts) - 0.4))
    axes.set_xticks([])
    if len(counts.columns) <= 20:
        axes.legend(title="label", fontsize="small", ncols=2)
    return axes


# What partitions have in common: labels drawn from a pile, and rows cut into slices -----------------------------------

Rows = NDArray[np.int64]


class Partition(NamedTuple):
    """Who holds which rows, and what kinds of rows a client was meant to hold."""

    rows: Mapping[str, Rows]  # client id to positions, in rising order
    kinds: Mapping[str, tuple[Any, ...]]  # labels, subclasses or sources of each client


def generator(random_seed: Any) -> np.random.Generator:
    """A generator, or an error that names the seed."""
    try:
        return np.random.default_rng(random_seed)
    except (TypeError, ValueError) as error:
        raise DeclarationError(
            f"random_seed={shown(random_seed)} must be a non-negative int, a Generator or None."
        ) from error


def require_column(name: str, values: Any) -> NDArray[Any]:
    """One value for every row, numbers or strings, all of one type, and none of them missing."""
    if np.ma.is_masked(values):
        raise DataError(f"{name} hold masked values; drop these rows.")
    try:
        found = np.asarray(values)
    except ValueError as error:  # rows of several lengths
        raise DataError(f"{name} are no column; pass one value for every row.") from error
    if found.ndim != 1 or not len(found):
        raise DataError(f"{name} have shape {found.shape}; pass one for every row.")
    # NumPy makes strings of all values of a list that has one, of NaN too.
    given = list(values) if found.dtype.kind in "US" and isinstance(values, list | tuple) else found.tolist()
    if found.dtype.kind in "OUS" and len({_kind(value) for value in given}) > 1:
        raise DataError(f"{name} are of several types, {shown(given[:3])} ...; pass numbers, or strings.")
    if found.dtype.kind not in "OUSbiuf" or not isinstance(given[0], str | bytes | int | float):
        raise DataError(f"{name} are of type {type(found[0]).__name__}; pass numbers, or strings.")
    numbers = found.astype(float) if found.dtype.kind == "O" and isinstance(given[0], float) else found
    if numbers.dtype.kind == "f" and not np.all(np.isfinite(numbers)):
        raise DataError(f"{name} hold missing or infinite values; drop these rows.")
    return found


def _kind(value: Any) -> type:
    """The type of a value; strings of NumPy are strings."""
    return next((kind for kind in (str, bytes) if isinstance(value, kind)), type(value))


def require_whole(**numbers: Any) -> None:
    """Whole numbers, each by its name."""
    for name, value in numbers.items():
        whole(name, value)


def names_of(clients: int) -> list[str]:
    """Ids of so many clients."""
    return [f"client {k}" for k in range(clients)]


def kinds_of(known: Sequence[Any], clients: int, each: int, rng: np.random.Generator) -> list[tuple[Any, ...]]:
    """Draw kinds for every client from a pile that is refilled, none twice."""
    pile: list[Any] = []
    found = []
    for _ in range(clients):
        own: list[Any] = []
        while len(own) < each:
            if not any(kind not in own for kind in pile):
                pile = pile + [known[i] for i in rng.permutation(len(known))]
            own.append(pile.pop(next(i for i, kind in enumerate(pile) if kind not in own)))
        found.append(tuple(own))
    return found


def sliced(
    drawn: Sequence[Sequence[tuple[Any, ...]]], columns: Sequence[NDArray[Any]], cuts: str, rng: np.random.Generator
) -> Partition:
    """Slice the rows of every kind among the clients that drew it."""
    one_of("cuts", cuts, ("same", "independent", "equal"))
    names = names_of(len(drawn[0]))
    held: dict[str, list[Rows]] = {name: [] for name in names}
    known_cuts: dict[int, NDArray[np.float64]] = {}
    for kinds, column in zip(drawn, columns, strict=True):
        for kind in dict.fromkeys(kind for own in kinds for kind in own):
            owners = [name for name, own in zip(names, kinds, strict=True) if kind in own]
            places = rng.permutation(np.flatnonzero(column == kind))
            if len(places) < len(owners):
                raise DataError(f"{len(places)} rows of {kind!r} for {len(owners)} clients; lower clients=.")
            parts = len(owners)
            if cuts == "equal":
                known_cuts[parts] = np.arange(1, parts) / parts
            elif cuts == "independent" or parts not in known_cuts:
                # M − 1 of N − 1 places, without replacement, as fractions of N.
                chosen = np.sort(rng.choice(len(places) - 1, parts - 1, replace=False)) + 1
                known_cuts[parts] = chosen / len(places)
            ends = _places_of(known_cuts[parts], len(places))
            for owner, part in zip(owners, np.split(places, ends), strict=True):
                held[owner].append(part)
    rows = {name: np.sort(np.concatenate(parts)).astype(np.int64) for name, parts in held.items()}
    return Partition(rows, {name: tuple(kind for own in drawn for kind in own[k]) for k, name in enumerate(names)})


def _places_of(fractions: NDArray[np.float64], rows: int) -> Rows:
    """Cut points of N rows at these fractions, none of them equal, so that no slice is empty."""
    ends = np.round(fractions * rows).astype(np.int64)
    for k in range(len(ends)):  # push up what collides, then down what ran over
        ends[k] = max(ends[k], 1 if k == 0 else ends[k - 1] + 1)
    for k in reversed(range(len(ends))):
        ends[k] = min(ends[k], rows - (len(ends) - k))
    return ends


# Rows of many clients as one table, a client's one after the other: nothing is done for each client -------------------

logger = logging.getLogger(__name__)

FEWEST = 50  # clients from which they are read as one table
MANY = 1000  # clients from which not each is looked at alone
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
    """One table whose rows are grouped by a column, or columns; None where it is to be read client by client.

    That is where there are fewer clients, the data are no table with rows, or values are missing that are not dropped.
    Where `texts` are wanted, columns of them are arrays of objects; else they are refused.
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
    ids = [id_of(one, keys) for one in whose]
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
    held = {name: np.ascontiguousarray(column[order]) for name, column in columns.items()}
    return Table(tuple(map(str, ids)), begins, held)


def of_clients(clients: Mapping[Any, Any]) -> Table | None:
    """Clients' arrays by id, one after the other; None where they are no rows of one table."""
    first = next(iter(clients.values()), None)
    if not isinstance(first, Mapping) or any(set(first) != set(one) for one in clients.values() if one is not first):
        return None
    parts: dict[str, list[Array]] = {str(name): [] for name in first}
    counts = []
    for data in clients.values():
        arrays = [np.asarray(data[name]) for name in parts]
        lengths = {len(array) if array.ndim else -1 for array in arrays}
        if len(lengths) != 1 or -1 in lengths or 0 in lengths:
            return None
        counts.append(lengths.pop())
        for own, array in zip(parts.values(), arrays, strict=True):
            own.append(array)
    for own in parts.values():
        if len({(array.dtype.kind, array.shape[1:]) for array in own}) > 1 or own[0].dtype.kind not in "biuf":
            return None
    columns = {name: np.concatenate(own) for name, own in parts.items()}
    if any(np.any(_missing(column)) for column in columns.values()):
        return None
    require_ids(clients)
    return Table(tuple(map(str, clients)), np.concatenate([[0], np.cumsum(counts)]), columns)


def _missing(column: Array) -> NDArray[np.bool_]:
    """Rows in which something is missing."""
    if column.dtype.kind not in "fO":
        return np.zeros(len(column), dtype=bool)
    return np.asarray(pd.isna(column).any(axis=tuple(range(1, column.ndim))))


def _numbered(keys: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each row the number of its group, in the order of first appearance, and each group's first row.

    Rows in which a key is missing have number -1.
    """
    codes = [pd.factorize(key)[0] for key in keys]
    numbers = codes[0].astype(np.int64)
    for code in codes[1:]:
        gone = (numbers < 0) | (code < 0)
        numbers = pd.factorize(numbers * (code.max(initial=0) + 1) + code)[0].astype(np.int64)
        numbers[gone] = -1
    found, first = np.unique(numbers, return_index=True)
    first = first[found >= 0]
    order = np.argsort(first)
    if len(codes) > 1:  # numbers may have gaps where a key is missing
        again = np.full(int(numbers.max(initial=0)) + 1, -1)
        again[found[found >= 0][order]] = np.arange(len(order))
        numbers = np.where(numbers < 0, -1, again[numbers])
    return numbers, first[order]
