"""What default settings make of models that are hard: declared centred, with many correlations, coefficients or items.

Simulated data sets, each fit by `fedppl.fit` with no algorithm named. A line of JSON for each: status, the algorithm
that it ended by, CPU seconds (compiling included, of the first of a kind) and, for as many data sets of a kind as
``--reference`` says, every shared variable against nutpie on pooled rows, with effects standardised:
z = (mean - theirs) / their sd and r = sd / theirs, on the scale on which they are declared. The last line counts.

- centred: a logistic random intercept, ``a ~ Normal(mu, tau)``, 8 to 12 clients of 5 to 40 rows.
- lkj: 3, 4 and 5 correlated effects under an LKJ prior, binary and Gaussian outcomes.
- fifty: fifty coefficients that all share, of a linear and of a logistic regression.
- random_arm: ``(1 + arm | hospital)`` by a formula, nine hospitals of 20 to 300 rows; binary, counts and Gaussian.
- growth: quadratic curves of 8 plots, their three coefficients correlated.
- items: item response with discriminations, four schools of 25 pupils, without and with a level of each school.

    python benchmarks/hard_models.py --parts centred --sets 40 --reference 40
    python benchmarks/hard_models.py --parts random_arm --sets 20 --reference 4
    python benchmarks/hard_models.py --parts fifty growth items lkj --sets 3 --reference 3
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pymc as pm
from pytensor.tensor import as_tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedppl
from benchmarks._exactness.reference import found_again, reference
from fedppl.types import Array

_ESS, _ESS_OF_SQUARES, _MOST_DRAWS = 10_000, 6_000, 30_000  # the second: sds within 1 %
_WRONG_Z, _WRONG_R = 0.1, 0.05
_STAGES = ("I", "II", "III", "IV")


class Case(NamedTuple):
    """A model with a data set, and the same with all rows in one place."""

    kind: str
    model: Any
    data: Any  # by client, or a table
    by: str | None  # the column of clients
    pooled: Callable[[], pm.Model]
    names: tuple[str, ...]  # that are compared


def _expit(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _by_client(columns: Mapping[str, Array], of: Array) -> dict[str, dict[str, Array]]:
    return {f"client {k}": {name: values[of == k] for name, values in columns.items()} for k in np.unique(of)}


# A random intercept ---------------------------------------------------------------------------------------------------


def intercept(x: Any, y: Any) -> pm.Model:
    """A client's rows, its level declared about the common one."""
    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y", y)
        mu, tau, slope = pm.Normal("mu", 0, 2), pm.HalfNormal("tau", 1), pm.Normal("slope", 0, 2)
        a = pm.Normal("a", mu, tau)
        pm.Bernoulli("obs", logit_p=a + slope * x, observed=y)
    return model


def _intercepts(x: Array, y: Array, of: Array) -> pm.Model:
    with pm.Model() as model:
        mu, tau, slope = pm.Normal("mu", 0, 2), pm.HalfNormal("tau", 1), pm.Normal("slope", 0, 2)
        a = mu + tau * pm.Normal("z", shape=int(of.max()) + 1)
        pm.Bernoulli("obs", logit_p=a[of] + slope * x, observed=y)
    return model


def centred(seed: int) -> list[Case]:
    """Levels that differ by .1 to 1.2, so that some data sets say that they do, and others do not."""
    rng = np.random.default_rng([11, seed])
    of = np.repeat(np.arange(clients := rng.integers(8, 13)), rng.integers(5, 41, clients))
    x, a = rng.normal(size=len(of)), rng.normal(0.3, rng.uniform(0.1, 1.2), clients)
    y = (rng.random(len(of)) < _expit(a[of] + 0.7 * x)).astype(int)
    model = fedppl.FederatedModel(intercept, ["mu", "tau", "slope"])
    pooled = functools.partial(_intercepts, x, y, of)
    return [Case("centred", model, _by_client({"x": x, "y": y}, of), None, pooled, ("mu", "tau", "slope"))]


# Correlated effects ---------------------------------------------------------------------------------------------------


def _spread(count: int) -> tuple[Any, Any]:
    """Means of correlated effects, and the root of their covariance."""
    sds = pm.HalfNormal.dist(1.0, shape=count)
    chol, _, _ = pm.LKJCholeskyCov("chol", n=count, eta=2.0, sd_dist=sds, compute_corr=True)
    return pm.Normal("mu", 0, 1.5, shape=count), chol


def _observe(eta: Any, y: Any, *, binary: bool) -> None:
    if binary:
        pm.Bernoulli("obs", logit_p=eta, observed=y)
    else:
        pm.Normal("obs", eta, pm.HalfNormal("sigma", 1), observed=y)


def slopes(X: Any, y: Any, count: int, binary: bool) -> pm.Model:
    """A client's rows, whose coefficients are all its own."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        mu, chol = _spread(count)
        _observe(X @ pm.MvNormal("beta", mu, chol=chol), y, binary=binary)
    return model


def _all_slopes(X: Array, y: Array, of: Array, *, binary: bool) -> pm.Model:
    with pm.Model() as model:
        mu, chol = _spread(X.shape[1])
        beta = mu + pm.Normal("z", shape=(int(of.max()) + 1, X.shape[1])) @ chol.T
        _observe((beta[of] * X).sum(axis=1), y, binary=binary)
    return model


def _of_slopes(kind: str, X: Array, y: Array, of: Array, *, binary: bool) -> Case:
    shared = ("mu", "chol", *(() if binary else ("sigma",)))
    built = functools.partial(slopes, count=X.shape[1], binary=binary)
    model, pooled = fedppl.FederatedModel(built, list(shared)), functools.partial(_all_slopes, X, y, of, binary=binary)
    names = ("mu", "chol_stds", "chol_corr", *shared[2:])
    return Case(kind, model, _by_client({"X": X, "y": y}, of), None, pooled, names)


def lkj(seed: int) -> list[Case]:
    """12 clients of 10 to 80 rows."""
    cases = []
    for count in (3, 4, 5):
        for binary in (True, False):
            rng = np.random.default_rng([12, seed, count, binary])
            of = np.repeat(np.arange(12), rng.permutation(np.round(np.geomspace(10, 80, 12)).astype(int)))
            X = np.column_stack([np.ones(len(of)), rng.normal(size=(len(of), count - 1))])
            root = np.linalg.cholesky(0.3 * (0.7 * np.eye(count) + 0.3))
            beta = np.resize([-0.5, 0.8, 0.3], count) + rng.normal(size=(12, count)) @ root.T
            eta = np.sum(beta[of] * X, axis=1)
            y = (rng.random(len(of)) < _expit(eta)).astype(int) if binary else eta + 0.8 * rng.normal(size=len(of))
            cases.append(_of_slopes(f"lkj {count} {'binary' if binary else 'gaussian'}", X, y, of, binary=binary))
    return cases


def growth(seed: int) -> list[Case]:
    """Eight plots, each measured 5 to 9 times."""
    rng = np.random.default_rng([13, seed])
    of = np.repeat(np.arange(8), rng.integers(5, 10, 8))
    t = rng.uniform(-1, 1, len(of))
    X = np.stack([np.ones(len(of)), t, t**2], axis=1)
    root = np.linalg.cholesky(np.array([[0.5, 0.25, 0.0], [0.25, 0.4, -0.1], [0.0, -0.1, 0.2]]))
    beta = np.array([1.0, 1.5, -0.7]) + rng.normal(size=(8, 3)) @ root.T
    y = np.sum(beta[of] * X, axis=1) + 0.3 * rng.normal(size=len(of))
    return [_of_slopes("growth", X, y, of, binary=False)]


# Many coefficients ----------------------------------------------------------------------------------------------------


def coefficients(X: Any, y: Any, count: int, binary: bool) -> pm.Model:
    """Rows of any number of clients; everything is shared."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        _observe(pm.Normal("intercept", 0, 2) + X @ pm.Normal("beta", 0, 1, shape=count), y, binary=binary)
    return model


def fifty(seed: int) -> list[Case]:
    """Ten clients of 60 rows."""
    cases = []
    for binary in (False, True):
        rng = np.random.default_rng([14, seed, binary])
        X, of = rng.normal(size=(600, 50)), np.repeat(np.arange(10), 60)
        eta = 0.3 + X @ rng.normal(0, 0.3, 50)
        y = (rng.random(600) < _expit(eta)).astype(int) if binary else eta + rng.normal(size=600)
        built = functools.partial(coefficients, count=50, binary=binary)
        shared = ["intercept", "beta", *([] if binary else ["sigma"])]
        model, kind = fedppl.FederatedModel(built, shared), f"fifty {'binary' if binary else 'gaussian'}"
        pooled = functools.partial(built, X, y)
        cases.append(Case(kind, model, _by_client({"X": X, "y": y}, of), None, pooled, tuple(shared)))
    return cases


# A formula whose arm varies -------------------------------------------------------------------------------------------


def _trial(rng: np.random.Generator) -> tuple[pd.DataFrame, Array]:
    """Nine hospitals, their levels and the linear predictor."""
    of = np.repeat(np.arange(9), [20, 35, 48, 70, 90, 120, 160, 220, 300])
    n = len(of)
    frame = pd.DataFrame({"hospital": [f"h{k}" for k in of], "age": rng.normal(62, 10, n)})
    frame["sex"], frame["arm"] = rng.choice(["f", "m"], n), rng.choice(["control", "drug"], n)
    frame["stage"] = rng.choice(_STAGES, n)
    level, effect = rng.normal(0, 0.6, 9), -0.5 + rng.normal(0, rng.uniform(0.0, 0.4), 9)
    eta = 0.02 * (frame["age"] - 62) + effect[of] * (frame["arm"] == "drug") + level[of]
    return frame, np.asarray(eta + 0.4 * frame["stage"].map({s: i for i, s in enumerate(_STAGES)}), dtype=float)


def _hospitals(frame: pd.DataFrame, family: str) -> pm.Model:
    """The formula's model by hand, with its default priors."""
    y, of = frame["y"].to_numpy(dtype=float), pd.factorize(frame["hospital"])[0]
    drug = (frame["arm"] == "drug").to_numpy(dtype=float)
    stages = [(frame["stage"] == s).to_numpy(dtype=float) for s in _STAGES[1:]]
    parts = {
        "center(age)": (frame["age"] - frame["age"].mean()).to_numpy()[:, None],
        "sex": (frame["sex"] == "m").to_numpy(dtype=float)[:, None],
        "arm": drug[:, None],
        "stage": np.stack(stages, axis=1),
    }
    unit = float(y.std()) if family == "gaussian" else 1.0
    mean = float(y.mean())
    center = mean if family == "gaussian" else np.log(mean if family == "poisson" else mean / (1 - mean))
    with pm.Model() as model:
        eta, at = 0.0, 0.0
        for name, X in parts.items():
            beta = pm.Normal(name, 0, 2.5 * unit / X.std(axis=0), shape=X.shape[1])
            eta, at = eta + as_tensor(X) @ beta, at + X.mean(axis=0) @ beta
        sds = pm.HalfNormal.dist(np.array([unit, unit / np.sqrt(np.mean(drug**2))]), shape=2)
        root, corr, spread = pm.LKJCholeskyCov("root", n=2, eta=2.0, sd_dist=sds, store_in_trace=False)
        pm.Deterministic("hospital_sd", spread)
        pm.Deterministic("hospital_corr", corr[np.tril_indices(2, -1)])
        effects = pm.Normal("z", shape=(9, 2)) @ root.T
        eta = eta + pm.Normal("Intercept", center - at, 2.5 * unit) + effects[of, 0] + effects[of, 1] * drug
        if family == "gaussian":
            pm.Normal("obs", eta, pm.HalfNormal("sigma", 2 * unit), observed=y)
        elif family == "poisson":
            pm.Poisson("obs", pm.math.exp(eta), observed=y)
        else:
            pm.Bernoulli("obs", logit_p=eta, observed=y)
    return model


def random_arm(seed: int) -> list[Case]:
    """An effect of the arm that varies by 0 to .4."""
    cases = []
    for number, family in enumerate(("bernoulli", "poisson", "gaussian")):
        rng = np.random.default_rng([15, seed, number])
        frame, eta = _trial(rng)
        if family == "bernoulli":
            frame["y"] = (rng.random(len(eta)) < _expit(eta - 1)).astype(int)
        else:
            frame["y"] = rng.poisson(np.exp(eta)) if family == "poisson" else eta + rng.normal(size=len(eta))
        model = fedppl.formula("y ~ center(age) + sex + arm + stage + (1 + arm | hospital)", family=family)
        names = ("Intercept", "center(age)", "sex", "arm", "stage", "hospital_sd", "hospital_corr")
        names += ("sigma",) if family == "gaussian" else ()
        pooled = functools.partial(_hospitals, frame, family)
        cases.append(Case(f"random_arm {family}", model, frame, "hospital", pooled, names))
    return cases


# Item response --------------------------------------------------------------------------------------------------------


def _items(count: int) -> tuple[Any, Any]:
    return pm.LogNormal("slope", 0, 0.5, shape=count), pm.Normal("difficulty", 0, 1.5, shape=count)


def school(right: Any, count: int, leveled: bool) -> pm.Model:
    """Whether pupils (rows) solved items (columns)."""
    pupils = np.shape(right)[0]
    with pm.Model() as model:
        right = pm.Data("right", right)
        slope, difficulty = _items(count)
        level = pm.Normal("level", 0, pm.HalfNormal("tau", 1)) if leveled else 0.0
        ability = pm.Normal("ability", level, 1, shape=pupils)
        pm.Bernoulli("obs", logit_p=slope * (ability[:, None] - difficulty), observed=right)
    return model


def _schools(right: Array, of: Array, *, leveled: bool) -> pm.Model:
    with pm.Model() as model:
        slope, difficulty = _items(right.shape[1])
        level = (pm.HalfNormal("tau", 1) * pm.Normal("z", shape=int(of.max()) + 1))[of] if leveled else 0.0
        ability = level + pm.Normal("ability", shape=len(of))
        pm.Bernoulli("obs", logit_p=slope * (ability[:, None] - difficulty), observed=right)
    return model


def items(seed: int) -> list[Case]:
    """Six items."""
    cases = []
    for leveled in (False, True):
        rng = np.random.default_rng([16, seed, leveled])
        of = np.repeat(np.arange(4), 25)
        ability = rng.normal(size=100) + leveled * rng.normal(0, 0.6, 4)[of]
        slope, difficulty = np.exp(rng.normal(0, 0.4, 6)), np.linspace(-1.2, 1.2, 6)
        right = (rng.random((100, 6)) < _expit(slope * (ability[:, None] - difficulty))).astype(int)
        shared = ("slope", "difficulty", *(("tau",) if leveled else ()))
        model = fedppl.FederatedModel(functools.partial(school, count=6, leveled=leveled), list(shared))
        pooled, kind = functools.partial(_schools, right, of, leveled=leveled), f"items{' leveled' if leveled else ''}"
        cases.append(Case(kind, model, _by_client({"right": right}, of), None, pooled, shared))
    return cases


# The comparison -------------------------------------------------------------------------------------------------------

PARTS: Mapping[str, Callable[[int], list[Case]]] = {
    "centred": centred,
    "fifty": fifty,
    "growth": growth,
    "lkj": lkj,
    "items": items,
    "random_arm": random_arm,
}


def compared(case: Case, seed: int, kept: Path | None, *, held: bool) -> dict[str, Any]:
    """A data set's row."""
    started = time.process_time()
    fit = fedppl.fit(case.model, case.data, by=case.by, progressbar=False, random_seed=seed)
    row: dict[str, Any] = {
        "kind": case.kind,
        "seed": seed,
        "status": fit.status.value,
        "by": fit.algorithm.name,
        "cpu_s": round(time.process_time() - started, 1),
        "rounds": len(fit.records),
    }
    if fit.message:
        row["message"] = fit.message
    if held:
        row |= _held(case, fit, seed, kept)
    print(json.dumps(row), flush=True)
    return row


def _held(case: Case, fit: Any, seed: int, kept: Path | None) -> dict[str, Any]:
    """A fit against its reference."""
    enough: dict[str, Any] = {"ess": _ESS, "ess_of_squares": _ESS_OF_SQUARES, "most": _MOST_DRAWS, "tune": 1000}
    # Correlations have a diagonal of ones, of which nothing can be told.
    judged = [name for name in case.names if name != "chol_corr"]

    def sample() -> tuple[Any, dict[str, float]]:
        posterior, quality = reference(case.pooled(), judged, 4000, seed, divergences=10, **enough)
        return posterior[list(case.names)], quality

    theirs, quality = sample() if kept is None else found_again(sample, kept / f"{case.kind} {seed}.npz")
    of: dict[str, list[list[float]]] = {}
    for name in case.names:
        draws = np.asarray(theirs[name].values, dtype=float)
        draws = draws.reshape(draws.shape[0] * draws.shape[1], -1)
        mean, sd = draws.mean(axis=0), draws.std(axis=0)
        table = fit.summary(name)
        varies = sd > 1e-9
        z = (table["mean"].to_numpy() - mean)[varies] / sd[varies]
        r = table["sd"].to_numpy()[varies] / sd[varies]
        of[name] = [[round(float(a), 3), round(float(b), 3)] for a, b in zip(z, r, strict=True)]
    pairs = [pair for found in of.values() for pair in found]
    z, low, high = max(abs(z) for z, _ in pairs), min(r for _, r in pairs), max(r for _, r in pairs)
    right = z < _WRONG_Z and 1 - _WRONG_R < low and high < 1 + _WRONG_R
    return {"z": z, "r": [low, high], "right": right, "of": of, "reference": quality}


def counted(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By kind, how many converged, and of those that are compared how far off they are."""
    told: dict[str, Any] = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        good = [row for row in own if row["status"] == "converged"]
        held = [row for row in good if "z" in row]
        told[kind] = {"sets": len(own), "converged": len(good), "compared": len(held)}
        told[kind] |= {"by": sorted({row["by"] for row in own}), "cpu_s": [row["cpu_s"] for row in own]}
        if held:
            told[kind] |= {
                "right": sum(row["right"] for row in held),
                "z": max(row["z"] for row in held),
                "r": [min(row["r"][0] for row in held), max(row["r"][1] for row in held)],
            }
    return told


def main(argv: list[str] | None = None) -> None:
    """Fit the data sets of the parts, with a line of JSON for each and one at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--kinds", nargs="+", help="of a part, those that begin so")
    parser.add_argument("--first", type=int, default=0, help="the first data set's seed")
    parser.add_argument("--sets", type=int, default=3, help="data sets of each kind")
    parser.add_argument("--reference", type=int, default=0, help="of these, how many are held against nutpie")
    parser.add_argument("--references", type=Path, help="folder that keeps draws of nutpie by kind and seed")
    options = parser.parse_args(argv)
    logging.getLogger("fedppl").setLevel(logging.ERROR)  # the lines say what converged
    warnings.simplefilter("ignore", fedppl.ConvergenceWarning)
    rows = []
    for part in options.parts:
        for seed in range(options.first, options.first + options.sets):
            cases = [one for one in PARTS[part](seed) if one.kind.startswith(tuple(options.kinds or [""]))]
            rows += [
                compared(one, seed, options.references, held=seed < options.first + options.reference) for one in cases
            ]
    print(json.dumps({"benchmark": "hard_models", "kinds": counted(rows)}))


if __name__ == "__main__":
    main()
