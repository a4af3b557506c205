"""A trial at eleven sites, whose patients are in one table: did the drug heal, and did they live longer with it.

Sites are of 8 to 220 patients, two of them saw no patient of stage IV, one writes weight in pounds, and one has no
table to show: it tells the estimates of its own analysis, and nothing else. Formulas turn the table into one
hierarchical model an outcome; a site's rows are read by that site alone. No data files are needed.

    python examples/trial.py --figure trial.png --report trial.html
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import optimize

import fedppl

PATIENTS = {"Aarhus": 8, "Bergen": 14, "Cork": 19, "Delft": 26, "Evora": 35, "Faro": 48, "Gent": 70, "Hull": 95}
PATIENTS |= {"Imola": 140, "Jena": 220}
TELLS_ESTIMATES, PATIENTS_THERE = "Kiel", 160
STAGES, FEW = ["I", "II", "III", "IV"], ("Bergen", "Delft")  # the sites without stage IV
POUNDS, PER_KG = "Hull", 2.2046
FOLLOWED = 365.0  # days
HEALED = {"arm": 0.8, "stage": [0.0, -0.4, -0.9, -1.6], "weight": -0.01}  # log odds; the truth
LIVED = {"arm": 0.45, "stage": [0.0, -0.3, -0.7, -1.3], "weight": 0.0}  # log of the ratio of times; the truth
SITES_HEALED, SITES_LIVED, SHAPE = 0.6, 0.3, 1.3  # sds of sites' own levels, Weibull's shape
FORMULAS = {
    "healed": ("healed ~ arm + stage + center(weight) + (1 | site)", "bernoulli"),
    "lived": ("Surv(days, died) ~ arm + stage + (1 | site)", "weibull"),
}
LEVELS = {
    "stage": STAGES,
    "arm": ["control", "drug"],
    "healed": ["no", "yes"],
}  # of the protocol: small sites tell none


class Trial(NamedTuple):
    """What was simulated: rows of the sites that have a table, and rows that stay at the site that has none."""

    table: pd.DataFrame
    elsewhere: pd.DataFrame


def simulate(rng: np.random.Generator) -> Trial:
    """Draw every site's patients."""
    sizes = {**PATIENTS, TELLS_ESTIMATES: PATIENTS_THERE}
    site = np.repeat(list(sizes), list(sizes.values()))
    frame = pd.DataFrame({"site": site, "arm": rng.choice(["control", "drug"], len(site))})
    frame["stage"] = rng.choice(STAGES, len(site), p=[0.3, 0.35, 0.22, 0.13])
    frame.loc[frame["site"].isin(FEW) & (frame["stage"] == "IV"), "stage"] = "III"
    frame["weight"] = rng.normal(78, 13, len(site)).round(1)
    own = {name: rng.normal(0, (SITES_HEALED, SITES_LIVED)) for name in sizes}
    healed, lived = (_predictor(frame, effects) for effects in (HEALED, LIVED))
    healed = healed + 0.2 + np.array([own[name][0] for name in site])
    lived = lived + 5.6 + np.array([own[name][1] for name in site])
    frame["healed"] = np.where(rng.random(len(site)) < 1 / (1 + np.exp(-healed)), "yes", "no")
    days = np.exp(lived) * rng.weibull(SHAPE, len(site))
    frame["days"], frame["died"] = np.minimum(days, FOLLOWED).round(2).clip(0.01), (days <= FOLLOWED).astype(int)
    there = frame["site"] == TELLS_ESTIMATES
    return Trial(frame[~there].reset_index(drop=True), frame[there].reset_index(drop=True))


def _predictor(frame: pd.DataFrame, effects: dict[str, Any]) -> Any:
    stage = dict(zip(STAGES, effects["stage"], strict=True))
    arm = effects["arm"] * (frame["arm"] == "drug")
    return (arm + frame["stage"].map(stage) + effects["weight"] * (frame["weight"] - 78)).to_numpy()


def told(rows: pd.DataFrame, outcome: str) -> Any:
    """What the site without a table sends: maximum likelihood of the same coefficients, and their covariance."""
    X = np.column_stack(
        [
            np.ones(len(rows)),
            rows["arm"] == "drug",
            *(rows["stage"] == stage for stage in STAGES[1:]),
            *([rows["weight"] - 78] if outcome == "healed" else []),
        ]
    ).astype(float)
    names = ["arm[drug]", *(f"stage[{stage}]" for stage in STAGES[1:])]

    def minus_log_likelihood(free: Any) -> float:
        if outcome == "healed":
            sign = np.where(rows["healed"] == "yes", 1.0, -1.0)
            return float(np.logaddexp(0, -sign * (X @ free)).sum())
        shape, scaled = np.exp(free[-1]), np.log(rows["days"]) - X @ free[:-1]
        return float((np.exp(shape * scaled) - rows["died"] * (free[-1] + shape * scaled)).sum())

    start = np.zeros(X.shape[1] + (outcome == "lived"))
    start[0] = 5.0 if outcome == "lived" else 0.0
    found = optimize.minimize(minus_log_likelihood, start, method="BFGS", options={"gtol": 1e-4})
    place = slice(1, 1 + len(names))  # the intercept, weight and shape stay there
    return fedppl.summaries.Estimate(names, found.x[place], _curvature(minus_log_likelihood, found.x)[place, place])


def _curvature(of: Any, at: Any, step: float = 1e-3) -> Any:
    """Inverse of the second derivatives, by central differences."""
    steps = step * np.eye(len(at))
    second = [[of(at + a + b) - of(at + a - b) - of(at - a + b) + of(at - a - b) for b in steps] for a in steps]
    return np.linalg.inv(np.array(second) / (4 * step**2))


def declared(outcome: str) -> fedppl.FederatedModel:
    """One site's model of an outcome."""
    text, family = FORMULAS[outcome]
    return fedppl.formula(text, family, levels={name: one for name, one in LEVELS.items() if name in text})


def agreement(table: pd.DataFrame) -> pd.DataFrame:
    """Let sites agree on levels and scales, show what was odd, and put it right."""
    model = declared("healed")
    before = fedppl.agree(model, table, min_count=3)
    print("\nBefore anything is fitted, sites agree on columns. Odd:", *before.strange, sep="\n  ")
    mended = table.copy()
    mended.loc[mended["site"] == POUNDS, "weight"] /= PER_KG
    after = fedppl.agree(model, mended, min_count=3)
    print(f"With the weights of {POUNDS} in kg, odd: {len(after.strange)}. Agreed:")
    print(after.columns.round(2).to_string())
    return mended


def page(fits: dict[str, Any], conflicts: Any, chance: Any, happened: Any, path: Path) -> None:
    """Draw six pictures on one page."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from fedppl import plots

    healed, lived = fits["healed"], fits["lived"]
    canvas = plt.figure(figsize=(15, 16), layout="constrained")
    top, middle, low, bottom = canvas.subfigures(4, 1)
    left, right = top.subfigures(1, 2)
    forest = plots.forest(healed, "site_effects", draws=100, random_seed=1, ax=left.subplots())
    forest[0].set_xlabel("site's own level of healing, log odds")
    plots.reliability(chance, happened, ax=right.subplots(2, 1, sharex=True, height_ratios=[3, 1]))
    plots.influence(healed, "arm", conflict=conflicts, ax=middle.subplots(1, 3))
    plots.prior_posterior(lived, ["arm", "site_sd"], ax=low.subplots(1, 2))
    plots.rounds(lived, ax=bottom.subplots(1, 2))
    canvas.savefig(path, dpi=100)
    print(f"wrote {path}")


def main(argv: list[str] | None = None) -> None:
    """Simulate, agree, fit both outcomes, and print and draw what can be asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--figure", type=Path, help="write a page of pictures here")
    parser.add_argument("--report", type=Path, help="write a page for those who do not run Python here")
    options = parser.parse_args(argv)
    if (options.figure or options.report) and importlib.util.find_spec("matplotlib") is None:
        sys.exit("--figure and --report need matplotlib: pip install 'fedppl[plots]'")
    for name in ("pymc", "fedppl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    pd.set_option("display.width", 160)
    begun = time.perf_counter()

    trial = simulate(np.random.default_rng(options.seed))
    raw = trial.table.copy()
    raw.loc[raw["site"] == POUNDS, "weight"] *= PER_KG
    table = agreement(raw)
    sites: dict[str, Any] = dict(tuple(table.groupby("site")))

    fits, clients = {}, {name: {**sites, TELLS_ESTIMATES: told(trial.elsewhere, name)} for name in FORMULAS}
    for outcome, (text, family) in FORMULAS.items():
        fit = fits[outcome] = fedppl.fit(declared(outcome), clients[outcome], random_seed=options.seed)
        print(f"\n{text}, {family}: {fit.status} after {len(fit.records)} rounds, {len(clients[outcome])} sites")
        print(fit.summary().iloc[:, :4].round(3).to_string())
    healed, lived = fits["healed"], fits["lived"]
    print("\nPriors, on the agreed scales")
    print(healed.declaration.describe()["prior"].to_string())

    effects = fedppl.marginal_effects(healed, "arm", draws=100, random_seed=1)
    print("\nProbability of healing, averaged over a site's own patients")
    print(effects.loc[["Aarhus", "Jena", "all"]].round(3).to_string())
    survival = fedppl.marginal_effects(lived, "arm", at=180, draws=100, random_seed=1)
    print("\nProbability of living for 180 days and more")
    print(survival.loc[["all"]].round(3).to_string())

    moved = healed.influence()["shift"].sel(rows="arm[drug]").to_series()
    conflicts = fedppl.conflict(healed, random_seed=1)
    most = moved.abs().idxmax()
    print(f"\nThe site that moves the effect of the drug most: {most}, by {moved[most]:+.2f} sd")
    print(f"The site that disagrees most with the others: p = {conflicts['p_value'].min():.2f} of {len(sites)} sites")

    fresh = simulate(np.random.default_rng(options.seed + 1)).table  # other patients, at sites of their own
    new = fresh[fresh["site"] == "Jena"]
    first, later = new[:30], new[30:]
    found = healed.new_client(first, predict=later.drop(columns="healed"), random_seed=1)
    chance = found["predictions"]["healed"].mean(["chain", "draw"]).values
    happened = (later["healed"] == "yes").to_numpy()
    low, high = np.quantile(found["predictions"]["healed"].mean("healed_dim_0"), [0.05, 0.95])
    print(f"A new site with 30 patients: {low:.0%} to {high:.0%} of its next {len(later)} predicted to heal, ", end="")
    print(f"{happened.mean():.0%} did")

    with tempfile.TemporaryDirectory() as folder:
        healed.save(Path(folder) / "healed.nc")
        again = fedppl.load(Path(folder) / "healed.nc", declared("healed"))
        kept = bool(np.array_equal(again.idata["posterior"]["arm"], healed.idata["posterior"]["arm"]))
    print(f"Saved and loaded: {'the same draws' if kept else 'other draws'}")

    if options.figure is not None:
        page(fits, conflicts, chance, happened, options.figure)
    if options.report is not None:
        healed.report(options.report, conflict=conflicts)
        print(f"wrote {options.report}")
    line = {
        "status": [str(fit.status) for fit in fits.values()],
        "log_odds": [round(float(x), 3) for x in healed.summary().loc["arm[drug]", ["mean", "sd"]]],
        "log_time": [round(float(x), 3) for x in lived.summary().loc["arm[drug]", ["mean", "sd"]]],
        "kept": kept,
        "seconds": round(time.perf_counter() - begun, 1),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
