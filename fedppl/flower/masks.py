"""Secure sums over messages: greetings, cohorts and counts as texts, words as an array, and a site's part in them.

Before a run a site greets (its signed key), and joins the cohort of the run, all of whose members are on its own
roster: it answers with counts of its rows and outcomes under masks, signed. The members' parts come with the first
request, so that each site adds them itself and holds the cohort's counts against its policy. Then it answers requests
under masks of that cohort alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedppl import site
from fedppl.contracts import AnyAlgorithm, ClientUpdate, Failure, Reply, Request
from fedppl.engine import secure
from fedppl.engine.guard import REFUSED, digest
from fedppl.flower.decode import LABELS_LENGTH, Malformed, brief, checked_name, one_text, parsed, require
from fedppl.numerics.streams import client_seed
from fedppl.types import Array, DeclarationError, Message

WORDS = "words"  # the one array of a masked reply
_MOST_ROWS = 2**53  # of a cohort
_MOST_COUNTS = 2**16  # bytes of a part
COUNTS = b"counts"  # what the words of a cohort's first sum are about


# A site's part --------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A site's place in a run's cohort."""

    member: secure.Member
    names: tuple[str, ...]  # of the cohort
    digest: str  # of the greetings
    counts: Array  # of rows and outcomes, summed over the cohort; empty before the members' parts have come


def greet(files: Path, folder: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """A site's greeting for a run. It is the same whenever it is asked, and depends on no data."""
    here = site.read(files)
    return _packed(secure.greeting(_key(here, folder, _run(texts))))


def place(files: Path, folder: Path, run: str, greetings: Sequence[secure.Greeting]) -> Place:
    """The site's place in a cohort all of whose members are on its roster, or DeclarationError with what is wrong."""
    here = site.read(files)
    try:
        member = secure.joined(_key(here, folder, run), greetings, here.roster)
    except ValueError as error:  # among them keys that are no points of their curve
        if isinstance(error, DeclarationError):
            raise
        raise DeclarationError(f"the cohort cannot be used: {error}") from error
    names = tuple(sorted(one.name for one in greetings))
    return Place(member, names, secure.digest(greetings).hex(), np.zeros(0))


def signed_part(files: Path, at: Place, about: bytes, numbers: Array, number: int = 1) -> dict[str, str]:
    """A site's part of a sum that the members add themselves: masked and signed, so that no server can change it."""
    here = site.read(files)
    _, words = secure.masked(at.member, secure.encoded({"": numbers}, len(at.names)), number, about)
    return _packed(secure.published(here.identity, here.name, _about(at, about), words))


def sum_of_parts(files: Path, at: Place, about: bytes, texts: Mapping[str, str]) -> Array:
    """The sum of the parts that all members have signed about this, or DeclarationError."""
    try:
        parts = unpack_parts(texts)
    except Malformed as error:
        raise DeclarationError(f"malformed: {error}") from error
    words = secure.total(parts, at.names, _about(at, about), site.read(files).roster)
    total, cut, missing = secure.decoded(words, {"": ((len(words) - 2) // 2,)})
    if cut or missing:
        raise DeclarationError("the members' parts do not add up: they have other masks, or other data")
    return np.asarray(total[""])


def counted(files: Path, at: Place, texts: Mapping[str, str]) -> Place:
    """The place with the cohort's counts, or DeclarationError."""
    counts = sum_of_parts(files, at, COUNTS, texts)
    if np.any(counts < 0) or np.any(counts > _MOST_ROWS):
        raise DeclarationError("the members' counts do not add up: they have other masks, or other data")
    return at._replace(counts=counts)


def asked_of(files: Path, at: Place, request: Request) -> None:
    """Raise DeclarationError where a request is not the one to all members."""
    name = at.member.name
    if request.client_id != name or not request.report:
        raise DeclarationError(f"a request of client {request.client_id!r} for no reply, or not to {name!r}")
    if request.seed[-1:] != (client_seed(name),):
        raise DeclarationError("a seed that is not this site's: the others' part could stay while this one changes")


def quiet(algorithm: AnyAlgorithm, heard: Callable[[Message], None]) -> AnyAlgorithm:
    """The algorithm without diagnostics, which are a single client's and do not leave; `heard` gets what it is asked.

    That is the request as the policy admits it, with the points that it leaves out.
    """

    def update_client(client: Any, personal: Any, message: Message, rng: Any) -> ClientUpdate[Any]:
        heard(message)
        return algorithm.update_client(client, personal, message, rng)._replace(info={})

    return algorithm._replace(update_client=update_client)


def hidden(at: Place, request: Request, admitted: Message, reply: Reply | Failure) -> Reply | Failure:
    """A reply under masks; of a failure nothing but that there is one.

    Masks depend on the points that the policy leaves out: where one site alone left out a point, the sums there and
    at a point near by would differ by its value.
    """
    if isinstance(reply, Failure):
        return Failure(reply.client_id, reply.nonce, REFUSED)
    words = secure.encoded(reply.message, len(at.names))
    inside = np.asarray(admitted.get("inside", np.ones(0)), dtype=bool)
    asked = hashlib.sha256(_asked(request) + inside.tobytes()).digest()
    _, words = secure.masked(at.member, words, request.round, asked)
    return reply._replace(message={WORDS: words.view(np.int64)}, info={}, reason="")


def _asked(request: Request) -> bytes:
    """A digest of all that is the same for all sites: numbers with their types, and the seed but for its last part."""
    kinds = [(name, np.asarray(value).dtype.str) for name, value in sorted(request.message.items())]
    common = digest(request._replace(seed=request.seed[:-1]))
    return hashlib.sha256(json.dumps([common, kinds]).encode()).digest()


def _run(texts: Mapping[str, str]) -> str:
    return checked_name(one_text(texts, "run"), "'run'")


def _key(here: site.Site, folder: Path, run: str) -> secure.RunKey:
    # The folder tells apart the apps of one identity: two accounts that do not know of each other have other masks.
    return secure.derived_key(here.identity, here.name, run, str(folder.resolve()))


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


def unpack_cohort(texts: Mapping[str, str]) -> list[secure.Greeting]:
    """Read a cohort, or `Malformed`."""
    return [_unpacked_greeting(member) for member in _triples(texts, "cohort")]


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


def shapes_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shape of the words of a reply with arrays of these shapes."""
    return {WORDS: (2 * sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values()) + 2,)}


def words_of(request: Request, reply: Reply | Failure | None, fingerprint: str) -> secure.Words | str:
    """The words of a site's reply, or why there are none."""
    if not isinstance(reply, Reply):
        return "no reply" if reply is None else reply.reason
    if (reply.client_id, reply.nonce) != (request.client_id, request.nonce):
        return f"reply of client {reply.client_id!r} to another request"
    if reply.fingerprint != fingerprint:
        return f"layout fingerprint {brief(reply.fingerprint)} differs from {fingerprint}: another model runs there"
    words = reply.message[WORDS]
    return words.view(np.uint64) if words.dtype == np.int64 else f"words of type {words.dtype}, expected int64"


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
