"""The multivariate t: quasi-random points of independent scrambles, and its density."""

from __future__ import annotations

import numpy as np
from scipy import stats
from scipy.special import gammaln, ndtri

from fedppl.numerics import tolerances as tol
from fedppl.numerics.streams import cached, uniform
from fedppl.types import Array

DEGREES, SCRAMBLES = tol.DEGREES, tol.SCRAMBLES  # where others look for them


@cached(most_bytes=tol.DESIGN_BYTES)
def standard_points(size: int, count: int, stream: int) -> Array:
    """Points of a standard multivariate t, `count` of each scramble one after the other, (scrambles x count, size)."""
    each = uniform(size + 1, count, stream, tol.SCRAMBLES)
    return np.asarray(ndtri(each[:, 1:]) * np.sqrt(tol.DEGREES / stats.chi2.ppf(each[:, :1], tol.DEGREES)))


@cached(most_bytes=tol.DESIGN_BYTES)
def points_along(size: int, count: int, stream: int, degrees: float) -> Array:
    """Points whose first coordinate is the absolute value of a t with few degrees; the others are a multivariate t."""
    each = uniform(size + 1, count, stream, tol.SCRAMBLES)
    others = ndtri(each[:, 2:]) * np.sqrt(tol.DEGREES / stats.chi2.ppf(each[:, :1], tol.DEGREES))
    return np.column_stack([stats.t.isf(0.5 * each[:, 1], degrees), others])


def log_density(white: Array, root: Array) -> Array:
    """Log density of mean + root t at points whose t is `white`, (S, m): (S,)."""
    return np.asarray(_log_standard(white, tol.DEGREES) - np.linalg.slogdet(root)[1])


def middle(degrees: float) -> float:
    """Median of the absolute value of a t."""
    return float(stats.t.ppf(0.75, degrees))


def log_density_along(white: Array, root: Array, degrees: float) -> Array:
    """Log density of mean + root z where z is as `points_along` are, at points whose z is `white`: (S,)."""
    parts = np.log(2.0) + _log_standard(white[:, :1], degrees) + _log_standard(white[:, 1:], tol.DEGREES)
    return np.asarray(np.where(white[:, 0] >= 0, parts - np.linalg.slogdet(root)[1], -np.inf))


def _log_standard(white: Array, degrees: float) -> Array:
    m = white.shape[1]
    constant = gammaln((degrees + m) / 2) - gammaln(degrees / 2) - 0.5 * m * np.log(degrees * np.pi)
    return np.asarray(constant - 0.5 * (degrees + m) * np.log1p(np.sum(white**2, axis=1) / degrees))
