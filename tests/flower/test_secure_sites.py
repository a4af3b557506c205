"""Sums over sites that the server cannot take apart: the same numbers, what it is sent, and what it is refused."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

pytest.importorskip("flwr")

from flwr.app import Message as FlowerMessage

import fedppl
from fedppl import DeclarationError, Policy, audit, gaussian, site
from fedppl.contracts import Failure, Reply, Request
from fedppl.engine import secure
from fedppl.engine.guard import REFUSED
from fedppl.flower.messages import to_content, unread
from fedppl.numerics.streams import client_seed
from fedppl.sites import AGREE, ASK, CONCLUDE, GREET, HELLO, JOIN, conclusions, masks, parcel_of, wire
from fedppl.sites.decode import Parcel
from fedppl.storage import signed, store
from fedppl.testing import normal_means
from fedppl.types import ConvergenceWarning, Message
from tests.support import stored
from tests.support.fake_grid import FakeGrid, engine_of, node

OPEN = Policy(
    sums="optional",
    cohorts=2,
    rows=0,
    few_rows=0,
    parameters_per_row=math.inf,
    events=0,
    requests=math.inf,
    distance=math.inf,
    points=2**30,
    conclusions=("loo",),
)
NAMES = ("client 0", "client 1", "client 2")


@functools.cache
def declared() -> tuple[fedppl.FederatedModel, dict[str, Any]]:
    return normal_means(3)


def identities(folder: Path, names: tuple[str, ...] = NAMES) -> None:
    """A folder for each site's identity, with all on all rosters."""
    lines = [site.make(folder / name, name) for name in names]
    for name, line in itertools.product(names, lines):
        if not line.startswith(f"{name} "):
            site.add(folder / name, line)


def app_of(base: Path, algorithm: Any = None, **keywords: Any) -> Any:
    model, clients = declared()
    return fedppl.Flower.client_app(
        model,
        algorithm or fedppl.Sums(),
        **{
            "load_data": lambda config: clients[config["client-id"]],
            "folder": lambda config: base / f"at {config['client-id']}",
            "policy": lambda config: OPEN,
            "secure": lambda config: base / str(config["client-id"]),
            "draws": 50,
            "chains": 2,
            **keywords,
        },
    )


def grid_of(base: Path, fault: Any = None, algorithm: Any = None, **keywords: Any) -> FakeGrid:
    app = app_of(base, algorithm, **keywords)
    return FakeGrid({10 + i: node(app, 10 + i, **{"client-id": name}) for i, name in enumerate(NAMES)}, fault)


def fit(grid: FakeGrid, *, secured: bool = True, algorithm: Any = None, **keywords: Any) -> fedppl.Fit:
    model, _ = declared()
    engine = engine_of(grid, model, 3, deadline=60.0, wait=60.0, secure=secured)
    settings = {"progressbar": False, "random_seed": 1, **keywords}
    return fedppl.fit(model, None, algorithm or fedppl.Sums(), engine=engine, **settings)


def bits(words: np.ndarray) -> np.ndarray:
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8))


# Fits ---------------------------------------------------------------------------------------------------------------


def test_a_fit_over_sites_is_the_plain_one_and_the_server_is_sent_noise(tmp_path: Path) -> None:
    identities(tmp_path)
    grid = grid_of(tmp_path)
    hidden, plain = fit(grid), fit(grid_of(tmp_path / "plain", secure=None), secured=False)
    assert hidden.status is plain.status is fedppl.Status.CONVERGED
    sd = gaussian.standard_deviations(plain.posterior)
    assert_allclose(gaussian.mean(hidden.posterior) / sd, gaussian.mean(plain.posterior) / sd, rtol=0, atol=1e-6)
    assert_allclose(gaussian.standard_deviations(hidden.posterior), sd, rtol=1e-6)
    assert abs(hidden.log_evidence.value - plain.log_evidence.value) < 1e-5
    assert len(hidden.records) == len(plain.records)
    assert all(not record.infos and not record.reasons and not record.failures for record in hidden.records)

    kinds = [message.metadata.message_type for message in grid.sent]
    assert kinds.count(GREET) == kinds.count(JOIN) == 3 and kinds.count(ASK) == 3 * len(hidden.records)
    words = []
    for message in grid.replies:
        arrays, texts = parcel_of(unread(message))
        if message.metadata.message_type == ASK:
            assert set(arrays) == {masks.WORDS} and texts["info"] == "{}" and not texts["reason"]
            assert set(texts) == {"client_id", "nonce", "fingerprint", "info", "reason"}
            words.append(bits(arrays[masks.WORDS]))
        if message.metadata.message_type == CONCLUDE:
            assert set(arrays) == set(conclusions.SUMS) and set(texts) == {"client_id"}
            words += [bits(part) for part in arrays.values()]
    noise = np.concatenate(words)
    assert abs(noise.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(noise))
    for name in NAMES:
        lines = list(audit.lines(tmp_path / f"at {name}"))
        (cohort,) = (line for line in lines if line["event"] == "cohort")
        assert cohort["members"] == list(NAMES)
        assert all(not line["diagnostics"] for line in lines if line["event"] == "reply")
        assert (tmp_path / f"at {name}" / f"{name.replace(' ', '%20')}.nc").exists()  # each site's own posterior


def of_shared_noise(clip: float = 20.0, noise_multiplier: float = 1e-7, shared_by: int = 3) -> Any:
    return fedppl.PrivateEP(clip=clip, noise_multiplier=noise_multiplier, releases=12, shared_by=shared_by)


def test_sites_that_share_their_noise_end_at_the_posterior(tmp_path: Path) -> None:
    """A Gaussian model, hardly any noise, and a message that is lost: that site is asked again."""
    identities(tmp_path)
    asked = itertools.count()

    def fault(message: FlowerMessage, node_id: int) -> Any:
        return 5 if message.metadata.message_type == ASK and next(asked) == 7 else None

    algorithm = of_shared_noise()
    grid = grid_of(tmp_path, fault, algorithm)
    hidden = fit(grid, algorithm=algorithm, rounds=12)
    plain = fit(grid_of(tmp_path / "plain", secure=None), secured=False)
    assert all(record.used == 3 for record in hidden.records)
    sd = gaussian.standard_deviations(plain.posterior)
    assert_allclose(gaussian.mean(hidden.posterior) / sd, gaussian.mean(plain.posterior) / sd, rtol=0, atol=1e-3)
    assert_allclose(gaussian.standard_deviations(hidden.posterior), sd, rtol=1e-3)


@pytest.mark.parametrize("masked", [False, True])
def test_a_site_answers_with_a_share_of_the_noise_in_a_large_enough_cohort_alone(masked: bool, tmp_path: Path) -> None:
    """Of a server that says nothing of it: in the clear, and in a cohort of three where four share the noise."""
    identities(tmp_path)
    algorithm = of_shared_noise(shared_by=4 if masked else 3)
    silent = algorithm._replace(disclosure=algorithm.disclosure._replace(shared_by=1))
    grid = grid_of(tmp_path, algorithm=algorithm, **({} if masked else {"secure": None}))
    with pytest.warns(ConvergenceWarning):
        result = fit(grid, algorithm=silent, rounds=1, secured=masked)
    assert result.records[0].used == 0 and REFUSED in result.records[0].failures["client 0"]
    rules = [line.get("refused") for line in stored.lines(tmp_path / "at client 0")]
    assert any(rule and rule.startswith("epsilon: ") and "shared_by" in rule for rule in rules)


def test_a_site_that_drops_out_is_asked_again_and_no_number_changes(tmp_path: Path) -> None:
    """The others are not asked again: their words are there, and the site's are those that it would have sent."""
    identities(tmp_path)
    asked = itertools.count()
    lost = {0, 4, 5, 8, 12}  # messages of whatever kind, one of them lost twice

    def fault(message: FlowerMessage, node_id: int) -> Any:
        is_of_run = message.metadata.message_type in (GREET, JOIN, ASK)
        return 5 if is_of_run and next(asked) in lost else None

    grid = grid_of(tmp_path, fault)
    missing = fit(grid)
    identities(tmp_path / "whole")
    others = grid_of(tmp_path / "whole")
    whole = fit(others)
    assert not any(record.failures for record in missing.records) and len(missing.records) == len(whole.records)
    assert_array_equal(gaussian.mean(missing.posterior), gaussian.mean(whole.posterior))
    assert missing.log_evidence == whole.log_evidence
    assert len(grid.sent) == len(others.sent) + len(lost)
    lines = list(audit.lines(tmp_path / "at client 0"))
    requests = [line for line in lines if line["event"] == "request" and not line.get("repeated")]
    assert len(requests) == len(missing.records) + 1  # for what is told at the end


def test_a_site_that_stays_away_ends_the_run_and_its_name_is_told(tmp_path: Path) -> None:
    identities(tmp_path)
    grid = grid_of(tmp_path)
    model, _ = declared()
    engine = engine_of(grid, model, 3, deadline=60.0, wait=0.2, secure=True)(fedppl.Sums(), {})
    assert engine.exchange_sum(requests_of(engine), None, None).clients == 3
    before, gone = len(grid.sent), grid.nodes.pop(12)
    with pytest.raises(DeclarationError, match="client 2.*checkpoint"):
        engine.exchange_sum(requests_of(engine, 2), None, None)
    assert len(grid.sent) == before + 2  # each of the others was asked once
    grid.nodes[12] = gone
    assert engine.exchange_sum(requests_of(engine, 2), None, None).clients == 3


def requests_of(engine: Any, number: int = 1) -> Any:
    """A first round's requests by the server's own algorithm."""
    algorithm = fedppl.Sums()
    state = algorithm.init(engine.layout(), engine.clients(), np.random.default_rng(1))
    shapes = algorithm.replies.shapes(state)

    def make(name: str) -> Request:
        seed = (1, number, client_seed(name))
        return Request(name, number, number, seed, algorithm.broadcast(state, name), "run", shapes=shapes)

    return fedppl.contracts.Requests(engine.clients(), make)


def test_what_needs_single_replies_or_fewer_sites_is_refused_before_any_is_asked(tmp_path: Path) -> None:
    identities(tmp_path)
    ep = fedppl.EP()
    grid = grid_of(tmp_path, algorithm=ep)
    with pytest.raises(DeclarationError, match=r"Sums\(\)"):
        fit(grid, algorithm=ep)
    with pytest.raises(DeclarationError, match="participation="):
        fit(grid_of(tmp_path), participation=2)
    assert not [message for message in grid.sent if message.metadata.message_type == ASK]
    model, _ = declared()
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"clients": 2, "secure": True}, "leave secure= out"),
        ({"clients": 3, "secure": 1}, "True or False"),
    ]
    for wrong, match in wrongs:
        with pytest.raises(DeclarationError, match=match):
            fedppl.Flower.grid(grid, model=model, example_data={"y": np.ones(2)}, **wrong)
        with pytest.raises(DeclarationError, match=match):
            fedppl.Flower.server_app(model, fedppl.Sums(), example_data={"y": np.ones(2)}, **wrong)
    with pytest.raises(DeclarationError, match="folder="):
        app_of(tmp_path, folder=None, policy=fedppl.policy.NO_RULES)
    with pytest.raises(DeclarationError, match="identity and roster"):
        app_of(tmp_path, secure=3)


def test_sites_and_servers_that_do_not_go_together_give_no_numbers(tmp_path: Path) -> None:
    """Masked answers are asked of sites without an identity, and clear ones of sites with one."""
    identities(tmp_path)
    with pytest.warns(ConvergenceWarning, match="refused"):
        clear = fit(grid_of(tmp_path), secured=False, rounds=1)
    assert {reason for record in clear.records for reason in record.failures.values()} == {REFUSED}
    assert set(refused_by(tmp_path, "client 0")) == {"sums"}
    grid = grid_of(tmp_path / "plain", secure=None)
    with pytest.warns(ConvergenceWarning, match="client_app"):
        without = fit(grid, rounds=1)
    reasons = without.records[0].failures
    assert set(reasons) == set(NAMES) and all("client_app" in reason for reason in reasons.values())
    assert not [message for message in grid.sent if message.metadata.message_type == ASK]


def refused_by(folder: Path, name: str) -> list[str]:
    """Rules by which a site has refused requests."""
    lines = audit.lines(folder / f"at {name}")
    return [line["refused"].partition(":")[0] for line in lines if line.get("refused")]


def test_a_site_that_sends_something_else_makes_the_round_void(tmp_path: Path) -> None:
    identities(tmp_path)
    junk: dict[str, Any] = {}

    def fault(message: FlowerMessage, node_id: int) -> Any:
        kind = message.metadata.message_type
        return (lambda reply: junk[kind](reply)) if node_id == 11 and kind in junk else None

    def other(arrays: Mapping[str, Any] | None = None, **texts: str) -> Callable[[FlowerMessage], FlowerMessage]:
        def changed(reply: FlowerMessage) -> FlowerMessage:
            before = parcel_of(unread(reply))
            reply.content = to_content(before[0] if arrays is None else arrays, {**before[1], **texts})
            return reply

        return changed

    grid = grid_of(tmp_path, fault)
    engine = engine_of(grid, declared()[0], 3, deadline=60.0, secure=True)(fedppl.Sums(), {})
    shapes = masks.shapes_of(requests_of(engine).make("client 0").shapes)
    size = shapes[masks.WORDS]
    wrong: list[tuple[str, Any, str]] = [
        (GREET, other(public="AAAA"), "greeting"),
        (GREET, other(name="client 0"), "client-id"),
        (GREET, other({}, refused="no"), "client_app"),
        (JOIN, other(words="AAAA"), "counts"),
        (JOIN, other(name="client 0"), "counts"),
        (JOIN, other({}, refused="no"), REFUSED),
        (ASK, other({"values": np.ones(3)}), "cannot be read"),
        (ASK, other({masks.WORDS: np.ones(3, "<i8")}), "cannot be read"),
        (ASK, other({masks.WORDS: np.ones(size)}), "int64"),
        (ASK, other(fingerprint="another"), "fingerprint"),
        (ASK, other(nonce="77"), "another request"),
        (ASK, other({masks.WORDS: np.ones(size, "<i8")}), "cancel"),
    ]
    for number, (kind, change, reason) in enumerate(wrong, start=1):
        junk.clear()
        junk[kind] = change
        void = engine.exchange_sum(requests_of(engine, number), None, None)
        assert void.clients == 0 and not void.total
        assert reason in void.failures["client 1"], (kind, void.failures)
        assert reason == "cancel" or list(void.failures) == ["client 1"]
    junk.clear()
    assert engine.exchange_sum(requests_of(engine, 99), None, None).clients == 3


# A server that wants more --------------------------------------------------------------------------------------------


class Server:
    """Sends sites what it likes; its questions go to the same apps as a grid's."""

    def __init__(self, base: Path, **keywords: Any) -> None:
        self.folder, self._grid = base, grid_of(base, **keywords)
        model, clients = declared()
        layout = model.enrol(clients)[NAMES[0]].layout
        algorithm = fedppl.Sums()
        state = algorithm.init(layout, NAMES, np.random.default_rng(1))
        self.message, self.shapes = algorithm.broadcast(state, NAMES[0]), algorithm.replies.shapes(state)

    def send(self, kind: str, name: str, parcel: Parcel) -> Parcel:
        """What a site answers, in a process that knows nothing of earlier messages."""
        one = self._grid.nodes[10 + NAMES.index(name)]
        message = FlowerMessage(content=to_content(*parcel), dst_node_id=1, message_type=kind, ttl=60.0)
        message.metadata.__dict__["_message_id"] = "1"
        return parcel_of(unread(one.app(message, one.context)))

    def greeting(self, name: str, run: str = "run") -> secure.Greeting:
        return masks.unpack_greeting(self.send(GREET, name, ({}, masks.ask(name, run)))[1], name)

    def greetings(self, run: str = "run") -> list[secure.Greeting]:
        return [self.greeting(name, run) for name in NAMES]

    def join(self, name: str, cohort: list[secure.Greeting], run: str = "run") -> secure.Part | str:
        """The part of the counts with which a site joins a cohort, or the rule by which it does not."""
        _, texts = self.send(JOIN, name, ({}, masks.ask(name, run) | masks.pack_cohort(cohort)))
        if "refused" not in texts:
            return masks.unpack_part(texts, name)
        assert texts == {"client_id": name, "refused": REFUSED}
        (rule,) = refused_by(self.folder, name)[-1:]
        return rule

    def joined(self, run: str = "run") -> list[secure.Part]:
        """All sites' parts of the counts."""
        cohort = self.greetings(run)
        parts = [self.join(name, cohort, run) for name in NAMES]
        assert all(isinstance(part, secure.Part) for part in parts)
        return parts  # type: ignore[return-value]

    def ask(
        self,
        name: str,
        counts: list[secure.Part] | None,
        *,
        round: int = 1,
        run: str = "run",
        message: Message | None = None,
        seed: tuple[int, ...] | None = None,
        **more: Any,
    ) -> np.ndarray | str:
        """The words that a site answers with, or why it does not."""
        seed = (1, round, client_seed(name)) if seed is None else seed
        request = Request(name, 7, round, seed, self.message if message is None else message, run)._replace(**more)
        arrays, texts = wire.pack_request(request)
        if counts is not None:
            texts |= masks.pack_parts(counts)
        reply = wire.unpack_reply(*self.send(ASK, name, (arrays, texts)))
        if isinstance(reply, Failure):
            assert reply.reason == REFUSED
            (rule,) = refused_by(self.folder, name)[-1:]
            return rule
        assert isinstance(reply, Reply) and set(reply.message) == {masks.WORDS} and not reply.info and not reply.reason
        return np.asarray(reply.message[masks.WORDS]).view(np.uint64)

    def moved(self) -> dict[str, Any]:
        """The same question about other points."""
        return {**self.message, "points": self.message["points"] + 0.1}


@pytest.fixture
def server(tmp_path: Path) -> Server:
    identities(tmp_path)
    return Server(tmp_path)


def test_words_of_an_honest_round_add_up(server: Server) -> None:
    counts = server.joined()
    parts = {name: np.asarray(server.ask(name, counts)) for name in NAMES}
    total = secure.summed(parts, server.shapes)
    assert total.clients == 3 and not total.failures
    fewer = secure.summed({name: parts[name] for name in NAMES[:2]}, server.shapes)
    assert fewer.clients == 0 and all("cancel" in reason for reason in fewer.failures.values())


def test_the_server_learns_the_cohort_s_counts_and_no_site_s(server: Server) -> None:
    """Rows of three sites, each with as many outcomes as the model has; and bits of a part are as random as coins."""
    _, clients = declared()
    parts = server.joined()
    words = [np.frombuffer(part.words, dtype="<u8") for part in parts]
    total, cut, missing = secure.decoded(secure.added(words), {"counts": (2,)})
    assert list(total["counts"]) == [sum(len(data["y"]) for data in clients.values()), 0] and cut == missing == 0
    assert abs(np.concatenate([bits(part) for part in words]).mean() - 0.5) < 0.2
    assert all(np.all(np.abs(secure.decoded(part, {"counts": (2,)})[0]["counts"]) > 2**20) for part in words)
    assert [server.join(name, server.greetings()) for name in NAMES] == parts  # the same, however often


def stranger(server: Server, run: str = "run") -> secure.Greeting:
    return secure.greeting(secure.derived_key(secure.Identity.generate(), "stranger", run))


ATTACKS: dict[str, Callable[[Server, list[secure.Greeting]], Any]] = {
    "key in between": lambda server, cohort: server.join(
        "client 0", [*cohort[:2], stranger(server)._replace(name="client 2")]
    ),
    "key of another run": lambda server, cohort: server.join(
        "client 0", [*cohort[:2], server.greeting("client 2", "another")]
    ),
    "stranger": lambda server, cohort: server.join("client 0", [*cohort, stranger(server)]),
    "cohort of two": lambda server, cohort: server.join("client 0", cohort[:2]),
    "one site thrice": lambda server, cohort: server.join("client 0", [cohort[0], *cohort[1:2] * 2]),
    "without itself": lambda server, cohort: server.join("client 0", [*cohort[1:], stranger(server)]),
    "cohort that cannot be read": lambda server, cohort: server.join("client 0", [cohort[0]._replace(public=b"")]),
    "before it joined": lambda server, cohort: server.ask("client 0", None),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_server_that_wants_a_single_answer_is_refused(server: Server, attack: str) -> None:
    assert ATTACKS[attack](server, server.greetings()) == "sums"
    counts = server.joined()  # nothing was fixed by it
    for name in NAMES:
        assert isinstance(server.ask(name, counts), np.ndarray)


def of_other_words(parts: list[secure.Part]) -> list[secure.Part]:
    """The counts with a thousand rows more, and the signature of the part as it was."""
    words = np.frombuffer(parts[2].words, dtype="<u8").astype(np.uint64)
    words[0] += np.uint64(1000 * 2**20)
    return [*parts[:2], parts[2]._replace(words=words.tobytes())]


COUNTS: dict[str, Callable[[Server, list[secure.Part]], Any]] = {
    "none": lambda server, parts: server.ask("client 0", None),
    "other words": lambda server, parts: server.ask("client 0", of_other_words(parts)),
    "a part twice": lambda server, parts: server.ask("client 0", [*parts[:2], parts[1]]),
    "fewer parts": lambda server, parts: server.ask("client 0", parts[:2]),
    "of another run": lambda server, parts: server.ask("client 0", [*parts[:2], server.joined("another")[2]]),
    "silent": lambda server, parts: server.ask("client 0", parts, report=False),
    "a seed of its own": lambda server, parts: server.ask("client 0", parts, seed=(1, 1, 2)),
}


@pytest.mark.parametrize("attack", COUNTS)
def test_counts_are_those_that_the_members_have_signed(server: Server, attack: str) -> None:
    parts = server.joined()
    assert COUNTS[attack](server, parts) == "sums"
    assert isinstance(server.ask("client 0", parts), np.ndarray)
    assert isinstance(server.ask("client 0", None, round=2), np.ndarray)  # it has them now


def test_a_run_has_one_cohort_and_different_sets_are_counted_over_runs(tmp_path: Path) -> None:
    names = (*NAMES, "client 3", "client 4")
    identities(tmp_path, names)
    server = Server(tmp_path)

    def with_others(run: str, *others: str) -> list[secure.Greeting]:
        files = {name: site.read(tmp_path / name) for name in others}
        keys = [secure.derived_key(files[name].identity, name, run, "elsewhere") for name in others]
        return [*server.greetings(run), *map(secure.greeting, keys)]

    assert isinstance(server.join("client 0", server.greetings()), secure.Part)
    assert server.join("client 0", with_others("run", "client 3")) == "cohort"
    assert isinstance(server.join("client 0", with_others("second", "client 3"), "second"), secure.Part)
    assert server.join("client 0", with_others("third", "client 4"), "third") == "cohorts"
    assert isinstance(server.join("client 0", server.greetings("fourth"), "fourth"), secure.Part)  # a set of before


def test_rows_are_counted_over_the_cohort(tmp_path: Path) -> None:
    identities(tmp_path)
    _, clients = declared()
    rows = sum(len(data["y"]) for data in clients.values())
    enough = Server(tmp_path, policy=lambda config: dataclasses.replace(OPEN, rows=rows))
    assert isinstance(enough.ask("client 0", enough.joined()), np.ndarray)
    lacking = Server(tmp_path, policy=lambda config: dataclasses.replace(OPEN, rows=rows + 1))
    assert lacking.ask("client 0", lacking.joined("another"), run="another") == "rows"
    larger = Server(tmp_path, policy=lambda config: dataclasses.replace(OPEN, fewest_sites=4))
    assert larger.join("client 0", larger.greetings("third"), "third") == "fewest_sites"


def test_a_round_is_answered_once_and_repeated_alike(server: Server) -> None:
    counts = server.joined()
    first = server.ask("client 0", counts)
    assert isinstance(first, np.ndarray)
    assert_array_equal(server.ask("client 0", counts), first)
    assert server.ask("client 0", counts, message=server.moved()) == "round"
    assert server.ask("client 0", counts, round=1, seed=(2, 1, client_seed("client 0"))) == "round"
    later = server.ask("client 0", counts, round=2)
    assert isinstance(later, np.ndarray) and np.mean(later == first) < 0.1


def test_who_is_asked_something_else_has_other_masks(server: Server) -> None:
    """Otherwise the difference of two rounds in which one site alone is asked elsewhere would be that site's."""
    counts = server.joined()
    for number, (more, reason) in enumerate(
        [
            ({"message": server.moved()}, "cancel"),
            ({"seed": (2, 1, client_seed("client 0"))}, "cancel"),
            ({"message": {name: np.asarray(value, "<f4") for name, value in server.message.items()}}, "cancel"),
            ({}, ""),
        ],
        start=1,
    ):
        seeds = {name: (1, 1, client_seed(name)) for name in NAMES}
        asked = {name: {"seed": seeds[name], **(more if name == "client 0" else {})} for name in NAMES}
        parts = {name: np.asarray(server.ask(name, counts, round=number, **asked[name])) for name in NAMES}
        total = secure.summed(parts, server.shapes)
        assert bool(total.clients) is not bool(reason)
        assert all(reason in failure for failure in total.failures.values())


@pytest.mark.parametrize("part", [1e-9, 0.5])
def test_a_server_that_asks_a_part_of_the_sites_has_the_sum_of_all(server: Server, part: float) -> None:
    """A part is chosen by checksums of names: all others would add zeros, and the sum would be one site's."""
    counts = server.joined()
    sums = []
    for number, some in enumerate((1.0, part), start=1):
        message = {**server.message, "some": np.array(some)}
        words = {name: np.asarray(server.ask(name, counts, round=number, message=message)) for name in NAMES}
        sums.append(secure.summed(words, server.shapes).total)
    assert sums[1]["answered"] == 3
    assert_allclose(sums[1]["values"], sums[0]["values"], rtol=1e-12)


def test_a_number_that_does_not_fit_hides_the_sum_of_the_others(tmp_path: Path) -> None:
    """It is 0 beside a count, and the server reads the words whether or not they count."""
    sums = fedppl.Sums()

    def failing(client: Any, *arguments: Any) -> Any:
        update = sums.update_client(client, *arguments)
        if client.client_id != NAMES[0]:
            return update
        return update._replace(reply={**update.reply, "values": np.full_like(update.reply["values"], np.nan)})

    identities(tmp_path)
    server = Server(tmp_path, algorithm=sums._replace(update_client=failing))
    counts = server.joined()
    words = [np.asarray(server.ask(name, counts)) for name in NAMES]
    total, cut, missing = secure.decoded(secure.added(words), server.shapes)
    assert cut == 0 and missing == total["values"].size > 0
    assert all(np.all(np.abs(numbers) > 2**10) for numbers in total.values())  # of noise one in 2^33 is less


def test_an_answer_whose_place_another_run_has_taken_is_not_computed_again(tmp_path: Path) -> None:
    """With noise of its own, under the same masks: the difference would be that of two answers of one site."""
    identities(tmp_path)
    algorithm = of_shared_noise(noise_multiplier=1.0)
    server = Server(tmp_path, algorithm=algorithm)
    model, clients = declared()
    state = algorithm.init(model.enrol(clients)[NAMES[0]].layout, NAMES, np.random.default_rng(1))
    message = algorithm.broadcast(state, NAMES[0])
    counts = {run: server.joined(run) for run in ("first", "second")}
    asked = functools.partial(server.ask, NAMES[0], message=message, seed=(1, client_seed(NAMES[0])))
    words = asked(counts["first"], run="first")
    assert_array_equal(asked(counts["first"], run="first"), words)
    other = asked(counts["second"], run="second")
    assert isinstance(other, np.ndarray) and np.mean(other == words) < 0.1
    assert asked(counts["first"], run="first") == "round"
    assert_array_equal(asked(counts["second"], run="second"), other)


def test_a_site_that_was_killed_before_it_answered_gives_the_same_words(server: Server) -> None:
    counts = server.joined()
    made: list[Any] = []
    with stored.killed_while_keeping(".personal", made=made, how=SystemExit), pytest.raises(SystemExit):
        server.ask("client 0", counts)
    (_, _, arrays, *_) = signed.unpack(made[0][1], "it", "run-client 0.personal")
    words = server.ask("client 0", counts)
    assert isinstance(words, np.ndarray)
    assert_array_equal(words, np.asarray(arrays[masks.WORDS]).view(np.uint64))
    assert_array_equal(server.ask("client 0", counts), words)
    parts = {"client 0": words} | {name: np.asarray(server.ask(name, counts)) for name in NAMES[1:]}
    assert secure.summed(parts, server.shapes).clients == 3


@pytest.mark.parametrize("keywords", [{"folder": lambda config: None}, {"secure": lambda config: None}])
def test_a_function_that_gives_no_folder_does_not_have_a_site_answer_in_the_clear(
    tmp_path: Path, keywords: dict[str, Any]
) -> None:
    identities(tmp_path)
    server = Server(tmp_path, **keywords)
    for number, texts in enumerate([{}, {"counts": "[]"}], start=1):
        request = Request("client 0", 7, number, (1, number, client_seed("client 0")), server.message, "run")
        arrays, asked = wire.pack_request(request)
        told = server.send(ASK, "client 0", (arrays, {**asked, **texts}))
        assert not told[0] and told[1]["failure"] == REFUSED


def test_an_id_that_a_node_is_given_later_is_of_the_same_account(tmp_path: Path) -> None:
    """By the identity's name: otherwise all limits were granted anew, and a round was answered twice."""
    identities(tmp_path)
    _, clients = declared()
    files = {"folder": lambda config: tmp_path / "at client 0", "secure": lambda config: tmp_path / "client 0"}
    app = app_of(tmp_path, load_data=lambda config: clients["client 0"], **files)
    for config in ({}, {"client-id": "client 0"}):
        one = node(app, 10, **config)
        question = FlowerMessage(content=to_content({}, {}), dst_node_id=1, message_type=HELLO, ttl=60.0)
        question.metadata.__dict__["_message_id"] = "1"
        assert parcel_of(unread(one.app(question, one.context)))[1]["client_id"] == "client 0"
    with store.reading(tmp_path / "at client 0") as here:
        assert list(here.account[0].clients) == ["client 0"]


def test_a_run_by_the_name_of_an_agreement_or_of_a_declaration_admits_none(server: Server) -> None:
    for kind in ("declaration", "agreement"):
        counts = server.joined(f"{kind} 0123")
        assert isinstance(server.ask("client 0", counts, run=f"{kind} 0123"), np.ndarray)
        with store.reading(server.folder / "at client 0") as here:
            assert all(store.known(here, "client 0", kind, name) is None for name in ("0123", f"{kind} 0123"))


def test_a_site_tells_nothing_of_its_columns(server: Server) -> None:
    arrays, texts = server.send(AGREE, "client 0", ({}, {}))
    assert not arrays and texts["refused"] == REFUSED and set(texts) == {"client_id", "version", "refused"}
    assert refused_by(server.folder, "client 0") == ["sums"]


def test_why_a_site_cannot_compute_stays_there(tmp_path: Path) -> None:
    def failing(*arguments: Any) -> Any:
        raise fedppl.types.LocalFailure("patient 7 is missing")

    identities(tmp_path)
    server = Server(tmp_path, algorithm=fedppl.Sums()._replace(update_client=failing))
    counts = server.joined()
    arrays, texts = wire.pack_request(Request("client 0", 7, 1, (1, 1, client_seed("client 0")), server.message, "run"))
    told = server.send(ASK, "client 0", (arrays, {**texts, **masks.pack_parts(counts)}))
    assert "patient" not in json.dumps(told[1]) and told[1]["failure"] == REFUSED and not told[0]
    lines = list(audit.lines(tmp_path / "at client 0"))
    assert [line["failed"] for line in lines if line.get("failed")] == ["patient 7 is missing"]


def test_accounts_that_do_not_know_of_each_other_have_other_keys(tmp_path: Path) -> None:
    """Two apps of one identity would answer one round twice, under the same masks."""
    identities(tmp_path)
    first = Server(tmp_path)
    second = Server(tmp_path, folder=lambda config: tmp_path / f"elsewhere {config['client-id']}")
    assert first.greeting("client 0") == first.greeting("client 0")
    assert first.greeting("client 0") != second.greeting("client 0")


def test_an_account_that_is_begun_anew_has_other_keys(server: Server) -> None:
    """Else whoever drops a row, and has the server replay a round, shows what that row adds."""
    before = server.greeting("client 0")
    for path in (server.folder / "at client 0").glob("site.sqlite*"):
        path.unlink()
    assert server.greeting("client 0") != before


# Files ----------------------------------------------------------------------------------------------------------------


def test_identities_are_made_once_and_rosters_grow_by_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "north"
    assert site.main(["identity", str(folder)]) == 0
    line = capsys.readouterr().out.strip()
    assert line.startswith("north ")
    if os.name == "posix":
        assert stat.S_IMODE((folder / "identity").stat().st_mode) == 0o600
    before = (folder / "identity").read_bytes()
    assert site.main(["identity", str(folder)]) == 1 and "made once" in capsys.readouterr().err
    assert (folder / "identity").read_bytes() == before
    assert site.main(["identity", str(tmp_path / "b"), "--name", "the south"]) == 0
    other = capsys.readouterr().out.strip()
    assert site.main(["identity", str(folder / "identity" / "c")]) == 1 and "may write" in capsys.readouterr().err
    (folder / "roster").write_text("# by telephone, 3 May\n\n" + other, encoding="utf-8")  # without an end of line
    third = site.make(tmp_path / "west", "ü")
    assert site.main(["roster", str(folder), third]) == 0
    here = site.read(folder)
    assert here.name == "north" and set(here.roster) == {"north", "the south", "ü"}
    assert here.identity.public_key().public_bytes_raw() == here.roster["north"]
    assert (folder / "roster").read_text(encoding="utf-8").startswith("# by telephone")
    assert here.roster["ü"] == site.read(tmp_path / "west").identity.public_key().public_bytes_raw()


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("north", "copy the whole line"),
        ("north short", "copy the whole line"),
        ("north ÄÄ==", "copy the whole line"),
        ("{key}", "copy the whole line|client-id"),
        ("# {key}", "client-id"),
        ("south {key}", "duplicate"),
        ("another {south}", "duplicate"),
        ("a\tb {key}", "client-id"),
    ],
)
def test_lines_that_are_none_are_refused(tmp_path: Path, line: str, remedy: str) -> None:
    site.make(tmp_path / "north", "north")
    south = site.make(tmp_path / "south", "south")
    key = site.make(tmp_path / "key", "key").split()[1]
    site.add(tmp_path / "north", south)
    before = (tmp_path / "north" / "roster").read_bytes()
    wrong = line.format(key=key, south=south.split()[1])
    with pytest.raises(DeclarationError, match=remedy):
        site.add(tmp_path / "north", wrong)
    assert (tmp_path / "north" / "roster").read_bytes() == before
    if not wrong.startswith("#"):  # by hand
        (tmp_path / "north" / "roster").write_bytes(before + wrong.encode() + b"\n")
        with pytest.raises(DeclarationError, match=remedy):
            site.read(tmp_path / "north")


def test_an_identity_that_others_may_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="make one"):
        site.read(tmp_path)
    site.make(tmp_path / "north", "north")
    own = site.make(tmp_path / "other", "north")
    site.add(tmp_path / "north", own)
    with pytest.raises(DeclarationError, match="duplicate"):  # another's key under this site's name
        site.read(tmp_path / "north")
    if os.name == "posix":
        (tmp_path / "north" / "identity").chmod(0o640)
        with pytest.raises(DeclarationError, match="chmod 600"):
            site.read(tmp_path / "north")


def test_the_default_algorithm_of_secure_sums_is_the_one_by_sums(tmp_path: Path) -> None:
    identities(tmp_path)
    model, clients = declared()
    engine = engine_of(grid_of(tmp_path), model, 3, deadline=60.0, wait=60.0, secure=True)
    at_sites = fedppl.fit(model, None, engine=engine, progressbar=False, random_seed=1)
    here = fedppl.fit(model, clients, engine=fedppl.InProcess(secure=True), progressbar=False, random_seed=1)
    assert at_sites.algorithm.name == here.algorithm.name == "Sums"
    assert at_sites.status is here.status is fedppl.Status.CONVERGED


@pytest.mark.parametrize("on_dropout", ["stop", "new cohort"])
def test_a_site_that_is_gone_ends_the_run_or_the_others_begin_anew(on_dropout: str, tmp_path: Path) -> None:
    """The fit of the others is theirs alone, and their policies count a second set of sites."""
    model, clients = normal_means(4)
    names = tuple(clients)
    identities(tmp_path, names)
    app = fedppl.Flower.client_app(
        model,
        fedppl.Sums(),
        lambda config: clients[config["client-id"]],
        folder=lambda config: tmp_path / f"at {config['client-id']}",
        policy=OPEN,
        secure=lambda config: tmp_path / str(config["client-id"]),
        draws=50,
        chains=2,
    )
    asked = itertools.count()

    def fault(message: FlowerMessage, node_id: int) -> Any:
        return 5 if node_id == 13 and message.metadata.message_type == ASK and next(asked) else None

    grid = FakeGrid({10 + i: node(app, 10 + i, **{"client-id": name}) for i, name in enumerate(names)}, fault)
    seen: list[Any] = []
    server = fedppl.Flower.server_app(
        model,
        fedppl.Sums(),
        clients=list(names),
        example_data={"y": np.ones(2)},
        secure=True,
        on_dropout=on_dropout,
        on_fit=lambda result, context: seen.append(result),
    )
    context = node(app, 0).context
    context.run_config = {"random_seed": 1, "wait": 1.0, "deadline": 60.0}
    if on_dropout == "stop":
        with pytest.raises(DeclarationError, match=f"{names[3]}.*checkpoint"):
            server(grid, context)
        assert not seen
        return
    server(grid, context)
    (found,) = seen
    others = {name: clients[name] for name in names[:3]}
    here = fedppl.fit(model, others, fedppl.Sums(starts=1), progressbar=False, random_seed=1)
    assert found.status is fedppl.Status.CONVERGED and found.client_ids == names[:3]
    sd = gaussian.standard_deviations(here.posterior)
    assert_allclose(gaussian.mean(found.posterior) / sd, gaussian.mean(here.posterior) / sd, rtol=0, atol=0.05)
    sets = [line["members"] for line in audit.lines(tmp_path / f"at {names[0]}") if line["event"] == "cohort"]
    assert sets == [list(names), list(names[:3])]
