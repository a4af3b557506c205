"""What single rows say of the parameters: slopes of each row's log density, exact, along directions of φ and θ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import clone_replace, vectorize_graph
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.scalar.basic import Add, Cast, Mul
from pytensor.scalar.math import Softplus

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.client import ClientModel
from fedppl.model.quiet import look_for_blas
from fedppl.types import Array


class RowScores(NamedTuple):
    """Of a template: which terms of its density are not of single rows, and slopes of those that are."""

    joint: tuple[str, ...]
    along: (
        Callable[..., Sequence[Array]] | None
    )  # along(x, V (k, p), *inputs): slopes (k, n) for each observed variable


def row_scores(client: ClientModel) -> RowScores:
    """Built once a template, interpreted."""
    functions = client.template.functions
    if "row scores" not in functions:
        functions["row scores"] = _build(client)
    found: RowScores = functions["row scores"]
    return found


def slopes(client: ClientModel, x: Array, directions: Array) -> Array:
    """Slopes (n, k) of the log density of each row along directions (k, m + d), at x = (φ, θ)."""
    found = list(by_length(client, x, directions).values())
    return np.concatenate(found) if found else np.zeros((0, len(directions)))


def by_length(
    client: ClientModel, x: Array, directions: Array, inputs: Sequence[Any] | None = None
) -> dict[int, Array]:
    """The same by length of outcomes, with the client's inputs or others.

    Entries that stand in one row of an outcome are one, and so are those of outcomes with as many rows.
    """
    along = row_scores(client).along
    rows: dict[int, Array] = {}
    for found in along(x, directions, *(client.inputs if inputs is None else inputs)) if along else ():
        rows[found.shape[1]] = rows.get(found.shape[1], 0.0) + found.T
    return rows


def _build(client: ClientModel) -> RowScores:
    look_for_blas()
    template = client.template
    shared, local = template.variables
    parts = template.parts
    joint = [term.name for term in parts.model.potentials if term in parts.site_terms]
    x, inputs, densities = _graph.observed_graph(parts, shared, local)
    by_row = []
    for rv, density in zip(parts.model.observed_RVs, densities, strict=True):
        if density.type.ndim == 0 and rv.type.ndim:
            joint.append(rv.name)
        else:
            entries = pt.atleast_1d(density)
            by_row.append(pt.sum(entries.reshape((entries.shape[0], -1)), axis=1))
    return RowScores(tuple(joint), _along(x, inputs, by_row) if by_row else None)


def _along(x: Any, inputs: Sequence[Any], by_row: Sequence[Any]) -> Callable[..., Sequence[Array]]:
    """Directional slopes, by way of a product that is linear in its weights, whose own slopes they are."""
    direction, many = pt.vector("direction"), pt.matrix("directions")
    found = []
    for density in by_row:
        weights = pt.vector("weights")
        slope = pt.grad(pt.dot(weights, density), x, disconnected_inputs="ignore")
        one = pt.grad(pt.dot(slope, direction), weights, disconnected_inputs="ignore")
        (one,) = clone_replace([one], {weights: pt.zeros_like(density)})  # on which no slope depends
        (each,) = vectorize_graph([one], {direction: many})
        found.append(pt.broadcast_to(each, (many.shape[0], density.shape[0])))
    known: list[Callable[..., Sequence[Array]]] = []

    def along(*values: Any) -> Sequence[Array]:
        if not known:
            known.append(interpreted.python_function([x, many, *inputs], _in_numpy(found), interpreted.AS_WRITTEN))
        if len(known) == 1:
            try:
                return known[0](*values)
            except Exception:  # of a rewrite that does not hold: as the graph was written, and slower
                known.append(interpreted.python_function([x, many, *inputs], found, interpreted.AS_WRITTEN))
        return known[1](*values)

    return along


def _in_numpy(outputs: Sequence[Any]) -> list[Any]:
    """Graphs in their stable form, of what NumPy computes for whole arrays: what it has not, Python does by element."""
    # Two shapes of nothing but zeros need not be equal, which the one takes for granted; the other does not end on
    # slopes of censored outcomes with a scale, nor the third where outcomes are constants.
    excluded = ("local_merge_alloc", "local_greedy_distributor", "local_mul_zero")
    wanted = {"include": ("canonicalize", "stabilize"), "exclude": excluded}
    simpler = rewrite_graph(list(outputs), **wanted)
    graph = FunctionGraph(outputs=simpler, clone=False)
    for node in graph.toposort():
        scalar = getattr(node.op, "scalar_op", None)
        if isinstance(scalar, Add | Mul) and len(node.inputs) > 2:
            graph.replace(node.outputs[0], functools.reduce(node.op, node.inputs), import_missing=True)
        elif isinstance(scalar, Softplus):
            (value,) = node.inputs
            same = pt.log1p(pt.exp(-pt.abs(value))) + pt.maximum(value, 0.0)
            graph.replace(node.outputs[0], same, import_missing=True)
        elif isinstance(scalar, Cast) and node.outputs[0].type.dtype == "float64":
            graph.replace(node.outputs[0], node.inputs[0] * np.float64(1.0), import_missing=True)
    return list(graph.outputs)
