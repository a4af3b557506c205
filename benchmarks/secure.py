"""What sums under masks cost, and what they change: one line of JSON.

- models: fits by `fedppl.Sums` of models of `benchmarks/_exactness`, plain and with ``InProcess(secure=True)``.
  Differences of means in sds and of log sds, of the log evidence, the numbers of rounds, and CPU seconds of both, with
  clients one by one.
- cohorts: CPU milliseconds a site for its place in a cohort (keys, signatures, keys of masks) and for a round's masks
  of as many words as a round of 512 points has, and bytes of the words beside those of the plain arrays.

    python benchmarks/secure.py --models 10 --cohorts 3 20 100
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedppl
from benchmarks._exactness import models, more_models
from fedppl import gaussian
from fedppl.engine import secure

_NAMES = ("values", "values_lost")
_POINTS = 512
_ROUNDS = 20


def one_model(problem: models.Problem) -> dict[str, Any]:
    """A fit beside the same under masks."""
    model = fedppl.FederatedModel(problem.builder(), problem.shared_names())
    algorithm = fedppl.Sums()._replace(batch=None)  # as sites are: each alone
    fits, cpu = [], []
    for engine in (fedppl.InProcess(workers=1), fedppl.InProcess(workers=1), fedppl.InProcess(workers=1, secure=True)):
        started = time.process_time()
        fits.append(fedppl.fit(model, problem.clients, algorithm, engine=engine, progressbar=False, random_seed=1))
        cpu.append(round(time.process_time() - started, 2))
    fits, cpu = fits[1:], cpu[1:]  # the first compiles
    plain, hidden = fits
    row: dict[str, Any] = {"status": [one.status.value for one in fits], "rounds": [len(one.records) for one in fits]}
    sd, other = gaussian.standard_deviations(plain.posterior), gaussian.standard_deviations(hidden.posterior)
    row["z"] = float(np.max(np.abs(gaussian.mean(hidden.posterior) - gaussian.mean(plain.posterior)) / sd))
    row["log_sd"] = float(np.max(np.abs(np.log(other / sd))))
    if all(one.status is fedppl.Status.CONVERGED for one in fits):
        row["log_evidence"] = abs(hidden.log_evidence.value - plain.log_evidence.value)
    return {**row, "cpu_s": cpu}


def cohort(size: int) -> dict[str, Any]:
    """Costs of a site in a cohort of this size."""
    names = [f"site {k}" for k in range(size)]
    started = time.process_time()
    members = secure.cohort_of(names, "run")
    setup = (time.process_time() - started) / size
    rng = np.random.default_rng(1)
    message = {name: rng.normal(size=_POINTS) for name in _NAMES}
    member = members[names[0]]
    started = time.process_time()
    for number in range(1, _ROUNDS + 1):
        encoded = secure.encoded(message, size)
        member, words = secure.masked(member, encoded, number)
    masks = (time.process_time() - started) / _ROUNDS
    plain = sum(np.asarray(value).nbytes for value in message.values())
    return {"setup_ms": round(1e3 * setup, 2), "round_ms": round(1e3 * masks, 3), "bytes": [plain, words.nbytes]}


def main(argv: list[str] | None = None) -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=int, default=10, help="how many models, in the order of exactness'")
    parser.add_argument("--cohorts", type=int, nargs="*", default=[3, 20, 100])
    options = parser.parse_args(argv)
    logging.getLogger("fedppl").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", fedppl.ConvergenceWarning)
    problems = [make() for make in (*models.PROBLEMS, *more_models.PROBLEMS)[: options.models]]
    rows = {problem.name: one_model(problem) for problem in problems}
    result = {"benchmark": "secure", "models": rows, "cohorts": {size: cohort(size) for size in options.cohorts}}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
