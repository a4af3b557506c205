"""A name for a graph as it was declared, by which code that an earlier process compiled is found again.

PyTensor names what it compiles by the graph after its rewrites. These take most of a second, and for some graphs their
order, and so the name, depends on the seed of Python's hashes, which each process draws anew.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import pytensor
from pytensor.compile.builders import OpFromGraph
from pytensor.configdefaults import config
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.op import HasInnerGraph, Op
from pytensor.graph.traversal import io_toposort
from pytensor.graph.type import Type
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.random.type import RandomGeneratorType
from pytensor.tensor.type import TensorType
from pytensor.tensor.type_other import NoneTypeT, SliceType

from fedppl.model.same import has_own_gradient

_OURS = ("pytensor.", "pymc.", "numpy.", "builtins")  # whose code changes with a version, and not with a script
_OPEN = ("pytensor.", "pymc.")
_TYPES = (TensorType, ScalarType, NoneTypeT, SliceType, RandomGeneratorType)  # of which dtype and shape are all
_NUMPY_TYPES = (np.ndarray, np.generic)


class Untold(Exception):
    """Something in a graph whose text says too little of what it does."""


def graph_key(inputs: Sequence[Variable], outputs: Sequence[Variable]) -> str | None:
    """Digest of graphs and of all that decides what is compiled of them; None where that cannot be told."""
    places: dict[Variable, str] = {variable: f"input {i}" for i, variable in enumerate(inputs)}
    try:
        digest = hashlib.sha256(repr((_compiled_by(), [_of_type(variable.type) for variable in inputs])).encode())
        for number, node in enumerate(io_toposort(list(inputs), list(outputs))):
            for variable in node.inputs:
                if isinstance(variable, Constant) and variable not in places:
                    places[variable] = f"{_of_type(variable.type)} {told(variable.data)}"
            read = (told(node.op), [places[variable] for variable in node.inputs])
            digest.update(repr((read, [_of_type(variable.type) for variable in node.outputs])).encode())
            places |= {variable: f"{number} {i}" for i, variable in enumerate(node.outputs)}
        digest.update(repr([places[variable] for variable in outputs]).encode())
    except (Untold, KeyError):  # a variable that is neither given nor computed has a value of its own
        return None
    return digest.hexdigest()


@functools.cache
def _compiled_by() -> tuple[str, ...]:
    """Versions and settings, and our own code that has a say in it."""
    import pymc

    here = Path(__file__).parent
    own = [
        hashlib.sha256((here / name).read_bytes()).hexdigest() for name in ("pack.py", "numba_mode.py", "_template.py")
    ]
    flags = [str(getattr(config, name)) for name in ("floatX", "numba__fastmath", "cast_policy")]
    return (pytensor.__version__, pymc.__version__, *flags, *own)


def _of_type(of: Type) -> str:
    """A type of tensors by its dtype and static shape."""
    if type(of) not in _TYPES:
        raise Untold
    return f"{type(of).__name__} {getattr(of, 'dtype', '')} {getattr(of, 'shape', '')}"


def told(value: Any) -> str:
    """A value in words that are the same in each process, and different for what computes something else."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | slice):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, np.dtype):
        return f"dtype {value.str}"
    if isinstance(value, _NUMPY_TYPES) and value.dtype != object:
        array = np.ascontiguousarray(value)
        return f"{array.dtype.str} {np.shape(value)} {hashlib.sha256(array.tobytes()).hexdigest()}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(told, value))}]"
    if isinstance(value, frozenset | set):
        return f"{{{', '.join(sorted(map(told, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{told(key)}: {told(one)}' for key, one in value.items()))}}}"
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return named(value)
    if isinstance(value, Type):
        return _of_type(value)
    if (
        isinstance(value, OpFromGraph) and type(value) is not OpFromGraph
    ):  # such as `pt.diag`, whose class says the rest
        inner = graph_key(value.fgraph.inputs, value.fgraph.outputs)
        if inner is None or has_own_gradient(value):
            raise Untold
        return f"{named(type(value))} {inner} {_props(value)}"
    if isinstance(value, Op) and not isinstance(value, HasInnerGraph) and hasattr(value, "__props__"):
        # What makes two operations of a class equal, and so does of what is compiled of them.
        return f"{named(type(value))} {_props(value)}"
    # Of anything else only what an object of PyTensor or PyMC holds in plain sight says what it does: not a method, nor
    # a class that keeps what it has where it cannot be read.
    hidden = any(vars(one).get("__slots__") for one in type(value).__mro__)
    in_sight = type(value).__module__.startswith(_OPEN) and hasattr(value, "__dict__") and not hidden
    if isinstance(value, HasInnerGraph | Variable) or not in_sight:
        raise Untold
    held = {name: one for name, one in vars(value).items() if name not in ("tag", "name")}
    return f"{named(type(value))} {told(held)}"


def _props(op: Any) -> str:
    return told({name: getattr(op, name) for name in getattr(op, "__props__", ())})


def named(value: Any) -> str:
    """A class or a function by its name, where that says what it is."""
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    if not name or "<" in name or not f"{module}.".startswith(_OURS):
        raise Untold
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value:  # it was given the name of another
        raise Untold
    return f"{module}.{name}"


# A name for what a builder does, by its code and what that reads: known before it is called on anybody's rows ---------

_OUR_CODE = "fedppl"  # known by its version
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
    elif isinstance(value, FunctionType) and _package(value) == package and package != _OUR_CODE:
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
    elif type(value).__module__.partition(".")[0] == package and package != _OUR_CODE:
        yield from _parts(getattr(value, "__dict__", {}), package, seen)
    else:
        yield f"{type(value).__module__} {getattr(value, '__name__', '')}".encode()


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # of a variable that is set later
        return False
