"""pFedVEM for networks: heads by confidence, the layers below by federated averaging."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.algorithms.averaging._point import flag_rule
from fedppl.algorithms.hierarchical.confidence import (
    TERMS,
    confidence_of,
    ledger_sums,
    spread_rule,
    strength_rule,
    terms_rule,
)
from fedppl.contracts import Algorithm
from fedppl.local.target import at_points
from fedppl.nn.algorithms._common import (
    Own,
    Training,
    check_head,
    described,
    drawn_from,
    head_rule,
    steps_rule,
    training_rule,
    unused_priors,
)
from fedppl.run.replies import sum_replies
from fedppl.types import Array, DeclarationError, Layout, Message, Status

__all__ = ["HeadKept", "NetworkConfidence", "NetworkConfidenceInfo", "NetworkConfidenceState"]


class NetworkConfidenceState(NamedTuple):
    """What the next round needs."""

    phi: Array  # θ and w, as the model shares them, (m,)
    head: Array  # where w lies in φ, (d,)
    where: Mapping[str, int]  # client id to its place
    ledger: Array  # (K, d + 1): every client's last τ μ and τ; (0, d + 1) where nothing is remembered
    smooth: Array  # average of φ over rounds, (m,)
    status: str
    message: str


class NetworkConfidenceInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # root mean square of the change of all weights
    confidence: float  # mean τ of the clients that replied


class HeadKept(NamedTuple):
    """What a client keeps to itself: its head's posterior."""

    mean: Array  # μ_j, (d,)
    sd: Array  # σ_j, (d,)


class _Settings(NamedTuple):
    head: tuple[str, ...]
    training: Training
    head_steps: tuple[float, int, int]  # rate, steps, draws
    spread: float
    strength: float
    terms: tuple[str, ...]
    remember: bool
    smoothing: float


def NetworkConfidence(
    *,
    head: tuple[str, ...],
    learning_rate: float = 1e-2,
    momentum: float | None = 0.9,
    epochs: int = 5,
    batch_size: int = 50,
    head_rate: float = 0.02,
    head_steps: int = 10,
    draws: int = 5,
    spread: float = 0.1,
    strength: float = 0.0,
    terms: tuple[str, ...] = TERMS,
    remember: bool = False,
    smoothing: float = 0.0,
) -> Algorithm:
    r"""Bayesian heads around a latent head, weighed by confidence, on layers that are averaged.

    .. math:: w \leftarrow \frac{\sum_j \tau_j \mu_j}{\sum_j \tau_j}, \qquad
              \theta \leftarrow \frac{\sum_j n_j \theta_j}{\sum_j n_j}, \qquad
              \tau_j = \frac{d}{\lVert \sigma_j \rVert^2 + \lVert \mu_j - w \rVert^2}

    In a round a client updates τ_j with the new w, then q_j = N(μ_j, diag σ_j²) of its head on the features of the new
    layers below, then those layers under draws of q_j. It replies n_j θ_j, n_j, τ_j μ_j and τ_j, one number more than
    in federated averaging. Share all weights of the network; q_j stays with its client.

    Clients that hear a round without reporting (``fedppl.fit(..., reporting=0.1)``) find their q_j and leave the
    layers below alone: nothing of these would outlive the round.

    Parameters
    ----------
    head
        Torch's names of the last layer's parameters, for example ``("2.weight", "2.bias")``.
    learning_rate, momentum, epochs, batch_size
        Of gradient steps on the layers below, per unit of the mean loss; ``momentum=None`` for Adam.
    head_rate, head_steps, draws
        Of Adam on the bound divided by n_j, on all rows in each step, with so many draws.
    spread
        ρ_j where clients start, and the standard deviation of their first q_j.
    strength, terms, remember
        As in `Confidence`.
    smoothing
        Between 0 and 1: the estimate is an average over rounds with these weights, 1 − smoothing for the last. Rounds
        go on from what is not averaged. Under partial participation it steadies the global model.

    Returns
    -------
    Algorithm
        Its fit has a point estimate, the global model (`fedppl.nn.network`). `fedppl.nn.predict` gives a client's
        predictions, by q_j and by layers trained once more on its own rows.

    Raises
    ------
    DeclarationError
        For settings out of range, and before any round where the head is not the last linear layer or some of the
        weights are not shared.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.NetworkConfidence(head=("2.weight", "2.bias")).name
    'NetworkConfidence'

    Notes
    -----
    A head that starts at 0 (``torch.nn.init.zeros_``) and at a small `spread` is what works; w starts where the network
    that was declared has its head.

    *When this fails.* The loss is divided by n_j: much larger rates diverge. There is no rule for convergence; a fit
    runs for as many rounds as it is given and says "max_rounds". Too many `head_steps` bring on what `Confidence` warns
    of: w rests on few clients.

    References
    ----------
    .. [1] Zhu, Ma and Blaschko (2023), pFedVEM, Algorithm 1.
    """
    if isinstance(smoothing, bool) or not isinstance(smoothing, int | float | np.number) or not 0 <= smoothing < 1:
        raise DeclarationError(f"smoothing={smoothing!r} must be at least 0 and below 1.")
    settings = _Settings(
        head_rule(head),
        training_rule(learning_rate, epochs, batch_size, momentum=momentum),
        steps_rule(head_rate, head_steps, draws),
        spread_rule(spread),
        strength_rule(strength),
        terms_rule(terms),
        flag_rule("remember", remember),
        float(smoothing),
    )
    return Algorithm(
        name="NetworkConfidence",
        check=lambda client: check_head(client, "NetworkConfidence", settings.head),
        init_server=functools.partial(_init_server, settings=settings),
        broadcast=lambda state, client_id: {"mean": state.phi},
        update_client=functools.partial(_update_client, settings=settings),
        reply_shapes=_reply_shapes,
        refuse=_refuse,
        update_server=functools.partial(_update_server, settings=settings),
        outcome=lambda state, client_id: {"mean": state.phi},
        draw=drawn_from(functools.partial(_own, settings=settings)),
        personalise=functools.partial(_own, settings=settings),
        details=lambda state: {},
        estimate=lambda state: state.smooth,
        stay=functools.partial(_stay, settings=settings),
        settings=described(settings._asdict()),
        large=True,
        asks=functools.partial(at_points, name="mean"),
        unused=unused_priors,
    )


def _init_server(
    layout: Layout, clients: tuple[str, ...], rng: np.random.Generator, *, settings: _Settings
) -> NetworkConfidenceState:
    """Start at the mean of the declared prior."""
    del rng
    head = np.concatenate([np.arange(where.start, where.stop) for name, where in _head_slices(layout, settings.head)])
    phi = gaussian.mean(layout.prior)
    return NetworkConfidenceState(
        phi,
        head,
        {client_id: k for k, client_id in enumerate(clients)},
        np.zeros((len(clients) if settings.remember else 0, len(head) + 1)),
        phi,
        Status.RUNNING.value,
        "raise rounds=",
    )


def _head_slices(layout: Layout, head: tuple[str, ...]) -> list[tuple[str, slice]]:
    return [(name, where) for name, where in layout.slices.items() if name in head]


def _reply_shapes(state: NetworkConfidenceState) -> dict[str, tuple[int, ...]]:
    d = len(state.head)
    return {"below": (len(state.phi) - d,), "rows": (), "weighted": (d,), "weight": ()}


class _Here(NamedTuple):
    """A client's view of a broadcast."""

    network: Any
    head: Any
    w: Array  # all weights, in torch's order, (m,)
    centre: Array  # latent head, in torch's order, (d,)
    below: Any  # where θ lies in w


def _here(client: Any, message: Message, settings: _Settings) -> _Here:
    network = client.network
    head = network.head(settings.head)
    w = network.unit.weights(np.asarray(message["mean"], dtype=float), network.start)
    below = np.ones(len(w), dtype=bool)
    below[head.places] = False
    return _Here(network, head, w, w[head.places], np.flatnonzero(below))


def _find_head(here: _Here, personal: Any, rng: np.random.Generator, settings: _Settings) -> tuple[HeadKept, float]:
    """The M-step on τ_j at the new w, then steps on q_j; and the confidence of what came out."""
    known = personal is not None and len(personal.mean) == len(here.centre)
    rule = settings.terms, (settings.strength, settings.spread)
    if known:
        start = personal.mean, personal.sd
        confidence = confidence_of(personal.mean, personal.sd**2, here.centre, *rule)
    else:
        start, confidence = (here.centre, np.full(len(here.centre), settings.spread)), settings.spread**-2
    mean, sd = here.network.head_posterior(here.head, here.w, start, here.centre, confidence, settings.head_steps, rng)
    return HeadKept(mean, sd), confidence_of(mean, sd**2, here.centre, *rule)


def _train(here: _Here, q: HeadKept, rng: np.random.Generator, settings: _Settings) -> Array:
    """All weights, with q's mean for the head and the layers below after their steps."""
    w = here.w.copy()
    w[here.head.places] = q.mean
    if not len(here.below):
        return w
    draws = settings.head_steps[2]
    trained: Array = here.network.train_below(here.head, w, here.below, q, settings.training, draws, rng)
    return trained


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings
) -> tuple[HeadKept, Message, Mapping[str, float]]:
    """Head first, then the layers below it."""
    here = _here(client, message, settings)
    q, confidence = _find_head(here, personal, rng, settings)
    trained, unit = _train(here, q, rng, settings), here.network.unit
    rows = float(len(unit.X))
    is_head = np.isin(unit.shared_at, here.head.places)
    phi = trained[unit.shared_at]
    reply = {
        "below": rows * phi[~is_head],
        "rows": np.array(rows),
        "weighted": confidence * phi[is_head],
        "weight": np.array(confidence),
    }
    return q, reply, {"confidence": confidence, **({"blank": 1.0} if personal is None else {})}


def _stay(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings
) -> tuple[HeadKept, Mapping[str, float]]:
    """The head alone: layers below are the server's again in the next round."""
    return _find_head(_here(client, message, settings), personal, rng, settings)[0], {}


def _refuse(state: NetworkConfidenceState, reply: Message) -> str | None:
    """Weights are positive."""
    del state
    for name in ("rows", "weight"):
        if not float(reply[name]) > 0:
            return f"{name!r} is {float(reply[name]):.3g}, and must be positive"
    return None


def _update_server(
    state: NetworkConfidenceState, replies: Mapping[str, Message], *, settings: _Settings
) -> tuple[NetworkConfidenceState, NetworkConfidenceInfo]:
    """Average the layers below by rows, and heads by confidence."""
    if not replies:
        return state, NetworkConfidenceInfo(np.nan, np.nan)
    total = sum_replies(replies)
    ledger, weighted, weight, _ = ledger_sums(state.ledger, state.where, replies)
    phi = np.empty_like(state.phi)
    below = np.setdiff1d(np.arange(len(phi)), state.head)
    phi[below], phi[state.head] = total["below"] / total["rows"], weighted / weight
    smooth = settings.smoothing * state.smooth + (1.0 - settings.smoothing) * phi
    change = float(np.sqrt(np.mean((phi - state.phi) ** 2)))
    message = f"weights moved by {change:.2g} (root mean square) in the last round; raise rounds="
    after = state._replace(phi=phi, ledger=ledger, smooth=smooth, message=message)
    return after, NetworkConfidenceInfo(change, float(total["weight"]) / len(replies))


def _own(client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings) -> Own:
    """One more round for the client alone, and nothing sent: q_j around the final w, and layers trained below it."""
    here = _here(client, message, settings)
    q, _ = _find_head(here, personal, rng, settings)
    w = _train(here, q, rng, settings)
    return Own(client, w, here.network.independent(w, here.head.places, q.sd**2))
