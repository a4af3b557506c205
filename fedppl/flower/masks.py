"""Secure sums over messages: greetings and cohorts as texts, words as an array, and a site's part in them.

A site answers under masks of a cohort alone: the one that the first answered request of a run names, all of whose
members are on the site's own roster.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedppl import site
from fedppl.contracts import AnyAlgorithm, ClientUpdate, Failure, Reply, Request
from fedppl.engine import secure
from fedppl.engine.guard import REFUSED, Guard, Run, digest
from fedppl.flower.decode import LABELS_LENGTH, brief, checked_name, one_text, parsed, require, whole_number
from fedppl.numerics.streams import client_seed
from fedppl.types import DeclarationError

WORDS = "words"  # the one array of a masked reply
MOST_COHORTS = 2  # of a run: sums over two that differ by a site are that site's part
_FIXED = "cohort\n"  # prefix in a site's ledger; names of runs are printable, so that none begins so


# A site's part --------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A site's place in the cohort of a request."""

    member: secure.Member
    names: tuple[str, ...]  # of the cohort
    number: int
    digest: str
    is_new: bool  # whether no request was answered in it yet


def greet(files: Path, folder: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """A site's greeting for a cohort of a run. It is the same whenever it is asked, and depends on no data."""
    run, number = checked_name(one_text(texts, "run"), "'run'"), whole_number(texts, "number")
    require(number < MOST_COHORTS, f"'number' is {number}, expected less than {MOST_COHORTS}")
    here = site.read(files)
    greeting = secure.greeting(secure.derived_key(here.identity, here.name, run, number, _place(folder)))
    return dict(zip(secure.Greeting._fields, _packed(greeting), strict=True))


def joined(files: Path, folder: Path, guard: Guard, request: Request, texts: Mapping[str, str]) -> Place:
    """The site's place in the cohort that a request names, or DeclarationError with what is wrong."""
    here = site.read(files)
    if "cohort" not in texts:
        raise DeclarationError("a request without a cohort: this site answers under masks alone")
    if request.client_id != here.name or not request.report:
        raise DeclarationError(f"a request of client {request.client_id!r} for no reply, or not to {here.name!r}")
    if request.seed[-1:] != (client_seed(here.name),):
        raise DeclarationError("a seed that is not this site's: the others' part could stay while this one changes")
    try:
        greetings, number = unpack_cohort(texts)
        key = secure.derived_key(here.identity, here.name, request.run, number, _place(folder))
        member = secure.joined(key, greetings, here.roster)
    except ValueError as error:  # among them keys that are no points of their curve
        if isinstance(error, DeclarationError):
            raise
        raise DeclarationError(f"the cohort cannot be used: {error}") from error
    fixed, its = guard.read().runs.get(_name(request.run, number)), secure.digest(greetings).hex()
    if fixed is not None and fixed.digest != its:
        raise DeclarationError(f"another cohort than the one that run {request.run!r} began with")
    return Place(member, tuple(sorted(one.name for one in greetings)), number, its, fixed is None)


def fix(guard: Guard, place: Place, request: Request) -> None:
    """Keep the cohort of a run, before the first answer in it leaves."""
    if place.is_new:
        ledger = guard.read()
        runs = {**ledger.runs, _name(request.run, place.number): Run(request.round, place.digest)}
        entry = {"event": "cohort", "run": request.run, "client": request.client_id, "members": list(place.names)}
        guard.write(ledger._replace(runs=runs), entry)


def quiet(algorithm: AnyAlgorithm) -> AnyAlgorithm:
    """The algorithm without diagnostics, which are a single client's and do not leave."""

    def update_client(*arguments: Any) -> ClientUpdate[Any]:
        return algorithm.update_client(*arguments)._replace(info={})

    return algorithm._replace(update_client=update_client)


def hidden(place: Place, request: Request, reply: Reply | Failure) -> Reply | Failure:
    """A reply under masks; of a failure nothing but that there is one."""
    if isinstance(reply, Failure):
        return Failure(reply.client_id, reply.nonce, REFUSED)
    words = secure.encoded(reply.message, len(place.names))
    _, words = secure.masked(place.member, words, request.round, _asked(request))
    return reply._replace(message={WORDS: words.view(np.int64)}, info={}, reason="")


def _asked(request: Request) -> bytes:
    """A digest of all that is the same for all sites: numbers with their types, and the seed but for its last part."""
    kinds = [(name, np.asarray(value).dtype.str) for name, value in sorted(request.message.items())]
    common = digest(request._replace(seed=request.seed[:-1]))
    return hashlib.sha256(json.dumps([common, kinds]).encode()).digest()


def _name(run: str, number: int) -> str:
    return f"{_FIXED}{number}\n{run}"


def _place(folder: Path) -> str:
    """What tells apart the apps of one identity: two accounts that do not know of each other have other masks."""
    return str(folder.resolve())


# The server's part ----------------------------------------------------------------------------------------------------


def ask(client_id: str, run: str) -> dict[str, str]:
    """Texts of the question for a greeting."""
    return {"client_id": client_id, "run": run, "number": "0"}


def unpack_greeting(texts: Mapping[str, str], client_id: str) -> secure.Greeting:
    """Read a site's greeting, or `Malformed`."""
    require("refused" not in texts, "it has no identity, or refuses; see secure= of its client_app, and its log")
    greeting = _unpacked([texts.get(field) for field in secure.Greeting._fields])
    require(greeting.name == client_id, f"its identity is of {greeting.name!r}; make one with its client-id as --name")
    return greeting


def pack_cohort(greetings: Sequence[secure.Greeting]) -> dict[str, str]:
    """Texts that go with each request of a cohort."""
    return {"cohort": json.dumps([_packed(greeting) for greeting in greetings]), "number": "0"}


def unpack_cohort(texts: Mapping[str, str]) -> tuple[list[secure.Greeting], int]:
    """Read the cohort of a request and its number, or `Malformed`."""
    members, number = parsed(texts, "cohort", LABELS_LENGTH), whole_number(texts, "number")
    require(number < MOST_COHORTS, f"cohort {number + 1} of a run, and at most {MOST_COHORTS} are answered")
    require(type(members) is list and all(type(one) is list and len(one) == 3 for one in members), "'cohort' is none")
    return [_unpacked(member) for member in members], number


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


def _packed(greeting: secure.Greeting) -> list[str]:
    return [greeting.name, *(base64.b64encode(key).decode() for key in (greeting.public, greeting.signature))]


def _unpacked(parts: Sequence[Any]) -> secure.Greeting:
    name, public, signature = parts
    return secure.Greeting(checked_name(name, "a site's name"), _bytes(public, 32), _bytes(signature, 64))


def _bytes(text: Any, length: int) -> bytes:
    try:
        raw = base64.b64decode(text, validate=True) if type(text) is str else b""
    except ValueError:
        raw = b""
    require(len(raw) == length, f"a key or signature is not {length} bytes in base64")
    return raw
