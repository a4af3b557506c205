"""Numbers of every algorithm and local inference with fixed seeds: made before a change of structure, compared after.

``python -m tests.record write FILE`` and ``python -m tests.record compare FILE``; numbers are equal to 1e-12 or listed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import fedppl
from tests import test_conformance, test_runs

ROUNDS = 6
_KEPT = 3  # entries of an array that are written as they are, beside its sum and its norm
_LIMIT = 1e-12


def numbers(value: Any) -> list[float]:
    """Size, first entries, sum and norm of an array of numbers."""
    flat = np.asarray(value, dtype=float).ravel()
    return [float(flat.size), *map(float, flat[:_KEPT]), float(flat.sum()), float(np.sqrt(np.sum(flat**2)))]


class Listening:
    """An engine that writes down what travels."""

    def __init__(self, engine: Any, heard: dict[str, list[float]]) -> None:
        self._engine, self._heard = engine, heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def exchange(self, requests: Mapping[str, Any], deadline: float | None) -> Any:
        """Pass on, and keep the numbers of both ways."""
        replies = self._engine.exchange(requests, deadline)
        for client_id, request in requests.items():
            for way, message in (("down", request.message), ("up", getattr(replies[client_id], "message", {}))):
                for name, value in message.items():
                    self._heard[f"round {request.round}/{client_id}/{way}/{name}"] = numbers(value)
        return replies


def of_dataset(data: Any, at: str) -> dict[str, list[float]]:
    """Every variable of a group that holds numbers, times aside."""
    return {
        f"{at}/{name}": numbers(values)
        for name, values in data.data_vars.items()
        if values.dtype.kind in "fiub" and not str(name).endswith("seconds")
    }


def of_fit(build: Callable[[], Any], problem: Callable[[], Any]) -> dict[str, list[float]]:
    """A fit of a few rounds: what travels, what it ends with, what two clients draw."""
    found: dict[str, list[float]] = {}
    start = fedppl.InProcess(workers=1)
    model, clients = problem()
    fit = fedppl.fit(
        model,
        clients,
        build(),
        rounds=ROUNDS,
        engine=lambda algorithm, models: Listening(start(algorithm, models), found),
        progressbar=False,
        random_seed=3,
    )
    shared = fit.shared(draws=20, chains=1, unconverged=True)
    for group in ("posterior", "point_estimate", "rounds", "fit"):
        if group in (shared.groups if isinstance(shared.groups, tuple) else shared.groups()) or f"/{group}" in (
            shared.groups if isinstance(shared.groups, tuple) else ()
        ):
            found |= of_dataset(shared[group], group)
    for client_id in list(clients)[:2]:
        try:
            own = fit.client(client_id, draws=20, chains=1)["posterior"]
        except fedppl.NotConvergedError:
            continue
        found |= of_dataset(own, f"client {client_id}")
    found["status"] = [float(list(fedppl.Status).index(fit.status))]
    return found


def of_way(way: Any, target: Any) -> dict[str, list[float]]:
    """Moments and draws of one tilted distribution."""
    moments = way.tilted(target, np.random.default_rng(5))
    drawn = way.draw(target, 20, 1, np.random.default_rng(6))
    found = {name: numbers(value) for name, value in moments._asdict().items() if name != "diagnostics"}
    found |= {f"diagnostics/{name}": numbers(value) for name, value in moments.diagnostics.items()}
    return found | {"shared": numbers(drawn.shared), "local": numbers(drawn.local)}


def record() -> dict[str, dict[str, list[float]]]:
    """Everything, by case."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, (way, _) in test_conformance.WAYS.items():
        found[f"local/{name}/regression"] = of_way(way, test_conformance.target())
        found[f"local/{name}/noise"] = of_way(way, test_conformance.noise_case()[0])
    for name, row in test_conformance.ALGORITHMS.items():
        found[f"algorithm/{name}"] = of_fit(row.build, row.problem)
    for name, case in test_runs.CASES.items():
        found[f"run/{name}"] = of_fit(case.build, case.problem)
    return found


def differences(before: Mapping[str, Mapping[str, list[float]]], after: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Where two records differ by more than 1e-12 of the larger entries."""
    told = [f"{case}: only in one" for case in sorted(before.keys() ^ after.keys())]
    for case in before.keys() & after.keys():
        one, other = before[case], after[case]
        told += [f"{case}: {name} only in one" for name in sorted(one.keys() ^ other.keys())]
        for name in one.keys() & other.keys():
            a, b = np.asarray(one[name], dtype=float), np.asarray(other[name], dtype=float)
            if a.shape != b.shape:
                told.append(f"{case}: {name} has another size")
                continue
            size = 1.0 + np.abs(np.where(np.isfinite(a), a, 0.0))
            apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b) / size)
            if not np.all(apart <= _LIMIT):
                told.append(f"{case}: {name} differs by {np.max(apart):.3g}")
    return sorted(told)


def main(argv: list[str]) -> int:
    """Write or compare; 1 where numbers differ."""
    do, path = argv
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory():
        found = record()
    if do == "write":
        Path(path).write_text(json.dumps(found))
        return 0
    told = differences(json.loads(Path(path).read_text()), found)
    count = sum(map(len, found.values()))
    sys.stdout.write("\n".join([*told, f"{len(told)} of {count} arrays differ"]) + "\n")
    return int(bool(told))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
