r"""What Laplace's approximation over θ leaves out of log f_k, as a quadratic in φ.

.. math:: \Delta(\phi) = \log \int p(y_k, \theta \mid \phi)\, d\theta - \log f_k^{\text{Laplace}}(\phi)

The integral is adaptive: Gauss-Hermite nodes around the mode of θ, in units of the curvature there, up to three
coordinates, and quasi-random points with importance weights beyond. The same nodes serve all φ, so that what they miss
is smooth in φ and mostly a constant, which moves no moment; random points are of each client its own, so that errors of
clients do not add up.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import types

from fedppl.numerics.importance import whitened_points
from fedppl.numerics.marginal import _marginal_near, _origin, _third
from fedppl.numerics.newton import DATA, KERNEL, MATRIX, OK, VECTOR, entry
from fedppl.types import Array

_NODES = {1: 9, 2: 7, 3: 5}  # of each coordinate
_POINTS = 256  # where there are more coordinates
# Relative ESS of importance weights below which they say nothing, and above which all; in between Δ counts in part, so
# that it comes and goes without a jump. So it does by the share of the integral that outermost nodes have, beyond which
# there may be as much again.
_NOTHING, _ALL = 0.1, 0.3
_MOST, _LITTLE = 0.3, 0.15
_QUADRATIC = 8  # shared coordinates up to which Δ is a quadratic; beyond, a linear function
_ROUNDING = 1e-7
_CURVED = 1e-3  # Δ, in log units at one sd of q, from which its curvature is looked at

Difference = Callable[[Array], Array]


class LeftOut(NamedTuple):
    """Δ about q as far as it is known."""

    difference: Difference | None  # a quadratic, in points (S, m); None where it is nothing, or not known
    trust: float  # the part of Δ that it is, by how well it is known: 0 where nothing is known


class Rule(NamedTuple):
    """A rule for integrals over a standard normal."""

    nodes: Array  # (L, d)
    log_weights: Array  # (L,)
    outer: Array  # (L,) 1 for outermost nodes of a grid, else 0


def rule(size: int, stream: int) -> Rule:
    """Gauss-Hermite nodes, or quasi-random points of a stream where there are many coordinates."""
    if size in _NODES:
        return _grid(size)
    points = whitened_points(size, _POINTS, stream).copy()
    return Rule(points, np.full(len(points), -np.log(len(points))), np.zeros(len(points)))


@functools.cache
def _grid(size: int) -> Rule:
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES[size])
    logs = np.log(weights / weights.sum())
    grid = np.array(list(itertools.product(nodes, repeat=size)))
    outer = (np.abs(grid).max(axis=1) > nodes.max() - 1e-9).astype(float)
    return Rule(grid, np.array([sum(term) for term in itertools.product(logs, repeat=size)]), outer)


@entry(KERNEL, MATRIX, VECTOR, VECTOR, DATA, MATRIX, VECTOR, VECTOR, types.float64)
def difference_batch(
    kernel: Any, draws: Any, phi: Any, theta: Any, data: Any, nodes: Any, log_weights: Any, outer: Any, least: Any
) -> tuple[int, Array, Array, Array]:
    """Δ at every row of draws (S, m), by way of an expansion at φ, as in `marginal_batch`.

    Returns (status of the search at φ, Δ (S,), relative ESS of the terms (S,), share of the outermost nodes (S,)); NaN
    where there is no mode, and from the first point on that has less ESS than `least`.
    """
    count, m = draws.shape
    d = theta.shape[0]
    differences, relative, beyond = np.full(count, np.nan), np.zeros(count), np.zeros(count)
    status, origin, output, slope, center, _, scale = _origin(kernel, phi, theta, data)
    if status != OK:
        return status, differences, relative, beyond
    third = np.zeros(m + d)
    _third(kernel, origin, m, output, center, data, third)
    x, A, factor, mode = np.zeros(m + d), np.zeros((d, d)), np.zeros((d, d)), np.zeros(d)
    terms = np.zeros(len(nodes))
    for s in range(count):
        x[:m] = draws[s]
        there, laplace = _marginal_near(kernel, x, m, origin, slope, third, scale, data, A, factor)
        if there != OK or not np.isfinite(laplace):
            continue
        mode[:] = x[m:]
        constant = 0.5 * d * np.log(2.0 * np.pi)
        for i in range(d):
            constant -= np.log(factor[i, i])
        for node in range(len(nodes)):
            squared = 0.0
            for i in range(d - 1, -1, -1):  # θ = mode + L⁻ᵀ z
                total = nodes[node, i]
                squared += total**2
                for j in range(i + 1, d):
                    total -= factor[j, i] * (x[m + j] - mode[j])
                x[m + i] = mode[i] + total / factor[i, i]
            terms[node] = kernel(x, *data)[0] + 0.5 * squared + constant + log_weights[node]
        largest = terms.max()
        if np.isfinite(largest):
            total = largest + np.log(np.sum(np.exp(terms - largest)))
            relative[s] = 1.0 / np.sum(np.exp(2.0 * (terms - total))) / len(nodes)
            beyond[s] = np.sum(np.exp(terms - total) * outer)
            if relative[s] < least:
                break
            differences[s] = total - laplace
    return OK, differences, relative, beyond


def differences(
    batch: Callable[..., tuple[int, Array, Array, Array]], size: int, stream: int
) -> tuple[Array, float] | None:
    """Δ at the points of a call of `difference_batch` that lacks its last arguments, and how far to trust it."""
    by_weights = size not in _NODES
    status, found, relative, beyond = batch(*rule(size, stream), _NOTHING if by_weights else 0.0)
    if status != OK or not np.all(np.isfinite(found)):
        return None
    if by_weights:
        return found, float(np.clip((relative.min() - _NOTHING) / (_ALL - _NOTHING), 0.0, 1.0))
    return found, float(np.clip((_MOST - beyond.max()) / (_MOST - _LITTLE), 0.0, 1.0))


def left_out(
    difference: Callable[[Array], tuple[Array, float] | None], mean: Array, root: Array, stream: int
) -> LeftOut:
    """Δ about q = N(mean, root rootᵀ), up to a constant, from its values at points (S, m) and how far to trust them."""
    m = len(mean)
    z = whitened_points(m, 2 * (m + 1), stream)
    known = difference(mean + z @ root.T)
    if known is None:
        return LeftOut(None, 0.0)
    found, trust = known
    linear, curved = found @ z / len(z), np.zeros((m, m))  # of antithetic points: what is even in z drops out
    half = len(z) // 2
    even = float(np.std((found[:half] + found[half:]) / 2))
    if max(float(np.linalg.norm(linear)), even) < _ROUNDING:
        return LeftOut(None, 1.0)
    if m <= _QUADRATIC and max(float(np.linalg.norm(linear)), even) > _CURVED:
        z = whitened_points(m, (m + 1) * (m + 2), stream)
        again = difference(mean + z @ root.T)
        if again is not None:
            rows, columns = np.triu_indices(m)
            design = np.concatenate([np.ones((len(z), 1)), z, z[:, rows] * z[:, columns]], axis=1)
            coefficients = np.linalg.lstsq(design, again[0], rcond=None)[0]
            linear, curved[rows, columns] = coefficients[1 : 1 + m], coefficients[1 + m :]
            trust = min(trust, again[1])
    inverse = np.linalg.inv(root)

    def quadratic(phi: Array) -> Array:
        white = (phi - mean) @ inverse.T
        return np.asarray(trust * (white @ linear + np.sum((white @ curved) * white, axis=1)))

    return LeftOut(quadratic, trust)
