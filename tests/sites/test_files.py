"""Runs whose messages are files: equal digits, sites that are late, and bundles that are changed, old or another's."""

from __future__ import annotations

import functools
import itertools
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

pytest.importorskip("cryptography")

import fedppl
from fedppl import DeclarationError, Policy, audit, site
from fedppl.engine import secure
from fedppl.sites import files
from fedppl.sites.files import ANSWERED, ASKED
from fedppl.testing import normal_means

NAMES = ("north", "south", "west")
OPEN = Policy(
    sums="optional",
    rows=0,
    few_rows=0,
    parameters_per_row=math.inf,
    events=0,
    requests=math.inf,
    distance=math.inf,
    points=2**30,
    conclusions=("loo",),
)


@functools.cache
def declared() -> tuple[fedppl.FederatedModel, dict[str, Any]]:
    model, clients = normal_means(3)
    return model, dict(zip(NAMES, clients.values(), strict=True))


def keys(base: Path) -> None:
    """Folders of identities: sites know each other and the server, which knows the sites."""
    lines = {name: site.make(base / name, name) for name in (*NAMES, "server")}
    for name, other in itertools.permutations(NAMES, 2):
        site.add(base / name, lines[other])
    for name in NAMES:
        site.add(base / "server", lines[name])
        secure.set_server(base / name, lines["server"])


def declaration(base: Path, algorithm: Any, masked: bool) -> fedppl.Site:
    model, clients = declared()
    return fedppl.Site(
        model,
        algorithm,
        lambda config: clients[config["client-id"]],
        folder=lambda config: base / f"at {config['client-id']}",
        policy=lambda config: OPEN,
        secure=(lambda config: base / config["client-id"]) if masked else None,
        draws=50,
        chains=2,
    )


def answerers(base: Path, algorithm: Any, masked: bool = False) -> dict[str, Callable[[Path], Path]]:
    here = declaration(base, algorithm, masked)
    return {name: files.answering(here, {"client-id": name}, base / name) for name in NAMES}


def engine(base: Path, masked: bool = False, **settings: Any) -> fedppl.Files:
    made_up = {"y": np.ones(2)}
    return fedppl.Files(base / "run", NAMES, declared()[0], base / "server", made_up, masked, **settings)


def call(base: Path, algorithm: Any, masked: bool = False, **settings: Any) -> fedppl.Fit:
    given = {"progressbar": False, "random_seed": 1, "engine": engine(base, masked), **settings}
    return fedppl.fit(declared()[0], None, algorithm, **given)


def waiting(base: Path, algorithm: Any, masked: bool = False, **settings: Any) -> tuple[Path, ...]:
    with pytest.raises(fedppl.Waiting) as caught:
        call(base, algorithm, masked, **settings)
    return caught.value.bundles


def to_end(base: Path, algorithm: Any, masked: bool = False, calls: int = 60) -> fedppl.Fit:
    """Calls in turn with sites that answer whatever has been written."""
    answer = answerers(base, algorithm, masked)
    for _ in range(calls):
        try:
            fit = call(base, algorithm, masked)
        except fedppl.Waiting:
            fit = None
        bundles = [path for path in (base / "run").rglob(f"*{ASKED}") if not path.with_suffix(ANSWERED).exists()]
        if not bundles:
            assert fit is not None
            return fit
        for path in sorted(bundles):
            answer[path.parent.name](path)
    raise AssertionError("the run did not end")


def log(base: Path, name: str) -> list[dict[str, Any]]:
    """Lines of a site's log."""
    folder = base / f"at {name}"
    return list(audit.lines(folder)) if (folder / "site.sqlite").exists() else []


def same(fit: fedppl.Fit, other: fedppl.Fit) -> None:
    assert fit.status is other.status is fedppl.Status.CONVERGED
    for mine, its in zip(fit.posterior, other.posterior, strict=True):
        assert_array_equal(mine, its)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    keys(tmp_path)
    return tmp_path


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("masked", "exchanges"), [(False, None), (True, None), (True, 4)])
def test_a_run_by_files_has_the_digits_of_one_process(base: Path, masked: bool, exchanges: int | None) -> None:
    (model, clients), algorithm = declared(), fedppl.Sums(exchanges=exchanges)
    fit = to_end(base, algorithm, masked)
    whole = fedppl.InProcess(secure=masked, policy=OPEN)
    same(fit, fedppl.fit(model, clients, algorithm, engine=whole, progressbar=False, random_seed=1))
    # To enrol, two for masks, each round, and at the end.
    bundles = list((base / "run" / "sites" / "north").glob(f"*{ASKED}"))
    assert len(bundles) == 2 + 2 * masked + len(fit.records)
    assert fit.told
    for name in NAMES:
        assert (base / f"at {name}" / f"{name}.nc").exists()
        # Each request once, whatever the number of calls.
        rounds = [line["round"] for line in log(base, name) if line["event"] == "request" and line.get("round")]
        assert rounds == [record.number for record in fit.records]
    again = call(base, algorithm, masked)
    same(again, fit)
    assert again.told.keys() == fit.told.keys()


def test_a_site_may_be_late_and_the_others_are_asked_nothing_more(base: Path) -> None:
    answer = answerers(base, fedppl.Sums(), masked=True)
    first = waiting(base, fedppl.Sums(), masked=True)
    assert sorted(path.parent.name for path in first) == sorted(NAMES)
    for path in first:
        if path.parent.name != "west":
            answer[path.parent.name](path)
    (late,) = waiting(base, fedppl.Sums(), masked=True)
    before = late.read_bytes()
    assert late in first and waiting(base, fedppl.Sums(), masked=True) == (late,) and late.read_bytes() == before
    assert len(list((base / "run").rglob(f"*{ASKED}"))) == 3
    late.unlink()  # lost on its way: the same bytes are written again
    assert waiting(base, fedppl.Sums(), masked=True) == (late,) and late.read_bytes() == before
    answer["west"](late)
    assert {path.name[-8:] for path in waiting(base, fedppl.Sums(), masked=True)} == {f"0002{ASKED}"}


def test_a_seed_that_is_not_given_is_the_runs_own(base: Path) -> None:
    answer = answerers(base, fedppl.EP())
    fits = []
    for _ in range(40):
        try:
            fits.append(call(base, fedppl.EP(), random_seed=None))
        except fedppl.Waiting as error:
            for path in error.bundles:
                answer[path.parent.name](path)
        if len(fits) == 2:
            break
    same(*fits)
    assert fits[0].seed == fits[1].seed


def test_a_call_that_asks_otherwise_is_refused_and_so_is_a_deadline(base: Path) -> None:
    answer = answerers(base, fedppl.Sums())
    for _ in range(2):
        for path in waiting(base, fedppl.Sums()):
            answer[path.parent.name](path)
    with pytest.raises(DeclarationError, match="random_seed"):
        call(base, fedppl.Sums(), random_seed=2)
    with pytest.raises(DeclarationError, match=r"leave deadline= out"):
        call(base, fedppl.Sums(), deadline=60.0)


def test_a_site_that_is_refused_is_asked_again_in_a_new_bundle(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    answer = answerers(base, fedppl.Sums())
    wrong = answerers(base, fedppl.EP())
    for path in waiting(base, fedppl.Sums()):
        (wrong if path.parent.name == "south" else answer)[path.parent.name](path)
    (again,) = waiting(base, fedppl.Sums())
    assert again.parent.name == "south" and again.name.endswith(f"0002{ASKED}")
    assert any("south" in record.getMessage() and record.levelname == "ERROR" for record in caplog.records)
    answer["south"](again)
    assert len(waiting(base, fedppl.Sums())) == 3


@pytest.mark.parametrize("masked", [False, True])
def test_sites_agree_on_a_formula_by_files(base: Path, masked: bool) -> None:
    rng = np.random.default_rng(1)
    formula = fedppl.formula("y ~ x + (1 | site)")
    rows = {name: {"x": rng.normal(5.0, 2.0, 200), "y": rng.normal(0.0, 1.0, 200)} for name in NAMES}
    here = fedppl.Site(
        formula,
        fedppl.Sums(),
        lambda config: rows[config["client-id"]],
        folder=lambda config: base / f"at {config['client-id']}",
        policy=OPEN,
        secure=(lambda config: base / config["client-id"]) if masked else None,
        draws=50,
        chains=2,
    )
    answer = {name: files.answering(here, {"client-id": name}, base / name) for name in NAMES}
    asked = fedppl.Files(base / "run", NAMES, formula, base / "server", secure=masked)
    with pytest.raises(DeclarationError, match="agree"):
        fedppl.fit(formula, None, fedppl.Sums(), engine=asked, progressbar=False)
    for _ in range(1 + masked):
        with pytest.raises(fedppl.Waiting) as caught:
            asked.agree()
        for path in caught.value.bundles:
            answer[path.parent.name](path)
    found = asked.agree()
    assert found.clients == tuple(sorted(NAMES))
    assert found.columns.equals(asked.agree().columns)
    with pytest.raises(fedppl.Waiting) as caught:
        fedppl.fit(found.model, None, fedppl.Sums(), engine=asked._replace(model=found.model), progressbar=False)
    for path in caught.value.bundles:
        answer[path.parent.name](path)
    with pytest.raises(fedppl.Waiting) as caught:
        fedppl.fit(found.model, None, fedppl.Sums(), engine=asked._replace(model=found.model), progressbar=False)
    assert {path.name[-8:] for path in caught.value.bundles} == {f"000{3 + masked}{ASKED}"}  # all are enrolled


# Bundles --------------------------------------------------------------------------------------------------------------


def first_bundle(base: Path, name: str = "north") -> Path:
    return next(path for path in waiting(base, fedppl.Sums()) if path.parent.name == name)


def test_a_bundle_is_answered_once_and_always_alike(base: Path) -> None:
    answer, bundle = answerers(base, fedppl.Sums())["north"], first_bundle(base)
    reply = answer(bundle)
    before, lines = reply.read_bytes(), log(base, "north")
    reply.unlink()
    assert answer(bundle).read_bytes() == before
    assert log(base, "north") == lines


def test_a_server_that_lost_its_file_may_write_the_last_bundle_anew(base: Path) -> None:
    """Of a backup: the node answers as before, and counts nothing."""
    answer = answerers(base, fedppl.Sums())
    for path in waiting(base, fedppl.Sums()):
        answer[path.parent.name](path)
    (base / "run" / "run.sqlite").rename(base / "backup")
    (base / "run" / "run.sqlite").write_bytes((base / "backup").read_bytes())
    bundle = next(path for path in waiting(base, fedppl.Sums()) if path.parent.name == "north")
    answer["north"](bundle)
    (base / "run" / "run.sqlite").write_bytes((base / "backup").read_bytes())
    (anew,) = (path for path in waiting(base, fedppl.Sums()) if path == bundle)
    assert files.unpacked(anew.read_bytes())[0] == files.unpacked(bundle.read_bytes())[0]
    looked = iter([False, True])
    files.watch(bundle.parent, answer["north"], 0.01, lambda: next(looked))
    assert bundle not in waiting(base, fedppl.Sums())
    assert log(base, "north")[-1]["repeated"]


def test_what_a_carrier_puts_there_ends_no_service(base: Path) -> None:
    answer = answerers(base, fedppl.Sums())
    bundle = next(path for path in waiting(base, fedppl.Sums()) if path.parent.name == "north")
    (bundle.parent / "loop.ask").symlink_to(bundle.parent / "loop.ask")
    bundle.with_name("other.answer").mkdir()
    bundle.with_name("other.ask").write_bytes(bundle.read_bytes())
    looked = iter([False, False, True])
    files.watch(bundle.parent, answer["north"], 0.01, lambda: next(looked))
    assert bundle.with_suffix(".answer").is_file()


def test_nothing_is_read_by_who_carries_a_bundle(base: Path) -> None:
    to_end(base, fedppl.Sums())
    for path in (base / "run" / "sites").rglob("*.*"):
        raw = path.read_bytes()
        header, head, rest = files.unpacked(raw)
        assert {header.sender, header.recipient} == {"server", path.parent.name}
        assert b"NUMPY" not in raw and b"query.fedppl" not in raw and b"train.fedppl" not in raw
        other = secure.read_keys(base / next(name for name in NAMES if name != path.parent.name)).identity
        sender = secure.read_keys(base / header.sender).roster[header.sender]
        with pytest.raises(DeclarationError, match="not encrypted for"):
            secure.disclosed(head, rest, sender, other)


@pytest.mark.parametrize("at", [0, 20, 40, 60, 200, -70, -1])
@pytest.mark.parametrize("cut", [False, True])
def test_a_bundle_that_was_cut_or_changed_is_refused(base: Path, at: int, cut: bool) -> None:
    answer, bundle = answerers(base, fedppl.Sums())["north"], first_bundle(base)
    raw = bytearray(bundle.read_bytes())
    raw[at] ^= 1
    bundle.write_bytes(bytes(raw[:at]) if cut else bytes(raw))
    with pytest.raises(DeclarationError, match="cannot be used"):
        answer(bundle)
    assert not bundle.with_suffix(ANSWERED).exists() and not log(base, "north")


def test_a_bundle_of_another_site_server_or_way_is_refused(base: Path, tmp_path: Path) -> None:
    answer, bundle = answerers(base, fedppl.Sums()), first_bundle(base)
    with pytest.raises(DeclarationError, match="recipient is 'north'"):
        answer["south"](bundle)
    with pytest.raises(DeclarationError, match="way"):
        reply = answer["north"](bundle)
        stranger = bundle.with_name(f"x{ASKED}")
        header, _, _ = files.unpacked(reply.read_bytes())
        back = header._replace(sender="server", recipient="north")
        north = secure.read_keys(base / "north")
        stranger.write_bytes(
            files.packed(back, b"", secure.read_keys(base / "server").identity, north.sealing["north"])
        )
        answer["north"](stranger)
    site.make(tmp_path / "another", "server")
    forged = bundle.with_name(f"y{ASKED}")
    header, _, _ = files.unpacked(bundle.read_bytes())
    forged.write_bytes(
        files.packed(header, b"", secure.read_keys(tmp_path / "another").identity, north.sealing["north"])
    )
    with pytest.raises(DeclarationError, match="signature"):
        answer["north"](forged)


def test_an_older_bundle_is_refused(base: Path) -> None:
    answer = answerers(base, fedppl.Sums())["north"]
    others = answerers(base, fedppl.Sums())
    first = waiting(base, fedppl.Sums())
    for path in first:
        others[path.parent.name](path)
    answer(next(path for path in waiting(base, fedppl.Sums()) if path.parent.name == "north"))
    with pytest.raises(DeclarationError, match="number is 1"):
        answer(next(path for path in first if path.parent.name == "north"))


def test_an_answer_that_cannot_be_used_is_named_and_waited_for(base: Path) -> None:
    answer = answerers(base, fedppl.Sums())
    first = waiting(base, fedppl.Sums())
    for path in first:
        answer[path.parent.name](path)
    north, south = (next(path for path in first if path.parent.name == name) for name in ("north", "south"))
    good = north.with_suffix(ANSWERED).read_bytes()
    for bad, why in (
        (south.with_suffix(ANSWERED).read_bytes(), "sender is 'south'"),
        (good[:-1], "shorter"),
        (good[:-1] + bytes([good[-1] ^ 1]), "signature"),
        (north.read_bytes(), "sender is 'server'"),
        (b"", "no bundle"),
    ):
        north.with_suffix(ANSWERED).write_bytes(bad)
        with pytest.raises(fedppl.Waiting, match=why) as caught:
            call(base, fedppl.Sums())
        assert caught.value.bundles == (north,) and list(caught.value.refused) == [north.with_suffix(ANSWERED)]
    north.with_suffix(ANSWERED).write_bytes(good)
    assert len(waiting(base, fedppl.Sums())) == 3


def test_a_message_that_is_none_is_refused_by_the_sites_log(base: Path) -> None:
    """Of the server itself, with its own key: bounds come before anything is made."""
    bundle, north = first_bundle(base), secure.read_keys(base / "north")
    first = bundle.read_bytes()
    header, _, _ = files.unpacked(first)
    for body, remedy in (
        (b"", "Error|type"),
        (files._joined([b"train.unknown", b"", b""]), "no type of message"),
        (b"\xff" * 40, "shorter"),
    ):
        own = secure.read_keys(base / "server").identity
        bundle.write_bytes(files.packed(header, body, own, north.sealing["north"]))
        with pytest.raises(DeclarationError, match=remedy):
            answerers(base, fedppl.Sums())["north"](bundle)
    texts, arrays = files._joined([b"round", b"9"]), files._joined([b"mean", b"\x93NUMPY and more"])
    body = files._joined([b"train.fedppl", texts, arrays])
    asked = files.packed(header, body, secure.read_keys(base / "server").identity, north.sealing["north"])
    bundle.write_bytes(asked)
    with pytest.raises(DeclarationError, match="an identity of its own"):  # nothing of this run was answered here
        answerers(base, fedppl.Sums())["north"](bundle)
    for raw in (first, asked):
        bundle.write_bytes(raw)
        answerers(base, fedppl.Sums())["north"](bundle)
    line = log(base, "north")[-1]
    assert line["event"] == "request" and line["refused"].startswith("malformed")


# Keys -----------------------------------------------------------------------------------------------------------------


def test_who_is_unknown_is_named_with_what_to_do(base: Path, tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="roster"):
        call(base, fedppl.Sums(), engine=engine(base)._replace(clients=[*NAMES, "east"]))
    with pytest.raises(DeclarationError, match="ids"):
        call(base, fedppl.Sums(), engine=engine(base)._replace(clients=3))
    with pytest.raises(DeclarationError, match="wait"):
        call(base, fedppl.Sums(), engine=engine(base, wait=-1.0))
    east = site.make(tmp_path / "east", "east")
    site.add(
        base / "server", " ".join(["east", secure.line_of("", secure.read_keys(tmp_path / "east").roster["east"])])
    )
    with pytest.raises(DeclarationError, match="print it again"):
        call(base, fedppl.Sums(), engine=engine(base)._replace(clients=[*NAMES, "east"]))
    with pytest.raises(DeclarationError, match="duplicate"):  # a server could join a cohort
        site.add(base / "north", site.make(tmp_path / "x", "server"))
    with pytest.raises(DeclarationError, match="duplicate"):
        secure.set_server(base / "north", (base / "north" / "roster").read_text().splitlines()[0])
    with pytest.raises(DeclarationError, match="copy the whole line"):
        secure.set_server(base / "north", east[:-6] + "AAAA==")
    bundle = first_bundle(base)
    (base / "north" / "server").unlink()
    with pytest.raises(DeclarationError, match=r"fedppl\.site server"):
        answerers(base, fedppl.Sums())["north"](bundle)


# Folders that are watched, and sites by different transports ----------------------------------------------------------


def test_a_watched_folder_runs_by_itself(base: Path) -> None:
    answer, over = answerers(base, fedppl.Sums(), masked=True), threading.Event()
    for name in NAMES:
        (base / "run" / "sites" / name).mkdir(parents=True)

    def watching() -> None:
        while not over.is_set():  # in turn in one thread: sites of one process share PyTensor's settings
            for name in NAMES:
                looked = iter([False, True])
                files.watch(base / "run" / "sites" / name, answer[name], 0.01, lambda looked=looked: next(looked))

    thread = threading.Thread(target=watching, daemon=True)
    thread.start()
    try:
        fit = call(base, fedppl.Sums(), engine=engine(base, masked=True, wait=60.0, poll=0.02))
    finally:
        over.set()
        thread.join()
    model, clients = declared()
    whole = fedppl.InProcess(secure=True, policy=OPEN)
    same(fit, fedppl.fit(model, clients, fedppl.Sums(), engine=whole, progressbar=False, random_seed=1))
    assert fit.told


@pytest.mark.parametrize("masked", [False, True])
def test_one_run_over_flower_by_files_and_by_a_watched_folder(base: Path, masked: bool) -> None:
    pytest.importorskip("flwr")
    from tests.support.fake_grid import FakeGrid, node

    model, clients = declared()
    here, over = declaration(base, fedppl.Sums(), masked), threading.Event()
    answer = answerers(base, fedppl.Sums(), masked)
    grid = FakeGrid({7: node(fedppl.Flower.client_app(**here._asdict()), 7, **{"client-id": "north"})})
    made_up = {"y": np.ones(2)}
    flower = fedppl.Flower.grid(grid, clients=["north"], model=model, example_data=made_up, deadline=60.0, poll=0.02)
    by_files = engine(base, wait=60.0, poll=0.02)._replace(clients=["south", "west"])
    (base / "run" / "sites" / "west").mkdir(parents=True)

    def carrying() -> None:
        while not over.is_set():
            looked = iter([False, True])
            files.watch(base / "run" / "sites" / "west", answer["west"], 0.01, lambda looked=looked: next(looked))
            for path in sorted((base / "run" / "sites").glob(f"south/*{ASKED}")):
                if not path.with_suffix(ANSWERED).exists():  # taken away, answered elsewhere, and brought back
                    there = base / "elsewhere" / path.name
                    there.parent.mkdir(exist_ok=True)
                    there.write_bytes(path.read_bytes())
                    files._put(path.with_suffix(ANSWERED), answer["south"](there).read_bytes())
            time.sleep(0.01)

    thread = threading.Thread(target=carrying, daemon=True)
    thread.start()
    try:
        fit = call(base, fedppl.Sums(), engine=by_files.beside(flower, secure=masked))
    finally:
        over.set()
        thread.join()
    whole = fedppl.InProcess(secure=masked, policy=OPEN)
    same(fit, fedppl.fit(model, clients, fedppl.Sums(), engine=whole, progressbar=False, random_seed=1))
    assert grid.sent and len(list((base / "elsewhere").glob(f"*{ANSWERED}"))) > len(fit.records)
    with pytest.raises(DeclarationError, match="wait=0"):
        by_files._replace(wait=0.0).beside(flower)
    with pytest.raises(DeclarationError, match="must differ"):
        by_files.beside(flower, by_files)


# The site's program ---------------------------------------------------------------------------------------------------

APP = """
import fedppl
from fedppl.testing import normal_means

model, clients = normal_means(3)
app = fedppl.Site(
    model,
    fedppl.Sums(),
    lambda config: clients[config["rows"]],
    folder=lambda config: config["folder"],
    policy=lambda config: config["policy"],
    draws=50,
    chains=2,
)
"""


def test_the_sites_program_answers_a_bundle(base: Path, tmp_path: Path) -> None:
    bundle = first_bundle(base)
    (tmp_path / "clinic.py").write_text(APP, encoding="utf-8")
    (tmp_path / "policy.toml").write_text('sums = "optional"\nrows = 0\nfew_rows = 0\nparameters_per_row = inf\n')
    config = ["rows=client 0", f"folder={base / 'at north'}", f"policy={tmp_path / 'policy.toml'}"]
    command = [sys.executable, "-m", "fedppl.site", "answer", str(bundle), "--identity", str(base / "north")]
    run = functools.partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    done = run([*command, "--app", "clinic:app", "--config", *config])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(bundle.with_suffix(ANSWERED)) and bundle.with_suffix(ANSWERED).exists()
    assert "north" not in {path.parent.name for path in waiting(base, fedppl.Sums())}


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["answer", "x.ask", "--app", "clinic"], "clinics.site:app"),
        (["answer", "x.ask", "--app", "no_such_module_here:app"], "install"),
        (["answer", "x.ask", "--app", "fedppl:Sums"], "fedppl.Site"),
        (["answer", "x.ask", "--app", "clinic:app", "--config", "rows"], "KEY=VALUE"),
        (["server", "no such folder", "x"], "identity first"),
    ],
)
def test_the_sites_program_says_what_to_do(
    arguments: list[str],
    remedy: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "clinic.py").write_text(APP, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert site.main(arguments) == 1
    assert remedy in capsys.readouterr().err
