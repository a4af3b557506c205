"""Functions of PyTensor's graphs that are interpreted: nothing is compiled for what is called a few times a fit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.mode import Mode
from pytensor.graph.replace import vectorize_graph

from fedppl.model.quiet import look_for_blas
from fedppl.types import Array

# Functions that run once per fit are interpreted: compiling them would take longer than every call together.
PYTHON_MODE = Mode(linker="py", optimizer="fast_compile")
# For what is called at a few points: graphs as they were written, which take longer to simplify than to call.
AS_WRITTEN = Mode(linker="py", optimizer="merge")


def python_function(inputs: Sequence[Any], outputs: Any, mode: Mode = PYTHON_MODE) -> Callable[..., Any]:
    """Build an interpreted function: no compilation, slow per call, fast with large arrays.

    PyTensor keeps a function's intermediate values in the function, so threads take turns.
    """
    function = pytensor.function(list(inputs), outputs, mode=mode, on_unused_input="ignore")
    if any(isinstance(node.op, OpFromGraph) for node in function.maker.fgraph.apply_nodes):
        look_for_blas()  # PyTensor does, and warns, where it compiles such an operation at its first call
    lock = threading.Lock()

    def call(*values: Any) -> Any:
        # Far from a density's mass numbers overflow; who asked there looks at what comes back.
        with lock, np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            return function(*values)

    return call


def batched(
    x: Any, inputs: Sequence[Any], outputs: Sequence[Any], mode: Mode = PYTHON_MODE
) -> Callable[..., list[Array]]:
    """Vectorise graphs of one vector x over a leading axis of draws, interpreted."""
    many = pt.matrix("draws")
    return python_function([many, *inputs], _vectorised({x: many}, outputs, many.shape[0]), mode)


def over_draws(variables: Sequence[Any], outputs: Sequence[Any]) -> Callable[..., list[Array]]:
    """The same for graphs of several variables, whose draws (S, ...) are the arguments."""
    many = {v: pt.TensorType(v.type.dtype, shape=(None, *v.type.shape))(v.name) for v in variables}
    first = next(iter(many.values()))
    return python_function(list(many.values()), _vectorised(many, outputs, first.shape[0]))


def _vectorised(many: dict[Any, Any], outputs: Sequence[Any], count: Any) -> list[Any]:
    found = []
    for one, output in zip(outputs, vectorize_graph(list(outputs), many), strict=True):
        constant = output.type.ndim == one.type.ndim  # without parameters: the same for every draw
        found.append(pt.broadcast_to(output, (count, *output.shape)) if constant else output)
    return found
