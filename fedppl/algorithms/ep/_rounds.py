"""EP's kinds of rounds at the server: an expansion at a point, moments matched, and log factors at points."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian, structure
from fedppl.algorithms.ep import _correction, _trust, _verdict, why
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep import starts as _starts
from fedppl.algorithms.ep import warm_start as _warm_start
from fedppl.algorithms.ep._correction import Correcting
from fedppl.algorithms.ep._trust import Bounded
from fedppl.algorithms.ep._verdict import LESS_NOISE, Change, EPInfo, EPState, Taken, judge, shortest_step
from fedppl.algorithms.ep.correction import Correction
from fedppl.algorithms.ep.sites import Sites
from fedppl.algorithms.ep.warm_start import WarmStart
from fedppl.algorithms.ep.why import hardly_a_prior, pulls_alone, why_not_arrived
from fedppl.results import diagnostics
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
    if not np.any(of_several & (np.abs(state.skewness) - noise > diagnostics.SKEWED)):
        return taken
    message = "; ".join(
        filter(None, (diagnostics.unknown_shortfall(diagnostics.CORRECTION), taken.message, taken.skewed))
    )
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
    judged = why.judge(after, state.sites, correction.exchanges, state.stream, trust, remedy)
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


# One damped round of EP: backtracked until everything is proper, then bounded, judged, and told whom it holds back ----

logger = logging.getLogger(__name__)

_LITTLE = 0.05  # of a site: of a pull by 3 sds, that is 0.15


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
        now = _verdict.of_replies(q, d_linear, _sites.dense(d_packed, sites.structure))
        moves = _verdict.follow(moves, rows, now, np.full(len(rows), delta))
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
