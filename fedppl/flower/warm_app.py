"""A site's Flower app that imports nothing heavy: a warm worker of the site answers for it."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from fedppl.flower import channel
from fedppl.flower.channel import identity
from fedppl.flower.records import AGREE, ASK, HELLO, read_message, register, to_content
from fedppl.settings import shown
from fedppl.storage import codec
from fedppl.types import DeclarationError

logger = logging.getLogger(__name__)

_SILENCE = 60.0  # seconds without a sign of life, after which a worker hangs
_BEHIND = 30.0  # seconds behind a request that nobody waits for, after which it is taken to have no end
_STARTING = 60.0  # seconds until it listens; it imports afterwards
_STARTERS = (HELLO, AGREE, ASK)  # others end a run: nothing is started for them
_LOG_BYTES = 20_000  # of a worker that could not be started, its last ones
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
    whose data, source files or node config are others is replaced, and the log says why.

    *When this fails.* Where no worker can be started, or one dies, hangs, or cannot see the values of the data (a lazy
    frame), the message is answered in Flower's process, and the site's log says why. Needs Unix sockets; without, that
    is always so. Source files are those of the package that `app` names first (``clinics``), or beside a module that is
    in none: that other packages changed, a worker does not see, and it has to be ended by hand.
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
            except (_NoWorker, OSError, codec.Unreadable, DeclarationError) as error:  # also: what it cannot be told
                logger.warning("no warm worker answers, so this process does: %s", error)
        module, _, name = app.partition(":")
        found: ClientApp = getattr(importlib.import_module(module), name)
        return found(message, context)

    made = ClientApp()
    register(made, reply)
    return made


def _asked(app: str, site: Path, idle: float, message: FlowerMessage, config: dict[str, Any]) -> tuple[Any, Any]:
    """What the worker answers; one that is stale or dies is replaced, twice at most."""
    if not hasattr(socket, "AF_UNIX"):
        raise _NoWorker("this system has no Unix sockets")
    site.mkdir(mode=0o700, parents=True, exist_ok=True)
    arrays, texts = read_message(message)
    kind = message.metadata.message_type
    told = {"app": app, "folder": str(site.absolute()), "idle": idle, "path": sys.path}
    told["identity"] = identity(told, config)
    request = {"identity": told["identity"], "config": config, "kind": kind, "arrays": dict(arrays), "texts": texts}
    raw = codec.encode(request)
    end = time.monotonic() + max(float(message.metadata.ttl), _SILENCE)
    opened = channel.opened(site)
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
            except ConnectionError as error:  # between two messages, or in one: what it had admitted stays admitted
                found = {"status": "stale", "why": f"it has ended or died ({error})"}
            if found["status"] == "stale":
                logger.warning("the warm worker is replaced: %s", found["why"])
                time.sleep(0.05)
                continue
            sys.stderr.write(found["log"])
            if found["status"] == "done":
                return found["arrays"], found["texts"]
            raise _NoWorker("it failed; what it logged stands above")
        raise _NoWorker(f"three in a row were to be replaced, the last since {found['why']}; {_log(site)} may say more")
    finally:
        os.close(opened)


def connect(folder: int, site: Path) -> socket.socket | None:
    """A connection to the worker that both ends have proved, or None where there is none; one that hangs is killed."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_SILENCE)
    try:
        key = channel.read_key(folder)
        connection.connect(channel.address(folder, site))
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
    with FileLock(site / "worker" / channel.LOCK, timeout=2 * _STARTING):
        if (connection := connect(folder, site)) is not None:
            return connection
        _workers[:] = [one for one in _workers if one.poll() is None]
        log = channel.open_log(folder)
        try:
            return _listening(folder, site, told, log)
        finally:
            os.close(log)


def _listening(folder: int, site: Path, told: Mapping[str, Any], log: int) -> socket.socket:
    """Start a worker that writes to an open log; what hinders it stands there from the beginning."""
    command = [sys.executable, "-u", "-P", "-c", _CODE, "fedppl-worker"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    _workers.append(process)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # it may have ended already
        pipe.write(json.dumps(told, default=str).encode())
    end = time.monotonic() + _STARTING
    while time.monotonic() < end and process.poll() is None:
        if (connection := connect(folder, site)) is not None:
            return connection
        time.sleep(0.02)
    how = f"it ended with exit code {process.poll()} before it listened"
    if process.poll() is None:
        process.kill()
        how = f"it did not listen within {_STARTING:g} s, and was killed"
    last = os.pread(log, _LOG_BYTES, max(0, os.fstat(log).st_size - _LOG_BYTES)).decode(errors="replace")
    raise _NoWorker(f"{how}; {_log(site)} says: {last.strip() or 'nothing'}")


def _log(site: Path) -> str:
    return f"its log, {str(site / 'worker' / 'log')!r},"


def _heard(connection: socket.socket, raw: bytes, end: float) -> dict[str, Any]:
    """The worker's answer: as long as it gives signs of life, until the message's time is over.

    What takes longer than its message lives goes on, since it may be compiling, and the next message finds it done. One
    that has waited long behind such a request, and in vain, ends the worker: there may be no end.
    """
    since: float | None = None  # when it began to be behind one that nobody waits for
    try:
        channel.send(connection, raw)
        while time.monotonic() < end:
            found = codec.decode(channel.receive(connection))
            if found["status"] != "alive":
                return dict(found)
            since = (since or time.monotonic()) if found["behind"] else None
    except TimeoutError:
        killed = ", and was killed" if _kill(connection) else ""
        raise _NoWorker(f"it gave no sign of life for {_SILENCE:g} s{killed}") from None
    what = "it goes on computing"
    if since is not None and time.monotonic() - since > _BEHIND and _kill(connection):
        what = "it was still at an earlier one, which nobody waits for, and was killed"
    raise RuntimeError(f"the message's time is over before the warm worker has answered; {what}")


def _kill(connection: socket.socket) -> bool:
    """End the process at the other end, which is the one that listens in our own folder, if the system tells which."""
    pid = channel.peer(connection)
    if pid:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGKILL)
    return bool(pid)
