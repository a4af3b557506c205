"""What all algorithms of this family share: what they need, a unit's first answer and batch, how a state is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedppl.contracts import ClientView, Needs, Report, Result, Sampler
from fedppl.contracts.algorithm import DrawFn
from fedppl.coregional import server
from fedppl.coregional.bound import Globals, Unit, UnitClientState
from fedppl.coregional.result import estimated, final_message, sample
from fedppl.coregional.roles import Roles
from fedppl.coregional.unit import own_fit, random_unit
from fedppl.coregional.view import unit_of
from fedppl.settings import one_of, whole
from fedppl.types import Array, Message, Status

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


# When a coordinate ascent has arrived: what is still to come, in nats, from the ratio of successive gains -------------

_HORIZON = 1000.0  # rounds beyond which nobody looks: a gain that does not shrink counts so often
_KERNELS = 0.05  # of log length-scales: what kernels may have before them
_STILL = 0.02  # nats a round
_LAST = 9  # rounds that are remembered
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
    remaining: float  # nats that the bound is thought to gain yet; NaN where that is not known


def info(bound: float, shared: Globals, kernel_change: float, remaining: float = np.nan) -> AscentInfo:
    """Diagnostics from the bound and what is shared."""
    gamma = shared.inclusion
    selected, undecided = int(np.sum(gamma > 0.5)), len(undecided_functions(gamma))
    return AscentInfo(float(bound), selected, undecided, kernel_change, float(remaining))


def undecided_functions(inclusion: Array) -> list[int]:
    """Latent functions with γ between 0.01 and 0.99."""
    return [int(place) for place in np.flatnonzero(np.abs(inclusion - 0.5) < 0.49)]


def log_prior(role: Roles, kernel: Array) -> float:
    """log p of the kernels' parameters, up to a constant: the steps count it, and the reported bound does not."""
    away = kernel - role.kernel_mean
    return -0.5 * float(away @ role.kernel_precision @ away)


def ratio_of(changes: Array) -> float:
    """By how much a change is smaller than the one before, from the last four rounds; 1 where they do not shrink."""
    size = np.abs(changes[-4:])
    earlier, later = float(size[:2].sum()), float(size[2:].sum())
    if len(size) < 4 or not np.isfinite(earlier + later):
        return 1.0
    return float(np.sqrt(min(later / earlier, 1.0))) if earlier > 0 else float(later > 0)


def still_to_come(changes: Array, ratio: float) -> float:
    """Σ of all changes after the last: Δ r / (1 − r), as of a geometric series (Aitken).

    Examples
    --------
    >>> import numpy as np
    >>> changes = 0.5 ** np.arange(8)
    >>> round(float(still_to_come(changes, ratio_of(changes)) / changes[-1]), 6)
    1.0
    """
    if len(changes) < 2:
        return np.nan
    last = float(np.sum(np.abs(changes[-2:]))) * ratio / (1.0 + ratio)
    ratio = min(ratio, 1.0 - 1.0 / _HORIZON)
    return last * ratio / (1.0 - ratio)


def gained_of_late(values: Sequence[float]) -> float:
    """What the last third of the rounds gained: of an ascent that creeps, about what is left.

    Gains like a power n^(−p−1) leave 1 / (1.5^p − 1) times it, twice it for p = 1. A ratio of gains says too little
    there: it is that of the fast parts.

    Examples
    --------
    >>> gained_of_late([0.0, 4.0, 6.0, 7.0])
    1.0
    """
    if len(values) < 2:
        return np.inf
    return max(float(values[-1] - values[-1 - max(len(values) // 3, 1)]), 0.0)


class Trail(NamedTuple):
    """The last rounds that can be compared: from one to the next nothing but an update."""

    values: Array  # (n,) of the bound with the priors of the kernels' parameters
    kernels: Array  # (n, p) at the end of each


def no_trail(size: int) -> Trail:
    """Before any round."""
    return Trail(np.zeros(0), np.zeros((0, size)))


def longer(trail: Trail, value: float, kernel: Array, *, noisy: bool) -> Trail:
    """The trail with one more round; noisy sums are of other data than those before."""
    if noisy:
        return no_trail(len(kernel))
    return Trail(np.append(trail.values, value)[-_LAST:], np.vstack([trail.kernels, kernel])[-_LAST:])


def nearly_still(trail: Trail) -> bool:
    """Whether the value moved by little in each of the last five rounds."""
    gains = np.diff(trail.values)[-5:]
    return len(gains) == 5 and bool(np.all(np.abs(gains) < _STILL))


class Left(NamedTuple):
    """What is still to come."""

    nats: float  # of the bound with the priors of the kernels' parameters
    kernels: float  # largest change of a log parameter
    ratio: float  # of a gain to the one before

    def small(self, tolerance: float) -> bool:
        """Whether that is little enough to stop."""
        return self.nats < tolerance and self.kernels < _KERNELS


def left_after(trail: Trail, ratios: Array | tuple[float, ...] = ()) -> Left:
    """What is still to come after some rounds; of the gains' ratio and those seen before the largest counts.

    Fast parts of a gain hide slow ones.
    """
    gains, moves = np.diff(trail.values), np.max(np.abs(np.diff(trail.kernels, axis=0)), axis=1, initial=0.0)
    ratio = ratio_of(gains)
    return Left(still_to_come(gains, max(ratio, *ratios, 0.0)), still_to_come(moves, ratio_of(moves)), ratio)


def report(bound: float, shared: Globals, change: float, left: Left, *, arrived: bool, noisy: bool) -> Report:
    """What is said of a round."""
    said = info(bound, shared, change, left.nats)
    if not arrived:
        what = f"about {left.nats:.2g} nats are left" if np.isfinite(left.nats) else "what is left is not known yet"
        if np.isfinite(left.nats) and left.ratio >= 1.0 - 1.0 / _HORIZON:
            what = "what a round gains does not shrink yet"
        if noisy:
            what = "sums of some units or rows are noisy, so that what is left is not known"
        # In the end phase kernels stay for some rounds, which says nothing of whether they have arrived.
        at = f"({bound:.6g}, kernels by {change:.2g} a round)" if change > 0 else f"({bound:.6g})"
        return Report(said, Status.RUNNING, f"the bound moves still {at}: {what}; raise rounds=")
    undecided = undecided_functions(shared.inclusion)
    if shared.inclusion.max(initial=0.0) <= 0.5:
        return Report(said, Status.CONVERGED, f"no latent function is selected: {_NOTHING}")
    if undecided:
        each = ", ".join(f"{place} (inclusion probability {shared.inclusion[place]:.2g})" for place in undecided)
        return Report(said, Status.CONVERGED, f"the data do not decide on latent functions {each}")
    return Report(said, Status.CONVERGED, "")
