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
