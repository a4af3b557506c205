"""Formulas of the site as MathML, which browsers draw by themselves: no script, and nothing from the network."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

logger = logging.getLogger(__name__)

# What the conversion knows by another name only.
_ELSEWHERE = (
    (re.compile(r"\\([bB]ig)(?=[(\[{]|\\\{)"), r"\\\1l"),
    (re.compile(r"\\([bB]ig)(?=[)\]}]|\\\})"), r"\\\1r"),
    (re.compile(r"\\dots(?![a-zA-Z])"), r"\\ldots"),
)


def convert(tex: str, *, as_block: bool) -> str:
    """MathML of a formula; raises MathError where it has what cannot be converted."""
    for pattern, known in _ELSEWHERE:
        tex = pattern.sub(known, tex)
    return str(tex2mathml(tex, as_block=as_block))


def _put(writer: Any, node: Any, *, as_block: bool) -> None:
    try:
        found = convert(node.astext(), as_block=as_block)
    except MathError as error:
        logger.warning("formula %r: %s", node.astext(), error, location=node)
        found = writer.encode(node.astext())
    writer.body.append(f'<div class="math">{found}</div>\n' if as_block else found)
    raise nodes.SkipNode


def _inline(writer: Any, node: Any) -> None:
    _put(writer, node, as_block=False)


def _block(writer: Any, node: Any) -> None:
    _put(writer, node, as_block=True)


def setup(app: Any) -> dict[str, bool]:
    """Make it a way to show formulas: ``html_math_renderer = "mathml"``."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
