"""Federated EP against centralised NUTS on FedLin's second UQ example: accuracy, time and bytes, in one run.

K clients with a regression of d coefficients each and a noise sd of their own, unknown and local:

    y_k ~ N(X_k θ_k, σ_k² I),  θ_k ~ N(μ, diag τ),  μ ~ N(0, I),  log τ ~ N(0, I),  log σ_k ~ N(0, 1)

NUTS samples the full hierarchical model with all data in one place. A sample of the usual size gives its time; a
longer one gives the reference, so that Monte Carlo error of the reference is not what is measured. The federated
fit goes first, so that start-up costs which both sides share are counted against it.

    python benchmarks/ep_vs_nuts.py [--sampler nutpie|pymc]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import time
import warnings
from typing import Any

import numpy as np
import pymc as pm

import fedppl
from fedppl import gaussian
from fedppl.models.hm2 import HIERARCHICAL_SHARED, hierarchical_regression

MU = np.array([1.0, 3.0, 0.5, 2.0])
TAU = np.array([1.17, 2.35, 2.52, 0.67])
NOISE = 0.5


def simulate(clients: int, rows: int, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Data of every client, as the paper generates them."""
    rng = np.random.default_rng(seed)
    data = {}
    for k in range(clients):
        theta = MU + np.sqrt(TAU) * rng.normal(size=len(MU))
        X = rng.normal(size=(rows, len(MU)))
        data[f"client {k:03d}"] = {"X": X, "y": X @ theta + NOISE * rng.normal(size=rows)}
    return data


def central_model(data: dict[str, dict[str, np.ndarray]]) -> pm.Model:
    """The same hierarchy over all clients at once, written for speed: one array per variable, no loop."""
    X = np.stack([client["X"] for client in data.values()])
    y = np.stack([client["y"] for client in data.values()])
    with pm.Model() as model:
        mu = pm.Normal("mu", 0, 1, shape=X.shape[2])
        tau = pm.LogNormal("tau", 0, 1, shape=X.shape[2])
        theta = pm.Normal("theta", mu, pm.math.sqrt(tau), shape=(X.shape[0], X.shape[2]))
        log_sigma = pm.Normal("log_sigma", 0, 1, shape=X.shape[0])
        pm.Normal("obs", (X * theta[:, None, :]).sum(axis=2), pm.math.exp(log_sigma)[:, None], observed=y)
    return model


def nuts(
    model: pm.Model, sampler: str, draws: int, seed: int, compiled: Any = None
) -> tuple[Any, np.ndarray, float, float]:
    """Sample (mu, log tau) on two cores: (compiled model, draws, compile seconds, sampling seconds)."""
    started = time.perf_counter()
    if sampler == "nutpie":
        import nutpie

        compiled = compiled or nutpie.compile_pymc_model(model)
        compiling = time.perf_counter() - started
        started = time.perf_counter()
        trace = nutpie.sample(compiled, draws=draws, tune=1000, chains=4, cores=2, seed=seed, progress_bar=False)
        sampling = time.perf_counter() - started
    else:
        logging.getLogger("pymc").setLevel(logging.ERROR)
        with model:
            step = pm.NUTS()
            compiling = time.perf_counter() - started
            started = time.perf_counter()
            trace = pm.sample(
                draws=draws, tune=1000, chains=4, cores=2, random_seed=seed, step=step, progressbar=False,
                compute_convergence_checks=False,
            )  # fmt: skip
        sampling = time.perf_counter() - started
    mu, tau = (np.asarray(trace["posterior"][name]).reshape(-1, len(MU)) for name in ("mu", "tau"))
    return compiled, np.concatenate([mu, np.log(tau)], axis=1), compiling, sampling


def main() -> None:
    """Run both, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rows", type=int, default=100, help="rows per client")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5, help="federated fits after the first; the median counts")
    parser.add_argument("--reference-draws", type=int, default=10_000, help="per chain, four chains")
    parser.add_argument("--seed", type=int, default=1)
    default = "nutpie" if importlib.util.find_spec("nutpie") else "pymc"
    parser.add_argument("--sampler", choices=("nutpie", "pymc"), default=default)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # notices of ArviZ and PyTensor that are not about this comparison

    data = simulate(options.clients, options.rows, options.seed)
    model = fedppl.FederatedModel(hierarchical_regression, HIERARCHICAL_SHARED)

    def federated() -> tuple[fedppl.Fit, float]:
        started = time.perf_counter()
        fit = fedppl.fit(model, data, fedppl.EP(), rounds=options.rounds, progressbar=False, random_seed=options.seed)
        return fit, time.perf_counter() - started

    fit, first = federated()
    later = sorted(federated()[1] for _ in range(options.repeats))
    warm = later[len(later) // 2] if later else first

    central = central_model(data)
    compiled, _, compiling, sampling = nuts(central, options.sampler, 1000, options.seed)
    _, reference, _, _ = nuts(central, options.sampler, options.reference_draws, options.seed + 1, compiled)

    mean, sd = reference.mean(axis=0), reference.std(axis=0, ddof=1)
    q = fit.posterior
    mean_error = np.abs(gaussian.mean(q) - mean) / sd
    sd_error = np.abs(gaussian.standard_deviations(q) / sd - 1)
    rounds = fit.idata["rounds"]
    bytes_up = float(np.asarray(rounds["bytes_up"]).mean())

    print(f"{options.clients} clients of {options.rows} rows; {fit.status.value} in {len(fit.records)} rounds")
    print(f"{'':14s}{'NUTS mean':>10s}{'EP mean':>10s}{'NUTS sd':>10s}{'EP sd':>10s}")
    labels = [f"{name}[{i}]" for name in ("mu", "log tau") for i in range(len(MU))]
    for row in zip(labels, mean, gaussian.mean(q), sd, gaussian.standard_deviations(q), strict=True):
        print("{:14s}{:10.3f}{:10.3f}{:10.3f}{:10.3f}".format(*row))
    print(f"federated fit: {first:.2f} s the first time, {warm:.2f} s again")
    print(
        f"centralised NUTS ({options.sampler}): {compiling:.2f} s to compile, {sampling:.2f} s to sample 4 x 1000 draws"
    )
    figures = {
        "mean_err_sd": round(float(mean_error.max()), 4),
        "sd_err": round(float(sd_error.max()), 4),
        "rounds": len(fit.records),
        "speedup_sampling": round(sampling / warm, 2),
        "speedup_total": round((compiling + sampling) / first, 2),
        "bytes_up_per_client_round": round(bytes_up, 1),
        "status": fit.status.value,
        "sampler": options.sampler,
        "seconds_fit": round(warm, 3),
        "seconds_fit_first": round(first, 3),
        "seconds_nuts_compile": round(compiling, 3),
        "seconds_nuts_sampling": round(sampling, 3),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
