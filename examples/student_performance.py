"""Federated Bayesian lasso and ridge on the final grades of two Portuguese schools (FedLin, section 6.1).

The two schools are the clients. Neither sends a row: each sends sums for standardising (how many pupils, and the
sum and the sum of squares of every numeric column of its *training* half), and then messages about two shared
numbers, log λ and log σ². Beside it, the same hierarchical model and a model with one coefficient vector for both
schools are fitted centrally by NUTS, on all rows in one place.

    python examples/student_performance.py --figure coefficients.png
    python examples/student_performance.py --splits 10 --drop-zero-grades
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import logging
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pymc as pm

import fedppl
from fedppl.models import hm2

ROOT = Path(__file__).resolve().parents[1]
SCHOOLS = {"GP": "Gabriel Pereira", "MS": "Mousinho da Silveira"}
PRIORS = ("lasso", "ridge")
# One split, as the paper prints it: A-RMSE, included predictors at either school, centralised RMSE and number.
PAPER = {"lasso": (0.825, 21, 23, 0.820, 21), "ridge": (0.817, 21, 22, 0.815, 21)}


class School(NamedTuple):
    """One school's design, outcomes, and which pupils are for training."""

    X: pd.DataFrame
    y: pd.Series
    train: np.ndarray


class Split(NamedTuple):
    """One school's rows after standardising."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with student_performance/student-por.csv")
    parser.add_argument("--splits", type=int, default=1, help="number of random 60/40 splits")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first split")
    parser.add_argument("--drop-zero-grades", action="store_true", help="leave out pupils whose final grade is 0")
    parser.add_argument("--draws", type=int, default=1000, help="NUTS draws per chain, two chains")
    parser.add_argument("--figure", type=Path, help="write a forest plot of both schools' coefficients here")
    parser.add_argument("--quick", action="store_true", help="a small run that only shows that everything works")
    options = parser.parse_args(argv)
    if options.splits < 1 or options.draws < 100:
        parser.error("--splits must be at least 1 and --draws at least 100")
    if options.quick:
        options.draws = min(options.draws, 200)
    return options


def find_data(given: Path | None) -> Path:
    """Return the Portuguese course's file, or end with a message that says how to provide it."""
    named = os.environ.get("FEDPPL_DATA")
    folder = given or (Path(named) if named else ROOT.parent / "shared" / "data")
    file = folder / "student_performance" / "student-por.csv"
    if not file.is_file():
        sys.exit(
            f"{file} does not exist. Give the data folder by --data or FEDPPL_DATA; the file is student-por.csv of "
            "data set 320, Student Performance, of the UCI repository."
        )
    return file


def load(file: Path, *, drop_zero_grades: bool) -> pd.DataFrame:
    """Read all pupils, or those whose final grade is not 0."""
    table = pd.read_csv(file, sep=";")
    return table[table["G3"] > 0] if drop_zero_grades else table


def design(table: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return 38 predictors, and the names of the numeric ones among them."""
    predictors = table.drop(columns=["school", "G1", "G2", "G3"])
    numeric = [name for name in predictors if pd.api.types.is_numeric_dtype(predictors[name])]
    binary = [name for name in predictors if name not in numeric and predictors[name].nunique() == 2]
    coded = pd.get_dummies(predictors, drop_first=True, dtype=float)
    dummies = coded.shape[1] - len(numeric) - len(binary)
    assert (len(numeric), len(binary), dummies, coded.shape[1]) == (13, 12, 13, 38), coded.columns
    return coded, numeric


def divide(table: pd.DataFrame, seed: int) -> tuple[dict[str, School], list[str]]:
    """Divide by school, and every school into 60 % for training and 40 % for testing."""
    rng = np.random.default_rng(seed)
    coded, numeric = design(table)
    schools = {}
    for name in SCHOOLS:
        here = (table["school"] == name).to_numpy()
        train = np.zeros(here.sum(), dtype=bool)
        train[rng.permutation(len(train))[: round(0.6 * len(train))]] = True
        schools[name] = School(coded[here], table["G3"][here].astype(float), train)
    return schools, numeric


def sums(rows: pd.DataFrame) -> tuple[int, pd.Series, pd.Series]:
    """Return what a school sends for standardising."""
    return len(rows), rows.sum(), (rows**2).sum()


def standardise(schools: Mapping[str, School], numeric: list[str]) -> dict[str, Split]:
    """Standardise numeric columns and the grade by pooled training statistics, computed from sums alone."""
    columns = {name: school.X[numeric].assign(G3=school.y) for name, school in schools.items()}
    sent = [sums(columns[name][school.train]) for name, school in schools.items()]
    count, total, squares = (sum(part[i] for part in sent) for i in range(3))
    mean = total / count
    sd = np.sqrt(squares / count - mean**2)
    result = {}
    for name, school in schools.items():
        scaled = (columns[name] - mean) / sd
        X, y = school.X.copy(), scaled.pop("G3").to_numpy()
        X[numeric] = scaled
        rows = X.to_numpy(dtype=float)
        result[name] = Split(rows[school.train], y[school.train], rows[~school.train], y[~school.train])
    return result


def a_rmse(splits: Mapping[str, Split], coefficients: Mapping[str, np.ndarray], intercept: float = 0.0) -> float:
    """Average over schools of the root mean squared error of the standardised test grades."""
    errors = [split.y_test - intercept - split.X_test @ coefficients[name] for name, split in splits.items()]
    return float(np.mean([np.sqrt(np.mean(error**2)) for error in errors]))


def federated(prior: str, splits: Mapping[str, Split], names: list[str], options: argparse.Namespace, seed: int) -> Any:
    """Fit HM2 where the rows are."""
    builder = functools.partial(hm2.penalised_regression, prior=prior, coefficients=names)
    model = fedppl.FederatedModel(builder, hm2.PENALISED_SHARED)
    # The lasso has a kink, which rules out Laplace approximations; ridge is Gaussian given φ, where they are exact.
    local = (
        fedppl.local.NUTS(draws=options.draws, tune=options.draws) if prior == "lasso" else fedppl.local.NestedLaplace()
    )
    clients = {name: {"X": split.X, "y": split.y} for name, split in splits.items()}
    return fedppl.fit(
        model,
        clients,
        fedppl.EP(local=local),
        rounds=4 if options.quick and prior == "lasso" else 20,
        engine=fedppl.InProcess(workers=1),
        progressbar=False,
        random_seed=seed,
    )


def central(
    prior: str, splits: Mapping[str, Split], *, per_school: bool, options: argparse.Namespace, seed: int
) -> Any:
    """Fit the hierarchical model (or one θ for both schools) by NUTS on all rows; return E[θ] for each school."""
    X = np.concatenate([split.X for split in splits.values()])
    y = np.concatenate([split.y for split in splits.values()])
    school = np.repeat(np.arange(len(splits)), [len(split.y) for split in splits.values()])
    shape = (len(splits) if per_school else 1, X.shape[1])
    with pm.Model():
        log_lambda, log_sigma2 = pm.Normal("log_lambda", 0, 1), pm.Normal("log_sigma2", 0, 1)
        sigma = pm.math.exp(log_sigma2 / 2)
        scale = sigma / pm.math.exp(log_lambda)
        theta = (pm.Laplace if prior == "lasso" else pm.Normal)("theta", 0, scale, shape=shape)
        mean = (X * theta[school if per_school else np.zeros_like(school)]).sum(axis=1)
        pm.Normal("grade", mean, sigma, observed=y)
        trace = pm.sample(
            options.draws,
            tune=options.draws,
            chains=2,
            cores=1,
            nuts_sampler="nutpie" if importlib.util.find_spec("nutpie") else "pymc",
            random_seed=seed,
            progressbar=False,
            compute_convergence_checks=False,
        )
    means = trace["posterior"]["theta"].mean(("chain", "draw")).values
    return {name: means[k if per_school else 0] for k, name in enumerate(splits)}


def frequentist(splits: Mapping[str, Split], seed: int) -> dict[str, tuple[float, float]]:
    """Pool all rows in OLS, and LassoCV and RidgeCV where scikit-learn is installed: A-RMSE and non-zeros."""
    X = np.concatenate([split.X for split in splits.values()])
    y = np.concatenate([split.y for split in splits.values()])
    with_one = np.column_stack([np.ones(len(X)), X])
    intercept, *slopes = np.linalg.lstsq(with_one, y, rcond=None)[0]
    rows = {"OLS": (a_rmse(splits, dict.fromkeys(splits, np.array(slopes)), float(intercept)), float(len(slopes)))}
    if importlib.util.find_spec("sklearn"):
        from sklearn.linear_model import LassoCV, RidgeCV
        from sklearn.model_selection import KFold

        folds = KFold(10, shuffle=True, random_state=seed)
        for name, estimator in (("LassoCV", LassoCV(cv=folds)), ("RidgeCV", RidgeCV(np.logspace(-2, 4, 61)))):
            fitted = estimator.fit(X, y)
            error = a_rmse(splits, dict.fromkeys(splits, fitted.coef_), float(fitted.intercept_))
            rows[name] = error, float(np.sum(fitted.coef_ != 0))
    return rows


def one_split(table: pd.DataFrame, seed: int, options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    """All fits of one split: figures by name, and the clients' posteriors under each prior."""
    schools, numeric = divide(table, seed)
    splits = standardise(schools, numeric)
    names = list(schools["GP"].X.columns)
    figures: dict[str, float] = {}
    posteriors: dict[str, Any] = {}
    for prior in PRIORS:
        fit = federated(prior, splits, names, options, seed)
        at = {name: fit.client(name, draws=options.draws, chains=2) for name in SCHOOLS}
        means = {name: result["posterior"]["theta"].mean(("chain", "draw")).values for name, result in at.items()}
        figures[f"{prior} federated"] = a_rmse(splits, means)
        for name, result in at.items():
            tests = fedppl.hypotheses(result, var_names=["theta"], ci_prob=0.9)
            figures[f"{prior} included {name}"] = float(tests["excludes_null"].sum())
        same = central(prior, splits, per_school=True, options=options, seed=seed)
        figures[f"{prior} central hierarchical"] = a_rmse(splits, same)
        single = central(prior, splits, per_school=False, options=options, seed=seed)
        figures[f"{prior} central single"] = a_rmse(splits, single)
        figures[f"{prior} rounds"] = float(len(fit.records))
        figures[f"{prior} converged"] = float(fit.status.ok)
        posteriors[prior] = at
    for name, (error, count) in frequentist(splits, seed).items():
        figures[name], figures[f"{name} included"] = error, count
    return figures, posteriors


def show(results: pd.DataFrame, options: argparse.Namespace) -> None:
    """Print the means over splits like the paper's Table 3."""
    mean = results.mean()
    print(f"\nA-RMSE of standardised test grades, mean of {len(results)} split(s); 90 % intervals that exclude 0")
    print(f"{'':28}{'A-RMSE':>8}{'GP':>7}{'MS':>7}   paper, one split")
    for prior in PRIORS:
        hm2_error, at_gp, at_ms, central_error, at_central = PAPER[prior]
        included = [mean[f"{prior} included {name}"] for name in SCHOOLS]
        print(f"{prior + ', federated (HM2)':28}{mean[f'{prior} federated']:8.3f}", end="")
        print(f"{included[0]:7.1f}{included[1]:7.1f}   {hm2_error:.3f}, {at_gp} and {at_ms}")
        print(f"{prior + ', central, same model':28}{mean[f'{prior} central hierarchical']:8.3f}")
        print(f"{prior + ', central, one θ':28}{mean[f'{prior} central single']:8.3f}", end="")
        print(f"{'':14}   {central_error:.3f}, {at_central}")
    for name in ("OLS", "LassoCV", "RidgeCV"):
        if name in mean:
            print(f"{name:28}{mean[name]:8.3f}   {mean[f'{name} included']:.1f} coefficients that are not zero")
    if len(results) > 1:
        print(f"standard deviation over splits (lasso, federated): {results['lasso federated'].std():.3f}")
    if options.quick:
        print("(--quick: too few draws for figures to be quoted)")


def summary(results: pd.DataFrame, options: argparse.Namespace) -> dict[str, Any]:
    """Figures for the last line."""
    line: dict[str, Any] = {"splits": len(results), "pupils": "grade > 0" if options.drop_zero_grades else "all"}
    mean = results.mean()
    worst, excess = [], []
    for prior in PRIORS:
        federated_, same = results[f"{prior} federated"], results[f"{prior} central hierarchical"]
        worst.append(float((federated_ - same).abs().max()))
        excess.append(float(mean[f"{prior} federated"] - mean[f"{prior} central single"]))
        line[prior] = {
            "federated": round(mean[f"{prior} federated"], 4),
            "central_hierarchical": round(mean[f"{prior} central hierarchical"], 4),
            "central_single": round(mean[f"{prior} central single"], 4),
            "included": [round(mean[f"{prior} included {name}"], 1) for name in SCHOOLS],
            "max_abs_difference": round(worst[-1], 5),
            "converged": mean[f"{prior} converged"],
        }
    for name in ("OLS", "LassoCV", "RidgeCV"):
        if name in mean:
            line[name] = {"a_rmse": round(mean[name], 4), "included": round(mean[f"{name} included"], 1)}
    line["max_abs_difference"] = round(max(worst), 5)
    line["max_excess_over_single"] = round(max(excess), 5)
    return line


def figure(posteriors: Mapping[str, Any], path: Path) -> None:
    """Draw means and 90 % intervals of both schools' lasso coefficients."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tables = {
        name: fedppl.hypotheses(result, var_names=["theta"], ci_prob=0.9)
        for name, result in posteriors["lasso"].items()
    }
    labels = [label.removeprefix("theta[").removesuffix("]") for label in tables["GP"].index]
    place = np.arange(len(labels))[::-1]
    canvas, axis = plt.subplots(figsize=(6.5, 9), layout="constrained")
    for shift, (name, table) in zip((0.15, -0.15), tables.items(), strict=True):
        reach = np.stack([table["mean"] - table["ci_low"], table["ci_high"] - table["mean"]])
        axis.errorbar(table["mean"], place + shift, xerr=reach, fmt="o", markersize=3, label=SCHOOLS[name])
    axis.axvline(0, color="grey", linewidth=0.8)
    axis.set_yticks(place, labels, fontsize=8)
    axis.set_xlabel("effect on the final grade, in standard deviations (mean, 90 % interval)")
    axis.margins(y=0.01)
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    canvas.savefig(path, dpi=150)
    print(f"wrote {path}")


def main(argv: list[str] | None = None) -> None:
    """Fit every split, print the table, and one line of JSON."""
    options = arguments(argv)
    if options.figure is not None and importlib.util.find_spec("matplotlib") is None:
        sys.exit("--figure needs matplotlib: pip install 'fedppl[plots]'")
    table = load(find_data(options.data), drop_zero_grades=options.drop_zero_grades)
    logging.getLogger("pymc").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=fedppl.ConvergenceWarning)  # the table says which fits converged
    counts = table["school"].value_counts()
    print(", ".join(f"{full} ({name}): {counts[name]} pupils" for name, full in SCHOOLS.items()))
    rows, first = [], None
    for seed in range(options.seed, options.seed + options.splits):
        figures, posteriors = one_split(table, seed, options)
        rows.append(figures)
        first = first or posteriors
        lasso, ridge = (figures[f"{prior} federated"] for prior in PRIORS)
        gap = max(abs(figures[f"{p} federated"] - figures[f"{p} central hierarchical"]) for p in PRIORS)
        print(f"split {seed}: lasso {lasso:.3f}, ridge {ridge:.3f}; at most {gap:.4f} from the central fit", flush=True)
    results = pd.DataFrame(rows)
    show(results, options)
    if options.figure is not None and first is not None:
        figure(first, options.figure)
    print(json.dumps(summary(results, options)))


if __name__ == "__main__":
    main()
