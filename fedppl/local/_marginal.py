"""A client's factor f_k(φ), with θ marginalised by Laplace's approximation: values, gradients, expansions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from fedppl import gaussian
from fedppl.contracts import ClientView, Expansion
from fedppl.local import _inner
from fedppl.local._no_mode import no_mode
from fedppl.numerics import pairs
from fedppl.numerics.importance import stream_of
from fedppl.numerics.integral import Rule
from fedppl.numerics.pairs import Densities, Laplace
from fedppl.types import Array, LocalFailure

_AT_ONCE, _NUMBERS = 2**15, 2**22  # points that are computed at once, and numbers in their matrices


def densities(client: ClientView) -> Densities:
    """The client's density, as one of many that lie side by side."""
    return pairs.one(client.kernel, client.shared_size, client.packed)


def start(client: ClientView) -> Array:
    """Where inner searches begin: the mode of θ at the prior mean of φ.

    It depends on the client's model and data alone, never on earlier rounds, so that clients stay stateless.
    """
    middle, initial = gaussian.mean(client.prior.gaussian), np.asarray(client.initial, dtype=float)
    found = pairs.modes(client.view(densities), middle[None], initial[None], np.zeros(1, dtype=np.int64))
    return found.theta[0] if found.arrived[0] else initial


def near(client: ClientView, points: Array, center: Array) -> Laplace:
    """Laplace's log f_k at points (S, m), NaN where there is no mode, by way of the mode at a center (m,).

    Raises
    ------
    LocalFailure
        Where there is no mode at the center.
    """
    found = [about for _, about, _ in _in_parts(client, points, center)]
    return Laplace(*(np.concatenate(part) for part in zip(*found, strict=True)))


def _in_parts(client: ClientView, points: Array, center: Array) -> Iterator[tuple[Array, Laplace, Array]]:
    """So many points as may be held at once, Laplace's approximation there, and sds of θ at the center's mode."""
    of, d = client.view(densities), client.local_size
    at = pairs.origins(of, center, client.view(start)[None], np.zeros(1, dtype=np.int64))
    if d and not at.modes.arrived[0]:
        raise LocalFailure(no_mode(client, center))
    chunk = max(1, min(_AT_ONCE, _NUMBERS // max(1, d * d + points.shape[1])))
    for first in range(0, max(len(points), 1), chunk):
        some = np.ascontiguousarray(points[first : first + chunk])
        row = np.zeros(len(some), dtype=np.int64)
        yield some, pairs.laplace(of, at, row, row, some), at.modes.scale[row]


def prior_sds(client: ClientView, most: float) -> Array:
    return np.minimum(gaussian.standard_deviations(client.prior.gaussian), most)


def modes(client: ClientView, points: Array, center: Array) -> tuple[Array, Array, Array]:
    """The same with −inf where there is no mode: log f_k (S,), modes (S, d) and Cholesky factors (S, d, d)."""
    values, theta, root = near(client, points, center)
    return np.where(np.isfinite(values), values, -np.inf), theta, root


def values(client: ClientView, points: Array, center: Array, prior_share: float) -> Array:
    """log f_k (and its share of a non-Gaussian prior) at points (S, m), (S,)."""
    found, _, _ = modes(client, points, center)
    if not prior_share:
        return found
    with np.errstate(invalid="ignore"):  # where the prior has no density, or far from where it has one
        return np.asarray(found + prior_share * client.prior.log_ratio(points))


def log_factor(client: ClientView, points: Array, prior_share: float) -> Array:
    """The same by way of the first point; −inf everywhere where there is no mode."""
    try:
        return values(client, points, points[0], prior_share)
    except LocalFailure:
        return np.full(len(points), -np.inf)


def gradients(client: ClientView, points: Array, center: Array, prior_share: float) -> tuple[Array, Array]:
    """log f_k (and its share of a non-Gaussian prior) and its gradients at points (S, m), (S,) and (S, m)."""
    of = client.view(densities)
    parts = [
        (about.values, pairs.gradients(of, some, about.theta, np.zeros(len(some), dtype=np.int64), scale))
        for some, about, scale in _in_parts(client, points, center)
    ]
    found, slopes = (np.concatenate(part) for part in zip(*parts, strict=True))
    found = np.where(np.isfinite(found), found, -np.inf)
    if prior_share:
        found = found + prior_share * client.prior.log_ratio(points)
        slopes = slopes + prior_share * client.prior.log_ratio_gradients(points)
    return found, slopes


def expand(client: ClientView, point: Array, prior_share: float) -> Expansion:
    """Quadratic expansion of log f_k (and of its share of a non-Gaussian prior) at a point."""
    found = pairs.expansion(client.view(densities), point, client.view(start), prior_sds(client, 1.0))
    value, gradient, hessian = found
    if not (np.isfinite(value) and np.all(np.isfinite(hessian))):
        raise LocalFailure(no_mode(client, point))
    if prior_share and not client.prior.is_gaussian:
        value += prior_share * float(client.prior.log_ratio(point[None])[0])
        gradient = gradient + prior_share * client.prior.log_ratio_gradient(point)
        hessian = hessian + prior_share * client.prior.log_ratio_hessian(point)
    return Expansion(value, gradient, hessian, {})


class Integrals(NamedTuple):
    """Integrals over θ by nodes about its mode, at points; NaN where there is no mode."""

    values: Array  # (S,) log f_k
    laplace: Array  # (S,) by Laplace's approximation
    relative: Array  # (S,) effective part of the nodes
    shares: Array  # (S, G) of the integral, of each group of nodes


def integrals(client: ClientView, points: Array, center: Array, rule: Rule) -> Integrals:
    """log f_k by a rule, at points (S, m), by way of the mode at a center (m,)."""
    about, of = near(client, points, center), client.view(densities)
    of_group = (rule.group[:, None] == np.arange(int(rule.group.max()) + 1)).astype(float)
    values, relative = np.full(len(points), np.nan), np.zeros(len(points))
    shares = np.zeros((len(points), of_group.shape[1]))
    known = np.flatnonzero(np.isfinite(about.values))
    chunk = max(1, _NUMBERS // (len(rule.nodes) * (points.shape[1] + client.local_size)))
    for some in (known[first : first + chunk] for first in range(0, len(known), chunk)):
        at = Laplace(*(part[some] for part in about))
        terms = pairs.node_terms(of, at, points[some], np.zeros(len(some), dtype=np.int64), rule)
        with np.errstate(invalid="ignore"):
            total = logsumexp(terms, axis=1)
            parts = np.exp(terms - total[:, None])
        told = np.isfinite(total)
        values[some[told]], shares[some[told]] = total[told], parts[told] @ of_group
        relative[some[told]] = 1.0 / np.sum(parts[told] ** 2, axis=1) / len(rule.nodes)
    return Integrals(values, about.values, relative, shares)


def difference(client: ClientView, points: Array, center: Array) -> tuple[Array, float] | None:
    """What Laplace over θ leaves out of log f_k at points (S, m), and how far to trust it; None where it is unknown."""
    rule = _inner.rule_of(client.local_size, stream_of(client.client_id))
    try:
        found = integrals(client, points, center, rule)
    except LocalFailure:
        return None
    return _inner.trusted(found.values - found.laplace, found.relative, found.shares, client.local_size)
