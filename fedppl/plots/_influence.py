"""What each client does to the shared posterior, and whether its data agree with the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedppl.plots import _fit
from fedppl.plots._fit import Fitted, coordinate_names, coordinates, require_by_client, require_fit
from fedppl.settings import chosen, shown
from fedppl.types import Array, DeclarationError


def influence(
    fit: Fitted,
    var_names: Sequence[str] | str | None = None,
    *,
    clients: Sequence[str] | str | None = None,
    conflict: Any = None,
    ax: Any = None,
    figsize: tuple[float, float] | None = None,
) -> Any:
    r"""Draw what each client moves the shared means by, and what it does to their sds.

    .. math:: \mathrm{shift}_k = (\mu - \mu_{-k}) / \mathrm{sd}, \qquad
              \mathrm{ratio}_k = \mathrm{sd} / \mathrm{sd}_{-k}

    where -k is the posterior without client k.

    Parameters
    ----------
    fit
        A `fedppl.Fit` by `EP`, `Sums` or another algorithm that knows its posterior without each client.
    var_names
        Shared variables; by default all. They are shown on the unconstrained space.
    clients
        Ids of clients; by default all.
    conflict
        What `fedppl.conflict` returned, for a panel of p-values.
    ax, figsize
        Matplotlib axes, two, or three with `conflict`; by default those of a new figure, of so many inches.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes
        Shifts in posterior sds, ratios of sds with the client to those without, and p-values.

    Raises
    ------
    DeclarationError
        If the algorithm has no posterior without each client, a name is unknown, `conflict` is no such result, or for
        axes that are none.
    NotConvergedError
        Where the fit was broken off before there was a posterior.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("Agg")
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> axes = fedppl.plots.influence(fit)
    >>> [panel.get_xlabel() for panel in axes]
    ['shift of the mean (sds)', 'sd with / sd without']

    Notes
    -----
    Filled markers are of the posterior itself, open ones of its Gaussian (``exact`` of `Fit.influence`). What is not
    known has no marker. Of many clients some have a small p-value by chance: the second line, at 0.05 over the number
    of clients, is the one that they all pass with probability 0.95.

    *When this fails.* Clients are left out one at a time: of two that are off in the same way each hides the other. A
    large shift is no fault, as a client with many rows has one too. Open markers are rough where the posterior is
    skewed.
    """
    require_fit(fit)
    names = chosen("clients", clients, list(fit.client_ids), "the fit's clients")
    places = coordinates(fit, var_names)
    found = fit.influence(names)
    if conflict is not None and "p_value" not in getattr(conflict, "data_vars", ()):
        raise DeclarationError(f"conflict={shown(conflict)} is not what fedppl.conflict returned.")
    count = 2 if conflict is None else 3
    axes = _fit.panels(ax, 1, count, (2.2 + 3.0 * count, _fit.height(len(names))), figsize, sharey=True)
    few, labels = len(places) <= _fit.LEGEND, coordinate_names(fit)
    exact = np.asarray(found["exact"].values, dtype=bool)
    for panel, quantity, middle in ((axes[0], "shift", 0.0), (axes[1], "sd_ratio", 1.0)):
        panel.axvline(middle, color=_fit.GREY, lw=1)
        for number, place in enumerate(places):
            values = np.asarray(found[quantity].isel(rows=place).values, dtype=float)
            label = _fit.short(labels[place], 32) if few and panel is axes[0] else None
            _points(panel, values, exact, _offset(number, len(places)), f"C{number}" if few else _fit.GREY, label)
    axes[0].set_xlabel("shift of the mean (sds)")
    axes[1].set_xlabel("sd with / sd without")
    if conflict is not None:
        _p_values(axes[2], conflict, names)
    shown_names = [_fit.short(name) for name in names]
    for number, panel in enumerate(axes):
        _fit.client_lines(panel, shown_names, labelled=number == 0 or ax is not None)
    for panel in axes[:2]:
        _fit.few_ticks(panel)
    if exact.any() and not exact.all():
        axes[0].plot([], [], "o", color="black", ms=4.5, label="exact")
        axes[0].plot([], [], "o", color="black", mfc="none", ms=4.5, label="by the Gaussian")
    if not few:
        axes[0].plot([], [], "o", color=_fit.GREY, ms=4.5, label=f"{len(places)} coordinates")
    _fit.legend_of_all(axes, ax)
    return np.array(axes, dtype=object)


def _points(axes: Any, values: Any, exact: Any, offset: float, color: str, label: str | None) -> None:
    place = np.arange(len(values)) + offset
    axes.plot(np.where(exact, values, np.nan), place, "o", color=color, ms=4.5, label=label if exact.any() else None)
    rest = None if exact.any() else label
    axes.plot(np.where(exact, np.nan, values), place, "o", color=color, mfc="none", ms=4.5, label=rest)


def _offset(number: int, count: int) -> float:
    """Coordinates of one client a little below each other."""
    return 0.0 if count == 1 else 0.5 * (number / (count - 1) - 0.5)


def _p_values(axes: Any, conflict: Any, names: Sequence[str]) -> None:
    told = dict(zip(conflict["client"].values.tolist(), conflict["p_value"].values.tolist(), strict=True))
    values = np.array([told.get(name, np.nan) for name in names], dtype=float)
    axes.plot(values, np.arange(len(names)), "o", color="black", ms=4.5)
    axes.set_xscale("log")
    axes.axvline(0.05, color=_fit.GREY, lw=1, ls=":", label="0.05")
    if len(names) > 1:
        axes.axvline(0.05 / len(names), color="C3", lw=1, ls="--", label=f"0.05 / {len(names)}")
    axes.set(xlabel="p-value of conflict", xlim=(min(0.7 * np.nanmin([*values, 0.05 / len(names)]), 0.01), 1.3))
    _fit.legend(axes)


# How a fit by confidence weighs its clients, and how far they are from what all share ---------------------------------

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
    left, right = _fit.panels(ax, 1, 2, (8.0, 3.2), figsize, sharey=True)
    _distribution(left, told["confidence"] / np.nansum(told["confidence"]))
    _distribution(right, told["deviation"])
    count = int(np.sum(np.isfinite(told["confidence"])))
    left.axvline(1.0 / count, color=_fit.GREY, lw=1, ls=":", label=f"equal shares, 1 / {count}")
    left.set(xlabel="share of the confidence", ylabel="clients up to here")
    right.set(xlabel="mean squared distance to the shared parameters")
    _fit.legend(left)
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


# The device graph: how alike clients are, as HM1 estimates it ---------------------------------------------------------

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
    names = [_fit.short(name) for name in fit.client_ids]
    side = float(np.clip(0.22 * len(names) + 2.4, 3.6, 14.0))
    axes = _fit.panels(ax, 1, 1, (side + 0.9, side), figsize, layout="compressed")[0]
    image = axes.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest", aspect="equal")
    _fit.client_columns(axes, names)
    _fit.client_lines(axes, names)
    if len(names) <= _WRITTEN:
        for (i, k), value in np.ndenumerate(matrix):
            color = "white" if abs(value) > 0.65 else "black"
            axes.text(k, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    axes.figure.colorbar(image, ax=axes, label="correlation of θ over clients", shrink=0.8)
    return axes
