"""A name for what a builder does, by its code and what that reads: known before it is called on anybody's rows."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

_OURS = "fedppl"  # known by its version
_PLAIN = (str, bytes, bool, int, float, complex, type(None), type(Ellipsis))


def code_key(builder: Any) -> str:
    """Digest of a function's code, defaults, closure and the globals of its own package; of an object its attributes.

    The same in every process. Two builders with one key may still differ in what they read of files.

    >>> one, same, other = (functools.partial(np.power, exponent) for exponent in (2, 2, 3))
    >>> code_key(one) == code_key(same), code_key(one) == code_key(other)
    (True, False)
    """
    state = hashlib.sha256()
    for part in _parts(builder, _package(builder), {}):
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", None) or type(value).__module__).partition(".")[0]


def _parts(value: Any, package: str, seen: dict[int, Any]) -> Iterator[bytes]:
    """Bytes that tell a value from others; what was met before, and what other packages have, by name."""
    if isinstance(value, _PLAIN):
        yield repr(value).encode(errors="surrogatepass")
        return
    yield type(value).__qualname__.encode()
    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, CodeType):
        yield value.co_code
        yield repr((value.co_names, value.co_varnames, value.co_freevars)).encode()
        value = value.co_consts
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        yield repr((array.dtype.str, array.shape)).encode()
        yield repr(array.tolist()).encode(errors="surrogatepass") if array.dtype.hasobject else array.tobytes()
    elif isinstance(value, FunctionType) and _package(value) == package and package != _OURS:
        known = ((name, value.__globals__.get(name)) for name in value.__code__.co_names)
        # What a module fills while it runs, such as a cache, is another at each call.
        found = {name: one for name, one in known if not isinstance(one, dict | list | set)}
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        for part in (value.__code__, value.__defaults__, value.__kwdefaults__, cells, found):
            yield from _parts(part, package, seen)
    elif isinstance(value, functools.partial):
        yield from _parts([value.func, value.args, value.keywords], _package(value.func), seen)
    elif isinstance(value, MethodType):
        yield from _parts([value.__func__, value.__self__], package, seen)
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _parts(name, package, seen)
            yield from _parts(one, package, seen)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _parts(one, package, seen)
    elif isinstance(value, set | frozenset):
        yield repr(sorted(map(repr, value))).encode()
    elif isinstance(value, type | ModuleType | FunctionType):
        yield f"{_package(value)} {getattr(value, '__qualname__', getattr(value, '__name__', ''))}".encode()
    elif dataclasses.is_dataclass(value):
        yield from _parts([getattr(value, one.name) for one in dataclasses.fields(value)], package, seen)
    elif type(value).__module__.partition(".")[0] == package and package != _OURS:
        yield from _parts(getattr(value, "__dict__", {}), package, seen)
    else:
        yield f"{type(value).__module__} {getattr(value, '__name__', '')}".encode()


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # of a variable that is set later
        return False
