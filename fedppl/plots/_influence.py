"""What each client does to the shared posterior, and whether its data agree with the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedppl.plots import _axes
from fedppl.plots._fit import Fitted, coordinate_names, coordinates, require_fit
from fedppl.settings import chosen, shown
from fedppl.types import DeclarationError


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
    axes = _axes.panels(ax, 1, count, (2.2 + 3.0 * count, _axes.height(len(names))), figsize, sharey=True)
    few, labels = len(places) <= _axes.LEGEND, coordinate_names(fit)
    exact = np.asarray(found["exact"].values, dtype=bool)
    for panel, quantity, middle in ((axes[0], "shift", 0.0), (axes[1], "sd_ratio", 1.0)):
        panel.axvline(middle, color=_axes.GREY, lw=1)
        for number, place in enumerate(places):
            values = np.asarray(found[quantity].isel(rows=place).values, dtype=float)
            label = _axes.short(labels[place], 32) if few and panel is axes[0] else None
            _points(panel, values, exact, _offset(number, len(places)), f"C{number}" if few else _axes.GREY, label)
    axes[0].set_xlabel("shift of the mean (sds)")
    axes[1].set_xlabel("sd with / sd without")
    if conflict is not None:
        _p_values(axes[2], conflict, names)
    shown_names = [_axes.short(name) for name in names]
    for number, panel in enumerate(axes):
        _axes.client_lines(panel, shown_names, labelled=number == 0 or ax is not None)
    for panel in axes[:2]:
        _axes.few_ticks(panel)
    if exact.any() and not exact.all():
        axes[0].plot([], [], "o", color="black", ms=4.5, label="exact")
        axes[0].plot([], [], "o", color="black", mfc="none", ms=4.5, label="by the Gaussian")
    if not few:
        axes[0].plot([], [], "o", color=_axes.GREY, ms=4.5, label=f"{len(places)} coordinates")
    _axes.legend_of_all(axes, ax)
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
    axes.axvline(0.05, color=_axes.GREY, lw=1, ls=":", label="0.05")
    if len(names) > 1:
        axes.axvline(0.05 / len(names), color="C3", lw=1, ls="--", label=f"0.05 / {len(names)}")
    axes.set(xlabel="p-value of conflict", xlim=(min(0.7 * np.nanmin([*values, 0.05 / len(names)]), 0.01), 1.3))
    _axes.legend(axes)
