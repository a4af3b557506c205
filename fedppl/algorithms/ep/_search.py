r"""EP's fixed point over many clients at once: sites are quadratics fitted to log f_k where q is, and q is put right.

.. math:: \log f_k(\varphi) \approx c_k + r_k^\top \varphi - \tfrac12 \varphi^\top Q_k \varphi
          \quad \text{under } q, \qquad q = p \prod_k q_k

With K clients q is as narrow as 1/√K, and log f_k hardly departs from a quadratic over it: a few points, the same for
all clients, tell all sites and, summed, the posterior's own moments, q being the control variate. What the sum departs
from a quadratic by says how good these are. A search begins with few of the clients, and ends with all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts.many import Answers
from fedppl.gaussian import Gaussian
from fedppl.numerics.importance import (
    controlled_moments,
    effective_size,
    enough_points,
    normalise,
    skewness,
    whitened_points,
)
from fedppl.numerics.pareto import pareto_k
from fedppl.types import Array

_LONGEST = 10.0  # sds of the new q that a step is believed to
_NEAR, _ALIKE = (
    0.5,
    0.25,
)  # moves of a mean, in sds, and of a log sd up to which q's points tell the posterior's moments
_REMAINDERS = ((1, 0.05), (4, 0.2), (16, 0.5))  # more points, where a quadratic leaves so much of the log density
_CURVED = 0.25  # of the points' own curvature, the least that a step is made by
_PATIENCE = 5  # passes after which q goes half of the way: it may have swung about where it belongs
_MOST_K, _LEAST = 0.7, 0.5  # Pareto k, and share of the points that are effective, with which moments are trusted

# log f_k of some clients at points (S, m), by way of a center (m,), summed and mapped by (q, S).
Ask = Callable[[Array, Array, Array], Answers]


class Search(NamedTuple):
    """Where q is, and how good."""

    q: Gaussian
    multiple: int  # of the fewest points
    passes: int
    change: float  # of the last pass, in sds
    done: bool
    stuck: str  # why it cannot go on
    found: Found | None


class Found(NamedTuple):
    """The posterior's moments, and what the sum of log f_k departs from a quadratic by."""

    mean: Array  # (m,)
    covariance: Array  # (m, m)
    skewness: Array  # (m,)
    log_ratio: float  # log of its integral over that of q's kernel
    error: float  # of a mean or a log sd, in sds
    remainder: float
    ess: float
    pareto_k: float


class Fitted(NamedTuple):
    """Sites of clients, as natural parameters."""

    linear: Array  # (C, m)
    precision: Array  # (C, m, m)


def begin(q: Gaussian) -> Search:
    """Begin where a q of some of the clients is."""
    return Search(q, 1, 0, np.inf, False, "", None)


def one_pass(
    search: Search, prior: Gaussian, log_ratio: Callable[[Array], Array], ask: Ask
) -> tuple[Search, Callable[[], Fitted], Answers]:
    """Ask all at points of q; the next q, or the posterior's moments where q has arrived."""
    q = search.q
    mean, root = gaussian.affine(q)
    m = len(mean)
    key = (m, search.multiple * enough_points(m, 16), 0)
    z = whitened_points(*key)
    points = mean + z @ root.T
    answers = ask(points, mean, _coefficients(z))
    total = answers.totals + gaussian.log_kernel(prior, points) + log_ratio(points)
    search = search._replace(passes=search.passes + 1)
    if not np.all(np.isfinite(total)):
        return search._replace(stuck="the log density is not finite at points of q"), _no_sites, answers

    def sites() -> Fitted:
        return _natural(answers.fitted[:, 1:], mean, root)

    coefficients = _coefficients(z) @ total
    linear, curvature = coefficients[1 : 1 + m], _matrix(coefficients[1 + m :], m)
    precision = -curvature
    values, vectors = np.linalg.eigh(precision)
    # Where the density hardly curves over the points, or upward, they are as wide as is known.
    held = vectors @ (np.where(values > _CURVED, values, 1.0)[:, None] * vectors.T)
    step = np.linalg.solve(held, linear)
    length = float(np.sqrt(step @ held @ step))
    step = step * min(1.0, _LONGEST / max(length, 1e-300))
    covariance = np.linalg.inv(held)
    moved = float(np.max(np.abs(root @ step) / np.sqrt(np.diag(root @ covariance @ root.T))))
    widths = 0.5 * np.log(np.diag(root @ covariance @ root.T) / np.diag(root @ root.T))
    widened = float(np.max(np.abs(widths)))
    search = search._replace(change=max(moved, widened))
    if moved <= _NEAR and widened <= _ALIKE:
        found = _found(z, key, total - gaussian.log_kernel(q, points), mean, root)
        proper, near = values[0] > _CURVED, found.ess > _LEAST * len(z) and found.pareto_k <= _MOST_K
        if proper and near and found.remainder <= dict(_REMAINDERS)[search.multiple]:
            return search._replace(done=True, found=found), sites, answers
        if search.multiple == _REMAINDERS[-1][0] or not proper:
            why = f"the posterior departs from a Gaussian by {found.remainder:.2g} log units (sd over q's points)"
            return search._replace(stuck=why, found=found), sites, answers
        search = search._replace(multiple=4 * search.multiple)
    if search.passes > _PATIENCE:
        held, linear = 0.5 * (np.eye(m) + held), 0.5 * held @ step
        step, covariance = np.linalg.solve(held, linear), np.linalg.inv(held)
    colour = root @ np.linalg.cholesky(covariance)
    return search._replace(q=_from_root(mean + root @ step, colour)), sites, answers


def _coefficients(z: Array) -> Array:
    """What makes coefficients of a quadratic, (1 + m + m (m + 1) / 2, S), of values at points (S, m)."""
    rows, columns = np.triu_indices(z.shape[1])
    design = np.concatenate([np.ones((len(z), 1)), z, z[:, rows] * z[:, columns]], axis=1)
    return np.asarray(np.linalg.solve(design.T @ design, design.T))


def _matrix(coefficients: Array, m: int) -> Array:
    """Second derivatives (..., m, m) of quadratics with these coefficients (..., p)."""
    rows, columns = np.triu_indices(m)
    found = np.zeros((*coefficients.shape[:-1], m, m))
    found[..., rows, columns] = coefficients
    return np.asarray(found + np.swapaxes(found, -1, -2))


def _natural(coefficients: Array, mean: Array, root: Array) -> Fitted:
    """Natural parameters of quadratics in z = root⁻¹ (φ − mean)."""
    m, inverse = len(mean), np.linalg.inv(root)
    precision = -(inverse.T @ _matrix(coefficients[:, m:], m) @ inverse)
    return Fitted(coefficients[:, :m] @ inverse + precision @ mean, precision)


def _no_sites() -> Fitted:
    raise RuntimeError("there are no sites where the density is not finite")


def _found(z: Array, key: tuple[int, int, int], log_weights: Array, mean: Array, root: Array) -> Found:
    """Moments of q times the weights, the quadratic part of their logarithms done exactly."""
    weights = normalise(log_weights)
    white, remainder, error = controlled_moments(z, log_weights, weights, key)
    covariance = root @ white.covariance @ root.T
    return Found(
        mean=mean + root @ white.mean,
        covariance=(covariance + covariance.T) / 2,
        skewness=skewness(mean + z @ root.T, weights),
        log_ratio=float(np.logaddexp.reduce(log_weights) - np.log(len(z))),
        error=max(error, remainder / np.sqrt(len(z))),
        remainder=remainder,
        ess=effective_size(weights),
        pareto_k=pareto_k(log_weights) if effective_size(weights) < 0.9 * len(z) else -np.inf,
    )


def _from_root(mean: Array, root: Array) -> Gaussian:
    inverse = np.linalg.inv(root)
    precision = inverse.T @ inverse
    return Gaussian(precision @ mean, precision)
