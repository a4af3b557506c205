"""Keep doctests away from what cannot be imported here; mark tests by what they import."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from typing import Any

import pytest

from tests.support import markers

# Workers share the cores, and each computes in a pool of threads already. Before NumPy is loaded, here and in workers.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# Graphs and compilers make millions of small objects that live long: at Python's default of 700 new ones between two
# searches for cycles, the searches take a sixth of the suite's time.
gc.set_threshold(200_000, 10, 10)

from tests.support import c_sources  # noqa: E402  # it loads NumPy

c_sources.read_once()

collect_ignore = ["tests/deployed", "tests/deployed_sums"]
if importlib.util.find_spec("torch") is None:
    collect_ignore += ["fedppl/nn", "models/fedsi.py"]
if importlib.util.find_spec("flwr") is None:
    collect_ignore += ["fedppl/flower", "tests/support/fake_grid.py", "tests/support/hostile.py"]
_DRAWS = importlib.util.find_spec("matplotlib") is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist=loadfile``, give files that compile the same to the same worker."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    found = LoadFileScheduling(config, log)
    found._split_scope = lambda nodeid: markers.worker_of(nodeid.partition("::")[0])  # type: ignore[method-assign]
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by what its file imports."""
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            text = "\n".join(one.source for one in item.dtest.examples)
            found = markers.of_docstring(item.path, text)
            if not _DRAWS and ("matplotlib" in text or "fedppl.plots." in text):
                item.add_marker(pytest.mark.skip(reason="needs matplotlib"))
        else:
            found = markers.of_test(item.path, getattr(item, "originalname", item.name))
        for marker in found:
            item.add_marker(marker)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Close what an example drew: matplotlib warns where more than 20 figures are open."""
    if isinstance(item, pytest.DoctestItem) and "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
