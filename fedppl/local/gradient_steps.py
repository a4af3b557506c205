"""A fixed number of gradient steps on the tilted log density: what averaging methods do at a client."""

from __future__ import annotations

import functools

import numpy as np

from fedppl.local._newton import difference_hessian
from fedppl.local._tilted import log_tilted, start
from fedppl.types import Array, DeclarationError, Draws, LocalFailure, LocalInference, Moments, Target

__all__ = ["GradientSteps"]


def GradientSteps(*, steps: int = 100, learning_rate: float = 1e-3) -> LocalInference:
    r"""Plain gradient ascent on the tilted log density, then its curvature where the steps ended.

    .. math:: x \leftarrow x + \eta\, \partial_x \log \tilde p(x), \quad \text{T times}; \qquad
              \hat Q = (A^{-1})_{\phi\phi}^{-1}

    Parameters
    ----------
    steps
        Number of steps T.
    learning_rate
        η, per unit of the *summed* log density.

    Returns
    -------
    LocalInference

    Raises
    ------
    DeclarationError
        For steps or a learning rate that are not positive.

    Examples
    --------
    >>> import fedppl
    >>> fedppl.GradientSteps(steps=10).name
    'gradient steps'

    Notes
    -----
    *When this fails.* η above 2 / λ_max of the curvature diverges, and the client says so; a small one has not
    arrived after T steps, which diagnostic `decrement` (in units of the log density) shows.
    """
    if steps < 1 or not learning_rate > 0:
        raise DeclarationError(f"steps={steps}, learning_rate={learning_rate}: both must be positive.")
    settings = {"steps": steps, "learning_rate": learning_rate}
    return LocalInference(
        "gradient steps",
        check=lambda client: None,
        expand=None,
        tilted=functools.partial(tilted, **settings),
        draw=functools.partial(draw, **settings),
    )


def climb(
    target: Target, steps: int, learning_rate: float
) -> tuple[Array, Array, float]:
    """Return (x after the steps, negative Hessian A there, Newton decrement there)."""
    client, cavity = target.client, target.cavity
    density, m = log_tilted(target), client.shared_size
    x = start(target)
    for _ in range(steps):
        value, gradient = density(x)
        if not np.isfinite(value):
            raise LocalFailure(f"gradient steps diverged; lower learning_rate={learning_rate}")
        x = x + learning_rate * gradient
    value, gradient = density(x)
    A = -difference_hessian(client.kernel, x, np.full(len(x), 0.1), client.data)
    A[:m, :m] += cavity.precision
    eigenvalues, vectors = np.linalg.eigh(A)
    if not np.isfinite(value) or not eigenvalues[0] > 0:
        raise LocalFailure(
            f"no curvature to report where {steps} gradient steps ended (smallest eigenvalue {eigenvalues[0]:.3g}); "
            f"raise steps=, or change learning_rate={learning_rate}"
        )
    return x, A, float(np.sum((vectors.T @ gradient) ** 2 / eigenvalues))


def tilted(
    target: Target,
    rng: np.random.Generator,
    *,
    steps: int,
    learning_rate: float,
) -> Moments:
    """Moments of φ where the steps ended."""
    del rng
    m = target.client.shared_size
    x, A, decrement = climb(target, steps, learning_rate)
    covariance = np.linalg.inv(A)[:m, :m]
    precision = np.linalg.inv(covariance)
    return Moments(
        x[:m],
        (covariance + covariance.T) / 2,
        (precision + precision.T) / 2,
        {"ess": np.inf, "decrement": decrement},
    )


def draw(
    target: Target,
    draws: int,
    chains: int,
    rng: np.random.Generator,
    *,
    steps: int,
    learning_rate: float,
) -> Draws:
    """Draws of (φ, θ) from the Gaussian where the steps ended."""
    m = target.client.shared_size
    x, A, decrement = climb(target, steps, learning_rate)
    z = rng.normal(size=(chains, draws, len(x)))
    sample = x + z @ np.linalg.inv(np.linalg.cholesky(A))
    return Draws(sample[..., :m], sample[..., m:], {"ess": float(chains * draws), "decrement": decrement})
