"""A site's account of the answers of its clients: `ledger.json` in the site's folder, and the log `audit.jsonl`."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedppl import audit
from fedppl.engine.guard import Guard, Ledger, Run
from fedppl.engine.policy import Policy, resolved
from fedppl.storage.codec import plain
from fedppl.storage.signed import read_account, write_account
from fedppl.types import DataError

logger = logging.getLogger(__name__)

# Lines of what is refused or costs nothing. Beyond this number only those are written whose number is a power of 2: a
# server may ask any number of times.
_ALL_OF = 1000


def in_folder(rules: Policy, folder: Path, name: str, *, masked: bool = False) -> Guard:
    """A guard whose account lies in a folder, under a client's own name. The caller holds the site's lock."""
    # The log is written before the ledger: if a process dies in between, nothing has left under the last line.
    account = _Account(folder, name)
    return Guard(resolved(rules, masked=masked), account.read, account.write, masked)


class _Account:
    """The ledger and the log in a folder; they are checked against each other once a request."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path, self._log = folder / "ledger.json", folder / "audit.jsonl"
        self._folder, self._name = folder, name
        self._head: audit.Head | None = None  # of the log, once it was checked

    def read(self) -> Ledger:
        """The client's ledger."""
        account, _ = self._checked()
        own = account["clients"].get(self._name)
        if own is None:
            return Ledger()
        counts = [own["requests"], own["unknown"], account["lines"], own["spent"]]
        if not all(isinstance(count, int | float) and 0 <= count < math.inf for count in counts):
            raise DataError(f"{str(self._path)!r} holds {counts}, which count nothing. Put back what was there.")
        return Ledger(**{**own, "runs": {run: Run(*answered) for run, answered in own["runs"].items()}})

    def write(self, ledger: Ledger, entry: Mapping[str, Any]) -> None:
        """Write a line to the log, then the ledger; an empty entry writes no line."""
        account, head = self._checked()
        if not self._path.exists():  # before the log, which without a ledger would be taken for cut off from it
            write_account(self._path, account)
        costs = not entry or entry["event"] in ("request", "reply", "conclusion") and not entry.get("repeated")
        before = account.get("idle", 0)
        idle = before + (not costs or bool(entry.get("refused")))
        line = {"site": self._name or entry.get("client") or self._folder.name, **entry}
        written = idle <= _ALL_OF or idle & (idle - 1) == 0
        if entry and (idle == before or written):
            head = audit.append(self._log, line if idle == before else {**line, "refused_or_free": idle}, head)
        if entry.get("refused") and written:
            logger.warning("client %s refuses (%s) by %s", line["site"], entry["event"], entry["refused"])
        own = {**ledger._asdict(), "runs": {run: list(answered) for run, answered in ledger.runs.items()}}
        self._head = head
        clients = {**account["clients"], self._name: own}
        write_account(self._path, {"clients": clients, "lines": head.length, "head": head.digest, "idle": idle})

    def _checked(self) -> tuple[dict[str, Any], audit.Head]:
        """The accounts of all clients, and the head of the log; DataError where the two contradict each other."""
        if self._path.exists():
            account = read_account(self._path)
        elif self._log.exists() and self._head is None:
            remedy = "put it back, or move the log away, which grants every limit anew"
            raise DataError(f"{str(self._log)!r} has no {self._path.name} beside it; {remedy}.")
        else:
            account = {"clients": {}, "lines": 0, "head": audit.Head().digest, "idle": 0}
        if self._head is None:
            self._head = self._checked_log(account["lines"], account["head"])
            if self._head.length > account["lines"]:  # before another line: a process may die here again and again
                account |= {"lines": self._head.length, "head": self._head.digest}
                write_account(self._path, account)
        return account, self._head

    def _checked_log(self, count: int, digest: str) -> audit.Head:
        """The head of a log that has the ledger's last line."""
        head, met = audit.Head(), count == 0
        torn = audit.drop_torn(self._log) if self._log.exists() else 0
        for line in audit.lines(self._log) if self._log.exists() else ():
            head = audit.Head(line["line"], line["digest"])
            met = met or (head.length == count and head.digest == digest)
        if not met:
            raise DataError(f"{str(self._log)!r} lacks line {count}, which was written: it was cut or replaced.")
        # A line is written before the ledger knows of it, and one more where half a line was dropped.
        if head.length > count + 2:
            raise DataError(
                f"{str(self._path)!r} knows {count} of {head.length} lines of the log. Put the last one back."
            )
        if not torn:
            return head
        return audit.append(self._log, {"site": self._name, "event": "half a line was dropped", "bytes": torn}, head)


# By how many rows a client's data differ from those of earlier answers, by keyed digests of their cells ---------------
# Two answers at one point, about data that differ by a row, differ by the contribution of that row.

Cells = NDArray[np.uint64]
Version = Mapping[str, Cells]
"""Digests of each column's cells, in the order of rows; of an array with more axes a cell is all of a row."""

_LABEL = b"fedppl: cells of data"
_DIGEST = 8  # bytes
_STEP = np.uint64(0x9E3779B97F4A7C15)


def version_of(columns: Mapping[str, Any], key: bytes) -> dict[str, Cells]:
    """Digests of all cells. The key prevents comparison with guessed values."""
    cell_key = hmac.digest(key, _LABEL, "sha256")
    cells = {}
    for name in sorted(columns):
        array = plain(np.atleast_1d(np.asarray(columns[name])))
        rows = array.reshape(len(array), -1)
        # Texts by their value, whatever the width of the array; numbers by their bytes.
        text = array.dtype.kind in "OUS"
        raw = [repr(row.tolist()).encode(errors="surrogatepass") if text else row.tobytes() for row in rows]
        digests = {cell: hashlib.blake2b(cell, digest_size=_DIGEST, key=cell_key).digest() for cell in set(raw)}
        cells[name] = np.frombuffer(b"".join(digests[cell] for cell in raw), dtype="<u8")
    return cells


def changed_rows(before: Version, after: Version, fewest: float) -> int:
    """Number of rows by which two versions differ, if it is positive and less than `fewest`; else 0.

    An edited row counts once. Where a site standardises a column by its own mean, all rows differ as a whole: so
    columns are compared one by one too, if most values are distinct, or if values were only added or only removed.

    Examples
    --------
    >>> rows = {"age": np.arange(40.0)}
    >>> now = version_of({"age": np.append(rows["age"], 71.0)}, b"key")
    >>> changed_rows(version_of(rows, b"key"), now, 10), changed_rows(version_of(rows, b"key"), now, 1)
    (1, 0)
    """
    tables: dict[tuple[int, int], list[str]] = {}
    for name in after:
        if name in before:
            tables.setdefault((len(after[name]), len(before[name])), []).append(name)
    for sizes, together in sorted(tables.items(), reverse=True):
        counts = [max(_apart(*(_rows([version[name] for name in together]) for version in (before, after))))]
        if counts == [0]:
            continue
        for name in together:
            added, removed = _apart(before[name], after[name])
            # In a column of few values two cohorts have similar counts by chance, but seldom all counts grow.
            grown = sizes[0] != sizes[1] and min(added, removed) == 0
            distinct = min(len(np.unique(cells)) / max(len(cells), 1) for cells in (before[name], after[name]))
            if grown or distinct > 0.5:
                counts.append(max(added, removed))
        # Only the longest table that changed: shorter ones are of groups, or computed from rows.
        return min((count for count in counts if 0 < count < fewest), default=0)
    return 0


def refuse_version(earlier: Sequence[Version], present: Version, fewest: float) -> str | None:
    """The rule that data break which differ by few rows from those of an earlier answer, or None."""
    for number, before in enumerate(earlier, start=1):
        if count := changed_rows(before, present, fewest):
            since = f"since version {number} of {len(earlier)} that was answered about, at least {fewest:g} wanted"
            return f"changed_rows: {count} {since}, or none; wait for more, or give the site those data again"
    return None


def _rows(cells: Sequence[Cells]) -> Cells:
    """One number a row. Digests are random already, so that only the order of columns has to be mixed in."""
    total = np.zeros(len(cells[0]), dtype=np.uint64)
    for column in cells:
        total = (total ^ (total >> np.uint64(29))) * _STEP + column
    return total


def _apart(before: Cells, after: Cells) -> tuple[int, int]:
    """Numbers of rows added and of rows removed."""
    _, places = np.unique(np.concatenate([before, after]), return_inverse=True)
    size = int(places.max(initial=-1)) + 1
    difference = np.bincount(places[len(before) :], minlength=size) - np.bincount(places[: len(before)], minlength=size)
    return int(difference[difference > 0].sum()), int(-difference[difference < 0].sum())
