"""Split rows into a training and a validation part, each client its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedppl.data.ids import require_clients
from fedppl.model.arrays import as_arrays
from fedppl.numerics.streams import stream
from fedppl.run.start import seed_of
from fedppl.search.loss import Clients
from fedppl.settings import between
from fedppl.types import DataError, DeclarationError


def holdout(
    clients: Clients, fraction: float = 0.2, *, rows: Sequence[str] | None = None, random_seed: int
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Split every client's rows into a training and a validation part; each client splits its own.

    Parameters
    ----------
    clients
        Client id to that client's data, name to array.
    fraction
        Part of a client's rows to hold out, rounded to whole rows: at least one, and never all.
    rows
        Names of the arrays that have a row per observation. By default the arrays of the leading length that most
        of a client's arrays have. All others, scalars too, go to both parts unchanged.
    random_seed
        Seed of the rows that are held out; they depend on it and on the client's id, not on the other clients.

    Returns
    -------
    training, validation
        Client id to data, each with rows in the order they had.

    Raises
    ------
    DataError
        If a client has a single row, or it is not clear which of its arrays have a row per observation.
    DeclarationError
        If the fraction is out of range.

    Examples
    --------
    >>> import numpy as np, fedppl
    >>> training, validation = fedppl.holdout({"a": {"X": np.ones((10, 2)), "y": np.arange(10)}}, random_seed=1)
    >>> training["a"]["X"].shape, len(validation["a"]["y"])
    ((8, 2), 2)

    Notes
    -----
    *When this fails.* Rows that belong together, such as visits of one patient, should not be torn apart: split those
    by hand. An array that has as many rows as there are observations by chance is split too; name those to split in
    `rows`.
    """
    if isinstance(rows, str):
        raise DeclarationError(f"rows={rows!r} must be a list of names: [{rows!r}].")
    fraction = between("fraction", fraction, 0, 1)
    require_clients(clients, 'of a frame {site: dict(rows[["X", "y"]]) for site, rows in frame.groupby("site")}')
    if random_seed is None:
        raise DeclarationError("random_seed=None would hold out other rows in every call; pass a non-negative int.")
    seed = seed_of(random_seed)
    checked = {str(client_id): as_arrays(str(client_id), data) for client_id, data in clients.items()}
    by_client = {client_id: _split_names(client_id, arrays, rows) for client_id, arrays in checked.items()}
    usual = next(iter(by_client.values()), set())
    training: dict[str, dict[str, Any]] = {}
    validation: dict[str, dict[str, Any]] = {}
    for client_id, arrays in checked.items():
        split = by_client[client_id]
        if split != usual:
            raise DataError(
                f"client {client_id!r}: {sorted(split)} have one length, at other clients {sorted(usual)} do; "
                "name the arrays that have a row per observation in rows=[...]."
            )
        count = len(arrays[next(iter(split))])
        if count < 2:
            raise DataError(
                f"client {client_id!r} has {count} row, which cannot be split in two; leave the client out, or give it "
                "validation data of its own."
            )
        size = min(max(round(fraction * count), 1), count - 1)
        order = stream((seed, 3, *client_id.encode())).permutation(count)
        for part, chosen in ((training, np.sort(order[size:])), (validation, np.sort(order[:size]))):
            part[client_id] = {name: array[chosen] if name in split else array for name, array in arrays.items()}
    return training, validation


def _split_names(client_id: str, arrays: Mapping[str, Any], rows: Sequence[str] | None) -> set[str]:
    """Names of a client's arrays that have a row per observation."""
    lengths = {name: len(array) for name, array in arrays.items() if np.ndim(array)}
    if rows is not None:
        named = {rows} if isinstance(rows, str) else set(rows)
        found = {lengths.get(name) for name in named}
        if len(found) != 1 or None in found:
            shapes = {name: np.shape(arrays[name]) if name in arrays else "absent" for name in sorted(named)}
            raise DataError(f"client {client_id!r}: rows={sorted(named)} must name arrays of one length, not {shapes}.")
        return named
    by_length = {n: {name for name in lengths if lengths[name] == n} for n in lengths.values()}
    common = sorted(by_length.values(), key=len, reverse=True)
    if not common or (len(common) > 1 and len(common[0]) == len(common[1])):
        shapes = {name: np.shape(array) for name, array in arrays.items()}
        raise DataError(
            f"client {client_id!r}: arrays of shapes {shapes} do not tell which have a row per observation; "
            "name those in rows=[...]."
        )
    return common[0]
