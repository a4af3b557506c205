"""Federated Bayesian inference: one client's posterior declared in PyMC, a hierarchy fitted across all clients."""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedppl import data, local, metrics, plots, privacy, search
    from fedppl.algorithms import averaging, one_shot
    from fedppl.algorithms.ep.ep import EP
    from fedppl.algorithms.ep.private import PrivateEP
    from fedppl.algorithms.hierarchical.confidence import Confidence
    from fedppl.algorithms.hierarchical.hm1 import HM1
    from fedppl.algorithms.hierarchical.hm1_gradient import HM1Gradient
    from fedppl.algorithms.sums.sums import Sums
    from fedppl.contracts import Algorithm
    from fedppl.coregional import curves
    from fedppl.data import sources
    from fedppl.engine import policy
    from fedppl.engine.inprocess import InProcess
    from fedppl.engine.policy import Policy
    from fedppl.formulas.formula import agree, formula
    from fedppl.formulas.marginal import marginal_effects
    from fedppl.formulas.priors import Prior
    from fedppl.front import fit, load, rounds, warm_up
    from fedppl.model import summaries
    from fedppl.model.declaration import FederatedModel
    from fedppl.numerics import covariance
    from fedppl.results.fit import Fit
    from fedppl.results.loo import compare, loo, loo_compare
    from fedppl.results.reliability import reliability
    from fedppl.results.tables import contrast, hypotheses, table
    from fedppl.run.conflicts import conflict
    from fedppl.run.one_round import Round
    from fedppl.run.refits import calibrate, without
    from fedppl.sites.files import Files as Files
    from fedppl.sites.files import Waiting as Waiting
    from fedppl.sites.node import Site as Site
    from fedppl.types import ConvergenceWarning, DataError, DeclarationError, NotConvergedError, Status

__version__ = "0.1.0"

__all__ = [
    "EP", "HM1", "Algorithm", "Confidence", "ConvergenceWarning", "DataError", "DeclarationError",
    "FederatedModel", "Fit", "HM1Gradient", "InProcess", "NotConvergedError", "Policy", "Prior", "PrivateEP",
    "Round", "Status", "Sums", "agree", "averaging", "calibrate", "compare", "conflict", "contrast", "covariance",
    "curves", "data", "fit", "formula", "hypotheses", "load", "local", "loo", "loo_compare", "marginal_effects",
    "metrics", "one_shot", "plots", "policy", "privacy", "reliability", "rounds", "search", "sources", "summaries",
    "table", "warm_up", "without",
]  # fmt: skip


# Modules are loaded on first use: a site's app is a process for each message, with no time to import PyMC.
# Namespaces: module, and the optional package and extra that it needs.
_SPACES = {
    "Flower": ("fedppl.flower", "flwr", "flower"),
    "averaging": ("fedppl.algorithms.averaging", "", ""),
    "covariance": ("fedppl.numerics.covariance", "", ""),
    "curves": ("fedppl.coregional.curves", "", ""),
    "data": ("fedppl.data", "", ""),
    "local": ("fedppl.local", "", ""),
    "metrics": ("fedppl.metrics", "", ""),
    "nn": ("fedppl.nn", "torch", "torch"),
    "one_shot": ("fedppl.algorithms.one_shot", "", ""),
    "plots": ("fedppl.plots", "", ""),
    "policy": ("fedppl.engine.policy", "", ""),
    "privacy": ("fedppl.privacy", "", ""),
    "search": ("fedppl.search", "", ""),
    "sources": ("fedppl.data.sources", "", ""),
    "summaries": ("fedppl.model.summaries", "", ""),
}

# Functions and classes, by the module that has them.
_NAMES = {
    name: f"fedppl.{module}"
    for module, names in {
        "algorithms.ep.ep": "EP",
        "algorithms.ep.private": "PrivateEP",
        "algorithms.hierarchical.confidence": "Confidence",
        "algorithms.hierarchical.hm1": "HM1",
        "algorithms.hierarchical.hm1_gradient": "HM1Gradient",
        "algorithms.sums.sums": "Sums",
        "contracts": "Algorithm",
        "engine.inprocess": "InProcess",
        "engine.policy": "Policy",
        "formulas.formula": "agree formula",
        "formulas.marginal": "marginal_effects",
        "formulas.priors": "Prior",
        "front": "fit load rounds warm_up",
        "model.declaration": "FederatedModel",
        "results.fit": "Fit",
        "results.loo": "compare loo loo_compare",
        "results.reliability": "reliability",
        "results.tables": "contrast hypotheses table",
        "run.conflicts": "conflict",
        "run.one_round": "Round",
        "run.refits": "calibrate without",
        "sites.files": "Files Waiting",  # these need cryptography, and so are not in `__all__`
        "sites.node": "Site",
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
    if package and importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"fedppl.{name} needs {package}, which is not installed: pip install 'fedppl[{extra}]'", name=package
        )
    globals()[name] = importlib.import_module(module)
    return globals()[name]


def __dir__() -> list[str]:
    """What users reach from here, without what this package has inside."""
    optional = [name for name, (_, package, _) in _SPACES.items() if package and importlib.util.find_spec(package)]
    files = ["Files", "Site", "Waiting"] if importlib.util.find_spec("cryptography") else []
    return sorted({*__all__, *optional, *files, "__version__"})
