"""When a battery's capacity will fall, learned from other owners' batteries (Gao and Chung, section 5.2).

48 cells of one type were cycled on the same programme, a capacity check every 160 cycles or so: eleven to seventeen
points a cell, a slow fade and then a knee. In every repeat 20 cells, drawn at random, are the clients. Nineteen are
known to their end and one, the target, up to mid-life; three further cells, known up to mid-life, come when the fit is
done and are fitted to the shared functions on their own rows alone. What is scored is the other half of the target and
of the three. Mid-life is cycle 1200 for all, half of the programme's longest cycle number: half of a cell's own life is
not known before it ends.

No capacity leaves a cell. For a common scale each sends the number, the sum and the sum of squares of its training
rows, and its first capacity: curves are measured from the mean first capacity, 0 at the start as the Gaussian process
expects of them, in units of the root mean square distance from it.

The cells are not the paper's, whose 24 pouch cells are not to be had, so that its figures stand beside ours for
orientation only. A factor of 10⁴ between IGP and FedLMC-SS cannot be had here: where the knee comes differs from cell
to cell by hundreds of cycles, and what the first half tells about it is little. A regression of each later capacity on
the last two known ones, with all other cells in one place, leaves about 230e-5.

Settings were chosen on other draws (numpy's seeds 100 to 102) of the same 48 cells, and not on those of the table. With
a wide prior of the noise (noise_sd=0.05, noise_spread=2) eight early rows, which lie on a line, give the target a noise
of its own that is much too small for what two or three functions miss after the knee: 90 % intervals held 30 to 60 % of
the points, and ten times as many rounds were not enough. noise_sd=0.02 and 0.03 with noise_spread=0.3 were tried. The
kernels' step is 0.2, because with 0.05 they were still on the way after 1,000 rounds.

    python examples/battery.py --figure cells.png
    python examples/battery.py --central --repeats 3
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.io import loadmat

import fedppl
from fedppl.models import fedlmc_ss

ROOT = Path(__file__).resolve().parents[1]
MIDLIFE = 1200.0  # cycles
CYCLES = 1000.0  # the unit of x
INDUCING = np.arange(0.0, 2.41, 0.2)
LATENTS = 5
UNITS = 1e-5  # of the table, in Ah²
MAIN, MAIN_NEW = "FedLMC-SS, ascent", "FedLMC-SS-selected, ascent"
# Tables III and IV: mean squared error in 1e-5, and selected functions.
PAPER = {
    "IGP": (10302.7, None),
    "LMC, central": (15.29, 1.9),
    "LMC-SS, central": (0.3682, 2.1),
    "FedLMC, averaging": (22.17, 1.2),
    "FedLMC-SS, averaging": (0.8535, 2.0),
}
PAPER_NEW = {
    "FedLMC-selected, averaging, eq. 17": (13.69, None),
    "FedLMC-SS-selected, averaging, eq. 17": (0.6092, None),
}


class Cell(NamedTuple):
    """Capacity checks of one cell."""

    cycles: np.ndarray
    capacity: np.ndarray  # Ah


class Scale(NamedTuple):
    """Constants that all cells agree on."""

    level: float
    unit: float


class Task(NamedTuple):
    """One repeat; all that a worker process needs."""

    seed: int
    clients: dict[str, Cell]  # what they know: all, but for the target, which comes first
    target: Cell  # whole
    new: dict[str, Cell]  # whole
    options: argparse.Namespace


class Row(NamedTuple):
    """One method in one repeat."""

    mse: float  # Ah²
    coverage: float  # of 90 % intervals
    functions: float = np.nan
    bound: float = np.nan
    seconds: float = np.nan


class Result(NamedTuple):
    """All rows of one repeat, for the target and for the new cells, and what the figure shows."""

    target: dict[str, Row]
    new: dict[str, Row]
    shown: dict[str, Any]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with sanyo48_battery/baumhofer.mat")
    parser.add_argument("--repeats", type=int, help="by default 10, as in the paper")
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat; the others count on from it")
    parser.add_argument("--rounds", type=int, help="of the coordinate ascent, by default 200")
    parser.add_argument("--averaging", type=int, help="rounds of averaged Adam steps, by default 150; 0: none")
    parser.add_argument("--central", action="store_true", help="add LMC and LMC-SS: 1,000 steps of Adam in one place")
    parser.add_argument("--processes", type=int, default=2, help="repeats at a time, each in a process of its own")
    parser.add_argument("--figure", type=Path, help="write the first repeat's fits, functions and coefficients here")
    parser.add_argument("--quick", action="store_true", help="a small run that only shows that everything works")
    options = parser.parse_args(argv)
    for name, small, full in (("repeats", 1, 10), ("rounds", 15, 200), ("averaging", 3, 150)):
        if getattr(options, name) is None:
            setattr(options, name, small if options.quick else full)
    if min(options.repeats, options.rounds, options.processes) < 1 or min(options.averaging, options.seed) < 0:
        parser.error("--repeats, --rounds and --processes must be at least 1, --averaging and --seed at least 0")
    return options


def find_data(given: Path | None) -> Path:
    """Return the file of all cells, or end with a message that says how to provide it."""
    named = os.environ.get("FEDPPL_DATA")
    file = (given or (Path(named) if named else ROOT.parent / "shared" / "data")) / "sanyo48_battery" / "baumhofer.mat"
    if not file.is_file():
        sys.exit(
            f"{file} does not exist. Give the data folder by --data or FEDPPL_DATA; the file, of the ageing study of "
            "Baumhöfer et al. (2014), is in PyBOP's examples/data/Baumhofer2014."
        )
    return file


def load(file: Path) -> dict[str, Cell]:
    """Read all cells. A check without a value is left out; two checks at one cycle are two rows."""
    study = loadmat(file, squeeze_me=True, struct_as_record=False)["lifetime"]
    cells = {}
    for name in study._fieldnames:
        cycles, capacity = (np.asarray(getattr(getattr(study, name), part), dtype=float) for part in ("cyc", "cap"))
        known = np.isfinite(cycles) & np.isfinite(capacity)
        cells[name.replace("ep_sanyo_", "cell ")] = Cell(cycles[known], capacity[known])
    return cells


def until_midlife(cell: Cell) -> Cell:
    """What is known of a target or of a new cell."""
    early = cell.cycles <= MIDLIFE
    return Cell(cell.cycles[early], cell.capacity[early])


def drawn(cells: Mapping[str, Cell], seed: int, options: argparse.Namespace) -> Task:
    """Draw the clients, the first of them the target, and the new cells."""
    clients, new = (6, 1) if options.quick else (20, 3)
    order = np.random.default_rng(seed).permutation(sorted(cells))
    target = str(order[0])
    known = {str(name): cells[name] for name in order[:clients]} | {target: until_midlife(cells[target])}
    return Task(seed, known, cells[target], {str(n): cells[n] for n in order[clients : clients + new]}, options)


def agreed(clients: Mapping[str, Cell]) -> Scale:
    """Level and unit, from sums over the clients' training rows."""
    sent = [
        np.array([1.0, c.capacity[np.argmin(c.cycles)], len(c.capacity), c.capacity.sum(), (c.capacity**2).sum()])
        for c in clients.values()
    ]
    cells, first, count, total, squares = np.sum(sent, axis=0)
    level = first / cells
    return Scale(level, float(np.sqrt((squares - 2 * level * total + count * level**2) / count)))


def rows(cell: Cell, scale: Scale) -> dict[str, np.ndarray]:
    """A cell's rows as its client holds them."""
    return {"X": cell.cycles / CYCLES, "y": (cell.capacity - scale.level) / scale.unit}


@functools.cache
def declared(latents: int, select: bool) -> fedppl.FederatedModel:
    """One declaration a process, so that nothing is compiled twice."""
    builder = functools.partial(
        fedlmc_ss.unit,
        inducing=INDUCING,
        latents=latents,
        inclusion=0.5 if select else None,
        lengthscale=0.5,
        noise_sd=0.03,
        noise_spread=0.3,
    )
    return fedppl.FederatedModel(builder, fedlmc_ss.SHARED if select else fedlmc_ss.SHARED_WITHOUT_SELECTION)


def fit(
    task: Task, units: Mapping[str, Any], latents: int, select: bool, algorithm: fedppl.Algorithm, rounds: int
) -> tuple[fedppl.Fit, float, float]:
    """Fit these units; its bound, and the seconds it took."""
    began = time.perf_counter()
    found = fedppl.fit(
        declared(latents, select),
        units,
        algorithm,
        rounds=rounds,
        engine=fedppl.InProcess(workers=1),
        progressbar=False,
        random_seed=task.seed,
    )
    return found, found.records[-1].info["bound"], time.perf_counter() - began


def forecast(found: fedppl.Fit, unit: Any, cycles: np.ndarray, scale: Scale, **which: Any) -> np.ndarray:
    """Lower end, mean and upper end (3, n) of 90 % intervals of the capacity, Ah."""
    said = fedppl.curves.predict(found, unit, {"X": cycles / CYCLES}, ci_prob=0.9, **which)
    return np.stack([scale.level + scale.unit * said[name].values for name in ("ci_low", "mean", "ci_high")])


def score(cell: Cell, found: fedppl.Fit, unit: Any, scale: Scale, **which: Any) -> tuple[float, float]:
    """Mean squared error after mid-life, and the share of points within the intervals."""
    late = cell.cycles > MIDLIFE
    low, middle, high = forecast(found, unit, cell.cycles[late], scale, **which)
    truth = cell.capacity[late]
    return float(np.mean((middle - truth) ** 2)), float(np.mean((low <= truth) & (truth <= high)))


def mean_curve(task: Task, cell: Cell) -> tuple[float, float]:
    """What the others' mean capacity at each cycle would say, were it known in one place; no federated method."""
    late, others = cell.cycles > MIDLIFE, list(task.clients.values())[1:]
    at = np.array([np.interp(cell.cycles[late], other.cycles, other.capacity, right=np.nan) for other in others])
    known = np.isfinite(at).any(axis=0)
    error = np.nanmean(at[:, known], axis=0) - cell.capacity[late][known]
    return float(np.mean(error**2)), np.nan


def strongest(found: fedppl.Fit, count: int) -> list[int]:
    """The functions with the largest sums of squared mean coefficients over the clients."""
    size = (fedppl.curves.coefficients(found)["mean"] ** 2).sum("client").values
    return sorted(np.argsort(-size)[:count].tolist())


def one_repeat(task: Task) -> Result:
    """All rows of one repeat."""
    logging.getLogger("pymc").setLevel(logging.WARNING)
    logging.getLogger("fedppl").setLevel(logging.ERROR)  # a fit whose rounds ran out is told by its bound
    warnings.filterwarnings("ignore", category=fedppl.ConvergenceWarning)
    options, scale, target = task.options, agreed(task.clients), next(iter(task.clients))
    latents = 3 if options.quick else LATENTS
    units = {name: rows(cell, scale) for name, cell in task.clients.items()}
    new = {name: rows(until_midlife(cell), scale) for name, cell in task.new.items()}
    kinds = {"ascent": (fedppl.curves.Ascent(kernel_rate=0.2), options.rounds)}
    if options.averaging:
        third = max(options.averaging // 3, 1)
        kinds["averaging"] = (fedppl.curves.Averaging(milestones=(third, 2 * third)), options.averaging)
    if options.central:
        kinds["central"] = (fedppl.curves.Gradient(), 50 if options.quick else 1000)

    def newcomers(found: fedppl.Fit, **how: Any) -> list[float]:
        scores = [score(cell, found, new[name], scale, **how) for name, cell in task.new.items()]
        return np.mean(scores, axis=0).tolist()

    alone, bound, seconds = fit(task, {target: units[target]}, 1, False, *kinds["ascent"])
    at_target = {"IGP": Row(*score(task.target, alone, target, scale), 1, bound, seconds)}
    own = {name: fit(task, {name: new[name]}, 1, False, *kinds["ascent"])[0] for name in new}
    at_new = {"IGP": Row(*np.mean([score(task.new[n], own[n], n, scale) for n in own], axis=0).tolist(), 1)}
    shown: dict[str, Any] = {}
    for kind, how in kinds.items():
        for select in (True, False):
            found, bound, seconds = fit(task, units, latents, select, *how)
            name = f"{'' if kind == 'central' else 'Fed'}LMC{'-SS' if select else ''}"
            if select:
                count = int(fedppl.curves.selection(found)["selected"].sum())
                uses: dict[str, list[int] | None] = {"selected": None}
            else:
                uses = {"selected": strongest(found, max(count, 1)), "all": None}
            used = count if select else latents
            at_target[f"{name}, {kind}"] = Row(*score(task.target, found, target, scale), used, bound, seconds)
            for which, functions in uses.items():
                used = latents if which == "all" else count
                for fixed, suffix in ((False, ""), (True, ", eq. 17")):
                    values = newcomers(found, latents=functions, fixed=fixed)
                    at_new[f"{name}-{which}, {kind}{suffix}"] = Row(*values, used)
            if f"{name}, {kind}" == MAIN and options.figure is not None:
                shown = picture(task, found, alone, new)
    at_target["mean of the others, pooled"] = Row(*mean_curve(task, task.target))
    means = [mean_curve(task, cell) for cell in task.new.values()]
    at_new["mean of the others, pooled"] = Row(*np.mean(means, axis=0).tolist())
    return Result(at_target, at_new, shown)


def picture(task: Task, found: fedppl.Fit, alone: fedppl.Fit, new: Mapping[str, Any]) -> dict[str, Any]:
    """Forecasts of the target and of the first new cell, latent functions, and coefficients."""
    cycles, scale = np.linspace(0.0, task.target.cycles.max(), 121), agreed(task.clients)
    target, first = next(iter(task.clients)), next(iter(new))
    curves = fedppl.curves.latent_curves(found, {"X": cycles / CYCLES})
    return {
        "cycles": cycles,
        "cells": {f"target, {target}": task.target, f"new, {first}": task.new[first]},
        "bands": {
            f"target, {target}": {
                MAIN: forecast(found, target, cycles, scale),
                "IGP": forecast(alone, target, cycles, scale),
            },
            f"new, {first}": {MAIN: forecast(found, new[first], cycles, scale)},
        },
        "curves": curves["mean"].values,
        "chance": curves["inclusion_probability"].values,
        "coefficients": fedppl.curves.coefficients(found)["expected"].values,
    }


def every_repeat(tasks: Sequence[Task], processes: int) -> Iterator[Result]:
    """Run all tasks, `processes` at a time, and give the results in order."""
    if min(processes, len(tasks)) == 1:
        yield from map(one_repeat, tasks)
        return
    # Spawned, because a forked copy of a process with threads can hang. One thread each: repeats are the parallelism.
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(one_repeat, tasks)


def table(title: str, repeats: Sequence[Mapping[str, Row]], paper: Mapping[str, tuple[float, Any]]) -> None:
    """Print means over repeats, with standard deviations of the errors."""
    print(f"\n{title}")
    print(f"{'':38}{'MSE, 1e-5 Ah²':>20}{'90 %':>7}{'functions':>11}{'bound':>9}{'seconds':>9}   the paper's")
    for name in repeats[0]:
        mse, coverage, functions, bound, seconds = np.array([row[name] for row in repeats]).T
        mse = mse / UNITS
        line = f"{name:38}{mse.mean():11.1f} (±{mse.std():6.0f})"
        for values, form in ((coverage, "7.2f"), (functions, "11.1f"), (bound, "9.1f"), (seconds, "9.1f")):
            line += format(values.mean(), form) if np.isfinite(values).all() else " " * int(form.split(".")[0])
        cited = [f"{value:g}" for value in paper.get(name, ()) if value is not None]
        print(line + (f"   {' with '.join(cited)}" if cited else ""))


def ratio(repeats: Sequence[Mapping[str, Row]], name: str) -> float:
    """By which factor the mean error is below that of IGP."""
    return float(np.mean([row["IGP"].mse for row in repeats]) / np.mean([row[name].mse for row in repeats]))


def summary(target: Sequence[Mapping[str, Row]], new: Sequence[Mapping[str, Row]]) -> dict[str, Any]:
    """Figures for the last line."""

    def means(repeats: Sequence[Mapping[str, Row]], field: str) -> dict[str, float]:
        values = {name: float(np.mean([getattr(row[name], field) for row in repeats])) for name in repeats[0]}
        return {name: round(value, 7) for name, value in values.items() if np.isfinite(value)}  # JSON has no NaN

    found: dict[str, Any] = {}
    for where, repeats in (("target", target), ("new", new)):
        found[where] = {field: means(repeats, field) for field in ("mse", "coverage", "functions", "bound")}
    found["below_igp"] = {"target": round(ratio(target, MAIN), 1), "new": round(ratio(new, MAIN_NEW), 1)}
    return found


def figure(shown: Mapping[str, Any], path: Path) -> None:
    """Draw forecasts with 90 % intervals, latent functions, and coefficients of all cells."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    canvas, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    cycles = shown["cycles"]
    for axis, (name, cell) in zip(axes[0], shown["cells"].items(), strict=True):
        late = cell.cycles > MIDLIFE
        axis.plot(cell.cycles[~late], cell.capacity[~late], ".", color="0.2", label="known")
        axis.plot(cell.cycles[late], cell.capacity[late], "x", color="0.2", label="held out")
        for number, (method, (low, middle, high)) in enumerate(shown["bands"][name].items()):
            axis.plot(cycles, middle, color=f"C{number}", label=method)
            axis.fill_between(cycles, low, high, color=f"C{number}", alpha=0.2, linewidth=0)
        axis.set(title=name, xlabel="cycle", ylabel="capacity, Ah", ylim=(0, 2.1))
        axis.legend(frameon=False, fontsize=8)
    for number, (curve, chance) in enumerate(zip(shown["curves"], shown["chance"], strict=True)):
        axes[1, 0].plot(
            cycles, curve, color=f"C{number}", alpha=1.0 if chance > 0.5 else 0.3, label=f"γ = {chance:.2f}"
        )
    axes[1, 0].set(title="latent functions", xlabel="cycle")
    axes[1, 0].legend(frameon=False, fontsize=8)
    size = np.abs(shown["coefficients"]).max()
    heat = axes[1, 1].imshow(shown["coefficients"], aspect="auto", cmap="RdBu_r", vmin=-size, vmax=size)
    axes[1, 1].set(title="coefficients, γ times the mean", xlabel="latent function", ylabel="cell, the target first")
    canvas.colorbar(heat, ax=axes[1, 1])
    canvas.savefig(path, dpi=150)
    print(f"wrote {path}")


def main(argv: list[str] | None = None) -> None:
    """Run all repeats, print the tables, and one line of JSON."""
    options = arguments(argv)
    if options.figure is not None and importlib.util.find_spec("matplotlib") is None:
        sys.exit("--figure needs matplotlib: pip install 'fedppl[plots]'")
    cells, began = load(find_data(options.data)), time.perf_counter()
    tasks = [drawn(cells, options.seed + number, options) for number in range(options.repeats)]
    results = []
    for task, result in zip(tasks, every_repeat(tasks, options.processes), strict=True):
        results.append(result)
        ours, alone = result.target[MAIN], result.target["IGP"]
        print(
            f"seed {task.seed}: {next(iter(task.clients))}, FedLMC-SS {ours.mse / UNITS:.0f}e-5 with "
            f"{ours.functions:.0f} functions, IGP {alone.mse / UNITS:.0f}e-5",
            flush=True,
        )
    target, new = [result.target for result in results], [result.new for result in results]
    table(f"After mid-life of the target: mean over {len(tasks)} repeats (standard deviation)", target, PAPER)
    table("After mid-life of new cells, fitted to the shared functions on their own rows", new, PAPER_NEW)
    print("The first fit of a model in a process counts its compilation; the paper's cells are others than these.\n")
    for what, factor in (("target", ratio(target, MAIN)), ("new cells", ratio(new, MAIN_NEW))):
        print(f"{what}: FedLMC-SS is a factor of {factor:.0f} below IGP (the paper: 12000 for the target)")
    if not options.quick:
        met = ratio(target, MAIN) >= PAPER["IGP"][0] / PAPER["FedLMC-SS, averaging"][0]
        print(f"the paper's factor for the target: {'met' if met else 'MISSED; the docstring says why'}")
    if options.figure is not None:
        figure(results[0].shown, options.figure)
    seconds = round(time.perf_counter() - began, 1)
    told = {"repeats": len(tasks), "seed": options.seed, "quick": options.quick}
    print(json.dumps({**told, **summary(target, new), "seconds": seconds}))


if __name__ == "__main__":
    main()
