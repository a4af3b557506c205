"""A client's arrays as two flat buffers, so that every compiled kernel has one and the same signature."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from pytensor.configdefaults import config
from pytensor.link.numba import cache

from fedppl.numerics.newton import PACKED


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


def unpacking_kernel(kernel: Callable[..., Any], types: Sequence[tuple[str, int]]) -> Callable[..., Any]:
    """Wrap kernel(x, *arrays) -> (output,) as kernel(x, reals, integers, where) -> output.

    Parameters
    ----------
    kernel
        Jitted function.
    types
        dtype and number of dimensions of each array, in the order of `pack`.
    """
    lines, names, place = ["def unpacked(x, reals, integers, where):"], [], 0
    for i, (dtype, ndim) in enumerate(types):
        buffer = "reals" if dtype.startswith("float") else "integers"
        shape = ", ".join(f"where[{place + 2 + axis}]" for axis in range(ndim))
        piece = f"{buffer}[where[{place}]:where[{place + 1}]]"
        if ndim == 0:
            piece = f"np.asarray({buffer}[where[{place}]])"
        elif ndim > 1:
            piece += f".reshape(({shape}))"
        if dtype not in ("float64", "int64"):
            piece += f".astype(np.{dtype})"
        lines.append(f"    a{i} = {piece}")
        names.append(f"a{i}")
        place += 2 + ndim
    lines += [f"    (output,) = kernel({', '.join(['x', *names])})", "    return output"]
    # Numba cannot loop over arrays of different types, so the unpacking is written out for these types.
    source = "\n".join(lines)
    key = _key(kernel, source)
    unpacked = cache.compile_numba_function_src(
        source, "unpacked", {"kernel": kernel, "np": np, "__name__": __name__}, cache_key=key
    )
    wrapped: Callable[..., Any] = numba.njit(PACKED, nogil=True, cache=key is not None)(unpacked)
    return wrapped


def _key(kernel: Callable[..., Any], source: str) -> str | None:
    """Name of the compiled code in PyTensor's cache on disk, beside that of the kernel itself; None without one.

    Otherwise every process would compile the whole of the kernel once more into the function that unpacks for it. What
    is read from there imports the module that it was compiled in: where that has another name, it is another's.
    """
    known = cache.CACHED_SRC_FUNCTIONS.get(getattr(kernel, "py_func", None)) if config.numba__cache else None
    return None if known is None else hashlib.sha256(f"{known}\n{__name__}\n{source}".encode()).hexdigest()
