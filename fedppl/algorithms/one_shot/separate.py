"""Every client by itself, with the declared prior and its own data: its posterior, or its mode by gradient steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import contracts, gaussian, structure
from fedppl.algorithms import tolerances as tol
from fedppl.algorithms.averaging.fedavg import (
    client_loss,
    draw_point,
    fitting_point,
    negative,
    relative_change,
    report,
    tolerance_rule,
)
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep import warm_start as _warm_start
from fedppl.contracts import Asked, ClientUpdate, ClientView, Draws, LocalInference, Received, Report, Target
from fedppl.gaussian import Gaussian
from fedppl.local.gradient_steps import Descent, check_batches, checked, descend
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.local.target import at_target, draw_target, local_inference, pack_target, unpack_target
from fedppl.settings import described
from fedppl.types import Array, Layout, LocalFailure, Message, Rng


class SeparateState(NamedTuple):
    """What the server knows: the declared prior, and which clients have answered."""

    prior: Gaussian
    prior_share: float
    where: Mapping[str, int]  # client id to its place
    has_replied: NDArray[np.bool_]  # (K,)


class Heard(NamedTuple):
    """Diagnostics of this round."""

    heard: float  # clients that have answered so far


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
    """The target of a client's posterior under its part of the prior: p(φ)^(1/K), or its Gaussian part."""
    part = gaussian.power(prior, 1.0 / clients)
    return pack_target(part, part, prior_share)


def near_posterior(target: Target, local: LocalInference) -> Target:
    """The target with a global q near its tilted distribution, as a prior is a poor proposal where data are strong.

    q is a Laplace approximation by `EP`'s warm start for this one client. The target stays where the local inference
    offers no expansions, and needs no proposal, or the search finds no mode.
    """
    client = target.client
    if local.expand is None:
        return target
    layout = dataclasses.replace(client.layout, prior=target.cavity)
    sites = _sites.empty(layout, (client.client_id,), structure.full(layout.size))
    search = _warm_start.start(layout, 1)
    for _ in range(tol.ALONE_STEPS):
        point, move = search.trial.point, search.trial.move
        try:
            reply, _ = _warm_start.expand_along(client, local, point, move, target.prior_share)
        except LocalFailure:
            return target
        sites, search, _ = _warm_start.step(sites, search, {client.client_id: reply})
        if search.arrived:
            return target._replace(global_=sites.q)
    return target


def _update_client(
    client: ClientView, personal: None, message: Message, rng: Rng, *, local: LocalInference
) -> ClientUpdate[None]:
    """Compute the client's moments; only their diagnostics leave it."""
    moments = local.tilted(near_posterior(unpack_target(client, message), local), rng)
    return ClientUpdate(None, {}, moments.diagnostics)


def _update_server(state: SeparateState, received: Received) -> tuple[SeparateState, Report]:
    has_replied = state.has_replied.copy()
    has_replied[[state.where[client_id] for client_id in received.each]] = True
    count = int(np.sum(has_replied))
    message = f"{count} of {len(has_replied)} clients have answered; raise rounds="
    return state._replace(has_replied=has_replied), report(Heard(count), bool(np.all(has_replied)), message)


def _draw(
    client: ClientView, personal: None, message: Message, draws: int, chains: int, rng: Rng, *, local: LocalInference
) -> Draws:
    """Draws of (φ, θ_k) from prior x local likelihood."""
    target = near_posterior(unpack_target(client, message), local)
    near = pack_target(target.global_, target.cavity, target.prior_share)
    return draw_target(client, personal, near, draws, chains, rng, local=local)


# The mode by gradient steps -------------------------------------------------------------------------------------------


class SeparateSGDState(NamedTuple):
    """What the server knows: each client's last move."""

    where: Mapping[str, int]  # client id to its place
    changes: Array  # (K,) largest |Δ| / (1 + |v|), infinite for a client that has not replied yet
    rounds: int


class SeparateSGDInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # the largest of the clients that replied


class SeparateSGDClientState(NamedTuple):
    """What a client keeps to itself."""

    point: Array  # (m + d_k,) v_k, its shared and local variables


_Kept = SeparateSGDClientState | None  # none in its first round, or where it lost it


def SeparateSGD(
    *, learning_rate: float, steps: int = 600, batch_size: int | None = None, tolerance: float = 1e-6
) -> contracts.Algorithm[SeparateSGDState, SeparateSGDClientState]:
    r"""Each client's own point by gradient steps: no pooling.

    .. math:: v_k \leftarrow v_k - \eta \nabla F_k(v_k), \qquad
              F_k = -\frac{\log p(y_k, \theta_k \mid \phi) + \log p(\phi)}{n_k}, \quad v_k = (\phi, \theta_k)

    Every client has the whole declared prior, so that v_k goes to the mode of its own posterior (on the unconstrained
    space). It starts at the prior's mean, stays at the client and goes on from round to round; what is sent is how far
    it moved.

    Parameters
    ----------
    learning_rate
        Learning rate η for the mean loss over a client's rows, below 2 / λ_max of its curvature.
    steps
        Number of gradient steps a round.
    batch_size
        As in `FedAvg`.
    tolerance
        Bound on a client's last change in any coordinate, relative to ``1 + |v|``, below which a fit has converged.

    Returns
    -------
    Algorithm
        Its fit has neither a shared posterior nor an estimate, only clients' points.

    Notes
    -----
    A client that has no v_k, in its first round or because it lost it, starts anew and reports ``blank``. A new client
    takes as many steps from the prior's mean as the fit had rounds of them.

    *When this fails.* With batches v_k settles in a neighbourhood of the mode only, and the status stays "max_rounds".
    A mode says nothing of its uncertainty, and is a poor summary of scale parameters: see `Separate`.

    References
    ----------
    .. [1] FedLin, section 6.2: local SGD.
    """
    descent = checked(learning_rate, steps, batch_size)
    return contracts.Algorithm[SeparateSGDState, SeparateSGDClientState](
        name="SeparateSGD",
        settings=described(descent, tolerance=tolerance),
        init=_sgd_init,
        broadcast=lambda state, client_id: {},
        update_client=functools.partial(_sgd_update_client, descent=descent),
        update_server=functools.partial(_sgd_update, tolerance=tolerance_rule(tolerance)),
        replies=contracts.Replies(lambda state: {"change": ()}, lambda state, reply: negative(reply, "change")),
        result=contracts.Result(
            lambda state, client_id: {"rounds": np.array(float(state.rounds))},
            functools.partial(_sgd_draw, descent=descent),
        ),
        needs=contracts.Needs(functools.partial(check_batches, batch_size=descent.batch_size)),
        disclosure=contracts.Disclosure(
            lambda layout, message: Asked(np.zeros((0, layout.size)), np.zeros((0, layout.size)))
        ),
    )


def _sgd_init(layout: Layout, clients: tuple[str, ...], rng: Rng) -> SeparateSGDState:
    where = {client_id: k for k, client_id in enumerate(clients)}
    return SeparateSGDState(where, np.full(len(clients), np.inf), 0)


def _sgd_update_client(
    client: ClientView, personal: _Kept, message: Message, rng: Rng, *, descent: Descent
) -> ClientUpdate[SeparateSGDClientState]:
    last = fitting_point(client, personal and personal.point)
    before = _first_point(client) if last is None else last
    after = descend(client, before, client_loss(client, 1.0), descent, rng)
    info = {"blank": 1.0} if last is None else {}
    return ClientUpdate(SeparateSGDClientState(after), {"change": np.array(relative_change(before, after))}, info)


def _first_point(client: ClientView) -> Array:
    return np.concatenate([gaussian.mean(client.layout.prior), client.initial])


def _sgd_update(state: SeparateSGDState, received: Received, *, tolerance: float) -> tuple[SeparateSGDState, Report]:
    if not received.clients:
        return state, Report(SeparateSGDInfo(np.nan))
    changes = state.changes.copy()
    for client_id, reply in received.each.items():
        changes[state.where[client_id]] = float(reply["change"])
    message = "some clients have not replied yet; raise rounds="
    if np.isfinite(largest := float(changes.max())):
        message = f"a client moved by {largest:.2g} in its last round; raise rounds= or steps="
    info = SeparateSGDInfo(max(float(reply["change"]) for reply in received.each.values()))
    after = state._replace(changes=changes, rounds=state.rounds + 1)
    return after, report(info, bool(np.all(changes < tolerance)), message)


def _sgd_draw(
    client: ClientView, personal: _Kept, message: Message, draws: int, chains: int, rng: Rng, *, descent: Descent
) -> Draws:
    """v_k; a client that has none takes the steps of all rounds so far, of one at least."""
    v, m = fitting_point(client, personal and personal.point), client.shared_size
    if v is None:
        all_rounds = descent._replace(steps=max(1, int(message["rounds"])) * descent.steps)
        v = descend(client, _first_point(client), client_loss(client, 1.0), all_rounds, rng)
    return draw_point(client, v[:m], v[m:], draws, chains)
