"""Clients in a fit: who answered in each round, how well they computed, and what each does to the posterior."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedppl.contracts.printed import FALLBACKS, tolerance_of
from fedppl.plots import _fit
from fedppl.plots._fit import coordinate_names, coordinates, require_by_client
from fedppl.settings import a_fit, chosen, shown
from fedppl.types import Array, DeclarationError

OUTCOMES = {"used": "#6fa8d6", "silent": "#d3e3f1", "skipped": "C3", "not asked": "white"}
_UNITS = {
    "change_mean": "largest change of a mean (sds)",
    "change_sd": "largest change of a log sd",
    "change_omega": "relative change of Ω",
    "local_change": "change of local variables",
}
_CHANGES = ("change", "local_change")  # which tolerances bound
_INSTEAD = {"bound": "bound on the log evidence", "heard": "clients heard so far"}
_PHASES = ("#ffffff", "#e9f0e2", "#f3ead9", "#ece3f0")


def rounds(fit: Any, *, ax: Any = None, figsize: tuple[float, float] | None = None) -> Any:
    """Draw the changes in every round, on a log axis with the tolerance, and below them which clients answered.

    Parameters
    ----------
    fit, ax, figsize
        As in all of `fedppl.plots`.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes
        The changes, in the algorithm's own units, and the answers.

    Raises
    ------
    DeclarationError
        If there was no round, or rounds have no entry for each client since these were very many.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> axes = fedppl.plots.rounds(fit)
    >>> axes[1].get_xlabel()
    'round'

    Notes
    -----
    Changes that are zero or not known are left out of the log axis: as a step of a search that was not
    finite.

    *When this fails.* A change below the tolerance in one round is no proof: few clients may have been asked, or steps
    short. The algorithm's own test is ``fit.status``. Curves of two algorithms have units of their own.
    """
    require_by_client(fit)
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
    if not above.get_shared_x_axes().joined(above, below):  # given axes, perhaps side by side
        above.set_xlabel("round")
    return np.array([above, below], dtype=object)


def changed(fit: Any) -> dict[str, Array]:
    """Changes in every round, by name of the diagnostic, of those that have a value to draw."""
    names = dict.fromkeys(name for record in fit.records for name in record.info if name.startswith(_CHANGES))
    return {name: values for name in names if np.any(_visible(values := _column(fit, name)))}


def outcomes(fit: Any) -> Array:
    """Outcome of each client in each round, (client, round), as its place in `OUTCOMES`."""
    names = np.asarray(require_by_client(fit)["outcome"].transpose("client", "round").values)
    return np.asarray(np.vectorize(list(OUTCOMES).index, otypes=[float])(names))


def _column(fit: Any, name: str) -> Array:
    values = [record.info.get(name, np.nan) for record in fit.records]
    return np.array([np.nan if isinstance(value, str) else float(value) for value in values])


def _changes(axes: Any, fit: Any, number: Array) -> None:
    if changes := changed(fit):
        for name, values in changes.items():
            visible = np.where(_visible(values), values, np.nan)
            axes.plot(number, visible, "o-", ms=4, lw=1.2, label=_UNITS.get(name, name.replace("_", " ")))
        axes.set_yscale("log")
        if (bound := tolerance_of(fit.algorithm.settings)) is not None and fit.algorithm.result.tests_convergence:
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


def _phases(axes: Any, fit: Any, number: Array) -> None:
    """Bands for the phases of an algorithm that has several."""
    phases = [str(record.info.get("phase", "")) for record in fit.records]
    names = [name for name in dict.fromkeys(phases) if name]
    if len(names) < 2:
        return
    for name in names:
        color, label = _PHASES[(names.index(name) + 1) % len(_PHASES)], f"phase: {name}"
        for k, phase in enumerate(phases):
            if phase == name:
                axes.axvspan(number[k] - 0.5, number[k] + 0.5, color=color, lw=0, zorder=0, label=label)
                label = "_nolegend_"


def _answers(axes: Any, fit: Any, number: Array) -> None:
    patches, colors = _fit.matplotlib("patches"), _fit.matplotlib("colors").ListedColormap(list(OUTCOMES.values()))
    table, names = outcomes(fit), [_fit.short(name) for name in fit.client_ids]
    lines = {"edgecolors": "0.85", "linewidth": 0.6 if len(number) <= 100 else 0.0}
    edges = np.concatenate([number - 0.5, number[-1:] + 0.5])
    places = np.arange(len(names) + 1) - 0.5
    axes.pcolormesh(edges, places, table, cmap=colors, vmin=-0.5, vmax=len(OUTCOMES) - 0.5, **lines)
    _fit.client_lines(axes, names)
    present = [word for k, word in enumerate(OUTCOMES) if np.any(table == k)]
    handles = [patches.Patch(fc=OUTCOMES[word], ec="0.6", label=word) for word in present]
    _fit.legend(axes, len(handles), handles)


# Quality of clients' computations: effective draws, Pareto k, fallbacks, and replies that were not used ---------------

PARETO = 0.7  # Pareto k beyond which moments by importance sampling are not to be trusted
WORDS = {"ess": "effective draws", "pareto_k": "Pareto k", "rhat": "R̂"}


def quality(fit: Any, *, ax: Any = None, figsize: tuple[float, float] | None = None) -> Any:
    """Draw diagnostics of each client's computations, a panel for each diagnostic that there is.

    A dot is the client's last answer, the line spans all its answers.

    Parameters
    ----------
    fit, ax, figsize
        As in all of `fedppl.plots`.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes
        Panels for effective draws, Pareto k and R̂ where clients report them; then rounds by their outcome, with
        fallbacks to another local inference.

    Raises
    ------
    DeclarationError
        If there was no round, or rounds have no entry for each client since these were very many.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> axes = fedppl.plots.quality(fit)
    >>> axes[-1].get_xlabel()
    'rounds'

    Notes
    -----
    Infinite effective draws, of computations without draws, are left out.

    *When this fails.* Figures are the clients' own, and do not show that all modes were found, nor that the model fits.
    A dot may be of a round long ago: `rounds` shows when a client answered.
    """
    table = require_by_client(fit)
    by_name = {name: reported(table, name) for name in WORDS if name in table and table[name].ndim == 2}
    by_name = {name: values for name, values in by_name.items() if np.any(np.isfinite(values))}
    names = [_fit.short(name) for name in fit.client_ids]
    count = len(by_name) + 1
    size = (2.2 + 2.9 * count, _fit.height(len(names)))
    axes = _fit.panels(ax, 1, count, size, figsize, sharey=True)
    for panel, (name, values) in zip(axes, by_name.items(), strict=False):
        last, low, high = spans(values)
        place = np.arange(len(names))
        panel.hlines(place, low, high, color="C0", lw=1)
        panel.plot(last, place, "o", color="C0", ms=4.5)
        panel.set_xlabel(WORDS[name])
        if name == "ess":
            _effective(panel, values)
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
    last, low, high = np.full((3, len(values)), np.nan)
    for k, row in enumerate(values):
        if len(finite := row[np.isfinite(row)]):
            last[k], low[k], high[k] = finite[-1], finite.min(), finite.max()
    return last, low, high


def counts(table: Any) -> dict[str, Array]:
    """Rounds of each client by the outcome of its reply, those with a fallback apart."""
    outcome = table["outcome"].transpose("client", "round").values
    step = reported(table, "fallback") if "fallback" in table and table["fallback"].ndim == 2 else None
    used = outcome == "used"
    by_fallback = {} if step is None else {label: used & (step == k) for k, label in FALLBACKS.items()}
    rows = {"used": used & ~np.any([*by_fallback.values(), np.zeros_like(used)], axis=0)}
    rows |= {f"used, by {label}": there for label, there in by_fallback.items()}
    rows |= {word: outcome == word for word in ("silent", "skipped")}
    return {word: there.sum(axis=1) for word, there in rows.items() if word == "used" or there.any()}


def _effective(axes: Any, values: Array) -> None:
    """A linear axis from zero, or a log axis where values are of several magnitudes."""
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


# The shared posterior with and without each client --------------------------------------------------------------------


def influence(
    fit: Any,
    var_names: Sequence[str] | str | None = None,
    *,
    clients: Sequence[str] | str | None = None,
    conflict: Any = None,
    ax: Any = None,
    figsize: tuple[float, float] | None = None,
) -> Any:
    r"""Draw how far each client moves the shared means, and how it changes their sds.

    .. math:: \mathrm{shift}_k = (\mu - \mu_{-k}) / \mathrm{sd}, \qquad
              \mathrm{ratio}_k = \mathrm{sd} / \mathrm{sd}_{-k}

    where -k is the posterior without client k.

    Parameters
    ----------
    fit
        A `fedppl.Fit` by `EP`, `Sums` or another algorithm with a posterior without each client.
    conflict
        What `fedppl.conflict` returned, for a panel of p-values.
    var_names, clients, ax, figsize
        As in all of `fedppl.plots`; shared variables are shown on the unconstrained space.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes
        Shifts in posterior sds, ratios of sds with the client to those without, and p-values.

    Raises
    ------
    DeclarationError
        If the algorithm has no posterior without each client, or `conflict` is no such result.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> axes = fedppl.plots.influence(fit)
    >>> [panel.get_xlabel() for panel in axes]
    ['shift of the mean (sds)', 'sd with / sd without']

    Notes
    -----
    Filled markers are of the posterior itself, open ones of its Gaussian (``exact`` of `Fit.influence`); unknown values
    have none. Of many clients some have a small p-value by chance: all lie right of the second line, at 0.05 over the
    number of clients, with probability 0.95.

    *When this fails.* Clients are left out one at a time: of two that are off in the same way each hides the other. A
    large shift is no fault, as a client with many rows has one too. Open markers are rough where the posterior is
    skewed.
    """
    a_fit(fit)
    names = chosen("clients", clients, list(fit.client_ids), "the fit's clients")
    places = coordinates(fit, var_names)
    moments = fit.influence(names)
    if conflict is not None and "p_value" not in getattr(conflict, "data_vars", ()):
        raise DeclarationError(f"conflict={shown(conflict)} is not what fedppl.conflict returned.")
    count = 2 if conflict is None else 3
    axes = _fit.panels(ax, 1, count, (2.2 + 3.0 * count, _fit.height(len(names))), figsize, sharey=True)
    few, labels = len(places) <= _fit.LEGEND, coordinate_names(fit)
    exact = np.asarray(moments["exact"].values, dtype=bool)
    for panel, quantity, middle in ((axes[0], "shift", 0.0), (axes[1], "sd_ratio", 1.0)):
        panel.axvline(middle, color=_fit.GREY, lw=1)
        for number, place in enumerate(places):
            values = np.asarray(moments[quantity].isel(rows=place).values, dtype=float)
            label = _fit.short(labels[place], 32) if few and panel is axes[0] else None
            offset = 0.0 if len(places) == 1 else 0.5 * (number / (len(places) - 1) - 0.5)  # within a client's line
            _points(panel, values, exact, offset, f"C{number}" if few else _fit.GREY, label)
    axes[0].set_xlabel("shift of the mean (sds)")
    axes[1].set_xlabel("sd with / sd without")
    if conflict is not None:
        _p_values(axes[2], conflict, names)
    shown_names = [_fit.short(name) for name in names]
    for number, panel in enumerate(axes):
        _fit.client_lines(panel, shown_names, labelled=number == 0 or ax is not None)
        if number < 2:
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
    label = None if exact.any() else label
    axes.plot(np.where(exact, np.nan, values), place, "o", color=color, mfc="none", ms=4.5, label=label)


def _p_values(axes: Any, conflict: Any, names: Sequence[str]) -> None:
    by_client = dict(zip(conflict["client"].values.tolist(), conflict["p_value"].values.tolist(), strict=True))
    values = np.array([by_client.get(name, np.nan) for name in names], dtype=float)
    axes.plot(values, np.arange(len(names)), "o", color="black", ms=4.5)
    axes.set_xscale("log")
    axes.axvline(0.05, color=_fit.GREY, lw=1, ls=":", label="0.05")
    if len(names) > 1:
        axes.axvline(0.05 / len(names), color="C3", lw=1, ls="--", label=f"0.05 / {len(names)}")
    axes.set(xlabel="p-value of conflict", xlim=(min(0.7 * np.nanmin([*values, 0.05 / len(names)]), 0.01), 1.3))
    _fit.legend(axes)


# Weights of clients by their confidence, and distances of their parameters from the shared ones -----------------------

_QUANTITIES = ("confidence", "deviation")


def confidence(fit: Any, *, ax: Any = None, figsize: tuple[float, float] | None = None) -> Any:
    r"""Draw the distribution of clients' weights, and of distances of their own parameters from the shared ones.

    .. math:: \tau_k / \sum_j \tau_j, \qquad \lVert \mu_k - w \rVert^2 / d

    each as an empirical distribution over clients, of the last round in which a client replied.

    Parameters
    ----------
    fit
        A `fedppl.Fit` by `fedppl.Confidence`, or by its like for networks.
    ax, figsize
        As in all of `fedppl.plots`.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes
        Shares of the confidence, and deviations, in squared units of the parameters, on log axes.

    Raises
    ------
    DeclarationError
        For a fit whose clients report no confidence, or if none has replied.

    Examples
    --------
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
    rounds = require_by_client(fit)
    if not all(name in rounds for name in _QUANTITIES):
        raise DeclarationError(f"fit={shown(fit)} has no confidence of clients; pass a fit by fedppl.Confidence.")
    last = {name: spans(reported(rounds, name))[0] for name in _QUANTITIES}
    if not all(np.any(np.isfinite(values)) for values in last.values()):
        raise DeclarationError("no client of this fit has replied with finite numbers; see fit.message for the reason.")
    left, right = _fit.panels(ax, 1, 2, (8.0, 3.2), figsize, sharey=True)
    _distribution(left, last["confidence"] / np.nansum(last["confidence"]))
    _distribution(right, last["deviation"])
    count = int(np.sum(np.isfinite(last["confidence"])))
    left.axvline(1.0 / count, color=_fit.GREY, lw=1, ls=":", label=f"equal shares, 1 / {count}")
    left.set(xlabel="share of the confidence", ylabel="clients up to here")
    right.set(xlabel="mean squared distance to the shared parameters")
    _fit.legend(left)
    return np.array([left, right], dtype=object)


def _distribution(axes: Any, values: Array) -> None:
    """The empirical distribution of finite values, with a mark for each client, on a log axis unless all are zero."""
    ordered = np.sort(values[np.isfinite(values)])
    axes.ecdf(ordered, color="C0")
    axes.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), "o", color="C0", ms=3.5)
    if ordered[-1] > 0:
        axes.set_xscale("log")
    axes.set_ylim(0, 1.05)


# The device graph: HM1's correlations of clients ----------------------------------------------------------------------

_WRITTEN = 10  # clients up to which every number is written


def device_graph(fit: Any, *, ax: Any = None, figsize: tuple[float, float] | None = None) -> Any:
    r"""Draw the correlation of clients' parameters, ``fit.idata["fit"]["correlation"]``.

    .. math:: R_{ik} = \Omega_{ik} / \sqrt{\Omega_{ii}\, \Omega_{kk}}

    Parameters
    ----------
    fit
        A `fedppl.Fit` by `HM1` or `HM1Gradient`.
    ax, figsize
        As in all of `fedppl.plots`.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    DeclarationError
        If the algorithm estimates no covariance over clients.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(), fedppl.HM1(), progressbar=False, random_seed=1)
    >>> axes = fedppl.plots.device_graph(fit)
    >>> len(axes.texts)  # a number for each pair of 3 clients
    9

    Notes
    -----
    *When this fails.* Correlations, of parameters on the unconstrained space, are drawn without their uncertainty: with
    few shared parameters or rows they are rough. Under ``structure=exchangeable`` all pairs have the same one.
    """
    a_fit(fit)
    if "fit" not in fit.idata or "correlation" not in fit.idata["fit"]:
        raise DeclarationError(f"{fit.algorithm.name} estimates no covariance over clients; use fedppl.HM1().")
    matrix = np.asarray(fit.idata["fit"]["correlation"].transpose("client", "other_client").values, dtype=float)
    names = [_fit.short(name) for name in fit.client_ids]
    side = float(np.clip(0.22 * len(names) + 2.4, 3.6, 14.0))
    axes = _fit.panels(ax, 1, 1, (side + 0.9, side), figsize, layout="compressed")[0]
    image = axes.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest", aspect="equal")
    columns = _fit.places_of(axes, len(names), vertical=False)
    axes.set_xticks(columns, [names[k] for k in columns], rotation=90)
    _fit.client_lines(axes, names)
    if len(names) <= _WRITTEN:
        for (i, k), value in np.ndenumerate(matrix):
            color = "white" if abs(value) > 0.65 else "black"
            axes.text(k, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    axes.figure.colorbar(image, ax=axes, label="correlation of θ over clients", shrink=0.8)
    return axes
