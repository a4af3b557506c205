"""What is read of EP's state: what clients are told in the end, the corrected posterior, and it without a client."""

from __future__ import annotations

import numpy as np

from fedppl import contracts, gaussian
from fedppl.algorithms.ep import _judged, _starts, _trust
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep._correction import reached, weighed
from fedppl.algorithms.ep._evidence import squares_of_constants, squares_of_errors
from fedppl.algorithms.ep._state import EPState
from fedppl.contracts.algorithm import WithoutClient
from fedppl.numerics import region
from fedppl.numerics.proposals import has_heavy_tails
from fedppl.numerics.reweighting import Reweighted
from fedppl.types import Array, DeclarationError, Message


def is_correcting(state: EPState) -> bool:
    """Whether rounds of the correction are still to come, or did not come to anything."""
    return state.correction is not None and not state.correction.trusted


def corrected(state: EPState) -> Reweighted | None:
    """The reweighted points, where they are to be trusted and say more than q does."""
    held = state.correction
    return held.found if held is not None and held.trusted and _judged.says_more(held) else None


def conclusion(state: EPState, client_id: str) -> Message:
    """q and the client's cavity; and the points of the posterior itself, where there are some."""
    message = dict(_sites.conclusion(state.sites, client_id, state.prior_share))
    found = corrected(state)
    if found is not None:
        weighted = found.weights > 0
        message |= {"points": found.points[weighted], "weights": found.weights[weighted]}
        message["joins"] = np.array(float(client_id not in state.sites.where))
    return message


def details(state: EPState) -> contracts.Details:
    """What the state knows of every coordinate and of every client."""
    exact: dict[str, tuple[tuple[str, ...], Array]] = {}
    if state.correction is not None and state.correction.trusted:
        q, found = state.sites.q, corrected(state)
        exact["corrected_mean"] = ("rows",), gaussian.mean(q) if found is None else found.mean
        exact["corrected_covariance"] = (
            ("rows", "columns"),
            gaussian.covariance(q) if found is None else found.covariance,
        )
    return {
        "last_change": (("rows",), state.last_change),
        "skewness": (("rows",), state.skewness),
        "pull": (("client", "rows"), _trust.pulls(state.sites)),
        **exact,
    }


def resume(first: EPState, last: EPState) -> EPState:
    """Begin with the sites of the clients that another fit had too; from the prior where they leave no posterior."""
    old, new = last.sites, first.sites
    if old.structure != new.structure:
        raise DeclarationError("start= is a fit with another structure=; give both the same.")
    if last.warm_start is not None:
        return first
    linear, precision = new.linear.copy(), new.precision.copy()
    for client_id in new.where.keys() & old.where.keys():
        k, before = new.where[client_id], old.where[client_id]
        linear[k], precision[k] = old.linear[before], old.precision[before]
    sites = _sites.update(new, linear, precision)
    if not gaussian.is_proper(sites.q):
        return first
    if last.starts is not None and _starts.are_several(last.starts.modes):  # however little some had: it is another now
        return first
    return first._replace(sites=sites, warm_start=None)


def without(state: EPState, client_id: str, log_ratio: contracts.LogRatio | None) -> WithoutClient:
    """The posterior without a client: q over its site, and the points of the correction without its answers.

    A prior that is not Gaussian stays whole: `log_ratio` makes up for the share that the client carried.
    """
    k, sites, held = state.sites.where[client_id], state.sites, state.correction
    cavity, unknown = _sites.cavity(sites, client_id), contracts.LogEvidence(np.nan, np.nan)
    lacks_prior = state.prior_share and log_ratio is None  # its share of the prior would go with the client
    if held is None or held.found is None or not held.trusted or not len(held.each) or lacks_prior:
        return WithoutClient(cavity, None, unknown)
    residual = held.residual - held.each[k]
    if state.prior_share and log_ratio is not None:
        residual = residual + state.prior_share * log_ratio(held.points)
    base = cavity
    if not gaussian.is_proper(cavity):
        base, site = sites.q, gaussian.quotient(sites.q, cavity)
        residual = residual - gaussian.log_kernel(site, held.points)
    found = weighed(held, base, residual)
    mass = 0.0
    if found is not None:  # it may reach farther out than the posterior of all does
        cut = region.beyond(sites.prior, reached(held), base, found.points, found.weights)
        mass = float(cut.mass.sum())
        # Of one exchange no points are in its tails but those of a t about the posterior of all.
        unseen = held.exchanges == 1 and has_heavy_tails(found.points, found.weights)
        found = found if float(cut.effect.sum()) <= _judged.MOST_CUT and not unseen else None
    if found is None or not held.is_proper:
        return WithoutClient(cavity, found, unknown)
    with_it = gaussian.log_integral(sites.q) + held.found.log_ratio
    without_it = gaussian.log_integral(base) + found.log_ratio
    # What the client itself does not know of its values; that of the others is in both.
    own = squares_of_errors(found.weights, held.errors[k], held.errors[k] ** 2)
    own += squares_of_constants(held, np.arange(len(held.constants)) == k)
    of_all = region.beyond(sites.prior, reached(held), sites.q, held.found.points, held.found.weights)
    own += mass**2 + float(of_all.mass.sum()) ** 2
    error = float(np.sqrt(held.found.log_ratio_error**2 + found.log_ratio_error**2 + own))
    return WithoutClient(cavity, found, contracts.LogEvidence(with_it - without_it, error))
