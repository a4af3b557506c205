"""The audit log: its chain, what it shows when it was changed, and the program that checks it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedppl import DataError, audit


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "audit.jsonl"
    audit.append(path, {"event": "introduction", "refused": None})
    audit.append(path, {"event": "request", "run": "a", "round": 1, "refused": None})
    audit.append(path, {"event": "reply", "run": "a", "round": 1, "released": {"mean": 2, "precision": 3}})
    audit.append(path, {"event": "request", "run": "b", "round": 1, "refused": "distance: 31 prior sds"})
    return path


def test_a_chain_holds_and_goes_on(log: Path) -> None:
    before = audit.head(log)
    after = audit.append(log, {"event": "request"})
    assert (before.length, after.length) == (4, 5)
    assert audit.head(log) == after
    assert [line["line"] for line in audit.lines(log)] == [1, 2, 3, 4, 5]


def swap(raw: list[bytes]) -> list[bytes]:
    return [raw[0], raw[2], raw[1], raw[3]]


CHANGES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int]] = {
    "a number": (lambda raw: [raw[0], raw[1].replace(b'"round": 1', b'"round": 2'), *raw[2:]], 2),
    "a line left out": (lambda raw: [raw[0], *raw[2:]], 2),
    "the first line left out": (lambda raw: raw[1:], 1),
    "two lines swapped": (swap, 2),
    "a line twice": (lambda raw: [*raw, raw[-1]], 5),
    "cut within a line": (lambda raw: [*raw[:3], raw[3][:-9]], 4),
    "no JSON": (lambda raw: [*raw[:3], b"{\n"], 4),
    "nested without end": (lambda raw: [*raw[:3], b"[" * 100_000 + b"\n"], 4),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_shows_at_its_line(log: Path, change: str, capsys: pytest.CaptureFixture[str]) -> None:
    alter, line = CHANGES[change]
    log.write_bytes(b"".join(alter(log.read_bytes().splitlines(keepends=True))))
    with pytest.raises(DataError, match=f"broken at line {line}:"):
        audit.head(log)
    with pytest.raises(DataError, match="broken"):
        audit.append(log, {"event": "request"})
    assert audit.main([str(log)]) == 1
    assert "BROKEN" in capsys.readouterr().err


def test_a_cut_tail_shows_in_the_count_and_digest_alone(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = audit.head(log)
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:2]))
    assert audit.main([str(log)]) == 0
    told = capsys.readouterr().out
    assert "2 lines" in told and whole.digest not in told


def test_the_program_prints_a_summary(log: Path) -> None:
    ran = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "fedppl.audit", str(log)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0 and not ran.stderr
    assert "4 lines" in ran.stdout and "2 runs" in ran.stdout and "distance (1)" in ran.stdout
    assert "2 mean, 3 precision" in ran.stdout
    last = json.loads(log.read_bytes().splitlines()[-1])["digest"]
    assert ran.stdout.rstrip().endswith(last)


def test_a_file_that_is_not_there_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main([str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err


def test_a_key_that_stands_twice_breaks_the_chain(log: Path) -> None:
    raw = log.read_bytes().splitlines(keepends=True)
    raw[1] = b'{"refused": "nothing left", ' + raw[1][1:]
    log.write_bytes(b"".join(raw))
    with pytest.raises(DataError, match="line 2"):
        audit.head(log)


def test_a_line_that_is_no_sites_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, entry in enumerate(({}, {"event": 3, "refused": 4}, {"event": "reply", "released": 5})):
        path = tmp_path / f"{i}.jsonl"
        audit.append(path, entry)
        assert audit.main([str(path)]) == 1 and "line 1" in capsys.readouterr().err
    audit.append(tmp_path / "ansi.jsonl", {"event": "\x1b[2Jall is well"})
    assert audit.main([str(tmp_path / "ansi.jsonl")]) == 0 and "\x1b" not in capsys.readouterr().out


def test_epsilon_is_that_of_each_clients_last_reply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, after = tmp_path / "log.jsonl", audit.Head()
    for site, spent in (("a", 1.0), ("b", 0.5), ("a", 2.0)):
        after = audit.append(path, {"event": "reply", "site": site, "epsilon": spent, "delta": 1e-5}, after)
    audit.append(path, {"event": "conclusion", "site": "a"}, after)
    assert audit.main([str(path)]) == 0
    told = capsys.readouterr().out
    assert "of a: 2 " in told and "of b: 0.5 " in told
