"""Missing values: count and refuse them, drop their rows, or drop rows whose outcome is missing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedppl.settings import one_of
from fedppl.types import Array, DataError

logger = logging.getLogger(__name__)

OUTCOMES = "drop_outcomes"  # drop rows whose outcome is missing, and no others
_NAMED = 8  # clients in a message
_RULES = ("error", "drop", OUTCOMES)


def required(missing: Any) -> str:
    """Check the keyword `missing`."""
    hint = f'nothing is imputed: "{OUTCOMES}" leaves out rows whose outcome is missing' if missing == "impute" else ""
    return one_of("missing", missing, _RULES, hint)


def complete(clients: Mapping[Any, Any], missing: str) -> Any:
    """Clients' arrays without rows that have missing values: refuse such rows with counts, or drop and log them."""
    counts = {k: gaps(data) for k, data in clients.items()}
    if not any(counts.values()):
        return clients
    if missing == "error":
        raise DataError(f'values are missing: {_listed(counts)}; drop or impute them (missing="drop" drops rows).')
    kept = {k: dropped(k, data) if counts[k] else (data, 0, 0) for k, data in clients.items()}
    lines = [f"client {k}: {gone} of {rows} rows are left out" for k, (_, gone, rows) in kept.items() if gone]
    more = f", and at {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
    total = sum(gone for _, gone, _ in kept.values())
    logger.warning("values are missing in %d rows: %s%s", total, "; ".join(lines[:_NAMED]), more)
    return {k: data for k, (data, _, _) in kept.items()}


def _listed(counts: Mapping[Any, Mapping[str, int]]) -> str:
    each = [(name, count, str(k)) for k, by_name in counts.items() for name, count in by_name.items()]
    listed = ", ".join(f"{name!r} in {count} rows at client {k!r}" for name, count, k in each[:_NAMED])
    return listed + (f", and {len(each) - _NAMED} more" if len(each) > _NAMED else "")


def gaps(data: Any) -> dict[str, int]:
    """Number of rows with missing values, by name of the array."""
    return {name: int(rows.sum()) for name, rows in _gone(data).items()} if isinstance(data, Mapping) else {}


def _gone(data: Mapping[str, Any]) -> dict[str, Array]:
    """Whether each row has a missing value, by name of the arrays that have some."""
    rows = {name: missing_rows(value) for name, value in data.items()}
    return {name: mask for name, mask in rows.items() if mask is not None and mask.any()}


def missing_rows(value: Any) -> Array | None:
    """Whether each row has a missing value; None if the value is not an array of floats or objects."""
    entries = _missing_entries(value)
    return None if entries is None else np.asarray(entries.any(axis=tuple(range(1, entries.ndim))))


def _missing_entries(value: Any) -> Array | None:
    """Whether each entry is masked, None, NaN, NaT or NA; None if the value is not an array of floats or objects."""
    if np.ma.is_masked(value):
        return np.asarray(np.ma.getmaskarray(value))
    array = _array(value)
    if array is None or array.dtype.kind not in "fO" or not array.ndim:
        return None
    return np.asarray(pd.isna(array), dtype=bool)


def _array(value: Any) -> Array | None:
    """Values as an array, NA of pandas kept as it is; None if they are not an array."""
    try:
        is_extension = isinstance(getattr(value, "dtype", None), pd.api.extensions.ExtensionDtype)
        return np.asarray(value, dtype=object) if is_extension else np.asarray(value)
    except (ValueError, TypeError, RuntimeError):  # refused where arrays are made
        return None


def dropped(client_id: Any, data: Mapping[str, Any]) -> tuple[dict[str, Any], int, int]:
    """A client's data without rows that have missing values, the number of these, and of all."""
    gone = _gone(data)
    rows = {len(data[name]) for name in gone}
    if len(rows) != 1:
        what = f"arrays of {sorted(rows)} rows have missing values"
        raise DataError(f"client {str(client_id)!r}: {what}; drop them before the fit.")
    (count,) = rows
    kept = ~np.logical_or.reduce(list(gone.values()))
    if not kept.any():
        raise DataError(f"client {str(client_id)!r}: each of its {count} rows has missing values; leave it out.")
    arrays = {name: value if np.ma.isMaskedArray(value) else np.asarray(value) for name, value in data.items()}
    by_name = {
        name: np.asarray(array[kept] if array.ndim and len(array) == count else array) for name, array in arrays.items()
    }
    return by_name, int(count - kept.sum()), count


class Kept(NamedTuple):
    """Rows of a client that have outcomes, and all rows, with which the model is checked."""

    data: dict[str, Any]
    filled: dict[str, Any]  # all rows; dropped ones have the values of another row
    rows: Array  # which rows of `filled` are kept, (n,) bool
    outcomes: tuple[str, ...]


def without_outcomes(clients: Mapping[Any, Mapping[str, Any]], outcomes: Sequence[str]) -> dict[Any, Kept | None]:
    """Clients' data without rows whose outcomes are all missing; None for a client without missing values.

    A row without outcome has no information on the model's variables if it is missing at random. Missing values in
    other rows are refused, with counts over all clients.
    """
    masks, elsewhere = {}, {}
    for client_id, data in clients.items():
        gone = _gone(data)
        of_outcomes = [rows for name, rows in gone.items() if name in outcomes]
        mask: Any = np.logical_or.reduce(of_outcomes) if len(set(map(len, of_outcomes))) == 1 else None
        masks[client_id] = mask
        left = {
            name: int(np.sum(rows & ~mask) if mask is not None and len(rows) == len(mask) else rows.sum())
            for name, rows in gone.items()
            if name not in outcomes or mask is None
        }
        if any(left.values()):
            elsewhere[client_id] = {name: count for name, count in left.items() if count}
    if elsewhere:
        what = f"values are missing: {_listed(elsewhere)}, which are not among the model's outcomes {list(outcomes)}"
        raise DataError(f'{what}; impute predictors before the fit, or say missing="drop".')
    return {k: None if mask is None else _without(k, clients[k], outcomes, mask) for k, mask in masks.items()}


def _without(client_id: Any, data: Mapping[str, Any], outcomes: Sequence[str], mask: Any) -> Kept:
    alike = [name for name in outcomes if name in data and np.ndim(data[name]) and len(data[name]) == len(mask)]
    for name in alike:
        entries = _missing_entries(data[name])
        gone = np.zeros(len(mask), dtype=bool) if entries is None else entries.reshape(len(mask), -1).all(axis=1)
        if partly := int(np.sum(mask & ~gone)):
            what = f"client {str(client_id)!r}: {partly} rows have a part of their outcomes {alike} and lack others"
            raise DataError(f'{what}; impute these before the fit, or say missing="drop".')
    if mask.all():
        raise DataError(f"client {str(client_id)!r}: all its outcomes {alike} are missing; leave the client out.")
    logger.info("client %s: %d of %d outcomes are missing, and left to the model", client_id, mask.sum(), len(mask))
    arrays = {name: np.asarray(np.ma.getdata(value)) for name, value in data.items()}
    by_row = {name for name, array in arrays.items() if array.ndim and len(array) == len(mask)}
    first = int(np.argmin(mask))
    filled = {
        name: np.where(mask.reshape(-1, *[1] * (array.ndim - 1)), array[first], array) if name in by_row else array
        for name, array in arrays.items()
    }
    kept = {name: array[~mask] if name in by_row else array for name, array in arrays.items()}
    return Kept(kept, filled, ~mask, tuple(alike))
