"""The audit log: its chain, what it shows when it was changed, and the program that checks it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


# The log as an RO-Crate -----------------------------------------------------------------------------------------------


def entities(crate: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is described, by its id, which no other has."""
    found = {one["@id"]: one for one in crate["@graph"]}
    assert len(found) == len(crate["@graph"])
    return found


def references(value: object) -> Iterator[str]:
    """All ids that something refers to."""
    if isinstance(value, dict) and set(value) == {"@id"}:
        yield str(value["@id"])
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from references(one)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder of a site that took part in one run, was asked in a second, and introduced itself to a third."""
    begun = {"event": "introduction", "site": "north", "algorithm": "Sums", "fedppl": "fedppl 0.1"}
    answer = {"site": "north", "run": "a", "round": 1}
    return written(
        tmp_path / "site",
        {**begun, "declaration": "d1", "rules": "rows = 300; else the default"},
        {"event": "cohort", "site": "north", "run": "a", "members": ["north", "the west/2"], "approved": "A. Meyer"},
        {**answer, "event": "request"},
        {**answer, "event": "reply", "released": {"mean": 2}, "epsilon": 0.5, "delta": 1e-5},
        {**answer, "event": "reply", "released": {"mean": 2, "precision": 3}},
        {"event": "request", "site": "north", "run": "b", "refused": "approval: nobody has approved run 'b'"},
        {**begun, "declaration": "d2"},
    )


@pytest.mark.parametrize("target", ["crate", "crate.zip"])
@pytest.mark.parametrize("source", ["folder", "lines"])
def test_a_crate_says_of_each_run_what_left_and_who_approved(runs: Path, target: str, source: str) -> None:
    exported, out = runs.parent / "log.jsonl", runs.parent / target
    assert audit.main([str(runs), "--export", str(exported)]) == 0
    assert audit.main([str(runs if source == "folder" else exported), "--crate", str(out)]) == 0
    assert (out.stat().st_mode & 0o077) == 0
    if target == "crate.zip":
        with zipfile.ZipFile(out) as archive:
            archive.extractall(out := runs.parent / "unpacked")
    lines, crate = (out / "audit.jsonl").read_bytes(), json.loads((out / "ro-crate-metadata.json").read_bytes())
    assert lines == exported.read_bytes() and crate["@context"] == "https://w3id.org/ro/crate/1.2/context"
    known = entities(crate)
    missing = {name for name in references(crate["@graph"]) if name not in known and not name.startswith("https://")}
    assert not missing
    assert known["ro-crate-metadata.json"]["about"] == {"@id": "./"}
    assert {"name", "description", "datePublished", "license", "hasPart"} <= set(known["./"])
    assert known["audit.jsonl"]["sha256"] == hashlib.sha256(lines).hexdigest()
    assert known["audit.jsonl"]["contentSize"] == str(len(lines))
    log = stored.lines(runs)
    assert log[-1]["digest"] in known["./"]["description"]
    first, second = (known[one["@id"]] for one in known["./"]["mentions"])

    def names(action: dict[str, Any], field: str) -> list[str]:
        return [known[one["@id"]]["name"] for one in action[field]]

    assert known[first["agent"]["@id"]]["name"] == "north"
    assert (first["startTime"], first["endTime"]) == (log[1]["time"], log[4]["time"])
    assert first["actionStatus"].endswith("CompletedActionStatus") and "error" not in first
    assert names(first, "instrument") == ["Sums", "fedppl 0.1", "d1", "rows = 300; else the default"]
    assert names(first, "participant") == ["the west/2", "A. Meyer"]
    released = {known[one["@id"]]["name"]: known[one["@id"]]["value"] for one in first["result"]}
    assert released == {"mean": 4, "precision": 3, "epsilon": 0.5, "delta": 1e-5}
    assert second["actionStatus"].endswith("FailedActionStatus") and "approval" in second["error"][0]
    assert "result" not in second


def test_no_crate_is_written_of_a_log_that_was_changed_or_over_another(runs: Path) -> None:
    path = runs.parent / "log.jsonl"
    assert audit.main([str(runs), "--export", str(path)]) == 0
    assert audit.main([str(path), "--crate", str(path)]) == 1
    raw = path.read_bytes()
    with pytest.raises(DataError, match="broken at line 2"):
        audit.crate(raw.replace(b"A. Meyer", b"B. Meyer"))
    assert not [one for one in entities(audit.crate(b"")).values() if one["@type"] == "CreateAction"]
