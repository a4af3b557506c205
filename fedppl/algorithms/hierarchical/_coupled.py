r"""Posterior of all clients' parameters under a matrix normal prior, from the clients' quadratic factors. NumPy only.

.. math:: p(\Theta) \propto N(\operatorname{vec} \Theta;\, 0, \Omega \otimes I)
          \prod_k \exp(r_k^\top \theta_k - \tfrac12 \theta_k^\top H_k \theta_k)

exactly, for positive semi-definite H_k. Parameters are whitened by the declared prior before they come here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedppl.numerics.covariance import Covariance, Omega
from fedppl.types import Array


class Coupled(NamedTuple):
    """Moments of the posterior of Θ."""

    mean: Array  # (K, d)
    covariance: Array  # (K, d, d) of each client
    moment: Array  # (K, K), E[ΘᵀΘ] / d


def posterior(linear: Array, precision: Array, omega: Omega) -> Coupled:
    """Posterior given Ω, from factors r (K, d) and H (K, d, d)."""
    if np.isnan(omega.remainder):
        return _dense(linear, precision, omega.matrix)
    return _low_rank(linear, precision, omega)


def _dense(linear: Array, precision: Array, omega: Array) -> Coupled:
    """Through the K d x K d precision: K² d² numbers, of the order of (K d)³ operations."""
    count, size = linear.shape
    joint = np.einsum("kl,ij->kilj", np.linalg.inv(omega), np.eye(size))
    joint[np.arange(count), :, np.arange(count), :] += precision
    covariance = np.linalg.inv(joint.reshape(count * size, -1)).reshape(count, size, count, size)
    mean = np.einsum("kilj,lj->ki", covariance, linear)
    own = covariance[np.arange(count), :, np.arange(count), :]
    return Coupled(mean, _symmetric(own), (np.einsum("kili->kl", covariance) + mean @ mean.T) / size)


def _low_rank(linear: Array, precision: Array, omega: Omega) -> Coupled:
    """Through the common factors: θ_k = Z u_k + e_k, Z (d, q) standard normal, e_k ~ N(0, δ I).

    Given Z the clients are independent, so that all that is inverted are K matrices of size d and one of size q d.
    """
    count, size = linear.shape
    delta, U = omega.remainder, omega.factor
    own = np.linalg.inv(precision + np.eye(size) / delta)  # of θ_k given Z
    free = np.einsum("kij,kj->ki", own, linear)
    pull = own / delta  # d E[θ_k | Z] / d (Z u_k)
    rank = U.shape[1]
    # Precision of vec Z: I + Σ_k (u_k u_kᵀ) ⊗ (I − pull_k) / δ, where I − pull_k = own_k H_k
    known = np.einsum("kij,kjl->kil", own, precision) / delta
    core = np.einsum("ka,kb,kij->aibj", U, U, _symmetric(known)).reshape(rank * size, rank * size)
    root = np.linalg.inv(np.linalg.cholesky(core + np.eye(rank * size))) if rank else np.zeros((0, 0))
    center = root.T @ (root @ np.einsum("ka,ki->ai", U, free / delta).ravel())
    loading = np.einsum("ka,kij->kiaj", U, pull).reshape(count, size, rank * size)  # of θ_k on vec Z
    mean = free + loading @ center
    half = loading @ root.T  # its outer product is what Z adds to the covariances
    covariance = own + half @ np.swapaxes(half, 1, 2)
    flat = half.reshape(count, -1)
    traces = flat @ flat.T + np.diag(np.trace(own, axis1=1, axis2=2))
    return Coupled(mean, _symmetric(covariance), (traces + mean @ mean.T) / size)


def _symmetric(matrices: Array) -> Array:
    return np.asarray((matrices + np.swapaxes(matrices, -1, -2)) / 2)


def estimate(
    linear: Array, precision: Array, omega: Omega, structure: Covariance, *, tolerance: float = 1e-5, limit: int = 200
) -> tuple[Omega, Coupled]:
    """Ω by expectation maximisation, on factors that stay as they are: this costs no communication."""
    coupled = posterior(linear, precision, omega)
    dense = np.isnan(structure.update(omega, coupled.mean, coupled.moment).remainder)
    repeats = 1 if not structure.to_the_end else (10 if dense else limit)
    for _ in range(repeats):
        before = omega.matrix
        omega = structure.update(omega, coupled.mean, coupled.moment)
        coupled = posterior(linear, precision, omega)
        if np.linalg.norm(omega.matrix - before) < tolerance * np.linalg.norm(before):
            break
    return omega, coupled


def conditional_priors(omega: Omega, mean: Array) -> tuple[Array, Array]:
    """θ_k given the others at their means: natural linear (K, d), the aggregated vectors, and precisions (K,)."""
    inverse = np.linalg.inv(omega.matrix)
    weights = np.diag(inverse).copy()
    return -(inverse @ mean - weights[:, None] * mean), weights
