r"""A variational posterior of a network's last layer, and the layers below trained under it.

.. math:: f(x; v, \theta) = V z(x; \theta) + c, \qquad q(v) = N(\mu, \mathrm{diag}\, \sigma^2), \qquad v = (V, c)

The outputs are linear in the head's weights v, so that the features z are computed once for all of its steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from fedppl.nn._slopes import tensor
from fedppl.nn.functional import call, state_of
from fedppl.nn.read import NetworkUnit
from fedppl.nn.train import RISE, Leaves, mean_loss, optimizer_of, outcomes, require_bounded, take_step
from fedppl.steps._network import Training
from fedppl.types import Array, DeclarationError, LocalFailure

__all__ = ["Head", "HeadSteps", "expected_loss", "features", "find_head", "head_posterior", "through", "train_below"]

_LOOKED_AT = 3


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
        z, output = through(unit, held, state_of(unit.net, torch.from_numpy(np.asarray(w, dtype=float))), X)
        ours = _logits(held, z, torch.from_numpy(np.asarray(w, dtype=float)[places]))
    if output.shape != ours.shape or not torch.allclose(output, ours, rtol=1e-9, atol=1e-9):
        raise DeclarationError(
            f"head={names!r} is not the network's last layer: its output goes on into others. Name the last linear "
            "layer, and put a softmax into the likelihood (logit_p=)."
        )
    return held


def through(
    unit: NetworkUnit, head: Head, state: dict[str, torch.Tensor], X: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features z (n, h), and the network's output."""
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


def _logits(head: Head, z: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Outputs (..., n, C) for weights (..., d) of the head."""
    output: torch.Tensor = z @ v[..., head.matrix].reshape(*v.shape[:-1], head.outputs, -1).mT
    if head.offset.stop > head.offset.start:
        output = output + v[..., None, head.offset]
    return output


def features(unit: NetworkUnit, head: Head, w: Array, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What the head sees of the client's rows, (n, h)."""
    with torch.no_grad():
        state = state_of(unit.net, torch.from_numpy(np.asarray(w)).to(dtype))
        return through(unit, head, state, tensor(unit.X, dtype))[0]


def expected_loss(unit: NetworkUnit, head: Head, z: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Mean negative log likelihood over rows and over the draws v (K, d)."""
    output = _logits(head, z, v).flatten(0, 1)
    return mean_loss(unit, output, y.repeat(len(v), *([1] * (y.ndim - 1))))


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
    mean = torch.from_numpy(np.asarray(start[0], dtype=float)).to(dtype).requires_grad_()
    sd = torch.from_numpy(np.asarray(start[1], dtype=float))
    raw = torch.where(sd > 20, sd, torch.log(torch.expm1(sd))).to(dtype).requires_grad_()  # softplus backwards
    optimizer, source = torch.optim.Adam([mean, raw], lr=steps.learning_rate), _generator(rng)
    with torch.enable_grad():
        for _ in range(steps.steps):
            spread = torch.nn.functional.softplus(raw)
            v = mean + spread * torch.randn(steps.draws, len(mean), generator=source, dtype=dtype)
            apart = (spread**2).sum() + ((mean - middle) ** 2).sum()
            loss = expected_loss(unit, head, z, y, v) + (0.5 * confidence * apart - torch.log(spread).sum()) / rows
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    found = mean.detach().double().numpy(), torch.nn.functional.softplus(raw.detach()).double().numpy()
    if not all(np.all(np.isfinite(value)) for value in found):
        raise LocalFailure("the head's posterior is not finite; lower head_rate=")
    return found


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
    X, y = tensor(unit.X, dtype), outcomes(unit, dtype)
    mean, spread = (torch.from_numpy(np.asarray(value, dtype=float)).to(dtype) for value in q)
    optimizer, source = optimizer_of(leaves.moving, settings), _generator(rng)
    with torch.no_grad():
        before = float(mean_loss(unit, call(unit.net, leaves.state, X), y))
    with torch.enable_grad():
        for _ in range(settings.epochs):
            for batch in torch.split(torch.from_numpy(rng.permutation(len(X))), settings.batch_size):
                z, _ = through(unit, head, leaves.state, X[batch])
                v = mean + spread * torch.randn(draws, len(mean), generator=source, dtype=dtype)
                take_step(optimizer, leaves, expected_loss(unit, head, z, y[batch], v))
    with torch.no_grad():
        after = float(mean_loss(unit, call(unit.net, leaves.state, X), y))
    if not after <= before + RISE:
        raise LocalFailure("training raised the loss instead of lowering it; lower learning_rate=")
    return require_bounded(leaves.result(flat), flat)
