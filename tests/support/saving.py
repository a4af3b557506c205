"""Runs that are saved in one process and read in another, and what each is asked for there.

``python -m tests.support.saving FOLDER NAME NAME`` reads them and prints their numbers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import fedppl
from fedppl.testing import normal_means
from tests.support import problems

QUIET: Any = {"progressbar": False, "random_seed": 1}


class Saving(NamedTuple):
    """A declaration, data, an algorithm, and what of a client is predicted."""

    model: Any
    clients: Any
    algorithm: Any
    client: str
    new: Any
    settings: dict[str, Any] = {}
    include: str | None = None
    new_client: bool = False

    def fit(self) -> fedppl.Fit:
        """Run it."""
        return fedppl.fit(self.model, self.clients, self.algorithm, rounds=6, **self.settings, **QUIET)


def by_formula() -> Saving:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"site": np.repeat(["a", "b", "c"], 9), "t": rng.normal(size=27)})
    frame["arm"] = np.tile(["x", "y", "z"], 9)
    frame["y"] = frame["t"] + rng.normal(size=27)
    new = pd.DataFrame({"t": [0.0, 1.0], "arm": ["z", "x"]})
    return Saving(fedppl.formula("y ~ t + arm + (1 | site)"), frame, fedppl.EP(), "b", new, {"by": "site"})


def by_sums() -> Saving:
    model, clients = problems.noise()
    name, data = list(clients.items())[1]
    return Saving(model, clients, fedppl.Sums(), name, {k: v[:5] for k, v in data.items()}, new_client=True)


def of_means(algorithm: Any, include: str | None = None) -> Saving:
    return Saving(*normal_means(3), algorithm, "client 1", {"y": np.zeros(4)}, include=include)


RUNS: dict[str, Callable[[], Saving]] = {
    "formula": by_formula,
    "weighted points": by_sums,
    "HM1": lambda: of_means(fedppl.HM1()),
    "PrivateEP": lambda: of_means(fedppl.PrivateEP(clip=1.0, noise_multiplier=1.0, releases=6), "personal"),
    "a point": lambda: of_means(fedppl.averaging.FedAvg(learning_rate=0.05, steps=2), "personal"),
    "what clients keep": lambda: of_means(fedppl.averaging.Ditto(learning_rate=0.05, lam=0.1, steps=2), "clients"),
}


def told(run: Saving, fit: fedppl.Fit) -> dict[str, Any]:
    """All that the fit tells: texts, and numbers in flat lists, by where they are told."""
    found: dict[str, Any] = {"message": fit.message, "ids": list(fit.client_ids)}
    arrays = {name: values for name, (_, values) in fit.algorithm.result.details(fit.state).items()}
    drawn = {
        "predict": fit.predict(run.client, run.new, draws=20),
        "client": fit.client(run.client, draws=10, chains=2, random_seed=7),
    }
    if run.new_client:
        drawn["new client"] = fit.new_client(run.new, predict=run.new, draws=20)
    if run.algorithm.name not in ("HM1", "FedAvg", "Ditto"):
        arrays |= {"summary": fit.summary().to_numpy(dtype=float), "precision": fit.posterior.precision}
    for name, one in drawn.items():
        groups = [(group, one[group]) for group in ("posterior", "predictions") if group in one]
        arrays |= {f"{name}: {v} of {group}": np.asarray(x[v]) for group, x in groups for v in sorted(x.data_vars)}
    return found | {name: np.ravel(values).tolist() for name, values in arrays.items()}


if __name__ == "__main__":
    answers = {}
    for name in sys.argv[2:]:
        one = RUNS[name]()
        by = {k: v for k, v in one.settings.items() if k == "by"}
        loaded = fedppl.load(Path(sys.argv[1]) / f"{name}.nc", one.model, one.algorithm, clients=one.clients, **by)
        answers[name] = told(one, loaded)
    sys.stdout.write(json.dumps(answers))
