"""Run a benchmark and keep its line of JSON with the date, the cores and the command, for the tables of pages.

python benchmarks/record.py scale --groups 1000 10000
python docs/tables.py
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def kept(benchmark: str, arguments: list[str], printed: str, date: str, commit: str) -> Path:
    """Write the last line of what was printed; returns the file."""
    result: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    told = {
        "date": date,
        "commit": commit,
        "cores": os.cpu_count(),
        "command": " ".join(["python", f"benchmarks/{benchmark}.py", *arguments]),
        "result": result,
    }
    sizes = "-".join(str(size) for size in result.get("sizes", {}))
    path = RESULTS / f"{benchmark}-{date}-{sizes}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(told) + "\n", encoding="utf-8")
    return path


def main(argv: list[str] | None = None) -> None:
    """Run it, show what it prints, and keep the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("benchmark", choices=["scale", "duel"])
    options, arguments = parser.parse_known_args(argv)
    # Before the run: it takes hours, and what is changed meanwhile is not what ran. "-dirty" says that files differ.
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude", "*"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=True,
    )
    command = [sys.executable, str(HERE / f"{options.benchmark}.py"), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, end="")
    date = datetime.date.today().isoformat()
    print(kept(options.benchmark, arguments, done.stdout, date, commit.stdout.strip()))


if __name__ == "__main__":
    main()
