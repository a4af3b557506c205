"""From the user's builder to templates: build a client's model, take it apart, compile it. Clients share templates."""

from __future__ import annotations

import functools
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.logprob.abstract import _logprob
from pymc.logprob.utils import ParameterValueError
from pytensor.gradient import NullTypeGradError
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor.variable import TensorConstant

from fedppl.model import checks, interpreted
from fedppl.model import graph as _graph
from fedppl.model import same as _same
from fedppl.model._public import Public
from fedppl.model.checks import UNFIT, containers, mismatch, naming, require_arguments, shapes_of
from fedppl.model.compiled import Piece, inlined, mode, unpacking_kernel, without_notices
from fedppl.model.graph import with_sds
from fedppl.model.same import NoKey, graph_key, value_key
from fedppl.numerics.pairs import NO_DATA, site_outputs
from fedppl.types import Array, DataError, DeclarationError, Variable


class Declared(NamedTuple):
    """The user's builder, the names of the shared free variables, and the kind of its clients."""

    builder: Callable[..., Any]
    shared: tuple[str, ...]
    kind: str = ""


def built(builder: Callable[..., Any], client_id: str, arrays: Mapping[str, Any]) -> Any:
    """Call the builder on one client's data; errors name the client."""
    views = {name: value.view() if isinstance(value, np.ndarray) else value for name, value in arrays.items()}
    for view in views.values():  # a builder is called several times on these arrays
        if isinstance(view, np.ndarray):
            view.flags.writeable = False
    with naming(client_id):
        require_arguments(builder, arrays)
        try:
            model = builder(**views)
            if isinstance(model, pm.Model):
                with_sds(model)
            return model
        except DeclarationError:  # the builder refuses its settings
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {str(error).rstrip('.')}. {_remedy(error, arrays)}"
            raise DataError(f"the builder failed on shapes {shapes_of(arrays)}{_line(error)}: {what}") from error


def _remedy(error: Exception, arrays: Mapping[str, Any]) -> str:
    text = str(error)
    reals = [repr(name) for name, value in arrays.items() if np.asarray(value).dtype.kind == "f"]
    if twice := [name for name in arrays if f"Variable name {name} already exists" in text]:
        return f"pm.Data({twice[0]!r}) has that name: rename the other variable."
    if "read-only" in text:
        return "It is called several times: make new arrays, y = y - y.mean(), not y -= ..."
    if "Size length is incompatible" in text:
        return "Give outcomes as many axes as parameters have, (n, 1), or take a column, f[:, 0]."
    if isinstance(error, TypeError) and "integers" in text and reals:
        return f"{', '.join(reals)} are real numbers: give an index as integers."
    return "Check the builder, and this client's data against its arguments."


def _line(error: Exception) -> str:
    """The last line that is not of an installed package: where the builder failed."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if "site-packages" not in frame.filename]
    return f", in line {own[-1].lineno} of {Path(own[-1].filename).name}" if own else ""


def parts_of(declared: Declared, client_id: str, arrays: Mapping[str, Any]) -> _graph.Parts:
    """Build a client's model and sort its parts; refuse containers that are not named like the data."""
    model = built(declared.builder, client_id, arrays)
    with naming(client_id):
        parts = _graph.dissect(model, declared.shared)
        _require_as_given(parts.data, arrays)
    return parts


def _require_as_given(data: Sequence[Any], arrays: Mapping[str, Any]) -> None:
    """Refuse containers with other names or values than the data, which replace what the builder put there."""
    names = {container.name for container in data}
    if names and names != set(arrays):
        extra, absent = sorted(set(arrays) - names), sorted(names - set(arrays))
        problem = f"{extra} match no container" if extra else f"{absent} have no data"
        listed = f"of containers {sorted(names)}, data {sorted(arrays)}"
        raise DataError(f"{problem}, {listed}. Name each container like the argument it holds.")
    for container in data:
        name, values, given = container.name, np.asarray(container.get_value()), np.asarray(arrays[container.name])
        if values.shape != given.shape or not np.allclose(values, given, rtol=1e-6, atol=0.0):
            raise DataError(f"pm.Data({name!r}) alters the data; compute from that, or change them before the fit.")


def template_of(declared: Declared, client_id: str, arrays: Mapping[str, Any]) -> Template:
    """Build a client's model alone."""
    parts = parts_of(declared, client_id, arrays)
    return opened(client_id, arrays, parts, _graph.open_lengths(parts))


def opened(
    client_id: str, arrays: Mapping[str, Any], parts: _graph.Parts, lengths: Mapping[str, int | None]
) -> Template:
    """Template of a model in which these lengths may differ from client to client."""
    parts = parts._replace(open=lengths)
    made = made_of(content_of(parts))
    start = make_once(made, "start", lambda: interpreted.python_function(*_graph.initial_graphs(parts)))
    values = (*containers(client_id, parts, arrays), *_graph.alone(parts))
    with naming(client_id):
        try:
            initial = start(*values)
        except NotImplementedError as error:  # an initial value that would be a draw
            remedy = "Give a prior that can be drawn from, by init_dist= for example, or initval=."
            raise DeclarationError(f"there is no starting point: {_first_line(error)} {remedy}") from error
        except UNFIT as error:
            raise mismatch(arrays, error) from error
        shared, local = _graph.variables(parts, initial)
        try:
            # The density of a client's rows does not change with the numbers of the shared prior.
            of_site = made_of(site_content(parts))
            graph = make_once(of_site, ("graph", shared), lambda: _graph.site_graph(parts, shared))
        except NotImplementedError as error:
            raise DeclarationError(f"PyMC has no log density: {_first_line(error)} Give CustomDist's logp=.") from error
        except ValueError as error:
            remedy = " Give each observed variable data of its own." if "More than one logprob" in str(error) else ""
            raise DeclarationError(f"PyMC cannot put the log density together: {error}.{remedy}") from error
    return Template(parts, (shared, local), graph, start, (*values, *shapes(graph, local)), made)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def lengths_of(
    declared: Declared, client_id: str, template: Template, arrays: Mapping[str, Any]
) -> tuple[Template, tuple[Any, ...]]:
    """The template in which this client's lengths are open, and the lengths that no container has."""
    parts, may_hold_rows = template.parts, template.may_hold_rows(arrays)
    if not may_hold_rows and None not in parts.open.values():
        return template, ()
    model = parts_of(declared, client_id, arrays).model
    lengths = _graph.open_lengths(parts, model) if may_hold_rows else parts.open
    if lengths != parts.open:
        built_on = {v.name: v.get_value() for v in parts.data}
        name = ("opened", *lengths.items())
        other = template.once(name, lambda: opened(client_id, built_on, parts, lengths))
        other.functions["public"], template = template.public, other
    return template, _graph.alone(template.parts, model)


def shapes(graph: _graph.SiteGraph, local: tuple[Variable, ...]) -> tuple[Array, ...]:
    """Shapes of the local variables that are inputs of the graph."""
    return tuple(np.asarray(local[i].shape, dtype=np.int64) for i in graph.free_shapes)


# A build of the model and what is compiled from it, the site factor ---------------------------------------------------

T = TypeVar("T")
_KERNELS_KEPT = 64
_NARROW = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
# With the name of the graph that they were compiled for: those with slopes and without.
_Kernel = tuple[str | None, dict[bool, Callable[..., Any]]]
_kernels: list[tuple[_graph.SiteGraph, _Kernel]] = []  # the last ones compiled
_in_use: weakref.WeakKeyDictionary[_graph.SiteGraph, _Kernel] = weakref.WeakKeyDictionary()
_compiled = 0
_lock = threading.Lock()


def compilations() -> int:
    """Number of log densities that this process compiled. Tests require that refits compile none."""
    return _compiled


def make_once(made: dict[Any, Any], name: Any, make: Callable[[], T]) -> T:
    """The value under a name, made at first use."""
    if name not in made:
        made[name] = make()
    value: T = made[name]
    return value


@dataclass(frozen=True, eq=False)
class Template:
    """One build of the model and its compiled site factor; its clients differ from it only in their data."""

    parts: _graph.Parts
    variables: tuple[tuple[Variable, ...], tuple[Variable, ...]]  # shared and local ones of the client built for
    graph: _graph.SiteGraph
    start: Callable[..., list[Array]]
    example: tuple[Any, ...]  # inputs of the graph at the client built for
    # Caches: what follows from the declaration alone, for all builds of one content; what follows from this build.
    made: dict[Any, Any] = field(default_factory=dict)
    functions: dict[Any, Any] = field(default_factory=dict)

    def once(self, name: Any, make: Callable[[], T]) -> T:
        """A value that is made at first use, for all clients."""
        return make_once(self.functions, name, make)

    def of_declaration(self, name: Any, make: Callable[[], T]) -> T:
        """A value that is made at first use, for all builds of one content; it may hold no client's data."""
        return make_once(self.made, (name, self.variables[0]), make)

    @property
    def kernel(self) -> Callable[..., Any]:
        """The compiled log density with its gradient, compiled at first use, after all checks."""
        return self.of_declaration("kernel", lambda: kernel_of(self.graph))

    @property
    def value_kernel(self) -> Callable[..., Any]:
        """The same without the gradient, for integrals."""
        return self.of_declaration("value kernel", lambda: kernel_of(self.graph, slopes=False))

    @property
    def density(self) -> Callable[..., Any]:
        """The log density of x and the arrays, interpreted, for the few calls of checks."""
        arguments = [self.graph.x, *self.graph.inputs]
        return self.of_declaration(
            "density", lambda: interpreted.python_function(arguments, self.graph.logp, interpreted.STABLE_MODE)
        )

    def same_density(self, other: Template) -> bool:
        """Whether two templates have one log density: by their graphs, else by their values."""
        if _same.same_graph(self.graph, other.graph):
            return True
        same_constants = _same.same_constants([self.graph.logp], [other.graph.logp])
        if not (_same.same_types(self.graph, other.graph) and same_constants):
            return False
        sizes = [sum(v.size for group in template.variables for v in group) for template in (self, other)]
        examples = list(zip(sizes, (self.example, other.example), strict=True))
        return _same.same_values(self.density, other.density, examples)

    @property
    def indexes_by_data(self) -> bool:
        """Whether compiled code could read out of bounds."""
        return self.of_declaration("by data", lambda: _graph.indexes_by_data(self.graph))

    @property
    def indices(self) -> checks.Indices:
        """Indices that the model computes from data."""
        return self.once("indices", lambda: checks.site_indices(self.graph, self.parts))

    @property
    def public(self) -> Public:
        """Deterministics and labels of this model that may leave a client."""
        public: Public = self.functions["public"]
        return public

    def may_hold_rows(self, arrays: Mapping[str, Any]) -> bool:
        """Whether the length of a dim may be a client's number of rows, which one build alone does not show."""
        if "compared" in self.functions:
            return False
        fixed = {length for name, length in _graph.lengths(self.parts.model).items() if name not in self.parts.open}
        rows = {v.name: len(v.get_value()) for v in self.parts.data if v.type.ndim}
        return any(rows[name] in fixed and rows[name] != len(np.atleast_1d(arrays[name])) for name in rows)


def differences(template: Template, client_id: str, arrays: Mapping[str, Any], parts: _graph.Parts) -> set[str]:
    """In what another build differs: "variables", or "prior", "density" and "outputs"; empty where both are one model.

    `arrays` are those that the other build was made from.
    """
    if _same.surely_same_model(template.parts, parts):
        return set()
    other = opened(client_id, arrays, parts, template.parts.open)
    if template.variables[0] != other.variables[0]:
        return {"variables"}
    same = {
        "prior": _same.same_prior(template.parts, other.parts, template.variables[0]),
        "density": template.same_density(other),
        "outputs": _same.same_outputs(template.parts, other.parts, template.variables[0]),
    }
    return {what for what, is_same in same.items() if not is_same}


def _compile(graph: _graph.SiteGraph, *, slopes: bool) -> Callable[..., Any]:
    """Compile x, packed data -> [log density, gradient] in NUMBA mode, callable from other jitted loops.

    Without `slopes` [log density].
    """
    global _compiled
    _compiled += 1
    # A graph of pieces of x: cutting x and joining the gradient take as long to compile as many a model, and are a few
    # lines of the source that unpacks the data.
    variables = [piece.variable for piece in graph.pieces]
    gradient: list[Any] = [None] * len(variables)
    if slopes:
        gradient = _gradient(graph.of_pieces, variables, "the log density")
    outputs = [graph.of_pieces, *(slope for slope in gradient if slope is not None)]
    # A number is a piece of x of length one: as an array of no axes it would be a copy, and its repetition another. For
    # the same reason integers are as wide as in the buffer that they come from.
    narrow = [v for v in graph.inputs if v.type.ndim and v.type.dtype in _NARROW]
    taken = {v: pt.vector(v.name, dtype=v.type.dtype, shape=(1,)) for v in variables if not v.type.ndim}
    taken |= {v: pt.tensor(v.name, dtype="int64", shape=v.type.shape) for v in narrow}
    within = {v: other.astype(v.type.dtype) if v in narrow else other.dimshuffle(()) for v, other in taken.items()}
    outputs = clone_replace(outputs, within)
    inputs = [taken.get(v, v) for v in (*variables, *graph.inputs)]
    shapes = [p.shape if isinstance(p.shape, tuple) else graph.inputs.index(p.shape) for p in graph.pieces]
    pieces = [
        Piece(variable.type.ndim, shape, slope is not None)
        for variable, shape, slope in zip(variables, shapes, gradient, strict=True)
    ]
    types = [(v.type.dtype, v.type.ndim) for v in inputs[len(variables) :]]

    def compiled() -> tuple[Callable[..., Any], bool]:
        # A parameter outside its domain has zero density, and raises no exception in the middle of a search.
        return inlined(inputs, outputs, mode().including("local_check_parameter_to_ninf_switch"))

    with without_notices():
        return unpacking_kernel(compiled, pieces, types, graph_key(inputs, outputs), slopes=slopes)


def _gradient(density: Any, variables: list[Any], what: str) -> list[Any]:
    """The gradient in variables; None for those that the density does not depend on."""
    try:
        slopes = pt.grad(density, variables, disconnected_inputs="ignore", return_disconnected="none")
    except (NotImplementedError, NullTypeGradError) as error:
        raise DeclarationError(f"{what} has no gradient; give your own Op one: {_first_line(error)}") from error
    return list(slopes)


def kernel_of(graph: _graph.SiteGraph, *, slopes: bool = True) -> Callable[..., Any]:
    """Find the kernel of an equal graph, or compile: a builder that is made anew (a closure) does not compile again.

    Only the site factor is looked up. Each build has its own names, priors, transforms and deterministics.
    """
    with _lock:
        entry = _in_use.get(graph)
        if entry is None:
            # Equal computations that are written differently (one term twice, or once and read twice) may differ in the
            # last digits. Keys tell them apart, so that a model gives the same bits whatever was compiled before.
            key = graph_key([graph.x, *graph.inputs], [graph.logp])
            known = [*_in_use.items(), *_kernels]
            entry = next((k for other, k in known if k[0] == key and _same.same_graph(other, graph)), (key, {}))
        if slopes not in entry[1]:
            entry[1][slopes] = _compile(graph, slopes=slopes)
            _kernels.append((graph, entry))
            del _kernels[:-_KERNELS_KEPT]
        _in_use[graph] = entry
        return entry[1][slopes]


# A shared prior's density and gradient at many points -----------------------------------------------------------------

AtMany = Callable[[Array], Array]  # (S, m) to (S,) or (S, m)


def interpreted_at_many(graph: _graph.SiteGraph) -> tuple[AtMany, AtMany]:
    """log p(φ) and its gradient at many φ by interpreted vectorised functions of the pieces of φ.

    Numbers of the prior are arguments: data on another scale give a prior of others, and none is built anew.
    """
    pieces = [piece.variable for piece in graph.pieces]
    types = [piece.type for piece in pieces]
    many = {
        piece: pt.TensorType(kind.dtype, shape=(None, *kind.shape))() for piece, kind in zip(pieces, types, strict=True)
    }
    constants = [v for v in ancestors([graph.of_pieces]) if isinstance(v, TensorConstant)]
    numbers = [v for v in constants if v.type.dtype.startswith("float") and v.data.size]  # no sizes are the shape ()
    # PyTensor has a number in single precision where that is exact: another one would have another type.
    arguments = [pt.TensorType("float64", number.type.shape)() for number in numbers]
    (density,) = clone_replace([graph.of_pieces], dict(zip(numbers, arguments, strict=True)), rebuild_strict=False)
    key = graph_key([*pieces, *arguments], [density])
    made = made_of(None if key is None else (key,))
    steady = functools.cache(lambda: interpreted.stable([density])[0])
    values = [number.data.astype(np.float64) for number in numbers]
    sizes = [int(np.prod(kind.shape)) for kind in types]
    ends = np.cumsum(sizes)
    real = [place for place, kind in enumerate(types) if kind.dtype.startswith("float")]

    def call(function: Callable[..., list[Array]], draws: Array) -> list[Array]:
        parts = zip(np.split(draws, ends[:-1], axis=1), types, strict=True)
        return function(*(part.reshape(len(draws), *kind.shape).astype(kind.dtype) for part, kind in parts), *values)

    @interpreted.untraced()
    def of_slopes() -> tuple[Callable[..., list[Array]], list[int]]:
        slopes = _gradient(steady(), [pieces[place] for place in real], "the shared prior's density")
        known = [place for place, slope in zip(real, slopes, strict=True) if slope is not None]
        outputs = [steady(), *(slope for slope in slopes if slope is not None)]  # the first checks parameters
        return interpreted.batched(many, arguments, outputs), known

    def slopes_at(draws: Array) -> Array:
        function, known = make_once(made, "slopes", of_slopes)
        gradient = np.zeros(draws.shape)
        for place, slope in zip(known, call(function, draws)[1:], strict=True):
            gradient[:, ends[place] - sizes[place] : ends[place]] = slope.reshape(len(draws), sizes[place])
        return gradient

    def alone(draws: Array) -> Array:
        return call(make_once(made, "alone", lambda: interpreted.batched(many, arguments, [steady()])), draws)[0]

    return (
        lambda draws: _by_row(alone, draws, np.array([-np.inf])),
        lambda draws: _by_row(slopes_at, draws, np.full((1, ends[-1]), np.nan)),
    )


def compiled_at_many(kernel: Callable[[], Callable[..., Any]]) -> tuple[AtMany, AtMany]:
    """log p(φ) and its gradient at many φ by a loop that is compiled at its first call."""

    def both(draws: Array) -> Array:
        return site_outputs(kernel(), np.asarray(draws, dtype=np.float64), NO_DATA)

    return lambda draws: both(draws)[:, 0], lambda draws: both(draws)[:, 1:]


def _by_row(function: AtMany, draws: Array, outside: Array) -> Array:
    """A function at draws (S, m); row by row if a parameter leaves its domain at some draw."""
    try:
        return function(draws)
    except ParameterValueError:
        if len(draws) == 1:
            return outside
        return np.concatenate([_by_row(function, row[None], outside) for row in draws])


# Cache of graphs and functions by what a build declares ---------------------------------------------------------------

# A builder is called in every fit, since its code does not show what it reads. Its model is looked up, and graphs and
# functions that follow from the model alone are not made again. They hold no client's data, which are inputs, except
# data that a builder makes constants.

# Three for each declaration, all, its likelihood, and its prior without numbers, of 1.6 MB; a study compares dozens
_KEPT = 96


def made_of(content: tuple[Any, ...] | None) -> dict[Any, Any]:
    """The cache of builds with this content, to which more may be added; an empty one where content has no key."""
    return {} if content is None else _made(content)


@functools.lru_cache(maxsize=_KEPT)  # thread-safe
def _made(content: tuple[Any, ...]) -> dict[Any, Any]:
    return {}


def content_of(parts: _graph.Parts) -> tuple[Any, ...] | None:
    """Key of all that a build declares except its containers' values; None where something has no key.

    There is no key of data that are constants in the graph without a container, of the user's code (operations,
    transforms, log densities), and of starting values that are computed.
    """
    return _content(parts, _same.declared_outputs(parts), ())


BY_SCALE = ("", "log", "ordered", "simplex", "logodds")  # transforms without limits of their own


def site_content(parts: _graph.Parts) -> tuple[Any, ...] | None:
    """Key of what a client's log density is computed from, the shared variables being given."""
    model = parts.model
    if any((getattr(model.rvs_to_transforms[rv], "name", "") or "") not in BY_SCALE for rv in parts.shared):
        return content_of(parts)
    return _content(parts, [*parts.site_terms, *(model.rvs_to_values[rv] for rv in model.observed_RVs)], parts.shared)


def _content(parts: _graph.Parts, outputs: Sequence[Any], given: Sequence[Any]) -> tuple[Any, ...] | None:
    model = parts.model
    if not parts.data or any(_same.has_own_gradient(op) for op in _same.operations(outputs)):
        return None
    lengths = _graph.lengths(model)
    inputs = [*given, *parts.data, *_same.streams(outputs), *(model.dim_lengths[dim] for dim in lengths)]
    values = [model.rvs_to_values[rv].type for rv in model.basic_RVs]
    try:
        key = value_key([[value.dtype, list(value.shape)] for value in values])
        key += value_key([model.rvs_to_transforms[rv] for rv in model.basic_RVs])
        key += value_key([model.rvs_to_initial_values[rv] for rv in model.free_RVs])
    except NoKey:
        return None
    graph = graph_key(inputs, outputs)
    fixed = {dim: length for dim, length in lengths.items() if dim not in parts.open}
    more = [_same.names(parts), dict(model.named_vars_to_dims), list(lengths), fixed, dict(parts.open)]
    # A class of the user's may have given one of PyMC's distributions another density.
    densities = tuple(_logprob.dispatch(type(rv.owner.op)) for rv in model.basic_RVs)
    rest = repr([*more, [v.name for v in parts.prior_terms], bool(model.check_bounds), len(given)])
    return None if graph is None else (graph, key, densities, rest)


# Which containers are outcomes, and whether rows without an outcome may be dropped ------------------------------------


def outcomes_of(declared: Declared, client_id: str, arrays: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the containers that are observed in a client's model."""
    parts = parts_of(declared, client_id, arrays)
    return tuple(str(variable.name) for variable in _graph.observed_through(parts))


def require_rows_apart(
    declared: Declared,
    client_id: str,
    filled: Mapping[str, Any],
    kept: Mapping[str, Any],
    rows: Array,
    outcomes: Sequence[str],
) -> None:
    """Refuse to drop rows if that changes the density of the other rows.

    `filled` are arrays of all rows, `kept` of the rows that stay, (n,) bool in `rows`; `outcomes` are observed by row.
    """
    whole, part = (parts_of(declared, client_id, arrays) for arrays in (filled, kept))
    if why := _why_together(whole, part, rows, outcomes):
        rule = f'client {client_id!r}: missing="drop_outcomes" needs rows that are independent, and here {why}'
        raise DataError(f'{rule}; impute outcomes before the fit, or say missing="drop".')


def _why_together(whole: _graph.Parts, part: _graph.Parts, rows: Array, outcomes: Sequence[str]) -> str:
    start, other = whole.model.initial_point(), part.model.initial_point()
    by_row = [name for name in start if np.shape(start[name]) != np.shape(other.get(name))]
    if by_row:
        return f"{by_row} have an entry for every row"
    rng = np.random.default_rng(0)
    point = {name: value + 0.1 * rng.normal(size=np.shape(value)) for name, value in start.items()}
    try:
        of_rows, rest = _densities(whole, outcomes, point)
        of_kept, rest_of_kept = _densities(part, outcomes, point)
    except Exception as error:  # of a user's model that does not accept fewer rows
        return f"there is no density without them ({type(error).__name__})"
    for name in outcomes:
        same = of_rows[name].shape[:1] == rows.shape and of_rows[name][rows].shape == of_kept[name].shape
        if not same or not np.allclose(of_rows[name][rows], of_kept[name], rtol=1e-6, atol=1e-9):
            return f"the density of {name!r} in one row depends on other rows"
    same = np.isclose(rest, rest_of_kept, rtol=1e-6, atol=1e-6)
    return "" if same else "another part of the density depends on the rows"


def _densities(
    parts: _graph.Parts, outcomes: Sequence[str], point: Mapping[str, Any]
) -> tuple[dict[str, Array], float]:
    """Log densities of outcomes by container, and the log density of all else."""
    through = {str(variable.name): rv for variable, rv in _graph.observed_through(parts).items()}
    compiled = parts.model.compile_logp(
        vars=[through[outcome] for outcome in outcomes], sum=False, mode=interpreted.STABLE_MODE
    )
    densities = {name: np.asarray(value) for name, value in zip(outcomes, compiled(point), strict=True)}
    total = float(parts.model.compile_logp(mode=interpreted.STABLE_MODE)(point))
    return densities, total - float(sum(np.sum(value) for value in densities.values()))
