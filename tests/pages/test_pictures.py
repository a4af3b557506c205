"""Pictures of pages: drawn by the script that lies beside them, as it is now, and shown."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"
SCRIPTS = sorted(path for path in FIGURES.glob("*.py") if path.with_suffix(".sha256").exists())


def test_there_are_scripts() -> None:
    assert "ep_in_pictures" in {script.stem for script in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_script_has_not_changed_since_it_drew(script: Path) -> None:
    noted = script.with_suffix(".sha256").read_text(encoding="utf-8").strip()
    now = hashlib.sha256(script.read_text(encoding="utf-8").encode()).hexdigest()
    assert now == noted, f"run python docs/figures/{script.name}"


def test_pictures_are_there_once_and_small() -> None:
    pages = [page.read_text(encoding="utf-8") for page in ROOT.glob("docs/*.md")]
    shown = re.findall(r"\(figures/(ep_\w+\.png)\)", "\n".join(pages))
    assert sorted(shown) == sorted(path.name for path in FIGURES.glob("ep_*.png"))
    assert all(path.stat().st_size < 300_000 for path in FIGURES.glob("ep_*.png"))
