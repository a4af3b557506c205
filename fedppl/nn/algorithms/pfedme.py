"""pFedMe: personal networks held near a shared one, which descends the envelope of their losses."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl.algorithms.averaging._point import weight_of
from fedppl.contracts import Algorithm
from fedppl.nn.algorithms._common import Own, Training, check_all_shared, described, drawn_from, training_rule
from fedppl.nn.algorithms.fedavg import NetworkAveraging
from fedppl.types import Array, DeclarationError, Message

__all__ = ["PFedMe", "Personal"]


class Personal(NamedTuple):
    """What a client keeps to itself."""

    own: Array  # θ_k, (m,)


class _Settings(NamedTuple):
    training: Training
    lam: float
    inner: tuple[float, int]
    weights: str


def PFedMe(
    *,
    lam: float = 15.0,
    learning_rate: float = 5e-3,
    epochs: int = 5,
    batch_size: int = 50,
    inner_rate: float = 1e-2,
    inner_steps: int = 5,
    weights: str = "rows",
) -> Algorithm:
    r"""Personalised networks by Moreau envelopes.

    .. math:: \theta_k(w) = \arg\min_\theta f_k(\theta) + \tfrac\lambda2 \lVert \theta - w \rVert^2, \qquad
              w_k \leftarrow w_k - \eta \lambda (w_k - \theta_k(w_k)), \qquad \phi \leftarrow \text{average of } w_k

    Parameters
    ----------
    lam
        λ, per unit of the mean loss.
    learning_rate
        η; below 1 / λ.
    epochs, batch_size
        Passes over the rows; every batch has its own θ_k.
    inner_rate, inner_steps
        Of the steps to θ_k: one on the loss, then the proximal map of the quadratic, so that large rates end at
        w − ∇f / λ.
    weights
        "rows" or "equal".

    Returns
    -------
    Algorithm
        Its fit has a point estimate, φ; `fedppl.nn.predict` gives predictions by θ_k.

    Raises
    ------
    DeclarationError
        For settings out of range, and where some weights are not shared.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.PFedMe().name
    'PFedMe'

    Notes
    -----
    φ is replaced by the average (β = 1). A client that has no θ_k, or a new one, finds it from φ. With λ → ∞ θ_k is w_k
    and λ (w_k − θ_k) the gradient: federated averaging.

    *When this fails.* A large `lam` with few or short inner steps leaves θ_k at w_k, and nothing moves.

    References
    ----------
    .. [1] Dinh, Tran and Nguyen (2020), Personalized federated learning with Moreau envelopes.
    """
    training = training_rule(learning_rate, epochs, batch_size, momentum=0.0)
    if isinstance(lam, bool) or not isinstance(lam, int | float | np.number) or not 0 < lam < np.inf:
        raise DeclarationError(f"lam={lam!r} must be positive and finite.")
    if training.learning_rate * lam > 1:
        raise DeclarationError(f"learning_rate={learning_rate} times lam={lam} must be at most 1, or w steps beyond θ.")
    inner = training_rule(inner_rate, 1, 1, "inner_").learning_rate
    if isinstance(inner_steps, bool) or not isinstance(inner_steps, int | np.integer) or inner_steps < 1:
        raise DeclarationError(f"inner_steps={inner_steps!r} must be a whole number, at least 1.")
    settings = _Settings(training, float(lam), (inner, int(inner_steps)), weights)
    averaging = NetworkAveraging(momentum=0.0, batch_size=batch_size, weights=weights)
    return averaging._replace(
        name="PFedMe",
        check=lambda client: check_all_shared(client, "PFedMe"),
        update_client=functools.partial(_update_client, settings=settings),
        personalise=functools.partial(_own, settings=settings),
        draw=drawn_from(functools.partial(_own, settings=settings)),
        stay=_stay,
        settings=described(settings._asdict()),
    )


def _steps(client: Any, message: Message, rng: np.random.Generator, settings: _Settings) -> tuple[Array, Array]:
    """w_k and θ_k, in torch's order."""
    network = client.network
    w = network.unit.weights(np.asarray(message["mean"], dtype=float), network.start)
    found: tuple[Array, Array] = network.moreau_steps(w, settings.training, settings.lam, settings.inner, rng)
    return found


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings
) -> tuple[Personal, Message, Mapping[str, float]]:
    """Steps of w_k from φ; θ_k stays."""
    del personal
    w, theta = _steps(client, message, rng, settings)
    weight = weight_of(client, settings.weights)
    reply = {"weighted": weight * w[client.network.unit.shared_at], "weight": np.array(weight)}
    return Personal(theta), reply, {}


def _stay(client: Any, personal: Any, message: Message, rng: np.random.Generator) -> tuple[Any, Mapping[str, float]]:
    """Nothing: θ_k is found from φ whenever it is asked for."""
    del client, message, rng
    return personal, {}


def _own(client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings) -> Own:
    """θ_k around the last φ."""
    del personal
    return Own(client, _steps(client, message, rng, settings)[1], None)
