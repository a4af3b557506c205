"""Rows of a client's data: how many observations there are, and some of them at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedppl.model._template import Template
from fedppl.model.graph import Parts
from fedppl.model.pack import pack
from fedppl.types import DataError


def count(parts: Parts, arrays: Mapping[str, Any]) -> int:
    """Number of observations: the length of what is observed, summed where observed arrays differ in length."""
    lengths = _observed_lengths(parts, arrays)
    return lengths.pop() if len(lengths) == 1 else sum(lengths)


def take(
    client_id: str, template: Template, arrays: Mapping[str, Any], inputs: Sequence[Any], rows: Any
) -> tuple[Any, ...]:
    """The kernel's inputs with some of the rows of every array that has a row per observation."""
    parts = template.parts
    lengths = _observed_lengths(parts, arrays)
    held, free = inputs[: len(parts.data)], inputs[len(parts.data) :]
    if len(lengths) > 1 or not parts.data or _has_local_per_row(template, held, lengths):
        raise DataError(
            f"client {client_id!r}: observations of lengths {sorted(lengths)} cannot be taken in batches; that "
            "needs pm.Data containers, observed arrays of one length, and no local variable with an entry per row. "
            "Use batch_size=None."
        )
    (length,) = lengths
    return (*_rows_of(held, length, rows), *free)


def _rows_of(held: Sequence[Any], length: int, rows: Any) -> tuple[Any, ...]:
    return tuple(value[rows] if np.ndim(value) and len(value) == length else value for value in held)


def _has_local_per_row(template: Template, held: Sequence[Any], lengths: set[int]) -> bool:
    """Whether a local variable changes its shape with the number of rows: held against the model of one row less."""
    free, (length, *_) = template.graph.free_shapes, (*lengths, 0)
    if not free or length < 2:
        return bool(free)
    functions = template.functions
    if "local per row" not in functions:
        all_, fewer = (template.start(*_rows_of(held, length, np.arange(n))) for n in (length, length - 1))
        functions["local per row"] = [np.shape(value) for value in all_] != [np.shape(value) for value in fewer]
    return bool(functions["local per row"])


def batches(
    client_id: str, template: Template, arrays: Mapping[str, Any], inputs: Sequence[Any], rows: Any
) -> tuple[Any, Any, Any]:
    """Packed data of many batches at once, rows (T, b): reals, integers, and (T, w) where each batch's arrays lie."""
    steps, size = rows.shape
    reals, integers, where = pack(take(client_id, template, arrays, inputs, rows.ravel()))
    wheres = np.tile(where, (steps, 1))
    place = 0
    without = take(client_id, template, arrays, inputs, np.arange(0))
    for value, whole in zip(without, inputs, strict=True):
        if np.ndim(value) and len(value) != len(whole):  # of this array nothing is left without rows: it has them
            stride = size * int(np.prod(value.shape[1:], dtype=np.int64))
            wheres[:, place] = where[place] + stride * np.arange(steps)
            wheres[:, place + 1] = wheres[:, place] + stride
            wheres[:, place + 2] = size
        place += 2 + np.ndim(value)
    return reals, integers, wheres


def _observed_lengths(parts: Parts, arrays: Mapping[str, Any]) -> set[int]:
    names = {parts.model.rvs_to_values[rv].name for rv in parts.model.observed_RVs} & set(arrays)
    if not names:  # observed through an expression: the longest array is taken for it
        return {max((len(value) for value in arrays.values() if np.ndim(value)), default=1)}
    return {len(arrays[name]) if np.ndim(arrays[name]) else 1 for name in names}
