"""How a fit went: what every round changed, and who answered."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedppl.plots import _axes
from fedppl.plots._fit import Fitted, require_by_client, require_fit
from fedppl.types import Array, DeclarationError

OUTCOMES = {"used": "#6fa8d6", "silent": "#d3e3f1", "skipped": "C3", "not asked": "white"}
_UNITS = {
    "change_mean": "largest change of a mean (sds)",
    "change_sd": "largest change of a log sd",
    "change_omega": "relative change of Ω",
    "local_change": "change of local variables",
}
_CHANGES = ("change", "local_change")  # tolerances are of these
_INSTEAD = {"bound": "bound on the log evidence", "heard": "clients heard so far"}
_PHASES = ("#ffffff", "#e9f0e2", "#f3ead9", "#ece3f0")


def rounds(fit: Fitted, *, ax: Any = None, figsize: tuple[float, float] | None = None) -> Any:
    """Draw what every round changed, on a log axis with the tolerance, and below it who answered.

    Parameters
    ----------
    fit
        A `fedppl.Fit`.
    ax, figsize
        Two matplotlib axes; by default those of a new figure, of so many inches.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes
        The changes, in the algorithm's own units, and the answers.

    Raises
    ------
    DeclarationError
        If there was no round, if clients were so many at once that rounds have no entry for each, or for axes that are
        not two.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("Agg")
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> axes = fedppl.plots.rounds(fit)
    >>> axes[1].get_xlabel()
    'round'

    Notes
    -----
    Changes that are zero or not known have no place on a log axis and are left out: a step of a search that was not
    finite, or a correction, which moves no q.

    *When this fails.* A change below the tolerance in one round is no proof: few clients may have been asked in it, or
    steps may have been short. The algorithm counts a whole sweep, and ``fit.status`` has what it found. Units are the
    algorithm's own, so that curves of two algorithms are not comparable.
    """
    require_fit(fit)
    if not fit.records:
        raise DeclarationError("this fit has no rounds to draw.")
    number = np.array([record.number for record in fit.records])
    count = len(fit.client_ids)
    tall = min(0.2 * count, _axes.TALLEST - 5) + 1.0
    size = (min(6.0 + 0.05 * len(number), 11.0), 3.4 + tall)
    above, below = _axes.panels(ax, 2, 1, size, figsize, sharex=True, gridspec_kw={"height_ratios": [2.6, tall]})
    _phases(above, fit, number)
    _changes(above, fit, number)
    _answers(below, fit, number)
    for axes in (above, below):
        axes.xaxis.set_major_locator(_axes.matplotlib("ticker").MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_xlim(number[0] - 0.5, number[-1] + 0.5)
    below.set_xlabel("round")
    if not above.get_shared_x_axes().joined(above, below):  # somebody else's, perhaps side by side
        above.set_xlabel("round")
    return np.array([above, below], dtype=object)


def columns(fit: Fitted) -> dict[str, Array]:
    """Diagnostics of rounds that say what has changed, by name."""
    names = dict.fromkeys(name for record in fit.records for name in record.info if name.startswith(_CHANGES))
    return {name: _column(fit, name) for name in names}


def changed(fit: Fitted) -> dict[str, Array]:
    """Those of `columns` that have something to draw."""
    return {name: values for name, values in columns(fit).items() if np.any(_visible(values))}


def outcomes(fit: Fitted) -> Array:
    """What became of each client in each round, (client, round), by place in `OUTCOMES`."""
    words = list(OUTCOMES)
    told = np.asarray(require_by_client(fit)["outcome"].transpose("client", "round").values)
    return np.asarray(np.vectorize(words.index, otypes=[float])(told))


def tolerance(fit: Fitted) -> float | None:
    """The bound on changes below which the algorithm calls a fit converged, where it has one."""
    try:
        return float(fit.algorithm.settings["tolerance"])
    except (KeyError, ValueError):
        return None


def _column(fit: Fitted, name: str) -> Array:
    told = [record.info.get(name, np.nan) for record in fit.records]
    return np.array([np.nan if isinstance(value, str) else float(value) for value in told])


def _changes(axes: Any, fit: Fitted, number: Array) -> None:
    if found := changed(fit):
        for name, values in found.items():
            known = np.where(_visible(values), values, np.nan)
            axes.plot(number, known, "o-", ms=4, lw=1.2, label=_UNITS.get(name, name.replace("_", " ")))
        axes.set_yscale("log")
        if (bound := tolerance(fit)) is not None and fit.algorithm.result.tests_convergence:
            axes.axhline(bound, color="black", ls="--", lw=1, label=f"tolerance {bound:g}")
        axes.set_ylabel("change in the round")
    else:
        name = next((name for name in _INSTEAD if np.any(np.isfinite(_column(fit, name)))), "")
        values = _column(fit, name) if name else np.array([record.seconds for record in fit.records])
        axes.plot(number, values, "o-", ms=4, lw=1.2)
        axes.set_ylabel(_INSTEAD.get(name, "seconds"))
    _axes.legend(axes)


def _visible(values: Array) -> Any:
    with np.errstate(invalid="ignore"):
        return np.isfinite(values) & (values > 0)


def _phases(axes: Any, fit: Fitted, number: Array) -> None:
    """Bands for the phases of an algorithm that has several."""
    told = [str(record.info.get("phase", "")) for record in fit.records]
    kinds = [name for name in dict.fromkeys(told) if name]
    if len(kinds) < 2:
        return
    for name in kinds:
        color, label = _PHASES[(kinds.index(name) + 1) % len(_PHASES)], f"phase: {name}"
        for k, one in enumerate(told):
            if one == name:
                axes.axvspan(number[k] - 0.5, number[k] + 0.5, color=color, lw=0, zorder=0, label=label)
                label = "_nolegend_"


def _answers(axes: Any, fit: Fitted, number: Array) -> None:
    colors, patches = _axes.matplotlib("colors"), _axes.matplotlib("patches")
    table = outcomes(fit)
    names = [_axes.short(name) for name in fit.client_ids]
    at = np.concatenate([number - 0.5, number[-1:] + 0.5])
    axes.pcolormesh(
        at,
        np.arange(len(names) + 1) - 0.5,
        table,
        cmap=colors.ListedColormap(list(OUTCOMES.values())),
        vmin=-0.5,
        vmax=len(OUTCOMES) - 0.5,
        edgecolors="0.85",
        linewidth=0.6 if len(number) <= 100 else 0.0,
    )
    _axes.client_lines(axes, names)
    shown = [word for k, word in enumerate(OUTCOMES) if np.any(table == k)]
    drawn = [patches.Patch(fc=OUTCOMES[word], ec="0.6", label=word) for word in shown]
    _axes.legend(axes, len(drawn), drawn)
