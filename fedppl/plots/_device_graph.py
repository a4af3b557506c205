"""The device graph: how alike clients are, as HM1 estimates it."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedppl.plots import _axes
from fedppl.plots._fit import Fitted, require_fit
from fedppl.types import DeclarationError

_WRITTEN = 10  # clients, up to which every number is written


def device_graph(fit: Fitted, *, ax: Any = None, figsize: tuple[float, float] | None = None) -> Any:
    r"""Draw the correlation of clients' parameters, ``fit.idata["fit"]["correlation"]``.

    .. math:: R_{ik} = \Omega_{ik} / \sqrt{\Omega_{ii}\, \Omega_{kk}}

    Parameters
    ----------
    fit
        A `fedppl.Fit` by `HM1` or `HM1Gradient`.
    ax, figsize
        Matplotlib axes; by default those of a new figure, of so many inches.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    DeclarationError
        If the algorithm estimates no covariance over clients, or for axes that are none.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("Agg")
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(), fedppl.HM1(), progressbar=False, random_seed=1)
    >>> axes = fedppl.plots.device_graph(fit)
    >>> len(axes.texts)  # a number for each pair of 3 clients
    9

    Notes
    -----
    *When this fails.* Correlations are one estimate, drawn without its uncertainty: with few shared parameters, or few
    rows at a client, they are rough. Their pattern is that of the fit's `structure`: under `exchangeable` all pairs
    have the same one, whatever the clients are. They are of parameters on the unconstrained space, not of data.
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
