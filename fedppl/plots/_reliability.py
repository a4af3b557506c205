"""The reliability diagram of `fedppl.metrics`, as the other pictures are called."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedppl import metrics
from fedppl.plots import _axes


def reliability(
    probabilities: Any, outcomes: Any, *, bins: int = 15, ax: Any = None, figsize: tuple[float, float] | None = None
) -> Any:
    """Draw how often predictions were right against how sure they were, and how sure they were.

    Parameters
    ----------
    probabilities
        Class probabilities, (n, C), rows adding up to 1; or the probability of the second of two classes, (n,).
    outcomes
        Classes 0 to C - 1, (n,).
    bins
        Number of bins.
    ax
        Two matplotlib axes; by default those of a new figure.
    figsize
        Inches of a new figure.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes

    Raises
    ------
    DataError
        For probabilities that are none, labels that are no classes, or no rows.
    """
    probability = np.asarray(probabilities, dtype=float)
    if probability.ndim == 1:
        probability = np.column_stack([1.0 - probability, probability])
    outcomes = np.asarray(outcomes)
    outcomes = outcomes.astype(int) if outcomes.dtype == bool else outcomes
    metrics.reliability(probability, outcomes, bins=bins)  # what cannot be drawn is refused before there is a figure
    axes = _axes.panels(ax, 2, 1, (4.0, 6.0), figsize, sharex=True)
    return np.array(metrics.plot_reliability(probability, outcomes, bins=bins, axes=axes), dtype=object)
