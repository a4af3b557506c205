"""The smallest app to deploy: the mean of one column, whose posterior has a closed form."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context

import fedppl
from fedppl.testing import normal_means

MODEL = normal_means(1)[0]
ALGORITHM = fedppl.EP()


def load(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Read the site's column."""
    with Path(config["data"]).open(newline="") as file:
        return {"y": np.array([float(row["fall"]) for row in csv.DictReader(file)]) / 8.0}


def report(fit: fedppl.Fit, context: Context) -> None:
    """Write what the tests look at."""
    folder = Path(str(context.run_config["results"]))
    folder.mkdir(parents=True)
    found = {
        "status": fit.status.value,
        "rounds": len(fit.records),
        "failures": [dict(record.failures) for record in fit.records],
        "linear": fit.posterior.linear.tolist(),
        "precision": fit.posterior.precision.tolist(),
    }
    (folder / "fit.json").write_text(json.dumps(found))


POLICY = fedppl.Policy(sums="optional", rows=10, few_rows=0, requests=10_000)
site = fedppl.Flower.client_app(MODEL, ALGORITHM, load, folder=lambda config: config["folder"], policy=POLICY)
server = fedppl.Flower.server_app(
    MODEL, ALGORITHM, clients=3, example_data={"y": [0.0, 1.0]}, random_seed=1, on_fit=report
)
