"""Tables of a posterior: the summary of a fit, a paper's table, and tests of contrasts and other entries."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from fedppl.contracts import Point, Posterior
from fedppl.contracts.printed import CI_PROB, entries_of, interval, labels_of, shown_by_default, variable_of
from fedppl.contracts.printed import table as html_table
from fedppl.results.diagnostics import fallbacks, shortfall
from fedppl.results.records import Ended, require_arrived, require_shared
from fedppl.results.shared import Estimates, estimates, point_estimates
from fedppl.settings import a_fit, between, flag, shown, whole
from fedppl.types import Array, DataError, DeclarationError


class Summary(pd.DataFrame):  # type: ignore[misc]  # pandas has no types here
    """A table that is printed with all its columns, to four digits; results computed from it are plain tables."""

    def __repr__(self) -> str:
        """Estimates and intervals first; further columns below where they do not fit."""
        width = pd.get_option("display.width")
        return str(pd.DataFrame(self).to_string(line_width=width, float_format=lambda x: f"{x:.4g}"))


def summary(
    fit: Any, var_names: Sequence[str] | str | None = None, *, ci_prob: float = CI_PROB, round_to: int | None = None
) -> Summary:
    """Table of the shared variables with the algorithm's own diagnostics: the one to look at after a fit.

    R̂ and ESS are not in it: draws of q are independent, and both are perfect however good q is.

    Parameters
    ----------
    var_names
        Variables, deterministics among them, or their entries as they are printed, ``"arm[drug]"``. By default
        all, but partial correlations of a formula, of which it shows the correlations.
    ci_prob
        Probability of the equal-tailed interval.
    round_to
        Decimals; None keeps all.

    Returns
    -------
    pandas.DataFrame
        A row an entry: ``mean``, ``sd``, the interval ``ci_low`` to ``ci_high``, the standard errors ``mcse_mean``
        and ``mcse_sd`` of computing the moments, without the error of q (NaN unless converged), and the algorithm's
        diagnostics on the unconstrained space; for `EP` ``last_change`` of the mean or log sd, in sds, and
        ``skewness``, which a Gaussian q cannot have. A point estimate has its ``mean`` alone. ``attrs`` has the
        ``status``, its ``message``, the share of clients that ``answered`` when last asked, ``fallbacks`` of local
        inferences, and names of ``point_estimates`` among draws.

    Raises
    ------
    DeclarationError
        If the clients share nothing in this algorithm, or a name is unknown.

    Examples
    --------
    >>> import fedppl
    >>> fit = fedppl.fit(*fedppl.testing.normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> list(fit.summary().columns)
    ['mean', 'sd', 'ci_low', 'ci_high', 'mcse_mean', 'mcse_sd', 'last_change', 'skewness']
    >>> fit.summary().attrs["status"], fit.summary().attrs["answered"]
    ('converged', 1.0)
    """
    result = fit.algorithm.result
    require_shared(fit)
    ci_prob = between("ci_prob", ci_prob, 0, 1)
    round_to = None if round_to is None else whole("round_to", round_to, 0, "None keeps all decimals")
    require_arrived(fit, "fit.summary()")
    drawn = not isinstance(result.shared, Point)
    values = fit.idata["posterior" if drawn else "point_estimate"]
    default = shown_by_default(fit.declaration, values.data_vars)
    places = entries_of(values, var_names, "the shared variables", default)
    details = result.details(fit.state).items()
    by_row = {name: np.asarray(column, dtype=float) for name, (dims, column) in details if dims == ("rows",)}
    tails = np.array(interval(ci_prob))
    weighted = estimates(fit, tails) if drawn else None
    points = point_estimates(fit)
    parts = []
    for name, entries in places.items():
        rows = fit.layout.slices.get(name, slice(0))  # none of a deterministic
        own = {key: column[rows] for key, column in by_row.items()}
        part = _rows(values[name], drawn, None if weighted is None else weighted[name], tails, own)
        if name in points:
            part.loc[:, part.columns != "mean"] = np.nan
        parts.append(part.iloc[entries])
    table = Summary(pd.concat(parts) if parts else None)
    if weighted is not None and not fit.status.ok:
        table[["mcse_mean", "mcse_sd"]] = np.nan  # the moments themselves are off
    table = table if round_to is None else Summary(table.round(round_to))
    table.attrs = _attributes(fit) | {"ci_prob": ci_prob} | ({"point_estimates": points} if points else {})
    return table


def _rows(
    values: xr.DataArray, drawn: bool, weighted: Estimates | None, tails: Array, details: dict[str, Array]
) -> pd.DataFrame:
    index = labels_of(values)
    columns: dict[str, Any]
    if not drawn:
        columns = {"mean": np.ravel(values.values)}
    elif weighted is not None:
        low, high = weighted.quantiles
        columns = {"mean": weighted.mean, "sd": weighted.sd, "ci_low": low, "ci_high": high}
        columns |= {"mcse_mean": weighted.mean_error, "mcse_sd": weighted.sd_error}
    else:
        draws = values.transpose("chain", "draw", ...).values.reshape(-1, len(index)).astype(float)
        low, high = np.quantile(draws, tails, axis=0)
        columns = {"mean": draws.mean(axis=0), "sd": draws.std(axis=0, ddof=1), "ci_low": low, "ci_high": high}
    for name, column in details.items():
        # The largest of all where a variable has more entries than coordinates, as a simplex has.
        largest = column[np.argmax(np.abs(column))] if len(column) else np.nan
        columns[name] = column if len(column) == len(index) else largest
    return pd.DataFrame(columns, index=index)


def _attributes(fit: Ended) -> dict[str, Any]:
    answered = dict.fromkeys(fit.client_ids, False)  # the last request that wanted a reply
    infos: dict[str, Mapping[str, float]] = {}
    for record in fit.records:
        infos |= record.infos
        if record.together:
            answered |= dict.fromkeys(answered, True) | dict.fromkeys(record.failures, False)
        answered |= {client_id: client_id in record.bytes_up for client_id in set(record.asked) - set(record.silent)}
    return {
        "algorithm": fit.algorithm.name,
        "status": fit.status.value,
        "message": fit.message,
        "rounds": len(fit.records),
        "last_round": dict(fit.records[-1].info) if fit.records else {},
        "answered": float(np.mean(list(answered.values()))),
        "fallbacks": fallbacks(infos),
        "sd_shortfall": shortfall(infos),
    }


# A paper's table: estimates, or ratios, with their intervals and names ------------------------------------------------

_LATEX = str.maketrans(
    {**{sign: f"\\{sign}" for sign in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}
)


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """What `table` returns; it prints as text, and in notebooks as HTML.

    Attributes
    ----------
    frame
        Numbers: a row for every term, with ``estimate``, ``ci_low``, ``ci_high`` and ``what``, its name in a paper.
    ci_prob
        Probability of the intervals.
    digits
        Decimals that are printed.
    note
        A warning of a fit that did not converge; else empty.
    """

    frame: pd.DataFrame
    ci_prob: float
    digits: int
    note: str

    def __repr__(self) -> str:
        """The table as text."""
        return "\n".join([self.text().to_string(), *([self.note] if self.note else [])])

    def _repr_html_(self) -> str:
        return self.to_html()

    def text(self) -> pd.DataFrame:
        """The table as it is printed."""
        columns = (self.frame[name] for name in ("estimate", "ci_low", "ci_high"))
        estimates, lows, highs = ([f"{x:.{self.digits}f}" * (not np.isnan(x)) for x in column] for column in columns)
        intervals = [f"{low} to {high}" if low and high else "" for low, high in zip(lows, highs, strict=True)]
        named = {"estimate": estimates, f"{100 * self.ci_prob:.5g} % interval": intervals, "what": self.frame["what"]}
        return pd.DataFrame(named, index=self.frame.index)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The table in HTML, written to a file too if there is a path."""
        note = html_table((), [[self.note]]) if self.note else ""
        head, *rows = self._cells()
        return _written(html_table(head, rows) + note, path)

    def to_latex(self, path: str | os.PathLike[str] | None = None) -> str:
        """The table as a ``tabular`` of LaTeX, written to a file too if there is a path."""
        head, *lines = (" & ".join(cell.translate(_LATEX) for cell in row) + r" \\" for row in self._cells())
        note = [rf"\multicolumn{{4}}{{l}}{{{self.note.translate(_LATEX)}}} \\"] if self.note else []
        body = [r"\hline", head, r"\hline", *lines, r"\hline", *note]
        return _written("\n".join([r"\begin{tabular}{lrrl}", *body, r"\end{tabular}", ""]), path)

    def to_docx(self, path: str | os.PathLike[str]) -> None:
        """Write the table to a document of Word; needs the extra ``docx``."""
        try:
            docx = importlib.import_module("docx")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "documents need python-docx, which is not installed: pip install 'fedppl[docx]'", name="docx"
            ) from error
        document, rows = docx.Document(), self._cells()
        grid = document.add_table(rows=len(rows), cols=len(rows[0]), style="Light List")
        for cells, row in zip(grid.rows, rows, strict=True):
            for cell, value in zip(cells.cells, row, strict=True):
                cell.text = value
        if self.note:
            document.add_paragraph(self.note)
        document.save(str(Path(path)))

    def _cells(self) -> list[list[str]]:
        """The table as it is printed, a list a line, its heading first."""
        text = self.text()
        rows = zip(text.index, text.to_numpy().tolist(), strict=True)
        return [["", *map(str, text.columns)], *([str(name), *row] for name, row in rows)]


def table(
    fit: Any,
    var_names: Sequence[str] | str | None = None,
    *,
    exponentiate: bool = False,
    ci_prob: float = CI_PROB,
    digits: int = 2,
) -> Table:
    """Make a paper's table of the shared variables: terms, estimates with intervals, and the names of these.

    Parameters
    ----------
    fit
        A `fedppl.Fit`.
    var_names
        Variables, or entries as they are printed, ``["age", "arm[drug]"]``; by default all.
    exponentiate
        Whether coefficients of a formula are given as ratios: odds, rate, hazard or time ratios by its family. Sds and
        all others that are no coefficients stay as they are. Of a builder all in `var_names` are exponentiated.
    ci_prob
        Probability of the equal-tailed interval.
    digits
        Decimals that are printed; `Table.frame` has all.

    Returns
    -------
    Table
        With ``frame``, ``to_html()``, ``to_latex()`` and ``to_docx(path)``. Estimates are means, of ratios medians.

    Raises
    ------
    DeclarationError
        If a name is unknown, or coefficients are differences of means, of which there are no ratios.

    Examples
    --------
    >>> import fedppl
    >>> fit = fedppl.fit(*fedppl.testing.normal_means(), progressbar=False, random_seed=1)
    >>> print(fedppl.table(fit))  # doctest: +NORMALIZE_WHITESPACE
       estimate 95 % interval what
    mu     1.50  0.88 to 2.12

    Notes
    -----
    *When this fails.* An odds ratio is no ratio of risks where events are not rare, and it is of one site: the ratio
    over all patients is nearer to 1. For risks see `Fit.predict` with ``kind="mean"``, and `marginal_effects`.
    """
    a_fit(fit)
    flag("exponentiate", exponentiate)
    whole("digits", digits, 0)
    builder = fit.declaration.builder
    if exponentiate and var_names is None and not hasattr(builder, "coefficients"):
        raise DeclarationError("exponentiate=True: logarithms of a builder are not known; name them by var_names=.")
    rows = fit.summary(var_names, ci_prob=ci_prob)
    drawn = fit.idata["posterior"].data_vars if "posterior" in fit.idata else ()
    variables = {*fit.declaration.shared, *map(str, drawn)}
    names = [variable_of(str(entry), variables) for entry in rows.index]
    columns = ["estimate", "ci_low", "ci_high"]
    frame = pd.DataFrame(rows).rename(columns={"mean": "estimate"}).reindex(columns=columns)
    if exponentiate:
        coefficients = getattr(builder, "coefficients", names)
        ratios = np.array([name in coefficients for name in names])
        frame["estimate"] = np.where(ratios, _medians(fit, rows, names), frame["estimate"])
        frame.loc[ratios, columns] = np.exp(frame.loc[ratios, columns])
    meanings = {name: _meaning(fit, builder, name, exponentiate=exponentiate) for name in dict.fromkeys(names)}
    frame["what"] = [meanings[name] for name in names]
    note = "" if fit.status.ok else f"Not converged ({fit.status.value}): {fit.message}"
    return Table(frame, ci_prob, digits, note)


def _meaning(fit: Any, builder: Any, name: str, *, exponentiate: bool) -> str:
    if not hasattr(builder, "coefficients"):
        return f"exp of {name}" if exponentiate else ""
    if name in builder.coefficients:
        return str(builder.effect(name, exponentiate=exponentiate))
    meaning = fit.declaration.describe()["meaning"].get(name)
    if meaning is None:  # a deterministic: correlations
        return "correlation of effects"
    return f"{meaning}, not exponentiated" if exponentiate else str(meaning)


def _medians(fit: Any, rows: pd.DataFrame, names: Sequence[str]) -> Array:
    """Posterior medians of the rows of a summary; of a point estimate the point."""
    weighted = estimates(fit, np.array([0.5]))
    medians: dict[str, float] = {}
    for name in dict.fromkeys(names) if "posterior" in fit.idata else ():
        draws = fit.idata["posterior"][name]
        values = draws.median(("chain", "draw")).values if weighted is None else weighted[name].quantiles
        medians |= dict(zip(labels_of(draws), np.ravel(values).tolist(), strict=True))
    return np.array([medians.get(str(entry), mean) for entry, mean in rows["mean"].items()], dtype=float)


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


# Contrasts and tests of single entries --------------------------------------------------------------------------------


def contrast(first: Any, second: Any, var_name: str, *, coords: Mapping[str, Any] | None = None) -> xr.DataArray:
    r"""Draws of the difference of one variable between two results, or between two entries of one.

    .. math:: \Delta^{(s)} = x_1^{(s)} - x_2^{(s)}

    Parameters
    ----------
    first, second
        ArviZ objects with a posterior, such as ``fit.client("a")`` and ``fit.client("b")``.
    var_name
        The variable.
    coords
        Labels that pick an entry, for example ``{"predictor": "age"}``.

    Returns
    -------
    xarray.DataArray
        Dims (chain, draw, ...), to be summarised by `hypotheses`.

    Raises
    ------
    DeclarationError
        If a variable or label is absent, or the numbers of draws differ.

    Examples
    --------
    >>> import arviz, numpy as np, xarray as xr
    >>> from fedppl.results import idata
    >>> a = idata.from_groups({"posterior": xr.Dataset({"theta": (("chain", "draw"), np.ones((1, 3)))})})
    >>> contrast(a, a, "theta").values
    array([[0., 0., 0.]])

    Notes
    -----
    *When this fails.* Draws of two clients are independent here, while their posteriors share φ; with few
    clients and weak data the interval of a difference is a little too wide or narrow.
    """
    a, b = (_pick(result, var_name, coords) for result in (first, second))
    if a.shape != b.shape:
        raise DeclarationError(f"{var_name!r} has shapes {a.shape} and {b.shape}; draw equally many from both clients.")
    difference: xr.DataArray = a - b.values
    return difference.rename(f"{var_name} difference")


def _pick(result: Any, var_name: str, coords: Mapping[str, Any] | None) -> xr.DataArray:
    posterior = _posterior(result)
    if var_name not in posterior:
        raise DeclarationError(f"{var_name!r} is not in the posterior; variables are {list(posterior.data_vars)}.")
    try:
        array: xr.DataArray = posterior[var_name].sel(coords)
    except (KeyError, ValueError, TypeError) as error:
        raise DeclarationError(f"{var_name!r} has no entry coords={coords!r}: {error}") from error
    return array


def _posterior(result: Any) -> Any:
    is_fit = hasattr(result, "idata") and hasattr(result, "status")
    if is_fit and isinstance(result.algorithm.result.shared, Posterior):
        require_arrived(result, "hypotheses of a fit")
    try:
        return (result.idata if is_fit else result)["posterior"]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        what = "the fit is by an algorithm that ends in a point and" if is_fit else type(result).__name__
        raise DeclarationError(f"{what} has no posterior; pass a fit with one, fit.idata or fit.client(id).") from error


def _region(rope: Any) -> tuple[float, float]:
    try:
        low, high = map(float, () if isinstance(rope, str) else rope)
        if low < high:
            return low, high
    except (TypeError, ValueError):
        pass
    raise DeclarationError(f"rope={shown(rope)} must be a pair (low, high) with low < high, such as (-0.1, 0.1).")


def hypotheses(
    draws: Any,
    *,
    var_names: Sequence[str] | None = None,
    ci_prob: float = CI_PROB,
    rope: tuple[float, float] | None = None,
    null: float = 0.0,
) -> pd.DataFrame:
    r"""Test every entry of a posterior against a null value.

    .. math:: \text{pd} = \max\{P(x > x_0), P(x < x_0)\}

    Parameters
    ----------
    draws
        A fit, whose shared variables have the mean, sd and interval of `Fit.summary`, an ArviZ object with a
        posterior, or a DataArray of draws such as `contrast` gives. Probabilities are of draws.
    var_names
        Names of variables, or of entries as they are printed (``"arm[drug]"``); by default all.
    ci_prob
        Probability of the equal-tailed interval.
    rope
        Region of practical equivalence (low, high); adds its posterior probability.
    null
        Value x₀ that is tested.

    Returns
    -------
    pandas.DataFrame
        A row an entry: mean, sd, ci_low, ci_high, excludes_null, probability_of_direction, in_rope.

    Raises
    ------
    DeclarationError
        For a setting outside its range, an unknown variable, or draws without a posterior or its dims.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> draws = xr.DataArray(np.linspace(1, 2, 100)[None], dims=("chain", "draw"), name="effect")
    >>> bool(hypotheses(draws)["excludes_null"]["effect"])
    True

    Notes
    -----
    *When this fails.* Entries are tested one by one: of many some exclude the null value by chance, unless a
    hierarchical prior shrinks them. An interval that holds the null value does not show that there is no effect; the
    region of practical equivalence can. Of S draws no probability is known to better than about 1 / S.
    """
    ci_prob = between("ci_prob", ci_prob, 0, 1)
    null = between("null", null, -np.inf, np.inf)
    rope = None if rope is None else _region(rope)
    default = told = None
    if isinstance(draws, xr.DataArray):
        if not {"chain", "draw"} <= set(draws.dims):
            raise DeclarationError(f"draws has dims {draws.dims}; it needs chain and draw, as contrast gives.")
        draws = {"posterior": draws.to_dataset(name=draws.name or "x")}
    posterior = _posterior(draws)
    if hasattr(draws, "declaration"):
        default = shown_by_default(draws.declaration, posterior.data_vars)
        told = draws.summary(var_names, ci_prob=ci_prob)  # more exact than draws
    tables = []
    for name, places in entries_of(posterior, var_names, "the draws", default).items():
        stacked = posterior[name].stack(sample=("chain", "draw")).transpose("sample", ...)
        x = stacked.values.reshape(stacked.sizes["sample"], -1)[:, places]
        labels = [labels_of(posterior[name])[place] for place in places]
        if unknown := [label for label, column in zip(labels, x.T, strict=True) if not np.all(np.isfinite(column))]:
            raise DataError(f"draws of {unknown[0]!r} hold values that are not finite; leave them out by var_names=.")
        low, high = np.quantile(x, interval(ci_prob), axis=0)
        columns = {"mean": x.mean(axis=0), "sd": x.std(axis=0, ddof=1), "ci_low": low, "ci_high": high}
        columns["probability_of_direction"] = np.maximum(np.mean(x > null, axis=0), np.mean(x < null, axis=0))
        if rope is not None:
            columns["in_rope"] = np.mean((x > rope[0]) & (x < rope[1]), axis=0)
        tables.append(pd.DataFrame(columns, index=labels))
    table = pd.concat(tables)
    if twice := list(table.index[table.index.duplicated()]):
        raise DeclarationError(f"two entries of the draws are called {twice[0]!r}; give the dim distinct coords.")
    if told is not None and "sd" in told:
        moments, known = ["mean", "sd", "ci_low", "ci_high"], told["sd"].notna()  # a point estimate has no sd
        table.loc[known, moments] = told.loc[known, moments]
    table.insert(4, "excludes_null", (table["ci_low"] > null) | (table["ci_high"] < null))
    return table
