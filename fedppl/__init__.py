"""Federated Bayesian inference: one client's posterior declared in PyMC, a hierarchy fitted across all clients."""

import importlib
from typing import Any

from fedppl import covariance, curves, privacy
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
from fedppl.results import Fit
from fedppl.search import grid, grid_search, holdout, validation_loss
from fedppl.steps.averaging import FedAvg
from fedppl.steps.consensus import ConsensusMonteCarlo
from fedppl.steps.ditto import Ditto
from fedppl.steps.ep import EP
from fedppl.steps.lmc_ascent import LMCAscent
from fedppl.steps.lmc_averaging import LMCAveraging
from fedppl.steps.lmc_blocks import LMCBlockAscent
from fedppl.steps.lmc_gradient import LMCGradient
from fedppl.steps.local_sgd import SeparateSGD
from fedppl.steps.precision_weighted import PrecisionWeighted
from fedppl.steps.private_ep import PrivateEP
from fedppl.steps.proximal import FedProx
from fedppl.steps.scaffold import SCAFFOLD
from fedppl.steps.separate import Separate
from fedppl.steps.structural import HM1
from fedppl.steps.structural_gradient import HM1Gradient
from fedppl.types import Algorithm, DataError, DeclarationError, LocalInference, Status

__version__ = "0.1.0"

__all__ = [
    "ADVI",
    "EP",
    "HM1",
    "HM1Gradient",
    "NUTS",
    "SCAFFOLD",
    "Algorithm",
    "ClientModel",
    "ConsensusMonteCarlo",
    "DataError",
    "DeclarationError",
    "Ditto",
    "FedAvg",
    "FedProx",
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
    "fit",
    "fixed_size",
    "grid",
    "grid_search",
    "holdout",
    "hypotheses",
    "privacy",
    "rounds",
    "validation_loss",
]


def __getattr__(name: str) -> Any:
    """Load `Flower` when it is first asked for: nothing else needs it installed."""
    if name != "Flower":
        raise AttributeError(f"module 'fedppl' has no attribute {name!r}")
    try:
        return importlib.import_module("fedppl.engine.flower")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        raise ModuleNotFoundError(
            "fedppl.Flower needs Flower, which is not installed: pip install 'fedppl[flower]'", name="flwr"
        ) from error
