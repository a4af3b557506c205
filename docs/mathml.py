"""Formulas of the site as MathML, which browsers draw by themselves: no script, and nothing from the network."""

from __future__ import annotations

import re
from html.entities import html5
from typing import Any
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

logger = logging.getLogger(__name__)

_SPACE = "{http://www.w3.org/1998/Math/MathML}"
_APPLY = "\u2061"  # between a function's name and its argument
_ACCENTS = {"~", "ˆ", "^", "¯", "‾", "→", "˙", "\u02dc", "\u20d7"}
_LOOK = "margin: 1rem 0; padding: 0.3rem 0; overflow: auto hidden"
ElementTree.register_namespace("", _SPACE[1:-1])

# TeX takes one digit, letter or command where there are no braces; the conversion takes whole numbers, and scripts too.
_ONE = r"\s*(\\[a-zA-Z]+|[^\s\\{}])"
_BRACED = (
    (re.compile(rf"\\([td]?frac){_ONE}{_ONE}"), r"\\\1{\2}{\3}"),
    (re.compile(rf"\\([td]?frac){_ONE}(?=\s*{{)"), r"\\\1{\2}"),
    (re.compile(rf"\\([td]?frac)(\s*{{[^{{}}]*}}){_ONE}"), r"\\\1\2{\3}"),
    (re.compile(rf"\\(hat|tilde|bar|vec|dot|mathrm|mathbf|mathcal)(?![a-zA-Z]){_ONE}"), r"{\\\1{\2}}"),
    (re.compile(r"([\^_])(\d)(?=\d)"), r"\1{\2}"),
)
# What the conversion knows by another name only.
_ELSEWHERE = (
    (re.compile(r"\\([bB]ig)(?=[(\[{]|\\\{)"), r"\\\1l"),
    (re.compile(r"\\([bB]ig)(?=[)\]}]|\\\})"), r"\\\1r"),
    (re.compile(r"\\dots(?![a-zA-Z])"), r"\\ldots"),
)


def plain(tex: str) -> str:
    """The same formula, with braces wherever TeX would read fewer characters than the conversion does."""
    for pattern, known in (*_ELSEWHERE, *_BRACED):
        tex = pattern.sub(known, tex)
    return tex


def convert(tex: str, *, as_block: bool) -> str:
    """MathML of a formula; raises MathError where it has what cannot be converted."""
    return mended(str(tex2mathml(plain(tex), as_block=as_block)))


def mended(text: str) -> str:
    """With indices of what has an accent beside it, not below, and a space between a function and its argument."""
    entities = re.compile(r"&(?!lt;|gt;|amp;)(\w+;)")
    root = ElementTree.fromstring(entities.sub(lambda found: html5[found[1]], text))
    for row in root.iter(f"{_SPACE}mtr"):  # of equations below each other: both sides of the sign
        for column, cell in enumerate(row):
            cell.set("style", f"text-align: {'left' if column % 2 else 'right'}")
    for element in root.iter():
        if element.tag == f"{_SPACE}munderover" and (element[2].text or "") in _ACCENTS:
            base, index, accent = element
            over = ElementTree.Element(f"{_SPACE}mover", {"accent": "true"})
            over.extend([base, accent])
            element[:] = [over, index]
            element.tag = f"{_SPACE}msub"
        for place, child in enumerate(element):
            if child.text == _APPLY:
                after = element[place + 1].text if place + 1 < len(element) else "("
                if (after or "").strip() not in ("(", "["):
                    child.tag, child.text = f"{_SPACE}mspace", None
                    child.set("width", "0.17em")
    return ElementTree.tostring(root, encoding="unicode")


def _put(writer: Any, node: Any, *, as_block: bool) -> None:
    try:
        found = convert(node.astext(), as_block=as_block)
    except MathError as error:
        logger.warning("formula %r: %s", node.astext(), error, location=node)
        found = writer.encode(node.astext())
    block = f'<div class="formula" style="{_LOOK}">{found}</div>\n'
    writer.body.append(block if as_block else found)
    raise nodes.SkipNode


def _inline(writer: Any, node: Any) -> None:
    _put(writer, node, as_block=False)


def _block(writer: Any, node: Any) -> None:
    _put(writer, node, as_block=True)


def setup(app: Any) -> dict[str, bool]:
    """Make it a way to show formulas: ``html_math_renderer = "mathml"``."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
