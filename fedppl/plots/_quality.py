"""How well clients could compute: effective draws, Pareto k, fallbacks, and replies that could not be used."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedppl.plots import _axes
from fedppl.plots._fit import Fitted, require_by_client, require_fit
from fedppl.plots._rounds import OUTCOMES
from fedppl.types import Array, DeclarationError

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
    names = [_axes.short(name) for name in fit.client_ids]
    count = len(kept) + 1
    size = (2.2 + 2.9 * count, _axes.height(len(names)))
    axes = _axes.panels(ax, 1, count, size, figsize, sharey=True)
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
            _axes.few_ticks(panel)
        if name == "pareto_k":
            panel.axvline(PARETO, color="C3", lw=1, ls="--", label=f"limit {PARETO}")
            _axes.legend(panel)
    _bars(axes[-1], table)
    for number, panel in enumerate(axes):
        _axes.client_lines(panel, names, labelled=number == 0 or ax is not None)
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
        _axes.log_ticks(axes, low, high)
    else:
        axes.set_xlim(0, 1.1 * max(high, 1.0))
        _axes.few_ticks(axes, integer=True, min_n_ticks=1)


def _bars(axes: Any, table: Any) -> None:
    colors = {**OUTCOMES, "used, by a fitted t": "C4", "used, by NUTS": "C1"}
    left = np.zeros(table.sizes["client"])
    for word, number in counts(table).items():
        axes.barh(np.arange(len(left)), number, left=left, height=0.7, color=colors[word], label=word)
        left = left + number
    _axes.few_ticks(axes, integer=True, min_n_ticks=1)
    axes.set_xlabel("rounds")
    _axes.legend(axes)
