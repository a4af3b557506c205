"""Federated Bayesian inference: one client's posterior declared in PyMC, a hierarchy fitted across all clients."""

import importlib
from typing import Any

from fedppl import data, metrics, privacy
from fedppl.algorithms.averaging.ditto import Ditto
from fedppl.algorithms.averaging.fedavg import FedAvg
from fedppl.algorithms.averaging.fedprox import FedProx
from fedppl.algorithms.averaging.scaffold import SCAFFOLD
from fedppl.algorithms.averaging.separate_sgd import SeparateSGD
from fedppl.algorithms.ep.ep import EP
from fedppl.algorithms.ep.private import PrivateEP
from fedppl.algorithms.hierarchical.confidence import Confidence
from fedppl.algorithms.hierarchical.hm1 import HM1
from fedppl.algorithms.hierarchical.hm1_gradient import HM1Gradient
from fedppl.algorithms.one_shot.consensus import ConsensusMonteCarlo
from fedppl.algorithms.one_shot.precision_weighted import PrecisionWeighted
from fedppl.algorithms.one_shot.separate import Separate
from fedppl.contracts import Algorithm, LocalInference
from fedppl.coregional import curves
from fedppl.engine import policy
from fedppl.engine.inprocess import InProcess
from fedppl.engine.policy import Policy
from fedppl.local.advi import ADVI, MeanField
from fedppl.local.gradient_steps import GradientSteps
from fedppl.local.laplace import Laplace
from fedppl.local.nested_laplace import NestedLaplace
from fedppl.local.nuts import NUTS
from fedppl.model.client import ClientModel
from fedppl.model.declaration import FederatedModel
from fedppl.numerics import covariance
from fedppl.results.fit import Fit
from fedppl.results.hypotheses import contrast, hypotheses
from fedppl.run._round import Round
from fedppl.run.loop import fit, rounds
from fedppl.run.participation import all_clients, bernoulli, fixed_size
from fedppl.search.candidates import grid
from fedppl.search.grid_search import grid_search
from fedppl.search.loss import validation_loss
from fedppl.search.split import holdout
from fedppl.types import ConvergenceWarning, DataError, DeclarationError, NotConvergedError, Status

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
    "Confidence",
    "ConsensusMonteCarlo",
    "ConvergenceWarning",
    "DataError",
    "DeclarationError",
    "Ditto",
    "FedAvg",
    "FedProx",
    "FederatedModel",
    "Fit",
    "GradientSteps",
    "InProcess",
    "Laplace",
    "LocalInference",
    "MeanField",
    "NestedLaplace",
    "NotConvergedError",
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
    "Flower": ("fedppl.flower.app", "flwr", "fedppl.Flower needs Flower", "flower"),
    "nn": ("fedppl.nn", "torch", "fedppl.nn needs torch", "torch"),
}


def __getattr__(name: str) -> Any:
    """Load `Flower` and `nn` when they are first asked for: nothing else needs what they stand on installed."""
    if name not in _LAZY:
        raise AttributeError(f"module 'fedppl' has no attribute {name!r}")
    module, package, who, extra = _LAZY[name]
    try:
        globals()[name] = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"{who}, which is not installed: pip install 'fedppl[{extra}]'", name=package
        ) from error
    return globals()[name]
