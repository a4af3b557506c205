"""The device graph: how alike clients are, as HM1 estimates it."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedppl.plots import _axes
from fedppl.plots._fit import Fitted, require_fit
from fedppl.types import DeclarationError

_WRITTEN = 10  # clients, up to which every number is written


def device_graph(fit: Fitted, *, ax: Any = None, figsize: tuple[float, float] | None = None) -> Any:
    """Draw the correlation of clients' parameters, ``fit.idata["fit"]["correlation"]``.

    Parameters
    ----------
    fit
        A `fedppl.Fit` by `HM1` or `HM1Gradient`.
    ax
        Matplotlib axes; by default those of a new figure.
    figsize
        Inches of a new figure.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    DeclarationError
        If the algorithm estimates no covariance over clients.
    """
    require_fit(fit)
    if "fit" not in fit.idata or "correlation" not in fit.idata["fit"]:
        raise DeclarationError(f"{fit.algorithm.name} estimates no covariance over clients; use fedppl.HM1().")
    matrix = np.asarray(fit.idata["fit"]["correlation"].transpose("client", "other_client").values, dtype=float)
    names = [_axes.short(name) for name in fit.client_ids]
    side = float(np.clip(0.22 * len(names) + 2.4, 3.6, 14.0))
    axes = _axes.panels(ax, 1, 1, (side + 0.9, side), figsize, layout="compressed")[0]
    image = axes.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest", aspect="equal")
    _axes.client_columns(axes, names)
    _axes.client_lines(axes, names)
    if len(names) <= _WRITTEN:
        for (i, k), value in np.ndenumerate(matrix):
            color = "white" if abs(value) > 0.65 else "black"
            axes.text(k, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    axes.figure.colorbar(image, ax=axes, label="correlation of θ over clients", shrink=0.8)
    return axes
