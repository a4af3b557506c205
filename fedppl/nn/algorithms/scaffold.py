"""SCAFFOLD for networks: gradient steps corrected for the clients' drift, control variates in the server's ledger."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.algorithms.averaging._point import Kept, weight_of, weights_rule
from fedppl.contracts import Algorithm
from fedppl.nn.algorithms._common import (
    Training,
    check_all_shared,
    described,
    draw,
    outcome,
    own,
    training_rule,
    tuning_rule,
    unused_priors,
)
from fedppl.types import Array, Layout, Message, Status

__all__ = ["NetworkSCAFFOLD", "NetworkScaffoldInfo", "NetworkScaffoldState"]


class NetworkScaffoldState(NamedTuple):
    """What the next round needs."""

    phi: Array  # (m,)
    where: Mapping[str, int]  # client id to its row
    controls: Array  # (K, m) c_k
    weights: Array  # (K,) of c_k in c, 0 for a client not heard yet
    status: str
    message: str


class NetworkScaffoldInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # root mean square of Δφ


def NetworkSCAFFOLD(
    *, learning_rate: float = 1e-2, epochs: int = 5, batch_size: int = 50, weights: str = "rows"
) -> Algorithm:
    r"""Stochastic controlled averaging of whole networks, by plain gradient steps.

    .. math:: w_k \leftarrow w_k - \eta (\nabla f_k(w_k) + c - c_k) \text{, T times from } \phi, \qquad
              c_k \leftarrow c_k - c + \frac{\phi - w_k}{T \eta}, \qquad c = \frac{\sum_k n_k c_k}{\sum_k n_k}

    The server works out c_k from where the client ends, so that c is the mean of the c_k whatever is lost on the way.

    Parameters
    ----------
    learning_rate, epochs, batch_size
        Of the steps, without momentum: c_k is a mean gradient only then.
    weights
        "rows" or "equal".

    Returns
    -------
    Algorithm
        Its fit has a point estimate.

    Raises
    ------
    DeclarationError
        For settings out of range, and where some weights are not shared.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.NetworkSCAFFOLD().name
    'NetworkSCAFFOLD'

    Notes
    -----
    The server holds a vector of all weights for each client. `SCAFFOLD` is the same for declared models of any kind.

    *When this fails.* Where few clients report, control variates are old, and corrections by them do harm.

    References
    ----------
    .. [1] Karimireddy et al. (2020), SCAFFOLD, option II.
    """
    training = training_rule(learning_rate, epochs, batch_size, momentum=0.0)
    rule, tuning = weights_rule(weights), tuning_rule(None, 1e-3, 1, 1)
    return Algorithm(
        name="NetworkSCAFFOLD",
        check=lambda client: check_all_shared(client, "NetworkSCAFFOLD"),
        init_server=_init_server,
        broadcast=_broadcast,
        update_client=functools.partial(_update_client, training=training, weights=rule),
        reply_shapes=lambda state: {"phi": state.phi.shape, "weight": (), "steps": ()},
        refuse=_refuse,
        update_server=functools.partial(_update_server, rate=training.learning_rate),
        outcome=lambda state, client_id: outcome(state.phi, tuning),
        draw=functools.partial(draw, which=None),
        personalise=functools.partial(own, which=None),
        details=lambda state: {},
        estimate=lambda state: state.phi,
        settings=described({**training._asdict(), "weights": weights}),
        large=True,
        unused=unused_priors,
    )


def _init_server(layout: Layout, clients: tuple[str, ...], rng: np.random.Generator) -> NetworkScaffoldState:
    """Start at the mean of the declared prior, with nobody heard."""
    del rng
    where = {client_id: k for k, client_id in enumerate(clients)}
    empty = np.zeros((len(clients), layout.size))
    phi = gaussian.mean(layout.prior)
    return NetworkScaffoldState(phi, where, empty, np.zeros(len(clients)), Status.RUNNING.value, "raise rounds=")


def _corrections(state: NetworkScaffoldState, rows: list[int]) -> Array:
    """c − c_k of some clients, zero for those not heard yet."""
    total = state.weights.sum()
    mean = state.weights @ state.controls / total if total > 0 else np.zeros(len(state.phi))
    return np.where(state.weights[rows, None] > 0, mean - state.controls[rows], 0.0)


def _broadcast(state: NetworkScaffoldState, client_id: str) -> Message:
    """φ, and what the client adds to its gradient."""
    return {"mean": state.phi, "correction": _corrections(state, [state.where[client_id]])[0]}


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, training: Training, weights: str
) -> tuple[Kept, Message, Mapping[str, float]]:
    """Corrected steps from φ."""
    del personal
    network = client.network
    unit, shared = network.unit, network.unit.shared_at
    w = unit.weights(np.asarray(message["mean"], dtype=float), network.start)
    correction = np.empty(unit.size)
    correction[shared] = np.asarray(message["correction"])
    w = network.trained(w, np.arange(unit.size), training, rng, linear=correction)
    steps = training.epochs * -(-len(unit.X) // training.batch_size)
    reply = {"phi": w[shared], "weight": np.array(weight_of(client, weights)), "steps": np.array(float(steps))}
    return Kept(np.zeros(0)), reply, {}


def _refuse(state: NetworkScaffoldState, reply: Message) -> str | None:
    """Weights and numbers of steps are positive."""
    del state
    for name, least in (("weight", 0.0), ("steps", 0.5)):
        if not float(reply[name]) > least:
            return f"{name!r} is {float(reply[name]):.3g}, and must be positive"
    return None


def _update_server(
    state: NetworkScaffoldState, replies: Mapping[str, Message], *, rate: float
) -> tuple[NetworkScaffoldState, NetworkScaffoldInfo]:
    """Average the ends, and write the clients' mean gradients into the ledger."""
    if not replies:
        return state, NetworkScaffoldInfo(np.nan)
    names = sorted(replies)
    rows = [state.where[client_id] for client_id in names]
    ends = np.stack([np.asarray(replies[name]["phi"], dtype=float) for name in names])
    new = np.array([float(replies[name]["weight"]) for name in names])
    steps = np.array([float(replies[name]["steps"]) for name in names])
    controls, weights = state.controls.copy(), state.weights.copy()
    controls[rows] = (state.phi - ends) / (steps[:, None] * rate) - _corrections(state, rows)
    weights[rows] = new
    phi = new @ ends / new.sum()
    change = float(np.sqrt(np.mean((phi - state.phi) ** 2)))
    message = f"weights moved by {change:.2g} (root mean square) in the last round; raise rounds="
    return state._replace(phi=phi, controls=controls, weights=weights, message=message), NetworkScaffoldInfo(change)
