r"""Linearised Laplace approximation on a subnetwork: curvature, selection, posterior and predictive.

.. math:: \hat H_S = \sum_n J_{S,n}^\top \Lambda_n J_{S,n} + \mathrm{diag}(g_S)^{-1}, \qquad
          q(w_S) = N(w_S \mid \hat w_S, \hat H_S^{-1}), \qquad J_n = \partial f(x_n; w) / \partial w

Λ_n is the second derivative of the log likelihood with respect to the outputs, and g the prior's variance. With the
other weights where they are, this is the exact posterior's Laplace approximation of the *linearised* model, a
generalised linear model in w_S, and the posterior itself where the likelihood is normal.

No Jacobian of all weights stands in memory. A weight from column i to unit h of a linear layer has the derivative
∂f / ∂z_h · x_i, so that H[(h, i), (h', i')] = Σ_n x_i x_i' w_hh'(n) with w_hh'(n) = ∂f/∂z_h Λ_n ∂f/∂z_h'. Weights of
other layers take rows √Λ J in chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedppl.nn._slopes import Slopes, chunks, evaluate, rows_of
from fedppl.nn.devices import factored_on, host, tensor
from fedppl.nn.functional import Places
from fedppl.nn.unit import NetworkUnit
from fedppl.types import Array, DeclarationError, LocalFailure

_WRONG = 1e-2  # of a variance, by rounding in the inverse of the whole matrix


class Subnetwork(NamedTuple):
    """q(w): normal in the weights of a subnetwork, and a point in all others."""

    weights: Array  # ŵ, (d,)
    places: Places  # of S in w, (s,)
    covariance: Array  # of w_S, (s, s), or (s,) where its weights are independent

    def deviations(self, count: int, rng: np.random.Generator) -> Array:
        """Draws of w_S − ŵ_S, (count, s)."""
        noise = rng.normal(size=(count, len(self.places)))
        if self.covariance.ndim == 1:
            return np.asarray(noise * np.sqrt(self.covariance))
        return np.asarray(noise @ np.linalg.cholesky(self.covariance).T)


def curvature_diagonal(unit: NetworkUnit, w: Array, index: Places, *, dtype: torch.dtype = torch.float64) -> Array:
    """Diagonal of Jᵀ Λ J at the weights `index` (s,), summed in float64."""
    found = np.zeros(len(index))
    for part in chunks(unit, w, index, dtype):
        if part.rest is not None:
            found[part.rest_places] += host((part.rest**2).sum((0, 1)))
        if len(part.places):
            squares = (part.slope**2).sum(1)  # (b, units)
            everything = squares.T @ part.inputs**2
            found[part.places] += host(everything[part.unit, part.column])
    return found


def select(variance: Array, curvature: Array, count: int, *, rule: str = "live") -> Array:
    r"""Choose a subnetwork by its marginal posterior variances (1 / g + diagonal of JᵀΛJ)⁻¹.

    Positions of `count` weights, in rising order, from the prior's variances g and the diagonal of JᵀΛJ, (r,) each. By
    the rule "live" they are the largest variances among weights that the data speak about, those with a curvature
    beyond rounding; by "variance" the largest of all, eq. 14 as it reads. Where inputs are often 0, that picks weights
    that the data never touch, and the posterior is the prior.

    References
    ----------
    .. [1] Chen et al., FedSI, eqs. 13 and 14.
    """
    if rule not in ("live", "variance"):
        raise DeclarationError(f'rule={rule!r} must be "live" or "variance".')
    if not 0 < count <= len(variance):
        raise DeclarationError(
            f"a subnetwork of {count} weights cannot be chosen from {len(variance)}; take 1 to all of them."
        )
    marginal = 1.0 / (1.0 / variance + curvature)
    if rule == "live":
        # Weights that nothing depends on come last, in the order of their variances.
        live = curvature > 1e-12 * max(float(curvature.max(initial=0.0)), np.finfo(float).tiny)
        order = np.lexsort((-marginal, ~live))
    else:
        order = np.argsort(-marginal, kind="stable")
    return np.sort(order[:count])


def curvature(unit: NetworkUnit, w: Array, index: Places, *, dtype: torch.dtype = torch.float64) -> Array:
    """JᵀΛJ of the weights `index` (s,), (s, s)."""
    matrix = torch.zeros(len(index), len(index), dtype=dtype, device=unit.place(dtype))
    order = np.arange(len(index))
    for part in chunks(unit, w, index, dtype):
        if part.rest is None:
            by_unit = np.argsort(part.unit, kind="stable")
            _add_pairs(matrix, part, by_unit)
            order = part.places[by_unit]
        else:
            add_square(matrix, rows_of(part, len(index)))
    upper = torch.triu(matrix)
    back = np.argsort(order)
    return np.asarray(host(upper + torch.triu(matrix, 1).T)[np.ix_(back, back)])


def _by_unit(part: Slopes, order: NDArray[np.int64]) -> list[tuple[int, slice, torch.Tensor]]:
    """Weights of one unit lie together in `order`: (unit, where there, their inputs (b, k))."""
    units, starts = np.unique(part.unit[order], return_index=True)
    column = part.column[order]
    return [
        (int(unit), slice(int(a), int(b)), part.inputs[:, column[a:b]].contiguous())
        for unit, a, b in zip(units, starts, [*starts[1:], len(order)], strict=True)
    ]


def _add_pairs(matrix: torch.Tensor, part: Slopes, order: NDArray[np.int64]) -> None:
    """Add the upper triangle, a block for every pair of units."""
    groups = _by_unit(part, order)
    for position, (one, here, left) in enumerate(groups):
        weight = (part.slope[:, :, one, None] * part.slope).sum(1)  # w_hh'(n), (b, units)
        turned = left.T.contiguous()
        for other, there, right in groups[position:]:
            matrix[here, there] += turned @ (right * weight[:, other, None])


def infer(
    unit: NetworkUnit,
    w: Array,
    index: Places,
    variance: Array,
    *,
    dtype: torch.dtype = torch.float64,
    diagonal: bool = False,
) -> Subnetwork:
    """q(w_S) = N(ŵ_S, (JᵀΛJ + diag(1 / g))⁻¹) with prior variances g (s,); with a diagonal JᵀΛJ on request.

    Where the data narrow a direction so far that single precision loses it, all is computed in double precision.

    Raises `LocalFailure` where that loses it too, and `DeclarationError` for weights that are not finite.
    """
    _require_finite(w)
    if diagonal:
        found = 1.0 / (1.0 / variance + curvature_diagonal(unit, w, index, dtype=dtype))
        return Subnetwork(w, index, found)
    few = of_few_rows(unit, w, index, variance, dtype)
    if few is not None:
        return Subnetwork(w, index, covariance_of(few))
    there = factored_on(unit.place(dtype))
    matrix = tensor(curvature(unit, w, index, dtype=dtype), dtype, there)
    matrix.diagonal().add_(tensor(1.0 / variance, dtype, there))
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not failed:
        covariance = torch.cholesky_inverse(factor)
        sds = matrix.diagonal().sqrt()  # units in which all weights are alike
        if torch.finfo(dtype).eps * largest_eigenvalue(matrix, 1 / sds) * largest_eigenvalue(covariance, sds) <= _WRONG:
            return Subnetwork(w, index, host(covariance))
    if dtype != torch.float64:
        return infer(unit, w, index, variance)
    raise LocalFailure(
        "the data tell some directions of the subnetwork's weights too much better than others for double precision; "
        "bring inputs to sd 1, or lower prior_variance="
    )


def inferred(
    unit: NetworkUnit,
    w: Array,
    variance: Array,
    count: int,
    *,
    rule: str,
    diagonal: bool,
    dtype: torch.dtype = torch.float32,
) -> Subnetwork:
    """Choose `count` of the shared weights, whose prior variances (m,) are given, and infer their posterior at w.

    With `diagonal`, all shared weights, with the diagonal of the curvature alone.
    """
    index, variance = _chosen(unit, w, variance, count, rule, diagonal, dtype)
    return infer(unit, w, index, variance, dtype=dtype, diagonal=diagonal)


def marginals(
    unit: NetworkUnit,
    w: Array,
    variance: Array,
    count: int,
    *,
    rule: str,
    diagonal: bool,
    dtype: torch.dtype = torch.float32,
) -> tuple[Places, Array]:
    """Places of the same weights in w and their variances (s,), which cost less than how they are correlated."""
    index, variance = _chosen(unit, w, variance, count, rule, diagonal, dtype)
    if not diagonal:
        few = of_few_rows(unit, w, index, variance, dtype)
        if few is not None:
            return index, variances_of(few)
    covariance = infer(unit, w, index, variance, dtype=dtype, diagonal=diagonal).covariance
    return index, covariance if diagonal else np.diag(covariance)


def _chosen(
    unit: NetworkUnit, w: Array, variance: Array, count: int, rule: str, diagonal: bool, dtype: torch.dtype
) -> tuple[Places, Array]:
    """Places in w of the weights that are inferred, and their prior variances."""
    _require_finite(w)
    free = unit.inferable_at
    shared, variance = unit.shared_at[free], variance[free]
    if diagonal:
        return shared, variance
    count = min(count, len(free))
    chosen = select(variance, curvature_diagonal(unit, w, shared, dtype=dtype), count, rule=rule)
    return shared[chosen], variance[chosen]


def _require_finite(w: Array) -> None:
    if not np.all(np.isfinite(w)):
        raise DeclarationError("the weights are not finite: lower learning_rate=.")


def outputs(unit: NetworkUnit, w: Array, X: Array) -> Array:
    """f(X; w) in float64, (n, C)."""
    return evaluate(unit, w, X)


def output_covariance(unit: NetworkUnit, q: Subnetwork, X: Array, *, dtype: torch.dtype = torch.float64) -> Array:
    """J_S(x) Cov(w_S) J_S(x)ᵀ for each row of X, (n, C, C)."""
    covariance = unit.tensor(np.asarray(q.covariance), dtype)
    found = []
    for part in chunks(unit, q.weights, q.places, dtype, X=X):
        if q.covariance.ndim == 1:
            found.append(_of_independent(part, covariance))
            continue
        if part.rest is not None:
            J = rows_of(part, len(q.places), flat=False)
            found.append(J @ covariance @ J.mT)
            continue
        by_unit = np.argsort(part.unit, kind="stable")
        groups, order = _by_unit(part, by_unit), part.places[by_unit]
        sorted_covariance = covariance[order][:, order]
        middle = part.slope.new_zeros(len(part.inputs), part.slope.shape[2], part.slope.shape[2])
        for position, (one, here, left) in enumerate(groups):
            for other, there, right in groups[position:]:
                value = ((left @ sorted_covariance[here, there]) * right).sum(1)
                middle[:, one, other] = value
                middle[:, other, one] = value
        found.append(part.slope @ middle @ part.slope.mT)
    return host(torch.cat(found))


def _of_independent(part: Slopes, variance: torch.Tensor) -> torch.Tensor:
    """Covariance of the outputs where weights are independent: layers add up, (b, C, C)."""
    found = [] if part.rest is None else [(part.rest * variance[part.rest_places]) @ part.rest.mT]
    if len(part.places):
        # Of a unit of a linear layer: Σ_u ∂f_c/∂z_u ∂f_c'/∂z_u Σ_i x_i² Var(w_ui).
        spread = part.slope.new_zeros(part.slope.shape[2], part.inputs.shape[1])
        spread[part.unit, part.column] = variance[part.places]
        found.append((part.slope * (part.inputs**2 @ spread.T)[:, None]) @ part.slope.mT)
    return torch.stack(found).sum(0)


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
