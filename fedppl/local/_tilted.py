"""The tilted distribution over (φ, θ) as one log density with gradient, for the ways that work on it directly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedppl.types import Array, Target

__all__ = ["log_tilted", "start"]


def log_tilted(target: Target) -> Callable[[Array], tuple[float, Array]]:
    """log [p(y, θ | φ) q_{-k}(φ) (p / N_0)(φ)^share] and its gradient, as a function of x = (φ, θ)."""
    client, prior_share = target.client, target.prior_share
    m = client.shared_size
    kernel, data, prior = client.kernel, client.data, client.prior
    linear, precision = target.cavity
    corrected = bool(prior_share) and not prior.is_gaussian

    def value_and_gradient(x: Array) -> tuple[float, Array]:
        output = kernel(np.ascontiguousarray(x), *data)
        phi = x[:m]
        pull = precision @ phi
        value = float(output[0] + phi @ (linear - 0.5 * pull))
        gradient = output[1:]
        gradient[:m] += linear - pull
        if corrected:
            value += prior_share * float(prior.log_ratio(phi[None])[0])
            gradient[:m] += prior_share * prior.log_ratio_gradient(phi)
        return value, gradient

    return value_and_gradient


def start(target: Target) -> Array:
    """Starting point (m + d_k,): the mean of the global q, and θ where its declaration starts it."""
    return np.concatenate([np.linalg.solve(target.global_.precision, target.global_.linear), target.client.initial])
