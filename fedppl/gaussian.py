"""Gaussians in natural parameters: linear r = Σ⁻¹μ (..., m) and precision Q = Σ⁻¹ (..., m, m), or (..., m) diagonal.

Multiplying densities adds (r, Q), so messages are added and subtracted here without an inverse, and a single
factor may be improper (Q not positive definite). Functions that need a proper Gaussian raise ``ValueError``, and so
does every function whose arguments do not fit each other. A density sees only the symmetric part of Q; that part is
what every function reads and returns. Leading dimensions are a batch, and batches broadcast.

>>> prior, site = Gaussian(np.zeros(1), np.array([[1.0]])), Gaussian(np.array([2.0]), np.array([[3.0]]))
>>> q = product(prior, site)
>>> mean(q), covariance(q), standard_deviations(q)
(array([0.5]), array([[0.25]]), array([0.5]))
>>> cavity, half = quotient(q, site), power(site, 0.5)
>>> cavity.precision, half.precision
(array([[1.]]), array([[1.5]]))
"""

from __future__ import annotations

import functools
import math
import operator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dpotrf, dtrtri

__all__ = [
    "Gaussian", "affine", "covariance", "draw", "from_moments", "is_proper", "kl", "log_density",
    "log_kernel", "mean", "pack_triangle", "power", "product", "quotient", "repair",
    "standard_deviations", "unpack_triangle",
]  # fmt: skip

Array: TypeAlias = NDArray[np.float64]
_EPS = float(np.finfo(np.float64).eps)
_RAISE = "multiply by a proper Gaussian first (product) or raise it with repair(g, floor)"
_SHRINK = "pass one estimated from more draws than coordinates, or a shrunk one"


class Gaussian(NamedTuple):
    """An unnormalised Gaussian exp(r·x − ½ xᵀQx), possibly improper or a batch; diagonal if Q has the shape of r."""

    linear: Array  # r (..., m)
    precision: Array  # Q (..., m, m), or (..., m) diagonal


def _is_diagonal(g: Gaussian) -> bool:
    return g.precision.ndim == g.linear.ndim


def _checked(g: Gaussian, name: str = "precision") -> Gaussian:
    """Convert to float64, check the shapes and keep the symmetric part of the matrix."""
    linear, matrix = np.asarray(g[0], dtype=np.float64), np.asarray(g[1], dtype=np.float64)
    shape = linear.shape
    if shape and shape[-1] and matrix.shape == (*shape, shape[-1]):
        return Gaussian(linear, 0.5 * (matrix + matrix.mT))
    if not shape or not shape[-1] or matrix.shape != shape:
        raise ValueError(
            f"vector of shape {shape} and {name} of shape {matrix.shape} do not fit: "
            f"pass (..., m) with (..., m, m), or with (..., m) for a diagonal {name}"
        )
    return Gaussian(linear, matrix)


def _single(g: Gaussian, function: str) -> Gaussian:
    if np.ndim(g.linear) != 1:
        raise ValueError(f"{function} takes one Gaussian, not linear of shape {np.shape(g.linear)}: loop over a batch")
    return g


def _aligned(*gaussians: Gaussian, full: bool = False) -> list[Gaussian]:
    """Check that all have one size; when some are full, or are to be, write the diagonal ones out as full."""
    checked = [_checked(g) for g in gaussians]
    sizes = [g.linear.shape[-1] for g in checked]
    if len(set(sizes)) != 1:
        raise ValueError(f"Gaussians of sizes {sizes} cannot be combined: pass one or more, all of the same size")
    if not any(map(_is_diagonal, checked)) or (all(map(_is_diagonal, checked)) and not full):
        return checked
    eye = np.eye(sizes[0], dtype=bool)
    return [Gaussian(r, np.where(eye, q[..., None], 0.0) if q.ndim == r.ndim else q) for r, q in checked]


def _upper_root(matrix: Array) -> Array:
    """Upper-triangular U with U Uᵀ = matrix: Cholesky from the last coordinate up; NaN or inf where there is none."""
    turned = matrix[..., ::-1, ::-1]
    if matrix.ndim == 2:  # LAPACK itself takes a third of the time of numpy's call
        factor, failed = dpotrf(turned, lower=1, clean=1)
        return np.full(matrix.shape, np.nan) if failed else np.asarray(factor[::-1, ::-1])
    try:
        return np.asarray(np.linalg.cholesky(turned)[..., ::-1, ::-1])
    except np.linalg.LinAlgError:  # of some in the batch, and numpy does not say which
        rest = np.moveaxis(matrix, (-2, -1), (0, 1)).copy()
        upper = np.zeros(rest.shape)
        for j in reversed(range(len(rest))):
            column = rest[:, j] / np.sqrt(rest[j, j])
            upper[: j + 1, j] = column
            rest = rest[:j, :j] - column[:j, None] * column[:j]
        return np.moveaxis(upper, (0, 1), (-2, -1))


def _inverse_root(matrix: Array) -> Array:
    """L = U⁻ᵀ, lower-triangular with L Lᵀ = matrix⁻¹; NaN on its diagonal where there is none."""
    upper = _upper_root(matrix)
    if matrix.ndim == 2:
        return np.asarray(dtrtri(upper)[0].T)
    exists = np.isfinite(upper).all(axis=(-1, -2), keepdims=True)
    inverse = np.linalg.inv(np.where(exists, upper, np.eye(matrix.shape[-1])))
    return np.where(exists, np.tril(inverse.mT), np.nan)


def _rooted(g: Gaussian) -> tuple[Array, NDArray[np.bool_]]:
    """L with L Lᵀ = Q⁻¹ (1/√q when diagonal) of a checked g, and whether g is proper, see `is_proper`."""
    with np.errstate(all="ignore"):
        if _is_diagonal(g):
            root, inside = 1.0 / np.sqrt(g.precision), (g.precision > 0) & (g.precision < np.inf)
        else:
            root, scale = _inverse_root(g.precision), np.sqrt(np.diagonal(g.precision, axis1=-2, axis2=-1))
            inflation = np.square(root * scale[..., None]).sum(axis=-1)  # Q_ii Σ_ii
            inside = inflation < 0.5 / (g.linear.shape[-1] * _EPS)
        return root, np.asarray((inside & np.isfinite(g.linear)).all(axis=-1))


def _require_proper(g: Gaussian, name: str = "precision", remedy: str = _RAISE) -> tuple[Gaussian, Array]:
    """Return g, checked, and L with L Lᵀ = Q⁻¹."""
    g = _checked(g, name)
    root, proper = _rooted(g)
    if proper.all():
        return g, root
    where = tuple(int(i) for i in np.argwhere(~proper)[0])
    matrix, place = g.precision[where], f" at batch index {where}" if where else ""
    if not (np.isfinite(matrix).all() and np.isfinite(g.linear[where]).all()):
        raise ValueError(
            f"the {name}{place} or its vector has entries that are not finite, its smallest eigenvalue is nan "
            "and must be positive: look for an overflow or a failed fit upstream"
        )
    smallest = float((matrix if _is_diagonal(g) else np.linalg.eigvalsh(matrix)).min())
    raise ValueError(
        f"the {name}{place} has smallest eigenvalue {smallest:.6g} and must be positive definite "
        f"beyond rounding: {remedy}"
    )


def product(*gaussians: Gaussian) -> Gaussian:
    """Multiply densities: r = Σ rᵢ, Q = Σ Qᵢ; improper ones allowed, a diagonal one beside a full one becomes full."""
    (linear, precision), *others = _aligned(*gaussians)
    for other in others:
        linear, precision = linear + other.linear, precision + other.precision
    return Gaussian(linear, precision)


def quotient(a: Gaussian, b: Gaussian) -> Gaussian:
    """Divide densities: r = r_a − r_b, Q = Q_a − Q_b; often improper, which is no error."""
    a, b = _aligned(a, b)
    return Gaussian(a.linear - b.linear, a.precision - b.precision)


def power(a: Gaussian, exponent: float | Array) -> Gaussian:
    """Raise a density to a power of any sign, (e r, e Q); an array of exponents (...) goes with a batch."""
    a = _checked(a)
    factor = np.asarray(exponent, dtype=np.float64)[..., None]
    return Gaussian(factor * a.linear, (factor if _is_diagonal(a) else factor[..., None]) * a.precision)


def _centre(g: Gaussian, root: Array) -> Array:
    if _is_diagonal(g):
        return g.linear / g.precision
    return np.asarray((root @ (root.mT @ g.linear[..., None]))[..., 0])


def mean(g: Gaussian) -> Array:
    """Return the mean μ = Q⁻¹r = L Lᵀr (see `affine`) of a proper Gaussian."""
    return _centre(*_require_proper(g))


def covariance(g: Gaussian) -> Array:
    """Return the covariance Q⁻¹ = L Lᵀ (see `affine`) of a proper Gaussian, (..., m) variances when diagonal."""
    g, root = _require_proper(g)
    return 1.0 / g.precision if _is_diagonal(g) else _outer(root)


def _outer(root: Array) -> Array:
    product = root @ root.mT
    return 0.5 * (product + product.mT)


def standard_deviations(g: Gaussian) -> Array:
    """Return √diag(Q⁻¹) of a proper Gaussian: the row norms of L (see `affine`)."""
    g, root = _require_proper(g)
    return root if _is_diagonal(g) else np.sqrt(np.square(root).sum(axis=-1))


def affine(g: Gaussian) -> tuple[Array, Array]:
    """Return μ and L with L Lᵀ = Q⁻¹, so that μ + z Lᵀ are draws for standard normal rows z.

    L = U⁻ᵀ is lower-triangular, where U Uᵀ = Q with U upper-triangular; for a diagonal g it is the vector 1/√q.

    >>> affine(Gaussian(np.array([1.0]), np.array([[4.0]])))
    (array([0.25]), array([[0.5]]))
    """
    g, root = _require_proper(g)
    return _centre(g, root), root


def from_moments(mean: Array, covariance: Array, *, name: str = "covariance") -> Gaussian:
    """Build a Gaussian from its moments: Q = Σ⁻¹, r = Qμ; variances (..., m) give a diagonal one. Errors call Σ `name`.

    >>> from_moments(np.array([1.0]), np.array([[0.5]])).precision
    array([[2.]])
    """
    moments, root = _require_proper(Gaussian(mean, covariance), name, _SHRINK)
    if _is_diagonal(moments):
        return Gaussian(moments.linear / moments.precision, 1.0 / moments.precision)
    precision = _outer(root)
    return Gaussian((precision @ moments.linear[..., None])[..., 0], precision)


def is_proper(g: Gaussian) -> bool | NDArray[np.bool_]:
    """Tell whether Q is positive definite beyond rounding, per batch entry; False if r or Q is not finite.

    Each coordinate's share of its variance that the others leave, 1 / (Q_ii Σ_ii), must exceed 2 m eps in any units.

    >>> is_proper(Gaussian(np.zeros(2), np.array([1.0, -1.0])))
    False
    """
    _, proper = _rooted(_checked(g))
    return proper if proper.ndim else bool(proper)


def _points(g: Gaussian, x: Array) -> Array:
    points, m = np.asarray(x, dtype=np.float64), np.shape(g[0])[-1]
    if points.shape[-1:] != (m,):
        raise ValueError(f"x of shape {points.shape} does not fit {m} coordinates: pass (S, {m}) or ({m},)")
    return points


def log_kernel(g: Gaussian, x: Array) -> Array:
    """Evaluate r·x − ½ xᵀQx, the log density without its constant, (..., S) at x (S, m), or (...) at x (m,).

    >>> log_kernel(Gaussian(np.array([1.0]), np.array([2.0])), np.array([[3.0]]))
    array([-6.])
    """
    g, points = _checked(g), _points(g, x)
    linear, precision = g
    if points.ndim > 1:
        linear, precision = linear[..., None, :], precision[..., None, :] if _is_diagonal(g) else precision
    curved = points * precision if _is_diagonal(g) else points @ precision
    return np.asarray((points * (linear - 0.5 * curved)).sum(axis=-1))


def log_density(g: Gaussian, x: Array) -> Array:
    """Evaluate ½ log|Q| − ½m log 2π − ½ (x−μ)ᵀQ(x−μ) of one Gaussian, (S,) at x (S, m), or () at x (m,).

    >>> log_density(Gaussian(np.zeros(1), np.array([2 * np.pi])), np.zeros(1)).round(3)
    np.float64(0.0)
    """
    g, root = _require_proper(_aligned(_single(g, "log_density"), full=True)[0])
    white = (_points(g, x) - _centre(g, root)) @ _upper_root(g.precision)
    constant = -np.log(root.diagonal()).sum() - 0.5 * len(root) * math.log(2 * math.pi)
    return np.asarray(constant - 0.5 * np.square(white).sum(axis=-1))


def log_integral(g: Gaussian) -> float:
    """Log of the integral of the kernel exp(rᵀx − xᵀQx / 2) of one Gaussian.

    >>> round(log_integral(Gaussian(np.zeros(1), np.eye(1))), 6)
    0.918939
    """
    center, root = affine(g)
    return float(0.5 * g.linear @ center + np.sum(np.log(np.diag(root))) + 0.5 * len(center) * np.log(2 * np.pi))


def draw(g: Gaussian, rng: np.random.Generator, draws: int) -> Array:
    """Draw μ + z Lᵀ with standard normal z (draws, m) from one proper Gaussian.

    >>> draw(Gaussian(np.zeros(2), np.ones(2)), np.random.default_rng(0), 5).shape
    (5, 2)
    """
    if operator.index(draws) < 1:
        raise ValueError(f"draws is {draws} and must be at least 1: ask for a positive number of draws")
    centre, root = affine(_single(g, "draw"))
    normal = rng.standard_normal((draws, len(centre)))
    return np.asarray(centre + (normal * root if root.ndim == 1 else normal @ root.T))


def kl(a: Gaussian, b: Gaussian) -> float:
    """KL(a ‖ b) = ½ [tr(Q_b Σ_a) − m + (μ_a−μ_b)ᵀQ_b(μ_a−μ_b) + log|Q_a| − log|Q_b|] of two single Gaussians.

    As a sum of terms ≥ 0 nothing cancels: Wᵢⱼ² below the diagonal of W = Uᵀ L_a, U Uᵀ = Q_b, Wᵢᵢ² − 1 − log Wᵢᵢ² on it.

    >>> kl(Gaussian(np.zeros(1), np.ones(1)), Gaussian(np.array([2.0]), np.ones(1)))
    2.0
    """
    (a, inner), (b, root) = map(_require_proper, _aligned(_single(a, "kl"), _single(b, "kl"), full=True))
    upper = _upper_root(b.precision)
    white, w = (_centre(a, inner) - _centre(b, root)) @ upper, upper.T @ inner
    ratio = w.diagonal()
    spread = np.maximum((ratio - 1.0) * (ratio + 1.0) - 2.0 * np.log1p(ratio - 1.0), 0.0).sum()
    return 0.5 * float(spread + np.square(np.tril(w, -1)).sum() + white @ white)


@functools.lru_cache(maxsize=32)
def _triangle(size: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Places of the triangle in a flat matrix, (m (m + 1) / 2,), and of the matrix in a triangle, (m, m)."""
    rows, columns = np.triu_indices(size)
    position = np.empty((size, size), dtype=np.intp)
    position[rows, columns] = position[columns, rows] = np.arange(len(rows))
    return rows * size + columns, position


def pack_triangle(matrix: Array) -> Array:
    """List the upper triangle (..., m (m + 1) / 2) of symmetric matrices row by row; the lower one is not read.

    >>> pack_triangle(np.array([[1.0, 2.0], [2.0, 3.0]]))
    array([1., 2., 3.])
    """
    values = np.asarray(matrix, dtype=np.float64)
    shape = values.shape
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ValueError(f"matrix of shape {shape} has no triangle to pack: pass (..., m, m)")
    return values.reshape(*shape[:-2], shape[-1] ** 2).take(_triangle(shape[-1])[0], axis=-1)


def unpack_triangle(vector: Array) -> Array:
    """Rebuild the symmetric matrices (..., m, m) from `pack_triangle`, exactly.

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
    return values.take(_triangle(size)[1], axis=-1)


def repair(g: Gaussian, floor: float) -> tuple[Gaussian, float]:
    """Raise the eigenvalues of Q that lie below floor · max|λ| to that value, λ' = max(λ, floor · max|λ|).

    The linear r is kept as it is, so the repaired mean is Q'⁻¹r: where Q was proper already it moves towards zero
    along the raised directions, where Q was not, g had no mean and now has one. Eigenvectors and block zeros stay.
    What comes back is proper, and is g itself if no eigenvalue lay below beyond rounding. The floor lies in
    [8 m eps, 1). One huge eigenvalue lifts all small ones, so put coordinates on comparable scales first. The second
    result is the smallest eigenvalue of Q before.

    >>> fixed, smallest = repair(Gaussian(np.zeros(2), np.array([1.0, -1.0])), 0.25)
    >>> fixed.precision, smallest
    (array([1.  , 0.25]), -1.0)
    """
    checked = _checked(_single(g, "repair"))
    size = checked.linear.size
    if not 8 * size * _EPS <= floor < 1:
        raise ValueError(f"floor is {floor} and must be in [{8 * size * _EPS:.3g}, 1), clear of rounding: try 1e-6")
    if not (np.isfinite(checked.linear).all() and np.isfinite(checked.precision).all()):
        raise ValueError("the Gaussian has entries that are not finite and must be finite: drop this update")
    plain = _is_diagonal(checked)
    eigenvalues, vectors = (checked.precision, np.eye(size)) if plain else np.linalg.eigh(checked.precision)
    smallest, largest = float(eigenvalues.min()), float(np.abs(eigenvalues).max())
    if largest == 0:
        raise ValueError("the precision is 0 and must set the scale of the floor: multiply by a proper Gaussian first")
    # The slack keeps an eigenvalue that sits on the floor from being raised again by its own rounding.
    below = eigenvalues < (floor - 4 * size * _EPS) * largest
    if not below.any():
        return g, smallest
    lifted = np.where(below, floor * largest, eigenvalues)
    if plain:
        return Gaussian(checked.linear, lifted), smallest
    precision = _outer(vectors * np.sqrt(lifted))
    # A function of a block-diagonal matrix has the same blocks; rounding must not fill the zeros between them.
    linked = (checked.precision != 0) | np.eye(size, dtype=bool)
    for _ in range(size.bit_length()):
        linked = linked.astype(np.float64) @ linked > 0
    return Gaussian(checked.linear, np.where(linked, precision, 0.0)), smallest
