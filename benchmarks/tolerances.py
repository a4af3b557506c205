"""What moves when a tolerance is halved or doubled: fits of exactness' models and of formulas, one tolerance changed.

Each constant of a `tolerances.py` is set in every module that has imported it, and default fits with a fixed seed are
compared with those of the declared value: the largest change of a shared mean in posterior sds, of a log sd, of the log
evidence, of CPU seconds, and statuses that differ. What moves nothing here is a guard (its comment says of what), or
may go. Constants inside compiled loops stand beside these and are not swept: their code is kept by file.

    python benchmarks/tolerances.py
    python benchmarks/tolerances.py --packages numerics --models student_t emax
    python docs/tables.py
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedppl
from benchmarks._exactness import models, more_models
from fedppl import gaussian
from fedppl.types import Array

PACKAGES = ("numerics", "local", "algorithms")
MODELS = ("zero_inflated", "student_t", "emax", "overdispersed_poisson", "ordinal")  # other integrals each
FACTORS = (0.5, 2.0)
_SEED = 1


class Outcome(NamedTuple):
    """A default fit."""

    status: str
    mean: Array  # (m,), on the unconstrained space
    sd: Array  # (m,)
    evidence: float
    seconds: float  # of CPU


def main(argv: list[str] | None = None) -> None:
    """Sweep the constants, print a line for each, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    made = {make.__name__: make for make in (*models.PROBLEMS, *more_models.PROBLEMS)}
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, default=PACKAGES)
    parser.add_argument("--models", nargs="+", choices=list(made), default=MODELS)
    parser.add_argument("--names", nargs="+", help="constants; by default all of the packages")
    options = parser.parse_args(argv)
    logging.getLogger("fedppl").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", fedppl.ConvergenceWarning)
    problems = {name: made[name]() for name in options.models}
    declared = {
        name: (fedppl.FederatedModel(problem.builder(), problem.shared_names()), problem.clients)
        for name, problem in problems.items()
    }

    def fits() -> dict[str, Outcome]:
        return {name: _fit(*pair) for name, pair in declared.items()}

    fits()  # compiles
    usual, rows = fits(), []
    for package in options.packages:
        for name, value in constants(package).items():
            if options.names is None or name in options.names:
                row = {"package": package, "name": name, "value": value}
                for factor in FACTORS:
                    with changed(package, name, _times(value, factor)):
                        row[f"x{factor:g}"] = _difference(usual, fits())
                rows.append(row)
                print(json.dumps(row), flush=True)
    print(json.dumps({"benchmark": "tolerances", "models": list(declared), "rows": rows}))


def constants(package: str) -> dict[str, float | int]:
    """The numbers of a package's `tolerances.py`, by name."""
    module = importlib.import_module(f"fedppl.{package}.tolerances")
    return {
        name: value
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, int | float) and not isinstance(value, bool)
    }


@contextmanager
def changed(package: str, name: str, value: float | int) -> Iterator[None]:
    """Set a constant wherever it was imported, for a while."""
    usual, home = constants(package)[name], f"fedppl.{package}.tolerances"
    homes = [
        module
        for key, module in list(sys.modules.items())
        if key.startswith("fedppl") and name in vars(module) and vars(module)[name] == usual
        if key == home or not key.endswith(".tolerances")  # another package's of that name is another quantity
    ]
    for module in homes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module in homes:
            setattr(module, name, usual)


def _times(value: float | int, factor: float) -> float | int:
    return max(round(value * factor), 1) if isinstance(value, int) else value * factor


def _fit(model: fedppl.FederatedModel, clients: Any) -> Outcome:
    started = time.process_time()
    try:
        fit = fedppl.fit(model, clients, progressbar=False, random_seed=_SEED)
        evidence = float(fit.log_evidence.value)
        q = fit.posterior
    except Exception as error:  # a value that cannot be used is a result of the sweep
        return Outcome(type(error).__name__, np.zeros(1), np.ones(1), 0.0, time.process_time() - started)
    seconds = time.process_time() - started
    return Outcome(fit.status.value, gaussian.mean(q), gaussian.standard_deviations(q), evidence, seconds)


def _difference(usual: dict[str, Outcome], other: dict[str, Outcome]) -> dict[str, Any]:
    """The largest changes over the models."""
    same = [name for name in usual if usual[name].mean.shape == other[name].mean.shape]
    pairs = [(usual[name], other[name]) for name in same]
    return {
        "mean": round(max((float(np.max(np.abs(b.mean - a.mean) / a.sd)) for a, b in pairs), default=0.0), 5),
        "log_sd": round(max((float(np.max(np.abs(np.log(b.sd / a.sd)))) for a, b in pairs), default=0.0), 5),
        "evidence": round(max((abs(b.evidence - a.evidence) for a, b in pairs), default=0.0), 5),
        "seconds": round(sum(b.seconds for _, b in pairs) / sum(a.seconds for a, _ in pairs), 2) if pairs else 0.0,
        "status": {name: other[name].status for name in usual if other[name].status != usual[name].status},
    }


if __name__ == "__main__":
    main()
