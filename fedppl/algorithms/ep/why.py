"""Why a search for the mode has not arrived, and what helps: read off where it stands."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import spatial

from fedppl import gaussian
from fedppl.algorithms.ep._correction import Correcting, exchange, latest, reached, weighed
from fedppl.algorithms.ep.sites import Sites, dense
from fedppl.algorithms.ep.warm_start import WarmStart
from fedppl.gaussian import Gaussian
from fedppl.numerics import importance, region
from fedppl.numerics.importance import skewness
from fedppl.numerics.proposals import Proposal, beyond, has_heavy_tails, with_tails
from fedppl.numerics.region import Beyond
from fedppl.numerics.reweighting import FEWEST, MOST_ERROR, MOST_SECOND_K, Reweighted, apart, is_trusted, reweigh
from fedppl.types import Array, as_declared

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
ALL = "all clients"  # of a search by sums, which is of one client that stands for them


def why_not_arrived(sites: Sites, state: WarmStart, search: str = "the warm start") -> str:
    """Say that the search, so called, has not arrived, where it stands, and what helps."""
    silent = [client_id for client_id, k in sites.where.items() if not state.has_replied[k]]
    if silent:
        return f"{search} needs every client once, and clients {silent[:5]} have not answered"
    absent = [client_id for client_id in sites.where if state.pending and client_id not in state.pending]
    cause = (
        f"it waits for an expansion of every client at its point, and clients {absent[:5]} have sent none yet"
        if absent
        else _cause(sites, state.anchor, dict(state.unusable), dict(state.reasons))
    )
    return f"{search} has not reached the mode of the marginal posterior: {cause}"


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


def hardly_a_prior(prior: Gaussian, labels: tuple[str, ...]) -> str:
    """Name priors on positive variables that are all but improper; empty where there are none."""
    return _flat(labels, gaussian.standard_deviations(prior))


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
    return f"expansions of {_who(list(unusable))} cannot be used at points on the way" + (
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
        f"at {_at(sites.labels, point, _named(sites.labels, vectors[:, 0]))} the density curves upward, at "
        f"{_who(clients)} the most: it shoots up nearby, as where a local scale has a single value and may go to 0, or "
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


def _who(clients: list[str]) -> str:
    return ALL if clients == [ALL] else f"clients {clients[:5]}"


def _variable(label: str) -> str:
    """The declared name of a coordinate's variable."""
    return label.partition("[")[0].removesuffix(_LOG)


def _spoken(label: str) -> str:
    """A coordinate whose value is given: that of a positive variable is its logarithm."""
    return f"log {as_declared(label)}" if _LOG in label else as_declared(label)


def _at(labels: tuple[str, ...], point: Array, named: list[str]) -> str:
    shown = ", ".join(f"{_spoken(name)} = {point[labels.index(name)]:.3g}" for name in named[:3])
    return shown + (f" and {len(named) - 3} more" if len(named) > 3 else "")


def uncertain(noise: float, moved: float, by_nuts: str) -> str:
    """What is not known of clients' values moves moments too far."""
    return (
        f"means and sds may be off by up to {moved:.2g} sds: clients' log densities are uncertain by {noise:.2g} in "
        "all, since their own variables are too far from normal given the shared ones. Declare them on a scale where "
        "they are closer to normal, and standardised, z = (θ − μ) / τ, where data say little and they have a location "
        "μ and a scale τ; integrate them out where that is known, as pm.BetaBinomial does with a pm.Beta; or use "
        f"{by_nuts}"
    )


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
