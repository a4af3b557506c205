"""EP at the server: its state, and a round of each phase, which are warm start, matching of moments, and correction."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from fedppl import gaussian, structure
from fedppl.algorithms.ep import _trust
from fedppl.algorithms.ep import correction as _correction
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep import warm_start as _warm_start
from fedppl.algorithms.ep._trust import LEAST, Bounded, Moves
from fedppl.algorithms.ep.correction import Correcting, Correction
from fedppl.algorithms.ep.sites import Sites
from fedppl.algorithms.ep.warm_start import Starts, WarmStart, hardly_a_prior, pulls_alone, why_not_arrived
from fedppl.contracts import Report
from fedppl.results import diagnostics
from fedppl.structure import Structure
from fedppl.types import Array, Message, Status, as_declared

logger = logging.getLogger(__name__)

_VERY_SKEWED = 1.0  # a warning; below it, a word for those who look


class EPState(NamedTuple):
    """What the next round needs. Invariant: sites.q = prior x Π_k site_k."""

    sites: Sites
    warm_start: WarmStart | None  # None once refinement has begun
    starts: Starts | None  # where several searches were asked for
    prior_share: float  # 1 / K when the prior is not Gaussian: each factor's share of p / N_0
    damping: float
    change: float  # of the last round
    averaging: int  # rounds averaged since the change came down to Monte Carlo error
    has_replied: Array  # (K,) bool: in the current sweep
    sweep_change: float  # of the current sweep over all clients
    last_change: Array  # (m,) of the last round, in posterior sds: what a mean or a log sd moved by, before damping
    skewness: Array  # (m,) that the factors give the posterior's margins, and q cannot have
    skewed_by: Array  # (m,) row of the client without whom it is least
    skewness_without: Array  # (m,) what it is without that client
    held: Array  # (K,) share of its site that is not what it asked for, since trust binds
    held_back: Array  # (K,) rounds in which its site was drawn in
    pull: Array  # (K, m) where trust is set: what it would have pulled means by, in sds of its cavity; 0 where unknown
    errors: Array  # (K,) Monte Carlo error of the client's last reply, in posterior sds
    noise: Array  # (K,) variance that the errors of all its replies have left in its site, in the same unit
    moves: Moves  # what the server sees itself, since averaging began
    heading: Array  # (2 m,) where the last round moved means and log sds, in posterior sds before damping
    unseen: Array  # (K,) bool: nobody here can look at its rows
    corrects: bool  # whether q is put right once moments are matched
    stream: int  # of the points of the correction
    correction: Correcting | None  # once moments are matched, where one was asked for
    falls: int  # rounds in which the change fell since the damping was last lowered


class EPInfo(NamedTuple):
    """Diagnostics of this round."""

    phase: str
    change_mean: float  # largest |Δ mean| in posterior sds, before damping
    change_sd: float  # largest |Δ log sd|, before damping
    damping: float
    log_posterior: float  # log marginal posterior at the point, warm start only
    mc_error: float  # Monte Carlo error of the global mean in posterior sds
    skewness: float  # largest |skewness| that the factors give a margin of the posterior
    held_back: int = 0  # clients whose sites were drawn in, where trust is set
    pull: float = np.nan  # most that one client would have pulled a mean by, in sds of its cavity
    pulled_by: str = ""  # that client
    correction_ess: float = np.nan  # of the points of the correction, once an exchange is over
    correction_pareto_k: float = np.nan


class Taken(NamedTuple):
    """A round that the server has taken in: the state after it, and how that stands."""

    state: EPState
    info: EPInfo
    status: Status = Status.RUNNING
    message: str | None = None
    skewed: str = ""  # what of it a correction makes up for


def reported(taken: Taken) -> tuple[EPState, Report]:
    """The state and the report; what is said of a converged fit is mild where little is skewed and nobody held back."""
    state = taken.state
    corrected = state.correction is not None and state.correction.trusted
    mild = bool((corrected or np.abs(state.skewness).max() < _VERY_SKEWED) and not np.any(state.held))
    message = "; ".join(filter(None, (taken.message, taken.skewed))) if taken.skewed else taken.message
    return state, Report(taken.info, taken.status, message, mild)


# Warm start -----------------------------------------------------------------------------------------------------------

# Expansions a client: a dozen do even from a prior a million times too wide.
_BUDGET = 25.0


def newton_round(state: EPState, before: WarmStart, replies: Mapping[str, Message], trust: float | None) -> Taken:
    """One round of the warm start; on arrival, sites and q stay and refinement begins."""
    sites, after, bounded = state.sites, before._replace(spent=before.spent + 1.0), None
    if state.starts is not None and not state.starts.asked_for and 0 < len(replies) < len(sites.where):
        # Searches that nobody asked for would take many rounds.
        if state.starts.modes:
            ended, sites, _ = _warm_start.next_search(state.starts._replace(left=state.starts.left[:0]), sites, None)
            info = EPInfo("warm start", before.change, np.inf, 1.0, before.objective, 0.0, np.nan)
            return Taken(state._replace(sites=sites, starts=ended, warm_start=None), info)
        state = state._replace(starts=None)
    if replies:
        sites, after, bounded = _warm_start.step(sites, before, replies, trust)
    info = EPInfo("warm start", after.change, np.inf, 1.0, after.objective, 0.0, np.nan)
    over = not after.arrived and after.spent >= _BUDGET
    further = state.starts is not None and bool(state.starts.modes)  # from a point that nobody asked for
    taken = Taken(
        state._replace(sites=sites, warm_start=None if after.arrived else after),
        info,
        Status.STALLED if over else Status.RUNNING,
        "" if after.arrived or further else why_not_arrived(sites, after),
    )
    if bounded is not None and trust is not None:
        taken = hold_back(taken, _sites.indices(sites, replies), bounded, trust, 1.0)
        if not after.arrived and np.all(np.isnan(bounded.pull)):
            alone = pulls_alone(sites, before.point)
            taken = taken._replace(message="; ".join(filter(None, (alone, taken.message))))
    return named(_searched(taken, after), trust)


def _searched(taken: Taken, search: WarmStart) -> Taken:
    """Where a search is over and several were asked for: the next one, or the mode with the most mass."""
    starts = taken.state.starts
    if starts is None or (not search.arrived and taken.status is Status.RUNNING):
        return taken
    if not starts.asked_for and not search.arrived and not starts.modes:
        return taken  # what keeps the first search from arriving is told, and is not looked for from elsewhere
    found = _warm_start.arrived_at(taken.state.sites, search) if search.arrived else None
    after, sites, following = _warm_start.next_search(starts, taken.state.sites, found)
    if following is None and not after.modes:
        return taken
    message = "" if following is None else f"{len(after.left) + 1} warm starts are left"
    state = taken.state._replace(starts=after, sites=sites, warm_start=following)
    return taken._replace(state=state, status=Status.RUNNING, message=message)


# Matching of moments: steps are halved until all is proper, then bounded by trust, and judged -------------------------

# The share of a skewness that is left without one client, above which it is not that client's alone.
_SEVERAL = 0.4
# What a client may say of its Monte Carlo error, in posterior sds: NUTS gives no moments of fewer than m + 4 draws.
_MOST_CLAIMED = 0.5
# Monte Carlo error of the shared means, in posterior sds after averaging, beyond which nothing is called converged.
_MOST_ERROR_LEFT = 0.2
LESS_NOISE = "take more draws or points, as in local=fedppl.NUTS(draws=4000) or local=fedppl.NestedLaplace(points=1024)"
# With this skewness, quantiles of a margin in the tails are off by a few tenths of an sd under a Gaussian.
_SKEWED = 0.5
# Averaged for so many rounds, and with so many replies of every client, before moves that cancel count as such.
_ROUNDS, _REPLIES = 4, 2
# The probability that an honest run has such a pull, of any client.
_BY_CHANCE = 1e-3
_ALONE = 20.0  # sds of what all others know, beyond what heterogeneity does that a model has
_LITTLE = 0.05  # of a site: of a pull by 3 sds, that is 0.15


class Change(NamedTuple):
    """What a round did to q."""

    size: float  # largest of a mean or a log sd, in posterior sds before damping
    turned: bool  # it did not go on in the direction of the round before
    mc_error: float  # of all clients' last replies
    fresh: float  # of this round's


def ep_round(
    state: EPState, replies: Mapping[str, Message], tolerance: float, largest: float, trust: float | None
) -> Taken:
    """Moment matching: the clients' tilted natural parameters against q's."""
    if not replies:
        return Taken(state, EPInfo("EP", 0.0, 0.0, state.damping, np.nan, 0.0, np.nan))
    sites, q, form = state.sites, state.sites.q, state.sites.structure
    target_linear, target_packed = targets(sites, replies)
    # A prior with correlations puts q outside a smaller family: moments are matched with what the family holds of it.
    whole = form.blocks is not None and len(form.blocks) == 1
    inside = q if whole else _sites.in_family(gaussian.mean(q), gaussian.covariance(q), form)
    # Cumulants of log factors add, so the small skewnesses of K tilted distributions make the posterior's.
    skewness = np.stack([reply["skewness"] for reply in replies.values()]) * len(sites.where) / len(replies)
    return damped_step(
        state,
        _sites.indices(sites, replies),
        target_linear - inside.linear,
        target_packed - _sites.in_structure(inside.precision, form),
        mc_errors=np.minimum([float(reply["mc_error"]) for reply in replies.values()], _MOST_CLAIMED),
        skewness=skewness,
        tolerance=tolerance,
        largest=largest,
        trust=trust,
    )


def targets(sites: Sites, replies: Mapping[str, Message]) -> tuple[Array, Array]:
    """Natural parameters of the clients' tilted distributions inside the family, packed."""
    means = np.stack([reply["mean"] for reply in replies.values()])
    precisions = gaussian.unpack_triangle(np.stack([reply["precision"] for reply in replies.values()]))
    form = sites.structure
    if form.blocks is not None and len(form.blocks) == 1:
        return np.einsum("kij,kj->ki", precisions, means), structure.pack_precision(precisions, form)
    projected = [
        structure.project(mean, np.linalg.inv(precision), form)
        for mean, precision in zip(means, precisions, strict=True)
    ]
    packed = [structure.pack_precision(g.precision, form) for g in projected]
    return np.stack([g.linear for g in projected]), np.stack(packed)


def damped_step(
    state: EPState,
    rows: list[int],
    d_linear: Array,
    d_packed: Array,
    *,
    mc_errors: Array,
    skewness: Array,
    tolerance: float,
    largest: float,
    trust: float | None = None,
) -> Taken:
    """Add δ times the clients' changes (R, m), (R, p) to their sites; δ keeps q and every cavity proper.

    `mc_errors` (R,) are those of the clients' means in posterior sds, `skewness` (R, m) what each says it adds.
    With `trust`, sites are drawn in after that, so that the ledger keeps the bound of `_trust`.
    """
    sites, q = state.sites, state.sites.q
    # Where rounds are averaged since clients draw, it is averaged with them.
    total = state.skewness + (skewness.sum(axis=0) - state.skewness) / (1 + state.averaging)
    by = np.argmax(np.sign(total) * skewness, axis=0)
    skewed = float(np.abs(total).max())
    errors = state.errors.copy()
    errors[rows] = mc_errors
    mc_error, fresh = float(np.linalg.norm(errors)), float(np.linalg.norm(mc_errors))
    improper = _sites.improper_cavities(sites)
    delta = state.damping
    bounded = None
    # At δ = 1/K the new q is a convex combination of proper Gaussians; below it only cavities can object.
    while delta >= min(shortest_step(len(sites.where)), largest):
        linear, precision = sites.linear.copy(), sites.precision.copy()
        linear[rows] += delta * d_linear
        precision[rows] += delta * d_packed
        moved = _sites.update(sites, linear, precision)
        if trust is not None:
            bounded = _trust.bound(moved, trust)
            moved = bounded.sites
        if gaussian.is_proper(moved.q) and _sites.improper_cavities(moved) <= improper:
            break
        delta /= 2
    else:
        taken = Taken(state, EPInfo("EP", np.inf, np.inf, 0.0, np.nan, mc_error, skewed))
        if bounded is not None and trust is not None:
            taken = hold_back(taken, [], bounded, trust, 0.0)
        # Beside one that is held back, what others lack may be its doing.
        least = [] if np.any(taken.state.held) else _least_known(sites, rows, d_packed)
        return named(taken._replace(message=_no_step(least, noisy=mc_error > tolerance)), trust)
    sd, new_sd = gaussian.standard_deviations(q), gaussian.standard_deviations(moved.q)
    heading = np.concatenate([(gaussian.mean(moved.q) - gaussian.mean(q)) / sd, np.log(new_sd / sd)]) / delta
    turned = bool(heading @ state.heading <= 0)
    shift, stretch = np.split(np.abs(heading), 2)
    change_mean, change_sd = float(np.max(shift)), float(np.max(stretch))
    # A site is a weighted mean of its client's replies, each with an error of its own. What a first reply leaves of the
    # site before it counts as if it came from a reply too.
    noise = state.noise.copy()
    averaged = (1 - delta) ** 2 * noise[rows] + (delta * mc_errors) ** 2
    noise[rows] = np.where(noise[rows] > 0, averaged, mc_errors**2)
    moves = state.moves
    if state.averaging:
        now = _trust.moves_of(q, d_linear, _sites.dense(d_packed, sites.structure))
        moves = _trust.followed(moves, rows, now, np.full(len(rows), delta))
    state = state._replace(
        sites=moved,
        damping=delta,
        last_change=np.maximum(shift, stretch),
        skewness=total,
        skewed_by=np.asarray(rows)[by],
        skewness_without=total - np.take_along_axis(skewness, by[None], axis=0)[0],
        errors=errors,
        noise=noise,
        moves=moves,
        heading=heading,
    )
    taken = Taken(state, EPInfo("EP", change_mean, change_sd, delta, np.nan, mc_error, skewed))
    if bounded is not None and trust is not None:
        taken = hold_back(taken, rows, bounded, trust, delta)
    change = Change(max(change_mean, change_sd), turned, mc_error, fresh)
    return named(judge(taken, change, rows, tolerance, largest), trust, bounded)


def _least_known(sites: Sites, rows: list[int], d_packed: Array) -> list[str]:
    """Clients that take most precision away."""
    _, root = gaussian.affine(sites.q)
    lost = [float(np.linalg.eigvalsh(root.T @ _sites.dense(packed, sites.structure) @ root)[0]) for packed in d_packed]
    names = list(sites.where)
    return [names[rows[r]] for r in np.argsort(lost, kind="stable") if lost[r] < 0.5 * min(lost)]


def _no_step(least: list[str], noisy: bool) -> str:
    """Say that there is no step, which clients take more precision away than there is, and what helps."""
    who = f"clients {least[:5]} know less than nothing of some direction" if least else "too much precision is taken"
    return (
        f"no step leads on to a posterior with variances: {who}, as where a client's likelihood is flat or nearly so. "
        "Declare priors that hold every scale, shared and local (not Gamma(.001, .001)), or "
        + (LESS_NOISE if noisy else "use local=fedppl.NUTS(draws=4000)")
    )


def shortest_step(clients: int) -> float:
    """The least damping that is tried: a quarter of 1 / K, with which q is a convex combination of proper Gaussians."""
    return 0.25 / clients


def judge(taken: Taken, last: Change, rows: list[int], tolerance: float, largest: float) -> Taken:
    """Set the next damping, and say whether this is converged.

    What clients say of their error starts the averaging, and too much of it keeps q from being called converged. How
    small the moves have to be does not depend on it: they are averaged with their signs, so that noise cancels, and
    compared with the errors of all but the client that says it has most; of that one's, what its replies show.
    """
    state = taken.state
    count = len(state.sites.where)
    change, turned, mc_error, fresh = last
    noisy = mc_error > tolerance
    averaging, moves, falls = state.averaging, state.moves, state.falls
    few, skewed = 3 * max(fresh, tolerance), ""
    drift = moves.mean.sum(axis=0)
    limit = max(tolerance, 3 * np.sqrt(_trust.backed_variance(moves, state.noise)))
    seen = averaging + 1 >= _ROUNDS and bool(np.all(moves.replies >= _REPLIES))
    if noisy and seen and np.abs(drift).max() > 2 * limit:
        # Not noise: q is on its way, and steps as short as those of averaging would take too long.
        moves, averaging, damping = _trust.averaged_anew(moves), 1, 0.5 * largest
    elif noisy and change < (2 * few if averaging else few):
        # down to noise: average the rounds, so that Monte Carlo error falls with their number
        moves = moves if averaging else _trust.forgotten(moves)
        averaging += 1
        damping = max(max(1.0 / (averaging + 1), LEAST) * largest, min(shortest_step(count), largest))
    elif change > state.change:
        # Steps that are too long turn back. Where the change grows on its way, as with other clients in every round,
        # they are not.
        averaging = 0
        shorten = turned or change > 2 * state.change
        damping, falls = (max(state.damping / 2, 1.0 / count), 0) if shorten else (state.damping, falls)
    else:
        # Faster with every fall: what shortened steps, such as clients whose replies were wrong, may be over.
        averaging, falls = 0, falls + 1
        damping = min(largest, 1.5**falls * state.damping)
    has_replied, sweep_change = state.has_replied.copy(), state.sweep_change + change
    has_replied[rows] = True
    swept = bool(np.all(has_replied))
    # One small change of a noisy sweep may be luck: with Monte Carlo error, rounds are averaged before it counts.
    quiet = swept and not noisy and sweep_change < tolerance
    averaged = seen and np.abs(drift).max() < limit
    left = float(np.sqrt(state.noise.sum()))
    if (quiet or (swept and noisy and averaged)) and left <= _MOST_ERROR_LEFT and not np.any(state.held):
        status = Status.CONVERGED
        message = "" if quiet else f"to Monte Carlo error, {mc_error:.2g} sd a round before averaging; {LESS_NOISE}"
        skewed = _skewed(state, max(_SKEWED, 3 * np.sqrt(6.0) * min(mc_error, _MOST_ERROR_LEFT)))
        skewed = "; ".join(filter(None, (skewed, _uncoupled(state.sites.structure))))
        message = "; ".join(filter(None, (message, far_off(state))))
    else:
        status = Status.RUNNING
        remedy = f"raise rounds=, or {LESS_NOISE}" if noisy else "raise rounds="
        sweep = "the last sweep" if swept else f"a sweep of which {int(has_replied.sum())} of {count} clients are done"
        message = f"{sweep} moved the posterior by {sweep_change:.2g} of its sds (tolerance {tolerance:g})"
        if sweep_change >= tolerance or not np.any(state.held):  # else no number of rounds helps
            message = f"{message}; {remedy}"
        if noisy and averaging and bool(np.all(state.moves.replies)):
            message = _noisy(state, state.moves.mean, drift, limit, left)
    state = state._replace(
        damping=damping,
        change=change,
        averaging=averaging,
        moves=moves,
        falls=falls,
        has_replied=np.zeros_like(has_replied) if swept else has_replied,
        sweep_change=0.0 if swept else sweep_change,
    )
    return taken._replace(state=state, status=status, message=message, skewed=skewed)


def _noisy(state: EPState, moves: Array, drift: Array, limit: float, left: float) -> str:
    """Why rounds that are averaged are not converged: too much error, too few rounds, or moves that go one way."""
    size, names, m = np.abs(drift), list(state.sites.where), len(state.sites.labels)
    worst = int(np.argmax(size))
    if size[worst] < limit:
        return (
            f"averaged to a Monte Carlo error of {left:.2g} posterior sds (at most {_MOST_ERROR_LEFT:g} is called "
            f"converged); raise rounds=, or {LESS_NOISE}"
        )
    who = int(np.argmax(np.abs(moves[:, worst])))
    label = ("" if worst < m else "the sd of ") + as_declared(state.sites.labels[worst % m])
    return (
        f"rounds are averaged, but what the clients move {label} by does not cancel: {drift[worst]:+.2g} posterior sds "
        f"a round (at most {limit:.2g}), of which client {names[who]} {moves[who, worst]:+.2g}; raise rounds=, look at "
        f"that client's data if it stays, or {LESS_NOISE}"
    )


def far_off(state: EPState) -> str:
    """Who pulls a mean further than chance would, given what the others know; empty where nobody does."""
    if len(state.sites.where) < 2:
        return ""
    k, i, pull = _strongest(_trust.pulls(state.sites))
    if abs(pull) <= -special.ndtri(0.5 * _BY_CHANCE / (len(state.sites.where) * len(state.sites.labels))):
        return ""
    return (
        f"client {list(state.sites.where)[k]} pulls {as_declared(state.sites.labels[i])} by {pull:+.2g} sds of "
        "what others know: look at its data, at the units first, though one that alone tells much of it does so "
        "honestly. fedppl.EP(trust=3) would hold it back"
    )


def unseen(state: EPState, clients: Collection[str]) -> EPState:
    """The state that knows whose rows nobody here can look at."""
    return state._replace(unseen=np.array([name in clients for name in state.sites.where]))


def of_agreeing_clients(taken: Taken, trust: float | None) -> Taken:
    """Not converged where a client whose rows nobody can look at decides against all others.

    Unless `trust` says how far one may pull.
    """
    state = taken.state
    if taken.status is not Status.CONVERGED or trust is not None or len(state.sites.where) < 2:
        return taken
    k, i, pull = _strongest(np.where(state.unseen[:, None], _trust.pulls(state.sites), 0.0))
    if abs(pull) <= _ALONE:
        return taken
    said = (
        f"moments are matched, but client {list(state.sites.where)[k]}, whose rows nobody here can look at, pulls "
        f"{state.sites.labels[i]} by {pull:+.2g} sds of what all others know (at most {_ALONE:g} is called converged): "
        "have its data looked at, the units first. EP(trust=3) holds it back; where it is right, "
        f"EP(trust={np.ceil(1.5 * abs(pull)):g}) takes it as it is"
    )
    return taken._replace(status=Status.STALLED, message="; ".join(filter(None, (said, taken.message))))


def _strongest(pulls: Array) -> tuple[int, int, float]:
    """Row, column and value of the largest pull in size."""
    pulls = np.nan_to_num(pulls)
    k, i = np.unravel_index(int(np.argmax(np.abs(pulls))), pulls.shape)
    return int(k), int(i), float(pulls[k, i])


def _uncoupled(form: Structure) -> str:
    """What a precision without some of its entries cannot have; empty where it has all, in whatever order."""
    if form.size == 1 or (form.blocks is not None and len(form.blocks) == 1):
        return ""
    return (
        "sds may be far too small where shared variables are correlated, which a "
        f"{'diagonal structure' if form.blocks is None else 'structure of blocks'} leaves out: "
        f'EP(structure="full") has that, and {diagnostics.CORRECTION} the posterior itself'
    )


def _skewed(state: EPState, limit: float) -> str:
    """The coordinates whose margins are too skewed for a Gaussian, and what to do; empty where there are none."""
    size = np.abs(state.skewness)
    worst = [int(i) for i in np.argsort(-size, kind="stable") if size[i] > limit]
    if not worst:
        return ""
    names = list(state.sites.where)
    named = ", ".join(
        f"{as_declared(state.sites.labels[i])} {state.skewness[i]:.1f}"
        # One client's word, of several, is told as such.
        + (
            f" ({round(float(state.skewness_without[i]), 1) + 0.0:.1f} without client {names[state.skewed_by[i]]})"
            if len(names) > 1 and abs(state.skewness_without[i]) <= limit
            else ""
        )
        for i in worst[:3]
    )
    more = f" and {len(worst) - 3} more" if len(worst) > 3 else ""
    return (
        f"rely on means more than on tails of what is skewed: {named}{more} on the scale that EP works on, where a "
        "Gaussian has a skewness of 0. Declare it on a scale where it is closer to normal, or use "
        f"{diagnostics.CORRECTION}; see fit.idata['fit']['skewness']"
    )


# Whom trust holds back ------------------------------------------------------------------------------------------------


def hold_back(taken: Taken, rows: list[int], bounded: Bounded, trust: float, step: float) -> Taken:
    """Count, report and log the clients that are held back; `step` is the share of their replies that was taken in.

    Who is within its bound again stays held until what it asked for since then has replaced what was drawn in.
    """
    _warn(bounded, trust)
    state, info = taken.state, taken.info
    left = state.held.copy()
    left[rows] *= 1 - step
    left[left < _LITTLE] = 0.0
    # Whose pull is not known is held for this round alone: nothing was drawn in.
    held = np.maximum(np.where(bounded.held, 1.0, left), np.where(bounded.unknown, _LITTLE, 0.0))
    pull = np.where((held > 0) & ~bounded.held, state.pull.T, _blamed(bounded, trust).T).T
    size = np.nan_to_num(np.abs(bounded.pull).max(axis=1), nan=-1.0)
    most = int(np.argmax(size))
    if size[most] >= 0:
        info = info._replace(pull=float(size[most]), pulled_by=list(state.sites.where)[most])
    return taken._replace(
        state=state._replace(held=held, held_back=state.held_back + bounded.held, pull=pull),
        info=info._replace(held_back=int(bounded.held.sum())),
    )


def named(taken: Taken, trust: float | None, bounded: Bounded | None = None) -> Taken:
    """The message with the names of the clients that are held back or, of a run that goes on, nearly so."""
    if trust is None:
        return taken
    state, rows = taken.state, np.flatnonzero(taken.state.held)
    nearly = bounded is not None and not len(rows) and taken.status is not Status.CONVERGED
    if bounded is not None and nearly:
        rows = np.flatnonzero(bounded.near)
    who = _said(state.sites, rows, state.pull, trust, nearly)
    return taken._replace(message="; ".join(filter(None, (taken.message, who)))) if who else taken


def _blamed(bounded: Bounded, trust: float) -> Array:
    """Pulls (K, m), with 0 for who is held back for its precision and not for how it pulls."""
    pull = np.nan_to_num(bounded.pull)
    within = np.abs(pull).max(axis=1) <= trust
    return np.where(((bounded.takes | bounded.gives) & within)[:, None], 0.0, pull)


def _warn(bounded: Bounded, trust: float) -> None:
    """One line in the log for every client that is held back; far from the mode honest factors may bend outwards."""
    names, labels, pull = list(bounded.sites.where), bounded.sites.labels, _blamed(bounded, trust)
    for k in np.flatnonzero(bounded.held):
        logger.log(
            logging.WARNING if np.any(pull[k]) else logging.INFO,
            "client %s held back: it %s (of what the others know), trust=%s",
            names[k],
            _pulls_where(pull[k], labels),
            trust,
            extra={"client": names[k], "status": "held back"},
        )


def _said(sites: Sites, rows: NDArray[np.intp], pull: Array, trust: float, nearly: bool = False) -> str:
    """Name the clients that are held back, or nearly so, and where they pull, or say nothing."""
    if not len(rows):
        return ""
    names = list(sites.where)
    rows = rows[np.argsort(-np.abs(pull[rows]).max(axis=1), kind="stable")]
    shown = [f"{names[k]} ({_pulls_where(pull[k], sites.labels)})" for k in rows[:5]]
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    what = "nearly held back" if nearly else "held back, since what the others know does not allow it"
    return f"{what}: {', '.join(shown)}{more}; look at their data, or raise trust={trust:g}"


def _pulls_where(pull: Array, labels: Sequence[str]) -> str:
    """Where a client that is held back pulls most; if nowhere, it is for its precision."""
    if not np.nanmax(np.abs(pull), initial=0.0) >= 1e-6:
        return "gives or takes more precision than the others allow"
    i = int(np.argmax(np.abs(pull)))
    return f"pulls {as_declared(labels[i])} by {pull[i]:+.2g} sds"


# After matching: what q cannot be, and the correction -----------------------------------------------------------------

# Posterior sds that q may still move by in a round, for a correction where rounds have run out.
_NEAR = 0.1


def of_one_mode(taken: Taken) -> Taken:
    """Not converged, however well moments are matched, where q is of one mode of several."""
    said = taken.state.starts.said if taken.state.starts is not None else ""
    return taken._replace(status=Status.STALLED, message=said, skewed="") if said else taken


def of_q_alone(taken: Taken) -> Taken:
    """Not converged, however well moments are matched, where skewness says that q has sds that are far too small."""
    state = taken.state
    noise = float(np.sqrt(6.0 / (1 + state.averaging)) * np.linalg.norm(state.errors))  # sd of a sum of skewnesses
    # What one client has all but alone is in the moments that are matched.
    of_several = np.sign(state.skewness) * state.skewness_without > _SEVERAL * np.abs(state.skewness)
    if not np.any(of_several & (np.abs(state.skewness) - noise > diagnostics.SKEWED)):
        return taken
    message = "; ".join(
        filter(None, (diagnostics.unknown_shortfall(diagnostics.CORRECTION), taken.message, taken.skewed))
    )
    return taken._replace(status=Status.STALLED, message=message, skewed="")


def corrected_next(taken: Taken, correction: Correction, trust: float | None) -> Taken:
    """Begin the correction in place of a converged end, where q is proper and small enough for it."""
    state = taken.state
    radius = np.inf if correction.radius is None else correction.radius
    begun = _correction.start(
        state.sites, state.skewness, correction.points, radius, state.stream, keep=trust is not None
    )
    said = f"before the correction: {taken.message}" if taken.message else ""
    return taken._replace(
        state=state._replace(correction=begun._replace(message=said)),
        status=Status.RUNNING,
        message="the correction is not done",
        skewed="",
    )


def out_of_rounds(state: EPState, correction: Correction, trust: float | None) -> EPState:
    """Correct q as it is, where it is near enough: the posterior that is found does not depend on q."""
    ready = state.corrects and state.warm_start is None and state.correction is None
    several = state.starts is not None and state.starts.said
    swept = state.change < _NEAR and not np.any(state.has_replied)  # by all clients, the last of them in this round
    if not ready or several or np.any(state.held) or not swept or not gaussian.is_proper(state.sites.q):
        return state
    moved = (
        f"rounds ran out while it still moved by {state.change:.2g} posterior sds: the posterior is that of the "
        "correction; raise rounds= where fit.posterior is used"
    )
    unknown = EPInfo("correction", np.nan, np.nan, state.damping, np.nan, np.nan, np.nan)
    return corrected_next(Taken(state, unknown, message=moved), correction, trust).state


def correcting_round(
    state: EPState, before: Correcting, replies: Mapping[str, Message], correction: Correction, trust: float | None
) -> Taken:
    """Clients' log factors taken in; converged once the reweighted points are to be trusted."""
    after = _correction.take(before, state.sites, replies)
    remedy = f"fedppl.EP(correction=fedppl.Correction(points={4 * correction.points}))"
    judged = _correction.judge(after, state.sites, correction.exchanges, state.stream, trust, remedy)
    found = judged.state.reweighted
    info = EPInfo("correction", np.nan, np.nan, state.damping, np.nan, np.nan, np.nan)
    if found is not None:
        info = info._replace(correction_ess=found.ess, correction_pareto_k=found.pareto_k)
    status = Status.RUNNING
    if judged.done:
        status = Status.CONVERGED if judged.state.trusted else Status.STALLED
    cause = hardly_a_prior(state.sites.prior, state.sites.labels) if status is Status.STALLED else ""
    message = "; ".join(filter(None, (judged.message, cause, judged.state.message)))
    return Taken(state._replace(correction=judged.state), info, status, message)
