"""Bayesian heads of clients on layers that are averaged: pFedVEM, and FedPop."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fedppl import gaussian
from fedppl.algorithms.averaging.fedavg import not_counted
from fedppl.algorithms.hierarchical.confidence import TERMS, confidence_of, ledger_sums, terms_rule
from fedppl.contracts import Algorithm, ClientUpdate, ClientView, Part, Point, Received, Replies, Report, always
from fedppl.nn.algorithms import _common
from fedppl.nn.batch import Flags, heads_rows, stacked, train_below_together
from fedppl.nn.functional import Places, generator_of, host, taken
from fedppl.nn.personal import HeadSteps, head_posteriors, train_below
from fedppl.nn.subnet import Subnetwork
from fedppl.nn.train import Leaves, Training, batches, loss_at, require_bounded, require_no_rise
from fedppl.nn.unit import Head, NetworkUnit, expected_loss, features, head_of, without_head
from fedppl.nn.view import Own, network_of, own_of
from fedppl.settings import between, described, flag, positive, whole
from fedppl.types import Array, Layout, LocalFailure, Message, Rng

_SURE = 1e30  # largest confidence of a reply: more, and sums over clients overflow


class ConfidenceState(NamedTuple):
    """What the next round needs."""

    phi: Array  # θ and w, as the model shares them, (m,)
    head: Places  # where w lies in φ, (d,)
    where: Mapping[str, int]  # client id to its place
    ledger: Array  # (K, d + 1): every client's last τ μ and τ; (0, d + 1) without `remember`
    smooth: _common.OverRounds


class ConfidenceInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # root mean square of the change of all weights
    confidence: float  # mean τ of the clients that replied


class HeadClientState(NamedTuple):
    """A client's personal state: its head's posterior."""

    mean: Array  # μ_j, (d,)
    sd: Array  # σ_j, (d,)


_Parts = Sequence[Part[HeadClientState]]
_Updates = list[ClientUpdate[HeadClientState] | None]


class _Settings(NamedTuple):
    head: tuple[str, ...]
    training: Training
    head_steps: HeadSteps
    spread: float
    strength: float
    terms: tuple[str, ...]
    remember: bool
    smoothing: float


def Confidence(
    *,
    head: tuple[str, ...],
    learning_rate: float = 1e-2,
    momentum: float | None = 0.9,
    epochs: int = 5,
    batch_size: int = 50,
    head_rate: float = 0.02,
    head_momentum: float | None = None,
    head_steps: int = 10,
    draws: int = 5,
    spread: float = 0.1,
    strength: float = 0.0,
    terms: tuple[str, ...] = TERMS,
    remember: bool = False,
    smoothing: float = 0.0,
) -> Algorithm[ConfidenceState, HeadClientState]:
    r"""Bayesian heads around a latent head, weighed by confidence, on layers that are averaged.

    .. math:: w \leftarrow \frac{\sum_j \tau_j \mu_j}{\sum_j \tau_j}, \qquad
              \theta \leftarrow \frac{\sum_j n_j \theta_j}{\sum_j n_j}, \qquad
              \tau_j = \frac{d}{\lVert \sigma_j \rVert^2 + \lVert \mu_j - w \rVert^2}

    In a round a client updates τ_j with the new w, then q_j = N(μ_j, diag σ_j²) of its head on the features of the new
    layers below, then those layers under draws of q_j. It replies n_j θ_j, n_j, τ_j μ_j and τ_j. Share all weights of
    the network; q_j stays with its client. Clients that do not report, ``fedppl.fit(..., reporting=0.1)``,
    update their q_j alone.

    Parameters
    ----------
    head
        Torch's names of the last layer's parameters, a linear one's, for example ``("2.weight", "2.bias")``.
    learning_rate, momentum, epochs, batch_size
        As in `FedAvg`, with passes over the rows, of steps on the layers below.
    head_rate, head_momentum, head_steps, draws
        Adam's learning rate, number of steps, each on all rows, and draws in each. With a `head_momentum` they are
        gradient steps with that momentum, and the rate is for the slope of the bound, a sum over rows.
    spread
        ρ_j where clients start, and the standard deviation of their first q_j.
    strength, terms, remember
        The settings of these names of `fedppl.Confidence`.
    smoothing
        As in `FedAvg`.

    Returns
    -------
    Algorithm
        Its fit has a point estimate, the global model (`fedppl.nn.network`). `fedppl.nn.predict` gives a client's
        predictions, by q_j and by layers trained once more on its own rows.

    Raises
    ------
    DeclarationError
        Before any round where the head is not the last linear layer, or some of the weights are not shared.

    Notes
    -----
    Adam, its rate, `spread` and a head that starts at 0 (``torch.nn.init.zeros_``) are this package's choice, and not
    the authors'. Theirs are ``head_momentum=0.9, head_rate=1e-3, spread=1, learning_rate=1e-3, batch_size=10`` and a
    head drawn from N(0, 1). w starts where the network that was declared has its head.

    *When this fails.* Much larger rates diverge; gradient steps on a bound that sums over rows need a rate that depends
    on the number of rows. With too many `head_steps` w depends on few clients, as `fedppl.Confidence` says.

    References
    ----------
    .. [1] Zhu, Ma and Blaschko (2023), pFedVEM, Algorithm 1.
    """
    settings = _Settings(
        head_rule(head),
        _common.training_rule(learning_rate, epochs, batch_size, momentum=momentum),
        _head_rule(head_rate, head_steps, draws, head_momentum),
        positive("spread", spread),
        between("strength", strength, 0, np.inf, "[)"),
        terms_rule(terms),
        flag("remember", remember),
        between("smoothing", smoothing, 0, 1, "[)"),
    )
    batch = _common.batch_of(
        functools.partial(_updates, settings=settings), functools.partial(_updates_unreported, settings=settings)
    )
    return Algorithm[ConfidenceState, HeadClientState](
        name="nn.Confidence",
        settings=described(settings),
        init=functools.partial(_init, settings=settings),
        broadcast=_common.broadcast,
        update_client=batch.update_client,
        update_server=functools.partial(_update_server, settings=settings),
        replies=Replies(
            lambda state: shapes(state, "weighted", "weight"), _reject, lambda state: not settings.remember
        ),
        result=_common.network_result(
            _common.broadcast,
            functools.partial(_own, settings=settings),
            Point[ConfidenceState](lambda state: state.smooth.phi),
        ),
        needs=_common.whole_network("nn.Confidence", settings.head),
        disclosure=_common.AT_MEAN,
        unreported=batch.unreported,
        batch=batch,
    )


def _head_rule(rate: float, steps: int, draws: int, momentum: float | None) -> HeadSteps:
    if momentum is not None:
        momentum = between("head_momentum", momentum, 0, 1, "[)", hint="None takes Adam's steps")
    return HeadSteps(positive("head_rate", rate), whole("head_steps", steps), whole("draws", draws), momentum)


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng, *, settings: _Settings) -> ConfidenceState:
    head, phi = head_in(layout, settings.head), gaussian.mean(layout.prior)
    where = {client_id: k for k, client_id in enumerate(clients)}
    ledger = np.zeros((len(clients) if settings.remember else 0, len(head) + 1))
    return ConfidenceState(phi, head, where, ledger, _common.OverRounds(phi, 0.0))


def _start(centre: Array, personal: HeadClientState | None, settings: _Settings) -> tuple[HeadClientState, float]:
    """q_j at the start of the round, and its confidence."""
    if personal is not None and len(personal.mean) == len(centre):
        return personal, _confidence(personal, centre, settings)
    return HeadClientState(centre, np.full(len(centre), settings.spread)), settings.spread**-2


def _confidence(q: HeadClientState, centre: Array, settings: _Settings) -> float:
    return confidence_of(q.mean, q.sd**2, centre, settings.terms, (settings.strength, settings.spread))


def _heads(parts: _Parts, settings: _Settings) -> tuple[Sent, Array, Array, Flags]:
    """The M-step on τ_j at the new w, then steps on q_j, at clients with one network.

    Returns what they were sent, means and sds (K, d) of q_j, and which are finite (K,); one client alone raises.
    """
    sent = sent_to(parts, settings.head)
    starts = [_start(centre, part.personal, settings) for centre, part in zip(sent.centres, parts, strict=True)]
    mean, sd, finite = head_posteriors(
        sent.units[0].likelihood,
        sent.head,
        heads_rows(stacked(sent.units), sent.head, sent.W),
        (np.stack([q.mean for q, _ in starts]), np.stack([q.sd for q, _ in starts])),
        sent.centres,
        np.array([confidence for _, confidence in starts]),
        settings.head_steps,
        [part.rng for part in parts],
    )
    if len(parts) == 1 and not finite[0]:
        raise LocalFailure("the head's posterior is not finite; lower head_rate=")
    return sent, mean, sd, finite


def _trained(parts: _Parts, settings: _Settings) -> tuple[Sent, list[HeadClientState], Array, Flags]:
    """`_heads`, then steps on the layers below: q_j, all weights with its mean for the head, and who succeeded."""
    sent, mean, sd, succeeded = _heads(parts, settings)
    units, head, W = sent.units, sent.head, sent.W.copy()
    W[:, head.places] = mean
    rngs, draws = [part.rng for part in parts], settings.head_steps.draws
    if len(head.below) and len(parts) == 1:
        W = train_below(units[0], head, W[0], (mean[0], sd[0]), settings.training, draws, rngs[0])[None]
    elif len(head.below):
        W, flags = train_below_together(stacked(units), head, W, (mean, sd), settings.training, draws, rngs)
        succeeded = succeeded & flags
    return sent, [HeadClientState(*q) for q in zip(mean, sd, strict=True)], W, succeeded


def _updates(parts: _Parts, *, settings: _Settings) -> _Updates:
    sent, heads, W, succeeded = _trained(parts, settings)
    updates: _Updates = [None] * len(parts)
    for k in np.flatnonzero(succeeded).tolist():
        q, centre = heads[k], sent.centres[k]
        (reply, head), confidence = parted(sent.units[k], sent.head, W[k]), _confidence(q, centre, settings)
        info = {"confidence": confidence, "deviation": float(np.mean((q.mean - centre) ** 2))}
        if parts[k].personal is None:
            info["blank"] = 1.0
        updates[k] = ClientUpdate(q, {**reply, "weighted": confidence * head, "weight": np.array(confidence)}, info)
    return updates


def _updates_unreported(parts: _Parts, *, settings: _Settings) -> _Updates:
    """The head alone: layers below are replaced by the server's in the next round."""
    _, mean, sd, finite = _heads(parts, settings)
    return [ClientUpdate(HeadClientState(mean[k], sd[k]), {}) if finite[k] else None for k in range(len(parts))]


def _update_server(
    state: ConfidenceState, received: Received, *, settings: _Settings
) -> tuple[ConfidenceState, Report]:
    if not received.clients:
        return state, Report(ConfidenceInfo(np.nan, np.nan))
    total = received.sums()
    ledger, weighted, weight, _ = ledger_sums(state.ledger, state.where, received)
    phi = joined(total, state.head, weighted / weight)
    change, message = _common.moved(state.phi, phi)
    info = ConfidenceInfo(change, float(total["weight"]) / received.clients)
    after = state._replace(phi=phi, ledger=ledger, smooth=_common.with_round(state.smooth, phi, settings.smoothing))
    return after, Report(info, message=message)


def _reject(state: ConfidenceState, reply: Message) -> str | None:
    confidence = float(reply["weight"])
    if not 1.0 / _SURE <= confidence <= _SURE:
        return f"'weight' is {confidence:.3g}, and must be a precision from {1.0 / _SURE:.0e} to {_SURE:.0e}"
    return (
        not_counted(reply, "rows")
        or _common.run_away("weighted", reply["weighted"] / reply["weight"], state.phi)
        or _common.run_away("below", reply["below"] / reply["rows"], state.phi)
    )


def _own(
    client: ClientView, personal: HeadClientState | None, message: Message, rng: Rng, *, settings: _Settings
) -> Own:
    """One more round for the client alone: q_j around the final w, and trained layers below it."""
    sent, (q,), (w,), _ = _trained([Part(client, personal, message, rng)], settings)
    return own_of(client, Subnetwork(w, sent.head.places, q.sd**2))


# Heads of clients on layers that are averaged by rows, for several algorithms -----------------------------------------


class Sent(NamedTuple):
    """Clients with one network, and the shared weights that they received, in torch's order."""

    units: list[NetworkUnit]
    head: Head
    W: Array  # all weights, (K, m)
    centres: Array  # the shared head, (K, d)


def head_rule(head: Any) -> tuple[str, ...]:
    """Check the keyword `head`."""
    refusal = f'head={head!r} must be a tuple of torch\'s names, each once, such as ("2.weight", "2.bias").'
    return _common.names_rule(head, refusal)


def head_in(layout: Layout, head: tuple[str, ...]) -> Places:
    """Where the head lies in φ, (d,)."""
    return np.concatenate([np.arange(at.start, at.stop) for name, at in layout.slices.items() if name in head])


def sent_to(parts: Sequence[Part[Any]], names: tuple[str, ...]) -> Sent:
    """Broadcasts, read at their clients."""
    units = [part.client.view(network_of) for part in parts]
    head = head_of(units[0], names)
    W = np.stack([unit.weights(part.message["mean"]) for unit, part in zip(units, parts, strict=True)])
    return Sent(units, head, W, W[:, head.places])


def parted(unit: NetworkUnit, head: Head, w: Array) -> tuple[dict[str, Array], Array]:
    """A client's reply on the layers below, and its head in the order of φ."""
    phi, rows = w[unit.shared_at], float(len(unit.X))
    is_head = np.isin(unit.shared_at, head.places)
    return {"below": rows * phi[~is_head], "rows": np.array(rows)}, phi[is_head]


def shapes(state: Any, head: str, count: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a reply whose head and number to divide it by have these names."""
    d = len(state.head)
    return {"below": (len(state.phi) - d,), "rows": (), head: (d,), count: ()}


def joined(total: Message, at: Places, head: Array) -> Array:
    """φ from the average of the layers below by rows, and a head that lies at these places."""
    phi = np.empty(len(total["below"]) + len(at))
    phi[np.setdiff1d(np.arange(len(phi)), at)], phi[at] = total["below"] / total["rows"], head
    return phi


# FedPop: heads drawn by Langevin dynamics from a population around a shared one --------------------------------------


class FedPopState(NamedTuple):
    """What the next round needs."""

    phi: Array  # θ and β, as the model shares them, (m,)
    head: Places  # where β lies in φ, (d,)


class ChainClientState(NamedTuple):
    """A client's personal state: that of its chain."""

    last: Array  # v_k, (d,)


class _Chains(NamedTuple):
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
        γ, the chain's step for the mean loss, `fedppl.nn.algorithms.heads.langevin_steps`.
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
        Before any round where the head is not the last linear layer, or some of the weights are not shared.

    Notes
    -----
    *When this fails.* Steps are not corrected for their length: a `head_rate` beyond n s² gives draws of the
    population and not of the client, a large one with a wide `spread` diverges, and batches add noise of their own. A
    short chain hardly leaves its start, and its sds are of its path, not of the posterior.

    References
    ----------
    .. [1] Kotelevskii, Vono, Durmus and Moulines (2022), FedPop, Algorithm 1.
    """
    settings = _Chains(
        head_rule(head),
        _common.training_rule(learning_rate, epochs, batch_size, momentum=momentum),
        positive("head_rate", head_rate),
        positive("spread", spread),
        whole("draw_epochs", draw_epochs),
    )
    return Algorithm[FedPopState, ChainClientState](
        name="nn.FedPop",
        settings=described(settings),
        init=lambda layout, clients, rng: FedPopState(gaussian.mean(layout.prior), head_in(layout, settings.head)),
        broadcast=_common.broadcast,
        update_client=functools.partial(_fedpop_update_client, settings=settings),
        update_server=_fedpop_update_server,
        replies=Replies(lambda state: shapes(state, "heads", "count"), _fedpop_reject, always),
        result=_common.network_result(
            _common.broadcast, functools.partial(_fedpop_own, settings=settings), _common.ESTIMATE
        ),
        needs=_common.whole_network("nn.FedPop", settings.head),
        disclosure=_common.AT_MEAN,
        unreported=lambda client, personal, message, rng: (
            ChainClientState(_chain_moved(Part(client, personal, message, rng), settings)[2].last),
            {},
        ),
    )


def _chain_moved(part: Part[ChainClientState], settings: _Chains, *, below: bool = False) -> tuple[Sent, Array, Chain]:
    """All weights with the head's mean, and the chain, for the β and θ of this message."""
    sent, last = sent_to([part], settings.head), None if part.personal is None else part.personal.last
    (unit,), head, (w,), (centre,) = sent
    start = centre if last is None or len(last) != len(centre) else last
    prior, steps = (centre, settings.spread), settings.training
    w, chain = langevin_steps(unit, head, w, start, prior, steps, settings.head_rate, part.rng, below=below)
    w[head.places] = chain.mean
    return sent, w, chain


def _fedpop_update_client(
    client: ClientView, personal: ChainClientState | None, message: Message, rng: Rng, *, settings: _Chains
) -> ClientUpdate[ChainClientState]:
    sent, w, chain = _chain_moved(Part(client, personal, message, rng), settings, below=True)
    reply, head = parted(sent.units[0], sent.head, w)
    info = {"blank": 1.0} if personal is None else {}
    return ClientUpdate(ChainClientState(chain.last), {**reply, "heads": head, "count": np.array(1.0)}, info)


def _fedpop_update_server(state: FedPopState, received: Received) -> tuple[FedPopState, Report]:
    if not received.clients:
        return state, Report(_common.NetworkInfo(np.nan))
    total = received.total
    phi = joined(total, state.head, total["heads"] / total["count"])
    return state._replace(phi=phi), _common.reported(state.phi, phi)


def _fedpop_reject(state: FedPopState, reply: Message) -> str | None:
    return (
        not_counted(reply, "rows", "count")
        or _common.run_away("heads", reply["heads"] / reply["count"], state.phi)
        or _common.run_away("below", reply["below"] / reply["rows"], state.phi)
    )


def _fedpop_own(
    client: ClientView, personal: ChainClientState | None, message: Message, rng: Rng, *, settings: _Chains
) -> Own:
    longer = settings._replace(training=settings.training._replace(epochs=settings.draw_epochs))
    sent, w, chain = _chain_moved(Part(client, personal, message, rng), longer)
    return own_of(client, Subnetwork(w, sent.head.places, chain.sd**2))


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
    start: Array,
    prior: tuple[Array, float],
    settings: Training,
    head_rate: float,
    rng: Rng,
    *,
    below: bool,
    dtype: torch.dtype = torch.float32,
) -> tuple[Array, Chain]:
    r"""Move the head v by noisy gradient steps towards its posterior, and the layers below down the loss at v.

    .. math:: v \leftarrow \beta + \rho \big(v - \gamma \nabla_v L(v, \theta) - \beta\big)
              + s \sqrt{1 - \rho^2}\; \xi, \qquad \rho = e^{-\gamma / (n s^2)}, \qquad \xi \sim N(0, I)

    L is the mean negative log likelihood of a batch. The prior's part of a step is exact, so that few rows or a narrow
    prior need no shorter steps. With all rows in a batch, θ held and a normal likelihood of curvature λ and slope g at
    β, along an axis, the chain's stationary mean is β − ρ γ g / (1 − ρ (1 − γ λ)) and its variance
    s² (1 − ρ²) / (1 − ρ² (1 − γ λ)²): the posterior's as γ falls.

    Of the weights w (D,) those `below` move with the head, or stay. The head starts at v (d,), with the `prior` β (d,)
    and s and the step γ, `head_rate`, per unit of the mean loss. Returns all weights with the last v,
    and the chain. Raises `LocalFailure` where the loss ends far above its start, alone and with the prior's part, or is
    not finite.
    """
    flat, rows = np.array(w, dtype=float), len(unit.X)
    flat[head.places] = start
    moving = head.below if below else head.below[:0]
    fixed_features = None if len(moving) else features(unit, head, flat, dtype=dtype)
    leaves = Leaves(unit, flat, moving, settings, dtype)
    body = without_head(leaves.net, head)
    v = unit.tensor(np.array(start, dtype=float), dtype).requires_grad_()
    centre, spread = unit.tensor(np.array(prior[0], dtype=float), dtype), prior[1]
    rho = float(np.exp(-head_rate / (rows * spread**2)))
    source = generator_of(rng)
    before, states = np.array([loss_at(unit, flat, dtype=dtype), _pull(flat[head.places], prior, rows)]), []
    with torch.enable_grad():
        for batch in batches(rows, settings, rng):
            z = body(taken(leaves.X, batch)) if fixed_features is None else taken(fixed_features, batch)
            loss = expected_loss(unit, head, z, taken(leaves.y, batch), v[None])
            (slope,) = leaves.descend(loss, others=[v])
            with torch.no_grad():
                noise = torch.randn(len(v), generator=source, dtype=dtype).to(v.device)
                v.copy_(centre + rho * (v - head_rate * slope - centre) + spread * (1 - rho**2) ** 0.5 * noise)
                states.append(host(v).copy())
    half = np.array(states[len(states) // 2 :])
    moved, mean = leaves.result(flat), half.mean(axis=0)
    moved[head.places] = mean
    after = np.array([loss_at(unit, moved, dtype=dtype), _pull(mean, prior, rows)])
    # The head moves towards its population too, whose mean others may have moved far away.
    if len(moving) or not np.isfinite(after[0]):
        rises = after - before
        require_no_rise("learning_rate= or head_rate=", rises[0], lambda: float(sum(rises)))
    moved[head.places] = states[-1]
    return require_bounded(moved, flat), Chain(states[-1], mean, half.std(axis=0))


def _pull(v: Array, prior: tuple[Array, float], rows: int) -> float:
    """Minus the log density of the population, for one row, less a constant."""
    return 0.5 * float(np.sum((v - prior[0]) ** 2)) / (rows * prior[1] ** 2)
