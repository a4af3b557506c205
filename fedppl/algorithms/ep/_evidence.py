r"""Log evidence: from the correction, or where there was none, EP's own approximation.

.. math:: Z \approx \frac{\int \tilde p(\varphi) \prod_k \tilde q_k(\varphi)\, d\varphi}
                            {\int \tilde p(\varphi)\, d\varphi}
          \prod_k \mathrm E_q\left[\frac{f_k(\varphi)}{\tilde q_k(\varphi)}\right]

(tildes: kernels, without constants). A client's factor is compared with its own site, as if the others' were Gaussian.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fedppl import gaussian
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep._correction import Correcting, reached
from fedppl.algorithms.ep._judged import NOISE
from fedppl.algorithms.ep._verdict import EPState
from fedppl.algorithms.ep.sites import Sites
from fedppl.contracts import ClientView, LogEvidence
from fedppl.gaussian import Gaussian
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.numerics import importance, region
from fedppl.numerics.importance import STREAMS, normalise, standard_normal, stream_of
from fedppl.numerics.region import SCRAMBLES
from fedppl.types import Array, DeclarationError, LocalFailure, NotConvergedError

_POINTS = 256  # of a scramble of q, for each client
_LOST = 0.01  # share of them that may be without a value
_FACTOR = NestedLaplace().factor


def evidence(state: EPState, clients: Mapping[str, ClientView]) -> LogEvidence:
    """From the correction, which has to be trusted; without one from the clients that are in this process."""
    held = state.correction
    if held is not None:
        return of_correction(held, state.sites, state.prior_share)
    if state.corrects:
        raise NotConvergedError("the run ended before the correction, from which the evidence comes: see fit.message.")
    absent = [name for name in state.sites.where if name not in clients]
    if absent:
        raise DeclarationError(
            f"EP's own evidence needs the data of all clients in this process, and those of {absent[:5]} are not here: "
            "give fedppl.load(..., clients=) the data of all; where clients are sites of their own, use "
            "EP(correction=fedppl.Correction()), with local=fedppl.NestedLaplace() or fedppl.Laplace()."
        )
    return _own(state, clients)


def of_correction(state: Correcting | None, sites: Sites, prior_share: float) -> LogEvidence:
    """Log of the integral of prior and factors over φ."""
    if state is None or state.found is None or not state.trusted:
        raise NotConvergedError(
            "the correction of q is not to be trusted, so that there is no evidence: see fit.message."
        )
    require_proper(state.is_proper)
    # Of what lies beyond the radius, the posterior is taken to have the share that q has.
    found = state.found
    cut = region.beyond(sites.prior, reached(state), sites.q, found.points, found.weights)
    squares = squares_of_constants(state, ~state.distrusted)
    if squares > NOISE**2:
        raise NotConvergedError(
            f"what tails of clients' own variables leave out of the log evidence may be {np.sqrt(squares):.2g}, though "
            "it moves no moment of what is shared: declare priors with lighter tails (pm.Normal, or pm.StudentT with "
            "nu=4 or more)."
        )
    squares += squares_of_errors(found.weights, state.alike, state.noise)
    error = float(np.sqrt(found.log_ratio_error**2 + cut.mass.sum() ** 2 + squares))
    return LogEvidence(log_of_gaussians(sites, prior_share) + found.log_ratio, error)


def squares_of_errors(weights: Array, alike: Array, noise: Array) -> float:
    """Square of what clients' errors (S,) shift a log integral by: their sum, and their squares."""
    return float((weights @ np.nan_to_num(alike)) ** 2 + weights @ np.nan_to_num(noise))


def squares_of_constants(state: Correcting, of: NDArray[np.bool_]) -> float:
    """Square of what these clients' values are all off by: of some alike, of others by chance."""
    alike, by_chance = state.constants[of].T
    same = 1.0 + (len(alike) - 1.0) / STREAMS  # of many clients some have their random points in common
    return float(np.abs(alike).sum() ** 2 + same * np.sum(by_chance**2))


def require_proper(is_proper: bool) -> None:
    """Refuse priors without a normalising constant."""
    if not is_proper:
        raise DeclarationError(
            "a prior has no normalising constant that is known, so that there is no evidence: a pm.Potential, pm.Flat "
            "or pm.HalfFlat, pm.CAR or pm.ICAR, a pm.CustomDist with logp=, or a transform that cuts off a part of a "
            "density. Declare priors that integrate to one."
        )


def log_of_gaussians(sites: Sites, prior_share: float) -> float:
    """Log of the integral of q's kernel over that of the prior's."""
    # Of a prior that is not Gaussian the clients' shares make up, its constant included.
    return gaussian.log_integral(sites.q) - (0.0 if prior_share else gaussian.log_integral(sites.prior))


def _own(state: EPState, clients: Mapping[str, ClientView]) -> LogEvidence:
    sites = state.sites
    require_proper(all(client.has_proper_prior for client in clients.values()))
    found = []
    for client_id in sorted(clients):
        site = _sites.site(sites, sites.where[client_id])
        found.append(_of_client(clients[client_id], sites.q, site, state.prior_share))
    # Errors that clients have alike add up as they are, others by their squares.
    shift, unknown = sum(one.shift for one in found), float(np.sqrt(sum(one.unknown for one in found)))
    worst = max(unknown, abs(shift))
    if worst > NOISE:
        raise NotConvergedError(
            f"clients' log densities are uncertain by {worst:.2g} in sum, and EP's own evidence would be: declare the "
            "model so that few local variables depend on each other, or with lighter tails."
        )
    squares = sum(one.variance for one in found) + max(shift**2, unknown**2)
    value = log_of_gaussians(sites, state.prior_share) + sum(one.value for one in found)
    return LogEvidence(value, float(np.sqrt(squares)), "EP")


class _Ratio(NamedTuple):
    """log E_q[f_k / site] of one client."""

    value: float
    variance: float  # of the points
    shift: float  # that errors of log f_k would make
    unknown: float  # their mean square


def _of_client(client: ClientView, q: Gaussian, site: Gaussian, prior_share: float) -> _Ratio:
    """From points of independent scrambles, as they come: whitened ones have too little spread of distances."""
    assert _FACTOR is not None
    mean, root = gaussian.affine(q)
    points = mean + standard_normal(len(mean), _POINTS, stream_of(client.client_id), SCRAMBLES) @ root.T
    try:
        factor = _FACTOR(client, points, mean, prior_share)
    except LocalFailure as error:
        raise NotConvergedError(f"client {client.client_id!r} has no EP evidence: {error}") from error
    ratio: Array = factor.values - gaussian.log_kernel(site, points)
    lost = float(np.mean(~np.isfinite(ratio)))
    k = importance.pareto_k(ratio) if lost <= _LOST else np.inf
    if not k <= importance.limit(len(ratio)):
        why = f"Pareto k {k:.2f}" if lost <= _LOST else f"{lost:.0%} of the points of q are without a value"
        raise NotConvergedError(
            f"client {client.client_id!r} is too far from its Gaussian site for EP's own evidence ({why}); use "
            "EP(correction=fedppl.Correction(), local=fedppl.NestedLaplace())."
        )
    ratio = np.where(np.isfinite(ratio), ratio, -np.inf)
    each = logsumexp(ratio.reshape(SCRAMBLES, -1), axis=1)
    value = float(logsumexp(each) - np.log(len(ratio)))
    ratios = np.exp(each - np.log(len(ratio) / SCRAMBLES) - value)
    weights, errors = normalise(ratio), np.nan_to_num(factor.errors)
    return _Ratio(
        value,
        float(np.var(ratios, ddof=1) / SCRAMBLES),
        float(weights @ errors) + abs(factor.constant.alike),
        float(weights @ errors**2) + factor.constant.by_chance**2,
    )
