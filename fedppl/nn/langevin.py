"""Langevin dynamics of a network's last layer, beside gradient steps on the layers below it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from fedppl.nn.devices import generator_of, host, taken
from fedppl.nn.functional import Places, gradients
from fedppl.nn.head import Head, expected_loss, features, without_head
from fedppl.nn.train import RISE, Leaves, Training, arranged, loss_of, optimizer_of, require_bounded
from fedppl.nn.unit import NetworkUnit, outcomes
from fedppl.types import Array, LocalFailure


class Chain(NamedTuple):
    """A run of the chain."""

    last: Array  # (d,)
    mean: Array  # over the second half of the run, (d,)
    sd: Array  # likewise


def langevin_steps(
    unit: NetworkUnit,
    head: Head,
    w: Array,
    below: Places,
    start: Array,
    prior: tuple[Array, float],
    settings: Training,
    head_rate: float,
    rng: np.random.Generator,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Array, Chain]:
    r"""Move the head v by noisy gradient steps towards its posterior, and the layers below down the loss at v.

    .. math:: v \leftarrow \beta + \rho \big(v - \gamma \nabla_v L(v, \theta) - \beta\big)
              + s \sqrt{1 - \rho^2}\; \xi, \qquad \rho = e^{-\gamma / (n s^2)}, \qquad \xi \sim N(0, I)

    L is the mean negative log likelihood of a batch. The prior's part of a step is exact, so that few rows or a narrow
    prior need no shorter steps. With all rows in a batch, θ held and a normal likelihood of curvature λ and slope g at
    β, along an axis, the chain's stationary mean is β − ρ γ g / (1 − ρ (1 − γ λ)) and its variance
    s² (1 − ρ²) / (1 − ρ² (1 − γ λ)²): the posterior's as γ falls.

    Weights w (D,) hold those of the head aside; of the layers `below`, positions in w, none may move. The head starts
    at v (d,), with the `prior` β (d,) and s and the step γ, `head_rate`, per unit of the mean loss. All weights with
    the last v are returned, and the chain. Raises `LocalFailure` where the loss ends far above where it began, alone
    and with the prior's part, or at what is not finite.
    """
    flat, rows = np.array(w, dtype=float), len(unit.X)
    flat[head.places] = start
    y = outcomes(unit, dtype)
    held = None if len(below) else features(unit, head, flat, dtype=dtype)
    leaves = Leaves(unit, flat, np.asarray(below, dtype=np.int64), dtype)
    X = arranged(leaves.net, unit.tensor(unit.X, dtype))
    body = without_head(leaves.net, head)
    optimizer = optimizer_of(leaves.moving, settings) if leaves.moving else None
    v = unit.tensor(np.array(start, dtype=float), dtype).requires_grad_()
    centre, spread = unit.tensor(np.array(prior[0], dtype=float), dtype), prior[1]
    kept = float(np.exp(-head_rate / (rows * spread**2)))
    source = generator_of(rng)
    before, drawn = np.array([_loss(unit, flat, X, y), _pull(flat[head.places], prior, rows)]), []
    with torch.enable_grad():
        for _ in range(settings.epochs):
            for batch in torch.split(torch.from_numpy(rng.permutation(rows)), settings.batch_size):
                z = body(taken(X, batch)) if held is None else taken(held, batch)
                loss = expected_loss(unit, head, z, taken(y, batch), v[None])
                *slopes, slope = gradients(loss, [*leaves.moving, v])
                for leaf, gradient in zip(leaves.moving, slopes, strict=True):
                    leaf.grad = gradient.contiguous()  # fused optimizers go through memory, see take_step
                if optimizer is not None:
                    optimizer.step()
                with torch.no_grad():
                    noise = torch.randn(len(v), generator=source, dtype=dtype).to(v.device)
                    v.copy_(centre + kept * (v - head_rate * slope - centre) + spread * (1 - kept**2) ** 0.5 * noise)
                    drawn.append(host(v).copy())
    half = np.array(drawn[len(drawn) // 2 :])
    found, mean = leaves.result(flat), half.mean(axis=0)
    found[head.places] = mean
    after = np.array([_loss(unit, found, X, y), _pull(mean, prior, rows)])
    # The head is drawn to its population too, whose mean others may have moved far away.
    if not np.isfinite(after[0]) or (len(below) and not min(after[0] - before[0], sum(after - before)) <= RISE):
        raise LocalFailure("training raised the loss instead of lowering it; lower learning_rate= or head_rate=")
    found[head.places] = drawn[-1]
    return require_bounded(found, flat), Chain(drawn[-1], mean, half.std(axis=0))


def _pull(v: Array, prior: tuple[Array, float], rows: int) -> float:
    """Minus the log density of the population, for one row, less a constant."""
    return 0.5 * float(np.sum((v - prior[0]) ** 2)) / (rows * prior[1] ** 2)


def _loss(unit: NetworkUnit, w: Array, X: torch.Tensor, y: torch.Tensor) -> float:
    return loss_of(unit, unit.state(w, X.dtype), X, y)
