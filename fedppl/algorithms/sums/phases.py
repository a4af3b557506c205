"""What is known while the posterior is weighed: phases, how many values each asks for, and moments by stages."""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl.algorithms import tolerances as tol
from fedppl.gaussian import Gaussian
from fedppl.numerics import surrogate
from fedppl.numerics import tolerances as common
from fedppl.numerics.coordinates import Coordinates, declared, log_slope, to_phi
from fedppl.numerics.importance import jackknife, normalise, second_derivatives, weighted_moments
from fedppl.numerics.proposals import Proposal, Reweighted
from fedppl.numerics.surrogate import Drawn, Surrogate
from fedppl.types import Array


class Estimate(NamedTuple):
    """First and second moments of the posterior on all scales in fixed units, and without each scramble."""

    moments: Array  # (2 M,)
    without: Array  # (scrambles, 2 M)
    points: float  # effective ones


class Unit(NamedTuple):
    """Center (M,) and lengths (M,) of the units that moments are in."""

    center: Array
    length: Array


class Integrated(NamedTuple):
    """Points at which θ was integrated, and what Laplace's approximation misses there, summed over clients."""

    points: Array  # (T, m)
    residuals: Array  # (T,) log units; NaN where a client has no value
    errors: Array  # (T,) Σ_k errors of the integrals, with their signs
    squares: Array  # (T,) Σ_k squared errors


class Batch(NamedTuple):
    """Points of one exchange."""

    phi: Array  # (S, m)
    u: Array  # (S, m) in the coordinates of the surrogate
    log_density: Array  # (S,) of the candidates
    log_surrogate: Array  # (S,) not normalised; NaN in the pilot
    # (S,) what points are drawn from: the surrogate with its integral, more often in heavy tails; in a pilot candidates
    log_drawn: Array
    times: Array  # (S,) how often each was drawn; 0 of probes, which have no weight
    scramble: NDArray[np.intp]


class About(NamedTuple):
    """The fit that the posterior belongs to."""

    q: Gaussian  # about the mode, and in the end with the posterior's moments
    prior: Gaussian  # the Gaussian that stands for the prior at the server
    labels: tuple[str, ...]
    many: bool  # whether clients are so many that their sum hardly departs from a quadratic
    hurried: bool = False  # whether exchanges are few, and each asks for more


class Alone(NamedTuple):
    """Clients are asked what their own rows say under the prior: a Gaussian each, in place of a search."""

    about: About  # the prior, as yet


class Evaluated(NamedTuple):
    """Log densities of the posterior's kernel at all points so far, (N,); NaN where a client has no value."""

    points: Array  # (N, m)
    laplace: Array  # (N,) by Laplace's approximations of log f_k
    values: Array  # (N,) with what these miss
    integrated: Integrated
    constants: Array  # (2,) errors of log f_k that do not vary with φ: alike, and by chance
    is_proper: bool


class Shape(NamedTuple):
    """Coordinates of surrogates, and moments in these."""

    coordinates: Coordinates
    outer: tuple[Proposal, ...]  # proposals in the tails of coordinates, where they are heavy
    farther: tuple[Proposal, ...]  # where squares on declared scales come from, if their tails are heavy
    unit: Unit  # of moments
    estimates: tuple[Estimate, ...]  # of the stages so far

    @property
    def far(self) -> tuple[Proposal, ...]:
        """Proposals beside those about the posterior's moments."""
        return (*self.outer, *self.farther)


class Draws(NamedTuple):
    """Draws of a surrogate, and the log of its integral by the candidates from which a batch was chosen."""

    posterior: Drawn  # more of them, always of one stream: they stand for the posterior
    log_integral: float
    log_integral_error: float


class Rule(enum.IntEnum):
    """Where θ is integrated, since Laplace's approximation is not exact enough."""

    AT_FEW = 0  # of the points; residuals at the others are predicted
    ROUGHLY = 1  # the same, with a cheap rule at all points
    EVERYWHERE = 2


class Weighing(NamedTuple):
    """A batch of points is asked for."""

    about: About
    evaluated: Evaluated
    shape: Shape
    batch: Batch
    draws: Draws | None  # None in a pilot
    stage: int  # 0 is the pilot
    pilots: int  # number of pilots before this one
    rule: int  # a `Rule`


class Weighed(NamedTuple):
    """The end: the posterior, or what is known of it."""

    about: About
    evaluated: Evaluated
    shape: Shape
    posterior: Reweighted | None
    is_normal: bool  # q is the posterior
    trusted: bool


class Effort(NamedTuple):
    """How many values are asked for and computed."""

    wide: float  # share of a pilot's points that a wide t gives
    integrated: int  # points of an exchange, at least, at which θ is integrated
    integrated_each: int  # the same for each coordinate and three more
    later: tuple[int, int]  # stage from which these are fewer, and by which factor
    rough: float  # log units, median error with which residuals are predicted in a pilot
    predicted: float  # the same in a stage
    within: float  # log units below the highest value, and one for each coordinate, down to which they are predicted
    draws: int  # candidates of a scramble that stand for the posterior
    probes: int  # draws with most of the surrogate's second moments, at which it is checked
    # Residual, log units, of a surrogate that is as good as the posterior: weights have no tail, and smoothing would
    # move moments by more than it gains.
    close: float


FEW = Effort(
    wide=tol.PLAIN_WIDE,
    integrated=tol.INTEGRATED,
    integrated_each=tol.INTEGRATED_EACH,
    later=tol.LATER,
    rough=tol.PILOT_PREDICTED,
    predicted=tol.PREDICTED,
    within=tol.FAR_BELOW,
    draws=tol.SURROGATE_DRAWS,
    probes=tol.PROBES,
    close=-np.inf,
)
# The posterior of many clients is narrow, so that points of a stage lie close together. Residuals of Laplace's
# approximation move it by many sds, so that they are predicted at all points. Draws cost little.
MANY = Effort(
    wide=tol.PILOT_WIDE_OF_MANY,
    integrated=tol.INTEGRATED_OF_MANY,
    integrated_each=tol.INTEGRATED_EACH_OF_MANY,
    later=tol.LATER_OF_MANY,
    rough=tol.PILOT_PREDICTED_OF_MANY,
    predicted=tol.PREDICTED,
    within=np.inf,
    draws=tol.MOST_SURROGATE_DRAWS,
    probes=tol.PROBES_OF_MANY,
    close=tol.CLOSE_OF_MANY,
)


# Where another exchange costs days: θ is integrated at more points, and a pilot that is off is better than none.
HURRIED = FEW._replace(
    integrated=tol.INTEGRATED_HURRIED,
    integrated_each=tol.INTEGRATED_EACH_HURRIED,
    later=(tol.STAGES, 1),
    rough=tol.PILOT_PREDICTED_HURRIED,
)


def effort_of(state: Weighing) -> Effort:
    """How many values are asked for of so many clients, in so many exchanges."""
    return MANY if state.about.many else HURRIED if state.about.hurried else FEW


def values_of_batch(state: Weighing) -> Array:
    """Log densities, in the coordinates of the surrogate, of the batch that was evaluated last."""
    count = len(state.batch.phi)
    return np.asarray(state.evaluated.values[-count:] + log_slope(state.batch.phi, state.shape.coordinates))


def gaussian_of(coefficients: Array, center: Array, root: Array) -> Gaussian:
    """The Gaussian whose log kernel is a quadratic with these coefficients in z, at points center + root z."""
    inverse, m = np.linalg.inv(root), len(center)
    precision = -inverse.T @ second_derivatives(coefficients, m) @ inverse
    return Gaussian(inverse.T @ coefficients[1 : 1 + m] + precision @ center, (precision + precision.T) / 2)


def all_scales(state: Weighing, u: Array) -> Array:
    """Coordinates u (S, m), and φ on the scales that variables are declared on, where these or their spread are others.

    Of M columns the first m are the coordinates.
    """
    phi = to_phi(u, state.shape.coordinates)
    places = state.shape.coordinates.stretch.places
    return np.concatenate([u, declared(state.about.labels, phi), phi[:, places]], axis=1)


def unit_of(x: Array, weights: Array) -> Unit:
    """Units of weighted points (S, M)."""
    center = weights @ x
    return Unit(center, np.maximum(np.sqrt(weights @ (x - center) ** 2), tol.ABOVE_ZERO))


# Moments of a posterior: what each stage says, what they say together, and draws put right by it ---


def moments_of(x: Array, weights: Array, unit: Unit) -> Array:
    """First and second moments (2 M,) of weighted points (S, M)."""
    return np.asarray(weights @ features(x, unit))


def moments_of_draws(state: Weighing, of: Drawn) -> Array:
    """The same of draws, on all scales."""
    return moments_of(all_scales(state, of.u), of.weights, state.shape.unit)


def features(x: Array, unit: Unit) -> Array:
    """What moments are means of, (S, 2 M): points (S, M) in these units, and their squares."""
    z = (x - unit.center) / unit.length
    return np.concatenate([z, z**2], axis=1)


def pooled(estimates: tuple[Estimate, ...]) -> Estimate:
    """The last stage's estimate, with those before it that agree with it, each by its number of effective points.

    Not by its variance, which is too small of a stage that missed a tail.
    """
    last = estimates[-1]
    agree = [one for one in estimates[:-1] if _agree(one, last)] + [last]
    shares = np.array([one.points for one in agree])
    shares = shares / shares.sum()
    moments = np.einsum("s,sm->m", shares, np.stack([one.moments for one in agree]))
    without = np.einsum("s,sjm->jm", shares, np.stack([one.without for one in agree]))
    return Estimate(moments, without, sum(one.points for one in agree))


def _agree(one: Estimate, other: Estimate) -> bool:
    """Whether two stages say the same: a surrogate whose tails were made up says something else, of a small error."""
    by_chance = float(np.hypot(chance_of(one), chance_of(other)))
    return float(np.max(np.abs(sizes(one.moments, other.moments)))) <= tol.BY_CHANCE * by_chance


def chances(one: Estimate) -> Array:
    """Standard errors of means, in posterior sds, and of log sds, (2 M,)."""
    return jackknife(np.stack([sizes(left, one.moments) for left in one.without]))


def chance_of(one: Estimate) -> float:
    """The largest of them."""
    return float(np.max(chances(one)))


def sizes(moments: Array, other: Array) -> Array:
    """Means less those of others, in their sds, and log sds less theirs, (2 M,)."""
    (mean, second), (center, square) = np.split(moments, 2), np.split(other, 2)
    variance, own = np.maximum(square - center**2, tol.VARIANCE_FLOOR), np.maximum(second - mean**2, tol.VARIANCE_FLOOR)
    return np.concatenate([(mean - center) / np.sqrt(variance), 0.5 * np.log(own / variance)])


def tilted(of: Drawn, x: Array, target: Array, unit: Unit) -> Drawn | None:
    """Draws whose weights are changed as little as gives x (S, M) of them these moments; None where none do.

    The weights take a factor exp(λ z + κ z²). Far out z stays as it is on the way there: a candidate without weight
    would get all of it.
    """
    own = unit_of(x, of.weights)
    mean, second = np.split(target, 2)
    shift, ratio = (unit.center + unit.length * mean - own.center) / own.length, unit.length / own.length
    wanted = np.concatenate([shift, ratio**2 * (second - mean**2) + shift**2])
    z = (x - own.center) / own.length
    parts, near = (np.concatenate([part, part**2], axis=1) for part in (z, np.clip(z, -tol.TILT_REACH, tol.TILT_REACH)))
    tilt, weights = np.zeros(parts.shape[1]), of.weights
    for _ in range(tol.TILT_STEPS):
        there = weights @ parts
        curved = ((parts - there) * weights[:, None]).T @ near
        tilt = tilt + np.linalg.lstsq(curved, wanted - there, rcond=tol.TILT_DIGITS)[0]
        weights = normalise(np.log(np.maximum(of.weights, tol.ABOVE_ZERO)) + near @ tilt)
    if not np.max(np.abs(weights @ parts - wanted)) <= tol.TILT_LEFT:
        return None
    moments = weighted_moments(of.u, weights)
    return of._replace(weights=weights, mean=moments.mean, covariance=moments.covariance)


def draws_of(state: Weighing, through: Surrogate, mean: Array, covariance: Array, count: int, stream: int) -> Drawn:
    """Draws of a surrogate that has about these moments, so many of a scramble, that stand for the posterior."""
    by = surrogate.mixture(mean, covariance, count, tol.DRAWS_WIDE, state.shape.far)
    return surrogate.drawn(through, by, state.shape.coordinates.folded, stream)


def chance_of_draws(of: Drawn) -> float:
    """Standard error of moments of a surrogate by its draws."""
    unit = Unit(of.mean, np.sqrt(np.diag(of.covariance)))
    whole = moments_of(of.u, of.weights, unit)
    kept = [np.where(of.scramble != one, of.weights, 0.0) for one in range(common.SCRAMBLES)]
    without = [sizes(moments_of(of.u, one / one.sum(), unit), whole) for one in kept]
    return float(np.max(jackknife(np.stack(without))))


def widens(points: Array, weights: Array, i: int) -> bool:
    """Whether another coordinate spreads more where coordinate i is low than where it is high, quarter by quarter."""
    order = np.argsort(points[:, i], kind="stable")
    shares = np.cumsum(weights[order])
    ends = order[shares <= tol.QUARTER], order[shares >= 1.0 - tol.QUARTER]
    if min(len(end) for end in ends) < 2:
        return False
    low, high = (weighted_moments(points[end], weights[end] / weights[end].sum()).covariance for end in ends)
    others = np.arange(points.shape[1]) != i
    return bool(np.any(np.diag(low)[others] > tol.WIDENS**2 * np.diag(high)[others]))
