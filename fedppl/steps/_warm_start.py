"""Federated Newton: the server maximises the sum of the clients' quadratic expansions inside a trust region.

The expansions are sites already: r_k = g_k − H_k x, Q_k = −H_k. At the mode of the marginal posterior they give
its Laplace approximation, with θ marginalised, and EP goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.gaussian import Gaussian
from fedppl.steps import _trust
from fedppl.steps._sites import Sites, dense, in_structure, indices, update
from fedppl.types import Array, Layout, Message

__all__ = ["WarmStart", "start", "step"]

# In posterior sds: EP's importance weights are good from here, and the rest of the way is inside its first step.
_ARRIVED = 0.3


class WarmStart(NamedTuple):
    """Where the search is."""

    point: Array  # (m,) where clients expand next
    anchor: Array  # (m,) where the sites were expanded
    values: Array  # (K,) constants of the expansions
    heard: Array  # (K,) bool: has sent an expansion
    objective: float  # log marginal posterior at the anchor, −inf if not all clients were expanded there
    radius: float  # of the trust region, in prior sds along a principal axis
    change: float  # of the last step, in posterior sds
    arrived: bool


def start(layout: Layout, clients: int) -> WarmStart:
    """Begin at the prior mean."""
    mean = gaussian.mean(layout.prior)
    return WarmStart(mean, mean, np.zeros(clients), np.zeros(clients, dtype=bool), -np.inf, 1.5, np.inf, False)


def step(
    sites: Sites, state: WarmStart, replies: Mapping[str, Message], trust: float | None = None
) -> tuple[Sites, WarmStart, _trust.Bounded | None]:
    """Take in the expansions at the point and choose the next point.

    A point that lowered the log marginal posterior is given up: the old expansions stay and the search goes back
    to a quarter of the way. With `trust`, sites change as far as `_trust` allows, which keeps q proper throughout, and
    the clients' values, which no bound holds for, decide nothing.
    """
    rows, x = indices(sites, replies), state.point
    value = np.array([float(reply["value"]) for reply in replies.values()])
    gradient = np.stack([reply["gradient"] for reply in replies.values()])
    hessian = gaussian.unpack_triangle(np.stack([reply["hessian"] for reply in replies.values()]))
    packed = in_structure(-hessian, sites.structure)
    matrices = dense(packed, sites.structure)
    linear, precision, values, heard = (a.copy() for a in (sites.linear, sites.precision, state.values, state.heard))
    precision[rows] = packed
    linear[rows] = gradient + matrices @ x
    values[rows] = value - linear[rows] @ x + 0.5 * np.einsum("i,kij,j->k", x, matrices, x)
    heard[rows] = True
    bounded = None
    if trust is not None:
        d_linear, d_packed = linear[rows] - sites.linear[rows], packed - sites.precision[rows]
        bounded = _trust.bound(sites.q, Gaussian(d_linear, dense(d_packed, sites.structure)), trust)
        held, part = bounded.held[:, None], bounded.scales[:, None]
        linear[rows] = np.where(held, sites.linear[rows] + part * d_linear, linear[rows])
        precision[rows] = np.where(held, sites.precision[rows] + part * d_packed, packed)
    tried = update(sites, linear, precision)
    # Only when every client was expanded at this very point is the sum the objective there, and comparable.
    everyone = trust is None and len(replies) == len(values)
    objective = float(values.sum() + gaussian.log_kernel(tried.q, x)) if everyone else -np.inf
    if everyone and objective < state.objective - 1e-9 * max(1.0, abs(objective)):
        point = state.anchor + (x - state.anchor) / 4
        return sites, state._replace(point=point, radius=state.radius / 4, change=np.inf), None
    # Sites that were kept small keep the step small: that is no sign of being there.
    free = bounded is None or not np.any(bounded.held)
    move, clipped = _trusted_step(tried.q, sites.prior, x, state.radius)
    proper = bool(gaussian.is_proper(tried.q))
    change = float(np.max(np.abs(move) / gaussian.standard_deviations(tried.q))) if proper else np.inf
    moved = WarmStart(
        point=x + move,
        anchor=x,
        values=values,
        heard=heard,
        objective=objective,
        radius=min(state.radius * 2, 6.0) if clipped and everyone else state.radius,
        change=change,
        arrived=free and not clipped and change < _ARRIVED and bool(np.all(heard)),
    )
    return tried, moved, bounded


def _trusted_step(q: Gaussian, prior: Gaussian, x: Array, radius: float) -> tuple[Array, bool]:
    """Newton step on |eigenvalues| in prior units, no axis longer than `radius` sds, and whether it was cut."""
    inverse = np.linalg.inv(np.linalg.cholesky(prior.precision))
    values, vectors = np.linalg.eigh(inverse @ q.precision @ inverse.T)
    gradient = inverse @ (q.linear - q.precision @ x)
    move = (vectors.T @ gradient) / np.maximum(np.abs(values), 1.0)
    clipped = np.clip(move, -radius, radius)
    return inverse.T @ (vectors @ clipped), bool(np.any(clipped != move)) or bool(values[0] <= 0)
