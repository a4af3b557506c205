"""Whether two builds of a model compute the same: by their graphs, by values, or by keys that all processes share."""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import pymc
import pytensor
from pymc.distributions.distribution import SymbolicRandomVariable
from pymc.logprob.transforms import Transform
from pytensor.compile.builders import OpFromGraph
from pytensor.configdefaults import config
from pytensor.gradient import GradClip, GradScale
from pytensor.graph.basic import Constant, equal_computations
from pytensor.graph.basic import Variable as PyTensorVariable
from pytensor.graph.op import HasInnerGraph, Op
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors, io_toposort
from pytensor.graph.type import Type
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.random.type import RandomGeneratorType, RandomType
from pytensor.tensor.type import TensorType
from pytensor.tensor.type_other import NoneTypeT, SliceType

from fedppl.model import graph as _graph
from fedppl.types import Array, Variable

_POINTS = 3


def _inlined(outputs: Sequence[Any]) -> list[Any]:
    """Inline operations that are graphs themselves (`pt.diag`, `kron`)."""
    graphs = list(outputs)
    while True:
        nodes = [v.owner for v in ancestors(graphs) if v.owner is not None and isinstance(v.owner.op, OpFromGraph)]
        if not nodes:
            return graphs
        op, inputs = nodes[0].op, nodes[0].inputs
        graph = op.fgraph.unfreeze() if hasattr(op.fgraph, "unfreeze") else op.fgraph
        inner = clone_replace(graph.outputs, dict(zip(graph.inputs, inputs, strict=True)))
        graphs = clone_replace(graphs, dict(zip(nodes[0].outputs, inner, strict=True)))


def same_computations(a: Sequence[Any], b: Sequence[Any], in_a: Sequence[Any], in_b: Sequence[Any]) -> bool:
    """Whether graphs a of inputs in_a and graphs b of inputs in_b compute the same values and gradients.

    PyTensor before 3 never finds operations equal that are graphs themselves: these are inlined and compared, where
    the inner graph is all of their meaning.
    """
    ops_a, ops_b = operations(a), operations(b)
    if any(has_own_gradient(op) for op in (*ops_a, *ops_b)):
        return False
    if equal_computations(list(a), list(b), in_xs=list(in_a), in_ys=list(in_b)):
        return True
    inner_a, inner_b = ([op for op in ops if isinstance(op, OpFromGraph)] for ops in (ops_a, ops_b))
    if not any(not hasattr(op.fgraph, "unfreeze") for op in (*inner_a, *inner_b)):
        return False
    # The inner graph of a random variable draws it; its density depends on its class, and a user's distribution has a
    # new class in each model.
    drawn_a, drawn_b = (
        [type(op) for op in ops if isinstance(op, SymbolicRandomVariable)] for ops in (inner_a, inner_b)
    )
    if Counter(drawn_a) != Counter(drawn_b):
        return False
    return bool(equal_computations(_inlined(a), _inlined(b), in_xs=list(in_a), in_ys=list(in_b)))


def operations(outputs: Sequence[Any]) -> list[Any]:
    """All operations of graphs, and the inner operations of these."""
    waiting = list({v.owner: v.owner.op for v in ancestors(list(outputs)) if v.owner is not None}.values())
    ops = []
    while waiting:
        op = waiting.pop()
        ops.append(op)
        waiting += [getattr(op, name) for name in ("scalar_op", "core_op") if hasattr(op, name)]
        ops += operations(op.fgraph.outputs) if hasattr(op, "fgraph") else []
    return ops


_OVERRIDES = ("lop_overrides", "grad_overrides", "rop_overrides", "pullback_overrides", "pushforward_overrides")


def has_own_gradient(op: Any) -> bool:
    """Whether an operation may have another gradient than one that PyTensor finds equal to it."""
    if isinstance(op, GradClip | GradScale):
        return True
    return isinstance(op, OpFromGraph) and any(getattr(op, name, None) is not None for name in _OVERRIDES)


def surely_same_model(a: _graph.Parts, b: _graph.Parts) -> bool:
    """Whether two builds declare the same variables of their containers; False where this quick test cannot tell.

    The declared graphs with their random variables are compared, without deriving a log density, which takes ten times
    as long as building the model. Dims that are open in `a` may differ in length.
    """
    if names(a) != names(b) or a.model.named_vars_to_dims != b.model.named_vars_to_dims:
        return False
    lengths_a, lengths_b = ({**_graph.lengths(parts.model), **dict.fromkeys(a.open)} for parts in (a, b))
    types_a, types_b = ([parts.model.rvs_to_values[rv].type.dtype for rv in parts.model.basic_RVs] for parts in (a, b))
    if lengths_a != lengths_b or types_a != types_b:
        return False
    return _same_transforms(a, b, a.model.basic_RVs, b.model.basic_RVs) and same_terms(a, b, declared_outputs)


def same_terms(a: _graph.Parts, b: _graph.Parts, terms_of: Callable[[_graph.Parts], list[Any]]) -> bool:
    """Whether terms of two builds are the same graphs of containers, random streams and lengths of dims."""
    terms_a, terms_b = terms_of(a), terms_of(b)
    read_a, read_b = _lengths_read(a, terms_a), _lengths_read(b, terms_b)
    inputs_a = [*a.data, *streams(terms_a), *(a.model.dim_lengths[dim] for dim in read_a)]
    inputs_b = [*b.data, *streams(terms_b), *(b.model.dim_lengths[dim] for dim in read_b)]
    if read_a.keys() != read_b.keys() or len(inputs_a) != len(inputs_b) or len(terms_a) != len(terms_b):
        return False
    return same_computations(terms_a, terms_b, inputs_a, inputs_b)


def _same_transforms(a: _graph.Parts, b: _graph.Parts, rvs_a: Sequence[Any], rvs_b: Sequence[Any]) -> bool:
    """Whether transforms of variables are surely the same, as those with a key may be."""
    try:
        keys = [value_key([m.rvs_to_transforms[rv] for rv in rvs]) for m, rvs in ((a.model, rvs_a), (b.model, rvs_b))]
    except NoKey:
        return False
    return keys[0] == keys[1]


def _lengths_read(parts: _graph.Parts, outputs: Sequence[Any]) -> dict[str, int]:
    """Dims whose lengths outputs are computed from, with their present lengths."""
    read, sizes = set(ancestors(outputs)), _graph.lengths(parts.model)
    return {dim: sizes[dim] for dim, v in sorted(parts.model.dim_lengths.items()) if v in read and dim in sizes}


def names(parts: _graph.Parts) -> list[Any]:
    """Names of a model's variables by their role, and types of its containers."""
    model = parts.model
    groups = (model.basic_RVs, model.potentials, model.deterministics, parts.shared, parts.local, model.observed_RVs)
    named = [[v.name for v in group] for group in groups]
    return [*named, [(v.name, v.type.dtype, v.type.ndim) for v in parts.data]]


def declared_outputs(parts: _graph.Parts) -> list[Any]:
    """All outputs that a model declares."""
    return [*_graph.declared(parts.model), *parts.model.deterministics]


def streams(outputs: Sequence[Any]) -> list[Any]:
    """Generators of random variables in the order of the graph: each build has its own, and no density reads them."""
    return [v for v in ancestors(outputs) if v.owner is None and isinstance(v.type, RandomType)]


def same_graph(a: _graph.SiteGraph, b: _graph.SiteGraph) -> bool:
    """Whether two site graphs compute the same function of their inputs."""
    return same_types(a, b) and same_computations([a.logp], [b.logp], [a.x, *a.inputs], [b.x, *b.inputs])


def same_types(a: _graph.SiteGraph, b: _graph.SiteGraph) -> bool:
    """Whether two site graphs take the same inputs."""
    return [v.type for v in a.inputs] == [v.type for v in b.inputs] and a.free_shapes == b.free_shapes


def same_prior(a: _graph.Parts, b: _graph.Parts, shared: Sequence[Variable]) -> bool:
    """Whether two builds give the shared variables the same prior, with equal constants."""
    terms_a, terms_b = list(a.prior_terms), list(b.prior_terms)
    if (
        [v.name for v in terms_a] == [v.name for v in terms_b]
        and _same_transforms(a, b, a.shared, b.shared)
        and _lengths_read(a, terms_a) == _lengths_read(b, terms_b)
        and same_terms(a, b, lambda parts: list(parts.prior_terms))
    ):
        return True
    of_a, of_b = _graph.prior_graph(a, shared), _graph.prior_graph(b, shared)
    return same_computations([of_a.logp], [of_b.logp], [of_a.x], [of_b.x])


def same_outputs(a: _graph.Parts, b: _graph.Parts, shared: Sequence[Variable]) -> bool:
    """Whether two builds compute the same constrained variables and deterministics."""
    public = [v.name for v in _graph.computed_from_shared(a)]
    for only_shared in (True, False):
        x_a, inputs_a, names_a, outputs_a = _graph.constrained_graph(a, shared, public, only_shared=only_shared)
        x_b, inputs_b, names_b, outputs_b = _graph.constrained_graph(b, shared, public, only_shared=only_shared)
        if names_a != names_b or not same_computations(outputs_a, outputs_b, [x_a, *inputs_a], [x_b, *inputs_b]):
            return False
    return True


def same_constants(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two graphs have the same constants, except small integers, which shapes and axes are computed with."""
    numbers_a, numbers_b = (
        {_number(v) for v in ancestors(_inlined(graph)) if isinstance(v, Constant)} for graph in (a, b)
    )
    return (numbers_a ^ numbers_b) <= {None}


def _number(constant: Any) -> tuple[str, tuple[int, ...], bytes] | None:
    value = np.asarray(constant.data)
    if value.dtype.kind not in "biufc" or (value.ndim == 0 and value.dtype.kind in "biu" and -2 <= value <= 2):
        return None
    return value.dtype.kind, value.shape, value.tobytes()


def same_values(a: Callable[..., Any], b: Callable[..., Any], examples: Sequence[tuple[int, tuple[Any, ...]]]) -> bool:
    """Whether two log densities of x agree at random points, for each number of coordinates and inputs.

    One function may have graphs in several forms: the order in which PyTensor infers shapes changes from build to build
    (a covariance matrix over a client's rows).
    """
    rng = np.random.default_rng(0)
    compared = False
    for size, inputs in examples:
        for _ in range(_POINTS):
            x: Array = rng.normal(size=size)
            try:
                value_a, value_b = float(a(x, *inputs)), float(b(x, *inputs))
            except (ValueError, TypeError, IndexError, AssertionError, ArithmeticError, np.linalg.LinAlgError):
                continue
            if not np.isclose(value_a, value_b, rtol=1e-9, atol=1e-9, equal_nan=True):
                return False
            compared = compared or bool(np.isfinite(value_a))
    return compared


# Keys of graphs as they were declared, by which a process finds code that an earlier one compiled ---------------------

# PyTensor names what it compiles by the graph after its rewrites. These take most of a second, and their order, and so
# the name, may depend on the seed of Python's hashes, which each process draws anew.

_OURS = ("pytensor.", "pymc.", "numpy.", "builtins")  # whose code changes with a version, and not with a script
_OPEN = ("pytensor.", "pymc.")
_TYPES = (TensorType, ScalarType, NoneTypeT, SliceType, RandomGeneratorType)  # of which dtype and shape are all
_NUMPY_TYPES = (np.ndarray, np.generic)


class NoKey(Exception):
    """A part of a graph whose text does not determine what it computes."""


def graph_key(inputs: Sequence[PyTensorVariable], outputs: Sequence[PyTensorVariable]) -> str | None:
    """Digest of graphs and of all that determines their compiled code; None where a part has no key."""
    places: dict[PyTensorVariable, str] = {variable: f"input {i}" for i, variable in enumerate(inputs)}
    try:
        digest = hashlib.sha256(repr((_compiled_by(), [_of_type(variable.type) for variable in inputs])).encode())
        for number, node in enumerate(io_toposort(list(inputs), list(outputs))):
            for variable in node.inputs:
                if isinstance(variable, Constant) and variable not in places:
                    places[variable] = f"{_of_type(variable.type)} {value_key(variable.data)}"
            read = (value_key(node.op), [places[variable] for variable in node.inputs])
            digest.update(repr((read, [_of_type(variable.type) for variable in node.outputs])).encode())
            places |= {variable: f"{number} {i}" for i, variable in enumerate(node.outputs)}
        digest.update(repr([places[variable] for variable in outputs]).encode())
    except (NoKey, KeyError):  # such as a shared variable, which has a value
        return None
    return digest.hexdigest()


@functools.cache
def _compiled_by() -> tuple[str, ...]:
    """Versions, settings, and digests of our code that determine compiled code."""
    here = Path(__file__).parent
    digests = [hashlib.sha256((here / name).read_bytes()).hexdigest() for name in ("compiled.py", "template.py")]
    flags = [str(getattr(config, name)) for name in ("floatX", "numba__fastmath", "cast_policy")]
    return (pytensor.__version__, pymc.__version__, *flags, *digests)


def _of_type(of: Type) -> str:
    """A type of tensors by its dtype and static shape."""
    if type(of) not in _TYPES:
        raise NoKey
    return f"{type(of).__name__} {getattr(of, 'dtype', '')} {getattr(of, 'shape', '')}"


def value_key(value: Any) -> str:
    """A text of a value that is the same in each process, and differs where something else is computed."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | slice):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, np.dtype):
        return f"dtype {value.str}"
    if isinstance(value, _NUMPY_TYPES) and value.dtype != object:
        array = np.ascontiguousarray(value)
        return f"{array.dtype.str} {np.shape(value)} {hashlib.sha256(array.tobytes()).hexdigest()}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(value_key, value))}]"
    if isinstance(value, frozenset | set):
        return f"{{{', '.join(sorted(map(value_key, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{value_key(key)}: {value_key(item)}' for key, item in value.items()))}}}"
    if isinstance(value, FunctionType) and "<locals>" in value.__qualname__:  # such as bounds of an interval
        return _local_key(value)
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return name_key(value)
    if isinstance(value, Type):
        return _of_type(value)
    if isinstance(value, Constant):
        return f"{_of_type(value.type)} {value_key(value.data)}"
    if isinstance(value, _graph.SdsAndPartials):
        return f"{value.name} {len(value.own_sd)}"
    if isinstance(value, Transform):
        return f"{name_key(type(value))} {value_key(vars(value))}"
    if isinstance(value, OpFromGraph) and type(value) is not OpFromGraph:  # such as `pt.diag`: class and inner graph
        inner = graph_key(value.fgraph.inputs, value.fgraph.outputs)
        if inner is None or has_own_gradient(value):
            raise NoKey
        return f"{name_key(type(value))} {inner} {_props(value)}"
    if isinstance(value, Op) and not isinstance(value, HasInnerGraph) and hasattr(value, "__props__"):
        # Operations of a class are equal, compiled too, where these attributes are.
        return f"{name_key(type(value))} {_props(value)}"
    # Any other object has a key only if it is of PyTensor or PyMC, and all its state is in __dict__.
    hidden = any(vars(item).get("__slots__") for item in type(value).__mro__)
    in_sight = type(value).__module__.startswith(_OPEN) and hasattr(value, "__dict__") and not hidden
    if isinstance(value, HasInnerGraph | PyTensorVariable) or not in_sight:
        raise NoKey
    attributes = {name: item for name, item in vars(value).items() if name not in ("tag", "name")}
    return f"{name_key(type(value))} {value_key(attributes)}"


def _local_key(function: FunctionType) -> str:
    """Key of a function that a function of PyMC has defined: its place in the source, and what it has closed over."""
    module = sys.modules.get(function.__module__)
    if not f"{function.__module__}.".startswith("pymc.") or function.__globals__ is not vars(module):
        raise NoKey
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    place = f"{function.__module__}.{function.__qualname__} {function.__code__.co_firstlineno}"
    return f"{place} {value_key([*cells, function.__defaults__, function.__kwdefaults__])}"


def _props(op: Any) -> str:
    return value_key({name: getattr(op, name) for name in getattr(op, "__props__", ())})


def name_key(value: Any) -> str:
    """Name of a class or a function, where the name determines it."""
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    if not name or "<" in name or not f"{module}.".startswith(_OURS):
        raise NoKey
    target: Any = sys.modules.get(module)
    for part in name.split("."):
        target = getattr(target, part, None)
    if target is not value:  # another object has this name
        raise NoKey
    return f"{module}.{name}"


# A key of a builder by its code and what the code reads, known before it is called on data ----------------------------

_OUR_CODE = "fedppl"  # known by its version
_PLAIN = (str, bytes, bool, int, float, complex, type(None), type(Ellipsis))


def code_key(builder: Any) -> str:
    """Digest of a function's code, defaults, closure and globals of its own package, or of an object's attributes.

    It is the same in every process. Global containers are read too: one that a module fills while it runs, such as a
    cache, gives a builder another key for each content that it has when the builder is named. Builders with one key
    may still differ in what nothing here reads: files, the clock, objects of other packages.

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


def _parts(value: Any, package: str, seen: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    """Bytes that identify a value; one met before is identified by its number, one of another package by name."""
    if isinstance(value, _PLAIN):
        yield repr(value).encode(errors="surrogatepass")
        return
    yield type(value).__qualname__.encode()
    if id(value) in seen:
        yield f"number {seen[id(value)][0]}".encode()
        return
    seen[id(value)] = len(seen), value  # with the value, or another object could have its id
    if isinstance(value, CodeType):
        yield value.co_code
        yield repr((value.co_names, value.co_varnames, value.co_freevars)).encode()
        value = value.co_consts
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        yield repr((array.dtype.str, array.shape)).encode()
        yield repr(array.tolist()).encode(errors="surrogatepass") if array.dtype.hasobject else array.tobytes()
    elif isinstance(value, FunctionType) and _package(value) == package and package != _OUR_CODE:
        filled = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]  # others are set later
        cells = [content for content in filled if content is not None]
        for part in (value.__code__, value.__defaults__, value.__kwdefaults__, cells, _read_by(value, package)):
            yield from _parts(part, package, seen)
    elif isinstance(value, functools.partial):
        yield from _parts([value.func, value.args, value.keywords], _package(value.func), seen)
    elif isinstance(value, MethodType):
        yield from _parts([value.__func__, value.__self__], package, seen)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _parts(name, package, seen)
            yield from _parts(item, package, seen)
    elif isinstance(value, list | tuple | deque):
        for item in value:
            yield from _parts(item, package, seen)
    elif isinstance(value, set | frozenset):
        yield from sorted(b" ".join(_parts(item, package, dict(seen))) for item in value)
    elif isinstance(value, type | ModuleType | FunctionType):
        yield f"{_package(value)} {getattr(value, '__qualname__', getattr(value, '__name__', ''))}".encode()
    elif dataclasses.is_dataclass(value):
        yield from _parts([getattr(value, item.name) for item in dataclasses.fields(value)], package, seen)
    elif type(value).__module__.partition(".")[0] == package and package != _OUR_CODE:
        yield from _parts(getattr(value, "__dict__", {}), package, seen)
    elif isinstance(inner := getattr(value, "__wrapped__", None), FunctionType):  # of `functools.cache`
        yield from _parts(inner, package, seen)
    else:
        yield f"{type(value).__module__} {getattr(value, '__name__', '')}".encode()


def _read_by(function: FunctionType, package: str) -> dict[str, Any]:
    """Globals that a function and the functions in it read, and what of its package's modules among these they name.

    Attributes alone are no globals, though they may have a global's name.
    """
    codes = list(_codes(function.__code__))
    read = dict.fromkeys(step.argval for code in codes for step in dis.get_instructions(code) if step.opname in _READ)
    found = {name: function.__globals__[name] for name in read if name in function.__globals__}
    modules = [item for item in found.values() if isinstance(item, ModuleType)]
    names = dict.fromkeys(name for code in codes for name in code.co_names)
    for module in modules:
        if module.__name__.partition(".")[0] == package:
            found |= {f"{module.__name__}.{name}": vars(module)[name] for name in names if name in vars(module)}
    return found


_READ = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")  # the latter two in bodies of classes


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)
