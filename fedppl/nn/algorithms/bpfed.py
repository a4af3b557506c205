"""BPFed: posteriors of all weights, those below averaged, with the last round's posterior as the next one's prior."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl.algorithms.averaging._point import weight_of, weights_rule
from fedppl.algorithms.hierarchical.confidence import spread_rule
from fedppl.contracts import Algorithm
from fedppl.local.target import at_points
from fedppl.nn.algorithms import _posteriors
from fedppl.nn.algorithms._common import (
    Own,
    Training,
    check_network,
    described,
    drawn_from,
    steps_rule,
    training_rule,
    unused_priors,
)
from fedppl.types import Array, DeclarationError, Message

__all__ = ["BPFed", "LocalPosterior"]


class LocalPosterior(NamedTuple):
    """What a client keeps to itself: q_k of its local weights."""

    mean: Array  # (d_k,)
    sd: Array  # (d_k,)


class _Settings(NamedTuple):
    training: Training
    zeta: float
    draws: int
    spread: float
    weights: str


def BPFed(
    *,
    zeta: float = 1.0,
    spread: float = 0.05,
    learning_rate: float = 1e-3,
    epochs: int = 5,
    batch_size: int = 50,
    draws: int = 1,
    weights: str = "rows",
) -> Algorithm:
    r"""Bayesian networks whose shared and local weights both have posteriors, learnt continually.

    .. math:: q_k = \arg\min_q \, -E_q \log p(y_k \mid w) + \zeta\, \mathrm{KL}(q \,\|\, p_k), \qquad
              p_k = q^{\text{server}}_{\text{shared}} \, q^{\text{last round}}_{k, \text{local}}

    All posteriors are normal with independent weights. Means and sds of the shared weights are averaged; what
    the declaration does not share stays at the client, and its posterior is its prior in the next round.

    Parameters
    ----------
    zeta
        ζ, what holds q_k near p_k.
    spread
        Standard deviation of all weights at the start.
    learning_rate, epochs, batch_size
        Of Adam, per unit of the loss over n_k.
    draws
        Of the weights for each step.
    weights
        "rows" or "equal".

    Returns
    -------
    Algorithm
        Its fit has a point estimate, the shared means; `fedppl.nn.predict` gives predictions by q_k.

    Raises
    ------
    DeclarationError
        For settings out of range.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.BPFed().name
    'BPFed'

    Notes
    -----
    *When this fails.* A posterior that becomes the prior of the same rows counts them again in every round: sds fall
    with the number of rounds, and say how long the fit ran as well as what the rows tell.

    References
    ----------
    .. [1] Chen, Liu, Cao and Zhang (2023), Bayesian personalized federated learning with shared and personalized
       uncertainty representations.
    """
    if isinstance(zeta, bool) or not isinstance(zeta, int | float | np.number) or not 0 < zeta < np.inf:
        raise DeclarationError(f"zeta={zeta!r} must be positive and finite.")
    training = training_rule(learning_rate, epochs, batch_size)
    count = steps_rule(1.0, 1, draws)[2]
    settings = _Settings(training, float(zeta), count, spread_rule(spread), weights_rule(weights))
    return Algorithm(
        name="BPFed",
        check=lambda client: check_network(client, "BPFed", "shared"),
        init_server=functools.partial(_posteriors.init_server, spread=settings.spread),
        broadcast=_posteriors.broadcast,
        update_client=functools.partial(_update_client, settings=settings),
        reply_shapes=_posteriors.reply_shapes,
        refuse=_posteriors.refuse,
        update_server=_posteriors.average,
        outcome=_posteriors.broadcast,
        draw=drawn_from(functools.partial(_own, settings=settings)),
        personalise=functools.partial(_own, settings=settings),
        details=lambda state: {"sd": (("rows",), state.sd)},
        estimate=lambda state: state.mean,
        stay=functools.partial(_stay, settings=settings),
        settings=described(settings._asdict()),
        large=True,
        asks=functools.partial(at_points, name="mean"),
        unused=unused_priors,
    )


def _posterior(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, settings: _Settings
) -> tuple[Array, Array]:
    """Mean and sd of q_k over all weights, in torch's order."""
    network = client.network
    unit = network.unit
    known = personal is not None and len(personal.mean) == client.local_size
    own = personal if known else LocalPosterior(network.start, np.full(client.local_size, settings.spread))
    mean, sd = (
        unit.weights(np.asarray(message[name], dtype=float), part)
        for name, part in zip(("mean", "sd"), own, strict=True)
    )
    q, _ = network.bayes_steps(mean, sd, settings.training, settings.zeta, settings.draws, rng, follow=False)
    return q[0], q[1]


def _kept(client: Any, mean: Array, sd: Array) -> LocalPosterior:
    return LocalPosterior(*(values[client.network.unit.local_at] for values in (mean, sd)))


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings
) -> tuple[LocalPosterior, Message, Mapping[str, float]]:
    """q_k; its shared part travels."""
    mean, sd = _posterior(client, personal, message, rng, settings)
    weight, shared = weight_of(client, settings.weights), client.network.unit.shared_at
    reply = _posteriors.reply(mean[shared], sd[shared], weight)
    blank = {"blank": 1.0} if personal is None and client.local_size else {}
    return _kept(client, mean, sd), reply, blank


def _stay(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings
) -> tuple[LocalPosterior, Mapping[str, float]]:
    """q_k of the local weights around this round's shared ones."""
    return _kept(client, *_posterior(client, personal, message, rng, settings)), {}


def _own(client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings) -> Own:
    """q_k after one more round for the client alone."""
    mean, sd = _posterior(client, personal, message, rng, settings)
    return Own(client, mean, client.network.independent(mean, np.arange(len(mean)), sd**2))
