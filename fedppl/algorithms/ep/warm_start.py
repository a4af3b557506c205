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
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.algorithms.ep import _trust
from fedppl.algorithms.ep.sites import NO_VALUE, Sites, dense, implausible_expansion, in_structure, indices, update
from fedppl.contracts import Asked, ClientView, Expansion, LocalInference
from fedppl.gaussian import Gaussian
from fedppl.types import Array, Layout, LocalFailure, Message

LENGTHS = 2.0 ** np.arange(-10, 6)
# In posterior sds: EP's importance weights are good from here, and the rest of the way is inside its first step.
_ARRIVED = 0.3
# What is left of the way to a search's first point, where clients have no expansion there.
_NEARER = 0.25
# Steps begin with at most this many prior sds, and grow where they prove right. A hierarchy among shared variables
# has a density without bound where its scale is 0: long steps find that in place of the mode beside it.
_RADIUS, _WIDEST = 1.5, 100.0


class WarmStart(NamedTuple):
    """Where the search is."""

    point: Array  # (m,) where clients expand next
    move: Array  # (m,) the step from the anchor to the point, zero in the first round
    anchor: Array  # (m,) where the sites were expanded
    has_replied: Array  # (K,) bool: with an expansion
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
    return start_at(mean, mean, clients)


def start_at(point: Array, middle: Array, clients: int) -> WarmStart:
    """Begin at a point; where clients have no expansion there, nearer to the middle."""
    replied, move = np.zeros(clients, dtype=bool), point - middle
    return WarmStart(point, move, middle, replied, -np.inf, np.inf, _RADIUS, False, 0.0, {}, {}, {}, False, False)


def along(point: Array, move: Array) -> Array:
    """Points (T, m) at `LENGTHS` times the step that led to the point."""
    return np.asarray(point + (LENGTHS - 1.0)[:, None] * move)


def asks(layout: Layout, message: Message) -> Asked:
    """The point, which a client can leave out where a step led to it, and those along that step."""
    point, move = (np.asarray(message[name], dtype=float) for name in ("point", "move"))
    if not np.any(move):
        return Asked(point[None], np.zeros((0, layout.size)))
    return Asked(np.zeros((0, layout.size)), np.vstack([point, along(point, move)]))


def expand_along(
    client: ClientView,
    local: LocalInference,
    point: Array,
    move: Array,
    share: float,
    inside: NDArray[Any] | None = None,
) -> tuple[dict[str, Array], dict[str, float | str]]:
    """A client's reply: log f_k with its derivatives at the point, and alone along the step that led there.

    `share` is its share of a prior that is not Gaussian. Where `inside`, (1 + T,) bool, is False, its site's policy
    keeps the client from computing: it says nothing there.
    """
    assert local.expand is not None and local.log_factor is not None
    m = len(point)
    ray = np.zeros(len(LENGTHS))
    kept = np.ones(1 + len(ray), dtype=bool) if inside is None else np.asarray(inside, dtype=bool)
    if np.any(move):
        values = np.full(len(ray), NO_VALUE)
        if np.any(kept[1:]):
            values[kept[1:]] = local.log_factor(client, along(point, move)[kept[1:]], share)
        ray = np.where(np.isfinite(values), values, NO_VALUE)
    nothing, why = Expansion(NO_VALUE, np.zeros(m), np.zeros((m, m)), {}), {}
    try:
        expansion = local.expand(client, point, share) if kept[0] else nothing
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
    has_replied = state.has_replied.copy()
    has_replied[indices(sites, replies)] = True
    pending = {**state.pending, **replies}
    # Answers from a point where a client has answered already cost it as much, and bring nothing.
    spent = state.spent + (new + 0.5 * (len(replies) - new)) / len(has_replied)
    state = state._replace(pending=pending, has_replied=has_replied, spent=spent)
    if len(pending) < len(has_replied):
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
    if unusable and np.any(state.move) and not np.isfinite(state.objective):  # there is no anchor yet to go back to
        move = _NEARER * state.move
        return sites, state._replace(point=state.anchor + move, move=move), None
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
    arrived, change = _arrival(tried.q, move, whole and not cut, has_replied)
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
    reasons = {name: implausible_expansion(sites, reply) for name, reply in replies.items()}
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
    state = state._replace(spent=state.spent + len(replies) / len(state.has_replied), unusable=unusable)
    state = state._replace(reasons={**state.reasons, **unusable})
    if not kept:
        return sites, state, None
    x, has_replied = state.point, state.has_replied.copy()
    has_replied[indices(sites, kept)] = True
    bounded = _trust.bound(_replaced(sites, kept, x), trust)
    tried = bounded.sites
    move, cut = _move_within(tried.q, sites.prior, x, _RADIUS)
    arrived, change = _arrival(tried.q, move, not cut, has_replied)
    moved = state._replace(point=x + move, move=move, anchor=x, has_replied=has_replied, change=change, arrived=arrived)
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


def _arrival(q: Gaussian, move: Array, there: bool, has_replied: Array) -> tuple[bool, float]:
    """Whether a step that nothing cut is short against q and everyone has replied; its length in posterior sds."""
    if not gaussian.is_proper(q):
        return False, np.inf
    change = float(np.max(np.abs(move) / gaussian.standard_deviations(q)))
    return there and change < _ARRIVED and bool(np.all(has_replied)), change


def reach(prior: Gaussian, state: WarmStart) -> float:
    """The longest length of the last step that is looked at, in units of it."""
    if not state.whole:
        return 1.0
    longest = float(np.max(np.abs(state.move) / gaussian.standard_deviations(prior)))
    return max(state.radius / max(longest, 1e-300), 1.0)


def _better_length(prior: Gaussian, state: WarmStart, replies: Mapping[str, Message], objective: float) -> float | None:
    """The length of the last step, in units of it, that should have been taken; None where it was right."""
    if not np.any(state.move) or not np.isfinite(state.objective):
        return None
    values = np.sum([np.maximum(reply["ray"], NO_VALUE) for reply in replies.values()], axis=0)
    values = values + gaussian.log_kernel(prior, along(state.point, state.move))
    values[LENGTHS > reach(prior, state)] = -np.inf
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


_SINGULAR = 1e-13


def _move_within(q: Gaussian, prior: Gaussian, x: Array, radius: float) -> tuple[Array, bool]:
    """Newton step on |eigenvalues| in prior units, no axis longer than `radius` sds, and whether it was cut.

    For steps that no objective watches: it climbs whatever the curvature.
    """
    inverse = np.linalg.inv(np.linalg.cholesky(prior.precision))
    values, vectors = np.linalg.eigh(inverse @ q.precision @ inverse.T)
    gradient = inverse @ (q.linear - q.precision @ x)
    move = (vectors.T @ gradient) / np.maximum(np.abs(values), 1.0)
    clipped = np.clip(move, -radius, radius)
    return inverse.T @ (vectors @ clipped), bool(np.any(clipped != move)) or bool(values[0] <= 0)


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
        best: _Option | None = None
        for first in _suspects(white):
            found = _decoupled(white, slope, first, len(white) if best is None else best[0])
            if found is not None and (best is None or found[:2] < best[:2]):
                best = found
        assert best is not None  # the first has no bound
        _, _, move, white = best
    root = np.linalg.inv(np.linalg.cholesky(prior.precision))
    _, axes = np.linalg.eigh(root @ (white * np.outer(scale, scale)) @ root.T)
    axes = axes.T @ np.linalg.inv(root.T)  # rows: principal axes of the precision, in prior sds
    along = axes @ (move / scale)
    kept = np.clip(along, -radius, radius)
    return np.linalg.solve(axes, kept), whole, bool(np.any(kept != along))


def _smallest(matrix: Array) -> float:
    values = np.linalg.eigvalsh(matrix)
    return float(values[0] / max(values[-1], 1e-300))


def _suspects(white: Array, most: int = 20) -> list[int]:
    """Coordinates that the direction of most negative curvature lies in."""
    _, vectors = np.linalg.eigh(white)
    return [int(j) for j in np.argsort(-np.abs(vectors[:, 0]), kind="stable")[:most]]


_Option = tuple[int, float, Array, Array]  # how many, −gain, step, matrix


def _decoupled(white: Array, slope: Array, first: int, most: int) -> _Option | None:
    """Leave out one coordinate's couplings, then others' while need be; None where that takes more than `most`."""
    matrix, left = white.copy(), [first]
    while True:
        j = left[-1]
        own = max(abs(float(white[j, j])), 1e-3)
        matrix[j], matrix[:, j] = 0.0, 0.0
        matrix[j, j] = own
        values, vectors = np.linalg.eigh(matrix)
        if values[0] > _SINGULAR * max(values[-1], 1e-300):
            break
        share = np.abs(vectors[:, 0])
        share[left] = 0.0
        if not np.any(share > 0):
            break
        if len(left) == most:
            return None
        left.append(int(np.argmax(share)))
    move = np.asarray(np.linalg.solve(matrix, slope), dtype=np.float64)
    return len(left), -float(move @ slope), move, matrix
