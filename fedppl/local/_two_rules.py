"""Quadratures held against others: trapezoids against those between them, grids against finer ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from fedppl.numerics.integral import Rule, between_trapezoids, by_trapezoids
from fedppl.types import Array

_Of = TypeVar("_Of", np.float64, np.int64)  # points, or their places
_NEAR, _FAR = 4, 6  # asinh of sds: 27, and where something is missing 202
_LOOKED_AT = 32  # points at which both are computed
_CLOSE = 0.003  # log units within which they hardly differ
_MOST_TOLD = 0.95  # share of the known points at which another way has to have a value too
_ALIKE, _SAME = 0.001, 0.02  # log units within which they are the same, but for a constant; and most that this may be
# Log units within which two rules of one coordinate are: what they differ by alike at thousands of clients adds up. Of
# eight models of `benchmarks/exactness.py` nearly all clients are within, but for those of zeros or of one outcome.
_ALIKE_ON_A_LINE = 2e-5


def by_two_rules(
    compute: Callable[[NDArray[_Of], Rule], tuple[Array, Array]], points: NDArray[_Of]
) -> tuple[Array, Array]:
    """Logarithms of integrals at points (S, m), or at those in places (S,), and what is not known of them.

    What one rule tells of its own error holds for smooth functions. Where both differ at some of the points, as about a
    kink, a spike, or along a tail that falls as exp(−|θ|), they are averaged, and half of their difference is an error.
    """
    far = _NEAR
    values, errors = compute(points, by_trapezoids(far))
    if np.median(np.abs(errors)) > _ALIKE:  # tails without end may have it
        far = _FAR
        values, errors = compute(points, by_trapezoids(far))
    some = np.unique(np.linspace(0, len(points) - 1, _LOOKED_AT).astype(int))
    apart = compute(points[some], between_trapezoids(far))[0] - values[some]
    told = apart[np.isfinite(apart)]
    if _apart(apart) < _ALIKE_ON_A_LINE and abs(np.median(told) if len(told) else 0.0) < _ALIKE:
        return values, errors
    half = 0.5 * (compute(points, between_trapezoids(far))[0] - values)
    known = np.isfinite(half)
    # Where a kink lies between nodes changes from point to point, and what both are off by may cancel at one.
    usual = np.median(np.abs(half[known])) if np.any(known) else 0.0
    error = np.copysign(np.maximum(np.abs(half), usual), half)
    return values + half, np.where(known, errors + error, 0.0)


class Pair(NamedTuple):
    """Two ways to integrate, by their places: one that is held against another, and which is taken if they differ."""

    first: int
    second: int
    better: int


def by_pairs(
    ways: Sequence[Callable[[Array], tuple[Array, Array]]], points: Array, pairs: Sequence[Pair]
) -> tuple[Array, Array]:
    """Logarithms of integrals at points (S, m) by the first way that agrees with its other, and what is not known.

    Where no two agree, the better of those is taken that hardly differ, else of those that differ least. What they
    differ by, or twice that, is then an error of the points that are near to those at which both were computed.
    """
    some = np.unique(np.linspace(0, len(points) - 1, _LOOKED_AT).astype(int))
    at = functools.cache(lambda place: ways[place](points[some])[0])
    least, better, worst = np.zeros(len(some)), pairs[0].first, np.inf
    for pair in pairs:
        apart = at(pair.second) - at(pair.first)
        told = np.isfinite(apart)
        if np.sum(told) < _MOST_TOLD * np.sum(np.isfinite(at(pair.first))):  # some of it is held against nothing
            continue
        difference = np.where(told, apart, 0.0)
        constant = float(np.median(difference[told])) if np.any(told) else 0.0
        if _apart(apart) < _ALIKE and abs(constant) < _SAME:
            values, errors = ways[pair.first](points)
            return values + constant, errors + 0.5 * constant
        if float(np.max(np.abs(difference))) < worst:
            least, better, worst = difference, pair.better, float(np.max(np.abs(difference)))
        if worst < _CLOSE:
            break
    values, errors = ways[better](points)
    scale = np.maximum(np.std(points, axis=0), 1e-300)
    near = least[cKDTree(points[some] / scale).query(points / scale)[1]]
    times = 1.0 if worst < _CLOSE else 2.0
    return values, errors + times * np.copysign(np.maximum(np.abs(near), np.median(np.abs(least))), near)


def _apart(differences: Array) -> float:
    known = differences[np.isfinite(differences)]
    return float(np.max(np.abs(known - np.median(known)))) if len(known) else 0.0
