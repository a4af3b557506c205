"""A client's network, read from its declared PyMC model: ``client.view(network_of)``."""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from torch import Tensor, nn

from fedppl.contracts import ClientView
from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.client import ClientModel
from fedppl.nn.functional import (
    call,
    cut,
    gradients,
    host,
    kind_of,
    network_nodes,
    parameter_slices,
    parts_of,
    positions,
)
from fedppl.nn.likelihood import CONTRACT, Categorical, Declared, outcome_of
from fedppl.nn.subnet import Subnetwork
from fedppl.nn.unit import DeclaredNetwork, NetworkUnit, local_prior, log_likelihood, outputs
from fedppl.types import Array, DataError, DeclarationError, Message, Rng

logger = logging.getLogger(__name__)


_lock = threading.Lock()
P = TypeVar("P")
_AS_THEY_ARE = (
    "the weights' variables as they are, and compute in the module, by torch.nn.utils.parametrize for example"
)
_ROUNDING = 1e-12  # of a sum over rows in double precision


class Own(NamedTuple):
    """A client's own network."""

    client: ClientView
    weights: Array  # (d,)
    subnetwork: Subnetwork | None  # its posterior; None where weights are a point


def own_of(client: ClientView, q: Subnetwork) -> Own:
    """A client's own network, by its posterior."""
    return Own(client, q.weights, q)


# A client's own network when the rounds are over, from its personal state and the final message.
PersonaliseFn = Callable[[ClientView, P | None, Message, Rng], Own]


class NetworkResult(NamedTuple):
    """An algorithm's ``Result.family``, which predictions of networks read."""

    personalise: PersonaliseFn[Any]


def network_of(client: ClientModel) -> NetworkUnit:
    """Read a client's declared network, and compare its density with torch's; a closed form's once per template.

    Raises `DeclarationError` where the model declares no network, and `DataError` for rows that it cannot have.
    """
    cache = client.template.functions
    with _lock:
        if "network" not in cache:
            cache["network"] = _declared(client)
    unit = NetworkUnit(client, cache["network"])
    _require_inputs(unit)
    is_first = "network checked" not in cache
    if is_first:
        _require_same_again(unit)
        _require_slopes(unit)
    # A dependence between rows shows at some clients only, and not where there is one row.
    if is_first or isinstance(unit.likelihood, Declared):
        _require_same_density(client, unit)
    if "rows checked" not in cache and _require_rows_alone(unit):
        cache["rows checked"] = True
    if is_first:
        _warn_of_softmax(unit)
        cache["network checked"] = True
    if "scales warned" not in cache and _warn_of_scales(client, unit):
        cache["scales warned"] = True
    return unit


def _warn_of_softmax(unit: NetworkUnit) -> None:
    """Warn where the network gives probabilities in place of logits: predictions would be too flat."""
    if not isinstance(unit.likelihood, Categorical):
        return
    output = host(outputs(unit, unit.initial, unit.X[:3]))
    if np.all(output >= 0) and np.allclose(output.sum(axis=1), 1.0):
        logger.warning(
            "the network's outputs sum to 1, and the likelihood takes them for logits; leave the softmax out"
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
    slices, variables = parameter_slices(node.op.net), (*client.layout.variables, *client.local)
    sizes = {v.name: v.size for v in variables}
    if any(sizes.get(name) != at.stop - at.start for name, at in slices.items()):
        raise DeclarationError(f"{who}: free variables are {list(sizes)}, weights {list(slices)}; {CONTRACT}.")
    if names := [term.name for term in model.potentials if term in parts.site_terms]:
        raise DeclarationError(
            f"{who}: {names} are pm.Potential; put them into a pm.CustomDist or the weights' priors; {CONTRACT}."
        )
    weights_need = set(ancestors(model.replace_rvs_by_values([node.inputs[0]])))
    if read := [v.name for v in parts.data if v in weights_need]:  # which may change them at some clients only
        raise DeclarationError(
            f"{who}: the weights are computed from the data {read}. Pass {_AS_THEY_ARE}; {CONTRACT}."
        )
    replace, inputs = _graph.inputs_for(parts)
    (X_in,) = clone_replace([node.inputs[1]], replace)
    arrays = [*inputs, *client.template.graph.inputs[len(inputs) :]]
    X = np.asarray(interpreted.python_function(arrays, X_in)(*client.inputs))
    likelihood, unknowns, variables_read = outcome_of(client, node, X, who)
    flat = np.concatenate([client.template.functions["shared start"], client.initial])
    starts = cut(flat, {v.name: v.shape for v in variables})
    net = _with_unknowns(node.op.net, {v.name: starts[v.name] for v in unknowns}, who)
    used, above = set(ancestors([X_in])), set(ancestors([model.rvs_to_values[observed]]))
    needed = [(v, i) for v, i in zip(parts.data, inputs, strict=False) if i in used]
    of_outcome = clone_replace(list(variables_read), replace)
    return DeclaredNetwork(
        net=net,
        plain=node.op.net,
        device=node.op.device,
        names=tuple(parameter_slices(net)),
        unknowns=tuple(v.name for v in unknowns),
        shared_at=positions(net, (v.name for v in client.layout.variables)),
        local_at=positions(net, (v.name for v in client.local)),
        likelihood=likelihood,
        labels=tuple(v.name for v in parts.data if likelihood.kind == "categorical" and v in above),
        shared_kinds={rv.name: _kind(rv, model) for rv in parts.shared},
        local_prior=local_prior(who, parts, client.local),
        rows=interpreted.python_function(arrays, [X_in, *of_outcome]),
        inputs=interpreted.python_function([i for _, i in needed], X_in),
        containers={v.name: v.type.dtype for v, _ in needed},
    )


def _kind(rv: Any, model: Any) -> str:
    """A shared variable's distribution; of a transformed normal one, the transform too."""
    kind, transform = kind_of(rv), model.rvs_to_transforms[rv]
    return kind if transform is None or kind != "normal" else f"{kind}, transformed by {type(transform).__name__}"


def _require_same_density(client: ClientModel, unit: NetworkUnit) -> None:
    """Compare the declared log density with torch's, at two random points."""
    rng = np.random.default_rng(0)
    prior = client.layout.prior
    precision = prior.precision if prior.precision.ndim == 1 else np.diag(prior.precision)
    start = prior.linear / precision
    densities = []
    for _ in range(2):
        phi = start + 0.1 * rng.normal(size=len(start))
        theta = client.initial + 0.1 * rng.normal(size=client.local_size)
        declared = client.log_density(phi, theta)
        ours = log_likelihood(unit, unit.weights(phi, theta)) + unit.declared.local_prior.log_density(theta)
        densities.append(np.array([declared, ours]))
        _require_near(unit, "log density is", declared, ours)
    # Beside large outcomes the density's constant hides an error in the weights' part, which a difference shows.
    first, second = densities
    declared, ours = second - first
    _require_near(unit, "log density rises by", declared, ours, _ROUNDING * float(abs(first[1]) + abs(second[1])))


def _require_near(unit: NetworkUnit, what: str, declared: float, ours: float, rounding: float = 0.0) -> None:
    if not abs(declared - ours) <= 1e-7 * (1.0 + abs(ours)) + rounding:
        raise DeclarationError(
            f"{unit.who}: the declared {what} {declared:.8g}, and by rows and local priors {ours:.8g}; "
            f"{CONTRACT}. If weights are doubled or tied, pass {_AS_THEY_ARE}. Else use fedppl.EP()."
        )


def _with_unknowns(net: nn.Module, starts: Mapping[str, Array], who: str) -> nn.Module:
    """A copy of a network with these unknowns as parameters, whose output has columns for them, (n, C + e)."""
    if not starts:
        return net
    extended = copy.deepcopy(net)
    for name, start in starts.items():
        if "." in name or hasattr(extended, name):
            raise DeclarationError(f"{who}: {name!r} is a name of the network's own; call the variable something else.")
        value = torch.from_numpy(np.array(start, dtype=float)).to(torch.get_default_dtype())
        extended.register_parameter(name, nn.Parameter(value))
    extended.register_forward_hook(functools.partial(_beside, tuple(starts)))
    return extended


def _beside(names: tuple[str, ...], module: nn.Module, given: Any, output: Tensor) -> Tensor:
    """Outputs of each row, and the unknowns of these names after them."""
    rows = output.reshape(len(output), -1)
    values = torch.cat([getattr(module, name).reshape(-1) for name in names])
    return torch.cat([rows, values.to(rows.dtype).expand(len(rows), -1)], dim=1)


# Requirements of a network and of its clients' rows, tried on a few rows or read from the declared graph --------------

_LOOKED_AT = 100  # rows that are read
_MOST = 16  # different rows of them, on which the network is tried
_FEWEST = 3  # of these, where rows are wide


def _require_rows_alone(unit: NetworkUnit) -> bool:
    """Refuse a network whose output for a row depends on other rows; whether different rows could be compared.

    Up to 16 of the client, the farthest from 0 among them, are computed together and one by one. A dependence that
    needs more rows than these, or others, is missed.
    """
    X, w = _spread(unit), _near_start(unit)
    if len(X) < 2:
        return False
    together = _output(unit, w, X)
    try:
        alone = np.concatenate([_output(unit, w, row[None]) for row in X])
    except Exception:  # such as batch norm without running moments on one row
        alone = np.zeros(0)
    if not _repeated(together, alone):
        raise DeclarationError(
            f"{unit.who}: the network's output for a row depends on the other rows; use torch.nn.LayerNorm or the like."
        )
    return True


def _spread(unit: NetworkUnit) -> Array:
    """Different rows from all parts of X, the one farthest from 0 first."""
    X = unit.X
    if not len(X):
        return X
    flat = X.reshape(len(X), -1)
    ends = [part(axis=1, initial=0).astype(float) for part in (flat.max, flat.min)]
    far = int(np.argmax(np.maximum(ends[0], -ends[1])))
    some: Array = X[[far, *np.linspace(0, len(X) - 1, min(len(X), _LOOKED_AT)).astype(int)]]
    unlike = np.sort(np.unique(some, axis=0, return_index=True)[1])
    most = max(_FEWEST, min(_MOST, parts_of(unit.net, X.shape)[0].stop))
    tried: Array = some[unlike[np.linspace(0, len(unlike) - 1, min(len(unlike), most)).astype(int)]]
    return tried


def _near_start(unit: NetworkUnit) -> Array:
    """Random weights (d,) near those of the declared network."""
    return unit.initial + 0.1 * np.random.default_rng(0).normal(size=unit.size)


def _output(unit: NetworkUnit, w: Array, X: Array) -> Array:
    with torch.no_grad():
        return host(call(unit.net, unit.state(w, torch.float64), unit.tensor(X, torch.float64)))


_LARGE = 30.0  # root mean square of a column, which is about 1 at unit scale
_ABOUT_OUTPUTS = ("normal", "t", "laplace", "logistic", "cauchy")  # outcomes on the scale of the outputs


def _require_inputs(unit: NetworkUnit) -> None:
    """Refuse inputs that are infinite in single precision, which a saturating layer would hide."""
    if unit.X.dtype.kind != "f":
        return
    beyond = np.argwhere(~(np.abs(unit.X) <= np.finfo(np.float32).max))
    if len(beyond):
        place = tuple(beyond[0].tolist())
        raise DataError(
            f"{unit.who}: the network's inputs hold {unit.X[place]} at {place}, not finite in float32; drop the row."
        )


def _warn_of_scales(client: ClientModel, unit: NetworkUnit) -> bool:
    """Warn of a client's inputs or outcomes that are far from unit scale; whether any are."""
    far = []
    indices = any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in unit.net.modules())
    if not indices and (size := _size(unit.X)) > _LARGE:
        far.append(f"the network's inputs ({size:.3g})")
    parts = client.template.parts
    observed = parts.model.observed_RVs[0]
    value = parts.model.rvs_to_values[observed]
    if kind_of(observed) in _ABOUT_OUTPUTS and value in parts.data:
        if (size := _size(np.asarray(client.arrays[value.name]))) > _LARGE:
            far.append(f"the outcomes {value.name!r} ({size:.3g})")
    if far:
        logger.warning(
            "client %s: %s: far from a root mean square of 1; bring them there by constants that all clients agree on",
            client.client_id,
            " and ".join(far),
        )
    return bool(far)


def _size(values: Array) -> float:
    """The largest root mean square of a column; 0 without columns, or where one is not finite."""
    columns = np.abs(np.asarray(values, dtype=float)).reshape(len(values), -1) if np.ndim(values) else np.zeros((0, 0))
    largest = float(np.max(columns, initial=0.0))
    if not np.isfinite(largest) or largest == 0.0:
        return 0.0
    return largest * float(np.sqrt(np.max(np.mean((columns / largest) ** 2, axis=0))))


_TRIED = 16  # rows in the checks below


def _require_same_again(unit: NetworkUnit) -> None:
    """Refuse a network that draws at random, keeps a state between calls, or overwrites its inputs."""
    net, state = unit.net, unit.state(_near_start(unit), torch.float64)  # once: calls may change the state's buffers

    def rows() -> Tensor:
        return unit.tensor(unit.X[:_TRIED].copy(), torch.float64)

    def output(X: Tensor) -> Array:
        with torch.no_grad():
            return host(call(net, state, X)).copy()

    if not _repeated(output(rows()), output(rows())):
        raise DeclarationError(
            f"{unit.who}: the network gives another output when it is asked again; call net.eval(), or stop what draws."
        )
    reused = rows()
    if not _repeated(output(reused), output(reused)):
        raise DeclarationError(f"{unit.who}: the network writes over its inputs; give its first layer inplace=False.")


def _require_slopes(unit: NetworkUnit) -> None:
    """Refuse a network whose output has no slope in any weight at two points, so that no step would move one."""
    # Not counting unknowns: an unknown sd has a slope in any case.
    rng, parameters = np.random.default_rng(0), set(unit.names) - set(unit.declared.unknowns)
    if not np.any(unit.X[:_TRIED]):  # at rows of zeros a layer without a bias has no slope
        return
    X = unit.tensor(unit.X[:_TRIED].copy(), torch.float64)
    for size in (0.1, 1.0):
        state = unit.state(unit.initial + size * rng.normal(size=unit.size), torch.float64)
        leaves = {name: state[name].detach().requires_grad_() for name in parameters & state.keys()}
        with torch.enable_grad():
            output = call(unit.net, state | leaves, X)
        weights = unit.tensor(rng.normal(size=tuple(output.shape)), torch.float64).to(output.dtype)
        if any(bool(torch.any(slope != 0)) for slope in gradients(output, list(leaves.values()), weights)):
            return
    raise DeclarationError(
        f"{unit.who}: the network's output has no slope in any of its weights; take out .detach(), torch.no_grad() or "
        "the like."
    )


def _repeated(first: Array, second: Array) -> bool:
    return first.shape == second.shape and np.allclose(first, second, 1e-8, 1e-8, equal_nan=True)
