"""Averages of networks: which weights are trained in what order, and which travel, is data."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from fedppl import gaussian
from fedppl.algorithms.averaging.fedavg import LocalClientState, average, kept_local, weight_of, weighted, weights_rule
from fedppl.contracts import Algorithm, Batch, ClientUpdate, ClientView, Part, Point, Received, Replies, Report, always
from fedppl.nn.algorithms._common import (
    AT_MEAN,
    NetworkInfo,
    OverRounds,
    Tuning,
    check_network,
    check_unknowns,
    names_in,
    needs,
    network_result,
    reject_weighted,
    reported,
    training_rule,
    tuned,
    tuning_message,
    tuning_rule,
    with_round,
)
from fedppl.nn.batch import groups, stacked
from fedppl.nn.batch_train import train_together
from fedppl.nn.functional import Places
from fedppl.nn.train import Training, train
from fedppl.nn.unit import NetworkUnit
from fedppl.nn.view import network_of
from fedppl.settings import between, described, shown
from fedppl.types import Array, DeclarationError, Layout, Message


class AveragedState(NamedTuple):
    """What the next round needs."""

    phi: Array  # (m,)
    smooth: OverRounds


class _Settings(NamedTuple):
    phases: tuple[tuple[str | tuple[str, ...], Training], ...]
    proximal: float
    tuning: Tuning
    weights: str
    smoothing: float


def FedAvg(
    *,
    learning_rate: float = 1e-3,
    momentum: float | None = None,
    proximal: float = 0.0,
    phases: Sequence[tuple[str | tuple[str, ...], int]] = (("all", 10),),
    batch_size: int = 50,
    weights: str = "rows",
    smoothing: float = 0.0,
    tune: str | tuple[str, ...] | None = None,
    tune_rate: float = 1e-3,
    tune_epochs: int = 10,
) -> Algorithm[AveragedState, LocalClientState]:
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
        Learning rate for the mean loss of a batch.
    momentum
        Momentum of gradient steps; by default steps are Adam's.
    proximal
        μ of FedProx, which adds μ/2 ‖φ' − φ‖² to a client's mean loss, φ being what the server sent. It holds shared
        weights.
    phases
        Weights to train with their numbers of epochs, one after another: "shared", "local", "all" or torch's names.
    batch_size
        Rows a step.
    weights
        "rows" (n_k) or "equal".
    smoothing
        Weight, between 0 and 1, of earlier rounds in the estimate, an average over rounds; 1 − smoothing is that of
        the last. Rounds go on from what is not averaged. Where few of many clients report it steadies the global model,
        by 8 points of accuracy where one in ten reports (docs/pfedvem.md).
    tune
        Weights that a client fine-tunes when the rounds are over, on its own rows: "local", "all", torch's names, or
        None.
    tune_rate, tune_epochs
        Learning rate and epochs of the fine-tuning, in steps of the same kind.

    Returns
    -------
    Algorithm
        Its fit has a point estimate. `fedppl.nn.predict` gives a client's predictions.

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
    settings = _Settings(
        tuple(
            (which, training_rule(learning_rate, epochs, batch_size, momentum=momentum))
            for which, epochs in _phases_rule(phases)
        ),
        between("proximal", proximal, 0, np.inf, "[)"),
        tuning_rule(tune, tune_rate, tune_epochs, batch_size, momentum=momentum),
        weights_rule(weights),
        between("smoothing", smoothing, 0, 1, "[)"),
    )
    tuning = settings.tuning
    update_client = functools.partial(_update_client, settings=settings)
    unreported = functools.partial(_update_unreported, settings=settings)
    return Algorithm[AveragedState, LocalClientState](
        name="nn.FedAvg",
        settings=described({"learning_rate": learning_rate, "batch_size": batch_size}, **settings._asdict()),
        init=_init,
        broadcast=lambda state, client_id: {"mean": state.phi},
        update_client=update_client,
        update_server=functools.partial(_update_server, smoothing=settings.smoothing),
        replies=Replies[AveragedState](
            lambda state: {"weighted": state.phi.shape, "weight": ()},
            lambda state, reply: reject_weighted(state.phi, reply),
            always,
        ),
        result=network_result(
            lambda state, client_id: tuning_message(state.smooth.phi, tuning),
            functools.partial(tuned, which=tuning.which),
            Point[AveragedState](lambda state: state.smooth.phi),
        ),
        needs=needs(functools.partial(_check, settings=settings)),
        disclosure=AT_MEAN,
        unreported=unreported,
        batch=Batch(
            update_client,
            unreported,
            groups,
            functools.partial(_update_together, settings=settings),
            functools.partial(_update_unreported_together, settings=settings),
        ),
    )


def _init(layout: Layout, clients: tuple[str, ...], rng: Generator) -> AveragedState:
    """Start at the mean of the declared prior, which counts for nothing in the average."""
    phi = gaussian.mean(layout.prior)
    return AveragedState(phi, OverRounds(phi, 0.0))


def _update_server(state: AveragedState, received: Received, *, smoothing: float) -> tuple[AveragedState, Report]:
    """φ is the weighted average of the clients' that replied."""
    if not received.clients:
        return state, Report(NetworkInfo(np.nan))
    phi = average(received.total)
    return AveragedState(phi, with_round(state.smooth, phi, smoothing)), reported(state.phi, phi)


def _check(client: ClientView, *, settings: _Settings) -> None:
    trained = [which for which, _ in settings.phases]
    check_network(client, "nn.FedAvg", *trained, settings.tuning.which)
    check_unknowns(client, "nn.FedAvg", *trained)


def _phases_rule(phases: Any) -> list[tuple[str | tuple[str, ...], int]]:
    """Check the keyword `phases` but for the epochs, which are a rule of training."""
    pairs = phases if isinstance(phases, tuple | list) else ()
    if not pairs or not all(isinstance(phase, tuple | list) and len(phase) == 2 for phase in pairs):
        raise DeclarationError(f'phases={phases!r} must be pairs of weights and epochs, for example (("all", 10),).')
    found = []
    for which, epochs in pairs:
        names = which if isinstance(which, str) else names_in(which)
        if names is None:
            raise DeclarationError(
                f'phases={shown(phases)} trains {shown(which)}, which must be "shared", "local", "all" or a tuple of '
                "torch's names, each once."
            )
        found.append((names, epochs))
    return found


def _update_client(
    client: ClientView, personal: LocalClientState | None, message: Message, rng: Generator, *, settings: _Settings
) -> ClientUpdate[LocalClientState]:
    """Train in phases, and keep the local weights."""
    network, (local, info) = client.view(network_of), kept_local(client, personal and personal.local)
    unit, phi = network.unit, np.asarray(message["mean"])
    w = unit.weights(phi, local)
    for which, training in settings.phases:
        free = network.places(which)
        w = train(unit, w, free, training, rng, prior=_pull(unit, free, phi, settings.proximal))
    reply = weighted(w[unit.shared_at], weight_of(client, settings.weights))
    return ClientUpdate(LocalClientState(w[unit.local_at]), reply, info)


def _pull(unit: NetworkUnit, free: Places, phi: Array, proximal: float) -> tuple[Array, Array] | None:
    """Means and precisions that hold the shared weights among `free` where they were sent."""
    if not proximal:
        return None
    centre, precision = np.zeros(unit.size), np.zeros(unit.size)
    centre[unit.shared_at] = phi
    precision[unit.shared_at] = proximal * len(unit.X)  # the prior counts once for all rows
    return centre[free], precision[free]


def _update_unreported(
    client: ClientView, personal: LocalClientState | None, message: Message, rng: Generator, *, settings: _Settings
) -> tuple[LocalClientState | None, Mapping[str, float]]:
    """Train local weights, where there are any: nothing else outlives the round."""
    if not client.local_size:
        return personal, {}
    update = _update_client(client, personal, message, rng, settings=_kept_phases(client, settings))
    return update.personal, kept_local(client, personal and personal.local)[1]


def _kept_phases(client: ClientView, settings: _Settings) -> _Settings:
    """Without the last phases that train shared weights alone: a client that does not report keeps nothing of them."""
    network = client.view(network_of)
    local = [bool(np.isin(network.places(which), network.unit.local_at).any()) for which, _ in settings.phases]
    return settings._replace(phases=settings.phases[: len(local) - local[::-1].index(True)] if any(local) else ())


def _update_together(
    parts: Sequence[Part[LocalClientState]], *, settings: _Settings
) -> list[ClientUpdate[LocalClientState] | None]:
    """`_update_client` at clients with one network; None for those whose training fails."""
    networks = [part.client.view(network_of) for part in parts]
    kept = [kept_local(part.client, part.personal and part.personal.local) for part in parts]
    units, sent = [network.unit for network in networks], [np.asarray(part.message["mean"]) for part in parts]
    W = np.stack([unit.weights(phi, local) for unit, phi, (local, _) in zip(units, sent, kept, strict=True)])
    stack, rngs, well = stacked(units), [part.rng for part in parts], np.ones(len(parts), dtype=bool)
    for which, training in settings.phases:
        free = networks[0].places(which)
        pulls = [_pull(unit, free, phi, settings.proximal) for unit, phi in zip(units, sent, strict=True)]
        priors = [pull for pull in pulls if pull is not None]
        W, good = train_together(stack, W, free, training, rngs, priors=priors or None)
        well &= good
    return [
        ClientUpdate(
            LocalClientState(w[unit.local_at]),
            weighted(w[unit.shared_at], weight_of(part.client, settings.weights)),
            info,
        )
        if fine
        else None
        for part, unit, w, (_, info), fine in zip(parts, units, W, kept, well, strict=True)
    ]


def _update_unreported_together(
    parts: Sequence[Part[LocalClientState]], *, settings: _Settings
) -> list[ClientUpdate[LocalClientState] | None]:
    """`_update_unreported` at clients with one network."""
    if not parts[0].client.local_size:
        return [ClientUpdate(part.personal, {}) for part in parts]
    found = _update_together(parts, settings=_kept_phases(parts[0].client, settings))
    return [None if update is None else update._replace(reply={}) for update in found]
