"""What engines cost: overhead of the embedded one per client and round, and a simulation of many virtual clients.

    python benchmarks/engines.py --clients 1000 --asked 100 --rounds 10 --workers 2

The overhead is the time of an exchange less the time that clients compute. The simulation needs fedppl[flower]; its
posterior is compared with that of the embedded engine, which runs the same seeds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

import fedppl
from fedppl import gaussian
from fedppl.contracts import Algorithm, Reply, Request
from fedppl.engine.inprocess import InProcessEngine
from fedppl.testing import normal_means


class Timed(InProcessEngine):
    """The embedded engine with a clock around every exchange."""

    def __init__(self, algorithm: Algorithm, models: Mapping[str, Any], workers: int) -> None:
        super().__init__(algorithm, models, workers)
        self.seconds = 0.0

    def exchange(self, requests: Mapping[str, Request], deadline: float | None, *heard: Any) -> dict[str, Any]:
        """Exchange and add to the time."""
        started = time.perf_counter()
        answers = super().exchange(requests, deadline, *heard)
        self.seconds += time.perf_counter() - started
        assert all(isinstance(answer, Reply) for answer in answers.values())
        return answers


def overhead(clients: int, rounds: int) -> dict[str, float]:
    """Milliseconds per client and round: of the exchange alone, and of the whole loop, without what clients compute."""
    model, data = normal_means(clients, rows=5)
    inner = fedppl.EP(tolerance=1e-15)
    computing = 0.0

    def update_client(*arguments: Any) -> Any:
        nonlocal computing
        started = time.perf_counter()
        answer = inner.update_client(*arguments)
        computing += time.perf_counter() - started
        return answer

    engines: list[Timed] = []

    def engine(algorithm: Algorithm, models: Mapping[str, Any]) -> Timed:
        engines.append(Timed(algorithm, models, 1))
        return engines[-1]

    steps = fedppl.rounds(
        model, data, inner._replace(update_client=update_client), engine=engine, rounds=rounds + 1, random_seed=1
    )
    next(steps)  # compiles
    computing, engines[0].seconds = 0.0, 0.0
    started = time.perf_counter()
    done = sum(1 for _ in steps) * clients
    whole = time.perf_counter() - started
    return {
        "exchange_ms": 1e3 * (engines[0].seconds - computing) / done,
        "loop_ms": 1e3 * (whole - computing) / done,
        "client_ms": 1e3 * computing / done,
    }


def simulation(clients: int, asked: int, rounds: int, workers: int) -> dict[str, Any]:
    """Seconds of a simulation from call to result, and how far its posterior is from the embedded engine's."""
    model, data = normal_means(clients, rows=10)
    settings: dict[str, Any] = {"participation": asked, "rounds": rounds, "progressbar": False, "random_seed": 1}
    warnings.filterwarnings("ignore", category=fedppl.ConvergenceWarning)  # a given number of rounds is compared
    here = fedppl.fit(model, data, fedppl.EP(tolerance=1e-9, warm_start=False), **settings)
    started = time.perf_counter()
    there = fedppl.fit(
        model,
        data,
        fedppl.EP(tolerance=1e-9, warm_start=False),
        engine=fedppl.Flower.simulation(workers=workers),
        **settings,
    )
    seconds = time.perf_counter() - started
    q, p = here.posterior, there.posterior
    sd = gaussian.standard_deviations(q)
    return {
        "seconds": seconds,
        "first_round_s": there.records[0].seconds,
        "later_round_s": float(np.mean([record.seconds for record in there.records[1:]])),
        "replies": sum(len(record.infos) for record in there.records),
        "failures": sum(len(record.failures) for record in there.records),
        "difference_sd": float(np.max(np.abs(gaussian.mean(p) - gaussian.mean(q)) / sd)),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--asked", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-simulation", action="store_true", help="measure the embedded engine alone")
    options = parser.parse_args(argv)
    figures: dict[str, Any] = {"inprocess": overhead(options.clients, options.rounds)}
    for name, value in figures["inprocess"].items():
        print(f"embedded engine, {name:12} {value:8.4f} ms per client and round")
    if not options.no_simulation and importlib.util.find_spec("flwr") is not None:
        found = simulation(options.clients, options.asked, options.rounds, options.workers)
        figures["simulation"] = found
        print(
            f"simulation, {options.clients} clients, {options.asked} asked, {options.rounds} rounds: "
            f"{found['seconds']:.1f} s, of which {found['first_round_s']:.1f} s enrolment and first round; "
            f"{found['failures']} failures; {found['difference_sd']:.1e} sd from the embedded engine"
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
