"""A site's one file, `site.sqlite`: its account, the chain of its log, cohorts, personal state and answers.

A message is one transaction, which is also the site's lock: account, lines and answer are there together or not at all.
The owner's key signs the account with the head of the chain; each content that is kept has a signature of its own.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import os
import secrets
import sqlite3
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fedppl.storage.signed import Memory, key_path, owner_key
from fedppl.types import DataError, DeclarationError

FILE = "site.sqlite"
_OLDER = ("ledger.json", "audit.jsonl")  # of versions that kept a file for each name
_PATIENCE = 600.0  # seconds that a message waits for the one before it
_LABEL = b"fedppl account 2\n"
# What is known of runs lies in parts, by a digest of their names. The account's signature covers a digest of each part:
# one part is read for a request, whatever the number of runs, and a row that was changed, put back or deleted is seen.
PARTS, _WIDTH = 256, 32  # the latter in bytes
_TABLES = (
    "CREATE TABLE account (content TEXT NOT NULL, parts BLOB NOT NULL, signature BLOB NOT NULL)",
    "CREATE TABLE chain (line INTEGER PRIMARY KEY, record TEXT NOT NULL)",
    "CREATE TABLE runs (part INTEGER, key TEXT, content TEXT NOT NULL, PRIMARY KEY (part, key)) WITHOUT ROWID",
    "CREATE TABLE state (name TEXT PRIMARY KEY, content BLOB NOT NULL)",
)


class Head(NamedTuple):
    """Number of lines of a chain, and the digest of the last."""

    length: int = 0
    digest: str = hashlib.sha256(b"fedppl audit log 1\n").hexdigest()


class Account(NamedTuple):
    """What the owner's key signs, beside the digests of the parts."""

    clients: dict[str, list[Any]] = {}  # running totals, by a client's own name
    head: Head = Head()
    idle: int = 0  # lines that cost nothing
    base: Head = Head()  # where the chain begins, since earlier lines were moved away
    requests: int = 0  # that were counted until then
    salt: str = ""  # in the keys of runs: a file that is begun anew has other masks


class Store(NamedTuple):
    """A site's file in a transaction. The mutable fields are written when it ends."""

    connection: sqlite3.Connection
    folder: Path
    shown: str  # the file's path, in errors
    account: list[Account]  # one
    parts: bytearray  # their digests
    read: dict[int, dict[str, str]]  # contents by key, of parts that were looked at
    changed: set[tuple[int, str]]  # parts and keys


@contextmanager
def changing(folder: Path) -> Iterator[Store]:
    """The site's file for one message, which nobody else changes meanwhile; it is on the disk when the block ends.

    An `Exception` ends the block alike, since what a message has cost stays. Of a process that is killed, or whose disk
    is full, nothing is there. Raises `DataError` where the file was changed without its key, or is held too long.
    """
    _require_new(folder)
    if not os.path.lexists(folder / FILE):
        _make(folder / FILE)
    with _opened(folder / FILE, "IMMEDIATE") as store:
        try:
            yield store
        except Exception:
            if store.connection.in_transaction:
                _write(store)
            raise
        _write(store)


@contextmanager
def reading(folder: Path) -> Iterator[Store]:
    """The site's file as it is at one moment; others may write meanwhile."""
    _require_new(folder)
    if not os.path.lexists(folder / FILE):
        raise DeclarationError(f"{str(folder)!r} has no {FILE}; name a site's folder.")
    with _opened(folder / FILE, "DEFERRED") as store:
        yield store


def salt(folder: Path) -> str:
    """The salt of a site's file, which is made where there is none."""
    _require_new(folder)
    if not os.path.lexists(folder / FILE):
        _make(folder / FILE)
    with reading(folder) as store:
        return store.account[0].salt


def _require_new(folder: Path) -> None:
    if older := [name for name in _OLDER if os.path.lexists(folder / name)]:
        rule = f"{str(folder)!r} has {' and '.join(older)}, of an earlier version of fedppl, and this one keeps {FILE}"
        remedy = "finish its runs with that version, or move it away, which grants every limit anew, with the identity"
        raise DataError(f"{rule}; {remedy}.")


def _make(path: Path) -> None:
    """Write an empty file beside its place and link it there: other processes see a whole one or none."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(f"{FILE}.{secrets.token_hex(8)}")
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # SQLite gives its own files this mode
    try:
        with closing(sqlite3.connect(beside, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            for table in _TABLES:
                connection.execute(table)
            content, parts = json.dumps(Account(salt=secrets.token_hex(16))), _sealed({}) * PARTS
            signature = _signature(owner_key(make=True), content, parts)
            connection.execute("INSERT INTO account VALUES (?, ?, ?)", (content, parts, signature))
        with suppress(FileExistsError):  # another process was first
            os.link(beside, path)
    finally:
        beside.unlink()


@contextmanager
def _opened(path: Path, how: str) -> Iterator[Store]:
    shown, status = repr(str(path)), os.lstat(path)
    if not stat.S_ISREG(status.st_mode) or (os.name == "posix" and status.st_mode & 0o077):
        raise DataError(f"{shown} is no plain file, or others may read it; put back what was there, with mode 600.")
    with closing(sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None)) as connection:
        with _named(connection, shown):
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"BEGIN {how}")
        yield _read(connection, path.parent, shown)


@contextmanager
def _named(connection: sqlite3.Connection, shown: str) -> Iterator[None]:
    """Take all of the transaction back where SQLite fails; then what follows in it fails too."""
    try:
        yield
    except sqlite3.Error as error:
        connection.rollback()
        if (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF == sqlite3.SQLITE_BUSY:
            rule = f"{shown} is held by another process of this site for more than {_PATIENCE:g} s"
            raise DataError(f"{rule}; end that one, or ask again when it is done.") from error
        raise DataError(f"{shown} cannot be used ({error}); free the disk, or put back what was there.") from error


def execute(store: Store, sql: str, *given: Any) -> list[tuple[Any, ...]]:
    """Run a statement of the transaction, unless it was taken back."""
    if not store.connection.in_transaction:
        raise DataError(f"{store.shown}: something of this message could not be written; free the disk.")
    with _named(store.connection, store.shown):
        return store.connection.execute(sql, given).fetchall()


def _read(connection: sqlite3.Connection, folder: Path, shown: str) -> Store:
    """The account, where it is signed with the owner's key and the chain ends where it says."""
    store = Store(connection, folder, shown, [Account()], bytearray(), {}, set())
    tables = execute(store, "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
    rows = execute(store, "SELECT * FROM account LIMIT 2") if tables == [(sql,) for sql in _TABLES] else []
    if [tuple(map(type, row)) for row in rows] != [(str, bytes, bytes)]:
        raise DataError(f"{shown} has other tables than those of this version of fedppl; put back what was there.")
    ((content, parts, signature),) = rows
    if not hmac.compare_digest(signature, _signature(owner_key(make=False), content, parts)):
        rule = f"{shown} has an account that is not signed with the key in {str(key_path())!r}: it or the key changed"
        anew = "moving the whole folder away grants every limit anew, and the identity goes with it"
        raise DataError(f"{rule}. Put back what was there; {anew}.")
    clients, head, idle, base, requests, salt = json.loads(content)
    account = Account(clients, Head(*head), idle, Head(*base), requests, salt)
    last = execute(store, "SELECT line, record FROM chain ORDER BY line DESC LIMIT 1")
    ends = [(line, *(_link(record) or (0, "", ""))[::2]) for line, record in last] or [(account.base[0], *account.base)]
    if ends != [(account.head.length, *account.head)]:
        rule = f"{shown} lacks line {account.head.length}, which was written, or has another after it"
        raise DataError(f"{rule}: the log was cut or replaced. Put back what was there.")
    return store._replace(account=[account], parts=bytearray(parts))


def _write(store: Store) -> None:
    """Write and sign the account with all that changed, and commit; on the disk when this returns."""
    for part, key in store.changed:
        execute(store, "INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", part, key, store.read[part][key])
    for part in {part for part, _ in store.changed}:
        store.parts[part * _WIDTH : (part + 1) * _WIDTH] = _sealed(store.read[part])
    content, parts = json.dumps(store.account[0]), bytes(store.parts)
    signature = _signature(owner_key(make=False), content, parts)
    execute(store, "UPDATE account SET content = ?, parts = ?, signature = ?", content, parts, signature)
    execute(store, "COMMIT")


def _signature(key: bytes, content: str, parts: bytes) -> bytes:
    return hmac.digest(key, _LABEL + parts + content.encode(), "sha256")  # the parts have one length


# What is known of runs ------------------------------------------------------------------------------------------------


def known(store: Store, client: str, kind: str, name: str) -> Any:
    """What was noted of a client under a kind and a name, or None."""
    content = rows(store, _part(client, kind, name)).get(json.dumps([client, kind, name]))
    return None if content is None else json.loads(content)


def alike(store: Store, client: str, kind: str) -> list[Any]:
    """All that was noted of a client under a kind other than "run"."""
    part = rows(store, _part(client, kind, ""))
    return [json.loads(content) for key, content in part.items() if json.loads(key)[:2] == [client, kind]]


def put(store: Store, client: str, kind: str, name: str, content: Any) -> None:
    """Note what `known` will find."""
    part, key = _part(client, kind, name), json.dumps([client, kind, name])
    rows(store, part)[key] = json.dumps(content)
    store.changed.add((part, key))


def _part(client: str, kind: str, name: str) -> int:
    """Number of the part: of each run its own, of other kinds one for all names, since these are few."""
    text = json.dumps([client, kind, name if kind == "run" else ""])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % PARTS


def rows(store: Store, part: int) -> dict[str, str]:
    """Contents of a part by key; DataError where they are not those that were written last."""
    if part not in store.read:
        found = dict(execute(store, "SELECT key, content FROM runs WHERE part = ?", part))
        if _sealed(found) != store.parts[part * _WIDTH : (part + 1) * _WIDTH]:
            raise DataError(f"{store.shown} has other rows on runs than were written. Put back what was there.")
        store.read[part] = found
    return store.read[part]


def _sealed(contents: Mapping[str, str]) -> bytes:
    return hashlib.sha256("\n".join(sorted(map(repr, contents.items()))).encode()).digest()


def memory(store: Store) -> Memory:
    """Bytes under names, which are written with the account."""

    def recall(name: str) -> bytes | None:
        found = execute(store, "SELECT content FROM state WHERE name = ?", name)
        return found[0][0] if found and type(found[0][0]) is bytes else b"" if found else None

    def keep(name: str, raw: bytes) -> None:
        execute(store, "INSERT OR REPLACE INTO state VALUES (?, ?)", name, raw)

    return Memory(recall, keep)


# The chain of the log: lines of JSON, each with the digest of the one before ------------------------------------------


def append(store: Store, entry: Mapping[str, Any]) -> None:
    """Add a line; the entry is JSON, and must not have the names ``line``, ``time``, ``before`` and ``digest``."""
    account = store.account[0]
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    record = {"line": account.head.length + 1, "time": time, **entry, "before": account.head.digest}
    assert "digest" not in record
    record["digest"] = _digest(record)
    execute(store, "INSERT INTO chain VALUES (?, ?)", record["line"], json.dumps(record))
    store.account[0] = account._replace(head=Head(record["line"], record["digest"]))


def records(store: Store) -> Iterator[str]:
    """The lines as they stand there."""
    with _named(store.connection, store.shown):
        yield from (record for (record,) in store.connection.execute("SELECT record FROM chain ORDER BY line"))


def rotate(store: Store) -> None:
    """Take all lines out, which the caller has written elsewhere; the next line follows from the last of them."""
    account = store.account[0]
    execute(store, "DELETE FROM chain")
    store.account[0] = account._replace(base=account.head, requests=requests(store))


def requests(store: Store) -> int:
    """Answered requests of all clients."""
    return sum(counted for counted, *_ in store.account[0].clients.values())


def before(record: str) -> Head:
    """The end of a chain that a line follows, by its own word."""
    link = _link(record)
    return Head() if link is None else Head(link[0] - 1, link[1])


def followed(records: Iterable[str], after: Head, shown: str) -> Iterator[dict[str, Any]]:
    """Yield the lines, and raise DataError at the first that does not follow from the one before."""
    before = after
    for number, record in enumerate(records, start=after.length + 1):
        link = _link(record)
        if link is None or link[:2] != (number, before.digest):
            where = f"{shown} is broken at line {number}"
            raise DataError(f"{where}: it or one before was changed, removed or cut; keep it, and find out which.")
        before = Head(number, link[2])
        yield json.loads(record)


def _digest(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()


def _link(record: Any) -> tuple[int, str, str] | None:
    """Number of a line, the digest before it and its own; None of one that is not, byte by byte, as `append` writes."""
    try:
        line = json.loads(record)
        known = {name: value for name, value in line.items() if name != "digest"}
        # A key that stands twice would be read by programs only once.
        is_ours = record == json.dumps({**known, "digest": _digest(known)})
        return (line["line"], line["before"], line["digest"]) if is_ours else None
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError):
        return None
