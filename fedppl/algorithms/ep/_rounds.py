"""EP's kinds of rounds at the server: an expansion at a point, moments matched, and log factors at points."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedppl import gaussian
from fedppl.algorithms.ep import _correction, _judged
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep import starts as _starts
from fedppl.algorithms.ep import warm_start as _warm_start
from fedppl.algorithms.ep._correction import Correcting
from fedppl.algorithms.ep._damping import damped_step, hold_back, named, targets
from fedppl.algorithms.ep._state import EPInfo, EPState, Taken
from fedppl.algorithms.ep.correction import Correction
from fedppl.algorithms.ep.warm_start import WarmStart
from fedppl.algorithms.ep.why import hardly_a_prior, pulls_alone, why_not_arrived
from fedppl.results import departure
from fedppl.types import Message, Status

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
    cause = hardly_a_prior(state.sites.prior, state.sites.labels) if status is Status.STALLED else ""
    message = "; ".join(filter(None, (judged.message, cause, judged.state.said)))
    return Taken(state._replace(correction=judged.state), info, status, message)
