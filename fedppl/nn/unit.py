"""A client's network, rows and likelihood, read from its declared PyMC model: what torch needs of one client."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from pytensor.graph.basic import Constant
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors

from fedppl.model import _graph
from fedppl.model._enrolment import held_exactly
from fedppl.nn.functional import call, cast, own_copy, parameter_slices, state_of
from fedppl.types import Array, DataError, DeclarationError

if TYPE_CHECKING:
    from fedppl.model.declaration import ClientModel

__all__ = ["Likelihood", "NetworkUnit", "log_likelihood", "read_network"]

logger = logging.getLogger(__name__)
_lock = threading.Lock()
_CONTRACT = (
    "a network's client declares weights = fedppl.nn.parameters(net), output = fedppl.nn.module(net, weights, X), "
    "and one outcome, pm.Categorical(logit_p=output) or pm.Normal(output, constant)"
)


class Likelihood(NamedTuple):
    """How outputs meet outcomes."""

    family: str  # "categorical", or "normal"
    noise_sd: float  # of "normal"


class NetworkUnit:
    """One client as torch sees it.

    Attributes
    ----------
    names
        Torch's names of all parameters, in the order of the flat vector w (d,).
    shared_at, local_at
        Where coordinates of φ (m,) and of θ (d_k,) lie in w.
    likelihood
        How outputs meet outcomes.
    shared_kinds
        Distribution of each shared variable, as PyTensor names it, by the variable's name.
    local_mean, local_precision
        Of the declared, independent normal prior of θ, (d_k,).
    """

    def __init__(self, client: ClientModel, read: Mapping[str, Any]) -> None:
        self._net: torch.nn.Module = read["net"]
        self.names: tuple[str, ...] = read["names"]
        self.shared_at, self.local_at = read["shared_at"], read["local_at"]
        self.likelihood: Likelihood = read["likelihood"]
        self.shared_kinds: Mapping[str, str] = read["shared_kinds"]
        self.local_mean, self.local_precision = read["local_prior"]
        for name in read["labels"]:
            given = np.asarray(client.arrays[name])
            if not np.array_equal(given, np.round(given)):
                raise DataError(
                    f"client {client.client_id!r}: {name!r} holds {given[given != np.round(given)][0]}, and classes "
                    "are whole numbers from 0; a categorical outcome would cut off what follows the point."
                )
        X, y = read["rows"](*client.inputs)
        self.X: Array = np.asarray(X)
        self.y: Array = np.asarray(y)
        self._client, self._inputs_of = client, read["inputs_of"]

    @property
    def net(self) -> torch.nn.Module:
        """The network, a copy for this thread."""
        return own_copy(self._net)

    @property
    def size(self) -> int:
        """Number of weights, d."""
        return len(self.shared_at) + len(self.local_at)

    @property
    def held(self) -> Array:
        """The values that the network itself holds, (d,)."""
        return torch.cat([value.detach().double().ravel() for value in self._net.parameters()]).cpu().numpy()

    def loaded(self, w: Array) -> torch.nn.Module:
        """A copy of the network with these weights."""
        net = copy.deepcopy(self._net)
        flat = torch.from_numpy(np.asarray(w)).to(torch.get_default_dtype())
        torch.nn.utils.vector_to_parameters(flat, net.parameters())
        return net

    def weights(self, phi: Array, theta: Array) -> Array:
        """w (d,) from φ and θ."""
        w = np.empty(self.size)
        w[self.shared_at], w[self.local_at] = phi, theta
        return w

    def at(self, inputs: Mapping[str, Any]) -> Array:
        """The network's input for new rows, by the names of the model's containers."""
        function, names = self._inputs_of
        if not isinstance(inputs, Mapping):
            raise DataError(f'new inputs are {type(inputs).__name__}; pass a mapping from name to array: {{"X": ...}}.')
        if set(inputs) != set(names):
            raise DataError(
                f"new inputs {sorted(inputs)} must be {sorted(names)}, what the network's input is made of."
            )
        held = {name: self._client.arrays[name] for name in names}
        containers = {v.name: v.type.dtype for v in self._client.template.parts.data}
        values = []
        for name in names:
            new = np.asarray(inputs[name])
            if not (np.issubdtype(new.dtype, np.number) or new.dtype == bool) or np.iscomplexobj(new):
                raise DataError(f"new inputs {name!r} have dtype {new.dtype}; pass real numbers.")
            if new.ndim != np.ndim(held[name]) or new.shape[1:] != np.shape(held[name])[1:] or not len(new):
                raise DataError(
                    f"new inputs {name!r} have shape {new.shape}, the client's have {np.shape(held[name])}; give them "
                    "at least one row and the same columns."
                )
            if not np.all(np.isfinite(new)):
                raise DataError(f"new inputs {name!r} hold missing or infinite values; drop or impute them.")
            dtype = containers[name]
            whole = np.dtype(dtype).kind in "iu"
            values.append(held_exactly(f"new inputs {name!r}", new, dtype) if whole else new.astype(dtype))
        return np.asarray(function(*values))


def log_likelihood(unit: NetworkUnit, w: Array) -> float:
    """log p(y | X, w) in float64."""
    with torch.no_grad():
        state = state_of(unit.net, torch.from_numpy(np.asarray(w, dtype=float)))
        output = call(unit.net, state, cast(torch.from_numpy(unit.X), torch.float64))
    y = torch.from_numpy(unit.y)
    if unit.likelihood.family == "categorical":
        return -float(torch.nn.functional.cross_entropy(output, y.long(), reduction="sum"))
    sd = unit.likelihood.noise_sd
    square = float(((y.view(output.shape) - output) ** 2).sum())
    return -0.5 * square / sd**2 - y.numel() * float(np.log(sd) + 0.5 * np.log(2 * np.pi))


def read_network(client: ClientModel) -> NetworkUnit:
    """What torch needs of a client, after its declared density was held against it; the latter once per template."""
    known = client.template.functions
    with _lock:
        if "network" not in known:
            known["network"] = _read(client)
    unit = NetworkUnit(client, known["network"])
    if "network checked" not in known:
        _require_same_density(client, unit)
        _warn_of_softmax(unit)
        known["network checked"] = True
    return unit


def _warn_of_softmax(unit: NetworkUnit) -> None:
    """Probabilities where logits should be flatten everything that is predicted, and nothing else shows it."""
    if unit.likelihood.family != "categorical":
        return
    with torch.no_grad():
        state = state_of(unit.net, torch.from_numpy(unit.held))
        output = call(unit.net, state, cast(torch.from_numpy(unit.X[:3]), torch.float64))
    if bool(torch.all(output >= 0)) and bool(torch.allclose(output.sum(1), torch.ones(len(output)).double())):
        logger.warning(
            "the network's outputs are positive and sum to 1, as if it ended in a softmax, and the declared likelihood "
            "takes them for logits; leave the softmax out"
        )


def _read(client: ClientModel) -> dict[str, Any]:
    parts = client.template.parts
    model, who = parts.model, f"client {client.client_id!r}"
    if len(model.observed_RVs) != 1:
        raise DeclarationError(
            f"{who}: {len(model.observed_RVs)} observed variables, and a network's has one; {_CONTRACT}."
        )
    observed = model.observed_RVs[0]
    node = _graph.network_node(observed)
    if node is None:
        raise DeclarationError(f"{who}: no network stands above {observed.name!r}; {_CONTRACT}.")
    net = node.op.net
    slices = parameter_slices(net)
    names = tuple(slices)
    variables = (*client.layout.variables, *client.local)
    if {v.name for v in variables} != set(names) or any(
        v.size != slices[v.name].stop - slices[v.name].start for v in variables
    ):
        raise DeclarationError(
            f"{who}: free variables are {[v.name for v in variables]}, weights {list(names)}; {_CONTRACT}."
        )

    def places(chosen: Any) -> Any:
        return np.concatenate([np.zeros(0, int), *(slices[v.name].start + np.arange(v.size) for v in chosen)])

    replace, inputs = _graph._inputs_for(parts)
    value = model.rvs_to_values[observed]
    X_in, y_in = clone_replace([node.inputs[1], value], replace)
    used = set(ancestors([X_in]))
    needed = [(v.name, i) for v, i in zip(parts.data, inputs, strict=False) if i in used]
    labels = [v.name for v in parts.data if v in set(ancestors([value]))]
    likelihood = _likelihood(who, observed)
    return {
        "labels": labels if likelihood.family == "categorical" else [],
        "net": net,
        "names": names,
        "shared_at": places(client.layout.variables),
        "local_at": places(client.local),
        "likelihood": likelihood,
        "shared_kinds": {rv.name: _kind(rv) for rv in parts.shared},
        "local_prior": _local_prior(who, parts.local),
        "rows": _graph.python_function([*inputs, *client.template.graph.inputs[len(inputs) :]], [X_in, y_in]),
        "inputs_of": (_graph.python_function([i for _, i in needed], X_in), [name for name, _ in needed]),
    }


def _kind(rv: Any) -> str:
    """PyTensor's name of a distribution: "normal", "laplace"."""
    return getattr(rv.owner.op, "name", None) or type(rv.owner.op).__name__


def _likelihood(who: str, observed: Any) -> Likelihood:
    kind = _kind(observed)
    parameters = observed.owner.op.dist_params(observed.owner)
    if kind == "categorical":
        return Likelihood("categorical", np.nan)
    if kind == "normal":
        values = np.unique(_constant(parameters[1], f"{who}: the sd of {observed.name!r}"))
        if len(values) == 1:
            return Likelihood("normal", float(values[0]))
    raise DeclarationError(f"{who}: the outcome {observed.name!r} is {kind}; {_CONTRACT}.")


def _constant(value: Any, what: str) -> Array:
    """The value of a parameter that is equal at all clients: it hangs on no variable, and on no data."""
    if any(v.owner is None and not isinstance(v, Constant) for v in ancestors([value])):
        raise DeclarationError(f"{what} is no constant; {_CONTRACT}.")
    return np.asarray(value.eval(), dtype=float)


def _local_prior(who: str, local: Any) -> tuple[Array, Array]:
    """Means and precisions of independent normal priors of local weights, (d_k,) each."""
    means, precisions = [np.zeros(0)], [np.zeros(0)]
    for rv in local:
        if _kind(rv) != "normal":
            raise DeclarationError(f"{who}: the prior of {rv.name!r} is not normal ({_kind(rv)}); {_CONTRACT}.")
        what = f"{who}: a parameter of the prior of {rv.name!r}"
        mu, sd = (_constant(value, what) for value in rv.owner.op.dist_params(rv.owner))
        shape = tuple(rv.type.shape)
        means.append(np.broadcast_to(mu, shape).ravel())
        precisions.append(np.broadcast_to(sd, shape).ravel() ** -2.0)
    return np.concatenate(means), np.concatenate(precisions)


def _require_same_density(client: ClientModel, unit: NetworkUnit) -> None:
    """Hold the declared log density against torch's, at two random points."""
    rng = np.random.default_rng(0)
    prior = client.layout.prior
    precision = prior.precision if prior.precision.ndim == 1 else np.diag(prior.precision)
    start = prior.linear / precision
    for _ in range(2):
        phi = start + 0.1 * rng.normal(size=len(start))
        theta = client.initial + 0.1 * rng.normal(size=client.local_size)
        declared = client.log_density(phi, theta)
        apart = theta - unit.local_mean
        local = -0.5 * np.sum(apart**2 * unit.local_precision) + 0.5 * np.sum(
            np.log(unit.local_precision / (2 * np.pi))
        )
        ours = log_likelihood(unit, unit.weights(phi, theta)) + float(local)
        if not abs(declared - ours) <= 1e-7 * (1.0 + abs(ours)):
            raise DeclarationError(
                f"client {client.client_id!r}: the declared log density is {declared:.8g} where a network with "
                f"independent normal weights has {ours:.8g}; {_CONTRACT}. For other models use "
                "fedppl.EP(local=fedppl.NUTS())."
            )
