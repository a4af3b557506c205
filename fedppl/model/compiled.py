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
import pytensor
from numba import from_dtype
from numba.core.compiler_lock import global_compiler_lock
from numba.core.errors import NumbaPerformanceWarning, TypingError
from numba.core.types import Array
from pymc.logprob.utils import CheckParameterValue
from pytensor import scalar
from pytensor.compile.mode import get_mode
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Constant
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import in2out, node_rewriter, out2in
from pytensor.link.numba import cache
from pytensor.tensor.basic import Alloc, MakeVector, ScalarFromTensor, Split, tensor_copy
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import All
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.type_other import NoneTypeT

from fedppl.numerics.pairs import PACKED

# Functions of no value below 0, those of none above 1 either, and operations that keep what is not below 0 there.
_NEVER_NEGATIVE = (scalar.Exp, scalar.Sqr, scalar.Abs, scalar.Softplus, scalar.Sigmoid)
_NEVER_ABOVE_ONE = (scalar.Sigmoid,)
_KEEPING = (scalar.Add, scalar.Mul, scalar.TrueDiv)


def _holds(condition: Any) -> bool:
    """Whether a condition on a parameter holds by what the parameter is: 0 ≤ exp(η), 0 ≤ logit⁻¹(η) ≤ 1."""
    node = condition.owner
    if node is None:
        return False
    if isinstance(node.op, (All, DimShuffle, MakeVector, ScalarFromTensor)):
        return all(_holds(x) for x in node.inputs)
    operation, (x, *bound) = getattr(node.op, "scalar_op", None), node.inputs
    if isinstance(operation, scalar.GE) and _within(bound[0], -np.inf, 0.0):
        return _within(x, 0.0, np.inf) or _is_within(x, _NEVER_NEGATIVE, _KEEPING)
    if isinstance(operation, scalar.LE) and _within(bound[0], 1.0, np.inf):
        return _within(x, -np.inf, 1.0) or _is_within(x, _NEVER_ABOVE_ONE)
    return False


def _is_within(x: Any, functions: tuple[type, ...], keeping: tuple[type, ...] = ()) -> bool:
    """Whether x is a value of one of these functions, or made by operations that `keeping` names of such values."""
    operation = None if x.owner is None else getattr(x.owner.op, "scalar_op", None)
    if not x.type.dtype.startswith("float"):  # a narrow integer's square may be below 0
        return False
    if operation is None:
        is_shuffled = x.owner is not None and isinstance(x.owner.op, DimShuffle)
        return is_shuffled and _is_within(x.owner.inputs[0], functions, keeping)
    return isinstance(operation, functions) or (
        isinstance(operation, keeping)
        and all(_is_within(part, functions, keeping) or _within(part, 0.0, np.inf) for part in x.owner.inputs)
    )


def _within(bound: Any, low: float, high: float) -> bool:
    """Whether this is a constant between two numbers."""
    while bound.owner is not None and isinstance(bound.owner.op, DimShuffle):
        (bound,) = bound.owner.inputs
    return isinstance(bound, Constant) and bool(np.all((bound.data >= low) & (bound.data <= high)))


def _without_tautologies(fgraph: Any, node: Any) -> list[Any] | None:
    """Drop conditions on parameters that always hold: each would be computed for every row."""
    return [node.inputs[0]] if all(_holds(x) for x in node.inputs[1:]) else None


def _one_function(fgraph: Any, node: Any) -> list[Any] | None:
    """f(c ? a : b) for c ? f(a) : f(b), which would compute both.

    The log density of a yes or no is -softplus of the log odds, or of their negative.
    """
    if not isinstance(node.op.scalar_op, scalar.Switch):
        return None
    condition, *branches = node.inputs
    functions = [getattr(x.owner.op, "scalar_op", None) if x.owner is not None else None for x in branches]
    arguments = [x.owner.inputs for x in branches if x.owner is not None]
    kind = node.outputs[0].type
    if functions[0] is None or functions[0] != functions[1] or any(len(each) != 1 for each in arguments):
        return None
    # An array that is repeated would have f computed as often.
    if any(x.type.broadcastable != kind.broadcastable or x.type.dtype != kind.dtype for (x,) in arguments):
        return None
    return [branches[0].owner.op(node.op(condition, *(x for (x,) in arguments)))]


def _contiguous(fgraph: Any, node: Any) -> list[Any] | None:
    """Copy a batch with permuted axes before it is multiplied.

    The gradients of Cholesky factors and of triangular systems multiply transposes. One transposed matrix is in
    Fortran's order; a batch of them is in no order that Numba knows, so that it copies each matrix, and warns.
    """
    inputs = [tensor_copy(x) if x.owner and isinstance(x.owner.op, DimShuffle) else x for x in node.inputs]
    return None if inputs == node.inputs else [node.op(*inputs)]


_TRANSPOSE = (1, 0)
_MOST_ARGUMENTS = 30
_BEFORE_FUSION = 47  # among PyTensor's rewrites: after those for digits and speed
_OTHER_SHAPE = "an array has another shape than the model declares"


class _OfShape(SpecifyShape):  # type: ignore[misc]
    """`SpecifyShape` whose compiled error has no numbers, which would take seconds to compile."""


class _View(Op):  # type: ignore[misc]
    """`DimShuffle` by indexing: views by strides take longer to compile.

    Not a subclass: PyTensor reads C code from the folder of an Op's class.
    """

    __props__ = ("input_ndim", "new_order")
    view_map = {0: [0]}

    def __init__(self, input_ndim: int, new_order: tuple[Any, ...]) -> None:
        self.input_ndim, self.new_order = input_ndim, new_order
        self.same = DimShuffle(input_ndim=input_ndim, new_order=new_order)

    def make_node(self, x: Any) -> Any:
        """Output of the same type."""
        return Apply(self, [x], [self.same(x).type()])

    def perform(self, node: Any, inputs: Any, outputs: Any) -> None:
        """As `DimShuffle` does."""
        self.same.perform(node, inputs, outputs)


class _Full(Alloc):  # type: ignore[misc]
    """`Alloc` of one number, which needs no check of shapes."""


class _Cut(Split):  # type: ignore[misc]
    """`Split` by indexing."""


def _plain(fgraph: Any, node: Any) -> list[Any] | None:
    """Replace an operation by one that compiles faster."""
    if isinstance(node.op, (_OfShape, _View, _Cut, _Full)):
        return None
    if isinstance(node.op, DimShuffle):
        # A transpose is copied: in Fortran's order some of PyTensor's code for batches is wrong, and a view by strides
        # would be copied for every product.
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
    """Numba code of `_OfShape`."""
    lengths = [f"length_{axis}" for axis in range(len(node.inputs) - 1)]
    known = [axis for axis, v in enumerate(node.inputs[1:]) if not isinstance(v.type, NoneTypeT)]
    differs = " or ".join(f"x.shape[{axis}] != {lengths[axis]}.item()" for axis in known) or "False"
    return _function(f"of_shape(x, {', '.join(lengths)})", f"assert not ({differs}), '{_OTHER_SHAPE}'", "return x")


def _code_of_view(op: Any, node: Any, **_: Any) -> tuple[Any, str]:
    """Numba code of `_View`: axes of length one are dropped, then new ones are added."""
    if not op.input_ndim:  # a scalar in Numba
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
    """Numba code of `_Full`."""
    lengths = [f"length_{axis}" for axis in range(len(node.inputs) - 1)]
    shape = "".join(f"{length}.item(), " for length in lengths)
    number = f"x[{', '.join('0' * node.inputs[0].type.ndim)}]" if node.inputs[0].type.ndim else "x.item()"
    lines = [f"found = np.empty(({shape}), dtype=np.{node.inputs[0].type.dtype})", f"found[...] = {number}"]
    return _function(f"alloc({', '.join(['x', *lengths])})", *lines, "return found")


def _code_of_cut(op: Any, node: Any, **_: Any) -> tuple[Any, str]:
    """Numba code of `_Cut`."""
    axis, ends = int(node.inputs[1].data) % node.inputs[0].type.ndim, [f"end_{i}" for i in range(op.len_splits)]
    lines = [f"{end} = {start} + sizes[{i}]" for i, (start, end) in enumerate(zip(["0", *ends], ends, strict=False))]
    lines += [f"assert 0 <= {' <= '.join(ends)} == x.shape[{axis}], '{_OTHER_SHAPE}'"]
    parts = (f"x[{':, ' * axis}{start}:{end}]" for start, end in zip(["0", *ends], ends, strict=False))
    return _function("split(x, axis, sizes)", *lines, f"return ({', '.join(parts)},)")


def _function(head: str, *lines: str) -> tuple[Any, str]:
    """A function of this source, and its key in PyTensor's cache, which differs between sources of one Op."""
    from pytensor.link.numba.dispatch.basic import numba_njit

    namespace: dict[str, Any] = {"np": np}
    source = "\n    ".join([f"def {head}:", *lines])
    exec(source, namespace)  # as PyTensor does it
    return numba_njit(namespace[head.split("(")[0]]), hashlib.sha256(f"{__name__}\n{source}".encode()).hexdigest()


@functools.cache
def mode() -> Any:
    """PyTensor's mode for Numba, with less to compile."""
    from pytensor.link.numba.dispatch.basic import register_funcify_and_cache_key

    for op, code in ((_OfShape, _code_of_shape), (_View, _code_of_view), (_Cut, _code_of_cut), (_Full, _code_of_full)):
        register_funcify_and_cache_key(op)(code)
    # After all of PyTensor's own rewrites, which would remove the copies.
    rewrites = (
        in2out(node_rewriter([BatchedDot])(_contiguous)),
        in2out(node_rewriter([SpecifyShape, DimShuffle, Split, Alloc])(_plain)),
    )
    first = in2out(node_rewriter([CheckParameterValue])(_without_tautologies)), 0
    fewer = out2in(node_rewriter([Elemwise])(_one_function)), _BEFORE_FUSION
    later = ((rewrite, 1000 + place) for place, rewrite in enumerate(rewrites))
    return get_mode("NUMBA").register(first, fewer, *later)


def inlined(inputs: Sequence[Any], outputs: Sequence[Any], numba_mode: Any = None) -> tuple[Any, bool]:
    """Graphs as a function for Numba, to be inlined into its caller, and whether it may be cached on disk.

    PyTensor wraps it into another function, under whose name it is cached. LLVM would optimise the code once for each
    of the two, and again for their caller. Code with pointers, which are invalid in another process, has no name.
    """
    settings = {"mode": numba_mode or mode(), "on_unused_input": "ignore"}
    compiled = pytensor.function(list(inputs), list(outputs), **settings).vm.jit_fn
    outer = compiled.py_func
    inner = outer.__globals__.get("jitable_func", compiled) if outer in cache.CACHED_SRC_FUNCTIONS else compiled
    function = getattr(inner, "py_func", outer)
    # Python passes more arguments than these as a tuple, which Numba cannot unpack where it inlines.
    inline = "always" if function.__code__.co_argcount <= _MOST_ARGUMENTS else "never"
    return numba.njit(inline=inline)(function), outer in cache.CACHED_SRC_FUNCTIONS


@contextlib.contextmanager
def without_notices() -> Iterator[None]:
    """Suppress Numba's warnings about the speed of a user's model; other warnings pass.

    An Op without Numba code runs in object mode, and a product with some columns of a matrix copies them: slower, but
    right. Numba changes the warning filters of the whole process while it compiles, as this does; under Numba's lock
    neither restores what the other had set.
    """
    import pytensor.link.numba.dispatch  # noqa: F401  # sets filters that are to last

    with global_compiler_lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*object mode.*", category=UserWarning)
        warnings.simplefilter("ignore", NumbaPerformanceWarning)
        yield


# A client's arrays in two flat buffers and x in one, so that all kernels have one signature ---------------------------

_CODE = 5  # version of the Ops' code: a new one invalidates what is cached on disk


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
    """A part of the flat vector x that is an argument of a kernel."""

    ndim: int
    shape: tuple[int, ...] | int  # or the number of the array that has it
    has_slope: bool  # whether the kernel returns its gradient; else that is 0


# What makes a jitted function where there is none on disk, and says whether it may be cached there
_Make = Callable[[], tuple[Callable[..., Any], bool]]
_Types = Sequence[tuple[str, int]]  # dtypes and dimensions of arrays, in the order of `pack`


def unpacking_kernel(
    compiled: _Make, pieces: Sequence[Piece], types: _Types, name: str | None = None, *, slopes: bool = True
) -> Callable[..., Any]:
    """Wrap kernel(*pieces, *arrays) -> (value, *slopes) as kernel(x, reals, integers, where) -> [value, gradient].

    Without `slopes` it returns [value]. x consists of `pieces`. On disk it has a digest of its `name`.
    """
    # Numba cannot loop over arrays of different types, so the source is written out for these.
    lines = ["def unpacked(x, reals, integers, where):", *_arrays(types), "    start = 0"]
    for i, piece in enumerate(pieces):
        lines += _cut(i, piece)
    size = "1 + x.shape[0]" if slopes else "1"
    names = [*(f"p{i}" for i in range(len(pieces))), *(f"a{i}" for i in range(len(types)))]
    lines += [f"    outputs = kernel({', '.join(names)})", f"    found = np.zeros({size})"]
    lines += ["    found[0] = np.asarray(outputs[0]).item()"]
    given = 1
    for i, piece in enumerate(pieces):
        if piece.has_slope:
            lines += _filled(i, given, piece.ndim)
            given += 1
    return _found_or_compiled("\n".join([*lines, "    return found"]), compiled, name, PACKED)


def vector_kernel(compiled: _Make, types: _Types, name: str | None = None) -> Callable[..., Any]:
    """Wrap kernel(x, *arrays) -> (vector,) as kernel(x, reals, integers, where) -> vector, as `unpacking_kernel`."""
    arguments = ", ".join(["x", *(f"a{i}" for i in range(len(types)))])
    lines = ["def unpacked(x, reals, integers, where):", *_arrays(types), f"    vector = kernel({arguments})[0]"]
    lines += ["    found = np.zeros(vector.shape[0])", "    for i in range(vector.shape[0]):"]
    lines += ["        found[i] = vector[i]", "    return found"]
    return _found_or_compiled("\n".join(lines), compiled, name, PACKED)


def unpacked_function(compiled: _Make, types: _Types, name: str | None = None) -> Callable[..., Any]:
    """Wrap kernel(*arrays) as a function of array-likes that returns all outputs in a tuple, as `unpacking_kernel`."""
    arguments = ", ".join(f"a{i}" for i in range(len(types)))
    source = f"def unpacked({arguments}):\n    return kernel({arguments})"
    jitted = _found_or_compiled(source, compiled, name, tuple(Array(from_dtype(np.dtype(d)), n, "C") for d, n in types))

    def call(*values: Any) -> Any:
        return jitted(*(np.asarray(v, dtype=dtype, order="C") for v, (dtype, _) in zip(values, types, strict=True)))

    return call


def _found_or_compiled(source: str, compiled: _Make, name: str | None, signature: Any) -> Callable[..., Any]:
    key = None
    if name is not None and config.numba__cache:
        # Cached code imports the module that it was compiled in, so the module's name is a part of the key.
        key = hashlib.sha256(f"{_CODE}\n{name}\n{__name__}\n{source}".encode()).hexdigest()
        try:  # without a kernel: read from disk, or fail at once
            return _jitted(source, None, key, signature)
        except TypingError:
            pass
    kernel, may_be_kept = compiled()
    return _jitted(source, kernel, key if may_be_kept else None, signature)


def _jitted(source: str, kernel: Any, key: str | None, signature: Any) -> Callable[..., Any]:
    """The function that unpacks arguments and calls a kernel."""
    unpacked = cache.compile_numba_function_src(
        source, "unpacked", {"kernel": kernel, "np": np, "__name__": __name__}, cache_key=key
    )
    wrapped: Callable[..., Any] = numba.njit(signature, nogil=True, cache=key is not None)(unpacked)
    return wrapped


def _arrays(types: _Types) -> list[str]:
    """Source lines that read a client's arrays from its buffers."""
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
    """Source lines that read a piece from x, and keep its place."""
    of = piece.shape
    lengths = [str(length) for length in of] if isinstance(of, tuple) else [f"a{of}[{j}]" for j in range(piece.ndim)]
    lines = [f"    at{i} = start", f"    start += {' * '.join(lengths) or 1}"]
    shaped = f".reshape(({', '.join(lengths)}))" if piece.ndim > 1 else ""
    return [*lines, f"    p{i} = x[at{i}:start]{shaped}"]


def _filled(i: int, given: int, ndim: int) -> list[str]:
    """Source lines that write the gradient in a piece to the place of the piece."""
    lines = [f"    s{i} = outputs[{given}]", f"    at = 1 + at{i}"]
    if not ndim:
        return [*lines, f"    found[at] = np.asarray(s{i}).item()"]
    for axis in range(ndim):
        lines.append("    " * (1 + axis) + f"for i{axis} in range(s{i}.shape[{axis}]):")
    inner = "    " * (1 + ndim)
    return [*lines, f"{inner}found[at] = s{i}[{', '.join(f'i{axis}' for axis in range(ndim))}]", f"{inner}at += 1"]
