"""The Gaussian mechanism: clipping, noise without a seed, and the ε of several releases."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri

from fedppl.settings import between, positive, whole
from fedppl.types import Array, DeclarationError

__all__ = ["epsilon"]  # of a namespace that users have


def epsilon(noise_multiplier: float | Sequence[float], releases: int | Sequence[int] = 1, delta: float = 1e-5) -> float:
    r"""ε of (ε, δ)-differential privacy for one client's whole data after some releases of `PrivateEP`.

    .. math:: \mu = 2 \sqrt{\textstyle\sum_i T_i / z_i^2}, \qquad
              \delta(\epsilon) = \Phi\!\left(-\frac{\epsilon}{\mu} + \frac{\mu}{2}\right)
              - e^\epsilon\, \Phi\!\left(-\frac{\epsilon}{\mu} - \frac{\mu}{2}\right)

    with z_i = `noise_multiplier`, T_i = `releases`. Two data sets of a client give vectors of norm at most `clip`,
    which differ by at most 2 `clip`: one release is a Gaussian mechanism whose noise is z / 2 times its sensitivity.
    Several releases are together a Gaussian mechanism of their summed μ², exactly, even if later settings depend on
    earlier releases.

    Parameters
    ----------
    noise_multiplier
        Standard deviation of the noise over `clip`; one number, or one for each setting.
    releases
        Number of releases with it; likewise.
    delta
        The δ of the guarantee.

    Returns
    -------
    float
        The smallest ε.

    Raises
    ------
    DeclarationError
        For an argument out of range, or settings of unequal number.

    Examples
    --------
    >>> import fedppl
    >>> round(fedppl.privacy.epsilon(noise_multiplier=20.0, releases=10), 2)
    1.2
    >>> round(fedppl.privacy.epsilon([20.0, 5.0], [10, 2]), 2)
    2.67

    Notes
    -----
    The unit is all data of one client: two inputs are neighbours when they differ in all of it. The server is not
    trusted and knows which clients it asked, so sampling clients does not reduce ε.

    *When this fails.* ε is of these releases alone. Another run on the same data adds to it: give the settings of both.
    Other publications of the client are not known here.

    References
    ----------
    .. [1] Balle, Wang (2018), Improving the Gaussian mechanism for differential privacy, ICML, theorem 8.
    .. [2] Dong, Roth, Su (2022), Gaussian differential privacy, JRSS B 84, corollary 3.3.
    .. [3] Smith, Thakurta (2022), Fully adaptive composition for Gaussian differential privacy.
    """
    noises, counts = _each(noise_multiplier), _each(releases)
    if len(noises) != len(counts):
        raise DeclarationError(
            f"noise_multiplier= has {len(noises)} settings and releases= has {len(counts)}; give one count for each."
        )
    noises = [positive("noise_multiplier", noise) for noise in noises]
    counts = [whole("releases", count) for count in counts]
    delta = between("delta", delta, 0, 1, hint="take it well below 1 / number of clients")
    return epsilon_at(delta, gaussian_mu(noises, counts))


def _each(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | np.ndarray) else [value]


def gaussian_mu(noise_multipliers: Sequence[float], releases: Sequence[int]) -> float:
    """The μ of Gaussian differential privacy of all releases together.

    >>> gaussian_mu([4.0, 2.0], [4, 3])
    2.0
    """
    each = (math.sqrt(count) / noise for noise, count in zip(noise_multipliers, releases, strict=True))
    return 2.0 * math.hypot(*each)


def delta_at(epsilon: float, mu: float) -> float:
    """δ at an ε of a mechanism with this μ.

    >>> round(delta_at(1.0, 1.0), 6)
    0.126937
    """
    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return 1.0
    above, below = (float(log_ndtr(-epsilon / mu + sign * mu / 2)) for sign in (1, -1))
    return math.exp(above) * -math.expm1(min(epsilon + below - above, 0.0))


def epsilon_at(delta: float, mu: float) -> float:
    """The smallest ε at a δ of a mechanism with this μ.

    >>> round(epsilon_at(0.12693673750664397, 1.0), 6)
    1.0
    """
    if delta_at(0.0, mu) <= delta:
        return 0.0
    if math.isinf(mu * mu):
        return math.inf
    most = mu**2 / 2 + mu * math.sqrt(-2 * math.log(delta))  # by Φ(−x) ≤ exp(−x² / 2)
    if delta_at(most, mu) >= delta:  # equal to rounding
        return most
    root = float(brentq(lambda value: delta_at(value, mu) - delta, 0.0, most, xtol=1e-12, rtol=1e-12))
    return min(root * (1 + 1e-9), most)  # above any rounding error


def clipped(vector: Array, clip: float) -> Array:
    """Shorten a vector to norm `clip`; one that is not finite becomes zero.

    >>> clipped(np.array([3.0, 4.0]), 1.0).round(6)
    array([0.6, 0.8])
    """
    largest = float(np.max(np.abs(vector)))
    if not np.isfinite(largest) or largest == 0:
        return np.zeros_like(vector)
    scaled = vector / largest  # squares of huge numbers would overflow
    norm = float(np.linalg.norm(scaled))
    # A little shorter, so that rounding does not carry the norm beyond `clip`.
    allowed = clip * (1 - 1e-9)
    return vector if largest * norm <= allowed else scaled * (allowed / norm)


def system_normals(count: int) -> Array:
    """Draw standard normals from the operating system's entropy, which no seed reproduces.

    Each is a scaled sum of four, so that its last digits do not reveal the value it is added to (Holohan and Braghin
    2021, Secure random sampling in differential privacy, ESORICS).

    >>> system_normals(3).shape
    (3,)
    """
    words = np.frombuffer(secrets.token_bytes(32 * count), dtype=np.uint64).reshape(4, count)
    return np.asarray(ndtri(((words >> np.uint64(12)) + 0.5) * 2.0**-52).sum(axis=0) / 2)
