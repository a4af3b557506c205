"""Numbers of every algorithm and local inference with fixed seeds: made before a change of structure, compared after.

``python -m tests.record write FILE`` and ``python -m tests.record compare FILE``; numbers are equal to 1e-12 or listed.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import fedppl
from tests import cases, test_conformance
from tests.cases import CASES
from tests.support import problems

ROUNDS = 6
_KEPT = 3  # entries of an array that are written as they are, beside its sum and its norm
_LIMIT = 1e-12


def four(**shared: Any) -> Callable[[], Any]:
    """Networks of four clients."""
    return lambda: problems.classification(4, **shared)


REGRESSION, PART = problems.regression, four()
WHOLE = four(shared=("0.weight", "0.bias", *cases.HEAD))
# Further fits: row of the table, settings where they are not the row's own, and the problem. Where a row's fit has a
# known end, "ending" stands for the settings of that fit.
FURTHER: dict[str, tuple[str, Any, Callable[[], Any]]] = {
    "EP": ("EP(NestedLaplace)", "ending", REGRESSION),
    "EP, cold": ("EP(cold)", "ending", REGRESSION),
    "EP, diagonal": ("EP(diagonal)", "ending", REGRESSION),
    "EP, blocks": ("EP(blocks)", "ending", REGRESSION),
    "EP with ADVI": ("EP(ADVI)", "ending", REGRESSION),
    "EP with NUTS": ("EP(NUTS, pymc)", "ending", REGRESSION),
    "FedAvg": ("FedAvg", "ending", REGRESSION),
    "FedAvg, many steps": ("FedAvg", {"learning_rate": 0.05, "batch_size": 4}, REGRESSION),
    "FedProx": ("FedProx", "ending", REGRESSION),
    "SCAFFOLD": ("SCAFFOLD", "ending", REGRESSION),
    "Ditto": ("Ditto", "ending", REGRESSION),
    "Separate": ("Separate", "ending", REGRESSION),
    "SeparateSGD": ("SeparateSGD", "ending", REGRESSION),
    "PrecisionWeighted": ("PrecisionWeighted", "ending", REGRESSION),
    "ConsensusMonteCarlo": ("ConsensusMonteCarlo", "ending", REGRESSION),
    "HM1": ("HM1", "ending", REGRESSION),
    "HM1Gradient": ("HM1Gradient", None, cases.trends),
    "LMCAscent": ("LMCAscent", {"warmup": 1}, cases.coregional),
    "LMCAscent, batches": ("LMCAscent", {"warmup": 1, "batch_size": 8}, cases.coregional),
    "LMCBlockAscent": ("LMCBlockAscent", None, cases.coregional),
    "LMCAveraging": ("LMCAveraging", None, cases.coregional),
    "LMCAveraging, batches": ("LMCAveraging(batches)", None, cases.coregional),
    "LMCGradient": ("LMCGradient", None, cases.coregional),
    "Confidence": ("Confidence", None, REGRESSION),
    "Confidence, remembered": ("Confidence(remember)", None, REGRESSION),
    "NetworkAveraging": ("NetworkAveraging", None, PART),
    "NetworkAveraging, proximal": (
        "NetworkAveraging",
        {"phases": (("all", 1),), "proximal": 1.0, "momentum": 0.9},
        WHOLE,
    ),
    "NetworkSCAFFOLD": ("NetworkSCAFFOLD", None, WHOLE),
    "IFCA": ("IFCA", None, WHOLE),
    "PerFedAvg": ("PerFedAvg", None, WHOLE),
    "PFedMe": ("PFedMe", None, WHOLE),
    "PFedBayes": ("PFedBayes", None, WHOLE),
    "BPFed": ("BPFed", None, PART),
    "FedPop": ("FedPop", None, WHOLE),
    "NetworkConfidence": ("NetworkConfidence", None, WHOLE),
    "NetworkConfidence, remembered": (
        "NetworkConfidence(remember)",
        {"head": cases.HEAD, "epochs": 1, "remember": True},
        WHOLE,
    ),
    "FedSI": ("FedSI", {"ratio": 0.3, "epochs": 1}, PART),
    "FedSI-Fac": ("FedSI", {"diagonal": True, "epochs": 1}, PART),
}


def further(name: str) -> Any:
    """Build the algorithm of a further fit."""
    row, settings, _ = FURTHER[name]
    case = CASES[row]
    if settings == "ending":
        return case.build_ending()
    return case.build() if settings is None else cases.build(case.algorithm, settings)


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


TARGETS = {"regression": test_conformance.target, "noise": lambda: test_conformance.noise_case()[0]}


def jobs() -> dict[str, dict[str, Callable[[], dict[str, list[float]]]]]:
    """Cases by the problem that they are of, in a fixed order."""
    found: dict[str, dict[str, Callable[[], dict[str, list[float]]]]] = {}
    for name, way in cases.WAYS.items():
        for of, target in (
            ("regression", test_conformance.target),
            ("noise", lambda: test_conformance.noise_case()[0]),
        ):
            job = functools.partial(lambda way, target: of_way(way.local, target()), way, target)
            found.setdefault(f"local {of}", {})[f"local/{name}/{of}"] = job
    fits = [
        (f"algorithm/{name}", functools.partial(further, name), problem) for name, (_, _, problem) in FURTHER.items()
    ]
    fits += [(f"run/{name}", case.build, case.problem) for name, case in CASES.items()]
    for name, build, problem in fits:
        of = getattr(problem, "__name__", "networks").strip("<>")
        found.setdefault(of, {})[name] = functools.partial(of_fit, build, problem)
    return {of: dict(sorted(group.items())) for of, group in found.items()}


def record() -> dict[str, dict[str, list[float]]]:
    """Everything, by case; a process a problem, on one thread: what was compiled before moves last digits."""
    found: dict[str, dict[str, list[float]]] = {}
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    for of in jobs():
        call = [sys.executable, "-m", "tests.record", "group", of]
        found |= json.loads(subprocess.run(call, env=one_thread, stdout=subprocess.PIPE, check=True).stdout)
    return found


def differences(before: Mapping[str, Mapping[str, list[float]]], after: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Where two records differ by more than 1e-12 of the larger entries; cases that are new do not count."""
    told = [f"{case}: not there any more" for case in sorted(before.keys() - after.keys())]
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
    if do == "group":
        sys.stdout.write(json.dumps({name: job() for name, job in jobs()[path].items()}))
        return 0
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
