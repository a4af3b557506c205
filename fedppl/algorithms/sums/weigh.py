r"""The posterior about a mode, from sums of log f_k at points: a surrogate of the sum is sampled, and held against it.

.. math:: E[h] \approx E_{\hat s}[h] + \sum_i (w_i - c_i)\, h(\varphi_i), \qquad
          w_i \propto \frac{p(\varphi_i \mid y)}{g(\varphi_i)}, \quad c_i \propto \frac{\hat s(\varphi_i)}{g(\varphi_i)}

A pilot of points of wide t's tells the sum roughly. Then, stage by stage: a surrogate through all values so far, points
g of it and of a wide t, and values there. Where the surrogate of the next stage, which goes through these too, has the
moments that weights give, and the weights are to be trusted, it is the posterior.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from fedppl import gaussian
from fedppl.algorithms.ep.why import uncertain
from fedppl.algorithms.sums import said
from fedppl.algorithms.sums.phases import (
    FEW,
    MANY,
    MOST_SHOWN,
    About,
    Batch,
    Care,
    Known,
    Rule,
    Sampled,
    Shape,
    Told,
    Weighed,
    Weighing,
    care_of,
)
from fedppl.algorithms.sums.stages import (
    BY_CHANCE,
    Estimate,
    Unit,
    chance_of,
    chance_of_draws,
    declared,
    moments_of,
    pooled,
    sizes,
    tilted,
    widens,
)
from fedppl.gaussian import Gaussian
from fedppl.numerics import importance, region, surrogate
from fedppl.numerics.importance import (
    effective_size,
    normalise,
    quadratic_terms,
    skewness,
    standard_normal,
    weighted_moments,
)
from fedppl.numerics.proposals import Proposal, beyond, has_heavy_tails
from fedppl.numerics.reweighting import MOST_ERROR, MOST_SECOND_K, Reweighted, second_k
from fedppl.numerics.smooth import smooth_over
from fedppl.numerics.surrogate import Drawn, Places
from fedppl.types import Array, as_declared

_DEFENCE = 0.25  # of a stage's points, which are the candidates' own
_FEWEST = 10  # effective draws for each coordinate, without which a surrogate tells no covariance
_DRAWN = 512  # candidates of a scramble to choose from
_BY_DRAWS = 0.008  # posterior sds, of a mean or an sd, that draws of a surrogate may be off by before there are more
_SKEWED = -0.5  # skewness of a scale's logarithm from which the scale itself is the coordinate
_LOG = "log__"
_ENOUGH = 0.012  # error of a mean or an sd, in posterior sds, with which no further stage is asked for
_MOST_OFF = 6.0  # standard errors by which draws of a surrogate may be off to be put right, and not to be redone
_PUT_RIGHT = 0.1  # posterior sds that they may be off by at least, where so many points are effective as to tell it
_MOST_OF_MANY = 0.03  # standard error of many moments, of which the largest error is some times that
_EFFECTIVE, _LEAST = 0.3, 0.1  # of a stage's points, the least with which none is; and with which any are trusted
_EVEN = 0.95  # effective part of points whose weights have no tail to speak of
_LOST = 0.01  # share of the points that may be without a value
NOISE = 0.3  # sd, log units, of what is not known of the sum of log f_k over the points
_MOVED = 0.05  # posterior sds that it may move a mean or a log sd by
_STAGES, _PILOTS = 6, 2
_LATE = 3  # stage from which an error is not of few points above all
_COPIES = 0.2  # effective part of candidates below which draws are moved on
_STEPS = 24  # that they are moved by
_APART = 1000  # between the streams of pilots and stages
_NORMALS = 512  # draws of a scramble of a posterior that is normal
_NORMAL = 1e-6  # log units, to which a quadratic tells all values where the posterior is normal


class Judged(NamedTuple):
    """What a stage came to."""

    phase: Weighing | Weighed
    message: str


class Answer(NamedTuple):
    """Sums of clients' values at the points of a batch."""

    values: Array  # (S,) NaN where a client has none
    left_out: Array  # (T,) at the known ones
    errors: Array  # (T,)
    squares: Array  # (T,)
    constants: Array  # (2,)
    is_proper: bool


def begin(
    q: Gaussian, prior: Gaussian, labels: tuple[str, ...], count: int, stream: int, *, many: bool = False
) -> Weighing:
    """The pilot about a Gaussian; of `many` clients what Laplace leaves out is asked for at few points."""
    m = len(q.linear)
    # a quadratic in all coordinates has to be told by it
    count = -(-max(count, (m + 1) * (m + 2)) // region.SCRAMBLES)
    nothing, folded = np.zeros((0, m)), np.zeros(0, dtype=np.intp)
    mean, covariance = gaussian.mean(q), gaussian.covariance(q)
    return Weighing(
        About(q, prior, labels, many),
        Told(nothing, np.zeros(0), np.zeros(0), Known(nothing, *np.zeros((3, 0))), np.zeros(2), True),
        Shape(folded, (), Unit(mean, gaussian.standard_deviations(q)), ()),
        _of_candidates(mean, covariance, folded, count, stream, (MANY if many else FEW).wide),
        sampled=None,
        stage=0,
        pilots=0,
        rule=Rule.AT_FEW,
    )


def _of_candidates(
    mean: Array, covariance: Array, folded: Places, per_scramble: int, stream: int, wide: float = 0.5
) -> Batch:
    at = surrogate.candidates(surrogate.mixture(mean, covariance, per_scramble, wide), folded, stream)
    ones = np.ones(len(at.u))
    return Batch(surrogate.unfolded(at.u, folded), at.u, at.log_density, np.nan * ones, ones, at.scramble)


def with_known(state: Weighing, known: Known, laplace: Array) -> Weighing:
    """The same with Laplace's values (T,) of the sum of log f_k, and what these leave out, at points of the search."""
    values = laplace + gaussian.log_kernel(state.about.prior, known.points)
    told = state.told._replace(points=known.points, laplace=values, values=values + known.left_out, known=known)
    return state._replace(told=told)


def places_known(state: Weighing) -> NDArray[np.intp]:
    """Points of the batch at which what Laplace leaves out is asked for, some of each scramble."""
    count, size = state.batch.phi.shape
    care, everywhere = care_of(state), state.rule == Rule.EVERYWHERE
    some = max(care.known, care.known_each * (size + 3)) // (1 if state.stage < care.later[0] else care.later[1])
    return np.unique(np.linspace(0, count - 1, count if everywhere else min(some, count)).astype(np.intp))


def taken_in(state: Weighing, answer: Answer) -> tuple[Weighing, Array, Array] | None:
    """The sums of an exchange taken in, with signed errors of the batch (S,) and their squares.

    None where what Laplace leaves out is not foretold from where it is known.
    """
    at = state.batch.phi
    now = Known(at[places_known(state)], answer.left_out, answer.errors, answer.squares)
    known = Known(*(np.concatenate(pair) for pair in zip(state.told.known, now, strict=True)))
    points = np.concatenate([state.told.points, at])
    laplace = np.concatenate([state.told.laplace, answer.values + gaussian.log_kernel(state.about.prior, at)])
    left_out, signed, squares = np.zeros((3, len(points)))
    if state.rule == Rule.EVERYWHERE:
        left_out, signed, squares = known.left_out, known.errors, known.squares
    elif np.any(known.left_out) or np.any(known.squares):
        care = care_of(state)
        foretold = _foretold(points, laplace, known, care, care.foretold if state.stage else care.rough)
        if foretold is None:
            return None
        left_out, signed, squares = foretold
    constants = np.maximum(state.told.constants, answer.constants)
    is_proper = state.told.is_proper and answer.is_proper
    after = state._replace(told=Told(points, laplace, laplace + left_out, known, constants, is_proper))
    return after, np.nan_to_num(signed[-len(at) :]), np.nan_to_num(squares[-len(at) :])


def _foretold(
    points: Array, laplace: Array, known: Known, care: Care, enough: float
) -> tuple[Array, Array, Array] | None:
    """What Laplace leaves out at points (N, m), with signed errors and squares; None where it is not smooth.

    Of all points so far, by all at which it is known: those far out, where the posterior has nothing, may be wild.
    """
    nearest = cKDTree(known.points).query(points)[1]
    there = laplace[cKDTree(points).query(known.points)[1]]
    highest = np.nanmax(there) if np.any(np.isfinite(there)) else 0.0
    least = highest - care.within - points.shape[1]
    matters = np.flatnonzero(there > least)
    joined = np.concatenate([known.points[matters], points])
    few = np.arange(len(matters))
    smooth = smooth_over(joined, few, known.left_out[matters], known.errors[matters], enough, close=care.close > 0)
    if smooth is None:
        return None
    more, errors, missed = (one[len(matters) :] for one in smooth)
    here = laplace > least
    # Errors that clients have alike may be far larger than those that vary, and a constant moves nothing.
    return np.where(here, more, known.left_out[nearest]), errors + missed, known.squares[nearest] + missed**2


def with_more_integrated(state: Weighing) -> Weighing:
    """The same batch, with a cheap rule at all points; after that, a quarter, at all of which θ is integrated.

    What a cheap rule leaves out is smaller by far than what Laplace's approximation does, and foretold from few points.
    """
    nothing = np.zeros((0, len(state.about.labels)))
    known = Known(nothing, *np.zeros((3, 0)))
    told = state.told._replace(points=nothing, laplace=np.zeros(0), values=np.zeros(0), known=known)
    if state.rule == Rule.AT_FEW:
        return state._replace(told=told, rule=Rule.ROUGHLY)
    b, few = state.batch, slice(None, None, 4)
    fewer = Batch(b.phi[few], b.u[few], b.log_density[few], b.log_surrogate[few], b.times[few], b.scramble[few])
    return state._replace(told=told, batch=fewer, rule=Rule.EVERYWHERE)


def next_stage(state: Weighing, signed: Array, squares: Array, count: int, stream: int, remedy: str) -> Judged:
    """The next stage, or the end, once a batch was taken in."""
    if not np.any(np.isfinite(state.told.values)):
        return _nowhere(state)
    normal = _as_normal(state)
    if normal is not None:
        return Judged(normal, "")
    if state.stage == 0:
        state, mean, covariance = _after_pilot(state)
    else:
        assert state.sampled is not None
        mean, covariance = state.sampled.drawn.mean, state.sampled.drawn.covariance
    through = _through(state, mean, covariance)
    if through is None:  # a wider t, about what is known
        return _again(state, mean, covariance, count, stream)
    mean, covariance = surrogate.moments_of(through, mean, covariance, state.shape.folded, stream)
    shown = _shown(state, through, mean, covariance, stream)
    if effective_size(shown.weights) < _FEWEST * len(mean):
        return _again(state, mean, covariance, count, stream)
    if state.stage:
        judged = _judged(state, through, shown, signed, squares, stream, remedy)
        if isinstance(judged.phase, Weighed):
            return judged
        state = judged.phase
    again = _folded_anew(state, shown, stream)
    if again is not None:
        state, through, shown = again
        mean, covariance = shown.mean, shown.covariance
    outer = beyond(shown.u, shown.weights, _DRAWN)
    # Others than those that stand for all: from stage to stage these are nearly the same.
    by = surrogate.mixture(mean, covariance, _DRAWN, 0.25, outer)
    found = surrogate.drawn(through, by, state.shape.folded, stream + 1 + state.stage)
    walkers = found
    if _are_copies(found):
        walkers = surrogate.walked(through, shown, state.shape.folded, _STEPS // 4, stream + 1 + state.stage)
    count *= 1 if state.stage < 2 else 2 ** (state.stage - 1)
    drawn = _chosen(found, walkers, by, state.shape.folded, count)
    probes = _probes(shown, state.shape.folded, care_of(state).probes)
    batch = Batch(*(np.concatenate(pair) for pair in zip(drawn, probes, strict=True)))
    shape = state.shape._replace(outer=outer)
    return Judged(state._replace(shape=shape, batch=batch, sampled=Sampled(found, shown), stage=state.stage + 1), "")


def _nowhere(state: Weighing) -> Judged:
    about, told, shape = state.about, state.told, state.shape
    none = Weighed(about, told, shape, None, is_normal=False, trusted=False, log_integral_error=np.inf)
    return Judged(none, said.nowhere())


def _of_batch(state: Weighing) -> Array:
    """Log density, in the coordinates of the surrogate, of the batch that was taken in last."""
    count = len(state.batch.phi)
    return np.asarray(state.told.values[-count:] + surrogate.log_slope(state.batch.phi, state.shape.folded))


def _as_normal(state: Weighing) -> Weighed | None:
    """A normal posterior, where a quadratic tells all values."""
    known = np.isfinite(state.told.values)
    center, root = gaussian.affine(state.about.q)
    z = np.asarray(np.linalg.solve(root, (state.told.points[known] - center).T).T, dtype=float)
    terms = quadratic_terms(z)
    if len(terms) < 2 * terms.shape[1]:
        return None
    scale = 1.0 / (1.0 + np.sum(z**2, axis=1))  # far points have large values, and large rounding
    coefficients = np.linalg.lstsq(terms * scale[:, None], state.told.values[known] * scale, rcond=None)[0]
    left = (terms @ coefficients - state.told.values[known]) * scale
    if not np.max(np.abs(left)) <= _NORMAL:
        return None
    m = len(center)
    rows, columns = np.triu_indices(m)
    curved = np.zeros((m, m))
    curved[rows, columns] = coefficients[1 + m :]
    precision = -(curved + curved.T)
    if np.linalg.eigvalsh(precision)[0] <= 0:
        return None
    inverse = np.linalg.inv(root)
    whole = inverse.T @ precision @ inverse
    q = Gaussian(inverse.T @ coefficients[1 : 1 + m] + whole @ center, (whole + whole.T) / 2)
    # The value at q's mean fixes what its kernel leaves.
    constant = float(np.median(state.told.values[known] - gaussian.log_kernel(q, state.told.points[known])))
    mean, colour = gaussian.affine(q)
    points = mean + standard_normal(m, _NORMALS, 0, region.SCRAMBLES) @ colour.T
    equal = np.full(len(points), 1.0 / len(points))
    found = Reweighted(
        points=points,
        weights=equal,
        of_q=equal,
        scramble=np.repeat(np.arange(region.SCRAMBLES), _NORMALS),
        mean=gaussian.mean(q),
        covariance=gaussian.covariance(q),
        log_ratio=constant,
        error=0.0,
        log_ratio_error=float(np.max(np.abs(left))),
        ess=float(len(points)),
        pareto_k=-np.inf,
        second_k=-np.inf,
        told=len(points),
    )
    about, error = state.about._replace(q=q), found.log_ratio_error
    return Weighed(about, state.told, state.shape, found, is_normal=True, trusted=True, log_integral_error=error)


def _after_pilot(state: Weighing) -> tuple[Weighing, Array, Array]:
    """Which scales are coordinates themselves, and about where the posterior is."""
    points, values = state.batch.phi, _of_batch(state)
    logs = np.where(np.isfinite(values), values, -np.inf) - state.batch.log_density
    if not np.any(np.isfinite(logs)):
        return state, gaussian.mean(state.about.q), gaussian.covariance(state.about.q)
    weights = normalise(importance.smoothed(logs)[0])
    folded = state.shape.folded
    if not state.pilots:
        folded = _scales(state, points, weights)
    u = surrogate.as_folded(points, folded)
    moments, wide = weighted_moments(u, weights), weighted_moments(u, np.full(len(u), 1.0 / len(u)))
    kept = min(1.0, effective_size(weights) / (_FEWEST * len(moments.mean)))  # few points do not tell a covariance
    covariance = kept * moments.covariance + (1.0 - kept) * wide.covariance / surrogate.WIDER
    unit = Unit(moments.mean, np.sqrt(np.diag(covariance)))
    return _with_shape(state, folded, unit, state.shape.outer), moments.mean, covariance


def _with_shape(state: Weighing, folded: Places, unit: Unit, outer: tuple[Proposal, ...]) -> Weighing:
    """Of moments so far the units may be others."""
    return state._replace(shape=Shape(folded, outer, unit, ()))


def _shown(state: Weighing, through: surrogate.Surrogate, mean: Array, covariance: Array, stream: int) -> Drawn:
    """A surrogate by as many candidates as tell its moments: what they leave is of an estimate too."""

    def by(count: int) -> Drawn:
        mixture = surrogate.mixture(mean, covariance, count, 0.125, state.shape.outer)
        return surrogate.drawn(through, mixture, state.shape.folded, stream)

    count = care_of(state).shown
    found = by(count)
    is_short = state.stage >= _LATE or effective_size(found.weights) < _FEWEST * len(mean)
    if is_short and _are_copies(found):
        many = by(MOST_SHOWN)
        if effective_size(many.weights) >= 2.0 * len(mean):  # of fewer, draws lie in a plane, and stay there
            return surrogate.walked(through, many, state.shape.folded, _STEPS, stream)
    off = 0.0 if state.stage < _LATE or count == MOST_SHOWN else chance_of_draws(found)
    return found if off <= _BY_DRAWS else by(min(MOST_SHOWN, int(count * (off / _BY_DRAWS) ** 2)))


def _are_copies(of: Drawn) -> bool:
    """Whether draws are made anew by moving them, since few candidates have all of the weight."""
    return len(of.mean) >= surrogate.MANY and effective_size(of.weights) < _COPIES * len(of.weights)


def _scales(state: Weighing, points: Array, weights: Array) -> Places:
    """Scales whose logarithms have a long left tail, beside those that are coordinates themselves already.

    Not a precision that others spread without bound at 0 of: there a density of it is smooth, and theirs is not.
    """
    skewed = skewness(points, weights)
    others = [i for i, label in enumerate(state.about.labels) if _LOG in label and i not in state.shape.folded]
    more = [i for i in others if skewed[i] < _SKEWED and not widens(points, weights, i)]
    most = surrogate.MOST_FOLDED - len(state.shape.folded)
    return np.sort(np.array([*state.shape.folded, *sorted(more, key=lambda i: skewed[i])[:most]], dtype=np.intp))


def _folded_anew(state: Weighing, shown: Drawn, stream: int) -> tuple[Weighing, surrogate.Surrogate, Drawn] | None:
    """The same values where more scales are coordinates themselves; None where there are none that should be.

    A pilot's weights may not show a tail that a surrogate has.
    """
    phi = surrogate.unfolded(shown.u, state.shape.folded)
    folded = _scales(state, phi, shown.weights)
    if len(folded) == len(state.shape.folded):
        return None
    moments = weighted_moments(surrogate.as_folded(phi, folded), shown.weights)
    unit = Unit(moments.mean, np.sqrt(np.diag(moments.covariance)))
    after = _with_shape(state, folded, unit, ())
    through = _through(after, moments.mean, moments.covariance)
    if through is None:
        return None
    mean, covariance = surrogate.moments_of(through, moments.mean, moments.covariance, folded, stream)
    again = _shown(after, through, mean, covariance, stream)
    return (after, through, again) if effective_size(again.weights) >= _FEWEST * len(mean) else None


def _through(state: Weighing, mean: Array, covariance: Array) -> surrogate.Surrogate | None:
    """A surrogate through all values so far."""
    known = np.isfinite(state.told.values)
    points = state.told.points[known]
    values = state.told.values[known] + surrogate.log_slope(points, state.shape.folded)
    u = surrogate.as_folded(points, state.shape.folded)
    return surrogate.fitted(u, values, mean, covariance, heavy=bool(state.shape.outer))


def _again(state: Weighing, mean: Array, covariance: Array, count: int, stream: int) -> Judged:
    """Another pilot about what is known."""
    if state.pilots >= _PILOTS:
        return _nowhere(state)
    per_scramble = max(2, count // region.SCRAMBLES)
    batch = _of_candidates(mean, covariance, state.shape.folded, per_scramble, stream + _APART + state.pilots)
    return Judged(state._replace(batch=batch, sampled=None, stage=0, pilots=state.pilots + 1), "")


def _chosen(candidates: Drawn, of: Drawn, by: tuple[Proposal, ...], folded: Places, count: int) -> Batch:
    """Points of the surrogate, by systematic resampling in each scramble, and candidates as they come."""
    each = max(4, count // region.SCRAMBLES)
    own = max(1, min(int(_DEFENCE * each), len(candidates.u) // region.SCRAMBLES))
    parts = []
    for scramble, places in enumerate(surrogate.resampled(of, each - own)):
        as_they_come = np.flatnonzero(candidates.scramble == scramble)[:own]
        u = np.concatenate([candidates.u[as_they_come], of.u[places]])
        logs = np.concatenate([candidates.log_density[as_they_come], of.log_density[places]])
        _, first, number = np.unique(u, axis=0, return_index=True, return_counts=True)
        order = np.argsort(first)
        at = first[order]
        parts.append((u[at], logs[at], number[order].astype(float), np.full(len(at), scramble)))
    u, logs, times, scrambles = (np.concatenate(part) for part in zip(*parts, strict=True))
    phi, log_density = surrogate.unfolded(u, folded), surrogate.log_candidates(by, u, folded)
    return Batch(phi, u, log_density, logs, times, scrambles.astype(np.intp))


def _probes(of: Drawn, folded: Places, count: int) -> Batch:
    """Draws that have most of a second moment: where a surrogate is made up, their values put it right."""
    z = (of.u - of.mean) / np.sqrt(np.diag(of.covariance))
    most = np.argsort(-of.weights * np.max(z**2, axis=1), kind="stable")[:count]
    none = np.zeros(len(most))
    return Batch(
        surrogate.unfolded(of.u[most], folded),
        of.u[most],
        of.log_proposal[most],
        of.log_density[most],
        none,
        of.scramble[most],
    )


# Whether a stage is to be trusted ------------------------------------------------------------------------------------


class _Weighed(NamedTuple):
    weights: Array  # (S,) of the posterior; they sum to 1
    control: Array  # (S,) of the surrogate
    log_integral: float
    effective: float
    pareto_k: float
    logs: Array  # (S,)


def _weighed(state: Weighing) -> _Weighed:
    """The batch as the posterior."""
    assert state.sampled is not None
    batch, values = state.batch, _of_batch(state)
    mixture = np.logaddexp(
        np.log(1.0 - _DEFENCE) + batch.log_surrogate - state.sampled.drawn.log_integral,
        np.log(_DEFENCE) + batch.log_density,
    )
    raw = np.where(np.isfinite(values), values - mixture, -np.inf)
    is_drawn = batch.times > 0
    raw = np.where(is_drawn, raw, -np.inf)
    log_times = np.log(np.where(is_drawn, batch.times, 1.0))
    logs, shape = importance.smoothed(raw)
    if _residual(values - batch.log_surrogate, normalise(raw + log_times)) <= care_of(state).close:
        logs, shape = raw, -np.inf
    logs = np.where(is_drawn, logs + log_times, -np.inf)
    weights = normalise(logs)
    effective = 1.0 / float(np.sum(weights[is_drawn] ** 2 / batch.times[is_drawn])) / float(batch.times.sum())
    control = normalise(np.where(is_drawn, batch.log_surrogate - mixture + log_times, -np.inf))
    log_integral = float(np.logaddexp.reduce(logs) - np.log(batch.times.sum()))
    return _Weighed(weights, control, log_integral, effective, shape, logs)


def _residual(apart: Array, weights: Array) -> float:
    """Standard deviation of a surrogate's residuals (S,) over the posterior."""
    is_some = weights > 0
    apart, weights = apart[is_some], weights[is_some]
    return float(np.sqrt(weights @ (apart - weights @ apart) ** 2))


def _estimate(state: Weighing, now: _Weighed, draws: Array, batch: Array, unit: Unit) -> Estimate:
    """Moments by the last surrogate and what weights add to them; scrambles of either are left out together.

    Of coordinates of the surrogate's draws, and the same ones of the batch.
    """
    assert state.sampled is not None
    shown = state.sampled.shown

    def by(of_draws: NDArray[np.bool_], of_batch: NDArray[np.bool_]) -> Array:
        drawn = np.where(of_draws, shown.weights, 0.0)
        own, control = (np.where(of_batch, one, 0.0) for one in (now.weights, now.control))
        before = moments_of(draws, drawn / drawn.sum(), unit)
        return before + moments_of(batch, own / own.sum() - control / control.sum(), unit)

    without = [by(shown.scramble != one, state.batch.scramble != one) for one in range(region.SCRAMBLES)]
    whole = by(np.ones(len(shown.weights), dtype=bool), np.ones(len(now.weights), dtype=bool))
    return Estimate(whole, np.stack(without), now.effective * float(state.batch.times.sum()))


class _Declared(NamedTuple):
    """Moments on the scales that variables are declared on, by a stage."""

    chance: float  # largest standard error of a mean, in sds, or of a log sd
    differ: float  # by which draws differ from it at most


def _on_declared_scales(state: Weighing, shown: Drawn, now: _Weighed) -> _Declared:
    assert state.sampled is not None
    labels, folded = state.about.labels, state.shape.folded
    at, draws, batch = (declared(labels, folded, one) for one in (shown.u, state.sampled.shown.u, state.batch.u))
    if not at.shape[1]:
        return _Declared(0.0, 0.0)
    center = shown.weights @ at
    unit = Unit(center, np.maximum(np.sqrt(shown.weights @ (at - center) ** 2), 1e-300))
    estimate = _estimate(state, now, draws, batch, unit)
    apart = sizes(estimate.moments, moments_of(at, shown.weights, unit))
    return _Declared(chance_of(estimate), float(np.max(np.abs(apart))))


def _grown(state: Weighing, shown: Drawn, last: Estimate) -> float:
    """By how much a log sd grew since the stage before: of tails that points reach farther into each time."""
    assert state.sampled is not None
    before = [
        moments_of(state.sampled.shown.u, state.sampled.shown.weights, state.shape.unit),
        *(one.moments for one in state.shape.estimates[-2:-1]),
    ]
    now = moments_of(shown.u, shown.weights, state.shape.unit), last.moments
    m = len(state.shape.unit.center)
    return float(max(np.max(np.abs(sizes(one, other)[m:])) for one in now for other in before))


def _judged(
    state: Weighing, through: surrogate.Surrogate, shown: Drawn, signed: Array, squares: Array, stream: int, remedy: str
) -> Judged:
    """Hold a surrogate through all values against what the last one and its weights say."""
    assert state.sampled is not None
    now = _weighed(state)
    of_stage = _estimate(state, now, state.sampled.shown.u, state.batch.u, state.shape.unit)
    shape = state.shape._replace(estimates=(*state.shape.estimates, of_stage))
    state = state._replace(shape=shape)
    heavy = has_heavy_tails(shown.u, shown.weights)
    last, of_all = state.shape.estimates[-1], pooled(state.shape.estimates)
    # Of a heavy tail every stage sees more. The sum of many clients has no tails that a last stage may have missed, and
    # the first surrogates of it may be off by so much that their estimates add nothing.
    estimate = last if heavy or (state.about.many and chance_of(last) < chance_of(of_all)) else of_all
    grown = _grown(state, shown, estimate) if heavy else 0.0
    ours = moments_of(shown.u, shown.weights, state.shape.unit)
    chance = chance_of(estimate)
    differ = float(np.max(np.abs(sizes(estimate.moments, ours))))
    by_draws = chance_of_draws(shown)
    # A surrogate that is off by more than chance is put right by the weights; else it is the better of the two.
    other = _on_declared_scales(state, shown, now)
    is_off = differ > max(min(BY_CHANCE * chance, MOST_ERROR), _ENOUGH)
    is_off = is_off or other.differ > max(min(BY_CHANCE * other.chance, MOST_ERROR), _MOST_OF_MANY)
    may_be_off = max(_MOST_OFF * max(chance, 0.2 * _ENOUGH), _PUT_RIGHT if now.effective >= _EFFECTIVE else 0.0)
    error = differ if differ > may_be_off else chance
    lost = float(np.mean(~np.isfinite(_of_batch(state))))
    is_even = now.effective > _EVEN
    tail = second_k(now.weights, state.batch.u, now.weights)
    sure = is_even or (now.pareto_k <= importance.limit(len(now.weights)) and tail <= MOST_SECOND_K)
    most = _most_error(state)
    trusted = sure and max(error, grown) <= most and other.chance <= MOST_ERROR and now.effective >= _LEAST
    noise, moved = float(np.sqrt(now.weights @ squares)), _moved(state, now, signed, squares)
    # More points at which it is known tell better what Laplace's approximation leaves out at the others.
    is_told = noise <= NOISE and moved <= _MOVED
    enough = (
        trusted
        and is_told
        and max(error, grown) <= _ENOUGH
        and other.chance <= _MOST_OF_MANY
        and now.effective >= _EFFECTIVE
        and not (heavy and not state.shape.outer)
    )
    if not enough and state.stage < _STAGES:
        return Judged(state, "")
    if trusted and by_draws > _BY_DRAWS:
        by = surrogate.mixture(shown.mean, shown.covariance, MOST_SHOWN, 0.125, state.shape.outer)
        more = surrogate.drawn(through, by, state.shape.folded, stream)
        shown, by_draws = min((shown, by_draws), (more, chance_of_draws(more)), key=lambda one: one[1])
    if trusted and is_off:
        tilt = tilted(shown, estimate.moments, state.shape.unit)
        shown, error = (shown, max(differ, other.differ)) if tilt is None else (tilt, error)
        other = _on_declared_scales(state, shown, now)
    error = max(error, other.chance, other.differ if other.differ > BY_CHANCE * other.chance else 0.0)
    trusted = trusted and max(error, by_draws) <= MOST_ERROR
    found = _reweighted(state, shown, now, max(error, by_draws), tail)
    q = gaussian.from_moments(found.mean, found.covariance)
    problems = [
        "" if trusted else _not_known(state, shown, now, found, grown, remedy),
        said.unreached(lost, _LOST) if lost > _LOST else "",
        "" if is_told else uncertain(noise, moved, said.BY_NUTS),
    ]
    message = "; ".join(filter(None, problems))
    about, error = state.about._replace(q=q), found.log_ratio_error
    return Judged(Weighed(about, state.told, shape, found, False, not message, error), message)


def _reweighted(state: Weighing, shown: Drawn, now: _Weighed, error: float, tail: float) -> Reweighted:
    """The surrogate's draws as the posterior, with the Gaussian of its moments beside them."""
    phi = surrogate.unfolded(shown.u, state.shape.folded)
    moments = weighted_moments(phi, shown.weights)
    q = gaussian.from_moments(moments.mean, moments.covariance)
    # A surrogate has more where it is made up: what weights say of the integral has chance alone.
    chance = _chance_of_integral(state, now)
    log_integral = now.log_integral if abs(now.log_integral - shown.log_integral) > chance else shown.log_integral
    apart = abs(now.log_integral - log_integral)
    of_q = gaussian.log_density(q, phi) + surrogate.log_slope(phi, state.shape.folded) - shown.log_proposal
    return Reweighted(
        points=phi,
        weights=shown.weights,
        of_q=normalise(of_q),
        scramble=shown.scramble,
        mean=moments.mean,
        covariance=moments.covariance,
        log_ratio=log_integral - gaussian.log_integral(q),
        error=error,
        beside=error,
        log_ratio_error=max(apart, chance),
        ess=effective_size(shown.weights),
        pareto_k=now.pareto_k if now.effective <= _EVEN else -np.inf,
        second_k=tail if now.effective <= _EVEN else -np.inf,
        told=len(now.weights),
    )


def _chance_of_integral(state: Weighing, now: _Weighed) -> float:
    """Standard error of the log of the integral, by leaving out one scramble at a time."""
    ratios = []
    for one in range(region.SCRAMBLES):
        kept = state.batch.scramble != one
        ratios.append(np.logaddexp.reduce(now.logs[kept]) - np.log(state.batch.times[kept].sum()))
    return float(np.sqrt(region.SCRAMBLES - 1.0) * np.std(ratios))


def _moved(state: Weighing, now: _Weighed, signed: Array, squares: Array) -> float:
    """What errors of log f_k may move a mean or a log sd by, in posterior sds.

    Errors that clients have alike add up as they are, and of any sign by their squares, by the inequality of Cauchy and
    Schwarz.
    """
    u = state.batch.u
    moments = weighted_moments(u, now.weights)
    z = (u - moments.mean) / np.sqrt(np.diag(moments.covariance))
    parts = np.concatenate([z, 0.5 * (z**2 - 1.0)], axis=1)
    apart = parts - now.weights @ parts
    alike = signed @ (now.weights[:, None] * apart)
    by_chance = np.sqrt((now.weights @ squares) * (now.weights @ apart**2))
    return float(max(np.max(np.abs(alike)), np.max(by_chance)))


def spread(state: Weighed, per_scramble: int) -> tuple[Array, NDArray[np.intp], Array]:
    """Candidates about the posterior, as they come: φ (S, m), scrambles, and log densities in φ."""
    assert state.found is not None
    u = surrogate.as_folded(state.found.points, state.shape.folded)
    moments = weighted_moments(u, state.found.weights)
    by = surrogate.mixture(moments.mean, moments.covariance, per_scramble, 0.5, state.shape.outer)
    at = surrogate.candidates(by, state.shape.folded, 0)
    phi = surrogate.unfolded(at.u, state.shape.folded)
    return phi, at.scramble, np.asarray(at.log_density - surrogate.log_slope(phi, state.shape.folded))


def _most_error(state: Weighing) -> float:
    """Standard error with which moments are trusted; of many coordinates the largest of all errors counts."""
    return MOST_ERROR if len(state.about.labels) < surrogate.MANY else _MOST_OF_MANY


def _not_known(state: Weighing, shown: Drawn, now: _Weighed, found: Reweighted, grown: float, remedy: str) -> str:
    """What is not to be trusted, and of which coordinate above all."""
    assert state.sampled is not None
    sd = np.sqrt(np.diag(shown.covariance))
    apart = np.abs(shown.mean - state.sampled.shown.mean) / sd
    name, most = as_declared(state.about.labels[int(np.argmax(apart))]), _most_error(state)
    short = [
        f"few points decide alone (Pareto k {now.pareto_k:.2f}, at most {importance.limit(len(now.weights)):.2f})"
        if not now.pareto_k <= importance.limit(len(now.weights))
        else "",
        f"tails are not reached (Pareto k {found.second_k:.2f}, at most {MOST_SECOND_K:g})"
        if not found.second_k <= MOST_SECOND_K
        else "",
        f"an error of {found.error:.2g} sds (at most {most:g})" if not found.error <= most else "",
        f"{now.effective:.0%} of the points are effective (at least {_LEAST:.0%})" if now.effective < _LEAST else "",
        f"an sd that last changed by {np.expm1(grown):.0%}, along a heavy tail" if grown > most else "",
    ]
    return (
        f"means and sds are not known well enough, of {name} above all: use {remedy}, declare {name} on a scale where "
        f"it is closer to normal, or give it a prior that says more. Of {len(state.told.points)} points: "
        + ", ".join(filter(None, short))
    )
