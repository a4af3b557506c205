"""The Gaussian mechanism: vectors of bounded norm, noise that nobody can subtract, and the ε of some releases."""

from __future__ import annotations

import functools
import secrets
from typing import Any

import numpy as np
from scipy.special import ndtri

from fedppl.settings import between, positive, whole
from fedppl.types import Array

__all__ = ["clipped", "epsilon", "system_normals"]


def epsilon(noise_multiplier: float, releases: int, delta: float = 1e-5) -> float:
    r"""ε of (ε, δ)-differential privacy for one client's whole data after some releases of `PrivateEP`.

    .. math:: \epsilon_\alpha = \frac{2 \alpha T}{z^2}, \qquad
              \epsilon = \min_{\alpha > 1} \epsilon_\alpha + \log\frac{\alpha - 1}{\alpha}
              - \frac{\log \delta + \log \alpha}{\alpha - 1}

    with z = `noise_multiplier`, T = `releases`. Two data sets of a client give vectors of norm at most `clip` each,
    so they differ by at most 2 `clip`: one release is a Gaussian mechanism whose noise is z / 2 times its sensitivity.

    Parameters
    ----------
    noise_multiplier
        Standard deviation of the noise over `clip`.
    releases
        How many noised vectors leave the client.
    delta
        The δ of the guarantee.

    Returns
    -------
    float
        ε, by the Rényi accountant of dp-accounting.

    Raises
    ------
    DeclarationError
        For an argument out of range.
    ModuleNotFoundError
        Where dp-accounting is not installed.

    Examples
    --------
    >>> import pytest; _ = pytest.importorskip("dp_accounting")
    >>> import fedppl
    >>> round(fedppl.privacy.epsilon(noise_multiplier=20.0, releases=10), 2)
    1.31

    Notes
    -----
    The unit is everything one client holds: two inputs are neighbours when they differ in all of one client's data.
    The server is not trusted, so sampling clients does not make ε smaller: it knows whom it asked.

    *When this fails.* ε is of these releases alone. Another run on the same data, or anything else that the client
    publishes, comes on top; releases add up, so ask for the sum of the runs' releases.

    References
    ----------
    .. [1] Mironov (2017), Rényi differential privacy, CSF.
    .. [2] Canonne, Kamath, Steinke (2020), The discrete Gaussian for differential privacy, NeurIPS, Proposition 12.
    """
    noise = positive("noise_multiplier", noise_multiplier)
    count = whole("releases", releases)
    delta = between("delta", delta, 0, 1, hint="take it well below 1 / number of clients")
    return _composed(noise / 2, count, delta)


@functools.lru_cache(maxsize=1024)
def _composed(multiplier: float, releases: int, delta: float) -> float:
    accounting = _accounting()
    accountant = accounting.rdp.RdpAccountant()
    accountant.compose(accounting.SelfComposedDpEvent(accounting.GaussianDpEvent(multiplier), releases))
    return float(accountant.get_epsilon(delta))


def _accounting() -> Any:
    """The library, imported where it is used: most runs are not private and do without it."""
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "dp_accounting":
            raise
        raise ModuleNotFoundError(
            "ε is computed by dp-accounting, which is not installed: pip install 'fedppl[privacy]'", name=error.name
        ) from error
    return dp_accounting


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
    # A little short of it: rounding must not carry the norm beyond what the privacy rests on.
    allowed = clip * (1 - 1e-9)
    return vector if largest * norm <= allowed else scaled * (allowed / norm)


def system_normals(count: int) -> Array:
    """Draw standard normals from the operating system's entropy, which no seed reproduces.

    Four are added for each, so that the last digits do not give away what the noise was added to (Holohan and
    Braghin 2021, Secure random sampling in differential privacy, ESORICS).

    >>> system_normals(3).shape
    (3,)
    """
    words = np.frombuffer(secrets.token_bytes(32 * count), dtype=np.uint64).reshape(4, count)
    return np.asarray(ndtri(((words >> np.uint64(12)) + 0.5) * 2.0**-52).sum(axis=0) / 2)
