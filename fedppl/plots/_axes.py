"""The edge to matplotlib: figures and axes, and labels that stay readable. It is imported when something is drawn."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from fedppl.settings import shown
from fedppl.types import DeclarationError

GREY = "0.45"
LEGEND = 10  # entries at most
_LONGEST = 26  # characters of a client's name
_LINE = 0.24  # inches of a client
TALLEST = 40.0  # inches of a figure
_LEAST_LINE = 0.15  # inches, below which not every client has its name beside it
_LEGEND: dict[str, Any] = {
    "frameon": False,
    "fontsize": "small",
    "borderaxespad": 0.2,
    "handletextpad": 0.4,
    "columnspacing": 1.0,
}
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
    """Make figures that pyplot does not know, for files: no window, and nothing to close."""
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
) -> list[Any]:
    """So many axes: those that were given, or those of a new figure, of which the last ones may stay empty."""
    count = count or rows * columns
    if ax is not None:
        given = list(ax.flat) if hasattr(ax, "flat") else list(ax) if isinstance(ax, Iterable) else [ax]
        if len(given) != count or not all(hasattr(one, "get_xaxis") for one in given):
            raise DeclarationError(f"ax={shown(ax)} must be matplotlib axes, {count} here; or None for a new figure.")
        return given
    make = _figure.get() or matplotlib("pyplot").figure
    figure = make(figsize=size if figsize is None else figsize, layout=layout)
    found = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for empty in found[count:]:
        empty.set_axis_off()
    return found[:count]


def height(clients: int) -> float:
    """Inches of a figure with a line a client."""
    return min(_LINE * clients + 1.5, TALLEST)


def plain(text: Any) -> str:
    """A text that matplotlib takes as it is: one line, and dollars that begin no formula."""
    return " ".join(str(text).split()).replace("$", r"\$")


def short(name: Any, longest: int = _LONGEST) -> str:
    """A name without its middle where it is long: clients often differ in their last characters alone.

    >>> short("the hospital of a very long name, ward 12")
    'the hospital o…me, ward 12'
    """
    text = " ".join(str(name).split())
    half = longest // 2
    return plain(text if len(text) <= longest else f"{text[: half + 1]}…{text[-(longest - half - 2) :]}")


def client_lines(axes: Any, names: Sequence[str], *, labelled: bool = True) -> None:
    """A line for each client from the top down, with its name; every so many where there is no room for all."""
    axes.set_ylim(len(names) - 0.5, -0.5)
    places = _places(axes, len(names), vertical=True)
    axes.set_yticks(places, [names[k] for k in places])
    axes.tick_params(axis="y", labelleft=labelled, length=0 if len(places) == len(names) else 3)
    if len(places) < len(names) and labelled:
        axes.set_ylabel(f"clients, 1 in {places[1] - places[0]} named")


def client_columns(axes: Any, names: Sequence[str]) -> None:
    """The same from left to right."""
    places = _places(axes, len(names), vertical=False)
    axes.set_xticks(places, [names[k] for k in places], rotation=90)


def legend(axes: Any, columns: int = 2, handles: Sequence[Any] = ()) -> None:
    """A legend above one panel, where there is something to say."""
    known = list(handles) or axes.get_legend_handles_labels()[0]
    if known:
        axes.legend(handles=known, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, **_LEGEND)


def legend_of_all(axes: Sequence[Any], given: Any) -> None:
    """One legend for a row of panels: above a figure of ours, above the first panel of somebody else's."""
    handles = axes[0].get_legend_handles_labels()[0]
    if not handles:
        return
    if given is not None:
        legend(axes[0])
        return
    figure = axes[0].figure
    widest = max(len(handle.get_label()) for handle in handles)
    columns = max(1, min(len(handles), int(figure.get_figwidth() / (0.5 + 0.075 * widest))))
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, **_LEGEND)


def few_ticks(axes: Any, **options: Any) -> None:
    """So few numbers along the horizontal axis that they do not meet."""
    axes.xaxis.set_major_locator(matplotlib("ticker").MaxNLocator(nbins=4, **options))


def log_ticks(axes: Any, low: float, high: float) -> None:
    """Numbers along a logarithmic horizontal axis: those between powers of ten where there are few of these."""
    ticker, few = matplotlib("ticker"), high < 300 * low
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 3.0) if few else (1.0,), numticks=5))
    axes.xaxis.set_major_formatter(
        ticker.FuncFormatter(lambda x, _: f"{x:g}") if few else ticker.LogFormatterMathtext()
    )
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())


def _places(axes: Any, count: int, *, vertical: bool) -> list[int]:
    box = axes.get_window_extent()
    inches = (box.height if vertical else box.width) / axes.figure.dpi
    return list(range(0, count, max(1, math.ceil(_LEAST_LINE * count / max(inches, 0.1)))))
