"""A site: one client's data, its compiled model and its personal state, and what it answers. Knows no Flower."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from filelock import FileLock

import fedppl
from fedppl.contracts import AnyAlgorithm, Failure, Request
from fedppl.engine import _account
from fedppl.engine._guard import REFUSED, Guard, concluded, digest, may_take_part, replayed
from fedppl.engine.answer import answer, require_fit, say_unused
from fedppl.engine.policy import Policy
from fedppl.flower import wire as _wire
from fedppl.model.client import ClientModel
from fedppl.model.declaration import FederatedModel
from fedppl.results import idata
from fedppl.results.at_client import client_posterior
from fedppl.storage import checkpoint
from fedppl.storage import digest as _digest
from fedppl.types import DeclarationError, LocalFailure, Message

__all__ = ["Memory", "Site", "answer_request", "conclude", "constrain", "enrolled", "file_memory", "introduce"]

logger = logging.getLogger(__name__)

# Seconds that a request waits for the one before it.
_PATIENCE = 600.0


class Site(NamedTuple):
    """What a site's operator declared. It may be copied to other processes; compiled models stay in theirs."""

    token: str  # tells one site app from another in the same process
    model: FederatedModel
    algorithm: AnyAlgorithm
    load_data: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    client_id: Callable[[Mapping[str, Any]], str]
    folder: Path | None
    draws: int
    chains: int
    policy: Policy


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
            client = declaration.enrol(pair, kernel=site.algorithm.needs.kernel)[name]
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


def _held(site: Site) -> AbstractContextManager[Any]:
    """One request at a time, over all processes of the site: what it has answered is read, changed and written."""
    return nullcontext() if site.folder is None else FileLock(site.folder / "site.lock", timeout=_PATIENCE)


def _guard(site: Site, config: Mapping[str, Any]) -> Guard | None:
    """The policy with its account in the site's folder; without a folder a site has no rules, see `client_app`."""
    return None if site.folder is None else _account.in_folder(site.policy, site.folder, site.client_id(config))


def introduce(site: Site, config: Mapping[str, Any]) -> _wire.Parcel:
    """Answer the server's first call: the layout, or why this site cannot take part.

    An exception's text may quote data, so only that of a wrong declaration travels.
    """
    name = site.client_id(config)
    try:
        with _held(site):
            client = enrolled(site, config)
            if (guard := _guard(site, config)) is not None:
                may_take_part(guard, site.algorithm, client)
        return _wire.pack_hello(name, fedppl.__version__, site.algorithm.settings, client.layout, client.reader())
    except Exception as error:
        logger.exception("client %s cannot take part", name, extra={"client": name, "status": "refused"})
        told = str(error) if isinstance(error, DeclarationError) else "the reason is in the site's own log"
        return {}, {"client_id": name, "error": f"{type(error).__name__}: {told}"}


def answer_request(site: Site, config: Mapping[str, Any], memory: Memory, parcel: _wire.Parcel) -> _wire.Parcel:
    """Run the client's part of the algorithm. Personal state is kept as the very last thing.

    What cannot be read, and whatever goes wrong around the computation, is refused in one text.
    """
    client_id, nonce = _addressed(parcel)
    refusal = _wire.pack_reply(Failure(client_id, nonce, REFUSED))
    try:
        with _held(site):
            guard = _guard(site, config)
            try:
                request = _wire.unpack_request(*parcel)
            except Exception as error:  # whatever a server sends is no reason to fail
                _note(guard, {"event": "request", "refused": f"malformed: {type(error).__name__}: {error}"[:200]})
                return refusal
            return _answered(site, config, memory, request, guard)
    except Exception:
        logger.exception("client %s refuses a request", client_id, extra={"client": client_id, "status": "refused"})
        return refusal


def _addressed(parcel: _wire.Parcel) -> tuple[str, int]:
    """Client and nonce of a request as far as they can be read."""
    texts = parcel[1]
    told = str(texts.get("nonce", ""))[:20]
    return str(texts.get("client_id", ""))[:200], int(told) if told.isdecimal() else 0


def _note(guard: Guard | None, entry: Mapping[str, Any]) -> None:
    logger.warning("%s refused: %s", entry["event"], entry["refused"])
    if guard is not None:
        guard.write(guard.read(), entry)


def _answered(
    site: Site, config: Mapping[str, Any], memory: Memory, request: Request, guard: Guard | None
) -> _wire.Parcel:
    name = _name_of_kept(site, config, request.run, request.client_id)
    about = {"event": "request", "run": request.run, "round": request.round, "client": request.client_id}
    try:
        client = enrolled(site, config, request.client_id)
        seal = _same_data(memory, client, request.run)
        kept = _recall(site, memory, name, request.client_id)
        # A site that died over a request has admitted it and not answered: what it keeps is of another.
        if guard is not None and replayed(guard, request) and kept.digest == digest(request):
            guard.write(guard.read(), {**about, "repeated": True, "refused": None})
            return kept.arrays, {**kept.texts, "nonce": str(request.nonce)}
    except Exception as error:
        why = str(error) if isinstance(error, LocalFailure) else type(error).__name__
        logger.debug("client %s cannot answer", request.client_id, exc_info=True)
        _note(guard, {**about, "refused": f"site: {why}"})
        return _wire.pack_reply(Failure(request.client_id, request.nonce, REFUSED))
    after, reply = answer(site.algorithm, client, kept.personal, request, guard)
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
    if isinstance(reply, Failure) and reply.reason == REFUSED:
        return answered  # and nothing is kept: a server makes up as many names as it likes
    _keep_seal(memory, seal)
    # In one file, hence in one step: no answer leaves, or leaves again, that personal state does not know of.
    if guard is None and after is None:
        return answered
    done = _Kept(after) if guard is None else _Kept(after, digest(request), dict(answered[0]), dict(answered[1]))
    memory.keep(name, checkpoint.pack(tuple(done), name))
    return answered


class _Kept(NamedTuple):
    """Personal state, and the answer that it comes from."""

    personal: Any = None
    digest: str = ""  # of the request
    arrays: Message = {}
    texts: dict[str, str] = {}


def _name_of_kept(site: Site, config: Mapping[str, Any], run: str, client_id: str) -> str:
    """The server chooses the names of runs and clients: what must outlive a run is not kept under them."""
    return f"{site.client_id(config)}.persistent" if site.algorithm.persistent else f"{run}-{client_id}.personal"


class _Seal(NamedTuple):
    """A digest of a client's data, and under which name it stays here."""

    name: str
    raw: bytes
    is_new: bool


def _same_data(memory: Memory, client: ClientModel, run: str) -> _Seal:
    """Refuse data that are not those of the run's first request."""
    name = f"{run}-{client.client_id}.data"
    sealed = memory.recall(name)
    if sealed is not None and not _digest.matches(sealed, client.arrays):
        raise LocalFailure(
            "its data are not those that it had when this run began; begin a new run, or give the site those data"
        )
    return _Seal(name, _digest.seal(client.arrays) if sealed is None else sealed, sealed is None)


def _keep_seal(memory: Memory, seal: _Seal) -> None:
    if seal.is_new:
        memory.keep(seal.name, seal.raw)


def _recall(site: Site, memory: Memory, name: str, client_id: str) -> _Kept:
    """Personal state and the last answer, blank where there are none yet or they cannot be read."""
    raw = memory.recall(name)
    if raw is None:
        return _Kept()
    try:
        return _Kept(*checkpoint.unpack(raw, f"personal state of client {client_id!r}", name))
    except DeclarationError as error:
        if site.algorithm.persistent:
            logger.error("client %s does not answer: %s", client_id, error)
            raise LocalFailure("its lasting state cannot be read; see the site's log") from error
        logger.warning("client %s starts with blank personal state: %s", client_id, error)
        return _Kept()


def constrain(site: Site, config: Mapping[str, Any], arrays: Message) -> _wire.Parcel:
    """Take draws of φ (S, m) back to the constrained space. No data are used for it."""
    name = site.client_id(config)
    try:
        with _held(site):
            if (guard := _guard(site, config)) is not None:
                guard.write(guard.read(), {"event": "draws of q", "refused": None})
            values = enrolled(site, config).constrain_shared(np.asarray(arrays["phi"], dtype=float))
        return values, {"client_id": name}
    except Exception:
        logger.exception("client %s cannot read draws", name, extra={"client": name, "status": "refused"})
        return {}, {"client_id": name, "refused": REFUSED}


def conclude(site: Site, config: Mapping[str, Any], memory: Memory, parcel: _wire.Parcel) -> _wire.Parcel:
    """Draw this client's own posterior and leave it in the site's folder, once a run. It does not travel.

    The server is told the same whatever happens: whether the data are those of the run, and whether drawing fails,
    depends on data, and nothing that it may ask without end may tell it.
    """
    name = _addressed(parcel)[0]
    try:
        with _held(site):
            _conclude(site, config, memory, parcel)
    except Exception:
        logger.exception("client %s drew no posterior", name, extra={"client": name, "status": "failed"})
    return {}, {"client_id": name}


def _conclude(site: Site, config: Mapping[str, Any], memory: Memory, parcel: _wire.Parcel) -> None:
    guard = _guard(site, config)
    if site.folder is None or guard is None:
        return
    try:
        client_id, run, seed, status = _wire.unpack_conclusion(parcel[1])
    except _wire.Malformed as error:
        _note(guard, {"event": "conclusion", "refused": f"malformed: {error}"[:200]})
        return
    if not concluded(guard, run):
        logger.warning("client %s was told before that run %s is over", client_id, run)
        return
    client = enrolled(site, config, client_id)
    _keep_seal(memory, _same_data(memory, client, run))
    personal = _recall(site, memory, _name_of_kept(site, config, run, client_id), client_id).personal
    result = client_posterior(site.algorithm, client, personal, parcel[0], seed, site.draws, site.chains, status)
    path = site.folder / f"{quote(client_id, safe='')}.nc"
    partial = path.with_name(path.name + ".partial")
    idata.write(result, partial)
    partial.replace(path)
    logger.info("client %s: posterior written to %s", client_id, path)


def file_memory(folder: Path) -> Memory:
    """Bytes mirrored to files, each replaced in one step."""

    def recall(name: str) -> bytes | None:
        path = folder / quote(name, safe="")
        return path.read_bytes() if path.exists() else None

    def keep(name: str, raw: bytes) -> None:
        checkpoint.replace(folder / quote(name, safe=""), raw)

    return Memory(recall, keep)
