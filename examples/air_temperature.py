"""A weather station's missing hours, learned from its neighbours' curves (Gao and Chung, section 5.2).

Four stations on the southern coast of England recorded the air temperature every five minutes in July 2013. Three of
them are the clients, and what they share are latent functions of time. The fourth comes when the fit is done, is fitted
to these functions on its own rows alone, and predicts the hours that it has not seen. Days 10 to 15, and the hours that
are missing, are those of the literature on coregionalised processes: Cambermet from 10.2 to 10.8, Chimet from 13.5 to
14.2. The paper took one day of November 2023, which it does not name; ``--day`` takes one day, with five hours missing.

No temperature leaves a station. For a common scale each of the three sends the number, the sum and the sum of squares
of its rows, and the new station takes the mean and standard deviation that follow: its own rows would give a level of
the wrong hours, since those that are missing are the warm ones. IGP, the station alone, has nothing but its own rows.

All rows with "eq. 17" take the shared functions as they are, as the paper does for a new unit; the others let the
station's own rows speak about the functions too. FedLMC-selected uses as many functions of FedLMC as FedLMC-SS
selected, those with the largest sums of squared mean coefficients.

The coordinate ascent leaves superfluous functions of FedLMC at zero as well, because σ_w is learned: three of ten
remain, as many as there are clients, with the selection and without, and the two differ by little. What sets them apart
in the paper is the averaged Adam, which ``--averaging`` adds.

Nothing was chosen by the missing hours. The grid of inducing points (two hours), the covariance, the level and the
kernels' step were chosen on days 5 to 10, by the bound and by eight gaps in Cambermet's rows there: the squared
exponential and Matérn 5/2 (bounds 795 and 764, mean squared errors 0.71 and 0.68), grids of two hours and of one and a
half (0.71 and 0.69), the common level and the station's own (0.71 and 0.94).

    python examples/air_temperature.py --figure stations.png
    python examples/air_temperature.py --day 11 --averaging 150
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
FILES = {"Bramblemet": "bra.mat", "Cambermet": "cam.mat", "Chimet": "chi.mat", "Sotonmet": "sot.mat"}
DAYS = (10.0, 15.0)
MISSING = {"Cambermet": (10.2, 10.8), "Chimet": (13.5, 14.2)}
MISSING_OF_DAY = (12 / 24, 17 / 24)  # with --day
SPACING = 2 / 24  # of inducing points, days
LATENTS = 10
TEMPERATURE = 3  # its column in the files
OURS, THEIRS = "FedLMC-SS", "FedLMC-selected"


class Station(NamedTuple):
    """Temperatures of one station."""

    days: np.ndarray  # since 1 July 2013
    celsius: np.ndarray


class Task(NamedTuple):
    """One new station and one seed; all that a worker process needs."""

    new: str
    seed: int
    span: tuple[float, float]
    clients: dict[str, Station]
    known: Station  # of the new station
    missing: Station
    options: argparse.Namespace


class Scale(NamedTuple):
    """Constants that all agree on."""

    level: float
    unit: float


class Row(NamedTuple):
    """One method in the missing hours."""

    mse: float  # °C²
    coverage: float  # of 90 % intervals
    functions: int
    bound: float
    seconds: float


class Result(NamedTuple):
    """All rows of one task, and what the figure shows."""

    rows: dict[str, Row]
    shown: dict[str, Any]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with south_coast_air_temp/ and in it bra.mat, cam.mat, ...")
    parser.add_argument("--day", type=int, help="one day of July instead of days 10 to 15, 12:00 to 17:00 missing")
    parser.add_argument("--every", type=int, help="minutes between training rows, by default 30, or 5 with --day")
    parser.add_argument("--new", choices=MISSING, nargs="+", default=list(MISSING), help="by default one by one")
    parser.add_argument("--seeds", type=int, help="random starts, by default 5")
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--rounds", type=int, help="of the coordinate ascent, by default 100")
    parser.add_argument("--averaging", type=int, default=0, help="add the paper's algorithm with so many rounds; slow")
    parser.add_argument("--processes", type=int, default=2, help="fits at a time, each in a process of its own")
    parser.add_argument("--figure", type=Path, help="write Cambermet's missing hours, functions, coefficients here")
    parser.add_argument("--quick", action="store_true", help="a small run that only shows that everything works")
    options = parser.parse_args(argv)
    if options.quick and options.day is None:
        options.day = 11
    defaults = (("every", 30, 30 if options.day is None else 5), ("seeds", 1, 5), ("rounds", 12, 100))
    for name, small, full in defaults:
        if getattr(options, name) is None:
            setattr(options, name, small if options.quick else full)
    if options.day is not None and not 1 <= options.day <= 15:
        parser.error("--day must be 1 to 15")
    if options.every < 5 or options.every % 5:
        parser.error("--every must be a multiple of 5, the minutes between two rows")
    if min(options.seeds, options.rounds, options.processes) < 1 or min(options.averaging, options.seed) < 0:
        parser.error("--seeds, --rounds and --processes must be at least 1, --averaging and --seed at least 0")
    return options


def find_data(given: Path | None) -> Path:
    """Return the folder of the stations' files, or end with a message that says how to provide them."""
    named = os.environ.get("FEDPPL_DATA")
    folder = (given or (Path(named) if named else ROOT.parent / "shared" / "data")) / "south_coast_air_temp"
    for file in FILES.values():
        if not (folder / file).is_file():
            sys.exit(
                f"{folder / file} does not exist. Give the data folder by --data or FEDPPL_DATA; the files are in "
                "data/weather of trungngv/cogp, the code of Nguyen and Bonilla's Collaborative multi-output Gaussian "
                "processes."
            )
    return folder


def load(folder: Path) -> dict[str, Station]:
    """Read all stations; where there is no value the files have -1."""
    stations = {}
    for name, file in FILES.items():
        table = loadmat(folder / file)
        celsius = table["y"][:, TEMPERATURE].astype(float)
        there = np.isfinite(celsius) & (celsius != -1)
        stations[name] = Station(table["x"][there, 0].astype(float), celsius[there])
    return stations


def taken(station: Station, rows: np.ndarray) -> Station:
    """Some rows of a station."""
    return Station(station.days[rows], station.celsius[rows])


def divide(stations: Mapping[str, Station], new: str, seed: int, options: argparse.Namespace) -> Task:
    """Clients, what is known of the new station, and what is missing: training rows thinned, missing ones all."""
    span, hours = DAYS, MISSING[new]
    if options.day is not None:
        span = (options.day - 1.0, float(options.day))
        hours = (span[0] + MISSING_OF_DAY[0], span[0] + MISSING_OF_DAY[1])

    def between(station: Station, ends: tuple[float, float]) -> np.ndarray:
        return (station.days > ends[0] - 1e-6) & (station.days < ends[1] + 1e-6)

    def thinned(station: Station) -> np.ndarray:
        return between(station, span) & (np.round(station.days * 288).astype(int) % (options.every // 5) == 0)

    clients = {name: taken(own, thinned(own)) for name, own in stations.items() if name != new}
    own = stations[new]
    gap = between(own, hours)
    return Task(new, seed, span, clients, taken(own, thinned(own) & ~gap), taken(own, gap), options)


def agreed(clients: Mapping[str, Station]) -> Scale:
    """Mean and standard deviation of the clients' rows, from sums."""
    sent = [np.array([len(c.celsius), c.celsius.sum(), (c.celsius**2).sum()]) for c in clients.values()]
    count, total, squares = np.sum(sent, axis=0)
    return Scale(total / count, float(np.sqrt(squares / count - (total / count) ** 2)))


def rows(station: Station, scale: Scale) -> dict[str, np.ndarray]:
    """A station's rows as its client holds them."""
    return {"X": station.days, "y": (station.celsius - scale.level) / scale.unit}


@functools.cache
def declared(span: tuple[float, float], latents: int, select: bool) -> fedppl.FederatedModel:
    """One declaration a process, so that nothing is compiled twice."""
    builder = functools.partial(
        fedlmc_ss.unit,
        inducing=np.linspace(*span, round((span[1] - span[0]) / SPACING) + 1),
        latents=latents,
        inclusion=0.5 if select else None,
        lengthscale=0.15,
        lengthscale_spread=0.5,
        noise_sd=0.1,
        noise_spread=1.0,
    )
    return fedppl.FederatedModel(builder, fedlmc_ss.SHARED if select else fedlmc_ss.SHARED_WITHOUT_SELECTION)


def fit(
    task: Task, units: Mapping[str, Any], latents: int, select: bool, algorithm: fedppl.Algorithm, rounds: int
) -> tuple[fedppl.Fit, float, float]:
    """Fit these units; its bound, and the seconds it took."""
    began = time.perf_counter()
    found = fedppl.fit(
        declared(task.span, latents, select),
        units,
        algorithm,
        rounds=rounds,
        engine=fedppl.InProcess(workers=1),
        progressbar=False,
        random_seed=task.seed,
    )
    return found, found.records[-1].info["bound"], time.perf_counter() - began


def forecast(found: fedppl.Fit, unit: Any, days: np.ndarray, scale: Scale, **how: Any) -> np.ndarray:
    """Lower end, mean and upper end (3, n) of 90 % intervals, °C."""
    said = fedppl.curves.predict(found, unit, {"X": days}, ci_prob=0.9, **how)
    return np.stack([scale.level + scale.unit * said[name].values for name in ("ci_low", "mean", "ci_high")])


def score(task: Task, found: fedppl.Fit, unit: Any, scale: Scale, **how: Any) -> tuple[float, float]:
    """Mean squared error in the missing hours, and the share of rows within the intervals."""
    low, middle, high = forecast(found, unit, task.missing.days, scale, **how)
    truth = task.missing.celsius
    return float(np.mean((middle - truth) ** 2)), float(np.mean((low <= truth) & (truth <= high)))


def strongest(found: fedppl.Fit, count: int) -> list[int]:
    """The functions with the largest sums of squared mean coefficients over the clients."""
    size = (fedppl.curves.coefficients(found)["mean"] ** 2).sum("client").values
    return sorted(np.argsort(-size)[:count].tolist())


def one_task(task: Task) -> Result:
    """All rows of one new station and one seed."""
    logging.getLogger("pymc").setLevel(logging.WARNING)
    logging.getLogger("fedppl").setLevel(logging.ERROR)  # a fit whose rounds ran out is told by its bound
    warnings.filterwarnings("ignore", category=fedppl.ConvergenceWarning)
    options, scale, own = task.options, agreed(task.clients), agreed({task.new: task.known})
    latents = 3 if options.quick else LATENTS
    units = {name: rows(station, scale) for name, station in task.clients.items()}
    new = rows(task.known, scale)
    kinds = {"": (fedppl.curves.Ascent(kernel_rate=0.1), options.rounds)}
    if options.averaging:
        third = max(options.averaging // 3, 1)
        kinds[", averaging"] = (fedppl.curves.Averaging(milestones=(third, 2 * third)), options.averaging)
    alone, bound, seconds = fit(task, {task.new: rows(task.known, own)}, 1, False, *kinds[""])
    table = {"IGP": Row(*score(task, alone, task.new, own), 1, bound, seconds)}
    bands: dict[str, Any] = {}
    shown: dict[str, Any] = {"bands": bands, "fits": {}}
    days = np.linspace(*task.span, 400)
    for kind, how in kinds.items():
        for select in (True, False):
            found, bound, seconds = fit(task, units, latents, select, *how)
            if select:
                count = int(fedppl.curves.selection(found)["selected"].sum())
                uses: dict[str, list[int] | None] = {OURS: None}
            else:
                uses = {THEIRS: strongest(found, max(count, 1)), "FedLMC-all": None}
            for name, latent in uses.items():
                used = count if select else latents if latent is None else len(latent)
                for fixed, suffix in ((False, ""), (True, ", eq. 17")):
                    values = score(task, found, new, scale, latents=latent, fixed=fixed)
                    table[name + kind + suffix] = Row(*values, used, bound, seconds)
                if not kind and name != "FedLMC-all" and options.figure is not None:
                    bands[name] = forecast(found, new, days, scale, latents=latent)
            if not kind and options.figure is not None:
                shown["fits"]["FedLMC-SS" if select else "FedLMC"] = {
                    "curves": fedppl.curves.latent_curves(found, {"X": days})["mean"].values,
                    "coefficients": fedppl.curves.coefficients(found)["expected"].values,
                }
    if options.figure is not None:
        bands["IGP"] = forecast(alone, task.new, days, own)
    return Result(table, shown)


def every_task(tasks: Sequence[Task], processes: int) -> Iterator[Result]:
    """Run all tasks, `processes` at a time, and give the results in order."""
    if min(processes, len(tasks)) == 1:
        yield from map(one_task, tasks)
        return
    # Spawned, because a forked copy of a process with threads can hang. One thread each: tasks are the parallelism.
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(one_task, tasks)


def means(seeds: Sequence[Mapping[str, Row]]) -> dict[str, dict[str, float]]:
    """Means over seeds."""
    found = {}
    for name in seeds[0]:
        values = np.array([table[name] for table in seeds], dtype=float)
        found[name] = dict(zip(Row._fields, values.mean(axis=0).tolist(), strict=True))
        found[name] |= {"rmse": float(np.sqrt(values[:, 0]).mean()), "mse_sd": float(values[:, 0].std())}
    return found


def show(new: str, seeds: Sequence[Mapping[str, Row]]) -> None:
    """Print the table of one new station."""
    print(f"\n{new}, missing hours: mean over {len(seeds)} seeds (standard deviation)")
    print(f"{'':36}{'RMSE, °C':>9}{'MSE, °C²':>15}{'90 %':>7}{'functions':>11}{'bound':>9}{'seconds':>9}")
    for name, row in means(seeds).items():
        print(
            f"{name:36}{row['rmse']:9.3f}{row['mse']:8.3f} ({row['mse_sd']:.3f}){row['coverage']:6.2f}"
            f"{row['functions']:11.1f}{row['bound']:9.1f}{row['seconds']:9.1f}"
        )
    for kind in ("", ", averaging"):
        for how in (kind, f"{kind}, eq. 17"):
            if OURS + how not in seeds[0]:
                continue
            pairs = np.array([table[OURS + how].mse - table[THEIRS + how].mse for table in seeds])
            what = "below" if pairs.mean() < 0 else "NOT below"
            print(
                f"FedLMC-SS{how} is {what} FedLMC-selected{how}: {pairs.mean():+.4f} °C², "
                f"lower in {np.sum(pairs < 0)} of {len(pairs)} seeds"
            )


def figure(task: Task, shown: Mapping[str, Any], path: Path) -> None:
    """Draw the new station with 90 % intervals, and below the latent functions and coefficients of both fits."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    canvas, axes = plt.subplot_mosaic("aaaa;bbcc;ddee", figsize=(10, 9), layout="constrained")
    days = np.linspace(*task.span, 400)
    axes["a"].plot(*task.known, ".", color="0.3", markersize=2, label="known")
    axes["a"].plot(*task.missing, ".", color="black", markersize=3, label="missing")
    for number, (name, (low, middle, high)) in enumerate(shown["bands"].items()):
        axes["a"].plot(days, middle, color=f"C{number}", linewidth=1, label=name)
        axes["a"].fill_between(days, low, high, color=f"C{number}", alpha=0.2, linewidth=0)
    middle_day = task.missing.days.mean()
    ends = (max(task.span[0], middle_day - 1), min(task.span[1], middle_day + 1))
    axes["a"].set(title=task.new, xlim=ends, xlabel="days since 1 July 2013", ylabel="°C")
    axes["a"].legend(frameon=False, fontsize=8, ncols=5)
    for (name, found), above, below in zip(shown["fits"].items(), "bd", "ce", strict=True):
        axes[above].plot(days, found["curves"].T, linewidth=0.8)
        axes[above].set(title=f"latent functions of {name}", xlabel="days since 1 July 2013")
        size = np.abs(found["coefficients"]).max()
        heat = axes[below].imshow(found["coefficients"], aspect="auto", cmap="RdBu_r", vmin=-size, vmax=size)
        axes[below].set(title="coefficients, γ times the mean", xlabel="latent function")
        axes[below].set_yticks(range(len(task.clients)), list(task.clients))
        canvas.colorbar(heat, ax=axes[below])
    canvas.savefig(path, dpi=150)
    print(f"wrote {path}")


def main(argv: list[str] | None = None) -> None:
    """Run all tasks, print the tables, and one line of JSON."""
    options = arguments(argv)
    if options.figure is not None and importlib.util.find_spec("matplotlib") is None:
        sys.exit("--figure needs matplotlib: pip install 'fedppl[plots]'")
    stations, began = load(find_data(options.data)), time.perf_counter()
    names = options.new[:1] if options.quick else options.new
    seeds = range(options.seed, options.seed + options.seeds)
    tasks = [divide(stations, new, seed, options) for new in names for seed in seeds]
    found: dict[str, list[Result]] = {new: [] for new in names}
    for task, result in zip(tasks, every_task(tasks, options.processes), strict=True):
        found[task.new].append(result)
        row = result.rows[OURS]
        print(
            f"{task.new}, seed {task.seed}: FedLMC-SS {row.mse:.3f} °C² with {row.functions} functions, "
            f"FedLMC-selected {result.rows[THEIRS].mse:.3f}, IGP {result.rows['IGP'].mse:.3f}",
            flush=True,
        )
    for new, results in found.items():
        show(new, [result.rows for result in results])
    print("The first fit of a model in a process counts its compilation.")
    if options.figure is not None:
        figure(tasks[0], found[names[0]][0].shown, options.figure)
    told = {"days": tasks[0].span, "seeds": options.seeds, "quick": options.quick}
    scores = {new: means([result.rows for result in results]) for new, results in found.items()}
    rounded = {new: {n: {k: round(v, 4) for k, v in r.items()} for n, r in t.items()} for new, t in scores.items()}
    print(json.dumps({**told, "stations": rounded, "seconds": round(time.perf_counter() - began, 1)}))


if __name__ == "__main__":
    main()
