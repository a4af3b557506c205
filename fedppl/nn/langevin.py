"""Langevin dynamics of a network's last layer, beside gradient steps on the layers below it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from fedppl.nn._slopes import tensor
from fedppl.nn.functional import call, state_of
from fedppl.nn.head import Head, expected_loss, features, without_head
from fedppl.nn.read import NetworkUnit
from fedppl.nn.train import RISE, Leaves, arranged, mean_loss, optimizer_of, outcomes, require_bounded
from fedppl.steps._network import Training
from fedppl.types import Array, LocalFailure

__all__ = ["Chain", "langevin_steps"]


class Chain(NamedTuple):
    """A run of the chain."""

    last: Array  # (d,)
    mean: Array  # over the second half of the run, (d,)
    sd: Array  # likewise


def langevin_steps(
    unit: NetworkUnit,
    head: Head,
    w: Array,
    below: Array,
    start: Array,
    prior: tuple[Array, float],
    settings: Training,
    head_rate: float,
    rng: np.random.Generator,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Array, Chain]:
    r"""Move the head v by noisy gradient steps towards its posterior, and the layers below down the loss at v.

    .. math:: v \leftarrow v - \gamma \Big[\nabla_v L(v, \theta) + \frac{v - \beta}{n s^2}\Big]
              + \sqrt{2 \gamma / n}\; \xi, \qquad \xi \sim N(0, I)

    L is the mean negative log likelihood of a batch. With all rows in a batch, θ held and a normal likelihood, the
    chain's stationary variance along an eigenvector of the posterior precision Λ with eigenvalue λ is
    1 / (λ (1 − γ λ / 2n)): the posterior's as γ falls.

    Parameters
    ----------
    unit, head
        The client and its head.
    w
        All weights (D,), those of the head aside.
    below
        Positions in w of the weights that take gradient steps; none to hold them.
    start
        v, (d,).
    prior
        β (d,) and s.
    settings
        Steps of the layers below, batches, epochs.
    head_rate
        γ, per unit of the mean loss.
    rng
        Batches and ξ.

    Returns
    -------
    tuple
        All weights with the last v, and the chain.

    Raises
    ------
    LocalFailure
        Where the loss ends far above where it began.
    """
    flat, rows = np.array(w, dtype=float), len(unit.X)
    flat[head.places] = start
    y = outcomes(unit, dtype)
    held = None if len(below) else features(unit, head, flat, dtype=dtype)
    leaves = Leaves(unit, flat, np.asarray(below, dtype=np.int64), dtype)
    X = arranged(leaves.net, tensor(unit.X, dtype))
    body = without_head(leaves.net, head)
    optimizer = optimizer_of(leaves.moving, settings) if leaves.moving else None
    v = torch.from_numpy(np.array(start, dtype=float)).to(dtype).requires_grad_()
    centre, pull = torch.from_numpy(np.array(prior[0], dtype=float)).to(dtype), 1.0 / (rows * prior[1] ** 2)
    source = torch.Generator().manual_seed(int(rng.integers(2**62)))
    before, drawn = _loss(unit, flat, X, y), []
    with torch.enable_grad():
        for _ in range(settings.epochs):
            for batch in torch.split(torch.from_numpy(rng.permutation(rows)), settings.batch_size):
                z = body(X[batch]) if held is None else held[batch]
                loss = expected_loss(unit, head, z, y[batch], v[None])
                *slopes, slope = torch.autograd.grad(loss, [*leaves.moving, v])
                for leaf, gradient in zip(leaves.moving, slopes, strict=True):
                    leaf.grad = gradient.contiguous()  # fused optimizers go through memory, see take_step
                if optimizer is not None:
                    optimizer.step()
                with torch.no_grad():
                    noise = torch.randn(len(v), generator=source, dtype=dtype)
                    v += (2 * head_rate / rows) ** 0.5 * noise - head_rate * (slope + pull * (v - centre))
                    drawn.append(v.double().numpy().copy())
    half = np.array(drawn[len(drawn) // 2 :])
    found = leaves.result(flat)
    found[head.places] = drawn[-1]
    if not _loss(unit, found, X, y) <= before + RISE:
        raise LocalFailure("training raised the loss instead of lowering it; lower learning_rate= or head_rate=")
    return require_bounded(found, flat), Chain(drawn[-1], half.mean(axis=0), half.std(axis=0))


def _loss(unit: NetworkUnit, w: Array, X: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return float(mean_loss(unit, call(unit.net, state_of(unit.net, torch.from_numpy(w).to(X.dtype)), X), y))
