"""A declared linear model of coregionalisation, read from its PyMC graph: what the numerics need of one unit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

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
from fedppl.model.same import graph_key, same_computations
from fedppl.numerics.prior import gaussian_prior
from fedppl.types import Array, DataError, DeclarationError, Layout, Variable

logger = logging.getLogger(__name__)
_lock = threading.Lock()
_CACHED = 16
_SPREADS = 3.0  # of the prior of log σ_m, below which outputs are constant
_FAR = 5.0  # prior sds: of log σ_w, or of a curve at the median of σ_w
_UNSEEN = 0.9  # of a latent function's variance, 1, that remains when all of v is known
_compiled: list[tuple[tuple[Any, tuple[Any, ...], list[Any]], tuple[Callable[..., Any], Callable[..., Any]]]] = []
_NOT_OF_KERNELS = ("v", "slab_sd", "included")
_PARTS = ("projection", "conditional_variance")
_CONTRACT = (
    "a model of coregionalisation declares v, w, noise_sd, residual and slab_sd, and adds its tensors `projection` and "
    "`conditional_variance` by name (models/fedlmc_ss.py in fedppl's repository, which the wheel leaves out, does so)"
)


def roles(layout: Layout) -> Roles:
    """Sort the shared parameters by name: all but v, included and slab_sd are parameters of kernels."""
    variables, places = {variable.name: variable for variable in layout.variables}, layout.slices
    v, slab, included = (variables.get(name) for name in ("v", "slab_sd", "included"))
    if v is None or slab is None or len(v.shape) != 2 or slab.shape != () or slab.transform != "log":
        found = {name: (variable.shape, variable.transform) for name, variable in variables.items()}
        raise DeclarationError(
            f"the shared variables {found} are not v of shape (latent, inducing), slab_sd () on the log scale, kernel "
            'parameters and, for a selection, included; share them, for example shared=["v", "lengthscale", "slab_sd"].'
        )
    if included is not None and (included.shape != v.shape[:1] or not included.binary):
        raise DeclarationError(f"included has shape {included.shape}, and must be {v.shape[0]} Bernoulli variables.")
    if not layout.prior_is_gaussian:
        raise DeclarationError(
            "the shared prior is not Gaussian on the unconstrained space; give v a standard Normal, all else LogNormal."
        )
    precision, linear = layout.prior.precision, layout.prior.linear
    white = np.eye(layout.size)[places["v"]]
    if not np.allclose(precision[places["v"]], white, atol=1e-8) or not np.allclose(linear[places["v"]], 0, atol=1e-8):
        raise DeclarationError(
            'the prior of v is not standard Normal; declare v = pm.Normal("v", 0, 1, dims=("latent", "inducing")).'
        )
    every = np.arange(layout.size)
    taken = {name: every[places[name]] for name in _NOT_OF_KERNELS if name in places}
    kernel = np.setdiff1d(every, np.concatenate(list(taken.values())))
    log_odds = np.full(v.shape[0], np.inf)
    if included is not None:
        log_odds = logit(linear[taken["included"]] / np.diag(precision)[taken["included"]])
    slab = places["slab_sd"].start
    kernel_precision = precision[np.ix_(kernel, kernel)]
    return Roles(
        latents=v.shape[0],
        points=v.shape[1],
        v=taken["v"],
        included=taken.get("included"),
        slab=slab,
        kernel=kernel,
        is_binary=np.isin(every, taken.get("included", ())),
        log_odds=log_odds,
        kernel_mean=np.asarray(np.linalg.solve(kernel_precision, linear[kernel]), dtype=float),
        kernel_precision=kernel_precision,
        slab_prior=LogScale(float(linear[slab] / precision[slab, slab]), float(precision[slab, slab])),
    )


class CoregionalUnit:
    """One unit's side of a linear model of coregionalisation: the design of its rows and the priors it needs."""

    def __init__(self, client: ClientModel) -> None:
        self._client = client
        cache = client.template.functions  # shared by the template's clients
        with _lock:
            if "coregional" not in cache:
                cache["coregional"] = _compile(client)
        self._functions: dict[str, Any] = cache["coregional"]
        self.roles: Roles = roles(client.layout)
        self.noise: LogScale = self._functions["noise"]  # prior of log σ_m
        self.response: Array = np.asarray(client.arrays[self._functions["observed"]], dtype=float)  # y (n,)

    def design(self, kernel: Array, rows: Any = None) -> Design:
        """Projection (L, b, Q), conditional variance (L, b) and responses (b,) of all rows, or of some."""
        response = self.response if rows is None else self.response[rows]
        scale = len(self.response) / max(len(response), 1)
        projection, conditional = self._functions["forward"](kernel, *self._inputs(rows))
        return Design(projection, conditional, response, scale)

    def at(self, kernel: Array, inputs: Mapping[str, Any]) -> Design:
        """The design at new inputs by name, without responses."""
        names, observed = self._functions["names"], self._functions["observed"]
        dtypes = {name: self._functions["dtypes"][name] for name in names if name != observed}
        values = new_inputs(inputs, dtypes, self._client.arrays, unread=(observed,))
        values[observed] = np.zeros(len(values[next(iter(dtypes))]))
        projection, conditional = self._functions["forward"](kernel, *(values[name] for name in names))
        return Design(projection, conditional, values[observed], 1.0)

    def kernel_gradient(self, kernel: Array, projection: Array, conditional: Array, rows: Any = None) -> Array:
        """Pull gradients with respect to the design's two arrays back to the kernel's parameters, (p,)."""
        # Copies in one memory layout: for another one the function would be compiled again.
        cotangents = np.array(projection, order="C"), np.array(conditional, order="C")
        return np.asarray(self._functions["backward"](kernel, *cotangents, *self._inputs(rows)))

    def _inputs(self, rows: Any) -> tuple[Any, ...]:
        inputs = self._client.inputs[: len(self._functions["names"])]
        return inputs if rows is None else tuple(value[rows] for value in inputs)


def unit_of(client: ClientModel) -> CoregionalUnit:
    """What the numerics need of a client, once its declared density agrees with theirs."""
    unit = CoregionalUnit(client)
    cache = client.template.functions
    if "coregional checked" not in cache:  # a template's clients differ in their data alone
        _require_same_density(client, unit)
        cache["coregional checked"] = True
    _require_scale(client, unit)
    _require_coverage(client, unit)
    return unit


def _compile(client: ClientModel) -> dict[str, Any]:
    who, parts, model = f"client {client.client_id!r}", client.template.parts, client.template.parts.model
    missing = [name for name in _PARTS if name not in model.named_vars]
    if missing:
        raise DeclarationError(f"{who}: the model has no {missing[0]!r}; {_CONTRACT}.")
    if len(model.observed_RVs) != 1:
        raise DeclarationError(f"{who}: the model observes {len(model.observed_RVs)} variables, not one.")
    observed = model.rvs_to_values[model.observed_RVs[0]].name
    names = [variable.name for variable in parts.data]
    if observed not in names:
        raise DeclarationError(f"{who}: the output is not observed through a pm.Data container.")
    forward, backward = _design_functions(parts, client.layout.variables)
    return {
        "names": names,
        "dtypes": {v.name: v.type.dtype for v in parts.data},
        "observed": observed,
        "noise": _log_scale(client, "noise_sd"),
        "forward": forward,
        "backward": backward,
    }


def _design_functions(
    parts: _graph.Parts, variables: tuple[Variable, ...]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
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
    for (cached_x, cached_inputs, cached), functions in _compiled:  # of another builder, or with another selection
        same_types = [v.type for v in cached_inputs] == [v.type for v in inputs]
        if same_types and same_computations(
            cached, [projection, conditional], [cached_x, *cached_inputs], [x, *inputs]
        ):
            return functions
    cotangents = pt.dtensor3("projection_cotangent"), pt.dmatrix("conditional_cotangent")
    cost = pt.sum(cotangents[0] * projection) + pt.sum(cotangents[1] * conditional)
    forward = _compiled_function([x, *inputs], [projection, conditional])
    gradient = _compiled_function([x, *cotangents, *inputs], [pt.grad(cost, x, disconnected_inputs="ignore")])

    def backward(*values: Any) -> Any:
        return gradient(*values)[0]

    _compiled.append(((x, inputs, [projection, conditional]), (forward, backward)))
    del _compiled[:-_CACHED]
    return forward, backward


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
    value = parts.model.rvs_to_values[matches[0][1]]
    places = {other.name for other in parts.model.value_vars}
    point = pt.vector("point")
    (logp,) = clone_replace([parts.model.logp(vars=[matches[0][1]], sum=True)], {value: point[0]})
    if any(node.owner is None and node.name in places for node in ancestors([logp]) if node is not point):
        raise DeclarationError(f"{who}: the prior of {name!r} depends on another variable.")
    gradient = interpreted.python_function([point], pt.grad(logp, point))
    prior = gaussian_prior(lambda z: np.asarray(gradient(z)), np.zeros(1))
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
        phi = np.where(unit.roles.is_binary, rng.integers(0, 2, client.shared_size), prior_mean)
        phi += np.where(unit.roles.is_binary, 0.0, 0.3 * rng.normal(size=client.shared_size))
        local = {name: 0.5 * rng.normal(size=size) for name, size in places.items()}
        theta = np.concatenate([local[variable.name] for variable in client.local])
        declared = client.log_density(phi, theta)
        design = unit.design(phi[unit.roles.kernel])
        ours = density(design, unit.roles, phi, local["w"], float(local["noise_sd"][0]), local["residual"], unit.noise)
        if not abs(declared - ours) <= 1e-7 * (1.0 + abs(ours)):
            raise DeclarationError(
                f"{who}: the declared log density is {declared:.8g} where a linear model of "
                f"coregionalisation has {ours:.8g}; {_CONTRACT}, with y ~ Normal(Σ w included projection v + "
                "residual √Σ (w included)² conditional_variance, noise_sd). For other models use fedppl.EP()."
            )


def _require_scale(client: ClientModel, unit: CoregionalUnit) -> None:
    """Refuse outputs whose scale is not that of the priors, and constant ones: a dead sensor outweighs all others."""
    y, noise, slab = unit.response, unit.noise, unit.roles.slab_prior
    least = float(np.exp(noise.mean - _SPREADS / np.sqrt(noise.precision)))
    spread = np.exp(_FAR / np.sqrt(slab.precision))  # next to 1 where σ_w is fixed
    most = float(np.exp(slab.mean) * max(spread, _FAR * np.sqrt(unit.roles.latents)))
    remedy = "bring outputs to mean 0 and unit scale by constants that all units agree on"
    if len(y) > 2 and np.std(y) < least:
        raise DataError(
            f"client {client.client_id!r}: the {len(y)} outputs vary by sd {np.std(y):.3g}, below what the prior of "
            f"noise_sd allows, {least:.3g}. Leave a dead sensor out, {remedy}, or declare a smaller noise_sd."
        )
    size = float(np.sqrt(np.mean(y**2))) if len(y) else 0.0
    if size > most:
        raise DataError(
            f"client {client.client_id!r}: the outputs' root mean square is {size:.3g}, and latent functions reach "
            f"{most:.3g} by their prior; {remedy}."
        )


def _require_coverage(client: ClientModel, unit: CoregionalUnit) -> None:
    """Refuse a unit most of whose rows are far from all inducing points, and warn where some are."""
    open_variance = unit.design(unit.roles.kernel_mean).conditional.min(axis=0)
    rows, unseen = len(open_variance), int(np.sum(open_variance > _UNSEEN))
    if unseen > rows / 2:
        raise DataError(
            f"client {client.client_id!r}: {unseen} of {rows} rows lie where the inducing points say next to nothing. "
            "Spread inducing= over the inputs' range, closer than the prior's median length-scale."
        )
    if unseen > rows / 10:
        logger.warning(
            "client %s: %d of %d rows lie where the inducing points say next to nothing; noise takes what they miss. "
            "Spread inducing= over the range of the inputs",
            *(client.client_id, unseen, rows),
        )
