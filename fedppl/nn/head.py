r"""A variational posterior of a network's last layer, and the layers below trained under it.

.. math:: f(x; v, \theta) = V z(x; \theta) + c, \qquad q(v) = N(\mu, \mathrm{diag}\, \sigma^2), \qquad v = (V, c)

The outputs are linear in the head's weights v, so that the features z are computed once for all of its steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from fedppl.nn._slopes import tensor
from fedppl.nn.functional import call, state_of
from fedppl.nn.read import NetworkUnit
from fedppl.nn.train import RISE, Leaves, arranged, mean_loss, optimizer_of, outcomes, require_bounded, take_step
from fedppl.steps._network import Training
from fedppl.types import Array, DeclarationError, LocalFailure

__all__ = [
    "Head",
    "HeadSteps",
    "expected_loss",
    "features",
    "find_head",
    "head_posterior",
    "train_below",
    "without_head",
]

_LOOKED_AT = 3
_BLOCK = 200_000  # numbers that are drawn at once


class Head(NamedTuple):
    """The last layer: a linear one."""

    layer: str
    places: Array  # of its weights in w, (d,)
    matrix: slice  # of V, raveled, in these
    offset: slice  # of c; empty where it has none
    outputs: int


class HeadSteps(NamedTuple):
    """How a client looks for q: Adam, on all rows in every step."""

    learning_rate: float  # per unit of the bound over the number of rows
    steps: int
    draws: int


def find_head(unit: NetworkUnit, names: tuple[str, ...], places: Array, w: Array) -> Head:
    """The layer that has these parameters.

    Raises
    ------
    DeclarationError
        Where it is not one linear layer, or the network's output is not its output.
    """
    owners = {name.rpartition(".")[0] for name in names}
    layer = next(iter(owners))
    found = unit.net.get_submodule(layer) if len(owners) == 1 else None
    if not isinstance(found, torch.nn.Linear) or len(names) != len(list(found.parameters())):
        raise DeclarationError(
            f"head={names!r} must be all parameters of one torch.nn.Linear; the network has {list(unit.names)}."
        )
    size = found.weight.numel()
    held = Head(layer, places, slice(0, size), slice(size, len(places)), found.out_features)
    X = tensor(unit.X[:_LOOKED_AT], torch.float64)
    with torch.no_grad():
        state = state_of(unit.net, torch.from_numpy(np.asarray(w, dtype=float)))
        z, output = _seen(unit, held, state, X)
        ours = _logits(held, z, torch.from_numpy(np.asarray(w, dtype=float)[places])[None])[0].mT
    if output.shape != ours.shape or not torch.allclose(output, ours, rtol=1e-9, atol=1e-9):
        raise DeclarationError(
            f"head={names!r} is not the network's last layer: its output goes on into others. Name the last linear "
            "layer, and put a softmax into the likelihood (logit_p=)."
        )
    with torch.no_grad():
        try:
            alone = _features(unit, held, state, X)
        except Exception as error:
            raise DeclarationError(
                f"layer {layer!r} cannot be taken off the network ({type(error).__name__}: {error}); call it in "
                "forward, and use its weights nowhere else."
            ) from error
    if alone.shape != z.shape or not torch.equal(alone, z):
        raise DeclarationError(f"layer {layer!r} does more than to end the network; call it last in forward.")
    return held


def _seen(
    unit: NetworkUnit, head: Head, state: dict[str, torch.Tensor], X: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the head is called on (n, h), and the network's output."""
    seen: list[torch.Tensor] = []
    layer = unit.net.get_submodule(head.layer)
    hook = layer.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    try:
        output = call(unit.net, state, X)
    finally:
        hook.remove()
    if len(seen) != 1 or seen[0].ndim != 2:
        raise DeclarationError(
            f"layer {head.layer!r} must be called once, on a matrix with a row for each observation."
        )
    return seen[0], output


def without_head(net: torch.nn.Module, head: Head) -> torch.nn.Module:
    """Take the head off this module: what is left gives features (n, h)."""
    if not head.layer:
        return torch.nn.Identity()
    above, _, name = head.layer.rpartition(".")
    setattr(net.get_submodule(above), name, torch.nn.Identity())
    return net


def _features(unit: NetworkUnit, head: Head, state: dict[str, torch.Tensor], X: torch.Tensor) -> torch.Tensor:
    body = without_head(copy.deepcopy(unit.net), head)
    own = set(dict(body.named_parameters())) | set(dict(body.named_buffers()))
    return call(body, {name: value for name, value in state.items() if name in own}, X)


def _logits(head: Head, z: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Outputs (K, C, n) for weights (K, d) of the head, by one product of matrices; rows last, which is fastest."""
    draws = len(v)
    output = (v[:, head.matrix].reshape(draws * head.outputs, -1) @ z.mT).view(draws, head.outputs, len(z))
    return output + v[:, head.offset, None] if head.offset.stop > head.offset.start else output


def features(unit: NetworkUnit, head: Head, w: Array, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What the head sees of the client's rows, (n, h)."""
    with torch.no_grad():
        state = state_of(unit.net, torch.from_numpy(np.asarray(w)).to(dtype))
        return _features(unit, head, state, tensor(unit.X, dtype))


def expected_loss(unit: NetworkUnit, head: Head, z: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Mean negative log likelihood over rows and over the draws v (K, d)."""
    output = _logits(head, z, v)
    if unit.likelihood.family == "categorical":
        return torch.nn.functional.cross_entropy(output, y.expand(len(v), -1))
    return mean_loss(unit, output.mT.flatten(0, 1), y.repeat(len(v), 1))


def _slopes(unit: NetworkUnit, head: Head, z: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Gradients of the mean loss at each of the draws v (K, d), in closed form: the residuals times the features."""
    residuals = _logits(head, z, v)
    if unit.likelihood.family == "categorical":
        residuals = torch.softmax(residuals, 1)
        residuals.scatter_add_(1, y.expand(len(v), 1, -1), -torch.ones(len(v), 1, len(y), dtype=z.dtype))
        residuals /= len(y)
    else:
        residuals = (residuals - y.mT) / (len(y) * unit.likelihood.noise_sd**2)
    slopes = (residuals.view(-1, len(y)) @ z).view(len(v), -1)
    return torch.cat([slopes, residuals.sum(2)], 1) if head.offset.stop > head.offset.start else slopes


def _generator(rng: np.random.Generator) -> torch.Generator:
    return torch.Generator().manual_seed(int(rng.integers(2**62)))


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
        Adam's rate and number of steps, and K.
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
    y, middle = outcomes(unit, dtype), torch.from_numpy(np.asarray(centre, dtype=float)).to(dtype)
    mean = torch.from_numpy(np.array(start[0], dtype=float)).to(dtype)
    sd = torch.from_numpy(np.asarray(start[1], dtype=float))
    raw = torch.where(sd > 20, sd, torch.log(torch.expm1(sd))).to(dtype)  # softplus backwards
    optimizer, source = torch.optim.Adam([mean, raw], lr=steps.learning_rate, fused=True), _generator(rng)
    with torch.no_grad():
        for _ in range(steps.steps):
            spread = torch.nn.functional.softplus(raw)
            noise = torch.randn(steps.draws, len(mean), generator=source, dtype=dtype)
            slopes = _slopes(unit, head, z, y, mean + spread * noise)
            mean.grad = slopes.mean(0) + (confidence / rows) * (mean - middle)
            by_spread = (slopes * noise).mean(0) + (confidence * spread - 1 / spread) / rows
            raw.grad = by_spread * torch.sigmoid(raw)  # softplus' slope
            optimizer.step()
    found = mean.double().numpy(), torch.nn.functional.softplus(raw).double().numpy()
    if not all(np.all(np.isfinite(value)) for value in found):
        raise LocalFailure("the head's posterior is not finite; lower head_rate=")
    return found


def _heads(q: tuple[torch.Tensor, torch.Tensor], draws: int, source: torch.Generator) -> Iterator[torch.Tensor]:
    """Draws (K, d) of the head without end, made in blocks."""
    size = draws * len(q[0])
    block = max(1, _BLOCK // size)
    while True:
        yield from q[0] + q[1] * torch.randn(block, draws, len(q[0]), generator=source, dtype=q[0].dtype)


def train_below(
    unit: NetworkUnit,
    head: Head,
    w: Array,
    below: Array,
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
        If the loss at the head's mean ends far above where it began, or at what is not finite.
    """
    flat = np.asarray(w, dtype=float)
    leaves = Leaves(unit, flat, np.asarray(below, dtype=np.int64), dtype)
    X, y = arranged(leaves.net, tensor(unit.X, dtype)), outcomes(unit, dtype)
    mean, spread = (torch.from_numpy(np.asarray(value, dtype=float)).to(dtype) for value in q)
    optimizer, body = optimizer_of(leaves.moving, settings), without_head(leaves.net, head)
    heads = _heads((mean, spread), draws, _generator(rng))
    with torch.no_grad():
        before = float(mean_loss(unit, call(unit.net, leaves.state, X), y))
    with torch.enable_grad():
        for _ in range(settings.epochs):
            for batch in torch.split(torch.from_numpy(rng.permutation(len(X))), settings.batch_size):
                z = body(X[batch])
                take_step(optimizer, leaves, expected_loss(unit, head, z, y[batch], next(heads)))
    with torch.no_grad():
        after = float(mean_loss(unit, call(unit.net, leaves.state, X), y))
    if not after <= before + RISE:
        raise LocalFailure("training raised the loss instead of lowering it; lower learning_rate=")
    return require_bounded(leaves.result(flat), flat)
