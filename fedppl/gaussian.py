"""Gaussians in natural parameters: linear r = Σ⁻¹μ and precision Q = Σ⁻¹.

Multiplying densities adds (r, Q), so messages are added, subtracted and damped here without an inverse, and a
single factor may be improper (Q not positive definite). Functions that need a proper Gaussian raise ``ValueError``.
A density sees only the symmetric part of Q; that part is what every function reads and returns.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Gaussian",
    "Repair",
    "Structure",
    "affine",
    "block",
    "covariance",
    "damp",
    "diagonal",
    "draw",
    "from_moments",
    "full",
    "is_proper",
    "kl",
    "log_density",
    "log_kernel",
    "mean",
    "pack_precision",
    "pack_triangle",
    "packed_size",
    "power",
    "precision_from_draws",
    "product",
    "project",
    "quotient",
    "repair",
    "standard_deviations",
    "unpack_precision",
    "unpack_triangle",
    "zeros",
]

Array: TypeAlias = NDArray[np.float64]
_EPS = float(np.finfo(np.float64).eps)
_REMEDY = {
    "precision": "multiply by a proper Gaussian first (product) or raise it with repair(g, floor)",
    "covariance": "pass one estimated from more draws than coordinates, or a shrunk one",
}


class Gaussian(NamedTuple):
    """An unnormalised Gaussian exp(r·x − ½ xᵀQx), possibly improper, possibly a batch.

    Attributes
    ----------
    linear : array (..., m)
        r = Σ⁻¹μ.
    precision : array (..., m, m) full or block-diagonal, or (..., m) diagonal
        Q = Σ⁻¹; diagonal exactly when it has as many dimensions as ``linear``.
    """

    linear: Array
    precision: Array


class Structure(NamedTuple):
    """Which coordinates a precision couples; build it with `full`, `diagonal` or `block`.

    Attributes
    ----------
    size : int
    blocks : tuple of tuples of int, or None
        A partition of 0..size-1; None means every coordinate on its own and a precision stored as (m,).
    """

    size: int
    blocks: tuple[tuple[int, ...], ...] | None


class Repair(NamedTuple):
    """What `repair` did: eigenvalues raised, the smallest before and after, and ‖Q' − Q‖_F / ‖Q‖_F."""

    changed: bool
    raised: int
    smallest_before: float
    smallest_after: float
    relative_change: float


def _is_diagonal(g: Gaussian) -> bool:
    return g.precision.ndim == g.linear.ndim


def _transpose(matrix: Array) -> Array:
    return np.swapaxes(matrix, -1, -2)


def _symmetric(matrix: Array) -> Array:
    return 0.5 * (matrix + _transpose(matrix))


def _checked(g: Gaussian, name: str = "precision") -> Gaussian:
    """Convert to float64, check the shapes and keep the symmetric part of the matrix."""
    linear, matrix = np.asarray(g[0], dtype=np.float64), np.asarray(g[1], dtype=np.float64)
    shapes = linear.shape, linear.shape + linear.shape[-1:]
    if linear.ndim == 0 or linear.shape[-1] == 0 or matrix.shape not in shapes:
        raise ValueError(
            f"vector of shape {linear.shape} and {name} of shape {matrix.shape} do not fit: "
            f"pass (..., m) with (..., m, m), or with (..., m) for a diagonal {name}"
        )
    return Gaussian(linear, matrix if matrix.ndim == linear.ndim else _symmetric(matrix))


def _aligned(*gaussians: Gaussian) -> list[Gaussian]:
    """Check that all have one size; when some are full, write the diagonal ones out as full."""
    checked = [_checked(g) for g in gaussians]
    sizes = [g.linear.shape[-1] for g in checked]
    if len(set(sizes)) != 1:
        raise ValueError(f"Gaussians of sizes {sizes} cannot be combined: pass one or more, all of the same size")
    if len({_is_diagonal(g) for g in checked}) == 1:
        return checked
    return [Gaussian(g.linear, _spread(g.precision)) if _is_diagonal(g) else g for g in checked]


def _spread(vector: Array) -> Array:
    """Matrices (..., m, m) with the given diagonals (..., m)."""
    matrix = np.zeros((*vector.shape, vector.shape[-1]))
    index = np.arange(vector.shape[-1])
    matrix[..., index, index] = vector
    return matrix


def _single(g: Gaussian, function: str) -> Gaussian:
    if np.ndim(g.linear) != 1:
        raise ValueError(f"{function} takes one Gaussian, not linear of shape {np.shape(g.linear)}: loop over a batch")
    return g


def _equilibrated(matrix: Array) -> tuple[Array, Array]:
    """Return H and s with matrix = s H sᵀ and diag(H) in [½, 2]; powers of two, so that no digit is lost."""
    scale = np.exp2(np.round(0.5 * np.log2(np.diagonal(matrix, axis1=-2, axis2=-1))))
    with np.errstate(over="ignore"):
        return matrix / scale[..., :, None] / scale[..., None, :], scale


def _proper(g: Gaussian) -> NDArray[np.bool_]:
    finite = np.asarray(np.isfinite(g.linear).all(axis=-1))
    if _is_diagonal(g):
        return np.asarray(finite & (np.isfinite(g.precision) & (g.precision > 0)).all(axis=-1))
    finite &= np.isfinite(g.precision).all(axis=(-1, -2))
    possible = np.asarray(finite & (np.diagonal(g.precision, axis1=-2, axis2=-1) > 0).all(axis=-1))
    size = g.linear.shape[-1]
    scaled, _ = _equilibrated(np.where(possible[..., None, None], g.precision, np.eye(size)))
    # Units must not matter: 1e-9 beside 1e12 is no defect. Any |H_ij| > 2 is indefinite already, and stays so clipped.
    smallest = np.linalg.eigvalsh(np.clip(scaled, -4.0, 4.0))[..., 0]
    return np.asarray(possible & (smallest > size * _EPS))


def _require_proper(g: Gaussian, name: str = "precision", label: str = "") -> Gaussian:
    g = _checked(g, name)
    proper = _proper(g)
    if not proper.all():
        where = tuple(int(i) for i in np.argwhere(~proper)[0])
        matrix, place = g.precision[where], label + (f" at batch index {where}" if where else "")
        if not (np.isfinite(matrix).all() and np.isfinite(g.linear[where]).all()):
            raise ValueError(
                f"the {name}{place} or its vector has entries that are not finite, its smallest eigenvalue is nan "
                "and must be positive: look for an overflow or a failed fit upstream"
            )
        smallest = float((matrix if _is_diagonal(g) else np.linalg.eigvalsh(matrix)).min())
        raise ValueError(
            f"the {name}{place} has smallest eigenvalue {smallest:.6g} and must be positive definite "
            f"beyond rounding: {_REMEDY[name]}"
        )
    return g


def _upper_root(matrix: Array) -> Array:
    """Upper-triangular U with U Uᵀ = matrix: the Cholesky factor taken from the last coordinate up."""
    return np.asarray(np.linalg.cholesky(matrix[..., ::-1, ::-1])[..., ::-1, ::-1])


def _lower_inverse(lower: Array) -> Array:
    """Inverse of a lower-triangular matrix by forward substitution, which keeps every zero exact."""
    inverse = np.zeros_like(lower)
    for i in range(lower.shape[-1]):
        done = lower[..., i, None, :i] @ inverse[..., :i, :i]
        inverse[..., i, :i] = -done[..., 0, :] / lower[..., i, i, None]
        inverse[..., i, i] = 1.0 / lower[..., i, i]
    return inverse


def _inverse_root(g: Gaussian) -> Array:
    """Lower-triangular L with L Lᵀ = Q⁻¹ (the vector 1/√q when diagonal) of a checked, proper Gaussian."""
    if _is_diagonal(g):
        return np.asarray(1.0 / np.sqrt(g.precision))
    return _lower_inverse(_transpose(_upper_root(g.precision)))


def _scaled(g: Gaussian, factor: Array | float) -> Gaussian:
    factor = np.asarray(factor, dtype=np.float64)[..., None]
    return Gaussian(factor * g.linear, (factor if _is_diagonal(g) else factor[..., None]) * g.precision)


def product(*gaussians: Gaussian) -> Gaussian:
    """Multiply densities: r = Σ rᵢ, Q = Σ Qᵢ.

    Parameters
    ----------
    *gaussians : Gaussian, linear (..., m)
        One or more of one size, improper allowed; batches broadcast, a diagonal beside a full one becomes full.

    Returns
    -------
    Gaussian

    Raises
    ------
    ValueError
        No Gaussian, or different sizes.

    Examples
    --------
    >>> g = Gaussian(np.array([1.0]), np.array([2.0]))
    >>> product(g, g).precision
    array([4.])
    """
    aligned = _aligned(*gaussians)
    linear, precision = aligned[0]
    for g in aligned[1:]:
        linear, precision = linear + g.linear, precision + g.precision
    return Gaussian(linear, precision)


def quotient(a: Gaussian, b: Gaussian) -> Gaussian:
    """Divide densities: r = r_a − r_b, Q = Q_a − Q_b; undoes `product` up to rounding.

    Parameters
    ----------
    a, b : Gaussian, linear (..., m)
        Improper allowed; batches broadcast.

    Returns
    -------
    Gaussian
        Often improper, which is no error: see `is_proper` and `repair`.

    Raises
    ------
    ValueError
        Different sizes.

    Examples
    --------
    >>> quotient(Gaussian(np.zeros(1), np.array([2.0])), Gaussian(np.zeros(1), np.array([3.0]))).precision
    array([-1.])
    """
    a, b = _aligned(a, b)
    return Gaussian(a.linear - b.linear, a.precision - b.precision)


def power(a: Gaussian, exponent: float | Array) -> Gaussian:
    """Raise a density to a power: (e r, e Q).

    Parameters
    ----------
    a : Gaussian, linear (..., m)
        Improper allowed.
    exponent : float or array (...)
        Any sign; an array gives each batch entry its own.

    Returns
    -------
    Gaussian

    Examples
    --------
    >>> power(Gaussian(np.ones(1), np.array([2.0])), 0.5).precision
    array([1.])
    """
    return _scaled(_checked(a), exponent)


def damp(old: Gaussian, new: Gaussian, delta: float | Array) -> Gaussian:
    """Step from old towards new: old + δ (new − old), for r and Q alike.

    Parameters
    ----------
    old, new : Gaussian, linear (..., m)
        Improper allowed.
    delta : float or array (...)
        In [0, 1] the step is a convex combination, so two proper ends give a proper result.

    Returns
    -------
    Gaussian
        Exactly ``old`` when both are equal, so a fixed point stays fixed.

    Raises
    ------
    ValueError
        Different sizes.

    Examples
    --------
    >>> damp(Gaussian(np.zeros(1), np.ones(1)), Gaussian(np.ones(1), np.array([3.0])), 0.5).precision
    array([2.])
    """
    old, new = _aligned(old, new)
    return product(old, _scaled(quotient(new, old), delta))


def mean(g: Gaussian) -> Array:
    """Return the mean μ = Q⁻¹r, by a solve.

    Parameters
    ----------
    g : Gaussian, linear (..., m), proper

    Returns
    -------
    array (..., m)

    Raises
    ------
    ValueError
        g is improper.

    Examples
    --------
    >>> mean(Gaussian(np.array([1.0]), np.array([[2.0]])))
    array([0.5])
    """
    g = _require_proper(g)
    if _is_diagonal(g):
        return g.linear / g.precision
    scaled, scale = _equilibrated(g.precision)  # so that LU pivots do not depend on the units
    return np.asarray(np.linalg.solve(scaled, (g.linear / scale)[..., None])[..., 0] / scale)


def covariance(g: Gaussian) -> Array:
    """Return the covariance Σ = Q⁻¹ = L Lᵀ (see `affine`).

    Parameters
    ----------
    g : Gaussian, linear (..., m), proper

    Returns
    -------
    array (..., m, m), or (..., m) variances when g is diagonal

    Raises
    ------
    ValueError
        g is improper.

    Examples
    --------
    >>> covariance(Gaussian(np.zeros(1), np.array([[4.0]])))
    array([[0.25]])
    """
    g = _require_proper(g)
    if _is_diagonal(g):
        return 1.0 / g.precision
    lower = _inverse_root(g)
    return _symmetric(lower @ _transpose(lower))


def standard_deviations(g: Gaussian) -> Array:
    """Return √diag(Q⁻¹), the row norms of L (see `affine`).

    Parameters
    ----------
    g : Gaussian, linear (..., m), proper

    Returns
    -------
    array (..., m)

    Raises
    ------
    ValueError
        g is improper.

    Examples
    --------
    >>> standard_deviations(Gaussian(np.zeros(1), np.array([[4.0]])))
    array([0.5])
    """
    g = _require_proper(g)
    root = _inverse_root(g)
    return root if _is_diagonal(g) else np.sqrt(np.square(root).sum(axis=-1))


def from_moments(mean: Array, covariance: Array) -> Gaussian:
    """Build a Gaussian from its moments: Q = Σ⁻¹, r = Qμ.

    Parameters
    ----------
    mean : array (..., m)
    covariance : array (..., m, m), or (..., m) variances for a diagonal Gaussian

    Returns
    -------
    Gaussian

    Raises
    ------
    ValueError
        The covariance is not positive definite.

    Examples
    --------
    >>> from_moments(np.array([1.0]), np.array([[0.5]])).precision
    array([[2.]])
    """
    return _from_moments(mean, covariance, "")


def _from_moments(mean: Array, covariance: Array, label: str) -> Gaussian:
    moments = _require_proper(Gaussian(mean, covariance), "covariance", label)
    if _is_diagonal(moments):
        return Gaussian(moments.linear / moments.precision, 1.0 / moments.precision)
    root = _inverse_root(moments)
    precision = _symmetric(root @ _transpose(root))
    return Gaussian((precision @ moments.linear[..., None])[..., 0], precision)


def is_proper(g: Gaussian) -> bool | NDArray[np.bool_]:
    """Tell whether Q is positive definite beyond rounding, whatever the units of the coordinates.

    Parameters
    ----------
    g : Gaussian, linear (..., m)

    Returns
    -------
    bool, or array of bool (...) for a batch
        The smallest eigenvalue of Q scaled to a diagonal near one exceeds m eps. False if r or Q is not finite.

    Examples
    --------
    >>> is_proper(Gaussian(np.zeros(2), np.array([1.0, -1.0])))
    False
    """
    proper = _proper(_checked(g))
    return proper if proper.ndim else bool(proper)


def _points(g: Gaussian, x: Array) -> Array:
    points = np.asarray(x, dtype=np.float64)
    if points.ndim == 0 or points.shape[-1] != g.linear.shape[-1]:
        raise ValueError(
            f"x of shape {points.shape} does not fit a Gaussian over {g.linear.shape[-1]} coordinates: "
            f"pass (S, {g.linear.shape[-1]}) or ({g.linear.shape[-1]},)"
        )
    return points if points.ndim > 1 else points[None, :]


def log_kernel(g: Gaussian, x: Array) -> Array:
    """Evaluate r·x − ½ xᵀQx, the log density without its constant.

    Parameters
    ----------
    g : Gaussian, linear (..., m)
        Improper allowed.
    x : array (S, m) or (m,)

    Returns
    -------
    array (..., S), or (...) for a single point

    Raises
    ------
    ValueError
        x has another number of coordinates.

    Examples
    --------
    >>> log_kernel(Gaussian(np.array([1.0]), np.array([2.0])), np.array([[3.0]]))
    array([-6.])
    """
    g = _checked(g)
    points = _points(g, x)
    curved = points * g.precision[..., None, :] if _is_diagonal(g) else points @ g.precision
    values = np.asarray((points * (g.linear[..., None, :] - 0.5 * curved)).sum(axis=-1))
    return values if np.ndim(x) > 1 else values[..., 0]


def log_density(g: Gaussian, x: Array) -> Array:
    """Evaluate the normalised ½ log|Q| − ½m log 2π − ½ (x−μ)ᵀQ(x−μ).

    Parameters
    ----------
    g : Gaussian, linear (..., m), proper
    x : array (S, m) or (m,)

    Returns
    -------
    array (..., S), or (...) for a single point

    Raises
    ------
    ValueError
        g is improper, or x has another number of coordinates.

    Examples
    --------
    >>> log_density(Gaussian(np.zeros(1), np.array([2 * np.pi])), np.zeros(1)).round(3)
    np.float64(0.0)
    """
    g = _require_proper(g)
    centred = _points(g, x) - mean(g)[..., None, :]
    if _is_diagonal(g):
        root = np.sqrt(g.precision)
        white, scales = centred * root[..., None, :], root
    else:
        root = _upper_root(g.precision)
        white, scales = centred @ root, np.diagonal(root, axis1=-2, axis2=-1)
    constant = np.log(scales).sum(axis=-1) - 0.5 * g.linear.shape[-1] * math.log(2 * math.pi)
    values = np.asarray(constant[..., None] - 0.5 * np.square(white).sum(axis=-1))
    return values if np.ndim(x) > 1 else values[..., 0]


def affine(g: Gaussian) -> tuple[Array, Array]:
    """Return μ and L with L Lᵀ = Q⁻¹, so that μ + z Lᵀ are draws for standard normal rows z.

    L is U⁻ᵀ for the upper-triangular U with U Uᵀ = Q: one Cholesky of Q and a substitution, Q⁻¹ is never formed.

    Parameters
    ----------
    g : Gaussian, linear (..., m), proper

    Returns
    -------
    mean : array (..., m)
    L : array (..., m, m) lower-triangular, or (..., m) standard deviations when g is diagonal

    Raises
    ------
    ValueError
        g is improper.

    Examples
    --------
    >>> affine(Gaussian(np.array([1.0]), np.array([[4.0]])))
    (array([0.25]), array([[0.5]]))
    """
    return mean(g), _inverse_root(_checked(g))


def draw(g: Gaussian, rng: np.random.Generator, draws: int) -> Array:
    """Draw μ + z Lᵀ with standard normal z.

    Parameters
    ----------
    g : Gaussian, linear (..., m), proper
    rng : numpy Generator
    draws : int, positive

    Returns
    -------
    array (..., draws, m)

    Raises
    ------
    ValueError
        g is improper, or draws < 1.

    Examples
    --------
    >>> draw(Gaussian(np.zeros(2), np.ones(2)), np.random.default_rng(0), 5).shape
    (5, 2)
    """
    if operator.index(draws) < 1:
        raise ValueError(f"draws is {draws} and must be at least 1: ask for a positive number of draws")
    centre, root = affine(g)
    normal = rng.standard_normal((*centre.shape[:-1], draws, centre.shape[-1]))
    spread = normal * root[..., None, :] if root.ndim == centre.ndim else normal @ _transpose(root)
    return np.asarray(centre[..., None, :] + spread)


def kl(a: Gaussian, b: Gaussian) -> float:
    """KL(a ‖ b) = ½ [tr(Q_b Σ_a) − m + (μ_a−μ_b)ᵀQ_b(μ_a−μ_b) + log|Q_a| − log|Q_b|].

    With Q_b = U Uᵀ and W = Uᵀ L_a lower-triangular this is a sum of terms that cannot be negative, Wᵢⱼ² below the
    diagonal and Wᵢᵢ² − 1 − log Wᵢᵢ² on it, so nothing cancels when a and b are close.

    Parameters
    ----------
    a, b : Gaussian, linear (m,), proper

    Returns
    -------
    float, at least 0

    Raises
    ------
    ValueError
        Either is improper, a batch, or of another size.

    Examples
    --------
    >>> kl(Gaussian(np.zeros(1), np.ones(1)), Gaussian(np.array([2.0]), np.ones(1)))
    2.0
    """
    a, b = _aligned(_single(a, "kl"), _single(b, "kl"))
    shift, inner = mean(a) - mean(b), _inverse_root(a)
    if _is_diagonal(a):
        outer = np.sqrt(b.precision)
        ratio, below, white = outer * inner, 0.0, outer * shift
    else:
        upper = _upper_root(b.precision)
        lower = upper.T @ inner
        ratio, below, white = np.diagonal(lower), float(np.square(np.tril(lower, -1)).sum()), shift @ upper
    excess = (ratio - 1.0) * (ratio + 1.0)
    spread = float(np.maximum(excess - 2.0 * np.log1p(ratio - 1.0), 0.0).sum())
    return 0.5 * (spread + below + float(white @ white))


def pack_triangle(matrix: Array) -> Array:
    """List the upper triangle of symmetric matrices row by row; the lower triangle is not read.

    Parameters
    ----------
    matrix : array (..., m, m)

    Returns
    -------
    array (..., m (m + 1) / 2)

    Raises
    ------
    ValueError
        The matrix is not square.

    Examples
    --------
    >>> pack_triangle(np.array([[1.0, 2.0], [2.0, 3.0]]))
    array([1., 2., 3.])
    """
    values = np.asarray(matrix, dtype=np.float64)
    if values.ndim < 2 or values.shape[-1] != values.shape[-2]:
        raise ValueError(f"matrix of shape {values.shape} has no triangle to pack: pass (..., m, m)")
    rows, columns = np.triu_indices(values.shape[-1])
    return np.asarray(values[..., rows, columns])


def unpack_triangle(vector: Array) -> Array:
    """Rebuild symmetric matrices from `pack_triangle`, exactly.

    Parameters
    ----------
    vector : array (..., m (m + 1) / 2)

    Returns
    -------
    array (..., m, m)

    Raises
    ------
    ValueError
        The length is not triangular (1, 3, 6, 10, ...).

    Examples
    --------
    >>> unpack_triangle(np.array([1.0, 2.0, 3.0])).tolist()
    [[1.0, 2.0], [2.0, 3.0]]
    """
    values = np.asarray(vector, dtype=np.float64)
    length = values.shape[-1] if values.ndim else 0
    size = (math.isqrt(8 * length + 1) - 1) // 2
    if length == 0 or size * (size + 1) // 2 != length:
        raise ValueError(
            f"vector of shape {values.shape} is no packed triangle: its last length must be m(m+1)/2 "
            "for a whole m >= 1; check that nothing was cut off or appended"
        )
    rows, columns = np.triu_indices(size)
    matrix = np.empty((*values.shape[:-1], size, size))
    matrix[..., rows, columns] = values
    matrix[..., columns, rows] = values
    return matrix


def full(size: int) -> Structure:
    """Structure in which every coordinate is coupled to every other: one block.

    Examples
    --------
    >>> full(2)
    Structure(size=2, blocks=((0, 1),))
    """
    return block(size, [range(size)])


def diagonal(size: int) -> Structure:
    """Structure in which every coordinate is on its own.

    Examples
    --------
    >>> diagonal(2)
    Structure(size=2, blocks=None)
    """
    return full(size)._replace(blocks=None)


def block(size: int, blocks: Sequence[Sequence[int]]) -> Structure:
    """Structure in which coordinates are coupled inside each block only.

    Parameters
    ----------
    size : int, positive
    blocks : sequence of sequences of int
        A partition of 0..size-1; both orders are kept and decide the order of packing.

    Returns
    -------
    Structure

    Raises
    ------
    ValueError
        An index is missing, duplicated or out of range, a block is empty, or size < 1.

    Examples
    --------
    >>> block(3, [(0, 2), (1,)])
    Structure(size=3, blocks=((0, 2), (1,)))
    """
    if operator.index(size) < 1:
        raise ValueError(f"size is {size} and must be at least 1: name at least one coordinate")
    partition = tuple(tuple(operator.index(i) for i in indices) for indices in blocks)
    counts = Counter(i for indices in partition for i in indices)
    missing, foreign = sorted(set(range(size)) - set(counts)), sorted(set(counts) - set(range(size)))
    duplicate = sorted(i for i, count in counts.items() if count > 1)
    if missing or foreign or duplicate or not all(partition):
        raise ValueError(
            f"blocks {partition} must hold each of 0..{size - 1} exactly once and no empty block: "
            f"missing {missing}, duplicate {duplicate}, out of range {foreign}"
        )
    return Structure(operator.index(size), partition)


def packed_size(structure: Structure) -> int:
    """Count the numbers in a packed precision: m if diagonal, else Σ k(k+1)/2 over blocks of size k.

    Examples
    --------
    >>> packed_size(full(3)), packed_size(diagonal(3))
    (6, 3)
    """
    return structure.size if structure.blocks is None else sum(len(b) * (len(b) + 1) // 2 for b in structure.blocks)


def zeros(structure: Structure) -> Gaussian:
    """Return the neutral element of `product`, r = 0 and Q = 0, in the shapes of the structure.

    Examples
    --------
    >>> zeros(diagonal(2)).precision
    array([0., 0.])
    """
    size = structure.size
    return Gaussian(np.zeros(size), np.zeros(size if structure.blocks is None else (size, size)))


def project(mean: Array, covariance: Array, structure: Structure) -> Gaussian:
    """Match moments inside the family: keep μ and the blocks Σ_bb, Q_bb = Σ_bb⁻¹, r = Qμ.

    This is the member q of the family that minimises KL(p ‖ q) for every p with these moments.

    Parameters
    ----------
    mean : array (m,)
    covariance : array (m, m), or (m,) variances
    structure : Structure of size m

    Returns
    -------
    Gaussian
        Precision (m,) if the structure is diagonal, else (m, m) with exact zeros between blocks.

    Raises
    ------
    ValueError
        The shapes do not fit, or a block is not positive definite (it alone must be, not the whole Σ).

    Examples
    --------
    >>> project(np.zeros(2), np.array([[2.0, 1.0], [1.0, 4.0]]), diagonal(2)).precision
    array([0.5 , 0.25])
    """
    size, centre, spread = structure.size, np.asarray(mean, np.float64), np.asarray(covariance, np.float64)
    if centre.shape != (size,) or spread.shape not in ((size,), (size, size)):
        raise ValueError(
            f"mean of shape {centre.shape} and covariance of shape {spread.shape} do not fit a structure "
            f"of size {size}: pass ({size},) with ({size}, {size}) or ({size},)"
        )
    if structure.blocks is None:
        return _from_moments(centre, spread if spread.ndim == 1 else np.diagonal(spread), "")
    spread = _spread(spread) if spread.ndim == 1 else spread
    result = zeros(structure)
    for indices in structure.blocks:
        part, pairs = list(indices), np.ix_(indices, indices)
        piece = _from_moments(centre[part], spread[pairs], f" of block {indices}")
        result.linear[part], result.precision[pairs] = piece
    return result


def pack_precision(precision: Array, structure: Structure) -> Array:
    """List a precision's packed triangles block after block; a diagonal one is copied as it is.

    Parameters
    ----------
    precision : array (m, m), or (m,) if the structure is diagonal
        Improper allowed.
    structure : Structure of size m

    Returns
    -------
    array (packed_size(structure),)

    Raises
    ------
    ValueError
        The shape does not fit, or an entry between two blocks is not zero and would be lost.

    Examples
    --------
    >>> pack_precision(np.diag([1.0, 2.0, 3.0]), block(3, [(0, 1), (2,)]))
    array([1., 0., 2., 3.])
    """
    values = np.asarray(precision, dtype=np.float64)
    expected = zeros(structure).precision.shape
    if values.shape != expected:
        raise ValueError(f"precision of shape {values.shape} does not fit the structure: it must have shape {expected}")
    if structure.blocks is None:
        return values.copy()
    outside = np.ones(expected, dtype=bool)
    for indices in structure.blocks:
        outside[np.ix_(indices, indices)] = False
    if (values[outside] != 0).any():
        row, column = (int(i) for i in np.argwhere(outside & (values != 0))[0])
        raise ValueError(
            f"precision[{row}, {column}] is {values[row, column]:.6g} and must be 0, the two are in "
            "different blocks: project onto the structure first, or use full(size)"
        )
    return np.concatenate([pack_triangle(_symmetric(values[np.ix_(b, b)])) for b in structure.blocks])


def unpack_precision(vector: Array, structure: Structure) -> Array:
    """Rebuild the precision from `pack_precision`, exactly.

    Parameters
    ----------
    vector : array (packed_size(structure),)
    structure : Structure of size m

    Returns
    -------
    array (m, m), or (m,) if the structure is diagonal

    Raises
    ------
    ValueError
        The vector has another length.

    Examples
    --------
    >>> unpack_precision(np.array([1.0, 0.0, 2.0]), full(2)).tolist()
    [[1.0, 0.0], [0.0, 2.0]]
    """
    values = np.asarray(vector, dtype=np.float64)
    if values.shape != (packed_size(structure),):
        raise ValueError(
            f"vector of shape {values.shape} does not fit the structure: it must have shape "
            f"({packed_size(structure)},); check that both sides use the same structure"
        )
    if structure.blocks is None:
        return values.copy()
    matrix, start = np.zeros((structure.size, structure.size)), 0
    for b in structure.blocks:
        stop = start + len(b) * (len(b) + 1) // 2
        matrix[np.ix_(b, b)] = unpack_triangle(values[start:stop])
        start = stop
    return matrix


def precision_from_draws(draws: Array) -> Array:
    """Estimate a precision by (n − m − 2) S⁻¹ with the scatter S = Σ (xᵢ − x̄)(xᵢ − x̄)ᵀ.

    Unbiased for independent Gaussian draws, since S is Wishart with n − 1 degrees of freedom.

    Parameters
    ----------
    draws : array (n, m)

    Returns
    -------
    array (m, m)

    Raises
    ------
    ValueError
        n <= m + 2, or the draws are not finite, constant in a coordinate or collinear.

    Notes
    -----
    When this fails: correlated draws (MCMC) count for fewer than n, the estimate is then too large; thin them first.

    Examples
    --------
    >>> precision_from_draws(np.array([[-1.0], [0.0], [0.0], [1.0]]))
    array([[0.5]])
    """
    values = np.asarray(draws, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] == 0:
        raise ValueError(f"draws of shape {values.shape} must be a matrix (n, m): pass one row per draw")
    if not np.isfinite(values).all():
        row, column = (int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise ValueError(f"draws[{row}, {column}] is {values[row, column]} and must be finite: drop diverged draws")
    n, size = values.shape
    if n <= size + 2:
        raise ValueError(
            f"{n} draws of {size} coordinates give no unbiased precision: the draws must exceed m + 2 = "
            f"{size + 2}; draw more or use a diagonal structure"
        )
    # Starting from the first draw makes a constant coordinate exactly zero instead of rounding noise.
    centred = values - values[0]
    centred = centred - centred.mean(axis=0)
    spread = np.sqrt(np.square(centred).sum(axis=0))
    if not spread.all():
        raise ValueError(f"coordinate {int(np.argmin(spread))} of the draws has scatter 0 and must vary: drop it")
    _, singular, right = np.linalg.svd(centred / spread, full_matrices=False)  # S itself would square the condition
    if singular[-1] <= n * _EPS * singular[0]:
        raise ValueError(
            f"the draws are collinear (singular values {singular[0]:.6g} to {singular[-1]:.6g}) and must "
            f"span {size} dimensions: drop coordinates that are functions of others"
        )
    half = right / singular[:, None] / spread
    return np.asarray((n - size - 2) * _symmetric(half.T @ half))


def repair(g: Gaussian, floor: float) -> tuple[Gaussian, Repair]:
    """Raise the eigenvalues of Q that lie below floor · max|λ| to that value, λ' = max(λ, floor · max|λ|).

    The linear r is kept as it is, so the repaired mean is Q'⁻¹r: where Q was proper already it moves towards zero
    along the raised directions, where Q was not, g had no mean and now has one. Eigenvectors and block zeros stay.

    Parameters
    ----------
    g : Gaussian, linear (m,)
    floor : float
        Relative to the largest absolute eigenvalue, in [8 m eps, 1).

    Returns
    -------
    Gaussian
        Proper; the same object as g if no eigenvalue lay below (beyond rounding).
    Repair

    Raises
    ------
    ValueError
        floor is out of range, g is a batch or not finite, or Q = 0, where nothing sets a scale.

    Notes
    -----
    When this fails: one huge eigenvalue lifts all small ones, so put coordinates on comparable scales first.

    Examples
    --------
    >>> fixed, report = repair(Gaussian(np.zeros(2), np.array([1.0, -1.0])), 0.25)
    >>> fixed.precision, report.raised
    (array([1.  , 0.25]), 1)
    """
    checked = _checked(_single(g, "repair"))
    size = checked.linear.size
    if not 8 * size * _EPS <= floor < 1:
        raise ValueError(f"floor is {floor} and must be in [{8 * size * _EPS:.3g}, 1), clear of rounding: try 1e-6")
    if not (np.isfinite(checked.linear).all() and np.isfinite(checked.precision).all()):
        raise ValueError("the Gaussian has entries that are not finite and must be finite: drop this update")
    eigenvalues, vectors = checked.precision, None
    if not _is_diagonal(checked):
        eigenvalues, vectors = np.linalg.eigh(checked.precision)
    smallest, largest = float(eigenvalues.min()), float(np.abs(eigenvalues).max())
    if largest == 0:
        raise ValueError("the precision is 0 and must set the scale of the floor: multiply by a proper Gaussian first")
    # The slack keeps an eigenvalue that sits on the floor from being raised again by its own rounding.
    below = eigenvalues < (floor - 4 * size * _EPS) * largest
    if not below.any():
        return g, Repair(False, 0, smallest, smallest, 0.0)
    lifted = np.where(below, floor * largest, eigenvalues)
    change = float(np.linalg.norm(lifted - eigenvalues) / np.linalg.norm(eigenvalues))
    report = Repair(True, int(below.sum()), smallest, float(lifted.min()), change)
    if vectors is None:
        return Gaussian(checked.linear, lifted), report
    precision = _symmetric((vectors * lifted) @ vectors.T)
    # A function of a block-diagonal matrix has the same blocks; rounding must not fill the zeros between them.
    linked = (checked.precision != 0) | np.eye(size, dtype=bool)
    for _ in range(size.bit_length()):
        linked = linked.astype(np.float64) @ linked > 0
    return Gaussian(checked.linear, np.where(linked, precision, 0.0)), report
