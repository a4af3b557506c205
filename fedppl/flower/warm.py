"""A site's Flower app that imports nothing heavy, and has a warm worker of the site answer.

The app and the worker (`worker.py`) talk by frames over a Unix socket, and prove to each other that they know a key. No
pickles. Every wait has the socket's limit: what stands still, or says something else, is an `OSError`.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib
import importlib.util
import json
import logging
import os
import secrets
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock
from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from fedppl.flower.messages import AGREE, ASK, HELLO, read_message, register, to_content
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
    folder = opened(site)
    try:
        for _ in range(3):
            connection = connect(folder, site)
            if connection is None:
                if kind not in _STARTERS:
                    raise _NoWorker("none is running, and none is started to end a run")
                connection = _started(folder, site, told)
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
        os.close(folder)


def connect(folder: int, site: Path) -> socket.socket | None:
    """A connection to the worker that both ends have proved, or None where there is none; one that hangs is killed."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_SILENCE)
    try:
        key = read_key(folder)
        connection.connect(address(folder, site))
        try:
            prove(connection, key, first=True, limit=_SILENCE)
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
    with FileLock(site / "worker" / LOCK, timeout=2 * _STARTING):
        if (connection := connect(folder, site)) is not None:
            return connection
        _workers[:] = [one for one in _workers if one.poll() is None]
        log = open_log(folder)
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
        send(connection, raw)
        while time.monotonic() < end:
            found = codec.decode(receive(connection))
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
    pid = peer(connection)
    if pid:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGKILL)
    return bool(pid)


# Frames over the socket -----------------------------------------------------------------------------------------------

_LENGTH = struct.Struct("<Q")
_NONCE, _PROOF = 32, 32
MOST = 2**31  # bytes of a frame: a message's arrays and texts
_PIECE = 2**20


class Refused(OSError):
    """The other end does not know the key, or is of another user."""


def send(connection: socket.socket, raw: bytes) -> None:
    """Send a frame."""
    connection.sendall(_LENGTH.pack(len(raw)) + raw)


def receive(connection: socket.socket, most: int = MOST) -> bytes:
    """Receive a frame; one that says that it is longer than `most` is refused before anything is allocated."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > most:
        raise OSError(f"a frame of {length} bytes, expected {most} at most")
    return _exactly(connection, length)


def prove(connection: socket.socket, key: bytes, *, first: bool, limit: float) -> None:
    """Prove that both ends know the key, within `limit` seconds in all; who connects is `first`, and proves last.

    Raises `Refused` if the other end does not know it.
    """
    own, end = secrets.token_bytes(_NONCE), time.monotonic() + limit
    if first:
        connection.sendall(own)
        nonce, proof = _exactly(connection, _NONCE, end), _exactly(connection, _PROOF, end)
        _require(proof, key, b"worker" + own + nonce)
        connection.sendall(hmac.digest(key, b"app" + own + nonce, "sha256"))
        return
    nonce = _exactly(connection, _NONCE, end)
    connection.sendall(own + hmac.digest(key, b"worker" + nonce + own, "sha256"))
    _require(_exactly(connection, _PROOF, end), key, b"app" + nonce + own)


def is_closed(connection: socket.socket) -> bool:
    """Whether one of the ends has closed the connection; it does not wait."""
    if connection.fileno() < 0:
        return True
    try:
        look = select.poll()
        look.register(connection, select.POLLIN)
        return bool(look.poll(0)) and connection.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):  # closed by another thread in between
        return True


def peer(connection: socket.socket) -> int:
    """Process id of the other end, 0 where the system does not tell; that of another user is refused."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return 0
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    if user != os.geteuid():
        raise Refused(f"the other end is of user {user}, expected {os.geteuid()}")
    return int(pid)


def _require(proof: bytes, key: bytes, told: bytes) -> None:
    if not hmac.compare_digest(proof, hmac.digest(key, told, "sha256")):
        raise Refused("the other end does not know the key")


def _exactly(connection: socket.socket, length: int, end: float | None = None) -> bytes:
    """So many bytes, until a time of the clock; without one, a socket that says a byte now and then is waited for."""
    found = bytearray()
    while len(found) < length:
        if end is not None:
            connection.settimeout(max(end - time.monotonic(), 1e-3))
        piece = connection.recv(min(_PIECE, length - len(found)))
        if not piece:
            raise ConnectionError("the other end has closed the connection")
        found += piece
    return bytes(found)


# What a warm worker was started with, part by part: a change is seen, and named in the log ----------------------------

_SOURCES = {".py", ".toml", ".json", ".yaml", ".md"}  # what Flower packs
_NAMED = 3  # changes


def identity(told: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """Digests of interpreter, version, what a worker is told, node config, and source files of the app's top package.

    Raises `DeclarationError` if the package is not found.
    """
    values = {
        "interpreter": sys.executable,
        "version of fedppl": version("fedppl"),
        **{name: told[name] for name in ("app", "folder", "idle", "path")},
        "node config": dict(config),
    }
    found = {name: _digest(json.dumps(each, sort_keys=True, default=str).encode()) for name, each in values.items()}
    return found | {str(file): _digest(file.read_bytes()) for file in _sources(told["app"], Path(told["folder"]))}


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What is another, in words."""
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more} changed"


def _sources(app: str, site: Path) -> Iterator[Path]:
    """Files of the package, or beside the module, but for those that the site writes: its account, at each message."""
    top = app.partition(":")[0].partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # of a module without a spec, such as __main__
        spec = None
    if spec is None or not (spec.has_location or spec.submodule_search_locations):
        raise DeclarationError(f"app={app!r}: no file or folder of {top!r} is found; name a module that is installed.")
    packages = spec.submodule_search_locations  # several where the parts of a package have no __init__.py
    for where in packages or [str(Path(str(spec.origin)).parent)]:
        folder, own = Path(where), site.resolve()
        if folder.resolve().is_relative_to(own):
            own /= "ledger.json"
        for file in sorted(folder.rglob("*") if packages else folder.glob("*")):
            if file.suffix in _SOURCES and file.is_file() and not file.resolve().is_relative_to(own):
                yield file


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


# The folder of a site's warm worker, `worker` in the site's folder: key, socket and log, its owner's alone ------------

KEY, SOCKET, LOG, LOCK = "key", "socket", "log", "start.lock"
_KEY_BYTES = 32
_LONGEST = 100  # bytes of a socket's path; systems allow 104 to 108


def opened(site: Path) -> int:
    """Make the folder where it is missing and open it; a link, or one that others may enter, is refused."""
    path = site / "worker"
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _require_own(descriptor, str(path))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def address(folder: int, site: Path) -> str:
    """Path of the socket that is short enough: by the open folder where the system has such paths."""
    path = str((site / "worker" / SOCKET).absolute())
    by_folder = f"/proc/self/fd/{folder}"
    if os.path.isdir(by_folder):
        return f"{by_folder}/{SOCKET}"
    if len(os.fsencode(path)) > _LONGEST:
        raise OSError(f"{path!r} is longer than the {_LONGEST} bytes that a socket's path may have; shorten folder=")
    return path


def make_key(folder: int) -> bytes:
    """Write a new random key in place of the old one, which ends the worker that has the old one."""
    key, beside = secrets.token_bytes(_KEY_BYTES), f"{KEY}.{secrets.token_hex(8)}"
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    with open(descriptor, "wb") as file:
        file.write(key)
    os.replace(beside, KEY, src_dir_fd=folder, dst_dir_fd=folder)
    return key


def read_key(folder: int) -> bytes:
    """Read the key; FileNotFoundError where there is none."""
    descriptor = os.open(KEY, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with open(descriptor, "rb") as file:
        _require_own(descriptor, KEY)
        key = file.read(_KEY_BYTES + 1)
    if len(key) != _KEY_BYTES:
        raise OSError(f"the worker's key has {len(key)} bytes, expected {_KEY_BYTES}")
    return key


def open_log(folder: int) -> int:
    """Open the worker's log anew, to write and to read."""
    how = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(LOG, how, 0o600, dir_fd=folder)
    _require_own(descriptor, LOG)
    return descriptor


def remove(folder: int) -> None:
    """Take key and socket away, so that nobody connects."""
    for name in (KEY, SOCKET):
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass


def is_there(folder: int, site: Path, key: bytes) -> bool:
    """Whether folder and key are still those of this worker."""
    try:
        named = os.stat(site / "worker", follow_symlinks=False)
        return os.path.samestat(named, os.fstat(folder)) and read_key(folder) == key
    except OSError:
        return False


def _require_own(descriptor: int, name: str) -> None:
    found = os.fstat(descriptor)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise OSError(f"{name!r} is neither a file nor a folder; delete it")
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise OSError(f"{name!r} is of another user or open to others; delete it, and a new one is made")
