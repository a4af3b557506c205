"""Eight schools (Rubin 1981): `Sums` and EP against quadrature, under two priors."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pymc as pm
from scipy import stats

import fedppl
from fedppl.types import Array

EFFECTS = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def wide(y: Any, s: Any) -> pm.Model:
    """Under mu ~ N(0, 5²), tau ~ HalfCauchy(5)."""
    with pm.Model() as model:
        _school(pm.Normal("mu", 0, 5), pm.HalfCauchy("tau", 5), pm.Data("y", y), pm.Data("s", s))
    return model


def narrow(y: Any, s: Any) -> pm.Model:
    """Under mu ~ N(0, 10²), tau ~ HalfNormal(10)."""
    with pm.Model() as model:
        _school(pm.Normal("mu", 0, 10), pm.HalfNormal("tau", 10), pm.Data("y", y), pm.Data("s", s))
    return model


def _school(mu: Any, tau: Any, y: Any, s: Any) -> None:
    theta = pm.Normal("theta", mu, tau)
    pm.Normal("effect", theta, s, observed=y)


def quadrature(sd: float, log_prior: Any) -> tuple[float, float, float]:
    """Mean and sd of log tau and the log evidence, given log p(log tau) and the sd of mu, by the trapezium rule."""
    grid = np.linspace(-20.0, 8.0, 20001)
    variance = ERRORS**2 + np.exp(2 * grid)[:, None]
    # mu integrated: the effects are normal with one variance each and sd² of mu between them
    weight, pull = np.sum(1 / variance, axis=1), np.sum(EFFECTS / variance, axis=1)
    log_det = np.sum(np.log(variance), axis=1) + np.log1p(sd**2 * weight)
    square = np.sum(EFFECTS**2 / variance, axis=1) - pull**2 / (weight + 1 / sd**2)
    logs: Array = -0.5 * (log_det + square + 8 * np.log(2 * np.pi)) + log_prior(grid)
    density = np.exp(logs - logs.max())
    total = np.trapezoid(density, grid)
    mean = np.trapezoid(density * grid, grid) / total
    spread = np.sqrt(np.trapezoid(density * (grid - mean) ** 2, grid) / total)
    return float(mean), float(spread), float(np.log(total) + logs.max())


def compared(seed: int) -> dict[str, Any]:
    """Both priors, with the CPU of either fit once everything is compiled."""
    clients = {f"school{k}": {"y": EFFECTS[[k]], "s": ERRORS[[k]]} for k in range(8)}
    priors = {
        "half_cauchy": (wide, 5.0, lambda x: stats.halfcauchy(scale=5).logpdf(np.exp(x)) + x),
        "half_normal": (narrow, 10.0, lambda x: stats.halfnorm(scale=10).logpdf(np.exp(x)) + x),
    }
    found = {}
    for name, (builder, sd, log_prior) in priors.items():
        mean, spread, evidence = quadrature(sd, log_prior)
        model = fedppl.FederatedModel(builder, ["mu", "tau"])
        row: dict[str, Any] = {"exact": [round(mean, 4), round(spread, 4), round(evidence, 4)]}
        for algorithm in (fedppl.Sums(), fedppl.EP()):
            fit = fedppl.fit(model, clients, algorithm, progressbar=False, random_seed=seed)
            started = time.process_time()
            for _ in range(5):
                fit = fedppl.fit(model, clients, algorithm, progressbar=False, random_seed=seed)
            seconds, ours = (time.process_time() - started) / 5, fit.idata["fit"]
            at = float(ours["mean_vector"][1]), float(np.sqrt(ours["covariance_matrix"][1, 1]))
            row[algorithm.name] = {
                "status": fit.status.value,
                "mean": round(at[0], 4),
                "sd": round(at[1], 4),
                "z": round((at[0] - mean) / spread, 4),
                "r": round(at[1] / spread, 4),
                "cpu_seconds": round(seconds, 2),
            }
            if algorithm.name == "Sums":
                row["log_evidence_error"] = round(fit.log_evidence.value - evidence, 5)
        print(f"eight schools, {name}: {row}", flush=True)
        found[name] = row
    return found
