"""Draws of θ given φ and a client's rows.

Where the density is all but Laplace's approximation, one of a few candidates of that is taken, twice. Elsewhere
coordinates that are independent given φ are drawn each by its distribution function; so is one that leaves the others
Gaussian, and these given it. Others are drawn by Hamiltonian trajectories that begin at a candidate; or, where two
leave the others Gaussian, at a draw by quadrature.
"""

from __future__ import annotations

import numpy as np
from scipy.special import softmax

from fedppl.contracts import ClientView
from fedppl.local import _funnel, _gaussian_rest, _marginal
from fedppl.local._factor import is_separable
from fedppl.numerics import student
from fedppl.numerics.distribution import draw_by_slopes
from fedppl.numerics.hamiltonian import trajectories
from fedppl.numerics.pairs import site_outputs
from fedppl.types import Array, Rng

_CANDIDATES, _TIMES = 8, 2  # half of them normal, half of a t, which reaches further
_DIFFERS = 0.005  # variance of the density's ratio to Laplace's up to which its candidates will do
_NONE = -1e300  # the log density where it has no value: taken only where no candidate has one
_AT_ONCE = 2**22  # numbers in the points and factors that are held at a time
_NODES = np.linspace(-9.0, 9.0, 85)  # arsinh of sds of Laplace's approximation: out to 4,000


def draw_given(client: ClientView, phi: Array, center: Array, rng: Rng) -> Array:
    """A draw of θ from p(θ | φ, y_k) for each row of phi (N, m): (N, d)."""
    d = client.local_size
    chunk = max(1, _AT_ONCE // max(1, d * d, len(_NODES) * (client.shared_size + d)))
    order = np.lexsort(phi.T)  # equal rows together: one search serves them
    theta = np.zeros((len(phi), d))
    for first in range(0, len(phi) if d else 0, chunk):
        some = order[first : first + chunk]
        theta[some] = _drawn(client, phi[some], center, rng)
    return theta


def _drawn(client: ClientView, phi: Array, center: Array, rng: Rng) -> Array:
    count, d = len(phi), client.local_size
    unique, where = np.unique(phi, axis=0, return_inverse=True)
    where = where.ravel()
    _, modes_there, factors_there = _marginal.modes(client, unique, center)
    modes, factors = modes_there[where], factors_there[where]
    upper = np.swapaxes(factors, 1, 2)
    if client.view(_gaussian_rest.is_exact):
        return np.asarray(modes + np.linalg.solve(upper, rng.normal(size=(count, d, 1)))[..., 0])
    is_near, kept, kept_weight = False, np.zeros((count, d)), np.full(count, -np.inf)
    for time in range(_TIMES):
        z = _candidates(rng, count, d, normal=is_near)
        theta = modes + np.linalg.solve(upper[None], z[..., None])[..., 0]
        values, (log_normal, log_mixture) = _outputs(client, phi, theta)[0], _log_candidates(z)
        is_near = is_near or (time == 0 and _differs_by(values, log_normal, log_mixture) <= _DIFFERS)
        if not is_near and client.view(is_separable):
            return _one_by_one(client, phi, modes, np.diagonal(factors, axis1=1, axis2=2), rng)
        log_weights = values - (log_normal if is_near else log_mixture)
        if is_near and time == 0:
            theta, log_weights = theta[::2], log_weights[::2]
        theta, log_weights = np.concatenate([kept[None], theta]), np.concatenate([kept_weight[None], log_weights])
        chosen, each = np.argmax(log_weights + rng.gumbel(size=log_weights.shape), axis=0), np.arange(count)
        kept, kept_weight = theta[chosen, each], log_weights[chosen, each]
    if is_near:
        return kept
    which = client.view(_gaussian_rest.find)
    moved = np.ones(count, dtype=bool)
    if which is not None:
        found, places = _funnel.drawn(client, unique, where, modes_there, factors_there, which, rng)
        kept[places] = found[places]
        moved[places] = len(which) > 1  # one coordinate has been drawn by its own density
    if np.any(moved):
        kept[moved] = _moved_on(client, phi[moved], kept[moved], factors[moved], rng)
    return kept


def _one_by_one(client: ClientView, phi: Array, modes: Array, scales: Array, rng: Rng) -> Array:
    """Each coordinate by itself: of a sum of functions of one each, the slopes along all are had at once."""
    theta = modes + np.sinh(_NODES)[:, None, None] / scales
    with np.errstate(all="ignore"):  # far out a slope may be no number
        slopes = _outputs(client, phi, theta)[1] / scales * np.cosh(_NODES)[:, None, None]
    drawn = draw_by_slopes(_NODES, slopes, np.log(np.cosh(_NODES)), rng)
    return np.asarray(modes + np.sinh(drawn) / scales)


def _moved_on(client: ClientView, phi: Array, theta: Array, factors: Array, rng: Rng) -> Array:
    """Hamiltonian trajectories from θ, in sds of Laplace's approximation."""
    upper = np.swapaxes(factors, 1, 2)

    def density(z: Array) -> tuple[Array, Array]:
        values, slopes = _outputs(client, phi, (theta + np.linalg.solve(upper, z[..., None])[..., 0])[None])
        return values[0], np.linalg.solve(factors, slopes[0][..., None])[..., 0]

    z = trajectories(density, np.zeros_like(theta), rng)
    return np.asarray(theta + np.linalg.solve(upper, z[..., None])[..., 0])


def _candidates(rng: Rng, count: int, d: int, *, normal: bool) -> Array:
    """(candidates, N, d) in sds of Laplace's approximation: normal, and where that is not enough every other of a t."""
    z = rng.normal(size=(_CANDIDATES, count, d))
    if not normal:
        reach = z[1::2]
        reach *= np.sqrt(student.DEGREES / rng.chisquare(student.DEGREES, size=(*reach.shape[:2], 1)))
    return z


def _differs_by(values: Array, log_normal: Array, log_mixture: Array) -> float:
    """Variance over θ of the density's ratio to Laplace's, normalised at each φ, by candidates (C, N).

    From the distance in total variation of the probabilities that either gives to the candidates, with which a normal
    ratio has that variance: few of them tell it well, also where one is far out.
    """
    ours, normal = softmax(values - log_mixture, axis=0), softmax(log_normal - log_mixture, axis=0)
    return float(0.5 * np.pi * np.mean(np.abs(ours - normal).sum(axis=0) ** 2))


def _outputs(client: ClientView, phi: Array, theta: Array) -> tuple[Array, Array]:
    """log p(y, θ | φ) of candidates (C, N, d), (C, N), and its slopes along θ, (C, N, d)."""
    x = np.concatenate([np.broadcast_to(phi, (len(theta), *phi.shape)), theta], axis=2)
    found = site_outputs(client.kernel, x.reshape(-1, x.shape[2]), client.packed)
    found = found.reshape(*theta.shape[:2], -1)
    return np.where(np.isfinite(found[..., 0]), found[..., 0], _NONE), found[..., 1 + phi.shape[1] :]


def _log_candidates(z: Array) -> tuple[Array, Array]:
    """Log densities (C, N) of candidates z (C, N, d): by Laplace's approximation, and by half of either, times two."""
    white = z.reshape(-1, z.shape[2])
    log_normal = -0.5 * np.sum(white**2, axis=1) - 0.5 * white.shape[1] * np.log(2 * np.pi)
    log_mixture = np.logaddexp(log_normal, student.log_density(white, np.eye(white.shape[1])))
    return log_normal.reshape(z.shape[:2]), np.asarray(log_mixture).reshape(z.shape[:2])
