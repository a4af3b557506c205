"""Checks of new inputs at which a family of models predicts: one rule for all families."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from fedppl.model.enrolment import held_exactly
from fedppl.types import DataError


def new_inputs(
    inputs: Any, dtypes: Mapping[str, str], held: Mapping[str, Any], unread: Collection[str] = ()
) -> dict[str, Any]:
    """New inputs by name, in the types of the model's containers, or an error that says what is wrong with them.

    `dtypes` are of the containers that are needed; new inputs have the columns of the client's own arrays, `held`. What
    is `unread`, such as the outcome, may be there.
    """
    if not isinstance(inputs, Mapping):
        raise DataError(f'new inputs are {type(inputs).__name__}; pass a mapping from name to array: {{"X": ...}}.')
    if set(inputs) - set(unread) != set(dtypes):
        names = sorted(map(str, inputs))
        raise DataError(f"new inputs {names} must be {sorted(dtypes)}, the containers that predictions are made from.")
    return {name: _one(name, inputs[name], dtype, np.shape(held[name])) for name, dtype in dtypes.items()}


def _one(name: str, value: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """One input: real, finite, without a mask, with the columns of the client's and a row or more."""
    what = f"new inputs {name!r}"
    if np.ma.is_masked(value):
        raise DataError(f"{what} have masked values; drop or impute them.")
    try:
        new = np.asarray(value)
    except ValueError as error:
        raise DataError(f"{what} are no array: {error}; give rows of one length.") from error
    if new.dtype.kind not in "biuf":
        raise DataError(f"{what} have dtype {new.dtype}; pass real numbers.")
    if new.ndim != len(shape) or new.shape[1:] != shape[1:] or not new.size:
        raise DataError(
            f"{what} have shape {new.shape}, the client's have {shape}; give them at least one row and the same "
            "columns."
        )
    if not np.all(np.isfinite(new)):
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(new))[0])
        raise DataError(
            f"{what} hold missing or infinite values, {new[where]} at index {where} first; drop or impute them."
        )
    return held_exactly(what, new, dtype) if np.dtype(dtype).kind in "biu" else new.astype(dtype)
