"""Faults between server and clients: each alone, all together for a thousand rounds, and a server that is killed."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import fedppl
from fedppl import gaussian
from fedppl.algorithms.ep import _rounds
from fedppl.algorithms.ep._rounds import Outcome
from fedppl.results import diagnostics
from fedppl.storage import checkpoint
from tests.support import problems
from tests.support.fake_client import UNIT, layout_of
from tests.support.faults import Faulty, Rates, ledger_gap, soak
from tests.support.markers import slow_but
from tests.support.states import assert_same_state

LOCAL = fedppl.local.NestedLaplace(points=64)
STALE = r"reply to request \d+, but the latest is \d+"
REASONS = {
    "request_lost": "^no reply$",
    "reply_lost": "^no reply$",
    "late": "^no reply$",
    "stale": STALE,
    "altered": ".",
    "raises": "^ZeroDivisionError: a client's own arithmetic$",
    "wiped": "^no reply$",
}


def algorithm(tolerance: float = 1e-300) -> fedppl.Algorithm:
    return fedppl.EP(local=LOCAL, tolerance=tolerance)


def small() -> Any:
    return problems.noise(4, rows=40)


@pytest.fixture(scope="module")
def calm() -> fedppl.Fit:
    """The posterior without faults."""
    fit = problems.fit_some_rounds(*small(), algorithm(1e-6), rounds=60, progressbar=False, random_seed=1)
    assert diagnostics.matched(fit.status, fit.message)
    return fit


def assert_near(q: gaussian.Gaussian, fit: fedppl.Fit) -> None:
    sd = gaussian.standard_deviations(fit.posterior)
    assert np.all(np.abs(gaussian.mean(q) - gaussian.mean(fit.posterior)) < 0.02 * sd)
    np.testing.assert_allclose(gaussian.standard_deviations(q), sd, rtol=0.02)


# --- one at a time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", slow_but(Rates._fields, "altered"))
def test_one_fault_alone_is_recorded_and_does_no_harm(fault: str, calm: fedppl.Fit) -> None:
    model, clients = small()
    engine = Faulty(Rates(**{fault: 0.3}), seed=8)
    phases = set()
    for step in itertools.islice(fedppl.rounds(model, clients, algorithm(), engine=engine, random_seed=1), 40):
        assert ledger_gap(step.state) < 1e-10
        now = {client_id: kind for number, client_id, kind in engine.injected if number == step.number}
        # what was doubled counted once; its copy comes a round later, and is stale
        expected = {client_id: kind for client_id, kind in now.items() if kind != "duplicated"}
        assert step.failures.keys() == expected.keys()
        for client_id, kind in expected.items():
            assert re.search(REASONS[kind], step.failures[client_id]), (kind, step.failures[client_id])
        if now:
            phases.add(step.info.phase)
    assert step.number == 40
    assert phases == {"warm start", "EP"}
    assert engine.counts[fault] > 15
    assert (engine.counts["stale"] > 10) == (fault in ("late", "duplicated"))
    assert_near(step.state.sites.q, calm)


def test_faults_are_repeatable() -> None:
    model, clients = small()
    rates = Rates(0.2, 0.2, 0.1, 0.1, 0.2, 0.1, 0.1)
    runs = []
    for seed in (8, 8, 9):
        engine = Faulty(rates, seed)
        *_, last = itertools.islice(fedppl.rounds(model, clients, algorithm(), engine=engine, random_seed=1), 8)
        runs.append((last, engine.injected))
    assert_same_state(runs[0][0].state, runs[1][0].state)
    assert runs[0][1] == runs[1][1] != runs[2][1]


def counting(base: fedppl.Algorithm) -> fedppl.Algorithm:
    """EP whose clients keep a personal count of the requests they answered, and report it."""

    def update_client(client: Any, personal: Any, message: Any, rng: Any) -> Any:
        update = base.update_client(client, None, message, rng)
        count = (personal or 0.0) + 1.0
        return update._replace(personal=count, info={**update.info, "answered": count})

    return base._replace(update_client=update_client)


def test_a_client_that_lost_its_personal_state_begins_anew_and_harms_no_one(calm: fedppl.Fit) -> None:
    model, clients = small()
    engine = Faulty(Rates(wiped=0.2), seed=8)
    expected = dict.fromkeys(clients, 0.0)
    lost = 0
    steps = fedppl.rounds(model, clients, counting(algorithm()), engine=engine, random_seed=1)
    for step in itertools.islice(steps, 30):
        wiped = {client_id for number, client_id, _ in engine.injected if number == step.number}
        for client_id in clients:
            lost += client_id in wiped and expected[client_id] > 0
            expected[client_id] = 0.0 if client_id in wiped else expected[client_id] + 1
        assert {k: info["answered"] for k, info in step.record.infos.items()} == {
            k: count for k, count in expected.items() if k not in wiped
        }
        assert ledger_gap(step.state) < 1e-10
    assert lost > 10
    assert_near(step.state.sites.q, calm)


# --- all together ---------------------------------------------------------------------------------------------


def check_soak(problem: Any, rounds: int) -> None:
    found = soak(problem, LOCAL, rounds)
    rounds_of_20 = rounds * len(problem[1]) / 20
    assert found.rounds == rounds
    assert found.ledger_gap < 1e-10
    assert found.mean_gap < 0.02 and found.sd_gap < 0.02
    # 0.3 of requests lost, of the rest 0.03 wiped, 0.3 of replies lost, and some stale or altered
    assert 0.35 < found.used / found.exchanges < 0.5
    for fault, least in (("request_lost", 5.0), ("reply_lost", 3.0), ("duplicated", 0.2), ("altered", 0.2)):
        assert found.counts[fault] > least * rounds_of_20, fault
    assert found.counts["wiped"] > 0.2 * rounds_of_20 and found.counts["stale"] > 0.1 * rounds_of_20


@pytest.mark.parametrize("problem", [problems.regression, pytest.param(problems.noise, marks=pytest.mark.slow)])
def test_a_soak(problem: Callable[..., Any]) -> None:
    """As benchmarks/fault_soak.py has it for a thousand rounds of twenty clients, on a part of that."""
    check_soak(problem(8), 60)


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "rounds"), [(problems.noise, 200), (problems.regression, 1000)])
def test_a_long_soak(problem: Callable[..., Any], rounds: int) -> None:
    check_soak(problem(20), rounds)


def judged(moves: list[tuple[float, bool]], damping: float) -> float:
    """Damping after rounds with changes of these sizes, that turned back or not, for 20 clients without noise."""
    clients = tuple(f"client {k}" for k in range(20))
    state = fedppl.EP().init(layout_of(UNIT), clients, np.random.default_rng(0))
    taken: Any = Outcome(state._replace(steps=state.steps._replace(damping=damping)), None)  # type: ignore[arg-type]
    for size, turned in moves:
        info = _rounds.EPInfo("EP", size, 0.0, 1.0, np.nan, 0.0, 0.0)
        taken = _rounds.judge(taken._replace(info=info), list(range(20)), turned, 0.0, 1e-9, 1.0)
    return float(taken.state.steps.damping)


def test_damping_recovers_when_faults_end(rng: np.random.Generator) -> None:
    """Changes fall, but noisily, as where clients far off fall back on draws: no reason for short steps."""
    assert judged([(1.0 - 0.04 * t, False) for t in range(5)], 0.05) == 1.0
    assert judged([(float(size), False) for size in rng.uniform(0.6, 1.0, size=15)], 0.05) == 1.0


def test_oscillating_sites_are_damped() -> None:
    assert judged([(1.0 + 0.1 * t, True) for t in range(8)], 1.0) == 0.05
    assert judged([(3.0**t, False) for t in range(8)], 1.0) == 0.05
    # one good round among bad ones is no restart
    assert judged([(1.0, True), (1.1, True), (1.0, True), (1.2, True), (1.1, True), (1.3, True)], 1.0) < 0.5


def test_after_wrong_replies_and_ten_calm_rounds_q_is_back() -> None:
    """Means sds off, precisions off by factors, moments of some rounds ago: nothing refuses them."""
    found = soak(problems.regression(12), fedppl.local.Laplace(), 50, wrong=0.1, calm=10)
    assert found.counts["wrong"] > 10
    assert found.rounds == 60 and found.mean_gap < 0.02 and found.sd_gap < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [300, 1000])
def test_a_soak_with_wrong_replies_and_ten_calm_rounds(rounds: int) -> None:
    if rounds == 300:
        found = soak(problems.noise(20), LOCAL, rounds, wrong=0.03, calm=10)
    else:
        found = soak(problems.regression(20), fedppl.local.Laplace(), rounds, wrong=0.1, calm=10)
    assert found.counts["wrong"] > 0.1 * rounds
    assert found.mean_gap < 0.02 and found.sd_gap < 0.02


# --- the server is killed -------------------------------------------------------------------------------------

RUN = """
import os, sys
from pathlib import Path
from tests.promises.test_faults import through

path, killed, until, die = Path(sys.argv[1]), *map(int, sys.argv[2:])
through(until, killed, path)
if die:
    os._exit(9)
"""


def through(rounds: int, faulty: int, path: Path) -> None:
    """Rounds up to a number, of which the first `faulty` run under faults; from the checkpoint where there is one.

    Rounds of the warm start are among them.
    """
    engine = Faulty(Rates(0.2, 0.2, 0.1, 0.1, 0.2, 0.1, 0.1), seed=3)
    engine.active = not path.exists()
    for step in fedppl.rounds(*small(), algorithm(), engine=engine, checkpoint=path, random_seed=1):
        engine.active = step.number < faulty
        if step.number == rounds:
            break
    assert step.number == rounds


def in_a_fresh_process(path: Path, killed: int, until: int, *, die: bool) -> None:
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(path), str(killed), str(until), str(int(die))]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == (9 if die else 0), done.stderr


@pytest.mark.slow
def test_a_killed_server_goes_on_in_a_fresh_process(tmp_path: Path, rng: np.random.Generator) -> None:
    """Killed after some round, with faults until then; another process does the rest to the last bit.

    Each in a process of its own, after this one has filled the compilers' caches: code that was compiled just now and
    code that was loaded from a cache may differ in the last bit.
    """
    path, whole, rounds = tmp_path / "run.ckpt", tmp_path / "whole.ckpt", 12
    killed = int(rng.integers(2, rounds - 1))
    through(rounds, killed, tmp_path / "warm.ckpt")
    in_a_fresh_process(path, killed, killed, die=True)
    # what a kill while writing leaves behind is no checkpoint, and nobody takes it for one
    path.with_name(path.name + ".partial").write_bytes(path.read_bytes()[:100])
    in_a_fresh_process(path, killed, rounds, die=False)
    in_a_fresh_process(whole, killed, rounds, die=False)
    resumed, reference = checkpoint.load(path)[0], checkpoint.load(whole)[0]
    assert_same_state(resumed["state"], reference["state"])
    assert [record.number for record in resumed["records"]] == list(range(1, rounds + 1))
    assert any(record.failures for record in resumed["records"][:killed])
    assert not any(record.failures for record in resumed["records"][killed:])
    # compiled just now or loaded, it is the same to nine digits of its largest entries
    here = checkpoint.load(tmp_path / "warm.ckpt")[0]["state"].sites.q
    assert_allclose(here.precision, reference["state"].sites.q.precision, atol=1e-9 * here.precision.max())
    assert not list(tmp_path.glob("*.partial"))
