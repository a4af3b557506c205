"""Which markers a test has, from its folder and from what its file imports: nobody has to remember them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

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
# What a test names, itself or by a helper of its file, that touches ArviZ, xarray or matplotlib, which differ most
# between the Pythons. What reads numbers of a result (`fit.idata`) and no more is not among them: where groups, labels
# and draws have their form, tests of these have it too. `idata` is the module of that name, which builds containers.
RESULTS = {"az", "arviz", "xr", "xarray", "idata", "plots", "matplotlib"}
_RESULTS_OF = ("arviz", "xarray", "fedppl.plots", "fedppl.results.idata")  # what is imported from here does, too
_RESULTS_AT = ("fedppl/plots", "fedppl/results")  # folders whose docstrings do
IN_DOCSTRINGS = {"compiled": ("fedppl.fit(", "normal_means(", "pm.Model(", ".enrol(", "fedppl.rounds(")}


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """All cases, of which those that are not named here are slow: a promise that few cases show as well as many."""
    cases = list(cases)
    missing = [case for case in quick if case not in cases]
    assert not missing, missing
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def worker_of(name: str) -> str:
    """Files with the same name here are run by one worker, in which the second finds what the first compiled."""
    return "curves" if any(part in name for part in TOGETHER) else name


@functools.cache
def of_file(path: Path) -> frozenset[str]:
    """Markers of a file of tests."""
    if ROOT / "tests" / "unit" in path.parents:
        return frozenset()
    return frozenset(marker for marker, packages in BRINGS.items() if brings(path, *packages))


@functools.cache
def brings(path: Path, *packages: str) -> bool:
    """Whether a file of tests imports any of these packages, or a helper that does."""
    return any(_within(name, packages) for name in _imported(path))


def of_test(path: Path, name: str) -> frozenset[str]:
    """Markers of a test by its own name, and those of its file."""
    return of_file(path) | ({"results"} if name in _of_results(path) else frozenset())


class _Read(NamedTuple):
    """What a file names."""

    imported: frozenset[str]
    words: dict[str, set[str]]  # of each function and class
    from_there: frozenset[str]  # what it imports of results


@functools.cache
def _read(path: Path) -> _Read:
    """One walk through a file; that is what marking costs."""
    imported: set[str] = set()
    from_there: set[str] = set()
    words: dict[str, set[str]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        named: set[str] = set()
        for one in ast.walk(node):
            if isinstance(one, ast.Name):
                named.add(one.id)
            elif isinstance(one, ast.Attribute):
                named.update({one.attr} - {"idata"})  # of a fit; see above
            elif isinstance(one, ast.arg | ast.keyword):
                named.add(one.arg or "")
            elif isinstance(one, ast.Import):
                imported.update(alias.name for alias in one.names)
                named.update(part for alias in one.names for part in alias.name.split("."))
            elif isinstance(one, ast.ImportFrom):
                named.update((one.module or "").split("."), (alias.name for alias in one.names))
                if one.module:
                    imported.update((one.module, *(f"{one.module}.{alias.name}" for alias in one.names)))
            elif isinstance(one, ast.Call) and getattr(one.func, "attr", "") == "importorskip":
                imported.update(str(given.value) for given in one.args if isinstance(given, ast.Constant))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            words[node.name] = named
        elif isinstance(node, ast.ImportFrom) and _within(node.module or "", _RESULTS_OF):
            from_there.update(alias.asname or alias.name for alias in node.names)
    return _Read(frozenset(imported), words, frozenset(from_there))


@functools.cache
def _of_results(path: Path) -> frozenset[str]:
    """Tests of a file that touch a result, by themselves or by helpers and fixtures of the file.

    None of curves, whose functions take a minute to compile: their tables are xarray's as others are.
    """
    if any(part in path.name for part in TOGETHER):
        return frozenset()
    read = _read(path)
    found: set[str] = set()
    more = {name for name, words in read.words.items() if words & (RESULTS | read.from_there)}
    while more:
        found |= more
        more = {name for name, words in read.words.items() if words & found} - found
    return frozenset(found)


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
    found = set(_read(path).imported)
    for name in _read(path).imported:
        # problems.classification brings torch to those who ask for it, not to all who know its file
        if name.startswith("tests.") and (helper := ROOT.joinpath(*name.split(".")).with_suffix(".py")) != path:
            found |= _of_helper(helper)
    return frozenset(found)


@functools.cache
def _of_helper(path: Path) -> frozenset[str]:
    """What a helper of tests brings; nothing where there is none, as behind the name of a function."""
    if not path.is_file():
        return frozenset()
    return frozenset(one for one in _imported(path) if not _within(one, BRINGS["torch"]))
