"""Keep doctests away from what cannot be imported here."""

from __future__ import annotations

import importlib.util

# Loaded by Flower alone, in a process whose environment says what to do.
collect_ignore = ["fedppl/flower/virtual.py", "tests/deployed"]
if importlib.util.find_spec("torch") is None:
    collect_ignore += ["fedppl/nn", "models/fedsi.py"]
if importlib.util.find_spec("flwr") is None:
    edges = ("app", "grid", "post", "records", "roll")
    collect_ignore += ["tests/fake_grid.py", *(f"fedppl/flower/{name}.py" for name in edges)]
