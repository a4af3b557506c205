"""A build of the model and what is compiled from it, the site factor. Clients share templates."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytensor
import pytensor.tensor as pt

from fedppl.model import arrays as _indices
from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model import same as _same
from fedppl.model._public import Public
from fedppl.model.graph_key import graph_key
from fedppl.model.numba_mode import inlined, mode, without_notices
from fedppl.model.pack import Piece, unpacking_kernel
from fedppl.types import Array, Variable

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
    def indices(self) -> _indices.Indices:
        """What the model takes from data for an index."""
        return self.once("indices", lambda: _indices.site_indices(self.graph, self.parts))

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
