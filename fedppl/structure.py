"""Which coordinates a precision couples: full, diagonal, or blocks; moment matching and packing inside that family."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.gaussian import Array, Gaussian

__all__ = [
    "Structure",
    "block",
    "diagonal",
    "full",
    "pack_precision",
    "packed_size",
    "project",
    "unpack_precision",
    "zeros",
]


class Structure(NamedTuple):
    """Which coordinates a precision couples; build it with `full`, `diagonal` or `block`."""

    size: int
    blocks: tuple[tuple[int, ...], ...] | None  # a partition of 0..size-1; None if diagonal, precisions being (m,)


def full(size: int) -> Structure:
    """Couple every coordinate to every other: one block.

    >>> full(2)
    Structure(size=2, blocks=((0, 1),))
    """
    return block(size, [range(size)])


def diagonal(size: int) -> Structure:
    """Leave every coordinate on its own.

    >>> diagonal(2)
    Structure(size=2, blocks=None)
    """
    return full(size)._replace(blocks=None)


def block(size: int, blocks: Sequence[Sequence[int]]) -> Structure:
    """Couple coordinates inside each block only; `blocks` is a partition of 0..size-1, whose order is that of packing.

    >>> block(3, [(0, 2), (1,)])
    Structure(size=3, blocks=((0, 2), (1,)))
    """
    if operator.index(size) < 1:
        raise ValueError(f"size is {size} and must be at least 1")
    partition = tuple(tuple(operator.index(i) for i in indices) for indices in blocks)
    counts = Counter(i for indices in partition for i in indices)
    missing, foreign = sorted(set(range(size)) - set(counts)), sorted(set(counts) - set(range(size)))
    duplicate = sorted(i for i, count in counts.items() if count > 1)
    if missing or foreign or duplicate or not all(partition):
        odd = f"missing {missing}, duplicate {duplicate}, out of range {foreign}"
        raise ValueError(f"blocks {partition} must hold each of 0..{size - 1} once, and no empty block: {odd}")
    return Structure(operator.index(size), partition)


def packed_size(structure: Structure) -> int:
    """Count the numbers in a packed precision: m if diagonal, else Σ k(k+1)/2 over blocks of size k.

    >>> packed_size(full(3)), packed_size(diagonal(3))
    (6, 3)
    """
    return structure.size if structure.blocks is None else sum(len(b) * (len(b) + 1) // 2 for b in structure.blocks)


def zeros(structure: Structure) -> Gaussian:
    """Return the neutral element of `gaussian.product`, r = 0 and Q = 0, in the shapes of the structure.

    >>> zeros(diagonal(2)).precision
    array([0., 0.])
    """
    size = structure.size
    return Gaussian(np.zeros(size), np.zeros(size if structure.blocks is None else (size, size)))


def project(mean: Array, covariance: Array, structure: Structure) -> Gaussian:
    """Match moments inside the family: keep μ (m,) and the blocks Σ_bb, Q_bb = Σ_bb⁻¹, r = Qμ.

    This is the member q of the family that minimises KL(p ‖ q) for every p with these moments. Blocks alone must be
    positive definite, not the whole covariance, (m, m) or (m,) variances.

    >>> project(np.zeros(2), np.array([[2.0, 1.0], [1.0, 4.0]]), diagonal(2)).precision
    array([0.5 , 0.25])
    """
    size, centre, spread = structure.size, np.asarray(mean, np.float64), np.asarray(covariance, np.float64)
    if centre.shape != (size,) or spread.shape not in ((size,), (size, size)):
        raise ValueError(f"mean {centre.shape} and covariance {spread.shape} do not fit a structure of size {size}")
    if structure.blocks is None:
        return gaussian.from_moments(centre, spread if spread.ndim == 1 else np.diagonal(spread))
    spread = np.diag(spread) if spread.ndim == 1 else spread
    result = zeros(structure)
    for indices in structure.blocks:
        part, pairs = list(indices), np.ix_(indices, indices)
        piece = gaussian.from_moments(centre[part], spread[pairs], name=f"covariance of block {indices}")
        result.linear[part], result.precision[pairs] = piece
    return result


@functools.lru_cache(maxsize=32)
def _places(structure: Structure) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Where a flat matrix holds the packed upper triangles, their mirror images, and what must be zero."""
    size, blocks = structure.size, structure.blocks or ()
    pairs = np.array([(i, j) for b in blocks for k, i in enumerate(b) for j in b[k:]], dtype=np.intp)
    upper, lower = pairs @ (size, 1), pairs @ (1, size)
    return upper, lower, np.setdiff1d(np.arange(size * size), np.concatenate([upper, lower]))


def pack_precision(precision: Array, structure: Structure) -> Array:
    """List precisions' packed triangles (..., p) block after block; diagonal ones, (..., m), are copied as they are.

    >>> pack_precision(np.diag([1.0, 2.0, 3.0]), block(3, [(0, 1), (2,)]))
    array([1., 0., 2., 3.])
    """
    values, size = np.asarray(precision, dtype=np.float64), structure.size
    expected = (size,) if structure.blocks is None else (size, size)
    lead = values.shape[: values.ndim - len(expected)]
    if values.shape != (*lead, *expected):
        raise ValueError(f"precision of shape {values.shape} does not fit the structure: it must have shape {expected}")
    if structure.blocks is None:
        return values.copy()
    upper, lower, outside = _places(structure)
    flat = values.reshape(*lead, size * size)
    if outside.size and (lost := flat.take(outside, axis=-1)).any():
        where = np.argwhere(lost != 0)[0]
        row, column = divmod(int(outside[where[-1]]), size)
        value = f"{lost[tuple(where)]:.6g} between two blocks"
        raise ValueError(f"precision[{row}, {column}] is {value} and must be 0: project it, or use full(size)")
    return np.asarray(0.5 * (flat.take(upper, axis=-1) + flat.take(lower, axis=-1)))


def unpack_precision(vector: Array, structure: Structure) -> Array:
    """Rebuild the precisions (..., m, m), or (..., m) if diagonal, from `pack_precision`, exactly.

    >>> unpack_precision(np.array([1.0, 0.0, 2.0]), full(2)).tolist()
    [[1.0, 0.0], [0.0, 2.0]]
    """
    values, size, length = np.asarray(vector, dtype=np.float64), structure.size, packed_size(structure)
    if values.shape[-1:] != (length,):
        raise ValueError(f"vector of shape {values.shape} does not fit the structure: it must have shape ({length},)")
    if structure.blocks is None:
        return values.copy()
    upper, lower, _ = _places(structure)
    matrix = np.zeros((*values.shape[:-1], size * size))
    matrix[..., upper] = matrix[..., lower] = values
    return matrix.reshape(*values.shape[:-1], size, size)
