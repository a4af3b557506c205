"""Every client by itself: the declared prior and its own data, and nothing that travels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import contracts, gaussian, structure
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep import warm_start as _warm_start
from fedppl.contracts import ClientUpdate, ClientView, Draws, LocalInference, Received, Report, Target
from fedppl.gaussian import Gaussian
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.local.target import at_target, draw_target, local_inference, pack_target, unpack_target
from fedppl.types import Layout, LocalFailure, Message, Rng, Status

_NEWTON_STEPS = 50


class SeparateState(NamedTuple):
    """What the server knows: the declared prior, and who has answered."""

    prior: Gaussian
    prior_share: float
    where: Mapping[str, int]  # client id to its place
    has_replied: NDArray[np.bool_]  # (K,)


class SeparateInfo(NamedTuple):
    """Diagnostics of this round."""

    heard: int  # clients that have answered so far


def Separate(*, local: LocalInference | None = None) -> contracts.Algorithm[SeparateState, None]:
    r"""Each client's posterior from the declared prior and its own data: no pooling.

    .. math:: p(\phi, \theta_k \mid y_k) \propto p(\phi)\, p(y_k, \theta_k \mid \phi)

    In a round a client computes its moments and replies an empty message, with the diagnostics of its local inference
    beside it. Its draws come from ``fit.client(k)``; a new client's are made in the same way.

    Parameters
    ----------
    local
        Local inference at the clients; by default `NestedLaplace`.

    Returns
    -------
    Algorithm
        Its fit has neither a shared posterior nor an estimate, only clients' posteriors.

    Notes
    -----
    *When this fails.* Clients with few rows learn nothing from the others, and the prior decides. It is what pooling
    is compared with, not a way to pool.

    References
    ----------
    .. [1] FedLin, section 6.2: individual models.
    """
    inference = local_inference("local", local, NestedLaplace())
    return contracts.Algorithm[SeparateState, None](
        name="Separate",
        settings={"local": inference.describe()},
        init=_init,
        broadcast=_broadcast,
        update_client=functools.partial(_update_client, local=inference),
        update_server=_update_server,
        replies=contracts.Replies(lambda state: {}),
        result=contracts.Result(_broadcast, functools.partial(_draw, local=inference), tests_convergence=True),
        needs=contracts.Needs(inference.check),
        disclosure=contracts.Disclosure(at_target, concludes=at_target),
    )


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng) -> SeparateState:
    """Nobody has answered yet."""
    return SeparateState(
        prior=layout.prior,
        prior_share=0.0 if layout.prior_is_gaussian else 1.0,
        where={client_id: k for k, client_id in enumerate(clients)},
        has_replied=np.zeros(len(clients), dtype=bool),
    )


def _broadcast(state: SeparateState, client_id: str) -> Message:
    """The declared prior, before and after."""
    return pack_target(state.prior, state.prior, state.prior_share)


def alone(prior: Gaussian, prior_share: float, clients: int) -> Message:
    """What a client needs for its posterior under its part of the prior: p(φ)^(1/K), or its Gaussian part."""
    part = gaussian.power(prior, 1.0 / clients)
    return pack_target(part, part, prior_share)


def near_posterior(target: Target, local: LocalInference) -> Target:
    """The target with a global q near its tilted distribution: a prior is a poor proposal where data are strong.

    A Laplace approximation by `EP`'s warm start for this one client; the target itself where the local inference
    offers no expansions, and needs no proposal, or the search finds no mode.
    """
    client = target.client
    if local.expand is None:
        return target
    layout = dataclasses.replace(client.layout, prior=target.cavity)
    sites = _sites.empty(layout, (client.client_id,), structure.full(layout.size))
    search = _warm_start.start(layout, 1)
    for _ in range(_NEWTON_STEPS):
        try:
            reply, _ = _warm_start.expand_along(client, local, search.point, search.move, target.prior_share)
        except LocalFailure:
            return target
        sites, search, _ = _warm_start.step(sites, search, {client.client_id: reply})
        if search.arrived:
            return target._replace(global_=sites.q)
    return target


def _update_client(
    client: ClientView, personal: None, message: Message, rng: Rng, *, local: LocalInference
) -> ClientUpdate[None]:
    """Compute the client's moments, of which only the diagnostics leave it."""
    moments = local.tilted(near_posterior(unpack_target(client, message), local), rng)
    return ClientUpdate(None, {}, moments.diagnostics)


def _update_server(state: SeparateState, received: Received) -> tuple[SeparateState, Report]:
    """Note who has answered."""
    has_replied = state.has_replied.copy()
    has_replied[[state.where[client_id] for client_id in received.each]] = True
    done, count = bool(np.all(has_replied)), int(np.sum(has_replied))
    message = "" if done else f"{count} of {len(has_replied)} clients have answered; raise rounds="
    status = Status.CONVERGED if done else Status.RUNNING
    return state._replace(has_replied=has_replied), Report(SeparateInfo(count), status, message)


def _draw(
    client: ClientView, personal: None, message: Message, draws: int, chains: int, rng: Rng, *, local: LocalInference
) -> Draws:
    """Draws of (φ, θ_k) from prior x local likelihood."""
    target = near_posterior(unpack_target(client, message), local)
    near = pack_target(target.global_, target.cavity, target.prior_share)
    return draw_target(client, personal, near, draws, chains, rng, local=local)
