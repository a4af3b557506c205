"""Twelve hospitals learn together how a drug works, without pooling their patients.

Each hospital has its own effects θ of dose and age on the fall in blood pressure. What they share is the average
hospital μ and how much hospitals differ, τ. One of them has six patients. No data files are needed.

    python examples/quickstart.py --figure hospitals.png
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm

import fedppl

PREDICTORS = ["intercept", "dose", "age"]  # dose in 10 mg above 50, age in decades above 60
AVERAGE, SPREAD, NOISE = np.array([8.0, 4.0, -1.0]), np.array([2.0, 0.8, 0.4]), 8.0  # mmHg; the truth
PATIENTS = [6, 10, 14, 20, 25, 30, 40, 60, 90, 150, 250, 400]


def hospital(X: np.ndarray, y: np.ndarray) -> pm.Model:
    """Declare one hospital's posterior: ordinary PyMC."""
    with pm.Model(coords={"predictor": PREDICTORS}) as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        mu = pm.Normal("mu", 0, 10, dims="predictor")  # shared
        tau = pm.LogNormal("tau", 0, 1, dims="predictor")  # shared
        theta = pm.Normal("theta", mu, tau, dims="predictor")  # this hospital's
        sigma = pm.HalfNormal("sigma", 10)  # this hospital's
        pm.Normal("fall", X @ theta, sigma, observed=y)
    return model


def without_age(X: np.ndarray, y: np.ndarray) -> pm.Model:
    """The same, if age did not matter: a second model of the same patients."""
    with pm.Model(coords={"predictor": PREDICTORS[:2]}) as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        mu = pm.Normal("mu", 0, 10, dims="predictor")
        tau = pm.LogNormal("tau", 0, 1, dims="predictor")
        theta = pm.Normal("theta", mu, tau, dims="predictor")
        sigma = pm.HalfNormal("sigma", 10)
        pm.Normal("fall", X[:, :2] @ theta, sigma, observed=y)
    return model


def simulate(rng: np.random.Generator, patients: int, theta: np.ndarray) -> dict[str, np.ndarray]:
    """Draw the patients of one hospital."""
    X = np.column_stack([np.ones(patients), rng.uniform(-2, 2, patients), rng.normal(0, 1, patients)])
    return {"X": X, "y": X @ theta + NOISE * rng.normal(size=patients)}


def alone(data: dict[str, np.ndarray]) -> np.ndarray:
    """Least squares on one hospital's patients, for comparison."""
    return np.linalg.lstsq(data["X"], data["y"], rcond=None)[0]


def figure(table: list[tuple[str, int, float, float, Any]], path: Path) -> None:
    """Draw every hospital's dose effect."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    place = np.arange(len(table))
    middle = np.array([row["mean"] for *_, row in table])
    low, high = (np.array([row[end] for *_, row in table]) for end in ("ci_low", "ci_high"))
    canvas, axis = plt.subplots(figsize=(6.5, 4.5), layout="constrained")
    axis.errorbar(middle, place, xerr=[middle - low, high - middle], fmt="o", label="federated, 95 % interval")
    axis.plot([row[3] for row in table], place, "x", color="tab:red", label="alone")
    axis.plot([row[2] for row in table], place, "|", color="black", markersize=14, label="truth")
    axis.set_yticks(place, [f"{name} ({patients})" for name, patients, *_ in table])
    axis.set_xlabel("dose effect, mmHg per 10 mg")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    canvas.savefig(path, dpi=150)
    print(f"wrote {path}")


def main(argv: list[str] | None = None) -> None:
    """Simulate, fit, and print what can be asked of a fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--figure", type=Path, help="write a figure of all dose effects here")
    options = parser.parse_args(argv)
    if options.figure is not None and importlib.util.find_spec("matplotlib") is None:
        sys.exit("--figure needs matplotlib: pip install 'fedppl[plots]'")
    logging.getLogger("pymc").setLevel(logging.WARNING)

    rng = np.random.default_rng(options.seed)
    names = [f"hospital {k}" for k in range(1, len(PATIENTS) + 1)]
    truth = dict(zip(names, AVERAGE + SPREAD * rng.normal(size=(len(names), 3)), strict=True))
    clients = {name: simulate(rng, n, truth[name]) for name, n in zip(names, PATIENTS, strict=True)}

    model = fedppl.FederatedModel(hospital, shared=["mu", "tau"])
    fit = fedppl.fit(model, clients, random_seed=options.seed)
    print(f"\n{fit.status} by {fit.algorithm.name} after {len(fit.records)} rounds in {fit.seconds:.1f} s")
    print("\nThe average hospital μ and the differences between hospitals τ (truth: 8, 4, -1 and 2, 0.8, 0.4)")
    print(fedppl.hypotheses(fit.idata)[["mean", "sd", "ci_low", "ci_high"]].round(2).to_string())

    simpler = fedppl.FederatedModel(without_age, shared=["mu", "tau"])
    fits = {"with age": fit, "without age": fedppl.fit(simpler, clients, random_seed=options.seed)}
    comparison = fedppl.compare(fits)
    print("\nDoes age matter?")
    print(comparison[["log_evidence", "se", "probability"]].round(2).to_string())

    table = []
    for name in names:  # each hospital draws its own posterior from q(φ) and its own patients
        tests = fedppl.hypotheses(fit.client(name), var_names=["theta"])
        table.append((name, len(clients[name]["y"]), truth[name][1], alone(clients[name])[1], tests.loc["theta[dose]"]))
    print("\nDose effect (mmHg per 10 mg)   truth   alone   federated (95 % interval)")
    for name, patients, true, own, row in table[:4]:
        interval = f"({row['ci_low']:.1f} to {row['ci_high']:.1f})"
        print(f"{name:12}{patients:4d} patients{true:13.1f}{own:8.1f}{row['mean']:8.1f} {interval}")
    error_alone = float(np.sqrt(np.mean([(own - true) ** 2 for _, _, true, own, _ in table])))
    error = float(np.sqrt(np.mean([(row["mean"] - true) ** 2 for _, _, true, _, row in table])))
    print(f"root mean squared error over all hospitals: alone {error_alone:.2f}, federated {error:.2f}")

    difference = fedppl.contrast(fit.client(names[-1]), fit.client(names[0]), "theta", coords={"predictor": "dose"})
    test = fedppl.hypotheses(difference, rope=(-0.5, 0.5)).iloc[0]
    interval = f"{test['mean']:.1f} ({test['ci_low']:.1f} to {test['ci_high']:.1f})"
    print(f"\nDose effect at {names[-1]} minus {names[0]}: {interval}; ", end="")
    print(f"probability of direction {test['probability_of_direction']:.2f}, within ±0.5: {test['in_rope']:.2f}")

    theta_new = AVERAGE + SPREAD * rng.normal(size=3)
    first, later = simulate(rng, 10, theta_new), simulate(rng, 200, theta_new)
    result = fit.new_client(first, predict={"X": later["X"]})
    low, high = np.quantile(result["predictions"]["fall"].values, [0.05, 0.95], axis=(0, 1))
    covered = float(np.mean((low < later["y"]) & (later["y"] < high)))
    print(f"A new hospital with 10 patients: 90 % predictive intervals hold {covered:.0%} of its next 200")

    if options.figure is not None:
        figure(table, options.figure)
    line = {
        "status": str(fit.status),
        "rounds": len(fit.records),
        "rmse_alone": round(error_alone, 3),
        "rmse_federated": round(error, 3),
        "new_hospital_coverage": round(covered, 3),
        "probability_with_age": round(float(comparison.loc["with age", "probability"]), 3),
        "seconds": round(fit.seconds, 2),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
