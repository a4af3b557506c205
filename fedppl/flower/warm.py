"""A site's Flower app that imports nothing heavy: a warm worker of the site (`worker.py`) answers for it."""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.context import AuthenticationError
from pathlib import Path
from typing import Any

from filelock import FileLock
from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from fedppl.flower.messages import read_message, register, to_content
from fedppl.flower.worker import LOCK, LOG, MOST, Door, clear, limited, opened, overdue, read_door
from fedppl.settings import shown
from fedppl.sites import AGREE, ASK, GATE, GREET, HELLO, JOIN
from fedppl.storage import codec
from fedppl.storage.signed import open_to_write
from fedppl.types import DeclarationError

logger = logging.getLogger(__name__)

_LEAST = 60.0  # seconds that a message waits for an answer, however little time it has
_STARTING = 60.0  # seconds until a worker listens; it imports afterwards
_STARTERS = (HELLO, AGREE, GREET, JOIN, GATE, ASK)  # types of messages for which a worker is started; others end a run
_LOG_BYTES = 20_000  # the last ones, of a worker that does not answer
_SOURCES = {".py", ".toml", ".yaml"}
_CODE = (
    "import sys, json; options = json.load(sys.stdin); sys.path[:] = options['path']; "
    "from fedppl.flower.worker import main; main(options)"
)

# By what stands in a door, or comes from the other end.
_BROKEN = (OSError, EOFError, AuthenticationError, AssertionError, TypeError, ValueError)

_workers: list[subprocess.Popen[bytes]] = []  # started by this process: Python warns of processes that are forgotten


class _NoWorker(Exception):
    """No worker answers; the text says why."""


def warm_app(
    app: str,
    *,
    folder: str | Path | Callable[[Mapping[str, Any]], str | Path],
    idle: float | Callable[[Mapping[str, Any]], float] = 600.0,
) -> ClientApp:
    """Make a site's Flower app whose messages a warm worker answers: one process a site, not one for each message.

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
    Policy, account, audit log and data are those of `client_app`, read anew for each message. A worker whose source
    files or options have changed is replaced.

    *When this fails.* If no worker can be started, or one dies, Flower's process answers the message, and the site's
    log says why. Without Unix sockets that is always so. Source files (``.py``, ``.toml``, ``.yaml``) are those of the
    package that `app` names first (``clinics``), or those beside a module without a package. Changes in other packages
    are not seen: end the worker by hand.
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
            except (_NoWorker, *_BROKEN) as error:
                logger.warning("no warm worker answers, so this process does: %s", error)
        module, _, name = app.partition(":")
        site_app: ClientApp = getattr(importlib.import_module(module), name)
        return site_app(message, context)

    app_made = ClientApp()
    register(app_made, reply)
    return app_made


def _asked(app: str, site: Path, idle: float, message: FlowerMessage, config: dict[str, Any]) -> tuple[Any, Any]:
    """The answer of the worker, which is started where there is none, or that of another app.

    A computation that outlives its message goes on, as it may be compiling; one behind which another expires is killed.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise _NoWorker("this system has no Unix sockets")
    folder = opened(site)
    arrays, texts = read_message(message)
    kind = message.metadata.message_type
    options: dict[str, Any] = {"app": app, "folder": str(site.absolute()), "idle": idle, "path": sys.path}
    options["digest"] = digest(options)
    end = time.monotonic() + max(float(message.metadata.ttl), _LEAST)
    request = codec.encode({"config": config, "kind": kind, "arrays": dict(arrays), "texts": texts, "end": end})
    if (reached := reach(folder, options["digest"])) is None:
        if kind not in _STARTERS:
            raise _NoWorker("none is running, and none is started to end a run")
        reached = start(folder, options)
    connection, door = reached
    greeted = False
    with connection, limited(connection, end - time.monotonic()) as over:
        try:
            greet(connection, door)
            greeted = True
            connection.send_bytes(request)
            reply = codec.decode(connection.recv_bytes(MOST))
        except _BROKEN as error:  # a request that it had admitted stays admitted
            if not over.is_set():
                raise _NoWorker(f"it failed or died ({type(error).__name__}: {error}); {_said(folder)}") from error
            what = f"it {'goes on computing' if greeted else 'has not come to it'}: raise deadline= at the server"
            if not greeted and overdue(door):
                _kill(door)
                what = "still at an earlier one, whose time is over too, it was killed; a later message starts another"
            raise RuntimeError(f"the message's time is over before the warm worker has answered; {what}") from error
    sys.stderr.write(reply["log"])
    return reply["arrays"], reply["texts"]


def reach(folder: Path, app: str) -> tuple[Connection, Door] | None:
    """A connection to the worker with this digest; None where there is none."""
    if (door := read_door(folder)) is None or door.app != app:
        return None
    connection = _connected(door)
    return None if connection is None else (connection, door)


def _connected(door: Door) -> Connection | None:
    with socket.socket(socket.AF_UNIX) as end:
        end.setblocking(False)
        try:
            end.connect(door.address)
        except BlockingIOError:  # it has more that wait than it lets wait
            raise
        except OSError:  # it has ended
            return None
        end.setblocking(True)
        return Connection(end.detach())


def greet(connection: Connection, door: Door) -> None:
    """Prove to a worker that this end knows its key, and have it prove the same; raises AuthenticationError."""
    connection.recv_bytes(0)
    deliver_challenge(connection, bytes.fromhex(door.key))
    answer_challenge(connection, bytes.fromhex(door.key))


def start(folder: Path, options: Mapping[str, Any]) -> tuple[Connection, Door]:
    """Start a worker, unless another process was first, and connect to it."""
    with FileLock(folder / LOCK, timeout=2 * _STARTING):
        if reached := reach(folder, options["digest"]):
            return reached
        _retire(folder)
        _workers[:] = [process for process in _workers if process.poll() is None]
        with open_to_write(folder / LOG, os.O_TRUNC | os.O_APPEND) as log:
            command = [sys.executable, "-u", "-P", "-c", _CODE, "fedppl-worker"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        _workers.append(process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # it may have ended already
            pipe.write(json.dumps(options, default=str).encode())
        end = time.monotonic() + _STARTING
        while time.monotonic() < end and process.poll() is None:
            if reached := reach(folder, options["digest"]):
                return reached
            time.sleep(0.02)
        process.kill()
        raise _NoWorker(f"it did not listen, exit code {process.wait()}; {_said(folder)}")


def _retire(folder: Path) -> None:
    """Delete what a worker that died has left, and kill one of another digest at which nobody waits."""
    if (old := read_door(folder)) is None:
        return
    if connection := _connected(old):
        connection.close()
        if not overdue(old):
            logger.warning("the warm worker, process %d, is replaced, and ends after what it computes", old.pid)
            return
        _kill(old)
    clear(old)


def _kill(door: Door) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(door.pid, signal.SIGKILL)


def _said(folder: Path) -> str:
    log = folder / LOG
    last = log.read_bytes()[-_LOG_BYTES:].decode(errors="replace").strip() if log.exists() else ""
    return f"its log, {str(log)!r}, says: {last or 'nothing'}"


def digest(options: Mapping[str, Any]) -> str:
    """Digest of all that a worker depends on: interpreter, version, options, source files of the app's top package."""
    state = hashlib.sha256(json.dumps([sys.executable, version("fedppl"), dict(options)], default=str).encode())
    for file in _sources(options["app"]):
        state.update(f"{file}\0{hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return state.hexdigest()


def _sources(app: str) -> Iterator[Path]:
    """Source files of the package, or beside the module."""
    top = app.partition(":")[0].partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # of a module without a spec, such as __main__
        spec = None
    if spec is None or not (spec.has_location or spec.submodule_search_locations):
        raise DeclarationError(f"app={app!r}: no file or folder of {top!r} is found; name a module that is installed.")
    packages = spec.submodule_search_locations  # several where the parts of a package have no __init__.py
    for folder in map(Path, packages or [str(Path(str(spec.origin)).parent)]):
        for file in sorted(folder.rglob("*") if packages else folder.glob("*")):
            if file.suffix in _SOURCES and file.is_file():
                yield file
