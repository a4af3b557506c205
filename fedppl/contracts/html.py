"""Short HTML for notebooks and reports: every text is escaped, whoever it comes from."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_LONGEST = 200  # characters of one cell


def escaped(value: Any, longest: int = _LONGEST) -> str:
    """A value as text that no browser takes for markup, on one line, cut where it is long.

    >>> escaped("<b>a</b>")
    '&lt;b&gt;a&lt;/b&gt;'
    """
    text = " ".join(str(value).split())
    text = "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)  # turns no direction
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
    """A number to four digits; nothing where it is none.

    >>> number(0.123456), number(float("nan")), number(12)
    ('0.1235', '–', '12')
    """
    if isinstance(value, int):
        return str(value)
    value = float(value)
    return "–" if value != value else f"{value:.4g}"
