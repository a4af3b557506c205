"""pFedMe: personal networks held near a shared one, which descends the envelope of their losses."""

from __future__ import annotations

import functools
from typing import NamedTuple

from numpy.random import Generator

from fedppl.algorithms.averaging.fedavg import weight_of, weighted, weights_rule
from fedppl.contracts import Algorithm, ClientUpdate, ClientView
from fedppl.nn.algorithms._common import (
    AT_MEAN,
    ESTIMATE,
    REPLIES,
    NetworkState,
    broadcast,
    init,
    network_result,
    training_rule,
    update_server,
    whole_network,
)
from fedppl.nn.personal import moreau_steps
from fedppl.nn.train import Training
from fedppl.nn.view import Own, network_of
from fedppl.settings import described, positive, whole
from fedppl.types import Array, DeclarationError, Message


class MoreauClientState(NamedTuple):
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
) -> Algorithm[NetworkState, MoreauClientState]:
    r"""Personalised networks by Moreau envelopes.

    .. math:: \theta_k(w) = \arg\min_\theta f_k(\theta) + \tfrac\lambda2 \lVert \theta - w \rVert^2, \qquad
              w_k \leftarrow w_k - \eta \lambda (w_k - \theta_k(w_k)), \qquad \phi \leftarrow \text{average of } w_k

    Parameters
    ----------
    lam
        λ, strength of the quadratic beside the mean loss.
    learning_rate
        η, below 1 / λ.
    epochs, batch_size
        Passes over the rows; every batch has its own θ_k.
    inner_rate, inner_steps
        Learning rate and number of the steps to θ_k: each one on the loss, then the proximal map of the quadratic, so
        that large rates end at w − ∇f / λ.
    weights
        "rows" or "equal".

    Returns
    -------
    Algorithm
        Its fit has a point estimate, φ; `fedppl.nn.predict` gives predictions by θ_k.

    Notes
    -----
    φ is replaced by the average (β = 1). A client that has no θ_k, or a new one, finds it from φ. With λ → ∞ θ_k is w_k
    and λ (w_k − θ_k) the gradient: federated averaging.

    *When this fails.* A large `lam` with few or short inner steps leaves θ_k at w_k, and nothing moves. With a small
    `lam` and long inner steps θ_k is what the last batch says: of 51 rows by 50 that is one row.

    References
    ----------
    .. [1] Dinh, Tran and Nguyen (2020), Personalized federated learning with Moreau envelopes.
    """
    training = training_rule(learning_rate, epochs, batch_size, momentum=0.0)
    lam = positive("lam", lam)
    if training.learning_rate * lam > 1:
        raise DeclarationError(f"learning_rate={learning_rate} times lam={lam} must be at most 1, or w steps beyond θ.")
    inner = positive("inner_rate", inner_rate), whole("inner_steps", inner_steps)
    settings = _Settings(training, lam, inner, weights_rule(weights))
    return Algorithm[NetworkState, MoreauClientState](
        name="nn.PFedMe",
        settings=described(settings),
        init=init,
        broadcast=broadcast,
        update_client=functools.partial(_update_client, settings=settings),
        update_server=update_server,
        replies=REPLIES,
        result=network_result(broadcast, functools.partial(_own, settings=settings), ESTIMATE),
        needs=whole_network("nn.PFedMe"),
        disclosure=AT_MEAN,
    )


def _steps(client: ClientView, message: Message, rng: Generator, settings: _Settings) -> tuple[Array, Array]:
    """w_k and θ_k, in torch's order."""
    network = client.view(network_of)
    w = network.at(message["mean"])
    return moreau_steps(network.unit, w, settings.training, settings.lam, settings.inner, rng)


def _update_client(
    client: ClientView, personal: MoreauClientState | None, message: Message, rng: Generator, *, settings: _Settings
) -> ClientUpdate[MoreauClientState]:
    """Steps of w_k from φ; θ_k stays."""
    w, theta = _steps(client, message, rng, settings)
    shared = client.view(network_of).unit.shared_at
    return ClientUpdate(MoreauClientState(theta), weighted(w[shared], weight_of(client, settings.weights)))


def _own(
    client: ClientView, personal: MoreauClientState | None, message: Message, rng: Generator, *, settings: _Settings
) -> Own:
    """θ_k around the last φ, found anew: it is not what the client keeps."""
    return Own(client, _steps(client, message, rng, settings)[1], None)
