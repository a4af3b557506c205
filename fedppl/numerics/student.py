"""The multivariate t: quasi-random points of independent scrambles, and its density. Its tails reach beyond q's."""

from __future__ import annotations

import numpy as np
from scipy import stats
from scipy.special import gammaln, ndtri
from scipy.stats import qmc

from fedppl.numerics.kept import kept
from fedppl.types import Array

DEGREES = 5.0
ALONG = 3.0  # degrees along a coordinate whose tails are heavier than others'
MIDDLE = 0.7648923284043543  # half of a t with so many lies within
SCRAMBLES = 8  # independent ones, whose estimates' spread is the error


@kept(most_bytes=2**27)
def standard_points(size: int, count: int, stream: int) -> Array:
    """Points of a standard multivariate t, `count` of each scramble one after the other, (scrambles x count, size)."""
    parts = []
    for uniform in _uniform(size, count, stream):
        chi2 = stats.chi2.ppf(uniform[:, 0], DEGREES)
        parts.append(ndtri(uniform[:, 1:]) * np.sqrt(DEGREES / chi2)[:, None])
    return np.concatenate(parts)


@kept(most_bytes=2**27)
def points_across(size: int, count: int, stream: int) -> Array:
    """A uniform number, and a standard multivariate t of one dimension less, as `standard_points` are."""
    parts = []
    for uniform in _uniform(size, count, stream):
        chi2 = stats.chi2.ppf(uniform[:, 0], DEGREES)
        others = ndtri(uniform[:, 2:]) * np.sqrt(DEGREES / chi2)[:, None]
        parts.append(np.column_stack([uniform[:, 1], others]))
    return np.concatenate(parts)


def two_sided(uniform: Array, sides: Array) -> Array:
    """Quantiles of a t with few degrees whose sides differ: share and scale of the lower one, scale of the upper."""
    share, lower, upper = sides
    p = np.where(uniform < share, 1.0 - uniform / share, (uniform - share) / (1.0 - share))
    distance = stats.t.isf(0.5 * np.maximum(1.0 - p, 1e-12), ALONG)
    return np.asarray(np.where(uniform < share, -lower * distance, upper * distance))


def _uniform(size: int, count: int, stream: int) -> list[Array]:
    """Sobol points of each scramble, (count, size + 1)."""
    found = []
    for scramble in range(SCRAMBLES):
        sequence = qmc.Sobol(size + 1, seed=np.random.default_rng((stream, scramble)))
        uniform = sequence.random_base2(int(np.ceil(np.log2(count))))[:count]  # balanced where count is a power of 2
        found.append(np.clip(uniform, 1e-12, 1 - 1e-12))
    return found


def log_density(white: Array, root: Array) -> Array:
    """Log density of mean + root t at points whose t is `white`, (S, m): (S,)."""
    return np.asarray(_log_standard(white, DEGREES) - np.linalg.slogdet(root)[1])


def log_density_along(white: Array, root: Array, sides: Array) -> Array:
    """Log density of mean + root z where the first coordinate of z is `two_sided`, and the others are a t: (S,)."""
    share, lower, upper = sides
    is_lower = white[:, 0] < 0
    scale = np.where(is_lower, lower, upper)
    first = np.log(2.0 * np.where(is_lower, share, 1.0 - share) / scale)
    first += _log_standard(white[:, :1] / scale[:, None], ALONG)
    return np.asarray(first + _log_standard(white[:, 1:], DEGREES) - np.linalg.slogdet(root)[1])


def _log_standard(white: Array, degrees: float) -> Array:
    m = white.shape[1]
    constant = gammaln((degrees + m) / 2) - gammaln(degrees / 2) - 0.5 * m * np.log(degrees * np.pi)
    return np.asarray(constant - 0.5 * (degrees + m) * np.log1p(np.sum(white**2, axis=1) / degrees))
