"""A precision from draws."""

from __future__ import annotations

import numpy as np

from fedppl.types import Array


def precision_from_draws(draws: Array) -> Array:
    """Estimate a precision from draws (n, m) by (n − m − 2) S⁻¹ with the scatter S = Σ (xᵢ − x̄)(xᵢ − x̄)ᵀ.

    Unbiased for independent Gaussian draws, since S is Wishart with n − 1 degrees of freedom. Correlated draws (MCMC)
    count for fewer than n, the estimate is then too large: thin them first. Raises ``ValueError`` if n <= m + 2, or if
    the draws are not finite, constant in a coordinate or collinear.

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
    if singular[-1] <= n * float(np.finfo(np.float64).eps) * singular[0]:
        raise ValueError(
            f"the draws are collinear (singular values {singular[0]:.6g} to {singular[-1]:.6g}) and must "
            f"span {size} dimensions: drop coordinates that are functions of others"
        )
    root = (right / singular[:, None] / spread).T
    inverse = root @ root.T
    return np.asarray((n - size - 2) * 0.5 * (inverse + inverse.T))
