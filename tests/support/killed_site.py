"""A site's process that is killed while it joins and answers, and started again: one line of JSON of what left it.

After each kill its file is checked: the chain has no gap, and the account is what the chain says.

Processes are forks of one that has compiled everything, as a model's functions take longer to compile than to run.

    python -m tests.support.killed_site FOLDER KILLS
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks._attacks import sums
from fedppl import audit
from fedppl.engine import secure
from fedppl.storage import store

_NAMES = ("east", "north", "süd", "west")
_VICTIM = "north"
_ROUNDS = 5  # of a run
_LONGER = 1.2  # after each kill


def killed_after(seconds: float, act: Callable[[], bytes]) -> bytes | None:
    """What a process of its own writes when it is done; None where it was killed before."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(write, act())
        finally:
            os._exit(0)
    os.close(write)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as pipe:
        return pipe.read() or None


def until_done(
    act: Callable[[], bytes], usual: float, rng: np.random.Generator, seen: dict[str, int], folder: Path
) -> list[bytes]:
    """All that leaves where a process is killed at random moments, and started again until it has answered twice."""
    left: list[bytes] = []
    longest = 1.5 * usual
    while len(left) < 2:
        answer = killed_after(float(rng.uniform(0.0, longest)), act)
        seen["kills"] += answer is None
        seen["broken"] += answer is None and not is_whole(folder)
        longest *= _LONGER if answer is None else 1.0  # a start after a kill takes longer: some answer has to be done
        left += [] if answer is None else [answer]
    return left


def is_whole(folder: Path) -> bool:
    """Whether the chain holds from its first line to its last, and has all that the account counts."""
    if not (folder / store.FILE).exists():  # it was killed before its first message was counted
        return True
    with contextlib.redirect_stdout(io.StringIO()):
        holds = audit.main([str(folder)]) == 0
    costs = [line for line in audit.lines(folder) if line["event"] in ("cohort", "request")]
    return holds and len(costs) - sum(bool(line.get("repeated")) for line in costs) == stored_requests(folder)


def stored_requests(folder: Path) -> int:
    """Requests by the account."""
    with store.reading(folder) as here:
        return store.requests(here)


def _log_of(path: Path) -> list[object]:
    """The last lines of the site's log, to see why it refused."""
    return list(audit.lines(path))[-4:]


def main(folder: Path, kills: int) -> None:
    """Runs of some rounds, until there were so many kills."""
    logging.getLogger("fedppl").setLevel(logging.CRITICAL)
    rng, here, plain = np.random.default_rng(1), sums.world(folder / "killed"), sums.world(folder / "plain")
    seen = {"kills": 0, "rounds": 0, "broken": 0, "in_a_round": 0, "other_words": 0, "other_sums": 0}
    clear, _ = sums.cohort(plain, "run")
    run, path = 0, folder / "killed" / f"at {_VICTIM}"
    message = sums.message_at(rng.normal(0, 5, size=(8, 1)))
    for name in _NAMES:  # compiled, and timed the second time
        sums.asked(plain, "run", name, message, clear)
    started = time.perf_counter()
    sums.asked(plain, "run", _VICTIM, message, clear, 2)
    usual, number_of_plain = time.perf_counter() - started, 2
    while seen["kills"] < kills:
        run += 1
        name_of_run = f"run {run}"
        greetings = [sums.greeted(here, name_of_run, name) for name in _NAMES]

        def join() -> bytes:
            part = sums.joined(here, name_of_run, _VICTIM, greetings)  # noqa: B023
            return part.words if isinstance(part, secure.Part) else part.encode()

        seen["other_words"] += len(set(until_done(join, usual, rng, seen, path))) > 1
        counts, rules = sums.cohort(here, name_of_run)
        assert not rules, rules
        for number in range(1, _ROUNDS + 1):
            message = sums.message_at(rng.normal(0, 5, size=(8, 1)))
            words = [
                sums._words(sums.asked(here, name_of_run, n, message, counts, number)) for n in _NAMES if n != _VICTIM
            ]

            def answer() -> bytes:
                told = sums.asked(here, name_of_run, _VICTIM, message, counts, number)  # noqa: B023
                return told.words.tobytes() if isinstance(told, sums.Words) else told.encode()

            left = until_done(answer, usual, rng, seen, path)
            assert len(left[-1]) % 8 == 0, (left, _log_of(path))
            seen["rounds"] += 1
            log = audit.lines(path)
            admitted = [
                line
                for line in log
                if line["event"] == "request" and (line.get("run"), line.get("round")) == (name_of_run, number)
            ]
            seen["in_a_round"] += max(0, sum(not line.get("repeated") for line in admitted) - 1)
            seen["other_words"] += len(set(left)) > 1
            number_of_plain += 1
            truth = []
            for name in _NAMES:
                sums.asked(plain, "run", name, message, clear, number_of_plain)
                truth.append(secure.encoded(plain.computed[name][-1], len(_NAMES)))
            total = secure.added([*words, np.frombuffer(left[-1], dtype=np.uint64)])
            seen["other_sums"] += not np.array_equal(total, secure.added(truth))
    seen["lines"] = len(list(audit.lines(path)))
    sys.stdout.write(f"{json.dumps(seen)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
