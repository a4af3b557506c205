"""PyTensor's graphs compiled by Numba: in which mode, and what is not said meanwhile."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from numba.core.compiler_lock import global_compiler_lock
from numba.core.errors import NumbaPerformanceWarning
from pytensor.compile.mode import get_mode
from pytensor.graph.rewriting.basic import in2out, node_rewriter
from pytensor.tensor.basic import tensor_copy
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.elemwise import DimShuffle


def _contiguous(fgraph: Any, node: Any) -> list[Any] | None:
    """Copy a batch that is a view with other axes before it is multiplied.

    The gradients of Cholesky factors and of triangular systems multiply transposes. One transposed matrix is an array
    in Fortran's order; a batch of them is in no order that Numba knows, so that it copies each matrix, and warns.
    """
    inputs = [tensor_copy(x) if x.owner and isinstance(x.owner.op, DimShuffle) else x for x in node.inputs]
    return None if inputs == node.inputs else [node.op(*inputs)]


# After all of PyTensor's own rewrites, which would take the copies out.
MODE = get_mode("NUMBA").register((in2out(node_rewriter([BatchedDot])(_contiguous)), 1000))


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
