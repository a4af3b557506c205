"""Draws of θ given φ and a client's rows, from a few candidates about the mode of θ.

Half of the candidates are of Laplace's approximation, and half of a t about it, which reaches further. The choice
stands against fresh candidates a few times, which leaves p(θ | φ, y_k) as it is and has what few candidates are wrong
by fall geometrically. Where the density is all but that approximation, candidates are of it alone, and once is enough.
"""

from __future__ import annotations

import numpy as np
from scipy.special import softmax

from fedppl.contracts import ClientView
from fedppl.local import _gaussian_rest, _marginal
from fedppl.numerics import student
from fedppl.numerics.marginal import site_batch
from fedppl.types import Array, Rng

_CANDIDATES, _TIMES = 8, 5
_DIFFERS = 0.005  # variance of the density's ratio to Laplace's up to which its candidates will do
_NONE = -1e300  # the log density where it has no value: taken only where no candidate has one
_AT_ONCE = 2**22  # numbers in the factors that are held at a time


def draw_given(client: ClientView, phi: Array, center: Array, rng: Rng) -> Array:
    """A draw of θ from p(θ | φ, y_k) for each row of phi (N, m): (N, d), of a few candidates each."""
    d = client.local_size
    chunk = max(1, _AT_ONCE // max(1, d * d))
    order = np.lexsort(phi.T)  # equal rows together: one search serves them
    theta = np.zeros((len(phi), d))
    for first in range(0, len(phi) if d else 0, chunk):
        some = order[first : first + chunk]
        theta[some] = _drawn(client, phi[some], center, rng)
    return theta


def _drawn(client: ClientView, phi: Array, center: Array, rng: Rng) -> Array:
    count, d = len(phi), client.local_size
    unique, where = np.unique(phi, axis=0, return_inverse=True)
    _, modes, factors = _marginal.modes(client, unique, center, factors=True)
    modes, factors = modes[where.ravel()], factors[where.ravel()]
    upper = np.swapaxes(factors, 1, 2)
    if client.view(_gaussian_rest.is_exact):
        return np.asarray(modes + np.linalg.solve(upper, rng.normal(size=(count, d, 1)))[..., 0])
    kept, kept_weight, near = np.zeros((count, d)), np.full(count, -np.inf), False
    for time in range(_TIMES):
        z = rng.normal(size=(_CANDIDATES, count, d))
        if not near:
            reach = z[1::2]
            reach *= np.sqrt(student.DEGREES / rng.chisquare(student.DEGREES, size=(*reach.shape[:2], 1)))
        theta = modes + np.linalg.solve(upper[None], z[..., None])[..., 0]
        values, (log_normal, log_mixture) = _values(client, phi, theta), _log_candidates(z)
        near = near or (time == 0 and _differs_by(values, log_normal, log_mixture) <= _DIFFERS)
        log_weights = values - (log_normal if near else log_mixture)
        if near and time == 0:
            theta, log_weights = theta[::2], log_weights[::2]
        kept, kept_weight = _chosen(
            np.concatenate([kept[None], theta]), np.concatenate([kept_weight[None], log_weights]), rng
        )
        if near and time == 1:
            break
    return kept


def _chosen(theta: Array, log_weights: Array, rng: Rng) -> tuple[Array, Array]:
    """One of the candidates (C, N, d) for each draw, by weights (C, N), and the weights that they have."""
    chosen, each = np.argmax(log_weights + rng.gumbel(size=log_weights.shape), axis=0), np.arange(theta.shape[1])
    return theta[chosen, each], log_weights[chosen, each]


def _differs_by(values: Array, log_normal: Array, log_mixture: Array) -> float:
    """Variance over θ of the density's ratio to Laplace's, normalised at each φ, by candidates (C, N).

    From the distance in total variation of the probabilities that either gives to the candidates, with which a normal
    ratio has that variance: few of them tell it well, also where one is far out.
    """
    ours, normal = softmax(values - log_mixture, axis=0), softmax(log_normal - log_mixture, axis=0)
    return float(0.5 * np.pi * np.mean(np.abs(ours - normal).sum(axis=0) ** 2))


def _values(client: ClientView, phi: Array, theta: Array) -> Array:
    """log p(y, θ | φ) of candidates (C, N, d), (C, N)."""
    candidates, count, _ = theta.shape
    x = np.concatenate([np.broadcast_to(phi, (candidates, *phi.shape)), theta], axis=2)
    found = site_batch(client.kernel, np.ascontiguousarray(x.reshape(candidates * count, -1)), client.packed)
    return np.where(np.isfinite(found), found, _NONE).reshape(candidates, count)


def _log_candidates(z: Array) -> tuple[Array, Array]:
    """Log densities (C, N) of candidates z (C, N, d): by Laplace's approximation, and by half of either, times two."""
    white = z.reshape(-1, z.shape[2])
    log_normal = -0.5 * np.sum(white**2, axis=1) - 0.5 * white.shape[1] * np.log(2 * np.pi)
    log_mixture = np.logaddexp(log_normal, student.log_density(white, np.eye(white.shape[1])))
    return log_normal.reshape(z.shape[:2]), np.asarray(log_mixture).reshape(z.shape[:2])
