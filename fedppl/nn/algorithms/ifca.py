"""IFCA: several global networks, and every client trains the one that suits its rows best."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.algorithms.averaging._point import Kept, weight_of, weights_rule
from fedppl.algorithms.hierarchical.confidence import spread_rule
from fedppl.contracts import Algorithm
from fedppl.local.target import at_points
from fedppl.nn.algorithms._common import (
    Own,
    Training,
    check_all_shared,
    described,
    drawn_from,
    training_rule,
    unused_priors,
)
from fedppl.types import Array, DeclarationError, Layout, Message, Status

__all__ = ["IFCA", "IFCAInfo", "IFCAState"]


class IFCAState(NamedTuple):
    """What the next round needs."""

    phi: Array  # (C, m)
    status: str
    message: str


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
) -> Algorithm:
    r"""Iterative federated clustering: each client trains the network with the lowest loss on its rows.

    .. math:: c_k = \arg\min_c f_k(\phi_c), \qquad
              \phi_c \leftarrow \frac{\sum_{k : c_k = c} n_k w_k}{\sum_{k : c_k = c} n_k}

    Parameters
    ----------
    clusters
        Number of networks. One is federated averaging.
    spread
        The first starts at the declared weights, the others at random ones around them with this sd.
    learning_rate, momentum, epochs, batch_size
        Of a client's steps; ``momentum=None`` for Adam.
    weights
        "rows" or "equal".

    Returns
    -------
    Algorithm
        Its fit has no single point: `fedppl.nn.predict` picks a client's network by its rows.

    Raises
    ------
    DeclarationError
        For settings out of range, and where some weights are not shared.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.IFCA(clusters=3).name
    'IFCA'

    Notes
    -----
    Networks travel down all together, C times the bytes of averaging; one comes back.

    *When this fails.* Networks that start alike are told apart by chance, and all clients may end in one: try other
    seeds and a larger `spread`, and judge on rows that were held out.

    References
    ----------
    .. [1] Ghosh et al. (2020), An efficient framework for clustered federated learning.
    """
    if isinstance(clusters, bool) or not isinstance(clusters, int | np.integer) or clusters < 1:
        raise DeclarationError(f"clusters={clusters!r} must be a whole number, at least 1.")
    training = training_rule(learning_rate, epochs, batch_size, momentum=momentum)
    sd, rule = spread_rule(spread), weights_rule(weights)
    return Algorithm(
        name="IFCA",
        check=lambda client: check_all_shared(client, "IFCA"),
        init_server=functools.partial(_init_server, clusters=int(clusters), spread=sd),
        broadcast=lambda state, client_id: {"phi": state.phi},
        update_client=functools.partial(_update_client, training=training, weights=rule),
        reply_shapes=lambda state: {"phi": state.phi.shape[1:], "weight": state.phi.shape[:1]},
        refuse=_refuse,
        update_server=_update_server,
        outcome=lambda state, client_id: {"phi": state.phi},
        draw=drawn_from(_own),
        personalise=_own,
        details=lambda state: {},
        settings=described({"clusters": int(clusters), "spread": sd, **training._asdict(), "weights": weights}),
        large=True,
        asks=functools.partial(at_points, name="phi", several=True),
        unused=unused_priors,
    )


def _init_server(
    layout: Layout, clients: tuple[str, ...], rng: np.random.Generator, *, clusters: int, spread: float
) -> IFCAState:
    """The declared weights, and others around them."""
    del clients
    start = gaussian.mean(layout.prior)
    others = start + spread * rng.normal(size=(clusters - 1, len(start)))
    return IFCAState(np.vstack([start[None], others]), Status.RUNNING.value, "raise rounds=")


def _best(client: Any, message: Message) -> tuple[int, Array]:
    """The cluster with the lowest loss, and its weights."""
    network = client.network
    found = [network.unit.weights(phi, network.start) for phi in np.asarray(message["phi"], dtype=float)]
    losses = [network.loss(w) for w in found]
    chosen = int(np.argmin(losses))
    return chosen, found[chosen]


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, training: Training, weights: str
) -> tuple[Kept, Message, Mapping[str, float]]:
    """Choose, train, and say which."""
    del personal
    network = client.network
    chosen, w = _best(client, message)
    w = network.trained(w, np.arange(network.unit.size), training, rng)
    weight = np.zeros(len(message["phi"]))
    weight[chosen] = weight_of(client, weights)
    reply = {"phi": w[network.unit.shared_at], "weight": weight}
    return Kept(np.zeros(0)), reply, {"cluster": float(chosen)}


def _refuse(state: IFCAState, reply: Message) -> str | None:
    """One weight is positive, the others are 0."""
    del state
    weight = np.asarray(reply["weight"])
    if np.sum(weight > 0) != 1 or np.any(weight < 0):
        return f"'weight' is {weight.tolist()}, and must be positive for one cluster and 0 for the others"
    return None


def _update_server(state: IFCAState, replies: Mapping[str, Message]) -> tuple[IFCAState, IFCAInfo]:
    """Average within clusters; one that nobody chose stays as it is."""
    if not replies:
        return state, IFCAInfo(np.nan, 0)
    names = sorted(replies)
    weights = np.stack([np.asarray(replies[name]["weight"], dtype=float) for name in names])
    ends = np.stack([np.asarray(replies[name]["phi"], dtype=float) for name in names])
    total = weights.sum(axis=0)
    averages = weights.T @ ends / np.where(total > 0, total, 1.0)[:, None]
    phi = np.where(total[:, None] > 0, averages, state.phi)
    change = float(np.sqrt(np.mean((phi - state.phi) ** 2)))
    message = f"weights moved by {change:.2g} (root mean square) in the last round; raise rounds="
    return state._replace(phi=phi, message=message), IFCAInfo(change, int(np.sum(total > 0)))


def _own(client: Any, personal: Any, message: Message, rng: np.random.Generator) -> Own:
    """The network that suits the client's rows best."""
    del personal, rng
    return Own(client, _best(client, message)[1], None)
