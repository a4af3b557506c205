"""How a fit looks in a notebook, and on a page of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedppl.contracts.html import escaped, number, table
from fedppl.results.arrival import Ended, unarrived

_ROWS = 20
_MOST = 200  # coordinates, beyond which nothing is drawn for a look


def of_fit(fit: Any) -> str:
    """Status and message, and the first rows of the summary."""
    color = "#2a7f3f" if fit.status.ok else "#b3261e"
    message = f"<p>{escaped(fit.message, 1000)}</p>" if fit.message else ""
    facts = f"{len(fit.records)} rounds, {len(fit.client_ids)} clients, {number(fit.seconds)} s, seed {fit.seed}"
    return (
        f"<div><strong>{escaped(fit.algorithm.name)}</strong>: "
        f'<span style="color: {color}">{escaped(fit.status)}</span>, {escaped(facts)}{message}{_summary(fit)}</div>'
    )


def _summary(fit: Any) -> str:
    ended: Ended = fit
    if ended.algorithm.result.shared is None or unarrived(ended):
        return ""
    if ended.layout.size > _MOST:
        return f"<p>{ended.layout.size} shared coordinates: see <code>fit.summary()</code></p>"
    found = fit.summary()
    rows = [[name, *map(number, values)] for name, values in zip(found.index, found.values, strict=True)]
    more = f"<p>and {len(rows) - _ROWS} more rows: <code>fit.summary()</code></p>" if len(rows) > _ROWS else ""
    return table(["", *found.columns], rows[:_ROWS]) + more


def report(
    fit: Any,
    path: str | os.PathLike[str],
    *,
    var_names: Sequence[str] | str | None = None,
    population: str | float | Mapping[str, str | float] | None = None,
    conflict: Any = None,
    title: str = "Federated fit",
) -> Path:
    """Write one HTML page about this fit: status, tables, pictures, settings, versions and seed.

    Parameters
    ----------
    path, var_names, population, conflict, title
        As in `fedppl.plots.report`.

    Returns
    -------
    pathlib.Path
        The file. What is on the page, and when this fails: `fedppl.plots.report`.
    """
    from fedppl import plots  # at its first use: it takes a while

    return plots.report(fit, path, var_names=var_names, population=population, conflict=conflict, title=title)
