"""The warm start: federated Newton rounds to the mode, from several points, and why a search has not arrived.

The server maximises the sum of the clients' quadratic expansions. These are sites already: r_k = g_k − H_k x,
Q_k = −H_k. At the mode of the marginal posterior they give its Laplace approximation, with θ marginalised, and EP goes
on from there. With each expansion clients send log f_k at `LENGTHS` times the step that led to the point: sums of these
say, within the round, whether the step was too long or too short, so that a start many prior sds away takes a handful
of rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fedppl import gaussian, settings
from fedppl.algorithms.ep import _trust
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep.sites import NO_VALUE, Sites, dense, implausible_expansion, in_structure, indices, update
from fedppl.contracts import Asked, ClientView, Expansion, LocalInference
from fedppl.gaussian import Gaussian
from fedppl.numerics.streams import whitened_points
from fedppl.results import diagnostics
from fedppl.types import Array, DeclarationError, Layout, LocalFailure, Message, as_declared

LENGTHS = 2.0 ** np.arange(-10, 6)
_ARRIVED = 0.3  # length of a step in posterior sds from which EP's importance weights are good
_NEARER = 0.25  # factor on the way to a search's first point, where clients have no expansion there
# Longest steps in prior sds, at first and after steps that prove right. A hierarchy among shared variables has a
# density without bound where its scale is 0: long steps find that in place of the mode beside it.
_RADIUS, _WIDEST = 1.5, 100.0


class WarmStart(NamedTuple):
    """State of a search."""

    point: Array  # (m,) where clients expand next
    move: Array  # (m,) the step from the anchor to the point, zero in the first round
    anchor: Array  # (m,) where the sites were expanded
    has_replied: Array  # (K,) bool: with an expansion
    objective: float  # log marginal posterior at the anchor, −inf if not all clients were expanded there
    change: float  # of the last step, in posterior sds
    radius: float  # longest step, in prior sds of a coordinate
    whole: bool  # whether the step is Newton's own, with all couplings: longer ones along it are compared
    spent: float  # expansions a client, the budget's unit
    pending: Mapping[str, Message]  # replies from the point so far: the next one follows when all have answered
    unusable: Mapping[str, str]  # clients whose last expansion is unusable, and why; "" where they have none
    reasons: Mapping[str, str]  # the last reason of each client for an unusable expansion, at any point
    chosen: bool  # whether the point was the best along a step
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
    return reply_of(expansion, ray), {**expansion.diagnostics, **why}


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
    new = sum(client_id not in state.pending for client_id in replies)
    has_replied = state.has_replied.copy()
    has_replied[indices(sites, replies)] = True
    pending = {**state.pending, **replies}
    # Repeated answers from a point count half: they cost a client as much, and bring nothing.
    spent = state.spent + (new + 0.5 * (len(replies) - new)) / len(has_replied)
    state = state._replace(pending=pending, has_replied=has_replied, spent=spent)
    if len(pending) < len(has_replied):
        unusable = _unusable(sites, replies)
        usable = {name: reply for name, reply in replies.items() if name not in unusable}
        return _replaced(sites, usable, state.point) if usable else sites, state, None
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
        # A thousandth of a thousandth of a step is still below the anchor: replies there were wrong, or are now. The
        # clients expand there again.
        again = state._replace(point=state.anchor, move=np.zeros_like(x), objective=-np.inf, radius=_RADIUS)
        return sites, again._replace(chosen=False), None
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
    """Clients whose expansion is unusable, and why."""
    reasons = {name: implausible_expansion(sites, reply) for name, reply in replies.items()}
    return {
        name: "" if float(replies[name]["value"]) == NO_VALUE else reason
        for name, reason in reasons.items()
        if reason is not None
    }


def _bounded_step(
    sites: Sites, state: WarmStart, replies: Mapping[str, Message], trust: float
) -> tuple[Sites, WarmStart, _trust.Bounded | None]:
    """Add the usable expansions, draw sites in as `trust` demands, and step on from there."""
    unusable = _unusable(sites, replies)
    usable = {name: reply for name, reply in replies.items() if name not in unusable}
    state = state._replace(spent=state.spent + len(replies) / len(state.has_replied), unusable=unusable)
    state = state._replace(reasons={**state.reasons, **unusable})
    if not usable:
        return sites, state, None
    x, has_replied = state.point, state.has_replied.copy()
    has_replied[indices(sites, usable)] = True
    bounded = _trust.bound(_replaced(sites, usable, x), trust)
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
    """The longest length of the last step that is compared, in units of it."""
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
    if not np.isfinite(objective):  # there is no expansion at the point
        values[LENGTHS >= 1.0] = -np.inf
    best, taken = int(np.argmax(values)), int(np.flatnonzero(LENGTHS == 1.0)[0])
    slack = 1e-9 * max(1.0, abs(state.objective))
    gain = objective - state.objective
    # Values along the step are compared with each other: common errors of their approximations cancel.
    little = state.chosen or values[best] - values[taken] <= 0.5 * max(gain, 0.0) + 1.0
    if np.isfinite(objective) and gain >= -slack and little:
        return None
    # Where no length gains, the shortest follows.
    values[taken] = -np.inf
    best = int(np.argmax(values))
    return float(LENGTHS[best] if values[best] >= state.objective - slack else LENGTHS[0])


_SINGULAR = 1e-13
_SUSPECTS = 20  # coordinates whose couplings are left out first


def _move_within(q: Gaussian, prior: Gaussian, x: Array, radius: float) -> tuple[Array, bool]:
    """Newton step on |eigenvalues| in prior units, no axis longer than `radius` sds, and whether it was cut.

    For steps without an objective: it climbs whatever the curvature.
    """
    inverse = np.linalg.inv(np.linalg.cholesky(prior.precision))
    values, vectors = np.linalg.eigh(inverse @ q.precision @ inverse.T)
    gradient = inverse @ (q.linear - q.precision @ x)
    move = (vectors.T @ gradient) / np.maximum(np.abs(values), 1.0)
    clipped = np.clip(move, -radius, radius)
    return inverse.T @ (vectors @ clipped), bool(np.any(clipped != move)) or bool(values[0] <= 0)


def newton_step(q: Gaussian, prior: Gaussian, x: Array, radius: float) -> tuple[Array, bool, bool]:
    """Newton step from x towards the mode of q; whether it has all couplings; whether it was cut.

    Where the precision is not positive definite, couplings of one coordinate are left out, and of others if need be:
    those with the largest gain. A scale that is far off couples with every mean it scales, and without the coupling
    each steps well. Along no principal axis of the precision is the step longer than `radius` prior sds.
    """
    gradient = q.linear - q.precision @ x
    scale = np.sqrt(np.maximum(np.abs(np.diag(q.precision)), np.diag(prior.precision)))
    white, slope = q.precision / np.outer(scale, scale), gradient / scale
    values = np.linalg.eigvalsh(white)
    whole = bool(values[0] / max(values[-1], 1e-300) > _SINGULAR)
    if whole:
        move = np.linalg.solve(white, slope)
    else:
        best: _Option | None = None
        most_negative = np.linalg.eigh(white)[1][:, 0]
        for first in np.argsort(-np.abs(most_negative), kind="stable")[:_SUSPECTS]:
            option = _decoupled(white, slope, int(first), len(white) if best is None else best[0])
            if option is not None and (best is None or option[:2] < best[:2]):
                best = option
        assert best is not None  # the first has no bound
        _, _, move, white = best
    root = np.linalg.inv(np.linalg.cholesky(prior.precision))
    _, axes = np.linalg.eigh(root @ (white * np.outer(scale, scale)) @ root.T)
    axes = axes.T @ np.linalg.inv(root.T)  # rows: principal axes of the precision, in prior sds
    along = axes @ (move / scale)
    kept = np.clip(along, -radius, radius)
    return np.linalg.solve(axes, kept), whole, bool(np.any(kept != along))


_Option = tuple[int, float, Array, Array]  # number of coordinates without couplings, −gain, step, matrix


def _decoupled(white: Array, slope: Array, first: int, most: int) -> _Option | None:
    """Leave out one coordinate's couplings, then others' while need be; None where that takes more than `most`."""
    matrix, decoupled = white.copy(), [first]
    while True:
        j = decoupled[-1]
        matrix[j], matrix[:, j] = 0.0, 0.0
        matrix[j, j] = max(abs(float(white[j, j])), 1e-3)
        values, vectors = np.linalg.eigh(matrix)
        if values[0] > _SINGULAR * max(values[-1], 1e-300):
            break
        share = np.abs(vectors[:, 0])
        share[decoupled] = 0.0
        if not np.any(share > 0):
            break
        if len(decoupled) == most:
            return None
        decoupled.append(int(np.argmax(share)))
    move = np.asarray(np.linalg.solve(matrix, slope), dtype=np.float64)
    return len(decoupled), -float(move @ slope), move, matrix


# Several searches, one after the other: the mode with the most mass, and the others by name ---------------------------

Indices = NDArray[np.int64]
_ONE_MODE = (
    "positive (pm.HalfNormal), ordered (pm.distributions.transforms.ordered), or by a prior that rules the others out"
)
_APART = 3.0  # posterior sds from which two modes are different
_MOST_STARTS = 1000
_ALIKE = 0.1  # sds of the prior by which moments of equal priors may differ
MATTERS = 1e-3  # share of the mass from which a mode is named


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
    turned: Indices  # (m,) coordinates in an order in which exchangeable ones have changed places
    modes: tuple[Mode, ...]
    said: str  # message of several modes, once all searches are over
    asked_for: bool  # by a number; else further searches end where few clients reply in a round


def number_of(starts: int | str, default: int) -> int:
    """Number of searches, by the keyword `starts`."""
    if not isinstance(starts, str):
        return settings.whole("starts", starts, most=_MOST_STARTS)
    if starts != "auto":
        raise DeclarationError(
            f'starts={settings.shown(starts)} must be "auto", or a whole number from 1 to {_MOST_STARTS}.'
        )
    return default


def begin_several(layout: Layout, starts: int, stream: int, asked_for: bool) -> Starts:
    """The first search begins at the prior mean, the others at quasi-random points of the prior, some further out.

    The Gaussian of a prior with heavy tails lacks them, and modes may lie far from its middle. Images of the first mode
    take the places of the last of these points; images of a better mode that is found later are added.
    """
    prior = layout.prior
    sd = gaussian.standard_deviations(prior)
    z = whitened_points(len(sd), 2 * (starts + len(sd)), stream)[: starts - 1]
    reach = 2.0 ** (np.arange(len(z)) % 3)
    return Starts(gaussian.mean(prior) + z * reach[:, None] * sd, turned(layout), (), "", asked_for)


def turned(layout: Layout) -> Indices:
    """Coordinates with variables of equal priors in reversed order, and elements of a variable with a prior of its own.

    Moments of a prior that is not Gaussian come from draws, so that equal priors differ a little.
    """
    mean, sd = gaussian.mean(layout.prior), gaussian.standard_deviations(layout.prior)
    groups: list[list[slice]] = []
    for part in layout.slices.values():
        for group in groups:
            first = group[0]
            if len(mean[first]) == len(mean[part]) and np.allclose(sd[first], sd[part], rtol=_ALIKE, atol=0.0):
                if np.all(np.abs(mean[first] - mean[part]) < _ALIKE * sd[part]):
                    group.append(part)
                    break
        else:
            groups.append([part])
    order = np.arange(layout.size, dtype=np.int64)
    for group in groups:
        for part, other in zip(group, reversed(group), strict=True):
            taken = np.arange(other.start, other.stop)
            order[part] = taken if len(group) > 1 else taken[::-1]
    return order


def images(point: Array, sd: Array, middle: Array, turned: Indices) -> list[Array]:
    """Other modes of a posterior whose labels may be exchanged, or whose signs the data do not tell."""
    candidates = [2.0 * middle - point, point[turned]]
    return [image for image in candidates if far_apart(image, point, sd)]


def arrived_at(sites: Sites, search: WarmStart) -> Mode:
    """The mode near the point at which the sites were expanded."""
    x = search.anchor
    mass = search.objective - float(gaussian.log_kernel(sites.q, x)) + gaussian.log_integral(sites.q)
    return Mode(
        gaussian.mean(sites.q), gaussian.standard_deviations(sites.q), float(mass), sites.linear, sites.precision
    )


def next_search(starts: Starts, sites: Sites, new: Mode | None) -> tuple[Starts, Sites, WarmStart | None]:
    """Begin the next search; after the last one return the sites of the mode with the most mass, and no search.

    Where no search has arrived, the sites stay.
    """
    modes = starts.modes if new is None else (*starts.modes, new)
    remaining, middle = starts.left, gaussian.mean(sites.prior)
    if new is not None and all(new.log_mass > mode.log_mass + 1.0 for mode in starts.modes):
        beside = images(new.point, new.sd, middle, starts.turned)
        least = len(beside) if starts.modes else 0  # of a later mode all images are searched, if none remained
        remaining = np.array([*beside, *remaining]).reshape(-1, len(middle))[: max(len(remaining), least)]
    if len(remaining):
        search = start_at(remaining[0], middle, len(sites.where))
        empty = update(sites, np.zeros_like(sites.linear), np.zeros_like(sites.precision))
        return starts._replace(left=remaining[1:], modes=modes), empty, search
    if not modes:
        return starts, sites, None
    most = max(modes, key=lambda mode: mode.log_mass)
    best = next(mode for mode in modes if not _are_apart(mode, most))  # the first search that found it
    others = _distinct(best, modes)
    message = _several(best, others, sites.labels) if others else ""
    kept = tuple(mode._replace(linear=mode.linear[:0], precision=mode.precision[:0]) for mode in modes)
    return starts._replace(left=remaining, modes=kept, said=message), update(sites, best.linear, best.precision), None


def are_several(modes: tuple[Mode, ...]) -> bool:
    """Whether searches found other modes than the first did, whatever their mass."""
    return any(_are_apart(modes[0], mode) for mode in modes[1:])


def _distinct(best: Mode, modes: tuple[Mode, ...]) -> list[Mode]:
    """Modes other than the best, each once, with a share of the mass that matters."""
    others: list[Mode] = []
    for mode in sorted(modes, key=lambda mode: -mode.log_mass):
        if all(_are_apart(mode, other) for other in (best, *others)):
            others.append(mode)
    total = logsumexp([best.log_mass, *(mode.log_mass for mode in others)])
    return [mode for mode in others if mode.log_mass - total > np.log(MATTERS)]


def far_apart(one: Array, other: Array, sd: Array) -> bool:
    """Whether two points are not of one mode with these sds."""
    return float(np.max(np.abs(one - other) / sd)) > _APART


def _are_apart(one: Mode, other: Mode) -> bool:
    return far_apart(one.point, other.point, np.maximum(one.sd, other.sd))


def _several(best: Mode, others: list[Mode], labels: tuple[str, ...]) -> str:
    """Where the modes are, and about which share of the posterior each has."""
    total = logsumexp([mode.log_mass for mode in (best, *others)])
    worst = int(np.argmax(np.max([np.abs(mode.point - best.point) / best.sd for mode in others], axis=0)))
    shares = [np.exp(mode.log_mass - total) for mode in (best, *others[:3])]
    percent = [f"{share:.0%}" if 0.01 <= share <= 0.99 else f"{share:.2%}" for share in shares]
    places = [f"{s} at {mode.point[worst]:.3g}" for s, mode in zip(percent, (best, *others[:3]), strict=True)]
    return (
        f"the posterior has several modes: along {labels[worst]}, of those found about {', '.join(places)}; q is of "
        f"the first alone. Declare the model so that one is left: {_ONE_MODE}"
    )


# Why a search has not arrived, and what helps, judged by where it stands ----------------------------------------------

_ALONE = 100.0  # times the others' slope
_LEVEL = 0.3  # slope in sds of the curvature below which a point is level: a search arrives with the same number
_MANY_PRIOR_SDS = 3.0
# Precision in the prior's from which a coordinate is pinned by a scale that goes to zero; the second where clients'
# curvature has grown without bound meanwhile.
_PINNED, _PINNED_BEYOND = 1e12, 1e6
_LOG = "_log__"
ALL = "all clients"  # the name of the one client that stands for all in a search by sums


def why_not_arrived(sites: Sites, state: WarmStart, search: str = "the warm start") -> str:
    """The message of a search that has not arrived: where it stands, and what helps."""
    missing = [client_id for client_id, k in sites.where.items() if not state.has_replied[k]]
    if missing:
        return f"{search} needs every client once, and clients {missing[:5]} have not answered"
    absent = [client_id for client_id in sites.where if state.pending and client_id not in state.pending]
    cause = (
        f"it waits for an expansion of every client at its point, and clients {absent[:5]} have sent none yet"
        if absent
        else _cause(sites, state.anchor, dict(state.unusable), dict(state.reasons))
    )
    return f"{search} has not reached the mode of the marginal posterior: {cause}"


def pulls_alone(sites: Sites, x: Array) -> str:
    """The client whose slope at x is far beyond the others', where q is improper and has no sds to measure pulls in."""
    if len(sites.where) < 3:
        return ""
    slopes = np.abs(sites.linear - dense(sites.precision, sites.structure) @ x)
    slopes = slopes * gaussian.standard_deviations(sites.prior)
    k, i = np.unravel_index(int(np.argmax(slopes)), slopes.shape)
    others = max(float(np.median(np.delete(slopes.max(axis=1), k))), 1.0)
    if slopes[k, i] <= _ALONE * others:
        return ""
    return (
        f"client {list(sites.where)[k]} pulls {as_declared(sites.labels[i])} alone: {slopes[k, i] / others:.2g} times "
        "as hard as the median of the others at the last point; look at its data"
    )


def _cause(sites: Sites, point: Array, unusable: dict[str, str], earlier: dict[str, str]) -> str:
    """The likeliest cause, with a remedy, where `sites` are expansions at the point (m,) and nothing led on from there.

    `unusable` has the clients whose last expansion was unusable, with the reason, empty where the client's own search
    failed; `earlier` has those with an unusable expansion at any point.
    """
    prior = sites.prior
    spread = gaussian.standard_deviations(prior)
    away = (point - gaussian.mean(prior)) / spread
    return (
        diagnostics.hardly_a_prior(sites.labels, spread)
        or _saddle(sites, point)
        or _collapse(sites, point, away, _PINNED_BEYOND if any(unusable.values()) else _PINNED)
        or _stopped(unusable)
        or _far(sites.labels, away)
        or _stopped(earlier)
        or _convex(sites, point)
        or f"give every variable a proper prior that says what is plausible, or {_sites.WITHOUT_CURVATURE}"
    )


def _saddle(sites: Sites, point: Array) -> str:
    """A level point where the density curves upward: symmetric models have one at their centre."""
    values, vectors, root = _axes(sites)
    slopes = vectors.T @ (root @ (sites.q.linear - sites.q.precision @ point)) / np.sqrt(np.maximum(np.abs(values), 1))
    if values[0] >= 0 or np.abs(slopes).max() > _LEVEL:
        return ""
    named = _named(sites.labels, vectors[:, 0])
    return (
        f"at {_at(sites.labels, point, named)} the density is level, but rises on both sides, and has several modes: "
        "signs or labels may be exchanged, or rows contradict a prior with heavy tails, or lie on either side of a "
        f"threshold. Declare it so that one is left: {_ONE_MODE}, or with lighter tails"
    )


def _collapse(sites: Sites, point: Array, away: Array, least: float) -> str:
    """A scale that goes to zero pins the variables that it scales."""
    worst = int(np.argmax(np.abs(away)))
    known = np.diag(sites.q.precision) / np.diag(sites.prior.precision)
    known[worst] = 0.0
    pinned = int(np.argmax(known))
    if abs(away[worst]) < _MANY_PRIOR_SDS or known[pinned] < least:
        return ""
    label, end = sites.labels[worst], "0" if away[worst] < 0 or _LOG not in sites.labels[worst] else "infinity"
    remedy = "pm.InverseGamma" if end == "0" else "pm.Gamma(2, ...)"
    scale = _variable(label) if _LOG in label else f"the scale behind {_variable(label)}"
    return (
        f"{_spoken(label)} has gone to {point[worst]:.3g}, {abs(away[worst]):.2g} prior sds from its prior mean, and "
        f"pins {as_declared(sites.labels[pinned])} (precision {known[pinned]:.0e} times its prior's): {scale} goes to "
        f"{end}, as where outcomes are constant, or an exact function of what predicts them, at every client. Check "
        f"the outcomes, or declare it with a prior that keeps it from {end}, such as {remedy}"
    )


def _stopped(unusable: dict[str, str]) -> str:
    """Clients without a usable expansion, however short the step."""
    if not unusable:
        return ""
    reasons = list(dict.fromkeys(reason for reason in unusable.values() if reason))
    return f"expansions of {_who(list(unusable))} cannot be used at points on the way" + (
        f": {reasons[0]}" if reasons else "; look at their data, and at the priors of their local variables"
    )


def _far(labels: tuple[str, ...], away: Array) -> str:
    """Data on another scale than the prior."""
    worst = int(np.argmax(np.abs(away)))
    if abs(away[worst]) < _MANY_PRIOR_SDS:
        return ""
    return (
        f"the data pull {as_declared(labels[worst])} {abs(away[worst]):.2g} prior sds from its prior mean: rescale "
        "the outcome or its column, or widen its prior"
    )


def _convex(sites: Sites, point: Array) -> str:
    """A slope that steepens where it leads: most often to a pole."""
    values, vectors, root = _axes(sites)
    if values[0] >= 0:
        return ""
    axis = root.T @ vectors[:, 0]
    curvature = np.einsum("kij,i,j->k", dense(sites.precision, sites.structure), axis, axis)
    clients = [client_id for client_id, k in sites.where.items() if curvature[k] < 0.1 * curvature.min()]
    return (
        f"at {_at(sites.labels, point, _named(sites.labels, vectors[:, 0]))} the density curves upward, at "
        f"{_who(clients)} the most: it has several modes, or {_sites.SHOOTS_UP}"
    )


def _axes(sites: Sites) -> tuple[Array, Array, Array]:
    """Eigenvalues and eigenvectors of q's precision in prior sds, and the root that whitens it."""
    root = np.linalg.inv(np.linalg.cholesky(sites.prior.precision))
    values, vectors = np.linalg.eigh(root @ sites.q.precision @ root.T)
    return values, vectors, root


def _named(labels: tuple[str, ...], axis: Array) -> list[str]:
    """Coordinates that an axis lies in."""
    size = np.abs(axis)
    return [labels[j] for j in np.flatnonzero(size > 0.3 * size.max())]


def _who(clients: list[str]) -> str:
    return ALL if clients == [ALL] else f"clients {clients[:5]}"


def _variable(label: str) -> str:
    """The declared name of a coordinate's variable."""
    return label.partition("[")[0].removesuffix(_LOG)


def _spoken(label: str) -> str:
    """A coordinate's name beside its value, which is the logarithm for a positive variable."""
    return f"log {as_declared(label)}" if _LOG in label else as_declared(label)


def _at(labels: tuple[str, ...], point: Array, named: list[str]) -> str:
    shown = ", ".join(f"{_spoken(name)} = {point[labels.index(name)]:.3g}" for name in named[:3])
    return shown + (f" and {len(named) - 3} more" if len(named) > 3 else "")
