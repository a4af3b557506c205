"""Links: from outputs that are normal to probabilities of classes."""

from __future__ import annotations

import numpy as np
from scipy.special import log_softmax, ndtr, softmax

from fedppl.types import Array

LINKS = ("scaled", "by class", "monte carlo", "probit", "map")


def probabilities(
    logits: Array, covariance: Array, *, link: str = "scaled", draws: int = 100, rng: np.random.Generator | None = None
) -> Array:
    """Class probabilities (n, C) of normal outputs with means (n, C) and covariances (n, C, C): `fedppl.nn.predict`."""
    variance = np.diagonal(covariance, axis1=1, axis2=2)
    if link == "scaled":
        classes = logits.shape[1]
        apart = 2 * (variance.sum(axis=1) - covariance.sum(axis=(1, 2)) / classes) / max(classes - 1, 1)
        one = 1.0 / np.sqrt(1.0 + np.pi / 8 * np.maximum(apart, 0.0))  # rounding may go below
        return np.asarray(softmax(one[:, None] * logits, axis=1))
    kappa = 1.0 / np.sqrt(1.0 + np.pi / 8 * variance)
    if link == "probit":
        chance = ndtr(kappa * logits)
        return np.asarray(chance / chance.sum(axis=1, keepdims=True))
    if link != "monte carlo":
        return np.asarray(softmax(kappa * logits, axis=1))
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.clip(values, 0.0, None))[:, None]
    rng = np.random.default_rng() if rng is None else rng
    total = np.zeros_like(logits)
    for _ in range(draws):
        total += np.exp(log_softmax(logits + np.einsum("ncd,nd->nc", root, rng.normal(size=logits.shape)), axis=1))
    return np.asarray(total / draws)
