"""A client's arrays as two flat buffers and x as one, so that every compiled kernel has one and the same signature."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import from_dtype
from numba.core.errors import TypingError
from numba.core.types import Array
from pytensor.configdefaults import config
from pytensor.link.numba import cache

from fedppl.numerics.pairs import PACKED

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
