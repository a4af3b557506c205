"""Networks of torch inside PyMC models, and algorithms for them. Needs torch: ``pip install 'fedppl[torch]'``."""

from fedppl.nn.algorithms.averaging import SCAFFOLD, FedAvg
from fedppl.nn.algorithms.confidence import Confidence
from fedppl.nn.algorithms.fedpop import FedPop
from fedppl.nn.algorithms.fedsi import FedSI
from fedppl.nn.algorithms.personalised import IFCA, PerFedAvg, PFedMe
from fedppl.nn.algorithms.posteriors import BPFed, PFedBayes
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
