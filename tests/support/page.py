"""Code of the documentation's pages, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def fences(page: Path) -> list[tuple[str, str]]:
    """Language and text of every block of a page."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```([^\n`]*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str = "python") -> list[str]:
    """Texts of the blocks in one language, in their order."""
    return [text for found, text in fences(page) if found == language]


def diagnostics() -> set[str]:
    """Names of clients' diagnostics in docs/privacy.md."""
    page = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    return set(re.findall(r"`(\w+)`", page.partition("- **Diagnostics**")[2].partition("\n- **")[0]))


def run(code: str, where: str, names: dict[str, Any]) -> dict[str, Any]:
    """Execute a block of Python beside what the page takes for granted, and return all names."""
    exec(compile(code, where, "exec"), names)
    return names
