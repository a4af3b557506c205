"""Nested Laplace: θ marginalised by Laplace, the shared parameters by importance sampling from the global q."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts import ClientView, Draws, LocalInference, Moments, Target
from fedppl.local import _conditional, _factor, _from_q, _gaussian_rest, _marginal
from fedppl.local._given import draw_given
from fedppl.local._marginal import no_mode
from fedppl.local.nuts import NUTS
from fedppl.local.target import moments_of, require_smooth
from fedppl.numerics import pairs
from fedppl.numerics.importance import (
    WeightedMoments,
    effective_size,
    fresh_points,
    normalise,
    pareto_k,
    resample,
    skewness,
    stream_of,
    weighted_moments,
)
from fedppl.numerics.pairs import site_batch
from fedppl.numerics.proposals import log_mixture, points_of, propose
from fedppl.numerics.region import SCRAMBLES
from fedppl.results.diagnostics import STANDARDISED
from fedppl.settings import between, flag, whole
from fedppl.types import Array, LocalFailure, Rng

logger = logging.getLogger(__name__)

_AT_ONCE = 2**24  # numbers in the factors that are held at a time


class _Settings(NamedTuple):
    points: int
    pareto_limit: float
    fallback: bool


def NestedLaplace(*, points: int = 64, pareto_limit: float = 0.7, fallback: bool = True) -> LocalInference:
    r"""Moments of the tilted distribution with the local variables marginalised first.

    .. math:: \log f_k(\phi) = \log \int p(y_k, \theta \mid \phi)\, d\theta
              \approx \ell(\phi, \theta^*) + \tfrac d2 \log 2\pi - \tfrac12 \log \det A(\phi)

    with :math:`\theta^*(\phi)` the mode and :math:`A` the negative Hessian in θ. Exact when θ is conditionally
    Gaussian. Where it is not, what the approximation leaves out is integrated about q, by adaptive Gauss-Hermite
    quadrature for up to three local coordinates and by importance sampling beyond, and added as a quadratic in φ
    (linear from 9 to 30 shared coordinates, left away beyond). Tilted moments come from self-normalised importance
    sampling from the global q with weights f_k / q_k at whitened antithetic Sobol points.

    Parameters
    ----------
    points
        Number of importance points. Raised to twice the number of coefficients of a quadratic in φ, which is what
        the control variate needs, while that is at most 1024 (30 coordinates); beyond it to four times m + 1, with
        gradients there. Four or sixteen times as many are used where the log weights are far from a quadratic.
    pareto_limit
        Largest Pareto k of weights that vary (relative ESS below 0.9) with which they are trusted.
    fallback
        Whether a multivariate t that is fitted to the tilted distribution, then NUTS, stand in where weights are not
        trusted; diagnostic `fallback` (1, 2) says which. If False the client is skipped instead.

    Returns
    -------
    LocalInference

    Raises
    ------
    DeclarationError
        In a fit, if the log density has a kink, as a Laplace (lasso) prior has.

    Notes
    -----
    *When this fails.* With many local coordinates, few observations for each and a skewed likelihood, importance
    weights of θ say too little (relative ESS below 0.3, or more than 30 shared coordinates): Laplace's bias stays then,
    and adds up over clients. Compare with ``local=fedppl.NUTS()`` at one client.

    References
    ----------
    .. [1] Rue, Martino and Chopin (2009), Approximate Bayesian inference for latent Gaussian models.
    """
    settings = _Settings(
        whole("points", points, 16, "better 64 or 256"),
        between("pareto_limit", pareto_limit, 0, np.inf, "[)"),
        flag("fallback", fallback),
    )
    return LocalInference(
        name="nested Laplace",
        check=_check,
        expand=_marginal.expand,
        tilted=functools.partial(tilted, settings=settings),
        draw=functools.partial(draw, settings=settings),
        settings=settings._asdict(),
        log_factor=_marginal.log_factor,
        factor=_factor.factor,
        draw_given=draw_given,
    )


def _check(client: ClientView) -> None:
    require_smooth(client, "makes Laplace approximations wrong by up to several posterior sd")


def tilted(target: Target, rng: Rng, *, settings: _Settings) -> Moments:
    """Moments of f_k(φ) q_{-k}(φ) by importance sampling from q, then from a t fitted to them, then by NUTS."""
    client, global_, _, _ = target
    mean, root = gaussian.affine(global_)
    left_out = _conditional.left_out(client, mean, root)
    factor = _from_q.against_site(target, mean, left_out.difference)
    found = _from_q.moments(factor, mean, root, settings.points, stream_of(client.client_id))
    if found is not None and _from_q.trusted(found, settings.pareto_limit):
        return found._replace(diagnostics={**found.diagnostics, "fallback": 0.0, "inner_trust": left_out.trust})
    why = (
        {} if found is None else {f"fallback_{name}": found.diagnostics[name] for name in ("pareto_k", "relative_ess")}
    )
    departs = np.nan if found is None else found.diagnostics["departure"]
    started = time.perf_counter()
    if not settings.fallback:
        quality = "no point of q has a finite weight"
        if found is not None:
            k, relative = found.diagnostics["pareto_k"], found.diagnostics["relative_ess"]
            quality = f"Pareto k {k:.2f} (limit {settings.pareto_limit}), relative ESS {relative:.2f}"
        raise LocalFailure(
            f"{quality}: q and this client's factor hardly overlap. Raise points=, set fallback=True, or start EP with "
            "warm_start=True"
        )
    sample = _student_sample(target, settings)
    if sample is None:
        client.view(_say_what_takes_long)
    found, step = (_student_moments(sample), 1.0) if sample is not None else (NUTS().tilted(target, rng), 2.0)
    cost = {"fallback": step, "fallback_seconds": time.perf_counter() - started}
    if sample is not None:  # of Laplace's approximation over θ, where NUTS has none
        cost["inner_trust"] = float(not client.local_size or client.view(_gaussian_rest.is_exact))
        cost |= {"departure": departs} if np.isfinite(departs) else {}
    return found._replace(diagnostics={**found.diagnostics, **why, **cost})


def _say_what_takes_long(client: ClientView) -> None:
    """Once for each client, and before NUTS begins: what is said of a round comes when it is over."""
    names = ", ".join(dict.fromkeys(label.partition("[")[0] for label in client.local_labels))
    remedy = f". Declare {names} {STANDARDISED}" if names else ""
    logger.warning(
        "client %s: NUTS takes the place of nested Laplace from here on, for seconds to minutes a round: given the "
        "others, this client's posterior is far from normal, as in a funnel between effects and their sd%s",
        client.client_id,
        remedy,
        extra={"client": client.client_id, "status": "fallback"},
    )


def _student_sample(target: Target, settings: _Settings) -> StudentSample | None:
    """Weighted points of the tilted distribution of φ; None where there are none to trust."""
    client, global_, cavity, share = target
    at = _tilted_mode(target)
    center, covariance = at if at is not None else (gaussian.mean(global_), gaussian.covariance(global_))

    def log_density(draws: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):  # far out, infinite is the right answer
            return _marginal.values(client, draws, center, share) + gaussian.log_kernel(cavity, draws)

    return sample(log_density, center, covariance, stream_of(client.client_id), settings.pareto_limit)


def _student_moments(sample: StudentSample) -> Moments:
    weights = normalise(sample.log_weights)
    quality = {
        "ess": sample.ess,
        "relative_ess": sample.ess / len(weights),
        "pareto_k": sample.pareto_k,
        "mc_error": sample.error,
    }
    return moments_of(*sample.moments, skewness(sample.points, weights), quality)


def _tilted_mode(target: Target) -> tuple[Array, Array] | None:
    """Mode of the tilted distribution of φ and the covariance that its curvature gives."""
    client, global_, cavity, share = target
    if not gaussian.is_proper(cavity):
        return None
    phi, radius = gaussian.mean(global_), 1.0
    for _ in range(30):
        try:
            expansion = _marginal.expand(client, phi, share)
        except LocalFailure:
            return None
        precision = cavity.precision - expansion.hessian
        values, vectors = np.linalg.eigh(precision)
        gradient = expansion.gradient + cavity.linear - cavity.precision @ phi
        step = vectors @ ((vectors.T @ gradient) / np.maximum(np.abs(values), 1e-8))
        phi = phi + step / max(1.0, float(np.sqrt(step @ cavity.precision @ step)) / radius)
        radius *= 2.0
        if values[0] > 0 and gradient @ step < 1e-6:
            return phi, np.asarray(np.linalg.inv(precision), dtype=np.float64)
    return None


def draw(target: Target, draws: int, chains: int, rng: Rng, *, settings: _Settings) -> Draws:
    """Draws of (φ, θ) from the tilted distribution, FedLin eq. 8, by sampling importance resampling.

    Proposals are φ from q, or from a t fitted to the tilted distribution where q covers it badly, and θ from its
    Laplace approximation given φ; the weights are exact, so that this approximation is corrected where it is off.
    """
    client, global_, cavity, share = target
    wanted, step = draws * chains, 0.0
    z = fresh_points(client.shared_size, max(settings.points, 2 * wanted), int(rng.integers(2**32)))
    mean, root = gaussian.affine(global_)
    phi = mean + z @ root.T
    outside = share * client.prior.log_ratio(phi) - gaussian.log_kernel(gaussian.quotient(global_, cavity), phi)
    phi, theta, log_weights = _with_local(client, phi, mean, outside, rng)
    if pareto_k(log_weights) > settings.pareto_limit and settings.fallback:
        sample = _student_sample(target, settings)
        if sample is not None:
            step, phi = 1.0, sample.points
            outside = share * client.prior.log_ratio(phi) + gaussian.log_kernel(cavity, phi) - sample.log_proposal
            phi, theta, log_weights = _with_local(client, phi, sample.moments.mean, outside, rng)
        if pareto_k(log_weights) > settings.pareto_limit:
            sampled = NUTS().draw(target, draws, chains, rng)
            return sampled._replace(diagnostics={**sampled.diagnostics, "fallback": 2.0})
    weights = normalise(log_weights)
    chosen = resample(weights, wanted, rng)
    return Draws(
        phi[chosen].reshape(chains, draws, -1),
        theta[chosen].reshape(chains, draws, -1),
        {"ess": effective_size(weights), "pareto_k": pareto_k(log_weights), "fallback": step},
    )


def _with_local(client: ClientView, phi: Array, center: Array, outside: Array, rng: Rng) -> tuple[Array, Array, Array]:
    """Points φ with a draw of θ for each, and log weights of the pairs: p(y, θ | φ) / g(θ | φ) x what is outside."""
    d = client.local_size
    chunk = max(1, _AT_ONCE // max(1, d * d))
    kept: list[tuple[Array, Array, Array]] = []
    for first in range(0, len(phi), chunk):
        about = _marginal.near(client, phi[first : first + chunk], center)
        told = np.flatnonzero(np.isfinite(about.values))
        some, root, noise = phi[first + told], about.root[told], rng.normal(size=(len(told), d))
        theta = about.theta[told] + pairs.solve_upper(root, noise)
        log_proposal = -0.5 * np.sum(noise**2, axis=1) + 0.5 * pairs.log_determinant(root)
        values = site_batch(client.kernel, np.concatenate([some, theta], axis=1), client.packed)
        kept.append((some, theta, values - log_proposal + outside[first + told]))
    if not any(len(some) for some, _, _ in kept):
        raise LocalFailure(no_mode(client, center))
    joined, theta, log_weights = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    return joined, theta, log_weights


# Importance sampling from a multivariate t that is fitted anew to its own weighted points -----------------------------

# For a density that a Gaussian q does not cover: one client alone, or one whose factor hardly overlaps with q.

_FITS = 8
_FIRST, _LAST = 256, 1024  # points a scramble, while it is fitted and in the end
_LEAST = 50  # points that must be left of the weights, for each coefficient of a mean


class StudentSample(NamedTuple):
    """Weighted points of the density, and how far to trust them."""

    points: Array  # (S, m)
    log_proposal: Array  # (S,) log density of the t at the points
    log_weights: Array  # (S,)
    moments: WeightedMoments
    ess: float
    pareto_k: float
    error: float  # largest standard error of a mean, in sds


def sample(
    log_density: Callable[[Array], Array], mean: Array, covariance: Array, stream: int, limit: float
) -> StudentSample | None:
    """Weighted points of exp(log_density), from (m,) and (m, m) to begin with; None where none can be trusted."""
    m = len(mean)
    if SCRAMBLES * _LAST < _LEAST * (m + 1):
        return None
    found = None
    for fit in range(_FITS):
        found = _weighted(log_density, mean, covariance, _FIRST, stream)
        if found is None:
            return None
        settled = found.pareto_k < limit and found.ess > 0.3 * len(found.points)
        mean, covariance = found.moments
        if found.ess < 10 * m:  # too few to say how wide: their own spread, and part of the proposal's
            covariance = covariance + 0.5 * np.diag(np.diag(covariance)) / max(found.ess / m, 1.0)
        if settled and fit > 0:
            break
    found = _weighted(log_density, mean, covariance, _LAST, stream)
    if found is None or found.pareto_k > limit or found.ess < _LEAST * (m + 1) or not found.error < 0.1:
        return None
    return found


def _weighted(
    log_density: Callable[[Array], Array], mean: Array, covariance: Array, count: int, stream: int
) -> StudentSample | None:
    m = len(mean)
    try:
        student_t = propose(mean, covariance, count)
    except np.linalg.LinAlgError:
        return None
    points = points_of(student_t, stream)
    log_proposal = log_mixture((student_t,), points)
    log_weights = log_density(points) - log_proposal
    if not np.any(np.isfinite(log_weights)):
        return None
    log_weights = np.where(np.isfinite(log_weights), log_weights, -np.inf)
    weights = normalise(log_weights)
    moments = weighted_moments(points, weights)
    sd = np.sqrt(np.maximum(np.diag(moments.covariance), 1e-300))
    # Each scramble is a sample of its own: with self-normalised weights, the spread of Σ w (x − mean) over them.
    parts = (weights[:, None] * (points - moments.mean)).reshape(SCRAMBLES, count, m).sum(axis=1)
    error = float(np.max(np.sqrt(SCRAMBLES * parts.var(axis=0, ddof=1)) / sd))
    return StudentSample(
        points, log_proposal, log_weights, moments, effective_size(weights), pareto_k(log_weights), error
    )
