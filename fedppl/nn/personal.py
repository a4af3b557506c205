"""Steps of methods that personalise whole networks: through a gradient step, a proximal map, or a posterior of all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from fedppl.nn.devices import generator_of, host, taken
from fedppl.nn.functional import Places, call, gradients, parts_of, state_of
from fedppl.nn.head_steps import softplus_backwards
from fedppl.nn.train import RISE, Training, adam, arranged, loss_of, mean_loss, require_bounded
from fedppl.nn.unit import NetworkUnit, outcomes
from fedppl.types import Array, LocalFailure

_DRAWS = 32  # of all weights, to see whether a bound fell
_Both = tuple[tuple[Array, Array], tuple[Array, Array]]  # means and sds of q, and of p


def loss_at(unit: NetworkUnit, w: Array, *, dtype: torch.dtype = torch.float32) -> float:
    """Mean negative log likelihood of the client's rows at w (d,)."""
    return loss_of(unit, unit.state(w, dtype), unit.tensor(unit.X, dtype), outcomes(unit, dtype))


def _loss(unit: NetworkUnit, flat: torch.Tensor, X: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    net = unit.net
    return mean_loss(unit, call(net, state_of(net, flat), X), y)


def _gradient(unit: NetworkUnit, flat: torch.Tensor, X: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    leaf = flat.detach().requires_grad_()
    with torch.enable_grad():
        return gradients(_loss(unit, leaf, X, y), [leaf])[0]


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

    The three gradients are of three batches; δ is `difference`. What has diverged is told by F: f itself may rise far
    on the way to weights that are good after a step.
    """
    X, y = arranged(unit.net, unit.tensor(unit.X, dtype)), outcomes(unit, dtype)
    flat = unit.tensor(np.array(w), dtype)
    before = _ahead(unit, flat, X, y, inner_rate)
    for batch in _batches(len(X), steps, rng):
        second, third = (_draw(len(X), len(batch), rng) for _ in range(2))
        there = flat - inner_rate * _gradient(unit, flat, taken(X, batch), taken(y, batch))
        g = _gradient(unit, there, taken(X, second), taken(y, second))
        length = torch.linalg.vector_norm(g)
        if length > 0:
            u = difference * g / length
            sides = [_gradient(unit, flat + sign * u, taken(X, third), taken(y, third)) for sign in (1, -1)]
            g = g - inner_rate * length / (2 * difference) * (sides[0] - sides[1])
        flat = flat - steps.learning_rate * g
    if not _ahead(unit, flat, X, y, inner_rate) <= before + RISE:
        raise LocalFailure("training raised the loss after a client's own step; lower learning_rate= or inner_rate=")
    return require_bounded(host(flat), w)


def _ahead(unit: NetworkUnit, flat: torch.Tensor, X: torch.Tensor, y: torch.Tensor, rate: float) -> float:
    """F: the mean loss after one gradient step on all rows, some rows at a time."""
    there = flat - rate * _slope(unit, flat, X, y)
    with torch.no_grad():
        parts = ((rows, len(X[rows]) / len(X)) for rows in parts_of(unit.net, X.shape))
        return float(sum(_loss(unit, there, X[rows], y[rows]) * share for rows, share in parts))


def _slope(unit: NetworkUnit, flat: torch.Tensor, X: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gradient of the mean loss of all rows, some rows at a time."""
    found = torch.zeros_like(flat)
    for rows in parts_of(unit.net, X.shape):
        found += _gradient(unit, flat, X[rows], y[rows]) * (len(X[rows]) / len(X))
    return found


def further_gain(unit: NetworkUnit, start: Array, end: Array, prior: tuple[Array, Array] | None, free: Places) -> float:
    r"""What going as far again would take off the mean loss, to first order.

    .. math:: -(\nabla f(w_1) + \tfrac1n p (w_1 - m))^\top (w_1 - w_0)

    Means m and precisions p of a prior are those of the weights at `free`.
    """
    X, y = arranged(unit.net, unit.tensor(unit.X, torch.float32)), outcomes(unit, torch.float32)
    slope = host(_slope(unit, unit.tensor(np.array(end), torch.float32), X, y))[free]
    if prior is not None:
        slope = slope + prior[1] * (end[free] - prior[0]) / len(X)
    return -float(slope @ (end - start)[free])


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
    X, y = arranged(unit.net, unit.tensor(unit.X, dtype)), outcomes(unit, dtype)
    start = flat = theta = centre = unit.tensor(np.array(w), dtype)
    rows, labels = X, y
    for batch in _batches(len(X), steps, rng):
        rows, labels, centre = taken(X, batch), taken(y, batch), flat
        theta = _near(unit, centre, rows, labels, lam, inner)
        flat = centre - steps.learning_rate * lam * (centre - theta)
    # The last batch may be one row, for which θ leaves all others.
    if not _held(unit, theta, centre, rows, labels, lam) <= _held(unit, centre, centre, rows, labels, lam) + RISE:
        raise LocalFailure("training raised the loss instead of lowering it; lower inner_rate=")
    return _checked(unit, host(flat), loss_at(unit, host(start)), "learning_rate= or inner_rate"), host(theta)


def _near(
    unit: NetworkUnit, centre: torch.Tensor, X: torch.Tensor, y: torch.Tensor, lam: float, inner: tuple[float, int]
) -> torch.Tensor:
    """θ by steps from w."""
    theta, (rate, count) = centre, inner
    for _ in range(count):
        theta = theta - rate * _gradient(unit, theta, X, y)
        theta = (theta + rate * lam * centre) / (1.0 + rate * lam)
    return theta


def _held(
    unit: NetworkUnit, theta: torch.Tensor, centre: torch.Tensor, X: torch.Tensor, y: torch.Tensor, lam: float
) -> float:
    """The loss of some rows at θ and the quadratic around w."""
    with torch.no_grad():
        return float(_loss(unit, theta, X, y) + 0.5 * lam * torch.sum((theta - centre) ** 2))


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
) -> _Both:
    r"""Steps of pFedBayes and BPFed: the client's q and its copy of the p around it, by turns, with Adam.

    .. math:: \min_q \; -\tfrac1n E_q \log p(y \mid w) + \tfrac\zeta n \mathrm{KL}(q \| p), \qquad
              \min_p \; \tfrac\zeta n \mathrm{KL}(q \| p)

    q starts at `start`, or at p; p stays without `follow`. Returns means and sds of q and of p. Steps have diverged
    where the loss at the mean of q rose far, and the first sum as well.
    """
    X, y = arranged(unit.net, unit.tensor(unit.X, dtype)), outcomes(unit, dtype)
    source = generator_of(rng)

    def raw(pair: tuple[Array, Array]) -> list[torch.Tensor]:
        middle, spread = (np.array(value, dtype=float) for value in pair)
        both = torch.from_numpy(middle), softplus_backwards(spread)
        return [value.to(dtype).to(X.device).requires_grad_() for value in both]

    q, p = raw((mean, sd) if start is None else start), raw((mean, sd))
    optimizers = [adam(pair, steps.learning_rate) for pair in (q, p)]
    started, strength = _normals(q, p), weight / len(X)
    with torch.no_grad():
        spread, width = (torch.nn.functional.softplus(pair[1]) for pair in (q, p))
        for batch in _batches(len(X), steps, rng):
            rows, labels = taken(X, batch), taken(y, batch)
            of_mean, of_spread = torch.zeros_like(spread), torch.zeros_like(spread)
            for _ in range(draws):
                noise = torch.randn(len(spread), generator=source, dtype=dtype).to(X.device)
                slope = _gradient(unit, q[0] + spread * noise, rows, labels) / draws
                of_mean += slope
                of_spread += slope * noise
            inverse = strength / width**2
            of_mean += inverse * (q[0] - p[0])
            of_spread += inverse * spread - strength / spread
            _step(optimizers[0], q, of_mean, of_spread)
            spread = torch.nn.functional.softplus(q[1])
            if follow:
                apart = q[0] - p[0]
                of_width = strength / width - inverse / width * (spread**2 + apart**2)
                _step(optimizers[1], p, -inverse * apart, of_width)
                width = torch.nn.functional.softplus(p[1])
    found = _normals(q, p)
    if not all(np.all(np.isfinite(value)) for pair in found for value in pair):
        raise LocalFailure("a posterior is not finite; lower learning_rate=")
    # q is drawn to p, which may be far worse, and to weights that bear their noise; p follows q, whatever its loss is.
    after, before = loss_at(unit, found[0][0]), max(loss_at(unit, middle) for middle, _ in started)
    if not after <= before + RISE and not _bound(unit, found, strength) <= _bound(unit, started, strength) + RISE:
        raise LocalFailure("training raised the bound instead of lowering it; lower learning_rate=")
    return found


def _normals(q: list[torch.Tensor], p: list[torch.Tensor]) -> _Both:
    """Means and sds of q and of p."""
    one, other = ((host(pair[0]).copy(), host(torch.nn.functional.softplus(pair[1].detach()))) for pair in (q, p))
    return one, other


def _bound(unit: NetworkUnit, both: _Both, strength: float) -> float:
    """What the steps descend: the mean loss over draws, the same at every call, and KL(q || p) times a strength."""
    (mean, sd), (middle, width) = both
    rng = np.random.default_rng(0)
    expected = np.mean([loss_at(unit, mean + sd * rng.normal(size=len(sd))) for _ in range(_DRAWS)])
    apart = np.log(width / sd) + 0.5 * ((sd**2 + (mean - middle) ** 2) / width**2 - 1.0)
    return float(expected + strength * apart.sum())


def _step(
    optimizer: torch.optim.Optimizer, pair: list[torch.Tensor], of_mean: torch.Tensor, of_sd: torch.Tensor
) -> None:
    """A step by the slopes in means and sds; what moves are means and the softplus' arguments."""
    pair[0].grad, pair[1].grad = of_mean, of_sd * torch.sigmoid(pair[1])
    optimizer.step()
