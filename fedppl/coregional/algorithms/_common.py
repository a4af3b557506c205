"""What algorithms of this family share: a unit's first answer, how a state is read, and the coordinate ascents."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.contracts import ClientUpdate, ClientView, Needs, Received, Report, Result, Sampler
from fedppl.contracts.algorithm import DrawFn
from fedppl.coregional.bound import Globals, Roles, Unit, UnitClientState, gradient
from fedppl.coregional.unit import (
    UnitUpdates,
    estimated,
    final_message,
    own_fit,
    random_unit,
    sample,
    scaled,
    statistics,
)
from fedppl.coregional.view import unit_of
from fedppl.settings import between, one_of, whole
from fedppl.types import Array, Message, Status

STARTED = "kernels have a start; raise rounds="  # after the round that collects the units' own kernels

S = TypeVar("S")
P = TypeVar("P")


def _require_unit(client: ClientView) -> None:
    """Raise DeclarationError where the model is no linear model of coregionalisation."""
    client.view(unit_of)


NEEDS = Needs(_require_unit, kernel=False, indicators=True)
NEEDS_NO_SELECTION = NEEDS._replace(indicators=False)


def batch_size_rule(value: int | None) -> int | None:
    """Check the keyword `batch_size`."""
    return None if value is None else whole("batch_size", value, hint="None takes all rows")


def initial_kernel_rule(value: str) -> str:
    """Check the keyword `initial_kernel`."""
    return one_of("initial_kernel", value, ("median", "prior"))


def batch(count: int, size: int | None, rng: np.random.Generator) -> Array | None:
    """Rows of a mini-batch, in order; None where all are taken."""
    return None if size is None or size >= count else np.sort(rng.choice(count, size, replace=False))


def first_answer(
    unit: Unit,
    rng: np.random.Generator,
    initial_kernel: str = "median",
    *,
    start: Callable[[int, float, np.random.Generator], UnitClientState] = random_unit,
) -> tuple[UnitClientState, Message]:
    """Coefficients at the start, and the reply: the unit's size, and the kernel of its own Gaussian process."""
    role = unit.roles
    kernel, log_noise_sd = role.kernel_mean, unit.noise.mean
    if initial_kernel == "median":
        fitted = own_fit(unit, (role.kernel_mean, role.kernel_precision), role.slab_prior)
        kernel, log_noise_sd = fitted.kernel, float(np.median(fitted.log_noise_sd))
    reply = {"kernel": kernel, "rows": np.array(float(len(unit.response)))}
    return start(role.latents, log_noise_sd, rng), reply


def first_shapes(role: Roles) -> dict[str, tuple[int, ...]]:
    """Shapes of that reply."""
    return {"kernel": (len(role.kernel),), "rows": ()}


def median_kernel(replies: Mapping[str, Message]) -> Array:
    """Start of the kernels: the median of the units' own kernels, weighted by rows."""
    names = sorted(replies)
    kernels = np.stack([np.asarray(replies[name]["kernel"], dtype=float) for name in names])
    return _median(kernels, np.array([float(replies[name]["rows"]) for name in names]))


def _median(values: Array, weights: Array) -> Array:
    """Weighted median of the rows of values (K, p): a unit counts by its number of rows."""
    order = np.argsort(values, axis=0)
    share = np.cumsum(weights[order], axis=0) / max(weights.sum(), 1e-300)
    place = np.argmax(share >= 0.5, axis=0)
    return np.asarray(np.take_along_axis(values, np.take_along_axis(order, place[None], axis=0), axis=0)[0])


def reject_negative(reply: Message, *names: str) -> str | None:
    """Why sums of squares or counts are rejected that are negative."""
    for name in names:
        if np.any(np.asarray(reply[name]) < 0):
            return f"{name!r} holds {np.min(reply[name]):.3g}, which no data give"
    return None


def read(
    role: Callable[[S], Roles],
    shared: Callable[[S], Globals],
    joint: Callable[[S], Array],
    has_replied: Callable[[S], tuple[Mapping[str, int], NDArray[np.bool_]]],
    draw: DrawFn[P],
    *,
    tests_convergence: bool = False,
    point: bool = False,
) -> Result[S, P]:
    """How a state is read, from functions of it: roles, shared parameters, cov(v) (LQ, LQ), and which units replied.

    The last gives each client's row, and by row whether it ever replied, (K,). `point`: whether coefficients are
    estimates.
    """

    def final(state: S, client_id: str) -> Message:
        where, replied = has_replied(state)
        is_known = client_id in where and bool(replied[where[client_id]])
        return final_message(shared(state), joint(state), has_replied=is_known, point=point)

    return Result(
        final,
        draw,
        Sampler(
            lambda state, count, rng: sample(role(state), final(state, ""), count, rng),
            lambda state: estimated(role(state)),
        ),
        lambda state: {"inclusion_probability": (("latent",), shared(state).inclusion)},
        tests_convergence=tests_convergence,
    )


class Adam(NamedTuple):
    """Running moments of a gradient."""

    first: Array
    second: Array
    steps: float


def fresh(size: int) -> Adam:
    """Adam before its first step."""
    return Adam(np.zeros(size), np.zeros(size), 0.0)


def adam_step(x: Array, slope: Array, adam: Adam, rate: float) -> tuple[Array, Adam]:
    """One step uphill (Kingma and Ba, Algorithm 1)."""
    count = adam.steps + 1
    first, second = 0.9 * adam.first + 0.1 * slope, 0.999 * adam.second + 0.001 * slope**2
    step = (first / (1 - 0.9**count)) / (np.sqrt(second / (1 - 0.999**count)) + 1e-8)
    return x + rate * step, Adam(first, second, count)


# What the coordinate ascents share: settings, a unit's part, the kernels' steps ---------------------------------------


class Settings(NamedTuple):
    """Settings of the ascents."""

    kernel_rate: float
    warmup: int
    sweeps: int
    batch_size: int | None
    forgetting: float
    tolerance: float
    initial_kernel: str


def checked(settings: Settings) -> Settings:
    """Settings in range."""
    return Settings(
        between("kernel_rate", settings.kernel_rate, 0, 1, "[)", "0 fixes the kernels"),
        whole("warmup", settings.warmup, 0),
        whole("sweeps", settings.sweeps),
        batch_size_rule(settings.batch_size),
        between("forgetting", settings.forgetting, 0.5, 1, "(]", "or the sums do not settle"),
        between("tolerance", settings.tolerance, 0, 1),
        initial_kernel_rule(settings.initial_kernel),
    )


def prior_globals(role: Roles) -> Globals:
    """The prior, with every latent function in use."""
    latents, points = role.latents, role.points
    return Globals(
        mean=np.zeros((latents, points)),
        covariance=np.broadcast_to(np.eye(points), (latents, points, points)).copy(),
        inclusion=np.ones(latents),
        kernel=role.kernel_mean,
        log_slab_sd=role.slab_prior.mean,
    )


def noisy_rate(stochastic: int, settings: Settings) -> float:
    """The weight of a noisy estimate in this round."""
    return float((1.0 + stochastic) ** -settings.forgetting)


def sent(shared: Globals, stage: float, rate: float) -> dict[str, Array]:
    """The message to every unit; its stage asks for its own kernel (0), a first answer (1) or statistics (2)."""
    return {
        "mean": shared.mean,
        "covariance": gaussian.pack_triangle(shared.covariance),
        "inclusion": shared.inclusion,
        "kernel": shared.kernel,
        "log_slab_sd": np.array(shared.log_slab_sd),
        "stage": np.array(stage),
        "rate": np.array(rate),
    }


def update_client(
    client: ClientView,
    personal: UnitClientState | None,
    message: Message,
    rng: np.random.Generator,
    *,
    batch_size: int | None,
    updates: UnitUpdates,
) -> ClientUpdate[UnitClientState]:
    """ψ_m at its maximum given the message, or random coefficients before there are curves, and its statistics."""
    unit = client.view(unit_of)
    count = len(unit.response)
    info = {"rows": float(count)}
    if float(message["stage"]) == 0:
        first, answer = first_answer(unit, rng, start=updates.start)
        return ClientUpdate(scaled(first, unit.roles.slab_prior.mean), answer, info)
    shared, rows = read_globals(message), batch(count, batch_size, rng)
    design = unit.design(shared.kernel, rows)
    if float(message["stage"]) == 1:
        state = personal or scaled(updates.start(unit.roles.latents, unit.noise.mean, rng), unit.roles.slab_prior.mean)
    else:
        if personal is None:
            info["blank"] = 1.0
        start = unit.noise.mean if personal is None else personal.log_noise_sd
        state, _ = updates.best(design, shared, unit.noise, start)
        if rows is not None and personal is not None:
            state = updates.towards(personal, state, float(message["rate"]))
    pull = functools.partial(unit.kernel_gradient, shared.kernel, rows=rows)
    slope = gradient(design, shared, state, unit.noise, unit.roles.log_odds, 0.0, pull).kernel
    reply = statistics(design, state, unit.noise)
    packed = gaussian.pack_triangle(reply["precision"])
    info["noise_sd"] = float(np.exp(state.log_noise_sd))
    return ClientUpdate(state, {**reply, "precision": packed, "kernel_gradient": slope}, info)


def read_globals(message: Message) -> Globals:
    """The shared parameters in a message."""
    mean, packed, inclusion, kernel = (
        np.asarray(message[name], dtype=float) for name in ("mean", "covariance", "inclusion", "kernel")
    )
    covariance = gaussian.unpack_triangle(packed)
    return Globals(mean, covariance, inclusion, kernel, float(message["log_slab_sd"]))


def kernel_start(shared: Globals, received: Received, bound: float) -> tuple[Globals, Report]:
    """The shared parameters with kernels at the median of the units' own."""
    kernel = median_kernel(received.each)
    change = float(np.max(np.abs(kernel - shared.kernel), initial=0.0))
    return shared._replace(kernel=kernel), Report(info(bound, shared, change), message=STARTED)


class Share(NamedTuple):
    """Which units ever replied, and the share of this round's replies in all."""

    has_replied: NDArray[np.bool_]  # (K,)
    share: float  # of the units that ever replied
    noisy: bool  # sums of some units, or of mini-batches
    rate: float  # weight of the round


def share_of(
    received: Received, where: Mapping[str, int], has_replied: NDArray[np.bool_], stochastic: int, settings: Settings
) -> Share:
    """The share of a round's replies; a round brings sums alone only once every unit has replied."""
    has_replied = has_replied.copy()
    has_replied[[where[client_id] for client_id in received.single()]] = True
    share = received.clients / has_replied.sum()
    noisy = bool(share < 1) or settings.batch_size is not None
    return Share(has_replied, share, noisy, min(share, noisy_rate(stochastic, settings)) if noisy else 1.0)


def kernel_step(
    role: Roles, kernel: Array, moments: Array, slope: Array, rate: float, rounds: int
) -> tuple[Array, Array, float]:
    """One Adam step uphill with the prior of the kernels' parameters, Adam's moments, and the largest change."""
    slope = slope - role.kernel_precision @ (kernel - role.kernel_mean)
    after, (first, second, _) = adam_step(kernel, slope, Adam(moments[0], moments[1], rounds - 1), rate)
    return after, np.stack([first, second]), float(np.max(np.abs(after - kernel), initial=0.0))


# When a coordinate ascent has converged: the gain that remains, in nats, from the ratio of successive gains -----------

_HORIZON = 1000.0  # rounds that count: a gain that does not shrink counts so many times
_KERNELS = 0.05  # change of log length-scales that may remain
_STILL = 0.02  # nats a round
_LAST = 9  # rounds that are kept
_NOTHING = (
    "bring outputs to mean 0 and unit scale by constants that all units agree on, and give length-scales and "
    "inducing points that fit the inputs"
)


class AscentInfo(NamedTuple):
    """Diagnostics of a round of an ascent."""

    bound: float  # Σ V_m + log p(σ_w), scaled up where not all units replied; NaN in the first round
    selected: int  # latent functions with γ > 0.5
    undecided: int  # with γ between 0.01 and 0.99
    kernel_change: float  # largest change of a kernel parameter on the unconstrained space
    remaining: float  # nats that the bound will gain, by an estimate; NaN where there is none


def info(bound: float, shared: Globals, kernel_change: float, remaining: float = np.nan) -> AscentInfo:
    """Diagnostics from the bound and the shared parameters."""
    gamma = shared.inclusion
    selected, undecided = int(np.sum(gamma > 0.5)), len(undecided_functions(gamma))
    return AscentInfo(float(bound), selected, undecided, kernel_change, float(remaining))


def undecided_functions(inclusion: Array) -> list[int]:
    """Latent functions with γ between 0.01 and 0.99."""
    return [int(place) for place in np.flatnonzero(np.abs(inclusion - 0.5) < 0.49)]


def log_prior(role: Roles, kernel: Array) -> float:
    """log p of the kernels' parameters, up to a constant: steps include it, the reported bound does not."""
    away = kernel - role.kernel_mean
    return -0.5 * float(away @ role.kernel_precision @ away)


def ratio_of(changes: Array) -> float:
    """Ratio of a change to the one before, from the last four rounds; 1 where changes do not shrink."""
    size = np.abs(changes[-4:])
    earlier, later = float(size[:2].sum()), float(size[2:].sum())
    if len(size) < 4 or not np.isfinite(earlier + later):
        return 1.0
    return float(np.sqrt(min(later / earlier, 1.0))) if earlier > 0 else float(later > 0)


def remaining_of(changes: Array, ratio: float) -> float:
    """Sum of all future changes, Δ r / (1 − r), as of a geometric series (Aitken).

    Examples
    --------
    >>> import numpy as np
    >>> changes = 0.5 ** np.arange(8)
    >>> round(float(remaining_of(changes, ratio_of(changes)) / changes[-1]), 6)
    1.0
    """
    if len(changes) < 2:
        return np.nan
    last = float(np.sum(np.abs(changes[-2:]))) * ratio / (1.0 + ratio)
    ratio = min(ratio, 1.0 - 1.0 / _HORIZON)
    return last * ratio / (1.0 - ratio)


def gained_of_late(values: Sequence[float]) -> float:
    """Gain of the last third of the rounds, which of a slow ascent is about the gain that remains.

    Where gains fall by a power n^(−p−1), it is 1 / (1.5^p − 1) times this, twice this for p = 1. Their ratio is that of
    the fast parts there, and too small.

    Examples
    --------
    >>> gained_of_late([0.0, 4.0, 6.0, 7.0])
    1.0
    """
    if len(values) < 2:
        return np.inf
    return max(float(values[-1] - values[-1 - max(len(values) // 3, 1)]), 0.0)


class Trail(NamedTuple):
    """The last rounds that can be compared, which differ by updates alone."""

    values: Array  # (n,) of the bound with the priors of the kernels' parameters
    kernels: Array  # (n, p) at the end of each


def no_trail(size: int) -> Trail:
    """Before any round."""
    return Trail(np.zeros(0), np.zeros((0, size)))


def longer(trail: Trail, value: float, kernel: Array, *, noisy: bool) -> Trail:
    """The trail with one more round; noisy sums start it anew, since they are of other data."""
    if noisy:
        return no_trail(len(kernel))
    return Trail(np.append(trail.values, value)[-_LAST:], np.vstack([trail.kernels, kernel])[-_LAST:])


def nearly_still(trail: Trail) -> bool:
    """Whether the value moved by little in each of the last five rounds."""
    gains = np.diff(trail.values)[-5:]
    return len(gains) == 5 and bool(np.all(np.abs(gains) < _STILL))


class Left(NamedTuple):
    """An estimate of the gain and the change that remain."""

    nats: float  # of the bound with the priors of the kernels' parameters
    kernels: float  # largest change of a log parameter
    ratio: float  # of a gain to the one before

    def small(self, tolerance: float) -> bool:
        """Whether both are small enough to stop."""
        return self.nats < tolerance and self.kernels < _KERNELS


def left_after(trail: Trail, ratios: Array | tuple[float, ...] = ()) -> Left:
    """The gain and change that remain, by the largest of several ratios of gains: fast parts hide slow ones."""
    gains, moves = np.diff(trail.values), np.max(np.abs(np.diff(trail.kernels, axis=0)), axis=1, initial=0.0)
    ratio = ratio_of(gains)
    return Left(remaining_of(gains, max(ratio, *ratios, 0.0)), remaining_of(moves, ratio_of(moves)), ratio)


def report(bound: float, shared: Globals, change: float, left: Left, *, arrived: bool, noisy: bool) -> Report:
    """Diagnostics, status and message of a round."""
    diagnostics = info(bound, shared, change, left.nats)
    if not arrived:
        known = np.isfinite(left.nats)
        remaining = f"about {left.nats:.2g} nats are left" if known else "what is left is not known yet"
        if known and left.ratio >= 1.0 - 1.0 / _HORIZON:
            remaining = "what a round gains does not shrink yet"
        if noisy:
            remaining = "sums of some units or rows are noisy, so that what is left is not known"
        # In the end phase kernels stay for some rounds, whether they have converged or not.
        where = f"({bound:.6g}, kernels by {change:.2g} a round)" if change > 0 else f"({bound:.6g})"
        return Report(diagnostics, Status.RUNNING, f"the bound moves still {where}: {remaining}; raise rounds=")
    undecided = undecided_functions(shared.inclusion)
    if shared.inclusion.max(initial=0.0) <= 0.5:
        return Report(diagnostics, Status.CONVERGED, f"no latent function is selected: {_NOTHING}")
    if undecided:
        each = ", ".join(f"{place} (inclusion probability {shared.inclusion[place]:.2g})" for place in undecided)
        return Report(diagnostics, Status.CONVERGED, f"the data do not decide on latent functions {each}")
    return Report(diagnostics, Status.CONVERGED, "")
