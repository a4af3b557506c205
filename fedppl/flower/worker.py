"""A site's warm worker: a process that keeps the app imported and its model compiled, and answers as the app would.

`warm_app` starts it and writes its options to its standard input. It listens before it imports the app, and computes
one request after the other. Both ends prove that they know a key; nothing that comes over the socket is unpickled.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import secrets
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, NamedTuple

from fedppl.settings import shown
from fedppl.storage import codec
from fedppl.storage.signed import replace
from fedppl.types import DeclarationError

logger = logging.getLogger(__name__)

KEY, LOG, LOCK = "key", "log", "start.lock"  # in the worker's folder
MOST = 2**31  # bytes of a request or an answer
_KEY_LENGTH = 32
_PROOFS = 10.0  # seconds in all, until the other end has proved that it knows the key
_PATIENCE = 60.0  # seconds in all, for a request and for an answer
_TICK = 1.0
_PREFIX = "fedppl-"
_STDERR = 2  # the log, which `warm_app` has opened: another file may have its path by now
_CONNECTIONS = 16  # that wait
_LOG_BYTES = 2**20  # of one request, that go to the app's own log


class Door(NamedTuple):
    """Content of the file `key`: how to reach the worker, and for which app and options it answers."""

    address: str
    key: str
    pid: int
    app: str  # a digest


def opened(site: Path) -> Path:
    """The worker's folder in the site's, made if missing; a link, or a folder that others may enter, is refused."""
    folder = site / "worker"
    site.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = os.stat(folder, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OSError(f"{str(folder)!r} is a link, of another user or open to others; delete it, and a new one is made")
    return folder


def read_door(folder: Path) -> Door | None:
    """Read the file `key`; None where there is none."""
    try:
        return Door(**json.loads((folder / KEY).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def serving(door: Door) -> Path:
    """The file in which a worker notes until when the request that it serves is waited for."""
    return Path(door.address).with_name("serving")


def overdue(door: Door) -> bool:
    """Whether the worker serves a request whose own time is over."""
    try:
        return float(serving(door).read_bytes()) < time.monotonic()  # the system's clock, the same in all processes
    except (OSError, ValueError):
        return False


def clear(door: Door) -> None:
    """Delete a worker's socket with its folder."""
    if (private := Path(door.address).parent).name.startswith(_PREFIX):
        shutil.rmtree(private, ignore_errors=True)


@contextlib.contextmanager
def limited(connection: Connection, seconds: float) -> Iterator[threading.Event]:
    """Shut a connection down after so many seconds, so that no read or write waits longer; yields whether it was."""
    over = threading.Event()
    with socket.socket(fileno=os.dup(connection.fileno())) as end:

        def shut() -> None:
            over.set()
            with contextlib.suppress(OSError):  # it is closed
                end.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, shut)
        timer.daemon = True
        timer.start()
        try:
            yield over
        finally:
            timer.cancel()


def main(options: Mapping[str, Any]) -> None:
    """Serve the app that `options` names: its name, folder, idle (seconds) and digest. Standard error is the log."""
    folder = opened(Path(options["folder"]))
    # A short path, as a socket needs, in a folder that only its owner may enter.
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as private:
        try:
            listener = Listener(f"{private}/socket", "AF_UNIX", backlog=_CONNECTIONS)
        except OSError as error:
            raise OSError(f"no socket in {private!r}: {error}; set TMPDIR to a folder with a shorter path") from error
        door = Door(f"{private}/socket", secrets.token_hex(_KEY_LENGTH), os.getpid(), options["digest"])
        replace(folder / KEY, json.dumps(door._asdict()).encode())
        latest, computing = [math.inf], threading.Lock()  # it is not idle before it has imported the app
        threading.Thread(target=_end, args=(folder, door, options["idle"], latest, computing), daemon=True).start()
        node_of = _node_of(options["app"])
        latest[0] = time.monotonic()
        while True:
            connection = listener.accept()
            with computing, connection:
                _serve(connection, door, node_of, folder)
                latest[0] = time.monotonic()


def _node_of(app: str) -> Any:
    from fedppl.flower.client_app import declared  # after the socket is there: it takes seconds

    module, _, name = app.partition(":")
    site_app = getattr(importlib.import_module(module), name)
    if site_app not in declared:
        raise DeclarationError(f"app={app!r} is {shown(site_app)}; name what fedppl.Flower.client_app returned.")
    return declared[site_app]


def _end(folder: Path, door: Door, idle: float, latest: list[float], computing: threading.Lock) -> None:
    """End this process when it is idle, or its key is gone or another's and nobody waits for what it computes."""
    while True:
        time.sleep(_TICK)
        is_ours = read_door(folder) == door
        if computing.acquire(blocking=False):
            if is_ours and time.monotonic() - latest[0] < idle:
                computing.release()
                continue
        elif is_ours or not overdue(door):
            continue
        _leave(folder, door)
        clear(door)
        os._exit(0)  # without waiting for threads and pools of libraries


def _leave(folder: Path, door: Door) -> None:
    """Delete the key, so that nobody connects, unless it is another worker's by now."""
    if read_door(folder) == door:
        (folder / KEY).unlink(missing_ok=True)


def _serve(connection: Connection, door: Door, node_of: Any, folder: Path) -> None:
    """Answer a request. After an error without an answer the app answers by itself."""
    from fedppl.flower.client_app import answer
    from fedppl.flower.messages import CONCLUDE

    try:
        with limited(connection, _PROOFS):
            connection.send_bytes(b"")
            answer_challenge(connection, bytes.fromhex(door.key))
            deliver_challenge(connection, bytes.fromhex(door.key))
        with limited(connection, _PATIENCE):
            request = codec.decode(connection.recv_bytes(MOST))
        replace(serving(door), repr(request["end"]).encode())
        start, kind, config = os.fstat(_STDERR).st_size, request["kind"], request["config"]
        here = node_of(config)
        if here.folder is None or not os.path.samefile(here.folder, folder.parent):
            raise ValueError(f"client_app has the folder {here.folder}, warm_app {folder.parent}; name one in both")
        load = None if connection.poll(0) else _loaded(here, config)
        if load is None or connection.poll(0):  # loading may take long, and what comes after it counts the request
            logger.warning("the connection of a request (%s) is closed; it is neither computed nor counted", kind)
            return
        here = here._replace(load_data=load)
        arrays, texts = answer(kind, here, config, None, (request["arrays"], request["texts"]))
        log = os.pread(_STDERR, _LOG_BYTES, start).decode(errors="replace")
        if kind == CONCLUDE:  # before the answer: the next message must not reach a worker that is about to end
            _leave(folder, door)
        with limited(connection, _PATIENCE):
            connection.send_bytes(codec.encode({"arrays": dict(arrays), "texts": dict(texts), "log": log}))
    except Exception:
        logger.exception("the warm worker does not answer")
    finally:
        serving(door).unlink(missing_ok=True)


def _loaded(node: Any, config: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Load the site's data now; return a function that gives them, or raises the error of loading."""
    loading: Future[Any] = Future()
    try:
        loading.set_result(node.load_data(config))
    except Exception as error:
        loading.set_exception(error)
    return lambda config: loading.result()
