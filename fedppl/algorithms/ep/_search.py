r"""EP's fixed point over many clients at once: sites are quadratics fitted to log f_k where q is, and q is put right.

.. math:: \log f_k(\varphi) \approx c_k + r_k^\top \varphi - \tfrac12 \varphi^\top Q_k \varphi
          \quad \text{under } q, \qquad q = p \prod_k q_k

With K clients q is as narrow as 1/√K, and log f_k hardly departs from a quadratic over it: a few points, the same for
all clients, tell all sites and, summed, the posterior itself, as q times a polynomial's exponential. What the sum
departs from that by says how good it is.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations_with_replacement
from math import comb
from typing import NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts.many import Answers
from fedppl.gaussian import Gaussian
from fedppl.numerics.importance import (
    effective_size,
    enough_points,
    normalise,
    quadratic_map,
    skewness,
    standard_normal,
    whitened_points,
)
from fedppl.numerics.pareto import pareto_k
from fedppl.numerics.student import SCRAMBLES
from fedppl.types import Array

_LONGEST = 10.0  # sds of the new q that a step is believed to
# Moves of a mean, in sds, and of a log sd, up to which q's points tell the posterior.
_NEAR, _ALIKE = 0.5, 0.25
_MULTIPLES, _LEFT = (1, 4, 16), 0.05  # of points, where so much of the log density is left
_DEGREES, _POINTS = (2, 3, 4), 512  # of polynomials that there are points enough for; points of a scramble
_CURVED = 0.25  # of the points' own curvature, the least that a step is made by
_PATIENCE = 5  # passes after which q goes half of the way: it may have swung about where it belongs
_SKEWED = 0.25  # of a margin: a longer tail is longer than a polynomial can tell
_MOST_K, _LEAST = 0.5, 0.5  # Pareto k, and share of the points that are effective, with which moments are trusted

# log f_k of some clients at points (S, m), by way of a center (m,), summed and mapped by (q, S).
Ask = Callable[[Array, Array, Array], Answers]


class Search(NamedTuple):
    """Where q is, and how good."""

    q: Gaussian
    multiple: int  # of the fewest points
    passes: int
    change: float  # of a mean in the last pass, in sds
    change_sd: float  # of a log sd
    stuck: str  # why it cannot go on
    done: bool  # what was found is the posterior; else it is as near as a polynomial comes
    found: Found | None


class Found(NamedTuple):
    """The posterior as weighted points of q, by a polynomial in z that the log density over q's was fitted by."""

    points: Array  # (N, m)
    scramble: Array  # (N,) which of the independent ones a point is of
    log_weights: Array  # (N,)
    mean: Array  # (m,)
    covariance: Array  # (m, m)
    skewness: Array  # (m,)
    log_ratio: float  # log of its integral over that of q's kernel
    error: float  # of a mean or a log sd, in sds
    remainder: float  # what the polynomial leaves of the log density, as an sd over q's points
    ess: float
    pareto_k: float


class Fitted(NamedTuple):
    """Sites of clients, as natural parameters."""

    linear: Array  # (C, m)
    precision: Array  # (C, m, m)


def begin(q: Gaussian) -> Search:
    """Begin where a q of some of the clients is."""
    return Search(q, 1, 0, np.inf, np.inf, "", False, None)


def one_pass(
    search: Search, prior: Gaussian, log_ratio: Callable[[Array], Array], ask: Ask
) -> tuple[Search, Callable[[], Fitted], Answers]:
    """Ask all at points of q; the next q, or the posterior's moments where q has arrived."""
    q = search.q
    mean, root = gaussian.affine(q)
    m = len(mean)
    z = whitened_points(m, search.multiple * enough_points(m, 16), 0)
    points = mean + z @ root.T
    project = quadratic_map(z)
    answers = ask(points, mean, project)
    total = answers.totals + gaussian.log_kernel(prior, points) + log_ratio(points)
    search = search._replace(passes=search.passes + 1)
    if not np.all(np.isfinite(total)):
        return search._replace(stuck="the log density is not finite at points of q"), _no_sites, answers

    def sites() -> Fitted:
        return _natural(answers.fitted[:, 1:], mean, root)

    coefficients = project @ total
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
    search = search._replace(change=moved, change_sd=widened)
    if moved <= _NEAR and widened <= _ALIKE:
        found = _found(z, total - gaussian.log_kernel(q, points), mean, root)
        proper = values[0] > _CURVED and found.ess > _LEAST * len(found.points) and found.pareto_k <= _MOST_K
        skewed = float(np.abs(found.skewness).max()) > _SKEWED
        done = proper and not skewed and found.remainder <= _LEFT
        if done or not proper or skewed or search.multiple == _MULTIPLES[-1]:
            return search._replace(done=done, found=found), sites, answers
        search = search._replace(multiple=_MULTIPLES[_MULTIPLES.index(search.multiple) + 1])
    if search.passes > _PATIENCE:
        held, linear = 0.5 * (np.eye(m) + held), 0.5 * held @ step
        step, covariance = np.linalg.solve(held, linear), np.linalg.inv(held)
    colour = root @ np.linalg.cholesky(covariance)
    return search._replace(q=_from_root(mean + root @ step, colour)), sites, answers


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


def _found(z: Array, log_weights: Array, mean: Array, root: Array) -> Found:
    """Weighted points of q and their moments, q being the control variate."""
    count, m = z.shape
    degree = max((one for one in _DEGREES if 2 * comb(m + one, m) <= count), default=2)
    design = _monomials(z, degree)
    coefficients = np.linalg.lstsq(design, log_weights, rcond=None)[0]
    left = log_weights - design @ coefficients
    remainder = float(np.sqrt(left @ left / max(count - design.shape[1], 1)))
    white = standard_normal(m, _POINTS, 0, SCRAMBLES)
    logs = _monomials(white, degree) @ coefficients
    weights = normalise(logs)
    signed = weights - 1.0 / len(white)
    shift = signed @ white
    covariance = np.eye(m) + (white * signed[:, None]).T @ white - np.outer(shift, shift)
    coloured = root @ covariance @ root.T
    points = mean + white @ root.T
    ess = effective_size(weights)
    return Found(
        points=points,
        scramble=np.repeat(np.arange(SCRAMBLES), _POINTS),
        log_weights=logs,
        mean=mean + root @ shift,
        covariance=(coloured + coloured.T) / 2,
        skewness=skewness(points, weights),
        log_ratio=float(np.logaddexp.reduce(logs) - np.log(len(logs))),
        error=remainder / np.sqrt(count),
        remainder=remainder,
        ess=ess,
        pareto_k=pareto_k(logs) if ess < 0.9 * len(white) else -np.inf,
    )


def _monomials(z: Array, degree: int) -> Array:
    """All products of at most `degree` coordinates of points (S, m)."""
    products = [np.ones(len(z))]
    for order in range(1, degree + 1):
        products += [
            np.prod(z[:, list(one)], axis=1) for one in combinations_with_replacement(range(z.shape[1]), order)
        ]
    return np.stack(products, axis=1)


def _from_root(mean: Array, root: Array) -> Gaussian:
    inverse = np.linalg.inv(root)
    precision = inverse.T @ inverse
    return Gaussian(precision @ mean, precision)
