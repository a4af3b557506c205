"""What is written is read to the last bit; what cannot be written is refused with its place; nothing read runs code."""

from __future__ import annotations

import enum
import math
import struct
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedppl.gaussian import Gaussian
from fedppl.storage import codec as _codec
from fedppl.types import DeclarationError, Status


class Own(NamedTuple):
    """Of somebody's own algorithm."""

    phi: Any
    status: str = "running"


class Level(enum.IntEnum):
    """Of somebody's own algorithm."""

    LOW = 1
    ALSO_LOW = 1
    HIGH = 2


Older = namedtuple("Older", ["x", "class_"])
Renamed = namedtuple("Another", ["x"])


class Noisy(NamedTuple):
    """A class whose construction would be heard."""

    x: int


calls: list[Any] = []


def back(value: Any) -> Any:
    return _codec.decode(_codec.encode(value))


def same(first: Any, second: Any) -> bool:
    """Equal types all the way down, and equal to the last bit."""
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray | np.generic):
        order = [getattr(a.flags, "f_contiguous", None) for a in (first, second)]
        return (first.dtype, first.shape, first.tobytes(), order[0]) == (
            second.dtype, second.shape, second.tobytes(), order[1],
        )  # fmt: skip
    if isinstance(first, float):
        return struct.pack("d", first) == struct.pack("d", second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[k], second[k]) for k in first)
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)


negative_nan = struct.unpack("<d", bytes.fromhex("010000000000f8ff"))[0]
VALUES: dict[str, Any] = {
    "none": None,
    "bools": (True, False),
    "ints": [0, -1, 2**63 - 1, -(2**63), 2**63, -(2**64), 10**5000],
    "floats": (0.0, -0.0, 1.0, 0.1, 5e-324, 1.7976931348623157e308, math.nan, negative_nan, math.inf, -math.inf),
    "texts": ("", "σ", "a\0b", '"\\', "\ud800", "😀"),
    "bytes": (b"", bytes(range(256))),
    "dicts": {"b": 1, "a": {}, "": {"tuple": [1]}, "array": 0, "named": ["os", "system", {}], "\udfff": ()},
    "lists and tuples": ([], (), [()], ([],), [[1], (2,)]),
    "status": (Status.RUNNING, Status.MAX_ROUNDS),
    "enumeration": (Level.LOW, Level.ALSO_LOW, Level.HIGH),
    "named": Own((Gaussian(np.zeros(2), np.eye(2)), Own(None))),
    "collections": Older(1, 2),
    "scalars": tuple(np.dtype(kind).type(1) for kind in ("?", "i1", "u8", "f2", "f4", "f8", "c8", "c16")),
    "nan scalar": (np.float64(np.nan), np.float32(-np.inf)),
    "big-endian": np.arange(3, dtype=">f4"),
    "empty": (np.zeros((0, 3)), np.zeros((2, 0, 4), dtype=np.int8), np.zeros(0, dtype=bool)),
    "0-d": np.array(1.5),
    "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "3-d columns": np.asfortranarray(np.arange(24).reshape(2, 3, 4)),
    "nan payload": np.array([negative_nan, np.nan, -0.0]),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_is_written_is_read_to_the_last_bit(name: str) -> None:
    assert same(back(VALUES[name]), VALUES[name])


def test_all_of_them_together() -> None:
    assert same(back(VALUES), VALUES)


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | arrays.arrays(
        st.sampled_from(["?", "i4", "u1", "f8", ">f4", "c16"]), arrays.array_shapes(min_dims=0, min_side=0)
    ),
    lambda one: st.lists(one) | st.lists(one).map(tuple) | st.dictionaries(st.text(), one) | st.builds(Own, one),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(TREES)
def test_any_tree_is_read_as_it_was(tree: Any) -> None:
    assert same(back(tree), tree)


@settings(max_examples=200, deadline=None)
@given(TREES, st.data())
def test_altered_bytes_are_read_as_something_else_or_refused(tree: Any, data: st.DataObject) -> None:
    """Behind the signature nothing but one error comes out, whatever the bytes."""
    raw = bytearray(_codec.encode(tree))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        _codec.decode(bytes(raw[: data.draw(st.integers(len(raw) - 2, len(raw)))]))
    except _codec.Unreadable:
        pass


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(_codec.Unreadable):
        _codec.decode(raw)


def test_one_array_in_two_places_is_written_once() -> None:
    shared = np.arange(10_000.0)
    raw = _codec.encode({"a": shared, "b": (shared,)})
    assert len(raw) < 1.1 * shared.nbytes
    found = _codec.decode(raw)
    assert found["a"] is found["b"][0]
    assert found["a"].flags.writeable and found["a"].flags.aligned


def test_views_are_written_by_their_values() -> None:
    grid = np.arange(24.0).reshape(4, 6)
    for view in (grid[::2, ::3], grid[:, 1], grid.T[1:], np.broadcast_to(1.0, (3, 2)), grid[::-1]):
        np.testing.assert_array_equal(back(view), view)


def test_no_class_is_called() -> None:
    Noisy.__new__ = lambda cls, x: calls.append(x)  # type: ignore[method-assign,assignment]
    assert back(tuple.__new__(Noisy, (1,))) == (1,) and not calls


class _Text(str):
    """Text with something beside it."""


def _local() -> Any:
    class Inner(NamedTuple):
        x: int

    return Inner(1)


class _More(Own):
    """A subclass of a named tuple."""


REFUSED: dict[str, tuple[Any, str]] = {
    "an object": ({"a": [object()]}, r"state\['a'\]\[0\] is of type builtins.object.*NamedTuple"),
    "a set": (Own({1}), r"state.phi is of type builtins.set.*sorted tuple"),
    "a function": ((len,), r"state\[0\] is of type builtins.builtin_function"),
    "a class": (Own, "is of type builtins.type"),
    "a path": (Path("x"), "is of type pathlib"),
    "an ordered dict": (OrderedDict(a=1), "OrderedDict.*plain dict"),
    "a number for a key": ({1: 2}, "has the key 1 of type int; use str keys"),
    "text of a kind of its own": (_Text("a"), "_Text"),
    "objects": (np.array([None]), "ndarray of object.*at most 64 bits"),
    "texts": (np.array(["a"]), "ndarray of <U1.*or a tuple"),
    "times": (np.datetime64("2020-01-01"), "datetime64"),
    "a record": (np.zeros(1, dtype="f8,i4"), r"ndarray of \[.*numbers"),
    "long doubles": (np.zeros(1, dtype="g"), "float128|longdouble|ndarray"),
    "a masked array": (np.ma.masked_array([1.0], [True]), "MaskedArray.*plain array"),
    "a class in a function": (_local(), "Inner.*at the top of a module"),
    "a subclass": (_More(1), "_More.*typing.NamedTuple"),
    "another name": (Renamed(1), "Another.*at the top"),
    "a date": (struct.Struct("d"), "Struct"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_again_is_not_written(name: str) -> None:
    value, told = REFUSED[name]
    with pytest.raises(DeclarationError, match=told):
        _codec.encode(value)


def test_what_is_nested_without_end_is_refused() -> None:
    around: list[Any] = []
    around.append(around)
    with pytest.raises(DeclarationError, match="nested more than 64 deep; flatten"):
        _codec.encode(around)


def test_a_class_that_has_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = _codec.encode(Own(1))
    monkeypatch.setitem(globals(), "Own", NamedTuple("Own", [("phi", int)]))
    with pytest.raises(_codec.Unreadable, match="other fields here|no named tuple"):
        _codec.decode(raw)
    monkeypatch.delitem(globals(), "Own")
    with pytest.raises(_codec.Unreadable, match="no named tuple of an imported module"):
        _codec.decode(raw)
