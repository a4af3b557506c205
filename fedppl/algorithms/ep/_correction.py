"""The correcting round: clients answer log f_k at points that reach beyond q, and the points are reweighted.

No f_k depends on q, so that answers are gathered over as many rounds as it takes. The ledger of sites stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep.sites import NO_VALUE, Sites
from fedppl.contracts import ClientUpdate, ClientView, Constant, LocalInference
from fedppl.gaussian import Gaussian
from fedppl.numerics import importance, region
from fedppl.numerics.proposals import Proposal, points_of, with_tails
from fedppl.numerics.reweighting import Reweighted, apart, reweigh
from fedppl.types import Array, Message

_MOST_ERROR, _MOST_VALUE = 1e6, 1e9
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
    if not largest <= _MOST_ERROR:
        return f"'errors' or 'constant' reaches {largest:.2g}, at most {_MOST_ERROR:g} allowed"
    return None
