"""FedLMC-SS on its paper's simulations: a unit with a missing range (section 5.1.1), and new units (section 5.1.2).

The curves are a Gaussian process with covariance exp(-(x² + x'²) / 10) Σ_j cos j(x - x'), j = 1, 2, 3, which has six
eigenfunctions; ten units have 100 points each on [-5, 5] and noise of sd 0.2. Unit 0 misses a range of length 3. A fit
has ten latent functions with 20 inducing points each. A second table has ten new units a run, each without a range of
length 2, that know the shared functions and their own rows.

The paper does not say over which points its MSE runs: given are all 100 or the missing ones, against noisy values or
the curve. The bar is about all points and noisy values, which holds the noise's 0.04. Coverage of 90 % intervals is
against new noise on the same curves; "own" is against the values that the fit has seen, which lie nearer to it.

Rows: "Oracle" is the exact regression of the unit alone with the true covariance and noise, and so knows the six
functions; "IGP" is one latent function fitted to the unit alone; LMC is Adam on the whole bound in one place; -avg is
the paper's averaging; FedLMC and FedLMC-SS are coordinate ascent. -SS is with the selection, -point with coefficients
as point estimates, -held with σ_w held at 1 where the others learn it. "ms a round" is processor time of a round and
unit, the server's part with it.

    python benchmarks/lmc_simulation.py --processes 2
    python benchmarks/lmc_simulation.py --runs 1 --methods FedLMC-SS --skip-new --figure fits.png
    python benchmarks/lmc_simulation.py --methods FedLMC-point FedLMC-held FedLMC-SS-held
    python benchmarks/lmc_simulation.py --runs 1 --methods FedLMC-SS --timing
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import norm

import fedppl
from fedppl.models import fedlmc_ss

UNITS, NEW, LATENTS, INDUCING, NOISE, X = 10, 10, 10, 20, 0.2, np.linspace(-5, 5, 100)
SIZES = (50, 100, 200, 400, 800, 1600)


class Method(NamedTuple):
    """One row of the first table."""

    algorithm: Callable[[], Any]
    rounds: int
    selects: bool
    latents: int = LATENTS
    held: bool = False  # whether σ_w is 1


METHODS = {
    "IGP": Method(fedppl.curves.Ascent, 150, False, latents=1),
    "LMC": Method(fedppl.curves.Gradient, 1000, False),
    "LMC-SS": Method(fedppl.curves.Gradient, 1000, True),
    "FedLMC-avg": Method(fedppl.curves.Averaging, 300, False),
    "FedLMC-SS-avg": Method(fedppl.curves.Averaging, 300, True),
    "FedLMC": Method(fedppl.curves.Ascent, 150, False),
    "FedLMC-SS": Method(fedppl.curves.Ascent, 150, True),
    "FedLMC-point": Method(fedppl.curves.PointAscent, 150, False),
    "FedLMC-held": Method(fedppl.curves.Ascent, 150, False, held=True),
    "FedLMC-SS-held": Method(fedppl.curves.Ascent, 150, True, held=True),
}
# Table I: MSE and its sd over ten runs, selected functions and their sd.
PAPER = {
    "IGP": (0.2265, 0.1486, None, None),
    "LMC": (0.0536, 0.0278, 9.1, 0.9944),
    "LMC-SS": (0.0454, 0.0170, 6.0, 0.0),
    "FedLMC-avg": (0.2073, 0.2249, 10.0, 0.0),
    "FedLMC-SS-avg": (0.0942, 0.0741, 6.7, 1.6364),
}
# Table II: MSE and its sd. Its header says times 1e-5, which noise of 0.04 a value leaves no room for.
PAPER_NEW = {
    "FedLMC-all-avg": (0.3101, 0.2638),
    "FedLMC-selected-avg": (0.8248, 0.3446),
    "FedLMC-SS-selected-avg": (0.1521, 0.1715),
}
# Most that the MSE of FedLMC-SS may be, in terms of others'.
MOST = {"FedLMC": 1.1, "FedLMC-avg": 1.0, "IGP": 1.0}
READINGS = ("all noisy", "all curve", "missing noisy", "missing curve")
COVERAGE = ("outside", "inside", "own")


class Problem(NamedTuple):
    """Curves of one run (units and new units, points), what is seen of them, and new noise to judge intervals by."""

    curves: np.ndarray
    noisy: np.ndarray
    fresh: np.ndarray
    missing: np.ndarray


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--methods", nargs="+", choices=[*METHODS], default=[*METHODS], help="beside the oracle")
    parser.add_argument("--rounds", type=int, help="rounds of every method, in place of each one's own")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, each in a process of its own")
    parser.add_argument("--skip-new", action="store_true", help="leave out the new units")
    parser.add_argument("--timing", action="store_true", help="also time a round against the rows of a unit")
    parser.add_argument("--figure", type=Path, help="draw the first run's FedLMC-SS here")
    options = parser.parse_args(argv)
    if min(options.runs, options.processes) < 1 or (options.rounds is not None and options.rounds < 1):
        parser.error("--runs, --processes and --rounds must be at least 1")
    if options.figure is not None and not options.figure.resolve().parent.is_dir():
        parser.error(f"--figure: there is no folder {options.figure.parent}")
    return options


def features(x: np.ndarray) -> np.ndarray:
    """The six functions (points, 6) whose products add up to the covariance."""
    waves = [wave(j * x) for j in (1, 2, 3) for wave in (np.cos, np.sin)]
    return np.exp(-(x**2) / 10)[:, None] * np.stack(waves, axis=1)


def covariance(x: np.ndarray, z: np.ndarray) -> np.ndarray:
    """The paper's covariance of the curves."""
    apart = x[:, None] - z
    return np.exp(-(x[:, None] ** 2 + z**2) / 10) * (np.cos(apart) + np.cos(2 * apart) + np.cos(3 * apart))


def generate(run: int) -> Problem:
    """Curves, noise and missing ranges of one run; rows of new units follow those of the units."""
    rng = np.random.default_rng(run)
    curves = rng.normal(size=(UNITS + NEW, 6)) @ features(X).T
    noisy, fresh = (curves + NOISE * rng.normal(size=curves.shape) for _ in range(2))
    missing = np.zeros(curves.shape, dtype=bool)
    for k, length in ((0, 3.0), *((k, 2.0) for k in range(UNITS, UNITS + NEW))):
        start = rng.uniform(-5, 5 - length)
        missing[k] = (X >= start) & (X <= start + length)
    return Problem(curves, noisy, fresh, missing)


def seen(problem: Problem, k: int) -> dict[str, np.ndarray]:
    """Data of a unit, or of a new one."""
    rows = ~problem.missing[k]
    return {"X": X[rows], "y": problem.noisy[k, rows]}


def oracle(problem: Problem, k: int) -> dict[str, np.ndarray]:
    """Exact Gaussian process regression of one unit given the true covariance and noise."""
    data = seen(problem, k)
    across = covariance(X, data["X"])
    gain = np.linalg.solve(covariance(data["X"], data["X"]) + NOISE**2 * np.eye(len(data["X"])), across.T).T
    mean = gain @ data["y"]
    half = norm.ppf(0.95) * np.sqrt(np.diag(covariance(X, X) - gain @ across.T) + NOISE**2)
    return {"mean": mean, "ci_low": mean - half, "ci_high": mean + half}


def figures(problem: Problem, k: int, found: Any) -> dict[str, float]:
    """Every reading of the MSE of one unit, and coverage."""
    missing = problem.missing[k]
    mean, lower, upper = (np.asarray(found[name]) for name in ("mean", "ci_low", "ci_high"))
    noisy, curve = (mean - problem.noisy[k]) ** 2, (mean - problem.curves[k]) ** 2
    new, own = ((lower < y[k]) & (y[k] < upper) for y in (problem.fresh, problem.noisy))
    values = (noisy, curve, noisy[missing], curve[missing], new[~missing], new[missing], own[~missing])
    return {name: float(np.mean(value)) for name, value in zip((*READINGS, *COVERAGE), values, strict=True)}


@functools.cache
def declaration(latents: int, selects: bool, held: bool = False) -> fedppl.FederatedModel:
    """One a process, so that every run finds it compiled."""
    settings = {"inducing": np.linspace(-5, 5, INDUCING), "latents": latents, "inclusion": 0.5 if selects else None}
    settings |= {"slab_spread": None} if held else {}
    shared = fedlmc_ss.SHARED if selects else fedlmc_ss.SHARED_WITHOUT_SELECTION
    return fedppl.FederatedModel(functools.partial(fedlmc_ss.unit, **settings), shared)


def train(method: Method, problem: Problem, rounds: int | None, seed: int) -> Any:
    """Fit one method to the units of a run, the independent one to unit 0; its own number of rounds by default."""
    clients = {f"unit {k}": seen(problem, k) for k in range(1 if method.latents == 1 else UNITS)}
    model, algorithm = declaration(method.latents, method.selects, method.held), method.algorithm()
    settings: dict[str, Any] = {"engine": fedppl.InProcess(workers=1), "progressbar": False, "random_seed": seed}
    return fedppl.fit(model, clients, algorithm, rounds=method.rounds if rounds is None else rounds, **settings)


@functools.cache
def warm_up(name: str) -> None:
    """Compile, so that no figure of speed holds it."""
    train(METHODS[name], generate(0), 2, 0)


def one_run(run: int, methods: list[str], rounds: int | None, new: bool) -> list[dict[str, Any]]:
    """Generate one run and fit it in every way; a record for each row of the tables."""
    logging.getLogger("fedppl").setLevel(logging.ERROR)  # stopping at a set number of rounds is what was asked for
    warnings.filterwarnings("ignore", category=fedppl.ConvergenceWarning)
    problem = generate(run)
    records: list[dict[str, Any]] = [{"table": "I", "method": "Oracle", **figures(problem, 0, oracle(problem, 0))}]
    fits: dict[str, Any] = {}
    for name in methods:
        warm_up(name)
        started = time.process_time()
        fits[name] = train(METHODS[name], problem, rounds, run)
        seconds = time.process_time() - started
        selected = int(fedppl.curves.selection(fits[name])["selected"].sum())
        own = figures(problem, 0, fedppl.curves.predict(fits[name], "unit 0", {"X": X}, ci_prob=0.9))
        each = 1000 * seconds / len(fits[name].records) / len(fits[name].clients)
        speed = {"seconds": seconds, "ms a round": each}
        records.append({"table": "I", "method": name, **own, "selected": selected, **speed})
    if new:
        for name, way in new_unit_ways(problem, fits).items():
            table = pd.DataFrame([figures(problem, k, way(k)) for k in range(UNITS, UNITS + NEW)])
            records.append({"table": "II", "method": name, **table.mean()})
    return [{"run": run, **record} for record in records]


def new_unit_ways(problem: Problem, fits: dict[str, Any]) -> dict[str, Callable[[int], Any]]:
    """Rows of the second table: functions from the number of a new unit to its prediction."""
    ways: dict[str, Callable[[int], Any]] = {"Oracle": functools.partial(oracle, problem)}

    def way(fit: Any, fixed: bool, latents: Any = None) -> Callable[[int], Any]:
        return lambda k: fedppl.curves.predict(
            fit, seen(problem, k), {"X": X}, ci_prob=0.9, latents=latents, fixed=fixed
        )

    for suffix, fixed in (("-avg", True), ("", False)):
        plain, sparse = fits.get(f"FedLMC{suffix}"), fits.get(f"FedLMC-SS{suffix}")
        if plain is not None:
            ways[f"FedLMC-all{suffix}"] = way(plain, fixed)
        if plain is not None and sparse is not None:
            count = int(fedppl.curves.selection(sparse)["selected"].sum())
            size = (fedppl.curves.coefficients(plain)["mean"] ** 2).sum("client").values
            ways[f"FedLMC-selected{suffix}"] = way(plain, fixed, np.argsort(-size)[: max(count, 1)].tolist())
        if sparse is not None:
            ways[f"FedLMC-SS-selected{suffix}"] = way(sparse, fixed)
    if "FedLMC-SS" in fits:
        ways["FedLMC-SS-fixed"] = way(fits["FedLMC-SS"], True)
    for name in ("FedLMC-point", "FedLMC-held", "FedLMC-SS-held"):
        if name in fits:
            ways[name] = way(fits[name], False)
    if "FedLMC-point" in fits:
        ways["FedLMC-point-fixed"] = way(fits["FedLMC-point"], True)
    return ways


def timing() -> tuple[dict[int, float], float]:
    """Least seconds of a round by rows of each of ten units, and the slope of their logarithms."""
    found: dict[int, float] = {}
    for size in SIZES:
        x, rng = np.linspace(-5, 5, size), np.random.default_rng(size)
        y = features(x) @ rng.normal(size=(6, UNITS)) + NOISE * rng.normal(size=(size, UNITS))
        clients = {f"unit {k}": {"X": x, "y": y[:, k]} for k in range(UNITS)}
        settings: dict[str, Any] = {"rounds": 12, "engine": fedppl.InProcess(workers=1), "progressbar": False}
        fit = fedppl.fit(declaration(LATENTS, True), clients, fedppl.curves.Ascent(warmup=2), **settings, random_seed=0)
        found[size] = min(record.seconds for record in fit.records[5:])  # with kernels that have a start, and selection
    slope = np.polyfit(np.log(list(found)), np.log(list(found.values())), 1)[0]
    return found, float(slope)


def plus_minus(mean: float | None, sd: float | None) -> str:
    """A mean and its sd; nothing for what was not published."""
    return "" if mean is None else f"{mean:.4f} ± {sd:.4f}"


def show(table: pd.DataFrame, paper: dict[str, tuple[Any, ...]], title: str) -> pd.DataFrame:
    """Print one table beside the paper's figures; means over runs."""
    runs, groups = table["run"].nunique(), table.drop(columns=["table", "run"]).groupby("method", sort=False)
    mean, sd = groups.mean(), groups.std().fillna(0.0)
    shown = mean.copy()
    for i, name in ((0, "all noisy"), (2, "selected")):
        if name in mean:
            shown[name] = list(map(plus_minus, mean[name].replace({np.nan: None}), sd[name]))
            published = [plus_minus(*paper.get(method, (None,) * 4)[i : i + 2]) for method in mean.index]
            shown.insert(shown.columns.get_loc(name), "paper's " + name.split()[0], published)
    print(f"\n{title}; mean over {runs} runs, ± sd over runs")
    print(shown.rename_axis(None).to_string(float_format="{:.4f}".format, na_rep=""), flush=True)
    return mean


def bars(units: pd.DataFrame, new: pd.DataFrame, chosen: pd.Series) -> list[tuple[str, bool]]:
    """What FedLMC-SS by coordinate ascent must reach, as far as the methods that ran can tell."""
    ours, mse, six = units.loc["FedLMC-SS"], units["all noisy"], float(np.mean(chosen == 6))
    found = [
        (f"MSE {ours['all noisy']:.4f}, at most 0.07", ours["all noisy"] <= 0.07),
        (f"six functions selected in {six:.0%} of runs, at least 90 %", six >= 0.9),
        (f"coverage outside the range {ours['outside']:.3f}, within 0.87 and 0.94", 0.87 <= ours["outside"] <= 0.94),
        (f"training {ours['seconds']:.1f} s, below 20", ours["seconds"] < 20),
    ]
    ratios = [(f"that of {name}", mse["FedLMC-SS"] / mse[name], most) for name, most in MOST.items() if name in mse]
    if "FedLMC-SS-selected" in new.index:
        ratio = new.loc["FedLMC-SS-selected", "all noisy"] / new.loc["Oracle", "all noisy"]
        ratios.append(("the oracle's for new units", ratio, 1.3))
    found += [(f"MSE {ratio:.2f} times {what}, at most {most}", ratio <= most) for what, ratio, most in ratios]
    return [(text, bool(met)) for text, met in found]


def draw(path: Path, rounds: int | None) -> None:
    """Fits of FedLMC-SS with intervals, its latent functions and their coefficients, for the first run."""
    import matplotlib.pyplot as plt

    problem = generate(0)
    fit = train(METHODS["FedLMC-SS"], problem, rounds, 0)
    names = list(fit.client_ids)
    panels = [names[:5], names[5:], ["functions"] * 3 + ["coefficients"] * 2]
    figure, axes = plt.subplot_mosaic(panels, figsize=(15, 8), layout="constrained")
    for k, name in enumerate(names):
        found, axis, data = fedppl.curves.predict(fit, name, {"X": X}, ci_prob=0.9), axes[name], seen(problem, k)
        axis.fill_between(X, found["ci_low"], found["ci_high"], color="C0", alpha=0.25, linewidth=0)
        axis.plot(X, found["mean"], color="C0", label="mean and 90 % interval")
        axis.plot(X, problem.curves[k], color="black", linewidth=0.8, linestyle="--", label="curve")
        axis.plot(data["X"], data["y"], ".", color="C1", markersize=3, label="seen")
        axis.set(title=name)
    axes[names[0]].legend(fontsize="x-small")
    latent = fedppl.curves.latent_curves(fit, {"X": X})
    for number in np.flatnonzero(latent["inclusion_probability"] > 0.5):
        axes["functions"].plot(X, latent["mean"][number], label=f"function {number}")
    axes["functions"].set(title="selected latent functions")
    axes["functions"].legend(fontsize="x-small", ncols=2)
    expected = fedppl.curves.coefficients(fit)["expected"].values
    most = float(np.abs(expected).max())
    image = axes["coefficients"].imshow(expected, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
    axes["coefficients"].set(title="γ E[w]", xlabel="latent function", ylabel="unit")
    figure.colorbar(image, ax=axes["coefficients"])
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    """Do the runs, print the tables, the bars and one line of JSON; 1 where a bar is missed."""
    options, started = arguments(argv), time.perf_counter()
    logging.getLogger("fedppl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=fedppl.ConvergenceWarning)
    records: list[dict[str, Any]] = []
    methods = [name for name in METHODS if name in options.methods]
    job = functools.partial(one_run, methods=methods, rounds=options.rounds, new=not options.skip_new)
    # Spawned, because a forked copy of a process with threads can hang. One thread each: the runs are the parallelism,
    # and processor time is seconds then.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for found in pool.map(job, range(options.runs)):
            records += found
            told = "; ".join(f"{r['method']} {r['all noisy']:.4f}" for r in found if r["table"] == "I")
            print(f"run {found[0]['run']}: {told}", file=sys.stderr, flush=True)
    first, second = (pd.DataFrame([record for record in records if record["table"] == name]) for name in ("I", "II"))
    units = show(first, PAPER, "Unit 0, which misses a range")
    new = second if options.skip_new else show(second, PAPER_NEW, "New units")
    line: dict[str, Any] = {"runs": options.runs}
    for name, table in (("units", units), ("new", new)):
        line[name] = {method: row.dropna().round(4).to_dict() for method, row in table.iterrows()}
    judged: list[tuple[str, bool]] = []
    if "FedLMC-SS" in methods:
        judged = bars(units, new, first.loc[first["method"] == "FedLMC-SS", "selected"])
        over = units.loc["FedLMC-SS", "all noisy"] / units.loc["Oracle", "all noisy"] - 1
        print(f"\nFedLMC-SS is {over:+.1%} from the oracle; within 20 % is what we hope for")
    if options.timing:
        by_size, slope = timing()
        print("\nSeconds a round by rows of a unit: " + ", ".join(f"{n}: {s:.4f}" for n, s in by_size.items()))
        judged.append((f"a round's time grows with the rows to the power {slope:.2f}, at most 1.1", slope <= 1.1))
        line["timing"] = {str(n): round(s, 4) for n, s in by_size.items()} | {"exponent": round(slope, 3)}
    for text, met in judged:
        print(f"{'met' if met else 'MISSED'}: {text}")
    if options.figure:
        draw(options.figure, options.rounds)
    line["missed"] = [text for text, met in judged if not met]
    line["seconds"] = round(time.perf_counter() - started, 1)
    print(json.dumps(line))
    return 1 if line["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
