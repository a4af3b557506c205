"""One-shot averaging: the product of clients' Gaussian posteriors, each from its data and a part of the prior."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import contracts, gaussian, structure
from fedppl.algorithms.averaging.fedavg import report
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep.sites import Sites, indefinite
from fedppl.algorithms.one_shot.separate import Heard, alone, near_posterior
from fedppl.contracts import ClientUpdate, ClientView, LocalInference, Received, Report
from fedppl.gaussian import Gaussian
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.local.target import at_target, draw_target, local_inference, unpack_target
from fedppl.types import Layout, Message, Rng


class PrecisionWeightedState(NamedTuple):
    """What the server knows: the ledger of sites, and which clients have replied."""

    sites: Sites  # client's reply / p(φ)^(1/K); zero for a client that has not replied yet
    has_replied: NDArray[np.bool_]  # (K,)
    prior_share: float


def PrecisionWeighted(*, local: LocalInference | None = None) -> contracts.Algorithm[PrecisionWeightedState, None]:
    r"""Product of the clients' Gaussian posteriors in one round.

    .. math:: Q_k = \Sigma_k^{-1}, \quad r_k = \Sigma_k^{-1} \mu_k, \qquad
              Q = \sum_k Q_k, \quad r = \sum_k r_k, \qquad q = N(Q^{-1} r, Q^{-1})

    with the moments (μ_k, Σ_k) of f_k(φ) p(φ)^(1/K). Exact where every f_k is Gaussian. A client counts once: its
    replies in later rounds change nothing. p(φ)^(1/K) stands for each client that is missing, so that q is the
    posterior of the others' data, with the whole prior.

    Parameters
    ----------
    local
        Local inference that gives moments; by default `NestedLaplace`.

    Returns
    -------
    Algorithm

    Notes
    -----
    The server keeps each client's reply, so that a client can get its cavity when it draws θ_k.

    *When this fails.* A client with few data has a wide posterior, often skewed and far from the joint one, and a
    Gaussian matched there is wrong where the joint posterior lies: so with scale parameters (τ) of small clients.
    `EP` matches it in the right place.

    References
    ----------
    .. [1] Neiswanger, Wang and Xing (2014), Asymptotically exact, embarrassingly parallel MCMC, section 3.1.
    .. [2] FedLin, section 6.2.
    """
    inference = local_inference("local", local, NestedLaplace())
    return contracts.Algorithm[PrecisionWeightedState, None](
        name="PrecisionWeighted",
        settings={"local": inference.describe()},
        init=_init,
        broadcast=lambda state, client_id: alone(state.sites.prior, state.prior_share, len(state.has_replied)),
        update_client=functools.partial(_update_client, local=inference),
        update_server=_update_server,
        replies=contracts.Replies(_shapes, _reject),
        result=contracts.Result(
            lambda state, client_id: _sites.conclusion(state.sites, client_id, state.prior_share),
            functools.partial(draw_target, local=inference),
            contracts.Posterior(lambda state: state.sites.q),
            tests_convergence=True,
        ),
        needs=contracts.Needs(inference.check),
        disclosure=contracts.Disclosure(at_target, concludes=at_target),
    )


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng) -> PrecisionWeightedState:
    return PrecisionWeightedState(
        sites=_sites.empty(layout, clients, structure.full(layout.size)),
        has_replied=np.zeros(len(clients), dtype=bool),
        prior_share=0.0 if layout.prior_is_gaussian else 1.0 / len(clients),
    )


def _update_client(
    client: ClientView, personal: None, message: Message, rng: Rng, *, local: LocalInference
) -> ClientUpdate[None]:
    """Natural parameters of the client's posterior under its part of the prior. Clients keep no state."""
    moments = local.tilted(near_posterior(unpack_target(client, message), local), rng)
    reply = {"linear": moments.precision @ moments.mean, "precision": gaussian.pack_triangle(moments.precision)}
    return ClientUpdate(None, reply, moments.diagnostics)


def _shapes(state: PrecisionWeightedState) -> dict[str, tuple[int, ...]]:
    m = state.sites.structure.size
    return {"linear": (m,), "precision": (m * (m + 1) // 2,)}


def _natural(reply: Message) -> Gaussian:
    precision = gaussian.unpack_triangle(np.asarray(reply["precision"], dtype=float))
    return Gaussian(np.asarray(reply["linear"], dtype=float), precision)


def _reject(state: PrecisionWeightedState, reply: Message) -> str | None:
    """A posterior has a positive definite precision."""
    posterior = _natural(reply)
    return None if gaussian.is_proper(posterior) else indefinite("precision", posterior.precision)


def _update_server(state: PrecisionWeightedState, received: Received) -> tuple[PrecisionWeightedState, Report]:
    sites, has_replied = state.sites, state.has_replied.copy()
    part = gaussian.power(sites.prior, 1.0 / len(has_replied))  # of p(φ) in each reply
    linear, precision = sites.linear.copy(), sites.precision.copy()
    for client_id, reply in received.each.items():
        k = sites.where[client_id]
        if not has_replied[k]:
            site = gaussian.quotient(_natural(reply), part)
            linear[k], precision[k] = site.linear, _sites.in_structure(site.precision, sites.structure)
            has_replied[k] = True
    count = int(np.sum(has_replied))
    if np.array_equal(has_replied, state.has_replied):
        return state, Report(Heard(count))
    message = f"q has the data of {count} of {len(has_replied)} clients; raise rounds="
    after = state._replace(sites=_sites.update(sites, linear, precision), has_replied=has_replied)
    return after, report(Heard(count), bool(np.all(has_replied)), message)
