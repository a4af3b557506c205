"""Files signed with the owner's key and replaced in one step. The signature is checked before the content is parsed."""

from __future__ import annotations

import contextlib
import errno
import hmac
import io
import os
import re
import secrets
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

from fedppl.storage import codec as _codec
from fedppl.types import DeclarationError

FORMAT = 17
MOST = 2**34  # bytes of a file
_KIND = b"fedppl checkpoint "
_MAGIC = _KIND + b"%d\n" % FORMAT
_LENGTH = struct.Struct("<Q")
_HEAD = struct.Struct("<8sQ32s")  # whose key, bytes that follow, HMAC-SHA256
_START = len(_MAGIC) + _HEAD.size


def pack(content: Any, about: str = "") -> bytes:
    """Encode a state and sign it with the owner's key, and with a name that `unpack` must give."""
    key, body = owner_key(make=True), _codec.encode(content)
    if len(body) > MOST:
        raise DeclarationError(f"the state takes {len(body):.3g} bytes, more than the {MOST} that a file may have.")
    whose = _whose(key)
    return _MAGIC + _HEAD.pack(whose, len(body), _signature(key, about, whose, body)) + body


def unpack(raw: bytes, name: str, about: str = "") -> Any:
    """Read what `pack` wrote; errors call it `name`."""
    return verified(io.BytesIO(raw), len(raw), name, about)


def verified(file: IO[bytes], size: int, name: str, about: str) -> Any:
    """Check the header, the size and the signature of a file, in this order, then decode it."""
    head = file.read(_START)
    version = re.match(_KIND + rb"(\d{1,9})\n", head)
    if version is None:
        raise DeclarationError(f"{name} is not a fedppl checkpoint; choose another path.")
    if int(version[1]) != FORMAT:
        rule = f"has format {int(version[1])}, and this version of fedppl reads format {FORMAT}"
        remedy = "delete it to start again, or finish it with the version that wrote it"
        raise DeclarationError(f"{name} {rule}; {remedy}.")
    damaged = DeclarationError(f"{name} is truncated or damaged; restore it from a copy, or delete it to start again.")
    if not head.startswith(_MAGIC) or len(head) < _START:
        raise damaged
    whose, length, signature = _HEAD.unpack_from(head, len(_MAGIC))
    if length != size - _START:
        raise damaged
    if length > MOST:
        raise DeclarationError(f"{name} has {size} bytes, more than the {MOST} that are read; delete it.")
    key = owner_key(make=False)
    if whose != _whose(key):
        rule = f"was signed with another key than that in {str(key_path())!r}, or is damaged"
        raise DeclarationError(f"{name} {rule}; put the key that wrote it there, name it by {VARIABLE}, or delete it.")
    body = file.read(length)
    if not hmac.compare_digest(signature, _signature(key, about, whose, body)):
        raise damaged
    return decoded(body, name)


def decoded(body: bytes, name: str) -> Any:
    """Decode the content of a file; errors name the file."""
    try:
        return _codec.decode(body)
    except _codec.Unreadable as error:
        what = f"{name} was not written by this version of fedppl and this program ({error}); delete it to start again."
        raise DeclarationError(what) from error


def _whose(key: bytes) -> bytes:
    """A digest that tells keys apart and reveals nothing else of them."""
    return hmac.digest(key, b"fedppl: which key", "sha256")[:8]


def _signature(key: bytes, about: str, whose: bytes, body: bytes) -> bytes:
    """HMAC of a content's name and its bytes; their lengths keep the parts apart."""
    name = about.encode(errors="surrogatepass")
    mac = hmac.new(key, _MAGIC + whose + _LENGTH.pack(len(name)) + name + _LENGTH.pack(len(body)), "sha256")
    mac.update(body)
    return mac.digest()


# The owner's key: 32 random bytes in a file that nobody else may read -------------------------------------------------

VARIABLE = "FEDPPL_KEY_FILE"
_KEY_LENGTH, _LONGEST = 32, 4096  # bytes


def key_path() -> Path:
    """Path of the key: as the environment says, else in the user's configuration folder."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    folder = os.environ.get("APPDATA" if os.name == "nt" else "XDG_CONFIG_HOME", "")
    if not os.path.isabs(folder):
        try:
            folder = str(Path.home() / ".config")
        except RuntimeError as error:
            raise DeclarationError(f"there is no home folder; set {VARIABLE} to the path of a key file.") from error
    return Path(folder) / "fedppl" / "key"


def owner_key(*, make: bool) -> bytes:
    """Read the key, or make one where there is none and `make` is true; DeclarationError if it cannot be trusted."""
    where = key_path()
    shown = f"key file {str(where)!r}"
    try:
        if make and not os.path.lexists(where):
            _make(where)
        return _read(where, shown)
    except FileNotFoundError as error:
        what = "its folder" if make else "it"
        raise DeclarationError(f"{shown}: {what} does not exist; set {VARIABLE} to the key file.") from error
    except DeclarationError:
        raise
    except (OSError, ValueError) as error:  # a null character in a path is a ValueError
        raise DeclarationError(f"{shown} cannot be used: {reason(error)}; set {VARIABLE} to another.") from error


def reason(error: Exception) -> str:
    """What the operating system says, where it says something."""
    return getattr(error, "strerror", None) or str(error)


def _read(where: Path, shown: str) -> bytes:
    # A pipe would wait for a writer.
    descriptor = os.open(where, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISREG(status.st_mode):
            raise DeclarationError(f"{shown} is no plain file; set {VARIABLE} to the path of one.")
        if os.name == "posix" and mode & 0o077:
            remedy = "chmod 600 if nobody has read it; else delete it and what it signed"
            raise DeclarationError(f"{shown} is open to others (mode {mode:o}), who could sign files; {remedy}.")
        if os.name == "posix" and status.st_uid not in (os.geteuid(), 0):
            raise DeclarationError(f"{shown} belongs to another user; set {VARIABLE} to a key file of your own.")
        key = file.read(_LONGEST + 1)
    if not _KEY_LENGTH <= len(key) <= _LONGEST:
        size = f"{'more than ' if len(key) > _LONGEST else ''}{min(len(key), _LONGEST)} bytes"
        raise DeclarationError(f"{shown} has {size}; a key has {_KEY_LENGTH}. Restore it, or delete it for a new one.")
    return key


def _make(where: Path) -> None:
    """Write a key beside its place and link it there: other processes see a whole key or none, and the first stays."""
    if not os.environ.get(VARIABLE):
        where.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = where.with_name(f"{where.name}.{secrets.token_hex(8)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    try:
        with open(descriptor, "wb") as file:
            write_through(file, secrets.token_bytes(_KEY_LENGTH))
        with contextlib.suppress(FileExistsError):  # another process was first, and its key is as good
            os.link(beside, where)
    finally:
        beside.unlink()


# Files of the owner's alone, replaced in one step ---------------------------------------------------------------------


def open_to_write(path: Path, how: int) -> IO[bytes]:
    """Open a file for writing, and by its descriptor for reading, that only its owner may read; no links, no pipes."""
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | how | safe, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    if os.name == "posix":
        os.fchmod(descriptor, 0o600)
    return open(descriptor, "wb")


def write_through(file: IO[bytes], raw: bytes) -> None:
    """Write bytes, which are on the disk when this returns."""
    file.write(raw)
    file.flush()
    os.fsync(file.fileno())


def partial_path(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.parent / f"{path.name}.partial"  # also of a folder, which is refused later


def replace(path: Path, raw: bytes) -> None:
    """Replace a file in one step; only its owner may read it."""
    partial = partial_path(path)
    with open_to_write(partial, os.O_TRUNC) as file:
        write_through(file, raw)
    partial.replace(path)


class Memory(NamedTuple):
    """Bytes under names that a client keeps between two requests."""

    recall: Callable[[str], bytes | None]
    keep: Callable[[str, bytes], None]


def recalled(memory: Memory, name: str, what: str = "") -> Any:
    """The content that was kept under a name, or None; errors call it `what`, by default its name."""
    raw = memory.recall(name)
    return None if raw is None else unpack(raw, what or repr(name), name)


def keep(memory: Memory, name: str, content: Any) -> None:
    """Keep a content under a name, signed."""
    memory.keep(name, pack(content, name))
