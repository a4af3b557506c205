"""SCAFFOLD: local gradient steps corrected for the clients' drift, with the control variates in the server's ledger."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.algorithms.averaging._point import (
    Kept,
    client_loss,
    converged,
    described,
    kept_local,
    tolerance_rule,
    weight_of,
    weights_rule,
)
from fedppl.algorithms.averaging.fedavg import draw, reject
from fedppl.contracts import Algorithm, Asked
from fedppl.local.descent import Descent, check_batches, checked, descend
from fedppl.settings import positive
from fedppl.types import Array, Layout, Message, Status

__all__ = ["SCAFFOLD", "ScaffoldInfo", "ScaffoldState", "mean_control"]


class ScaffoldState(NamedTuple):
    """What the next round needs: φ, and the ledger of the clients' control variates."""

    phi: Array  # (m,)
    where: Mapping[str, int]  # client id to its row
    controls: Array  # (K, m) c_k
    weights: Array  # (K,) w_k, 0 for a client not heard yet
    drifts: Array  # (K,) how far a client last went from φ and its local variables, |Δ| / (1 + |value|)
    prior_share: float  # of log p(φ) in each client's loss, 1 / K
    status: str
    message: str


class ScaffoldInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # largest |Δφ| / (1 + |φ|)
    drift: float  # how far the clients that replied went, in the same units


def SCAFFOLD(
    *,
    learning_rate: float,
    steps: int = 20,
    server_rate: float = 1.0,
    batch_size: int | None = None,
    weights: str = "rows",
    tolerance: float = 1e-6,
) -> Algorithm:
    r"""Stochastic controlled averaging: federated averaging without the clients' drift.

    .. math:: y_k \leftarrow y_k - \eta (\nabla F_k(y_k) + c - c_k) \text{, T times from } \phi, \qquad
              c_k \leftarrow c_k - c + \frac{\phi - y_k}{T \eta}, \qquad c = \frac{\sum_k w_k c_k}{\sum_k w_k}, \qquad
              \phi \leftarrow \phi + \eta_g \frac{\sum_k w_k (y_k - \phi)}{\sum_k w_k}

    The sums that move φ run over the clients that replied, those of c over all that ever did. c_k is the mean gradient
    along the client's path, so that at the fixed point of full-gradient steps Σ w_k ∇F_k = 0, whatever T and however
    the clients differ: with weights n_k this is the posterior's mode.

    The server holds the c_k, in the paper the clients do, and computes them from y_k, which it gets anyway. So c is
    the mean of the c_k in every round, whatever replies are lost, late or sent twice, and a client that lost its memory
    is as good as any. The price: the server has to know whose reply is whose, a sum of replies is not enough. A client
    that is asked for the first time takes plain steps, as if its c_k were c.

    Parameters
    ----------
    learning_rate
        η, per unit of the mean loss over a client's rows; below 2 / λ_max of its curvature.
    steps
        T, local gradient steps a round.
    server_rate
        η_g.
    batch_size
        As in `FedAvg`.
    weights
        w_k: "rows" (n_k) or "equal", as in the paper.
    tolerance
        Converged when every client has been asked and none ended further than ``tolerance * (1 + |φ|)`` from where it
        began, in any coordinate, local ones among them, when it was last asked.

    Returns
    -------
    Algorithm
        Its fit has a point estimate (``fit.estimate``) and no posterior.

    Raises
    ------
    DeclarationError
        For settings out of range.
    DataError
        In a fit, before the first round, if the rows cannot be taken in batches.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.SCAFFOLD(learning_rate=0.1).name
    'SCAFFOLD'

    Notes
    -----
    *When this fails.* Few clients a round make c stale: lower `server_rate` or `learning_rate` if φ oscillates. With
    batches φ settles in a neighbourhood of the optimum only, and the status stays "max_rounds". Local variables are
    followed by gradient steps and are no part of the correction: where they lag, c_k does.

    References
    ----------
    .. [1] Karimireddy et al. (2020), SCAFFOLD: stochastic controlled averaging for federated learning, Algorithm 1,
       eqs. 3 to 5, option II.
    """
    descent = checked(learning_rate, steps, batch_size)
    server_rate = positive("server_rate", server_rate, "1 is the clients' mean")
    rule = tolerance_rule(tolerance)
    return Algorithm(
        name="SCAFFOLD",
        check=functools.partial(check_batches, batch_size=descent.batch_size),
        init_server=_init_server,
        broadcast=_broadcast,
        update_client=functools.partial(_update_client, descent=descent, weights=weights_rule(weights)),
        reply_shapes=lambda state: {"phi": state.phi.shape, "weight": (), "local_change": ()},
        refuse=reject,
        update_server=functools.partial(_update_server, descent=descent, rate=float(server_rate), tolerance=rule),
        outcome=lambda state, client_id: {"phi": state.phi},
        draw=draw,
        details=lambda state: {},
        estimate=lambda state: state.phi,
        settings=described(descent, server_rate=float(server_rate), weights=weights, tolerance=tolerance),
        asks=functools.partial(_asks, descent=descent),
    )


def _init_server(layout: Layout, clients: tuple[str, ...], rng: np.random.Generator) -> ScaffoldState:
    """Start at the mean of the prior, with nobody heard."""
    del rng
    count = len(clients)
    return ScaffoldState(
        phi=gaussian.mean(layout.prior),
        where={client_id: k for k, client_id in enumerate(clients)},
        controls=np.zeros((count, layout.size)),
        weights=np.zeros(count),
        drifts=np.full(count, np.inf),
        prior_share=1.0 / count,
        status=Status.RUNNING.value,
        message="",
    )


def mean_control(state: ScaffoldState) -> Array:
    """c (m,): the weighted mean of the ledger, computed anew each time, so that it cannot be anything else."""
    total = state.weights.sum()
    return np.asarray(state.weights @ state.controls / total) if total > 0 else np.zeros(len(state.phi))


def _corrections(state: ScaffoldState) -> Array:
    """c − c_k (K, m), zero for clients not heard yet."""
    return np.where(state.weights[:, None] > 0, mean_control(state) - state.controls, 0.0)


def _broadcast(state: ScaffoldState, client_id: str) -> Message:
    """φ, and what the client adds to its gradient."""
    return {
        "phi": state.phi,
        "correction": _corrections(state)[state.where[client_id]],
        "prior_share": np.array(state.prior_share),
    }


def _asks(layout: Layout, message: Message, *, descent: Descent) -> Asked:
    """Where the steps begin, and where the correction alone would lead them: it is the server's to choose."""
    phi, correction = (np.asarray(message[name], dtype=float) for name in ("phi", "correction"))
    if phi.shape != (layout.size,):
        raise ValueError(f"'phi' has shape {phi.shape}")
    led = phi + descent.learning_rate * descent.steps * correction * np.array([[-1.0], [0.0], [1.0]])
    return Asked(led, np.zeros((0, layout.size)))


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, descent: Descent, weights: str
) -> tuple[Kept, Message, Mapping[str, float]]:
    """T corrected steps from φ."""
    phi, correction = (np.asarray(message[name], dtype=float) for name in ("phi", "correction"))
    local, info = kept_local(client, personal)
    objective = client_loss(client, float(message["prior_share"]))
    objective = objective._replace(linear=objective.linear - correction)
    x = descend(client, np.concatenate([phi, local]), objective, descent, rng)
    reply = {
        "phi": x[: len(phi)],
        "weight": np.array(weight_of(client, weights)),
        "local_change": np.array(converged(local, x[len(phi) :], 0.0)[1]),
    }
    return Kept(x[len(phi) :]), reply, info


def _update_server(
    state: ScaffoldState, replies: Mapping[str, Message], *, descent: Descent, rate: float, tolerance: float
) -> tuple[ScaffoldState, ScaffoldInfo]:
    """Move φ by the clients' mean step, and write their mean gradients into the ledger."""
    if not replies:
        return state, ScaffoldInfo(np.nan, np.nan)
    names = sorted(replies)
    rows = [state.where[client_id] for client_id in names]
    ends = np.stack([np.asarray(replies[client_id]["phi"], dtype=float) for client_id in names])
    weights, controls, drifts = state.weights.copy(), state.controls.copy(), state.drifts.copy()
    weights[rows] = [float(replies[client_id]["weight"]) for client_id in names]
    controls[rows] = (state.phi - ends) / (descent.steps * descent.learning_rate) - _corrections(state)[rows]
    drifts[rows] = [
        max(converged(state.phi, end, tolerance)[1], float(replies[client_id]["local_change"]))
        for client_id, end in zip(names, ends, strict=True)
    ]
    phi = state.phi + rate * (weights[rows] @ (ends - state.phi)) / weights[rows].sum()
    _, change = converged(state.phi, phi, tolerance)
    done, drift = bool(np.all(drifts < tolerance)), float(drifts[rows].max())
    message = (
        ""
        if done
        else f"clients moved by up to {drifts.max():.2g} in a round; raise rounds=, or change learning_rate="
        if np.all(weights > 0)
        else "some clients have not replied yet; raise rounds="
    )
    state = state._replace(
        phi=phi,
        controls=controls,
        weights=weights,
        drifts=drifts,
        status=(Status.CONVERGED if done else Status.RUNNING).value,
        message=message,
    )
    return state, ScaffoldInfo(change, drift)
