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
from fedppl.numerics.reweighting import FEWEST, MOST_ERROR, MOST_SECOND_K, Reweighted, apart, is_trusted, reweigh
from fedppl.types import Array, DeclarationError, Message, as_declared

_MOST, _MOST_EXCHANGES = 2**20, 8


@dataclass(frozen=True)
class Correction:
    r"""One more exchange after EP, which turns its Gaussian into the posterior.

    .. math:: w_s \propto \frac{p(\varphi_s) \prod_k f_k(\varphi_s)}{g(\varphi_s)}, \qquad
              E[h] = E_q[h] + \sum_s (w_s - u_s)\, h(\varphi_s), \qquad u_s \propto q(\varphi_s) / g(\varphi_s)

    Clients answer log f_k at scrambled Sobol points φ_s of g: a multivariate t that reaches beyond q, and others along
    the longer tails of skewed coordinates. Where the weights say too little, g is fitted to the weighted points, and
    there is another exchange.

    Parameters
    ----------
    points
        Number of points of the first exchange at most, a multiple of 8 and at least 512: fewer do not tell whether they
        are enough. Each further one has twice as many.
    exchanges
        Largest number of exchanges, at most 8.
    radius
        Largest distance of a point from the prior's mean, per coordinate, in prior sds, as `fedppl.Policy` has it under
        `distance`; None asks for all. Where sites allow less, points beyond the least that they allow, which they tell
        with their first answers, are not asked for from then on: the proposal is truncated there.

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
    weight: the status then says so, with the coordinate. A mode that lies apart from q's has no point near it, and is
    not seen: ``EP(starts=...)`` looks for it. Beyond a radius the posterior is taken to be as q is, and where what lies
    there may move a mean or a log sd by more than 0.05 sds, the status says so, with the site whose policy has it.
    Values of log f_k at so many points tell more of a client's data than
    moments do; sites of their own are not asked for them unless this is in the call and their policy
    allows it.

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
_IN_ALL = 31  # times as many points as the first of five exchanges has
_KEPT = 2**23  # numbers of single clients' answers that are kept, so that it is known what each does to the posterior


class Correcting(NamedTuple):
    """Points that are being answered, of this exchange and of those before it."""

    proposals: tuple[Proposal, ...]
    latest: int  # number of them that are of this exchange
    exchanges: int  # so far, this one counted
    points: Array  # (J S, m)
    radius: float  # prior sds from the prior's mean within which clients are asked
    reach: Array  # (K,) those within which each answers, as it says; infinite where it has no bound, or has not said
    within: NDArray[np.bool_]  # (J S,) which points are that near; no others are asked for
    residual: Array  # (J S,) Σ_k log f_k − log q_k over who has answered; NaN where one had no value, or beyond
    each: Array  # (K, J S) its terms; (0, J S) where they are too many to be kept
    distrusted: NDArray[np.bool_]  # (K,) moved the posterior by more than trust allows; their sites stand for them
    alike: Array  # (J S,) Σ_k errors
    noise: Array  # (J S,) Σ_k squared errors
    errors: Array  # (K, J S) they themselves; (0, J S) where they are too many to be kept
    constants: Array  # (K, 2) what each does not know of a constant in its values: what all have alike, and by chance
    answered: NDArray[np.bool_]  # (K,) in this exchange
    missing: NDArray[np.bool_]  # (K,) did not answer in an exchange, so that its site stands for it
    waited: int  # rounds without a new answer
    rounds: int  # of this exchange
    is_proper: bool  # whether every client's local prior has a normalising constant that it knows
    found: Reweighted | None  # once there is something
    grown: float  # what a log sd grew by from the exchange before to that one; 0 of the first
    trusted: bool
    said: str  # of q, when it converged


def start(sites: Sites, skewed: Array, points: int, radius: float, stream: int, *, keep: bool) -> Correcting:
    """The first exchange, around q and along its skewness; `keep` single answers however many they are."""
    covariance = gaussian.covariance(sites.q) * _WIDER**2
    proposals = with_tails(gaussian.mean(sites.q), covariance, points // region.SCRAMBLES, skewed)
    count = len(sites.where)
    kept = count if keep or count * points * _IN_ALL <= _KEPT else 0
    begun = blank(count, len(covariance), kept)._replace(radius=radius)
    return exchange(begun, sites, proposals, stream)


def blank(count: int, size: int, kept: int) -> Correcting:
    """Nothing asked yet of so many clients, in so many coordinates; answers of single ones are kept of `kept`."""
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
        found=None,
        grown=0.0,
        trusted=False,
        said="",
    )


def exchange(state: Correcting, sites: Sites, proposals: tuple[Proposal, ...], stream: int) -> Correcting:
    """One more exchange, with points of other proposals beside those that there are."""
    first = stream + len(state.proposals)
    fresh = np.concatenate([points_of(proposal, first + number) for number, proposal in enumerate(proposals)])
    none_yet, none_yet_in_all = np.zeros((len(state.each), len(fresh))), np.zeros(len(fresh))
    begun = state._replace(
        proposals=(*state.proposals, *proposals),
        latest=len(proposals),
        exchanges=state.exchanges + 1,
        points=np.concatenate([state.points, fresh]),
        residual=np.concatenate([state.residual, none_yet_in_all]),
        each=np.concatenate([state.each, none_yet], axis=1),
        alike=np.concatenate([state.alike, none_yet_in_all]),
        noise=np.concatenate([state.noise, none_yet_in_all]),
        errors=np.concatenate([state.errors, none_yet], axis=1),
        answered=np.zeros_like(state.answered),
        waited=0,
        rounds=0,
    )
    return _truncated(begun, sites)


def _truncated(state: Correcting, sites: Sites) -> Correcting:
    """Without a value at the points that lie beyond what all clients answer, as far as they have said."""
    within = region.within(sites.prior, reached(state), state.points)
    return state._replace(
        within=within, residual=np.where(within, state.residual, np.nan), each=np.where(within, state.each, np.nan)
    )


def reached(state: Correcting) -> float:
    """Prior sds from the prior's mean within which points are asked for."""
    return float(np.min(state.reach[~state.distrusted], initial=state.radius))


def weighed(state: Correcting, q: Gaussian, residual: Array) -> Reweighted | None:
    """All exchanges' points as the posterior; its integral by those of the last exchange alone.

    Proposals were fitted to the points before them, and among many coordinates to their chance: under the mixture of
    all, points before the last seem to be where a proposal is dense, and the integral is too small. Where the last
    exchange alone has other moments or another integral, half of that is an error too: what all scrambles miss alike is
    in no spread, and eight of them may agree by chance. Where few of its points have the weight, all of the latter is.
    """
    found = reweigh(q, state.proposals, state.points, residual)
    if found is None or state.exchanges == 1:
        return found
    count = region.SCRAMBLES * sum(proposal.per_scramble for proposal in latest(state))
    last = reweigh(q, latest(state), state.points[-count:], residual[-count:])
    if last is None:
        return None
    differ = (last.log_ratio - found.log_ratio) * (0.5 if last.pareto_k <= importance.limit(last.told) else 1.0)
    return found._replace(
        log_ratio=last.log_ratio,
        log_ratio_error=float(np.hypot(last.log_ratio_error, differ)),
        error=max(found.error, 0.5 * apart(last, found, np.sqrt(np.diag(found.covariance)))),
    )


def asked_at(state: Correcting) -> NDArray[np.intp]:
    """Which points of all are those of this exchange that are asked for."""
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
    """The points, or none for who has answered already."""
    points = asked(state)
    again = bool(state.answered[sites.where[client_id]])
    return {
        "points": points[:0] if again else points,
        "count": np.array(float(len(points))),
        "center": gaussian.mean(sites.q),
        "prior_share": np.array(prior_share),
    }


def answer(client: ClientView, message: Message, local: LocalInference) -> ClientUpdate[None]:
    """A client's reply: log f_k at the points with errors, whether its prior is proper, and how far out it answers."""
    assert local.factor is not None
    points, center = (np.asarray(message[name], dtype=float) for name in ("points", "center"))
    values, errors = np.zeros(int(message["count"])), np.zeros(int(message["count"]))
    constant = Constant()
    if len(points):
        inside = np.asarray(message.get("inside", np.ones(len(points))), dtype=bool)
        values[:] = NO_VALUE
        found = local.factor(client, points[inside], center, float(message["prior_share"]))
        values[inside] = np.where(np.isfinite(found.values), found.values, NO_VALUE)
        errors[inside] = np.where(np.isfinite(found.values), found.errors, 0.0)
        constant = found.constant
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
        # Those of an earlier exchange are still in the sum.
        worse = np.abs(reply["constant"]) > np.abs(constants[k])
        constants[k] = np.where(worse, reply["constant"], constants[k])
        reach[k] = float(reply["reach"]) or np.inf
        term, unsure = values - gaussian.log_kernel(_sites.site(sites, k), points), np.asarray(reply["errors"], float)
        if len(each):
            each[k, where], errors[k, where] = term, unsure
        if state.distrusted[k]:
            continue
        residual[where] += term
        alike[where] += unsure
        noise[where] += unsure**2
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
    """Why log factors cannot be: as small as they like, never larger than any density is."""
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
            f"'values' are {float(values.max()):.2g} at most, and what others say would be lost in rounding: the "
            f"largest may be no smaller than -{_MOST_VALUE:.0e}; look at this client's data and scales"
        )
    largest = float(np.abs(np.concatenate([reply["errors"], reply["constant"]])).max())
    if not largest <= _MOST_REPORTED:
        return f"'errors' or 'constant' reaches {largest:.2g}, at most {_MOST_REPORTED:g} allowed"
    return None


# What an exchange of the correction came to: done and trusted, done and not, or another exchange to be begun ----------

_PATIENCE = 3  # rounds without any answer
_LEAST = 400  # effective points with which no further exchange is asked for
_SMALL = 0.012  # error of a mean or an sd, in posterior sds, with which none is asked for either
_GROWN = 0.02  # by which a log sd grew since the exchange before, with which none is asked for either
_NO_VARIANCE = 0.5  # Pareto k of squares beyond which their weights have no variance, and errors say little
_UNSURE = 0.02  # error with which the same holds
_LOST = 0.01  # share of the points that may be without a value
NOISE = 0.3  # sd of what is not known of the sum of log f_k over the points
_MOVED = 0.05  # posterior sds that it may move a mean or a log sd by
MOST_CUT = 0.05  # sds that what lies beyond the radius may move a mean or a log sd by
_NEARBY = 3  # times as many points nearby as a plane has coefficients
_NOWHERE = 50.0  # log units below the densest point, where a density counts as none
_SHOWS = 1e-6  # sd under q of what the posterior's log density differs from q's by


class Judged(NamedTuple):
    """What an exchange came to."""

    state: Correcting
    done: bool
    message: str


def is_over(state: Correcting) -> bool:
    """Whether everyone has answered, or nobody new has for longer than chance would have it."""
    answered = int(state.answered.sum())
    if answered == len(state.answered):
        return True
    if not answered:
        return state.waited > _PATIENCE
    a_round = answered / (state.rounds - state.waited)
    return state.waited > 2 + 5 * (len(state.answered) / a_round - 1)


def judge(state: Correcting, sites: Sites, exchanges: int, stream: int, trust: float | None, remedy: str) -> Judged:
    """Reweigh once an exchange is over: done, or another exchange from a proposal fitted to what was found.

    The `remedy` is the call that has more points.
    """
    if not is_over(state):
        left = int(len(state.answered) - state.answered.sum())
        return Judged(state, False, f"the correction waits for {left} clients; raise rounds=")
    state = state._replace(missing=state.missing | ~state.answered)
    if trust is not None and len(state.answered) > 1:
        state = _without_liars(state, sites, trust)
    before, found = state.found, weighed(state, sites.q, state.residual)
    earlier, grown = state.grown, _grown(before, found)
    state = state._replace(found=found, grown=grown)
    radius = reached(state)
    by = next((name for name, k in sites.where.items() if state.reach[k] == radius), "") if np.isfinite(radius) else ""
    if found is None:
        bound = radius if np.isfinite(radius) and not np.any(state.within) else None
        return Judged(state, True, _nowhere(_mute(state, sites, 1.0), bound, by))
    cut = region.beyond(sites.prior, radius, sites.q, found.points, found.weights)
    is_cut = float(cut.effect.sum()) > MOST_CUT
    # Where little is known of its error, an sd that grew so much before may stand still by chance.
    unsure = found.second_k > _NO_VARIANCE or found.error > _UNSURE
    growth = max(grown, earlier if unsure else 0.0)
    trusted = is_trusted(found) and growth <= MOST_ERROR
    enough = trusted and found.ess >= _LEAST and found.error <= _SMALL and grown <= _GROWN
    if enough and state.exchanges == 1:  # what lies far out may have been missed by all scrambles alike
        enough = not has_heavy_tails(found.points, found.weights)
    # whatever points there were
    hopeless = bool(np.any(state.missing) or np.any(state.distrusted) or (is_cut and trusted))
    if not enough and not hopeless and state.exchanges < exchanges:
        count = 2 * sum(proposal.per_scramble for proposal in latest(state))
        return Judged(exchange(state, sites, refitted(found, count, sites.q), stream), False, "")
    names = list(sites.where)
    noise, moved = float(np.sqrt(found.weights @ np.nan_to_num(state.noise))), _moved(state, found)
    lost = float(np.mean(np.isnan(state.residual[state.within])))
    hidden = _hidden(state, sites, found) if 0 < lost <= _LOST else 0.0
    problems = [
        _without([names[k] for k in np.flatnonzero(state.missing)]),
        _misleading([names[k] for k in np.flatnonzero(state.distrusted)], trust),
        _beyond_radius(cut, radius, by, sites) if is_cut else "",
        "" if trusted else _beyond_q(found, sites, growth, remedy),
        _unreached(lost, _LOST, hidden, _mute(state, sites, _LOST)) if lost > _LOST or hidden > _MOVED else "",
        uncertain(noise, moved, _BY_NUTS) if noise > NOISE or moved > _MOVED else "",
    ]
    message = "; ".join(filter(None, problems))
    return Judged(state._replace(trusted=not message), True, message)


def _grown(before: Reweighted | None, found: Reweighted | None) -> float:
    """What a log sd grew by since the exchange before: of tails that points reach farther into each time, errors are
    those of what has been reached.
    """
    if before is None or found is None:
        return 0.0
    return float(np.max(0.5 * np.log(np.diag(found.covariance) / np.diag(before.covariance))))


def _moved(state: Correcting, found: Reweighted) -> float:
    """What errors of log f_k may move a mean or a log sd by, in posterior sds.

    Errors that clients have alike add up as they are, and of any sign by their squares.
    """
    z = (found.points - found.mean) / np.sqrt(np.diag(found.covariance))
    parts = np.concatenate([z, 0.5 * (z**2 - 1.0)], axis=1)
    apart = parts - found.weights @ parts
    effects = found.weights[:, None] * apart
    alike = np.nan_to_num(state.alike) @ effects
    if len(state.errors):
        squares = np.square(np.nan_to_num(state.errors[~state.distrusted]) @ effects).sum(axis=0)
    else:  # by the inequality of Cauchy and Schwarz
        squares = (found.weights @ np.nan_to_num(state.noise)) * (found.weights @ apart**2)
    return float(max(np.max(np.abs(alike)), np.sqrt(np.max(squares))))


def _hidden(state: Correcting, sites: Sites, found: Reweighted) -> float:
    """What points without a value would move a mean or a log sd by, did the log density go on as a plane there.

    A plane through the points nearby that have one, and nowhere above them: tails of q would leave out what q lacks.
    """
    lost = np.flatnonzero(np.isnan(state.residual) & state.within)
    known = np.flatnonzero(~np.isnan(state.residual))
    of_q = gaussian.log_density(sites.q, state.points)
    logs = (state.residual + of_q)[known]
    logs = np.maximum(logs, logs.max() - _NOWHERE)
    sd = np.sqrt(np.diag(found.covariance))
    white = (state.points - found.mean) / sd
    _, nearest = spatial.cKDTree(white[known]).query(white[lost], k=min(_NEARBY * (len(sd) + 1), len(known)))
    filled = state.residual.copy()
    for s, by in zip(lost, np.reshape(nearest, (len(lost), -1)), strict=True):
        plane = np.column_stack([np.ones(len(by)), white[known[by]] - white[s]])
        filled[s] = min(np.linalg.lstsq(plane, logs[by])[0][0], logs[by].max()) - of_q[s]
    return _apart(found, reweigh(sites.q, state.proposals, state.points, filled), sd)


def _mute(state: Correcting, sites: Sites, share: float) -> list[str]:
    """Clients that have no value at so many of the points that are asked for, as far as their answers are kept."""
    if not len(state.each) or not np.any(state.within):
        return []
    lost = np.mean(np.isnan(state.each[:, state.within]), axis=1)
    return [name for name, k in sites.where.items() if lost[k] >= share]


def _without_liars(state: Correcting, sites: Sites, trust: float) -> Correcting:
    """Leave out who moves a mean by more than `trust` sds of q, or a log sd by more than that, one after the other."""
    while True:
        by_each = _moves(state, sites)
        if not np.max(by_each) > trust:
            return state
        state = _leave_out(state, int(np.argmax(by_each)))


def _moves(state: Correcting, sites: Sites) -> Array:
    """What each client's answers move the posterior by, (K,)."""
    sd = gaussian.standard_deviations(sites.q)
    by_each = np.zeros(len(state.distrusted))
    found = reweigh(sites.q, state.proposals, state.points, state.residual)
    for k in np.flatnonzero(~state.distrusted & state.answered):
        rest = _leave_out(state, int(k))
        by_each[k] = _apart(found, reweigh(sites.q, rest.proposals, rest.points, rest.residual), sd)
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
    """Largest difference of means in sds of q, and of log sds; infinite where one has no point left."""
    if other is None:
        return 0.0
    if one is None:
        return np.inf
    return apart(one, other, sd)


def says_more(state: Correcting) -> bool:
    """Whether the posterior differs from q by anything that shows."""
    if state.found is None:
        return False
    centred = np.nan_to_num(state.residual - np.nanmedian(state.residual), nan=0.0, posinf=0.0, neginf=0.0)
    return float(np.sqrt(state.found.of_q @ np.clip(centred, -1e100, 1e100) ** 2)) > _SHOWS


def refitted(found: Reweighted, count: int, q: Gaussian) -> tuple[Proposal, ...]:
    """The t with the moments of the weighted points, somewhat wider where few are left, and out into their tails."""
    m = len(found.mean)
    covariance = found.covariance
    few = found.ess < 10 * m  # too few to say how wide
    if few:
        covariance = covariance + 0.5 * gaussian.covariance(q) / max(found.ess / m, 1.0)
    outer = () if few else beyond(found.points, found.weights, count // 2)
    inner = count - sum(proposal.per_scramble for proposal in outer)
    return (*with_tails(found.mean, covariance, inner, skewness(found.points, found.weights)), *outer)


# As a call that helps whoever has NUTS already, too.
_BY_NUTS = "local=fedppl.NUTS(draws=4000)"


def _without(names: list[str]) -> str:
    if not names:
        return ""
    return (
        f"the posterior may be wrong where clients {names[:5]} matter: they did not answer what the correction asks, "
        "and a Gaussian stands for each of them. The reasons are in fit.idata['rounds']: correct what they name, and "
        "fit again"
    )


def _nowhere(names: list[str], radius: float | None, by: str) -> str:
    """No point has a value at all clients: within a radius that holds none, or since some answer none."""
    far = f" (site {by!r} answers within {radius:g} prior sds alone)" if radius is not None and by else ""
    if radius is not None:
        remedy = f"nothing lies within {radius:g} prior sds: allow a larger distance, or raise radius="
    elif names:
        remedy = f"clients {names[:5]} have no log density anywhere: look at their data, or use {_BY_NUTS}"
    else:
        remedy = f"use {_BY_NUTS}"
    return f"sds and tails are not known, since nothing could be corrected{far}: {remedy}"


def _unreached(share: float, most: float, hidden: float, names: list[str]) -> str:
    """Too many points are without a value, or those that are would move the posterior by `hidden`."""
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
        f"clients {names[:5]} disagree with the others: they would move the posterior by more than trust={trust:g} "
        "sds, and a Gaussian stands for each of them. Look at their data, and at those of the clients that they are "
        "held against, since of clients that disagree the one that says more moves it more"
    )


def _beyond_q(found: Reweighted, sites: Sites, grown: float, remedy: str) -> str:
    """What q could not follow, and where; `grown` is what a log sd grew by from one exchange to the next."""
    sd = gaussian.standard_deviations(sites.q)
    shift = (found.mean - gaussian.mean(sites.q)) / sd
    wider = np.sqrt(np.diag(found.covariance)) / sd
    worst = int(np.argmax(np.maximum(np.abs(shift), np.abs(np.log(wider)))))
    name, most_k = as_declared(sites.labels[worst]), importance.limit(found.told)
    short = [
        f"few points decide alone (Pareto k {found.pareto_k:.2f}, at most {most_k:.2f})"
        if not found.pareto_k <= most_k
        else "",
        f"tails are not reached (Pareto k {found.second_k:.2f}, at most {MOST_SECOND_K:g})"
        if not found.second_k <= MOST_SECOND_K
        else "",
        f"{found.ess:.0f} effective points (at least {FEWEST})" if not found.ess >= FEWEST else "",
        f"an error of {found.error:.2g} sds (at most {MOST_ERROR:g})" if not found.error <= MOST_ERROR else "",
        f"an sd that last grew by {np.expm1(grown):.0%}" if grown > MOST_ERROR else "",
    ]
    return (
        f"sds and tails are not known well enough, of {name} above all: its mean is {shift[worst]:+.2g} sds from the "
        f"Gaussian's, and its sd {wider[worst]:.2g} times as large. Use {remedy}, declare {name} on a scale where it "
        f"is closer to normal, or give it a prior that says more. Of {len(found.points)} points: "
        + ", ".join(filter(None, short))
    )


def _beyond_radius(cut: Beyond, radius: float, by: str, sites: Sites) -> str:
    """How much lies where no point is answered, along what, and by whose rule."""
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
    """What is not known of clients' values moves moments too far."""
    return (
        f"means and sds may be off by up to {moved:.2g} sds: clients' log densities are uncertain by {noise:.2g} in "
        "all, since their own variables are too far from normal given the shared ones. Declare them on a scale where "
        "they are closer to normal, and standardised, z = (θ − μ) / τ, where data say little and they have a location "
        "μ and a scale τ; integrate them out where that is known, as pm.BetaBinomial does with a pm.Beta; or use "
        f"{by_nuts}"
    )
