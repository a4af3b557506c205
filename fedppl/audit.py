"""A site's audit log: JSON lines, each with the digest of the one before. ``python -m fedppl.audit FILE`` checks it.

The check compares the log with the account beside it, `ledger.json`, which shows whether the log's end was cut off.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedppl.storage.signed import read_account, write_account, write_through
from fedppl.types import DataError, DeclarationError

_START = hashlib.sha256(b"fedppl audit log 1\n").hexdigest()


class Head(NamedTuple):
    """Number of lines of a log, and the digest of the last."""

    length: int = 0
    digest: str = _START


def append(path: str | os.PathLike[str], entry: Mapping[str, Any], after: Head | None = None) -> Head:
    """Append one line, on the disk when this returns; the caller holds the site's lock.

    The entry is JSON, and must not have the names ``line``, ``time``, ``before`` and ``digest``. `after` is the log's
    head; without it the log is read. Raises `DataError` if the log is broken, `OSError` if it cannot be written.
    """
    before = head(path) if after is None else after
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    record = {"line": before.length + 1, "time": time, **entry, "before": before.digest}
    assert "digest" not in record
    record["digest"] = _digest(record)
    with Path(path).open("ab") as file:
        if os.name == "posix":
            os.fchmod(file.fileno(), 0o600)
        write_through(file, json.dumps(record).encode() + b"\n")
    return Head(before.length + 1, str(record["digest"]))


def drop_torn(path: str | os.PathLike[str]) -> int:
    """Cut off an unfinished last line; return how many bytes it had."""
    with Path(path).open("r+b") as file:
        raw = file.read()
        whole = raw.rfind(b"\n") + 1
        if whole < len(raw):
            file.truncate(whole)
            write_through(file, b"")
        return len(raw) - whole


def lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines, and raise DataError at the first that does not follow from the one before."""
    before = Head()
    with Path(path).open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = json.loads(raw)
                known = {name: value for name, value in line.items() if name != "digest"}
                # Byte by byte as `append` writes it: a key that stands twice would be read by programs only once.
                is_ours = raw == json.dumps({**known, "digest": _digest(known)}).encode() + b"\n"
                holds = is_ours and (line.get("line"), line.get("before")) == (number, before.digest)
            except (ValueError, RecursionError, AttributeError):
                holds = False
            if not holds:
                where = f"{str(path)!r} is broken at line {number}"
                raise DataError(f"{where}: it or one before was changed, removed or cut; keep it, and find out which.")
            before = Head(number, line["digest"])
            yield line


def head(path: str | os.PathLike[str]) -> Head:
    """Check a log from its first line to its last; a missing log is empty."""
    last = Head()
    if Path(path).exists():
        for line in lines(path):
            last = Head(line["line"], line["digest"])
    return last


def _digest(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()


class _Tally:
    """Counts over the lines of a log, and the last ε of each client."""

    def __init__(self) -> None:
        self.events: collections.Counter[str] = collections.Counter()
        self.rules: collections.Counter[str] = collections.Counter()
        self.numbers: collections.Counter[str] = collections.Counter()
        self.requests: collections.Counter[str] = collections.Counter()  # answered, by client
        self.runs: set[str] = set()
        self._answered: set[tuple[str, str]] = set()  # clients and runs
        self._left_out = 0
        self._spent: dict[str, Any] = {}  # the last reply of each client

    def add(self, line: Mapping[str, Any]) -> None:
        """Count a line. A request counts once, unless nobody approved the reply."""
        site, event, refused = str(line.get("site", "")), line["event"], line.get("refused")
        self.events[ascii(event)[1:-1]] += 1
        if refused:
            self.rules[ascii(refused.partition(":")[0])[1:-1]] += 1
        self.numbers.update(line.get("released", {}))
        self._left_out += line.get("left_out", 0)
        if event == "reply" and refused:
            self.requests[site] -= 1
        elif event in ("request", "conclusion") and not refused and not line.get("repeated"):
            run = site, str(line.get("run"))
            self.requests[site] += event == "request" or run not in self._answered
            self._answered.add(run)
        if line.get("epsilon") is not None:
            self._spent[site] = line
        self.runs |= {line["run"]} if line.get("run") else set()

    def summary(self) -> Iterator[str]:
        """The counts in words."""
        yield f"events: {_counted(self.events)}"
        yield "refused by: " + (", ".join(f"{name} ({count})" for name, count in sorted(self.rules.items())) or "none")
        if self._left_out:
            yield f"points left out by distance or few_rows: {self._left_out}"
        yield f"numbers released: {_counted(self.numbers)}"
        for site, line in sorted(self._spent.items()):
            yield f"ε so far{f' of {site}' * bool(site)}: {line['epsilon']:.4g} at δ = {line['delta']:g}"
        for site, count in sorted(self.requests.items()):
            yield f"requests answered{f' of {site}' * bool(site)}: {count}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


def _begin_anew(path: Path) -> None:
    """Move an unbroken log away, and let the account go on with an empty one."""
    account = _account_of(path)
    if not account.is_file():
        raise DataError(f"{str(path)!r} has no {account.name} beside it, which would go on: put it back.")
    content = read_account(account)
    last = head(path)
    if content["lines"] > last.length:
        raise DataError(f"{str(path)!r} lacks line {content['lines']}, which was written.")
    aside = path.with_name(f"{path.stem}-{last.digest[:12]}{path.suffix}")
    os.rename(path, aside)
    path.touch(mode=0o600)
    write_account(account, {**content, "lines": 0, "head": Head().digest})
    print(f"{last.length} lines are in {str(aside)!r}; last digest: {last.digest}")


def _account_of(path: Path) -> Path:
    return path.with_name("ledger.json")


def _account(path: Path) -> tuple[Head, int] | None:
    """The log's head, and answered requests, by the account beside it; None without one, DataError if it is damaged."""
    account = _account_of(path)
    if not account.is_file():
        return None
    content = read_account(account)
    try:
        requests = sum(int(client["requests"]) for client in content["clients"].values())
        return Head(int(content["lines"]), str(content["head"])), requests
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{str(account)!r} is no account of a site ({type(error).__name__})") from error


def main(argv: list[str] | None = None) -> int:
    """Check a log and print a summary; 0 where it holds, 1 where it is broken."""
    parser = argparse.ArgumentParser(prog="python -m fedppl.audit", description="Check a site's audit log.")
    parser.add_argument("file", type=Path, help="audit.jsonl in a site's folder; the account beside it is checked too")
    parser.add_argument("--begin-anew", action="store_true", help="move the log aside; the account goes on")
    given = parser.parse_args(argv)
    try:
        if not given.file.is_file():
            raise DeclarationError(f"{str(given.file)!r} is no file; name audit.jsonl in a site's folder")
        _begin_anew(given.file) if given.begin_anew else _check(given.file)
    except DeclarationError as error:  # of the path or the key, which says nothing about the log
        print(f"not checked: {error}", file=sys.stderr)
        return 1
    except (OSError, DataError) as error:
        print(f"BROKEN: {error}", file=sys.stderr)
        return 1
    return 0


def _check(path: Path) -> None:
    tally, account, last = _Tally(), _account_of(path), Head()
    before = _account(path)  # before the log is read and after it: a site may be writing both
    met = before is None or before[0].length == 0
    for line in lines(path):
        last = Head(line["line"], line["digest"])
        met = met or (before is not None and before[0] == last)
        try:
            tally.add(line)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(f"line {last.length} is none of a site's ({type(error).__name__})") from error
    after = _account(path)
    if before is not None and not met:
        raise DataError(f"{str(path)!r} lacks line {before[0].length}, which was written: it was cut, or put anew")
    if after is not None:
        (known, _), requests = after
        name, counted = str(account), sum(tally.requests.values())
        # The log is written first: if a process died in between, it has one request and two lines more.
        if counted > requests + 1:
            raise DataError(f"{name!r} counts {requests} requests, the log {counted}")
        if last.length > known + 2:
            raise DataError(f"{name!r} knows {known} lines of the log, which has {last.length}: it is an earlier one")
    print(f"{last.length} lines, the chain holds; {len(tally.runs)} runs")
    if after is None:
        print(f"no {account.name} beside it: whether lines were cut off at the end is not known")
    print("\n".join(tally.summary()))
    print(f"last digest: {last.digest}")


if __name__ == "__main__":
    sys.exit(main())
