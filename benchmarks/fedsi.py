"""FedSI beside averages of networks, on MNIST, Fashion-MNIST and CIFAR-10 (Chen et al., Tables I and II).

Every client has 5 of the 10 labels, each label at equally many clients; rows are drawn from all images, training and
test rows of all clients are disjoint, and every client is tested on its own labels. "small" has 50 training and 950
test rows for each label of a client (CIFAR-10: 25 and 475), "large" 900 and 300 (450 and 150). Networks: an MLP with
100 hidden units, or two convolutions and three linear layers. Pixels are brought to mean 0 and sd 1 by sums over the
clients' training rows. Nothing is chosen by test rows: all rounds are run, and the last is what counts.

Rows: a method at a learning rate. "map" is the same fit with its weights as a point. Beside accuracy (mean over
clients, %) and calibration (over all clients' test rows): AUROC of the predictive entropy for images of labels that the
client does not have, and for images of another data set. --rows has fewer training rows for each label, --novel leaves
clients out of the training. --validation is for choosing settings: so many of the training rows are scored, and no test
row is looked at. So is --unused: images are scored that are neither training nor test rows of anybody. --folder keeps
finished fits and checkpoints: the same command goes on from them, and so does one with more rounds.

CIFAR-10 is a JPEG copy: its figures are not those of the exact pixels.

    python benchmarks/fedsi.py --dataset mnist --size small --seeds 3 --rounds 30
    python benchmarks/fedsi.py --dataset mnist --size small --rows 5 --methods FedBABU FedSI
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._fedsi.data import CLIENTS, FOLDERS, ROWS, find_data
from benchmarks._fedsi.fit import WIDTHS, one_seed
from benchmarks._fedsi.paper import PAPER
from benchmarks._fedsi.scores import bars
from fedppl.models import fedsi

_SAID = (
    "dataset",
    "size",
    "rows",
    "validation",
    "unused",
    "rounds",
    "seeds",
    "seed",
    "novel",
    "blocks",
    "ratio",
    "epochs",
    *WIDTHS,
)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dataset", choices=FOLDERS, default="mnist")
    parser.add_argument("--size", choices=ROWS, default="small")
    parser.add_argument("--rows", type=int, help="training rows for each label of a client, in place of the size's")
    parser.add_argument("--validation", type=int, default=0, help="training rows a label in place of the test rows")
    parser.add_argument(
        "--unused", type=int, default=0, help="images a client that nobody holds, in place of test rows"
    )
    parser.add_argument("--methods", nargs="+", choices=[*fedsi.METHODS], default=[*fedsi.METHODS])
    parser.add_argument("--rates", type=float, nargs="+", default=(1e-3, 1e-2), help="of all methods but these")
    parser.add_argument("--fedsi-rates", type=float, nargs="+", default=(1e-2,), help="of FedSI and FedSI-Fac")
    parser.add_argument("--bayes-rates", type=float, nargs="+", default=(1e-4,), help="of pFedBayes; as published")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--alpha", type=float, default=100.0, help="of FedSI: prior variance, training")
    parser.add_argument("--variance", type=float, default=3.0, help="of FedSI: prior variance, inference")
    parser.add_argument("--diagonal-variance", type=float, default=0.03, help="the same of FedSI-Fac")
    parser.add_argument("--ratio", type=float, help="share of the shared weights that FedSI infers")
    parser.add_argument("--epochs", type=int, help="passes over a client's rows in a round")
    parser.add_argument("--head-sd", type=float, default=100.0, help="declared prior sd of the head's weights")
    parser.add_argument(
        "--blocks", action="store_true", help="labels 0 to 4 at one half of the clients, 5 to 9 at others"
    )
    parser.add_argument("--novel", type=int, default=0, help="clients that are only tested")
    parser.add_argument("--processes", type=int, default=2, help="seeds at a time, each in a process of its own")
    parser.add_argument("--folder", type=Path, help="keep finished fits and checkpoints here, and go on from them")
    parser.add_argument("--data", type=Path, help="folder with mnist/, fashion_mnist/ and cifar10/")
    options = parser.parse_args(argv)
    if min(options.seeds, options.rounds, options.processes) < 1 or min(options.seed, options.novel) < 0:
        parser.error("--seeds, --rounds and --processes must be at least 1, --seed and --novel at least 0")
    if options.rows is not None and options.rows < 1:
        parser.error("--rows must be at least 1")
    if not 0 <= options.validation < ROWS[options.size][0] or (options.validation and options.rows):
        parser.error("--validation must leave training rows, and does not go with --rows")
    if options.unused < 0 or options.unused and (options.validation or options.dataset != "cifar10"):
        parser.error("--unused goes with CIFAR-10, of which clients leave images over, and not with --validation")
    if options.ratio is not None and not 0 < options.ratio <= 1 or options.epochs is not None and options.epochs < 1:
        parser.error("--ratio must lie above 0 and at most at 1, --epochs must be at least 1")
    if options.novel >= CLIENTS[options.dataset]:
        parser.error(f"--novel must leave some of {CLIENTS[options.dataset]} clients")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run all seeds, print the table, the bars and one line of JSON; 1 where a bar is missed."""
    options, started = arguments(argv), time.perf_counter()
    find_data(options.data, options.dataset)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    job = functools.partial(one_seed, options=options)
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        records = [r for found in pool.map(job, range(options.seed, options.seed + options.seeds)) for r in found]
    seeds = pd.DataFrame(records)
    groups = seeds.drop(columns="seed").groupby("row", sort=False)
    table, spread = groups.mean(), groups.std().fillna(0.0)
    shown = table.copy()
    shown.insert(1, "±", spread["accuracy"])
    size = 0 if options.size == "small" else 1
    paper = [
        PAPER[options.dataset].get(row.split()[0], ("", ""))[size] if "map" not in row else "" for row in table.index
    ]
    shown.insert(0, "paper", paper)
    print(
        f"{options.dataset}, {options.size}, {options.rounds} rounds (the paper: 800), mean over {options.seeds} "
        f"seeds\n"
    )
    print(shown.rename_axis(None).to_string(float_format="{:.4f}".format, na_rep=""))
    judged = bars(table, seeds, options)
    for text, met in judged:
        print(f"{'met' if met else 'MISSED'}: {text}")
    line = {name: value for name, value in vars(options).items() if name in _SAID and value is not None}
    line["rows of the table"] = {str(k): v.dropna().round(4).to_dict() for k, v in table.iterrows()}
    line["missed"] = [text for text, met in judged if not met]
    line["seconds"] = round(time.perf_counter() - started, 1)
    print(json.dumps(line))
    return 1 if line["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
