"""What is told of fits: accuracy, calibration, entropies, and the bars."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

import fedppl
from benchmarks._fedsi.data import Problem
from fedppl import metrics

LEAST = {
    ("mnist", "small"): 93.98, ("fmnist", "small"): 89.0, ("cifar10", "small"): 51.21,
    ("mnist", "large"): 99.2, ("fmnist", "large"): 95.5,
}  # fmt: skip
MOST_ECE = {("mnist", "small"): 0.040, ("fmnist", "small"): 0.057, ("cifar10", "small"): 0.10}
Chances = Callable[[np.ndarray], np.ndarray]  # from images to classes' probabilities


def scores(problem: Problem, own: dict[str, Any], fits: dict[str, fedppl.Fit], link: str) -> dict[str, float]:
    """Accuracy, calibration, and what entropies tell, over the clients in `own`."""

    def way(name: str) -> Chances:
        predict = functools.partial(fedppl.nn.predict, fits[name], own[name], link=link)
        return lambda pixels: predict({"X": pixels})["probability"].values

    return scored(problem, {name: way(name) for name in own})


def scored(problem: Problem, ways: dict[str, Chances]) -> dict[str, float]:
    """The same of any functions from images to classes' probabilities, by client."""
    accuracies, entropies = [], {"seen": [], "unseen": [], "strange": []}
    said, came = [], []
    for name, predict in ways.items():
        test = problem.test[name]
        probability = predict(test.pixels)
        accuracies.append(metrics.accuracy(probability, test.labels))
        said.append(probability)
        came.append(test.labels)
        entropies["seen"].append(metrics.entropy(probability))
        entropies["unseen"].append(metrics.entropy(predict(problem.unseen[name])))
        if problem.strange is not None:
            entropies["strange"].append(metrics.entropy(predict(problem.strange)))
    pair = np.concatenate(said), np.concatenate(came)
    found = {
        "accuracy": 100 * float(np.mean(accuracies)),
        "ECE": metrics.expected_calibration_error(*pair),
        "MCE": metrics.maximum_calibration_error(*pair),
        "Brier": metrics.brier(*pair),
        "NLL": float(-np.mean(np.log(np.maximum(pair[0][np.arange(len(pair[1])), pair[1]], 1e-300)))),
    }
    for what in ("unseen", "strange"):
        if entropies[what]:
            pairs = zip(entropies[what], entropies["seen"], strict=True)
            found[f"AUROC {what}"] = float(np.mean([metrics.auroc(a, b) for a, b in pairs]))
    return found


def bars(table: pd.DataFrame, seeds: pd.DataFrame, options: argparse.Namespace) -> list[tuple[str, bool]]:
    """What FedSI must reach, as far as the methods that ran can tell."""
    key, ours = (options.dataset, options.size), "FedSI 0.01"
    changed = options.rows, options.ratio, options.epochs
    chosen_by = options.validation or options.unused
    if (
        ours not in table.index
        or any(value is not None for value in changed)
        or options.novel
        or options.blocks
        or chosen_by
    ):
        return []
    row, found = table.loc[ours], []
    if key in LEAST:
        found.append((f"accuracy {row['accuracy']:.2f}, at least {LEAST[key]}", row["accuracy"] >= LEAST[key]))
    tuned = [name for name in table.index if name.startswith("FedAvg-FT")]
    if tuned and options.size == "small":
        best = max(tuned, key=lambda name: table.loc[name, "accuracy"])
        wide = seeds.pivot(index="seed", columns="row", values="accuracy")
        apart = float((wide[ours] - wide[best]).mean())
        found.append((f"{apart:+.2f} against {best}, paired, at least -0.2", apart >= -0.2))
    if key in MOST_ECE:
        found.append((f"ECE {row['ECE']:.3f}, at most {MOST_ECE[key]}", row["ECE"] <= MOST_ECE[key]))
        if "FedSI-Fac 0.01" in table.index:
            other = table.loc["FedSI-Fac 0.01", "ECE"]
            found.append((f"ECE {row['ECE']:.3f}, below {other:.3f} of FedSI-Fac", row["ECE"] < other))
    for what in ("AUROC unseen", "AUROC strange"):
        if what in table:
            point = table.loc[f"{ours}, map", what]
            found.append((f"{what} {row[what]:.4f}, at least {point:.4f} of the map", row[what] >= point))
    if np.isfinite(row.get("seconds", np.nan)):  # unless checkpoints brought all rounds
        found.append((f"a client's round {row['seconds']:.1f} s, at most 10", row["seconds"] <= 10))
    return [(text, bool(met)) for text, met in found]
