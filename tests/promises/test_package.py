"""The package as users look into it: what it has, and when it is loaded."""

from __future__ import annotations

import subprocess
import sys

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
