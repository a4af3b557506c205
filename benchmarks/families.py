"""Formulas of every family against the same models written by hand, and a Gaussian one against statsmodels' REML.

Eight sites of 5 to 200 rows, some without an arm; ``y ~ x + arm + (1 | site)`` or ``(1 + x | site)`` from one data
frame at default settings, against PyMC with all sites in one model, sampled by nutpie (ESS of shared variables at least
4,000, of their squares 2,500). z = (mean - theirs) / their sd, r = sd / theirs, of every shared variable as
`fit.summary` reports it. With ``--builders`` the same declaration stands beside as a builder of
`fedppl.FederatedModel`: CPU seconds of reading, compiling and fitting, each in a process of its own that finds no
compiled model.

Bars: status converged, |z| of common coefficients at most .1, r within 5 %, CPU at most 1.2 of the builder's.

The part `reml` has 60 sites and flat priors, against ``statsmodels.MixedLM`` on pooled rows (skipped without
statsmodels). Bar: coefficients within .05 standard errors.

    python benchmarks/families.py --builders gaussian bernoulli ordinal
    python benchmarks/families.py --parts families --families gamma
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedppl
from benchmarks._exactness.reference import reference
from benchmarks._families import by_hand
from benchmarks._families.cases import CASES, Case, simulate

BARS = {"z": 0.1, "r": 0.05, "cpu": 1.2, "z_of_reml": 0.05}
_ESS, _ESS_OF_SQUARES, _MOST_DRAWS = 4_000, 2_500, 30_000  # the second: sds within 1.4 %


def fitted(case: Case, way: str, seed: int) -> dict[str, Any]:
    """A fit in this process: CPU seconds from the table to the posterior, and the posterior."""
    frame = simulate(case, seed)
    started = time.process_time()
    if way == "formula":
        model = fedppl.formula(case.formula, case.family, constants=dict(case.constants))
        fit = fedppl.fit(model, frame, by="site", progressbar=False, random_seed=seed)
    else:
        model, clients = by_hand.federated(case, frame)
        fit = fedppl.fit(model, clients, progressbar=False, random_seed=seed)
    seconds = time.process_time() - started
    tables = {name: fit.summary(name) for name in by_hand.names(case)}
    return {
        "status": fit.status.value,
        "message": fit.message,
        "rounds": len(fit.records),
        "cpu_s": round(seconds, 2),
        "mean": {name: table["mean"].tolist() for name, table in tables.items()},
        "sd": {name: table["sd"].tolist() for name, table in tables.items()},
    }


def in_a_process(case: Case, way: str, seed: int) -> dict[str, Any]:
    """The same where nothing is compiled yet."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [os.environ.get("PYTENSOR_FLAGS", ""), f"base_compiledir={folder}"]
        done = subprocess.run(
            [sys.executable, __file__, "--families", case.family, "--process", way, "--seed", str(seed)],
            env={**os.environ, "PYTENSOR_FLAGS": ",".join(filter(None, flags))},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{case.family} by {way}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compared(case: Case, draws: int, seed: int, *, builder: bool, first: str) -> dict[str, Any]:
    """A family's row."""
    if builder:
        found = {
            way: in_a_process(case, way, seed) for way in ("formula", "builder")[:: 1 if first == "formula" else -1]
        }
    else:
        found = {"formula": fitted(case, "formula", seed)}
    ours, names = found["formula"], by_hand.names(case)
    enough = {"ess": _ESS, "ess_of_squares": _ESS_OF_SQUARES, "most": _MOST_DRAWS, "tune": 700, "divergences": 10}
    posterior, quality = reference(by_hand.pooled(case, simulate(case, seed)), names, draws, seed, **enough)
    of: dict[str, list[list[float]]] = {}
    for name in names:
        theirs = np.asarray(posterior[name].values, dtype=float)
        theirs = theirs.reshape(theirs.shape[0] * theirs.shape[1], -1)
        mean, sd = theirs.mean(axis=0), theirs.std(axis=0)
        z, r = (np.array(ours["mean"][name]) - mean) / sd, np.array(ours["sd"][name]) / sd
        of[name] = [[round(float(a), 4), round(float(b), 4)] for a, b in zip(z, r, strict=True)]
    z_common = max(abs(z) for name in by_hand.common(case) for z, _ in of[name])
    r = [r for pairs in of.values() for _, r in pairs]
    row: dict[str, Any] = {
        "family": case.family,
        "formula": case.formula,
        "status": ours["status"],
        "rounds": ours["rounds"],
        "z_common": z_common,
        "z_all": max(abs(z) for pairs in of.values() for z, _ in pairs),
        "r": [min(r), max(r)],
        "variables": of,
        "cpu_s": ours["cpu_s"],
        "reference": quality,
        "message": ours["message"],
    }
    bars = {
        "status": ours["status"] == "converged",
        "z": z_common <= BARS["z"],
        "r": max(abs(x - 1) for x in r) <= BARS["r"],
        "ess": quality["ess"] >= _ESS and quality["ess_of_squares"] >= _ESS_OF_SQUARES,
    }
    if builder:
        theirs_too = found["builder"]
        row["cpu_s_of_builder"] = theirs_too["cpu_s"]
        row["cpu_ratio"] = round(ours["cpu_s"] / theirs_too["cpu_s"], 3)
        row["builder_apart"] = round(_apart(ours, theirs_too), 4)
        bars["cpu"] = row["cpu_ratio"] <= BARS["cpu"]
    row["bars"] = bars
    _show(row)
    return row


def _apart(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest difference of a mean, in sds, or of a log sd between two fits."""
    worst = 0.0
    for name, mean in ours["mean"].items():
        a, b = np.array(ours["sd"][name]), np.array(theirs["sd"][name])
        worst = max(worst, float(np.max(np.abs(np.array(mean) - np.array(theirs["mean"][name])) / b)))
        worst = max(worst, float(np.max(np.abs(np.log(a / b)))))
    return worst


def _show(row: dict[str, Any]) -> None:
    missed = [name for name, met in row["bars"].items() if not met]
    parts = [
        f"{row['family']:17s}{row['formula']:44s}{row['status']:10s}",
        f"|z| {row['z_common']:.3f} (all {row['z_all']:.3f}) r {row['r'][0]:.3f} to {row['r'][1]:.3f}",
        f"{row['cpu_s']:.1f} CPU-s, {row.get('cpu_ratio', 'not compared:')} of the builder's",
        f"ESS {row['reference']['ess']}",
        f"missed: {missed}" if missed else "",
    ]
    print("  ".join(parts), flush=True)


def _is_known(case: Case) -> bool:
    try:
        fedppl.formula(case.formula, case.family, constants=dict(case.constants))
    except fedppl.DeclarationError as error:
        print(f"{case.family}: skipped, {error}")
        return False
    return True


def many_sites(seed: int) -> pd.DataFrame:
    """Sixty sites of 5 to 40 rows, some without the drug."""
    rng, parts = np.random.default_rng(seed), []
    for k in range(60):
        n = int(rng.integers(5, 41))
        age = rng.normal(58 + rng.normal(0, 4), 11, n)
        arm = rng.choice(["control", "drug"] if k % 10 else ["control"], n)
        y = 120 + rng.normal(0, 5) + 0.5 * (age - 58) - 4 * (arm == "drug") + rng.normal(0, 12, n)
        parts.append(pd.DataFrame({"site": f"site {k:02d}", "age": age, "arm": arm, "y": y}))
    return pd.concat(parts, ignore_index=True)


def against_reml(seed: int) -> dict[str, Any]:
    """Coefficients, standard errors and variances of a Gaussian mixed model beside those of REML."""
    if importlib.util.find_spec("statsmodels") is None:
        print("reml: skipped, statsmodels is not installed")
        return {"skipped": "statsmodels is not installed"}
    from statsmodels.formula.api import mixedlm

    frame = many_sites(seed)
    flat = {"Intercept": 1e4, "age": 1e3, "arm": 1e3}
    priors = {name: fedppl.Prior("Normal", mu=0.0, sigma=sd) for name, sd in flat.items()}
    priors |= {name: fedppl.Prior("HalfNormal", sigma=1e3) for name in ("site_sd", "sigma")}
    started = time.process_time()
    model = fedppl.formula("y ~ age + arm + (1 | site)", priors=priors)
    fit = fedppl.fit(model, frame, by="site", progressbar=False, random_seed=seed)
    ours = fit.summary()
    seconds = time.process_time() - started
    theirs = mixedlm("y ~ age + arm", frame, groups=frame["site"]).fit(reml=True)
    names = {"Intercept": "Intercept", "age": "age", "arm": "arm[T.drug]"}
    row: dict[str, Any] = {"status": fit.status.value, "rows": len(frame), "cpu_s": round(seconds, 1)}
    for name, other in names.items():
        mean, sd = float(ours.loc[_row(ours, name), "mean"]), float(ours.loc[_row(ours, name), "sd"])
        error = float(theirs.bse_fe[other])
        row[name] = {
            "reml": [round(float(theirs.fe_params[other]), 4), round(error, 4)],
            "fedppl": [round(mean, 4), round(sd, 4)],
            "z": round((mean - float(theirs.fe_params[other])) / error, 4),
            "r": round(sd / error, 4),
        }
    scales = {"site_sd": float(np.sqrt(theirs.cov_re.iloc[0, 0])), "sigma": float(np.sqrt(theirs.scale))}
    for name, value in scales.items():
        row[name] = {"reml": round(value, 4), "fedppl": [round(float(x), 4) for x in ours.loc[name, ["mean", "sd"]]]}
    row["max_z"] = max(abs(row[name]["z"]) for name in names)
    row["bars"] = {"status": fit.status.value == "converged", "z": row["max_z"] <= BARS["z_of_reml"]}
    print(f"reml: {row}", flush=True)
    return row


def _row(table: pd.DataFrame, name: str) -> str:
    return next(str(one) for one in table.index if one == name or str(one).startswith(f"{name}["))


def main(argv: list[str] | None = None) -> None:
    """Run the parts, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = [case.family for case in CASES]
    parser.add_argument("--parts", nargs="+", choices=["families", "reml"], default=["families", "reml"])
    parser.add_argument("--families", nargs="+", choices=known, default=known)
    parser.add_argument("--draws", type=int, default=2_000, help="of each of four chains of the reference")
    parser.add_argument("--builders", nargs="*", choices=known, default=known, help="families that get the CPU ratio")
    parser.add_argument("--process", choices=["formula", "builder"], help=argparse.SUPPRESS)  # one fit, in here
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    logging.getLogger("fedppl").setLevel(logging.ERROR)  # the table says what converged
    warnings.simplefilter("ignore", fedppl.ConvergenceWarning)
    chosen = [case for case in CASES if case.family in options.families and _is_known(case)]
    if options.process:
        print(json.dumps(fitted(chosen[0], options.process, options.seed)))
        return
    line: dict[str, Any] = {"benchmark": "families"}
    if "families" in options.parts:
        line["families"] = [
            compared(
                case,
                options.draws,
                options.seed,
                builder=case.family in options.builders,
                first="builder" if number % 2 else "formula",
            )
            for number, case in enumerate(chosen)
        ]
    if "reml" in options.parts:
        line["reml"] = against_reml(options.seed)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
