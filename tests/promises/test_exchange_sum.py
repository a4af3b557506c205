"""Rounds of which the server reads sums alone: engines without single replies, and clients laid side by side."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import fedppl
from fedppl.contracts import AnyAlgorithm, Summed
from fedppl.engine.answer import take_sum
from fedppl.engine.inprocess import InProcessEngine
from fedppl.numerics.streams import stream
from fedppl.types import Status
from tests.cases import CASES, noise, rows
from tests.support import problems
from tests.support.side_by_side import with_stacks
from tests.support.states import assert_same_state


class OnlyTheSum:
    """An engine that adds replies where they are made, and has no single ones while `sums` is true."""

    def __init__(self, inner: InProcessEngine) -> None:
        self._inner, self.sums = inner, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def exchange(self, *arguments: Any) -> Mapping[str, Any]:
        if self.sums:
            raise RuntimeError("nobody sees single replies here")
        return self._inner.exchange(*arguments)

    def exchange_sum(self, requests: Any, accept: Any, *more: Any) -> Summed:
        found = take_sum(self._inner.exchange, requests, accept, *more)
        return Summed(found.total, found.clients, found.failures)


def states(name: str, start: Callable[[AnyAlgorithm, Mapping[str, Any]], Any]) -> list[Any]:
    """The server's states over the rounds of a row."""
    case, engines, found = CASES[name], list[Any](), []
    algorithm = case.build()

    def engine(algorithm: AnyAlgorithm, clients: Mapping[str, Any]) -> Any:
        engines.append(start(algorithm, clients))
        state = algorithm.init(engines[0].layout(), engines[0].clients(), stream((1, 0, 0)))
        engines[0].sums = algorithm.replies.summed(state)
        return engines[0]

    for step in fedppl.rounds(*case.problem(), algorithm, engine=engine, random_seed=1):
        found.append(step.state)
        engines[0].sums = algorithm.replies.summed(step.state)
        if step.number == case.rounds:
            break
    return found


@problems.few_rounds
@pytest.mark.parametrize("name", rows([name for name, case in CASES.items() if case.summed is None]))
def test_what_needs_sums_alone_in_some_rounds_runs_where_there_are_no_single_replies_then(name: str) -> None:
    """What needs them in all rounds runs under masks: tests/engine/test_secure.py."""
    expected = states(name, lambda algorithm, models: InProcessEngine(algorithm, models, 1))
    found = states(name, lambda algorithm, models: OnlyTheSum(InProcessEngine(algorithm, models, 1)))
    for one, other in zip(expected, found, strict=True):
        assert_same_state(one, other)


# --- clients side by side ----------------------------------------------------------------------------------------


SUMS = fedppl.Sums(points=512, pilot=64, starts=1)
ONE_BY_ONE = SUMS._replace(batch=None)


def fit(algorithm: AnyAlgorithm, **keywords: Any) -> fedppl.Fit:
    return fedppl.fit(*noise(), algorithm, **{"progressbar": False, "random_seed": 1, **keywords})


def test_clients_side_by_side_give_the_numbers_of_one_after_the_other(caplog: pytest.LogCaptureFixture) -> None:
    one_by_one = fit(ONE_BY_ONE)
    with caplog.at_level(logging.INFO):
        at_once = fit(SUMS)
    assert at_once.status is Status.CONVERGED
    assert_allclose(at_once.posterior.linear, one_by_one.posterior.linear, rtol=1e-9)
    assert_allclose(at_once.posterior.precision, one_by_one.posterior.precision, rtol=1e-9)
    assert len(at_once.records) == len(one_by_one.records)
    count = len(at_once.client_ids)
    for record, other in zip(at_once.records, one_by_one.records, strict=True):
        assert (record.together, record.asked, record.n_asked, record.used) == (count, (), count, count)
        assert (other.together, other.n_asked, other.used) == (0, count, count)
        assert record.released == other.released.partition("; diagnostics")[0]
    told = at_once.idata["rounds"]
    assert (told["outcome"] == "used").all() and (told["clients"] == count).all()
    assert f"{count} of {count} replies" in caplog.text


@problems.few_rounds
def test_a_client_without_a_reply_is_named_with_its_reason() -> None:
    found = fit(with_stacks(SUMS, fails="site 1"))
    assert found.status is Status.STALLED
    assert "site 1" in found.message and "out of paper" in found.message
    first = found.records[0]
    assert first.failures == {"site 1": "out of paper"}
    assert first.used == first.n_asked - 1
    told = (
        found.idata["rounds"]
        if found.status.ok
        else fedppl.results.records.rounds_dataset(found.records, found.client_ids)
    )
    assert set(told["outcome"].sel(client="site 1").values) == {"skipped"}
    assert set(told["reason"].sel(client="site 1").values) == {"out of paper"}
    assert set(told["outcome"].sel(client="site 0").values) == {"used"}


@pytest.mark.slow
def test_of_a_sum_that_fails_each_client_is_asked_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        found = fit(with_stacks(SUMS, broken=3))
    assert "asked alone" in caplog.text
    alone = [record for record in found.records if not record.together]
    assert len(alone) == 1 and alone[0].asked == found.client_ids
    assert_allclose(found.posterior.linear, fit(SUMS).posterior.linear, rtol=1e-9)
    assert (found.idata["rounds"]["outcome"] == "used").all()


@pytest.mark.parametrize(
    "keywords",
    [
        {"deadline": 60.0},
        {"participation": 2},
        {
            "engine": fedppl.InProcess(
                policy=fedppl.Policy(
                    sums="optional", rows=0, few_rows=0, parameters_per_row=math.inf, events=0, points=10**6
                )
            )
        },
    ],
)
@problems.few_rounds
def test_who_can_be_late_or_refuse_is_asked_alone(keywords: Any) -> None:
    steps = fedppl.rounds(*noise(), SUMS, rounds=1, random_seed=1, **keywords)
    assert not next(steps).record.together


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole = fit(SUMS)
    path = tmp_path / "run"
    with pytest.warns(fedppl.ConvergenceWarning):
        fit(SUMS, checkpoint=path, callback=lambda step: step.number == 3)
    resumed = fit(SUMS, checkpoint=path)
    assert_same_state(resumed.state, whole.state)
    assert [record.together for record in resumed.records] == [record.together for record in whole.records]


@problems.few_rounds
def test_ctrl_c_gives_the_rounds_that_are_done() -> None:
    algorithm = SUMS
    assert algorithm.batch is not None and algorithm.batch.summed is not None
    inner, calls = algorithm.batch.summed, [0]

    def summed(*arguments: Any) -> Summed:
        calls[0] += 1
        if calls[0] > 4:
            raise KeyboardInterrupt
        return inner(*arguments)

    found = fit(algorithm._replace(batch=algorithm.batch._replace(summed=summed)))
    assert found.status is Status.INTERRUPTED
    assert len(found.records) >= 1


@problems.few_rounds
def test_a_sum_that_is_not_finite_is_no_reply_of_anybody() -> None:
    algorithm = SUMS
    assert algorithm.batch is not None
    inner = algorithm.batch.summed

    def summed(*arguments: Any) -> Summed:
        assert inner is not None
        found = inner(*arguments)
        return found._replace(total={**found.total, "values": np.full_like(found.total["values"], np.inf)})

    step = next(
        fedppl.rounds(*noise(), algorithm._replace(batch=algorithm.batch._replace(summed=summed)), random_seed=1)
    )
    assert set(step.failures) == set(noise()[1])
    assert all("finite" in reason for reason in step.failures.values())
