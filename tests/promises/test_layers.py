"""Imports of fedppl point one way, from a family down to values, and never back. Nothing is imported, only read."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "fedppl"

# From the top down. What stands in one line may import from its own line and from those below; "fedppl" is the root.
LAYERS = [
    ["fedppl", "models"],
    ["front"],
    ["given"],
    ["nn", "coregional"],
    ["algorithms", "search", "flower", "sites", "site", "testing", "formulas"],
    ["local", "run"],
    ["results"],
    ["plots"],
    ["engine"],
    ["model"],
    ["contracts", "numerics", "storage", "audit", "privacy", "metrics", "data"],
    ["types", "structure", "gaussian", "settings"],
]
FAMILIES = ["nn", "coregional"]
LIGHT = ["numerics", "contracts", "types", "gaussian", "structure", "settings"]
HEAVY = {"pymc", "pytensor", "arviz", "torch", "flwr"}


@functools.cache
def modules() -> dict[str, Path]:
    """Every module by its dotted name; a package by its own."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@functools.cache
def imports(module: str) -> frozenset[str]:
    """What a module imports: at its top, for types alone, inside functions, and by `importlib`."""
    found = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module} has a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules() else node.module for name in inner}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            found |= {str(told.value) for told in node.args if isinstance(told, ast.Constant)}
    return frozenset(found - {module})


def own(module: str) -> frozenset[str]:
    """Modules of fedppl that a module imports."""
    return frozenset(name for name in imports(module) if name in modules())


def unit(module: str) -> str:
    """The folder of a module, or itself where it lies at the root."""
    return module.split(".")[1] if "." in module else "fedppl"


def folder(module: str) -> str:
    """The package that a module lies in; a package's own."""
    return module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]


def place(module: str) -> int:
    """Number of its layer, from the top."""
    return next(k for k, layer in enumerate(LAYERS) if unit(module) in layer)


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Sets of nodes of a graph that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            if (name := waiting.pop()) not in seen:
                seen.add(name)
                waiting.extend(graph.get(name, ()))
        reached[start] = seen
    together = {frozenset(b for b in reached[a] if a in reached.get(b, ())) for a in graph if a in reached[a]}
    return sorted(sorted(names) for names in together)


def builders(folder: str) -> set[str]:
    """Algorithms of a folder: functions of its modules that begin with a capital letter."""
    return {
        node.name
        for module in modules()
        if module.startswith(f"fedppl.{folder}.")
        for node in tree(module).body
        if isinstance(node, ast.FunctionDef) and node.name[0].isupper()
    }


def test_every_folder_and_every_module_of_the_root_has_a_layer() -> None:
    assert {unit(module) for module in modules()} == {name for layer in LAYERS for name in layer}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles({module: own(module) for module in modules()}) == []


def test_no_folders_import_each_other_in_a_circle() -> None:
    folders: dict[str, set[str]] = {}
    for module in modules():
        folders.setdefault(unit(module), set()).update({unit(name) for name in own(module)} - {unit(module)})
    assert circles(folders) == []


def test_imports_point_down() -> None:
    up = [f"{a} -> {b}" for a in modules() for b in sorted(own(a)) if place(b) < place(a)]
    assert up == []


def test_a_private_module_is_imported_by_its_own_folder_alone() -> None:
    foreign = [
        f"{a} -> {b}"
        for a in modules()
        for b in sorted(own(a))
        if b.rpartition(".")[2].startswith("_") and folder(a) != b.rpartition(".")[0]
    ]
    assert foreign == []


def test_families_know_nothing_of_each_other_and_nobody_knows_them() -> None:
    known = [
        f"{a} -> {b}"
        for a in modules()
        for b in sorted(own(a))
        if unit(b) in FAMILIES and unit(a) not in (unit(b), "fedppl")
    ]
    assert known == []


def test_values_contracts_and_numerics_know_no_framework() -> None:
    heavy = [
        f"{a} -> {b}" for a in modules() if unit(a) in LIGHT for b in sorted(imports(a)) if b.split(".")[0] in HEAVY
    ]
    assert heavy == []


def test_the_protocol_of_sites_knows_nothing_of_what_carries_its_messages() -> None:
    within = [a for a in modules() if unit(a) == "sites"]
    assert within
    known = [f"{a} -> {b}" for a in within for b in imports(a) if {"flwr", "flower"} & set(b.split("."))]
    assert known == []


def test_no_algorithm_of_a_family_is_named_outside_it() -> None:
    """But for names that algorithms for any model have too; one that is a plain word counts behind its namespace."""
    for family in FAMILIES:
        names = builders(family) - builders("algorithms")
        assert names, family
        plain = {name for name in names if name[1:].islower()}
        spaced = [rf"(?:nn|curves)\.{name}" for name in sorted(names)]
        public = ["nn" if family == "nn" else "curves"]
        word = re.compile(rf"\b(?:{'|'.join([*sorted(names - plain), *spaced])}|fedppl\.(?:{'|'.join(public)})\.\w+)\b")
        found = {
            module: sorted(set(word.findall(modules()[module].read_text(encoding="utf-8"))))
            for module in modules()
            if unit(module) not in (family, "fedppl")
        }
        assert {module: told for module, told in found.items() if told} == {}


def test_modules_are_few_and_short() -> None:
    lengths = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in modules().items()}
    assert len(list(ROOT.glob("*.py"))) <= 12
    assert {module: length for module, length in lengths.items() if length > 700} == {}
    assert len(lengths) <= 180


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({"a": ["b"], "b": ["c"], "c": []}, []),
        ({"a": ["b"], "b": ["a"], "c": ["a"]}, [["a", "b"]]),
        ({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["e"], "e": ["d"]}, [["a", "b", "c"], ["d", "e"]]),
        ({"a": ["a"]}, [["a"]]),
    ],
)
def test_circles_are_found(graph: dict[str, list[str]], expected: list[list[str]]) -> None:
    assert circles(graph) == expected


def test_the_page_for_contributors_has_these_layers() -> None:
    page = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = page.partition("lowest layer first")[2].partition("\n\n")[0].splitlines()[2:]
    named = [set(re.findall(r"`(\w+)`", row.split("|")[1])) for row in rows]
    assert named == [set(layer) for layer in reversed(LAYERS[1:])]


def test_no_state_has_more_than_eight_fields() -> None:
    """Of what an algorithm knows: a state, and the named tuples of algorithms' modules that its fields hold."""
    fields = {
        node.name: {
            ast.unparse(each.target): ast.unparse(each.annotation)
            for each in node.body
            if isinstance(each, ast.AnnAssign)
        }
        for module in modules()
        if ".algorithms." in module
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases)
    }
    held = {name: set(re.findall(r"\w+", " ".join(of.values()))) & set(fields) for name, of in fields.items()}
    states, waiting = set(), [name for name in fields if name.endswith("State")]
    while waiting:
        if (name := waiting.pop()) not in states:
            states.add(name)
            waiting.extend(held[name])
    assert {"EPState", "WarmStart", "Search", "Weighed", "Climbing", "Rest"} <= states
    assert {name: list(fields[name]) for name in states if len(fields[name]) > 8} == {}
