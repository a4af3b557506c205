"""How a client makes the network its own when the rounds are over, and draws of what it then has."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.random import Generator

from fedppl.algorithms.averaging.server import KeptLocal, fitting_local
from fedppl.contracts import ClientView, Details, Draws, Point, Result
from fedppl.contracts.algorithm import HeldOutFn
from fedppl.nn.algorithms._common import Tuning
from fedppl.nn.personal import further_gain, log_densities
from fedppl.nn.subnet import inferred
from fedppl.nn.train import Training, train
from fedppl.nn.view import NetworkResult, Own, PersonaliseFn, network_of
from fedppl.types import Array, DeclarationError, Message

logger = logging.getLogger(__name__)
S = TypeVar("S")
P = TypeVar("P")
_MOST = 100_000_000  # numbers in one array of draws
_SHORT = 0.1  # nats a row that as many steps of fine-tuning again would still gain


def _nothing(state: Any) -> Details:
    return {}


def network_result(
    final_message: Callable[[S, str], Message],
    personalise: PersonaliseFn[P],
    shared: Point[S] | None = None,
    details: Callable[[S], Details] = _nothing,
    *,
    caution: str = "",
    held_out: HeldOutFn[P] | None = None,
) -> Result[S, P]:
    """How to read the server's state: draws at a client are of what `personalise` finds."""

    def draw(
        client: ClientView, personal: P | None, message: Message, draws: int, chains: int, rng: Generator
    ) -> Draws:
        """Draws of all weights: of the subnetwork's posterior, and equal elsewhere."""
        size, count = client.shared_size + client.local_size, draws * chains
        if count * size > _MOST:
            raise DeclarationError(
                f"{count} draws of {size} weights are {count * size * 8 / 1e9:.1f} GB. Pass draws= and "
                "chains= for fewer, or predict in closed form by fedppl.nn.predict(fit, client, inputs)."
            )
        found, unit = personalise(client, personal, message, rng), client.view(network_of).unit
        w = np.broadcast_to(found.weights, (count, size)).copy()
        if found.subnetwork is not None:
            w[:, found.subnetwork.places] += found.subnetwork.deviations(count, rng)
        shaped = w.reshape(chains, draws, size)
        info = {} if found.subnetwork is not None else {"point_estimate": 1.0}
        return Draws(shaped[:, :, unit.shared_at], shaped[:, :, unit.local_at], info)

    return Result(
        final_message, draw, shared, details, family=NetworkResult(personalise), caution=caution, held_out=held_out
    )


def held_out_linearised(personalise: PersonaliseFn[P]) -> HeldOutFn[P]:
    """Densities of held-out rows where the posterior is of the linearised network, as `fedppl.nn.predict` predicts."""

    def held_out(
        client: ClientView, held: ClientView, personal: P | None, message: Message, draws: int, rng: Generator
    ) -> Array:
        found = personalise(client, personal, message, rng)
        assert found.subnetwork is not None
        return log_densities(held.view(network_of).unit, found.subnetwork, draws, rng)

    return held_out


def tuning_message(mean: Array, tuning: Tuning) -> dict[str, Array]:
    """The shared weights, and how long to fine-tune."""
    rate, epochs, batch_size, momentum = tuning.training
    steps = [rate, epochs if tuning.which is not None else 0, batch_size, -1.0 if momentum is None else momentum]
    return {"mean": mean, "tuning": np.array(steps)}


def tuned(
    client: ClientView,
    personal: KeptLocal,
    message: Message,
    rng: Generator,
    *,
    which: str | tuple[str, ...] | None,
    rate: str = "tune_rate",
) -> Own:
    """One client's network: the shared weights, its own, fine-tuned by the setting named `rate`.

    A message with prior variances of the shared weights asks for the mode under those and the declared prior of local
    weights, and for a subnetwork's posterior; without them the loss alone counts.
    """
    network, local = client.view(network_of), fitting_local(client, personal and personal.local)
    unit = network.unit
    if local is None and not set(unit.local_at) <= set(network.places(which) if which is not None else ()):
        logger.warning(
            "client %s has no local weights of its own, and takes those that all clients start from; an algorithm with "
            'tune="local" fine-tunes them',
            client.client_id,
        )
    mean, variance = np.asarray(message["mean"], dtype=float), message.get("variance")
    w = unit.weights(mean, network.start if local is None else local)
    length, epochs, batch_size, momentum = (float(value) for value in message["tuning"])
    if which is not None and epochs:
        steps = Training(length, int(epochs), int(batch_size), None if momentum < 0 else momentum)
        free, prior, penalty = network.places(which), None, None
        if variance is not None:
            declared = unit.declared.local_prior
            centre = unit.weights(mean, declared.mean)
            precision = unit.weights(1.0 / np.asarray(variance), declared.precision)
            prior, penalty = (centre[free], precision[free]), declared.penalty if declared.others else None
        begun = w
        w = train(unit, w, free, steps, rng, prior=prior, penalty=penalty, rate=rate)
        # Priors that are not normal are no part of the gain.
        if penalty is None and (gain := further_gain(unit, begun, w, prior, free)) > _SHORT:
            logger.warning(
                "client %r: fine-tuning has not arrived: as many steps again would take about %.2g off the mean loss "
                "of a row; raise %s= or tune_epochs=, and judge on rows that were held out",
                client.client_id,
                gain,
                rate,
            )
    if variance is None:
        return Own(client, w, None)
    count, literal, diagonal = (int(value) for value in message["inference"])
    rule = "variance" if literal else "live"
    return Own(client, w, inferred(unit, w, np.asarray(variance), count, rule=rule, diagonal=bool(diagonal)))
