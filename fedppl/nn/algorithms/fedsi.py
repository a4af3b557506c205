"""FedSI: clients infer a subnetwork of the shared weights, the server averages means and variances."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.algorithms.averaging._point import Kept, flag_rule
from fedppl.contracts import Algorithm
from fedppl.local.target import at_points
from fedppl.nn.algorithms._common import (
    Training,
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

__all__ = ["FedSI", "SubnetworkInfo", "SubnetworkState"]


class SubnetworkState(NamedTuple):
    """What the next round needs."""

    mean: Array  # of the shared weights, (m,)
    variance: Array  # of the next round's prior, (m,)
    declared: float  # 1.0 in the first round, whose prior is the declared one
    uncertain: Array  # 1.0 where some client's subnetwork held the weight in the last round, (m,)
    status: str
    message: str


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
) -> Algorithm:
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
        S over the number of shared weights.
    alpha
        Prior variance that weights which are deterministic in the average have in the next round's training. The
        paper's 1e-4 holds them so tightly that training fails, and 1 still costs accuracy.
    prior_variance
        The same for the next inference, 3 by default. A weight that the data hardly speak about keeps its prior's
        variance, so that α, which lets training go, would be far too much uncertainty. The first round has the
        declared prior in both. With `diagonal` no weight is deterministic, and neither this nor α plays a part in the
        rounds; no weight's prior in the last inference is wider than this, 0.03 by default. The defaults are right for
        the networks of the paper, by the likelihood of rows that were held out; try others for yours.
    learning_rate, epochs, batch_size
        Of Adam towards the mode.
    rule
        "live" or "variance", see `fedppl.nn.subnet.select`.
    diagonal
        FedSI-Fac: all shared weights, with the diagonal of the curvature.
    average
        "variance" or "sd": what the server averages. Algorithm 1 has sds; with degenerate Gaussians, variances are
        those of an average of independent draws' mixture less the spread of means.
    tune, tune_rate, tune_epochs
        Weights that a client fine-tunes in the end, and Adam's settings for that. Local ones have their declared
        prior, shared ones that of the last inference; local weights that are not named stay where they start, and
        their prior is not used.

    Returns
    -------
    Algorithm
        Its fit has a point estimate of the shared weights; ``fit.idata["fit"]`` has the variances of the next round's
        prior, α where no client's subnetwork held a weight, and ``stochastic``, which says where one did.
        `fedppl.nn.predict` gives a client's predictions.

    Raises
    ------
    DeclarationError
        For settings out of range, and before any round for a model that is no network's.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.FedSI(ratio=0.07).name
    'FedSI'

    Notes
    -----
    *When this fails.* The posterior counts every round's data again in the next round's prior, since the average is the
    prior: variances are those of a continual learner and not of one posterior. A fit runs for as many rounds as it is
    given and says "max_rounds". For accuracy alone `NetworkAveraging` with the same learning rate does as well.

    References
    ----------
    .. [1] Chen et al., FedSI, Algorithm 1, eqs. 10 to 19.
    """
    if prior_variance is None:
        prior_variance = 0.03 if diagonal else 3.0
    for name, value, most in (
        ("ratio", ratio, 1.0),
        ("alpha", alpha, np.inf),
        ("prior_variance", prior_variance, np.inf),
    ):
        if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 < value <= most:
            raise DeclarationError(f"{name}={value!r} must be positive{' and at most 1' if most == 1 else ''}.")
    for name, value in (("alpha", alpha), ("prior_variance", prior_variance)):
        if not np.isfinite(value):
            raise DeclarationError(f"{name}={value!r} must be finite.")
    for word, chosen, known in (("rule", rule, ("live", "variance")), ("average", average, ("variance", "sd"))):
        if chosen not in known:
            raise DeclarationError(f"{word}={chosen!r} must be one of {known}.")
    settings = _Settings(
        training_rule(learning_rate, epochs, batch_size),
        float(ratio),
        float(alpha),
        float(prior_variance),
        rule,
        flag_rule("diagonal", diagonal),
        average,
    )
    tuning = tuning_rule(tune, tune_rate, tune_epochs, batch_size)
    return Algorithm(
        name="FedSI",
        check=lambda client: check_network(client, "FedSI", "shared", tuning.which),
        init_server=_init_server,
        broadcast=lambda state, client_id: {
            "mean": state.mean,
            "variance": state.variance,
            "declared": np.array(state.declared),
        },
        update_client=functools.partial(_update_client, settings=settings),
        reply_shapes=lambda state: {"mean": state.mean.shape, "spread": state.mean.shape, "clients": ()},
        refuse=_refuse,
        update_server=functools.partial(_update_server, settings=settings),
        outcome=lambda state, client_id: {
            **outcome(state.mean, tuning),
            "variance": _last(state, settings),
            "inference": np.array([_count(settings, len(state.mean)), rule == "variance", diagonal], dtype=float),
        },
        draw=functools.partial(draw, which=tuning.which),
        personalise=functools.partial(own, which=tuning.which),
        details=lambda state: {"variance": (("rows",), state.variance), "stochastic": (("rows",), state.uncertain)},
        estimate=lambda state: state.mean,
        settings=described({**settings._asdict(), **tuning._asdict()}),
        large=True,
        asks=functools.partial(at_points, name="mean"),
        unused=functools.partial(unused_priors, shared=True, tuned=tuning.which),
    )


def _believed(variance: Array, declared: float, settings: _Settings) -> Array:
    """Prior variances to infer with: those of training, but for weights that α lets go."""
    return variance if declared else np.where(variance == settings.alpha, settings.prior_variance, variance)


def _last(state: SubnetworkState, settings: _Settings) -> Array:
    """Prior variances of the inference after the rounds, which predictions come from."""
    found = _believed(state.variance, state.declared, settings)
    return np.minimum(found, settings.prior_variance) if settings.diagonal and not state.declared else found


def _count(settings: _Settings, size: int) -> int:
    return max(1, round(settings.ratio * size))


def _init_server(layout: Layout, clients: tuple[str, ...], rng: np.random.Generator) -> SubnetworkState:
    """Start at the declared prior."""
    del clients, rng
    prior = layout.prior
    variance = 1.0 / prior.precision if prior.precision.ndim == 1 else np.diag(gaussian.covariance(prior))
    mean = gaussian.mean(prior)
    return SubnetworkState(mean, variance.copy(), 1.0, np.zeros(len(mean)), Status.RUNNING.value, "raise rounds=")


def _update_client(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, settings: _Settings
) -> tuple[Kept, Message, Mapping[str, float]]:
    """The mode with local weights where all start them, then the subnetwork's variances around it."""
    del personal
    network, mean, variance = client.network, np.asarray(message["mean"]), np.asarray(message["variance"])
    shared = network.unit.shared_at
    start = network.unit.weights(mean, network.start)
    w = network.trained(start, shared, settings.training, rng, prior=(mean, 1.0 / variance))
    count = _count(settings, len(mean))
    believed = _believed(variance, float(message["declared"]), settings)
    q = network.subnetwork(w, believed, count, rule=settings.rule, diagonal=settings.diagonal)
    place = np.full(network.unit.size, -1)
    place[shared] = np.arange(len(shared))
    spread = np.zeros(len(mean))
    spread[place[q.places]] = q.covariance if q.covariance.ndim == 1 else np.diag(q.covariance)
    shrunk = float(np.mean(spread[place[q.places]] / believed[place[q.places]]))
    reply = {
        "mean": w[shared],
        "spread": spread if settings.average == "variance" else np.sqrt(spread),
        "clients": np.array(1.0),
    }
    return Kept(np.zeros(0)), reply, {"variance_ratio": shrunk}


def _refuse(state: SubnetworkState, reply: Message) -> str | None:
    """Spreads are not negative, and somebody sent them."""
    del state
    if not float(reply["clients"]) >= 1.0:
        return f"'clients' is {float(reply['clients']):.3g}, and must be at least 1"
    least = float(np.min(reply["spread"], initial=0.0))
    return None if least >= 0 else f"'spread' is {least:.3g} somewhere, and must not be negative"


def _update_server(
    state: SubnetworkState, replies: Mapping[str, Message], *, settings: _Settings
) -> tuple[SubnetworkState, SubnetworkInfo]:
    """Average means and spreads; weights that nobody's subnetwork held get α."""
    if not replies:
        return state, SubnetworkInfo(np.nan, np.nan)
    total = sum_replies(replies)
    mean, spread = total["mean"] / total["clients"], total["spread"] / total["clients"]
    variance = spread if settings.average == "variance" else spread**2
    uncertain = (variance > 0).astype(float)
    change = float(np.sqrt(np.mean((mean - state.mean) ** 2)))
    after = SubnetworkState(
        mean,
        np.where(variance > 0, variance, settings.alpha),
        0.0,
        uncertain,
        state.status,
        f"weights moved by {change:.2g} (root mean square) in the last round; raise rounds=",
    )
    return after, SubnetworkInfo(change, float(uncertain.mean()))
