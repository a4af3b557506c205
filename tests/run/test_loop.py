"""The round loop: streams, participation, what counts as a reply, what is recorded, how a run ends."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import fedppl
from fedppl import DeclarationError, FederatedModel, gaussian, structure
from fedppl.contracts import Algorithm, Failure, Received, Reply, Request, always
from fedppl.engine.inprocess import InProcessEngine
from fedppl.model.template import compilations
from fedppl.run import progress
from fedppl.testing import normal_means
from fedppl.types import Status
from tests import skeleton
from tests.support import problems
from tests.support.markers import slow_but

QUICK = fedppl.local.NUTS(draws=60, tune=60, chains=1, rhat_limit=2.0, nuts_sampler="pymc")


def fit(problem: Any, algorithm: Algorithm, **keywords: Any) -> fedppl.Fit:
    model, clients = problem
    return fedppl.fit(model, clients, algorithm, **{"progressbar": False, "random_seed": 1, **keywords})


def assert_same_q(a: fedppl.Fit, b: fedppl.Fit) -> None:
    assert_array_equal(a.state.sites.q.linear, b.state.sites.q.linear)
    assert_array_equal(a.state.sites.q.precision, b.state.sites.q.precision)


def ledger_gap(state: Any) -> float:
    """Largest entry of q − prior − Σ sites, summed here from the ledger."""
    sites = state.sites
    linear = sites.q.linear - sites.prior.linear - sum(sites.linear)
    precision = sites.q.precision - sites.prior.precision
    for row in sites.precision:
        one = structure.unpack_precision(row, sites.structure)
        precision = precision - (np.diag(one) if one.ndim == 1 else one)
    return float(max(np.abs(linear).max(), np.abs(precision).max()))


class Tampering(InProcessEngine):
    """An engine that answers honestly and then changes what comes back."""

    def __init__(self, change: Callable[[Request, Reply], Any]) -> None:
        self.change = change

    def __call__(self, algorithm: Algorithm, clients: Mapping[str, Any]) -> Tampering:
        super().__init__(algorithm, clients, 1)
        return self

    def exchange(self, requests: Mapping[str, Request], deadline: float | None, *heard: Any) -> dict[str, Any]:
        honest = super().exchange(requests, deadline, *heard)
        changed = {client_id: self.change(requests[client_id], reply) for client_id, reply in honest.items()}
        return {client_id: reply for client_id, reply in changed.items() if reply is not None}


@functools.cache
def plain() -> fedppl.Fit:
    return fit(problems.noise(), fedppl.EP())


@functools.cache
def precise() -> fedppl.Fit:
    """To a tolerance to compare with."""
    return fit(problems.noise(), fedppl.EP(tolerance=1e-3))


# --- equal seeds, equal numbers -------------------------------------------------------------------------------


@problems.few_rounds
def test_equal_seeds_give_equal_numbers_and_other_seeds_others() -> None:
    problem = normal_means(2)
    runs = [fit(problem, fedppl.EP(local=QUICK), rounds=2, random_seed=seed) for seed in (3, 3, 4)]
    assert_same_q(runs[0], runs[1])
    assert runs[0].state.sites.q.linear[0] != runs[2].state.sites.q.linear[0]


@problems.few_rounds
def test_one_worker_and_two_give_equal_numbers() -> None:
    problem = normal_means(3)
    one, two = (fit(problem, fedppl.EP(local=QUICK), rounds=2, engine=fedppl.InProcess(workers=n)) for n in (1, 2))
    assert_same_q(one, two)
    assert [r.bytes_up for r in one.records] == [r.bytes_up for r in two.records]


@problems.few_rounds
def test_a_clients_stream_depends_on_its_id_and_round_not_on_who_else_is_asked() -> None:
    """The same client in the same round draws the same numbers in a run with other company."""
    seeds: dict[bool, list[tuple[int, ...]]] = {}
    for alone in (True, False):
        seen = seeds[alone] = []

        def note(request: Request, reply: Reply, seen: Any = seen) -> Reply:
            if request.client_id == "client 1":
                seen.append(request.seed)
            return reply

        chosen = (lambda clients, rng: ("client 1",)) if alone else None
        fit(normal_means(3), fedppl.EP(), rounds=2, engine=Tampering(note), participation=chosen)
    assert seeds[True][:2] == seeds[False][:2]
    assert len(set(seeds[False])) == len(seeds[False])


@pytest.mark.slow
def test_the_order_of_clients_does_not_matter() -> None:
    model, clients = problems.noise()
    first, second = plain(), fit((model, dict(reversed(clients.items()))), fedppl.EP())
    assert_allclose(first.posterior.linear, second.posterior.linear, rtol=1e-8, atol=1e-7)
    assert_allclose(first.posterior.precision, second.posterior.precision, rtol=1e-8, atol=1e-7)


def test_a_generator_is_a_seed_too() -> None:
    problem = normal_means(2)
    runs = [fit(problem, fedppl.EP(), random_seed=np.random.default_rng(8)) for _ in range(2)]
    assert runs[0].seed == runs[1].seed
    assert fit(problem, fedppl.EP(), random_seed=None).seed != fit(problem, fedppl.EP(), random_seed=None).seed


# --- participation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("participation", slow_but([3, 0.5], 0.5))
def test_partial_participation_converges_to_the_same_posterior(participation: Any) -> None:
    full = precise()
    part = fit(problems.noise(), fedppl.EP(tolerance=1e-3), participation=participation, rounds=80)
    assert full.status is part.status is Status.CONVERGED
    sd = gaussian.standard_deviations(full.posterior)
    assert np.all(np.abs(gaussian.mean(part.posterior) - gaussian.mean(full.posterior)) < 0.02 * sd)
    assert_allclose(gaussian.standard_deviations(part.posterior), sd, rtol=0.02)
    asked = [len(record.asked) for record in part.records]
    assert set(asked) == {3} if participation == 3 else len(set(asked)) > 1
    assert all(set(record.infos) == set(record.asked) for record in part.records)


@pytest.mark.parametrize("chosen", [(), ("client 0", "nobody")])
def test_a_participation_function_must_choose_clients(chosen: tuple[str, ...]) -> None:
    with pytest.raises(DeclarationError, match=r"participation chose \[.*\] in round 1; choose from \['client 0'"):
        fit(normal_means(2), fedppl.EP(), participation=lambda clients, rng: chosen)


@problems.few_rounds
def test_clients_that_do_not_report_hear_the_broadcast_and_send_nothing() -> None:
    settings: dict[str, Any] = {"rounds": 3, "random_seed": 5}
    few = fit(normal_means(4), fedppl.EP(), reporting=lambda clients, rng: clients[:1], **settings)
    assert all(len(record.asked) == 4 and len(record.silent) == 3 for record in few.records)
    assert few.records[0].silent == few.records[0].asked[1:]
    assert all(set(record.bytes_up) == {record.asked[0]} for record in few.records)
    assert all(set(record.bytes_down) == set(record.asked) for record in few.records)
    assert set(few.idata["rounds"]["outcome"].values.ravel()) == {"used", "silent"}
    # EP has no part for them, so that asking them is the same as not asking them.
    alone = fit(normal_means(4), fedppl.EP(), participation=lambda clients, rng: clients[:1], **settings)
    assert_allclose(few.state.sites.q.linear, alone.state.sites.q.linear, rtol=1e-12)


@problems.few_rounds
def test_what_a_silent_client_keeps_is_kept() -> None:
    """With a part for silent clients, personal state moves on in every round, and the server sees one reply."""
    seen: list[int] = []

    def unreported(client: Any, personal: Any, message: Any, rng: np.random.Generator) -> tuple[Any, dict[str, float]]:
        return (personal or 0) + 1, {"stayed": 1.0}

    def count(state: Any, received: Received) -> Any:
        seen.append(received.clients)
        return fedppl.EP().update_server(state, received)

    algorithm = fedppl.EP()._replace(unreported=unreported, update_server=count)
    stop = {"callback": lambda step: step.number == 2, "reporting": lambda clients, rng: clients[1:2]}
    found = fit(normal_means(3), algorithm, **stop)
    assert seen == [1, 1]
    assert {k: v for k, v in found.personal.items() if isinstance(v, int)} == {"client 0": 2, "client 2": 2}
    assert found.records[0].infos["client 0"] == {"stayed": 1.0}


@pytest.mark.parametrize(("chosen", "match"), [((), r"reporting chose \[\]"), (("x",), "reporting chose")])
def test_a_reporting_function_must_choose_clients_that_are_asked(chosen: tuple[str, ...], match: str) -> None:
    with pytest.raises(DeclarationError, match=match):
        fit(normal_means(2), fedppl.EP(), reporting=lambda clients, rng: chosen)
    with pytest.raises(DeclarationError, match="reporting='some'"):
        fit(normal_means(2), fedppl.EP(), reporting="some")
    for wrong in (lambda clients, rng: None, lambda clients: clients):
        with pytest.raises(DeclarationError, match="reporting= is a function that cannot be used"):
            fit(normal_means(2), fedppl.EP(), reporting=wrong)
    for number in (0, 1.5, float("nan")):
        with pytest.raises(DeclarationError, match=f"reporting={number}"):
            fit(normal_means(2), fedppl.EP(), reporting=number)


# --- failures: old site kept, identity held -------------------------------------------------------------------


def test_a_client_that_fails_keeps_its_old_site_and_the_ledger_stays_exact(caplog: pytest.LogCaptureFixture) -> None:
    """Client "site 2" drops out after the warm start; q = prior + Σ sites after every round."""
    model, clients = problems.noise()
    broken: list[str] = []
    algorithm = fedppl.EP(local=problems.failing(lambda client_id: client_id in broken), tolerance=1e-4)
    kept = None
    with caplog.at_level(logging.WARNING, logger="fedppl"):
        for step in fedppl.rounds(model, clients, algorithm, rounds=12, random_seed=1):
            assert ledger_gap(step.state) < 1e-10
            row = step.state.sites.where["site 2"]
            if broken:
                assert step.failures == {"site 2": "out of order"}
                assert_array_equal(step.state.sites.linear[row], kept[0])
                assert_array_equal(step.state.sites.precision[row], kept[1])
            elif step.info.phase == "EP":
                kept = step.state.sites.linear[row].copy(), step.state.sites.precision[row].copy()
                broken.append("site 2")
    assert broken and np.any(kept[0])
    assert "client site 2 skipped: out of order" in caplog.text


def test_a_client_that_never_replies_is_named() -> None:
    algorithm = fedppl.EP(local=problems.failing(lambda client_id: client_id == "site 4"))
    with pytest.warns(fedppl.ConvergenceWarning, match=r"\['site 4'\] never sent"):
        result = fit(problems.noise(), algorithm, rounds=6)
    assert result.status is Status.STALLED
    assert ledger_gap(result.state) < 1e-10
    # everyone else's sites are as if it did not exist, but for its silence in the sum
    row = result.state.sites.where["site 4"]
    assert not np.any(result.state.sites.linear[row]) and not np.any(result.state.sites.precision[row])


def test_no_reply_at_all_is_a_stall_with_its_reasons() -> None:
    algorithm = fedppl.EP(local=problems.failing(lambda _: True, "raise points="))
    with pytest.warns(fedppl.ConvergenceWarning, match="stalled.*raise points="):
        result = fit(normal_means(2), algorithm, rounds=3)
    assert result.status is Status.STALLED and not result.status.ok
    assert "no client ever sent a usable reply" in result.message and "raise points=" in result.message
    assert_array_equal(result.state.sites.q.precision, result.layout.prior.precision)


@pytest.mark.slow
def test_one_failed_round_does_not_change_where_a_fit_ends() -> None:
    """Everyone fails in rounds 2 and 4; the fixed point is the same."""
    problem = problems.noise()
    count = len(problem[1])
    flaky = Tampering(lambda request, reply: None if request.round in (2, 4) else reply)
    with_failures = fit(problem, fedppl.EP(tolerance=1e-3), engine=flaky)
    without = fit(problem, fedppl.EP(tolerance=1e-3))
    assert [len(r.failures) for r in with_failures.records[:4]] == [0, count, 0, count]
    assert with_failures.status is Status.CONVERGED
    sd = gaussian.standard_deviations(without.posterior)
    assert np.all(np.abs(gaussian.mean(with_failures.posterior) - gaussian.mean(without.posterior)) < 0.01 * sd)


# --- replies that do not count --------------------------------------------------------------------------------


def with_message(reply: Reply, **arrays: Any) -> Reply:
    return reply._replace(message={**reply.message, **arrays})


TAMPERED: dict[str, tuple[Callable[[Request, Reply], Any], str]] = {
    "lost": (lambda q, r: None, "no reply"),
    "failure": (lambda q, r: Failure(q.client_id, q.nonce, "battery empty"), "battery empty"),
    "old nonce": (lambda q, r: r._replace(nonce=q.nonce - 1), r"reply to request \d+, but the latest is \d+"),
    "other client": (lambda q, r: r._replace(client_id="client 0"), "reply of client 'client 0'"),
    "fingerprint": (lambda q, r: r._replace(fingerprint="beef"), "fingerprint beef differs.*another model runs"),
    "shape": (lambda q, r: with_message(r, gradient=np.zeros(2)), r"'gradient' has shape \(2,\), expected \(1,\)"),
    "scalar": (lambda q, r: with_message(r, value=np.zeros(1)), r"'value' has shape \(1,\), expected \(\)"),
    "NaN": (lambda q, r: with_message(r, gradient=np.array([np.nan])), "'gradient' is not all finite"),
    "infinite": (lambda q, r: with_message(r, value=np.array(np.inf)), "'value' is not all finite"),
    "text": (lambda q, r: with_message(r, value=np.array("1")), "'value' is not all finite real"),
    "complex": (lambda q, r: with_message(r, value=np.array(1j)), "'value' is not all finite real"),
    "object": (lambda q, r: with_message(r, value=np.array(None)), "'value' is not all finite real"),
    "extra name": (lambda q, r: with_message(r, data=np.zeros(3)), r"reply holds \['data', 'gradient'"),
    "missing name": (lambda q, r: r._replace(message={"value": np.array(0.0)}), r"reply holds \['value'\], expected"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_a_reply_that_is_not_right_is_skipped_with_its_reason(case: str) -> None:
    change, reason = TAMPERED[case]

    def at_one_client(request: Request, reply: Reply) -> Any:
        return change(request, reply) if request.client_id == "client 1" else reply

    model, clients = normal_means(3)
    steps = fedppl.rounds(model, clients, fedppl.EP(), engine=Tampering(at_one_client), random_seed=1)
    step = next(steps)
    assert list(step.failures) == ["client 1"]
    assert re.search(reason, step.failures["client 1"])
    assert set(step.record.bytes_up) == {"client 0", "client 2"}
    # client 1 has no site; the others' are exact in this conjugate model
    r, Q = np.sum([problems.normal_means_site(clients[k]["y"]) for k in ("client 0", "client 2")], axis=0)
    assert_allclose(step.state.sites.q.linear, [r], rtol=1e-6)
    assert_allclose(step.state.sites.q.precision, [[Q + 0.01]], rtol=1e-6)


def test_unasked_replies_are_ignored() -> None:
    class Chatty(Tampering):
        def exchange(self, requests: Mapping[str, Request], deadline: float | None, *heard: Any) -> dict[str, Any]:
            everyone = {
                client_id: next(iter(requests.values()))._replace(client_id=client_id) for client_id in self.clients()
            }
            return super().exchange(everyone, deadline, *heard)

    model, clients = normal_means(3)
    step = next(
        fedppl.rounds(
            model, clients, fedppl.EP(), engine=Chatty(lambda q, r: r), participation=lambda c, r: ("client 0",)
        )
    )
    assert set(step.record.infos) == {"client 0"} and not step.failures
    assert not np.any(step.state.sites.precision[1:])


@pytest.mark.parametrize("form", ["full", "diagonal", [["mu"], ["a"]]])
@pytest.mark.parametrize("sign", [-1.0, 0.0])
def test_a_reply_whose_precision_is_not_positive_definite_is_skipped(sign: float, form: Any) -> None:
    """Finite and of the right shape, but no distribution: the client keeps its old site and the round goes on."""
    model, clients = problems.regression()

    def change(request: Request, reply: Reply) -> Any:
        if request.client_id == "clinic 1" and "precision" in reply.message:
            return with_message(reply, precision=sign * reply.message["precision"])
        return reply

    engine, algorithm = Tampering(change), fedppl.EP(structure=form, tolerance=1e-6)
    before = None
    for step in fedppl.rounds(model, clients, algorithm, engine=engine, rounds=6, random_seed=1):
        row = step.state.sites.where["clinic 1"]
        assert gaussian.is_proper(step.state.sites.q)
        assert ledger_gap(step.state) < 1e-10
        if step.info.phase == "EP":
            assert_array_equal(step.state.sites.precision[row], before)
        before = step.state.sites.precision[row].copy()


# --- what is recorded -----------------------------------------------------------------------------------------


@problems.few_rounds
def test_bytes_are_the_sizes_of_the_arrays() -> None:
    """m = 3 shared coordinates, 6 entries a triangle, 16 points along a step, 8 bytes each; one more for a scalar."""
    result = fit(problems.noise(), fedppl.EP(), participation=3)
    phases = {record.info["phase"] for record in result.records}
    assert phases == {"warm start", "EP"}
    for record in result.records:
        warm = record.info["phase"] == "warm start"
        down, up = (8 * (3 + 3 + 1), 8 * (1 + 3 + 6 + 16)) if warm else (8 * (2 * (3 + 6) + 2), 8 * (3 + 6 + 3 + 1))
        assert record.bytes_down == dict.fromkeys(record.asked, down)
        assert record.bytes_up == dict.fromkeys(record.asked, up)


def test_rounds_yields_what_fit_records() -> None:
    model, clients = problems.noise()
    result = plain()
    steps = list(fedppl.rounds(model, clients, fedppl.EP(), random_seed=1))
    assert [step.number for step in steps] == [record.number for record in result.records]
    assert steps[-1].status is result.status is Status.CONVERGED
    assert_array_equal(steps[-1].state.sites.q.linear, result.posterior.linear)
    assert [step.info.phase for step in steps] == [record.info["phase"] for record in result.records]


def test_the_callback_sees_every_round_and_can_stop() -> None:
    seen: list[int] = []

    def watch(step: fedppl.Round) -> bool:
        seen.append(step.number)
        return step.number == 2

    with pytest.warns(fedppl.ConvergenceWarning, match="stopped by the callback after"):
        result = fit(problems.noise(), fedppl.EP(), callback=watch)
    assert seen == [1, 2] and len(result.records) == 2
    assert result.status is Status.MAX_ROUNDS


@pytest.mark.parametrize("rounds_before", slow_but([0, 3], 0))
def test_an_interrupt_gives_what_there_is(rounds_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a round, which then counts for nothing."""
    whole = fit(problems.noise(), fedppl.EP())
    exchange, calls = InProcessEngine.exchange, 0

    def interrupted(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        found = exchange(self, *arguments)
        if calls > rounds_before:
            raise KeyboardInterrupt
        return found

    keywords: Any = {"checkpoint": tmp_path / "run.ckpt"}
    monkeypatch.setattr(InProcessEngine, "exchange", interrupted)
    if not rounds_before:
        with pytest.raises(KeyboardInterrupt):
            fit(problems.noise(), fedppl.EP(), **keywords)
        return
    with pytest.warns(fedppl.ConvergenceWarning, match="stopped by Ctrl-C after"):
        found = fit(problems.noise(), fedppl.EP(), **keywords)
    assert found.status is Status.INTERRUPTED and len(found.records) == 3
    monkeypatch.undo()
    rest = fit(problems.noise(), fedppl.EP(), **keywords)
    assert rest.status is whole.status and len(rest.records) == len(whole.records)
    assert_array_equal(rest.posterior.linear, whole.posterior.linear)


def test_a_callback_that_returns_nothing_does_not_stop() -> None:
    seen: list[int] = []
    result = fit(problems.noise(), fedppl.EP(), callback=lambda step: seen.append(step.number))
    assert result.status is Status.CONVERGED
    assert seen == [record.number for record in result.records]


def test_running_out_of_rounds_is_a_status_that_names_the_knob(caplog: pytest.LogCaptureFixture) -> None:
    """Said once: as a warning that points here."""
    model, clients = problems.noise()
    with caplog.at_level(logging.WARNING, logger="fedppl"), pytest.warns(fedppl.ConvergenceWarning) as warned:
        result = fedppl.fit(model, clients, fedppl.EP(), rounds=2, progressbar=False, random_seed=1)
    assert result.status is Status.MAX_ROUNDS and not result.status.ok
    assert "stopped after 2 of 2 rounds" in result.message and "raise rounds=" in result.message
    assert [(w.filename, result.message in str(w.message)) for w in warned] == [(__file__, True)]
    assert result.message not in caplog.text


def test_rounds_warn_of_nothing() -> None:
    model, clients = problems.noise()
    steps = list(fedppl.rounds(model, clients, fedppl.EP(), rounds=2, random_seed=1))
    assert steps[-1].status is Status.RUNNING


def test_a_given_number_of_gradient_rounds_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fedppl"):
        result = fit(normal_means(2), fedppl.averaging.FedAvg(learning_rate=1e-4), rounds=2)
    assert result.status is Status.MAX_ROUNDS
    assert result.message in caplog.text


# --- fallbacks ------------------------------------------------------------------------------------------------


def test_who_fell_back_is_said_in_the_log_the_bar_and_the_message(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(progress.Progress, "update", lambda self, completed, note: shown.append(note))
    local = problems.falling_back({"client 1": 2.0, "client 3": 2.0, "client 0": 1.0}, fallback_seconds=7.5)
    with caplog.at_level(logging.INFO, logger="fedppl"):
        result = fit(normal_means(4), fedppl.EP(local=local), progressbar=True)
    assert result.status is Status.CONVERGED
    assert "2 of 4 clients used NUTS" in result.message and "1 of 4 clients used a fitted t" in result.message
    assert "client 1" in result.message and "client 2" not in result.message and "22.5 s" in result.message
    assert any("2 on NUTS" in note for note in shown)
    lines = [r for r in caplog.records if getattr(r, "status", "") == "fallback"]
    rounds = [record.number for record in result.records if any("fallback" in i for i in record.infos.values())]
    assert [r.round for r in lines] == rounds  # type: ignore[attr-defined]
    assert [r.levelname for r in lines] == ["WARNING"] + ["INFO"] * (len(rounds) - 1)
    assert "NUTS at client 1, client 3, 15 s" in lines[0].getMessage()


@pytest.mark.slow
def test_a_client_that_falls_back_later_is_a_new_warning(caplog: pytest.LogCaptureFixture) -> None:
    steps = {"site 1": 2.0}
    algorithm = fedppl.EP(local=problems.falling_back(steps), warm_start=False, tolerance=1e-12)
    with caplog.at_level(logging.WARNING, logger="fedppl.results.diagnostics"):
        for step in fedppl.rounds(*problems.noise(), algorithm, rounds=4, random_seed=1):
            if step.number == 2:
                steps["site 0"] = 2.0
    assert [r.round for r in caplog.records] == [1, 3]  # type: ignore[attr-defined]


def test_a_client_that_fell_back_once_is_not_named_in_the_end() -> None:
    steps = {"site 1": 2.0}
    algorithm = fedppl.EP(local=problems.falling_back(steps), tolerance=1e-4)
    result = fit(problems.noise(), algorithm, callback=lambda step: steps.clear() if step.info.phase == "EP" else None)
    assert any(record.infos.get("site 1", {}).get("fallback") == 2.0 for record in result.records)
    assert result.status is Status.CONVERGED and "NUTS" not in result.message


# --- bad arguments --------------------------------------------------------------------------------------------


def never_compiled(y: Any) -> Any:
    with pm.Model() as model:
        data = pm.Data("y", y)
        pm.Normal("obs", pm.Normal("theta", pm.Normal("mu", 0, 10), 0.123), 1, observed=data)
    return model


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "no rounds": ({"rounds": 0}, "rounds=0 must be a whole number, at least 1"),
    "half a round": ({"rounds": 2.5}, "rounds=2.5 must be a whole number"),
    "participation 0": ({"participation": 0}, "participation=0 .* at least 1"),
    "participation 1.5": ({"participation": 1.5}, "participation=1.5 must be above 0 and at most 1; .*probability"),
    "participation text": ({"participation": "all"}, "participation='all' must be a number of clients"),
    "deadline": ({"deadline": 0.0}, "deadline=0.0 must be positive.*seconds"),
    "deadline NaN": ({"deadline": float("nan")}, "deadline=nan must be positive"),
    "seed": ({"random_seed": -1}, "random_seed=-1 must be a non-negative int"),
    "seed text": ({"random_seed": "1"}, "random_seed='1' must be"),
    "engine": ({"engine": "local"}, "engine='local' is no engine; pass one that is built, like fedppl.InProcess"),
    "engine of nothing": ({"engine": lambda: None}, "engine=<lambda> is no engine; pass one that is built"),
    "checkpoint": ({"checkpoint": "/no/such/folder/run.ckpt"}, "checkpoint='/no/such/folder/run.ckpt'.*does not exist"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
@pytest.mark.parametrize("call", [fedppl.fit, fedppl.rounds])
def test_bad_arguments_are_refused_before_anything_is_compiled(call: Any, case: str) -> None:
    keywords, message = BAD_ARGUMENTS[case]
    compiled = compilations()
    with pytest.raises(DeclarationError, match=message):
        call(FederatedModel(never_compiled, ["mu"]), {"a": {"y": [1.0, 2.0]}}, fedppl.EP(), **keywords)
    assert compilations() == compiled


def test_a_progress_bar_is_shown_or_not() -> None:
    with pytest.raises(DeclarationError, match="progressbar='yes'.*True or False"):
        fedppl.fit(FederatedModel(never_compiled, ["mu"]), {"a": {"y": [1.0]}}, fedppl.EP(), progressbar="yes")


@pytest.mark.parametrize(
    ("model", "algorithm", "message"),
    [
        (never_compiled, fedppl.EP(), "model is function; wrap the builder: FederatedModel"),
        (FederatedModel(never_compiled, ["mu"]), fedppl.EP, r"fedppl.EP is no algorithm.*call it: fedppl.EP\(\)"),
    ],
)
def test_a_bare_builder_and_an_unbuilt_algorithm_are_refused(model: Any, algorithm: Any, message: str) -> None:
    compiled = compilations()
    with pytest.raises(DeclarationError, match=message):
        fedppl.fit(model, {"a": {"y": [1.0, 2.0]}}, algorithm)
    assert compilations() == compiled


def test_a_callback_that_is_no_function_is_refused() -> None:
    with pytest.raises(DeclarationError, match="callback=3 is not a function"):
        fit(normal_means(1), fedppl.EP(), callback=3)


@problems.few_rounds
def test_the_checkpoint_may_be_a_string(tmp_path: Path) -> None:
    fit(normal_means(1), fedppl.EP(), checkpoint=str(tmp_path / "run.ckpt"), rounds=1)
    assert (tmp_path / "run.ckpt").is_file()


def test_a_round_that_nobody_answers_leaves_what_was_said(tmp_path: Path) -> None:
    """An algorithm has nothing to say of such a round; a resumed run still knows what was said before."""

    class Quiet(InProcessEngine):
        def exchange(self, requests: Any, deadline: float | None, *heard: Any) -> Any:
            first = next(iter(requests.values())).round == 1
            return super().exchange(requests, deadline, *heard) if first else {}

    model, clients = problems.regression()

    def messages(rounds: int) -> list[str]:
        steps = fedppl.rounds(
            model,
            clients,
            fedppl.averaging.FedAvg(learning_rate=0.05),
            rounds=rounds,
            engine=lambda algorithm, models: Quiet(algorithm, models, 1),
            checkpoint=tmp_path / "run",
            random_seed=1,
        )
        return [step.message for step in steps]

    first, second = messages(2)
    assert "learning_rate=" in first
    assert [second, *messages(3)] == [first, first]


# --- mistakes of who writes an algorithm ------------------------------------------------------------------------


def run_skeleton(**changes: Any) -> fedppl.Fit:
    model, clients = normal_means(3)
    algorithm = skeleton.Newton()._replace(**changes)
    return fedppl.fit(model, clients, algorithm, rounds=3, progressbar=False, random_seed=1)


@problems.few_rounds
def test_single_replies_cannot_be_read_where_sums_were_asked_for() -> None:
    """What read them found none, and took the prior for the posterior."""
    replies = skeleton.Newton().replies
    with pytest.raises(DeclarationError, match="read received.total"):
        run_skeleton(replies=replies._replace(summed=always))


@problems.few_rounds
def test_what_a_client_writes_into_its_message_stays_with_it() -> None:
    honest, algorithm = run_skeleton(), skeleton.Newton()

    def scribble(client: Any, personal: Any, message: Any, rng: Any) -> Any:
        update = algorithm.update_client(client, personal, message, rng)
        for array in message.values():
            array += 1e3
        return update

    scribbled = run_skeleton(update_client=scribble)
    assert_array_equal(scribbled.posterior.linear, honest.posterior.linear)


@problems.few_rounds
@pytest.mark.parametrize("wrong", [None, {"linear": 1}, "info", 3])
def test_one_clients_malformed_answer_is_its_own_failure(wrong: Any) -> None:
    algorithm = skeleton.Newton()

    def answer(client: Any, personal: Any, message: Any, rng: Any) -> Any:
        update = algorithm.update_client(client, personal, message, rng)
        if client.client_id != "client 1":
            return update
        return update._replace(info={"a": None}) if wrong == "info" else wrong

    found = run_skeleton(update_client=answer)
    assert set(found.records[0].failures) == {"client 1"}
    assert found.records[0].bytes_up.keys() == {"client 0", "client 2"}


class OtherInfo(NamedTuple):
    seconds: float


class WithNumPys(NamedTuple):
    largest: np.float64
    found: Any


def test_noise_that_is_none_is_refused_before_data_are_read() -> None:
    wrong = skeleton.Newton()._replace(disclosure=fedppl.contracts.Disclosure(noise_multiplier=-1.0))
    with pytest.raises(DeclarationError, match=r"noise_multiplier=-1\.0.*positive"):
        fedppl.fit(normal_means(1)[0], {}, wrong, progressbar=False)


@problems.few_rounds
@pytest.mark.parametrize("info", [{"a": 1}, OtherInfo(1.0)])
def test_diagnostics_that_no_table_of_rounds_can_have_are_refused(info: Any) -> None:
    algorithm = skeleton.Newton()

    def update_server(state: Any, received: Received) -> Any:
        state, report = algorithm.update_server(state, received)
        return state, report._replace(info=info)

    with pytest.raises((AttributeError, DeclarationError), match=r"_fields|seconds.*other names") as caught:
        run_skeleton(update_server=update_server)
    assert "update_server" in caught.value.__notes__[0]


@pytest.mark.parametrize("function", ["update_server", "broadcast"])
def test_a_servers_function_that_raises_is_named(function: str) -> None:
    def wrong(*arguments: Any) -> Any:
        raise KeyError("mean")

    with pytest.raises(KeyError) as caught:
        run_skeleton(**{function: wrong})
    (note,) = caught.value.__notes__
    assert function in note and skeleton.Newton().name in note and "round 1" in note


@problems.few_rounds
def test_numpys_numbers_are_in_the_table_of_rounds() -> None:
    algorithm = skeleton.Newton()

    def update_server(state: Any, received: Received) -> Any:
        state, report = algorithm.update_server(state, received)
        return state, report._replace(info=WithNumPys(np.float64(2.0), np.array(3)))

    rounds = run_skeleton(update_server=update_server).idata["rounds"]
    assert_array_equal(rounds["largest"], 2.0)
    assert_array_equal(rounds["found"], 3.0)


@problems.few_rounds
@pytest.mark.parametrize(
    "shared",
    [
        fedppl.contracts.Point(lambda state: np.zeros((2, 1))),
        fedppl.contracts.Sampler(lambda state, count, rng: np.zeros((2, count))),
    ],
)
def test_shapes_that_fit_by_size_alone_are_refused(shared: Any) -> None:
    fit = run_skeleton(result=skeleton.Newton().result._replace(shared=shared))
    with pytest.raises(DeclarationError, match="return shape"):
        _ = fit.idata


@problems.few_rounds
def test_draws_of_another_shape_are_refused() -> None:
    result = skeleton.Newton().result

    def turned(*given: Any) -> Any:
        draws = result.draw(*given)
        return draws._replace(local=np.swapaxes(draws.local, 0, 1))

    fit = run_skeleton(result=result._replace(draw=turned))
    with pytest.raises(DeclarationError, match="Result.draw returned shape"):
        fit.client("client 0", draws=20, chains=2)
