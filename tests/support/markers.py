"""Which markers a test has, from its folder and from what its file imports: nobody has to remember them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# What brings models that are compiled, networks of torch, and scripts that are run.
BRINGS = {
    "compiled": ("pymc", "pytensor", "numba", "fedppl.models", "fedppl.testing", "examples", "benchmarks"),
    "torch": ("torch", "fedppl.nn", "fedppl.models.fedsi", "fedppl.models.pfedvem"),
    "examples": ("examples", "benchmarks"),
}
# Compiling functions of curves takes a minute: files that do so wait for each other in one worker.
TOGETHER = ("test_conformance", "test_runs", "test_curves", "test_lmc_", "test_models_fedlmc_ss", "coregional/")
# What a test names, itself or by a helper of its file, that reads or draws a result: ArviZ and xarray are what differs
# most between the Pythons.
RESULTS = {"az", "arviz", "xr", "xarray", "idata", "plots", "matplotlib", "loo", "conflict", "predict", "influence"}
_RESULTS_OF = ("arviz", "xarray", "fedppl.plots", "fedppl.results")  # what is imported from here does, too
_RESULTS_AT = ("fedppl/plots", "fedppl/results")  # folders whose docstrings do
IN_DOCSTRINGS = {"compiled": ("fedppl.fit(", "normal_means(", "pm.Model(", ".enrol(", "fedppl.rounds(")}


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """All cases, of which those that are not named here are slow: a promise that few cases show as well as many."""
    cases = list(cases)
    missing = [one for one in quick if one not in cases]
    assert not missing, missing
    return [one if one in quick else pytest.param(one, marks=pytest.mark.slow) for one in cases]


def worker_of(name: str) -> str:
    """Files with the same name here are run by one worker, in which the second finds what the first compiled."""
    return "curves" if any(part in name for part in TOGETHER) else name


def of_file(path: Path) -> set[str]:
    """Markers of a file of tests."""
    if ROOT / "tests" / "unit" in path.parents:
        return set()
    return {marker for marker, packages in BRINGS.items() if brings(path, *packages)}


def brings(path: Path, *packages: str) -> bool:
    """Whether a file of tests imports any of these packages, or a helper that does."""
    return any(_within(name, packages) for name in _imported(path))


def of_test(path: Path, name: str) -> set[str]:
    """Markers of a test by its own name, and those of its file."""
    return of_file(path) | ({"results"} if name in _of_results(path) else set())


@functools.cache
def _of_results(path: Path) -> frozenset[str]:
    """Tests of a file that touch a result, by themselves or by helpers and fixtures of the file."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    uses = {
        node.name: {part for one in ast.walk(node) for part in _words(one)}
        for node in body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    from_there = [one for one in body if isinstance(one, ast.ImportFrom) and _within(one.module or "", _RESULTS_OF)]
    words_of = RESULTS | {alias.asname or alias.name for one in from_there for alias in one.names}
    found = {name for name, words in uses.items() if words & words_of}
    while more := {name for name, words in uses.items() if words & found} - found:
        found |= more
    return frozenset(found)


def _words(node: ast.AST) -> set[str]:
    """Names that a part of a test reads."""
    if isinstance(node, ast.Import):
        return {part for alias in node.names for part in alias.name.split(".")}
    if isinstance(node, ast.ImportFrom):
        return {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    return {getattr(node, field, "") for field in ("attr", "id", "arg")} - {"", None}


def of_docstring(path: Path, text: str) -> set[str]:
    """Markers of an example in a docstring."""
    found = {marker for marker, words in IN_DOCSTRINGS.items() if any(word in text for word in words)}
    within = path.relative_to(ROOT).as_posix().startswith(_RESULTS_AT) if path.is_relative_to(ROOT) else False
    return found | (of_file(path) & {"torch"}) | ({"results"} if within else set())


def _within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@functools.cache
def _imported(path: Path) -> frozenset[str]:
    """All that a file imports, and what the helpers of tests that it imports bring along."""
    found = set()
    for name in _imports(ast.parse(path.read_text(encoding="utf-8"))):
        found.add(name)
        helper = ROOT.joinpath(*name.split(".")).with_suffix(".py")
        # problems.classification brings torch to those who ask for it, not to all who know its file
        if name.startswith("tests.") and helper.is_file() and helper != path:
            found |= {one for one in _imported(helper) if not _within(one, BRINGS["torch"])}
    return frozenset(found)


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "importorskip":
            yield from (str(one.value) for one in node.args if isinstance(one, ast.Constant))
