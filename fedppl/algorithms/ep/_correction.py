"""The correcting round: clients answer log f_k at points that reach beyond q, and the points are reweighted.

No f_k depends on q, so that answers are gathered over as many rounds as it takes. The ledger of sites stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.algorithms.ep import _untrusted
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep.sites import NO_VALUE, Sites
from fedppl.contracts import ClientUpdate, ClientView, Constant, LocalInference
from fedppl.gaussian import Gaussian
from fedppl.numerics import region, student
from fedppl.numerics.importance import normalise, skewness
from fedppl.numerics.proposals import Proposal, beyond, has_heavy_tails, log_mixture, points_of, with_tails
from fedppl.numerics.reweighting import MOST_SECOND_K, Reweighted, is_trusted, reweigh
from fedppl.types import Array, Message

_PATIENCE = 3  # rounds without any answer
_LEAST = 400  # effective points with which no further exchange is asked for
_SMALL = 0.012  # error of a mean or an sd, in posterior sds, with which none is asked for either
_LOST = 0.01  # share of the points that may be without a value
NOISE = 0.3  # sd of what is not known of the sum of log f_k over the points
_MOVED = 0.05  # posterior sds that it may move a mean or a log sd by
MOST_CUT = 0.05  # sds that what lies beyond the radius may move a mean or a log sd by
_SHOWS = 1e-6  # sd under q of what the posterior's log density differs from q's by
_MOST_ERROR = 1e6
_WIDER = 1.2  # sds of the first proposal, in those of q
_IN_ALL = 15  # times as many points as the first of four exchanges has
_KEPT = 2**22  # numbers of single clients' answers that are kept, so that it is known what each does to the posterior


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
    noise: Array  # (J S,) Σ_k squared errors
    constants: Array  # (K, 2) what each does not know of a constant in its values: what all have alike, and by chance
    moved: Array  # (2, 2 m) what they move means and log sds by, in sds of q, in this exchange: Σ_k, and Σ_k of squares
    answered: NDArray[np.bool_]  # (K,) in this exchange
    missing: NDArray[np.bool_]  # (K,) did not answer in an exchange, so that its site stands for it
    waited: int  # rounds without a new answer
    rounds: int  # of this exchange
    is_proper: bool  # whether every client's local prior has a normalising constant that it knows
    found: Reweighted | None  # once there is something
    trusted: bool
    said: str  # of q, when it converged


class Judged(NamedTuple):
    """What an exchange came to."""

    state: Correcting
    done: bool
    message: str


def start(sites: Sites, skewed: Array, points: int, radius: float, stream: int, *, keep: bool) -> Correcting:
    """The first exchange, around q and along its skewness; `keep` single answers however many they are."""
    covariance = gaussian.covariance(sites.q) * _WIDER**2
    proposals = with_tails(gaussian.mean(sites.q), covariance, points // student.SCRAMBLES, skewed)
    empty = np.zeros((0, len(covariance)))
    count = len(sites.where)
    begun = Correcting(
        proposals=(),
        latest=0,
        exchanges=0,
        points=empty,
        radius=radius,
        reach=np.full(count, np.inf),
        within=np.zeros(0, dtype=bool),
        residual=np.zeros(0),
        each=np.zeros((count if keep or count * points * _IN_ALL <= _KEPT else 0, 0)),
        distrusted=np.zeros(count, dtype=bool),
        noise=np.zeros(0),
        constants=np.zeros((count, 2)),
        moved=np.zeros((2, 2 * empty.shape[1])),
        answered=np.zeros(count, dtype=bool),
        missing=np.zeros(count, dtype=bool),
        waited=0,
        rounds=0,
        is_proper=True,
        found=None,
        trusted=False,
        said="",
    )
    return _exchange(begun, sites, proposals, stream)


def _exchange(state: Correcting, sites: Sites, proposals: tuple[Proposal, ...], stream: int) -> Correcting:
    """One more exchange, with points of other proposals beside those that there are."""
    first = stream + len(state.proposals)
    fresh = np.concatenate([points_of(proposal, first + number) for number, proposal in enumerate(proposals)])
    begun = state._replace(
        proposals=(*state.proposals, *proposals),
        latest=len(proposals),
        exchanges=state.exchanges + 1,
        points=np.concatenate([state.points, fresh]),
        residual=np.concatenate([state.residual, np.zeros(len(fresh))]),
        each=np.concatenate([state.each, np.zeros((len(state.each), len(fresh)))], axis=1),
        noise=np.concatenate([state.noise, np.zeros(len(fresh))]),
        moved=np.zeros_like(state.moved),
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


def _asked_at(state: Correcting) -> NDArray[np.intp]:
    """Which points of all are those of this exchange that are asked for."""
    count = student.SCRAMBLES * sum(proposal.per_scramble for proposal in _latest(state))
    first = len(state.points) - count
    return np.asarray(first + np.flatnonzero(state.within[first:]))


def asked(state: Correcting) -> Array:
    """The points of this exchange, (S, m)."""
    return state.points[_asked_at(state)]


def _latest(state: Correcting) -> tuple[Proposal, ...]:
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
    points, where = asked(state), _asked_at(state)
    residual, noise, answered = state.residual.copy(), state.noise.copy(), state.answered.copy()
    each, reach, constants = state.each.copy(), state.reach.copy(), state.constants.copy()
    is_proper, moved, effects = state.is_proper, state.moved, _effects(sites.q, _latest(state), points)
    for client_id in sorted(new):
        k, reply = sites.where[client_id], replies[client_id]
        site = Gaussian(sites.linear[k], _sites.dense(sites.precision[k], sites.structure))
        values = np.asarray(reply["values"], dtype=float)
        values = np.where(values <= 0.1 * NO_VALUE, np.nan, values)
        answered[k] = True
        constants[k] = reply["constant"]
        reach[k] = float(reply["reach"]) or np.inf
        term = values - gaussian.log_kernel(site, points)
        if len(each):
            each[k, where] = term
        if state.distrusted[k]:
            continue
        residual[where] += term
        errors = np.asarray(reply["errors"], dtype=float)
        noise[where] += errors**2
        by_client = errors @ effects
        moved = moved + np.stack([by_client, by_client**2])
        is_proper = is_proper and float(reply["proper"]) > 0.5
    after = state._replace(
        residual=residual,
        each=each,
        reach=reach,
        noise=noise,
        constants=constants,
        moved=moved,
        answered=answered,
        waited=0 if new else state.waited + 1,
        rounds=state.rounds + 1,
        is_proper=is_proper,
    )
    return _truncated(after, sites)


def _effects(q: Gaussian, proposals: tuple[Proposal, ...], points: Array) -> Array:
    """What a unit of log density at each point moves means and log sds of q by, in sds: (S, 2 m)."""
    if not len(points):
        return np.zeros((0, 2 * points.shape[1]))
    weights = normalise(gaussian.log_density(q, points) - log_mixture(proposals, points))
    z = (points - gaussian.mean(q)) / gaussian.standard_deviations(q)
    parts = np.concatenate([z, 0.5 * (z**2 - 1.0)], axis=1)
    return np.asarray(weights[:, None] * (parts - weights @ parts))


def is_over(state: Correcting) -> bool:
    """Whether everyone has answered, or nobody new has for longer than chance would have it."""
    answered = int(state.answered.sum())
    if answered == len(state.answered):
        return True
    if not answered:
        return state.waited > _PATIENCE
    a_round = answered / (state.rounds - state.waited)
    return state.waited > 2 + 5 * (len(state.answered) / a_round - 1)


def judge(state: Correcting, sites: Sites, exchanges: int, stream: int, trust: float | None) -> Judged:
    """Reweigh once an exchange is over: done, or another exchange from a proposal fitted to what was found."""
    if not is_over(state):
        left = int(len(state.answered) - state.answered.sum())
        return Judged(state, False, f"{left} clients have not answered yet at the points of the correction")
    state = state._replace(missing=state.missing | ~state.answered)
    if trust is not None and len(state.answered) > 1:
        state = _without_liars(state, sites, trust)
    found = reweigh(sites.q, state.proposals, state.points, state.residual)
    state = state._replace(found=found)
    radius = reached(state)
    by = next((name for name, k in sites.where.items() if state.reach[k] == radius), "")
    if found is None:
        far = f" (asked within {radius:g} prior sds, as site {by!r} answers)" if by else ""
        remedy = "use local=fedppl.NUTS()"
        if np.isfinite(radius) and not np.any(state.within):
            remedy = f"no point lies within {radius:g} prior sds: allow a larger distance, or raise radius="
        return Judged(state, True, f"no point of the correction has a value at every client{far}; {remedy}")
    cut = region.beyond(sites.prior, radius, sites.q, found.points, found.weights)
    is_cut = float(cut.effect.sum()) > MOST_CUT
    # Points that were proposed for this posterior have its tails within them, and not those of one without a client.
    trusted = is_trusted(found) and found.second_k <= MOST_SECOND_K
    enough = trusted and found.ess >= _LEAST and found.error <= _SMALL
    if enough and state.exchanges == 1:  # what lies far out may have been missed by all scrambles alike
        enough = not has_heavy_tails(found.points, found.weights)
    # whatever points there were
    hopeless = bool(np.any(state.missing) or np.any(state.distrusted) or (is_cut and trusted))
    if not enough and not hopeless and state.exchanges < exchanges:
        count = 2 * sum(proposal.per_scramble for proposal in _latest(state))
        return Judged(_exchange(state, sites, _refitted(found, count, sites.q), stream), False, "")
    names = list(sites.where)
    noise = float(np.sqrt(found.weights @ np.nan_to_num(state.noise)))
    # Of any sign they add up by their squares, and errors that clients have alike as they are.
    moved = float(max(np.max(np.abs(state.moved[0])), np.sqrt(np.max(state.moved[1]))))
    lost = float(np.mean(np.isnan(state.residual[state.within])))
    problems = [
        _untrusted.without([names[k] for k in np.flatnonzero(state.missing)]),
        _untrusted.misleading([names[k] for k in np.flatnonzero(state.distrusted)], trust),
        _untrusted.beyond_radius(cut, radius, by, sites) if is_cut else "",
        "" if trusted else _untrusted.beyond_q(found, sites),
        f"{lost:.1%} of the points of the correction are without a value" if lost > _LOST else "",
        # What a client that misleads said of its errors is in these sums.
        _untrusted.uncertain(noise, moved)
        if (noise > NOISE or moved > _MOVED) and not np.any(state.distrusted)
        else "",
    ]
    message = "; ".join(filter(None, problems))
    return Judged(state._replace(trusted=not message), True, message)


def _without_liars(state: Correcting, sites: Sites, trust: float) -> Correcting:
    """Leave out who moves a mean by more than `trust` sds of q, or a log sd by more than that, the worst first."""
    sd = gaussian.standard_deviations(sites.q)
    while True:
        by_each = np.zeros(len(state.distrusted))
        found = reweigh(sites.q, state.proposals, state.points, state.residual)
        for k in np.flatnonzero(~state.distrusted & state.answered):
            rest = reweigh(sites.q, state.proposals, state.points, _residual_without(state, int(k)))
            by_each[k] = _apart(found, rest, sd)
        worst = int(np.argmax(by_each))
        if not by_each[worst] > trust:
            return state
        rest_residual = _residual_without(state, worst)
        state = state._replace(residual=rest_residual, distrusted=state.distrusted | (np.arange(len(by_each)) == worst))


def _residual_without(state: Correcting, k: int) -> Array:
    """The residual where the site of client k stands for it."""
    return np.asarray(state.each[~state.distrusted & (np.arange(len(state.each)) != k)].sum(axis=0))


def _apart(one: Reweighted | None, other: Reweighted | None, sd: Array) -> float:
    """Largest difference of means in sds of q, and of log sds; infinite where one has no point left."""
    if other is None:
        return 0.0
    if one is None:
        return np.inf
    logs = 0.5 * np.log(np.diag(one.covariance) / np.diag(other.covariance))
    return float(max(np.max(np.abs(one.mean - other.mean) / sd), np.max(np.abs(logs))))


def says_more(state: Correcting) -> bool:
    """Whether the posterior differs from q by anything that shows."""
    if state.found is None:
        return False
    centred = state.residual - np.nanmedian(state.residual)
    return float(np.sqrt(state.found.of_q @ np.nan_to_num(centred, nan=0.0, posinf=0.0, neginf=0.0) ** 2)) > _SHOWS


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
    largest = float(np.abs(np.concatenate([reply["errors"], reply["constant"]])).max())
    if not largest <= _MOST_ERROR:
        return f"'errors' or 'constant' reaches {largest:.2g}, at most {_MOST_ERROR:g} allowed"
    return None


def _refitted(found: Reweighted, count: int, q: Gaussian) -> tuple[Proposal, ...]:
    """The t with the moments of the weighted points, somewhat wider where few are left, and out into their tails."""
    m = len(found.mean)
    covariance = found.covariance
    few = found.ess < 10 * m  # too few to say how wide
    if few:
        covariance = covariance + 0.5 * gaussian.covariance(q) / max(found.ess / m, 1.0)
    outer = () if few else beyond(found.points, found.weights, count // 2)
    inner = count - sum(proposal.per_scramble for proposal in outer)
    return (*with_tails(found.mean, covariance, inner, skewness(found.points, found.weights)), *outer)
