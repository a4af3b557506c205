"""Draw what kept fits of `benchmarks/pfedvem.py` tell beside averages: Figures 2 and 10 to 12 of the paper.

Four panels: accuracy of clients' own models against their rows; each client's share of the confidence, and its
deviation ‖μ_j − w‖² / d, against its rows; and accuracy of the global model after every round, for its average over
rounds too.

    python benchmarks/pfedvem.py --dataset fmnist --clients 100 --methods pFedVEM FedPer FedAvg --folder results
    python benchmarks/pfedvem_figure.py results/fmnist-100-*-0.json --figure pfedvem.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("fits", type=Path, nargs="+", help="kept fits, of one data set and one number of clients")
    parser.add_argument("--figure", type=Path, required=True)
    return parser.parse_args(argv)


def by_size(found: dict[str, Any], values: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of clients that have a value, and the values, in the order of rows."""
    pairs = {k: v[-1] if isinstance(v, list) else v for k, v in values.items() if v not in ([], None)}
    names = sorted(pairs, key=found["sizes"].__getitem__)
    return np.array([found["sizes"][k] for k in names]), np.array([pairs[k] for k in names], dtype=float)


def curve(found: dict[str, Any], column: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds, and what was measured after each."""
    pairs = sorted((int(k), v) for k, v in found[column].items())
    return np.array([k for k, _ in pairs]), np.array([v for _, v in pairs])


def draw(fits: list[dict[str, Any]], path: Path) -> None:
    """Draw the four panels."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    of_clients, shares, deviations, rounds = axes.flat
    for found in fits:
        label = f"{found['method']}, seed {found['seed']}" if len({f["seed"] for f in fits}) > 1 else found["method"]
        if found["PM"]:
            last = found["PM"][max(found["PM"], key=int)]
            of_clients.plot(*by_size(found, last), ".", label=label, alpha=0.7)
        for axis, column in ((shares, "confidence"), (deviations, "deviation")):
            if column in found:
                rows, values = by_size(found, found[column])
                axis.plot(rows, values / values.sum() if column == "confidence" else values, ".", label=label)
        if found["GM"]:
            (line,) = rounds.plot(*curve(found, "GM"), lw=0.7, alpha=0.7, label=label)
            rounds.plot(*curve(found, "GM averaged"), color=line.get_color(), label=f"{label}, averaged over rounds")
    for axis in (of_clients, shares, deviations):
        axis.set(xscale="log", xlabel="training rows of the client")
    of_clients.set_ylabel("accuracy of its own model, %")
    shares.set(ylabel="share of all clients' confidence")
    deviations.set(ylabel="‖μ − w‖² / d", yscale="log")
    rounds.set(xlabel="round", ylabel="accuracy of the global model, %")
    for axis in (of_clients, rounds):
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    """Read the fits, draw them."""
    options = arguments(argv)
    missing = [str(path) for path in options.fits if not path.is_file()]
    if missing:
        sys.exit(f"{', '.join(missing)}: no such file; benchmarks/pfedvem.py keeps fits in --folder.")
    draw([json.loads(path.read_text()) for path in options.fits], options.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
