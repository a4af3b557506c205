"""Values as they are printed: labels and intervals of variables, and short HTML."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedppl.settings import chosen, shown, some_of
from fedppl.types import DeclarationError

CI_PROB = 0.95  # of intervals, everywhere
FALLBACKS = {1.0: "a fitted t", 2.0: "NUTS"}  # what a local inference fell back to, by its diagnostic ``fallback``


class Diagnostic(NamedTuple):
    """How a diagnostic is shown."""

    label: str  # of an axis, a curve or a column
    wanted: str = ""  # of a client's: what a report says of good values; `plots.quality` has a panel for each
    limit: float | None = None  # of a client's: a line in that panel, beyond which values are bad
    unit: str | None = None  # of a change in a round: behind the number in progress; None where it is not shown there


DIAGNOSTICS = {
    "ess": Diagnostic("effective draws", "many effective draws"),
    "pareto_k": Diagnostic("Pareto k", "Pareto k below 0.7", 0.7),
    "rhat": Diagnostic("R̂", "R̂ near 1"),
    "change_mean": Diagnostic("largest change of a mean (sds)", unit=" sd"),
    "change_sd": Diagnostic("largest change of a log sd", unit=" sd"),
    "change_omega": Diagnostic("relative change of Ω", unit=""),
    "change": Diagnostic("change", unit=""),
    "local_change": Diagnostic("change of local variables"),
}
QUALITY = {name: one for name, one in DIAGNOSTICS.items() if one.wanted}  # of clients


def tolerance_of(settings: Mapping[str, str]) -> float | None:
    """The tolerance of an algorithm, where it has one.

    >>> tolerance_of({"tolerance": "0.01"}), tolerance_of({"steps": "3"})
    (0.01, None)
    """
    try:
        return float(settings["tolerance"])
    except (KeyError, ValueError):
        return None


def interval(ci_prob: float) -> tuple[float, float]:
    """Tails of the equal-tailed interval.

    >>> interval(0.5)
    (0.25, 0.75)
    """
    return (1 - ci_prob) / 2, (1 + ci_prob) / 2


def labels_of(values: Any) -> list[str]:
    """Label of every entry of an array of draws or estimates: name[coordinates]."""
    dims = [dim for dim in values.dims if dim not in ("chain", "draw")]
    labels = [[str(label) for label in values[dim].values] for dim in dims]
    return [
        f"{values.name}[{', '.join(labels[axis][i] for axis, i in enumerate(place))}]" if place else str(values.name)
        for place in np.ndindex(*(values.sizes[dim] for dim in dims))
    ]


def variable_of(entry: str, variables: Collection[str]) -> str:
    """The variable of an entry, whose own name may have brackets; of no known variable the text before the first.

    >>> variable_of("dose [mg][2]", ["dose [mg]"]), variable_of("arm[drug]", ["dose [mg]"])
    ('dose [mg]', 'arm')
    """
    fitting = [name for name in variables if entry == name or entry.startswith(f"{name}[")]
    return max(fitting, key=len) if fitting else entry.partition("[")[0]


def entries_of(group: Any, var_names: Any, what: str, default: Sequence[str] | None = None) -> dict[str, list[int]]:
    """Places in the flat arrays of named variables: all of a variable, or those of entries that are named as printed.

    Without names, all of the variables in `default`, or of all.
    """
    variables = [str(name) for name in group.data_vars]
    if var_names is None:
        names = variables if default is None else default
        return {name: list(range(len(labels_of(group[name])))) for name in names}
    given = [var_names] if isinstance(var_names, str) else var_names
    entries = list(given) if isinstance(given, Sequence) and all(isinstance(one, str) for one in given) else None
    if entries is None or not any("[" in entry for entry in entries if entry not in variables):
        names = chosen("var_names", var_names, variables, what)
        return {name: list(range(len(labels_of(group[name])))) for name in names}
    by_name: dict[str, list[int]] = {}
    for entry in entries:
        name = variable_of(entry, variables)
        if name not in variables:
            chosen("var_names", entry, variables, what)
        labels = {_spaceless(label): place for place, label in enumerate(labels_of(group[name]))}
        places = list(labels.values()) if entry == name else [labels[k] for k in [_spaceless(entry)] if k in labels]
        if not places:
            raise DeclarationError(
                f"var_names={shown(var_names)}: {entry!r} is none of {what}; those of {name!r} are "
                f"{some_of(labels_of(group[name]))}."
            )
        if set(places) & set(by_name.get(name, [])):
            raise DeclarationError(f"var_names={shown(var_names)} has {entry!r} twice; name each once.")
        by_name.setdefault(name, []).extend(places)
    return by_name


def shown_by_default(declaration: Any, group: Mapping[Any, Any]) -> list[str]:
    """Names of variables, without those that others show in a readable form, such as partial correlations."""
    behind = getattr(declaration.builder, "behind", ())
    return [str(name) for name in group if str(name) not in behind]


def _spaceless(label: str) -> str:
    return "".join(label.split())


# Short HTML for notebooks and reports, with every text escaped --------------------------------------------------------

_LONGEST = 200  # characters of one cell


def escaped(value: Any, longest: int = _LONGEST) -> str:
    """A value as text without markup, on one line, cut where it is long.

    >>> escaped("<b>a</b>")
    '&lt;b&gt;a&lt;/b&gt;'
    """
    text = " ".join(str(value).split())
    text = "".join(
        sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text
    )  # and no direction marks
    return html.escape(text if len(text) <= longest else f"{text[: longest - 1]}…", quote=True)


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A table with a head; the first cell of a row is its name.

    >>> table(["", "mean"], [["mu", 1.5]])
    '<table><thead><tr><th></th><th>mean</th></tr></thead><tbody><tr><th>mu</th><td>1.5</td></tr></tbody></table>'
    """
    top = f"<thead><tr>{''.join(f'<th>{escaped(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    body = "".join(
        f"<tr><th>{escaped(first)}</th>{''.join(f'<td>{escaped(cell)}</td>' for cell in others)}</tr>"
        for first, *others in rows
    )
    return f"<table>{top}<tbody>{body}</tbody></table>"


def facts(title: str, rows: Mapping[str, Any]) -> str:
    """A titled table of names and values.

    >>> facts("EP", {"trust": None})
    '<div><strong>EP</strong><table><tbody><tr><th>trust</th><td>None</td></tr></tbody></table></div>'
    """
    return f"<div><strong>{escaped(title)}</strong>{table((), rows.items())}</div>"


def number(value: Any) -> str:
    """A number to four digits; a dash for NaN.

    >>> number(0.123456), number(float("nan")), number(12)
    ('0.1235', '–', '12')
    """
    if isinstance(value, int):
        return str(value)
    value = float(value)
    return "–" if value != value else f"{value:.4g}"
