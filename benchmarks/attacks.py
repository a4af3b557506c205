"""Attacks on a federation, and whether they are held: one JSON line.

A site that lies about the model, messages made to end a run, files made to run code, a server that asks for rows or is
after single patients, a budget that is counted wrongly, a client that lies about its moments or in a sum, and a server
that is after a single site's numbers where sites answer in sums. Each bar is a figure that ends in `_met`; the command
ends with 1 where one is not.

    OMP_NUM_THREADS=1 python benchmarks/attacks.py
    OMP_NUM_THREADS=1 python benchmarks/attacks.py --parts budget trust
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

PARTS = ("wire", "state", "policy", "patients", "told", "budget", "trust", "sums", "poisoned")


def run(part: str, quick: bool) -> dict[str, Any]:
    """One part's figures, with the CPU seconds that they took."""
    started = time.process_time()
    found: dict[str, Any] = importlib.import_module(f"benchmarks._attacks.{part}").run(quick)
    return {**found, f"{part}_cpu_s": time.process_time() - started}


def rounded(value: Any) -> Any:
    """Four digits are enough to read."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    """Attack, print one JSON line, and fail where a bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="a few seconds a part, as the tests have it")
    options = parser.parse_args()
    logging.getLogger("fedppl").setLevel(logging.CRITICAL)  # refusals by the thousand
    warnings.simplefilter("ignore")  # that fits under attack do not converge is counted below
    figures: dict[str, Any] = {}
    for part in options.parts:
        figures |= run(part, options.quick)
    missed = [name for name, value in figures.items() if name.endswith("_met") and not value]
    print(json.dumps({**rounded(figures), "missed": missed}))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
