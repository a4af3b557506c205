"""HM1 on FedLin's simulations, section 5.1, cases I to IV, and on a case V where borrowing matters.

Rows of x are standard normal, the noise is a standard deviation, and A-RMSE compares with noise-free responses at
1,000 new inputs (of client 1 in case I, of the first 30 in case II, of all in the others). Side by side: the paper's
figures; every client alone, by SGD as in the paper and by exact least squares; Algorithm 1 as written; `HM1`, which
estimates Ω and σ_k; the exact posterior given the true Ω with estimated σ_k ("oracle"), and given both ("Bayes").

Case V (K = 100, d = 8, N = 20, σ = 1) has four kinds of Ω. The structure that HM1 assumes is chosen by the clients'
validation loss on a fifth of their rows, and refitted on all of them.

    python benchmarks/hm1_simulation.py --runs 30 --runs-v 10
    python benchmarks/hm1_simulation.py --runs 2 --cases II III --rounds 100 --figure error_by_round.png
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import fedppl
from fedppl import covariance
from fedppl.models import hm1

ROUNDS = 30
AFTER = (10, 20, 30, 40, 50, 60, 80, 100)  # rounds that are printed


class Case(NamedTuple):
    """One simulation: rows at each client, coefficients, noise, and the clients whose A-RMSE counts."""

    rows: tuple[int, ...]
    size: int
    noise: float
    judged: int


CASES = {
    "I": Case((20, 200), 5, 0.05, 1),
    "II": Case((40,) * 30 + (275,) * 70, 8, 0.1, 30),
    "III": Case((20,) * 100, 8, 0.1, 100),
    "IV": Case((200,) * 100, 8, 0.1, 100),
}
FIFTH = {name: Case((20,) * 100, 8, 1.0, 100) for name in ("rank 2", "exchangeable", "clusters", "identity")}
PAPER = {"I": (0.081, 0.094), "II": (0.050, 0.056), "III": (0.044, 0.072), "IV": (0.035, 0.035)}
STRUCTURES = {
    "exchangeable": covariance.exchangeable(),
    "rank 1": covariance.low_rank(1),
    "rank 2": covariance.low_rank(2),
    "rank 4": covariance.low_rank(4),
    "moving average": covariance.moving_average(),
    "Ledoit-Wolf": covariance.ledoit_wolf(),
}
LEAST_CLOSED = {"rank 2": 0.6, "exchangeable": 0.9, "clusters": 0.3}  # of the gap from least squares to the oracle


class Task(NamedTuple):
    """One run of one case; all that a worker process needs."""

    case: str
    run: int


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=30, help="runs of cases I to IV")
    parser.add_argument("--runs-v", type=int, default=10, help="runs of each kind of case V")
    parser.add_argument("--cases", nargs="+", choices=[*CASES, "V"], default=[*CASES, "V"])
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, each in a process of its own")
    parser.add_argument("--seed", type=int, default=0, help="number of the first run")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of Algorithm 1, and most of HM1, in cases I to IV")
    parser.add_argument("--figure", type=Path, help="write the error of Θ against the round number here")
    options = parser.parse_args(argv)
    if min(options.runs, options.runs_v, options.processes, options.rounds) < 1:
        parser.error("--runs, --runs-v, --processes and --rounds must be at least 1")
    return options


def true_omega(name: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Covariance over clients that generates the parameters."""
    if name == "I":
        return np.array([[1.0, 0.7], [0.7, 1.0]])
    if name in CASES:  # a random orthogonal basis and eigenvalues from 1 to 10: R's clusterGeneration by default
        basis, _ = np.linalg.qr(rng.normal(size=(count, count)))
        return (basis * rng.uniform(1, 10, count)) @ basis.T
    if name == "rank 2":
        factor = rng.normal(size=(count, 2))
        return factor @ factor.T + 0.05 * np.eye(count)
    if name == "exchangeable":
        return 0.1 * np.eye(count) + 0.9
    if name == "clusters":
        group = np.arange(count) % 4
        return 0.05 * np.eye(count) + 0.95 * (group[:, None] == group)
    return np.eye(count)


def generate(task: Task) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Clients' data, the true Θ (K, d), and the true Ω."""
    case = {**CASES, **FIFTH}[task.case]
    rng = np.random.default_rng([[*CASES, *FIFTH].index(task.case), task.run])
    count = len(case.rows)
    omega = true_omega(task.case, count, rng)
    theta = np.linalg.cholesky(omega) @ rng.normal(size=(count, case.size))
    clients = {}
    for k, rows in enumerate(case.rows):
        X = rng.normal(size=(rows, case.size))
        clients[f"client {k}"] = {"X": X, "y": X @ theta[k] + case.noise * rng.normal(size=rows)}
    return clients, theta, omega


def a_rmse(task: Task, estimate: np.ndarray, theta: np.ndarray) -> float:
    """Average over the judged clients of the RMSE of noise-free responses at new inputs."""
    case = {**CASES, **FIFTH}[task.case]
    rng = np.random.default_rng([99, task.run])
    errors = (estimate - theta)[: case.judged]
    return float(np.mean([np.sqrt(np.mean((rng.normal(size=(1000, case.size)) @ error) ** 2)) for error in errors]))


def least_squares(clients: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Every client alone: coefficients (K, d) and unbiased residual variances (K,)."""
    found = [np.linalg.lstsq(data["X"], data["y"], rcond=None)[0] for data in clients.values()]
    residual = [
        np.sum((data["y"] - data["X"] @ theta) ** 2) / (len(data["y"]) - len(theta))
        for theta, data in zip(found, clients.values(), strict=True)
    ]
    return np.array(found), np.array(residual)


def sgd(data: dict[str, Any], seed: int) -> np.ndarray:
    """One client alone as the paper fits it, without a prior: 600 steps of rate 0.01, squared errors of 5 rows."""
    rng = np.random.default_rng(seed)
    X, y = data["X"], data["y"]
    theta = np.zeros(X.shape[1])
    for _ in range(600):
        rows = rng.choice(len(y), 5, replace=False)
        theta = theta + 2 * 0.01 * X[rows].T @ (y[rows] - X[rows] @ theta)
    return theta


def exact(clients: dict[str, Any], omega: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Posterior mean of Θ (K, d) given Ω and σ_k², from one system of all clients' normal equations."""
    designs = [data["X"] for data in clients.values()]
    count, size = len(designs), designs[0].shape[1]
    system = np.kron(np.linalg.inv(omega), np.eye(size))
    right = np.zeros(count * size)
    for k, (X, data) in enumerate(zip(designs, clients.values(), strict=True)):
        block = slice(k * size, (k + 1) * size)
        system[block, block] += X.T @ X / variance[k]
        right[block] = X.T @ data["y"] / variance[k]
    return np.linalg.solve(system, right).reshape(count, size)


def distance(found: np.ndarray, theta: np.ndarray) -> float:
    """‖Θ − Θ*‖ / √K."""
    return float(np.linalg.norm(found - theta) / np.sqrt(len(theta)))


def by_round(
    model: fedppl.FederatedModel, clients: Any, algorithm: Any, theta: np.ndarray, rounds: int
) -> tuple[Any, list[float]]:
    """Fit; Θ at the end, and its distance to the truth after every round."""
    errors = []
    engine = fedppl.InProcess(workers=1)
    for step in fedppl.rounds(model, clients, algorithm, rounds=rounds, engine=engine, random_seed=0):
        found = algorithm.result.details(step.state)["theta"][1]
        errors.append(distance(found, theta))
    return found, errors


@functools.cache
def model(noise: float | None) -> fedppl.FederatedModel:
    """One declaration a process: noise known as 1, as the paper's algorithm takes it, or unknown and local."""
    builder = functools.partial(hm1.linear_regression, noise_sd=noise, log_sigma_mean=-2.0, log_sigma_sd=2.0)
    return fedppl.FederatedModel(builder, hm1.SHARED)


def one_run(task: Task, rounds: int = ROUNDS) -> dict[str, Any]:
    """Generate one data set, estimate Θ in every way, and return the figures."""
    logging.getLogger("fedppl").setLevel(logging.ERROR)  # running out of the paper's rounds is what was asked for
    warnings.filterwarnings("ignore", category=fedppl.ConvergenceWarning)
    clients, theta, omega = generate(task)
    judge = functools.partial(a_rmse, task, theta=theta)
    alone, residual = least_squares(clients)
    case = {**CASES, **FIFTH}[task.case]
    figures: dict[str, Any] = {
        "least squares": judge(alone),
        "least squares, distance": distance(alone, theta),
        "oracle": judge(exact(clients, omega, residual)),
        "Bayes": judge(exact(clients, omega, np.full(len(theta), case.noise**2))),
    }
    warm = dict(list(clients.items())[:2])
    for noise in (1.0, None):  # so that no figure of speed holds a compilation
        fedppl.fit(model(noise), warm, fedppl.HM1(), rounds=2, progressbar=False)
    if task.case in FIFTH:
        return figures | chosen(task, clients, theta)
    figures["separate, SGD"] = judge(np.array([sgd(data, task.run) for data in clients.values()]))
    for name, declared, algorithm in (
        ("Algorithm 1", model(1.0), fedppl.HM1Gradient(learning_rate=0.01, batch_size=5)),
        ("HM1", model(None), fedppl.HM1()),
    ):
        started = time.perf_counter()
        found, figures[f"{name} by round"] = by_round(declared, clients, algorithm, theta, rounds)
        figures[f"{name}, s"] = time.perf_counter() - started
        figures[name] = judge(found)
    return figures


def chosen(task: Task, clients: dict[str, Any], theta: np.ndarray) -> dict[str, Any]:
    """HM1 with the structure of least validation loss, refitted on all rows."""
    training, validation = fedppl.search.holdout(clients, 0.2, random_seed=task.run)
    candidates = {name: fedppl.HM1(structure=structure) for name, structure in STRUCTURES.items()}
    engine = fedppl.InProcess(workers=1)
    settings: dict[str, Any] = {"rounds": ROUNDS, "engine": engine, "progressbar": False, "random_seed": 0}
    losses = {}
    for name, algorithm in candidates.items():
        fit = fedppl.fit(model(None), training, algorithm, **settings)
        losses[name] = fedppl.search.validation_loss(fit, validation, loss=squared_error).mean
    best = min(losses, key=lambda name: losses[name])
    started = time.perf_counter()
    fit = fedppl.fit(model(None), clients, candidates[best], **settings)
    seconds = time.perf_counter() - started
    found = fit.idata["fit"]["theta"].values
    return {"HM1": a_rmse(task, found, theta), "HM1, s": seconds, "structure": best}


def squared_error(posterior: Any, data: Any) -> float:
    """Sum of squared errors of a client's held-out rows."""
    theta = posterior["theta"].mean(("chain", "draw")).values
    return float(np.sum((data["y"] - data["X"] @ theta) ** 2))


def every_run(tasks: list[Task], processes: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Run all tasks, `processes` at a time, and give the figures in order."""
    run = functools.partial(one_run, rounds=rounds)
    if processes == 1:
        yield from map(run, tasks)
        return
    # Spawned, because a forked copy of a process with threads can hang. One thread each: the runs are the parallelism.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(run, tasks)


COLUMNS = ("separate, SGD", "least squares", "Algorithm 1", "HM1", "oracle", "Bayes")


def show_first(results: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """Table of cases I to IV, and their figures for the line of JSON."""
    print("\nA-RMSE, noise-free; mean over runs")
    print(f"{'case':6}{'paper: Alg. 1':>14}{'separate':>10}{'runs':>6}" + "".join(f"{c:>15}" for c in COLUMNS))
    line: dict[str, Any] = {}
    for name, table in results.items():
        mean = table[list(COLUMNS)].mean()
        paper = f"{PAPER[name][0]:14.3f}{PAPER[name][1]:10.3f}"
        print(f"{name:6}{paper}{len(table):6}" + "".join(f"{mean[c]:15.4f}" for c in COLUMNS))
        to_bayes, to_alone = mean["HM1"] / mean["Bayes"] - 1, mean["HM1"] / mean["least squares"] - 1
        seconds = {c: round(float(table[f"{c}, s"].mean()), 2) for c in ("Algorithm 1", "HM1")}
        met = to_bayes <= 0.01 and to_alone <= 0.01 and max(seconds.values()) < 5
        print(
            f"{'':6}HM1 is {to_bayes:+.2%} from Bayes (at most +1 %) and {to_alone:+.2%} from least squares (at most "
            f"+1 %); {seconds['HM1']} s, Algorithm 1 {seconds['Algorithm 1']} s (below 5): {'met' if met else 'MISSED'}"
        )
        line[name] = {c: round(float(mean[c]), 4) for c in COLUMNS} | {"seconds": seconds, "met": bool(met)}
    return line


def show_rounds(results: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """Distance to the truth by round, as in the paper's Figure 3, and its figures for the line of JSON."""
    print("\n‖Θ − Θ*‖ / √K after rounds; mean over runs")
    line: dict[str, Any] = {}
    for name, table in results.items():
        errors = np.mean(table["Algorithm 1 by round"].tolist(), axis=0)
        shown = {k: round(float(errors[k - 1]), 4) for k in AFTER if k <= len(errors)}
        ends = float(np.mean([errors[-1] for errors in table["HM1 by round"]]))
        line[name] = {"Algorithm 1": shown, "HM1": round(ends, 4)}
        line[name]["least squares"] = round(float(table["least squares, distance"].mean()), 4)
        others = f"; HM1 {line[name]['HM1']}, least squares {line[name]['least squares']}"
        print(f"{name:6}" + ", ".join(f"{k}: {error}" for k, error in shown.items()) + others)
    return line


def show_fifth(results: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """Table of case V, and its figures."""
    columns = ("least squares", "HM1", "oracle", "Bayes")
    print("\nCase V: K = 100, d = 8, N = 20, σ = 1; structure chosen by validation")
    print("Closed: the share of the gap from least squares to the oracle, which the bar is about, and to Bayes")
    print(
        f"{'Ω':14}{'runs':>5}" + "".join(f"{c:>15}" for c in columns) + f"{'closed':>8}{'Bayes':>7}{'bar':>6}  chosen"
    )
    line: dict[str, Any] = {}
    for name, table in results.items():
        mean = table[list(columns)].mean()
        gained = mean["least squares"] - mean["HM1"]
        closed = gained / (mean["least squares"] - mean["oracle"])
        to_bayes = gained / (mean["least squares"] - mean["Bayes"])
        met = closed >= LEAST_CLOSED.get(name, 0.0)
        counts = ", ".join(f"{k} {v}" for k, v in table["structure"].value_counts().items())
        bar = f"{LEAST_CLOSED.get(name, 0.0):.0%}"
        row = "".join(f"{mean[c]:15.4f}" for c in columns)
        print(
            f"{name:14}{len(table):5}{row}{closed:8.0%}{to_bayes:7.0%}{bar:>6}  {counts}: {'met' if met else 'MISSED'}"
        )
        line[name] = {c: round(float(mean[c]), 4) for c in columns} | {
            "closed": round(float(closed), 3),
            "closed_to_bayes": round(float(to_bayes), 3),
            "seconds": round(float(table["HM1, s"].mean()), 2),
            "met": bool(met),
        }
    return line


def draw(results: dict[str, pd.DataFrame], path: Path) -> None:
    """Error of Θ by round, a line per run, as in the paper's Figure 3."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(4 * len(results), 3), squeeze=False, layout="constrained")
    for axis, (name, table) in zip(axes[0], results.items(), strict=True):
        for way, colour in (("Algorithm 1", "C1"), ("HM1", "C0")):
            for i, errors in enumerate(table[f"{way} by round"]):
                label = way if i == 0 else None
                axis.plot(range(1, len(errors) + 1), errors, color=colour, alpha=0.4, label=label)
        axis.set(title=f"case {name}", xlabel="round", ylabel="‖Θ − Θ*‖ / √K", yscale="log")
    axes[0][0].legend()
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    """Run the cases, print their tables, and one line of JSON."""
    options = arguments(argv)
    started = time.perf_counter()
    names = [name for name in CASES if name in options.cases]
    fifth = list(FIFTH) if "V" in options.cases else []
    wanted = {**dict.fromkeys(names, options.runs), **dict.fromkeys(fifth, options.runs_v)}
    tasks = [Task(name, run) for name, runs in wanted.items() for run in range(options.seed, options.seed + runs)]
    figures = every_run(tasks, options.processes, options.rounds)
    results = {name: pd.DataFrame([next(figures) for _ in range(runs)]) for name, runs in wanted.items()}
    line: dict[str, Any] = {"runs": options.runs, "runs_v": options.runs_v}
    if names:
        line |= show_first({name: results[name] for name in names})
        line["by round"] = show_rounds({name: results[name] for name in names})
        if options.figure is not None:
            draw({name: results[name] for name in names}, options.figure)
    if fifth:
        line["V"] = show_fifth({name: results[name] for name in fifth})
    line["seconds"] = round(time.perf_counter() - started, 1)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
