r"""A posterior from a Gaussian q and weighted points of a proposal g that reaches further than q.

With weights w = posterior / g and u = q / g, each normalised to sum to one over the points,

.. math:: E[h] = E_q[h] + \sum_s (w_s - u_s)\, h(\varphi_s), \qquad Z / Z_q = \sum_s w^*_s / \sum_s u^*_s

(stars: before normalising). q is a control variate: where the posterior is q, w and u are equal, and both are exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fedppl import gaussian
from fedppl.gaussian import Gaussian
from fedppl.numerics import importance
from fedppl.numerics import tolerances as tol
from fedppl.numerics.importance import effective_size, normalise, weighted_moments
from fedppl.numerics.proposals import whitened
from fedppl.types import Array


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
