"""What a declared model is made of: calls of a network of torch, and distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytensor.graph.basic import equal_computations
from pytensor.graph.traversal import ancestors


def kind_of(rv: Any) -> str:
    """PyTensor's name of a distribution: "normal", "laplace"."""
    return getattr(rv.owner.op, "name", None) or type(rv.owner.op).__name__


def network_nodes(outputs: Sequence[Any]) -> list[Any]:
    """Nodes that evaluate a network of torch, above these outputs."""
    nodes = (variable.owner for variable in ancestors(outputs) if variable.owner is not None)
    return list(dict.fromkeys(node for node in nodes if hasattr(node.op, "net")))


def one_call(outputs: Sequence[Any]) -> list[Any]:
    """The output of the first of them, once for each time that PyMC put one and the same call there."""
    nodes = network_nodes(outputs)
    return [
        node.outputs[0] for node in nodes if node.op == nodes[0].op and equal_computations(node.inputs, nodes[0].inputs)
    ]
