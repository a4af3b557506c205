"""What the rule on few rows costs a request, beside the answer: CPU seconds over whole fits under a policy.

    python -m benchmarks._attacks.rule_cost [--quick]

A site's first fit builds and compiles slopes of its rows, once a declaration: those seconds stand by themselves, and
shares are of a fit that comes after.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pymc as pm

import fedppl
from benchmarks._attacks import patients
from fedppl.engine import answer, few_rows

Case = tuple[Any, Mapping[str, Any]]  # a declaration and its clients' data


def wards(X: Any, y: Any, ward: Any) -> Any:
    """An effect of each ward of a site, which is the site's own."""
    with pm.Model() as model:
        columns = np.shape(X)[1]
        X, y, ward = (pm.Data(name, value) for name, value in {"X": X, "y": y, "ward": ward}.items())
        beta, sd, tau = pm.Normal("beta", 0, 2.5, shape=columns), pm.HalfNormal("sd", 2), pm.HalfNormal("tau", 1)
        pm.Normal("obs", X @ beta + pm.Normal("effect", 0, tau, shape=8)[ward], sd, observed=y)
    return model


def sites(rows: int, columns: int, draw: Callable[[Any, Any], Any]) -> dict[str, dict[str, Any]]:
    """Three sites, of outcomes that are drawn given a linear predictor."""
    rng = np.random.default_rng(0)
    beta, found = 0.4 * rng.normal(size=columns), {}
    for name in "abc":
        X = np.column_stack([np.ones(rows), rng.normal(size=(rows, columns - 1))])
        found[name] = {"X": X, "y": draw(rng, X @ beta)}
    return found


def _events(rng: Any, eta: Any) -> Any:
    return (rng.random(len(eta)) < 1 / (1 + np.exp(-eta))).astype(int)


def _frames(rows: int) -> dict[str, pd.DataFrame]:
    rng = np.random.default_rng(0)
    found = {}
    for name in "abcd":
        ward, age, arm = rng.integers(0, 8, rows), rng.normal(60, 9, rows), rng.integers(0, 2, rows)
        eta = 0.03 * (age - 60) + 0.5 * arm - 0.5 + 0.5 * (rng.normal(size=8)[ward] + rng.normal())
        found[name] = pd.DataFrame({"age": age, "arm": arm, "ward": ward.astype(str), "y": _events(rng, eta)})
    return found


def cases(quick: bool) -> dict[str, Case]:
    """By their names in the figures: from the cheapest answers to those with effects."""
    logistic = fedppl.FederatedModel(patients.logistic, ["beta"])
    found: dict[str, Case] = {"logistic 300": (logistic, sites(300, 5, _events))}
    ward = {name: {**data, "ward": np.arange(600) % 8} for name, data in sites(600, 3, _normal).items()}
    found["wards 600"] = fedppl.FederatedModel(wards, ["beta", "sd", "tau"]), ward
    if quick:
        return found
    found["logistic 1500"] = logistic, sites(1500, 5, _events)
    found["poisson 2000"] = fedppl.FederatedModel(patients.counts, ["beta"]), sites(2000, 5, _counts)
    found["normal 1500"] = fedppl.FederatedModel(patients.normal, ["beta", "sd"]), sites(1500, 5, _normal)
    found["two effects 600"] = fedppl.formula("y ~ age + arm + (1 | site/ward)", family="bernoulli"), _frames(600)
    return found


def _normal(rng: Any, eta: Any) -> Any:
    return eta + rng.normal(size=len(eta))


def _counts(rng: Any, eta: Any) -> Any:
    return rng.poisson(np.exp(eta))


def seconds(case: Case, algorithm: Any) -> tuple[float, float, int]:
    """CPU seconds of the rule and of the answers, in one fit, and how many requests there were; the rule's first."""
    spent, lock = {"rule": 0.0, "answer": 0.0, "requests": 0.0}, threading.Lock()

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def measured(*args: Any) -> Any:
            started = time.thread_time()
            found = call(*args)
            with lock:
                spent[name] += time.thread_time() - started
                spent["requests"] += name == "answer"
            return found

        return measured

    rules = fedppl.Policy(sums="optional", requests=1000, points=10**7, parameters_per_row=np.inf)
    with (
        mock.patch("fedppl.engine.guard.refuse_points", timed("rule", few_rows.refuse_points)),
        mock.patch("fedppl.engine.guard.refuse_model", timed("rule", few_rows.refuse_model)),
        mock.patch.object(answer, "_alone", timed("answer", answer._alone)),
    ):
        engine = fedppl.InProcess(workers=1, policy=rules)
        fedppl.fit(*case, algorithm, engine=engine, progressbar=False, random_seed=0)
    return spent["rule"], spent["answer"], int(spent["requests"])


def run(quick: bool) -> dict[str, Any]:
    """Milliseconds a request, what a declaration costs once, and the rule's share of an answer: a tenth is wanted."""
    figures: dict[str, dict[str, float]] = {}
    for name, case in cases(quick).items():
        algorithm = fedppl.Sums(starts=1) if name == "logistic 300" else fedppl.EP()
        first = seconds(case, algorithm)[0]
        rule, answers, requests = seconds(case, algorithm)
        figures[name] = {
            "once_s": first - rule,
            "rule_ms": 1e3 * rule / requests,
            "answer_ms": 1e3 * answers / requests,
            "share": rule / answers,
        }
    return {"rule_cost": figures, "rule_cost_met": all(found["share"] <= 0.1 for found in figures.values())}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(run("--quick" in sys.argv), indent=1))
