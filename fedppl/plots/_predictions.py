"""Predictions: beside what was observed, along a curve, and held against outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from fedppl import metrics
from fedppl.contracts.printed import CI_PROB, interval
from fedppl.plots import _fit
from fedppl.plots._fit import Names, Size
from fedppl.settings import a_fit, between, chosen, shown
from fedppl.types import Array, DataError, DeclarationError

_LEVELS = 12  # distinct whole numbers up to which each has a bar
_TIMES = 40
_GRID = 200


class _Outcomes(NamedTuple):
    values: Array  # (n,) as observed
    replicates: Array  # (S, n) drawn; of times the probabilities of no event until each of `times`, (S, n, T)
    event: Any = None  # (n,) of times, whether there was one


def check(
    fit: Any,
    *,
    clients: Names = None,
    ci_prob: float = CI_PROB,
    draws: int = 100,
    chains: int = 2,
    random_seed: int | None = None,
    ax: Any = None,
    figsize: Size = None,
) -> Any:
    """Draw observed outcomes beside the fit's predictions for the same rows: of all clients together, and of each.

    On the left the distribution of all outcomes: bars of whole numbers and levels, else the share of outcomes below
    each value; of times until an event the Kaplan-Meier estimate beside the predicted probability of no event. On the
    right each client's mean, or of times the probability at the middle of all times.

    Parameters
    ----------
    fit
        A `fedppl.Fit` whose clients are in this process.
    clients, ci_prob, draws, chains, random_seed, ax, figsize
        As in all of `fedppl.plots`; by default all clients that brought rows.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes

    Raises
    ------
    DeclarationError
        If no client with rows is here, or outcomes are of a `pm.Potential` or censored between two times.

    Examples
    --------
    >>> import fedppl
    >>> fit = fedppl.fit(*fedppl.testing.normal_means(), progressbar=False, random_seed=1)
    >>> axes = fedppl.plots.check(fit, random_seed=1)
    >>> axes[1].get_xlabel()
    'mean of obs'

    Notes
    -----
    *When this fails.* Agreement does not show that the model is right: replicates are of the fit's own rows, means of
    clients with effects of their own agree nearly always, and a column that the model leaves out does not show. Curves
    of times have the uncertainty of the parameters alone: the Kaplan-Meier estimate of few rows is often outside.
    """
    a_fit(fit)
    ci_prob = between("ci_prob", ci_prob, 0, 1)
    here = [name for name, client in fit.clients.items() if client.brought != "summary"]
    if not here:
        raise DeclarationError("no client with rows is here; load the fit with fedppl.load(..., clients=).")
    names = chosen("clients", clients, here, "the clients with rows that are here")
    settings: dict[str, Any] = {"draws": draws, "chains": chains, "random_seed": random_seed}
    size = (8.5, max(3.0, _fit.height(len(names))))
    family = getattr(fit.declaration.builder, "family", None)
    if family is not None and family.outcome.name == "TIME":
        what, by_client, times = _survival(fit, names, settings)
        axes = _fit.panels(ax, 1, 2, size, figsize)
        _curves(axes[0], by_client, times, ci_prob, what)
        _by_client(axes[1], fit, by_client, times, ci_prob, f"P(no event) of {what}")
    else:
        what, by_client = _outcomes(fit, names, settings)
        axes = _fit.panels(ax, 1, 2, size, figsize)
        _distribution(axes[0], fit, by_client, ci_prob, what)
        _by_client(axes[1], fit, by_client, np.zeros(0), ci_prob, f"mean of {what}")
    _fit.legend_of_all(axes, ax)
    return axes


def kaplan_meier(time: Array, event: Any, at: Array) -> Array:
    """Probability of no event until each time, of rows that are followed until an event or are censored before it.

    >>> kaplan_meier(np.array([1.0, 2.0, 3.0]), np.array([True, False, True]), np.array([0.5, 1.5, 3.5])).round(3)
    array([1.   , 0.667, 0.   ])
    """
    followed = stats.CensoredData(time[event], right=time[~event])
    return np.asarray(stats.ecdf(followed).sf.evaluate(at))


def _survival(fit: Any, names: Sequence[str], settings: Any) -> tuple[str, dict[str, _Outcomes], Array]:
    """Name of a formula's time until an event, outcomes at each client, and a grid of times."""
    builder = fit.declaration.builder
    if builder.terms.response.kind != "survival":
        raise DeclarationError("times that are censored between two others have no Kaplan-Meier estimate to check.")
    outcome, limit = builder.containers["outcome"], builder.containers["limit"]
    last = max(float(np.max(fit.clients[name].arrays[outcome])) for name in names)
    times = np.linspace(0, last, _TIMES + 1)[1:]
    by_client = {}
    for name in names:
        arrays = fit.clients[name].arrays
        predicted = fit.predict(name, arrays, kind="mean", at=times.tolist(), **settings)["predictions"]
        (values,) = (predicted[key].values for key in predicted.data_vars)
        until = np.asarray(arrays[outcome], dtype=float)
        by_client[name] = _Outcomes(until, values.reshape(-1, *values.shape[2:]), until < arrays[limit])
    return str(builder.terms.response.columns[0]), by_client, times


def _outcomes(fit: Any, names: Sequence[str], settings: Any) -> tuple[str, dict[str, _Outcomes]]:
    """Name of the first observed variable, and its values and replicates at each client."""
    what, by_client = "", {}
    for name in names:
        drawn = fit.client(name, groups="posterior_predictive", **settings)
        what = what or str(next(iter(drawn["observed_data"].data_vars)))
        observed, replicates = (drawn[group][what].values for group in ("observed_data", "posterior_predictive"))
        flat = replicates.reshape(replicates.shape[0] * replicates.shape[1], -1)
        by_client[name] = _Outcomes(np.ravel(observed).astype(float), flat.astype(float))
    return what, by_client


def _distribution(axes: Any, fit: Any, by_client: dict[str, _Outcomes], ci_prob: float, what: str) -> None:
    values = np.concatenate([client.values for client in by_client.values()])
    replicates = np.concatenate([client.replicates for client in by_client.values()], axis=1)
    levels = np.union1d(values, replicates)
    if len(levels) <= _LEVELS and np.all(levels == np.floor(levels)):
        drawn = np.stack([np.mean(replicates == level, axis=1) for level in levels], axis=1)
        share = [float(np.mean(values == level)) for level in levels]
        axes.bar(levels, share, width=0.7, color=_fit.GREY, alpha=0.5, label="observed")
        low, high = np.quantile(drawn, interval(ci_prob), axis=0)
        axes.vlines(levels, low, high, color="C0", lw=2)
        axes.plot(levels, drawn.mean(axis=0), "o", color="C0", mec="white", label=_label(ci_prob))
        names = getattr(fit.declaration.builder, "outcome_levels", {}).get(what)
        axes.set_xticks(levels, [_fit.short(names[int(k)]) for k in levels] if names else [f"{k:g}" for k in levels])
        axes.set(xlabel=_fit.short(what), ylabel="share of rows", ylim=(0, None))
        return
    x = np.quantile(np.concatenate([values, replicates.ravel()]), np.linspace(0.001, 0.999, _GRID))
    below = np.stack([np.searchsorted(np.sort(row), x, side="right") / len(row) for row in replicates])
    _band(axes, x, below, ci_prob)
    up_to = np.arange(1, len(values) + 1) / len(values)
    axes.step(np.sort(values), up_to, where="post", color="black", lw=1, label="observed")
    axes.set(xlabel=_fit.short(what), ylabel="share of rows up to here", xlim=(x[0], x[-1]))


def _curves(axes: Any, by_client: dict[str, _Outcomes], times: Array, ci_prob: float, what: str) -> None:
    values, event = (np.concatenate([client[k] for client in by_client.values()]) for k in (0, 2))
    drawn = np.concatenate([client.replicates for client in by_client.values()], axis=1).mean(axis=1)
    _band(axes, times, drawn, ci_prob)
    fine = np.linspace(0, times[-1], 10 * _TIMES)
    axes.step(fine, kaplan_meier(values, event, fine), where="post", color="black", lw=1, label="Kaplan-Meier")
    axes.set(xlabel=_fit.short(what), ylabel="P(no event)", ylim=(0, 1), xlim=(0, times[-1]))


def _band(axes: Any, x: Array, drawn: Array, ci_prob: float) -> None:
    low, high = np.quantile(drawn, interval(ci_prob), axis=0)
    axes.fill_between(x, low, high, color="C0", alpha=0.25, lw=0)
    axes.plot(x, drawn.mean(axis=0), color="C0", label=_label(ci_prob))


def _by_client(axes: Any, fit: Any, by_client: dict[str, _Outcomes], times: Array, ci_prob: float, label: str) -> None:
    middle = len(times) // 2
    for place, (values, replicates, event) in enumerate(by_client.values()):
        drawn = replicates.mean(axis=1) if event is None else replicates[..., middle].mean(axis=1)
        low, high = np.quantile(drawn, interval(ci_prob))
        axes.hlines(place, low, high, color="C0", lw=2)
        axes.plot(drawn.mean(), place, "o", color="C0", mec="white", ms=5)
        observed = values.mean() if event is None else kaplan_meier(values, event, times[[middle]])[0]
        axes.plot(observed, place, "x", color="black", ms=5)
    _fit.client_lines(axes, [f"{name} ({fit.clients[name].brought})" for name in by_client])
    axes.set_xlabel(_fit.short(label, 48) + (f" at {times[middle]:.3g}" if len(times) else ""))
    _fit.few_ticks(axes)


def _label(ci_prob: float) -> str:
    return f"predicted, {100 * ci_prob:.3g} %"


# Whether the transforms of simulation-based calibration are uniform ---------------------------------------------------


def calibration(found: Any, *, ax: Any = None, figsize: Size = None) -> Any:
    r"""Draw the distribution function of the transforms less the uniform one, with its simultaneous 95 % band.

    .. math:: D_i(x) = \frac{1}{T} \sum_{t=1}^{T} [u_{ti} \le x] - x

    with the transforms u of row i in T data sets; the band is the 95 % quantile of ``max |D_i|``.

    Parameters
    ----------
    found
        Result of `fedppl.calibrate`. Of more than ten rows only those that leave the band are named.
    ax, figsize
        As in all of `fedppl.plots`.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    DeclarationError
        For what is no such result.

    Examples
    --------
    >>> import fedppl, xarray
    >>> u = (np.arange(40)[:, None] + 0.5) / 40  # in place of fedppl.calibrate(...)
    >>> found = xarray.Dataset({"pit": (("data_set", "rows"), u)}, {"rows": ["mu"]})
    >>> axes = fedppl.plots.calibration(found)
    >>> [text.get_text() for text in axes.get_legend().get_texts()]
    ['mu', '95 % band']

    Notes
    -----
    *When this fails.* The band is for one row: of twenty rows one leaves it by chance; ``p_adjusted`` of
    `fedppl.calibrate` is for all. Few data sets have a wide band, which hides faults. Data sets without a posterior are
    left out. The band is that of the row with the fewest data sets.
    """
    if "pit" not in getattr(found, "data_vars", ()):
        raise DeclarationError(f"found={shown(found)} is not what fedppl.calibrate returned.")
    axes = _fit.panels(ax, 1, 1, (6.4, 4.8), figsize)[0]
    pit = found["pit"]
    transforms = {str(row): np.sort(pit.sel(rows=row).dropna("data_set").values) for row in found["rows"].values}
    half = stats.kstwo.ppf(0.95, max(min(map(len, transforms.values()), default=1), 1))
    few = len(transforms) <= _fit.LEGEND
    outside = [label for label, u in transforms.items() if len(u) and stats.kstest(u, "uniform").statistic > half]
    named = list(transforms) if few else outside[: _fit.LEGEND]
    for label, u in transforms.items():
        style = {"label": _fit.short(label, 40)} if label in named else {"color": _fit.GREY, "lw": 0.6}
        axes.step(u, np.arange(1, len(u) + 1) / len(u) - u, where="post", **style)
    axes.axhspan(-half, half, color="C0", alpha=0.2, lw=0, label="95 % band")
    if not few:
        count = f"{len(transforms) - len(named)} {'others' if named else 'rows'}"
        axes.plot([], [], color=_fit.GREY, lw=0.6, label=count)
    axes.set(xlabel="probability integral transform", ylabel="distribution function less the uniform", xlim=(0, 1))
    _fit.legend(axes, 3)
    return axes


# The reliability diagram of `fedppl.metrics` --------------------------------------------------------------------------


def reliability(
    probabilities: Any, outcomes: Any = None, *, bins: int = 15, ax: Any = None, figsize: Size = None
) -> Any:
    r"""Draw the accuracy of predictions against their confidence, and the distribution of the confidence.

    The bins, and the expected calibration error in the title, are those of `fedppl.metrics`:

    .. math:: \mathrm{ECE} = \sum_b \frac{n_b}{n}\, |\mathrm{accuracy}_b - \mathrm{confidence}_b|

    Parameters
    ----------
    probabilities, outcomes, bins
        As in `fedppl.metrics.reliability`; of two classes also the probability of the second alone, (n,). Or the
        result of `fedppl.reliability` alone, whose tenths of the probability of a one are drawn against the share of
        ones.
    ax, figsize
        As in all of `fedppl.plots`.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes

    Raises
    ------
    DataError
        For probabilities that are none, labels that are no classes, or no rows; for `bins` below 1 or not whole.
    DeclarationError
        For what is no result of `fedppl.reliability` where there are no outcomes.

    Examples
    --------
    >>> import fedppl
    >>> axes = fedppl.plots.reliability([0.1, 0.2, 0.7, 0.6], [0, 1, 1, 1], bins=5)
    >>> axes[0].get_title()
    'ECE 0.250'

    Notes
    -----
    *When this fails.* Confidence is the probability of the predicted class, whichever that is: a model that is too
    confident of one class and too little of another can look right. Bars of few rows are mostly noise. A bin without
    rows has no bar; one in which no row was right has none either, but a dot.
    """
    if outcomes is None:
        return _by_tenths(probabilities, ax, figsize)
    probability = np.asarray(probabilities, dtype=float)
    if probability.ndim == 1:
        probability = np.column_stack([1.0 - probability, probability])
    outcomes = np.asarray(outcomes)
    outcomes = outcomes.astype(int) if outcomes.dtype == bool else outcomes
    bars = metrics.reliability(probability, outcomes, bins=bins)
    upper, lower = both = _fit.panels(ax, 2, 1, (4.0, 6.0), figsize, sharex=True)
    middle, width = (bars.edges[1:] + bars.edges[:-1]) / 2, 1.0 / bins
    upper.bar(middle, np.nan_to_num(bars.accuracy), width=width, edgecolor="white", label="accuracy")
    upper.plot([0, 1], [0, 1], color="0.4", linestyle="--", linewidth=1)
    upper.plot(bars.confidence, bars.accuracy, ".", color="black", clip_on=False)
    ece = metrics.expected_calibration_error(probability, outcomes, bins=bins)
    upper.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1), title=f"ECE {ece:.3f}")
    lower.bar(middle, bars.rows / bars.rows.sum(), width=width, edgecolor="white")
    lower.axvline(metrics.accuracy(probability, outcomes), color="C1", label="accuracy")
    lower.axvline(float(probability.max(axis=1).mean()), color="black", linestyle="--", label="mean confidence")
    lower.set(xlabel="confidence", ylabel="share of rows")
    lower.legend(frameon=False, fontsize=8)
    return both


def _by_tenths(found: Any, ax: Any, figsize: Size) -> Any:
    """Shares of ones against mean probabilities, and rows, by tenths."""
    if not hasattr(found, "log_score"):
        remedy = "pass it with outcomes=, or what fedppl.reliability(fit) returned"
        raise DeclarationError(f"probabilities={shown(found)} come without outcomes; {remedy}.")
    table = found.bins[found.bins["rows"] > 0]
    upper, lower = both = _fit.panels(ax, 2, 1, (4.0, 6.0), figsize, sharex=True)
    upper.plot([0, 1], [0, 1], color="0.4", linestyle="--", linewidth=1)
    upper.plot(table["predicted"], table["observed"], ".-", color="C0", clip_on=False)
    upper.set(ylabel="share of ones", xlim=(0, 1), ylim=(0, 1), title=f"Brier score {found.brier:.3f}")
    lower.bar((table["low"] + table["high"]) / 2, table["rows"] / found.rows, width=0.1, edgecolor="white")
    lower.set(xlabel="predicted probability", ylabel="share of rows")
    return both


# A curve with its interval --------------------------------------------------------------------------------------------


def curves(
    predicted: Any, inputs: Any, *, observed: tuple[Any, Any] | None = None, ax: Any = None, figsize: Size = None
) -> Any:
    """Draw predicted outputs with their interval.

    Parameters
    ----------
    predicted
        A dataset of predictions: ``mean``, ``ci_low`` and ``ci_high``, dim row.
    inputs
        The inputs of these rows, (n,), or a mapping with one array.
    observed
        Inputs and outputs to draw as points, two arrays of one length.
    ax, figsize
        As in all of `fedppl.plots`.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    DeclarationError
        For what is no prediction.
    DataError
        If inputs are of several dimensions or not of as many rows, or `observed` has not one output for each input.

    Examples
    --------
    >>> import fedppl, xarray
    >>> hours = np.array([2.0, 0.0, 1.0])
    >>> values = {"mean": hours**2, "ci_low": hours**2 - 1, "ci_high": hours**2 + 1}  # in place of a prediction
    >>> predicted = xarray.Dataset({name: ("row", value) for name, value in values.items()})
    >>> axes = fedppl.plots.curves(predicted, {"hours": hours}, observed=([0.5], [0.2]))
    >>> axes.get_xlabel()
    'hours'

    Notes
    -----
    *When this fails.* Only the number of inputs is checked. Between inputs lines are straight. The interval is that of
    each output by itself, and a whole curve leaves it more often.
    """
    if not {"mean", "ci_low", "ci_high"} <= set(getattr(predicted, "data_vars", ())):
        raise DeclarationError(f"predicted={shown(predicted)} is no dataset with mean, ci_low and ci_high.")
    x, label = _abscissa(inputs)
    mean = np.asarray(predicted["mean"].values, dtype=float)
    if x.shape != mean.shape:
        raise DataError(f"inputs have {len(x)} rows, the prediction {len(mean)}; pass the inputs it was made for.")
    axes = _fit.panels(ax, 1, 1, (6.0, 3.6), figsize)[0]
    order = np.argsort(x, kind="stable")
    low, high = (np.asarray(predicted[end].values, dtype=float)[order] for end in ("ci_low", "ci_high"))
    share = f"{predicted.attrs['ci_prob']:.0%} " if "ci_prob" in predicted.attrs else ""
    axes.fill_between(x[order], low, high, color="C0", alpha=0.2, lw=0, label=f"{share}interval")
    axes.plot(x[order], mean[order], color="C0", label="mean")
    if observed is not None:
        points, y = (np.ravel(np.asarray(values, dtype=float)) for values in observed)
        if points.shape != y.shape:
            raise DataError(f"observed= has {len(points)} inputs and {len(y)} outputs; give one of each a row.")
        axes.plot(points, y, ".", color="black", ms=4, label="observed")
    axes.set(xlabel=label, ylabel=_fit.short(f"output of {predicted.attrs.get('client', 'the unit')}", 44))
    _fit.legend(axes, 3)
    return axes


def _abscissa(inputs: Any) -> tuple[Array, str]:
    named = inputs if hasattr(inputs, "keys") else {"input": inputs}
    if len(names := list(named.keys())) != 1:
        raise DataError(f"inputs are {names}; a curve is drawn over one.")
    x = np.asarray(named[names[0]], dtype=float)
    x = x[:, 0] if x.ndim == 2 and x.shape[1] == 1 else x
    if x.ndim != 1:
        raise DataError(f"inputs have shape {x.shape}; a curve is drawn over one dimension, (n,).")
    return x, _fit.short(names[0], 40)
