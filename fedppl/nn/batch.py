"""Clients with one network, computed in a batch: each takes the steps that it takes alone."""

from __future__ import annotations

import copy
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedppl.contracts import ClientView
from fedppl.nn import functional
from fedppl.nn.functional import Places
from fedppl.nn.likelihood import Categorical
from fedppl.nn.personal import head_noise
from fedppl.nn.train import GROWTH, RISE, Pulls, Training, optimizer_of, pulls_of, slopes_of, train
from fedppl.nn.unit import Head, NetworkUnit, Pair, logits, of_draws, outcomes, without_head
from fedppl.nn.view import network_of
from fedppl.types import Array, Rng

FEWEST = 4  # clients in a batch: fewer are faster one by one
_WEIGHTS = 24e6  # bytes of weights, moments and slopes in a batch, which a cache should hold
_ROWS = 128e6  # bytes of rows in a batch, and of the widest layer's outputs
_BYTES = 4  # of a number in float32
# Elementwise layers, for which rows of many clients are like those of one.
_ELEMENTWISE = (nn.Identity, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus)
# Parameters and buffers of all clients (K, ...) by torch's names, and inputs (K, b, ...), to outputs (K, b, C).
Forward = Callable[[dict[str, Tensor], Tensor], Tensor]

_lock = threading.Lock()
_agreement: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


class Stack(NamedTuple):
    """Rows of clients with one network."""

    units: tuple[NetworkUnit, ...]  # from the one with most rows to the one with fewest
    net: nn.Module  # of this thread
    dtype: torch.dtype  # of the computations
    X: Tensor  # rows of all, one client after the other, (N, ...)
    y: Tensor
    rows: NDArray[np.int64]  # numbers of rows, (K,)
    first: NDArray[np.int64]  # where each client's rows begin, (K,)


def stacked(units: Sequence[NetworkUnit], dtype: torch.dtype = torch.float32) -> Stack:
    """Stack the rows of a group from `groups` one after the other."""
    rows = np.array([len(unit.X) for unit in units], dtype=np.int64)
    X = torch.cat([unit.tensor(unit.X, dtype) for unit in units])
    y = torch.cat([outcomes(unit, dtype) for unit in units])
    return Stack(tuple(units), units[0].net, dtype, X, y, rows, np.concatenate([[0], np.cumsum(rows)[:-1]]))


def groups(clients: Sequence[ClientView]) -> list[list[int]]:
    """Places of clients that are trained in one batch: of one network, by falling numbers of rows, within a cache."""
    units = [client.view(network_of) for client in clients]
    by_kind: dict[tuple[object, ...], list[int]] = {}
    for place, unit in enumerate(units):
        kind = (id(unit.declared), unit.X.shape[1:], unit.X.dtype, unit.y.shape[1:], unit.y.dtype)
        by_kind.setdefault(kind, []).append(place)
    batches: list[list[int]] = []
    for places in by_kind.values():
        if len(places) < FEWEST or not all(len(units[place].X) for place in places) or not _can_batch(units[places[0]]):
            continue
        waiting = sorted(places, key=lambda place: (-len(units[place].X), place))
        while waiting:
            count = _count(units[waiting[0]], len(waiting))
            batches.append(waiting[:count])
            waiting = waiting[count:]
    return [places for places in batches if len(places) >= FEWEST]


def _count(largest: NetworkUnit, waiting: int) -> int:
    """Number of clients in the next batch, of equal batches within the limits; the first client has most rows."""
    # In memory are rows and layers' outputs, and weights with two moments and slopes.
    outputs = (value.shape[0] for value in largest.net.parameters() if value.ndim)
    widest = max(int(np.prod(largest.X.shape[1:])), *outputs)
    limit = min(_WEIGHTS / (4 * _BYTES * largest.size), _ROWS / (_BYTES * len(largest.X) * widest))
    return int(np.ceil(waiting / np.ceil(waiting / max(1, int(limit)))))


def _can_batch(unit: NetworkUnit) -> bool:
    """Whether a batch computes the same as the network; checked once a network."""
    with _lock:
        if unit.declared.net not in _agreement:
            _agreement[unit.declared.net] = _agrees(unit)
    return _agreement[unit.declared.net]


def _agrees(unit: NetworkUnit) -> bool:
    """Try two clients' weights on two rows each. Convolutions are excluded: a batch of them takes 1.5 times as long."""
    if any(isinstance(layer, nn.modules.conv._ConvNd) for layer in unit.net.modules()):
        return False
    X = unit.tensor(unit.X[[0, min(1, len(unit.X) - 1)]], torch.float64)
    initial = unit.tensor(unit.initial, torch.float64)
    states = [functional.pieces(unit.net, w) for w in (initial, 1.5 * initial + 0.01)]
    names = {name: torch.stack([state[name] for state in states]).requires_grad_() for name in states[0]}
    buffers = functional.buffers_of(unit.net, torch.float64, X.device)
    try:
        # Torch warns where it loops over clients.
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("error")
            inputs = torch.stack([X, X.flip(0)])
            output = forward(unit.net, torch.float64, X.device)(names, inputs)
            functional.gradients(output.sum(), list(names.values()))
            both = zip(states, (X, X.flip(0)), strict=True)
            alone = [functional.call(unit.net, {**w, **buffers}, x.clone()) for w, x in both]
    except Exception:  # recurrent layers, or such as change their input or branch on values
        return False
    if output.ndim != 3 and isinstance(unit.likelihood, Categorical):
        return False
    inputs_stayed, expected = torch.equal(inputs, torch.stack([X, X.flip(0)])), torch.stack(alone)
    return inputs_stayed and output.shape == expected.shape and torch.allclose(output, expected, rtol=1e-9, atol=1e-9)


def forward(net: nn.Module, dtype: torch.dtype, device: torch.device) -> Forward:
    """The network for stacked weights: by layers where all are linear or elementwise, else by `torch.func.vmap`."""
    layers = _layers(net, "")
    if layers is None:
        buffers = functional.buffers_of(net, dtype, device)
        return torch.func.vmap(lambda state, X: functional.call(net, {**state, **buffers}, X))

    def through(state: dict[str, Tensor], X: Tensor) -> Tensor:
        for name, layer in layers:
            if isinstance(layer, nn.Linear):
                weight, bias = state[f"{name}weight"], state.get(f"{name}bias")  # (K, o, i), (K, o)
                X = torch.bmm(X, weight.mT) if bias is None else torch.baddbmm(bias[:, None], X, weight.mT)
            else:
                X = X.flatten(2) if isinstance(layer, nn.Flatten) else layer(X)
        return X

    return through


def _layers(net: nn.Module, name: str) -> list[tuple[str, nn.Module]] | None:
    """Layers in order with the prefix of their parameters' names; None where the network is more than these."""
    if net._forward_hooks or net._forward_pre_hooks:
        return None
    if type(net) is nn.Sequential:
        parts = [_layers(layer, f"{name}{key}.") for key, layer in net._modules.items() if layer is not None]
        if any(part is None for part in parts):
            return None
        layers = [layer for part in parts if part is not None for layer in part]
        linear = [id(layer) for _, layer in layers if isinstance(layer, nn.Linear)]
        return layers if len(set(linear)) == len(linear) else None  # a layer that is used twice has one name
    flat = type(net) is nn.Flatten and (net.start_dim, net.end_dim) == (1, -1)
    return [(name, net)] if flat or type(net) in (nn.Linear, *_ELEMENTWISE) else None


# Training of all weights ----------------------------------------------------------------------------------------------

Rngs = Sequence[Rng]
Flags = NDArray[np.bool_]
State = dict[str, Tensor]


class Minibatch(NamedTuple):
    """Rows of one step, of the clients that take it: the first A, since clients are sorted by rows."""

    X: Tensor  # (A, b, ...)
    y: Tensor  # (A, b, ...)
    share: Tensor  # of a row in the mean of its client, (A, b); 0 where the client has fewer rows than others


LossFn = Callable[[State, Minibatch], Tensor]  # the sum over clients of their losses


class Weights:
    """Weights of clients, stacked by parameter; those that are `moving` are leaves, (K, ...).

    Matrices of linear layers are transposed in memory, so that slopes need no copy.
    """

    def __init__(self, stack: Stack, W: Array, free: Places) -> None:
        self._slices, self._stack = functional.parameter_slices(stack.net), stack
        self._shapes = {name: value.shape for name, value in stack.net.named_parameters()}
        self._transposed = {
            f"{name}.weight" if name else "weight"
            for name, layer in stack.net.named_modules()
            if type(layer) is nn.Linear
        }
        values = {name: self._cut(W, name) for name in self._slices}
        self.moving = {name: values.pop(name) for name in stack.units[0].names_at(free)}
        self._fixed = {name: self._shown(name, value) for name, value in values.items()}
        self._first: dict[int, tuple[list[Tensor], State]] = {}

    def _cut(self, values: Array, name: str) -> Tensor:
        """One parameter of flat vectors (K, d), in its layout in memory."""
        part = functional.tensor(values[:, self._slices[name]], self._stack.dtype, self._stack.X.device)
        part = part.view(len(values), *self._shapes[name])
        return (part.mT if name in self._transposed else part).contiguous()

    def _shown(self, name: str, value: Tensor) -> Tensor:
        return value.mT if name in self._transposed else value

    def first(self, count: int) -> tuple[list[Tensor], State]:
        """Leaves of the first clients, which require gradients, and views of all their parameters."""
        if count not in self._first:
            leaves = {name: value[:count].detach().requires_grad_() for name, value in self.moving.items()}
            shown = {name: self._shown(name, leaf) for name, leaf in leaves.items()}
            fixed = {name: value[:count] for name, value in self._fixed.items()}
            self._first[count] = list(leaves.values()), {**fixed, **shown}
        return self._first[count]

    def like(self, values: Array) -> list[Tensor]:
        """Flat vectors (K, d) cut like the moving parameters."""
        return [self._cut(values, name) for name in self.moving]

    def result(self, W: Array) -> Array:
        """Flat vectors (K, d) with the moved weights."""
        moved = W.copy()
        for name, value in self.moving.items():
            moved[:, self._slices[name]] = functional.host(self._shown(name, value)).reshape(len(W), -1)
        return moved


def train_each(
    units: Sequence[NetworkUnit], W: Array, free: Places, settings: Training, rngs: Rngs, priors: Sequence[Pair] | None
) -> tuple[Array, Flags]:
    """`train_together` at several clients; at one alone `train`, which raises `LocalFailure`."""
    if len(units) > 1:
        return train_together(stacked(units), W, free, settings, rngs, priors)
    w = train(units[0], W[0], free, settings, rngs[0], prior=None if priors is None else priors[0])
    return w[None], np.ones(1, dtype=bool)


def train_together(
    stack: Stack, W: Array, free: Places, settings: Training, rngs: Rngs, priors: Sequence[Pair] | None = None
) -> tuple[Array, Flags]:
    """`train` at each client, from weights W (K, d), of which those in `free` move.

    `priors` are means and precisions by client. Returns weights (K, d), and which clients' training succeeded; weights
    of the others are invalid.
    """
    weights, through = Weights(stack, W, free), forward(stack.net, stack.dtype, stack.X.device)
    likelihood = stack.units[0].likelihood

    def loss(state: State, batch: Minibatch) -> Tensor:
        each = likelihood.each(through(state, batch.X).flatten(0, 1), batch.y.flatten(0, 1))
        return torch.dot(each, batch.share.flatten())

    prior = None if priors is None else (np.stack([mean for mean, _ in priors]), np.stack([p for _, p in priors]))
    pulls = pulls_of(weights.like, W, free, prior, stack.rows[:, None])
    return _trained(stack, weights, W, settings, rngs, loss, pulls)


def _trained(
    stack: Stack, weights: Weights, W: Array, settings: Training, rngs: Rngs, loss: LossFn, pulls: Pulls = None
) -> tuple[Array, Flags]:
    """Weights (K, d) after all steps, and at which clients they stayed bounded and the loss did not rise far."""
    take_steps(stack, weights, settings, rngs, loss, pulls)
    trained, most = weights.result(W), GROWTH * (1.0 + np.max(np.abs(W), axis=1, initial=0.0))
    before, after = _losses(stack, W), _losses(stack, trained)
    return trained, (after <= before + RISE) & (np.max(np.abs(trained), axis=1, initial=0.0) <= most)


def _losses(stack: Stack, W: Array) -> Array:
    """Mean loss of each client on all of its rows, (K,)."""
    parts = zip(stack.units, _outputs(stack, stack.net, W), torch.split(stack.y, stack.rows.tolist()), strict=True)
    return np.array([float(unit.likelihood.mean(output, y)) for unit, output, y in parts])


def _outputs(stack: Stack, net: nn.Module, W: Array) -> list[Tensor]:
    """Outputs of each client's rows, by the network or by layers of it, at weights W (K, d)."""
    flat, slices = functional.tensor(W, stack.dtype, stack.X.device), functional.parameter_slices(stack.net)
    values = {name: flat[:, slices[name]].reshape(len(W), *value.shape) for name, value in net.named_parameters()}
    buffers, outputs = functional.buffers_of(net, stack.dtype, stack.X.device), []
    with torch.no_grad():
        for k, X in enumerate(torch.split(stack.X, stack.rows.tolist())):
            state = {**buffers, **{name: value[k] for name, value in values.items()}}
            outputs.append(functional.by_parts(net, functools.partial(functional.call, net, state), X))
    return outputs


def take_steps(
    stack: Stack, weights: Weights, settings: Training, rngs: Rngs, loss: LossFn, pulls: Pulls = None
) -> None:
    """All steps of all epochs. A client that has no batch left in an epoch takes no step until the next."""
    size, moving = settings.batch_size, list(weights.moving.values())
    steps = -(-stack.rows // size)
    # Clients with equally many steps an epoch always step together, with moments and a count of steps of their own.
    ends = [*(np.flatnonzero(np.diff(steps)) + 1), len(steps)]
    runs = [slice(int(start), int(end)) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    parts = [[leaf[run] for leaf in moving] for run in runs]
    optimizer = optimizer_of([part for run in parts for part in run], settings.learning_rate, settings.momentum)
    with torch.enable_grad():
        for _ in range(settings.epochs):
            for batch in _epoch(stack, size, rngs):
                count = len(batch.X)
                leaves, state = weights.first(count)
                pulls_now = None if pulls is None else [(rise[:count], constant[:count]) for rise, constant in pulls]
                slopes = slopes_of(loss(state, batch), leaves, pulls_now)
                for run, leaves_of in zip(runs, parts, strict=True):
                    for part, slope in zip(leaves_of, slopes, strict=True):
                        part.grad = slope[run] if run.stop <= count else None
                optimizer.step()


def _epoch(stack: Stack, size: int, rngs: Rngs) -> Iterator[Minibatch]:
    """Batches of one pass, shuffled by each client as it would alone; short ones are padded with rows of weight 0."""
    rows = stack.rows
    width = int(min(size, rows[0]))
    steps = -(-rows // size)
    order = np.empty((len(rows), int(steps[0]) * width), dtype=np.int64)
    share = np.zeros(order.shape)
    for k, rng in enumerate(rngs):
        n, last = int(rows[k]), int(steps[k] - 1) * width
        order[k, :n] = stack.first[k] + rng.permutation(n)
        order[k, n:] = order[k, last]  # a row of the same batch
        share[k, :last], share[k, last:n] = 1.0 / width, 1.0 / (n - last)
    place = stack.X.device
    places, shares = torch.from_numpy(order).to(place), torch.from_numpy(share).to(stack.dtype).to(place)
    buffer = stack.X.new_empty(len(rows) * width, *stack.X.shape[1:])  # reused in each step
    for step in range(int(steps[0])):
        count, start = int(np.sum(steps > step)), step * width
        at = slice(start, start + min(width, int(rows[0]) - start))
        chosen = places[:count, at]
        flat = chosen.reshape(-1)
        X = torch.index_select(stack.X, 0, flat, out=buffer[: len(flat)]).view(*chosen.shape, *stack.X.shape[1:])
        y = functional.taken(stack.y, flat).view(*chosen.shape, *stack.y.shape[1:])
        yield Minibatch(X, y, shares[:count, at].contiguous())


# Heads, and the layers below them -------------------------------------------------------------------------------------


def heads_rows(stack: Stack, head: Head, W: Array) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
    """Features (K, n, h) of clients' rows at weights W (K, D), their outcomes and numbers; zeros follow a last row."""
    parts = _outputs(stack, without_head(copy.deepcopy(stack.net), head), W)
    outcomes_of = list(torch.split(stack.y, stack.rows.tolist()))
    z, y = (nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in (parts, outcomes_of))
    return z, y, stack.rows


def train_below_together(
    stack: Stack, head: Head, W: Array, q: Pair, settings: Training, draws: int, rngs: Rngs
) -> tuple[Array, Flags]:
    """`train_below` at each client, for weights (K, D) and q (K, d).

    Returns weights (K, D), and at which clients the loss at the head's mean did not rise far: others train alone.
    """
    body, dtype, place = without_head(copy.deepcopy(stack.net), head), stack.dtype, stack.X.device
    weights, through = Weights(stack, W, head.below), forward(body, dtype, place)
    likelihood, own = stack.units[0].likelihood, [name for name, _ in body.named_parameters()]
    means, spreads = (functional.tensor(value, dtype, place) for value in q)
    noise = [head_noise(draws, means.shape[1], functional.generator_of(rng), dtype) for rng in rngs]

    def loss(state: State, batch: Minibatch) -> Tensor:
        count = len(batch.X)
        drawn = torch.stack([next(each) for each in noise[:count]]).to(place)
        v = means[:count, None] + spreads[:count, None] * drawn
        z = through({name: state[name] for name in own}, batch.X)
        each = likelihood.each_last(logits(head, z, v).flatten(0, 1), of_draws(batch.y, draws))
        return torch.sum(each.view(count, draws, -1) * batch.share[:, None]) / draws

    return _trained(stack, weights, W, settings, rngs, loss)
