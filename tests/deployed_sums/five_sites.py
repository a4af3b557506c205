"""An app to deploy whose sites answer in sums under masks: a logistic regression of which everything is shared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
from flwr.app import Context

import fedppl


def clinic(x: Any, y: Any) -> pm.Model:
    """y ~ Bernoulli(logit⁻¹(a + b x)), a, b ~ N(0, 2²)."""
    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y", y)
        line = pm.Normal("line", 0, 2, shape=2)
        pm.Bernoulli("obs", logit_p=line[0] + line[1] * x, observed=y)
    return model


MODEL = fedppl.FederatedModel(clinic, ["line"])
ALGORITHM = fedppl.Sums()


def load(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Read the site's columns."""
    x, y = np.loadtxt(config["data"], delimiter=",", skiprows=1).T
    return {"x": x, "y": y.astype(int)}


def folder(config: Mapping[str, Any]) -> Path:
    """The site's folder, with its identity and roster."""
    return Path(config["folder"])


def report(fit: fedppl.Fit, context: Context) -> None:
    """Write what the test looks at."""
    results = Path(str(context.run_config["results"]))
    results.mkdir(parents=True)
    found = {
        "status": fit.status.value,
        "message": fit.message,
        "rounds": len(fit.records),
        "failures": [dict(record.failures) for record in fit.records],
        "mean": fedppl.gaussian.mean(fit.posterior).tolist(),
        "sd": fedppl.gaussian.standard_deviations(fit.posterior).tolist(),
    }
    (results / "fit.json").write_text(json.dumps(found))


site = fedppl.Flower.client_app(MODEL, ALGORITHM, load, folder=folder, secure=folder)
server = fedppl.Flower.server_app(
    MODEL, ALGORITHM, clients=5, example_data={"x": [0.0, 1.0], "y": [0, 1]}, secure=True, random_seed=1, on_fit=report
)
