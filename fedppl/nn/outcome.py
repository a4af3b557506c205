"""The likelihood of a declared network's outcome, read from its model, and the data that it depends on."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytensor.tensor as pt
import torch
from pytensor.compile.mode import Mode
from pytensor.gradient import NullTypeGradError
from pytensor.graph.basic import Constant
from pytensor.graph.replace import clone_replace, vectorize_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.special import Softmax
from pytensor.tensor.subtensor import Subtensor

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.client import ClientModel
from fedppl.nn.functional import host, kind_of, network_nodes, one_call, parameter_slices, placed, tensor
from fedppl.nn.likelihood import Categorical, Declared, Drawn, Likelihood, Normal, Read, drawn
from fedppl.nn.op import called
from fedppl.types import DeclarationError, Variable

CONTRACT = (
    "a network's client declares weights = fedppl.nn.parameters(net), output = fedppl.nn.module(net, weights, X), "
    "and one outcome of that output, such as pm.Categorical(logit_p=output) or pm.Normal(output, constant)"
)
_MOVED = (DimShuffle, Reshape, SpecifyShape, Subtensor)  # operations that only rearrange numbers


class Outcome(NamedTuple):
    """A likelihood, and the model's variables that it depends on."""

    likelihood: Likelihood
    unknowns: tuple[Variable, ...]  # free variables of the likelihood
    variables: tuple[Any, ...]  # whose values are the outcomes and other data that it reads


def outcome_of(client: ClientModel, node: Any, values_of: Mapping[Any, Any], who: str) -> Outcome:
    """Read the one observed variable, where `node` evaluates the network; `values_of` has containers' values.

    Raises `DeclarationError`, which names the client `who`, where outcomes do not depend on the output row by row.
    """
    parts = client.template.parts
    observed = parts.model.observed_RVs[0]
    slices = parameter_slices(node.op.net)
    unknowns = tuple(v for v in (*client.layout.variables, *client.local) if v.name not in slices)
    row_shape = _row_shape(client, node)
    _require_numbers_of_classes(observed, who)
    closed = None if unknowns else _closed(observed, node, row_shape)
    if closed is not None:
        return Outcome(closed, (), (parts.model.rvs_to_values[observed],))
    if not parts.data:
        raise DeclarationError(
            f"{who}: the likelihood of {observed.name!r} is computed row by row, and the model holds its data as "
            'constants; put them into pm.Data containers that are named as the builder\'s arguments, pm.Data("y", y).'
        )
    density, output = _without_network(parts, observed, who)
    values = {rv.name: parts.model.rvs_to_values[rv] for rv in (*parts.shared, *parts.local)}
    above = set(ancestors([density]))
    if idle := [v.name for v in unknowns if values[v.name] not in above]:
        raise DeclarationError(
            f"{who}: free variables {idle} are neither weights of the network nor part of the likelihood of "
            f"{observed.name!r}; {CONTRACT}."
        )
    if used := [name for name in slices if values[name] in above]:
        raise DeclarationError(
            f"{who}: the likelihood of {observed.name!r} reads the weights {used} beside the network's output; "
            f"{CONTRACT}."
        )
    read = _read_by(parts, values_of, density)
    starts = {values[v.name]: v.shape for v in unknowns}
    free = {rv: parts.model.rvs_to_values[rv] for rv in (*parts.shared, *parts.local)}
    shapes = {rv: starts[value] for rv, value in free.items() if value in starts}
    outcomes = {v: variable.shape for v, variable in read.items() if variable.is_outcome}
    if twice := [v.name for v in outcomes if v in _graph.values_read(observed.owner.inputs)]:
        raise DeclarationError(
            f"{who}: {twice} are observed, and the distribution of {observed.name!r} has them among its parameters; "
            "give what it depends on in a container of its own."
        )
    draws = functools.partial(drawn, parts, row_shape, shapes, outcomes)
    likelihood = _declared(parts, density, output, row_shape, read, starts, draws, who)
    return Outcome(likelihood, unknowns, tuple(read))


def _require_numbers_of_classes(observed: Any, who: str) -> None:
    """Refuse classes of more dimensions than their probabilities, which would broadcast where rows are as many."""
    if kind_of(observed) != "categorical":
        return
    p = observed.owner.op.dist_params(observed.owner)[-1].owner
    if p is not None and isinstance(p.op, DimShuffle) and "x" in p.op.new_order[:-1]:
        raise DeclarationError(
            f"{who}: {observed.name!r} has {observed.type.ndim} dimensions, more than its probabilities leave: a class "
            "is a number from 0, one a row. Pass y.argmax(axis=1) where y holds columns of 0 and 1."
        )


def _without_network(parts: _graph.Parts, observed: Any, who: str) -> tuple[Any, Any]:
    """The outcome's log density as a graph of a variable in place of the network's output."""
    (density,) = parts.model.logp(vars=[observed], sum=False)
    calls = one_call([density])
    if not calls:
        raise DeclarationError(f"{who}: no network stands above {observed.name!r}; {CONTRACT}.")
    output = pt.tensor(dtype=calls[0].type.dtype, shape=calls[0].type.shape)
    (density,) = clone_replace([density], dict.fromkeys(calls, output))
    if network_nodes([density]):
        raise DeclarationError(
            f"{who}: the network stands more than once above {observed.name!r}; let one module make all of the output."
        )
    return density, output


def _closed(observed: Any, node: Any, row_shape: tuple[int, ...]) -> Likelihood | None:
    """The likelihoods in closed form, where the distribution's parameter is the output and nothing else."""
    kind, parameters, output = kind_of(observed), observed.owner.op.dist_params(observed.owner), node.outputs[0]
    if kind == "categorical":
        p = parameters[-1].owner
        is_softmax = p is not None and isinstance(p.op, Softmax) and p.inputs[0] is output and len(row_shape) == 1
        return Categorical() if is_softmax and _is_last(p.op.axis, output.type.ndim) else None
    if kind == "normal" and (parameters[0] is output or (row_shape == (1,) and _is_column(parameters[0], output))):
        sd = _constant_sd(parameters[1])
        return None if sd is None else Normal(sd)
    return None


def _is_last(axis: Any, ndim: int) -> bool:
    """Whether an operation is along the last axis: a number, or from PyTensor 3 on a tuple of them."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    return len(axes) == 1 and axes[0] in (-1, ndim - 1)


def _is_column(variable: Any, output: Any) -> bool:
    """Whether a variable is the only column of the output, ``f[:, 0]`` or ``f.squeeze()``."""
    node = variable
    while node is not output:
        if node.owner is None or not isinstance(node.owner.op, _MOVED):
            return False
        node = node.owner.inputs[0]
    for rows in (1, 3):
        values = np.arange(1.0, rows + 1.0)[:, None]
        (moved,) = clone_replace([variable], {output: pt.constant(values)}, rebuild_strict=False)
        if not _is_constant(moved):  # an index may be a client's own
            return False
        column = np.asarray(moved.eval(mode=interpreted.PYTHON_MODE))
        if column.shape != (rows,) or not np.array_equal(column, values[:, 0]):
            return False
    return True


def _constant_sd(value: Any) -> float | None:
    """An sd that is one number at all clients."""
    if not _is_constant(value):
        return None
    values = np.unique(np.asarray(value.eval(), dtype=float))
    return float(values[0]) if len(values) == 1 else None


def _is_constant(value: Any) -> bool:
    """Whether it depends on no variable and no data."""
    return all(v.owner is not None or isinstance(v, Constant) for v in ancestors([value]))


def _row_shape(client: ClientModel, node: Any) -> tuple[int, ...]:
    """Shape of a row of the network's output."""
    net, place = node.op.net, placed(node.op.device, torch.float64)
    replace, inputs = _graph._inputs_for(client.template.parts)
    (X_in,) = clone_replace([node.inputs[1]], replace)
    X = interpreted.python_function([*inputs, *client.template.graph.inputs[len(inputs) :]], X_in)(*client.inputs)
    with torch.no_grad():
        flat = np.concatenate([host(value).ravel() for value in net.parameters()])
        rows = tensor(np.asarray(X)[:2], torch.float64, place)
        output = called(net, tensor(flat, torch.float64, place), rows)
    return tuple(output.shape[1:])


T = TypeVar("T")
# Parameters outside their domain have density 0, and raise no exception within a search.
_MODE = Mode(linker="py", optimizer="fast_compile").including("local_check_parameter_to_ninf_switch")


def _read_by(parts: _graph.Parts, containers: Mapping[Any, Any], density: Any) -> dict[Any, Read]:
    """Variables that the outcome's density reads beside network and unknowns, with a description of each.

    `containers` have their values; an outcome that is no data is a constant of the model.
    """
    observed = parts.model.observed_RVs[0]
    value = parts.model.rvs_to_values[observed]
    above = set(ancestors([density]))
    values = {v: np.asarray(array) for v, array in containers.items() if v in above}
    if isinstance(value, Constant):
        values[value] = np.asarray(value.data)
    outcomes = {value, *_graph.observed_through(parts)}
    return {
        v: Read(v.name or observed.name, array.shape[1:], str(array.dtype), v in outcomes, array.ndim > 0)
        for v, array in values.items()
    }


def _declared(
    parts: _graph.Parts,
    density: Any,
    output: Any,
    row_shape: tuple[int, ...],
    read: Mapping[Any, Read],
    unknowns: Mapping[Any, tuple[int, ...]],
    draws: Callable[[], Drawn],
    who: str,
) -> Declared:
    """Build the functions of a likelihood from the `density` of the outcome, not summed.

    The density is a graph of the network's `output`, whose rows have the shape `row_shape`, of the variables in `read`,
    in the order of the columns, and of value variables of its `unknowns`, with their shapes; `draws` builds functions
    that draw outcomes. Raises `DeclarationError` where a row cannot be computed by itself, or has no slopes.
    """
    observed = parts.model.observed_RVs[0]
    f, e, y = pt.vector("f"), pt.vector("e"), pt.vector("y")
    replace: dict[Any, Any] = {output: f.reshape((1, *row_shape)), **_lengths_of_one(parts)}
    first = 0
    for value, shape in unknowns.items():
        size = int(np.prod(shape, dtype=int))
        replace[value] = e[first : first + size].reshape(shape)
        first += size
    column = 0
    for value, variable in read.items():
        piece = y[column : column + variable.width].reshape((1, *variable.shape)) if variable.by_row else y[column]
        replace[value] = pt.cast(piece, value.type.dtype)
        column += variable.width
    try:
        (row,) = clone_replace([-density.sum()], replace, rebuild_strict=False)
        extended, columns = pt.matrix("both"), pt.matrix("columns")
        count = int(np.prod(row_shape, dtype=int))
        (losses,) = vectorize_graph([row], {f: extended[:, :count], e: extended[:, count:], y: columns})
        losses = pt.broadcast_to(losses, (extended.shape[0],))
        slopes = pt.grad(losses.sum(), extended)
        rows = [pt.grad(slopes[:, c].sum(), extended, disconnected_inputs="ignore") for c in range(count)]
        curved = pt.stack([slope[:, :count] for slope in rows], axis=1)
        first_order = interpreted.python_function([extended, columns], [losses, slopes], _MODE)
    except (NotImplementedError, NullTypeGradError, ValueError, TypeError, AssertionError) as error:
        raise DeclarationError(
            f"{who}: the likelihood of {observed.name!r} cannot be computed row by row ({type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]}). For other models use fedppl.EP(local=fedppl.NUTS())."
        ) from error
    curvatures = _built_once(lambda: interpreted.python_function([extended, columns], curved, _MODE))
    return Declared(
        kind_of(observed),
        count,
        tuple(read.values()),
        first_order,
        lambda output, y: np.asarray(curvatures()(output, y)),
        _built_once(draws),
    )


def _built_once(build: Callable[[], T]) -> Callable[[], T]:
    """A function that builds its value at the first call, once for all threads: not every algorithm needs it."""
    cache: list[T] = []
    lock = threading.Lock()

    def get() -> T:
        with lock:
            if not cache:
                cache.append(build())
            return cache[0]

    return get


def _lengths_of_one(parts: _graph.Parts) -> dict[Any, Any]:
    """Lengths of dims, with 1 for those that count rows."""
    lengths = _graph.lengths(parts.model)
    rows = {name for name, place in parts.open.items() if place is not None}
    return {
        parts.model.dim_lengths[name]: pt.constant(np.asarray(1 if name in rows else length))
        for name, length in lengths.items()
    }
