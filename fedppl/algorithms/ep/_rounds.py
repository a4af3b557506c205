"""EP's kinds of rounds at the server: an expansion at a point, moments matched, and log factors at points."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedppl import gaussian
from fedppl.algorithms.ep import _correction, _judged, _starts
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep import warm_start as _warm_start
from fedppl.algorithms.ep._correction import Correcting
from fedppl.algorithms.ep._damping import damped_step, hold_back, named, targets
from fedppl.algorithms.ep._state import EPInfo, EPState, Taken
from fedppl.algorithms.ep.correction import Correction
from fedppl.algorithms.ep.sites import Sites, dense
from fedppl.algorithms.ep.warm_start import WarmStart
from fedppl.results import departure
from fedppl.types import Array, Message, Status, as_declared

# Expansions a client: a dozen do even from a prior a million times too wide.
_BUDGET = 25.0
# Posterior sds that q may still move by in a round, for a correction where rounds have run out.
_NEAR = 0.1
# The share of a skewness that is left without one client, above which it is not that client's alone.
_SEVERAL = 0.4
# What a client may say of its Monte Carlo error, in posterior sds: NUTS gives no moments of fewer than m + 4 draws.
_MOST_CLAIMED = 0.5


def newton_round(state: EPState, before: WarmStart, replies: Mapping[str, Message], trust: float | None) -> Taken:
    """One round of the warm start; on arrival, sites and q stay and refinement begins."""
    sites, after, bounded = state.sites, before._replace(spent=before.spent + 1.0), None
    if state.starts is not None and not state.starts.asked_for and 0 < len(replies) < len(sites.where):
        # Searches that nobody asked for would take many rounds.
        if state.starts.modes:
            ended, sites, _ = _starts.next_search(state.starts._replace(left=state.starts.left[:0]), sites, None)
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
    found = _starts.arrived_at(taken.state.sites, search) if search.arrived else None
    after, sites, following = _starts.next_search(starts, taken.state.sites, found)
    if following is None and not after.modes:
        return taken
    message = "" if following is None else f"{len(after.left) + 1} warm starts are left"
    state = taken.state._replace(starts=after, sites=sites, warm_start=following)
    return taken._replace(state=state, status=Status.RUNNING, message=message)


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
    if not np.any(of_several & (np.abs(state.skewness) - noise > departure.SKEWED)):
        return taken
    message = "; ".join(filter(None, (departure.unknown(departure.CORRECTION), taken.message, taken.skewed)))
    return taken._replace(status=Status.STALLED, message=message, skewed="")


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


def corrected_next(taken: Taken, correction: Correction, trust: float | None) -> Taken:
    """Begin the correction in place of a converged end, where q is proper and small enough for it."""
    state = taken.state
    radius = np.inf if correction.radius is None else correction.radius
    begun = _correction.start(
        state.sites, state.skewness, correction.points, radius, state.stream, keep=trust is not None
    )
    said = f"before the correction: {taken.message}" if taken.message else ""
    return taken._replace(
        state=state._replace(correction=begun._replace(said=said)),
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
    judged = _judged.judge(after, state.sites, correction.exchanges, state.stream, trust, remedy)
    found = judged.state.found
    info = EPInfo("correction", np.nan, np.nan, state.damping, np.nan, np.nan, np.nan)
    if found is not None:
        info = info._replace(correction_ess=found.ess, correction_pareto_k=found.pareto_k)
    status = Status.RUNNING
    if judged.done:
        status = Status.CONVERGED if judged.state.trusted else Status.STALLED
    cause = hardly_a_prior(state.sites) if status is Status.STALLED else ""
    message = "; ".join(filter(None, (judged.message, cause, judged.state.said)))
    return Taken(state._replace(correction=judged.state), info, status, message)


_ALONE = 100.0  # times the others' slope
# A prior this wide on a log scale spans e^±30: hardly a prior, and the search begins in the middle of it.
_FLAT = 30.0
# Slopes, in sds of the curvature there, below which a point is level: Newton's search arrives at the same number.
_LEVEL = 0.3
_MANY_PRIOR_SDS = 3.0
# Times the prior's precision: a coordinate that is known so well is pinned by a scale that goes to zero; where clients'
# curvature has grown without bound meanwhile, less says so.
_PINNED, _PINNED_BEYOND = 1e12, 1e6
_LOG = "_log__"


def why_not_arrived(sites: Sites, state: WarmStart) -> str:
    """Say that the search has not arrived, where it stands, and what helps."""
    silent = [client_id for client_id, k in sites.where.items() if not state.has_replied[k]]
    if silent:
        return f"the warm start needs every client once, and clients {silent[:5]} have not answered"
    absent = [client_id for client_id in sites.where if state.pending and client_id not in state.pending]
    cause = (
        f"it waits for an expansion of every client at its point, and clients {absent[:5]} have sent none yet"
        if absent
        else _cause(sites, state.anchor, dict(state.unusable), dict(state.reasons))
    )
    return f"the warm start has not reached the mode of the marginal posterior: {cause}"


def pulls_alone(sites: Sites, x: Array) -> str:
    """Name the client whose slope at x is far beyond the others', where q is no posterior to measure pulls in."""
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


def hardly_a_prior(sites: Sites) -> str:
    """Name priors on positive variables that are all but improper; empty where there are none."""
    return _flat(sites.labels, gaussian.standard_deviations(sites.prior))


def _cause(sites: Sites, point: Array, unusable: dict[str, str], earlier: dict[str, str]) -> str:
    """The likeliest cause, with a remedy, where `sites` are expansions at the point (m,) and nothing led on from there.

    `unusable` holds the clients whose last expansion could not be used, with the reason; an empty one where the
    client's own search failed. `earlier` holds those of which that was so at any point.
    """
    prior = sites.prior
    spread = gaussian.standard_deviations(prior)
    away = (point - gaussian.mean(prior)) / spread
    return (
        _flat(sites.labels, spread)
        or _saddle(sites, point)
        or _collapse(sites, point, away, _PINNED_BEYOND if any(unusable.values()) else _PINNED)
        or _stopped(unusable)
        or _far(sites.labels, away)
        or _stopped(earlier)
        or _convex(sites, point)
        or (
            "give every variable a proper prior that says what is plausible, or compute without curvature: "
            "EP(local=fedppl.NUTS(), warm_start=False)"
        )
    )


def _flat(labels: tuple[str, ...], spread: Array) -> str:
    """A prior on a positive variable that is all but improper, as Gamma(.001, .001) is."""
    flat = [j for j, label in enumerate(labels) if _LOG in label and spread[j] > _FLAT]
    if not flat:
        return ""
    named = ", ".join(f"{_variable(labels[j])} (sd {spread[j]:.2g} on the log scale)" for j in flat[:3])
    return (
        f"the prior of {named} is all but improper, as Gamma(.001, .001) is: the search begins where it has its mass, "
        "far from any data. Declare one that says what is plausible, such as pm.HalfNormal, pm.Exponential or "
        "pm.Gamma(2, ...)"
    )


def _saddle(sites: Sites, point: Array) -> str:
    """A point that is level while the density curves upward from it: symmetric models have one at their centre."""
    values, vectors, root = _axes(sites)
    slopes = vectors.T @ (root @ (sites.q.linear - sites.q.precision @ point)) / np.sqrt(np.maximum(np.abs(values), 1))
    if values[0] >= 0 or np.abs(slopes).max() > _LEVEL:
        return ""
    named = _named(sites.labels, vectors[:, 0])
    return (
        f"at {_at(sites.labels, point, named)} the density is level, but rises on both sides, and has several modes: "
        "it may be symmetric there, as where a sign or the labels of a mixture can be exchanged, or rows may "
        "contradict a prior with heavy tails, or lie on either side of a threshold. Declare it so that one is left: "
        "positive (pm.HalfNormal), ordered (pm.distributions.transforms.ordered), with lighter tails, or by a prior "
        "that rules the others out"
    )


def _collapse(sites: Sites, point: Array, away: Array, least: float) -> str:
    """A scale that goes to zero pins what it is the scale of."""
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
    """Clients that have no expansion to give, however short the step."""
    if not unusable:
        return ""
    reasons = list(dict.fromkeys(reason for reason in unusable.values() if reason))
    return f"expansions of clients {list(unusable)[:5]} cannot be used at points on the way" + (
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
    own = np.einsum("kij,i,j->k", dense(sites.precision, sites.structure), axis, axis)
    clients = [client_id for client_id, k in sites.where.items() if own[k] < 0.1 * own.min()]
    return (
        f"at {_at(sites.labels, point, _named(sites.labels, vectors[:, 0]))} the density curves upward, at clients "
        f"{clients[:5]} the most: it shoots up nearby, as where a local scale has a single value and may go to 0, or "
        "has several modes. Declare a prior that keeps such a scale from 0 (pm.InverseGamma), or share it, or compute "
        "without curvature: EP(local=fedppl.NUTS(), warm_start=False)"
    )


def _axes(sites: Sites) -> tuple[Array, Array, Array]:
    """Principal axes of q's precision in prior sds: eigenvalues, eigenvectors, and the way there."""
    root = np.linalg.inv(np.linalg.cholesky(sites.prior.precision))
    values, vectors = np.linalg.eigh(root @ sites.q.precision @ root.T)
    return values, vectors, root


def _named(labels: tuple[str, ...], axis: Array) -> list[str]:
    """Coordinates that an axis lies in."""
    size = np.abs(axis)
    return [labels[j] for j in np.flatnonzero(size > 0.3 * size.max())]


def _variable(label: str) -> str:
    """The declared name of a coordinate's variable."""
    return label.partition("[")[0].removesuffix(_LOG)


def _spoken(label: str) -> str:
    """A coordinate whose value is given: that of a positive variable is its logarithm."""
    return f"log {as_declared(label)}" if _LOG in label else as_declared(label)


def _at(labels: tuple[str, ...], point: Array, named: list[str]) -> str:
    shown = ", ".join(f"{_spoken(name)} = {point[labels.index(name)]:.3g}" for name in named[:3])
    return shown + (f" and {len(named) - 3} more" if len(named) > 3 else "")
