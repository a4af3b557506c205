"""Clients beside each other: each one's posterior of its own variables, and what it shrinks towards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl.contracts.update import CI_PROB, entries_of, interval
from fedppl.plots import _fit
from fedppl.plots._fit import Entry, Fitted, at_hand, draws_of, entries, require_fit, shared_draws
from fedppl.settings import between, chosen, flag, shown
from fedppl.types import Array, DeclarationError

MOST = 12  # panels
_INNER = 0.5


class How(NamedTuple):
    """What is drawn of clients' posteriors."""

    ci_prob: float
    total: bool
    exponentiate: bool


class Line(NamedTuple):
    """What is drawn of one number of one client; the middle is the mean, or the median of what is exponentiated."""

    mean: float
    outer: tuple[float, float]
    inner: tuple[float, float]


def forest(
    fit: Fitted,
    var_names: Sequence[str] | str | None = None,
    *,
    coords: Mapping[str, Any] | None = None,
    clients: Sequence[str] | str | None = None,
    population: str | float | Mapping[str, str | float] | None = None,
    total: bool = False,
    exponentiate: bool = False,
    alone: Fitted | None = None,
    numbers: bool | None = None,
    ci_prob: float = CI_PROB,
    draws: int = 250,
    chains: int = 4,
    random_seed: int | None = None,
    ax: Any = None,
    figsize: tuple[float, float] | None = None,
) -> Any:
    """Draw every client's posterior of its own variables, one panel for each number.

    A dot is the posterior mean, the thick line the central half and the thin line the interval.

    Parameters
    ----------
    fit
        A `fedppl.Fit` whose clients are in this process, where their posteriors are drawn; or one that was loaded with
        draws of them.
    var_names
        Variables of a client's posterior, deterministics among them, or entries as they are printed; by default its
        local ones. With `total` coefficients of a formula, by default those that vary by client.
    coords
        Labels to show, by dim: ``{"predictor": "dose"}``.
    clients
        Ids of clients; by default all in this process.
    population
        What clients are compared with: the name of a shared variable of the same shape, whose mean and interval are
        drawn across all clients, or a number; by name of a variable where there are several. By default the mean of the
        clients' means; of a total the coefficient that all share.
    total
        Whether to draw, of a formula, each client's own coefficient: what all share and the client's effect together,
        such as the effect of a treatment by hospital.
    exponentiate
        Whether to draw exp of all, on a logarithmic axis: odds, rate, hazard or time ratios of a formula, which the
        axis names. The dot is then the posterior median.
    alone
        A fit of the same clients by `fedppl.Separate`: how far each estimate has moved from what the client's data say
        without the others. Of a formula totals are compared, since each client alone has coefficients of its own.
    numbers
        Whether estimates and intervals stand at the right; by default where there is one panel.
    ci_prob
        Probability of the equal-tailed interval.
    draws, chains, random_seed
        Of posteriors that are drawn here, as in `Fit.client`.
    ax, figsize
        Matplotlib axes, one a panel; by default those of a new figure, of so many inches.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes

    Raises
    ------
    DeclarationError
        If no client is in this process, a name is unknown, or there are more than 12 panels.
    NotConvergedError
        Where the fit was broken off before there was a posterior.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> axes = fedppl.plots.forest(fit, "theta", population="mu")
    >>> axes[0].get_xlabel()
    'theta'

    Notes
    -----
    *When this fails.* An interval is of one client's variable. That two intervals overlap does not say that two clients
    agree: see `fedppl.contrast`.
    """
    require_fit(fit)
    if not at_hand(fit):
        raise DeclarationError(
            "no client's data and no draws of clients are here to be drawn: load a fit that was saved by "
            'fedppl.load(path, model, clients=...), or save it by fit.save(path, include="clients"). Clients that are '
            "sites of their own draw their posteriors there."
        )
    names = chosen("clients", clients, at_hand(fit), "the clients whose posteriors are here")
    how = How(between("ci_prob", ci_prob, 0, 1), flag("total", total), flag("exponentiate", exponentiate))
    formula = _formula_of(fit, how, alone)
    settings: dict[str, Any] = {"draws": draws, "chains": chains, "random_seed": random_seed}
    groups = {name: _posterior(fit, name, settings, how) for name in names}
    wanted = _entries(fit, groups, var_names, coords, how)
    lines = {name: [_line(draws_of(group, entry), how) for entry in wanted] for name, group in groups.items()}
    others: dict[str, list[Line]] = {}
    if alone is not None:
        require_fit(alone)
        if lost := [name for name in names if name not in at_hand(alone)]:
            raise DeclarationError(f"alone= is a fit without the clients {lost[:5]}; fit the same ones.")
        for name in names:
            group = _posterior(alone, name, settings, how)
            others[name] = [_line(draws_of(group, entry), how) for entry in wanted]
    if population is None and how.total:
        population = {entry.name: entry.name for entry in wanted}
    levels = _levels(fit, wanted, population, how)
    numbers = (len(wanted) == 1 and ax is None) if numbers is None else flag("numbers", numbers)
    tall, rows = _fit.height(len(names)), -(-len(wanted) // 4)
    columns = -(-len(wanted) // rows)
    size = (2.2 + (4.6 if numbers else 2.8) * columns, min(tall * rows, 60.0))
    axes = _fit.panels(ax, rows, columns, size, figsize, count=len(wanted), sharey="row")
    labels = [_fit.short(f"{k} ({fit.clients[k].brought})" if k in fit.clients else k) for k in names]
    for number, (one, entry) in enumerate(zip(axes, wanted, strict=True)):
        mine = [lines[name][number] for name in names]
        _level(one, levels[number], mine, first=number == 0)
        _draw(one, mine, "C0", f"posterior, {100 * ci_prob:.3g} % and half" if number == 0 else None)
        if others:
            _apart(one, [others[name][number] for name in names], mine, first=number == 0)
        _fit.client_lines(one, labels, labelled=number % columns == 0 or ax is not None)
        if numbers:
            _numbers(one, mine)
        what = f"{formula.effect(entry.name, exponentiate=exponentiate)}, " if formula else "exp of " * exponentiate
        one.set_xlabel(_fit.short(what + entry.label, 48))
        _ticks(one, [*mine, *(others[name][number] for name in others)], how)
    _fit.legend_of_all(axes, ax)
    return np.array(axes, dtype=object)


def default_names(fit: Fitted, groups: Mapping[str, Any]) -> list[str]:
    """Variables of a client's own whose shapes are equal at all clients, as many as there are panels for."""
    first = next(iter(groups.values()))
    client = next(iter(fit.clients.values()), None)
    shared = {*fit.layout.slices, *(fit.idata["posterior"].data_vars if "posterior" in fit.idata else ())}
    known = [str(name) for name in first.data_vars if name not in shared]
    local = known if client is None else [_effects(first, variable.name) for variable in client.local]
    own = local if fit.algorithm.result.shared is not None else [*fit.layout.slices, *local]
    kept: list[str] = []
    for name in own:
        alike = all(name in group and group[name].shape == first[name].shape for group in groups.values())
        if alike and len(entries(first, [*kept, name])) <= MOST:
            kept.append(name)
    return kept


def _effects(group: Any, name: str) -> str:
    """A formula's effects, in place of what they are before they are scaled."""
    scaled = f"{name.removesuffix('_z')}_effects"
    return scaled if name.endswith("_z") and scaled in group else name


def _formula_of(fit: Fitted, how: How, alone: Fitted | None) -> Any:
    """The formula whose coefficients are what is drawn: totals, and what each client says alone."""
    builder = fit.declaration.builder
    is_formula = hasattr(builder, "totals")
    if how.total and not is_formula:
        raise DeclarationError(
            "total=True adds up coefficients of a formula; of a builder name the sum in it, "
            'pm.Deterministic("total", ...), and draw that.'
        )
    if alone is not None and is_formula and not how.total:
        raise DeclarationError(
            "alone= compares effects that are counted from what all clients share with those of clients that share "
            "nothing, where they mean something else; write total=True, which adds up both."
        )
    return builder if how.total else None


def _entries(
    fit: Fitted, groups: Mapping[str, Any], var_names: Any, coords: Mapping[str, Any] | None, how: How
) -> list[Entry]:
    """The numbers to show, which all clients have."""
    first = next(iter(groups.values()))
    if how.total:
        varying = fit.declaration.builder.varying
        places = entries_of(first, var_names, "the coefficients", varying)
        if fixed := [name for name in places if name not in varying]:
            raise DeclarationError(
                f"total=True: {fixed} have no effects by client, and are the same at all; those that have some are "
                f"{varying}. Write (1 + {fixed[0]} | ...) for some."
            )
    else:
        default = default_names(fit, groups) if var_names is None else None
        places = entries_of(first, var_names, "the variables of a client's posterior", default)
    names = list(places)
    if not names:
        raise DeclarationError(
            "no local variable has the same few entries at all clients; choose some by var_names= and coords=."
        )
    for client_id, group in groups.items():
        for name in names:
            if name not in group or group[name].shape != first[name].shape:
                raise DeclarationError(
                    f"{name!r} has other entries at client {client_id!r} than at {next(iter(groups))!r}: there is no "
                    "panel for each; choose variables that all have alike."
                )
    kept = {
        dim: {str(labels)} if isinstance(labels, str) or not hasattr(labels, "__iter__") else {*map(str, labels)}
        for dim, labels in (coords or {}).items()
    }
    if unknown := sorted(set(kept) - {str(dim) for name in names for dim in first[name].dims}):
        raise DeclarationError(f"coords= names {unknown}, which are dims of none of {names}.")
    found = [entry for entry in entries(first, places) if _is_kept(first[entry.name], entry, kept)]
    if not 0 < len(found) <= MOST:
        raise DeclarationError(
            f"{len(found)} numbers of {names} were asked for; choose 1 to {MOST} by var_names= and coords=."
        )
    return found


def _is_kept(values: Any, entry: Entry, kept: Mapping[str, set[str]]) -> bool:
    dims = [dim for dim in values.dims if dim not in ("chain", "draw")]
    return all(
        str(values[dim].values[place]) in kept[dim] for dim, place in zip(dims, entry.place, strict=True) if dim in kept
    )


def _line(draws: Array, how: How) -> Line:
    draws = np.exp(draws) if how.exponentiate else draws
    tails = [*interval(how.ci_prob), *interval(_INNER), 0.5]
    low, high, left, right, median = (float(value) for value in np.quantile(draws, tails))
    return Line(median if how.exponentiate else float(draws.mean()), (low, high), (left, right))


def _levels(fit: Fitted, wanted: Sequence[Entry], population: Any, how: How) -> list[tuple[str, Line] | None]:
    """What every number is compared with, by panel; None for the clients' mean."""
    if population is None:
        return [None] * len(wanted)
    names = list(dict.fromkeys(entry.name for entry in wanted))
    given = population if isinstance(population, Mapping) else dict.fromkeys(names, population)
    if unknown := sorted(set(given) - set(names)):
        raise DeclarationError(f"population= names {unknown}, which are not among the variables shown, {names}.")
    return [_of(fit, entry, given[entry.name], how) if entry.name in given else None for entry in wanted]


def _of(fit: Fitted, entry: Entry, value: Any, how: How) -> tuple[str, Line]:
    if isinstance(value, int | float | np.number) and not isinstance(value, bool):
        return f"{value:g}", Line(float(value), (float(value),) * 2, (float(value),) * 2)
    group = shared_draws(fit)
    known = [str(name) for name in group.data_vars]
    name = chosen("population", value, known, "the shared variables")[0] if isinstance(value, str) else None
    of = {} if name is None else {one.place: one for one in entries(group, [name])}
    match = of.get(entry.place) or of.get(())
    if name is None or match is None:
        raise DeclarationError(
            f"population={shown(value)} has no entry for {entry.label!r}; name a shared variable of the same shape, or "
            "one that is a single number."
        )
    return name, _line(draws_of(group, match), how)


def _level(axes: Any, level: tuple[str, Line] | None, mine: Sequence[Line], *, first: bool) -> None:
    if level is None:
        label = "mean of the clients' means" if first else None
        axes.axvline(float(np.mean([line.mean for line in mine])), color=_fit.GREY, linestyle="--", lw=1, label=label)
        return
    name, line = level
    axes.axvline(line.mean, color="black", lw=1, label=_fit.short(f"population, {name}", 40) if first else None)
    if line.outer[0] < line.outer[1]:
        axes.axvspan(*line.outer, color="black", alpha=0.1, lw=0)


def _draw(axes: Any, lines: Sequence[Line], color: str, label: str | None) -> None:
    places = np.arange(len(lines))
    axes.hlines(places, [line.outer[0] for line in lines], [line.outer[1] for line in lines], color=color, lw=1)
    axes.hlines(places, [line.inner[0] for line in lines], [line.inner[1] for line in lines], color=color, lw=3)
    axes.plot([line.mean for line in lines], places, "o", color=color, ms=5, mec="white", label=label)


def _apart(axes: Any, others: Sequence[Line], mine: Sequence[Line], *, first: bool) -> None:
    """Estimates without the others, a little below, and how far they moved."""
    places = np.arange(len(others)) + 0.28
    axes.hlines(places, [line.outer[0] for line in others], [line.outer[1] for line in others], color="C1", lw=0.8)
    for place, other, own in zip(places, others, mine, strict=True):
        axes.plot([other.mean, own.mean], [place, place - 0.28], color="C1", lw=0.8, ls=":")
    label = "alone, without the others" if first else None
    axes.plot([line.mean for line in others], places, "o", color="C1", mfc="white", ms=4, label=label)


def _numbers(axes: Any, lines: Sequence[Line]) -> None:
    """Estimates and intervals, at the right of the lines that have a name."""
    for place in axes.get_yticks():
        line = lines[int(place)]
        text = f"{line.mean:.2f} ({line.outer[0]:.2f} to {line.outer[1]:.2f})"
        axes.text(1.02, place, text, transform=axes.get_yaxis_transform(), va="center", fontsize="small")


def _ticks(axes: Any, lines: Sequence[Line], how: How) -> None:
    if not how.exponentiate:
        _fit.few_ticks(axes)
        return
    low, high = min(line.outer[0] for line in lines), max(line.outer[1] for line in lines)
    axes.set(xscale="log", xlim=(low * (low / high) ** 0.05, high * (high / low) ** 0.05))
    if low < 1.0 < high:
        axes.axvline(1.0, color=_fit.GREY, linestyle=":", lw=1)  # a ratio of no effect
    _fit.log_ticks(axes, low, high)


def _posterior(fit: Fitted, name: str, settings: Mapping[str, Any], how: How) -> Any:
    """Drawn where the data are; or as a file had it."""
    found = fit.client(name, **settings if name in fit.clients else {})["posterior"]
    return fit.declaration.builder.totals(found) if how.total else found
