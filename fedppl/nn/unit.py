"""A client's network, rows and likelihood, as torch needs them; and the network's last layer by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import pytensor.tensor as pt
import torch
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from torch import Tensor, nn

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.checks import new_inputs
from fedppl.model.client import ClientModel
from fedppl.nn import functional
from fedppl.nn.functional import Places, by_parts, call, reason
from fedppl.nn.likelihood import CONTRACT, Declared, Likelihood, columns
from fedppl.types import Array, DataError, DeclarationError, Variable

Pair = tuple[Array, Array]  # means of independent weights, and their precisions or sds


class DeclaredNetwork(NamedTuple):
    """A network as a model declares it, the same for all clients of one template."""

    net: nn.Module  # unknowns of the likelihood are parameters of it too
    plain: nn.Module  # the declared one, without unknowns
    device: torch.device  # where it is computed
    names: tuple[str, ...]  # torch's, of all parameters, in the order of the flat vector w (d,)
    unknowns: tuple[str, ...]  # those of these names that belong to the likelihood
    shared_at: Places  # where φ lies in w, (m,)
    local_at: Places  # where θ lies in w, (d_k,)
    likelihood: Likelihood
    labels: tuple[str, ...]  # names of the containers that hold classes
    shared_kinds: Mapping[str, str]  # distribution of each shared variable, as PyTensor names it, by its name
    local_prior: LocalPrior  # of θ, (d_k,)
    rows: Callable[..., Any]  # the client's arrays to X, outcomes and other variables of the likelihood
    inputs: Callable[..., Any]  # new values of the containers below to X
    containers: Mapping[str, str]  # dtypes of the containers from which X is computed, by name


class NetworkUnit:
    """One client as torch sees it: its network as declared, the same for all clients, and its rows X and outcomes y.

    `names` are torch's of all parameters, in the order of the flat vector w (d,); d is `size`. Coordinates of φ (m,)
    and θ (d_k,) lie in w at `shared_at` and `local_at`; θ starts at `start`, PyMC's initial point.
    """

    def __init__(self, client: ClientModel, declared: DeclaredNetwork) -> None:
        self.who, self.declared, self.likelihood = f"client {client.client_id!r}", declared, declared.likelihood
        self.names, self.shared_at, self.local_at = declared.names, declared.shared_at, declared.local_at
        self.size, self.start = len(self.shared_at) + len(self.local_at), client.initial
        self.heads: dict[tuple[str, ...], Any] = {}  # those that `head_of` has read
        self._arrays = client.arrays
        for name in declared.labels:
            classes = np.asarray(self._arrays[name])
            if not np.array_equal(classes, np.round(classes)):
                wrong = classes[classes != np.round(classes)][0]
                raise DataError(
                    f"{self.who}: {name!r} holds {wrong}, and classes are whole numbers from 0; round them."
                )
        self.X: Array
        self.X, *columns_of_y = (np.asarray(array) for array in declared.rows(*client.inputs))
        self.y: Array = columns_of_y[0]
        self._read = self.likelihood.read if isinstance(self.likelihood, Declared) else ()
        if self._read:
            self.y = columns(self.who, self._read, columns_of_y, len(self.X))
        elif len(self.y) != len(self.X):
            raise DataError(f"{self.who}: {len(self.y)} outcomes and {len(self.X)} rows of inputs; give one a row.")

    @property
    def net(self) -> nn.Module:
        """The network, a copy for this thread; parameters and buffers for `call` come from `state`."""
        return functional.own_copy(self.declared.net)

    def place(self, dtype: torch.dtype) -> torch.device:
        """The device of numbers of this type."""
        return functional.placed(self.declared.device, dtype)

    def tensor(self, values: Array, dtype: torch.dtype) -> Tensor:
        """Numbers on the network's device: real ones in this type, whole ones unchanged."""
        return functional.tensor(values, dtype, self.place(dtype))

    def state(self, w: Array, dtype: torch.dtype) -> dict[str, Tensor]:
        """Parameters, from w (d,), and buffers, on the network's device."""
        return functional.state_of(self.net, self.tensor(np.asarray(w, dtype=float), dtype))

    @property
    def initial(self) -> Array:
        """The values of the parameters in the declared network, (d,)."""
        return functional.initial_of(self.declared.net)

    @property
    def inferable_at(self) -> Places:
        """Where weights that can have a posterior lie in φ; unknowns of the likelihood are points."""
        points = functional.positions(self.declared.net, self.declared.unknowns)
        return np.flatnonzero(~np.isin(self.shared_at, points))

    def places(self, which: str | tuple[str, ...]) -> Places:
        """Positions in w of "shared", "local" or "all" weights, or of those named as in torch; refused are none."""
        if isinstance(which, str):
            groups = {"shared": self.shared_at, "local": self.local_at, "all": np.arange(self.size)}
            if which not in groups:
                raise DeclarationError(f'{which!r} must be "shared", "local", "all" or a tuple of {list(self.names)}.')
            positions = groups[which]
        else:
            if unknown := sorted(set(which) - set(self.names)):
                raise DeclarationError(f"{unknown} are no parameters of the network; it has {list(self.names)}.")
            positions = functional.positions(self.declared.net, [name for name in self.names if name in which])
        if not len(positions):
            raise DeclarationError(f"{which!r} names no weights: share others, name some, or pass tune=None.")
        return positions

    def names_at(self, places: Places) -> list[str]:
        """Names of the parameters that have weights at some of these places."""
        chosen = np.isin(np.arange(self.size), places)
        return [name for name, at in functional.parameter_slices(self.declared.net).items() if chosen[at].any()]

    def loaded(self, w: Array) -> nn.Module:
        """A copy of the declared network with these weights."""
        net, flat = copy.deepcopy(self.declared.plain), torch.from_numpy(np.asarray(w)).to(torch.get_default_dtype())
        values = functional.pieces(self.declared.net, flat)
        with torch.no_grad():
            for name, value in net.named_parameters():
                value.copy_(values[name])
        return net

    def weights(self, phi: Any, theta: Any = None) -> Array:
        """w (d,) from φ and θ, or from one number for all of either; by default θ at the start."""
        w = np.empty(self.size)
        w[self.shared_at], w[self.local_at] = phi, self.start if theta is None else theta
        return w

    def inputs(self, new: Mapping[str, Any]) -> tuple[Array, dict[str, Array]]:
        """The network's input for new rows, by the names of the model's containers.

        And the variables that the likelihood reads of these rows beside the network's output, by name.
        """
        containers = self.declared.containers
        if not containers:
            raise DeclarationError('the model holds its inputs as constants; put them into pm.Data("X", X).')
        beside = {read.name: read.dtype for read in self._read if read.by_row and not read.is_outcome}
        values = new_inputs(new, {**containers, **beside}, self._arrays)
        numbers = {read.name: self._arrays[read.name] for read in self._read if not read.by_row}
        others = {name: np.asarray(value) for name, value in (numbers | values).items()}
        return np.asarray(self.declared.inputs(*(values[name] for name in containers))), others


def outputs(unit: NetworkUnit, w: Array, X: Array) -> Tensor:
    """f(X; w), (n, C), in float64."""
    net, state = unit.net, unit.state(w, torch.float64)
    with torch.no_grad():
        return functional.by_parts(net, lambda x: functional.call(net, state, unit.tensor(x, torch.float64)), X)


def log_likelihood(unit: NetworkUnit, w: Array) -> float:
    """log p(y | X, w) in float64."""
    return unit.likelihood.log_density(outputs(unit, w, unit.X), outcomes(unit, torch.float64))


def outcomes(unit: NetworkUnit, dtype: torch.dtype) -> Tensor:
    """The client's outcomes in the form that its likelihood needs."""
    return unit.likelihood.outcomes(unit.y, dtype, unit.place(dtype))


# Declared priors of local weights: independent normals by their moments, others by their density ----------------------

# log p(θ) = −½ Σ_i p_i (θ_i − m_i)² + log p_others(θ) + c


class LocalPrior(NamedTuple):
    """The prior of θ, (d_k,), on the unconstrained space."""

    mean: Array  # of independent normals, (d_k,)
    precision: Array  # of these; 0 where the prior is not normal
    others: Callable[[Array], tuple[Array, Array]] | None  # θ to the others' log density and its slopes (d_k,)

    def log_density(self, theta: Array) -> float:
        """log p(θ), constants included."""
        is_normal, log_precision = self.precision > 0, np.log(np.maximum(self.precision, 1e-300) / (2 * np.pi))
        normal = float(np.sum((0.5 * log_precision - 0.5 * self.precision * (theta - self.mean) ** 2)[is_normal]))
        return normal if self.others is None else normal + float(self.others(theta)[0])

    def penalty(self, theta: Tensor) -> Tensor:
        """Minus the log density of priors that are not normal, differentiable by torch."""
        density: Tensor = functional.Computed.apply(theta, self.others)  # type: ignore[no-untyped-call]
        return -density


def local_prior(who: str, parts: _graph.Parts, local: Sequence[Variable]) -> LocalPrior:
    """Read the priors of local variables, whose parameters are constants."""
    theta, model, others = pt.vector("theta"), parts.model, []
    shapes = {model.rvs_to_values[rv]: variable.shape for rv, variable in zip(parts.local, local, strict=True)}
    means, precisions = [np.zeros(0)], [np.zeros(0)]
    for rv, variable in zip(parts.local, local, strict=True):
        if not (set(ancestors([rv])) - {rv}).isdisjoint([*model.basic_RVs, *parts.data]):
            raise DeclarationError(f"{who}: a parameter of the prior of {rv.name!r} is no constant; {CONTRACT}.")
        mean, precision = np.zeros(()), np.zeros(())
        if functional.kind_of(rv) == "normal" and model.rvs_to_transforms[rv] is None:
            mean, sd = (
                np.asarray(parameter.eval(mode=interpreted.PYTHON_MODE), dtype=float)
                for parameter in rv.owner.op.dist_params(rv.owner)
            )
            precision = sd**-2.0
        else:
            others.append(rv)
        means.append(np.broadcast_to(mean, variable.shape).ravel())
        precisions.append(np.broadcast_to(precision, variable.shape).ravel())
    density = None
    if others:
        replace = {**_graph._constants(model), **functional.cut(theta, shapes)}
        (value,) = clone_replace([model.logp(vars=others, sum=True)], replace, rebuild_strict=False)
        density = interpreted.python_function([theta], [value, pt.grad(value, theta)])
    return LocalPrior(np.concatenate(means), np.concatenate(precisions), density)


# A network's last layer, V z(x; θ) + c, is linear in v = (V, c): its features z are computed once --------------------

_LOOKED_AT = 3


class Head(NamedTuple):
    """The last layer: a linear one."""

    layer: str
    places: Places  # of its weights in w, (d,)
    below: Places  # of all other weights
    matrix: slice  # of V, raveled, in these
    offset: slice  # of c in these; empty without one
    outputs: int


def head_of(unit: NetworkUnit, names: tuple[str, ...]) -> Head:
    """The layer that has these parameters, a linear one whose output is the network's; checked once a network."""
    if names in unit.heads:
        return cast(Head, unit.heads[names])
    if unit.declared.unknowns:
        unknown = list(unit.declared.unknowns)
        raise DeclarationError(f"{unknown} of the likelihood are unknown; declare constants, or use fedppl.nn.FedSI.")
    places, owners = unit.places(names), {name.rpartition(".")[0] for name in names}
    layer = next(iter(owners))
    module = unit.net.get_submodule(layer) if len(owners) == 1 else None
    if not isinstance(module, nn.Linear) or len(names) != len(list(module.parameters())):
        raise DeclarationError(
            f"head={names!r} must be all parameters of one torch.nn.Linear; the network has {list(unit.names)}."
        )
    size, w, X = module.weight.numel(), unit.initial, unit.X[:_LOOKED_AT]
    below = np.setdiff1d(np.arange(unit.size), places)
    head = Head(layer, places, below, slice(0, size), slice(size, len(places)), module.out_features)
    v, ours, why = unit.tensor(w[places], torch.float64), None, ""
    with torch.no_grad():
        output = call(unit.net, unit.state(w, torch.float64), unit.tensor(X, torch.float64))
        try:
            z = features(unit, head, w, X=X, dtype=torch.float64)
            ours = logits(head, z[None], v[None, None])[0, 0].mT
        except Exception as error:  # each network has exceptions of its own
            why = f" ({reason(error)})"
    if ours is None or output.shape != ours.shape or not torch.allclose(output, ours, rtol=1e-9, atol=1e-9):
        raise DeclarationError(
            f"head={names!r} is not the network's last layer, or cannot be taken off it{why}. Name the linear layer "
            "that forward calls last, once, on a matrix, and leave a softmax to the likelihood (logit_p=)."
        )
    unit.heads[names] = head
    return head


def without_head(net: nn.Module, head: Head) -> nn.Module:
    """Remove the head from this module, which then gives features (n, h)."""
    if not head.layer:
        return nn.Identity()
    above, _, name = head.layer.rpartition(".")
    setattr(net.get_submodule(above), name, nn.Identity())
    return net


def features(
    unit: NetworkUnit, head: Head, w: Array, *, X: Array | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The head's inputs (n, h) for the client's rows, or for X."""
    body = without_head(copy.deepcopy(unit.net), head)
    own = {name for name, _ in (*body.named_parameters(), *body.named_buffers())}
    state = {name: value for name, value in unit.state(w, dtype).items() if name in own}
    with torch.no_grad():
        return by_parts(body, lambda rows: call(body, state, rows), unit.tensor(unit.X if X is None else X, dtype))


def expected_loss(unit: NetworkUnit, head: Head, z: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """Mean negative log likelihood over rows and over the draws v (S, d)."""
    return unit.likelihood.each_last(logits(head, z[None], v[None])[0], y.expand(len(v), *y.shape)).mean()


# Heads of K clients on their features z (K, n, h), at S draws v (K, S, d) of each -------------------------------------


def logits(head: Head, z: Tensor, v: Tensor) -> Tensor:
    """Outputs (K, S, C, n), by one product of matrices a client; rows last, which is fastest."""
    clients, draws = v.shape[:2]
    matrix = v[:, :, head.matrix].reshape(clients, draws * head.outputs, -1)
    output = torch.bmm(matrix, z.mT).view(clients, draws, head.outputs, z.shape[1])
    return output + v[:, :, head.offset, None] if head.offset.stop > head.offset.start else output


def head_slopes(likelihood: Likelihood, head: Head, z: Tensor, y: Tensor, share: Tensor, v: Tensor) -> Tensor:
    """Gradients (K, S, d) of clients' mean losses, the losses' slopes times the features; each row has its `share`."""
    output = logits(head, z, v)
    residuals = likelihood.slopes_last(output.flatten(0, 1), of_draws(y, v.shape[1])).view(output.shape)
    # Rows after a client's last have weight 0, even where the density of their outcome is not finite.
    residuals = torch.where(share[:, None, None] > 0, residuals * share[:, None, None], 0.0)
    slopes = torch.bmm(residuals.view(len(z), -1, z.shape[1]), z).view(len(z), v.shape[1], -1)
    return torch.cat([slopes, residuals.sum(3)], 2) if head.offset.stop > head.offset.start else slopes


def of_draws(y: Tensor, draws: int) -> Tensor:
    """Outcomes (K, n, ...) of each client for each of its draws, (K S, n, ...)."""
    return y[:, None].expand(-1, draws, *y.shape[1:]).flatten(0, 1)
