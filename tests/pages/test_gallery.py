"""The gallery: what docs/gallery keeps was made by the scripts as they are, and the scripts run."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS, KEPT = ROOT / "examples" / "gallery", ROOT / "docs" / "gallery"
EXAMPLES = sorted(path.relative_to(SCRIPTS) for path in SCRIPTS.rglob("plot_*.py"))
REMEDY = "build the site and commit docs/gallery: python -m sphinx -W -q -b html docs build/site"


def kept(example: Path, suffix: str) -> Path:
    return KEPT / example.with_name(example.stem + suffix)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_what_is_kept_came_from_the_script_as_it_is(example: Path) -> None:
    assert kept(example, ".py.md5").exists(), REMEDY
    text = (SCRIPTS / example).read_text(encoding="utf-8")
    digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    assert kept(example, ".py.md5").read_text(encoding="utf-8").strip() == digest, REMEDY


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_a_page_has_all_its_pictures(example: Path) -> None:
    page = kept(example, ".rst").read_text(encoding="utf-8")
    found = set(re.findall(r"image-sg:: /gallery/(\S+)", page))
    found.add((example.parent / "images" / "thumb" / f"sphx_glr_{example.stem}_thumb.png").as_posix())
    assert len(found) > 1
    missing = sorted(name for name in found if not (KEPT / name).exists())
    assert not missing, REMEDY
    assert kept(example, ".codeobj.json").exists(), REMEDY  # says in which pages of the reference it is named


def test_nothing_is_kept_of_scripts_that_are_gone() -> None:
    pages = {path.relative_to(KEPT).with_suffix(".py") for path in KEPT.rglob("plot_*.rst")}
    assert pages == set(EXAMPLES), REMEDY
    stems = {example.stem for example in EXAMPLES}
    pictures = {re.sub(r"^sphx_glr_|_(\d{3}|thumb)$", "", path.stem) for path in KEPT.rglob("sphx_glr_*.png")}
    assert pictures <= stems


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_an_example_runs_as_a_plain_script(example: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / example)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_kept_outputs_name_no_folder_of_a_machine() -> None:
    for page in sorted(KEPT.rglob("*.rst")):
        assert not re.search(r"(?<![\w.:/])/\w+/[\w/.-]+\.py:\d+", page.read_text(encoding="utf-8")), page.name
