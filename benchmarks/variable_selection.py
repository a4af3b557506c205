"""Federated Bayesian lasso for variable selection: cases I, II and III of FedLin, section 5.2.

Every client has the same true coefficients and fits its own; log λ and log σ² are shared, with standard normal
priors. A predictor is included where its 90 % interval leaves out 0. Test responses are predicted by posterior
means, and compared with the noisy responses and with their expectations.

    python benchmarks/variable_selection.py --runs 30
    python benchmarks/variable_selection.py --runs 2 --cases I --processes 1
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
from typing import NamedTuple

import numpy as np
import pandas as pd

import fedppl
from fedppl.models import hm2

NOISE_SD = 0.05
FIGURES = ("correct", "false", "a_rmse_noisy", "a_rmse_noise_free")


class Case(NamedTuple):
    """One simulation of the paper: rows at each client, rows for testing, and the true coefficients."""

    rows: tuple[int, ...]
    test_rows: int
    theta: tuple[float, ...]


CASES = {
    "I": Case((100,) * 10, 1000, (3, 1.5, 0, 0, 2, 0, 0, 0)),
    "II": Case((20,) * 2 + (200,) * 8, 1000, (3, 1.5, 0, 0, 2, 0, 0, 0)),
    "III": Case((40,) * 20, 400, (3,) * 10 + (0,) * 10 + (3,) * 10),
}
# Correct and false inclusion, A-RMSE. The paper does not say which A-RMSE it prints.
PAPER = {"I": (0.880, 0.095, 0.055), "II": (0.875, 0.101, 0.062), "III": (0.891, 0.115, 0.088)}
# The same four figures from an exact Gibbs sampler of the same model on all rows in one place (200, 200, 30 runs).
EXACT = {
    "I": (1.000, 0.098, 0.0521, 0.0143),
    "II": (1.000, 0.097, 0.0537, 0.0157),
    "III": (1.000, 0.102, 0.1025, 0.0888),
}


class Task(NamedTuple):
    """One run of one case; all that a worker process needs."""

    case: str
    run: int
    rounds: int
    draws: int
    final_draws: int


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, each in a process of its own")
    parser.add_argument("--rounds", type=int, default=10, help="EP rounds at most")
    parser.add_argument("--draws", type=int, default=200, help="NUTS draws a client and round, after as many to tune")
    parser.add_argument("--final-draws", type=int, default=1000, help="draws of every client's coefficients at the end")
    parser.add_argument("--seed", type=int, default=0, help="number of the first run")
    options = parser.parse_args(argv)
    if min(options.runs, options.processes, options.rounds) < 1:
        parser.error("--runs, --processes and --rounds must be at least 1")
    return options


def one_run(task: Task) -> dict[str, float]:
    """Generate one data set, fit it, and return its figures."""
    logging.getLogger("fedppl").setLevel(logging.ERROR)  # stopping after few rounds is what was asked for
    warnings.filterwarnings("ignore", category=fedppl.ConvergenceWarning)
    case = CASES[task.case]
    rng = np.random.default_rng([list(CASES).index(task.case), task.run])
    theta = np.array(case.theta, dtype=float)
    clients, tests = {}, {}
    for k, rows in enumerate(case.rows):
        X, X_test = rng.normal(size=(rows, len(theta))), rng.normal(size=(case.test_rows, len(theta)))
        clients[f"client {k}"] = {"X": X, "y": X @ theta + NOISE_SD * rng.normal(size=rows)}
        tests[f"client {k}"] = X_test, X_test @ theta + NOISE_SD * rng.normal(size=case.test_rows)
    started = time.perf_counter()
    model = fedppl.FederatedModel(functools.partial(hm2.penalised_regression, prior="lasso"), hm2.PENALISED_SHARED)
    # A short chain's R̂ is noisy, and EP averages over rounds: only a chain that is plainly lost is refused.
    nuts = fedppl.local.NUTS(draws=task.draws, tune=task.draws, chains=1, target_accept=0.8, rhat_limit=1.3)
    # Clients of case III have 40 rows for 30 coefficients. Alone with the prior they put σ far too low or high, so
    # all of their first messages together overshoot; small steps need fewer rounds there than whole ones.
    algorithm = fedppl.EP(local=nuts, damping=0.3)
    fit = fedppl.fit(
        model,
        clients,
        algorithm,
        rounds=task.rounds,
        engine=fedppl.InProcess(workers=1),
        progressbar=False,
        random_seed=task.run,
    )
    noisy, noise_free, included = [], [], []
    for name, (X_test, y_test) in tests.items():
        draws = fit.client(name, draws=task.final_draws, chains=1)
        included.append(fedppl.hypotheses(draws, var_names=["theta"], ci_prob=0.9)["excludes_null"].to_numpy())
        predicted = X_test @ draws["posterior"]["theta"].mean(("chain", "draw")).values
        noisy.append(np.sqrt(np.mean((y_test - predicted) ** 2)))
        noise_free.append(np.sqrt(np.mean((X_test @ theta - predicted) ** 2)))
    selected = np.mean(included, axis=0)
    return {
        "correct": float(selected[theta != 0].mean()),
        "false": float(selected[theta == 0].mean()),
        "a_rmse_noisy": float(np.mean(noisy)),
        "a_rmse_noise_free": float(np.mean(noise_free)),
        "skipped": float(sum(len(record.failures) for record in fit.records)),
        "change": float(fit.records[-1].info["change_mean"]),
        "seconds": time.perf_counter() - started,
    }


def every_run(tasks: list[Task], processes: int) -> Iterator[dict[str, float]]:
    """Run all tasks, `processes` at a time, and give the figures in order."""
    if processes == 1:
        yield from map(one_run, tasks)
        return
    # Spawned, because a forked copy of a process with threads can hang. One thread each: the runs are the parallelism.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(one_run, tasks)


def show(name: str, results: pd.DataFrame) -> None:
    """Print one case beside the paper's and the exact figures."""
    mean, error = results.mean(), results.std() / np.sqrt(len(results))
    rows, exact, paper = CASES[name].rows, EXACT[name], PAPER[name]
    print(f"\nCase {name}: K = {len(rows)}, {min(rows)} to {max(rows)} rows, {len(results)} runs")
    print(f"{'':22}{'federated':>10}{'± error':>9}{'exact':>8}{'paper':>8}")
    for i, figure in enumerate(FIGURES):
        label = figure.replace("_", " ").replace("a rmse", "A-RMSE,").replace("correct", "correct inclusion")
        label = label.replace("false", "false inclusion")
        printed = f"{paper[i]:8.3f}" if i < len(paper) else ""
        spread = "" if len(results) == 1 else f"{error[figure]:9.4f}"
        print(f"{label:22}{mean[figure]:10.4f}{spread:>9}{exact[i]:8.4f}{printed}")
    print(f"{mean['seconds']:.0f} s a run; last change {mean['change']:.2f} posterior sd", end="")
    print(f"; {mean['skipped']:.1f} replies skipped a run", flush=True)


def main(argv: list[str] | None = None) -> None:
    """Run the cases, print a table of each, and one line of JSON."""
    options = arguments(argv)
    started = time.perf_counter()
    settings = (options.rounds, options.draws, options.final_draws)
    runs = range(options.seed, options.seed + options.runs)
    # One pool for all cases: its processes keep what they compiled, and cases I and II share a model.
    figures = every_run([Task(name, run, *settings) for name in options.cases for run in runs], options.processes)
    line: dict[str, object] = {"runs": options.runs}
    for name in options.cases:
        results = pd.DataFrame([next(figures) for _ in runs])
        show(name, results)
        line[name] = {figure: round(float(results[figure].mean()), 4) for figure in (*FIGURES, "skipped")}
    line["seconds"] = round(time.perf_counter() - started, 1)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
