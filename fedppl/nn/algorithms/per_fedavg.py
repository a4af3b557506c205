"""Per-FedAvg: an average that is good after a client's own steps, not before them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedppl.algorithms.averaging._point import Kept, weight_of
from fedppl.contracts import Algorithm
from fedppl.nn.algorithms._common import Training, check_all_shared, described, training_rule
from fedppl.nn.algorithms.fedavg import NetworkAveraging
from fedppl.types import Message

__all__ = ["PerFedAvg"]


def PerFedAvg(
    *,
    learning_rate: float = 1e-2,
    inner_rate: float = 1e-2,
    epochs: int = 5,
    batch_size: int = 50,
    weights: str = "rows",
    tune_epochs: int = 1,
) -> Algorithm:
    r"""Personalised federated averaging, Hessian-free: descend the loss after one gradient step.

    .. math:: F_k(w) = f_k(w - \alpha \nabla f_k(w)), \qquad \phi \leftarrow \frac{\sum_k n_k w_k}{\sum_k n_k}

    Parameters
    ----------
    learning_rate
        β, of steps on F_k.
    inner_rate
        α, of the step inside, and of the steps that make the network a client's own in the end.
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

    Raises
    ------
    DeclarationError
        For settings out of range, and where some weights are not shared.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.PerFedAvg().name
    'PerFedAvg'

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
    inner = training_rule(inner_rate, 1, 1, "inner_").learning_rate
    averaging = NetworkAveraging(
        momentum=0.0, batch_size=batch_size, weights=weights, tune="all", tune_rate=inner, tune_epochs=tune_epochs
    )
    return averaging._replace(
        name="PerFedAvg",
        check=lambda client: check_all_shared(client, "PerFedAvg"),
        update_client=functools.partial(_update_client, training=training, inner=inner, weights=weights),
        stay=None,
        settings=described(
            {**training._asdict(), "inner_rate": inner, "weights": weights, "tune_epochs": int(tune_epochs)}
        ),
    )


def _update_client(
    client: Any,
    personal: Any,
    message: Message,
    rng: np.random.Generator,
    *,
    training: Training,
    inner: float,
    weights: str,
) -> tuple[Kept, Message, Mapping[str, float]]:
    """Steps on F_k from φ."""
    del personal
    network = client.network
    w = network.unit.weights(np.asarray(message["mean"], dtype=float), network.start)
    w = network.meta_steps(w, training, inner, rng)
    weight = weight_of(client, weights)
    return Kept(np.zeros(0)), {"weighted": weight * w[network.unit.shared_at], "weight": np.array(weight)}, {}
