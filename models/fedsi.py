"""FedSI (Chen et al.): a network in a PyMC model, and the methods of its comparison.

`classifier` and `regressor` are builders for `fedppl.FederatedModel`: share the weights of the representation, keep
the head's local. `fedppl.nn.FedSI` takes any other likelihood of the network's outputs too. `METHODS` is the comparison
of its paper, as far as it averages networks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pymc as pm

import fedppl

__all__ = [
    "EPOCHS",
    "METHODS",
    "Method",
    "classifier",
    "labels_of_clients",
    "regressor",
    "representation",
    "shared_names",
]


def classifier(X: Any, y: Any, *, net: Any, sigma: float | Mapping[str, float] = 1.0) -> pm.Model:
    """One client's labels by a network: y ~ Categorical(softmax(f(X; w))), w ~ N(start, σ²).

    Parameters
    ----------
    X
        Inputs, (n, ...).
    y
        Classes 0 to C − 1, (n,).
    net
        A ``torch.nn.Module`` from X to (n, C). What it holds is where all clients start: make it once.
    sigma
        Prior sd of the weights, or one by torch's names.

    Returns
    -------
    pm.Model
    """
    from fedppl import nn

    with pm.Model() as model:
        inputs, labels = pm.Data("X", X), pm.Data("y", y)
        logits = nn.module(net, nn.parameters(net, sigma=sigma), inputs)
        pm.Categorical("label", logit_p=logits, observed=labels)
    return model


def regressor(X: Any, y: Any, *, net: Any, noise_sd: float, sigma: float | Mapping[str, float] = 1.0) -> pm.Model:
    """One client's real outcomes by a network: y ~ N(f(X; w), noise_sd²), w ~ N(start, σ²); y is (n, C)."""
    from fedppl import nn

    if isinstance(noise_sd, bool) or not isinstance(noise_sd, int | float | np.number) or not 0 < noise_sd < np.inf:
        raise fedppl.DeclarationError(f"noise_sd={noise_sd!r} must be positive and finite.")
    if np.ndim(y) != 2:
        raise fedppl.DeclarationError(
            f"y has shape {np.shape(y)}; pass (n, C), a column for each output of the network."
        )
    with pm.Model() as model:
        inputs, outcomes = pm.Data("X", X), pm.Data("y", y)
        pm.Normal("outcome", nn.module(net, nn.parameters(net, sigma=sigma), inputs), noise_sd, observed=outcomes)
    return model


def representation(net: Any, head: int = 1) -> list[str]:
    """Names of all weights but those of the last `head` layers: what FedSI shares.

    Examples
    --------
    >>> import torch
    >>> representation(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)))
    ['0.weight', '0.bias']
    """
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in net.named_parameters()))
    last = set(owners[len(owners) - head :])
    return [name for name, _ in net.named_parameters() if name.rpartition(".")[0] not in last]


class Method(NamedTuple):
    """One row of FedSI's comparison: what travels, and the algorithm as a function of its learning rate."""

    shares: str  # "all", "representation" or "head"
    # Of a learning rate, the head's names, and the passes of a round over a client's rows.
    algorithm: Callable[[float, tuple[str, ...], int], fedppl.Algorithm]
    alone: bool = False  # every client by itself


EPOCHS = 10  # passes of a round over a client's rows, of all methods below


def _averaged(rate: float, *phases: tuple[str, int], tune: str | tuple[str, ...] | None = None) -> fedppl.Algorithm:
    return fedppl.nn.FedAvg(learning_rate=rate, phases=phases, tune=tune)


METHODS = {
    "Local": Method("all", lambda rate, head, epochs: _averaged(rate, ("all", epochs)), alone=True),
    "FedAvg": Method("all", lambda rate, head, epochs: _averaged(rate, ("all", epochs))),
    "FedAvg-FT": Method("all", lambda rate, head, epochs: _averaged(rate, ("all", epochs), tune=head)),
    "FedBABU": Method("representation", lambda rate, head, epochs: _averaged(rate, ("shared", epochs), tune="local")),
    "FedPer": Method("representation", lambda rate, head, epochs: _averaged(rate, ("all", epochs))),
    "FedRep": Method("representation", lambda rate, head, epochs: _averaged(rate, ("local", epochs), ("shared", 1))),
    "LG-FedAvg": Method("head", lambda rate, head, epochs: _averaged(rate, ("all", epochs))),
    "BPFed": Method(
        "representation", lambda rate, head, epochs: fedppl.nn.BPFed(learning_rate=rate, epochs=epochs, zeta=0.1)
    ),
    "FedPop": Method(
        "all", lambda rate, head, epochs: fedppl.nn.FedPop(head=head, learning_rate=rate, momentum=None, epochs=epochs)
    ),
    "pFedBayes": Method(
        "all", lambda rate, head, epochs: fedppl.nn.PFedBayes(learning_rate=rate, epochs=epochs, zeta=10.0)
    ),
    "FedSI-Fac": Method(
        "representation", lambda rate, head, epochs: fedppl.nn.FedSI(learning_rate=rate, epochs=epochs, diagonal=True)
    ),
    "FedSI": Method("representation", lambda rate, head, epochs: fedppl.nn.FedSI(learning_rate=rate, epochs=epochs)),
}


def shared_names(net: Any, shares: str) -> list[str]:
    """Names of "all" weights, of the "representation", or of the "head"."""
    names = [name for name, _ in net.named_parameters()]
    body = representation(net)
    return {"all": names, "representation": body, "head": [name for name in names if name not in body]}[shares]


def labels_of_clients(clients: int, labels: int, each: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `each` labels for every client, so that all labels are held by equally many clients, (clients, each).

    Examples
    --------
    >>> held = labels_of_clients(10, 10, 5, np.random.default_rng(0))
    >>> np.bincount(held.ravel()).tolist()
    [5, 5, 5, 5, 5, 5, 5, 5, 5, 5]
    """
    if clients * each % labels:
        raise ValueError(f"{clients} clients of {each} labels do not hold {labels} labels equally often.")
    held = (np.arange(clients)[:, None] * each + np.arange(each)) % labels
    for _ in range(20 * clients):  # clients exchange labels that the other does not have
        a, b = rng.choice(clients, 2, replace=False) if clients > 1 else (0, 0)
        i, j = rng.integers(each, size=2)
        if held[a, i] not in held[b] and held[b, j] not in held[a]:
            held[a, i], held[b, j] = held[b, j], held[a, i]
    relabelled = rng.permutation(labels)[held]
    return np.asarray(np.sort(relabelled, axis=1))
