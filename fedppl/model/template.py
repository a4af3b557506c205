"""From the user's builder to templates: models of clients, built, taken apart and compiled. Clients share templates."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pymc.logprob.abstract import _logprob
from pymc.logprob.transforms import Transform
from pytensor.graph.basic import Constant

from fedppl.model import checks, interpreted
from fedppl.model import graph as _graph
from fedppl.model import same as _same
from fedppl.model._public import Public
from fedppl.model.checks import containers, mismatch, require_arguments
from fedppl.model.compiled import Piece, inlined, mode, unpacking_kernel, without_notices
from fedppl.model.graph import SdsAndPartials, with_sds
from fedppl.model.same import Untold, graph_key, named, told
from fedppl.types import Array, DataError, DeclarationError, Variable


class Declared(NamedTuple):
    """The user's builder, the names of the free variables that all clients share, and the kind of clients it is of."""

    builder: Callable[..., Any]
    shared: tuple[str, ...]
    kind: str = ""


def built(builder: Callable[..., Any], client_id: str, arrays: Mapping[str, Any]) -> Any:
    """Call the builder on one client's data; its errors name the client."""
    require_arguments(client_id, builder, arrays)
    try:
        model = builder(**arrays)
        if isinstance(model, pm.Model):
            with_sds(model)
        return model
    except DeclarationError as error:  # the builder's own word on its settings
        raise DeclarationError(f"client {client_id!r}: {error}") from error
    except Exception as error:
        shapes = {name: np.shape(value) for name, value in arrays.items()}
        remedy = "Check this client's data against the builder's arguments."
        reals = [name for name, value in arrays.items() if np.asarray(value).dtype.kind == "f"]
        if isinstance(error, TypeError) and "integers" in str(error) and reals:
            remedy = f"Of reals there are {', '.join(map(repr, reals))}: give as integers what is an index."
        if "Size length is incompatible" in str(error):
            remedy = (
                "Outcomes have fewer axes than a parameter of their distribution: give outcomes with as many, (n, 1) "
                "beside an output (n, 1), or take a column of it, f[:, 0]."
            )
        if twice := [name for name in arrays if f"Variable name {name} already exists" in str(error)]:
            remedy = f"pm.Data({twice[0]!r}) has that name, as the data do: call the other variable something else."
        raise DataError(
            f"client {client_id!r}: the builder failed on data of shapes {shapes}: {type(error).__name__}: "
            f"{str(error).rstrip('.')}. {remedy}"
        ) from error


def parts_of(declared: Declared, client_id: str, arrays: Mapping[str, Any]) -> _graph.Parts:
    """Build a client's model and sort it; its containers have to be named like the data."""
    model = built(declared.builder, client_id, arrays)
    try:
        parts = _graph.dissect(model, declared.shared)
    except DeclarationError as error:
        raise DeclarationError(f"client {client_id!r}: {error}") from None
    names = {variable.name for variable in parts.data}
    if names and names != set(arrays):
        extra, absent = sorted(set(arrays) - names), sorted(names - set(arrays))
        raise DataError(
            f"client {client_id!r}: data keys {sorted(arrays)} do not match the model's pm.Data containers "
            f"{sorted(names)}"
            + (f"; {extra} match no container" if extra else "")
            + (f"; {absent} have no data" if absent else "")
            + ". Name each container like the builder's argument it holds."
        )
    for container in parts.data:
        _require_as_given(client_id, container, np.asarray(arrays[container.name]))
    return parts


def _require_as_given(client_id: str, container: Any, given: Array) -> None:
    """A client's data are put into the containers, whatever the builder put there: it may not be something else."""
    held = np.asarray(container.get_value())
    if held.shape == given.shape and np.allclose(held, given, rtol=1e-6, atol=0.0):
        return
    name = container.name
    raise DataError(
        f"client {client_id!r}: the builder puts other values into pm.Data({name!r}) than the data {name!r} have, and "
        f"those would be lost. Hold the data as they are, {name} = pm.Data({name!r}, {name}), and compute from that, "
        "or change the data before the fit."
    )


def template_of(declared: Declared, client_id: str, arrays: Mapping[str, Any]) -> Template:
    """Build a client's model alone."""
    parts = parts_of(declared, client_id, arrays)
    return opened(client_id, arrays, parts, _graph.open_lengths(parts))


def opened(
    client_id: str, arrays: Mapping[str, Any], parts: _graph.Parts, lengths: Mapping[str, int | None]
) -> Template:
    """Template of a model in which these lengths are a client's own."""
    parts = parts._replace(open=lengths)
    made = made_of(parts)
    start = make_once(made, "start", lambda: _graph.initial_values(parts))
    held = containers(client_id, parts, arrays)
    try:
        initial = start(*held, *_graph.alone(parts))
    except NotImplementedError as error:  # of an initial value that would be a draw
        why = str(error).strip().partition("\n")[0]
        raise DeclarationError(
            f"client {client_id!r}: a variable has no starting point ({why}). Declare a prior that can be drawn from, "
            "in init_dist= for example, or give initval=."
        ) from error
    except (ValueError, TypeError, IndexError, AssertionError) as error:
        raise mismatch(client_id, arrays, error) from error
    shared, local = (_graph.variables(parts, initial, local=which) for which in (False, True))
    try:
        graph = make_once(made, ("graph", shared), lambda: _graph.site_graph(parts, shared, local))
    except NotImplementedError as error:
        why = str(error).strip().partition("\n")[0]
        raise DeclarationError(
            f"client {client_id!r}: PyMC has no log density of the model: {why} Give it one, such as "
            "pm.CustomDist(..., logp=function)."
        ) from error
    except ValueError as error:
        once = " Give each observed variable data of its own." if "More than one logprob" in str(error) else ""
        raise DeclarationError(
            f"client {client_id!r}: PyMC cannot put the model's log density together: {error}.{once}"
        ) from error
    return Template(parts, (shared, local), graph, start, (*held, *_graph.alone(parts), *shapes(graph, local)), made)


def lengths_of(
    declared: Declared, client_id: str, template: Template, arrays: Mapping[str, Any]
) -> tuple[Template, tuple[Any, ...]]:
    """The template in which this client's lengths are open, and those lengths that no container has."""
    if template.may_hold_rows(arrays):
        model = parts_of(declared, client_id, arrays).model
        lengths = _graph.open_lengths(template.parts, model)
        if lengths != template.parts.open:
            known = template.functions.setdefault("opened", {})
            key = tuple(lengths.items())
            if key not in known:
                built_on = {v.name: v.get_value() for v in template.parts.data}
                known[key] = opened(client_id, built_on, template.parts, lengths)
                known[key].functions["public"] = template.public
            template = known[key]
        return template, _graph.alone(template.parts, model)
    if None not in template.parts.open.values():
        return template, ()
    return template, _graph.alone(template.parts, parts_of(declared, client_id, arrays).model)


def shapes(graph: _graph.SiteGraph, local: tuple[Variable, ...]) -> tuple[Array, ...]:
    """Shapes of the local variables that the graph takes for inputs."""
    return tuple(np.asarray(local[i].shape, dtype=np.int64) for i in graph.free_shapes)


# A build of the model and what is compiled from it, the site factor ---------------------------------------------------

T = TypeVar("T")
_KERNELS_KEPT = 64
_Kernel = tuple[str | None, Callable[..., Any]]  # with the name of the graph that it was compiled for
_kernels: list[tuple[_graph.SiteGraph, _Kernel]] = []  # the last ones compiled
_in_use: weakref.WeakKeyDictionary[_graph.SiteGraph, _Kernel] = weakref.WeakKeyDictionary()
_compiled = 0
_lock = threading.Lock()


def compilations() -> int:
    """How many times this process compiled a client's log density. Tests hold it constant over refits."""
    return _compiled


def make_once(made: dict[Any, Any], name: Any, make: Callable[[], T]) -> T:
    """What stands under a name, made at first use."""
    if name not in made:
        made[name] = make()
    found: T = made[name]
    return found


@dataclass(frozen=True, eq=False)
class Template:
    """One build of the model and its compiled site factor; its clients differ from it only in their data."""

    parts: _graph.Parts
    variables: tuple[tuple[Variable, ...], tuple[Variable, ...]]  # shared and local ones of the client built for
    graph: _graph.SiteGraph
    start: Callable[..., list[Array]]
    example: tuple[Any, ...]  # inputs of the graph at the client built for
    # What follows from the declaration alone, the same of all builds of one content; what follows from a build.
    made: dict[Any, Any] = field(default_factory=dict)
    functions: dict[Any, Any] = field(default_factory=dict)

    def once(self, name: Any, make: Callable[[], T]) -> T:
        """What is made at first use, for all clients."""
        return make_once(self.functions, name, make)

    def of_declaration(self, name: Any, make: Callable[[], T]) -> T:
        """What is made at first use, for all builds that declare the same: it may hold nothing of a client's data."""
        return make_once(self.made, (name, self.variables[0]), make)

    @property
    def kernel(self) -> Callable[..., Any]:
        """Compiled at first use, so that what can be refused is refused before."""
        return self.of_declaration("kernel", lambda: kernel_of(self.graph))

    @property
    def density(self) -> Callable[..., Any]:
        """The log density as a function of x and the arrays themselves, interpreted, for the few calls of checks."""
        arguments = [self.graph.x, *self.graph.inputs]
        return self.of_declaration("density", lambda: interpreted.python_function(arguments, self.graph.logp))

    def same_density(self, other: Template) -> bool:
        """Whether two templates have one log density: by their graphs, or where both can be computed, by values."""
        if _same.same_graph(self.graph, other.graph):
            return True
        if not _same.same_types(self.graph, other.graph):
            return False
        if not _same.same_constants([self.graph.logp], [other.graph.logp]):
            return False
        sizes = [sum(v.size for group in template.variables for v in group) for template in (self, other)]
        examples = list(zip(sizes, (self.example, other.example), strict=True))
        return _same.same_values(self.density, other.density, examples)

    def check_indices(self, x: Array, inputs: tuple[Any, ...]) -> float | None:
        """Raise IndexError where data index out of bounds: compiled code would read foreign memory instead.

        The log density there, where it had to be computed for that.
        """
        return float(self.density(x, *inputs)) if self.indexes_by_data else None

    @property
    def indexes_by_data(self) -> bool:
        """Whether what is compiled may read where nothing is."""
        return self.of_declaration("by data", lambda: _graph.indexes_by_data(self.graph))

    @property
    def indices(self) -> checks.Indices:
        """What the model takes from data for an index."""
        return self.once("indices", lambda: checks.site_indices(self.graph, self.parts))

    @property
    def public(self) -> Public:
        """What of this model may leave a client."""
        found: Public = self.functions["public"]
        return found

    def may_hold_rows(self, arrays: Mapping[str, Any]) -> bool:
        """Whether the length of a dim may be a client's number of rows: of one build alone that cannot be told."""
        if "compared" in self.functions:
            return False
        fixed = {length for name, length in _graph.lengths(self.parts.model).items() if name not in self.parts.open}
        rows = {v.name: len(v.get_value()) for v in self.parts.data if v.type.ndim}
        return any(rows[name] in fixed and rows[name] != len(np.atleast_1d(arrays[name])) for name in rows)


def _compile(graph: _graph.SiteGraph) -> Callable[..., Any]:
    """Compile x, packed data -> [log density, gradient] in NUMBA mode, callable from other jitted loops."""
    global _compiled
    _compiled += 1
    # Of pieces of x in place of x itself: what cuts it up, and puts a gradient together, takes as long to compile as
    # many a model, and is written out in few lines where the data are unpacked.
    variables = [piece.variable for piece in graph.pieces]
    slopes = pt.grad(graph.of_pieces, variables, disconnected_inputs="ignore", return_disconnected="none")
    outputs = [graph.of_pieces, *(slope for slope in slopes if slope is not None)]
    inputs = [*variables, *graph.inputs]
    shapes = [p.shape if isinstance(p.shape, tuple) else graph.inputs.index(p.shape) for p in graph.pieces]
    pieces = [
        Piece(variable.type.ndim, shape, slope is not None)
        for variable, shape, slope in zip(variables, shapes, slopes, strict=True)
    ]
    types = [(v.type.dtype, v.type.ndim) for v in graph.inputs]

    def compiled() -> tuple[Callable[..., Any], bool]:
        # A parameter outside its domain is a point of zero density, not an exception in the middle of a search.
        ours = mode().including("local_check_parameter_to_ninf_switch")
        return inlined(pytensor.function(inputs, outputs, mode=ours, on_unused_input="ignore").vm.jit_fn)

    with without_notices():
        return unpacking_kernel(compiled, pieces, types, graph_key(inputs, outputs))


def kernel_of(graph: _graph.SiteGraph) -> Callable[..., Any]:
    """Find or compile: a builder made anew (a closure, a factory) does not compile again.

    Only the site factor is looked up. Names, priors, transforms and deterministics are of each build its own.
    """
    # Graphs that compute the same, written differently (one term twice, or once and read twice), may give other last
    # digits. Names tell them apart, so that a model gives the same bits whatever the process compiled before.
    key = graph_key([graph.x, *graph.inputs], [graph.logp])
    with _lock:
        known = [*_in_use.items(), *_kernels]
        found = next((k for other, k in known if k[0] == key and _same.same_graph(other, graph)), None)
        if found is None:
            found = (key, _compile(graph))
            _kernels.append((graph, found))
            del _kernels[:-_KERNELS_KEPT]
        _in_use[graph] = found
        return found[1]


# What was made of a declaration, kept for other builds of the same: by what they declare, not by who declares it ------

# A builder is called in every fit, since no look at code tells what it reads: what it gives is looked up, and only the
# graphs and functions that follow from that alone are not made again. They hold no client's data, which are inputs, but
# for what a builder makes constants of beside its containers.

_KEPT = 32  # declarations, of 1.6 MB each for two priors and a likelihood; a study compares few dozen models


def made_of(parts: _graph.Parts) -> dict[Any, Any]:
    """What was made of this content before, to which more may be added; of what cannot be told, nothing."""
    content = content_of(parts)
    return {} if content is None else _made(content)


@functools.lru_cache(maxsize=_KEPT)  # it lets threads take turns
def _made(content: tuple[Any, ...]) -> dict[Any, Any]:
    return {}


def content_of(parts: _graph.Parts) -> tuple[Any, ...] | None:
    """All that a build declares but for the values in its containers; None where something cannot be told.

    Not told are data that are constants of their own in the graph, code of the user's (operations, transforms, log
    densities), and starting values that are computed.
    """
    model = parts.model
    outputs = _same.declared_outputs(model)
    if not parts.data or any(_same.has_own_gradient(op) for op in _same.operations(outputs)):
        return None
    lengths = _graph.lengths(model)
    inputs = [*parts.data, *_same.streams(outputs), *(model.dim_lengths[dim] for dim in lengths)]
    values = [model.rvs_to_values[rv].type for rv in model.basic_RVs]
    try:
        held = (
            graph_key(inputs, outputs),
            told([[value.dtype, list(value.shape)] for value in values]),
            tuple(_transform(model.rvs_to_transforms[rv]) for rv in model.basic_RVs),
            told([model.rvs_to_initial_values[rv] for rv in model.free_RVs]),
        )
    except Untold:
        return None
    if held[0] is None:
        return None
    fixed = {dim: length for dim, length in lengths.items() if dim not in parts.open}
    beside = [_same.names(parts), dict(model.named_vars_to_dims), list(lengths), fixed, dict(parts.open)]
    # A class of the user's may have given one of PyMC's distributions another density.
    densities = tuple(_logprob.dispatch(type(rv.owner.op)) for rv in model.basic_RVs)
    return (*held, densities, repr([*beside, [v.name for v in parts.prior_terms], bool(model.check_bounds)]))


def _transform(value: Any) -> Any:
    """A transform, or what it holds, as something that is equal where it computes the same."""
    if isinstance(value, list | tuple):
        return tuple(map(_transform, value))
    if isinstance(value, SdsAndPartials):
        return value.name, len(value.own_sd)
    if isinstance(value, Transform):
        return named(type(value)), tuple((name, _transform(one)) for name, one in sorted(vars(value).items()))
    if isinstance(value, Constant):
        return told([value.type, value.data])
    if isinstance(value, Mapping):
        return tuple((name, _transform(one)) for name, one in value.items())
    if isinstance(
        value, FunctionType
    ):  # bounds of an interval, written inside of PyMC: its code, and what it closes over
        module = sys.modules.get(value.__module__)
        if not f"{value.__module__}.".startswith(f"{pm.__name__}.") or value.__globals__ is not vars(module):
            raise Untold
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__code__, _transform([*cells, value.__defaults__, value.__kwdefaults__])
    return told(value)


# Which containers are outcomes, and whether rows without one may be left out: the model is asked, not the user --------


def outcomes_of(declared: Declared, client_id: str, arrays: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the containers that a client's model declares as observed, as they are."""
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
    """Refuse to leave out rows of a model in which the others would then have another density.

    `filled` are arrays of all rows, and `kept` of those that stay, (n,) bool in `rows`; `outcomes` are observed by row.
    """
    whole, part = (parts_of(declared, client_id, arrays) for arrays in (filled, kept))
    start, other = whole.model.initial_point(), part.model.initial_point()
    by_row = [name for name in start if np.shape(start[name]) != np.shape(other.get(name))]
    if by_row:
        raise _refused(client_id, f"{by_row} have an entry for every row")
    rng = np.random.default_rng(0)
    point = {name: value + 0.1 * rng.normal(size=np.shape(value)) for name, value in start.items()}
    try:
        of_rows, rest = _densities(whole, outcomes, point)
        of_kept, rest_of_kept = _densities(part, outcomes, point)
    except Exception as error:  # of somebody's own model, whose shapes do not go with fewer rows
        raise _refused(client_id, f"there is no density without them ({type(error).__name__})") from error
    for name in outcomes:
        same = of_rows[name].shape[:1] == rows.shape and of_rows[name][rows].shape == of_kept[name].shape
        if not same or not np.allclose(of_rows[name][rows], of_kept[name], rtol=1e-6, atol=1e-9):
            raise _refused(client_id, f"the density of {name!r} in one row depends on other rows")
    if not np.isclose(rest, rest_of_kept, rtol=1e-6, atol=1e-6):
        raise _refused(client_id, "another part of the density depends on the rows")


def _densities(
    parts: _graph.Parts, outcomes: Sequence[str], point: Mapping[str, Any]
) -> tuple[dict[str, Array], float]:
    """Log densities of outcomes by container, and of all else."""
    through = {str(variable.name): rv for variable, rv in _graph.observed_through(parts).items()}
    compiled = parts.model.compile_logp(
        vars=[through[one] for one in outcomes], sum=False, mode=interpreted.PYTHON_MODE
    )
    found = {name: np.asarray(value) for name, value in zip(outcomes, compiled(point), strict=True)}
    total = float(parts.model.compile_logp(mode=interpreted.PYTHON_MODE)(point))
    return found, total - float(sum(np.sum(value) for value in found.values()))


def _refused(client_id: str, why: str) -> DataError:
    return DataError(
        f'client {client_id!r}: missing="drop_outcomes" leaves out rows whose outcome is missing, which is exact where '
        f"rows stand for themselves, and in this model {why}. Impute outcomes before the fit, declare them as "
        'variables of the model, or say missing="drop" where that is meant.'
    )
