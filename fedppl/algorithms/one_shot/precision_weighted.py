"""One-shot averaging: the product of clients' Gaussian posteriors, each from its data and a part of the prior."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian, settings, structure
from fedppl.algorithms.ep import _sites
from fedppl.algorithms.ep._sites import Sites
from fedppl.algorithms.one_shot.separate import near_posterior
from fedppl.contracts import Algorithm, LocalInference
from fedppl.gaussian import Gaussian
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.local.target import at_target, draw_target, pack_target, unpack_target
from fedppl.types import Layout, Message, Status

__all__ = ["PrecisionWeighted", "PrecisionWeightedInfo", "PrecisionWeightedState"]


class PrecisionWeightedState(NamedTuple):
    """What the server knows: the ledger of what clients said of φ, and who has said something."""

    sites: Sites  # client's reply / p(φ)^(1/K); zero for a client not heard yet
    heard: NDArray[np.bool_]  # (K,)
    prior_share: float
    status: str
    message: str


class PrecisionWeightedInfo(NamedTuple):
    """Diagnostics of this round."""

    heard: int  # clients that have answered so far


def PrecisionWeighted(*, local: LocalInference | None = None) -> Algorithm:
    r"""Product of the clients' Gaussian posteriors in one round.

    .. math:: Q_k = \Sigma_k^{-1}, \quad r_k = \Sigma_k^{-1} \mu_k, \qquad
              Q = \sum_k Q_k, \quad r = \sum_k r_k, \qquad q = N(Q^{-1} r, Q^{-1})

    with the moments (μ_k, Σ_k) of f_k(φ) p(φ)^(1/K). Exact where every f_k is Gaussian. A client counts once: what it
    says again in a later round changes nothing. While clients are missing, p(φ)^(1/K) stands in for each of them, so
    that q has the whole prior always; without them q is the posterior of the data heard.

    Parameters
    ----------
    local
        How clients compute moments; by default `NestedLaplace`.

    Returns
    -------
    Algorithm

    Raises
    ------
    DeclarationError
        In a fit, where `local` is wrong for the declared model.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.PrecisionWeighted().name
    'PrecisionWeighted'

    Notes
    -----
    The server keeps what each client said, so that a client can be told everything but its own part (its cavity) when
    it draws θ_k. q itself is the sum of the replies, and of p(φ)^(1/K) for those missing.

    *When this fails.* A client that knows little by itself has a wide posterior, often skewed and far from the joint
    one, and a Gaussian matched there is wrong where the joint posterior lies: scale parameters (τ) of small clients are
    the rule, not the exception. `EP` matches it in the right place. With a prior that is not Gaussian its K-th root may
    be far from its Gaussian part.

    References
    ----------
    .. [1] Neiswanger, Wang and Xing (2014), Asymptotically exact, embarrassingly parallel MCMC, section 3.1.
    .. [2] FedLin, section 6.2.
    """
    inference = settings.inference("local", local, NestedLaplace())
    return Algorithm(
        name="PrecisionWeighted",
        check=inference.check,
        init_server=_init_server,
        broadcast=_broadcast,
        update_client=functools.partial(_update_client, local=inference),
        reply_shapes=_reply_shapes,
        refuse=_refuse,
        update_server=_update_server,
        outcome=_outcome,
        draw=functools.partial(draw_target, local=inference),
        details=lambda state: {},
        posterior=lambda state: state.sites.q,
        settings={"local": inference.describe()},
        tests_convergence=True,
        asks=at_target,
    )


def _init_server(layout: Layout, clients: tuple[str, ...], rng: np.random.Generator) -> PrecisionWeightedState:
    """Nothing but the prior."""
    del rng
    return PrecisionWeightedState(
        sites=_sites.empty(layout, clients, structure.full(layout.size)),
        heard=np.zeros(len(clients), dtype=bool),
        prior_share=0.0 if layout.prior_is_gaussian else 1.0 / len(clients),
        status=Status.RUNNING.value,
        message="",
    )


def _part(state: PrecisionWeightedState) -> Gaussian:
    """p(φ)^(1/K), or its Gaussian part."""
    return gaussian.power(state.sites.prior, 1.0 / len(state.heard))


def _broadcast(state: PrecisionWeightedState, client_id: str) -> Message:
    """A client's part of the prior."""
    del client_id
    return pack_target(_part(state), _part(state), state.prior_share)


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, local: LocalInference
) -> tuple[Any, Message, Mapping[str, float]]:
    """Natural parameters of the client's posterior under its part of the prior. Clients keep no state."""
    moments = local.tilted(near_posterior(unpack_target(client, message), local), rng)
    reply = {"linear": moments.precision @ moments.mean, "precision": gaussian.pack_triangle(moments.precision)}
    return personal, reply, moments.diagnostics


def _reply_shapes(state: PrecisionWeightedState) -> dict[str, tuple[int, ...]]:
    m = state.sites.structure.size
    return {"linear": (m,), "precision": (m * (m + 1) // 2,)}


def _natural(reply: Message) -> Gaussian:
    precision = gaussian.unpack_triangle(np.asarray(reply["precision"], dtype=float))
    return Gaussian(np.asarray(reply["linear"], dtype=float), precision)


def _refuse(state: PrecisionWeightedState, reply: Message) -> str | None:
    """A posterior has a positive definite precision."""
    del state
    said = _natural(reply)
    if gaussian.is_proper(said):
        return None
    smallest = np.linalg.eigvalsh(said.precision)[0]
    return f"'precision' is not positive definite (smallest eigenvalue {smallest:.3g})"


def _update_server(
    state: PrecisionWeightedState, replies: Mapping[str, Message]
) -> tuple[PrecisionWeightedState, PrecisionWeightedInfo]:
    """Add what clients say that were not heard before."""
    sites, heard, part = state.sites, state.heard.copy(), _part(state)
    linear, precision = sites.linear.copy(), sites.precision.copy()
    for client_id, reply in replies.items():
        k = sites.where[client_id]
        if not heard[k]:
            said = gaussian.quotient(_natural(reply), part)
            linear[k], precision[k] = said.linear, _sites.in_structure(said.precision, sites.structure)
            heard[k] = True
    if np.array_equal(heard, state.heard):
        return state, PrecisionWeightedInfo(int(np.sum(heard)))
    done, count = bool(np.all(heard)), int(np.sum(heard))
    message = "" if done else f"q has the data of {count} of {len(heard)} clients; raise rounds="
    status = Status.CONVERGED if done else Status.RUNNING
    sites = _sites.update(sites, linear, precision)
    return state._replace(sites=sites, heard=heard, status=status.value, message=message), PrecisionWeightedInfo(count)


def _outcome(state: PrecisionWeightedState, client_id: str) -> Message:
    """q and everything in it but this client's part; for a client that had none in it, q twice."""
    q = state.sites.q
    if client_id not in state.sites.where:
        return pack_target(q, q, 0.0)
    return pack_target(q, _sites.cavity(state.sites, client_id), state.prior_share)
