"""The pages for users of other packages: their code runs as pasted; inventories that links need are current."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.page import blocks

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "coming_from").glob("*.md"))
NEEDS = {"laplace": "torch"}


SLOW = {"datashield", "meta_analysis", "pymc"}  # more than eight CPU seconds
WITH_CODE = [
    pytest.param(page, marks=[pytest.mark.slow] * (page.stem in SLOW), id=f"from_{page.stem}")
    for page in PAGES
    if blocks(page, "python")
]


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of PyMC's first steps
@pytest.mark.parametrize("page", WITH_CODE)
def test_a_page_s_code_runs_as_pasted(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the last fit ends as it should, without a warning."""
    if (name := NEEDS.get(page.stem)) and importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page, "python"), start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)  # noqa: S102
    assert namespace["fit"].status.value in ("converged", "max_rounds")  # networks may go on for ever
    assert capsys.readouterr().out


@pytest.mark.slow
def test_the_page_for_r_runs(tmp_path: Path) -> None:
    if (program := shutil.which("Rscript")) is None:
        pytest.skip("needs Rscript")
    asked = 'for (p in c("reticulate", "lme4")) stopifnot(requireNamespace(p, quietly = TRUE))'
    if subprocess.run([program, "-e", asked], capture_output=True, check=False).returncode:
        pytest.skip("needs R's packages reticulate and lme4")
    script = tmp_path / "analysis.R"
    script.write_text("\n".join(blocks(ROOT / "docs/coming_from/r.md", "r")), encoding="utf-8")
    given = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    (command,) = blocks(ROOT / "docs/coming_from/r.md", "bash")
    command = command.replace(".venv/bin/python", sys.executable)
    done = subprocess.run(
        ["bash", "-ec", command], cwd=tmp_path, env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "converged" in done.stdout and "site_sd" in done.stdout
    assert (tmp_path / "forest.png").stat().st_size > 1000


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/coming_from/index.md").read_text(encoding="utf-8")
    assert {page.name for page in PAGES if page.stem != "index"} == set(re.findall(r"\]\((\w+\.md)\)", index))


def test_inventories_are_what_the_list_of_names_makes() -> None:
    made = runpy.run_path(str(ROOT / "docs/inventories.py"))
    for package in made["packages"]():
        stored = (ROOT / "docs/inventories" / f"{package.name}.inv").read_bytes()
        lines = [zlib.decompress(one.split(b"\n", 4)[4]) for one in (stored, made["inventory"](package))]
        assert lines[0] == lines[1], f"run python docs/inventories.py: {package.name}"
        assert stored.startswith(b"# Sphinx inventory version 2\n")


def test_a_line_that_is_no_name_is_refused() -> None:
    read = runpy.run_path(str(ROOT / "docs/inventories.py"))["read"]
    with pytest.raises(ValueError, match="line 1, 'numpy.ndarray class', is neither"):
        read("numpy.ndarray class")
