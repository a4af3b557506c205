"""What a run says while it runs: the bar, a notebook's line, the log; and Ctrl-C in all its places."""

from __future__ import annotations

import _thread
import io
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import rich.console

import fedppl
from fedppl.contracts import Failure
from fedppl.engine.inprocess import InProcessEngine
from fedppl.results.records import Record
from fedppl.run import progress
from fedppl.testing import normal_means
from fedppl.types import Status
from tests.engine import test_inprocess as engines
from tests.support import problems

QUIET: Any = {"progressbar": False, "random_seed": 1}


def records(changes: list[float], seconds: float = 2.0, **fields: Any) -> list[Record]:
    made = []
    for k, change in enumerate(changes):
        info = {"phase": "EP", "change_mean": change, "change_sd": 0.5 * change, **fields.get("info", {})}
        others = {name: value for name, value in fields.items() if name != "info"}
        made.append(Record(k + 1, ("a", "b"), {}, {}, info, {}, {}, "", seconds, Status.RUNNING)._replace(**others))
    return made


# --- a round ---------------------------------------------------------------------------------------------------


def test_a_round_is_told_with_its_phase_its_change_and_who_fell_back() -> None:
    (record,) = records([0.034], failures={"b": "late"})
    told = progress.standing(record, {"a": {"fallback": 2.0}}, 0.01)
    assert told == "EP, change 0.034 sd (tolerance 0.01), 1 skipped, 1 on NUTS"
    assert progress.standing(record._replace(info={"change": math.nan, "objective": 2.0}, failures={}), {}, None) == ""


# --- where it is shown ----------------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    shown = io.StringIO()
    console = rich.console.Console(file=shown, force_terminal=True, width=200)
    monkeypatch.setattr("rich.get_console", lambda: console)
    return shown


def test_the_bar_tells_clients_and_changes(terminal: io.StringIO) -> None:
    with progress.Progress(20, show=True) as bar:
        bar.asked(1, 3)
        bar.heard("site [red]")
        bar._bar.refresh()
        assert "1 of 3 clients (last site [red])" in terminal.getvalue()
        bar.update(4, "change 0.1")
        bar.asked(5, 3)
        bar._bar.refresh()
    assert "change 0.1; 0 of 3 clients" in terminal.getvalue()
    assert "4/20" in terminal.getvalue()


def test_a_fit_shows_it(terminal: io.StringIO) -> None:
    fedppl.fit(*normal_means(2), fedppl.EP(), random_seed=1)
    assert "Round" in terminal.getvalue() and "converged" in terminal.getvalue()


@problems.few_rounds
def test_without_a_terminal_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    fedppl.fit(*normal_means(2), fedppl.EP(), rounds=2, random_seed=1)
    assert capsys.readouterr() == ("", "")


def test_a_notebook_has_a_bar_by_richs_widget(monkeypatch: pytest.MonkeyPatch) -> None:
    console = rich.console.Console(file=io.StringIO(), force_jupyter=True)
    monkeypatch.setattr("rich.get_console", lambda: console)
    monkeypatch.setattr("rich.live.Live.refresh", lambda self: None)  # it writes into a widget of ipywidgets
    with progress.Progress(3, show=True) as bar:
        bar.update(3, "converged")
    assert bar._bar.live.console is console and bar._bar.tasks[0].completed == 3


def test_a_dumb_terminal_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    console = rich.console.Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert console.is_dumb_terminal
    monkeypatch.setattr("rich.get_console", lambda: console)
    with progress.Progress(3, show=True) as bar:
        assert bar._bar is None


# --- the log --------------------------------------------------------------------------------------------------


def test_clients_are_counted_as_their_answers_come() -> None:
    heard: list[str] = []
    first = threading.Event()
    run = engines.engine(2, a=lambda _: first.wait(20), b=None)
    answers = run.exchange(engines.requests("a", "b"), None, lambda name: (heard.append(name), first.set()))
    assert heard == ["b", "a"] and set(answers) == {"a", "b"}
    late = engines.engine(1, a=None, b=lambda _: time.sleep(0.5))
    heard.clear()
    assert isinstance(late.exchange(engines.requests("a", "b"), 0.2, heard.append)["b"], Failure)
    assert heard == ["a"]
    late.close()


def test_the_log_has_a_line_every_so_often(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.15)
    with caplog.at_level(logging.INFO, logger="fedppl"), progress.Progress(3) as run:
        run.asked(2, 3)
        time.sleep(0.4)  # nobody answers
        assert "round 2: 0 of 3 clients have answered, 0." in caplog.text
        for name in "abc":
            run.heard(name)
        assert len(caplog.records) < 6
        time.sleep(0.4)
        assert "3 of 3 clients have answered, last c" in caplog.text
        run.update(2, "")
        caplog.clear()
        time.sleep(0.4)
        assert not caplog.records  # between rounds there is nothing to say
    time.sleep(0.2)
    assert "fedppl progress" not in [one.name for one in threading.enumerate()]


@problems.few_rounds
def test_each_round_is_a_line_with_phase_and_change(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fedppl"):
        fedppl.fit(*problems.noise(), fedppl.EP(damping=0.5, tolerance=1e-6), **QUIET, rounds=4)
    lines = [one.getMessage() for one in caplog.records if one.name == "fedppl.run.one_round"]
    assert "6 of 6 replies in " in lines[1] and "warm start, change" in lines[1]
    assert any("EP, change" in one and "(tolerance 1e-06)" in one for one in lines)
    assert "checking and compiling" in caplog.text and "6 clients are ready" in caplog.text


# --- Ctrl-C ---------------------------------------------------------------------------------------------------


def interrupting(when: Any) -> Any:
    """NestedLaplace at whose clients somebody presses Ctrl-C, and which then takes its time."""
    inner = fedppl.local.NestedLaplace()

    def tilted(target: Any, rng: Any) -> Any:
        if when(target):
            _thread.interrupt_main()
            time.sleep(1.0)
        return inner.tilted(target, rng)

    return inner._replace(tilted=tilted)


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """A process that a script put in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_while_clients_compute_gives_the_rounds_so_far(workers: int) -> None:
    model, clients = normal_means(3)
    rounds: list[int] = []
    pressed: list[str] = []

    def when(target: Any) -> bool:
        now = len(rounds) >= 1 and target.client.client_id == "client 1" and not pressed
        pressed.extend(["Ctrl-C"] * now)
        return now

    with pytest.warns(fedppl.ConvergenceWarning, match="Ctrl-C"):
        fit = fedppl.fit(
            model,
            clients,
            fedppl.EP(local=interrupting(when), damping=0.2, tolerance=1e-9),
            callback=lambda step: rounds.append(step.number),
            engine=fedppl.InProcess(workers=workers),
            **QUIET,
        )
    assert fit.status is Status.INTERRUPTED and len(fit.records) == len(rounds) >= 1 and pressed
    assert fit.posterior.linear.shape == (1,)


def test_what_clients_kept_is_that_of_the_last_whole_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those who had answered in the round that was broken off, too."""
    model, clients = normal_means(2)
    algorithm = fedppl.averaging.Ditto(learning_rate=0.05, lam=0.1, steps=2)
    whole = fedppl.fit(model, clients, algorithm, rounds=2, **QUIET)
    exchange = InProcessEngine.exchange

    def interrupted(self: Any, requests: Any, *arguments: Any) -> Any:
        found = exchange(self, requests, *arguments)
        if next(iter(requests.values())).round == 3:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(InProcessEngine, "exchange", interrupted)
    fit = fedppl.fit(model, clients, algorithm, rounds=9, **QUIET)
    assert fit.status is Status.INTERRUPTED and len(fit.records) == 2
    for name in clients:
        for ours, theirs in zip(fit.personal[name], whole.personal[name], strict=True):
            assert repr(ours) == repr(theirs)


def test_ctrl_c_before_the_first_round_and_a_second_one_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(InProcessEngine, "close", lambda self: closed.append(True))

    def pressed(*arguments: Any, **keywords: Any) -> Any:
        raise KeyboardInterrupt

    model, clients = normal_means(2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fedppl.FederatedModel, "enrol", pressed)  # while it compiles
        fedppl.fit(model, clients, fedppl.EP(), **QUIET)
    assert not closed
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("fedppl.run.loop._ending", pressed)  # the second, while the first is dealt with
        fedppl.fit(model, clients, fedppl.EP(), callback=pressed, **QUIET)
    assert closed
