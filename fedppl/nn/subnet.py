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
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedppl.nn.functional import Places, call, factored_on, gradients, hooked, host, parameter_slices, tensor
from fedppl.nn.likelihood import Declared
from fedppl.nn.unit import NetworkUnit, outcomes, outputs
from fedppl.types import Array, DeclarationError, LocalFailure

_NUMBERS = 2**25  # in one array of a chunk
_LOOKED_AT = 3  # rows on which to check that a layer's derivatives factor


class Slopes(NamedTuple):
    """Derivatives of C outputs of b rows with respect to the weights of S; outputs may be in a basis of √Λ."""

    slope: torch.Tensor  # ∂f_c / ∂z_u of the units of linear layers, (b, C, U)
    inputs: torch.Tensor  # of these layers, side by side, with a column of ones for biases, (b, K)
    rest: torch.Tensor | None  # ∂f_c / ∂w of other weights, (b, C, r)
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
    unit: NetworkUnit,
    state: dict[str, Any],
    X: torch.Tensor,
    plan: _Plan,
    y: torch.Tensor | None = None,
    *,
    expected: bool = False,
) -> Slopes:
    """Derivatives of one chunk, in the basis of √Λ with outcomes y, else of the outputs."""
    calls: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(name: str, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        calls[name] = given[0].detach().clone(), output
        return output.clone()  # the next layer may change it in place

    live = {name: value.detach().requires_grad_(name in unit.names) for name, value in state.items()}
    with hooked({name: unit.net.get_submodule(name) for name in plan.layers}, keep), torch.enable_grad():
        output = call(unit.net, live, X).reshape(len(X), -1)
    eye = torch.eye(output.shape[1], dtype=output.dtype, device=output.device).expand(len(X), -1, -1)
    factor = eye if y is None else unit.likelihood.root(output.detach(), y, expected=expected)
    slope = inputs = torch.zeros(len(X), 0, 0, dtype=output.dtype, device=output.device)
    if plan.layers:
        layers = [calls[name] for name in plan.layers]
        rows = [gradients(output, [z for _, z in layers], factor[:, :, c], keep=True) for c in range(factor.shape[2])]
        slope = torch.stack([torch.cat(row, dim=1) for row in rows], dim=1)
        ones = torch.ones(len(X), 1, dtype=output.dtype, device=output.device)
        inputs = torch.cat([part for a, _ in layers for part in (a.detach(), ones)], dim=1)
    rest = _rest(unit, state, X, plan.rest, factor) if plan.rest else None
    return Slopes(slope, inputs, rest, plan)


def rows_of(part: Slopes, size: int) -> torch.Tensor:
    """√Λ J of a chunk, (b, C, s)."""
    like, plan = part.slope if part.rest is None else part.rest, part.plan
    J = like.new_zeros(*like.shape[:2], size)
    if len(plan.places):
        J[:, :, plan.places] = part.slope[:, :, plan.unit] * part.inputs[:, None, plan.column]
    if part.rest is not None:
        J[:, :, plan.rest_places] = part.rest
    return J


def along(part: Slopes, size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function from a change of S (s,) to J times it, (b, C), with J in memory only where it is small."""
    (b, C), units, plan = (part.slope if part.rest is None else part.rest).shape[:2], part.slope.shape[2], part.plan
    if b * C * size <= _NUMBERS // 4:
        J = rows_of(part, size)
        return lambda change: J @ change

    def factored(change: torch.Tensor) -> torch.Tensor:
        product = change.new_zeros(b, C)
        if part.rest is not None:
            product += part.rest @ change[plan.rest_places]
        if len(plan.places):
            across = change.new_zeros(units, part.inputs.shape[1])
            across[plan.unit, plan.column] = change[plan.places]
            product += (part.slope @ (part.inputs @ across.T)[:, :, None])[:, :, 0]
        return product

    return factored


def _rest(
    unit: NetworkUnit, state: dict[str, Any], X: torch.Tensor, places: dict[str, Any], factor: torch.Tensor
) -> torch.Tensor:
    """Derivatives with respect to weights of layers that are not linear, (b, C, r)."""
    chosen, others = {k: state[k] for k in places}, {k: v for k, v in state.items() if k not in places}

    def output(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return call(unit.net, {**values, **others}, x[None]).reshape(-1)

    try:
        jacobian = torch.func.vmap(torch.func.jacrev(output), in_dims=(None, 0))(chosen, X)
    except RuntimeError:  # layers that cannot be batched over parameters, such as recurrent ones
        jacobian = _row_by_row(output, chosen, X)
    parts = [
        jacobian[name].reshape(*jacobian[name].shape[:2], -1)[:, :, torch.from_numpy(at)] for name, at in places.items()
    ]
    return factor.mT @ torch.cat(parts, dim=2).detach()


def _row_by_row(compute: Any, chosen: dict[str, torch.Tensor], X: torch.Tensor) -> dict[str, torch.Tensor]:
    """∂f / ∂w by name, (b, C, ...), for one row and one output at a time."""
    live = {name: value.detach().requires_grad_() for name, value in chosen.items()}
    rows: list[list[tuple[torch.Tensor, ...]]] = []
    with torch.enable_grad():
        for x in X:
            output = compute(live, x)
            rows.append([gradients(value, list(live.values()), keep=True) for value in output])
    return {name: torch.stack([torch.stack([c[i] for c in row]) for row in rows]) for i, name in enumerate(live)}


def _checked_plan(unit: NetworkUnit, state: dict[str, Any], x: torch.Tensor, index: Places) -> _Plan:
    """Factor the layers whose derivatives factor at a few rows: a weight may be used outside its layer's call too."""
    plan = _plan(unit, state, x, index, ())
    outside = []
    for layer in plan.layers:
        dot = f"{layer}." if layer else ""  # the network may be the layer
        names = [name for name in (f"{dot}weight", f"{dot}bias") if name in unit.names]
        slices = parameter_slices(unit.net)
        places = np.concatenate([np.arange(slices[name].start, slices[name].stop) for name in names])
        alone = _plan(unit, state, x, places, ())
        factored = rows_of(slopes(unit, state, x, alone), len(places))
        every = {name: np.arange(state[name].numel()) for name in names}
        eye = torch.eye(factored.shape[1], dtype=factored.dtype, device=factored.device)
        expected = _rest(unit, state, x, every, eye)
        scale = 1.0 + float(expected.abs().max())
        if float((factored - expected).abs().max()) > 1e-3 * scale:
            outside.append(layer)
    return _plan(unit, state, x, index, tuple(outside)) if outside else plan


def _plan(unit: NetworkUnit, state: dict[str, Any], X: torch.Tensor, index: Places, outside: tuple[str, ...]) -> _Plan:
    """Factor the weights of linear layers that are called once, on a matrix."""
    calls: dict[str, list[int]] = {}
    linear = {name: layer for name, layer in unit.net.named_modules() if type(layer) is torch.nn.Linear}

    def count(name: str, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        calls.setdefault(name, []).append(given[0].ndim)

    with hooked(linear, count), torch.no_grad():
        call(unit.net, state, X)
    owners = Counter(id(value) for layer in unit.net.modules() for value in layer.parameters(recurse=False))
    offsets: dict[str, tuple[int, int]] = {}  # by layer, where its units and columns begin
    units, columns, places, rest_places = [], [], [], []
    rest: dict[str, Any] = {}
    slices = parameter_slices(unit.net)
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
            u0, c0 = offsets[owner]
            units.append(u0 + (at // inputs if kind == "weight" else at))
            columns.append(c0 + (at % inputs if kind == "weight" else np.full(len(at), inputs)))
            places.append(inside)
        else:
            rest[name] = at
            rest_places.append(inside)

    def joined(parts: list[Any]) -> Any:
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64)

    return _Plan(tuple(offsets), joined(units), joined(columns), joined(places), rest, joined(rest_places))


# The posterior of a subnetwork's weights ------------------------------------------------------------------------------

_WRONG = 1e-2  # largest relative error of a variance by rounding in the inverse of the whole matrix


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
    diagonal = np.zeros(len(index))
    for part in chunks(unit, w, index, dtype):
        plan = part.plan
        if part.rest is not None:
            diagonal[plan.rest_places] += host((part.rest**2).sum((0, 1)))
        if len(plan.places):
            squares = (part.slope**2).sum(1)  # (b, units)
            products = squares.T @ part.inputs**2
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
    if rule not in ("live", "variance"):
        raise DeclarationError(f'rule={rule!r} must be "live" or "variance".')
    if not 0 < count <= len(variance):
        raise DeclarationError(
            f"a subnetwork of {count} weights cannot be chosen from {len(variance)}; take 1 to all of them."
        )
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
        if part.rest is None:
            by_unit = np.argsort(part.plan.unit, kind="stable")
            _add_pairs(matrix, part, by_unit)
            order = part.plan.places[by_unit]
        else:
            add_square(matrix, rows_of(part, len(index)).flatten(0, 1))
    upper = torch.triu(matrix)
    back = np.argsort(order)
    return np.asarray(host(upper + torch.triu(matrix, 1).T)[np.ix_(back, back)])


def _by_unit(part: Slopes, order: NDArray[np.int64]) -> list[tuple[int, slice, torch.Tensor]]:
    """Weights of each unit, which are adjacent in `order`: (unit, slice of `order`, their inputs (b, k))."""
    units, starts = np.unique(part.plan.unit[order], return_index=True)
    column = part.plan.column[order]
    return [
        (int(unit), slice(int(a), int(b)), part.inputs[:, column[a:b]].contiguous())
        for unit, a, b in zip(units, starts, [*starts[1:], len(order)], strict=True)
    ]


def _add_pairs(matrix: torch.Tensor, part: Slopes, order: NDArray[np.int64]) -> None:
    """Add the upper triangle, a block for every pair of units."""
    groups = _by_unit(part, order)
    for position, (first, here, left) in enumerate(groups):
        weight = (part.slope[:, :, first, None] * part.slope).sum(1)  # w_hh'(n), (b, units)
        turned = left.T.contiguous()
        for second, there, right in groups[position:]:
            matrix[here, there] += turned @ (right * weight[:, second, None])


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
    few = of_few_rows(unit, w, index, variance, dtype)
    if few is not None:
        return Subnetwork(w, index, covariance_of(few))
    device = factored_on(unit.place(dtype))
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
        "the data inform some directions of the subnetwork's weights too much more than others for double precision; "
        "bring inputs to sd 1, or lower prior_variance="
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
        return variances_of(few)
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
            parts.append(_of_independent(part, covariance))
            continue
        if part.rest is not None:
            J = rows_of(part, len(q.places))
            parts.append(J @ covariance @ J.mT)
            continue
        by_unit = np.argsort(part.plan.unit, kind="stable")
        groups, order = _by_unit(part, by_unit), part.plan.places[by_unit]
        sorted_covariance = covariance[order][:, order]
        middle = part.slope.new_zeros(len(part.inputs), part.slope.shape[2], part.slope.shape[2])
        for position, (first, here, left) in enumerate(groups):
            for second, there, right in groups[position:]:
                value = ((left @ sorted_covariance[here, there]) * right).sum(1)
                middle[:, first, second] = value
                middle[:, second, first] = value
        parts.append(part.slope @ middle @ part.slope.mT)
    return host(torch.cat(parts))


def _of_independent(part: Slopes, variance: torch.Tensor) -> torch.Tensor:
    """Covariance of the outputs for independent weights, a sum over layers, (b, C, C)."""
    plan = part.plan
    terms = [] if part.rest is None else [(part.rest * variance[plan.rest_places]) @ part.rest.mT]
    if len(plan.places):
        # Of a unit of a linear layer: Σ_u ∂f_c/∂z_u ∂f_c'/∂z_u Σ_i x_i² Var(w_ui).
        spread = part.slope.new_zeros(part.slope.shape[2], part.inputs.shape[1])
        spread[plan.unit, plan.column] = variance[plan.places]
        terms.append((part.slope * (part.inputs**2 @ spread.T)[:, None]) @ part.slope.mT)
    return torch.stack(terms).sum(0)


_BLOCK = 128  # columns of a product, at least
_POWERS = 20  # iterations of the power method
_LOST = 1e-3  # relative error of the smallest variance by rounding
_FEWER = 3  # ratio of weights to rows above which the products are cheaper


class FewRows(NamedTuple):
    """Factors of the covariance √g (I − Bᵀ B) √g."""

    scale: torch.Tensor  # √g, (s,)
    half: torch.Tensor  # B = L⁻¹ A with L Lᵀ = I + A Aᵀ, (rows, s)


def of_few_rows(unit: NetworkUnit, w: Array, index: Places, variance: Array, dtype: torch.dtype) -> FewRows | None:
    """The posterior of `infer`; None where too many rows make it slow, or rounding errors would be too large."""
    if not len(unit.X) or _FEWER * len(unit.X) * outputs(unit, w, unit.X[:1]).numel() > len(index):
        return None
    device = factored_on(unit.place(dtype))
    scale = tensor(np.sqrt(variance), dtype, device)
    rows = [rows_of(part, len(index)).flatten(0, 1) for part in chunks(unit, w, index, dtype)]
    A = torch.cat(rows).to(device) * scale
    inner = A @ A.T
    inner.diagonal().add_(1.0)
    largest = largest_eigenvalue(inner, torch.ones(len(inner), dtype=dtype, device=device))
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
    """Add ± rowsᵀ rows to the upper triangle, and to a small part of the lower one."""
    size = max(_BLOCK, -(-len(matrix) // 8))
    for start in range(0, len(matrix), size):
        here = slice(start, start + size)
        matrix[here, start:].addmm_(rows[:, here].T, rows[:, start:], alpha=sign)


def largest_eigenvalue(matrix: torch.Tensor, scale: torch.Tensor) -> float:
    """The largest eigenvalue of scale · matrix · scale, or slightly less; at least its largest diagonal entry."""
    vector = torch.zeros_like(scale)
    vector[(matrix.diagonal() * scale**2).argmax()] = 1.0
    size = torch.ones_like(scale[0])
    for _ in range(_POWERS):
        vector = scale * (matrix @ (scale * vector))
        size = torch.linalg.vector_norm(vector)
        vector = vector / size
    return float(size)
