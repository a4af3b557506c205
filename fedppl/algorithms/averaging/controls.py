"""SCAFFOLD's control variates c_k in the server's ledger, with their weighted mean c."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl.contracts import Received
from fedppl.types import Array


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
    """The ledger before anybody has replied."""
    return Controls(np.zeros((clients, size)), np.zeros(clients), np.zeros(size))


def correction(controls: Controls, row: int) -> Array:
    """c − c_k, (m,), which a client adds to its gradient; zero for one that has not replied yet."""
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

    `length` is T η, one number or one for each of them, (R,). The first term is the mean of the corrected gradient
    along a client's path. c is the mean of the whole ledger, computed anew, so that it cannot be anything else.
    """
    each, weights = controls.each.copy(), controls.weights.copy()
    added = np.stack([correction(controls, row) for row in ends.rows])
    each[ends.rows] = (phi - ends.phi) / np.reshape(length, (-1, 1)) - added
    weights[ends.rows] = ends.weights
    return Controls(each, weights, weights @ each / weights.sum())
