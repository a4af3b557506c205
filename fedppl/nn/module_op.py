"""Operations of PyTensor that evaluate a network of torch, and its vector-Jacobian product, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytensor.tensor as pt
import torch
from pytensor.gradient import DisconnectedType, grad_not_implemented
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op

from fedppl.nn.devices import host, placed, tensor
from fedppl.nn.functional import call, own_copy, parts_of, state_of
from fedppl.types import Array


def called(net: torch.nn.Module, flat: torch.Tensor, X: torch.Tensor) -> torch.Tensor:
    """The output, by this thread's copy."""
    net = own_copy(net)
    return call(net, state_of(net, flat), X)


def _parts(net: torch.nn.Module, flat: torch.Tensor, X: Array, place: torch.device) -> Iterator[torch.Tensor]:
    """Inputs, some rows at a time; all at once where rows depend on each other, which a few of them show."""
    parts = parts_of(net, X.shape)
    if len(parts) > 1:
        few = tensor(X[np.linspace(0, len(X) - 1, 4).astype(int)], torch.float64, place)
        with torch.no_grad():
            together, alone = (
                called(net, flat, few),
                torch.cat([called(net, flat, row) for row in torch.split(few, 1)]),
            )
        if together.shape != alone.shape or not torch.allclose(together, alone, rtol=1e-9, atol=1e-9):
            parts = [slice(None)]
    for rows in parts:
        yield tensor(np.array(X[rows]), torch.float64, place)


class ModuleOp(Op):  # type: ignore[misc]
    """Weights (d,) and inputs (n, ...) to the network's output. Two of one network are equal."""

    __props__ = ("net", "ndim", "device")

    def __init__(self, net: torch.nn.Module, ndim: int, device: torch.device) -> None:
        self.net, self.ndim, self.device = net, ndim, device

    def __str__(self) -> str:
        return f"module({type(self.net).__name__})"

    def make_node(self, flat: Any, X: Any) -> Apply:
        """Types of inputs and output."""
        flat, X = pt.as_tensor_variable(flat), pt.as_tensor_variable(X)
        return Apply(self, [flat, X], [pt.tensor(dtype="float64", shape=(None,) * self.ndim)])

    def perform(self, node: Apply, inputs: Any, outputs: Any) -> None:
        """Run the network."""
        place = placed(self.device, torch.float64)
        flat, X = tensor(np.array(inputs[0]), torch.float64, place), np.asarray(inputs[1])
        with torch.no_grad():
            found = [host(called(self.net, flat, rows)) for rows in _parts(self.net, flat, X, place)]
        outputs[0][0] = np.concatenate(found) if len(found) > 1 else found[0]

    def pullback(self, inputs: Any, outputs: Any, cotangents: Any) -> list[Any]:
        """Gradients with respect to the weights, and to inputs that are real numbers."""
        pulled = ModuleGradientOp(self.net, self.device)(*inputs, *cotangents)
        real = inputs[1].type.dtype.startswith("float")
        return [pulled[0], pulled[1] if real else DisconnectedType()()]

    def L_op(self, inputs: Any, outputs: Any, output_gradients: Any) -> list[Any]:
        """`pullback`, as PyTensor before 3 calls it."""
        return self.pullback(inputs, outputs, output_gradients)

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        """No gradient with respect to integer inputs."""
        return [[True], [node.inputs[1].type.dtype.startswith("float")]]


class ModuleGradientOp(Op):  # type: ignore[misc]
    """Weights, inputs and the output's cotangent to the cotangents of weights and inputs."""

    __props__ = ("net", "device")

    def __init__(self, net: torch.nn.Module, device: torch.device) -> None:
        self.net, self.device = net, device

    def make_node(self, flat: Any, X: Any, cotangent: Any) -> Apply:
        """Types of inputs and outputs."""
        flat, X, cotangent = map(pt.as_tensor_variable, (flat, X, cotangent))
        return Apply(self, [flat, X, cotangent], [flat.type(), pt.tensor(dtype="float64", shape=X.type.shape)])

    def perform(self, node: Apply, inputs: Any, outputs: Any) -> None:
        """Run the network forwards, and the cotangent backwards."""
        place = placed(self.device, torch.float64)
        flat, X, cotangent = tensor(np.array(inputs[0]), torch.float64, place), np.asarray(inputs[1]), inputs[2]
        real = node.inputs[1].type.dtype.startswith("float")
        flat.requires_grad_()
        by_weights, by_inputs, first = np.zeros(len(flat)), np.zeros(X.shape), 0
        for given in _parts(self.net, flat, X, place):
            rows = slice(first, first + len(given))
            with torch.enable_grad():
                output = called(self.net, flat, given.requires_grad_() if real else given)
                pull = tensor(np.array(cotangent[rows]), torch.float64, place)
                found = torch.autograd.grad(output, [flat, given] if real else [flat], pull, allow_unused=True)
            by_weights += 0.0 if found[0] is None else host(found[0])
            by_inputs[rows] = 0.0 if not real or found[1] is None else host(found[1])
            first = rows.stop
        outputs[0][0], outputs[1][0] = by_weights, by_inputs

    def pullback(self, inputs: Any, outputs: Any, cotangents: Any) -> list[Any]:
        """Nothing: second derivatives are not offered."""
        return [
            grad_not_implemented(self, i, value, "use differences of the gradient") for i, value in enumerate(inputs)
        ]

    def L_op(self, inputs: Any, outputs: Any, output_gradients: Any) -> list[Any]:
        """`pullback`, as PyTensor before 3 calls it."""
        return self.pullback(inputs, outputs, output_gradients)
