"""Adam, or gradient steps with momentum, on a client's log posterior, in torch, over batches of its rows."""

from __future__ import annotations

import numpy as np
import torch

from fedppl.nn._slopes import tensor
from fedppl.nn.functional import call, state_of
from fedppl.nn.read import NetworkUnit
from fedppl.steps._network import Training
from fedppl.types import Array, LocalFailure

__all__ = ["train"]

# Training that raises the mean loss of a row by more than this many nats has diverged.
_RISE = 1.0


def train(
    unit: NetworkUnit,
    w: Array,
    free: Array,
    prior: tuple[Array, Array] | None,
    settings: Training,
    rng: np.random.Generator,
    *,
    linear: Array | None = None,
    dtype: torch.dtype = torch.float32,
) -> Array:
    r"""Move some of the weights towards the mode of the log posterior.

    .. math:: -\tfrac1n \log p(y \mid X, w) + \tfrac1{2n} \sum_i p_i (w_i - m_i)^2 + b^\top w

    Parameters
    ----------
    unit
        The client.
    w
        Where to start, (d,).
    free
        Positions of the weights that move.
    prior
        Means m and precisions p of those, each as long as `free`; None leaves them without a prior.
    settings
        Steps, batches.
    rng
        Shuffles the rows of every epoch.
    linear
        b, as long as `free`: a correction of the gradient.
    dtype
        In which to compute.

    Returns
    -------
    ndarray
        Weights, (d,).

    Raises
    ------
    LocalFailure
        If the loss ends far above where it began, or at what is not finite.
    """
    start = torch.from_numpy(np.asarray(w, dtype=float)).to(dtype)
    at = torch.from_numpy(np.asarray(free, dtype=np.int64))
    moving = start[at].clone().requires_grad_()
    X, y = tensor(unit.X, dtype), torch.from_numpy(np.array(unit.y))
    y = y.long() if unit.likelihood.family == "categorical" else y.to(dtype)
    pull = None if prior is None else tuple(torch.from_numpy(np.array(value)).to(dtype) for value in prior)
    tilt = None if linear is None else torch.from_numpy(np.array(linear)).to(dtype)
    optimizer = optimizer_of([moving], settings)
    rows, everything = len(X), np.array_equal(free, np.arange(len(start)))
    with torch.no_grad():
        before = float(mean_loss(unit, call(unit.net, state_of(unit.net, start), X), y))
    with torch.enable_grad():
        for _ in range(settings.epochs):
            order = torch.from_numpy(rng.permutation(rows))
            for batch in torch.split(order, settings.batch_size):
                whole = moving if everything else torch.index_put(start, (at,), moving)
                output = call(unit.net, state_of(unit.net, whole), X[batch])
                loss = mean_loss(unit, output, y[batch])
                if pull is not None:
                    loss = loss + 0.5 / rows * (pull[1] * (moving - pull[0]) ** 2).sum()
                if tilt is not None:
                    loss = loss + tilt @ moving
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    with torch.no_grad():
        after = float(mean_loss(unit, call(unit.net, state_of(unit.net, torch.index_put(start, (at,), moving)), X), y))
    if not (after <= before + _RISE if linear is None else np.isfinite(after)):
        raise LocalFailure("training raised the loss instead of lowering it; lower learning_rate=")
    found = np.asarray(w, dtype=float).copy()
    found[np.asarray(free)] = moving.detach().double().numpy()
    return found


def optimizer_of(moving: list[torch.Tensor], settings: Training) -> torch.optim.Optimizer:
    """Adam, or gradient steps with momentum."""
    if settings.momentum is None:
        return torch.optim.Adam(moving, lr=settings.learning_rate)
    return torch.optim.SGD(moving, lr=settings.learning_rate, momentum=settings.momentum)


def mean_loss(unit: NetworkUnit, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean negative log likelihood of a batch."""
    if unit.likelihood.family == "categorical":
        return torch.nn.functional.cross_entropy(output, y)
    square = (y.view(output.shape) - output) ** 2
    return 0.5 * square.sum() / (len(y) * unit.likelihood.noise_sd**2)
