"""What algorithms share whose clients have heads of their own, on layers below that are averaged by rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl.contracts import ClientView, Needs
from fedppl.nn.algorithms._common import check_all_shared, names_in, needs
from fedppl.nn.functional import Places
from fedppl.nn.head import Head
from fedppl.nn.unit import NetworkUnit
from fedppl.nn.view import network_of
from fedppl.types import Array, DeclarationError, Layout, Message


class Here(NamedTuple):
    """A client's view of the shared weights that it was sent."""

    unit: NetworkUnit
    head: Head
    w: Array  # all weights, in torch's order, (m,)
    centre: Array  # the shared head, in torch's order, (d,)
    below: Places  # where the layers below lie in w


def head_rule(head: Any) -> tuple[str, ...]:
    """Check the keyword `head`."""
    names = names_in(head)
    if names is None:
        raise DeclarationError(
            f'head={head!r} must be a tuple of torch\'s names, each once, such as ("2.weight", "2.bias").'
        )
    return names


def last_layer(algorithm: str, head: tuple[str, ...]) -> Needs:
    """Of a client's model: that it is a network, all of it shared, with this head for its last layer."""

    def check(client: ClientView) -> None:
        check_all_shared(client, algorithm, head)
        client.view(network_of).head(head)

    return needs(check)


def head_in(layout: Layout, head: tuple[str, ...]) -> Places:
    """Where the head lies in φ, (d,)."""
    return np.concatenate([np.arange(at.start, at.stop) for name, at in layout.slices.items() if name in head])


def here(client: ClientView, message: Message, head: tuple[str, ...]) -> Here:
    """Read a broadcast at a client."""
    network = client.view(network_of)
    found, w = network.head(head), network.at(message["mean"])
    below = np.ones(len(w), dtype=bool)
    below[found.places] = False
    return Here(network.unit, found, w, w[found.places], np.flatnonzero(below))


def here_together(clients: Sequence[ClientView], messages: Sequence[Message], head: tuple[str, ...]) -> list[Here]:
    """`here` at clients with one network, for which places are looked up once."""
    first = here(clients[0], messages[0], head)
    found = []
    for client, message in zip(clients, messages, strict=True):
        network = client.view(network_of)
        w = network.at(message["mean"])
        found.append(first._replace(unit=network.unit, w=w, centre=w[first.head.places]))
    return found


def parted(at: Here, w: Array) -> tuple[dict[str, Array], Array]:
    """What a client sends of the layers below, and its head in the order of φ."""
    phi, rows = w[at.unit.shared_at], float(len(at.unit.X))
    is_head = np.isin(at.unit.shared_at, at.head.places)
    return {"below": rows * phi[~is_head], "rows": np.array(rows)}, phi[is_head]


def joined(total: Message, at: Places, head: Array) -> Array:
    """φ from the average of the layers below by rows, and a head that lies at these places."""
    phi = np.empty(len(total["below"]) + len(at))
    phi[np.setdiff1d(np.arange(len(phi)), at)], phi[at] = total["below"] / total["rows"], head
    return phi
