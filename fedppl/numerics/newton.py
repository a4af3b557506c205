"""Jitted numerics under the Laplace family: curvature by differences and the inner Newton search.

A `kernel` is a jitted function ``kernel(x, *data) -> [log density, gradient]`` with x = (φ, θ) of m + d entries
and `data` a client's packed arrays. It is passed as a first-class function of one fixed signature, so that the
loops here compile once for all models and stay in Numba's cache on disk.
A = −∂²/∂θ² always stands for the *negative* Hessian of the log density in θ, so that it is positive definite
at a mode. Curvature comes from differences of the gradient: exact where the log density is quadratic in θ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types

jit: Callable[..., Any] = numba.njit(nogil=True, cache=True)

OK = 0
NO_MODE = 1
NOT_FINITE = 2

VECTOR = types.float64[::1]
MATRIX = types.float64[:, ::1]
INTEGERS = types.int64[::1]
DATA = types.Tuple((VECTOR, INTEGERS, INTEGERS))
PACKED = VECTOR(VECTOR, VECTOR, INTEGERS, INTEGERS)
KERNEL = types.FunctionType(PACKED)


def entry(*arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Jit a loop over kernels with an explicit signature, at its first call rather than at import."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = functools.cache(lambda: numba.njit(arguments, nogil=True, cache=True)(function))

        @functools.wraps(function)
        def call(*values: Any) -> Any:
            return compiled()(*values)

        return call

    return decorate


@jit
def assign(out: Any, first: int, values: Any) -> None:
    """Set out[first:] to values, as far as they go. A slice on the left takes seconds to compile, for its error."""
    for i in range(values.shape[0]):
        out[first + i] = values[i]


@jit
def cholesky(matrix: Any, out: Any) -> bool:
    """Lower Cholesky factor into `out`; False if the matrix is not positive definite (or has NaN)."""
    n = matrix.shape[0]
    for i in range(n):
        for j in range(i + 1):
            total = matrix[i, j]
            for k in range(j):
                total -= out[i, k] * out[j, k]
            if i == j:
                if not total > 0.0:
                    return False
                out[i, i] = np.sqrt(total)
            else:
                out[i, j] = total / out[j, j]
        for j in range(i + 1, n):
            out[i, j] = 0.0
    return True


@jit
def solve(factor: Any, right: Any, out: Any) -> None:
    """Solve L Lᵀ out = right."""
    n = factor.shape[0]
    for i in range(n):
        total = right[i]
        for k in range(i):
            total -= factor[i, k] * out[k]
        out[i] = total / factor[i, i]
    for i in range(n - 1, -1, -1):
        total = out[i]
        for k in range(i + 1, n):
            total -= factor[k, i] * out[k]
        out[i] = total / factor[i, i]


@jit
def log_determinant(factor: Any) -> float:
    """log |L Lᵀ| of a Cholesky factor L."""
    total = 0.0
    for i in range(factor.shape[0]):
        total += np.log(factor[i, i])
    return 2.0 * total


@jit
def rescale(A: Any, scale: Any) -> None:
    """Set the lengths over which differences are taken to the posterior sds that A gives."""
    for j in range(A.shape[0]):
        if A[j, j] > 0.0:
            scale[j] = min(1.0, max(1e-6, 1.0 / np.sqrt(A[j, j])))


@jit
def curvature(kernel: Any, x: Any, m: int, scale: Any, relative: float, data: Any, A: Any, cross: Any) -> None:
    """A = −∂²ℓ/∂θ² into A, ∂²ℓ/∂φ∂θ into cross (m, d), by central differences; θ scales are renewed."""
    d = x.shape[0] - m
    for j in range(d):
        step = relative * scale[j]
        here = x[m + j]
        x[m + j] = here + step
        high = kernel(x, *data)
        x[m + j] = here - step
        low = kernel(x, *data)
        x[m + j] = here
        for i in range(d):
            A[i, j] = -(high[1 + m + i] - low[1 + m + i]) / (2.0 * step)
        for i in range(m):
            cross[i, j] = (high[1 + i] - low[1 + i]) / (2.0 * step)
    for i in range(d):
        for j in range(i):
            mean = 0.5 * (A[i, j] + A[j, i])
            A[i, j] = mean
            A[j, i] = mean
    rescale(A, scale)


@jit
def forward_curvature(kernel: Any, x: Any, m: int, base: Any, scale: Any, data: Any, A: Any, cross: Any) -> None:
    """A and ∂²ℓ/∂φ∂θ by forward differences from the output at x: half the calls, where little is lost by it."""
    d = x.shape[0] - m
    for j in range(d):
        step = 1e-4 * scale[j]
        here = x[m + j]
        x[m + j] = here + step
        high = kernel(x, *data)
        x[m + j] = here
        for i in range(d):
            A[i, j] = -(high[1 + m + i] - base[1 + m + i]) / step
        for i in range(m):
            cross[i, j] = (high[1 + i] - base[1 + i]) / step
    for i in range(d):
        for j in range(i):
            mean = 0.5 * (A[i, j] + A[j, i])
            A[i, j] = mean
            A[j, i] = mean


@jit
def inner_mode(
    kernel: Any, x: Any, m: int, scale: Any, data: Any, A: Any, factor: Any, cross: Any, tolerance: float, limit: int
) -> Any:
    """Move the θ part of x to the mode of ℓ(φ, ·) by damped Newton; returns (status, output at x, steps)."""
    d = x.shape[0] - m
    output = kernel(x, *data)
    step = np.zeros(d)
    shifted = np.zeros((d, d))
    if not np.isfinite(output[0]):
        return NOT_FINITE, output, 0
    for iteration in range(limit):
        forward_curvature(kernel, x, m, output, scale, data, A, cross)
        rescale(A, scale)
        largest = 1e-8
        for i in range(d):
            largest = max(largest, abs(A[i, i]))
        start, best = x[m:].copy(), x[m:].copy()
        before = output
        shift, decrement, moved = 0.0, 0.0, False
        # A curvature that is not positive is shifted in units of each coordinate's own, as thousands and logarithms may
        # stand side by side, and by the same for all, as one may have hardly any. The better of the two steps is taken.
        for least in (1e-14, 1.0):
            shift = 0.0
            while True:
                for i in range(d):
                    for j in range(d):
                        shifted[i, j] = A[i, j]
                    shifted[i, i] += shift * max(abs(A[i, i]), least * largest)
                if cholesky(shifted, factor):
                    break
                if not shift < 1e26:
                    return NOT_FINITE, output, iteration
                shift = 1e-3 if shift == 0.0 else shift * 4.0
            solve(factor, before[1 + m :], step)
            decrement = 0.0
            for i in range(d):
                decrement += step[i] * before[1 + m + i]
            length = 1.0
            for _ in range(40):
                for i in range(d):
                    x[m + i] = start[i] + length * step[i]
                trial = kernel(x, *data)
                # the slack is rounding: near the mode the gain is below the last digits of the value
                if trial[0] >= before[0] + 1e-4 * length * decrement - 1e-12 * abs(before[0]):
                    if not moved or trial[0] > output[0]:
                        output = trial
                        assign(best, 0, x[m:])
                    moved = True
                    break
                length *= 0.5
            if shift == 0.0:
                break
        assign(x, m, best)
        if shift == 0.0 and (decrement < tolerance or not moved):
            # one curvature at the point where we stop
            curvature(kernel, x, m, scale, 1e-3, data, A, cross)
            if not cholesky(A, factor):
                return NO_MODE, output, iteration + 1
            solve(factor, output[1 + m :], step)
            decrement = 0.0
            for i in range(d):
                decrement += step[i] * output[1 + m + i]
            if decrement < max(tolerance, 1e-6):
                return OK, output, iteration + 1
            return NO_MODE, output, iteration + 1
        if not moved:
            return NO_MODE, output, iteration + 1
    return NO_MODE, output, limit


@entry(KERNEL, VECTOR, VECTOR, DATA)
def difference_hessian(kernel: Any, x: Any, scale: Any, data: Any) -> Any:
    """Hessian of the log density in all of x, (n, n), by central differences of the gradient."""
    n = x.shape[0]
    A, cross = np.zeros((n, n)), np.zeros((0, n))
    curvature(kernel, x.copy(), 0, scale.copy(), 1e-3, data, A, cross)
    return -A


@entry(KERNEL, MATRIX)
def density_batch(kernel: Any, points: Any) -> Any:
    """Log density and gradient, (S, 1 + n), at every row of points (S, n), of a kernel that has no data."""
    none, nowhere = np.zeros(0), np.zeros(0, np.int64)
    found = np.zeros((points.shape[0], 1 + points.shape[1]))
    for s in range(points.shape[0]):
        assign(found[s], 0, kernel(points[s], none, nowhere, nowhere))
    return found
