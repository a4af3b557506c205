"""Write and read a run's state: signed with the owner's key, replaced atomically, checked before it is believed.

Two files: the state, which each round replaces, and beside it the records of all rounds, which only grow. The state
says how many of the records' bytes belong to it, and their digest; bytes beyond them are of a crash and are cut off.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import struct
from pathlib import Path
from typing import IO, Any, NamedTuple

from fedppl.storage import codec as _codec
from fedppl.storage import signed as _key
from fedppl.storage.signed import FORMAT, MOST, decoded, pack, verified
from fedppl.types import DeclarationError

_RECORDS = b"fedppl records %d\n" % FORMAT
_LENGTH = struct.Struct("<Q")  # before each record
_RUN = "run"  # what a run's state is signed as
CONTENT: dict[str, type] = {
    "fingerprint": str,
    "algorithm": str,
    "settings": dict,
    "clients": tuple,
    "data": dict,
    "seed": int,
    "name": str,
    "state": object,
    "records": list,
    "personal": dict,
    "told": dict,
}


class Kept(NamedTuple):
    """The part of a file of records that belongs to a state."""

    rounds: int
    length: int  # of the file in bytes
    digest: bytes  # of each record with the digest before it


_NONE = Kept(0, 0, bytes(32))


def require_writable(checkpoint: str | os.PathLike[str]) -> None:
    """Refuse a path that cannot be written to, or signed for, before there is anything to write."""
    path, shown = Path(checkpoint), repr(os.fspath(checkpoint))
    try:
        if not path.parent.is_dir():
            raise DeclarationError(f"checkpoint={shown}: its folder does not exist; create it first.")
        if path.is_dir():
            raise DeclarationError(f"checkpoint={shown} is a folder; name a file in it, such as run.ckpt.")
        if path.exists() and not path.is_file():
            raise DeclarationError(f"checkpoint={shown} is a device or a pipe; name a file, such as run.ckpt.")
        records = _records(path)
        if records.exists() and not (records.is_file() and _is_ours(records)):
            raise DeclarationError(
                f"checkpoint={shown} keeps its records in {str(records)!r}, where something else is; choose another."
            )
        for file in (_partial(path), records):
            before = file.exists()
            _open(file, os.O_APPEND).close()
            if not before:
                file.unlink()
    except (OSError, ValueError) as error:  # a null character in a path is a ValueError
        if isinstance(error, DeclarationError):
            raise
        why = getattr(error, "strerror", None) or str(error)
        way = f"{str(_partial(path))!r} and {str(_records(path))!r}"
        where = f", written by way of {way}," if os.path.lexists(path.parent) else ""
        raise DeclarationError(
            f"checkpoint={shown}{where} cannot be written: {why}; choose a path where files can be made."
        ) from error
    _key.of_owner(make=True)


def _is_ours(records: Path) -> bool:
    """Whether a file of records may be written over: it is one, or a crash left it before it was one."""
    with records.open("rb") as file:
        found = file.read(len(_RECORDS))
    return re.match(rb"fedppl records \d+\n", found) is not None or (_RECORDS.startswith(found))


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _records(path: Path) -> Path:
    return path.with_name(path.name + ".records")


def write(path: Path, content: dict[str, Any], kept: Kept | None = None, *, resumed: bool = False) -> Kept:
    """Append the records that are new, then put the state in the old one's place: a crash leaves one of the two whole.

    The content has all that `CONTENT` names. `kept` is the value of the last call, or of `load`, and None for a run
    that begins. Where a run is `resumed`, records that a crash left beyond it are cut off. Else there can be none.
    """
    before = kept or _NONE
    frames: list[bytes] = []
    digest = before.digest
    for record in content["records"][before.rounds :]:
        body = _codec.encode(record, f"record {before.rounds + len(frames) + 1}")
        frames.append(_LENGTH.pack(len(body)) + body)
        digest = hashlib.sha256(digest + frames[-1]).digest()
    added = b"".join([b"" if before.length else _RECORDS, *frames])
    now = Kept(before.rounds + len(frames), before.length + len(added), digest)
    state = pack({**content, "records": tuple(now)}, _RUN)
    if added:
        _append(_records(path), added, before, resumed)
    replace(path, state)
    return now


def _append(path: Path, added: bytes, before: Kept, resumed: bool) -> None:
    begins = before.length == 0
    with _open(path, os.O_TRUNC if begins else 0) as file:
        length = file.seek(0, os.SEEK_END)
        if length < before.length or (length > before.length and not resumed):
            raise DeclarationError(
                f"{str(path)!r} has {length} bytes where this run had left {before.length}: another run writes to it, "
                "or has cut it. Give each run a checkpoint of its own, and stop all but one."
            )
        file.truncate(before.length)
        file.seek(before.length)
        file.write(added)
        file.flush()
        os.fsync(file.fileno())
    if begins and os.name == "posix":  # the state must not be there after a power cut without its records
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint, or say why it cannot be used."""
    return load(path)[0]


def load(path: Path) -> tuple[dict[str, Any], Kept]:
    """Read a checkpoint, and what `write` needs to go on with it.

    Raises `DeclarationError` if it cannot be used; the text names the file and the remedy.
    """
    shown = f"checkpoint {str(path)!r}"
    try:
        if path.exists() and not path.is_file():
            raise DeclarationError(f"{shown} cannot be read: it is no file; choose another path.")
        with path.open("rb") as file:
            content = verified(file, os.fstat(file.fileno()).st_size, shown, _RUN)
        wrong = DeclarationError(f"{shown} holds something else; choose another path.")
        if type(content) is not dict or set(content) != set(CONTENT):
            raise wrong
        kept = content["records"]
        if type(kept) is not tuple or [type(part) for part in kept] != [int, int, bytes]:
            raise wrong
        content["records"] = _read_records(_records(path), Kept(*kept), shown)
        if not all(isinstance(content[name], kind) for name, kind in CONTENT.items()):
            raise wrong
    except OSError as error:
        raise DeclarationError(f"{shown} cannot be read: {error.strerror or error}; choose another path.") from error
    return content, Kept(*kept)


def _read_records(path: Path, kept: Kept, shown: str) -> list[Any]:
    """Read the records that belong to a state, none before all of them are seen to be what was written."""
    remedy = f"restore both from one copy, or delete {shown} to start again."
    if kept.length == 0:
        return []
    if not path.is_file():
        raise DeclarationError(f"{shown} needs its records, {str(path)!r}, which are not there; {remedy}")
    with path.open("rb") as file:
        if not len(_RECORDS) <= kept.length <= min(MOST, os.fstat(file.fileno()).st_size):
            raise DeclarationError(f"the records of {shown}, {str(path)!r}, are cut off; {remedy}")
        raw = file.read(kept.length)
    start, digest, bodies = len(_RECORDS), bytes(32), []
    while start + _LENGTH.size <= len(raw):
        (length,) = _LENGTH.unpack_from(raw, start)
        stop = start + _LENGTH.size + length
        digest = hashlib.sha256(digest + raw[start:stop]).digest()
        bodies.append(raw[start + _LENGTH.size : stop])
        start = stop
    if raw[: len(_RECORDS)] != _RECORDS or (len(bodies), start, digest) != tuple(kept):
        raise DeclarationError(f"the records of {shown}, {str(path)!r}, are not those it was written with; {remedy}")
    return [decoded(body, f"a record of {shown}") for body in bodies]


def _open(path: Path, how: int) -> IO[bytes]:
    """Open a file of ours to write: its owner's alone, and no link or pipe that somebody put in its place."""
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | how | safe, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    if os.name == "posix":
        os.fchmod(descriptor, 0o600)
    return open(descriptor, "wb")


def replace(path: Path, raw: bytes) -> None:
    """Put the bytes at the path in one step; only its owner may read them."""
    partial = _partial(path)
    with _open(partial, os.O_TRUNC) as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
