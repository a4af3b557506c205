"""What a posterior of a network is good for: personalised methods, and what a practitioner would take in their place.

Clients and rows are those of `benchmarks/fedsi.py`, "small", with 5, 20 and 50 training rows for each label of a client
(CIFAR-10: 25 in place of 50). Scored are test rows of a client's own labels: accuracy, NLL, ECE and Brier score; and
AUROC of the predictive entropy, for images of labels that the client does not have, and for images of another data set.

Beside fedppl's methods stand two peers. "Ensemble" is five fits of FedAvg-FT from different starts, whose probabilities
are averaged. "Laplace" is FedAvg-FT with Laplace's approximation of the last layer, by its generalised Gauss-Newton
matrix on the client's own rows, predictions by the formula of the others.

Every method has the same rounds. FedSI's two, Per-FedAvg, pFedMe and pFedVEM have the rates of their own benchmarks;
any other method has one of two, by the likelihood of a fifth of the training rows of another partition (seed 100) that
are held out there. So has "Laplace" its prior's precision, of six: by the evidence it would have none with few rows,
which a network fits without an error. All weights then are fitted to all training rows. No method sees the test rows of
the partition that it is scored on; but partitions are drawn from the same images, so that some by which a rate is
chosen are test rows elsewhere. A method that fails at one seed has no mean. --folder keeps finished fits, and the same
command goes on from them.

    python benchmarks/uncertainty.py --dataset mnist --seeds 1 --folder results
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import softmax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fedppl
from benchmarks import fedsi as benchmark
from benchmarks import kept
from benchmarks._fedsi import data as images
from benchmarks._fedsi import fit as fits
from benchmarks._fedsi.data import Problem
from benchmarks._fedsi.scores import Chances, scored
from benchmarks._pfedvem.network import zero_head
from fedppl.models import fedsi, pfedvem
from fedppl.nn.predict import probabilities
from fedppl.types import LocalFailure

ROWS = (5, 20, 50)
FEWEST = {"cifar10": 25}  # of the last of these
CHOSEN_BY = 100  # the partition whose rows choose the rates
MEMBERS = 5
OF_FEDSI = ("Local", "FedAvg-FT", "FedBABU", "FedPer", "FedRep", "LG-FedAvg", "BPFed", "FedPop", "pFedBayes")
OF_PFEDVEM = ("PerFedAvg", "pFedMe", "pFedVEM")  # with the settings of benchmarks/pfedvem.py, and one rate
OURS = ("FedSI-Fac", "FedSI")  # at the rate that was chosen for them
PEERS = ("Ensemble", "Laplace")
METHODS = (*OF_FEDSI, *OF_PFEDVEM, *OURS, *PEERS)
RATES = {"pFedBayes": (1e-4, 1e-3)}
PRECISIONS = (0.1, 1.0, 10.0, 100.0, 1e3, 1e4)
HIGHER = ("accuracy", "AUROC unseen", "AUROC strange")


class Cell(NamedTuple):
    """One method on one partition."""

    method: str
    rows: int
    seed: int
    rate: float | None
    validation: int
    precision: float | None = None  # of the last layer's prior


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dataset", choices=images.FOLDERS, default="mnist")
    parser.add_argument("--rows", type=int, nargs="+", default=None, help="training rows for each label of a client")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--folder", type=Path, help="keep finished fits here, and go on from them")
    parser.add_argument("--data", type=Path, help="folder with mnist/, fashion_mnist/ and cifar10/")
    options = parser.parse_args(argv)
    most = images.ROWS["small"][0] // (2 if options.dataset == "cifar10" else 1)
    options.rows = [min(rows, most) for rows in ROWS] if options.rows is None else options.rows
    if min(options.seeds, options.rounds) < 1 or not all(5 <= rows <= most for rows in options.rows):
        parser.error(f"--seeds and --rounds must be at least 1, and --rows between 5 and {most}")
    if options.seeds > CHOSEN_BY:
        parser.error(f"--seeds must be at most {CHOSEN_BY}: that partition chooses the rates")
    return options


def problem_of(options: argparse.Namespace, cell: Cell) -> Problem:
    """The partition, with the last of each label's training rows in place of the test rows where rates are chosen."""
    other = images.OTHER.get(options.dataset)
    strange = None if other is None else _loaded(images.find_data(options.data, other))
    given = benchmark.arguments(["--dataset", options.dataset, "--size", "small", "--rows", str(cell.rows)])
    problem = images.divide(_loaded(images.find_data(options.data, options.dataset)), strange, given, cell.seed)
    if not cell.validation:
        return problem
    train, test = {}, {}
    for name, data in problem.train.items():
        held = np.zeros(len(data["y"]), dtype=bool)
        for label in np.unique(data["y"]):
            held[np.flatnonzero(data["y"] == label)[-cell.validation :]] = True
        train[name] = {key: values[~held] for key, values in data.items()}
        test[name] = images.Images(data["X"][held], data["y"][held])
    return problem._replace(train=train, test=test)


_loaded = functools.lru_cache(maxsize=2)(images.load)


def declared(method: str, net: Any) -> tuple[fedppl.FederatedModel, bool]:
    """A method's model, and whether every client is alone."""
    if method in OF_PFEDVEM:
        shares, alone = pfedvem.METHODS[method].shares, pfedvem.METHODS[method].alone
        return fedppl.FederatedModel(
            functools.partial(pfedvem.classifier, net=net), pfedvem.shared_names(net, shares)
        ), alone
    row = fedsi.METHODS["FedAvg-FT" if method in PEERS else method]
    head = fedsi.shared_names(net, "head")
    sigma = {weight: 100.0 if weight in head else 1.0 for weight in fedsi.shared_names(net, "all")}
    builder = functools.partial(fedsi.classifier, net=net, sigma=sigma)
    return fedppl.FederatedModel(builder, fedsi.shared_names(net, row.shares)), row.alone


def algorithm_of(cell: Cell, head: tuple[str, ...], dataset: str) -> fedppl.Algorithm:
    """A method's algorithm at a rate; FedSI's two as `benchmarks/fedsi.py` has them."""
    if cell.method in OF_PFEDVEM:
        return pfedvem.METHODS[cell.method].algorithm(head)
    if cell.method in OURS:
        return fits.algorithm_of(cell.method, 1e-2, head, benchmark.arguments(["--dataset", dataset]))
    name = "FedAvg-FT" if cell.method in PEERS else cell.method
    return fedsi.METHODS[name].algorithm(cell.rate, head, fedsi.EPOCHS)


def fitted(cell: Cell, problem: Problem, options: argparse.Namespace, start: int) -> dict[str, Chances]:
    """One fit from one start: every client's function from images to probabilities."""
    net = fits.network(options.dataset, start)
    head = tuple(fedsi.shared_names(net, "head"))
    if cell.method == "pFedVEM":
        zero_head(net, head)
    model, alone = declared(cell.method, net)
    ways: dict[str, Chances] = {}
    for group in [{name: data} for name, data in problem.train.items()] if alone else [problem.train]:
        settings: dict[str, Any] = {"engine": fedppl.InProcess(workers=1), "random_seed": start, "progressbar": False}
        fit = fedppl.fit(model, group, algorithm_of(cell, head, options.dataset), rounds=options.rounds, **settings)
        for name in group:
            own = fedppl.nn.personalise(fit, name)
            if cell.method == "Laplace":
                ways[name] = last_layer(own, group[name], cell.precision)
            else:
                ways[name] = functools.partial(_probability, fit, own)
    return ways


def _probability(fit: fedppl.Fit, own: Any, pixels: np.ndarray) -> np.ndarray:
    return fedppl.nn.predict(fit, own, {"X": pixels})["probability"].values


def last_layer(own: Any, data: dict[str, np.ndarray], precision: float) -> Chances:
    """Laplace's approximation of a classifier's last layer under a normal prior of this precision δ.

    With features h (with a one) and probabilities p of a row, the curvature of the weights (C, H) is
    Σ (diag p − p pᵀ) ⊗ h hᵀ + δ I.
    """
    import torch

    from fedppl.nn.view import network_of

    net = own.client.view(network_of).loaded(own.weights)
    last = net[-1]

    def features(pixels: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            h = net[:-1](torch.as_tensor(pixels, dtype=last.weight.dtype)).double().numpy()
        return np.column_stack([h, np.ones(len(h))])

    weights = np.column_stack([last.weight.detach().double().numpy(), last.bias.detach().double().numpy()])
    h = features(data["X"])
    chance = softmax(h @ weights.T, axis=1)
    middle = np.einsum("nc,cd->ncd", chance, np.eye(len(weights))) - chance[:, :, None] * chance[:, None, :]
    curvature = np.einsum("ncd,nh,ni->chdi", middle, h, h, optimize=True).reshape(weights.size, weights.size)
    covariance = np.linalg.inv(curvature + precision * np.eye(weights.size)).reshape(*weights.shape, *weights.shape)

    def chances(pixels: np.ndarray) -> np.ndarray:
        parts = []
        for part in np.array_split(pixels, max(1, len(pixels) // 500)):
            new = features(part)
            spread = np.einsum("nh,chdi,ni->ncd", new, covariance, new, optimize=True)
            parts.append(probabilities(new @ weights.T, spread))
        return np.concatenate(parts)

    return chances


def averaged(members: list[Chances]) -> Chances:
    """The mean of several models' probabilities."""
    return lambda pixels: np.mean([member(pixels) for member in members], axis=0)


def score(cell: Cell, options: argparse.Namespace) -> dict[str, float]:
    """Fit and score one cell, or read what an earlier run found; empty where training fails at this rate."""
    head = tuple(fedsi.shared_names(fits.network(options.dataset, cell.seed), "head"))
    done, algorithm = None, algorithm_of(cell, head, options.dataset)
    if options.folder is not None:
        rate = "own" if cell.rate is None else f"{cell.rate:g}"
        what = [options.dataset, options.rounds, cell.method, cell.rows, cell.validation, cell.seed, rate]
        what += [] if cell.precision is None else [f"{cell.precision:g}"]
        done = options.folder / f"{'-'.join(map(str, what))}.json"
        if (before := kept.read(done, algorithm)) is not None:
            return dict(before)
    problem, started = problem_of(options, cell), time.process_time()
    try:
        if cell.method == "Ensemble":
            several = [fitted(cell, problem, options, cell.seed + 1000 * i) for i in range(MEMBERS)]
            ways = {name: averaged([member[name] for member in several]) for name in problem.train}
        else:
            ways = fitted(cell, problem, options, cell.seed)
        found = {**scored(problem, ways), "seconds": time.process_time() - started}
    except LocalFailure as failure:
        print(f"{cell}: {failure}", file=sys.stderr, flush=True)
        found = {}
    if done is not None:
        kept.write(done, found, algorithm)
    return found


def chosen(method: str, rows: int, options: argparse.Namespace) -> tuple[float | None, float | None]:
    """The rate and the precision at which held-out training rows are likeliest; None where none is chosen."""
    if method in (*OF_PFEDVEM, *OURS):
        return None, None
    alike = "FedAvg-FT" if method in PEERS else method
    held = functools.partial(Cell, rows=rows, seed=CHOSEN_BY, validation=max(1, rows // 5))

    def loss(cell: Cell) -> float:
        return score(cell, options).get("NLL", np.inf)

    rate = min(RATES.get(alike, (1e-3, 1e-2)), key=lambda one: loss(held(alike, rate=one)))
    if method != "Laplace":
        return rate, None
    return rate, min(PRECISIONS, key=lambda one: loss(held(method, rate=rate, precision=one)))


def averages(records: list[dict[str, Any]]) -> pd.DataFrame:
    """Means over seeds, of methods that have failed at none of them: the seeds that are left may be the easy ones."""
    return pd.DataFrame(records).groupby("method", sort=False).agg(lambda found: found.mean(skipna=False))


def main(argv: list[str] | None = None) -> int:
    """Run all cells, print a table for each number of rows and one line of JSON."""
    options, started = arguments(argv), time.perf_counter()
    import torch

    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    logging.getLogger("fedppl").setLevel(logging.ERROR)  # stopping at a set number of rounds is what was asked for
    warnings.filterwarnings("ignore", category=fedppl.ConvergenceWarning)
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    line: dict[str, Any] = {name: getattr(options, name) for name in ("dataset", "rounds", "seeds")}
    line["rows"] = {}
    for rows in options.rows:
        records = []
        for method in options.methods:
            rate, precision = chosen(method, rows, options)
            for seed in range(options.seeds):
                found = score(Cell(method, rows, seed, rate, 0, precision), options)
                records.append({"method": method, "rate": rate, "precision": precision, **found})
                print(f"{rows} rows, seed {seed}: {method} {found.get('NLL', np.nan):.4f}", file=sys.stderr, flush=True)
        table = averages(records)
        compared = [what for what in table.columns[2:-1] if table[what].notna().any()]
        best = {what: getattr(table[what], "idxmax" if what in HIGHER else "idxmin")() for what in compared}
        print(f"\n{options.dataset}, {rows} rows a label, {options.rounds} rounds, mean over {options.seeds} seeds\n")
        print(table.rename_axis(None).to_string(float_format="{:.4f}".format, na_rep=""))
        print("best: " + ", ".join(f"{what} {method}" for what, method in best.items()), flush=True)
        line["rows"][rows] = {"methods": {k: v.dropna().round(4).to_dict() for k, v in table.iterrows()}, "best": best}
    line["seconds"] = round(time.perf_counter() - started, 1)
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
