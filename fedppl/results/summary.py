"""The table to look at after a fit: what was found, with the algorithm's own diagnostics beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from fedppl.contracts import Point
from fedppl.contracts.update import entries_of, interval, labels_of, shown_by_default
from fedppl.results.departure import shortfall
from fedppl.results.measure import Estimates
from fedppl.results.records import Ended, added, fallen, require_arrived
from fedppl.results.shared import estimated
from fedppl.settings import between, whole
from fedppl.types import Array, DeclarationError

_MOMENTS = ("corrected_mean",)  # of the fit group: of unconstrained variables, so that they stand in no row here


class Summary(pd.DataFrame):  # type: ignore[misc]  # pandas has no types here
    """A table that is printed with all its columns, to four digits; what is computed from it is a plain one."""

    def __repr__(self) -> str:
        """Estimates and intervals first; columns that a line has no room for stand below."""
        width = pd.get_option("display.width")
        return str(pd.DataFrame(self).to_string(line_width=width, float_format=lambda x: f"{x:.4g}"))


def summary(
    fit: Ended,
    idata: Callable[[], Any],
    measured: Callable[[Array], dict[str, Estimates] | None],
    var_names: Sequence[str] | str | None,
    ci_prob: float,
    round_to: int | None,
) -> Summary:
    """See `Fit.summary`; `idata` and `measured` are read once it is known that there is something to report."""
    result = fit.algorithm.result
    if result.shared is None:
        raise DeclarationError(
            f"{fit.algorithm.name} has no parameters that all clients share; see fit.client(...) for a client's."
        )
    ci_prob = between("ci_prob", ci_prob, 0, 1)
    round_to = None if round_to is None else whole("round_to", round_to, 0, "None keeps all decimals")
    require_arrived(fit, "fit.summary()")
    drawn = not isinstance(result.shared, Point)
    found = idata()["posterior" if drawn else "point_estimate"]
    default = shown_by_default(fit.declaration, found.data_vars)
    places = entries_of(found, var_names, "the shared variables", default)
    known = {
        name: np.asarray(values, dtype=float)
        for name, (dims, values) in result.details(fit.state).items()
        if dims == ("rows",) and name not in _MOMENTS
    }
    tails = np.array(interval(ci_prob))
    of = measured(tails) if drawn else None
    estimates = estimated(fit)
    where = {name: fit.layout.slices.get(name, slice(0)) for name in places}  # nothing of what others determine
    own = {name: {key: values[where[name]] for key, values in known.items()} for name in places}
    parts = [_rows(found[name], drawn, None if of is None else of[name], tails, own[name]) for name in places]
    for name, part in zip(places, parts, strict=True):
        if name in estimates:
            part.loc[:, part.columns != "mean"] = np.nan
    chosen = [part.iloc[places[name]] for name, part in zip(places, parts, strict=True)]
    table = Summary(pd.concat(chosen) if chosen else None)
    if of is not None and not fit.status.ok:
        table[["mcse_mean", "mcse_sd"]] = np.nan  # of moments that are off themselves
    table = table if round_to is None else Summary(table.round(round_to))
    table.attrs = _about(fit) | {"ci_prob": ci_prob} | ({"point_estimates": estimates} if estimates else {})
    return table


def _rows(
    values: xr.DataArray, drawn: bool, measured: Estimates | None, tails: Array, known: dict[str, Array]
) -> pd.DataFrame:
    """One row an entry of a variable."""
    dims = [dim for dim in values.dims if dim not in ("chain", "draw")]
    index = labels_of(values)
    if not drawn:
        columns = {"mean": np.ravel(values.values)}
    elif measured is not None:
        low, high = measured.quantiles
        columns = {"mean": measured.mean, "sd": measured.sd, "ci_low": low, "ci_high": high}
        columns |= {"mcse_mean": measured.mean_error, "mcse_sd": measured.sd_error}
    else:
        draws = values.transpose("chain", "draw", *dims).values.reshape(-1, len(index)).astype(float)
        low, high = np.quantile(draws, tails, axis=0)
        columns = {"mean": draws.mean(axis=0), "sd": draws.std(axis=0, ddof=1), "ci_low": low, "ci_high": high}
    columns |= {name: _by_entry(of, len(index)) for name, of in known.items()}
    return pd.DataFrame(columns, index=index)


def _by_entry(values: Array, entries: int) -> Array:
    """A value an entry; the largest of all where a variable has more entries than coordinates, as a simplex has."""
    if len(values) == entries:
        return values
    return np.full(entries, values[np.argmax(np.abs(values))] if len(values) else np.nan)


def _about(fit: Ended) -> dict[str, Any]:
    """How far the fit came, and who took part in it."""
    answered = dict.fromkeys(fit.client_ids, False)  # to the last request that wanted a reply
    for record in fit.records:
        if record.together:
            answered |= dict.fromkeys(answered, True) | dict.fromkeys(record.failures, False)
        answered |= {client_id: client_id in record.bytes_up for client_id in set(record.asked) - set(record.silent)}
    infos: dict[str, Mapping[str, float]] = {}
    for record in fit.records:
        infos = added(infos, record.infos, closing=record.closing)
    return {
        "algorithm": fit.algorithm.name,
        "status": fit.status.value,
        "message": fit.message,
        "rounds": len(fit.records),
        "last_round": dict(fit.records[-1].info) if fit.records else {},
        "answered": float(np.mean(list(answered.values()))),
        "fallbacks": fallen(infos),
        "sd_shortfall": shortfall(infos),
    }
