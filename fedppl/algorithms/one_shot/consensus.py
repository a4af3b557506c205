"""Clients' posteriors, each from its data and a part of the prior, combined in one round: averaged draws, or a product.

`ConsensusMonteCarlo` averages clients' draws one by one, `PrecisionWeighted` multiplies their Gaussians.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import contracts, gaussian, structure
from fedppl.algorithms import tolerances as tol
from fedppl.algorithms.averaging.fedavg import report
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep.sites import Sites, indefinite
from fedppl.algorithms.one_shot.separate import Heard, alone, near_posterior
from fedppl.contracts import ClientUpdate, ClientView, Draws, LocalInference, Received, Report
from fedppl.contracts.algorithm import sum_replies
from fedppl.gaussian import Gaussian
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.local.target import at_target, draw_target, local_inference, pack_target, unpack_target
from fedppl.numerics.importance import skewness
from fedppl.settings import described, whole
from fedppl.types import Array, DeclarationError, Layout, LocalFailure, Message, Rng


class ConsensusState(NamedTuple):
    """What the server knows: sums over the clients that have replied."""

    prior: Gaussian
    prior_share: float
    clients: tuple[str, ...]
    replied: tuple[str, ...]  # whose replies are in the sums
    included: float  # clients in the sums
    weighted: Array  # (S, m) Σ W_k φ_ks
    weight: Array  # packed Σ W_k

    @property
    def draws(self) -> Array:
        """The combined draws (S, m) on the unconstrained space; none before any reply."""
        if not self.included:
            return np.zeros((0, self.weighted.shape[1]))
        return np.asarray(np.linalg.solve(gaussian.unpack_triangle(self.weight), self.weighted.T).T)


class ConsensusClientState(NamedTuple):
    """What a client keeps to itself: its reply, to send the same again."""

    weighted: Array  # (S, m)
    weight: Array  # packed W_k


_Kept = ConsensusClientState | None  # none in its first round, or where it lost it


class _Settings(NamedTuple):
    local: LocalInference
    draws: int


def ConsensusMonteCarlo(
    *, local: LocalInference | None = None, draws: int = 1000
) -> contracts.Algorithm[ConsensusState, ConsensusClientState]:
    r"""Average the clients' draws, weighted by their precisions.

    .. math:: \phi_s = \Big(\sum_k W_k\Big)^{-1} \sum_k W_k\, \phi_{k,s}, \qquad
              \phi_{k,s} \sim f_k(\phi)\, p(\phi)^{1/K}, \qquad W_k = \widehat{\mathrm{Cov}}(\phi_{k,\cdot})^{-1}

    Exact up to Monte Carlo error where every f_k is Gaussian. The server keeps sums only. The φ_s, with covariance
    (Σ W_k)⁻¹ as ``fit.posterior``, are ``fit.state.draws``, and their skewness ``fit.idata["fit"]["skewness"]``.

    Parameters
    ----------
    local
        Local inference that draws; by default `NestedLaplace`.
    draws
        Number S of draws of every client, above the number of shared coordinates plus two.

    Returns
    -------
    Algorithm

    Raises
    ------
    DeclarationError
        If `draws` are too few, or, in a fit, where `local` is wrong for the declared model.

    Notes
    -----
    A client counts once and sends the same draws again when it is asked again. While clients are missing, ``posterior``
    has p(φ)^(1/K) in the place of each; the combined draws lack it.

    *When this fails.* An average of draws is a draw of the product only for Gaussians: skewed or bounded posteriors of
    single clients (as of a scale τ) are averaged to something too symmetric and in the wrong place. Clients with
    few rows leave p(φ)^(1/K) alone, which may be very wide. Compare with `EP`.

    References
    ----------
    .. [1] Scott et al. (2016), Bayes and big data: the consensus Monte Carlo algorithm, section 3, eqs. 2 to 5.
    """
    settings = _Settings(
        local_inference("local", local, NestedLaplace()), whole("draws", draws, tol.FEWEST_DRAWS, "better 1000")
    )
    return contracts.Algorithm[ConsensusState, ConsensusClientState](
        name="ConsensusMonteCarlo",
        settings=described(settings),
        init=functools.partial(_init, draws=settings.draws),
        broadcast=lambda state, client_id: alone(state.prior, state.prior_share, len(state.clients)),
        update_client=functools.partial(_update_client, settings=settings),
        update_server=_update_server,
        replies=contracts.Replies(
            lambda state: {"weighted": state.weighted.shape, "weight": state.weight.shape, "count": ()}, _reject
        ),
        result=contracts.Result(
            _final_message,
            functools.partial(_draw, settings=settings),
            contracts.Posterior(_posterior),
            _details,
            tests_convergence=True,
        ),
        needs=contracts.Needs(settings.local.check),
        disclosure=contracts.Disclosure(at_target, concludes=at_target),
    )


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng, *, draws: int) -> ConsensusState:
    m = layout.size
    if draws <= m + 2:
        raise DeclarationError(f"draws={draws} of {m} shared coordinates have no precision; use more than {m + 2}.")
    return ConsensusState(
        prior=layout.prior,
        prior_share=0.0 if layout.prior_is_gaussian else 1.0 / len(clients),
        clients=clients,
        replied=(),
        included=0.0,
        weighted=np.zeros((draws, m)),
        weight=np.zeros(m * (m + 1) // 2),
    )


def _update_client(
    client: ClientView, personal: _Kept, message: Message, rng: Rng, *, settings: _Settings
) -> ClientUpdate[ConsensusClientState]:
    """Weighted draws of the client's posterior under its part of the prior, ready to be added up."""
    kept, info = _drawn(client, personal, message, rng, settings)
    reply = {"weighted": kept.weighted, "weight": kept.weight, "count": np.array(1.0)}
    return ClientUpdate(kept, reply, info)


def _drawn(
    client: ClientView, personal: _Kept, message: Message, rng: Rng, settings: _Settings
) -> tuple[ConsensusClientState, Mapping[str, float]]:
    """The reply that the client has, or else new draws, with the diagnostics of the local inference."""
    if personal is not None and personal.weighted.shape == (settings.draws, client.shared_size):
        return personal, {}
    target = near_posterior(unpack_target(client, message), settings.local)
    sample = settings.local.draw(target, settings.draws, 1, rng)
    weight = precision_from_draws(sample.shared[0])
    return ConsensusClientState(sample.shared[0] @ weight, gaussian.pack_triangle(weight)), sample.diagnostics


def _reject(state: ConsensusState, reply: Message) -> str | None:
    """A weight is a positive definite matrix of at least one client."""
    weight = Gaussian(np.zeros(state.weighted.shape[1]), gaussian.unpack_triangle(np.asarray(reply["weight"], float)))
    if not gaussian.is_proper(weight):
        return indefinite("weight", weight.precision)
    count = float(reply["count"])
    return None if count >= 1 else f"'count' is {count:.3g}, and must be at least 1"


def _update_server(state: ConsensusState, received: Received) -> tuple[ConsensusState, Report]:
    """Add the replies of clients that have not replied before, in the order of their ids, so that digits are equal."""
    new = [name for name in sorted(received.each) if name not in state.replied]
    if not new:
        return state, Report(Heard(state.included))
    total = sum_replies({client_id: received.each[client_id] for client_id in new})
    included, expected = state.included + float(total["count"]), len(state.clients)
    after = state._replace(
        replied=tuple(sorted((*state.replied, *new))),
        included=included,
        weighted=state.weighted + total["weighted"],
        weight=state.weight + total["weight"],
    )
    message = f"the draws are of {included:g} of {expected} clients; raise rounds="
    return after, report(Heard(included), included >= expected, message)


def _posterior(state: ConsensusState) -> Gaussian:
    """The combined draws' mean and the covariance of their average; for clients that are missing, the prior's part."""
    combined = Gaussian(state.weighted.mean(axis=0), gaussian.unpack_triangle(state.weight))
    return gaussian.product(gaussian.power(state.prior, max(0.0, 1.0 - state.included / len(state.clients))), combined)


def _details(state: ConsensusState) -> contracts.Details:
    draws, count = state.draws, len(state.draws)
    of_draws = skewness(draws, np.full(count, 1.0 / count)) if count else np.zeros(draws.shape[1])
    return {"skewness": (("rows",), of_draws)}


def _final_message(state: ConsensusState, client_id: str) -> Message:
    """q, the client's part of the prior, and whether its draws are in q."""
    q, part = _posterior(state), gaussian.power(state.prior, 1.0 / len(state.clients))
    share = state.prior_share if client_id in state.clients else 0.0
    return {**pack_target(q, part, share), "took_part": np.array(1.0 if client_id in state.replied else 0.0)}


def _draw(
    client: ClientView, personal: _Kept, message: Message, draws: int, chains: int, rng: Rng, *, settings: _Settings
) -> Draws:
    """Draws of (φ, θ_k) from f_k and q without the client's own reply.

    A client that has lost its reply draws anew, which is right up to Monte Carlo error.
    """
    target = unpack_target(client, message)
    q, part = target.global_, target.cavity
    cavity = q
    if float(message["took_part"]):
        kept, _ = _drawn(client, personal, pack_target(part, part, target.prior_share), rng, settings)
        reply = Gaussian(kept.weighted.mean(axis=0), gaussian.unpack_triangle(kept.weight))
        cavity = gaussian.product(gaussian.quotient(q, reply), part)
    return settings.local.draw(target._replace(cavity=cavity), draws, chains, rng)


# A precision from draws -----------------------------------------------------------------------------------------------


def precision_from_draws(draws: Array) -> Array:
    """Estimate a precision from draws (n, m) by (n − m − 2) S⁻¹ with the scatter S = Σ (xᵢ − x̄)(xᵢ − x̄)ᵀ.

    Unbiased for independent Gaussian draws, since S is Wishart with n − 1 degrees of freedom. Correlated draws (MCMC)
    count for fewer than n, and the estimate is too large: thin them first. Raises `LocalFailure` if n <= m + 2, or
    where draws are not finite, constant in a coordinate or collinear.

    >>> precision_from_draws(np.array([[-1.0], [0.0], [0.0], [1.0]]))
    array([[0.5]])
    """
    n, size = draws.shape
    usable = n > size + 2 and bool(np.isfinite(draws).all())
    if usable:
        # Starting from the first draw makes a constant coordinate exactly zero instead of rounding noise.
        centred = draws - draws[0]
        centred = centred - centred.mean(axis=0)
        spread = np.sqrt(np.square(centred).sum(axis=0))
        usable = bool(spread.all())
    if usable:
        _, singular, right = np.linalg.svd(centred / spread, full_matrices=False)  # S would square the condition
        usable = bool(singular[-1] > n * np.finfo(np.float64).eps * singular[0])
    if not usable:
        raise LocalFailure("its draws are too few, constant, collinear or not finite; raise draws=")
    root = (right / singular[:, None] / spread).T
    inverse = root @ root.T
    return np.asarray((n - size - 2) * 0.5 * (inverse + inverse.T))


# The product of clients' Gaussian posteriors --------------------------------------------------------------------------


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
        init=_product_init,
        broadcast=lambda state, client_id: alone(state.sites.prior, state.prior_share, len(state.has_replied)),
        update_client=functools.partial(_product_update_client, local=inference),
        update_server=_product_update,
        replies=contracts.Replies(_product_shapes, _product_reject),
        result=contracts.Result(
            lambda state, client_id: _sites.conclusion(state.sites, client_id, state.prior_share),
            functools.partial(draw_target, local=inference),
            contracts.Posterior(lambda state: state.sites.q),
            tests_convergence=True,
        ),
        needs=contracts.Needs(inference.check),
        disclosure=contracts.Disclosure(at_target, concludes=at_target),
    )


def _product_init(layout: Layout, clients: tuple[str, ...], rng: Rng) -> PrecisionWeightedState:
    return PrecisionWeightedState(
        sites=_sites.empty(layout, clients, structure.full(layout.size)),
        has_replied=np.zeros(len(clients), dtype=bool),
        prior_share=0.0 if layout.prior_is_gaussian else 1.0 / len(clients),
    )


def _product_update_client(
    client: ClientView, personal: None, message: Message, rng: Rng, *, local: LocalInference
) -> ClientUpdate[None]:
    """Natural parameters of the client's posterior under its part of the prior. Clients keep no state."""
    moments = local.tilted(near_posterior(unpack_target(client, message), local), rng)
    reply = {"linear": moments.precision @ moments.mean, "precision": gaussian.pack_triangle(moments.precision)}
    return ClientUpdate(None, reply, moments.diagnostics)


def _product_shapes(state: PrecisionWeightedState) -> dict[str, tuple[int, ...]]:
    m = state.sites.structure.size
    return {"linear": (m,), "precision": (m * (m + 1) // 2,)}


def _natural(reply: Message) -> Gaussian:
    precision = gaussian.unpack_triangle(np.asarray(reply["precision"], dtype=float))
    return Gaussian(np.asarray(reply["linear"], dtype=float), precision)


def _product_reject(state: PrecisionWeightedState, reply: Message) -> str | None:
    """A posterior has a positive definite precision."""
    posterior = _natural(reply)
    return None if gaussian.is_proper(posterior) else indefinite("precision", posterior.precision)


def _product_update(state: PrecisionWeightedState, received: Received) -> tuple[PrecisionWeightedState, Report]:
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
