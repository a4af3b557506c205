"""Rows of the pages' tables from kept fits of benchmarks/fedsi.py and benchmarks/pfedvem.py, as Markdown.

A row for each method at each learning rate, or with each kind of weights: mean over the seeds that are there, with
their number; ± is the sd over seeds (fedsi.py) or the standard error (pfedvem.py), as the pages have it.

    python benchmarks/fit_tables.py benchmarks/results/fits/fedsi/cifar10-small-seed*-rounds40.json
    python benchmarks/fit_tables.py benchmarks/results/fits/pfedvem/fmnist-100-same-100-*.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import pandas as pd

COLUMNS = ("accuracy", "ECE", "MCE", "Brier", "NLL", "AUROC unseen", "AUROC strange", "novel", "seconds", "failed")


def of_fedsi(fits: list[tuple[str, Any]]) -> pd.DataFrame:
    """Accuracy and calibration by method and rate."""
    seeds = pd.DataFrame([row for _, rows in fits for row in rows])
    groups = seeds.groupby("row", sort=False)
    columns = [name for name in COLUMNS if name in seeds]
    table = groups[columns].mean()
    table.insert(0, "seeds", groups.size())
    table.insert(2, "±", groups["accuracy"].std())
    return table


def of_pfedvem(fits: list[tuple[str, Any]]) -> pd.DataFrame:
    """Accuracy of clients' own models and of the global one, with standard errors."""
    from benchmarks._pfedvem.scores import figures

    rows = []
    for _, found in fits:
        last = max(int(number) for number in [*found["PM"], *found["GM"]])
        row = figures(found, argparse.Namespace(rounds=last, score_every=1))
        ended = sorted(found["GM"], key=int)[-5:]
        five = {"GM last 5": sum(found["GM"][number] for number in ended) / 5} if len(ended) == 5 else {}
        rows.append({"method": found["method"], "rounds": last, **row, **five})
    seeds = pd.DataFrame(rows)
    groups = seeds.groupby("method", sort=False)
    wanted = ("rounds", "PM", "smallest 10 %", "GM last 10", "GM last 5", "averaged", "CPU s", "failed")
    columns = [name for name in wanted if name in seeds]
    table = groups[columns].mean()
    table.insert(0, "seeds", groups.size())
    for name in ("PM", "smallest 10 %", "GM last 10", "averaged"):
        if name in table:
            table.insert(table.columns.get_loc(name) + 1, f"± {name}", groups[name].sem())
    return table


def cell(name: str, value: float) -> str:
    """A number with the digits that the pages have."""
    if isinstance(value, float) and math.isnan(value):
        return ""
    if name in ("seeds", "rounds", "failed"):
        return f"{value:.0f}"
    return f"{value:.3f}" if name[:3] in ("ECE", "MCE", "Bri", "NLL", "AUR") else f"{value:.2f}"


def main(argv: list[str] | None = None) -> int:
    """Print one table of all files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="kept fits of one benchmark")
    files: list[Path] = parser.parse_args(argv).files
    fits = [(path.name, json.loads(path.read_text())) for path in files]
    kinds = {type(found) for _, found in fits}
    if len(kinds) > 1:
        parser.error("the files are of two benchmarks; give those of one")
    table = of_fedsi(fits) if kinds == {list} else of_pfedvem(fits)
    print("| |" + "".join(f" {name} |" for name in table.columns))
    print("|---|" + "---|" * len(table.columns))
    for label, row in table.iterrows():
        print(f"| {label} |" + "".join(f" {cell(name, value)} |" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main())
