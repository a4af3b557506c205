"""A node: one client's data, compiled model and personal state, and its answers to the server."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedppl.contracts import Algorithm, AnyAlgorithm, Failure, Request
from fedppl.data import frames
from fedppl.data.sources import Source
from fedppl.engine import few_rows_in_sums as in_sums
from fedppl.engine import guard as _guard
from fedppl.engine import secure as _secure
from fedppl.engine.answer import answer, require_fit, say_unused
from fedppl.engine.policy import NO_RULES, Policy, read, refuse_query, refuse_sharing, refuse_version, version_of
from fedppl.model.client import ClientModel
from fedppl.model.declaration import FederatedModel
from fedppl.model.same import code_key
from fedppl.settings import shown, whole
from fedppl.sites import masks as _masks
from fedppl.sites import site_agreement as _agreements
from fedppl.sites import wire as _wire
from fedppl.sites.decode import Parcel, checked_name, one_text
from fedppl.storage import codec
from fedppl.storage import signed as _signed
from fedppl.storage import store as _store
from fedppl.storage.signed import Memory, owner_key, pack
from fedppl.types import DataError, DeclarationError, LocalFailure, Message

logger = logging.getLogger(__name__)

_KNOWN_ERRORS = ("builtins", "fedppl.types")  # modules whose exceptions have names that do not depend on data
_WITHHELD = "does not take part under the policy of its site; the reason is in the site's own log"


class Node(NamedTuple):
    """The declaration of a site's operator. It may be copied to other processes, without compiled models."""

    token: str  # tells one site app from another in the same process
    model: FederatedModel
    algorithm: AnyAlgorithm
    load_data: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    client_id: Callable[[Mapping[str, Any]], str]
    folder: Path | None
    draws: int
    chains: int
    policy: Policy
    kind: str | None = None  # of client, where it is declared
    secure: Path | None = None  # folder of identity and roster, where it answers under masks alone
    query: str = ""  # digest of what `load_data` asks, where that is a source


class Site(NamedTuple):
    """A site's declaration, by which it answers whatever carries the messages.

    ``python -m fedppl.site answer`` and ``watch`` take it for bundles that come as files (`fedppl.Files`), and
    ``fedppl.Flower.client_app(**site._asdict())`` is its Flower app. Functions below get the site's node config: what
    its operator gives by ``--config``, or to Flower by ``--node-config``.

    Parameters
    ----------
    federated_model
        The declaration, the same at every site and at the server. A formula is completed by the clients' agreement
        (`fedppl.Flower.agree`). A site that gives a summary of its rows may declare another builder, of the same shared
        variables.
    algorithm
        The algorithm, with the same settings at every site and at the server.
    load_data
        Your function from the site's node config to its data, name to array, or a source such as `fedppl.sources.sql`,
        whose digest the policy can list (`allowed_queries`) and the audit log has. It runs at the site.
    client_id
        Function from the node config to this client's id; by default its entry ``client-id``, or nothing where
        the server knows the site by its authenticated name; of a site with `secure` the name of its identity.
    kind
        The kind of this site where the declaration has several builders, or a function from the node config to it; by
        default as the declaration tells kinds.
    folder
        Folder of this site: ``site.sqlite`` has its account of all that it has released and its audit log, its personal
        state, a salted digest of its data (other data are refused in a run that has begun) and its last answer; when a
        run is over, its own posterior is beside it (a NetCDF file named after the client). A path, or a function from
        the node config to one. Limits count over all runs in it: deleting the file grants them anew. None requires
        ``policy=fedppl.policy.NO_RULES``; then nothing is logged or counted.
    policy
        Policy of this site: a `fedppl.Policy`, the path of a TOML file with one, or a function from the node config
        to either. By default ``fedppl.Policy()``, which wants sums.
    secure
        Folder with this site's identity and its roster of the other sites (`python -m fedppl.site`), or a function from
        the node config to it. With it the site answers under the masks of a cohort on its roster alone, so that nobody
        sees its replies and summaries of columns but in the sum (the server's ``secure=True``), nor the
        conclusions of its policy, which leave where all sites name them. It needs a `folder`, in which the cohorts of
        runs are kept. None is for a policy with ``sums="optional"``.
    draws, chains
        Size of that posterior.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> model, clients = normal_means()
    >>> site = fedppl.Site(
    ...     model,
    ...     fedppl.Sums(),
    ...     lambda config: clients[config["client-id"]],
    ...     folder=lambda config: config["folder"],
    ...     secure=lambda config: config["secure"],
    ... )

    Notes
    -----
    *When this fails.* What it is given is checked when it is used, by a DeclarationError that names the argument.
    """

    federated_model: FederatedModel
    algorithm: AnyAlgorithm
    load_data: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    client_id: Callable[[Mapping[str, Any]], str] | None = None
    kind: str | Callable[[Mapping[str, Any]], str | None] | None = None
    folder: str | Path | Callable[[Mapping[str, Any]], str | Path] | None = None
    policy: Policy | str | Path | Callable[[Mapping[str, Any]], Policy | str | Path] | None = None
    secure: str | Path | Callable[[Mapping[str, Any]], str | Path] | None = None
    draws: int = 1000
    chains: int = 4


def described(declared: Site) -> Callable[[Mapping[str, Any]], Node]:
    """Check a site's declaration; the function from a node config to its node, with the policy read anew."""
    model, algorithm, load_data, client_id, kind, folder, policy, secure, draws, chains = declared
    if not isinstance(model, FederatedModel) or not isinstance(algorithm, Algorithm):
        raise DeclarationError("client_app takes a FederatedModel and an algorithm that is built, like fedppl.EP().")
    if not callable(load_data):
        raise DeclarationError(f"load_data is {type(load_data).__name__}; pass a function from node config to data.")
    builders = list(model.builders)
    arguments: tuple[tuple[str, Any, tuple[type, ...], str], ...] = (
        ("client_id", client_id, (), "None"),
        ("kind", kind, (str,), f"one of {builders}"),
        ("folder", folder, (str, Path), "a path"),
        ("policy", policy, (Policy, str, Path), "a fedppl.Policy, the path of a TOML file with one"),
        ("secure", secure, (str, Path), "the folder of identity and roster"),
    )
    for name, value, types, wanted in arguments:
        valid = isinstance(value, types) and value != "" and (name != "kind" or value in builders)
        if not (value is None or callable(value) or valid):
            raise DeclarationError(f"{name}={shown(value)} must be {wanted}, or a function from the node config to it.")
    if folder is None:
        _require_no_account(algorithm, policy, secure)
    if secure is None and (policy is None or (isinstance(policy, Policy) and policy.sums == "required")):
        require_masks(None, Policy() if policy is None else policy)
    draws, chains = whole("draws", draws), whole("chains", chains)
    given_id = client_id or (lambda config: str(config.get("client-id", "")))
    token = secrets.token_hex(8)
    given: tuple[Any, ...] = (folder, policy, kind, secure)

    def id_of(config: Mapping[str, Any]) -> str:
        # Where the operator gives the node its id later, its account is the same: limits are not granted anew.
        if (name := given_id(config)) or secure is None:
            return name
        with suppress(DeclarationError):  # without an identity it refuses, and its log says why
            return _secure.read_keys(Path((secure(config) if callable(secure) else secure) or "no folder")).name
        return ""

    def node(config: Mapping[str, Any]) -> Node:
        here, chosen, kind_here, files = (each(config) if callable(each) else each for each in given)
        path = None if here is None else Path(here)
        if path is not None:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        rules = chosen if isinstance(chosen, Policy) else Policy() if chosen is None else read(chosen)
        its_files = None if secure is None else Path(files or "no folder")  # never in the clear because of a typo
        query = load_data.digest if isinstance(load_data, Source) else ""
        load = load_data if refuse_query(rules, query) is None else _unread  # a worker loads before it answers
        return Node(token, model, algorithm, load, id_of, path, draws, chains, rules, kind_here, its_files, query)

    return node


def _unread(config: Mapping[str, Any]) -> Mapping[str, Any]:
    raise LocalFailure("rows are not read by a query that the policy does not list; the audit log has its digest")


def _require_no_account(algorithm: AnyAlgorithm, policy: Any, secure: Any) -> None:
    """Raise DeclarationError where a site needs a folder and has none."""
    lasting = "give client_app a folder= that lasts"
    if algorithm.persistent:
        raise DeclarationError(f"{algorithm.name} counts what a site has released over all runs; {lasting}.")
    if secure is not None:
        raise DeclarationError(f"secure= without folder=: cohorts and last answers are kept in it; {lasting}.")
    if policy != NO_RULES:
        other = "policy=fedppl.policy.NO_RULES where the data need no protection"
        raise DeclarationError(f"folder=None: a policy counts requests and keeps an audit log; {lasting}, or {other}.")


class Enrolled(NamedTuple):
    """A client, its declaration, and the rows of which it is."""

    client: ClientModel
    declaration: FederatedModel  # with all that is compiled
    seal: tuple[str, bytes]  # its kind, and a digest of its data
    columns: Mapping[str, Any]  # of the rows as they were loaded


_clients: dict[tuple[str, str, str], Enrolled] = {}  # of this process, by app, node config and agreement
_declarations: dict[tuple[str, str], FederatedModel] = {}  # by app and agreement
_first: dict[Any, dict[str, Mapping[str, Any]]] = {}  # the first client with such columns, by app
_UNNAMED = "not named yet"  # a site that the server will call by its authenticated name
_lock = threading.Lock()


def enrolled(node: Node, config: Mapping[str, Any], memory: Memory, called: str | None = None) -> Enrolled:
    """Load the data and check them against the declaration, unless they are those of the request before.

    `called` is the client id in a request, by which a site without an id is named: random streams depend on it.
    """
    name = node.client_id(config)
    model, agreement = _agreements.declared(node.model, memory, name)
    key = node.token, json.dumps(dict(config), sort_keys=True, default=str), agreement
    with _lock:
        for other in [other for other in _clients if other[:2] == key[:2] and other != key]:
            del _clients[other]  # of an earlier agreement
        declaration = _declarations.setdefault((node.token, agreement), model)
        loaded = node.load_data(config)
        kind = declaration.kind_of(name, loaded, node.kind)
        usable = loaded if node.folder is None else _agreements.without_rare(declaration, loaded, node.policy, name)
        data = declaration.read(name, usable, kind)
        seal = kind, _seal(data)
        before = _clients.get(key)
        is_same = before is not None and before.seal == seal
        client = before.client if before and is_same else _enrol(node, declaration, name, kind, data, agreement)
        if not client.client_id and called is not None:
            client = dataclasses.replace(client, client_id=called)
        _clients[key] = Enrolled(client, declaration, seal, _agreements.columns(declaration, loaded, data))
        if called not in (None, client.client_id):
            raise LocalFailure(f"a request for client {called!r} came to client {client.client_id!r}")
        return _clients[key]


def _enrol(
    node: Node, declaration: FederatedModel, name: str, kind: str, data: Mapping[str, Any], agreement: str
) -> ClientModel:
    shapes = sorted((k, np.asarray(v).dtype.str, np.shape(v)[1:]) for k, v in data.items())
    # Where one process serves many (virtual) clients, the first is enrolled again beside each: are they alike?
    label = name or _UNNAMED
    for other in [other for other, first in _first.items() if other[0] == node.token and label in first]:
        del _first[other]  # its rows are others now
    pair = {**_first.setdefault((node.token, agreement, kind, *shapes), {label: data}), label: data}
    enrolling = declaration.enrol(pair, kernel=node.algorithm.needs.kernel, kinds=dict.fromkeys(pair, kind))
    client = dataclasses.replace(enrolling[label], client_id=name)
    require_fit(node.algorithm, client)
    if not any(token == node.token for token, *_ in _clients):
        say_unused(node.algorithm, client)
    return client


def _seal(data: Mapping[str, Any]) -> bytes:
    """A digest of arrays and their masks; of objects, whose values it does not see, another each time."""
    masks = {f"\0{name}": value.mask for name, value in data.items() if isinstance(value, np.ma.MaskedArray)}
    arrays = {name: np.asarray(value) for name, value in {**data, **masks}.items()}
    hidden = any(array.dtype.hasobject for array in arrays.values())
    return secrets.token_bytes(32) if hidden else codec.seal(arrays, bytes(16))


@contextmanager
def account_of(
    node: Node, config: Mapping[str, Any], memory: Memory | None
) -> Iterator[tuple[_guard.Guard | None, Memory]]:
    """The policy with its account, and what the site keeps: all in its file, or, without a folder, None and `memory`.

    What is given within the block may leave the site after it alone, when it is counted and kept on the disk.
    """
    require_masks(node.secure, node.policy)
    if node.folder is None:
        if node.policy != NO_RULES:
            raise LocalFailure("folder= gave None for this node config, and without a folder no policy holds")
        if memory is None:
            raise LocalFailure("neither folder= nor a context of the node keeps what this site has to know")
        yield None, memory
        return
    with _store.changing(node.folder) as store:
        masked = node.secure is not None
        guard = _guard.in_store(node.policy, store, node.client_id(config), masked=masked)
        yield _guard.of_query(guard, node.query), _store.memory(store)


def require_masks(secure: Path | None, rules: Policy) -> None:
    """Raise DeclarationError where single replies would leave and the policy does not allow it."""
    if secure is None and rules.sums == "required":
        remedy = "give client_app secure= and the server secure=True, or set sums='optional' in the policy"
        raise DeclarationError(f"this site's policy has sums='required', and its single replies would leave; {remedy}.")


def refuse(guard: _guard.Guard | None, about: Mapping[str, Any], rule: str) -> None:
    """Log the rule by which a message is refused."""
    if guard is None:
        logger.warning("%s refused: %s", about["event"], rule)
    else:
        _guard.note(guard, rule, **about)


def _say_refused(what: str, name: str) -> None:
    """Log the present exception, which stays at the site."""
    logger.exception(what, name, extra={"client": name, "status": "refused"})


def agree(node: Node, config: Mapping[str, Any], memory: Memory | None, texts: Mapping[str, str]) -> Parcel:
    """Answer with the summary of columns by which clients agree on a formula, as far as the policy allows it."""
    name, load = node.client_id(config), functools.partial(node.load_data, config)
    arrays: Message = {}
    answer = {"refused": _guard.REFUSED}
    try:
        with account_of(node, config, memory) as (guard, kept):
            if node.secure is None:
                answer = _agreements.tell(node.model, load, name, texts, kept, guard)
            else:
                assert guard is not None  # `client_app` wants a folder beside secure=
                versions = functools.partial(data_versions, kept, name, rules=node.policy)
                here = _agreements.Here(name, *files_of(node), kept, guard, versions)
                arrays, answer = _agreements.add(node.model, load, texts, here)
    except Exception:  # of the end of the block too: then nothing of it is kept
        arrays, answer = {}, {"refused": _guard.REFUSED}
        _say_refused("client %s tells nothing", name)
    return arrays, {"client_id": name, "version": version("fedppl"), **answer}


def greet(node: Node, config: Mapping[str, Any], texts: Mapping[str, str]) -> Parcel:
    """Answer with this site's signed key of a run, of which the other sites make masks; nothing of its data."""
    name = node.client_id(config)
    try:
        answer = _masks.greet(*files_of(node), texts)
    except Exception:
        _say_refused("client %s greets nobody", name)
        answer = {"refused": _guard.REFUSED}
    return {}, {"client_id": name, **answer}


def files_of(node: Node) -> tuple[Path, Path]:
    """The folder of identity and roster, and the site's own; LocalFailure without."""
    if node.secure is None or node.folder is None:  # where a function of the node config gave none
        raise LocalFailure("sums: client_app has no secure=, or no folder=")
    return node.secure, node.folder


def join(node: Node, config: Mapping[str, Any], memory: Memory | None, texts: Mapping[str, str]) -> Parcel:
    """Answer with counts of rows and outcomes, under the masks of the cohort that the server names for a run."""
    name, refused = node.client_id(config), {"refused": _guard.REFUSED}
    answer: Mapping[str, str] | None = None
    try:
        with account_of(node, config, memory) as (guard, kept):
            assert guard is not None  # `client_app` wants a folder beside secure=
            answer = _joined(node, config, kept, texts, guard)
    except Exception as error:
        answer = None
        _say_refused("client %s joins no cohort", name)
        if node.folder is not None:
            with suppress(Exception), account_of(node, config, memory) as (guard, _):
                refuse(guard, {"event": "cohort"}, f"sums: {error}"[:200])
    return {}, {"client_id": name, **(answer or refused)}


def _joined(
    node: Node, config: Mapping[str, Any], memory: Memory, texts: Mapping[str, str], guard: _guard.Guard
) -> dict[str, str] | None:
    """The site's part of the cohort's counts, always the same in a run; None where it is refused, by the log."""
    run = checked_name(one_text(texts, "run"), "'run'")
    at, file = _place(node, config, memory, run, texts), f"{run}.cohort"
    if not _guard.admit_cohort(guard, run, at.names, at.digest) or not _declaration_admitted(node, guard):
        return None
    if kept := _signed.recalled(memory, file):
        return dict(kept["part"])
    here = enrolled(node, config, memory, at.member.name)
    seal = same_data(memory, here.client, run)
    changed, versions = data_versions(memory, node.client_id(config), here.columns, node.policy)
    if changed:
        refuse(guard, {"event": "cohort", "run": run}, changed)
        return None
    fails = in_sums.fails_alone(node.policy, here.client, node.algorithm.disclosure.by_row)
    counts = _guard.numbers(here.client.view(_guard.tally)) * float(node.policy.epsilon is None)
    counts = np.append(counts, float(fails))  # how many fail the rule alone, and not which
    part = _masks.counts_part(files_of(node)[0], at, counts)
    for name, sealed in {**seal, **versions}.items():
        memory.keep(name, sealed)
    _signed.keep(memory, file, {"cohort": texts["cohort"], "part": part, "counts": np.zeros(0)})
    return part


def introduce(node: Node, config: Mapping[str, Any], memory: Memory | None, texts: Mapping[str, str]) -> Parcel:
    """Answer the server's first call: the layout, or why this site cannot take part; rules on data come first."""
    name = node.client_id(config)
    try:
        with account_of(node, config, memory) as (guard, kept):
            client = _introduced(node, config, kept, texts, guard)
        terms = _wire.Terms(node.algorithm.settings, client.layout, client.reader().coords)
        return _wire.pack_hello(name, terms)
    except Exception as error:
        _say_refused("client %s cannot take part", name)
        reason = str(error) if isinstance(error, DeclarationError) else "the reason is in the site's own log"
        kind = type(error) if type(error).__module__ in _KNOWN_ERRORS else Exception
        return {}, {"client_id": name, "error": f"{kind.__name__}: {reason}"}


def _introduced(
    node: Node, config: Mapping[str, Any], memory: Memory, texts: Mapping[str, str], guard: _guard.Guard | None
) -> ClientModel:
    """The client as it introduces itself; the text of a DeclarationError may leave the site."""
    name, loaded = node.client_id(config), node.load_data(config)
    node = node._replace(load_data=lambda config: loaded)
    withheld = DeclarationError(f"{f'client {name!r}' if name else 'it'} {_WITHHELD}")
    few = guard is not None and _guard.refuse_rows(guard, _most_rows(loaded))
    if few or not _declaration_admitted(node, guard):
        raise withheld
    _agreements.accept(node.model, lambda: loaded, name, texts, memory, guard)
    try:
        here = enrolled(node, config, memory)
    except DeclarationError as error:
        if node.policy == NO_RULES:
            raise
        raise DataError(str(error)) from error  # its text may quote rows
    if guard is not None:
        _guard.admit_algorithm(guard, node.algorithm, here.client)
        versions = functools.partial(data_versions, memory, name, here.columns, node.policy)
        if _guard.refuse_data(guard, here.client, node.algorithm, lambda: versions()[0]):
            raise withheld
    return here.client


def _declaration_admitted(node: Node, guard: _guard.Guard | None) -> bool:
    if guard is None or node.policy == NO_RULES:
        return True
    key = "; ".join(f"{kind}: {code_key(builder)}" for kind, builder in node.model.builders.items())
    return _guard.admit_declaration(guard, hashlib.sha256(key.encode()).hexdigest()[:32])


def _most_rows(loaded: Any) -> int | None:
    """An upper bound of the number of rows; None where it is not known before the model is built."""
    if frames.is_frame(loaded):
        loaded = frames.raw(loaded, None, "the site")
    arrays = tuple(loaded.values()) if isinstance(loaded, Mapping) else loaded
    if not isinstance(arrays, tuple | list) or not arrays:
        return None
    return sum({len(array) for array in map(np.asarray, arrays) if array.ndim}) or 1


def answer_request(node: Node, config: Mapping[str, Any], memory: Memory | None, parcel: Parcel) -> Parcel:
    """Run the client's part of the algorithm, then store personal state; whatever is wrong is refused by one text."""
    client_id, nonce = str(parcel[1].get("client_id", ""))[:200], str(parcel[1].get("nonce", ""))[:20]
    answered = None
    try:
        with account_of(node, config, memory) as (guard, kept):
            answered = _answered(node, config, kept, parcel, guard)
    except Exception:
        answered = None  # what is not kept does not leave
        _say_refused("client %s refuses a request", client_id)
    refusal = Failure(client_id, int(nonce) if nonce.isdecimal() else 0, _guard.REFUSED)
    return answered or _wire.pack_reply(refusal)


def _understood(
    node: Node, config: Mapping[str, Any], memory: Memory, parcel: Parcel, guard: _guard.Guard | None
) -> tuple[Request, _masks.Place | None] | None:
    """A request and the site's place in its cohort; None where they are refused and the log says why."""
    try:
        arrays, gate = (parcel[0], []) if node.secure is None else _masks.unpack_gate(*parcel)
        request = _wire.unpack_request(arrays, parcel[1])
    except Exception as error:  # no message of a server may end this process
        refuse(guard, {"event": "request"}, f"malformed: {type(error).__name__}: {error}"[:200])
        return None
    if node.secure is None:
        return request, None
    try:
        return request, _placed(node, config, memory, request, parcel[1])._replace(gate=gate)
    except DeclarationError as error:
        refuse(guard, _guard.named("request", request), f"sums: {error}")
        return None


def _placed(
    node: Node, config: Mapping[str, Any], memory: Memory, request: Request, texts: Mapping[str, str]
) -> _masks.Place:
    """The site's place in the cohort of a run that it has joined, with the cohort's counts; or DeclarationError."""
    at, kept = member_of(node, config, memory, request.run)
    _masks.require_asked(at, request)
    if at.counts.size:
        return at
    at, file = _masks.counted(files_of(node)[0], at, texts), f"{request.run}.cohort"
    _signed.keep(memory, file, {**kept, "counts": at.counts})
    return at


def member_of(node: Node, config: Mapping[str, Any], memory: Memory, run: str) -> tuple[_masks.Place, dict[str, Any]]:
    """The site's place in the cohort of a run as far as it is known, and what is stored; or DeclarationError."""
    kept = _signed.recalled(memory, f"{run}.cohort")
    if kept is None:
        raise DeclarationError("a request of a run whose cohort this site has not joined: it answers under masks alone")
    return _place(node, config, memory, run, kept)._replace(counts=kept["counts"]), kept


def _place(node: Node, config: Mapping[str, Any], memory: Memory, run: str, texts: Mapping[str, str]) -> _masks.Place:
    """The site's place in a cohort, under masks of the agreement on a formula that the server sent, if it sent one."""
    _, agreed = _agreements.declared(node.model, memory, node.client_id(config))
    return _masks.place(*files_of(node), run, _masks.unpack_cohort(texts), agreed=agreed)


def _answered(
    node: Node, config: Mapping[str, Any], memory: Memory, parcel: Parcel, guard: _guard.Guard | None
) -> Parcel | None:
    """The answer to a request, or None where it is refused and the log says why."""
    if (understood := _understood(node, config, memory, parcel, guard)) is None:
        return None
    request, place = understood
    if why := refuse_sharing(node.algorithm, None if place is None else len(place.names)):
        refuse(guard, _guard.named("request", request), f"epsilon: {why}")
        return None
    own_id, about = node.client_id(config), _guard.named("request", request)
    algorithm = node.algorithm if place is None else _masks.quiet(node.algorithm)
    try:
        if not _declaration_admitted(node, guard):
            return None
        here = enrolled(node, config, memory, request.client_id)
        if place is not None and guard is not None:
            guard = _of_cohort(node, guard, here, place, request)
        seal = same_data(memory, here.client, request.run)
        changed, versions = (None, {}) if guard is None else data_versions(memory, own_id, here.columns, node.policy)
        name = name_of_kept(algorithm, own_id, request.run, request.client_id)
        kept = recalled(algorithm, memory, name, request.client_id)
        if guard is not None and _guard.replayed(guard, request):
            is_masked = set(kept.arrays) == {_masks.WORDS}
            if (kept.run, kept.digest) == (request.run, _guard.digest(request)) and (place is None or is_masked):
                _guard.note(guard, None, **about, repeated=True)
                return kept.arrays, {**kept.texts, "nonce": str(request.nonce)}
            if place is not None:  # with other noise, under the same masks, the difference would be this site's
                why = f"its answer is kept no more, but that of run {kept.run!r}; the server has to ask anew"
                refuse(guard, about, f"round: {request.round}, and {why}")
                return None
        if changed:
            refuse(guard, about, changed)
            return None
    except Exception as error:
        logger.debug("client %s cannot answer", request.client_id, exc_info=True)
        refuse(guard, about, f"site: {error if isinstance(error, LocalFailure) else type(error).__name__}")
        return None
    after, reply = answer(algorithm, here.client, kept.personal, request, guard)
    if isinstance(reply, Failure):
        extra = {"round": request.round, "client": request.client_id, "status": "failed"}
        numbers = request.round, request.client_id, reply.reason, reply.private
        logger.warning("round %d, client %s failed: %s %s", *numbers, extra=extra)
    if place is not None:
        reply = _masks.hidden(place, request, reply)
    answered = _wire.pack_reply(reply)
    if isinstance(reply, Failure) and reply.reason == _guard.REFUSED:
        return answered  # nothing is stored: a server could make up any number of names
    for file, raw in {**seal, **versions}.items():
        memory.keep(file, raw)
    # State and answer are one row: no answer leaves that the state does not know of.
    if guard is not None:
        answer_of = _guard.digest(request), dict(answered[0]), dict(answered[1]), request.run
        _signed.keep(memory, name, (after, *answer_of))
    elif after is not None:
        _signed.keep(memory, name, (after,))
    return answered


def _of_cohort(node: Node, guard: _guard.Guard, here: Enrolled, place: _masks.Place, request: Request) -> _guard.Guard:
    """The guard with what the cohort has, and with sums of its rows' vectors where a site failed alone, or may."""
    cohort = _guard.summed(here.client.view(_guard.tally), place.counts[:-1], len(place.names))
    guard = guard._replace(cohort=cohort)
    if not (place.counts[-1] or place.gate):
        return guard
    return guard._replace(sums=lambda at: _masks.sum_of_sealed(files_of(node)[0], place, request))


def gate(node: Node, config: Mapping[str, Any], memory: Memory | None, parcel: Parcel) -> Parcel:
    """Answer with the site's part of what the cohort sums of its rows before a request, for its members alone."""
    name, answered = node.client_id(config), None
    try:
        with account_of(node, config, memory) as (guard, kept):
            if guard is not None:
                answered = _gated(node, config, kept, parcel, guard)
    except Exception:
        answered = None
        _say_refused("client %s adds nothing to a gate", name)
    arrays, texts = answered or ({}, {"refused": _guard.REFUSED})
    return arrays, {"client_id": name, **texts}


def _gated(node: Node, config: Mapping[str, Any], memory: Memory, parcel: Parcel, guard: _guard.Guard) -> Parcel | None:
    """The site's part, always the same in a round; None where it is refused, by the log."""
    if (understood := _understood(node, config, memory, parcel, guard)) is None:
        return None
    request, place = understood
    if place is None:
        return None
    entry, digest, file = _guard.named("gate", request), _guard.digest(request), f"{request.run}.gate"
    kept: dict[str, Any] = _signed.recalled(memory, file) or {"round": 0}
    if (kept["round"], kept.get("digest")) == (request.round, digest):
        _guard.note(guard, None, **entry, repeated=True)
        return kept["arrays"], kept["texts"]
    if request.round <= kept["round"]:
        refuse(guard, entry, f"round: a gate in round {request.round} after {kept['round']}")
        return None
    if not _declaration_admitted(node, guard):
        return None
    here = enrolled(node, config, memory, request.client_id)
    same_data(memory, here.client, request.run)  # those of the counts
    guard = _of_cohort(node, guard, here, place, request)._replace(sums=None)
    at = _guard.admit_gate(guard, node.algorithm, here.client, request, kept["round"])
    if at is None or guard.cohort is None:
        return None
    numbers = in_sums.numbers(here.client, at, guard.cohort)
    numbers = numbers if node.policy.epsilon is None else np.zeros_like(numbers)
    part = _masks.sealed_part(files_of(node)[0], place, request, numbers)
    _signed.keep(memory, file, {"round": request.round, "digest": digest, "arrays": part[0], "texts": part[1]})
    return part


# What a node stores between two requests: personal state, the last answer, and digests of the data --------------------


class Kept(NamedTuple):
    """Personal state, and the answer that was given with it."""

    personal: Any = None
    digest: str = ""  # of the request
    arrays: Message = {}
    texts: dict[str, str] = {}
    run: str = ""  # of the request; a state that outlives a run has the last answer of all runs


def name_of_kept(algorithm: AnyAlgorithm, own_id: str, run: str, client_id: str) -> str:
    """Name of the stored state. State that outlives a run has the site's own name: the server chooses the others."""
    return f"{own_id}.lasting" if algorithm.persistent else f"{run}-{client_id}.personal"


def same_data(memory: Memory, client: ClientModel, run: str) -> dict[str, bytes]:
    """Raise LocalFailure if the data are not those of the run's first request; return the file to store of that one."""
    name = f"{run}-{client.client_id}.data"
    sealed = memory.recall(name)
    if sealed is not None and not codec.matches(sealed, client.arrays):
        remedy = "begin a new run, or give the site those data"
        raise LocalFailure(f"its data are not those that it had when this run began; {remedy}")
    return {name: codec.seal(client.arrays)} if sealed is None else {}


def data_versions(
    memory: Memory, site_id: str, columns: Mapping[str, Any], rules: Policy
) -> tuple[str | None, dict[str, bytes]]:
    """The rule that a client's data break by their difference to those of earlier answers, and what to store of them.

    That is under the site's own name, not one that the server chooses; nothing where the data are known already.
    """
    if rules.epsilon is not None or rules.changed_rows <= 1 or not columns:
        return None, {}
    name = f"{site_id or 'site'}.versions"
    earlier = list(_signed.recalled(memory, name) or ())
    if any(codec.matches(version["seal"], columns) for version in earlier):
        return None, {}
    cells = version_of(columns, owner_key(make=True))
    before = [version["cells"] for version in earlier]
    refused = refuse_version(before, cells, rules.changed_rows)
    return refused, {name: pack([*earlier, {"seal": codec.seal(columns), "cells": cells}], name)}


def recalled(algorithm: AnyAlgorithm, memory: Memory, name: str, client_id: str) -> Kept:
    """Stored personal state and answer; blank where there are none, or they cannot be read and need not last."""
    try:
        return Kept(*(_signed.recalled(memory, name, f"personal state of client {client_id!r}") or ()))
    except DeclarationError as error:
        if algorithm.persistent:
            logger.error("client %s does not answer: %s", client_id, error)
            raise LocalFailure("its lasting state cannot be read; see the site's log") from error
        logger.warning("client %s starts with blank personal state: %s", client_id, error)
        return Kept()
