r"""Log evidence: from the correction, or where there was none, EP's own approximation.

.. math:: Z \approx \frac{\int \tilde p(\varphi) \prod_k \tilde q_k(\varphi)\, d\varphi}
                            {\int \tilde p(\varphi)\, d\varphi}
          \prod_k \mathrm E_q\left[\frac{f_k(\varphi)}{\tilde q_k(\varphi)}\right]

(tildes: kernels, without constants). A client's factor is compared with its own site, as if the others' were Gaussian.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.special import logsumexp

from fedppl import contracts, gaussian
from fedppl.algorithms.ep import _correction, _sites
from fedppl.algorithms.ep._state import EPState
from fedppl.contracts import ClientView, LogEvidence
from fedppl.gaussian import Gaussian
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.numerics import pareto
from fedppl.numerics.importance import stream_of, whitened_points
from fedppl.types import Array, DeclarationError, NotConvergedError

_SCRAMBLES, _POINTS = 8, 64  # of q, for each client
_LOST = 0.01  # share of them that may be without a value
_FACTOR = NestedLaplace().factor


def evidence(state: EPState, clients: Mapping[str, ClientView]) -> LogEvidence:
    """From the correction, which has to be trusted; without one from the clients that are in this process."""
    held = state.correction
    if held is not None:
        return _correction.log_evidence(held, state.sites, state.prior_share)
    if state.corrects:
        raise NotConvergedError("the run ended before the correction, from which the evidence comes: see fit.message.")
    if not clients:
        raise DeclarationError(
            "there was no correction, and the evidence comes from it where clients are sites of their own; use "
            "EP(correction=fedppl.Correction()), with local=fedppl.NestedLaplace() or fedppl.Laplace()."
        )
    return _own(state, clients)


def _own(state: EPState, clients: Mapping[str, ClientView]) -> LogEvidence:
    sites = state.sites
    _correction.require_proper(all(client.has_proper_prior for client in clients.values()))
    total, squares = _correction.log_of_gaussians(sites, state.prior_share), 0.0
    for client_id in sorted(clients):
        k = sites.where[client_id]
        site = Gaussian(sites.linear[k], _sites.dense(sites.precision[k], sites.structure))
        value, error = _of_client(clients[client_id], sites.q, site, state.prior_share)
        total, squares = total + value, squares + error**2
    return contracts.LogEvidence(total, float(np.sqrt(squares)), "EP")


def _of_client(client: ClientView, q: Gaussian, site: Gaussian, prior_share: float) -> tuple[float, float]:
    """log E_q[f_k / site], with its standard error from independent scrambles."""
    assert _FACTOR is not None
    mean, root = gaussian.affine(q)
    first = 64 * stream_of(client.client_id)
    points = np.stack([mean + whitened_points(len(mean), _POINTS, first + j) @ root.T for j in range(_SCRAMBLES)])
    flat = points.reshape(-1, len(mean))
    found: Array = _FACTOR(client, flat, mean, prior_share).values - gaussian.log_kernel(site, flat)
    lost = float(np.mean(~np.isfinite(found)))
    k = pareto.pareto_k(found) if lost <= _LOST else np.inf
    if not k <= pareto.limit(len(found)):
        why = f"Pareto k {k:.2f}" if lost <= _LOST else f"{lost:.0%} of the points of q are without a value"
        raise NotConvergedError(
            f"client {client.client_id!r} is too far from its Gaussian site for EP's own evidence ({why}); use "
            "EP(correction=fedppl.Correction())."
        )
    each = logsumexp(np.where(np.isfinite(found), found, -np.inf).reshape(_SCRAMBLES, -1), axis=1)
    value = float(logsumexp(each) - np.log(len(found)))
    ratios = np.exp(each - np.log(len(found) / _SCRAMBLES) - value)
    return value, float(np.std(ratios, ddof=1) / np.sqrt(_SCRAMBLES))
