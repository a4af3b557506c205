"""The upper tail of importance weights: its shape, by a generalised Pareto, and weights smoothed by it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedppl.types import Array

_EQUAL = 1e-7  # log weights that differ by less do so by rounding, and move nothing


class _Tail(NamedTuple):
    """A generalised Pareto fitted to the largest weights, in units of the largest of all."""

    shape: float
    scale: float
    threshold: float  # weight from which the tail begins
    size: int


def _tail(ordered: Array) -> _Tail | None:
    """Fit to ascending finite log weights; None where the largest are equal.

    The empirical-Bayes estimate of Zhang and Stephens (2009), without a prior on the shape.
    """
    size = len(ordered)
    count = int(min(0.2 * size, 3 * np.sqrt(size)))
    threshold = float(np.exp(ordered[-count - 1] - ordered[-1]))
    excess = np.exp(ordered[-count:] - ordered[-1]) - threshold
    if ordered[-1] - ordered[0] < _EQUAL or excess[-1] <= 0:
        return None
    guesses = 30 + int(np.sqrt(count))
    quartile = max(excess[int(count / 4 + 0.5) - 1], 1e-300)
    b = 1 - np.sqrt(guesses / (np.arange(1, guesses + 1) - 0.5))
    b = b / (3 * quartile) + 1 / excess[-1]
    k = np.mean(np.log1p(-b[:, None] * excess), axis=1)
    log_likelihood = count * (np.log(-b / k) - k - 1)
    weights = np.exp(log_likelihood - log_likelihood.max())
    rate = float(weights @ b / weights.sum())
    shape = float(np.mean(np.log1p(-rate * excess)))
    return _Tail(shape, -shape / rate, threshold, count)


def _towards_a_half(tail: _Tail) -> float:
    """The weak prior of Vehtari et al. (2024)."""
    return (tail.size * tail.shape + 5.0) / (tail.size + 10.0)


def pareto_k(log_weights: Array) -> float:
    """Tail shape of importance weights: below 0.5 good, above 0.7 their moments cannot be trusted.

    Constant weights give −inf, fewer than 25 finite ones inf.
    """
    finite = log_weights[np.isfinite(log_weights)]
    if int(min(0.2 * len(finite), 3 * np.sqrt(len(finite)))) < 5:
        return np.inf
    tail = _tail(np.sort(finite))
    return -np.inf if tail is None else _towards_a_half(tail)


def limit(count: int) -> float:
    """The largest shape with which so many weights are trusted: min(1 − 1 / log10 S, 0.7).

    >>> limit(100), limit(1024)
    (0.5, 0.6678...)
    """
    return float(min(1.0 - 1.0 / np.log10(max(count, 10)), 0.7))


def smoothed(log_weights: Array) -> tuple[Array, float]:
    """Log weights (S,) whose largest are the expected order statistics of the fitted tail, and its shape.

    None of them exceeds the largest as given (Vehtari et al. 2024). Log weights of −inf stay so.
    """
    found = np.array(log_weights, dtype=float)
    where = np.flatnonzero(np.isfinite(found))
    order = where[np.argsort(found[where], kind="stable")]
    if int(min(0.2 * len(order), 3 * np.sqrt(len(order)))) < 5:
        return found, np.inf
    largest = found[order[-1]]
    tail = _tail(found[order])
    if tail is None:
        return found, -np.inf
    shape = _towards_a_half(tail)
    survival = np.log1p(-(np.arange(tail.size) + 0.5) / tail.size)  # log of 1 − p
    excess = -tail.scale * survival if abs(shape) < 1e-12 else tail.scale * np.expm1(-shape * survival) / shape
    found[order[-tail.size :]] = np.minimum(largest + np.log(tail.threshold + excess), largest)
    return found, shape
