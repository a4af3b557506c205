r"""The posterior of a subnetwork from rows A = √Λ J √g where they are fewer than its weights.

.. math:: (J^\top \Lambda J + \mathrm{diag}(g)^{-1})^{-1} = \sqrt g\, (I - A^\top (I + A A^\top)^{-1} A) \sqrt g
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from fedppl.nn._slopes import chunks, evaluate, rows_of
from fedppl.nn.devices import factored_on, host, tensor
from fedppl.nn.functional import Places
from fedppl.nn.unit import NetworkUnit
from fedppl.types import Array

_BLOCK = 128  # columns of a product, at least
_POWERS = 20  # products by which the largest eigenvalue is told
_LOST = 1e-3  # of the smallest variance, to rounding
_FEWER = 3  # times as many weights as rows, for the products to be cheaper


class FewRows(NamedTuple):
    """What the covariance √g (I − Bᵀ B) √g is made of."""

    scale: torch.Tensor  # √g, (s,)
    half: torch.Tensor  # B = L⁻¹ A with L Lᵀ = I + A Aᵀ, (rows, s)


def of_few_rows(unit: NetworkUnit, w: Array, index: Places, variance: Array, dtype: torch.dtype) -> FewRows | None:
    """The posterior at w of the weights `index` with prior variances g (s,).

    None where rows are too many for this to be faster, and where rounding would show in it.
    """
    if not len(unit.X) or _FEWER * len(unit.X) * evaluate(unit, w, unit.X[:1]).size > len(index):
        return None
    there = factored_on(unit.place(dtype))
    scale = tensor(np.sqrt(variance), dtype, there)
    A = torch.cat([rows_of(part, len(index)) for part in chunks(unit, w, index, dtype)]).to(there) * scale
    inner = A @ A.T
    inner.diagonal().add_(1.0)
    largest = largest_eigenvalue(inner, torch.ones(len(inner), dtype=dtype, device=there))
    if not largest * torch.finfo(dtype).eps <= _LOST:  # the narrowest direction's variance is 1 / largest
        return None
    return FewRows(scale, torch.linalg.solve_triangular(torch.linalg.cholesky(inner), A, upper=False))


def variances_of(few: FewRows) -> Array:
    """The diagonal of the covariance, (s,)."""
    return np.asarray(host(few.scale**2 * (1.0 - (few.half**2).sum(0))))


def covariance_of(few: FewRows) -> Array:
    """The covariance, (s, s)."""
    scale, half = few
    matrix = torch.eye(len(scale), dtype=scale.dtype, device=scale.device)
    add_square(matrix, half, -1.0)
    matrix = torch.triu(matrix)
    matrix += torch.triu(matrix, 1).T
    return np.asarray(host(matrix.mul_(scale).mul_(scale[:, None])))


def add_square(matrix: torch.Tensor, rows: torch.Tensor, sign: float = 1.0) -> None:
    """Add ± rowsᵀ rows to the upper triangle, and to little of the lower one."""
    size = max(_BLOCK, -(-len(matrix) // 8))
    for start in range(0, len(matrix), size):
        here = slice(start, start + size)
        matrix[here, start:].addmm_(rows[:, here].T, rows[:, start:], alpha=sign)


def largest_eigenvalue(matrix: torch.Tensor, scale: torch.Tensor) -> float:
    """That of scale · matrix · scale, or a little less; at least its largest diagonal entry."""
    vector = torch.zeros_like(scale)
    vector[(matrix.diagonal() * scale**2).argmax()] = 1.0
    size = torch.ones_like(scale[0])
    for _ in range(_POWERS):
        vector = scale * (matrix @ (scale * vector))
        size = torch.linalg.vector_norm(vector)
        vector = vector / size
    return float(size)
