"""A client's tilted distribution as a message: q, its cavity, its share of a prior that is not Gaussian."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedppl import gaussian
from fedppl.contracts import Asked, Draws, LocalInference, Target
from fedppl.gaussian import Gaussian
from fedppl.types import Layout, Message

__all__ = ["at_points", "at_target", "draw_target", "pack_target", "unpack_target"]


def pack_target(q: Gaussian, cavity: Gaussian, prior_share: float) -> Message:
    """Natural parameters of q and of the cavity, precisions as packed triangles."""
    return {
        "global_linear": q.linear,
        "global_precision": gaussian.pack_triangle(q.precision),
        "cavity_linear": cavity.linear,
        "cavity_precision": gaussian.pack_triangle(cavity.precision),
        "prior_share": np.array(prior_share),
    }


def unpack_target(client: Any, message: Message) -> Target:
    """The tilted distribution of this client that the message describes."""
    q, cavity = (
        Gaussian(
            np.asarray(message[f"{name}_linear"], dtype=float),
            gaussian.unpack_triangle(np.asarray(message[f"{name}_precision"], dtype=float)),
        )
        for name in ("global", "cavity")
    )
    return Target(client, q, cavity, float(message["prior_share"]))


def at_target(layout: Layout, message: Message) -> Asked:
    """Where a request asks that has a target: around the mean of q, given the cavity."""
    q, cavity = unpack_target(None, message)[1:3]
    return Asked(np.zeros((0, layout.size)), np.zeros((0, layout.size)), ((q, cavity),))


def at_points(layout: Layout, message: Message, name: str, *, several: bool = False) -> Asked:
    """Where a request asks that has a point under a name, (m,), or `several`, (S, m)."""
    points = np.asarray(message[name], dtype=float)
    if points.shape != (*points.shape[:several], layout.size):
        raise ValueError(f"{name!r} has shape {points.shape}")
    return Asked(np.atleast_2d(points), np.zeros((0, layout.size)))


def draw_target(
    client: Any,
    personal: Any,
    message: Message,
    draws: int,
    chains: int,
    rng: np.random.Generator,
    *,
    local: LocalInference,
) -> Draws:
    """Draws of (φ, θ_k) from the tilted distribution that the message describes (FedLin, eq. 8)."""
    del personal
    return local.draw(unpack_target(client, message), draws, chains, rng)
