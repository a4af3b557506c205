"""PyTensor's graphs compiled by Numba: in which mode, and what is not said meanwhile."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import numba
from numba.core.compiler_lock import global_compiler_lock
from numba.core.errors import NumbaPerformanceWarning
from pytensor.compile.mode import get_mode
from pytensor.graph.rewriting.basic import in2out, node_rewriter
from pytensor.link.numba.cache import CACHED_SRC_FUNCTIONS
from pytensor.tensor.basic import tensor_copy
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.type_other import NoneTypeT


def _contiguous(fgraph: Any, node: Any) -> list[Any] | None:
    """Copy a batch that is a view with other axes before it is multiplied.

    The gradients of Cholesky factors and of triangular systems multiply transposes. One transposed matrix is an array
    in Fortran's order; a batch of them is in no order that Numba knows, so that it copies each matrix, and warns.
    """
    inputs = [tensor_copy(x) if x.owner and isinstance(x.owner.op, DimShuffle) else x for x in node.inputs]
    return None if inputs == node.inputs else [node.op(*inputs)]


_OTHER_SHAPE = "an array has another shape than the model declares"


class _OfShape(SpecifyShape):  # type: ignore[misc]
    """The same, but its compiled error has no numbers in it: what writes them out takes seconds to compile."""


def _plain(fgraph: Any, node: Any) -> list[Any] | None:
    """A check of a shape whose error is a constant."""
    return None if isinstance(node.op, _OfShape) else [_OfShape()(*node.inputs)]


def _checked(op: Any, node: Any, **_: Any) -> Any:
    """Numba's code of such a check."""
    lengths = [f"length_{axis}" for axis in range(len(node.inputs) - 1)]
    known = [axis for axis, v in enumerate(node.inputs[1:]) if not isinstance(v.type, NoneTypeT)]
    differs = " or ".join(f"x.shape[{axis}] != {lengths[axis]}.item()" for axis in known) or "False"
    source = f"def of_shape(x, {', '.join(lengths)}):\n    assert not ({differs}), '{_OTHER_SHAPE}'\n    return x"
    found: dict[str, Any] = {}
    exec(source, found)  # as PyTensor does it
    from pytensor.link.numba.dispatch.basic import numba_njit

    return numba_njit(found["of_shape"])


@functools.cache
def mode() -> Any:
    """PyTensor's mode for Numba, with less to compile."""
    from pytensor.link.numba.dispatch.basic import register_funcify_default_op_cache_key

    register_funcify_default_op_cache_key(_OfShape)(_checked)
    # After all of PyTensor's own rewrites, which would take the copies out.
    ours = in2out(node_rewriter([BatchedDot])(_contiguous)), in2out(node_rewriter([SpecifyShape])(_plain))
    return get_mode("NUMBA").register(*((one, 1000 + place) for place, one in enumerate(ours)))


def inlined(compiled: Any) -> tuple[Any, bool]:
    """What PyTensor has Numba compile, to be compiled into what calls it, and whether it may be kept on disk.

    PyTensor calls it by way of another function, under whose name it is kept. LLVM would go through all of the code
    once for each of the two, and again for what calls them. What holds pointers, which mean nothing in another process,
    has no name.
    """
    outer = compiled.py_func
    inner = outer.__globals__.get("jitable_func", compiled) if outer in CACHED_SRC_FUNCTIONS else compiled
    return numba.njit(inline="always")(getattr(inner, "py_func", outer)), outer in CACHED_SRC_FUNCTIONS


@contextlib.contextmanager
def without_notices() -> Iterator[None]:
    """Leave out what Numba says of speed about a model that somebody else wrote; the rest is said.

    An Op without Numba's own code runs in object mode, and a product with some columns of a matrix copies them: slower,
    still right. Numba changes the warning filters of the whole process while it compiles, as this does; under its own
    lock, neither puts back what the other had set.
    """
    import pytensor.link.numba.dispatch  # noqa: F401  # sets filters of its own, which are to last

    with global_compiler_lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*object mode.*", category=UserWarning)
        warnings.simplefilter("ignore", NumbaPerformanceWarning)
        yield
