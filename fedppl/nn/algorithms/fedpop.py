"""FedPop: heads drawn by Langevin dynamics from a population around a shared one, on layers that are averaged."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from fedppl import gaussian
from fedppl.algorithms.averaging.server import not_counted
from fedppl.contracts import Algorithm, ClientUpdate, ClientView, Point, Received, Replies, Report, always
from fedppl.nn.algorithms._common import training_rule
from fedppl.nn.algorithms._personalise import network_result
from fedppl.nn.algorithms._server import AT_MEAN, NetworkInfo, broadcast, reported, run_away
from fedppl.nn.algorithms.confidence import head_in, head_rule, here, joined, last_layer, parted
from fedppl.nn.functional import Places
from fedppl.nn.langevin import Chain, langevin_steps
from fedppl.nn.subnet import Subnetwork
from fedppl.nn.train import Training
from fedppl.nn.view import Own
from fedppl.settings import described, positive, whole
from fedppl.types import Array, Layout, Message


class FedPopState(NamedTuple):
    """What the next round needs."""

    phi: Array  # θ and β, as the model shares them, (m,)
    head: Places  # where β lies in φ, (d,)


class ChainClientState(NamedTuple):
    """What a client keeps to itself: the state of its chain."""

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
    head
        Torch's names of the last layer's parameters, for example ``("2.weight", "2.bias")``.
    learning_rate, momentum, epochs, batch_size
        Learning rate for the mean loss, momentum, passes over the rows and batches of gradient steps on the layers
        below; ``momentum=None`` for Adam.
    head_rate
        γ, the chain's step for the mean loss, `fedppl.nn.langevin`.
    spread
        s, standard deviation of the population.
    draw_epochs
        Length of the chain when the rounds are over; its second half gives mean and sd of the client's head.

    Returns
    -------
    Algorithm
        Its fit has a point estimate, θ and β. `fedppl.nn.predict` gives a client's predictions by a normal with its
        chain's mean and sds.

    Raises
    ------
    DeclarationError
        For settings out of range, and before any round where the head is not the last linear layer or some of the
        weights are not shared.

    Examples
    --------
    >>> from fedppl import nn
    >>> nn.FedPop(head=("2.weight", "2.bias")).name
    'nn.FedPop'

    Notes
    -----
    *When this fails.* Steps are not corrected for their length: a `head_rate` beyond n s² gives draws of the
    population and not of the client, a large one with a wide `spread` diverges, and batches add noise of their own. A
    short chain hardly leaves its start, and its sds tell how far it went, not how wide the posterior is.

    References
    ----------
    .. [1] Kotelevskii, Vono, Durmus and Moulines (2022), FedPop, Algorithm 1.
    """
    settings = _Settings(
        head_rule(head),
        training_rule(learning_rate, epochs, batch_size, momentum=momentum),
        positive("head_rate", head_rate),
        positive("spread", spread),
        whole("draw_epochs", draw_epochs),
    )
    return Algorithm[FedPopState, ChainClientState](
        name="nn.FedPop",
        settings=described(settings),
        init=functools.partial(_init, settings=settings),
        broadcast=broadcast,
        update_client=functools.partial(_update_client, settings=settings),
        update_server=_update_server,
        replies=Replies(_shapes, _reject, always),
        result=network_result(
            broadcast, functools.partial(_own, settings=settings), Point[FedPopState](lambda state: state.phi)
        ),
        needs=last_layer("nn.FedPop", settings.head),
        disclosure=AT_MEAN,
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
    """All weights with the head's mean, and the chain, around the β and on the θ of this message."""
    at = here(client, message, settings.head)
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
    reply, head = parted(here(client, message, settings.head), w)
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
        return state, Report(NetworkInfo(np.nan))
    total = received.total
    phi = joined(total, state.head, total["heads"] / total["count"])
    return state._replace(phi=phi), reported(state.phi, phi)


def _shapes(state: FedPopState) -> dict[str, tuple[int, ...]]:
    d = len(state.head)
    return {"below": (len(state.phi) - d,), "rows": (), "heads": (d,), "count": ()}


def _reject(state: FedPopState, reply: Message) -> str | None:
    """Rows and clients are counted, and neither part has run away."""
    return (
        not_counted(reply, "rows", "count")
        or run_away("heads", reply["heads"] / reply["count"], state.phi)
        or run_away("below", reply["below"] / reply["rows"], state.phi)
    )


def _own(
    client: ClientView, personal: ChainClientState | None, message: Message, rng: Generator, *, settings: _Settings
) -> Own:
    """A longer run of the chain, on the layers that all share."""
    longer = settings._replace(training=settings.training._replace(epochs=settings.draw_epochs))
    w, chain = _moved(client, personal, message, rng, longer)
    return Own(client, w, Subnetwork(w, here(client, message, settings.head).head.places, chain.sd**2))
