"""Whether EP has converged, the next damping, and what to say of both."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from scipy import special

from fedppl import gaussian
from fedppl.algorithms.ep import _trust
from fedppl.algorithms.ep._correction import Correcting
from fedppl.algorithms.ep.sites import Sites
from fedppl.algorithms.ep.starts import Starts
from fedppl.algorithms.ep.warm_start import WarmStart
from fedppl.contracts import Report
from fedppl.gaussian import Gaussian
from fedppl.results import diagnostics
from fedppl.structure import Structure
from fedppl.types import Array, Status, as_declared

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


class Change(NamedTuple):
    """What a round did to q."""

    size: float  # largest of a mean or a log sd, in posterior sds before damping
    turned: bool  # it did not go on in the direction of the round before
    mc_error: float  # of all clients' last replies
    fresh: float  # of this round's


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
    limit = max(tolerance, 3 * np.sqrt(backed(moves, state.noise)))
    seen = averaging + 1 >= _ROUNDS and bool(np.all(moves.replies >= _REPLIES))
    if noisy and seen and np.abs(drift).max() > 2 * limit:
        # Not noise: q is on its way, and steps as short as those of averaging would take too long.
        moves, averaging, damping = anew(moves), 1, 0.5 * largest
    elif noisy and change < (2 * few if averaging else few):
        # down to noise: average the rounds, so that Monte Carlo error falls with their number
        moves = moves if averaging else begin(moves)
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


# What the server itself sees of the clients' noise: how far each reply moves q, and how much of that cancels ----------

# A reply proposes a site; its move is what q's means and log sds would do if that site replaced the old one, in
# posterior sds. While rounds are averaged, moves of honest clients cancel, since only Monte Carlo error is left in
# them. Moves that do not cancel are those of a client that goes on and on, whatever error it says it has.

LEAST = 0.1  # weight of a reply, as of a step: Monte Carlo error falls no further


class Moves(NamedTuple):
    """Per client since averaging began. Coordinates are those of the means, then those of the log sds."""

    replies: Array  # (K,) int
    mean: Array  # (K, 2 m) weighted mean of the client's moves
    share: Array  # (K,) what the variance of one move is to be multiplied with for that of the mean
    spoke: Array  # (K,) bool: has replied, so that the next two are known
    pairs: Array  # (K,) int: replies whose difference from the one before is in the scatter
    left: Array  # (K, 2 m) what its last reply would still have moved after the step that was taken
    scatter: Array  # (K,) mean square of what its replies differ by from one to the next, halved: their variance


def start(clients: int, size: int) -> Moves:
    """Nothing is known."""
    none, nowhere = np.zeros(clients), np.zeros((clients, 2 * size))
    nothing: Array = np.zeros(clients, dtype=np.int64)
    return Moves(nothing, nowhere, none, np.zeros(clients, dtype=bool), nothing, nowhere, none)


def begin(moves: Moves) -> Moves:
    """Forget what there was: averaging begins anew."""
    clients, double = moves.mean.shape
    return start(clients, double // 2)


def anew(moves: Moves) -> Moves:
    """Average from the next reply on, and remember what is known of their scatter."""
    return moves._replace(replies=np.zeros_like(moves.replies))


def of_replies(q: Gaussian, d_linear: Array, d_precision: Array) -> Array:
    """To first order, what changes (R, m), (R, m, m) of sites do to q's means and log sds, in sds: (R, 2 m)."""
    covariance = gaussian.covariance(q)
    sd = np.sqrt(np.diag(covariance))
    means = (d_linear - d_precision @ gaussian.mean(q)) @ covariance / sd
    log_sds = -0.5 * np.einsum("ij,rjk,ki->ri", covariance, d_precision, covariance, optimize=True) / sd**2
    return np.concatenate([means, log_sds], axis=1)


def follow(moves: Moves, rows: list[int], now: Array, step: Array) -> Moves:
    """Take in the moves (R, 2 m) of a round's replies, of which the shares `step` (R,) were taken."""
    replies, mean, share = moves.replies.copy(), moves.mean.copy(), moves.share.copy()
    left, scatter = moves.left.copy(), moves.scatter.copy()
    # A reply minus what the one before had left to do is the difference of the two proposals.
    differ = now - left[rows]
    known, spoke = moves.spoke[rows], moves.spoke.copy()
    spoke[rows] = True
    square = 0.5 * np.mean(np.square(differ), axis=1)
    pairs = moves.pairs.copy()
    pairs[rows] += known
    weight = np.maximum(1.0 / np.maximum(pairs[rows], 1), LEAST)
    scatter[rows] += np.where(known, (square - scatter[rows]) * weight, 0.0)
    replies[rows] += 1
    weight = np.maximum(1.0 / replies[rows], LEAST)
    mean[rows] += weight[:, None] * (now - mean[rows])
    share[rows] = (1 - weight) ** 2 * share[rows] + weight**2  # 1 for the first
    left[rows] = (1 - step)[:, None] * now
    return Moves(replies, mean, share, spoke, pairs, left, scatter)


def backed(moves: Moves, noise: Array) -> float:
    """Variance of a mean that the clients' own errors (K,), averaged, can explain and nobody's word alone can raise.

    The largest counts as far as that client's replies do scatter.
    """
    k = int(np.argmax(noise))
    return float(noise.sum() - noise[k] + min(noise[k], moves.share[k] * moves.scatter[k]))


# What EP knows between rounds, and what it says of one ----------------------------------------------------------------

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
