"""What a server learns beside its requests: from two runs about nearly the same rows, from errors, from an agreement.

    python -m benchmarks._attacks.told [--quick]

A bit counts as told where two data sets that differ as the attack wants are answered in two ways.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm

import fedppl
from fedppl import audit
from fedppl.contracts import Failure, Request
from fedppl.formulas.agreement import tell
from fedppl.sites import node as _node
from fedppl.sites import wire
from fedppl.types import Array

ROWS = 400
POLICY = fedppl.Policy(sums="optional")
Rows = dict[str, Array]


def logistic(X: Any, y: Any) -> Any:
    """Four coefficients, all shared."""
    with pm.Model() as model:
        beta = pm.Normal("beta", 0, 2.5, shape=4)
        pm.Bernoulli("died", logit_p=pm.math.dot(pm.Data("X", X), beta), observed=pm.Data("y", y))
    return model


def rows_of(seed: int) -> Rows:
    """A site's."""
    rng = np.random.default_rng(seed)
    return {"X": rng.normal(size=(ROWS, 4)), "y": rng.integers(0, 2, ROWS)}


def answer(folder: Path, rows: Rows, run: str, builder: Callable[..., Any] = logistic) -> str | Array:
    """A gradient, or why there is none; every message comes to a process that has nothing but the folder."""
    site = _node.Node(
        f"{folder} {run} {id(rows)}",
        fedppl.FederatedModel(builder, ["beta"]),
        fedppl.EP(),
        lambda config: rows,
        lambda config: "site",
        folder,
        1,
        1,
        POLICY,
    )
    told = _node.introduce(site, {}, None, {})[1]
    if "error" in told:
        return str(told["error"])
    message = {"point": np.full(4, 0.1), "move": np.zeros(4), "prior_share": np.array(0.0)}
    request = Request("site", 1, 1, (1,), message, run)
    reply = wire.unpack_reply(*_node.answer_request(site, {}, None, wire.pack_request(request)))
    return reply.reason if isinstance(reply, Failure) else np.asarray(reply.message["gradient"])


def between_runs(tries: int) -> dict[str, Any]:
    """The same point in two runs, where rows were added, removed or edited in between."""
    found, rules = 0, set()
    for seed in range(tries):
        for changed in (1, 2, 5, 9):
            rows = rows_of(seed)
            less = {name: value[changed:] for name, value in rows.items()}
            edited = {**rows, "X": np.where(np.arange(ROWS)[:, None] < changed, 1.0, rows["X"])}
            for first, second in ((less, rows), (rows, less), (rows, edited)):
                with tempfile.TemporaryDirectory() as folder:
                    one, other = (answer(Path(folder), part, f"run {i}") for i, part in enumerate((first, second)))
                    assert isinstance(one, np.ndarray), one
                    found += isinstance(other, np.ndarray)
                    last = [line["refused"] for line in audit.lines(Path(folder)) if line["refused"]]
                    rules |= {rule.partition(":")[0] for rule in last}
    return {"between_runs_answered": found, "between_runs_met": not found and rules == {"changed_rows"}}


def capped(limit: float) -> Callable[..., Any]:
    """A builder that works where no value lies above a limit."""

    def builder(X: Any, y: Any) -> Any:
        return logistic(np.minimum(X, limit), y)

    return builder


def quoting(X: Any, y: Any) -> Any:
    """A builder that fails in words of its own."""
    raise fedppl.DeclarationError(f"{float(X[0, 0])!r}")


def introductions() -> dict[str, Any]:
    """The largest value by bisection, each step a declaration of its own; and errors that quote a row."""
    rows = rows_of(0)
    with tempfile.TemporaryDirectory() as folder:
        said = [answer(Path(folder), rows, f"run {k}", capped(1.0 + 0.05 * k)) for k in range(3 * int(POLICY.requests))]
        looked_at = sum("own log" in str(one) and "policy" not in str(one) for one in said)
    with tempfile.TemporaryDirectory() as folder:
        quoted = repr(float(rows["X"][0, 0])) in str(answer(Path(folder), rows, "run", quoting))
    few = {name: value[:1] for name, value in rows.items()}
    with tempfile.TemporaryDirectory() as folder:
        told = {
            answer(Path(folder), few, f"run {k}", one) for k, one in enumerate((capped(-9.0), capped(9.0), quoting))
        }
    met = not quoted and len(told) == 1 and looked_at <= POLICY.requests + 1
    return {"introductions_looked_at": looked_at, "introductions_met": met}


def agreements(tries: int) -> dict[str, Any]:
    """Whether anybody of 400 has a level, or a value; and how far away one lies."""
    bits = far = moved = 0
    for seed in range(tries):
        rng = np.random.default_rng(seed)
        common, x = rng.choice(["a", "b", "c"], ROWS).astype(object), rng.normal(50, 9, ROWS)
        told = []
        for few in range(10):
            arm, sign = np.append(common, ["hiv"] * few), np.append(np.zeros(ROWS), np.ones(few))
            told.append(tell({"arm": arm, "sign": sign[-ROWS:]}, ["arm", "sign"], [], POLICY.agreement))
        bits += any(one != told[0] for one in told)
        away = [tell({"x": np.append(x[1:], 50 + 9 * k)}, ["x"], [], POLICY.agreement) for k in (3.5, 6, 1e4)]
        far += any(one != away[0] for one in away)
        moved += away[0] != tell({"x": x}, ["x"], [], POLICY.agreement)
    return {
        "agreement_bits": bits,
        "agreement_distances": far,
        "agreement_moved": moved / tries,
        "agreement_met": not bits and not far and moved <= 0.05 * tries,
    }


def run(quick: bool = False) -> dict[str, Any]:
    """All figures."""
    return {**between_runs(1 if quick else 5), **introductions(), **agreements(20 if quick else 400)}


if __name__ == "__main__":
    started = time.process_time()
    print(json.dumps({**run("--quick" in sys.argv), "cpu_s": time.process_time() - started}))
