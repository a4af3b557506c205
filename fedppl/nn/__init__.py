"""Networks of torch inside PyMC models, and algorithms for them. Needs torch: ``pip install 'fedppl[torch]'``."""

from fedppl.nn.algorithms.averaging import SCAFFOLD, FedAvg
from fedppl.nn.algorithms.baselines import IFCA, BPFed, PerFedAvg, PFedBayes, PFedMe
from fedppl.nn.algorithms.fedsi import FedSI
from fedppl.nn.algorithms.heads import Confidence, FedPop
from fedppl.nn.op import module, parameters
from fedppl.nn.predict import network, personalise, predict

__all__ = [
    "BPFed",
    "Confidence",
    "FedAvg",
    "FedPop",
    "FedSI",
    "IFCA",
    "PFedBayes",
    "PFedMe",
    "PerFedAvg",
    "SCAFFOLD",
    "module",
    "network",
    "parameters",
    "personalise",
    "predict",
]
