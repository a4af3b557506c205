"""What values of log f_k give away: rows of a client found again from its answers to `Sums`.

A client holds n rows of a logistic regression whose coefficients φ are all shared, so that
log f_k(φ) = Σ_i log σ(z_i·φ) with z_i = (2 y_i − 1) x_i. Whoever has its answers looks
for rows that give the same values, by least squares from many starts; found is a row that comes within a tenth of a
covariate's sd. The attacker knows n. Beside it stands what a guess from the population finds.

    python benchmarks/reconstruction.py
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
from scipy.optimize import least_squares, linear_sum_assignment
from scipy.special import expit, log_expit

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedppl
from fedppl.types import Array

_NEAR = 0.1  # sds of a covariate


def logistic(X: Any, y: Any) -> pm.Model:
    """Everything but the rows is shared."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        beta = pm.Normal("beta", 0, 2.5, shape=3)
        pm.Bernoulli("obs", logit_p=X @ beta, observed=y)
    return model


def client_of(rng: np.random.Generator, rows: int) -> dict[str, Array]:
    """Rows with three continuous covariates of sd 1."""
    X = rng.normal(size=(rows, 3))
    return {"X": X, "y": (rng.random(rows) < expit(X @ np.array([1.0, -0.5, 0.5]))).astype(int)}


def answers(victim: dict[str, Array], others: dict[str, dict[str, Array]]) -> tuple[Array, Array]:
    """The points at which a client was asked, and what it answered: all that the server has seen of it."""
    seen: list[tuple[Array, Array]] = []
    algorithm = fedppl.Sums(starts=1, points=1024)

    def listening(client: Any, personal: Any, message: Any, rng: Any) -> Any:
        update = algorithm.update_client(client, personal, message, rng)
        if client.client_id == "victim" and "points" in message and len(message["points"]):
            seen.append((np.asarray(message["points"]), np.asarray(update.reply["values"])))
        return update

    model = fedppl.FederatedModel(logistic, ["beta"])
    spied = algorithm._replace(update_client=listening, batch=None)  # clients are asked one by one
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedppl.ConvergenceWarning)
        fedppl.fit(model, {"victim": victim, **others}, spied, progressbar=False, random_seed=1)
    return np.concatenate([at for at, _ in seen]), np.concatenate([values for _, values in seen])


def rebuilt(points: Array, values: Array, rows: int, rng: np.random.Generator, starts: int = 20) -> Array:
    """Rows (n, 3) whose log likelihood is that at all points."""

    def residual(flat: Array) -> Array:
        return np.asarray(log_expit(points @ flat.reshape(rows, 3).T).sum(axis=1) - values)

    def slope(flat: Array) -> Array:
        weights = expit(-(points @ flat.reshape(rows, 3).T))
        return np.asarray((weights[:, :, None] * points[:, None, :]).reshape(len(points), -1))

    best, least = np.zeros((rows, 3)), np.inf
    for _ in range(starts):
        found = least_squares(residual, rng.normal(size=3 * rows), jac=slope, method="trf", max_nfev=200)
        if found.cost < least:
            best, least = found.x.reshape(rows, 3), float(found.cost)
        if least < 1e-16:
            break
    return best


def recovered(guess: Array, truth: Array) -> int:
    """Rows of the guess that are near a row of the truth, each matched with one."""
    apart = np.abs(guess[:, None, :] - truth[None, :, :]).max(axis=2)
    rows, columns = linear_sum_assignment(np.minimum(apart, 1.0))
    return int(np.sum(apart[rows, columns] < _NEAR))


def main(argv: list[str] | None = None) -> None:
    """Attack clients of several sizes with both numbers of points; print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, nargs="+", default=[3, 10, 30, 100])
    parser.add_argument("--points", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    logging.getLogger("fedppl").setLevel(logging.ERROR)
    table = []
    for rows in options.rows:
        rng = np.random.default_rng((options.seed, rows))
        victim, others = client_of(rng, rows), {f"clinic {k}": client_of(rng, 50) for k in range(5)}
        truth = (2 * victim["y"][:, None] - 1) * victim["X"]
        line = {"rows": rows, "by_guessing": recovered(rng.normal(size=(rows, 3)), truth)}
        at, values = answers(victim, others)
        for points in options.points:
            some = rng.permutation(len(at))[:points]
            line[f"found_from_{points}"] = recovered(rebuilt(at[some], values[some], rows, rng), truth)
        table.append(line)
        print(line, flush=True)
    print(json.dumps({"benchmark": "reconstruction", "table": table}))


if __name__ == "__main__":
    main()
