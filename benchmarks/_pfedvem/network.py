"""The networks of the data sets, with the start that all clients have in common."""

from __future__ import annotations

from typing import Any


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
    """Let the head start at 0, as our steps of pFedVEM's heads want it."""
    import torch

    with torch.no_grad():
        for name in head:
            net.get_parameter(name).zero_()


def normal_head(net: Any, head: tuple[str, ...]) -> None:
    """Let the head start at draws from N(0, 1), as in the authors' code; they are those of the network's seed."""
    import torch

    with torch.no_grad():
        for name in head:
            net.get_parameter(name).normal_()
