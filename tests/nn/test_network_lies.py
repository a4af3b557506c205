"""Replies of networks' clients that no training makes: each is refused by name, and costs its client alone a round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import fedppl
from fedppl.contracts import AnyAlgorithm, Engine, Failure, Reply
from fedppl.numerics.streams import stream
from tests import cases
from tests.cases import CASES

pytest.importorskip("torch")

NAMES = [name for name, case in CASES.items() if case.algorithm.startswith("nn.")]
COUNTS = ("rows", "count", "clients", "steps", "weight")


@pytest.mark.parametrize("name", cases.rows(NAMES))
def test_numbers_that_no_training_makes_are_refused_by_name(name: str) -> None:
    case = CASES[name]
    (model, clients), algorithm = case.problem(), case.build()
    enrolled = model.enrol(clients, kernel=False)
    client_id, client = next(iter(enrolled.items()))
    state = algorithm.init(client.layout, tuple(enrolled), stream((0,)))
    sent = algorithm.broadcast(state, client_id)
    reply = algorithm.update_client(client, None, sent, stream((1,))).reply
    assert algorithm.replies.reject(state, reply) is None
    for field, honest in reply.items():
        lies = [1e40, -1e40, 1.7e308] + ([0.0, 1e-300, -1.0] if field in COUNTS else [])
        for value in lies:
            lie = np.where(np.asarray(honest) != 0, value, 0.0)  # of clusters one is chosen
            reason = algorithm.replies.reject(state, {**reply, field: lie})
            assert reason is not None, (field, value)
            assert f"'{field}'" in reason


class _Spoilt:
    """An engine that spoils one client's reply in the second round."""

    def __init__(self, inner: Engine, spoil: Any) -> None:
        self._inner, self._spoil = inner, spoil

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def exchange(self, requests: Mapping[str, Any], deadline: Any, heard: Any = None) -> dict[str, Any]:
        answers = dict(self._inner.exchange(requests, deadline, heard))
        for client_id in ("device 0",):
            if requests[client_id].round == 2:
                answers[client_id] = self._spoil(requests[client_id], answers[client_id])
        return answers


def _fit(algorithm: AnyAlgorithm, problem: Any, spoil: Any) -> fedppl.Fit:
    model, clients = problem

    def engine(algorithm: AnyAlgorithm, clients: Mapping[str, Any]) -> Engine:
        return _Spoilt(fedppl.InProcess()(algorithm, clients), spoil)  # type: ignore[return-value]

    return fedppl.fit(model, clients, algorithm, rounds=3, engine=engine, random_seed=1, progressbar=False)


@pytest.mark.parametrize("name", cases.rows(["NetworkAveraging", "NetworkSCAFFOLD", "FedSI"]))
def test_a_client_that_lies_is_as_one_that_failed(name: str) -> None:
    def lie(request: Any, reply: Reply) -> Reply:
        return reply._replace(message={field: np.full_like(value, 1e40) for field, value in reply.message.items()})

    case = CASES[name]
    lied = _fit(case.build(), case.problem(), lie)
    failed = _fit(case.build(), case.problem(), lambda q, r: Failure(q.client_id, q.nonce, "battery empty"))
    assert set(lied.records[1].failures) == {"device 0"} and not lied.records[2].failures
    found = [(ours, theirs) for ours, theirs in zip(_flat(lied.state), _flat(failed.state), strict=True)]
    assert sum(np.ndim(ours) > 0 for ours, _ in found) > 0
    for ours, theirs in found:
        assert_array_equal(ours, theirs)


def _flat(state: Any) -> list[Any]:
    """All numbers of a state, one tuple inside another."""
    return [one for part in state for one in _flat(part)] if isinstance(state, tuple) else [state]
