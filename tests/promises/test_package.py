"""The package as users look into it: what it has, and when it is loaded."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

ALONE = """
import importlib.util, inspect, pydoc, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("torch", "flwr") else found(name, *rest)
import fedppl
late = ("fedppl.formulas", "fedppl.plots", "fedppl.search", "fedppl.run.refits")
assert not [name for name in sys.modules if name.startswith(late)]
names = {name for name, _ in inspect.getmembers(fedppl)}
assert {"EP", "formula", "plots", "calibrate"} <= names and not {"Flower", "nn"} & names
pydoc.render_doc(fedppl)
"""


def test_the_package_can_be_looked_into_without_what_is_not_installed() -> None:
    """And what takes long to load is not loaded before it is used."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


_SCRIPTS = [file for folder in ("benchmarks", "examples", "models") for file in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("script", _SCRIPTS, ids=lambda script: str(script.relative_to(ROOT)))
def test_a_script_names_what_there_is(script: Path) -> None:
    """Names that it imports from modules of fedppl, and attributes of these modules: no test runs most benchmarks."""
    tree, modules = ast.parse(script.read_text(encoding="utf-8")), dict[str, ModuleType]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] != "fedppl":
            continue
        for alias in node.names:
            try:
                home, whole = importlib.import_module(str(node.module)), f"{node.module}.{alias.name}"
                found = getattr(home, alias.name) if hasattr(home, alias.name) else importlib.import_module(whole)
            except ImportError as error:
                if (error.name or "").startswith("fedppl"):
                    raise
                continue  # an extra that is not installed
            if isinstance(found, ModuleType):
                modules[alias.asname or alias.name] = found
    attributes = [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    named = [(node.value.id, node.attr) for node in attributes if isinstance(node.value, ast.Name)]
    assert not [f"{name}.{attr}" for name, attr in named if name in modules and not hasattr(modules[name], attr)]
