"""The shared prior on the unconstrained space: exact natural parameters, or a Gaussian moment match."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedppl import gaussian
from fedppl.gaussian import Gaussian
from fedppl.numerics import tolerances as tol
from fedppl.types import Array, DeclarationError

_Key = tuple[str, tuple[int, ...], bytes]


@dataclass(frozen=True)
class SharedPrior:
    """log p(φ) of the shared parameters and the Gaussian N_0 that the server starts from."""

    log_density: Callable[[Array], Array]  # draws (S, m) to log p(φ), (S,), up to a constant
    gradients: Callable[[Array], Array]  # the same to its gradients (S, m)
    gaussian: Gaussian  # N_0
    is_gaussian: bool  # Whether N_0 is the prior. If not, clients' factors carry (p(φ) / N_0(φ))^(1/K).
    # compiles log p(φ) and its gradient for loops that are compiled themselves, at the first call
    kernel: Callable[[], Callable[..., Any]] | None = None
    # All clients of a process are asked at the same points, one after the other.
    _cache: OrderedDict[_Key, Array] = field(default_factory=OrderedDict, repr=False, compare=False)

    def log_ratio(self, phi: Array) -> Array:
        """log p(φ) − log N_0(φ) at each row of phi, (S,), up to a constant."""
        if self.is_gaussian:
            return np.zeros(len(phi))
        return self._cached("value", phi, lambda: self.log_density(phi) - gaussian.log_kernel(self.gaussian, phi))

    def log_ratio_gradient(self, phi: Array) -> Array:
        """Gradient of `log_ratio` at one φ, (m,)."""
        return np.asarray(self.log_ratio_gradients(phi[None])[0])

    def log_ratio_gradients(self, phi: Array) -> Array:
        """Gradient of `log_ratio` at each row of phi, (S, m)."""
        if self.is_gaussian:
            return np.zeros_like(phi)
        linear, precision = self.gaussian
        return self._cached("gradients", phi, lambda: self.gradients(phi) - linear + phi @ precision)

    def _cached(self, what: str, phi: Array, compute: Callable[[], Array]) -> Array:
        """Values at these points, read-only, from the cache if they are in it; large sets of points are not cached."""
        key = what, phi.shape, phi.tobytes()
        cached = self._cache.get(key)
        if cached is not None:
            return cached
        values = np.array(compute())
        values.flags.writeable = False
        if phi.nbytes <= tol.CACHED_BYTES:
            while len(self._cache) >= tol.CACHED:
                self._cache.popitem(last=False)
            self._cache[key] = values
        return values

    def log_ratio_hessian(self, phi: Array) -> Array:
        """Hessian of `log_ratio` at one φ, (m, m), by central differences of its gradient."""
        step = tol.RATIO_LENGTH * np.eye(len(phi))
        high, low = np.split(self.log_ratio_gradients(np.concatenate([phi + step, phi - step])), 2)
        hessian = (high - low) / (2.0 * tol.RATIO_LENGTH)
        return np.asarray((hessian + hessian.T) / 2)


def gaussian_prior(gradient: Callable[[Array], Array], origin: Array, owners: Any = ()) -> Gaussian | None:
    """Natural parameters of the prior if it is Gaussian on the unconstrained space, else None.

    A density is Gaussian exactly when its gradient is r − Qφ. Gradients at an origin where the prior has mass, and one
    unit away along every axis, give r and Q; gradients at random points, up to ten sds away, must agree. Errors name
    the `owners` of coordinates, (m,) names of variables.

    Raises `DeclarationError` if the density is Gaussian but improper.
    """
    size = len(origin)
    if size > tol.DENSE:
        return _by_coordinate(gradient, origin, np.asarray(owners))
    at_origin = gradient(origin)
    columns = [gradient(origin + unit) - at_origin for unit in np.eye(size)]
    precision = -np.stack(columns, axis=1)
    if not np.all(np.isfinite(at_origin)) or not np.all(np.isfinite(precision)):
        return None
    linear = at_origin + precision @ origin
    symmetric = (precision + precision.T) / 2
    sd = 1.0 / np.sqrt(np.where(np.diag(symmetric) > 0, np.diag(symmetric), 1.0))
    correlation = sd[:, None] * symmetric * sd
    smallest = float(np.linalg.eigvalsh(correlation).min(initial=np.inf))
    is_proper = smallest > tol.PROPER
    center = np.asarray(np.linalg.solve(symmetric, linear), dtype=np.float64) if is_proper else origin
    if np.any(_not_linear(gradient, linear, lambda phi: precision @ phi, center, sd)):
        return None
    if not is_proper:
        raise DeclarationError(
            f"the shared prior is improper (smallest eigenvalue of its scaled precision {smallest:.3g}). Give every "
            "shared variable a proper prior, for example pm.Normal(0, 10)."
        )
    return Gaussian(linear, symmetric)


def _not_linear(
    gradient: Callable[[Array], Array], linear: Array, curved: Callable[[Array], Array], center: Array, sd: Array
) -> NDArray[np.bool_]:
    """Along which coordinates (m,) the gradient is not r − Qφ at random points about a center."""
    rng, wrong = np.random.default_rng(0), np.zeros(len(center), dtype=bool)
    scale = tol.LINEAR_GRADIENT * (1.0 + float(np.abs(sd * linear).max(initial=0.0)))
    for spread in tol.SPREADS:
        point = center + spread * sd * rng.normal(size=len(center))
        error = sd * np.abs(gradient(point) - (linear - curved(point)))
        wrong |= ~(error <= scale * (1.0 + spread))
    return wrong


def _by_coordinate(gradient: Callable[[Array], Array], origin: Array, owners: Any) -> Gaussian:
    """The same for a prior too large for a matrix, whose coordinates have to be independent."""
    at_origin = gradient(origin)
    precision = at_origin - gradient(origin + 1.0)
    linear = at_origin + precision * origin
    wrong = ~(np.isfinite(linear) & (precision > 0))
    if not wrong.any():
        wrong = _not_linear(gradient, linear, lambda phi: precision * phi, linear / precision, 1.0 / np.sqrt(precision))
    if wrong.any():
        names = list(dict.fromkeys(owners[wrong].tolist())) if len(owners) else "some"
        raise DeclarationError(
            f"the shared variables have {len(origin)} coordinates, and beyond {tol.DENSE} their prior must be "
            f"independent normals, which that of {names} is not. Use pm.Normal with constant parameters, or share less."
        )
    return Gaussian(linear, precision)


def moment_match(draws: Array) -> Gaussian:
    """Gaussian N_0 for a prior that is not Gaussian, from its draws (S, m) on the unconstrained space.

    Any proper N_0 gives the same posterior, because the clients' factors carry p / N_0; a closer one gives better
    importance weights. A prior with heavy tails, by its kurtosis, is matched by quartiles instead of moments.
    """
    centred = draws - draws.mean(axis=0)
    variance = np.mean(centred**2, axis=0)
    kurtosis = np.mean(centred**4, axis=0) / variance**2
    if np.all(kurtosis < tol.HEAVY_KURTOSIS):
        return gaussian.from_moments(draws.mean(axis=0), np.atleast_2d(np.cov(draws, rowvar=False)))
    low, middle, high = np.quantile(draws, [0.25, 0.5, 0.75], axis=0)
    return gaussian.from_moments(middle, np.diag(((high - low) / tol.QUARTILES) ** 2))
