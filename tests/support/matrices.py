"""Matrices of Gaussians: drawn, and written out."""

from __future__ import annotations

import numpy as np

from fedppl.gaussian import Gaussian
from fedppl.types import Array


def spd(rng: np.random.Generator, size: int) -> Array:
    """Draw a positive definite matrix with eigenvalues between 0.1 and 10."""
    vectors, _ = np.linalg.qr(rng.normal(size=(size, size)))
    matrix = (vectors * 10.0 ** rng.uniform(-1, 1, size)) @ vectors.T
    return np.asarray((matrix + matrix.T) / 2)


def matrix(g: Gaussian) -> Array:
    """Write any precision out as a matrix."""
    return g.precision if g.precision.ndim == 2 else np.diag(g.precision)
