"""pFedVEM beside the methods of its Table 1, on Fashion-MNIST, CIFAR-10, CIFAR-100 and digits of several sources.

Clients hold 5 of 10 labels (CIFAR-100: one subclass of each of 20 classes; digits: 5 of one source), sliced at random
places into very different sizes (`fedppl.data`). Of the published training rows every one is at one client. In a
round each client reports with probability 0.1; all of them go on with their personal parts. PM is the mean over
clients of the accuracy of their own models on all test rows of their labels, GM the accuracy of the global model on
all test rows: in the last round, as a mean over the last 10, the same for an average of its weights over rounds, and
in the best round, which is chosen on the test rows and no estimate of anything. Nothing else is chosen by test rows:
--validation and --set try settings on training rows that are held out. With --score-every 10 the global model is
scored in every tenth round and in the last ten: "best" is then the best of these.

CIFAR-10 is a JPEG copy: its figures are not those of the exact pixels. digit5 has two of its five sources, MNIST and
USPS, whose slices are independent.

    python benchmarks/pfedvem.py --dataset fmnist --clients 50 --rounds 100 --seeds 5 --methods pFedVEM FedPer FedAvg
    python benchmarks/pfedvem.py --dataset fmnist --clients 100 --cost
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import gzip
import io
import json
import logging
import math
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # models/ is importable from a checkout

import fedppl
from benchmarks import kept as kept_fits
from fedppl import data as partitions
from fedppl.types import LocalFailure
from models import pfedvem

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"fmnist": "fashion_mnist", "cifar10": "cifar10", "cifar100": "cifar100", "digit5": "mnist"}
REPORTING = 0.1
KEPT = 0.9  # of an average of the global model's weights over rounds
# Table 1: PM and GM of 50, 100 and 200 clients.
PAPER: dict[str, dict[str, dict[int, tuple[float | None, float | None]]]] = {
    "fmnist": {
        "Local": {50: (89.2, None), 100: (87.5, None), 200: (85.7, None)},
        "FedAvg": {50: (None, 83.5), 100: (None, 85.4), 200: (None, 85.9)},
        "FedProx": {50: (None, 84.8), 100: (None, 86.3), 200: (None, 86.5)},
        "SCAFFOLD": {50: (None, 85.6), 100: (None, 85.4), 200: (None, 84.6)},
        "FedPer": {50: (91.4, None), 100: (90.7, None), 200: (89.7, None)},
        "FedRep": {50: (91.5, None), 100: (90.7, None), 200: (89.9, None)},
        "IFCA": {50: (84.1, None), 100: (85.6, None), 200: (86.1, None)},
        "PerFedAvg": {50: (88.7, None), 100: (88.6, None), 200: (88.3, None)},
        "pFedMe": {50: (91.9, 82.0), 100: (91.4, 84.4), 200: (90.6, 85.1)},
        "pFedBayes": {50: (91.9, 83.5), 100: (91.3, 84.2), 200: (90.5, 84.4)},
        "pFedVEM": {50: (91.8, 83.9), 100: (91.4, 85.6), 200: (90.7, 86.2)},
    },
    "cifar10": {
        "Local": {50: (56.9, None), 100: (52.1, None), 200: (46.6, None)},
        "FedAvg": {50: (None, 57.7), 100: (None, 59.4), 200: (None, 59.2)},
        "FedProx": {50: (None, 58.0), 100: (None, 59.4), 200: (None, 59.1)},
        "SCAFFOLD": {50: (None, 60.4), 100: (None, 59.8), 200: (None, 55.4)},
        "FedPer": {50: (72.7, None), 100: (68.4, None), 200: (63.4, None)},
        "FedRep": {50: (71.4, None), 100: (67.4, None), 200: (62.8, None)},
        "IFCA": {50: (59.4, None), 100: (60.1, None), 200: (59.5, None)},
        "PerFedAvg": {50: (62.9, None), 100: (65.6, None), 200: (64.2, None)},
        "pFedMe": {50: (72.3, 56.6), 100: (71.4, 60.1), 200: (68.5, 58.7)},
        "pFedBayes": {50: (71.4, 52.0), 100: (68.5, 53.2), 200: (64.6, 51.4)},
        "pFedVEM": {50: (73.2, 56.0), 100: (71.9, 60.1), 200: (70.1, 59.4)},
    },
    "cifar100": {
        "pFedVEM": {50: (61.0, 52.8), 100: (56.2, 52.3), 200: (51.1, 49.2)},
        "FedPer": {50: (49.7, None), 100: (39.3, None), 200: (30.6, None)},
        "FedRep": {50: (50.9, None), 100: (41.2, None), 200: (30.5, None)},
    },
    "digit5": {  # Table 7, of five sources
        "FedProx": {50: (None, 86.2), 100: (None, 86.1), 200: (None, 85.8)},
        "pFedMe": {50: (91.2, 85.6), 100: (89.5, 86.6), 200: (88.4, 86.9)},
        "pFedBayes": {50: (90.9, 74.8), 100: (88.2, 76.1), 200: (85.2, 74.4)},
        "pFedVEM": {50: (92.7, 86.6), 100: (91.1, 87.1), 200: (89.8, 86.9)},
    },
}
# Table 6: the same of 100 clients that hold so many images of CIFAR-10 together.
FEW: dict[str, dict[int, tuple[float | None, float | None]]] = {
    "Local": {5000: (35.7, None), 10000: (39.6, None)},
    "FedAvg": {5000: (None, 41.2), 10000: (None, 47.4)},
    "FedProx": {5000: (None, 41.5), 10000: (None, 46.6)},
    "SCAFFOLD": {5000: (None, 39.7), 10000: (None, 46.4)},
    "FedPer": {5000: (40.7, None), 10000: (51.8, None)},
    "FedRep": {5000: (40.7, None), 10000: (51.3, None)},
    "IFCA": {5000: (41.3, None), 10000: (47.0, None)},
    "PerFedAvg": {5000: (41.4, None), 10000: (48.2, None)},
    "pFedMe": {5000: (44.9, 36.1), 10000: (53.1, 42.5)},
    "pFedBayes": {5000: (52.3, 36.8), 10000: (58.1, 41.9)},
    "pFedVEM": {5000: (57.1, 45.7), 10000: (61.8, 50.1)},
}


_SAID = ("dataset", "clients", "rounds", "seeds", "seed", "cuts", "total", "validation", "set", "score_every")


class Images(NamedTuple):
    """Images, what is predicted, and what clients differ by."""

    pixels: np.ndarray  # (n, ...) float32
    labels: np.ndarray  # (n,)
    kinds: np.ndarray  # (n,): label, subclass or source


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dataset", choices=FOLDERS, default="fmnist")
    parser.add_argument("--clients", type=int, choices=(50, 100, 200), default=50)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--methods", nargs="+", choices=[*pfedvem.METHODS], default=["FedAvg", "FedPer", "pFedVEM"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--every", type=int, help="also evaluate PM after every so many rounds")
    parser.add_argument("--score-every", type=int, default=1, help="rounds from one scored global model to the next")
    parser.add_argument("--cuts", choices=("same", "independent", "equal"), default="same", help="slices of labels")
    parser.add_argument("--total", type=int, help="training rows of all clients together, drawn from the published")
    parser.add_argument("--validation", type=float, default=0.0, help="score this share of the training rows instead")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the one method")
    parser.add_argument("--cost", action="store_true", help="time rounds of FedAvg and pFedVEM with all clients")
    parser.add_argument("--processes", type=int, default=2, help="fits at a time, each in a process of its own")
    parser.add_argument("--folder", type=Path, help="keep finished fits and checkpoints here, and go on from them")
    parser.add_argument("--data", type=Path, help="folder with fashion_mnist/, cifar10/ ...")
    options = parser.parse_args(argv)
    if min(options.seeds, options.rounds, options.processes) < 1 or options.seed < 0:
        parser.error("--seeds, --rounds and --processes must be at least 1, --seed at least 0")
    if not 0 <= options.validation <= 0.5:
        parser.error("--validation must lie between 0 and 0.5")
    try:
        options.settings = {name: ast.literal_eval(value) for name, value in (one.split("=", 1) for one in options.set)}
    except (ValueError, SyntaxError):
        parser.error(f"--set {' '.join(options.set)} must be NAME=VALUE, with literals of Python for values")
    if options.settings and len(options.methods) > 1:
        parser.error("--set goes with one method")
    if options.total is not None and options.total < 10 * options.clients:
        parser.error("--total must be at least ten rows a client")
    if options.dataset == "digit5" and options.cuts != "same":
        parser.error("--cuts does not go with digit5, of which each source and label is cut by itself")
    if options.score_every < 1 or options.every is not None and options.every < 1:
        parser.error("--every and --score-every must be at least 1")
    return options


def find_data(given: Path | None, dataset: str) -> Path:
    """Return the data folder, or end with a message that says how to provide it."""
    named = os.environ.get("FEDPPL_DATA")
    folder = given or (Path(named) if named else ROOT.parent / "shared" / "data")
    if not (folder / FOLDERS[dataset]).is_dir():
        sys.exit(f"{folder / FOLDERS[dataset]} does not exist. Give the data folder by --data or FEDPPL_DATA.")
    return folder


def _idx(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as images:
        pixels = np.frombuffer(images.read(), np.uint8, offset=16).reshape(-1, 784).astype(np.float32) / 255
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as labels:
        return pixels, np.frombuffer(labels.read(), np.uint8, offset=8).astype(np.int64)


def _usps(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """USPS in the middle of 28 x 28 pixels."""
    import h5py

    with h5py.File(folder / "usps.h5") as file:
        pixels, labels = file[part]["data"][:].reshape(-1, 16, 16), file[part]["target"][:]
    wide = np.zeros((len(pixels), 28, 28), dtype=np.float32)
    wide[:, 6:22, 6:22] = pixels
    return wide.reshape(-1, 784), labels.astype(np.int64)


def load(folder: Path, dataset: str) -> tuple[Images, Images]:
    """Training and test rows as published."""
    if dataset == "fmnist":
        parts = [_idx(folder / "fashion_mnist", part) for part in ("train", "t10k")]
        return tuple(Images(x, y, y) for x, y in parts)
    if dataset == "digit5":
        found = []
        for part, name in (("train", "train"), ("t10k", "test")):
            x, y = zip(_idx(folder / "mnist", part), _usps(folder / "usps", name), strict=True)
            kinds = np.repeat(["mnist", "usps"], [len(labels) for labels in y])
            found.append(Images(np.concatenate(x), np.concatenate(y), kinds))
        return tuple(found)
    if dataset == "cifar100":
        parts = [np.load(folder / "cifar100" / f"{part}.npz") for part in ("train", "test")]
        pixels = [np.moveaxis(part["images"], 3, 1).astype(np.float32) / 255 for part in parts]
        return tuple(Images(x, part["coarse"], part["fine"]) for x, part in zip(pixels, parts, strict=True))
    from PIL import Image

    index = np.load(folder / "cifar10" / "cifar10_jpeg_all_60000_index.npz")
    raw, head = (folder / "cifar10" / "cifar10_jpeg_all_60000.bin").read_bytes(), index["jpeg_prefix"].tobytes()
    places, labels, test = index["offsets"], index["labels"].astype(np.int64), index["is_test"]
    files = (io.BytesIO(head + raw[a:b]) for a, b in zip(places[:-1], places[1:], strict=True))
    pixels = np.moveaxis(np.stack([np.asarray(Image.open(file)) for file in files]), 3, 1).astype(np.float32) / 255
    return Images(pixels[~test], labels[~test], labels[~test]), Images(pixels[test], labels[test], labels[test])


def divide(train: Images, options: argparse.Namespace, seed: int) -> partitions.Partition:
    """Every training row at one client."""
    settings: dict[str, Any] = {"random_seed": seed}
    if options.dataset == "digit5":
        return partitions.feature_skew(train.kinds, options.clients, labels=train.labels, each=5, **settings)
    settings["cuts"] = options.cuts
    if options.dataset == "cifar100":
        return partitions.concept_drift(train.labels, train.kinds, options.clients, **settings)
    return partitions.label_skew(train.labels, options.clients, 5, **settings)


def network(dataset: str, seed: int) -> Any:
    """The common start, with a head at 0."""
    import torch

    torch.manual_seed(seed)
    layers = torch.nn
    if dataset in ("fmnist", "digit5"):
        net = layers.Sequential(layers.Linear(784, 100), layers.ReLU(), layers.Linear(100, 10))
    elif dataset == "cifar10":
        maps = (layers.Conv2d(3, 16, 5), layers.ReLU(), layers.MaxPool2d(2))
        more = (layers.Conv2d(16, 32, 5), layers.ReLU(), layers.MaxPool2d(2), layers.Flatten())
        wide = (layers.Linear(800, 120), layers.ReLU(), layers.Linear(120, 84), layers.ReLU())
        net = layers.Sequential(*maps, *more, *wide, layers.Linear(84, 10))
    else:
        maps, channels = [], 3
        for width in (32, 64, 128, 256):
            maps += [layers.Conv2d(channels, width, 3, padding=1), layers.ReLU(), layers.MaxPool2d(2, 2, padding=1)]
            channels = width
        last = (layers.Conv2d(256, 100, 3, padding=1), layers.ReLU(), layers.AdaptiveAvgPool2d(1), layers.Flatten())
        net = layers.Sequential(*maps, *last, layers.Linear(100, 20))
    return net


def zero_head(net: Any, head: tuple[str, ...]) -> None:
    """Let the head start at 0, as pFedVEM wants it."""
    import torch

    with torch.no_grad():
        for name in head:
            net.get_parameter(name).zero_()


class Setting(NamedTuple):
    """One seed's data and network, ready to fit."""

    scored: Images
    everyone: np.ndarray  # rows of it that the global model is scored on
    own: dict[str, np.ndarray]  # and the clients' own models
    net: Any  # what holds the common start, and afterwards whatever is evaluated
    clients: dict[str, dict[str, np.ndarray]]
    method: pfedvem.Method
    model: fedppl.FederatedModel
    algorithm: fedppl.Algorithm


def prepare(name: str, seed: int, options: argparse.Namespace) -> Setting:
    """Divide the rows and declare the model."""
    train, test = load(find_data(options.data, options.dataset), options.dataset)
    if options.total is not None and options.total < len(train.labels):
        few = np.sort(np.random.default_rng((seed, 2)).choice(len(train.labels), options.total, replace=False))
        train = Images(*(values[few] for values in train))
    parts, method = divide(train, options, seed), pfedvem.METHODS[name]
    net = network(options.dataset, seed)
    head = tuple(pfedvem.shared_names(net, "head"))
    if "pFedVEM" in name or name.endswith("only"):
        zero_head(net, head)
    mean, sd = float(train.pixels.mean()), float(train.pixels.std())
    for images in (train, test):
        images.pixels[...] = (images.pixels - mean) / sd
    own, kept = {k: held_rows(test, kinds) for k, kinds in parts.kinds.items()}, parts.rows
    everyone = np.arange(len(test.labels))
    if options.validation:
        kept, own = hold_out(parts.rows, options.validation, seed)
        test, everyone = train, np.concatenate([*own.values()])
    clients = {k: {"X": train.pixels[rows], "y": train.labels[rows]} for k, rows in kept.items()}
    model = fedppl.FederatedModel(
        functools.partial(pfedvem.classifier, net=net), pfedvem.shared_names(net, method.shares)
    )
    algorithm = method.algorithm(head, **options.settings)
    return Setting(test, everyone, own, copy.deepcopy(net), clients, method, model, algorithm)


def held_rows(test: Images, kinds: tuple[Any, ...]) -> np.ndarray:
    """Test rows of the labels, of the subclasses, or of the pairs of source and label that a client holds."""
    if isinstance(kinds[0], tuple):
        pairs = zip(test.kinds.tolist(), test.labels.tolist(), strict=True)
        return np.flatnonzero([pair in kinds for pair in pairs])
    return np.flatnonzero(np.isin(test.kinds, kinds))


def hold_out(rows: dict[str, np.ndarray], share: float, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part every client's training rows: what is trained on, and what is scored."""
    rng, kept, held = np.random.default_rng((seed, 1)), {}, {}
    for name, own in rows.items():
        mixed = rng.permutation(own)
        cut = min(max(1, round(share * len(own))), len(own) - 1)
        held[name], kept[name] = mixed[:cut], mixed[cut:]
    return kept, held


def accuracy_of(setting: Setting, weights: np.ndarray, rows: np.ndarray) -> float:
    """Per cent of these rows whose label the network with these weights names."""
    import torch

    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(torch.from_numpy(weights).float(), setting.net.parameters())
        pixels, order = setting.scored.pixels, torch.contiguous_format
        order = torch.channels_last if pixels.ndim == 4 else order  # pools are faster so
        parts = np.array_split(rows, math.ceil(len(rows) / 1000))
        inputs = (torch.from_numpy(pixels[part]).contiguous(memory_format=order) for part in parts)
        said = [setting.net(one).numpy().argmax(1) for one in inputs]
    return 100 * float(np.mean(np.concatenate(said) == setting.scored.labels[rows]))


def personal_accuracies(setting: Setting, fits: dict[str, fedppl.Fit]) -> dict[str, float]:
    """Accuracy of each client's own model on test rows of the kinds that it holds; a guess's, where there is none."""
    found = {}
    for name, rows in setting.own.items():
        try:
            found[name] = accuracy_of(setting, fedppl.nn.personalise(fits[name], name).weights, rows)
        except LocalFailure as error:
            print(error, file=sys.stderr)
            found[name] = 100.0 / len(np.unique(setting.scored.labels[rows]))
    return found


def one_fit(job: tuple[str, int], options: argparse.Namespace) -> dict[str, Any]:
    """Fit one method on one seed's partition, and go on where an interrupted run stopped."""
    import torch

    torch.set_num_threads(1)
    logging.getLogger("fedppl").setLevel(logging.ERROR)  # stopping at a set number of rounds is what was asked for
    warnings.filterwarnings("ignore", category=fedppl.ConvergenceWarning)
    name, seed = job
    stem = f"{options.dataset}-{options.clients}-{options.cuts}-{options.rounds}-{name.replace(' ', '-')}-{seed}"
    if options.total is not None:
        stem += f"-total{options.total}"
    if options.validation or options.settings:
        stem += f"-{options.validation:g}-{'-'.join(options.set)}"
    with tempfile.TemporaryDirectory() as spare:
        done = (options.folder or Path(spare)) / f"{stem}.json"
        notes, checkpoint, kept = (done.with_suffix(suffix) for suffix in (".part", ".ckpt", ".npy"))
        head = tuple(pfedvem.shared_names(network(options.dataset, seed), "head"))
        algorithm = pfedvem.METHODS[name].algorithm(head, **options.settings)
        if (earlier := kept_fits.read(done, algorithm)) is not None:
            return dict(earlier)
        setting = prepare(name, seed, options)
        found: dict[str, Any] = {"method": name, "seed": seed, "seconds": 0.0, "PM": {}, "GM": {}, "GM averaged": {}}
        if notes.exists() and checkpoint.exists():
            found = json.loads(notes.read_text())
        settings: dict[str, Any] = {"engine": fedppl.InProcess(workers=1), "random_seed": seed}
        settings["progressbar"] = options.processes == 1 and not setting.method.alone
        before, averaged = time.process_time(), np.load(kept) if "rounds" in found and kept.exists() else None

        def note(step: fedppl.Round) -> None:
            nonlocal before, averaged
            found["seconds"] += time.process_time() - before
            if setting.method.shared:
                phi = setting.algorithm.result.shared.estimate(step.state)
                averaged = phi if averaged is None else KEPT * averaged + (1 - KEPT) * phi
                np.save(kept, averaged)
                columns = (("GM", phi), ("GM averaged", averaged)) if is_scored(step.number, options) else ()
                for column, weights in columns:
                    found[column][str(step.number)] = accuracy_of(setting, weights, setting.everyone)
            found["rounds"] = step.number
            found["failed"] = found.get("failed", 0) + len(step.record.failures)
            notes.write_text(json.dumps(found))
            before = time.process_time()

        if setting.method.alone:
            fits = {
                k: fedppl.fit(setting.model, {k: rows}, setting.algorithm, rounds=1, **settings)
                for k, rows in setting.clients.items()
            }
            found["PM"][str(options.rounds)] = personal_accuracies(setting, fits)
        else:
            for end in [end for end in ends_of(options) if end >= found.get("rounds", 0)]:
                settings |= {"reporting": REPORTING, "checkpoint": checkpoint, "callback": note, "rounds": end}
                fit = fedppl.fit(setting.model, setting.clients, setting.algorithm, **settings)
                if setting.method.personal:
                    found["PM"][str(end)] = personal_accuracies(setting, dict.fromkeys(setting.clients, fit))
                    notes.write_text(json.dumps(found))
                before = time.process_time()
        for name in () if setting.method.alone else ("confidence", "deviation", "cluster"):
            if name in fit.idata["rounds"]:  # of a client's last reply
                told = fit.idata["rounds"][name].transpose("client", "round").values
                last = [row[np.isfinite(row)][-1:].tolist() for row in told]
                found[name] = dict(zip(fit.client_ids, last, strict=True))
        found["sizes"] = {k: len(rows["y"]) for k, rows in setting.clients.items()}
        if options.folder is not None:
            kept_fits.write(done, found, algorithm)
            for part in (notes, kept, checkpoint, checkpoint.with_name(checkpoint.name + ".records")):
                part.unlink(missing_ok=True)
    return found


def ends_of(options: argparse.Namespace) -> list[int]:
    """Rounds after which PM is evaluated."""
    between = range(options.every, options.rounds, options.every) if options.every else ()
    return [*between, options.rounds]


def is_scored(number: int, options: argparse.Namespace) -> bool:
    """Whether the global model is scored in this round."""
    return number % options.score_every == 0 or number > options.rounds - 10


def figures(found: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """One fit in numbers, per cent."""
    row: dict[str, float] = {}
    last = found["PM"].get(str(options.rounds))
    if last is not None:
        sizes = found["sizes"]
        order = sorted(sizes, key=sizes.__getitem__)
        row["PM"] = float(np.mean(list(last.values())))
        row["smallest 10 %"] = float(np.mean([last[k] for k in order[: math.ceil(len(order) / 10)]]))
        quarters = np.array_split(np.array([last[k] for k in order]), 4)
        row |= {f"quarter {i}": float(np.mean(part)) for i, part in enumerate(quarters, 1)}
    curve, averaged = (
        [v for _, v in sorted((int(k), v) for k, v in found.get(n, {}).items())] for n in ("GM", "GM averaged")
    )
    if curve:
        row |= {"GM last": curve[-1], "GM last 10": float(np.mean(curve[-10:]))}
        if averaged:
            row["averaged"] = float(np.mean(averaged[-10:]))
        wanted = [str(n) for n in range(1, options.rounds + 1) if is_scored(n, options)]
        if set(wanted) <= set(found["GM"]):  # a kept fit may have been scored in fewer rounds
            row["GM best (on test)"] = max(found["GM"][n] for n in wanted)
    row["CPU s"] = found["seconds"]
    if "cluster" in found:
        chosen = [value for last in found["cluster"].values() for value in last]
        row["clients in the larger cluster"] = float(np.max(np.unique(chosen, return_counts=True)[1]))
    if "failed" in found:  # replies of all rounds
        row["failed"] = found["failed"]
    return row


def cost(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a round, with all clients trained and reporting, and what clients that do not report may leave out."""
    import torch

    torch.set_num_threads(1)
    logging.getLogger("fedppl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=fedppl.ConvergenceWarning)
    found: dict[str, Any] = {}
    for name, reporting in (("FedAvg", None), ("pFedVEM", None), ("pFedVEM", REPORTING)):
        setting, times = prepare(name, options.seed, options), []
        settings: dict[str, Any] = {"engine": fedppl.InProcess(workers=1), "random_seed": options.seed}
        rounds = fedppl.rounds(
            setting.model, setting.clients, setting.algorithm, reporting=reporting, rounds=4, **settings
        )
        started = time.process_time()
        sizes: dict[str, int] = {}
        for step in rounds:
            times.append(time.process_time() - started)
            started, sizes = time.process_time(), dict(step.record.bytes_up)
        label = name if reporting is None else f"{name}, layers below only where they are reported"
        found[label] = float(np.median(times[1:]))
        found[f"bytes up, {label}"] = next(iter(sizes.values()))
    found["ratio"] = found["pFedVEM"] / found["FedAvg"]
    return found


def bars(table: pd.DataFrame, seeds: pd.DataFrame, options: argparse.Namespace) -> list[tuple[str, bool]]:
    """What pFedVEM must reach on Fashion-MNIST with 50 clients, as far as the methods that ran can tell."""
    asked = (options.dataset, options.clients, options.cuts) == ("fmnist", 50, "same") and options.rounds >= 100
    asked = asked and not options.validation and not options.settings and options.total is None
    if not asked or "pFedVEM" not in table.index:
        return []
    row, found = table.loc["pFedVEM"], []
    found.append((f"PM {row['PM']:.2f}, at least 91.5", row["PM"] >= 91.5))
    if "FedPer" in table.index:
        apart = row["PM"] - table.loc["FedPer", "PM"]
        found.append((f"PM {apart:+.2f} against FedPer, at least -0.3", apart >= -0.3))
    found.append((f"GM, mean of the last 10 rounds, {row['GM last 10']:.2f}, at least 75", row["GM last 10"] >= 75))
    if "FedAvg" in table.index:
        other = table.loc["FedAvg", "GM last 10"]
        found.append((f"GM last 10 {row['GM last 10']:.2f}, above FedAvg's {other:.2f}", row["GM last 10"] > other))
    for name in ("pFedVEM, ledger", "pFedVEM, steadied"):
        if name in table.index:
            value = table.loc[name, "GM last 10"]
            found.append((f"stretch: GM last 10 of {name} {value:.2f}, above 83.9", value > 83.9))
    return [(text, bool(met)) for text, met in found]


def printed(name: str, options: argparse.Namespace) -> tuple[float | None, float | None]:
    """PM and GM that the paper has for this method and these clients."""
    if options.total is None:
        return PAPER.get(options.dataset, {}).get(name, {}).get(options.clients, (None, None))
    asked = (options.dataset, options.clients) == ("cifar10", 100)
    return FEW.get(name, {}).get(options.total, (None, None)) if asked else (None, None)


def paired(seeds: pd.DataFrame) -> list[str]:
    """Differences of pFedVEM to the other personal methods, over seeds."""
    lines = []
    for column in ("PM", "smallest 10 %"):
        wide = seeds.pivot(index="seed", columns="method", values=column).dropna(axis=1)
        if "pFedVEM" in wide:
            for name in wide.columns.drop("pFedVEM"):
                apart = wide["pFedVEM"] - wide[name]
                sem = apart.std() / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
                lines.append(f"{column}: pFedVEM - {name} {apart.mean():+.2f} ± {sem:.2f} (standard error, paired)")
    return lines


def _goes_on(name: str) -> bool:
    """Whether clients have models of their own, which change from round to round."""
    return pfedvem.METHODS[name].personal and not pfedvem.METHODS[name].alone


def main(argv: list[str] | None = None) -> int:
    """Run all fits, print tables, the bars and one line of JSON; 1 where a bar is missed."""
    options, started = arguments(argv), time.perf_counter()
    find_data(options.data, options.dataset)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    if options.cost:
        print(json.dumps(cost(options)))
        return 0
    jobs = [(name, seed) for seed in range(options.seed, options.seed + options.seeds) for name in options.methods]
    results: list[dict[str, Any]] = []
    with ProcessPoolExecutor(
        options.processes, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        for found in pool.map(functools.partial(one_fit, options=options), jobs):
            results.append(found)
            spent = time.perf_counter() - started
            left = spent / len(results) * (len(jobs) - len(results))
            row = figures(found, options)
            print(
                f"{len(results)} of {len(jobs)}: seed {found['seed']}, {found['method']}, "
                f"PM {row.get('PM', math.nan):.2f}, GM {row.get('GM last 10', math.nan):.2f}; "
                f"about {left / 60:.0f} minutes left",
                file=sys.stderr,
                flush=True,
            )
    seeds = pd.DataFrame([{"method": f["method"], "seed": f["seed"], **figures(f, options)} for f in results])
    groups = seeds.drop(columns="seed").groupby("method", sort=False)
    table, sem = groups.mean(), groups.sem()
    shown = table.copy()
    for column, which in (("PM", 0), ("GM last 10", 1)):
        if column in shown:
            cells = [printed(name, options)[which] for name in table.index]
            shown.insert(shown.columns.get_loc(column), f"paper {column[:2]}", cells)
            shown.insert(shown.columns.get_loc(column) + 1, f"± {column[:2]}", sem[column])
    print(f"{options.dataset}, {options.clients} clients, {options.rounds} rounds, {options.seeds} seeds (± SEM)\n")
    print(shown.rename_axis(None).to_string(float_format="{:.2f}".format, na_rep=""))
    for end in ends_of(options)[:-1]:
        curves = {name: [] for name in options.methods if _goes_on(name)}
        for f in results:
            if f["method"] in curves and str(end) in f["PM"]:
                curves[f["method"]].append(float(np.mean(list(f["PM"][str(end)].values()))))
        said = (f"{k} {np.mean(v):.2f}" if v else f"{k} not evaluated when kept" for k, v in curves.items())
        print(f"PM after {end}: " + ", ".join(said))
    for line in paired(seeds) if "PM" in seeds else []:
        print(line)
    judged = bars(table, seeds, options)
    for text, met in judged:
        print(f"{'met' if met else 'MISSED'}: {text}")
    line = {name: getattr(options, name) for name in _SAID}
    line["table"] = {str(k): v.dropna().round(3).to_dict() for k, v in table.iterrows()}
    line["missed"] = [text for text, met in judged if not met and not text.startswith("stretch")]
    line["seconds"] = round(time.perf_counter() - started, 1)
    print(json.dumps(line))
    return 1 if line["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
