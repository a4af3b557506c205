"""The shared posterior as points with weights: of q, and of a correction the points that q is put right by."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import qmc

from fedppl import gaussian
from fedppl.gaussian import Gaussian
from fedppl.numerics.importance import standard_normal
from fedppl.numerics.region import SCRAMBLES
from fedppl.numerics.reweighting import Reweighted
from fedppl.types import Array

_POINTS = 512  # of q, of each scramble


class Measure(NamedTuple):
    """Points, and one or two ways to weigh them that agree up to their errors.

    A way has the weights, and then those with one scramble left out after the other, (1 + scrambles, N). All sum to 1.
    """

    points: Array  # (N, m)
    ways: tuple[Array, ...]
    beside: float = 0.0  # error of a mean or an sd, in sds, that no spread of the points tells


class Estimates(NamedTuple):
    """What is known of each of n quantities."""

    mean: Array  # (n,)
    sd: Array  # (n,)
    mean_error: Array  # (n,)
    sd_error: Array  # (n,)
    quantiles: Array  # (P, n)


def measure(q: Gaussian, found: Reweighted | None) -> Measure | None:
    """Quasi-random points of q, and those of the correction where there was one; None with too many coordinates.

    With a correction there are two ways: its weights alone, and q put right by signed weights. The second has no error
    where q says it all, and a large one for what has heavy tails under q.
    """
    center, root = gaussian.affine(q)
    if len(center) > qmc.Sobol.MAXDIM:
        return None
    of_q = center + standard_normal(len(center), _POINTS, 0, SCRAMBLES) @ root.T
    equal = _leaving_out(np.full(len(of_q), 1.0 / len(of_q)), np.repeat(np.arange(SCRAMBLES), _POINTS))
    if found is None:
        return Measure(of_q, (equal,))
    weights, control = _leaving_out(found.weights, found.scramble), _leaving_out(found.of_q, found.scramble)
    alone = np.concatenate([np.zeros_like(equal), weights], axis=1)
    put_right = np.concatenate([equal, weights - control], axis=1)
    return Measure(np.concatenate([of_q, found.points]), (put_right, alone), found.beside)


def estimates(values: Array, measured: Measure, probabilities: Array) -> Estimates:
    """Moments and quantiles of quantities at the points, (N, n), each by the way that has the smaller error of the two.

    Errors come from leaving out one scramble at a time.
    """
    each = [_by_one_way(values, way, probabilities) for way in measured.ways]
    errors = np.stack([np.maximum(one.mean_error, one.sd_error) for one in each])
    best = np.argmin(np.where(np.isnan(errors), np.inf, errors), axis=0)
    columns = np.arange(values.shape[1])
    chosen = Estimates(*(np.stack(field)[best, ..., columns].T for field in zip(*each, strict=True)))
    beside = measured.beside * chosen.sd
    return chosen._replace(mean_error=np.hypot(chosen.mean_error, beside), sd_error=np.hypot(chosen.sd_error, beside))


def _by_one_way(values: Array, way: Array, probabilities: Array) -> Estimates:
    used = np.any(way != 0, axis=0)  # elsewhere values may be infinite
    values, way = values[used], way[:, used]
    center = way[0] @ values
    with np.errstate(invalid="ignore", over="ignore"):  # of values that have no moments under q
        shifts = way @ (values - center)
        squares = way @ (values - center) ** 2
        variances = squares - shifts**2
        sds = np.sqrt(np.maximum(variances, 0.0))
        factor = np.sqrt(SCRAMBLES - 1.0)
        errors = factor * np.std(shifts[1:], axis=0), factor * np.std(sds[1:], axis=0)
    # No variance at all is told by weights of both signs whose terms do not cancel; a constant has none either.
    errors = errors[0], np.where(np.any(variances < -1e-12 * center**2, axis=0), np.inf, errors[1])
    return Estimates(center, sds[0], *errors, _quantiles(values, way[0], probabilities))


def _leaving_out(weights: Array, scramble: NDArray[np.intp]) -> Array:
    """The weights, and those with one scramble left out after the other, each normalised: (1 + scrambles, N)."""
    rows = np.stack([weights, *(np.where(scramble == one, 0.0, weights) for one in range(SCRAMBLES))])
    return np.asarray(rows / rows.sum(axis=1, keepdims=True))


def _quantiles(values: Array, weights: Array, probabilities: Array) -> Array:
    """Weighted quantiles of every column of values (N, n), (P, n).

    A distribution function that negative weights make fall anywhere is held at what it has reached.
    """
    found = np.empty((len(probabilities), values.shape[1]))
    for column in range(values.shape[1]):
        order = np.argsort(values[:, column], kind="stable")
        reached = np.maximum.accumulate(np.cumsum(weights[order]) - 0.5 * weights[order])
        found[:, column] = np.interp(probabilities, reached, values[order, column])
    return found
