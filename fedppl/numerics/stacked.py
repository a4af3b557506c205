r"""Jitted loops over many clients whose data lie one after the other: no Python object for each.

.. math:: \sum_k \log f_k(\varphi_s), \qquad \log f_k(\varphi) = \log \int p(y_k, \theta \mid \varphi)\, d\theta

Every client writes rows of its own, and sums go over clients in their order: whoever calls these for parts of the
clients in several threads, and adds what they give in the order of the parts, has the same numbers whatever their
number is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from fedppl.numerics.newton import (
    INTEGERS,
    KERNEL,
    MATRIX,
    VECTOR,
    assign,
    cholesky,
    entry,
    jit,
    log_determinant,
    solve,
)
from fedppl.types import Array

_PLACES = types.int64[:, ::1]
_FLAGS = types.uint8[::1]
_LOW = 30.0  # log units below the largest term from which one does not count
# Reals and integers of all clients, where arrays of each lie in its own, and where its own begin.
PACKS = types.Tuple((VECTOR, INTEGERS, _PLACES, _PLACES))


class Packs(NamedTuple):
    """Clients' arrays as `fedppl.model.pack.pack` has them, one after the other."""

    reals: Array
    integers: NDArray[np.int64]
    where: NDArray[np.int64]  # (K, W) start, stop and shape of each array, within the client's own buffers
    at: NDArray[np.int64]  # (K + 1, 2) where its reals and its integers begin


@jit
def _own(packs: Any, k: int) -> Any:
    """A client's arrays, packed."""
    reals, integers, where, at = packs
    return reals[at[k, 0] : at[k + 1, 0]], integers[at[k, 1] : at[k + 1, 1]], where[k]


@jit
def _log_sum(terms: Any) -> Any:
    largest = terms.max()
    if not np.isfinite(largest):
        return -np.inf
    return largest + np.log(np.sum(np.exp(terms - largest)))


@jit
def _others(which: Any, d: int) -> Any:
    """Places of d that are none of these."""
    rest, taken = np.zeros(d - which.shape[0], np.int64), 0
    for i in range(d):
        if not np.any(which == i):
            rest[taken] = i
            taken += 1
    return rest


@jit
def _given_terms(
    kernel: Any,
    x: Any,
    m: int,
    mode: Any,
    factor: Any,
    data: Any,
    nodes: Any,
    log_weights: Any,
    which: Any,
    terms: Any,
    middles: Any,
    roots: Any,
) -> bool:
    """The same as `node_terms` where nodes are of few coordinates c, `which`, and the rest of θ is Gaussian given c.

    The integral over the rest is exact: its slopes are linear, so that differences over any length tell its curvature.
    θ at each node with the rest at its mean given c goes to middles (L, d), and where there are roots (L, r, r) the
    Cholesky factors of the rest's precision to these. False where a curvature is none of a Gaussian's at a node that
    counts.
    """
    d, q = mode.shape[0], which.shape[0]
    r = d - q
    rest = _others(which, d)
    A = factor @ factor.T
    A_rr, root, follow, column = np.zeros((r, r)), np.zeros((r, r)), np.zeros((q, r)), np.zeros(r)
    of_c, root_c, step = np.zeros((q, q)), np.zeros((q, q)), np.zeros(q)
    for i in range(r):
        for j in range(r):
            A_rr[i, j] = A[rest[i], rest[j]]
    if not cholesky(A_rr, root):
        return False
    for c in range(q):
        for i in range(r):
            column[i] = A[rest[i], which[c]]
        solve(root, column, follow[c])
    for c in range(q):
        for e in range(q):
            of_c[c, e] = A[which[c], which[e]]
            for i in range(r):
                of_c[c, e] -= A[which[c], rest[i]] * follow[e, i]
    if not cholesky(of_c, root_c):
        return False
    constant = 0.5 * d * np.log(2.0 * np.pi) - 0.5 * log_determinant(root_c)
    curved, root_rr, gain, unknown = np.zeros((r, r)), np.zeros((r, r)), np.zeros(r), -np.inf
    for node in range(len(nodes)):
        squared = 0.0
        for c in range(q - 1, -1, -1):
            total = nodes[node, c]
            squared += total**2
            for e in range(c + 1, q):
                total -= root_c[e, c] * step[e]
            step[c] = total / root_c[c, c]
            x[m + which[c]] = mode[which[c]] + step[c]
        for i in range(r):
            x[m + rest[i]] = mode[rest[i]]
            for c in range(q):
                x[m + rest[i]] -= follow[c, i] * step[c]
        base = kernel(x, *data)
        for j in range(r):
            here, width = x[m + rest[j]], 1.0 / np.sqrt(A_rr[j, j])
            x[m + rest[j]] = here + width
            there = kernel(x, *data)
            x[m + rest[j]] = here
            for i in range(r):
                curved[i, j] = -(there[1 + m + rest[i]] - base[1 + m + rest[i]]) / width
            column[j] = base[1 + m + rest[j]]
        for i in range(r):
            for j in range(i):
                curved[i, j] = 0.5 * (curved[i, j] + curved[j, i])
        if not cholesky(curved, root_rr):
            terms[node], there_too = -np.inf, base[0] + constant + 0.5 * squared + log_weights[node]
            unknown = max(unknown, there_too if np.isfinite(there_too) else -np.inf)
            continue
        solve(root_rr, column, gain)
        terms[node] = base[0] - 0.5 * log_determinant(root_rr) + constant + 0.5 * squared + log_weights[node]
        for i in range(r):
            terms[node] += 0.5 * gain[i] * column[i]
        if len(middles):
            assign(middles[node], 0, x[m:])
            for i in range(r):
                middles[node, rest[i]] += gain[i]
                assign(roots[node, i], 0, root_rr[i])
        if not terms[node] < np.inf:  # NaN: no density there
            terms[node] = -np.inf
    return bool(unknown < terms.max() - _LOW)  # far out rounding leaves no curvature, nor does it matter there


@entry(KERNEL, VECTOR, MATRIX, PACKS, INTEGERS, _FLAGS)
def densities_of_many(kernel: Any, phi: Any, starts: Any, packs: Any, places: Any, failed: Any) -> None:
    """Where log p(y_k, θ | φ) or a slope is not finite at one φ and each client's start, `failed`."""
    m, d = phi.shape[0], starts.shape[1]
    x = np.zeros(m + d)
    assign(x, 0, phi)
    for row in range(len(places)):
        assign(x, m, starts[places[row]])
        failed[row] = not np.all(np.isfinite(kernel(x, *_own(packs, places[row]))))
