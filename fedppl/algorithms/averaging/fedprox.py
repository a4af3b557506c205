"""FedProx: federated averaging whose clients are held back towards the shared parameters they started from."""

from __future__ import annotations

import functools

import numpy as np

from fedppl.algorithms.averaging import fedavg
from fedppl.algorithms.averaging.fedavg import (
    KeptLocal,
    LocalClientState,
    client_loss,
    pulled,
    tolerance_rule,
    weights_rule,
)
from fedppl.contracts import Algorithm, ClientUpdate, ClientView, Needs, Result
from fedppl.local.gradient_steps import Descent, check_batches, checked
from fedppl.settings import between, described
from fedppl.types import DeclarationError, Message, Rng


def FedProx(
    *,
    learning_rate: float,
    mu: float,
    steps: int = 20,
    batch_size: int | None = None,
    weights: str = "rows",
    tolerance: float = 1e-6,
) -> Algorithm[fedavg.AverageState, LocalClientState]:
    r"""Federated averaging with a proximal term in each client's loss.

    .. math:: \phi_k = T \text{ gradient steps from } \phi \text{ on } F_k(\cdot) + \frac{\mu}{2} \Vert \cdot - \phi
              \Vert^2, \qquad \phi \leftarrow \frac{\sum_k n_k \phi_k}{\sum_k n_k}

    F_k is the client's mean loss with its share of the prior, as in `FedAvg`. Only the shared parameters are held
    back; local ones have nothing to be held to.

    Parameters
    ----------
    learning_rate
        Learning rate η for the mean loss, below 2 / (λ_max + μ).
    mu
        Strength μ of the proximal term, in units of the mean loss. 0 is `FedAvg`.
    steps, batch_size, weights, tolerance
        As in `FedAvg`.

    Returns
    -------
    Algorithm
        Its fit has a point estimate (``fit.estimate``) and no posterior.

    Notes
    -----
    *When this fails.* μ makes the clients' drift smaller, not zero: with T > 1 and clients that differ, the fixed point
    still is not the posterior's mode (`SCAFFOLD`'s is), and a large μ is slow.

    References
    ----------
    .. [1] Li et al. (2020), Federated optimization in heterogeneous networks, eq. 2 and Algorithm 2.
    """
    mu = between("mu", mu, 0, np.inf, "[)", "0 is FedAvg")
    descent = checked(learning_rate, steps, batch_size)
    if descent.learning_rate * mu >= 2:
        raise DeclarationError(f"learning_rate={learning_rate} times mu={mu} must be below 2, or steps diverge.")
    weights = weights_rule(weights)
    return Algorithm[fedavg.AverageState, LocalClientState](
        name="FedProx",
        settings=described(descent, mu=mu, weights=weights, tolerance=tolerance),
        init=fedavg.init,
        broadcast=fedavg.broadcast,
        update_client=functools.partial(_update_client, descent=descent, weights=weights, mu=mu),
        update_server=functools.partial(fedavg.update_server, tolerance=tolerance_rule(tolerance)),
        replies=fedavg.REPLIES,
        result=Result(fedavg.final_message, fedavg.draw, fedavg.POINT),
        needs=Needs(functools.partial(check_batches, batch_size=descent.batch_size)),
        disclosure=fedavg.AT_PHI,
    )


def _update_client(
    client: ClientView, personal: KeptLocal, message: Message, rng: Rng, *, descent: Descent, weights: str, mu: float
) -> ClientUpdate[LocalClientState]:
    """T steps from φ on the client's own loss and the proximal term."""
    phi = np.asarray(message["phi"], dtype=float)
    held = pulled(client_loss(client, float(message["prior_share"])), mu, phi)
    local, reply, info = fedavg.stepped(client, personal and personal.local, phi, held, rng, descent, weights)
    return ClientUpdate(LocalClientState(local), reply, info)
