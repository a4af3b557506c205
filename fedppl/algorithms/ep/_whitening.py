"""Changes of natural parameters as vectors, in coordinates in which q is standard normal."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular

from fedppl import gaussian, structure
from fedppl.algorithms.ep import sites as _sites
from fedppl.gaussian import Gaussian
from fedppl.structure import Structure
from fedppl.types import Array


class Frame(NamedTuple):
    """Coordinates in which q, as far as the family can hold it, is standard normal."""

    form: Structure
    q: Gaussian  # projected on the family, its precision as a matrix
    mean: Array
    factor: Array  # L, lower-triangular with L Lᵀ = Q
    weights: Array  # (p,) for a precision's entries: √2-fold for off-diagonals, so that a vector's norm is the matrix's


def length(form: Structure) -> int:
    """Count the numbers in a vector: m of the linear and p of the packed precision."""
    return form.size + structure.packed_size(form)


def frame_of(q: Gaussian, form: Structure, weight: float = 1.0) -> Frame:
    """Coordinates of a proper q, precisions scaled by `weight`; server and clients find the same ones."""
    mean = gaussian.mean(q)
    inside = _sites.in_family(mean, gaussian.covariance(q), form)
    weights = _sites.in_structure(np.where(np.eye(form.size, dtype=bool), 1.0, np.sqrt(2.0)), form)
    factor = np.asarray(np.linalg.cholesky(inside.precision), dtype=np.float64)
    return Frame(form, inside, mean, factor, weight * weights)


def whiten(frame: Frame, d_linear: Array, d_precision: Array) -> Array:
    """(L⁻¹ (Δr − ΔQ μ), L⁻¹ ΔQ L⁻ᵀ) of one change (m,), (m, m), as a vector (m + p,)."""
    inverse = solve_triangular(frame.factor, np.eye(frame.form.size), lower=True)
    about_mean = inverse @ (d_linear - d_precision @ frame.mean)
    packed = _sites.in_structure(inverse @ d_precision @ inverse.T, frame.form)
    return np.concatenate([about_mean, frame.weights * packed])


def unwhiten(frame: Frame, vectors: Array) -> tuple[Array, Array]:
    """Changes of linear (R, m) and packed precision (R, p) from vectors (R, m + p)."""
    m, factor = frame.form.size, frame.factor
    precision = factor @ _sites.dense(vectors[:, m:] / frame.weights, frame.form) @ factor.T
    linear = vectors[:, :m] @ factor.T + precision @ frame.mean
    return linear, _sites.in_structure(precision, frame.form)
