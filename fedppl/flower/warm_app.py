"""A site's Flower app that imports nothing heavy: a warm worker of the site answers for it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock
from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from fedppl.flower import channel, worker_folder
from fedppl.flower.records import AGREE, ASK, HELLO, read_message, register, to_content
from fedppl.settings import shown
from fedppl.storage import codec
from fedppl.types import DeclarationError

logger = logging.getLogger(__name__)

_SILENCE = 60.0  # seconds without a sign of life, after which a worker hangs
_STARTING = 60.0  # seconds until it listens; it imports afterwards
_STARTERS = (HELLO, AGREE, ASK)  # others end a run: nothing is started for them
_SOURCES = {".py", ".toml", ".json", ".yaml", ".md"}  # what Flower packs
_CODE = (
    "import sys, json; told = json.load(sys.stdin); sys.path[:] = told['path']; "
    "from fedppl.flower.worker import main; main(told)"
)

_workers: list[subprocess.Popen[bytes]] = []  # that this process started: Python warns of those that are forgotten


class _NoWorker(Exception):
    """No worker answers; the text says why."""


def warm_app(
    app: str,
    *,
    folder: str | Path | Callable[[Mapping[str, Any]], str | Path],
    idle: float | Callable[[Mapping[str, Any]], float] = 600.0,
) -> ClientApp:
    """Make a site's Flower app that has a warm worker answer: one process a site, in place of one for each message.

    Parameters
    ----------
    app
        Module and name of what `fedppl.Flower.client_app` returned, like ``"clinics.site:app"``. Put the call of
        `warm_app` into a module of its own, which imports neither that one nor PyMC, and name it in Flower's
        ``pyproject.toml``.
    folder
        The site's folder, the same as `client_app` has.
    idle
        Seconds without a message after which the worker ends, or a function from the node config to them; 0 has no
        worker, and each message is answered in Flower's process.

    Returns
    -------
    flwr.clientapp.ClientApp

    Raises
    ------
    DeclarationError
        If the arguments are not what they should be.

    Examples
    --------
    >>> import fedppl
    >>> app = fedppl.Flower.warm_app("clinics.site:app", folder=lambda config: config["folder"])

    Notes
    -----
    Policy, account and audit log are those of `client_app`, looked at for each message, and so are the data: a worker
    whose data, source files or node config are others is replaced.

    *When this fails.* Where no worker can be started, or one dies, hangs, or cannot see the values of the data (a lazy
    frame), the message is answered in Flower's process, and the site's log says why. Needs Unix sockets; without, that
    is always so.
    """
    if not isinstance(app, str) or app.count(":") != 1 or not all(app.split(":")):
        raise DeclarationError(f"app={shown(app)} must be a module and a name in it, like 'clinics.site:app'.")
    if not (callable(folder) or (isinstance(folder, str | Path) and str(folder))):
        raise DeclarationError(f"folder={shown(folder)} must be a path, or a function from the node config to one.")
    if not callable(idle) and (isinstance(idle, bool) or not isinstance(idle, int | float) or idle < 0):
        raise DeclarationError(f"idle={shown(idle)} must be seconds, 0 or more, or a function from the node config.")

    def reply(message: FlowerMessage, context: Context) -> FlowerMessage:
        config = dict(context.node_config)
        seconds = float(idle(config) if callable(idle) else idle)
        if seconds > 0:
            try:
                site = Path(folder(config) if callable(folder) else folder)
                return FlowerMessage(to_content(*_asked(app, site, seconds, message, config)), reply_to=message)
            except (_NoWorker, OSError, codec.Unreadable) as error:
                logger.warning("no warm worker answers, so this process does: %s", error)
        module, _, name = app.partition(":")
        found: ClientApp = getattr(importlib.import_module(module), name)
        return found(message, context)

    made = ClientApp()
    register(made, reply)
    return made


def _asked(app: str, site: Path, idle: float, message: FlowerMessage, config: dict[str, Any]) -> tuple[Any, Any]:
    """What the worker answers; a stale one is replaced once."""
    if not hasattr(socket, "AF_UNIX"):
        raise _NoWorker("this system has no Unix sockets")
    site.mkdir(parents=True, exist_ok=True)
    arrays, texts = read_message(message)
    kind = message.metadata.message_type
    told = {"app": app, "folder": str(site.absolute()), "idle": idle, "path": sys.path}
    told["identity"] = identity(told, config)
    request = {"identity": told["identity"], "config": config, "kind": kind, "arrays": dict(arrays), "texts": texts}
    raw = codec.encode(request)
    end = time.monotonic() + max(float(message.metadata.ttl), _SILENCE)
    opened = worker_folder.opened(site)
    try:
        for _ in range(3):
            connection = connect(opened, site)
            if connection is None:
                if kind not in _STARTERS:
                    raise _NoWorker("none is running, and none is started to end a run")
                connection = _started(opened, site, told)
            try:
                with connection:
                    found = _heard(connection, raw, end)
            except ConnectionError:  # it has died, or ended between two messages; what it had admitted stays admitted
                found = {"status": "stale"}
            if found["status"] == "done":
                sys.stderr.write(found["log"])
                return found["arrays"], found["texts"]
            if found["status"] != "stale":
                raise _NoWorker(f"its log, {str(site / 'worker' / 'log')!r}, says why")
            time.sleep(0.05)
        raise _NoWorker("three in a row were stale or died")
    finally:
        os.close(opened)


def identity(told: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Digest of what a worker is started with: interpreter, version, app, its source files, node config."""
    head = [sys.executable, version("fedppl"), *(told[name] for name in ("app", "folder", "idle", "path"))]
    state = hashlib.sha256(json.dumps([head, config], sort_keys=True, default=str).encode())
    top = importlib.util.find_spec(told["app"].partition(":")[0].partition(".")[0])
    if top is None or not top.origin:
        raise _NoWorker(f"{told['app']!r} is not found")
    origin = Path(top.origin)
    files = origin.parent.rglob("*") if top.submodule_search_locations else origin.parent.glob("*")
    for file in sorted(one for one in files if one.suffix in _SOURCES and one.is_file()):
        state.update(repr((str(file), hashlib.sha256(file.read_bytes()).hexdigest())).encode())
    return state.hexdigest()


def connect(folder: int, site: Path) -> socket.socket | None:
    """A connection to the worker that both ends have proved, or None where there is none; one that hangs is killed."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_SILENCE)
    try:
        key = worker_folder.read_key(folder)
        connection.connect(worker_folder.address(folder, site))
        try:
            channel.prove(connection, key, first=True, limit=_SILENCE)
        except TimeoutError:
            _kill(connection)
            raise
        connection.settimeout(_SILENCE)
    except OSError as error:
        connection.close()
        if not isinstance(error, FileNotFoundError | ConnectionError):
            logger.warning("the warm worker is replaced: %s", error)
        return None
    return connection


def _started(folder: int, site: Path, told: Mapping[str, Any]) -> socket.socket:
    """Start a worker, unless another app was first, and connect to it."""
    with FileLock(site / "worker" / worker_folder.LOCK, timeout=2 * _STARTING):
        if (connection := connect(folder, site)) is not None:
            return connection
        null = subprocess.DEVNULL
        command = [sys.executable, "-P", "-c", _CODE, "fedppl-worker"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True)
        _workers.append(process)
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(json.dumps(told).encode())
        end = time.monotonic() + _STARTING
        while time.monotonic() < end and process.poll() is None:
            if (connection := connect(folder, site)) is not None:
                return connection
            time.sleep(0.02)
        process.kill()
        raise _NoWorker("it could not be started")


def _heard(connection: socket.socket, raw: bytes, end: float) -> dict[str, Any]:
    """The worker's answer: as long as it gives signs of life, until the message's time is over."""
    channel.send(connection, raw)
    while time.monotonic() < end:
        try:
            found = codec.decode(channel.receive(connection))
        except TimeoutError:
            _kill(connection)
            raise _NoWorker(f"it gave no sign of life for {_SILENCE:g} s, and was killed") from None
        if found["status"] != "alive":
            return dict(found)
    raise RuntimeError("the message's time is over before the warm worker has answered; it goes on computing")


def _kill(connection: socket.socket) -> None:
    """End the process at the other end, which is the one that listens in our own folder."""
    if pid := channel.peer(connection):
        os.kill(pid, signal.SIGKILL)
