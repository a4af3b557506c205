"""A client's factor f_k(φ), with θ marginalised by Laplace's approximation: values, gradients, expansions."""

from __future__ import annotations

import functools

import numpy as np

from fedppl import gaussian
from fedppl.contracts import ClientView, Expansion
from fedppl.local import _inner
from fedppl.local._no_mode import no_mode
from fedppl.numerics.importance import stream_of
from fedppl.numerics.integral import integral_batch
from fedppl.numerics.marginal import expand_marginal, gradient_batch, inner_mode_at, marginal_batch
from fedppl.numerics.newton import OK
from fedppl.types import Array, LocalFailure


def _start(client: ClientView) -> Array:
    """Where inner searches begin: the mode of θ at the prior mean of φ.

    It depends on the client's model and data alone, never on earlier rounds, so that clients stay stateless.
    """
    status, mode = inner_mode_at(client.kernel, gaussian.mean(client.prior.gaussian), client.initial, client.packed)
    return np.asarray(mode) if status == OK else client.initial


def prior_sds(client: ClientView, most: float) -> Array:
    return np.minimum(gaussian.standard_deviations(client.prior.gaussian), most)


def modes(client: ClientView, points: Array, center: Array, *, factors: bool) -> tuple[Array, Array, Array]:
    """log f_k at points (S, m), −inf where no mode was found, with modes (S, d) and Cholesky factors (S, d, d) or none.

    Searches go by way of an expansion at `center`, (m,).
    """
    d = client.local_size
    found = np.zeros((len(points), d))
    held = np.zeros((len(points) if factors else 0, d, d))
    status, log_factors, _ = marginal_batch(
        client.kernel, np.ascontiguousarray(points), center, client.view(_start), client.packed, found, held
    )
    if status != OK:
        raise LocalFailure(no_mode(client, center))
    return log_factors, found, held


def values(client: ClientView, points: Array, center: Array, prior_share: float) -> Array:
    """log f_k (and its share of a non-Gaussian prior) at points (S, m), (S,)."""
    found, _, _ = modes(client, points, center, factors=False)
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
    slopes = np.zeros_like(points)
    status, found = gradient_batch(
        client.kernel, np.ascontiguousarray(points), center, client.view(_start), client.packed, slopes
    )
    if status != OK:
        raise LocalFailure(no_mode(client, center))
    if prior_share:
        found = found + prior_share * client.prior.log_ratio(points)
        slopes = slopes + prior_share * client.prior.log_ratio_gradients(points)
    return found, slopes


def expand(client: ClientView, point: Array, prior_share: float) -> Expansion:
    """Quadratic expansion of log f_k (and of its share of a non-Gaussian prior) at a point."""
    status, value, gradient, hessian, _ = expand_marginal(
        client.kernel, point, client.view(_start), prior_sds(client, 1.0), client.packed
    )
    if status != OK:
        raise LocalFailure(no_mode(client, point))
    if prior_share and not client.prior.is_gaussian:
        value += prior_share * float(client.prior.log_ratio(point[None])[0])
        gradient = gradient + prior_share * client.prior.log_ratio_gradient(point)
        hessian = hessian + prior_share * client.prior.log_ratio_hessian(point)
    return Expansion(value, gradient, hessian, {})


def difference(client: ClientView, points: Array, center: Array) -> tuple[Array, float] | None:
    """What Laplace over θ leaves out of log f_k at points (S, m), and how far to trust it; None where it is unknown."""
    batch = functools.partial(
        integral_batch, client.kernel, np.ascontiguousarray(points), center, client.view(_start), client.packed
    )
    return _inner.differences(batch, client.local_size, stream_of(client.client_id))
