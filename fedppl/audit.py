"""A site's audit log, lines of JSON in its file, each with the digest of the one before.

``python -m fedppl.audit FOLDER`` checks the chain from its first line to the last, and the account beside it.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedppl.storage import store as _store
from fedppl.storage.signed import open_to_write, reason, write_through
from fedppl.storage.store import Head
from fedppl.types import DataError, DeclarationError


def lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a site's folder, or of a file of lines that were written out of one.

    Raises `DataError` at the first line that does not follow from the one before. A file may begin after other lines.
    """
    if Path(path).is_dir():
        with _store.reading(Path(path)) as store:
            yield from _of_store(store)
        return
    with Path(path).open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        records = (record.removesuffix("\n") for record in file)
        first = next(records, None)
        if first is not None:
            yield from _store.followed(itertools.chain([first], records), _store.before(first), repr(str(path)))


def _of_store(store: _store.Store) -> Iterator[dict[str, Any]]:
    """The lines of a site's file, whose last is that of the account."""
    return _store.followed(_store.records(store), store.account[0].base, store.shown)


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


def _written(store: _store.Store, target: Path) -> None:
    """Write the lines to a new file, which nobody else may read."""
    with open_to_write(target, os.O_EXCL) as file:
        for record in _store.records(store):
            file.write(record.encode() + b"\n")
        write_through(file, b"")


def _rotate(folder: Path, target: Path) -> None:
    """Move all lines to a new file; the chain goes on from the last of them, and so does the account."""
    with _store.changing(folder) as store:
        _check(_of_store(store), store)
        _written(store, target)
        _store.rotate(store)


def _check(lines: Iterator[Mapping[str, Any]], store: _store.Store | None) -> None:
    """Print a summary, or raise DataError where a line or the account is not what it should be."""
    tally, last, counted, first = _Tally(), 0, None, 0
    digest = ""
    for line in lines:
        first, last, digest, counted = first or line["line"], line["line"], line["digest"], line.get("requests")
        try:
            tally.add(line)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(f"line {last} is none of a site's ({type(error).__name__})") from error
    if store is not None:
        account, known = store.account[0], _store.requests(store)
        counted, last, digest = (counted, last, digest) if last else (account.requests, *account.base)
        if counted != known:
            raise DataError(f"{store.shown} counts {known} requests, its log {counted}")
        for part in range(_store.PARTS):
            _store.rows(store, part)
    print(f"{last - first + bool(first)} lines, the chain holds; {len(tally.runs)} runs")
    if first > 1:
        print(f"line {first} follows another that was moved away")
    if store is None:
        print("no account beside it: whether lines were cut off at the end is not known")
    print("\n".join(tally.summary()))
    print(f"last digest: {digest or Head().digest}")


def main(argv: list[str] | None = None) -> int:
    """Check a log and print a summary; 0 where it holds, 1 where it is broken."""
    parser = argparse.ArgumentParser(prog="python -m fedppl.audit", description="Check a site's audit log and account.")
    parser.add_argument("path", type=Path, help="a site's folder, or a file of lines that --export or --rotate wrote")
    also = parser.add_mutually_exclusive_group()
    also.add_argument("--export", type=Path, metavar="FILE", help="write the lines to a new file too")
    also.add_argument("--rotate", type=Path, metavar="FILE", help="move the lines to a new file; the chain goes on")
    given = parser.parse_args(argv)
    try:
        if given.rotate:
            _rotate(given.path, given.rotate)
        elif given.path.is_file():
            _check(lines(given.path), None)
        else:
            with _store.reading(given.path) as store:
                _check(_of_store(store), store)
                if given.export:
                    _written(store, given.export)
    except DeclarationError as error:  # of the path or the key, which says nothing about the log
        print(f"not checked: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"not done: {reason(error)}: {error.filename!r}", file=sys.stderr)
        return 1
    except DataError as error:
        print(f"BROKEN: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
