"""A run's checkpoint, signed with the owner's key.

It is two files: the state, which each round replaces, and the records of all rounds, which only grow. The state holds
the length and digest of the records that belong to it. A crash may leave more records, which are cut off.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

from fedppl.storage import codec, signed
from fedppl.storage.signed import FORMAT, open_to_write, partial_path, reason
from fedppl.types import DeclarationError

_RECORDS = b"fedppl records %d\n" % FORMAT
_LENGTH = struct.Struct("<Q")  # before each record
_RUN = "run"  # the name that a run's state is signed with
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
    """The part of the records file that belongs to a state."""

    rounds: int
    length: int  # of the file in bytes
    digest: bytes  # a chain: of each record and the digest before it


_NONE = Kept(0, 0, bytes(32))


def require_writable(checkpoint: str | os.PathLike[str]) -> None:
    """Raise DeclarationError before a run if its checkpoint could not be written or signed."""
    path, shown = Path(checkpoint), f"checkpoint={os.fspath(checkpoint)!r}"
    partial, records = partial_path(path), _records(path)
    try:
        if not path.parent.is_dir():
            raise DeclarationError(f"{shown}: its folder does not exist; create it first.")
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "a device or a pipe"
            raise DeclarationError(f"{shown} is {what}; name a file, such as run.ckpt.")
        if records.exists() and not (records.is_file() and _is_ours(records)):
            raise DeclarationError(f"{shown} keeps its records in {str(records)!r}, where something else is; move it.")
        for file in (partial, records):
            before = file.exists()
            open_to_write(file, os.O_APPEND).close()
            if not before:
                file.unlink()
    except DeclarationError:
        raise
    except (OSError, ValueError) as error:  # a null character in a path is a ValueError
        what = f"with {str(partial)!r} and {str(records)!r}, cannot be written: {reason(error)}"
        raise DeclarationError(f"{shown}, {what}; choose a path where files can be made.") from error
    signed.owner_key(make=True)


def _is_ours(records: Path) -> bool:
    """Whether a file is one of records, or the beginning of one that a crash left."""
    with records.open("rb") as file:
        head = file.read(len(_RECORDS))
    return re.match(rb"fedppl records \d+\n", head) is not None or _RECORDS.startswith(head)


def _records(path: Path) -> Path:
    return path.parent / f"{path.name}.records"


def write(path: Path, content: dict[str, Any], kept: Kept | None = None, *, resumed: bool = False) -> Kept:
    """Append new records, then replace the state: a crash leaves the old state or the new one whole.

    `kept` is the value of the last call, or of `load`. Records that a crash left beyond it are cut off if the run was
    `resumed`; otherwise they are an error.
    """
    before = kept or _NONE
    frames: list[bytes] = []
    digest = before.digest
    for record in content["records"][before.rounds :]:
        body = codec.encode(record, f"record {before.rounds + len(frames) + 1}")
        frames.append(_LENGTH.pack(len(body)) + body)
        digest = hashlib.sha256(digest + frames[-1]).digest()
    added = b"".join([b"" if before.length else _RECORDS, *frames])
    after = Kept(before.rounds + len(frames), before.length + len(added), digest)
    state = signed.pack({**content, "records": tuple(after)}, _RUN)
    if added:
        _append(_records(path), added, before, resumed)
    signed.replace(path, state)
    return after


def _append(path: Path, added: bytes, before: Kept, resumed: bool) -> None:
    begins = before.length == 0
    with open_to_write(path, os.O_TRUNC if begins else 0) as file:
        length = file.seek(0, os.SEEK_END)
        if length < before.length or (length > before.length and not resumed):
            where = f"{str(path)!r} has {length} bytes, not {before.length}"
            raise DeclarationError(f"{where}: another run writes to it. Give each run a checkpoint of its own.")
        file.truncate(before.length)
        file.seek(before.length)
        signed.write_through(file, added)
    if begins and os.name == "posix":  # after a power cut the state must not be there without its records
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def load(path: Path) -> tuple[dict[str, Any], Kept]:
    """Read a checkpoint, and the `Kept` that `write` needs to go on with it; DeclarationError if it cannot be used."""
    shown = f"checkpoint {str(path)!r}"
    try:
        if path.exists() and not path.is_file():
            raise DeclarationError(f"{shown} cannot be read: it is no file; choose another path.")
        with path.open("rb") as file:
            content = signed.verified(file, os.fstat(file.fileno()).st_size, shown, _RUN)
        kept = content.get("records") if type(content) is dict and set(content) == set(CONTENT) else None
        if type(kept) is tuple and [type(part) for part in kept] == [int, int, bytes]:
            content["records"] = _read_records(_records(path), Kept(*kept), shown)
            if all(isinstance(content[name], kind) for name, kind in CONTENT.items()):
                return content, Kept(*kept)
    except OSError as error:
        raise DeclarationError(f"{shown} cannot be read: {reason(error)}; choose another path.") from error
    raise DeclarationError(f"{shown} holds something else; choose another path.")


def _read_records(path: Path, kept: Kept, shown: str) -> list[Any]:
    """Check the digest of all records that belong to a state, then decode them."""
    remedy = f"restore both from one copy, or delete {shown} to start again."
    records = f"the records of {shown}, {str(path)!r}, are"
    if kept.length == 0:
        return []
    if not path.is_file():
        raise DeclarationError(f"{records} not there; {remedy}")
    with path.open("rb") as file:
        if not len(_RECORDS) <= kept.length <= min(signed.MOST, os.fstat(file.fileno()).st_size):
            raise DeclarationError(f"{records} cut off; {remedy}")
        raw = file.read(kept.length)
    start, digest, bodies = len(_RECORDS), bytes(32), []
    while start + _LENGTH.size <= len(raw):
        (length,) = _LENGTH.unpack_from(raw, start)
        stop = start + _LENGTH.size + length
        digest = hashlib.sha256(digest + raw[start:stop]).digest()
        bodies.append(raw[start + _LENGTH.size : stop])
        start = stop
    if raw[: len(_RECORDS)] != _RECORDS or (len(bodies), start, digest) != tuple(kept):
        raise DeclarationError(f"{records} not those it was written with; {remedy}")
    return [signed.decoded(body, f"a record of {shown}") for body in bodies]
