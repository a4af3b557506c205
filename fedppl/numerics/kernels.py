"""Compiled log densities, and loops over them.

A `kernel` is a jitted function ``kernel(x, *data) -> [log density, gradient]`` with x = (φ, θ) of m + d entries
and `data` a client's packed arrays. It is passed as a first-class function of one fixed signature, so that
loops over it compile once for all models and stay in Numba's cache on disk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types

jit: Callable[..., Any] = numba.njit(nogil=True, cache=True)

VECTOR = types.float64[::1]
MATRIX = types.float64[:, ::1]
INTEGERS = types.int64[::1]
DATA = types.Tuple((VECTOR, INTEGERS, INTEGERS))
NO_DATA = np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
PACKED = VECTOR(VECTOR, VECTOR, INTEGERS, INTEGERS)
KERNEL = types.FunctionType(PACKED)


def entry(*arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Jit a loop over kernels with an explicit signature, at its first call rather than at import."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = functools.cache(lambda: numba.njit(arguments, nogil=True, cache=True)(function))

        @functools.wraps(function)
        def call(*values: Any) -> Any:
            return compiled()(*values)

        return call

    return decorate


@jit
def assign(out: Any, first: int, values: Any) -> None:
    """Set out[first:] to values, as far as they go. A slice on the left takes seconds to compile, for its error."""
    for i in range(values.shape[0]):
        out[first + i] = values[i]
