"""Jitted nested Laplace: log f_k(φ) = log ∫ p(y, θ | φ) dθ at one φ with derivatives, or at many.

.. math:: \\log f(\\phi) \\approx \\ell(\\phi, \\theta^*(\\phi)) + \\tfrac d2 \\log 2\\pi - \\tfrac12 \\log\\det A(\\phi)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from fedppl.local._newton import (
    DATA,
    KERNEL,
    MATRIX,
    NO_MODE,
    OK,
    VECTOR,
    cholesky,
    entry,
    forward_curvature,
    inner_mode,
    jit,
    log_determinant,
    solve,
)

__all__ = ["expand_marginal", "marginal_batch", "site_batch"]

CUBE = types.float64[:, :, ::1]


@jit
def _marginal_near(
    kernel: Any, x: Any, m: int, origin: Any, slope: Any, center: Any, scale: Any, data: Any, A: Any, factor: Any
) -> Any:
    """log f at the φ in x[:m], near an expanded origin: predict θ, one chord step, one Newton correction.

    Returns (status, log f, Newton step): at exit x[m:] is the mode up to a second-order correction that the
    value contains, and `factor` is the Cholesky factor of A there.
    """
    d = x.shape[0] - m
    step = np.zeros(d)
    for i in range(d):
        total = origin[m + i]
        for j in range(m):
            total += slope[i, j] * (x[j] - origin[j])
        x[m + i] = total
    output = kernel(x, *data)
    if np.isfinite(output[0]):
        solve(center, output[1 + m :], step)
        for i in range(d):
            x[m + i] += step[i]
        output = kernel(x, *data)
    decrement = np.inf
    if np.isfinite(output[0]):
        forward_curvature(kernel, x, m, output, scale, data, A)
        if cholesky(A, factor):
            solve(factor, output[1 + m :], step)
            decrement = 0.0
            for i in range(d):
                decrement += step[i] * output[1 + m + i]
    if not decrement < 1e-4:
        cross = np.zeros((m, d))
        for i in range(d):
            total = origin[m + i]
            for j in range(m):
                total += slope[i, j] * (x[j] - origin[j])
            x[m + i] = total
        own = scale.copy()
        output = kernel(x, *data)
        if not np.isfinite(output[0]):
            x[m:] = origin[m:]
        status, output, _ = inner_mode(kernel, x, m, own, data, A, factor, cross, 1e-9, 60)
        if status != OK:
            return status, -np.inf
        decrement = 0.0
    value = output[0] + 0.5 * decrement + 0.5 * d * np.log(2.0 * np.pi) - 0.5 * log_determinant(factor)
    return OK, value


@jit
def _determinant_at(
    kernel: Any, x: Any, m: int, origin: Any, slope: Any, center: Any, scale: Any, data: Any, B: Any, factor: Any
) -> bool:
    """Cholesky factor of A at the mode for the φ in x[:m], a small step from the origin; True if it fails."""
    d = x.shape[0] - m
    step = np.zeros(d)
    for i in range(d):
        total = origin[m + i]
        for j in range(m):
            total += slope[i, j] * (x[j] - origin[j])
        x[m + i] = total
    for _ in range(2):
        output = kernel(x, *data)
        solve(center, output[1 + m :], step)
        for i in range(d):
            x[m + i] += step[i]
    output = kernel(x, *data)
    forward_curvature(kernel, x, m, output, scale, data, B)
    return not cholesky(B, factor)


@jit
def _origin(kernel: Any, phi: Any, theta: Any, data: Any) -> Any:
    """Inner mode at φ: (status, x = (φ, θ mode), output, slope dθ/dφ, factor of A, ∂²ℓ/∂φ∂θ, θ scales)."""
    m, d = phi.shape[0], theta.shape[0]
    x = np.concatenate((phi, theta))
    scale = np.full(d, 0.1)
    A, factor, cross = np.zeros((d, d)), np.zeros((d, d)), np.zeros((m, d))
    slope = np.zeros((d, m))
    status, output, _ = inner_mode(kernel, x, m, scale, data, A, factor, cross, 1e-10, 100)
    if status == OK:
        for i in range(m):
            solve(factor, cross[i], slope[:, i])
    return status, x, output, slope, factor, cross, scale


@entry(KERNEL, VECTOR, VECTOR, VECTOR, DATA)
def expand_marginal(kernel: Any, phi: Any, theta: Any, wanted_scale: Any, data: Any) -> Any:
    """Quadratic expansion of log f at φ, θ marginalised by Laplace.

    Returns (status, log f, gradient (m,), Hessian (m, m), θ mode (d,)). Profile part from the blocks of the joint Hessian; log-determinant part
    from a stencil of m (m + 3) / 2 points, along which θ follows its mode.
    """
    m, d = phi.shape[0], theta.shape[0]
    gradient, hessian = np.zeros(m), np.zeros((m, m))
    status, x, output, slope, factor, cross, scale = _origin(kernel, phi, theta, data)
    if status != OK:
        return status, -np.inf, gradient, hessian, x[m:].copy()
    # profile part: ∂φφ + ∂φθ A⁻¹ ∂θφ
    widths = np.zeros(m)
    for j in range(m):
        gradient[j] = output[1 + j]
        widths[j] = 1e-3 * wanted_scale[j]
        here = x[j]
        x[j] = here + widths[j]
        high = kernel(x, *data)
        x[j] = here - widths[j]
        low = kernel(x, *data)
        x[j] = here
        for i in range(m):
            hessian[i, j] += 0.5 * (high[1 + i] - low[1 + i]) / (2.0 * widths[j])
            hessian[j, i] += 0.5 * (high[1 + i] - low[1 + i]) / (2.0 * widths[j])
    for i in range(m):
        for j in range(m):
            total = 0.0
            for k in range(d):
                total += cross[i, k] * slope[k, j]
            hessian[i, j] += total
    constant = 0.5 * d * np.log(2.0 * np.pi)
    center = -0.5 * log_determinant(factor)
    value = output[0] + constant + center
    origin = x.copy()
    if d == 0:
        return OK, value, gradient, hessian, x[m:].copy()
    # log-determinant part by differences along the path of the mode, its centre by the same forward differences
    for j in range(m):
        curvature = -hessian[j, j]
        width = wanted_scale[j]
        if curvature > 0.0:
            width = min(width, 1.0 / np.sqrt(curvature))
        widths[j] = 1e-2 * width
    there, B = np.zeros((d, d)), np.zeros((d, d))
    if _determinant_at(kernel, x, m, origin, slope, factor, scale, data, B, there):
        return NO_MODE, -np.inf, gradient, hessian, origin[m:].copy()
    center = -0.5 * log_determinant(there)
    one_up = np.zeros(m)
    for j in range(m):
        for sign in (1.0, -1.0):
            x[:] = origin
            x[j] += sign * widths[j]
            failed = _determinant_at(kernel, x, m, origin, slope, factor, scale, data, B, there)
            if failed:
                return NO_MODE, -np.inf, gradient, hessian, origin[m:].copy()
            half = -0.5 * log_determinant(there)
            gradient[j] += sign * half / (2.0 * widths[j])
            hessian[j, j] += (half - center) / widths[j] ** 2
            if sign > 0.0:
                one_up[j] = half
    for i in range(m):
        for j in range(i):
            x[:] = origin
            x[i] += widths[i]
            x[j] += widths[j]
            if _determinant_at(kernel, x, m, origin, slope, factor, scale, data, B, there):
                return NO_MODE, -np.inf, gradient, hessian, origin[m:].copy()
            half = -0.5 * log_determinant(there)
            mixed = (half - one_up[i] - one_up[j] + center) / (widths[i] * widths[j])
            hessian[i, j] += mixed
            hessian[j, i] += mixed
    return OK, value, gradient, hessian, origin[m:].copy()


@entry(KERNEL, MATRIX, VECTOR, VECTOR, DATA, MATRIX, CUBE)
def marginal_batch(kernel: Any, draws: Any, phi: Any, theta: Any, data: Any, modes: Any, factors: Any) -> Any:
    """log f at every row of draws (S, m), by way of an expansion at φ, the inner search there starting at θ.

    Fills modes (S, d) and, when it has rows, the Cholesky factors (S, d, d) of A. Returns (status of the search
    at φ, log f (S,), number of points without a mode, which get −inf).
    """
    count, m = draws.shape
    d = theta.shape[0]
    n = m + d
    keep = factors.shape[0] == count
    values = np.full(count, -np.inf)
    missed = 0
    status, origin, _, slope, center, _, scale = _origin(kernel, phi, theta, data)
    if status != OK:
        return status, values, count
    x, A, factor = np.zeros(n), np.zeros((d, d)), np.zeros((d, d))
    for s in range(count):
        x[:m] = draws[s]
        there, value = _marginal_near(kernel, x, m, origin, slope, center, scale, data, A, factor)
        if there == OK and np.isfinite(value):
            values[s] = value
            modes[s] = x[m:]
            if keep:
                factors[s] = factor
        else:
            missed += 1
    return OK, values, missed


@entry(KERNEL, MATRIX, DATA)
def site_batch(kernel: Any, points: Any, data: Any) -> Any:
    """log p(y, θ | φ) at every row x = (φ, θ) of points (S, m + d)."""
    values = np.zeros(points.shape[0])
    for s in range(points.shape[0]):
        values[s] = kernel(points[s], *data)[0]
    return values
