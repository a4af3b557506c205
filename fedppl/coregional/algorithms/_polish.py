"""The end of a coordinate ascent, once the bound is nearly at rest: quasi-Newton steps of the kernels, extrapolation.

The inducing variables of a Gaussian process lie where its kernel has them, so that a step of the kernel alone is short,
and to take turns with the rest creeps. Here the kernels stay for some rounds while all else settles. Then their slope
is that of the bound maximised over all else, and a step along it may be long (BFGS). Where all else creeps, its limit
has a closed form from the steps of some rounds in a row: near the end a round is nearly linear, and errors shrink by
its eigenvalues (reduced rank extrapolation, Sidi 2017, section 2). The server knows all of it from the same sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedppl.coregional.adam import flatten, unflatten
from fedppl.coregional.algorithms._common import Left, Trail, gained_of_late, left_after, longer, no_trail
from fedppl.coregional.bound import Globals
from fedppl.coregional.roles import Roles
from fedppl.types import Array

_SETTLED, _CYCLE = 3, 8  # rounds before a step of the kernels is judged, and before all else is extrapolated
_SEEN = 3  # ratios of gains, of the last cycles, of which the largest counts
_FIRST, _FAR = 0.05, 0.3  # what a log parameter of a kernel moves at once, in the first step and at most
_SHORTEST = 1e-4
_ROUNDING = 1e-9  # of the value: a fall by less is none
_WILD = 1e3  # prior sds or logs: a step that is none


class Round(NamedTuple):
    """What came of a round."""

    sent: Globals
    best: Globals  # given the sums, at the kernels that were sent
    value: float  # there
    slope: Array  # of the value in the kernels' parameters


class Stand(NamedTuple):
    """Where the kernels have got to: what a step of theirs is judged by."""

    shared: Globals
    value: float
    slope: Array


class Rest(NamedTuple):
    """An ascent that is nearly at rest."""

    path: tuple[Globals, ...]  # shared parameters of successive rounds with the same kernels
    trail: Trail  # what came of them
    slope: Array | None  # in the last of them
    trial: Globals | None  # what units are asked to answer in place of the shared parameters
    stand: Stand | None  # before the last step of the kernels
    judging: bool  # whether that step is being tried
    curvature: Array | None  # (p, p) of minus the value in the kernels' parameters
    radius: float  # of a step of the kernels
    ratios: tuple[float, ...]  # of gains at the ends of the last cycles
    reached: float  # value at the end of the last cycle, if nothing but an extrapolation came since
    values: tuple[float, ...]  # of all rounds so far that stand
    refused: bool  # whether the last extrapolation was
    left: Left
    arrived: bool


def at_rest(shared: Globals) -> Rest:
    """The first such state."""
    return Rest(
        path=(shared,),
        trail=no_trail(len(shared.kernel)),
        slope=None,
        trial=None,
        stand=None,
        judging=False,
        curvature=None,
        radius=_FIRST,
        ratios=(),
        reached=np.nan,
        values=(),
        refused=False,
        left=Left(np.nan, np.nan, 1.0),
        arrived=False,
    )


def polished(rest: Rest, role: Roles, came: Round, tolerance: float, *, fixed: bool) -> tuple[Rest, Globals | None]:
    """The state after one more round, and the shared parameters reached; None where those before stand."""
    if rest.trial is not None and not rest.judging:  # an extrapolation
        last = rest.trail.values[-1]
        if not came.value >= last - _ROUNDING * (1.0 + abs(last)):
            return _from(rest, rest.path[-1])._replace(refused=True), None
        rest = _from(rest, came.sent)._replace(refused=False)
    trail = longer(rest.trail, came.value, came.best.kernel, noisy=False)
    before, rest = rest.slope, rest._replace(path=(*rest.path, came.best), trail=trail, slope=came.slope)
    if rest.judging:
        rest = _judged_step(rest, came)
        if rest.trial is not None or len(rest.trail.values) == 0:
            return rest, None
    step, rest = _newton(rest, role, came, fixed=fixed)
    creeping = left_after(rest.trail, rest.ratios)
    # Twice what a quadratic has: the curvature is an estimate.
    gain = float(came.slope @ step)
    rest = rest._replace(values=(*rest.values, came.value))
    # Both estimates are blind to slow parts beside fast ones, and to a curvature that is too large.
    nats = max(creeping.nats + gain, gained_of_late(rest.values))
    left = Left(nats, float(np.max(np.abs(step), initial=0.0)), creeping.ratio)
    small, count = left.small(tolerance), len(trail.values)
    if count > 4:  # before, nothing is known of the gains' ratio
        rest = rest._replace(left=left)
    steady = before is not None and np.max(np.abs(came.slope - before)) <= 0.1 * np.max(np.abs(came.slope))
    if count >= _SETTLED and steady and not small and (gain > creeping.nats or rest.refused):
        return _stepped(rest, came, step), came.best
    if count <= _CYCLE:
        return rest, came.best
    arrived = small and came.value - rest.reached < tolerance
    ratios, trial = (*rest.ratios, left.ratio)[-_SEEN:], extrapolated(rest.path, role)
    rest = rest._replace(reached=came.value, ratios=ratios, arrived=arrived)
    return (rest._replace(trial=trial) if trial is not None else _from(rest, came.best)), came.best


def _from(rest: Rest, shared: Globals) -> Rest:
    """Rounds anew from these shared parameters, with nothing under trial."""
    return rest._replace(path=(shared,), trail=no_trail(len(shared.kernel)), slope=None, trial=None, judging=False)


def _newton(rest: Rest, role: Roles, came: Round, *, fixed: bool) -> tuple[Array, Rest]:
    """The kernels' step to the maximum by the curvature known so far, which begins as if a step were the first."""
    if fixed:
        return np.zeros_like(came.slope), rest
    curvature = rest.curvature
    if curvature is None:
        curvature = np.diag(np.maximum(np.abs(came.slope) / _FIRST, np.diag(role.kernel_precision)))
        rest = rest._replace(curvature=curvature if len(rest.trail.values) >= _SETTLED else None)
    elif rest.stand is not None:
        curvature = _learnt(curvature, came.best.kernel - rest.stand.shared.kernel, rest.stand.slope - came.slope)
    return np.asarray(np.linalg.solve(curvature, came.slope), dtype=float), rest


def _stepped(rest: Rest, came: Round, step: Array) -> Rest:
    """Ask for a step of the kernels, from where all else has settled, and learn from the one before."""
    if rest.stand is not None and rest.curvature is not None:
        moved, turned = came.best.kernel - rest.stand.shared.kernel, rest.stand.slope - came.slope
        rest = rest._replace(curvature=_learnt(rest.curvature, moved, turned))
    length = max(float(np.max(np.abs(step))), 1e-300)
    trial = came.best._replace(kernel=came.best.kernel + min(1.0, rest.radius / length) * step)
    stand = Stand(came.best, came.value, came.slope)
    return _from(rest, trial)._replace(trial=trial, stand=stand, judging=True, reached=np.nan, refused=False)


def _judged_step(rest: Rest, came: Round) -> Rest:
    """Keep a step of the kernels that raised the value once all else has settled; else go back, with a shorter one."""
    stand, values = rest.stand, rest.trail.values
    assert stand is not None
    step = came.best.kernel - stand.shared.kernel
    length, promised = float(np.max(np.abs(step))), float(step @ stand.slope)
    if len(values) < _SETTLED:
        return rest._replace(trial=came.best)
    if came.value >= stand.value + 1e-4 * promised:
        radius = min(2.0 * rest.radius, _FAR) if length > 0.9 * rest.radius else rest.radius
        return rest._replace(trial=None, judging=False, radius=radius)
    if len(values) <= _CYCLE and came.value + _CYCLE * (values[-1] - values[-2]) > stand.value:
        return rest._replace(trial=came.best)  # it is still on its way
    return _from(rest, stand.shared)._replace(stand=None, radius=max(0.3 * length, _SHORTEST))


def _learnt(curvature: Array, step: Array, turn: Array) -> Array:
    """BFGS, damped where the slope did not fall along the step (Nocedal and Wright 2006, procedure 18.2)."""
    along = curvature @ step
    expected, found = float(step @ along), float(step @ turn)
    if found < 0.2 * expected:
        share = 0.8 * expected / (expected - found)
        turn = share * turn + (1.0 - share) * along
    return np.asarray(curvature - np.outer(along, along) / expected + np.outer(turn, turn) / float(step @ turn))


def extrapolated(path: Sequence[Globals], role: Roles) -> Globals | None:
    """The limit of a path of successive shared parameters, as if rounds were linear; None where there is none.

    Steps are weighed by what they are worth: means in posterior sds, variances on the log scale. Kernels are the same
    throughout, and the selection stays, which follows from the rest.
    """
    x, worth = np.stack([flatten(shared) for shared in path]), _worth(path)
    turns = np.diff(worth, n=2, axis=0)
    weight, *_ = np.linalg.lstsq(turns.T, np.diff(worth, axis=0)[-1], rcond=1e-8)
    step = -np.diff(x, axis=0)[1:].T @ weight
    if not np.all(np.isfinite(step)) or np.max(np.abs(step)) > _WILD:
        return None
    return unflatten(x[-1] + step, role)._replace(inclusion=path[-1].inclusion, kernel=path[-1].kernel)


def _worth(path: Sequence[Globals]) -> Array:
    """Coordinates (n, d) in which steps are measured."""
    root = np.linalg.cholesky(path[-1].covariance)

    def one(shared: Globals) -> Array:
        white = np.linalg.solve(root, shared.mean[:, :, None]).ravel()
        sizes = 0.5 * np.log(np.einsum("lqq->lq", shared.covariance)).ravel()
        return np.concatenate([white, sizes, [shared.log_slab_sd]])

    return np.stack([one(shared) for shared in path])
