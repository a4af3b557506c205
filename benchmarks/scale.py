"""Many groups on one machine: CPU seconds, memory and numbers beside what people use, on the same data and model.

A logistic regression whose intercept varies by group, ten rows each:

    y_gi ~ Bernoulli(logit⁻¹(b0 + b1 x_gi + a_g)),  a_g ~ N(0, tau²),  b ~ N(0, 2²),  tau ~ HalfNormal(1)

From one data frame by ``fedppl.fit(model, frame, by="group")`` at default settings, every size in a process of its own:
seconds, CPU seconds and peak memory of the fit, and of `Fit.clients_summary`, the means and sds of all groups. Beside
it, each where it is installed: nutpie (4 chains of 1,000 + 1,000) on the same model up to ``--nutpie`` groups, and
maximum likelihood by lme4's glmer with adaptive quadrature up to ``--glmer``. The first fit counts compiling.

    python benchmarks/scale.py --groups 1000 10000 100000
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedppl

ROWS = 10
TRUTH = {"b0": -0.5, "b1": 0.7, "tau": 0.8}
BARS = {"z": 0.1, "r": 0.05}


def groups(x: Any, y: Any) -> pm.Model:
    """One group."""
    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y", y)
        b0, b1, tau = pm.Normal("b0", 0, 2), pm.Normal("b1", 0, 2), pm.HalfNormal("tau", 1)
        pm.Bernoulli("obs", logit_p=b0 + b1 * x + pm.Normal("a", 0, tau), observed=y)
    return model


def simulate(count: int, seed: int) -> pd.DataFrame:
    """Rows of all groups."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(count), ROWS)
    x, a = rng.normal(size=len(group)), rng.normal(0, TRUTH["tau"], count)
    y = rng.uniform(size=len(group)) < 1 / (1 + np.exp(-TRUTH["b0"] - TRUTH["b1"] * x - a[group]))
    return pd.DataFrame({"group": group, "x": x, "y": y.astype(int)})


def central(frame: pd.DataFrame) -> pm.Model:
    """All groups in one model, standardised effects."""
    group = frame["group"].to_numpy()
    with pm.Model() as model:
        b0, b1, tau = pm.Normal("b0", 0, 2), pm.Normal("b1", 0, 2), pm.HalfNormal("tau", 1)
        z = pm.Normal("z", 0, 1, shape=int(group.max()) + 1)
        pm.Bernoulli("obs", logit_p=b0 + b1 * frame["x"].to_numpy() + (tau * z)[group], observed=frame["y"].to_numpy())
    return model


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def by_fedppl(frame: pd.DataFrame, seed: int, fits: int) -> dict[str, Any]:
    """One or two fits in this process, the second without compiling, and all groups' posteriors."""
    found: dict[str, Any] = {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in ("first", "warm")[:fits]:
        started, cpu = time.perf_counter(), _cpu()
        fit = fedppl.fit(
            fedppl.FederatedModel(groups, ["b0", "b1", "tau"]), frame, by="group", progressbar=False, random_seed=seed
        )
        found[name] = {"s": round(time.perf_counter() - started, 2), "cpu_s": round(_cpu() - cpu, 2)}
    started, cpu = time.perf_counter(), _cpu()
    told = fit.clients_summary()
    found["clients"] = {"s": round(time.perf_counter() - started, 2), "cpu_s": round(_cpu() - cpu, 2)}
    table = fit.summary()
    found |= {"status": fit.status.value, "passes": len(fit.records)}
    found |= {"mean": table["mean"].to_dict(), "sd": table["sd"].to_dict()}
    found["groups_mean"] = told["a"].sel(statistic="mean").values[:1000].tolist()
    found["groups_sd"] = told["a"].sel(statistic="sd").values[:1000].tolist()
    found["peak_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    found["peak_gb_before"] = round(before / 2**20, 2)
    return found


def by_nutpie(frame: pd.DataFrame, seed: int) -> dict[str, Any]:
    """Four chains of 1,000 + 1,000 draws."""
    import arviz as az
    import nutpie

    cpu = _cpu()
    compiled = nutpie.compile_pymc_model(central(frame))
    compiling, cpu = _cpu() - cpu, _cpu()
    trace = nutpie.sample(compiled, draws=1000, tune=1000, chains=4, cores=2, seed=seed, progress_bar=False)
    sampling, draws = _cpu() - cpu, trace["posterior"]
    names = list(TRUTH)
    ess = az.ess(trace, var_names=names)
    least = float(min(np.min(np.asarray(ess[name] if name in ess else ess["posterior"][name])) for name in names))
    a = np.asarray(draws["z"] * draws["tau"]).reshape(4000, -1)
    return {
        "compile_cpu_s": round(compiling, 2),
        "cpu_s": round(sampling, 2),
        "ess": round(least),
        "mean": {name: float(draws[name].mean()) for name in names},
        "sd": {name: float(draws[name].std()) for name in names},
        "groups_mean": a.mean(axis=0)[:1000].tolist(),
        "groups_sd": a.std(axis=0)[:1000].tolist(),
    }


def by_glmer(frame: pd.DataFrame, nodes: int) -> dict[str, Any]:
    """Maximum likelihood in R, CPU seconds of the fit alone."""
    script = f"""
    suppressMessages(library(lme4))
    d <- read.csv(commandArgs(TRUE)[1])
    t <- system.time(m <- glmer(y ~ x + (1 | group), data = d, family = binomial, nAGQ = {nodes}))
    v <- sqrt(diag(as.matrix(vcov(m))))
    cat(sprintf("%.10g ", c(t[["user.self"]] + t[["sys.self"]], fixef(m), v, sqrt(unlist(VarCorr(m))))))
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        frame.to_csv(path, index=False)
        done = subprocess.run(["Rscript", "-e", script, str(path)], capture_output=True, text=True, check=True)
    cpu, b0, b1, sd0, sd1, tau = map(float, done.stdout.split())
    return {"cpu_s": round(cpu, 2), "mean": {"b0": b0, "b1": b1, "tau": tau}, "sd": {"b0": sd0, "b1": sd1}}


def has_lme4() -> bool:
    """Whether R and lme4 are here."""
    if shutil.which("Rscript") is None:
        return False
    return subprocess.run(["Rscript", "-e", "library(lme4)"], capture_output=True, check=False).returncode == 0


def in_a_process(way: str, count: int, seed: int, fits: int = 2) -> dict[str, Any]:
    """One way, of which nothing is left in memory."""
    command = [sys.executable, __file__, "--process", way, "--groups", str(count), "--seed", str(seed)]
    command += ["--fits", str(fits)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def apart(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Differences of means in their sds, and ratios of sds, where they have some."""
    names = [name for name in TRUTH if name in theirs["sd"]]
    z = [(ours["mean"][name] - theirs["mean"][name]) / theirs["sd"][name] for name in names]
    r = [ours["sd"][name] / theirs["sd"][name] for name in names]
    found = {"z": round(float(np.max(np.abs(z))), 3), "r": [round(float(one), 3) for one in (min(r), max(r))]}
    if "groups_mean" in theirs:
        mean, sd = np.array(theirs["groups_mean"]), np.array(theirs["groups_sd"])
        off = (np.array(ours["groups_mean"])[: len(mean)] - mean) / sd
        ratio = np.array(ours["groups_sd"])[: len(sd)] / sd
        found["groups"] = {
            "z_rms": round(float(np.sqrt(np.mean(off**2))), 3),
            "r": [round(float(one), 3) for one in np.percentile(ratio, [1, 50, 99])],
        }
    return found


def main(argv: list[str] | None = None) -> None:
    """Run all sizes, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--nutpie", type=int, default=1_000, help="most groups that nutpie samples")
    parser.add_argument("--glmer", type=int, default=100_000, help="most groups that glmer fits")
    parser.add_argument("--nodes", type=int, default=25, help="of glmer's adaptive quadrature")
    parser.add_argument("--fits", type=int, choices=[1, 2], default=2, help="in a process; one where they take minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--process", choices=["fedppl", "nutpie", "glmer"], help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.process:
        frame = simulate(options.groups[0], options.seed)
        seed, fits = options.seed, options.fits
        print(json.dumps(by_nutpie(frame, seed) if options.process == "nutpie" else by_fedppl(frame, seed, fits)))
        return
    line: dict[str, Any] = {"benchmark": "scale", "rows": ROWS, "seed": options.seed, "sizes": {}}
    print(f"{'groups':>9s} {'first s':>8s} {'warm s':>8s} {'CPU-s':>8s} {'clients CPU-s':>14s} {'GB':>6s}  beside it")
    for count in options.groups:
        one = line["sizes"][count] = {"fedppl": in_a_process("fedppl", count, options.seed, options.fits)}
        if count <= options.nutpie and importlib.util.find_spec("nutpie"):
            one["nutpie"] = in_a_process("nutpie", count, options.seed)
        if count <= options.glmer and has_lme4():
            one["glmer"] = by_glmer(simulate(count, options.seed), options.nodes)
        ours, said = one["fedppl"], []
        last = ours.get("warm", ours["first"])
        warm = f"{ours['warm']['s']:8.1f}" if "warm" in ours else f"{'-':>8s}"
        for peer in ("nutpie", "glmer"):
            if peer in one:
                one[f"against_{peer}"] = apart(ours, one[peer])
                times = one[peer]["cpu_s"] / last["cpu_s"]
                said.append(f"{peer} {one[peer]['cpu_s']:.1f} CPU-s ({times:.1f} x), {one[f'against_{peer}']}")
        print(
            f"{count:9d} {ours['first']['s']:8.1f} {warm} {last['cpu_s']:8.1f} "
            f"{ours['clients']['cpu_s']:14.1f} {ours['peak_gb']:6.2f}  {'; '.join(said)} [{ours['status']}]",
            flush=True,
        )
        for peer in one.values():
            if isinstance(peer, dict):
                peer.pop("groups_mean", None), peer.pop("groups_sd", None)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
