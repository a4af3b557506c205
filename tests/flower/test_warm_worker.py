"""A site's warm worker: equal replies, one at a time, replaced when what it stands on changes, deaf to strangers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from multiprocessing.context import AuthenticationError
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_array_equal

pytest.importorskip("flwr")

import fedppl
from fedppl.flower import warm
from fedppl.flower.messages import unread
from fedppl.sites import HELLO, parcel_of
from fedppl.sites import node as sites
from fedppl.storage import codec
from fedppl.testing import normal_means
from tests.support import stored
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
        (root / "policy.toml").write_text('sums = "optional"\nrows = 5\nrequests = 1000\n')
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
        self, idle: float = 60.0, folder: str = "one", app: str = "warm_site:app", mark: str = "as it was"
    ) -> tuple[Connection, warm.Door, Path]:
        """A worker of the first site, a connection to it, and its folder."""
        folders = warm.opened(self.root / folder)
        return *warm.start(folders, app, idle, mark), folders

    def waiting(self, name: str) -> dict[str, Any]:
        """Config of a site that waits for a file of it, and whose policy wants more rows than it has."""
        (self.root / "waiting_site.py").write_text(WAITING)
        config = self.config("client0", ".")
        np.savez(config["data"], y=np.ones(4))  # the policy wants five rows, and a refusal is counted
        Path(config[name]).rename(self.root / f"{name}.later")
        self.config_of = config
        return config

    def released(self, name: str) -> None:
        """Let the site go on."""
        (self.root / f"{name}.later").rename(self.config_of[name])


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
    heavy = ("pymc", "pytensor", "arviz", "torch", "numba", "pandas", "scipy")
    code = "import sys, fedppl; fedppl.Flower.warm_app('a.b:app', folder='x')"
    code += f"; print([m for m in {heavy} if m in sys.modules])"
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
    contents = [[parcel_of(unread(each)) for each in replies] for replies in (grid.replies, old.replies)]
    for mine, theirs in zip(*(sorted(one, key=lambda c: c[1]["client_id"]) for one in contents), strict=True):
        assert {**mine[1], "nonce": ""} == {**theirs[1], "nonce": ""}  # of the server, by chance
        for name, value in theirs[0].items():
            assert_array_equal(mine[0][name], value)
    for name in place.data:
        lines = [len(stored.lines(place.root / f / name)) for f in ("warm", "cold")]
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
    private: list[Path] = []

    def start() -> None:
        connection, door, _ = place.started()
        connection.close()
        found.append(door.pid)
        private.append(Path(door.address).parent)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and len(set(found)) == 1
    os.kill(found[0], signal.SIGKILL)
    warm._workers[0].wait(30)  # with all its threads, of which any keeps its socket
    start()
    assert found[2] != found[0] and _lives(found[2])
    assert private[2].exists() and not private[0].exists()  # the killed one could not delete it


def test_a_worker_that_hangs_ends_and_says_where(place: Place) -> None:
    """Twice as long as its message could wait: it may have been compiling."""
    config = place.waiting("data")
    connection, door, folder = place.started(folder=config["folder"], app="waiting_site:app")
    with connection:
        _ask(connection, door, config, killed_after=1.0)
        with pytest.raises((EOFError, ConnectionError)):
            connection.recv_bytes()
    assert _ends(door.pid)
    log = (folder / "log").read_text()
    assert "Timeout" in log and "when_there" in log


def test_a_worker_that_is_replaced_answers_what_it_computes_and_leaves_the_others_key(place: Place) -> None:
    config = place.waiting("data")
    connection, old, folder = place.started(folder=config["folder"], app="waiting_site:app")
    with connection:
        _ask(connection, old, config)
        _until((folder / "has begun").exists)
        another, new, _ = place.started(folder=config["folder"], app="waiting_site:app", mark="another")
        another.close()
        assert new.pid != old.pid and _lives(old.pid) and not Path(old.address).exists()
        place.released("data")
        assert codec.decode(connection.recv_bytes())["texts"]
    assert _ends(old.pid) and _lives(new.pid)
    assert warm.read_door(folder) == new and Path(new.address).exists()


def test_a_folder_that_is_open_to_others_or_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "worker").mkdir()
    (tmp_path / "worker").chmod(0o755)
    with pytest.raises(OSError, match="delete it"):
        warm.opened(tmp_path)
    (tmp_path / "worker").chmod(0o700)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "worker").symlink_to(tmp_path / "worker")
    with pytest.raises(OSError, match="delete it"):
        warm.opened(tmp_path / "site")
    folder = warm.opened(tmp_path / "parent" / "own")
    assert [where.stat().st_mode & 0o777 for where in (folder, folder.parent)] == [0o700, 0o700]


@pytest.mark.slow
def test_it_reads_changed_data_and_is_replaced_where_the_app_changes(place: Place) -> None:
    config = place.config("client0", "one")
    app = fedppl.Flower.warm_app("warm_site:app", folder=config["folder"], idle=60.0)
    (message,) = (m for m in _hello(place, app, config))
    first = _listener(config)
    replies = [parcel_of(unread(app(message, node(app, 1, **config).context)))]
    np.savez(config["data"], y=place.data["client0"][:4])
    replies.append(parcel_of(unread(app(message, node(app, 1, **config).context))))
    assert "error" not in replies[0][1] and "policy of its site" in replies[1][1]["error"]  # it wants five rows
    assert _listener(config) == first
    (place.root / "warm_site.py").write_text(SITE + "\n# another\n")
    app(message, node(app, 1, **config).context)
    assert _listener(config) not in (first, 0) and _ends(first)


@pytest.mark.slow
def test_another_policy_holds_at_once_and_the_worker_goes_on(place: Place) -> None:
    own = place.root / "rules" / "own.toml"  # not among the app's sources
    own.parent.mkdir()
    own.write_text('sums = "optional"\nrows = 5\n')
    config = {**place.config("client0", "one"), "policy": str(own)}
    app = fedppl.Flower.warm_app("warm_site:app", folder=config["folder"], idle=60.0)
    (message,) = (m for m in _hello(place, app, config))
    first = _listener(config)
    assert "error" not in parcel_of(unread(app(message, node(app, 1, **config).context)))[1]
    own.write_text('sums = "optional"\nrows = 1000\n')
    assert "policy of its site" in parcel_of(unread(app(message, node(app, 1, **config).context)))[1]["error"]
    assert _listener(config) == first


def test_data_are_enrolled_anew_where_they_have_changed(tmp_path: Path) -> None:
    model, _ = normal_means(1)
    data: dict[str, Any] = {"y": np.arange(6.0)}
    here = sites.Node(
        "t", model, fedppl.EP(), lambda config: {**data}, lambda config: "a", None, 10, 1, fedppl.policy.NO_RULES
    )
    memory = sites.Memory(lambda name: None, lambda name, raw: None)
    first = sites.enrolled(here, {}, memory).client
    assert sites.enrolled(here, {}, memory).client is first
    data["y"][0] = 9.0  # in place
    second = sites.enrolled(here, {}, memory).client
    assert second is not first and second.arrays["y"][0] == 9.0 and second.kernel is first.kernel
    data["y"] = np.arange(7.0)
    sites.enrolled(here, {}, memory)
    (first_rows,) = (rows for key, rows in sites._first.items() if key[0] == "t")
    assert len(first_rows["a"]["y"]) == 7  # rows with which later clients are compared, and that are kept
    masked = {"y": np.ma.array([1.0, 2.0], mask=[False, True])}
    assert sites._seal(masked) != sites._seal({"y": masked["y"].data})
    objects = {"y": np.array([1.0, None])}
    assert sites._seal(objects) != sites._seal(objects)


WAITING = """
import pathlib, time
def when_there(path, config):
    (pathlib.Path(config["folder"]) / "worker" / "has begun").touch()
    while not pathlib.Path(path).exists():
        time.sleep(0.02)
    return path
def loaded(path):
    pathlib.Path(path + ".loaded").touch()
    return np.load(path)
""" + SITE.replace('np.load(config["data"])', 'loaded(when_there(config["data"], config))').replace(
    'config["policy"],', 'when_there(config["policy"], config),'
)


def _ask(connection: Connection, door: warm.Door, config: dict[str, Any], killed_after: float = 600.0) -> None:
    """Send the first message of a run."""
    texts = {"config": config, "kind": HELLO, "arrays": {}, "texts": {}, "killed_at": time.monotonic() + killed_after}
    warm.greet(connection, door)
    connection.send_bytes(codec.encode(texts))


@pytest.mark.parametrize("name", ["policy", "data"])  # is looked at before and after the rows are loaded
def test_a_request_whose_asker_has_gone_is_neither_computed_nor_counted(place: Place, name: str) -> None:
    config = place.waiting(name)
    connection, door, folder = place.started(folder=config["folder"], app="waiting_site:app")
    account, log = folder.parent / "site.sqlite", folder / "log"
    with connection:
        _ask(connection, door, config)
        _until((folder / "has begun").exists)
    connection = Client(door.address)  # waits behind it
    place.released(name)
    _until(lambda: "fedppl_hello) is closed" in log.read_text())
    assert not account.exists() and Path(config["data"] + ".loaded").exists() == (name == "data")
    log.unlink()  # rotated
    with connection:
        _ask(connection, door, config)
        answer = codec.decode(connection.recv_bytes())
    assert "policy of its site" in answer["texts"]["error"] and "cannot take part" in answer["log"]
    assert account.exists()


def _until(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# A worker's parts, in a thread ----------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """Two ends of a connection, a site's folder, and what a worker serves one end with: an answer of 16 MB."""

    here: Connection
    there: Connection
    site: Path
    door: warm.Door
    node_of: Any

    def serve(self) -> threading.Thread:
        """Serve one request."""
        arguments = (self.there, self.door, self.node_of, warm.opened(self.site))
        thread = threading.Thread(target=warm._answer, args=arguments, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    door = warm.Door("no socket", "00" * 32, os.getpid(), "own")
    site = tmp_path / "site"
    own = sites.Node(
        "t", normal_means(1)[0], fedppl.EP(), lambda c: None, lambda c: "a", site, 10, 1, fedppl.policy.NO_RULES
    )
    monkeypatch.setattr("fedppl.sites.conclusions.answer", lambda *arguments: ({"a": np.zeros(2**21)}, {}))
    here, there = _pair()
    with here, there, (tmp_path / "log").open("w+b") as log:
        monkeypatch.setattr(warm, "_STDERR", log.fileno())
        monkeypatch.setattr("faulthandler.dump_traceback_later", lambda seconds, exit: None)  # would end this process
        yield Parts(here, there, site, door, lambda config: own)


def _pair() -> tuple[Connection, Connection]:
    here, there = socket.socketpair()
    return Connection(here.detach()), Connection(there.detach())


@pytest.mark.parametrize("stage", ["proofs", "request", "answer"])
def test_proofs_a_request_and_an_answer_have_a_limit_in_all(
    parts: Parts, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "_PROOFS", 0.3)
    monkeypatch.setattr(warm, "_PATIENCE", 0.3)
    serving = parts.serve()
    if stage != "proofs":
        warm.greet(parts.here, parts.door)
    if stage == "answer":
        parts.here.send_bytes(codec.encode({"config": {}, "kind": HELLO, "arrays": {}, "texts": {}, "killed_at": 0.0}))
    else:
        with pytest.raises(OSError):
            os.write(parts.here.fileno(), b"\0\0\0\xc8")  # that so many bytes follow
            for _ in range(100):
                time.sleep(0.05)
                os.write(parts.here.fileno(), b"1")
    serving.join(5.0)
    assert not serving.is_alive()


def test_the_apps_wait_has_a_limit_in_all(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a worker that stops within an answer, or does not read, or is still at another message."""
    monkeypatch.setattr(warm, "_LEAST", 0.5)
    for part in (b"\0\0", b"", None):
        here, there = _pair()
        door = warm.Door(str(place.root / "no-socket"), "00", 1, "")

        def answers(there: Connection = there, part: bytes | None = part) -> None:
            deliver_challenge(there, b"\0")
            answer_challenge(there, b"\0")
            os.write(there.fileno(), part or b"")

        if part is not None:
            threading.Thread(target=answers, daemon=True).start()
        monkeypatch.setattr(warm, "reach", lambda *arguments, here=here, door=door: (here, door))
        with there, pytest.raises(RuntimeError, match="goes on computing.*deadline="):
            _asks_late(place)


def test_who_does_not_look_at_the_workers_refusal_is_not_served(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr("fedppl.sites.conclusions.answer", lambda *arguments: served.append(arguments))
    serving = parts.serve()
    with pytest.raises(AuthenticationError):
        answer_challenge(parts.here, bytes(31) + b"1")
    parts.here.send_bytes(codec.encode({"config": {}, "kind": HELLO, "arrays": {}, "texts": {}, "killed_at": 0.0}))
    serving.join(10.0)
    assert not serving.is_alive() and not served


def test_a_worker_that_does_not_start_says_why(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, place.root])  # no text
    long = place.root / ("long" * 30)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with pytest.raises(ConnectionError, match="exit code 1; its log, (?s:.*)set TMPDIR"):
        place.started()
    assert not list(long.iterdir())
    monkeypatch.setattr(warm, "_COMMAND", (sys.executable, "-c", "raise SystemExit('no such interpreter')"))
    with pytest.raises(ConnectionError, match=r"exit code 1; its log, .*: no such interpreter"):
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
    assert "plain" in _plainly(place, odd=object() if what == "config" else 1)
    assert ("of type builtins.object" if what == "config" else "client_app returned") in caplog.text


@pytest.mark.parametrize("what", ["no address", "no key", "no challenge"])
def test_a_door_or_a_worker_that_says_anything_is_no_worker(
    place: Place, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "fingerprint", lambda app, idle: "own")
    address = str(place.root / "s")
    door = {"address": 5 if what == "no address" else address, "key": "no" if what == "no key" else "00", "pid": 1}
    (warm.opened(place.root / "one") / "key").write_text(json.dumps({**door, "fingerprint": "own"}))
    with Listener(address, "AF_UNIX") as listener:

        def greets() -> None:
            with listener.accept() as connection:
                connection.send_bytes(b"anything" if what == "no challenge" else b"")

        thread = threading.Thread(target=greets, daemon=True)
        if what != "no address":
            thread.start()
        assert "plain" in _plainly(place)
        if what != "no address":
            thread.join(10.0)


def _plainly(place: Place, **config: Any) -> Any:
    """What is answered for an app that no worker has."""
    (place.root / "plain_site.py").write_text(PLAIN)
    app = fedppl.Flower.warm_app("plain_site:app", folder=place.root / "one", idle=60.0)
    (message,) = (m for m in _hello(place, fedppl.Flower.warm_app("plain_site:app", folder="-", idle=0.0), {}))
    return app(message, node(app, 1, **config).context).content


def test_the_fingerprint_is_of_sources_and_not_of_what_the_site_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "spacious" / "work").mkdir(parents=True)  # a namespace: no __init__.py
    (tmp_path / "spacious" / "site.py").write_text("")
    marks = [warm.fingerprint("spacious.site:app", 1)]
    (tmp_path / "spacious" / "work" / "site.sqlite").write_text("{}")
    assert warm.fingerprint("spacious.site:app", 1.0) == marks[0]
    marks.append(warm.fingerprint("spacious.site:app", 2.0))
    (tmp_path / "spacious" / "more.toml").write_text("")
    marks.append(warm.fingerprint("spacious.site:app", 1.0))
    (tmp_path / "spacious" / "site.py").write_text("a = 1")
    marks.append(warm.fingerprint("spacious.site:app", 1.0))
    monkeypatch.syspath_prepend(str(tmp_path / "work"))
    marks.append(warm.fingerprint("spacious.site:app", 1.0))
    assert len({*marks}) == 5
    with pytest.raises(ModuleNotFoundError, match="'not_there'"):
        warm.fingerprint("not_there:app", 1.0)


def _asks_late(place: Place) -> None:
    """Send a message that has hardly any time."""
    config = place.config("client0", "one")
    app = fedppl.Flower.warm_app("warm_site:app", folder=config["folder"], idle=60.0)
    (message,) = (m for m in _hello(place, fedppl.Flower.warm_app("a:b", folder="-", idle=0.0), {}))
    message.metadata.ttl = 0.1
    app(message, node(app, 1, **config).context)


def _hello(place: Place, app: Any, config: dict[str, Any]) -> Iterator[Any]:
    """The first message of a run to one site."""
    grid = FakeGrid({1: node(app, 1, **config)})
    with pytest.raises(fedppl.DeclarationError):
        model = normal_means(1)[0]
        fedppl.fit(model, None, fedppl.EP(), engine=engine_of(grid, model, 2, wait=0.01), progressbar=False)
    yield grid.sent[0]


def _listener(config: dict[str, Any]) -> int:
    door = warm.read_door(Path(config["folder"]) / "worker")
    return 0 if door is None else door.pid
