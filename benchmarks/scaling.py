"""How the time of a round and the memory of an idle client grow with the number of clients K.

The hierarchical regression of FedLin's Example 4.1 with d = 4 and few rows per client. Each K runs in a process of
its own, so that memory is not that of the run before. The exponent is the slope of log seconds per round on log K;
seconds per round are the median over rounds of the kind that dominates a fit (EP rounds). Memory per idle client is
the growth of the process per client between none enrolled and all enrolled, before any round.

    python benchmarks/scaling.py --clients 10 100 1000 10000
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import time
import warnings
from pathlib import Path

import numpy as np

import fedppl
from fedppl.models.hm2 import HIERARCHICAL_SHARED, hierarchical_regression


def resident_bytes() -> int:
    """Memory of this process that is in use now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def simulate(clients: int, rows: int, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Regression data with client effects around (1, 3, 0.5, 2)."""
    rng = np.random.default_rng(seed)
    theta = np.array([1.0, 3.0, 0.5, 2.0]) + rng.normal(size=(clients, 4))
    X = rng.normal(size=(clients, rows, 4))
    y = np.einsum("kni,ki->kn", X, theta) + 0.5 * rng.normal(size=(clients, rows))
    return {f"client {k}": {"X": X[k], "y": y[k]} for k in range(clients)}


def run(clients: int, rows: int, rounds: int, seed: int) -> dict[str, float]:
    """Fit once and measure."""
    warnings.simplefilter("ignore")
    model = fedppl.FederatedModel(hierarchical_regression, HIERARCHICAL_SHARED)
    warm = simulate(8, rows, seed)
    fedppl.fit(model, warm, fedppl.EP(), rounds=12, progressbar=False, random_seed=seed)  # compiled from here on
    data = simulate(clients, rows, seed)
    gc.collect()
    before = resident_bytes()
    started = time.perf_counter()
    enrolled = model.enrol(data)
    enrolling = time.perf_counter() - started
    gc.collect()
    memory = (resident_bytes() - before) / clients
    del enrolled
    steps = fedppl.rounds(model, data, fedppl.EP(tolerance=1e-9), rounds=rounds, random_seed=seed)
    seconds: dict[str, list[float]] = {"warm start": [], "EP": []}
    last = time.perf_counter()
    for step in steps:
        now = time.perf_counter()
        if step.number > 1:  # the first interval contains enrolment
            seconds[step.info.phase].append(now - last)
        last = time.perf_counter()
    return {
        "clients": clients,
        "enrol_s": enrolling,
        "warm_start_round_s": float(np.median(seconds["warm start"])),
        "ep_round_s": float(np.median(seconds["EP"])),
        "bytes_per_idle_client": memory,
    }


def main() -> None:
    """Measure every K, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--rows", type=int, default=20, help="rows per client")
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = []
    print(f"{'K':>7s}{'enrol s':>10s}{'warm start s':>14s}{'EP round s':>12s}{'kB per idle client':>20s}", flush=True)
    for clients in options.clients:
        with context.Pool(1) as pool:
            result = pool.apply(run, (clients, options.rows, options.rounds, options.seed))
        results.append(result)
        print(
            f"{clients:7d}{result['enrol_s']:10.2f}{result['warm_start_round_s']:14.4f}{result['ep_round_s']:12.4f}"
            f"{result['bytes_per_idle_client'] / 1000:20.1f}",
            flush=True,
        )
    log_k = np.log([result["clients"] for result in results])
    exponents = {
        phase: round(float(np.polyfit(log_k, np.log([result[f"{phase}_round_s"] for result in results]), 1)[0]), 3)
        for phase in ("warm_start", "ep")
    }
    largest = results[-1]
    figures = {
        "exponent": max(exponents.values()),
        "exponents": exponents,
        "kb_per_idle_client": round(largest["bytes_per_idle_client"] / 1000, 2),
        "ep_round_s": {str(result["clients"]): round(result["ep_round_s"], 4) for result in results},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
