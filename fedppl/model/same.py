"""Whether two builds of a model compute the same: by their graphs, and where those differ in form, by their values."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
from pymc.distributions.distribution import SymbolicRandomVariable
from pymc.logprob.transforms import Transform
from pytensor.compile.builders import OpFromGraph
from pytensor.gradient import GradClip, GradScale
from pytensor.graph.basic import Constant, equal_computations
from pytensor.graph.basic import Variable as PyTensorVariable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor.random.type import RandomType

from fedppl.model import graph as _graph
from fedppl.types import Array, Variable

_POINTS = 3
_SharedAndLocal = tuple[Sequence[Variable], Sequence[Variable]]


def _inlined(outputs: Sequence[Any]) -> list[Any]:
    """The same graphs with what PyTensor made of several operations (`pt.diag`, `kron`) taken apart."""
    found = list(outputs)
    while True:
        nodes = [v.owner for v in ancestors(found) if v.owner is not None and isinstance(v.owner.op, OpFromGraph)]
        if not nodes:
            return found
        op, inputs = nodes[0].op, nodes[0].inputs
        graph = op.fgraph.unfreeze() if hasattr(op.fgraph, "unfreeze") else op.fgraph
        inner = clone_replace(graph.outputs, dict(zip(graph.inputs, inputs, strict=True)))
        found = clone_replace(found, dict(zip(nodes[0].outputs, inner, strict=True)))


def same_computations(a: Sequence[Any], b: Sequence[Any], in_a: Sequence[Any], in_b: Sequence[Any]) -> bool:
    """Whether graphs a of inputs in_a compute what graphs b of inputs in_b do, and have the same gradients.

    PyTensor before 3 takes no two operations that are graphs themselves for equal: those are compared by their inside,
    where this is all that they are.
    """
    ours, theirs = operations(a), operations(b)
    if any(has_own_gradient(op) for op in (*ours, *theirs)):
        return False
    if equal_computations(list(a), list(b), in_xs=list(in_a), in_ys=list(in_b)):
        return True
    inside, inside_b = ([op for op in ops if isinstance(op, OpFromGraph)] for ops in (ours, theirs))
    if not any(not hasattr(op.fgraph, "unfreeze") for op in (*inside, *inside_b)):
        return False
    # Of a random variable the inside is how it is drawn; its density depends on its class, which of a distribution of
    # the user's own is another one in each model.
    drawn, drawn_b = ([type(op) for op in ops if isinstance(op, SymbolicRandomVariable)] for ops in (inside, inside_b))
    if Counter(drawn) != Counter(drawn_b):
        return False
    return bool(equal_computations(_inlined(a), _inlined(b), in_xs=list(in_a), in_ys=list(in_b)))


def operations(outputs: Sequence[Any]) -> list[Any]:
    """All operations of graphs, and those that operations are made of: of graphs, of numbers, of single entries."""
    waiting = list({v.owner: v.owner.op for v in ancestors(list(outputs)) if v.owner is not None}.values())
    found = []
    while waiting:
        op = waiting.pop()
        found.append(op)
        waiting += [getattr(op, name) for name in ("scalar_op", "core_op") if hasattr(op, name)]
        found += operations(op.fgraph.outputs) if hasattr(op, "fgraph") else []
    return found


_OVERRIDES = ("lop_overrides", "grad_overrides", "rop_overrides", "pullback_overrides", "pushforward_overrides")


def has_own_gradient(op: Any) -> bool:
    """Whether an operation may have another gradient than one that PyTensor takes for equal."""
    if isinstance(op, GradClip | GradScale):
        return True
    return isinstance(op, OpFromGraph) and any(getattr(op, name, None) is not None for name in _OVERRIDES)


def surely_same_model(a: _graph.Parts, b: _graph.Parts) -> bool:
    """Whether two builds declare the same variables of their containers; False where that cannot be seen at once.

    The declared graphs are compared, random variables in them. A log density need not be derived for that, which takes
    ten times as long as building the model does. Dims that are open in `a` may differ in length.
    """
    one, other = a.model, b.model
    if names(a) != names(b) or one.named_vars_to_dims != other.named_vars_to_dims:
        return False
    ours, theirs = _graph.lengths(one), _graph.lengths(other)
    if ours.keys() != theirs.keys() or any(ours[dim] != theirs[dim] for dim in ours.keys() - a.open.keys()):
        return False
    pairs = list(zip(one.basic_RVs, other.basic_RVs, strict=True))
    if any(one.rvs_to_values[rv].type.dtype != other.rvs_to_values[as_rv].type.dtype for rv, as_rv in pairs):
        return False
    if not all(_alike(one.rvs_to_transforms[rv], other.rvs_to_transforms[as_rv]) for rv, as_rv in pairs):
        return False
    declared, as_declared = declared_outputs(one), declared_outputs(other)
    random, as_random = streams(declared), streams(as_declared)
    if len(random) != len(as_random):
        return False
    inputs = [*a.data, *random, *(one.dim_lengths[dim] for dim in ours)]
    as_inputs = [*b.data, *as_random, *(other.dim_lengths[dim] for dim in ours)]
    return same_computations(declared, as_declared, inputs, as_inputs)


def _surely_same_prior(a: _graph.Parts, b: _graph.Parts) -> bool:
    """Whether two builds declare the prior of what is shared alike; False where that cannot be seen at once."""
    terms, as_terms = list(a.prior_terms), list(b.prior_terms)
    if [v.name for v in terms] != [v.name for v in as_terms]:
        return False
    pairs = list(zip(a.shared, b.shared, strict=True))
    if not all(_alike(a.model.rvs_to_transforms[rv], b.model.rvs_to_transforms[as_rv]) for rv, as_rv in pairs):
        return False
    lengths, as_lengths = _lengths_read(a, terms), _lengths_read(b, as_terms)
    if [name for name, _ in lengths] != [name for name, _ in as_lengths]:
        return False
    inputs = [*streams(terms), *(length for _, length in lengths)]
    as_inputs = [*streams(as_terms), *(length for _, length in as_lengths)]
    return len(inputs) == len(as_inputs) and same_computations(terms, as_terms, inputs, as_inputs)


def _lengths_read(parts: _graph.Parts, outputs: Sequence[Any]) -> list[tuple[tuple[str, int], Any]]:
    """Dims whose lengths outputs are computed from, with these lengths as they are now."""
    read, sizes = set(ancestors(outputs)), _graph.lengths(parts.model)
    return [((dim, sizes[dim]), v) for dim, v in parts.model.dim_lengths.items() if v in read and dim in sizes]


def names(parts: _graph.Parts) -> list[Any]:
    """Names of a model's variables, by what they are, and types of its containers."""
    model = parts.model
    groups = (model.basic_RVs, model.potentials, model.deterministics, parts.shared, parts.local, model.observed_RVs)
    named = [[v.name for v in group] for group in groups]
    return [*named, [(v.name, v.type.dtype, v.type.ndim) for v in parts.data]]


def declared_outputs(model: Any) -> list[Any]:
    """All that a model computes, as it was declared."""
    observed = [model.rvs_to_values[rv] for rv in model.observed_RVs]
    return [*model.basic_RVs, *model.potentials, *model.deterministics, *observed]


def streams(outputs: Sequence[Any]) -> list[Any]:
    """Random variables' streams, in the order of the graph: each build has its own, and no density reads them."""
    return [v for v in ancestors(outputs) if v.owner is None and isinstance(v.type, RandomType)]


def _alike(a: Any, b: Any) -> bool:
    """Whether transforms, or what they hold, are the same as far as can be seen."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, FunctionType):
        if a.__code__ is not b.__code__ or any(_reads_globals(f) for f in (a, b)):
            return False
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b)]
        named = [sorted((f.__kwdefaults__ or {}).items()) for f in (a, b)]
        return _alike([*cells[0], a.__defaults__, named[0]], [*cells[1], b.__defaults__, named[1]])
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_alike(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, PyTensorVariable):
        return same_computations([a], [b], [], [])
    if isinstance(a, np.ndarray | np.generic | int | float | str):
        return bool(np.array_equal(a, b))
    return (
        isinstance(a, Transform)
        and vars(a).keys() == vars(b).keys()
        and _alike([*vars(a).values()], [*vars(b).values()])
    )


def _reads_globals(function: FunctionType) -> bool:
    """Whether a function reads what may have been another value when another one of its code was made."""
    named = inspect.getclosurevars(function).globals.values()
    return any(not isinstance(one, ModuleType | FunctionType | BuiltinFunctionType | type) for one in named)


def same_graph(a: _graph.SiteGraph, b: _graph.SiteGraph) -> bool:
    """Whether two site graphs compute the same function of their inputs."""
    return same_types(a, b) and same_computations([a.logp], [b.logp], [a.x, *a.inputs], [b.x, *b.inputs])


def same_types(a: _graph.SiteGraph, b: _graph.SiteGraph) -> bool:
    """Whether two site graphs take the same inputs."""
    return [v.type for v in a.inputs] == [v.type for v in b.inputs] and a.free_shapes == b.free_shapes


def same_prior(a: _graph.Parts, shared_a: Sequence[Variable], b: _graph.Parts, shared_b: Sequence[Variable]) -> bool:
    """Whether two builds give the shared variables one prior, to the last constant."""
    if list(shared_a) == list(shared_b) and _surely_same_prior(a, b):
        return True
    of_a, of_b = _graph.prior_graph(a, shared_a), _graph.prior_graph(b, shared_b)
    return same_computations([of_a.logp], [of_b.logp], [of_a.x], [of_b.x])


def same_outputs(a: _graph.Parts, variables_a: _SharedAndLocal, b: _graph.Parts, variables_b: _SharedAndLocal) -> bool:
    """Whether two builds compute the same constrained variables and deterministics of their data containers."""
    public = [v.name for v in _graph.computed_from_shared(a)]
    for only_shared in (True, False):
        x_a, inputs_a, names_a, outputs_a = _graph.constrained_graph(a, *variables_a, public, only_shared=only_shared)
        x_b, inputs_b, names_b, outputs_b = _graph.constrained_graph(b, *variables_b, public, only_shared=only_shared)
        if names_a != names_b or not same_computations(outputs_a, outputs_b, [x_a, *inputs_a], [x_b, *inputs_b]):
            return False
    return True


def same_constants(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two graphs hold the same numbers, but for the small integers that shapes and axes are computed with."""
    ours, theirs = ({_number(v) for v in ancestors(_inlined(graph)) if isinstance(v, Constant)} for graph in (a, b))
    return (ours ^ theirs) <= {None}


def _number(constant: Any) -> tuple[str, tuple[int, ...], bytes] | None:
    value = np.asarray(constant.data)
    if value.dtype.kind not in "biufc" or (value.ndim == 0 and value.dtype.kind in "biu" and -2 <= value <= 2):
        return None
    return value.dtype.kind, value.shape, value.tobytes()


def same_values(a: Callable[..., Any], b: Callable[..., Any], examples: Sequence[tuple[int, tuple[Any, ...]]]) -> bool:
    """Whether two log densities of x agree at random points, for each number of coordinates and inputs.

    For graphs of one function in several forms: the shapes that PyTensor infers come in an order that changes from
    build to build (a covariance matrix over a client's rows).
    """
    rng = np.random.default_rng(0)
    seen = False
    for size, inputs in examples:
        for _ in range(_POINTS):
            x: Array = rng.normal(size=size)
            try:
                ours, theirs = float(a(x, *inputs)), float(b(x, *inputs))
            except (ValueError, TypeError, IndexError, AssertionError, ArithmeticError, np.linalg.LinAlgError):
                continue
            if not np.isclose(ours, theirs, rtol=1e-9, atol=1e-9, equal_nan=True):
                return False
            seen = seen or bool(np.isfinite(ours))
    return seen
