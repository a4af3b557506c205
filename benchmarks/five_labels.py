"""What the network of FedSI's benchmark can do with five labels, if all rows of them are in one place.

A bound for the large sets of benchmarks/fedsi.py, where each client has 900 rows a label: one network for each client's
five labels is trained on the 6,000 published training rows a label, and tested on the published test rows. Rows are no
client's here; the labels are those of the benchmark's clients.

    python benchmarks/five_labels.py --dataset fmnist
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._fedsi.data import Images, find_data, load
from fedppl.models import fedsi

TRAIN = 60_000  # published training rows, which come first


def accuracy(images: Images, labels: np.ndarray, epochs: int, seed: int) -> float:
    """Per cent of the test rows with these labels, after Adam at 1e-3 on all training rows with them."""
    torch.manual_seed(seed)
    train, test = (part[np.isin(images.labels[part], labels)] for part in np.split(np.arange(70_000), [TRAIN]))
    center, sd = images.pixels[train].mean(), images.pixels[train].std()
    X, X_test = (torch.from_numpy((images.pixels[part] - center) / sd) for part in (train, test))
    y, y_test = (torch.from_numpy(np.searchsorted(labels, images.labels[part])) for part in (train, test))
    net = torch.nn.Sequential(torch.nn.Linear(784, 100), torch.nn.ReLU(), torch.nn.Linear(100, len(labels)))
    steps = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(X)), 50):
            steps.zero_grad()
            torch.nn.functional.cross_entropy(net(X[batch]), y[batch]).backward()
            steps.step()
    with torch.no_grad():
        return 100 * float((net(X_test).argmax(1) == y_test).double().mean())


def main(argv: list[str] | None = None) -> int:
    """Print the accuracy for each client's labels, and the mean."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dataset", choices=("mnist", "fmnist"), default="fmnist")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the clients' labels, as in fedsi.py")
    parser.add_argument("--data", type=Path, help="folder with mnist/ and fashion_mnist/")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    started = time.process_time()
    images = load(find_data(options.data, options.dataset))
    held = fedsi.labels_of_clients(10, 10, 5, np.random.default_rng(options.seed))
    found = [accuracy(images, labels, options.epochs, options.seed) for labels in held]
    for labels, value in zip(held.tolist(), found, strict=True):
        print(labels, f"{value:.2f}")
    print(json.dumps({"dataset": options.dataset, "epochs": options.epochs, "mean": round(float(np.mean(found)), 2)}))
    print(f"{time.process_time() - started:.0f} CPU seconds", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
