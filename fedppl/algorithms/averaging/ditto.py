"""Ditto: federated averaging for shared parameters, with each client's own ones pulled towards them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from fedppl.algorithms.averaging import fedavg
from fedppl.algorithms.averaging.fedavg import client_loss, draw_point, fitting_point, kept_local, pulled, weights_rule
from fedppl.contracts import Algorithm, ClientUpdate, ClientView, Draws, Result
from fedppl.local.gradient_steps import Descent, checked, descend
from fedppl.local.target import local_mode
from fedppl.settings import between, described, positive, whole
from fedppl.types import Array, DeclarationError, LocalFailure, Message, Rng


class DittoClientState(NamedTuple):
    """What a client keeps to itself."""

    local: Array  # (d_k,) its local variables beside φ
    point: Array  # (m + d_k,) v_k: its copy of the shared and of the local variables


_Kept = DittoClientState | None  # none in its first round, or where it lost it


class _Settings(NamedTuple):
    descent: Descent
    personal: Descent  # of the steps on v_k
    lam: float
    weights: str


def Ditto(
    *,
    learning_rate: float,
    lam: float,
    steps: int = 20,
    personal_steps: int | None = None,
    personal_rate: float | None = None,
    batch_size: int | None = None,
    weights: str = "rows",
    tolerance: float = 1e-6,
) -> Algorithm[fedavg.AverageState, DittoClientState]:
    r"""Personal parameters near the shared ones of federated averaging.

    .. math:: v_k \leftarrow v_k - \eta_v \left(\nabla F_k(v_k) + \lambda (v_k - \phi)\right), \qquad
              \phi \text{ as in FedAvg}

    v_k stays at the client and never travels; φ does not depend on it. λ pulls the shared coordinates of v_k only.
    λ = 0 leaves every client to itself (with its share, p(φ)^(1/K), of the prior), λ → ∞ gives φ to all.
    ``fit.client(k)`` has v_k, ``fit.estimate`` has φ.

    Parameters
    ----------
    learning_rate, steps
        Learning rate and number of the steps on φ, as in `FedAvg`.
    lam
        Strength λ of the pull towards φ, in units of the mean loss over a client's rows. Choose it by
        `fedppl.search.validation_loss`.
    personal_steps
        Number of steps on v_k a round; by default as many as on φ.
    personal_rate
        Learning rate η_v of the steps on v_k, below 2 / (λ_max + λ); by default `learning_rate`.
    batch_size, weights, tolerance
        As in `FedAvg`; batches hold for both.

    Returns
    -------
    Algorithm
        Its fit has a point estimate (``fit.estimate``) and no posterior.

    Notes
    -----
    A client that has no v_k, in its first round or because it lost it, starts from φ and reports ``blank``. A new
    client takes `personal_steps` steps from φ when its posterior is asked for.

    *When this fails.* The fit has converged when φ has; v_k may lag behind where a client was asked in few rounds, or
    `personal_steps` or `personal_rate` are small. One λ for all clients is too much for large ones or too little for
    small ones; `EP` weighs each by its data.

    References
    ----------
    .. [1] Li et al. (2021), Ditto: fair and robust federated learning through personalization, Algorithm 1.
    .. [2] FedLin, section 6.2.
    """
    lam = between("lam", lam, 0, np.inf, "[)")
    descent = checked(learning_rate, steps, batch_size)
    personal = descent._replace(
        learning_rate=descent.learning_rate if personal_rate is None else positive("personal_rate", personal_rate),
        steps=descent.steps if personal_steps is None else whole("personal_steps", personal_steps),
    )
    if personal.learning_rate * lam >= 2:
        name = "learning_rate" if personal_rate is None else "personal_rate"
        raise DeclarationError(f"{name}={personal.learning_rate} times lam={lam} must be below 2, or steps diverge.")
    settings = _Settings(descent, personal, lam, weights_rule(weights))
    rates = {"lam": lam, "personal_steps": personal.steps, "personal_rate": personal.learning_rate}
    return fedavg.averaging(
        "Ditto",
        described(descent, **rates, weights=weights, tolerance=tolerance),
        descent,
        tolerance,
        functools.partial(_update_client, settings=settings),
        Result(fedavg.broadcast, functools.partial(_draw, settings=settings), fedavg.POINT),
    )


def _update_client(
    client: ClientView, personal: _Kept, message: Message, rng: Rng, *, settings: _Settings
) -> ClientUpdate[DittoClientState]:
    """FedAvg's reply, and steps on v_k with this round's φ."""
    phi, objective = np.asarray(message["phi"], dtype=float), client_loss(client, float(message["prior_share"]))
    before = personal and personal.local
    kept, reply, info = fedavg.stepped(client, before, phi, objective, rng, settings.descent, settings.weights)
    v = fitting_point(client, personal and personal.point)
    if v is None:
        v, info = np.concatenate([phi, kept_local(client, before)[0]]), {**info, "blank": 1.0}
    v = _personal_steps(client, v, message, rng, settings)
    return ClientUpdate(DittoClientState(kept.local, v), reply, info)


def _personal_steps(client: ClientView, v: Array, message: Message, rng: Rng, settings: _Settings) -> Array:
    """v_k after its steps on F_k + λ/2 ‖v − φ‖²."""
    objective = client_loss(client, float(message["prior_share"]))
    objective = pulled(objective, settings.lam, np.asarray(message["phi"], dtype=float))
    try:
        return descend(client, v, objective, settings.personal, rng)
    except LocalFailure as failure:
        rates = f"personal_rate={settings.personal.learning_rate:g} or lam={settings.lam:g}"
        raise LocalFailure(f"personal gradient steps diverged; lower {rates}") from failure


def _draw(
    client: ClientView, personal: _Kept, message: Message, draws: int, chains: int, rng: Rng, *, settings: _Settings
) -> Draws:
    """v_k; a client that has none takes its steps from φ and the mode of its local variables there."""
    v, m = fitting_point(client, personal and personal.point), client.shared_size
    if v is None:
        phi = np.asarray(message["phi"], dtype=float)
        arrived, local = local_mode(client, phi)
        start = np.concatenate([phi, local if arrived else client.initial])
        v = _personal_steps(client, start, message, rng, settings)
    return draw_point(client, v[:m], v[m:], draws, chains)
