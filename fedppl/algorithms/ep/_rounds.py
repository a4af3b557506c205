"""EP at the server: its state, and a round of each phase, which are warm start and matching of moments."""

from __future__ import annotations

import enum
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from fedppl import gaussian, structure
from fedppl.algorithms import tolerances as tol
from fedppl.algorithms.ep import _trust
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep import warm_start as _warm_start
from fedppl.algorithms.ep._trust import Bounded, Moves
from fedppl.algorithms.ep.sites import Sites
from fedppl.algorithms.ep.warm_start import Starts, WarmStart, pulls_alone, why_not_arrived
from fedppl.contracts import Report
from fedppl.contracts.algorithm import first_ending
from fedppl.results import diagnostics
from fedppl.structure import Structure
from fedppl.types import Array, Message, Status, as_declared

logger = logging.getLogger(__name__)


class Steps(NamedTuple):
    """How q moves while moments are matched."""

    damping: float
    falls: int  # rounds in which the change fell since the damping was last lowered
    change: float  # in the last round
    heading: Array  # (2 m,) move of means and log sds in the last round, in posterior sds before damping
    last_change: Array  # (m,) of a mean or a log sd in the last round, in posterior sds, before damping
    averaging: int  # rounds averaged since the change came down to Monte Carlo error
    has_replied: Array  # (K,) bool: in the current sweep
    sweep_change: float  # of the current sweep over all clients


class Skewed(NamedTuple):
    """Skewness of the posterior's margins by the clients' factors, which q cannot have."""

    total: Array  # (m,)
    by: Array  # (m,) row of the client without which it is least
    without: Array  # (m,) without that client


class OfClients(NamedTuple):
    """What is known of each client beside its site."""

    held: Array  # (K,) share of the site that trust keeps from what the client asked for
    pull: Array  # (K, m) of means before sites are drawn in, in sds of the cavity, where trust is set; 0 where unknown
    errors: Array  # (K,) Monte Carlo error of the client's last reply, in posterior sds
    noise: Array  # (K,) variance of the site by the errors of all its replies, in the same unit
    moves: Moves  # of the replies since averaging began
    unseen: Array  # (K,) bool: the client's rows are not in this process


class Look(enum.IntEnum):
    """When clients look for other modes of their own variables, which moments about one mode do not see."""

    LATER = 0
    NOW = 1  # in this sweep
    DONE = 2


class EPState(NamedTuple):
    """What the next round needs. Invariant: sites.q = prior x Π_k site_k."""

    prior_share: float  # 1 / K when the prior is not Gaussian: each factor's share of p / N_0
    sites: Sites
    warm_start: WarmStart | None  # None while moments are matched
    starts: Starts | None  # where several searches were asked for
    steps: Steps
    skewed: Skewed
    clients: OfClients
    look: int  # a `Look`


class EPInfo(NamedTuple):
    """Diagnostics of this round."""

    phase: str
    change_mean: float = np.inf  # largest |Δ mean| in posterior sds, before damping
    change_sd: float = np.inf  # largest |Δ log sd|, before damping
    damping: float = 1.0
    log_posterior: float = np.nan  # log marginal posterior at the point, warm start only
    mc_error: float = 0.0  # Monte Carlo error of the global mean in posterior sds
    skewness: float = np.nan  # largest |skewness| of a margin of the posterior, by the factors
    held_back: int = 0  # clients whose sites were drawn in, where trust is set
    pull: float = np.nan  # the largest pull of a client on a mean before sites are drawn in, in sds of its cavity
    pulled_by: str = ""  # that client


class Outcome(NamedTuple):
    """The server's state after a round, with its diagnostics and status."""

    state: EPState
    info: EPInfo
    status: Status = Status.RUNNING
    message: str | None = None


def reported(outcome: Outcome) -> tuple[EPState, Report]:
    """The state and the report; a converged fit does not warn where little is skewed and nobody is held back."""
    state = outcome.state
    mild = bool(np.abs(state.skewed.total).max() < tol.VERY_SKEWED and not np.any(state.clients.held))
    return state, Report(outcome.info, outcome.status, outcome.message, mild)


def _joined(*messages: str | None) -> str:
    return "; ".join(filter(None, messages))


# Warm start -----------------------------------------------------------------------------------------------------------


def newton_round(state: EPState, before: WarmStart, replies: Mapping[str, Message], trust: float | None) -> Outcome:
    """One round of the warm start; on arrival sites and q stay, and matching of moments begins."""
    sites, starts, bounded = state.sites, state.starts, None
    if starts is not None and not starts.asked_for and 0 < len(replies) < len(sites.where):
        # With few clients a round, further searches by default would take too many rounds.
        if starts.modes:
            ended, sites, _ = _warm_start.next_search(starts._replace(left=starts.left[:0]), sites, None)
            info = EPInfo("warm start", before.trial.change, log_posterior=before.objective)
            return Outcome(state._replace(sites=sites, starts=ended, warm_start=None), info)
        starts = None
    if replies:
        sites, after, bounded = _warm_start.step(sites, before, replies, trust)
    else:
        after = before._replace(heard=before.heard._replace(spent=before.heard.spent + 1.0))
    over = not after.arrived and after.heard.spent >= tol.SEARCH_BUDGET
    first = starts is None or not starts.modes  # search of several
    why = why_not_arrived(sites, after) if first and not after.arrived else ""
    if bounded is not None and not after.arrived and np.all(np.isnan(bounded.pull)):
        why = _joined(pulls_alone(sites, before.trial.point), why)
    info = EPInfo("warm start", after.trial.change, log_posterior=after.objective)
    outcome = Outcome(state._replace(sites=sites, starts=starts, warm_start=None if after.arrived else after), info)
    outcome = hold_back(outcome, _sites.indices(sites, replies), bounded, trust, 1.0)
    state, following, several = outcome.state, None, False
    if starts is not None and (after.arrived or (over and (starts.asked_for or not first))):
        mode = _warm_start.arrived_at(sites, after) if after.arrived else None
        starts, sites, following = _warm_start.next_search(starts, sites, mode)
        several = following is not None or bool(starts.modes)
        state = state._replace(starts=starts, sites=sites, warm_start=following) if several else state
    left = 0 if starts is None else len(starts.left) + 1
    status, message = first_ending(
        (following is not None, Status.RUNNING, f"{left} warm starts are left"),
        (several or after.arrived, Status.RUNNING, ""),  # moments are matched next
        (over, Status.STALLED, why),
        (True, Status.RUNNING, why),
    )
    return Outcome(state, outcome.info, status, _joined(message, named(state, trust)))


# Matching of moments: steps are halved until all is proper, then bounded by trust, and judged -------------------------

LESS_NOISE = "take more draws or points: local=fedppl.local.NUTS(draws=4000), or NestedLaplace(points=1024)"


def ep_round(
    state: EPState, replies: Mapping[str, Message], tolerance: float, largest: float, trust: float | None
) -> Outcome:
    """Moment matching: the clients' tilted natural parameters against q's."""
    if not replies:
        return Outcome(state, EPInfo("EP", 0.0, 0.0, state.steps.damping))
    sites, q, form = state.sites, state.sites.q, state.sites.structure
    target_linear, target_packed = _targets(form, replies)
    # A prior with correlations puts q outside a smaller family: its projection takes its place.
    inside = q if _sites.is_full(form) else structure.project(gaussian.mean(q), gaussian.covariance(q), form)
    # Cumulants of log factors add, so the small skewnesses of K tilted distributions make the posterior's.
    skewness = np.stack([reply["skewness"] for reply in replies.values()]) * len(sites.where) / len(replies)
    return damped_step(
        state,
        _sites.indices(sites, replies),
        target_linear - inside.linear,
        target_packed - _sites.in_structure(inside.precision, form),
        mc_errors=np.minimum([float(reply["mc_error"]) for reply in replies.values()], tol.MOST_CLAIMED),
        skewness=skewness,
        tolerance=tolerance,
        largest=largest,
        trust=trust,
    )


def _targets(form: Structure, replies: Mapping[str, Message]) -> tuple[Array, Array]:
    """Natural parameters of the clients' tilted distributions inside the family, packed."""
    means = np.stack([reply["mean"] for reply in replies.values()])
    precisions = gaussian.unpack_triangle(np.stack([reply["precision"] for reply in replies.values()]))
    if _sites.is_full(form):
        return np.einsum("kij,kj->ki", precisions, means), structure.pack_precision(precisions, form)
    projected = [structure.project(*pair, form) for pair in zip(means, np.linalg.inv(precisions), strict=True)]
    packed = _sites.in_structure(np.stack([g.precision for g in projected]), form)
    return np.stack([g.linear for g in projected]), packed


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
) -> Outcome:
    """Add δ times the clients' changes (R, m), (R, p) to their sites; δ keeps q and every cavity proper.

    `mc_errors` (R,) are those of the clients' means in posterior sds, `skewness` (R, m) their shares of the
    posterior's. With `trust`, sites are then drawn in, so that the ledger keeps the bound of `_trust`.
    """
    sites, q = state.sites, state.sites.q
    # Averaged over rounds, as the sites are.
    total = state.skewed.total + (skewness.sum(axis=0) - state.skewed.total) / (1 + state.steps.averaging)
    by = np.argmax(np.sign(total) * skewness, axis=0)
    skewed = float(np.abs(total).max())
    errors = state.clients.errors.copy()
    errors[rows] = mc_errors
    mc_error, fresh = float(np.linalg.norm(errors)), float(np.linalg.norm(mc_errors))
    delta, moved, bounded = _backtracked(state, rows, d_linear, d_packed, largest, trust)
    if moved is None:
        outcome = Outcome(state, EPInfo("EP", damping=0.0, mc_error=mc_error, skewness=skewed))
        state, info, *_ = hold_back(outcome, [], bounded, trust, 0.0)
        message = _joined(_no_step(state, rows, d_packed, noisy=mc_error > tolerance), named(state, trust))
        return Outcome(_looking(state), info, message=message)
    sd, new_sd = gaussian.standard_deviations(q), gaussian.standard_deviations(moved.q)
    heading = np.concatenate([(gaussian.mean(moved.q) - gaussian.mean(q)) / sd, np.log(new_sd / sd)]) / delta
    turned = bool(heading @ state.steps.heading <= 0)
    shift, stretch = np.split(np.abs(heading), 2)
    info = EPInfo("EP", float(np.max(shift)), float(np.max(stretch)), delta, mc_error=mc_error, skewness=skewed)
    # A site is a weighted mean of its client's replies, each with an error of its own. The remainder of the first site
    # counts as a reply with that error.
    noise = state.clients.noise.copy()
    averaged = (1 - delta) ** 2 * noise[rows] + (delta * mc_errors) ** 2
    noise[rows] = np.where(noise[rows] > 0, averaged, mc_errors**2)
    moves = state.clients.moves
    if state.steps.averaging:
        new = _trust.moves_of(q, d_linear, structure.unpack_precision(d_packed, sites.structure))
        moves = _trust.followed(moves, rows, new, delta)
    without = total - np.take_along_axis(skewness, by[None], axis=0)[0]
    state = state._replace(
        sites=moved,
        steps=state.steps._replace(damping=delta, last_change=np.maximum(shift, stretch), heading=heading),
        skewed=Skewed(total, np.asarray(rows)[by], without),
        clients=state.clients._replace(errors=errors, noise=noise, moves=moves),
    )
    outcome = hold_back(Outcome(state, info), rows, bounded, trust, delta)
    return judge(outcome, rows, turned, fresh, tolerance, largest, trust, bounded)


def _backtracked(
    state: EPState, rows: list[int], d_linear: Array, d_packed: Array, largest: float, trust: float | None
) -> tuple[float, Sites | None, Bounded | None]:
    """δ, halved until q is proper and no more cavities are improper than before, and the sites or None."""
    sites, delta, bounded = state.sites, state.steps.damping, None
    improper = _sites.improper_cavities(sites)
    # At δ = 1/K the new q is a convex combination of proper Gaussians; below it only cavities can be improper.
    while delta >= min(shortest_step(len(sites.where)), largest):
        linear, precision = sites.linear.copy(), sites.precision.copy()
        linear[rows] += delta * d_linear
        precision[rows] += delta * d_packed
        moved = _sites.update(sites, linear, precision)
        if trust is not None:
            bounded = _trust.bound(moved, trust)
            moved = bounded.sites
        if gaussian.is_proper(moved.q) and _sites.improper_cavities(moved) <= improper:
            return delta, moved, bounded
        delta /= 2
    return delta, None, bounded


def _no_step(state: EPState, rows: list[int], d_packed: Array, noisy: bool) -> str:
    """No step keeps q proper: the clients that take away more precision than there is, and what helps."""
    sites, who = state.sites, "too much precision is taken"
    if not np.any(state.clients.held):  # a client that is held back may be why others lack precision
        _, root = gaussian.affine(sites.q)
        lost = np.linalg.eigvalsh(root.T @ structure.unpack_precision(d_packed, sites.structure) @ root)[:, 0]
        names = list(sites.where)
        least = [names[rows[r]] for r in np.argsort(lost, kind="stable") if lost[r] < tol.TAKES_MOST * min(lost)]
        who = f"clients {least[:5]} take more precision than there is" if least else who
    return (
        f"no step leads on to a posterior with variances: {who}. Declare priors that hold every scale, shared and "
        f"local (not Gamma(.001, .001)), or {LESS_NOISE if noisy else 'use local=fedppl.local.NUTS(draws=4000)'}"
    )


def shortest_step(clients: int) -> float:
    """The least damping that is tried: a quarter of 1 / K, with which q is a convex combination of proper Gaussians."""
    return tol.SHORTEST_STEP / clients


def judge(
    outcome: Outcome,
    rows: list[int],
    turned: bool,
    fresh: float,
    tolerance: float,
    largest: float,
    trust: float | None = None,
    bounded: Bounded | None = None,
) -> Outcome:
    """Set the next damping, and decide whether q has converged.

    The change has `turned` where it opposes that of the round before; `fresh` is the error of this round's replies.
    The clients' own errors start the averaging of rounds, and keep q from converging where they are too large. Moves
    are averaged with their signs, so that noise cancels, and compared with errors that no client can raise alone.
    """
    state, mc_error, moves = outcome.state, outcome.info.mc_error, outcome.state.clients.moves
    change = max(outcome.info.change_mean, outcome.info.change_sd)
    noisy, held = mc_error > tolerance, bool(np.any(state.clients.held))
    drift = moves.mean.sum(axis=0)
    limit = max(tolerance, tol.NOISE_SDS * np.sqrt(_trust.backed_variance(moves, state.clients.noise)))
    seen = state.steps.averaging + 1 >= tol.AVERAGED_ROUNDS and bool(np.all(moves.replies >= tol.AVERAGED_REPLIES))
    drifts = bool(noisy and seen and np.abs(drift).max() > tol.DRIFTS * limit)
    few = tol.NOISE_SDS * max(fresh, tolerance)
    after = _next_damping(state, change, few, turned=turned, noisy=noisy, drifts=drifts, largest=largest)
    has_replied, sweep_change = state.steps.has_replied.copy(), state.steps.sweep_change + change
    has_replied[rows] = True
    swept = bool(np.all(has_replied))
    # One small change of a noisy sweep may be luck: with Monte Carlo error, rounds are averaged before it counts.
    quiet = swept and not noisy and sweep_change < tolerance
    averaged = swept and noisy and seen and np.abs(drift).max() < limit
    error, progress, remark = float(np.sqrt(state.clients.noise.sum())), "", ""
    if (quiet or averaged) and error <= tol.MOST_ERROR_LEFT and not held:
        remark = "" if quiet else f"to Monte Carlo error, {mc_error:.2g} sd a round before averaging; {LESS_NOISE}"
        least = max(tol.SKEWED_MARGIN, tol.NOISE_SDS * np.sqrt(6.0) * min(mc_error, tol.MOST_ERROR_LEFT))
        remark = _joined(remark, far_off(state), _skewed(state, least), _uncoupled(state))
    elif noisy and after.steps.averaging and np.all(moves.replies):
        progress = _noisy(state, drift, limit, error)
    else:
        done = f"{has_replied.sum()} of {len(has_replied)}"
        sweep = "the last sweep" if swept else f"a sweep of which {done} clients are done"
        progress = f"{sweep} moved the posterior by {sweep_change:.2g} of its sds (tolerance {tolerance:g})"
        if sweep_change >= tolerance or not held:  # else no number of rounds helps
            progress = f"{progress}; raise rounds={f', or {LESS_NOISE}' if noisy else ''}"
    steps = after.steps._replace(
        change=change,
        has_replied=np.zeros_like(has_replied) if swept else has_replied,
        sweep_change=0.0 if swept else sweep_change,
    )
    after = _looking(after._replace(steps=steps))
    said = "" if after.starts is None else after.starts.said
    why = "" if progress else refused(after, trust)
    ending = first_ending(
        (progress, Status.RUNNING, _joined(progress, named(state, trust, bounded))),
        (after.look != Look.DONE, Status.RUNNING, "clients have not looked for other modes yet: raise rounds="),
        (said, Status.STALLED, said),
        (why, Status.STALLED, _joined(why, remark)),
        (True, Status.CONVERGED, remark),
    )
    return Outcome(after, outcome.info, *ending)


def _next_damping(
    state: EPState, change: float, few: float, *, turned: bool, noisy: bool, drifts: bool, largest: float
) -> EPState:
    """The state with the damping of the next round, and how many rounds are averaged; q `drifts` despite its noise.

    A change below a `few` errors is noise.
    """
    averaging, falls = state.steps.averaging, state.steps.falls
    moves, count = state.clients.moves, len(state.sites.where)
    if drifts:
        # The steps of averaging are too short for a q that still moves.
        moves, averaging, damping = _trust.averaged_anew(moves), 1, tol.DRIFT_DAMPING * largest
    elif noisy and change < (tol.STILL_NOISE * few if averaging else few):
        # Down to noise: rounds are averaged, so that Monte Carlo error falls with their number.
        moves = moves if averaging else _trust.no_moves(count, len(state.sites.labels))
        averaging += 1
        damping = max(max(1.0 / (averaging + 1), tol.LEAST_WEIGHT) * largest, min(shortest_step(count), largest))
    elif change > state.steps.change:
        # Steps that are too long turn back. A change that grows without turning may be that of other clients.
        averaging = 0
        shorten = turned or change > tol.GROWN * state.steps.change
        damping, falls = (max(state.steps.damping / 2, 1.0 / count), 0) if shorten else (state.steps.damping, falls)
    else:
        # Longer with every fall: the cause of short steps, such as wrong replies, may be over.
        averaging, falls = 0, falls + 1
        damping = min(largest, tol.DAMPING_GROWTH**falls * state.steps.damping)
    steps = state.steps._replace(damping=damping, averaging=averaging, falls=falls)
    return state._replace(steps=steps, clients=state.clients._replace(moves=moves))


def _noisy(state: EPState, drift: Array, limit: float, error: float) -> str:
    """Why rounds that are averaged are not converged: too much error, too few rounds, or moves that go one way."""
    names, m, moves = list(state.sites.where), len(state.sites.labels), state.clients.moves.mean
    worst = int(np.argmax(np.abs(drift)))
    if abs(drift[worst]) < limit:
        averaged = f"averaged to a Monte Carlo error of {error:.2g} posterior sds (at most {tol.MOST_ERROR_LEFT:g})"
        return f"{averaged}; raise rounds=, or {LESS_NOISE}"
    who = int(np.argmax(np.abs(moves[:, worst])))
    label = ("" if worst < m else "the sd of ") + as_declared(state.sites.labels[worst % m])
    return (
        f"what clients move {label} by does not cancel: {drift[worst]:+.2g} posterior sds a round (at most "
        f"{limit:.2g}), of which client {names[who]} {moves[who, worst]:+.2g}; look at its data, or {LESS_NOISE}"
    )


def far_off(state: EPState) -> str:
    """The client that pulls a mean further than by chance, given what the others know; empty where none does."""
    who, label, pull = _strongest(state.sites, np.ones(len(state.sites.where)))
    if abs(pull) <= -special.ndtri(0.5 * tol.PULL_CHANCE / state.clients.pull.size):
        return ""
    return (
        f"client {who} pulls {as_declared(label)} by {pull:+.2g} sds of what others know: look at its data, the units "
        "first, unless it alone has data on it. fedppl.EP(trust=3) would hold it back"
    )


def mark_unseen(state: EPState, clients: Collection[str]) -> EPState:
    """Mark the clients whose rows are not in this process."""
    unseen = np.array([name in clients for name in state.sites.where])
    return state._replace(clients=state.clients._replace(unseen=unseen))


def _strongest(sites: Sites, among: Array) -> tuple[str, str, float]:
    """Client and coordinate of the largest pull in size, and its value, among some clients; 0 of a client alone."""
    if len(sites.where) < 2:
        return "", "", 0.0
    pulls = np.where(among[:, None], np.nan_to_num(_trust.pulls(sites)), 0.0)
    k, i = np.unravel_index(int(np.argmax(np.abs(pulls))), pulls.shape)
    return list(sites.where)[k], sites.labels[i], float(pulls[k, i])


def _uncoupled(state: EPState) -> str:
    """A precision without some of its entries has no correlations there; empty where it has all entries."""
    form = state.sites.structure
    if _sites.is_full(form):
        return ""
    kind = "diagonal structure" if structure.packed_size(form) == form.size else "structure of blocks"
    remedy = f'EP(structure="full") has that, and {_exact(state)} the posterior itself'
    return f"sds may be far too small where shared variables are correlated, which a {kind} leaves out: {remedy}"


def _exact(state: EPState) -> str:
    return diagnostics.exact(at_sites=bool(np.any(state.clients.unseen)))


def _skewed(state: EPState, limit: float) -> str:
    """Coordinates whose margins are too skewed for a Gaussian, and what to do; empty where there are none."""
    total, by, without = state.skewed
    worst = [int(i) for i in np.argsort(-np.abs(total), kind="stable") if abs(total[i]) > limit]
    if not worst:
        return ""
    names, shown = list(state.sites.where), []
    for i in worst[:3]:
        of_one = len(names) > 1 and abs(without[i]) <= limit  # a skewness that one client of several makes
        cause = f" ({round(float(without[i]), 1) + 0.0:.1f} without client {names[by[i]]})" if of_one else ""
        shown.append(f"{as_declared(state.sites.labels[i])} {total[i]:.1f}{cause}")
    more = f" and {len(worst) - 3} more" if len(worst) > 3 else ""
    return (
        f"rely on means more than on tails of what is skewed: {', '.join(shown)}{more} on the scale that EP works on. "
        f"Declare it closer to normal, or use {_exact(state)}; see fit.idata['fit']['skewness']"
    )


# Whom trust holds back ------------------------------------------------------------------------------------------------


def hold_back(outcome: Outcome, rows: list[int], bounded: Bounded | None, trust: float | None, step: float) -> Outcome:
    """Count, report and log the clients that are held back; `step` is the share of their replies that was taken.

    A client within its bound again stays held until later replies have replaced what was drawn in.
    """
    if bounded is None or trust is None:
        return outcome
    state, info, names = outcome.state, outcome.info, list(outcome.state.sites.where)
    # Pulls of clients that are held back for their precision are not to blame.
    pull, largest = np.nan_to_num(bounded.pull), np.abs(bounded.pull).max(axis=1)
    of_precision = (bounded.takes | bounded.gives) & (np.nan_to_num(largest) <= trust)
    pull = np.where(of_precision[:, None], 0.0, pull)
    for k in np.flatnonzero(bounded.held):
        logger.log(
            logging.WARNING if np.any(pull[k]) else logging.INFO,  # honest factors may have such precisions
            "client %s held back: it %s (of what the others know), trust=%s",
            names[k],
            _where_it_pulls(pull[k], state.sites.labels),
            trust,
            extra={"client": names[k], "status": "held back"},
        )
    remaining = state.clients.held.copy()
    remaining[rows] *= 1 - step
    remaining[remaining < tol.LITTLE_LEFT] = 0.0
    # A client whose pull is not known is held for this round alone: nothing was drawn in.
    held = np.maximum(np.where(bounded.held, 1.0, remaining), np.where(bounded.unknown, tol.LITTLE_LEFT, 0.0))
    pull = np.where(((held > 0) & ~bounded.held)[:, None], state.clients.pull, pull)
    if not np.all(np.isnan(largest)):
        most = int(np.nanargmax(largest))
        info = info._replace(pull=float(largest[most]), pulled_by=names[most])
    return outcome._replace(
        state=state._replace(clients=state.clients._replace(held=held, pull=pull)),
        info=info._replace(held_back=int(bounded.held.sum())),
    )


def named(state: EPState, trust: float | None, bounded: Bounded | None = None) -> str:
    """The clients that are held back or, while the run goes on, nearly so, and where they pull."""
    if trust is None:
        return ""
    sites, pull = state.sites, state.clients.pull
    rows, what = np.flatnonzero(state.clients.held), "held back, since what the others know does not allow it"
    if bounded is not None and not len(rows):
        rows, what = np.flatnonzero(bounded.near), "nearly held back"
    if not len(rows):
        return ""
    names = list(sites.where)
    rows = rows[np.argsort(-np.abs(pull[rows]).max(axis=1), kind="stable")]
    shown = [f"{names[k]} ({_where_it_pulls(pull[k], sites.labels)})" for k in rows[:5]]
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    return f"{what}: {', '.join(shown)}{more}; look at their data, or raise trust={trust:g}"


def _where_it_pulls(pull: Array, labels: Sequence[str]) -> str:
    """Where a client that is held back pulls most; nowhere, if it is for its precision."""
    if not np.nanmax(np.abs(pull), initial=0.0) >= tol.NO_PULL:
        return "gives or takes more precision than the others allow"
    i = int(np.argmax(np.abs(pull)))
    return f"pulls {as_declared(labels[i])} by {pull[i]:+.2g} sds"


# After matching: what q cannot be -------------------------------------------------------------------------------------


def _looking(state: EPState) -> EPState:
    """Have all clients of a sweep look for other modes of their own variables, near the end; nothing ends before it."""
    if np.any(state.steps.has_replied):  # within a sweep
        return state
    look = Look.DONE if state.look else Look.NOW if state.steps.change < tol.LOOK_NEAR else Look.LATER
    return state._replace(look=int(look))


def refused(state: EPState, trust: float | None) -> str:
    """What shows that q is not the posterior, however well moments are matched; empty where nothing does."""
    return _too_skewed(state) or ("" if trust is not None else _pulls_unseen(state))


def _too_skewed(state: EPState) -> str:
    """Skewness that shows that q's sds are far too small; empty where there is none."""
    # sd of a sum of skewnesses
    noise = float(np.sqrt(6.0 / (1 + state.steps.averaging)) * np.linalg.norm(state.clients.errors))
    # The skewness of one client is in the moments that are matched.
    of_several = np.sign(state.skewed.total) * state.skewed.without > tol.SEVERAL * np.abs(state.skewed.total)
    if not np.any(of_several & (np.abs(state.skewed.total) - noise > diagnostics.SKEWED)):
        return ""
    cause = diagnostics.hardly_a_prior(state.sites.labels, gaussian.standard_deviations(state.sites.prior))
    return _joined(diagnostics.unknown_shortfall(_exact(state)), cause)


def _pulls_unseen(state: EPState) -> str:
    """A client whose rows are not here and that pulls against all others; empty where there is none."""
    who, label, pull = _strongest(state.sites, state.clients.unseen)
    if abs(pull) <= tol.MOST_PULL:
        return ""
    return (
        f"client {who}, whose rows nobody here can look at, pulls {label} by {pull:+.2g} sds of what all others know "
        f"(at most {tol.MOST_PULL:g}): have its data looked at, or EP(trust=3) hold it back; where it is right, "
        f"EP(trust={np.ceil(tol.ROOM_FOR_PULL * abs(pull)):g}) takes it as it is"
    )
