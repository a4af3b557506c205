"""Identical models by those who fit many groups best: CPU seconds, peak memory and estimates, side by side.

A random intercept over groups of ten rows, with a binary outcome or a Gaussian one:

    y_gi ~ Bernoulli(logit⁻¹(b0 + b1 x_gi + a_g))  or  N(b0 + b1 x_gi + a_g, sigma²),   a_g ~ N(0, tau²)

fedppl gives the posterior, under b ~ N(0, 2²) and tau, sigma ~ HalfNormal(1), with means and sds of all groups; the
others maximum (restricted) likelihood. Each runs in a process of its own, on the same rows, and is left out where it is
not installed: mixedlm, mixedlm-rs, statsmodels, and in R lme4 and glmmTMB. CPU seconds are of the fit alone, with all
groups' moments where it is fedppl's: the second fit in a process, beside the first, which may compile.

Bars at 100,000 groups: at most 5 times the CPU seconds of mixedlm for a binary outcome, and 25 times those of
mixedlm-rs for a Gaussian one.

    python benchmarks/duel.py --groups 1000 10000 100000
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedppl
from benchmarks.scale import ROWS
from benchmarks.scale import groups as binary

TRUTH = {"b0": -0.5, "b1": 0.7, "tau": 0.8, "sigma": 0.6}
OUTCOMES = ("binary", "gaussian")
BARS = {"binary": ("mixedlm", 5.0), "gaussian": ("mixedlm-rs", 25.0)}
_NODES = 25  # of adaptive quadrature, where a peer has it


def simulate(outcome: str, count: int, seed: int) -> pd.DataFrame:
    """Rows of all groups."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(count), ROWS)
    x, a = rng.normal(size=len(group)), rng.normal(0, TRUTH["tau"], count)
    eta = TRUTH["b0"] + TRUTH["b1"] * x + a[group]
    y = eta + rng.normal(0, TRUTH["sigma"], len(group))
    if outcome == "binary":
        y = (rng.uniform(size=len(group)) < 1 / (1 + np.exp(-eta))).astype(int)
    return pd.DataFrame({"group": group, "x": x, "y": y})


def gaussian(x: Any, y: Any) -> pm.Model:
    """One group with a Gaussian outcome."""
    with pm.Model() as model:
        x, y = pm.Data("x", x), pm.Data("y", y)
        b0, b1, tau = pm.Normal("b0", 0, 2), pm.Normal("b1", 0, 2), pm.HalfNormal("tau", 1)
        pm.Normal("obs", b0 + b1 * x + pm.Normal("a", 0, tau), pm.HalfNormal("sigma", 1), observed=y)
    return model


def by_fedppl(outcome: str, frame: pd.DataFrame) -> dict[str, Any]:
    """The posterior, and all groups' means and sds."""
    builder, names = (binary, ["b0", "b1", "tau"]) if outcome == "binary" else (gaussian, list(TRUTH))
    cpu = []
    for _ in range(2):
        started = time.process_time()
        fit = fedppl.fit(fedppl.FederatedModel(builder, names), frame, by="group", progressbar=False, random_seed=1)
        fit.clients_summary()
        cpu.append(time.process_time() - started)
    table = fit.summary()
    return {
        "first_cpu_s": round(cpu[0], 2),
        "cpu_s": round(cpu[1], 2),
        "status": fit.status.value,
        "mean": table["mean"].to_dict(),
        "sd": table["sd"].to_dict(),
    }


def by_mixedlm(outcome: str, frame: pd.DataFrame) -> dict[str, Any]:
    """Laplace's approximation, as it has by default, or restricted likelihood."""
    import mixedlm

    started = time.process_time()
    if outcome == "binary":
        found = mixedlm.glmer("y ~ x + (1 | group)", frame, family=mixedlm.families.Binomial())
    else:
        found = mixedlm.lmer("y ~ x + (1 | group)", frame)
    cpu = time.process_time() - started
    mean = dict(zip(("b0", "b1"), map(float, found.fixef().values()), strict=True))
    return {
        "cpu_s": round(cpu, 2),
        "mean": mean | {"tau": float(np.sqrt(found.VarCorr().as_dict()["group"]["(Intercept)"]))},
    }


def by_mixedlm_rs(outcome: str, frame: pd.DataFrame) -> dict[str, Any]:
    """Restricted likelihood."""
    import mixedlm_rs

    return _as_statsmodels(mixedlm_rs.MixedLM, frame)


def by_statsmodels(outcome: str, frame: pd.DataFrame) -> dict[str, Any]:
    """Restricted likelihood."""
    from statsmodels.regression.mixed_linear_model import MixedLM

    return _as_statsmodels(MixedLM, frame)


def _as_statsmodels(kind: Any, frame: pd.DataFrame) -> dict[str, Any]:
    started = time.process_time()
    X = np.column_stack([np.ones(len(frame)), frame["x"]])
    found = kind(frame["y"].to_numpy(), X, groups=frame["group"].to_numpy()).fit()
    cpu, (b0, b1) = time.process_time() - started, np.asarray(found.fe_params, dtype=float)
    tau = float(np.sqrt(np.asarray(found.cov_re)[0, 0]))
    sigma = float(np.sqrt(found.scale))
    return {"cpu_s": round(cpu, 2), "mean": {"b0": float(b0), "b1": float(b1), "tau": tau, "sigma": sigma}}


def in_r(call: str, package: str) -> Callable[[str, pd.DataFrame], dict[str, Any]]:
    """A fit in R, CPU seconds of the call alone."""
    script = f"""
    suppressMessages(library({package}))
    d <- read.csv(commandArgs(TRUE)[1])
    t <- system.time(m <- {call})
    v <- VarCorr(m); v <- if (is.list(v) && "cond" %in% names(v)) v$cond else v
    b <- fixef(m); b <- if (is.list(b)) b$cond else b
    cat(sprintf("%.10g ", c(t[["user.self"]] + t[["sys.self"]], b, attr(v$group, "stddev"), sigma(m))))
    """

    def fitted(outcome: str, frame: pd.DataFrame) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.csv"
            frame.to_csv(path, index=False)
            done = subprocess.run(["Rscript", "-e", script, str(path)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-1000:])
        cpu, b0, b1, tau, sigma = map(float, done.stdout.split())
        mean = {"b0": b0, "b1": b1, "tau": tau} | ({} if outcome == "binary" else {"sigma": sigma})
        return {"cpu_s": round(cpu, 2), "mean": mean}

    return fitted


_GLMER = f"glmer(y ~ x + (1 | group), data = d, family = binomial, nAGQ = {_NODES})"
_GLMM_TMB = "glmmTMB(y ~ x + (1 | group), data = d, family = binomial)"
WAYS: dict[str, dict[str, Callable[[str, pd.DataFrame], dict[str, Any]]]] = {
    "binary": {
        "fedppl": by_fedppl,
        "mixedlm": by_mixedlm,
        "lme4": in_r(_GLMER, "lme4"),
        "lme4, Laplace": in_r(_GLMER.replace(str(_NODES), "1"), "lme4"),
        "glmmTMB": in_r(_GLMM_TMB, "glmmTMB"),
    },
    "gaussian": {
        "fedppl": by_fedppl,
        "mixedlm-rs": by_mixedlm_rs,
        "mixedlm": by_mixedlm,
        "statsmodels": by_statsmodels,
        "lme4": in_r("lmer(y ~ x + (1 | group), data = d)", "lme4"),
        "glmmTMB": in_r("glmmTMB(y ~ x + (1 | group), data = d, REML = TRUE)", "glmmTMB"),
    },
}


def is_here(way: str) -> bool:
    """Whether what it needs is installed."""
    name = way.partition(",")[0]
    if name in ("lme4", "glmmTMB"):
        if shutil.which("Rscript") is None:
            return False
        return subprocess.run(["Rscript", "-e", f"library({name})"], capture_output=True, check=False).returncode == 0
    return name == "fedppl" or importlib.util.find_spec(name.replace("-", "_")) is not None


def in_a_process(way: str, outcome: str, count: int, seed: int) -> dict[str, Any]:
    """One way, of which nothing is left in memory; what it cannot do is said."""
    command = [sys.executable, __file__, "--process", way, "--outcomes", outcome]
    done = subprocess.run(
        [*command, "--groups", str(count), "--seed", str(seed)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:200]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(outcome: str, count: int, found: dict[str, dict[str, Any]]) -> str:
    """A line for each way: CPU seconds, against fedppl's, memory, and estimates."""
    lines, ours = [], found["fedppl"]
    for way, one in found.items():
        if "failed" in one:
            lines.append(f"{outcome:9s}{count:8d} {way:15s} failed: {one['failed']}")
            continue
        times = one["cpu_s"] / ours["cpu_s"] if "cpu_s" in ours else float("nan")
        told = "  ".join(f"{name} {value:.4f}" for name, value in one["mean"].items())
        more = f"  (first {one['first_cpu_s']:.1f}, {one['status']})" if "first_cpu_s" in one else ""
        size = f"{one['cpu_s']:9.2f} CPU-s {times:7.2f} x {one['peak_gb']:5.2f} GB"
        lines.append(f"{outcome:9s}{count:8d} {way:15s}{size}  {told}{more}")
    return "\n".join(lines)


def missed(outcome: str, found: dict[str, dict[str, Any]]) -> list[str]:
    """What of the bars is not met."""
    peer, most = BARS[outcome]
    if "cpu_s" not in found.get(peer, {}) or "cpu_s" not in found["fedppl"]:
        return []
    times = found["fedppl"]["cpu_s"] / found[peer]["cpu_s"]
    return [f"{outcome}: {times:.1f} x the CPU of {peer}, at most {most:g}"] if times > most else []


def main(argv: list[str] | None = None) -> None:
    """Run all sizes and ways, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--outcomes", nargs="+", choices=OUTCOMES, default=list(OUTCOMES))
    others = sorted({way for ways in WAYS.values() for way in ways} - {"fedppl"})
    parser.add_argument("--without", nargs="*", choices=others, default=[], help="ways that are left out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--process", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.process:
        (outcome,), (count,) = options.outcomes, options.groups
        found = WAYS[outcome][options.process](outcome, simulate(outcome, count, options.seed))
        who = (
            resource.RUSAGE_CHILDREN
            if options.process.partition(",")[0] in ("lme4", "glmmTMB")
            else resource.RUSAGE_SELF
        )
        print(json.dumps(found | {"peak_gb": round(resource.getrusage(who).ru_maxrss / 2**20, 2)}))
        return
    line: dict[str, Any] = {"benchmark": "duel", "rows": ROWS, "seed": options.seed, "sizes": {}}
    for count in options.groups:
        for outcome in options.outcomes:
            ways = [way for way in WAYS[outcome] if way not in options.without and is_here(way)]
            found = {way: in_a_process(way, outcome, count, options.seed) for way in ways}
            line["sizes"].setdefault(count, {})[outcome] = found
            print(table(outcome, count, found), flush=True)
            if count >= 100_000:
                line.setdefault("missed", []).extend(missed(outcome, found))
    print(json.dumps(line))


if __name__ == "__main__":
    main()
