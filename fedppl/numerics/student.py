"""The multivariate t: quasi-random points of independent scrambles, and its density. Its tails reach beyond q's."""

from __future__ import annotations

import numpy as np
from scipy import stats
from scipy.special import gammaln, ndtri
from scipy.stats import qmc

from fedppl.numerics.kept import kept
from fedppl.types import Array

DEGREES = 5.0
SCRAMBLES = 8  # independent ones, whose estimates' spread is the error


@kept(most_bytes=2**27)
def standard_points(size: int, count: int, stream: int) -> Array:
    """Points of a standard multivariate t, `count` of each scramble one after the other, (scrambles x count, size)."""
    parts = []
    for scramble in range(SCRAMBLES):
        sequence = qmc.Sobol(size + 1, seed=np.random.default_rng((stream, scramble)))
        uniform = sequence.random_base2(int(np.ceil(np.log2(count))))[:count]  # balanced where count is a power of 2
        uniform = np.clip(uniform, 1e-12, 1 - 1e-12)
        chi2 = stats.chi2.ppf(uniform[:, 0], DEGREES)
        parts.append(ndtri(uniform[:, 1:]) * np.sqrt(DEGREES / chi2)[:, None])
    return np.concatenate(parts)


def log_density(white: Array, root: Array) -> Array:
    """Log density of mean + root t at points whose t is `white`, (S, m), for a triangular root: (S,)."""
    m = white.shape[1]
    constant = gammaln((DEGREES + m) / 2) - gammaln(DEGREES / 2) - 0.5 * m * np.log(DEGREES * np.pi)
    constant -= np.sum(np.log(np.abs(np.diag(root))))
    return np.asarray(constant - 0.5 * (DEGREES + m) * np.log1p(np.sum(white**2, axis=1) / DEGREES))
