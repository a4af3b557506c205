"""A fixed number of gradient steps on the tilted log density: what averaging methods do at a client."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from fedppl.contracts import Draws, LocalInference, Moments, Target
from fedppl.local.tilted import gaussian_draws, gaussian_moments, log_tilted, negative_hessian, start
from fedppl.settings import positive, whole
from fedppl.types import Array, LocalFailure, Rng


class _Settings(NamedTuple):
    steps: int
    learning_rate: float


def GradientSteps(*, steps: int = 100, learning_rate: float = 1e-3) -> LocalInference:
    r"""Plain gradient ascent on the tilted log density, then its curvature where the steps ended.

    .. math:: x \leftarrow x + \eta\, \partial_x \log \tilde p(x), \quad \text{T times}; \qquad
              \hat Q = (A^{-1})_{\phi\phi}^{-1}

    Parameters
    ----------
    steps
        Number of steps T.
    learning_rate
        Step size η for the *summed* log density.

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
    settings = _Settings(whole("steps", steps), positive("learning_rate", learning_rate))
    return LocalInference(
        "gradient steps",
        check=lambda client: None,
        expand=None,
        tilted=functools.partial(tilted, settings=settings),
        draw=functools.partial(draw, settings=settings),
        settings=settings._asdict(),
    )


def climb(target: Target, settings: _Settings) -> tuple[Array, Array, float]:
    """Return (x after the steps, negative Hessian A there, Newton decrement there)."""
    density = log_tilted(target)
    x = start(target)
    first, _ = density(x)
    for _ in range(settings.steps):
        value, gradient = density(x)
        if not np.isfinite(value):
            break
        x = x + settings.learning_rate * gradient
    value, gradient = density(x)
    if not value >= first:
        raise LocalFailure(
            f"gradient steps diverged (log density {first:.4g} before, {value:.4g} after); lower "
            f"learning_rate={settings.learning_rate}"
        )
    A = negative_hessian(target, x, np.full(len(x), 0.1))
    eigenvalues, vectors = np.linalg.eigh(A)
    if not eigenvalues[0] > 0:
        raise LocalFailure(
            f"no curvature to report where {settings.steps} gradient steps ended (smallest eigenvalue "
            f"{eigenvalues[0]:.3g}); raise steps=, or change learning_rate={settings.learning_rate}"
        )
    return x, A, float(np.sum((vectors.T @ gradient) ** 2 / eigenvalues))


def tilted(target: Target, rng: Rng, *, settings: _Settings) -> Moments:
    """Moments of φ where the steps ended."""
    x, A, decrement = climb(target, settings)
    return gaussian_moments(x, A, target.client.shared_size, {"ess": np.inf, "decrement": decrement})


def draw(target: Target, draws: int, chains: int, rng: Rng, *, settings: _Settings) -> Draws:
    """Draws of (φ, θ) from the Gaussian where the steps ended."""
    x, A, decrement = climb(target, settings)
    return gaussian_draws(x, A, target.client.shared_size, draws, chains, rng, {"decrement": decrement})
