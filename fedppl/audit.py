"""A site's audit log: JSON lines, each with the digest of the one before. ``python -m fedppl.audit FILE`` checks it.

It also holds the account beside it, `ledger.json`, against the log, and by it sees that the log's end was cut off.
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

from fedppl.storage.signed import read_account, write_account
from fedppl.types import DataError, DeclarationError

_START = hashlib.sha256(b"fedppl audit log 1\n").hexdigest()


class Head(NamedTuple):
    """How many lines a log has, and the digest of the last."""

    length: int = 0
    digest: str = _START


def append(path: str | os.PathLike[str], entry: Mapping[str, Any], after: Head | None = None) -> Head:
    """Write one line, on the disk when this returns.

    The log is made where there is none, and its caller holds the site's lock. The entry is as JSON has it; ``line``,
    ``time``, ``before`` and ``digest`` are the log's own names. `after` is the head that the log has as far as the
    caller knows; without it the log is read. Raises `DataError` if it is broken, `OSError` if it cannot be written.
    """
    before = head(path) if after is None else after
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    line = {"line": before.length + 1, "time": now, **entry, "before": before.digest}
    assert "digest" not in line
    line["digest"] = _digest(line)
    with Path(path).open("ab") as file:
        if os.name == "posix":
            os.fchmod(file.fileno(), 0o600)
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return Head(before.length + 1, str(line["digest"]))


def drop_torn(path: str | os.PathLike[str]) -> int:
    """Cut off a last line without an end, which nobody finished writing; returns how many bytes it had."""
    with Path(path).open("r+b") as file:
        raw = file.read()
        whole = raw.rfind(b"\n") + 1
        if whole < len(raw):
            file.truncate(whole)
            file.flush()
            os.fsync(file.fileno())
        return len(raw) - whole


def lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Give the lines one by one, and raise DataError at the first that does not follow from the one before."""
    before = Head()
    with Path(path).open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = json.loads(raw)
                whole = raw.endswith(b"\n") and isinstance(line, dict)
                told = line.pop("digest", None) if whole else None
                # Written as we write: no key twice, of which a reader sees one and an eye the other.
                follows = whole and raw == json.dumps({**line, "digest": told}).encode() + b"\n"
                follows = follows and line.get("before") == before.digest and line.get("line") == number
                broken = not follows or _digest(line) != told
            except (ValueError, RecursionError):
                broken = True
            if broken:
                raise DataError(
                    f"{str(path)!r} is broken at line {number}: it was changed, or a line before it was taken out or "
                    "put in, or writing it was cut short. Keep the file as it is, and find out which."
                )
            before = Head(number, str(told))
            yield {**line, "digest": told}


def head(path: str | os.PathLike[str]) -> Head:
    """Check a log from its first line to its last; one that is not there has none."""
    last = Head()
    if Path(path).exists():
        for line in lines(path):
            last = Head(line["line"], line["digest"])
    return last


def _digest(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()


class _Recount:
    """Requests by client, as the lines of a log have them."""

    def __init__(self) -> None:
        self.requests: collections.Counter[str] = collections.Counter()
        self._runs: set[tuple[str, str]] = set()

    def add(self, line: Mapping[str, Any]) -> None:
        """Count a line: what was let through once, less what nobody approved."""
        site, event, of = str(line.get("site", "")), line["event"], (str(line.get("site", "")), str(line.get("run")))
        if event == "reply" and line.get("refused"):
            self.requests[site] -= 1
        elif event in ("request", "conclusion") and not line.get("refused") and not line.get("repeated"):
            self.requests[site] += event == "request" or of not in self._runs
            self._runs.add(of)


def _begin_anew(path: Path) -> int:
    """Move a log away that holds, and let the account go on with an empty one."""
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
    return 0


class _Account(NamedTuple):
    """What the account beside a log says: how far the log had been written, and how many requests were answered."""

    head: Head
    requests: int


def _account_of(path: Path) -> Path:
    return path.with_name("ledger.json")


def _account(path: Path) -> _Account | None:
    """The account beside a log; None where there is none. DataError where it cannot be believed."""
    account = _account_of(path)
    if not account.is_file():
        return None
    content = read_account(account)
    try:
        requests = sum(int(one["requests"]) for one in content["clients"].values())
        return _Account(Head(int(content["lines"]), str(content["head"])), requests)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{str(account)!r} is no account of a site ({type(error).__name__})") from error


def _against_account(path: Path, now: _Account, length: int, counted: int) -> str | None:
    """What does not go together in a log of so many lines and requests and an account that was read after it."""
    account = str(_account_of(path))
    # The log comes first: where a process died in between it knows one more. An earlier log had others.
    if counted > now.requests + 1:
        return f"{account!r} counts {now.requests} requests, the log {counted}"
    if length > now.head.length + 2:
        return f"{account!r} knows {now.head.length} lines of the log, which has {length}: it is an earlier one"
    return None


def main(argv: list[str] | None = None) -> int:
    """Check a log and print a summary; 0 where it holds, 1 where it is broken."""
    parser = argparse.ArgumentParser(prog="python -m fedppl.audit", description="Check a site's audit log.")
    parser.add_argument("file", type=Path, help="audit.jsonl in a site's folder; the account beside it is checked too")
    parser.add_argument("--begin-anew", action="store_true", help="move the log aside; the account goes on")
    given = parser.parse_args(argv)
    path = given.file
    if not path.is_file():
        print(f"{str(path)!r} is no file; name audit.jsonl in a site's folder", file=sys.stderr)
        return 1
    if given.begin_anew:
        try:
            return _begin_anew(path)
        except (OSError, DataError, DeclarationError) as error:
            print(f"BROKEN: {error}", file=sys.stderr)
            return 1
    return _checked(path)


def _checked(path: Path) -> int:
    events: collections.Counter[str] = collections.Counter()
    rules: collections.Counter[str] = collections.Counter()
    numbers: collections.Counter[str] = collections.Counter()
    runs: set[str] = set()
    left_out, recount = 0, _Recount()
    spent: dict[str, Any] = {}  # the last reply of each client
    last: dict[str, Any] = {"line": 0, "digest": _START}
    try:
        before = _account(path)  # before the log is read and after it: a site may be writing both
        met = before is None or before.head.length == 0
        for last in lines(path):
            met = met or (before is not None and before.head == (last["line"], last["digest"]))
            events[ascii(last["event"])[1:-1]] += 1
            if last.get("refused"):
                rules[ascii(last["refused"].partition(":")[0])[1:-1]] += 1
            numbers.update(last.get("released", {}))
            left_out += last.get("left_out", 0)
            recount.add(last)
            if last.get("epsilon") is not None:
                spent[str(last.get("site", ""))] = last
            runs |= {last["run"]} if last.get("run") else set()
        now = _account(path)
    except DeclarationError as error:  # of the key, which says nothing of the log
        print(f"not checked: {error}", file=sys.stderr)
        return 1
    except (OSError, DataError) as error:
        print(f"BROKEN: {error}", file=sys.stderr)
        return 1
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        print(f"BROKEN: line {last['line']} is none of a site's ({type(error).__name__})", file=sys.stderr)
        return 1
    wrong = None if now is None else _against_account(path, now, last["line"], sum(recount.requests.values()))
    if before is not None and not met:
        wrong = f"{str(path)!r} lacks line {before.head.length}, which was written: it was cut, or put in place anew"
    if wrong:
        print(f"BROKEN: {wrong}", file=sys.stderr)
        return 1
    print(f"{last['line']} lines, the chain holds; {len(runs)} runs")
    if now is None:
        print(f"no {_account_of(path).name} beside it: whether lines were cut off at the end is not known")
    print("events: " + (", ".join(f"{count} {name}" for name, count in sorted(events.items())) or "none"))
    print("refused by: " + (", ".join(f"{name} ({count})" for name, count in sorted(rules.items())) or "none"))
    if left_out:
        print(f"points left out by distance or few_rows: {left_out}")
    print("numbers released: " + (", ".join(f"{count} {name}" for name, count in sorted(numbers.items())) or "none"))
    for site, line in sorted(spent.items()):
        print(f"ε so far{f' of {site}' * bool(site)}: {line['epsilon']:.4g} at δ = {line['delta']:g}")
    for site, count in sorted(recount.requests.items()):
        print(f"requests answered{f' of {site}' * bool(site)}: {count}")
    print(f"last digest: {last['digest']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
