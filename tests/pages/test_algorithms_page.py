"""The page on algorithms has each of them once."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import fedppl

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def public() -> set[str]:
    """Functions that return an algorithm, as users write them."""
    found = set()
    for space in ("", "averaging", "one_shot", "curves", "nn"):
        if space == "nn" and importlib.util.find_spec("torch") is None:
            continue
        module = getattr(fedppl, space) if space else fedppl
        for name in getattr(module, "__all__", dir(module)):
            one = getattr(module, name)
            told = str(inspect.signature(one).return_annotation) if inspect.isfunction(one) else ""
            if re.match(r"(contracts\.)?Algorithm\[", told):
                found.add(f"{space}.{name}".lstrip("."))
    return found


def test_every_public_algorithm_has_one_line() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page[page.index("| algorithm |") :].partition("\n\n")[0]
    named = re.findall(r"^\| `([\w.]+)\(", table, flags=re.MULTILINE)
    assert len(named) == len(set(named)) == len(table.splitlines()) - 2
    wanted = public()
    assert "EP" in wanted and "curves.Ascent" in wanted
    of_networks = {name for name in named if name.startswith("nn.")}
    known = set(named) if importlib.util.find_spec("torch") else set(named) - of_networks
    assert known == wanted


def test_what_the_tree_leads_to_is_in_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    tree = re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)[0]
    assert [int(number) for number in re.findall(r"^[ |]*(\d)\. ", tree, flags=re.MULTILINE)] == [1, 2, 3, 4]
    for name in re.findall(r"([\w.]+)\(\)", tree):
        assert f"| `{name}(" in page, name
