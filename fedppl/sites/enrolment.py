"""Enrolment: which node is which client, whether a site runs the server's model, and agreement on a formula."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from fedppl.engine import secure as _secure
from fedppl.formulas.exchange import asked, of_sum, sizes
from fedppl.formulas.formula import Agreed, of_told
from fedppl.model.declaration import FederatedModel
from fedppl.settings import flag, one_line, one_of, shown, whole
from fedppl.sites import AGREE, HELLO, Content, Letter, Transport, parcel_of, read_letter, texts_of
from fedppl.sites import masks as _masks
from fedppl.sites import site_agreement as _site
from fedppl.sites.decode import checked_name, whole_number
from fedppl.sites.wire import Terms, other_model, other_terms, other_version, shapes_of_hello, unpack_told
from fedppl.types import DeclarationError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_CALLS_AT_ONCE = 64  # that wait for an answer: Flower's simulation looks through all messages for every node
_POLLS_TO_RETRY = 120  # after which a site that was refused is called again: it may have been corrected


def expected_clients(clients: Any) -> int | tuple[str, ...]:
    """Check `clients`, the number of sites to wait for or their ids."""
    if isinstance(clients, int) and not isinstance(clients, bool):
        return whole("clients", clients)
    names = clients if isinstance(clients, list | tuple) else ()
    if not names or not all(isinstance(name, str) and name for name in names) or len({*names}) < len(names):
        raise DeclarationError(f"clients={shown(clients)} must be a number of sites, or a list of different ids.")
    return tuple(names)


def identity(node_id: int, authenticated: str, texts: Mapping[str, str]) -> tuple[str, str | None]:
    """A node's client id, and why it is not accepted as that client; or `Malformed`."""
    client_id = texts.get("client_id", "")
    client_id = client_id and checked_name(client_id, "'client_id'")
    if not authenticated and not client_id:
        return f"node {node_id}", 'it has no id; start it with --node-config "client-id=..."'
    if authenticated and client_id and client_id != authenticated:
        name = f"its authenticated name is {authenticated!r}"
        return client_id, f"{name}; drop or correct its client-id, or its identity's name"
    return authenticated or client_id, None


class _Call(NamedTuple):
    """What nodes are called by until the expected clients have answered."""

    kind: str  # of the messages
    question: Mapping[str, str]
    doing: str  # what clients have to do, in words
    cannot: str  # that an answer is malformed


class _Awaited(Generic[T]):
    """Clients that a server waits for, and why it refuses some.

    `read` makes an answer of a message and its texts, or says why it is refused; `take` keeps the answer of a node's
    client, or says why not.
    """

    def __init__(
        self,
        post: Transport,
        expected: int | tuple[str, ...],
        wait: float,
        call: _Call,
        read: Callable[[Content, Mapping[str, str]], T | str],
        take: Callable[[int, str, T, Mapping[int, str]], str | None],
    ) -> None:
        self._post = post
        self._expected = expected
        self._wait = wait
        self._call = call
        self._read, self._take = read, take
        self.answers: dict[str, T] = {}  # by client
        self._calls: dict[str, int] = {}  # message id of a call not answered yet, to its node
        self._due: dict[int, float] = {}  # nodes that have answered, and when to call them again
        self.refused: dict[str, str] = {}

    def until_complete(self, step: Callable[[], object]) -> None:
        """Repeat a step until the expected clients have answered."""
        end = time.monotonic() + self._wait
        while not self.is_complete():
            step()
            if not self.is_complete():
                if time.monotonic() > end:
                    raise DeclarationError(self._missing())
                time.sleep(self._post.poll)

    def is_complete(self) -> bool:
        """Whether all expected clients have answered."""
        if isinstance(self._expected, int):
            return len(self.answers) >= self._expected
        return set(self._expected) <= set(self.answers)

    def _missing(self) -> str:
        """An error text: missing and refused sites."""
        clients, count = ", ".join(map(repr, sorted(self.answers))) or "none", self._expected
        if isinstance(count, tuple):
            clients += f"; missing {sorted(set(count) - set(self.answers))}"
            count = len(count)
        refused = "".join(f"; {client_id!r} was refused: {why.rstrip('.')}" for client_id, why in self.refused.items())
        waited = f"{self._call.doing} within {self._wait:g} s ({clients}){refused}"
        remedy = "Start the missing sites and look at their logs, or raise wait=."
        return f"only {len(self.answers)} of {count} sites {waited}. {remedy}"

    def refuse(self, client_id: str, reason: str) -> None:
        """Log why a client is refused, once."""
        if self.refused.get(client_id) != reason:
            self.refused[client_id] = reason
            extra = {"client": client_id, "status": "refused"}
            logger.error("client %s refused: %s", client_id, reason, extra=extra)

    def call(self, nodes: Mapping[int, str]) -> None:
        """Call the connected nodes (with their authenticated names) that are due, and read what has arrived."""
        now = time.monotonic()
        self._calls = {message_id: node_id for message_id, node_id in self._calls.items() if node_id in nodes}
        self._due = {node_id: due for node_id, due in self._due.items() if node_id in nodes}
        called = set(self._calls.values())
        ready = [node_id for node_id in sorted(nodes) if node_id not in called and self._due.get(node_id, 0.0) <= now]
        for node_id in ready[: max(0, _CALLS_AT_ONCE - len(called))]:
            if message_id := self._post.push(node_id, self._call.kind, ({}, dict(self._call.question)), self._wait):
                self._calls[message_id] = node_id
        for message_id, letter in self._post.pull(self._calls, singly=True):
            self._receive(self._calls.pop(message_id), nodes, letter)

    def _receive(self, node_id: int, nodes: Mapping[int, str], letter: Letter) -> None:
        """Read a node's answer and take it, or refuse it and log why."""
        self._due[node_id] = time.monotonic() + _POLLS_TO_RETRY * self._post.poll
        authenticated = nodes.get(node_id, "")
        client_id = one_line(authenticated, 200) or f"node {node_id}"

        def read(content: Content) -> T | str:
            nonlocal client_id
            texts = texts_of(content)
            client_id, why = identity(node_id, authenticated, texts)
            if why:
                return why
            if not isinstance(self._expected, int) and client_id not in self._expected:
                self._due[node_id] = math.inf
                return f"it is not among the expected clients {list(self._expected)}"
            for said in ("error", "refused"):
                if said in texts:
                    return one_line(texts[said])
            return other_version(texts) or self._read(content, {**texts, "client_id": client_id})

        found = read_letter(letter, read, self._call.cannot)
        why = found if isinstance(found, str) else self._take(node_id, client_id, found, nodes)
        if why is None:
            self._due[node_id] = math.inf
        else:
            self.refuse(client_id, why)


class Roll:
    """Enrolled clients and their nodes."""

    def __init__(
        self, post: Transport, expected: int | tuple[str, ...], wait: float, terms: Terms, greeting: Mapping[str, str]
    ) -> None:
        self._post = post
        self._terms = terms
        call = _Call(HELLO, greeting, "enrolled", "its introduction cannot be read")
        self._awaited = _Awaited[None](post, expected, wait, call, self._read, self._take)
        self.nodes: dict[str, int] = {}  # client id to node id
        self._rivals: dict[int, str] = {}  # live nodes that claim the id of another live node
        self._listed: tuple[float, dict[int, str]] = -math.inf, {}  # when, and node ids with their names

    def enrol(self) -> None:
        """Call every node until the expected clients are enrolled."""
        self._awaited.until_complete(lambda: self.welcome(max_age=1.0))
        logger.info("%d clients enrolled: %s", len(self.nodes), sorted(self.nodes)[:20])

    def welcome(self, max_age: float = 0.0) -> set[int]:
        """Call new nodes, enrol those that have answered, and return all connected nodes.

        The list of nodes is fetched anew when it is older than `max_age` seconds.
        """
        if time.monotonic() - self._listed[0] > max_age:
            self._listed = (time.monotonic(), self._post.nodes())
        nodes = self._listed[1]
        self._rivals = {node_id: client_id for node_id, client_id in self._rivals.items() if node_id in nodes}
        self._awaited.call(nodes)
        for node_id, client_id in list(self._rivals.items()):
            if self.nodes[client_id] not in nodes:
                del self._rivals[node_id]
                self._bind(node_id, client_id)
        return set(nodes)

    def _read(self, content: Content, texts: Mapping[str, str]) -> str | None:
        """Where an introduction differs from the server's own."""
        if reason := other_terms(self._terms, texts):
            return reason
        arrays, _ = parcel_of(content, shapes_of_hello(self._terms.layout))
        return other_model(self._terms, arrays, texts)

    def _take(self, node_id: int, client_id: str, answer: None, nodes: Mapping[int, str]) -> str | None:
        """Enrol a node that agrees with the server."""
        if client_id not in self.nodes:
            if self._awaited.is_complete():
                return "the run has begun with other clients; it can enrol in the next run"
        elif self.nodes[client_id] in nodes and self.nodes[client_id] != node_id:
            self._rivals[node_id] = client_id
            both = f"nodes {self.nodes[client_id]} and {node_id}"
            self._awaited.refuse(client_id, f"{both} are both live with this id; stop one of them")
            return None
        self._bind(node_id, client_id)
        return None

    def _bind(self, node_id: int, client_id: str) -> None:
        what, extra = "is back" if client_id in self.nodes else "enrolled", {"client": client_id, "status": "enrolled"}
        self.nodes[client_id] = node_id
        self._awaited.answers[client_id] = None
        self._awaited.refused.pop(client_id, None)
        logger.info("client %s %s as node %d", client_id, what, node_id, extra=extra)


# Before a run by a formula: the server asks every site, once, for a summary of its columns ----------------------------


def agree(
    post: Transport, model: FederatedModel, clients: Any, min_count: int, withheld: str, wait: float, secure: bool
) -> Agreed:
    """Have sites agree on levels and scales of a formula; see `fedppl.Flower.agree`."""
    if not isinstance(model, FederatedModel) or not _site.waits(model):
        raise DeclarationError(f"model={shown(model)} is no formula to agree on; pass fedppl.formula(...).")
    whole("min_count", min_count)
    one_of("withheld", withheld, ("error", "other"))
    expected = expected_clients(clients)
    if flag("secure", secure):
        _secure.require_enough(expected if isinstance(expected, int) else len(expected))
        return _agreed_in_sums(post, model, expected, min_count, withheld, wait)
    logger.info("sites whose policy has a file for approval know this question as the run %r", _site.named(model))
    names = asked(model.builder).names  # type: ignore[arg-type]
    question = {"min_count": str(min_count)}
    told = _told_by_all(post, expected, wait, question, lambda _, texts: unpack_told(texts, names))
    return of_told(model, told, withheld, believed=False)


def _agreed_in_sums(
    post: Transport, model: FederatedModel, expected: int | tuple[str, ...], min_count: int, withheld: str, wait: float
) -> Agreed:
    """Have sites greet, name the cohort to all, and read the sum of their summaries under its masks."""
    built: Any = model.builder
    counted, summed = sizes(built)
    shapes = {_masks.WORDS: (counted + summed * _secure.WIDE,)}
    question = {"run": _site.named(model)}

    def greeting(content: Content, texts: Mapping[str, str]) -> tuple[_secure.Greeting, int]:
        return _masks.unpack_greeting(texts, texts["client_id"]), whole_number(texts, "fewest")

    def part(content: Content, texts: Mapping[str, str]) -> _secure.Words:
        return _masks.words_in(parcel_of(content, shapes)[0][_masks.WORDS])

    told = _told_by_all(post, expected, wait, question, greeting)
    greetings, fewest = zip(*told.values(), strict=True)
    run = _site.of_cohort(question["run"], _secure.digest(greetings).hex())
    logger.info("sites whose policy has a file for approval know this question as the run %r", run)
    names = tuple(told)
    parts = _told_by_all(post, names, wait, question | _masks.pack_cohort(greetings), part)
    words = _secure.added(list(parts.values()))
    sums = _secure.read_wide(words[counted:], len(names))
    counts = words[:counted].view(np.int64).tolist()
    if not all(0 <= count <= _masks.MOST_ROWS for count in counts):
        raise DeclarationError("counts of the cohort are none: a site has other code, or lies; ask sites one by one.")
    cohort = of_sum(built, counts, sums, max(min_count, *fewest))
    for name, column in cohort.items():
        if column.text and (rows := column.rows - sum(column.levels.values())):
            rule = f"at none of the levels {list(column.levels)[:8]} that are named and have enough rows"
            remedy = "if sites spell levels in another way, mend it there; else name more in formula(levels=...)"
            logger.warning("column %r: %d of %d rows are %s; %s", name, rows, column.rows, rule, remedy)
    outcome = built.terms.response.columns[0]
    fixed = {name: levels for name, levels in built.levels.items() if name == outcome}
    return replace(of_told(model, {"the cohort": cohort}, withheld, fixed=fixed), clients=names)


def _told_by_all(
    post: Transport,
    expected: int | tuple[str, ...],
    wait: float,
    question: Mapping[str, str],
    read: Callable[[Content, Mapping[str, str]], T | str],
) -> dict[str, T]:
    """What sites tell about their columns, by client; each is asked until all expected ones have answered."""

    def take(_: int, client_id: str, answer: T, nodes: Mapping[int, str]) -> str | None:
        if client_id in awaited.answers:
            return "another site has told under this id"
        if not awaited.is_complete():
            awaited.answers[client_id] = answer
            awaited.refused.pop(client_id, None)
        return None

    call = _Call(AGREE, question, "told what clients have to agree on", "what it tells cannot be read")
    awaited = _Awaited[T](post, expected, wait, call, read, take)
    awaited.until_complete(lambda: awaited.call(post.nodes()))
    return dict(sorted(awaited.answers.items()))
