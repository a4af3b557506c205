"""A hostile site on the fake grid: no message ends a run, and no site says alone what the model is. Needs Flower."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

pytest.importorskip("flwr")

from flwr.app import Message as FlowerMessage

import fedppl
from fedppl import DeclarationError, FederatedModel, gaussian
from fedppl.contracts import Failure, Reply
from fedppl.engine.policy import NO_RULES
from fedppl.flower import messages
from fedppl.run.one_round import MOST_INFOS, why_not
from fedppl.sites import ASK, CONCLUDE, HELLO
from fedppl.testing import normal_means
from fedppl.types import Status
from tests.support import malformed, problems
from tests.support.fake_grid import FakeGrid, Node, node
from tests.support.hostile import SETTINGS, content, engine, plain, site

# --- whatever is sent -----------------------------------------------------------------------------------------


def test_a_malformed_reply_costs_its_client_a_round_and_nobody_else_anything(rng: np.random.Generator) -> None:
    case = malformed.Case("honest", "", *malformed.reply())

    def hostile(message: FlowerMessage) -> malformed.Raw:
        if message.metadata.message_type == HELLO:
            return malformed.hello("bad", SETTINGS)
        return case.arrays, case.texts

    moving = engine({1: site(1, hostile), 2: site(2, plain("good"))}, ("bad", "good"))
    requests = {name: malformed.request(name) for name in ("bad", "good")}
    assert isinstance(moving.exchange(requests, 1.0)["bad"], Reply)
    cases = malformed.replies(rng)
    for _ in range(130):
        case = next(cases)
        answers = moving.exchange(requests, 5.0)
        assert isinstance(answers["good"], Reply)
        reason = why_not(answers["bad"], requests["bad"], malformed.layout(), malformed.SHAPES)
        assert reason is not None and malformed.named_in(reason, case), (case.name, reason)
        assert len(reason) < 700 and reason.isprintable()


def test_a_malformed_introduction_is_refused_by_name_field_and_rule(rng: np.random.Generator) -> None:
    cases = malformed.introductions(rng, client_id="bad", settings=SETTINGS)
    for _ in range(190):
        case = next(cases)
        nodes = {
            1: site(1, lambda message, case=case: (case.arrays, case.texts), "bad"),  # type: ignore[misc]
            2: site(2, plain("good")),
            3: site(3, plain("better")),
        }
        with pytest.raises(DeclarationError, match="only 2 of 3 sites") as error:
            engine(nodes, ("bad", "better", "good"), wait=0.005)
        told = str(error.value)
        assert "'bad' was refused: " in told, case.name
        reason = told.split("'bad' was refused: ")[1]
        assert malformed.named_in(reason, case) or "its shared variable" in reason or "it shares" in reason, told
        assert told.isprintable() and len(told) < 1_500


def test_a_site_of_another_version_is_told_so_though_it_writes_other_introductions() -> None:
    arrays, texts = malformed.hello("bad", SETTINGS)
    del arrays["prior_density"]
    nodes = {1: site(1, lambda message: (arrays, {**texts, "version": "0.0.1"})), 2: site(2, plain("good"))}
    with pytest.raises(DeclarationError, match=r"runs fedppl 0\.0\.1.*install one version everywhere"):
        engine(nodes, ("bad", "good"), wait=0.01)


def test_diagnostics_of_ever_new_names_are_refused() -> None:
    rounds = iter(range(100))

    def inventive(message: FlowerMessage) -> malformed.Raw:
        if message.metadata.message_type == HELLO:
            return malformed.hello("bad", SETTINGS)
        number = next(rounds)
        arrays, texts = malformed.reply("bad")
        return arrays, {**texts, "info": "{" + ", ".join(f'"d{number}_{i}": 1.0' for i in range(20)) + "}"}

    moving = engine({1: site(1, inventive)}, 1)
    answers = [moving.exchange({"bad": malformed.request()}, 1.0)["bad"] for _ in range(5)]
    assert [isinstance(answer, Reply) for answer in answers] == [True, True, True, False, False]
    assert (
        isinstance(answers[3], Failure)
        and f"names in 'info' over the run: 80, expected {MOST_INFOS}" in answers[3].reason
    )


class OddGrid(FakeGrid):
    """Hands over messages that answer nothing, or another's question, or come twice, or cannot be read."""

    def __init__(self, nodes: dict[int, Node]) -> None:
        super().__init__(nodes)
        self.broken: set[int] = set()  # nodes whose replies Flower fails to unpack
        self.error: Exception = RecursionError("too deep")
        self.waits_for: set[int] = set()  # nodes whose replies Flower waits for
        self.sent_at_last = threading.Event()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[FlowerMessage]:
        ids = list(message_ids)
        asks = {m: self.pending[m] for m in ids if m in self.pending and self.pending[m].metadata.message_type == ASK}
        found = list(super().pull_messages(ids))
        for message in found:
            if message.metadata.src_node_id in self.broken and message.metadata.message_type == ASK:
                raise self.error
        if any(
            message.metadata.src_node_id in self.waits_for and message.metadata.message_type == ASK for message in found
        ):
            self.sent_at_last.wait(20.0)
        odd = []
        for message in found:
            if message.metadata.message_type != ASK:
                continue
            for changed in ("", None, "unknown"):
                stray = FlowerMessage(content(malformed.reply()), reply_to=self.sent[0])
                stray.metadata.__dict__["_reply_to_message_id"] = changed
                odd.append(stray)
            odd.append(message)
        # Node 1 answers in everybody's name, before they do.
        forged = [FlowerMessage(content(malformed.reply("good", 7)), reply_to=ask) for ask in asks.values()]
        for message in forged:
            message.metadata.__dict__["_src_node_id"] = 1
            message.content.array_records["arrays"]["mean"].data = malformed.npy([9.0, 9.0, 9.0])
        return [*forged, *odd, *found]


def odd(**honest: Any) -> tuple[Any, OddGrid]:
    grid = OddGrid({1: site(1, plain("bad")), 2: site(2, plain("good")), 3: site(3, plain("third"))})
    moving = engine({}, ("bad", "good", "third"), grid=grid)
    return moving, grid


def test_messages_that_answer_nothing_or_for_another_count_for_nothing() -> None:
    moving, _ = odd()
    requests = {name: malformed.request(name) for name in ("bad", "good", "third")}
    for _ in range(2):
        answers = moving.exchange(requests, 1.0)
        for name in ("good", "third"):
            assert isinstance(answers[name], Reply) and answers[name].client_id == name
            assert_allclose(answers[name].message["mean"], np.arange(3.0))


@pytest.mark.parametrize(
    "error", [RecursionError("deep"), KeyError("Kind"), MemoryError(), UnicodeDecodeError("a", b"", 0, 1, "")]
)
def test_a_message_that_flower_cannot_unpack_costs_its_sender_alone(error: Exception) -> None:
    moving, grid = odd()
    requests = {name: malformed.request(name) for name in ("bad", "good", "third")}
    grid.broken, grid.error = {1}, error
    first, second = (moving.exchange(requests, 0.05) for _ in range(2))
    assert all(isinstance(answer, Failure) for answer in first.values())  # what came in one call is lost with it, once
    assert isinstance(second["good"], Reply) and isinstance(second["third"], Reply)
    assert f"its message cannot be read ({type(error).__name__})" in second["bad"].reason
    grid.error = ConnectionError("down")  # a connection that is gone is no site's fault
    with pytest.raises(ConnectionError):
        moving.exchange(requests, 0.05)


def test_a_message_that_is_announced_and_never_sent_costs_its_sender_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_PATIENCE", 0.1)
    moving, grid = odd()
    requests = {name: malformed.request(name) for name in ("bad", "good", "third")}
    grid.waits_for, sent = {1}, threading.Event()
    grid.sent_at_last = sent
    first, second, third = (moving.exchange(requests, 0.3) for _ in range(3))
    assert all(isinstance(answer, Failure) for answer in first.values())  # what came in one call is held up with it
    assert isinstance(second["good"], Reply) and isinstance(second["third"], Reply)
    assert isinstance(second["bad"], Failure) and isinstance(third["good"], Reply)
    assert "announced has not come" in third["bad"].reason  # one call that waits for each such site, not one a round
    sent.set()
    grid.waits_for = set()
    answers = (moving.exchange(requests, 0.3)["bad"] for _ in range(200))
    assert any(isinstance(answer, Reply) for answer in answers)


# --- who says what the model is -------------------------------------------------------------------------------

ABSURD = {"mean": 100.0, "sd": 0.01}


def test_a_wrong_site_is_named_and_locks_nobody_out() -> None:
    wrong = malformed.layout(**ABSURD)
    nodes = {1: site(1, plain("bad", layout=wrong)), 2: site(2, plain("good"))}
    with pytest.raises(DeclarationError, match=r"only 1 of 2 sites.*'bad' was refused: .*another than at") as error:
        engine(nodes, ("bad", "good"), wait=0.02)
    assert "has mean 100 and sd 0.01, there 0 and 10" in str(error.value)
    assert "'good' was refused" not in str(error.value)
    assert engine(nodes, 1).clients() == ("good",)


def test_a_refused_site_comes_back_corrected_without_being_restarted() -> None:
    said = [malformed.layout(**ABSURD)]

    def mended(message: FlowerMessage) -> malformed.Raw:
        return plain("a", layout=said[0])(message)

    threading.Timer(0.1, lambda: said.__setitem__(0, malformed.layout())).start()
    moving = engine({1: site(1, mended), 2: site(2, plain("b"))}, 2, wait=20.0)
    assert moving.clients() == ("a", "b") and moving.layout().fingerprint == malformed.layout().fingerprint


def test_columns_in_another_order_are_refused() -> None:
    turned = malformed.reader(("age", "dose"))
    nodes = {i: site(i, plain(name, **({"reader": turned} if i == 1 else {}))) for i, name in enumerate("abc", 1)}
    with pytest.raises(DeclarationError, match="'a' was refused: its dim 'predictor' has label 'age' in place 0"):
        engine(nodes, 3, wait=0.02)


def as_if(message_type: str, node_id: int, change: Callable[[FlowerMessage], FlowerMessage]) -> Callable[..., Any]:
    """A fault of `FakeGrid`: a node's answers of one type are changed."""

    def fault(message: FlowerMessage, to: int) -> Any:
        return change if message.metadata.message_type == message_type and to == node_id else None

    return fault


def absurd_prior(reply: FlowerMessage) -> FlowerMessage:
    """N(100, 0.01²) under the honest fingerprint."""
    arrays = reply.content.array_records["arrays"]
    arrays["prior_linear"].data = malformed.npy([1e6])
    arrays["prior_precision"].data = malformed.npy([1e4])
    return reply


def fit(grid: FakeGrid, model: FederatedModel, clients: Any, **keywords: Any) -> Any:
    settings = {"wait": 0.3, "deadline": 0.2, "poll": 0.001, "grace": 0.01}
    example = keywords.pop("example_data", {"y": np.array([1.0, 2.0])})
    made = fedppl.Flower.grid(grid, clients=clients, model=model, example_data=example, **settings)
    return fedppl.fit(model, None, fedppl.EP(), engine=made, **{"progressbar": False, "random_seed": 1, **keywords})


def nodes_of(model: FederatedModel, data: Any) -> dict[int, Node]:
    app = fedppl.Flower.client_app(model, fedppl.EP(), lambda config: data[config["client-id"]], policy=NO_RULES)
    return {10 + i: node(app, 10 + i, **{"client-id": name}) for i, name in enumerate(data)}


@pytest.mark.parametrize("first", [10, 12])
def test_anothers_prior_under_an_honest_fingerprint_changes_nothing(first: int) -> None:
    model, clients = normal_means(3)
    names = list(clients)
    honest = {name: data for name, data in clients.items() if name != names[first - 10]}
    grid = FakeGrid(nodes_of(model, clients), as_if(HELLO, first, absurd_prior))
    found = fit(grid, model, 2)
    alone = fit(FakeGrid(nodes_of(model, honest)), model, 2)
    assert found.client_ids == tuple(honest) and found.status is Status.CONVERGED
    assert_allclose(gaussian.mean(found.posterior), gaussian.mean(alone.posterior), rtol=1e-9)


# --- the end, and settings ------------------------------------------------------------------------------------


@problems.few_rounds
def test_a_malformed_conclusion_is_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    model, clients = normal_means(2)

    def change(reply: FlowerMessage) -> FlowerMessage:
        reply.content.config_records["texts"]["refused"] = ["a", "b"]
        return reply

    with caplog.at_level(logging.WARNING):
        found = fit(FakeGrid(nodes_of(model, clients), as_if(CONCLUDE, 10, change)), model, 2)
    assert found.status is Status.CONVERGED
    assert "'refused' is of type list" in caplog.text


def test_the_server_needs_its_declaration_and_made_up_data() -> None:
    model, _ = normal_means(2)
    for wrong in ({"model": model}, {"model": model, "example_data": np.ones(2)}, {"model": None, "example_data": {}}):
        with pytest.raises(DeclarationError, match="example_data=|model is NoneType"):
            fedppl.Flower.grid(FakeGrid({}), clients=1, **wrong)  # type: ignore[arg-type]
    with pytest.raises(fedppl.DataError, match="'example_data'"):
        fit(FakeGrid({}), model, 1, example_data={"z": np.ones(2)})
