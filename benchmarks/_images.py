"""Files of images, as published or as a JPEG copy, in the data folder."""

from __future__ import annotations

import gzip
import io
import os
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]


def find_folder(given: Path | None, name: str, hint: str = "") -> Path:
    """Return a data set's folder, or end with a message that says how to provide it."""
    named = os.environ.get("FEDPPL_DATA")
    folder = (given or (Path(named) if named else ROOT.parent / "shared" / "data")) / name
    if not folder.is_dir():
        sys.exit(f"{folder} does not exist. Give the data folder by --data or FEDPPL_DATA{hint}.")
    return folder


def idx(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (n, 784), from 0 to 1, and labels (n,) of "train" or "t10k"."""
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as images:
        pixels = np.frombuffer(images.read(), np.uint8, offset=16).reshape(-1, 784).astype(np.float32) / 255
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as labels:
        return pixels, np.frombuffer(labels.read(), np.uint8, offset=8).astype(np.int64)


def jpegs(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels (n, 3, 32, 32), from 0 to 1, and labels (n,) of all of CIFAR-10, and which are test images, (n,)."""
    from PIL import Image

    index = np.load(folder / "cifar10_jpeg_all_60000_index.npz")
    raw, head = (folder / "cifar10_jpeg_all_60000.bin").read_bytes(), index["jpeg_prefix"].tobytes()
    places = index["offsets"]
    files = (io.BytesIO(head + raw[a:b]) for a, b in zip(places[:-1], places[1:], strict=True))
    pixels = np.moveaxis(np.stack([np.asarray(Image.open(file)) for file in files]), 3, 1).astype(np.float32) / 255
    return pixels, index["labels"].astype(np.int64), index["is_test"]
