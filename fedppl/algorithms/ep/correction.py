"""The correction: clients answer log f_k at points that reach beyond q, and the reweighted points are the posterior.

No f_k depends on q, so that answers of several rounds are used together. The ledger of sites stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import spatial

from fedppl import gaussian, settings
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep.sites import NO_VALUE, Sites
from fedppl.contracts import ClientUpdate, ClientView, Constant, LocalInference
from fedppl.gaussian import Gaussian
from fedppl.numerics import importance, region
from fedppl.numerics.importance import skewness
from fedppl.numerics.proposals import Proposal, beyond, has_heavy_tails, points_of, with_tails
from fedppl.numerics.region import SCRAMBLES, Beyond
from fedppl.numerics.reweighting import (
    FEWEST,
    MOST_ERROR,
    MOST_SECOND_K,
    Reweighted,
    apart,
    declared_error,
    is_trusted,
    reweigh,
)
from fedppl.types import Array, DeclarationError, Message, as_declared

_MOST, _MOST_EXCHANGES = 2**20, 8


@dataclass(frozen=True)
class Correction:
    r"""One more exchange after EP, which turns its Gaussian into the posterior.

    .. math:: w_s \propto \frac{p(\varphi_s) \prod_k f_k(\varphi_s)}{g(\varphi_s)}, \qquad
              E[h] = E_q[h] + \sum_s (w_s - u_s)\, h(\varphi_s), \qquad u_s \propto q(\varphi_s) / g(\varphi_s)

    Clients answer log f_k at scrambled Sobol points φ_s of g: a multivariate t that reaches beyond q, and others along
    the longer tails of skewed coordinates. Where the weights are not to be trusted, g is fitted to the weighted points,
    and another exchange follows.

    Parameters
    ----------
    points
        Largest number of points of the first exchange, a multiple of 8 and at least 512: fewer do not tell their own
        error. Each further exchange has twice as many.
    exchanges
        Largest number of exchanges, at most 8.
    radius
        Largest distance of a point from the prior's mean, per coordinate, in prior sds, as `distance` of
        `fedppl.Policy`; None asks for all. Sites that allow less say so with their first answers, and from then on the
        proposal is truncated at the least of these distances.

    Raises
    ------
    DeclarationError
        For numbers out of range.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.EP(correction=fedppl.Correction(points=2048)).name
    'EP'

    Notes
    -----
    *When this fails.* Where q is far from the posterior (many shared coordinates, heavy tails), few points have all the
    weight: the status then says so, with the coordinate. A mode apart from q's has no point near it: ``EP(starts=...)``
    looks for it. Beyond a radius q stands for the posterior, and where the mass there may move a mean or a log sd by
    more than 0.05 sds, the status says so, with the site whose policy has it. Values of log f_k at so many points tell
    more of a client's data than moments do; sites of their own are not asked for them unless this is in the call and
    their policy allows it.

    References
    ----------
    .. [1] Vehtari et al. (2024), Pareto smoothed importance sampling, JMLR 25.
    .. [2] Owen, Zhou (2000), Safe and effective importance sampling, JASA 95.
    """

    points: int = 1024
    exchanges: int = 5
    radius: float | None = None

    def __post_init__(self) -> None:
        """Check every value."""
        settings.whole("points", self.points, 64 * SCRAMBLES)
        if self.points > _MOST:
            raise DeclarationError(f"points={self.points}: at most {_MOST} fit into memory for every client.")
        if self.points % SCRAMBLES:
            raise DeclarationError(
                f"points={self.points} must be a multiple of {SCRAMBLES}, one part for each scramble; take "
                f"{-(-self.points // SCRAMBLES) * SCRAMBLES}."
            )
        settings.whole("exchanges", self.exchanges)
        if self.exchanges > _MOST_EXCHANGES:
            raise DeclarationError(
                f"exchanges={self.exchanges}: at most {_MOST_EXCHANGES}, since each has twice as many points as the "
                "one before; raise points= in its place."
            )
        if self.radius is not None:
            settings.positive("radius", self.radius, "it is in prior sds, or None for no bound")


# Points and answers of an exchange -----------------------------------------------------------------------------------

_MOST_REPORTED, _MOST_VALUE = 1e6, 1e9
_WIDER = 1.2  # sds of the first proposal, in those of q
_IN_ALL = 31  # points of five exchanges, in those of the first
_KEPT = 2**23  # most numbers of single clients' answers that are kept, which tell each client's effect


class Correcting(NamedTuple):
    """Points of all exchanges so far, and their answers."""

    proposals: tuple[Proposal, ...]
    latest: int  # number of proposals of this exchange
    exchanges: int  # so far, with this one
    points: Array  # (J S, m)
    radius: float  # prior sds from the prior's mean within which clients are asked
    reach: Array  # (K,) those within which each client answers; infinite without a bound, or before its first answer
    within: NDArray[np.bool_]  # (J S,) whether a point is within all of these; no others are asked for
    residual: Array  # (J S,) Σ_k log f_k − log q_k over clients that answered; NaN beyond, or where one had no value
    each: Array  # (K, J S) its terms; (0, J S) where they are too many to be kept
    distrusted: NDArray[np.bool_]  # (K,) moved the posterior by more than trust allows; their sites stand for them
    alike: Array  # (J S,) Σ_k errors
    noise: Array  # (J S,) Σ_k squared errors
    errors: Array  # (K, J S) errors; (0, J S) where they are too many to be kept
    constants: Array  # (K, 2) errors of a constant in each client's values: alike over clients, and by chance
    answered: NDArray[np.bool_]  # (K,) in this exchange
    missing: NDArray[np.bool_]  # (K,) did not answer in an exchange, so that its site stands for it
    waited: int  # rounds without a new answer
    rounds: int  # of this exchange
    is_proper: bool  # whether every client knows the normalising constant of its local prior
    reweighted: Reweighted | None  # once an exchange is over
    growth: float  # of a log sd, the largest, from the exchange before to that one; 0 for the first
    trusted: bool
    message: str  # of the matching of moments, at its end


def start(sites: Sites, skewed: Array, points: int, radius: float, stream: int, *, keep: bool) -> Correcting:
    """The first exchange, around q and along its skewness; `keep` keeps single answers however many they are."""
    covariance = gaussian.covariance(sites.q) * _WIDER**2
    proposals = with_tails(gaussian.mean(sites.q), covariance, points // region.SCRAMBLES, skewed)
    count = len(sites.where)
    kept = count if keep or count * points * _IN_ALL <= _KEPT else 0
    return exchange(blank(count, len(covariance), kept)._replace(radius=radius), sites, proposals, stream)


def blank(count: int, size: int, kept: int) -> Correcting:
    """The state of `count` clients in `size` coordinates before an exchange; single answers are kept of `kept`."""
    return Correcting(
        proposals=(),
        latest=0,
        exchanges=0,
        points=np.zeros((0, size)),
        radius=np.inf,
        reach=np.full(count, np.inf),
        within=np.zeros(0, dtype=bool),
        residual=np.zeros(0),
        each=np.zeros((kept, 0)),
        distrusted=np.zeros(count, dtype=bool),
        alike=np.zeros(0),
        noise=np.zeros(0),
        errors=np.zeros((kept, 0)),
        constants=np.zeros((count, 2)),
        answered=np.zeros(count, dtype=bool),
        missing=np.zeros(count, dtype=bool),
        waited=0,
        rounds=0,
        is_proper=True,
        reweighted=None,
        growth=0.0,
        trusted=False,
        message="",
    )


def exchange(state: Correcting, sites: Sites, proposals: tuple[Proposal, ...], stream: int) -> Correcting:
    """One more exchange, with points of these proposals added."""
    first = stream + len(state.proposals)
    fresh = np.concatenate([points_of(proposal, first + number) for number, proposal in enumerate(proposals)])
    zeros, zeros_each = np.zeros(len(fresh)), np.zeros((len(state.each), len(fresh)))
    state = state._replace(
        proposals=(*state.proposals, *proposals),
        latest=len(proposals),
        exchanges=state.exchanges + 1,
        points=np.concatenate([state.points, fresh]),
        residual=np.concatenate([state.residual, zeros]),
        each=np.concatenate([state.each, zeros_each], axis=1),
        alike=np.concatenate([state.alike, zeros]),
        noise=np.concatenate([state.noise, zeros]),
        errors=np.concatenate([state.errors, zeros_each], axis=1),
        answered=np.zeros_like(state.answered),
        waited=0,
        rounds=0,
    )
    return _truncated(state, sites)


def _truncated(state: Correcting, sites: Sites) -> Correcting:
    """Points beyond the reach of any client have no value."""
    within = region.within(sites.prior, reached(state), state.points)
    return state._replace(
        within=within, residual=np.where(within, state.residual, np.nan), each=np.where(within, state.each, np.nan)
    )


def reached(state: Correcting) -> float:
    """Prior sds from the prior's mean within which points are asked for."""
    return float(np.min(state.reach[~state.distrusted], initial=state.radius))


def weighed(state: Correcting, q: Gaussian, residual: Array) -> Reweighted | None:
    """The posterior by all exchanges' points; its integral by those of the last exchange alone.

    Proposals are fitted to earlier points, in many coordinates to their chance too. Under the mixture of all, earlier
    points then lie where a proposal is dense, and the integral is too small. Half of what the last exchange alone
    differs by in moments and integral counts as an error, since the spread of scrambles does not show what all of them
    miss; the whole difference of the integral, where its Pareto k is too large.
    """
    reweighted = reweigh(q, state.proposals, state.points, residual)
    if reweighted is None or state.exchanges == 1:
        return reweighted
    count = region.SCRAMBLES * sum(proposal.per_scramble for proposal in latest(state))
    last = reweigh(q, latest(state), state.points[-count:], residual[-count:])
    if last is None:
        return None
    part = 0.5 if last.pareto_k <= importance.limit(last.told) else 1.0
    difference = (last.log_ratio - reweighted.log_ratio) * part
    return reweighted._replace(
        log_ratio=last.log_ratio,
        log_ratio_error=float(np.hypot(last.log_ratio_error, difference)),
        error=max(reweighted.error, 0.5 * apart(last, reweighted, np.sqrt(np.diag(reweighted.covariance)))),
    )


def asked_at(state: Correcting) -> NDArray[np.intp]:
    """Places of the points of this exchange that are asked for."""
    count = region.SCRAMBLES * sum(proposal.per_scramble for proposal in latest(state))
    first = len(state.points) - count
    return np.asarray(first + np.flatnonzero(state.within[first:]))


def asked(state: Correcting) -> Array:
    """The points of this exchange, (S, m)."""
    return state.points[asked_at(state)]


def latest(state: Correcting) -> tuple[Proposal, ...]:
    """Proposals of this exchange."""
    return state.proposals[-state.latest :]


def broadcast(state: Correcting, sites: Sites, client_id: str, prior_share: float) -> Message:
    """The points, or none for a client that has answered already."""
    points = asked(state)
    again = bool(state.answered[sites.where[client_id]])
    return {
        "points": points[:0] if again else points,
        "count": np.array(float(len(points))),
        "center": gaussian.mean(sites.q),
        "prior_share": np.array(prior_share),
    }


def answer(client: ClientView, message: Message, local: LocalInference) -> ClientUpdate[None]:
    """A client's reply: log f_k and its errors at the points, whether its prior is proper, and its reach."""
    assert local.factor is not None
    points, center = (np.asarray(message[name], dtype=float) for name in ("points", "center"))
    values, errors = np.zeros(int(message["count"])), np.zeros(int(message["count"]))
    constant = Constant()
    if len(points):
        inside = np.asarray(message.get("inside", np.ones(len(points))), dtype=bool)
        values[:] = NO_VALUE
        factor = local.factor(client, points[inside], center, float(message["prior_share"]))
        values[inside] = np.where(np.isfinite(factor.values), factor.values, NO_VALUE)
        errors[inside] = np.where(np.isfinite(factor.values), factor.errors, 0.0)
        constant = factor.constant
    reply = {
        "values": values,
        "errors": errors,
        "constant": np.array(constant),
        "proper": np.array(float(client.has_proper_prior)),
        "reach": np.array(float(message.get("reach", 0.0))),
    }
    return ClientUpdate(None, reply, {"values_lost": float(np.mean(values == NO_VALUE)) if len(values) else 0.0})


def shapes(state: Correcting) -> dict[str, tuple[int, ...]]:
    """Values and errors at the points."""
    count = len(asked(state))
    return {"values": (count,), "errors": (count,), "constant": (2,), "proper": (), "reach": ()}


def take(state: Correcting, sites: Sites, replies: Mapping[str, Message]) -> Correcting:
    """Add the residuals of the clients that had not answered."""
    new = [client_id for client_id in replies if not state.answered[sites.where[client_id]]]
    points, where = asked(state), asked_at(state)
    residual, alike, noise = state.residual.copy(), state.alike.copy(), state.noise.copy()
    each, errors, constants = state.each.copy(), state.errors.copy(), state.constants.copy()
    reach, answered, is_proper = state.reach.copy(), state.answered.copy(), state.is_proper
    for client_id in sorted(new):
        k, reply = sites.where[client_id], replies[client_id]
        values = np.asarray(reply["values"], dtype=float)
        values = np.where(values <= 0.1 * NO_VALUE, np.nan, values)
        answered[k] = True
        # Values of earlier exchanges are in the sum, too.
        worse = np.abs(reply["constant"]) > np.abs(constants[k])
        constants[k] = np.where(worse, reply["constant"], constants[k])
        reach[k] = float(reply["reach"]) or np.inf
        term, error = values - gaussian.log_kernel(_sites.site(sites, k), points), np.asarray(reply["errors"], float)
        if len(each):
            each[k, where], errors[k, where] = term, error
        if state.distrusted[k]:
            continue
        residual[where] += term
        alike[where] += error
        noise[where] += error**2
        is_proper = is_proper and float(reply["proper"]) > 0.5
    after = state._replace(
        residual=residual,
        each=each,
        alike=alike,
        noise=noise,
        errors=errors,
        constants=constants,
        reach=reach,
        answered=answered,
        waited=0 if new else state.waited + 1,
        rounds=state.rounds + 1,
        is_proper=is_proper,
    )
    return _truncated(after, sites)


def implausible(reply: Message) -> str | None:
    """Why values of log f_k are rejected, or None."""
    reason = _sites.implausible_values(reply, ("values",))
    if reason:
        return reason
    if float(reply["reach"]) < 0:
        return (
            f"'reach' is {float(reply['reach']):.2g}, and must be a number of prior sds, or 0 where there is no bound"
        )
    # By NumPy, for which a NaN is the largest: Python's max() passes over it.
    values = reply["values"][reply["values"] > 0.1 * NO_VALUE]
    if len(values) and not float(values.max()) >= -_MOST_VALUE:
        return (
            f"'values' are {float(values.max()):.2g} at most, so that others' would be lost in rounding: the largest "
            f"must be at least -{_MOST_VALUE:.0e}; look at this client's data and scales"
        )
    largest = float(np.abs(np.concatenate([reply["errors"], reply["constant"]])).max())
    if not largest <= _MOST_REPORTED:
        return f"'errors' or 'constant' reaches {largest:.2g}, at most {_MOST_REPORTED:g} allowed"
    return None


# The verdict on an exchange: done and trusted, done and not, or another exchange --------------------------------------

_PATIENCE = 3  # rounds without any answer
_LEAST = 400  # effective points from which no further exchange is asked for, if also
_SMALL = 0.012  # the error of a mean or an sd, in posterior sds, is at most that, and
_GROWN = 0.02  # no log sd grew by more since the exchange before
_NO_VARIANCE = 0.5  # Pareto k of squares beyond which their weights have no variance, and errors are unreliable
_UNSURE = 0.02  # error beyond which errors are unreliable, too
_LOST = 0.01  # share of the points that may be without a value
NOISE = 0.3  # largest sd of the error of Σ log f_k over the points
_MOVED = 0.05  # largest effect of that error on a mean or a log sd, in posterior sds
MOST_CUT = 0.05  # largest effect of mass beyond the radius on a mean or a log sd, in sds
_NEARBY = 3  # points nearby for each coefficient of a plane
_NOWHERE = 50.0  # log units below the densest point, where a density counts as none
_SHOWS = 1e-6  # sd under q of the posterior's log density less q's, from which they differ


class Verdict(NamedTuple):
    """The state after a round, whether the correction is done, and why it is not trusted."""

    state: Correcting
    done: bool
    message: str


def is_over(state: Correcting) -> bool:
    """Whether all have answered, or the wait for a new answer is too long for chance."""
    answered = int(state.answered.sum())
    if answered == len(state.answered):
        return True
    if not answered:
        return state.waited > _PATIENCE
    a_round = answered / (state.rounds - state.waited)
    return state.waited > 2 + 5 * (len(state.answered) / a_round - 1)


def judge(state: Correcting, sites: Sites, exchanges: int, stream: int, trust: float | None, remedy: str) -> Verdict:
    """Reweigh once an exchange is over; begin another from a proposal fitted to the weighted points, or end.

    The `remedy` is the call that has more points.
    """
    if not is_over(state):
        count = int(len(state.answered) - state.answered.sum())
        return Verdict(state, False, f"the correction waits for {count} clients; raise rounds=")
    state = state._replace(missing=state.missing | ~state.answered)
    if trust is not None and len(state.answered) > 1:
        state = _without_liars(state, sites, trust)
    earlier, growth_before = state.reweighted, state.growth
    reweighted = weighed(state, sites.q, state.residual)
    growth = _growth(earlier, reweighted)
    state = state._replace(reweighted=reweighted, growth=growth)
    radius = reached(state)
    by = next((name for name, k in sites.where.items() if state.reach[k] == radius), "") if np.isfinite(radius) else ""
    if reweighted is None:
        bound = radius if np.isfinite(radius) and not np.any(state.within) else None
        return Verdict(state, True, _nowhere(_mute(state, sites, 1.0), bound, by))
    cut = region.beyond(sites.prior, radius, sites.q, reweighted.points, reweighted.weights)
    is_cut = float(cut.effect.sum()) > MOST_CUT
    # Where errors are unreliable, an sd that grew in the exchange before may stand still by chance.
    unreliable = reweighted.second_k > _NO_VARIANCE or reweighted.error > _UNSURE
    largest_growth = max(growth, growth_before if unreliable else 0.0)
    of_declared = declared_error(sites.labels, reweighted)
    trusted = is_trusted(reweighted) and largest_growth <= MOST_ERROR and of_declared <= MOST_ERROR
    enough = trusted and reweighted.ess >= _LEAST and reweighted.error <= _SMALL and growth <= _GROWN
    if enough and state.exchanges == 1:  # all scrambles of the t may have missed tails alike
        enough = not has_heavy_tails(reweighted.points, reweighted.weights)
    # more points would not help
    hopeless = bool(np.any(state.missing) or np.any(state.distrusted) or (is_cut and trusted))
    if not enough and not hopeless and state.exchanges < exchanges:
        count = 2 * sum(proposal.per_scramble for proposal in latest(state))
        return Verdict(exchange(state, sites, refitted(reweighted, count, sites.q), stream), False, "")
    names = list(sites.where)
    problems = [
        _without([names[k] for k in np.flatnonzero(state.missing)]),
        _misleading([names[k] for k in np.flatnonzero(state.distrusted)], trust),
        _beyond_radius(cut, radius, by, sites) if is_cut else "",
        "" if trusted else _beyond_q(reweighted, sites, largest_growth, of_declared, remedy),
        *_of_values(state, sites, reweighted),
    ]
    message = "; ".join(filter(None, problems))
    return Verdict(state._replace(trusted=not message), True, message)


def _of_values(state: Correcting, sites: Sites, reweighted: Reweighted) -> list[str]:
    """What is wrong where clients have no value of log f_k, and with errors of those that they have."""
    noise, moved = float(np.sqrt(reweighted.weights @ np.nan_to_num(state.noise))), _moved(state, reweighted)
    lost = float(np.mean(np.isnan(state.residual[state.within])))
    hidden = _hidden(state, sites, reweighted) if 0 < lost <= _LOST else 0.0
    return [
        _unreached(lost, _LOST, hidden, _mute(state, sites, _LOST)) if lost > _LOST or hidden > _MOVED else "",
        uncertain(noise, moved, _BY_NUTS) if noise > NOISE or moved > _MOVED else "",
    ]


def _growth(earlier: Reweighted | None, reweighted: Reweighted | None) -> float:
    """Largest growth of a log sd since the exchange before, as of tails that points reach farther into each time."""
    if earlier is None or reweighted is None:
        return 0.0
    return float(np.max(0.5 * np.log(np.diag(reweighted.covariance) / np.diag(earlier.covariance))))


def _moved(state: Correcting, reweighted: Reweighted) -> float:
    """Largest effect of errors of log f_k on a mean or a log sd, in posterior sds.

    Errors that clients have alike add up with their signs, others by their squares.
    """
    weights = reweighted.weights
    z = (reweighted.points - reweighted.mean) / np.sqrt(np.diag(reweighted.covariance))
    parts = np.concatenate([z, 0.5 * (z**2 - 1.0)], axis=1)
    centred = parts - weights @ parts
    effects = weights[:, None] * centred
    alike = np.nan_to_num(state.alike) @ effects
    if len(state.errors):
        squares = np.square(np.nan_to_num(state.errors[~state.distrusted]) @ effects).sum(axis=0)
    else:  # by the inequality of Cauchy and Schwarz
        squares = (weights @ np.nan_to_num(state.noise)) * (weights @ centred**2)
    return float(max(np.max(np.abs(alike)), np.sqrt(np.max(squares))))


def _hidden(state: Correcting, sites: Sites, reweighted: Reweighted) -> float:
    """Effect on a mean or a log sd of points without a value, if the log density went on as a plane there.

    The plane goes through points nearby that have a value, and is no higher than they are. q's tails in place of it
    would leave out what q lacks.
    """
    lost = np.flatnonzero(np.isnan(state.residual) & state.within)
    known = np.flatnonzero(~np.isnan(state.residual))
    of_q = gaussian.log_density(sites.q, state.points)
    logs = (state.residual + of_q)[known]
    logs = np.maximum(logs, logs.max() - _NOWHERE)
    sd = np.sqrt(np.diag(reweighted.covariance))
    white = (state.points - reweighted.mean) / sd
    _, nearest = spatial.cKDTree(white[known]).query(white[lost], k=min(_NEARBY * (len(sd) + 1), len(known)))
    filled = state.residual.copy()
    for s, by in zip(lost, np.reshape(nearest, (len(lost), -1)), strict=True):
        plane = np.column_stack([np.ones(len(by)), white[known[by]] - white[s]])
        filled[s] = min(np.linalg.lstsq(plane, logs[by])[0][0], logs[by].max()) - of_q[s]
    return _apart(reweighted, reweigh(sites.q, state.proposals, state.points, filled), sd)


def _mute(state: Correcting, sites: Sites, share: float) -> list[str]:
    """Clients without a value at that share of the points that are asked for, as far as their answers are kept."""
    if not len(state.each) or not np.any(state.within):
        return []
    lost = np.mean(np.isnan(state.each[:, state.within]), axis=1)
    return [name for name, k in sites.where.items() if lost[k] >= share]


def _without_liars(state: Correcting, sites: Sites, trust: float) -> Correcting:
    """Leave out clients that move a mean by more than `trust` sds of q, or a log sd by more, one after the other."""
    while True:
        by_each = _moves(state, sites)
        if not np.max(by_each) > trust:
            return state
        state = _leave_out(state, int(np.argmax(by_each)))


def _moves(state: Correcting, sites: Sites) -> Array:
    """Effect of each client's answers on the posterior, (K,)."""
    sd = gaussian.standard_deviations(sites.q)
    by_each = np.zeros(len(state.distrusted))
    whole = reweigh(sites.q, state.proposals, state.points, state.residual)
    for k in np.flatnonzero(~state.distrusted & state.answered):
        rest = _leave_out(state, int(k))
        by_each[k] = _apart(whole, reweigh(sites.q, rest.proposals, rest.points, rest.residual), sd)
    return by_each


def _leave_out(state: Correcting, k: int) -> Correcting:
    """The site of client k stands for it."""
    kept = ~state.distrusted & (np.arange(len(state.each)) != k)
    return state._replace(
        residual=np.asarray(state.each[kept].sum(axis=0)),
        alike=state.errors[kept].sum(axis=0),
        noise=np.square(state.errors[kept]).sum(axis=0),
        distrusted=~kept,
    )


def _apart(one: Reweighted | None, other: Reweighted | None, sd: Array) -> float:
    """Largest difference of means in sds of q, and of log sds; infinite where `one` has no point left."""
    if other is None:
        return 0.0
    if one is None:
        return np.inf
    return apart(one, other, sd)


def says_more(state: Correcting) -> bool:
    """Whether the posterior differs from q noticeably."""
    if state.reweighted is None:
        return False
    centred = np.nan_to_num(state.residual - np.nanmedian(state.residual), nan=0.0, posinf=0.0, neginf=0.0)
    return float(np.sqrt(state.reweighted.of_q @ np.clip(centred, -1e100, 1e100) ** 2)) > _SHOWS


def refitted(reweighted: Reweighted, count: int, q: Gaussian) -> tuple[Proposal, ...]:
    """The t with the moments of the weighted points, wider where few have weight, and proposals in their tails."""
    points, weights, covariance = reweighted.points, reweighted.weights, reweighted.covariance
    m = len(covariance)
    few = reweighted.ess < 10 * m
    if few:
        covariance = covariance + 0.5 * gaussian.covariance(q) / max(reweighted.ess / m, 1.0)
    outer = () if few else beyond(points, weights, count // 2)
    inner = count - sum(proposal.per_scramble for proposal in outer)
    return (*with_tails(reweighted.mean, covariance, inner, skewness(points, weights)), *outer)


# The remedy where NUTS is used already, too.
_BY_NUTS = "local=fedppl.local.NUTS(draws=4000)"


def _without(names: list[str]) -> str:
    if not names:
        return ""
    return (
        f"the posterior may be wrong where clients {names[:5]} matter: they did not answer what the correction asks, "
        "and a Gaussian stands for each of them. The reasons are in fit.idata['rounds']: correct what they name, and "
        "fit again"
    )


def _nowhere(names: list[str], radius: float | None, by: str) -> str:
    """No point has a value at all clients: none lies within the radius, or some clients have no value anywhere."""
    far = f" (site {by!r} answers within {radius:g} prior sds alone)" if radius is not None and by else ""
    if radius is not None:
        remedy = f"nothing lies within {radius:g} prior sds: allow a larger distance, or raise radius="
    elif names:
        remedy = f"clients {names[:5]} have no log density anywhere: look at their data, or use {_BY_NUTS}"
    else:
        remedy = f"use {_BY_NUTS}"
    return f"sds and tails are not known, since nothing could be corrected{far}: {remedy}"


def _unreached(share: float, most: float, hidden: float, names: list[str]) -> str:
    """Too many points are without a value, or these points would move the posterior by `hidden`."""
    effect = "may be wrong" if share > most else f"may be off by {hidden:.2g} sds"
    where = f", at clients {names[:5]} above all" if names else ""
    return (
        f"means and sds {effect}: {share:.1%} of the places that the correction asks at (at most {most:.0%}) have no "
        f"log density{where}, or its integral over a client's own variables was not found. Declare the model so that "
        "it has a smooth density everywhere, with no bound of an outcome's support among the shared variables; or use "
        f"{_BY_NUTS}"
    )


def _misleading(names: list[str], trust: float | None) -> str:
    if not names:
        return ""
    return (
        f"clients {names[:5]} disagree with the others: each would move the posterior by more than trust={trust:g} "
        "sds, and a Gaussian stands for each of them. Look at their data, and at the others', since of clients that "
        "disagree the one with more data moves it more"
    )


def _beyond_q(reweighted: Reweighted, sites: Sites, growth: float, of_declared: float, remedy: str) -> str:
    """Where q is farthest from the weighted points, and which of their numbers fall short."""
    sd = gaussian.standard_deviations(sites.q)
    shift = (reweighted.mean - gaussian.mean(sites.q)) / sd
    wider = np.sqrt(np.diag(reweighted.covariance)) / sd
    worst = int(np.argmax(np.maximum(np.abs(shift), np.abs(np.log(wider)))))
    name, most_k, error = as_declared(sites.labels[worst]), importance.limit(reweighted.told), reweighted.error
    short = [
        f"few points decide alone (Pareto k {reweighted.pareto_k:.2f}, at most {most_k:.2f})"
        if not reweighted.pareto_k <= most_k
        else "",
        f"tails are not reached (Pareto k {reweighted.second_k:.2f}, at most {MOST_SECOND_K:g})"
        if not reweighted.second_k <= MOST_SECOND_K
        else "",
        f"{reweighted.ess:.0f} effective points (at least {FEWEST})" if not reweighted.ess >= FEWEST else "",
        f"an error of {error:.2g} sds (at most {MOST_ERROR:g})" if not error <= MOST_ERROR else "",
        f"an sd that last grew by {np.expm1(growth):.0%}" if growth > MOST_ERROR else "",
        f"an error of {of_declared:.2g} sds of a variable as it is declared (at most {MOST_ERROR:g})"
        if of_declared > MOST_ERROR
        else "",
    ]
    return (
        f"sds and tails are not known well enough, of {name} above all: its mean is {shift[worst]:+.2g} sds from the "
        f"Gaussian's, and its sd {wider[worst]:.2g} times as large. Use {remedy}, declare {name} on a scale where it "
        f"is closer to normal, or give it a prior that says more. Of {len(reweighted.points)} points: "
        + ", ".join(filter(None, short))
    )


def _beyond_radius(cut: Beyond, radius: float, by: str, sites: Sites) -> str:
    """How much mass lies beyond the radius, along which coordinate, and whose radius it is."""
    worst = int(np.argmax(cut.effect.sum(axis=1)))
    side = "below" if cut.effect[worst, 0] > cut.effect[worst, 1] else "above"
    whose = (
        f"site {by!r} answers, by distance={radius:g} of its policy," if by else f"Correction(radius={radius:g}) asks"
    )
    return (
        f"up to {cut.mass[worst].max():.2g} of the posterior may lie where nobody was asked, {side} along "
        f"{as_declared(sites.labels[worst])}: {whose} within {radius:g} prior sds of the prior's mean alone. Allow a "
        "larger distance, or declare a prior that is wider, or centered where the data are"
    )


def uncertain(noise: float, moved: float, by_nuts: str) -> str:
    """Errors of clients' values move moments too far."""
    return (
        f"means and sds may be off by up to {moved:.2g} sds: clients' log densities are uncertain by {noise:.2g} in "
        "all, since their own variables are too far from normal given the shared ones. Declare them on a scale where "
        "they are closer to normal, and standardised, z = (θ − μ) / τ, where data say little and they have a location "
        "μ and a scale τ; integrate them out where that is known, as pm.BetaBinomial does with a pm.Beta; or use "
        f"{by_nuts}"
    )
