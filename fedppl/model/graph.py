"""From a PyMC model to graphs over one flat unconstrained vector x = (φ, θ). The only module that cuts graphs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.data import MinibatchIndexRV, MinibatchOp
from pymc.distributions.continuous import FlatRV, HalfFlatRV
from pymc.distributions.transforms import CholeskyCovPacked, _default_transform
from pymc.initial_point import make_initial_point_expression
from pymc.logprob.abstract import _logprob
from pymc.logprob.basic import transformed_conditional_logp
from pymc.logprob.transforms import Transform
from pymc.model.transform.conditioning import remove_value_transforms
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors, walk
from pytensor.scalar.basic import Cast
from pytensor.tensor.shape import Shape, Shape_i
from scipy.special import gammaln

from fedppl.model.interpreted import untraced
from fedppl.types import SDS_AND_PARTIALS, Array, DeclarationError, Variable


class Parts(NamedTuple):
    """A client's model, sorted into what is shared, what is local, and what is data."""

    model: Any
    shared: tuple[Any, ...]
    local: tuple[Any, ...]
    data: tuple[Any, ...]
    prior_terms: tuple[Any, ...]
    site_terms: tuple[Any, ...]
    # Dims whose length differs from client to client, with the place in `data` of a container of that length, if any
    open: Mapping[str, int | None] = MappingProxyType({})


class Piece(NamedTuple):
    """A variable in place of a part of the flat vector x."""

    variable: Any
    shape: tuple[int, ...] | Any  # or the input that has it


@dataclass(frozen=True, eq=False)
class SiteGraph:
    """log p(y, θ | φ) as a graph of x = (φ, θ), the data, and the shapes that depend on data."""

    x: Any
    inputs: tuple[Any, ...]
    logp: Any
    free_shapes: tuple[int, ...]  # positions in Parts.local whose shape is an input, the last ones
    pieces: tuple[Piece, ...]  # of x, in order
    of_pieces: Any  # the same log density as a graph of these


def _find_shared(model: Any, shared: Sequence[str]) -> tuple[Any, ...]:
    free = {rv.name: rv for rv in model.free_RVs}
    for name in shared:
        if name not in free:
            where = "in the model but is not a free random variable" if name in model.named_vars else "not in the model"
            close = difflib.get_close_matches(name, free, n=1)
            listed = f"{', '.join(map(repr, free))}.{f' Did you mean {close[0]!r}?' if close else ''}"
            raise DeclarationError(f"shared name {name!r} is {where}. Name only free random variables: {listed}")
    return tuple(free[name] for name in shared)


_OF_DRAWS = ("chain", "draw")  # dims of every posterior in ArviZ


def dissect(model: Any, shared: Sequence[str]) -> Parts:
    """Sort a model's variables and log-density terms; refuse models that cannot be federated."""
    if not isinstance(model, pm.Model):
        raise DeclarationError(f"the builder returned {type(model).__name__}, no pm.Model; end it with `return model`.")
    shared_rvs, data = _find_shared(model, shared), tuple(model.data_vars)
    local_rvs = tuple(rv for rv in model.free_RVs if rv not in shared_rvs)
    _require_names(model)
    for rv in model.free_RVs:
        _require_continuous(model, rv, shared, is_shared=rv in shared_rvs)
    _require_all_rows(model)
    for rv in shared_rvs:
        _require_shared_prior(rv, local_rvs, data, model.observed_RVs)
    prior_terms: list[Any] = list(shared_rvs)
    site_terms: list[Any] = [*local_rvs, *model.observed_RVs]
    for potential in model.potentials:
        private = not {*local_rvs, *data, *model.observed_RVs}.isdisjoint(ancestors([potential]))
        (site_terms if private else prior_terms).append(potential)
    if len(site_terms) == len(local_rvs):
        raise DeclarationError("the model has no observed variable and no potential of data; pass `observed=`.")
    return Parts(model, shared_rvs, local_rvs, data, tuple(prior_terms), tuple(site_terms))


def _require_names(model: Any) -> None:
    """Refuse variables and dims whose names a posterior's own dims have."""
    containers = {variable.name for variable in model.data_vars}
    for name in (*model.named_vars, *model.coords):
        if name in _OF_DRAWS and name not in containers:
            raise DeclarationError(f"{name!r} is in the model, and every posterior has dims of that name; rename it.")


def _require_continuous(model: Any, rv: Any, shared: Sequence[str], *, is_shared: bool) -> None:
    """Refuse discrete variables, except shared indicators, and angles."""
    name = rv.name
    if rv.type.dtype.startswith(("int", "uint", "bool")) and not (is_shared and _is_binary(rv)):
        what = f"{'shared' if is_shared else 'local'} variable {name!r} is discrete ({rv.type.dtype})"
        remedy = "Sum it out of the likelihood, as pm.Mixture does, or declare a continuous one."
        if _is_binary(rv):
            remedy += (
                f" {name!r} is not in shared={list(shared)}. Add {name!r} to shared= for algorithms of indicators."
            )
        raise DeclarationError(f"{what}, and has no gradient. {remedy}")
    if "CircularTransform" in [type(part).__name__ for part in parts_of_transform(model.rvs_to_transforms[rv])]:
        turn = "default_transform=pm.distributions.transforms.Interval(-np.pi, np.pi)"
        raise DeclarationError(f"{name!r} is an angle, with a periodic density; bound it to one turn by {turn}.")


def _require_all_rows(model: Any) -> None:
    """Refuse models that read some rows in place of all, and distributions without a density."""
    above = ancestors(declared(model))
    if any(isinstance(v.owner.op, MinibatchOp | MinibatchIndexRV) for v in above if v.owner is not None):
        raise DeclarationError("a client's model has all rows. Remove pm.Minibatch; algorithms have batch_size=.")
    for rv in model.basic_RVs:
        kinds = {kind.__name__ for kind in type(rv.owner.op).__mro__}
        if "MinibatchRandomVariable" in kinds:
            raise DeclarationError(f"{rv.name!r} has total_size=, and a client's model all rows. Remove total_size=.")
        if "SimulatorRV" in kinds:
            raise DeclarationError(f"{rv.name!r} is a pm.Simulator; declare a distribution that has a density.")


def _require_shared_prior(rv: Any, local_rvs: Sequence[Any], data: Sequence[Any], observed_rvs: Sequence[Any]) -> None:
    """Refuse a shared prior that depends on local variables, data or observed variables."""
    above = set(ancestors([rv])) - {rv}
    constant = "Use a constant that is the same at all clients"
    for kind, others in (("local variable", local_rvs), ("client data", data), ("observed variable", observed_rvs)):
        for other in others:
            if other in above:
                share = f"Share {other.name!r} too, or turn the arrow round"
                what = f"the prior of shared variable {rv.name!r} depends on {kind} {other.name!r}"
                raise DeclarationError(f"{what}. {share if others is local_rvs else constant}.")


def declared(model: Any) -> list[Any]:
    """Random variables and potentials of a model, and what is observed."""
    return [*model.basic_RVs, *model.potentials, *(model.rvs_to_values[rv] for rv in model.observed_RVs)]


def _is_binary(rv: Any) -> bool:
    return getattr(rv.owner.op, "name", "") == "bernoulli"


def lengths(model: Any) -> dict[str, int]:
    """Lengths of the dims with coords."""
    return {name: int(length.get_value()) for name, length in model.dim_lengths.items() if hasattr(length, "get_value")}


def _constants(model: Any) -> dict[Any, Any]:
    return {model.dim_lengths[name]: pt.constant(np.asarray(length)) for name, length in lengths(model).items()}


def inputs_for(parts: Parts) -> tuple[dict[Any, Any], tuple[Any, ...]]:
    """Replacements of containers and of lengths of dims; inputs are the data, then lengths that no container has."""
    inputs = tuple(pt.TensorType(v.type.dtype, shape=(None,) * v.type.ndim)(f"data_{v.name}") for v in parts.data)
    replace: dict[Any, Any] = dict(zip(parts.data, inputs, strict=True))
    replace.update(_constants(parts.model))
    alone = {name: pt.lscalar(f"length_{name}") for name, place in parts.open.items() if place is None}
    for name, place in parts.open.items():
        replace[parts.model.dim_lengths[name]] = alone[name] if place is None else inputs[place].shape[0]
    return replace, (*inputs, *alone.values())


def alone(parts: Parts, model: Any = None) -> tuple[Any, ...]:
    """Values of the open lengths that no container has, in the template's model or in a client's `model`."""
    sizes = lengths(parts.model if model is None else model)
    return tuple(np.asarray(sizes[name]) for name, place in parts.open.items() if place is None)


def open_lengths(parts: Parts, other: Any = None) -> dict[str, int | None]:
    """Dims whose length may differ between clients: rows of containers, or dims that differ in the `other` model."""
    model, sizes = parts.model, lengths(parts.model)
    shared = {dim for rv in parts.shared for dim in _dims(model, rv.name) or ()}
    rows: dict[str, int | None] = {}
    observed = {model.rvs_to_values[rv]: rv.name for rv in model.observed_RVs}
    for place, container in enumerate(parts.data):
        for name in (container.name, observed.get(container)):
            dims = _dims(model, name) if name and container.type.ndim else None
            if dims and sizes.get(dims[0]) == len(container.get_value()):
                rows.setdefault(dims[0], place)
    if other is not None:
        other_sizes, vectors = lengths(other), [v for v in parts.data if v.type.ndim]
        pairs = {v: (len(v.get_value()), len(other[v.name].get_value())) for v in vectors}
        for name in sizes.keys() & other_sizes.keys() - rows.keys():
            pair = sizes[name], other_sizes[name]
            if pair[0] != pair[1]:
                rows[name] = next((place for place, v in enumerate(parts.data) if pairs.get(v) == pair), None)
    return {name: place for name, place in sorted(rows.items()) if name in sizes and name not in shared}


@untraced()
def initial_graphs(parts: Parts) -> tuple[tuple[Any, ...], list[Any]]:
    """The data as inputs, and unconstrained initial values of shared, then local variables as graphs of them."""
    model = parts.model
    expressions = make_initial_point_expression(
        free_rvs=model.free_RVs,
        rvs_to_transforms=model.rvs_to_transforms,
        initval_strategies=model.rvs_to_initial_values,
        return_transformed=True,
    )
    by_rv = dict(zip(model.free_RVs, expressions, strict=True))
    replace, inputs = inputs_for(parts)
    wanted = [by_rv[rv] for rv in (*parts.shared, *parts.local)]
    # PyMC clones the graph with its shared variables: find the containers again by name.
    # A dim may have a container's name: the number of axes tells them apart, and of two scalars the container counts.
    known = {(v.name, v.type.ndim): value for v, value in reversed(replace.items())}
    above = {v: (v.name, v.type.ndim) for v in ancestors(wanted) if hasattr(v, "get_value") and hasattr(v.type, "ndim")}
    clones = {v: known[key] for v, key in above.items() if key in known}
    return inputs, clone_replace(wanted, clones)


def variables(parts: Parts, initial: Sequence[Array]) -> tuple[tuple[Variable, ...], tuple[Variable, ...]]:
    """Describe the shared and the local variables, given one client's initial values."""
    described = tuple(
        Variable(
            name=rv.name,
            shape=tuple(int(n) for n in np.shape(value)),
            transform=getattr(parts.model.rvs_to_transforms[rv], "name", "") or "",
            dims=_dims(parts.model, rv.name),
            binary=_is_binary(rv),
        )
        for rv, value in zip((*parts.shared, *parts.local), initial, strict=True)
    )
    return described[: len(parts.shared)], described[len(parts.shared) :]


def _dims(model: Any, name: str) -> tuple[str, ...] | None:
    dims = model.named_vars_to_dims.get(name)
    return tuple(dims) if dims is not None else None


def in_pieces(
    parts: Parts, x: Any, shared: Sequence[Variable]
) -> tuple[dict[Any, Piece], dict[Any, Any], dict[int, Any]]:
    """A piece and a part of x for each value variable; inputs for shapes of local variables that PyMC leaves open."""
    pieces: dict[Any, Piece] = {}
    replace: dict[Any, Any] = {}
    free: dict[int, Any] = {}
    begin: Any = 0
    for variable, rv in zip(shared, parts.shared, strict=True):
        value = parts.model.rvs_to_values[rv]
        piece = x[begin : begin + variable.size].reshape(variable.shape)
        if variable.binary:
            piece = pt.cast(piece, value.type.dtype)
        replace[value] = pt.specify_shape(piece, variable.shape) if variable.shape else piece
        piece_variable = pt.TensorType(value.type.dtype, shape=variable.shape)(f"piece_{variable.name}")
        pieces[value] = Piece(piece_variable, variable.shape)
        begin += variable.size
    for position, rv in enumerate(parts.local):
        value = parts.model.rvs_to_values[rv]
        piece_variable = pt.TensorType(value.type.dtype, shape=value.type.shape)(f"piece_{rv.name}")
        if None not in value.type.shape:
            shape: Any = tuple(value.type.shape)
            size: Any = int(np.prod(shape, dtype=np.int64))
        else:
            shape = free[position] = pt.lvector(f"shape_{rv.name}")
            size = pt.prod(shape)
        replace[value] = x[begin : begin + size].reshape(shape, ndim=value.type.ndim)
        pieces[value] = Piece(piece_variable, shape)
        begin = begin + size
    return pieces, replace, free


def _of_both(terms: Any, pieces: Mapping[Any, Piece], flat: Mapping[Any, Any], replace: Any) -> tuple[Any, Any]:
    """A log density as a graph of x, and as a graph of pieces of x."""
    (of_pieces,) = clone_replace([terms], {**replace, **{value: piece.variable for value, piece in pieces.items()}})
    (of_x,) = clone_replace([of_pieces], {piece.variable: flat[value] for value, piece in pieces.items()})
    return of_x, of_pieces


@untraced()
def site_graph(parts: Parts, shared: Sequence[Variable]) -> SiteGraph:
    """Graph of log p(y, θ | φ): every term except the shared prior, with the Jacobians of θ's transforms."""
    x = pt.vector("x")
    replace, inputs = inputs_for(parts)
    pieces, values, free = in_pieces(parts, x, shared)
    logp = _log_density(parts, parts.site_terms, parts.model.rvs_to_values)
    flat, of_pieces = _of_both(logp, pieces, values, replace)
    return SiteGraph(x, (*inputs, *free.values()), flat, tuple(free), tuple(pieces.values()), of_pieces)


def _log_density(parts: Parts, terms: Sequence[Any], of: Mapping[Any, Any]) -> Any:
    """The sum of log densities of terms, which PyMC derives together with those of all variables that `of` has."""
    model, potentials = parts.model, [term for term in terms if term in parts.model.potentials]
    variables = [term for term in terms if term not in potentials]
    derived = transformed_conditional_logp(
        variables, rvs_to_values=dict(of), rvs_to_transforms={rv: model.rvs_to_transforms[rv] for rv in of}
    )
    by_term = dict(zip([*variables, *potentials], [*derived, *model.replace_rvs_by_values(potentials)], strict=True))
    sums, constant = [pt.as_tensor(by_term[term]).sum() for term in terms], left_out(model, terms)
    logp = pt.add(*sums) if len(sums) > 1 else sums[0]
    return logp + constant if constant else logp


@untraced()
def prior_graph(parts: Parts, shared: Sequence[Variable]) -> SiteGraph:
    """Graph of the shared prior's log density on the unconstrained space, log p(φ)."""
    phi = pt.vector("phi")
    pieces, values, _ = in_pieces(parts._replace(local=()), phi, shared)
    logp = _log_density(parts, parts.prior_terms, {rv: parts.model.rvs_to_values[rv] for rv in parts.shared})
    flat, of_pieces = _of_both(logp, pieces, values, _constants(parts.model))
    return SiteGraph(phi, (), flat, (), tuple(pieces.values()), of_pieces)


def computed_from_shared(parts: Parts) -> tuple[Any, ...]:
    """Deterministics without a local variable, a container or an observed variable above them."""
    private = {*parts.local, *parts.data, *parts.model.observed_RVs}
    return tuple(v for v in parts.model.deterministics if private.isdisjoint(ancestors([v])))


@untraced()
def constrained_graph(
    parts: Parts, shared: Sequence[Variable], public: Sequence[str], *, only_shared: bool
) -> tuple[Any, tuple[Any, ...], tuple[str, ...], list[Any]]:
    """Graphs of constrained variables and deterministics; `public` ones are shared: (x, inputs, names, outputs)."""
    x = pt.vector("x")
    extra = [v for v in parts.model.deterministics if (v.name in public) == only_shared]
    if only_shared:
        parts = parts._replace(local=(), open={})
    replace, inputs = inputs_for(parts)
    _, values, free = in_pieces(parts, x, shared)
    wanted = [*(parts.shared if only_shared else parts.local), *extra]
    outputs = clone_replace(list(parts.model.replace_rvs_by_values(wanted)), {**replace, **values}) if wanted else []
    return x, (*inputs, *free.values()), tuple(v.name for v in wanted), outputs


@untraced()
def observed_graph(parts: Parts, shared: Sequence[Variable]) -> tuple[Any, tuple[Any, ...], list[Any]]:
    """Graphs of log densities of outcomes, not summed: (x, inputs, one output per observed variable)."""
    x = pt.vector("x")
    replace, inputs = inputs_for(parts)
    _, values, free = in_pieces(parts, x, shared)
    outputs = parts.model.logp(vars=parts.model.observed_RVs, sum=False)
    return x, (*inputs, *free.values()), clone_replace(outputs, {**replace, **values})


@untraced()
def observed_given_all(
    parts: Parts, of: Callable[[Any, list[Any]], list[Any]] = lambda model, rvs: model.logp(vars=rvs, sum=False)
) -> tuple[dict[Any, Any], tuple[Any, ...], list[Any]]:
    """The same of the free variables as they are declared: (their values, inputs, one output per observed variable).

    Values are mapped to variables of their draws, which may have any lengths. Outputs are log densities by row, or
    others `of` the model and its observed variables.
    """
    model = remove_value_transforms(parts.model)
    replace, inputs = inputs_for(parts._replace(model=model, data=tuple(model[v.name] for v in parts.data)))
    free, observed = ([model[rv.name] for rv in of] for of in (parts.model.free_RVs, parts.model.observed_RVs))
    outputs = clone_replace(of(model, observed), replace)
    values = [model.rvs_to_values[rv] for rv in free]
    shapes = [(None, *(1 if length == 1 else None for length in v.type.shape)) for v in values]
    draws = {v: pt.TensorType(v.type.dtype, shape=shape)() for v, shape in zip(values, shapes, strict=True)}
    return draws, inputs, outputs


def observed_through(parts: Parts) -> dict[Any, Any]:
    """Containers that are observed, as they are or cast, with their observed variables."""
    observed = {}
    for rv in parts.model.observed_RVs:
        value = parts.model.rvs_to_values[rv]
        while value.owner is not None and isinstance(getattr(value.owner.op, "scalar_op", None), Cast):
            value = value.owner.inputs[0]
        if value in parts.data:
            observed[value] = rv
    return observed


def values_read(outputs: Iterable[Any], known: Collection[Any] = ()) -> set[Any]:
    """Variables whose values (not only shapes) outputs are computed from, without looking behind `known` ones."""

    def read(variable: Any) -> Any:
        node = variable.owner
        return () if node is None or variable in known or isinstance(node.op, Shape | Shape_i) else node.inputs

    return set(walk(list(outputs), read))


def indexes_by_data(graph: SiteGraph) -> bool:
    """Whether an array is indexed by integers or masks among the data."""
    data = graph.inputs[: len(graph.inputs) - len(graph.free_shapes)]
    indices = {v for v in data if not v.type.dtype.startswith("float")}
    nodes = [v.owner for v in ancestors([graph.logp]) if v.owner is not None]
    taken = [node for node in nodes if "Subtensor" in type(node.op).__name__]
    return any(not indices.isdisjoint(ancestors(node.inputs[1:])) for node in taken)


# Whether priors integrate to one, as an evidence needs, and constants that PyMC leaves out ----------------------------

_WITHOUT_CONSTANT = {"CARRV", "ICARRV", "CustomDistRV"}  # the constant is left out, or unknown


def unnormalised(model: Any) -> list[str]:
    """Names of free variables whose density is not known to integrate to one."""
    return [rv.name for rv in model.free_RVs if not _is_density(model, rv)]


def left_out(model: Any, variables: Iterable[Any]) -> float:
    """Log of the factor by which PyMC's densities of these variables are too small.

    PyMC's density of K ordered independent values of one distribution is that of unordered ones, K! times too small.
    """
    shapes = [rv.type.shape for rv in variables if rv in model.free_RVs and _is_in_order(model, rv)]
    return sum(float(np.prod(rows) * gammaln(length + 1.0)) for *rows, length in shapes)


def _is_in_order(model: Any, rv: Any) -> bool:
    """Whether a variable is an ordered vector of known length whose orders are all equally probable."""
    if [type(part).__name__ for part in parts_of_transform(model.rvs_to_transforms[rv])] != ["Ordered"]:
        return False
    if None in rv.type.shape or not hasattr(rv.owner.op, "dist_params") or rv.owner.op.ndim_supp:
        return False
    return all(all(part.type.broadcastable) for part in rv.owner.op.dist_params(rv.owner))


def _is_density(model: Any, rv: Any) -> bool:
    above = [v.owner.op for v in ancestors([rv]) if v.owner is not None]
    if any(isinstance(op, FlatRV | HalfFlatRV) for op in above):
        return False
    op = rv.owner.op
    kinds = {kind.__name__ for kind in type(op).__mro__}
    if kinds & _WITHOUT_CONSTANT or ("CustomSymbolicDistRV" in kinds and type(op) in _logprob.registry):
        return False
    return _is_usual(model, rv) or _is_in_order(model, rv)


def _is_usual(model: Any, rv: Any) -> bool:
    """Whether the transform is the default one of the distribution; another one may truncate its support."""
    transform = model.rvs_to_transforms[rv]
    if transform is None or isinstance(transform, SdsAndPartials):
        return True
    try:
        default = _default_transform(rv.owner.op, rv)
    except NotImplementedError:
        return False
    if type(transform) is not type(default):
        return False
    # A user's bounds may be narrower than those of the distribution, whose transform reads them from its parameters.
    codes = [getattr(getattr(of, "args_fn", None), "__code__", None) for of in (transform, default)]
    return codes[0] is codes[1]


def parts_of_transform(transform: Any) -> list[Any]:
    """The transforms of a chain, or a single one."""
    return list(getattr(transform, "transform_list", [transform]))


# Coordinates of a covariance matrix whose density is bounded: sds, and partial correlations ---------------------------

_MOST_ROWS = 30  # masks of entries by entries of more rows are large


class SdsAndPartials(Transform):  # type: ignore[misc]  # PyMC has no types
    r"""Packed rows of a root of n rows to log s_k, in the places of its diagonal, and z_kj.

    .. math:: L_{kj} = s_k \tanh(z_{kj}) \prod_{i<j} \frac{1}{\cosh z_{ki}}, \qquad
              L_{kk} = s_k \prod_{i<k} \frac{1}{\cosh z_{ki}}

    PyMC's own coordinates for `pm.LKJCholeskyCov` are the entries of L, with logarithms on its diagonal. There a row is
    a point of space, an sd its distance from 0, and a density of sds that is not 0 at 0 has no bound in rows of three
    entries or more: a search for a mode ends there.
    """

    name = SDS_AND_PARTIALS

    def __init__(self, n: int) -> None:
        """Masks (p, p) of the rows and columns of p = n (n + 1) / 2 entries."""
        row, column = np.tril_indices(n)
        same = row[:, None] == row
        self.own_sd = (same & (row == column)).astype(float)
        self.own_row = same.astype(float)
        self.before = (same & (column[:, None] > column)).astype(float)
        self.behind = (same & (column[:, None] < column)).astype(float)

    def backward(self, value: Any, *inputs: Any) -> Any:
        """Entries of the root from coordinates."""
        log_scale = _times(self.own_sd, value) - _times(self.before, self._log_cosh(value))
        return pt.exp(log_scale) * pt.switch(self._is_partial(), pt.tanh(value), 1.0)

    def forward(self, value: Any, *inputs: Any) -> Any:
        """Coordinates from entries of the root."""
        is_partial, squares = self._is_partial(), value**2
        partial = pt.arcsinh(value / pt.sqrt(pt.switch(is_partial, _times(self.behind, squares), 1.0)))
        return pt.switch(is_partial, partial, 0.5 * pt.log(_times(self.own_row, squares)))

    def log_jac_det(self, value: Any, *inputs: Any) -> Any:
        """Log Jacobian determinant of the entries by the coordinates."""
        of_partials = -pt.sum(pt.constant(self.behind), axis=1) * self._log_cosh(value)
        of_sds = pt.sum(pt.constant(self.own_row), axis=1) * value
        return pt.sum(pt.switch(self._is_partial(), of_partials, of_sds), axis=-1)

    def _is_partial(self) -> Any:
        return pt.eq(pt.diagonal(pt.constant(self.own_sd)), 0.0)

    def _log_cosh(self, value: Any) -> Any:
        """0 in the places of sds."""
        return pt.switch(self._is_partial(), pt.softplus(2.0 * value) - value - np.log(2.0), 0.0)


def is_mask(array: Any) -> bool:
    """Whether an array is a mask of `SdsAndPartials`, which holds no data."""
    count = _rows(array.shape[-1]) if array.ndim == 2 else 0
    return count > 0 and any(np.array_equal(array, mask) for mask in vars(SdsAndPartials(count)).values())


def _rows(entries: int) -> int:
    """Number of rows of a packed root with so many entries; 0 where there is none."""
    count = round((np.sqrt(8 * entries + 1) - 1) / 2)
    return count if count * (count + 1) // 2 == entries and count <= _MOST_ROWS else 0


def _times(matrix: Any, vector: Any) -> Any:
    return pt.sum(matrix * vector[..., None, :], axis=-1)


def with_sds(model: Any) -> None:
    """Give roots of covariances, whose size is declared, these coordinates in place of PyMC's."""
    for rv in model.free_RVs:
        if type(model.rvs_to_transforms[rv]) is CholeskyCovPacked and (count := _rows(rv.type.shape[-1] or 0)):
            model.rvs_to_transforms[rv] = transform = SdsAndPartials(count)
            model.rvs_to_values[rv].name = f"{rv.name}_{transform.name}__"
