"""Run a page's code, and write below it what it says: `when_it_fails.md`.

A block of Python that a block of text follows ends in a fit, or in an exception; its text becomes the kind of exception
and its message, or the fit's status and message.

    python docs/outputs.py
"""

from __future__ import annotations

import ast
import logging
import re
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedppl

PAGE = Path(__file__).parent / "when_it_fails.md"
_BLOCK = re.compile(
    r"```python\n(?P<code>.*?)```(?P<between>\n\n```text\n)?(?P<said>(?(between).*?(?=```\n)))", re.DOTALL
)
_WIDTH = 118


def kind(said: str) -> str:
    """What stands before the first colon: an exception's class, or a status."""
    return said.partition(":")[0].strip()


def run(code: str, names: dict[str, Any]) -> Any:
    """Execute a block; the value of its last expression."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, PAGE.name, "exec"), names)
    return eval(compile(ast.Expression(last.value), PAGE.name, "eval"), names) if last else None


def ended(code: str, names: dict[str, Any]) -> str:
    """Run a block, and say how it ended."""
    try:
        fit = run(code, names)
    except (fedppl.DeclarationError, fedppl.DataError) as error:
        return f"{type(error).__name__}: {error}"
    return f"{fit.status.value}: {fit.message}".rstrip(": ")


def blocks(page: str) -> list[tuple[str, str | None]]:
    """Each block of code, and the text below it where there is one."""
    return [(found["code"], found["said"] if found["between"] else None) for found in _BLOCK.finditer(page)]


def outcomes(page: str) -> list[tuple[str, str]]:
    """What the page says of each block that it says something of, and what the block says now."""
    names: dict[str, Any] = {"__name__": "page"}
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedppl.ConvergenceWarning)
        for code, said in blocks(page):
            if said is None:
                run(code, names)
            else:
                found.append((said, ended(code, names)))
    return found


def main() -> None:
    """Run the page, and write what its code says."""
    logging.getLogger("fedppl").setLevel(logging.ERROR)
    page = PAGE.read_text(encoding="utf-8")
    now = iter(outcomes(page))

    def written(found: re.Match[str]) -> str:
        if not found["between"]:
            return found[0]
        said = textwrap.fill(next(now)[1], _WIDTH, break_long_words=False, break_on_hyphens=False)
        return f"```python\n{found['code']}```{found['between']}{said}\n"

    PAGE.write_text(_BLOCK.sub(written, page), encoding="utf-8")


if __name__ == "__main__":
    main()
