"""Posteriors of all weights at clients, whose means and sds are averaged: pFedBayes and BPFed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.random import Generator

from fedppl import gaussian
from fedppl.algorithms.averaging.fedavg import not_counted, weight_of, weights_rule
from fedppl.contracts import (
    Algorithm,
    ClientUpdate,
    ClientView,
    Details,
    Point,
    Received,
    Replies,
    Report,
    Result,
    always,
)
from fedppl.nn.algorithms._common import (
    AT_MEAN,
    NetworkInfo,
    check_network,
    moved,
    needs,
    network_result,
    run_away,
    training_rule,
    whole_network,
)
from fedppl.nn.personal import bayes_steps
from fedppl.nn.subnet import Subnetwork
from fedppl.nn.train import GROWTH, Training
from fedppl.nn.view import Own, PersonaliseFn, network_of
from fedppl.settings import between, described, positive, whole
from fedppl.types import Array, Layout, Message


class NormalClientState(NamedTuple):
    """A client's personal state: q_k."""

    mean: Array  # (m,)
    sd: Array  # (m,)


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
    learning_rate, epochs, batch_size
        Adam's learning rate for the loss over n_k, passes over the rows, and rows a step.
    draws
        Number of draws of the weights in each step.
    weights
        "rows" or "equal".

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
    settings = checked(learning_rate, epochs, batch_size, zeta, draws, spread, weights)
    return Algorithm[PosteriorState, NormalClientState](
        name="nn.PFedBayes",
        settings=described(settings),
        init=functools.partial(init, spread=settings.spread),
        broadcast=broadcast,
        update_client=functools.partial(_pfedbayes_update_client, settings=settings),
        update_server=functools.partial(update_server, settings=settings),
        replies=REPLIES,
        result=result(functools.partial(_pfedbayes_own, settings=settings)),
        needs=whole_network("nn.PFedBayes"),
        disclosure=AT_MEAN,
        unreported=functools.partial(_pfedbayes_update_unreported, settings=settings),
    )


def _pfedbayes_steps(
    client: ClientView, personal: NormalClientState | None, message: Message, rng: Generator, settings: Settings
) -> tuple[Normal, Normal]:
    """q_k and p_k, in torch's order."""
    network = client.view(network_of)
    mean, sd = network.at(message["mean"]), network.at(message["sd"])
    start = personal if personal is not None and len(personal.mean) == len(mean) else None
    return bayes_steps(network.unit, mean, sd, settings.training, settings.zeta, settings.draws, rng, start=start)


def _pfedbayes_update_client(
    client: ClientView, personal: NormalClientState | None, message: Message, rng: Generator, *, settings: Settings
) -> ClientUpdate[NormalClientState]:
    """Steps of q_k and of p_k; p_k travels."""
    q, p = _pfedbayes_steps(client, personal, message, rng, settings)
    info = {"blank": 1.0} if personal is None else {}
    return ClientUpdate(NormalClientState(*q), reply_of(client, p, settings), info)


def _pfedbayes_update_unreported(
    client: ClientView, personal: NormalClientState | None, message: Message, rng: Generator, *, settings: Settings
) -> tuple[NormalClientState, Mapping[str, float]]:
    """q_k around the p of this round."""
    return NormalClientState(*_pfedbayes_steps(client, personal, message, rng, settings)[0]), {}


def _pfedbayes_own(
    client: ClientView, personal: NormalClientState | None, message: Message, rng: Generator, *, settings: Settings
) -> Own:
    """q_k after one more round for the client alone."""
    return own_normal(client, _pfedbayes_steps(client, personal, message, rng, settings)[0])


# Averages of posteriors of independent normal weights: means and sds, each by itself ----------------------------------

P = TypeVar("P")
_NEAR = 0.2  # change of log sds: where nine in ten changed less, they are no posterior
_LEAST = 1e-18  # sd of a weight: the square of a smaller one is 0 in single precision, or near it
Normal = tuple[Array, Array]  # means and sds of independent weights


class PosteriorState(NamedTuple):
    """What the next round needs."""

    mean: Array  # (m,)
    sd: Array  # (m,)


class Settings(NamedTuple):
    """Settings of a client's steps."""

    training: Training
    zeta: float
    draws: int
    spread: float
    weights: str


def checked(
    learning_rate: float, epochs: int, batch_size: int, zeta: float, draws: int, spread: float, weights: str
) -> Settings:
    """Settings in range, or an error that says which is not."""
    return Settings(
        training_rule(learning_rate, epochs, batch_size),
        positive("zeta", zeta),
        whole("draws", draws),
        between("spread", spread, 1e-8, 1e3, "[]", "it is a standard deviation of weights, in single precision"),
        weights_rule(weights),
    )


def init(layout: Layout, clients: tuple[str, ...], rng: Generator, *, spread: float) -> PosteriorState:
    """Start at the declared weights with sds of `spread`."""
    mean = gaussian.mean(layout.prior)
    return PosteriorState(mean, np.full(len(mean), spread))


def broadcast(state: PosteriorState, client_id: str) -> Message:
    """The shared posterior."""
    return {"mean": state.mean, "sd": state.sd}


def reply_of(client: ClientView, q: Normal, settings: Settings) -> Message:
    """Terms of the weighted means, from a posterior of all weights."""
    weight, shared = weight_of(client, settings.weights), client.view(network_of).unit.shared_at
    return {"mean": weight * q[0][shared], "sd": weight * q[1][shared], "weight": np.array(weight)}


def own_normal(client: ClientView, q: Normal) -> Own:
    """A client's own network with this posterior of all weights."""
    mean, sd = q
    return Own(client, mean, Subnetwork(mean, np.arange(len(mean)), sd**2))


def update_server(state: PosteriorState, received: Received, *, settings: Settings) -> tuple[PosteriorState, Report]:
    """Average means and sds; the message says where sds are still those of the start."""
    if not received.clients:
        return state, Report(NetworkInfo(np.nan))
    total = received.total
    mean, sd = total["mean"] / total["weight"], total["sd"] / total["weight"]
    change, message = moved(state.mean, mean)
    if np.quantile(np.abs(np.log(sd / settings.spread)), 0.9) < _NEAR:
        message += (
            f". Sds of weights are still about spread={settings.spread:g}, where they began, and say nothing of what "
            "is known: raise rounds= or learning_rate=, or take a smaller batch_size="
        )
    return PosteriorState(mean, sd), Report(NetworkInfo(change), message=message)


def _reject(state: PosteriorState, reply: Message) -> str | None:
    """Why a reply is rejected: rows, sds or weights out of range; or None."""
    if reason := not_counted(reply, "weight"):
        return reason
    sd = reply["sd"] / reply["weight"]
    least, most = float(np.min(sd)), GROWTH * (1.0 + float(np.max(state.sd)))
    if not _LEAST <= least or not float(np.max(sd)) <= most:
        wrong = least if not _LEAST <= least else float(np.max(sd))
        return f"'sd' is {wrong:.3g} for one row somewhere, and must be from {_LEAST:.0e} to {most:.3g}"
    return run_away("mean", reply["mean"] / reply["weight"], state.mean)


def _details(state: PosteriorState) -> Details:
    return {"sd": (("rows",), state.sd)}


def result(personalise: PersonaliseFn[P]) -> Result[PosteriorState, P]:
    """How to read the state: the shared means are the estimate, the sds a detail."""
    return network_result(broadcast, personalise, Point[PosteriorState](lambda state: state.mean), _details)


REPLIES = Replies[PosteriorState](
    lambda state: {"mean": state.mean.shape, "sd": state.mean.shape, "weight": ()}, _reject, always
)


# BPFed: shared and local weights have posteriors, and the last round's is the next one's prior ------------------------


class LocalNormalClientState(NamedTuple):
    """A client's personal state: q_k of its local weights."""

    mean: Array  # (d_k,)
    sd: Array  # (d_k,)


def BPFed(
    *,
    zeta: float = 1.0,
    spread: float = 0.05,
    learning_rate: float = 1e-3,
    epochs: int = 5,
    batch_size: int = 50,
    draws: int = 1,
    weights: str = "rows",
) -> Algorithm[PosteriorState, LocalNormalClientState]:
    r"""Bayesian networks whose shared and local weights both have posteriors, learnt continually.

    .. math:: q_k = \arg\min_q \, -E_q \log p(y_k \mid w) + \zeta\, \mathrm{KL}(q \,\|\, p_k), \qquad
              p_k = q^{\text{server}}_{\text{shared}} \, q^{\text{last round}}_{k, \text{local}}

    All posteriors are normal with independent weights. Means and sds of the shared weights are averaged; what
    the declaration does not share stays at the client, and its posterior is its prior in the next round.

    Parameters
    ----------
    zeta
        ζ, strength with which q_k is held near p_k.
    spread, learning_rate, epochs, batch_size, draws, weights
        As in `PFedBayes`.

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
    settings = checked(learning_rate, epochs, batch_size, zeta, draws, spread, weights)
    return Algorithm[PosteriorState, LocalNormalClientState](
        name="nn.BPFed",
        settings=described(settings),
        init=functools.partial(init, spread=settings.spread),
        broadcast=broadcast,
        update_client=functools.partial(_bpfed_update_client, settings=settings),
        update_server=functools.partial(update_server, settings=settings),
        replies=REPLIES,
        result=result(functools.partial(_bpfed_own, settings=settings)),
        needs=needs(lambda client: check_network(client, "nn.BPFed", "shared")),
        disclosure=AT_MEAN,
        unreported=functools.partial(_bpfed_update_unreported, settings=settings),
    )


def _bpfed_posterior(
    client: ClientView, personal: LocalNormalClientState | None, message: Message, rng: Generator, settings: Settings
) -> Normal:
    """Mean and sd of q_k over all weights, in torch's order."""
    network = client.view(network_of)
    local: Normal = network.start, np.full(client.local_size, settings.spread)
    if personal is not None and len(personal.mean) == client.local_size:
        local = personal
    mean, sd = (
        network.unit.weights(np.asarray(message[name], dtype=float), part)
        for name, part in zip(("mean", "sd"), local, strict=True)
    )
    return bayes_steps(network.unit, mean, sd, settings.training, settings.zeta, settings.draws, rng, follow=False)[0]


def _bpfed_kept(client: ClientView, q: Normal) -> LocalNormalClientState:
    local = client.view(network_of).unit.local_at
    return LocalNormalClientState(q[0][local], q[1][local])


def _bpfed_update_client(
    client: ClientView, personal: LocalNormalClientState | None, message: Message, rng: Generator, *, settings: Settings
) -> ClientUpdate[LocalNormalClientState]:
    """q_k; its shared part travels."""
    q = _bpfed_posterior(client, personal, message, rng, settings)
    info = {"blank": 1.0} if personal is None and client.local_size else {}
    return ClientUpdate(_bpfed_kept(client, q), reply_of(client, q, settings), info)


def _bpfed_update_unreported(
    client: ClientView, personal: LocalNormalClientState | None, message: Message, rng: Generator, *, settings: Settings
) -> tuple[LocalNormalClientState, Mapping[str, float]]:
    """q_k of the local weights around this round's shared ones."""
    return _bpfed_kept(client, _bpfed_posterior(client, personal, message, rng, settings)), {}


def _bpfed_own(
    client: ClientView, personal: LocalNormalClientState | None, message: Message, rng: Generator, *, settings: Settings
) -> Own:
    """q_k after one more round for the client alone."""
    return own_normal(client, _bpfed_posterior(client, personal, message, rng, settings))
