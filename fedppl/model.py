"""One client's posterior, declared as a PyMC model and compiled once for every client.

`FederatedModel` is the declaration. `ClientModel` is what a local inference sees of it: pure functions of flat
unconstrained vectors, compiled once and shared by clients of every size.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import get_mode

from fedppl import _graph, gaussian
from fedppl._data import as_arrays, group_by_columns, needs_same_keys
from fedppl._pack import pack, unpacking_kernel
from fedppl.prior import SharedPrior, gaussian_prior, moment_match
from fedppl.types import Array, DataError, DeclarationError, Layout, Variable, coordinate_labels

__all__ = ["ClientModel", "FederatedModel", "compilations"]

logger = logging.getLogger(__name__)

_PRIOR_DRAWS = 4000
_KERNELS_KEPT = 64
_kernels: list[tuple[_graph.SiteGraph, Callable[..., Any]]] = []
_compiled = 0
_lock = threading.Lock()


def compilations() -> int:
    """How many times this process compiled a client's log density. Tests hold it constant over refits."""
    return _compiled


@dataclass(frozen=True, eq=False)
class _Template:
    """One build of the model and its compiled site factor; its clients differ from it only in their data."""

    parts: _graph.Parts
    variables: tuple[tuple[Variable, ...], tuple[Variable, ...]]  # shared and local ones of the client built for
    graph: _graph.SiteGraph
    start: Callable[..., list[Array]]
    functions: dict[Any, Any] = field(default_factory=dict)

    @property
    def kernel(self) -> Callable[..., Any]:
        """Compiled at first use, so that what can be refused is refused before."""
        if "kernel" not in self.functions:
            self.functions["kernel"] = _kernel(self.graph)
        kernel: Callable[..., Any] = self.functions["kernel"]
        return kernel

    def check_indices(self, x: Array, inputs: tuple[Any, ...]) -> None:
        """Raise IndexError where data index out of bounds: compiled code would read foreign memory instead."""
        if "interpreted" not in self.functions:
            graph, indexed = self.graph, _graph.indexes_by_data(self.graph)
            interpreted = _graph.python_function([graph.x, *graph.inputs], graph.logp) if indexed else None
            self.functions["interpreted"] = interpreted
        if self.functions["interpreted"] is not None:
            self.functions["interpreted"](x, *inputs)

    @property
    def has_kink(self) -> bool:
        """Whether |θ| stands in the log density."""
        if "kink" not in self.functions:
            self.functions["kink"] = _graph.has_kink(self.graph)
        return bool(self.functions["kink"])


def _compile(graph: _graph.SiteGraph) -> Callable[..., Any]:
    """Compile x, packed data -> [log density, gradient] in NUMBA mode, callable from other jitted loops."""
    global _compiled
    _compiled += 1
    gradient = pt.grad(graph.logp, graph.x, disconnected_inputs="ignore")
    output = pt.join(0, graph.logp[None], gradient)
    # A parameter outside its domain is a point of zero density, not an exception in the middle of a search.
    mode = get_mode("NUMBA").including("local_check_parameter_to_ninf_switch")
    with warnings.catch_warnings():
        # Numba says when an Op runs in object mode: slower, still right.
        warnings.filterwarnings("ignore", message=".*object mode.*", category=UserWarning)
        function = pytensor.function([graph.x, *graph.inputs], [output], mode=mode, on_unused_input="ignore")
        return unpacking_kernel(function.vm.jit_fn, [(v.type.dtype, v.type.ndim) for v in graph.inputs])


def _kernel(graph: _graph.SiteGraph) -> Callable[..., Any]:
    """Find or compile: a builder made anew (a closure, a factory) does not compile again.

    Only the site factor is looked up. Names, priors, transforms and deterministics are of each build its own.
    """
    with _lock:
        for known, kernel in _kernels:
            if _graph.same_graph(known, graph):
                return kernel
        compiled = _compile(graph)
        _kernels.append((graph, compiled))
        del _kernels[:-_KERNELS_KEPT]
        return compiled


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
    kernel: Callable[..., Any]
    data: tuple[Any, Any, Any]
    inputs: tuple[Any, ...]
    prior: SharedPrior
    initial: Array
    arrays: Mapping[str, Any]
    declaration: FederatedModel
    template: _Template

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

    @property
    def has_kink(self) -> bool:
        """Whether the log density has a kink in θ or φ (a Laplace prior has)."""
        return self.template.has_kink

    def log_site(self, phi: Array, theta: Array) -> tuple[float, Array, Array]:
        """log p(y_k, θ | φ) and its gradients with respect to φ, (m,), and θ, (d_k,)."""
        output = self.kernel(np.concatenate([phi, theta]), *self.data)
        return float(output[0]), output[1 : 1 + self.shared_size], output[1 + self.shared_size :]

    def with_data(self, client_id: str, **arrays: Any) -> ClientModel:
        """Return another client's model: same compiled functions, other data."""
        if self.template.functions.get("own"):  # data stand in the graph: nothing can be exchanged
            return self.declaration.enrol({client_id: arrays})[client_id]
        checked = as_arrays(client_id, arrays)
        needs_same_keys({self.client_id: self.arrays, client_id: checked})
        client = self.declaration._client(client_id, self.template, checked, like=self)
        _check_same_layout(self, client)
        return client

    def constrain_shared(self, phi: Array) -> dict[str, Array]:
        """Shared variables and their deterministics on the constrained space from draws (S, m)."""
        return self._constrain(np.atleast_2d(phi), only_shared=True)

    def constrain(self, phi: Array, theta: Array) -> dict[str, Array]:
        """Local variables and their deterministics on the constrained space from draws (S, m), (S, d_k)."""
        return self._constrain(np.concatenate([np.atleast_2d(phi), np.atleast_2d(theta)], axis=1), only_shared=False)

    def _constrain(self, draws: Array, *, only_shared: bool) -> dict[str, Array]:
        key = f"constrain {only_shared}"
        functions = self.template.functions
        if key not in functions:
            x, inputs, names, outputs = _graph.constrained_graph(
                self.template.parts, self.layout.variables, self.local, only_shared=only_shared
            )
            functions[key] = names, _graph.batched(x, inputs, outputs), len(inputs)
        names, function, n_inputs = functions[key]
        values = function(draws, *self.inputs[:n_inputs])
        return dict(zip(names, values, strict=True))

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
    client with a warning; wrap such numbers in ``pm.Data`` or compute them from the container.
    """

    builder: Callable[..., Any]
    shared: tuple[str, ...]
    # Templates by columns, for which two clients' builds were found equal: later fits need not build again.
    _compared: dict[Any, _Template] = field(init=False, repr=False)

    def __init__(self, builder: Callable[..., Any], shared: Iterable[str]) -> None:
        if not callable(builder):
            raise DeclarationError(
                f"builder is {type(builder).__name__}, not a function; pass a function from one client's data to a "
                "pm.Model, not the model itself."
            )
        names = (shared,) if isinstance(shared, str) else tuple(shared)
        if not names:
            raise DeclarationError("shared=[] names no variable; name at least one free random variable to share.")
        for name in names:
            if names.count(name) > 1:
                raise DeclarationError(f"shared name {name!r} is listed {names.count(name)} times; list it once.")
        object.__setattr__(self, "builder", builder)
        object.__setattr__(self, "shared", names)
        object.__setattr__(self, "_compared", {})

    def build(self, client_id: str, arrays: Mapping[str, Any]) -> Any:
        """Call the builder on one client's data; its errors name the client."""
        try:
            return self.builder(**arrays)
        except Exception as error:
            shapes = {name: np.shape(value) for name, value in arrays.items()}
            raise DataError(
                f"client {client_id!r}: the builder failed on data of shapes {shapes}: {type(error).__name__}: {error}. "
                "Check this client's data against the builder's arguments."
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
        if not clients:
            raise DataError("no clients: pass a mapping from client id to that client's data.")
        checked = {str(client_id): as_arrays(str(client_id), data) for client_id, data in clients.items()}
        if len(checked) < len(clients):
            raise DataError(f"client ids {list(clients)} are not distinct as strings; rename them.")
        needs_same_keys(checked)
        enrolled: dict[str, ClientModel] = {}
        reference: ClientModel | None = None
        for group in group_by_columns(checked):
            for client in self._enrol_group({k: checked[k] for k in group}, reference):
                enrolled[client.client_id] = client
                reference = reference or client
        return {client_id: enrolled[client_id] for client_id in checked}

    def _enrol_group(
        self, group: Mapping[str, Mapping[str, Any]], reference: ClientModel | None
    ) -> Iterable[ClientModel]:
        """Enrol clients whose data have the same numbers of columns."""
        ids = list(group)
        columns = tuple((name, array.dtype.str, array.shape[1:]) for name, array in sorted(group[ids[0]].items()))
        seen = self._compared.get(columns)
        first = seen or self._template_of(ids[0], group[ids[0]])
        templates = {ids[0]: first}
        own = not first.parts.data
        if not own and not seen and len(ids) > 1:
            second = templates[ids[1]] = self._template_of(ids[1], group[ids[1]])
            _require_same_variables(ids[0], first.variables[0], ids[1], second.variables[0], group[ids[1]])
            if not _graph.same_prior(first.parts, first.variables[0], second.parts, second.variables[0]):
                raise _other_prior(ids[0], ids[1])
            same = _graph.same_graph(first.graph, second.graph)
            own = not (same and _graph.same_outputs(first.parts, first.variables, second.parts, second.variables))
            if not own:
                self._compared[columns] = first
        if own and len(ids) > 1:
            missing = "has no pm.Data container" if not first.parts.data else "bakes a client's data into its graph"
            warnings.warn(
                f"the builder {missing}, so each of {len(ids)} clients is compiled on its own, which takes seconds "
                "each. Put the data into pm.Data containers named like the builder's arguments.",
                UserWarning,
                stacklevel=4,
            )
        for client_id in ids:
            template = first
            if own:
                template = templates.get(client_id) or self._template_of(client_id, group[client_id])
                template.functions["own"] = True
            client = self._client(client_id, template, group[client_id], like=reference)
            _check_same_layout(reference, client)
            reference = reference or client
            yield client

    def _parts(self, client_id: str, arrays: Mapping[str, Any]) -> _graph.Parts:
        try:
            parts = _graph.dissect(self.build(client_id, arrays), self.shared)
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

    def _template_of(self, client_id: str, arrays: Mapping[str, Any]) -> _Template:
        parts = self._parts(client_id, arrays)
        start = _graph.initial_values(parts)
        try:
            initial = start(*_containers(client_id, parts, arrays))
        except (ValueError, TypeError, IndexError) as error:
            raise _mismatch(client_id, arrays, error) from error
        shared, local = (_graph.variables(parts, initial, local=which) for which in (False, True))
        return _Template(parts, (shared, local), _graph.site_graph(parts, shared, local), start)

    def _client(
        self, client_id: str, template: _Template, arrays: Mapping[str, Any], like: ClientModel | None = None
    ) -> ClientModel:
        parts, functions = template.parts, template.functions
        data = _containers(client_id, parts, arrays)
        shapes = tuple(np.shape(value) for value in data)
        starts = functions.setdefault("initial", {})
        if shapes not in starts:  # a starting value may depend on data; for a start, equal shapes are enough
            try:
                starts[shapes] = template.start(*data)
            except (ValueError, TypeError, IndexError) as error:
                raise _mismatch(client_id, arrays, error) from error
        initial = starts[shapes]
        shared = _graph.variables(parts, initial, local=False)
        local = _graph.variables(parts, initial, local=True)
        if like is not None:
            _require_same_variables(like.client_id, like.layout.variables, client_id, shared, arrays)
        free_shapes = tuple(np.asarray(local[i].shape, dtype=np.int64) for i in template.graph.free_shapes)
        if like is not None and like.template is template:
            layout, prior = like.layout, like.prior
        else:
            try:
                layout, prior = _shared_layout(template, shared, initial[: len(shared)])
            except DeclarationError as error:
                raise DeclarationError(f"client {client_id!r}: {error}") from None
        theta = [np.ravel(value) for value in initial[len(shared) :]]
        client = ClientModel(
            client_id=client_id,
            layout=layout,
            local=local,
            kernel=template.kernel,
            data=pack((*data, *free_shapes)),
            inputs=(*data, *free_shapes),
            prior=prior,
            initial=np.concatenate([np.zeros(0), *theta]),
            arrays=dict(arrays),
            declaration=self,
            template=template,
        )
        _check_start(client, np.concatenate([np.ravel(value) for value in initial[: len(shared)]]))
        return client


def _containers(client_id: str, parts: _graph.Parts, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
    """Order a client's arrays like the model's containers, in the containers' types."""
    ordered = []
    for container in parts.data:
        value, dtype = np.asarray(arrays[container.name]), container.type.dtype
        if value.ndim != container.type.ndim:
            raise DataError(
                f"client {client_id!r}: {container.name!r} has {value.ndim} dimensions {value.shape}, but the model's "
                f"container has {container.type.ndim}; reshape this client's {container.name!r}."
            )
        cast = value.astype(dtype)
        if not np.array_equal(cast, value):
            raise DataError(
                f"client {client_id!r}: {container.name!r} holds {value.dtype} values that {dtype} cannot hold exactly "
                f"(the container took its type from another client); give {container.name!r} one type at all clients."
            )
        ordered.append(np.asarray(cast, order="C"))
    return tuple(ordered)


def _mismatch(client_id: str, arrays: Mapping[str, Any], error: Exception) -> DataError:
    shapes = {name: np.shape(value) for name, value in arrays.items()}
    message = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
    remedy = "Give this client the same columns as the others, one row of each array per observation."
    if isinstance(error, IndexError):
        remedy = "An integer of its data points outside an array of the model: number groups 0 to n - 1."
    return DataError(
        f"client {client_id!r}: the model cannot be evaluated on data of shapes {shapes}: {message}. {remedy}"
    )


def _check_start(client: ClientModel, phi: Array) -> None:
    """Evaluate the log density once: shapes that do not fit and impossible data show here, not in round 7."""
    try:
        client.template.check_indices(np.concatenate([phi, client.initial]), client.inputs)
        value, gradient, _ = client.log_site(phi, client.initial)
    except (ValueError, TypeError, IndexError) as error:
        raise _mismatch(client.client_id, client.arrays, error) from error
    if not np.isfinite(value) or not np.all(np.isfinite(gradient)):
        raise DataError(
            f"client {client.client_id!r}: the log density at the starting point is {value}; this client's data are "
            "impossible under the model (a negative count, a class that does not exist?) or the start is. "
            "Check the data, or set `initval=` on the variable."
        )


def _shared_layout(
    template: _Template, variables: tuple[Variable, ...], initial: list[Array]
) -> tuple[Layout, SharedPrior]:
    """Layout and prior of the shared parameters, once per template."""
    functions = template.functions
    key = ("layout", variables)
    if key in functions:
        layout, prior = functions[key]
        return layout, prior
    parts = template.parts
    phi, logp = _graph.prior_graph(parts, variables)
    log_density = _graph.batched(phi, [], [logp])
    gradient = _graph.python_function([phi], pt.grad(logp, phi, disconnected_inputs="ignore"))
    origin = np.concatenate([np.ravel(value).astype(float) for value in initial])
    exact = gaussian_prior(gradient, origin)
    n0 = exact if exact is not None else moment_match(_prior_draws(parts))
    prior = SharedPrior(
        log_density=lambda draws: np.broadcast_to(log_density(draws)[0], (len(draws),)),
        gradient=gradient,
        gaussian=n0,
        is_gaussian=exact is not None,
    )
    digest = hashlib.sha256()
    for variable in variables:
        digest.update(repr(tuple(variable)).encode())
    # In units of the prior and rounded, so that two builds of the same model on two machines agree.
    center, sd = gaussian.mean(n0), gaussian.standard_deviations(n0)
    probes = center + sd * np.random.default_rng(0).normal(size=(3, len(origin)))
    for number in (*np.ravel(sd[:, None] * n0.precision * sd), *(center / sd), *prior.log_density(probes)):
        digest.update(f"{np.round(number, 5) + 0.0:.5f} ".encode())
    for number in sd:
        digest.update(f"{number:.5e} ".encode())
    layout = Layout(variables, n0, exact is not None, digest.hexdigest()[:16])
    functions[key] = layout, prior
    return layout, prior


def _prior_draws(parts: _graph.Parts) -> Array:
    """Draws (S, m) of the shared prior on the unconstrained space."""
    model = parts.model
    values = []
    for rv in parts.shared:
        transform = model.rvs_to_transforms[rv]
        values.append(rv if transform is None else transform.forward(rv, *rv.owner.inputs))
    try:
        draws = pm.draw(values, draws=_PRIOR_DRAWS, random_seed=0, mode=_graph.PYTHON_MODE)
    except NotImplementedError as error:  # Flat and HalfFlat cannot be drawn from
        raise DeclarationError(
            f"the shared prior is improper ({error}); the server needs a proper one. Give every shared variable a "
            "proper prior, for example pm.Normal(0, 10) or pm.HalfNormal(1)."
        ) from error
    flat = np.concatenate([np.reshape(value, (_PRIOR_DRAWS, -1)) for value in draws], axis=1)
    # An ordered vector is drawn without its order: the draws that happen to have it are the prior's.
    inside = flat[np.all(np.isfinite(flat), axis=1)]
    if len(inside) < 10 * (flat.shape[1] + 1):
        names = [rv.name for rv in parts.shared]
        raise DeclarationError(
            f"only {len(inside)} of {_PRIOR_DRAWS} draws of the shared prior of {names} lie where its transforms are "
            "defined (an ordered vector?). Give its entries ordered means, or share its increments instead."
        )
    return np.asarray(inside)


def _check_same_layout(reference: ClientModel | None, client: ClientModel) -> None:
    """Refuse a client whose shared block differs, naming the difference."""
    if reference is None or reference.layout.fingerprint == client.layout.fingerprint:
        return
    ours, theirs = reference.layout.variables, client.layout.variables
    _require_same_variables(reference.client_id, ours, client.client_id, theirs, client.arrays)
    raise _other_prior(reference.client_id, client.client_id)


def _require_same_variables(
    reference_id: str,
    reference: tuple[Variable, ...],
    client_id: str,
    variables: tuple[Variable, ...],
    arrays: Mapping[str, Any],
) -> None:
    """Refuse a client whose shared variables differ in shape, transform or dims."""
    for ours, theirs in zip(reference, variables, strict=True):
        if ours != theirs:
            what = next(f for f in ours._fields if getattr(ours, f) != getattr(theirs, f))
            shapes = {name: np.shape(value) for name, value in arrays.items()}
            raise DataError(
                f"client {client_id!r}: shared variable {ours.name!r} has {what} {getattr(theirs, what)}, but "
                f"{getattr(ours, what)} at client {reference_id!r}; shared layouts must be equal. This client's "
                f"data have shapes {shapes}: give it the same columns as the others, or make {ours.name!r} local."
            )


def _other_prior(reference_id: str, client_id: str) -> DeclarationError:
    return DeclarationError(
        f"client {client_id!r}: the shared prior differs from the one at client {reference_id!r}; "
        "the builder lets client data into the prior of a shared variable. Use the same constants at all clients."
    )
