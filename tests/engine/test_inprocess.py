"""The embedded engine and what a client answers, with an algorithm of plain numbers: no model is compiled."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import numpy as np
import pytensor
import pytest

import fedppl
from fedppl import DeclarationError
from fedppl.contracts import (
    Algorithm,
    AnyAlgorithm,
    ClientUpdate,
    Draws,
    Failure,
    Replies,
    Reply,
    Report,
    Request,
    Result,
    Target,
)
from fedppl.engine.answer import answer
from fedppl.engine.inprocess import InProcessEngine
from fedppl.gaussian import Gaussian
from fedppl.model.interpreted import PYTHON_MODE
from fedppl.numerics.streams import stream
from fedppl.testing import normal_means
from fedppl.types import Layout, LocalFailure, Status
from tests.support import problems

LAYOUT = Layout((), Gaussian(np.zeros(1), np.eye(1)), True, "print")


class Client:
    """As much of a client's model as engines touch."""

    layout = LAYOUT

    def __init__(self, client_id: str, act: Any = None) -> None:
        self.client_id = client_id
        self.act = act


def count_up(client: Any, personal: Any, message: Any, rng: np.random.Generator) -> Any:
    """Personal state counts requests; the reply is a draw plus the message."""
    if client.act is not None:
        client.act(personal)
    return ClientUpdate((personal or 0) + 1, {"x": message["x"] + rng.normal()}, {"ess": 3})


class Counted(NamedTuple):
    """There is nothing to say of a round."""


ALGORITHM: AnyAlgorithm = Algorithm(
    name="count",
    settings={},
    init=lambda layout, clients, rng: None,
    broadcast=lambda state, client_id: {"x": np.zeros(1)},
    update_client=count_up,
    update_server=lambda state, received: (state, Report(Counted())),
    replies=Replies(shapes=lambda state: {"x": (1,)}),
    result=Result(
        final_message=lambda state, client_id: {},
        draw=lambda client, personal, message, draws, chains, rng: Draws(*np.zeros((2, chains, draws, 1)), {}),
    ),
)


def requests(*ids: str, nonce: int = 1) -> dict[str, Request]:
    return {i: Request(i, nonce, nonce, (1, nonce, ord(i[0])), {"x": np.ones(1)}) for i in ids}


def engine(workers: int, **clients: Any) -> InProcessEngine:
    return InProcessEngine(ALGORITHM, {name: Client(name, act) for name, act in clients.items()}, workers)


def test_an_answer_carries_the_request_and_the_model() -> None:
    (request,) = requests("a", nonce=7).values()
    personal, reply = answer(ALGORITHM, Client("a"), 4, request)
    assert personal == 5
    assert isinstance(reply, Reply)
    assert (reply.client_id, reply.nonce, reply.fingerprint, reply.info) == ("a", 7, "print", {"ess": 3.0})
    assert reply.message["x"] == 1 + stream(request.seed).normal()


@pytest.mark.parametrize(
    ("error", "reason", "private"),
    [
        (LocalFailure("no mode"), "no mode", ""),
        # an exception's text may quote data: it is kept apart from what may travel
        (np.linalg.LinAlgError("singular"), "LinAlgError", "singular"),
        (ZeroDivisionError("zero"), "ZeroDivisionError", "zero"),
        (ValueError("shape"), "ValueError", "shape"),
    ],
)
def test_numerical_trouble_becomes_a_failure_and_personal_state_stays(
    error: Exception, reason: str, private: str
) -> None:
    def act(personal: Any) -> None:
        raise error

    (request,) = requests("a").values()
    personal, reply = answer(ALGORITHM, Client("a", act), 4, request)
    assert personal == 4
    assert reply == Failure("a", 1, reason, private)


def test_a_programming_error_at_one_client_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def act(personal: Any) -> None:
        raise KeyError("typo")

    for workers in (1, 2):
        caplog.clear()
        answers = engine(workers, a=act, b=lambda personal: None).exchange(requests("a", "b"), None)
        assert answers["a"] == Failure("a", 1, "KeyError", "'typo'")
        assert isinstance(answers["b"], Reply)
        (line,) = caplog.records
        assert line.levelname == "ERROR" and "Traceback" in caplog.text and "typo" in caplog.text


def test_streams_of_different_requests_differ_and_repeat() -> None:
    draws = [stream(seed).normal() for seed in [(1, 2, 3), (1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3)]]
    assert draws[0] == draws[1]
    assert len(set(draws)) == 4


@pytest.mark.parametrize("workers", [1, 3])
def test_every_request_is_answered_and_personal_state_grows(workers: int) -> None:
    run = engine(workers, a=None, b=None, c=None)
    assert run.clients() == ("a", "b", "c") and run.layout() is LAYOUT
    first = run.exchange(requests("a", "b", "c"), None)
    run.exchange(requests("b", nonce=2), None)
    assert set(first) == {"a", "b", "c"} and all(isinstance(r, Reply) for r in first.values())
    assert run.personal() == {"a": 1, "b": 2, "c": 1}


def test_workers_run_side_by_side() -> None:
    """Both clients wait for each other: with one thread this would time out."""
    barrier = threading.Barrier(2, timeout=20)
    replies = engine(2, a=lambda _: barrier.wait(), b=lambda _: barrier.wait()).exchange(requests("a", "b"), None)
    assert all(isinstance(reply, Reply) for reply in replies.values())


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_late_is_a_failure_and_the_round_ends_at_the_deadline(workers: int) -> None:
    release = threading.Event()
    ended: list[bool] = []
    run = engine(workers, a=None, b=lambda _: ended.append(release.wait(60)))
    try:
        replies = run.exchange(requests("a", "b"), 0.3)
        assert not ended
    finally:
        release.set()
    assert isinstance(replies["a"], Reply)
    assert replies["b"] == Failure("b", 1, "no reply within the deadline of 0.3 s")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_that_is_late_is_not_asked_again_before_it_is_done(workers: int) -> None:
    release, asked = threading.Event(), []
    run = engine(workers, a=None, b=lambda personal: (asked.append(personal), release.wait(20)))
    try:
        for nonce in range(1, 6):
            replies = run.exchange(requests("a", "b", nonce=nonce), 0.2 if nonce == 1 else 20.0)
            assert isinstance(replies["a"], Reply)
            assert isinstance(replies["b"], Failure)
        assert "still busy" in replies["b"].reason
        assert asked == [None]
    finally:
        release.set()
    while run._late["b"].running():
        time.sleep(0.01)
    assert isinstance(run.exchange(requests("a", "b", nonce=6), 20.0)["b"], Reply)
    assert asked == [None, 1]  # what came too late was done all the same
    run.close()


def test_the_threads_are_those_of_the_round_before() -> None:
    used: list[set[str]] = []
    run = engine(2, a=lambda _: used[-1].add(threading.current_thread().name))
    for nonce in range(1, 5):
        used.append(set())
        run.exchange(requests("a", nonce=nonce), None)
    assert len(set.union(*used)) <= 2
    before = threading.active_count()
    run.close()
    time.sleep(0.2)
    assert threading.active_count() < before


def test_a_deadline_that_is_met_changes_nothing() -> None:
    with_deadline, without = (engine(1, a=None, b=None).exchange(requests("a", "b"), d) for d in (60.0, None))
    assert with_deadline["a"].message == without["a"].message
    assert with_deadline["b"].info == without["b"].info


@problems.few_rounds
def test_a_fit_goes_on_without_the_late_client() -> None:
    """Client 1 sleeps through the first round; what it sends then is not used, and the fit still converges."""
    release = threading.Event()
    inner = fedppl.local.NestedLaplace()
    slept: list[str] = []

    def expand(client: Any, point: Any, share: float) -> Any:
        if client.client_id == "client 1" and not slept:
            slept.append(client.client_id)
            release.wait(20)
        assert inner.expand is not None
        return inner.expand(client, point, share)

    model, clients = normal_means(3)
    fedppl.fit(model, clients, fedppl.EP(), progressbar=False, rounds=3)  # compiles, so that 1 s is long
    seen = []

    def watch(step: fedppl.Round) -> None:
        seen.append(step.failures)
        release.set()

    fit = fedppl.fit(
        model,
        clients,
        fedppl.EP(local=inner._replace(expand=expand)),
        deadline=1.0,
        callback=watch,
        progressbar=False,
        random_seed=1,
        engine=fedppl.InProcess(workers=3),
    )
    assert seen[0] == {"client 1": "no reply within the deadline of 1.0 s"}
    busy = {"client 1": "it is still busy with an earlier request"}  # for as long as it takes to wake up
    assert all(failures in ({}, busy) for failures in seen[1:]) and not seen[-1]
    assert fit.status is Status.CONVERGED


@pytest.mark.parametrize("workers", [0, -2])
def test_the_number_of_workers_is_positive(workers: int) -> None:
    with pytest.raises(DeclarationError, match=f"workers={workers} must be a whole number, at least 1"):
        fedppl.InProcess(workers=workers)


def test_the_target_of_a_request_is_not_kept() -> None:
    """Two rounds of the same request give the same reply: nothing of the first is remembered."""
    inner = fedppl.local.NestedLaplace()
    seen: list[Target] = []

    def tilted(target: Target, rng: np.random.Generator) -> Any:
        seen.append(target)
        return inner.tilted(target, rng)

    model, clients = normal_means(2)
    algorithm = fedppl.EP(local=inner._replace(tilted=tilted))
    fedppl.fit(model, clients, algorithm, progressbar=False, random_seed=1)
    again = [inner.tilted(target, np.random.default_rng(0)) for target in (seen[0], seen[0])]
    assert again[0].mean[0] == again[1].mean[0]


def test_pytensors_settings_are_as_they_were_whatever_threads_do() -> None:
    """One client's thread sets a mode after another's did, and sets it back after it: the other's would be left."""
    mine, theirs = pytensor.config.mode, PYTHON_MODE
    inner, order = fedppl.local.NestedLaplace(), [threading.Event() for _ in range(3)]
    expand = inner.expand
    assert expand is not None

    def slow(client: Any, *given: Any) -> Any:
        if client.client_id == "client 0" and not order[0].is_set():
            with pytensor.config.change_flags(mode=theirs):
                order[0].set()
                assert order[1].wait(60)
            order[2].set()
        elif client.client_id == "client 1" and not order[1].is_set():
            assert order[0].wait(60)
            with pytensor.config.change_flags(mode=theirs):
                order[1].set()
                assert order[2].wait(60)
            assert pytensor.config.mode is theirs  # what the other had set
        return expand(client, *given)

    model, clients = normal_means()
    way = fedppl.EP(local=inner._replace(expand=slow))
    fedppl.fit(model, clients, way, engine=fedppl.InProcess(workers=2), progressbar=False, random_seed=1)
    assert order[2].is_set()
    assert pytensor.config.mode is mine


def test_who_is_late_leaves_them_as_they_were_too() -> None:
    """Both clients set a mode within the deadline, and set it back when the exchange is over, in the other's order."""
    mine, release = pytensor.config.mode, [threading.Event() for _ in range(3)]

    def first(_: Any) -> None:
        with pytensor.config.change_flags(mode=PYTHON_MODE):
            release[0].set()
            release[1].wait(20)

    def second(_: Any) -> None:
        release[0].wait(20)
        with pytensor.config.change_flags(mode=PYTHON_MODE):
            release[2].wait(20)

    run = engine(2, a=first, b=second)
    replies = run.exchange(requests("a", "b"), 0.3)
    assert all(isinstance(reply, Failure) for reply in replies.values())
    late = [run._late[client_id] for client_id in "ab"]
    for event, future in zip(release[1:], late, strict=True):
        event.set()
        future.result(20)
    assert pytensor.config.mode is mine
