"""The shared posterior as points with weights: draws of q, and of a correction the points that q is put right by."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import ndtri
from scipy.stats import qmc

from fedppl import gaussian
from fedppl.gaussian import Gaussian
from fedppl.numerics.reweighting import Reweighted
from fedppl.types import Array

_POINTS = 4096


class Measure(NamedTuple):
    """Points with weights that sum to 1; some of them are negative, where q says too much."""

    points: Array  # (N, m)
    weights: Array  # (N,)


def corrected_measure(q: Gaussian, found: Reweighted) -> Measure:
    """Quasi-random points of q, of equal weight, and those of the correction."""
    center, root = gaussian.affine(q)
    uniform = qmc.Sobol(len(center), seed=np.random.default_rng(0)).random(_POINTS)
    of_q = center + ndtri(np.clip(uniform, 1e-12, 1 - 1e-12)) @ root.T
    signed = found.weights - found.of_q
    return Measure(np.concatenate([of_q, found.points]), np.concatenate([np.full(_POINTS, 1.0 / _POINTS), signed]))


def mean(values: Array, weights: Array) -> Array:
    """Weighted mean over the first axis."""
    return np.asarray(np.tensordot(weights, values, axes=1))


def standard_deviation(values: Array, weights: Array) -> Array:
    """Weighted sd over the first axis."""
    centred = values - mean(values, weights)
    return np.sqrt(np.maximum(mean(centred**2, weights), 0.0))


def quantiles(values: Array, weights: Array, probabilities: Array) -> Array:
    """Weighted quantiles of every column of values (N, n), (P, n).

    A distribution function that negative weights make fall anywhere is held at what it has reached.
    """
    found = np.empty((len(probabilities), values.shape[1]))
    for column in range(values.shape[1]):
        order = np.argsort(values[:, column], kind="stable")
        reached = np.maximum.accumulate(np.cumsum(weights[order]) - 0.5 * weights[order])
        found[:, column] = np.interp(probabilities, reached, values[order, column])
    return found
