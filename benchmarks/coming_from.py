"""Run a page of docs/coming_from: what it says of fedppl, and what other packages do with the same data.

    python benchmarks/coming_from.py mixed_models
    python benchmarks/coming_from.py mixed_models --python OTHER/bin/python

Blocks of a page marked ``python`` are fedppl's and run first, one after the other. Those marked ``r`` are run by
Rscript where it is found. Those marked ``py``, of packages of Python that fedppl does not need, are run by the
interpreter of ``--python``. A block that begins with ``# Not run`` is left out. All run in one new folder.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PAGES = Path(__file__).parents[1] / "docs" / "coming_from"


def blocks(page: str, language: str) -> list[str]:
    """Code of a page in one language, but for what says that it is not run."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    found = re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    return [block for block in found if not block.startswith("# Not run")]


def run(page: str, language: str, command: list[str], folder: Path) -> None:
    """Run a page's blocks in one language as one script; nothing where there are none."""
    if not (code := "\n".join(blocks(page, language))):
        return
    script = folder / f"blocks.{language}"
    script.write_text(code, encoding="utf-8")
    print(f"\n--- {language}\n", flush=True)
    # R calls the Python that runs this.
    given = {**os.environ, "RETICULATE_PYTHON": sys.executable, "MPLBACKEND": "Agg"}
    subprocess.run([*command, str(script)], cwd=folder, env=given, check=True)


def main() -> None:
    """Run one page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", choices=sorted(page.stem for page in PAGES.glob("*.md")))
    parser.add_argument("--python", help="interpreter that has the other packages of Python")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(given.page, "python", [sys.executable], folder)
        if shutil.which("Rscript"):
            run(given.page, "r", ["Rscript"], folder)
        if given.python:
            run(given.page, "py", [given.python], folder)


if __name__ == "__main__":
    main()
