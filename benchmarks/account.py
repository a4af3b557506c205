"""Time of a request's account at a site that has answered a million: one line of JSON.

    python benchmarks/account.py --requests 1000000 --runs 1000

Beside the request itself: the file is opened, its signature and last line are checked, the request is admitted and its
reply logged, an answer of 8 kB is kept, and all is written through to the disk.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from fedppl.engine.guard import Ledger, Run, in_store
from fedppl.engine.policy import NO_RULES
from fedppl.storage import store
from fedppl.storage.signed import keep

_REPEATS = 200
_LINE = 300  # characters


def filled(folder: Path, requests: int, runs: int) -> None:
    """An account of so many answered requests in so many runs, with two lines each, of which the last follows."""
    with store.changing(folder) as here:
        numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
        lines = 2 * requests - 1
        here.connection.execute(f"{numbers} INSERT INTO chain SELECT i, ? FROM n", (lines, "x" * _LINE))  # noqa: S608
        for number in range(runs):
            store.put(here, "site", "run", f"run {number}", Run(requests // runs, "0" * 32))
        clients = {"site": list(Ledger(requests))}
        here.account[0] = here.account[0]._replace(clients=clients, head=store.Head(lines, "0" * 64))
        store.append(here, {"event": "reply", "site": "site"})


def answered(folder: Path, run: str, number: int) -> None:
    """What the account does for one request."""
    with store.changing(folder) as here:
        guard = in_store(NO_RULES, here, "site")
        assert number == 1 or guard.known("run", run) is not None
        ledger = guard.read()
        entry = {"run": run, "round": number, "client": "site", "refused": None}
        after = {("run", run): Run(number, "0" * 32)}
        guard.write(ledger._replace(requests=ledger.requests + 1), {"event": "request", **entry}, after)
        guard.write(guard.read(), {"event": "reply", **entry, "released": {"value": 512}}, {})
        keep(store.memory(here), "run-site.personal", {"value": np.zeros(1000)})


def main() -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10**6)
    parser.add_argument("--runs", type=int, default=1000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        filled(folder, given.requests, given.runs)
        times, cpu = [], []
        for number in range(1, _REPEATS + 1):
            before, used = time.perf_counter(), time.process_time()
            answered(folder, "another run", number)
            times.append(1e3 * (time.perf_counter() - before))
            cpu.append(1e3 * (time.process_time() - used))
        size = (folder / store.FILE).stat().st_size
    line = {"requests": given.requests, "runs": given.runs, "megabytes": round(size / 1e6, 1)}
    found = {"least_ms": min(times), "median_ms": np.median(times), "largest_ms": max(times), "cpu_ms": np.median(cpu)}
    print(json.dumps(line | {name: round(float(value), 2) for name, value in found.items()}))


if __name__ == "__main__":
    main()
