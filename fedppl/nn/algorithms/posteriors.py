"""Posteriors of all weights at clients, whose means and sds are averaged: pFedBayes and BPFed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from fedppl import gaussian
from fedppl.algorithms.averaging.fedavg import not_counted, weight_of, weights_rule
from fedppl.contracts import Algorithm, ClientUpdate, ClientView, Needs, Point, Received, Replies, Report, always
from fedppl.nn.algorithms import _common
from fedppl.nn.functional import Places
from fedppl.nn.personal import bayes_steps
from fedppl.nn.subnet import Subnetwork
from fedppl.nn.train import GROWTH, Training
from fedppl.nn.unit import NetworkUnit
from fedppl.nn.view import Own, network_of
from fedppl.settings import between, described, positive, whole
from fedppl.types import Array, Layout, Message

_NEAR = 0.2  # change of log sds: where nine in ten changed less, they are no posterior
_LEAST = 1e-18  # sd of a weight: the square of a smaller one is 0 in single precision, or near it
Normal = tuple[Array, Array]  # means and sds of independent weights


class NormalClientState(NamedTuple):
    """A client's personal state: q_k, of its local weights alone by `BPFed`."""

    mean: Array
    sd: Array


class PosteriorState(NamedTuple):
    """What the next round needs."""

    mean: Array  # (m,)
    sd: Array  # (m,)


class _Settings(NamedTuple):
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
        As in `FedAvg`, by Adam.

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
    settings = _checked(learning_rate, epochs, batch_size, zeta, draws, spread, weights)
    method = _Method(settings, _pfedbayes, lambda unit: np.arange(unit.size))
    return _algorithm("nn.PFedBayes", method, _common.whole_network("nn.PFedBayes"))


def _pfedbayes(
    unit: NetworkUnit, prior: Normal, personal: NormalClientState | None, rng: Generator, settings: _Settings
) -> tuple[Normal, Normal]:
    """q_k, from the one before, and p_k, which travels."""
    start = personal if personal is not None and len(personal.mean) == len(prior[0]) else None
    return bayes_steps(unit, *prior, settings.training, settings.zeta, settings.draws, rng, start=start)


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
    settings = _checked(learning_rate, epochs, batch_size, zeta, draws, spread, weights)
    needs = _common.needs(lambda client: _common.check_network(client, "nn.BPFed", "shared"))
    return _algorithm("nn.BPFed", _Method(settings, _bpfed, lambda unit: unit.local_at), needs)


def _bpfed(
    unit: NetworkUnit, prior: Normal, personal: NormalClientState | None, rng: Generator, settings: _Settings
) -> tuple[Normal, Normal]:
    """q_k, which is near the last round's in the local weights, and travels."""
    mean, sd = prior
    if personal is not None and len(personal.mean) == len(unit.local_at):
        mean, sd = (unit.weights(p[unit.shared_at], own) for p, own in zip(prior, personal, strict=True))
    q, _ = bayes_steps(unit, mean, sd, settings.training, settings.zeta, settings.draws, rng, follow=False)
    return q, q


# What both share: averages of posteriors of independent normal weights, means and sds each by itself ------------------

# A client's steps around p: q_k, and the posterior that travels.
_StepsFn = Callable[[NetworkUnit, Normal, NormalClientState | None, Generator, _Settings], tuple[Normal, Normal]]


class _Method(NamedTuple):
    settings: _Settings
    steps: _StepsFn
    kept: Callable[[NetworkUnit], Places]  # where the weights are whose q_k stays at the client


def _algorithm(name: str, method: _Method, needs: Needs) -> Algorithm[PosteriorState, NormalClientState]:
    return Algorithm[PosteriorState, NormalClientState](
        name=name,
        settings=described(method.settings),
        init=functools.partial(_init, spread=method.settings.spread),
        broadcast=_broadcast,
        update_client=functools.partial(_update_client, method=method),
        update_server=functools.partial(_update_server, settings=method.settings),
        replies=Replies[PosteriorState](
            lambda state: {"mean": state.mean.shape, "sd": state.mean.shape, "weight": ()}, _reject, always
        ),
        result=_common.network_result(
            _broadcast,
            functools.partial(_own, method=method),
            Point[PosteriorState](lambda state: state.mean),
            lambda state: {"sd": (("rows",), state.sd)},
        ),
        needs=needs,
        disclosure=_common.AT_MEAN,
        unreported=functools.partial(_update_unreported, method=method),
    )


def _checked(
    learning_rate: float, epochs: int, batch_size: int, zeta: float, draws: int, spread: float, weights: str
) -> _Settings:
    """Settings in range, or an error that says which is not."""
    return _Settings(
        _common.training_rule(learning_rate, epochs, batch_size),
        positive("zeta", zeta),
        whole("draws", draws),
        between("spread", spread, 1e-8, 1e3, "[]", "it is a standard deviation of weights, in single precision"),
        weights_rule(weights),
    )


def _init(layout: Layout, clients: tuple[str, ...], rng: Generator, *, spread: float) -> PosteriorState:
    """Start at the declared weights with sds of `spread`."""
    mean = gaussian.mean(layout.prior)
    return PosteriorState(mean, np.full(len(mean), spread))


def _broadcast(state: PosteriorState, client_id: str) -> Message:
    """The shared posterior."""
    return {"mean": state.mean, "sd": state.sd}


def _posteriors(
    client: ClientView, personal: NormalClientState | None, message: Message, rng: Generator, method: _Method
) -> tuple[Normal, Normal, NormalClientState]:
    """q_k of all weights in torch's order, the posterior that travels, and the one that stays."""
    network, settings = client.view(network_of), method.settings
    mean = network.at(message["mean"])
    sd = network.unit.weights(np.asarray(message["sd"], dtype=float), np.full(client.local_size, settings.spread))
    q, sent = method.steps(network.unit, (mean, sd), personal, rng, settings)
    return q, sent, NormalClientState(*(value[method.kept(network.unit)] for value in q))


def _update_client(
    client: ClientView, personal: NormalClientState | None, message: Message, rng: Generator, *, method: _Method
) -> ClientUpdate[NormalClientState]:
    """A round's steps; terms of weighted means travel."""
    _, sent, kept = _posteriors(client, personal, message, rng, method)
    weight, shared = weight_of(client, method.settings.weights), client.view(network_of).unit.shared_at
    reply = {"mean": weight * sent[0][shared], "sd": weight * sent[1][shared], "weight": np.array(weight)}
    return ClientUpdate(kept, reply, {"blank": 1.0} if personal is None and len(kept.mean) else {})


def _update_unreported(
    client: ClientView, personal: NormalClientState | None, message: Message, rng: Generator, *, method: _Method
) -> tuple[NormalClientState, Mapping[str, float]]:
    """The same steps around the p of this round."""
    return _posteriors(client, personal, message, rng, method)[2], {}


def _own(
    client: ClientView, personal: NormalClientState | None, message: Message, rng: Generator, *, method: _Method
) -> Own:
    """q_k after one more round for the client alone."""
    mean, sd = _posteriors(client, personal, message, rng, method)[0]
    return Own(client, mean, Subnetwork(mean, np.arange(len(mean)), sd**2))


def _update_server(state: PosteriorState, received: Received, *, settings: _Settings) -> tuple[PosteriorState, Report]:
    """Average means and sds; the message says where sds are still those of the start."""
    if not received.clients:
        return state, Report(_common.NetworkInfo(np.nan))
    total = received.total
    mean, sd = total["mean"] / total["weight"], total["sd"] / total["weight"]
    change, message = _common.moved(state.mean, mean)
    if np.quantile(np.abs(np.log(sd / settings.spread)), 0.9) < _NEAR:
        message += (
            f". Sds of weights are still about spread={settings.spread:g}, where they began, and say nothing of what "
            "is known: raise rounds= or learning_rate=, or take a smaller batch_size="
        )
    return PosteriorState(mean, sd), Report(_common.NetworkInfo(change), message=message)


def _reject(state: PosteriorState, reply: Message) -> str | None:
    """Why a reply is rejected: rows, sds or weights out of range; or None."""
    if reason := not_counted(reply, "weight"):
        return reason
    sd = reply["sd"] / reply["weight"]
    least, most = float(np.min(sd)), GROWTH * (1.0 + float(np.max(state.sd)))
    if not _LEAST <= least or not float(np.max(sd)) <= most:
        wrong = least if not _LEAST <= least else float(np.max(sd))
        return f"'sd' is {wrong:.3g} for one row somewhere, and must be from {_LEAST:.0e} to {most:.3g}"
    return _common.run_away("mean", reply["mean"] / reply["weight"], state.mean)
