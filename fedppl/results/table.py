"""A paper's table of what all clients share: estimates, or ratios, with their intervals and what they are called."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedppl.contracts.client import table as html_table
from fedppl.contracts.update import CI_PROB, labels_of, variable_of
from fedppl.results.shared import estimates
from fedppl.settings import flag, whole
from fedppl.types import Array, DeclarationError

_ESCAPED = {**{sign: f"\\{sign}" for sign in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """What `table` returns; it prints as text, and in notebooks as HTML.

    Attributes
    ----------
    frame
        Numbers: a row for every term, with ``estimate``, ``ci_low``, ``ci_high`` and ``what`` it is.
    ci_prob
        Probability of the intervals.
    digits
        Decimals that are printed.
    note
        What a reader has to know; empty of a fit that converged.
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
        """The table as it is printed: texts with so many decimals."""
        shown = {name: [self._number(x) for x in self.frame[name]] for name in ("estimate", "ci_low", "ci_high")}
        ends = zip(shown["ci_low"], shown["ci_high"], strict=True)
        intervals = [f"{low} to {high}" if low and high else "" for low, high in ends]
        name = f"{100 * self.ci_prob:.5g} % interval"
        columns = {"estimate": shown["estimate"], name: intervals, "what": list(self.frame["what"])}
        return pd.DataFrame(columns, index=self.frame.index)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The table in HTML, written to a file too if there is a path."""
        note = html_table((), [[self.note]]) if self.note else ""
        return _written(html_table(self._head(), self._rows()) + note, path)

    def to_latex(self, path: str | os.PathLike[str] | None = None) -> str:
        """The table as a ``tabular`` of LaTeX, written to a file too if there is a path."""
        lines = [" & ".join(map(_latex, row)) + r" \\" for row in (self._head(), *self._rows())]
        note = [rf"\multicolumn{{4}}{{l}}{{{_latex(self.note)}}} \\"] if self.note else []
        body = [r"\hline", lines[0], r"\hline", *lines[1:], r"\hline", *note]
        return _written("\n".join([r"\begin{tabular}{lrrl}", *body, r"\end{tabular}", ""]), path)

    def to_docx(self, path: str | os.PathLike[str]) -> None:
        """Write the table to a document of Word; needs the extra ``docx``."""
        try:
            docx = importlib.import_module("docx")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "documents need python-docx, which is not installed: pip install 'fedppl[docx]'", name="docx"
            ) from error
        document, rows = docx.Document(), [self._head(), *self._rows()]
        made = document.add_table(rows=len(rows), cols=len(rows[0]), style="Light List")
        for cells, row in zip(made.rows, rows, strict=True):
            for cell, value in zip(cells.cells, row, strict=True):
                cell.text = value
        if self.note:
            document.add_paragraph(self.note)
        document.save(str(Path(path)))

    def _head(self) -> list[str]:
        return ["", *map(str, self.text().columns)]

    def _rows(self) -> list[list[str]]:
        return [[str(name), *row] for name, row in zip(self.frame.index, self.text().to_numpy().tolist(), strict=True)]

    def _number(self, value: float) -> str:
        return "" if np.isnan(value) else f"{value:.{self.digits}f}"


def table(
    fit: Any,
    var_names: Sequence[str] | str | None = None,
    *,
    exponentiate: bool = False,
    ci_prob: float = CI_PROB,
    digits: int = 2,
) -> Table:
    """Make a paper's table of the shared variables: terms, estimates with intervals, and what these are called.

    Parameters
    ----------
    fit
        A `fedppl.Fit`.
    var_names
        Variables, or entries as they are printed, ``["age", "arm[drug]"]``; by default all.
    exponentiate
        Whether coefficients of a formula are given as ratios: odds, rate, hazard or time ratios by its family. Sds and
        what else is no coefficient stay as they are. Of a builder, whose variables have no meaning that is known here,
        all that `var_names` names are.
    ci_prob
        Probability of the equal-tailed interval.
    digits
        Decimals that are printed; `Table.frame` has all.

    Returns
    -------
    Table
        With ``frame``, ``to_html()``, ``to_latex()`` and ``to_docx(path)``. Estimates are posterior means, of ratios
        posterior medians.

    Raises
    ------
    DeclarationError
        If a name is unknown, or coefficients are differences of means, of which there are no ratios.
    NotConvergedError
        Where the fit was broken off before there was a posterior.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> fit = fedppl.fit(*normal_means(), progressbar=False, random_seed=1)
    >>> print(fedppl.table(fit))  # doctest: +NORMALIZE_WHITESPACE
       estimate 95 % interval what
    mu     1.50  0.88 to 2.12

    Notes
    -----
    *When this fails.* An odds ratio is no ratio of risks where events are not rare, and it is of one site: the ratio
    over all patients, averaged over sites, is nearer to 1. For risks see `Fit.predict` with ``kind="mean"``, and
    `marginal_effects`.
    """
    flag("exponentiate", exponentiate)
    whole("digits", digits, 0)
    builder = fit.declaration.builder
    if exponentiate and var_names is None and not hasattr(builder, "coefficients"):
        raise DeclarationError(
            "exponentiate=True: which variables of a builder are logarithms is not known; name them by var_names=."
        )
    found = fit.summary(var_names, ci_prob=ci_prob)
    drawn = fit.idata["posterior"].data_vars if "posterior" in fit.idata else ()
    known = {*fit.declaration.shared, *map(str, drawn)}
    names = [variable_of(str(entry), known) for entry in found.index]
    nothing = pd.Series(np.nan, found.index)
    values = {"estimate": found["mean"], **{end: found.get(end, nothing) for end in ("ci_low", "ci_high")}}
    whats = {name: _what(fit, builder, name, exponentiate=exponentiate) for name in dict.fromkeys(names)}
    frame = pd.DataFrame({key: np.array(value, dtype=float) for key, value in values.items()}, index=found.index)
    frame["what"] = [whats[name] for name in names]
    if exponentiate:
        kept = getattr(builder, "coefficients", names)
        rows = np.array([name in kept for name in names])
        frame["estimate"] = np.where(rows, _medians(fit, found, names), frame["estimate"])
        columns = ["estimate", "ci_low", "ci_high"]
        frame.loc[rows, columns] = np.exp(frame.loc[rows, columns])
    note = "" if fit.status.ok else f"Not converged ({fit.status.value}): {fit.message}"
    return Table(frame, ci_prob, digits, note)


def _what(fit: Any, builder: Any, name: str, *, exponentiate: bool) -> str:
    """What a variable is called in a paper."""
    if not hasattr(builder, "coefficients"):
        return f"exp of {name}" if exponentiate else ""
    if name in builder.coefficients:
        return str(builder.effect(name, exponentiate=exponentiate))
    meaning = fit.declaration.describe()["meaning"].get(name)
    if meaning is None:  # of what is computed from others: correlations
        return "correlation of effects"
    return f"{meaning}, not exponentiated" if exponentiate else str(meaning)


def _medians(fit: Any, found: pd.DataFrame, names: Sequence[str]) -> Array:
    """Posterior medians of the rows of a summary; of a point that was estimated the point."""
    measured = estimates(fit, np.array([0.5]))
    medians: dict[str, float] = {}
    for name in dict.fromkeys(names):
        if measured is not None:
            values, group = np.ravel(measured[name].quantiles), fit.idata["posterior"][name]
        elif "posterior" in fit.idata:
            group = fit.idata["posterior"][name]
            values = np.ravel(group.median(("chain", "draw")).values)
        else:
            continue
        medians |= dict(zip(labels_of(group), values.tolist(), strict=True))
    return np.array([medians.get(str(entry), mean) for entry, mean in found["mean"].items()], dtype=float)


def _latex(text: str) -> str:
    return "".join(_ESCAPED.get(sign, sign) for sign in text)


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
