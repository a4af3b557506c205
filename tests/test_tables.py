"""Tables of pages that are made from kept lines of benchmarks."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
KEPT = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_kept_lines(tables: ModuleType) -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert tables.written(page) == page, "run python docs/tables.py"


def test_another_figure_is_another_table(tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = json.loads(next(path for path in KEPT if path.name.startswith("scale")).read_text(encoding="utf-8"))
    before = tables.scale()
    next(iter(run["result"]["sizes"].values()))["fedppl"]["first"]["cpu_s"] += 100.0
    (tmp_path / "scale-x.json").write_text(json.dumps(run), encoding="utf-8")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.scale() not in ("", before)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_a_kept_line_says_when_where_and_how(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    run = json.loads(text)
    assert len(text.splitlines()) == 1
    assert {"date", "commit", "cores", "command", "result"} == set(run)
    assert run["command"].startswith(f"python benchmarks/{run['result']['benchmark']}.py")
