"""What the two coordinate ascents share: settings, a unit's part, the kernels' steps, when to stop."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.coregional import server
from fedppl.coregional.bound import Curves, Design, Globals, Roles, UnitState, curves, gradient
from fedppl.coregional.unit import best_unit, own_fit, random_unit
from fedppl.settings import between, one_of, whole
from fedppl.types import Array, Message, Status

__all__ = [
    "Answer",
    "Settings",
    "checked",
    "is_heard",
    "kernel_start",
    "kernel_step",
    "noisy_rate",
    "own_kernel",
    "own_update",
    "prior_globals",
    "progress",
    "read_globals",
    "sent",
]


_NOTHING = (
    "bring outputs to mean 0 and unit scale by constants that all units agree on, and give length-scales and "
    "inducing points that fit the inputs"
)


class Settings(NamedTuple):
    """What `LMCAscent` and `LMCBlockAscent` are built with."""

    kernel_rate: float
    warmup: int
    sweeps: int
    batch_size: int | None
    forgetting: float
    tolerance: float
    initial_kernel: str


def checked(
    kernel_rate: float,
    warmup: int,
    sweeps: int,
    batch_size: int | None,
    forgetting: float,
    tolerance: float,
    initial_kernel: str,
) -> Settings:
    """Settings in range."""
    return Settings(
        between("kernel_rate", kernel_rate, 0, 1, "[)", "0 fixes the kernels"),
        whole("warmup", warmup, 0),
        whole("sweeps", sweeps),
        None if batch_size is None else whole("batch_size", batch_size, hint="None takes all rows"),
        between("forgetting", forgetting, 0.5, 1, "(]", "or the sums do not settle"),
        between("tolerance", tolerance, 0, 1),
        one_of("initial_kernel", initial_kernel, ("median", "prior")),
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


def is_heard(state: Any, client_id: str) -> bool:
    """Whether a unit's statistics are in what is shared."""
    return client_id in state.where and bool(state.heard[state.where[client_id]])


def noisy_rate(state: Any, settings: Settings) -> float:
    """How much of a noisy estimate counts in this round."""
    return float((1.0 + state.stochastic) ** -settings.forgetting)


def sent(shared: Globals, stage: float, rate: float) -> Message:
    """What every unit is sent, and what is asked: its own kernel (0), a first answer (1), statistics (2)."""
    return {
        "mean": shared.mean,
        "covariance": gaussian.pack_triangle(shared.covariance),
        "inclusion": shared.inclusion,
        "kernel": shared.kernel,
        "log_slab_sd": np.array(shared.log_slab_sd),
        "stage": np.array(stage),
        "rate": np.array(rate),
    }


class Answer(NamedTuple):
    """A unit's own maximum, and where it lies."""

    state: UnitState
    design: Design
    curve: Curves
    shared: Globals
    kernel_gradient: Array  # (p,) of V_m
    info: Mapping[str, float]


def own_kernel(view: Any, rng: np.random.Generator) -> tuple[UnitState, Message, Mapping[str, float]]:
    """The first answer: the kernel of the unit's own Gaussian process, and coefficients to start from."""
    role, rows = view.roles, float(len(view.response))
    own = own_fit(view, (role.kernel_mean, role.kernel_precision), role.slab_prior)
    start = random_unit(role.latents, float(np.median(own.log_noise_sd)), rng)
    return start, {"kernel": own.kernel, "rows": np.array(rows)}, {"rows": rows}


def own_update(view: Any, personal: Any, message: Message, rng: np.random.Generator, batch_size: int | None) -> Answer:
    """ψ_m at its maximum given what was sent; before there are curves, random coefficients."""
    shared, count = read_globals(message), len(view.response)
    rows = None
    if batch_size is not None and batch_size < count:
        rows = np.sort(rng.choice(count, batch_size, replace=False))
    design = view.design(shared.kernel, rows)
    info = {"rows": float(count)}
    if float(message["stage"]) == 1:
        state = personal if personal is not None else random_unit(view.roles.latents, view.noise.mean, rng)
        curve = curves(design, shared.mean, shared.covariance)
    else:
        if personal is None:
            info["blank"] = 1.0
        start = view.noise.mean if personal is None else personal.log_noise_sd
        state, curve = best_unit(design, shared, view.noise, start)
        if rows is not None and personal is not None:
            state = _part_of_the_way(personal, state, float(message["rate"]))
    pull = functools.partial(view.kernel_gradient, shared.kernel, rows=rows)
    slope = gradient(design, shared, state, view.noise, view.roles.log_odds, 0.0, pull).kernel
    return Answer(state, design, curve, shared, slope, {**info, "noise_sd": float(np.exp(state.log_noise_sd))})


def read_globals(message: Message) -> Globals:
    """The shared parameters that a message carries."""
    mean, packed, inclusion, kernel = (
        np.asarray(message[name], dtype=float) for name in ("mean", "covariance", "inclusion", "kernel")
    )
    covariance = gaussian.unpack_triangle(packed)
    return Globals(mean, covariance, inclusion, kernel, float(message["log_slab_sd"]))


def _part_of_the_way(before: UnitState, after: UnitState, rate: float) -> UnitState:
    """A natural-gradient step of q(w_m), and of log σ_m, towards what a mini-batch alone would have."""
    precision = (1 - rate) / before.variance + rate / after.variance
    linear = (1 - rate) * before.mean / before.variance + rate * after.mean / after.variance
    log_noise_sd = (1 - rate) * before.log_noise_sd + rate * after.log_noise_sd
    return UnitState(linear / precision, 1.0 / precision, log_noise_sd)


def kernel_start(state: Any, replies: Mapping[str, Message]) -> tuple[Any, float]:
    """The median of the units' own kernels is where the kernels start."""
    names = sorted(replies)
    own = np.stack([np.asarray(replies[name]["kernel"], dtype=float) for name in names])
    rows = np.array([float(replies[name]["rows"]) for name in names])
    kernel = server.median(own, rows)
    change = float(np.max(np.abs(kernel - state.shared.kernel), initial=0.0))
    shared = state.shared._replace(kernel=kernel)
    return state._replace(shared=shared, message="kernels have a start; raise rounds="), change


def kernel_step(state: Any, slope: Array, rate: float) -> tuple[Array, Array]:
    """One Adam step uphill, with the prior of the kernels' parameters."""
    role, kernel = state.roles, state.shared.kernel
    slope = slope - role.kernel_precision @ (kernel - role.kernel_mean)
    first, second = 0.9 * state.adam[0] + 0.1 * slope, 0.999 * state.adam[1] + 0.001 * slope**2
    count = max(state.number - 1, 1)
    step = (first / (1 - 0.9**count)) / (np.sqrt(second / (1 - 0.999**count)) + 1e-8)
    return kernel + rate * step, np.stack([first, second])


def progress(state: Any, bound: float, change: float, tolerance: float, *, begun: bool) -> dict[str, Any]:
    """Whether bound, kernels and selection have come to rest, as the fields of the state that say so."""
    decided = bool(np.all(np.abs(state.shared.inclusion - 0.5) > 0.49))
    still = abs(bound - state.bound) < tolerance * (1.0 + abs(bound)) and change < 1e-2
    quiet = state.quiet + 1 if still and decided and begun else 0
    done = quiet >= 5 and bool(np.all(state.heard))
    message = (
        f"the bound moves still ({bound:.6g}, kernels by {change:.2g} a round); raise rounds= or lower kernel_rate="
    )
    if done:
        nothing = state.shared.inclusion.max(initial=0.0) <= 0.5
        message = f"no latent function is selected: {_NOTHING}" if nothing else ""
    return {
        "bound": bound,
        "quiet": quiet,
        "status": (Status.CONVERGED if done else Status.RUNNING).value,
        "message": message,
    }
