r"""The integral of a client over its local vector θ, at points of φ, by nodes about the mode of θ.

.. math:: f_k(\varphi) = \int p(y_k, \theta \mid \varphi)\, d\theta

A node z stands for θ = mode + L⁻ᵀ z, where L Lᵀ is the curvature at the mode: nodes are those of a rule for integrals
over a standard normal, and f_k of Laplace's approximation is what a single node at 0 gives.
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

from fedppl.numerics.streams import whitened_points
from fedppl.types import Array

SIZES = {1: 9, 2: 7, 3: 5}  # nodes of each coordinate in a grid, by the number of coordinates
_FAR = {2: (6.0, 25), 3: (4.8, 17)}  # by the number of coordinates, how far u goes, and how many nodes each has
_FLAT, _OF_POWER = 0.1, 0.3  # change of a logarithm that is none; of what a power foretells, what is not known
_LOW = 30.0  # log units below the largest from which nodes count for nothing
_DENSE = 2.0  # sds from the center within which trapezoids lie dense


class Rule(NamedTuple):
    """A rule for integrals over a standard normal."""

    nodes: Array  # (L, d)
    log_weights: Array  # (L,)
    group: Array  # (L,) numbers of groups of nodes, 0, 1, ..., whose shares of the integral are asked for


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
    outer = (np.abs(grid).max(axis=1) > nodes.max() - 1e-9).astype(float)
    return Rule(grid, np.array([sum(term) for term in itertools.product(logs, repeat=size)]), outer)


class Signed(NamedTuple):
    """A rule for integrals over a standard normal, some of whose weights are negative."""

    nodes: Rule  # without weights
    weights: Array  # (L,)


@functools.cache
def by_sparse_grid(size: int, level: int) -> Signed:
    """Smolyak's combination of Gauss-Hermite rules of 1, 3, 5, ... nodes: exact to the degree 2 level − 1."""
    rules = [np.polynomial.hermite_e.hermegauss(2 * number + 1) for number in range(level)]
    found: dict[tuple[float, ...], float] = {}
    for which in itertools.product(range(level), repeat=size):
        missing = level - 1 - sum(which)
        if not 0 <= missing < size:
            continue
        sign = (-1.0) ** missing * math.comb(size - 1, missing)
        for at in itertools.product(*(range(2 * number + 1) for number in which)):
            chosen = [(rules[number][0][i], rules[number][1][i]) for number, i in zip(which, at, strict=True)]
            node = tuple(round(float(one), 12) + 0.0 for one, _ in chosen)  # no -0.0
            found[node] = found.get(node, 0.0) + sign * float(np.prod([one for _, one in chosen]))
    nodes, weights = np.array(list(found)), np.array(list(found.values()))
    counts = np.abs(weights) > 1e-14 * np.max(np.abs(weights))
    nothing = np.zeros(int(counts.sum()))
    return Signed(Rule(nodes[counts], nothing, nothing), weights[counts] / (2.0 * np.pi) ** (0.5 * size))


@functools.cache
def by_trapezoids(far: int = 4) -> Rule:
    """Trapezoids in u, z = sinh u: dense near 0, and far out; every second is group 1, which is a rule too."""
    return _trapezoids(np.linspace(-far, far, 6 * far + 1))


@functools.cache
def by_far_grid(size: int, *, finer: bool = False) -> Rule:
    """Trapezoids in u, z = sinh u, of two or three coordinates, out into heavy tails.

    Of each side, 2 s and 2 s + 1 for axis s, the outermost nodes are group 1 + 2 side, and those before them the next.
    """
    far, count = _FAR[size]
    count += (count - 1) // 2 * finer
    steps = np.linspace(-far, far, count)
    logs = np.log(np.cosh(steps) * (steps[1] - steps[0])) - 0.5 * np.sinh(steps) ** 2 - 0.5 * np.log(2.0 * np.pi)
    each = np.array(list(itertools.product(range(count), repeat=size)))
    ring = np.minimum(each, count - 1 - each)
    axis, outermost = np.argmin(ring, axis=1), np.min(ring, axis=1)
    side = 2 * axis + (each[np.arange(len(each)), axis] > count // 2)
    group = np.where(outermost < 2, 1.0 + 2.0 * side + outermost, 0.0)
    return Rule(np.sinh(steps)[each], logs[each].sum(axis=1), group)


@functools.cache
def between_trapezoids(far: int = 4) -> Rule:
    """The same with nodes halfway between those: together they are the rule of twice as many."""
    return _trapezoids(np.linspace(-far - 1.0 / 6.0, far + 1.0 / 6.0, 6 * far + 2))


def _trapezoids(steps: Array) -> Rule:
    nodes = np.sinh(steps)
    logs = np.log(np.cosh(steps) * (steps[1] - steps[0])) - 0.5 * nodes**2 - 0.5 * np.log(2.0 * np.pi)
    return Rule(nodes[:, None], logs, (np.arange(len(nodes)) % 2 == 0).astype(float))


def beyond(outermost: Array, next_to_it: Array) -> tuple[Array, Array]:
    """What lies beyond trapezoids in u, z = sinh u, in shares of the integral, and what is not known of it.

    Tails that fall as a power of the distance fall exponentially in u: two nodes tell the power. Shares are of the
    outermost nodes of sides, and of those before them, (S, sides).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        falls = np.log(next_to_it) - np.log(outermost)
    found = np.where(outermost > 0.0, outermost / np.expm1(np.maximum(falls, _FLAT)), 0.0)  # a geometric series
    unknown = np.where(falls > 2.0 * _FLAT, _OF_POWER, 1.0) * found
    return np.asarray(found.sum(axis=1)), np.asarray(unknown.sum(axis=1))


def log_integrals(terms: Array, rule: Rule) -> tuple[Array, Array]:
    """Logarithms of integrals (S,), NaN where there is none, and what is not known of them; 0 there.

    Of logarithms of what nodes add, (S, L): of trapezoids along one coordinate, or of a grid, what lies beyond is added
    by its sides; of a grid without sides its rim is what is not known.
    """
    with np.errstate(invalid="ignore"):
        total = logsumexp(terms, axis=1)
        shares = terms - total[:, None]
        if rule.nodes.shape[1] == 1:
            outside, unknown = beyond(np.exp(shares[:, [0, -1]]), np.exp(shares[:, [1, -2]]))
            unknown = unknown + _missed_by_trapezoids(shares, rule)
        else:
            groups = range(int(rule.group.max()) + 1)
            each = np.stack([np.exp(shares[:, rule.group == one]).sum(axis=1) for one in groups], axis=1)
            has_sides = each.shape[1] > 2
            outside, unknown = beyond(each[:, 1::2], each[:, 2::2]) if has_sides else (np.zeros(len(each)), each[:, 1])
        values = total + np.log1p(outside)
    told = np.isfinite(values)
    return np.where(told, values, np.nan), np.where(told, unknown, 0.0)


def _missed_by_trapezoids(terms: Array, rule: Rule) -> Array:
    """What is not known of the logarithm of an integral (S,), of logarithms of what each node is of it, (S, L).

    By the rule of every second node. About one peak that is where nodes are dense, the whole rule is wrong by the
    square of what every second node is wrong by. About another, which may lie between two nodes, no more is known than
    that it is less wrong.
    """
    half = np.log(2.0 * np.clip(np.exp(terms[:, rule.group == 1]).sum(axis=1), 1e-12, 1.0))
    high = terms > terms.max(axis=1, keepdims=True) - _LOW
    peaks = np.sum((terms[:, 1:-1] > terms[:, :-2]) & (terms[:, 1:-1] >= terms[:, 2:]) & high[:, 1:-1], axis=1)
    central = (peaks == 1) & (np.abs(rule.nodes[np.argmax(terms, axis=1), 0]) < _DENSE)
    return np.asarray(np.where(central, np.sign(half) * half**2, np.abs(half)))


# What is known at few points of φ, at all of them: by a spline, where it is smooth enough -----------------------------

_NEAREST = 8  # points that tell how well those near to them are foretold
_PARTS = 4  # of the known points, each foretold from the others
_FORETOLD = 0.002  # median error of foretelling, in log units, with which that is enough


def smooth_over(
    points: Array,
    few: NDArray[np.intp],
    values: Array,
    errors: Array,
    enough: float = _FORETOLD,
    *,
    close: bool = False,
) -> tuple[Array, Array, Array] | None:
    """A function and its errors, known at a few of the points (P,), at all of them (S,), where it is smooth enough.

    A spline of three quarters of the few has to foretell the function at the other quarter, of each quarter in turn,
    with a median error of at most `enough`: a thin-plate one of points that are drawn in, else a cubic one. Where
    points lie so `close` that the function hardly departs from a quadratic, one with a quadratic is tried first. The
    third array is by how much they are missed, at the points that are near to them. Where the nearest of the few is not
    known, the function is NaN.
    """
    known = np.stack([values, errors], axis=1)
    told = np.all(np.isfinite(known), axis=1)
    all_few, few, known = few, few[told], known[told]
    if len(few) < 4 * (points.shape[1] + 2):
        return None
    scale = np.median(np.abs(points - np.median(points, axis=0)), axis=0)
    # far points are drawn in: what varies with the log of a distance is as smooth there as near the center
    straight = (points - np.median(points, axis=0)) / scale
    part = np.arange(len(few)) % _PARTS
    try:
        kinds = [(np.arcsinh(straight), "thin_plate_spline", 1), (straight, "cubic", 1)]
        for white, kernel, degree in [(straight, "cubic", 2), *kinds] if close else kinds:
            fit = functools.partial(RBFInterpolator, kernel=kernel, degree=degree)
            missed = np.zeros(len(few))
            for one in range(_PARTS):
                out = part == one
                missed[out] = fit(white[few[~out]], known[~out, 0])(white[few[out]]) - known[out, 0]
            if np.median(np.abs(missed)) <= enough and np.quantile(np.abs(missed), 0.9) <= 10 * enough:
                break
        else:
            return None
        found = fit(white[few], known)(white)
        nearest = cKDTree(white[few]).query(white, k=min(_NEAREST, len(missed)))[1]
        # Of the sign that they have on average, so that what many clients miss alike adds up, and nothing else does.
        missing = np.copysign(np.sqrt(np.mean(missed[nearest] ** 2, axis=1)), np.mean(missed[nearest], axis=1))
        missing[few] = 0.0
        if not np.all(told):
            found[~told[cKDTree(white[all_few]).query(white)[1]]] = np.nan
        is_known = np.isfinite(found[:, 0])
        return found[:, 0], np.where(is_known, found[:, 1], 0.0), np.where(is_known, missing, 0.0)
    except np.linalg.LinAlgError:  # points that coincide, or lie in a plane
        return None
