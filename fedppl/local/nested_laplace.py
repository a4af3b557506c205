"""Nested Laplace: θ marginalised by Laplace, the shared parameters by importance sampling from the global q."""

from __future__ import annotations

import functools
import weakref
from typing import NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.gaussian import Gaussian
from fedppl.local._importance import (
    controlled_moments,
    effective_size,
    enough_points,
    normalise,
    pareto_k,
    resample,
    skewness,
    stream_of,
    whitened_points,
)
from fedppl.local._marginal import expand_marginal, inner_mode_at, marginal_batch, site_batch
from fedppl.local._newton import OK
from fedppl.local.nuts import NUTS
from fedppl.model import ClientModel
from fedppl.types import Array, DeclarationError, Draws, Expansion, LocalFailure, LocalInference, Moments, Target

__all__ = ["NestedLaplace", "log_marginal"]

_NO_MODE = (
    "the inner search found no mode of θ at φ = {phi}; the local posterior may be flat or have no peak there. "
    "Give θ a proper prior or use local=fedppl.NUTS()"
)


class _Settings(NamedTuple):
    points: int
    pareto_limit: float
    fallback: bool


_starts: weakref.WeakKeyDictionary[ClientModel, Array] = weakref.WeakKeyDictionary()


def NestedLaplace(*, points: int = 64, pareto_limit: float = 0.7, fallback: bool = True) -> LocalInference:
    r"""Moments of the tilted distribution with the local variables marginalised first.

    .. math:: \log f_k(\phi) = \log \int p(y_k, \theta \mid \phi)\, d\theta
              \approx \ell(\phi, \theta^*) + \tfrac d2 \log 2\pi - \tfrac12 \log \det A(\phi)

    with :math:`\theta^*(\phi)` the mode and :math:`A` the negative Hessian in θ. Exact when θ is conditionally
    Gaussian. Tilted moments come from self-normalised importance sampling from the global q with weights
    f_k / q_k at whitened antithetic Sobol points.

    Parameters
    ----------
    points
        Number of points, raised (up to 1024) to twice the number of coefficients of a
        quadratic in φ, which is what the control variate needs. Four or sixteen times as many are used where
        the log weights are far from a quadratic.
    pareto_limit
        Pareto k above which weights that vary (relative ESS below 0.9) are not trusted.
    fallback
        Where they are not trusted, use a Laplace proposal, then NUTS, and report it as diagnostic `fallback`
        (1, 2). If False the client is skipped instead.

    Returns
    -------
    LocalInference

    Raises
    ------
    DeclarationError
        In a fit, if the log density has a kink, as a Laplace (lasso) prior has.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.NestedLaplace(points=512).name
    'nested Laplace'

    Notes
    -----
    *When this fails.* With few observations per local variable and a skewed likelihood the inner Laplace
    approximation is biased, and the bias adds up over clients. Compare with ``local=fedppl.NUTS()`` at one client.

    References
    ----------
    .. [1] Rue, Martino and Chopin (2009), Approximate Bayesian inference for latent Gaussian models.
    """
    if points < 16:
        raise DeclarationError(f"points={points} is too few for moments; use at least 16, better 256.")
    settings = _Settings(points, pareto_limit, fallback)
    return LocalInference(
        name="nested Laplace",
        check=_check,
        expand=expand,
        tilted=functools.partial(tilted, settings=settings),
        draw=functools.partial(draw, settings=settings),
        settings=settings._asdict(),
        log_factor=log_factor,
    )


def _check(client: ClientModel) -> None:
    if client.has_kink:
        raise DeclarationError(
            "the log density takes an absolute value of a parameter, as a Laplace (lasso) prior does; its kink makes "
            "Laplace approximations wrong by several posterior sd. Use EP(local=fedppl.NUTS()) for this model."
        )


def log_marginal(client: ClientModel, phi: Array) -> Array:
    """log f_k at each row of phi (S, m), (S,); −inf where no mode was found."""
    values, _, _ = _batch(client, phi, phi.mean(axis=0), factors=False)
    return values


def log_factor(client: ClientModel, points: Array, prior_share: float) -> Array:
    """log f_k (and its share of a non-Gaussian prior) at points (S, m), by way of the first of them, (S,)."""
    try:
        values, _, _ = _batch(client, points, points[0], factors=False)
    except LocalFailure:
        return np.full(len(points), -np.inf)
    return values + prior_share * client.prior.log_ratio(points) if prior_share else values


def _batch(client: ClientModel, draws: Array, center: Array, *, factors: bool) -> tuple[Array, Array, Array]:
    d = client.local_size
    modes = np.zeros((len(draws), d))
    held = np.zeros((len(draws) if factors else 0, d, d))
    status, values, _ = marginal_batch(
        client.kernel, np.ascontiguousarray(draws), center, _start(client), client.data, modes, held
    )
    if status != OK:
        raise LocalFailure(_NO_MODE.format(phi=np.array2string(center, precision=3)))
    return values, modes, held


def _start(client: ClientModel) -> Array:
    """Where inner searches begin: the mode of θ at the prior mean of φ, found once per client.

    It depends on the client's model and data alone, never on earlier rounds, so that clients stay stateless.
    """
    if client not in _starts:
        status, mode = inner_mode_at(client.kernel, gaussian.mean(client.prior.gaussian), client.initial, client.data)
        _starts[client] = mode if status == OK else client.initial
    return _starts[client]


def _prior_scale(client: ClientModel) -> Array:
    return np.minimum(gaussian.standard_deviations(client.prior.gaussian), 1.0)


def expand(client: ClientModel, point: Array, prior_share: float) -> Expansion:
    """Quadratic expansion of log f_k (and of its share of a non-Gaussian prior) at a point."""
    status, value, gradient, hessian, _ = expand_marginal(
        client.kernel, point, _start(client), _prior_scale(client), client.data
    )
    if status != OK:
        raise LocalFailure(_NO_MODE.format(phi=np.array2string(point, precision=3)))
    if prior_share and not client.prior.is_gaussian:
        value += prior_share * float(client.prior.log_ratio(point[None])[0])
        gradient = gradient + prior_share * client.prior.log_ratio_gradient(point)
        hessian = hessian + prior_share * client.prior.log_ratio_hessian(point)
    return Expansion(value, gradient, hessian, {})


def _log_weights(client: ClientModel, draws: Array, values: Array, site: Gaussian, prior_share: float) -> Array:
    log_weights = values - gaussian.log_kernel(site, draws)
    if prior_share:
        log_weights = log_weights + prior_share * client.prior.log_ratio(draws)
    return np.asarray(log_weights)


def tilted(target: Target, rng: np.random.Generator, *, settings: _Settings) -> Moments:
    """Moments of f_k(φ) q_{-k}(φ) by importance sampling from q."""
    client, global_, cavity, prior_share = target
    mean, factor = gaussian.affine(global_)
    moments = _weighted(client, mean, factor, settings.points, gaussian.quotient(global_, cavity), prior_share)
    if _trusted(moments, settings.pareto_limit):
        return moments
    if not settings.fallback:
        k, relative = moments.diagnostics["pareto_k"], moments.diagnostics["relative_ess"]
        raise LocalFailure(
            f"Pareto k {k:.2f} (limit {settings.pareto_limit}), relative ESS {relative:.2f}: q and this client's "
            "factor hardly overlap. Raise points=, or set fallback=True"
        )
    again = _from_laplace_proposal(client, cavity, mean, settings.points, prior_share)
    if again is not None and _trusted(again, settings.pareto_limit):
        return again
    nuts = NUTS().tilted(target, rng)
    return nuts._replace(diagnostics={**nuts.diagnostics, "fallback": 2.0})


# Where a quadratic leaves more than this of the log weights unexplained, four times as many points are used.
_REMAINDERS = ((1, 0.02), (4, 0.2), (16, np.inf))


def _weighted(
    client: ClientModel,
    mean: Array,
    factor: Array,
    points: int,
    divisor: Gaussian,
    prior_share: float,
    step: float = 0.0,
) -> Moments:
    """Moments under weights f_k / divisor at points mean + factor z."""
    for multiple, largest in _REMAINDERS:
        key = (
            client.shared_size,
            multiple * enough_points(client.shared_size, points),
            stream_of(client.client_id),
        )
        z = whitened_points(*key)
        draws = mean + z @ factor.T
        values, _, _ = _batch(client, draws, mean, factors=False)
        log_weights = _log_weights(client, draws, values, divisor, prior_share)
        if not np.any(np.isfinite(log_weights)):
            raise LocalFailure(_NO_MODE.format(phi=np.array2string(mean, precision=3)))
        weights = normalise(log_weights)
        moments, remainder = controlled_moments(z, log_weights, weights, key)
        if remainder <= largest:
            break
    inverse = np.linalg.inv(factor)
    precision = inverse.T @ np.linalg.inv(moments.covariance) @ inverse
    return Moments(
        mean + factor @ moments.mean,
        factor @ moments.covariance @ factor.T,
        (precision + precision.T) / 2,
        skewness(draws, weights),
        {
            "ess": effective_size(weights),
            "relative_ess": effective_size(weights) / len(z),
            "pareto_k": pareto_k(log_weights),
            "remainder": remainder,
            "fallback": step,
            "mode_failures": float(np.sum(~np.isfinite(values))),
        },
    )


def _trusted(moments: Moments, limit: float) -> bool:
    """Heavy tails of weights that hardly vary do no harm; weights with little left of them always do."""
    relative = moments.diagnostics["relative_ess"]
    return relative > 0.1 and (moments.diagnostics["pareto_k"] <= limit or relative > 0.9)


def _from_laplace_proposal(
    client: ClientModel, cavity: Gaussian, start: Array, points: int, prior_share: float
) -> Moments | None:
    """Importance sampling from the Laplace approximation of the tilted distribution itself."""
    if not gaussian.is_proper(cavity):
        return None
    phi, radius = start, 1.0
    for _ in range(30):
        try:
            expansion = expand(client, phi, prior_share)
        except LocalFailure:
            return None
        precision = cavity.precision - expansion.hessian
        values, vectors = np.linalg.eigh(precision)
        gradient = expansion.gradient + cavity.linear - cavity.precision @ phi
        step = vectors @ ((vectors.T @ gradient) / np.maximum(np.abs(values), 1e-8))
        phi = phi + step / max(1.0, float(np.sqrt(step @ cavity.precision @ step)) / radius)
        radius *= 2.0
        if values[0] > 0 and gradient @ step < 1e-6:
            break
    else:
        return None
    # A little wider than the curvature says: importance weights must not have heavier tails than the proposal.
    proposal = Gaussian(precision @ phi / 1.2, precision / 1.2)
    mean, factor = gaussian.affine(proposal)
    return _weighted(client, mean, factor, points, gaussian.quotient(proposal, cavity), prior_share, step=1.0)


def draw(target: Target, draws: int, chains: int, rng: np.random.Generator, *, settings: _Settings) -> Draws:
    """Draws of (φ, θ) from the tilted distribution, FedLin eq. 8, by sampling importance resampling.

    Proposals are φ from q and θ from its Laplace approximation given φ; the weights are exact, so that the
    Laplace approximation of θ is corrected where it is off.
    """
    client, global_, cavity, prior_share = target
    m, d = client.shared_size, client.local_size
    wanted = draws * chains
    z = whitened_points(m, max(settings.points, 2 * wanted), int(rng.integers(2**32)))
    mean, factor = gaussian.affine(global_)
    phi = mean + z @ factor.T
    _, modes, factors = _batch(client, phi, mean, factors=True)
    found = np.array([np.all(np.diag(f) > 0) for f in factors]) if d else np.ones(len(phi), dtype=bool)
    if not np.any(found):
        raise LocalFailure(_NO_MODE.format(phi=np.array2string(mean, precision=3)))
    phi, modes, factors = phi[found], modes[found], factors[found]
    noise = rng.normal(size=(len(phi), d))
    theta = modes + np.linalg.solve(np.swapaxes(factors, 1, 2), noise[..., None])[..., 0] if d else modes
    log_proposal = -0.5 * np.sum(noise**2, axis=1) + np.sum(np.log(np.einsum("sii->si", factors)), axis=1)
    values = site_batch(client.kernel, np.ascontiguousarray(np.concatenate([phi, theta], axis=1)), client.data)
    site = gaussian.quotient(global_, cavity)
    log_weights = _log_weights(client, phi, values, site, prior_share) - log_proposal
    k = pareto_k(log_weights)
    if k > settings.pareto_limit and settings.fallback:
        sampled = NUTS().draw(target, draws, chains, rng)
        return sampled._replace(diagnostics={**sampled.diagnostics, "fallback": 2.0})
    weights = normalise(log_weights)
    chosen = resample(weights, wanted, rng)
    return Draws(
        phi[chosen].reshape(chains, draws, m),
        theta[chosen].reshape(chains, draws, d),
        {"ess": effective_size(weights), "pareto_k": k, "fallback": 0.0},
    )
