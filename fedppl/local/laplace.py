"""Laplace: one Gaussian at the joint mode of (φ, θ). Exact for Gaussian models, biased for shared scales."""

from __future__ import annotations

import numpy as np

from fedppl.gaussian import Gaussian
from fedppl.local._newton import difference_hessian
from fedppl.local._tilted import log_tilted, start
from fedppl.model import ClientModel
from fedppl.types import Array, DeclarationError, Draws, LocalFailure, LocalInference, Moments, Target

__all__ = ["Laplace"]


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

    Examples
    --------
    >>> import fedppl
    >>> fedppl.Laplace().name
    'Laplace'

    Notes
    -----
    *When this fails.* The joint mode of a scale parameter and the effects it scales is not the mode of its
    marginal: the estimate is biased towards small scales at one client and the bias adds up over clients. Use
    `NestedLaplace` unless the model is Gaussian with known variances.
    """
    return LocalInference("Laplace", check=_check, expand=None, tilted=tilted, draw=draw)


def _check(client: ClientModel) -> None:
    if client.has_kink:
        raise DeclarationError(
            "the log density takes an absolute value of a parameter, as a Laplace (lasso) prior does; it has no "
            "curvature at its mode. Use EP(local=fedppl.NUTS()) for this model."
        )


def joint_gaussian(target: Target) -> tuple[Array, Array]:
    """Mode (m + d_k,) of the tilted distribution and its negative Hessian A, by damped Newton."""
    client, cavity, prior_share = target.client, target.cavity, target.prior_share
    density, m = log_tilted(target), client.shared_size
    x = start(target)
    scale = np.full(len(x), 0.1)
    value, gradient = density(x)
    for _ in range(100):
        A = -difference_hessian(client.kernel, x, scale, client.data)
        A[:m, :m] += cavity.precision
        if prior_share and not client.prior.is_gaussian:
            A[:m, :m] -= prior_share * _ratio_hessian(client, x[:m])
        eigenvalues, vectors = np.linalg.eigh(A)
        floor = 1e-8 * max(1.0, float(eigenvalues[-1]))
        step = vectors @ ((vectors.T @ gradient) / np.maximum(np.abs(eigenvalues), floor))
        decrement = float(gradient @ step)
        if eigenvalues[0] > floor and decrement < 1e-12:
            return x, A
        scale = 1.0 / np.sqrt(np.maximum(np.abs(np.diag(A)), 1.0))
        length = 1.0
        while length > 1e-10:
            trial = density(x + length * step)
            if trial[0] >= value + 1e-4 * length * decrement - 1e-12 * abs(value):
                break
            length /= 2
        else:
            if eigenvalues[0] > floor and decrement < 1e-6:
                return x, A
            break
        x = x + length * step
        value, gradient = trial
    raise LocalFailure(
        "no joint mode of (φ, θ) was found; the tilted posterior may have none (a scale going to zero). "
        "Use local=fedppl.NestedLaplace() or fedppl.NUTS()"
    )


def _ratio_hessian(client: ClientModel, phi: Array) -> Array:
    step, ratio = 1e-4, client.prior.log_ratio_gradient
    hessian = np.stack([ratio(phi + step * u) - ratio(phi - step * u) for u in np.eye(len(phi))], axis=1) / (2 * step)
    return np.asarray((hessian + hessian.T) / 2)


def tilted(
    target: Target, rng: np.random.Generator
) -> Moments:
    """Moments of φ under the Gaussian at the joint mode."""
    del rng
    m = target.client.shared_size
    mode, A = joint_gaussian(target)
    covariance = np.linalg.inv(A)[:m, :m]
    precision = np.linalg.inv(covariance)
    return Moments(mode[:m], (covariance + covariance.T) / 2, (precision + precision.T) / 2, {"ess": np.inf})


def draw(
    target: Target,
    draws: int,
    chains: int,
    rng: np.random.Generator,
) -> Draws:
    """Draws of (φ, θ) from the Gaussian at the joint mode."""
    m = target.client.shared_size
    mode, A = joint_gaussian(target)
    z = rng.normal(size=(chains, draws, len(mode)))
    sample = mode + z @ np.linalg.inv(np.linalg.cholesky(A))
    return Draws(sample[..., :m], sample[..., m:], {"ess": float(chains * draws)})
