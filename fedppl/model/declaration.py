"""One client's posterior, declared as a PyMC model and compiled once for every client.

`FederatedModel` is the declaration. `ClientModel` is what a local inference sees of it: pure functions of flat
unconstrained vectors, compiled once and shared by clients of every size.
"""

from __future__ import annotations

import functools
import importlib
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fedppl import gaussian
from fedppl.contracts import SharedReader
from fedppl.model import _graph, _public, _rows, _same
from fedppl.model._data import as_arrays, fits_integers, group_by_columns, needs_same_keys, one_type
from fedppl.model._enrolment import (
    builder_name,
    containers,
    ignored_data,
    mismatch,
    other_model,
    other_prior,
    private_prior,
    require_arguments,
    require_same_layout,
    require_same_variables,
    require_start,
)
from fedppl.model._kinks import find_kink, points
from fedppl.model._pack import pack
from fedppl.model._reach import ignores_data
from fedppl.model._template import Template, compilations, shared_layout
from fedppl.numerics.prior import SharedPrior
from fedppl.types import Array, DataError, DeclarationError, Layout, Variable, coordinate_labels

if TYPE_CHECKING:
    from fedppl.nn.view import NetworkClient

__all__ = ["ClientModel", "FederatedModel", "compilations", "dims_and_coords"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_KINKS_SOUGHT = 3  # clients of one template


@dataclass(frozen=True, eq=False)
class ClientModel:
    """One client's log site factor log p(y_k, θ | φ), its gradient, and what is needed to read results.

    Attributes
    ----------
    client_id
        Logical id.
    layout
        Shared parameters φ, equal at all clients.
    local
        Local variables θ_k, in the order of the flat vector.
    kernel
        Jitted function ``kernel(x, *data) -> [log density, gradient]`` with x = (φ, θ).
    data
        The client's arrays, packed: reals, integers, and where each array lies.
    inputs
        The same arrays, one by one.
    prior
        The shared prior, which is *not* part of the site factor.
    initial
        Unconstrained starting value of θ, (d_k,).
    arrays
        The client's data by name.
    declaration
        The FederatedModel this came from.
    """

    client_id: str
    layout: Layout
    local: tuple[Variable, ...]
    data: tuple[Any, Any, Any]
    inputs: tuple[Any, ...]
    prior: SharedPrior
    initial: Array
    arrays: Mapping[str, Any]
    declaration: FederatedModel
    template: Template

    def __repr__(self) -> str:
        """One line, without the client's data."""
        shapes = ", ".join(f"{name}: {np.shape(array)}" for name, array in self.arrays.items())
        return (
            f"ClientModel({self.client_id!r}, data {{{shapes}}}, {self.shared_size} shared and {self.local_size} local "
            "coordinates)"
        )

    @property
    def kernel(self) -> Callable[..., Any]:
        """Compiled x, packed data -> [log density, gradient], shared by all clients of one template."""
        return _no_kernel if self.layout.binary else self.template.kernel

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

        Looked for with the data of a template's first clients only: what one of them has, all have.
        """
        functions = self.template.functions
        if functions.get("kink") is None and functions.setdefault("kinks sought", 0) < _KINKS_SOUGHT:
            functions["kinks sought"] += 1
            functions["kink"] = find_kink(self.template.graph, self.inputs, self._value_and_gradient, self._reach)
        found: str | None = functions.get("kink")
        return found

    @property
    def has_kink(self) -> bool:
        """Whether the log density has a kink or jump in θ or φ."""
        return self.kink is not None

    def _value_and_gradient(self, x: Array) -> Array:
        value, by_phi, by_theta = self.log_site(x[: self.shared_size], x[self.shared_size :])
        return np.concatenate([[value], by_phi, by_theta])

    def _reach(self) -> Array:
        start = np.concatenate([self.template.functions["shared start"], self.initial])
        return points(self.declaration._parts(self.client_id, self.arrays), start)

    def log_site(self, phi: Array, theta: Array) -> tuple[float, Array, Array]:
        """log p(y_k, θ | φ) and its gradients with respect to φ, (m,), and θ, (d_k,); NaN where φ has indicators."""
        if self.layout.binary:
            nan = np.full(self.shared_size + self.local_size, np.nan)
            return self.log_density(phi, theta), nan[: self.shared_size], nan[self.shared_size :]
        output = self.kernel(np.concatenate([phi, theta]), *self.data)
        return float(output[0]), output[1 : 1 + self.shared_size], output[1 + self.shared_size :]

    def log_density(self, phi: Array, theta: Array) -> float:
        """log p(y_k, θ | φ) alone, interpreted: slow to call, and nothing is compiled for it."""
        return float(self.template.density(np.concatenate([phi, theta]), *self.inputs))

    def trace(self) -> Array:
        """log p(y_k, θ | φ) beside the start, to six digits: another model has others. Empty where it costs much."""
        if self.layout.binary or self.template.has_own_gradients:
            return np.zeros(0)
        sd = gaussian.standard_deviations(self.layout.prior)
        aside = 0.1 * np.cos(np.arange(self.shared_size + self.local_size))
        aside[: self.shared_size] *= sd
        start = np.concatenate([self.template.functions["shared start"], self.initial])
        values = [self._value_and_gradient(start + times * aside)[0] for times in (1.0, -2.0)]
        return np.array([float(f"{value:.5e}") for value in values])

    @property
    def rows(self) -> int:
        """Number of observations, n_k: the length of the arrays that are observed."""
        return _rows.count(self.template.parts, self.arrays)

    def batch(self, rows: Any) -> tuple[Any, Any, Any]:
        """Packed data of some of the observations, for the kernel; none at all where `rows` is empty."""
        packed: tuple[Any, Any, Any] = pack(_rows.take(self, rows))
        return packed

    def batches(self, rows: Any) -> tuple[Any, Any, Any]:
        """Packed data of many batches of observations at once, rows (T, b): T places instead of one."""
        return _rows.batches(self, rows)

    def with_data(self, client_id: str, **arrays: Any) -> ClientModel:
        """Return another client's model: same compiled functions, other data."""
        if self.template.functions.get("own"):  # data stand in the graph: nothing can be exchanged
            return self.declaration.enrol({client_id: arrays})[client_id]
        checked = as_arrays(client_id, arrays)
        needs_same_keys({f"{self.client_id} as enrolled": self.arrays, client_id: checked})
        client = self.declaration._client(client_id, self.template, checked, like=self)
        require_same_layout(self, client)
        return client

    def constrain_shared(self, phi: Array) -> dict[str, Array]:
        """Shared variables and their deterministics on the constrained space from draws (S, m)."""
        return self._constrain(np.atleast_2d(phi), only_shared=True)

    def constrain(self, phi: Array, theta: Array) -> dict[str, Array]:
        """Local variables, and deterministics that stay here, on the constrained space from draws (S, m), (S, d_k)."""
        return self._constrain(np.concatenate([np.atleast_2d(phi), np.atleast_2d(theta)], axis=1), only_shared=False)

    def _constrain(self, draws: Array, *, only_shared: bool) -> dict[str, Array]:
        key = f"constrain {only_shared}"
        functions = self.template.functions
        if key not in functions:
            x, inputs, names, outputs = _graph.constrained_graph(
                self.template.parts,
                self.layout.variables,
                self.local,
                self.template.public.names,
                only_shared=only_shared,
            )
            functions[key] = names, _graph.batched(x, inputs, outputs), len(inputs)
        names, function, n_inputs = functions[key]
        values = function(draws, *self.inputs[:n_inputs])
        return dict(zip(names, values, strict=True))

    def reader(self) -> SharedReader:
        """How draws of φ are read; nothing of the local variables comes along."""
        dims, coords = dims_and_coords(self.pymc_model())
        public = self.template.public
        names = {*self.declaration.shared, *public.names}
        kept = {name: of for name, of in dims.items() if name in names}
        return SharedReader(self.constrain_shared, kept, {dim: coords[dim] for dim in public.labelled})

    def view(self, read: Callable[[ClientModel], T]) -> T:
        """What a family's reader makes of this client's model: read once, and kept."""
        if read not in self._views:
            self._views[read] = read(self)
        found: T = self._views[read]
        return found

    @functools.cached_property
    def _views(self) -> dict[Any, Any]:
        return {}

    @functools.cached_property
    def network(self) -> NetworkClient:
        """The client's network and rows in torch, or DeclarationError where the model has none."""
        try:
            client = importlib.import_module("fedppl.nn.view")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "torch":
                raise
            raise ModuleNotFoundError(
                "networks need torch, which is not installed: pip install 'fedppl[torch]'", name="torch"
            ) from error
        found: NetworkClient = client.network_client(self)
        return found

    def pymc_model(self) -> Any:
        """Build this client's PyMC model anew, with its own data, coords and dims."""
        return self.declaration.build(self.client_id, self.arrays)


@dataclass(frozen=True, eq=False)
class FederatedModel:
    r"""One client's posterior, declared once; the same for all clients.

    .. math:: p(\phi) \prod_k \int p(y_k, \theta_k \mid \phi)\, d\theta_k

    Parameters
    ----------
    builder
        Function from one client's data, as keyword arguments, to a ``pm.Model``. Put the data into ``pm.Data``
        containers named like the keywords: then one compiled function serves clients of every size.
    shared
        Names of the free random variables that all clients share, φ. Every other free variable is local, θ_k.

    Raises
    ------
    DeclarationError
        When clients enrol: a shared name that is not a free variable, a discrete variable, a shared prior
        that depends on local variables or on data, data keys without a container, differing layouts.

    Examples
    --------
    >>> import pymc as pm, fedppl
    >>> def clinic(y):
    ...     with pm.Model() as model:
    ...         y = pm.Data("y", y)
    ...         mu = pm.Normal("mu", 0, 10)
    ...         theta = pm.Normal("theta", mu, 1)
    ...         pm.Normal("obs", theta, 1, observed=y)
    ...     return model
    >>> fedppl.FederatedModel(clinic, shared=["mu"]).shared
    ('mu',)

    Notes
    -----
    *When this fails.* A builder that turns data into Python numbers (``float(y.mean())``) bakes one client's
    data into the model. The first clients are built and compared to find that, and it is compiled per
    client with a warning; wrap such numbers in ``pm.Data`` or compute them from the container. Where the first two
    models are the same the builder is not called for further clients: checks of data inside it do not see those.
    """

    builder: Callable[..., Any]
    shared: tuple[str, ...]
    # Templates by columns, for which two clients' builds were found equal: later fits need not build again.
    _compared: dict[Any, Template] = field(init=False, repr=False)

    def __init__(self, builder: Callable[..., Any], shared: Iterable[str]) -> None:
        if not callable(builder):
            raise DeclarationError(
                f"builder is {type(builder).__name__}, not a function; pass a function from one client's data to a "
                "pm.Model, not the model itself."
            )
        names = (shared,) if isinstance(shared, str) else tuple(shared) if isinstance(shared, Iterable) else (shared,)
        if not all(isinstance(name, str) for name in names) or isinstance(
            shared, set | frozenset
        ):  # sets are unordered
            raise DeclarationError(f'shared={shared!r} must be a list of names of variables, such as ["mu", "tau"].')
        if not names:
            raise DeclarationError("shared=[] names no variable; name at least one free random variable to share.")
        for name in names:
            if names.count(name) > 1:
                raise DeclarationError(f"shared name {name!r} is listed {names.count(name)} times; list it once.")
        object.__setattr__(self, "builder", builder)
        object.__setattr__(self, "shared", names)
        object.__setattr__(self, "_compared", {})

    def __repr__(self) -> str:
        """The builder by name, and what is shared."""
        return f"FederatedModel({builder_name(self.builder)}, shared={list(self.shared)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the declaration alone; what was compiled stays in its process."""
        return FederatedModel, (self.builder, self.shared)

    def build(self, client_id: str, arrays: Mapping[str, Any]) -> Any:
        """Call the builder on one client's data; its errors name the client."""
        require_arguments(client_id, self.builder, arrays)
        try:
            return self.builder(**arrays)
        except DeclarationError as error:  # the builder's own word on its settings
            raise DeclarationError(f"client {client_id!r}: {error}") from error
        except Exception as error:
            shapes = {name: np.shape(value) for name, value in arrays.items()}
            remedy = "Check this client's data against the builder's arguments."
            reals = [name for name, value in arrays.items() if np.asarray(value).dtype.kind == "f"]
            if isinstance(error, TypeError) and "integers" in str(error) and reals:
                remedy = f"Of reals there are {', '.join(map(repr, reals))}: give as integers what is an index."
            raise DataError(
                f"client {client_id!r}: the builder failed on data of shapes {shapes}: {type(error).__name__}: "
                f"{str(error).rstrip('.')}. {remedy}"
            ) from error

    def enrol(self, clients: Mapping[str, Mapping[str, Any]]) -> dict[str, ClientModel]:
        """Check every client's data against the declaration and compile what is not compiled yet.

        Parameters
        ----------
        clients
            Client id to that client's data, name to array.

        Returns
        -------
        dict
            Client id to ClientModel, in the order given.

        Raises
        ------
        DeclarationError, DataError
            Naming the client, the value and the remedy, before anything is compiled where possible.
        """
        if not isinstance(clients, Mapping):
            raise DataError(f"clients are {type(clients).__name__}; pass a mapping from client id to its data.")
        if not clients:
            raise DataError("no clients: pass a mapping from client id to that client's data.")
        checked = {str(client_id): as_arrays(str(client_id), data) for client_id, data in clients.items()}
        if len(checked) < len(clients):
            raise DataError(f"client ids {list(clients)} are not distinct as strings; rename them.")
        needs_same_keys(checked)
        typed = one_type(checked)
        enrolled: dict[str, ClientModel] = {}
        reference: ClientModel | None = None
        try:
            for group in group_by_columns(typed):
                for client in self._enrol_group({k: typed[k] for k in group}, reference):
                    enrolled[client.client_id] = client
                    reference = reference or client
        except DataError as error:
            if other := self._of_another_type(checked, typed):
                raise DataError(f"{other} On reals: {error}") from error
            raise
        return {client_id: enrolled[client_id] for client_id in checked}

    def _of_another_type(
        self, given: Mapping[str, Mapping[str, Any]], typed: Mapping[str, Mapping[str, Any]]
    ) -> str | None:
        """Where one client's fractions made reals of others' integers and the builder takes integers only: whose."""
        for name in next(iter(given.values())):
            odd = [k for k in given if not np.all(fits_integers(given[k][name]))]
            whole = [k for k in given if given[k][name].dtype.kind in "biu" and np.all(fits_integers(given[k][name]))]
            if not whole or not odd:
                continue
            try:
                self._template_of(whole[0], typed[whole[0]])
                continue  # reals are not what the builder fails on
            except (DataError, DeclarationError):
                pass
            try:
                self._template_of(whole[0], {**typed[whole[0]], name: given[whole[0]][name]})
            except (DataError, DeclarationError):
                continue
            where = tuple(int(i) for i in np.argwhere(~fits_integers(given[odd[0]][name]))[0])
            return (
                f"client {odd[0]!r}: {name!r} holds {given[odd[0]][name][where]} at index {where}. At client "
                f"{whole[0]!r} it holds integers of at most 32 bits, which the builder needs, as an index for example, "
                f"and a name has one type at all clients. Correct the values of client {odd[0]!r}, or let the builder "
                f"make integers of {name!r}."
            )
        return None

    def _enrol_group(
        self, group: Mapping[str, Mapping[str, Any]], reference: ClientModel | None
    ) -> Iterable[ClientModel]:
        """Enrol clients whose data have the same numbers of columns."""
        ids = list(group)
        columns = tuple((name, array.dtype.str, array.shape[1:]) for name, array in sorted(group[ids[0]].items()))
        seen = self._compared.get(columns)
        if seen and not self._builds(seen, ids[0], group[ids[0]]):  # what it reads beside its arguments has changed
            seen = None
        first = seen or self._template_of(ids[0], group[ids[0]])
        if not seen and self._ignores(first.parts, group):
            raise ignored_data(ids[0], self.builder, first.parts, group[ids[0]])
        templates = {ids[0]: first}
        own = not first.parts.data
        if not own and not seen and len(ids) > 1:
            first, second, other = self._pair(group, first)
            templates = {ids[0]: first, other: second}
            require_same_variables(ids[0], first.variables[0], other, second.variables[0], group[other])
            if not _same.same_prior(first.parts, first.variables[0], second.parts, second.variables[0]):
                raise other_prior(ids[0], other)
            same = first.same_density(second)
            own = not (same and _same.same_outputs(first.parts, first.variables, second.parts, second.variables))
            if not own:
                self._compared[columns] = first
        if (own or len(ids) == 1) and not seen and not self._builds(first, ids[0], group[ids[0]]):
            raise other_model(ids[0])
        if own and len(ids) > 1:
            missing = "has no pm.Data container" if not first.parts.data else "bakes a client's data into its graph"
            warnings.warn(
                f"the builder {missing}, so each of {len(ids)} clients is compiled on its own, which takes seconds "
                "each. Put the data into pm.Data containers named like the builder's arguments.",
                UserWarning,
                stacklevel=4,
            )
        if reference is not None:
            first.functions.setdefault("public", reference.template.public)
        elif "public" not in first.functions:
            self._judge(ids[0], group[ids[0]], first, alone=len(ids) == 1)
        for client_id in ids:  # all are checked before anything is compiled for the first
            containers(client_id, first.parts, group[client_id])
        for client_id in ids:
            template = first
            if own:
                template = templates.get(client_id) or self._template_of(client_id, group[client_id])
                template.functions.update(own=True, public=first.public)
            client = self._client(client_id, template, group[client_id], like=reference)
            require_same_layout(reference, client)
            reference = reference or client
            yield client

    def _pair(self, group: Mapping[str, Mapping[str, Any]], first: Template) -> tuple[Template, Template, str]:
        """The first client's template and another's, in which lengths that differ between them are open."""
        ids = list(group)
        sizes = {client_id: [np.shape(array)[:1] for array in arrays.values()] for client_id, arrays in group.items()}
        # A client with other numbers of rows tells which lengths follow them.
        other = max(ids[1:], key=lambda name: sum(a != b for a, b in zip(sizes[name], sizes[ids[0]], strict=True)))
        parts = self._parts(other, group[other])
        lengths = _graph.open_lengths(first.parts, parts.model)
        if lengths != first.parts.open:
            first = self._opened(ids[0], group[ids[0]], first.parts, lengths)
        first.functions["compared"] = True
        return first, self._opened(other, group[other], parts, lengths), other

    def _builds(self, template: Template, client_id: str, arrays: Mapping[str, Any]) -> bool:
        """Whether the builder, called once more, gives the model of the template."""
        again = self._opened(client_id, arrays, self._parts(client_id, arrays), template.parts.open)
        return (
            template.variables[0] == again.variables[0]
            and template.same_density(again)
            and _same.same_prior(template.parts, template.variables[0], again.parts, again.variables[0])
            and _same.same_outputs(template.parts, template.variables, again.parts, again.variables)
        )

    def _ignores(self, first: _graph.Parts, group: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether no client's data change anything of what is observed."""
        parts: _graph.Parts | None = first
        for client_id, arrays in group.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                build = functools.partial(self._parts, client_id)
                if not ignores_data(build, parts or build(arrays), arrays):
                    return False
            parts = None
        return True

    def _judge(self, client_id: str, arrays: Mapping[str, Any], template: Template, *, alone: bool) -> None:
        """Decide what of this model may leave a client, and name what stays."""

        @functools.cache
        def rebuild() -> _public.Built:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _public.rebuilt(lambda data: self._parts(client_id, data), arrays)

        parts, shared = template.parts, template.variables[0]
        if alone and _public.prior_of_data(parts, shared, rebuild()):  # else two clients' priors are compared
            raise private_prior(client_id)
        public = template.functions["public"] = _public.read_public(parts, shared, rebuild)
        stay = [*map(repr, public.withheld), *(f"labels of {dim!r}" for dim in public.unlabelled)]
        if stay:
            known = "" if rebuild() is not None else " (the builder fails on altered data, so that nothing is known)"
            warnings.warn(
                f"left out of the shared result: {', '.join(stay)}. Constants in them may hold a client's data: "
                f"arrays, or numbers that change with the data{known}. They are in fit.client(...); for the shared "
                "result compute them from fit.idata, and give coords that do not depend on data.",
                UserWarning,
                stacklevel=5,
            )

    def _parts(self, client_id: str, arrays: Mapping[str, Any]) -> _graph.Parts:
        built = self.build(client_id, arrays)
        try:
            parts = _graph.dissect(built, self.shared)
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
        return parts

    def _template_of(self, client_id: str, arrays: Mapping[str, Any]) -> Template:
        parts = self._parts(client_id, arrays)
        return self._opened(client_id, arrays, parts, _graph.open_lengths(parts))

    def _opened(
        self, client_id: str, arrays: Mapping[str, Any], parts: _graph.Parts, lengths: Mapping[str, int | None]
    ) -> Template:
        parts = parts._replace(open=lengths)
        start = _graph.initial_values(parts)
        held = containers(client_id, parts, arrays)
        try:
            initial = start(*held, *_graph.alone(parts))
        except (ValueError, TypeError, IndexError, AssertionError) as error:
            raise mismatch(client_id, arrays, error) from error
        shared, local = (_graph.variables(parts, initial, local=which) for which in (False, True))
        graph = _graph.site_graph(parts, shared, local)
        return Template(parts, (shared, local), graph, start, (*held, *_graph.alone(parts), *_shapes(graph, local)))

    def _lengths(
        self, client_id: str, template: Template, arrays: Mapping[str, Any]
    ) -> tuple[Template, tuple[Any, ...]]:
        """The template in which this client's lengths are open, and those lengths that no container has."""
        if template.may_hold_rows(arrays):
            model = self._parts(client_id, arrays).model
            lengths = _graph.open_lengths(template.parts, model)
            if lengths != template.parts.open:
                opened = template.functions.setdefault("opened", {})
                key = tuple(lengths.items())
                if key not in opened:
                    built_on = {v.name: v.get_value() for v in template.parts.data}
                    opened[key] = self._opened(client_id, built_on, template.parts, lengths)
                    opened[key].functions["public"] = template.public
                template = opened[key]
            return template, _graph.alone(template.parts, model)
        if None not in template.parts.open.values():
            return template, ()
        return template, _graph.alone(template.parts, self._parts(client_id, arrays).model)

    def _client(
        self, client_id: str, template: Template, arrays: Mapping[str, Any], like: ClientModel | None = None
    ) -> ClientModel:
        template, alone = self._lengths(client_id, template, arrays)
        parts, functions = template.parts, template.functions
        data = (*containers(client_id, parts, arrays), *alone)
        shapes = (*(np.shape(value) for value in data), *map(int, alone))
        starts = functions.setdefault("initial", {})
        if shapes not in starts:  # a starting value may depend on data; for a start, equal shapes are enough
            try:
                starts[shapes] = template.start(*data)
            except (ValueError, TypeError, IndexError, AssertionError) as error:
                raise mismatch(client_id, arrays, error) from error
        initial = starts[shapes]
        shared = _graph.variables(parts, initial, local=False)
        local = _graph.variables(parts, initial, local=True)
        if like is not None:
            require_same_variables(like.client_id, like.layout.variables, client_id, shared, arrays)
        free_shapes = _shapes(template.graph, local)
        if like is not None and like.template is template:
            layout, prior = like.layout, like.prior
        else:
            try:
                layout, prior = shared_layout(template, shared, initial[: len(shared)])
            except DeclarationError as error:
                raise DeclarationError(f"client {client_id!r}: {error}") from None
        phi, theta = ([np.ravel(v) for v in values] for values in (initial[: len(shared)], initial[len(shared) :]))
        functions["shared start"] = np.concatenate(phi)
        client = ClientModel(
            client_id=client_id,
            layout=layout,
            local=local,
            data=pack((*data, *free_shapes)),
            inputs=(*data, *free_shapes),
            prior=prior,
            initial=np.concatenate([np.zeros(0), *theta]),
            arrays=dict(arrays),
            declaration=self,
            template=template,
        )
        require_start(client, functions["shared start"])
        return client


def _shapes(graph: _graph.SiteGraph, local: tuple[Variable, ...]) -> tuple[Array, ...]:
    """Shapes of the local variables that the graph takes for inputs."""
    return tuple(np.asarray(local[i].shape, dtype=np.int64) for i in graph.free_shapes)


def _no_kernel(*arguments: Any) -> Any:
    """In the place of a compiled density where indicators are shared: no algorithm walks along its gradient."""
    raise DeclarationError("a log density with 0/1 indicators has no gradient to follow.")


def dims_and_coords(pymc_model: Any) -> tuple[dict[str, tuple[str, ...] | None], dict[str, list[Any]]]:
    """Dims of every variable and coords of every dim of a PyMC model."""
    dims: dict[str, tuple[str, ...] | None] = {k: tuple(v) for k, v in pymc_model.named_vars_to_dims.items()}
    return dims, {name: list(values) for name, values in pymc_model.coords.items() if values is not None}
