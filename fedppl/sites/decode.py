"""Parsing of arrays and texts from another machine. Limits are checked before anything is parsed or allocated.

What breaks a rule raises `Malformed`, whose text names the field and the rule. NumPy only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from fedppl.settings import one_line, some_of
from fedppl.types import Message

Parcel = tuple[Message, dict[str, str]]  # arrays, and texts by name

ARRAYS_BYTES = 2**30  # where the shapes are not known: two dense priors of the largest networks that were tried
ARRAYS = 1_000  # far more than a message has
TEXTS = 32  # an introduction has seven
TEXTS_LENGTH = 2_500_000  # characters of all texts: labels of dims at their longest, and the rest
LABELS_LENGTH = 1_000_000  # of JSON with labels: fifty thousand of twenty characters
JSON_LENGTH = 250_000  # of other JSON: a thousand variables with their shapes and dims
JSON_DEPTH = 4  # a list of variables that have a shape
JSON_VALUES = 100_000  # numbers and labels: in memory a list of small ones takes many times its text
JSON_BRACKETS = 20_000
INTEGER_DIGITS = 80  # a seed may be a digest of 256 bits; no number of 80 digits overflows a float
NUMBER_LENGTH = 400  # a float of 17 digits, or one written out
NAME_LENGTH = 200  # PyMC's names with a model's prefix; a client's id
LINE_LENGTH = 2_000  # a reason, a version, a setting of an algorithm: each is one line
SHOWN = 60  # characters of a foreign text in an error message
HEADER_LENGTH = 256  # NumPy pads an array's header to 118 bytes
DIMENSIONS = 8  # PyMC's shapes have up to four, with draws before them
# Types of algorithms' messages, little-endian.
DTYPES = frozenset({"<f8", "<f4", "<i8", "<i4", "<i2", "|i1", "|u1", "|b1"})

# A header as NumPy writes it for arrays in C order. NumPy reads it by `ast`, which fails deep within on others.
_HEADER = re.compile(
    rb"\{'descr': '([<|][fiub][1248])', 'fortran_order': False, "
    rb"'shape': \((|\d{1,12},|\d{1,12}(?:, \d{1,12})+)\), \} *\n"
)
_MAGIC = b"\x93NUMPY\x01\x00"
_TOKENS = re.compile(r'[\[\]{}"\\]')


class Malformed(ValueError):
    """A message from another machine breaks a rule; the text names the field and the rule."""


def require(holds: bool, rule: str) -> None:
    """Raise `Malformed` if a rule does not hold."""
    if not holds:
        raise Malformed(rule)


def require_few(count: int, most: int, what: str) -> None:
    """Raise `Malformed` if there are too many of something."""
    require(count <= most, f"{what}: {count}, expected {most} at most")


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn every exception inside into `Malformed`, a parser's exhausted stack included."""
    try:
        yield
    except Malformed:
        raise
    except Exception as error:
        raise Malformed(f"{what} cannot be read ({type(error).__name__})") from None


def brief(value: object) -> str:
    """A foreign text in one short, printable line."""
    return one_line(value, SHOWN)


def checked_name(value: Any, field: str) -> str:
    """Return a name if it is a printable text, not empty and not too long."""
    is_name = type(value) is str and 0 < len(value) <= NAME_LENGTH and value.isprintable()
    require(is_name, f"{field} is {brief(value)!r}, expected a printable text of 1 to {NAME_LENGTH} characters")
    return str(value)


def texts(record: Mapping[Any, Any]) -> dict[str, str]:
    """Return texts by name if they are few and short enough."""
    with reading("'texts'"):
        require_few(len(record), TEXTS, "texts")
        named = dict(record)
        for key, value in named.items():
            checked_name(key, "a text's name")
            require(type(value) is str, f"{key!r} is of type {type(value).__name__}, expected a text")
        require_few(sum(map(len, named.values())), TEXTS_LENGTH, "characters of texts")
        return named


def one_text(record: Mapping[str, str], field: str, longest: int = LINE_LENGTH) -> str:
    """One of the texts."""
    value = record.get(field)
    if type(value) is not str:
        raise Malformed(f"{field!r} is missing")
    require_few(len(value), longest, f"characters of {field!r}")
    return value


def whole_number(record: Mapping[str, str], field: str) -> int:
    """A whole number that is not negative, written in digits."""
    value = one_text(record, field, INTEGER_DIGITS)
    require(value.isascii() and value.isdigit(), f"{field!r} is {brief(value)!r}, expected a whole number in digits")
    return int(value)


def parsed(record: Mapping[str, str], field: str, longest: int = JSON_LENGTH, *, finite: bool = True) -> Any:
    """Parse the JSON in one of the texts."""
    value = one_text(record, field, longest)

    def integer(digits: str) -> int:
        require_few(len(digits), INTEGER_DIGITS, f"digits in {field!r}")
        return int(digits)

    def real(digits: str) -> float:
        require_few(len(digits), NUMBER_LENGTH, f"digits in {field!r}")
        return special(digits) if math.isinf(float(digits)) else float(digits)

    def special(word: str) -> float:
        require(not finite, f"{field!r} holds {brief(word)}, expected finite numbers")
        return float(word)

    with reading(repr(field)):
        for marks, most in ((",", JSON_VALUES), ("[{", JSON_BRACKETS)):
            require_few(sum(map(value.count, marks)), most, f"{marks!r} in {field!r}")
        _require_shallow(value, field)
        return json.loads(value, parse_int=integer, parse_float=real, parse_constant=special)


def _require_shallow(value: str, field: str) -> None:
    depth, quoted, escaped = 0, False, -1
    for match in _TOKENS.finditer(value):
        mark, place = match.group(), match.start()
        if place == escaped:
            continue
        if mark == '"':
            quoted = not quoted
        elif mark == "\\":
            escaped = place + 1
        elif not quoted:
            depth += 1 if mark in "[{" else -1
            require(depth <= JSON_DEPTH, f"{field!r} is nested deeper than {JSON_DEPTH}")


def arrays(
    raw: Mapping[Any, Any], shapes: Mapping[str, tuple[int, ...]] | None = None, most: int = ARRAYS_BYTES
) -> dict[str, Any]:
    """Arrays from their bytes: exactly those of `shapes` where these are known, else `most` bytes in all."""
    with reading("'arrays'"):
        require_few(len(raw), ARRAYS, "arrays")
        if shapes is not None and set(raw) != set(shapes):
            raise Malformed(f"it holds {_listed(raw)}, expected {_listed(shapes)}")
        for key, data in raw.items():
            checked_name(key, "an array's name")
            require(type(data) is bytes, f"{key!r} is of type {type(data).__name__}, expected bytes")
        if shapes is None:
            require_few(sum(map(len, raw.values())), most, "bytes of arrays")
        # All are checked before the first is allocated.
        declared = {key: _declared(key, data, None if shapes is None else shapes[key]) for key, data in raw.items()}
        return {key: _array(raw[key], *declared[key]) for key in raw}


def _declared(field: str, data: bytes, expected: tuple[int, ...] | None) -> tuple[str, tuple[int, ...], int]:
    """Type and shape of an array, and where its numbers begin, as NumPy's format (1.0) declares them."""
    require(data.startswith(_MAGIC) and len(data) > 10, f"{field!r} is no array in NumPy's format 1.0")
    start = 10 + int.from_bytes(data[8:10], "little")
    require_few(start, HEADER_LENGTH, f"bytes of the header of {field!r}")
    match = _HEADER.fullmatch(data[10:start])
    if match is None:
        raise Malformed(f"{field!r} has no header of a plain array in C order")
    dtype = match[1].decode("ascii")
    shape = tuple(int(length) for length in match[2].split(b",") if length.strip())
    require(dtype in DTYPES, f"{field!r} is of type {dtype}, expected one of {sorted(DTYPES)}")
    if expected is not None:
        require(shape == tuple(expected), f"{field!r} has shape {shape}, expected {tuple(expected)}")
    require_few(len(shape), DIMENSIONS, f"dimensions of {field!r}")
    require_few(max(shape, default=0), 2**31 - 1, f"length of {field!r}")
    size = math.prod(shape) * int(dtype[2])
    require(size == len(data) - start, f"{field!r} declares {size} bytes and holds {len(data) - start}")
    return dtype, shape, start


def _array(data: bytes, dtype: str, shape: tuple[int, ...], start: int) -> Any:
    if not math.prod(shape):
        return np.zeros(shape, np.dtype(dtype))
    if dtype == "|b1":  # any byte but 0 is true
        return np.frombuffer(data, np.uint8, offset=start).reshape(shape) != 0
    return np.frombuffer(data, np.dtype(dtype), offset=start).reshape(shape).copy()


def _listed(names: Any) -> str:
    return some_of(sorted(one_line(name, 30) for name in names))
