"""A site's warm worker: a process that keeps the app imported and its model compiled, and answers as the app would.

`warm_app` starts it and writes its options to its standard input. It listens before it imports the app, and computes
one request after the other. Both ends prove that they know a key; nothing that comes over the socket is unpickled.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, NamedTuple

from fedppl.settings import shown
from fedppl.storage import codec
from fedppl.storage.signed import file_memory, replace
from fedppl.types import DeclarationError

logger = logging.getLogger(__name__)

KEY, LOG, LOCK = "key", "log", "start.lock"  # in the worker's folder
MOST = 2**31  # bytes of a request or an answer
_KEY_LENGTH = 32
_PROOFS = 10.0  # seconds until the other end begins to prove that it knows the key
_TICK = 1.0
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
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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


def main(options: Mapping[str, Any]) -> None:
    """Serve the app that `options` names: its name, folder, idle (seconds) and digest. Standard error is the log."""
    folder = opened(Path(options["folder"]))
    # A short path, as a socket needs, in a folder that only its owner may enter.
    with tempfile.TemporaryDirectory(prefix="fedppl-") as private:
        listener = Listener(f"{private}/socket", "AF_UNIX", backlog=_CONNECTIONS)
        door = Door(f"{private}/socket", secrets.token_hex(_KEY_LENGTH), os.getpid(), options["digest"])
        replace(folder / KEY, json.dumps(door._asdict()).encode())
        node_of, latest, computing = _node_of(options["app"]), [time.monotonic()], threading.Lock()
        threading.Thread(target=_end, args=(folder, door, options["idle"], latest, computing), daemon=True).start()
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
    """End this process when it is idle, or its key is gone or another's."""
    while True:
        time.sleep(_TICK)
        with computing:
            if (is_ours := read_door(folder) == door) and time.monotonic() - latest[0] < idle:
                continue
            if is_ours:
                (folder / KEY).unlink()
            shutil.rmtree(os.path.dirname(door.address), ignore_errors=True)
            os._exit(0)  # without waiting for threads and pools of libraries


def _serve(connection: Connection, door: Door, node_of: Any, folder: Path) -> None:
    """Answer a request. After an error without an answer the app answers by itself."""
    from fedppl.flower.client_app import answer
    from fedppl.flower.messages import CONCLUDE

    try:
        connection.send_bytes(b"")
        if not connection.poll(_PROOFS):
            return
        answer_challenge(connection, bytes.fromhex(door.key))
        deliver_challenge(connection, bytes.fromhex(door.key))
        request = codec.decode(connection.recv_bytes(MOST))
        start, kind = (folder / LOG).stat().st_size, request["kind"]
        here = node_of(request["config"])
        if here.folder is None or not os.path.samefile(here.folder, folder.parent):
            raise ValueError(
                f"client_app keeps its files in {here.folder}, warm_app in {folder.parent}; name one folder in both"
            )
        if connection.poll(0):
            logger.warning("the connection of a request (%s) is closed; it is neither computed nor counted", kind)
            return
        arrays, texts = answer(
            kind, here, request["config"], file_memory(here.folder), (request["arrays"], request["texts"])
        )
        with (folder / LOG).open("rb") as file:
            file.seek(start)
            log = file.read(_LOG_BYTES).decode(errors="replace")
        if kind == CONCLUDE:  # before the answer: the next message must not reach a worker that is about to end
            (folder / KEY).unlink(missing_ok=True)
        connection.send_bytes(codec.encode({"arrays": dict(arrays), "texts": dict(texts), "log": log}))
    except Exception:
        logger.exception("the warm worker does not answer")
