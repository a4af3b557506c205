"""Nested Laplace: θ marginalised by Laplace, the shared parameters by importance sampling from the global q."""

from __future__ import annotations

import functools
import time
import weakref
from typing import NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts import Draws, Expansion, LocalInference, Moments, Target
from fedppl.local import _from_q, _inner, _student
from fedppl.local._inner import LeftOut
from fedppl.local._no_mode import no_mode
from fedppl.local._student import StudentSample
from fedppl.local.nuts import NUTS
from fedppl.model.declaration import ClientModel
from fedppl.numerics.importance import (
    effective_size,
    fresh_points,
    has_enough_points,
    normalise,
    pareto_k,
    resample,
    skewness,
    stream_of,
    whitened_points,
)
from fedppl.numerics.marginal import expand_marginal, gradient_batch, inner_mode_at, marginal_batch, site_batch
from fedppl.numerics.newton import OK
from fedppl.settings import between, flag, whole
from fedppl.types import Array, DeclarationError, LocalFailure

__all__ = ["NestedLaplace", "log_marginal"]


class _Settings(NamedTuple):
    points: int
    pareto_limit: float
    fallback: bool


_ROUNDING = 1e-7
_exact: weakref.WeakKeyDictionary[ClientModel, bool] = weakref.WeakKeyDictionary()
_starts: weakref.WeakKeyDictionary[ClientModel, Array] = weakref.WeakKeyDictionary()


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
        Number of points, raised to twice the number of coefficients of a quadratic in φ, which is what the
        control variate needs, while that is at most 1024 (30 coordinates), and beyond it to four times m + 1, with
        gradients there. Four or sixteen times as many are used where the log weights are far from a quadratic.
    pareto_limit
        Pareto k above which weights that vary (relative ESS below 0.9) are not trusted.
    fallback
        Where they are not trusted, use a multivariate t that is fitted to the tilted distribution, then NUTS, and
        report it as diagnostic `fallback` (1, 2). If False the client is skipped instead.

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
        expand=expand,
        tilted=functools.partial(tilted, settings=settings),
        draw=functools.partial(draw, settings=settings),
        settings=settings._asdict(),
        log_factor=log_factor,
    )


def _check(client: ClientModel) -> None:
    if client.kink:
        raise DeclarationError(
            f"the log density has a kink or a jump in a parameter ({client.kink}), as a Laplace (lasso) prior has; it "
            "makes Laplace approximations wrong by up to several posterior sd. Use EP(local=fedppl.NUTS()) for this "
            "model."
        )


def log_marginal(client: ClientModel, phi: Array) -> Array:
    """log f_k at each row of phi (S, m), (S,); −inf where no mode was found."""
    values, _, _ = _batch(client, phi, phi.mean(axis=0), factors=False)
    return values


def log_factor(client: ClientModel, points: Array, prior_share: float) -> Array:
    """log f_k (and its share of a non-Gaussian prior) at points (S, m), by way of the first of them, (S,)."""
    try:
        return _values(client, points, points[0], prior_share)
    except LocalFailure:
        return np.full(len(points), -np.inf)


def _batch(client: ClientModel, draws: Array, center: Array, *, factors: bool) -> tuple[Array, Array, Array]:
    d = client.local_size
    modes = np.zeros((len(draws), d))
    held = np.zeros((len(draws) if factors else 0, d, d))
    status, values, _ = marginal_batch(
        client.kernel, np.ascontiguousarray(draws), center, _start(client), client.data, modes, held
    )
    if status != OK:
        raise LocalFailure(no_mode(client, center))
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
        raise LocalFailure(no_mode(client, point))
    if prior_share and not client.prior.is_gaussian:
        value += prior_share * float(client.prior.log_ratio(point[None])[0])
        gradient = gradient + prior_share * client.prior.log_ratio_gradient(point)
        hessian = hessian + prior_share * client.prior.log_ratio_hessian(point)
    return Expansion(value, gradient, hessian, {})


def _values(client: ClientModel, draws: Array, center: Array, prior_share: float) -> Array:
    """log f_k (and its share of a non-Gaussian prior) at each row of draws (S, m), (S,)."""
    values, _, _ = _batch(client, draws, center, factors=False)
    return values + prior_share * client.prior.log_ratio(draws) if prior_share else values


def _gradients(client: ClientModel, draws: Array, center: Array, prior_share: float) -> tuple[Array, Array]:
    """log f_k (and its share of a non-Gaussian prior) and its gradient at each row of draws, (S,) and (S, m)."""
    gradients = np.zeros_like(draws)
    status, values = gradient_batch(
        client.kernel, np.ascontiguousarray(draws), center, _start(client), client.data, gradients
    )
    if status != OK:
        raise LocalFailure(no_mode(client, center))
    if prior_share:
        values = values + prior_share * client.prior.log_ratio(draws)
        gradients = gradients + prior_share * client.prior.log_ratio_gradients(draws)
    return values, gradients


def tilted(target: Target, rng: np.random.Generator, *, settings: _Settings) -> Moments:
    """Moments of f_k(φ) q_{-k}(φ) by importance sampling from q, then from a t fitted to them, then by NUTS."""
    client, global_, cavity, share = target
    mean, root = gaussian.affine(global_)
    site = gaussian.quotient(global_, cavity)
    left_out = _left_out(client, mean, root)

    def values(draws: Array) -> Array:
        found = _values(client, draws, mean, share) - gaussian.log_kernel(site, draws)
        return found if left_out.difference is None else found + left_out.difference(draws)

    def gradients(draws: Array) -> tuple[Array, Array]:
        log_factor, slopes = _gradients(client, draws, mean, share)
        return log_factor - gaussian.log_kernel(site, draws), slopes - site.linear + draws @ site.precision

    factor = _from_q.Factor(client.shared_size, values, gradients)
    found = _from_q.moments(factor, mean, root, settings.points, stream_of(client.client_id))
    if found is not None and _from_q.trusted(found, settings.pareto_limit):
        return found._replace(diagnostics={**found.diagnostics, "fallback": 0.0, "inner_trust": left_out.trust})
    why = (
        {} if found is None else {f"fallback_{name}": found.diagnostics[name] for name in ("pareto_k", "relative_ess")}
    )
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
    found, step = (_student_moments(sample), 1.0) if sample is not None else (NUTS().tilted(target, rng), 2.0)
    cost = {"fallback": step, "fallback_seconds": time.perf_counter() - started}
    if sample is not None:  # of Laplace's approximation over θ, where NUTS has none
        cost["inner_trust"] = float(not client.local_size or _is_exact(client))
    return found._replace(diagnostics={**found.diagnostics, **why, **cost})


def _difference(client: ClientModel, points: Array, center: Array) -> tuple[Array, float] | None:
    """What Laplace over θ leaves out of log f_k at points (S, m), and how far to trust it; None where it is unknown."""
    batch = functools.partial(
        _inner.difference_batch, client.kernel, np.ascontiguousarray(points), center, _start(client), client.data
    )
    return _inner.differences(batch, client.local_size, stream_of(client.client_id))


def _is_exact(client: ClientModel) -> bool:
    """Whether θ is Gaussian given φ, as far as points of the prior tell, near and far: from model and data alone."""
    if client not in _exact:
        center, near = gaussian.mean(client.prior.gaussian), _prior_scale(client)
        far = np.minimum(gaussian.standard_deviations(client.prior.gaussian), 10.0)
        z = whitened_points(client.shared_size, 2 * (client.shared_size + 1), 0)
        found = [_difference(client, center + z * scale, center) for scale in (near, far)]
        _exact[client] = all(one is not None and float(np.abs(one[0]).max()) < _ROUNDING for one in found)
    return _exact[client]


def _left_out(client: ClientModel, mean: Array, root: Array) -> LeftOut:
    """What Laplace over θ leaves out of log f_k about q."""
    if not client.local_size or _is_exact(client):
        return LeftOut(None, 1.0)
    if not has_enough_points(client.shared_size):
        return LeftOut(None, 0.0)
    return _inner.left_out(lambda points: _difference(client, points, mean), mean, root, stream_of(client.client_id))


def _student_sample(target: Target, settings: _Settings) -> StudentSample | None:
    """Weighted points of the tilted distribution of φ; None where there are none to trust."""
    client, global_, cavity, share = target
    at = _tilted_mode(target)
    center, covariance = at if at is not None else (gaussian.mean(global_), gaussian.covariance(global_))

    def log_density(draws: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):  # far out, infinite is the right answer
            return _values(client, draws, center, share) + gaussian.log_kernel(cavity, draws)

    return _student.sample(log_density, center, covariance, stream_of(client.client_id), settings.pareto_limit)


def _student_moments(sample: StudentSample) -> Moments:
    weights = normalise(sample.log_weights)
    precision = np.linalg.inv(sample.moments.covariance)
    return Moments(
        sample.moments.mean,
        sample.moments.covariance,
        (precision + precision.T) / 2,
        skewness(sample.points, weights),
        {
            "ess": sample.ess,
            "relative_ess": sample.ess / len(weights),
            "pareto_k": sample.pareto_k,
            "mc_error": sample.error,
        },
    )


def _tilted_mode(target: Target) -> tuple[Array, Array] | None:
    """Mode of the tilted distribution of φ and the covariance that its curvature gives."""
    client, global_, cavity, share = target
    if not gaussian.is_proper(cavity):
        return None
    phi, radius = gaussian.mean(global_), 1.0
    for _ in range(30):
        try:
            expansion = expand(client, phi, share)
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


def draw(target: Target, draws: int, chains: int, rng: np.random.Generator, *, settings: _Settings) -> Draws:
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


_AT_ONCE = 2**24  # numbers in the factors that are held at a time


def _with_local(
    client: ClientModel, phi: Array, center: Array, outside: Array, rng: np.random.Generator
) -> tuple[Array, Array, Array]:
    """Points φ with a draw of θ for each, and log weights of the pairs: p(y, θ | φ) / g(θ | φ) x what is outside."""
    d = client.local_size
    chunk = max(1, _AT_ONCE // max(1, d * d))
    kept: list[tuple[Array, Array, Array]] = []
    for first in range(0, len(phi), chunk):
        some = phi[first : first + chunk]
        _, modes, factors = _batch(client, some, center, factors=True)
        found = np.array([np.all(np.diag(f) > 0) for f in factors]) if d else np.ones(len(some), dtype=bool)
        some, modes, factors = some[found], modes[found], factors[found]
        noise = rng.normal(size=(len(some), d))
        theta = modes + np.linalg.solve(np.swapaxes(factors, 1, 2), noise[..., None])[..., 0] if d else modes
        log_proposal = -0.5 * np.sum(noise**2, axis=1) + np.sum(np.log(np.einsum("sii->si", factors)), axis=1)
        values = site_batch(client.kernel, np.ascontiguousarray(np.concatenate([some, theta], axis=1)), client.data)
        kept.append((some, theta, values - log_proposal + outside[first : first + chunk][found]))
    if not any(len(some) for some, _, _ in kept):
        raise LocalFailure(no_mode(client, center))
    joined, theta, log_weights = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    return joined, theta, log_weights
