"""The server's side: an engine that sends requests to sites by a transport.

No message of a site ends a run: what cannot be read is refused, with the client and the rule.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fedppl.contracts import Accept, Failure, Heard, Reply, Request, Requests, SharedReader, Summed, unheard
from fedppl.contracts.algorithm import AnyAlgorithm
from fedppl.engine import secure as _secure
from fedppl.engine.answer import require_fit, take_sum
from fedppl.engine.guard import OTHER_COUNTS
from fedppl.engine.policy import refuse_sharing
from fedppl.formulas.exchange import example
from fedppl.formulas.formula import is_formula
from fedppl.model.declaration import FederatedModel
from fedppl.results.records import COHORT
from fedppl.run.one_round import MOST_INFOS
from fedppl.settings import flag, positive, shown
from fedppl.sites import ASK, CONCLUDE, GATE, GREET, JOIN, Absent, Content, Transport, parcel_of, read_letter, texts_of
from fedppl.sites import masks as _masks
from fedppl.sites import wire as _wire
from fedppl.sites.conclusions import MOST_BYTES, SUMS, read_told
from fedppl.sites.decode import Malformed, Parcel, require, require_few
from fedppl.sites.enrolment import Roll, expected_clients
from fedppl.types import DeclarationError, Layout, Message, Status

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SitesSettings(NamedTuple):
    """Sites to wait for, and limits in seconds."""

    clients: int | tuple[str, ...]
    wait: float
    deadline: float
    secure: bool = False  # whether sums under masks are all that the server gets


class _Missing(Exception):
    """Sites of a cohort that have no answer, so that there is no sum in this round, and why."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = reasons


class LostSites(DeclarationError):
    """Sites of a cohort are absent for good, so that its sum will never be whole."""

    def __init__(self, reasons: Mapping[str, str], others: tuple[str, ...], wait: float) -> None:
        self.reasons, self.others = reasons, others  # of those that are absent; the rest of the cohort
        why = "; ".join(f"{name!r}: {reason}" for name, reason in reasons.items())
        remedy = "start them and go on from checkpoint=, or begin a run of the others (on_dropout='new cohort')"
        super().__init__(f"sites of a cohort were absent for {wait:g} s, and sums are of all ({why}); {remedy}.")


class _Busy(NamedTuple):
    """A request that was not answered in time."""

    client_id: str
    node_id: int
    expiry: float


class SitesEngine:
    """Clients at sites, by logical id; see `fedppl.Flower.grid`."""

    def __init__(
        self,
        post: Transport,
        algorithm: AnyAlgorithm,
        settings: SitesSettings,
        layout: Layout,
        reader: SharedReader,
        greeting: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self._algorithm = algorithm.name
        self._layout, self._reader = layout, reader  # by the server's own declaration
        self._post = post
        self.run = post.run
        terms = _wire.Terms(algorithm.settings, layout, reader.coords)
        self._roll = Roll(self._post, settings.clients, settings.wait, terms, greeting or {})
        self._busy: dict[str, _Busy] = {}  # by message
        self._diagnostics: dict[str, set[str]] = {}  # names of those that each client has sent
        self._cohort: dict[str, Sequence[_secure.Part]] = {}  # by run the parts of its counts, where sums are secure
        self._counted: set[str] = set()  # runs in which all have answered a request, and so know the counts
        self._gated: set[str] = set()  # runs in which a round was void
        self._roll.enrol()

    def clients(self) -> tuple[str, ...]:
        """Return the ids of the enrolled clients, sorted."""
        return tuple(sorted(self._roll.nodes))

    def layout(self) -> Layout:
        """Return the server's layout."""
        return self._layout

    def reader(self) -> SharedReader:
        """Return the server's reader of draws of φ."""
        return self._reader

    def exchange(
        self, requests: Mapping[str, Request], deadline: float | None, heard: Heard = unheard
    ) -> dict[str, Reply | Failure]:
        """Send each request to its site; those without a reply at the deadline (seconds) are failures."""
        if self._settings.secure:
            raise _secure.single(self._algorithm)

        def read(client_id: str, content: Content) -> Reply | Failure:
            shapes = {} if "failure" in texts_of(content) else requests[client_id].shapes
            reply = _wire.unpack_reply(*parcel_of(content, shapes))
            if isinstance(reply, Reply):
                names = self._diagnostics.get(client_id, set()) | set(reply.info)
                require_few(len(names), MOST_INFOS, "names in 'info' over the run")
                self._diagnostics[client_id] = names
            return reply

        parcels: dict[str, Parcel] = {name: _wire.pack_request(request) for name, request in requests.items()}
        answers = self._answers(ASK, parcels, deadline, read, "its reply cannot be read", heard)
        return {
            client_id: Failure(client_id, requests[client_id].nonce, answer) if isinstance(answer, str) else answer
            for client_id, answer in answers.items()
        }

    def exchange_sum(
        self, requests: Requests, accept: Accept, deadline: float | None, heard: Heard = unheard
    ) -> Summed:
        """The sum of replies: added here, or under masks where sums are secure, of all sites or not at all."""
        if not self._settings.secure:
            return take_sum(self.exchange, requests, accept, deadline, heard)
        _secure.require_all(requests, self.clients())
        made = {client_id: requests.make(client_id) for client_id in requests.clients}
        _secure.require_same([request.message for request in made.values()], self._algorithm)
        run, shapes = made[requests.clients[0]].run, made[requests.clients[0]].shapes or {}
        end = time.monotonic() + self._settings.wait
        fingerprint, words = self._layout.fingerprint, _masks.shapes_of(shapes)

        def read(name: str, content: Content) -> _secure.Words | str:
            reply = _wire.unpack_reply(*parcel_of(content, {} if "failure" in texts_of(content) else words))
            return _masks.words_of(made[name], reply, fingerprint)

        parcels: dict[str, Parcel] = {name: _wire.pack_request(request) for name, request in made.items()}
        try:
            counts = self._joined(run, deadline, end)
            if run not in self._counted:
                parcels = _beside(parcels, ({}, _masks.pack_parts(counts)))
            if run in self._gated or _masks.is_gated(counts):
                parcels = _beside(parcels, self._gate(parcels, deadline, end))
            parts = self._from_all(ASK, parcels, deadline, end, read, "its reply cannot be read", heard)
        except _Missing as missing:
            # A site that passes `few_rows` alone at the prior's mean may fail it elsewhere: from now on in sums.
            self._gated.add(run)
            return _secure.void(missing.reasons)
        self._counted.add(run)
        return _secure.summed(parts, shapes)

    def _joined(self, run: str, deadline: float | None, end: float) -> Sequence[_secure.Part]:
        """The parts of the cohort's counts, with which sites join it once all have greeted; once in a run.

        Sites greet and join in the same words whenever they are asked, so that a round without a sum asks all again.
        """
        if run in self._cohort:
            return self._cohort[run]

        def greeting(name: str, content: Content) -> _secure.Greeting:
            return _masks.unpack_greeting(texts_of(content), name)

        def part(name: str, content: Content) -> _secure.Part:
            return _masks.unpack_part(texts_of(content), name)

        asked: dict[str, Parcel] = {name: ({}, _masks.ask(name, run)) for name in self.clients()}
        greetings = self._from_all(GREET, asked, deadline, end, greeting, "its greeting cannot be used")
        cohort = _masks.pack_cohort([greetings[name] for name in self.clients()])
        cannot = "its part of the cohort's counts cannot be used"
        parts = self._from_all(JOIN, _beside(asked, ({}, cohort)), deadline, end, part, cannot)
        if len({len(one.words) for one in parts.values()}) > 1:
            raise DeclarationError(OTHER_COUNTS)
        self._cohort[run] = [parts[name] for name in self.clients()]
        return self._cohort[run]

    def _gate(self, parcels: Mapping[str, Parcel], deadline: float | None, end: float) -> Parcel:
        """What sites sum of their rows before a request, where one of them fails `few_rows` alone.

        The sum is for the sites alone: here it is as random as its parts.
        """

        def part(name: str, content: Content) -> _secure.Part:
            return _masks.unpack_sealed(*parcel_of(content, most=_masks.MOST_OF_GATE), name)

        parts = self._from_all(GATE, parcels, deadline, end, part, "what it says of its rows cannot be used")
        return _masks.pack_gate([one for _, one in sorted(parts.items())])

    def _from_all(
        self,
        kind: str,
        parcels: Mapping[str, Parcel],
        deadline: float | None,
        end: float,
        read: Callable[[str, Content], T | str],
        cannot: str,
        heard: Heard = unheard,
    ) -> dict[str, T]:
        """Answers of all, where sites that are absent are asked again: they answer the same, and nobody else is asked.

        So a site that drops out makes no round void. LostSites where one is absent until `end`, `_Missing` where one
        refuses.
        """
        answers: dict[str, T | str] = {}
        left = dict(parcels)
        while left:
            answers |= self._answers(kind, left, deadline, read, cannot, heard)
            left = {name: parcel for name, parcel in left.items() if isinstance(answers[name], Absent)}
            if left and time.monotonic() > end:
                others = tuple(name for name in self.clients() if name not in left)
                raise LostSites({name: str(answers[name]) for name in left}, others, self._settings.wait)
            if left:
                time.sleep(self._post.poll)
        if reasons := {name: answer for name, answer in answers.items() if isinstance(answer, str)}:
            raise _Missing(reasons)
        return {name: answer for name, answer in answers.items() if not isinstance(answer, str)}

    def _answers(
        self,
        kind: str,
        parcels: Mapping[str, Parcel],
        deadline: float | None,
        read: Callable[[str, Content], T],
        cannot: str,
        heard: Heard = unheard,
    ) -> dict[str, T | str]:
        """Send each client its parcel; return what `read` makes of its answer, or why there is none."""
        limit, nodes, alive = deadline or self._settings.deadline, self._roll.nodes, self._roll.welcome()
        if kind == ASK:
            self._drop_late()
        answers: dict[str, T | str] = {}
        sent: dict[str, str] = {}  # clients by message
        for client_id, parcel in parcels.items():
            if nodes[client_id] not in alive:
                answers[client_id] = Absent("its site is not connected")
            elif nodes[client_id] in self._post.silent():
                answers[client_id] = Absent("a message that its site announced has not come yet")
            elif message_id := self._post.push(nodes[client_id], kind, parcel, limit):
                sent[message_id] = client_id
                if kind == ASK:
                    expiry = time.monotonic() + limit + self._post.grace
                    self._busy[message_id] = _Busy(client_id, nodes[client_id], expiry)
            else:
                answers[client_id] = Absent("its message could not be sent")
        asked, end = {message_id: nodes[client_id] for message_id, client_id in sent.items()}, time.monotonic() + limit
        while sent:
            looked = time.monotonic()
            for message_id, letter in self._post.pull({message_id: asked[message_id] for message_id in sent}):
                client_id = sent.pop(message_id)
                self._busy.pop(message_id, None)
                answers[client_id] = read_letter(letter, functools.partial(read, client_id), cannot)
                heard(client_id)
            if time.monotonic() > end:
                break
            if sent:  # a slow pull (many messages) is not repeated at once: it would hold up what it waits for
                pause = max(self._post.poll, time.monotonic() - looked)
                time.sleep(min(pause, max(0.0, end - time.monotonic())))
        return answers | dict.fromkeys(sent.values(), Absent(f"no reply within the deadline of {limit:g} s"))

    def conclude(
        self, final_message: Callable[[str], Message], run: str, seed: int, status: Status
    ) -> dict[str, Message]:
        """Send every site its final message, by which it draws its own posterior; return what policies let out.

        Where sums are secure that is under `COHORT`, summed over all sites.
        """

        def read(_: str, content: Content) -> Message:
            return read_told(parcel_of(content, most=MOST_BYTES)[0])

        texts = {"run": run, "seed": str(seed), "status": status.value}
        parcels: dict[str, Parcel] = {
            client_id: (final_message(client_id), {"client_id": client_id, **texts}) for client_id in self.clients()
        }
        if self._settings.secure:
            return {COHORT: self._told_in_sum(parcels, run)}
        told: dict[str, Message] = {}
        answers = self._answers(CONCLUDE, parcels, None, read, "what it told of its rows cannot be used")
        for client_id, answer in answers.items():
            if isinstance(answer, str):
                extra = {"run": run, "client": client_id, "reason": answer}
                logger.warning("end of the run, client %s: %s", client_id, answer, extra=extra)
            else:
                told[client_id] = answer
        return told

    def _told_in_sum(self, parcels: Mapping[str, Parcel], run: str) -> Message:
        """Sums over the cohort of what all its policies let out at the end; absent sites are asked again."""
        shapes, end = _masks.shapes_at_end(SUMS), time.monotonic() + self._settings.wait

        def read(_: str, content: Content) -> Message:
            texts_of(content)
            words = parcel_of(content, shapes if content.arrays() else {})[0]
            require(bool(words), "it told nothing; the reason is in the site's own log")
            require(all(value.dtype == np.int64 for value in words.values()), "words that are not of type int64")
            return words

        try:
            told = self._from_all(CONCLUDE, parcels, None, end, read, "what it told of its rows cannot be used")
        except (LostSites, _Missing) as error:
            for name, reason in error.reasons.items():
                extra = {"run": run, "client": name, "reason": reason}
                logger.warning(
                    "end of the run, client %s: %s; the cohort has no conclusions", name, reason, extra=extra
                )
            told = {}
        sums = _masks.sums_at_end(told, SUMS) if told else {}
        for name in list(sums):
            try:
                read_told({name: sums[name]})
            except Malformed as error:
                logger.warning("end of the run: the cohort's sum cannot be used, %s", error, extra={"run": run})
                del sums[name]
        if missing := [name for name in SUMS if name not in sums]:
            why = "not every site's policy names it, or not every site could compute it"
            logger.info("end of the run: the cohort told no sum of %s: %s", missing, why, extra={"run": run})
        return sums

    def has_sites(self) -> bool:
        """Return True: clients are sites of their own."""
        return True

    def personal(self) -> Mapping[str, Any]:
        """Return nothing: clients' personal state stays at the sites."""
        return {}

    def restore(self, personal: Mapping[str, Any]) -> None:
        """Do nothing: the sites have their personal state."""

    def close(self) -> None:
        """Do nothing: sites wait for what comes next."""

    def _drop_late(self) -> None:
        """Wait until requests of earlier rounds are answered or have expired: no client ever has two."""
        while self._busy:
            now, nodes = time.monotonic(), self._roll.nodes
            # A client whose node has changed does not answer the request to the earlier one.
            self._busy = {
                message_id: busy
                for message_id, busy in self._busy.items()
                if busy.expiry > now and nodes[busy.client_id] == busy.node_id
            }
            for message_id, _ in self._post.pull({key: busy.node_id for key, busy in self._busy.items()}):
                client_id = self._busy.pop(message_id).client_id
                extra = {"client": client_id, "status": "late"}
                logger.info("client %s: a late reply was dropped", client_id, extra=extra)
            if self._busy:
                time.sleep(self._post.poll)


def _beside(parcels: Mapping[str, Parcel], more: Parcel) -> dict[str, Parcel]:
    """Every site's parcel, and what goes to all beside it."""
    return {name: ({**arrays, **more[0]}, {**texts, **more[1]}) for name, (arrays, texts) in parcels.items()}


# What makes it -------------------------------------------------------------------------------------------------------


class Sites(NamedTuple):
    """Makes the engine of a run; its settings have been `checked`, and on a formula clients have agreed."""

    post: Callable[[], Transport]  # of a run
    model: FederatedModel
    example_data: Mapping[str, Any] | None
    settings: SitesSettings

    @property
    def secure(self) -> bool:
        """Whether sums under masks are all that the server gets."""
        return self.settings.secure

    def __call__(self, algorithm: AnyAlgorithm, models: Mapping[str, Any]) -> SitesEngine:
        """Wait for the sites."""
        if models:
            raise DeclarationError("the data are at the sites: pass clients=None, and the sites' load_data finds them.")
        if self.secure and algorithm.replies.summed is algorithm.replies._field_defaults["summed"]:
            raise _secure.single(algorithm.name)
        data, greeting = self.example_data, {}
        if is_formula(self.model):
            built: Any = self.model.builder
            data = example(built) if data is None else data
            greeting = {"agreement": _wire.pack_agreement(built.design.agreement)}
        client = self.model.enrol({"example_data": data}, kernel=algorithm.needs.kernel)["example_data"]
        require_fit(algorithm, client)
        expected = self.settings.clients
        count = expected if isinstance(expected, int) else len(expected)
        if why := refuse_sharing(algorithm, count if self.secure else None):
            raise DeclarationError(f"{why}; pass secure=True, also to client_app, and so many clients=.")
        return SitesEngine(self.post(), algorithm, self.settings, client.layout, client.reader(), greeting)


def checked(model: Any, example_data: Any, clients: Any, secure: Any, **seconds: float) -> int | tuple[str, ...]:
    """Check settings; return the clients that it waits for."""
    expected = expected_clients(clients)
    for name, value in seconds.items():
        positive(name, value, "it is in seconds")
    if flag("secure", secure):
        _secure.require_enough(expected if isinstance(expected, int) else len(expected))
    if not isinstance(model, FederatedModel):
        raise DeclarationError(f"model is {type(model).__name__}; pass the FederatedModel that sites declare.")
    if not isinstance(example_data, Mapping) and not (example_data is None and is_formula(model)):
        remedy = "pass a mapping from the builder's names to arrays, of a few rows"
        raise DeclarationError(f"example_data={shown(example_data)} must be made-up data like sites'; {remedy}.")
    return expected
