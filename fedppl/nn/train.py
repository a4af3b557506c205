"""Adam, or gradient steps with momentum, on a client's log posterior, in torch, over batches of its rows."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedppl.nn.functional import Places, by_parts, call, cast, gradients, host, parameter_slices, pieces, taken, tensor
from fedppl.nn.unit import NetworkUnit, Pair, outcomes
from fedppl.types import Array, LocalFailure, Rng

RISE = 1.0  # in nats of a row's mean loss, above which training has diverged
GROWTH = 1e6  # of weights, above which training has diverged
_FUSED = ("cpu", "cuda")  # devices with fused optimizers in every supported torch
_Penalty = Callable[[Tensor], Tensor]


class Training(NamedTuple):
    """Steps at a client."""

    learning_rate: float
    epochs: int
    batch_size: int
    momentum: float | None = None  # of gradient steps; None for Adam


def train(
    unit: NetworkUnit,
    w: Array,
    free: Places,
    settings: Training,
    rng: Rng,
    *,
    prior: Pair | None = None,
    linear: Array | None = None,
    penalty: _Penalty | None = None,
    dtype: torch.dtype = torch.float32,
    rate: str = "learning_rate",
) -> Array:
    r"""Move some of the weights towards the mode of the log posterior.

    .. math:: -\tfrac1n \log p(y \mid X, w) + \tfrac1{2n} \sum_i p_i (w_i - m_i)^2 + b^\top w

    From w (d,), of which those in the positions `free` move. The `prior` has their means m and precisions p, and
    `linear` is b, a correction of the gradient, each as long as `free`; the `penalty` is minus the log density of
    another prior, of local weights. Raises `LocalFailure`, naming the setting `rate`, if the loss ends far above its
    start, alone and with the priors' part, or is not finite.
    """
    flat = np.asarray(w, dtype=float)
    leaves = Leaves(unit, flat, free, settings, dtype)
    (net, X), y = _upper_layers(leaves.net, leaves.X), leaves.y

    def loss_of_all() -> float:
        with torch.no_grad():  # a layer in place would overwrite the inputs
            return float(unit.likelihood.mean(by_parts(net, lambda rows: net(rows.clone()), X), y))

    pulls, before = pulls_of(leaves.split, flat, free, prior, len(X), linear), loss_of_all()
    with torch.enable_grad():
        for batch in batches(len(X), settings, rng):
            loss = unit.likelihood.mean(net(taken(X, batch)), taken(y, batch))
            if penalty is not None:
                loss = loss + penalty(leaves.at(unit.local_at)) / len(X)
            leaves.descend(loss, pulls)
    after, trained = loss_of_all(), leaves.result(flat)

    def prior_loss(w: Array) -> float:
        """Minus the log density of the priors at w, for one row, without constants."""
        normal = 0.0 if prior is None else 0.5 * float(np.sum(prior[1] * (w[free] - prior[0]) ** 2))
        with torch.no_grad():
            other = 0.0 if penalty is None else float(penalty(unit.tensor(w[unit.local_at], torch.float64)))
        return (normal + other) / len(X)

    if linear is None or not np.isfinite(after):  # with a correction the loss may rise, to a finite value
        # A better prior may offset a higher loss.
        require_no_rise(f"{rate}=", after - before, lambda: after - before + prior_loss(trained) - prior_loss(flat))
    return require_bounded(trained, flat, rate)


def require_no_rise(
    rates: str, rise: float, otherwise: Callable[[], float] | None = None, *, what: str = "loss"
) -> None:
    """Raises `LocalFailure` where the loss of a row rose far, or is no number.

    Likewise that of all, computed by `otherwise`, as a higher loss may be that of a better objective.
    """
    if not rise <= RISE and (otherwise is None or not otherwise() <= RISE):
        raise LocalFailure(f"training raised the {what} instead of lowering it; lower {rates}")


def require_bounded(weights: Array, start: Array, rate: str = "learning_rate") -> Array:
    """The weights; raises `LocalFailure` if they grew a millionfold, which the loss hides behind dead units."""
    if not np.max(np.abs(weights), initial=0.0) <= GROWTH * (1.0 + np.max(np.abs(start), initial=0.0)):
        raise LocalFailure(f"training drove the weights away; lower {rate}=")
    return weights


class Leaves:
    """A copy of a network, `net`, of whose parameters the `moving` ones, with weights at `free`, require gradients.

    With the client's rows X and outcomes y.
    """

    def __init__(self, unit: NetworkUnit, w: Array, free: Places, settings: Training, dtype: torch.dtype) -> None:
        self._slices, self._names = parameter_slices(unit.net), unit.names_at(free)
        self.net, place = copy.deepcopy(unit.net), unit.place(dtype)
        if any(value.device != place for value in self.net.parameters()):
            self.net.to("cpu").to(dtype).to(place)  # in this order: "mps" takes no float64
        values = pieces(self.net, unit.tensor(w, dtype))
        for name, parameter in self.net.named_parameters():
            parameter.data = values[name].clone()
            parameter.requires_grad_(name in self._names)
        for buffer in self.net.buffers():
            buffer.data = cast(buffer.data, dtype)
        self.moving: list[Tensor] = [self.net.get_parameter(name) for name in self._names]
        self.X, self.y = rows_of(unit, self.net, dtype)
        self._optimizer = optimizer_of(self.moving, settings.learning_rate, settings.momentum) if self.moving else None

    def split(self, values: Array) -> list[Tensor]:
        """A flat vector (d,) cut as the moving parameters are."""
        return [
            tensor(np.array(values[self._slices[name]], dtype=float), leaf.dtype, leaf.device).view_as(leaf)
            for name, leaf in zip(self._names, self.moving, strict=True)
        ]

    def descend(self, loss: Tensor, pulls: Pulls = None, others: Sequence[Tensor] = ()) -> list[Tensor]:
        """One step of the optimizer down the loss, with the gradients `pulls` added; returns those in `others`."""
        slopes = slopes_of(loss, [*self.moving, *others], pulls)
        for leaf, slope in zip(self.moving, slopes, strict=False):
            leaf.grad = slope
        if self._optimizer is not None:
            self._optimizer.step()
        return slopes[len(self.moving) :]

    def at(self, places: Places) -> Tensor:
        """Weights at these places of the flat vector, differentiable by torch."""
        flat = torch.cat([value.reshape(-1) for value in self.net.parameters()])
        return taken(flat, torch.from_numpy(np.asarray(places, dtype=np.int64)))

    def result(self, w: Array) -> Array:
        """The flat vector with the moved weights."""
        moved = w.copy()
        for name, leaf in zip(self._names, self.moving, strict=True):
            moved[self._slices[name]] = host(leaf).ravel()
        return moved


def rows_of(unit: NetworkUnit, net: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """X and y; images with channels last in memory, where the network accepts them: convolutions are faster."""
    X, y = unit.tensor(unit.X, dtype), outcomes(unit, dtype)
    if X.ndim == 4:
        channels_last = X.contiguous(memory_format=torch.channels_last)
        with contextlib.suppress(RuntimeError), torch.no_grad():  # a view in its forward needs the usual order
            net(channels_last[:2])
            return channels_last, y
    return X, y


def batches(rows: int, settings: Training, rng: Rng) -> Iterator[Tensor]:
    """Rows of each step, shuffled anew in each epoch."""
    for _ in range(settings.epochs):
        yield from torch.split(torch.from_numpy(rng.permutation(rows)), settings.batch_size)


def _upper_layers(net: nn.Module, X: Tensor) -> tuple[nn.Module, Tensor]:
    """The layers of a Sequential from the first that moves on, and their inputs: those below are computed once."""
    if type(net) is not nn.Sequential or net._forward_hooks or net._forward_pre_hooks:
        return net, X
    layers = list(net)
    count = next((i for i, layer in enumerate(layers) if any(v.requires_grad for v in layer.parameters())), 0)
    below = nn.Sequential(*layers[:count])
    if not list(below.parameters()):
        return net, X
    with torch.no_grad():
        for few in (X[:1], X[:2]):
            output = below(few)
            # Not where rows are no longer the first axis, or where outputs need more memory than the rows.
            rows_stay = isinstance(output, Tensor) and output.shape[:1] == few.shape[:1]
            if not rows_stay or output.numel() > few.numel():
                return net, X
        return nn.Sequential(*layers[count:]), by_parts(below, below, X)


Pulls = list[tuple[Tensor, Tensor]] | None


def pulls_of(
    cut: Callable[[Array], list[Tensor]],
    w: Array,
    free: Places,
    prior: Pair | None,
    rows: Any,
    linear: Array | None = None,
) -> Pulls:
    """For each moving parameter, as vectors like w are `cut`, a and c of the gradient a w + c of prior and `linear`."""
    if prior is None and linear is None:
        return None
    slope, constant = np.zeros(w.shape), np.zeros(w.shape)
    if prior is not None:
        slope[..., free] = np.asarray(prior[1]) / rows
        constant[..., free] = -slope[..., free] * np.asarray(prior[0])
    if linear is not None:
        constant[..., free] += np.asarray(linear)
    return list(zip(cut(slope), cut(constant), strict=True))


def slopes_of(loss: Tensor, leaves: Sequence[Tensor], pulls: Pulls = None) -> list[Tensor]:
    """Gradients of the loss in the leaves, with `pulls` added."""
    slopes = gradients(loss, leaves)
    with torch.no_grad():
        if pulls is not None:
            pulled = zip(slopes, pulls, leaves, strict=True)
            slopes = tuple(torch.addcmul(slope + constant, rise, leaf) for slope, (rise, constant), leaf in pulled)
        # Fused optimizers read memory in order, and a convolution on images with channels last gives gradients in
        # another order than its weights.
        return [slope.contiguous() for slope in slopes]


def optimizer_of(moving: list[Tensor], rate: float, momentum: float | None) -> torch.optim.Optimizer:
    """Adam, or gradient steps with momentum."""
    fused = all(value.device.type in _FUSED for value in moving)
    if momentum is None:
        return torch.optim.Adam(moving, lr=rate, fused=fused)
    return torch.optim.SGD(moving, lr=rate, momentum=momentum, fused=fused)


def loss_at(unit: NetworkUnit, w: Array, *, dtype: torch.dtype = torch.float32) -> float:
    """Mean negative log likelihood of the client's rows at w (d,), computed for some rows at a time."""
    net, state, X = unit.net, unit.state(w, dtype), unit.tensor(unit.X, dtype)
    with torch.no_grad():
        return float(unit.likelihood.mean(by_parts(net, lambda rows: call(net, state, rows), X), outcomes(unit, dtype)))
