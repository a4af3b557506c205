"""Training of clients with one network in a batch: each takes the steps that it would take alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedppl.nn.batch import Stack, forward
from fedppl.nn.devices import host, taken, tensor
from fedppl.nn.functional import Places, buffers_of, call, gradients, parameter_slices
from fedppl.nn.likelihood import Likelihood
from fedppl.nn.train import RISE, Training, mean_loss, optimizer_of
from fedppl.types import Array

Rngs = Sequence[np.random.Generator]
Flags = NDArray[np.bool_]
State = dict[str, torch.Tensor]


class Minibatch(NamedTuple):
    """Rows of one step, of the clients that take it: the first A, since clients are sorted."""

    X: torch.Tensor  # (A, b, ...)
    y: torch.Tensor  # (A, b, ...)
    share: torch.Tensor  # of a row in the mean of its client, (A, b); 0 where the client has fewer rows than others


LossFn = Callable[[State, Minibatch], torch.Tensor]  # the sum over clients of their losses


class Weights:
    """Weights of clients, stacked by parameter; those that move are leaves of their own.

    Matrices of linear layers lie transposed in memory, as slopes then come out of the product without a copy.

    Attributes
    ----------
    moving
        Parameters that hold some of the weights at `free`, by torch's names, (K, ...).
    """

    def __init__(self, net: torch.nn.Module, W: Array, free: Places, dtype: torch.dtype, device: torch.device) -> None:
        chosen = np.zeros(W.shape[1], dtype=bool)
        chosen[free] = True
        self._slices, self._device = parameter_slices(net), device
        self._shapes = {name: value.shape for name, value in net.named_parameters()}
        self._turned = {
            f"{name}.weight" if name else "weight"
            for name, layer in net.named_modules()
            if type(layer) is torch.nn.Linear
        }
        held = {name: self._cut(W, name, dtype) for name in self._slices}
        self.moving = {name: value for name, value in held.items() if chosen[self._slices[name]].any()}
        self._still = {name: self._shown(name, value) for name, value in held.items() if name not in self.moving}
        # Weights of one parameter move together, or stay where a mask holds them.
        self.masks = {
            name: None if chosen[self._slices[name]].all() else self._cut(chosen[None], name, dtype)
            for name in self.moving
        }
        self._first: dict[int, tuple[list[torch.Tensor], State]] = {}

    def _cut(self, values: NDArray[np.generic], name: str, dtype: torch.dtype) -> torch.Tensor:
        """One parameter of flat vectors (K, d), as it lies in memory."""
        part = tensor(np.asarray(values[:, self._slices[name]], dtype=float), dtype, self._device)
        part = part.view(len(values), *self._shapes[name])
        return (part.mT if name in self._turned else part).contiguous()

    def _shown(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return value.mT if name in self._turned else value

    def first(self, count: int) -> tuple[list[torch.Tensor], State]:
        """Leaves that ask for gradients of the first clients, and all their parameters: views, that steps move."""
        if count not in self._first:
            leaves = {name: value[:count].detach().requires_grad_() for name, value in self.moving.items()}
            shown = {name: self._shown(name, leaf) for name, leaf in leaves.items()}
            still = {name: value[:count] for name, value in self._still.items()}
            self._first[count] = list(leaves.values()), {**still, **shown}
        return self._first[count]

    def client(self, k: int) -> State:
        """Parameters of one client."""
        moving = {name: self._shown(name, value)[k] for name, value in self.moving.items()}
        return {**{name: value[k] for name, value in self._still.items()}, **moving}

    def like(self, values: Array) -> list[torch.Tensor]:
        """Flat vectors (K, d) cut as the moving parameters are."""
        return [self._cut(values, name, value.dtype) for name, value in self.moving.items()]

    def result(self, W: Array) -> Array:
        """Flat vectors (K, d) with what has moved."""
        found = W.copy()
        for name, value in self.moving.items():
            found[:, self._slices[name]] = host(self._shown(name, value)).reshape(len(W), -1)
        return found


def train_together(
    stack: Stack,
    W: Array,
    free: Places,
    settings: Training,
    rngs: Rngs,
    *,
    priors: Sequence[tuple[Array, Array]] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Array, Flags]:
    """What `fedppl.nn.train.train` does at each client, from weights W (K, d), of which those in `free` move.

    Each client's generator gives what it would give alone; `priors` are means and precisions by client. Returns weights
    (K, d), and which clients' training came to a good end; of the others weights say nothing.
    """
    weights, through = Weights(stack.net, W, free, dtype, stack.X.device), forward(stack.net, dtype, stack.X.device)
    likelihood = stack.units[0].likelihood

    def loss(state: State, batch: Minibatch) -> torch.Tensor:
        return shared_loss(likelihood, through(state, batch.X), batch)

    before = losses(stack, weights, dtype)
    take_steps(stack, weights, settings, rngs, loss, _pulls(weights, W, free, priors, stack.rows))
    after = losses(stack, weights, dtype)
    found = weights.result(W)
    return found, (after <= before + RISE) & bounded(found, W)


def bounded(found: Array, start: Array) -> Flags:
    """Whether weights (K, d) ran away, by client: the rule of `fedppl.nn.train.require_bounded`."""
    most = 1e6 * (1.0 + np.max(np.abs(start), axis=1, initial=0.0))
    return np.asarray(np.max(np.abs(found), axis=1, initial=0.0) <= most)


def losses(stack: Stack, weights: Weights, dtype: torch.dtype) -> Array:
    """Mean loss of each client on all of its rows, (K,)."""
    buffers = buffers_of(stack.net, dtype, stack.X.device)
    found = np.empty(len(stack.units))
    with torch.no_grad():
        for k, unit in enumerate(stack.units):
            rows = stack.client(k)
            output = call(stack.net, {**weights.client(k), **buffers}, stack.X[rows])
            found[k] = float(mean_loss(unit, output, stack.y[rows]))
    return found


def shared_loss(likelihood: Likelihood, output: torch.Tensor, batch: Minibatch) -> torch.Tensor:
    """Mean negative log likelihood of each client's batch, summed over clients."""
    return torch.dot(likelihood.each(output.flatten(0, 1), batch.y.flatten(0, 1)), batch.share.flatten())


_Pulls = list[tuple[torch.Tensor, torch.Tensor]] | None


def _pulls(
    weights: Weights, W: Array, free: Places, priors: Sequence[tuple[Array, Array]] | None, rows: NDArray[np.int64]
) -> _Pulls:
    """Of each moving parameter the slopes a, c of a w + c, (K, ...)."""
    if priors is None:
        return None
    slope, constant = np.zeros(W.shape), np.zeros(W.shape)
    for k, (mean, precision) in enumerate(priors):
        slope[k, free] = np.asarray(precision) / rows[k]
        constant[k, free] = -slope[k, free] * np.asarray(mean)
    return list(zip(weights.like(slope), weights.like(constant), strict=True))


def take_steps(
    stack: Stack, weights: Weights, settings: Training, rngs: Rngs, loss: LossFn, pulls: _Pulls = None
) -> None:
    """All steps of all epochs. A client that has no batch left in an epoch takes no step until the next."""
    size, moving, masks = settings.batch_size, list(weights.moving.values()), list(weights.masks.values())
    steps = -(-stack.rows // size)
    # Clients with as many steps an epoch step together always, and have moments and a count of steps of their own.
    ends = [*(np.flatnonzero(np.diff(steps)) + 1), len(steps)]
    runs = [slice(int(start), int(end)) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    parts = [[leaf[run] for leaf in moving] for run in runs]
    optimizer = optimizer_of([part for run in parts for part in run], settings)
    with torch.enable_grad():
        for _ in range(settings.epochs):
            for batch in _epoch(stack, size, rngs):
                count = len(batch.X)
                leaves, state = weights.first(count)
                slopes = list(gradients(loss(state, batch), leaves))
                with torch.no_grad():
                    for i, mask in enumerate(masks):
                        if pulls is not None:
                            slope, constant = (pull[:count] for pull in pulls[i])
                            slopes[i] = torch.addcmul(slopes[i] + constant, slope, leaves[i])
                        slopes[i] = (slopes[i] if mask is None else slopes[i] * mask).contiguous()
                for run, leaves_of in zip(runs, parts, strict=True):
                    for part, slope in zip(leaves_of, slopes, strict=True):
                        part.grad = slope[run] if run.stop <= count else None
                optimizer.step()


def _epoch(stack: Stack, size: int, rngs: Rngs) -> Iterator[Minibatch]:
    """Batches of one pass, shuffled by each client as alone; short ones are filled up with rows that do not count."""
    rows = stack.rows
    width = int(min(size, rows[0]))
    steps = -(-rows // size)
    order = np.empty((len(rows), int(steps[0]) * width), dtype=np.int64)
    share = np.zeros(order.shape, dtype=np.float32 if stack.X.dtype != torch.float64 else float)
    for k, rng in enumerate(rngs):
        n, last = int(rows[k]), int(steps[k] - 1) * width
        order[k, :n] = stack.first[k] + rng.permutation(n)
        order[k, n:] = order[k, last]  # a row of the same batch
        share[k, :last], share[k, last:n] = 1.0 / width, 1.0 / (n - last)
    place = stack.X.device
    places, shares = torch.from_numpy(order).to(place), torch.from_numpy(share).to(place)
    held = stack.X.new_empty(len(rows) * width, *stack.X.shape[1:])  # read in one step, then the next
    for step in range(int(steps[0])):
        count, start = int(np.sum(steps > step)), step * width
        at = slice(start, start + min(width, int(rows[0]) - start))
        chosen = places[:count, at]
        flat = chosen.reshape(-1)
        X = torch.index_select(stack.X, 0, flat, out=held[: len(flat)]).view(*chosen.shape, *stack.X.shape[1:])
        y = taken(stack.y, flat).view(*chosen.shape, *stack.y.shape[1:])
        yield Minibatch(X, y, shares[:count, at].contiguous())
