"""A client's network, read from its declared PyMC model: ``client.view(network_of)``."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.random import Generator
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors

from fedppl.contracts import ClientView
from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.client import ClientModel
from fedppl.nn.calls import kind_of, network_nodes
from fedppl.nn.declared import Declared
from fedppl.nn.devices import host
from fedppl.nn.functional import Places, call, parameter_slices
from fedppl.nn.head import Head, find_head
from fedppl.nn.likelihood import Categorical
from fedppl.nn.outcome import CONTRACT, outcome_of
from fedppl.nn.required import (
    require_inputs,
    require_no_potential,
    require_own_weights,
    require_rows_alone,
    require_same_again,
    require_slopes,
    warn_of_scales,
)
from fedppl.nn.subnet import Subnetwork
from fedppl.nn.unit import DeclaredNetwork, NetworkUnit, local_prior, log_likelihood
from fedppl.types import Array, DeclarationError, Message, Variable

logger = logging.getLogger(__name__)
_lock = threading.Lock()
P = TypeVar("P")
_ROUNDING = 1e-12  # of a sum over rows in double precision


@dataclass(frozen=True, eq=False)
class Network:
    """A client's network."""

    unit: NetworkUnit  # the network, rows and likelihood
    # θ (d_k,) where all clients start: PyMC's initial point, the mean of the prior unless it has an `initval`
    start: Array
    _heads: dict[tuple[str, ...], Head] = field(default_factory=dict, init=False, repr=False)

    def at(self, phi: Any) -> Array:
        """All weights (d,) from the shared ones (m,), with local ones where all clients start."""
        return self.unit.weights(np.asarray(phi, dtype=float), self.start)

    def places(self, which: str | tuple[str, ...]) -> Places:
        """Positions in w of "shared", "local" or "all" weights, or of those named as in torch.

        Raises `DeclarationError` for a name that the network does not have, or where there are no such
        weights.
        """
        unit, everything = self.unit, np.arange(self.unit.size)
        if isinstance(which, str):
            groups = {"shared": unit.shared_at, "local": unit.local_at, "all": everything}
            if which not in groups:
                raise DeclarationError(
                    f'{which!r} must be "shared", "local", "all" or a tuple of names: {list(unit.names)}.'
                )
            found = groups[which]
        else:
            unknown = sorted(set(which) - set(unit.names))
            if unknown:
                raise DeclarationError(f"{unknown} are no parameters of the network; it has {list(unit.names)}.")
            parts = [everything[where] for name, where in parameter_slices(unit.net).items() if name in which]
            found = np.concatenate([everything[:0], *parts])
        if not len(found):
            raise DeclarationError(
                f"{which!r} names no weights: share others in FederatedModel(shared=...), or name some."
            )
        return np.asarray(found, dtype=np.int64)

    def head(self, names: tuple[str, ...]) -> Head:
        """The last layer, which has these parameters and no others; checked once a network."""
        known = self._heads.get(names)
        if known is None:
            known = self._heads[names] = find_head(self.unit, names, self.places(names), self.unit.held)
        return known


class Own(NamedTuple):
    """A client's own network."""

    client: ClientView
    weights: Array  # (d,)
    subnetwork: Subnetwork | None  # its posterior, or None where weights are a point


# A client's own network when the rounds are over, from what it kept and the final message.
PersonaliseFn = Callable[[ClientView, P | None, Message, Generator], Own]


class NetworkResult(NamedTuple):
    """What networks' predictions read of an algorithm: its ``Result.family``."""

    personalise: PersonaliseFn[Any]


def network_of(client: ClientModel) -> Network:
    """Read a client's declared network; its density is held against torch's, a closed form's once per template.

    Raises
    ------
    DeclarationError
        Where the model is no network's.
    DataError
        Where inputs are infinite in single precision, or outcomes are not such as the model has.
    """
    known = client.template.functions
    with _lock:
        if "network" not in known:
            known["network"] = _declared(client)
    unit = NetworkUnit(client.client_id, known["network"], client.arrays, client.inputs)
    require_inputs(client.client_id, unit.X)
    if "network checked" not in known:
        require_same_again(unit, client.client_id)
        require_slopes(unit, client.client_id)
    # Whether rows depend on each other shows at some clients and not at others: not where there is one row.
    if "network checked" not in known or isinstance(unit.likelihood, Declared):
        _require_same_density(client, unit)
    if "rows checked" not in known and require_rows_alone(unit, client.client_id):
        known["rows checked"] = True
    if "network checked" not in known:
        _warn_of_softmax(unit)
        known["network checked"] = True
    if "scales told" not in known and warn_of_scales(client, unit):
        known["scales told"] = True
    return Network(unit, client.initial)


def _warn_of_softmax(unit: NetworkUnit) -> None:
    """Probabilities where logits should be flatten everything that is predicted, and nothing else shows it."""
    if not isinstance(unit.likelihood, Categorical):
        return
    with torch.no_grad():
        state = unit.state(unit.held, torch.float64)
        output = host(call(unit.net, state, unit.tensor(unit.X[:3], torch.float64)))
    if np.all(output >= 0) and np.allclose(output.sum(axis=1), 1.0):
        logger.warning(
            "the network's outputs are positive and sum to 1, as if it ended in a softmax, and the declared likelihood "
            "takes them for logits; leave the softmax out"
        )


def _declared(client: ClientModel) -> DeclaredNetwork:
    parts = client.template.parts
    model, who = parts.model, f"client {client.client_id!r}"
    if len(model.observed_RVs) != 1:
        raise DeclarationError(
            f"{who}: {len(model.observed_RVs)} observed variables, and a network's has one; {CONTRACT}."
        )
    observed = model.observed_RVs[0]
    nodes = network_nodes([observed])
    if not nodes:
        raise DeclarationError(f"{who}: no network stands above {observed.name!r}; {CONTRACT}.")
    node = nodes[0]
    slices = parameter_slices(node.op.net)
    variables = (*client.layout.variables, *client.local)
    sizes = {v.name: v.size for v in variables}
    if any(sizes.get(name) != at.stop - at.start for name, at in slices.items()):
        raise DeclarationError(
            f"{who}: free variables are {[v.name for v in variables]}, weights {list(slices)}; {CONTRACT}."
        )
    require_no_potential(parts, who)
    require_own_weights(parts, node.inputs[0], slices, {v.name: v.shape for v in variables}, who)
    replace, inputs = _graph._inputs_for(parts)
    value = model.rvs_to_values[observed]
    (X_in,) = clone_replace([node.inputs[1]], replace)
    given = dict(zip(parts.data, client.inputs, strict=False))
    read = outcome_of(client, node, given, who)
    net = _with_unknowns(node.op.net, {v.name: _start(client, v.name) for v in read.unknowns}, who)
    slices = parameter_slices(net)

    def places(chosen: Sequence[Variable]) -> Places:
        return np.concatenate([np.zeros(0, int), *(slices[v.name].start + np.arange(v.size) for v in chosen)])

    used, above = set(ancestors([X_in])), set(ancestors([value]))
    needed = [(v, i) for v, i in zip(parts.data, inputs, strict=False) if i in used]
    prior = local_prior(who, parts, client.local)
    columns = read.likelihood.read if isinstance(read.likelihood, Declared) else ()
    told = clone_replace(list(read.variables), replace)
    return DeclaredNetwork(
        net=net,
        plain=node.op.net,
        device=node.op.device,
        names=tuple(slices),
        unknowns=tuple(v.name for v in read.unknowns),
        shared_at=places(client.layout.variables),
        local_at=places(client.local),
        likelihood=read.likelihood,
        labels=tuple(v.name for v in parts.data if read.likelihood.kind == "categorical" and v in above),
        shared_kinds={rv.name: _kind(rv, model) for rv in parts.shared},
        local_prior=prior,
        rows=interpreted.python_function([*inputs, *client.template.graph.inputs[len(inputs) :]], [X_in, *told]),
        inputs=interpreted.python_function([i for _, i in needed], X_in),
        containers={v.name: v.type.dtype for v, _ in needed},
        beside={what.name: what.dtype for what in columns if what.by_row and not what.is_outcome},
        held=tuple(what.name for what in columns if not what.by_row),
    )


def _kind(rv: Any, model: Any) -> str:
    """A shared variable's distribution, with the transform of one that is normal before it."""
    kind, transform = kind_of(rv), model.rvs_to_transforms[rv]
    return kind if transform is None or kind != "normal" else f"{kind}, transformed by {type(transform).__name__}"


def _start(client: ClientModel, name: str) -> Array:
    """Where a variable starts, on the unconstrained space."""
    for variables, start in (
        (client.layout.variables, client.template.functions["shared start"]),
        (client.local, client.initial),
    ):
        first = 0
        for variable in variables:
            if variable.name == name:
                return np.asarray(start[first : first + variable.size]).reshape(variable.shape)
            first += variable.size
    raise KeyError(name)


def _require_same_density(client: ClientModel, unit: NetworkUnit) -> None:
    """Hold the declared log density against torch's, at two random points."""
    rng = np.random.default_rng(0)
    prior = client.layout.prior
    precision = prior.precision if prior.precision.ndim == 1 else np.diag(prior.precision)
    start = prior.linear / precision
    found: list[tuple[float, float]] = []
    for _ in range(2):
        phi = start + 0.1 * rng.normal(size=len(start))
        theta = client.initial + 0.1 * rng.normal(size=client.local_size)
        declared = client.log_density(phi, theta)
        ours = log_likelihood(unit, unit.weights(phi, theta)) + unit.declared.local_prior.log_density(theta)
        found.append((declared, ours))
        _require_near(client.client_id, "log density is", declared, ours)
    # Beside large outcomes a density's constant hides what weights change, and a difference shows it.
    (first, our_first), (second, our_second) = found
    lost = _ROUNDING * (abs(our_first) + abs(our_second))
    _require_near(client.client_id, "log density rises by", second - first, our_second - our_first, lost)


def _require_near(client_id: str, what: str, declared: float, ours: float, lost: float = 0.0) -> None:
    if not abs(declared - ours) <= 1e-7 * (1.0 + abs(ours)) + lost:
        raise DeclarationError(
            f"client {client_id!r}: the declared {what} {declared:.8g} where a network's outcomes, row by row, and its "
            f"local priors have {ours:.8g}; {CONTRACT}. For other models use fedppl.EP(local=fedppl.NUTS())."
        )


_NAMES = "fedppl_unknowns"


def _with_unknowns(net: torch.nn.Module, starts: Mapping[str, Array], who: str) -> torch.nn.Module:
    """Copy a network whose output has columns for these unknowns, (n, C + e), and that has them as parameters.

    Raises `DeclarationError` for a name that the module cannot have for a parameter.
    """
    if not starts:
        return net
    found = copy.deepcopy(net)
    for name, start in starts.items():
        if "." in name or hasattr(found, name):
            raise DeclarationError(f"{who}: {name!r} is a name of the network's own; call the variable something else.")
        value = torch.from_numpy(np.array(start, dtype=float)).to(torch.get_default_dtype())
        found.register_parameter(name, torch.nn.Parameter(value))
    setattr(found, _NAMES, tuple(starts))
    found.register_forward_hook(_beside)
    return found


def _beside(module: torch.nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
    """Outputs of each row, and the unknowns after them."""
    rows = output.reshape(len(output), -1)
    values = torch.cat([getattr(module, name).reshape(-1) for name in getattr(module, _NAMES)])
    return torch.cat([rows, values.to(rows.dtype).expand(len(rows), -1)], dim=1)
