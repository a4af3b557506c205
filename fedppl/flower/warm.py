"""One process a site: a worker keeps the app imported and its model compiled; Flower's app for a message asks it.

The worker answers by the functions by which the app would, under the same policy, account and log. Its socket is a
file, both ends prove that they know a key, and nothing that comes over it is unpickled. The listener and client of
`multiprocessing.connection` wait for a connection, its turn and its proof without a limit, so that one that says
nothing would hold a worker for good: their messages and proofs are used here over sockets with limits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.context import AuthenticationError
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock
from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from fedppl.flower.messages import read_message, register, to_content
from fedppl.settings import shown
from fedppl.storage import codec
from fedppl.storage.signed import open_to_write, replace
from fedppl.types import DeclarationError

logger = logging.getLogger(__name__)

KEY, LOG, LOCK = "key", "log", "start.lock"  # in the worker's folder
_MOST = 2**31  # bytes of a request or an answer
_LEAST = 60.0  # seconds that a message waits for an answer, however little time it has
_STARTING = 60.0  # seconds until a worker listens; it imports the app afterwards
_PROOFS = 10.0  # seconds in all, until the other end has proved that it knows the key
_PATIENCE = 60.0  # seconds in all, for a request to come and for an answer to be read
_TICK = 1.0  # seconds after which a worker without a message looks whether it is to end
_CONNECTIONS = 16  # that wait for their turn
_LOG_BYTES = 2**20  # the first of a request, or the last of a worker that does not answer, that go to the app's log
_STDERR = 2  # the worker's log: another file may have its path by now
_PREFIX = "fedppl-"  # of the temporary folder of a socket, whose path must be short
_SOURCES = {".py", ".toml", ".yaml"}
_COMMAND = (sys.executable, "-u", "-P", "-m", "fedppl.flower.warm")
# By what stands in a door, or comes from the other end.
_BROKEN = (OSError, EOFError, AuthenticationError, AssertionError, TypeError, ValueError, LookupError)

_workers: list[subprocess.Popen[bytes]] = []  # started by this process: Python warns of processes that are forgotten


class Door(NamedTuple):
    """Content of the file `key`: how to reach the worker, and what it was started of."""

    address: str
    key: str
    pid: int
    fingerprint: str


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
        Seconds without a message after which the worker ends (``float("inf")`` keeps it), or a function from the node
        config to them; 0 has no worker, and each message is answered in Flower's process.

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
    if not callable(idle) and (isinstance(idle, bool) or not isinstance(idle, int | float) or not idle >= 0):
        raise DeclarationError(f"idle={shown(idle)} must be seconds, 0 or more, or a function from the node config.")

    def reply(message: FlowerMessage, context: Context) -> FlowerMessage:
        config = dict(context.node_config)
        seconds = float(idle(config) if callable(idle) else idle)
        if seconds > 0:
            try:
                site = Path(folder(config) if callable(folder) else folder)
                return FlowerMessage(to_content(*_asked(app, site, seconds, message, config)), reply_to=message)
            except _BROKEN as error:
                logger.warning("no warm worker answers, so this process does: %s", error)
        return _named(app)(message, context)

    app_made = ClientApp()
    register(app_made, reply)
    return app_made


def _named(app: str) -> ClientApp:
    module, _, name = app.partition(":")
    site_app: ClientApp = getattr(importlib.import_module(module), name)
    return site_app


# Both ends ------------------------------------------------------------------------------------------------------------


def opened(site: Path) -> Path:
    """The worker's folder in the site's, made if missing; a link, or a folder that others may enter, is refused."""
    folder = site / "worker"
    site.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_ours(folder):
        raise OSError(f"{str(folder)!r} is a link, of another user or open to others; delete it, and a new one is made")
    return folder


def _is_ours(folder: Path) -> bool:
    """Whether a folder is this user's, and nobody else may enter it."""
    status = os.stat(folder, follow_symlinks=False)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def read_door(folder: Path) -> Door | None:
    """Read the file `key`; None where there is none."""
    try:
        return Door(**json.loads((folder / KEY).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


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


# The app's end --------------------------------------------------------------------------------------------------------


def _asked(app: str, site: Path, idle: float, message: FlowerMessage, config: dict[str, Any]) -> tuple[Any, Any]:
    """The worker's answer; one is started where there is none, or that of another app."""
    if not hasattr(socket, "AF_UNIX"):
        raise ConnectionError("this system has no Unix sockets")
    folder = opened(site)
    arrays, texts = read_message(message)
    kind, mark = message.metadata.message_type, fingerprint(app, idle)
    seconds = max(float(message.metadata.ttl), _LEAST)
    end = time.monotonic() + seconds  # of the system's clock, the same in all processes
    content = {"config": config, "kind": kind, "arrays": dict(arrays), "texts": texts, "killed_at": end + seconds}
    request = codec.encode(content)
    connection, door = reach(folder, mark) or start(folder, app, idle, mark)
    with connection, limited(connection, end - time.monotonic()) as over:
        try:
            greet(connection, door)
            connection.send_bytes(request)
            reply = codec.decode(connection.recv_bytes(_MOST))
            answer, log = (reply["arrays"], reply["texts"]), reply["log"]
        except _BROKEN as error:
            if over.is_set():  # not answered here: it may be compiling, which the next message finds done
                what = "the message's time is over before the warm worker has answered, which goes on computing"
                raise RuntimeError(f"{what}: raise deadline= at the server") from error
            # A request that it had admitted stays admitted.
            raise ConnectionError(f"it failed or died ({type(error).__name__}: {error}); {_said(folder)}") from error
    sys.stderr.write(log)
    return answer


def greet(connection: Connection, door: Door) -> None:
    """Prove to a worker that this end knows its key, and have it prove the same; raises AuthenticationError."""
    answer_challenge(connection, bytes.fromhex(door.key))
    deliver_challenge(connection, bytes.fromhex(door.key))


def reach(folder: Path, mark: str) -> tuple[Connection, Door] | None:
    """A connection to the worker with this fingerprint; None where there is none."""
    door = read_door(folder)
    if door is None or door.fingerprint != mark:
        return None
    with socket.socket(socket.AF_UNIX) as end:
        end.setblocking(False)  # where more wait than it lets wait, to connect fails at once
        try:
            if not _is_ours(Path(door.address).parent):  # of a worker that has ended anybody may take the place
                return None
            end.connect(door.address)
        except (FileNotFoundError, ConnectionRefusedError):  # it has ended
            return None
        end.setblocking(True)
        return Connection(end.detach()), door


def start(folder: Path, app: str, idle: float, mark: str) -> tuple[Connection, Door]:
    """Start a worker, unless another process was first, and connect to it."""
    with FileLock(folder / LOCK, timeout=2 * _STARTING):
        if reached := reach(folder, mark):
            return reached
        _workers[:] = [process for process in _workers if process.poll() is None]
        command = [*_COMMAND, app, str(folder.parent.absolute()), repr(idle), mark]
        path = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
        with open_to_write(folder / LOG, os.O_TRUNC | os.O_APPEND) as log:
            process = subprocess.Popen(
                command, env=path, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        _workers.append(process)
        end = time.monotonic() + _STARTING
        while time.monotonic() < end and process.poll() is None:
            if reached := reach(folder, mark):
                return reached
            time.sleep(0.02)
        process.kill()
        raise ConnectionError(f"it did not listen, exit code {process.wait()}; {_said(folder)}")


def _said(folder: Path) -> str:
    log = folder / LOG
    last = log.read_bytes()[-_LOG_BYTES:].decode(errors="replace").strip() if log.exists() else ""
    return f"its log, {str(log)!r}, says: {last or 'nothing'}"


def fingerprint(app: str, idle: float) -> str:
    """Digest of what a worker depends on: interpreter, version, options, and source files of the package or beside."""
    top = app.partition(":")[0].partition(".")[0]
    if (spec := importlib.util.find_spec(top)) is None:
        raise ModuleNotFoundError(f"app={app!r}: no module {top!r} is found; name one that is installed", name=top)
    packages = spec.submodule_search_locations  # several where the parts of a package have no __init__.py
    folders = [Path(each) for each in packages or [str(Path(str(spec.origin)).parent)]]
    files = sorted(file for folder in folders for file in folder.glob("**/*" if packages else "*"))
    state = hashlib.sha256(repr([sys.executable, version("fedppl"), app, float(idle), sys.path]).encode())
    for file in files:
        if file.suffix in _SOURCES and file.is_file():
            state.update(f"{file}\0{hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return state.hexdigest()


# The worker -----------------------------------------------------------------------------------------------------------


def serve(app: str, site: str, idle: float, mark: str) -> None:
    """Answer one message after the other, until none has come for `idle` seconds or the file `key` is not its own."""
    folder = opened(Path(site))
    private = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)  # only its owner may enter it
    listening = socket.socket(socket.AF_UNIX)  # left open: the log has a traceback before who waits hears of an end
    with private:
        door = Door(f"{private.name}/socket", secrets.token_hex(32), os.getpid(), mark)
        try:
            listening.bind(door.address)
        except OSError as error:
            where = f"no socket in {private.name!r}: {error}"
            raise OSError(f"{where}; set TMPDIR to a folder with a shorter path") from error
        listening.listen(_CONNECTIONS)
        listening.settimeout(_TICK)
        old = read_door(folder)
        replace(folder / KEY, json.dumps(door._asdict()).encode())
        if old and Path(old.address).parent.name.startswith(_PREFIX):  # a worker that was killed has left it
            shutil.rmtree(Path(old.address).parent, ignore_errors=True)
        try:
            from fedppl.flower.apps import declared  # after the socket is there: it takes seconds

            if (site_app := _named(app)) not in declared:
                is_none = f"app={app!r} is {shown(site_app)}"
                raise DeclarationError(f"{is_none}; name what fedppl.Flower.client_app returned.")
            latest = time.monotonic()
            while read_door(folder) == door and time.monotonic() - latest < idle:
                with contextlib.suppress(TimeoutError):
                    accepted, _ = listening.accept()
                    with Connection(accepted.detach()) as connection:
                        _answer(connection, door, declared[site_app], folder)
                    latest = time.monotonic()
        finally:
            if read_door(folder) == door:  # who comes from here on has a new worker
                (folder / KEY).unlink(missing_ok=True)


def _answer(connection: Connection, door: Door, node_of: Callable[[Mapping[str, Any]], Any], folder: Path) -> None:
    """Answer a request. After an error without an answer the app answers by itself."""
    from fedppl.sites.conclusions import answer

    try:
        with limited(connection, _PROOFS):
            deliver_challenge(connection, bytes.fromhex(door.key))
            answer_challenge(connection, bytes.fromhex(door.key))
        with limited(connection, _PATIENCE):
            request = codec.decode(connection.recv_bytes(_MOST))
        start, kind, config = os.fstat(_STDERR).st_size, request["kind"], request["config"]
        # What hangs is killed when its message could have been answered twice, whatever holds the interpreter.
        faulthandler.dump_traceback_later(max(_TICK, request["killed_at"] - time.monotonic()), exit=True)
        here = node_of(config)
        if here.folder is None or not os.path.samefile(here.folder, folder.parent):
            raise ValueError(f"client_app has the folder {here.folder}, warm_app {folder.parent}; name one in both")
        load = functools.cache(lambda: here.load_data(config))
        if not connection.poll(0):  # loading may take long, and what comes after it counts the request
            with contextlib.suppress(Exception):  # raised again where the site looks at its data
                load()
        if connection.poll(0):
            logger.warning("the connection of a request (%s) is closed; it is neither computed nor counted", kind)
            return
        loaded = here._replace(load_data=lambda config: load())
        arrays, texts = answer(kind, loaded, config, None, (request["arrays"], request["texts"]))
        log = os.pread(_STDERR, _LOG_BYTES, start).decode(errors="replace")
        with limited(connection, _PATIENCE):
            connection.send_bytes(codec.encode({"arrays": dict(arrays), "texts": dict(texts), "log": log}))
    except Exception:
        logger.exception("the warm worker does not answer")
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4])
    os._exit(0)  # without waiting for threads and pools of libraries
