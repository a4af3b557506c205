"""One client's model: pure functions of flat unconstrained vectors, compiled once for clients of all sizes."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.distributions.custom import CustomDistRV, CustomSymbolicDistRV
from pymc.distributions.shape_utils import change_dist_size
from pymc.distributions.transforms import Ordered
from pymc.logprob.utils import ParameterValueError
from pytensor import scalar
from pytensor.graph.basic import Constant
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors, io_toposort, walk
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.math import Argmax
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.sort import ArgSortOp, SortOp

from fedppl import gaussian
from fedppl.contracts import SharedReader
from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.compiled import pack
from fedppl.model.graph import Parts, unnormalised
from fedppl.model.interpreted import quiet
from fedppl.model.same import graph_key
from fedppl.model.summaries import tells_summary
from fedppl.model.template import Declared, Template, built, make_once, parts_of
from fedppl.numerics.prior import SharedPrior
from fedppl.types import Array, DataError, DeclarationError, Layout, Variable, coordinate_labels

T = TypeVar("T")

_KINKS_SOUGHT = 3  # clients of one template


@dataclass(frozen=True, eq=False)
class ClientModel:
    """One client's log site factor log p(y_k, θ | φ), its gradient, and functions to read results."""

    client_id: str
    layout: Layout  # shared parameters φ, equal at all clients
    local: tuple[Variable, ...]  # θ_k, in the order of the flat vector
    packed: tuple[Any, Any, Any]  # the client's arrays: reals, integers, and where each array lies
    inputs: tuple[Any, ...]  # the same arrays, one by one
    prior: SharedPrior  # which is not part of the site factor
    initial: Array  # unconstrained starting value of θ, (d_k,)
    arrays: Mapping[str, Any]  # the client's data by name
    declared: Declared
    template: Template  # the compiled model, shared with other clients

    def __repr__(self) -> str:
        """One line, without the client's data."""
        shapes = ", ".join(f"{name}: {np.shape(array)}" for name, array in self.arrays.items())
        sizes = f"{self.shared_size} shared and {self.local_size} local coordinates"
        return f"ClientModel({self.client_id!r}, data {{{shapes}}}, {sizes})"

    @property
    def kind(self) -> str:
        """The kind of clients of its builder; empty where there is one."""
        return self.declared.kind

    @property
    def kernel(self) -> Callable[..., Any]:
        """Compiled x, packed data -> [log density, gradient], shared by all clients of one template."""
        return _no_kernel if self.layout.binary else self.template.kernel

    @property
    def value_kernel(self) -> Callable[..., Any]:
        """The same without the gradient: its first entry is the log density."""
        return _no_kernel if self.layout.binary else self.template.value_kernel

    @functools.cached_property
    def declaration(self) -> str:
        """Digest of all that the declaration's density computes, as `Policy.declarations` lists it.

        For a builder it covers the graphs of the densities with all constants, also data that a builder makes
        constants, but not data in containers or their numbers of rows; it is empty where an operation has no key. For a
        formula it covers the text, since the rest follows from that and from the agreement of the sites.
        """
        builder: Any = self.declared.builder
        parts, (shared, _) = self.template.parts, self.template.variables
        if is_written(builder):
            content: list[Any] = [sorted(builder.written.items())]
        else:
            site, prior = self.template.graph, _graph.prior_graph(parts, shared)
            graphs = [graph_key([graph.x, *graph.inputs], [graph.logp]) for graph in (site, prior)]
            if None in graphs:
                return ""
            named = [(tuple(variable), rv.name) for variable, rv in zip(shared, parts.shared, strict=True)]
            content = [self.kind, named, [v.name for v in parts.data], graphs]
        return hashlib.sha256(repr(content).encode()).hexdigest()[:32]

    @property
    def shared_size(self) -> int:
        """Number of shared coordinates, m."""
        return self.layout.size

    @property
    def local_size(self) -> int:
        """Number of local coordinates, d_k."""
        return len(self.initial)

    @property
    def local_labels(self) -> tuple[str, ...]:
        """One label per local coordinate."""
        return coordinate_labels(self.local)

    @functools.cached_property
    def kink(self) -> str | None:
        """What makes the log density kink or jump in θ or φ (the absolute value in a Laplace prior does), or None.

        It is looked for at the data of a template's first clients, and holds for all.
        """
        functions = self.template.functions
        if functions.get("kink") is None and functions.setdefault("kinks sought", 0) < _KINKS_SOUGHT:
            functions["kinks sought"] += 1
            functions["kink"] = find_kink(
                self.template.graph, self.inputs, self._value_and_gradient, lambda: points(self._parts, self._start)
            )
        kink: str | None = functions.get("kink")
        return kink

    @property
    def has_proper_prior(self) -> bool:
        """Whether the model's prior is known to integrate to one."""
        model = self.template.parts.model
        return not model.potentials and not unnormalised(model)

    @property
    def _start(self) -> Array:
        return np.concatenate([self.template.functions["shared start"], self.initial])

    @property
    def _parts(self) -> Parts:
        """A build on this client's data: the template's, where that was made from equal data in containers."""
        parts = self.template.parts
        values = [(v.get_value(borrow=True), self.arrays[v.name]) for v in parts.data if v.name in self.arrays]
        made_of_these = bool(values) and all(itertools.starmap(np.array_equal, values))
        return parts if made_of_these else parts_of(self.declared, self.client_id, self.arrays)

    def log_site(self, phi: Array, theta: Array) -> tuple[float, Array, Array]:
        """log p(y_k, θ | φ) and its gradients with respect to φ, (m,), and θ, (d_k,); NaN where φ has indicators."""
        given, sizes = (np.shape(phi), np.shape(theta)), ((self.shared_size,), (self.local_size,))
        if given != sizes:
            raise DeclarationError(f"phi of shape {given[0]} and theta of {given[1]}; pass {sizes[0]} and {sizes[1]}.")
        output = self._value_and_gradient(np.concatenate([phi, theta]))
        return float(output[0]), output[1 : 1 + self.shared_size], output[1 + self.shared_size :]

    def _value_and_gradient(self, x: Array) -> Array:
        if self.layout.binary:
            return np.concatenate([[self.template.density(x, *self.inputs)], np.full(len(x), np.nan)])
        return np.asarray(self.template.kernel(x, *self.packed))

    def log_density(self, phi: Array, theta: Array) -> float:
        """log p(y_k, θ | φ) alone, interpreted: slow to call, and nothing is compiled for it."""
        return float(self.template.density(np.concatenate([phi, theta]), *self.inputs))

    def trace(self) -> Array:
        """log p(y_k, θ | φ) near the start to six digits, to compare models. Empty where φ has indicators."""
        if self.layout.binary:
            return np.zeros(0)
        sd = gaussian.standard_deviations(self.layout.prior)
        aside = 0.1 * np.cos(np.arange(self.shared_size + self.local_size))
        aside[: self.shared_size] *= sd
        values = []
        for times in (1.0, -2.0):
            try:
                value = float(self.template.density(self._start + times * aside, *self.inputs))
            except ParameterValueError:
                value = -np.inf  # as compiled
            values.append(float(f"{value:.5e}"))
        return np.array(values)

    @property
    def rows(self) -> int:
        """Number of observations, n_k: the length of observed arrays, summed over different lengths."""
        return sum(_observed_lengths(self.template.parts, self.arrays))

    @property
    def brought(self) -> str:
        """Its number of rows, or "summary" for a client that gave a summary of them."""
        return "summary" if tells_summary(self.template.parts.model) else str(self.rows)

    def batch(self, rows: Any) -> tuple[Any, Any, Any]:
        """Packed data of some of the observations, for the kernel; `rows` may be empty."""
        packed: tuple[Any, Any, Any] = pack(_take(self, rows))
        return packed

    def batches(self, rows: Any) -> tuple[Any, Any, Any]:
        """Packed data of many batches, rows (T, b): reals, integers, and the places (T, w) of each batch's arrays."""
        steps, size = rows.shape
        reals, integers, where = self.batch(rows.ravel())
        wheres = np.tile(where, (steps, 1))
        place = 0
        for value, whole in zip(_take(self, np.arange(0)), self.inputs, strict=True):
            if np.ndim(value) and len(value) != len(whole):  # this array has a row per observation
                stride = size * int(np.prod(value.shape[1:], dtype=np.int64))
                wheres[:, place] = where[place] + stride * np.arange(steps)
                wheres[:, place + 1] = wheres[:, place] + stride
                wheres[:, place + 2] = size
            place += 2 + np.ndim(value)
        return reals, integers, wheres

    def constrain_shared(self, phi: Array) -> dict[str, Array]:
        """Shared variables and their deterministics on the constrained space from draws (S, m)."""
        return self._constrain(np.atleast_2d(phi), only_shared=True)

    def constrain(self, phi: Array, theta: Array) -> dict[str, Array]:
        """Local variables and deterministics on the constrained space from draws (S, m) and (S, d_k)."""
        return self._constrain(np.concatenate([np.atleast_2d(phi), np.atleast_2d(theta)], axis=1), only_shared=False)

    def _constrain(self, draws: Array, *, only_shared: bool) -> dict[str, Array]:
        template, shared, public = self.template, self.layout.variables, self.template.public.names

        def constrained() -> tuple[tuple[str, ...], Callable[..., list[Array]], int]:
            graphs = _graph.constrained_graph(template.parts, shared, public, only_shared=only_shared)
            x, inputs, names, outputs = graphs
            return names, interpreted.batched({x: pt.matrix()}, inputs, outputs), len(inputs)

        names, function, n_inputs = template.of_declaration(("constrain", only_shared, public), constrained)
        values = function(draws, *self.inputs[:n_inputs])
        return dict(zip(names, values, strict=True))

    def reader(self) -> SharedReader:
        """How draws of φ are read, without the local variables."""
        # Coords of a formula come from the agreement, and are equal at all clients.
        alike = is_written(self.declared.builder)
        dims, coords = dims_and_coords((self.template.parts if alike else self._parts).model)
        public = self.template.public
        names = {*self.declared.shared, *public.names}
        kept = {name: of for name, of in dims.items() if name in names}
        return SharedReader(self.constrain_shared, kept, {dim: coords[dim] for dim in public.labelled})

    def draw_prior(self, draws: int, random_seed: int) -> Array:
        """Draws of the declared shared prior on the unconstrained space, (S, m).

        There are fewer if a transform is defined for some draws only, as that of an ordered vector is.
        """
        parts = self.template.parts
        if any(term not in parts.shared for term in parts.prior_terms):
            raise DeclarationError("the shared prior has a pm.Potential, from which nothing can be drawn.")
        return unconstrained(parts, draws, random_seed)

    def view(self, read: Callable[[ClientModel], T]) -> T:
        """The result of a family's reader for this client's model, cached."""
        return make_once(self._views, read, lambda: read(self))

    @functools.cached_property
    def _views(self) -> dict[Any, Any]:
        return {}

    def pymc_model(self) -> Any:
        """Build this client's PyMC model anew, with its own data, coords and dims."""
        return built(self.declared.builder, self.client_id, self.arrays)


def reader_of(models: Iterable[ClientModel]) -> SharedReader:
    """How draws of φ are read, by the client whose model declares most deterministics of them."""
    return max(models, key=lambda model: len(model.template.public.names)).reader()


def _no_kernel(*arguments: Any) -> Any:
    """The kernel of a model with shared indicators, which has no gradient."""
    raise DeclarationError("a log density with 0/1 indicators has no gradient to follow.")


def dims_and_coords(pymc_model: Any) -> tuple[dict[str, tuple[str, ...] | None], dict[str, list[Any]]]:
    """Dims of every variable and coords of every dim of a PyMC model."""
    dims: dict[str, tuple[str, ...] | None] = {k: tuple(v) for k, v in pymc_model.named_vars_to_dims.items()}
    return dims, {name: list(values) for name, values in pymc_model.coords.items() if values is not None}


_WRITTEN = ("fedppl.formulas.declare", "Formula")


def is_written(builder: Any) -> bool:
    """Whether a builder is a formula, which has all data in containers."""
    return (type(builder).__module__, type(builder).__qualname__) == _WRITTEN


def _take(client: ClientModel, rows: Any) -> tuple[Any, ...]:
    """The kernel's inputs with some rows of all arrays that have a row per observation."""
    data = client.template.parts.data
    lengths = _observed_lengths(client.template.parts, client.arrays)
    values, free = client.inputs[: len(data)], client.inputs[len(data) :]
    if len(lengths) > 1 or not data or _has_local_per_row(client.template, values, lengths):
        rule = "need pm.Data containers, observed arrays of one length, and no local variable with an entry per row"
        what = f"client {client.client_id!r}: batches of observations of lengths {sorted(lengths)}"
        raise DataError(f"{what} {rule}; use batch_size=None.")
    (length,) = lengths
    return (*_rows_of(values, length, rows), *free)


def _rows_of(values: Sequence[Any], length: int, rows: Any) -> tuple[Any, ...]:
    return tuple(value[rows] if np.ndim(value) and len(value) == length else value for value in values)


def _has_local_per_row(template: Template, values: Sequence[Any], lengths: set[int]) -> bool:
    """Whether the shape of a local variable depends on the number of rows, by comparison with one row less."""
    free, (length, *_) = template.graph.free_shapes, (*lengths, 0)
    if not free or length < 2:
        return bool(free)

    def shapes_of(rows: int) -> list[Any]:
        return [np.shape(value) for value in template.start(*_rows_of(values, length, np.arange(rows)))]

    return template.once("local per row", lambda: shapes_of(length) != shapes_of(length - 1))


def _observed_lengths(parts: Parts, arrays: Mapping[str, Any]) -> set[int]:
    names = {parts.model.rvs_to_values[rv].name for rv in parts.model.observed_RVs} & set(arrays)
    if not names:  # observed through an expression: use the longest array
        return {max((len(value) for value in arrays.values() if np.ndim(value)), default=1)}
    return {len(arrays[name]) if np.ndim(arrays[name]) else 1 for name in names}


# Draws from the shared prior on the unconstrained space ---------------------------------------------------------------

EACH = 10  # draws per shared number (and ten more) that moments need


def unconstrained(parts: _graph.Parts, count: int, seed: int) -> Array:
    """Draws (S, m) of the shared variables, without a pm.Potential among their terms."""
    names, values = [rv.name for rv in parts.shared], []
    for rv in parts.shared:
        transform = parts.model.rvs_to_transforms[rv]
        is_read = any(rv in ancestors(other.owner.inputs) for other in parts.shared)
        in_order = isinstance(transform, Ordered) and not is_read and _has_like_entries(rv)
        drawn = pt.sort(rv, axis=-1) if in_order else rv
        values.append(rv if transform is None else transform.forward(drawn, *rv.owner.inputs))
    try:
        with quiet():
            draws = _at_once(values, parts.shared, count, seed)
            if draws is None:
                draws = pm.draw(values, draws=count, random_seed=seed, mode=interpreted.PYTHON_MODE)
    except NotImplementedError as error:  # a flat prior that a potential bounds, or a user's own distribution
        raise DeclarationError(f"priors of {names} cannot be drawn from ({error}); declare proper ones.") from error
    flat = np.concatenate([np.reshape(value, (count, -1)) for value in draws], axis=1)
    # An ordered vector whose entries are not exchangeable, or that others depend on, is drawn without its order; draws
    # that happen to be in order are draws of the prior.
    inside = flat[np.all(np.isfinite(flat), axis=1)]
    if len(inside) < min(count, EACH * (flat.shape[1] + 1)):
        what = f"transforms of {names} have only {len(inside)} of {count} draws of the prior in their domain"
        raise DeclarationError(f"{what}; give ordered vectors ordered means, or share increments.")
    return np.asarray(inside)


def _has_like_entries(rv: Any) -> bool:
    """Whether entries along the last axis are independent and identically distributed, so that sorting orders them."""
    op = rv.owner.op
    if not isinstance(op, RandomVariable) or op.ndim_supp or any(op.ndims_params):
        return False
    return all(
        not parameter.type.ndim
        or parameter.type.broadcastable[-1]
        or (isinstance(parameter, Constant) and np.all(parameter.data == parameter.data[..., :1]))
        for parameter in op.dist_params(rv.owner)
    )


def _at_once(values: list[Any], rvs: tuple[Any, ...], count: int, seed: int) -> list[Array] | None:
    """All draws in one call, ten times as fast; None for a user's own distribution, or one without a batch shape."""
    if any(isinstance(rv.owner.op, CustomDistRV | CustomSymbolicDistRV) for rv in rvs):
        return None
    batched_rvs: dict[Any, Any] = {}
    try:
        for rv in rvs:  # a dependent one gets its batch shape from its parents
            if {*rvs}.isdisjoint(ancestors(rv.owner.inputs)):
                batched_rvs[rv] = change_dist_size(rv, (count,), expand=True)
        drawn = pm.draw(vectorize_graph(values, batched_rvs), random_seed=seed, mode=interpreted.PYTHON_MODE)
    except (NotImplementedError, TypeError, ValueError):
        return None
    shapes = [(np.shape(draws)[:1], np.ndim(draws) - 1) for draws in drawn]
    return drawn if shapes == [((count,), value.type.ndim) for value in values] else None


# Kinks and steps of a log density, which a Gaussian approximation at a mode cannot show -------------------------------

# |u| is smooth where u keeps its sign, and a switch may join two forms of one smooth function. So the graph shows only
# where to look: at the arguments of absolute values, maxima, comparisons and roundings. Where one crosses zero between
# two points that the prior reaches, the density and its gradient are compared on both sides of the crossing.

_PRIOR_DRAWS = 48
_CROSSINGS = 3  # looked at for each place in the graph
_COMPARISONS = (scalar.LT, scalar.LE, scalar.GT, scalar.GE)
_LARGEST = (scalar.ScalarMaximum, scalar.ScalarMinimum)
_ROUNDINGS = (scalar.Floor, scalar.Ceil, scalar.Trunc, scalar.RoundHalfToEven, scalar.RoundHalfAwayFromZero)


class _Turn(NamedTuple):
    """A place where a density may kink: where `values` change sign (`by_sign`), or where they change."""

    name: str
    values: Any
    by_sign: bool


def find_kink(
    graph: _graph.SiteGraph, inputs: Sequence[Any], density: Callable[[Array], Array], reach: Callable[[], Array]
) -> str | None:
    """Name what makes the log density kink or jump in a parameter; None if nothing does.

    The graph is of log p(y, θ | φ) at x = (φ, θ), and `density` gives its value and gradient, (1 + d,). Crossings are
    sought between the points (P, d) of `reach`, nearest to the start first; `reach` is called only if needed.
    """
    turns = _turns(graph)
    if not turns:
        return None
    with np.errstate(all="ignore"):
        reached = reach()
        for turn in turns:
            function = interpreted.python_function([graph.x, *graph.inputs], turn.values)
            values = np.stack([np.ravel(function(x, *inputs)) for x in reached])
            found = []
            for element, before, after in _crossings(values, turn.by_sign):
                side = functools.partial(_side, function, inputs, element, turn.by_sign)
                found.append(_breaks(side, density, reached[before], reached[after]))
                if found[-1]:
                    return turn.name
                if found.count(False) == _CROSSINGS:
                    break
    return None


def _side(function: Callable[..., Any], inputs: Sequence[Any], element: int, by_sign: bool, x: Array) -> float:
    value = float(np.ravel(function(x, *inputs))[element])
    return float(np.sign(value)) if by_sign else value


def points(parts: _graph.Parts, start: Array) -> Array:
    """Points (P, d) around the start, and draws of the prior of all variables on the unconstrained space."""
    spread = np.repeat([0.01, 0.1, 1.0, 3.0], [6, 6, 12, 12])[:, None]
    around = start + spread * np.random.default_rng(0).normal(size=(36, len(start)))
    rvs = (*parts.shared, *parts.local)
    transforms = [parts.model.rvs_to_transforms[rv] for rv in rvs]
    values = [rv if t is None else t.forward(rv, *rv.owner.inputs) for rv, t in zip(rvs, transforms, strict=True)]
    try:
        drawn = pm.draw(values, draws=_PRIOR_DRAWS, random_seed=0, mode=interpreted.PYTHON_MODE)
    except (NotImplementedError, ValueError, ArithmeticError, np.linalg.LinAlgError):
        return around  # a flat prior, or one that fails at its own extremes
    far = np.concatenate([np.reshape(value, (_PRIOR_DRAWS, -1)) for value in drawn], axis=1)
    far = far[np.all(np.isfinite(far), axis=1)]
    # Draws stay within the bounds of a prior without a transform; mirrored at the start they cross them.
    free = np.concatenate([np.full(value[0].size, t is None) for value, t in zip(drawn, transforms, strict=True)])
    mirrored = np.where(free, start - 2 * (far - start), far)
    return np.vstack([around[:24], far, mirrored[::2]])


def _turns(graph: _graph.SiteGraph) -> list[_Turn]:
    """Places where the graph may kink in a parameter, without those in checks of a parameter's domain."""
    of_x = {graph.x}
    for node in io_toposort([graph.x, *graph.inputs], [graph.logp]):
        if not of_x.isdisjoint(node.inputs):
            of_x.update(node.outputs)

    def read(variable: Any) -> Any:
        node = variable.owner
        if variable not in of_x or node is None or isinstance(node.op, Shape | Shape_i):
            return ()
        return node.inputs[:1] if isinstance(node.op, CheckAndRaise) else node.inputs

    nodes = [variable.owner for variable in walk([graph.logp], read, bfs=False) if read(variable)]
    return [turn for node in nodes for turn in _turns_of(node)]


def _turns_of(node: Any) -> list[_Turn]:
    op, (first, *rest) = node.op, node.inputs
    of = getattr(op, "scalar_op", None)
    if isinstance(op, SortOp):
        return [_Turn("a sort", pt.argsort(first, axis=rest[0] if rest else op.axis), False)]
    if isinstance(op, Argmax | ArgSortOp):
        return [_Turn("the place of an extreme", node.outputs[0], False)]
    if isinstance(of, _LARGEST) and hasattr(op, "axis"):
        sign = 1 if isinstance(of, scalar.ScalarMaximum) else -1
        return [_Turn("a maximum or minimum", pt.argmax(sign * first, axis=op.axis), False)]
    if isinstance(of, scalar.Abs | scalar.Sign):
        return [_Turn("an absolute value or a sign", first, True)]
    if isinstance(of, _LARGEST):
        return [_Turn("a maximum or minimum", first - other, True) for other in rest]
    if isinstance(of, scalar.Clip):
        return [_Turn("a clip", first - bound, True) for bound in rest]
    if isinstance(of, _COMPARISONS):
        return [_Turn("a comparison or switch", first - rest[0], True)]
    if isinstance(of, _ROUNDINGS):
        return [_Turn("a rounding", node.outputs[0], False)]
    if isinstance(of, scalar.IntDiv | scalar.Mod):
        return [_Turn("a remainder", pt.floor(first / rest[0]), False)]
    if isinstance(of, scalar.Cast) and not node.outputs[0].type.dtype.startswith("float"):
        return [_Turn("a rounding", pt.floor(first), False)] if first.type.dtype.startswith("float") else []
    return []


def _crossings(values: Array, by_sign: bool) -> Any:
    """(element, one point, another): elements on two sides of a crossing, at the points nearest to the start."""
    sides = np.nan_to_num(np.sign(values) if by_sign else values, nan=0.0, posinf=0.0, neginf=0.0)
    if by_sign:  # zero is on no side: a positive number may underflow
        low, high = sides < 0, sides > 0
    else:
        low = sides == sides[0]
        high = ~low
    both = np.flatnonzero(np.any(low, axis=0) & np.any(high, axis=0))
    for element in np.random.default_rng(0).permutation(both)[: 3 * _CROSSINGS]:
        yield int(element), int(np.argmax(low[:, element])), int(np.argmax(high[:, element]))


def _breaks(
    side: Callable[[Array], float], density: Callable[[Array], Array], before: Array, after: Array
) -> bool | None:
    """Whether density or gradient jump where the side changes between two points; None where neither is finite."""
    first_side, low, high = side(before), 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if side(before + middle * (after - before)) == first_side else (low, middle)
    step = 1e-7

    def at(steps: float) -> Array:
        return density(before + (low + steps * step) * (after - before))

    left, right = at(-1), at(1)
    if not np.isfinite(left[0]) and not np.isfinite(right[0]):
        return None
    if np.isfinite(left[0]) != np.isfinite(right[0]):  # a jump, unless the density goes to zero there
        inside = -1 if np.isfinite(left[0]) else 1
        return bool(at(inside)[0] > at(inside * 1e4)[0] - 3.0)
    change_beside = np.maximum(np.abs(left - at(-3)), np.abs(at(3) - right))
    size = np.maximum(np.abs(left), np.abs(right))
    floor = 1e-8 * size + 1e-10 * np.max(size[np.isfinite(size)], initial=0.0)
    return bool(np.any(~(np.abs(right - left) <= 10 * change_beside + floor) & np.isfinite(change_beside)))
