"""Why a search for the mode has not arrived, and what helps: read off where it stands."""

from __future__ import annotations

import numpy as np

from fedppl import gaussian
from fedppl.algorithms.ep.sites import Sites, dense
from fedppl.algorithms.ep.warm_start import WarmStart
from fedppl.gaussian import Gaussian
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
