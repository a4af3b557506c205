r"""log f_k where coordinates of θ are independent given φ and the data: a product of integrals over one coordinate.

.. math:: f_k(\varphi) = p(y_k, \hat\theta \mid \varphi) \prod_i
          \int \frac{p(y_k, \hat\theta_{-i}, \theta_i \mid \varphi)}{p(y_k, \hat\theta \mid \varphi)}\, d\theta_i
"""

from __future__ import annotations

import numpy as np
from scipy.special import logsumexp

from fedppl import gaussian
from fedppl.contracts import ClientView
from fedppl.local import _marginal
from fedppl.local._two_rules import by_two_rules
from fedppl.numerics.integral import Rule, beyond_trapezoids, missed_by_trapezoids
from fedppl.numerics.pairs import site_batch
from fedppl.types import Array, LocalFailure

_AT_ONCE = 2**22  # numbers in the points that are held at a time
_DIAGONAL = 1e-5  # of a curvature that differences tell, before the density itself is looked at
_EQUAL = 1e-8


def is_separable(client: ClientView) -> bool:
    """Whether coordinates of θ are independent given φ and the data: of the density alone, near and far."""
    prior = client.prior.gaussian
    points = gaussian.mean(prior) + np.array([[-1.0], [0.3], [1.0]]) * gaussian.standard_deviations(prior)
    try:
        _, modes, factors = _marginal.modes(client, points, gaussian.mean(prior))
    except LocalFailure:
        return False
    d = client.local_size
    scales = np.diagonal(factors, axis1=1, axis2=2)
    if not np.all(np.isfinite(factors)) or not np.all(scales > 0):  # no mode at one of the points
        return False
    if np.abs(factors / scales[:, None, :] - np.eye(d)).max() > _DIAGONAL:
        return False
    z = np.random.default_rng(0).normal(size=(4, d)) * np.array([[0.5], [1.0], [2.0], [3.0]])
    for point, mode, scale in zip(points, modes, scales, strict=True):
        moved = z / scale
        alone = (moved[:, :, None] * np.eye(d)).reshape(-1, d)  # one coordinate moved at a time
        theta = mode + np.concatenate([np.zeros((1, d)), moved, alone])
        logs = _densities(client, np.broadcast_to(point, (len(theta), len(point))), theta)
        together, each = logs[1 : 1 + len(z)] - logs[0], (logs[1 + len(z) :] - logs[0]).reshape(len(z), d).sum(axis=1)
        if not np.allclose(together, each, rtol=_EQUAL, atol=_EQUAL * max(1.0, float(np.abs(logs[0])))):
            return False
    return True


def one_by_one(client: ClientView, points: Array, center: Array) -> tuple[Array, Array]:
    """log f_k at points (S, m), NaN where there is no mode, and what is not known of it."""
    return by_two_rules(lambda some, rule: _by_rule(client, some, center, rule), points)


def _by_rule(client: ClientView, points: Array, center: Array, rule: Rule) -> tuple[Array, Array]:
    nodes = rule.nodes[:, 0]
    log_weights = rule.log_weights + 0.5 * nodes**2 + 0.5 * np.log(2.0 * np.pi)  # of the integral itself
    d, count = client.local_size, len(nodes)
    values, errors = np.full(len(points), np.nan), np.zeros(len(points))
    chunk = max(1, _AT_ONCE // (d * count * (d + points.shape[1])))
    for first in range(0, len(points), chunk):
        some = points[first : first + chunk]
        found, modes, factors = _marginal.modes(client, some, center)
        scales = np.diagonal(factors, axis1=1, axis2=2)  # (S, d)
        told = np.isfinite(found) & np.all(scales > 0, axis=1)
        some, modes, scales = some[told], modes[told], scales[told]
        steps = np.zeros((len(some), d, count, d))
        for j in range(d):
            steps[:, j, :, j] = nodes / scales[:, j, None]
        phi = np.broadcast_to(some[:, None, None], (len(some), d, count, some.shape[1]))
        theta = (modes[:, None, None] + steps).reshape(-1, d)
        at_mode = _densities(client, some, modes)
        logs = _densities(client, phi.reshape(-1, some.shape[1]), theta).reshape(len(some), d, count)
        terms = logs - at_mode[:, None, None] + log_weights
        whole = logsumexp(terms, axis=2)
        at = first + np.flatnonzero(told)
        shares = (terms - whole[:, :, None]).reshape(-1, count)
        outside, unknown = beyond_trapezoids(shares)
        whole = whole + np.log1p(outside).reshape(len(some), d)
        values[at] = at_mode + np.sum(whole - np.log(scales), axis=1)
        errors[at] = (missed_by_trapezoids(shares, rule) + unknown).reshape(len(some), d).sum(axis=1)
    return values, errors


def _densities(client: ClientView, phi: Array, theta: Array) -> Array:
    """log p(y, θ | φ) at rows of both; −inf where it is not a number."""
    logs = site_batch(client.kernel, np.concatenate([phi, theta], axis=1), client.packed)
    return np.where(logs < np.inf, logs, -np.inf)
