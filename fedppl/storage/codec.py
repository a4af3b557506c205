"""Encode states as bytes and decode them without running code.

The bytes are JSON, then the arrays. Named tuples and enumerations are written by module and name. Decoding looks them
up in modules that are already imported; it imports, calls and sets nothing.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
import re
import secrets
import struct
import sys
from collections.abc import Mapping
from enum import Enum, EnumMeta
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedppl.types import DeclarationError

_PREFIX = struct.Struct("<QQ")  # bytes of JSON, bytes of arrays
_MOST_JSON = 2**28  # bytes
_DEEPEST = 64
_MOST_AXES, _LONGEST = 32, 2**48  # of an array, and its entries
_DTYPES = frozenset(
    np.dtype(order + kind).str
    for order in "<>"
    for kind in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
)
_OTHER_LENGTH = "its arrays are not as long as their shapes say"
_REMEDIES = (
    ((set, frozenset), "write a sorted tuple"),
    (dict, "write a plain dict"),
    (np.ndarray, "write a plain array: np.asarray(...)"),
    (tuple, "declare it by typing.NamedTuple at the top of a module"),
    (Enum, "declare it by enum.Enum at the top of a module"),
)


class Unreadable(ValueError):
    """Bytes that `encode` did not write; the text names the rule that they break."""


_Table = dict[int, tuple[int, NDArray[Any]]]  # place and array, by id: each once, in the order of their places


def encode(content: Any, name: str = "state") -> bytes:
    """Encode None, numbers, str, bytes, lists, tuples, dicts with str keys, named tuples, enumerations and arrays.

    >>> decode(encode({"a": (1, float("inf")), "b": np.arange(2)}))
    {'a': (1, inf), 'b': array([0, 1])}
    """
    table: _Table = {}
    tree = _node(content, name, 0, table)
    arrays = [array for _, array in table.values()]
    kinds = [[array.dtype.str, _order(array), list(array.shape)] for array in arrays]
    text = json.dumps({"arrays": kinds, "content": tree}, allow_nan=False, separators=(",", ":")).encode("ascii")
    if len(text) > _MOST_JSON:
        size = f"{len(text):.3g} bytes beside its arrays"
        raise DeclarationError(f"{name} takes {size}, more than {_MOST_JSON}; put numbers into arrays.")
    flat: list[Any] = [np.ascontiguousarray(array if _order(array) == "C" else array.T) for array in arrays]
    return b"".join([_PREFIX.pack(len(text), sum(array.nbytes for array in flat)), text, *flat])


def _node(value: Any, where: str, depth: int, table: _Table) -> Any:
    """A value as JSON: itself, a list, or {kind: parts}."""
    if depth > _DEEPEST:
        raise DeclarationError(f"{where} is nested more than {_DEEPEST} deep; flatten it.")
    deeper = depth + 1
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack("<d", value).hex()}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if kind is list:
        return [_node(one, f"{where}[{i}]", deeper, table) for i, one in enumerate(value)]
    if kind is tuple:
        return {"tuple": [_node(one, f"{where}[{i}]", deeper, table) for i, one in enumerate(value)]}
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise DeclarationError(f"{where} has the key {key!r} of type {type(key).__name__}; use str keys.")
        return {"dict": {key: _node(one, f"{where}[{key!r}]", deeper, table) for key, one in value.items()}}
    if kind is np.ndarray and value.dtype.str in _DTYPES:
        return {"array": table.setdefault(id(value), (len(table), value))[0]}
    if isinstance(value, np.str_):
        return str(value)
    if isinstance(value, np.generic) and value.dtype.str in _DTYPES:
        return {"scalar": [value.dtype.str, value.tobytes().hex()]}
    if isinstance(value, Enum) and _enumeration(*_name(kind)) is kind and kind.__members__.get(value.name) is value:
        return {"enum": [*_name(kind), value.name]}
    if isinstance(value, tuple) and _named_tuple(*_name(kind)) is kind:
        fields = zip(kind._fields, value, strict=True)
        return {"named": [*_name(kind), {k: _node(one, f"{where}.{k}", deeper, table) for k, one in fields}]}
    raise DeclarationError(f"{where} is of type {_shown(value)}, which cannot be written to a file; {_remedy(value)}.")


def _order(array: NDArray[Any]) -> str:
    """Memory order; the last bit of a sum may depend on it."""
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


def _name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _shown(value: Any) -> str:
    name = ".".join(_name(type(value)))
    return f"{name} of {value.dtype}" if isinstance(value, np.ndarray | np.generic) else name


def _remedy(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic) and value.dtype.str not in _DTYPES:
        return "use numbers of at most 64 bits (128 for complex ones), or a tuple"
    remedies = (remedy for kinds, remedy in _REMEDIES if isinstance(value, kinds))
    return next(remedies, "write arrays, numbers, strings, tuples, dicts or a typing.NamedTuple of them")


def decode(raw: bytes) -> Any:
    """Decode what `encode` wrote, else raise `Unreadable`; all is checked before an array is allocated."""
    _require(len(raw) >= _PREFIX.size, "it is too short")
    length, array_bytes = _PREFIX.unpack_from(raw)
    _require(length <= _MOST_JSON, f"it declares {length} bytes of JSON, more than {_MOST_JSON}")
    start = _PREFIX.size + length
    _require(start + array_bytes == len(raw), f"it declares {start + array_bytes} bytes and has {len(raw)}")
    try:
        text = raw[_PREFIX.size : start].decode("ascii")
        tree = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except RecursionError as error:
        raise Unreadable("its JSON is nested too deep") from error
    except ValueError as error:
        raise Unreadable(f"its JSON is wrong: {error}") from error
    _require(type(tree) is dict and set(tree) == {"arrays", "content"}, "its JSON holds something else")
    return _value(tree["content"], 0, _arrays(tree["arrays"], raw, start))


def _value(node: Any, depth: int, arrays: list[NDArray[Any]]) -> Any:
    """The value of a JSON node."""
    _require(depth <= _DEEPEST, f"it is nested more than {_DEEPEST} deep")

    def within(one: Any) -> Any:
        return _value(one, depth + 1, arrays)

    if type(node) is list:
        return [within(one) for one in node]
    if type(node) is not dict:
        return node
    _require(len(node) == 1, "a value has more than one kind")
    ((kind, parts),) = node.items()
    if kind == "tuple" and type(parts) is list:
        return tuple(within(one) for one in parts)
    if kind == "dict" and type(parts) is dict:
        return {key: within(one) for key, one in parts.items()}
    if kind == "array" and type(parts) is int and 0 <= parts < len(arrays):
        return arrays[parts]
    if kind == "int" and type(parts) is str and re.fullmatch("-?0x[0-9a-f]+", parts):
        return int(parts, 16)
    if kind == "float" and type(parts) is str:
        return float(_scalar("<f8", parts))
    if kind == "bytes" and type(parts) is str:
        try:
            return base64.b64decode(parts, validate=True)
        except ValueError as error:
            raise Unreadable(f"bytes are not in base64: {error}") from error
    if kind == "scalar" and _are(parts, str, str):
        return _scalar(*parts)
    if kind == "enum" and _are(parts, str, str, str):
        enumeration = _enumeration(*parts[:2])
        _require(enumeration is not None and parts[2] in enumeration.__members__, f"{_dotted(parts)} is not known here")
        return enumeration.__members__[parts[2]]
    if kind == "named" and _are(parts, str, str, dict):
        named, fields = _named_tuple(*parts[:2]), parts[2]
        _require(named is not None, f"{_dotted(parts[:2])} is no named tuple of an imported module")
        _require(list(named._fields) == list(fields), f"{_dotted(parts[:2])} has other fields here")
        # Not named(...): that would call what the class was given.
        return tuple.__new__(named, [within(one) for one in fields.values()])
    raise Unreadable(f"a value of kind {kind[:40]!r} cannot be read")


def _arrays(kinds: Any, raw: bytes, start: int) -> list[NDArray[Any]]:
    """Arrays of the declared kinds, whose bytes begin at `start`; all is checked before one is allocated."""
    _require(type(kinds) is list, "its arrays are not declared")
    views = []
    for declared in kinds:
        name, order, shape = declared if _are(declared, str, str, list) else ("", "", [])
        right = order in ("C", "F") and len(shape) <= _MOST_AXES and all(type(n) is int and n >= 0 for n in shape)
        right = right and math.prod(max(n, 1) for n in shape) <= _LONGEST
        _require(right, f"an array is declared as {declared!s:.80}")
        _require(name in _DTYPES, f"dtype {name[:40]!r} has no place in it")
        dtype = np.dtype(name)
        stop = start + dtype.itemsize * math.prod(shape)
        _require(stop <= len(raw), _OTHER_LENGTH)
        views.append(np.ndarray(shape, dtype, raw, start, order=order))
        start = stop
    _require(start == len(raw), _OTHER_LENGTH)
    for view in views:  # NumPy's functions are undefined for a bool that is neither 0 nor 1
        _require(view.dtype.kind != "b" or not np.any(view.view(np.uint8) > 1), "a bool is neither 0 nor 1")
    return [view.copy("K") for view in views]


def _scalar(dtype: str, text: str) -> Any:
    """A number of NumPy's, from its bytes in hexadecimal."""
    _require(re.fullmatch("([0-9a-f]{2})*", text) is not None, "a number is not in hexadecimal")
    return _arrays([[dtype, "C", []]], bytes.fromhex(text), 0)[0][()]


def _named_tuple(module: str, name: str) -> Any:
    """A class made by NamedTuple in an imported module, else None."""
    kind = _imported(module, name)
    if type(kind) is not type or kind.__bases__ != (tuple,) or _name(kind) != (module, name):
        return None
    fields = vars(kind).get("_fields")
    return kind if type(fields) is tuple and all(type(field) is str for field in fields) else None


def _enumeration(module: str, name: str) -> Any:
    kind = _imported(module, name)
    return kind if type(kind) is EnumMeta and _name(kind) == (module, name) else None


def _imported(module: str, name: str) -> Any:
    """Look a name up in the dictionary of an imported module, past any module `__getattr__`."""
    imported = sys.modules.get(module)
    return object.__getattribute__(imported, "__dict__").get(name) if isinstance(imported, ModuleType) else None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    _require(len(made) == len(pairs), "a key stands twice")
    return made


def _no_constant(name: str) -> Any:
    raise Unreadable(f"{name} is no number of JSON")


def _are(parts: Any, *kinds: type) -> bool:
    return type(parts) is list and [type(part) for part in parts] == list(kinds)


def _dotted(parts: list[str]) -> str:
    return repr(".".join(part[:40] for part in parts))


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise Unreadable(rule)


# A salted digest of a client's data: it shows that they have changed, but does not match between runs -----------------

_SALT = 16
LENGTH = _SALT + 32  # of a seal in bytes


def seal(arrays: Mapping[str, Any], salt: bytes | None = None) -> bytes:
    """Salt, and keyed digest of the names, shapes and values of arrays, in any order and number type.

    >>> matches(seal({"y": [1, 2], "x": [0.5]}), {"x": [0.5], "y": [1.0, 2.0]})
    True
    >>> matches(seal({"y": [1.0, 2.0]}), {"y": [[1.0, 2.0]]})
    False
    """
    key = secrets.token_bytes(_SALT) if salt is None else salt
    state = hashlib.blake2b(key=key, digest_size=32)
    for name in sorted(arrays):
        array = plain(np.asarray(arrays[name]))
        head = repr((str(name), array.dtype.str, array.shape)).encode()
        state.update(len(head).to_bytes(8, "little") + head)
        state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return key + state.digest()


def matches(sealed: bytes, arrays: Mapping[str, Any]) -> bool:
    """Whether the arrays are those that were sealed."""
    return hmac.compare_digest(sealed, seal(arrays, sealed[:_SALT]))


def plain(array: NDArray[Any]) -> NDArray[Any]:
    """Real numbers as float64 where it holds them: whether a column has integers can depend on other clients."""
    whole = array.dtype.kind in "iu"
    if whole and array.size and max(-int(array.min()), int(array.max())) > 2**53:
        return array.astype(array.dtype.newbyteorder("<"))
    return array.astype("<f8", copy=False) if whole or array.dtype.kind in "bf" else array
