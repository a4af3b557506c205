"""Accuracies that the paper has, per cent: Table I."""

from __future__ import annotations

# Small and large sets.
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
