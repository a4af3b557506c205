"""Federated Bayesian inference: one client's posterior declared in PyMC, a hierarchy fitted across all clients."""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedppl import data, metrics, plots, privacy
    from fedppl.algorithms.averaging.ditto import Ditto
    from fedppl.algorithms.averaging.fedavg import FedAvg
    from fedppl.algorithms.averaging.fedprox import FedProx
    from fedppl.algorithms.averaging.scaffold import SCAFFOLD
    from fedppl.algorithms.averaging.separate_sgd import SeparateSGD
    from fedppl.algorithms.ep.correction import Correction
    from fedppl.algorithms.ep.ep import EP
    from fedppl.algorithms.ep.private import PrivateEP
    from fedppl.algorithms.ep.warm_up import warm_up
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
    from fedppl.formulas.formula import Agreed, agree, formula
    from fedppl.formulas.marginal import marginal_effects
    from fedppl.formulas.priors import Prior
    from fedppl.front import fit, load, rounds
    from fedppl.local.advi import ADVI, MeanField
    from fedppl.local.gradient_steps import GradientSteps
    from fedppl.local.laplace import Laplace
    from fedppl.local.nested_laplace import NestedLaplace
    from fedppl.local.nuts import NUTS
    from fedppl.model import summaries
    from fedppl.model.client import ClientModel
    from fedppl.model.declaration import FederatedModel
    from fedppl.numerics import covariance
    from fedppl.results.fit import Fit
    from fedppl.results.hypotheses import contrast, hypotheses
    from fedppl.results.loo import Loo, compare, loo, loo_compare
    from fedppl.results.table import Table, table
    from fedppl.run.calibration import calibrate, plot_calibration
    from fedppl.run.conflict import conflict
    from fedppl.run.one_round import Round
    from fedppl.run.participation import all_clients, bernoulli, fixed_size
    from fedppl.run.withdrawal import Withdrawal, without
    from fedppl.search.grid_search import grid, grid_search
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
    "Agreed",
    "Algorithm",
    "ClientModel",
    "Confidence",
    "ConsensusMonteCarlo",
    "ConvergenceWarning",
    "Correction",
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
    "Prior",
    "PrivateEP",
    "Round",
    "Separate",
    "SeparateSGD",
    "Status",
    "Sums",
    "Table",
    "Withdrawal",
    "agree",
    "all_clients",
    "bernoulli",
    "calibrate",
    "compare",
    "Loo",
    "loo",
    "loo_compare",
    "conflict",
    "contrast",
    "covariance",
    "curves",
    "data",
    "fit",
    "fixed_size",
    "formula",
    "grid",
    "grid_search",
    "holdout",
    "hypotheses",
    "load",
    "marginal_effects",
    "metrics",
    "plot_calibration",
    "plots",
    "policy",
    "privacy",
    "rounds",
    "summaries",
    "table",
    "validation_loss",
    "warm_up",
    "without",
]


# Nothing is loaded before it is asked for: a site's app is a process a message, which has no second for PyMC.
# Namespaces: module, and the package and extra that not everybody has.
_SPACES = {
    "Flower": ("fedppl.flower.app", "flwr", "flower"),
    "covariance": ("fedppl.numerics.covariance", "", ""),
    "curves": ("fedppl.coregional.curves", "", ""),
    "data": ("fedppl.data", "", ""),
    "metrics": ("fedppl.metrics", "", ""),
    "nn": ("fedppl.nn", "torch", "torch"),
    "plots": ("fedppl.plots", "", ""),
    "policy": ("fedppl.engine.policy", "", ""),
    "privacy": ("fedppl.privacy", "", ""),
    "summaries": ("fedppl.model.summaries", "", ""),
}

# Functions and classes: the module that has each.
_NAMES = {
    "ADVI": "fedppl.local.advi",
    "Agreed": "fedppl.formulas.formula",
    "Algorithm": "fedppl.contracts",
    "ClientModel": "fedppl.model.client",
    "Confidence": "fedppl.algorithms.hierarchical.confidence",
    "ConsensusMonteCarlo": "fedppl.algorithms.one_shot.consensus",
    "ConvergenceWarning": "fedppl.types",
    "Correction": "fedppl.algorithms.ep.correction",
    "DataError": "fedppl.types",
    "DeclarationError": "fedppl.types",
    "Ditto": "fedppl.algorithms.averaging.ditto",
    "EP": "fedppl.algorithms.ep.ep",
    "Sums": "fedppl.algorithms.sums.sums",
    "FedAvg": "fedppl.algorithms.averaging.fedavg",
    "FedProx": "fedppl.algorithms.averaging.fedprox",
    "FederatedModel": "fedppl.model.declaration",
    "Fit": "fedppl.results.fit",
    "GradientSteps": "fedppl.local.gradient_steps",
    "HM1": "fedppl.algorithms.hierarchical.hm1",
    "HM1Gradient": "fedppl.algorithms.hierarchical.hm1_gradient",
    "InProcess": "fedppl.engine.inprocess",
    "Laplace": "fedppl.local.laplace",
    "LocalInference": "fedppl.contracts",
    "Loo": "fedppl.results.loo",
    "MeanField": "fedppl.local.advi",
    "NUTS": "fedppl.local.nuts",
    "NestedLaplace": "fedppl.local.nested_laplace",
    "NotConvergedError": "fedppl.types",
    "Policy": "fedppl.engine.policy",
    "PrecisionWeighted": "fedppl.algorithms.one_shot.precision_weighted",
    "Prior": "fedppl.formulas.priors",
    "PrivateEP": "fedppl.algorithms.ep.private",
    "Round": "fedppl.run.one_round",
    "SCAFFOLD": "fedppl.algorithms.averaging.scaffold",
    "Separate": "fedppl.algorithms.one_shot.separate",
    "SeparateSGD": "fedppl.algorithms.averaging.separate_sgd",
    "Status": "fedppl.types",
    "Table": "fedppl.results.table",
    "Withdrawal": "fedppl.run.withdrawal",
    "agree": "fedppl.formulas.formula",
    "all_clients": "fedppl.run.participation",
    "bernoulli": "fedppl.run.participation",
    "calibrate": "fedppl.run.calibration",
    "compare": "fedppl.results.loo",
    "conflict": "fedppl.run.conflict",
    "contrast": "fedppl.results.hypotheses",
    "fit": "fedppl.front",
    "fixed_size": "fedppl.run.participation",
    "formula": "fedppl.formulas.formula",
    "grid": "fedppl.search.grid_search",
    "grid_search": "fedppl.search.grid_search",
    "holdout": "fedppl.search.split",
    "hypotheses": "fedppl.results.hypotheses",
    "load": "fedppl.front",
    "loo": "fedppl.results.loo",
    "loo_compare": "fedppl.results.loo",
    "marginal_effects": "fedppl.formulas.marginal",
    "plot_calibration": "fedppl.run.calibration",
    "rounds": "fedppl.front",
    "table": "fedppl.results.table",
    "validation_loss": "fedppl.search.loss",
    "warm_up": "fedppl.algorithms.ep.warm_up",
    "without": "fedppl.run.withdrawal",
}


def __getattr__(name: str) -> Any:
    """Load what is in `_SPACES` or `_NAMES`, or a module, when it is asked for and not before."""
    if name in _NAMES:
        globals()[name] = getattr(importlib.import_module(_NAMES[name]), name)
        return globals()[name]
    if name not in _SPACES:
        if name.startswith("_") or importlib.util.find_spec(f"fedppl.{name}") is None:
            raise AttributeError(f"module 'fedppl' has no attribute {name!r}")
        return importlib.import_module(f"fedppl.{name}")
    module, package, extra = _SPACES[name]
    try:
        globals()[name] = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"fedppl.{name} needs {package}, which is not installed: pip install 'fedppl[{extra}]'", name=package
        ) from error
    return globals()[name]


def __dir__() -> list[str]:
    """What can be loaded here."""
    here = [name for name, (_, package, _) in _SPACES.items() if not package or importlib.util.find_spec(package)]
    return sorted({*globals(), *here, *_NAMES})
