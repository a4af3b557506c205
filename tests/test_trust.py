"""EP(trust=c): what one client can do to q in one round, by closed forms, by brute force, and through the loop."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from numpy.testing import assert_allclose, assert_array_equal

import fedppl
from fedppl import gaussian
from fedppl.gaussian import Gaussian
from fedppl.steps import _trust
from fedppl.steps._sites import Sites, dense
from fedppl.testing import normal_means
from fedppl.types import Reply, Request
from tests import problems
from tests.faults import Tampering, ledger_gap, phase_of, with_message
from tests.test_runs import assert_same_state

CLIENT = "clinic 1"


def brute(q: Gaussian, linear: Any, precision: Any) -> Any:
    """Both sizes of leaving out each change, from means and generalised eigenvalues: (R, 2)."""
    whole = Gaussian(q.linear + linear.sum(axis=0), q.precision + precision.sum(axis=0))
    mean = np.linalg.solve(whole.precision, whole.linear)
    sizes = []
    for k in range(len(linear)):
        others = np.delete(np.arange(len(linear)), k)
        rest = Gaussian(q.linear + linear[others].sum(axis=0), q.precision + precision[others].sum(axis=0))
        moved = mean - np.linalg.solve(rest.precision, rest.linear)
        ratios = scipy.linalg.eigh(whole.precision, rest.precision, eigvals_only=True)
        assert np.all(ratios > 0)
        sizes.append((np.sqrt(moved @ whole.precision @ moved), np.abs(np.log(ratios)).max()))
    return np.array(sizes)


def scaled(changes: Gaussian, scales: Any) -> tuple[Any, Any]:
    return scales[:, None] * changes.linear, scales[:, None, None] * changes.precision


# --- closed forms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", [0.1, 3.0])
def test_a_change_of_the_mean_alone_is_cut_to_the_bound(trust: float) -> None:
    """q = N(0, 1/4): dr moves the mean by dr / 4, which is dr / 2 sds."""
    q, changes = Gaussian(np.zeros(1), np.array([[4.0]])), Gaussian(np.array([[1e9]]), np.zeros((1, 1, 1)))
    found = _trust.bound(q, changes, trust)
    assert_allclose(found.influence, [0.5e9])
    assert 0.97 * trust < 0.5e9 * found.scales[0] <= trust
    assert_array_equal(found.held, [True])


@pytest.mark.parametrize("trust", [0.1, 3.0])
def test_a_change_of_the_precision_alone_is_cut_to_the_bound(trust: float) -> None:
    """q = N(0, 1): the log variance changes by log(1 + g)."""
    q = Gaussian(np.zeros(1), np.eye(1))
    for gain in (1e9, -0.999999):
        found = _trust.bound(q, Gaussian(np.zeros((1, 1)), np.array([[[gain]]])), trust)
        assert 0.97 * trust < abs(np.log1p(gain * found.scales[0])) <= trust
        assert_allclose(found.influence, abs(np.log1p(gain)))


def test_what_is_within_the_bound_is_left_alone(rng: np.random.Generator) -> None:
    q, changes = Gaussian(np.zeros(2), np.eye(2)), Gaussian(rng.normal(size=(5, 2)), np.zeros((5, 2, 2)))
    found = _trust.bound(q, changes, 10.0)
    assert_array_equal(found.scales, 1.0)
    assert not np.any(found.held)


# --- brute force ----------------------------------------------------------------------------------------------


def wild(rng: np.random.Generator, count: int, size: int, largest: float) -> Gaussian:
    """Changes of any sign and of sizes from 10⁻³ to 10^largest."""
    B = rng.normal(size=(count, size, size))
    scale = 10 ** rng.uniform(-3, largest, size=(2, count))
    precision = scale[0][:, None, None] * (B + np.swapaxes(B, 1, 2))
    return Gaussian(scale[1][:, None] * rng.normal(size=(count, size)), precision)


def proper(rng: np.random.Generator, size: int) -> Gaussian:
    B = rng.normal(size=(size, size + 1))
    return Gaussian(rng.normal(size=size), B @ B.T * 10 ** rng.uniform(-3, 3))


def test_influences_are_those_of_leaving_out(rng: np.random.Generator) -> None:
    for _ in range(50):
        size = int(rng.integers(1, 5))
        q = proper(rng, size)
        changes = wild(rng, 4, size, -2.0)
        small = Gaussian(changes.linear, changes.precision * 0.1 * np.linalg.eigvalsh(q.precision)[0])
        assert_allclose(_trust.influences(q, small), brute(q, *small).max(axis=1), rtol=1e-6)


@pytest.mark.parametrize("largest", [1.0, 6.0, 14.0])
@pytest.mark.parametrize("trust", [0.3, 3.0])
def test_the_bound_holds_for_any_changes(largest: float, trust: float, rng: np.random.Generator) -> None:
    """Several of them poisoned, of any sign: q stays proper and nobody does more than c."""
    scaled_down = 0
    for _ in range(60):
        size, count = (int(n) for n in rng.integers(1, 7, size=2))
        q, changes = proper(rng, size), wild(rng, count, size, largest)
        found = _trust.bound(q, changes, trust)
        after = scaled(changes, found.scales)
        assert np.all((0 <= found.scales) & (found.scales <= 1))
        assert gaussian.is_proper(Gaussian(q.linear + after[0].sum(0), q.precision + after[1].sum(0)))
        assert np.all(brute(q, *after) <= trust * (1 + 1e-6))
        scaled_down += bool(np.any(found.held))
        assert np.any(found.held) == np.any(found.influence > trust)
    assert scaled_down > 30


@pytest.mark.parametrize("kind", ["mean", "precision", "both", "taking"])
def test_one_wild_change_is_held_back_and_the_honest_are_not(kind: str, rng: np.random.Generator) -> None:
    """Though beside it every honest change looks influential, too."""
    q, changes = Gaussian(np.zeros(3), np.eye(3)), wild(rng, 20, 3, -2.0)
    changes.precision[:] *= 0.1
    changes.linear[7] = 1e9 * (kind != "precision")
    changes.precision[7] = {"mean": 0.0, "precision": 1e9, "both": 1e9, "taking": -1e9}[kind] * np.eye(3)
    assert np.flatnonzero(_trust.bound(q, changes, 1.0).held) == [7]


# --- through the loop -----------------------------------------------------------------------------------------


def steps(
    poison: Callable[[Request, Reply], Any], rounds: int, problem: Any = None, **settings: Any
) -> list[fedppl.Round]:
    """The first so many rounds, those of the warm start among them."""

    def change(request: Request, reply: Reply) -> Any:
        return poison(request, reply) if request.client_id == CLIENT else reply

    model, clients = problem or problems.regression(4)
    algorithm = fedppl.EP(**{"tolerance": 1e-9, "trust": 1.0} | settings)
    found = fedppl.rounds(model, clients, algorithm, engine=Tampering(change), random_seed=1)
    return list(itertools.islice(found, rounds))


def influence(before: Sites, after: Sites) -> Any:
    """What leaving out any client's change of a round does, from the ledgers before and after: (K, 2)."""
    changed = after.linear - before.linear, dense(after.precision - before.precision, after.structure)
    return brute(before.q, *changed)


def any_poison(rng: np.random.Generator) -> Callable[[Request, Reply], Any]:
    """Finite, accepted by `refuse`, and otherwise of any size."""
    far, size = 10 ** rng.uniform(0, 5), 10 ** rng.uniform(-6, 6)
    direction = rng.normal(size=3)
    sign = rng.choice([-1.0, 1.0])

    def poison(request: Request, reply: Reply) -> Any:
        if phase_of(request) == "EP":
            mean, precision = reply.message["mean"] + far * direction, reply.message["precision"] * size
            return with_message(reply, mean=mean, precision=precision)
        value, ray = sign * 10 ** rng.uniform(0, 20), reply.message["ray"] + sign * 10 ** rng.uniform(0, 20, size=16)
        gradient, hessian = reply.message["gradient"] + far * direction, reply.message["hessian"] * size * sign
        return with_message(reply, value=np.array(value), ray=ray, gradient=gradient, hessian=hessian)

    return poison


@pytest.mark.parametrize("form", ["full", "diagonal", [["mu"], ["a"]]])
@pytest.mark.parametrize("trust", [0.5, 3.0])
@pytest.mark.parametrize("seed", range(5))
def test_no_poison_does_more_than_the_bound_in_any_round(seed: int, trust: float, form: Any) -> None:
    """Of another size and direction in every round, in the warm start and, from a start without one, in EP."""
    held = 0
    for warm_start in (True, False):
        rng = np.random.default_rng(seed)
        taken = steps(
            lambda q, r, rng=rng: any_poison(rng)(q, r), 6, trust=trust, structure=form, warm_start=warm_start
        )
        before = taken[0].state.sites._replace(
            q=taken[0].state.sites.prior,
            linear=0 * taken[0].state.sites.linear,
            precision=0 * taken[0].state.sites.precision,
        )
        for step in taken:
            assert not step.failures
            after = step.state.sites
            assert gaussian.is_proper(after.q)
            assert np.all(influence(before, after) <= trust * (1 + 1e-6))
            assert ledger_gap(step.state) < 1e-9 * np.abs(after.precision).max()
            before, held = after, held + step.info.held_back
            assert step.info.phase == ("warm start" if warm_start else "EP")
    assert held >= 6


def liar(request: Request, reply: Reply) -> Any:
    """A client that, once refinement has begun, says with honest precision that the mean is 10⁵ away."""
    if phase_of(request) == "warm start":
        return reply
    return with_message(reply, mean=reply.message["mean"] + 1e5)


def test_a_persistent_liar_moves_the_mean_by_c_a_round_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The model is Gaussian: the others' sites are exact and stay, and q without the liar's moves is the posterior."""
    trust, rounds = 2.0, 8
    with caplog.at_level(logging.WARNING, logger="fedppl"):
        taken = steps(liar, rounds, trust=trust)
    exact = problems.regression_posterior(problems.regression(4)[1])
    lies = 0
    for step in taken:
        lies += step.info.phase == "EP"
        moved = gaussian.mean(step.state.sites.q) - gaussian.mean(exact)
        drift = np.sqrt(moved @ exact.precision @ moved)
        assert drift <= lies * trust * (1 + 1e-6) + 1e-6
        assert step.info.held_back == (step.info.phase == "EP")
        assert step.status is fedppl.Status.RUNNING
    assert lies == 6 and drift > 0.9 * lies * trust  # the bound is no looser than it says
    assert step.info.influence > 1e4
    assert dict(zip(step.state.sites.where, step.state.held_back, strict=True)) == {
        f"clinic {k}": lies * (k == 1) for k in range(4)
    }
    assert_array_equal(step.state.answered, rounds)
    lines = [r.getMessage() for r in caplog.records if "held back" in r.getMessage()]
    assert len(lines) == lies
    assert all(line.startswith(f"client {CLIENT} held back: ") and "trust=2" in line for line in lines)
    said = f"clients ['{CLIENT}'] were held back in most rounds: look at their data, or raise trust=2"
    assert said in step.message


def test_without_trust_the_same_lie_moves_the_mean_by_far_more() -> None:
    taken = steps(liar, 3, trust=None)
    exact = problems.regression_posterior(problems.regression(4)[1])
    moved = gaussian.mean(taken[-1].state.sites.q) - gaussian.mean(exact)
    assert np.sqrt(moved @ exact.precision @ moved) > 1e4
    assert taken[-1].info.held_back == 0 and np.isnan(taken[-1].info.influence)
    assert not np.any(taken[-1].state.answered)


def test_a_client_that_lied_once_does_no_lasting_harm() -> None:
    lied = []

    def once(request: Request, reply: Reply) -> Any:
        lied.append(request.round)
        return any_poison(np.random.default_rng(2))(request, reply) if len(lied) in (1, 4) else reply

    taken = steps(once, 40, tolerance=1e-6)
    assert taken[-1].status is fedppl.Status.CONVERGED and len(lied) > 4
    assert "held back" not in taken[-1].message
    exact = problems.regression_posterior(problems.regression(4)[1])
    assert_allclose(gaussian.mean(taken[-1].state.sites.q), gaussian.mean(exact), atol=1e-4)
    assert_allclose(gaussian.covariance(taken[-1].state.sites.q), gaussian.covariance(exact), rtol=1e-4, atol=1e-6)


def test_a_log_density_steers_nothing() -> None:
    """Without trust a client that boasts makes the search go back; with it, only gradient and Hessian count."""

    def boasting(request: Request, reply: Reply) -> Any:
        if phase_of(request) == "EP":
            return reply
        value = 1e6 * (2.0 - request.round)
        return with_message(reply, value=np.array(value), ray=reply.message["ray"] + np.linspace(value, 0.0, 16))

    honest = steps(lambda q, r: r, 4, problems.regression(4))
    assert_same_state(steps(boasting, 4)[-1].state.sites, honest[-1].state.sites)
    misled = [step.info.change_mean for step in steps(boasting, 4, trust=None)]
    assert np.inf in misled
    assert np.inf not in [step.info.change_mean for step in honest]


# --- honest clients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [problems.regression, problems.noise, problems.schools, problems.counts])
@pytest.mark.parametrize("participation", [None, 0.6])
def test_honest_clients_reach_the_same_posterior(problem: Callable[[], Any], participation: float | None) -> None:
    settings: dict[str, Any] = {"rounds": 100, "progressbar": False, "random_seed": 1}
    without = fedppl.fit(*problem(), fedppl.EP(tolerance=1e-3), **settings)
    held = fedppl.fit(*problem(), fedppl.EP(tolerance=1e-3, trust=3.0), participation=participation, **settings)
    assert without.status is held.status is fedppl.Status.CONVERGED
    sd = gaussian.standard_deviations(without.posterior)
    assert np.all(np.abs(gaussian.mean(held.posterior) - gaussian.mean(without.posterior)) < 0.01 * sd)
    assert_allclose(gaussian.standard_deviations(held.posterior), sd, rtol=0.01)
    assert "held back" not in held.message


def test_a_trust_that_is_never_used_changes_no_bit() -> None:
    model, clients = problems.regression()
    runs = [
        list(fedppl.rounds(model, clients, algorithm, rounds=6, random_seed=1, participation=4))
        for algorithm in (fedppl.EP(warm_start=False), fedppl.EP(warm_start=False, trust=1e12))
    ]
    for none, huge in zip(*runs, strict=True):
        assert_same_state(none.state._replace(answered=huge.state.answered), huge.state)
        assert huge.info.held_back == 0


def test_a_client_alone_is_held_to_the_bound_and_gets_its_own_posterior() -> None:
    """Leaving out the only client leaves the prior: it needs a few rounds more."""
    model, clients = normal_means(1)
    fit = fedppl.fit(model, clients, fedppl.EP(trust=0.5), rounds=40, progressbar=False, random_seed=1)
    mean, variance = problems.normal_means_posterior(clients)
    assert fit.status is fedppl.Status.CONVERGED
    assert len(fit.records) > 5
    assert_allclose(gaussian.mean(fit.posterior), mean, atol=0.01 * np.sqrt(variance))
    assert_allclose(gaussian.covariance(fit.posterior), [[variance]], rtol=0.02)


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    """Interrupted in the warm start, while it is held back, and in the refinement."""
    model, clients = problems.noise(3, rows=60)
    algorithm = fedppl.EP(trust=0.3, tolerance=1e-9)

    def until(number: int, **settings: Any) -> fedppl.Round:
        found = fedppl.rounds(model, clients, algorithm, random_seed=1, **settings)
        return next(step for step in found if step.number == number)

    whole = until(20)
    parts = [until(number, checkpoint=tmp_path / "run.ckpt") for number in (3, 18, 20)]
    assert [part.info.phase for part in parts] == ["warm start", "EP", "EP"]
    assert parts[0].state.held_back.sum() > 3
    assert_same_state(parts[-1].state, whole.state)
    assert_array_equal(whole.state.answered, 20)


# --- misuse ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", [0.0, -1.0, np.inf, np.nan])
def test_a_trust_that_is_no_positive_number_is_refused(trust: float) -> None:
    with pytest.raises(fedppl.DeclarationError, match=r"trust=.* must be positive.*posterior sds"):
        fedppl.EP(trust=trust)


def test_trust_is_among_the_settings() -> None:
    assert [fedppl.EP(trust=trust).settings["trust"] for trust in (None, 3.0)] == ["None", "3.0"]
