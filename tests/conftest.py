"""Switches and fixtures of the whole suite."""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytensor
import pytest

from fedppl.model.interpreted import settings
from tests.support import markers

# Where in a test a variable was made is not read; to note it takes a twentieth of the time in which graphs are built.
pytensor.config.traceback__limit = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="run tests marked slow")
    parser.addoption("--run-flower", action="store_true", help="run tests that start Flower's processes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, option, reason in (
        ("slow", "--runslow", "slow; run with --runslow"),
        ("flower", "--run-flower", "starts Flower's processes; run with --run-flower"),
    ):
        if not config.getoption(option):
            for item in items:
                if item.get_closest_marker(marker):  # not by `keywords`, which have the names of folders
                    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="session")
def _key_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test, and no process that one starts, touches the key of the user who runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDPPL_KEY_FILE", str(tmp_path_factory.mktemp("owner") / "key"))
        yield


@pytest.fixture(autouse=True)
def _patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites of a fake grid compute, and compile, while their replies are pulled."""
    if importlib.util.find_spec("flwr") and markers.brings(request.path, "flwr", "fedppl.flower", "benchmarks"):
        monkeypatch.setattr("fedppl.flower.messages._PATIENCE", 120.0)


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Examples quieten the library's log; the next test hears it again."""
    level = logging.getLogger("fedppl").level
    yield
    logging.getLogger("fedppl").setLevel(level)


@pytest.fixture(autouse=True)
def _settings_of_pytensor() -> Iterator[None]:
    """Threads that build graphs leave PyTensor's settings as they were: else all that follows may be interpreted."""
    before = settings()
    yield
    for _ in range(100):  # a thread that a test left behind may be at work still
        if settings() == before:
            return
        time.sleep(0.1)
    assert settings() == before


@pytest.fixture
def rng() -> np.random.Generator:
    """Fixed stream: a test that passes once passes always."""
    return np.random.default_rng(20_211)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the real data sets, or a skip that says how to provide it."""
    named = os.environ.get("FEDPPL_DATA")
    folder = Path(named) if named else Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("real data sets not found: set FEDPPL_DATA to their folder")
    return folder
