r"""Coordinates of a covariance matrix that has no edge where a density is without bound: sds, and partial correlations.

.. math:: L_{kj} = s_k \tanh(z_{kj}) \prod_{i<j} \frac{1}{\cosh z_{ki}}, \qquad
          L_{kk} = s_k \prod_{i<k} \frac{1}{\cosh z_{ki}}

PyMC's own for `pm.LKJCholeskyCov` are the entries of L, with logarithms on its diagonal. There a row is a point of
space, an sd its distance from 0, and a density of sds that is not 0 at 0 is one without bound in rows of three entries
or more: a search for a mode ends there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pymc.distributions.transforms import CholeskyCovPacked
from pymc.logprob.transforms import Transform

from fedppl.types import SDS_AND_PARTIALS

_MOST_ROWS = 30  # of more, matrices of entries by entries are large


class SdsAndPartials(Transform):  # type: ignore[misc]  # PyMC has no types
    """Packed rows of a root of n rows to log s_k, in the places of its diagonal, and z_kj."""

    name = SDS_AND_PARTIALS

    def __init__(self, n: int) -> None:
        """Keep what says which of p = n (n + 1) / 2 entries lies where, (p, p)."""
        row, column = np.tril_indices(n)
        same = row[:, None] == row
        self.own_sd = (same & (row == column)).astype(float)
        self.own_row = same.astype(float)
        self.before = (same & (column[:, None] > column)).astype(float)
        self.behind = (same & (column[:, None] < column)).astype(float)

    def backward(self, value: Any, *inputs: Any) -> Any:
        """Rows of the root."""
        log_scale = _times(self.own_sd, value) - _times(self.before, self._log_cosh(value))
        return pt.exp(log_scale) * pt.switch(self._is_partial(), pt.tanh(value), 1.0)

    def forward(self, value: Any, *inputs: Any) -> Any:
        """Coordinates of rows."""
        is_partial, squares = self._is_partial(), value**2
        partial = pt.arcsinh(value / pt.sqrt(pt.switch(is_partial, _times(self.behind, squares), 1.0)))
        return pt.switch(is_partial, partial, 0.5 * pt.log(_times(self.own_row, squares)))

    def log_jac_det(self, value: Any, *inputs: Any) -> Any:
        """Of rows by coordinates."""
        of_partials = -pt.sum(pt.constant(self.behind), axis=1) * self._log_cosh(value)
        of_sds = pt.sum(pt.constant(self.own_row), axis=1) * value
        return pt.sum(pt.switch(self._is_partial(), of_partials, of_sds), axis=-1)

    def _is_partial(self) -> Any:
        return pt.eq(pt.diagonal(pt.constant(self.own_sd)), 0.0)

    def _log_cosh(self, value: Any) -> Any:
        """0 in the places of sds."""
        return pt.switch(self._is_partial(), pt.softplus(2.0 * value) - value - np.log(2.0), 0.0)


def says_where(array: Any) -> bool:
    """Whether an array is one of those by which coordinates know where entries lie, which hold no data."""
    count = _rows(array.shape[-1]) if array.ndim == 2 else 0
    return count > 0 and any(np.array_equal(array, one) for one in vars(SdsAndPartials(count)).values())


def _rows(entries: int) -> int:
    """Of a packed root of so many entries; 0 where there is none."""
    count = round((np.sqrt(8 * entries + 1) - 1) / 2)
    return count if count * (count + 1) // 2 == entries and count <= _MOST_ROWS else 0


def _times(matrix: Any, vector: Any) -> Any:
    return pt.sum(matrix * vector[..., None, :], axis=-1)


def with_sds(model: Any) -> None:
    """Give every root of a covariance these coordinates, in place of PyMC's; it has a size that is declared."""
    for rv in model.free_RVs:
        if type(model.rvs_to_transforms[rv]) is CholeskyCovPacked and (count := _rows(rv.type.shape[-1] or 0)):
            model.rvs_to_transforms[rv] = transform = SdsAndPartials(count)
            model.rvs_to_values[rv].name = f"{rv.name}_{transform.name}__"
