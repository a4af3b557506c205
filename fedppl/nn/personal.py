"""Clients' steps: through a gradient step, a proximal map or a posterior of all weights, and of heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedppl.nn.functional import Places, call, generator_of, gradients, host, parts_of, state_of, taken, tensor
from fedppl.nn.likelihood import Likelihood
from fedppl.nn.subnet import Subnetwork, along, chunks
from fedppl.nn.train import Leaves, Training, batches, loss_at, optimizer_of, require_bounded, require_no_rise, rows_of
from fedppl.nn.unit import (
    Head,
    NetworkUnit,
    Pair,
    expected_loss,
    features,
    head_slopes,
    outcomes,
    outputs,
    without_head,
)
from fedppl.types import Array, LocalFailure, Rng

_DIFFERENCE = 1e-2  # of weights, for a product with the Hessian
_DRAWS = 32  # of all weights, to check that a bound fell
_Normals = tuple[Pair, Pair]  # means and sds of q, and of p


def _loss(unit: NetworkUnit, flat: Tensor, X: Tensor, y: Tensor) -> Tensor:
    net = unit.net
    return unit.likelihood.mean(call(net, state_of(net, flat), X), y)


def _gradient(unit: NetworkUnit, flat: Tensor, X: Tensor, y: Tensor) -> Tensor:
    leaf = flat.detach().requires_grad_()
    with torch.enable_grad():
        return gradients(_loss(unit, leaf, X, y), [leaf])[0]


def meta_steps(
    unit: NetworkUnit, w: Array, steps: Training, inner_rate: float, rng: Rng, *, dtype: torch.dtype = torch.float32
) -> Array:
    r"""Descend F(w) = f(w − α ∇f(w)) with the Hessian's product by differences, Per-FedAvg (HF).

    .. math:: \nabla F(w) \approx g - \alpha \frac{\nabla f(w + \delta u) - \nabla f(w - \delta u)}{2 \delta}
              \lVert g \rVert, \qquad g = \nabla f(w - \alpha \nabla f(w)), \quad u = g / \lVert g \rVert

    The three gradients are of three batches; δ is 0.01. F tells divergence: f itself may rise far on the
    way to weights that are good after a step.
    """
    (X, y), flat = rows_of(unit, unit.net, dtype), unit.tensor(np.array(w), dtype)
    before = _ahead(unit, flat, X, y, inner_rate)
    for batch in batches(len(X), steps, rng):
        second, third = (torch.from_numpy(rng.choice(len(X), len(batch), replace=False)) for _ in range(2))
        ahead = flat - inner_rate * _gradient(unit, flat, taken(X, batch), taken(y, batch))
        g = _gradient(unit, ahead, taken(X, second), taken(y, second))
        length = torch.linalg.vector_norm(g)
        if length > 0:
            u = _DIFFERENCE * g / length
            sides = [_gradient(unit, flat + sign * u, taken(X, third), taken(y, third)) for sign in (1, -1)]
            g = g - inner_rate * length / (2 * _DIFFERENCE) * (sides[0] - sides[1])
        flat = flat - steps.learning_rate * g
    rise = _ahead(unit, flat, X, y, inner_rate) - before
    require_no_rise("learning_rate= or inner_rate=", rise, what="loss after a client's own step")
    return require_bounded(host(flat), w)


def _ahead(unit: NetworkUnit, flat: Tensor, X: Tensor, y: Tensor, rate: float) -> float:
    """F: the mean loss after one gradient step on all rows."""
    return loss_at(unit, host(flat - rate * _slope(unit, flat, X, y)), dtype=flat.dtype)


def _slope(unit: NetworkUnit, flat: Tensor, X: Tensor, y: Tensor) -> Tensor:
    """Gradient of the mean loss of all rows, computed for some rows at a time."""
    slope = torch.zeros_like(flat)
    for rows in parts_of(unit.net, X.shape):
        slope += _gradient(unit, flat, X[rows], y[rows]) * (len(X[rows]) / len(X))
    return slope


def further_gain(unit: NetworkUnit, start: Array, end: Array, prior: Pair | None, free: Places) -> float:
    r"""The fall of the mean loss by as long a step again, to first order.

    .. math:: -(\nabla f(w_1) + \tfrac1n p (w_1 - m))^\top (w_1 - w_0)

    Means m and precisions p of a prior are those of the weights at `free`.
    """
    X, y = rows_of(unit, unit.net, torch.float32)
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
    rng: Rng,
    *,
    dtype: torch.dtype = torch.float32,
) -> Pair:
    r"""Descend the Moreau envelope of the loss, pFedMe: w ← w − η λ (w − θ).

    .. math:: \theta \approx \arg\min_\theta f(\theta) + \tfrac\lambda2 \lVert \theta - w \rVert^2

    by `inner` = (rate, number) gradient steps on one batch from w, which take the quadratic exactly: a step of rate p
    on f and then the proximal map of the quadratic. Returns w and the last θ.
    """
    X, y = rows, labels = rows_of(unit, unit.net, dtype)
    flat = theta = centre = unit.tensor(np.array(w), dtype)
    at_start = loss_at(unit, host(flat))
    for batch in batches(len(X), steps, rng):
        rows, labels, centre = taken(X, batch), taken(y, batch), flat
        theta, (rate, count) = centre, inner
        for _ in range(count):
            theta = theta - rate * _gradient(unit, theta, rows, labels)
            theta = (theta + rate * lam * centre) / (1.0 + rate * lam)
        flat = centre - steps.learning_rate * lam * (centre - theta)
    # On the last batch alone: it may be one row, which θ fits at the cost of all others.
    with torch.no_grad():
        after = float(_loss(unit, theta, rows, labels) + 0.5 * lam * torch.sum((theta - centre) ** 2))
        before = float(_loss(unit, centre, rows, labels))
    require_no_rise("inner_rate=", after - before)
    ended = host(flat)
    rise = loss_at(unit, ended) - at_start if np.all(np.isfinite(ended)) else np.inf
    require_no_rise("learning_rate= or inner_rate=", rise)
    return ended, host(theta)


def bayes_steps(
    unit: NetworkUnit,
    mean: Array,
    sd: Array,
    steps: Training,
    weight: float,
    draws: int,
    rng: Rng,
    *,
    start: Pair | None = None,
    follow: bool = True,
    dtype: torch.dtype = torch.float32,
) -> _Normals:
    r"""Steps of pFedBayes and BPFed: the client's q and its copy of the p around it, by turns, with Adam.

    .. math:: \min_q \; -\tfrac1n E_q \log p(y \mid w) + \tfrac\zeta n \mathrm{KL}(q \| p), \qquad
              \min_p \; \tfrac\zeta n \mathrm{KL}(q \| p)

    q starts at `start`, or at p; p is fixed without `follow`. Returns means and sds of q and of p. Steps have diverged
    where both the loss at the mean of q and the first objective rose far.
    """
    (X, y), source = rows_of(unit, unit.net, dtype), generator_of(rng)

    def raw(pair: Pair) -> list[Tensor]:
        middle, spread = (np.array(value, dtype=float) for value in pair)
        both = torch.from_numpy(middle), softplus_backwards(spread)
        return [value.to(dtype).to(X.device).requires_grad_() for value in both]

    q, p = raw((mean, sd) if start is None else start), raw((mean, sd))
    optimizers = [optimizer_of(pair, steps.learning_rate, None) for pair in (q, p)]
    started, strength = (_normal(q), _normal(p)), weight / len(X)
    with torch.no_grad():
        spread, width = (nn.functional.softplus(pair[1]) for pair in (q, p))
        for batch in batches(len(X), steps, rng):
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
            spread = nn.functional.softplus(q[1])
            if follow:
                apart = q[0] - p[0]
                of_width = strength / width - inverse / width * (spread**2 + apart**2)
                _step(optimizers[1], p, -inverse * apart, of_width)
                width = nn.functional.softplus(p[1])
    ended = _normal(q), _normal(p)
    if not all(np.all(np.isfinite(value)) for pair in ended for value in pair):
        raise LocalFailure("a posterior is not finite; lower learning_rate=")
    # q moves towards p, whose loss may be far higher, and to weights robust to noise; p follows q, whatever its loss.
    rise = loss_at(unit, ended[0][0]) - max(loss_at(unit, middle) for middle, _ in started)
    require_no_rise(
        "learning_rate=", rise, lambda: _bound(unit, ended, strength) - _bound(unit, started, strength), what="bound"
    )
    return ended


def _normal(pair: list[Tensor]) -> Pair:
    return host(pair[0]).copy(), host(nn.functional.softplus(pair[1].detach()))


def _bound(unit: NetworkUnit, both: _Normals, strength: float) -> float:
    """The objective of the steps: the mean loss over draws, the same at every call, and KL(q || p) times a strength."""
    (mean, sd), (middle, width) = both
    rng = np.random.default_rng(0)
    expected = np.mean([loss_at(unit, mean + sd * rng.normal(size=len(sd))) for _ in range(_DRAWS)])
    apart = np.log(width / sd) + 0.5 * ((sd**2 + (mean - middle) ** 2) / width**2 - 1.0)
    return float(expected + strength * apart.sum())


def _step(optimizer: torch.optim.Optimizer, pair: list[Tensor], of_mean: Tensor, of_sd: Tensor) -> None:
    """A step by the slopes in means and sds, of the means and the softplus' arguments."""
    pair[0].grad, pair[1].grad = of_mean, of_sd * torch.sigmoid(pair[1])
    optimizer.step()


# Steps towards the variational posterior of a network's head, and of the layers below under draws of it ---------------

_BLOCK = 200_000  # numbers that are drawn at once
_FEW = 32  # draws of the head, to check that the loss under them fell


class HeadSteps(NamedTuple):
    """A client's steps towards q, each on all rows."""

    learning_rate: float  # Adam's for the bound over the number of rows, or per unit of the bound's slope
    steps: int
    draws: int
    momentum: float | None = None  # of gradient steps; None for Adam


def softplus_backwards(sd: Array) -> Tensor:
    """The number whose softplus is this."""
    value = torch.from_numpy(sd)
    return torch.where(value > 20, value, torch.log(torch.expm1(value)))


def head_posteriors(
    likelihood: Likelihood,
    head: Head,
    rows: tuple[Tensor, Tensor, NDArray[np.int64]],
    starts: Pair,
    centres: Array,
    confidences: Array,
    steps: HeadSteps,
    rngs: Sequence[Rng],
) -> tuple[Array, Array, NDArray[np.bool_]]:
    r"""Move q of K clients towards the variational posteriors of their heads under N(w, I / τ).

    .. math:: -\frac1{nK} \sum_k \log p(y \mid v_k) + \frac1n \Big[\tfrac\tau2 (\lVert \sigma \rVert^2 +
              \lVert \mu - w \rVert^2) - \sum_i \log \sigma_i\Big]

    Given are `rows`: features (K, n, h), outcomes and numbers of rows (K,); μ and σ (K, d) each, where they start;
    w (K, d), the `centres`, and τ (K,), the `confidences`. Returns μ and σ, and which clients' are finite.
    """
    z, y, counts = rows
    dtype, place = z.dtype, z.device
    count = torch.from_numpy(counts).to(dtype).to(place)[:, None]
    share = (torch.arange(z.shape[1], device=place) < count) / count
    tau, middle = tensor(confidences, dtype, place)[:, None], tensor(centres, dtype, place)
    mean, raw = tensor(starts[0].copy(), dtype, place), softplus_backwards(starts[1]).to(dtype).to(place)
    optimizer = optimizer_of([mean, raw], steps.learning_rate, steps.momentum)
    scale = 1 if steps.momentum is None else count
    sources = [generator_of(rng) for rng in rngs]
    drawn = torch.empty(len(z), steps.draws, mean.shape[1], dtype=dtype)
    with torch.no_grad():
        for _ in range(steps.steps):
            spread = nn.functional.softplus(raw)
            for k, source in enumerate(sources):
                torch.randn(drawn.shape[1:], generator=source, dtype=dtype, out=drawn[k])
            noise = drawn.to(place)
            slopes = head_slopes(likelihood, head, z, y, share, mean[:, None] + spread[:, None] * noise)
            mean.grad = scale * (slopes.mean(1) + (tau / count) * (mean - middle))
            by_spread = (slopes * noise).mean(1) + (tau * spread - 1 / spread) / count
            raw.grad = scale * by_spread * torch.sigmoid(raw)  # softplus' slope
            optimizer.step()
    moments = host(mean), host(nn.functional.softplus(raw))
    return *moments, np.all(np.isfinite(moments), axis=(0, 2))


def head_noise(draws: int, size: int, source: torch.Generator, dtype: torch.dtype) -> Iterator[Tensor]:
    """An infinite series of standard normal numbers (K, d) for draws of the head, made in blocks."""
    count = max(1, _BLOCK // (draws * size))
    while True:
        block = torch.randn(count, draws, size, generator=source, dtype=dtype)
        for k in range(count):
            yield block[k]


def train_below(
    unit: NetworkUnit,
    head: Head,
    w: Array,
    q: Pair,
    settings: Training,
    draws: int,
    rng: Rng,
    *,
    dtype: torch.dtype = torch.float32,
) -> Array:
    """Weights (D,) after training those below the head on the mean loss under draws of it.

    Raises `LocalFailure` if the loss is not finite, or rose far at the head's mean and under draws of it.
    """
    flat = np.asarray(w, dtype=float)
    leaves = Leaves(unit, flat, head.below, settings, dtype)
    mean, spread = (unit.tensor(np.asarray(value, dtype=float), dtype) for value in q)
    body = without_head(leaves.net, head)
    noise = head_noise(draws, len(mean), generator_of(rng), dtype)
    with torch.enable_grad():
        for batch in batches(len(leaves.X), settings, rng):
            z, v = body(taken(leaves.X, batch)), mean + spread * next(noise).to(mean.device)
            leaves.descend(expected_loss(unit, head, z, taken(leaves.y, batch), v))
    trained = require_bounded(leaves.result(flat), flat)

    def rise_under_draws() -> float:
        drawn = torch.randn(_FEW, len(mean), generator=torch.Generator().manual_seed(0), dtype=dtype).to(mean.device)
        zs = (features(unit, head, weights, dtype=dtype) for weights in (trained, flat))
        with torch.no_grad():
            after, before = (float(expected_loss(unit, head, z, leaves.y, mean + spread * drawn)) for z in zs)
        return after - before

    rise = loss_at(unit, trained, dtype=dtype) - loss_at(unit, flat, dtype=dtype)
    require_no_rise("learning_rate=", rise, rise_under_draws)
    return trained


# The density of a client's held-out rows, by draws of its linearised network ------------------------------------------

#     log p(y | f_s),   f_s(x) = f(x; ŵ) + J_S(x) (w_S − ŵ_S),   w_S ~ q


def log_densities(unit: NetworkUnit, q: Subnetwork, count: int, rng: Rng) -> Array:
    """Log density of held-out rows at each of `count` draws from a subnetwork's posterior q by other rows, (count,)."""
    deviations, density = unit.tensor(q.deviations(count, rng), torch.float64), np.zeros(count)  # (count, s)
    at, y, first = outputs(unit, q.weights, unit.X), outcomes(unit, torch.float64), 0
    for part in chunks(unit, q.weights, q.places, torch.float64, X=unit.X):
        rows = slice(first, first + len(part.rest))
        first = rows.stop
        middle = at[rows].reshape(part.rest.shape[:2])
        for draw in range(count):
            density[draw] += unit.likelihood.log_density(middle + along(part, deviations[draw]), y[rows])
    return density
