"""A site's warm worker: equal replies, one at a time, replaced when what it stands on changes, deaf to strangers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.context import AuthenticationError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

pytest.importorskip("flwr")

import fedppl
from fedppl.flower import node as sites
from fedppl.flower import warm, worker
from fedppl.flower.messages import HELLO, from_content
from fedppl.storage import codec
from fedppl.testing import normal_means
from tests.support.fake_grid import FakeGrid, engine_of, node

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="a worker needs Unix sockets")

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
        model = normal_means(1)[0]
        engine = engine_of(grid, model, 2, deadline=60.0, wait=30.0)
        return fedppl.fit(model, None, fedppl.EP(), engine=engine, progressbar=False, random_seed=1), grid

    def started(
        self, idle: float = 60.0, folder: str = "one", app: str = "warm_site:app"
    ) -> tuple[Connection, worker.Door, Path]:
        """A worker of the first site, a connection to it, and its folder."""
        folders = worker.opened(self.root / folder)
        site = str(folders.parent)
        told = {"app": app, "folder": site, "idle": idle, "path": sys.path, "digest": "as it was"}
        return *warm.start(folders, told), folders


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


@pytest.mark.parametrize(
    "code", ["fedppl.Flower.warm_app('a.b:app', folder='x')", "import fedppl.flower.worker; sys.modules.pop('flwr', 0)"]
)
def test_neither_the_apps_process_nor_a_worker_that_begins_to_listen_imports_what_is_heavy(code: str) -> None:
    heavy = ("pymc", "pytensor", "arviz", "torch", "numba", "pandas") + ("flwr.app",) * ("worker" in code)
    code = f"import sys, fedppl; {code}; print([m for m in {heavy} if m in sys.modules])"
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
    connection, door, folder = place.started()
    connection.close()
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 20, b""):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(door.address)
            stranger.sendall(garbage)
    with Client(door.address) as connection, pytest.raises(AuthenticationError):
        warm.greet(connection, door._replace(key="00" * 32))
    with Client(door.address) as connection:
        warm.greet(connection, door)
        connection.send_bytes(b"no state at all")
        with pytest.raises(EOFError):
            connection.recv_bytes()
    assert _lives(door.pid)
    modes = [path.stat().st_mode & 0o777 for path in (folder, folder / "key", Path(door.address).parent)]
    assert modes == [0o700, 0o600, 0o700]


def test_it_ends_when_idle_and_when_its_key_is_gone(place: Place) -> None:
    connection, door, folder = place.started()
    connection.close()
    (folder / "key").unlink()
    assert _ends(door.pid)
    warm._workers[0].wait(30)  # a process whose threads are still ending can be dead and not be told so
    connection, door, _ = place.started(idle=1.0)
    connection.close()
    assert [process.pid for process in warm._workers] == [door.pid]  # those that have ended are forgotten
    assert _ends(door.pid)
    assert not (folder / "key").exists() and not Path(door.address).parent.exists()


def test_two_apps_at_once_start_one_worker_and_a_killed_one_is_replaced(place: Place) -> None:
    found: list[int] = []

    def start() -> None:
        connection, door, _ = place.started()
        connection.close()
        found.append(door.pid)

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
    with pytest.raises(OSError, match="delete it"):
        worker.opened(tmp_path)
    (tmp_path / "worker").chmod(0o700)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "worker").symlink_to(tmp_path / "worker")
    with pytest.raises(OSError, match="delete it"):
        worker.opened(tmp_path / "site")


@pytest.mark.slow
def test_it_reads_changed_data_and_is_replaced_where_the_app_changes(place: Place) -> None:
    config = place.config("client0", "one")
    app = fedppl.Flower.warm_app("warm_site:app", folder=config["folder"], idle=60.0)
    (message,) = (m for m in _hello(place, app, config))
    first = _listener(config)
    replies = [from_content(app(message, node(app, 1, **config).context).content)]
    np.savez(config["data"], y=place.data["client0"][:4])
    replies.append(from_content(app(message, node(app, 1, **config).context).content))
    assert "error" not in replies[0][1] and "policy of its site" in replies[1][1]["error"]  # it wants five rows
    assert _listener(config) == first
    (place.root / "warm_site.py").write_text(SITE + "\n# another\n")
    app(message, node(app, 1, **config).context)
    assert _listener(config) not in (first, 0) and _ends(first)


@pytest.mark.slow
def test_another_policy_holds_at_once_and_the_worker_goes_on(place: Place) -> None:
    own = place.root / "rules" / "own.toml"  # not among the app's sources
    own.parent.mkdir()
    own.write_text("rows = 5\n")
    config = {**place.config("client0", "one"), "policy": str(own)}
    app = fedppl.Flower.warm_app("warm_site:app", folder=config["folder"], idle=60.0)
    (message,) = (m for m in _hello(place, app, config))
    first = _listener(config)
    assert "error" not in from_content(app(message, node(app, 1, **config).context).content)[1]
    own.write_text("rows = 1000\n")
    assert "policy of its site" in from_content(app(message, node(app, 1, **config).context).content)[1]["error"]
    assert _listener(config) == first


def test_data_are_enrolled_anew_where_they_have_changed(tmp_path: Path) -> None:
    model, _ = normal_means(1)
    data: dict[str, Any] = {"y": np.arange(6.0)}
    here = sites.Node(
        "t", model, fedppl.EP(), lambda config: data, lambda config: "a", None, 10, 1, fedppl.policy.NO_RULES
    )
    first = sites.enrolled(here, {})
    assert sites.enrolled(here, {}) is first
    data["y"][0] = 9.0  # in place
    second = sites.enrolled(here, {})
    assert second is not first and second.arrays["y"][0] == 9.0 and second.kernel is first.kernel
    masked = {"y": np.ma.array([1.0, 2.0], mask=[False, True])}
    assert sites._seal(masked) != sites._seal({"y": masked["y"].data})
    objects = {"y": np.array([1.0, None])}
    assert sites._seal(objects) != sites._seal(objects)


def test_a_request_whose_asker_has_gone_is_neither_computed_nor_counted(place: Place) -> None:
    config = place.config("client0", ".")
    connection, door, folder = place.started(folder=config["folder"])
    request = codec.encode({"config": config, "kind": HELLO, "arrays": {}, "texts": {}})
    warm.greet(connection, door)
    connection.send_bytes(request)
    connection.close()
    with Client(door.address) as second:
        warm.greet(second, door)  # it is at the next
        second.send_bytes(b"")
        with pytest.raises(EOFError):
            second.recv_bytes()
    if not (folder.parent / "audit.jsonl").exists():  # it was faster than the closing
        assert "fedppl_hello) is closed" in (folder / "log").read_text()


def test_a_worker_that_does_not_start_says_why(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_CODE", "raise SystemExit('no such interpreter')")
    with pytest.raises(warm._NoWorker, match=r"exit code 1; its log, .*: no such interpreter"):
        place.started()


PLAIN = """
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()
@app.query("fedppl_hello")
def reply(message, context):
    return Message(RecordDict({"plain": ConfigRecord({"here": "in Flower's process"})}), reply_to=message)
"""


@pytest.mark.parametrize("what", ["config", "no app of ours"])
def test_what_no_worker_answers_is_answered_in_flowers_process(
    place: Place, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    (place.root / "plain_site.py").write_text(PLAIN)
    app = fedppl.Flower.warm_app("plain_site:app", folder=place.root / "one", idle=60.0)
    (message,) = (m for m in _hello(place, fedppl.Flower.warm_app("plain_site:app", folder="-", idle=0.0), {}))
    reply = app(message, node(app, 1, odd=object() if what == "config" else 1).context)
    assert "plain" in reply.content
    assert ("of type builtins.object" if what == "config" else "client_app returned") in caplog.text


def test_the_digest_is_of_sources_and_not_of_what_the_site_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "spacious" / "work").mkdir(parents=True)  # a namespace: no __init__.py
    (tmp_path / "spacious" / "site.py").write_text("")
    told = {"app": "spacious.site:app", "folder": str(tmp_path), "idle": 1.0, "path": []}
    digests = [warm.digest(told)]
    (tmp_path / "spacious" / "work" / "ledger.json").write_text("{}")
    assert warm.digest(told) == digests[0]
    digests.append(warm.digest({**told, "idle": 2.0}))
    (tmp_path / "spacious" / "more.toml").write_text("")
    digests.append(warm.digest(told))
    (tmp_path / "spacious" / "site.py").write_text("a = 1")
    digests.append(warm.digest(told))
    assert len({*digests}) == 4
    with pytest.raises(fedppl.DeclarationError, match="'not_there'"):
        warm.digest({**told, "app": "not_there:app"})


@pytest.mark.parametrize("at_an_earlier_one", [True, False])
def test_a_message_that_expires_behind_an_earlier_one_ends_the_worker(
    place: Place, at_an_earlier_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(warm.os, "kill", lambda pid, sign: killed.append(pid))
    monkeypatch.setattr(warm, "_LEAST", 0.5)
    with Listener(str(place.root / "s"), "AF_UNIX") as listener:
        door = worker.Door(str(place.root / "s"), "00", 123456, "")

        def greeted() -> None:
            connection = listener.accept()
            connection.send_bytes(b"")
            warm.answer_challenge(connection, b"\0")
            warm.deliver_challenge(connection, b"\0")
            time.sleep(2.0)

        if not at_an_earlier_one:
            threading.Thread(target=greeted, daemon=True).start()
        monkeypatch.setattr(warm, "reach", lambda *arguments: (Client(door.address), door))
        config = place.config("client0", "one")
        app = fedppl.Flower.warm_app("warm_site:app", folder=config["folder"], idle=60.0)
        with pytest.raises(RuntimeError, match="was killed" if at_an_earlier_one else "raise deadline="):
            (message,) = (m for m in _hello(place, fedppl.Flower.warm_app("a:b", folder="-", idle=0.0), {}))
            message.metadata.ttl = 0.1
            app(message, node(app, 1, **config).context)
    assert killed == [door.pid] * at_an_earlier_one


def _hello(place: Place, app: Any, config: dict[str, Any]) -> Iterator[Any]:
    """The first message of a run to one site."""
    grid = FakeGrid({1: node(app, 1, **config)})
    with pytest.raises(fedppl.DeclarationError):
        model = normal_means(1)[0]
        fedppl.fit(model, None, fedppl.EP(), engine=engine_of(grid, model, 2, wait=0.01), progressbar=False)
    yield grid.sent[0]


def _listener(config: dict[str, Any]) -> int:
    door = worker.read_door(Path(config["folder"]) / "worker")
    return 0 if door is None else door.pid
