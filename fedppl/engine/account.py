"""What clients of a site have answered, in the site's folder: `ledger.json`, and `audit.jsonl` beside it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fedppl import audit
from fedppl.engine.guard import Guard, Ledger, Run
from fedppl.engine.policy import Policy
from fedppl.storage import ledger as _ledger
from fedppl.types import DataError

logger = logging.getLogger(__name__)

# Lines of what is refused or costs nothing, after which only each that doubles their number is written: a server may
# ask without end.
_ALL_OF = 1000


def in_folder(rules: Policy, folder: Path, name: str) -> Guard:
    """A guard whose account lies in a folder, under a client's own name. Its user holds the site's lock all the while.

    The log comes first and the ledger after it: where a process dies in between, the log knows more, and that is no
    fault; half a line of it is dropped, since nothing left under it. A ledger that knows lines which the log lacks
    shows that the log was cut, and one that was edited is not signed.
    """
    ledgers, log = folder / "ledger.json", folder / "audit.jsonl"
    known: list[audit.Head] = []  # checked once a request

    def read_all() -> dict[str, Any]:
        if not ledgers.exists():
            if log.exists() and not known:
                raise DataError(
                    f"{str(log)!r} has no {ledgers.name} beside it: what was released is not known. Put it back, or "
                    "move the log away, which grants every limit anew."
                )
            return {"clients": {}, "lines": 0, "head": audit.Head().digest, "idle": 0}
        return _ledger.read(ledgers)

    def check(everything: Mapping[str, Any]) -> None:
        count, digest, last = everything["lines"], everything["head"], audit.Head()
        met = count == 0
        torn = audit.drop_torn(log) if log.exists() else 0
        for line in audit.lines(log) if log.exists() else ():
            last = audit.Head(line["line"], line["digest"])
            met = met or (last.length == count and last.digest == digest)
        if not met:
            raise DataError(f"{str(log)!r} lacks line {count}, which was written: it was cut, or put in place anew.")
        # A line is written before the ledger knows of it, and one more where half a line was dropped.
        if last.length > count + 2:
            raise DataError(
                f"{str(ledgers)!r} knows {count} lines of {str(log)!r}, which has {last.length}: it is an earlier one. "
                "Put the last one back."
            )
        known.append(last)
        if torn:
            known.append(audit.append(log, {"site": name, "event": "half a line was dropped", "bytes": torn}, last))

    def read() -> Ledger:
        everything = read_all()
        if not known:
            check(everything)
        own = everything["clients"].get(name)
        if own is None:
            return Ledger()
        counts = [own["requests"], own["unknown"], everything["lines"], own["spent"]]
        if not all(isinstance(count, int | float) and 0 <= count < math.inf for count in counts):
            raise DataError(f"{str(ledgers)!r} holds {counts}, which count nothing. Put back what was there.")
        return Ledger(**{**own, "runs": {run: Run(*one) for run, one in own["runs"].items()}})

    def write(ledger: Ledger, entry: Mapping[str, Any]) -> None:
        everything = read_all()
        if not known:
            check(everything)
        if not ledgers.exists():  # before there is a log, which without it would have been cut off from its account
            _ledger.write(ledgers, everything)
        costs = not entry or entry["event"] in ("request", "reply", "conclusion") and not entry.get("repeated")
        before = everything.get("idle", 0)
        idle = before + (not costs or bool(entry.get("refused")))
        named = {"site": name or entry.get("client") or folder.name, **entry}
        written = idle <= _ALL_OF or idle & (idle - 1) == 0
        if not entry:  # something to remember, of which nobody need read
            pass
        elif idle == before:
            known.append(audit.append(log, named, known[-1]))
        elif written:
            known.append(audit.append(log, {**named, "refused_or_free": idle}, known[-1]))
        if entry.get("refused") and written:
            logger.warning("client %s refuses (%s) by %s", named["site"], entry["event"], entry["refused"])
        own = {**ledger._asdict(), "runs": {run: list(one) for run, one in ledger.runs.items()}}
        everything = {
            "clients": {**everything["clients"], name: own},
            "lines": known[-1].length,
            "head": known[-1].digest,
            "idle": idle,
        }
        _ledger.write(ledgers, everything)

    return Guard(rules, nullcontext, read, write)
