"""What all algorithms of this family share: what they need, a unit's first answer and batch, how a state is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fedppl.contracts import ClientView, Needs, Result, Sampler
from fedppl.contracts.algorithm import DrawFn
from fedppl.coregional import server
from fedppl.coregional.bound import Globals, Unit, UnitClientState
from fedppl.coregional.result import estimated, final_message, sample
from fedppl.coregional.roles import Roles
from fedppl.coregional.unit import own_fit, random_unit
from fedppl.coregional.view import unit_of
from fedppl.settings import one_of, whole
from fedppl.types import Array, Message

STARTED = "kernels have a start; raise rounds="  # after the round that asks for the units' own kernels


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
    """Coefficients to start from, and what is told: the unit's size, and the kernel of its own Gaussian process."""
    role = unit.roles
    kernel, log_noise_sd = role.kernel_mean, unit.noise.mean
    if initial_kernel == "median":
        own = own_fit(unit, (role.kernel_mean, role.kernel_precision), role.slab_prior)
        kernel, log_noise_sd = own.kernel, float(np.median(own.log_noise_sd))
    reply = {"kernel": kernel, "rows": np.array(float(len(unit.response)))}
    return start(role.latents, log_noise_sd, rng), reply


def first_shapes(role: Roles) -> dict[str, tuple[int, ...]]:
    """Shapes of that reply."""
    return {"kernel": (len(role.kernel),), "rows": ()}


def median_kernel(replies: Mapping[str, Message]) -> Array:
    """The median of the units' own kernels, weighted by rows, is where the kernels start."""
    names = sorted(replies)
    own = np.stack([np.asarray(replies[name]["kernel"], dtype=float) for name in names])
    return server.median(own, np.array([float(replies[name]["rows"]) for name in names]))


def reject_negative(reply: Message, *names: str) -> str | None:
    """Sums of squares and counts are never negative."""
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
    """How a state is read, from what it holds of the shared parameters, of cov(v) (LQ, LQ), and of who replied.

    That is each client's row, and by row whether it ever replied, (K,). `point`: whether coefficients are estimates.
    """

    def told(state: S, client_id: str) -> Message:
        where, replied = has_replied(state)
        known = client_id in where and bool(replied[where[client_id]])
        return final_message(shared(state), joint(state), has_replied=known, point=point)

    return Result(
        told,
        draw,
        Sampler(
            lambda state, count, rng: sample(role(state), told(state, ""), count, rng),
            lambda state: estimated(role(state)),
        ),
        lambda state: {"inclusion_probability": (("latent",), shared(state).inclusion)},
        tests_convergence=tests_convergence,
    )
