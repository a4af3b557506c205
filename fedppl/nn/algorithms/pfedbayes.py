"""pFedBayes: every client's posterior of all weights, held near a global one that is averaged."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from numpy.random import Generator

from fedppl.contracts import Algorithm, ClientUpdate, ClientView
from fedppl.nn.algorithms import _posteriors
from fedppl.nn.algorithms._common import whole_network
from fedppl.nn.algorithms._posteriors import Normal, PosteriorState, Settings, own_normal, reply_of
from fedppl.nn.algorithms._server import AT_MEAN
from fedppl.nn.personal import bayes_steps
from fedppl.nn.view import Own, network_of
from fedppl.settings import described
from fedppl.types import Array, Message


class NormalClientState(NamedTuple):
    """What a client keeps to itself: q_k."""

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

    Raises
    ------
    DeclarationError
        For settings out of range, and where some weights are not shared.

    Examples
    --------
    >>> from fedppl import nn
    >>> nn.PFedBayes().name
    'nn.PFedBayes'

    Notes
    -----
    *When this fails.* A `spread` much above what the weights themselves are drowns the network in noise, and nothing
    is learned. Few rows are few steps of Adam: after 25 rounds of 15 to 60 rows sds can be `spread` still, and the
    network a guess. The fit's message says so.

    References
    ----------
    .. [1] Zhang et al. (2022), Personalized federated learning via variational Bayesian inference, Algorithm 1.
    """
    settings = _posteriors.checked(learning_rate, epochs, batch_size, zeta, draws, spread, weights)
    return Algorithm[PosteriorState, NormalClientState](
        name="nn.PFedBayes",
        settings=described(settings),
        init=functools.partial(_posteriors.init, spread=settings.spread),
        broadcast=_posteriors.broadcast,
        update_client=functools.partial(_update_client, settings=settings),
        update_server=functools.partial(_posteriors.update_server, settings=settings),
        replies=_posteriors.REPLIES,
        result=_posteriors.result(functools.partial(_own, settings=settings)),
        needs=whole_network("nn.PFedBayes"),
        disclosure=AT_MEAN,
        unreported=functools.partial(_update_unreported, settings=settings),
    )


def _steps(
    client: ClientView, personal: NormalClientState | None, message: Message, rng: Generator, settings: Settings
) -> tuple[Normal, Normal]:
    """q_k and p_k, in torch's order."""
    network = client.view(network_of)
    mean, sd = network.at(message["mean"]), network.at(message["sd"])
    start = personal if personal is not None and len(personal.mean) == len(mean) else None
    return bayes_steps(network.unit, mean, sd, settings.training, settings.zeta, settings.draws, rng, start=start)


def _update_client(
    client: ClientView, personal: NormalClientState | None, message: Message, rng: Generator, *, settings: Settings
) -> ClientUpdate[NormalClientState]:
    """Steps of q_k and of p_k; p_k travels."""
    q, p = _steps(client, personal, message, rng, settings)
    info = {"blank": 1.0} if personal is None else {}
    return ClientUpdate(NormalClientState(*q), reply_of(client, p, settings), info)


def _update_unreported(
    client: ClientView, personal: NormalClientState | None, message: Message, rng: Generator, *, settings: Settings
) -> tuple[NormalClientState, Mapping[str, float]]:
    """q_k around the p of this round."""
    return NormalClientState(*_steps(client, personal, message, rng, settings)[0]), {}


def _own(
    client: ClientView, personal: NormalClientState | None, message: Message, rng: Generator, *, settings: Settings
) -> Own:
    """q_k after one more round for the client alone."""
    return own_normal(client, _steps(client, personal, message, rng, settings)[0])
