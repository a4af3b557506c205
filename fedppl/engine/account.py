"""A site's account of the answers of its clients, and the log beside it, in the site's file."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedppl.engine.guard import NONE, Guard, Ledger, Run, Runs
from fedppl.engine.policy import Policy, resolved
from fedppl.storage import store as _store
from fedppl.storage.codec import plain

logger = logging.getLogger(__name__)

# Lines of what is refused or costs nothing. Beyond this number only those are written whose number is a power of 2: a
# server may ask any number of times.
_ALL_OF = 1000


def in_store(rules: Policy, store: _store.Store, name: str, *, masked: bool = False) -> Guard:
    """A guard whose account lies in a site's file, under a client's own name."""

    def read() -> Ledger:
        return Ledger(*store.account[0].clients.get(name, ()))

    def write(ledger: Ledger, entry: Mapping[str, Any], runs: Runs = NONE) -> None:
        for (kind, run), answered in runs.items():
            _store.put(store, name, kind, run, answered)
        account, is_free = store.account[0], ledger == read() and _is_free(entry)
        clients = {**account.clients, name: list(ledger)}
        store.account[0] = account = account._replace(clients=clients, idle=account.idle + is_free)
        if not entry or (is_free and account.idle > _ALL_OF and account.idle & (account.idle - 1)):
            return
        line = {"site": name or entry.get("client") or store.folder.name, **entry}
        line |= {"refused_or_free": account.idle} if is_free else {}
        _store.append(store, {**line, "requests": _store.requests(store)})
        if entry.get("refused"):
            logger.warning("client %s refuses (%s) by %s", line["site"], entry["event"], entry["refused"])

    def known(kind: str, run: str) -> Run | None:
        answered = _store.known(store, name, kind, run)
        return None if answered is None else Run(*answered)

    def alike(kind: str) -> list[Run]:
        return [Run(*answered) for answered in _store.alike(store, name, kind)]

    return Guard(resolved(rules, masked=masked), read, write, known, alike, masked)


def _is_free(entry: Mapping[str, Any]) -> bool:
    """Whether a line is of what a server may ask any number of times; of nothing where there is no line."""
    is_answer = entry.get("event") in ("request", "reply", "conclusion") and not entry.get("repeated")
    return bool(entry) and (not is_answer or bool(entry.get("refused")))


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
