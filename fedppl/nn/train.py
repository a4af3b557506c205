"""Adam, or gradient steps with momentum, on a client's log posterior, in torch, over batches of its rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from fedppl.nn.devices import cast, host, is_fused, taken, tensor
from fedppl.nn.functional import Places, by_parts, call, gradients, parameter_slices, pieces
from fedppl.nn.unit import NetworkUnit, outcomes
from fedppl.types import Array, LocalFailure

# Training that raises the mean loss of a row by more than this many nats has diverged.
RISE = 1.0
# And training that takes weights to more than this times where they were: it has run away.
GROWTH = 1e6
_Penalty = Callable[[torch.Tensor], torch.Tensor]


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
    rng: np.random.Generator,
    *,
    prior: tuple[Array, Array] | None = None,
    linear: Array | None = None,
    penalty: _Penalty | None = None,
    dtype: torch.dtype = torch.float32,
    rate: str = "learning_rate",
) -> Array:
    r"""Move some of the weights towards the mode of the log posterior.

    .. math:: -\tfrac1n \log p(y \mid X, w) + \tfrac1{2n} \sum_i p_i (w_i - m_i)^2 + b^\top w

    From w (d,), of which those in the positions `free` move. The `prior` has their means m and precisions p, and
    `linear` is b, a correction of the gradient, each as long as `free`; the `penalty` is minus the log density of
    another prior, of local weights. Failures name the setting `rate`: raises `LocalFailure` if the loss ends far above
    where it began, alone and with the priors' part, or at what is not finite.
    """
    flat, where = np.asarray(w, dtype=float), np.asarray(free, dtype=np.int64)
    leaves = Leaves(unit, flat, where, dtype)
    (net, X), y = _above(leaves.net, arranged(leaves.net, unit.tensor(unit.X, dtype))), outcomes(unit, dtype)

    def whole(rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = net(rows.clone())  # in place a layer would write over what is computed once
        return found

    pulls = _pulls(leaves, flat, where, prior, linear, len(X))
    optimizer = optimizer_of(leaves.moving, settings)
    with torch.no_grad():
        before = float(mean_loss(unit, by_parts(net, whole, X), y))
    with torch.enable_grad():
        for _ in range(settings.epochs):
            for batch in torch.split(torch.from_numpy(rng.permutation(len(X))), settings.batch_size):
                loss = mean_loss(unit, net(taken(X, batch)), taken(y, batch))
                if penalty is not None:
                    loss = loss + penalty(leaves.at(unit.local_at)) / len(X)
                take_step(optimizer, leaves, loss, pulls)
    with torch.no_grad():
        after = float(mean_loss(unit, by_parts(net, whole, X), y))
    found, rose = leaves.result(flat), after - before
    if linear is None and not rose <= RISE:
        ours, theirs = (_held(unit, w, where, prior, penalty) for w in (found, flat))
        rose = rose + (ours - theirs) / len(X)  # priors may be worth a higher loss
    if not (rose <= RISE if linear is None else np.isfinite(after)):
        raise LocalFailure(f"training raised the loss instead of lowering it; lower {rate}=")
    return require_bounded(found, flat, rate)


def _held(
    unit: NetworkUnit, w: Array, free: Places, prior: tuple[Array, Array] | None, penalty: _Penalty | None
) -> float:
    """Minus the log density of priors at w, less constants."""
    normal = 0.0 if prior is None else 0.5 * float(np.sum(prior[1] * (w[free] - prior[0]) ** 2))
    if penalty is None:
        return normal
    with torch.no_grad():
        return normal + float(penalty(unit.tensor(w[unit.local_at], torch.float64)))


def require_bounded(found: Array, start: Array, rate: str = "learning_rate") -> Array:
    """Weights that did not run away where the loss does not show it, as behind dead units.

    Raises `LocalFailure` if they grew a millionfold.
    """
    if not np.max(np.abs(found), initial=0.0) <= GROWTH * (1.0 + np.max(np.abs(start), initial=0.0)):
        raise LocalFailure(f"training drove the weights away; lower {rate}=")
    return found


class Leaves:
    """A network of one's own, in which the parameters that move ask for gradients.

    Attributes
    ----------
    net
        The module.
    moving
        Its parameters that hold some of the weights at `free`.
    state
        All its parameters and buffers by name, for `call`.
    """

    def __init__(self, unit: NetworkUnit, w: Array, free: Places, dtype: torch.dtype) -> None:
        self._slices = parameter_slices(unit.net)
        chosen = np.zeros(len(w), dtype=bool)
        chosen[free] = True
        self._names = [name for name, at in self._slices.items() if chosen[at].any()]
        self.net, place = copy.deepcopy(unit.net), unit.place(dtype)
        if any(value.device != place for value in self.net.parameters()):
            self.net.to("cpu").to(dtype).to(place)  # in this order: "mps" takes no float64
        held = pieces(self.net, unit.tensor(w, dtype))
        for name, parameter in self.net.named_parameters():
            parameter.data = held[name].clone()
            parameter.requires_grad_(name in self._names)
        for buffer in self.net.buffers():
            buffer.data = cast(buffer.data, dtype)
        self.state: dict[str, torch.Tensor] = {**dict(self.net.named_parameters()), **dict(self.net.named_buffers())}
        self.moving = [self.state[name] for name in self._names]
        # Weights of one parameter move together, or stay where a mask holds them.
        self.masks = [
            None if chosen[at].all() else tensor(chosen[at], dtype, place).view_as(self.state[name])
            for name, at in self._slices.items()
            if name in self._names
        ]

    def split(self, values: Array) -> list[torch.Tensor]:
        """A flat vector (d,) cut as the moving parameters are."""
        return [
            tensor(np.array(values[self._slices[name]], dtype=float), leaf.dtype, leaf.device).view_as(leaf)
            for name, leaf in zip(self._names, self.moving, strict=True)
        ]

    def at(self, places: Places) -> torch.Tensor:
        """Weights in these places of the flat vector, which torch can follow."""
        flat = torch.cat([self.state[name].reshape(-1) for name in self._slices])
        return taken(flat, torch.from_numpy(np.asarray(places, dtype=np.int64)))

    def result(self, w: Array) -> Array:
        """The flat vector with what has moved."""
        found = w.copy()
        for name, leaf in zip(self._names, self.moving, strict=True):
            found[self._slices[name]] = host(leaf).ravel()
        return found


def arranged(net: torch.nn.Module, X: torch.Tensor) -> torch.Tensor:
    """Images with channels last in memory, where the network takes them so: convolutions are faster."""
    if X.ndim != 4:
        return X
    found = X.contiguous(memory_format=torch.channels_last)
    try:
        with torch.no_grad():
            net(found[:2])
    except RuntimeError:  # a view in its forward needs the rows as they were
        return X
    return found


def _above(net: torch.nn.Module, X: torch.Tensor) -> tuple[torch.nn.Module, torch.Tensor]:
    """Layers of a row of layers from the first that moves on, and what they see: those below are computed once."""
    if type(net) is not torch.nn.Sequential or net._forward_hooks or net._forward_pre_hooks:
        return net, X
    layers = list(net)
    count = next((i for i, one in enumerate(layers) if any(v.requires_grad for v in one.parameters())), 0)
    below = torch.nn.Sequential(*layers[:count])
    if not list(below.parameters()):
        return net, X
    with torch.no_grad():
        for few in (X[:1], X[:2]):
            seen = below(few)
            # Not where rows lie elsewhere, or where more memory would be taken than by the rows.
            if not isinstance(seen, torch.Tensor) or seen.shape[:1] != few.shape[:1] or seen.numel() > few.numel():
                return net, X
        return torch.nn.Sequential(*layers[count:]), by_parts(below, below, X)


_Pulls = list[tuple[torch.Tensor, torch.Tensor]] | None


def _pulls(
    leaves: Leaves, w: Array, free: Places, prior: tuple[Array, Array] | None, linear: Array | None, rows: int
) -> _Pulls:
    """Of each moving parameter the slopes a, c of a w + c: of the prior, and of a linear term."""
    if prior is None and linear is None:
        return None
    slope, constant = np.zeros(len(w)), np.zeros(len(w))
    if prior is not None:
        slope[free] = np.asarray(prior[1]) / rows
        constant[free] = -slope[free] * np.asarray(prior[0])
    if linear is not None:
        constant[free] += np.asarray(linear)
    return list(zip(leaves.split(slope), leaves.split(constant), strict=True))


def take_step(optimizer: torch.optim.Optimizer, leaves: Leaves, loss: torch.Tensor, pulls: _Pulls = None) -> None:
    """One step of the optimizer down the loss and what pulls beside it."""
    slopes = gradients(loss, leaves.moving)
    with torch.no_grad():
        for k, (leaf, gradient) in enumerate(zip(leaves.moving, slopes, strict=True)):
            found = gradient
            if pulls is not None:
                found = torch.addcmul(gradient + pulls[k][1], pulls[k][0], leaf)
            mask = leaves.masks[k]
            # Fused optimizers go through memory and not through indices: a convolution on images with channels last
            # gives gradients in another order than its weights.
            leaf.grad = (found if mask is None else found * mask).contiguous()
    optimizer.step()


def optimizer_of(moving: list[torch.Tensor], settings: Training) -> torch.optim.Optimizer:
    """Adam, or gradient steps with momentum."""
    if settings.momentum is None:
        return adam(moving, settings.learning_rate)
    fused = _all_fused(moving)
    return torch.optim.SGD(moving, lr=settings.learning_rate, momentum=settings.momentum, fused=fused)


def adam(moving: list[torch.Tensor], rate: float) -> torch.optim.Adam:
    """Adam's steps, which are faster in one piece where the device has them so."""
    return torch.optim.Adam(moving, lr=rate, fused=_all_fused(moving))


def _all_fused(moving: list[torch.Tensor]) -> bool:
    return all(is_fused(value.device) for value in moving)


def loss_of(unit: NetworkUnit, state: dict[str, torch.Tensor], X: torch.Tensor, y: torch.Tensor) -> float:
    """Mean negative log likelihood of all rows at these parameters and buffers, computed for some rows at a time."""
    net = unit.net
    with torch.no_grad():
        return float(mean_loss(unit, by_parts(net, lambda rows: call(net, state, rows), X), y))


def mean_loss(unit: NetworkUnit, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean negative log likelihood of a batch."""
    return unit.likelihood.mean(output, y)
