"""The owner's key, which signs what is kept in files: 32 random bytes in a file that nobody else may read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from fedppl.types import DeclarationError

VARIABLE = "FEDPPL_KEY_FILE"
_LENGTH, _LONGEST = 32, 4096  # bytes


def path() -> Path:
    """Where the key is: as the environment says, else in the user's configuration folder."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    folder = os.environ.get("APPDATA" if os.name == "nt" else "XDG_CONFIG_HOME", "")
    if not os.path.isabs(folder):
        try:
            folder = str(Path.home() / ".config")
        except RuntimeError as error:
            raise DeclarationError(
                f"there is no home folder to keep a key in; set {VARIABLE} to the path of a key file."
            ) from error
    return Path(folder) / "fedppl" / "key"


def of_owner(*, make: bool) -> bytes:
    """Return the key; where there is none, make it or refuse.

    Raises `DeclarationError` if there is none and none is to be made, or it can be read by others, is no file or
    too short.
    """
    where = path()
    shown = f"key file {str(where)!r}"
    try:
        if make and not os.path.lexists(where):
            _make(where)
        return _read(where, shown)
    except FileNotFoundError as error:
        why = "its folder does not exist; create it" if make else "it does not exist"
        raise DeclarationError(
            f"{shown}: {why}, or set {VARIABLE} to the key file that earlier files were written with."
        ) from error
    except (OSError, ValueError) as error:  # a null character in a path is a ValueError
        if isinstance(error, DeclarationError):
            raise
        why = getattr(error, "strerror", None) or str(error)
        raise DeclarationError(f"{shown} cannot be used: {why}; set {VARIABLE} to a path that can be.") from error


def _read(where: Path, shown: str) -> bytes:
    # A pipe would wait for a writer.
    descriptor = os.open(where, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise DeclarationError(f"{shown} is no plain file; set {VARIABLE} to the path of one.")
        if os.name == "posix":
            if found.st_mode & 0o077:
                raise DeclarationError(
                    f"{shown} is open to others (mode {stat.S_IMODE(found.st_mode):o}): whoever knows the key can make "
                    f"files that are believed. If nobody has read it, chmod 600; else delete it and what it signed."
                )
            if found.st_uid not in (os.geteuid(), 0):
                raise DeclarationError(f"{shown} belongs to another user; set {VARIABLE} to a key file of your own.")
        key = file.read(_LONGEST + 1)
    if not _LENGTH <= len(key) <= _LONGEST:
        raise DeclarationError(
            f"{shown} has {'more than ' if len(key) > _LONGEST else ''}{min(len(key), _LONGEST)} bytes; a key has "
            f"{_LENGTH} random ones. Restore it, or delete it and a new one is made."
        )
    return key


def _make(where: Path) -> None:
    """Write a key beside its place and link it there: others see a whole key or none, and the first one stays."""
    if not os.environ.get(VARIABLE):
        where.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = where.with_name(f"{where.name}.{secrets.token_hex(8)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_LENGTH))
            file.flush()
            os.fsync(descriptor)
        try:
            os.link(beside, where)
        except FileExistsError:
            pass  # another process was first, and its key is as good
    finally:
        beside.unlink()
