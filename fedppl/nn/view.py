"""A client's network, read from its declared PyMC model: ``client.view(network_of)``."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytensor.tensor as pt
import torch
from numpy.random import Generator
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors

from fedppl.contracts import ClientView
from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.client import ClientModel
from fedppl.nn.declared import Declared
from fedppl.nn.devices import CPU, host
from fedppl.nn.functional import Places, call, kind_of, network_nodes, parameter_slices, parts_of
from fedppl.nn.head import Head, find_head
from fedppl.nn.likelihood import Categorical
from fedppl.nn.outcome import CONTRACT, outcome_of
from fedppl.nn.subnet import Subnetwork
from fedppl.nn.unit import DeclaredNetwork, NetworkUnit, local_prior, log_likelihood
from fedppl.types import Array, DataError, DeclarationError, Message, Variable

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


# What a network and the rows of its clients have to be, tried on a few of them or read off the declared graph ---------

_LOOKED_AT = 100  # rows that are read
_MOST = 16  # of them, all different, that the network is tried on
_FEWEST = 3  # where rows are wide
_NEAR = 1e-3  # size of the steps away from the one row that a client has
_FAR = 10.0  # factor that takes rows out of what the client has


def require_rows_alone(unit: NetworkUnit, client_id: str) -> bool:
    """Refuse a network that has another output for a row where other rows stand beside it.

    Up to 16 different rows, spread over all that the client has, the farthest from 0 among them, are computed together
    and one by one. On the CPU real inputs are tried ten times as large too, and where all rows are equal a few others
    close by: numbers that a client does not have could end the process of another device.

    Not seen is what shows at none of these: a dependence on more rows than those, on rows of another size or type than
    the client's, on pairs of rows that are not among them, or at weights far from the network's own.

    Returned is whether rows of the client's own were compared; where it has no two different ones, another client may.
    Raises `DeclarationError` where outputs differ.
    """
    X = _spread(unit)
    w = unit.held + 0.1 * np.random.default_rng(0).normal(size=unit.size)
    can_make_up = len(X) > 0 and X.dtype.kind == "f" and unit.place(torch.float64) == CPU
    if len(X) > 1:
        is_same = _agree(unit, w, X) and not (can_make_up and _differ(unit, w, _FAR * X))
    else:
        is_same = not (can_make_up and _differ(unit, w, _near(X[0])))
    if not is_same:
        raise DeclarationError(
            f"client {client_id!r}: the network's output for a row depends on the other rows, and batches, "
            "curvatures and predictions take rows one by one. Use layers that normalise or attend within a row "
            "(torch.nn.LayerNorm, torch.nn.GroupNorm, batch norm with running moments after net.eval())."
        )
    return len(X) > 1


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
    found: Array = some[unlike[np.linspace(0, len(unlike) - 1, min(len(unlike), most)).astype(int)]]
    return found


def _near(row: Array) -> Array:
    """A row, and others that are a little larger."""
    steps = np.random.default_rng(0).uniform(size=(_MOST, *row.shape))
    steps[0] = 0.0
    return np.asarray(row + _NEAR * (1.0 + np.abs(row)) * steps, dtype=row.dtype)


def _output(unit: NetworkUnit, w: Array, X: Array) -> Array:
    """What the network gives for these rows in one call, however wide they are."""
    with torch.no_grad():
        return host(call(unit.net, unit.state(w, torch.float64), unit.tensor(X, torch.float64)))


def _agree(unit: NetworkUnit, w: Array, X: Array) -> bool:
    """Whether rows together have the outputs that they have alone."""
    together = _output(unit, w, X)
    return _same(unit, w, X, together, 1e-8)


def _differ(unit: NetworkUnit, w: Array, X: Array) -> bool:
    """The contrary for rows that are made up: the network need not take them, nor need its outputs be finite."""
    try:
        together = _output(unit, w, X)
    except Exception:  # as codes that an embedding does not have
        return False
    if not np.all(np.isfinite(together)):
        return False
    return not _same(unit, w, X, together, 1e-8 * max(1.0, float(np.max(np.abs(together), initial=0.0))))


def _same(unit: NetworkUnit, w: Array, X: Array, together: Array, rounding: float) -> bool:
    try:
        alone = np.concatenate([_output(unit, w, row[None]) for row in X])
    except Exception:  # as batch norm without running moments on one row
        return False
    return together.shape == alone.shape and np.allclose(together, alone, 1e-8, rounding, equal_nan=True)


_LARGE = 30.0  # root mean square of a column; of unit scale about 1
_ABOUT_OUTPUTS = ("normal", "t", "laplace", "logistic", "cauchy")  # outcomes of the outputs' own size


def require_inputs(client_id: str, X: Array) -> None:
    """Refuse inputs that are infinite in single precision: a layer that saturates has an output, and no slopes."""
    if X.dtype.kind != "f":
        return
    beyond = ~(np.abs(X) <= np.finfo(np.float32).max)
    if np.any(beyond):
        place = tuple(int(i) for i in np.argwhere(beyond)[0])
        raise DataError(
            f"client {client_id!r}: the network's inputs hold {X[place]} in row {place[0]}, at index {place}, and "
            "networks are trained in single precision, whose numbers end at 3.4e38; drop or impute such rows, or "
            "scale the inputs."
        )


def warn_of_scales(client: ClientModel, unit: NetworkUnit) -> bool:
    """Say in the log which of a client's numbers are far from unit scale, and whether any are."""
    far = []
    indices = any(isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) for part in unit.net.modules())
    if not indices and (size := _size(unit.X)) > _LARGE:
        far.append(f"the network's inputs ({size:.3g})")
    model = client.template.parts.model
    observed = model.observed_RVs[0]
    value = model.rvs_to_values[observed]
    if kind_of(observed) in _ABOUT_OUTPUTS and value in client.template.parts.data:
        if (size := _size(np.asarray(client.arrays[value.name]))) > _LARGE:
            far.append(f"the outcomes {value.name!r} ({size:.3g})")
    if far:
        logger.warning(
            "client %s: %s: the root mean square of the largest column is far from 1, for which the steps of networks "
            "are made, and a fit may end before it is anywhere near; bring inputs and outcomes to mean 0 and unit "
            "scale by constants that all clients agree on",
            client.client_id,
            " and ".join(far),
        )
    return bool(far)


def _size(values: Array) -> float:
    """The largest root mean square of a column; 0 where there are none, or where they are not finite."""
    columns = np.abs(np.asarray(values, dtype=float)).reshape(len(values), -1) if np.ndim(values) else np.zeros((0, 0))
    largest = float(np.max(columns, initial=0.0))
    if not np.isfinite(largest) or largest == 0.0:
        return 0.0
    return largest * float(np.sqrt(np.max(np.mean((columns / largest) ** 2, axis=0))))


_SIZES = (1.0, 1e3)  # of weights that are tried


def require_no_potential(parts: _graph.Parts, who: str) -> None:
    """Refuse a ``pm.Potential`` that is a client's own: neither rows nor priors would have it.

    Raises `DeclarationError` naming it.
    """
    if beside := [term.name for term in parts.model.potentials if term in parts.site_terms]:
        raise DeclarationError(
            f"{who}: {beside} {'is' if len(beside) == 1 else 'are'} pm.Potential of the client's own weights or data, "
            "and an algorithm for networks has the outcome and priors of variables alone. Put such a term into the "
            f"outcome's distribution, pm.CustomDist for example, or into the weights' priors; {CONTRACT}."
        )


def require_own_weights(
    parts: _graph.Parts, flat: Any, slices: Mapping[str, slice], shapes: Mapping[str, tuple[int, ...]], who: str
) -> None:
    """Refuse weights that are computed from the variables of their names, or from other ones.

    The network is given `flat`, (d,), in which weights of each name lie in `slices`; their variables have `shapes`.
    """
    (flat,) = parts.model.replace_rvs_by_values([flat])
    if read := [v.name for v in parts.data if v in set(ancestors([flat]))]:
        raise DeclarationError(f"{who}: the network's weights are computed from the data {read}; {CONTRACT}.")
    values = {rv.name: parts.model.rvs_to_values[rv] for rv in (*parts.shared, *parts.local)}
    rng, wrong = np.random.default_rng(0), set[str]()
    for size in _SIZES:
        # Numbers that single precision has too.
        given = {name: (size * rng.normal(size=shapes[name])).astype(np.float32) for name in slices}
        replace = {values[name]: pt.constant(one.astype(values[name].type.dtype)) for name, one in given.items()}
        (told,) = clone_replace([flat], replace, rebuild_strict=False)
        found = np.asarray(told.eval(mode=interpreted.PYTHON_MODE))
        wrong |= {name for name, one in given.items() if not np.array_equal(found[slices[name]], one.ravel())}
    if wrong:
        raise DeclarationError(
            f"{who}: the network is given other weights for {[name for name in slices if name in wrong]} than the "
            "variables of these names, and algorithms train those. Pass the variables as they are, and put what is "
            f"computed from them into the module, torch.nn.utils.parametrize for example; {CONTRACT}."
        )


_TRIED = 16  # rows


def require_same_again(unit: NetworkUnit, client_id: str) -> None:
    """Refuse a network that draws at random, remembers earlier calls, or writes over its inputs.

    Raises `DeclarationError` where a second call on the same rows, with the same weights and buffers, has another
    output.
    """
    X, w = unit.X[:_TRIED], unit.held + 0.1 * np.random.default_rng(0).normal(size=unit.size)
    net, state = unit.net, unit.state(w, torch.float64)

    def output(rows: torch.Tensor) -> Array:
        with torch.no_grad():
            return host(call(net, state, rows)).copy()

    def rows() -> torch.Tensor:
        return unit.tensor(X.copy(), torch.float64)

    first = output(rows())
    if not _repeated(first, output(rows())):
        raise DeclarationError(
            f"client {client_id!r}: the network gives another output when it is asked again, so that it is no function "
            "of weights and inputs: it draws at random, as dropout does within recurrent and attention layers, or "
            "remembers earlier calls. Call net.eval() before you declare the model, and take out what still draws."
        )
    kept = rows()
    if not _repeated(output(kept), output(kept)):
        raise DeclarationError(
            f"client {client_id!r}: the network writes over its inputs, which are a client's data; give its first "
            "layer inplace=False, or begin its forward with x = x.clone()."
        )


def require_slopes(unit: NetworkUnit, client_id: str) -> None:
    """Refuse a network of which no weight changes the output by a slope: no step would move any.

    Raises `DeclarationError` where slopes of the outputs are all 0 or missing, at two points.
    """
    # An unknown sd has a slope whatever becomes of the weights.
    rng, parameters = np.random.default_rng(0), set(unit.names) - set(unit.declared.unknowns)
    if not np.any(unit.X[:_TRIED]):  # a layer without a constant has no slope there
        return
    X = unit.tensor(unit.X[:_TRIED].copy(), torch.float64)
    for size in (0.1, 1.0):
        state = unit.state(unit.held + size * rng.normal(size=unit.size), torch.float64)
        leaves = {name: state[name].detach().requires_grad_() for name in parameters & state.keys()}
        with torch.enable_grad():
            output = call(unit.net, state | leaves, X)
        if output.requires_grad:
            weights = unit.tensor(rng.normal(size=tuple(output.shape)), torch.float64)
            slopes = torch.autograd.grad(output, list(leaves.values()), weights.to(output.dtype), allow_unused=True)
            if any(slope is not None and bool(torch.any(slope != 0)) for slope in slopes):
                return
    raise DeclarationError(
        f"client {client_id!r}: the network's output has no slope in any of its weights, so that training would leave "
        "them where they start; take out what cuts slopes off: .detach(), torch.no_grad(), sign, round or argmax."
    )


def _repeated(one: Array, other: Array) -> bool:
    return one.shape == other.shape and np.allclose(one, other, 1e-8, 1e-8, equal_nan=True)
