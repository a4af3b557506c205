"""Checks of clients' data that need no model: types, missing values, keys, columns; one type for each name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedppl.types import DataError

_EXACT = 2**53  # whole numbers that a float holds
_INTEGERS = 2.0**31  # PyMC keeps integers in 32 bits, and cuts larger ones down without a word


def as_arrays(client_id: str, data: Any) -> dict[str, Any]:
    """Turn one client's data into numeric arrays without missing values, or say what is wrong with them."""
    if not isinstance(data, Mapping):
        raise DataError(
            f"client {client_id!r}: data are {type(data).__name__}, not a mapping from name to array; "
            'pass for example {"X": ..., "y": ...}.'
        )
    if not data:
        raise DataError(f"client {client_id!r}: no data; leave the client out or give it its arrays.")
    arrays = {}
    for name, value in data.items():
        if not isinstance(name, str):
            raise DataError(
                f"client {client_id!r}: data have the name {name!r}, and names are texts; pass {str(name)!r}."
            )
        if np.ma.is_masked(value):
            raise DataError(f"client {client_id!r}: {name!r} has masked values; drop or impute them before the fit.")
        try:
            array = np.array(value)  # a copy: later rounds must see the data of the first
        except (ValueError, TypeError, RuntimeError) as error:  # torch's are RuntimeErrors
            remedy = "give rows of one length" if isinstance(error, ValueError) else "pass an array of NumPy"
            raise DataError(f"client {client_id!r}: {name!r} is no array: {error}; {remedy}.") from error
        if array.dtype.kind not in "biufc":
            what = f"is a {type(value).__name__} of dtype" if array.dtype == object else "has dtype"
            raise DataError(
                f"client {client_id!r}: {name!r} {what} {array.dtype}, which is not numeric; encode it as numbers "
                "in an array (categories as 0, 1, ..., by one code that all clients use)."
            )
        if np.issubdtype(array.dtype, np.complexfloating):
            raise DataError(
                f"client {client_id!r}: {name!r} has dtype {array.dtype}, and data must be real; pass its real and "
                "imaginary parts, or modulus and angle, as arrays of their own."
            )
        if array.size == 0:
            raise DataError(
                f"client {client_id!r}: {name!r} has shape {array.shape}, that is zero rows; leave the client out: "
                "its posterior is then that of a new client."
            )
        if np.issubdtype(array.dtype, np.inexact) and np.any(np.isnan(array)):
            where = tuple(int(i) for i in np.argwhere(np.isnan(array))[0])
            raise DataError(
                f"client {client_id!r}: {name!r} holds {array[where]} at index {where}; drop or impute missing values "
                "before the fit."
            )
        if array.dtype.kind in "iu" and np.any(big := (array > _EXACT) | (array < -_EXACT)):
            where = tuple(int(i) for i in np.argwhere(big)[0])
            raise DataError(
                f"client {client_id!r}: {name!r} holds {array[where]} at index {where}, and whole numbers are exact "
                "up to 2**53; give it in larger units or from another origin, number identifiers 0 to n - 1, or drop "
                "it if the model has no use for it."
            )
        arrays[name] = array
    return arrays


def needs_same_keys(clients: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse clients whose data have other names than most."""
    count: defaultdict[tuple[str, ...], int] = defaultdict(int)
    for arrays in clients.values():
        count[tuple(sorted(arrays))] += 1
    usual = max(count, key=lambda keys: count[keys])
    for client_id, arrays in clients.items():
        if tuple(sorted(arrays)) != usual:
            raise DataError(
                f"client {client_id!r}: data keys {sorted(arrays)} differ from the other clients' {list(usual)}; "
                "rename or complete this client's data."
            )


def group_by_columns(clients: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Group client ids by all but the leading axis of their arrays, the largest group first."""
    groups: defaultdict[tuple[tuple[str, int, tuple[int, ...]], ...], list[str]] = defaultdict(list)
    for client_id, arrays in clients.items():
        key = tuple((name, array.ndim, array.shape[1:]) for name, array in sorted(arrays.items()))
        groups[key].append(client_id)
    return sorted(groups.values(), key=len, reverse=True)


def one_type(clients: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Give every name one type at all clients, one that holds the values of all exactly.

    Integers at one client and reals at another become integers where all values are whole: what indexes must stay an
    integer, and a column that had missing values once is a column of reals. Integers of more than 32 bits become reals.
    """
    changed = {client_id: dict(arrays) for client_id, arrays in clients.items()}
    for name in next(iter(clients.values())):
        found = {arrays[name].dtype for arrays in clients.values()}
        dtype = _common(found, [arrays[name] for arrays in clients.values()])
        if found == {dtype}:
            continue
        for arrays in changed.values():
            arrays[name] = arrays[name].astype(dtype)
    return changed


def _common(found: set[Any], arrays: list[Any]) -> Any:
    reals = {dtype for dtype in found if dtype.kind == "f"}
    if reals == found or any(dtype.kind == "c" for dtype in found):
        return np.result_type(*found)
    if not all(np.all(fits_integers(a)) for a in arrays if a.dtype.kind != "b"):
        return np.dtype(np.float64)
    if len(found) == 1:
        return next(iter(found))
    if found - reals == {np.dtype(bool)} and all(np.all((a == 0) | (a == 1)) for a in arrays):
        return np.dtype(bool)
    integers = np.result_type(*(found - reals))
    return np.dtype(np.int64) if reals or integers.kind != "i" else integers


def fits_integers(array: Any) -> Any:
    """Which entries are whole numbers of at most 32 bits."""
    whole = array == np.floor(array) if array.dtype.kind == "f" else True
    return whole & (array >= -_INTEGERS) & (array < _INTEGERS)
