"""A client's network, rows and likelihood: what torch needs of one client."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from fedppl.model.inputs import new_inputs
from fedppl.nn.functional import Places, call, cast, own_copy, state_of
from fedppl.types import Array, DataError


class Likelihood(NamedTuple):
    """How outputs meet outcomes."""

    family: str  # "categorical", or "normal"
    noise_sd: float  # of "normal"


class DeclaredNetwork(NamedTuple):
    """What a declared model says of a network, alike for all clients of one template."""

    net: torch.nn.Module
    names: tuple[str, ...]  # torch's, of all parameters, in the order of the flat vector w (d,)
    shared_at: Places  # where φ lies in w, (m,)
    local_at: Places  # where θ lies in w, (d_k,)
    likelihood: Likelihood
    labels: tuple[str, ...]  # names of the containers that classes come from
    shared_kinds: Mapping[str, str]  # distribution of each shared variable, as PyTensor names it, by its name
    local_mean: Array  # of the independent normal prior of θ, (d_k,)
    local_precision: Array  # likewise
    rows: Callable[..., Any]  # the client's arrays to (X, y)
    inputs: Callable[..., Any]  # new values of the containers below to X
    containers: Mapping[str, str]  # dtypes of the containers that X is made of, by name


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
        X, y = declared.rows(*inputs)
        self.X: Array = np.asarray(X)
        self.y: Array = np.asarray(y)
        self._arrays = arrays

    @property
    def net(self) -> torch.nn.Module:
        """The network, a copy for this thread."""
        return own_copy(self.declared.net)

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
        return torch.cat([value.detach().double().ravel() for value in self.declared.net.parameters()]).cpu().numpy()

    def loaded(self, w: Array) -> torch.nn.Module:
        """A copy of the network with these weights."""
        net = copy.deepcopy(self.declared.net)
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
        values = new_inputs(inputs, self.declared.containers, self._arrays)
        return np.asarray(self.declared.inputs(*values.values()))


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
