"""What servers of networks share: a start at the declared mean, averages, and how far the weights moved."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from fedppl import gaussian
from fedppl.algorithms.averaging.server import average, not_counted, root_mean_square_change
from fedppl.contracts import Disclosure, Point, Received, Replies, Report, always
from fedppl.local.target import at_points
from fedppl.nn.open_rows import open_rows
from fedppl.nn.train import GROWTH
from fedppl.types import Array, Layout, Message


class NetworkState(NamedTuple):
    """What the next round needs."""

    phi: Array  # (m,)


class OverRounds(NamedTuple):
    """An average over rounds, which no round goes on from."""

    phi: Array  # the start's before any round, (m,)
    told: float  # sum of the weights of those rounds, below 1; the start is none of them


class NetworkInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # root mean square of the change of the shared weights


def init(layout: Layout, clients: tuple[str, ...], rng: Generator) -> NetworkState:
    """Start at the mean of the declared prior."""
    return NetworkState(gaussian.mean(layout.prior))


def broadcast(state: Any, client_id: str) -> Message:
    """The shared weights, phi in any state."""
    return {"mean": state.phi}


def with_round(average: OverRounds, phi: Array, smoothing: float) -> OverRounds:
    """Let a round count for 1 − `smoothing`, and all earlier ones for `smoothing` of what they did."""
    earlier, now = smoothing * average.told, 1.0 - smoothing
    return OverRounds((earlier * average.phi + now * phi) / (earlier + now), earlier + now)


def moved(before: Array, after: Array) -> tuple[float, str]:
    """How far the weights moved, and what to say of it."""
    change = root_mean_square_change(before, after)
    return change, (
        f"weights moved by {change:.2g} (root mean square) in the last round. No rule tells when a network is trained: "
        "score rows that were held out, and raise rounds= while that helps"
    )


def reported(before: Array, after: Array) -> Report:
    """The same as a report."""
    change, message = moved(before, after)
    return Report(NetworkInfo(change), message=message)


def update_server(state: NetworkState, received: Received) -> tuple[NetworkState, Report]:
    """φ is the weighted average of the clients' that replied."""
    if not received.clients:
        return state, Report(NetworkInfo(np.nan))
    phi = average(received.total)
    return NetworkState(phi), reported(state.phi, phi)


def run_away(name: str, weights: Array, before: Array) -> str | None:
    """Why weights are rejected that no client sends: its training would have failed, see `fedppl.nn.train`."""
    largest, least = (float(np.max(np.abs(values), initial=0.0)) for values in (weights, before))
    if largest <= GROWTH * (1.0 + least):
        return None
    return f"{name!r} has weights up to {largest:.3g}, and no training takes them there from {least:.3g}"


def reject_weighted(phi: Array, reply: Message) -> str | None:
    """Why a reply is rejected that `weighted` makes of weights which began at φ, or None."""
    return not_counted(reply, "weight") or run_away("weighted", average(reply), phi)


# What FedAvg and its variants have in common beside the functions above.
REPLIES = Replies[NetworkState](
    lambda state: {"weighted": state.phi.shape, "weight": ()},
    lambda state, reply: reject_weighted(state.phi, reply),
    always,
)
ESTIMATE = Point[NetworkState](lambda state: state.phi)
AT_MEAN = Disclosure(functools.partial(at_points, name="mean"), by_row=open_rows)
