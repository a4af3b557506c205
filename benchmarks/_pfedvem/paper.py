"""Accuracies that the paper has: PM and GM, per cent."""

from __future__ import annotations

import argparse

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


def printed(name: str, options: argparse.Namespace) -> tuple[float | None, float | None]:
    """PM and GM that the paper has for this method and these clients."""
    if options.total is None:
        return PAPER.get(options.dataset, {}).get(name, {}).get(options.clients, (None, None))
    asked = (options.dataset, options.clients) == ("cifar10", 100)
    return FEW.get(name, {}).get(options.total, (None, None)) if asked else (None, None)
