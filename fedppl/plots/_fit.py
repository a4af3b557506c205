"""The parts of a fit that pictures read; the edge to matplotlib. `fedppl.Fit` stands above, so that it can draw."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from fedppl import contracts
from fedppl.contracts.printed import entries_of, labels_of, shown_by_default
from fedppl.settings import a_fit, shown
from fedppl.types import Array, DeclarationError, NotConvergedError

Names = Sequence[str] | str | None  # one, several, or all
Size = tuple[float, float] | None  # inches


class Entry(NamedTuple):
    """One number of a variable."""

    name: str
    place: tuple[int, ...]
    label: str  # name[coordinates]
    flat: int  # place in the flat array


def require_by_client(fit: Any) -> Any:
    """The table of rounds, or an error where there are none, or no entries for single clients, as of very many."""
    a_fit(fit)
    if not fit.records:
        raise DeclarationError("this fit has no rounds to draw.")
    table = fit.idata["rounds"]
    if "outcome" not in table:
        raise DeclarationError(f'{len(fit.client_ids)} clients have no entry for each; see fit.idata["rounds"].')
    return table


def at_hand(fit: Any) -> list[str]:
    """Clients with data in this process, or with draws from a file."""
    return [*fit.clients, *(name for name in fit.drawn or {} if name not in fit.clients)]


def shared_draws(fit: Any) -> Any:
    """Group posterior of the shared variables, or an error with the reason why there is none."""
    if "posterior" not in fit.idata:
        _ = fit.posterior  # raises the error with what there is in its place
        raise NotConvergedError("this fit has no posterior of the shared variables.")
    return fit.idata["posterior"]


def entries(group: Any, places: Mapping[str, Sequence[int]] | Sequence[str]) -> list[Entry]:
    """Entries of some variables of a group of draws with their labels: all of each, or those at places."""
    every = []
    for name in places:
        labels = labels_of(group[name])
        indices = list(np.ndindex(*group[name].transpose("chain", "draw", ...).shape[2:]))
        wanted = places[name] if isinstance(places, Mapping) else range(len(labels))
        every += [Entry(name, indices[flat], labels[flat], flat) for flat in wanted]
    return every


def draws_of(group: Any, entry: Entry) -> Array:
    """All draws of one entry, (S,)."""
    draws = np.asarray(group[entry.name].transpose("chain", "draw", ...).values, dtype=float)
    return draws.reshape(draws.shape[0] * draws.shape[1], -1)[:, entry.flat]


def coordinate_names(fit: Any) -> list[str]:
    """Names of all coordinates of the flat vector for a reader: "log tau[dose]" for ``tau_log__[dose]``."""
    labels = iter(contracts.coordinate_names(fit.layout, fit.reader))
    return [
        f"log {label.replace('_log__', '', 1)}" if variable.transform == "log" else label
        for variable in fit.layout.variables
        for label in (next(labels) for _ in range(variable.size))
    ]


def coordinates(fit: Any, var_names: Any) -> list[int]:
    """Places of some shared variables in the flat vector."""
    slices, group = fit.layout.slices, shared_draws(fit)
    shared = xr.Dataset({name: group[name] for name in slices})  # of a tree one at a time
    default = shown_by_default(fit.declaration, slices)
    flat: list[int] = []
    for name, places in entries_of(shared, var_names, "the shared variables", default).items():
        every = range(slices[name].start, slices[name].stop)
        # A simplex has fewer coordinates than entries.
        flat += [every[place] for place in places] if len(every) == shared[name][0, 0].size else every
    return flat


# The edge to matplotlib: figures, axes and readable labels. It is imported when something is drawn --------------------

GREY = "0.45"
LEGEND = 10  # entries at most
_LONGEST = 26  # characters of a client's name
_LINE = 0.24  # inches of a client
TALLEST = 40.0  # inches of a figure
_LEAST_LINE = 0.15  # inches of a client, below which some names are left out
_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": "small", "borderaxespad": 0.2}
_LEGEND |= {"handletextpad": 0.4, "columnspacing": 1.0}
_figure: ContextVar[Callable[..., Any] | None] = ContextVar("figure", default=None)


def matplotlib(module: str) -> Any:
    """Module of matplotlib, or an error that names the extra."""
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ModuleNotFoundError(
            "pictures need matplotlib, which is not installed: pip install 'fedppl[plots]'", name="matplotlib"
        ) from error


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Make figures for files, without pyplot: they have no window and need not be closed."""
    token = _figure.set(matplotlib("figure").Figure)
    try:
        yield
    finally:
        _figure.reset(token)


def panels(
    ax: Any,
    rows: int,
    columns: int,
    size: tuple[float, float],
    figsize: Any = None,
    *,
    count: int = 0,
    layout: str = "constrained",
    **options: Any,
) -> Any:
    """An array of so many axes: those given, or those of a new figure, of which the last ones may stay empty."""
    count = count or rows * columns
    if ax is not None:
        axes = np.ravel(np.asarray(ax, dtype=object))
        if len(axes) != count or not all(hasattr(panel, "get_xaxis") for panel in axes):
            raise DeclarationError(f"ax={shown(ax)} must be matplotlib axes, {count} here; or None for a new figure.")
        return axes
    make = _figure.get() or matplotlib("pyplot").figure
    figure = make(figsize=size if figsize is None else figsize, layout=layout)
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel()
    for empty in axes[count:]:
        empty.set_axis_off()
    return axes[:count]


def height(clients: int) -> float:
    """Inches of a figure with a line a client."""
    return min(_LINE * clients + 1.5, TALLEST)


def short(name: Any, longest: int = _LONGEST) -> str:
    """A name without its middle where it is long: clients often differ in their last characters alone.

    >>> short("the hospital of a very long name, ward 12")
    'the hospital o…me, ward 12'
    """
    text, half = " ".join(str(name).split()), longest // 2
    text = text if len(text) <= longest else f"{text[: half + 1]}…{text[-(longest - half - 2) :]}"
    return text.replace("$", r"\$")  # which would begin a formula of matplotlib


def client_lines(axes: Any, clients: Sequence[Any], *, labelled: bool = True) -> None:
    """A line for each client from the top down, with its name; where room is short only some are named."""
    names = [short(client) for client in clients]
    axes.set_ylim(len(names) - 0.5, -0.5)
    places = places_of(axes, len(names), vertical=True)
    axes.set_yticks(places, [names[k] for k in places])
    axes.tick_params(axis="y", labelleft=labelled, length=0 if len(places) == len(names) else 3)
    if len(places) < len(names) and labelled:
        axes.set_ylabel(f"clients, 1 in {places[1] - places[0]} named")


def legend(axes: Any, columns: int = 2, handles: Sequence[Any] = ()) -> None:
    """A legend above one panel, where it has labels."""
    labelled = list(handles) or axes.get_legend_handles_labels()[0]
    if labelled:
        axes.legend(handles=labelled, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, **_LEGEND)


def legend_of_all(axes: Sequence[Any], given: Any) -> None:
    """One legend for a row of panels: above a new figure, or above the first panel of given axes."""
    handles, figure = axes[0].get_legend_handles_labels()[0], axes[0].figure
    if given is not None:
        legend(axes[0])
    elif handles:
        widest = max(len(handle.get_label()) for handle in handles)
        columns = max(1, min(len(handles), int(figure.get_figwidth() / (0.5 + 0.075 * widest))))
        figure.legend(handles=handles, loc="outside upper left", ncols=columns, **_LEGEND)


def few_ticks(axes: Any, **options: Any) -> None:
    """Few numbers along the horizontal axis, which do not overlap."""
    axes.xaxis.set_major_locator(matplotlib("ticker").MaxNLocator(nbins=4, **options))


def log_ticks(axes: Any, low: float, high: float) -> None:
    """Numbers along a logarithmic horizontal axis: those between powers of ten where there are few of these."""
    ticker, few = matplotlib("ticker"), high < 300 * low
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 3.0) if few else (1.0,), numticks=5))
    axes.xaxis.set_major_formatter(
        ticker.FuncFormatter(lambda x, _: f"{x:g}") if few else ticker.LogFormatterMathtext()
    )
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())


def places_of(axes: Any, count: int, *, vertical: bool) -> list[int]:
    """Places of names along an axis: of all, or of every so many where room is short."""
    box = axes.get_window_extent()
    inches = (box.height if vertical else box.width) / axes.figure.dpi
    return list(range(0, count, max(1, math.ceil(_LEAST_LINE * count / max(inches, 0.1)))))
