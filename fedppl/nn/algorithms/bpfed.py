"""BPFed: posteriors of all weights, those below averaged, with the last round's posterior as the next one's prior."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from fedppl.contracts import Algorithm, ClientUpdate, ClientView
from fedppl.nn.algorithms import pfedbayes
from fedppl.nn.algorithms._common import AT_MEAN, check_network, needs
from fedppl.nn.algorithms.pfedbayes import Normal, PosteriorState, Settings, own_normal, reply_of
from fedppl.nn.personal import bayes_steps
from fedppl.nn.view import Own, network_of
from fedppl.settings import described
from fedppl.types import Array, Message


class LocalNormalClientState(NamedTuple):
    """What a client keeps to itself: q_k of its local weights."""

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
    with the number of rounds, and say how long the fit ran as well as what the rows tell. With
    few rows, and so few steps, they can be `spread` still, which the fit's message says.

    References
    ----------
    .. [1] Chen, Liu, Cao and Zhang (2023), Bayesian personalized federated learning with shared and personalized
       uncertainty representations.
    """
    settings = pfedbayes.checked(learning_rate, epochs, batch_size, zeta, draws, spread, weights)
    return Algorithm[PosteriorState, LocalNormalClientState](
        name="nn.BPFed",
        settings=described(settings),
        init=functools.partial(pfedbayes.init, spread=settings.spread),
        broadcast=pfedbayes.broadcast,
        update_client=functools.partial(_update_client, settings=settings),
        update_server=functools.partial(pfedbayes.update_server, settings=settings),
        replies=pfedbayes.REPLIES,
        result=pfedbayes.result(functools.partial(_own, settings=settings)),
        needs=needs(lambda client: check_network(client, "nn.BPFed", "shared")),
        disclosure=AT_MEAN,
        unreported=functools.partial(_update_unreported, settings=settings),
    )


def _posterior(
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


def _kept(client: ClientView, q: Normal) -> LocalNormalClientState:
    local = client.view(network_of).unit.local_at
    return LocalNormalClientState(q[0][local], q[1][local])


def _update_client(
    client: ClientView, personal: LocalNormalClientState | None, message: Message, rng: Generator, *, settings: Settings
) -> ClientUpdate[LocalNormalClientState]:
    """q_k; its shared part travels."""
    q = _posterior(client, personal, message, rng, settings)
    info = {"blank": 1.0} if personal is None and client.local_size else {}
    return ClientUpdate(_kept(client, q), reply_of(client, q, settings), info)


def _update_unreported(
    client: ClientView, personal: LocalNormalClientState | None, message: Message, rng: Generator, *, settings: Settings
) -> tuple[LocalNormalClientState, Mapping[str, float]]:
    """q_k of the local weights around this round's shared ones."""
    return _kept(client, _posterior(client, personal, message, rng, settings)), {}


def _own(
    client: ClientView, personal: LocalNormalClientState | None, message: Message, rng: Generator, *, settings: Settings
) -> Own:
    """q_k after one more round for the client alone."""
    return own_normal(client, _posterior(client, personal, message, rng, settings))
