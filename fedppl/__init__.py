"""Federated Bayesian inference: one client's posterior declared in PyMC, a hierarchy fitted across all clients."""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedppl import data, metrics, plots, privacy
    from fedppl.algorithms.averaging.ditto import Ditto
    from fedppl.algorithms.averaging.fedavg import FedAvg, FedProx
    from fedppl.algorithms.averaging.scaffold import SCAFFOLD
    from fedppl.algorithms.ep.correction import Correction
    from fedppl.algorithms.ep.ep import EP
    from fedppl.algorithms.ep.private import PrivateEP
    from fedppl.algorithms.hierarchical.confidence import Confidence
    from fedppl.algorithms.hierarchical.hm1 import HM1
    from fedppl.algorithms.hierarchical.hm1_gradient import HM1Gradient
    from fedppl.algorithms.one_shot.consensus import ConsensusMonteCarlo
    from fedppl.algorithms.one_shot.precision_weighted import PrecisionWeighted
    from fedppl.algorithms.one_shot.separate import Separate, SeparateSGD
    from fedppl.algorithms.sums.sums import Sums
    from fedppl.contracts import Algorithm, LocalInference
    from fedppl.coregional import curves
    from fedppl.engine import policy
    from fedppl.engine.inprocess import InProcess
    from fedppl.engine.policy import Policy
    from fedppl.formulas.formula import Agreed, agree, formula
    from fedppl.formulas.marginal import marginal_effects
    from fedppl.formulas.priors import Prior
    from fedppl.front import fit, load, rounds, warm_up
    from fedppl.local.advi import ADVI, MeanField
    from fedppl.local.gradient_steps import GradientSteps
    from fedppl.local.nested_laplace import Laplace, NestedLaplace
    from fedppl.local.nuts import NUTS
    from fedppl.model import summaries
    from fedppl.model.client import ClientModel
    from fedppl.model.declaration import FederatedModel
    from fedppl.numerics import covariance
    from fedppl.results.fit import Fit
    from fedppl.results.loo import Loo, compare, loo, loo_compare
    from fedppl.results.tables import Table, contrast, hypotheses, table
    from fedppl.run.conflicts import conflict
    from fedppl.run.one_round import Round
    from fedppl.run.refits import Withdrawal, calibrate, without
    from fedppl.search.validation import holdout, validation_loss
    from fedppl.types import ConvergenceWarning, DataError, DeclarationError, NotConvergedError, Status

__version__ = "0.1.0"

__all__ = [
    "ADVI", "EP", "HM1", "NUTS", "SCAFFOLD", "Agreed", "Algorithm", "ClientModel", "Confidence",
    "ConsensusMonteCarlo", "ConvergenceWarning", "Correction", "DataError", "DeclarationError", "Ditto", "FedAvg",
    "FedProx", "FederatedModel", "Fit", "GradientSteps", "HM1Gradient", "InProcess", "Laplace", "LocalInference",
    "Loo", "MeanField", "NestedLaplace", "NotConvergedError", "Policy", "PrecisionWeighted", "Prior", "PrivateEP",
    "Round", "Separate", "SeparateSGD", "Status", "Sums", "Table", "Withdrawal", "agree", "calibrate", "compare",
    "conflict", "contrast", "covariance", "curves", "data", "fit", "formula", "holdout", "hypotheses", "load",
    "loo", "loo_compare", "marginal_effects", "metrics", "plots", "policy", "privacy", "rounds", "summaries",
    "table", "validation_loss", "warm_up", "without",
]  # fmt: skip


# Modules are loaded on first use: a site's app is a process for each message, with no time to import PyMC.
# Namespaces: module, and the optional package and extra that it needs.
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

# Functions and classes, by the module that has them.
_NAMES = {
    name: f"fedppl.{module}"
    for module, names in {
        "algorithms.averaging.ditto": "Ditto",
        "algorithms.averaging.fedavg": "FedAvg FedProx",
        "algorithms.averaging.scaffold": "SCAFFOLD",
        "algorithms.ep.correction": "Correction",
        "algorithms.ep.ep": "EP",
        "algorithms.ep.private": "PrivateEP",
        "algorithms.hierarchical.confidence": "Confidence",
        "algorithms.hierarchical.hm1": "HM1",
        "algorithms.hierarchical.hm1_gradient": "HM1Gradient",
        "algorithms.one_shot.consensus": "ConsensusMonteCarlo",
        "algorithms.one_shot.precision_weighted": "PrecisionWeighted",
        "algorithms.one_shot.separate": "Separate SeparateSGD",
        "algorithms.sums.sums": "Sums",
        "contracts": "Algorithm LocalInference",
        "engine.inprocess": "InProcess",
        "engine.policy": "Policy",
        "formulas.formula": "Agreed agree formula",
        "formulas.marginal": "marginal_effects",
        "formulas.priors": "Prior",
        "front": "fit load rounds warm_up",
        "local.advi": "ADVI MeanField",
        "local.gradient_steps": "GradientSteps",
        "local.nested_laplace": "Laplace NestedLaplace",
        "local.nuts": "NUTS",
        "model.client": "ClientModel",
        "model.declaration": "FederatedModel",
        "results.fit": "Fit",
        "results.loo": "Loo compare loo loo_compare",
        "results.tables": "Table contrast hypotheses table",
        "run.conflicts": "conflict",
        "run.one_round": "Round",
        "run.refits": "Withdrawal calibrate without",
        "search.validation": "holdout validation_loss",
        "types": "ConvergenceWarning DataError DeclarationError NotConvergedError Status",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    """Load a name of `_SPACES` or `_NAMES`, or a module, on first use."""
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
    """Names that can be loaded here."""
    here = [name for name, (_, package, _) in _SPACES.items() if not package or importlib.util.find_spec(package)]
    return sorted({*globals(), *here, *_NAMES})
