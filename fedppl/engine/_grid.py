"""Flower's side of the engine port: pushes requests to sites, polls for replies, knows which node is which client."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

import fedppl
from fedppl.engine import _wire
from fedppl.engine._records import ASK, CONCLUDE, CONSTRAIN, HELLO, from_content, to_content
from fedppl.types import (
    Algorithm,
    DeclarationError,
    Failure,
    Layout,
    Message,
    Reply,
    Request,
    SharedReader,
    Status,
)

__all__ = ["GridEngine", "GridSettings"]

logger = logging.getLogger(__name__)

# Calls to new sites that may wait for an answer: Flower's simulation looks through all messages for every node.
_CALLS_AT_ONCE = 64


class GridSettings(NamedTuple):
    """How many sites to wait for, how long, and how often to look."""

    clients: int | tuple[str, ...]
    wait: float
    deadline: float
    poll: float
    # How far a message outlives the deadline, so that the reply of the last moment is not cut off on its way.
    grace: float = 2.0


class GridEngine:
    """Clients at sites, by logical id; see `fedppl.Flower.grid`."""

    def __init__(self, grid: Grid, algorithm: Algorithm, settings: GridSettings) -> None:
        self._grid = grid
        self._algorithm = algorithm
        self._settings = settings
        self._hellos: dict[str, _wire.Hello] = {}  # enrolled clients
        self._nodes: dict[str, int] = {}  # client id to node id
        self._greeting: dict[str, int] = {}  # message id of a call not answered yet, to its node
        self._known: set[int] = set()  # nodes that were called
        self._rivals: dict[int, _wire.Hello] = {}  # live nodes that claim the id of another live node
        self._busy: dict[str, tuple[str, float]] = {}  # client id to its unanswered message and when that expires
        self._refused: dict[str, str] = {}
        self._listed: tuple[float, dict[int, str]] | None = None  # when, and node ids with their names
        self._enrol()

    def clients(self) -> tuple[str, ...]:
        """Return the ids of the enrolled clients, sorted."""
        return tuple(sorted(self._hellos))

    def layout(self) -> Layout:
        """Return the layout that all sites told."""
        return next(iter(self._hellos.values())).layout

    def reader(self) -> SharedReader:
        """Draws of φ are read by any site that answers."""
        first = next(iter(self._hellos.values()))
        return SharedReader(self._constrain, first.dims, first.coords)

    def exchange(self, requests: Mapping[str, Request], deadline: float | None) -> dict[str, Reply | Failure]:
        """Send each request to its site; those without a reply at the deadline (seconds) are failures."""
        limit = deadline or self._settings.deadline
        alive = self._welcome()
        self._drop_late()
        answers: dict[str, Reply | Failure] = {}
        waiting: dict[str, Request] = {}
        for client_id, request in requests.items():
            reason = self._why_not_ask(client_id, alive)
            message_id = None if reason else self._push(self._nodes[client_id], ASK, _wire.pack_request(request), limit)
            if message_id is None:
                answers[client_id] = Failure(client_id, request.nonce, reason or "its request could not be sent")
            else:
                waiting[message_id] = request
                self._busy[client_id] = (message_id, time.monotonic() + limit + self._settings.grace)
        for message_id, reply in self._replies(set(waiting), limit):
            request = waiting.pop(message_id)
            del self._busy[request.client_id]
            answers[request.client_id] = _read(reply, request)
        for request in waiting.values():
            reason = f"no reply within the deadline of {limit:g} s"
            answers[request.client_id] = Failure(request.client_id, request.nonce, reason)
        return answers

    def conclude(self, outcome: Callable[[str], Message], run: str, seed: int, status: Status) -> dict[str, str]:
        """Send every site q and its cavity, so that it can draw its own posterior; returns who refused, and why."""
        alive, sent, refused = self._welcome(), {}, {}
        for client_id in self.clients():
            if self._why_not_ask(client_id, alive):
                continue
            texts = {"client_id": client_id, "run": run, "seed": str(seed), "status": status.value}
            parcel = (outcome(client_id), texts)
            if message_id := self._push(self._nodes[client_id], CONCLUDE, parcel, self._settings.deadline):
                sent[message_id] = client_id
        for message_id, reply in self._replies(set(sent), self._settings.deadline):
            client_id = sent.pop(message_id)
            if reply.has_error():
                logger.warning("client %s could not draw its posterior: %s", client_id, _error(reply))
            elif reason := _refusal(reply):
                refused[client_id] = reason
                logger.warning("client %s does not draw its posterior: %s", client_id, reason)
        for client_id in sent.values():
            logger.warning("client %s did not say whether it drew its posterior", client_id)
        return refused

    def close(self) -> None:
        """Flower ends the run when the server app returns."""

    def _enrol(self) -> None:
        """Call every node until the clients that are expected have answered."""
        expected = self._settings.clients
        end = time.monotonic() + self._settings.wait
        while not self._complete():
            self._welcome(max_age=1.0)
            if self._complete():
                break
            if time.monotonic() > end:
                found = ", ".join(map(repr, self.clients())) or "none"
                refused = "".join(f"; {name!r} was refused: {why}" for name, why in self._refused.items())
                number = expected if isinstance(expected, int) else len(expected)
                if isinstance(expected, tuple):
                    found += f"; missing {sorted(set(expected) - set(self._hellos))}"
                raise DeclarationError(
                    f"only {len(self._hellos)} of {number} sites enrolled within {self._settings.wait:g} s ({found})"
                    f"{refused}. Start the missing sites and look at their logs, or raise wait=."
                )
            time.sleep(self._settings.poll)
        logger.info("%d clients enrolled: %s", len(self._hellos), self.clients()[:20])

    def _complete(self) -> bool:
        expected = self._settings.clients
        if isinstance(expected, int):
            return len(self._hellos) >= expected
        return set(expected) <= set(self._hellos)

    def _welcome(self, max_age: float = 0.0) -> set[int]:
        """Call nodes that are new, take in what they say, and return the nodes that are connected.

        The list of nodes is asked for anew when it is older than `max_age` seconds.
        """
        if self._listed is None or time.monotonic() - self._listed[0] > max_age:
            nodes = {int(node.node_id): str(node.name or "") for node in self._grid.get_nodes()}
            self._listed = (time.monotonic(), nodes)
        names = self._listed[1]
        alive = set(names)
        for node_id in self._rivals.keys() - alive:
            del self._rivals[node_id]
        for node_id in sorted(alive - self._known)[: _CALLS_AT_ONCE - len(self._greeting)]:
            if message_id := self._push(node_id, HELLO, ({}, {}), self._settings.wait):
                self._greeting[message_id] = node_id
                self._known.add(node_id)
        self._known &= alive
        if self._greeting:
            for message in self._grid.pull_messages(list(self._greeting)):
                node_id = self._greeting.pop(message.metadata.reply_to_message_id)
                self._meet(node_id, names.get(node_id, ""), message, alive)
        for node_id, hello in list(self._rivals.items()):
            if self._nodes[hello.client_id] not in alive:
                del self._rivals[node_id]
                self._bind(node_id, hello)
        return alive

    def _meet(self, node_id: int, name: str, message: FlowerMessage, alive: set[int]) -> None:
        """Enrol a node that introduced itself, or refuse it and say why."""
        try:
            if message.has_error():
                self._refuse(name or f"node {node_id}", _error(message))
                self._known.discard(node_id)  # it may be better the next time
                return
            arrays, texts = from_content(message.content)
            told = texts["client_id"]
            client_id = name or told
            if not client_id:
                return self._refuse(f"node {node_id}", 'it has no id; start it with --node-config "client-id=..."')
            if name and told and told != name:
                return self._refuse(told, f"its authenticated name is {name!r}; drop or correct its client-id")
            if "error" in texts:
                return self._refuse(client_id, texts["error"])
            hello = _wire.unpack_hello(arrays, {**texts, "client_id": client_id})
        except (KeyError, ValueError, TypeError) as error:
            return self._refuse(name or f"node {node_id}", f"its introduction cannot be read ({type(error).__name__})")
        expected = self._settings.clients
        known = self._hellos.get(client_id)
        server = hello._replace(client_id="the server", version=fedppl.__version__, settings=self._algorithm.settings)
        reference = next(iter(self._hellos.values()), server)
        if reason := _wire.difference(server, hello) or _wire.difference(reference, hello):
            return self._refuse(client_id, reason)
        if isinstance(expected, tuple) and client_id not in expected:
            return self._refuse(client_id, f"it is not among the expected clients {list(expected)}")
        if known is None and self._complete():
            return self._refuse(client_id, "the run has begun with other clients; it can enrol in the next run")
        if known is not None and self._nodes[client_id] in alive and self._nodes[client_id] != node_id:
            self._rivals[node_id] = hello
            return self._refuse(
                client_id, f"nodes {self._nodes[client_id]} and {node_id} are both live with this id; stop one of them"
            )
        return self._bind(node_id, hello)

    def _bind(self, node_id: int, hello: _wire.Hello) -> None:
        back = hello.client_id in self._nodes
        self._nodes[hello.client_id] = node_id
        self._hellos.setdefault(hello.client_id, hello)
        self._busy.pop(hello.client_id, None)  # what an earlier node was asked for will not come
        self._refused.pop(hello.client_id, None)
        logger.info(
            "client %s %s as node %d",
            hello.client_id,
            "is back" if back else "enrolled",
            node_id,
            extra={"client": hello.client_id, "status": "enrolled"},
        )

    def _refuse(self, client_id: str, reason: str) -> None:
        self._refused[client_id] = reason
        logger.error("client %s refused: %s", client_id, reason, extra={"client": client_id, "status": "refused"})

    def _why_not_ask(self, client_id: str, alive: set[int]) -> str | None:
        if self._nodes[client_id] not in alive:
            return "its site is not connected"
        return None

    def _drop_late(self) -> None:
        """Throw away replies to requests of earlier rounds, until those requests have expired.

        Then no client has more than one request outstanding when it is asked again.
        """
        while self._busy:
            late = {message_id: client_id for client_id, (message_id, _) in self._busy.items()}
            for message in self._grid.pull_messages(list(late)):
                client_id = late[message.metadata.reply_to_message_id]
                what = "its request has expired" if message.has_error() else "a late reply was dropped"
                logger.info("client %s: %s", client_id, what, extra={"client": client_id, "status": "late"})
                del self._busy[client_id]
            now = time.monotonic()
            self._busy = {client_id: (m, expiry) for client_id, (m, expiry) in self._busy.items() if expiry > now}
            if self._busy:
                time.sleep(self._settings.poll)

    def _push(self, node_id: int, kind: str, parcel: _wire.Parcel, deadline: float) -> str | None:
        message = FlowerMessage(
            content=to_content(*parcel), dst_node_id=node_id, message_type=kind, ttl=deadline + self._settings.grace
        )
        # One at a time: where a node has just left, some grids leave its id out of the list and shift the others.
        return next(iter(self._grid.push_messages([message])), None) or None

    def _replies(self, waiting: set[str], deadline: float) -> Iterable[tuple[str, FlowerMessage]]:
        """Yield replies as they come, until all are there or the deadline (seconds) has passed."""
        waiting, end = set(waiting), time.monotonic() + deadline
        while waiting:
            looked = time.monotonic()
            for message in self._grid.pull_messages(list(waiting)):
                message_id = message.metadata.reply_to_message_id
                if message_id in waiting:
                    waiting.discard(message_id)
                    yield message_id, message
            if not waiting or time.monotonic() > end:
                return
            # A look that takes long (many messages) is not repeated at once: it holds up what it waits for.
            pause = max(self._settings.poll, time.monotonic() - looked)
            time.sleep(min(pause, max(0.0, end - time.monotonic())))

    def _constrain(self, phi: Any) -> Mapping[str, Any]:
        """Ask one site after the other until one can read the draws."""
        alive, reasons = self._welcome(), []
        for client_id in self.clients():
            if reason := self._why_not_ask(client_id, alive):
                reasons.append(f"{client_id}: {reason}")
                continue
            parcel = ({"phi": np.asarray(phi)}, {"client_id": client_id})
            message_id = self._push(self._nodes[client_id], CONSTRAIN, parcel, self._settings.deadline)
            for _, reply in self._replies({message_id} if message_id else set(), self._settings.deadline):
                if not reply.has_error():
                    return from_content(reply.content)[0]
                reasons.append(f"{client_id}: {_error(reply)}")
        raise RuntimeError(f"no site could read draws of the shared parameters: {'; '.join(reasons)}")


def _read(message: FlowerMessage, request: Request) -> Reply | Failure:
    """A site's reply, or what went wrong with it."""
    if message.has_error():
        return Failure(request.client_id, request.nonce, _error(message))
    try:
        return _wire.unpack_reply(*from_content(message.content))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        return Failure(request.client_id, request.nonce, f"its reply cannot be read ({type(error).__name__})")


def _refusal(message: FlowerMessage) -> str:
    """Why a site does not draw its posterior, on one line; empty where it does."""
    try:
        return " ".join(from_content(message.content)[1].get("refused", "").split())[:500]
    except (KeyError, ValueError, TypeError, AttributeError):
        return ""


def _error(message: FlowerMessage) -> str:
    """Flower's error in one line; its details may quote the site's data and stay out of our results."""
    meanings = {
        1: "the site's app could not be loaded",
        2: "the site's app raised an exception; see the site's log",
        3: "the message was not available any more",
        4: "the reply was not available any more",
        5: "the site is not reachable",
        8: "the site's app crashed",
    }
    return meanings.get(message.error.code, f"Flower error {message.error.code}")
