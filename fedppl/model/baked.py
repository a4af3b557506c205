"""Find constants of a graph that a builder computes from data, and make them inputs.

A graph shows what is computed from containers, and not what NumPy computed before: `H @ y` or `float(y[7])` are
constants in it like any others. In a build on other data of the same kind, constants that come from data differ.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from pymc.distributions.custom import CustomDistRV, CustomSymbolicDistRV
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Constant
from pytensor.graph.traversal import io_toposort, toposort
from pytensor.tensor.type import TensorType

from fedppl.model import graph as _graph
from fedppl.model._public import attempt, is_whole
from fedppl.model.client import ClientModel, is_written
from fedppl.model.compiled import pack
from fedppl.model.same import has_own_gradient, operations, surely_same_model
from fedppl.model.template import Template, parts_of
from fedppl.types import Array

_BYTES_KEPT = 2**27  # of rebuilt inputs per client: a few thousand rows and ten columns
_KNOWN = ("pytensor.", "pymc.", "fedppl.")  # whose operations compute the same where they are equal

_Step = tuple[Any, list[int], list[Any]]  # an operation (None: an input), the places that it reads, and types


class Reading(NamedTuple):
    """How a client's density reads its data."""

    client: Any  # the same client, with constants from data as inputs of its graph
    inputs: Callable[[Mapping[str, Any]], Sequence[Any] | None] | None  # at other arrays; None where unknown


class _Flat(NamedTuple):
    """Graphs in topological order: operations with the places that they read, and constants."""

    steps: list[_Step]
    constants: list[Any]


def reading(client: ClientModel) -> Reading:
    """The reading of a client, found once; one more build where no data are constants."""
    return client.view(_read)


def _read(client: ClientModel) -> Reading:
    parts, functions = client.template.parts, client.template.functions
    as_it_is = Reading(client, functools.partial(_inputs, client))
    if is_written(client.declared.builder) or functions.get("nothing baked"):
        return as_it_is
    build = functools.partial(parts_of, client.declared, client.client_id)
    looked = False
    for number, arrays in enumerate(itertools.chain([all_other(client.arrays)], repeated_rows(client.arrays))):
        if looked and number == 1:  # other arrays are for builders that check combinations in a row
            break
        if (other := attempt(build, arrays)) is None:
            continue
        looked = True
        if not (
            surely_same_model(parts, other)
            and _same_strange(_graph.declared(parts.model), _graph.declared(other.model))
        ):
            return _opened(client, build, arrays, other)
    functions["nothing baked"] = looked
    return as_it_is if looked else Reading(client, None)


def _inputs(client: ClientModel, arrays: Mapping[str, Any], constants: Sequence[Any] = ()) -> tuple[Any, ...]:
    """A client's inputs with other arrays in the containers, and with other data beside them."""
    data, inputs = client.template.parts.data, client.inputs
    values = [np.asarray(arrays[v.name]).astype(v.type.dtype) for v in data[: len(client.arrays)] if v.name in arrays]
    return (*values, *inputs[len(values) : len(data)], *constants, *inputs[len(data) :])


def _same_strange(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether unknown operations of two graphs are identical objects: equal ones may hold different data.

    False for an unknown operation in a frozen graph: PyTensor from 3 on shares equal frozen graphs between builds.
    """
    frozen = [op.fgraph for op in operations(a) if hasattr(getattr(op, "fgraph", None), "unfreeze")]
    if not all(_is_known(op) for graph in frozen for op in operations(graph.outputs)):
        return False
    strange, other = ([op for op in operations(outputs) if not _is_known(op)] for outputs in (a, b))
    return len(strange) == len(other) and all(map(operator.is_, strange, other))


def _is_known(op: Any) -> bool:
    """Whether equality of an operation covers all that it holds; those of `CustomDist` are compared below."""
    return isinstance(op, CustomDistRV | CustomSymbolicDistRV) or f"{type(op).__module__}.".startswith(_KNOWN)


def _opened(client: ClientModel, build: Any, arrays: Mapping[str, Any], other: _graph.Parts) -> Reading:
    """The client with constants that differ in another build as inputs; unknown if more than constants differ."""
    first = attempt(build, client.arrays)
    if first is None:
        return Reading(client, None)
    here, there = _flat(_graph.declared(first.model)), _flat(_graph.declared(other.model))
    if not _same_steps(here, there):
        return Reading(client, None)
    differ = [i for i, pair in enumerate(zip(here.constants, there.constants, strict=True)) if not _equal(*pair)]
    template, again = (
        _template(client, _as_data(parts, flat, differ), _inputs(client, arrays_of_build, _constants(flat, differ)))
        for parts, flat, arrays_of_build in ((first, here, client.arrays), (other, there, arrays))
    )
    densities = [template.graph.logp], [again.graph.logp]
    if not (_same_strange(*densities) and template.same_density(again)):
        return Reading(client, None)
    if not differ:
        return Reading(client, functools.partial(_inputs, client))
    opened = replace(client, template=template, inputs=template.example, packed=pack(template.example))
    return Reading(opened, _remembered(functools.partial(_rebuilt, client, build, here, differ)))


def _constants(flat: _Flat, places: Sequence[int]) -> list[Any]:
    return [np.asarray(flat.constants[place].data) for place in places]


def _remembered(rebuilt: Callable[[Mapping[str, Any]], Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Cache by arrays, so that the builder is not called again for the same ones."""
    known: dict[bytes, tuple[Any, ...]] = {}

    def again(arrays: Mapping[str, Any]) -> tuple[Any, ...] | None:
        key = hashlib.sha256(b"".join(np.asarray(value).tobytes() for value in arrays.values())).digest()
        inputs: tuple[Any, ...] | None = known.get(key) or rebuilt(arrays)
        if inputs is not None and len(known) * sum(value.nbytes for value in inputs) < _BYTES_KEPT:
            known[key] = inputs
        return inputs

    return again


def _rebuilt(client: ClientModel, build: Any, known: _Flat, opened: Sequence[int], arrays: Any) -> Any:
    """Inputs of the graph for other arrays of the builder."""
    parts = attempt(build, arrays)
    flat = None if parts is None else _flat(_graph.declared(parts.model))
    if flat is None or not _same_steps(known, flat):
        return None
    pairs = enumerate(zip(known.constants, flat.constants, strict=True))
    if any(i not in opened and not _equal(*pair) for i, pair in pairs):
        return None
    return _inputs(client, arrays, _constants(flat, opened))


def _template(client: ClientModel, parts: _graph.Parts, inputs: tuple[Any, ...]) -> Template:
    known = client.template
    parts = parts._replace(open=known.parts.open)
    return Template(parts, known.variables, _graph.site_graph(parts, known.variables[0]), known.start, inputs)


def _as_data(parts: _graph.Parts, flat: _Flat, places: Sequence[int]) -> _graph.Parts:
    """Replace some constants of a build by variables; the build is changed in place."""
    replacements = {}
    for place in places:
        constant = flat.constants[place]
        # An axis of length one is broadcast.
        shape = tuple(1 if length == 1 else None for length in constant.type.shape)
        replacements[constant] = TensorType(constant.type.dtype, shape=shape)(f"constant {place}")
    changed = set(replacements.values())
    for node in toposort(_graph.declared(parts.model)):
        node.inputs[:] = [replacements.get(variable, variable) for variable in node.inputs]
        if not changed.isdisjoint(node.inputs):  # static shapes have to be inferred anew
            for variable, inferred in zip(node.outputs, node.op.make_node(*node.inputs).outputs, strict=True):
                variable.type = inferred.type
            changed.update(node.outputs)
    values = parts.model.rvs_to_values
    values.update({rv: replacements[value] for rv, value in values.items() if value in replacements})
    parts.model.values_to_rvs.update({values[rv]: rv for rv in parts.model.observed_RVs})
    return parts._replace(data=(*parts.data, *replacements.values()))


def _flat(outputs: Sequence[Any], known: Sequence[Any] = ()) -> _Flat:
    places: dict[Any, int] = {}
    steps: list[_Step] = []
    constants: list[Any] = []

    def read(variables: Sequence[Any]) -> list[int]:
        for variable in variables:
            if variable not in places:  # it has no owner
                places[variable] = len(places)
                constants.extend([variable] if isinstance(variable, Constant) else [])
                steps.append((None, [], [variable.type]))
        return [places[variable] for variable in variables]

    read(known)
    for node in io_toposort(list(known), list(outputs)):
        steps.append((node.op, read(node.inputs), [variable.type for variable in node.outputs]))
        for variable in node.outputs:
            places[variable] = len(places)
    return _Flat([*steps, (None, read(outputs), [])], constants)


def _same_steps(a: _Flat, b: _Flat) -> bool:
    """Whether two graphs are the same except for their constants."""
    return len(a.steps) == len(b.steps) and all(
        read == also_read and types == other_types and _same_operation(op, other)
        for (op, read, types), (other, also_read, other_types) in zip(a.steps, b.steps, strict=True)
    )


def _same_operation(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if None in (a, b) or has_own_gradient(a) or has_own_gradient(b) or not (_is_known(a) and _is_known(b)):
        return False
    if isinstance(a, OpFromGraph) and isinstance(b, OpFromGraph) and type(a).__name__ == type(b).__name__:
        inside, inside_b = (_flat(op.fgraph.outputs, op.fgraph.inputs) for op in (a, b))
        return _same_steps(inside, inside_b) and all(map(_equal, inside.constants, inside_b.constants))
    if isinstance(a, CustomDistRV) and isinstance(b, CustomDistRV):  # a new class per build; densities are compared
        return type(a).__name__ == type(b).__name__
    return bool(a == b)


def _equal(a: Any, b: Any) -> bool:
    value, other_value = a.data, b.data
    if isinstance(value, np.ndarray | np.generic) or isinstance(other_value, np.ndarray | np.generic):
        return np.array_equal(value, other_value, equal_nan=np.asarray(value).dtype.kind == "f")
    return (
        bool(value == other_value)
        if isinstance(value, int | float | str | slice | type(None))
        else value is other_value
    )


# Other values that entries of a client's arrays might have, column by column, of the size of differences between rows -

# Tails of a column depend on few rows: no value moves out of the bulk of its column, nor further than its width.

_FEW_VALUES = 10  # a column with at most so many values is one of levels
_TIMES = 16  # half of the rows without a rare outcome should have it once
_TAIL = 0.05  # share of the distinct values of a column at each end
_FAINT, _FAINTER = 1e-3, 1e-6  # of the largest direction: below are squares of changes; of small changes, rounding
_LITTLE = 1e-7  # sds of a column: less than the distance between two of 2,000 values, and far above rounding


class Alteration(NamedTuple):
    """An array before and after all of its entries have changed, (n, ...) both."""

    name: str
    before: Array
    after: Array
    far: bool  # whether values move far
    faint: float  # share of the largest direction, below which are powers of changes, and rounding


def alterations(name: str, value: Array) -> list[Alteration]:
    """Ways to change an array, each with changes of one size; none where nothing changes."""
    changed = []
    for change in (_levels, _sizes, _steps, _little):
        before, after = value.copy(), value.copy()
        for place in np.ndindex(value.shape[1:]):
            here = (slice(None), *place)
            before[here], after[here] = change(value[here])
        if not np.array_equal(before, after):
            changed.append(Alteration(name, before, after, change is _sizes, _FAINTER if change is _little else _FAINT))
    return changed


def all_other(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Data of the same kind in which every entry has changed if its column has another value.

    Whole numbers keep to the values of their column, since they may be levels that a builder counts.
    """
    others = {}
    for name, value in arrays.items():
        after = np.array(value)
        if after.ndim:
            for place in np.ndindex(after.shape[1:]):
                here = (slice(None), *place)
                known, rank = np.unique(after[here], return_inverse=True)
                column = known[(rank + max(len(known) // 2, 1)) % len(known)]
                after[here] = _little(_steps(column)[1] if len(known) > len(column) // 2 else column)[1]
        others[name] = after
    return others


def repeated_rows(arrays: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Data with repeated rows: rows take the values of following ones, then half of the rows those of others."""
    rng = np.random.default_rng(3)
    lengths = {len(value) for value in arrays.values() if np.ndim(value)}
    for number in range(2 * _TIMES):
        taken = {}
        for length in lengths:
            order, taken[length] = rng.permutation(length), np.minimum(np.arange(length) + 1 + number, length - 1)
            if number >= _TIMES:
                taken[length] = np.arange(length)
                taken[length][order[: length // 2]] = order[length // 2 : 2 * (length // 2)]
        yield {name: value[taken[len(value)]] if np.ndim(value) else value for name, value in arrays.items()}


def _levels(column: Array) -> tuple[Array, Array]:
    """Each of few distinct values becomes the next one."""
    known, place = np.unique(column, return_inverse=True)
    if len(known) > _FEW_VALUES:
        return column, column
    return column, known[(place + 1) % len(known)]


def _sizes(column: Array) -> tuple[Array, Array]:
    """Each of many distinct values becomes one that is far from it in order, both within the bulk."""
    known, place = np.unique(column, return_inverse=True)
    count = len(known)
    if count <= _FEW_VALUES or not np.all(np.isfinite(known)):
        return column, column
    low, high = (known[round(share * (count - 1))] for share in (_TAIL, 1.0 - _TAIL))
    return np.clip(column, low, high), np.clip(known[(place + count // 2) % count], low, high)


def _steps(column: Array) -> tuple[Array, Array]:
    """Each of many whole numbers moves by one towards the median."""
    if not is_whole(column) or len(np.unique(column)) <= _FEW_VALUES:
        return column, column
    inwards = np.where(column < np.median(column), 1, -1)
    return column, (column + inwards).astype(column.dtype)


def _little(column: Array) -> tuple[Array, Array]:
    """Reals move up or down at random, by so little that their order stays, and outlying ones by less.

    Changes of squares are then of one size.
    """
    if is_whole(column) or not np.all(np.isfinite(column)):
        return column, column
    sign = np.random.default_rng(5).choice([-1.0, 1.0], size=len(column))
    low, middle, high = np.quantile(column, [0.25, 0.5, 0.75])
    away = np.abs(column - middle) / ((high - low) or np.std(column) or 1.0)
    return column, column + sign * (_LITTLE * np.std(column)) / np.maximum(1.0, away)


def altered_at(alteration: Alteration, rows: Any) -> Array:
    """The array after these rows have changed."""
    value = alteration.before.copy()
    value[rows] = alteration.after[rows]
    return value
