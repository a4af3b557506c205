r"""The integral of a client over its local vector θ, at points of φ, by nodes about the mode of θ.

.. math:: f_k(\varphi) = \int p(y_k, \theta \mid \varphi)\, d\theta

A node z stands for θ = mode + L⁻ᵀ z, where L Lᵀ is the curvature at the mode: nodes are those of a rule for integrals
over a standard normal. A single node at 0 gives Laplace's approximation.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RBFInterpolator
from scipy.spatial import cKDTree
from scipy.special import logsumexp

from fedppl.numerics import tolerances as tol
from fedppl.numerics.streams import whitened_points
from fedppl.types import Array


class Rule(NamedTuple):
    """A rule for integrals over a standard normal."""

    nodes: Array  # (L, d)
    log_weights: Array  # (L,)
    group: Array  # (L,) group 0, 1, ... of each node; the shares of groups in the integral tell its error


def by_points(size: int, count: int, stream: int) -> Rule:
    """Quasi-random points of a stream."""
    points = whitened_points(size, count, stream).copy()
    return Rule(points, np.full(len(points), -np.log(len(points))), np.zeros(len(points)))


@functools.cache
def by_grid(size: int, count: int) -> Rule:
    """Gauss-Hermite nodes, `count` of each coordinate, the outermost of which are group 1."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    logs = np.log(weights / weights.sum())
    grid = np.array(list(itertools.product(nodes, repeat=size)))
    outer = (np.abs(grid).max(axis=1) > nodes.max() - tol.OUTERMOST).astype(float)
    return Rule(grid, np.array([sum(term) for term in itertools.product(logs, repeat=size)]), outer)


class Signed(NamedTuple):
    """A rule for integrals over a standard normal, some of whose weights are negative."""

    nodes: Rule  # without weights
    weights: Array  # (L,)


@functools.cache
def by_sparse_grid(size: int, level: int) -> Signed:
    """Smolyak's combination of Gauss-Hermite rules of 1, 3, 5, ... nodes: exact to the degree 2 level − 1."""
    rules = [np.polynomial.hermite_e.hermegauss(2 * number + 1) for number in range(level)]
    summed: dict[tuple[float, ...], float] = {}
    for which in itertools.product(range(level), repeat=size):
        missing = level - 1 - sum(which)
        if not 0 <= missing < size:
            continue
        sign = (-1.0) ** missing * math.comb(size - 1, missing)
        for at in itertools.product(*(range(2 * number + 1) for number in which)):
            chosen = [(rules[number][0][i], rules[number][1][i]) for number, i in zip(which, at, strict=True)]
            node = tuple(round(float(place), tol.SPARSE_DIGITS) + 0.0 for place, _ in chosen)  # no -0.0
            summed[node] = summed.get(node, 0.0) + sign * float(np.prod([weight for _, weight in chosen]))
    nodes, weights = np.array(list(summed)), np.array(list(summed.values()))
    counts = np.abs(weights) > tol.SPARSE_ROUNDING * np.max(np.abs(weights))
    nothing = np.zeros(int(counts.sum()))
    return Signed(Rule(nodes[counts], nothing, nothing), weights[counts] / (2.0 * np.pi) ** (0.5 * size))


@functools.cache
def by_trapezoids(far: int) -> Rule:
    """Trapezoids in u, z = sinh u, dense near 0 and far out; every second node is group 1, a rule by itself."""
    return _trapezoids(np.linspace(-far, far, 2 * tol.TRAPEZOIDS_A_UNIT * far + 1))


@functools.cache
def by_far_grid(size: int, *, finer: bool) -> Rule:
    """Trapezoids in u, z = sinh u, of two or three coordinates, out into heavy tails.

    Axis s has the sides 2 s and 2 s + 1. A side's outermost nodes are group 1 + 2 side, those before them the next.
    """
    far, count = tol.FAR[size]
    count += (count - 1) // 2 * finer
    nodes, logs, _ = _trapezoids(np.linspace(-far, far, count))
    each = np.array(list(itertools.product(range(count), repeat=size)))
    ring = np.minimum(each, count - 1 - each)
    axis, outermost = np.argmin(ring, axis=1), np.min(ring, axis=1)
    side = 2 * axis + (each[np.arange(len(each)), axis] > count // 2)
    group = np.where(outermost < 2, 1.0 + 2.0 * side + outermost, 0.0)
    return Rule(nodes[each, 0], logs[each].sum(axis=1), group)


@functools.cache
def between_trapezoids(far: int) -> Rule:
    """Trapezoids halfway between those of `by_trapezoids`: both together are the rule of twice as many."""
    reach = far + 0.5 / tol.TRAPEZOIDS_A_UNIT
    return _trapezoids(np.linspace(-reach, reach, 2 * tol.TRAPEZOIDS_A_UNIT * far + 2))


def _trapezoids(steps: Array) -> Rule:
    nodes = np.sinh(steps)
    logs = np.log(np.cosh(steps) * (steps[1] - steps[0])) - 0.5 * nodes**2 - 0.5 * np.log(2.0 * np.pi)
    return Rule(nodes[:, None], logs, (np.arange(len(nodes)) % 2 == 0).astype(float))


def beyond(outermost: Array, next_to_it: Array) -> tuple[Array, Array]:
    """Share of an integral beyond trapezoids in u, z = sinh u, and its error, both (S,).

    Tails that fall as a power of the distance fall exponentially in u: two nodes tell the power. Given are the shares
    of each side's outermost nodes, and of those before them, (S, sides).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        falls = np.log(next_to_it) - np.log(outermost)
    tails = np.where(outermost > 0.0, outermost / np.expm1(np.maximum(falls, tol.FLAT)), 0.0)  # a geometric series
    errors = np.where(falls > 2.0 * tol.FLAT, tol.OF_POWER, 1.0) * tails
    return np.asarray(tails.sum(axis=1)), np.asarray(errors.sum(axis=1))


def log_integrals(terms: Array, rule: Rule) -> tuple[Array, Array]:
    """Logarithms of integrals (S,), NaN where there is none, and their errors, 0 there.

    Terms (S, L) are logarithms of what nodes add. Trapezoids along one coordinate, and grids with sides, have an
    estimate of the tails beyond them added; the error of a grid without sides is what its rim has more than
    that of a normal.
    """
    with np.errstate(invalid="ignore"):
        total = logsumexp(terms, axis=1)
        shares = terms - total[:, None]
        if rule.nodes.shape[1] == 1:
            outside, errors = beyond(np.exp(shares[:, [0, -1]]), np.exp(shares[:, [1, -2]]))
            errors = errors + _error_of_trapezoids(shares, rule)
        else:
            groups = range(int(rule.group.max()) + 1)
            each = np.stack([np.exp(shares[:, rule.group == group]).sum(axis=1) for group in groups], axis=1)
            if each.shape[1] > 2:  # with sides
                outside, errors = beyond(each[:, 1::2], each[:, 2::2])
            else:
                of_normal = np.exp(rule.log_weights[rule.group == 1]).sum()
                outside, errors = np.zeros(len(each)), np.maximum(each[:, 1] - of_normal, 0.0)
        values = total + np.log1p(outside)
    finite = np.isfinite(values)
    return np.where(finite, values, np.nan), np.where(finite, errors, 0.0)


def _error_of_trapezoids(terms: Array, rule: Rule) -> Array:
    """Error of the log of an integral (S,), from log shares of nodes (S, L), by the rule of every second node.

    About a single peak where nodes are dense, the whole rule's error is the square of the half rule's. Elsewhere a peak
    may lie between two nodes, and the half rule's error is a bound.
    """
    half = np.log(2.0 * np.clip(np.exp(terms[:, rule.group == 1]).sum(axis=1), tol.HALF_RULE, 1.0))
    high = terms > terms.max(axis=1, keepdims=True) - tol.LOW
    peaks = np.sum((terms[:, 1:-1] > terms[:, :-2]) & (terms[:, 1:-1] >= terms[:, 2:]) & high[:, 1:-1], axis=1)
    central = (peaks == 1) & (np.abs(rule.nodes[np.argmax(terms, axis=1), 0]) < tol.DENSE_REACH)
    return np.asarray(np.where(central, np.sign(half) * half**2, np.abs(half)))


# Interpolation over φ by a spline, where the function is smooth enough ------------------------------------------------


def some_of(count: int, most: int) -> NDArray[np.intp]:
    """Places of `most` of so many points, evenly spread; of all where these are fewer."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).astype(np.intp))


def chunks(count: int, most: int) -> list[slice]:
    """Slices of so many, each of at most `most`, and of one at least."""
    size = max(1, most)
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def median_of(values: Array) -> float:
    """The median of the finite values; 0 where there are none."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else 0.0


def nearest_of(points: Array, some: NDArray[np.intp]) -> NDArray[np.intp]:
    """Which of the points (S, m) in some places is nearest to each, coordinates in their sds, (S,)."""
    scale = np.maximum(np.std(points, axis=0), tol.TINY)
    return np.asarray(cKDTree(points[some] / scale).query(points / scale)[1])


def smooth_over(
    points: Array,
    few: NDArray[np.intp],
    values: Array,
    errors: Array,
    enough: float = tol.SMOOTH,
    *,
    close: bool = False,
) -> tuple[Array, Array, Array] | None:
    """Interpolate a function and its errors, known at a few of the points (P,), at all of them (S,).

    A spline through three quarters of the few has to predict the function at the other quarter, each quarter in turn,
    with a median error of at most `enough`; None where none does. Tried are a thin-plate spline of contracted
    coordinates and a cubic one; first a cubic one with a quadratic, where points lie so `close` that the function is
    nearly quadratic. The third array (S,) is the error of interpolation, by the residuals nearby. Where the nearest of
    the few has no finite value, the function is NaN.
    """
    known = np.stack([values, errors], axis=1)
    finite = np.all(np.isfinite(known), axis=1)
    all_few, few, known = few, few[finite], known[finite]
    if len(few) < tol.KNOWN_A_TERM * (points.shape[1] + 2):
        return None
    scale = np.median(np.abs(points - np.median(points, axis=0)), axis=0)
    # Coordinates are contracted: a function of the log of a distance is then as smooth far out as near the center.
    straight = (points - np.median(points, axis=0)) / scale
    part = np.arange(len(few)) % tol.PARTS
    try:
        kinds = [(np.arcsinh(straight), "thin_plate_spline", 1), (straight, "cubic", 1)]
        for white, kernel, degree in [(straight, "cubic", 2), *kinds] if close else kinds:
            fit = functools.partial(RBFInterpolator, kernel=kernel, degree=degree)
            residuals = np.zeros(len(few))
            for number in range(tol.PARTS):
                out = part == number
                residuals[out] = fit(white[few[~out]], known[~out, 0])(white[few[out]]) - known[out, 0]
            half, tail = np.quantile(np.abs(residuals), [0.5, tol.SMOOTH_QUANTILE])
            if half <= enough and tail <= tol.SMOOTH_TAIL * enough:
                break
        else:
            return None
        values, errors = fit(white[few], known)(white).T
        nearest = cKDTree(white[few]).query(white, k=min(tol.NEAREST, len(residuals)))[1]
        # With the sign of the mean residual, so that errors add up over clients that have them alike, and no others.
        missed = np.copysign(np.sqrt(np.mean(residuals[nearest] ** 2, axis=1)), np.mean(residuals[nearest], axis=1))
        missed[few] = 0.0
        if not np.all(finite):
            values[~finite[cKDTree(white[all_few]).query(white)[1]]] = np.nan
        is_known = np.isfinite(values)
        return values, np.where(is_known, errors, 0.0), np.where(is_known, missed, 0.0)
    except np.linalg.LinAlgError:  # points that coincide, or lie in a plane
        return None
