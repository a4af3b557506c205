"""What algorithms share that average posteriors of independent normal weights: means and sds, each by itself."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.random import Generator

from fedppl import gaussian
from fedppl.algorithms.averaging.point import weight_of, weights_rule
from fedppl.algorithms.averaging.server import not_counted
from fedppl.contracts import ClientView, Details, Point, Received, Replies, Report, Result, always
from fedppl.nn.algorithms._common import training_rule
from fedppl.nn.algorithms._personalise import network_result
from fedppl.nn.algorithms._server import NetworkInfo, moved, run_away
from fedppl.nn.subnet import Subnetwork
from fedppl.nn.train import GROWTH, Training
from fedppl.nn.view import Own, PersonaliseFn, network_of
from fedppl.settings import between, positive, whole
from fedppl.types import Array, Layout, Message

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
