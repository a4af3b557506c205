"""Steps towards the variational posterior of a network's head, and of the layers below under draws of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from fedppl.nn.devices import generator_of, host, taken
from fedppl.nn.functional import Places
from fedppl.nn.head import Head, expected_loss, features, head_slopes, without_head
from fedppl.nn.train import RISE, Leaves, Training, arranged, loss_of, optimizer_of, require_bounded, take_step
from fedppl.nn.unit import NetworkUnit, outcomes
from fedppl.types import Array, LocalFailure

_BLOCK = 200_000  # numbers that are drawn at once
_FEW = 32  # draws of the head, to see whether the loss under them fell


class HeadSteps(NamedTuple):
    """How a client looks for q, on all rows in every step."""

    learning_rate: float  # Adam's, or per unit of the bound's slope
    steps: int
    draws: int
    momentum: float | None = None  # of gradient steps; None for Adam


def optimizer_of_heads(moving: list[torch.Tensor], steps: HeadSteps) -> torch.optim.Optimizer:
    """Adam on the bound over the number of rows, or gradient steps on the bound itself."""
    return optimizer_of(moving, Training(steps.learning_rate, steps.steps, 1, steps.momentum))


def softplus_backwards(sd: Array) -> torch.Tensor:
    """The number whose softplus is this."""
    given = torch.from_numpy(sd)
    return torch.where(given > 20, given, torch.log(torch.expm1(given)))


def head_posterior(
    unit: NetworkUnit,
    head: Head,
    z: torch.Tensor,
    start: tuple[Array, Array],
    centre: Array,
    confidence: float,
    steps: HeadSteps,
    rng: np.random.Generator,
) -> tuple[Array, Array]:
    r"""Move q towards the variational posterior under N(w, I / τ).

    .. math:: -\frac1{nK} \sum_k \log p(y \mid v_k) + \frac1n \Big[\tfrac\tau2 (\lVert \sigma \rVert^2 +
              \lVert \mu - w \rVert^2) - \sum_i \log \sigma_i\Big]

    Parameters
    ----------
    unit, head, z
        The client, its head and its features (n, h).
    start
        μ and σ, (d,) each.
    centre, confidence
        w (d,) and τ.
    steps
        Rate and number of steps, K, and the momentum of gradient steps on n times this.
    rng
        Draws.

    Returns
    -------
    tuple
        μ and σ, (d,) each.

    Raises
    ------
    LocalFailure
        Where steps run away.
    """
    dtype, rows = z.dtype, len(z)
    y, middle = outcomes(unit, dtype), unit.tensor(np.asarray(centre, dtype=float), dtype)
    mean = unit.tensor(np.array(start[0], dtype=float), dtype)
    raw = softplus_backwards(np.asarray(start[1], dtype=float)).to(dtype).to(mean.device)
    optimizer, source = optimizer_of_heads([mean, raw], steps), generator_of(rng)
    scale = 1 if steps.momentum is None else rows
    with torch.no_grad():
        for _ in range(steps.steps):
            spread = torch.nn.functional.softplus(raw)
            noise = torch.randn(steps.draws, len(mean), generator=source, dtype=dtype).to(mean.device)
            slopes = head_slopes(unit, head, z, y, mean + spread * noise)
            mean.grad = scale * (slopes.mean(0) + (confidence / rows) * (mean - middle))
            by_spread = (slopes * noise).mean(0) + (confidence * spread - 1 / spread) / rows
            raw.grad = scale * by_spread * torch.sigmoid(raw)  # softplus' slope
            optimizer.step()
    found = host(mean), host(torch.nn.functional.softplus(raw))
    if not all(np.all(np.isfinite(value)) for value in found):
        raise LocalFailure("the head's posterior is not finite; lower head_rate=")
    return found


def head_noise(draws: int, size: int, source: torch.Generator, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Standard normal numbers (K, d) for draws of the head, without end, made in blocks."""
    count = max(1, _BLOCK // (draws * size))
    while True:
        block = torch.randn(count, draws, size, generator=source, dtype=dtype)
        for k in range(count):
            yield block[k]


def train_below(
    unit: NetworkUnit,
    head: Head,
    w: Array,
    below: Places,
    q: tuple[Array, Array],
    settings: Training,
    draws: int,
    rng: np.random.Generator,
    *,
    dtype: torch.dtype = torch.float32,
) -> Array:
    """Weights (D,) after training those at `below` on the mean loss under draws of the head.

    Raises
    ------
    LocalFailure
        If the loss ends far above where it began, at the head's mean and under draws of it, or at what is not finite.
    """
    flat = np.asarray(w, dtype=float)
    leaves = Leaves(unit, flat, np.asarray(below, dtype=np.int64), dtype)
    X, y = arranged(leaves.net, unit.tensor(unit.X, dtype)), outcomes(unit, dtype)
    mean, spread = (unit.tensor(np.asarray(value, dtype=float), dtype) for value in q)
    optimizer, body = optimizer_of(leaves.moving, settings), without_head(leaves.net, head)
    noise = head_noise(draws, len(mean), generator_of(rng), dtype)
    before = loss_of(unit, leaves.state, X, y)
    with torch.enable_grad():
        for _ in range(settings.epochs):
            for batch in torch.split(torch.from_numpy(rng.permutation(len(X))), settings.batch_size):
                z, v = body(taken(X, batch)), mean + spread * next(noise).to(mean.device)
                take_step(optimizer, leaves, expected_loss(unit, head, z, taken(y, batch), v))
    after = loss_of(unit, leaves.state, X, y)
    found = require_bounded(leaves.result(flat), flat)

    def expected(w: Array) -> float:
        """What the steps descend, under draws that are the same at every call."""
        drawn = torch.randn(_FEW, len(mean), generator=torch.Generator().manual_seed(0), dtype=dtype).to(mean.device)
        with torch.no_grad():
            return float(expected_loss(unit, head, features(unit, head, w, dtype=dtype), y, mean + spread * drawn))

    if not after <= before + RISE and not expected(found) <= expected(flat) + RISE:
        raise LocalFailure("training raised the loss instead of lowering it; lower learning_rate=")
    return found
