"""A site's Flower app, and its answer to each type of message."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from flwr.app import ConfigRecord, Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from fedppl import site
from fedppl.contracts import Algorithm, AnyAlgorithm
from fedppl.engine.policy import NO_RULES, Policy, read
from fedppl.flower import conclusions as _conclusions
from fedppl.flower import messages as _messages
from fedppl.flower import node as _node
from fedppl.flower.decode import Parcel
from fedppl.flower.messages import AGREE, ASK, CONCLUDE, GATE, GREET, HELLO, JOIN, read_message, register, to_content
from fedppl.flower.node import Node
from fedppl.model.declaration import FederatedModel
from fedppl.settings import shown, whole
from fedppl.storage.signed import Memory
from fedppl.types import DeclarationError


def client_app(
    federated_model: FederatedModel,
    algorithm: AnyAlgorithm,
    load_data: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    *,
    client_id: Callable[[Mapping[str, Any]], str] | None = None,
    kind: str | Callable[[Mapping[str, Any]], str | None] | None = None,
    folder: str | Path | Callable[[Mapping[str, Any]], str | Path] | None = None,
    policy: Policy | str | Path | Callable[[Mapping[str, Any]], Policy | str | Path] | None = None,
    secure: str | Path | Callable[[Mapping[str, Any]], str | Path] | None = None,
    draws: int = 1000,
    chains: int = 4,
) -> ClientApp:
    """Make a site's Flower app: it answers with moments, never with rows.

    Parameters
    ----------
    federated_model
        The declaration, the same at every site and at the server. A formula is completed by the clients' agreement
        (`fedppl.Flower.agree`). A site that gives a summary of its rows may declare another builder, of the same shared
        variables.
    algorithm
        The algorithm, with the same settings at every site and at the server.
    load_data
        Your function from the site's node config to its data, name to array. It runs at the site.
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
        sees its replies and summaries of columns but in the sum (`grid(secure=True)`, `agree(secure=True)`), nor the
        conclusions of its policy, which leave where all sites name them. It needs a `folder`, in which the cohorts of
        runs are kept. None is for a policy with ``sums="optional"``.
    draws, chains
        Size of that posterior.

    Returns
    -------
    flwr.clientapp.ClientApp

    Raises
    ------
    DeclarationError
        If the arguments are not what they should be.

    Examples
    --------
    >>> import fedppl
    >>> from fedppl.testing import normal_means
    >>> model, clients = normal_means()
    >>> app = fedppl.Flower.client_app(
    ...     model,
    ...     fedppl.Sums(),
    ...     lambda config: clients[config["client-id"]],
    ...     folder=lambda config: config["folder"],
    ...     secure=lambda config: config["secure"],
    ... )

    Notes
    -----
    *When this fails.* A site whose data do not fit, or that runs other code than the server, is refused when it
    enrols. The text of an exception stays in the site's log, since it may quote data; the server learns its type.
    """
    if not isinstance(federated_model, FederatedModel) or not isinstance(algorithm, Algorithm):
        raise DeclarationError("client_app takes a FederatedModel and an algorithm that is built, like fedppl.EP().")
    if not callable(load_data):
        raise DeclarationError(f"load_data is {type(load_data).__name__}; pass a function from node config to data.")
    builders = list(federated_model.builders)
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
        _node.require_masks(None, Policy() if policy is None else policy)
    draws, chains = whole("draws", draws), whole("chains", chains)
    given_id = client_id or (lambda config: str(config.get("client-id", "")))
    token = secrets.token_hex(8)
    given: tuple[Any, ...] = (folder, policy, kind, secure)

    def id_of(config: Mapping[str, Any]) -> str:
        # Where the operator gives the node its id later, its account is the same: limits are not granted anew.
        name = given_id(config)
        return name if name or secure is None else _named(secure(config) if callable(secure) else secure)

    def node(config: Mapping[str, Any]) -> Node:
        here, chosen, kind_here, files = (each(config) if callable(each) else each for each in given)
        path = None if here is None else Path(here)
        if path is not None:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        rules = chosen if isinstance(chosen, Policy) else Policy() if chosen is None else read(chosen)
        its_files = None if secure is None else Path(files or "no folder")  # never in the clear because of a typo
        return Node(
            token, federated_model, algorithm, load_data, id_of, path, draws, chains, rules, kind_here, its_files
        )

    # Flower copies the app to its workers: no closure here may hold data, compiled models or locks.
    app = ClientApp()

    def reply(message: FlowerMessage, context: Context) -> FlowerMessage:
        here = node(context.node_config)
        memory = None if here.folder else _context_memory(context)
        parcel = answer(message.metadata.message_type, here, context.node_config, memory, read_message(message))
        return FlowerMessage(to_content(*parcel), reply_to=message)

    register(app, reply)
    declared[app] = node
    return app


def _named(files: Any) -> str:
    """The name of the site's identity, or "" where there is none: then it refuses, and its log says why."""
    try:
        return site.read(Path(files or "no folder")).name
    except DeclarationError:
        return ""


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


def _context_memory(context: Context) -> Memory:
    """A memory in the node's context, of one state and one digest; it is a cache, lost when the node restarts."""

    def recall(name: str) -> bytes | None:
        record = context.state.config_records.get("fedppl")
        return None if record is None or name not in record else bytes(record[name])  # type: ignore[arg-type]

    def keep(name: str, raw: bytes) -> None:
        before: Mapping[str, Any] = context.state.config_records.get("fedppl") or {}
        others = {other: value for other, value in before.items() if Path(other).suffix != Path(name).suffix}
        context.state["fedppl"] = ConfigRecord({**others, name: raw})

    return Memory(recall, keep)


# For a site's app and for its warm worker -----------------------------------------------------------------------------


# The node of a node config, with the policy read anew. Kept beside the apps and not in them, since Flower copies apps.
declared: WeakKeyDictionary[ClientApp, Callable[[Mapping[str, Any]], Node]] = WeakKeyDictionary()


def answer(kind: str, here: Node, config: Mapping[str, Any], memory: Memory | None, parcel: Parcel) -> Parcel:
    """Answer a message of type `kind`; `memory` is of a node without a folder."""
    if kind == HELLO:
        return _node.introduce(here, config, memory, parcel[1])
    if kind == AGREE:
        return _node.agree(here, config, memory, parcel[1])
    if kind == GREET:
        return _node.greet(here, config, parcel[1])
    if kind == JOIN:
        return _node.join(here, config, memory, parcel[1])
    if kind == GATE:
        return _node.gate(here, config, memory, parcel)
    if kind == ASK:
        return _node.answer_request(here, config, memory, parcel)
    if kind == CONCLUDE:
        return _conclusions.conclude(here, config, memory, parcel)
    raise ValueError(f"{kind!r} is no type of message; a site answers {', '.join(_messages.KINDS)}")
