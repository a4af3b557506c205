r"""Quality of predicted probabilities: calibration errors, reliability diagrams, Brier score, and ranking by a score.

A row's *confidence* is the largest of its probabilities, and it is right where the class with that probability came.
Rows fall into bins of equal width by confidence, b ∈ 1..B of n_b rows each; an edge belongs to the bin below it.

>>> probability = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]])
>>> label = np.array([0, 1, 1, 1])
>>> round(expected_calibration_error(probability, label, bins=5), 3)
0.25
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import rankdata

from fedppl.types import Array, DataError


class Reliability(NamedTuple):
    """Bins of a reliability diagram; empty ones have NaN."""

    edges: Array  # (B + 1,)
    rows: Array  # n_b, (B,): the confidence histogram
    confidence: Array  # mean confidence, (B,)
    accuracy: Array  # share of rows that are right, (B,)


def reliability(probability: Array, label: Array, *, bins: int = 15) -> Reliability:
    r"""Bin rows by confidence.

    .. math:: \mathrm{confidence}_b = \frac{1}{n_b} \sum_{i \in b} \max_c p_{ic}, \qquad
              \mathrm{accuracy}_b = \frac{1}{n_b} \sum_{i \in b} [y_i = \arg\max_c p_{ic}]

    Parameters
    ----------
    probability
        Class probabilities, (n, C), rows adding up to 1.
    label
        Classes 0 to C - 1, (n,).
    bins
        Number of bins, B.

    Returns
    -------
    Reliability
        Edges of the bins, (B + 1,), and rows, mean confidence and accuracy of each bin, (B,).

    Raises
    ------
    DataError
        For invalid probabilities, labels that are no classes, or no rows; for `bins` below 1 or not whole.

    Examples
    --------
    >>> found = reliability([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]], [0, 1, 1, 1], bins=5)
    >>> found.rows
    array([0., 0., 1., 2., 1.])
    >>> found.accuracy
    array([nan, nan, 1. , 0.5, 1. ])

    Notes
    -----
    *When this fails.* The accuracy of a bin with few rows is mostly noise: look at ``rows``. Confidence is at least
    1 / C, so that bins below it are always empty. The probabilities of the other classes are not used.
    """
    probability, label = _checked(probability, label)
    if isinstance(bins, bool) or not isinstance(bins, int | np.integer) or bins < 1:
        raise DataError(f"bins={bins!r} must be a whole number, at least 1.")
    confidence, right = probability.max(axis=1), probability.argmax(axis=1) == label
    edges = np.linspace(0.0, 1.0, bins + 1)
    place = np.clip(np.digitize(confidence, edges, right=True) - 1, 0, bins - 1)
    rows = np.bincount(place, minlength=bins).astype(float)
    with np.errstate(invalid="ignore"):
        means = (np.bincount(place, weights=w, minlength=bins) / rows for w in (confidence, right))
        return Reliability(edges, rows, *means)


def expected_calibration_error(probability: Array, label: Array, *, bins: int = 15) -> float:
    r"""ECE, ``Σ_b n_b / n · |accuracy_b − confidence_b|``, from 0 to 1. See `reliability` for parameters.

    Examples
    --------
    >>> probability = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]]
    >>> round(expected_calibration_error(probability, [0, 1, 1, 1], bins=5), 3)
    0.25

    Notes
    -----
    *When this fails.* It depends on the number of bins, and with few rows in a bin it is above 0 for probabilities
    that are right: compare models on the same rows and bins. It does not reward information: a model that
    gives every row the shares of the classes has an ECE near 0, and `brier` separates it from a better one.
    """
    diagram = reliability(probability, label, bins=bins)
    return float(np.nansum(diagram.rows * np.abs(diagram.accuracy - diagram.confidence)) / diagram.rows.sum())


def maximum_calibration_error(probability: Array, label: Array, *, bins: int = 15) -> float:
    r"""MCE, ``max_b |accuracy_b − confidence_b|`` over bins with rows. See `reliability` for parameters.

    Examples
    --------
    >>> probability = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]]
    >>> round(maximum_calibration_error(probability, [0, 1, 1, 1], bins=5), 3)
    0.4

    Notes
    -----
    *When this fails.* The bin with the fewest rows often decides: in the example it is a bin of one row. More bins make
    it larger. Look at the rows of each bin, by `reliability`, before it counts as a fault of the model.
    """
    diagram = reliability(probability, label, bins=bins)
    return float(np.nanmax(np.abs(diagram.accuracy - diagram.confidence)))


def brier(probability: Array, label: Array) -> float:
    r"""Mean over rows of Σ_c (p_c − [y = c])², from 0 to 2. See `reliability` for parameters.

    Examples
    --------
    >>> round(brier([[0.9, 0.1], [0.4, 0.6]], [0, 0]), 3)
    0.37

    Notes
    -----
    *When this fails.* For two classes it is twice the score Σ (p − y)² / n that others call by this name. It mixes
    calibration with how well classes can be separated, so that its size alone means little: compare models on the same
    rows. An event of probability 0 costs no more than 2.
    """
    probability, label = _checked(probability, label)
    return float(np.mean(((probability - np.eye(probability.shape[1])[label]) ** 2).sum(axis=1)))


def accuracy(probability: Array, label: Array) -> float:
    r"""Share of rows whose most probable class came. See `reliability` for parameters.

    Examples
    --------
    >>> accuracy([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]], [0, 1, 1])  # two of three
    0.6666666666666666

    Notes
    -----
    *When this fails.* Where one class is frequent, a model that always names it has a high accuracy. Of classes that
    are equally probable the first counts as the most probable one. It ignores how sure the model was.
    """
    probability, label = _checked(probability, label)
    return float(np.mean(probability.argmax(axis=1) == label))


def entropy(probability: Array) -> Array:
    r"""Predictive entropy of each row in nats, −Σ_c p_c log p_c, (n,). See `reliability` for parameters.

    Examples
    --------
    >>> entropy([[0.5, 0.5], [0.9, 0.1]]).round(3)
    array([0.693, 0.325])

    Notes
    -----
    *When this fails.* It does not say whether a row is uncertain because classes overlap there or because the
    parameters are not known. A model that is overconfident far from its data has a low entropy there too.
    """
    p = _distributions(probability)
    return np.asarray(0.0 - np.sum(np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0), axis=1))


def auroc(positive: Array, negative: Array) -> float:
    r"""Probability that a score of `positive` is above one of `negative`, ties counted half.

    Parameters
    ----------
    positive, negative
        Scores of the rows that should have high ones, (n,), and of the others, (m,).

    Returns
    -------
    float
        From 0 to 1; 0.5 for scores that tell nothing.

    Raises
    ------
    DataError
        If scores are not one column, there are none on one side, or there is a NaN.

    Examples
    --------
    >>> auroc(np.array([3.0, 2.0]), np.array([1.0, 2.0]))
    0.875

    Notes
    -----
    *When this fails.* It depends on the order of scores alone: probabilities that are far too large can have an area of
    1. Where positives are rare, most flagged rows may be negative although it is near 1. It is rough for few scores.
    """
    positive, negative = np.asarray(positive, dtype=float), np.asarray(negative, dtype=float)
    if positive.ndim != 1 or negative.ndim != 1:
        raise DataError(f"scores have shapes {positive.shape} and {negative.shape}; pass one column of each, (n,).")
    if not len(positive) or not len(negative):
        raise DataError(f"{len(positive)} positive and {len(negative)} negative scores; give at least one of each.")
    if np.any(np.isnan(positive)) or np.any(np.isnan(negative)):
        raise DataError("scores hold NaN, which has no rank; drop those rows.")
    ranks = rankdata(np.concatenate([positive, negative]))[: len(positive)]
    return float((ranks.sum() - len(positive) * (len(positive) + 1) / 2) / (len(positive) * len(negative)))


def _checked(probability: Array, label: Array) -> tuple[Array, Any]:
    probability, label = _distributions(probability), np.asarray(label)
    if len(probability) == 0 or label.shape != probability.shape[:1]:
        shapes = f"{probability.shape} and labels {label.shape}"
        raise DataError(f"probabilities {shapes} do not fit; pass (n, C) and (n,) with at least one row.")
    last = probability.shape[1] - 1
    if not np.issubdtype(label.dtype, np.integer) or label.min() < 0 or label.max() > last:
        raise DataError(f"labels must be whole numbers from 0 to {last}; found {np.unique(label)[:10]}.")
    return probability, label


def _distributions(probability: Any) -> Array:
    """Distributions over classes, (n, C); refuses a data set of several arrays."""
    if isinstance(probability, Mapping):
        kind = type(probability).__name__
        raise DataError(f"probabilities are a {kind}; pass one of its arrays, {list(probability)}.")
    p = np.asarray(probability, dtype=float)
    if p.ndim != 2 or not p.shape[1]:
        raise DataError(f"probabilities have shape {p.shape}; pass (n, C).")
    sums = p.sum(axis=1)
    if not (np.all(p >= 0) and np.all(np.abs(sums - 1) < 1e-6)):
        worst = int(np.argmax(np.where(np.isfinite(sums), np.abs(sums - 1), np.inf)))
        sizes = f"adds up to {sums[worst]:.6g} with least entry {p[worst].min():.3g}"
        raise DataError(f"row {worst} of the probabilities {sizes}; each must be a distribution over classes.")
    return p
