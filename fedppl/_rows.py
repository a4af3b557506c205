"""Rows of a client's data: how many observations there are, and some of them at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedppl._graph import Parts
from fedppl.types import DataError

if TYPE_CHECKING:
    from fedppl.model import ClientModel

__all__ = ["count", "take"]


def count(parts: Parts, arrays: Mapping[str, Any]) -> int:
    """Number of observations: the length of what is observed, summed where observed arrays differ in length."""
    lengths = _observed_lengths(parts, arrays)
    return lengths.pop() if len(lengths) == 1 else sum(lengths)


def take(client: ClientModel, rows: Any) -> tuple[Any, ...]:
    """The kernel's inputs with some of the rows of every array that has a row per observation."""
    parts = client.template.parts
    lengths = _observed_lengths(parts, client.arrays)
    free = client.inputs[len(parts.data) :]
    if len(lengths) > 1 or not parts.data or any(lengths & set(shape.tolist()) for shape in free):
        raise DataError(
            f"client {client.client_id!r}: observations of lengths {sorted(lengths)} cannot be taken in batches; that "
            "needs pm.Data containers, observed arrays of one length, and no local variable with an entry per row. "
            "Use batch_size=None."
        )
    (length,) = lengths
    held = client.inputs[: len(parts.data)]
    return (*(value[rows] if np.ndim(value) and len(value) == length else value for value in held), *free)


def _observed_lengths(parts: Parts, arrays: Mapping[str, Any]) -> set[int]:
    names = {parts.model.rvs_to_values[rv].name for rv in parts.model.observed_RVs} & set(arrays)
    if not names:  # observed through an expression: the longest array is taken for it
        return {max((len(value) for value in arrays.values() if np.ndim(value)), default=1)}
    return {len(arrays[name]) if np.ndim(arrays[name]) else 1 for name in names}
