"""Indices that a model computes from data: a negative one is the entry counted from the end, and no error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Constant
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.types import DataError


class Indices(NamedTuple):
    """Index expressions, the containers that each is computed from, and their values as a function of the inputs.

    A constant array has no container: it may be a client's array that went straight into the model, or the model's own.
    """

    names: tuple[tuple[str, ...], ...]
    values: Callable[..., Sequence[Any]]


def site_indices(graph: _graph.SiteGraph, parts: _graph.Parts) -> Indices:
    """Indices in log p(y, θ | φ) and in deterministics, as a function of the graph's inputs."""
    data = dict(zip(graph.inputs, (v.name for v in parts.data), strict=False))
    found = _expressions([graph.logp], data, {graph.x})
    beside = _expressions(parts.model.deterministics, {v: v.name for v in parts.data}, set(parts.model.basic_RVs))
    replace = dict(zip(parts.data, graph.inputs, strict=False))
    found |= dict(zip(clone_replace(list(beside), replace), beside.values(), strict=True)) if beside else {}
    values = interpreted.python_function(graph.inputs, list(found)) if found else _no_values
    return Indices(tuple(found.values()), values)


def _no_values(*inputs: Any) -> Sequence[Any]:
    return ()


def read_indices(model: Any) -> Indices:
    """Indices in a PyMC model of what its containers hold now; the function has no arguments."""
    read = [*model.basic_RVs, *model.deterministics]
    found = _expressions(read, {v: v.name for v in model.data_vars}, set(model.basic_RVs))
    return Indices(tuple(found.values()), interpreted.python_function([], list(found)))


def _expressions(outputs: Iterable[Any], data: Mapping[Any, str], parameters: set[Any]) -> dict[Any, tuple[str, ...]]:
    """Indices that no parameter decides, each with the containers whose values, not only whose shapes, it reads."""
    found: dict[Any, tuple[str, ...]] = {}
    for variable in ancestors(list(outputs)):
        node = variable.owner
        if node is None or "Subtensor" not in type(node.op).__name__:
            continue
        for index in _of_entries(node):
            if not getattr(index.type, "dtype", "").startswith("int") or parameters & set(ancestors([index])):
                continue
            read = _graph.values_read([index])
            names = tuple(sorted(data[v] for v in read if v in data))
            if names or (isinstance(index, Constant) and np.ndim(index.data) and np.any(index.data < 0)):
                found[index if hasattr(index.type, "ndim") else pt.tensor_from_scalar(index)] = names
    return found


def _of_entries(node: Any) -> list[Any]:
    """Inputs of an indexing operation that name entries; bounds of slices may count from the end."""
    given = list(node.inputs[2 if "Inc" in type(node.op).__name__ else 1 :])
    entries = []
    for item in getattr(node.op, "idx_list", None) or [None] * len(given):
        taken = sum(part is not None for part in (item.start, item.stop, item.step)) if isinstance(item, slice) else 1
        entries += [] if isinstance(item, slice) else given[:taken]
        given = given[taken:]
    return [*entries, *given]


def require_not_negative(client_id: str, indices: Indices, arrays: Mapping[str, Any], inputs: Sequence[Any]) -> None:
    """Refuse data that index from the end."""
    if not indices.names:
        return
    for names, value in zip(indices.names, indices.values(*inputs), strict=True):
        index = np.asarray(value)
        if not np.any(index < 0):
            continue
        where = tuple(int(i) for i in np.argwhere(index < 0)[0])
        same = [name for name in names or arrays if np.array_equal(arrays[name], index)]
        if same:
            what = f"{same[0]!r} holds {index[where]} at index {where}, and the model takes it for an index"
        elif names:
            what = f"the model computes the index {index[where]} from {', '.join(map(repr, names))}, at {where}"
        else:
            continue  # the model's own constant
        raise DataError(
            f"client {client_id!r}: {what}. A negative index counts from the end, which data seldom mean: number "
            "groups 0 to n - 1; where it stands for none, index by pt.maximum(index, 0) and mask those rows."
        )
