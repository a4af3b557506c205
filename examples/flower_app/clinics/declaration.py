"""What all sites and the server agree on: one clinic's posterior, what is shared, and the algorithm."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm

import fedppl

PREDICTORS = ["intercept", "dose", "age"]


def clinic(X: Any, y: Any) -> pm.Model:
    """Regression of the fall in blood pressure whose effects vary over clinics (FedLin's HM2)."""
    with pm.Model(coords={"predictor": PREDICTORS}) as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        mu = pm.Normal("mu", 0, 5, dims="predictor")  # shared
        tau = pm.LogNormal("tau", 0, 0.5, dims="predictor")  # shared
        theta = pm.Normal("theta", mu, tau, dims="predictor")  # this clinic's
        sigma = pm.HalfNormal("sigma", 10)  # this clinic's
        pm.Normal("fall", X @ theta, sigma, observed=y)
    return model


MODEL = fedppl.FederatedModel(clinic, shared=["mu", "tau"])
ALGORITHM = fedppl.Sums()


def load_csv(path: str | Path) -> Mapping[str, np.ndarray]:
    """Read one clinic's patients: columns dose (10 mg above 50), age (decades above 60), fall (mmHg)."""
    with Path(path).open(newline="") as file:
        rows = [[float(row[name]) for name in ("dose", "age", "fall")] for row in csv.DictReader(file)]
    dose, age, fall = np.array(rows).T
    return {"X": np.column_stack([np.ones(len(rows)), dose, age]), "y": fall}
