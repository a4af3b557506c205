"""What small fits cost: CPU seconds of a first fit from empty caches, of a second one, and of what is asked of a fit.

Three frames by formula at default settings, each in a process of its own with empty caches of Numba and PyTensor:

    six    six sites of 196 rows in all, healed ~ age + arm + (1 | site)
    trial  the first example of README, six sites of 2,820 rows
    twelve twelve sites of forty rows, healed ~ age + (1 | site)

``imports`` is `import pymc, arviz`, as in any script, and is not in ``first``, which has `import fedppl` in it.
``second`` is the median of fits on other rows and seeds of the same declaration, ``same`` of the same rows with other
seeds. Then, of 1,000 rows at six sites, ``loo``, ``loo_compare`` with the model without `age`, ``load`` with the
clients' rows, and ``without``, the posterior without each client in turn. Other jobs make CPU seconds larger: idle,
please.

    python benchmarks/small_fits.py
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = {"six": [12, 18, 26, 34, 46, 60], "trial": [260, 300, 340, 420, 600, 900], "twelve": [40] * 12}
FORMULAS = {"six": "healed ~ age + arm + (1 | site)", "trial": "healed ~ age + arm + (1 | site)"}
FORMULAS["twelve"] = "healed ~ age + (1 | site)"
ROWS = [100, 120, 140, 160, 200, 280]  # of what is asked of a fit, 1,000
# CPU seconds that each should take at most, on an idle machine.
BARS = {
    "six": {"first": 12.0, "second": 0.7},
    "twelve": {"first": 12.0, "second": 0.8},
    "asked": {"loo": 3.0, "loo_compare": 5.0, "load": 2.0, "without": 3.0},
}


def simulate(sizes: list[int], seed: int) -> Any:
    """A trial at sites that differ in level."""
    import numpy as np
    import pandas as pd

    rng, names = np.random.default_rng(seed), [chr(65 + k) for k in range(len(sizes))]
    site, total = np.repeat(names, sizes), sum(sizes)
    frame = pd.DataFrame({"site": site, "age": rng.normal(60, 9, total), "arm": rng.choice(["control", "drug"], total)})
    level = frame["site"].map(dict(zip(names, rng.normal(0, 0.5, len(sizes)), strict=True)))
    logit = level + 0.9 * (frame["arm"] == "drug") - 0.04 * (frame["age"] - 60)
    frame["healed"] = rng.random(total) < 1 / (1 + np.exp(-logit))
    return frame


def cpu(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of a call, and what it returns."""
    started = time.process_time()
    returned = call()
    return time.process_time() - started, returned


def fits(name: str, count: int) -> dict[str, Any]:
    """A first fit and later ones, in this process."""
    imports, _ = cpu(_imports)
    frame, formula = simulate(SIZES[name], 1), FORMULAS[name]
    others = [simulate(SIZES[name], 2 + k) for k in range(count)]

    def fit(data: Any, seed: int) -> Any:
        import fedppl

        declared = fedppl.formula(formula, family="bernoulli")
        return fedppl.fit(declared, data, by="site", random_seed=seed, progressbar=False)

    first, fitted = cpu(functools.partial(fit, frame, 1))
    later = [cpu(functools.partial(fit, data, seed)) for seed, data in enumerate(others, 2)]
    same = [cpu(functools.partial(fit, frame, seed)) for seed in range(2, 2 + count)]
    return {
        "what": name,
        "imports": round(imports, 2),
        "first": round(first, 2),
        "second": round(statistics.median(seconds for seconds, _ in later), 3),
        "same": round(statistics.median(seconds for seconds, _ in same), 3),
        "status": sorted({one.status.value for _, one in [(0.0, fitted), *later, *same]}),
    }


def _imports() -> None:
    import arviz  # noqa: F401
    import pymc  # noqa: F401


def asked(count: int) -> dict[str, Any]:
    """What is asked of a fit: the median of later calls."""
    import fedppl

    frame = simulate(ROWS, 1)
    models = [fedppl.formula(text, family="bernoulli") for text in (FORMULAS["six"], "healed ~ arm + (1 | site)")]
    with tempfile.TemporaryDirectory() as folder:
        seconds: dict[str, list[float]] = {"loo": [], "loo_compare": [], "load": [], "without": []}
        for seed in range(count + 1):  # the first compiles
            pair = [fedppl.fit(one, frame, by="site", random_seed=seed, progressbar=False) for one in models]
            path = Path(folder) / f"{seed}.nc"
            pair[0].save(path)
            calls: dict[str, Callable[[], Any]] = {
                "without": pair[0].influence,
                "loo": functools.partial(fedppl.loo, pair[0]),
                "loo_compare": functools.partial(fedppl.loo_compare, {"age": pair[0], "none": pair[1]}),
                "load": functools.partial(fedppl.load, path, models[0], clients=frame, by="site"),
            }
            for name, call in calls.items():
                seconds[name].append(cpu(call)[0])
    return {"what": "asked", **{name: round(statistics.median(one[1:]), 3) for name, one in seconds.items()}}


def in_a_process(what: str, count: int) -> dict[str, Any]:
    """One line, by a process with empty caches."""
    command = [sys.executable, __file__, "--process", what, "--fits", str(count)]
    with tempfile.TemporaryDirectory() as folder:
        caches = {"NUMBA_CACHE_DIR": f"{folder}/numba", "PYTENSOR_FLAGS": f"base_compiledir={folder}/pytensor"}
        root = str(Path(__file__).parents[1])
        environment = {**os.environ, **caches, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    over = {name: bar for name, bar in BARS.get(what, {}).items() if line[name] > bar}
    return {**line, "over": over}


def main(argv: list[str] | None = None) -> None:
    """Print one JSON line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--what", nargs="+", choices=[*SIZES, "asked"], default=[*SIZES, "asked"])
    parser.add_argument("--fits", type=int, default=5, help="later ones, of which the median is told")
    parser.add_argument("--process", choices=[*SIZES, "asked"], help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.process:
        line = asked(options.fits) if options.process == "asked" else fits(options.process, options.fits)
        print(json.dumps(line))
        return
    for what in options.what:
        print(json.dumps(in_a_process(what, options.fits)), flush=True)


if __name__ == "__main__":
    main()
