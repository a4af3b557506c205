"""Baselines with a network of each client's own: Per-FedAvg, pFedMe, IFCA, pFedBayes and BPFed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np

from fedppl import contracts, gaussian
from fedppl.algorithms.averaging.fedavg import not_counted, weight_of, weighted, weights_rule
from fedppl.contracts import Algorithm, ClientUpdate, ClientView, Point, Received, Replies, Report
from fedppl.contracts.client import ClientFn
from fedppl.local.target import at_points
from fedppl.nn.algorithms import _common
from fedppl.nn.personal import bayes_steps, meta_steps, moreau_steps
from fedppl.nn.subnet import Subnetwork
from fedppl.nn.train import GROWTH, Training, loss_at, train
from fedppl.nn.unit import Pair
from fedppl.nn.view import Own, PersonaliseFn, network_of, own_of
from fedppl.settings import between, described, positive, whole
from fedppl.types import Array, DeclarationError, Layout, Message, Rng

P = TypeVar("P")


def PerFedAvg(
    *,
    learning_rate: float = 1e-2,
    inner_rate: float = 1e-2,
    epochs: int = 5,
    batch_size: int = 50,
    weights: str = "rows",
    tune_epochs: int = 1,
) -> Algorithm[_common.NetworkState, None]:
    r"""Personalised federated averaging, Hessian-free: descend the loss after one gradient step.

    .. math:: F_k(w) = f_k(w - \alpha \nabla f_k(w)), \qquad \phi \leftarrow \frac{\sum_k n_k w_k}{\sum_k n_k}

    Parameters
    ----------
    inner_rate
        α, learning rate of the step inside, and of the steps that make the network a client's own in the end.
    learning_rate, epochs, batch_size, weights
        As in `FedAvg`, with passes over the rows, of steps on F_k, each of three batches and five gradients.
    tune_epochs
        Passes of gradient steps that a client takes in the end.

    Returns
    -------
    Algorithm
        Its fit has a point estimate, where clients start from; `fedppl.nn.predict` takes their steps.

    Notes
    -----
    *When this fails.* The Hessian's product is a difference of gradients in float32, rough where the loss is flat.

    References
    ----------
    .. [1] Fallah et al. (2020), Personalized federated learning with theoretical guarantees, Per-FedAvg (HF).
    """
    training = _common.training_rule(learning_rate, epochs, batch_size, momentum=0.0)
    inner, rule = positive("inner_rate", inner_rate), weights_rule(weights)
    tuning = _common.tuning_rule("all", inner, tune_epochs, batch_size, momentum=0.0)

    def update_client(client: ClientView, personal: None, message: Message, rng: Rng) -> ClientUpdate[None]:
        unit = client.view(network_of)
        w = meta_steps(unit, unit.weights(message["mean"]), training, inner, rng)
        return ClientUpdate(None, weighted(w[unit.shared_at], weight_of(client, rule)))

    settings = described(training, inner_rate=inner, weights=weights, tune_epochs=tuning.training.epochs)
    personalise = functools.partial(_common.tuned, tuning=tuning, rate="inner_rate")
    return _averaged("nn.PerFedAvg", settings, update_client, personalise)


def _averaged(
    name: str, settings: Mapping[str, str], update_client: ClientFn[P], personalise: PersonaliseFn[P]
) -> Algorithm[_common.NetworkState, P]:
    """An algorithm that averages whole networks."""
    return Algorithm[_common.NetworkState, P](
        name=name,
        settings=settings,
        init=lambda layout, clients, rng: _common.NetworkState(gaussian.mean(layout.prior)),
        broadcast=_common.broadcast,
        update_client=update_client,
        update_server=_common.update_server,
        replies=_common.REPLIES,
        result=_common.network_result(_common.broadcast, personalise, _common.ESTIMATE),
        needs=_common.whole_network(name),
        disclosure=_common.AT_MEAN,
    )


# pFedMe: personal networks near a shared one, which descends the envelope of their losses -----------------------------


class MoreauClientState(NamedTuple):
    """A client's personal state."""

    own: Array  # θ_k, (m,)


def PFedMe(
    *,
    lam: float = 15.0,
    learning_rate: float = 5e-3,
    epochs: int = 5,
    batch_size: int = 50,
    inner_rate: float = 1e-2,
    inner_steps: int = 5,
    weights: str = "rows",
) -> Algorithm[_common.NetworkState, MoreauClientState]:
    r"""Personalised networks by Moreau envelopes.

    .. math:: \theta_k(w) = \arg\min_\theta f_k(\theta) + \tfrac\lambda2 \lVert \theta - w \rVert^2, \qquad
              w_k \leftarrow w_k - \eta \lambda (w_k - \theta_k(w_k)), \qquad \phi \leftarrow \text{average of } w_k

    Parameters
    ----------
    lam
        λ, strength of the quadratic beside the mean loss.
    learning_rate, epochs, batch_size, weights
        As in `FedAvg`, with passes over the rows; η is below 1 / λ, and every batch has its own θ_k.
    inner_rate, inner_steps
        Learning rate and number of the steps to θ_k from w_k: each one on the loss, then the proximal map of the
        quadratic, so that large rates end at w − ∇f / λ.

    Returns
    -------
    Algorithm
        Its fit has a point estimate, φ; `fedppl.nn.predict` gives predictions by θ_k, computed from φ.

    Notes
    -----
    *When this fails.* A large `lam` with few or short inner steps leaves θ_k at w_k, and nothing moves. With a small
    `lam` and long inner steps θ_k fits the last batch alone: of 51 rows by 50 that is one row.

    References
    ----------
    .. [1] Dinh, Tran and Nguyen (2020), Personalized federated learning with Moreau envelopes, with β = 1.
    """
    training = _common.training_rule(learning_rate, epochs, batch_size, momentum=0.0)
    lam = positive("lam", lam)
    if training.learning_rate * lam > 1:
        raise DeclarationError(f"learning_rate={learning_rate} times lam={lam} must be at most 1, or w steps beyond θ.")
    inner = positive("inner_rate", inner_rate), whole("inner_steps", inner_steps)
    settings = described({"training": training, "lam": lam, "inner": inner, "weights": weights_rule(weights)})

    def steps(client: ClientView, message: Message, rng: Rng) -> tuple[Array, Array]:
        """w_k and θ_k, in torch's order."""
        unit = client.view(network_of)
        return moreau_steps(unit, unit.weights(message["mean"]), training, lam, inner, rng)

    def update_client(
        client: ClientView, personal: MoreauClientState | None, message: Message, rng: Rng
    ) -> ClientUpdate[MoreauClientState]:
        w, theta = steps(client, message, rng)
        shared = client.view(network_of).shared_at
        return ClientUpdate(MoreauClientState(theta), weighted(w[shared], weight_of(client, weights)))

    # In the end θ_k around the last φ, computed again: it is not the client's personal state.
    return _averaged(
        "nn.PFedMe",
        settings,
        update_client,
        lambda client, personal, message, rng: Own(client, steps(client, message, rng)[1], None),
    )


# IFCA: several global networks, and every client trains the one with the lowest loss on its rows ----------------------


class IFCAState(NamedTuple):
    """What the next round needs."""

    phi: Array  # (C, m)


class IFCAInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # root mean square of Δφ
    used: int  # clusters that some client trained


def IFCA(
    *,
    clusters: int = 2,
    spread: float = 0.01,
    learning_rate: float = 1e-2,
    momentum: float | None = 0.9,
    epochs: int = 5,
    batch_size: int = 50,
    weights: str = "rows",
) -> Algorithm[IFCAState, None]:
    r"""Iterative federated clustering: each client trains the network with the lowest loss on its rows.

    .. math:: c_k = \arg\min_c f_k(\phi_c), \qquad
              \phi_c \leftarrow \frac{\sum_{k : c_k = c} n_k w_k}{\sum_{k : c_k = c} n_k}

    Parameters
    ----------
    clusters
        Number of networks. One is federated averaging.
    spread
        Standard deviation of the random weights at which all networks but the first start, around the declared ones.
    learning_rate, momentum, epochs, batch_size, weights
        As in `FedAvg`, with passes over the rows.

    Returns
    -------
    Algorithm
        Its fit has no single point: `fedppl.nn.predict` picks a client's network by its rows.

    Notes
    -----
    Networks travel down all together, C times the bytes of averaging; one comes back.

    *When this fails.* Networks with similar starts separate by chance, and all clients may end in one: try other
    seeds and a larger `spread`, and judge on rows that were held out.

    References
    ----------
    .. [1] Ghosh et al. (2020), An efficient framework for clustered federated learning.
    """
    clusters, spread = whole("clusters", clusters), positive("spread", spread)
    training = _common.training_rule(learning_rate, epochs, batch_size, momentum=momentum)
    return Algorithm[IFCAState, None](
        name="nn.IFCA",
        settings=described({"clusters": clusters, "spread": spread}, **training._asdict(), weights=weights),
        init=functools.partial(_ifca_init, clusters=clusters, spread=spread),
        broadcast=_ifca_broadcast,
        update_client=functools.partial(_ifca_update_client, training=training, weights=weights_rule(weights)),
        update_server=_ifca_update_server,
        replies=Replies(lambda state: {"phi": state.phi.shape[1:], "weight": state.phi.shape[:1]}, _ifca_reject),
        result=_common.network_result(
            _ifca_broadcast, lambda client, personal, message, rng: Own(client, _ifca_best(client, message)[1], None)
        ),
        needs=_common.whole_network("nn.IFCA"),
        disclosure=contracts.Disclosure(
            functools.partial(at_points, name="phi", several=True), by_row=_common.open_rows
        ),
    )


def _ifca_init(layout: Layout, clients: tuple[str, ...], rng: Rng, *, clusters: int, spread: float) -> IFCAState:
    start = gaussian.mean(layout.prior)
    others = start + spread * rng.normal(size=(clusters - 1, len(start)))
    return IFCAState(np.vstack([start[None], others]))


def _ifca_broadcast(state: IFCAState, client_id: str) -> Message:
    return {"phi": state.phi}


def _ifca_best(client: ClientView, message: Message) -> tuple[int, Array]:
    unit = client.view(network_of)
    networks = [unit.weights(phi) for phi in np.asarray(message["phi"])]
    losses = np.array([loss_at(unit, w) for w in networks])
    chosen = int(np.argmin(np.where(np.isnan(losses), np.inf, losses)))  # NaN of a network that has diverged
    return chosen, networks[chosen]


def _ifca_update_client(
    client: ClientView, personal: None, message: Message, rng: Rng, *, training: Training, weights: str
) -> ClientUpdate[None]:
    unit, (chosen, w) = client.view(network_of), _ifca_best(client, message)
    w = train(unit, w, np.arange(unit.size), training, rng)
    weight = np.zeros(len(message["phi"]))
    weight[chosen] = weight_of(client, weights)
    return ClientUpdate(None, {"phi": w[unit.shared_at], "weight": weight}, {"cluster": float(chosen)})


def _ifca_update_server(state: IFCAState, received: Received) -> tuple[IFCAState, Report]:
    """Average within clusters; a cluster without clients stays."""
    if not received.clients:
        return state, Report(IFCAInfo(np.nan, 0))
    replies = [received.each[client_id] for client_id in sorted(received.each)]
    weights, ends = (
        np.stack([np.asarray(reply[name], dtype=float) for reply in replies]) for name in ("weight", "phi")
    )
    total = weights.sum(axis=0)
    averages = weights.T @ ends / np.where(total > 0, total, 1.0)[:, None]
    phi = np.where(total[:, None] > 0, averages, state.phi)
    change, message = _common.moved(state.phi, phi)
    return IFCAState(phi), Report(IFCAInfo(change, int(np.sum(total > 0))), message=message)


def _ifca_reject(state: IFCAState, reply: Message) -> str | None:
    weight = np.asarray(reply["weight"])
    if np.sum(weight > 0) != 1 or np.any(weight < 0):
        return f"'weight' is {weight.tolist()}, and must be positive for one cluster and 0 for the others"
    before = state.phi[np.argmax(weight)]
    return not_counted({"weight": weight.max()}, "weight") or _common.run_away("phi", np.asarray(reply["phi"]), before)


# pFedBayes and BPFed: posteriors of all weights at clients, whose means and sds are averaged --------------------------

_NEAR = 0.2  # change of log sds: where nine in ten changed less, they are no posterior
_LEAST = 1e-18  # sd of a weight: the square of a smaller one is 0 in single precision, or near it


class NormalClientState(NamedTuple):
    """A client's personal state: q_k, of its local weights alone by `BPFed`."""

    mean: Array
    sd: Array


class PosteriorState(NamedTuple):
    """What the next round needs."""

    mean: Array  # (m,)
    sd: Array  # (m,)


class _Normals(NamedTuple):
    training: Training
    zeta: float
    draws: int
    spread: float
    weights: str


def PFedBayes(
    *,
    zeta: float = 10.0,
    spread: float = 0.01,
    learning_rate: float = 1e-3,
    epochs: int = 5,
    batch_size: int = 50,
    draws: int = 1,
    weights: str = "rows",
) -> Algorithm[PosteriorState, NormalClientState]:
    r"""Bayesian networks at clients around a global Bayesian network.

    .. math:: q_k = \arg\min_q \, -E_q \log p(y_k \mid w) + \zeta\, \mathrm{KL}(q \,\|\, p), \qquad
              p_k = \arg\min_p \mathrm{KL}(q_k \,\|\, p), \qquad p \leftarrow \text{average of the } p_k

    q_k, p_k and p are normal with independent weights; means and sds are averaged. Both are moved by Adam in turns.

    Parameters
    ----------
    zeta
        ζ, strength with which q_k is held near p.
    spread
        Standard deviation of all weights at the start.
    draws
        Number of draws of the weights in each step.
    learning_rate, epochs, batch_size, weights
        As in `FedAvg`, with passes over the rows, by Adam.

    Returns
    -------
    Algorithm
        Its fit has a point estimate, the means of p; `fedppl.nn.predict` gives predictions by q_k.

    Notes
    -----
    *When this fails.* With a `spread` much larger than the weights, noise prevents learning. Few rows are few steps of
    Adam: after 25 rounds of 15 to 60 rows sds can still be `spread`, and the network a guess, as the message says.

    References
    ----------
    .. [1] Zhang et al. (2022), Personalized federated learning via variational Bayesian inference, Algorithm 1.
    """
    settings = _normal_checked(learning_rate, epochs, batch_size, zeta, draws, spread, weights)
    return _algorithm("nn.PFedBayes", settings, _common.whole_network("nn.PFedBayes"), continual=False)


def BPFed(
    *,
    zeta: float = 1.0,
    spread: float = 0.05,
    learning_rate: float = 1e-3,
    epochs: int = 5,
    batch_size: int = 50,
    draws: int = 1,
    weights: str = "rows",
) -> Algorithm[PosteriorState, NormalClientState]:
    r"""Bayesian networks whose shared and local weights both have posteriors, learnt continually.

    .. math:: q_k = \arg\min_q \, -E_q \log p(y_k \mid w) + \zeta\, \mathrm{KL}(q \,\|\, p_k), \qquad
              p_k = q^{\text{server}}_{\text{shared}} \, q^{\text{last round}}_{k, \text{local}}

    All posteriors are normal with independent weights. Means and sds of the shared weights are averaged; what
    the declaration does not share stays at the client, and its posterior is its prior in the next round.

    Parameters
    ----------
    zeta, spread, learning_rate, epochs, batch_size, draws, weights
        As in `PFedBayes`, with p_k for p.

    Returns
    -------
    Algorithm
        Its fit has a point estimate, the shared means; `fedppl.nn.predict` gives predictions by q_k.

    Notes
    -----
    *When this fails.* A posterior that becomes the prior of the same rows counts them again in every round: sds fall
    with the number of rounds. With few rows, and so few steps, they can still be `spread`, as the message says.

    References
    ----------
    .. [1] Chen, Liu, Cao and Zhang (2023), Bayesian personalized federated learning with shared and personalized
       uncertainty representations.
    """
    settings = _normal_checked(learning_rate, epochs, batch_size, zeta, draws, spread, weights)
    needs = _common.needs(lambda client: _common.check_network(client, "nn.BPFed", "shared"))
    return _algorithm("nn.BPFed", settings, needs, continual=True)


# What both share: averages of posteriors of independent normal weights, means and sds each by itself ------------------


def _algorithm(
    name: str, settings: _Normals, needs: contracts.Needs, *, continual: bool
) -> Algorithm[PosteriorState, NormalClientState]:
    posteriors = functools.partial(_posteriors, settings=settings, continual=continual)

    def update_client(
        client: ClientView, personal: NormalClientState | None, message: Message, rng: Rng
    ) -> ClientUpdate[NormalClientState]:
        _, (mean, sd), kept = posteriors(client, personal, message, rng)
        weight, shared = weight_of(client, settings.weights), client.view(network_of).shared_at
        reply = {"mean": weight * mean[shared], "sd": weight * sd[shared], "weight": np.array(weight)}
        return ClientUpdate(kept, reply, {"blank": 1.0} if personal is None and len(kept.mean) else {})

    def personalise(client: ClientView, personal: NormalClientState | None, message: Message, rng: Rng) -> Own:
        mean, sd = posteriors(client, personal, message, rng)[0]
        return own_of(client, Subnetwork(mean, np.arange(len(mean)), sd**2))

    return Algorithm[PosteriorState, NormalClientState](
        name=name,
        settings=described(settings),
        init=functools.partial(_normal_init, spread=settings.spread),
        broadcast=_normal_broadcast,
        update_client=update_client,
        update_server=functools.partial(_normal_update_server, settings=settings),
        replies=Replies[PosteriorState](
            lambda state: {"mean": state.mean.shape, "sd": state.mean.shape, "weight": ()},
            _normal_reject,
            contracts.always,
        ),
        result=_common.network_result(
            _normal_broadcast,
            personalise,
            Point[PosteriorState](lambda state: state.mean),
            details=lambda state: {"sd": (("rows",), state.sd)},
        ),
        needs=needs,
        disclosure=_common.AT_MEAN,
        unreported=lambda client, personal, message, rng: (posteriors(client, personal, message, rng)[2], {}),
    )


def _normal_checked(
    learning_rate: float, epochs: int, batch_size: int, zeta: float, draws: int, spread: float, weights: str
) -> _Normals:
    return _Normals(
        _common.training_rule(learning_rate, epochs, batch_size),
        positive("zeta", zeta),
        whole("draws", draws),
        between("spread", spread, 1e-8, 1e3, "[]", "it is a standard deviation of weights, in single precision"),
        weights_rule(weights),
    )


def _normal_init(layout: Layout, clients: tuple[str, ...], rng: Rng, *, spread: float) -> PosteriorState:
    mean = gaussian.mean(layout.prior)
    return PosteriorState(mean, np.full(len(mean), spread))


def _normal_broadcast(state: PosteriorState, client_id: str) -> Message:
    return {"mean": state.mean, "sd": state.sd}


def _posteriors(
    client: ClientView,
    personal: NormalClientState | None,
    message: Message,
    rng: Rng,
    *,
    settings: _Normals,
    continual: bool,
) -> tuple[Pair, Pair, NormalClientState]:
    """q_k of all weights in torch's order, the posterior that travels, and the one that stays.

    All of q_k stays, where its next steps start, and p_k travels. If `continual`, local weights' q_k stays, which is
    their next prior, and q_k travels.
    """
    unit = client.view(network_of)
    mean, sd = unit.weights(message["mean"]), unit.weights(message["sd"], settings.spread)
    kept = unit.local_at if continual else np.arange(unit.size)
    last = personal if personal is not None and len(personal.mean) == len(kept) else None
    if last is not None and continual:
        mean[kept], sd[kept] = last
    start, steps = None if continual else last, (settings.training, settings.zeta, settings.draws)
    q, p = bayes_steps(unit, mean, sd, *steps, rng, start=start, follow=not continual)
    return q, q if continual else p, NormalClientState(*(value[kept] for value in q))


def _normal_update_server(
    state: PosteriorState, received: Received, *, settings: _Normals
) -> tuple[PosteriorState, Report]:
    """Average means and sds; the message says where sds are still those of the start."""
    if not received.clients:
        return state, Report(_common.NetworkInfo(np.nan))
    total = received.total
    mean, sd = total["mean"] / total["weight"], total["sd"] / total["weight"]
    change, message = _common.moved(state.mean, mean)
    if np.quantile(np.abs(np.log(sd / settings.spread)), 0.9) < _NEAR:
        message += (
            f". Sds are still about spread={settings.spread:g}, where they began: raise rounds= or learning_rate="
        )
    return PosteriorState(mean, sd), Report(_common.NetworkInfo(change), message=message)


def _normal_reject(state: PosteriorState, reply: Message) -> str | None:
    if reason := not_counted(reply, "weight"):
        return reason
    sd = reply["sd"] / reply["weight"]
    least, most = float(np.min(sd)), GROWTH * (1.0 + float(np.max(state.sd)))
    if not _LEAST <= least or not float(np.max(sd)) <= most:
        wrong = least if not _LEAST <= least else float(np.max(sd))
        return f"'sd' is {wrong:.3g} for one row somewhere, and must be from {_LEAST:.0e} to {most:.3g}"
    return _common.run_away("mean", reply["mean"] / reply["weight"], state.mean)
