"""What algorithms for networks share: settings, and how a client makes the network its own when the rounds are over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl.contracts import Draws
from fedppl.settings import plain
from fedppl.types import Array, DeclarationError, Layout, Message

__all__ = [
    "Own",
    "Training",
    "Tuning",
    "check_all_shared",
    "check_head",
    "check_network",
    "draw",
    "drawn_from",
    "head_rule",
    "outcome",
    "own",
    "steps_rule",
    "training_rule",
    "tuning_rule",
    "unused_priors",
]

logger = logging.getLogger(__name__)
_MOST = 100_000_000  # numbers in one array of draws


class Training(NamedTuple):
    """Steps at a client."""

    learning_rate: float
    epochs: int
    batch_size: int
    momentum: float | None = None  # of gradient steps; None for Adam


class Tuning(NamedTuple):
    """What a client fine-tunes when the rounds are over: "local", torch's names, or nothing."""

    which: str | tuple[str, ...] | None
    training: Training


class Own(NamedTuple):
    """A client's own network."""

    client: Any
    weights: Array  # (d,)
    subnetwork: Any  # its posterior, or None where weights are a point


def training_rule(
    learning_rate: float, epochs: int, batch_size: int, prefix: str = "", momentum: float | None = None
) -> Training:
    """Settings in range, or an error that says which is not."""
    number = isinstance(learning_rate, float | int | np.number) and not isinstance(learning_rate, bool)
    if not number or not 0 < learning_rate < np.inf:
        raise DeclarationError(f"{prefix or 'learning_'}rate={learning_rate!r} must be positive and finite.")
    for name, value in ((f"{prefix}epochs", epochs), ("batch_size", batch_size)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise DeclarationError(f"{name}={value!r} must be a whole number, at least 1.")
    if momentum is not None:
        number = isinstance(momentum, float | int | np.number) and not isinstance(momentum, bool)
        if not number or not 0 <= momentum < 1:
            raise DeclarationError(f"momentum={momentum!r} must be at least 0 and below 1, or None for Adam.")
        momentum = float(momentum)
    return Training(float(learning_rate), int(epochs), int(batch_size), momentum)


def head_rule(head: Any) -> tuple[str, ...]:
    """Check the keyword `head`."""
    if not isinstance(head, tuple | list) or not head or not all(isinstance(name, str) for name in head):
        raise DeclarationError(f'head={head!r} must be a tuple of torch\'s names, such as ("2.weight", "2.bias").')
    return tuple(head)


def check_head(client: Any, algorithm: str, head: tuple[str, ...]) -> None:
    """Refuse what is no network, networks of which a part is local, and heads that are not the last layer."""
    check_all_shared(client, algorithm)
    check_network(client, algorithm, head)
    client.network.head(head)


def steps_rule(rate: float, steps: int, draws: int) -> tuple[float, int, int]:
    """Check the keywords `head_rate`, `head_steps` and `draws`."""
    for name, value in (("head_steps", steps), ("draws", draws)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise DeclarationError(f"{name}={value!r} must be a whole number, at least 1.")
    return training_rule(rate, 1, 1, "head_").learning_rate, int(steps), int(draws)


def tuning_rule(tune: Any, rate: float, epochs: int, batch_size: int, momentum: float | None = None) -> Tuning:
    """Check the keywords `tune`, `tune_rate` and `tune_epochs`."""
    training = training_rule(rate, epochs, batch_size, "tune_", momentum)
    if tune is None or (isinstance(tune, str) and tune in ("local", "all")):
        return Tuning(tune, training)
    if not isinstance(tune, tuple | list) or not tune or not all(isinstance(name, str) for name in tune):
        raise DeclarationError(f'tune={tune!r} must be "local", "all", a tuple of torch\'s names, or None for none.')
    return Tuning(tuple(tune), training)


def check_network(client: Any, algorithm: str, *trained: str | tuple[str, ...] | None) -> None:
    """Refuse what is no network, shared priors that are not independent normals, and names that it does not have."""
    network = client.network
    _check_prior(client, algorithm)
    for which in trained:
        if which == "local" and not client.local_size:
            raise DeclarationError(
                "there are no local weights to train or to fine-tune: FederatedModel(shared=...) names them all. Share "
                'fewer, or pass tune=None, or torch\'s names in place of "local".'
            )
        if which is not None:
            network.places(which)


def _check_prior(client: Any, algorithm: str) -> None:
    """Refuse what is no independent normal: its mean and its variances would be all that is left of it."""
    layout, kinds = client.layout, client.network.unit.shared_kinds
    wrong = [name for name, kind in kinds.items() if kind != "normal"] or list(kinds)
    if layout.prior_is_gaussian:
        wrong = _correlated(layout)
    if wrong:
        raise DeclarationError(
            f"the prior of {', '.join(f'{name!r} ({kinds[name]})' for name in wrong)} is not one of independent "
            f"normals, and {algorithm} has no use for any other. Declare shared weights by pm.Normal with constant "
            "parameters, as fedppl.nn.parameters does."
        )


def _correlated(layout: Layout) -> list[str]:
    """Names of the shared variables whose precision has entries off its diagonal."""
    precision = layout.prior.precision
    if precision.ndim == 1:
        return []
    scale = np.sqrt(np.diag(precision))
    apart = np.abs(precision / np.outer(scale, scale) - np.eye(len(scale))).max(axis=1) > 1e-9
    return [name for name, where in layout.slices.items() if apart[where].any()]


def unused_priors(client: Any, *, shared: bool = False, tuned: str | tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Names of the weights whose declared prior sd an algorithm does not use.

    Parameters
    ----------
    client
        A client's network.
    shared
        Whether it uses those of shared weights.
    tuned
        Local weights of which it uses them: "local" or "all", torch's names, or None.

    Returns
    -------
    tuple
    """
    names = [] if shared else [v.name for v in client.layout.variables]
    if tuned not in ("local", "all"):
        names += [v.name for v in client.local if v.name not in (tuned or ())]
    return tuple(names)


def check_all_shared(client: Any, algorithm: str) -> None:
    """Refuse what is no network, networks of which a part is local, and priors as in `check_network`."""
    check_network(client, algorithm, "shared")
    if client.local_size:
        raise DeclarationError(
            f"the weights {[v.name for v in client.local]} are local, and this algorithm shares whole networks; name "
            "all weights in FederatedModel(shared=...)."
        )


def outcome(mean: Array, tuning: Tuning) -> dict[str, Array]:
    """The shared weights, and how long to fine-tune."""
    rate, epochs, batch_size, momentum = tuning.training
    steps = [rate, epochs if tuning.which is not None else 0, batch_size, -1.0 if momentum is None else momentum]
    return {"mean": mean, "tuning": np.array(steps)}


def own(
    client: Any, personal: Any, message: Message, rng: np.random.Generator, *, which: str | tuple[str, ...] | None
) -> Own:
    """One client's network: the shared weights, its own, fine-tuned.

    A message with prior variances of the shared weights asks for the mode under those and the declared prior of local
    weights, and for a subnetwork's posterior; without them the loss alone counts.
    """
    network, unit = client.network, client.network.unit
    kept = personal is not None and len(personal.local) == client.local_size
    if not kept and not set(unit.local_at) <= set(network.places(which) if which is not None else ()):
        logger.warning(
            "client %s has no local weights of its own, and takes those that all clients start from; an algorithm with "
            'tune="local" fine-tunes them',
            client.client_id,
        )
    mean, variance = np.asarray(message["mean"], dtype=float), message.get("variance")
    w = unit.weights(mean, personal.local if kept else network.start)
    rate, epochs, batch_size, momentum = (float(value) for value in message["tuning"])
    if which is not None and epochs:
        steps = Training(rate, int(epochs), int(batch_size), None if momentum < 0 else momentum)
        free, prior = network.places(which), None
        if variance is not None:
            centre = unit.weights(mean, unit.local_mean)
            precision = unit.weights(1.0 / np.asarray(variance), unit.local_precision)
            prior = centre[free], precision[free]
        w = network.trained(w, free, steps, rng, prior=prior)
    if variance is None:
        return Own(client, w, None)
    count, literal, diagonal = (int(value) for value in message["inference"])
    rule = "variance" if literal else "live"
    found = network.subnetwork(w, np.asarray(variance), count, rule=rule, diagonal=bool(diagonal))
    return Own(client, w, found)


def draw(
    client: Any,
    personal: Any,
    message: Message,
    draws: int,
    chains: int,
    rng: np.random.Generator,
    *,
    which: str | tuple[str, ...] | None,
) -> Draws:
    """Draws of all weights: of the subnetwork's posterior, and equal elsewhere."""
    return draw_own(client, lambda: own(client, personal, message, rng, which=which), draws, chains, rng)


def draw_own(client: Any, own_network: Callable[[], Own], draws: int, chains: int, rng: np.random.Generator) -> Draws:
    """Draws of all weights of what `own_network` finds, unless they are too many."""
    size, unit = client.shared_size + client.local_size, client.network.unit
    if draws * chains * size > _MOST:
        raise DeclarationError(
            f"{draws * chains} draws of {size} weights are {draws * chains * size * 8 / 1e9:.1f} GB. Pass draws= and "
            "chains= for fewer, or predict in closed form by fedppl.nn.predict(fit, client, inputs)."
        )
    found = own_network()
    w = np.broadcast_to(found.weights, (chains * draws, size)).copy()
    if found.subnetwork is not None:
        w[:, found.subnetwork.places] += found.subnetwork.deviations(chains * draws, rng)
    shaped = w.reshape(chains, draws, size)
    info = {} if found.subnetwork is not None else {"point_estimate": 1.0}
    return Draws(shaped[:, :, unit.shared_at], shaped[:, :, unit.local_at], info)


def drawn_from(find: Callable[[Any, Any, Message, np.random.Generator], Own]) -> Callable[..., Draws]:
    """An algorithm's `draw`, of what its `personalise` finds."""

    def draw(client: Any, personal: Any, message: Message, draws: int, chains: int, rng: np.random.Generator) -> Draws:
        return draw_own(client, lambda: find(client, personal, message, rng), draws, chains, rng)

    return draw


def described(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings of an algorithm, each in one line of text."""
    return {name: repr(plain(value)) for name, value in settings.items()}
