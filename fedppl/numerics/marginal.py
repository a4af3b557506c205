r"""Jitted nested Laplace: log f_k(φ) = log ∫ p(y, θ | φ) dθ with derivatives, at one φ or at many.

.. math:: \log f(\phi) \approx \ell(\phi, \theta^*(\phi)) + \tfrac d2 \log 2\pi - \tfrac12 \log\det A(\phi)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedppl.numerics.newton import (
    DATA,
    KERNEL,
    MATRIX,
    NO_MODE,
    OK,
    VECTOR,
    assign,
    cholesky,
    entry,
    forward_curvature,
    inner_mode,
    jit,
    log_determinant,
    solve,
)

LIMIT = 100  # steps of a search; one number at all calls, as each would be compiled by itself


@jit
def _marginal_near(
    kernel: Any, x: Any, m: int, origin: Any, slope: Any, third: Any, scale: Any, data: Any, A: Any, factor: Any
) -> Any:
    """log f at the φ in x[:m], near an expanded origin: θ is predicted, and corrected to second order.

    With Newton step Δ at the predicted θ, ℓ gains ½ Δᵀ A Δ and −½ log det A changes by ½ Σ_i ∂³ℓ[v_i, v_i, Δ],
    for which the contraction at the origin, `third`, is good enough. Returns (status, log f); at exit x[m:] is
    the mode and `factor` the Cholesky factor of A, both to the order of the correction.
    """
    d = x.shape[0] - m
    step, cross = np.zeros(d), np.zeros((m, d))
    for i in range(d):
        total = origin[m + i]
        for j in range(m):
            total += slope[i, j] * (x[j] - origin[j])
        x[m + i] = total
    output = kernel(x, *data)
    constant = 0.5 * d * np.log(2.0 * np.pi)
    for _ in range(3):
        if not np.isfinite(output[0]):
            break
        forward_curvature(kernel, x, m, output, scale, data, A, cross)
        if not cholesky(A, factor):
            break
        solve(factor, output[1 + m :], step)
        decrement = 0.0
        change = 0.0
        for i in range(d):
            decrement += step[i] * output[1 + m + i]
            change += step[i] * third[m + i]
            x[m + i] += step[i]
        if decrement < 1e-2:
            return OK, output[0] + 0.5 * decrement + constant - 0.5 * log_determinant(factor) + 0.5 * change
        output = kernel(x, *data)
    assign(x, m, origin[m:])
    status, output, _ = inner_mode(kernel, x, m, scale.copy(), data, A, factor, cross, 1e-9, LIMIT)
    if status != OK:
        return status, -np.inf
    return OK, output[0] + constant - 0.5 * log_determinant(factor)


@jit
def _origin(kernel: Any, phi: Any, theta: Any, data: Any) -> Any:
    """Inner mode at φ: (status, x = (φ, θ mode), output, slope dθ/dφ, factor of A, ∂²ℓ/∂φ∂θ, θ scales)."""
    m, d = phi.shape[0], theta.shape[0]
    x = np.concatenate((phi, theta))
    scale = np.full(d, 0.1)
    A, factor, cross = np.zeros((d, d)), np.zeros((d, d)), np.zeros((m, d))
    slope = np.zeros((d, m))
    status, output, _ = inner_mode(kernel, x, m, scale, data, A, factor, cross, 1e-10, LIMIT)
    if status == OK:
        for i in range(m):
            solve(factor, cross[i], slope[:, i])
    return status, x, output, slope, factor, cross, scale


@jit
def _third(kernel: Any, x: Any, m: int, base: Any, factor: Any, data: Any, third: Any) -> None:
    """Σ_i ∂³ℓ[v_i, v_i, ·] into third (n,), with the columns v_i of L⁻ᵀ, A = L Lᵀ.

    Half of it is the gradient of −½ log det A. Each term is a second difference of the gradient along v_i, which
    gives the φ and the θ part at once.
    """
    n = x.shape[0]
    d = n - m
    direction = np.zeros(d)
    here = x[m:].copy()
    third[:] = 0.0
    for i in range(d):
        # column i of L⁻ᵀ: solve Lᵀ v = e_i
        for r in range(d - 1, -1, -1):
            total = 1.0 if r == i else 0.0
            for k in range(r + 1, d):
                total -= factor[k, r] * direction[k]
            direction[r] = total / factor[r, r]
        step = 1e-2
        assign(x, m, here + step * direction)
        high = kernel(x, *data)
        assign(x, m, here - step * direction)
        low = kernel(x, *data)
        for j in range(n):
            third[j] += (high[1 + j] - 2.0 * base[1 + j] + low[1 + j]) / step**2
    assign(x, m, here)


@jit
def _total_gradient(kernel: Any, x: Any, m: int, scale: Any, data: Any, out: Any) -> bool:
    """Gradient of log f at x = (φ, θ) into out (m,), θ at or very near its mode; False if there is none.

    ∂_φ ℓ + (dθ/dφ)ᵀ (∂_θ ℓ + ½ third_θ) + ½ third_φ; at the mode ∂_θ ℓ is zero, near it the term corrects.
    """
    n = x.shape[0]
    d = n - m
    base = kernel(x, *data)
    A, factor, cross = np.zeros((d, d)), np.zeros((d, d)), np.zeros((m, d))
    forward_curvature(kernel, x, m, base, scale, data, A, cross)
    if not cholesky(A, factor):
        return False
    third, slope = np.zeros(n), np.zeros(d)
    _third(kernel, x, m, base, factor, data, third)
    for j in range(m):
        solve(factor, cross[j], slope)
        out[j] = base[1 + j] + 0.5 * third[j]
        for k in range(d):
            out[j] += slope[k] * (base[1 + m + k] + 0.5 * third[m + k])
    return True


@entry(KERNEL, VECTOR, VECTOR, VECTOR, DATA)
def expand_marginal(kernel: Any, phi: Any, theta: Any, wanted_scale: Any, data: Any) -> Any:
    """Quadratic expansion of log f at φ, the inner search starting at θ.

    Returns (status, log f, gradient (m,), Hessian (m, m), θ mode (d,)). The Hessian is a difference of the
    gradient, with θ following its mode.
    """
    m, d = phi.shape[0], theta.shape[0]
    gradient, hessian = np.zeros(m), np.zeros((m, m))
    status, origin, output, slope, factor, _, scale = _origin(kernel, phi, theta, data)
    mode = origin[m:].copy()
    if status != OK:
        return status, -np.inf, gradient, hessian, mode
    value = output[0] + 0.5 * d * np.log(2.0 * np.pi) - 0.5 * log_determinant(factor)
    x = origin.copy()
    if not _total_gradient(kernel, x, m, scale, data, gradient):
        return NO_MODE, -np.inf, gradient, hessian, mode
    there = np.zeros(m)
    for j in range(m):
        assign(x, 0, origin)
        x[j] += 1e-6 * wanted_scale[j]
        nearby = kernel(x, *data)
        curvature = abs(nearby[1 + j] - output[1 + j]) / (1e-6 * wanted_scale[j])
        width = 1e-3 * min(wanted_scale[j], 1.0 / np.sqrt(max(curvature, 1e-300)))
        assign(x, 0, origin)
        x[j] += width
        for i in range(d):
            x[m + i] += slope[i, j] * width
        if not _total_gradient(kernel, x, m, scale, data, there):
            return NO_MODE, -np.inf, gradient, hessian, mode
        for i in range(m):
            hessian[i, j] += 0.5 * (there[i] - gradient[i]) / width
            hessian[j, i] += 0.5 * (there[i] - gradient[i]) / width
    return OK, value, gradient, hessian, mode


@entry(KERNEL, MATRIX, VECTOR, VECTOR, DATA, MATRIX)
def gradient_batch(kernel: Any, draws: Any, phi: Any, theta: Any, data: Any, gradients: Any) -> Any:
    """log f and its gradient at every row of draws (S, m), by way of an expansion at φ.

    Fills gradients (S, m). Returns (status of the search at φ, log f (S,)), −inf where there is no mode.
    """
    count, m = draws.shape
    d = theta.shape[0]
    values = np.full(count, -np.inf)
    status, origin, output, slope, center, _, scale = _origin(kernel, phi, theta, data)
    if status != OK:
        return status, values
    third = np.zeros(m + d)
    _third(kernel, origin, m, output, center, data, third)
    x, A, factor = np.zeros(m + d), np.zeros((d, d)), np.zeros((d, d))
    for s in range(count):
        assign(x, 0, draws[s])
        if d == 0:  # the density itself: one call has both
            output = kernel(x, *data)
            values[s] = output[0]
            assign(gradients[s], 0, output[1:])
            continue
        there, value = _marginal_near(kernel, x, m, origin, slope, third, scale, data, A, factor)
        if there == OK and np.isfinite(value) and _total_gradient(kernel, x, m, scale, data, gradients[s]):
            values[s] = value
    return OK, values
