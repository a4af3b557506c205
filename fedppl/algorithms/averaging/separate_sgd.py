"""Every client by itself, by gradient steps: the mode of its own posterior, and nothing that travels but how far."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedppl import contracts, gaussian
from fedppl.algorithms.averaging.fedavg import (
    client_loss,
    draw_point,
    fitting_own,
    negative,
    relative_change,
    tolerance_rule,
)
from fedppl.contracts import Asked, ClientUpdate, ClientView, Draws, Received, Report
from fedppl.local.gradient_steps import Descent, check_batches, checked, descend
from fedppl.settings import described
from fedppl.types import Array, Layout, Message, Rng, Status


class SeparateSGDState(NamedTuple):
    """What the server knows: how far each client last moved."""

    where: Mapping[str, int]  # client id to its place
    changes: Array  # (K,) largest |Δ| / (1 + |v|), infinite for a client that has not replied yet
    rounds: int


class SeparateSGDInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # the largest of the clients that replied


class SeparateSGDClientState(NamedTuple):
    """What a client keeps to itself."""

    own: Array  # (m + d_k,) v_k, its shared and local variables


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
        init=_init,
        broadcast=lambda state, client_id: {},
        update_client=functools.partial(_update_client, descent=descent),
        update_server=functools.partial(_update_server, tolerance=tolerance_rule(tolerance)),
        replies=contracts.Replies(lambda state: {"change": ()}, lambda state, reply: negative(reply, "change")),
        result=contracts.Result(
            lambda state, client_id: {"rounds": np.array(float(state.rounds))},
            functools.partial(_draw, descent=descent),
        ),
        needs=contracts.Needs(functools.partial(check_batches, batch_size=descent.batch_size)),
        disclosure=contracts.Disclosure(
            lambda layout, message: Asked(np.zeros((0, layout.size)), np.zeros((0, layout.size)))
        ),
    )


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng) -> SeparateSGDState:
    """Nobody has replied yet."""
    where = {client_id: k for k, client_id in enumerate(clients)}
    return SeparateSGDState(where, np.full(len(clients), np.inf), 0)


def _update_client(
    client: ClientView, personal: _Kept, message: Message, rng: Rng, *, descent: Descent
) -> ClientUpdate[SeparateSGDClientState]:
    """Steps from where the client stands."""
    own = fitting_own(client, personal and personal.own)
    before = _start(client) if own is None else own
    after = descend(client, before, client_loss(client, 1.0), descent, rng)
    reply = {"change": np.array(relative_change(before, after))}
    return ClientUpdate(SeparateSGDClientState(after), reply, {} if own is not None else {"blank": 1.0})


def _start(client: ClientView) -> Array:
    return np.concatenate([gaussian.mean(client.layout.prior), client.initial])


def _update_server(state: SeparateSGDState, received: Received, *, tolerance: float) -> tuple[SeparateSGDState, Report]:
    """Note how far the clients moved."""
    if not received.clients:
        return state, Report(SeparateSGDInfo(np.nan))
    changes = state.changes.copy()
    for client_id, reply in received.each.items():
        changes[state.where[client_id]] = float(reply["change"])
    done, largest = bool(np.all(changes < tolerance)), float(changes.max())
    message = "" if done else "some clients have not replied yet; raise rounds="
    if not done and np.isfinite(largest):
        message = f"a client moved by {largest:.2g} in its last round; raise rounds= or steps="
    info = SeparateSGDInfo(max(float(reply["change"]) for reply in received.each.values()))
    status = Status.CONVERGED if done else Status.RUNNING
    return state._replace(changes=changes, rounds=state.rounds + 1), Report(info, status, message)


def _draw(
    client: ClientView, personal: _Kept, message: Message, draws: int, chains: int, rng: Rng, *, descent: Descent
) -> Draws:
    """v_k; a client that has none takes the steps of as many rounds as there were, one at least."""
    v, m = fitting_own(client, personal and personal.own), client.shared_size
    if v is None:
        all_rounds = descent._replace(steps=max(1, int(message["rounds"])) * descent.steps)
        v = descend(client, _start(client), client_loss(client, 1.0), all_rounds, rng)
    return draw_point(client, v[:m], v[m:], draws, chains)
