"""The outcome of a declared network: which likelihood its model gives it, and what that reads of the data."""

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
from fedppl.nn.declared import Declared, Drawn, Read, drawn
from fedppl.nn.devices import host, placed, tensor
from fedppl.nn.functional import kind_of, network_nodes, one_call, parameter_slices
from fedppl.nn.likelihood import Categorical, Likelihood, Normal
from fedppl.nn.op import called
from fedppl.types import DeclarationError, Variable

CONTRACT = (
    "a network's client declares weights = fedppl.nn.parameters(net), output = fedppl.nn.module(net, weights, X), "
    "and one outcome of that output, such as pm.Categorical(logit_p=output) or pm.Normal(output, constant)"
)
_MOVED = (DimShuffle, Reshape, SpecifyShape, Subtensor)  # operations that leave numbers as they are


class Outcome(NamedTuple):
    """A likelihood, and the variables of the model that it is computed from."""

    likelihood: Likelihood
    unknowns: tuple[Variable, ...]  # free variables of the likelihood
    variables: tuple[Any, ...]  # of the model, whose values are the outcomes and what else it reads


def outcome_of(client: ClientModel, node: Any, given: Mapping[Any, Any], who: str) -> Outcome:
    """Read the one observed variable, where `node` evaluates the network; `given` has containers' values.

    DeclarationError, in the words of `who` the client is, where outcomes do not come from the output row by row.
    """
    parts = client.template.parts
    observed = parts.model.observed_RVs[0]
    slices = parameter_slices(node.op.net)
    unknowns = tuple(v for v in (*client.layout.variables, *client.local) if v.name not in slices)
    wide = _wide(client, node)
    _require_numbers_of_classes(observed, who)
    closed = None if unknowns else _closed(observed, node, wide)
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
    read = _read_by(parts, given, density)
    starts = {values[v.name]: v.shape for v in unknowns}
    free = {rv: parts.model.rvs_to_values[rv] for rv in (*parts.shared, *parts.local)}
    shapes = {rv: starts[value] for rv, value in free.items() if value in starts}
    outcomes = {v: what.shape for v, what in read.items() if what.is_outcome}
    if twice := [v.name for v in outcomes if v in _graph.values_read(observed.owner.inputs)]:
        raise DeclarationError(
            f"{who}: {twice} are observed, and the distribution of {observed.name!r} has them among its parameters; "
            "give what it depends on in a container of its own."
        )
    draws = functools.partial(drawn, parts, wide, shapes, outcomes)
    found = _declared(parts, density, output, wide, read, starts, draws, who)
    return Outcome(found, unknowns, tuple(read))


def _require_numbers_of_classes(observed: Any, who: str) -> None:
    """Refuse classes in more dimensions than their probabilities: as many rows as classes would pass for a pairing."""
    if kind_of(observed) != "categorical":
        return
    p = observed.owner.op.dist_params(observed.owner)[-1].owner
    if p is not None and isinstance(p.op, DimShuffle) and "x" in p.op.new_order[:-1]:
        raise DeclarationError(
            f"{who}: {observed.name!r} has {observed.type.ndim} dimensions, more than its probabilities leave: a class "
            "is a number from 0, one a row. Pass y.argmax(axis=1) where y holds columns of 0 and 1."
        )


def _without_network(parts: _graph.Parts, observed: Any, who: str) -> tuple[Any, Any]:
    """The outcome's log density of what stands for the network's output."""
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


def _closed(observed: Any, node: Any, wide: tuple[int, ...]) -> Likelihood | None:
    """The likelihoods in closed form, where the distribution's parameter is the output and nothing else."""
    kind, parameters, output = kind_of(observed), observed.owner.op.dist_params(observed.owner), node.outputs[0]
    if kind == "categorical":
        p = parameters[-1].owner
        is_softmax = p is not None and isinstance(p.op, Softmax) and p.inputs[0] is output and len(wide) == 1
        return Categorical() if is_softmax and _is_last(p.op.axis, output.type.ndim) else None
    if kind == "normal" and (parameters[0] is output or (wide == (1,) and _is_column(parameters[0], output))):
        sd = _constant_sd(parameters[1])
        return None if sd is None else Normal(sd)
    return None


def _is_last(axis: Any, ndim: int) -> bool:
    """Whether an operation is along the last axis: a number, or from PyTensor 3 on a tuple of them."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    return len(axes) == 1 and axes[0] in (-1, ndim - 1)


def _is_column(variable: Any, output: Any) -> bool:
    """Whether a variable is the one column of the output: ``f[:, 0]`` or ``f.squeeze()``, and no other part of it."""
    above = variable
    while above is not output:
        if above.owner is None or not isinstance(above.owner.op, _MOVED):
            return False
        above = above.owner.inputs[0]
    for rows in (1, 3):
        values = np.arange(1.0, rows + 1.0)[:, None]
        (moved,) = clone_replace([variable], {output: pt.constant(values)}, rebuild_strict=False)
        if not _is_constant(moved):  # an index may be a client's own
            return False
        found = np.asarray(moved.eval(mode=interpreted.PYTHON_MODE))
        if found.shape != (rows,) or not np.array_equal(found, values[:, 0]):
            return False
    return True


def _constant_sd(value: Any) -> float | None:
    """An sd that is one number at all clients."""
    if not _is_constant(value):
        return None
    found = np.unique(np.asarray(value.eval(), dtype=float))
    return float(found[0]) if len(found) == 1 else None


def _is_constant(value: Any) -> bool:
    """Whether it depends on no variable, and on no data."""
    return all(v.owner is not None or isinstance(v, Constant) for v in ancestors([value]))


def _wide(client: ClientModel, node: Any) -> tuple[int, ...]:
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
# Parameters outside their domain are points without density, not exceptions in the middle of a search.
_MODE = Mode(linker="py", optimizer="fast_compile").including("local_check_parameter_to_ninf_switch")


def _read_by(parts: _graph.Parts, given: Mapping[Any, Any], density: Any) -> dict[Any, Read]:
    """Variables that the density of the outcome reads beside network and unknowns, with what a row of each is.

    Containers have the values of `given`; an outcome that is no data is read as it stands in the model.
    """
    observed = parts.model.observed_RVs[0]
    value = parts.model.rvs_to_values[observed]
    above = set(ancestors([density]))
    found = {v: np.asarray(one) for v, one in given.items() if v in above}
    if isinstance(value, Constant):
        found[value] = np.asarray(value.data)
    outcomes = {value, *_graph.observed_through(parts)}
    return {
        v: Read(v.name or observed.name, one.shape[1:], str(one.dtype), v in outcomes, one.ndim > 0)
        for v, one in found.items()
    }


def _declared(
    parts: _graph.Parts,
    density: Any,
    output: Any,
    wide: tuple[int, ...],
    read: Mapping[Any, Read],
    unknowns: Mapping[Any, tuple[int, ...]],
    draws: Callable[[], Drawn],
    who: str,
) -> Declared:
    """Build the functions of a likelihood from the `density` of the outcome, not summed.

    It is a graph of the network's `output`, a row of which is so `wide`, of what else it has `read`, in the order of
    the columns, and of value variables of its `unknowns`, with their shapes; `draws` builds functions that draw
    outcomes. DeclarationError where a row cannot be computed by itself, or has no slopes.
    """
    observed = parts.model.observed_RVs[0]
    f, e, y = pt.vector("f"), pt.vector("e"), pt.vector("y")
    replace: dict[Any, Any] = {output: f.reshape((1, *wide)), **_lengths_of_one(parts)}
    first = 0
    for value, shape in unknowns.items():
        size = int(np.prod(shape, dtype=int))
        replace[value] = e[first : first + size].reshape(shape)
        first += size
    column = 0
    for value, what in read.items():
        piece = y[column : column + what.width].reshape((1, *what.shape)) if what.by_row else y[column]
        replace[value] = pt.cast(piece, value.type.dtype)
        column += what.width
    try:
        (row,) = clone_replace([-density.sum()], replace, rebuild_strict=False)
        both, told = pt.matrix("both"), pt.matrix("told")
        count = int(np.prod(wide, dtype=int))
        (losses,) = vectorize_graph([row], {f: both[:, :count], e: both[:, count:], y: told})
        losses = pt.broadcast_to(losses, (both.shape[0],))
        slopes = pt.grad(losses.sum(), both)
        rows = [pt.grad(slopes[:, c].sum(), both, disconnected_inputs="ignore") for c in range(count)]
        curved = pt.stack([one[:, :count] for one in rows], axis=1)
        first_order = interpreted.python_function([both, told], [losses, slopes], _MODE)
    except (NotImplementedError, NullTypeGradError, ValueError, TypeError, AssertionError) as error:
        raise DeclarationError(
            f"{who}: the likelihood of {observed.name!r} cannot be computed row by row ({type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]}). For other models use fedppl.EP(local=fedppl.NUTS())."
        ) from error
    curvatures = _built_once(lambda: interpreted.python_function([both, told], curved, _MODE))
    return Declared(
        kind_of(observed),
        count,
        tuple(read.values()),
        first_order,
        lambda output, y: np.asarray(curvatures()(output, y)),
        _built_once(draws),
    )


def _built_once(build: Callable[[], T]) -> Callable[[], T]:
    """What is built at the first call, by one thread for all: not every algorithm has a use for it."""
    known: list[T] = []
    lock = threading.Lock()

    def get() -> T:
        with lock:
            if not known:
                known.append(build())
            return known[0]

    return get


def _lengths_of_one(parts: _graph.Parts) -> dict[Any, Any]:
    """Lengths of dims: of those that count rows, one."""
    lengths = _graph.lengths(parts.model)
    rows = {name for name, place in parts.open.items() if place is not None}
    return {
        parts.model.dim_lengths[name]: pt.constant(np.asarray(1 if name in rows else length))
        for name, length in lengths.items()
    }
