"""Interpreted functions of PyTensor's graphs, without its log messages and warnings."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.logprob.utils import ParameterValueError
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.mode import Mode
from pytensor.graph.replace import clone_replace, vectorize_graph
from pytensor.graph.rewriting.basic import in2out, node_rewriter
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.tensor.elemwise import CAReduce, Elemwise

from fedppl.types import Array

# Settings that PyTensor changes while it compiles or builds a graph, and restores.
_SET = ("mode", "cxx", "optdb__max_use_ratio", "compute_test_value", "traceback__limit")
_NO_BLAS = "PyTensor could not link to a BLAS"


@contextlib.contextmanager
def at_level(name: str, level: int) -> Iterator[None]:
    """Suppress a logger's messages below a level."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(max(before, level))
    try:
        yield
    finally:
        log.setLevel(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress PyMC's messages on which variables it draws, and PyTensor's warning that C code would find no BLAS.

    Nothing is compiled to C here; errors and other warnings pass.
    """
    with at_level("pymc.sampling.forward", logging.WARNING), warnings.catch_warnings():
        warnings.filterwarnings("ignore", _NO_BLAS, UserWarning)
        yield


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Build graphs without a note in each variable of who made it: a seventh of the time. No user wrote them."""
    with pytensor.config.change_flags(traceback__limit=0):
        yield


@functools.cache
def look_for_blas() -> None:
    """Have PyTensor look for a BLAS once, without its warning; that takes half a second."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _NO_BLAS, UserWarning)
        _ = pytensor.config.blas__ldflags


def settings() -> dict[str, Any]:
    """Present values of the settings that PyTensor changes while it compiles or builds a graph."""
    return {name: getattr(pytensor.config, name) for name in _SET if hasattr(pytensor.config, name)}


def set_back(before: Mapping[str, Any]) -> None:
    """Restore PyTensor's settings in a thread whose work is over.

    Of two threads that compile, the last one restores values that the other had set: without this call a user's own
    models might be interpreted from then on.
    """
    for name, value in before.items():
        if getattr(pytensor.config, name) is not value:
            setattr(pytensor.config, name, value)


# Interpreted functions of graphs, for what is called a few times per fit ----------------------------------------------


def _binary(op: Any, *inputs: Any) -> Any:
    return functools.reduce(lambda first, other: op(first, other), inputs)


# PyTensor calls NumPy where an operation is one of its functions with as many arguments. For these it calls Python once
# an element, some microseconds each: a product of three factors at all rows and draws took most of the time of `loo`.
_BY_NUMPY: dict[str, Callable[..., Any]] = {
    "Add": functools.partial(_binary, pt.add),
    "Mul": functools.partial(_binary, pt.mul),
    "Clip": lambda x, low, high: pt.minimum(pt.maximum(x, low), high),
    "Second": lambda like, x: pt.switch(pt.isnan(like), x, x),
    "Cast": lambda x: x * np.float64(1),  # to another type stays, by `is_super`
    "Softplus": lambda x: pt.maximum(x, 0.0) + pt.log1p(pt.exp(-pt.abs(x))),
    "Log1mexp": lambda x: pt.switch(x < -np.log(2), pt.log1p(-pt.exp(x)), pt.log(-pt.expm1(x))),
}


@node_rewriter([CAReduce])  # type: ignore[untyped-decorator]  # PyTensor has no types
def _of_a_number(_: Any, node: Any) -> list[Any] | None:
    """Drop a sum of one number along an axis that it has not, in PyMC's density of `pm.CAR`."""
    return None if node.inputs[0].type.ndim else [pt.cast(node.inputs[0], node.outputs[0].type.dtype)]


@node_rewriter([Elemwise])  # type: ignore[untyped-decorator]
def _by_numpy(_: Any, node: Any) -> list[Any] | None:
    """Write an operation by those that NumPy has."""
    name = type(node.op.scalar_op).__name__
    if name not in _BY_NUMPY or (name in ("Add", "Mul") and len(node.inputs) == 2):
        return None
    written, output = _BY_NUMPY[name](*node.inputs), node.outputs[0]
    return [written] if output.type.is_super(written.type) else None


_FIRST, _LAST = (in2out(_of_a_number, name="of_a_number"), 0.5), (in2out(_by_numpy, name="by_numpy"), 1000.0)
# Compiling these functions would take longer than all their calls, and so would simplifying them, which has no end on
# some graphs.
PYTHON_MODE = Mode(linker="py", optimizer="merge").register(_FIRST, _LAST)
# As it is written, log(1 - p) of a p by a logit of 37 is -inf. The second would write 1 - p so that it is not found.
_STABLE: dict[str, Any] = {"include": ("stabilize",), "exclude": ("local_neg_to_mul",)}
STABLE_MODE = Mode(linker="py", optimizer=RewriteDatabaseQuery(**_STABLE)).register(_FIRST, _LAST)
_SIMPLIFIED = Mode(linker="py", optimizer="fast_compile")


def stable(outputs: Sequence[Any]) -> list[Any]:
    """Log densities by operations that keep their digits, before gradients are taken."""
    return list(rewrite_graph(clone_replace(list(outputs)), **_STABLE))


@untraced()
def python_function(inputs: Sequence[Any], outputs: Any, mode: Mode = PYTHON_MODE) -> Callable[..., Any]:
    """Build an interpreted function: no compilation, slow per call, fast with large arrays.

    PyTensor keeps intermediate values in the function, so threads take turns.
    """
    function = pytensor.function(list(inputs), outputs, mode=mode, on_unused_input="ignore")
    if any(isinstance(node.op, OpFromGraph) for node in function.maker.fgraph.apply_nodes):
        look_for_blas()  # PyTensor does, and warns, where it compiles such an operation at its first call
    simplified = functools.cache(
        lambda: pytensor.function(list(inputs), outputs, mode=_SIMPLIFIED, on_unused_input="ignore")
    )
    lock = threading.Lock()

    def call(*values: Any) -> Any:
        # Far from a density's mass numbers overflow; callers check the result.
        with lock, np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            try:
                return function(*values)
            except ParameterValueError:
                raise
            except Exception:  # a graph that computes nothing as it is written
                return simplified()(*values)

    return call


def batched(draws: Mapping[Any, Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[..., list[Array]]:
    """Vectorise graphs over a leading axis of draws of some variables, interpreted.

    `draws` maps each variable to that of its draws: these are the arguments, before the inputs.
    """
    count = next(iter(draws.values())).shape[0]
    vectorised = []
    for single, output in zip(outputs, vectorize_graph(list(outputs), dict(draws)), strict=True):
        constant = output.type.ndim == single.type.ndim  # without parameters: the same for every draw
        vectorised.append(pt.broadcast_to(output, (count, *output.shape)) if constant else output)
    return python_function([*draws.values(), *inputs], vectorised)
