"""The recipes of docs/callbacks.md, run as they stand there beside fakes of the packages that they use."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import math
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedppl
from fedppl.results.records import Record
from fedppl.testing import normal_means
from fedppl.types import Status
from tests.support import page, problems

PAGE = (page.ROOT / "docs" / "callbacks.md").read_text(encoding="utf-8")
RECIPES = ("MLflow", "TensorBoard", "Stopping early", "What a run says by itself")
MODEL, CLIENTS = normal_means(3)
# As the packages declare them; what they do not have is an error.
SIGNATURES = {
    "log_metrics": "(metrics, step=None, synchronous=None, run_id=None, timestamp=None)",
    "log_params": "(params, synchronous=None, run_id=None)",
    "set_tag": "(key, value, synchronous=None)",
    "log_artifact": "(local_path, artifact_path=None, run_id=None)",
    "add_scalar": "(tag, scalar_value, global_step=None, walltime=None, new_style=False, double_precision=False)",
}
Calls = list[tuple[str, dict[str, Any]]]


def recipe(title: str) -> str:
    return re.findall(r"```python\n(.*?)```", PAGE.partition(f"## {title}\n")[2], flags=re.DOTALL)[0]


def fake(name: str, calls: Calls) -> Any:
    """A function of that signature that keeps what it is given."""
    parameters: dict[str, Any] = {}
    exec(f"def declared{SIGNATURES[name]}: ...", parameters)
    signature = inspect.signature(parameters["declared"])

    def called(*arguments: Any, **keywords: Any) -> None:
        calls.append((name, dict(signature.bind(*arguments, **keywords).arguments)))

    return called


def run(title: str, algorithm: Any) -> dict[str, Any]:
    names: dict[str, Any] = {"model": MODEL, "clients": CLIENTS, "algorithm": algorithm}
    exec(compile(recipe(title), f"{title} of docs/callbacks.md", "exec"), names)
    return names


def test_every_recipe_of_the_page_is_run() -> None:
    assert [recipe(title) for title in RECIPES] == page.blocks(page.ROOT / "docs" / "callbacks.md")


def test_the_log_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    root, stream = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(sys, "stderr", stream)
    run("What a run says by itself", fedppl.EP())
    fit = fedppl.fit(MODEL, CLIENTS, fedppl.EP(), progressbar=False, random_seed=1)
    assert stream.getvalue().count("fedppl") >= len(fit.records)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []

    @contextlib.contextmanager
    def start_run() -> Iterator[None]:
        calls.append(("start_run", {}))
        yield
        calls.append(("end_run", {}))

    module = types.SimpleNamespace(
        start_run=start_run, **{name: fake(name, calls) for name in SIGNATURES if name != "add_scalar"}
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    fit = run("MLflow", fedppl.EP())["fit"]
    assert [calls[0][0], calls[-1][0]] == ["start_run", "end_run"]
    metrics = [given for name, given in calls if name == "log_metrics"]
    assert [given["step"] for given in metrics] == [record.number for record in fit.records]
    for given in metrics:
        assert all(re.fullmatch(r"[\w.\-/ ]+", name) for name in given["metrics"])
        assert all(type(value) is float and math.isfinite(value) for value in given["metrics"].values())
    assert metrics[-1]["metrics"]["change_mean"] == fit.records[-1].info["change_mean"]
    (parameters,) = [given["params"] for name, given in calls if name == "log_params"]
    assert parameters["algorithm"] == "EP" and all(len(str(value)) < 6000 for value in parameters.values())
    assert ("set_tag", {"key": "status", "value": "converged"}) in calls
    assert Path("run.nc").is_file()


def test_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []

    class SummaryWriter:
        def __init__(self, log_dir: str) -> None:
            self.add_scalar = fake("add_scalar", calls)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *exception: object) -> None:
            calls.append(("close", {}))

    for name in ("torch", "torch.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    fit = run("TensorBoard", fedppl.EP())["fit"]
    assert calls.pop()[0] == "close"
    seconds = [given for _, given in calls if given["tag"] == "round/seconds"]
    assert [given["global_step"] for given in seconds] == [record.number for record in fit.records]
    assert {given["tag"] for _, given in calls if given["tag"].endswith("/client 2")}


@problems.few_rounds
def test_stopping_early() -> None:
    algorithm = fedppl.EP(warm_start=False, damping=0.3, tolerance=1e-9)
    found = run("Stopping early", algorithm)
    fit, enough = found["fit"], found["enough"]
    changes = [record.info["change_mean"] for record in fit.records if not record.preliminary]
    assert fit.status is Status.MAX_ROUNDS and "callback" in fit.message
    assert all(change < 0.05 for change in changes[-2:])
    assert not any(a < 0.05 and b < 0.05 for a, b in zip(changes[:-2], changes[1:-1], strict=True))
    at_once = fedppl.fit(MODEL, CLIENTS, algorithm, callback=enough(seconds=0), progressbar=False, random_seed=1)
    assert sum(not record.preliminary for record in at_once.records) == 1 and at_once.posterior is not None


def test_numbers_are_finite_floats() -> None:
    info = {"phase": "EP", "change_mean": 0.5, "skewness": math.nan, "objective": -math.inf, "held": np.int64(2)}
    record = Record(4, ("a", "b"), {"b": "late"}, {"a": {}}, info, {"a": 8, "b": 8}, {"a": 16}, "", 1.5, Status.RUNNING)
    step = fedppl.Round(4, None, None, Status.RUNNING, "", record)
    assert step.numbers == {
        "change_mean": 0.5,
        "held": 2.0,
        "seconds": 1.5,
        "clients_used": 1.0,
        "clients_skipped": 1.0,
        "bytes_down": 16.0,
        "bytes_up": 16.0,
    }
    assert all(type(value) is float for value in step.numbers.values())
