"""A site: one client's data, its compiled model and its personal state, and what it answers. Knows no Flower."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

import fedppl
from fedppl import _digest, checkpoint, idata
from fedppl.at_client import client_posterior
from fedppl.engine import _wire
from fedppl.engine.answer import answer, require_fit, say_unused
from fedppl.model import ClientModel, FederatedModel
from fedppl.types import Algorithm, DeclarationError, Failure, LocalFailure, Message, Status

__all__ = ["Memory", "Site", "answer_request", "conclude", "constrain", "enrolled", "file_memory", "introduce"]

logger = logging.getLogger(__name__)


class Site(NamedTuple):
    """What a site's operator declared. It may be copied to other processes; compiled models stay in theirs."""

    token: str  # tells one site app from another in the same process
    model: FederatedModel
    algorithm: Algorithm
    load_data: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    client_id: Callable[[Mapping[str, Any]], str]
    folder: Path | None
    draws: int
    chains: int


_models: dict[tuple[str, str], ClientModel] = {}  # of this process, by app and node config
_declarations: dict[str, FederatedModel] = {}  # by app
_first: dict[Any, dict[str, Mapping[str, Any]]] = {}  # the first client with such columns, by app
_lock = threading.Lock()


class Memory(NamedTuple):
    """Where personal state and the digest of the data rest between two requests: bytes under a name."""

    recall: Callable[[str], bytes | None]
    keep: Callable[[str, bytes], None]


def enrolled(site: Site, config: Mapping[str, Any], called: str | None = None) -> ClientModel:
    """Load the data and check them against the declaration, once a process.

    A site that the server knows by its authenticated name is `called` by it: random streams depend on the id.
    """
    key = (site.token, json.dumps(dict(config), sort_keys=True, default=str))
    with _lock:
        if key not in _models:
            name, data = site.client_id(config), site.load_data(config)
            declaration = _declarations.setdefault(site.token, site.model)
            columns = (site.token, *sorted((k, np.asarray(v).dtype.str, np.shape(v)[1:]) for k, v in data.items()))
            # Where one process serves many (virtual) clients, the second shows that their models are the same.
            pair = {**_first.setdefault(columns, {name: data}), name: data}
            client = declaration.enrol(pair)[name]
            require_fit(site.algorithm, client)
            if not any(token == site.token for token, _ in _models):
                say_unused(site.algorithm, client)
            _models[key] = client
        own = _models[key].client_id
        if called is not None and called != own:
            if own:
                raise LocalFailure(f"a request for client {called!r} came to client {own!r}")
            _models[key] = dataclasses.replace(_models[key], client_id=called)
        return _models[key]


def introduce(site: Site, config: Mapping[str, Any]) -> _wire.Parcel:
    """Answer the server's first call: the layout, or why this site cannot take part.

    An exception's text may quote data, so only that of a wrong declaration travels.
    """
    name = site.client_id(config)
    try:
        client = enrolled(site, config)
        return _wire.pack_hello(name, fedppl.__version__, site.algorithm.settings, client.layout, client.reader())
    except Exception as error:
        logger.exception("client %s cannot take part", name, extra={"client": name, "status": "refused"})
        told = str(error) if isinstance(error, DeclarationError) else "the reason is in the site's own log"
        return {}, {"client_id": name, "error": f"{type(error).__name__}: {told}"}


def answer_request(site: Site, config: Mapping[str, Any], memory: Memory, parcel: _wire.Parcel) -> _wire.Parcel:
    """Run the client's part of the algorithm. Personal state is kept as the very last thing."""
    request = _wire.unpack_request(*parcel)
    name = _name_of_personal(site, config, request.run, request.client_id)
    try:
        client = enrolled(site, config, request.client_id)
        _require_same_data(memory, client, request.run)
        personal = _recall(site, memory, name, request.client_id)
    except LocalFailure as failure:
        return _wire.pack_reply(Failure(request.client_id, request.nonce, str(failure)))
    after, reply = answer(site.algorithm, client, personal, request)
    if isinstance(reply, Failure):
        logger.warning(
            "round %d, client %s failed: %s %s",
            request.round,
            request.client_id,
            reply.reason,
            reply.private,
            extra={"round": request.round, "client": request.client_id, "status": "failed"},
        )
    answered = _wire.pack_reply(reply)
    if after is not None:
        memory.keep(name, checkpoint.pack(after, name))
    return answered


def _name_of_personal(site: Site, config: Mapping[str, Any], run: str, client_id: str) -> str:
    """The server chooses the names of runs and clients: what must outlive a run is not kept under them."""
    return (f"lasting-{site.client_id(config)}" if site.algorithm.lasting else f"{run}-{client_id}") + ".personal"


def _require_same_data(memory: Memory, client: ClientModel, run: str) -> None:
    """Refuse data that are not those of the run's first request; a digest of those stays here."""
    name = f"{run}-{client.client_id}.data"
    sealed = memory.recall(name)
    if sealed is None:
        memory.keep(name, _digest.seal(client.arrays))
    elif not _digest.matches(sealed, client.arrays):
        raise LocalFailure(
            "its data are not those that it had when this run began; begin a new run, or give the site those data"
        )


def _recall(site: Site, memory: Memory, name: str, client_id: str) -> Any:
    """Personal state, None where there is none yet or it cannot be read."""
    raw = memory.recall(name)
    if raw is None:
        return None
    try:
        return checkpoint.unpack(raw, f"personal state of client {client_id!r}", name)
    except DeclarationError as error:
        if site.algorithm.lasting:
            logger.error("client %s does not answer: %s", client_id, error)
            raise LocalFailure("its lasting state cannot be read; see the site's log") from error
        logger.warning("client %s starts with blank personal state: %s", client_id, error)
        return None


def constrain(site: Site, config: Mapping[str, Any], arrays: Message) -> _wire.Parcel:
    """Take draws of φ (S, m) back to the constrained space."""
    values = enrolled(site, config).constrain_shared(np.asarray(arrays["phi"], dtype=float))
    return values, {"client_id": site.client_id(config)}


def conclude(site: Site, config: Mapping[str, Any], memory: Memory, parcel: _wire.Parcel) -> _wire.Parcel:
    """Draw this client's own posterior and leave it in the site's folder. It does not travel."""
    arrays, texts = parcel
    client_id = texts["client_id"]
    try:
        client = enrolled(site, config, client_id)
        _require_same_data(memory, client, texts["run"])
    except LocalFailure as failure:
        return {}, {"client_id": client_id, "refused": str(failure)}
    if site.folder is not None:
        personal = _recall(site, memory, _name_of_personal(site, config, texts["run"], client_id), client_id)
        seed, status = int(texts["seed"]), Status(texts["status"])
        result = client_posterior(site.algorithm, client, personal, arrays, seed, site.draws, site.chains, status)
        path = site.folder / f"{quote(client_id, safe='')}.nc"
        partial = path.with_name(path.name + ".partial")
        idata.write(result, partial)
        partial.replace(path)
        logger.info("client %s: posterior written to %s", client_id, path)
    return {}, {"client_id": client_id}


def file_memory(folder: Path) -> Memory:
    """Bytes mirrored to files, each replaced in one step."""

    def recall(name: str) -> bytes | None:
        path = folder / quote(name, safe="")
        return path.read_bytes() if path.exists() else None

    def keep(name: str, raw: bytes) -> None:
        checkpoint.replace(folder / quote(name, safe=""), raw)

    return Memory(recall, keep)
