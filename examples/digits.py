"""Ten clients who know five digits each: a shared representation, a head of one's own, and what the network is sure of.

scikit-learn's handwritten digits, 8 x 8 pixels, so that no data have to be fetched. Each client has rows of 5 of the 10
digits, a few for training and the rest of its share for testing. The network is declared inside a PyMC model, its
first layer is shared, and FedSI infers a posterior of the weights that the data speak about; beside it are averages of
networks at the same and at the usual learning rate. Nothing is chosen by test rows.

"map" is FedSI's fit with its weights as a point: what inference adds is the difference. AUROC: how well predictive
entropy tells digits that a client has never seen from its own.

    python examples/digits.py --figure digits.png
    python examples/digits.py --rows 5 --rounds 30
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.datasets import load_digits

import fedppl
from fedppl import metrics
from fedppl.models import fedsi

CLIENTS, LABELS, EACH, TESTED = 10, 10, 5, 15
ROWS = {"FedAvg": 1e-3, "FedAvg-FT": 1e-3, "FedPer": 1e-3, "FedBABU": 1e-2, "FedSI-Fac": 1e-2, "FedSI": 1e-2}


class Client(NamedTuple):
    """One client's training rows, test rows, and images of digits that it has never seen."""

    train: dict[str, np.ndarray]
    X: np.ndarray
    y: np.ndarray
    unseen: np.ndarray


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=15, help="training rows for each digit of a client, at most 20")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, help="draw reliability diagrams of FedSI and of its map here")
    options = parser.parse_args(argv)
    if not 1 <= options.rows <= 20 or options.rounds < 1 or options.seed < 0:
        parser.error("--rows must be 1 to 20, --rounds at least 1, --seed at least 0")
    return options


def divide(options: argparse.Namespace) -> dict[str, Client]:
    """Disjoint rows for every client, scaled by sums over all clients' training rows."""
    X, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(options.seed)
    held = fedsi.labels_of_clients(CLIENTS, LABELS, EACH, rng)
    stock = {label: list(rng.permutation(np.flatnonzero(y == label))) for label in range(LABELS)}
    train, test = [], []
    for labels in held:
        taken = [[stock[label].pop() for _ in range(options.rows + TESTED)] for label in labels]
        train.append(np.concatenate([part[: options.rows] for part in taken]))
        test.append(np.concatenate([part[options.rows :] for part in taken]))
    sums = np.sum([(X[at].size, X[at].sum(), (X[at] ** 2).sum()) for at in train], axis=0)
    mean = sums[1] / sums[0]
    sd = np.sqrt(sums[2] / sums[0] - mean**2)
    scaled = ((X - mean) / sd).astype(np.float32)
    everything = np.concatenate(test)
    return {
        f"client {k}": Client(
            {"X": scaled[train[k]], "y": y[train[k]]},
            scaled[test[k]],
            y[test[k]],
            scaled[everything[~np.isin(y[everything], labels)]],
        )
        for k, labels in enumerate(held)
    }


def score(fit: fedppl.Fit, clients: dict[str, Client], own: dict[str, Any], link: str) -> dict[str, Any]:
    """Accuracy as a mean over clients, calibration over all rows, and how entropy ranks digits that were never seen."""
    accuracies, ranks, said, came = [], [], [], []
    for name, client in clients.items():
        probability, unseen = (
            fedppl.nn.predict(fit, own[name], {"X": X}, link=link)["probability"].values
            for X in (client.X, client.unseen)
        )
        accuracies.append(metrics.accuracy(probability, client.y))
        ranks.append(metrics.auroc(metrics.entropy(unseen), metrics.entropy(probability)))
        said.append(probability)
        came.append(client.y)
    pair = np.concatenate(said), np.concatenate(came)
    ece, brier = metrics.expected_calibration_error(*pair), metrics.brier(*pair)
    return {
        "accuracy": float(np.mean(accuracies)),
        "ECE": ece,
        "Brier": brier,
        "AUROC": float(np.mean(ranks)),
        "pair": pair,
    }


def main(argv: list[str] | None = None) -> None:
    """Fit all methods, print the table, and one line of JSON."""
    options = arguments(argv)
    if importlib.util.find_spec("torch") is None:
        sys.exit("this example needs torch: pip install 'fedppl[torch]'")
    if options.figure is not None and importlib.util.find_spec("matplotlib") is None:
        sys.exit("--figure needs matplotlib: pip install 'fedppl[plots]'")
    import torch

    logging.getLogger("fedppl").setLevel(logging.ERROR)  # stopping at a set number of rounds is what was asked for
    torch.manual_seed(options.seed)
    net = torch.nn.Sequential(torch.nn.Linear(64, 50), torch.nn.ReLU(), torch.nn.Linear(50, LABELS))
    head, clients = tuple(fedsi.shared_names(net, "head")), divide(options)
    data = {name: client.train for name, client in clients.items()}
    found: dict[str, dict[str, Any]] = {}
    began = time.perf_counter()
    for name, rate in ROWS.items():
        method = fedsi.METHODS[name]
        builder = functools.partial(fedsi.classifier, net=net)
        model = fedppl.FederatedModel(builder, fedsi.shared_names(net, method.shares))
        algorithm = method.algorithm(rate, head, fedsi.EPOCHS)
        fit = fedppl.fit(model, data, algorithm, rounds=options.rounds, progressbar=False, random_seed=options.seed)
        own = {client: fedppl.nn.personalise(fit, client) for client in clients}
        found[f"{name}, rate {rate:g}"] = score(fit, clients, own, "scaled")
        if name.startswith("FedSI"):
            found[f"{name}, rate {rate:g}, map"] = score(fit, clients, own, "map")
    print(f"{CLIENTS} clients, {EACH} digits each, {options.rows} training rows a digit, {options.rounds} rounds\n")
    print(f"{'':28}{'accuracy':>9}{'ECE':>8}{'Brier':>8}{'AUROC':>8}")
    for name, row in found.items():
        print(f"{name:28}{row['accuracy']:9.4f}{row['ECE']:8.4f}{row['Brier']:8.4f}{row['AUROC']:8.4f}")
    if options.figure is not None:
        draw({name: found[name]["pair"] for name in ("FedSI, rate 0.01", "FedSI, rate 0.01, map")}, options.figure)
    rows = {name: {k: round(v, 4) for k, v in row.items() if k != "pair"} for name, row in found.items()}
    print(json.dumps({"rounds": options.rounds, "rows": rows, "seconds": round(time.perf_counter() - began, 1)}))


def draw(pairs: dict[str, tuple[np.ndarray, np.ndarray]], path: Path) -> None:
    """Reliability diagrams and confidence histograms, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    canvas, axes = plt.subplots(2, len(pairs), figsize=(4 * len(pairs), 6), sharex=True, layout="constrained")
    for column, (name, pair) in zip(axes.T, pairs.items(), strict=True):
        fedppl.plots.reliability(*pair, ax=column)
        column[0].set_title(f"{name}: {column[0].get_title()}", fontsize=9)
    canvas.savefig(path, dpi=150)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
