"""A site's warm worker: equal replies, one at a time, replaced when what it stands on changes, deaf to strangers."""

from __future__ import annotations

import contextlib
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
from fedppl.flower import node as sites
from fedppl.flower import warm, worker
from fedppl.flower.messages import CONCLUDE, HELLO, from_content
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


LISTENING = "import socket, sys; s = socket.socket(1); s.bind(sys.argv[1]); s.listen(); print(1, flush=True); input()"


@pytest.mark.parametrize("hangs", [True, False])
def test_the_start_of_a_worker_ends_one_of_another_app_only_if_nobody_waits_for_it(
    place: Place, hangs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warm, "_CODE", "")  # of the new one
    folder, private = worker.opened(place.root / "one"), place.root / "fedppl-old"
    private.mkdir()
    command = [sys.executable, "-c", LISTENING, str(private / "socket")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as old:
        assert old.stdout is not None and old.stdout.readline()
        door = worker.Door(str(private / "socket"), "00", old.pid, "another")
        worker.replace(folder / "key", json.dumps(door._asdict()).encode())
        worker.serving(door).write_text(repr(time.monotonic() + (-1.0 if hangs else 600.0)))
        with pytest.raises(warm._NoWorker):
            place.started()
        assert (_ends(old.pid) if hangs else _lives(old.pid)) and private.exists() != hangs
        assert (f"process {old.pid}, is replaced" in caplog.text) != hangs


@pytest.mark.parametrize(
    "time_over, key, ended", [(True, "another", True), (False, "another", False), (True, "", False)]
)
def test_a_worker_that_hangs_ends_where_its_key_is_anothers(
    tmp_path: Path, time_over: bool, key: str, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits = _exits(monkeypatch)
    (private := tmp_path / "fedppl-own").mkdir()
    door, computing = worker.Door(str(private / "socket"), "00", 1, "own"), threading.Lock()
    computing.acquire()
    worker.serving(door).write_text(repr(time.monotonic() + (-1.0 if time_over else 600.0)))
    (tmp_path / "key").write_text(json.dumps((door._replace(key=key) if key else door)._asdict()))
    thread = threading.Thread(target=worker._end, args=(tmp_path, door, 600.0, [0.0], computing), daemon=True)
    thread.start()
    assert exits.wait(10.0 if ended else 0.3) == ended
    assert (tmp_path / "key").exists()  # of the one that is there
    if not ended:
        (tmp_path / "key").unlink()
        computing.release()
    thread.join(10.0)
    assert exits.is_set() and not private.exists()


def _quiet(function: Any) -> Any:
    """The function, ended by SystemExit without a word: pytest reports that of a thread."""

    def called(*arguments: Any) -> None:
        with contextlib.suppress(SystemExit):
            function(*arguments)

    return called


def _exits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that says whether a worker, which is a thread here, has ended its process."""
    exits = threading.Event()

    def leave(code: int) -> None:
        exits.set()
        raise SystemExit

    monkeypatch.setattr(worker.os, "_exit", leave)
    monkeypatch.setattr(worker, "_end", _quiet(worker._end))
    monkeypatch.setattr(worker, "_TICK", 0.01)
    return exits


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
    folder = worker.opened(tmp_path / "parent" / "own")
    assert [where.stat().st_mode & 0o777 for where in (folder, folder.parent)] == [0o700, 0o700]


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
    own.write_text('sums = "optional"\nrows = 5\n')
    config = {**place.config("client0", "one"), "policy": str(own)}
    app = fedppl.Flower.warm_app("warm_site:app", folder=config["folder"], idle=60.0)
    (message,) = (m for m in _hello(place, app, config))
    first = _listener(config)
    assert "error" not in from_content(app(message, node(app, 1, **config).context).content)[1]
    own.write_text('sums = "optional"\nrows = 1000\n')
    assert "policy of its site" in from_content(app(message, node(app, 1, **config).context).content)[1]["error"]
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
def when_there(path):
    while not pathlib.Path(path).exists():
        time.sleep(0.02)
    return path
def loaded(path):
    pathlib.Path(path + ".loaded").touch()
    return np.load(path)
""" + SITE.replace('np.load(config["data"])', 'loaded(when_there(config["data"]))').replace(
    'config["policy"],', 'when_there(config["policy"]),'
)


def test_a_request_whose_asker_has_gone_is_neither_computed_nor_counted(place: Place) -> None:
    (place.root / "waiting_site.py").write_text(WAITING)
    config = place.config("client0", ".")
    np.savez(config["data"], y=np.ones(4))  # the policy wants five rows, and a refusal is counted
    connection, door, folder = place.started(folder=config["folder"], app="waiting_site:app")
    account, log = folder.parent / "site.sqlite", folder / "log"

    def ask(connection: Connection, end: float, **paths: str) -> None:
        texts = {"config": {**config, **paths}, "kind": HELLO, "arrays": {}, "texts": {}, "end": end}
        warm.greet(connection, door)
        connection.send_bytes(codec.encode(texts))

    def computing(end: float) -> bool:
        try:
            return float(worker.serving(door).read_text()) == end
        except OSError:
            return False

    later = time.monotonic() + 600.0
    for number, name in enumerate(("policy", "data")):  # is looked at before and after the rows are loaded
        path, there = Path(config[name]), place.root / f"{name}.later"
        path.rename(there)
        with connection:
            ask(connection, later + number)
            _until(lambda number=number: computing(later + number))
        connection = Client(door.address)  # waits behind it
        there.rename(path)
        _until(lambda number=number: log.read_text().count("fedppl_hello) is closed") == number + 1)
        assert not account.exists() and Path(config["data"] + ".loaded").exists() == (name == "data")
    log.unlink()  # rotated
    with connection:
        ask(connection, later)
        answer = codec.decode(connection.recv_bytes())
    assert "policy of its site" in answer["texts"]["error"] and "cannot take part" in answer["log"]
    assert account.exists()
    _until(lambda: not computing(later))


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
    door: worker.Door
    node_of: Any

    def serve(self) -> threading.Thread:
        """Serve one request."""
        arguments = (self.there, self.door, self.node_of, worker.opened(self.site))
        thread = threading.Thread(target=worker._serve, args=arguments, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    (private := tmp_path / "fedppl-own").mkdir()
    door = worker.Door(str(private / "socket"), "00" * 32, os.getpid(), "own")
    site = tmp_path / "site"
    own = sites.Node(
        "t", normal_means(1)[0], fedppl.EP(), lambda c: None, lambda c: "a", site, 10, 1, fedppl.policy.NO_RULES
    )
    monkeypatch.setattr("fedppl.flower.client_app.answer", lambda *arguments: ({"a": np.zeros(2**21)}, {}))
    here, there = _pair()
    with here, there, (tmp_path / "log").open("w+b") as log:
        monkeypatch.setattr(worker, "_STDERR", log.fileno())
        yield Parts(here, there, site, door, lambda config: own)


def _pair() -> tuple[Connection, Connection]:
    here, there = socket.socketpair()
    return Connection(here.detach()), Connection(there.detach())


@pytest.mark.parametrize("stage", ["proofs", "request", "answer"])
def test_proofs_a_request_and_an_answer_have_a_limit_in_all(
    parts: Parts, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_PROOFS", 0.3)
    monkeypatch.setattr(worker, "_PATIENCE", 0.3)
    serving = parts.serve()
    if stage != "proofs":
        warm.greet(parts.here, parts.door)
    if stage == "answer":
        parts.here.send_bytes(codec.encode({"config": {}, "kind": HELLO, "arrays": {}, "texts": {}, "end": 0.0}))
    else:
        with pytest.raises(OSError):
            os.write(parts.here.fileno(), b"\0\0\0\xc8")  # that so many bytes follow
            for _ in range(100):
                time.sleep(0.05)
                os.write(parts.here.fileno(), b"1")
    serving.join(5.0)
    assert not serving.is_alive()


def test_the_apps_wait_has_a_limit_in_all(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a worker that stops within an answer, or does not read."""
    monkeypatch.setattr(warm, "_LEAST", 0.5)
    for part in (b"\0\0", b""):
        here, there = _pair()
        door = worker.Door(str(place.root / "no-socket"), "00", 1, "")

        def answers(there: Connection = there, part: bytes = part) -> None:
            there.send_bytes(b"")
            answer_challenge(there, b"\0")
            deliver_challenge(there, b"\0")
            os.write(there.fileno(), part)

        threading.Thread(target=answers, daemon=True).start()
        monkeypatch.setattr(warm, "reach", lambda *arguments, here=here, door=door: (here, door))
        with there, pytest.raises(RuntimeError, match="goes on computing.*deadline="):
            _asks_late(place)


class Blind(Connection):
    """An end that welcomes any proof."""

    def send_bytes(self, raw: Any, *more: Any) -> None:
        super().send_bytes(b"#WELCOME#" if raw == b"#FAILURE#" else raw, *more)


def test_who_does_not_look_at_the_workers_proof_is_refused(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr("fedppl.flower.client_app.answer", lambda *arguments: served.append(arguments))
    serving = parts.serve()
    with Blind(os.dup(parts.here.fileno())) as blind:
        blind.recv_bytes(0)
        with pytest.raises(AuthenticationError):
            deliver_challenge(blind, bytes(31) + b"1")
        with pytest.raises(AuthenticationError):
            answer_challenge(blind, bytes(31) + b"1")
    serving.join(10.0)
    assert not serving.is_alive() and not served


@pytest.mark.parametrize("own_key", [True, False])
def test_a_worker_that_ends_sends_all_answers_first(
    parts: Parts, own_key: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long who asked takes to read; and it leaves the key of another that has taken its place."""
    exits, waiting = _exits(monkeypatch), [parts.there]

    class Once:
        def __init__(self, *arguments: Any, **more: Any) -> None: ...

        def accept(self) -> Connection:
            if not waiting:
                raise SystemExit
            return waiting.pop()

    monkeypatch.setattr(worker, "Listener", Once)
    monkeypatch.setattr(worker, "_node_of", lambda app: parts.node_of)
    site = parts.site
    told = {"app": "a:b", "folder": str(site), "idle": 60.0, "digest": "own"}
    serving = threading.Thread(target=_quiet(worker.main), args=(told,), daemon=True)
    serving.start()
    _until((site / "worker" / "key").exists)
    door = worker.read_door(site / "worker")
    assert door is not None
    warm.greet(parts.here, door)
    if not own_key:
        worker.replace(site / "worker" / "key", json.dumps(door._replace(key="11")._asdict()).encode())
    request = {"config": {}, "kind": CONCLUDE, "arrays": {}, "texts": {}, "end": time.monotonic() + 60.0}
    parts.here.send_bytes(codec.encode(request))
    assert parts.here.poll(10.0) and not exits.wait(1.0)
    assert (site / "worker" / "key").exists() != own_key  # before the answer: who comes now has a new worker
    assert codec.decode(parts.here.recv_bytes())["arrays"]["a"].shape == (2**21,)
    assert exits.wait(10.0)
    serving.join(10.0)
    assert (site / "worker" / "key").exists() != own_key


def test_a_worker_that_does_not_start_says_why(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, place.root])  # no text
    long = place.root / ("long" * 30)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with pytest.raises(warm._NoWorker, match="exit code 1; its log, (?s:.*)set TMPDIR"):
        place.started()
    assert not list(long.iterdir())
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
    assert "plain" in _plainly(place, odd=object() if what == "config" else 1)
    assert ("of type builtins.object" if what == "config" else "client_app returned") in caplog.text


@pytest.mark.parametrize("what", ["no address", "no key", "no challenge"])
def test_a_door_or_a_worker_that_says_anything_is_no_worker(
    place: Place, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "digest", lambda options: "own")
    address = str(place.root / "s")
    door = {"address": 5 if what == "no address" else address, "key": "no" if what == "no key" else "00", "pid": 1}
    (worker.opened(place.root / "one") / "key").write_text(json.dumps({**door, "app": "own"}))
    with Listener(address, "AF_UNIX") as listener:

        def greets() -> None:
            with listener.accept() as connection:
                connection.send_bytes(b"")
                if what == "no challenge":
                    answer_challenge(connection, b"\0")
                    connection.send_bytes(b"anything")

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


def test_the_digest_is_of_sources_and_not_of_what_the_site_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "spacious" / "work").mkdir(parents=True)  # a namespace: no __init__.py
    (tmp_path / "spacious" / "site.py").write_text("")
    told = {"app": "spacious.site:app", "folder": str(tmp_path), "idle": 1.0, "path": [tmp_path]}
    digests = [warm.digest(told)]
    (tmp_path / "spacious" / "work" / "site.sqlite").write_text("{}")
    assert warm.digest(told) == digests[0]
    digests.append(warm.digest({**told, "idle": 2.0}))
    (tmp_path / "spacious" / "more.toml").write_text("")
    digests.append(warm.digest(told))
    (tmp_path / "spacious" / "site.py").write_text("a = 1")
    digests.append(warm.digest(told))
    assert len({*digests}) == 4
    with pytest.raises(fedppl.DeclarationError, match="'not_there'"):
        warm.digest({**told, "app": "not_there:app"})


@pytest.mark.parametrize(
    "at, remedy",
    [
        ("one whose time is over", "was killed"),
        ("one that is waited for", "deadline="),
        ("importing", "deadline="),
        ("this one", "deadline="),
    ],
)
def test_a_message_that_expires_ends_a_worker_only_behind_one_whose_time_is_over(
    place: Place, at: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(warm.os, "kill", lambda pid, sign: killed.append(pid))
    monkeypatch.setattr(warm, "_LEAST", 0.5)
    with Listener(str(place.root / "s"), "AF_UNIX") as listener:
        door = worker.Door(str(place.root / "s"), "00", 123456, "")
        if at != "importing":
            worker.serving(door).write_text(repr(time.monotonic() + 600.0 * (at == "one that is waited for")))

        def greeted() -> None:
            connection = listener.accept()
            connection.send_bytes(b"")
            answer_challenge(connection, b"\0")
            deliver_challenge(connection, b"\0")
            connection.poll(5.0)
            time.sleep(2.0)

        if at == "this one":
            threading.Thread(target=greeted, daemon=True).start()
        monkeypatch.setattr(warm, "reach", lambda *arguments: (Client(door.address), door))
        with pytest.raises(RuntimeError, match=remedy):
            _asks_late(place)
    assert killed == [door.pid] * (remedy == "was killed")


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
    door = worker.read_door(Path(config["folder"]) / "worker")
    return 0 if door is None else door.pid
