r"""log p(y_k, θ | φ) of clients side by side, at (client, point) pairs: NumPy around one compiled loop.

.. math:: \log f_k(\varphi) \approx \ell_k(\varphi, \theta^*) + \tfrac d2 \log 2\pi - \tfrac12 \log\det A_k,
          \qquad A_k = -\partial^2 \ell_k / \partial\theta^2

A search, a curvature or a quadrature is computed for all pairs at once, less those that have converged. One client and
a million take the same lines, and only the loop over the declared density is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from fedppl.numerics import tolerances as tol
from fedppl.numerics.integral import Rule, chunks
from fedppl.types import Array

# Compiled log densities, and loops over them --------------------------------------------------------------------------

# A `kernel` is a jitted function ``kernel(x, *data) -> [log density, gradient]`` with x = (φ, θ) of m + d entries and
# `data` a client's packed arrays. It is a first-class function of one fixed signature, so that loops over it compile
# once for all models and stay in Numba's cache on disk.

jit: Callable[..., Any] = numba.njit(nogil=True, cache=True)

VECTOR = types.float64[::1]
MATRIX = types.float64[:, ::1]
INTEGERS = types.int64[::1]
DATA = types.Tuple((VECTOR, INTEGERS, INTEGERS))
NO_DATA = np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
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
    """Set out[first:] to values, as far as they go. Assigning to a slice takes seconds to compile, for its error."""
    for i in range(values.shape[0]):
        out[first + i] = values[i]


# Clients side by side -------------------------------------------------------------------------------------------------

Places = NDArray[np.int64]
Flags = NDArray[np.bool_]


# Reals and integers of all clients, the places of each client's arrays within its own, and where its own begin.
PACKS = types.Tuple((VECTOR, INTEGERS, types.int64[:, ::1], types.int64[:, ::1]))


class Packs(NamedTuple):
    """Clients' arrays as `fedppl.model.compiled.pack` has them, one after the other."""

    reals: Array
    integers: NDArray[np.int64]
    where: NDArray[np.int64]  # (K, W) start, stop and shape of each array, within the client's own buffers
    at: NDArray[np.int64]  # (K + 1, 2) where each client's reals and integers begin


class Densities(NamedTuple):
    """Clients of one compiled density, side by side."""

    kernel: Any
    packs: Packs
    shared: int  # coordinates of φ, m
    value: Any = None  # the kernel without its gradient, for integrals; without it the other is called


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
    """Expansions about the modes at one φ, which predict those at others; one for each client."""

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


def one(kernel: Any, shared: int, packed: Any) -> Densities:
    """A client alone."""
    reals, integers, where = packed
    return Densities(
        kernel, Packs(reals, integers, where[None], np.array([[0, 0], [len(reals), len(integers)]])), shared
    )


@entry(KERNEL, MATRIX, INTEGERS, PACKS, MATRIX)
def outputs_of_pairs(kernel: Any, x: Any, who: Any, packs: Any, out: Any) -> None:
    """Evaluate a kernel at rows x (N, m + d), each with the arrays of the client in place who (N,), into out."""
    reals, integers, where, at = packs
    for i in range(x.shape[0]):
        k = who[i]
        values = kernel(x[i], reals[at[k, 0] : at[k + 1, 0]], integers[at[k, 1] : at[k + 1, 1]], where[k])
        assign(out[i], 0, values)


def joined(phi: Array, theta: Array) -> Array:
    """x = (φ, θ) of θ (..., d) and φ (..., m), which is repeated where it is one for several θ."""
    return np.concatenate([np.broadcast_to(phi, (*theta.shape[:-1], phi.shape[-1])), theta], axis=-1)


def outputs(of: Densities, phi: Array, theta: Array, who: Places) -> Array:
    """log p(y_k, θ | φ) and its gradient in (φ, θ), (N, 1 + m + d)."""
    return outputs_at(of, joined(phi, theta), who)


def outputs_at(of: Densities, x: Array, who: Places) -> Array:
    """The same at rows x = (φ, θ), (N, m + d)."""
    return entries_at(of.kernel, of.packs, x, who, 1 + x.shape[1])


def entries_at(kernel: Any, packs: Packs, x: Array, who: Places, count: int) -> Array:
    """The `count` entries of a kernel at each row of x (N, m + d), with the arrays of its client: (N, count)."""
    out = np.empty((len(x), count))
    outputs_of_pairs(kernel, np.ascontiguousarray(x), who, tuple(packs), out)
    return out


def values_at(of: Densities, x: Array, who: Places) -> Array:
    """log p(y_k, θ | φ) alone at rows x = (φ, θ), (N, 1)."""
    if of.value is None:
        return outputs_at(of, x, who)[:, :1]
    return entries_at(of.value, of.packs, x, who, 1)


def site_outputs(kernel: Any, points: Array, packed: Any) -> Array:
    """The same of a client alone, at rows x = (φ, θ) of points (S, m + d)."""
    return outputs_at(one(kernel, points.shape[1], packed), points, np.zeros(len(points), dtype=np.int64))


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


class _Expanded(NamedTuple):
    out: Array  # (N, 1 + m + d)
    A: Array  # (N, d, d)
    cross: Array  # (N, m, d) ∂²ℓ/∂φ∂θ


def _expanded(
    of: Densities, phi: Array, theta: Array, who: Places, scale: Array, *, central: bool = False
) -> _Expanded:
    """Outputs at θ and A there, by forward or central differences of slopes, in one call of the loop."""
    (count, d), m = theta.shape, of.shared
    lengths = (tol.CENTRAL if central else tol.FORWARD) * scale
    moved = np.empty((count, 1 + (2 if central else 1) * d, d))
    moved[:] = theta[:, None]
    places = np.arange(d)
    moved[:, 1 + places, places] += lengths
    if central:
        moved[:, 1 + d + places, places] -= lengths
    each = moved.shape[1]
    values = outputs(of, np.repeat(phi, each, axis=0), moved.reshape(count * each, d), np.repeat(who, each))
    values = values.reshape(count, each, 1 + m + d)
    out, high = values[:, 0], values[:, 1 : 1 + d]
    low, times = (values[:, 1 + d :], 2.0) if central else (out[:, None], 1.0)
    with np.errstate(invalid="ignore", over="ignore"):  # where there is no density, or one that falls as exp(exp(θ))
        change = (high - low) / (times * lengths[:, :, None])
        A = -0.5 * (change[:, :, 1 + m :] + np.swapaxes(change[:, :, 1 + m :], 1, 2))
    return _Expanded(out, A, np.swapaxes(change[:, :, 1 : 1 + m], 1, 2))


def _rescaled(A: Array, scale: Array) -> Array:
    """Lengths over which differences are taken: sds by A's diagonal, where it is positive."""
    diagonal = np.einsum("nii->ni", A)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(diagonal > 0.0, np.clip(1.0 / np.sqrt(diagonal), tol.LEAST_LENGTH, tol.MOST_LENGTH), scale)


# Modes ----------------------------------------------------------------------------------------------------------------


def modes(
    of: Densities,
    phi: Array,
    theta: Array,
    who: Places,
    tolerance: float = tol.ARRIVED,
    limit: int = tol.SEARCH_STEPS,
    stop: Callable[[Places, Array], Flags] | None = None,
) -> Modes:
    """Modes of θ at φ (N, m) from starts (N, d), by damped Newton steps.

    Of searches in places (n,) that have come to θ (n, d) `stop` tells which end there, without having arrived.
    """
    (count, d), m = theta.shape, of.shared
    theta, scale = np.array(theta), np.full((count, d), tol.START_LENGTH)
    out, A, _ = _expanded(of, phi, theta, who, scale)
    out, scale = out.copy(), _rescaled(A, scale)

    def move(some: Places, ends: Array, at: _Expanded) -> None:
        theta[some], out[some], A[some] = ends, at.out, at.A
        scale[some] = _rescaled(at.A, scale[some])

    ended = np.zeros(count, dtype=bool)
    active = np.flatnonzero(np.isfinite(out[:, 0]))
    for _ in range(limit):
        if not len(active):
            break
        step, decrement, usable, whole = _newton(A[active], out[active, 1 + m :])
        short = whole & (decrement < tolerance)
        theta[active[short]] += step[short]
        moved = np.zeros(len(active), dtype=bool)
        full = np.flatnonzero(whole & ~short)
        if len(full):  # nearly all steps are right as they are: outputs at their ends are those of the next step
            go = active[full]
            ends = theta[go] + step[full]
            at = _expanded(of, phi[go], ends, who[go], scale[go])
            well = _is_gain(at.out[:, 0], out[go, 0], decrement[full])
            moved[full[well]] = True
            move(go[well], ends[well], _Expanded(*(part[well] for part in at)))
        moves = np.flatnonzero(usable & ~short & ~moved)
        if len(moves):
            go = active[moves]
            line = _Line(phi[go], theta[go], who[go], out[go], step[moves], decrement[moves])
            steps = _searched(of, line, A[go], whole[moves])
            moved[moves] = is_moved = np.any(steps != 0.0, axis=1)
            go, ends = go[is_moved], theta[go[is_moved]] + steps[is_moved]
            move(go, ends, _expanded(of, phi[go], ends, who[go], scale[go]))
        ended[active[whole & ~moved]] = True  # arrived, or the rest of a step is rounding
        active = active[moved]
        if stop is not None and len(active):
            active = active[~stop(active, theta[active])]
    return _at_ends(of, phi, theta, who, scale, out, np.flatnonzero(ended))


def _at_ends(of: Densities, phi: Array, theta: Array, who: Places, scale: Array, out: Array, ended: Places) -> Modes:
    """Which searches are at a mode, with curvatures there by central differences."""
    (count, d), m = theta.shape, of.shared
    arrived, root, cross = np.zeros(count, dtype=bool), np.full((count, d, d), np.nan), np.zeros((count, m, d))
    at = _expanded(of, phi[ended], theta[ended], who[ended], scale[ended], central=True)
    out[ended], cross[ended], scale[ended] = at.out, at.cross, _rescaled(at.A, scale[ended])
    root[ended], positive = cholesky(at.A)
    with np.errstate(invalid="ignore"):
        slopes = at.out[:, 1 + m :]
        left = np.einsum("ni,ni->n", slopes, solve(root[ended], slopes))
    arrived[ended] = positive & (left < tol.LEFT) & np.isfinite(at.out[:, 0])
    return Modes(arrived, theta, out[:, 0], out[:, 1:], root, cross, scale)


def _newton(A: Array, slopes: Array) -> tuple[Array, Array, Flags, Flags]:
    """Steps (N, d), decrements (N,), which steps are usable, and which curvatures are positive without a shift."""
    root, whole = cholesky(A)
    step, usable = np.zeros_like(slopes), whole.copy()
    some = np.flatnonzero(whole)
    step[some] = solve(root[some], slopes[some])
    rest = np.flatnonzero(~whole)
    if len(rest):
        step[rest], usable[rest] = _shifted(A[rest], slopes[rest], tol.CURVATURE_FLOORS[0])
    return step, np.einsum("ni,ni->n", step, slopes), usable, whole


def _shifted(A: Array, slopes: Array, least: float) -> tuple[Array, Flags]:
    """Steps where a curvature is not positive, by shifting it until it is.

    The unit of a coordinate's shift is its own curvature, since thousands and logarithms may stand side by side; but at
    `least` so much of the largest, since a coordinate may have hardly any.
    """
    diagonal = np.abs(np.einsum("nii->ni", A))
    finite: Flags = np.asarray(np.isfinite(A).all(axis=(1, 2)))
    largest = np.maximum(diagonal.max(axis=1, initial=0.0), tol.FLAT_CURVATURE)[:, None]
    with np.errstate(invalid="ignore"):  # of curvatures that are not finite, which have no step
        unit = np.maximum(diagonal, least * largest)[:, :, None] * np.eye(A.shape[1])
    step, shift, active = np.zeros_like(slopes), tol.FIRST_SHIFT, np.flatnonzero(finite)
    while len(active) and shift < tol.MOST_SHIFT:
        root, positive = cholesky(A[active] + shift * unit[active])
        done = active[positive]
        step[done] = solve(root[positive], slopes[done])
        active, shift = active[~positive], tol.SHIFT_GROWTH * shift
    finite[active] = False
    return step, finite


class _Line(NamedTuple):
    """Steps from points."""

    phi: Array
    theta: Array
    who: Places
    out: Array  # (N, 1 + m + d) at θ
    step: Array  # (N, d)
    decrement: Array  # (N,)


def _lengths(of: Densities, on: _Line) -> Array:
    """The largest of 1, 1/2, 1/4, ... that raises the log density by a part of the gain the slope predicts; 0: none."""
    accepted, rest = np.zeros(len(on.phi)), np.arange(len(on.phi))
    for lengths in tol.STEP_LENGTHS:
        tried = on.theta[rest, None] + lengths[:, None] * on.step[rest, None]
        each = len(lengths)
        value = outputs(
            of, np.repeat(on.phi[rest], each, axis=0), tried.reshape(-1, tried.shape[2]), np.repeat(on.who[rest], each)
        )[:, 0].reshape(-1, each)
        well = _is_gain(value, on.out[rest, :1], lengths * on.decrement[rest, None])
        some = well.any(axis=1)
        accepted[rest[some]] = lengths[np.argmax(well[some], axis=1)]
        rest = rest[~some]
        if not len(rest):
            break
    return accepted


def _is_gain(value: Array, base: Array, predicted: Array) -> Flags:
    """Whether the log density at the end of a step is higher by a part of the gain that its slope predicts.

    The slack is rounding: near the mode the gain is below the last digits. A density without bound is none.
    """
    least = base - tol.GAIN_ROUNDING * np.abs(base) + tol.ARMIJO * predicted
    return np.asarray((value >= least) & (value < np.inf))


def _searched(of: Densities, on: _Line, A: Array, whole: Flags) -> Array:
    """Steps (N, d) that gain enough, 0 where none does; of curvatures that are not positive by the better way."""
    length = _lengths(of, on)
    steps, rest = length[:, None] * on.step, np.flatnonzero(~whole)
    if len(rest):
        steps[rest] = _better(of, _Line._make(part[rest] for part in on), A[rest], length[rest])
    return steps


def _better(of: Densities, on: _Line, A: Array, length: Array) -> Array:
    """The better step of two ways to make curvatures positive."""
    slopes = on.out[:, 1 + of.shared :]
    step, usable = _shifted(A, slopes, tol.CURVATURE_FLOORS[1])
    other = _lengths(of, on._replace(step=step, decrement=np.einsum("ni,ni->n", step, slopes)))
    other = np.where(usable, other, 0.0)
    ends = np.stack([on.theta + length[:, None] * on.step, on.theta + other[:, None] * step], axis=1)
    value = outputs(of, np.repeat(on.phi, 2, axis=0), ends.reshape(-1, ends.shape[2]), np.repeat(on.who, 2))[:, 0]
    first, second = value.reshape(-1, 2).T
    second_is = (other > 0.0) & ((length == 0.0) | (second > first))
    return np.where(second_is[:, None], other[:, None] * step, length[:, None] * on.step)


# Laplace's approximation ----------------------------------------------------------------------------------------------


def of_modes(ends: Modes) -> Array:
    """Laplace's log f_k about modes, (N,); NaN where there is none."""
    with np.errstate(invalid="ignore"):
        values = ends.value + 0.5 * ends.theta.shape[1] * np.log(2.0 * np.pi) - 0.5 * log_determinant(ends.root)
    return np.where(ends.arrived, values, np.nan)


def origins(of: Densities, phi: Array, theta: Array, who: Places) -> Origins:
    """Modes of clients (C,) at one φ (m,) from starts (C, d), and how they move with φ."""
    at = np.broadcast_to(phi, (len(who), len(phi)))
    ends = modes(of, at, theta, who)
    m, d = of.shared, theta.shape[1]
    slope, third = np.zeros((len(who), d, m)), np.zeros((len(who), d))
    if d:
        with np.errstate(invalid="ignore"):
            for i in range(m):
                slope[:, :, i] = solve(ends.root, ends.cross[:, i])
            third = _third(of, at, ends.theta, who, ends.root, ends.slopes)[:, m:]
    return Origins(phi, ends, slope, third)


def _third(of: Densities, phi: Array, theta: Array, who: Places, root: Array, slopes: Array) -> Array:
    """Σ_i ∂³ℓ[v_i, v_i, ·], (N, m + d), with v_i the columns of L⁻ᵀ; half of it is the gradient of −½ log det A.

    Second differences of the gradient, `slopes` at (φ, θ), along v_i.
    """
    count, d = theta.shape
    if not d:
        return np.zeros_like(slopes)
    unit = np.broadcast_to(tol.THIRD * np.eye(d), (count, d, d))
    along = np.stack([solve_upper(root, unit[:, i]) for i in range(d)], axis=1)
    ends = theta[:, None] + np.concatenate([along, -along], axis=1)
    there = outputs(of, np.repeat(phi, 2 * d, axis=0), ends.reshape(-1, d), np.repeat(who, 2 * d))[:, 1:]
    return np.asarray((there.reshape(count, 2 * d, -1).sum(axis=1) - 2.0 * d * slopes) / tol.THIRD**2)


def laplace(of: Densities, at: Origins, row: Places, who: Places, phi: Array) -> Laplace:
    """Laplace's log f_k at φ (N, m), from the clients' origins in these rows (N,); clients are in places who (N,).

    θ is predicted, and corrected to second order: with Newton step Δ, ℓ gains ½ Δᵀ A Δ, and −½ log det A changes by
    ½ Σ_i ∂³ℓ[v_i, v_i, Δ], with the third derivatives at the origin. A Δ that is not short is taken as a step, at most
    `SECOND_ORDER_STEPS` times; then a search follows.
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
    for _ in range(tol.SECOND_ORDER_STEPS):
        if not len(active):
            break
        there = phi[active], theta[active], who[active]
        out, A, _ = _expanded(of, *there, scale[active])
        root[active], well = cholesky(A)
        well &= np.isfinite(out[:, 0])
        failed.append(active[~well])
        active, out = active[well], out[well]
        step = solve(root[active], out[:, 1 + m :])
        decrement = np.einsum("ni,ni->n", step, out[:, 1 + m :])
        change = np.einsum("ni,ni->n", step, at.third[row[active]])
        theta[active] += step
        short = decrement < tol.SECOND_ORDER
        value = out[:, 0] + 0.5 * decrement + constant - 0.5 * log_determinant(root[active]) + 0.5 * change
        values[active[short]] = value[short]
        active = active[~short]
    far = np.sort(np.concatenate([*failed, active]))
    if len(far):
        ends = modes(of, phi[far], at.modes.theta[row[far]], who[far], limit=tol.NEAR_SEARCH_STEPS)
        values[far], theta[far], root[far] = of_modes(ends), ends.theta, ends.root
    return Laplace(np.where(np.isfinite(values), values, np.nan), theta, root)


def at_once(d: int, m: int) -> int:
    """Pairs whose matrices are held at a time."""
    return max(1, min(tol.PAIRS_AT_ONCE, tol.NUMBERS_AT_ONCE // max(1, d * d + m)))


def laplace_at(
    of: Densities, at: Origins, rows: Places, who: Places, points: Array, known: Places
) -> tuple[Array, Laplace]:
    """Laplace's log f_k of clients (C,) at points (S, m), (C, S); with θ and roots at `known` points, by client."""
    (count, m), d = points.shape, at.modes.theta.shape[1]
    values, shape = np.full((len(rows), count), np.nan), (len(rows), len(known))
    theta, root = np.full((*shape, d), np.nan), np.full((*shape, d, d), np.nan)
    where = np.full(count, -1)
    where[known] = np.arange(len(known))
    for some in chunks(count if len(rows) else 0, at_once(d, m) // max(1, len(rows))):
        each = some.stop - some.start
        chunked = laplace(of, at, np.repeat(rows, each), np.repeat(who, each), np.tile(points[some], (len(rows), 1)))
        values[:, some] = chunked.values.reshape(len(rows), each)
        here = np.flatnonzero(where[some] >= 0)
        to = where[some][here]
        theta[:, to] = chunked.theta.reshape(len(rows), each, d)[:, here]
        root[:, to] = chunked.root.reshape(len(rows), each, d, d)[:, here]
    size = len(rows) * len(known)
    return values, Laplace(values[:, known].reshape(size), theta.reshape(size, d), root.reshape(size, d, d))


def gradients(of: Densities, phi: Array, theta: Array, who: Places, scale: Array) -> Array:
    """Gradients of Laplace's log f_k at φ (N, m), θ at or very near its modes; NaN where the curvature has no root.

    ∂_φ ℓ + (dθ/dφ)ᵀ (∂_θ ℓ + ½ third_θ) + ½ third_φ; at the mode ∂_θ ℓ is zero, near it the term corrects.
    """
    m = of.shared
    out, A, cross = _expanded(of, phi, theta, who, scale)
    root, _ = cholesky(A)
    with np.errstate(invalid="ignore", over="ignore"):
        total = out[:, 1:] + 0.5 * _third(of, phi, theta, who, root, out[:, 1:])
        return np.asarray(total[:, :m] + np.einsum("nmd,nd->nm", cross, solve(root, total[:, m:])))


class Expansions(NamedTuple):
    """Laplace's log f_k about one φ, of clients (C,); NaN of those whose θ has no mode there."""

    values: Array  # (C,)
    gradients: Array  # (C, m)
    hessians: Array  # (C, m, m)


def expansions(of: Densities, phi: Array, starts: Array, who: Places, wanted: Array) -> Expansions:
    """Expansions of clients in places who (C,) at φ (m,), with searches from starts (C, d).

    Hessians are differences of the gradient over a part of `wanted` (m,), with θ following its mode.
    """
    m, count = len(phi), len(who)
    at = origins(of, phi, starts, who)
    theta, diagonal = at.modes.theta, np.arange(m)
    moved = np.tile(phi + tol.GRADIENT_LENGTH * np.diag(wanted), (count, 1))
    nearby = outputs(of, moved, np.repeat(theta, m, axis=0), np.repeat(who, m))[:, 1 : 1 + m].reshape(count, m, m)
    curvature = np.abs(nearby[:, diagonal, diagonal] - at.modes.slopes[:, :m]) / (tol.GRADIENT_LENGTH * wanted)
    width = tol.HESSIAN_LENGTH * np.minimum(wanted, 1.0 / np.sqrt(np.maximum(curvature, tol.TINY)))
    along = np.zeros((count, 1 + 2 * m, m))
    along[:, 1 + diagonal, diagonal], along[:, 1 + m + diagonal, diagonal] = width, -width
    each = along.shape[1]
    followed = theta[:, None] + np.einsum("cdm,csm->csd", at.slope, along)
    scale = np.repeat(at.modes.scale, each, axis=0)
    there = (phi + along).reshape(-1, m)
    slopes = gradients(of, there, followed.reshape(count * each, -1), np.repeat(who, each), scale)
    slopes = slopes.reshape(count, each, m)
    hessians = (slopes[:, 1 : 1 + m] - slopes[:, 1 + m :]) / (2.0 * width[:, :, None])
    return Expansions(of_modes(at.modes), slopes[:, 0], 0.5 * (hessians + np.swapaxes(hessians, 1, 2)))


def difference_hessian(kernel: Any, x: Array, scale: Array, packed: Any) -> Array:
    """Hessian of the log density in all of x, (n, n), by central differences of the gradient."""
    nowhere, first = np.zeros((1, 0)), np.zeros(1, dtype=np.int64)
    return np.asarray(-_expanded(one(kernel, 0, packed), nowhere, x[None], first, scale[None], central=True).A[0])


def node_terms(of: Densities, about: Laplace, phi: Array, who: Places, rule: Rule) -> Array:
    """Log contributions of a rule's nodes z to the integral over θ = mode + L⁻ᵀ z, pair by pair, (N, L)."""
    (count, d), nodes = about.theta.shape, len(rule.nodes)
    theta = np.repeat(about.theta, nodes, axis=0)
    if d:
        unit = np.broadcast_to(np.eye(d), (count, d, d))
        axes = np.stack([solve_upper(about.root, unit[:, i]) for i in range(d)], axis=1)  # rows are L⁻ᵀ e
        theta += (rule.nodes @ axes).reshape(-1, d)
    x = np.concatenate([np.repeat(phi, nodes, axis=0), theta], axis=1)
    value = values_at(of, x, np.repeat(who, nodes)).reshape(count, nodes)
    constant = 0.5 * d * np.log(2.0 * np.pi) - 0.5 * log_determinant(about.root)
    terms = value + (0.5 * np.sum(rule.nodes**2, axis=1) + rule.log_weights) + constant[:, None]
    return np.where(terms < np.inf, terms, -np.inf)  # NaN: no density there


def by_nodes(
    of: Densities, about: Laplace, phi: Array, who: Places, rule: Rule, reduce: Callable[[Array], Array]
) -> Array:
    """`reduce` of these terms, (n, L) to (n, C), for all pairs, chunk by chunk: (N, C); NaN where there is no mode."""
    known, parts = np.flatnonzero(np.isfinite(about.values)), []
    numbers = len(rule.nodes) * (phi.shape[1] + about.theta.shape[1])
    for chunk in chunks(max(len(known), 1), tol.NUMBERS_AT_ONCE // numbers):
        some = known[chunk]
        terms = node_terms(of, Laplace(*(part[some] for part in about)), phi[some], who[some], rule)
        with np.errstate(invalid="ignore", divide="ignore"):
            parts.append(reduce(terms))
    values = np.full((len(phi), parts[0].shape[1]), np.nan)
    values[known] = np.concatenate(parts)
    return values


def along_axes(rule: Rule, d: int) -> Rule:
    """A node without a weight at the mode, then a rule for one coordinate along each of d axes in turn."""
    nodes = np.concatenate([np.zeros((1, d)), *(rule.nodes * axis for axis in np.eye(d))])
    return Rule(nodes, np.concatenate([[0.0], np.tile(rule.log_weights, d)]), np.zeros(len(nodes)))


def log_lines(terms: Array, d: int) -> tuple[Array, Array]:
    """Terms along each axis, (n, d, L), and what to subtract from the sum of the d integrals' logarithms, (n,).

    The density at the mode is in each: f = p* Π_i (f_i / p*). Laplace's value at a predicted mode is not that density.
    """
    nodes = (terms.shape[1] - 1) // d
    return terms[:, 1:].reshape(len(terms), d, nodes), (d - 1.0) * terms[:, 0]
