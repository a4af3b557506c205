"""Averages of networks: which weights are trained in what order, and which travel, is data."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.algorithms.averaging._point import Kept, weight_of, weights_rule
from fedppl.contracts import Algorithm
from fedppl.local.target import at_points
from fedppl.nn.algorithms._common import (
    Training,
    Tuning,
    check_network,
    described,
    draw,
    outcome,
    own,
    training_rule,
    tuning_rule,
    unused_priors,
)
from fedppl.run.replies import sum_replies
from fedppl.types import Array, DeclarationError, Layout, Message, Status

__all__ = ["NetworkAveraging", "NetworkInfo", "NetworkState"]


class NetworkState(NamedTuple):
    """What the next round needs."""

    phi: Array  # (m,)
    status: str
    message: str


class NetworkInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # root mean square of Δφ


class _Settings(NamedTuple):
    phases: tuple[tuple[Any, Training], ...]
    proximal: float
    tuning: Tuning
    weights: str


def NetworkAveraging(
    *,
    learning_rate: float = 1e-3,
    momentum: float | None = None,
    proximal: float = 0.0,
    phases: Sequence[tuple[str | tuple[str, ...], int]] = (("all", 10),),
    batch_size: int = 50,
    weights: str = "rows",
    tune: str | tuple[str, ...] | None = None,
    tune_rate: float = 1e-3,
    tune_epochs: int = 10,
) -> Algorithm:
    r"""Average the shared weights of networks that clients train.

    .. math:: \phi \leftarrow \frac{\sum_k n_k \phi_k}{\sum_k n_k}

    What is shared stands in the declaration, what is trained and when in `phases`:

    ============  ====================  ============================================  ====================
    method        ``shared=``           ``phases=``                                   ``tune=``
    ============  ====================  ============================================  ====================
    FedAvg        all                   ``(("all", 10),)``                            None
    FedAvg-FT     all                   ``(("all", 10),)``                            the head's names
    FedBABU       representation        ``(("shared", 10),)``                         ``"local"``
    FedPer        representation        ``(("all", 10),)``                            None
    FedRep        representation        ``(("local", 10), ("shared", 1))``            None
    FedProx       all                   ``(("all", 10),)``, ``proximal=``              None
    LG-FedAvg     head                  ``(("all", 10),)``                            None
    ============  ====================  ============================================  ====================

    Local weights stay at the client between rounds. Shared ones start at the mean of the declared prior, local ones at
    PyMC's initial point: with `fedppl.nn.parameters` both are what the network held when it was declared.

    Parameters
    ----------
    learning_rate
        Per unit of the mean loss of a batch.
    momentum
        Of gradient steps; by default steps are Adam's.
    proximal
        μ of FedProx: adds μ/2 ‖φ' − φ‖² to a client's mean loss, φ being what the server sent. It holds shared weights.
    phases
        Which weights to train and for how many epochs, one after another: "shared", "local", "all" or torch's names.
    batch_size
        Rows a step.
    weights
        "rows" (n_k) or "equal".
    tune
        Weights that a client fine-tunes when the rounds are over, on its own rows: "local", "all", torch's names, or
        None.
    tune_rate, tune_epochs
        For that, in steps of the same kind.

    Returns
    -------
    Algorithm
        Its fit has a point estimate. `fedppl.nn.predict` gives a client's predictions.

    Raises
    ------
    DeclarationError
        For settings out of range, and before any round for a model that is no network's.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.NetworkAveraging(phases=(("shared", 10),), tune="local").name
    'NetworkAveraging'

    Notes
    -----
    *When this fails.* There is no rule for convergence: a fit runs for as many rounds as it is given and says
    "max_rounds". The prior of the weights is not part of the loss, as in the methods of the table: a line of the log
    says so at the start.

    References
    ----------
    .. [1] McMahan et al. (2017), FedAvg. Oh et al. (2022), FedBABU. Arivazhagan et al. (2019), FedPer. Collins et al.
       (2021), FedRep. Liang et al. (2020), LG-FedAvg.
    """
    if (
        not isinstance(phases, tuple | list)
        or not phases
        or not all(isinstance(phase, tuple | list) and len(phase) == 2 for phase in phases)
    ):
        raise DeclarationError(f'phases={phases!r} must be pairs of weights and epochs, for example (("all", 10),).')
    settings = _Settings(
        tuple(
            (
                which if isinstance(which, str) else tuple(which),
                training_rule(learning_rate, epochs, batch_size, momentum=momentum),
            )
            for which, epochs in phases
        ),
        proximal_rule(proximal),
        tuning_rule(tune, tune_rate, tune_epochs, batch_size, momentum),
        weights_rule(weights),
    )
    trained = [which for which, _ in settings.phases]
    return Algorithm(
        name="NetworkAveraging",
        check=lambda client: check_network(client, "NetworkAveraging", *trained, settings.tuning.which),
        init_server=_init_server,
        broadcast=lambda state, client_id: {"mean": state.phi},
        update_client=functools.partial(_update_client, settings=settings),
        reply_shapes=lambda state: {"weighted": state.phi.shape, "weight": ()},
        refuse=_refuse,
        update_server=_update_server,
        outcome=lambda state, client_id: outcome(state.phi, settings.tuning),
        draw=functools.partial(draw, which=settings.tuning.which),
        personalise=functools.partial(own, which=settings.tuning.which),
        details=lambda state: {},
        estimate=lambda state: state.phi,
        stay=functools.partial(_stay, settings=settings),
        settings=described({"learning_rate": learning_rate, "batch_size": batch_size, **settings._asdict()}),
        large=True,
        asks=functools.partial(at_points, name="mean"),
        unused=unused_priors,
    )


def _init_server(layout: Layout, clients: tuple[str, ...], rng: np.random.Generator) -> NetworkState:
    """Start at the mean of the declared prior."""
    del clients, rng
    return NetworkState(gaussian.mean(layout.prior), Status.RUNNING.value, "raise rounds=")


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings
) -> tuple[Kept, Message, Mapping[str, float]]:
    """Train in phases, and keep the local weights."""
    network = client.network
    blank = personal is None or len(personal.local) != client.local_size
    w = network.unit.weights(np.asarray(message["mean"]), network.start if blank else personal.local)
    for which, training in settings.phases:
        free = network.places(which)
        w = network.trained(w, free, training, rng, prior=_pull(client, free, message, settings.proximal))
    weight = weight_of(client, settings.weights)
    reply = {"weighted": weight * w[network.unit.shared_at], "weight": np.array(weight)}
    return Kept(w[network.unit.local_at]), reply, ({"blank": 1.0} if blank and client.local_size else {})


def proximal_rule(proximal: Any) -> float:
    """Check the keyword `proximal`."""
    number = isinstance(proximal, float | int | np.number) and not isinstance(proximal, bool)
    if not number or not 0 <= proximal < np.inf:
        raise DeclarationError(f"proximal={proximal!r} must be finite and not negative.")
    return float(proximal)


def _pull(client: Any, free: Array, message: Message, proximal: float) -> tuple[Array, Array] | None:
    """Means and precisions that hold the shared weights among `free` where they were sent."""
    if not proximal:
        return None
    unit = client.network.unit
    centre, precision = np.zeros(unit.size), np.zeros(unit.size)
    centre[unit.shared_at] = np.asarray(message["mean"])
    precision[unit.shared_at] = proximal * len(unit.X)  # the prior counts once for all rows
    return centre[free], precision[free]


def _stay(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings
) -> tuple[Any, Mapping[str, float]]:
    """Train local weights, where there are any: nothing else outlives the round."""
    if not client.local_size:
        return personal, {}
    kept, _, info = _update_client(client, personal, message, rng, settings=settings)
    return kept, info


def _refuse(state: NetworkState, reply: Message) -> str | None:
    """A weight must be positive."""
    del state
    weight = float(reply["weight"])
    return None if weight > 0 else f"'weight' is {weight:.3g}, and must be positive"


def _update_server(state: NetworkState, replies: Mapping[str, Message]) -> tuple[NetworkState, NetworkInfo]:
    """φ is the weighted average of the clients' that replied."""
    if not replies:
        return state, NetworkInfo(np.nan)
    total = sum_replies(replies)
    phi = total["weighted"] / total["weight"]
    change = float(np.sqrt(np.mean((phi - state.phi) ** 2)))
    message = f"weights moved by {change:.2g} (root mean square) in the last round; raise rounds="
    return state._replace(phi=phi, message=message), NetworkInfo(change)
