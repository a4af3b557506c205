"""What clients of a site have answered, in the site's folder: `ledger.json`, and `audit.jsonl` beside it."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedppl import audit
from fedppl.engine.guard import Guard, Ledger, Run
from fedppl.engine.policy import Policy
from fedppl.storage.codec import plain
from fedppl.storage.signed import read_account, write_account
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
        return read_account(ledgers)

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
            write_account(ledgers, everything)
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
        write_account(ledgers, everything)

    return Guard(rules, nullcontext, read, write)


# By how many rows a client's data differ from what it was asked about before, told by keyed digests of their cells ----

# Two answers about data that differ by one row, at the same point, differ by what that row contributes.

Cells = NDArray[np.uint64]
Version = Mapping[str, Cells]
"""Digests of a column's cells, in the order of rows; of arrays with more axes, of what belongs to a row."""

_LABEL = b"fedppl: cells of data"
_DIGEST = 8  # bytes
_STEP = np.uint64(0x9E3779B97F4A7C15)


def version_of(columns: Mapping[str, Any], key: bytes) -> dict[str, Cells]:
    """Digests of all cells. Without the key nobody can compare one with a value that is guessed."""
    own = hmac.digest(key, _LABEL, "sha256")
    found = {}
    for name in sorted(columns):
        array = plain(np.atleast_1d(np.asarray(columns[name])))
        rows = array.reshape(len(array), -1)
        # Texts whatever the longest of them is; numbers by their bytes.
        text = array.dtype.kind in "OUS"
        raw = [repr(row.tolist()).encode(errors="surrogatepass") if text else row.tobytes() for row in rows]
        digests = {cell: hashlib.blake2b(cell, digest_size=_DIGEST, key=own).digest() for cell in set(raw)}
        found[name] = np.frombuffer(b"".join(digests[cell] for cell in raw), dtype="<u8")
    return found


def changed_rows(before: Version, now: Version, fewest: float) -> int:
    """By how many rows two versions differ, where that is some and fewer than `fewest`; else 0.

    Rows that were edited count once. Columns that only one version has say nothing. Where all cells of a column change
    with each row, as where a site standardises it by its own mean, rows as a whole are all others, and columns one by
    one still are not: those with a value of their own in most rows, and those that values were added to alone, or
    taken from alone.

    Examples
    --------
    >>> rows = {"age": np.arange(40.0)}
    >>> now = version_of({"age": np.append(rows["age"], 71.0)}, b"key")
    >>> changed_rows(version_of(rows, b"key"), now, 10), changed_rows(version_of(rows, b"key"), now, 1)
    (1, 0)
    """
    names = [name for name in now if name in before]
    tables: dict[tuple[int, int], list[str]] = {}
    for name in names:
        tables.setdefault((len(now[name]), len(before[name])), []).append(name)
    counts = []
    for sizes, together in sorted(tables.items(), reverse=True):
        rows = (_rows([version[name] for name in together]) for version in (before, now))
        if (apart := max(_apart(*rows))) == 0:
            continue
        counts = [apart]
        for name in together:
            added, removed = _apart(before[name], now[name])
            # Of few values two cohorts of one size have similar counts by chance, but seldom each as many or more.
            grown = sizes[0] != sizes[1] and min(added, removed) == 0
            distinct = min(len(np.unique(one)) / max(len(one), 1) for one in (before[name], now[name]))
            if grown or distinct > 0.5:
                counts.append(max(added, removed))
        break  # of the longest table that changed: shorter ones are of groups, or computed from rows
    return min((count for count in counts if 0 < count < fewest), default=0)


def refuse_version(earlier: Sequence[Version], now: Version, fewest: float) -> str | None:
    """The rule that data break which differ by few rows from any that were answered about, or None."""
    for number, before in enumerate(earlier, start=1):
        if count := changed_rows(before, now, fewest):
            return (
                f"changed_rows: {count} since version {number} of {len(earlier)} that was answered about, at least "
                f"{fewest:g} wanted, or none; wait for more, or give the site those data again"
            )
    return None


def is_known(earlier: Sequence[Version], now: Version) -> bool:
    """Whether a version has all columns as they are now."""
    return any(all(name in one and np.array_equal(one[name], cells) for name, cells in now.items()) for one in earlier)


def _rows(cells: Sequence[Cells]) -> Cells:
    """One number a row; cells are random already, so that it is enough to keep their order apart."""
    total = np.zeros(len(cells[0]), dtype=np.uint64)
    for one in cells:
        total = (total ^ (total >> np.uint64(29))) * _STEP + one
    return total


def _apart(before: Cells, now: Cells) -> tuple[int, int]:
    """How many rows were added, and how many removed."""
    _, places = np.unique(np.concatenate([before, now]), return_inverse=True)
    size = int(places.max(initial=-1)) + 1
    difference = np.bincount(places[len(before) :], minlength=size) - np.bincount(places[: len(before)], minlength=size)
    return int(difference[difference > 0].sum()), int(-difference[difference < 0].sum())
