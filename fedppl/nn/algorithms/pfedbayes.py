"""pFedBayes: every client's posterior of all weights, held near a global one that is averaged."""

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
    moved,
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

    Notes
    -----
    *When this fails.* A `spread` much above what the weights themselves are drowns the network in noise, and nothing
    is learned. Few rows are few steps of Adam: after 25 rounds of 15 to 60 rows sds can be `spread` still, and the
    network a guess. The fit's message says so.

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
        update_client=functools.partial(_update_client, settings=settings),
        update_server=functools.partial(update_server, settings=settings),
        replies=REPLIES,
        result=result(functools.partial(_own, settings=settings)),
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


# What algorithms share that average posteriors of independent normal weights: means and sds, each by itself -----------

P = TypeVar("P")
_NEAR = 0.2  # of log sds: if nine in ten differ by less from the start, they are no posterior
_LEAST = 1e-18  # sd of a weight: the square of a smaller one is 0 in single precision, or near it
Normal = tuple[Array, Array]  # means and sds of independent weights


class PosteriorState(NamedTuple):
    """What the next round needs."""

    mean: Array  # (m,)
    sd: Array  # (m,)


class Settings(NamedTuple):
    """How a client finds its posterior."""

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
    """The declared weights, hardly uncertain."""
    mean = gaussian.mean(layout.prior)
    return PosteriorState(mean, np.full(len(mean), spread))


def broadcast(state: PosteriorState, client_id: str) -> Message:
    """The shared posterior."""
    return {"mean": state.mean, "sd": state.sd}


def reply_of(client: ClientView, found: Normal, settings: Settings) -> Message:
    """Terms of the weighted means, from what was found of all weights."""
    weight, shared = weight_of(client, settings.weights), client.view(network_of).unit.shared_at
    return {"mean": weight * found[0][shared], "sd": weight * found[1][shared], "weight": np.array(weight)}


def own_normal(client: ClientView, q: Normal) -> Own:
    """A client's own network with this posterior of all weights."""
    mean, sd = q
    return Own(client, mean, Subnetwork(mean, np.arange(len(mean)), sd**2))


def update_server(state: PosteriorState, received: Received, *, settings: Settings) -> tuple[PosteriorState, Report]:
    """Average means and sds; say where these are still those of the start."""
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
    """Rows are counted, sds are such as single precision can square, and training has not run away."""
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
