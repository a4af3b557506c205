"""Clients with one network in a batch: which go together, their rows one after the other, and the forward of all."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedppl.contracts import ClientView
from fedppl.nn.functional import buffers_of, call, gradients, pieces
from fedppl.nn.likelihood import Categorical
from fedppl.nn.unit import NetworkUnit, outcomes
from fedppl.nn.view import network_of

FEWEST = 4  # clients in a batch: fewer are faster one by one
_WEIGHTS = 24e6  # bytes of weights, moments and slopes in a batch: more is slower than what a cache holds
_ROWS = 128e6  # bytes of rows in a batch, and of what the widest layer makes of them
_BYTES = 4  # of a number in float32
# Elementwise layers: they treat the rows of many clients as those of one.
_ELEMENTWISE = (
    torch.nn.Identity,
    torch.nn.ReLU,
    torch.nn.Tanh,
    torch.nn.Sigmoid,
    torch.nn.GELU,
    torch.nn.SiLU,
    torch.nn.ELU,
    torch.nn.LeakyReLU,
    torch.nn.Softplus,
)
# Parameters and buffers of all clients (K, ...) by torch's names, and inputs (K, b, ...), to outputs (K, b, C).
Forward = Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor]

_lock = threading.Lock()
_known: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


class Stack(NamedTuple):
    """Rows of clients with one network."""

    units: tuple[NetworkUnit, ...]  # from the one with most rows to the one with fewest
    net: torch.nn.Module  # of this thread
    X: torch.Tensor  # rows of all, one client after the other, (N, ...)
    y: torch.Tensor
    rows: NDArray[np.int64]  # numbers of rows, (K,)
    first: NDArray[np.int64]  # where each client's rows begin, (K,)

    def client(self, k: int) -> slice:
        """Where the rows of a client lie."""
        return slice(int(self.first[k]), int(self.first[k] + self.rows[k]))


def stacked(units: Sequence[NetworkUnit], dtype: torch.dtype = torch.float32) -> Stack:
    """Put the rows of a group of `groups` one after the other."""
    rows = np.array([len(unit.X) for unit in units], dtype=np.int64)
    X = torch.cat([unit.tensor(unit.X, dtype) for unit in units])
    y = torch.cat([outcomes(unit, dtype) for unit in units])
    return Stack(tuple(units), units[0].net, X, y, rows, np.concatenate([[0], np.cumsum(rows)[:-1]]))


def groups(clients: Sequence[ClientView]) -> list[list[int]]:
    """Places of clients that are trained in one batch: of one network, by falling numbers of rows, few to a cache."""
    units = [client.view(network_of).unit for client in clients]
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, unit in enumerate(units):
        kind = (id(unit.declared), unit.X.shape[1:], unit.X.dtype, unit.y.shape[1:], unit.y.dtype)
        alike.setdefault(kind, []).append(place)
    found: list[list[int]] = []
    for places in alike.values():
        if len(places) < FEWEST or not all(len(units[place].X) for place in places) or not _takes(units[places[0]]):
            continue
        left = sorted(places, key=lambda place: (-len(units[place].X), place))
        while left:
            count = _count(units[left[0]], len(left))
            found.append(left[:count])
            left = left[count:]
    return [places for places in found if len(places) >= FEWEST]


def _count(largest: NetworkUnit, waiting: int) -> int:
    """Number of clients in the next batch: even ones, within the limits, the first having most rows."""
    # Rows are kept as they are and as layers show them; of weights there are two moments and slopes beside them.
    widest = max(
        int(np.prod(largest.X.shape[1:])), *(value.shape[0] for value in largest.net.parameters() if value.ndim)
    )
    limit = min(_WEIGHTS / (4 * _BYTES * largest.size), _ROWS / (_BYTES * len(largest.X) * widest))
    most = max(1, int(limit))
    return int(np.ceil(waiting / np.ceil(waiting / most)))


def _takes(unit: NetworkUnit) -> bool:
    """Whether a batch computes what the network does, found out once a network."""
    net = unit.declared.net
    with _lock:
        if net not in _known:
            _known[net] = _agrees(unit)
    return _known[net]


def _agrees(unit: NetworkUnit) -> bool:
    """Try two clients' weights on two rows each. Convolutions take half as long again in a batch as one by one."""
    if any(isinstance(layer, torch.nn.modules.conv._ConvNd) for layer in unit.net.modules()):
        return False
    X = unit.tensor(np.repeat(unit.X[:1], 2, axis=0) if len(unit.X) < 2 else unit.X[:2], torch.float64)
    held = unit.tensor(unit.held, torch.float64)
    each = [pieces(unit.net, w) for w in (held, 1.5 * held + 0.01)]
    names = {name: torch.stack([state[name] for state in each]).requires_grad_() for name in each[0]}
    buffers = buffers_of(unit.net, torch.float64, X.device)
    try:
        # A warning is torch's remark that it goes client by client after all.
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("error")
            both = torch.stack([X, X.flip(0)])
            output = forward(unit.net, torch.float64, X.device)(names, both)
            gradients(output.sum(), list(names.values()))
            wanted = [call(unit.net, {**w, **buffers}, x.clone()) for w, x in zip(each, (X, X.flip(0)), strict=True)]
    except Exception:  # layers that go through time, change their input or look at values: one by one
        return False
    if not torch.equal(both, torch.stack([X, X.flip(0)])) or (
        output.ndim != 3 and isinstance(unit.likelihood, Categorical)
    ):
        return False
    again = torch.stack(wanted)
    return output.shape == again.shape and torch.allclose(output, again, rtol=1e-9, atol=1e-9)


def forward(net: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> Forward:
    """The network for stacked weights: by layers where all are linear or elementwise, else by `torch.func.vmap`."""
    layers = _layers(net, "")
    if layers is None:
        buffers = buffers_of(net, dtype, device)
        return torch.func.vmap(lambda state, X: call(net, {**state, **buffers}, X))

    def through(state: dict[str, torch.Tensor], X: torch.Tensor) -> torch.Tensor:
        for name, layer in layers:
            if isinstance(layer, torch.nn.Linear):
                X = _linear(X, state[f"{name}weight"], state.get(f"{name}bias"))
            else:
                X = X.flatten(2) if isinstance(layer, torch.nn.Flatten) else layer(X)
        return X

    return through


def _linear(X: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """X (K, b, i) by weights (K, o, i), and bias (K, o)."""
    return torch.bmm(X, weight.mT) if bias is None else torch.baddbmm(bias[:, None], X, weight.mT)


def _layers(net: torch.nn.Module, name: str) -> list[tuple[str, torch.nn.Module]] | None:
    """Layers in order with the beginning of their parameters' names; None where they are not all of the network."""
    if net._forward_hooks or net._forward_pre_hooks:
        return None
    if type(net) is torch.nn.Sequential:
        parts = [_layers(layer, f"{name}{key}.") for key, layer in net._modules.items() if layer is not None]
        if any(part is None for part in parts):
            return None
        found = [layer for part in parts if part is not None for layer in part]
        linear = [id(layer) for _, layer in found if isinstance(layer, torch.nn.Linear)]
        return found if len(set(linear)) == len(linear) else None  # one that stands twice has one name
    flat = type(net) is torch.nn.Flatten and (net.start_dim, net.end_dim) == (1, -1)
    return [(name, net)] if flat or type(net) in (torch.nn.Linear, *_ELEMENTWISE) else None
