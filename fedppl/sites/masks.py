"""Secure sums over messages: greetings, cohorts and counts as texts, words as an array, and a site's part in them.

Before a run a site greets (its signed key), and joins the cohort of the run, all of whose members are on its own
roster: it answers with counts of its rows and outcomes under masks, signed. The members' parts come with the first
request, so that each site adds them itself and holds the cohort's counts against its policy. Then it answers requests
under masks of that cohort alone.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedppl.contracts import AnyAlgorithm, ClientUpdate, Failure, Reply, Request
from fedppl.engine import secure
from fedppl.engine.guard import REFUSED, digest
from fedppl.numerics.streams import client_seed
from fedppl.sites.decode import LABELS_LENGTH, Malformed, Parcel, brief, checked_name, one_text, parsed, require
from fedppl.storage.store import salt
from fedppl.types import Array, DeclarationError, Message

WORDS = "words"  # the one array of a masked reply
MOST_ROWS = 2**53  # of a cohort
_MOST_COUNTS = 2**16  # bytes of a part
_COHORTS_KEPT = 8  # whose keys stay in memory
MOST_OF_GATE = 2**26  # bytes of a sealed part: of 200 coordinates at four points it has 4 MB
_OF_GATE = "gate "  # prefix of arrays that go with a request
COUNTS = b"counts"  # what the words of a cohort's first sum are about
COLUMNS = b"columns"  # and those of the sum by which its members agree on a formula
_NO_SUM = "the members' parts do not add up: they have other masks, or other data"
_CONCLUSION = b"fedppl conclusion "  # what words at the end of a run are about; longer than the digest of a round


# A site's part --------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A site's place in a run's cohort."""

    member: secure.Member
    names: tuple[str, ...]  # of the cohort
    digest: str  # of the greetings
    counts: Array  # the cohort's, of rows, outcomes, and sites that fail `few_rows` alone; empty before parts have come
    gate: Sequence[secure.Part] = ()  # sealed parts that came with a request


def greet(files: Path, folder: Path, texts: Mapping[str, str], words: secure.Words | None = None) -> dict[str, str]:
    """A site's greeting for a run: the same whenever it is asked, of no data, or of the words that it will hide."""
    here, run = secure.read_keys(files), checked_name(one_text(texts, "run"), "'run'")
    return _packed(secure.greeting(secure.derived_key(here.identity, here.name, run, _where(folder, words))))


def place(
    files: Path,
    folder: Path,
    run: str,
    greetings: Sequence[secure.Greeting],
    words: secure.Words | None = None,
    agreed: str = "",
) -> Place:
    """The site's place in a cohort all of whose members are on its roster, or DeclarationError with what is wrong.

    The server sends each site what all have `agreed` on, a digest of which is in the masks: one site that had other
    scales than the others, or than in another run, would be told by the difference of two sums.
    """
    here = secure.read_keys(files)
    roster = tuple(sorted(here.roster.items()))
    try:
        secret = here.identity.private_bytes_raw()
        member = _member(secret, here.name, run, _where(folder, words), tuple(greetings), roster, agreed)
    except ValueError as error:  # among them keys that are no points of their curve
        if isinstance(error, DeclarationError):
            raise
        raise DeclarationError(f"the cohort cannot be used: {error}") from error
    names = tuple(sorted(one.name for one in greetings))
    return Place(member, names, secure.digest(greetings).hex(), np.zeros(0))


@functools.lru_cache(maxsize=_COHORTS_KEPT)
def _member(
    secret: bytes,
    name: str,
    run: str,
    where: str,
    greetings: tuple[secure.Greeting, ...],
    roster: tuple[tuple[str, bytes], ...],
    agreed: str,
) -> secure.Member:
    """A place among these greetings, once in a process: signatures and keys of a hundred members take 17 ms of CPU."""
    key = secure.derived_key(secure.Identity.from_private_bytes(secret), name, run, where)
    return secure.joined(key, greetings, dict(roster), agreed)


def counts_part(files: Path, at: Place, counts: Array) -> dict[str, str]:
    """A site's part of the cohort's counts: masked and signed, so that no server can change their sum."""
    words = secure.masked(at.member, secure.encoded({"": counts}, len(at.names)), 1, COUNTS)
    return _packed(secure.published(secure.read_keys(files).identity, at.member.name, _about(at, COUNTS), words))


def counted(files: Path, at: Place, texts: Mapping[str, str]) -> Place:
    """The place with the sum of the counts that all members have signed, or DeclarationError."""
    try:
        parts = unpack_parts(texts)
    except Malformed as error:
        raise DeclarationError(f"malformed: {error}") from error
    words = secure.verified(parts, at.names, _about(at, COUNTS), secure.read_keys(files).roster)
    counts = _sum_of(list(words.values()))
    if np.any(counts < 0) or np.any(counts > MOST_ROWS):
        raise DeclarationError(_NO_SUM)
    return at._replace(counts=counts)


def _sum_of(parts: Sequence[secure.Words]) -> Array:
    """The sum of members' parts, or DeclarationError."""
    words = secure.added(parts)
    total, cut, missing = secure.decoded(words, {"": ((len(words) - 2) // 2,)})
    if cut or missing:
        raise DeclarationError(_NO_SUM)
    return np.asarray(total[""])


def sealed_part(files: Path, at: Place, request: Request, numbers: Array) -> Parcel:
    """A site's part of what the members sum before they answer a request, which nobody but them can read.

    NaN stands for numbers that the site does not have: a member reads noise there, and not the sum of the others.
    """
    about, lost = _gate(request), np.isnan(numbers)
    plain = secure.encoded({"": np.where(lost, 0.0, numbers)}, len(at.names))
    words = secure.sealed(at.member, _noised(at, plain, lost, request.round, about), request.round, about)
    part = secure.published(secure.read_keys(files).identity, at.member.name, _about(at, about), words)
    return {WORDS: words.view(np.int64)}, {"signature": _packed(part)["signature"]}


def sum_of_sealed(files: Path, at: Place, request: Request) -> Array:
    """The sum of all members' sealed parts that came with a request and are about it, or DeclarationError."""
    about = _gate(request)
    words = secure.verified(at.gate, at.names, _about(at, about), secure.read_keys(files).roster)
    parts = [secure.opened(at.member, name, sealed, request.round, about) for name, sealed in words.items()]
    return _sum_of(parts)


def require_asked(at: Place, request: Request) -> None:
    """Raise DeclarationError where a request is not the one to all members."""
    name = at.member.name
    if request.client_id != name or not request.report:
        raise DeclarationError(f"a request of client {request.client_id!r} for no reply, or not to {name!r}")
    if request.seed[-1:] != (client_seed(name),):
        raise DeclarationError("a seed that is not this site's: the others' part could stay while this one changes")


def quiet(algorithm: AnyAlgorithm) -> AnyAlgorithm:
    """The algorithm without diagnostics, which are a single client's and do not leave."""

    def update_client(*arguments: Any) -> ClientUpdate[Any]:
        return algorithm.update_client(*arguments)._replace(info={})

    return algorithm._replace(update_client=update_client)


def hidden(at: Place, request: Request, reply: Reply | Failure) -> Reply | Failure:
    """A reply under masks; of a failure nothing but that there is one.

    Where a site has no value at a point, which it counts in an array of that name and ``_lost``, its word is noise: of
    a sum over the others there, and over all at a point near by, the difference would be its value. So are all words of
    a reply of which a number does not fit, which makes the round void.
    """
    if isinstance(reply, Failure):
        return Failure(reply.client_id, reply.nonce, REFUSED)
    asked = _asked(request)
    plain = secure.encoded(reply.message, len(at.names))
    lost = _lost(reply.message) | bool(np.any(plain[-2:]))
    words = secure.masked(at.member, _noised(at, plain, lost, request.round, asked), request.round, asked)
    return reply._replace(message={WORDS: words.view(np.int64)}, info={}, reason="")


def _noised(at: Place, words: secure.Words, lost: NDArray[np.bool_], number: int, about: bytes) -> secure.Words:
    """Words with noise in those of numbers that are `lost`."""
    where, noised = np.flatnonzero(np.tile(lost, 2)), words.copy()
    noised[where] += secure.noise(at.member, len(words), number, about)[where]
    return noised


def _lost(message: Message) -> NDArray[np.bool_]:
    """Which numbers of a reply are of points without a value, in the order in which they are encoded."""
    parts = [
        np.asarray(message.get(f"{name}_lost", np.zeros(np.shape(message[name])))).ravel() for name in sorted(message)
    ]
    return np.concatenate([np.zeros(0), *parts]) > 0


def _asked(request: Request, *more: str) -> bytes:
    """A digest of all that is the same for all sites: numbers with their types, and the seed but for its last part."""
    kinds = [(name, np.asarray(value).dtype.str) for name, value in sorted(request.message.items())]
    common = digest(request._replace(seed=request.seed[:-1]))
    return hashlib.sha256(json.dumps([common, kinds, *more]).encode()).digest()


# The end of a run: sums over rows, each under masks of its own, or noise in its place ---------------------------------


def asked_at_end(run: str, seed: int, message: Message, status: str) -> bytes:
    """A digest of a final message, which is the same for all sites."""
    return _asked(Request("", 0, 0, (seed, 0), message, run), status)


def concluded(at: Place, asked: bytes, told: Message, lengths: Mapping[str, int]) -> dict[str, Any]:
    """Words of every conclusion by name: of those that a site does not tell noise, so that nobody's sum can be read.

    A zero in its place would leave the sum of the others, and an empty answer would say who does not tell.
    """
    words: dict[str, Any] = {}
    for name, length in lengths.items():
        plain = None if name not in told else secure.encoded({"": told[name]}, len(at.names))
        if plain is None or np.any(plain[-2:]):  # numbers that do not fit would be missing in the sum
            hidden = np.frombuffer(secrets.token_bytes(8 * (2 * length + 2)), "<u8").astype(np.uint64)
        else:
            hidden = secure.masked(at.member, plain, 1, _CONCLUSION + name.encode() + b" " + asked)
        words[name] = hidden.view(np.int64)
    return words


def _gate(request: Request) -> bytes:
    """What a sealed part is about: a request in a round."""
    return b"gate" + str(request.round).encode() + b"\n" + _asked(request)


def _where(folder: Path, words: secure.Words | None) -> str:
    # The folder tells apart the apps of one identity, and the salt of its file this one from any that was there before:
    # two accounts that do not know of each other have other masks.
    # So have other words, where there is one question alone: whatever is deleted at the site, no two have the same.
    about = "" if words is None else f"\n{hashlib.sha256(words.tobytes()).hexdigest()}"
    return f"{folder.resolve()}\n{salt(folder)}{about}"


def _about(at: Place, about: bytes) -> bytes:
    return about + bytes.fromhex(at.digest)


# The server's part ----------------------------------------------------------------------------------------------------


def ask(client_id: str, run: str) -> dict[str, str]:
    """Texts of the question for a greeting."""
    return {"client_id": client_id, "run": run}


def unpack_greeting(texts: Mapping[str, str], client_id: str) -> secure.Greeting:
    """Read a site's greeting, or `Malformed`."""
    require("refused" not in texts, "it has no identity, or refuses; see secure= of its client_app, and its log")
    greeting = _unpacked_greeting([texts.get(field) for field in secure.Greeting._fields])
    require(greeting.name == client_id, f"its identity is of {greeting.name!r}; make one with its client-id as --name")
    return greeting


def pack_cohort(greetings: Sequence[secure.Greeting]) -> dict[str, str]:
    """Texts that name a cohort."""
    return {"cohort": json.dumps([list(_packed(greeting).values()) for greeting in greetings])}


def unpack_cohort(texts: Mapping[str, str]) -> tuple[secure.Greeting, ...]:
    """Read a cohort, or `Malformed`."""
    text = texts.get("cohort")
    return _cohort(text if type(text) is str else "")


@functools.lru_cache(maxsize=_COHORTS_KEPT)
def _cohort(text: str) -> tuple[secure.Greeting, ...]:
    """The greetings of a cohort, once in a process: to read a hundred takes 3 ms at each request."""
    return tuple(_unpacked_greeting(member) for member in _triples({"cohort": text}, "cohort"))


def unpack_part(texts: Mapping[str, str], client_id: str) -> secure.Part:
    """Read a site's part of the cohort's counts, or `Malformed`."""
    require("refused" not in texts, REFUSED)
    part = _unpacked_part([texts.get(field) for field in secure.Part._fields])
    require(part.name == client_id, f"its part is of {part.name!r}")
    return part


def pack_parts(parts: Sequence[secure.Part]) -> dict[str, str]:
    """Texts of all members' parts, which go with a site's first request."""
    return {"counts": json.dumps([list(_packed(part).values()) for part in parts])}


def unpack_parts(texts: Mapping[str, str]) -> list[secure.Part]:
    """Read all members' parts, or `Malformed`."""
    return [_unpacked_part(part) for part in _triples(texts, "counts")]


def is_gated(parts: Sequence[secure.Part]) -> bool:
    """Whether a site of the cohort fails `few_rows` alone, by the parts of its counts, of which that is the last."""
    return bool(_sum_of([np.frombuffer(part.words, dtype="<u8").astype(np.uint64) for part in parts])[-1])


def unpack_sealed(arrays: Message, texts: Mapping[str, str], client_id: str) -> secure.Part:
    """Read a site's sealed part, or `Malformed`."""
    require("refused" not in texts, REFUSED)
    require(set(arrays) == {WORDS}, f"a sealed part is one array, {WORDS!r}")
    return _sealed(client_id, arrays[WORDS], texts.get("signature"))


def pack_gate(parts: Sequence[secure.Part]) -> Parcel:
    """Arrays and a text of all members' sealed parts, which go with the request that they are about."""
    arrays = {f"{_OF_GATE}{i}": np.frombuffer(part.words, dtype="<i8") for i, part in enumerate(parts)}
    return arrays, {"gate": json.dumps([[part.name, _packed(part)["signature"]] for part in parts])}


def unpack_gate(arrays: Message, texts: Mapping[str, str]) -> tuple[Message, list[secure.Part]]:
    """The request's own arrays, and the sealed parts that came with it; or `Malformed`."""
    own = {name: value for name, value in arrays.items() if not name.startswith(_OF_GATE)}
    if "gate" not in texts:
        return own, []
    signed = parsed(texts, "gate", LABELS_LENGTH)
    valid = type(signed) is list and all(type(one) is list and len(one) == 2 for one in signed)
    require(valid and len(arrays) == len(own) + len(signed), "'gate' is no list of a name and a text for each part")
    return own, [_sealed(name, arrays.get(f"{_OF_GATE}{i}"), text) for i, (name, text) in enumerate(signed)]


def _sealed(name: Any, words: Any, signature: Any) -> secure.Part:
    valid = isinstance(words, np.ndarray) and words.ndim == 1 and words.dtype == np.int64
    require(valid, "the words of a sealed part are no vector of int64")
    return secure.Part(checked_name(name, "a site's name"), words.astype("<i8").tobytes(), _bytes(signature, 64))


def shapes_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shape of the words of a reply with arrays of these shapes."""
    return {WORDS: (2 * sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values()) + 2,)}


def shapes_at_end(lengths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Shapes of the words of conclusions of these lengths."""
    return {name: (2 * length + 2,) for name, length in lengths.items()}


def sums_at_end(answers: Mapping[str, Message], lengths: Mapping[str, int]) -> dict[str, Any]:
    """The sums over a cohort by name, of those that all its members told the same way."""
    sums: dict[str, Any] = {}
    for name, length in lengths.items():
        parts = {site: np.asarray(words[name], "<i8").view(np.uint64) for site, words in answers.items()}
        total = secure.summed(parts, {name: (length,)})
        if total.clients:
            sums[name] = total.total[name]
    return sums


def words_of(request: Request, reply: Reply | Failure, fingerprint: str) -> secure.Words | str:
    """The words of a site's reply, or why it refuses; or `Malformed`."""
    if isinstance(reply, Failure):
        return reply.reason
    is_ours = (reply.client_id, reply.nonce) == (request.client_id, request.nonce)
    require(is_ours, f"reply of client {reply.client_id!r} to another request")
    differs = f"layout fingerprint {brief(reply.fingerprint)} differs from {fingerprint}: another model runs there"
    require(reply.fingerprint == fingerprint, differs)
    return words_in(reply.message[WORDS])


def words_in(array: Any) -> secure.Words:
    """Words as they travel, or `Malformed`."""
    require(array.dtype == np.int64, f"words of type {array.dtype}, expected int64")
    return np.asarray(array).view(np.uint64)


def _packed(signed: secure.Greeting | secure.Part) -> dict[str, str]:
    name, *keys = signed
    return dict(zip(signed._fields, [name, *(base64.b64encode(key).decode() for key in keys)], strict=True))


def _triples(texts: Mapping[str, str], field: str) -> list[Any]:
    members = parsed(texts, field, LABELS_LENGTH)
    valid = type(members) is list and all(type(one) is list and len(one) == 3 for one in members)
    require(valid, f"{field!r} is no list of a name and two texts for each member")
    return list(members)


def _unpacked_greeting(parts: Sequence[Any]) -> secure.Greeting:
    name, public, signature = parts
    return secure.Greeting(checked_name(name, "a site's name"), _bytes(public, 32), _bytes(signature, 64))


def _unpacked_part(parts: Sequence[Any]) -> secure.Part:
    name, words, signature = parts
    raw = _bytes(words, None)
    require(0 < len(raw) <= _MOST_COUNTS and len(raw) % 16 == 0, f"a part of {len(raw)} bytes")
    return secure.Part(checked_name(name, "a site's name"), raw, _bytes(signature, 64))


def _bytes(text: Any, length: int | None) -> bytes:
    try:
        raw = base64.b64decode(text, validate=True) if type(text) is str else b""
    except ValueError:
        raw = b""
    require(length in (None, len(raw)), f"a key or signature is not {length} bytes in base64")
    return raw
