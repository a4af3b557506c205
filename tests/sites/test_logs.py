"""Records of the log that name a client say which in a field, too, so that a log can be searched by it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "fedppl"
FILES = sorted(
    [*ROOT.glob("sites/*.py"), *ROOT.glob("flower/*.py"), ROOT / "run" / "one_round.py", ROOT / "engine" / "guard.py"]
)


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """Calls of a module's logger, and the function's source that each stands in."""
    source = path.read_text(encoding="utf-8")
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger."):
                    yield node, ast.unparse(function)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_who_is_named_in_a_text_is_named_in_a_field(path: Path) -> None:
    unnamed = [
        ast.unparse(call)
        for call, source in calls(path)
        if "client %s" in (ast.unparse(call) if any(isinstance(a, ast.Constant) for a in call.args) else source)
        and not ({keyword.arg for keyword in call.keywords} & {"extra"})
        and "isEnabledFor" not in ast.unparse(call.func)
        and not ast.unparse(call.func).endswith("debug")
    ]
    assert not unnamed
