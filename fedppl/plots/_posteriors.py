"""Posteriors: of clients' own variables beside each other, and of shared variables beside their prior."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl import gaussian
from fedppl.contracts.printed import CI_PROB, entries_of, interval, shown_by_default
from fedppl.numerics.streams import stream
from fedppl.plots import _fit
from fedppl.plots._fit import Entry, Names, Size, at_hand, draws_of, entries, shared_draws
from fedppl.settings import a_fit, between, chosen, flag, shown, whole
from fedppl.types import Array, DeclarationError

_MOST_PANELS = 12
_INNER = 0.5


class _Settings(NamedTuple):
    ci_prob: float
    total: bool
    exponentiate: bool
    draws: Mapping[str, Any]  # keywords of `Fit.client`


class Estimates(NamedTuple):
    """One entry of several posteriors, (K,): the middle is the mean, or the median where draws are exponentiated."""

    middle: Array
    low: Array
    high: Array
    left: Array  # of the central half
    right: Array


def forest(
    fit: Any,
    var_names: Names = None,
    *,
    coords: Mapping[str, Any] | None = None,
    clients: Names = None,
    population: str | float | Mapping[str, str | float] | None = None,
    total: bool = False,
    exponentiate: bool = False,
    alone: Any | None = None,
    numbers: bool | None = None,
    ci_prob: float = CI_PROB,
    draws: int = 250,
    chains: int = 4,
    random_seed: int | None = None,
    ax: Any = None,
    figsize: Size = None,
) -> Any:
    """Draw every client's posterior of its own variables, one panel for each number.

    A dot is the posterior mean, the thick line the central half and the thin line the interval.

    Parameters
    ----------
    fit
        A `fedppl.Fit` whose clients are in this process, or that was loaded with draws of their posteriors.
    var_names
        Variables of a client's posterior, deterministics among them, or entries as they are printed; by default its
        local ones. With `total` coefficients of a formula, by default those that vary by client.
    coords
        Labels to show, by dim: ``{"predictor": "dose"}``.
    population
        A level to compare clients with: a number, or the name of a shared variable of the same shape, drawn with its
        interval; by variable where there are several. By default the clients' mean, of a total the shared coefficient.
    total
        Whether to draw, of a formula, each client's own coefficient: the shared one plus the client's effect.
    exponentiate
        Whether to draw exp of all entries on a log axis, with medians: odds, rate, hazard or time ratios of a formula.
    alone
        A fit of the same clients by `fedppl.one_shot.Separate`, for the distance of each estimate from that of the
        client alone. Of a formula totals are compared, since each client alone has coefficients of its own.
    numbers
        Whether estimates and intervals stand at the right; by default where there is one panel.
    clients, ci_prob, draws, chains, random_seed, ax, figsize
        As in all of `fedppl.plots`.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes

    Raises
    ------
    DeclarationError
        If no client is in this process, or there are more than 12 panels.

    Examples
    --------
    >>> import fedppl
    >>> fit = fedppl.fit(*fedppl.testing.normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> axes = fedppl.plots.forest(fit, "theta", population="mu")
    >>> axes[0].get_xlabel()
    'theta'

    Notes
    -----
    *When this fails.* Two intervals may overlap although their clients differ: compare two by `fedppl.contrast`.
    """
    a_fit(fit)
    if not at_hand(fit):
        raise DeclarationError("no clients are here: use fedppl.load(path, model, clients=...); sites draw their own.")
    names = chosen("clients", clients, at_hand(fit), "the clients whose posteriors are here")
    drawing = {"draws": draws, "chains": chains, "random_seed": random_seed}
    ci_prob, total = between("ci_prob", ci_prob, 0, 1), flag("total", total)
    settings = _Settings(ci_prob, total, flag("exponentiate", exponentiate), drawing)
    formula = _formula_of(fit, settings, alone, names)
    groups = {name: _posterior(fit, name, settings) for name in names}
    shown_entries = _entries(fit, groups, var_names, coords, settings)
    others = {} if alone is None else {name: _posterior(alone, name, settings) for name in names}
    if population is None and total:
        population = {entry.name: entry.name for entry in shown_entries}
    levels = _levels(fit, shown_entries, population, settings)
    numbers = (len(shown_entries) == 1 and ax is None) if numbers is None else flag("numbers", numbers)
    rows = -(-len(shown_entries) // 4)
    columns = -(-len(shown_entries) // rows)
    size = (2.2 + (4.6 if numbers else 2.8) * columns, min(_fit.height(len(names)) * rows, 60.0))
    axes = _fit.panels(ax, rows, columns, size, figsize, count=len(shown_entries), sharey="row")
    labels = [f"{k} ({fit.clients[k].brought})" if k in fit.clients else k for k in names]
    for number, (panel, entry, level) in enumerate(zip(axes, shown_entries, levels, strict=True)):
        drawn = [_estimates(group.values(), entry, settings) for group in (groups, others) if group]
        _draw(panel, level, f"posterior, {100 * ci_prob:.3g} % and half", *drawn)
        _fit.client_lines(panel, labels, labelled=number % columns == 0 or ax is not None)
        if numbers:
            _numbers(panel, drawn[0])
        what = f"{formula.effect(entry.name, exponentiate=exponentiate)}, " if formula else "exp of " * exponentiate
        panel.set_xlabel(_fit.short(what + entry.label, 48))
        if exponentiate:
            _ratios(panel, min(each.low.min() for each in drawn), max(each.high.max() for each in drawn))
        else:
            _fit.few_ticks(panel)
    _fit.legend_of_all(axes, ax)
    return axes


def default_names(fit: Any, groups: Mapping[str, Any]) -> list[str]:
    """A client's own variables of equal shapes at all clients, as many as there are panels for."""
    first = next(iter(groups.values()))
    client = next(iter(fit.clients.values()), None)
    shared = {*fit.layout.slices, *(fit.idata["posterior"].data_vars if "posterior" in fit.idata else ())}
    drawn = [str(name) for name in first.data_vars if name not in shared]
    local = drawn if client is None else [_effects(first, variable.name) for variable in client.local]
    own = local if fit.algorithm.result.shared is not None else [*fit.layout.slices, *local]
    names: list[str] = []
    for name in own:
        alike = all(name in group and group[name].shape == first[name].shape for group in groups.values())
        if alike and len(entries(first, [*names, name])) <= _MOST_PANELS:
            names.append(name)
    return names


def _effects(group: Any, name: str) -> str:
    """Name of a formula's effects, in place of the same before scaling."""
    scaled = f"{name.removesuffix('_z')}_effects"
    return scaled if name.endswith("_z") and scaled in group else name


def _formula_of(fit: Any, settings: _Settings, alone: Any | None, names: Sequence[str]) -> Any:
    """The formula whose totals are drawn, if any; refuses clients alone that are not comparable."""
    builder = fit.declaration.builder
    is_formula = hasattr(builder, "totals")
    if settings.total and not is_formula:
        raise DeclarationError("total=True adds up a formula's coefficients; of a builder draw a pm.Deterministic.")
    if alone is not None and is_formula and not settings.total:
        raise DeclarationError("alone= has no shared coefficients, to which effects are relative; write total=True.")
    if alone is not None:
        a_fit(alone)
        if lost := [name for name in names if name not in at_hand(alone)]:
            raise DeclarationError(f"alone= is a fit without the clients {lost[:5]}; fit the same ones.")
    return builder if settings.total else None


def _entries(
    fit: Any, groups: Mapping[str, Any], var_names: Any, coords: Mapping[str, Any] | None, settings: _Settings
) -> list[Entry]:
    first = next(iter(groups.values()))
    if settings.total:
        varying = fit.declaration.builder.varying
        places = entries_of(first, var_names, "the coefficients", varying)
        if fixed := [name for name in places if name not in varying]:
            raise DeclarationError(f"total=True: {fixed} have no effects by client; choose some of {varying}.")
    else:
        default = default_names(fit, groups) if var_names is None else None
        places = entries_of(first, var_names, "the variables of a client's posterior", default)
    names = list(places)
    if not names:
        raise DeclarationError("no local variable has the same few entries at all clients; choose some by var_names=.")
    for (client_id, group), name in itertools.product(groups.items(), names):
        if name not in group or group[name].shape != first[name].shape:
            raise DeclarationError(f"{name!r} has other entries at client {client_id!r}; choose some that all have.")
    labels_by_dim = {
        dim: {str(label) for label in np.ravel(np.asarray(labels, dtype=object))}
        for dim, labels in (coords or {}).items()
    }
    if unknown := sorted(set(labels_by_dim) - {str(dim) for name in names for dim in first[name].dims}):
        raise DeclarationError(f"coords= names {unknown}, which are dims of none of {names}.")
    chosen_entries = [entry for entry in entries(first, places) if _has(first[entry.name], entry, labels_by_dim)]
    if not 0 < len(chosen_entries) <= _MOST_PANELS:
        raise DeclarationError(f"{names} have {len(chosen_entries)} numbers; choose 1 to {_MOST_PANELS} by coords=.")
    return chosen_entries


def _has(values: Any, entry: Entry, labels: Mapping[str, set[str]]) -> bool:
    dims = [dim for dim in values.dims if dim not in ("chain", "draw")]
    places = [(dim, place) for dim, place in zip(dims, entry.place, strict=True) if dim in labels]
    return all(str(values[dim].values[place]) in labels[dim] for dim, place in places)


def _estimates(groups: Iterable[Any], entry: Entry, settings: _Settings) -> Estimates:
    each = [np.exp(draws) if settings.exponentiate else draws for draws in (draws_of(group, entry) for group in groups)]
    tails = [*interval(settings.ci_prob), *interval(_INNER), 0.5]
    low, high, left, right, median = np.transpose([np.quantile(draws, tails) for draws in each])
    middle = median if settings.exponentiate else np.array([draws.mean() for draws in each])
    return Estimates(middle, low, high, left, right)


def _levels(
    fit: Any, shown_entries: Sequence[Entry], population: Any, settings: _Settings
) -> list[tuple[str, Estimates] | None]:
    """The level that every entry is compared with, by panel; None for the clients' mean."""
    names = list(dict.fromkeys(entry.name for entry in shown_entries))
    by_name = population if isinstance(population, Mapping) else dict.fromkeys(names, population)
    if unknown := sorted(set(by_name) - set(names)):
        raise DeclarationError(f"population= names {unknown}, which are not among the variables shown, {names}.")
    return [_level_of(fit, entry, by_name.get(entry.name), settings) for entry in shown_entries]


def _level_of(fit: Any, entry: Entry, value: Any, settings: _Settings) -> tuple[str, Estimates] | None:
    if value is None:
        return None
    if isinstance(value, int | float | np.number) and not isinstance(value, bool):
        return f"{value:g}", Estimates(*[np.array([value], dtype=float)] * 5)
    group = shared_draws(fit)
    by_place = {}
    if isinstance(value, str):
        chosen("population", value, [str(name) for name in group.data_vars], "the shared variables")
        by_place = {shared.place: shared for shared in entries(group, [value])}
    shared = by_place.get(entry.place) or by_place.get(())
    if shared is None:
        raise DeclarationError(
            f"population={shown(value)} has no entry for {entry.label!r}; name a shared variable of its shape or ()."
        )
    return value, _estimates([group], shared, settings)


def _draw(
    axes: Any, level: tuple[str, Estimates] | None, label: str, together: Estimates, alone: Estimates | None = None
) -> None:
    """Clients' estimates beside a level; a little below those of clients alone, with lines from one to the other."""
    places = np.arange(len(together.middle))
    if level is None:
        axes.axvline(together.middle.mean(), color=_fit.GREY, ls="--", lw=1, label="mean of the clients' means")
    else:
        name, shared = level
        axes.axvline(shared.middle[0], color="black", lw=1, label=_fit.short(f"population, {name}", 40))
        if shared.low[0] < shared.high[0]:
            axes.axvspan(shared.low[0], shared.high[0], color="black", alpha=0.1, lw=0)
    axes.hlines(places, together.low, together.high, color="C0", lw=1)
    axes.hlines(places, together.left, together.right, color="C0", lw=3)
    axes.plot(together.middle, places, "o", color="C0", ms=5, mec="white", label=label)
    if alone is not None:
        below = places + 0.28
        axes.hlines(below, alone.low, alone.high, color="C1", lw=0.8)
        axes.plot([alone.middle, together.middle], [below, places], color="C1", lw=0.8, ls=":")
        axes.plot(alone.middle, below, "o", color="C1", mfc="white", ms=4, label="alone, without the others")


def _numbers(axes: Any, clients: Estimates) -> None:
    for place in map(int, axes.get_yticks()):
        text = f"{clients.middle[place]:.2f} ({clients.low[place]:.2f} to {clients.high[place]:.2f})"
        axes.text(1.02, place, text, transform=axes.get_yaxis_transform(), va="center", fontsize="small")


def _ratios(axes: Any, low: float, high: float) -> None:
    """A logarithmic axis with a line at the ratio of no effect."""
    axes.set(xscale="log", xlim=(low * (low / high) ** 0.05, high * (high / low) ** 0.05))
    if low < 1.0 < high:
        axes.axvline(1.0, color=_fit.GREY, linestyle=":", lw=1)
    _fit.log_ticks(axes, low, high)


def _posterior(fit: Any, name: str, settings: _Settings) -> Any:
    """A client's posterior, drawn where its data are, or from a file."""
    group = fit.client(name, **settings.draws if name in fit.clients else {})["posterior"]
    return fit.declaration.builder.totals(group) if settings.total else group


# Shared variables before and after the data ---------------------------------------------------------------------------

_MOST_DENSITIES = 24  # panels
_DRAWS = 4000
_GRID = 300
_POSITIVE = ("log", "log_exp_m1")
_BOUNDS = {"": (-np.inf, np.inf), **dict.fromkeys(_POSITIVE, (0.0, np.inf)), "logodds": (0.0, 1.0)}  # by transform
_NEAR_ZERO = 0.25  # of the width of kernels elsewhere


def prior_posterior(
    fit: Any, var_names: Names = None, *, random_seed: int | None = None, ax: Any = None, figsize: Size = None
) -> Any:
    """Draw the densities of shared variables before and after the data, one panel for each number.

    Parameters
    ----------
    fit
        A `fedppl.Fit` with a posterior of the shared variables.
    var_names
        Shared variables, deterministics among them; by default all, but correlations for a formula's partial ones.
    random_seed
        Seed of the draws of the prior; by default the fit's.
    ax, figsize
        As in all of `fedppl.plots`.

    Returns
    -------
    numpy.ndarray of matplotlib.axes.Axes

    Raises
    ------
    DeclarationError
        If there are more than 24 panels, or the prior is not Gaussian and no client is here to draw from it.

    Examples
    --------
    >>> import fedppl
    >>> fit = fedppl.fit(*fedppl.testing.normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> axes = fedppl.plots.prior_posterior(fit, "mu")
    >>> axes[0].get_xlabel()
    'mu'

    Notes
    -----
    Kernel estimates from 4000 draws each, over seven times the posterior's range: a wide prior goes on beyond it.

    *When this fails.* Kernels smooth out sharp edges and narrow peaks. Where both densities are alike, data may still
    inform a sum or a difference of variables. A fit that has not converged is drawn as it is.
    """
    a_fit(fit)
    after = shared_draws(fit)
    default = shown_by_default(fit.declaration, after.data_vars)
    shown_entries = entries(after, entries_of(after, var_names, "the shared variables", default))
    if not 0 < len(shown_entries) <= _MOST_DENSITIES:
        raise DeclarationError(f"there are {len(shown_entries)} entries; choose 1 to {_MOST_DENSITIES} by var_names=.")
    seed = fit.seed if random_seed is None else whole("random_seed", random_seed, 0, "None takes the fit's")
    before = prior_draws(fit, seed)
    transforms = {variable.name: variable.transform or "" for variable in fit.layout.variables}
    columns = min(len(shown_entries), 3)
    rows = -(-len(shown_entries) // columns)
    axes = _fit.panels(ax, rows, columns, (3.3 * columns, 2.4 * rows + 0.5), figsize, count=len(shown_entries))
    for number, (panel, entry) in enumerate(zip(axes, shown_entries, strict=True)):
        old, new = before[entry.name].reshape(_DRAWS, -1)[:, entry.flat], draws_of(after, entry)
        transform = transforms.get(entry.name, "computed")
        both = np.concatenate([old, new])
        low, high = _BOUNDS.get(transform, (both.min(), both.max()))  # of correlations those of the draws
        x = np.linspace(*_window(old, new, low, high), _GRID + 1)[1:]  # without the bound
        prior, y = (density(draws, x, low, high, positive=transform in _POSITIVE) for draws in (old, new))
        panel.plot(x, prior, color=_fit.GREY, ls="--", label="prior")
        panel.plot(x, y, color="C0", label="posterior")
        panel.fill_between(x, 0, y, color="C0", alpha=0.15, lw=0)
        panel.set(xlabel=_fit.short(entry.label, 36), ylim=(0, None), yticks=[])
        panel.set_ylabel("density" if number % columns == 0 else "")
        _fit.few_ticks(panel)
    _fit.legend_of_all(axes, ax)
    return axes


def prior_draws(fit: Any, seed: int) -> dict[str, Array]:
    """Draws of the shared prior by name of a variable, (S, *shape)."""
    client = next(iter(fit.clients.values()), None)
    if fit.layout.prior_is_gaussian and not fit.layout.binary:
        phi = gaussian.draw(fit.layout.prior, stream((seed, 5)), _DRAWS)
    elif client is not None:
        phi = client.draw_prior(_DRAWS, seed % 2**32)
    else:
        raise DeclarationError("the prior is not Gaussian, and no client is here; use fedppl.load(..., clients=).")
    return {name: np.asarray(value, dtype=float) for name, value in fit.reader.constrain(phi).items()}


def density(draws: Array, x: Array, low: float = -np.inf, high: float = np.inf, *, positive: bool = False) -> Array:
    """A kernel estimate at x: of logs of positive draws, else with mass beyond a bound folded back.

    Near zero few draws have a log close to that of x, and the estimate there is of the draws themselves.
    """
    width = _width(draws)
    if width == 0:  # all are equal
        return np.zeros(len(x))
    if not positive:
        ends = [end for end in (low, high) if np.isfinite(end)]
        return np.where((x >= low) & (x <= high), _kernels(draws, x, width, ends), 0.0)
    log, near = np.log(draws), _NEAR_ZERO * width
    part = 1 / (1 + (_width(log) * x / near) ** 2)
    return part * _kernels(draws, x, near, [0.0]) + (1 - part) * _kernels(log, np.log(x), _width(log)) / x


def _kernels(draws: Array, x: Array, width: float, bounds: Sequence[float] = ()) -> Array:
    """Mean of Gaussians about the draws and their mirror images beyond bounds."""
    mirrored = [draws, *(2 * bound - draws for bound in bounds)]
    heights = sum(np.exp(-0.5 * ((x[:, None] - each) / width) ** 2).mean(axis=1) for each in mirrored)
    return np.asarray(heights / (width * np.sqrt(2 * np.pi)))


def _width(draws: Array) -> float:
    """Silverman's width of a kernel; zero where all draws are equal."""
    inner = np.subtract(*np.quantile(draws, [0.75, 0.25])) / 1.349
    spread = min((s for s in (float(np.std(draws)), float(inner)) if s > 0), default=0.0)
    return float(0.9 * spread * len(draws) ** -0.2)


def _window(old: Array, new: Array, low: float, high: float) -> tuple[float, float]:
    """The range of the posterior and three times as much on both sides, within the prior's range and bounds."""
    a, b = np.quantile(new, [0.001, 0.999])
    first, last = np.quantile(old, [0.001, 0.999])
    reach = 3 * max(b - a, 1e-12)
    left, right = max(a - reach, min(first, a - 0.1 * reach), low), min(b + reach, max(last, b + 0.1 * reach), high)
    return float(left), float(right)
