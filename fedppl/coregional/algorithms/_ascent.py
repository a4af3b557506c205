"""What the two coordinate ascents share: settings, a unit's part, the kernels' steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.contracts import ClientUpdate, ClientView, Received, Report
from fedppl.coregional.adam import Adam, adam_step
from fedppl.coregional.algorithms._common import (
    STARTED,
    batch,
    batch_size_rule,
    first_answer,
    info,
    initial_kernel_rule,
    median_kernel,
)
from fedppl.coregional.bound import Curves, Design, Globals, UnitClientState, curves, gradient
from fedppl.coregional.roles import LogScale, Roles
from fedppl.coregional.unit import Own, scaled
from fedppl.coregional.view import unit_of
from fedppl.settings import between, whole
from fedppl.types import Array, Message


class Settings(NamedTuple):
    """What the ascents are built with."""

    kernel_rate: float
    warmup: int
    sweeps: int
    batch_size: int | None
    forgetting: float
    tolerance: float
    initial_kernel: str


def checked(given: Settings) -> Settings:
    """Settings in range."""
    return Settings(
        between("kernel_rate", given.kernel_rate, 0, 1, "[)", "0 fixes the kernels"),
        whole("warmup", given.warmup, 0),
        whole("sweeps", given.sweeps),
        batch_size_rule(given.batch_size),
        between("forgetting", given.forgetting, 0.5, 1, "(]", "or the sums do not settle"),
        between("tolerance", given.tolerance, 0, 1),
        initial_kernel_rule(given.initial_kernel),
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
    """How much of a noisy estimate counts in this round."""
    return float((1.0 + stochastic) ** -settings.forgetting)


def sent(shared: Globals, stage: float, rate: float) -> dict[str, Array]:
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

    state: UnitClientState
    design: Design
    curve: Curves
    shared: Globals
    noise: LogScale  # prior of log σ_m


def update_client(
    client: ClientView,
    personal: UnitClientState | None,
    message: Message,
    rng: np.random.Generator,
    *,
    batch_size: int | None,
    own: Own,
    tell: Callable[[Answer, Message], dict[str, Array]],
) -> ClientUpdate[UnitClientState]:
    """ψ_m at its maximum given what was sent; before there are curves, random coefficients. `tell` says the rest."""
    unit = client.view(unit_of)
    count = len(unit.response)
    known = {"rows": float(count)}
    if float(message["stage"]) == 0:
        first, answer = first_answer(unit, rng, start=own.start)
        return ClientUpdate(scaled(first, unit.roles.slab_prior.mean), answer, known)
    shared, rows = read_globals(message), batch(count, batch_size, rng)
    design = unit.design(shared.kernel, rows)
    if float(message["stage"]) == 1:
        if personal is None:
            state = scaled(own.start(unit.roles.latents, unit.noise.mean, rng), unit.roles.slab_prior.mean)
        else:
            state = personal
        curve = curves(design, shared.mean, shared.covariance)
    else:
        if personal is None:
            known["blank"] = 1.0
        start = unit.noise.mean if personal is None else personal.log_noise_sd
        state, curve = own.best(design, shared, unit.noise, start)
        if rows is not None and personal is not None:
            state = own.towards(personal, state, float(message["rate"]))
    pull = functools.partial(unit.kernel_gradient, shared.kernel, rows=rows)
    slope = gradient(design, shared, state, unit.noise, unit.roles.log_odds, 0.0, pull).kernel
    reply = tell(Answer(state, design, curve, shared, unit.noise), message)
    known["noise_sd"] = float(np.exp(state.log_noise_sd))
    return ClientUpdate(state, {**reply, "kernel_gradient": slope}, known)


def read_globals(message: Message) -> Globals:
    """The shared parameters that a message carries."""
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
    """Who replied so far, and how much of the sums this round's replies are."""

    has_replied: NDArray[np.bool_]  # (K,)
    share: float  # of the units that ever replied
    noisy: bool  # some units, or mini-batches
    rate: float  # by which the round counts


def share_of(
    received: Received, where: Mapping[str, int], has_replied: NDArray[np.bool_], stochastic: int, settings: Settings
) -> Share:
    """What a round's replies are of all; sums alone come only once every unit has replied."""
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
