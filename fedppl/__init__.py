"""Federated Bayesian inference: one client's posterior declared in PyMC, a hierarchy fitted across all clients."""

import importlib
from typing import Any

from fedppl import privacy
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
from fedppl.steps.averaging import FedAvg
from fedppl.steps.ep import EP
from fedppl.steps.private_ep import PrivateEP
from fedppl.types import Algorithm, DataError, DeclarationError, LocalInference, Status

__version__ = "0.1.0"

__all__ = [
    "ADVI",
    "EP",
    "NUTS",
    "Algorithm",
    "ClientModel",
    "DataError",
    "DeclarationError",
    "FedAvg",
    "FederatedModel",
    "Fit",
    "GradientSteps",
    "InProcess",
    "Laplace",
    "LocalInference",
    "MeanField",
    "NestedLaplace",
    "PrivateEP",
    "Round",
    "Status",
    "all_clients",
    "bernoulli",
    "contrast",
    "fit",
    "fixed_size",
    "hypotheses",
    "privacy",
    "rounds",
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
