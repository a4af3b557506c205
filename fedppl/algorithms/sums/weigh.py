r"""The posterior about a mode, from sums of log f_k at points: stages of a proposal that is fitted to all values.

A pilot of points of wide t's tells the sum roughly. Then, stage by stage: a surrogate through all values so far, points
of it and of a wide t, and values there. Where the surrogate of the next stage, which goes through these too, has the
moments that weights give, and the weights are to be trusted (`trust`), it is the posterior.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from fedppl import gaussian
from fedppl.algorithms import tolerances as tol
from fedppl.algorithms.sums import phases
from fedppl.algorithms.sums.phases import (
    About,
    Batch,
    Draws,
    Effort,
    Evaluated,
    Integrated,
    Rule,
    Shape,
    Unit,
    Weighed,
    Weighing,
)
from fedppl.algorithms.sums.trust import judged, nowhere
from fedppl.numerics import importance, surrogate
from fedppl.numerics import tolerances as common
from fedppl.numerics.coordinates import (
    Coordinates,
    Places,
    coordinates_of,
    log_slope,
    misfit,
    of_phi,
    plain,
    stretch_of,
    to_phi,
)
from fedppl.numerics.importance import effective_size, normalise, quadratic_terms, skewness, weighted_moments
from fedppl.numerics.integral import smooth_over, some_of
from fedppl.numerics.proposals import Proposal, Reweighted, beyond, propose, whitened
from fedppl.numerics.streams import standard_normal
from fedppl.numerics.surrogate import Drawn, Surrogate
from fedppl.types import Array


class Tails(NamedTuple):
    """Coordinates, and then declared scales, with heavy tails."""

    places: Places
    center: Array  # of all
    variances: Array


# Values in -----------------------------------------------------------------------------------------------------------


def begin(about: About, count: int, stream: int, stencil: tuple[Integrated, Array] | None) -> Weighing:
    """The pilot about a Gaussian, with points of the search, at which the sum of Laplace's values is known, (T,)."""
    m, evaluated = len(about.labels), _nothing(len(about.labels))
    if stencil is not None:
        integrated, laplace = stencil
        laplace = laplace + gaussian.log_kernel(about.prior, integrated.points)
        values = laplace + integrated.residuals
        evaluated = evaluated._replace(points=integrated.points, laplace=laplace, values=values, integrated=integrated)
    # its values have to tell a quadratic in all coordinates
    count = -(-max(count, common.QUADRATIC_POINTS * (m + 1) * (m + 2) // 2) // common.SCRAMBLES)
    mean, covariance = gaussian.mean(about.q), gaussian.covariance(about.q)
    return Weighing(
        about,
        evaluated,
        Shape(plain(), (), (), Unit(mean, gaussian.standard_deviations(about.q)), ()),
        _of_candidates(mean, covariance, plain(), count, stream, (phases.MANY if about.many else phases.FEW).wide),
        None,
        stage=0,
        pilots=0,
        rule=Rule.ROUGHLY if about.hurried else Rule.AT_FEW,
    )


def _nothing(m: int) -> Evaluated:
    points, none = np.zeros((0, m)), np.zeros(0)
    return Evaluated(points, none, none, Integrated(points, none, none, none), np.zeros(2), True)


def _of_candidates(
    mean: Array,
    covariance: Array,
    coordinates: Coordinates,
    per_scramble: int,
    stream: int,
    wide: float = tol.PLAIN_WIDE,
) -> Batch:
    at = surrogate.candidates(surrogate.mixture(mean, covariance, per_scramble, wide), coordinates.folded, stream)
    ones = np.ones(len(at.u))
    return Batch(to_phi(at.u, coordinates), at.u, at.log_density, np.nan * ones, at.log_density, ones, at.scramble)


def places_integrated(state: Weighing) -> NDArray[np.intp]:
    """Points of the batch at which θ is to be integrated, some of each scramble."""
    count, size = state.batch.phi.shape
    effort = phases.effort_of(state)
    some = max(effort.integrated, effort.integrated_each * (size + 3))
    some //= 1 if state.stage < effort.later[0] else effort.later[1]
    return some_of(count, count if state.rule == Rule.EVERYWHERE else some)


def taken_in(
    state: Weighing, values: Array, new: Integrated, constants: Array, is_proper: bool
) -> tuple[Weighing, Array, Array] | None:
    """The state with sums of values (S,), NaN where a client has none, signed errors of the batch (S,), and squares.

    None where the residuals of Laplace's approximation are not smooth enough to be predicted.
    """
    at = state.batch.phi
    integrated = Integrated(*map(np.concatenate, zip(state.evaluated.integrated, new, strict=True)))
    points = np.concatenate([state.evaluated.points, at])
    laplace = np.concatenate([state.evaluated.laplace, values + gaussian.log_kernel(state.about.prior, at)])
    residuals, signed, squares = np.zeros((3, len(points)))
    if state.rule == Rule.EVERYWHERE:
        residuals, signed, squares = integrated.residuals, integrated.errors, integrated.squares
    elif np.any(integrated.residuals) or np.any(integrated.squares):
        effort = phases.effort_of(state)
        predicted = _predicted(points, laplace, integrated, effort, effort.predicted if state.stage else effort.rough)
        if predicted is None:
            return None
        residuals, signed, squares = predicted
    constants, is_proper = np.maximum(state.evaluated.constants, constants), state.evaluated.is_proper and is_proper
    after = state._replace(evaluated=Evaluated(points, laplace, laplace + residuals, integrated, constants, is_proper))
    return after, np.nan_to_num(signed[-len(at) :]), np.nan_to_num(squares[-len(at) :])


def _predicted(
    points: Array, laplace: Array, integrated: Integrated, effort: Effort, enough: float
) -> tuple[Array, Array, Array] | None:
    """Residuals of Laplace's approximation at all points (N, m), signed errors and squares; None where not smooth.

    Points far out, where the posterior has no mass, may be wild: they take the residual of the nearest point.
    """
    nearest = cKDTree(integrated.points).query(points)[1]
    there = laplace[cKDTree(points).query(integrated.points)[1]]
    highest = np.nanmax(there) if np.any(np.isfinite(there)) else 0.0
    least = highest - effort.within - points.shape[1]
    matters = np.flatnonzero(there > least)
    joined = np.concatenate([integrated.points[matters], points])
    smooth = smooth_over(
        joined,
        np.arange(len(matters)),
        integrated.residuals[matters],
        integrated.errors[matters],
        enough,
        close=effort.close > 0,
    )
    if smooth is None:
        return None
    predicted, errors, missed = (values[len(matters) :] for values in smooth)
    residuals = np.where(laplace > least, predicted, integrated.residuals[nearest])
    # Errors that clients have alike may be far larger than those that vary, and a constant moves nothing.
    return residuals, errors + missed, integrated.squares[nearest] + missed**2


def with_more_integrated(state: Weighing) -> Weighing:
    """The same batch, with a cheap rule at all points; after that a quarter of it, with θ integrated at every point."""
    evaluated = _nothing(len(state.about.labels))
    evaluated = evaluated._replace(constants=state.evaluated.constants, is_proper=state.evaluated.is_proper)
    if state.rule == Rule.AT_FEW:
        return state._replace(evaluated=evaluated, rule=Rule.ROUGHLY)
    batch = Batch._make(part[:: tol.EVERYWHERE] for part in state.batch)
    return state._replace(evaluated=evaluated, batch=batch, rule=Rule.EVERYWHERE)


# Stages --------------------------------------------------------------------------------------------------------------


def next_stage(
    state: Weighing, signed: Array, squares: Array, count: int, stream: int, remedy: str, *, last: bool = False
) -> tuple[Weighing | Weighed, str]:
    """The next stage, or the end with what is not known, once a batch was evaluated; the end where it is the last."""
    if not np.any(np.isfinite(state.evaluated.values)):
        return nowhere(state)
    normal = _as_normal(state)
    if normal is not None:
        return normal, ""
    if state.draws is None:
        state, mean, covariance = _after_pilot(state)
    else:
        mean, covariance = state.draws.posterior.mean, state.draws.posterior.covariance
    fitted, mean, covariance = _fitted(state, mean, covariance, stream)
    if fitted is None:  # a wider t, about the moments so far
        return _again(state, mean, covariance, count, stream)
    through, posterior = fitted
    if state.stage:
        outcome, problems = judged(state, through, posterior, signed, squares, stream, remedy, last=last)
        if isinstance(outcome, Weighed):
            return outcome, problems
        state = outcome
    refolded = _folded_anew(state, posterior, stream)
    if refolded is not None:
        state, through, posterior = refolded
    outer = beyond(posterior.u, posterior.weights, tol.STAGE_CANDIDATES)
    tails = _tails(state, posterior)
    farther = _farther(state, tails, posterior)
    by = surrogate.mixture(
        posterior.mean, posterior.covariance, tol.STAGE_CANDIDATES, tol.STAGE_WIDE, (*outer, *farther)
    )
    # Of another stream than the draws that stand for the posterior, which are nearly the same from stage to stage.
    another, folded = stream + 1 + state.stage, state.shape.coordinates.folded
    drawn = candidates = surrogate.drawn(through, by, folded, another)
    if _are_copies(candidates):
        drawn = surrogate.walked(through, posterior, folded, tol.SHORT_WALK, another)
    count *= 1 if state.about.hurried else tol.STAGE_GROWTH ** max(0, state.stage - 1)
    probes = _probes(posterior, state.shape.coordinates, phases.effort_of(state).probes)
    parts = _chosen(state, candidates, drawn, by, tails, count), probes
    after = state._replace(
        shape=state.shape._replace(outer=outer, farther=farther),
        batch=Batch(*(np.concatenate(pair) for pair in zip(*parts, strict=True))),
        draws=Draws(posterior, candidates.log_integral, candidates.log_integral_error),
        stage=state.stage + 1,
    )
    return after, ""


def _as_normal(state: Weighing) -> Weighed | None:
    """A normal posterior, where a quadratic goes through all values."""
    is_finite = np.isfinite(state.evaluated.values)
    points, values = state.evaluated.points[is_finite], state.evaluated.values[is_finite]
    center, root = gaussian.affine(state.about.q)
    z = whitened(points, center, root)
    terms = quadratic_terms(z)
    if len(terms) < common.QUADRATIC_POINTS * terms.shape[1]:
        return None
    scale = 1.0 / (1.0 + np.sum(z**2, axis=1))  # far points have large values, and large rounding
    coefficients = np.linalg.lstsq(terms * scale[:, None], values * scale, rcond=None)[0]
    off = float(np.max(np.abs((terms @ coefficients - values) * scale)))
    q = phases.gaussian_of(coefficients, center, root)
    if not off <= tol.NORMAL_RESIDUAL or not gaussian.is_proper(q):
        return None
    mean, colour = gaussian.affine(q)
    draws = mean + standard_normal(len(mean), tol.NORMAL_DRAWS, 0, common.SCRAMBLES) @ colour.T
    equal = np.full(len(draws), 1.0 / len(draws))
    posterior = Reweighted(
        points=draws,
        weights=equal,
        of_q=equal,
        scramble=np.repeat(np.arange(common.SCRAMBLES), tol.NORMAL_DRAWS),
        mean=gaussian.mean(q),
        covariance=gaussian.covariance(q),
        log_ratio=float(np.median(values - gaussian.log_kernel(q, points))),  # what q's kernel leaves of the density
        error=0.0,
        log_ratio_error=off,
        ess=float(len(draws)),
        pareto_k=-np.inf,
        second_k=-np.inf,
        told=len(draws),
    )
    return Weighed(state.about._replace(q=q), state.evaluated, state.shape, posterior, True, True)


def _after_pilot(state: Weighing) -> tuple[Weighing, Array, Array]:
    """Choose which scales are coordinates themselves, and moments to begin with."""
    points, values = state.batch.phi, phases.values_of_batch(state)
    logs = np.where(np.isfinite(values), values, -np.inf) - state.batch.log_density
    if not np.any(np.isfinite(logs)):
        return state, gaussian.mean(state.about.q), gaussian.covariance(state.about.q)
    weights = normalise(importance.smoothed(logs)[0])
    coordinates = state.shape.coordinates
    if not state.pilots:
        stretch = stretch_of(state.about.labels, points, weights)
        coordinates = coordinates_of(state.about.labels, _scales(state, points, weights), weights @ points, stretch)
    u = of_phi(points, coordinates)
    moments, wide = weighted_moments(u, weights), weighted_moments(u, np.full(len(u), 1.0 / len(u)))
    kept = importance.telling(weights, len(moments.mean))
    covariance = kept * moments.covariance + (1.0 - kept) * wide.covariance / common.WIDER
    return _with_shape(state, coordinates, u, weights, state.shape.outer), moments.mean, covariance


def _with_shape(
    state: Weighing, coordinates: Coordinates, u: Array, weights: Array, outer: tuple[Proposal, ...]
) -> Weighing:
    """The state in other coordinates; estimates so far may be in other units, and go."""
    moved = state._replace(shape=Shape(coordinates, outer, (), state.shape.unit, ()))
    return moved._replace(shape=moved.shape._replace(unit=phases.unit_of(phases.all_scales(moved, u), weights)))


def _draws(state: Weighing, through: Surrogate, mean: Array, covariance: Array, stream: int) -> Drawn:
    """Draws of a surrogate, as many as its moments need: their error is part of every estimate."""
    by = functools.partial(phases.draws_of, state, through, mean, covariance, stream=stream)
    count = phases.effort_of(state).draws
    few = by(count)
    is_short = state.stage >= tol.LATE or effective_size(few.weights) < common.EACH_TELLS * len(mean)
    if is_short and _are_copies(few):
        many = by(tol.MOST_SURROGATE_DRAWS)
        if effective_size(many.weights) >= tol.PLANE * len(mean):  # fewer draws lie in a plane, and stay there
            return surrogate.walked(through, many, state.shape.coordinates.folded, tol.WALK_STEPS, stream)
    off = 0.0 if state.stage < tol.LATE or count == tol.MOST_SURROGATE_DRAWS else phases.chance_of_draws(few)
    if off <= tol.BY_DRAWS:
        return few
    # NaN where one scramble has all the weight
    return by(int(np.fmin(count * (off / tol.BY_DRAWS) ** 2, tol.MOST_SURROGATE_DRAWS)))


def _are_copies(of: Drawn) -> bool:
    """Whether few candidates have nearly all of the weight, so that draws are copies and have to be moved on."""
    return len(of.mean) >= common.MANY and effective_size(of.weights) < tol.COPIES * len(of.weights)


def _scales(state: Weighing, points: Array, weights: Array) -> Places:
    """Scales whose logarithms have a long left tail, beside those that are coordinates themselves already.

    A precision with other variables that spread without bound as it goes to 0 is not among them: its density is smooth
    there, and theirs is not.
    """
    folded, skewed = state.shape.coordinates.folded, skewness(points, weights)
    others = [i for i, label in enumerate(state.about.labels) if "_log__" in label and i not in folded]
    added = [i for i in others if skewed[i] < tol.SKEWED_SCALE and not phases.widens(points, weights, i)]
    most_skewed = sorted(added, key=lambda i: skewed[i])[: common.MOST_FOLDED - len(folded)]
    return np.sort(np.array([*folded, *most_skewed], dtype=np.intp))


def _folded_anew(state: Weighing, posterior: Drawn, stream: int) -> tuple[Weighing, Surrogate, Drawn] | None:
    """The same values in coordinates with more scales, or stretched otherwise; None where they should stay."""
    phi = to_phi(posterior.u, state.shape.coordinates)
    folded, stretch = _scales(state, phi, posterior.weights), state.shape.coordinates.stretch
    if state.stage < tol.LATE:
        other = stretch_of(state.about.labels, phi, posterior.weights)
        places = np.union1d(stretch.places, other.places)
        apart, closer = (misfit(phi, posterior.weights, one, places) for one in (stretch, other))
        stretch = other if len(places) and apart - closer > tol.MORE_NORMAL else stretch
    if len(folded) == len(state.shape.coordinates.folded) and stretch is state.shape.coordinates.stretch:
        return None
    coordinates = coordinates_of(state.about.labels, folded, posterior.weights @ phi, stretch)
    u = of_phi(phi, coordinates)
    moments = weighted_moments(u, posterior.weights)
    after = _with_shape(state, coordinates, u, posterior.weights, ())
    fitted, _, _ = _fitted(after, moments.mean, moments.covariance, stream)
    return None if fitted is None else (after, *fitted)


def _fitted(
    state: Weighing, mean: Array, covariance: Array, stream: int
) -> tuple[tuple[Surrogate, Drawn] | None, Array, Array]:
    """A surrogate through all values with its draws, None where few of them have all weight, and its moments."""
    coordinates, is_finite = state.shape.coordinates, np.isfinite(state.evaluated.values)
    points = state.evaluated.points[is_finite]
    values = state.evaluated.values[is_finite] + log_slope(points, coordinates)
    u, heavy = of_phi(points, coordinates), bool(state.shape.outer)
    through = surrogate.fitted(u, values, mean, covariance, heavy=heavy)
    if through is None:
        return None, mean, covariance
    mean, covariance = surrogate.moments_of(through, mean, covariance, coordinates.folded, stream)
    drawn = _draws(state, through, mean, covariance, stream)
    is_told = effective_size(drawn.weights) >= common.EACH_TELLS * len(mean)
    return (through, drawn) if is_told else None, mean, covariance


def _again(state: Weighing, mean: Array, covariance: Array, count: int, stream: int) -> tuple[Weighing | Weighed, str]:
    """Another pilot about the moments so far."""
    if state.pilots >= tol.PILOTS:
        return nowhere(state)
    per_scramble = max(tol.FEWEST_OF_SCRAMBLE, count // common.SCRAMBLES)
    batch = _of_candidates(
        mean, covariance, state.shape.coordinates, per_scramble, stream + tol.PILOT_STREAMS + state.pilots
    )
    return state._replace(batch=batch, draws=None, stage=0, pilots=state.pilots + 1), ""


def _tails(state: Weighing, of: Drawn) -> Tails:
    """Which coordinates and declared scales have heavy tails, of a surrogate."""
    x = phases.all_scales(state, of.u)
    center = of.weights @ x
    squares = (x - center) ** 2
    variances = np.maximum(of.weights @ squares, tol.ABOVE_ZERO)
    is_heavy = of.weights @ squares**2 > tol.TAIL_KURTOSIS * variances**2
    return Tails(np.flatnonzero(is_heavy), center, variances)


def _farther(state: Weighing, tails: Tails, of: Drawn) -> tuple[Proposal, ...]:
    """A t about the draws weighted by squares along heavy tails: where most of an sd comes from."""
    if not len(tails.places):
        return ()
    logs = np.log(np.maximum(of.weights, tol.ABOVE_ZERO)) + _log_squares(state, tails, of.u)
    moments = weighted_moments(of.u, normalise(logs))
    covariance = moments.covariance + common.RIDGE_OF_TAIL * of.covariance  # few draws have most of the squares
    return (propose(moments.mean, common.ROOM * covariance, 1),)


def _log_tilt(state: Weighing, tails: Tails, u: Array) -> Array:
    """How much more often points (S, m) are drawn than the surrogate has them: by squares along heavy tails.

    So an sd has an error that does not grow with the tail: half of the points tell of the middle, half of squares.
    """
    if not len(tails.places):
        return np.zeros(len(u))
    return np.asarray(np.logaddexp(0.0, _log_squares(state, tails, u)) - np.log(2.0))


def _log_squares(state: Weighing, tails: Tails, u: Array) -> Array:
    """Log of the mean squared distance along heavy tails, in variances."""
    x = phases.all_scales(state, u)[:, tails.places]
    squares = (x - tails.center[tails.places]) ** 2 / tails.variances[tails.places]
    return np.asarray(np.log(np.maximum(np.mean(squares, axis=1), tol.ABOVE_ZERO)))


def _chosen(state: Weighing, candidates: Drawn, of: Drawn, by: tuple[Proposal, ...], tails: Tails, count: int) -> Batch:
    """Draws of the surrogate, more of them in heavy tails, by systematic resampling by scrambles; and candidates."""
    # Of a scramble at least two draws, and a candidate as it comes.
    coordinates, each = state.shape.coordinates, max(tol.FEWEST_OF_SCRAMBLE + 1, count // common.SCRAMBLES)
    defensive = max(1, min(int(tol.DEFENCE * each), len(candidates.u) // common.SCRAMBLES))
    tilt = _log_tilt(state, tails, of.u)
    log_mean = float(np.log(of.weights @ np.exp(tilt)))
    tilted = of._replace(weights=of.weights * np.exp(tilt - log_mean))
    parts = []
    for scramble, places in enumerate(surrogate.resampled(tilted, each - defensive)):
        as_they_come = np.flatnonzero(candidates.scramble == scramble)[:defensive]
        u = np.concatenate([candidates.u[as_they_come], of.u[places]])
        logs = np.concatenate([candidates.log_density[as_they_come], of.log_density[places]])
        _, first, number = np.unique(u, axis=0, return_index=True, return_counts=True)
        order = np.argsort(first)
        at = first[order]
        parts.append((u[at], logs[at], number[order].astype(float), np.full(len(at), scramble)))
    u, logs, times, scrambles = (np.concatenate(part) for part in zip(*parts, strict=True))
    phi, log_density = to_phi(u, coordinates), surrogate.log_candidates(by, u, coordinates.folded)
    drawn = logs + _log_tilt(state, tails, u) - log_mean
    return Batch(phi, u, log_density, logs, drawn, times, scrambles.astype(np.intp))


def _probes(of: Drawn, coordinates: Coordinates, count: int) -> Batch:
    """Draws with most of a second moment: where a surrogate is made up, values there put it right."""
    z = (of.u - of.mean) / np.sqrt(np.diag(of.covariance))
    at = np.argsort(-of.weights * np.max(z**2, axis=1), kind="stable")[:count]
    phi, none = to_phi(of.u[at], coordinates), np.zeros(len(at))
    return Batch(phi, of.u[at], of.log_proposal[at], of.log_density[at], of.log_density[at], none, of.scramble[at])


def candidates_about(
    state: Weighed, u: Array, weights: Array, per_scramble: int
) -> tuple[Array, NDArray[np.intp], Array]:
    """Candidates about weighted points u (S, m), as they come: φ (S, m), scrambles, and log densities in φ."""
    moments = weighted_moments(u, weights)
    by = surrogate.mixture(moments.mean, moments.covariance, per_scramble, tol.PLAIN_WIDE, state.shape.far)
    at = surrogate.candidates(by, state.shape.coordinates.folded, 0)
    phi = to_phi(at.u, state.shape.coordinates)
    return phi, at.scramble, np.asarray(at.log_density - log_slope(phi, state.shape.coordinates))
