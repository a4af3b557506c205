"""Whether each row's term reads no row but its own: by the graph, and so at all points and for all data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from pytensor.graph.basic import Apply, Variable
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
from fedppl.model.client import ClientModel
from fedppl.model.row_scores import row_scores

_MIXED = -1  # in the place of the axis along which a variable has rows; None where it reads none of them
_WHOLE = slice(None, None, None)


def rows_apart(client: ClientModel, lengths: Collection[int]) -> bool:
    """Whether outcomes' terms are f(row, x) of the containers with so many rows, and other terms read none of these.

    Constants that have an entry for each row are no part of f. Of what is not known to keep rows apart it is said that
    it does not.
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
    """Along which axis what is computed has rows, from those of what it is computed from."""
    op, (first, *others) = node.op, axes or [None]
    if all(axis is None for axis in axes):
        return None
    if not type(op).__module__.startswith(("pytensor.", "pymc.")):  # of a class that says it is one of these
        return _MIXED
    if isinstance(op, Shape | Shape_i):
        return None
    if isinstance(op, CheckAndRaise):  # what is checked of all rows together is no part of the value
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
    """Rows beside rows, or beside what is the same for all of them."""
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
    """Entries of what has no rows, each chosen by one row: indices of the first axes, a number a row."""
    indices = node.inputs[1:]
    is_whole = any(isinstance(index, slice) for index in getattr(node.op, "idx_list", None) or ())
    known = all(isinstance(v.type, TensorType) and v.type.ndim == 1 and v.type.dtype != "bool" for v in indices)
    return 0 if known and not is_whole and all(axis == 0 for axis in axes) else _MIXED
