"""Variational fits of the tilted distribution: a full-rank or a mean-field Gaussian over (φ, θ)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from fedppl.contracts import Draws, LocalInference, Moments, Target
from fedppl.local import tolerances as tol
from fedppl.local.target import inference, log_tilted, moments_of, negative_hessian, start
from fedppl.numerics.importance import pareto_k
from fedppl.numerics.streams import stream_of, whitened_points
from fedppl.settings import whole
from fedppl.types import Array, LocalFailure, Rng


def ADVI(*, points: int = 256, max_iterations: int = 2000) -> LocalInference:
    r"""Full-rank Gaussian variational fit of the tilted distribution.

    .. math:: \max_{\mu, L}\; \frac1S \sum_s \log \tilde p(\mu + L z_s) + \log |\det L|

    over fixed whitened points z_s, so that the objective is deterministic, L-BFGS converges on it, and a
    Gaussian target is fitted exactly.

    Parameters
    ----------
    points
        Number of points S, at least 16, raised to at least twice the dimension.
    max_iterations
        Largest number of L-BFGS iterations, at least 1.

    Returns
    -------
    LocalInference

    Raises
    ------
    DeclarationError
        For `points` or `max_iterations` that are no whole numbers, or too small.
    LocalFailure
        In `Fit.client`, where the fit does not converge, or the tilted density does not fall off around it. In a round
        of a fit such a client is left out, and its reason is in the log.

    Notes
    -----
    *When this fails.* A Gaussian cannot follow a funnel: diagnostic `pareto_k` of the fit is above 0.7 then. Parameters
    grow with the square of the dimension: use `MeanField` for many.

    References
    ----------
    .. [1] Giordano, Ingram and Broderick (2024), Black box variational inference with a deterministic objective.
    """
    return _build("ADVI", _full_rank, points, max_iterations)


def MeanField(*, points: int = 64, max_iterations: int = 2000) -> LocalInference:
    r"""Gaussian variational fit with independent coordinates, for many parameters.

    .. math:: q(\phi, \theta) = \prod_i N(x_i; \mu_i, \sigma_i^2)

    Parameters
    ----------
    points, max_iterations
        As in `ADVI`.

    Returns
    -------
    LocalInference

    Raises
    ------
    DeclarationError, LocalFailure
        As in `ADVI`.

    Notes
    -----
    *When this fails.* Posterior sds are too small wherever coordinates are correlated, by construction.
    """
    return _build("mean field", _mean_field, points, max_iterations)


_Density = Callable[[Array], tuple[float, Array]]
_Fit = Callable[[_Density, Array, Array, int], tuple[Array, Array]]


class _Settings(NamedTuple):
    points: int
    max_iterations: int


def _build(name: str, fit: _Fit, points: int, max_iterations: int) -> LocalInference:
    points = whole("points", points, tol.FEWEST_POINTS, most=tol.MOST_POINTS)
    settings = _Settings(points, whole("max_iterations", max_iterations))
    return inference(name, functools.partial(tilted, fit=fit), functools.partial(draw, fit=fit), settings)


def _maximise(objective: _Density, first: Array, max_iterations: int) -> Array:
    """Maximise by L-BFGS; infinite values are avoided."""

    def negative(parameters: Array) -> tuple[float, Array]:
        value, gradient = objective(parameters)
        if not np.isfinite(value) or not np.all(np.isfinite(gradient)):
            return tol.NO_VALUE, np.zeros_like(parameters)
        return -value, -gradient

    options: dict[str, Any] = {"maxiter": max_iterations, "maxfun": tol.EVALUATIONS * max_iterations}
    options |= {"ftol": tol.VALUE_DIGITS, "gtol": tol.SLOPE_DIGITS, "maxcor": tol.CORRECTIONS}
    search = functools.partial(minimize, negative, jac=True, method="L-BFGS-B", options=options)
    result = search(first)
    for _ in range(tol.RESTARTS):
        if result.status == 1:
            break
        # A line search that overshoots to an equal value ends L-BFGS far from the optimum, with status 0. A new search
        # from there, without the memory, goes on; at an optimum it stops at once.
        before, result = result, search(result.x)
        if before.fun - result.fun <= tol.RESTART_GAIN * (1.0 + abs(result.fun)):
            break
    else:
        raise LocalFailure(f"the variational fit still rises after {tol.RESTARTS} searches; give θ a proper prior")
    if not np.all(np.isfinite(result.x)) or result.fun >= tol.NO_VALUE:
        raise LocalFailure("the variational objective is infinite at every point; give θ a proper prior or use NUTS")
    if result.status == 1:
        raise LocalFailure(f"the variational fit did not converge; raise max_iterations={max_iterations}")
    return np.asarray(result.x)


def _average(density: _Density, x: Array) -> tuple[float, Array]:
    """Mean log density over the rows of x, and the gradient at each row."""
    value, gradients = 0.0, np.empty_like(x)
    for s, row in enumerate(x):
        one, gradients[s] = density(row)
        value += one
    return value / len(x), gradients


def _mean_field(density: _Density, origin: Array, z: Array, max_iterations: int) -> tuple[Array, Array]:
    n = len(origin)

    def objective(parameters: Array) -> tuple[float, Array]:
        mean, log_sd = parameters[:n], parameters[n:]
        spread = z * np.exp(log_sd)
        value, gradients = _average(density, mean + spread)
        slope = np.mean(gradients * spread, axis=0) + 1.0
        return value + float(log_sd.sum()), np.concatenate([gradients.mean(axis=0), slope])

    best = _maximise(objective, np.concatenate([origin, np.full(n, tol.FIRST_LOG_SD)]), max_iterations)
    return best[:n], np.diag(np.exp(best[n:]))


def _full_rank(density: _Density, origin: Array, z: Array, max_iterations: int) -> tuple[Array, Array]:
    n = len(origin)
    rows, columns = np.tril_indices(n, -1)
    # Coordinates in units of a mean-field fit: L-BFGS would need many more steps on badly scaled ones.
    mean0, factor0 = _mean_field(density, origin, z, max_iterations)
    scale = np.diag(factor0)

    def objective(parameters: Array) -> tuple[float, Array]:
        shift, log_diagonal, below = parameters[:n], parameters[n : 2 * n], parameters[2 * n :]
        L = np.diag(np.exp(log_diagonal))
        L[rows, columns] = below
        value, gradients = _average(density, mean0 + scale * (shift + z @ L.T))
        gradients = gradients * scale
        outer = gradients.T @ z / len(z)
        slope = np.diag(outer) * np.exp(log_diagonal) + 1.0
        return value + float(log_diagonal.sum()), np.concatenate([gradients.mean(axis=0), slope, outer[rows, columns]])

    best = _maximise(objective, np.zeros(2 * n + len(rows)), max_iterations)
    L = np.diag(np.exp(best[n : 2 * n]))
    L[rows, columns] = best[2 * n :]
    return mean0 + scale * best[:n], scale[:, None] * L


def _fitted(target: Target, fit: _Fit, settings: _Settings) -> tuple[Array, Array, float]:
    """Mean, factor of the covariance, and Pareto k of the fit against its target."""
    density, origin = log_tilted(target), start(target)
    z = whitened_points(len(origin), settings.points, stream_of(target.client.client_id))
    with np.errstate(over="ignore", invalid="ignore"):  # the search may step far out
        mean, factor = fit(density, origin, z, settings.max_iterations)
    A = negative_hessian(target, mean, np.minimum(np.sqrt(np.sum(factor**2, axis=1)), 1.0))
    if not np.all(np.isfinite(A)) or not np.linalg.eigvalsh(A)[0] > 0:
        raise LocalFailure("the variational fit diverged, beyond the tilted density. Lower damping= of EP, or use NUTS")
    log_weights = np.array([density(mean + factor @ row)[0] + 0.5 * row @ row for row in z])
    return mean, factor, pareto_k(log_weights)


def tilted(target: Target, rng: Rng, *, fit: _Fit, settings: _Settings) -> Moments:
    """Moments of φ under the variational fit."""
    m = target.client.shared_size
    mean, factor, k = _fitted(target, fit, settings)
    return moments_of(mean[:m], factor[:m] @ factor[:m].T, np.zeros(m), {"ess": np.inf, "pareto_k": k})


def draw(target: Target, draws: int, chains: int, rng: Rng, *, fit: _Fit, settings: _Settings) -> Draws:
    """Draws of (φ, θ) from the variational fit."""
    m = target.client.shared_size
    mean, factor, k = _fitted(target, fit, settings)
    sample = mean + rng.normal(size=(chains, draws, len(mean))) @ factor.T
    return Draws(sample[..., :m], sample[..., m:], {"ess": float(chains * draws), "pareto_k": k})
