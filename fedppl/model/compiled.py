"""PyTensor's graphs compiled by Numba: its mode, and kernels of one signature that read a client's packed arrays."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import from_dtype
from numba.core.compiler_lock import global_compiler_lock
from numba.core.errors import NumbaPerformanceWarning, TypingError
from numba.core.types import Array
from pytensor.compile.mode import get_mode
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Constant
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import in2out, node_rewriter
from pytensor.link.numba import cache
from pytensor.tensor.basic import Alloc, Split, tensor_copy
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.type_other import NoneTypeT

from fedppl.numerics.pairs import PACKED


def _contiguous(fgraph: Any, node: Any) -> list[Any] | None:
    """Copy a batch that is a view with other axes before it is multiplied.

    The gradients of Cholesky factors and of triangular systems multiply transposes. One transposed matrix is an array
    in Fortran's order; a batch of them is in no order that Numba knows, so that it copies each matrix, and warns.
    """
    inputs = [tensor_copy(x) if x.owner and isinstance(x.owner.op, DimShuffle) else x for x in node.inputs]
    return None if inputs == node.inputs else [node.op(*inputs)]


_TRANSPOSE = (1, 0)
_MOST_ARGUMENTS = 30
_OTHER_SHAPE = "an array has another shape than the model declares"


class _OfShape(SpecifyShape):  # type: ignore[misc]
    """The same, but its compiled error has no numbers in it: what writes them out takes seconds to compile."""


class _View(Op):  # type: ignore[misc]
    """New axes, none of length one, or a transpose, by indexing: views by strides take longer to compile."""

    __props__ = ("input_ndim", "new_order")
    view_map = {0: [0]}

    def __init__(self, input_ndim: int, new_order: tuple[Any, ...]) -> None:
        self.input_ndim, self.new_order = input_ndim, new_order
        self.same = DimShuffle(input_ndim=input_ndim, new_order=new_order)

    def make_node(self, x: Any) -> Any:
        """Of the same type."""
        return Apply(self, [x], [self.same(x).type()])

    def perform(self, node: Any, inputs: Any, outputs: Any) -> None:
        """As the other does."""
        self.same.perform(node, inputs, outputs)


class _Full(Alloc):  # type: ignore[misc]
    """The same for one number, which needs no error of shapes."""


class _Cut(Split):  # type: ignore[misc]
    """The same by indexing."""


def _plain(fgraph: Any, node: Any) -> list[Any] | None:
    """What compiles faster in its place."""
    if isinstance(node.op, (_OfShape, _View, _Cut, _Full)):
        return None
    if isinstance(node.op, DimShuffle):
        # A transpose is copied: Numba would know that it is in Fortran's order, in which some of PyTensor's code for
        # batches is wrong. By strides it would be in no order, and be copied for every product.
        if node.op.shuffle != sorted(node.op.shuffle) and tuple(node.op.new_order) != _TRANSPOSE:
            return None
        return [_View(input_ndim=node.op.input_ndim, new_order=node.op.new_order)(*node.inputs)]
    if isinstance(node.op, Split):
        is_known = not hasattr(node.op, "axis") and isinstance(node.inputs[1], Constant)  # PyTensor 3 knows it already
        return list(_Cut(node.op.len_splits).make_node(*node.inputs).outputs) if is_known else None
    if isinstance(node.op, Alloc):
        return [_Full()(*node.inputs)] if all(length == 1 for length in node.inputs[0].type.shape) else None
    return [_OfShape()(*node.inputs)]


def _code_of_shape(op: Any, node: Any, **_: Any) -> tuple[Any, str]:
    """Numba's code of a check of a shape."""
    lengths = [f"length_{axis}" for axis in range(len(node.inputs) - 1)]
    known = [axis for axis, v in enumerate(node.inputs[1:]) if not isinstance(v.type, NoneTypeT)]
    differs = " or ".join(f"x.shape[{axis}] != {lengths[axis]}.item()" for axis in known) or "False"
    return _function(f"of_shape(x, {', '.join(lengths)})", f"assert not ({differs}), '{_OTHER_SHAPE}'", "return x")


def _code_of_view(op: Any, node: Any, **_: Any) -> tuple[Any, str]:
    """Numba's code of other axes: those of length one are dropped, then there are new ones."""
    if not op.input_ndim:  # a number, for all that Numba knows
        return _function("dimshuffle(x)", f"return np.asarray(x).reshape({(1,) * len(op.new_order)})")
    lines = [f"assert x.shape[{axis}] == 1, '{_OTHER_SHAPE}'" for axis in op.same.drop]
    if op.same.drop:
        lines += [f"x = x[{', '.join('0' if axis in op.same.drop else ':' for axis in range(op.input_ndim))}]"]
    if not op.same.shuffle:
        return _function("dimshuffle(x)", *lines, f"return np.asarray(x).reshape({(1,) * len(op.new_order)})")
    if tuple(op.new_order) == _TRANSPOSE:
        return _function("dimshuffle(x)", "return np.ascontiguousarray(x.T)")
    if "x" in op.new_order:
        lines += [f"x = x[{', '.join('None' if axis == 'x' else ':' for axis in op.new_order)}]"]
    return _function("dimshuffle(x)", *lines, "return x")


def _code_of_full(op: Any, node: Any, **_: Any) -> tuple[Any, str]:
    """Numba's code of an array of one number."""
    lengths = [f"length_{axis}" for axis in range(len(node.inputs) - 1)]
    shape = "".join(f"{length}.item(), " for length in lengths)
    number = f"x[{', '.join('0' * node.inputs[0].type.ndim)}]" if node.inputs[0].type.ndim else "x.item()"
    lines = [f"found = np.empty(({shape}), dtype=np.{node.inputs[0].type.dtype})", f"found[...] = {number}"]
    return _function(f"alloc({', '.join(['x', *lengths])})", *lines, "return found")


def _code_of_cut(op: Any, node: Any, **_: Any) -> tuple[Any, str]:
    """Numba's code of parts along an axis."""
    axis, ends = int(node.inputs[1].data) % node.inputs[0].type.ndim, [f"end_{i}" for i in range(op.len_splits)]
    lines = [f"{end} = {start} + sizes[{i}]" for i, (start, end) in enumerate(zip(["0", *ends], ends, strict=False))]
    lines += [f"assert 0 <= {' <= '.join(ends)} == x.shape[{axis}], '{_OTHER_SHAPE}'"]
    parts = (f"x[{':, ' * axis}{start}:{end}]" for start, end in zip(["0", *ends], ends, strict=False))
    return _function("split(x, axis, sizes)", *lines, f"return ({', '.join(parts)},)")


def _function(head: str, *lines: str) -> tuple[Any, str]:
    """A function of this source, and its name in PyTensor's cache: two sources of one Op are two functions."""
    from pytensor.link.numba.dispatch.basic import numba_njit

    found: dict[str, Any] = {"np": np}
    source = "\n    ".join([f"def {head}:", *lines])
    exec(source, found)  # as PyTensor does it
    return numba_njit(found[head.split("(")[0]]), hashlib.sha256(f"{__name__}\n{source}".encode()).hexdigest()


@functools.cache
def mode() -> Any:
    """PyTensor's mode for Numba, with less to compile."""
    from pytensor.link.numba.dispatch.basic import register_funcify_and_cache_key

    for op, code in ((_OfShape, _code_of_shape), (_View, _code_of_view), (_Cut, _code_of_cut), (_Full, _code_of_full)):
        register_funcify_and_cache_key(op)(code)
    # After all of PyTensor's own rewrites, which would take the copies out.
    ours = (
        in2out(node_rewriter([BatchedDot])(_contiguous)),
        in2out(node_rewriter([SpecifyShape, DimShuffle, Split, Alloc])(_plain)),
    )
    return get_mode("NUMBA").register(*((one, 1000 + place) for place, one in enumerate(ours)))


def inlined(compiled: Any) -> tuple[Any, bool]:
    """What PyTensor has Numba compile, to be compiled into what calls it, and whether it may be kept on disk.

    PyTensor calls it by way of another function, under whose name it is kept. LLVM would go through all of the code
    once for each of the two, and again for what calls them. What holds pointers, which mean nothing in another process,
    has no name.
    """
    outer = compiled.py_func
    inner = outer.__globals__.get("jitable_func", compiled) if outer in cache.CACHED_SRC_FUNCTIONS else compiled
    function = getattr(inner, "py_func", outer)
    # Python passes more arguments than these as a tuple, which Numba does not take apart where it inlines.
    inline = "always" if function.__code__.co_argcount <= _MOST_ARGUMENTS else "never"
    return numba.njit(inline=inline)(function), outer in cache.CACHED_SRC_FUNCTIONS


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


# A client's arrays as two flat buffers and x as one, so that every kernel has one signature ---------------------------

_CODE = 3  # another where Ops have other code, so that what was compiled before is not taken for it


def pack(arrays: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return (reals, integers, where): where holds start, stop and shape of each array in turn."""
    buffers: dict[bool, list[Any]] = {True: [], False: []}
    filled = {True: 0, False: 0}
    where: list[int] = []
    for array in arrays:
        real = np.issubdtype(array.dtype, np.floating)
        where += [filled[real], filled[real] + array.size, *array.shape]
        filled[real] += array.size
        buffers[real].append(np.ravel(array))
    reals = np.concatenate([np.zeros(0), *buffers[True]]).astype(np.float64)
    integers = np.concatenate([np.zeros(0, dtype=np.int64), *buffers[False]]).astype(np.int64)
    return reals, integers, np.asarray(where, dtype=np.int64)


class Piece(NamedTuple):
    """A part of the flat vector x that a kernel takes for a variable of its own."""

    ndim: int
    shape: tuple[int, ...] | int  # or which of the arrays has it
    has_slope: bool  # whether the kernel gives the gradient in it; else it is 0


def unpacking_kernel(
    compiled: Callable[[], tuple[Callable[..., Any], bool]],
    pieces: Sequence[Piece],
    types: Sequence[tuple[str, int]],
    name: str | None = None,
) -> Callable[..., Any]:
    """Wrap kernel(*pieces, *arrays) -> (value, *slopes) as kernel(x, reals, integers, where) -> [value, gradient].

    `compiled` gives the jitted function where it is not found on disk, and whether it may be kept there, under a digest
    of its `name`. x consists of `pieces`; `types` are dtype and dimensions of each array, in the order of `pack`.
    """
    # Numba cannot loop over arrays of different types, so all is written out for these types.
    lines = ["def unpacked(x, reals, integers, where):", *_arrays(types), "    start = 0"]
    for i, piece in enumerate(pieces):
        lines += _cut(i, piece)
    names = [*(f"p{i}" for i in range(len(pieces))), *(f"a{i}" for i in range(len(types)))]
    lines += [f"    outputs = kernel({', '.join(names)})", "    found = np.zeros(1 + x.shape[0])"]
    lines += ["    found[0] = np.asarray(outputs[0]).item()"]
    given = 1
    for i, piece in enumerate(pieces):
        if piece.has_slope:
            lines += _filled(i, given, piece.ndim)
            given += 1
    return _found_or_compiled("\n".join([*lines, "    return found"]), compiled, name, PACKED)


def vector_kernel(
    compiled: Callable[[], tuple[Callable[..., Any], bool]], types: Sequence[tuple[str, int]], name: str | None = None
) -> Callable[..., Any]:
    """Wrap kernel(x, *arrays) -> (vector,) as kernel(x, reals, integers, where) -> vector.

    Parameters
    ----------
    compiled, types, name
        As of `unpacking_kernel`.
    """
    arguments = ", ".join(["x", *(f"a{i}" for i in range(len(types)))])
    lines = ["def unpacked(x, reals, integers, where):", *_arrays(types), f"    vector = kernel({arguments})[0]"]
    lines += ["    found = np.zeros(vector.shape[0])", "    for i in range(vector.shape[0]):"]
    lines += ["        found[i] = vector[i]", "    return found"]
    return _found_or_compiled("\n".join(lines), compiled, name, PACKED)


def unpacked_function(
    compiled: Callable[[], tuple[Callable[..., Any], bool]], types: Sequence[tuple[str, int]], name: str | None = None
) -> Callable[..., Any]:
    """Wrap kernel(*arrays) as a function of arrays, or what can be made arrays, that gives all outputs in a tuple.

    Parameters
    ----------
    compiled, types, name
        As of `unpacking_kernel`.
    """
    arguments = ", ".join(f"a{i}" for i in range(len(types)))
    source = f"def unpacked({arguments}):\n    return kernel({arguments})"
    jitted = _found_or_compiled(source, compiled, name, tuple(Array(from_dtype(np.dtype(d)), n, "C") for d, n in types))

    def call(*values: Any) -> Any:
        return jitted(*(np.asarray(v, dtype=dtype, order="C") for v, (dtype, _) in zip(values, types, strict=True)))

    return call


def _found_or_compiled(
    source: str, compiled: Callable[[], tuple[Callable[..., Any], bool]], name: str | None, signature: Any
) -> Callable[..., Any]:
    key = _key(name, source) if name is not None and config.numba__cache else None
    if key is not None:
        try:  # with nothing to compile: it is read from disk, or it fails at once
            return _jitted(source, None, key, signature)
        except TypingError:
            pass
    kernel, may_be_kept = compiled()
    return _jitted(source, kernel, key if may_be_kept else None, signature)


def _jitted(source: str, kernel: Any, key: str | None, signature: Any) -> Callable[..., Any]:
    """The function that unpacks for a kernel."""
    unpacked = cache.compile_numba_function_src(
        source, "unpacked", {"kernel": kernel, "np": np, "__name__": __name__}, cache_key=key
    )
    wrapped: Callable[..., Any] = numba.njit(signature, nogil=True, cache=key is not None)(unpacked)
    return wrapped


def _arrays(types: Sequence[tuple[str, int]]) -> list[str]:
    """Lines that take a client's arrays out of its buffers."""
    lines, place = [], 0
    for i, (dtype, ndim) in enumerate(types):
        buffer = "reals" if dtype.startswith("float") else "integers"
        shape = ", ".join(f"where[{place + 2 + axis}]" for axis in range(ndim))
        taken = f"{buffer}[where[{place}]:where[{place + 1}]]"
        if ndim == 0:
            taken = f"np.asarray({buffer}[where[{place}]])"
        elif ndim > 1:
            taken += f".reshape(({shape}))"
        if dtype not in ("float64", "int64"):
            taken += f".astype(np.{dtype})"
        lines.append(f"    a{i} = {taken}")
        place += 2 + ndim
    return lines


def _cut(i: int, piece: Piece) -> list[str]:
    """Lines that take a piece out of x, and remember where it was."""
    of = piece.shape
    lengths = [str(length) for length in of] if isinstance(of, tuple) else [f"a{of}[{j}]" for j in range(piece.ndim)]
    lines = [f"    at{i} = start", f"    start += {' * '.join(lengths) or 1}"]
    if not piece.ndim:
        return [*lines, f"    p{i} = np.asarray(x[at{i}])"]
    shaped = f".reshape(({', '.join(lengths)}))" if piece.ndim > 1 else ""
    return [*lines, f"    p{i} = x[at{i}:start]{shaped}"]


def _filled(i: int, given: int, ndim: int) -> list[str]:
    """Lines that put the slope in a piece where the piece was."""
    lines = [f"    s{i} = outputs[{given}]", f"    at = 1 + at{i}"]
    if not ndim:
        return [*lines, f"    found[at] = np.asarray(s{i}).item()"]
    for axis in range(ndim):
        lines.append("    " * (1 + axis) + f"for i{axis} in range(s{i}.shape[{axis}]):")
    inner = "    " * (1 + ndim)
    return [*lines, f"{inner}found[at] = s{i}[{', '.join(f'i{axis}' for axis in range(ndim))}]", f"{inner}at += 1"]


def _key(name: str, source: str) -> str:
    """Name of the compiled code in PyTensor's cache on disk.

    What is read from there imports the module that it was compiled in: where that has another name, it is another's.
    """
    return hashlib.sha256(f"{_CODE}\n{name}\n{__name__}\n{source}".encode()).hexdigest()
