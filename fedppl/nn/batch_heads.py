"""Heads of clients with one network, and layers below them, in a batch: each takes the steps that it takes alone."""

from __future__ import annotations

import copy

import numpy as np
import torch

from fedppl.nn.batch import Stack, forward
from fedppl.nn.batch_train import Flags, Minibatch, Rngs, State, Weights, bounded, losses, take_steps
from fedppl.nn.devices import generator_of, host, tensor
from fedppl.nn.functional import Places, call, state_of
from fedppl.nn.head import Head, without_head
from fedppl.nn.likelihood import Likelihood
from fedppl.nn.personal import HeadSteps, head_noise, optimizer_of_heads, softplus_backwards
from fedppl.nn.train import RISE, Training
from fedppl.types import Array


def features_together(stack: Stack, head: Head, W: Array, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What heads see of their clients' rows at weights W (K, D): (K, n, h), with zeros behind a client's last row."""
    body = without_head(copy.deepcopy(stack.net), head)
    own = set(dict(body.named_parameters())) | set(dict(body.named_buffers()))
    parts = []
    with torch.no_grad():
        for k, w in enumerate(W):
            state = state_of(stack.net, tensor(w, dtype, stack.X.device))
            parts.append(call(body, {name: state[name] for name in own}, stack.X[stack.client(k)]))
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def head_posteriors(
    stack: Stack,
    head: Head,
    z: torch.Tensor,
    starts: tuple[Array, Array],
    centres: Array,
    confidences: Array,
    steps: HeadSteps,
    rngs: Rngs,
) -> tuple[Array, Array, Flags]:
    """What `fedppl.nn.personal.head_posterior` does at each client: μ and σ, (K, d) each, and which are finite.

    Of features z (K, n, h), from μ and σ in `starts`, (K, d) each, with w (K, d) and τ (K,).
    """
    dtype, place, likelihood = z.dtype, z.device, stack.units[0].likelihood
    rows = torch.from_numpy(stack.rows).to(dtype).to(place)[:, None]
    y = torch.nn.utils.rnn.pad_sequence([stack.y[stack.client(k)] for k in range(len(z))], batch_first=True)
    share = (torch.arange(z.shape[1], device=place) < rows) / rows
    tau, middle = tensor(confidences, dtype, place)[:, None], tensor(centres, dtype, place)
    mean, raw = tensor(starts[0].copy(), dtype, place), softplus_backwards(starts[1]).to(dtype).to(place)
    optimizer, scale = optimizer_of_heads([mean, raw], steps), 1 if steps.momentum is None else rows
    sources = [generator_of(rng) for rng in rngs]
    noise = torch.empty(len(z), steps.draws, mean.shape[1], dtype=dtype)
    with torch.no_grad():
        for _ in range(steps.steps):
            spread = torch.nn.functional.softplus(raw)
            for k, source in enumerate(sources):
                torch.randn(noise.shape[1:], generator=source, dtype=dtype, out=noise[k])
            here = noise.to(place)
            slopes = _slopes(likelihood, head, z, y, share, mean[:, None] + spread[:, None] * here)
            mean.grad = scale * (slopes.mean(1) + (tau / rows) * (mean - middle))
            by_spread = (slopes * here).mean(1) + (tau * spread - 1 / spread) / rows
            raw.grad = scale * by_spread * torch.sigmoid(raw)  # softplus' slope
            optimizer.step()
    found = host(mean), host(torch.nn.functional.softplus(raw))
    return *found, np.all(np.isfinite(found), axis=(0, 2))


def _logits(head: Head, z: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Outputs (K, S, C, n) for S draws v (K, S, d) of each client's head."""
    clients, draws = v.shape[:2]
    matrix = v[:, :, head.matrix].reshape(clients, draws * head.outputs, -1)
    output = torch.bmm(matrix, z.mT).view(clients, draws, head.outputs, z.shape[1])
    return output + v[:, :, head.offset, None] if head.offset.stop > head.offset.start else output


def _slopes(
    likelihood: Likelihood, head: Head, z: torch.Tensor, y: torch.Tensor, share: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Gradients (K, S, d) of clients' mean losses at draws v (K, S, d): the residuals times the features."""
    output = _logits(head, z, v)
    residuals = likelihood.slopes_last(output.flatten(0, 1), _of_draws(y, v.shape[1])).view(output.shape)
    # Behind a client's last row nothing counts, whatever the density of an outcome that is not there.
    residuals = torch.where(share[:, None, None] > 0, residuals * share[:, None, None], 0.0)
    slopes = torch.bmm(residuals.view(len(z), -1, z.shape[1]), z).view(len(z), v.shape[1], -1)
    return torch.cat([slopes, residuals.sum(3)], 2) if head.offset.stop > head.offset.start else slopes


def train_below_together(
    stack: Stack,
    head: Head,
    W: Array,
    below: Places,
    q: tuple[Array, Array],
    settings: Training,
    draws: int,
    rngs: Rngs,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Array, Flags]:
    """What `fedppl.nn.personal.train_below` does at each client, for weights (K, D) and q (K, d).

    Returns
    -------
    tuple
        Weights (K, D), and at which clients the loss at the head's mean came to a good end: each of the others has to
        be asked alone.
    """
    body = without_head(copy.deepcopy(stack.net), head)
    place = stack.X.device
    weights, through = Weights(stack.net, W, below, dtype, place), forward(body, dtype, place)
    likelihood, own = stack.units[0].likelihood, [name for name, _ in body.named_parameters()]
    means, spreads = (tensor(value, dtype, place) for value in q)
    noise = [head_noise(draws, means.shape[1], generator_of(rng), dtype) for rng in rngs]

    def loss(state: State, batch: Minibatch) -> torch.Tensor:
        count = len(batch.X)
        drawn = torch.stack([next(each) for each in noise[:count]]).to(place)
        v = means[:count, None] + spreads[:count, None] * drawn
        z = through({name: state[name] for name in own}, batch.X)
        return _expected(likelihood, _logits(head, z, v), batch)

    before = losses(stack, weights, dtype)
    take_steps(stack, weights, settings, rngs, loss)
    after = losses(stack, weights, dtype)
    found = weights.result(W)
    return found, (after <= before + RISE) & bounded(found, W)


def _expected(likelihood: Likelihood, output: torch.Tensor, batch: Minibatch) -> torch.Tensor:
    """Mean negative log likelihood over rows and draws, of outputs (A, S, C, b), summed over clients."""
    clients, draws = output.shape[:2]
    each = likelihood.each_last(output.flatten(0, 1), _of_draws(batch.y, draws))
    return torch.sum(each.view(clients, draws, -1) * batch.share[:, None]) / draws


def _of_draws(y: torch.Tensor, draws: int) -> torch.Tensor:
    """Outcomes (K, n, ...) of each client for each of its draws, (K S, n, ...)."""
    return y[:, None].expand(-1, draws, *y.shape[1:]).flatten(0, 1)
