"""Which node is which client, and whether it runs what the others run: calls, introductions, refusals."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, NamedTuple

from fedppl.contracts import AnyAlgorithm, SharedReader
from fedppl.flower import enrolment as _enrolment
from fedppl.flower import hello as _hello
from fedppl.flower.decode import Malformed, name, reading
from fedppl.flower.decode import text as one_text
from fedppl.flower.post import Letter, Post, content_of, trouble
from fedppl.flower.records import HELLO, from_content, texts_of
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
