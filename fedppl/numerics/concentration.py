"""The largest share of the square of a direction in the span of vectors that few rows have."""

from __future__ import annotations

import numpy as np

from fedppl.types import Array

_ROUNDED = 1e-13  # of the largest singular value of columns of length one: a smaller one is rounding
_CLEAR = 1e-6  # of the largest eigenvalue of X'X: a basis of larger ones is orthonormal to ten digits
_TINY = 1e-200  # a square: columns with smaller ones are scaled in two steps
_COLUMNS_A_ROW = 0.5  # with more columns each row has a direction of its own
_STARTS, _STEPS = 24, 12  # rows of largest leverage to start from, and most steps from each
_MORE = 1e-9  # a smaller increase of a share is rounding


def largest_share(vectors: Array, few: int, enough: float, faint: float = _ROUNDED) -> float:
    """The largest share by all directions (`concentration`) if there are many rows to a column, else `by_column`."""
    if vectors.shape[1] > _COLUMNS_A_ROW * len(vectors):
        return by_column(vectors, few)
    return concentration(vectors, few, enough, faint)


def concentration(vectors: Array, few: int, enough: float = 1.0, faint: float = _ROUNDED) -> float:
    """Largest share |(X u)_S|² / |X u|² over directions u of the span of X (n, p) and over sets S of `few` rows.

    It is one if the span has an indicator of so few rows. It is found by truncated power steps, as in sparse principal
    components, from the rows of largest leverage. So it is a lower bound of the maximum, and at least the largest
    leverage. The search ends at `enough`. Directions below `faint` of the largest singular value are left out.

    >>> X = np.ones((300, 2))
    >>> X[:, 1] += np.arange(300) == 7
    >>> round(concentration(X, 3), 6)
    1.0
    """
    basis = _orthonormal(vectors, faint)
    leverage = np.einsum("ij,ij->i", basis, basis)
    if not basis.shape[1]:
        return 0.0
    few = min(few, len(basis))
    # The share of some rows is at most the sum of their leverages.
    if enough < 1.0 and np.sum(np.partition(leverage, len(leverage) - few)[-few:]) < enough:
        return float(np.max(leverage))
    best = 0.0
    for row in np.argsort(-leverage)[:_STARTS]:
        best = max(best, _climb(basis, basis[row] / max(np.sqrt(leverage[row]), 1e-300), few))
        if best >= enough:
            break
    return min(best, 1.0)


def by_column(vectors: Array, few: int) -> float:
    """The largest such share over the columns of X (n, p) alone."""
    return float(np.max(shares_of_columns(vectors, few), initial=0.0))


def shares_of_columns(vectors: Array, few: int) -> Array:
    """Such a share of each column that is not 0."""
    squares = np.square(vectors)
    total = np.sum(squares, axis=0)
    squares = squares[:, total > 0.0]
    if not squares.size:
        return np.zeros(0)
    few = min(few, len(squares))
    top = np.sum(np.partition(squares, len(squares) - few, axis=0)[-few:], axis=0)
    return np.asarray(top / total[total > 0.0])


def _orthonormal(vectors: Array, faint: float) -> Array:
    """An orthonormal basis of the span, (n, r).

    It is computed from X'X, in a tenth of the time of a singular value decomposition but with half of the digits. If
    that leaves more of a column than rounding, it is computed from the singular vectors of X.
    """
    squares = np.einsum("ij,ij->j", vectors, vectors)
    if np.all((squares > _TINY) & (squares < 1.0 / _TINY)):
        columns = vectors / np.sqrt(squares)
    else:  # in two steps, since squares of small numbers underflow
        size = np.max(np.abs(vectors), axis=0, initial=0.0)
        columns = vectors[:, size > 0.0] / size[size > 0.0]
        columns /= np.sqrt(np.einsum("ij,ij->j", columns, columns))
    if not columns.size:
        return np.zeros((len(vectors), 0))
    values, axes = np.linalg.eigh(columns.T @ columns)
    clear = values > max(_CLEAR, faint**2) * values[-1]
    basis: Array = columns @ (axes[:, clear] / np.sqrt(values[clear]))
    if np.all(clear) or faint**2 >= _CLEAR:
        return basis
    rest = columns - basis @ (basis.T @ columns)
    if np.max(np.einsum("ij,ij->j", rest, rest)) <= _ROUNDED**2:
        return basis
    left, sizes, _ = np.linalg.svd(columns, full_matrices=False)
    return np.asarray(left[:, sizes > faint * sizes[0]])


def _climb(basis: Array, direction: Array, few: int) -> float:
    """The share of `few` rows after power steps from a direction, until it no longer grows."""
    share = 0.0
    for _ in range(_STEPS):
        squares = np.square(basis @ direction)
        rows = np.argpartition(-squares, few - 1)[:few]
        inner = basis[rows] @ basis[rows].T  # its largest eigenvalue is the largest share of these rows
        values, axes = np.linalg.eigh(inner)
        if values[-1] <= share + _MORE:
            break
        share = float(values[-1])
        direction = axes[:, -1] @ basis[rows]
        direction = direction / np.linalg.norm(direction)
    return share
