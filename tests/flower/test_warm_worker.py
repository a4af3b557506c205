"""A site's warm worker: equal replies, one at a time, replaced when what it stands on changes, deaf to strangers."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import xarray as xr
from numpy.testing import assert_array_equal

pytest.importorskip("flwr")

import fedppl
from fedppl.flower import warm, worker
from fedppl.flower.messages import HELLO, from_content
from fedppl.flower.warm import changed, identity
from fedppl.flower.worker import digest, settled
from fedppl.storage import codec
from fedppl.testing import normal_means
from tests.support.fake_grid import FakeGrid, node

pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="the tests read who listens from Linux")

IDENTITY = {"node config": "as it was"}

SITE = """
import fedppl, numpy as np
from fedppl.testing import normal_means
app = fedppl.Flower.client_app(
    normal_means(1)[0], fedppl.EP(), lambda config: np.load(config["data"]), draws=50, chains=1,
    client_id=lambda config: config["who"], folder=lambda config: config["folder"],
    policy=lambda config: config["policy"],
)
"""


class Place:
    """Two sites' files, and an app that is thin."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "warm_site.py").write_text(SITE)
        (root / "policy.toml").write_text("rows = 5\nrequests = 1000\n")
        self.data = {name.replace(" ", ""): one["y"] for name, one in normal_means(2)[1].items()}
        for name, y in self.data.items():
            np.savez(root / f"{name}.npz", y=y)  # a mapping that reads late, and cannot be pickled

    def config(self, name: str, folder: str) -> dict[str, Any]:
        (self.root / folder).mkdir(exist_ok=True)
        paths = {"data": self.root / f"{name}.npz", "folder": self.root / folder / name}
        return {"who": name, "policy": str(self.root / "policy.toml"), **{k: str(v) for k, v in paths.items()}}

    def grid(self, folder: str, idle: float) -> FakeGrid:
        app = fedppl.Flower.warm_app("warm_site:app", folder=lambda config: config["folder"], idle=idle)
        return FakeGrid({10 + k: node(app, 10 + k, **self.config(name, folder)) for k, name in enumerate(self.data)})

    def fit(self, folder: str, idle: float = 60.0) -> tuple[Any, FakeGrid]:
        grid = self.grid(folder, idle)
        engine = fedppl.Flower.grid(grid, clients=2, deadline=60.0, wait=30.0, poll=0.001)
        model = normal_means(1)[0]
        return fedppl.fit(model, None, fedppl.EP(), engine=engine, progressbar=False, random_seed=1), grid

    def started(
        self, idle: float = 60.0, folder: str = "one", app: str = "warm_site:app"
    ) -> tuple[socket.socket, int, Path]:
        """A worker of the first site, a connection to it, and its process id."""
        site = self.root / folder
        site.mkdir(exist_ok=True)
        told = {"app": app, "folder": str(site), "idle": idle, "path": sys.path, "identity": IDENTITY}
        descriptor = warm.opened(site)
        connection = warm._started(descriptor, site, told)
        os.close(descriptor)
        return connection, warm.peer(connection), site


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Place(tmp_path)
    for key in tmp_path.rglob("worker/key"):
        key.unlink()  # ends what is left
    for process in warm._workers:
        process.wait(30)
    warm._workers.clear()
    sys.modules.pop("warm_site", None)


def _lives(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def _ends(pid: int, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while _lives(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not _lives(pid)


def test_the_apps_process_imports_nothing_heavy() -> None:
    code = (
        "import sys, fedppl; fedppl.Flower.warm_app('a.b:app', folder='x'); "
        "print([m for m in ('pymc', 'pytensor', 'arviz', 'torch', 'numba', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_replies_are_those_of_the_old_path(place: Place) -> None:
    warmed, grid = place.fit("warm")
    cold, old = place.fit("cold", idle=0.0)
    assert len(warm._workers) == 2 and not list((place.root / "cold").rglob("worker"))
    assert len(grid.replies) == len(old.replies) > 4
    assert_array_equal(warmed.posterior.linear, cold.posterior.linear)
    assert_array_equal(warmed.posterior.precision, cold.posterior.precision)
    contents = [[from_content(each.content) for each in replies] for replies in (grid.replies, old.replies)]
    for mine, theirs in zip(*(sorted(one, key=lambda c: c[1]["client_id"]) for one in contents), strict=True):
        assert {**mine[1], "nonce": ""} == {**theirs[1], "nonce": ""}  # of the server, by chance
        for name, value in theirs[0].items():
            assert_array_equal(mine[0][name], value)
    for process in warm._workers:
        process.wait(30)  # the run is concluded
    for name in place.data:
        lines = [len((place.root / f / name / "audit.jsonl").read_text().splitlines()) for f in ("warm", "cold")]
        assert lines[0] == lines[1] > 3
        assert (place.root / "warm" / name / f"{name}.nc").exists()


def test_a_wrong_key_and_garbage_are_refused_and_the_worker_lives(place: Place) -> None:
    connection, pid, site = place.started()
    connection.close()
    folder = warm.opened(site)
    for garbage in (b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n" * 20, b""):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(warm.address(folder, site))
            stranger.sendall(garbage)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(10)
        stranger.connect(warm.address(folder, site))
        with pytest.raises(warm.Refused, match="does not know the key"):
            warm.prove(stranger, bytes(32), first=True, limit=10)
    with socket.socket(socket.AF_UNIX) as stranger:  # one that does not look at the worker's proof
        stranger.settimeout(10)
        stranger.connect(warm.address(folder, site))
        stranger.sendall(bytes(32))
        stranger.recv(64, socket.MSG_WAITALL)
        stranger.sendall(bytes(32))
        assert stranger.recv(1) == b""
    known = warm.connect(folder, site)
    assert known is not None and warm.peer(known) == pid and _lives(pid)
    warm.send(known, b"no state at all")
    with known, pytest.raises(ConnectionError):
        warm.receive(known)
    assert _lives(pid)
    assert [os.stat(site / "worker" / name).st_mode & 0o777 for name in ("", "key", "socket")] == [0o700, 0o600, 0o600]
    os.close(folder)


def test_it_ends_when_idle_and_when_its_key_is_gone(place: Place) -> None:
    connection, pid, site = place.started()
    connection.close()
    (site / "worker" / "key").unlink()
    assert _ends(pid)
    warm._workers[0].wait(30)  # a process whose threads are still ending can be dead and not be told so
    connection, pid, _ = place.started(idle=1.0)
    connection.close()
    assert [process.pid for process in warm._workers] == [pid]  # those that have ended are forgotten
    assert _ends(pid)


def test_two_apps_at_once_start_one_worker_and_a_killed_one_is_replaced(place: Place) -> None:
    found: list[int] = []

    def start() -> None:
        connection, pid, _ = place.started()
        connection.close()
        found.append(pid)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and len(set(found)) == 1
    os.kill(found[0], signal.SIGKILL)
    assert _ends(found[0])
    start()
    assert found[2] != found[0] and _lives(found[2])


def test_a_folder_that_is_open_to_others_or_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "worker").mkdir()
    (tmp_path / "worker").chmod(0o755)
    with pytest.raises(OSError, match="open to others"):
        warm.opened(tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "worker").symlink_to(tmp_path / "worker")
    with pytest.raises(OSError):
        warm.opened(tmp_path / "site")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["data", "declaration"])
def test_a_worker_is_replaced_when_what_it_stands_on_changes(
    place: Place, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = place.config("client0", "one")
    app = fedppl.Flower.warm_app("warm_site:app", folder=config["folder"], idle=60.0)
    (message,) = (m for m in _hello(place, app, config))
    first = _listener(Path(config["folder"]))
    app(message, node(app, 1, **config).context)
    assert _listener(Path(config["folder"])) == first
    if what == "data":
        np.savez(config["data"], y=place.data["client0"] + 1.0)
    else:
        (place.root / "warm_site.py").write_text(SITE + "\n# another\n")
    app(message, node(app, 1, **config).context)
    assert _listener(Path(config["folder"])) not in (first, 0)
    assert f"replaced: {'the data' if what == 'data' else place.root / 'warm_site.py'}" in caplog.text


@pytest.mark.slow
def test_another_policy_holds_at_once_and_the_worker_goes_on(place: Place) -> None:
    own = place.root / "rules" / "own.toml"  # not among the app's sources
    own.parent.mkdir()
    own.write_text("rows = 5\n")
    config = {**place.config("client0", "one"), "policy": str(own)}
    app = fedppl.Flower.warm_app("warm_site:app", folder=config["folder"], idle=60.0)
    (message,) = (m for m in _hello(place, app, config))
    first = _listener(Path(config["folder"]))
    assert "error" not in from_content(app(message, node(app, 1, **config).context).content)[1]
    own.write_text("rows = 1000\n")
    assert "policy of its site" in from_content(app(message, node(app, 1, **config).context).content)[1]["error"]
    assert _listener(Path(config["folder"])) == first


@pytest.mark.parametrize(
    "data",
    [
        lambda k: {"y": np.array([1.0, k])},
        lambda k: {"y": np.ma.array([1, 2, 3], mask=[False, False, k == 2])},
        lambda k: {"group": ["a", None, str(k)]},
        lambda k: (np.arange(3) + k, [1, 2]),
        lambda k: {"y": np.zeros((k, 0))},
        lambda k: pd.DataFrame({"y": [1.0, 2.0], "group": ["a", str(k)]}),
        lambda k: pl.DataFrame({"y": [1.0, k]}),
        lambda k: xr.Dataset({"y": ("time", [1.0, 2.0])}, coords={"time": [0, k]}),
    ],
)
def test_a_digest_is_of_the_datas_values(data: Callable[[int], Any]) -> None:
    assert digest(data(1)) == digest(data(1)) != digest(data(2))


def test_data_whose_values_are_not_seen_have_no_digest(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="collect it in load_data"):
        digest(pl.LazyFrame({"y": [1.0]}))
    with pytest.raises(TypeError, match=r"the data\['y'\] hold object"):
        digest({"y": object()})
    np.savez(tmp_path / "y.npz", y=[1.0, 2.0])
    looked_at = settled(np.load(tmp_path / "y.npz"))
    np.savez(tmp_path / "y.npz", y=[3.0, 4.0])
    assert_array_equal(looked_at["y"], [1.0, 2.0])


def test_data_that_could_not_be_loaded_are_not_loaded_a_second_time() -> None:
    calls: list[int] = []

    def load(config: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("the disk is away")
        return {"y": np.ones(2)}

    again, mark = worker._loaded(types.SimpleNamespace(load_data=load), {})
    with pytest.raises(OSError, match="the disk is away"):
        again({})
    assert mark != worker._loaded(types.SimpleNamespace(load_data=load), {})[1]


def test_a_request_whose_asker_has_gone_is_neither_computed_nor_counted(place: Place) -> None:
    config = place.config("client0", ".")
    connection, pid, site = place.started(folder=config["folder"])
    request = {"identity": IDENTITY, "config": config, "kind": HELLO, "arrays": {}, "texts": {}}
    warm.send(connection, codec.encode(request))
    connection.close()  # while the worker imports
    folder = warm.opened(site)
    second = warm.connect(folder, site)
    os.close(folder)
    assert second is not None
    with second:
        assert (
            warm._heard(second, codec.encode({**request, "identity": {}}), time.monotonic() + 60)["status"] == "stale"
        )
    assert _ends(pid) and not (site / "audit.jsonl").exists()
    # The worker sees that the asker has gone before it computes, or already where it answers the greeting.
    log = (site / "worker" / "log").read_text()
    assert "fedppl_hello) is closed" in log or "given up: BrokenPipeError" in log


def test_a_worker_that_ends_sends_all_answers_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long who asked takes to read: more than the half second that it once had."""
    here, there = socket.socketpair()
    answer = bytes(2**24)  # more than a socket holds
    monkeypatch.setattr(worker, "_do", lambda *arguments: (answer, False))
    monkeypatch.setattr(warm, "is_there", lambda *arguments: True)
    monkeypatch.setattr(warm, "remove", lambda *arguments: None)
    desk = worker._Desk(queue.Queue(), [])
    free = threading.BoundedSemaphore(1)
    free.acquire()
    key = bytes(32)
    threading.Thread(target=worker._talk, args=(there, key, desk, free), daemon=True).start()
    warm.prove(here, key, first=True, limit=10)
    warm.send(here, codec.encode({}))
    told = {"app": "not_there:app", "idle": 60.0}
    serving = threading.Thread(target=worker._serve, args=(told, tmp_path, 0, key, desk), daemon=True)
    serving.start()
    serving.join(1.0)
    assert serving.is_alive()
    with here:
        assert warm.receive(here) == answer
    serving.join(30.0)
    assert not serving.is_alive()


def test_a_worker_that_does_not_start_says_why(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_CODE", "raise SystemExit('no such interpreter')")
    with pytest.raises(warm._NoWorker, match=r"exit code 1 before it listened; its log, .*: no such interpreter"):
        place.started()


@pytest.mark.parametrize(
    "code, why", [("import not_there", "No module named 'not_there'"), ("app = 1", "client_app ret")]
)
def test_an_app_that_cannot_be_loaded_is_told(place: Place, code: str, why: str) -> None:
    (place.root / "broken_site.py").write_text(code)
    connection, pid, _ = place.started(app="broken_site:app")
    request = {"identity": IDENTITY, "config": {}, "kind": HELLO, "arrays": {}, "texts": {}}
    with connection:
        found = warm._heard(connection, codec.encode(request), time.monotonic() + 60)
    assert found["status"] == "failed" and why in found["log"]
    assert _ends(pid)  # the next message has another try


PLAIN = """
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()
@app.query("fedppl_hello")
def reply(message, context):
    return Message(RecordDict({"plain": ConfigRecord({"here": "in Flower's process"})}), reply_to=message)
"""


@pytest.mark.parametrize("what", ["config", "failed"])
def test_what_no_worker_answers_is_answered_in_flowers_process(
    place: Place, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    (place.root / "plain_site.py").write_text(PLAIN)
    app = fedppl.Flower.warm_app("plain_site:app", folder=place.root / "one", idle=60.0)
    (message,) = (m for m in _hello(place, fedppl.Flower.warm_app("plain_site:app", folder="-", idle=0.0), {}))
    if what == "failed":
        found = {"status": "failed", "log": "ValueError: of the worker"}
        monkeypatch.setattr(warm, "_started", lambda *arguments: socket.socket())
        monkeypatch.setattr(warm, "_heard", lambda *arguments: found)
    reply = app(message, node(app, 1, odd=object() if what == "config" else 1).context)
    assert "plain" in reply.content
    assert ("of type builtins.object" if what == "config" else "what it logged stands above") in caplog.text
    assert ("of the worker" in capsys.readouterr().err) == (what == "failed")


def test_the_identity_is_of_sources_and_not_of_what_the_site_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "spacious" / "work").mkdir(parents=True)  # a namespace: no __init__.py
    (tmp_path / "spacious" / "site.py").write_text("")
    ledger = tmp_path / "spacious" / "work" / "ledger.json"
    told = {"app": "spacious.site:app", "folder": str(ledger.parent), "idle": 1.0, "path": []}
    first = identity(told, {"a": 1})
    ledger.write_text("{}")
    assert identity(told, {"a": 1}) == first
    (tmp_path / "spacious" / "more.toml").write_text("")
    assert changed(first, identity(told, {"a": 2})) == f"{tmp_path}/spacious/more.toml, node config changed"
    told["folder"] = str(tmp_path)  # a site that holds its sources
    first = identity(told, {})
    (tmp_path / "ledger.json").write_text("{}")
    assert identity(told, {}) == first
    (tmp_path / "spacious" / "site.py").write_text("a = 1")
    assert changed(first, identity(told, {})) == f"{tmp_path}/spacious/site.py changed"
    with pytest.raises(fedppl.DeclarationError, match="'not_there' is found"):
        identity({**told, "app": "not_there:app"}, {})


def test_only_what_was_killed_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "peer", lambda connection: 0)  # as on macOS
    here, there = socket.socketpair()
    here.settimeout(0.1)
    with here, there, pytest.raises(warm._NoWorker, match="no sign of life for 60 s$"):
        warm._heard(here, b"", time.monotonic() + 60)


@pytest.mark.parametrize("gone", [True, False])
def test_a_message_that_waits_behind_one_whose_asker_has_gone_ends_the_worker(
    gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(warm, "_kill", lambda connection: killed.append(connection) or True)
    monkeypatch.setattr(warm, "_BEHIND", 0.2)
    monkeypatch.setattr(worker, "_TICK", 0.05)
    first, asker = socket.socketpair()
    if gone:
        asker.close()
    desk = worker._Desk(queue.Queue(), [worker._Job({}, first)])  # and it is never done
    here, there = socket.socketpair()
    free = threading.BoundedSemaphore(1)
    free.acquire()
    talking = threading.Thread(target=worker._talk, args=(there, bytes(32), desk, free), daemon=True)
    talking.start()
    warm.prove(here, bytes(32), first=True, limit=10)
    with here, pytest.raises(RuntimeError, match="earlier one.*was killed" if gone else "it goes on computing"):
        warm._heard(here, codec.encode({}), time.monotonic() + 0.5)
    assert killed == [here] * gone
    talking.join(10.0)
    first.close()
    asker.close()


def test_proofs_have_a_limit_in_all(tmp_path: Path) -> None:
    here, there = socket.socketpair()

    def trickle() -> None:
        try:
            while True:
                there.send(b"\0")
                time.sleep(0.05)
        except OSError:
            pass

    threading.Thread(target=trickle, daemon=True).start()
    start = time.monotonic()
    with here, pytest.raises(OSError):
        warm.prove(here, bytes(32), first=False, limit=0.3)
    assert time.monotonic() - start < 1.5
    there.close()


def _hello(place: Place, app: Any, config: dict[str, Any]) -> Iterator[Any]:
    """The first message of a run to one site."""
    grid = FakeGrid({1: node(app, 1, **config)})
    with pytest.raises(fedppl.DeclarationError):
        engine = fedppl.Flower.grid(grid, clients=2, wait=0.01, poll=0.001)
        fedppl.fit(normal_means(1)[0], None, fedppl.EP(), engine=engine, progressbar=False)
    yield grid.sent[0]


def _listener(site: Path) -> int:
    folder = warm.opened(site)
    connection = warm.connect(folder, site)
    os.close(folder)
    if connection is None:
        return 0
    with connection:
        return warm.peer(connection)
