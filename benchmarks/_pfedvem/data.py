"""Images as published, and who of the clients holds which."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks._images import find_folder, idx, jpegs
from fedppl import data as partitions

FOLDERS = {"fmnist": "fashion_mnist", "cifar10": "cifar10", "cifar100": "cifar100", "digit5": "mnist"}


class Images(NamedTuple):
    """Images, what is predicted, and what clients differ by."""

    pixels: np.ndarray  # (n, ...) float32
    labels: np.ndarray  # (n,)
    kinds: np.ndarray  # (n,): label, subclass or source


def find_data(given: Path | None, dataset: str) -> Path:
    """Return the data folder, or end with a message that says how to provide it."""
    return find_folder(given, FOLDERS[dataset]).parent


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
        parts = [idx(folder / "fashion_mnist", part) for part in ("train", "t10k")]
        return tuple(Images(x, y, y) for x, y in parts)
    if dataset == "digit5":
        found = []
        for part, name in (("train", "train"), ("t10k", "test")):
            x, y = zip(idx(folder / "mnist", part), _usps(folder / "usps", name), strict=True)
            kinds = np.repeat(["mnist", "usps"], [len(labels) for labels in y])
            found.append(Images(np.concatenate(x), np.concatenate(y), kinds))
        return tuple(found)
    if dataset == "cifar100":
        parts = [np.load(folder / "cifar100" / f"{part}.npz") for part in ("train", "test")]
        pixels = [np.moveaxis(part["images"], 3, 1).astype(np.float32) / 255 for part in parts]
        return tuple(Images(x, part["coarse"], part["fine"]) for x, part in zip(pixels, parts, strict=True))
    pixels, labels, test = jpegs(folder / "cifar10")
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
