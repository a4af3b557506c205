"""Averages of networks: FedAvg with its variants, and SCAFFOLD."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.algorithms.averaging.fedavg import (
    LocalClientState,
    average,
    kept_local,
    not_counted,
    weight_of,
    weighted,
    weights_rule,
)
from fedppl.algorithms.averaging.scaffold import Controls, correction, ends_of, entered, no_controls
from fedppl.contracts import Algorithm, ClientUpdate, ClientView, Part, Point, Received, Replies, Report
from fedppl.nn.algorithms import _common
from fedppl.nn.batch import train_each
from fedppl.nn.functional import Places
from fedppl.nn.train import Training, train
from fedppl.nn.unit import NetworkUnit, Pair
from fedppl.nn.view import Own, network_of
from fedppl.settings import between, described, shown
from fedppl.types import Array, DeclarationError, Layout, Message, Rng


class AveragedState(NamedTuple):
    """What the next round needs."""

    phi: Array  # (m,)
    smooth: _common.OverRounds


_Parts = Sequence[Part[LocalClientState]]
_Updates = list[ClientUpdate[LocalClientState] | None]


class _Settings(NamedTuple):
    phases: tuple[tuple[str | tuple[str, ...], Training], ...]
    proximal: float
    tuning: _common.Tuning
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
    learning_rate, momentum, batch_size
        Learning rate for the mean loss of a batch, momentum of gradient steps (None for Adam), and rows a step.
    proximal
        μ of FedProx, which adds μ/2 ‖φ' − φ‖² to a client's mean loss, φ being what the server sent.
    phases
        Weights to train with their numbers of epochs, in order: "shared", "local", "all" or torch's names.
    weights
        "rows" (n_k) or "equal".
    smoothing
        Weight, from 0 to below 1, of earlier rounds in the estimate, an average over rounds from which no round starts.
        Where few of many clients report it steadies the global model (docs/pfedvem.md).
    tune, tune_rate, tune_epochs
        Weights that a client fine-tunes on its own rows when the rounds are over, "local", "all", torch's names or
        None, with learning rate and epochs of steps of the same kind.

    Returns
    -------
    Algorithm
        Its fit has a point estimate. `fedppl.nn.predict` gives a client's predictions.

    Notes
    -----
    *When this fails.* There is no rule for convergence: a fit runs for as many rounds as it is given and says
    "max_rounds". The prior of the weights is not part of the loss, as in the methods of the table.

    References
    ----------
    .. [1] McMahan et al. (2017), FedAvg. Oh et al. (2022), FedBABU. Arivazhagan et al. (2019), FedPer. Collins et al.
       (2021), FedRep. Liang et al. (2020), LG-FedAvg.
    """
    settings = _Settings(
        tuple(
            (which, _common.training_rule(learning_rate, epochs, batch_size, momentum=momentum))
            for which, epochs in _phases_rule(phases)
        ),
        between("proximal", proximal, 0, np.inf, "[)"),
        _common.tuning_rule(tune, tune_rate, tune_epochs, batch_size, momentum=momentum),
        weights_rule(weights),
        between("smoothing", smoothing, 0, 1, "[)"),
    )
    batch = _common.batch_of(
        functools.partial(_updates, settings=settings), functools.partial(_updates_unreported, settings=settings)
    )
    return Algorithm[AveragedState, LocalClientState](
        name="nn.FedAvg",
        settings=described({"learning_rate": learning_rate, "batch_size": batch_size}, **settings._asdict()),
        init=_init,
        broadcast=_common.broadcast,
        update_client=batch.update_client,
        update_server=functools.partial(_update_server, smoothing=settings.smoothing),
        replies=_common.REPLIES,
        result=_common.network_result(
            lambda state, client_id: {"mean": state.smooth.phi},
            functools.partial(_common.tuned, tuning=settings.tuning),
            Point[AveragedState](lambda state: state.smooth.phi),
        ),
        needs=_common.needs(functools.partial(_check, settings=settings)),
        disclosure=_common.AT_MEAN,
        unreported=batch.unreported,
        batch=batch,
    )


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng) -> AveragedState:
    phi = gaussian.mean(layout.prior)
    return AveragedState(phi, _common.OverRounds(phi, 0.0))


def _update_server(state: AveragedState, received: Received, *, smoothing: float) -> tuple[AveragedState, Report]:
    if not received.clients:
        return state, Report(_common.NetworkInfo(np.nan))
    phi = average(received.total)
    return AveragedState(phi, _common.with_round(state.smooth, phi, smoothing)), _common.reported(state.phi, phi)


def _check(client: ClientView, *, settings: _Settings) -> None:
    trained = [which for which, _ in settings.phases]
    _common.check_network(client, "nn.FedAvg", *trained, settings.tuning.which)
    _common.check_unknowns(client, *trained)


def _phases_rule(phases: Any) -> list[tuple[str | tuple[str, ...], int]]:
    """Check the keyword `phases` but for the epochs, which are a rule of training."""
    refusal = (
        f'phases={shown(phases)} must be pairs of weights ("shared", "local", "all" or a tuple of torch\'s names, '
        'each once) and epochs, for example (("all", 10),).'
    )
    pairs = phases if isinstance(phases, tuple | list) else ()
    if not pairs or not all(isinstance(phase, tuple | list) and len(phase) == 2 for phase in pairs):
        raise DeclarationError(refusal)
    return [
        (names if isinstance(names, str) else _common.names_rule(names, refusal), epochs) for names, epochs in pairs
    ]


def _updates(parts: _Parts, *, settings: _Settings) -> _Updates:
    """Train by phases at clients with one network, from φ and their own local weights."""
    units = [part.client.view(network_of) for part in parts]
    starts = [kept_local(part.client, part.personal and part.personal.local) for part in parts]
    means = [np.asarray(part.message["mean"]) for part in parts]
    W = np.stack([unit.weights(phi, local) for unit, phi, (local, _) in zip(units, means, starts, strict=True)])
    rngs, trained, priors = [part.rng for part in parts], np.ones(len(parts), dtype=bool), None
    for which, training in settings.phases:
        free = units[0].places(which)
        if settings.proximal:
            priors = [_pull(unit, free, phi, settings.proximal) for unit, phi in zip(units, means, strict=True)]
        W, succeeded = train_each(units, W, free, training, rngs, priors)
        trained &= succeeded
    updates: _Updates = [None] * len(parts)
    for k in np.flatnonzero(trained).tolist():
        kept, weight = LocalClientState(W[k, units[k].local_at]), weight_of(parts[k].client, settings.weights)
        updates[k] = ClientUpdate(kept, weighted(W[k, units[k].shared_at], weight), starts[k][1])
    return updates


def _pull(unit: NetworkUnit, free: Places, phi: Array, proximal: float) -> Pair:
    """Means and precisions of the proximal term, for the shared weights among `free`."""
    precision = proximal * len(unit.X)  # the prior counts once for all rows
    return unit.weights(phi, 0.0)[free], unit.weights(precision, 0.0)[free]


def _updates_unreported(parts: _Parts, *, settings: _Settings) -> _Updates:
    """Train local weights, if there are any, without the last phases that train shared ones alone."""
    if not parts[0].client.local_size:
        return [ClientUpdate(part.personal, {}) for part in parts]
    unit = parts[0].client.view(network_of)
    local = [bool(np.isin(unit.places(which), unit.local_at).any()) for which, _ in settings.phases]
    phases = settings.phases[: len(local) - local[::-1].index(True)] if any(local) else ()
    updates = _updates(parts, settings=settings._replace(phases=phases))
    return [None if update is None else update._replace(reply={}) for update in updates]


# SCAFFOLD: gradient steps corrected for the clients' drift, control variates in the server's ledger -------------------


class ScaffoldState(NamedTuple):
    """What the next round needs."""

    phi: Array  # (m,)
    where: Mapping[str, int]  # client id to its row
    controls: Controls


def SCAFFOLD(
    *, learning_rate: float = 1e-2, epochs: int = 5, batch_size: int = 50, weights: str = "rows"
) -> Algorithm[ScaffoldState, None]:
    r"""Stochastic controlled averaging of whole networks, by plain gradient steps.

    .. math:: w_k \leftarrow w_k - \eta (\nabla f_k(w_k) + c - c_k) \text{, T times from } \phi, \qquad
              c_k \leftarrow c_k - c + \frac{\phi - w_k}{T \eta}, \qquad c = \frac{\sum_k n_k c_k}{\sum_k n_k}

    The server computes c_k from the client's last weights, so that c is the mean of the c_k even if replies are lost.

    Parameters
    ----------
    learning_rate, epochs, batch_size, weights
        As in `FedAvg`, with passes over the rows; steps have no momentum, since c_k is a mean gradient only then.

    Returns
    -------
    Algorithm
        Its fit has a point estimate.

    Notes
    -----
    The server holds a vector of all weights for each client. c is the mean over the clients that have replied, and a
    client that has not takes plain steps: as published all c_k start at 0, c is the mean over all of them, and a first
    reply is corrected by c.

    *When this fails.* Where few clients report, control variates are out of date, and corrections by them do harm.

    References
    ----------
    .. [1] Karimireddy et al. (2020), SCAFFOLD, option II.
    """
    training = _common.training_rule(learning_rate, epochs, batch_size, momentum=0.0)
    rule = weights_rule(weights)
    return Algorithm[ScaffoldState, None](
        name="nn.SCAFFOLD",
        settings=described(training, weights=weights),
        init=_scaffold_init,
        broadcast=lambda state, client_id: {
            "mean": state.phi,
            "correction": correction(state.controls, state.where[client_id]),
        },
        update_client=functools.partial(_scaffold_update_client, training=training, weights=rule),
        update_server=functools.partial(_scaffold_update_server, rate=training.learning_rate),
        replies=Replies(
            lambda state: {"phi": state.phi.shape, "weight": (), "steps": ()},
            lambda state, reply: (
                not_counted(reply, "weight", "steps") or _common.run_away("phi", np.asarray(reply["phi"]), state.phi)
            ),
        ),
        result=_common.network_result(
            _common.broadcast,
            lambda client, personal, message, rng: Own(client, client.view(network_of).weights(message["mean"]), None),
            _common.ESTIMATE,
        ),
        needs=_common.whole_network("nn.SCAFFOLD"),
    )


def _scaffold_init(layout: Layout, clients: tuple[str, ...], rng: Rng) -> ScaffoldState:
    where = {client_id: k for k, client_id in enumerate(clients)}
    return ScaffoldState(gaussian.mean(layout.prior), where, no_controls(len(clients), layout.size))


def _scaffold_update_client(
    client: ClientView, personal: None, message: Message, rng: Rng, *, training: Training, weights: str
) -> ClientUpdate[None]:
    unit = client.view(network_of)
    added = unit.weights(message["correction"])
    w = train(unit, unit.weights(message["mean"]), np.arange(unit.size), training, rng, linear=added)
    steps = training.epochs * -(-len(unit.X) // training.batch_size)
    weight = np.array(weight_of(client, weights))
    return ClientUpdate(None, {"phi": w[unit.shared_at], "weight": weight, "steps": np.array(float(steps))})


def _scaffold_update_server(state: ScaffoldState, received: Received, *, rate: float) -> tuple[ScaffoldState, Report]:
    """Average the clients' last weights, and enter their mean gradients into the ledger."""
    if not received.clients:
        return state, Report(_common.NetworkInfo(np.nan))
    ends = ends_of(received, state.where)
    steps = np.array([float(received.each[client_id]["steps"]) for client_id in sorted(received.each)])
    controls = entered(state.controls, ends, state.phi, steps * rate)
    phi = ends.weights @ ends.phi / ends.weights.sum()
    return state._replace(phi=phi, controls=controls), _common.reported(state.phi, phi)
