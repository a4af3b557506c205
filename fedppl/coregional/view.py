"""A declared linear model of coregionalisation, read from its PyMC graph: what the numerics need of one unit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from scipy.special import logit

from fedppl.coregional.bound import Design, LogScale, Roles, density
from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.checks import new_inputs
from fedppl.model.client import ClientModel
from fedppl.model.compiled import inlined, unpacked_function, without_notices
from fedppl.model.same import graph_key
from fedppl.numerics.prior import gaussian_prior
from fedppl.types import Array, DataError, DeclarationError, Layout, Variable

logger = logging.getLogger(__name__)
_lock = threading.Lock()
_CACHED = 16
_SPREADS = 3.0  # of the prior of log σ_m, below which outputs are constant
_FAR = 5.0  # prior sds: of log σ_w, or of a curve at the median of σ_w
_UNSEEN = 0.9  # of a latent function's variance, 1, that remains when all of v is known
_compiled: dict[str | None, tuple[Callable[..., Any], Callable[..., Any]]] = {}  # by a digest of the design's graph
_NOT_OF_KERNELS = ("v", "slab_sd", "included")
_PARTS = ("projection", "conditional_variance")
_CONTRACT = (
    "a model of coregionalisation declares v, w, noise_sd, residual and slab_sd, and adds its tensors `projection` and "
    "`conditional_variance` by name, as fedppl.models.fedlmc_ss does"
)


def roles(layout: Layout) -> Roles:
    """Sort the shared parameters by name: all but v, included and slab_sd are parameters of kernels."""
    variables, places = {variable.name: variable for variable in layout.variables}, layout.slices
    v, slab, included = (variables.get(name) for name in ("v", "slab_sd", "included"))
    if v is None or slab is None or len(v.shape) != 2 or slab.shape != () or slab.transform != "log":
        shapes = {name: variable.shape for name, variable in variables.items()}
        raise DeclarationError(
            f"the shared variables {shapes} are not v of shape (latent, inducing), a log-scale slab_sd of shape () and "
            'kernel parameters; share these, for example shared=["v", "lengthscale", "slab_sd"].'
        )
    if included is not None and (included.shape != v.shape[:1] or not included.binary):
        raise DeclarationError(f"included has shape {included.shape}, and must be {v.shape[0]} Bernoulli variables.")
    if not layout.prior_is_gaussian:
        raise DeclarationError("the shared prior is not Gaussian on the unconstrained space; give v a standard Normal.")
    precision, linear, every = layout.prior.precision, layout.prior.linear, np.arange(layout.size)
    of_v = every[places["v"]]
    if not np.allclose(precision[of_v], np.eye(layout.size)[of_v], atol=1e-8) or np.any(np.abs(linear[of_v]) > 1e-8):
        raise DeclarationError('the prior of v is not standard Normal; declare v = pm.Normal("v", 0, 1, dims=...).')
    chosen, log_odds = None, np.full(v.shape[0], np.inf)
    if included is not None:
        chosen = every[places["included"]]
        log_odds = logit(linear[chosen] / np.diag(precision)[chosen])
    slab = places["slab_sd"].start
    kernel = np.delete(every, np.r_[of_v, slab, [] if chosen is None else chosen].astype(int))
    kernel_precision = precision[np.ix_(kernel, kernel)]
    return Roles(
        latents=v.shape[0],
        points=v.shape[1],
        v=of_v,
        included=chosen,
        slab=slab,
        kernel=kernel,
        is_binary=np.isin(every, () if chosen is None else chosen),
        log_odds=log_odds,
        kernel_mean=np.asarray(np.linalg.solve(kernel_precision, linear[kernel]), dtype=float),
        kernel_precision=kernel_precision,
        slab_prior=LogScale(float(linear[slab] / precision[slab, slab]), float(precision[slab, slab])),
    )


class _Design(NamedTuple):
    """What clients of one template have in common."""

    dtypes: dict[str, str]  # of the data, in the order of the functions' inputs
    observed: str  # name of the output
    noise: LogScale
    forward: Callable[..., Any]  # of the kernels' parameters and the data
    backward: Callable[..., Any]  # of the kernels' parameters, slopes of the design, and the data


class CoregionalUnit:
    """One unit's side of a linear model of coregionalisation: the design of its rows and the priors it needs."""

    def __init__(self, client: ClientModel, common: _Design) -> None:
        self._client, self._common = client, common
        self.roles: Roles = roles(client.layout)
        self.noise: LogScale = common.noise  # prior of log σ_m
        self.response: Array = np.asarray(client.arrays[common.observed], dtype=float)  # y (n,)

    def design(self, kernel: Array, rows: Any = None) -> Design:
        """Projection (L, b, Q), conditional variance (L, b) and responses (b,) of all rows, or of some."""
        response = self.response if rows is None else self.response[rows]
        scale = len(self.response) / max(len(response), 1)
        projection, conditional = self._common.forward(kernel, *self._inputs(rows))
        return Design(projection, conditional, response, scale)

    def at(self, kernel: Array, inputs: Mapping[str, Any]) -> Design:
        """The design at new inputs by name, without responses."""
        common = self._common
        dtypes = {name: dtype for name, dtype in common.dtypes.items() if name != common.observed}
        values = new_inputs(inputs, dtypes, self._client.arrays, unread=(common.observed,))
        response = values[common.observed] = np.zeros(len(values[next(iter(dtypes))]))
        projection, conditional = common.forward(kernel, *(values[name] for name in common.dtypes))
        return Design(projection, conditional, response, 1.0)

    def kernel_gradient(self, kernel: Array, projection: Array, conditional: Array, rows: Any = None) -> Array:
        """Pull gradients in the design's two arrays, which are writable, back to the kernel's parameters, (p,)."""
        return np.asarray(self._common.backward(kernel, projection, conditional, *self._inputs(rows))[0])

    def _inputs(self, rows: Any) -> tuple[Any, ...]:
        inputs = self._client.inputs[: len(self._common.dtypes)]
        return inputs if rows is None else tuple(value[rows] for value in inputs)


def unit_of(client: ClientModel) -> CoregionalUnit:
    """What the numerics need of a client, once its declared density agrees with theirs."""
    cache = client.template.functions
    with _lock:
        unit = CoregionalUnit(client, cache["coregional"] if "coregional" in cache else _read(client))
        if "coregional" not in cache:  # a template's clients differ in their data alone
            _require_same_density(client, unit)
            cache["coregional"] = unit._common
    _require_scale(client, unit)
    _require_coverage(client, unit)
    return unit


def _read(client: ClientModel) -> _Design:
    who, parts, model = f"client {client.client_id!r}", client.template.parts, client.template.parts.model
    missing = [name for name in _PARTS if name not in model.named_vars]
    if missing:
        raise DeclarationError(f"{who}: the model has no {missing[0]!r}; {_CONTRACT}.")
    if len(model.observed_RVs) != 1:
        raise DeclarationError(f"{who}: the model observes {len(model.observed_RVs)} variables, not one.")
    observed = model.rvs_to_values[model.observed_RVs[0]].name
    dtypes = {variable.name: variable.type.dtype for variable in parts.data}
    if observed not in dtypes:
        raise DeclarationError(f"{who}: the output is not observed through a pm.Data container.")
    return _Design(dtypes, observed, _log_scale(client, "noise_sd"), *_functions(parts, client.layout.variables))


def _functions(parts: _graph.Parts, variables: tuple[Variable, ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The design and the way back through it, as functions of the kernels' parameters and the data."""
    model = parts.model
    x = pt.vector("kernel")
    replace, inputs = _graph.inputs_for(parts)
    places = [i for i, variable in enumerate(variables) if variable.name not in _NOT_OF_KERNELS]
    of_kernels = parts._replace(shared=tuple(parts.shared[i] for i in places), local=())
    _, values, _ = _graph.in_pieces(of_kernels, x, [variables[i] for i in places])
    for variable, rv in zip(variables, parts.shared, strict=True):
        if variable.name in _NOT_OF_KERNELS:  # a design that reads one has another density than is declared
            value = model.rvs_to_values[rv]
            values[value] = pt.zeros(variable.shape, dtype=value.type.dtype)
    outputs = model.replace_rvs_by_values([model[name] for name in _PARTS])
    projection, conditional = clone_replace(outputs, {**replace, **values})
    key = graph_key([x, *inputs], [projection, conditional])
    if key is None or key not in _compiled:
        cotangents = pt.dtensor3("projection_cotangent"), pt.dmatrix("conditional_cotangent")
        cost = pt.sum(cotangents[0] * projection) + pt.sum(cotangents[1] * conditional)
        slope = pt.grad(cost, x, disconnected_inputs="ignore")
        if len(_compiled) >= _CACHED:
            del _compiled[next(iter(_compiled))]
        forward = _compiled_function([x, *inputs], [projection, conditional])
        _compiled[key] = forward, _compiled_function([x, *cotangents, *inputs], [slope])
    return _compiled[key]


def _compiled_function(inputs: list[Any], outputs: list[Any]) -> Callable[..., Any]:
    """A function that is compiled once for all processes, and cached by the declared graph."""
    types = [(v.type.dtype, v.type.ndim) for v in inputs]
    with without_notices():
        return unpacked_function(lambda: inlined(inputs, outputs), types, graph_key(inputs, outputs))


def _log_scale(client: ClientModel, name: str) -> LogScale:
    """Prior N(m, s²) of the log of a local scale parameter."""
    who, parts = f"client {client.client_id!r}", client.template.parts
    matches = [(variable, rv) for variable, rv in zip(client.local, parts.local, strict=True) if variable.name == name]
    if not matches or matches[0][0].shape != () or matches[0][0].transform != "log":
        raise DeclarationError(f"{who}: {name!r} must be a local scalar on the log scale, a pm.LogNormal; {_CONTRACT}.")
    model, rv = parts.model, matches[0][1]
    value, log_prior = model.rvs_to_values[rv], model.logp(vars=[rv], sum=True)
    if (set(model.value_vars) - {value}) & set(ancestors([log_prior])):
        raise DeclarationError(f"{who}: the prior of {name!r} depends on another variable.")
    gradient = interpreted.python_function([value], pt.grad(log_prior, value))
    prior = gaussian_prior(lambda z: np.atleast_1d(gradient(z[0])), np.zeros(1))
    if prior is None:
        raise DeclarationError(f"{who}: the prior of {name!r} is not LogNormal; its mode has a closed form then.")
    return LogScale(float(prior.linear[0] / prior.precision[0, 0]), float(prior.precision[0, 0]))


def _require_same_density(client: ClientModel, unit: CoregionalUnit) -> None:
    """Compare the declared log density with the algorithm's, at two random points."""
    who, rng = f"client {client.client_id!r}", np.random.default_rng(0)
    places = {variable.name: variable.size for variable in client.local}
    if set(places) != {"w", "noise_sd", "residual"} or places["w"] != unit.roles.latents:
        raise DeclarationError(f"{who}: local variables are {places}; {_CONTRACT}, one w for each latent function.")
    prior_mean = client.layout.prior.linear / np.diag(client.layout.prior.precision)
    for _ in range(2):
        indicators, apart = rng.integers(0, 2, client.shared_size), 0.3 * rng.normal(size=client.shared_size)
        phi = np.where(unit.roles.is_binary, indicators, prior_mean + apart)
        local = {name: 0.5 * rng.normal(size=size) for name, size in places.items()}
        theta = np.concatenate([local[variable.name] for variable in client.local])
        declared = client.log_density(phi, theta)
        design = unit.design(phi[unit.roles.kernel])
        ours = density(design, unit.roles, phi, local["w"], float(local["noise_sd"][0]), local["residual"], unit.noise)
        if not abs(declared - ours) <= 1e-7 * (1.0 + abs(ours)):
            raise DeclarationError(
                f"{who}: the declared log density is {declared:.8g}, and the family's {ours:.8g}; {_CONTRACT}, with "
                "y ~ Normal(Σ w included projection v + residual √Σ (w included)² conditional_variance, noise_sd). For "
                "other models use fedppl.EP()."
            )


def _require_scale(client: ClientModel, unit: CoregionalUnit) -> None:
    """Refuse outputs whose scale is not that of the priors, and constant ones: a dead sensor outweighs all others."""
    y, noise, slab, who = unit.response, unit.noise, unit.roles.slab_prior, f"client {client.client_id!r}"
    least = float(np.exp(noise.mean - _SPREADS / np.sqrt(noise.precision)))
    spread = np.exp(_FAR / np.sqrt(slab.precision))  # next to 1 where σ_w is fixed
    most = float(np.exp(slab.mean) * max(spread, _FAR * np.sqrt(unit.roles.latents)))
    remedy = "bring outputs to mean 0 and unit scale by constants that all units agree on"
    if len(y) > 2 and np.std(y) < least:
        rule = f"the {len(y)} outputs vary by sd {np.std(y):.3g}, below what the prior of noise_sd allows, {least:.3g}"
        raise DataError(f"{who}: {rule}. Leave a dead sensor out, {remedy}, or declare a smaller noise_sd.")
    size = float(np.sqrt(np.mean(y**2))) if len(y) else 0.0
    if size > most:
        rule = f"the outputs' root mean square is {size:.3g}, and latent functions reach {most:.3g} by their prior"
        raise DataError(f"{who}: {rule}; {remedy}.")


def _require_coverage(client: ClientModel, unit: CoregionalUnit) -> None:
    """Refuse a unit most of whose rows are far from all inducing points, and warn where some are."""
    open_variance = unit.design(unit.roles.kernel_mean).conditional.min(axis=0)
    rows, unseen = len(open_variance), int(np.sum(open_variance > _UNSEEN))
    where = "rows lie where the inducing points say next to nothing; spread inducing= over the inputs' range"
    if unseen > rows / 2:
        of = f"{unseen} of {rows}"
        raise DataError(f"client {client.client_id!r}: {of} {where}, closer than the prior's median length-scale.")
    if unseen > rows / 10:
        logger.warning("client %s: %d of %d %s; noise takes what they miss", client.client_id, unseen, rows, where)
