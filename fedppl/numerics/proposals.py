"""Proposals: multivariate t's with given moments, out into the tails of weighted points; and posteriors by them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.special import gammaln, logsumexp, ndtri

from fedppl import gaussian
from fedppl.gaussian import Gaussian
from fedppl.numerics import importance
from fedppl.numerics import tolerances as tol
from fedppl.numerics.importance import effective_size, normalise, weighted_moments
from fedppl.numerics.streams import cached, uniform
from fedppl.types import Array


class Proposal(NamedTuple):
    """A multivariate t with its number of points; or points along one side of a coordinate.

    Along a side z₁ ≥ 0 has heavier tails than the others, and x = mean + root z + bend log(1 + z₁): in a funnel the log
    of a scale rises with the log of a location's distance, along correlated tails a coordinate with the distance.
    """

    mean: Array  # (m,)
    root: Array  # (m, m), of x = mean + root z
    per_scramble: int
    bend: Array = np.zeros(0)  # (m,) for points along a side; (0,) for a t
    degrees: float = 0.0  # of z₁ along a side


def propose(mean: Array, covariance: Array, count: int) -> Proposal:
    """The t with these moments."""
    scale = (tol.DEGREES - 2.0) / tol.DEGREES
    return Proposal(mean, np.asarray(np.linalg.cholesky(covariance * scale), dtype=np.float64), count)


def beyond(points: Array, weights: Array, count: int) -> tuple[Proposal, ...]:
    """Proposals for second moments of weighted points (S, m) with heavy tails; none where tails are light.

    One t in all directions has the moments of the points under weights times squared distance from the mean. Where
    single coordinates have heavy tails, half of the points lie along these.
    """
    mean, covariance = weighted_moments(points, weights)
    fourth = weights @ ((points - mean) ** 2 / np.diag(covariance)) ** 2
    order = np.argsort(-fourth, kind="stable")[: tol.MOST_TAILS]
    heavy = [int(i) for i in order if fourth[i] > tol.HEAVY * 3.0]
    if count < 1 or not (heavy or has_heavy_tails(points, weights)):
        return ()
    # Half of the points, for two sides of each coordinate.
    each = 2 ** int(np.log2(max(count // max(4 * len(heavy), 1), 1)))  # Sobol's points are balanced in such numbers
    far = weights * _squared_distances(points, weights)
    moments = weighted_moments(points, far / far.sum())
    sides = [_along(i, sign, points, weights, covariance, each) for i in heavy for sign in (-1.0, 1.0)]
    along = tuple(side for side in sides if side is not None)
    spread = moments.covariance + tol.RIDGE_OF_TAIL * covariance
    middle = propose(moments.mean, spread, max(1, count // 2) if along else count)
    return middle, *along


def _along(i: int, sign: float, points: Array, weights: Array, covariance: Array, count: int) -> Proposal | None:
    """Proposal for the second moment of coordinate i on one side of its mean; None where that side has little of it.

    Along the side it is a t with few degrees of freedom; across it has the covariance of the points out there. A
    multivariate t of m dimensions falls by m powers more along an axis than its marginal does: hardly any of its points
    are far along one axis and in the middle of all others, where independent tails are.
    """
    away = sign * (points[:, i] - weights @ points[:, i])
    is_here = away > 0
    shares = np.where(is_here, weights * away**2, 0.0)
    if shares.sum() < tol.LEAST_SIDE * (weights @ away**2):
        return None
    nearest = np.argsort(away, kind="stable")
    reached = np.searchsorted(np.cumsum(shares[nearest]), np.array(tol.POWER_SHARES) * shares.sum())
    middle, far = away[nearest][reached]
    degrees = tol.POWER_DEGREES if far > tol.POWER * middle else tol.OTHER_DEGREES
    scale = float(middle) / middle_of_t(degrees)
    m = len(covariance)
    start, along, bend, root = points[0].copy(), np.zeros(m), np.zeros(m), np.zeros((m, m))
    start[i], along[i] = weights @ points[:, i], sign * scale
    others = [j for j in range(m) if j != i]
    shares, z = shares[is_here] / shares.sum(), away[is_here] / scale
    residuals = np.zeros((len(z), len(others)))
    for place, j in enumerate(others):
        straight, bent = (_line(feature, points[is_here, j], shares) for feature in (z, np.log1p(z)))
        is_bent = shares @ bent.residuals**2 < shares @ straight.residuals**2
        start[j], (bend if is_bent else along)[j], residuals[:, place] = bent if is_bent else straight
    root[:, 0] = along
    if others:
        spread = (residuals * shares[:, None]).T @ residuals + tol.RIDGE_OF_TAIL * covariance[np.ix_(others, others)]
        root[others, 1:] = np.linalg.cholesky(spread * (tol.DEGREES - 2.0) / tol.DEGREES)
    return Proposal(start, root, count, bend, degrees)


class _Line(NamedTuple):
    intercept: float
    slope: float
    residuals: Array  # (S,)


def _line(x: Array, y: Array, weights: Array) -> _Line:
    x_mean, y_mean = weights @ x, weights @ y
    variance = (1.0 + tol.RIDGE_OF_TAIL) * (weights @ (x - x_mean) ** 2) + tol.TINY
    slope = (weights @ ((x - x_mean) * (y - y_mean))) / variance
    return _Line(float(y_mean - slope * x_mean), float(slope), y - y_mean - slope * (x - x_mean))


def has_heavy_tails(points: Array, weights: Array) -> bool:
    """Whether fourth moments of weighted points (S, m) exceed a normal's: Mardia's kurtosis."""
    m = points.shape[1]
    return bool(weights @ _squared_distances(points, weights) ** 2 > tol.HEAVY * m * (m + 2))


def _squared_distances(points: Array, weights: Array) -> Array:
    mean, covariance = weighted_moments(points, weights)
    root = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
    return np.asarray(np.sum(whitened(points, mean, root) ** 2, axis=1))


def points_of(proposal: Proposal, stream: int) -> Array:
    """Points of a proposal, scramble after scramble, (scrambles x count, m)."""
    mean, root, count, bend, degrees = proposal
    if not len(bend):
        return np.asarray(mean + standard_points_of_t(len(mean), count, stream) @ root.T)
    z = points_of_t_along(len(mean), count, stream, degrees)
    return np.asarray(mean + z @ root.T + np.log1p(z[:, :1]) * bend)


def log_mixture(proposals: tuple[Proposal, ...], points: Array) -> Array:
    """Log density of the proposals' mixture by their numbers of points, at points (S, m): the balance heuristic."""
    total = sum(proposal.per_scramble for proposal in proposals)
    logs = []
    for mean, root, count, bend, degrees in proposals:
        if len(bend):
            i = int(np.flatnonzero(~np.any(root[:, 1:], axis=1))[0])  # the coordinate that depends on z₁ alone
            distance = np.maximum((points[:, i] - mean[i]) / root[i, 0], 0.0)  # z₁; 0 on the other side
            straight = points - np.log1p(distance)[:, None] * bend
            log_density = log_density_of_t_along(whitened(straight, mean, root), root, degrees)
        else:
            log_density = log_density_of_t(whitened(points, mean, root), root)
        logs.append(log_density + np.log(count / total))
    return np.asarray(np.logaddexp.reduce(logs, axis=0))


def scrambles(proposals: tuple[Proposal, ...]) -> NDArray[np.intp]:
    """Number of the independent scramble of each of the proposals' points, (S,)."""
    return np.concatenate([np.repeat(np.arange(tol.SCRAMBLES), proposal.per_scramble) for proposal in proposals])


def whitened(points: Array, mean: Array, root: Array) -> Array:
    """z of points = mean + root z."""
    return np.asarray(np.linalg.solve(root, (points - mean).T).T, dtype=np.float64)


# The multivariate t: quasi-random points of independent scrambles, and its density ------------------------------------


@cached(most_bytes=tol.DESIGN_BYTES)
def standard_points_of_t(size: int, count: int, stream: int) -> Array:
    """Points of a standard multivariate t, `count` of each scramble one after the other, (scrambles x count, size)."""
    each = uniform(size + 1, count, stream, tol.SCRAMBLES)
    return np.asarray(ndtri(each[:, 1:]) * np.sqrt(tol.DEGREES / stats.chi2.ppf(each[:, :1], tol.DEGREES)))


@cached(most_bytes=tol.DESIGN_BYTES)
def points_of_t_along(size: int, count: int, stream: int, degrees: float) -> Array:
    """Points whose first coordinate is the absolute value of a t with few degrees; the others are a multivariate t."""
    each = uniform(size + 1, count, stream, tol.SCRAMBLES)
    others = ndtri(each[:, 2:]) * np.sqrt(tol.DEGREES / stats.chi2.ppf(each[:, :1], tol.DEGREES))
    return np.column_stack([stats.t.isf(0.5 * each[:, 1], degrees), others])


def log_density_of_t(white: Array, root: Array) -> Array:
    """Log density of mean + root t at points whose t is `white`, (S, m): (S,)."""
    return np.asarray(_log_standard(white, tol.DEGREES) - np.linalg.slogdet(root)[1])


def middle_of_t(degrees: float) -> float:
    """Median of the absolute value of a t."""
    return float(stats.t.ppf(0.75, degrees))


def log_density_of_t_along(white: Array, root: Array, degrees: float) -> Array:
    """Log density of mean + root z where z is as `points_of_t_along` are, at points whose z is `white`: (S,)."""
    parts = np.log(2.0) + _log_standard(white[:, :1], degrees) + _log_standard(white[:, 1:], tol.DEGREES)
    return np.asarray(np.where(white[:, 0] >= 0, parts - np.linalg.slogdet(root)[1], -np.inf))


def _log_standard(white: Array, degrees: float) -> Array:
    m = white.shape[1]
    constant = gammaln((degrees + m) / 2) - gammaln(degrees / 2) - 0.5 * m * np.log(degrees * np.pi)
    return np.asarray(constant - 0.5 * (degrees + m) * np.log1p(np.sum(white**2, axis=1) / degrees))


# A posterior from a Gaussian q and weighted points of a proposal g that reaches further than q ------------------------

# With weights w = posterior / g and u = q / g, each normalised to sum to one over the points,
# E[h] = E_q[h] + Σ (w_s − u_s) h(φ_s) and Z / Z_q = Σ w*_s / Σ u*_s (stars: before normalising). q is a control
# variate: where the posterior is q, w and u are equal, and both are exact.


class Reweighted(NamedTuple):
    """The posterior as weighted points, with q as their control variate."""

    points: Array  # (S, m)
    weights: Array  # (S,) of the posterior, smoothed; they sum to 1
    of_q: Array  # (S,) of q; they sum to 1
    scramble: NDArray[np.intp]  # (S,) which of the independent ones a point is of
    mean: Array  # (m,)
    covariance: Array  # (m, m)
    log_ratio: float  # log Z / Z_q
    error: float  # largest standard error of a mean or of an sd, in posterior sds
    log_ratio_error: float
    ess: float
    pareto_k: float
    second_k: float  # largest Pareto k of weights times a squared coordinate; −inf where no tail has a share of it
    told: int  # number of points that have a weight
    beside: float = 0.0  # error of a mean or an sd, in posterior sds, that the spread of the points does not show


def weigh_points(
    q: Gaussian, points: Array, scramble: NDArray[np.intp], residual: Array, log_proposal: Array
) -> Reweighted | None:
    """Weigh points (S, m) of a proposal with a log density (S,) by the posterior's log density less q's kernel, (S,).

    Points with NaN, which have no value, are left out; None where none is left.
    """
    has_value = np.isfinite(residual) | (residual == -np.inf)
    of_q = np.where(has_value, gaussian.log_density(q, points) - log_proposal, -np.inf)
    raw = np.where(has_value, of_q + np.nan_to_num(residual, nan=-np.inf, neginf=-np.inf), -np.inf)
    return weigh(q, points, scramble, raw, of_q, int(has_value.sum()))


def weigh(
    q: Gaussian, points: Array, scramble: NDArray[np.intp], raw: Array, of_q: Array, told: int
) -> Reweighted | None:
    """The posterior by points (S, m), its log weights (S,) and those of q at them; `told` of them have a value.

    None where none has a weight.
    """
    if not np.any(np.isfinite(raw)):
        return None
    log_weights, shape = importance.smoothed(raw)
    unsmoothed = normalise(raw) - normalise(of_q)
    of_q, _ = importance.smoothed(of_q)  # as the others, to be equal to them where the posterior is q
    weights, control = normalise(log_weights), normalise(of_q)
    center, root = gaussian.affine(q)
    white = whitened(points, center, root)
    mean, covariance = _moments(white, weights, control)
    coloured = root @ covariance @ root.T
    sd = np.sqrt(np.diag(coloured))
    parts = (points - (center + root @ mean)) / sd
    errors, log_ratio_error = _by_scramble(np.concatenate([parts, 0.5 * parts**2], axis=1), log_weights, of_q, scramble)
    return Reweighted(
        points=points,
        weights=weights,
        of_q=control,
        scramble=scramble,
        mean=center + root @ mean,
        covariance=(coloured + coloured.T) / 2,
        log_ratio=float(logsumexp(log_weights) - logsumexp(of_q)),
        error=float(np.max(errors)),
        log_ratio_error=log_ratio_error,
        ess=effective_size(weights),
        pareto_k=shape,
        second_k=second_k(unsmoothed, points, weights),
        told=told,
    )


def is_trusted(by: Reweighted) -> bool:
    """Whether Pareto k, error and effective size are those of weights that give the posterior's moments."""
    has_moments = by.pareto_k <= importance.limit(by.told) and by.second_k <= tol.MOST_SECOND_K
    return bool(has_moments and by.error <= tol.MOST_ERROR and by.ess >= tol.FEWEST)


def second_k(added: Array, points: Array, weights: Array) -> float:
    """Largest Pareto k of what points add to an sd: where few have most of it, scrambles do not show its error.

    Only coordinates count whose outermost points have a share of the sd: others end within the reach of the points.
    """
    outermost, largest = max(tol.OUTERMOST_POINTS, len(points) // tol.POINTS_AN_OUTERMOST), -np.inf
    for centred in (points - weights @ points).T:
        shares = np.abs(added) * centred**2
        sorted_ = shares[np.argsort(centred, kind="stable")]
        if max(sorted_[:outermost].sum(), sorted_[-outermost:].sum()) > tol.OUTERMOST_SHARE * (weights @ centred**2):
            largest = max(largest, importance.pareto_k(np.log(np.maximum(shares, tol.TINY))))
    return float(largest)


def _moments(white: Array, weights: Array, control: Array) -> tuple[Array, Array]:
    """Mean and covariance where q is N(0, I); by the weights alone where the control variate leaves no covariance."""
    m, signed = white.shape[1], weights - control
    mean = signed @ white
    covariance = np.eye(m) + (white * signed[:, None]).T @ white - np.outer(mean, mean)
    plain = weighted_moments(white, weights)
    if np.linalg.eigvalsh(covariance)[0] > tol.LEAST_OF_PLAIN * np.linalg.eigvalsh(plain.covariance)[0]:
        return mean, covariance
    return plain.mean, plain.covariance


def _by_scramble(functions: Array, log_weights: Array, of_q: Array, where: NDArray[np.intp]) -> tuple[Array, float]:
    """Standard errors of the points' contribution to E_q of functions (S, n), (n,), and of log Z / Z_q."""
    shifts, ratios = [], []
    for scramble in range(tol.SCRAMBLES):
        kept = where != scramble
        weights, control = log_weights[kept], of_q[kept]
        if not np.any(np.isfinite(weights)) or not np.any(np.isfinite(control)):
            return np.full(functions.shape[1], np.inf), np.inf
        shifts.append((normalise(weights) - normalise(control)) @ functions[kept])
        ratios.append(logsumexp(weights) - logsumexp(control))
    return importance.jackknife(np.array(shifts)), float(importance.jackknife(np.array(ratios)))
