"""What values of log f_k give away: rows of a client found again from its answers to `Sums`.

A client holds n rows of a logistic regression whose coefficients φ are all shared, so that
log f_k(φ) = Σ_i log σ(z_i·φ) with z_i = (2 y_i − 1) x_i. Whoever has its answers looks
for rows that give the same values, by least squares from many starts; found is a row that comes within a tenth of a
covariate's sd. The attacker knows n. Beside it stands what a guess from the population finds.

With ``--cohort`` the rows are those of five sites together and the answers sums over them, as under masks: the attacker
has values of Σ_k log f_k at the points of as many fits as it takes. Beside what the search finds stands how many rows
the answers would tell whoever searches best: those whose posterior sd is below a tenth in all covariates, by the slopes
at the truth, with the population as prior and answers that are rounded as float64 is, or to multiples of 2⁻²⁰.

    python benchmarks/reconstruction.py
    python benchmarks/reconstruction.py --rows --cohort 30 100 250 --points 1024 4096 --starts 3 --steps 50
    python benchmarks/reconstruction.py --rows --cohort 250 --points 20000 --starts 0
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
_SITES = 5  # of a cohort
_ROUNDED = {"told": 2.0**-53, "told_coarsely": 2.0**-20}  # the first in units of the largest answer


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


def answers(
    clients: dict[str, dict[str, Array]], heard: set[str], wanted: int, points: int = 1024
) -> tuple[Array, Array]:
    """Points at which clients were asked in fits, and sums of what those `heard` answered: all that is seen of them.

    One fit, and more with other seeds until there are as many points as are wanted.
    """
    asked: list[Array] = []
    sums: list[Array] = []
    algorithm = fedppl.Sums(starts=1, points=points)

    def listening(client: Any, personal: Any, message: Any, rng: Any) -> Any:
        update = algorithm.update_client(client, personal, message, rng)
        if client.client_id in heard and len(message["points"]):
            if not asked or not np.array_equal(asked[-1], message["points"]):
                asked.append(np.array(message["points"]))
                sums.append(np.zeros(len(asked[-1])))
            sums[-1] += update.reply["values"]
        return update

    model = fedppl.FederatedModel(logistic, ["beta"])
    spied = algorithm._replace(update_client=listening, batch=None)  # clients are asked one by one
    engine, seed = fedppl.InProcess(workers=1), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedppl.ConvergenceWarning)
        while not seed or sum(map(len, asked)) < wanted:
            seed += 1
            fedppl.fit(model, clients, spied, engine=engine, progressbar=False, random_seed=seed)
    return np.concatenate(asked), np.concatenate(sums)


def rebuilt(points: Array, values: Array, rows: int, rng: np.random.Generator, starts: int, steps: int) -> Array:
    """Rows (n, 3) whose log likelihood is that at all points."""

    def residual(flat: Array) -> Array:
        return np.asarray(log_expit(points @ flat.reshape(rows, 3).T).sum(axis=1) - values)

    best, least = np.zeros((rows, 3)), np.inf
    for _ in range(starts):
        start = rng.normal(size=3 * rows)
        found = least_squares(residual, start, jac=lambda flat: slopes(points, flat), method="trf", max_nfev=steps)
        if found.cost < least:
            best, least = found.x.reshape(rows, 3), float(found.cost)
        if least < 1e-16:
            break
    return best


def slopes(points: Array, flat: Array) -> Array:
    """Derivatives of the log likelihood at all points by rows (S, 3 n)."""
    weights = expit(-(points @ flat.reshape(-1, 3).T))
    return np.asarray((weights[:, :, None] * points[:, None, :]).reshape(len(points), -1))


def told(points: Array, sd: float, truth: Array) -> int:
    """Rows that answers with errors of this sd tell to a tenth of a sd, by slopes at the truth, whatever the search."""
    # Precisions are those of J'J / sd² + 1, of which the 1 is the population's.
    _, singular, axes = np.linalg.svd(np.linalg.qr(slopes(points, truth.ravel()) / sd, mode="r"))
    precisions = 1.0 + np.append(singular, np.zeros(len(axes) - len(singular))) ** 2
    variances = np.sum(axes**2 / precisions[:, None], axis=0)
    return int(np.sum(np.all(np.sqrt(variances.reshape(-1, 3)) < _NEAR, axis=1)))


def recovered(guess: Array, truth: Array) -> int:
    """Rows of the guess that are near a row of the truth, each matched with one."""
    apart = np.abs(guess[:, None, :] - truth[None, :, :]).max(axis=2)
    rows, columns = linear_sum_assignment(np.minimum(apart, 1.0))
    return int(np.sum(apart[rows, columns] < _NEAR))


def clients_of(rng: np.random.Generator, rows: int, cohort: bool) -> tuple[dict[str, dict[str, Array]], set[str]]:
    """Clients, and those whose answers are heard, who have the rows: one of six, or all sites of a cohort."""
    victim = client_of(rng, rows)
    if not cohort:
        return {"victim": victim, **{f"clinic {k}": client_of(rng, 50) for k in range(5)}}, {"victim"}
    parts = {name: np.array_split(column, _SITES) for name, column in victim.items()}
    sites = {f"site {k}": {name: part[k] for name, part in parts.items()} for k in range(_SITES)}
    return sites, set(sites)


def attacked(rows: int, cohort: bool, options: argparse.Namespace) -> dict[str, Any]:
    """One line of the table."""
    rng = np.random.default_rng((options.seed, rows))
    clients, heard = clients_of(rng, rows, cohort)
    truth = np.concatenate([(2 * clients[name]["y"][:, None] - 1) * clients[name]["X"] for name in sorted(heard)])
    line = {"cohort_rows" if cohort else "rows": rows, "by_guessing": recovered(rng.normal(size=(rows, 3)), truth)}
    at, values = answers(clients, heard, max(options.points) if cohort else 0)
    line["asked_at"] = len(at)
    for points in options.points:
        some = rng.permutation(len(at))[:points]
        if options.starts:
            guess = rebuilt(at[some], values[some], rows, rng, options.starts, options.steps)
            line[f"found_from_{points}"] = recovered(guess, truth)
        for name, rounded in _ROUNDED.items() if cohort else ():
            sd = rounded * (np.abs(values).max() if name == "told" else 1.0)
            line[f"{name}_by_{points}"] = told(at[some], sd, truth)
    return line


def main(argv: list[str] | None = None) -> None:
    """Attack clients and cohorts of several sizes with each number of points; print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, nargs="*", default=[3, 10, 30, 100], help="of a client alone")
    parser.add_argument("--cohort", type=int, nargs="*", default=[], help="rows of all sites together")
    parser.add_argument("--points", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--starts", type=int, default=20, help="of the search for rows; 0 does not search")
    parser.add_argument("--steps", type=int, default=200, help="of each start")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    logging.getLogger("fedppl").setLevel(logging.ERROR)
    table = []
    for rows, cohort in [*((rows, False) for rows in options.rows), *((rows, True) for rows in options.cohort)]:
        table.append(attacked(rows, cohort, options))
        print(table[-1], flush=True)
    print(json.dumps({"benchmark": "reconstruction", "table": table}))


if __name__ == "__main__":
    main()
