"""Laplace: one Gaussian at the joint mode of (φ, θ). Exact for Gaussian models, biased for shared scales."""

from __future__ import annotations

import numpy as np

from fedppl.contracts import ClientView, Draws, LocalInference, Moments, Target
from fedppl.local import _factor
from fedppl.local._given import draw_given
from fedppl.local.target import gaussian_draws, gaussian_moments, log_tilted, negative_hessian, require_smooth, start
from fedppl.types import Array, LocalFailure, Rng


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
    return LocalInference(
        "Laplace", check=_check, expand=None, tilted=tilted, draw=draw, factor=_factor.factor, draw_given=draw_given
    )


def _check(client: ClientView) -> None:
    require_smooth(client, "may have no curvature at its mode")


def joint_gaussian(target: Target) -> tuple[Array, Array]:
    """Mode (m + d_k,) of the tilted distribution and its negative Hessian A, by damped Newton."""
    density = log_tilted(target)
    x = start(target)
    scale = np.full(len(x), 0.1)
    value, gradient = density(x)
    for _ in range(100):
        A = negative_hessian(target, x, scale)
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


def tilted(target: Target, rng: Rng) -> Moments:
    """Moments of φ under the Gaussian at the joint mode."""
    mode, A = joint_gaussian(target)
    return gaussian_moments(mode, A, target.client.shared_size, {"ess": np.inf})


def draw(target: Target, draws: int, chains: int, rng: Rng) -> Draws:
    """Draws of (φ, θ) from the Gaussian at the joint mode."""
    mode, A = joint_gaussian(target)
    return gaussian_draws(mode, A, target.client.shared_size, draws, chains, rng, {})
