"""Per-FedAvg: an average that is good after a client's own steps, not before them."""

from __future__ import annotations

import functools

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
    tuned,
    tuning_message,
    tuning_rule,
    update_server,
    whole_network,
)
from fedppl.nn.personal import meta_steps
from fedppl.nn.train import Training
from fedppl.nn.view import network_of
from fedppl.settings import described, positive
from fedppl.types import Message


def PerFedAvg(
    *,
    learning_rate: float = 1e-2,
    inner_rate: float = 1e-2,
    epochs: int = 5,
    batch_size: int = 50,
    weights: str = "rows",
    tune_epochs: int = 1,
) -> Algorithm[NetworkState, None]:
    r"""Personalised federated averaging, Hessian-free: descend the loss after one gradient step.

    .. math:: F_k(w) = f_k(w - \alpha \nabla f_k(w)), \qquad \phi \leftarrow \frac{\sum_k n_k w_k}{\sum_k n_k}

    Parameters
    ----------
    learning_rate
        β, learning rate of steps on F_k.
    inner_rate
        α, learning rate of the step inside, and of the steps that make the network a client's own in the end.
    epochs, batch_size
        Passes over the rows; each step takes three batches.
    weights
        "rows" or "equal".
    tune_epochs
        Passes of gradient steps that a client takes in the end.

    Returns
    -------
    Algorithm
        Its fit has a point estimate, where clients start from; `fedppl.nn.predict` takes their steps.

    Notes
    -----
    Five gradients a step: dearer than averaging by that much. With ``inner_rate`` near 0 it is federated averaging by
    plain gradient steps.

    *When this fails.* The Hessian's product is a difference of gradients in float32, which is rough where the loss is
    flat.

    References
    ----------
    .. [1] Fallah et al. (2020), Personalized federated learning with theoretical guarantees, Per-FedAvg (HF).
    """
    training = training_rule(learning_rate, epochs, batch_size, momentum=0.0)
    inner, rule = positive("inner_rate", inner_rate), weights_rule(weights)
    tuning = tuning_rule("all", inner, tune_epochs, batch_size, momentum=0.0)
    return Algorithm[NetworkState, None](
        name="nn.PerFedAvg",
        settings=described(training, inner_rate=inner, weights=weights, tune_epochs=tuning.training.epochs),
        init=init,
        broadcast=broadcast,
        update_client=functools.partial(_update_client, training=training, inner=inner, weights=rule),
        update_server=update_server,
        replies=REPLIES,
        result=network_result(
            lambda state, client_id: tuning_message(state.phi, tuning),
            functools.partial(tuned, which="all", rate="inner_rate"),
            ESTIMATE,
        ),
        needs=whole_network("nn.PerFedAvg"),
        disclosure=AT_MEAN,
    )


def _update_client(
    client: ClientView,
    personal: None,
    message: Message,
    rng: Generator,
    *,
    training: Training,
    inner: float,
    weights: str,
) -> ClientUpdate[None]:
    """Steps on F_k from φ."""
    network = client.view(network_of)
    w = meta_steps(network.unit, network.at(message["mean"]), training, inner, rng)
    return ClientUpdate(None, weighted(w[network.unit.shared_at], weight_of(client, weights)))
