"""Sums under masks where sites drop out and processes are killed: the same sums, and no site sends other words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

import fedppl
from fedppl.contracts import Request, Requests
from fedppl.engine import secure
from fedppl.numerics.streams import client_seed
from fedppl.sites import ASK, GREET, JOIN
from tests.flower.test_secure_sites import NAMES, declared, grid_of, identities
from tests.support.fake_grid import engine_of


def test_a_fifth_of_all_rounds_with_a_site_that_drops_out_changes_no_sum(tmp_path: Path) -> None:
    """A hundred rounds at points of their own: each sum is that of what the sites have computed, to the last bit."""
    rng, rounds = np.random.default_rng(3), 100
    identities(tmp_path)
    sums = fedppl.Sums()
    computed: dict[str, Any] = {}
    lost, asked = {number: int(rng.integers(3)) for number in range(1, rounds + 1) if rng.random() < 0.2}, [0]

    def heard(client: Any, *arguments: Any) -> Any:
        update = sums.update_client(client, *arguments)
        computed[client.client_id] = secure.encoded(update.reply, len(NAMES))
        return update

    def fault(message: Any, node_id: int) -> Any:
        kind = message.metadata.message_type
        is_lost = kind in (GREET, JOIN, ASK) and lost.get(asked[0]) == node_id - 10
        return 5 if is_lost and lost.pop(asked[0]) is not None else None

    grid = grid_of(tmp_path, fault, sums._replace(update_client=heard))
    engine = engine_of(grid, declared()[0], 3, deadline=60.0, wait=60.0, secure=True)(sums, {})
    state = sums.init(engine.layout(), engine.clients(), np.random.default_rng(1))
    drops = len(lost)
    assert drops > 10
    for number in range(1, rounds + 1):
        asked[0] = number
        first = sums.broadcast(state, NAMES[0])
        message = {**first, "points": rng.normal(0, 5, size=np.shape(first["points"]))}
        shapes = sums.replies.shapes(state)

        def make(name: str) -> Request:
            seed = (1, number, client_seed(name))  # noqa: B023
            return Request(name, number, number, seed, message, "run", shapes=shapes)  # noqa: B023

        summed = engine.exchange_sum(Requests(engine.clients(), make), None, None)
        assert summed.clients == 3 and not summed.failures
        expected, cut, missing = secure.decoded(secure.added(list(computed.values())), shapes)
        assert cut == missing == 0
        assert all(np.array_equal(summed.total[name], value) for name, value in expected.items())
    assert not lost
    assert [message.metadata.message_type for message in grid.sent].count(ASK) >= 3 * rounds + drops - 1


@pytest.mark.parametrize("kills", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_site_that_is_killed_again_and_again_sends_no_other_words(kills: int, tmp_path: Path) -> None:
    """SIGKILL at random moments of joins and answers: the words are the same each time, and the sums are right.

    The chain has no gap, and the account is what the chain says, after each of them.
    """
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.killed_site", str(tmp_path), str(kills)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120 + 3 * kills,
        check=False,
    )
    assert not told.returncode, told.stderr[-2000:]
    seen = json.loads(told.stdout.splitlines()[-1])
    assert seen["kills"] >= kills and seen["rounds"] >= 5
    assert seen["broken"] == seen["in_a_round"] == seen["other_words"] == seen["other_sums"] == 0
