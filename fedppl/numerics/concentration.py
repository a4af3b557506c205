"""What few rows have alone: the largest share of the square of a direction in a span, and jumps of densities."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fedppl.numerics import tolerances as tol
from fedppl.types import Array


def largest_share(
    vectors: Array, few: int, enough: float, faint: float = tol.COLUMN_ROUNDING, unit: float = 0.0
) -> float:
    """The largest share by all directions (`concentration`) if there are many rows to a column, else `by_column`."""
    if vectors.shape[1] > tol.COLUMNS_A_ROW * len(vectors):
        return by_column(vectors[:, np.einsum("ij,ij->j", vectors, vectors) > (faint * unit) ** 2], few)
    return concentration(vectors, few, enough, faint, unit)


def concentration(
    vectors: Array, few: int, enough: float = 1.0, faint: float = tol.COLUMN_ROUNDING, unit: float = 0.0
) -> float:
    """Largest share |(X u)_S|² / |X u|² over directions u of the span of X (n, p) and over sets S of `few` rows.

    It is one if the span has an indicator of so few rows. It is found by truncated power steps, as in sparse principal
    components, from the rows of largest leverage. So it is a lower bound of the maximum, and at least the largest
    leverage. The search ends at `enough`. Directions below `faint` of the largest singular value are left out, of
    columns in units of their norms, or of `unit` where that is more: then rounding in small columns is no direction.

    >>> X = np.ones((300, 2))
    >>> X[:, 1] += np.arange(300) == 7
    >>> round(concentration(X, 3), 6)
    1.0
    """
    return _largest(_orthonormal(vectors, faint, unit), few, enough)


def share_in_sum(vectors: Array, gram: Array, few: int, enough: float = 1.0, error: float = 0.0) -> float:
    """Largest share |(X u)_S|² / u'G u over directions u and sets S of `few` rows of X (n, p), G being a sum with X'X.

    G (p, p) is Σ X_k'X_k over a cohort of which X is one client's, each entry known within `error`. What the others add
    to a direction counts where it is more than errors: a direction that they lack, or have so faintly, is X's alone.

    >>> X = np.zeros((300, 1))
    >>> X[7] = 2.0
    >>> round(share_in_sum(X, X.T @ X + 36.0, 3), 6)
    0.1
    """
    together = np.concatenate([vectors, _rows_of(gram - vectors.T @ vectors, np.diag(gram), error)])
    return _largest(_orthonormal(together, tol.COLUMN_ROUNDING)[: len(vectors)], few, enough)


def _rows_of(gram: Array, size: Array, error: float) -> Array:
    """Rows (p, p) with that Gram matrix, less where it may be rounding or error; `size` is of the whole, (p,)."""
    p = len(gram)
    known = size > p * error / tol.GRAM_ERROR
    unit = np.where(known, 1.0 / np.sqrt(np.where(known, size, 1.0)), 0.0)
    values, axes = np.linalg.eigh(gram * np.outer(unit, unit))
    least = p * tol.GRAM_ROUNDING + error * np.sum(unit**2)  # no error moves an eigenvalue by more
    root = np.sqrt(np.where(values > least, values - least, 0.0))
    return np.asarray((root * axes).T * np.sqrt(size))


def _largest(basis: Array, few: int, enough: float) -> float:
    """The largest share by rows (n, r) in units of a whole, of which they may be a part."""
    if not basis.size:
        return 0.0
    leverage = np.einsum("ij,ij->i", basis, basis)
    few = min(few, len(basis))
    # The share of some rows is at most the sum of their leverages.
    if enough < 1.0 and np.sum(np.partition(leverage, len(leverage) - few)[-few:]) < enough:
        return float(np.max(leverage))
    best = 0.0
    for row in np.argsort(-leverage)[: tol.SHARE_STARTS]:
        best = max(best, _climb(basis, basis[row] / max(np.sqrt(leverage[row]), tol.TINY), few))
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


def _orthonormal(vectors: Array, faint: float, unit: float = 0.0) -> Array:
    """An orthonormal basis of the span, (n, r).

    It is computed from X'X, in a tenth of the time of a singular value decomposition but with half of the digits. If
    that leaves more of a column than rounding, it is computed from the singular vectors of X.
    """
    size = np.max(np.abs(vectors), axis=0, initial=0.0)
    columns = vectors[:, size > 0.0] / size[size > 0.0]  # first, since squares of small numbers underflow
    norms = np.sqrt(np.einsum("ij,ij->j", columns, columns))
    columns /= np.maximum(norms, unit / size[size > 0.0])
    if not columns.size:
        return np.zeros((len(vectors), 0))
    values, axes = np.linalg.eigh(columns.T @ columns)
    largest = max(values[-1], float(unit > 0.0))
    clear = values > max(tol.CLEAR_EIGENVALUE, faint**2) * largest
    basis: Array = columns @ (axes[:, clear] / np.sqrt(values[clear]))
    if np.all(clear) or faint**2 >= tol.CLEAR_EIGENVALUE:
        return basis
    rest = columns - basis @ (basis.T @ columns)
    if np.max(np.einsum("ij,ij->j", rest, rest)) <= tol.COLUMN_ROUNDING**2:
        return basis
    left, sizes, _ = np.linalg.svd(columns, full_matrices=False)
    return np.asarray(left[:, sizes > faint * np.sqrt(largest)])


def _climb(basis: Array, direction: Array, few: int) -> float:
    """The share of `few` rows after power steps from a direction, until it no longer grows."""
    share = 0.0
    for _ in range(tol.SHARE_STEPS):
        squares = np.square(basis @ direction)
        rows = np.argpartition(-squares, few - 1)[:few]
        inner = basis[rows] @ basis[rows].T  # its largest eigenvalue is the largest share of these rows
        values, axes = np.linalg.eigh(inner)
        if values[-1] <= share + tol.SHARE_GAIN:
            break
        share = float(values[-1])
        direction = axes[:, -1] @ basis[rows]
        direction = direction / np.linalg.norm(direction)
    return share


def are_jumps(densities: Callable[[Array], Array], start: Array, end: Array, few: int, seed: int) -> NDArray[np.bool_]:
    """On which stretches between points (S, d) only few rows' densities, (S, n), jump, (S,) bool.

    A stretch on which rows change by more than slopes at its ends allow is halved, at places by the seed.
    """
    rng = np.random.default_rng(seed)
    share = tol.JUMP_BESIDE * rng.uniform(*tol.JUMP_SPREAD)
    excess, largest = _excess(densities, start, end, share, None)
    jumps, left = np.zeros(len(start), dtype=bool), np.arange(len(start))
    for _ in range(tol.JUMP_HALVINGS):
        active = np.any(excess > 0.0, axis=1)
        left, start, end, largest = left[active], start[active], end[active], largest[active]
        if not len(left):
            return jumps
        middle = start + rng.uniform(*tol.JUMP_MIDDLE) * (end - start)
        one, other = (_excess(densities, *pair, share, largest)[0] for pair in ((start, middle), (middle, end)))
        second = np.max(other, axis=1) > np.max(one, axis=1)
        start, end = np.where(second[:, None], middle, start), np.where(second[:, None], end, middle)
        excess = np.where(second[:, None], other, one)
    rows = np.sum(excess > 0.0, axis=1)
    jumps[left] = (rows > 0) & (rows <= few)
    return jumps


def _excess(
    densities: Callable[[Array], Array], start: Array, end: Array, share: float, largest: Array | None
) -> tuple[Array, Array]:
    """By how much rows' changes exceed what slopes at both ends allow, (S, n), and the largest change of a row, (S, 1).

    The change of a concave density is between its slopes at the ends, also where these differ, as at a kink.
    """
    near = [share * times * (end - start) for times in (1.0, 2.0)]  # an end itself may be a place apart
    places = [start, start + near[0], start + near[1], end - near[1], end - near[0], end]
    one, *beside, other = np.split(densities(np.concatenate(places)), len(places))
    slope, other_slope = (beside[1] - beside[0]) / share, (beside[3] - beside[2]) / share
    change = other - one
    excess = np.maximum(change - np.maximum(slope, other_slope), np.minimum(slope, other_slope) - change)
    if largest is None:
        largest = np.max(np.abs(np.nan_to_num(change, posinf=0.0, neginf=0.0)), axis=1, initial=0.0, keepdims=True)
    size = tol.JUMP_EXCESS * largest + tol.JUMP_DIGITS * (np.abs(one) + np.abs(other))
    ends = np.isfinite(one) != np.isfinite(other)  # a row outside of its support on one side alone
    return np.where(ends, np.inf, np.where(excess > size, excess, 0.0)), largest


def are_multiples(pair: Array, bends: Array, places: tuple[int, int]) -> bool:
    """Whether curvatures of two coordinates are multiples of their slopes, row by row."""
    (i, j), (one, other) = places, pair
    size = tol.LINEAR * np.max(np.abs(pair)) * np.max(np.abs(bends[np.ix_(places, places)]))
    gaps = bends[i, j] * one - bends[i, i] * other, bends[i, j] * other - bends[j, j] * one
    return bool(np.max(np.abs(gaps), initial=0.0) <= size)


# Networks: of single units, of pairs of a layer's, and of all of them where rows are many -----------------------------


def share_of_units(layers: Sequence[Array], few: int, enough: float) -> float:
    """The largest share that `few` rows have of a unit's slopes, or of a difference of two; NaN if not all are finite.

    With wide layers or few rows the span of all units has an indicator of each row, in honest networks too. But few
    units are alike but for few rows, unless somebody chose thresholds next to each other.
    """
    share = 0.0
    for vectors in layers:
        if not np.all(np.isfinite(vectors)):
            return np.nan
        share = max(share, by_column(vectors, few))
        if share < enough:
            share = max(share, share_in_pairs(vectors, few))
        if share < enough and len(vectors) >= tol.ROWS_A_UNIT * vectors.shape[1]:
            share = max(share, concentration(vectors, few, enough, tol.FAINT_OF_UNITS))
        if share >= enough:
            break
    return share


def share_in_pairs(vectors: Array, few: int) -> float:
    """The largest share in x_i - c x_j over columns i and j of X (n, p), c being their ratio in most rows.

    Or the next that is not larger than so many others as trained layers of this width have by chance.

    >>> open_for = np.arange(300)[:, None] < [40, 41]
    >>> share_in_pairs(open_for * [1.0, -2.0], 3)
    1.0
    """
    squares = np.sum(np.square(vectors), axis=0)
    vectors, squares = vectors[:, squares > 0.0], squares[squares > 0.0]
    alike = np.square(vectors.T @ vectors) >= tol.ALIKE_UNITS * np.outer(squares, squares)
    each = [_of_pairs(vectors[:, i], vectors[:, :i][:, alike[i, :i]], few) for i in range(1, len(squares))]
    shares = np.sort(np.concatenate([np.zeros(1), *each]))[::-1]
    width = len(squares)
    by_chance = max(width // tol.UNITS_A_CHANCE_PAIR, width**2 // tol.SQUARED_UNITS_A_CHANCE_PAIR)
    return float(shares[min(by_chance, len(shares) - 1)])


def _of_pairs(one: Array, others: Array, few: int) -> Array:
    """Shares of `few` rows in the differences of a column (n,) and multiples of others (n, p)."""
    rows = np.flatnonzero(one)
    rows = rows[:: max(1, len(rows) // tol.RATIO_ROWS)]
    some = others[rows]
    others, some = others[:, np.any(some, axis=0)], some[:, np.any(some, axis=0)]
    ratios = np.where(some == 0.0, np.nan, one[rows][:, None] / np.where(some == 0.0, 1.0, some))
    rest = one[:, None] - (np.nanmedian(ratios, axis=0) if ratios.size else 1.0) * others
    rest[np.abs(rest) <= tol.UNIT_ROUNDING * np.max(np.abs(one))] = 0.0
    return shares_of_columns(rest, few)
