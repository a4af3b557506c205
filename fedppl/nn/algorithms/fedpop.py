"""FedPop: heads drawn by Langevin dynamics from a population around a shared one, on layers that are averaged."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.algorithms.hierarchical.confidence import spread_rule
from fedppl.contracts import Algorithm
from fedppl.local.target import at_points
from fedppl.nn.algorithms._common import (
    Own,
    Training,
    check_head,
    described,
    drawn_from,
    head_rule,
    training_rule,
    unused_priors,
)
from fedppl.run.replies import sum_replies
from fedppl.types import Array, DeclarationError, Layout, Message, Status

__all__ = ["Drawn", "FedPop", "FedPopInfo", "FedPopState"]


class FedPopState(NamedTuple):
    """What the next round needs."""

    phi: Array  # θ and β, as the model shares them, (m,)
    head: Array  # where β lies in φ, (d,)
    status: str
    message: str


class FedPopInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # root mean square of the change of all weights


class Drawn(NamedTuple):
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
) -> Algorithm:
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
        Of gradient steps on the layers below, per unit of the mean loss; ``momentum=None`` for Adam.
    head_rate
        γ of the chain, per unit of the mean loss, `fedppl.nn.langevin`.
    spread
        s.
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
    >>> import fedppl
    >>> fedppl.FedPop(head=("2.weight", "2.bias")).name
    'FedPop'

    Notes
    -----
    *When this fails.* Steps are not corrected for their length: a `head_rate` beyond n s² gives draws of the
    population and not of the client, a large one with a wide `spread` diverges, and batches add noise of their own. A
    short chain hardly leaves its start, and its sds tell how far it went, not how wide the posterior is.

    References
    ----------
    .. [1] Kotelevskii, Vono, Durmus and Moulines (2022), FedPop, Algorithm 1.
    """
    if isinstance(draw_epochs, bool) or not isinstance(draw_epochs, int | np.integer) or draw_epochs < 1:
        raise DeclarationError(f"draw_epochs={draw_epochs!r} must be a whole number, at least 1.")
    settings = _Settings(
        head_rule(head),
        training_rule(learning_rate, epochs, batch_size, momentum=momentum),
        training_rule(head_rate, 1, 1, "head_").learning_rate,
        spread_rule(spread),
        int(draw_epochs),
    )
    return Algorithm(
        name="FedPop",
        check=lambda client: check_head(client, "FedPop", settings.head),
        init_server=functools.partial(_init_server, settings=settings),
        broadcast=lambda state, client_id: {"mean": state.phi},
        update_client=functools.partial(_update_client, settings=settings),
        reply_shapes=_reply_shapes,
        refuse=_refuse,
        update_server=_update_server,
        outcome=lambda state, client_id: {"mean": state.phi},
        draw=drawn_from(functools.partial(_own, settings=settings)),
        personalise=functools.partial(_own, settings=settings),
        details=lambda state: {},
        estimate=lambda state: state.phi,
        stay=functools.partial(_stay, settings=settings),
        settings=described(settings._asdict()),
        large=True,
        asks=functools.partial(at_points, name="mean"),
        unused=unused_priors,
    )


def _init_server(
    layout: Layout, clients: tuple[str, ...], rng: np.random.Generator, *, settings: _Settings
) -> FedPopState:
    """Start at the mean of the declared prior."""
    del clients, rng
    places = [np.arange(at.start, at.stop) for name, at in layout.slices.items() if name in settings.head]
    return FedPopState(gaussian.mean(layout.prior), np.concatenate(places), Status.RUNNING.value, "raise rounds=")


def _reply_shapes(state: FedPopState) -> dict[str, tuple[int, ...]]:
    d = len(state.head)
    return {"below": (len(state.phi) - d,), "rows": (), "heads": (d,), "count": ()}


def _moved(
    client: Any,
    personal: Any,
    message: Message,
    rng: np.random.Generator,
    settings: _Settings,
    training: Training,
    *,
    below: bool,
) -> tuple[Array, Any]:
    """All weights and the chain, around the β and on the θ of this message."""
    network = client.network
    head = network.head(settings.head)
    w = network.unit.weights(np.asarray(message["mean"], dtype=float), network.start)
    centre = w[head.places]
    start = personal.last if personal is not None and len(personal.last) == len(centre) else centre
    others = np.setdiff1d(np.arange(len(w)), head.places) if below else np.arange(0)
    found: tuple[Array, Any] = network.langevin_steps(
        head, w, others, start, (centre, settings.spread), training, settings.head_rate, rng
    )
    return found


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings
) -> tuple[Drawn, Message, Mapping[str, float]]:
    """The chain and the layers below, batch by batch."""
    w, chain = _moved(client, personal, message, rng, settings, settings.training, below=True)
    unit, head = client.network.unit, client.network.head(settings.head)
    w[head.places] = chain.mean
    is_head, rows = np.isin(unit.shared_at, head.places), float(len(unit.X))
    phi = w[unit.shared_at]
    reply = {
        "below": rows * phi[~is_head],
        "rows": np.array(rows),
        "heads": phi[is_head],
        "count": np.array(1.0),
    }
    return Drawn(chain.last), reply, ({"blank": 1.0} if personal is None else {})


def _stay(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings
) -> tuple[Drawn, Mapping[str, float]]:
    """The chain alone."""
    _, chain = _moved(client, personal, message, rng, settings, settings.training, below=False)
    return Drawn(chain.last), {}


def _refuse(state: FedPopState, reply: Message) -> str | None:
    """Weights are positive."""
    del state
    for name in ("rows", "count"):
        if not float(reply[name]) > 0:
            return f"{name!r} is {float(reply[name]):.3g}, and must be positive"
    return None


def _update_server(state: FedPopState, replies: Mapping[str, Message]) -> tuple[FedPopState, FedPopInfo]:
    """Average the layers below by rows, and heads equally."""
    if not replies:
        return state, FedPopInfo(np.nan)
    total, phi = sum_replies(replies), np.empty_like(state.phi)
    below = np.setdiff1d(np.arange(len(phi)), state.head)
    phi[below], phi[state.head] = total["below"] / total["rows"], total["heads"] / total["count"]
    change = float(np.sqrt(np.mean((phi - state.phi) ** 2)))
    message = f"weights moved by {change:.2g} (root mean square) in the last round; raise rounds="
    return state._replace(phi=phi, message=message), FedPopInfo(change)


def _own(client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings) -> Own:
    """A longer run of the chain, on the layers that all share."""
    training = settings.training._replace(epochs=settings.draw_epochs)
    w, chain = _moved(client, personal, message, rng, settings, training, below=False)
    head = client.network.head(settings.head)
    w[head.places] = chain.mean
    return Own(client, w, client.network.independent(w, head.places, chain.sd**2))
