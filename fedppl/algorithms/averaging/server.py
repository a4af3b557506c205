"""What servers share that average over clients: weights that are positive, weighted averages, how far something moved.

A client's reply holds ``weighted``, its weight times what is averaged, and ``weight``, so that sums over the clients
are all that the server needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedppl.contracts import ClientView, Draws
from fedppl.local.gradient_steps import Objective
from fedppl.numerics.pairs import inner_mode_at
from fedppl.settings import between, one_of
from fedppl.types import Array, LocalFailure, Message

_MOST = 1e12  # rows, clients or steps that one reply may stand for


def weighted(value: Array, weight: float) -> dict[str, Array]:
    """What a client sends to be averaged.

    >>> weighted(np.array([1.0, 3.0]), 2.0)
    {'weighted': array([2., 6.]), 'weight': array(2.)}
    """
    return {"weighted": weight * value, "weight": np.array(weight)}


def average(total: Message) -> Array:
    """Weighted average over the clients, from the sums of what they sent.

    >>> average({"weighted": np.array([2.0, 6.0]), "weight": np.array(2.0)})
    array([1., 3.])
    """
    return np.asarray(total["weighted"] / total["weight"])


def not_positive(reply: Message, **least: float) -> str | None:
    """Why a reply is rejected in which a number is not above the least that is given, or None.

    >>> not_positive({"weight": np.array(0.0)}, weight=0)
    "'weight' is 0, and must be positive"
    """
    for name, bound in least.items():
        if not float(reply[name]) > bound:
            return f"{name!r} is {float(reply[name]):.3g}, and must be positive"
    return None


def not_counted(reply: Message, *names: str) -> str | None:
    """Why a reply is rejected in which a number of rows, of clients or of steps is none, or None.

    >>> not_counted({"weight": np.array(0.5)}, "weight")
    "'weight' is 0.5, and must be a whole number from 1 to 1e+12"
    """
    for name in names:
        value = float(reply[name])
        if not 1.0 <= value <= _MOST or value != np.round(value):
            return f"{name!r} is {value:.3g}, and must be a whole number from 1 to {_MOST:.0e}"
    return None


def negative(reply: Message, name: str) -> str | None:
    """Why a reply is rejected in which a distance is negative, or None."""
    value = float(reply[name])
    return None if value >= 0 else f"{name!r} is {value:.3g}, and must not be negative"


def reject_weight(state: Any, reply: Message) -> str | None:
    """A weight must be positive."""
    return not_positive(reply, weight=0)


def relative_change(before: Array, after: Array) -> float:
    """Largest |Δφ| / (1 + |φ|) over coordinates; 0 where there are none.

    >>> relative_change(np.array([0.0, 1.0]), np.array([1.0, 1.0]))
    0.5
    """
    return float(np.max(np.abs(after - before) / (1.0 + np.abs(after)), initial=0.0))


def root_mean_square_change(before: Array, after: Array) -> float:
    """Root mean square of Δφ over coordinates.

    >>> root_mean_square_change(np.zeros(2), np.array([2.0, 2.0]))
    2.0
    """
    return float(np.sqrt(np.mean((after - before) ** 2)))


# What algorithms that end in a point share: a client's loss with its part of the prior, and how the point is read -----


class LocalClientState(NamedTuple):
    """What a client keeps to itself beside shared parameters that travel: its local ones."""

    local: Array  # (d_k,)


KeptLocal = LocalClientState | None  # none in its first round, or where it lost it


def client_loss(client: ClientView, prior_share: float) -> Objective:
    """F_k(φ, θ) = −[log p(y_k, θ | φ) + share · log p(φ)] / n_k: averaged over clients by n_k, the log posterior."""
    scale = 1.0 / client.rows
    prior = client.layout.prior
    factor = scale * prior_share
    share = 0.0 if client.layout.prior_is_gaussian else prior_share
    return Objective(scale, factor * prior.precision, factor * prior.linear, share)


def pulled(objective: Objective, strength: float, centre: Array) -> Objective:
    """The objective with ½ · strength · ‖φ − centre‖² added."""
    return objective._replace(
        quadratic=objective.quadratic + strength * np.eye(len(centre)), linear=objective.linear + strength * centre
    )


def fitting_local(client: ClientView, local: Array | None) -> Array | None:
    """A client's local variables, where it has some that fit its model."""
    return None if local is None or len(local) != client.local_size else local


def kept_local(client: ClientView, local: Array | None) -> tuple[Array, dict[str, float]]:
    """Local variables to go on from, and a diagnostic when a client with local variables starts blank."""
    local = fitting_local(client, local)
    return (client.initial, {"blank": 1.0} if client.local_size else {}) if local is None else (local, {})


def fitting_own(client: ClientView, own: Array | None) -> Array | None:
    """A client's own point (φ, θ_k) to go on from, where it has one that fits its model."""
    return None if own is None or len(own) != client.shared_size + client.local_size else np.asarray(own)


def weights_rule(weights: str) -> str:
    """Check the keyword `weights`."""
    return one_of("weights", weights, ("rows", "equal"), "by number of rows, or all alike")


def tolerance_rule(tolerance: float) -> float:
    """Check the keyword `tolerance`."""
    return between("tolerance", tolerance, 0, 1)


def weight_of(client: ClientView, weights: str) -> float:
    """n_k, or 1."""
    return float(client.rows) if weights == "rows" else 1.0


def draw_point(client: ClientView, phi: Array, local: Array | None, draws: int, chains: int) -> Draws:
    """Equal draws of one point; where θ is not known, it is taken to the mode of p(θ | y, φ)."""
    if local is None:
        arrived, local = inner_mode_at(client.kernel, np.ascontiguousarray(phi), client.initial.copy(), client.packed)
        if not arrived:
            raise LocalFailure("no mode of the local variables was found at the shared estimate; look at the data")
    shape = (chains, draws)
    return Draws(
        np.broadcast_to(phi, (*shape, len(phi))).copy(),
        np.broadcast_to(local, (*shape, client.local_size)).copy(),
        {"point_estimate": 1.0},
    )
