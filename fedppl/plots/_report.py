"""One page about a fit, for people who do not run Python: tables and pictures in a single HTML file."""

from __future__ import annotations

import base64
import contextlib
import importlib.metadata
import io
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fedppl.contracts import Posterior
from fedppl.contracts.printed import CI_PROB, QUALITY, escaped, number, table
from fedppl.plots import _fit
from fedppl.plots._clients import changed, counts, device_graph, influence, quality, reported, rounds, spans
from fedppl.plots._fit import Names, at_hand
from fedppl.plots._posteriors import forest, prior_posterior
from fedppl.settings import a_fit, file_to_write
from fedppl.types import DataError, DeclarationError, NotConvergedError, Status

_DPI = 100
_FOREST = 60  # clients up to which each one's posterior is drawn where no variables are named
_LISTED = 500  # clients up to which they are in a table
_TABLE = 200  # shared coordinates up to which they are in a table
_PACKAGES = ("fedppl", "pymc", "pytensor", "arviz", "numpy", "scipy", "numba", "nutpie", "torch", "flwr")
_TOP = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">\
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">\
"""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 72em; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; margin-bottom: 0.2em; } h2 { font-size: 1.2em; margin: 2em 0 0.4em; }
h1, p, figcaption { overflow-wrap: anywhere; }
table { border-collapse: collapse; font-size: 0.9em; } div.wide { overflow-x: auto; }
th, td { padding: 0.2em 0.8em; text-align: right; border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums; }
tbody th { font-weight: normal; } thead th { border-bottom: 2px solid #888; }
th:first-child, div.text td, div.text th { text-align: left; }
figure { margin: 1.5em 0; } figure img { max-width: 100%; height: auto; } figcaption { max-width: 50em; color: #555; }
p.status { padding: 0.7em 1em; border-left: 6px solid #2a7f3f; background: #eef6f0; }
p.status.with { border-color: #b58900; background: #fbf6e6; }
p.status.open { border-color: #b3261e; background: #fbeeed; }
@media (max-width: 45em) { body { margin: 1em auto; } tbody th { min-width: 9em; } figure img { max-width: none; } }
"""
_SENTENCES = {
    Status.CONVERGED: "The fit converged: its figures can be read as they are.",
    Status.STALLED: "The fit did not converge: it made no more progress. Read its figures with caution.",
}
_ENDED = "The fit did not converge before it ended. Read its figures with caution."
_GLOSSARY = {
    "sd": "sd: how uncertain the value is (posterior standard deviation)",
    "ci_low": "interval: between its ends the value lies with {percent:.5g} % probability",
    "mcse_mean": "mcse: error of the computation, which should be small beside sd",
    "last_change": "last_change: change in the last round, in sds",
    "skewness": "skewness: how lopsided the posterior is; above 1, tails are rough",
}


def report(
    fit: Any,
    path: str | os.PathLike[str],
    *,
    var_names: Names = None,
    population: str | float | Mapping[str, str | float] | None = None,
    conflict: Any = None,
    title: str = "Federated fit",
) -> Path:
    """Write one HTML page about a fit: status, tables, the pictures that apply, settings, versions and seed.

    Nothing on it is loaded from elsewhere or run. Clients' rows are not in it; their ids, numbers of rows and, where
    clients are in this process, summaries of their posteriors are.

    Parameters
    ----------
    path
        The file, such as ``"report.html"``; one that is there is replaced.
    var_names, population
        As in `forest`; by default, of at most 60 clients, the local variables that all have alike.
    conflict
        What `fedppl.conflict` returned.
    title
        Title of the page.

    Returns
    -------
    pathlib.Path
        The file.

    Raises
    ------
    DeclarationError
        If the path is none, its folder is not there, or `var_names`, `population` or `conflict` cannot be shown.
    OSError
        If the file cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> import fedppl
    >>> fit = fedppl.fit(*fedppl.testing.normal_means(), fedppl.EP(), progressbar=False, random_seed=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = fedppl.plots.report(fit, Path(folder) / "report.html", title="Three clients")
    ...     "<title>Three clients</title>" in page.read_text(encoding="utf-8")
    True

    Notes
    -----
    *When this fails.* Readers learn of each client in this process: show no variable of its own that is not agreed.
    """
    a_fit(fit)
    target = file_to_write(path, "report.html")
    settings = _wide(["setting", "value"], list(fit.algorithm.settings.items()), "wide text")
    parts = [
        _head(fit, title),
        _section("What all clients share", _shared(fit)),
        _section("Clients", _clients(fit)),
        *_pictures(fit, var_names, population, conflict),
        _section("What was computed", _computed(fit)),
        _section(f"Settings of {fit.algorithm.name}", settings),
        _section("Versions and seed", _versions(fit)),
    ]
    body = "\n".join(parts)
    page = f"{_TOP}<title>{escaped(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    partial = target.with_name(target.name + ".partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(target)
    return target


def _section(heading: str, body: str) -> str:
    return f"<h2>{escaped(heading)}</h2>{body}"


def _head(fit: Any, title: str) -> str:
    kind, text = "status" if fit.status.ok else "status open", _SENTENCES.get(fit.status, _ENDED)
    if fit.status.ok and fit.message:
        kind, text = "status with", "The fit converged. Read its figures with this in mind:"
    if fit.status == Status.MAX_ROUNDS and not fit.algorithm.result.tests_convergence:
        text = "The fit ran the rounds that it was given; its algorithm does not test for convergence."
    message = f"<br>{escaped(fit.message, 2000)}" if fit.message else ""
    said = f"<strong>{escaped(fit.status)}</strong>. {escaped(text)}{message}"
    return f'<h1>{escaped(title)}</h1>\n<p class="{kind}">{said}</p>'


def _shared(fit: Any) -> str:
    if fit.algorithm.result.shared is None:
        return "<p>In this algorithm clients share no parameters; each has its own.</p>"
    if fit.layout.size > _TABLE:
        return f"<p>{fit.layout.size} numbers, which are too many for a table.</p>"
    try:
        summary = fit.summary()
    except NotConvergedError as error:
        return f"<p>{escaped(error, 2000)}</p>"
    head = ["shared variable", *summary.rename(columns={"ci_low": "interval from", "ci_high": "to"}).columns]
    rows = [[index, *map(number, row)] for index, row in zip(summary.index, summary.values, strict=True)]
    words = "; ".join(text for name, text in _GLOSSARY.items() if name in summary)
    glossary = f"<p><small>{escaped(words.format(percent=100 * CI_PROB), 1000)}.</small></p>" if words else ""
    return _wide(head, rows) + glossary


def _wide(head: Sequence[Any], rows: Iterable[Sequence[Any]], kind: str = "wide") -> str:
    """A table that scrolls by itself where the page is narrower."""
    return f'<div class="{kind}">{table(head, rows)}</div>'


def _clients(fit: Any) -> str:
    ids = fit.client_ids
    if len(ids) > _LISTED:
        return f"<p>{len(ids)} clients, which are too many for a table.</p>"
    columns: dict[str, Iterable[Any]] = {
        "client": ids,
        "rows": [fit.clients[name].brought if name in fit.clients else "not here" for name in ids],
    }
    if fit.records:
        rounds_of = fit.idata["rounds"]
        columns |= counts(rounds_of)
        for name, diagnostic in QUALITY.items():
            if (values := reported(rounds_of, name)) is not None:
                columns[diagnostic.label] = map(number, spans(values)[0])
        columns["bytes sent"] = rounds_of["bytes_up"].sum("round").values
    many = f"{len(ids)} clients" if len(ids) > 1 else "One client"
    where = "in this process" if fit.clients else "with data elsewhere"
    return (
        f"<p>{many}, {where}. “Used”, “silent” and “skipped” count rounds by the outcome of the client's reply; "
        "quality figures are of its last one, bytes of all.</p>"
        f"{_wide(list(columns), zip(*columns.values(), strict=True))}"
    )


def _pictures(fit: Any, var_names: Any, population: Any, conflict: Any) -> Iterator[str]:
    """The pictures that apply; those that the caller asked for by a keyword have to be drawn."""
    shared, groups = fit.algorithm.result.shared, fit.idata
    asked = var_names is not None or population is not None
    if asked or 0 < len(at_hand(fit)) <= _FOREST:
        beside = "the mean of all" if population is None else "what all have in common"
        yield _figure(
            "Clients beside each other",
            f"Each client's own parameters: a dot with the central half and the {100 * CI_PROB:.5g} % interval, beside "
            f"{beside}. In brackets, the client's number of rows, or that it gave a summary of them.",
            lambda: forest(fit, var_names, population=population),
            required=asked,
        )
    if "posterior" in groups and fit.layout.size <= _TABLE:
        yield _figure(
            "Before and after the data",
            "The shared parameters before the data (prior, dashed) and after. Where both look alike, data said little.",
            lambda: prior_posterior(fit),
        )
    without = isinstance(shared, Posterior) and shared.without is not None and "posterior" in groups
    if conflict is not None or (without and fit.layout.size <= _TABLE):
        yield _figure(
            "What each client does to the result",
            "How far each client moves the shared averages, in units of their uncertainty; the uncertainty with the "
            "client over that without it. Clients far from the line matter most; open points are approximate."
            + " Right, the probability that one that agrees is as far from the others."
            * (conflict is not None),
            lambda: influence(fit, conflict=conflict),
            required=conflict is not None,
        )
    if "fit" in groups and "correlation" in groups["fit"]:
        caption = "Correlation of clients' parameters: 1 for clients that are alike, 0 for clients that are unrelated."
        yield _figure("How alike clients are", caption, lambda: device_graph(fit))
    if fit.records:
        above = "the change in each round" if changed(fit) else "the course of the fit"
        caption = f"Above, {above}; below, which clients answered in each round."
        yield _figure("How the fit went", caption, lambda: rounds(fit))
        wanted = [one.wanted for name, one in QUALITY.items() if name in groups["rounds"]]
        caption = f"What should be: {', '.join([*wanted, 'few skipped replies'])}."
        yield _figure("How well clients could compute", caption, lambda: quality(fit))


def _figure(heading: str, caption: str, draw: Callable[[], Any], *, required: bool = False) -> str:
    """A picture, or the reason why there is none."""
    try:
        with _fit.apart():
            axes = draw()
    except (DeclarationError, DataError, NotConvergedError) as error:
        if required:
            raise
        return _section(heading, f"<p>Not drawn: {escaped(error, 1000)}</p>")
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # of names, which tables have too
        np.ravel(axes)[0].figure.savefig(file, format="png", dpi=_DPI)
    picture = base64.b64encode(file.getvalue()).decode("ascii")
    image = f'<img alt="{escaped(heading)}" src="data:image/png;base64,{picture}">'
    caption = f"<figcaption>{escaped(caption, 1000)}</figcaption>"
    return _section(heading, f'<figure><div class="wide">{image}</div>{caption}</figure>')


def _computed(fit: Any) -> str:
    client = next(iter(fit.clients.values()), None)  # without one the declared model cannot be built here
    priors = {} if client is None else fit.declaration.describe(client.arrays)["prior"]
    variables = [
        [v.name, " × ".join(map(str, v.shape)) or "1", v.transform or "none", priors.get(v.name, "–")]
        for v in fit.layout.variables
    ]
    many = f"{len(fit.records)} round{'s' * (len(fit.records) != 1)}"
    whose = "variable" if fit.algorithm.result.shared is None else "shared variable"
    return (
        f"<p>{escaped(fit.declaration, 500)}, by the algorithm {escaped(fit.algorithm.name)}, in {many} and "
        f"{number(fit.seconds)} seconds. Each client computed with its own rows, where they are; what it "
        f"sent in the last round: {escaped(fit.records[-1].released if fit.records else 'nothing', 500)}.</p>"
        f"{_wide([whose, 'entries', 'transform', 'prior'], variables, 'wide text')}"
    )


def _versions(fit: Any) -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    rows = [["seed", fit.seed], ["page written", now], ["Python", platform.python_version()]]
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # one of the extras
            rows.append([name, importlib.metadata.version(name)])
    return _wide((), rows, "wide text")
