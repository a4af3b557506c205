"""SCAFFOLD: local gradient steps corrected for the clients' drift, with the control variates in the server's ledger."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import contracts, gaussian
from fedppl.algorithms.averaging.fedavg import (
    POINT,
    KeptLocal,
    LocalClientState,
    client_loss,
    descended,
    draw,
    final_message,
    reject,
    relative_change,
    report,
    tolerance_rule,
    weight_of,
    weights_rule,
)
from fedppl.contracts import Asked, ClientUpdate, ClientView, Received, Report
from fedppl.local.gradient_steps import Descent, check_batches, checked
from fedppl.local.target import at_points
from fedppl.settings import described, positive
from fedppl.types import Array, Layout, Message, Rng


class ScaffoldState(NamedTuple):
    """What the next round needs: φ, and the ledger of the clients' control variates."""

    phi: Array  # (m,)
    where: Mapping[str, int]  # client id to its row
    controls: Controls
    drifts: Array  # (K,) last distance of a client from φ and its local variables, |Δ| / (1 + |value|)


class ScaffoldInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # largest |Δφ| / (1 + |φ|)
    drift: float  # largest distance of the clients that replied, in the same units


def SCAFFOLD(
    *,
    learning_rate: float,
    steps: int = 20,
    server_rate: float = 1.0,
    batch_size: int | None = None,
    weights: str = "rows",
    tolerance: float = 1e-6,
) -> contracts.Algorithm[ScaffoldState, LocalClientState]:
    r"""Stochastic controlled averaging: federated averaging without the clients' drift.

    .. math:: y_k \leftarrow y_k - \eta (\nabla F_k(y_k) + c - c_k) \text{, T times from } \phi, \qquad
              c_k \leftarrow c_k - c + \frac{\phi - y_k}{T \eta}, \qquad c = \frac{\sum_k w_k c_k}{\sum_k w_k}, \qquad
              \phi \leftarrow \phi + \eta_g \frac{\sum_k w_k (y_k - \phi)}{\sum_k w_k}

    The sums that move φ run over the clients that replied, those of c over all that ever did. At the fixed point of
    full-gradient steps Σ w_k ∇F_k = 0, whatever T and however the clients differ: with weights n_k the mode.

    The server keeps the c_k, which clients do in the paper, and computes them from the y_k. So c is the mean of the c_k
    in every round, whatever replies are lost, late or sent twice; in return the server has to read single replies. A
    client that is asked for the first time takes plain steps, as if its c_k were c.

    Parameters
    ----------
    learning_rate
        Learning rate η for the mean loss over a client's rows, below 2 / λ_max of its curvature.
    steps
        Number T of local gradient steps a round.
    server_rate
        Learning rate η_g of the server.
    batch_size
        As in `FedAvg`.
    weights
        Clients' weights w_k: "rows" (n_k) or "equal", as in the paper.
    tolerance
        Bound on how far a client ends from where it began, in any coordinate, local ones among them, relative to
        ``1 + |φ|``. A fit has converged when every client was asked and none went further when it was last asked.

    Returns
    -------
    Algorithm
        Its fit has a point estimate (``fit.estimate``) and no posterior.

    Notes
    -----
    *When this fails.* Few clients a round make c stale: lower `server_rate` or `learning_rate` if φ oscillates. With
    batches φ settles in a neighbourhood of the optimum only, and the status stays "max_rounds". Local variables are no
    part of the correction: where they lag, c_k does.

    References
    ----------
    .. [1] Karimireddy et al. (2020), SCAFFOLD: stochastic controlled averaging for federated learning, Algorithm 1,
       eqs. 3 to 5, option II.
    """
    descent = checked(learning_rate, steps, batch_size)
    server_rate = positive("server_rate", server_rate, "1 is the clients' mean")
    rule = tolerance_rule(tolerance)
    return contracts.Algorithm[ScaffoldState, LocalClientState](
        name="SCAFFOLD",
        settings=described(descent, server_rate=server_rate, weights=weights, tolerance=tolerance),
        init=_init,
        broadcast=_broadcast,
        update_client=functools.partial(_update_client, descent=descent, weights=weights_rule(weights)),
        update_server=functools.partial(_update_server, descent=descent, rate=server_rate, tolerance=rule),
        replies=contracts.Replies(lambda state: {"phi": state.phi.shape, "weight": (), "local_change": ()}, reject),
        result=contracts.Result(final_message, draw, POINT),
        needs=contracts.Needs(functools.partial(check_batches, batch_size=descent.batch_size)),
        disclosure=contracts.Disclosure(functools.partial(_asks, descent=descent)),
    )


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng) -> ScaffoldState:
    where, count = {client_id: k for k, client_id in enumerate(clients)}, len(clients)
    return ScaffoldState(gaussian.mean(layout.prior), where, no_controls(count, layout.size), np.full(count, np.inf))


def _broadcast(state: ScaffoldState, client_id: str) -> Message:
    return {
        "phi": state.phi,
        "correction": correction(state.controls, state.where[client_id]),
        "prior_share": np.array(1.0 / len(state.where)),
    }


def _asks(layout: Layout, message: Message, *, descent: Descent) -> Asked:
    """Where the steps begin, and where the correction, which the server chooses, would lead them by itself."""
    start, added = at_points(layout, message, "phi"), np.asarray(message["correction"], dtype=float)
    length = descent.learning_rate * descent.steps
    return start._replace(points=start.points + length * added * np.array([[-1.0], [0.0], [1.0]]))


def _update_client(
    client: ClientView, personal: KeptLocal, message: Message, rng: Rng, *, descent: Descent, weights: str
) -> ClientUpdate[LocalClientState]:
    """T corrected steps from φ."""
    phi, added = (np.asarray(message[name], dtype=float) for name in ("phi", "correction"))
    objective = client_loss(client, float(message["prior_share"]))
    objective = objective._replace(linear=objective.linear - added)
    after, kept, moved, info = descended(client, personal and personal.local, phi, objective, descent, rng)
    reply = {"phi": after, "weight": np.array(weight_of(client, weights)), "local_change": np.array(moved)}
    return ClientUpdate(kept, reply, info)


def _update_server(
    state: ScaffoldState, received: Received, *, descent: Descent, rate: float, tolerance: float
) -> tuple[ScaffoldState, Report]:
    """Move φ by the clients' mean step, and write their mean gradients into the ledger."""
    if not received.clients:
        return state, Report(ScaffoldInfo(np.nan, np.nan))
    ends, drifts = ends_of(received, state.where), state.drifts.copy()
    controls = entered(state.controls, ends, state.phi, descent.steps * descent.learning_rate)
    for client_id, reply in received.each.items():
        moved = relative_change(state.phi, np.asarray(reply["phi"], dtype=float))
        drifts[state.where[client_id]] = max(moved, float(reply["local_change"]))
    phi = state.phi + rate * (ends.weights @ (ends.phi - state.phi)) / ends.weights.sum()
    message = "some clients have not replied yet; raise rounds="
    if np.all(controls.weights > 0):
        message = f"clients moved by up to {drifts.max():.2g} in a round; raise rounds=, or change learning_rate="
    info = ScaffoldInfo(relative_change(state.phi, phi), float(drifts[ends.rows].max()))
    after = state._replace(phi=phi, controls=controls, drifts=drifts)
    return after, report(info, bool(np.all(drifts < tolerance)), message)


# SCAFFOLD's control variates c_k in the server's ledger, with their weighted mean c -----------------------------------


class Controls(NamedTuple):
    """The ledger: a row per client."""

    each: Array  # (K, m) c_k
    weights: Array  # (K,) w_k of c_k in c, 0 for a client that has not replied yet
    mean: Array  # (m,) c


class Ends(NamedTuple):
    """Where the clients that replied ended, in the order of their ids."""

    rows: NDArray[np.int64]  # (R,) their places in the ledger
    phi: Array  # (R, m)
    weights: Array  # (R,)


def no_controls(clients: int, size: int) -> Controls:
    """The ledger before any reply."""
    return Controls(np.zeros((clients, size)), np.zeros(clients), np.zeros(size))


def correction(controls: Controls, row: int) -> Array:
    """c − c_k, (m,), which a client adds to its gradient; zero before its first reply."""
    return controls.mean - controls.each[row] if controls.weights[row] > 0 else np.zeros(len(controls.mean))


def ends_of(received: Received, where: Mapping[str, int]) -> Ends:
    """Read replies that hold ``phi`` and ``weight``; `where` has the clients' places in the ledger."""
    replies = [received.each[client_id] for client_id in sorted(received.each)]
    return Ends(
        np.array([where[client_id] for client_id in sorted(received.each)]),
        np.stack([np.asarray(reply["phi"], dtype=float) for reply in replies]),
        np.array([float(reply["weight"]) for reply in replies]),
    )


def entered(controls: Controls, ends: Ends, phi: Array, length: float | Array) -> Controls:
    """The ledger with c_k = (φ − φ_k) / (T η) − (c − c_k) of the clients that replied.

    `length` is T η, one number or (R,). The first term is the mean of the corrected gradient along a client's path.
    """
    each, weights = controls.each.copy(), controls.weights.copy()
    added = np.stack([correction(controls, row) for row in ends.rows])
    each[ends.rows] = (phi - ends.phi) / np.reshape(length, (-1, 1)) - added
    weights[ends.rows] = ends.weights
    return Controls(each, weights, weights @ each / weights.sum())
