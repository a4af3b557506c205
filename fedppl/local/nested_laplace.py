"""Laplace's approximation at a client: nested, of θ alone, with importance sampling of φ; or of (φ, θ) jointly."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts import ClientView, Draws, LocalInference, Moments, Target
from fedppl.local import _conditional, _marginal, log_factors
from fedppl.local import tolerances as tol
from fedppl.local._marginal import no_mode
from fedppl.local.nuts import NUTS
from fedppl.local.target import gaussian_draws, gaussian_moments, inference, joint_mode, moments_of, require_smooth
from fedppl.numerics import importance, pairs
from fedppl.numerics import tolerances as common
from fedppl.numerics.integral import chunks
from fedppl.numerics.proposals import log_mixture, points_of, propose
from fedppl.numerics.streams import fresh_points, stream_of
from fedppl.results.diagnostics import STANDARDISED
from fedppl.settings import between, flag, whole
from fedppl.types import Array, LocalFailure, Rng

logger = logging.getLogger(__name__)


class _Settings(NamedTuple):
    points: int
    pareto_limit: float
    fallback: bool


def NestedLaplace(*, points: int = 64, pareto_limit: float = 0.7, fallback: bool = True) -> LocalInference:
    r"""Moments of the tilted distribution with the local variables marginalised first.

    .. math:: \log f_k(\phi) = \log \int p(y_k, \theta \mid \phi)\, d\theta
              \approx \ell(\phi, \theta^*) + \tfrac d2 \log 2\pi - \tfrac12 \log \det A(\phi)

    with :math:`\theta^*(\phi)` the mode and :math:`A` the negative Hessian in θ. Exact when θ is conditionally
    Gaussian. Where it is not, the error of the approximation is integrated about q, by adaptive Gauss-Hermite
    quadrature for up to three local coordinates and by importance sampling beyond, and added as a quadratic in φ
    (linear from 9 to 30 shared coordinates, omitted beyond). Tilted moments come from self-normalised importance
    sampling from the global q with weights f_k / q_k at whitened antithetic Sobol points.

    Parameters
    ----------
    points
        Number of importance points. Raised to twice the number of coefficients of a quadratic in φ, for the control
        variate, while that is at most 1024 (30 coordinates); beyond to four times m + 1, with gradients. Four or
        sixteen times as many are used where the log weights are far from a quadratic.
    pareto_limit
        Largest Pareto k of trusted weights, where these vary (relative ESS below 0.9).
    fallback
        Whether a multivariate t that is fitted to the tilted distribution, then NUTS, take the place of weights that
        are not trusted; diagnostic `fallback` is 1 or 2 then. If False the client is skipped instead.

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
    weights of θ cannot correct Laplace's bias (relative ESS below 0.3, or more than 30 shared coordinates), which adds
    up over clients. Compare with ``local=fedppl.local.NUTS()`` at one client.

    References
    ----------
    .. [1] Rue, Martino and Chopin (2009), Approximate Bayesian inference for latent Gaussian models.
    """
    settings = _Settings(
        whole("points", points, tol.FEWEST_POINTS, "better 64 or 256", tol.MOST_POINTS),
        between("pareto_limit", pareto_limit, 0, np.inf, "[)"),
        flag("fallback", fallback),
    )
    return inference(
        "nested Laplace",
        tilted,
        draw,
        settings,
        check=functools.partial(require_smooth, why="makes Laplace approximations wrong by up to several posterior sd"),
        expand=_marginal.expand,
        log_factor=_marginal.log_factor,
        look=look,
    )


def look(client: ClientView, points: Array) -> None:
    """Refuse a client whose θ has mass about another mode than that which moments are about."""
    if client.local_size and not client.view(_conditional.is_gaussian):
        log_factors.require_one_mode(client, points)


def tilted(target: Target, rng: Rng, *, settings: _Settings) -> Moments:
    """Moments of f_k(φ) q_{-k}(φ) by importance sampling from q, then from a t fitted to them, then by NUTS."""
    client, global_, _, _ = target
    mean, root = gaussian.affine(global_)
    left_out = _conditional.left_out(client, mean, root)
    factor = _marginal.against_site(target, mean, left_out.difference)
    moments = _marginal.moments(factor, mean, root, settings.points, stream_of(client.client_id))
    if moments is not None and _marginal.has_trusted_weights(moments, settings.pareto_limit):
        return moments._replace(diagnostics={**moments.diagnostics, "fallback": 0.0, "inner_trust": left_out.trust})
    before: Mapping[str, float] = {} if moments is None else moments.diagnostics
    started = time.perf_counter()
    if not settings.fallback:
        quality = "no point of q has a finite weight"
        if before:
            k, relative = before["pareto_k"], before["relative_ess"]
            quality = f"Pareto k {k:.2f} (limit {settings.pareto_limit}), relative ESS {relative:.2f}"
        remedy = "Raise points=, set fallback=True, or start EP with warm_start=True"
        raise LocalFailure(f"{quality}: q and this client's factor hardly overlap. {remedy}")
    sample = _student_sample(target, settings.pareto_limit)
    if sample is None:
        client.view(_warn_of_nuts)
    moments, step = (_student_moments(sample), 1.0) if sample is not None else (NUTS().tilted(target, rng), 2.0)
    details = {f"fallback_{name}": before[name] for name in ("pareto_k", "relative_ess") if before}
    details |= {"fallback": step, "fallback_seconds": time.perf_counter() - started}
    if sample is not None:  # Laplace's approximation over θ, which NUTS does not use
        details["inner_trust"] = float(not client.local_size or client.view(_conditional.is_gaussian))
        if np.isfinite(before.get("departure", np.nan)):
            details["departure"] = before["departure"]
    return moments._replace(diagnostics={**moments.diagnostics, **details})


def _warn_of_nuts(client: ClientView) -> None:
    """Warn once for each client, before NUTS begins: the log of a round comes when it is over."""
    names = ", ".join(dict.fromkeys(label.partition("[")[0] for label in client.local_labels))
    remedy = f". Declare {names} {STANDARDISED}" if names else ""
    logger.warning(
        "client %s: NUTS takes the place of nested Laplace from here on, for seconds to minutes a round: given the "
        "others, this client's posterior is far from normal, as in a funnel between effects and their sd%s",
        client.client_id,
        remedy,
        extra={"client": client.client_id, "status": "fallback"},
    )


def _student_sample(target: Target, limit: float) -> StudentSample | None:
    """Weighted points of the tilted distribution of φ; None where they cannot be trusted."""
    client, global_, cavity, share = target
    mode = _tilted_mode(target)
    center, covariance = mode if mode is not None else (gaussian.mean(global_), gaussian.covariance(global_))

    def log_density(draws: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):  # far out, infinite is the right answer
            return _marginal.values(client, draws, center, share) + gaussian.log_kernel(cavity, draws)

    return sample(log_density, center, covariance, stream_of(client.client_id), limit)


def _student_moments(sample: StudentSample) -> Moments:
    weights = importance.normalise(sample.log_weights)
    quality = {
        "ess": sample.ess,
        "relative_ess": sample.ess / len(weights),
        "pareto_k": sample.pareto_k,
        "mc_error": sample.error,
    }
    return moments_of(*sample.moments, importance.skewness(sample.points, weights), quality)


def own_posterior(client: ClientView, prior_share: float) -> tuple[Array, Array] | None:
    """Mean (m,) and covariance of φ by a client's rows under the prior alone; None where no mode is found.

    By importance sampling about the mode; where few points have all the weight, by the curvature there.
    """
    prior = client.prior.gaussian
    target = Target(client, prior, prior, prior_share)
    try:
        points = _student_sample(target, tol.OWN_PARETO)
    except LocalFailure as error:
        logger.warning("client %s has no posterior of its own: %s", client.client_id, error)
        return None
    return _tilted_mode(target) if points is None else (points.moments.mean, points.moments.covariance)


def _tilted_mode(target: Target) -> tuple[Array, Array] | None:
    """Mode of the tilted distribution of φ, and the covariance by its curvature."""
    client, global_, cavity, share = target
    if not gaussian.is_proper(cavity):
        return None
    phi, radius = gaussian.mean(global_), 1.0
    for _ in range(tol.TILTED_STEPS):
        try:
            with np.errstate(invalid="ignore"):  # far out there may be no density: then there is no expansion
                expansion = _marginal.expand(client, phi, share)
        except LocalFailure:
            return None
        precision = cavity.precision - expansion.hessian
        values, vectors = np.linalg.eigh(precision)
        gradient = expansion.gradient + cavity.linear - cavity.precision @ phi
        step = vectors @ ((vectors.T @ gradient) / np.maximum(np.abs(values), common.FLAT_CURVATURE))
        phi = phi + step / max(1.0, float(np.sqrt(step @ cavity.precision @ step)) / radius)
        radius *= tol.TRUST_GROWTH
        if values[0] > 0 and gradient @ step < common.LEFT:
            return phi, np.asarray(np.linalg.inv(precision), dtype=np.float64)
    return None


def draw(target: Target, draws: int, chains: int, rng: Rng, *, settings: _Settings) -> Draws:
    """Draws of (φ, θ) from the tilted distribution, FedLin eq. 8, by sampling importance resampling.

    Proposals are φ from q, or from a t fitted to the tilted distribution where q covers it badly, and θ from its
    Laplace approximation given φ, whose error the weights correct.
    """
    client, global_, cavity, share = target
    wanted, step = draws * chains, 0.0
    z = fresh_points(client.shared_size, max(settings.points, tol.PROPOSALS_A_DRAW * wanted), int(rng.integers(2**32)))
    mean, root = gaussian.affine(global_)
    phi = mean + z @ root.T
    outside = share * client.prior.log_ratio(phi) - gaussian.log_kernel(gaussian.quotient(global_, cavity), phi)
    phi, theta, log_weights = _with_local(client, phi, mean, outside, rng)
    if importance.pareto_k(log_weights) > settings.pareto_limit and settings.fallback:
        sample = _student_sample(target, settings.pareto_limit)
        if sample is not None:
            step, phi = 1.0, sample.points
            outside = share * client.prior.log_ratio(phi) + gaussian.log_kernel(cavity, phi) - sample.log_proposal
            phi, theta, log_weights = _with_local(client, phi, sample.moments.mean, outside, rng)
        if importance.pareto_k(log_weights) > settings.pareto_limit:
            sampled = NUTS().draw(target, draws, chains, rng)
            return sampled._replace(diagnostics={**sampled.diagnostics, "fallback": 2.0})
    weights = importance.normalise(log_weights)
    chosen = importance.resample(weights, wanted, rng).reshape(chains, draws)
    ess, k = importance.effective_size(weights), importance.pareto_k(log_weights)
    return Draws(phi[chosen], theta[chosen], {"ess": ess, "pareto_k": k, "fallback": step})


def _with_local(client: ClientView, phi: Array, center: Array, outside: Array, rng: Rng) -> tuple[Array, Array, Array]:
    """Points φ with a draw of θ for each, and log weights of the pairs: p(y, θ | φ) / g(θ | φ) x what is outside."""
    d = client.local_size
    parts: list[tuple[Array, Array, Array]] = []
    for chunk in chunks(len(phi), common.NUMBERS_AT_ONCE // max(1, d * d)):
        about = _marginal.near(client, phi[chunk], center)
        known = np.flatnonzero(np.isfinite(about.values))
        some, root, noise = phi[chunk][known], about.root[known], rng.normal(size=(len(known), d))
        theta = about.theta[known] + pairs.solve_upper(root, noise)
        log_proposal = -0.5 * np.sum(noise**2, axis=1) + 0.5 * pairs.log_determinant(root)
        values = _marginal.log_densities(client, some, theta)
        parts.append((some, theta, values - log_proposal + outside[chunk][known]))
    if not any(len(some) for some, _, _ in parts):
        raise LocalFailure(no_mode(client, center))
    joined, theta, log_weights = (np.concatenate(part) for part in zip(*parts, strict=True))
    return joined, theta, log_weights


# Importance sampling from a multivariate t that is fitted repeatedly to its own weighted points -----------------------

# For a density that a Gaussian q does not cover: one client alone, or one whose factor hardly overlaps with q.


class StudentSample(NamedTuple):
    """Weighted points of the density, with diagnostics."""

    points: Array  # (S, m)
    log_proposal: Array  # (S,) log density of the t at the points
    log_weights: Array  # (S,)
    moments: importance.WeightedMoments
    ess: float
    pareto_k: float
    error: float  # largest standard error of a mean, in sds


def sample(
    log_density: Callable[[Array], Array], mean: Array, covariance: Array, stream: int, limit: float
) -> StudentSample | None:
    """Weighted points of exp(log_density), from a first mean (m,) and covariance; None where they cannot be trusted."""
    m = len(mean)
    if common.SCRAMBLES * tol.LAST_POINTS < tol.EACH_COEFFICIENT * (m + 1):
        return None
    for fit in range(tol.T_FITS):
        points = _weighted(log_density, mean, covariance, tol.FIRST_POINTS, stream)
        if points is None:
            return None
        settled = points.pareto_k < limit and points.ess > tol.SETTLED * len(points.points)
        mean, covariance = points.moments
        if points.ess < tol.TELLING * m:  # too few for a covariance: it is widened
            covariance = covariance + tol.WIDENED * np.diag(np.diag(covariance)) / max(points.ess / m, 1.0)
        if settled and fit > 0:
            break
    points = _weighted(log_density, mean, covariance, tol.LAST_POINTS, stream)
    if points is None or points.pareto_k > limit or points.ess < tol.EACH_COEFFICIENT * (m + 1):
        return None
    return points if points.error < tol.MOST_T_ERROR else None


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
    weights = importance.normalise(log_weights)
    moments = importance.weighted_moments(points, weights)
    sd = np.sqrt(np.maximum(np.diag(moments.covariance), common.TINY))
    # Each scramble is a sample of its own: with self-normalised weights, the spread of Σ w (x − mean) over them.
    parts = (weights[:, None] * (points - moments.mean)).reshape(common.SCRAMBLES, count, m).sum(axis=1)
    error = float(np.max(np.sqrt(common.SCRAMBLES * parts.var(axis=0, ddof=1)) / sd))
    ess, k = importance.effective_size(weights), importance.pareto_k(log_weights)
    return StudentSample(points, log_proposal, log_weights, moments, ess, k, error)


# Laplace's approximation of (φ, θ) jointly ----------------------------------------------------------------------------


def Laplace() -> LocalInference:
    r"""Gaussian at the joint mode of the tilted distribution over (φ, θ).

    .. math:: (\phi, \theta) \approx N(x^*, A^{-1}), \qquad A = -\partial^2 \log \tilde p(x^*)

    Returns
    -------
    LocalInference

    Raises
    ------
    DeclarationError
        In a fit, if the log density has a kink.

    Notes
    -----
    *When this fails.* The joint mode of a scale parameter and the effects it scales is not the mode of its
    marginal: the estimate is biased towards small scales at one client and the bias adds up over clients. Use
    `NestedLaplace` unless the model is Gaussian with known variances.
    """
    check = functools.partial(require_smooth, why="may have no curvature at its mode")
    return LocalInference("Laplace", check=check, expand=None, tilted=_joint_tilted, draw=_joint_draw, look=look)


def _joint_tilted(target: Target, rng: Rng) -> Moments:
    mode, A = joint_mode(target)
    return gaussian_moments(mode, A, target.client.shared_size, {"ess": np.inf})


def _joint_draw(target: Target, draws: int, chains: int, rng: Rng) -> Draws:
    mode, A = joint_mode(target)
    return gaussian_draws(mode, A, target.client.shared_size, draws, chains, rng, {})
