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
from typing import Any

import numpy as np

from fedppl.local._importance import whitened_points
from fedppl.local._marginal import _marginal_near, _origin, _third
from fedppl.local._newton import DATA, KERNEL, MATRIX, OK, VECTOR, entry
from fedppl.types import Array

__all__ = ["difference_batch", "left_out", "rule", "trusted"]

_NODES = {1: 9, 2: 7, 3: 5}  # of each coordinate
_POINTS = 256  # where there are more coordinates
_LEAST = 0.3  # relative ESS of importance weights below which they say nothing
_QUADRATIC = 8  # shared coordinates up to which Δ is a quadratic; beyond, a linear function
Difference = Callable[[Array], Array]
# Moves of q in sds: a thousand clients with the first make a tenth of one, and what is left of curvature by the second
# is several times smaller.
_NEGLIGIBLE, _LINEAR = 1e-4, 2e-3


def rule(size: int, stream: int) -> tuple[Array, Array]:
    """Nodes (L, d) and log weights (L,) for integrals over a standard normal; of a stream, where they are random."""
    if size in _NODES:
        return _nodes(size)
    points = whitened_points(size, _POINTS, stream).copy()
    return points, np.full(len(points), -np.log(len(points)))


@functools.cache
def _nodes(size: int) -> tuple[Array, Array]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES[size])
    logs = np.log(weights / weights.sum())
    grid = np.array(list(itertools.product(nodes, repeat=size)))
    return grid, np.array([sum(term) for term in itertools.product(logs, repeat=size)])


@entry(KERNEL, MATRIX, VECTOR, VECTOR, DATA, MATRIX, VECTOR)
def difference_batch(
    kernel: Any, draws: Any, phi: Any, theta: Any, data: Any, nodes: Any, log_weights: Any
) -> tuple[int, Array, Array]:
    """Δ at every row of draws (S, m), by way of an expansion at φ, as in `marginal_batch`.

    Returns (status of the search at φ, Δ (S,), relative ESS of the terms (S,)); NaN where there is no mode.
    """
    count, m = draws.shape
    d = theta.shape[0]
    differences, relative = np.full(count, np.nan), np.zeros(count)
    status, origin, output, slope, center, _, scale = _origin(kernel, phi, theta, data)
    if status != OK:
        return status, differences, relative
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
            weights = np.exp(terms - largest)
            differences[s] = largest + np.log(weights.sum()) - laplace
            relative[s] = weights.sum() ** 2 / np.sum(weights**2) / len(nodes)
    return OK, differences, relative


def left_out(difference: Callable[[Array], Array | None], mean: Array, root: Array, stream: int) -> Difference | None:
    """Δ as a function of points (S, m) about q = N(mean, root rootᵀ), up to a constant; None where it is negligible.

    `difference` gives Δ at points, or None where it cannot be told.
    """
    m = len(mean)
    z = whitened_points(m, 2 * (m + 1), stream)
    found = difference(mean + z @ root.T)
    if found is None:
        return None
    linear, curved = found @ z / len(z), np.zeros((m, m))  # of antithetic points: what is even in z drops out
    if np.linalg.norm(linear) < _NEGLIGIBLE:
        return None
    if m <= _QUADRATIC and np.linalg.norm(linear) > _LINEAR:
        z = whitened_points(m, (m + 1) * (m + 2), stream)
        found = difference(mean + z @ root.T)
        if found is None:
            return None
        rows, columns = np.triu_indices(m)
        design = np.concatenate([np.ones((len(z), 1)), z, z[:, rows] * z[:, columns]], axis=1)
        coefficients = np.linalg.lstsq(design, found, rcond=None)[0]
        linear, curved[rows, columns] = coefficients[1 : 1 + m], coefficients[1 + m :]
    inverse = np.linalg.inv(root)

    def quadratic(phi: Array) -> Array:
        white = (phi - mean) @ inverse.T
        return np.asarray(white @ linear + np.sum((white @ curved) * white, axis=1))

    return quadratic


def trusted(differences: Array, relative: Array, size: int) -> bool:
    """Whether all points have a value, and importance weights of θ enough left of them."""
    return bool(np.all(np.isfinite(differences)) and (size in _NODES or relative.min() > _LEAST))
