"""How a fit by confidence weighs its clients, and how far they are from what all share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from fedppl.plots import _axes
from fedppl.plots._fit import Fitted, require_by_client, require_fit
from fedppl.settings import shown
from fedppl.types import Array, DeclarationError

_QUANTITIES = ("confidence", "deviation")


def confidence(fit: Fitted, *, ax: Any = None, figsize: tuple[float, float] | None = None) -> Any:
    r"""Draw how weights of clients are distributed, and how far clients' own parameters are from the shared ones.

    .. math:: \tau_k / \sum_j \tau_j, \qquad \lVert \mu_k - w \rVert^2 / d

    each as an empirical distribution over clients, of the last round in which a client replied.

    Parameters
    ----------
    fit
        A `fedppl.Fit` by `fedppl.Confidence`, or by its like for networks.
    ax, figsize
        Two matplotlib axes; by default those of a new figure, of so many inches.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes
        Shares of the confidence, and deviations, in squared units of the parameters, on log axes.

    Raises
    ------
    DeclarationError
        For a fit whose clients tell no confidence, if none has replied, or for axes that are not two.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("Agg")
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(), fedppl.Confidence(strength=8), progressbar=False, random_seed=1)
    >>> axes = fedppl.plots.confidence(fit)
    >>> axes[0].get_xlabel()
    'share of the confidence'

    Notes
    -----
    *When this fails.* Clients that replied last in an early round are shown as they were then. One share near 1 is a
    collapse: w is that client's, see the *when this fails* of `fedppl.Confidence`.
    """
    require_fit(fit)
    rounds = require_by_client(fit)
    if not all(name in rounds for name in _QUANTITIES):
        raise DeclarationError(f"fit={shown(fit)} has no confidence of clients; pass a fit by fedppl.Confidence.")
    told = {name: _last(rounds[name]) for name in _QUANTITIES}
    if not all(np.any(np.isfinite(values)) for values in told.values()):
        raise DeclarationError(
            "no client of this fit has replied with numbers, so that there is nothing to draw: fit.message says what "
            "came in their place."
        )
    left, right = _axes.panels(ax, 1, 2, (8.0, 3.2), figsize, sharey=True)
    _distribution(left, told["confidence"] / np.nansum(told["confidence"]))
    _distribution(right, told["deviation"])
    count = int(np.sum(np.isfinite(told["confidence"])))
    left.axvline(1.0 / count, color=_axes.GREY, lw=1, ls=":", label=f"equal shares, 1 / {count}")
    left.set(xlabel="share of the confidence", ylabel="clients up to here")
    right.set(xlabel="mean squared distance to the shared parameters")
    _axes.legend(left)
    return np.array([left, right], dtype=object)


def _last(told: Any) -> Array:
    """What each client told last."""
    return np.asarray(pd.DataFrame(told.transpose("round", "client").values).ffill().iloc[-1], dtype=float)


def _distribution(axes: Any, values: Array) -> None:
    """The empirical distribution of what is known, with a mark for each client; zeros lie left of the axis.

    Where all are zero there is no logarithm to show, and the axis is linear.
    """
    ordered = np.sort(values[np.isfinite(values)])
    axes.ecdf(ordered, color="C0")
    axes.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), "o", color="C0", ms=3.5)
    if ordered[-1] > 0:
        axes.set_xscale("log")
    axes.set_ylim(0, 1.05)
