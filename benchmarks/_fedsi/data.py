"""All images, and which of them clients hold, train on and are tested on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks._images import find_folder, idx, jpegs
from fedppl.models import fedsi

FOLDERS = {"mnist": "mnist", "fmnist": "fashion_mnist", "cifar10": "cifar10"}
CLIENTS = {"mnist": 10, "fmnist": 10, "cifar10": 20}
ROWS = {"small": (50, 950), "large": (900, 300)}  # CIFAR-10 has half of that
OTHER = {"mnist": "fmnist", "fmnist": "mnist"}


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


def find_data(given: Path | None, dataset: str) -> Path:
    """Return the data set's folder, or end with a message that says how to provide it."""
    hint = "; MNIST and Fashion-MNIST are four idx files as published, gzipped"
    return find_folder(given, FOLDERS[dataset], hint)


def load(folder: Path) -> Images:
    """All images: both parts of an idx data set, or the JPEG copy of CIFAR-10."""
    if (folder / "cifar10_jpeg_all_60000.bin").is_file():
        return Images(*jpegs(folder)[:2])
    parts = [idx(folder, part) for part in ("train", "t10k")]
    return Images(*(np.concatenate(both) for both in zip(*parts, strict=True)))


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
