"""Derivatives of a network's outputs, a chunk of rows at a time: factored for linear layers, in full for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedppl.nn.devices import host
from fedppl.nn.functional import Places, call, gradients, parameter_slices, parts_of
from fedppl.nn.unit import NetworkUnit, outcomes
from fedppl.types import Array

_NUMBERS = 2**25  # in one array of a chunk
_LOOKED_AT = 3  # rows, to see whether a layer's derivatives factor


class Slopes(NamedTuple):
    """Derivatives of C outputs of b rows with respect to the weights of S; outputs may stand in a basis of √Λ."""

    slope: torch.Tensor  # ∂f_c / ∂z_u of the units of linear layers, (b, C, U)
    inputs: torch.Tensor  # of those layers, side by side, with a column of ones for biases, (b, K)
    unit: NDArray[np.int64]  # of each weight of a linear layer, into `slope`
    column: NDArray[np.int64]  # into `inputs`
    places: NDArray[np.int64]  # of those weights in S
    rest: torch.Tensor | None  # ∂f_c / ∂w of the others, (b, C, r)
    rest_places: NDArray[np.int64]


class _Plan(NamedTuple):
    """Which weights of S are factored, and how."""

    layers: tuple[str, ...]
    unit: NDArray[np.int64]
    column: NDArray[np.int64]
    places: NDArray[np.int64]
    rest: dict[str, NDArray[np.int64]]  # positions within other parameters
    rest_places: NDArray[np.int64]


def evaluate(unit: NetworkUnit, w: Array, X: Array, dtype: torch.dtype = torch.float64) -> Array:
    """f(X; w), (n, C)."""
    with torch.no_grad():
        net, state = unit.net, unit.state(w, dtype)
        found = [host(call(net, state, unit.tensor(X[rows], dtype))) for rows in parts_of(net, X.shape)]
    return np.concatenate(found)


def chunks(
    unit: NetworkUnit, w: Array, index: Places, dtype: torch.dtype, *, X: Array | None = None
) -> Iterator[Slopes]:
    """Derivatives at the client's rows, in the basis of √Λ; or those of the outputs themselves at other inputs."""
    inputs = unit.X if X is None else X
    y, expected = outcomes(unit, dtype) if X is None else None, False
    if y is not None and unit.likelihood.may_bend:  # for all chunks alike
        expected = unit.likelihood.bends(torch.from_numpy(evaluate(unit, w, inputs)), y)
    state = unit.state(w, dtype)
    plan = _checked_plan(unit, state, unit.tensor(inputs[:_LOOKED_AT], dtype), index)
    with torch.no_grad():
        wide = call(unit.net, state, unit.tensor(inputs[:1], dtype)).shape[1:].numel()
    rest = sum(unit.net.get_parameter(name).numel() for name in plan.rest)
    size = max(1, min(1024, _NUMBERS // max(1, wide * max(rest, len(index) if plan.rest else 1))))
    for start in range(0, len(inputs), size):
        rows = slice(start, start + size)
        x, told = unit.tensor(inputs[rows], dtype), None if y is None else y[rows]
        yield slopes(unit, state, x, plan, told, expected=expected)


def slopes(
    unit: NetworkUnit,
    state: dict[str, Any],
    X: torch.Tensor,
    plan: _Plan,
    y: torch.Tensor | None = None,
    *,
    expected: bool = False,
) -> Slopes:
    """Derivatives of one chunk: in the basis of √Λ where its outcomes are given, else of the outputs."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(name: str, given: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        seen[name] = given.detach().clone(), output
        return output.clone()  # what comes next may change it in place

    hooks = [
        unit.net.get_submodule(name).register_forward_hook(
            lambda module, given, output, name=name: keep(name, given[0], output)
        )
        for name in plan.layers
    ]
    live = {name: value.detach().requires_grad_(name in unit.names) for name, value in state.items()}
    try:
        with torch.enable_grad():
            output = call(unit.net, live, X)
            output = output.reshape(len(X), -1)
    finally:
        for hook in hooks:
            hook.remove()
    eye = torch.eye(output.shape[1], dtype=output.dtype, device=output.device).expand(len(X), -1, -1)
    factor = eye if y is None else unit.likelihood.root(output.detach(), y, expected=expected)
    slope = inputs = torch.zeros(len(X), 0, 0, dtype=output.dtype, device=output.device)
    if plan.layers:
        layers = [seen[name] for name in plan.layers]
        rows = [gradients(output, [z for _, z in layers], factor[:, :, c], keep=True) for c in range(factor.shape[2])]
        slope = torch.stack([torch.cat(row, dim=1) for row in rows], dim=1)
        one = torch.ones(len(X), 1, dtype=output.dtype, device=output.device)
        inputs = torch.cat([part for a, _ in layers for part in (a.detach(), one)], dim=1)
    rest = _rest(unit, state, X, plan.rest, factor) if plan.rest else None
    return Slopes(slope, inputs, plan.unit, plan.column, plan.places, rest, plan.rest_places)


def rows_of(part: Slopes, size: int, *, flat: bool = True) -> torch.Tensor:
    """√Λ J of a chunk, (b C, s), or (b, C, s)."""
    shown = part.slope if part.rest is None else part.rest
    b, C = shown.shape[:2]
    J = torch.zeros(b, C, size, dtype=shown.dtype, device=shown.device)
    if len(part.places):
        J[:, :, part.places] = part.slope[:, :, part.unit] * part.inputs[:, None, part.column]
    if part.rest is not None:
        J[:, :, part.rest_places] = part.rest
    return J.reshape(-1, size) if flat else J


def along(part: Slopes, size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Function from a change of S (s,) to J times it, (b, C); J itself is made where it is small."""
    b, C, units = part.slope.shape if part.rest is None else (*part.rest.shape[:2], part.slope.shape[2])
    if b * C * size <= _NUMBERS // 4:
        J = rows_of(part, size, flat=False)
        return lambda change: J @ change

    def factored(change: torch.Tensor) -> torch.Tensor:
        found = change.new_zeros(b, C)
        if part.rest is not None:
            found += part.rest @ change[part.rest_places]
        if len(part.places):
            across = change.new_zeros(units, part.inputs.shape[1])
            across[part.unit, part.column] = change[part.places]
            found += (part.slope @ (part.inputs @ across.T)[:, :, None])[:, :, 0]
        return found

    return factored


def _rest(
    unit: NetworkUnit, state: dict[str, Any], X: torch.Tensor, wanted: dict[str, Any], factor: torch.Tensor
) -> torch.Tensor:
    """Derivatives with respect to weights of layers that are not linear, (b, C, r)."""
    chosen, others = {k: state[k] for k in wanted}, {k: v for k, v in state.items() if k not in wanted}

    def one(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return call(unit.net, {**values, **others}, x[None]).reshape(-1)

    try:
        jacobian = torch.func.vmap(torch.func.jacrev(one), in_dims=(None, 0))(chosen, X)
    except RuntimeError:  # recurrent layers, for one, cannot be batched over parameters: a row and an output at a time
        jacobian = _row_by_row(one, chosen, X)
    parts = [
        jacobian[name].reshape(*jacobian[name].shape[:2], -1)[:, :, torch.from_numpy(at)] for name, at in wanted.items()
    ]
    return factor.mT @ torch.cat(parts, dim=2).detach()


def _row_by_row(one: Any, chosen: dict[str, torch.Tensor], X: torch.Tensor) -> dict[str, torch.Tensor]:
    """∂f / ∂w by name, (b, C, ...)."""
    live = {name: value.detach().requires_grad_() for name, value in chosen.items()}
    rows: list[list[tuple[torch.Tensor, ...]]] = []
    with torch.enable_grad():
        for x in X:
            output = one(live, x)
            rows.append([gradients(value, list(live.values()), keep=True) for value in output])
    return {name: torch.stack([torch.stack([c[i] for c in row]) for row in rows]) for i, name in enumerate(live)}


def _checked_plan(unit: NetworkUnit, state: dict[str, Any], x: torch.Tensor, index: Places) -> _Plan:
    """Factor what derivatives at a few rows say can be factored: a weight may also be used outside its layer's call."""
    plan = _plan(unit, state, x, index, ())
    outside = []
    for layer in plan.layers:
        dot = f"{layer}." if layer else ""  # the network may be the layer
        names = [name for name in (f"{dot}weight", f"{dot}bias") if name in unit.names]
        slices = parameter_slices(unit.net)
        places = np.concatenate([np.arange(slices[name].start, slices[name].stop) for name in names])
        alone = _plan(unit, state, x, places, ())
        factored = rows_of(slopes(unit, state, x, alone), len(places), flat=False)
        every = {name: np.arange(state[name].numel()) for name in names}
        eye = torch.eye(factored.shape[1], dtype=factored.dtype, device=factored.device)
        wanted = _rest(unit, state, x, every, eye)
        scale = 1.0 + float(wanted.abs().max())
        if float((factored - wanted).abs().max()) > 1e-3 * scale:
            outside.append(layer)
    return _plan(unit, state, x, index, tuple(outside)) if outside else plan


def _plan(unit: NetworkUnit, state: dict[str, Any], X: torch.Tensor, index: Places, outside: tuple[str, ...]) -> _Plan:
    """Weights of linear layers that are called once, on a matrix, are factored."""
    calls: dict[str, list[int]] = {}
    linear = {name: layer for name, layer in unit.net.named_modules() if type(layer) is torch.nn.Linear}
    hooks = [
        layer.register_forward_hook(
            lambda m, given, output, name=name: calls.setdefault(name, []).append(given[0].ndim)
        )
        for name, layer in linear.items()
    ]
    try:
        with torch.no_grad():
            call(unit.net, state, X)
    finally:
        for hook in hooks:
            hook.remove()
    owners: dict[int, int] = {}
    for _, layer in unit.net.named_modules():
        for value in layer.parameters(recurse=False):
            owners[id(value)] = owners.get(id(value), 0) + 1
    layers: list[str] = []
    offsets: list[tuple[int, int]] = []
    units, columns, places = [], [], []
    rest: dict[str, Any] = {}
    rest_places = []
    slices = parameter_slices(unit.net)
    first_unit = first_column = 0
    for name, value in unit.net.named_parameters():
        inside = np.flatnonzero((index >= slices[name].start) & (index < slices[name].stop))
        if not len(inside):
            continue
        at = index[inside] - slices[name].start
        owner, _, kind = name.rpartition(".")
        is_alone = owner not in outside and calls.get(owner) == [2] and owners[id(value)] == 1
        # An unknown of the likelihood has the network for its owner, which may be a linear layer.
        if owner in linear and kind in ("weight", "bias") and is_alone:
            if owner not in layers:
                layers.append(owner)
                offsets.append((first_unit, first_column))
                first_unit += linear[owner].out_features
                first_column += linear[owner].in_features + 1
            (u0, c0), inputs = offsets[layers.index(owner)], linear[owner].in_features
            units.append(u0 + (at // inputs if kind == "weight" else at))
            columns.append(c0 + (at % inputs if kind == "weight" else np.full(len(at), inputs)))
            places.append(inside)
        else:
            rest[name] = at
            rest_places.append(inside)

    def joined(parts: list[Any]) -> Any:
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64)

    return _Plan(tuple(layers), joined(units), joined(columns), joined(places), rest, joined(rest_places))
