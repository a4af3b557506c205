"""FedPop: heads drawn by Langevin dynamics from a population around a shared one, on layers that are averaged."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.random import Generator

from fedppl import gaussian
from fedppl.algorithms.averaging.fedavg import not_counted
from fedppl.contracts import Algorithm, ClientUpdate, ClientView, Received, Replies, Report, always
from fedppl.nn.algorithms import _common
from fedppl.nn.algorithms.confidence import at_client, head_in, head_rule, joined, last_layer, parted
from fedppl.nn.functional import Places, generator_of, gradients, host, taken
from fedppl.nn.head import Head, expected_loss, features, without_head
from fedppl.nn.subnet import Subnetwork
from fedppl.nn.train import RISE, Leaves, Training, arranged, loss_of, optimizer_of, require_bounded
from fedppl.nn.unit import NetworkUnit, outcomes
from fedppl.nn.view import Own
from fedppl.settings import described, positive, whole
from fedppl.types import Array, Layout, LocalFailure, Message


class FedPopState(NamedTuple):
    """What the next round needs."""

    phi: Array  # θ and β, as the model shares them, (m,)
    head: Places  # where β lies in φ, (d,)


class ChainClientState(NamedTuple):
    """A client's personal state: that of its chain."""

    last: Array  # v_k, (d,)


class _Settings(NamedTuple):
    head: tuple[str, ...]
    training: Training
    head_rate: float
    spread: float
    draw_epochs: int


def FedPop(
    *,
    head: tuple[str, ...],
    learning_rate: float = 1e-2,
    momentum: float | None = 0.9,
    epochs: int = 5,
    batch_size: int = 50,
    head_rate: float = 0.1,
    spread: float = 0.1,
    draw_epochs: int = 50,
) -> Algorithm[FedPopState, ChainClientState]:
    r"""Random heads from a population, by stochastic approximation with Langevin draws (FedSOUK).

    .. math:: v_k \sim N(\beta, s^2 I), \qquad \theta \leftarrow \frac{\sum_k n_k \theta_k}{\sum_k n_k}, \qquad
              \beta \leftarrow \frac1K \sum_k \bar v_k

    A client moves its head's chain by noisy gradient steps, one for each batch, and the layers below it by gradient
    steps at the chain's present v_k. v̄_k is the mean of the second half of the round's draws; the mean over clients
    is the maximum in β. Share all weights of the network; the chain stays with its client.

    Parameters
    ----------
    head, learning_rate, momentum, epochs, batch_size
        As in `fedppl.nn.Confidence`.
    head_rate
        γ, the chain's step for the mean loss, `fedppl.nn.algorithms.fedpop`.
    spread
        s, standard deviation of the population.
    draw_epochs
        Length of the chain when the rounds are over; its second half gives mean and sd of the client's head.

    Returns
    -------
    Algorithm
        Its fit has a point estimate, θ and β. `fedppl.nn.predict` gives a client's predictions by a normal with its
        chain's mean and sds.

    Notes
    -----
    *When this fails.* Steps are not corrected for their length: a `head_rate` beyond n s² gives draws of the
    population and not of the client, a large one with a wide `spread` diverges, and batches add noise of their own. A
    short chain hardly leaves its start, and its sds are of its path, not of the posterior.

    References
    ----------
    .. [1] Kotelevskii, Vono, Durmus and Moulines (2022), FedPop, Algorithm 1.
    """
    settings = _Settings(
        head_rule(head),
        _common.training_rule(learning_rate, epochs, batch_size, momentum=momentum),
        positive("head_rate", head_rate),
        positive("spread", spread),
        whole("draw_epochs", draw_epochs),
    )
    return Algorithm[FedPopState, ChainClientState](
        name="nn.FedPop",
        settings=described(settings),
        init=functools.partial(_init, settings=settings),
        broadcast=_common.broadcast,
        update_client=functools.partial(_update_client, settings=settings),
        update_server=_update_server,
        replies=Replies(_shapes, _reject, always),
        result=_common.network_result(_common.broadcast, functools.partial(_own, settings=settings), _common.ESTIMATE),
        needs=last_layer("nn.FedPop", settings.head),
        disclosure=_common.AT_MEAN,
        unreported=functools.partial(_update_unreported, settings=settings),
    )


def _init(layout: Layout, clients: tuple[str, ...], rng: Generator, *, settings: _Settings) -> FedPopState:
    """Start at the mean of the declared prior."""
    return FedPopState(gaussian.mean(layout.prior), head_in(layout, settings.head))


def _moved(
    client: ClientView,
    personal: ChainClientState | None,
    message: Message,
    rng: Generator,
    settings: _Settings,
    *,
    below: bool = False,
) -> tuple[Array, Chain]:
    """All weights with the head's mean, and the chain, for the β and θ of this message."""
    at = at_client(client, message, settings.head)
    start = personal.last if personal is not None and len(personal.last) == len(at.centre) else at.centre
    w, chain = langevin_steps(
        at.unit,
        at.head,
        at.w,
        at.below if below else at.below[:0],
        start,
        (at.centre, settings.spread),
        settings.training,
        settings.head_rate,
        rng,
    )
    w[at.head.places] = chain.mean
    return w, chain


def _update_client(
    client: ClientView, personal: ChainClientState | None, message: Message, rng: Generator, *, settings: _Settings
) -> ClientUpdate[ChainClientState]:
    """The chain and the layers below, batch by batch."""
    w, chain = _moved(client, personal, message, rng, settings, below=True)
    reply, head = parted(at_client(client, message, settings.head), w)
    info = {"blank": 1.0} if personal is None else {}
    return ClientUpdate(ChainClientState(chain.last), {**reply, "heads": head, "count": np.array(1.0)}, info)


def _update_unreported(
    client: ClientView, personal: ChainClientState | None, message: Message, rng: Generator, *, settings: _Settings
) -> tuple[ChainClientState, Mapping[str, float]]:
    """The chain alone."""
    return ChainClientState(_moved(client, personal, message, rng, settings)[1].last), {}


def _update_server(state: FedPopState, received: Received) -> tuple[FedPopState, Report]:
    """Average the layers below by rows, and heads equally."""
    if not received.clients:
        return state, Report(_common.NetworkInfo(np.nan))
    total = received.total
    phi = joined(total, state.head, total["heads"] / total["count"])
    return state._replace(phi=phi), _common.reported(state.phi, phi)


def _shapes(state: FedPopState) -> dict[str, tuple[int, ...]]:
    d = len(state.head)
    return {"below": (len(state.phi) - d,), "rows": (), "heads": (d,), "count": ()}


def _reject(state: FedPopState, reply: Message) -> str | None:
    """Why a reply is rejected: rows, clients or weights out of range; or None."""
    return (
        not_counted(reply, "rows", "count")
        or _common.run_away("heads", reply["heads"] / reply["count"], state.phi)
        or _common.run_away("below", reply["below"] / reply["rows"], state.phi)
    )


def _own(
    client: ClientView, personal: ChainClientState | None, message: Message, rng: Generator, *, settings: _Settings
) -> Own:
    """A longer run of the chain, on the shared layers."""
    longer = settings._replace(training=settings.training._replace(epochs=settings.draw_epochs))
    w, chain = _moved(client, personal, message, rng, longer)
    return Own(client, w, Subnetwork(w, at_client(client, message, settings.head).head.places, chain.sd**2))


# Langevin dynamics of a network's last layer, beside gradient steps on the layers below it ----------------------------


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

    Of the weights w (D,) those at `below`, which may be none, move with the head. The head starts at v (d,), with the
    `prior` β (d,) and s and the step γ, `head_rate`, per unit of the mean loss. Returns all weights with the last v,
    and the chain. Raises `LocalFailure` where the loss ends far above its start, alone and with the prior's part, or is
    not finite.
    """
    flat, rows = np.array(w, dtype=float), len(unit.X)
    flat[head.places] = start
    y = outcomes(unit, dtype)
    fixed_features = None if len(below) else features(unit, head, flat, dtype=dtype)
    leaves = Leaves(unit, flat, np.asarray(below, dtype=np.int64), dtype)
    X = arranged(leaves.net, unit.tensor(unit.X, dtype))
    body = without_head(leaves.net, head)
    optimizer = optimizer_of(leaves.moving, settings) if leaves.moving else None
    v = unit.tensor(np.array(start, dtype=float), dtype).requires_grad_()
    centre, spread = unit.tensor(np.array(prior[0], dtype=float), dtype), prior[1]
    rho = float(np.exp(-head_rate / (rows * spread**2)))
    source = generator_of(rng)
    before, states = np.array([_loss(unit, flat, X, y), _pull(flat[head.places], prior, rows)]), []
    with torch.enable_grad():
        for _ in range(settings.epochs):
            for batch in torch.split(torch.from_numpy(rng.permutation(rows)), settings.batch_size):
                z = body(taken(X, batch)) if fixed_features is None else taken(fixed_features, batch)
                loss = expected_loss(unit, head, z, taken(y, batch), v[None])
                *slopes, slope = gradients(loss, [*leaves.moving, v])
                for leaf, gradient in zip(leaves.moving, slopes, strict=True):
                    leaf.grad = gradient.contiguous()  # for fused optimizers, see take_step
                if optimizer is not None:
                    optimizer.step()
                with torch.no_grad():
                    noise = torch.randn(len(v), generator=source, dtype=dtype).to(v.device)
                    v.copy_(centre + rho * (v - head_rate * slope - centre) + spread * (1 - rho**2) ** 0.5 * noise)
                    states.append(host(v).copy())
    half = np.array(states[len(states) // 2 :])
    moved, mean = leaves.result(flat), half.mean(axis=0)
    moved[head.places] = mean
    after = np.array([_loss(unit, moved, X, y), _pull(mean, prior, rows)])
    # The head moves towards its population too, whose mean others may have moved far away.
    if not np.isfinite(after[0]) or (len(below) and not min(after[0] - before[0], sum(after - before)) <= RISE):
        raise LocalFailure("training raised the loss instead of lowering it; lower learning_rate= or head_rate=")
    moved[head.places] = states[-1]
    return require_bounded(moved, flat), Chain(states[-1], mean, half.std(axis=0))


def _pull(v: Array, prior: tuple[Array, float], rows: int) -> float:
    """Minus the log density of the population, for one row, less a constant."""
    return 0.5 * float(np.sum((v - prior[0]) ** 2)) / (rows * prior[1] ** 2)


def _loss(unit: NetworkUnit, w: Array, X: torch.Tensor, y: torch.Tensor) -> float:
    return loss_of(unit, unit.state(w, X.dtype), X, y)
