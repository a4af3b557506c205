"""The table of local inferences and the table of algorithms: what is in them is held to what all of them promise.

A new one joins by a row. Calls by hand are held in tests/unit/test_contract.py and tests/promises/test_conformance.py,
runs through the loop in tests/promises/test_runs.py; what an algorithm promises of its own is tested in its own file.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

import fedppl
import tests.skeleton
from fedppl import FederatedModel
from fedppl.contracts import AnyAlgorithm, LocalInference
from fedppl.models import hm1
from tests.support import problems

Problem = Callable[[], tuple[FederatedModel, problems.Clients]]


# --- problems ---------------------------------------------------------------------------------------------------


@functools.cache
def noise() -> tuple[FederatedModel, problems.Clients]:
    """Not Gaussian: EP's warm start takes four rounds of six."""
    return problems.noise(3, rows=60)


@functools.cache
def regression() -> tuple[FederatedModel, problems.Clients]:
    """Gaussian, where a hundred draws or thirty steps always make a reply."""
    return problems.regression(3)


@functools.cache
def trends() -> tuple[FederatedModel, problems.Clients]:
    """Quadratic trends with a local noise sd; what is shared has the prior N(0, I)."""
    rng, data = np.random.default_rng(15), {}
    for k, rows in enumerate((12, 15, 20)):
        X = hm1.polynomial(np.arange(rows), 2, 20.0)
        data[f"engine {k}"] = {"X": X, "y": X @ (np.array([1.0, 0.5, -1.0]) + 0.3 * rng.normal(size=3))}
        data[f"engine {k}"]["y"] += 0.3 * rng.normal(size=rows)
    return problems.declared(hm1.linear_regression, hm1.SHARED), data


@functools.cache
def coregional() -> tuple[FederatedModel, problems.Clients]:
    """Three latent functions of which two are needed; q(v), q(α) and estimates are shared."""
    return problems.coregional(3)


@functools.cache
def coregional_all() -> tuple[FederatedModel, problems.Clients]:
    """The same units, for a model that uses all of its functions."""
    return problems.coregional_all_model(), problems.coregional(3)[1]


HEAD = ("2.weight", "2.bias")


def classification() -> tuple[FederatedModel, problems.Clients]:
    """A network of torch; its representation is shared."""
    return problems.classification()


def all_shared() -> tuple[FederatedModel, problems.Clients]:
    """A network of torch, all of it shared."""
    return problems.classification(shared=("0.weight", "0.bias", *HEAD))


ANY_MODEL: tuple[Problem, ...] = (noise, regression, trends)  # of algorithms for any declared model
NETWORKS: tuple[Problem, ...] = (classification, all_shared)


# --- local inferences -------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """A local inference, and how much of a Gaussian model's moments it gets right."""

    local: LocalInference
    right: str
    means: float  # error on a model that is not Gaussian, in posterior sds
    sds: float  # relative error of sds there
    fast: LocalInference | None = None  # what stands in for it there, if other settings
    seeds_matter: bool = False  # for the moments; draws always depend on the generator


# All moments to rounding, the mean only, or all of them up to Monte Carlo error.
EXACT, MEAN, MONTE_CARLO = "exact", "mean", "Monte Carlo"
# Laplace at the joint mode is biased for log τ, as its docstring says, and a Gaussian fit is a little narrow; sampling
# has an ESS of at least 900.
SAMPLED = (4 / np.sqrt(900), 4 / np.sqrt(1800))
WAYS: dict[str, Way] = {
    "nested Laplace": Way(fedppl.local.NestedLaplace(), EXACT, 0.02, 0.01),
    "Laplace": Way(fedppl.local.Laplace(), EXACT, 0.2, 0.05),
    "ADVI": Way(fedppl.local.ADVI(), EXACT, 0.03, 0.03),
    "gradient steps": Way(
        # the slowest direction of `means` in test_local.py has curvature 0.8: (1 - 0.03 x 0.8)^800 is 4e-9
        fedppl.local.GradientSteps(steps=800, learning_rate=0.03),
        EXACT,
        0.2,
        0.05,
        fedppl.local.GradientSteps(steps=3000, learning_rate=2e-3),
    ),
    "mean field": Way(fedppl.local.MeanField(), MEAN, 0.05, 0.05),
    "NUTS of PyMC": Way(
        fedppl.local.NUTS(draws=600, tune=400, chains=2, nuts_sampler="pymc"), MONTE_CARLO, *SAMPLED, seeds_matter=True
    ),
}
if importlib.util.find_spec("nutpie"):
    WAYS["NUTS of nutpie"] = Way(
        fedppl.local.NUTS(draws=1500, tune=600, chains=2, nuts_sampler="nutpie"),
        MONTE_CARLO,
        *SAMPLED,
        seeds_matter=True,
    )


# --- algorithms -------------------------------------------------------------------------------------------------


class Ends(enum.Enum):
    """Where a fit of a Gaussian model ends."""

    POSTERIOR = "at its posterior"
    MODE = "at the mode of it"
    OWN_POSTERIOR = "with every client's own posterior"
    OWN_MODE = "with every client's own mode"
    COUPLED = "at the posterior of HM1 given its Ω"


class Ending(NamedTuple):
    """Where a fit of `problems.regression` ends, the settings with which it gets there, and in how many rounds."""

    ends: Ends
    settings: Mapping[str, Any] = {}
    rounds: int = 60


class Case(NamedTuple):
    """An algorithm, and a problem on which it still moves something in the last of its rounds."""

    algorithm: str  # its name in fedppl
    settings: Mapping[str, Any]
    problem: Problem
    rounds: int = 5
    # Arrays with a row per client, which nothing but its replies changes, of a state with `where`.
    ledger: tuple[str, ...] = ()
    idle: tuple[int, ...] = ()  # rounds in which clients keep what they have to themselves
    summed: bool | None = False  # whether sums over clients are all that the server needs; None: in some phase
    ending: Ending | None = None

    def build(self) -> AnyAlgorithm:
        """Build it with the settings of its runs."""
        return build(self.algorithm, self.settings)

    def ends_with_posterior(self) -> bool:
        """Whether a fit of a Gaussian model ends at its posterior."""
        return self.ending is not None and self.ending.ends is Ends.POSTERIOR

    def build_ending(self) -> AnyAlgorithm:
        """Build it with the settings of the fit whose end is known."""
        assert self.ending is not None
        return build(self.algorithm, self.ending.settings)


def find(name: str) -> Any:
    """What builds an algorithm, by its name in fedppl."""
    return operator.attrgetter(name)(tests if name.startswith("skeleton.") else fedppl)


def build(name: str, settings: Mapping[str, Any]) -> AnyAlgorithm:
    """Build an algorithm by its name in fedppl."""
    found: AnyAlgorithm = find(name)(**settings)
    return found


def nuts(sampler: str) -> dict[str, Any]:
    """So few draws that every reply is noisy."""
    return {"local": fedppl.local.NUTS(draws=100, tune=80, chains=1, rhat_limit=2.0, nuts_sampler=sampler)}


SITES = ("sites.linear", "sites.precision")
CONTROLS = ("controls.each", "controls.weights")
ep = functools.partial(Case, "EP", ledger=SITES, rounds=6)
descent: dict[str, Any] = {"learning_rate": 0.05, "steps": 4}
batches = {**descent, "batch_size": 4}
one_step: dict[str, Any] = {"learning_rate": 0.2, "steps": 1, "tolerance": 1e-8}
posterior = functools.partial(Ending, Ends.POSTERIOR)
mode = functools.partial(Ending, Ends.MODE, rounds=3000)

CASES: dict[str, Case] = {
    "EP(NestedLaplace)": ep({"starts": 1}, noise, ending=posterior()),
    "EP(cold)": ep(
        {"warm_start": False, "damping": 0.3}, regression, ending=posterior({"warm_start": False, "damping": 0.3})
    ),
    "EP(diagonal)": ep({"structure": "diagonal", "starts": 1}, noise, ending=posterior({"structure": "diagonal"})),
    "EP(blocks)": ep(
        {"structure": [["mu"], ["log_tau"]], "starts": 1}, noise, ending=posterior({"structure": [["a"], ["mu"]]})
    ),
    "EP(Laplace)": ep({"local": fedppl.local.Laplace(), "tolerance": 1e-9}, noise),
    "EP(ADVI)": ep(
        {"local": fedppl.local.ADVI(points=32), "tolerance": 1e-9},
        noise,
        ending=posterior({"local": fedppl.local.ADVI()}),
    ),
    "EP(MeanField)": ep({"local": fedppl.local.MeanField(points=32), "tolerance": 1e-9}, noise),
    "EP(GradientSteps)": ep(
        {"local": fedppl.local.GradientSteps(steps=30, learning_rate=0.005), "tolerance": 1e-9}, regression
    ),
    "EP(NUTS, pymc)": ep(
        nuts("pymc"),
        regression,
        rounds=5,
        ending=posterior({"local": fedppl.local.NUTS(draws=150, tune=150, chains=1, nuts_sampler="pymc")}),
    ),
    "Sums": Case("Sums", {"points": 512, "pilot": 64, "starts": 1}, noise, summed=True, ending=posterior()),
    "Sums(exchanges)": Case(
        "Sums", {"points": 64, "pilot": 64, "exchanges": 6}, noise, summed=True, ending=posterior()
    ),
    "FedAvg": Case("averaging.FedAvg", descent, noise, summed=True, ending=mode(one_step)),
    "FedAvg(batches)": Case("averaging.FedAvg", batches, regression, summed=True),
    "FedProx": Case(
        "averaging.FedProx", {**batches, "mu": 0.1}, regression, summed=True, ending=mode({**one_step, "mu": 0.5})
    ),
    "SCAFFOLD": Case(
        "averaging.SCAFFOLD",
        descent,
        noise,
        ledger=CONTROLS,
        ending=mode({"learning_rate": 0.05, "steps": 5, "tolerance": 1e-8}),
    ),
    "SCAFFOLD(batches)": Case("averaging.SCAFFOLD", batches, regression, ledger=CONTROLS),
    "Ditto": Case(
        "averaging.Ditto", {**batches, "lam": 0.1}, regression, summed=True, ending=mode({**one_step, "lam": 0.1})
    ),
    "Separate": Case(
        "one_shot.Separate", {}, regression, rounds=1, ledger=("has_replied",), ending=Ending(Ends.OWN_POSTERIOR)
    ),
    "SeparateSGD": Case(
        "one_shot.SeparateSGD",
        batches,
        regression,
        ledger=("changes",),
        ending=Ending(Ends.OWN_MODE, {"learning_rate": 0.1, "tolerance": 1e-8}),
    ),
    "PrecisionWeighted": Case(
        "one_shot.PrecisionWeighted", {}, regression, rounds=1, ledger=(*SITES, "has_replied"), ending=posterior()
    ),
    "ConsensusMonteCarlo": Case(
        "one_shot.ConsensusMonteCarlo", {"draws": 100}, regression, rounds=1, ending=posterior({"draws": 400})
    ),
    "HM1": Case(
        "HM1",
        {"tolerance": 1e-12},
        trends,
        ledger=("factors.linear", "factors.precision", "has_replied"),
        ending=Ending(Ends.COUPLED),
    ),
    "HM1(low rank)": Case(
        "HM1",
        {"structure": fedppl.covariance.low_rank(1), "tolerance": 1e-12},
        trends,
        ledger=("factors.linear", "factors.precision", "has_replied"),
    ),
    "HM1Gradient": Case("HM1Gradient", {"learning_rate": 1e-3, "steps": 5}, trends, ledger=("theta",)),
    "HM1Gradient(proximal)": Case(
        "HM1Gradient", {"learning_rate": 0.01, "steps": 5, "batch_size": 4, "prior_step": "proximal"}, trends
    ),
    "Confidence": Case("Confidence", {"local": fedppl.local.Laplace()}, regression, summed=True),
    "Confidence(remember)": Case("Confidence", {"strength": 2.0, "remember": True}, regression, ledger=("ledger",)),
    # Coefficients are drawn in the first round and first put to use in the second.
    "LMCAscent": Case("curves.Ascent", {"warmup": 2}, coregional, idle=(2,), summed=None),
    "LMCAscent(batches)": Case("curves.Ascent", {"warmup": 2, "batch_size": 8}, coregional, idle=(2,), summed=None),
    "LMCPointAscent": Case("curves.PointAscent", {"warmup": 2}, coregional_all, idle=(2,), summed=None),
    "LMCPointAscent(batches)": Case(
        "curves.PointAscent", {"warmup": 2, "batch_size": 8}, coregional_all, idle=(2,), summed=None
    ),
    "LMCAveraging": Case("curves.Averaging", {"steps": 3}, coregional, summed=None),
    "LMCAveraging(batches)": Case("curves.Averaging", {"steps": 3, "batch_size": 8}, coregional, summed=None),
    "LMCGradient": Case("curves.Gradient", {}, coregional, summed=None),
    "NetworkAveraging": Case("nn.FedAvg", {"phases": (("local", 1), ("shared", 1))}, classification, summed=True),
    "NetworkAveraging(proximal)": Case(
        "nn.FedAvg",
        {"phases": (("all", 1),), "proximal": 1.0, "momentum": 0.9, "smoothing": 0.5},
        all_shared,
        summed=True,
    ),
    "NetworkSCAFFOLD": Case("nn.SCAFFOLD", {"epochs": 1}, all_shared, ledger=CONTROLS),
    "IFCA": Case("nn.IFCA", {"epochs": 1}, all_shared),
    "PerFedAvg": Case("nn.PerFedAvg", {"epochs": 1}, all_shared, summed=True),
    "PFedMe": Case("nn.PFedMe", {"epochs": 1}, all_shared, summed=True),
    "PFedBayes": Case("nn.PFedBayes", {"epochs": 1}, all_shared, summed=True),
    "BPFed": Case("nn.BPFed", {"epochs": 1}, classification, summed=True),
    "FedPop": Case("nn.FedPop", {"head": HEAD, "epochs": 1}, all_shared, summed=True),
    "NetworkConfidence": Case("nn.Confidence", {"head": HEAD, "epochs": 1}, all_shared, summed=True),
    "NetworkConfidence(remember)": Case(
        "nn.Confidence", {"head": HEAD, "epochs": 1, "remember": True, "smoothing": 0.5}, all_shared, ledger=("ledger",)
    ),
    "FedSI": Case("nn.FedSI", {"ratio": 0.3, "epochs": 2}, classification, summed=True),
    "FedSI(diagonal)": Case("nn.FedSI", {"diagonal": True, "epochs": 2, "average": "sd"}, classification, summed=True),
}
# The skeleton of CONTRIBUTING.md: a new algorithm needs no more than this row to be held to all promises.
CASES["skeleton"] = Case("skeleton.Newton", {"tolerance": 1e-8}, regression, rounds=1, ending=posterior())
if importlib.util.find_spec("nutpie"):
    CASES["EP(NUTS, nutpie)"] = ep(nuts("nutpie"), regression, rounds=5)
ENDINGS = [name for name, case in CASES.items() if case.ending is not None]


def ending_in(*ends: Ends) -> list[str]:
    """Rows whose fits end there."""
    return [name for name in ENDINGS if (found := CASES[name].ending) is not None and found.ends in ends]


def runnable() -> dict[str, Case]:
    """The cases whose packages are installed."""
    if importlib.util.find_spec("torch") is not None:
        return CASES
    return {name: case for name, case in CASES.items() if case.problem not in NETWORKS}


def rows(names: Iterable[str] = CASES) -> list[Any]:
    """Parameters of a test; rows of networks are skipped without torch."""
    missing = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
    marks = {problem: [missing, pytest.mark.torch] for problem in NETWORKS}
    return [pytest.param(name, marks=marks.get(CASES[name].problem, [])) for name in names]


def exported() -> set[str]:
    """Names in fedppl, by namespace, of all algorithms."""
    found = set()
    for where in ("", "averaging", "one_shot", "nn", "curves"):
        if where == "nn" and importlib.util.find_spec("torch") is None:
            continue
        module = getattr(fedppl, where) if where else fedppl
        for name in module.__all__:
            found_there = getattr(module, name)
            is_there = ".algorithms." in str(getattr(found_there, "__module__", ""))
            if is_there and not isinstance(found_there, type) and found_there.__name__[0].isupper():
                found.add(f"{where}.{name}" if where else name)
    return found
