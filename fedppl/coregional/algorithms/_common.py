"""What algorithms of this family share: a unit's first answer, how a state is read, and the coordinate ascents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fedppl import gaussian
from fedppl.contracts import ClientView, Needs, Result, Sampler
from fedppl.contracts.algorithm import Details, DrawFn
from fedppl.coregional.bound import Globals, Roles, UnitClientState
from fedppl.coregional.unit import estimated, message_of, own_fit, random_unit, sample
from fedppl.coregional.view import CoregionalUnit, unit_of
from fedppl.settings import one_of, whole
from fedppl.types import Array, Message, Rng

STARTED = "kernels have a start; raise rounds="  # after the round that collects the units' own kernels

P = TypeVar("P")


def _require_unit(client: ClientView) -> None:
    client.view(unit_of)


NEEDS = Needs(_require_unit, kernel=False, indicators=True)
NEEDS_NO_SELECTION = NEEDS._replace(indicators=False)


def batch_size_rule(value: int | None) -> int | None:
    """Check the keyword `batch_size`."""
    return None if value is None else whole("batch_size", value, hint="None takes all rows")


def initial_kernel_rule(value: str) -> str:
    """Check the keyword `initial_kernel`."""
    return one_of("initial_kernel", value, ("median", "prior"))


def batch(count: int, size: int | None, rng: Rng) -> Array | None:
    """Rows of a mini-batch, in order; None where all are taken."""
    return None if size is None or size >= count else np.sort(rng.choice(count, size, replace=False))


def first_answer(
    unit: CoregionalUnit, rng: Rng, initial_kernel: str = "median", *, log_sd: float = 0.0, spread: float = 1.0
) -> tuple[UnitClientState, Message]:
    """Coefficients at the start, and the reply: the unit's size, and the kernel of its own Gaussian process."""
    role = unit.roles
    kernel, log_noise_sd = role.kernel_mean, unit.noise.mean
    if initial_kernel == "median":
        kernel, log_noise_sd = own_fit(unit)
    reply = {"kernel": kernel, "rows": np.array(float(len(unit.response)))}
    return random_unit(role.latents, log_noise_sd, rng, log_sd=log_sd, spread=spread), reply


def first_shapes(role: Roles) -> dict[str, tuple[int, ...]]:
    """Shapes of that reply."""
    return {"kernel": (len(role.kernel),), "rows": ()}


def median_kernel(replies: Mapping[str, Message]) -> Array:
    """Start of the kernels: the median of the units' own kernels, weighted by rows."""
    kernels, rows = (np.array([replies[name][key] for name in sorted(replies)], float) for key in ("kernel", "rows"))
    weights = np.maximum(rows, 1e-300)  # one is above 0, whatever is told
    return np.asarray(np.quantile(kernels, 0.5, axis=0, weights=weights, method="inverted_cdf"))


def reject_negative(reply: Message, *names: str) -> str | None:
    """Why sums of squares or counts are rejected that are negative."""
    negative = {name: least for name in names if (least := float(np.min(reply[name]))) < 0}
    return next((f"{name!r} holds {least:.3g}, which no data give" for name, least in negative.items()), None)


def read(draw: DrawFn[P], *, tests_convergence: bool = False, point: bool = False) -> Result[Any, P]:
    """How a state is read that has `roles`, `where`, `shared`, `joint` (LQ, LQ), the cov(v), and `has_replied` (K,).

    `point`: whether coefficients are estimates.
    """

    def final(state: Any, client_id: str) -> Message:
        is_known = client_id in state.where and bool(state.has_replied[state.where[client_id]])
        packed = gaussian.pack_triangle(state.joint)  # in place of the mean field's covariances
        return message_of(
            state.shared, covariance=None, joint=packed, has_replied=float(is_known), point=1.0 if point else None
        )

    def drawn(state: Any, count: int, rng: Rng) -> Array:
        return sample(state.roles, state.shared, state.joint, count, rng)

    def is_estimate(state: Any) -> Array:
        return estimated(state.roles)

    def details(state: Any) -> Details:
        return {"inclusion_probability": (("latent",), state.shared.inclusion)}

    return Result(final, draw, Sampler(drawn, is_estimate), details, tests_convergence=tests_convergence)


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
