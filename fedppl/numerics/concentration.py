"""How few rows a direction of their span may depend on: the largest share of its square that so few rows have."""

from __future__ import annotations

import numpy as np

from fedppl.types import Array

_ROUNDING = 1e-13  # of the largest singular value of columns of length one: below it there is no direction
_CLEAR = 1e-6  # of the largest eigenvalue of X'X: a basis by what is above it is orthonormal to ten digits
_TINY = 1e-200  # a square, beside which those of columns' smaller entries are numbers
_COLUMNS_A_ROW = 0.5  # beyond which each row has a direction of its own
_STARTS, _STEPS = 24, 12  # rows of largest leverage, and steps from each at most
_MORE = 1e-9  # of a square: a share that has grown by less has grown by rounding


def largest_share(vectors: Array, few: int, enough: float, faint: float = _ROUNDING) -> float:
    """The same by directions where rows are more than columns tell apart, else by columns."""
    if vectors.shape[1] > _COLUMNS_A_ROW * len(vectors):
        return by_column(vectors, few)
    return concentration(vectors, few, enough, faint)


def concentration(vectors: Array, few: int, enough: float = 1.0, faint: float = _ROUNDING) -> float:
    """Largest share |(X u)_S|² / |X u|² over directions u of the span of X (n, p) and over sets S of so few rows.

    One, where something in the span is an indicator of so few rows, whatever it is hidden in: a span has no columns.
    Found by truncated power steps, as in sparse principal components, from the rows of largest leverage; no less than
    the share of the row of largest leverage, and not always the largest there is. The search ends at `enough`, and no
    direction counts that is fainter than that share of the largest.

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
    # No direction has more of so few rows than the sum of their leverages.
    if enough < 1.0 and np.sum(np.partition(leverage, len(leverage) - few)[-few:]) < enough:
        return float(np.max(leverage))
    best = 0.0
    for row in np.argsort(-leverage)[:_STARTS]:
        best = max(best, _climb(basis, basis[row] / max(np.sqrt(leverage[row]), 1e-300), few))
        if best >= enough:
            break
    return min(best, 1.0)


def by_column(vectors: Array, few: int) -> float:
    """The largest such share of a column of X (n, p) as it is: where there are more columns than rows tell apart."""
    squares = np.square(vectors)
    total = np.sum(squares, axis=0)
    squares = squares[:, total > 0.0]
    if not squares.size:
        return 0.0
    few = min(few, len(squares))
    top = np.sum(np.partition(squares, len(squares) - few, axis=0)[-few:], axis=0)
    return float(np.max(top / total[total > 0.0]))


def _orthonormal(vectors: Array, faint: float) -> Array:
    """An orthonormal basis of the span, (n, r).

    By X'X where that finds all that is there, which takes a tenth of the time. It has half of the digits: where more is
    left of a column than rounding, by singular values of X.
    """
    squares = np.einsum("ij,ij->j", vectors, vectors)
    if np.all((squares > _TINY) & (squares < 1.0 / _TINY)):
        columns = vectors / np.sqrt(squares)
    else:  # in two steps: squares of small numbers vanish
        size = np.max(np.abs(vectors), axis=0, initial=0.0)
        columns = vectors[:, size > 0.0] / size[size > 0.0]
        columns /= np.sqrt(np.einsum("ij,ij->j", columns, columns))
    if not columns.size:
        return np.zeros((len(vectors), 0))
    values, axes = np.linalg.eigh(columns.T @ columns)
    clear = values > _CLEAR * values[-1]
    basis: Array = columns @ (axes[:, clear] / np.sqrt(values[clear]))
    if np.all(clear):
        return basis
    rest = columns - basis @ (basis.T @ columns)
    if np.max(np.einsum("ij,ij->j", rest, rest)) <= _ROUNDING**2:
        return basis
    left, sizes, _ = np.linalg.svd(columns, full_matrices=False)
    return np.asarray(left[:, sizes > faint * sizes[0]])


def _climb(basis: Array, direction: Array, few: int) -> float:
    """From one direction to one that so few rows have more of, until they have no more."""
    share = 0.0
    for _ in range(_STEPS):
        squares = np.square(basis @ direction)
        rows = np.argpartition(-squares, few - 1)[:few]
        inner = basis[rows] @ basis[rows].T  # few by few, and its largest eigenvalue is the largest share of these rows
        values, axes = np.linalg.eigh(inner)
        if values[-1] <= share + _MORE:
            break
        share = float(values[-1])
        direction = axes[:, -1] @ basis[rows]
        direction = direction / np.linalg.norm(direction)
    return share
