"""FedSI: clients infer a subnetwork of the shared weights, the server averages means and variances."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from fedppl import gaussian
from fedppl.algorithms.averaging.fedavg import not_counted
from fedppl.contracts import Algorithm, ClientUpdate, ClientView, Part, Point, Received, Replies, Report, always
from fedppl.nn.algorithms import _common
from fedppl.nn.batch import train_each
from fedppl.nn.functional import Places
from fedppl.nn.personal import log_densities
from fedppl.nn.subnet import RULES, Subnetwork, chosen, infer, marginals
from fedppl.nn.train import Training
from fedppl.nn.unit import NetworkUnit
from fedppl.nn.view import network_of, own_of
from fedppl.settings import between, described, flag, one_of, positive
from fedppl.types import Array, Layout, LocalFailure, Message, Rng

_FEW = 30  # weights: the message says where a posterior has fewer
_LEAST = 1e-30  # variance or sd of a weight that is no point, whose inverse is finite in single precision
_NARROW = 1e-20  # least variance of the next round's prior, which clients where a weight is a point would shrink
_WIDE = 10.0  # ratio of a posterior's variance to its prior's, which rounding does not reach


class SubnetworkState(NamedTuple):
    """What the next round needs."""

    mean: Array  # of the shared weights, (m,)
    variance: Array  # of the next round's prior, (m,)
    declared: float  # 1.0 in the first round, whose prior is the declared one
    uncertain: Array  # 1.0 where some client's subnetwork held the weight in the last round, (m,)


class SubnetworkInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # root mean square of the means' change
    stochastic: float  # share of the shared weights that some client's subnetwork held


class _Settings(NamedTuple):
    training: Training
    ratio: float
    alpha: float
    prior_variance: float
    rule: str
    diagonal: bool
    average: str


def FedSI(
    *,
    ratio: float = 0.05,
    alpha: float = 100.0,
    prior_variance: float | None = None,
    learning_rate: float = 1e-2,
    epochs: int = 10,
    batch_size: int = 50,
    rule: str = "live",
    diagonal: bool = False,
    average: str = "variance",
    tune: str | tuple[str, ...] | None = "local",
    tune_rate: float = 1e-3,
    tune_epochs: int = 10,
) -> Algorithm[SubnetworkState, None]:
    r"""Federated subnetwork inference: linearised Laplace on a few weights, averages of all.

    .. math:: \hat w_k = \arg\max \log p(y_k \mid X_k, w) + \log N(w \mid \mu, \mathrm{diag}\, g), \qquad
              \mu \leftarrow \frac1C \sum_k \hat w_k, \quad \sigma^2 \leftarrow \frac1C \sum_k \sigma^2_k, \quad
              g_i \leftarrow \sigma^2_i \text{, or } \alpha \text{ where } \sigma^2_i = 0

    Shared are the weights of the representation, with a posterior; σ²_k is its variance at the S weights of the
    client's subnetwork, and 0 at all others, which are points. Local weights, the head, stay where all clients start
    them until the rounds are over; then each client fine-tunes its own to the mode under their declared prior, and
    infers a subnetwork at the shared mean (Step 4). The declared prior of the shared weights counts in the first round.

    Parameters
    ----------
    ratio
        Share S of the shared weights that a client infers.
    alpha
        Prior variance that weights which are points in the average have in the next round's training. The paper's 1e-4
        holds them so tightly that training fails, and 1 still costs accuracy.
    prior_variance
        Prior variance of the same weights in the next inference, 3 by default: a weight that the data hardly inform
        keeps it. With `diagonal` no weight is a point; then it is the widest prior of the last inference, 0.03 by
        default. The defaults suit the networks of the paper, by the likelihood of held-out rows.
    learning_rate, epochs, batch_size
        As in `FedAvg`, with passes over the rows, of Adam's steps towards the mode.
    rule
        Rule by which weights are chosen, "live" or "variance", see `fedppl.nn.subnet.select`.
    diagonal
        Whether to infer all shared weights, with the diagonal of the curvature: FedSI-Fac.
    average
        Quantity that the server averages: "variance", or "sd" as in Algorithm 1.
    tune, tune_rate, tune_epochs
        As in `FedAvg`, by Adam. Local weights have their declared prior, shared ones that of the last inference; local
        weights that are not named stay where they start, and their prior is not used.

    Returns
    -------
    Algorithm
        Its fit has a point estimate of the shared weights; ``fit.idata["fit"]`` has the variances of the next round's
        prior, α where no client's subnetwork held a weight, and ``stochastic``, which says where one did.
        `fedppl.nn.predict` gives a client's predictions.

    Notes
    -----
    *When this fails.* Predictions are too certain: a client's rows count once a round, in the average that is the next
    prior, and again in its last inference, R + 1 times after R rounds. On a linear model where the posterior's sd of f
    is 0.135, that of `predict` was 0.096 after one round and 0.055 after five. Compare variances between clients, and
    calibrate them on rows that were held out. For accuracy alone `FedAvg` with the same learning rate does as well.

    References
    ----------
    .. [1] Chen et al., FedSI, Algorithm 1, eqs. 10 to 19.
    """
    diagonal = flag("diagonal", diagonal)
    if prior_variance is None:
        prior_variance = 0.03 if diagonal else 3.0
    settings = _Settings(
        _common.training_rule(learning_rate, epochs, batch_size),
        between("ratio", ratio, 0, 1, "(]"),
        positive("alpha", alpha),
        positive("prior_variance", prior_variance),
        one_of("rule", rule, RULES),
        diagonal,
        one_of("average", average, ("variance", "sd")),
    )
    tuning = _common.tuning_rule(tune, tune_rate, tune_epochs, batch_size)
    batch = _common.batch_of(functools.partial(_updates, settings=settings))
    inferred = functools.partial(_inferred, settings=settings, tuning=tuning)
    return Algorithm[SubnetworkState, None](
        name="nn.FedSI",
        settings=described(settings, tuning=tuning),
        init=_init,
        broadcast=_broadcast,
        update_client=batch.update_client,
        update_server=functools.partial(_update_server, settings=settings),
        replies=Replies(
            lambda state: {"mean": state.mean.shape, "spread": state.mean.shape, "clients": ()},
            functools.partial(_reject, settings=settings),
            always,
        ),
        result=_common.network_result(
            functools.partial(_final_message, settings=settings),
            lambda client, personal, message, rng: own_of(client, inferred(client, message, rng)),
            Point[SubnetworkState](lambda state: state.mean),
            details=lambda state: {"variance": (("rows",), state.variance), "stochastic": (("rows",), state.uncertain)},
            caution="draws are of the linearised network, and put into the network itself; use fedppl.nn.predict",
            # By the linearised network, as `fedppl.nn.predict` predicts.
            held_out=lambda client, rows, personal, message, draws, rng: log_densities(
                rows.view(network_of), inferred(client, message, rng), draws, rng
            ),
        ),
        needs=_common.needs(
            functools.partial(_check, tuning=tuning),
            functools.partial(_common.unused_priors, shared=True, tuned=tuning.which),
        ),
        disclosure=_common.AT_MEAN,
        batch=batch,
    )


def _check(client: ClientView, *, tuning: _common.Tuning) -> None:
    _common.check_network(client, "nn.FedSI", "shared", tuning.which)
    _common.check_unknowns(client, "shared")


def _broadcast(state: SubnetworkState, client_id: str) -> Message:
    return {"mean": state.mean, "variance": state.variance, "declared": np.array(state.declared)}


def _prior_variance(variance: Array, declared: float, settings: _Settings) -> Array:
    """Prior variances for the inference: those of training, but for weights whose prior has α."""
    return variance if declared else np.where(variance == settings.alpha, settings.prior_variance, variance)


def _count(settings: _Settings, size: int) -> int:
    """S, the number of weights that a client chooses."""
    return max(1, round(settings.ratio * size))


def _init(layout: Layout, clients: tuple[str, ...], rng: Rng) -> SubnetworkState:
    prior = layout.prior
    variance = 1.0 / prior.precision if prior.precision.ndim == 1 else np.diag(gaussian.covariance(prior))
    mean = gaussian.mean(prior)
    return SubnetworkState(mean, variance.copy(), 1.0, np.zeros(len(mean)))


def _updates(parts: Sequence[Part[None]], *, settings: _Settings) -> list[ClientUpdate[None] | None]:
    """The mode with local weights at their start, then the subnetwork's variances around it."""
    units, means = (
        [part.client.view(network_of) for part in parts],
        [np.asarray(part.message["mean"]) for part in parts],
    )
    W, trained = train_each(
        units,
        np.stack([unit.weights(mean) for unit, mean in zip(units, means, strict=True)]),
        units[0].shared_at,
        settings.training,
        [part.rng for part in parts],
        [(mean, 1.0 / np.asarray(part.message["variance"])) for mean, part in zip(means, parts, strict=True)],
    )
    updates: list[ClientUpdate[None] | None] = [None] * len(parts)
    for k in np.flatnonzero(trained).tolist():
        try:
            updates[k] = _update(units[k], W[k], parts[k].message, settings)
        except LocalFailure:
            if len(parts) == 1:
                raise
    return updates


def _update(unit: NetworkUnit, w: Array, message: Message, settings: _Settings) -> ClientUpdate[None]:
    prior = _prior_variance(np.asarray(message["variance"]), float(message["declared"]), settings)
    places, g = _chosen(unit, w, prior, settings)
    spread = np.zeros(unit.size)
    spread[places] = marginals(unit, w, places, g, diagonal=settings.diagonal)
    ratio, spread = float(np.mean(spread[places] / g)), spread[unit.shared_at]
    reply = {
        "mean": w[unit.shared_at],
        "spread": spread if settings.average == "variance" else np.sqrt(spread),
        "clients": np.array(1.0),
    }
    return ClientUpdate(None, reply, {"variance_ratio": ratio})


def _chosen(unit: NetworkUnit, w: Array, variance: Array, settings: _Settings) -> tuple[Places, Array]:
    return chosen(unit, w, variance, _count(settings, len(variance)), rule=settings.rule, diagonal=settings.diagonal)


def _update_server(
    state: SubnetworkState, received: Received, *, settings: _Settings
) -> tuple[SubnetworkState, Report]:
    """Average means and spreads; weights in no client's subnetwork get α."""
    if not received.clients:
        return state, Report(SubnetworkInfo(np.nan, np.nan))
    total = received.total
    mean, spread = total["mean"] / total["clients"], total["spread"] / total["clients"]
    variance = spread if settings.average == "variance" else spread**2
    uncertain = (spread > 0).astype(float)
    change, message = _common.moved(state.mean, mean)
    count = _count(settings, len(mean))
    if count < min(_FEW, len(mean)) and not settings.diagonal:
        message += (
            f". A client infers {count} of {len(mean)} shared weights, ratio={settings.ratio:g}: raise it, to 1 for all"
        )
    variance = np.where(uncertain > 0, np.maximum(variance, _NARROW), settings.alpha)
    after = SubnetworkState(mean, variance, 0.0, uncertain)
    return after, Report(SubnetworkInfo(change, float(uncertain.mean())), message=message)


def _reject(state: SubnetworkState, reply: Message, *, settings: _Settings) -> str | None:
    reason = not_counted(reply, "clients")
    if reason or (reason := _common.run_away("mean", reply["mean"] / reply["clients"], state.mean)):
        return reason
    spread, most = reply["spread"] / reply["clients"], _WIDE * _prior_variance(state.variance, state.declared, settings)
    if settings.average == "sd":
        most = np.sqrt(most)
    wrong = (spread < 0) | (spread > most) | ((spread > 0) & (spread < _LEAST))
    if not np.any(wrong):
        return None
    at = int(np.argmax(wrong))
    return f"'spread' is {spread[at]:.3g} at weight {at}, and must be 0, or from {_LEAST:.0e} to {most[at]:.3g}"


def _final_message(state: SubnetworkState, client_id: str, *, settings: _Settings) -> Message:
    variance = _prior_variance(state.variance, state.declared, settings)
    if settings.diagonal and not state.declared:
        variance = np.minimum(variance, settings.prior_variance)
    return {"mean": state.mean, "variance": variance}


def _inferred(
    client: ClientView, message: Message, rng: Rng, *, settings: _Settings, tuning: _common.Tuning
) -> Subnetwork:
    """A client's posterior when the rounds are over."""
    w, unit = _common.tuned(client, None, message, rng, tuning=tuning).weights, client.view(network_of)
    places, g = _chosen(unit, w, np.asarray(message["variance"]), settings)
    return infer(unit, w, places, g, dtype=torch.float32, diagonal=settings.diagonal)
