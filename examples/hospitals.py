"""Twelve hospitals of very different sizes, one logistic model: pFedVEM, EP and every hospital by itself.

Simulated patients, so that the truth is known: a 30-day outcome given an intercept and seven measurements, with
coefficients that differ between hospitals. Patients are sliced among hospitals at random places, so that a few have
most of them. EP fits the declared hierarchy with one spread for all; pFedVEM finds a spread for each hospital, its
confidence, held near 0.5 by --strength; alone, a hospital has its prior. Judged are coefficients against the truth, and
predictions for patients who took no part.

    python examples/hospitals.py --figure shrinkage.png
    python examples/hospitals.py --hospitals 20 --patients 4000 --strength 0
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

import fedppl
from fedppl import data as partitions
from fedppl.models import pfedvem

COLUMNS = ("intercept", "age", "severity", "lactate", "heart rate", "creatinine", "surgery", "weekend")
CENTRE = np.array([-1.0, 0.6, 0.9, 0.5, 0.2, 0.4, -0.3, 0.1])
SPREAD, TESTED = 0.4, 500


class World(NamedTuple):
    """What hospitals hold, and what is true of them."""

    clients: dict[str, dict[str, np.ndarray]]
    truth: dict[str, np.ndarray]  # w_j
    X: np.ndarray  # of patients who took no part, (n, d)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hospitals", type=int, default=12)
    parser.add_argument("--patients", type=int, default=2400)
    parser.add_argument("--strength", type=float, default=8.0, help="what holds pFedVEM's spreads; 0 as published")
    parser.add_argument("--rounds", type=int, default=100, help="of pFedVEM")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, help="draw the shrinkage plot here")
    options = parser.parse_args(argv)
    if options.hospitals < 2 or options.patients < 20 * options.hospitals:
        parser.error("--hospitals must be at least 2, and --patients at least 20 for each")
    if options.rounds < 1 or options.seed < 0 or options.strength < 0:
        parser.error("--rounds must be at least 1, --seed and --strength at least 0")
    return options


def simulate(options: argparse.Namespace) -> World:
    """Patients, sliced among hospitals whose coefficients differ."""
    rng = np.random.default_rng(options.seed)
    draw = lambda rows: np.column_stack([np.ones(rows), rng.normal(size=(rows, len(COLUMNS) - 1))])  # noqa: E731
    X = draw(options.patients)
    parts = partitions.label_skew(np.zeros(options.patients), options.hospitals, 1, random_seed=rng)
    clients, truth = {}, {}
    for k, rows in enumerate(parts.rows.values()):
        name = f"hospital {k + 1}"
        truth[name] = CENTRE + SPREAD * rng.normal(size=len(COLUMNS))
        y = (rng.uniform(size=len(rows)) < expit(X[rows] @ truth[name])).astype(int)
        clients[name] = {"X": X[rows], "y": y}
    ordered = sorted(clients, key=lambda name: len(clients[name]["y"]))
    return World({k: clients[k] for k in ordered}, {k: truth[k] for k in ordered}, draw(TESTED))


def draws_of(fit: fedppl.Fit, names: list[str]) -> dict[str, np.ndarray]:
    """Draws of every hospital's coefficients, (draws, d)."""
    return {
        name: fit.client(name, draws=500, chains=2)["posterior"]["w"].values.reshape(-1, len(COLUMNS)) for name in names
    }


def score(world: World, draws: dict[str, np.ndarray]) -> dict[str, float]:
    """Distance to the truth, expected log loss for new patients, and what intervals cover."""
    names = list(draws)
    small = names[: max(1, len(names) // 3)]
    errors = {k: np.sqrt(np.mean((w.mean(axis=0) - world.truth[k]) ** 2)) for k, w in draws.items()}
    losses = {}
    for k, w in draws.items():
        said, true = expit(world.X @ w.T).mean(axis=1), expit(world.X @ world.truth[k])
        said = np.clip(said, 1e-12, 1 - 1e-12)
        losses[k] = float(-np.mean(true * np.log(said) + (1 - true) * np.log1p(-said)))
    low, high = (np.array([np.quantile(w, q, axis=0) for w in draws.values()]) for q in (0.05, 0.95))
    held = np.array([world.truth[k] for k in names])
    return {
        "RMSE": float(np.mean(list(errors.values()))),
        "RMSE, smallest third": float(np.mean([errors[k] for k in small])),
        "log loss": float(np.mean(list(losses.values()))),
        "log loss, smallest third": float(np.mean([losses[k] for k in small])),
        "cover of 90 %": float(np.mean((low <= held) & (held <= high))),
    }


def plot(world: World, found: dict[str, dict[str, np.ndarray]], path: Path, column: int = 2) -> None:
    """One coefficient at every hospital, by every method, beside the truth."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 0.45 * len(world.truth) + 1.2), layout="constrained")
    names = list(world.truth)
    for offset, (method, draws) in zip((-0.22, 0.0, 0.22), found.items(), strict=True):
        means = np.array([draws[k][:, column].mean() for k in names])
        sides = np.abs(np.array([np.quantile(draws[k][:, column], (0.05, 0.95)) for k in names]).T - means)
        axes.errorbar(means, np.arange(len(names)) + offset, xerr=sides, fmt="o", ms=3, lw=1, label=method)
    truth = [world.truth[k][column] for k in names]
    axes.scatter(truth, range(len(names)), marker="|", s=250, color="black", zorder=3, label="truth")
    axes.set_yticks(range(len(names)), [f"{k} ({len(world.clients[k]['y'])})" for k in names])
    axes.set(xlabel=f"coefficient of {COLUMNS[column]}, 90 % intervals", ylabel="hospital (patients)")
    axes.legend(fontsize="small")
    figure.savefig(path)


def main(argv: list[str] | None = None) -> None:
    """Fit all three, print the table, and one line of JSON."""
    options, started = arguments(argv), time.perf_counter()
    if options.figure is not None and importlib.util.find_spec("matplotlib") is None:
        sys.exit("--figure needs matplotlib: pip install 'fedppl[plots]'")
    logging.getLogger("fedppl").setLevel(logging.ERROR)  # the status is printed
    warnings.filterwarnings("ignore", category=fedppl.ConvergenceWarning)
    world = simulate(options)
    own = fedppl.FederatedModel(pfedvem.logistic, shared=["w"])
    hierarchy = fedppl.FederatedModel(pfedvem.hierarchical, shared=["mu", "tau"])
    run: dict[str, Any] = {"random_seed": options.seed, "progressbar": False}
    fits = {
        "alone": fedppl.fit(own, world.clients, fedppl.one_shot.Separate(local=fedppl.local.ADVI()), **run),
        # What is compared are means and predictions, which EP's Gaussian has.
        "EP": fedppl.fit(hierarchy, world.clients, fedppl.EP(), rounds=40, **run),
        "pFedVEM": fedppl.fit(
            own,
            world.clients,
            fedppl.Confidence(local=fedppl.local.ADVI(), spread=0.5, strength=options.strength, tolerance=1e-3),
            rounds=options.rounds,
            **run,
        ),
    }
    found = {name: draws_of(fit, list(world.clients)) for name, fit in fits.items()}
    scores = {name: score(world, draws) for name, draws in found.items()}
    sizes = [len(data["y"]) for data in world.clients.values()]
    print(f"{options.hospitals} hospitals with {sizes} patients\n")
    width = max(map(len, next(iter(scores.values()))))
    print(" " * width, *(f"{name:>9}" for name in scores))
    for row in next(iter(scores.values())):
        print(f"{row:<{width}}", *(f"{values[row]:>9.3f}" for values in scores.values()))
    print(f"{'status':<{width}}", *(f"{fit.status.value:>9}" for fit in fits.values()))
    taus = fits["pFedVEM"].idata["rounds"]["confidence"].isel(round=-1)
    told = ", ".join(f"{name} {float(taus.sel(client=name)) ** -0.5:.2f}" for name in world.clients)
    print(f"\nspreads τ^(-1/2) by pFedVEM: {told}; true spread {SPREAD}")
    if options.figure is not None:
        plot(world, found, options.figure)
        print(f"figure: {options.figure}")
    line = {"hospitals": options.hospitals, "seed": options.seed, "strength": options.strength, "scores": scores}
    print(json.dumps({**line, "seconds": round(time.perf_counter() - started, 1)}))


if __name__ == "__main__":
    main()
