"""Simulate three clinics' patients, each in a CSV file of its own.

python make_data.py "$WORK/data"
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np

CLINICS = {"north": 40, "south": 60, "west": 200}  # patients
AVERAGE, SPREAD, NOISE = np.array([8.0, 4.0, -1.0]), np.array([2.0, 0.8, 0.4]), 8.0  # mmHg; the truth


def main(argv: list[str] | None = None) -> None:
    """Write one file a clinic."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(options.seed)
    for name, patients in CLINICS.items():
        effects = AVERAGE + SPREAD * rng.normal(size=3)
        dose, age = rng.uniform(-2, 2, patients), rng.normal(size=patients)
        fall = effects[0] + effects[1] * dose + effects[2] * age + NOISE * rng.normal(size=patients)
        with (options.folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["dose", "age", "fall"])
            writer.writerows(np.column_stack([dose, age, fall]).round(3).tolist())
        print(f"{options.folder / name}.csv: {patients} patients")


if __name__ == "__main__":
    main()
