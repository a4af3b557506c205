"""A client's network, rows and likelihood: what torch needs of one client."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
import torch
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors

from fedppl.model import graph as _graph
from fedppl.model import interpreted
from fedppl.model.arrays import new_inputs
from fedppl.nn.declared import Declared, columns
from fedppl.nn.devices import host, placed, tensor
from fedppl.nn.functional import Places, call, kind_of, own_copy, parameter_slices, parts_of, state_of
from fedppl.nn.likelihood import Likelihood
from fedppl.nn.outcome import CONTRACT
from fedppl.types import Array, DataError, DeclarationError, Variable


class DeclaredNetwork(NamedTuple):
    """What a declared model says of a network, alike for all clients of one template."""

    net: torch.nn.Module  # unknowns of the likelihood are parameters of it too
    plain: torch.nn.Module  # as it was declared
    device: torch.device  # where it is computed
    names: tuple[str, ...]  # torch's, of all parameters, in the order of the flat vector w (d,)
    unknowns: tuple[str, ...]  # those of them that are the likelihood's
    shared_at: Places  # where φ lies in w, (m,)
    local_at: Places  # where θ lies in w, (d_k,)
    likelihood: Likelihood
    labels: tuple[str, ...]  # names of the containers that classes come from
    shared_kinds: Mapping[str, str]  # distribution of each shared variable, as PyTensor names it, by its name
    local_prior: LocalPrior  # of θ, (d_k,)
    rows: Callable[..., Any]  # the client's arrays to X, and what outcomes are read from
    inputs: Callable[..., Any]  # new values of the containers below to X
    containers: Mapping[str, str]  # dtypes of the containers that X is made of, by name
    beside: Mapping[str, str]  # of those that the likelihood reads by rows beside the outcome
    held: tuple[str, ...]  # names of those of which it reads one number, a client's own


class NetworkUnit:
    """One client as torch sees it.

    Attributes
    ----------
    declared
        What is the same for all clients.
    X, y
        The client's rows and outcomes.
    """

    def __init__(
        self, client_id: str, declared: DeclaredNetwork, arrays: Mapping[str, Any], inputs: tuple[Any, ...]
    ) -> None:
        self.declared = declared
        for name in declared.labels:
            given = np.asarray(arrays[name])
            if not np.array_equal(given, np.round(given)):
                raise DataError(
                    f"client {client_id!r}: {name!r} holds {given[given != np.round(given)][0]}, and classes "
                    "are whole numbers from 0; a categorical outcome would cut off what follows the point."
                )
        X, *told = (np.asarray(one) for one in declared.rows(*inputs))
        self.X: Array = X
        self.y: Array = told[0]
        if isinstance(declared.likelihood, Declared):
            self.y = columns(client_id, declared.likelihood.read, told, len(X))
        elif len(self.y) != len(X):
            raise DataError(
                f"client {client_id!r}: {len(self.y)} outcomes and {len(X)} rows of inputs; give one outcome for each "
                "row."
            )
        self._arrays = arrays

    @property
    def net(self) -> torch.nn.Module:
        """The network, a copy for this thread; parameters and buffers for `call` come from `state`."""
        return own_copy(self.declared.net)

    def place(self, dtype: torch.dtype) -> torch.device:
        """Where numbers of this type are."""
        return placed(self.declared.device, dtype)

    def tensor(self, values: Array, dtype: torch.dtype) -> torch.Tensor:
        """Numbers where the network is computed: real ones in this type, whole ones as they are."""
        return tensor(values, dtype, self.place(dtype))

    def state(self, w: Array, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Parameters, from w (d,), and buffers, where the network is computed."""
        return state_of(self.net, self.tensor(np.asarray(w, dtype=float), dtype))

    @property
    def names(self) -> tuple[str, ...]:
        """Torch's names of all parameters, in the order of the flat vector w (d,)."""
        return self.declared.names

    @property
    def shared_at(self) -> Places:
        """Where coordinates of φ lie in w, (m,)."""
        return self.declared.shared_at

    @property
    def local_at(self) -> Places:
        """Where coordinates of θ lie in w, (d_k,)."""
        return self.declared.local_at

    @property
    def likelihood(self) -> Likelihood:
        """How outputs meet outcomes."""
        return self.declared.likelihood

    @property
    def size(self) -> int:
        """Number of weights, d."""
        return len(self.shared_at) + len(self.local_at)

    @property
    def held(self) -> Array:
        """The values that the network itself holds, (d,)."""
        return np.concatenate([host(value).ravel() for value in self.declared.net.parameters()])

    @property
    def inferable_at(self) -> Places:
        """Where shared weights lie in φ; unknowns of the likelihood are points."""
        slices = parameter_slices(self.declared.net)
        points = [np.arange(slices[name].start, slices[name].stop) for name in self.declared.unknowns]
        return np.flatnonzero(~np.isin(self.shared_at, np.concatenate([np.zeros(0, int), *points])))

    def loaded(self, w: Array) -> torch.nn.Module:
        """A copy of the network, as it was declared, with these weights."""
        net, flat = copy.deepcopy(self.declared.plain), torch.from_numpy(np.asarray(w)).to(torch.get_default_dtype())
        slices = parameter_slices(self.declared.net)
        with torch.no_grad():
            for name, value in net.named_parameters():
                value.copy_(flat[slices[name]].view_as(value))
        return net

    def weights(self, phi: Array, theta: Array) -> Array:
        """w (d,) from φ and θ."""
        w = np.empty(self.size)
        w[self.shared_at], w[self.local_at] = phi, theta
        return w

    def at(self, inputs: Mapping[str, Any]) -> Array:
        """The network's input for new rows, by the names of the model's containers."""
        values = self._new(inputs)
        return np.asarray(self.declared.inputs(*(values[name] for name in self.declared.containers)))

    def others(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """What the likelihood reads of new rows beside the network's output, by name."""
        values = self._new(inputs)
        held = {name: self._arrays[name] for name in self.declared.held}
        return {name: np.asarray(value) for name, value in (held | values).items()}

    def _new(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if not self.declared.containers:
            raise DeclarationError(
                "the model holds its inputs as constants, so that there is no place for new ones; put them into "
                'pm.Data, X = pm.Data("X", X), and fit again.'
            )
        return new_inputs(inputs, {**self.declared.containers, **self.declared.beside}, self._arrays)


def log_likelihood(unit: NetworkUnit, w: Array) -> float:
    """log p(y | X, w) in float64."""
    with torch.no_grad():
        net, state = unit.net, unit.state(w, torch.float64)
        outputs = [call(net, state, unit.tensor(unit.X[rows], torch.float64)) for rows in parts_of(net, unit.X.shape)]
    return unit.likelihood.log_density(torch.cat(outputs), outcomes(unit, torch.float64))


def outcomes(unit: NetworkUnit, dtype: torch.dtype) -> torch.Tensor:
    """The client's outcomes, as its likelihood takes them."""
    return unit.likelihood.outcomes(unit.y, dtype, unit.place(dtype))


# Declared priors of what is local to a client's network: independent normals by themselves, others by their density

# log p(θ) = −½ Σ_i p_i (θ_i − m_i)² + log p_others(θ) + c


class LocalPrior(NamedTuple):
    """The prior of θ, (d_k,), on the unconstrained space."""

    mean: Array  # of independent normals, (d_k,)
    precision: Array  # likewise; 0 where the prior is another one
    others: Callable[[Array], tuple[Array, Array]] | None  # θ to the others' log density and its slopes (d_k,)

    def log_density(self, theta: Array) -> float:
        """log p(θ), constants included."""
        normal, told = self.precision > 0, np.log(np.maximum(self.precision, 1e-300) / (2 * np.pi))
        found = float(np.sum((0.5 * told - 0.5 * self.precision * (theta - self.mean) ** 2)[normal]))
        return found if self.others is None else found + float(self.others(theta)[0])

    def penalty(self, theta: torch.Tensor) -> torch.Tensor:
        """Minus the log density of what is not normal, which torch can follow."""
        found: torch.Tensor = _Density.apply(theta, self.others)  # type: ignore[no-untyped-call]
        return -found


class _Density(torch.autograd.Function):
    """A log density of θ (d_k,) by its function."""

    @staticmethod
    def forward(context: Any, theta: torch.Tensor, density: Any) -> torch.Tensor:
        """Compute the density, and the slopes that `backward` needs."""
        value, slopes = density(host(theta))
        context.save_for_backward(tensor(np.asarray(slopes), theta.dtype, theta.device))
        return tensor(np.asarray(value), theta.dtype, theta.device).reshape(())

    @staticmethod
    def backward(context: Any, upstream: torch.Tensor) -> Any:
        """Slopes of θ."""
        (slopes,) = context.saved_tensors
        return slopes * upstream, None


def local_prior(who: str, parts: _graph.Parts, local: Sequence[Variable]) -> LocalPrior:
    """Read the priors of local variables.

    Raises `DeclarationError` for a prior with a parameter that is no constant.
    """
    means, precisions, others = [np.zeros(0)], [np.zeros(0)], []
    for rv, variable in zip(parts.local, local, strict=True):
        _require_constants(who, parts, rv)
        if kind_of(rv) == "normal" and parts.model.rvs_to_transforms[rv] is None:
            mu, sd = (np.asarray(one.eval(), dtype=float) for one in rv.owner.op.dist_params(rv.owner))
            means.append(np.broadcast_to(mu, variable.shape).ravel())
            precisions.append(np.broadcast_to(sd, variable.shape).ravel() ** -2.0)
        else:
            others.append(rv)
            means.append(np.zeros(variable.size))
            precisions.append(np.zeros(variable.size))
    density = _density(parts, local, others) if others else None
    return LocalPrior(np.concatenate(means), np.concatenate(precisions), density)


def _density(
    parts: _graph.Parts, local: Sequence[Variable], others: Sequence[Any]
) -> Callable[[Array], tuple[Array, Array]]:
    theta = pt.vector("theta")
    values, first = {}, 0
    for rv, variable in zip(parts.local, local, strict=True):
        values[parts.model.rvs_to_values[rv]] = theta[first : first + variable.size].reshape(variable.shape)
        first += variable.size
    replace = {**_graph._constants(parts.model), **values}
    (value,) = clone_replace([parts.model.logp(vars=list(others), sum=True)], replace, rebuild_strict=False)
    return interpreted.python_function([theta], [value, pt.grad(value, theta)])


def _require_constants(who: str, parts: _graph.Parts, rv: Any) -> None:
    """A prior that is equal at all clients, and says nothing of other variables."""
    above = set(ancestors([rv])) - {rv}
    if not above.isdisjoint([*parts.model.basic_RVs, *parts.data]):
        raise DeclarationError(f"{who}: a parameter of the prior of {rv.name!r} is no constant; {CONTRACT}.")
