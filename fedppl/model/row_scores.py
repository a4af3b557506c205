"""Scores of single rows: exact derivatives of each row's log density along directions of φ and θ."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.replace import clone_replace, vectorize_graph
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import io_toposort
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import Alloc, Join
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Shape, Shape_i, SpecifyShape
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import AdvancedSubtensor, Subtensor
from pytensor.tensor.type import TensorType

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.client import ClientModel
from fedppl.model.compiled import inlined, mode, unpacked_function, without_notices
from fedppl.model.interpreted import look_for_blas
from fedppl.model.same import graph_key
from fedppl.types import Array

_Along = Callable[..., Sequence[Array]]
# Interpreted calls before slopes are compiled, as after three or four requests. Compiling takes two seconds and saves
# nine tenths of each call: too much for one or two points. A later run of a site finds the compiled code on disk.
_OFTEN = 150
_SAME = 1e-9  # relative difference of equal sums in another order
_ALGEBRA = ("canonicalize", "stabilize", "uncanonicalize")
_WRONG = "local_merge_alloc"  # assumes that arrays of zeros have equal shapes: such code fails at several directions
_SEVERAL = 7  # directions: some wrong code is right for one, or for no direction but zero


class RowScores(NamedTuple):
    """Terms of a template's density that are not sums over rows, and slopes of those that are."""

    joint: tuple[str, ...]
    along: _Along  # along(x, V (k, p), *inputs): slopes (k, n) of each outcome; inputs are a client's
    elsewhere: _Along  # the same for other inputs; indices out of bounds raise an error
    graph: tuple[Sequence[Any], Sequence[Any]]  # inputs, and densities of outcomes


def row_scores(client: ClientModel) -> RowScores:
    """Row scores of a template, interpreted; compiled if called often, or if compiled code is on disk."""
    return client.template.once("row scores", lambda: _build(client))


def slopes(client: ClientModel, x: Array, directions: Array) -> Array:
    """Slopes (n, k) of the log density of each row along directions (k, m + d), at x = (φ, θ)."""
    rows = list(by_length(row_scores(client).along, x, directions, client.inputs).values())
    if len(rows) == 1:
        return rows[0]
    return np.concatenate(rows) if rows else np.zeros((0, len(directions)))


def densities(client: ClientModel, points: Array) -> Array:
    """Log densities (S, n) of rows at points (S, m + d), interpreted; outcomes of equal length are of the same rows."""
    terms = client.template.once("row densities", lambda: _densities(client))(points, *client.inputs)
    return np.concatenate(list(_added(terms).values()), axis=1)


def _densities(client: ClientModel) -> Callable[..., Sequence[Array]]:
    template = client.template
    x, inputs, by_entry = _graph.observed_graph(template.parts, template.variables[0])
    by_row = _by_row(template.parts.model.observed_RVs, by_entry)
    return (
        interpreted.batched({x: pt.matrix()}, inputs, interpreted.stable(by_row))
        if by_row
        else lambda x, *_: [x[:, :0]]
    )


def _by_row(observed: Sequence[Any], densities: Sequence[Any]) -> list[Any]:
    """Log densities (n,) of rows of those outcomes that have rows."""
    found = []
    for rv, density in zip(observed, densities, strict=True):
        if density.type.ndim or not rv.type.ndim:
            entries = pt.atleast_1d(density)
            found.append(pt.sum(entries.reshape((entries.shape[0], -1)), axis=1))
    return found


def by_length(along: _Along, x: Array, directions: Array, inputs: Sequence[Any]) -> dict[int, Array]:
    """Slopes by the length of outcomes, with `along` or `elsewhere` of `row_scores`.

    Entries of one row are added, over outcomes with equal numbers of rows too.
    """
    return {length: terms.T for length, terms in _added(along(x, directions, *inputs)).items()}


def _added(terms: Sequence[Array]) -> dict[int, Array]:
    """Sums of terms (k, n) with equal numbers of rows n, by that."""
    sums: dict[int, Array] = {}
    for term in terms:
        sums[term.shape[1]] = sums[term.shape[1]] + term if term.shape[1] in sums else term
    return sums


def _build(client: ClientModel) -> RowScores:
    look_for_blas()
    template, parts = client.template, client.template.parts
    joint = [term.name for term in parts.model.potentials if term in parts.site_terms]
    x, inputs, densities = _graph.observed_graph(parts, template.variables[0])
    observed = parts.model.observed_RVs
    pairs = zip(observed, densities, strict=True)
    joint += [rv.name for rv, density in pairs if density.type.ndim == 0 and rv.type.ndim]
    by_row = _by_row(observed, densities)
    if not by_row:
        return RowScores(tuple(joint), _no_rows, _no_rows, (inputs, densities))
    arguments, outputs = _graphs(x, inputs, by_row)
    simpler = functools.cache(lambda: _stable(outputs))
    slowly = _interpreted(arguments, outputs, simpler)
    along, either = _compiled_in_time(slowly, lambda anew: _compiled(arguments, outputs, simpler, anew))
    elsewhere = slowly if template.indexes_by_data else either
    return RowScores(tuple(joint), along, elsewhere, (inputs, densities))


def _no_rows(*values: Any) -> Sequence[Array]:
    return ()


def _graphs(x: Any, inputs: Sequence[Any], by_row: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Directional slopes of each row, as gradients of a weighted sum by its weights."""
    direction, many = pt.vector("direction"), pt.matrix("directions")
    outputs = []
    for density in by_row:
        weights = pt.vector("weights")
        gradient = pt.grad(pt.dot(weights, density), x, disconnected_inputs="ignore")
        slope = pt.grad(pt.dot(gradient, direction), weights, disconnected_inputs="ignore")
        (slope,) = clone_replace([slope], {weights: pt.zeros_like(density)})  # the slopes do not depend on weights
        (along,) = vectorize_graph([slope], {direction: many})
        outputs.append(pt.broadcast_to(along, (many.shape[0], density.shape[0])))
    return [x, many, *inputs], outputs


def _interpreted(arguments: Sequence[Any], outputs: Sequence[Any], simpler: Callable[[], list[Any]]) -> _Along:
    stable: Callable[[], _Along] = functools.cache(lambda: interpreted.python_function(arguments, simpler()))
    as_written: Callable[[], _Along] = functools.cache(lambda: interpreted.python_function(arguments, outputs))
    failed: list[bool] = []

    def along(*values: Any) -> Sequence[Array]:
        if not failed:
            try:
                return stable()(*values)
            except Exception:  # a rewrite failed: use the graph as it was written, which is slower
                failed.append(True)
        return as_written()(*values)

    return along


def _compiled_in_time(slowly: _Along, compiled: Callable[[bool], list[_Along]]) -> tuple[_Along, _Along]:
    """A function that is compiled after many calls or read from disk, and one that uses the compiled code if any."""
    known: list[_Along] = []
    calls = itertools.count()

    def either(*values: Any) -> Sequence[Array]:
        if known:
            try:
                return known[0](*values)
            except Exception:  # compiled code alone may fail, which says nothing of the data
                return slowly(*values)
        return slowly(*values)

    def along(*values: Any) -> Sequence[Array]:
        if not known and (number := next(calls)) in (0, _OFTEN):
            known.extend(function for function in compiled(number == _OFTEN) if _agree(function, slowly, values))
        return either(*values)

    return along, either


def _agree(one: _Along, other: _Along, values: Sequence[Any]) -> bool:
    """Whether two functions agree at a point, along one and several directions; some rewrites are wrong, or fail."""
    x, given, *inputs = values
    several = np.cos(np.arange(_SEVERAL * np.shape(given)[1], dtype=float)).reshape(_SEVERAL, -1)
    pairs: list[tuple[Array, Array]] = []
    try:
        for directions in (several[:1], several):
            pairs += zip(one(x, directions, *inputs), other(x, directions, *inputs), strict=True)
    except Exception:  # of compiled code
        return False
    return all(
        a.shape == b.shape and np.allclose(a, b, rtol=_SAME, atol=_SAME * np.max(np.abs(b), initial=0.0))
        for a, b in pairs
    )


def _compiled(
    arguments: Sequence[Any], outputs: Sequence[Any], simpler: Callable[[], list[Any]], anew: bool
) -> list[_Along]:
    """One compiled function; none if there is none on disk, or Numba has no code for an operation."""
    types, key = [(v.type.dtype, v.type.ndim) for v in arguments], graph_key(arguments, outputs)
    key = key and f"{key} without {_WRONG}"  # code on disk of other rewrites is not read
    # Algebraic rewrites were applied before; again they do not terminate on slopes of a formula with two effects. For
    # these the first way makes an operation with too many inputs for Numba; the second has a third of the speed.
    usual = (*_ALGEBRA, _WRONG)
    for excluded in (usual, (*usual, "specialize"))[: 2 if anew else 1]:

        def compiled(excluded: tuple[str, ...] = excluded) -> tuple[Callable[..., Any], bool]:
            if not anew:
                raise LookupError
            return inlined(arguments, simpler(), mode().excluding(*excluded))

        try:
            with without_notices():
                return [unpacked_function(compiled, types, key)]
        except Exception:  # an operation that PyTensor or Numba cannot compile is interpreted
            continue
    return []


def _stable(outputs: Sequence[Any]) -> list[Any]:
    """Numerically stable graphs of the same."""
    # The second does not terminate on slopes of censored outcomes with a scale, nor the third where outcomes are
    # constants.
    excluded = (_WRONG, "local_greedy_distributor", "local_mul_zero")
    wanted = {"include": ("canonicalize", "stabilize"), "exclude": excluded}
    return list(rewrite_graph(clone_replace(list(outputs)), **wanted))  # a copy: rewrites change the graph itself


# Whether each row's term reads its own row alone, by the graph and so for all points and data -------------------------

_MIXED = -1  # in place of the axis of rows of a variable; None for a variable that reads no rows
_WHOLE = slice(None, None, None)


def rows_apart(client: ClientModel, lengths: Collection[int]) -> bool:
    """Whether outcomes' terms are f(row, x) of the containers with `lengths` rows, and other terms read none of these.

    Constants with an entry per row are not allowed in f. An unknown operation counts as one that mixes rows.
    """
    values = client.inputs[: len(client.template.parts.data)]
    places = tuple(place for place, value in enumerate(values) if value.ndim and len(value) in lengths)
    return client.template.once(("rows apart", places), lambda: _rows_apart(client, places))


def _rows_apart(client: ClientModel, places: Collection[int]) -> bool:
    inputs, densities = row_scores(client).graph
    axes: dict[Variable, int | None] = {inputs[place]: 0 for place in places}
    for node in io_toposort(inputs, densities):
        axis = _axis(node, [axes.get(variable) for variable in node.inputs])
        axes |= dict.fromkeys(node.outputs, axis)
    if any(axes.get(density) != 0 for density in densities):
        return False
    parts = client.template.parts
    others = [term for term in parts.site_terms if term not in parts.model.observed_RVs]
    read = _graph.values_read([parts.model.logp(vars=others, sum=True)] if others else ())
    return read.isdisjoint(parts.data[place] for place in places)


def _axis(node: Apply[Any], axes: list[int | None]) -> int | None:
    """Axis of rows of a node's outputs, from those of its inputs."""
    op, (first, *others) = node.op, axes or [None]
    if all(axis is None for axis in axes):
        return None
    if not type(op).__module__.startswith(("pytensor.", "pymc.")):  # a subclass of another package
        return _MIXED
    if isinstance(op, Shape | Shape_i):
        return None
    if isinstance(op, CheckAndRaise):  # a check of all rows does not change the value
        return first
    if type(op) is Elemwise:
        return _beside(node.inputs, axes)
    if isinstance(op, Join):
        known = hasattr(op, "axis")  # as in PyTensor 3; before, the first input says along which axis
        along = op.axis if known else getattr(node.inputs[0], "data", None)
        axis = _beside(node.inputs, axes) if known else _beside(node.inputs[1:], others)
        return _MIXED if along is None or axis == int(along) % node.outputs[0].type.ndim else axis
    if first is None and isinstance(op, AdvancedSubtensor):
        return _of_index(node, others)
    if first is None or first == _MIXED or any(axis is not None for axis in others):
        return _MIXED
    if isinstance(op, SpecifyShape):
        return first
    if isinstance(op, Alloc):
        return first + int(node.outputs[0].type.ndim - node.inputs[0].type.ndim)
    if isinstance(op, Softmax | LogSoftmax):
        return _MIXED if op.axis is None or op.axis % node.inputs[0].type.ndim == first else first
    if isinstance(op, DimShuffle):
        return next((place for place, of in enumerate(op.new_order) if of == first), _MIXED)
    if isinstance(op, CAReduce):
        summed = range(node.inputs[0].type.ndim) if op.axis is None else op.axis
        return _MIXED if first in summed else first - int(sum(axis < first for axis in summed))
    if isinstance(op, Subtensor):
        taken = op.idx_list[: first + 1]
        kept = len(taken) <= first or taken[first] == _WHOLE
        return first - int(sum(not isinstance(index, slice) for index in taken[:first])) if kept else _MIXED
    is_product = isinstance(op, Dot) or (isinstance(op, Blockwise) and isinstance(op.core_op, Dot))
    return first if is_product and first == 0 and node.inputs[0].type.ndim == 2 else _MIXED


def _beside(variables: Sequence[Variable], axes: Sequence[int | None]) -> int:
    """Axis of rows of an elementwise operation or a join: other inputs are equal for all rows."""
    (axis, *more) = {axis for axis in axes if axis is not None}
    if more or axis == _MIXED:
        return _MIXED
    same = all(of is not None or _is_same(v, axis) for of, v in zip(axes, variables, strict=True))
    return axis if same else _MIXED


def _is_same(variable: Variable, axis: int) -> bool:
    node = variable.owner
    if node is not None and isinstance(node.op, Alloc):
        value = node.inputs[0].type
        axis, variable = axis - variable.type.ndim + value.ndim, node.inputs[0]
    return axis < 0 or bool(variable.type.broadcastable[axis])


def _of_index(node: Apply[Any], axes: list[int | None]) -> int:
    """Axis of entries that are selected by one index per row from an array without rows."""
    indices = node.inputs[1:]
    is_whole = any(isinstance(index, slice) for index in getattr(node.op, "idx_list", None) or ())
    known = all(isinstance(v.type, TensorType) and v.type.ndim == 1 and v.type.dtype != "bool" for v in indices)
    return 0 if known and not is_whole and all(axis == 0 for axis in axes) else _MIXED
