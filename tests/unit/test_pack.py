"""Arrays as two flat buffers and back, inside compiled code."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.testing import assert_array_equal

from fedppl.model.pack import pack, unpacking_kernel


def test_pack_lays_reals_and_integers_out_one_after_the_other() -> None:
    reals, integers, where = pack([np.arange(6.0).reshape(2, 3), np.array([7, 8]), np.array(9.5), np.array([True])])
    assert_array_equal(reals, [0, 1, 2, 3, 4, 5, 9.5])
    assert_array_equal(integers, [7, 8, 1])
    # start, stop, shape of each array in its own buffer
    assert_array_equal(where, [0, 6, 2, 3, 0, 2, 2, 6, 7, 2, 3, 1])
    assert (reals.dtype, integers.dtype, where.dtype) == (np.float64, np.int64, np.int64)


def test_pack_of_nothing_keeps_its_types() -> None:
    reals, integers, where = pack([])
    assert (reals.size, integers.size, where.size) == (0, 0, 0)
    assert (reals.dtype, integers.dtype) == (np.float64, np.int64)


def test_a_kernel_sees_the_arrays_it_was_written_for() -> None:
    """Shapes, dtypes and contents of every kind of array arrive unchanged."""

    @numba.njit
    def kernel(x: Any, matrix: Any, count: Any, scalar: Any, mask: Any, single: Any, table: Any) -> Any:
        out = np.zeros(6)
        out[0] = x[0] * matrix[1, 2]
        out[1] = count[1] // 2
        out[2] = scalar.item() + matrix.shape[0]
        out[3] = 10.0 if mask[1] else 20.0
        out[4] = single[0] * single.itemsize
        out[5] = table[1, 0, 1] + 100 * table.shape[1]
        return (out,)

    arrays = [
        np.arange(6.0).reshape(2, 3),
        np.array([4, 7], dtype=np.int64),
        np.array(2.5),
        np.array([False, True]),
        np.array([1.5], dtype=np.float32),
        np.arange(8, dtype=np.int32).reshape(2, 2, 2),
    ]
    wrapped = unpacking_kernel(kernel, [(str(a.dtype), a.ndim) for a in arrays])
    assert_array_equal(wrapped(np.array([2.0]), *pack(arrays)), [10, 3, 4.5, 10, 6, 205])
    # another client: other lengths, same compiled function
    table = np.zeros((3, 4, 2), dtype=np.int32)
    longer = [np.ones((5, 3)), np.arange(3), np.array(0.5), np.array([True, False]), arrays[4], table]
    assert_array_equal(wrapped(np.array([3.0]), *pack(longer)), [3, 0, 5.5, 20, 6, 400])


def test_every_kernel_has_the_same_type_whatever_its_arrays() -> None:
    """That is what keeps one compiled loop for all models."""

    @numba.njit
    def first(x: Any, a: Any) -> Any:
        return (x + a.sum(),)

    @numba.njit
    def second(x: Any, a: Any, b: Any) -> Any:
        return (x * a[0, 0] + b,)

    wrapped = [unpacking_kernel(first, [("float64", 1)]), unpacking_kernel(second, [("int64", 2), ("float64", 0)])]
    assert len({str(kernel.nopython_signatures) for kernel in wrapped}) == 1
