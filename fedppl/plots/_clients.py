"""Clients in a fit: who answered in each round, how well they computed, and what each does to the posterior."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedppl.contracts.printed import DIAGNOSTICS, FALLBACKS, QUALITY, tolerance_of
from fedppl.plots import _fit
from fedppl.plots._fit import Names, Size, coordinate_names, coordinates, require_by_client
from fedppl.settings import a_fit, chosen, shown
from fedppl.types import Array, DeclarationError

OUTCOMES = {"used": "#6fa8d6", "silent": "#d3e3f1", "skipped": "C3", "not asked": "white"}
_CHANGES = ("change", "local_change")  # which tolerances bound
_INSTEAD = {"bound": "bound on the log evidence", "heard": "clients heard so far"}
_PHASES = ("#ffffff", "#e9f0e2", "#f3ead9", "#ece3f0")


def rounds(fit: Any, *, ax: Any = None, figsize: Size = None) -> Any:
    """Draw the changes in every round, on a log axis with the tolerance, and below them which clients answered.

    Parameters
    ----------
    fit, ax, figsize
        As in all of `fedppl.plots`.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes
        The changes, in the algorithm's own units, but for those that are zero or not finite; and the answers.

    Raises
    ------
    DeclarationError
        If there was no round, or rounds have no entry for each client since these were very many.

    Examples
    --------
    >>> import fedppl
    >>> fit = fedppl.fit(*fedppl.testing.normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> axes = fedppl.plots.rounds(fit)
    >>> axes[1].get_xlabel()
    'round'

    Notes
    -----
    *When this fails.* A change below the tolerance in one round is no proof: few clients may have been asked, or steps
    short. The algorithm's own test is ``fit.status``. Curves of two algorithms have units of their own.
    """
    outcome = require_by_client(fit)["outcome"].transpose("client", "round").values
    number = np.array([record.number for record in fit.records])
    tall = min(0.2 * len(outcome), _fit.TALLEST - 5) + 1.0
    size = (min(6.0 + 0.05 * len(number), 11.0), 3.4 + tall)
    ratios = {"height_ratios": [2.6, tall]}
    above, below = both = _fit.panels(ax, 2, 1, size, figsize, sharex=True, gridspec_kw=ratios)
    _phases(above, fit, number)
    _changes(above, fit, number)
    _answers(below, fit, number, outcome)
    for axes in both:
        axes.xaxis.set_major_locator(_fit.matplotlib("ticker").MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_xlim(number[0] - 0.5, number[-1] + 0.5)
    below.set_xlabel("round")
    if not above.get_shared_x_axes().joined(above, below):  # given axes, perhaps side by side
        above.set_xlabel("round")
    return both


def changed(fit: Any) -> dict[str, Array]:
    """Positive changes in every round, else NaN, by name of the diagnostic; of those that have any."""
    names = dict.fromkeys(name for record in fit.records for name in record.info if name.startswith(_CHANGES))
    columns = {name: _column(fit, name) for name in names}
    positive = {name: np.where(values > 0, values, np.nan) for name, values in columns.items()}
    return {name: values for name, values in positive.items() if not np.all(np.isnan(values))}


def _column(fit: Any, name: str) -> Array:
    """A diagnostic of every round; NaN where it is not a finite number."""
    values = [record.info.get(name, np.nan) for record in fit.records]
    numbers = np.array([np.nan if isinstance(value, str) else value for value in values], dtype=float)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def _changes(axes: Any, fit: Any, number: Array) -> None:
    for name, values in (changes := changed(fit)).items():
        label = DIAGNOSTICS[name].label if name in DIAGNOSTICS else name.replace("_", " ")
        axes.plot(number, values, "o-", ms=4, lw=1.2, label=label)
    if changes:
        axes.set(yscale="log", ylabel="change in the round")
        if (bound := tolerance_of(fit.algorithm.settings)) is not None and fit.algorithm.result.tests_convergence:
            axes.axhline(bound, color="black", ls="--", lw=1, label=f"tolerance {bound:g}")
    else:
        instead = {label: _column(fit, name) for name, label in _INSTEAD.items()}
        instead["seconds"] = np.array([record.seconds for record in fit.records])
        label, values = next(one for one in instead.items() if not np.all(np.isnan(one[1])))
        axes.plot(number, values, "o-", ms=4, lw=1.2)
        axes.set_ylabel(label)
    _fit.legend(axes)


def _phases(axes: Any, fit: Any, number: Array) -> None:
    """Bands for the phases of an algorithm that has several."""
    phases = [str(record.info.get("phase", "")) for record in fit.records]
    names = [name for name in dict.fromkeys(phases) if name]
    if len(names) < 2:
        return
    for k, phase in enumerate(phases):
        if phase:
            label = f"phase: {phase}" if phases.index(phase) == k else "_nolegend_"
            color = _PHASES[(names.index(phase) + 1) % len(_PHASES)]
            axes.axvspan(number[k] - 0.5, number[k] + 0.5, color=color, lw=0, zorder=0, label=label)


def _answers(axes: Any, fit: Any, number: Array, outcome: Any) -> None:
    patches, colors = _fit.matplotlib("patches"), _fit.matplotlib("colors").ListedColormap(list(OUTCOMES.values()))
    table = np.argmax([outcome == word for word in OUTCOMES], axis=0)
    lines = {"edgecolors": "0.85", "linewidth": 0.6 if len(number) <= 100 else 0.0}
    edges = np.append(number - 0.5, number[-1] + 0.5)
    places = np.arange(len(table) + 1) - 0.5
    axes.pcolormesh(edges, places, table, cmap=colors, vmin=-0.5, vmax=len(OUTCOMES) - 0.5, **lines)
    _fit.client_lines(axes, fit.client_ids)
    present = [word for word in OUTCOMES if np.any(outcome == word)]
    _fit.legend(axes, len(present), [patches.Patch(fc=OUTCOMES[word], ec="0.6", label=word) for word in present])


# Quality of clients' computations: effective draws, Pareto k, fallbacks, and replies that were not used ---------------

_COLORS = {**OUTCOMES, "used, by a fitted t": "C4", "used, by NUTS": "C1"}


def quality(fit: Any, *, ax: Any = None, figsize: Size = None) -> Any:
    """Draw diagnostics of each client's computations, a panel for each diagnostic that there is.

    A dot is the client's last answer, the line spans all. Infinite effective draws, of exact moments, are left out.

    Parameters
    ----------
    fit, ax, figsize
        As in all of `fedppl.plots`.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes
        Effective draws, Pareto k and R̂ where clients report them; rounds by outcome and fallback of local inferences.

    Raises
    ------
    DeclarationError
        If there was no round, or rounds have no entry for each client since these were very many.

    Examples
    --------
    >>> import fedppl
    >>> fit = fedppl.fit(*fedppl.testing.normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> axes = fedppl.plots.quality(fit)
    >>> axes[-1].get_xlabel()
    'rounds'

    Notes
    -----
    *When this fails.* Figures are the clients' own, and do not show that all modes were found, nor that the model fits.
    A dot may be of a round long ago: `rounds` shows when a client answered.
    """
    table = require_by_client(fit)
    by_name = {name: values for name in QUALITY if (values := reported(table, name)) is not None}
    by_name = {name: values for name, values in by_name.items() if not np.all(np.isnan(values))}
    count = len(by_name) + 1
    clients = np.arange(len(fit.client_ids))
    axes = _fit.panels(ax, 1, count, (2.2 + 2.9 * count, _fit.height(len(clients))), figsize, sharey=True)
    for panel, (name, values) in zip(axes, by_name.items(), strict=False):
        last, low, high = spans(values)
        panel.hlines(clients, low, high, color="C0", lw=1)
        panel.plot(last, clients, "o", color="C0", ms=4.5)
        panel.set_xlabel(QUALITY[name].label)
        if name == "ess":
            _effective(panel, values)
        else:
            _fit.few_ticks(panel)
        if (limit := QUALITY[name].limit) is not None:
            panel.axvline(limit, color="C3", lw=1, ls="--", label=f"limit {limit}")
            _fit.legend(panel)
    left = np.zeros(len(clients))
    for word, rounds_of in counts(table).items():
        axes[-1].barh(clients, rounds_of, left=left, height=0.7, color=_COLORS[word], label=word)
        left += rounds_of
    _fit.few_ticks(axes[-1], integer=True, min_n_ticks=1)
    axes[-1].set_xlabel("rounds")
    _fit.legend(axes[-1])
    for number, panel in enumerate(axes):
        _fit.client_lines(panel, fit.client_ids, labelled=number == 0 or ax is not None)
    return axes


def reported(table: Any, name: str) -> Array | None:
    """One diagnostic of clients, (client, round), NaN where it is not finite; None where clients have none."""
    if name not in table or table[name].ndim < 2:
        return None
    values = table[name].transpose("client", "round").values
    return np.where(np.isfinite(values), values, np.nan)


def spans(values: Array) -> tuple[Array, Array, Array]:
    """Last, smallest and largest of each client's answers; NaN where there are none."""
    frame = pd.DataFrame(values)
    return frame.ffill(axis=1).iloc[:, -1].to_numpy(), frame.min(axis=1).to_numpy(), frame.max(axis=1).to_numpy()


def counts(table: Any) -> dict[str, Array]:
    """Rounds of each client by the outcome of its reply, those with a fallback apart."""
    outcome = table["outcome"].transpose("client", "round").values
    step = reported(table, "fallback")
    step = np.zeros(outcome.shape) if step is None else step
    used = outcome == "used"
    rows = {"used": used & ~np.isin(step, list(FALLBACKS))}
    rows |= {f"used, by {label}": used & (step == k) for k, label in FALLBACKS.items()}
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


# The shared posterior with and without each client --------------------------------------------------------------------


def influence(
    fit: Any,
    var_names: Names = None,
    *,
    clients: Names = None,
    conflict: Any = None,
    ax: Any = None,
    figsize: Size = None,
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
    >>> fit = fedppl.fit(*fedppl.testing.normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> axes = fedppl.plots.influence(fit)
    >>> [panel.get_xlabel() for panel in axes]
    ['shift of the mean (sds)', 'sd with / sd without']

    Notes
    -----
    Filled markers are of the posterior itself, open ones of its Gaussian (``exact`` of `Fit.influence`); unknown values
    have none. With probability 0.95 all p-values are above the second line, at 0.05 over the number of clients.

    *When this fails.* Clients are left out one at a time: of two that are off in the same way each hides the other. A
    client with many rows has a large shift without a fault. Open markers are rough where the posterior is skewed.
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
    exact = moments["exact"].values.astype(bool)
    offsets = np.linspace(-0.25, 0.25, len(places)) if len(places) > 1 else [0.0]  # within a client's line
    for panel, quantity, middle in ((axes[0], "shift", 0.0), (axes[1], "sd_ratio", 1.0)):
        panel.axvline(middle, color=_fit.GREY, lw=1)
        for number, (place, offset) in enumerate(zip(places, offsets, strict=True)):
            values, lines = moments[quantity].isel(rows=place).values, np.arange(len(names)) + offset
            style = {"marker": "o", "ls": "", "ms": 4.5, "color": f"C{number}" if few else _fit.GREY}
            label = _fit.short(labels[place], 32) if few else None
            solid, hollow = (label, None) if exact.any() else (None, label)
            panel.plot(np.where(exact, values, np.nan), lines, label=solid, **style)
            panel.plot(np.where(exact, np.nan, values), lines, label=hollow, mfc="none", **style)
        _fit.few_ticks(panel)
    axes[0].set_xlabel("shift of the mean (sds)")
    axes[1].set_xlabel("sd with / sd without")
    if conflict is not None:
        _p_values(axes[2], conflict, names)
    for number, panel in enumerate(axes):
        _fit.client_lines(panel, names, labelled=number == 0 or ax is not None)
    if exact.any() and not exact.all():
        axes[0].plot([], [], "o", color="black", ms=4.5, label="exact")
        axes[0].plot([], [], "o", color="black", mfc="none", ms=4.5, label="by the Gaussian")
    if not few:
        axes[0].plot([], [], "o", color=_fit.GREY, ms=4.5, label=f"{len(places)} coordinates")
    _fit.legend_of_all(axes, ax)
    return axes


def _p_values(axes: Any, conflict: Any, names: Sequence[str]) -> None:
    values = conflict["p_value"].reindex(client=names).values
    each = 0.05 / len(names)
    axes.plot(values, np.arange(len(names)), "o", color="black", ms=4.5)
    axes.axvline(0.05, color=_fit.GREY, lw=1, ls=":", label="0.05")
    if len(names) > 1:
        axes.axvline(each, color="C3", lw=1, ls="--", label=f"0.05 / {len(names)}")
    left = min(0.7 * np.nanmin([*values, each]), 0.01)
    axes.set(xscale="log", xlim=(left, 1.3), xlabel="p-value of conflict")
    _fit.legend(axes)


# Weights of clients by their confidence, and distances of their parameters from the shared ones -----------------------


def confidence(fit: Any, *, ax: Any = None, figsize: Size = None) -> Any:
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
    >>> model, clients = fedppl.testing.normal_means()
    >>> fit = fedppl.fit(model, clients, fedppl.Confidence(strength=8), progressbar=False, random_seed=1)
    >>> axes = fedppl.plots.confidence(fit)
    >>> axes[0].get_xlabel()
    'share of the confidence'

    Notes
    -----
    *When this fails.* Clients that replied last in an early round are shown as they were then. One share near 1 is a
    collapse: w is that client's, see the *when this fails* of `fedppl.Confidence`.
    """
    rounds = require_by_client(fit)
    told = [values for name in ("confidence", "deviation") if (values := reported(rounds, name)) is not None]
    if len(told) < 2:
        raise DeclarationError(f"fit={shown(fit)} has no confidence of clients; pass a fit by fedppl.Confidence.")
    if any(np.all(np.isnan(values)) for values in told):
        raise DeclarationError("no client of this fit has replied with finite numbers; see fit.message for the reason.")
    taus, distances = (spans(values)[0] for values in told)
    left, right = both = _fit.panels(ax, 1, 2, (8.0, 3.2), figsize, sharey=True)
    _distribution(left, taus / np.nansum(taus))
    _distribution(right, distances)
    count = np.sum(np.isfinite(taus))
    left.axvline(1.0 / count, color=_fit.GREY, lw=1, ls=":", label=f"equal shares, 1 / {count}")
    left.set(xlabel="share of the confidence", ylabel="clients up to here")
    right.set(xlabel="mean squared distance to the shared parameters")
    _fit.legend(left)
    return both


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


def device_graph(fit: Any, *, ax: Any = None, figsize: Size = None) -> Any:
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
    >>> fit = fedppl.fit(*fedppl.testing.normal_means(), fedppl.HM1(), progressbar=False, random_seed=1)
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
    matrix = fit.idata["fit"]["correlation"].transpose("client", "other_client").values
    names = [_fit.short(name) for name in fit.client_ids]
    side = float(np.clip(0.22 * len(names) + 2.4, 3.6, 14.0))
    axes = _fit.panels(ax, 1, 1, (side + 0.9, side), figsize, layout="compressed")[0]
    image = axes.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest", aspect="equal")
    columns = _fit.places_of(axes, len(names), vertical=False)
    axes.set_xticks(columns, [names[k] for k in columns], rotation=90)
    _fit.client_lines(axes, fit.client_ids)
    if len(names) <= _WRITTEN:
        for (i, k), value in np.ndenumerate(matrix):
            color = "white" if abs(value) > 0.65 else "black"
            axes.text(k, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    axes.figure.colorbar(image, ax=axes, label="correlation of θ over clients", shrink=0.8)
    return axes
