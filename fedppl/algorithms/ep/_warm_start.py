"""Federated Newton: the server maximises the sum of the clients' quadratic expansions, and looks along each step.

The expansions are sites already: r_k = g_k − H_k x, Q_k = −H_k. At the mode of the marginal posterior they give
its Laplace approximation, with θ marginalised, and EP goes on from there. With each expansion clients send log f_k
at `LENGTHS` times the step that led to the point: sums of these say, within the round, whether the step was too long
or too short, so that a start many prior sds away takes a handful of rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.algorithms.ep import _trust
from fedppl.algorithms.ep._diagnosis import explain
from fedppl.algorithms.ep._sites import NO_VALUE, Sites, absurd_expansion, dense, in_structure, indices, update
from fedppl.contracts import Expansion, LocalInference
from fedppl.gaussian import Gaussian
from fedppl.types import Array, Layout, LocalFailure, Message

__all__ = ["LENGTHS", "WarmStart", "along", "expand_along", "newton_step", "start", "step", "why_not_arrived"]

_ALONE = 100.0  # times the others' slope
LENGTHS = 2.0 ** np.arange(-10, 6)
# In posterior sds: EP's importance weights are good from here, and the rest of the way is inside its first step.
_ARRIVED = 0.3
# Steps begin with at most this many prior sds, and grow where they prove right. A hierarchy among shared variables
# has a density without bound where its scale is 0: long steps find that in place of the mode beside it.
_RADIUS, _WIDEST = 1.5, 100.0


class WarmStart(NamedTuple):
    """Where the search is."""

    point: Array  # (m,) where clients expand next
    move: Array  # (m,) the step from the anchor to the point, zero in the first round
    anchor: Array  # (m,) where the sites were expanded
    heard: Array  # (K,) bool: has sent an expansion
    objective: float  # log marginal posterior at the anchor, −inf if not all clients were expanded there
    change: float  # of the last step, in posterior sds
    radius: float  # longest step that is believed, in prior sds of a coordinate
    whole: bool  # the step is Newton's own, with nothing left out: longer ones along it are looked at
    spent: float  # expansions a client, the budget's unit
    pending: Mapping[str, Message]  # replies from the point so far: it is left when every client has answered there
    unusable: Mapping[str, str]  # clients whose last expansion could not be used, and why; "" where they found none
    reasons: Mapping[str, str]  # the last for which an expansion could not be used, at any point, by client
    chosen: bool  # the point was the best along a step, and is not chosen anew
    arrived: bool


def start(layout: Layout, clients: int) -> WarmStart:
    """Begin at the prior mean."""
    mean = gaussian.mean(layout.prior)
    heard = np.zeros(clients, dtype=bool)
    return WarmStart(
        mean, np.zeros_like(mean), mean, heard, -np.inf, np.inf, _RADIUS, False, 0.0, {}, {}, {}, False, False
    )


def along(point: Array, move: Array) -> Array:
    """Points (T, m) at `LENGTHS` times the step that led to the point."""
    return np.asarray(point + (LENGTHS - 1.0)[:, None] * move)


def expand_along(
    client: Any, local: LocalInference, point: Array, move: Array, prior_share: float, inside: Any = None
) -> tuple[dict[str, Array], dict[str, float | str]]:
    """A client's reply: log f_k with its derivatives at the point, and alone along the step that led there.

    Where `inside`, (1 + T,) bool, is False, its site's policy keeps the client from computing: it says nothing there.
    """
    assert local.expand is not None and local.log_factor is not None
    m = len(point)
    ray = np.zeros(len(LENGTHS))
    kept = np.ones(1 + len(ray), dtype=bool) if inside is None else np.asarray(inside, dtype=bool)
    if np.any(move):
        values = np.full(len(ray), NO_VALUE)
        if np.any(kept[1:]):
            values[kept[1:]] = local.log_factor(client, along(point, move)[kept[1:]], prior_share)
        ray = np.where(np.isfinite(values), values, NO_VALUE)
    nothing, why = Expansion(NO_VALUE, np.zeros(m), np.zeros((m, m)), {}), {}
    try:
        expansion = local.expand(client, point, prior_share) if kept[0] else nothing
    except LocalFailure as failure:
        if not np.any(move):  # nowhere to go back to
            raise
        expansion, why = nothing, {"reason": str(failure)}
    numbers = np.concatenate([[expansion.value], expansion.gradient, np.ravel(expansion.hessian)])
    if np.any(move) and not np.all(np.isfinite(numbers)):
        expansion = nothing
    reply = {
        "value": np.array(expansion.value),
        "gradient": expansion.gradient,
        "hessian": gaussian.pack_triangle(expansion.hessian),
        "ray": ray,
    }
    return reply, {**expansion.diagnostics, **why}


def step(
    sites: Sites, state: WarmStart, replies: Mapping[str, Message], trust: float | None = None
) -> tuple[Sites, WarmStart, _trust.Bounded | None]:
    """Take in the expansions at the point and, when there is one of every client, choose the next point.

    The sums of log f_k decide: a point that lowered the log marginal posterior, or that another length of the step
    would have bettered by much, is given up for the best length. With `trust`, sites are drawn in as `_trust` demands,
    every round moves the point, and the clients' values, which no bound holds for, decide nothing.
    """
    if trust is not None:
        return _bounded_step(sites, state, replies, trust)
    new = sum(client_id not in state.pending for client_id in replies)
    heard = state.heard.copy()
    heard[indices(sites, replies)] = True
    pending = {**state.pending, **replies}
    # Answers from a point where a client has answered already cost it as much, and bring nothing.
    spent = state.spent + (new + 0.5 * (len(replies) - new)) / len(heard)
    state = state._replace(pending=pending, heard=heard, spent=spent)
    if len(pending) < len(heard):
        unusable = _unusable(sites, replies)
        came = {name: reply for name, reply in replies.items() if name not in unusable}
        return _replaced(sites, came, state.point) if came else sites, state, None
    everyone = {client_id: pending[client_id] for client_id in sites.where}
    state, x = state._replace(pending={}), state.point
    unusable = _unusable(sites, everyone)
    state = state._replace(unusable=unusable, reasons={**state.reasons, **unusable})
    objective = -np.inf
    if not unusable:
        values = np.array([float(reply["value"]) for reply in everyone.values()])
        objective = float(values.sum() + gaussian.log_kernel(sites.prior, x))
    better = _better_length(sites.prior, state, everyone, objective)
    if better == LENGTHS[0] and state.chosen:
        # A thousandth of a step that was a thousandth itself, and still below the anchor: what was said there is not
        # what clients say now, as where a reply was wrong. They are asked there again.
        at, still = state.anchor, np.zeros_like(x)
        return sites, state._replace(point=at, move=still, objective=-np.inf, radius=_RADIUS, chosen=False), None
    if better is not None:
        move, radius = better * state.move, state.radius * min(better, 1.0)
        point = state.anchor + move
        return sites, state._replace(point=point, move=move, change=np.inf, radius=radius, chosen=True), None
    tried = _replaced(sites, everyone, x)
    move, whole, cut = newton_step(tried.q, sites.prior, x, state.radius)
    arrived, change = _arrival(tried.q, move, whole and not cut, heard)
    grown = min(2 * state.radius, _WIDEST if whole else max(_RADIUS, state.radius)) if cut else state.radius
    moved = state._replace(
        point=x + move,
        move=move,
        anchor=x,
        objective=objective,
        change=change,
        radius=grown,
        whole=whole,
        chosen=False,
        arrived=arrived,
    )
    return tried, moved, None


def _unusable(sites: Sites, replies: Mapping[str, Message]) -> dict[str, str]:
    """Clients whose expansion cannot be used, and why."""
    reasons = {name: absurd_expansion(sites, reply) for name, reply in replies.items()}
    return {
        name: "" if float(replies[name]["value"]) == NO_VALUE else reason
        for name, reason in reasons.items()
        if reason is not None
    }


def _bounded_step(
    sites: Sites, state: WarmStart, replies: Mapping[str, Message], trust: float
) -> tuple[Sites, WarmStart, _trust.Bounded | None]:
    """Take in what came, draw sites in as far as `trust` demands, and step on from there."""
    unusable = _unusable(sites, replies)
    kept = {name: reply for name, reply in replies.items() if name not in unusable}
    state = state._replace(spent=state.spent + len(replies) / len(state.heard), unusable=unusable)
    state = state._replace(reasons={**state.reasons, **unusable})
    if not kept:
        return sites, state, None
    x, heard = state.point, state.heard.copy()
    heard[indices(sites, kept)] = True
    bounded = _trust.bound(_replaced(sites, kept, x), trust)
    tried = bounded.sites
    move, cut = _trusted_step(tried.q, sites.prior, x)
    arrived, change = _arrival(tried.q, move, not cut, heard)
    moved = state._replace(point=x + move, move=move, anchor=x, heard=heard, change=change, arrived=arrived)
    return tried, moved, bounded


def _natural(sites: Sites, replies: Mapping[str, Message], x: Array) -> tuple[Array, Array]:
    """Natural parameters of the expansions at x: r_k = g_k + Q_k x, (R, m), and Q_k = −H_k packed, (R, p)."""
    gradient = np.stack([reply["gradient"] for reply in replies.values()])
    hessian = gaussian.unpack_triangle(np.stack([reply["hessian"] for reply in replies.values()]))
    packed = in_structure(-hessian, sites.structure)
    return gradient + dense(packed, sites.structure) @ x, packed


def _replaced(sites: Sites, replies: Mapping[str, Message], x: Array) -> Sites:
    """The ledger with these clients' expansions at x in the place of their sites."""
    rows = indices(sites, replies)
    linear, precision = sites.linear.copy(), sites.precision.copy()
    linear[rows], precision[rows] = _natural(sites, replies, x)
    return update(sites, linear, precision)


def _arrival(q: Gaussian, move: Array, there: bool, heard: Array) -> tuple[bool, float]:
    """Whether a step that nothing cut is short against q and all were heard; its length in posterior sds."""
    if not gaussian.is_proper(q):
        return False, np.inf
    change = float(np.max(np.abs(move) / gaussian.standard_deviations(q)))
    return there and change < _ARRIVED and bool(np.all(heard)), change


def _trusted_step(q: Gaussian, prior: Gaussian, x: Array) -> tuple[Array, bool]:
    """Newton step on |eigenvalues| in prior units, no axis longer than `_RADIUS` sds, and whether it was cut.

    For steps that no objective watches: it climbs whatever the curvature.
    """
    inverse = np.linalg.inv(np.linalg.cholesky(prior.precision))
    values, vectors = np.linalg.eigh(inverse @ q.precision @ inverse.T)
    gradient = inverse @ (q.linear - q.precision @ x)
    move = (vectors.T @ gradient) / np.maximum(np.abs(values), 1.0)
    clipped = np.clip(move, -_RADIUS, _RADIUS)
    return inverse.T @ (vectors @ clipped), bool(np.any(clipped != move)) or bool(values[0] <= 0)


def _better_length(prior: Gaussian, state: WarmStart, replies: Mapping[str, Message], objective: float) -> float | None:
    """The length of the last step, in units of it, that should have been taken; None where it was right."""
    if not np.any(state.move) or not np.isfinite(state.objective):
        return None
    values = np.sum([np.maximum(reply["ray"], NO_VALUE) for reply in replies.values()], axis=0)
    values = values + gaussian.log_kernel(prior, along(state.point, state.move))
    reach = (
        1.0
        if not state.whole
        else state.radius / max(float(np.max(np.abs(state.move) / gaussian.standard_deviations(prior))), 1e-300)
    )
    values[LENGTHS > max(reach, 1.0)] = -np.inf
    if not np.isfinite(objective):  # whatever the values say, there is no expanding at the point
        values[LENGTHS >= 1.0] = -np.inf
    best, taken = int(np.argmax(values)), int(np.flatnonzero(LENGTHS == 1.0)[0])
    slack = 1e-9 * max(1.0, abs(state.objective))
    gain = objective - state.objective
    # Values along the step are compared with each other: what their approximations have in common cancels.
    little = state.chosen or values[best] - values[taken] <= 0.5 * max(gain, 0.0) + 1.0
    if np.isfinite(objective) and gain >= -slack and little:
        return None
    # Where no length gains, the step is right only much nearer to where it began.
    values[taken] = -np.inf  # nor is it looked for where it was found wanting
    best = int(np.argmax(values))
    return float(LENGTHS[best] if values[best] >= state.objective - slack else LENGTHS[0])


def newton_step(q: Gaussian, prior: Gaussian, x: Array, radius: float) -> tuple[Array, bool, bool]:
    """Newton step from x towards the mode of q; whether q's precision served as it is; whether the step was cut.

    Where the precision is not positive definite, couplings are left out until it is: those of one coordinate, the one
    that leaves the largest gain. A scale that is far off couples with every mean it scales; by itself each knows its
    way. Along no principal axis of the precision is the step longer than `radius` prior sds.
    """
    gradient = q.linear - q.precision @ x
    scale = np.sqrt(np.maximum(np.abs(np.diag(q.precision)), np.diag(prior.precision)))
    white, slope = q.precision / np.outer(scale, scale), gradient / scale
    whole = _smallest(white) > _SINGULAR
    if whole:
        move = np.linalg.solve(white, slope)
    else:
        options = [_decoupled(white, slope, first) for first in _suspects(white)]
        _, _, move, white = min(options, key=lambda option: option[:2])
    root = np.linalg.inv(np.linalg.cholesky(prior.precision))
    _, axes = np.linalg.eigh(root @ (white * np.outer(scale, scale)) @ root.T)
    axes = axes.T @ np.linalg.inv(root.T)  # rows: principal axes of the precision, in prior sds
    along = axes @ (move / scale)
    kept = np.clip(along, -radius, radius)
    return np.linalg.solve(axes, kept), whole, bool(np.any(kept != along))


_SINGULAR = 1e-13


def _smallest(matrix: Array) -> float:
    values = np.linalg.eigvalsh(matrix)
    return float(values[0] / max(values[-1], 1e-300))


def _suspects(white: Array, most: int = 20) -> list[int]:
    """Coordinates that the direction of most negative curvature lies in."""
    _, vectors = np.linalg.eigh(white)
    return [int(j) for j in np.argsort(-np.abs(vectors[:, 0]), kind="stable")[:most]]


def _decoupled(white: Array, slope: Array, first: int) -> tuple[int, float, Array, Array]:
    """Leave out one coordinate's couplings, then others' while need be: (how many, −gain, step, matrix)."""
    matrix, left = white.copy(), [first]
    while True:
        j = left[-1]
        own = max(abs(float(white[j, j])), 1e-3)
        matrix[j], matrix[:, j] = 0.0, 0.0
        matrix[j, j] = own
        if _smallest(matrix) > _SINGULAR:
            break
        _, vectors = np.linalg.eigh(matrix)
        share = np.abs(vectors[:, 0])
        share[left] = 0.0
        if not np.any(share > 0):
            break
        left.append(int(np.argmax(share)))
    move = np.asarray(np.linalg.solve(matrix, slope), dtype=np.float64)
    return len(left), -float(move @ slope), move, matrix


def pulls_alone(sites: Sites, x: Array) -> str:
    """Name the client whose slope at x is far beyond the others', where q is no posterior to measure pulls in."""
    if len(sites.where) < 3:
        return ""
    slopes = np.abs(sites.linear - dense(sites.precision, sites.structure) @ x)
    slopes = slopes * gaussian.standard_deviations(sites.prior)
    k, i = np.unravel_index(int(np.argmax(slopes)), slopes.shape)
    others = max(float(np.median(np.delete(slopes.max(axis=1), k))), 1.0)
    if slopes[k, i] <= _ALONE * others:
        return ""
    return (
        f"client {list(sites.where)[k]} pulls {sites.labels[i]} alone: {slopes[k, i] / others:.2g} times as hard as "
        "the median of the others at the last point; look at its data"
    )


def why_not_arrived(sites: Sites, state: WarmStart) -> str:
    """Say that the search has not arrived, where it stands, and what helps."""
    silent = [client_id for client_id, k in sites.where.items() if not state.heard[k]]
    if silent:
        return f"the warm start needs every client once, and clients {silent[:5]} have not answered"
    absent = [client_id for client_id in sites.where if state.pending and client_id not in state.pending]
    cause = (
        f"it waits for an expansion of every client at its point, and clients {absent[:5]} have sent none yet"
        if absent
        else explain(sites, state.anchor, dict(state.unusable), dict(state.reasons))
    )
    return f"the warm start has not reached the mode of the marginal posterior: {cause}"
