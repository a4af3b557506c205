"""A site's Flower app that imports nothing heavy: a warm worker of the site (`worker.py`) answers for it.

The two exchange frames over a Unix socket, without pickles, and prove to each other that they know a key. Every wait
has a time limit; a stalled connection or a malformed frame is an `OSError`.
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

ALIVE, STALE, FAILED, DONE = "alive", "stale", "failed", "done"  # statuses of a worker's frames
_SILENCE = 60.0  # seconds without a sign of life, after which a worker is taken to hang
_BEHIND = 30.0  # seconds behind a request that nobody waits for, after which that one is taken to have no end
_STARTING = 60.0  # seconds until a worker listens; it imports afterwards
_STARTERS = (HELLO, AGREE, ASK)  # types of messages for which a worker is started; others end a run
_LOG_BYTES = 20_000  # the last ones, of a worker that could not be started
_CODE = (
    "import sys, json; options = json.load(sys.stdin); sys.path[:] = options['path']; "
    "from fedppl.flower.worker import main; main(options)"
)

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
    Policy, account and audit log are those of `client_app`, read anew for each message, and so are the data. A worker
    whose data, source files or node config have changed is replaced, and the log says why.

    *When this fails.* If no worker can be started, or one dies, hangs, or cannot see the values of the data (a lazy
    frame), Flower's process answers the message, and the site's log says why. Without Unix sockets that is always so.
    Source files are those of the package that `app` names first (``clinics``), or those beside a module without a
    package. Changes in other packages are not seen: end the worker by hand.
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
            except (_NoWorker, OSError, codec.Unreadable, DeclarationError) as error:
                logger.warning("no warm worker answers, so this process does: %s", error)
        module, _, name = app.partition(":")
        site_app: ClientApp = getattr(importlib.import_module(module), name)
        return site_app(message, context)

    app_made = ClientApp()
    register(app_made, reply)
    return app_made


def _asked(app: str, site: Path, idle: float, message: FlowerMessage, config: dict[str, Any]) -> tuple[Any, Any]:
    """The worker's answer; a worker that is stale or dies is replaced, twice at most."""
    if not hasattr(socket, "AF_UNIX"):
        raise _NoWorker("this system has no Unix sockets")
    site.mkdir(mode=0o700, parents=True, exist_ok=True)
    arrays, texts = read_message(message)
    kind = message.metadata.message_type
    options = {"app": app, "folder": str(site.absolute()), "idle": idle, "path": sys.path}
    options["identity"] = identity(options, config)
    request = {"identity": options["identity"], "config": config, "kind": kind, "arrays": dict(arrays), "texts": texts}
    raw = codec.encode(request)
    end = time.monotonic() + max(float(message.metadata.ttl), _SILENCE)
    folder = opened(site)
    try:
        for _ in range(3):
            connection = connect(folder, site)
            if connection is None:
                if kind not in _STARTERS:
                    raise _NoWorker("none is running, and none is started to end a run")
                connection = _started(folder, site, options)
            try:
                with connection:
                    answer = _heard(connection, raw, end)
            except ConnectionError as error:  # a request that it had admitted stays admitted
                answer = {"status": STALE, "why": f"it has ended or died ({error})"}
            if answer["status"] == STALE:
                logger.warning("the warm worker is replaced: %s", answer["why"])
                time.sleep(0.05)
                continue
            sys.stderr.write(answer["log"])
            if answer["status"] == DONE:
                return answer["arrays"], answer["texts"]
            raise _NoWorker("it failed; what it logged stands above")
        raise _NoWorker(
            f"three in a row were to be replaced, the last since {answer['why']}; {_log(site)} may say more"
        )
    finally:
        os.close(folder)


def connect(folder: int, site: Path) -> socket.socket | None:
    """A connection to the worker after both proofs, or None where there is none; a worker that hangs is killed."""
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


def _started(folder: int, site: Path, options: Mapping[str, Any]) -> socket.socket:
    """Start a worker, unless another process was first, and connect to it."""
    with FileLock(site / "worker" / LOCK, timeout=2 * _STARTING):
        if (connection := connect(folder, site)) is not None:
            return connection
        _workers[:] = [process for process in _workers if process.poll() is None]
        log = open_log(folder)
        try:
            return _listening(folder, site, options, log)
        finally:
            os.close(log)


def _listening(folder: int, site: Path, options: Mapping[str, Any], log: int) -> socket.socket:
    """Start a worker that writes to an open log, and connect to it when it listens."""
    command = [sys.executable, "-u", "-P", "-c", _CODE, "fedppl-worker"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    _workers.append(process)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # it may have ended already
        pipe.write(json.dumps(options, default=str).encode())
    end = time.monotonic() + _STARTING
    while time.monotonic() < end and process.poll() is None:
        if (connection := connect(folder, site)) is not None:
            return connection
        time.sleep(0.02)
    reason = f"it ended with exit code {process.poll()} before it listened"
    if process.poll() is None:
        process.kill()
        reason = f"it did not listen within {_STARTING:g} s, and was killed"
    last = os.pread(log, _LOG_BYTES, max(0, os.fstat(log).st_size - _LOG_BYTES)).decode(errors="replace")
    raise _NoWorker(f"{reason}; {_log(site)} says: {last.strip() or 'nothing'}")


def _log(site: Path) -> str:
    return f"its log, {str(site / 'worker' / 'log')!r},"


def _heard(connection: socket.socket, raw: bytes, end: float) -> dict[str, Any]:
    """Wait for the worker's answer while it gives signs of life, until the message expires.

    A computation that outlives its message goes on, since it may be compiling, and the next message finds it done. But
    a message that expires after a long wait behind such a computation kills the worker: it may never end.
    """
    behind_since: float | None = None  # a request that nobody waits for
    try:
        send(connection, raw)
        while time.monotonic() < end:
            answer = codec.decode(receive(connection))
            if answer["status"] != ALIVE:
                return dict(answer)
            behind_since = (behind_since or time.monotonic()) if answer["behind"] else None
    except TimeoutError:
        killed = ", and was killed" if _kill(connection) else ""
        raise _NoWorker(f"it gave no sign of life for {_SILENCE:g} s{killed}") from None
    what = "it goes on computing"
    if behind_since is not None and time.monotonic() - behind_since > _BEHIND and _kill(connection):
        what = "it was still at an earlier one, which nobody waits for, and was killed"
    raise RuntimeError(f"the message's time is over before the warm worker has answered; {what}")


def _kill(connection: socket.socket) -> bool:
    """Kill the process at the other end, which listens in the site's own folder, if the system tells its id."""
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
    """Receive a frame; one that declares more than `most` bytes is refused before anything is allocated."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > most:
        raise OSError(f"a frame of {length} bytes, expected {most} at most")
    return _exactly(connection, length)


def prove(connection: socket.socket, key: bytes, *, first: bool, limit: float) -> None:
    """Prove that both ends know the key, within `limit` seconds; the connecting end is `first`, and proves last.

    Raises `Refused` if the other end does not know the key.
    """
    nonce, end = secrets.token_bytes(_NONCE), time.monotonic() + limit
    if first:
        connection.sendall(nonce)
        theirs, proof = _exactly(connection, _NONCE, end), _exactly(connection, _PROOF, end)
        _require(proof, key, b"worker" + nonce + theirs)
        connection.sendall(hmac.digest(key, b"app" + nonce + theirs, "sha256"))
        return
    theirs = _exactly(connection, _NONCE, end)
    connection.sendall(nonce + hmac.digest(key, b"worker" + theirs + nonce, "sha256"))
    _require(_exactly(connection, _PROOF, end), key, b"app" + theirs + nonce)


def is_closed(connection: socket.socket) -> bool:
    """Whether either end has closed the connection; does not wait."""
    if connection.fileno() < 0:
        return True
    try:
        look = select.poll()
        look.register(connection, select.POLLIN)
        return bool(look.poll(0)) and connection.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):  # closed by another thread in between
        return True


def peer(connection: socket.socket) -> int:
    """Process id of the other end, 0 where the system does not tell; raises `Refused` for another user's process."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return 0
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    if user != os.geteuid():
        raise Refused(f"the other end is of user {user}, expected {os.geteuid()}")
    return int(pid)


def _require(proof: bytes, key: bytes, message: bytes) -> None:
    if not hmac.compare_digest(proof, hmac.digest(key, message, "sha256")):
        raise Refused("the other end does not know the key")


def _exactly(connection: socket.socket, length: int, end: float | None = None) -> bytes:
    """Receive `length` bytes before the time `end`; without it only each piece has the socket's time limit."""
    received = bytearray()
    while len(received) < length:
        if end is not None:
            connection.settimeout(max(end - time.monotonic(), 1e-3))
        piece = connection.recv(min(_PIECE, length - len(received)))
        if not piece:
            raise ConnectionError("the other end has closed the connection")
        received += piece
    return bytes(received)


# What a worker depends on: a change of any part replaces it, and the log names the part -------------------------------

_SOURCES = {".py", ".toml", ".json", ".yaml", ".md"}  # what Flower packs
_NAMED = 3  # changes


def identity(options: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """Digests of interpreter, version, a worker's options, node config, and source files of the app's top package.

    Raises `DeclarationError` if the package is not found.
    """
    values = {
        "interpreter": sys.executable,
        "version of fedppl": version("fedppl"),
        **{name: options[name] for name in ("app", "folder", "idle", "path")},
        "node config": dict(config),
    }
    digests = {name: _digest(json.dumps(value, sort_keys=True, default=str).encode()) for name, value in values.items()}
    return digests | {
        str(file): _digest(file.read_bytes()) for file in _sources(options["app"], Path(options["folder"]))
    }


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Which digests differ, in words."""
    names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more} changed"


def _sources(app: str, site: Path) -> Iterator[Path]:
    """Source files of the package, or beside the module, without those that the site itself writes."""
    top = app.partition(":")[0].partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # of a module without a spec, such as __main__
        spec = None
    if spec is None or not (spec.has_location or spec.submodule_search_locations):
        raise DeclarationError(f"app={app!r}: no file or folder of {top!r} is found; name a module that is installed.")
    packages = spec.submodule_search_locations  # several where the parts of a package have no __init__.py
    for where in packages or [str(Path(str(spec.origin)).parent)]:
        folder, site_folder = Path(where), site.resolve()
        if folder.resolve().is_relative_to(site_folder):
            site_folder /= "ledger.json"
        for file in sorted(folder.rglob("*") if packages else folder.glob("*")):
            if file.suffix in _SOURCES and file.is_file() and not file.resolve().is_relative_to(site_folder):
                yield file


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


# The worker's folder, `worker` in the site's folder: key, socket and log, which only their owner may read -------------

KEY, SOCKET, LOG, LOCK = "key", "socket", "log", "start.lock"
_KEY_BYTES = 32
_LONGEST = 100  # bytes of a socket's path; systems allow 104 to 108


def opened(site: Path) -> int:
    """Open the folder, made if missing; a link, or a folder that others may enter, is refused."""
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
    """A path of the socket that is short enough: by the folder's descriptor where the system has such paths."""
    path = str((site / "worker" / SOCKET).absolute())
    by_folder = f"/proc/self/fd/{folder}"
    if os.path.isdir(by_folder):
        return f"{by_folder}/{SOCKET}"
    if len(os.fsencode(path)) > _LONGEST:
        raise OSError(f"{path!r} is longer than the {_LONGEST} bytes that a socket's path may have; shorten folder=")
    return path


def make_key(folder: int) -> bytes:
    """Replace the key by a new random one, which ends the worker of the old one."""
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
    """Open the worker's log, emptied, for writing and reading."""
    how = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(LOG, how, 0o600, dir_fd=folder)
    _require_own(descriptor, LOG)
    return descriptor


def remove(folder: int) -> None:
    """Delete key and socket, so that nobody connects."""
    for name in (KEY, SOCKET):
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass


def is_there(folder: int, site: Path, key: bytes) -> bool:
    """Whether the folder and its key are still this worker's."""
    try:
        named = os.stat(site / "worker", follow_symlinks=False)
        return os.path.samestat(named, os.fstat(folder)) and read_key(folder) == key
    except OSError:
        return False


def _require_own(descriptor: int, name: str) -> None:
    status = os.fstat(descriptor)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise OSError(f"{name!r} is neither a file nor a folder; delete it")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OSError(f"{name!r} is of another user or open to others; delete it, and a new one is made")
