r"""log p(y_k, θ | φ) of clients side by side, at (client, point) pairs: NumPy around one compiled loop.

.. math:: \log f_k(\varphi) \approx \ell_k(\varphi, \theta^*) + \tfrac d2 \log 2\pi - \tfrac12 \log\det A_k,
          \qquad A_k = -\partial^2 \ell_k / \partial\theta^2

A search, a curvature or a quadrature is computed for all pairs at once; those that have converged are left out. So one
client and a million are the same lines, and nothing is compiled but the loop over the declared density.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from fedppl.numerics.integral import Rule
from fedppl.numerics.newton import INTEGERS, KERNEL, MATRIX, VECTOR, assign, entry
from fedppl.types import Array

Places = NDArray[np.int64]
Flags = NDArray[np.bool_]

LIMIT = 100  # steps of a search
_HALVINGS = 40
_FORWARD, _CENTRAL = 1e-4, 1e-3  # of a coordinate's sd, over which slopes are differenced
_ARMIJO, _ROUNDING = 1e-4, 1e-12  # of the gain that a slope foretells; of the log density
_ARRIVED, _LEFT = 1e-10, 1e-6  # Newton decrement, log units, at which a search ends; that may be left at a mode
_NEAR = 1e-2  # Newton decrement up to which a second-order correction takes the place of further steps
_NEAR_STEPS = 3
_THIRD = 1e-2  # sds, over which curvatures are differenced
_SHIFT, _MOST_SHIFT = 1e-3, 1e26  # of a curvature that is not positive, in its own units

# Reals and integers of all clients, where arrays of each lie in its own, and where its own begin.
PACKS = types.Tuple((VECTOR, INTEGERS, types.int64[:, ::1], types.int64[:, ::1]))


class Packs(NamedTuple):
    """Clients' arrays as `fedppl.model.pack.pack` has them, one after the other."""

    reals: Array
    integers: NDArray[np.int64]
    where: NDArray[np.int64]  # (K, W) start, stop and shape of each array, within the client's own buffers
    at: NDArray[np.int64]  # (K + 1, 2) where its reals and its integers begin


class Densities(NamedTuple):
    """Clients of one compiled density, side by side."""

    kernel: Any
    packs: Packs
    shared: int  # coordinates of φ, m


class Modes(NamedTuple):
    """Where searches for θ ended, pair by pair."""

    arrived: Flags  # (N,) at a mode
    theta: Array  # (N, d)
    value: Array  # (N,) log p(y_k, θ | φ) there
    slopes: Array  # (N, m + d)
    root: Array  # (N, d, d) Cholesky factor of A
    cross: Array  # (N, m, d) of second derivatives
    scale: Array  # (N, d) sds by A's diagonal


class Laplace(NamedTuple):
    """Laplace's approximation of log f_k, pair by pair."""

    values: Array  # (N,); NaN where there is no mode
    theta: Array  # (N, d)
    root: Array  # (N, d, d)


class Origins(NamedTuple):
    """Expansions about the modes at one φ, by which those at others are foretold; one for each client."""

    phi: Array  # (m,)
    modes: Modes  # of C clients
    slope: Array  # (C, d, m) of the mode
    third: Array  # (C, d) Σ_i ∂³ℓ[v_i, v_i, ·] with v_i the columns of L⁻ᵀ


def side_by_side(packed: list[tuple[Any, Any, Any]]) -> Packs:
    """Packed arrays of clients one after the other."""
    reals, integers, where = zip(*packed, strict=True)
    counts = np.array([[len(one), len(other)] for one, other in zip(reals, integers, strict=True)], dtype=np.int64)
    at = np.concatenate([np.zeros((1, 2), dtype=np.int64), np.cumsum(counts, axis=0)])
    return Packs(
        np.concatenate(reals), np.concatenate(integers), np.ascontiguousarray(np.stack(where)), np.ascontiguousarray(at)
    )


@entry(KERNEL, MATRIX, INTEGERS, PACKS, MATRIX)
def outputs_of_pairs(kernel: Any, x: Any, who: Any, packs: Any, out: Any) -> None:
    """What a kernel makes of rows x (N, m + d), each with the arrays of the client in place who (N,), into out."""
    reals, integers, where, at = packs
    for i in range(x.shape[0]):
        k = who[i]
        own = kernel(x[i], reals[at[k, 0] : at[k + 1, 0]], integers[at[k, 1] : at[k + 1, 1]], where[k])
        assign(out[i], 0, own)


def outputs(of: Densities, phi: Array, theta: Array, who: Places) -> Array:
    """log p(y_k, θ | φ) and its gradient in (φ, θ), (N, 1 + m + d)."""
    x = np.empty((len(phi), of.shared + theta.shape[1]))
    x[:, : of.shared], x[:, of.shared :] = phi, theta
    out = np.empty((len(x), 1 + x.shape[1]))
    outputs_of_pairs(of.kernel, x, who, tuple(of.packs), out)
    return out


# Small matrices, many at once ---------------------------------------------------------------------------------------


def cholesky(matrices: Array) -> tuple[Array, Flags]:
    """Lower factors of matrices (N, d, d), and which are positive definite; those of others are NaN."""
    root = np.zeros_like(matrices)
    d = matrices.shape[1]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        for j in range(d):
            before = root[:, j, :j]
            pivot = matrices[:, j, j] - np.einsum("nk,nk->n", before, before)
            root[:, j, j] = np.sqrt(np.where(pivot > 0.0, pivot, np.nan))
            if j + 1 < d:
                below = matrices[:, j + 1 :, j] - np.einsum("nik,nk->ni", root[:, j + 1 :, :j], before)
                root[:, j + 1 :, j] = below / root[:, j, j, None]
    return root, np.isfinite(np.einsum("nii->n", root))


def solve_lower(root: Array, right: Array) -> Array:
    """L⁻¹ b for factors (N, d, d) and vectors (N, d)."""
    out = np.empty_like(right)
    for i in range(right.shape[1]):
        out[:, i] = (right[:, i] - np.einsum("nk,nk->n", root[:, i, :i], out[:, :i])) / root[:, i, i]
    return out


def solve_upper(root: Array, right: Array) -> Array:
    """L⁻ᵀ b for factors (N, d, d) and vectors (N, d)."""
    out = np.empty_like(right)
    for i in range(right.shape[1] - 1, -1, -1):
        out[:, i] = (right[:, i] - np.einsum("nk,nk->n", root[:, i + 1 :, i], out[:, i + 1 :])) / root[:, i, i]
    return out


def solve(root: Array, right: Array) -> Array:
    """(L Lᵀ)⁻¹ b for factors (N, d, d) and vectors (N, d)."""
    return solve_upper(root, solve_lower(root, right))


def log_determinant(root: Array) -> Array:
    """log |L Lᵀ|, (N,)."""
    return np.asarray(2.0 * np.log(np.einsum("nii->ni", root)).sum(axis=1))


# Curvature ------------------------------------------------------------------------------------------------------------


def _forward(
    of: Densities, phi: Array, theta: Array, who: Places, base: Array, scale: Array, *, cross: bool = False
) -> tuple[Array, Array]:
    """A (N, d, d), and where it is wanted ∂²ℓ/∂φ∂θ (N, m, d), by forward differences of the slopes in `base`."""
    m, d = of.shared, theta.shape[1]
    A, mixed = np.empty((len(phi), d, d)), np.empty((len(phi), m if cross else 0, d))
    for j in range(d):
        step, moved = _FORWARD * scale[:, j], theta.copy()
        moved[:, j] += step
        there = outputs(of, phi, moved, who)
        A[:, :, j] = (base[:, 1 + m :] - there[:, 1 + m :]) / step[:, None]
        if cross:
            mixed[:, :, j] = (there[:, 1 : 1 + m] - base[:, 1 : 1 + m]) / step[:, None]
    return 0.5 * (A + np.swapaxes(A, 1, 2)), mixed


def _central(of: Densities, phi: Array, theta: Array, who: Places, scale: Array) -> tuple[Array, Array]:
    """The same by central differences."""
    m, d = of.shared, theta.shape[1]
    A, mixed = np.empty((len(phi), d, d)), np.empty((len(phi), m, d))
    for j in range(d):
        step, high, low = _CENTRAL * scale[:, j], theta.copy(), theta.copy()
        high[:, j] += step
        low[:, j] -= step
        change = (outputs(of, phi, high, who) - outputs(of, phi, low, who)) / (2.0 * step[:, None])
        A[:, :, j], mixed[:, :, j] = -change[:, 1 + m :], change[:, 1 : 1 + m]
    return 0.5 * (A + np.swapaxes(A, 1, 2)), mixed


def _rescaled(A: Array, scale: Array) -> Array:
    """Lengths over which differences are taken: sds by A's diagonal, where it is positive."""
    diagonal = np.einsum("nii->ni", A)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(diagonal > 0.0, np.clip(1.0 / np.sqrt(diagonal), 1e-6, 1.0), scale)


# Modes ----------------------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    theta: Array  # (N, d)
    out: Array  # (N, 1 + m + d)
    decrement: Array  # (N,)
    moved: Flags
    shifted: Flags  # whether the curvature had to be made positive
    finite: Flags


def modes(of: Densities, phi: Array, theta: Array, who: Places, tolerance: float = _ARRIVED) -> Modes:
    """Modes of θ at φ (N, m) from starts (N, d), by damped Newton steps."""
    (count, d), m = theta.shape, of.shared
    theta, scale = theta.copy(), np.full((count, d), 0.1)
    out = outputs(of, phi, theta, who)
    arrived, root, cross = np.zeros(count, dtype=bool), np.full((count, d, d), np.nan), np.zeros((count, m, d))
    active = np.flatnonzero(np.isfinite(out[:, 0]))
    for _ in range(LIMIT):
        if not len(active):
            break
        at = phi[active], theta[active], who[active]
        A, _ = _forward(of, *at, out[active], scale[active])
        scale[active] = _rescaled(A, scale[active])
        step = _newton(of, *at, out[active], A)
        theta[active], out[active] = step.theta, step.out
        over = ~step.shifted & ((step.decrement < tolerance) | ~step.moved) & step.finite
        ended = active[over]
        if len(ended):
            there = phi[ended], theta[ended], who[ended]
            A, cross[ended] = _central(of, *there, scale[ended])
            scale[ended] = _rescaled(A, scale[ended])
            root[ended], positive = cholesky(A)
            slopes = out[ended, 1 + m :]
            with np.errstate(invalid="ignore"):
                left = np.einsum("ni,ni->n", slopes, solve(root[ended], slopes))
            arrived[ended] = positive & (left < max(tolerance, _LEFT))
        active = active[~over & step.moved & step.finite]
    return Modes(arrived, theta, out[:, 0], out[:, 1:], root, cross, scale)


def _newton(of: Densities, phi: Array, theta: Array, who: Places, base: Array, A: Array) -> _Step:
    """One damped Newton step from every pair."""
    root, positive = cholesky(A)
    finite = np.ones(len(phi), dtype=bool)
    new, out, moved = theta.copy(), base.copy(), np.zeros(len(phi), dtype=bool)
    decrement = np.zeros(len(phi))
    some = np.flatnonzero(positive)
    if len(some):
        step = solve(root[some], base[some, 1 + of.shared :])
        decrement[some] = np.einsum("ni,ni->n", step, base[some, 1 + of.shared :])
        new[some], out[some], moved[some] = _along(
            of, phi[some], theta[some], who[some], base[some], step, decrement[some]
        )
    rest = np.flatnonzero(~positive)
    if len(rest):
        new[rest], out[rest], moved[rest], finite[rest] = _shifted(
            of, phi[rest], theta[rest], who[rest], base[rest], A[rest]
        )
    return _Step(new, out, decrement, moved, ~positive, finite)


def _shifted(
    of: Densities, phi: Array, theta: Array, who: Places, base: Array, A: Array
) -> tuple[Array, Array, Flags, Flags]:
    """A step where the curvature is not positive: it is shifted, in two ways, and the better step is taken.

    In units of each coordinate's own, as thousands and logarithms may stand side by side, and by the same for all, as
    one may have hardly any.
    """
    diagonal = np.abs(np.einsum("nii->ni", A))
    largest = np.maximum(diagonal.max(axis=1, initial=0.0), 1e-8)[:, None]
    new, out, moved = theta.copy(), base.copy(), np.zeros(len(phi), dtype=bool)
    finite = np.isfinite(diagonal).all(axis=1) & np.isfinite(A).all(axis=(1, 2))
    for least in (1e-14, 1.0):
        unit = np.maximum(diagonal, least * largest)[:, :, None] * np.eye(A.shape[1])
        root, shift, left = np.full_like(A, np.nan), _SHIFT, np.flatnonzero(finite)
        while len(left) and shift < _MOST_SHIFT:
            found, positive = cholesky(A[left] + shift * unit[left])
            root[left[positive]] = found[positive]
            left, shift = left[~positive], 4.0 * shift
        finite[left] = False
        some = np.flatnonzero(finite)
        slopes = base[some, 1 + of.shared :]
        step = solve(root[some], slopes)
        decrement = np.einsum("ni,ni->n", step, slopes)
        at, there, well = _along(of, phi[some], theta[some], who[some], base[some], step, decrement)
        better = well & (~moved[some] | (there[:, 0] > out[some, 0]))
        new[some[better]], out[some[better]] = at[better], there[better]
        moved[some] |= well
    return new, out, moved, finite


def _along(
    of: Densities, phi: Array, theta: Array, who: Places, base: Array, step: Array, decrement: Array
) -> tuple[Array, Array, Flags]:
    """Halve steps until the log density rises by some of what the slope foretells."""
    new, out, moved = theta.copy(), base.copy(), np.zeros(len(phi), dtype=bool)
    rest, length = np.arange(len(phi)), 1.0
    for _ in range(_HALVINGS):
        tried = theta[rest] + length * step[rest]
        there = outputs(of, phi[rest], tried, who[rest])
        # the slack is rounding: near the mode the gain is below the last digits of the value
        least = base[rest, 0] + _ARMIJO * length * decrement[rest] - _ROUNDING * np.abs(base[rest, 0])
        well = there[:, 0] >= least
        new[rest[well]], out[rest[well]], moved[rest[well]] = tried[well], there[well], True
        rest, length = rest[~well], 0.5 * length
        if not len(rest):
            break
    return new, out, moved


def one(kernel: Any, shared: int, packed: Any) -> Densities:
    """A client alone."""
    return Densities(kernel, side_by_side([packed]), shared)


def inner_mode_at(kernel: Any, phi: Array, theta: Array, packed: Any) -> tuple[bool, Array]:
    """Whether a search from θ (d,) arrives at a mode at φ (m,), and where it ended."""
    found = modes(one(kernel, len(phi), packed), phi[None], theta[None], np.zeros(1, dtype=np.int64))
    return bool(found.arrived[0]), found.theta[0]


# Laplace's approximation ----------------------------------------------------------------------------------------------


def of_modes(found: Modes) -> Array:
    """Laplace's log f_k about modes, (N,); NaN where there is none."""
    with np.errstate(invalid="ignore"):
        values = found.value + 0.5 * found.theta.shape[1] * np.log(2.0 * np.pi) - 0.5 * log_determinant(found.root)
    return np.where(found.arrived, values, np.nan)


def origins(of: Densities, phi: Array, theta: Array, who: Places) -> Origins:
    """Modes of clients (C,) at one φ (m,) from starts (C, d), and how they move with φ."""
    at = np.broadcast_to(phi, (len(who), len(phi)))
    found = modes(of, at, theta, who)
    m, d = of.shared, theta.shape[1]
    slope, third = np.zeros((len(who), d, m)), np.zeros((len(who), d))
    if d:
        with np.errstate(invalid="ignore"):
            for i in range(m):
                slope[:, :, i] = solve(found.root, found.cross[:, i])
            base = found.slopes[:, m:]
            for i in range(d):
                unit = np.zeros((len(who), d))
                unit[:, i] = _THIRD
                along = solve_upper(found.root, unit)
                high = outputs(of, at, found.theta + along, who)[:, 1 + m :]
                low = outputs(of, at, found.theta - along, who)[:, 1 + m :]
                third += (high - 2.0 * base + low) / _THIRD**2
    return Origins(phi, found, slope, third)


def laplace(of: Densities, at: Origins, row: Places, who: Places, phi: Array) -> Laplace:
    """Laplace's log f_k at φ (N, m), by way of the clients' origins in these rows (N,); clients are in places who (N,).

    θ is foretold, and corrected to second order: with Newton step Δ, ℓ gains ½ Δᵀ A Δ, and −½ log det A changes by
    ½ Σ_i ∂³ℓ[v_i, v_i, Δ], for which the contraction at the origin is good enough. Where Δ is not short, it is taken,
    or the mode is searched for.
    """
    m, d = of.shared, at.modes.theta.shape[1]
    if not d:
        value = outputs(of, phi, np.zeros((len(phi), 0)), who)[:, 0]
        return Laplace(np.where(np.isfinite(value), value, np.nan), np.zeros((len(phi), 0)), np.zeros((len(phi), 0, 0)))
    values, root = np.full(len(phi), np.nan), np.full((len(phi), d, d), np.nan)
    theta = at.modes.theta[row] + np.einsum("nij,nj->ni", at.slope[row], phi - at.phi)
    scale, constant = at.modes.scale[row], 0.5 * d * np.log(2.0 * np.pi)
    usable = at.modes.arrived[row]
    active, failed = np.flatnonzero(usable), []
    for _ in range(_NEAR_STEPS):
        if not len(active):
            break
        there = phi[active], theta[active], who[active]
        out = outputs(of, *there)
        A, _ = _forward(of, *there, out, scale[active])
        root[active], well = cholesky(A)
        well &= np.isfinite(out[:, 0])
        failed.append(active[~well])
        active, out = active[well], out[well]
        step = solve(root[active], out[:, 1 + m :])
        decrement = np.einsum("ni,ni->n", step, out[:, 1 + m :])
        change = np.einsum("ni,ni->n", step, at.third[row[active]])
        theta[active] += step
        short = decrement < _NEAR
        value = out[:, 0] + 0.5 * decrement + constant - 0.5 * log_determinant(root[active]) + 0.5 * change
        values[active[short]] = value[short]
        active = active[~short]
    far = np.sort(np.concatenate([*failed, active]))
    if len(far):
        found = modes(of, phi[far], at.modes.theta[row[far]], who[far], 1e-9)
        values[far], theta[far], root[far] = of_modes(found), found.theta, found.root
    return Laplace(np.where(np.isfinite(values), values, np.nan), theta, root)


def node_terms(of: Densities, about: Laplace, phi: Array, who: Places, rule: Rule) -> Array:
    """Logarithms of what nodes z of a rule add to the integral over θ = mode + L⁻ᵀ z, pair by pair, (N, L)."""
    (count, d), nodes = about.theta.shape, len(rule.nodes)
    steps = np.broadcast_to(rule.nodes, (count, nodes, d)).reshape(-1, d)
    theta = np.repeat(about.theta, nodes, axis=0) + solve_upper(np.repeat(about.root, nodes, axis=0), steps)
    value = outputs(of, np.repeat(phi, nodes, axis=0), theta, np.repeat(who, nodes))[:, 0].reshape(count, nodes)
    constant = 0.5 * d * np.log(2.0 * np.pi) - 0.5 * log_determinant(about.root)
    terms = value + (0.5 * np.sum(rule.nodes**2, axis=1) + rule.log_weights) + constant[:, None]
    return np.where(terms < np.inf, terms, -np.inf)  # NaN: no density there
