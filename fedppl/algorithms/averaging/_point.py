"""What algorithms that end in a point share: a client's loss with its part of the prior, and how the point is read."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedppl.contracts import Draws
from fedppl.local.descent import Objective
from fedppl.numerics.marginal import inner_mode_at
from fedppl.numerics.newton import OK
from fedppl.settings import between, flag, one_of, plain
from fedppl.types import Array, LocalFailure

__all__ = [
    "Kept",
    "client_loss",
    "converged",
    "described",
    "draw_point",
    "flag_rule",
    "kept_local",
    "kept_own",
    "pulled",
    "tolerance_rule",
    "weight_of",
    "weights_rule",
]


class Kept(NamedTuple):
    """What a client keeps to itself beside shared parameters that travel: its local ones."""

    local: Array  # (d_k,)


def client_loss(client: Any, prior_share: float) -> Objective:
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


def kept_local(client: Any, personal: Any) -> tuple[Array, dict[str, float]]:
    """Local parameters to go on from, and a word on it when a client with local parameters starts blank."""
    if personal is not None and len(personal.local) == client.local_size:
        return personal.local, {}
    return client.initial, ({"blank": 1.0} if client.local_size else {})


def kept_own(client: Any, personal: Any) -> Array | None:
    """A client's own point (φ, θ_k) to go on from, where it has one that fits its model."""
    if personal is None or len(personal.own) != client.shared_size + client.local_size:
        return None
    return np.asarray(personal.own)


def described(settings: NamedTuple, **more: Any) -> dict[str, str]:
    """Settings of an algorithm, each in one line of text."""
    return {name: repr(plain(value)) for name, value in {**settings._asdict(), **more}.items()}


def weights_rule(weights: str) -> str:
    """Check the keyword `weights`."""
    return one_of("weights", weights, ("rows", "equal"), "by number of rows, or all alike")


def tolerance_rule(tolerance: float) -> float:
    """Check the keyword `tolerance`."""
    return between("tolerance", tolerance, 0, 1)


def flag_rule(name: str, value: Any) -> bool:
    """Check a keyword that is True or False."""
    return flag(name, value)


def weight_of(client: Any, weights: str) -> float:
    """n_k, or 1."""
    return float(client.rows) if weights == "rows" else 1.0


def converged(before: Array, after: Array, tolerance: float) -> tuple[bool, float]:
    """Whether no coordinate moved by more than tolerance · (1 + |φ|), and the largest such ratio."""
    change = float(np.max(np.abs(after - before) / (1.0 + np.abs(after)), initial=0.0))
    return change < tolerance, change


def draw_point(client: Any, phi: Array, local: Array | None, draws: int, chains: int) -> Draws:
    """Equal draws of one point; where θ is not known, it is taken to the mode of p(θ | y, φ)."""
    if local is None:
        status, local = inner_mode_at(client.kernel, np.ascontiguousarray(phi), client.initial.copy(), client.data)
        if status != OK:
            raise LocalFailure("no mode of the local variables was found at the shared estimate; look at the data")
    shape = (chains, draws)
    return Draws(
        np.broadcast_to(phi, (*shape, len(phi))).copy(),
        np.broadcast_to(local, (*shape, client.local_size)).copy(),
        {"point_estimate": 1.0},
    )
