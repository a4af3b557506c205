"""pFedVEM beside the methods of its Table 1, on Fashion-MNIST, CIFAR-10, CIFAR-100 and digits of several sources.

Clients hold 5 of 10 labels (CIFAR-100: one subclass of each of 20 classes; digits: 5 of one source), sliced at random
places into very different sizes (`fedppl.data`). Of the published training rows every one is at one client. In a
round each client reports with probability 0.1; all of them go on with their personal parts. PM is the mean over
clients of the accuracy of their own models on all test rows of their labels, GM the accuracy of the global model on
all test rows: in the last round, as a mean over the last 10, the same for an average of its weights over rounds, and
in the best round, which is chosen on the test rows and no estimate of anything. Nothing else is chosen by test rows:
--validation and --set try settings on training rows that are held out. With --score-every 10 the global model is
scored in every tenth round and in the last ten: "best" is then the best of these.

The heads of "pFedVEM" take steps that are this package's; those of "pFedVEM, authors" are the authors'.

CIFAR-10 is a JPEG copy: its figures are not those of the exact pixels. digit5 has two of its five sources, MNIST and
USPS, whose slices are independent.

    python benchmarks/pfedvem.py --dataset fmnist --clients 50 --rounds 100 --seeds 5 --methods pFedVEM FedPer FedAvg
    python benchmarks/pfedvem.py --dataset fmnist --clients 100 --cost
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import math
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._pfedvem.data import FOLDERS, find_data
from benchmarks._pfedvem.fit import cost, one_fit
from benchmarks._pfedvem.paper import printed
from benchmarks._pfedvem.scores import bars, ends_of, figures, paired
from fedppl.models import pfedvem

_SAID = ("dataset", "clients", "rounds", "seeds", "seed", "cuts", "total", "validation", "set", "score_every")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dataset", choices=FOLDERS, default="fmnist")
    parser.add_argument("--clients", type=int, choices=(50, 100, 200), default=50)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--methods", nargs="+", choices=[*pfedvem.METHODS], default=["FedAvg", "FedPer", "pFedVEM"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--every", type=int, help="also evaluate PM after every so many rounds")
    parser.add_argument("--score-every", type=int, default=1, help="rounds from one scored global model to the next")
    parser.add_argument("--cuts", choices=("same", "independent", "equal"), default="same", help="slices of labels")
    parser.add_argument("--total", type=int, help="training rows of all clients together, drawn from the published")
    parser.add_argument("--validation", type=float, default=0.0, help="score this share of the training rows instead")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the one method")
    parser.add_argument("--cost", action="store_true", help="time rounds of FedAvg and pFedVEM with all clients")
    parser.add_argument("--processes", type=int, default=2, help="fits at a time, each in a process of its own")
    parser.add_argument("--folder", type=Path, help="keep finished fits and checkpoints here, and go on from them")
    parser.add_argument("--data", type=Path, help="folder with fashion_mnist/, cifar10/ ...")
    options = parser.parse_args(argv)
    if min(options.seeds, options.rounds, options.processes) < 1 or options.seed < 0:
        parser.error("--seeds, --rounds and --processes must be at least 1, --seed at least 0")
    if not 0 <= options.validation <= 0.5:
        parser.error("--validation must lie between 0 and 0.5")
    try:
        options.settings = {name: ast.literal_eval(value) for name, value in (one.split("=", 1) for one in options.set)}
    except (ValueError, SyntaxError):
        parser.error(f"--set {' '.join(options.set)} must be NAME=VALUE, with literals of Python for values")
    if options.settings and len(options.methods) > 1:
        parser.error("--set goes with one method")
    if options.total is not None and options.total < 10 * options.clients:
        parser.error("--total must be at least ten rows a client")
    if options.dataset == "digit5" and options.cuts != "same":
        parser.error("--cuts does not go with digit5, of which each source and label is cut by itself")
    if options.score_every < 1 or options.every is not None and options.every < 1:
        parser.error("--every and --score-every must be at least 1")
    return options


def _goes_on(name: str) -> bool:
    """Whether clients have models of their own, which change from round to round."""
    return pfedvem.METHODS[name].personal and not pfedvem.METHODS[name].alone


def main(argv: list[str] | None = None) -> int:
    """Run all fits, print tables, the bars and one line of JSON; 1 where a bar is missed."""
    options, started = arguments(argv), time.perf_counter()
    find_data(options.data, options.dataset)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    if options.cost:
        print(json.dumps(cost(options)))
        return 0
    jobs = [(name, seed) for seed in range(options.seed, options.seed + options.seeds) for name in options.methods]
    results: list[dict[str, Any]] = []
    with ProcessPoolExecutor(
        options.processes, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        for found in pool.map(functools.partial(one_fit, options=options), jobs):
            results.append(found)
            spent = time.perf_counter() - started
            left = spent / len(results) * (len(jobs) - len(results))
            row = figures(found, options)
            print(
                f"{len(results)} of {len(jobs)}: seed {found['seed']}, {found['method']}, "
                f"PM {row.get('PM', math.nan):.2f}, GM {row.get('GM last 10', math.nan):.2f}; "
                f"about {left / 60:.0f} minutes left",
                file=sys.stderr,
                flush=True,
            )
    seeds = pd.DataFrame([{"method": f["method"], "seed": f["seed"], **figures(f, options)} for f in results])
    groups = seeds.drop(columns="seed").groupby("method", sort=False)
    table, sem = groups.mean(), groups.sem()
    shown = table.copy()
    for column, which in (("PM", 0), ("GM last 10", 1)):
        if column in shown:
            cells = [printed(name, options)[which] for name in table.index]
            shown.insert(shown.columns.get_loc(column), f"paper {column[:2]}", cells)
            shown.insert(shown.columns.get_loc(column) + 1, f"± {column[:2]}", sem[column])
    print(f"{options.dataset}, {options.clients} clients, {options.rounds} rounds, {options.seeds} seeds (± SEM)\n")
    print(shown.rename_axis(None).to_string(float_format="{:.2f}".format, na_rep=""))
    for end in ends_of(options)[:-1]:
        curves = {name: [] for name in options.methods if _goes_on(name)}
        for f in results:
            if f["method"] in curves and str(end) in f["PM"]:
                curves[f["method"]].append(float(np.mean(list(f["PM"][str(end)].values()))))
        said = (f"{k} {np.mean(v):.2f}" if v else f"{k} not evaluated when kept" for k, v in curves.items())
        print(f"PM after {end}: " + ", ".join(said))
    for line in paired(seeds) if "PM" in seeds else []:
        print(line)
    judged = bars(table, seeds, options)
    for text, met in judged:
        print(f"{'met' if met else 'MISSED'}: {text}")
    line = {name: getattr(options, name) for name in _SAID}
    line["table"] = {str(k): v.dropna().round(3).to_dict() for k, v in table.iterrows()}
    line["missed"] = [text for text, met in judged if not met and not text.startswith("stretch")]
    line["seconds"] = round(time.perf_counter() - started, 1)
    print(json.dumps(line))
    return 1 if line["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
