"""How a fit went: what every round changed, and who answered."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedppl.plots import _fit
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
    tall = min(0.2 * count, _fit.TALLEST - 5) + 1.0
    size = (min(6.0 + 0.05 * len(number), 11.0), 3.4 + tall)
    above, below = _fit.panels(ax, 2, 1, size, figsize, sharex=True, gridspec_kw={"height_ratios": [2.6, tall]})
    _phases(above, fit, number)
    _changes(above, fit, number)
    _answers(below, fit, number)
    for axes in (above, below):
        axes.xaxis.set_major_locator(_fit.matplotlib("ticker").MaxNLocator(integer=True, min_n_ticks=1))
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
    _fit.legend(axes)


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
    colors, patches = _fit.matplotlib("colors"), _fit.matplotlib("patches")
    table = outcomes(fit)
    names = [_fit.short(name) for name in fit.client_ids]
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
    _fit.client_lines(axes, names)
    shown = [word for k, word in enumerate(OUTCOMES) if np.any(table == k)]
    drawn = [patches.Patch(fc=OUTCOMES[word], ec="0.6", label=word) for word in shown]
    _fit.legend(axes, len(drawn), drawn)


# How well clients could compute: effective draws, Pareto k, fallbacks, and replies that could not be used -------------

PARETO = 0.7  # beyond it, moments by importance sampling are not to be trusted
_STEPS = {1: "a fitted t", 2: "NUTS"}
_WORDS = {"ess": "effective draws", "pareto_k": "Pareto k", "rhat": "R̂"}


def quality(fit: Fitted, *, ax: Any = None, figsize: tuple[float, float] | None = None) -> Any:
    """Draw what each client said of its own computations, a panel for each diagnostic that there is.

    A dot is the client's last answer, the line spans all its answers.

    Parameters
    ----------
    fit
        A `fedppl.Fit`.
    ax, figsize
        Matplotlib axes, as many as there are panels; by default those of a new figure, of so many inches.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes
        Panels for effective draws, Pareto k and R̂ where clients report them; then rounds by their outcome, with
        fallbacks to another local inference.

    Raises
    ------
    DeclarationError
        If there was no round, if clients were so many at once that rounds have no entry for each, or for axes that are
        none.

    Examples
    --------
    >>> import matplotlib; matplotlib.use("Agg")
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> axes = fedppl.plots.quality(fit)
    >>> axes[-1].get_xlabel()
    'rounds'

    Notes
    -----
    Effective draws that are infinite, of what is computed without draws, have no place on the axis and are left out.

    *When this fails.* Figures are what clients say of themselves. Many effective draws and a small Pareto k do not say
    that all modes were found, nor that the model fits. The last answer is drawn as a dot even where the client has not
    answered for many rounds: `rounds` shows when it did.
    """
    require_fit(fit)
    if not fit.records:
        raise DeclarationError("this fit has no rounds to draw.")
    table = require_by_client(fit)
    kept = {name: reported(table, name) for name in _WORDS if name in table and table[name].ndim == 2}
    kept = {name: values for name, values in kept.items() if np.any(np.isfinite(values))}
    names = [_fit.short(name) for name in fit.client_ids]
    count = len(kept) + 1
    size = (2.2 + 2.9 * count, _fit.height(len(names)))
    axes = _fit.panels(ax, 1, count, size, figsize, sharey=True)
    for panel, (name, values) in zip(axes, kept.items(), strict=False):
        last, low, high = spans(values)
        place = np.arange(len(names))
        panel.hlines(place, low, high, color="C0", lw=1)
        panel.plot(last, place, "o", color="C0", ms=4.5)
        panel.set_xlabel(_WORDS[name])
    for panel, name in zip(axes, kept, strict=False):
        if name == "ess":
            _effective(panel, kept[name])
        else:
            _fit.few_ticks(panel)
        if name == "pareto_k":
            panel.axvline(PARETO, color="C3", lw=1, ls="--", label=f"limit {PARETO}")
            _fit.legend(panel)
    _bars(axes[-1], table)
    for number, panel in enumerate(axes):
        _fit.client_lines(panel, names, labelled=number == 0 or ax is not None)
    return np.array(axes, dtype=object)


def reported(table: Any, name: str) -> Array:
    """One diagnostic, (client, round); NaN where it is not a finite number."""
    values = np.asarray(table[name].transpose("client", "round").values, dtype=float)
    return np.where(np.isfinite(values), values, np.nan)


def spans(values: Array) -> tuple[Array, Array, Array]:
    """Last, smallest and largest of each client's answers; NaN where there are none."""
    found = np.full((3, len(values)), np.nan)
    for k, row in enumerate(values):
        if len(known := row[np.isfinite(row)]):
            found[:, k] = known[-1], known.min(), known.max()
    return found[0], found[1], found[2]


def counts(table: Any) -> dict[str, Array]:
    """Rounds of each client by what became of its reply, those with a fallback apart."""
    outcome = table["outcome"].transpose("client", "round").values
    step = reported(table, "fallback") if "fallback" in table and table["fallback"].ndim == 2 else None
    used = outcome == "used"
    fell = {} if step is None else {label: used & (step == k) for k, label in _STEPS.items()}
    found = {"used": used & ~np.any([*fell.values(), np.zeros_like(used)], axis=0)}
    found |= {f"used, by {label}": rows for label, rows in fell.items()}
    found |= {word: outcome == word for word in ("silent", "skipped")}
    return {word: rows.sum(axis=1) for word, rows in found.items() if word == "used" or rows.any()}


def _effective(axes: Any, values: Array) -> None:
    """From zero where numbers are alike, on a log axis where they are not."""
    low, high = np.nanmin(values), np.nanmax(values)
    if 0 < low and high > 30 * low:
        axes.set_xscale("log")
        _fit.log_ticks(axes, low, high)
    else:
        axes.set_xlim(0, 1.1 * max(high, 1.0))
        _fit.few_ticks(axes, integer=True, min_n_ticks=1)


def _bars(axes: Any, table: Any) -> None:
    colors = {**OUTCOMES, "used, by a fitted t": "C4", "used, by NUTS": "C1"}
    left = np.zeros(table.sizes["client"])
    for word, number in counts(table).items():
        axes.barh(np.arange(len(left)), number, left=left, height=0.7, color=colors[word], label=word)
        left = left + number
    _fit.few_ticks(axes, integer=True, min_n_ticks=1)
    axes.set_xlabel("rounds")
    _fit.legend(axes)
