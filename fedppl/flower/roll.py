"""Which node is which client, and whether it runs what the others run: calls, introductions, refusals."""

from __future__ import annotations

import logging
import queue
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from flwr.app import Message as FlowerMessage
from flwr.app import RecordDict
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fedppl.contracts import AnyAlgorithm, SharedReader
from fedppl.flower import enrolment as _enrolment
from fedppl.flower import hello as _hello
from fedppl.flower import wire as _wire
from fedppl.flower.decode import Malformed, name, reading, require
from fedppl.flower.decode import text as one_text
from fedppl.flower.records import HELLO, from_content, texts_of, to_content
from fedppl.settings import one_line, shown, whole
from fedppl.types import DeclarationError, Layout

logger = logging.getLogger(__name__)

# Calls to new sites that may wait for an answer: Flower's simulation looks through all messages for every node.
_CALLS_AT_ONCE = 64
# A site that was refused is called again after so many looks: it may have been corrected.
_LOOKS = 120


class Own(NamedTuple):
    """What the server itself knows of the model, from its own declaration."""

    layout: Layout
    reader: SharedReader


def expected_clients(clients: Any) -> int | tuple[str, ...]:
    """The number of sites to wait for, or their ids, as a user says it."""
    if isinstance(clients, int) and not isinstance(clients, bool):
        return whole("clients", clients)
    names = clients if isinstance(clients, list | tuple) else ()
    if not names or not all(isinstance(name, str) and name for name in names) or len({*names}) < len(names):
        raise DeclarationError(
            f"clients={shown(clients)} must be the number of sites to wait for, or a list of their ids, none twice."
        )
    return tuple(names)


def identity(node_id: int, authenticated: str, texts: Mapping[str, str]) -> tuple[str, str | None]:
    """What a node that has spoken is called, and why it is not believed to be that; or `Malformed`."""
    told = texts.get("client_id", "")
    told = told and name(told, "'client_id'")
    if not authenticated and not told:
        return f"node {node_id}", 'it has no id; start it with --node-config "client-id=..."'
    if authenticated and told and told != authenticated:
        return told, f"its authenticated name is {authenticated!r}; drop or correct its client-id"
    return authenticated or told, None


class Roll:
    """Enrolled clients by logical id, and their nodes."""

    def __init__(
        self,
        post: Post,
        algorithm: AnyAlgorithm,
        expected: int | tuple[str, ...],
        wait: float,
        own: Own | None,
        greeting: Mapping[str, str] | None = None,
    ) -> None:
        self._post = post
        self._expected = expected
        self._wait = wait
        self._words = dict(greeting or {})  # to every site that is called
        self._server = _hello.Terms(_enrolment.SERVER, version("fedppl"), algorithm.settings, None)
        # What every site is held against: the server's declaration, or what a majority says.
        self._reference: _hello.Hello | None = None
        if own is not None:
            told = _hello.labels(own.reader.coords)
            self._reference = _hello.Hello(*self._server[:3], own.layout, own.reader.dims, told)
        self.hellos: dict[str, _hello.Hello] = {}  # enrolled clients
        self.nodes: dict[str, int] = {}  # client id to node id
        self._pending: dict[int, _hello.Hello] = {}  # nodes that wait for a reference
        self._greeting: dict[str, int] = {}  # message id of a call not answered yet, to its node
        self._known: set[int] = set()  # nodes that were called
        self._again: dict[int, float] = {}  # refused nodes, and when to call them again
        self._rivals: dict[int, _hello.Hello] = {}  # live nodes that claim the id of another live node
        self._refused: dict[str, str] = {}
        self._listed: tuple[float, dict[int, str]] | None = None  # when, and node ids with their names

    def enrol(self) -> None:
        """Call every node until the clients that are expected have answered."""
        end = time.monotonic() + self._wait
        while not self._complete():
            self.welcome(max_age=1.0)
            if self._complete():
                break
            if time.monotonic() > end:
                raise DeclarationError(self._missing())
            time.sleep(self._post.poll)
        logger.info("%d clients enrolled: %s", len(self.hellos), sorted(self.hellos)[:20])

    def welcome(self, max_age: float = 0.0) -> set[int]:
        """Call nodes that are new, take in what they say, and return the nodes that are connected.

        The list of nodes is asked for anew when it is older than `max_age` seconds.
        """
        if self._listed is None or time.monotonic() - self._listed[0] > max_age:
            self._listed = (time.monotonic(), self._post.nodes())
        names = self._listed[1]
        alive = set(names)
        for node_id in self._rivals.keys() - alive:
            del self._rivals[node_id]
        for node_id in self._pending.keys() - alive:
            del self._pending[node_id]
        now, called = time.monotonic(), set(self._greeting.values())
        again = {node_id for node_id, due in self._again.items() if due <= now and node_id not in called}
        for node_id in sorted(alive - (self._known - again))[: max(0, _CALLS_AT_ONCE - len(self._greeting))]:
            if message_id := self._post.push(node_id, HELLO, ({}, self._words), self._wait):
                self._greeting[message_id] = node_id
                self._known.add(node_id)
                self._again.pop(node_id, None)
        self._known &= alive
        for message_id in [message_id for message_id, node_id in self._greeting.items() if node_id not in alive]:
            del self._greeting[message_id]
        for message_id, message in self._post.pull(self._greeting, singly=True):
            node_id = self._greeting.pop(message_id)
            self._meet(node_id, names.get(node_id, ""), message, alive)
        for node_id, hello in list(self._rivals.items()):
            if self.nodes[hello.client_id] not in alive:
                del self._rivals[node_id]
                self._bind(node_id, hello)
        return alive

    def _meet(self, node_id: int, told_name: str, message: Letter, alive: set[int]) -> None:
        """Take in what a node says of itself, or refuse it and say why."""
        whose = one_line(told_name, 200) or f"node {node_id}"
        self._pending.pop(node_id, None)
        self._again[node_id] = time.monotonic() + _LOOKS * self._post.poll
        if told := trouble(message):
            return self._refuse(whose, told)
        try:
            with reading("it"):
                texts = texts_of(content_of(message))
                whose, why = identity(node_id, told_name, texts)
                if why:
                    return self._refuse(whose, why)
                if "error" in texts:
                    return self._refuse(whose, one_line(texts["error"]))
                if isinstance(self._expected, tuple) and whose not in self._expected:
                    del self._again[node_id]
                    return self._refuse(whose, f"it is not among the expected clients {list(self._expected)}")
                if reason := self._other_terms(texts):
                    return self._refuse(whose, reason)
                arrays, _ = from_content(content_of(message), self._shapes_of_hello(), "it")
                hello = _hello.unpack_hello(arrays, {**texts, "client_id": whose})
        except Malformed as error:
            return self._refuse(whose, f"its introduction cannot be read: {one_line(error)}")
        self._pending[node_id] = hello
        if self._reference is None:
            number = self._expected if isinstance(self._expected, int) else len(self._expected)
            self._reference = _enrolment.reference(list(self._pending.values()), number)
        if self._reference is not None:
            for waiting, one in list(self._pending.items()):
                del self._pending[waiting]
                self._admit(waiting, one, alive)
            return None
        del self._again[node_id]
        apart = _enrolment.disagreement(list(self._pending.values()))
        for waiting, one in self._pending.items():
            if why := apart.get(one.client_id):
                self._again.setdefault(waiting, time.monotonic() + _LOOKS * self._post.poll)
                self._refuse(one.client_id, f"{why}; no majority of the clients says either yet")
        return None

    def _other_terms(self, texts: Mapping[str, str]) -> str | None:
        """What a site does not run as the server does; the version first, which decides how the rest is written."""
        ours = self._reference.terms if self._reference else self._server
        bare = ours._replace(version=one_text(texts, "version", 200), variables=None)
        return _enrolment.other_terms(ours, bare) or _enrolment.other_terms(ours, _hello.unpack_terms(texts))

    def _shapes_of_hello(self) -> Mapping[str, tuple[int, ...]] | None:
        """Sizes of an introduction's arrays, where the server knows what to expect."""
        if self._reference is None:
            return None
        size, layout = self._reference.layout.size, self._reference.layout
        precision = size * (size + 1) // 2 if layout.prior.precision.ndim == 2 else size
        return {"prior_linear": (size,), "prior_precision": (precision,), "prior_density": (len(layout.density),)}

    def _admit(self, node_id: int, hello: _hello.Hello, alive: set[int]) -> None:
        """Enrol a node that says what the reference says, or refuse it."""
        assert self._reference is not None
        client_id = hello.client_id
        if reason := _enrolment.difference(self._reference, hello):
            return self._refuse(client_id, reason)
        self._again.pop(node_id, None)
        known = client_id in self.hellos
        if not known and self._complete():
            return self._refuse(client_id, "the run has begun with other clients; it can enrol in the next run")
        if known and self.nodes[client_id] in alive and self.nodes[client_id] != node_id:
            self._rivals[node_id] = hello
            return self._refuse(
                client_id, f"nodes {self.nodes[client_id]} and {node_id} are both live with this id; stop one of them"
            )
        return self._bind(node_id, hello)

    def _bind(self, node_id: int, hello: _hello.Hello) -> None:
        back = hello.client_id in self.nodes
        self.nodes[hello.client_id] = node_id
        self.hellos.setdefault(hello.client_id, hello)
        self._refused.pop(hello.client_id, None)
        logger.info(
            "client %s %s as node %d",
            hello.client_id,
            "is back" if back else "enrolled",
            node_id,
            extra={"client": hello.client_id, "status": "enrolled"},
        )

    def _refuse(self, client_id: str, reason: str) -> None:
        if self._refused.get(client_id) == reason:  # said already
            return
        self._refused[client_id] = reason
        logger.error("client %s refused: %s", client_id, reason, extra={"client": client_id, "status": "refused"})

    def _complete(self) -> bool:
        expected = self._expected
        if isinstance(expected, int):
            return len(self.hellos) >= expected
        return set(expected) <= set(self.hellos)

    def _missing(self) -> str:
        """Who is not there, who was refused and why, and who says what where there is no majority."""
        number = self._expected if isinstance(self._expected, int) else len(self._expected)
        told = list(self._pending.values())
        apart = _enrolment.disagreement(told)
        there = {*self.hellos, *(() if apart else (hello.client_id for hello in told))}
        found = ", ".join(map(repr, sorted(there))) or "none"
        if isinstance(self._expected, tuple):
            found += f"; missing {sorted(set(self._expected) - there - {hello.client_id for hello in told})}"
        reasons = {client_id: why for client_id, why in self._refused.items() if client_id not in apart}
        refused = "".join(f"; {client_id!r} was refused: {why}" for client_id, why in reasons.items())
        if apart:
            refused += (
                "; the sites differ, and no more than half of the clients that are expected say the same: "
                + "; ".join(f"{client_id!r}: {why}" for client_id, why in sorted(apart.items()))
                + ". Correct who is wrong, or give the server example_data=, and it knows by itself"
            )
        return (
            f"only {len(there)} of {number} sites enrolled within {self._wait:g} s ({found}){refused}. Start the "
            "missing sites and look at their logs, or raise wait=."
        )


# Letters to and from the nodes of a Flower grid: what is pushed and pulled, whatever comes back -----------------------

# What goes wrong in Flower where a message is not what it says; other errors are the connection's.
_UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    struct.error,
    DecodeError,
)

_PATIENCE = 2.0  # seconds with a call for messages that does not return

Letter = FlowerMessage | str  # or why it could not be unpacked


class _Pulled(NamedTuple):
    """Messages that were asked for in one call, and what it brought."""

    asked: Sequence[str]
    found: Sequence[FlowerMessage] | Exception


class Post:
    """A grid, and how often to look into it (seconds)."""

    def __init__(self, grid: Grid, poll: float, grace: float) -> None:
        self._grid = grid
        self.poll = poll
        self.grace = grace
        self._singly = False  # whether messages are pulled one at a time
        self._pulls: dict[str, int | None] = {}  # messages in calls that have not returned; the node of a single one
        self._came: queue.SimpleQueue[_Pulled] = queue.SimpleQueue()

    def nodes(self) -> dict[int, str]:
        """Nodes that are connected, with their authenticated names."""
        return {int(node.node_id): str(node.name or "") for node in self._grid.get_nodes()}

    def push(self, node_id: int, kind: str, parcel: _wire.Parcel, deadline: float) -> str | None:
        """Send a message; its id, or None where it could not be sent."""
        message = FlowerMessage(
            content=to_content(*parcel), dst_node_id=node_id, message_type=kind, ttl=deadline + self.grace
        )
        # One at a time: where a node has just left, some grids leave its id out of the list and shift the others.
        return next(iter(self._grid.push_messages([message])), None) or None

    def pull(self, asked: Mapping[str, int], *, singly: bool = False) -> list[tuple[str, Letter]]:
        """Replies that are there, one at most to each of the messages (ids, with the nodes that were asked).

        Flower unpacks a message before it hands it over, and waits for one that was announced and never sent. Either
        takes along what came with it: from then on messages are pulled one by one, so that nobody's reply is lost with
        another's. No call is waited for longer than a moment; what it brings later is handed over later.
        """
        free = [message_id for message_id in asked if message_id not in self._pulls]
        for group in [[one] for one in free] if singly or self._singly else [free] if free else []:
            self._pulls |= dict.fromkeys(group, asked[group[0]] if len(group) == 1 else None)
            threading.Thread(target=self._fetch, args=(group,), daemon=True).start()
        found: dict[str, Letter] = {}
        end = time.monotonic() + _PATIENCE
        while any(message_id in self._pulls for message_id in free) or not self._came.empty():
            try:
                pulled = self._came.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                self._singly = True
                break
            for message_id in pulled.asked:
                self._pulls.pop(message_id, None)
            if isinstance(pulled.found, Exception):
                if not isinstance(pulled.found, _UNREADABLE):
                    if set(pulled.asked) & set(free):
                        raise pulled.found
                    continue  # of a call that was given up: what it says of the connection is not of now
                if len(pulled.asked) == 1:
                    found[pulled.asked[0]] = f"its message cannot be read ({type(pulled.found).__name__})"
                    continue
                self._singly = True
                return [*found.items(), *self.pull({k: v for k, v in asked.items() if k not in found})]
            for message in pulled.found:
                message_id, sender = message.metadata.reply_to_message_id, message.metadata.src_node_id
                # What answers nothing that was asked, or another's question, or a second time, is no reply.
                if message_id in asked and (message.has_error() or sender == asked[message_id]):
                    found.setdefault(message_id, message)
        return list(found.items())

    def silent(self) -> set[int]:
        """Nodes that have announced a message and not sent it yet."""
        return {node_id for node_id in self._pulls.values() if node_id is not None}

    def _fetch(self, group: Sequence[str]) -> None:
        try:
            self._came.put(_Pulled(group, list(self._grid.pull_messages(group))))
        except Exception as error:  # the caller's, who knows what to do with it
            self._came.put(_Pulled(group, error))

    def replies(self, asked: Mapping[str, int], deadline: float) -> Iterable[tuple[str, Letter]]:
        """Yield replies as they come, until all are there or the deadline (seconds) has passed."""
        waiting, end = dict(asked), time.monotonic() + deadline
        while waiting:
            looked = time.monotonic()
            for message_id, message in self.pull(waiting):
                del waiting[message_id]
                yield message_id, message
            if not waiting or time.monotonic() > end:
                return
            # A look that takes long (many messages) is not repeated at once: it holds up what it waits for.
            pause = max(self.poll, time.monotonic() - looked)
            time.sleep(min(pause, max(0.0, end - time.monotonic())))


def content_of(message: Letter) -> RecordDict:
    """What a letter holds."""
    require(not isinstance(message, str), "no message")
    return message.content  # type: ignore[union-attr]


def trouble(message: Letter) -> str | None:
    """Why a letter holds no answer, in one line, or None.

    Details of Flower's may quote the site's data and stay out of our results.
    """
    if isinstance(message, str):
        return message
    if not message.has_error():
        return None
    meanings = {
        1: "the site's app could not be loaded",
        2: "the site's app raised an exception; see the site's log",
        3: "the message was not available any more",
        4: "the reply was not available any more",
        5: "the site is not reachable",
        8: "the site's app crashed",
    }
    return meanings.get(message.error.code, f"Flower error {message.error.code}")
