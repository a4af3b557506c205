"""A declared linear model of coregionalisation, read from its PyMC graph: what the numerics need of one unit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors

from fedppl.coregional.bound import Design, density
from fedppl.coregional.roles import NOT_OF_KERNELS, LogScale, Roles, roles
from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model import same as _same
from fedppl.model.arrays import new_inputs
from fedppl.model.client import ClientModel
from fedppl.model.graph_key import graph_key
from fedppl.model.numba_mode import inlined, mode, without_notices
from fedppl.model.pack import unpacked_function
from fedppl.numerics.prior import gaussian_prior
from fedppl.types import Array, DataError, DeclarationError, Variable

logger = logging.getLogger(__name__)
_lock = threading.Lock()
_KEPT = 16
_SPREADS = 3.0  # of the prior of log σ_m, below which outputs are constant
_FAR = 5.0  # prior sds: of log σ_w, or of a curve at the median of σ_w
_UNSEEN = 0.9  # of a latent function's variance, 1, that is left when all of v is known
_compiled: list[tuple[tuple[Any, tuple[Any, ...], list[Any]], tuple[Callable[..., Any], Callable[..., Any]]]] = []
_PARTS = ("projection", "conditional_variance")
_CONTRACT = (
    "a model of coregionalisation declares v, w, noise_sd, residual and slab_sd, and adds its tensors `projection` and "
    "`conditional_variance` by name (models/fedlmc_ss.py in fedppl's repository, which the wheel leaves out, does so)"
)


class CoregionalUnit:
    """One unit's side of a linear model of coregionalisation: the design of its rows and the priors it needs.

    Attributes
    ----------
    roles
        Where each kind of shared parameter lies in φ.
    noise
        Prior of log σ_m.
    response
        y (n,).
    """

    def __init__(self, client: ClientModel) -> None:
        self._client = client
        kept = client.template.functions
        with _lock:
            if "coregional" not in kept:
                kept["coregional"] = _compile(client)
        self._functions: dict[str, Any] = kept["coregional"]  # of the template, shared by its clients
        self.roles: Roles = roles(client.layout)
        self.noise: LogScale = self._functions["noise"]
        self.response: Array = np.asarray(client.arrays[self._functions["observed"]], dtype=float)

    def design(self, kernel: Array, rows: Any = None) -> Design:
        """Projection (L, b, Q), conditional variance (L, b) and responses (b,) of all rows, or of some."""
        response = self.response if rows is None else self.response[rows]
        scale = len(self.response) / max(len(response), 1)
        projection, conditional = self._functions["forward"](kernel, *self._inputs(rows))
        return Design(projection, conditional, response, scale)

    def at(self, kernel: Array, inputs: Mapping[str, Any]) -> Design:
        """The design at new inputs by name, without responses."""
        names, observed = self._functions["names"], self._functions["observed"]
        wanted = {name: self._functions["dtypes"][name] for name in names if name != observed}
        values = new_inputs(inputs, wanted, self._client.arrays, unread=(observed,))
        values[observed] = np.zeros(len(values[next(iter(wanted))]))
        projection, conditional = self._functions["forward"](kernel, *(values[name] for name in names))
        return Design(projection, conditional, values[observed], 1.0)

    def kernel_gradient(self, kernel: Array, projection: Array, conditional: Array, rows: Any = None) -> Array:
        """Pull gradients with respect to the design's two arrays back to the kernel's parameters, (p,)."""
        # Copies in one memory layout: for another one the function would be compiled again.
        cotangents = np.array(projection, order="C"), np.array(conditional, order="C")
        return np.asarray(self._functions["backward"](kernel, *cotangents, *self._inputs(rows)))

    def _inputs(self, rows: Any) -> tuple[Any, ...]:
        held = self._client.inputs[: len(self._functions["names"])]
        return held if rows is None else tuple(value[rows] for value in held)


def unit_of(client: ClientModel) -> CoregionalUnit:
    """What the numerics see of a client, after its density was held against the model's; once per client."""
    unit = CoregionalUnit(client)
    known = client.template.functions
    if "coregional checked" not in known:  # a template's clients differ in their data alone
        _require_same_density(client, unit)
        known["coregional checked"] = True
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
    """The design and the way back through it, as functions of the kernels' parameters and the data.

    A builder made anew finds them again, and so does one with the same kernels and another selection.
    """
    model = parts.model
    x = pt.vector("kernel")
    replace, inputs = _graph._inputs_for(parts)
    places = [i for i, variable in enumerate(variables) if variable.name not in NOT_OF_KERNELS]
    of_kernels = parts._replace(shared=tuple(parts.shared[i] for i in places), local=())
    values, _, _ = _graph.flat_values(of_kernels, x, [variables[i] for i in places], ())
    for variable, rv in zip(variables, parts.shared, strict=True):
        if variable.name in NOT_OF_KERNELS:  # a design that reads one has another density than is declared
            value = model.rvs_to_values[rv]
            values[value] = pt.zeros(variable.shape, dtype=value.type.dtype)
    outputs = model.replace_rvs_by_values([model[name] for name in _PARTS])
    projection, conditional = clone_replace(outputs, {**replace, **values})
    for (known_x, known_inputs, known), functions in _compiled:
        same_types = [v.type for v in known_inputs] == [v.type for v in inputs]
        if same_types and _same.same_computations(
            known, [projection, conditional], [known_x, *known_inputs], [x, *inputs]
        ):
            return functions
    cotangents = pt.dtensor3("projection_cotangent"), pt.dmatrix("conditional_cotangent")
    cost = pt.sum(cotangents[0] * projection) + pt.sum(cotangents[1] * conditional)
    forward = _compiled_function([x, *inputs], [projection, conditional])
    gradient = _compiled_function([x, *cotangents, *inputs], [pt.grad(cost, x, disconnected_inputs="ignore")])

    def backward(*values: Any) -> Any:
        return gradient(*values)[0]

    _compiled.append(((x, inputs, [projection, conditional]), (forward, backward)))
    del _compiled[:-_KEPT]
    return forward, backward


def _compiled_function(inputs: list[Any], outputs: list[Any]) -> Callable[..., Any]:
    """A function compiled once for all processes, found again by the graph as it was declared."""

    def compiled() -> tuple[Callable[..., Any], bool]:
        return inlined(pytensor.function(inputs, outputs, mode=mode(), on_unused_input="ignore").vm.jit_fn)

    with without_notices():
        types = [(v.type.dtype, v.type.ndim) for v in inputs]
        return unpacked_function(compiled, types, graph_key(inputs, outputs))


def _log_scale(client: ClientModel, name: str) -> LogScale:
    """Prior N(m, s²) of the log of a local scale parameter."""
    who, parts = f"client {client.client_id!r}", client.template.parts
    found = [(variable, rv) for variable, rv in zip(client.local, parts.local, strict=True) if variable.name == name]
    if not found or found[0][0].shape != () or found[0][0].transform != "log":
        raise DeclarationError(
            f"{who}: {name!r} must be a local scalar on the log scale, such as "
            f'pm.LogNormal("{name}", ...); {_CONTRACT}.'
        )
    value = parts.model.rvs_to_values[found[0][1]]
    places = {other.name for other in parts.model.value_vars}
    point = pt.vector("point")
    (logp,) = clone_replace([parts.model.logp(vars=[found[0][1]], sum=True)], {value: point[0]})
    if any(above.owner is None and above.name in places for above in ancestors([logp]) if above is not point):
        raise DeclarationError(f"{who}: the prior of {name!r} depends on another variable.")
    gradient = interpreted.python_function([point], pt.grad(logp, point))
    prior = gaussian_prior(lambda z: np.asarray(gradient(z)), np.zeros(1))
    if prior is None:
        raise DeclarationError(f"{who}: the prior of {name!r} is not LogNormal; its mode has a closed form then.")
    return LogScale(float(prior.linear[0] / prior.precision[0, 0]), float(prior.precision[0, 0]))


def _require_same_density(client: ClientModel, unit: CoregionalUnit) -> None:
    """Hold the declared log density against the one that the algorithm is for, at two random points."""
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
    """Refuse outputs of another scale than the priors', and constant ones.

    A unit without any noise, a dead sensor, has a bound beyond all others' if it uses no latent function at all, and
    the selection would drop every function for its sake.
    """
    y, noise, slab = unit.response, unit.noise, unit.roles.slab_prior
    least = float(np.exp(noise.mean - _SPREADS / np.sqrt(noise.precision)))
    spread = np.exp(_FAR / np.sqrt(slab.precision))  # next to 1 where σ_w is held
    most = float(np.exp(slab.mean) * max(spread, _FAR * np.sqrt(unit.roles.latents)))
    remedy = "bring outputs to mean 0 and unit scale by constants that all units agree on"
    if len(y) > 2 and np.std(y) < least:
        raise DataError(
            f"client {client.client_id!r}: the {len(y)} outputs vary by sd {np.std(y):.3g}, where the prior of "
            f"noise_sd leaves nothing below {least:.3g}. Leave a unit of constant outputs out (a dead sensor?), or "
            f"{remedy}, or declare a smaller noise_sd."
        )
    size = float(np.sqrt(np.mean(y**2))) if len(y) else 0.0
    if size > most:
        raise DataError(
            f"client {client.client_id!r}: the outputs' root mean square is {size:.3g}, and latent functions reach "
            f"{most:.3g} by their prior; {remedy}."
        )


def _require_coverage(client: ClientModel, unit: CoregionalUnit) -> None:
    """Refuse a unit most of whose rows no inducing point can see, and warn of one with some."""
    open_variance = unit.design(unit.roles.kernel_mean).conditional.min(axis=0)
    rows, unseen = len(open_variance), int(np.sum(open_variance > _UNSEEN))
    if unseen > rows / 2:
        raise DataError(
            f"client {client.client_id!r}: {unseen} of {rows} rows lie where the inducing points say next to "
            "nothing of the latent functions: less than a tenth of their variance at the prior's median length-scale. "
            "Spread inducing= over the range of the inputs, closer than a length-scale, or state the length-scale in "
            "units of the inputs."
        )
    if unseen > rows / 10:
        logger.warning(
            "client %s: %d of %d rows lie where the inducing points say next to nothing; noise takes what they miss. "
            "Spread inducing= over the range of the inputs",
            client.client_id,
            unseen,
            rows,
        )
