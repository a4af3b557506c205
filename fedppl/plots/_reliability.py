"""The reliability diagram of `fedppl.metrics`, as the other pictures are called."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedppl import metrics
from fedppl.plots import _axes


def reliability(
    probabilities: Any, outcomes: Any, *, bins: int = 15, ax: Any = None, figsize: tuple[float, float] | None = None
) -> Any:
    r"""Draw how often predictions were right against how sure they were, and how sure they were.

    The bins, and the expected calibration error in the title, are those of `fedppl.metrics`:

    .. math:: \mathrm{ECE} = \sum_b \frac{n_b}{n}\, |\mathrm{accuracy}_b - \mathrm{confidence}_b|

    Parameters
    ----------
    probabilities
        Class probabilities, (n, C), rows adding up to 1; or the probability of the second of two classes, (n,).
    outcomes
        Classes 0 to C - 1, (n,).
    bins
        Number of bins.
    ax, figsize
        Two matplotlib axes; by default those of a new figure, of so many inches.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes

    Raises
    ------
    DataError
        For probabilities that are none, labels that are no classes, or no rows; for `bins` below 1 or not whole.
    DeclarationError
        For axes that are not two.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("Agg")
    >>> import fedppl
    >>> axes = fedppl.plots.reliability([0.1, 0.2, 0.7, 0.6], [0, 1, 1, 1], bins=5)
    >>> axes[0].get_title()
    'ECE 0.250'

    Notes
    -----
    *When this fails.* Confidence is the probability of the class that was predicted: with two classes nothing is below
    0.5, and rows predicted as one class and as the other are in the same bins. A model that is too sure of one and not
    sure enough of the other can look right. Bars of few rows are mostly noise.
    """
    probability = np.asarray(probabilities, dtype=float)
    if probability.ndim == 1:
        probability = np.column_stack([1.0 - probability, probability])
    outcomes = np.asarray(outcomes)
    outcomes = outcomes.astype(int) if outcomes.dtype == bool else outcomes
    metrics.reliability(probability, outcomes, bins=bins)  # what cannot be drawn is refused before there is a figure
    axes = _axes.panels(ax, 2, 1, (4.0, 6.0), figsize, sharex=True)
    return np.array(metrics.plot_reliability(probability, outcomes, bins=bins, axes=axes), dtype=object)
