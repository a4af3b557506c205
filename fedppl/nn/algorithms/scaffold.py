"""SCAFFOLD for networks: gradient steps corrected for the clients' drift, control variates in the server's ledger."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from fedppl import gaussian
from fedppl.algorithms.averaging.fedavg import not_counted, weight_of, weights_rule
from fedppl.algorithms.averaging.scaffold import Controls, correction, ends_of, entered, no_controls
from fedppl.contracts import Algorithm, ClientUpdate, ClientView, Point, Received, Replies, Report
from fedppl.nn.algorithms._common import (
    NetworkInfo,
    network_result,
    reported,
    run_away,
    training_rule,
    tuned,
    tuning_message,
    tuning_rule,
    whole_network,
)
from fedppl.nn.train import Training, train
from fedppl.nn.view import network_of
from fedppl.settings import described
from fedppl.types import Array, Layout, Message


class ScaffoldState(NamedTuple):
    """What the next round needs."""

    phi: Array  # (m,)
    where: Mapping[str, int]  # client id to its row
    controls: Controls


def SCAFFOLD(
    *, learning_rate: float = 1e-2, epochs: int = 5, batch_size: int = 50, weights: str = "rows"
) -> Algorithm[ScaffoldState, None]:
    r"""Stochastic controlled averaging of whole networks, by plain gradient steps.

    .. math:: w_k \leftarrow w_k - \eta (\nabla f_k(w_k) + c - c_k) \text{, T times from } \phi, \qquad
              c_k \leftarrow c_k - c + \frac{\phi - w_k}{T \eta}, \qquad c = \frac{\sum_k n_k c_k}{\sum_k n_k}

    The server works out c_k from where the client ends, so that c is the mean of the c_k whatever is lost on the way.

    Parameters
    ----------
    learning_rate, epochs, batch_size
        Learning rate, passes over the rows and batches of the steps, which have no momentum: c_k is a mean gradient
        only then.
    weights
        "rows" or "equal".

    Returns
    -------
    Algorithm
        Its fit has a point estimate.

    Notes
    -----
    The server holds a vector of all weights for each client. `fedppl.SCAFFOLD` is the same for any declared model. c is
    the mean over the clients that have replied, and a client that has not takes plain steps: as published all c_k
    start at 0, c is the mean over all of them, and a first reply is corrected by c.

    *When this fails.* Where few clients report, control variates are old, and corrections by them do harm.

    References
    ----------
    .. [1] Karimireddy et al. (2020), SCAFFOLD, option II.
    """
    training = training_rule(learning_rate, epochs, batch_size, momentum=0.0)
    rule, tuning = weights_rule(weights), tuning_rule(None, 1e-3, 1, 1)
    return Algorithm[ScaffoldState, None](
        name="nn.SCAFFOLD",
        settings=described(training, weights=weights),
        init=_init,
        broadcast=_broadcast,
        update_client=functools.partial(_update_client, training=training, weights=rule),
        update_server=functools.partial(_update_server, rate=training.learning_rate),
        replies=Replies(lambda state: {"phi": state.phi.shape, "weight": (), "steps": ()}, _reject),
        result=network_result(
            lambda state, client_id: tuning_message(state.phi, tuning),
            functools.partial(tuned, which=None),
            Point(lambda state: state.phi),
        ),
        needs=whole_network("nn.SCAFFOLD"),
    )


def _init(layout: Layout, clients: tuple[str, ...], rng: Generator) -> ScaffoldState:
    """Start at the mean of the declared prior, without a reply."""
    where = {client_id: k for k, client_id in enumerate(clients)}
    return ScaffoldState(gaussian.mean(layout.prior), where, no_controls(len(clients), layout.size))


def _broadcast(state: ScaffoldState, client_id: str) -> Message:
    """φ, and what the client adds to its gradient."""
    return {"mean": state.phi, "correction": correction(state.controls, state.where[client_id])}


def _update_client(
    client: ClientView, personal: None, message: Message, rng: Generator, *, training: Training, weights: str
) -> ClientUpdate[None]:
    """Corrected steps from φ."""
    network = client.view(network_of)
    unit = network.unit
    added = unit.weights(np.asarray(message["correction"]), np.zeros(client.local_size))
    w = train(unit, network.at(message["mean"]), np.arange(unit.size), training, rng, linear=added)
    steps = training.epochs * -(-len(unit.X) // training.batch_size)
    weight = np.array(weight_of(client, weights))
    return ClientUpdate(None, {"phi": w[unit.shared_at], "weight": weight, "steps": np.array(float(steps))})


def _update_server(state: ScaffoldState, received: Received, *, rate: float) -> tuple[ScaffoldState, Report]:
    """Average the ends, and write the clients' mean gradients into the ledger."""
    if not received.clients:
        return state, Report(NetworkInfo(np.nan))
    ends = ends_of(received, state.where)
    steps = np.array([float(received.each[client_id]["steps"]) for client_id in sorted(received.each)])
    controls = entered(state.controls, ends, state.phi, steps * rate)
    phi = ends.weights @ ends.phi / ends.weights.sum()
    return state._replace(phi=phi, controls=controls), reported(state.phi, phi)


def _reject(state: ScaffoldState, reply: Message) -> str | None:
    """Rows and steps are counted, and training has not run away."""
    return not_counted(reply, "weight", "steps") or run_away("phi", np.asarray(reply["phi"]), state.phi)
