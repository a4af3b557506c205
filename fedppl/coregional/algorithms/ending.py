"""When a coordinate ascent has converged, by the gain that remains in nats, and how it ends once it hardly moves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedppl.contracts import Report
from fedppl.contracts.algorithm import first_ending
from fedppl.coregional.bound import Globals, Roles, flatten, unflatten
from fedppl.types import Array, Status

_HORIZON = 1000.0  # rounds that count: a gain that does not shrink counts so many times
_KERNELS = 0.05  # change of log length-scales that may remain
_STILL = 0.02  # nats a round
_LAST = 9  # rounds that are kept
_NOTHING = "bring outputs to mean 0 and unit scale, and choose length-scales and inducing points that fit the inputs"


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
    selected, undecided = int(np.sum(gamma > 0.5)), len(_undecided(gamma))
    return AscentInfo(float(bound), selected, undecided, kernel_change, float(remaining))


def largest(changes: Array) -> float:
    """Largest size of some changes; 0 of none."""
    return float(np.max(np.abs(changes), initial=0.0))


def _undecided(inclusion: Array) -> list[int]:
    """Latent functions with γ between 0.01 and 0.99."""
    return np.flatnonzero(np.abs(inclusion - 0.5) < 0.49).tolist()


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
    """Sum of all future changes, Δ r / (1 − r), as of a geometric series (Aitken)."""
    if len(changes) < 2:
        return np.nan
    last = float(np.sum(np.abs(changes[-2:]))) * ratio / (1.0 + ratio)
    ratio = min(ratio, 1.0 - 1.0 / _HORIZON)
    return last * ratio / (1.0 - ratio)


def gained_of_late(values: Sequence[float]) -> float:
    """Gain of the last third of the rounds, which of a slow ascent is about the gain that remains.

    Where gains fall by a power n^(−p−1), it is 1 / (1.5^p − 1) times this, twice this for p = 1. Their ratio is that of
    the fast parts there, and too small.
    """
    if len(values) < 2:
        return np.inf
    return max(float(values[-1] - values[-1 - max(len(values) // 3, 1)]), 0.0)


class Trail(NamedTuple):
    """The last rounds that can be compared, which differ by updates alone."""

    values: Sequence[float] = ()  # of the bound with the priors of the kernels' parameters
    kernels: Sequence[Array] = ()  # at the end of each


def longer(trail: Trail, value: float, kernel: Array) -> Trail:
    """The trail with one more round."""
    return Trail((*trail.values, value)[-_LAST:], (*trail.kernels, kernel)[-_LAST:])


def nearly_still(trail: Trail) -> bool:
    """Whether the value moved by little in each of the last five rounds."""
    gains = np.diff(trail.values)[-5:]
    return len(gains) == 5 and bool(np.all(np.abs(gains) < _STILL))


class Left(NamedTuple):
    """An estimate of the gain and the change that remain."""

    nats: float  # of the bound with the priors of the kernels' parameters
    kernels: float  # largest change of a log parameter
    ratio: float  # of a gain to the one before


def left_after(trail: Trail, ratios: Array | tuple[float, ...] = ()) -> Left:
    """The gain and change that remain, by the largest of several ratios of gains: fast parts hide slow ones."""
    gains, moves = np.diff(trail.values), np.array([largest(b - a) for a, b in itertools.pairwise(trail.kernels)])
    ratio = ratio_of(gains)
    return Left(remaining_of(gains, max(ratio, *ratios, 0.0)), remaining_of(moves, ratio_of(moves)), ratio)


def report(bound: float, shared: Globals, change: float, left: Left, *, arrived: bool, noisy: bool) -> Report:
    """Diagnostics, status and message of a round."""
    undecided, none = _undecided(shared.inclusion), shared.inclusion.max(initial=0.0) <= 0.5
    each = ", ".join(f"{place} (inclusion probability {shared.inclusion[place]:.2g})" for place in undecided)
    status, message = first_ending(
        (arrived and none, Status.CONVERGED, f"no latent function is selected: {_NOTHING}"),
        (arrived and undecided, Status.CONVERGED, f"the data do not decide on latent functions {each}"),
        (arrived, Status.CONVERGED, ""),
        (noisy, Status.RUNNING, "sums of some units or rows are noisy, so that what is left is not known"),
        (not np.isfinite(left.nats), Status.RUNNING, "what is left is not known yet"),
        (left.ratio >= 1.0 - 1.0 / _HORIZON, Status.RUNNING, "what a round gains does not shrink yet"),
        (True, Status.RUNNING, f"about {left.nats:.2g} nats are left"),
    )
    if not arrived:
        # In the end phase kernels stay for some rounds, whether they have converged or not.
        where = f"({bound:.6g}, kernels by {change:.2g} a round)" if change > 0 else f"({bound:.6g})"
        message = f"the bound moves still {where}: {message}; raise rounds="
    return Report(info(bound, shared, change, left.nats), status, message)


# The end, once the bound hardly moves: quasi-Newton steps of the kernels, and extrapolation of all else ---------------

# The inducing variables depend on the kernel, so that a step of the kernel given them is short, and alternating steps
# are slow. Here the kernels stay for some rounds until all else has converged. Then their slope is that of the bound
# maximised over all else, and a step along it may be long (BFGS). Where all else converges slowly, its limit has a
# closed form from the steps of some rounds in a row: near the end a round is nearly linear, and errors shrink by its
# eigenvalues (reduced rank extrapolation, Sidi 2017, section 2). The server computes all of it from the same sums.

_SETTLED, _CYCLE = 3, 8  # rounds before a step of the kernels is judged, and before all else is extrapolated
_SEEN = 3  # last cycles, of whose ratios of gains the largest counts
_FIRST, _FAR = 0.05, 0.3  # largest change of a kernel's log parameter, in the first step and in any
_SHORTEST_POLISHED = 1e-4
_ROUNDING = 1e-9  # of the value: a smaller fall is rounding
_WILD = 1e3  # prior sds or logs: a longer step is refused


class Round(NamedTuple):
    """The result of a round."""

    sent: Globals
    best: Globals  # given the sums, at the kernels that were sent
    value: float  # at the best
    slope: Array  # of the value in the kernels' parameters


class Cycle(NamedTuple):
    """Successive rounds with the same kernels, and what units are sent next."""

    path: tuple[Globals, ...]  # shared parameters
    trail: Trail = Trail()  # their values
    slope: Array | None = None  # in the last of them
    trial: Globals | None = None  # a proposal that units are sent in place of the shared parameters
    judging: bool = False  # whether the proposal is a step of the kernels


class Kernels(NamedTuple):
    """The steps of the kernels."""

    stand: Round | None = None  # before the last of them
    curvature: Array | None = None  # (p, p) of minus the value in the kernels' parameters
    radius: float = _FIRST


class Rest(NamedTuple):
    """The state of an ascent that hardly moves."""

    cycle: Cycle
    kernels: Kernels = Kernels()
    ratios: tuple[float, ...] = ()  # of gains at the ends of the last cycles
    reached: float = np.nan  # value at the end of the last cycle, if only an extrapolation followed
    values: tuple[float, ...] = ()  # of all accepted rounds so far
    refused: bool = False  # whether the last extrapolation was
    left: Left = Left(np.nan, np.nan, 1.0)
    arrived: bool = False


def polished(rest: Rest, role: Roles, result: Round, tolerance: float, *, fixed: bool) -> tuple[Rest, Globals | None]:
    """The state after one more round, and the new shared parameters; None where the old ones stay."""
    cycle = rest.cycle
    if cycle.trial is not None and not cycle.judging:  # an extrapolation
        last = cycle.trail.values[-1]
        if not result.value >= last - _ROUNDING * (1.0 + abs(last)):
            return rest._replace(cycle=Cycle(cycle.path[-1:]), refused=True), None
        cycle, rest = Cycle((result.sent,)), rest._replace(refused=False)
    trail, before = longer(cycle.trail, result.value, result.best.kernel), cycle.slope
    cycle = cycle._replace(path=(*cycle.path, result.best), trail=trail, slope=result.slope)
    rest = rest._replace(cycle=cycle)
    if cycle.judging:
        rest = _judged_step(rest, result)
        cycle = rest.cycle
        if cycle.trial is not None or len(cycle.trail.values) == 0:
            return rest, None
    step, curvature = _newton(rest.kernels, role, result, fixed=fixed)
    creeping = left_after(trail, rest.ratios)
    # Twice the gain of a quadratic, since the curvature is an estimate.
    gain = float(result.slope @ step)
    rest = rest._replace(values=(*rest.values, result.value))
    # Both estimates miss slow parts beside fast ones, and a curvature that is too large.
    nats = max(creeping.nats + gain, gained_of_late(rest.values))
    left = Left(nats, largest(step), creeping.ratio)
    small, count = nats < tolerance and left.kernels < _KERNELS, len(trail.values)
    if count >= _SETTLED and rest.kernels.stand is None:
        rest = rest._replace(kernels=rest.kernels._replace(curvature=curvature))
    if count > 4:  # before, there is no ratio of gains
        rest = rest._replace(left=left)
    steady = before is not None and np.max(np.abs(result.slope - before)) <= 0.1 * np.max(np.abs(result.slope))
    if count >= _SETTLED and steady and not small and (gain > creeping.nats or rest.refused):
        # A step of the kernels, once all else has converged.
        length = min(1.0, rest.kernels.radius / max(largest(step), 1e-300))
        proposal = result.best._replace(kernel=result.best.kernel + length * step)
        kernels = Kernels(result, curvature, rest.kernels.radius)
        cycle = Cycle((proposal,), trial=proposal, judging=True)
        return rest._replace(cycle=cycle, kernels=kernels, reached=np.nan, refused=False), result.best
    if count <= _CYCLE:
        return rest, result.best
    arrived = small and result.value - rest.reached < tolerance
    ratios, trial = (*rest.ratios, left.ratio)[-_SEEN:], extrapolated(cycle.path, role)
    cycle = Cycle((result.best,)) if trial is None else cycle._replace(trial=trial)
    return rest._replace(cycle=cycle, reached=result.value, ratios=ratios, arrived=arrived), result.best


def _newton(kernels: Kernels, role: Roles, result: Round, *, fixed: bool) -> tuple[Array, Array | None]:
    """The kernels' step to the maximum by an estimate of the curvature, which starts from the slope; and that."""
    if fixed:
        return np.zeros_like(result.slope), None
    stand, curvature, _ = kernels
    if curvature is None:
        curvature = np.diag(np.maximum(np.abs(result.slope) / _FIRST, np.diag(role.kernel_precision)))
    elif stand is not None:
        curvature = _learnt(curvature, result.best.kernel - stand.best.kernel, stand.slope - result.slope)
    return np.asarray(np.linalg.solve(curvature, result.slope), dtype=float), curvature


def _judged_step(rest: Rest, result: Round) -> Rest:
    """Accept a step of the kernels if it raised the value once all else has converged; else go back with a shorter."""
    cycle, kernels, stand, values = rest.cycle, rest.kernels, rest.kernels.stand, rest.cycle.trail.values
    assert stand is not None
    step = result.best.kernel - stand.best.kernel
    length, expected = largest(step), float(step @ stand.slope)
    if len(values) < _SETTLED:
        return rest._replace(cycle=cycle._replace(trial=result.best))
    if result.value >= stand.value + 1e-4 * expected:
        radius = min(2.0 * kernels.radius, _FAR) if length > 0.9 * kernels.radius else kernels.radius
        cycle = cycle._replace(trial=None, judging=False)
        return rest._replace(cycle=cycle, kernels=kernels._replace(radius=radius))
    if len(values) <= _CYCLE and result.value + _CYCLE * (values[-1] - values[-2]) > stand.value:
        return rest._replace(cycle=cycle._replace(trial=result.best))  # all else still converges
    shorter = kernels._replace(stand=None, radius=max(0.3 * length, _SHORTEST_POLISHED))
    return rest._replace(cycle=Cycle((stand.best,)), kernels=shorter)


def _learnt(curvature: Array, step: Array, turn: Array) -> Array:
    """BFGS, damped where the slope did not fall along the step (Nocedal and Wright 2006, procedure 18.2)."""
    along = curvature @ step
    expected, observed = float(step @ along), float(step @ turn)
    if observed < 0.2 * expected:
        share = 0.8 * expected / (expected - observed)
        turn = share * turn + (1.0 - share) * along
    return np.asarray(curvature - np.outer(along, along) / expected + np.outer(turn, turn) / float(step @ turn))


def extrapolated(path: Sequence[Globals], role: Roles) -> Globals | None:
    """The limit of a path of successive shared parameters, as if rounds were linear; None where there is none.

    Steps are measured in posterior sds of means and in logs of variances. The kernels are the same throughout, and the
    selection stays, since it follows from the rest.
    """
    root, x = np.linalg.cholesky(path[-1].covariance), np.stack([flatten(shared) for shared in path])
    white = [np.linalg.solve(root, shared.mean[:, :, None]).ravel() for shared in path]
    sizes = [0.5 * np.log(np.einsum("lqq->lq", shared.covariance)).ravel() for shared in path]
    scaled = np.column_stack([white, sizes, [shared.log_slab_sd for shared in path]])
    turns = np.diff(scaled, n=2, axis=0)
    weight, *_ = np.linalg.lstsq(turns.T, np.diff(scaled, axis=0)[-1], rcond=1e-8)
    step = -np.diff(x, axis=0)[1:].T @ weight
    if not np.all(np.isfinite(step)) or np.max(np.abs(step)) > _WILD:
        return None
    return unflatten(x[-1] + step, role)._replace(inclusion=path[-1].inclusion, kernel=path[-1].kernel)
