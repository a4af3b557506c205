"""A name for a graph as it was declared, by which code that an earlier process compiled is found again.

PyTensor names what it compiles by the graph after its rewrites. These take most of a second, and for some graphs their
order, and so the name, depends on the seed of Python's hashes, which each process draws anew.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
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
