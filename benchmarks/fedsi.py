"""FedSI beside averages of networks, on MNIST, Fashion-MNIST and CIFAR-10 (Chen et al., Tables I and II).

Every client has 5 of the 10 labels, each label at equally many clients; rows are drawn from all images, training and
test rows of all clients are disjoint, and every client is tested on its own labels. "small" has 50 training and 950
test rows for each label of a client (CIFAR-10: 25 and 475), "large" 900 and 300 (450 and 150). Networks: an MLP with
100 hidden units, or two convolutions and three linear layers. Pixels are brought to mean 0 and sd 1 by sums over the
clients' training rows. Nothing is chosen by test rows: all rounds are run, and the last is what counts.

Rows: a method at a learning rate. "map" is the same fit with its weights as a point. Beside accuracy (mean over
clients, %) and calibration (over all clients' test rows): AUROC of the predictive entropy for images of labels that the
client does not have, and for images of another data set. --rows has fewer training rows for each label, --novel leaves
clients out of the training. --validation is for choosing settings: so many of the training rows are scored, and no test
row is looked at. So is --unused: images are scored that are neither training nor test rows of anybody. --folder keeps
finished fits and checkpoints: the same command goes on from them, and so does one with more rounds.

CIFAR-10 is a JPEG copy: its figures are not those of the exact pixels.

    python benchmarks/fedsi.py --dataset mnist --size small --seeds 3 --rounds 30
    python benchmarks/fedsi.py --dataset mnist --size small --rows 5 --methods FedBABU FedSI
"""

from __future__ import annotations

import argparse
import functools
import gzip
import io
import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # models/ is importable from a checkout

import fedppl
from benchmarks import kept
from fedppl import metrics
from models import fedsi

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"mnist": "mnist", "fmnist": "fashion_mnist", "cifar10": "cifar10"}
CLIENTS = {"mnist": 10, "fmnist": 10, "cifar10": 20}
ROWS = {"small": (50, 950), "large": (900, 300)}  # CIFAR-10 has half of that
RATIO = {"mnist": 0.05, "fmnist": 0.05, "cifar10": 0.07}
OTHER = {"mnist": "fmnist", "fmnist": "mnist"}
# Table I, accuracy, small and large; Table II, ECE, MCE and Brier score.
PAPER: dict[str, dict[str, tuple[float, float]]] = {
    "mnist": {
        "Local": (91.38, 95.16), "FedAvg": (88.26, 89.54), "FedAvg-FT": (93.15, 94.42), "FedBABU": (91.38, 98.26),
        "FedPer": (91.82, 98.49), "FedRep": (90.68, 98.58), "LG-FedAvg": (91.64, 97.13), "BPFed": (92.96, 98.43),
        "FedPop": (87.63, 89.35), "pFedBayes": (84.61, 92.54), "FedSI-Fac": (91.96, 97.96),
        "FedSI": (93.98, 99.28),
    },
    "fmnist": {
        "Local": (86.51, 90.98), "FedAvg": (81.28, 82.54), "FedAvg-FT": (88.05, 89.67), "FedBABU": (87.70, 93.66),
        "FedPer": (86.62, 96.69), "FedRep": (86.13, 96.78), "LG-FedAvg": (86.35, 95.66), "BPFed": (86.54, 91.76),
        "FedPop": (83.75, 82.17), "pFedBayes": (76.74, 84.31), "FedSI-Fac": (86.55, 94.41),
        "FedSI": (88.41, 96.36),
    },
    "cifar10": {
        "Local": (40.98, 71.10), "FedAvg": (36.51, 58.15), "FedAvg-FT": (48.93, 76.11), "FedBABU": (49.05, 82.78),
        "FedPer": (48.16, 80.90), "FedRep": (46.17, 82.51), "LG-FedAvg": (42.15, 71.19), "BPFed": (49.79, 68.05),
        "FedPop": (43.64, 51.29), "pFedBayes": (48.24, 70.23), "FedSI-Fac": (49.63, 74.61),
        "FedSI": (51.21, 76.1),
    },
}  # fmt: skip
Chances = Callable[[np.ndarray], np.ndarray]  # from images to classes' probabilities
_WIDTHS = ("alpha", "variance", "diagonal_variance", "head_sd")
_SAID = (
    "dataset",
    "size",
    "rows",
    "validation",
    "unused",
    "rounds",
    "seeds",
    "seed",
    "novel",
    "blocks",
    "ratio",
    "epochs",
    *_WIDTHS,
)
LEAST = {
    ("mnist", "small"): 93.98, ("fmnist", "small"): 89.0, ("cifar10", "small"): 51.21,
    ("mnist", "large"): 99.2, ("fmnist", "large"): 95.5,
}  # fmt: skip
MOST_ECE = {("mnist", "small"): 0.040, ("fmnist", "small"): 0.057, ("cifar10", "small"): 0.10}


class Images(NamedTuple):
    """All images of a data set."""

    pixels: np.ndarray  # (n, ...) float32
    labels: np.ndarray  # (n,)


class Problem(NamedTuple):
    """What clients hold, and are tested on."""

    train: dict[str, dict[str, np.ndarray]]
    test: dict[str, Images]
    unseen: dict[str, np.ndarray]  # images of labels that the client does not have
    strange: np.ndarray | None  # images of another data set
    novel: tuple[str, ...]  # clients that do not take part


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dataset", choices=FOLDERS, default="mnist")
    parser.add_argument("--size", choices=ROWS, default="small")
    parser.add_argument("--rows", type=int, help="training rows for each label of a client, in place of the size's")
    parser.add_argument("--validation", type=int, default=0, help="training rows a label in place of the test rows")
    parser.add_argument(
        "--unused", type=int, default=0, help="images a client that nobody holds, in place of test rows"
    )
    parser.add_argument("--methods", nargs="+", choices=[*fedsi.METHODS], default=[*fedsi.METHODS])
    parser.add_argument("--rates", type=float, nargs="+", default=(1e-3, 1e-2), help="of all methods but these")
    parser.add_argument("--fedsi-rates", type=float, nargs="+", default=(1e-2,), help="of FedSI and FedSI-Fac")
    parser.add_argument("--bayes-rates", type=float, nargs="+", default=(1e-4,), help="of pFedBayes; as published")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--alpha", type=float, default=100.0, help="of FedSI: prior variance, training")
    parser.add_argument("--variance", type=float, default=3.0, help="of FedSI: prior variance, inference")
    parser.add_argument("--diagonal-variance", type=float, default=0.03, help="the same of FedSI-Fac")
    parser.add_argument("--ratio", type=float, help="share of the shared weights that FedSI infers")
    parser.add_argument("--epochs", type=int, help="passes over a client's rows in a round")
    parser.add_argument("--head-sd", type=float, default=100.0, help="declared prior sd of the head's weights")
    parser.add_argument(
        "--blocks", action="store_true", help="labels 0 to 4 at one half of the clients, 5 to 9 at others"
    )
    parser.add_argument("--novel", type=int, default=0, help="clients that are only tested")
    parser.add_argument("--processes", type=int, default=2, help="seeds at a time, each in a process of its own")
    parser.add_argument("--folder", type=Path, help="keep finished fits and checkpoints here, and go on from them")
    parser.add_argument("--data", type=Path, help="folder with mnist/, fashion_mnist/ and cifar10/")
    options = parser.parse_args(argv)
    if min(options.seeds, options.rounds, options.processes) < 1 or min(options.seed, options.novel) < 0:
        parser.error("--seeds, --rounds and --processes must be at least 1, --seed and --novel at least 0")
    if options.rows is not None and options.rows < 1:
        parser.error("--rows must be at least 1")
    if not 0 <= options.validation < ROWS[options.size][0] or (options.validation and options.rows):
        parser.error("--validation must leave training rows, and does not go with --rows")
    if options.unused < 0 or options.unused and (options.validation or options.dataset != "cifar10"):
        parser.error("--unused goes with CIFAR-10, of which clients leave images over, and not with --validation")
    if options.ratio is not None and not 0 < options.ratio <= 1 or options.epochs is not None and options.epochs < 1:
        parser.error("--ratio must lie above 0 and at most at 1, --epochs must be at least 1")
    if options.novel >= CLIENTS[options.dataset]:
        parser.error(f"--novel must leave some of {CLIENTS[options.dataset]} clients")
    return options


def find_data(given: Path | None, dataset: str) -> Path:
    """Return the data set's folder, or end with a message that says how to provide it."""
    named = os.environ.get("FEDPPL_DATA")
    folder = (given or (Path(named) if named else ROOT.parent / "shared" / "data")) / FOLDERS[dataset]
    if not folder.is_dir():
        sys.exit(
            f"{folder} does not exist. Give the data folder by --data or FEDPPL_DATA; MNIST and Fashion-MNIST are "
            "four idx files as published, gzipped."
        )
    return folder


def load(folder: Path) -> Images:
    """All images: both parts of an idx data set, or the JPEG copy of CIFAR-10."""
    if (folder / "cifar10_jpeg_all_60000.bin").is_file():
        from PIL import Image

        index, raw = (
            np.load(folder / "cifar10_jpeg_all_60000_index.npz"),
            (folder / "cifar10_jpeg_all_60000.bin").read_bytes(),
        )
        head, places = index["jpeg_prefix"].tobytes(), index["offsets"]
        files = (io.BytesIO(head + raw[places[i] : places[i + 1]]) for i in range(len(places) - 1))
        pixels = np.stack([np.asarray(Image.open(file)) for file in files])
        return Images(np.moveaxis(pixels, 3, 1).astype(np.float32) / 255, index["labels"].astype(np.int64))
    parts = []
    for part in ("train", "t10k"):
        with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as images:
            pixels = np.frombuffer(images.read(), np.uint8, offset=16).reshape(-1, 784)
        with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as labels:
            parts.append((pixels, np.frombuffer(labels.read(), np.uint8, offset=8)))
    pixels, labels = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    return Images(pixels.astype(np.float32) / 255, labels.astype(np.int64))


def divide(images: Images, other: Images | None, options: argparse.Namespace, seed: int) -> Problem:
    """Rows of every client, disjoint, and scaled by sums over training rows."""
    rng, count = np.random.default_rng(seed), CLIENTS[options.dataset]
    halved = 2 if options.dataset == "cifar10" else 1
    rows, tested = (n // halved for n in ROWS[options.size])
    held = fedsi.labels_of_clients(count, 10, 5, rng)
    if options.blocks:
        held = (np.arange(count)[:, None] * 5 + np.arange(5)) % 10
    stock = {label: list(rng.permutation(np.flatnonzero(images.labels == label))) for label in range(10)}
    train, test = {}, {}
    for k, labels in enumerate(held):
        taken = [[stock[label].pop() for _ in range(rows + tested)] for label in labels]
        few = (rows if options.rows is None else min(options.rows, rows)) - options.validation
        scored = slice(rows - options.validation, rows) if options.validation else slice(rows, None)
        train[f"client {k}"] = np.concatenate([part[:few] for part in taken])
        test[f"client {k}"] = np.concatenate([part[scored] for part in taken])
    if getattr(options, "unused", 0):
        for k, labels in enumerate(held):
            left = np.concatenate([stock[label] for label in labels])
            if options.unused > len(left):
                sys.exit(f"--unused {options.unused}: nobody holds {len(left)} images of client {k}'s labels, no more")
            test[f"client {k}"] = np.random.default_rng(k).choice(left, options.unused, replace=False)
    names = tuple(train)
    novel = names[count - options.novel :]
    sums = np.sum(
        [
            (images.pixels[at].size, images.pixels[at].sum(dtype=float), (images.pixels[at].astype(float) ** 2).sum())
            for name, at in train.items()
            if name not in novel
        ],
        axis=0,
    )
    mean = sums[1] / sums[0]
    sd = np.sqrt(sums[2] / sums[0] - mean**2)
    scaled = lambda pixels: ((pixels - mean) / sd).astype(np.float32)  # noqa: E731
    unseen = {}
    for name, labels in zip(names, held, strict=True):
        others = np.concatenate([at[~np.isin(images.labels[at], labels)] for at in test.values()])
        unseen[name] = scaled(images.pixels[rng.choice(others, min(500, len(others)), replace=False)])
    strange = None if other is None else scaled(other.pixels[rng.choice(len(other.pixels), 500, replace=False)])
    return Problem(
        {name: {"X": scaled(images.pixels[at]), "y": images.labels[at]} for name, at in train.items()},
        {name: Images(scaled(images.pixels[at]), images.labels[at]) for name, at in test.items()},
        unseen,
        strange,
        novel,
    )


def network(dataset: str, seed: int) -> Any:
    """The common random start."""
    import torch

    torch.manual_seed(seed)
    layers = torch.nn
    if dataset != "cifar10":
        return layers.Sequential(layers.Linear(784, 100), layers.ReLU(), layers.Linear(100, 10))
    convolutions = (layers.Conv2d(3, 6, 5), layers.ReLU(), layers.MaxPool2d(2), layers.Conv2d(6, 16, 5), layers.ReLU())
    linear = (layers.Linear(400, 120), layers.ReLU(), layers.Linear(120, 84), layers.ReLU(), layers.Linear(84, 10))
    return layers.Sequential(*convolutions, layers.MaxPool2d(2), layers.Flatten(), *linear)


def algorithm_of(name: str, rate: float, head: tuple[str, ...], options: argparse.Namespace) -> fedppl.Algorithm:
    """A method's algorithm; FedSI's two have settings of their own."""
    epochs = fedsi.EPOCHS if options.epochs is None else options.epochs
    settings: dict[str, Any]
    if not name.startswith("FedSI"):
        return fedsi.METHODS[name].algorithm(rate, head, epochs)
    if name == "FedSI-Fac":
        settings = {"epochs": epochs, "diagonal": True, "prior_variance": options.diagonal_variance}
        return fedppl.nn.FedSI(learning_rate=rate, **settings)
    settings = {"epochs": epochs, "alpha": options.alpha, "prior_variance": options.variance}
    return fedppl.nn.FedSI(learning_rate=rate, ratio=options.ratio or RATIO[options.dataset], **settings)


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


def named(name: str, rate: float, seed: int, options: argparse.Namespace) -> str:
    """A fit's file, less its number of rounds: what decides the numbers, and no more."""
    of_data = [options.dataset, options.size, f"seed{seed}"]
    of_data += [
        f"{what}{getattr(options, what)}"
        for what in ("rows", "validation", "unused", "novel", "blocks")
        if getattr(options, what)
    ]
    of_method = ["ratio", "epochs", *_WIDTHS] if name.startswith("FedSI") else ["epochs", "head_sd"]
    settings = [f"{what}{getattr(options, what):g}" for what in of_method if getattr(options, what) is not None]
    return "-".join([*of_data, name, f"{rate:g}", *settings])


def fitted(
    name: str, rate: float, net: Any, problem: Problem, seed: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One method at one rate: its row, and that of its weights as a point."""
    method, head = fedsi.METHODS[name], tuple(fedsi.shared_names(net, "head"))
    sigma = {weight: options.head_sd if weight in head else 1.0 for weight in fedsi.shared_names(net, "all")}
    model = fedppl.FederatedModel(
        functools.partial(fedsi.classifier, net=net, sigma=sigma), fedsi.shared_names(net, method.shares)
    )
    takes_part = {k: data for k, data in problem.train.items() if k not in problem.novel}
    algorithm, started = algorithm_of(name, rate, head, options), time.process_time()
    settings: dict[str, Any] = {"rounds": options.rounds, "progressbar": False, "random_seed": seed}
    if options.folder is not None and not method.alone:
        settings["checkpoint"] = options.folder / f"{named(name, rate, seed, options)}.ckpt"
    fits: dict[str, fedppl.Fit] = {}
    failed = 0  # replies of all rounds
    trained = 0  # rounds of clients in this process: what a checkpoint brought is not in them

    def count(step: fedppl.Round) -> None:
        nonlocal trained
        trained += len(step.record.asked)

    for group in [{k: v} for k, v in takes_part.items()] if method.alone else [takes_part]:
        fit = fedppl.fit(model, group, algorithm, engine=fedppl.InProcess(workers=1), callback=count, **settings)
        if len(fit.records) > options.rounds:
            raise ValueError(
                f"{settings['checkpoint']} has {len(fit.records)} rounds, which do not go back to {options.rounds}; "
                "ask for as many --rounds at least, or take another --folder."
            )
        fits |= dict.fromkeys(group, fit)
        failed += sum(len(record.failures) for record in fit.records)
    extra: dict[str, float] = {"failed": failed}
    if trained:
        extra["seconds"] = (time.process_time() - started) / trained
    own = {k: fedppl.nn.personalise(fit, k) for k, fit in fits.items()}
    if problem.novel and not method.alone:
        fit = next(iter(fits.values()))
        new = {k: fedppl.nn.personalise(fit, problem.train[k]) for k in problem.novel}
        extra["novel"] = scores(problem, new, dict.fromkeys(new, fit), "scaled")["accuracy"]
    label = f"{name} {rate:g}"
    records = [{"seed": seed, "row": label, **scores(problem, own, fits, "scaled"), **extra}]
    if name.startswith("FedSI"):
        records.append({"seed": seed, "row": f"{label}, map", **scores(problem, own, fits, "map")})
    print(f"seed {seed}: {label} {records[0]['accuracy']:.2f}", file=sys.stderr, flush=True)
    return records


def one_seed(seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every method at every rate on one partition; a record for each row."""
    import torch

    torch.set_num_threads(1)
    logging.getLogger("fedppl").setLevel(logging.ERROR)  # stopping at a set number of rounds is what was asked for
    images = load(find_data(options.data, options.dataset))
    other = OTHER.get(options.dataset)
    problem = divide(images, None if other is None else load(find_data(options.data, other)), options, seed)
    net = network(options.dataset, seed)
    records = []
    for name in options.methods:
        usual = options.fedsi_rates if name.startswith("FedSI") else options.rates
        for rate in options.bayes_rates if name == "pFedBayes" else usual:
            done, algorithm = None, algorithm_of(name, rate, tuple(fedsi.shared_names(net, "head")), options)
            if options.folder is not None:
                done = options.folder / f"{named(name, rate, seed, options)}-rounds{options.rounds}.json"
                if (found := kept.read(done, algorithm)) is not None:
                    records += found
                    continue
            found = fitted(name, rate, net, problem, seed, options)
            if done is not None:
                kept.write(done, found, algorithm)
            records += found
    return records


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


def main(argv: list[str] | None = None) -> int:
    """Run all seeds, print the table, the bars and one line of JSON; 1 where a bar is missed."""
    options, started = arguments(argv), time.perf_counter()
    find_data(options.data, options.dataset)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    job = functools.partial(one_seed, options=options)
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        records = [r for found in pool.map(job, range(options.seed, options.seed + options.seeds)) for r in found]
    seeds = pd.DataFrame(records)
    groups = seeds.drop(columns="seed").groupby("row", sort=False)
    table, spread = groups.mean(), groups.std().fillna(0.0)
    shown = table.copy()
    shown.insert(1, "±", spread["accuracy"])
    size = 0 if options.size == "small" else 1
    paper = [
        PAPER[options.dataset].get(row.split()[0], ("", ""))[size] if "map" not in row else "" for row in table.index
    ]
    shown.insert(0, "paper", paper)
    print(
        f"{options.dataset}, {options.size}, {options.rounds} rounds (the paper: 800), mean over {options.seeds} "
        f"seeds\n"
    )
    print(shown.rename_axis(None).to_string(float_format="{:.4f}".format, na_rep=""))
    judged = bars(table, seeds, options)
    for text, met in judged:
        print(f"{'met' if met else 'MISSED'}: {text}")
    line = {name: value for name, value in vars(options).items() if name in _SAID and value is not None}
    line["rows of the table"] = {str(k): v.dropna().round(4).to_dict() for k, v in table.iterrows()}
    line["missed"] = [text for text, met in judged if not met]
    line["seconds"] = round(time.perf_counter() - started, 1)
    print(json.dumps(line))
    return 1 if line["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
