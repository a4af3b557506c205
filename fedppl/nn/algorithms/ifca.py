"""IFCA: several global networks, and every client trains the one that suits its rows best."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from fedppl import gaussian
from fedppl.algorithms.averaging.fedavg import not_counted, weight_of, weights_rule
from fedppl.contracts import Algorithm, ClientUpdate, ClientView, Disclosure, Received, Replies, Report
from fedppl.local.target import at_points
from fedppl.nn.algorithms._common import moved, network_result, run_away, training_rule, whole_network
from fedppl.nn.open_rows import open_rows
from fedppl.nn.personal import loss_at
from fedppl.nn.train import Training, train
from fedppl.nn.view import Own, network_of
from fedppl.settings import described, positive, whole
from fedppl.types import Array, Layout, Message


class IFCAState(NamedTuple):
    """What the next round needs."""

    phi: Array  # (C, m)


class IFCAInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # root mean square of Δφ
    used: int  # clusters that somebody trained


def IFCA(
    *,
    clusters: int = 2,
    spread: float = 0.01,
    learning_rate: float = 1e-2,
    momentum: float | None = 0.9,
    epochs: int = 5,
    batch_size: int = 50,
    weights: str = "rows",
) -> Algorithm[IFCAState, None]:
    r"""Iterative federated clustering: each client trains the network with the lowest loss on its rows.

    .. math:: c_k = \arg\min_c f_k(\phi_c), \qquad
              \phi_c \leftarrow \frac{\sum_{k : c_k = c} n_k w_k}{\sum_{k : c_k = c} n_k}

    Parameters
    ----------
    clusters
        Number of networks. One is federated averaging.
    spread
        Standard deviation of the random weights at which all networks but the first start, around the declared ones.
    learning_rate, momentum, epochs, batch_size
        Learning rate for the mean loss, momentum, passes over the rows and batches of a client's steps;
        ``momentum=None`` for Adam.
    weights
        "rows" or "equal".

    Returns
    -------
    Algorithm
        Its fit has no single point: `fedppl.nn.predict` picks a client's network by its rows.

    Notes
    -----
    Networks travel down all together, C times the bytes of averaging; one comes back.

    *When this fails.* Networks that start alike are told apart by chance, and all clients may end in one: try other
    seeds and a larger `spread`, and judge on rows that were held out.

    References
    ----------
    .. [1] Ghosh et al. (2020), An efficient framework for clustered federated learning.
    """
    clusters, spread = whole("clusters", clusters), positive("spread", spread)
    training = training_rule(learning_rate, epochs, batch_size, momentum=momentum)
    return Algorithm[IFCAState, None](
        name="nn.IFCA",
        settings=described({"clusters": clusters, "spread": spread}, **training._asdict(), weights=weights),
        init=functools.partial(_init, clusters=clusters, spread=spread),
        broadcast=_broadcast,
        update_client=functools.partial(_update_client, training=training, weights=weights_rule(weights)),
        update_server=_update_server,
        replies=Replies(lambda state: {"phi": state.phi.shape[1:], "weight": state.phi.shape[:1]}, _reject),
        result=network_result(_broadcast, _own),
        needs=whole_network("nn.IFCA"),
        disclosure=Disclosure(functools.partial(at_points, name="phi", several=True), by_row=open_rows),
    )


def _init(layout: Layout, clients: tuple[str, ...], rng: Generator, *, clusters: int, spread: float) -> IFCAState:
    """The declared weights, and others around them."""
    start = gaussian.mean(layout.prior)
    others = start + spread * rng.normal(size=(clusters - 1, len(start)))
    return IFCAState(np.vstack([start[None], others]))


def _broadcast(state: IFCAState, client_id: str) -> Message:
    """All networks."""
    return {"phi": state.phi}


def _best(client: ClientView, message: Message) -> tuple[int, Array]:
    """The cluster with the lowest loss, and its weights."""
    network = client.view(network_of)
    found = [network.at(phi) for phi in np.asarray(message["phi"])]
    losses = np.array([loss_at(network.unit, w) for w in found])
    chosen = int(np.argmin(np.where(np.isnan(losses), np.inf, losses)))  # as of a network that has run away
    return chosen, found[chosen]


def _update_client(
    client: ClientView, personal: None, message: Message, rng: Generator, *, training: Training, weights: str
) -> ClientUpdate[None]:
    """Choose, train, and say which."""
    unit, (chosen, w) = client.view(network_of).unit, _best(client, message)
    w = train(unit, w, np.arange(unit.size), training, rng)
    weight = np.zeros(len(message["phi"]))
    weight[chosen] = weight_of(client, weights)
    return ClientUpdate(None, {"phi": w[unit.shared_at], "weight": weight}, {"cluster": float(chosen)})


def _update_server(state: IFCAState, received: Received) -> tuple[IFCAState, Report]:
    """Average within clusters; one that nobody chose stays as it is."""
    if not received.clients:
        return state, Report(IFCAInfo(np.nan, 0))
    replies = [received.each[client_id] for client_id in sorted(received.each)]
    weights, ends = (
        np.stack([np.asarray(reply[name], dtype=float) for reply in replies]) for name in ("weight", "phi")
    )
    total = weights.sum(axis=0)
    averages = weights.T @ ends / np.where(total > 0, total, 1.0)[:, None]
    phi = np.where(total[:, None] > 0, averages, state.phi)
    change, message = moved(state.phi, phi)
    return IFCAState(phi), Report(IFCAInfo(change, int(np.sum(total > 0))), message=message)


def _reject(state: IFCAState, reply: Message) -> str | None:
    """One weight is a number of rows, the others are 0, and training has not run away."""
    weight = np.asarray(reply["weight"])
    if np.sum(weight > 0) != 1 or np.any(weight < 0):
        return f"'weight' is {weight.tolist()}, and must be positive for one cluster and 0 for the others"
    before = state.phi[np.argmax(weight)]
    return not_counted({"weight": weight.max()}, "weight") or run_away("phi", np.asarray(reply["phi"]), before)


def _own(client: ClientView, personal: None, message: Message, rng: Generator) -> Own:
    """The network that suits the client's rows best."""
    return Own(client, _best(client, message)[1], None)
