"""Attacks on what is kept in files: crafted checkpoints, kills at any moment, and files that grow with the rounds.

In a process of its own, with a key of its own: what a crafted file would run is heard by an audit hook, and killed
processes are forks of one that has compiled everything, so that all of them compute with the same code.

    python -m benchmarks._attacks.state
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import fedppl
from fedppl.contracts import Algorithm
from fedppl.storage import checkpoint
from fedppl.storage import codec as _codec
from fedppl.testing import normal_means
from fedppl.types import DeclarationError

__all__ = ["run"]

_CLIENTS, _FAR = 20, 1_000
# What no file that is read may cause; os.system and the like start with "os." or "subprocess.".
_HEARD = ("exec", "compile", "import", "pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "ctypes.dlopen")


def run(quick: bool = False) -> dict[str, Any]:
    """Figures of all attacks on files; `quick` kills three processes and stops early."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks._attacks.state", "--folder", folder]
        environment = {**os.environ, "FEDPPL_KEY_FILE": str(Path(folder) / "key"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, *(["--quick"] if quick else [])],
            cwd=Path(__file__).parents[2],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the attacks on files ended with {done.returncode}: {done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    figures["state_crafted_met"] = not any(
        figures[f"state_{name}"] for name in ("crafted_read", "code_run", "classes_changed")
    )
    figures["state_kills_met"] = bool(
        figures["state_kills"] >= (1 if quick else 45) and figures["state_resumed_identical"]
    )  # some processes are done before they are hit
    figures["state_bytes_met"] = figures["state_bytes_a_round_ratio"] < 1.2
    if not quick:  # sixty rounds are too few to time
        figures["state_time_met"] = figures["state_round_time_ratio"] < 1.2
    return figures


def crafted_files(folder: Path) -> dict[str, Any]:
    """How many crafted files were read, ran code or changed a class."""
    from tests.support import crafted

    path, trace, heard, listening = folder / "evil.ckpt", folder / "trace", list[str](), False

    def hear(event: str, arguments: Any) -> None:
        if listening and event.startswith(_HEARD):
            heard.append(event)

    every, before, read = crafted.all_of(folder, trace), crafted.classes(), 0
    checkpoint.load(folder / "honest.ckpt")  # Python's own imports at the first use are done
    sys.addaudithook(hear)
    for one in every:
        crafted.put(one, path)
        listening = True
        try:
            checkpoint.load(path)
            read += 1
        except DeclarationError:
            pass
        finally:
            listening = False
    ran = len(heard) + trace.exists() + crafted.imported()
    changed = sum(a != b for a, b in zip(before, crafted.classes(), strict=True))
    return {"crafted": len(every), "crafted_read": read, "code_run": ran, "classes_changed": changed}


def endless(algorithm: Algorithm) -> Algorithm:
    """The algorithm, never converged."""

    def update(state: Any, received: Any) -> Any:
        after, report = algorithm.update_server(state, received)
        return after, report._replace(status=fedppl.Status.RUNNING)

    return algorithm._replace(update_server=update)


def steps(path: Path | None, algorithm: Algorithm, clients: int = 3) -> Iterator[fedppl.Round]:
    """Rounds of a small problem in this process, without end."""
    engine = fedppl.InProcess(workers=1)
    return fedppl.rounds(
        *normal_means(clients), algorithm, engine=engine, checkpoint=path, participation=0.7, random_seed=1
    )


def kills(folder: Path, count: int) -> dict[str, Any]:
    """Kill -9 at random moments and go on each time; the end must be that of a run nobody killed."""
    rng, rounds = np.random.default_rng(1), 16 * count
    killed, in_a_write, identical = 0, 0, True
    for name, algorithm in {
        "EP": fedppl.EP(warm_start=False),
        "Ditto": fedppl.averaging.Ditto(lam=1.0, learning_rate=0.01),
    }.items():
        path, whole = folder / f"{name}.ckpt", folder / f"{name}-whole.ckpt"
        _until(rounds, whole, endless(algorithm))
        pace, last = _pace(endless(algorithm)), 0
        for _ in range(count // 2 if name == "EP" else count - count // 2):
            last, work = killed, functools.partial(_until, rounds, path, endless(algorithm))
            killed += _killed(work, rng.uniform(0, 8 * pace), path)
            in_a_write += killed > last and _in_a_write(path)
        _until(rounds, path, endless(algorithm))
        identical &= _digest(path) == _digest(whole)
    return {"kills": killed, "kills_in_a_write": in_a_write, "resumed_identical": bool(identical)}


def _until(number: int, path: Path | None, algorithm: Algorithm) -> None:
    done = 0
    if path is not None and path.exists():
        done = len(checkpoint.load(path)[0]["records"])
    if done < number:
        for step in steps(path, algorithm):
            if step.number >= number:
                break


def _pace(algorithm: Algorithm) -> float:
    """Seconds a round takes here with a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.ckpt"
        _until(1, path, algorithm)
        started = time.perf_counter()
        _until(21, path, algorithm)
        return (time.perf_counter() - started) / 20


def _killed(work: Callable[[], None], seconds: float, path: Path) -> bool:
    """Fork, let the child work for so long after it has written something, and kill it; whether it lived until then."""
    before = _stamp(path)
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    while _stamp(path) == before and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.0005)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def _stamp(path: Path) -> int:
    """Changes with the records, which are the first thing that a round writes."""
    records = path.with_name(path.name + ".records")
    try:
        return records.stat().st_mtime_ns
    except FileNotFoundError:  # not yet there, or just being replaced
        return 0


def _in_a_write(path: Path) -> bool:
    """Whether a kill left something that is not part of the last whole round."""
    records = path.with_name(path.name + ".records")
    if path.with_name(path.name + ".partial").exists() or not path.exists():
        return True
    return records.stat().st_size > checkpoint.load(path)[1].length


def _digest(path: Path) -> bytes:
    """All that a run may not differ in."""
    content, _ = checkpoint.load(path)
    records = [record._replace(seconds=0.0, infos=_untimed(record.infos)) for record in content["records"]]
    return _codec.encode([content["state"], content["personal"], records])


def _untimed(infos: Any) -> dict[str, Any]:
    return {client: {k: v for k, v in info.items() if not k.endswith("_seconds")} for client, info in infos.items()}


def growth(folder: Path, far: int) -> dict[str, Any]:
    """CPU time and bytes of a round near the 10th and near a late one, as medians of fifty rounds each."""
    path = folder / "growth.ckpt"
    seconds, written = [], [0]
    width = min(50, far // 3)
    before = time.process_time()
    for step in steps(path, endless(fedppl.EP(warm_start=False)), _CLIENTS):
        seconds.append(time.process_time() - before)
        written.append(path.stat().st_size + path.with_name(path.name + ".records").stat().st_size)
        if step.number == far:
            break
        before = time.process_time()
    state = path.stat().st_size
    added = [after - before + state for before, after in zip(written[:-1], written[1:], strict=True)]
    early, late = slice(9, 9 + width), slice(-width, None)
    return {
        "round_ms_at_10": 1e3 * statistics.median(seconds[early]),
        f"round_ms_at_{far}": 1e3 * statistics.median(seconds[late]),
        "round_time_ratio": statistics.median(seconds[late]) / statistics.median(seconds[early]),
        "bytes_a_round_ratio": statistics.median(added[late]) / statistics.median(added[early]),
        "kilobytes_a_round": statistics.median(added[late]) / 1e3,
    }


def main() -> None:
    """Run all attacks here and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.folder is None:
        print(json.dumps(run(options.quick)))
        return
    logging.getLogger("fedppl").setLevel(logging.ERROR)
    figures = crafted_files(options.folder)
    figures |= kills(options.folder, 4 if options.quick else 50)
    figures |= growth(options.folder, 60 if options.quick else _FAR)
    print(json.dumps({f"state_{k}": round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}))


if __name__ == "__main__":
    main()
