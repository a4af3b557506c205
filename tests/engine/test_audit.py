"""The audit log: its chain, what it shows when it was changed, and the program that checks it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedppl import DataError, audit
from fedppl.storage import store
from tests.support import stored


def written(folder: Path, *entries: dict[str, object]) -> Path:
    """A site's folder with such lines, none of which counts a request."""
    with store.changing(folder) as here:
        for entry in entries:
            store.append(here, {**entry, "requests": 0})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(
        tmp_path / "site",
        {"event": "introduction", "refused": None},
        {"event": "request", "run": "a", "round": 1, "refused": None},
        {"event": "reply", "run": "a", "round": 1, "released": {"mean": 2, "precision": 3}},
        {"event": "request", "run": "b", "round": 1, "refused": "distance: 31 prior sds"},
    )


@pytest.fixture
def log(folder: Path) -> Path:
    """The same lines in a file."""
    path = folder.parent / "log.jsonl"
    assert audit.main([str(folder), "--export", str(path)]) == 0
    return path


def test_a_chain_holds_and_goes_on(folder: Path) -> None:
    before = stored.lines(folder)
    written(folder, {"event": "request"})
    assert [line["line"] for line in before] == [1, 2, 3, 4]
    assert stored.lines(folder)[:4] == before and stored.lines(folder)[4]["before"] == before[3]["digest"]


def swap(raw: list[bytes]) -> list[bytes]:
    return [raw[0], raw[2], raw[1], raw[3]]


CHANGES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int]] = {
    "a number": (lambda raw: [raw[0], raw[1].replace(b'"round": 1', b'"round": 2'), *raw[2:]], 2),
    "a line left out": (lambda raw: [raw[0], *raw[2:]], 2),
    "two lines swapped": (swap, 2),
    "a line twice": (lambda raw: [*raw, raw[-1]], 5),
    "cut within a line": (lambda raw: [*raw[:3], raw[3][:-9]], 4),
    "no JSON": (lambda raw: [*raw[:3], b"{\n"], 4),
    "no text": (lambda raw: [*raw[:3], b"\xff\n"], 4),
    "nested without end": (lambda raw: [*raw[:3], b"[" * 100_000 + b"\n"], 4),
    "a key that stands twice": (lambda raw: [raw[0], b'{"refused": "nothing left", ' + raw[1][1:], *raw[2:]], 2),
    "a first line of nobody": (lambda raw: [b"{}\n", *raw[1:]], 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_shows_at_its_line(log: Path, change: str, capsys: pytest.CaptureFixture[str]) -> None:
    alter, line = CHANGES[change]
    log.write_bytes(b"".join(alter(log.read_bytes().splitlines(keepends=True))))
    with pytest.raises(DataError, match=f"broken at line {line}:"):
        list(audit.lines(log))
    assert audit.main([str(log)]) == 1
    assert "BROKEN" in capsys.readouterr().err


def test_the_end_of_a_file_shows_in_the_count_and_digest_alone(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = list(audit.lines(log))
    raw = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(raw[:2]))
    assert audit.main([str(log)]) == 0
    told = capsys.readouterr().out
    assert "2 lines" in told and "is not known" in told and whole[-1]["digest"] not in told
    log.write_bytes(b"".join(raw[1:]))
    assert audit.main([str(log)]) == 0 and "line 2 follows another" in capsys.readouterr().out


def test_the_program_prints_a_summary(folder: Path) -> None:
    ran = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "fedppl.audit", str(folder)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0 and not ran.stderr
    assert "4 lines" in ran.stdout and "2 runs" in ran.stdout and "distance (1)" in ran.stdout
    assert "2 mean, 3 precision" in ran.stdout
    assert ran.stdout.rstrip().endswith(stored.lines(folder)[-1]["digest"])


def test_a_folder_or_a_file_that_is_none_is_not_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("none.jsonl", "empty"):
        assert audit.main([str(tmp_path / name)]) == 1
        told = capsys.readouterr().err
        assert "not checked" in told and name in told
    (tmp_path / "empty.jsonl").touch()
    assert audit.main([str(tmp_path / "empty.jsonl")]) == 0


def test_a_line_that_is_no_sites_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, entry in enumerate(({}, {"event": 3, "refused": 4}, {"event": "reply", "released": 5})):
        folder = written(tmp_path / str(i), entry)  # type: ignore[arg-type]
        assert audit.main([str(folder)]) == 1 and "line 1" in capsys.readouterr().err
    folder = written(tmp_path / "ansi", {"event": "\x1b[2Jall is well"})
    assert audit.main([str(folder)]) == 0 and "\x1b" not in capsys.readouterr().out


def test_epsilon_is_that_of_each_clients_last_reply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replies = [
        {"event": "reply", "site": site, "epsilon": spent, "delta": 1e-5}
        for site, spent in (("a", 1.0), ("b", 0.5), ("a", 2.0))
    ]
    assert audit.main([str(written(tmp_path, *replies, {"event": "conclusion", "site": "a"}))]) == 0
    told = capsys.readouterr().out
    assert "of a: 2 " in told and "of b: 0.5 " in told
