"""On how few rows terms depend that are not their own: a rule beside that on slopes, where a graph mixes rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl.model.baked import Reading, reading
from fedppl.model.graph import observed_through
from fedppl.model.other_values import Alteration, all_other, alterations, altered_at
from fedppl.model.pack import pack
from fedppl.model.row_scores import by_length, row_scores
from fedppl.numerics.concentration import largest_share
from fedppl.types import Array

_ROUNDING = 1e-12  # of the sum of sizes: below it a change is none
_BLOCKS, _BLOCKS_A_COLUMN = 48, 6  # of rows changed together: .95 of a direction no three of these have by chance


class _Slopes(NamedTuple):
    """Slopes along the shared coordinates: of rows by their number, and of all that is not of single rows."""

    rows: dict[int, Array]
    rest: Array


def share_in_others(client: Any, x: Array, paths: Array, few: int, enough: float) -> float:
    """The largest share that so few rows have in terms which are not their own, at x and along paths (m, m + d).

    Zero where all terms are of single rows; NaN where it cannot be told. Entries of rows are changed, in containers and
    through the builder: what changes in terms of others is looked at where there are such, and the whole change too,
    since terms may cancel but for a few rows. Rows are changed by blocks: what so few rows make up so few blocks do,
    and what all rows do, as a mean of theirs, all blocks do.
    """
    read = reading(client)
    if read.inputs is None:
        return np.nan
    at = _slopes_at(read, client, x, paths)
    before = at(client.arrays)
    if before is None:
        return np.nan
    share = 0.0
    for length in lengths_of_rows(read, client, before.rows):
        names = [name for name, value in client.arrays.items() if np.ndim(value) and len(value) == length]
        other = all_other({name: client.arrays[name] for name in names})
        together = [Alteration(name, np.asarray(client.arrays[name]), other[name], True, 0.0) for name in names]
        if _of_themselves(at, before, client.arrays, together, length):
            continue
        for alteration in (a for name in names for a in alterations(name, np.asarray(client.arrays[name]))):
            share = float(np.maximum(share, _share_of(at, client.arrays, alteration, few, enough)))
            if not share < enough:  # NaN too
                return share
    return share


def _slopes_at(read: Reading, client: Any, x: Array, paths: Array) -> Callable[[Mapping[str, Any]], _Slopes | None]:
    def at(arrays: Mapping[str, Any]) -> _Slopes | None:
        inputs = read.inputs and read.inputs(arrays)
        if inputs is None:
            return None
        rows = by_length(row_scores(read.client).elsewhere, x, paths, inputs)
        rest = np.zeros(len(paths))
        if client.local_size:
            rest = paths @ read.client.kernel(x, *pack(inputs))[1:] - sum(np.sum(one, axis=0) for one in rows.values())
        return _Slopes(rows, rest)

    return at


def _blocks(length: int, count: int) -> Iterator[Any]:
    """Rows of each block, (length,) bool: no two beside each other but by chance."""
    order = np.random.default_rng(length).permutation(length)
    for place in range(count):
        rows = np.zeros(length, dtype=bool)
        rows[order[place::count]] = True
        yield rows


def _of_themselves(at: Any, before: _Slopes, arrays: Any, changed: Sequence[Alteration], length: int) -> bool:
    """Whether terms of rows stay as they are where others change: those of each half where the other half does."""
    for half in _blocks(length, 2):
        after = at({**arrays, **{alteration.name: altered_at(alteration, half) for alteration in changed}})
        if after is None:
            return False
        beside, size = _beside(before, after, length, half)
        if not np.all(np.abs(beside) <= size):
            return False
    return True


def _beside(before: _Slopes, after: _Slopes, length: int, changed: Any) -> tuple[Array, Array]:
    """What changes in terms that are not of the rows changed, (rows and one more, m), and below what it is rounding."""
    terms = [
        (after.rows[n] - rows)[~changed] if n == length else after.rows[n] - rows for n, rows in before.rows.items()
    ]
    size = sum(np.sum(np.abs(one), axis=0) for slopes in (before, after) for one in slopes.rows.values())
    size = np.nan_to_num(size + np.abs(before.rest) + np.abs(after.rest), posinf=0.0, neginf=0.0)
    return np.concatenate([*terms, (after.rest - before.rest)[None]]), _ROUNDING * size


def _share_of(at: Any, arrays: Mapping[str, Any], alteration: Alteration, few: int, enough: float) -> float:
    """The largest share that so few blocks have in what changes beside their own terms, and in all that changes."""
    length = len(alteration.before)
    before = at({**arrays, alteration.name: alteration.before})
    if before is None:
        return np.nan
    if _of_themselves(at, before, arrays, [alteration], length):
        return 0.0
    m = len(before.rest)
    terms, whole, sizes = [], [], np.zeros(m)
    for rows in _blocks(length, min(length, max(_BLOCKS, _BLOCKS_A_COLUMN * m))):
        after = at({**arrays, alteration.name: altered_at(alteration, rows)})
        if after is None:
            return np.nan
        beside, size = _beside(before, after, length, rows)
        terms.append(np.sum(beside, axis=0))
        own = (after.rows[length] - before.rows[length])[rows] if length in before.rows else np.zeros((0, m))
        whole.append(terms[-1] + np.sum(own, axis=0))
        sizes = np.maximum(sizes, size)
    share = 0.0
    # Of terms of its own a row says most by what is far from others, and no less where it goes a step.
    for changes in (np.stack(terms),) if alteration.far else (np.stack(terms), np.stack(whole)):
        if not np.all(np.isfinite(changes)):
            return np.nan
        changes[:, np.max(np.abs(changes), axis=0) <= sizes] = 0.0
        share = max(share, largest_share(changes, few, enough, alteration.faint))
    return share


def lengths_of_rows(read: Reading, client: Any, by_rows: Mapping[int, Array]) -> list[int]:
    """Lengths of arrays whose entries are rows: as many as an outcome has, or no fewer than the longest outcome has.

    Those of groups are shorter.
    """
    lengths = {name: len(value) for name, value in client.arrays.items() if np.ndim(value)}
    observed = {variable.name for variable in observed_through(read.client.template.parts)}
    wanted = {length for name, length in lengths.items() if length in by_rows or name in observed}
    longest = max(lengths.values(), default=0)
    return sorted(wanted | {length for length in lengths.values() if length >= max(wanted, default=longest)})
