"""Arrays as two flat buffers and back, inside compiled code."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.testing import assert_array_equal

from fedppl.model.compiled import Piece, pack, unpacking_kernel


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
        out[0] = x.item() * matrix[1, 2]
        out[1] = count[1] // 2
        out[2] = scalar.item() + matrix.shape[0]
        out[3] = 10.0 if mask[1] else 20.0
        out[4] = single[0] * single.itemsize
        out[5] = table[1, 0, 1] + 100 * table.shape[1]
        return np.asarray(out.sum()), np.asarray(out[0])

    arrays = [
        np.arange(6.0).reshape(2, 3),
        np.array([4, 7], dtype=np.int64),
        np.array(2.5),
        np.array([False, True]),
        np.array([1.5], dtype=np.float32),
        np.arange(8, dtype=np.int32).reshape(2, 2, 2),
    ]
    wrapped = unpacking_kernel(lambda: (kernel, False), [Piece(0, (), True)], [(str(a.dtype), a.ndim) for a in arrays])
    assert_array_equal(wrapped(np.array([2.0]), *pack(arrays)), [10 + 3 + 4.5 + 10 + 6 + 205, 10])
    # another client: other lengths, same compiled function
    table = np.zeros((3, 4, 2), dtype=np.int32)
    longer = [np.ones((5, 3)), np.arange(3), np.array(0.5), np.array([True, False]), arrays[4], table]
    assert_array_equal(wrapped(np.array([3.0]), *pack(longer)), [3 + 0 + 5.5 + 20 + 6 + 400, 3])


def test_pieces_of_x_arrive_in_their_shapes_and_slopes_go_back_where_they_were() -> None:
    """Numbers, vectors, and matrices whose shape is given by data; one in which the kernel has no slope."""

    @numba.njit
    def kernel(one: Any, pair: Any, unused: Any, table: Any, shape: Any) -> Any:
        total = one.item() * pair[1] + unused[0, 0] + table[1, 2] * shape[0]
        return np.asarray(total), np.asarray(2.0 * one), np.flip(pair), table.T.copy().T * 10.0

    pieces = [Piece(0, (), True), Piece(1, (2,), True), Piece(2, (1, 2), False), Piece(2, 0, True)]
    wrapped = unpacking_kernel(lambda: (kernel, False), pieces, [("int64", 1)])
    x = np.arange(1.0, 12.0)
    found = wrapped(x, *pack([np.array([2, 3])]))
    assert_array_equal(found, [1 * 3 + 4 + 11 * 2, 2, 3, 2, 0, 0, 60, 70, 80, 90, 100, 110])


def test_every_kernel_has_the_same_type_whatever_its_arrays() -> None:
    """That is what keeps one compiled loop for all models."""

    @numba.njit
    def first(x: Any, a: Any) -> Any:
        return np.asarray(x.sum() + a.sum()), x

    @numba.njit
    def second(x: Any, y: Any, a: Any, b: Any) -> Any:
        return np.asarray(x[0] * a[0, 0] + b.item()), y

    one, two = Piece(1, (2,), True), Piece(1, (2,), False)
    wrapped = [
        unpacking_kernel(lambda: (first, False), [one], [("float64", 1)]),
        unpacking_kernel(lambda: (second, False), [two, one], [("int64", 2), ("float64", 0)]),
    ]
    assert len({str(kernel.nopython_signatures) for kernel in wrapped}) == 1
