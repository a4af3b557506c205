"""What algorithms for networks share: settings, needs and disclosure, servers, and a client's own network."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedppl import contracts
from fedppl.algorithms.averaging.fedavg import KeptLocal, average, fitting_local, not_counted, root_mean_square_change
from fedppl.contracts import ClientUpdate, ClientView, Draws, Part, Point, Received, Report, Result
from fedppl.contracts.client import BatchFn
from fedppl.local.target import at_points
from fedppl.nn.batch import groups
from fedppl.nn.functional import call, gradients, hooked, host, parts_of
from fedppl.nn.personal import further_gain
from fedppl.nn.train import GROWTH, Training, train
from fedppl.nn.unit import NetworkUnit, head_of
from fedppl.nn.view import NetworkResult, Own, PersonaliseFn, network_of
from fedppl.settings import between, positive, whole
from fedppl.types import Array, DeclarationError, Layout, Message, Rng

logger = logging.getLogger(__name__)
S = TypeVar("S")
P = TypeVar("P")


class Tuning(NamedTuple):
    """The weights that a client fine-tunes when the rounds are over: "local", "all", torch's names, or none."""

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


def names_rule(names: Any, refusal: str) -> tuple[str, ...]:
    """Torch's names of parameters, each once; other values are refused."""
    listed = isinstance(names, tuple | list) and names and all(isinstance(name, str) for name in names)
    if not listed or len(set(names)) < len(names):
        raise DeclarationError(refusal)
    return tuple(names)


def tuning_rule(tune: Any, rate: float, epochs: int, batch_size: int, *, momentum: float | None = None) -> Tuning:
    """Check the keywords `tune`, `tune_rate` and `tune_epochs`."""
    training = training_rule(rate, epochs, batch_size, momentum=momentum, prefix="tune_")
    if tune is None or (isinstance(tune, str) and tune in ("local", "all")):
        return Tuning(tune, training)
    refusal = f'tune={tune!r} must be "local", "all", a tuple of torch\'s names, each once, or None for none.'
    return Tuning(names_rule(tune, refusal), training)


def check_network(client: ClientView, algorithm: str, *trained: str | tuple[str, ...] | None) -> None:
    """Refuse models without a network, shared priors that are not independent normals, and unknown names."""
    unit = client.view(network_of)
    layout, kinds = client.layout, unit.declared.shared_kinds
    wrong = [name for name, kind in kinds.items() if kind not in ("normal", "lognormal")] or list(kinds)
    if layout.prior_is_gaussian:
        wrong = _correlated(layout)
    if wrong:
        raise DeclarationError(
            f"the prior of {', '.join(f'{name!r} ({kinds[name]})' for name in wrong)} is not one of independent "
            f"normals, as {algorithm} needs; use pm.Normal with constant parameters, or pm.LogNormal for a scale."
        )
    for which in trained:
        if which is not None:
            unit.places(which)


def check_unknowns(client: ClientView, *trained: str | tuple[str, ...]) -> None:
    """Refuse local unknowns of the likelihood that no round trains, which would keep their start."""
    unit = client.view(network_of)
    names = {v.name for v in client.local} & set(unit.declared.unknowns)
    reached = set(np.concatenate([np.zeros(0, int), *(unit.places(which) for which in trained)]))
    if untrained := [name for name in sorted(names) if not set(unit.places((name,))) <= reached]:
        raise DeclarationError(
            f"{untrained} of the likelihood are unknown and local, and untrained; share them, or use "
            "fedppl.nn.FedAvg(phases=)."
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

    It may use the prior of `shared` weights, and of local ones that are `tuned`: "local", "all", or torch's names.
    """
    names = [] if shared else [v.name for v in client.layout.variables]
    if tuned not in ("local", "all"):
        names += [v.name for v in client.local if v.name not in (tuned or ())]
    return tuple(names)


def needs(check: contracts.CheckFn, unused: Callable[[ClientView], tuple[str, ...]] = unused_priors) -> contracts.Needs:
    """Needs of a client's model: a network, which has its own gradients."""
    return contracts.Needs(check, kernel=False, diagonal_prior=True, unused_priors=unused)


def whole_network(algorithm: str, head: tuple[str, ...] | None = None) -> contracts.Needs:
    """Needs of a client's model: a network, all of it shared, with this head, if any, for its last layer."""

    def check(client: ClientView) -> None:
        check_network(client, algorithm, "shared")
        if names := [v.name for v in client.local]:
            raise DeclarationError(
                f"{names} are local, and this algorithm shares whole networks; name weights and unknowns in shared=."
            )
        if head is not None:
            head_of(client.view(network_of), head)

    return needs(check)


def batch_of(updates: BatchFn[P], unreported: BatchFn[P] | None = None) -> contracts.Batch[P]:
    """The functions of one client, and of clients with one network, by those of a group, which may be one client.

    Of one client alone they raise `LocalFailure` where they would give None.
    """

    def alone(of_group: BatchFn[P], *part: Any) -> ClientUpdate[P]:
        (update,) = of_group([Part(*part)])
        assert update is not None
        return update

    def unreported_alone(client: ClientView, personal: P | None, message: Message, rng: Rng) -> Any:
        assert unreported is not None
        update = alone(unreported, client, personal, message, rng)
        return update.personal, update.info

    update_client = functools.partial(alone, updates)
    return contracts.Batch(update_client, unreported and unreported_alone, groups, updates, unreported)


# The rows for which a network's units are open, which a site checks before it replies with weights or gradients -------


def open_rows(client: Any, phi: Array) -> list[Array]:
    """Slopes (n, units) of a network's outputs, with random signs, in what its layers with weights compute, at φ.

    One array for each layer. A unit whose slope is 0 in a row is closed there, so that the row moves none of its
    weights. Weights can be chosen so that a unit is open for one row, or for one row more than another unit, and
    training then reveals this row. Inputs of linear layers are further arrays: a row in which an input is 0 does not
    move the input's weights either.
    """
    unit, rng = client.view(network_of), torch.Generator().manual_seed(0)
    w = unit.weights(phi)
    parts = [_open_rows_of(unit, w, unit.X[rows], rng) for rows in parts_of(unit.net, unit.X.shape)]
    return [np.concatenate(layer) for layer in zip(*parts, strict=True)]


def _open_rows_of(unit: NetworkUnit, w: Array, X: Array, rng: torch.Generator) -> list[Array]:
    outputs: list[tuple[nn.Module, Tensor]] = []
    inputs: list[Tensor] = []
    net, state = unit.net, unit.state(w, torch.float64)
    layers = {name: layer for name, layer in net.named_modules() if list(layer.parameters(recurse=False))}

    def keep(name: str, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        outputs.append((layers[name], output))
        if isinstance(layers[name], nn.Linear):
            inputs.append(given[0].detach())
        return output.clone()  # the next layer may change it in place

    with hooked(layers, keep), torch.enable_grad():
        live = {name: value.detach().requires_grad_(value.is_floating_point()) for name, value in state.items()}
        output = call(net, live, unit.tensor(X, torch.float64)).reshape(len(X), -1)
        signs = torch.randint(0, 2, output.shape, generator=rng).to(output) * 2.0 - 1.0
        # Two logits of classes have opposite slopes in each row; two other outputs need not.
        ways = [signs, torch.tensor([1.0, -1.0]).to(output)] if output.shape[1] == 2 else [signs]
        values = [value for _, value in outputs]
        slopes = [gradients((way * output).sum(), values, keep=True) for way in ways]
    columns = [_by_unit(module, slope) for way in slopes for (module, _), slope in zip(outputs, way, strict=True)]
    size = torch.cat(columns[: len(outputs)], dim=1).square().sum(1, keepdim=True).sqrt()
    columns += [size * part.reshape(len(part), -1, part.shape[-1]).square().sum(1).sqrt() for part in inputs]
    return [np.asarray(host(part)) for part in columns]


def _by_unit(module: nn.Module, slope: Tensor) -> Tensor:
    """Slopes of a layer's units in each row, (n, units), or their size over places in an image or a sequence."""
    if slope.ndim == 2:
        return slope
    if slope.ndim > 2 and not isinstance(module, nn.Linear):
        slope = slope.movedim(1, -1)
    return slope.reshape(len(slope), -1, slope.shape[-1]).square().sum(1).sqrt()


# Servers of networks: a start at the declared mean, averages, and how far the weights moved ---------------------------


class NetworkState(NamedTuple):
    """What the next round needs."""

    phi: Array  # (m,)


class OverRounds(NamedTuple):
    """An average over rounds, from which no round starts."""

    phi: Array  # the start's before any round, (m,)
    told: float  # sum of the weights of those rounds, below 1; the start has none


class NetworkInfo(NamedTuple):
    """Diagnostics of this round."""

    change: float  # root mean square of the change of the shared weights


def broadcast(state: Any, client_id: str) -> Message:
    """The shared weights, phi in any state."""
    return {"mean": state.phi}


def with_round(average: OverRounds, phi: Array, smoothing: float) -> OverRounds:
    """Give a round the weight 1 − `smoothing`, and multiply the weights of all earlier ones by `smoothing`."""
    earlier, last = smoothing * average.told, 1.0 - smoothing
    return OverRounds((earlier * average.phi + last * phi) / (earlier + last), earlier + last)


def moved(before: Array, after: Array) -> tuple[float, str]:
    """The change of the weights, and the message of the round."""
    change = root_mean_square_change(before, after)
    moved_by = f"weights moved by {change:.2g} (root mean square) in the last round"
    return change, f"{moved_by}; raise rounds= while scores of held-out rows improve"


def reported(before: Array, after: Array) -> Report:
    """Change and message of the weights as a report."""
    change, message = moved(before, after)
    return Report(NetworkInfo(change), message=message)


def update_server(state: NetworkState, received: Received) -> tuple[NetworkState, Report]:
    """φ is the weighted average of the clients' that replied."""
    if not received.clients:
        return state, Report(NetworkInfo(np.nan))
    phi = average(received.total)
    return NetworkState(phi), reported(state.phi, phi)


def run_away(name: str, weights: Array, before: Array) -> str | None:
    """Why weights are rejected that no training ends at, see `fedppl.nn.train`, or None."""
    largest, least = (float(np.max(np.abs(values), initial=0.0)) for values in (weights, before))
    if largest <= GROWTH * (1.0 + least):
        return None
    return f"{name!r} has weights up to {largest:.3g}, and no training takes them there from {least:.3g}"


# Shared by FedAvg and its variants, beside the functions above.
REPLIES = contracts.Replies[Any](
    lambda state: {"weighted": state.phi.shape, "weight": ()},
    lambda state, reply: not_counted(reply, "weight") or run_away("weighted", average(reply), state.phi),
    contracts.always,
)
ESTIMATE = Point[Any](lambda state: state.phi)
AT_MEAN = contracts.Disclosure(functools.partial(at_points, name="mean"), by_row=open_rows)


# A client's own network when the rounds are over, and draws of it -----------------------------------------------------

_MOST = 100_000_000  # numbers in one array of draws
_SHORT = 0.1  # nats a row, above which as many steps of fine-tuning again would gain too much


def network_result(
    final_message: Callable[[S, str], Message],
    personalise: PersonaliseFn[P],
    shared: Point[S] | None = None,
    **others: Any,
) -> Result[S, P]:
    """How to read the server's state: draws at a client are of its own network; `others` as in `Result`."""

    def draw(client: ClientView, personal: P | None, message: Message, draws: int, chains: int, rng: Rng) -> Draws:
        size, count = client.shared_size + client.local_size, draws * chains
        if count * size > _MOST:
            gigabytes = count * size * 8 / 1e9
            raise DeclarationError(
                f"{count} draws of {size} weights are {gigabytes:.1f} GB. Pass draws= or use fedppl.nn.predict."
            )
        own, unit = personalise(client, personal, message, rng), client.view(network_of)
        w = np.broadcast_to(own.weights, (count, size)).copy()
        if own.subnetwork is not None:
            w[:, own.subnetwork.places] += own.subnetwork.deviations(count, rng)
        shaped = w.reshape(chains, draws, size)
        info = {} if own.subnetwork is not None else {"point_estimate": 1.0}
        return Draws(shaped[:, :, unit.shared_at], shaped[:, :, unit.local_at], info)

    return Result(final_message, draw, shared, family=NetworkResult(personalise), **others)


def tuned(
    client: ClientView, personal: KeptLocal, message: Message, rng: Rng, *, tuning: Tuning, rate: str = "tune_rate"
) -> Own:
    """One client's network: the shared weights, its own, fine-tuned by the setting named `rate`.

    A message with prior variances of the shared weights asks for the mode under those and the declared prior of local
    weights; without them the loss alone counts.
    """
    unit, local, (which, training) = client.view(network_of), fitting_local(client, personal and personal.local), tuning
    if local is None and not set(unit.local_at) <= set(unit.places(which) if which is not None else ()):
        logger.warning(
            'client %s has no local weights of its own, and takes those that all start from; tune="local" trains them',
            client.client_id,
        )
    start = unit.weights(message["mean"], local)
    if which is None:
        return Own(client, start, None)
    free, prior, penalty = unit.places(which), None, None
    if "variance" in message:
        declared = unit.declared.local_prior
        centre = unit.weights(message["mean"], declared.mean)
        precision = unit.weights(1.0 / np.asarray(message["variance"]), declared.precision)
        prior, penalty = (centre[free], precision[free]), declared.penalty if declared.others else None
    w = train(unit, start, free, training, rng, prior=prior, penalty=penalty, rate=rate)
    # The gain does not include priors that are not normal.
    if penalty is None and (gain := further_gain(unit, start, w, prior, free)) > _SHORT:
        logger.warning(
            "client %r: fine-tuning has not converged: further steps would gain %.2g a row; raise %s= or tune_epochs=",
            client.client_id,
            gain,
            rate,
        )
    return Own(client, w, None)
