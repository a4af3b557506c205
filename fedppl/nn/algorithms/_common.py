"""What algorithms for networks share: rules of their settings, and what they need of a client's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl.contracts import CheckFn, ClientView, Needs
from fedppl.nn.train import Training
from fedppl.nn.view import network_of
from fedppl.settings import between, positive, whole
from fedppl.types import DeclarationError, Layout


class Tuning(NamedTuple):
    """What a client fine-tunes when the rounds are over: "local", "all", torch's names, or nothing."""

    which: str | tuple[str, ...] | None
    training: Training


def training_rule(
    learning_rate: float, epochs: int, batch_size: int, *, momentum: float | None = None, prefix: str = ""
) -> Training:
    """Settings in range, or an error that says which is not."""
    return Training(
        positive(f"{prefix or 'learning_'}rate", learning_rate),
        whole(f"{prefix}epochs", epochs),
        whole("batch_size", batch_size),
        None if momentum is None else between("momentum", momentum, 0, 1, "[)", hint="None takes Adam's steps"),
    )


def names_in(value: Any) -> tuple[str, ...] | None:
    """Torch's names of parameters, or None where this is no sequence of names, each once."""
    if not isinstance(value, tuple | list) or not value or not all(isinstance(name, str) for name in value):
        return None
    return tuple(value) if len(set(value)) == len(value) else None


def tuning_rule(tune: Any, rate: float, epochs: int, batch_size: int, *, momentum: float | None = None) -> Tuning:
    """Check the keywords `tune`, `tune_rate` and `tune_epochs`."""
    training = training_rule(rate, epochs, batch_size, momentum=momentum, prefix="tune_")
    if tune is None or (isinstance(tune, str) and tune in ("local", "all")):
        return Tuning(tune, training)
    names = names_in(tune)
    if names is None:
        raise DeclarationError(
            f'tune={tune!r} must be "local", "all", a tuple of torch\'s names, each once, or None for none.'
        )
    return Tuning(names, training)


def check_network(client: ClientView, algorithm: str, *trained: str | tuple[str, ...] | None) -> None:
    """Refuse what is no network, shared priors that are not independent normals, and names that it does not have."""
    network = client.view(network_of)
    _check_prior(client.layout, network.unit.declared.shared_kinds, algorithm)
    for which in trained:
        if which == "local" and not client.local_size:
            raise DeclarationError(
                "there are no local weights to train or to fine-tune: FederatedModel(shared=...) names them all. Share "
                'fewer, or pass tune=None, or torch\'s names in place of "local".'
            )
        if which is not None:
            network.places(which)


def check_unknowns(client: ClientView, algorithm: str, *trained: str | tuple[str, ...]) -> None:
    """Refuse unknowns of the likelihood that are local, and that no round trains: they would stay where they start."""
    network = client.view(network_of)
    names = {v.name for v in client.local} & set(network.unit.declared.unknowns)
    reached = set(np.concatenate([np.zeros(0, int), *(network.places(which) for which in trained)]))
    if still := [name for name in sorted(names) if not set(network.places((name,))) <= reached]:
        raise DeclarationError(
            f"{still} of the likelihood are unknown and local, and no round of {algorithm} trains them; name them in "
            "FederatedModel(shared=...), with pm.LogNormal for a scale, declare constants in their place, or use "
            "fedppl.nn.FedAvg with phases= that train them."
        )


def check_all_shared(client: ClientView, algorithm: str, *trained: str | tuple[str, ...]) -> None:
    """Refuse what `check_network` does, and networks of which a part is local."""
    check_network(client, algorithm, "shared")
    unknowns = client.view(network_of).unit.declared.unknowns
    if kept := [v.name for v in client.local if v.name in unknowns]:
        raise DeclarationError(
            f"{kept} of the likelihood are unknown and local, and {algorithm} keeps nothing at a client but networks "
            "that are shared as a whole; name them in FederatedModel(shared=...), declare constants in their place, or "
            "use fedppl.nn.FedAvg or fedppl.nn.FedSI."
        )
    if client.local_size:
        raise DeclarationError(
            f"the weights {[v.name for v in client.local]} are local, and this algorithm shares whole networks; name "
            "all weights in FederatedModel(shared=...)."
        )
    check_network(client, algorithm, *trained)


def _check_prior(layout: Layout, kinds: Mapping[str, str], algorithm: str) -> None:
    """Refuse what is no independent normal: its mean and its variances would be all that is left of it."""
    wrong = [name for name, kind in kinds.items() if kind not in ("normal", "lognormal")] or list(kinds)
    if layout.prior_is_gaussian:
        wrong = _correlated(layout)
    if wrong:
        raise DeclarationError(
            f"the prior of {', '.join(f'{name!r} ({kinds[name]})' for name in wrong)} is not one of independent "
            f"normals, and {algorithm} has no use for any other. Declare shared weights by pm.Normal with constant "
            "parameters, as fedppl.nn.parameters does, and an unknown of the likelihood by pm.Normal, or by "
            "pm.LogNormal for a scale; cut points by pm.Normal for the first and pm.LogNormal for the steps between."
        )


def _correlated(layout: Layout) -> list[str]:
    """Names of the shared variables whose precision has entries off its diagonal."""
    precision = layout.prior.precision
    if precision.ndim == 1:
        return []
    scale = np.sqrt(np.diag(precision))
    apart = np.abs(precision / np.outer(scale, scale) - np.eye(len(scale))).max(axis=1) > 1e-9
    return [name for name, where in layout.slices.items() if apart[where].any()]


def unused_priors(
    client: ClientView, *, shared: bool = False, tuned: str | tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """Names of the weights whose declared prior sd an algorithm does not use.

    It may use the prior of `shared` weights, and of local ones what is `tuned`: "local", "all", or torch's names.
    """
    names = [] if shared else [v.name for v in client.layout.variables]
    if tuned not in ("local", "all"):
        names += [v.name for v in client.local if v.name not in (tuned or ())]
    return tuple(names)


def needs(check: CheckFn, unused: Callable[[ClientView], tuple[str, ...]] = unused_priors) -> Needs:
    """Of a client's model: that it is a network, which brings gradients of its own."""
    return Needs(check, kernel=False, diagonal_prior=True, unused_priors=unused)


def whole_network(algorithm: str, *trained: str | tuple[str, ...]) -> Needs:
    """Of a client's model: that it is a network, all of it shared."""

    def check(client: ClientView) -> None:
        check_all_shared(client, algorithm, *trained)

    return needs(check)
