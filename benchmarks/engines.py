"""Overhead of the embedded engine per client and round: the time of an exchange less the time that clients compute.

Run it by ``python benchmarks/engines.py --clients 1000 --rounds 10``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from typing import Any

import fedppl
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


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(argv)
    figures: dict[str, Any] = {"inprocess": overhead(options.clients, options.rounds)}
    for name, value in figures["inprocess"].items():
        print(f"embedded engine, {name:12} {value:8.4f} ms per client and round")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
