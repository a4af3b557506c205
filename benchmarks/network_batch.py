"""CPU seconds of a round of networks in one process: clients one after another, and in a batch.

Random data of ten classes, 784 columns as MNIST has, and a small problem of two classes: 50 clients of 600 rows each.
The same requests go to the same clients in both ways, alternately and after a round of each that does not count, in one
thread. What is told is the median of some rounds, and the largest difference of a reply over its largest number: Adam
takes steps of one length also where a slope is near to nothing, and rounding in float32 grows with them.

    OMP_NUM_THREADS=1 python benchmarks/network_batch.py
    OMP_NUM_THREADS=1 python benchmarks/network_batch.py --networks 784-100-10 --unequal
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import fedppl
from fedppl import nn
from fedppl.contracts import Failure, Request
from fedppl.models import fedsi
from fedppl.numerics.streams import stream

ROWS = 600


def network(widths: tuple[int, ...]) -> Any:
    """One hidden layer, of the same start in every run."""
    inputs, hidden, outputs = widths
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(inputs, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, outputs))


def data(widths: tuple[int, ...], clients: int, *, unequal: bool) -> dict[str, dict[str, Any]]:
    """Rows around the centres of classes."""
    rng, found = np.random.default_rng(1), {}
    centres = rng.normal(size=(widths[2], widths[0])) * 3 / np.sqrt(widths[0])
    rows = rng.integers(ROWS // 4, 2 * ROWS - ROWS // 4, size=clients) if unequal else np.full(clients, ROWS)
    for k, count in enumerate(rows):
        y = rng.integers(widths[2], size=count)
        found[f"client {k:03}"] = {"X": (rng.normal(size=(count, widths[0])) + centres[y]).astype(np.float32), "y": y}
    return found


def seconds(engine: Any, requests: Mapping[str, Request]) -> tuple[float, dict[str, Any]]:
    """CPU seconds of an exchange, and its answers."""
    started = time.process_time()
    answers = engine.exchange(requests, None)
    return time.process_time() - started, answers


def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Largest difference of two ways' replies, over the largest number of each array."""
    found = 0.0
    for client in one:
        for name, value in one[client].message.items():
            scale = float(np.max(np.abs(value), initial=0.0)) or 1.0
            found = max(found, float(np.max(np.abs(value - other[client].message[name]), initial=0.0)) / scale)
    return found


def measured(
    widths: tuple[int, ...], algorithm: Any, shared: list[str], settings: argparse.Namespace
) -> dict[str, Any]:
    """Both ways in turn."""
    net = network(widths)
    declared = fedppl.FederatedModel(functools.partial(fedsi.classifier, net=net), shared)
    clients = declared.enrol(data(widths, settings.clients, unequal=settings.unequal), kernel=False)
    ways = {"alone": algorithm._replace(batch=None), "batch": algorithm}
    engines = {way: fedppl.InProcess(workers=1)(ways[way], clients) for way in ways}
    state = algorithm.init(next(iter(clients.values())).layout, tuple(clients), stream((0,)))
    told: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(1, settings.rounds + 2):
        requests = {
            name: Request(name, number, number, (1, number, k), algorithm.broadcast(state, name))
            for k, name in enumerate(clients)
        }
        answers = {}
        for way, engine in engines.items():
            spent, answers[way] = seconds(engine, requests)
            told[way].append(spent)
            if any(isinstance(answer, Failure) for answer in answers[way].values()):
                raise RuntimeError(f"{way}: {next(a for a in answers[way].values() if isinstance(a, Failure))}")
    alone, batch = (float(np.median(told[way][1:])) for way in ways)
    return {
        "algorithm": algorithm.name,
        "shares": "all" if len(shared) == 4 else "representation",
        "network": "-".join(map(str, widths)),
        "alone": round(alone, 3),
        "batch": round(batch, 3),
        "ratio": round(alone / batch, 2),
        "apart": float(f"{apart(answers['alone'], answers['batch']):.1e}"),
    }


def main() -> None:
    """Tell one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=["784-100-10", "784-30-10", "20-32-2"])
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unequal", action="store_true", help="clients have 150 to 1,049 rows")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    head, found = ("2.weight", "2.bias"), []
    for text in settings.networks:
        inputs, hidden, outputs = (int(width) for width in text.split("-"))
        widths = (inputs, hidden, outputs)
        everything = [name for name, _ in network(widths).named_parameters()]
        for algorithm, shared in (
            (nn.FedAvg(), everything),
            (nn.FedAvg(phases=(("local", 10), ("shared", 1))), everything[:2]),
            (nn.Confidence(head=head), everything),
        ):
            found.append(measured(widths, algorithm, shared, settings))
    print(json.dumps({"clients": settings.clients, "unequal": settings.unequal, "rounds": found}))


if __name__ == "__main__":
    main()
