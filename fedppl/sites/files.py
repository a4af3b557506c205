"""Files as a transport: each message is a bundle, signed and encrypted for one site, that anything may carry.

A bundle is a header in the clear (run, sender, recipient, number, way, digest of what it answers) and a message for the
recipient alone. The server keeps what was asked and answered in one file, `run.sqlite`. A call computes from the start:
where it asks what was answered before, it takes that answer, and it ends at the first one that has not come.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import math
import os
import secrets
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from fedppl.contracts import AnyAlgorithm
from fedppl.engine import secure as _secure
from fedppl.formulas.formula import Agreed
from fedppl.model.declaration import FederatedModel
from fedppl.settings import between, flag, one_line, positive, shown, some_of
from fedppl.sites import ASK, CONCLUDE, GATE, KINDS, Content, Letter, Transport, enrolment, parcel_of
from fedppl.sites import decode as _decode
from fedppl.sites.conclusions import answer
from fedppl.sites.decode import Malformed, Parcel, require
from fedppl.sites.engine import Sites, SitesEngine, SitesSettings, checked
from fedppl.sites.enrolment import expected_clients
from fedppl.sites.node import Node, Site, described
from fedppl.sites.site_agreement import waits
from fedppl.storage.signed import Memory, keep, open_to_write, partial_path, recalled, write_through
from fedppl.storage.store import changing
from fedppl.storage.store import memory as kept_in
from fedppl.types import DataError, DeclarationError

logger = logging.getLogger(__name__)

ASKED, ANSWERED = ".ask", ".answer"  # ends of the names of bundles
FILE = "run.sqlite"
_MAGIC = b"fedppl bundle 1\n"
_HEADER = 4096  # bytes at most: a header has three names of 200 characters
_MOST = 10**9  # bytes of a bundle: SQLite keeps no larger ones
_VERSION = 1  # of the server's file


class Waiting(TimeoutError):
    """Sites have not answered yet. `bundles` are to be carried to them; the same call goes on once they have."""

    def __init__(self, bundles: Sequence[Path], refused: Mapping[Path, str]) -> None:
        self.bundles = tuple(bundles)
        self.refused = dict(refused)  # answers that cannot be used, and why
        what = f"{len(self.bundles)} bundles are not answered: {some_of([str(path) for path in self.bundles])}"
        remedy = f"carry each to its site, its answer ({ANSWERED}) back beside it, and make the same call again"
        why = "".join(f" {str(path)!r} is refused: {reason}" for path, reason in self.refused.items())
        super().__init__(f"{what}; {remedy}.{why}")


# A bundle -------------------------------------------------------------------------------------------------------------


class Header(NamedTuple):
    """What everybody may read of a bundle, and nobody can change."""

    run: str
    sender: str
    recipient: str
    number: int  # of the question, of one run and site: from 1
    way: str  # ASKED or ANSWERED
    about: str  # digest of the bundle that this one answers, in hexadecimal


def packed(header: Header, body: bytes, identity: _secure.Identity, recipient: bytes) -> bytes:
    """A bundle for the recipient's sealing key."""
    head = _joined([str(part).encode() for part in header])
    return _MAGIC + _joined([head, _secure.enclosed(head, body, identity, recipient)])


def unpacked(raw: bytes) -> tuple[Header, bytes, bytes]:
    """A bundle's header, that header's bytes and the rest, of which nothing is believed yet; or `Malformed`."""
    require(raw.startswith(_MAGIC), "it is no bundle of this version of fedppl")
    with _decode.reading("it"):
        head, rest = _parts(raw[len(_MAGIC) :], 2)
        _decode.require_few(len(head), _HEADER, "bytes of the header")
        run, sender, recipient, number, way, about = (part.decode() for part in _parts(head, len(Header._fields)))
        names = zip(Header._fields, (run, sender, recipient, number, way), strict=False)
        run, sender, recipient, number, way = (_decode.checked_name(text, field) for field, text in names)
        at = _decode.whole_number({"number": number}, "number")
    require(way in (ASKED, ANSWERED), f"'way' is {_decode.brief(way)!r}, expected {ASKED!r} or {ANSWERED!r}")
    return Header(run, sender, recipient, at, way, about), head, rest


def _joined(parts: Sequence[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _parts(raw: bytes, most: int) -> list[bytes]:
    parts: list[bytes] = []
    start = 0
    while start < len(raw):
        _decode.require_few(len(parts) + 1, most, "parts")
        end = start + 8 + int.from_bytes(raw[start : start + 8], "little")
        require(start + 8 <= end <= len(raw), "it is shorter than it says: copy it again, whole")
        parts.append(raw[start + 8 : end])
        start = end
    return parts


def _written(kind: str, parcel: Parcel) -> bytes:
    """A message as bytes: its type, names and texts, names and arrays in NumPy's format."""

    def as_bytes(value: Any) -> bytes:
        file = io.BytesIO()
        np.lib.format.write_array(file, np.asarray(value, order="C"), allow_pickle=False)
        return file.getvalue()

    arrays, texts = parcel
    pairs = [part.encode() for pair in sorted(texts.items()) for part in pair]
    numbers = [part for name in sorted(arrays) for part in (name.encode(), as_bytes(arrays[name]))]
    return _joined([kind.encode(), _joined(pairs), _joined(numbers)])


def _read(body: bytes) -> tuple[str, Content]:
    """A message's type, and its content, which is not read yet."""
    with _decode.reading("it"):
        kind, texts, arrays = _parts(body, 3)
        named = _by_name(texts, _decode.TEXTS)
        return kind.decode(), Content(
            lambda: {name: text.decode() for name, text in named.items()}, lambda: _by_name(arrays, _decode.ARRAYS)
        )


def _by_name(raw: bytes, most: int) -> dict[str, bytes]:
    parts = _parts(raw, 2 * most)
    names = [name.decode() for name in parts[::2]]
    require(len(parts) == 2 * len({*names}), "a name stands twice, or has no value")
    return dict(zip(names, parts[1::2], strict=True))


def _bytes_of(path: Path) -> bytes:
    """A bundle's bytes; no links, no pipes, and not more than a bundle has."""
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, os.O_RDONLY | safe), "rb") as file:
        status = os.fstat(file.fileno())
        require(stat.S_ISREG(status.st_mode), "it is no plain file")
        _decode.require_few(status.st_size, _MOST, "bytes of a bundle")
        return file.read(_MOST + 1)


def _put(path: Path, raw: bytes) -> None:
    """Write a bundle, which whoever carries it may read; it has its name once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    with open_to_write(partial, os.O_TRUNC) as file:
        write_through(file, raw)
        if os.name == "posix":
            os.fchmod(file.fileno(), 0o644)
    partial.replace(path)


def _holds(path: Path, raw: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(raw) and path.read_bytes() == raw


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


# The server -----------------------------------------------------------------------------------------------------------


class Files(NamedTuple):
    """Run on sites by files: ``fedppl.fit(model, None, engine=fedppl.Files("run", clients=[...], ...))``.

    Parameters
    ----------
    folder
        Folder of the run at the server, for it alone: ``run.sqlite`` has all that was asked and answered. Its folders
        ``sites/<client>`` have the bundles of one site each; these may be shared with it.
    clients
        Ids of the sites, the names of their identities.
    model, example_data
        The declaration, and made-up data, as in `fedppl.Flower.grid`.
    identity
        Folder with the server's own identity, and the sites' lines on its roster (`python -m fedppl.site`).
    secure
        Whether the server gets nothing but sums over all sites, which these add under masks.
    wait
        Seconds to wait for answers after the last news; 0 ends at the first that has not come.
    poll
        Seconds between two looks while it waits.

    Raises
    ------
    Waiting
        By the call of `fedppl.fit`, where answers have not come: its message names the bundles and what to do.
    DeclarationError
        For settings out of range, a site that is not on the roster, and a call that asks otherwise than the first.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> model, example = normal_means()[0], {"y": [0.0, 1.0]}
    >>> sites = ["north", "south", "west"]
    >>> engine = fedppl.Files("run", clients=sites, model=model, identity="server", example_data=example, secure=True)
    >>> def go_on():
    ...     try:
    ...         return fedppl.fit(model, None, engine=engine)
    ...     except fedppl.Waiting as waiting:
    ...         print(waiting)

    Notes
    -----
    Each call computes from the start, with the answers that have come, and asks the same: on the same machine, with
    the same versions and settings, and with the same seed, by default the run's own. The posterior is returned as soon
    as it is known; conclusions of sites, and their own posteriors, follow when the last bundles are answered, and the
    same call then has them too.

    *When this fails.* A site that does not answer holds up the run, and no round is void for it. An answer that cannot
    be used is named, with the rule, and waited for anew; a site that is refused when it enrols gets the same question
    in a new bundle. Who carries bundles sees names, sizes and times, and can withhold them.
    """

    folder: str | Path
    clients: Sequence[str]
    model: FederatedModel
    identity: str | Path
    example_data: Mapping[str, Any] | None = None
    secure: bool = False
    wait: float = 0.0
    poll: float = 5.0

    def __call__(self, algorithm: AnyAlgorithm, models: Mapping[str, Any]) -> SitesEngine:
        """Ask the sites to enrol, and read who has."""
        return self.sites()(algorithm, models)

    def sites(self) -> Sites:
        """What makes the engine."""
        names = _names(self.clients)
        checked(self.model, self.example_data, names, self.secure)
        if waits(self.model):
            remedy = "pass that of fedppl.Files(...).agree(), as files._replace(model=found.model)"
            raise DeclarationError(f"clients have not agreed on model=: {remedy}.")
        settings = SitesSettings(names, math.inf, math.inf, bool(self.secure))
        return Sites(lambda: _post(self), self.model, self.example_data, settings)

    def agree(self, min_count: int = 1, withheld: str = "other") -> Agreed:
        """Have the sites agree on levels and scales of a formula, as `fedppl.Flower.agree` does.

        The fit is then by ``files._replace(model=found.model)``. Raises `Waiting` where answers have not come.
        """
        names = _names(self.clients)
        return enrolment.agree(_post(self), self.model, names, min_count, withheld, math.inf, self.secure)

    def beside(self, *engines: Any, secure: bool = False) -> Sites:
        """One run on these sites and others by another transport, such as `fedppl.Flower.grid`; files have to wait.

        Limits in seconds are those of the other engines. `secure` is of all sites together, and left out elsewhere.
        """
        parts = [engine.sites() if isinstance(engine, Files) else engine for engine in (self, *engines)]
        names = [name for part in parts for name in _names(part.settings.clients)]
        if any(isinstance(engine, Files) and not engine.wait for engine in (self, *engines)):
            raise DeclarationError("wait=0: others would wait for a call that has ended; give Files(wait=) seconds.")
        if len(set(names)) < len(names) or any(part.secure for part in parts):
            raise DeclarationError(f"clients {names} must differ, and secure= stand here alone; correct the engines.")
        if flag("secure", secure):
            _secure.require_enough(len(names))
        limits = min((part.settings for part in parts), key=lambda settings: settings.deadline)
        settings = limits._replace(clients=tuple(names), secure=bool(secure))
        return parts[0]._replace(post=lambda: _Several([part.post() for part in parts]), settings=settings)


def _names(clients: Any) -> tuple[str, ...]:
    names = expected_clients(clients)
    if isinstance(names, int):
        raise DeclarationError(f"clients={names}: bundles are written for sites by name; give the list of their ids.")
    return names


def _post(files: Files) -> FilePost:
    """The transport of a call."""
    for name in ("folder", "identity"):
        if not isinstance(value := getattr(files, name), str | Path) or not str(value):
            raise DeclarationError(f"{name}={shown(value)} must be the path of a folder.")
    wait, poll = between("wait", files.wait, 0, math.inf, "[)", "it is in seconds"), positive("poll", files.poll)
    where, names = Path(files.identity), _names(files.clients)
    keys = _secure.read_keys(where)
    for name in names:
        if name == keys.name:
            raise DeclarationError(f"clients has {name!r}, the server's own name in {str(where)!r}; give it another.")
        if name not in keys.roster:
            remedy = f"add the line that the site has printed: python -m fedppl.site roster {where} LINE"
            raise DeclarationError(f"clients has {name!r}, which is not on the roster in {str(where)!r}; {remedy}.")
        if name not in keys.sealing:
            raise DeclarationError(f"the line of {name!r} in {str(where)!r} {_secure.NO_SEALING}.")
    return FilePost(Path(files.folder), keys, names, wait, poll)


@contextmanager
def _record(folder: Path) -> Iterator[sqlite3.Connection]:
    """The server's file in one transaction; nothing of it is there where the block raises."""
    folder.mkdir(parents=True, exist_ok=True)  # who carries bundles may enter it
    path = folder / FILE
    open_to_write(path, 0).close()  # sets its mode
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=60.0, isolation_level=None)) as record:
            record.execute("BEGIN IMMEDIATE")
            (version,) = record.execute("PRAGMA user_version").fetchone()
            if version == 0:
                record.execute("CREATE TABLE run (name TEXT NOT NULL)")
                record.execute(
                    "CREATE TABLE exchanges (site TEXT, number INTEGER, place TEXT, mark TEXT, asked BLOB, "
                    "answered BLOB, PRIMARY KEY (site, number))"
                )
                record.execute("INSERT INTO run VALUES (?)", (secrets.token_hex(8),))
                record.execute(f"PRAGMA user_version = {_VERSION}")
            elif version != _VERSION:
                raise DeclarationError(f"{str(path)!r} has version {version}, not {_VERSION}; begin in another folder.")
            yield record
            record.execute("COMMIT")
    except sqlite3.Error as error:
        remedy = "free the disk, put back what was there, or begin in another folder"
        raise DeclarationError(f"{str(path)!r} cannot be used ({error}); {remedy}.") from error


class _Asked(NamedTuple):
    """A message that waits for its answer."""

    site: str
    number: int
    kind: str
    mark: str
    digest: str  # of the bundle
    path: Path
    answered: bytes | None  # where an earlier call, or this one, has got it


class FilePost:
    """The transport: bundles in a folder for each site, and answers that come beside them."""

    grace = 0.0

    def __init__(
        self, folder: Path, keys: _secure.Keys, names: tuple[str, ...], wait: float = 0.0, poll: float = 5.0
    ) -> None:
        self._folder, self._keys, self._wait = folder, keys, wait
        self._nodes = dict(enumerate(names, start=1))
        self._asked: dict[str, _Asked] = {}  # by message
        self._taken: dict[tuple[str, str], int] = {}  # answers that this call has taken, by site and question
        self._refused: dict[Path, str] = {}
        self._news = time.monotonic()
        self.poll = poll if wait else 0.0
        with _record(folder) as record:
            (self.run,) = record.execute("SELECT name FROM run").fetchone()

    def nodes(self) -> dict[int, str]:
        """Sites, by the names of their identities."""
        return self._nodes

    def silent(self) -> set[int]:
        """Nobody: what has not come whole has not come."""
        return set()

    def push(self, node_id: int, kind: str, parcel: Parcel, deadline: float) -> str:
        """Write a bundle, unless the same was asked before."""
        if math.isfinite(deadline):
            remedy = "leave deadline= out; Files(wait=...) is how long a call waits"
            raise DeclarationError(f"deadline={deadline:g}: files come when they come, and void no round; {remedy}.")
        site, body = self._nodes[node_id], _written(kind, parcel)
        mark, place = _digest(body), f"{kind} {parcel[1].get('round', '')}"
        with _record(self._folder) as record:
            known = "SELECT number, asked, answered FROM exchanges WHERE site = ? AND mark = ? ORDER BY number"
            same = record.execute(known, (site, mark)).fetchall()[self._taken.get((site, mark), 0) :]
            if same:
                number, asked, answered = same[0]
            else:
                number, asked, answered = *self._new(record, site, place, mark, body), None
                row = site, number, place, mark, asked
                record.execute("INSERT INTO exchanges VALUES (?, ?, ?, ?, ?, NULL)", row)
        path = self._folder / "sites" / _as_folder(site) / f"{self.run}-{number:04d}{ASKED}"
        if answered is None and not _holds(path, asked):
            _put(path, asked)
            self._news = time.monotonic()
        message_id = f"{number} {site}"
        self._asked[message_id] = _Asked(site, number, kind, mark, _digest(asked), path, answered)
        return message_id

    def _new(self, record: sqlite3.Connection, site: str, place: str, mark: str, body: bytes) -> tuple[int, bytes]:
        """Number and bytes of a bundle of what was not asked yet."""
        other = record.execute("SELECT COUNT(*) FROM exchanges WHERE site = ? AND place = ?", (site, place))
        if place.split(" ")[0] in (ASK, GATE) and other.fetchone()[0]:
            rule = f"site {site!r} was asked something else in round {place.split(' ')[1]} of run {self.run!r}"
            remedy = (
                "repeat the first call (model, settings, random_seed, versions, no checkpoint), or take a new folder"
            )
            raise DeclarationError(f"{rule}; {remedy}.")
        (last,) = record.execute("SELECT MAX(number) FROM exchanges WHERE site = ?", (site,)).fetchone()
        header = Header(self.run, self._keys.name, site, (last or 0) + 1, ASKED, "")
        return header.number, packed(header, body, self._keys.identity, self._keys.sealing[site])

    def pull(self, asked: Mapping[str, int], *, singly: bool = False) -> list[tuple[str, Letter]]:
        """Answers that are there; `Waiting` where there is none, and none has come for as long as the call waits."""
        letters: list[tuple[str, Letter]] = []
        for message_id in asked:
            if (letter := self._looked(one := self._asked[message_id])) is not None:
                letters.append((message_id, letter))
                self._taken[one.site, one.mark] = self._taken.get((one.site, one.mark), 0) + 1
                self._news = time.monotonic()
        if letters or not asked or time.monotonic() - self._news < self._wait:
            return letters
        missing = [self._asked[message_id] for message_id in asked]
        if all(one.kind == CONCLUDE for one in missing):  # the posterior is known
            return [(f"{one.number} {one.site}", f"{str(one.path)!r} is not answered yet") for one in missing]
        raise Waiting([one.path for one in missing], self._refused)

    def _looked(self, one: _Asked) -> Letter | None:
        """An answer that was kept, or that has come, which is kept from now on."""
        path = one.path.with_suffix(ANSWERED)
        try:
            raw = _bytes_of(path) if one.answered is None else one.answered
            letter = self._opened(one, raw)
        except FileNotFoundError:
            return None
        except (OSError, Malformed, DeclarationError) as error:
            if self._refused.get(path) != str(error):
                self._refused[path] = str(error)
                words, extra = (one.site, str(path), one_line(error)), {"client": one.site, "status": "refused"}
                logger.error("client %s: answer %r is refused: %s", *words, extra=extra)
            return None
        if one.answered is None:
            with _record(self._folder) as record:
                update = "UPDATE exchanges SET answered = ? WHERE site = ? AND number = ?"
                record.execute(update, (raw, one.site, one.number))
        self._refused.pop(path, None)
        return letter

    def _opened(self, one: _Asked, raw: bytes) -> Content:
        header, head, rest = unpacked(raw)
        wanted = Header(self.run, one.site, self._keys.name, one.number, ANSWERED, one.digest)
        if header != wanted:
            (field,) = [field for field in Header._fields if getattr(header, field) != getattr(wanted, field)][:1]
            its, ours = getattr(header, field), getattr(wanted, field)
            rule = f"it answers another bundle: its {field} is {shown(its)}, not {shown(ours)}"
            raise DeclarationError(f"{rule}; take the answer that the site has written to {str(one.path)!r}.")
        return _read(_secure.disclosed(head, rest, self._keys.roster[one.site], self._keys.identity))[1]


def _as_folder(site: str) -> str:
    name = quote(site, safe=" ")
    return name.replace(".", "%2E") if name in (".", "..") else name


# Sites by several transports ------------------------------------------------------------------------------------------


class _Several:
    """Transports side by side; nodes and messages are told apart by a transport's place."""

    def __init__(self, posts: Sequence[Transport]) -> None:
        self._posts = posts
        self.poll, self.grace = max(post.poll for post in posts), max(post.grace for post in posts)
        self.run = next((post.run for post in posts if post.run), "")

    def _node(self, k: int, node_id: int) -> int:
        return node_id * len(self._posts) + k

    def nodes(self) -> dict[int, str]:
        """All nodes."""
        return {self._node(k, one): name for k, post in enumerate(self._posts) for one, name in post.nodes().items()}

    def push(self, node_id: int, kind: str, parcel: Parcel, deadline: float) -> str | None:
        """Send a message by the node's transport; where that keeps the run it has no deadline."""
        number, k = divmod(node_id, len(self._posts))
        post = self._posts[k]
        message_id = post.push(number, kind, parcel, math.inf if post.run else deadline)
        return f"{k} {message_id}" if message_id else None

    def pull(self, asked: Mapping[str, int], *, singly: bool = False) -> list[tuple[str, Letter]]:
        """Replies by all transports."""
        letters: list[tuple[str, Letter]] = []
        for k, post in enumerate(self._posts):
            start = f"{k} "
            its = {i.removeprefix(start): node // len(self._posts) for i, node in asked.items() if i.startswith(start)}
            letters += [(start + i, letter) for i, letter in (post.pull(its, singly=singly) if its else [])]
        return letters

    def silent(self) -> set[int]:
        """Nodes of all transports that have announced a message."""
        return {self._node(k, one) for k, post in enumerate(self._posts) for one in post.silent()}


# A site ---------------------------------------------------------------------------------------------------------------


class _Parties(NamedTuple):
    """A site's own keys, and its server."""

    own: _secure.Keys
    server: str
    signing: bytes
    sealing: bytes


def answering(site: Any, config: Mapping[str, Any], identity: Path | None = None) -> Callable[[Path], Path]:
    """The function that answers a bundle, by path, and returns the path of the answer that it has written beside it."""
    if not isinstance(site, Site):
        remedy = "name a fedppl.Site(...); fedppl.Flower.client_app(**site._asdict()) is the app that Flower starts"
        raise DeclarationError(f"the app is {shown(site)}, of type {type(site).__name__}; {remedy}.")
    node_of = described(site)

    def answered(path: Path) -> Path:
        try:
            here = node_of(config)
        except KeyError as error:
            raise DeclarationError(
                f"the node config lacks {error}, which the app reads; give it by --config."
            ) from error
        parties = _parties(here, config, identity)
        try:
            raw = _bytes_of(path)
            bundle = _answer(here, config, parties, raw)
        except (OSError, Malformed, DeclarationError, DataError) as error:
            raise DeclarationError(f"bundle {str(path)!r} cannot be used: {one_line(error)}") from error
        reply = path.with_suffix(ANSWERED)
        _put(reply, bundle)
        return reply

    return answered


def _parties(here: Node, config: Mapping[str, Any], identity: Path | None) -> _Parties:
    where = identity or here.secure
    if where is None:
        raise DeclarationError("a site without secure= needs --identity, the folder that python -m fedppl.site makes.")
    if here.folder is None:
        raise DeclarationError("a site that answers bundles needs folder=, in which its answers are kept.")
    keys, name = _secure.read_keys(where), here.client_id(config)
    if name not in ("", keys.name):
        rule = f"this site is {name!r} by its client id, and {keys.name!r} by its identity in {str(where)!r}"
        raise DeclarationError(f"{rule}; correct one of them.")
    return _Parties(keys, *_secure.read_server(where))


@contextmanager
def _kept(here: Node) -> Iterator[Memory]:
    """What the site keeps beside its account."""
    assert here.folder is not None
    with changing(here.folder) as store:
        yield kept_in(store)


def _answer(here: Node, config: Mapping[str, Any], parties: _Parties, raw: bytes) -> bytes:
    """The answer to a bundle: always the same to the same one, and none to one from before the last."""
    header, head, rest = unpacked(raw)
    for field, wanted in (("recipient", parties.own.name), ("sender", parties.server), ("way", ASKED)):
        if (its := getattr(header, field)) != wanted:
            remedy = "carry it where it belongs, or correct the line of the server"
            raise DeclarationError(f"its {field} is {shown(its)}, and here it has to be {wanted!r}; {remedy}.")
    kind, content = _read(_secure.disclosed(head, rest, parties.signing, parties.own.identity))
    require(kind in KINDS, f"{_decode.brief(kind)!r} is no type of message")
    name, digest = f"{header.run}.bundle", _digest(raw)
    with _kept(here) as memory:
        number, last, before = recalled(memory, name) or (0, "", np.zeros(0, np.uint8))
    if digest == last:
        return before.tobytes()
    if header.number < number:  # one that the server has written anew has the same number, and the node's rules
        rule = f"its number is {header.number}, and number {number} of run {header.run!r} is answered already"
        raise DeclarationError(f"{rule}: it is an older one; carry the latest from the server.")
    if not number and kind in (ASK, GATE, CONCLUDE):
        rule = f"it is of run {header.run!r}, in which this folder has answered nothing"
        raise DeclarationError(f"{rule}: it is for another app of this identity; give each an identity of its own.")
    try:
        with _decode.reading("it"):
            parcel = parcel_of(content)
    except Malformed:
        parcel = {}, {}  # which the node refuses as malformed, by its log
    reply = answer(kind, here, config, None, parcel)
    back = Header(header.run, parties.own.name, parties.server, header.number, ANSWERED, digest)
    bundle = packed(back, _written(kind, reply), parties.own.identity, parties.sealing)
    with _kept(here) as memory:
        keep(memory, name, (header.number, digest, np.frombuffer(bundle, np.uint8)))
    logger.info("run %s, bundle %d (%s) is answered", header.run, header.number, kind, extra={"run": header.run})
    return bundle


def watch(
    folder: Path, answered: Callable[[Path], Path], poll: float = 5.0, stop: Callable[[], bool] | None = None
) -> None:
    """Answer each bundle that comes into a folder, or one in it, until interrupted, or until `stop` says so."""
    positive("poll", poll, "it is in seconds")
    if not folder.is_dir():
        raise DeclarationError(f"folder {str(folder)!r} is none; give the folder that bundles come into.")
    done: dict[Path, int] = {}  # bundles that are answered, and their times of change
    refused: dict[Path, str] = {}  # others, which are tried again: what they lack may be put right
    while stop is None or not stop():
        for path in sorted(folder.rglob(f"*{ASKED}")):
            try:
                changed = path.stat().st_mtime_ns
                if done.get(path) != changed and not _is_answered(path):
                    answered(path)
                done[path] = changed
            except FileNotFoundError:  # it is being moved away
                continue
            except (DeclarationError, OSError) as error:  # nobody ends the service by what they put there
                if refused.get(path) != str(error):
                    refused[path] = str(error)
                    logger.error("bundle %s: %s", path, error, extra={"status": "refused"})
        time.sleep(poll)


def _is_answered(path: Path) -> bool:
    """Whether the answer beside a bundle is to it."""
    try:
        return unpacked(_bytes_of(path.with_suffix(ANSWERED)))[0].about == _digest(_bytes_of(path))
    except (OSError, Malformed):
        return False
