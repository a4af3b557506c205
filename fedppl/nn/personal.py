"""Steps of methods that personalise whole networks: through a gradient step, a proximal map, or a posterior of all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from fedppl.nn._slopes import tensor
from fedppl.nn.functional import call, pieces
from fedppl.nn.train import RISE, Training, mean_loss, outcomes
from fedppl.nn.unit import NetworkUnit
from fedppl.types import Array, LocalFailure


def loss_at(unit: NetworkUnit, w: Array, *, dtype: torch.dtype = torch.float32) -> float:
    """Mean negative log likelihood of the client's rows at w (d,)."""
    with torch.no_grad():
        return float(_loss(unit, torch.from_numpy(w).to(dtype), tensor(unit.X, dtype), outcomes(unit, dtype)))


def _loss(unit: NetworkUnit, flat: torch.Tensor, X: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    net = unit.net
    return mean_loss(unit, call(net, pieces(net, flat) | dict(net.named_buffers()), X), y)


def _gradient(unit: NetworkUnit, flat: torch.Tensor, X: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    leaf = flat.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(_loss(unit, leaf, X, y), leaf)[0]


def _batches(rows: int, steps: Training, rng: np.random.Generator) -> Iterator[torch.Tensor]:
    for _ in range(steps.epochs):
        yield from torch.split(torch.from_numpy(rng.permutation(rows)), steps.batch_size)


def _draw(rows: int, size: int, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.choice(rows, min(rows, size), replace=False))


def _checked(unit: NetworkUnit, w: Array, before: float, setting: str) -> Array:
    if not np.all(np.isfinite(w)) or not loss_at(unit, w) <= before + RISE:
        raise LocalFailure(f"training raised the loss instead of lowering it; lower {setting}=")
    return w


def meta_steps(
    unit: NetworkUnit,
    w: Array,
    steps: Training,
    inner_rate: float,
    rng: np.random.Generator,
    *,
    difference: float = 1e-2,
    dtype: torch.dtype = torch.float32,
) -> Array:
    r"""Descend F(w) = f(w − α ∇f(w)) with the Hessian's product by differences, Per-FedAvg (HF).

    .. math:: \nabla F(w) \approx g - \alpha \frac{\nabla f(w + \delta u) - \nabla f(w - \delta u)}{2 \delta}
              \lVert g \rVert, \qquad g = \nabla f(w - \alpha \nabla f(w)), \quad u = g / \lVert g \rVert

    The three gradients are of three batches; δ is `difference`.
    """
    X, y, before = tensor(unit.X, dtype), outcomes(unit, dtype), loss_at(unit, w)
    flat = torch.from_numpy(np.array(w)).to(dtype)
    for batch in _batches(len(X), steps, rng):
        second, third = (_draw(len(X), len(batch), rng) for _ in range(2))
        there = flat - inner_rate * _gradient(unit, flat, X[batch], y[batch])
        g = _gradient(unit, there, X[second], y[second])
        length = torch.linalg.vector_norm(g)
        if length > 0:
            u = difference * g / length
            sides = [_gradient(unit, flat + sign * u, X[third], y[third]) for sign in (1, -1)]
            g = g - inner_rate * length / (2 * difference) * (sides[0] - sides[1])
        flat = flat - steps.learning_rate * g
    return _checked(unit, flat.double().numpy(), before, "learning_rate")


def moreau_steps(
    unit: NetworkUnit,
    w: Array,
    steps: Training,
    lam: float,
    inner: tuple[float, int],
    rng: np.random.Generator,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Array, Array]:
    r"""Descend the Moreau envelope of the loss, pFedMe: w ← w − η λ (w − θ).

    .. math:: \theta \approx \arg\min_\theta f(\theta) + \tfrac\lambda2 \lVert \theta - w \rVert^2

    by `inner` = (rate, number) gradient steps on one batch from w, which take the quadratic exactly: a step of rate p
    on f and then the proximal map of the quadratic. Returns w and the last θ.
    """
    X, y, before = tensor(unit.X, dtype), outcomes(unit, dtype), loss_at(unit, w)
    flat = torch.from_numpy(np.array(w)).to(dtype)
    theta = flat
    rate, count = inner
    for batch in _batches(len(X), steps, rng):
        theta = flat
        for _ in range(count):
            theta = theta - rate * _gradient(unit, theta, X[batch], y[batch])
            theta = (theta + rate * lam * flat) / (1.0 + rate * lam)
        flat = flat - steps.learning_rate * lam * (flat - theta)
    found = _checked(unit, flat.double().numpy(), before, "learning_rate")
    return found, _checked(unit, theta.double().numpy(), before, "inner_rate")


def bayes_steps(
    unit: NetworkUnit,
    mean: Array,
    sd: Array,
    steps: Training,
    weight: float,
    draws: int,
    rng: np.random.Generator,
    *,
    start: tuple[Array, Array] | None = None,
    follow: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    r"""Steps of pFedBayes and BPFed: the client's q and its copy of the p around it, by turns, with Adam.

    .. math:: \min_q \; -\tfrac1n E_q \log p(y \mid w) + \tfrac\zeta n \mathrm{KL}(q \| p), \qquad
              \min_p \; \tfrac\zeta n \mathrm{KL}(q \| p)

    q starts at `start`, or at p; p stays without `follow`. Returns means and sds of q and of p.
    """
    X, y = tensor(unit.X, dtype), outcomes(unit, dtype)
    source = torch.Generator().manual_seed(int(rng.integers(2**62)))

    def raw(pair: tuple[Array, Array]) -> list[torch.Tensor]:
        middle, spread = (torch.from_numpy(np.array(value, dtype=float)) for value in pair)
        backwards = torch.where(spread > 20, spread, torch.log(torch.expm1(spread)))
        return [middle.to(dtype).requires_grad_(), backwards.to(dtype).requires_grad_()]

    q, p = raw((mean, sd) if start is None else start), raw((mean, sd))
    optimizers = [torch.optim.Adam(pair, lr=steps.learning_rate, fused=True) for pair in (q, p)]
    before = loss_at(unit, q[0].detach().double().numpy())
    with torch.enable_grad():
        for batch in _batches(len(X), steps, rng):
            spread = torch.nn.functional.softplus(q[1])
            loss = torch.zeros((), dtype=dtype)
            for _ in range(draws):
                w = q[0] + spread * torch.randn(len(spread), generator=source, dtype=dtype)
                loss = loss + _loss(unit, w, X[batch], y[batch]) / draws
            held = [value.detach() for value in p]
            _step(optimizers[0], q, loss + weight / len(X) * _kl(q, held))
            if follow:
                held = [value.detach() for value in q]
                _step(optimizers[1], p, weight / len(X) * _kl(held, p))
    found = [
        (pair[0].detach().double().numpy(), torch.nn.functional.softplus(pair[1].detach()).double().numpy())
        for pair in (q, p)
    ]
    for middle, width in found:
        if not np.all(np.isfinite(width)):
            raise LocalFailure("a posterior is not finite; lower learning_rate=")
        _checked(unit, middle, before, "learning_rate")
    return found[0], found[1]


def _kl(q: list[torch.Tensor], p: list[torch.Tensor]) -> torch.Tensor:
    """KL of normals with independent coordinates."""
    a, b = (torch.nn.functional.softplus(pair[1]) for pair in (q, p))
    return (torch.log(b / a) + (a**2 + (q[0] - p[0]) ** 2) / (2 * b**2) - 0.5).sum()


def _step(optimizer: torch.optim.Optimizer, pair: list[torch.Tensor], loss: torch.Tensor) -> None:
    for value, gradient in zip(pair, torch.autograd.grad(loss, pair), strict=True):
        value.grad = gradient
    optimizer.step()
