"""The folder of a site's warm worker, `worker` in the site's folder: key, socket and log, its owner's alone."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

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
