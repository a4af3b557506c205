"""What algorithms share that average posteriors of independent normal weights: means and sds, each by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.run.replies import sum_replies
from fedppl.types import Array, Layout, Message, Status

__all__ = ["PosteriorInfo", "PosteriorState", "average", "broadcast", "init_server", "refuse", "reply", "reply_shapes"]


class PosteriorState(NamedTuple):
    """What the next round needs."""

    mean: Array  # (m,)
    sd: Array  # (m,)
    status: str
    message: str


class PosteriorInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # root mean square of the means' change


def init_server(layout: Layout, clients: tuple[str, ...], rng: np.random.Generator, *, spread: float) -> PosteriorState:
    """The declared weights, hardly uncertain."""
    del clients, rng
    mean = gaussian.mean(layout.prior)
    return PosteriorState(mean, np.full(len(mean), spread), Status.RUNNING.value, "raise rounds=")


def broadcast(state: PosteriorState, client_id: str) -> Message:
    """The shared posterior."""
    del client_id
    return {"mean": state.mean, "sd": state.sd}


def reply(mean: Array, sd: Array, weight: float) -> Message:
    """Terms of the weighted means."""
    return {"mean": weight * mean, "sd": weight * sd, "weight": np.array(weight)}


def reply_shapes(state: PosteriorState) -> dict[str, tuple[int, ...]]:
    """Of `reply`."""
    return {"mean": state.mean.shape, "sd": state.sd.shape, "weight": ()}


def refuse(state: PosteriorState, reply: Message) -> str | None:
    """Weights and sds are positive."""
    del state
    if not float(reply["weight"]) > 0:
        return f"'weight' is {float(reply['weight']):.3g}, and must be positive"
    least = float(np.min(reply["sd"]))
    return None if least > 0 else f"'sd' is {least:.3g} somewhere, and must be positive"


def average(state: PosteriorState, replies: Mapping[str, Message]) -> tuple[PosteriorState, PosteriorInfo]:
    """Average means and sds."""
    if not replies:
        return state, PosteriorInfo(np.nan)
    total = sum_replies(replies)
    mean, sd = total["mean"] / total["weight"], total["sd"] / total["weight"]
    change = float(np.sqrt(np.mean((mean - state.mean) ** 2)))
    message = f"weights moved by {change:.2g} (root mean square) in the last round; raise rounds="
    return state._replace(mean=mean, sd=sd, message=message), PosteriorInfo(change)
