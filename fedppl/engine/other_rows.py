"""On how few rows terms depend that are not their own: a rule beside that on slopes, where a graph mixes rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedppl import gaussian
from fedppl.model.graph import observed_through
from fedppl.model.pack import pack
from fedppl.model.row_scores import by_length
from fedppl.numerics.concentration import by_column, concentration
from fedppl.types import Array, Layout

_NEAR = 1e-4  # prior sds: aside of a point at which slopes may be 0
_GROUPS, _ROUNDING = 16, 1e-9
_LITTLE = 1e-3  # sds of a column by which a value is moved
_MOST = 0.5  # columns a row


def share_in_others(client: Any, point: Array, few: int, enough: float) -> float:
    """The largest share that so few rows have in terms which are not their own, as where all read one by its place.

    Zero where all terms are of single rows. A row's data are put in the place of another's, and reals are moved by a
    little, which tells of order statistics. Where rows stand for themselves the slopes of all together change by the
    difference of these two rows' own, which is tried for sixteen groups of rows at once. Where they do not, as with a
    mean of all rows, or with outcomes that are mixed, repeated or in another order, it is looked at for each row, and
    the change itself too: terms that no single row has may cancel but for a few rows.
    """
    layout: Layout = client.layout
    m, held = layout.size, len(client.template.parts.data)
    rng = np.random.default_rng(1)
    aside = gaussian.standard_deviations(layout.prior) * _NEAR * rng.normal(size=m)
    x = np.concatenate([point + aside, client.initial])
    directions = np.eye(m, len(x))

    def total(inputs: Any) -> Array:
        if client.local_size:
            return np.asarray(client.kernel(x, *pack(inputs))[1 : 1 + m])
        parts = by_length(client, x, directions, inputs).values()
        return np.asarray(np.sum([np.sum(part, axis=0) for part in parts], axis=0))

    def with_changed(length: int, change: Callable[[Any], Any]) -> list[Any]:
        arrays = (
            change(np.array(value)) if np.ndim(value) and len(value) == length else value
            for value in client.inputs[:held]
        )
        return [*arrays, *client.inputs[held:]]

    share, before, by_rows = 0.0, total(client.inputs), by_length(client, x, directions)
    for length in _lengths_of_rows(client, by_rows):
        own = by_rows.get(length, np.zeros((length, m)))
        order = rng.permutation(length)
        partner = np.empty(length, dtype=int)
        partner[order] = np.roll(order, 1)
        rounding = _ROUNDING * (sum(np.sum(np.abs(part), axis=0) for part in by_rows.values()) + np.abs(before))

        def put(rows: Any, partner: Any = partner, length: int = length) -> Array:
            return total(with_changed(length, lambda value: _with(value, rows, value[partner[rows]]))) - before

        def moved(row: int, length: int = length, own: Array = own) -> Array:
            inputs = with_changed(length, lambda value: _moved(value, row))
            parts = by_length(client, x, directions, inputs)
            return total(inputs) - before - (parts[length][row] - own[row] if length in parts else 0.0)

        def own_part(rows: Any, own: Array = own, partner: Any = partner) -> Array:
            return np.asarray(np.sum(own[partner[rows]] - own[rows], axis=0))

        groups = [order[place::_GROUPS] for place in range(_GROUPS)]  # no row beside the one that takes its place
        if all(np.all(np.abs(put(rows) - own_part(rows)) <= rounding) for rows in groups):
            continue
        each = np.stack([put(np.array([row])) for row in range(length)])
        foreign = each - np.stack([own_part(np.array([row])) for row in range(length)])
        little = np.stack([moved(row) for row in range(length)])
        # A row's data are put in its own place no more, and in that of another: two changes.
        for changes, rows in ((foreign, few), (each, 2 * few), (little, few)):
            changes[:, np.max(np.abs(changes), axis=0) <= rounding] = 0.0
            wide = m > _MOST * length
            share = max(share, by_column(changes, rows) if wide else concentration(changes, rows, enough))
    return share


def _with(value: Array, rows: Any, given: Array) -> Array:
    value[rows] = given
    return value


def _moved(value: Array, row: int) -> Array:
    if value.dtype.kind == "f":
        value[row] += _LITTLE * np.std(value)
    return value


def _lengths_of_rows(client: Any, by_rows: Any) -> list[int]:
    """Lengths of containers whose entries are rows: as many as an outcome has, or no fewer than the longest has.

    Those of groups are shorter. Of none but constants nothing can be put in another's place.
    """
    held = len(client.template.parts.data)
    lengths = {len(value) for value in client.inputs[:held] if np.ndim(value)}
    observed = observed_through(client.template.parts)
    read = {
        len(value)
        for variable, value in zip(client.template.parts.data, client.inputs[:held], strict=True)
        if np.ndim(value) and variable in observed
    }
    return sorted(length for length in lengths if length in by_rows or length in read or length == max(lengths))
