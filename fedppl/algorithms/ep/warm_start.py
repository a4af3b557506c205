"""The warm start: federated Newton rounds to the mode, from several points, and why a search has not arrived.

The server maximises the sum of the clients' quadratic expansions. These are sites already: r_k = g_k − H_k x,
Q_k = −H_k. At the mode of the marginal posterior they give its Laplace approximation, and EP goes on from there. With
each expansion clients send log f_k at `LENGTHS` times the step that led to the point, whose sums say whether the step
was too long or too short: a start many prior sds away takes a handful of rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fedppl import gaussian, settings, structure
from fedppl.algorithms import tolerances as tol
from fedppl.algorithms.ep import _trust
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep.sites import Sites, implausible_expansion, in_structure, indices, update
from fedppl.contracts import Asked, ClientView, Expansion, LocalInference
from fedppl.gaussian import Gaussian
from fedppl.local import tolerances as of_local
from fedppl.numerics.streams import whitened_points
from fedppl.results import diagnostics
from fedppl.types import Array, DeclarationError, Layout, LocalFailure, Message, as_declared


class Trial(NamedTuple):
    """The step that is being tried, and the point that it leads to."""

    point: Array  # (m,) where clients expand next
    move: Array  # (m,) from the anchor to the point, zero in the first round
    change: float = np.inf  # the move in posterior sds
    whole: bool = False  # whether the step is Newton's own, with all couplings: longer ones along it are compared
    chosen: bool = False  # whether the point was the best along a step


class Heard(NamedTuple):
    """Clients' replies so far."""

    has_replied: Array  # (K,) bool: with an expansion
    spent: float = 0.0  # expansions a client, the budget's unit
    pending: Mapping[str, Message] = {}  # from the point so far: the next one follows when all have answered
    unusable: Mapping[str, str] = {}  # clients whose last expansion is unusable, and why; "" where they have none
    reasons: Mapping[str, str] = {}  # the last reason of each client for an unusable expansion, at any point


class WarmStart(NamedTuple):
    """State of a search."""

    trial: Trial
    anchor: Array  # (m,) where the sites were expanded
    heard: Heard
    objective: float = -np.inf  # log marginal posterior at the anchor, −inf if not all clients were expanded there
    radius: float = tol.FIRST_RADIUS  # longest step, in prior sds of a coordinate
    arrived: bool = False


def start(layout: Layout, clients: int) -> WarmStart:
    """Begin at the prior mean."""
    mean = gaussian.mean(layout.prior)
    return start_at(mean, mean, clients)


def start_at(point: Array, middle: Array, clients: int) -> WarmStart:
    """Begin at a point; where clients have no expansion there, nearer to the middle."""
    return WarmStart(Trial(point, point - middle), middle, Heard(np.zeros(clients, dtype=bool)))


def along(point: Array, move: Array) -> Array:
    """Points (T, m) at `LENGTHS` times the step that led to the point."""
    return np.asarray(point + (tol.LENGTHS - 1.0)[:, None] * move)


def asks(layout: Layout, message: Message) -> Asked:
    """The point, optional for a client where a step led to it, and those along that step."""
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
    """A client's reply: log f_k with its derivatives at the point, and its values along the step that led there.

    `share` is its share of a prior that is not Gaussian. Where `inside`, (1 + T,) bool, is False, its site's policy
    forbids to compute, and the reply has no value.
    """
    assert local.expand is not None and local.log_factor is not None
    stepped, ray = bool(np.any(move)), np.zeros(len(tol.LENGTHS))
    kept = np.ones(1 + len(ray), dtype=bool) if inside is None else np.asarray(inside, dtype=bool)
    if stepped:
        ray[:] = tol.NO_VALUE
        if np.any(kept[1:]):
            values = local.log_factor(client, along(point, move)[kept[1:]], share)
            ray[kept[1:]] = np.where(np.isfinite(values), values, tol.NO_VALUE)
    expansion, why = no_expansion(len(point)), {}
    try:
        there = local.expand(client, point, share) if kept[0] else expansion
        numbers = np.concatenate([[there.value], there.gradient, np.ravel(there.hessian)])
        if not stepped or np.all(np.isfinite(numbers)):
            expansion = there
    except LocalFailure as failure:
        if not stepped:  # nowhere to go back to
            raise
        why = {"reason": str(failure)}
    return reply_of(expansion, ray), {**expansion.diagnostics, **why}


def no_expansion(size: int) -> Expansion:
    """What stands for an expansion where there is none."""
    return Expansion(tol.NO_VALUE, np.zeros(size), np.zeros((size, size)), {})


def reply_of(expansion: Expansion, ray: Array) -> dict[str, Array]:
    """An expansion as a reply, with values along the step."""
    return {
        "value": np.array(expansion.value),
        "gradient": expansion.gradient,
        "hessian": gaussian.pack_triangle(expansion.hessian),
        "ray": ray,
    }


def step(
    sites: Sites, state: WarmStart, replies: Mapping[str, Message], trust: float | None = None
) -> tuple[Sites, WarmStart, _trust.Bounded | None]:
    """Add the expansions at the point and, when every client has sent one, choose the next point.

    The sums of log f_k decide: a point that lowers the log marginal posterior, or is much worse than another length of
    the step, is given up for the best length. With `trust`, sites are drawn in as `_trust` demands, every round moves
    the point, and the clients' values, which have no bound, are not compared.
    """
    if trust is not None:
        return _bounded_step(sites, state, replies, trust)
    heard, trial = state.heard, state.trial
    new = sum(client_id not in heard.pending for client_id in replies)
    has_replied = heard.has_replied.copy()
    has_replied[indices(sites, replies)] = True
    pending = {**heard.pending, **replies}
    # Repeated answers from a point count half: they cost a client as much, and bring nothing.
    spent = heard.spent + (new + tol.REPEATED * (len(replies) - new)) / len(has_replied)
    heard = heard._replace(pending=pending, has_replied=has_replied, spent=spent)
    if len(pending) < len(has_replied):
        unusable = _unusable(sites, replies)
        usable = {name: reply for name, reply in replies.items() if name not in unusable}
        return _replaced(sites, usable, trial.point), state._replace(heard=heard), None
    everyone = {client_id: pending[client_id] for client_id in sites.where}
    unusable = _unusable(sites, everyone)
    heard = heard._replace(pending={}, unusable=unusable, reasons={**heard.reasons, **unusable})
    state, objective = state._replace(heard=heard), -np.inf
    if not unusable:
        values = np.array([float(reply["value"]) for reply in everyone.values()])
        objective = float(values.sum() + gaussian.log_kernel(sites.prior, trial.point))
    if unusable and np.any(trial.move) and not np.isfinite(state.objective):  # there is no anchor yet to go back to
        move = tol.NEARER * trial.move
        return sites, state._replace(trial=trial._replace(point=state.anchor + move, move=move)), None
    better = _better_length(sites.prior, state, everyone, objective)
    if better == tol.LENGTHS[0] and trial.chosen:
        # A thousandth of a thousandth of a step is still below the anchor: replies there were wrong, or are now. The
        # clients expand there again.
        again = trial._replace(point=state.anchor, move=np.zeros_like(trial.move), chosen=False)
        return sites, state._replace(trial=again, objective=-np.inf, radius=tol.FIRST_RADIUS), None
    if better is not None:
        move = better * trial.move
        shorter = Trial(state.anchor + move, move, whole=trial.whole, chosen=True)
        return sites, state._replace(trial=shorter, radius=state.radius * min(better, 1.0)), None
    tried = _replaced(sites, everyone, trial.point)
    move, whole, cut = newton_step(tried.q, sites.prior, trial.point, state.radius)
    return tried, _stepped(tried.q, state._replace(objective=objective), move, whole, cut), None


def _stepped(q: Gaussian, state: WarmStart, move: Array, whole: bool, cut: bool) -> WarmStart:
    """The state after a step from the point at which the sites of q were expanded, and whether it has arrived."""
    change = float(np.max(np.abs(move) / gaussian.standard_deviations(q))) if gaussian.is_proper(q) else np.inf
    radius, anchor = state.radius, state.trial.point
    if cut:
        radius = min(of_local.TRUST_GROWTH * radius, tol.WIDEST_RADIUS if whole else max(tol.FIRST_RADIUS, radius))
    arrived = whole and not cut and change < tol.ARRIVED and bool(np.all(state.heard.has_replied))
    trial = Trial(anchor + move, move, change, whole)
    return state._replace(trial=trial, anchor=anchor, radius=radius, arrived=arrived)


def _unusable(sites: Sites, replies: Mapping[str, Message]) -> dict[str, str]:
    """Clients whose expansion is unusable, and why."""
    reasons = {name: implausible_expansion(sites, reply) for name, reply in replies.items()}
    return {
        name: "" if float(replies[name]["value"]) == tol.NO_VALUE else reason
        for name, reason in reasons.items()
        if reason is not None
    }


def _bounded_step(
    sites: Sites, state: WarmStart, replies: Mapping[str, Message], trust: float
) -> tuple[Sites, WarmStart, _trust.Bounded | None]:
    """Add the usable expansions, draw sites in as `trust` demands, and step on from there."""
    unusable = _unusable(sites, replies)
    usable = {name: reply for name, reply in replies.items() if name not in unusable}
    has_replied = state.heard.has_replied.copy()
    has_replied[indices(sites, usable)] = True
    spent = state.heard.spent + len(replies) / len(has_replied)
    heard = Heard(has_replied, spent, unusable=unusable, reasons={**state.heard.reasons, **unusable})
    state, point = state._replace(heard=heard), state.trial.point
    if not usable:
        return sites, state, None
    bounded = _trust.bound(_replaced(sites, usable, point), trust)
    move, cut = _move_within(bounded.sites.q, sites.prior, point)
    after = _stepped(bounded.sites.q, state, move, True, cut)
    return bounded.sites, after._replace(radius=state.radius), bounded


def _move_within(q: Gaussian, prior: Gaussian, x: Array) -> tuple[Array, bool]:
    """Newton step on |eigenvalues|, which climbs whatever the curvature: no steps are compared; whether it was cut."""
    inverse = np.linalg.inv(np.linalg.cholesky(prior.precision))
    values, vectors = np.linalg.eigh(inverse @ q.precision @ inverse.T)
    move = (vectors.T @ (inverse @ (q.linear - q.precision @ x))) / np.maximum(np.abs(values), 1.0)
    kept = np.clip(move, -tol.FIRST_RADIUS, tol.FIRST_RADIUS)
    return inverse.T @ (vectors @ kept), bool(np.any(kept != move) or values[0] <= 0)


def _replaced(sites: Sites, replies: Mapping[str, Message], x: Array) -> Sites:
    """The ledger with clients' expansions at x as their sites: r_k = g_k + Q_k x and Q_k = −H_k."""
    if not replies:
        return sites
    rows, linear, precision = indices(sites, replies), sites.linear.copy(), sites.precision.copy()
    gradient = np.stack([reply["gradient"] for reply in replies.values()])
    hessian = gaussian.unpack_triangle(np.stack([reply["hessian"] for reply in replies.values()]))
    precision[rows] = in_structure(-hessian, sites.structure)
    linear[rows] = gradient + structure.unpack_precision(precision[rows], sites.structure) @ x
    return update(sites, linear, precision)


def reach(prior: Gaussian, state: WarmStart) -> float:
    """The longest length of the last step that is compared, in units of it."""
    if not state.trial.whole:
        return 1.0
    longest = float(np.max(np.abs(state.trial.move) / gaussian.standard_deviations(prior)))
    return max(state.radius / max(longest, tol.ABOVE_ZERO), 1.0)


def _better_length(prior: Gaussian, state: WarmStart, replies: Mapping[str, Message], objective: float) -> float | None:
    """The length of the last step, in units of it, that should have been taken; None where it was right."""
    trial = state.trial
    if not np.any(trial.move) or not np.isfinite(state.objective):
        return None
    values = np.sum([np.maximum(reply["ray"], tol.NO_VALUE) for reply in replies.values()], axis=0)
    values = values + gaussian.log_kernel(prior, along(trial.point, trial.move))
    values[tol.LENGTHS > reach(prior, state)] = -np.inf
    if not np.isfinite(objective):  # there is no expansion at the point
        values[tol.LENGTHS >= 1.0] = -np.inf
    best, taken = int(np.argmax(values)), int(np.flatnonzero(tol.LENGTHS == 1.0)[0])
    slack = tol.SEARCH_ROUNDING * max(1.0, abs(state.objective))
    gain = objective - state.objective
    # Values along the step are compared with each other: common errors of their approximations cancel.
    little = trial.chosen or values[best] - values[taken] <= tol.SMALL_GAIN * max(gain, 0.0) + tol.SMALL_NATS
    if np.isfinite(objective) and gain >= -slack and little:
        return None
    # Where no length gains, the shortest follows.
    values[taken] = -np.inf
    best = int(np.argmax(values))
    return float(tol.LENGTHS[best] if values[best] >= state.objective - slack else tol.LENGTHS[0])


def newton_step(q: Gaussian, prior: Gaussian, x: Array, radius: float) -> tuple[Array, bool, bool]:
    """Newton step from x towards the mode of q; whether it has all couplings; whether it was cut.

    Where the precision is not positive definite, couplings of one coordinate are left out, and of others if need be:
    those with the largest gain. A scale that is far off couples with every mean it scales, and without the coupling
    each steps well. Along no principal axis of the precision is the step longer than `radius` prior sds.
    """
    gradient = q.linear - q.precision @ x
    scale = np.sqrt(np.maximum(np.abs(np.diag(q.precision)), np.diag(prior.precision)))
    white, slope = q.precision / np.outer(scale, scale), gradient / scale
    values, vectors = np.linalg.eigh(white)
    whole = bool(values[0] / max(values[-1], tol.ABOVE_ZERO) > tol.SINGULAR)
    if not whole:
        suspects = np.argsort(-np.abs(vectors[:, 0]), kind="stable")[: tol.SUSPECTS]
        options = (_decoupled(white, slope, int(first)) for first in suspects)
        white = min(options, key=lambda option: option[:2])[2]
    move = np.linalg.solve(white, slope)
    root = np.linalg.inv(np.linalg.cholesky(prior.precision))
    _, axes = np.linalg.eigh(root @ (white * np.outer(scale, scale)) @ root.T)
    axes = axes.T @ np.linalg.inv(root.T)  # rows: principal axes of the precision, in prior sds
    along = axes @ (move / scale)
    kept = np.clip(along, -radius, radius)
    return np.linalg.solve(axes, kept), whole, bool(np.any(kept != along))


def _decoupled(white: Array, slope: Array, first: int) -> tuple[int, float, Array]:
    """A precision without one coordinate's couplings, and others' while need be: how many, −gain of a step, and it."""
    matrix, decoupled = white.copy(), [first]
    while True:
        j = decoupled[-1]
        matrix[j], matrix[:, j] = 0.0, 0.0
        matrix[j, j] = max(abs(float(white[j, j])), tol.LEAST_CURVATURE)
        values, vectors = np.linalg.eigh(matrix)
        share = np.abs(vectors[:, 0])
        share[decoupled] = 0.0
        if values[0] > tol.SINGULAR * max(values[-1], tol.ABOVE_ZERO) or not np.any(share > 0):
            return len(decoupled), -float(np.linalg.solve(matrix, slope) @ slope), matrix
        decoupled.append(int(np.argmax(share)))


# Several searches, one after the other: the mode with the most mass, and the others by name ---------------------------

_ONE_MODE = (
    "positive (pm.HalfNormal), ordered (pm.distributions.transforms.ordered), or by a prior that rules the others out"
)


class Mode(NamedTuple):
    """A mode that a search found."""

    point: Array  # (m,)
    sd: Array  # (m,) of the Gaussian there
    log_mass: float  # log of that Gaussian's integral
    linear: Array  # (K, m) of the sites
    precision: Array  # (K, p)


class Starts(NamedTuple):
    """Points where searches are still to begin, and the modes that those before them found."""

    left: Array  # (J, m)
    turned: NDArray[np.int64]  # (m,) coordinates in an order in which exchangeable ones have changed places
    modes: tuple[Mode, ...]
    said: str  # message of several modes, once all searches are over
    asked_for: bool  # by a number; else further searches end where few clients reply in a round


def number_of(starts: int | str, default: int) -> int:
    """Number of searches, by the keyword `starts`."""
    if not isinstance(starts, str):
        return settings.whole("starts", starts, most=tol.MOST_STARTS)
    if starts != "auto":
        raise DeclarationError(
            f'starts={settings.shown(starts)} must be "auto", or a whole number from 1 to {tol.MOST_STARTS}.'
        )
    return default


def begin_several(layout: Layout, starts: int, stream: int, asked_for: bool) -> Starts:
    """The first search begins at the prior mean, the others at quasi-random points of the prior, some further out.

    Images of the first mode take the places of the last of these points.
    """
    sd = gaussian.standard_deviations(layout.prior)
    z = whitened_points(len(sd), 2 * (starts + len(sd)), stream)[: starts - 1]
    reach = np.resize(tol.START_REACH, len(z))
    return Starts(gaussian.mean(layout.prior) + z * reach[:, None] * sd, _turned(layout), (), "", asked_for)


def _turned(layout: Layout) -> NDArray[np.int64]:
    """Coordinates with variables of equal priors in reversed order, and elements of a variable with a prior of its own.

    Moments of a prior that is not Gaussian come from draws, so that equal priors differ a little.
    """
    mean, sd = gaussian.mean(layout.prior), gaussian.standard_deviations(layout.prior)

    def are_alike(one: slice, other: slice) -> bool:
        if len(mean[one]) != len(mean[other]) or not np.allclose(sd[one], sd[other], rtol=tol.PRIORS_ALIKE, atol=0.0):
            return False
        return bool(np.all(np.abs(mean[one] - mean[other]) < tol.PRIORS_ALIKE * sd[other]))

    groups: list[list[slice]] = []
    for part in layout.slices.values():
        group = next((group for group in groups if are_alike(group[0], part)), None)
        if group is None:
            groups.append([part])
        else:
            group.append(part)
    order = np.arange(layout.size, dtype=np.int64)
    for group in groups:
        for part, other in zip(group, reversed(group), strict=True):
            order[part] = np.arange(other.start, other.stop)[:: 1 if len(group) > 1 else -1]
    return order


def arrived_at(sites: Sites, search: WarmStart) -> Mode:
    """The mode near the point at which the sites were expanded."""
    q = sites.q
    mass = search.objective - float(gaussian.log_kernel(q, search.anchor)) + gaussian.log_integral(q)
    return Mode(gaussian.mean(q), gaussian.standard_deviations(q), float(mass), sites.linear, sites.precision)


def next_search(starts: Starts, sites: Sites, new: Mode | None) -> tuple[Starts, Sites, WarmStart | None]:
    """Begin the next search; after the last one return the sites of the mode with the most mass, and no search."""
    modes = starts.modes if new is None else (*starts.modes, new)
    remaining, middle = starts.left, gaussian.mean(sites.prior)
    if new is not None and all(new.log_mass > mode.log_mass + tol.MORE_MASS for mode in starts.modes):
        # Labels may be exchanged, or the data not tell signs.
        images = 2.0 * middle - new.point, new.point[starts.turned]
        beside = [image for image in images if far_apart(image, new.point, new.sd)]
        least = len(beside) if starts.modes else 0  # of a later mode all images are searched, if none remained
        remaining = np.array([*beside, *remaining]).reshape(-1, len(middle))[: max(len(remaining), least)]
    if len(remaining):
        search = start_at(remaining[0], middle, len(sites.where))
        empty = update(sites, np.zeros_like(sites.linear), np.zeros_like(sites.precision))
        return starts._replace(left=remaining[1:], modes=modes), empty, search
    if not modes:
        return starts, sites, None
    most = max(modes, key=lambda mode: mode.log_mass)
    best = next(mode for mode in modes if not are_apart(mode, most))  # the first search that found it
    kept = tuple(mode._replace(linear=mode.linear[:0], precision=mode.precision[:0]) for mode in modes)
    ended = starts._replace(left=remaining, modes=kept, said=_several(best, modes, sites.labels))
    return ended, update(sites, best.linear, best.precision), None


def far_apart(one: Array, other: Array, sd: Array) -> bool:
    """Whether two points are not of one mode with these sds."""
    return float(np.max(np.abs(one - other) / sd)) > tol.MODE_SDS


def are_apart(one: Mode, other: Mode) -> bool:
    """Whether two modes differ."""
    return far_apart(one.point, other.point, np.maximum(one.sd, other.sd))


def _several(best: Mode, modes: tuple[Mode, ...], labels: tuple[str, ...]) -> str:
    """Where the modes are whose share of the posterior matters, and their shares; empty where there is one."""
    distinct = [best]
    for mode in sorted(modes, key=lambda mode: -mode.log_mass):
        if all(are_apart(mode, other) for other in distinct):
            distinct.append(mode)
    total = logsumexp([mode.log_mass for mode in distinct])
    others = [mode for mode in distinct[1:] if mode.log_mass - total > of_local.NEGLIGIBLE_MODE]
    if not others:
        return ""
    total = logsumexp([mode.log_mass for mode in (best, *others)])
    worst = int(np.argmax(np.max([np.abs(mode.point - best.point) / best.sd for mode in others], axis=0)))
    places = []
    for mode in (best, *others[:3]):
        share = np.exp(mode.log_mass - total)
        percent = f"{share:.0%}" if 0.01 <= share <= 0.99 else f"{share:.2%}"
        places.append(f"{percent} at {mode.point[worst]:.3g}")
    return (
        f"the posterior has several modes: along {labels[worst]}, of those found about {', '.join(places)}; q is of "
        f"the first alone. Declare the model so that one is left: {_ONE_MODE}"
    )


# Why a search has not arrived, and what helps, judged by where it stands ----------------------------------------------

_LOG = "_log__"
ALL = "all clients"  # the name of the one client that stands for all in a search by sums


def why_not_arrived(sites: Sites, state: WarmStart, search: str = "the warm start") -> str:
    """The message of a search that has not arrived: where it stands, and what helps."""
    missing = [client_id for client_id, k in sites.where.items() if not state.heard.has_replied[k]]
    if missing:
        return f"{search} needs every client once, and clients {missing[:5]} have not answered"
    pending = state.heard.pending
    absent = [client_id for client_id in sites.where if pending and client_id not in pending]
    waits = f"it waits for an expansion of every client at its point, and clients {absent[:5]} have sent none yet"
    return f"{search} has not reached the mode of the marginal posterior: {waits if absent else _cause(sites, state)}"


def pulls_alone(sites: Sites, x: Array) -> str:
    """The client whose slope at x is far beyond the others', where q is improper and has no sds to measure pulls in."""
    if len(sites.where) < 3:
        return ""
    slopes = np.abs(sites.linear - structure.unpack_precision(sites.precision, sites.structure) @ x)
    slopes = slopes * gaussian.standard_deviations(sites.prior)
    k, i = np.unravel_index(int(np.argmax(slopes)), slopes.shape)
    others = max(float(np.median(np.delete(slopes.max(axis=1), k))), 1.0)
    if slopes[k, i] <= tol.SLOPE_ALONE * others:
        return ""
    who, times = list(sites.where)[k], f"{slopes[k, i] / others:.2g} times as hard as the median of the others"
    return f"client {who} pulls {as_declared(sites.labels[i])} alone: {times} at the last point; look at its data"


def _cause(sites: Sites, state: WarmStart) -> str:
    """The likeliest cause, with a remedy, where `sites` are expansions at the anchor and nothing led on from there."""
    spread, point, unusable = gaussian.standard_deviations(sites.prior), state.anchor, state.heard.unusable
    away = (point - gaussian.mean(sites.prior)) / spread
    return (
        diagnostics.hardly_a_prior(sites.labels, spread)
        or _saddle(sites, point)
        or _collapse(sites, point, away, tol.PINNED_BEYOND if any(unusable.values()) else tol.PINNED)
        or _stopped(unusable)
        or _far(sites.labels, away)
        or _stopped(state.heard.reasons)
        or _convex(sites, point)
        or f"give every variable a proper prior that says what is plausible, or {_sites.WITHOUT_CURVATURE}"
    )


def _saddle(sites: Sites, point: Array) -> str:
    """A level point where the density curves upward: symmetric models have one at their centre."""
    values, vectors, root = _axes(sites)
    slopes = vectors.T @ (root @ (sites.q.linear - sites.q.precision @ point)) / np.sqrt(np.maximum(np.abs(values), 1))
    if values[0] >= 0 or np.abs(slopes).max() > tol.ARRIVED:
        return ""
    return (
        f"at {_at(sites.labels, point, vectors[:, 0])} the density is level, but rises on both sides, and has several "
        f"modes. Declare it so that one is left: {_ONE_MODE}, or with lighter tails"
    )


def _collapse(sites: Sites, point: Array, away: Array, least: float) -> str:
    """A scale that goes to zero pins the variables that it scales."""
    worst = int(np.argmax(np.abs(away)))
    known = np.diag(sites.q.precision) / np.diag(sites.prior.precision)
    known[worst] = 0.0
    pinned = int(np.argmax(known))
    if abs(away[worst]) < tol.FAR_PRIOR_SDS or known[pinned] < least:
        return ""
    label, is_log = sites.labels[worst], _LOG in sites.labels[worst]
    to_zero = away[worst] < 0 or not is_log
    end, remedy = ("0", "pm.InverseGamma") if to_zero else ("infinity", "pm.Gamma(2, ...)")
    scale = ("" if is_log else "the scale behind ") + label.partition("[")[0].removesuffix(_LOG)
    return (
        f"{_spoken(label)} has gone to {point[worst]:.3g}, {abs(away[worst]):.2g} prior sds from its prior mean, and "
        f"pins {as_declared(sites.labels[pinned])} (precision {known[pinned]:.0e} times its prior's): {scale} goes to "
        f"{end}, as of constant outcomes. Check them, or declare a prior that keeps it from {end}, such as {remedy}"
    )


def _stopped(unusable: Mapping[str, str]) -> str:
    """Clients without a usable expansion, however short the step."""
    if not unusable:
        return ""
    reason = next(filter(None, unusable.values()), "")
    why = f": {reason}" if reason else "; look at their data, and at the priors of their local variables"
    return f"expansions of {_who(list(unusable))} cannot be used at points on the way{why}"


def _far(labels: tuple[str, ...], away: Array) -> str:
    """Data on another scale than the prior."""
    worst = int(np.argmax(np.abs(away)))
    if abs(away[worst]) < tol.FAR_PRIOR_SDS:
        return ""
    pulled = f"the data pull {as_declared(labels[worst])} {abs(away[worst]):.2g} prior sds from its prior mean"
    return f"{pulled}: rescale the outcome or its column, or widen its prior"


def _convex(sites: Sites, point: Array) -> str:
    """A slope that steepens where it leads: most often to a pole."""
    values, vectors, root = _axes(sites)
    if values[0] >= 0:
        return ""
    axis = root.T @ vectors[:, 0]
    curvature = np.einsum("kij,i,j->k", structure.unpack_precision(sites.precision, sites.structure), axis, axis)
    clients = [client_id for client_id, k in sites.where.items() if curvature[k] < tol.CURVES_UP * curvature.min()]
    where = f"at {_at(sites.labels, point, vectors[:, 0])} the density curves upward, at {_who(clients)} the most"
    return f"{where}: it has several modes, or {_sites.SHOOTS_UP}"


def _axes(sites: Sites) -> tuple[Array, Array, Array]:
    """Eigenvalues and eigenvectors of q's precision in prior sds, and the root that whitens it."""
    root = np.linalg.inv(np.linalg.cholesky(sites.prior.precision))
    values, vectors = np.linalg.eigh(root @ sites.q.precision @ root.T)
    return values, vectors, root


def _who(clients: list[str]) -> str:
    return ALL if clients == [ALL] else f"clients {clients[:5]}"


def _spoken(label: str) -> str:
    """A coordinate's name beside its value, which is the logarithm for a positive variable."""
    return f"log {as_declared(label)}" if _LOG in label else as_declared(label)


def _at(labels: tuple[str, ...], point: Array, axis: Array) -> str:
    """Where a point is, by the coordinates that an axis lies in."""
    size = np.abs(axis)
    places = np.flatnonzero(size > tol.ALONG_AXIS * size.max())
    shown = ", ".join(f"{_spoken(labels[j])} = {point[j]:.3g}" for j in places[:3])
    return shown + (f" and {len(places) - 3} more" if len(places) > 3 else "")
