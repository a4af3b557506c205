"""Pages: their links lead somewhere, and their code is Python."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import fedppl
from fedppl.formulas.families import FAMILIES

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")})


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Anchors of headings as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_code_is_python(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        ast.parse(block)


def test_every_page_is_named_on_the_front_page() -> None:
    front = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = {page.stem for page in ROOT.glob("docs/*.md") if f"docs/{page.name}" not in front}
    of_the_site = {"index", "guide", "sites", "understanding", "papers"}
    assert missing == {*of_the_site, "formulas_measured", "paper"}  # the page on formulas names its figures


# Namespaces whose functions the reference lists one by one; of the others it lists the module.
BY_NAME = ("local", "averaging", "one_shot", "search", "nn")


def exported(module: str) -> list[str]:
    """`__all__` of a package, read and not imported: networks need torch."""
    text = (ROOT / module.replace(".", "/") / "__init__.py").read_text(encoding="utf-8")
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    return list(names)


def test_every_public_name_is_in_the_reference_once() -> None:
    page = (ROOT / "docs/reference/index.md").read_text(encoding="utf-8")
    found: list[str] = []
    for block in re.findall(r"```{eval-rst}\n(.*?)```", page, flags=re.DOTALL):
        module = re.findall(r"currentmodule:: (\S+)", block)[0]
        names = re.findall(r"^   ([\w.]+)$", block, flags=re.MULTILINE)
        found += [f"{module}.{name}" for name in names]
    wanted = {f"fedppl.{name}" for name in {*fedppl.__all__, *fedppl._NAMES} - {*fedppl._SPACES}}
    for space, (module, _, _) in fedppl._SPACES.items():
        names = exported(module) if space in BY_NAME else ()
        wanted |= {f"{module}.{name}" for name in names} if names else {module}
    assert sorted(found) == sorted(wanted)


def test_the_page_on_formulas_has_a_row_for_each_family() -> None:
    page = (ROOT / "docs/formulas.md").read_text(encoding="utf-8")
    rows = page.partition("| family |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", rows, flags=re.MULTILINE) == list(FAMILIES)


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def public() -> dict[str, Any]:
    """Functions that users call, by name."""
    found = {name: getattr(fedppl, name) for name in fedppl.__all__}
    for space, (_, package, _) in fedppl._SPACES.items():
        if importlib.util.find_spec(package or "fedppl") is None:
            continue
        module = getattr(fedppl, space)
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
        found |= {f"{space}.{name}": getattr(module, name) for name in names}
    return {name: one for name, one in found.items() if inspect.isfunction(one)}


def test_every_public_function_says_all_of_what_it_does() -> None:
    missing: dict[str, list[str]] = {}
    for name, function in public().items():
        text = inspect.getdoc(function) or ""
        wanted = {"Returns": "Returns\n---" in text or "Yields\n---" in text, "Raises": "Raises\n---" in text}
        wanted["Parameters"] = "Parameters\n---" in text or not inspect.signature(function).parameters
        wanted |= {"Examples": ">>>" in text, "when this fails": "hen this fails" in text}
        if re.search("Algorithm|LocalInference", str(inspect.signature(function).return_annotation)):
            del wanted["Raises"], wanted["Examples"]  # the reference says once what builders have in common
        if re.search(r"See `\w+` for parameters", text):  # where result and errors stand too
            del wanted["Parameters"], wanted["Returns"], wanted["Raises"]
        if lacking := [part for part, there in wanted.items() if not there]:
            missing[name] = lacking
    assert not missing
