"""Federated averaging: clients take gradient steps from the shared parameters, the server averages where they end."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl import contracts, gaussian
from fedppl.algorithms.averaging.fedavg import (
    KeptLocal,
    LocalClientState,
    average,
    client_loss,
    draw_point,
    fitting_local,
    kept_local,
    negative,
    not_counted,
    relative_change,
    tolerance_rule,
    weight_of,
    weighted,
    weights_rule,
)
from fedppl.contracts import ClientUpdate, ClientView, Draws, Received, Report
from fedppl.local.gradient_steps import Descent, Objective, check_batches, checked, descend
from fedppl.local.target import at_points
from fedppl.settings import described
from fedppl.types import Array, Layout, Message, Rng, Status


class AverageState(NamedTuple):
    """What the next round needs."""

    phi: Array  # (m,)
    prior_share: float  # of log p(φ) in each client's loss, 1 / K


class AverageInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # largest |Δφ| / (1 + |φ|)
    local_change: float  # the same of clients' local variables, averaged over clients


def FedAvg(
    *,
    learning_rate: float,
    steps: int = 20,
    batch_size: int | None = None,
    weights: str = "rows",
    tolerance: float = 1e-6,
) -> contracts.Algorithm[AverageState, LocalClientState]:
    r"""Federated averaging of local gradient steps.

    .. math:: \phi_k = \phi \text{ after } T \text{ steps } \phi \leftarrow \phi - \eta \nabla F_k(\phi), \qquad
              \phi \leftarrow \frac{\sum_k n_k \phi_k}{\sum_k n_k}, \qquad
              F_k = -\frac{\log p(y_k \mid \phi) + \frac1K \log p(\phi)}{n_k}

    Averaged with weights n_k, the F_k are the log posterior per row: with one full-gradient step (``steps=1``) this is
    gradient descent on it, and its fixed point the posterior's mode. Local variables take their steps along with φ,
    and stay at the client.

    Parameters
    ----------
    learning_rate
        Learning rate η for the *mean* loss over a client's rows, below 2 / λ_max of its curvature. Choose it by
        `fedppl.validation_loss`.
    steps
        Number T of local gradient steps a round.
    batch_size
        Number of rows a step; None for all of them. Batches come from shuffled data, without replacement in an epoch;
        the log density has to be a sum over rows.
    weights
        Clients' weights in the average: "rows" (n_k) or "equal".
    tolerance
        Bound on the change of a coordinate in a round, relative to ``1 + |φ|``, below which a fit has converged. The
        clients' local variables, on average over clients, are held to it too: φ may stand still while they still move.

    Returns
    -------
    Algorithm
        Its fit has a point estimate (``fit.estimate``) and no posterior.

    Notes
    -----
    *When this fails.* With T > 1 and clients that differ, the fixed point is not the posterior's mode: clients drift
    to their own modes between averages. A learning rate above 2 / λ_max diverges, and the client says so. The clients
    differ in truth: one φ for all is then wrong for each of them; see `EP` and `HM1`.

    References
    ----------
    .. [1] McMahan et al. (2017), Communication-efficient learning of deep networks from decentralized data.
    .. [2] FedLin, section 6.2.
    """
    descent = checked(learning_rate, steps, batch_size)
    return contracts.Algorithm[AverageState, LocalClientState](
        name="FedAvg",
        settings=described(descent, weights=weights, tolerance=tolerance),
        init=init,
        broadcast=broadcast,
        update_client=functools.partial(_update_client, descent=descent, weights=weights_rule(weights)),
        update_server=functools.partial(update_server, tolerance=tolerance_rule(tolerance)),
        replies=REPLIES,
        result=contracts.Result(final_message, draw, POINT),
        needs=contracts.Needs(functools.partial(check_batches, batch_size=descent.batch_size)),
        disclosure=AT_PHI,
    )


def init(layout: Layout, clients: tuple[str, ...], rng: Rng) -> AverageState:
    """Start at the mean of the prior."""
    return AverageState(gaussian.mean(layout.prior), 1.0 / len(clients))


def broadcast(state: AverageState, client_id: str) -> Message:
    """φ, and the client's share of its prior."""
    return {"phi": state.phi, "prior_share": np.array(state.prior_share)}


def _update_client(
    client: ClientView, personal: KeptLocal, message: Message, rng: Rng, *, descent: Descent, weights: str
) -> ClientUpdate[LocalClientState]:
    """T steps from φ on the client's own loss."""
    phi, objective = np.asarray(message["phi"], dtype=float), client_loss(client, float(message["prior_share"]))
    local, reply, info = stepped(client, personal and personal.local, phi, objective, rng, descent, weights)
    return ClientUpdate(LocalClientState(local), reply, info)


def stepped(
    client: ClientView, local: Array | None, phi: Array, objective: Objective, rng: Rng, descent: Descent, weights: str
) -> tuple[Array, Message, Mapping[str, float]]:
    """Local variables after T steps from φ, a reply that is ready to be added up, and diagnostics."""
    local, info = kept_local(client, local)
    x = descend(client, np.concatenate([phi, local]), objective, descent, rng)
    weight = weight_of(client, weights)
    moved = np.array(weight * relative_change(local, x[len(phi) :]))
    reply = {**weighted(x[: len(phi)], weight), "local_change": moved}
    return x[len(phi) :], reply, info


def reject(state: Any, reply: Message) -> str | None:
    """A weight must be a number of rows, and a distance not negative."""
    return not_counted(reply, "weight") or negative(reply, "local_change")


def update_server(state: AverageState, received: Received, *, tolerance: float) -> tuple[AverageState, Report]:
    """φ is the weighted average of where the clients that replied ended."""
    if not received.clients:
        return state, Report(AverageInfo(np.nan, np.nan))
    total, phi = received.total, average(received.total)
    change, local_change = relative_change(state.phi, phi), float(total["local_change"] / total["weight"])
    done = change < tolerance and local_change < tolerance
    moved = f"φ moved by {change:.2g}, local variables by {local_change:.2g} in the last round"
    message = "" if done else f"{moved}; raise rounds=, or change learning_rate="
    status = Status.CONVERGED if done else Status.RUNNING
    return state._replace(phi=phi), Report(AverageInfo(change, local_change), status, message)


def final_message(state: AverageState, client_id: str) -> Message:
    """φ."""
    return {"phi": state.phi}


def draw(client: ClientView, personal: KeptLocal, message: Message, draws: int, chains: int, rng: Rng) -> Draws:
    """The client's point: φ, and its own local parameters."""
    phi = np.asarray(message["phi"], dtype=float)
    return draw_point(client, phi, fitting_local(client, personal and personal.local), draws, chains)


# What FedAvg and its variants have in common beside the functions above.
REPLIES = contracts.Replies[AverageState](
    lambda state: {"weighted": state.phi.shape, "weight": (), "local_change": ()}, reject, contracts.always
)
POINT = contracts.Point[AverageState](lambda state: state.phi)
AT_PHI = contracts.Disclosure(functools.partial(at_points, name="phi"))
