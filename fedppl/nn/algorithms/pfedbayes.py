"""pFedBayes: every client's posterior of all weights, held near a global one that is averaged."""

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
    check_all_shared,
    described,
    drawn_from,
    steps_rule,
    training_rule,
    unused_priors,
)
from fedppl.types import Array, DeclarationError, Message

__all__ = ["PFedBayes", "Posterior"]


class Posterior(NamedTuple):
    """What a client keeps to itself: q_k."""

    mean: Array  # (m,)
    sd: Array  # (m,)


class _Settings(NamedTuple):
    training: Training
    zeta: float
    draws: int
    spread: float
    weights: str


def PFedBayes(
    *,
    zeta: float = 10.0,
    spread: float = 0.01,
    learning_rate: float = 1e-3,
    epochs: int = 5,
    batch_size: int = 50,
    draws: int = 1,
    weights: str = "rows",
) -> Algorithm:
    r"""Bayesian networks at clients around a global Bayesian network.

    .. math:: q_k = \arg\min_q \, -E_q \log p(y_k \mid w) + \zeta\, \mathrm{KL}(q \,\|\, p), \qquad
              p_k = \arg\min_p \mathrm{KL}(q_k \,\|\, p), \qquad p \leftarrow \text{average of the } p_k

    q_k, p_k and p are normal with independent weights; means and sds are averaged. Both are moved by Adam in turns.

    Parameters
    ----------
    zeta
        ζ, what holds q_k near p.
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
        Its fit has a point estimate, the means of p; `fedppl.nn.predict` gives predictions by q_k.

    Raises
    ------
    DeclarationError
        For settings out of range, and where some weights are not shared.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.PFedBayes().name
    'PFedBayes'

    Notes
    -----
    *When this fails.* A `spread` much above what the weights themselves are drowns the network in noise, and nothing
    is learned.

    References
    ----------
    .. [1] Zhang et al. (2022), Personalized federated learning via variational Bayesian inference, Algorithm 1.
    """
    if isinstance(zeta, bool) or not isinstance(zeta, int | float | np.number) or not 0 < zeta < np.inf:
        raise DeclarationError(f"zeta={zeta!r} must be positive and finite.")
    training = training_rule(learning_rate, epochs, batch_size)
    count = steps_rule(1.0, 1, draws)[2]
    settings = _Settings(training, float(zeta), count, spread_rule(spread), weights_rule(weights))
    return Algorithm(
        name="PFedBayes",
        check=lambda client: check_all_shared(client, "PFedBayes"),
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


def _steps(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, settings: _Settings
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """q_k and p_k, in torch's order."""
    network = client.network
    mean, sd = (network.unit.weights(np.asarray(message[name], dtype=float), network.start) for name in ("mean", "sd"))
    known = personal is not None and len(personal.mean) == len(mean)
    start = (personal.mean, personal.sd) if known else None
    found: tuple[tuple[Array, Array], tuple[Array, Array]] = network.bayes_steps(
        mean, sd, settings.training, settings.zeta, settings.draws, rng, start=start
    )
    return found


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings
) -> tuple[Posterior, Message, Mapping[str, float]]:
    """Steps of q_k and of p_k; p_k travels."""
    q, p = _steps(client, personal, message, rng, settings)
    weight, shared = weight_of(client, settings.weights), client.network.unit.shared_at
    reply = _posteriors.reply(p[0][shared], p[1][shared], weight)
    return Posterior(*q), reply, ({"blank": 1.0} if personal is None else {})


def _stay(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings
) -> tuple[Posterior, Mapping[str, float]]:
    """q_k around the p of this round."""
    return Posterior(*_steps(client, personal, message, rng, settings)[0]), {}


def _own(client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings) -> Own:
    """q_k after one more round for the client alone."""
    mean, sd = _steps(client, personal, message, rng, settings)[0]
    return Own(client, mean, client.network.independent(mean, np.arange(len(mean)), sd**2))
