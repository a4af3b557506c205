"""A treatment effect from rare events at twelve sites: a formula, the usual meta-analysis, and all rows in one place.

Rates of .5 to 2 % without the drug, sites of 30 to 2,000 patients, truths from the prior. Compared, trial by trial, are
the posterior mean and the 90 % interval of the log odds ratio by

- fedppl: ``prop(events, patients) ~ arm + (1 | site)`` (with ``--varying`` ``(1 + arm | site)``), default settings;
- pooled: the same model in PyMC, all sites in it, sampled by nutpie, compiled once;
- fixed, random: inverse-variance means of sites' log odds ratios, with one half added where a count is 0 and sites
  without any event left out; `random` with DerSimonian and Laird's variance between sites.

Given a trial, its truth is a draw from the pooled posterior. So beside the error of each method and whether its
interval holds the truth stand what these are on average over that posterior (``expected``): the same quantities, with
much less Monte Carlo error.

Bars: coverage of fedppl within .02 of pooled, RMSE within 3 % of pooled. Finished trials are kept in ``--file``, and a
run goes on from there.

    python benchmarks/rare_events.py --repetitions 1000 --file rare_events.jsonl
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedppl
from benchmarks._rare import trials
from benchmarks._rare.trials import BETWEEN, EFFECT, RATE, SITES, VARYING, Estimate, Trial
from fedppl.types import Array

METHODS = ("fedppl", "pooled", "fixed", "random")
FORMULA = {False: "prop(events, patients) ~ arm + (1 | site)", True: "prop(events, patients) ~ arm + (1 + arm | site)"}
BARS = {"coverage": 0.02, "rmse": 0.03}


def pooled(trial: Trial, varying: bool) -> pm.Model:
    """All sites in one model, standardised effects."""
    with pm.Model() as model:
        events, patients = pm.Data("events", trial.events), pm.Data("patients", trial.patients)
        level, effect = pm.Normal("level", *RATE), pm.Normal("effect", 0, EFFECT)
        base = level + pm.HalfNormal("between", BETWEEN) * pm.Normal("z", shape=SITES)
        own = effect + (pm.HalfNormal("spread", VARYING) * pm.Normal("w", shape=SITES) if varying else 0.0)
        logits = pm.math.stack([base, base + own], axis=1)
        pm.Binomial("obs", n=patients, logit_p=logits, observed=events)
    return model


def sample(compiled: Any, trial: Trial, draws: int, seed: int) -> tuple[Array, dict[str, float]]:
    """Draws of the pooled posterior of the effect, and how good they are."""
    import arviz as az
    import nutpie

    found = nutpie.sample(
        compiled.with_data(events=trial.events, patients=trial.patients),
        draws=draws,
        tune=500,
        chains=4,
        cores=1,
        seed=seed,
        progress_bar=False,
        target_accept=0.9,
    )
    values = np.asarray(found["posterior"]["effect"].values, dtype=float)
    quality = {"ess": float(az.ess(values)), "divergences": int(found["sample_stats"]["diverging"].values.sum())}
    return values.ravel(), quality


def repeated(model: fedppl.FederatedModel, compiled: Any, trial: Trial, options: Any, seed: int) -> dict[str, Any]:
    """One trial by all methods."""
    started = time.process_time()
    fit = fedppl.fit(model, trials.rows(trial), by="site", progressbar=False, random_seed=seed)
    row = fit.summary("arm", ci_prob=0.9).iloc[0]
    between = time.process_time()
    values, quality = sample(compiled, trial, options.draws, seed)
    done = time.process_time()
    found = {
        "fedppl": Estimate(float(row["mean"]), float(row["ci_low"]), float(row["ci_high"])),
        "pooled": Estimate(float(values.mean()), *(float(x) for x in np.quantile(values, [0.05, 0.95]))),
        "fixed": trials.meta_analysis(trial, random=False),
        "random": trials.meta_analysis(trial, random=True),
    }
    return {
        "truth": trial.effect,
        **{name: None if one is None else list(one) for name, one in found.items()},
        "holds": {name: None if one is None else _held(one, values) for name, one in found.items()},
        "sd": [float(row["sd"]), float(values.std())],
        "status": fit.status.value,
        "cpu_s": [between - started, done - between],
        **quality,
    }


def _held(found: Estimate, values: Array) -> float:
    """Probability of an interval under the pooled posterior."""
    return float(np.mean((found.lower <= values) & (values <= found.upper)))


def results(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Bias, RMSE and coverage by method with Monte Carlo errors, and fedppl against pooled in pairs."""
    truth, found = np.array([row["truth"] for row in rows]), {}
    errors, covers = {}, {}
    for name in METHODS:
        kept = np.array([row[name] is not None for row in rows])
        at = np.array([row[name] if row[name] is not None else [np.nan] * 3 for row in rows])
        errors[name] = error = at[:, 0] - truth
        covers[name] = inside = (at[:, 1] <= truth) & (truth <= at[:, 2])
        error, inside, signs = error[kept], inside[kept], np.sign(truth[kept])
        rmse = float(np.sqrt(np.mean(error**2)))
        found[name] = {
            "bias": _pm(error),
            "towards_none": _pm(-signs * error),  # of effects of either sign, how much smaller than true
            "rmse": [round(rmse, 4), round(float(np.std(error**2) / np.sqrt(len(error)) / (2 * rmse)), 4)],
            "coverage": _pm(inside),
            "width": _pm(np.diff(at[kept, 1:])[:, 0]),
            "trials": int(kept.sum()),
        }
    expected = {name: _expected([row for row in rows if row[name] is not None], name) for name in METHODS}
    ratio, spread = _ratio(errors["fedppl"] ** 2, errors["pooled"] ** 2)
    sd = np.array([row["sd"] for row in rows])
    apart = np.array([row["fedppl"][0] - row["pooled"][0] for row in rows]) / sd[:, 1]
    status, counts = np.unique([row["status"] for row in rows], return_counts=True)
    found["expected"] = expected
    found["fedppl_against_pooled"] = {
        "rmse_ratio": [round(ratio, 4), round(spread, 4)],
        "coverage": _pm(covers["fedppl"].astype(float) - covers["pooled"]),
        "mean_apart_in_sd": [round(float(x), 4) for x in (np.sqrt(np.mean(apart**2)), np.max(np.abs(apart)))],
        "sd_ratio": [round(float(x), 4) for x in np.percentile(sd[:, 0] / sd[:, 1], [0, 50, 100])],
        "status": dict(zip(status.tolist(), counts.tolist(), strict=True)),
    }
    found["bars"] = {
        "coverage": bool(abs(expected["fedppl"]["coverage"][0] - 0.9) <= BARS["coverage"]),
        "rmse": bool(abs(expected["fedppl"]["rmse_over_pooled"][0] - 1) <= BARS["rmse"]),
    }
    return found


def _expected(rows: list[dict[str, Any]], name: str) -> dict[str, list[float]]:
    """What errors and intervals are on average over the pooled posterior of each trial."""
    off = np.array([row[name][0] - row["pooled"][0] for row in rows])
    variance = np.array([row["sd"][1] for row in rows]) ** 2
    ratio, spread = _ratio(off**2 + variance, variance)
    return {
        "bias": _pm(off),
        "rmse_over_pooled": [round(ratio, 4), round(spread, 4)],
        "coverage": _pm([row["holds"][name] for row in rows]),
    }


def _pm(values: Any) -> list[float]:
    """Mean and its standard error."""
    values = np.asarray(values, dtype=float)
    return [round(float(values.mean()), 4), round(float(values.std() / np.sqrt(len(values))), 4)]


def _ratio(ours: Array, theirs: Array) -> tuple[float, float]:
    """Root of the ratio of mean squared errors of the same trials, and its standard error by linearising."""
    a, b = float(np.mean(ours)), float(np.mean(theirs))
    ratio = float(np.sqrt(a / b))
    return ratio, float(np.std(ours / a - theirs / b) * ratio / 2 / np.sqrt(len(ours)))


def by_patients(trial: Trial, model: fedppl.FederatedModel, varying: bool) -> float:
    """How far, in posterior sds, a row for each patient moves a mean or log sd from a row for each arm."""
    text = FORMULA[varying].replace("prop(events, patients)", "event")
    single = fedppl.formula(text, "bernoulli", priors=trials.priors(varying), correlated=False)
    tables = [
        fedppl.fit(of, table, by="site", progressbar=False, random_seed=1).summary()
        for of, table in ((model, trials.rows(trial)), (single, trials.patients(trial)))
    ]
    one, other = ({"mean": table["mean"].to_numpy(), "sd": table["sd"].to_numpy()} for table in tables)
    moved = np.abs(one["mean"] - other["mean"]) / other["sd"], np.abs(np.log(one["sd"] / other["sd"]))
    return float(np.max(moved))


def main(argv: list[str] | None = None) -> None:
    """Run repetitions, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--varying", action="store_true", help="effects vary by site")
    parser.add_argument("--file", type=Path, help="of finished repetitions, one a line")
    parser.add_argument("--minutes", type=float, default=np.inf, help="after which no repetition begins")
    parser.add_argument("--draws", type=int, default=1000, help="of each of nutpie's four chains")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    logging.getLogger("fedppl").setLevel(logging.ERROR)  # the table says what converged
    warnings.simplefilter("ignore", fedppl.ConvergenceWarning)
    import nutpie

    settings = {"varying": options.varying, "draws": options.draws, "seed": options.seed}
    held = _finished(options.file, settings)
    made = [
        trials.simulate(np.random.default_rng([options.seed, number]), options.varying)
        for number in range(options.repetitions)
    ]
    declared = fedppl.formula(
        FORMULA[options.varying], "binomial", priors=trials.priors(options.varying), correlated=False
    )
    model = fedppl.agree(declared, trials.rows(made[0]), by="site").model
    compiled = nutpie.compile_pymc_model(pooled(made[0], options.varying))
    ends = time.monotonic() + 60 * options.minutes
    for number, trial in enumerate(made):
        if number in held or time.monotonic() > ends:
            continue
        held[number] = repeated(model, compiled, trial, options, options.seed + number)
        if options.file:
            with options.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"repetition": number, **settings, **held[number]}) + "\n")
    done = [number for number in sorted(held) if number < options.repetitions]
    rows = [held[number] for number in done]
    line: dict[str, Any] = {"benchmark": "rare_events", **settings, "repetitions": len(rows)}
    line["trials"] = trials.described([made[number] for number in done])
    line |= results(rows)
    line["by_patients_apart"] = round(by_patients(made[0], model, options.varying), 5)
    line["cpu_s"] = [round(float(x), 2) for x in np.median([row["cpu_s"] for row in rows], axis=0)]
    line["pooled_ess"] = round(float(np.min([row["ess"] for row in rows])))
    line["pooled_divergences"] = int(np.sum([row["divergences"] for row in rows]))
    _show(line)
    print(json.dumps(line))


def _finished(path: Path | None, settings: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Repetitions of the same settings that a file has."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    return {
        one["repetition"]: {name: value for name, value in one.items() if name not in (*settings, "repetition")}
        for one in lines
        if {name: one[name] for name in settings} == settings
    }


def _show(line: dict[str, Any]) -> None:
    print(f"{line['repetitions']} trials: {line['trials']}")
    columns = ("bias", "towards_none", "rmse", "coverage", "width")
    print(f"{'':8s}" + "".join(f"{name:>18s}" for name in columns))
    for name in METHODS:
        cells = ("{:.3f} ({:.3f})".format(*line[name][column]) for column in columns)
        print(f"{name:8s}" + "".join(f"{cell:>18s}" for cell in cells))
    columns = ("bias", "rmse_over_pooled", "coverage")
    print(f"expected{''.join(f'{name:>18s}' for name in columns)}")
    for name in METHODS:
        cells = ("{:.4f} ({:.4f})".format(*line["expected"][name][column]) for column in columns)
        print(f"{name:8s}" + "".join(f"{cell:>18s}" for cell in cells))
    print(f"fedppl against pooled: {line['fedppl_against_pooled']}; bars met: {line['bars']}")


if __name__ == "__main__":
    main()
