r"""Linearised Laplace approximation on a subnetwork: curvature, selection, posterior and predictive.

.. math:: \hat H_S = \sum_n J_{S,n}^\top \Lambda_n J_{S,n} + \mathrm{diag}(g_S)^{-1}, \qquad
          q(w_S) = N(w_S \mid \hat w_S, \hat H_S^{-1}), \qquad J_n = \partial f(x_n; w) / \partial w

Λ_n is the second derivative of the log likelihood with respect to the outputs, and g the prior's variance. Given the
other weights, this is the exact posterior's Laplace approximation of the *linearised* model, a
generalised linear model in w_S, and the posterior itself where the likelihood is normal.

The Jacobian of all weights is never in memory. A weight from column i to unit h of a linear layer has the derivative
∂f / ∂z_h · x_i, so that H[(h, i), (h', i')] = Σ_n x_i x_i' w_hh'(n) with w_hh'(n) = ∂f/∂z_h Λ_n ∂f/∂z_h'. Weights of
other layers take rows √Λ J in chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedppl.nn.functional import Places, call, gradients, hooked, host, parameter_slices, positions, tensor
from fedppl.nn.likelihood import Declared
from fedppl.nn.unit import NetworkUnit, outcomes, outputs
from fedppl.settings import one_of
from fedppl.types import Array, DeclarationError, LocalFailure, Rng

_NUMBERS = 2**25  # in one array of a chunk
RULES = ("live", "variance")  # by which a subnetwork is chosen
_LOOKED_AT = 3  # rows on which to check that a layer's derivatives factor


class Slopes(NamedTuple):
    """Derivatives of C outputs of b rows with respect to the weights of S; outputs may be in a basis of √Λ."""

    slope: Tensor  # ∂f_c / ∂z_u of the units of linear layers, (b, C, U)
    inputs: Tensor  # of these layers, side by side, with a column of ones for biases, (b, K)
    rest: Tensor  # ∂f_c / ∂w of other weights, (b, C, r)
    plan: _Plan


class _Plan(NamedTuple):
    """How derivatives of the weights of S factor, and which do not."""

    layers: tuple[str, ...]
    unit: NDArray[np.int64]  # of each weight of a linear layer, into `Slopes.slope`
    column: NDArray[np.int64]  # into `Slopes.inputs`
    places: NDArray[np.int64]  # of those weights in S
    rest: dict[str, NDArray[np.int64]]  # positions within other parameters
    rest_places: NDArray[np.int64]  # of these in S


def chunks(
    unit: NetworkUnit, w: Array, index: Places, dtype: torch.dtype, *, X: Array | None = None
) -> Iterator[Slopes]:
    """Derivatives at the client's rows, in the basis of √Λ; at other inputs X, of the outputs themselves."""
    inputs = unit.X if X is None else X
    y, expected = outcomes(unit, dtype) if X is None else None, False
    if y is not None and isinstance(unit.likelihood, Declared):  # the same for all chunks
        expected = unit.likelihood.bends(outputs(unit, w, inputs), y)
    state = unit.state(w, dtype)
    plan = _checked_plan(unit, state, unit.tensor(inputs[:_LOOKED_AT], dtype), index)
    with torch.no_grad():
        wide = call(unit.net, state, unit.tensor(inputs[:1], dtype)).shape[1:].numel()
    rest = sum(unit.net.get_parameter(name).numel() for name in plan.rest)
    size = max(1, min(1024, _NUMBERS // max(1, wide * max(rest, len(index) if plan.rest else 1))))
    for start in range(0, len(inputs), size):
        rows = slice(start, start + size)
        x, y_rows = unit.tensor(inputs[rows], dtype), None if y is None else y[rows]
        yield slopes(unit, state, x, plan, y_rows, expected=expected)


def slopes(
    unit: NetworkUnit, state: dict[str, Any], X: Tensor, plan: _Plan, y: Tensor | None = None, *, expected: bool = False
) -> Slopes:
    """Derivatives of one chunk, in the basis of √Λ with outcomes y, else of the outputs."""
    calls: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        calls[name] = given[0].detach().clone(), output
        return output.clone()  # the next layer may change it in place

    live = {name: value.detach().requires_grad_(name in unit.names) for name, value in state.items()}
    with hooked({name: unit.net.get_submodule(name) for name in plan.layers}, keep), torch.enable_grad():
        output = call(unit.net, live, X).reshape(len(X), -1)
    eye = torch.eye(output.shape[1], dtype=output.dtype, device=output.device).expand(len(X), -1, -1)
    factor = eye if y is None else unit.likelihood.root(output.detach(), y, expected=expected)
    slope = rest = factor.new_zeros(len(X), factor.shape[2], 0)
    inputs = factor.new_zeros(len(X), 0)
    if plan.layers:
        layers = [calls[name] for name in plan.layers]
        rows = [gradients(output, [z for _, z in layers], factor[:, :, c], keep=True) for c in range(factor.shape[2])]
        slope = torch.stack([torch.cat(row, dim=1) for row in rows], dim=1)
        inputs = torch.cat([part for a, _ in layers for part in (a, factor.new_ones(len(X), 1))], dim=1)
    if plan.rest:
        rest = _rest(unit, state, X, plan.rest, factor)
    return Slopes(slope, inputs, rest, plan)


def rows_of(part: Slopes, size: int) -> Tensor:
    """√Λ J of a chunk, (b, C, s)."""
    plan, J = part.plan, part.rest.new_zeros(*part.rest.shape[:2], size)
    J[:, :, plan.places] = part.slope[:, :, plan.unit] * part.inputs[:, None, plan.column]
    J[:, :, plan.rest_places] = part.rest
    return J


def _spread_out(part: Slopes, values: Tensor) -> Tensor:
    """Values of the weights of S (s,) in a matrix of linear layers' units and inputs, (U, K)."""
    matrix = values.new_zeros(part.slope.shape[2], part.inputs.shape[1])
    matrix[part.plan.unit, part.plan.column] = values[part.plan.places]
    return matrix


def along(part: Slopes, change: Tensor) -> Tensor:
    """J times a change of S (s,), (b, C), without J in memory."""
    of_units = part.inputs @ _spread_out(part, change).T
    return part.rest @ change[part.plan.rest_places] + (part.slope @ of_units[:, :, None])[:, :, 0]


def _rest(unit: NetworkUnit, state: dict[str, Any], X: Tensor, places: dict[str, Any], factor: Tensor) -> Tensor:
    """Derivatives with respect to weights of layers that are not linear, (b, C, r)."""
    chosen, others = {k: state[k] for k in places}, {k: v for k, v in state.items() if k not in places}

    def output(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return call(unit.net, {**values, **others}, x[None]).reshape(-1)

    try:
        jacobian = torch.func.vmap(torch.func.jacrev(output), in_dims=(None, 0))(chosen, X)
    except RuntimeError:  # layers that cannot be batched over parameters, such as recurrent ones
        jacobian = _row_by_row(output, chosen, X)
    parts = [
        jacobian[name].reshape(*jacobian[name].shape[:2], -1)[:, :, torch.from_numpy(at)] for name, at in places.items()
    ]
    return factor.mT @ torch.cat(parts, dim=2).detach()


def _row_by_row(compute: Any, chosen: dict[str, Tensor], X: Tensor) -> dict[str, Tensor]:
    """∂f / ∂w by name, (b, C, ...), for one row and one output at a time."""
    live = {name: value.detach().requires_grad_() for name, value in chosen.items()}
    rows: list[list[tuple[Tensor, ...]]] = []
    with torch.enable_grad():
        for x in X:
            output = compute(live, x)
            rows.append([gradients(value, list(live.values()), keep=True) for value in output])
    return {name: torch.stack([torch.stack([c[i] for c in row]) for row in rows]) for i, name in enumerate(live)}


def _checked_plan(unit: NetworkUnit, state: dict[str, Any], x: Tensor, index: Places) -> _Plan:
    """Factor the layers whose derivatives factor at a few rows: a weight may be used outside its layer's call too."""
    plan = _plan(unit, state, x, index, ())
    outside = []
    for layer in plan.layers:
        dot = f"{layer}." if layer else ""  # the network may be the layer
        names = [name for name in (f"{dot}weight", f"{dot}bias") if name in unit.names]
        places = positions(unit.net, names)
        factored = rows_of(slopes(unit, state, x, _plan(unit, state, x, places, ())), len(places))
        every = {name: np.arange(state[name].numel()) for name in names}
        eye = torch.eye(factored.shape[1], dtype=factored.dtype, device=factored.device)
        expected = _rest(unit, state, x, every, eye)
        scale = 1.0 + float(expected.abs().max())
        if float((factored - expected).abs().max()) > 1e-3 * scale:
            outside.append(layer)
    return _plan(unit, state, x, index, tuple(outside)) if outside else plan


def _plan(unit: NetworkUnit, state: dict[str, Any], X: Tensor, index: Places, outside: tuple[str, ...]) -> _Plan:
    """Factor the weights of linear layers that are called once, on a matrix, but for those `outside`."""
    calls: dict[str, list[int]] = {}
    linear = {name: layer for name, layer in unit.net.named_modules() if type(layer) is torch.nn.Linear}

    def count(name: str, given: tuple[Tensor, ...], output: Tensor) -> None:
        calls.setdefault(name, []).append(given[0].ndim)

    with hooked(linear, count), torch.no_grad():
        call(unit.net, state, X)
    owners = Counter(id(value) for layer in unit.net.modules() for value in layer.parameters(recurse=False))
    offsets: dict[str, tuple[int, int]] = {}  # by layer, where its units and columns begin
    factored, rest = [np.zeros((3, 0), dtype=np.int64)], dict[str, NDArray[np.int64]]()
    rest_places, slices = [np.zeros(0, dtype=np.int64)], parameter_slices(unit.net)
    first_unit = first_column = 0
    for name, value in unit.net.named_parameters():
        inside = np.flatnonzero((index >= slices[name].start) & (index < slices[name].stop))
        if not len(inside):
            continue
        at = index[inside] - slices[name].start
        owner, _, kind = name.rpartition(".")
        is_alone = owner not in outside and calls.get(owner) == [2] and owners[id(value)] == 1
        # The owner of an unknown of the likelihood is the network, which may be a linear layer.
        if owner in linear and kind in ("weight", "bias") and is_alone:
            inputs = linear[owner].in_features
            if owner not in offsets:
                offsets[owner] = first_unit, first_column
                first_unit += linear[owner].out_features
                first_column += inputs + 1
            (u0, c0), is_weight = offsets[owner], kind == "weight"
            columns = at % inputs if is_weight else np.full(len(at), inputs)
            factored.append(np.stack([u0 + (at // inputs if is_weight else at), c0 + columns, inside]))
        else:
            rest[name] = at
            rest_places.append(inside)
    units, columns, places = np.concatenate(factored, axis=1)
    return _Plan(tuple(offsets), units, columns, places, rest, np.concatenate(rest_places))


# The posterior of a subnetwork's weights ------------------------------------------------------------------------------

_WRONG = 1e-2  # largest relative error of a variance by rounding in the inverse of the whole matrix


class Subnetwork(NamedTuple):
    """q(w): normal in the weights of a subnetwork, and a point in all others."""

    weights: Array  # ŵ, (d,)
    places: Places  # of S in w, (s,)
    covariance: Array  # of w_S, (s, s), or (s,) where its weights are independent

    def deviations(self, count: int, rng: Rng) -> Array:
        """Draws of w_S − ŵ_S, (count, s)."""
        noise = rng.normal(size=(count, len(self.places)))
        if self.covariance.ndim == 1:
            return np.asarray(noise * np.sqrt(self.covariance))
        return np.asarray(noise @ np.linalg.cholesky(self.covariance).T)


def curvature_diagonal(unit: NetworkUnit, w: Array, index: Places, *, dtype: torch.dtype = torch.float64) -> Array:
    """Diagonal of Jᵀ Λ J at the weights `index` (s,), summed in float64."""
    diagonal = np.zeros(len(index))
    for part in chunks(unit, w, index, dtype):
        plan = part.plan
        diagonal[plan.rest_places] += host((part.rest**2).sum((0, 1)))
        products = (part.slope**2).sum(1).T @ part.inputs**2
        diagonal[plan.places] += host(products[plan.unit, plan.column])
    return diagonal


def select(variance: Array, curvature: Array, count: int, *, rule: str = "live") -> Array:
    r"""Choose a subnetwork by its marginal posterior variances (1 / g + diagonal of JᵀΛJ)⁻¹.

    Positions of `count` weights, in rising order, from the prior's variances g and the diagonal of JᵀΛJ, (r,) each. By
    the rule "live" they are the largest variances among weights that the data inform, those with a curvature beyond
    rounding; by "variance" the largest of all, eq. 14 as published. Where inputs are often 0, this selects weights
    without any information, whose posterior is the prior.

    References
    ----------
    .. [1] Chen et al., FedSI, eqs. 13 and 14.
    """
    one_of("rule", rule, RULES)
    if not 0 < count <= len(variance):
        raise DeclarationError(f"{count} weights cannot be chosen from {len(variance)}; take 1 to all of them.")
    marginal = 1.0 / (1.0 / variance + curvature)
    if rule == "live":
        # Weights without curvature come last, in the order of their variances.
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
        if part.plan.rest:
            add_square(matrix, rows_of(part, len(index)).flatten(0, 1))
            continue
        order, groups = _by_unit(part)
        for position, (first, here, left) in enumerate(groups):  # the upper triangle, a block for every pair of units
            weight = (part.slope[:, :, first, None] * part.slope).sum(1)  # w_hh'(n), (b, units)
            turned = left.T.contiguous()
            for second, there, right in groups[position:]:
                matrix[here, there] += turned @ (right * weight[:, second, None])
    back = np.argsort(order)
    return np.asarray(host(_mirrored(matrix))[np.ix_(back, back)])


def _mirrored(matrix: Tensor) -> Tensor:
    """The symmetric matrix with this upper triangle."""
    return torch.triu(matrix) + torch.triu(matrix, 1).T


def _by_unit(part: Slopes) -> tuple[NDArray[np.int64], list[tuple[int, slice, Tensor]]]:
    """Weights in the order of their units; and of each unit its number, slice of that order, and inputs (b, k)."""
    order = np.argsort(part.plan.unit, kind="stable")
    units, starts = np.unique(part.plan.unit[order], return_index=True)
    column = part.plan.column[order]
    return part.plan.places[order], [
        (int(unit), slice(int(a), int(b)), part.inputs[:, column[a:b]].contiguous())
        for unit, a, b in zip(units, starts, [*starts[1:], len(order)], strict=True)
    ]


def infer(
    unit: NetworkUnit,
    w: Array,
    index: Places,
    variance: Array,
    *,
    dtype: torch.dtype = torch.float64,
    diagonal: bool = False,
) -> Subnetwork:
    """q(w_S) = N(ŵ_S, (JᵀΛJ + diag(1 / g))⁻¹) with prior variances g (s,); with `diagonal`, of the diagonal of JᵀΛJ.

    Where single precision is not enough for the narrowest direction, all is computed in double precision, and where
    that is not, raises `LocalFailure`.
    """
    _require_finite(w)
    if diagonal:
        return Subnetwork(w, index, 1.0 / (1.0 / variance + curvature_diagonal(unit, w, index, dtype=dtype)))
    device = unit.place(torch.float64)  # where matrices are factored: not every torch factors and inverts them on "mps"
    if (few := of_few_rows(unit, w, index, variance, dtype)) is not None:
        scale, half = few
        matrix = torch.eye(len(scale), dtype=dtype, device=device)
        add_square(matrix, half, -1.0)
        return Subnetwork(w, index, host(_mirrored(matrix).mul_(scale).mul_(scale[:, None])))
    matrix = tensor(curvature(unit, w, index, dtype=dtype), dtype, device)
    matrix.diagonal().add_(tensor(1.0 / variance, dtype, device))
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not failed:
        covariance = torch.cholesky_inverse(factor)
        sds = matrix.diagonal().sqrt()  # units in which all weights are comparable
        if torch.finfo(dtype).eps * largest_eigenvalue(matrix, 1 / sds) * largest_eigenvalue(covariance, sds) <= _WRONG:
            return Subnetwork(w, index, host(covariance))
    if dtype != torch.float64:
        return infer(unit, w, index, variance)
    raise LocalFailure(
        "the posterior is too narrow for double precision; bring inputs to sd 1, or lower prior_variance="
    )


def marginals(
    unit: NetworkUnit,
    w: Array,
    index: Places,
    variance: Array,
    *,
    dtype: torch.dtype = torch.float32,
    diagonal: bool = False,
) -> Array:
    """Variances (s,) of what `infer` gives, which cost less than all covariances."""
    if not diagonal and (few := of_few_rows(unit, w, index, variance, dtype)) is not None:
        scale, half = few
        return host(scale**2 * (1.0 - (half**2).sum(0)))
    covariance = infer(unit, w, index, variance, dtype=dtype, diagonal=diagonal).covariance
    return covariance if diagonal else np.diag(covariance)


def chosen(
    unit: NetworkUnit,
    w: Array,
    variance: Array,
    count: int,
    *,
    rule: str,
    diagonal: bool,
    dtype: torch.dtype = torch.float32,
) -> tuple[Places, Array]:
    """Places in w of the weights to infer, `count` by `select` or all by `diagonal`, and their prior variances (s,)."""
    _require_finite(w)
    free = unit.inferable_at
    shared, variance = unit.shared_at[free], variance[free]
    if diagonal:
        return shared, variance
    at = select(variance, curvature_diagonal(unit, w, shared, dtype=dtype), min(count, len(free)), rule=rule)
    return shared[at], variance[at]


def _require_finite(w: Array) -> None:
    if not np.all(np.isfinite(w)):
        raise DeclarationError("the weights are not finite: lower learning_rate=.")


def output_covariance(unit: NetworkUnit, q: Subnetwork, X: Array) -> Array:
    """J_S(x) Cov(w_S) J_S(x)ᵀ for each row of X, (n, C, C)."""
    covariance = unit.tensor(np.asarray(q.covariance), torch.float64)
    parts = []
    for part in chunks(unit, q.weights, q.places, torch.float64, X=X):
        if q.covariance.ndim == 1:
            # Of a unit of a linear layer: Σ_u ∂f_c/∂z_u ∂f_c'/∂z_u Σ_i x_i² Var(w_ui).
            of_units = part.slope * (part.inputs**2 @ _spread_out(part, covariance).T)[:, None]
            of_rest = part.rest * covariance[part.plan.rest_places]
            parts.append(of_rest @ part.rest.mT + of_units @ part.slope.mT)
            continue
        if part.plan.rest:
            J = rows_of(part, len(q.places))
            parts.append(J @ covariance @ J.mT)
            continue
        order, groups = _by_unit(part)
        sorted_covariance = covariance[order][:, order]
        middle = part.slope.new_zeros(len(part.inputs), part.slope.shape[2], part.slope.shape[2])
        for position, (first, here, left) in enumerate(groups):
            for second, there, right in groups[position:]:
                value = ((left @ sorted_covariance[here, there]) * right).sum(1)
                middle[:, first, second] = value
                middle[:, second, first] = value
        parts.append(part.slope @ middle @ part.slope.mT)
    return host(torch.cat(parts))


_BLOCK = 128  # columns of a product, at least
_POWERS = 20  # iterations of the power method
_LOST = 1e-3  # relative error of the smallest variance by rounding
_FEWER = 3  # ratio of weights to rows above which the products are cheaper


def of_few_rows(
    unit: NetworkUnit, w: Array, index: Places, variance: Array, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """Factors √g (s,) and B (rows, s) of the covariance √g (I − Bᵀ B) √g of `infer`.

    With rows A = √Λ J √g it is B = L⁻¹ A with L Lᵀ = I + A Aᵀ. None where too many rows make it slow, or rounding
    errors would be too large.
    """
    if not len(unit.X) or _FEWER * len(unit.X) * outputs(unit, w, unit.X[:1]).numel() > len(index):
        return None
    device = unit.place(torch.float64)
    scale = tensor(np.sqrt(variance), dtype, device)
    rows = [rows_of(part, len(index)).flatten(0, 1) for part in chunks(unit, w, index, dtype)]
    A = torch.cat(rows).to(device) * scale
    inner = A @ A.T
    inner.diagonal().add_(1.0)
    largest = largest_eigenvalue(inner, torch.ones(len(inner), dtype=dtype, device=device))
    if not largest * torch.finfo(dtype).eps <= _LOST:  # the narrowest direction's variance is 1 / largest
        return None
    return scale, torch.linalg.solve_triangular(torch.linalg.cholesky(inner), A, upper=False)


def add_square(matrix: Tensor, rows: Tensor, sign: float = 1.0) -> None:
    """Add ± rowsᵀ rows to the upper triangle, and to a small part of the lower one."""
    size = max(_BLOCK, -(-len(matrix) // 8))
    for start in range(0, len(matrix), size):
        here = slice(start, start + size)
        matrix[here, start:].addmm_(rows[:, here].T, rows[:, start:], alpha=sign)


def largest_eigenvalue(matrix: Tensor, scale: Tensor) -> float:
    """The largest eigenvalue of scale · matrix · scale, or slightly less; at least its largest diagonal entry."""
    vector = torch.zeros_like(scale)
    vector[(matrix.diagonal() * scale**2).argmax()] = 1.0
    size = torch.ones_like(scale[0])
    for _ in range(_POWERS):
        vector = scale * (matrix @ (scale * vector))
        size = torch.linalg.vector_norm(vector)
        vector = vector / size
    return float(size)
