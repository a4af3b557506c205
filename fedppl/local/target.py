"""A client's tilted distribution as a message: q, its cavity, its share of a prior that is not Gaussian."""

from __future__ import annotations

import numpy as np

from fedppl import gaussian
from fedppl.contracts import Asked, ClientView, Draws, LocalInference, Target
from fedppl.gaussian import Gaussian
from fedppl.numerics import pareto
from fedppl.numerics.importance import effective_size, normalise, resample
from fedppl.types import Layout, Message, Rng

_FEWEST = 100  # effective points


def pack_target(q: Gaussian, cavity: Gaussian, prior_share: float) -> Message:
    """Natural parameters of q and of the cavity, precisions as packed triangles."""
    return {
        "global_linear": q.linear,
        "global_precision": gaussian.pack_triangle(q.precision),
        "cavity_linear": cavity.linear,
        "cavity_precision": gaussian.pack_triangle(cavity.precision),
        "prior_share": np.array(prior_share),
    }


def unpack_target(client: ClientView, message: Message) -> Target:
    """The tilted distribution of this client that the message describes."""
    return Target(client, _gaussian(message, "global"), _gaussian(message, "cavity"), float(message["prior_share"]))


def _gaussian(message: Message, name: str) -> Gaussian:
    linear, packed = (np.asarray(message[f"{name}_{part}"], dtype=float) for part in ("linear", "precision"))
    return Gaussian(linear, gaussian.unpack_triangle(packed))


def at_target(layout: Layout, message: Message) -> Asked:
    """Where a request asks that has a target: around the mean of q, given the cavity."""
    pair = _gaussian(message, "global"), _gaussian(message, "cavity")
    return Asked(np.zeros((0, layout.size)), np.zeros((0, layout.size)), (pair,))


def at_points(layout: Layout, message: Message, name: str, *, several: bool = False) -> Asked:
    """Where a request asks that has a point under a name, (m,), or `several`, (S, m)."""
    points = np.asarray(message[name], dtype=float)
    if points.shape != (*points.shape[:several], layout.size):
        raise ValueError(f"{name!r} has shape {points.shape}")
    return Asked(np.atleast_2d(points), np.zeros((0, layout.size)))


def draw_target(
    client: ClientView, personal: object, message: Message, draws: int, chains: int, rng: Rng, *, local: LocalInference
) -> Draws:
    """Draws of (φ, θ_k) from the tilted distribution that the message describes (FedLin, eq. 8)."""
    target = unpack_target(client, message)
    if "points" not in message or local.draw_given is None or local.factor is None:
        return local.draw(target, draws, chains, rng)
    points, weights = (np.asarray(message[name], dtype=float) for name in ("points", "weights"))
    center, told = gaussian.mean(target.global_), {}
    if float(message["joins"]):  # its data are in no weight yet
        found = local.factor(client, points, center, 0.0)
        log_weights = np.where(np.isfinite(found.values), np.log(weights) + found.values, -np.inf)
        told = {"pareto_k": pareto.pareto_k(log_weights)}
        weights = normalise(log_weights) if np.any(np.isfinite(log_weights)) else np.zeros(0)
        if not len(weights) or effective_size(weights) < _FEWEST:  # the points do not reach where its data are
            from_q = local.draw(target, draws, chains, rng)
            return from_q._replace(diagnostics={**from_q.diagnostics, "from_q": 1.0})
    phi = points[resample(weights, draws * chains, rng)]
    theta = local.draw_given(client, phi, center, rng)
    told |= {"ess": effective_size(weights), "unique": float(len(np.unique(phi, axis=0)))}
    return Draws(phi.reshape(chains, draws, -1), theta.reshape(chains, draws, -1), told)
