"""What rests at a node between two requests: personal state, the last answer, and digests of the data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from fedppl.contracts import AnyAlgorithm
from fedppl.engine import account
from fedppl.engine.policy import Policy
from fedppl.model.client import ClientModel
from fedppl.storage import checkpoint, codec
from fedppl.storage import signed as _key
from fedppl.storage.signed import pack, unpack
from fedppl.types import DeclarationError, LocalFailure, Message

logger = logging.getLogger(__name__)


class Memory(NamedTuple):
    """Where personal state and the digest of the data rest between two requests: bytes under a name."""

    recall: Callable[[str], bytes | None]
    keep: Callable[[str, bytes], None]


BLANK = Memory(lambda name: None, lambda name, raw: None)
"""Of a site that keeps nothing."""


def file_memory(folder: Path) -> Memory:
    """Bytes mirrored to files, each replaced in one step."""

    def recall(name: str) -> bytes | None:
        path = folder / quote(name, safe="")
        return path.read_bytes() if path.exists() else None

    def keep(name: str, raw: bytes) -> None:
        checkpoint.replace(folder / quote(name, safe=""), raw)

    return Memory(recall, keep)


class Kept(NamedTuple):
    """Personal state, and the answer that it comes from."""

    personal: Any = None
    digest: str = ""  # of the request
    arrays: Message = {}
    texts: dict[str, str] = {}


def name_of_kept(algorithm: AnyAlgorithm, own_id: str, run: str, client_id: str) -> str:
    """The server chooses the names of runs and clients: what must outlive a run is not kept under them."""
    return f"{own_id}.lasting" if algorithm.persistent else f"{run}-{client_id}.personal"


class Seal(NamedTuple):
    """A digest of a client's data, and under which name it stays here."""

    name: str
    raw: bytes
    is_new: bool


def same_data(memory: Memory, client: ClientModel, run: str) -> Seal:
    """Refuse data that are not those of the run's first request."""
    name = f"{run}-{client.client_id}.data"
    sealed = memory.recall(name)
    if sealed is not None and not codec.matches(sealed, client.arrays):
        raise LocalFailure(
            "its data are not those that it had when this run began; begin a new run, or give the site those data"
        )
    return Seal(name, codec.seal(client.arrays) if sealed is None else sealed, sealed is None)


def keep_seal(memory: Memory, seal: Seal) -> None:
    """Keep the digest where there was none."""
    if seal.is_new:
        memory.keep(seal.name, seal.raw)


class Versions(NamedTuple):
    """Data that were answered about, those that are here, and what the policy says of the difference."""

    name: str
    earlier: list[dict[str, Any]]  # the seal of each, and digests of its cells
    now: dict[str, Any]
    refused: str | None


def data_version(memory: Memory, own: str, columns: Mapping[str, Any], rules: Policy) -> Versions | None:
    """Hold a client's data against all that were answered about; None where none are told apart.

    Digests of cells are kept under the site's own name, not under one that the server chooses.
    """
    if rules.epsilon is not None or rules.changed_rows <= 1 or not columns:
        return None
    name = f"{own or 'site'}.versions"
    raw = memory.recall(name)
    earlier = [] if raw is None else list(unpack(raw, repr(name), name))
    if any(codec.matches(one["seal"], columns) for one in earlier):
        return Versions(name, earlier, {}, None)
    cells = account.version_of(columns, _key.of_owner(make=True))
    before = [one["cells"] for one in earlier]
    refused = account.refuse_version(before, cells, rules.changed_rows)
    return Versions(name, earlier, {"seal": codec.seal(columns), "cells": cells}, refused)


def keep_version(memory: Memory, found: Versions | None) -> None:
    """Remember data that an answer is about, before it leaves."""
    if found is not None and found.now:
        memory.keep(found.name, pack([*found.earlier, found.now], found.name))


def recalled(algorithm: AnyAlgorithm, memory: Memory, name: str, client_id: str) -> Kept:
    """Personal state and the last answer, blank where there are none yet or they cannot be read."""
    raw = memory.recall(name)
    if raw is None:
        return Kept()
    try:
        return Kept(*unpack(raw, f"personal state of client {client_id!r}", name))
    except DeclarationError as error:
        if algorithm.persistent:
            logger.error("client %s does not answer: %s", client_id, error)
            raise LocalFailure("its lasting state cannot be read; see the site's log") from error
        logger.warning("client %s starts with blank personal state: %s", client_id, error)
        return Kept()
