"""Frames over a Unix socket, between two processes that prove to each other that they know a key. No pickles.

Every wait has the socket's limit: what stands still, or says something else, is an `OSError`.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import json
import os
import secrets
import select
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedppl.types import DeclarationError

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
