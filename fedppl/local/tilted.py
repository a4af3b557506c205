"""The tilted distribution over (φ, θ) as one log density with gradient, for the ways that work on it directly."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from fedppl.contracts import ClientView, Draws, Moments, Target
from fedppl.numerics.kernels import NO_DATA
from fedppl.numerics.pairs import difference_hessian
from fedppl.types import Array, DeclarationError, Rng


def require_smooth(client: ClientView, why: str) -> None:
    """Raise DeclarationError where the log density has a kink, which `why` says what it does to."""
    if client.kink:
        raise DeclarationError(
            f"the log density has a kink or a jump in a parameter ({client.kink}), as a Laplace (lasso) prior has; it "
            f"{why}. Use EP(local=fedppl.NUTS()) for this model."
        )


def log_tilted(target: Target) -> Callable[[Array], tuple[float, Array]]:
    """log [p(y, θ | φ) q_{-k}(φ) (p / N_0)(φ)^share] and its gradient, as a function of x = (φ, θ)."""
    client, prior = target.client, target.client.prior
    kernel, data = client.kernel, client.packed
    m = client.shared_size
    linear, precision = target.cavity
    share = 0.0 if prior.is_gaussian else float(target.prior_share)
    prior_kernel = None
    if share:
        assert prior.kernel is not None  # of every prior that is not Gaussian
        prior_kernel = prior.kernel()
        linear, precision = linear - share * prior.gaussian.linear, precision - share * prior.gaussian.precision

    def value_and_gradient(x: Array) -> tuple[float, Array]:
        with np.errstate(over="ignore", invalid="ignore"):  # far out, infinite is the right answer
            output = kernel(np.ascontiguousarray(x), *data)
            phi = x[:m]
            pull = precision @ phi
            output[0] += phi @ (linear - 0.5 * pull)
            output[1 : 1 + m] += linear - pull
            if prior_kernel is not None:
                output[: 1 + m] += share * prior_kernel(np.ascontiguousarray(phi), *NO_DATA)
        return float(output[0]), output[1:]

    return value_and_gradient


def start(target: Target) -> Array:
    """Starting point (m + d_k,): the mean of the global q, and θ where its declaration starts it."""
    return np.concatenate([np.linalg.solve(target.global_.precision, target.global_.linear), target.client.initial])


def negative_hessian(target: Target, x: Array, scale: Array) -> Array:
    """A = −∂² log tilted / ∂x² at x = (φ, θ), by differences of the gradient over lengths in proportion to scale."""
    client, m = target.client, target.client.shared_size
    A: Array = -difference_hessian(client.kernel, x, scale, client.packed)
    A[:m, :m] += target.cavity.precision
    if target.prior_share and not client.prior.is_gaussian:
        A[:m, :m] -= target.prior_share * client.prior.log_ratio_hessian(x[:m])
    return A


def moments_of(mean: Array, covariance: Array, skewness: Array, diagnostics: Mapping[str, float]) -> Moments:
    """Moments whose precision is the inverse of the covariance."""
    precision = np.linalg.inv(covariance)
    return Moments(mean, (covariance + covariance.T) / 2, (precision + precision.T) / 2, skewness, diagnostics)


def gaussian_moments(x: Array, A: Array, m: int, diagnostics: Mapping[str, float]) -> Moments:
    """Moments of the first m coordinates of N(x, A⁻¹)."""
    covariance = np.asarray(np.linalg.inv(A), dtype=np.float64)
    return moments_of(x[:m], covariance[:m, :m], np.zeros(m), diagnostics)


def gaussian_draws(
    x: Array, A: Array, m: int, draws: int, chains: int, rng: Rng, diagnostics: Mapping[str, float]
) -> Draws:
    """Draws of N(x, A⁻¹), split into φ and θ."""
    z = rng.normal(size=(chains, draws, len(x)))
    sample = x + z @ np.linalg.inv(np.linalg.cholesky(A))
    return Draws(sample[..., :m], sample[..., m:], {"ess": float(chains * draws), **diagnostics})
