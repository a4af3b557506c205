"""Federated Bayesian inference: one client's posterior declared in PyMC, a hierarchy fitted across all clients."""

import importlib
from typing import Any

from fedppl import covariance, curves, data, metrics, policy, privacy
from fedppl.engine.inprocess import InProcess
from fedppl.hypotheses import contrast, hypotheses
from fedppl.local.advi import ADVI, MeanField
from fedppl.local.gradient_steps import GradientSteps
from fedppl.local.laplace import Laplace
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.local.nuts import NUTS
from fedppl.loop import Round, fit, rounds
from fedppl.model import ClientModel, FederatedModel
from fedppl.participation import all_clients, bernoulli, fixed_size
from fedppl.policy import Policy
from fedppl.results import Fit
from fedppl.search import grid, grid_search, holdout, validation_loss
from fedppl.steps.averaging import FedAvg
from fedppl.steps.confidence import Confidence
from fedppl.steps.consensus import ConsensusMonteCarlo
from fedppl.steps.ditto import Ditto
from fedppl.steps.ep import EP
from fedppl.steps.lmc_ascent import LMCAscent
from fedppl.steps.lmc_averaging import LMCAveraging
from fedppl.steps.lmc_blocks import LMCBlockAscent
from fedppl.steps.lmc_gradient import LMCGradient
from fedppl.steps.local_sgd import SeparateSGD
from fedppl.steps.network_averaging import NetworkAveraging
from fedppl.steps.network_bayes import PFedBayes
from fedppl.steps.network_clusters import IFCA
from fedppl.steps.network_confidence import NetworkConfidence
from fedppl.steps.network_continual import BPFed
from fedppl.steps.network_meta import PerFedAvg
from fedppl.steps.network_moreau import PFedMe
from fedppl.steps.network_population import FedPop
from fedppl.steps.network_scaffold import NetworkSCAFFOLD
from fedppl.steps.precision_weighted import PrecisionWeighted
from fedppl.steps.private_ep import PrivateEP
from fedppl.steps.proximal import FedProx
from fedppl.steps.scaffold import SCAFFOLD
from fedppl.steps.separate import Separate
from fedppl.steps.structural import HM1
from fedppl.steps.structural_gradient import HM1Gradient
from fedppl.steps.subnetwork import FedSI
from fedppl.types import (
    Algorithm,
    ConvergenceWarning,
    DataError,
    DeclarationError,
    LocalInference,
    NotConvergedError,
    Status,
)

__version__ = "0.1.0"

__all__ = [
    "ADVI",
    "BPFed",
    "EP",
    "HM1",
    "IFCA",
    "HM1Gradient",
    "NUTS",
    "SCAFFOLD",
    "Algorithm",
    "ClientModel",
    "Confidence",
    "ConsensusMonteCarlo",
    "ConvergenceWarning",
    "DataError",
    "DeclarationError",
    "Ditto",
    "FedAvg",
    "FedPop",
    "FedProx",
    "FedSI",
    "FederatedModel",
    "Fit",
    "GradientSteps",
    "InProcess",
    "LMCAscent",
    "LMCAveraging",
    "LMCBlockAscent",
    "LMCGradient",
    "Laplace",
    "LocalInference",
    "MeanField",
    "NestedLaplace",
    "NetworkAveraging",
    "NetworkConfidence",
    "NetworkSCAFFOLD",
    "NotConvergedError",
    "PFedBayes",
    "PFedMe",
    "PerFedAvg",
    "Policy",
    "PrecisionWeighted",
    "PrivateEP",
    "Round",
    "Separate",
    "SeparateSGD",
    "Status",
    "all_clients",
    "bernoulli",
    "contrast",
    "covariance",
    "curves",
    "data",
    "fit",
    "fixed_size",
    "grid",
    "grid_search",
    "holdout",
    "hypotheses",
    "metrics",
    "policy",
    "privacy",
    "rounds",
    "validation_loss",
]


# What needs a package that not everybody has: attribute, module, package, what people call it, extra.
_LAZY = {
    "Flower": ("fedppl.engine.flower", "flwr", "fedppl.Flower needs Flower", "flower"),
    "nn": ("fedppl.nn", "torch", "fedppl.nn needs torch", "torch"),
}


def __getattr__(name: str) -> Any:
    """Load `Flower` and `nn` when they are first asked for: nothing else needs what they stand on installed."""
    if name not in _LAZY:
        raise AttributeError(f"module 'fedppl' has no attribute {name!r}")
    module, package, who, extra = _LAZY[name]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"{who}, which is not installed: pip install 'fedppl[{extra}]'", name=package
        ) from error
