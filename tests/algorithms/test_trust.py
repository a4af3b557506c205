"""EP(trust=c): how far one client can pull q over a run, by closed forms, by brute force, and through the loop."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm
import pytest
import scipy.stats
from numpy.testing import assert_allclose, assert_array_equal

import fedppl
from benchmarks._attacks import trust as attacks
from fedppl import gaussian, structure
from fedppl.algorithms.ep import _rounds, _trust
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.ep._rounds import Outcome
from fedppl.algorithms.ep.sites import Sites
from fedppl.contracts import Reply, Request
from fedppl.gaussian import Gaussian
from fedppl.results import diagnostics
from fedppl.testing import normal_means
from fedppl.types import Layout, Variable
from tests.support import problems
from tests.support.faults import Tampering, ledger_gap, phase_of, with_message
from tests.support.markers import slow_but
from tests.support.states import assert_same_state

CLIENT = "clinic 1"


def ledger(prior: Gaussian, linear: Any, precision: Any, form: str = "full") -> Sites:
    """Sites (K, m), (K, m, m) on a prior."""
    count, m = np.shape(linear)
    layout = Layout((Variable("x", (m,), "", None),), prior, True, "abc")
    sites = _sites.empty(layout, tuple(f"client {k}" for k in range(count)), _sites.structure_of(form, layout))
    return _sites.update(sites, np.asarray(linear, float), _sites.in_structure(np.asarray(precision), sites.structure))


def brute(sites: Sites) -> Any:
    """Each client's pull in cavity sds, (K, m), and in norm, (K,): q is built anew without it."""
    precision = structure.unpack_precision(sites.precision, sites.structure)
    mean = np.linalg.solve(sites.q.precision, sites.q.linear)
    along, norm = [], []
    for k in range(len(precision)):
        others = np.delete(np.arange(len(precision)), k)
        q = sites.prior.precision + precision[others].sum(axis=0)
        shift = mean - np.linalg.solve(q, sites.prior.linear + sites.linear[others].sum(axis=0))
        along.append(shift / np.sqrt(np.diag(np.linalg.inv(q))))
        norm.append(np.sqrt(shift @ q @ shift))
    return np.array(along), np.array(norm)


def assert_bounded(sites: Sites, trust: float) -> None:
    along, norm = brute(sites)
    assert np.all(np.abs(along) <= trust * (1 + 1e-6))
    assert np.all(norm <= _trust.largest_norm(trust, along.shape[1]) * (1 + 1e-6))


def standard(size: int, sd: float = 1.0) -> Gaussian:
    return Gaussian(np.zeros(size), np.eye(size) / sd**2)


# --- closed forms ---------------------------------------------------------------------------------------------


def test_a_pull_is_measured_in_the_cavity() -> None:
    """N(0, 1) and sites of precision 3 at 0 and 12 at 5: q has precision 16 and mean 3.75, the cavities 13 and 4."""
    sites = ledger(standard(1), [[0.0], [60.0]], [[[3.0]], [[12.0]]])
    expected = [[(3.75 - 60 / 13) * np.sqrt(13)], [3.75 * 2.0]]
    assert_allclose(_trust.pulls(sites), expected)
    assert_allclose(brute(sites)[0], expected)


@pytest.mark.parametrize("trust", [0.1, 3.0])
@pytest.mark.parametrize("gain", [1e-6, 1.0, 1e9])
def test_a_site_that_is_far_off_is_drawn_in_to_the_bound_and_keeps_its_precision(trust: float, gain: float) -> None:
    linear, precision = np.zeros((4, 1)), np.ones((4, 1, 1))
    linear[2], precision[2] = 1e6 * (1 + gain), gain
    found = _trust.bound(ledger(standard(1), linear, precision), trust)
    along, norm = brute(found.sites)
    assert 0.99 * trust < along[2, 0] <= trust
    assert_allclose(norm, np.abs(along[:, 0]))
    assert_array_equal(found.held, [False, False, True, False])
    assert_array_equal(found.sites.precision[:, 0], precision[:, 0, 0])
    assert found.pull[2, 0] > 1e4 * trust


@pytest.mark.parametrize("size", [1, 2, 8, 50])
@pytest.mark.parametrize("trust", [1.0, 3.0])
def test_the_norm_has_the_tail_of_c_sds(size: int, trust: float) -> None:
    limit = _trust.largest_norm(trust, size)
    assert_allclose(scipy.stats.chi.sf(limit, size), 2 * scipy.stats.norm.sf(trust))
    assert_allclose(_trust.largest_norm(trust, 1), trust)


def test_many_coordinates_together_are_bounded_too() -> None:
    """Each by 2.9 sds is less than 3, eight of them are 8.2 in norm, above 4.9."""
    linear, precision = np.zeros((2, 8)), np.stack([np.eye(8)] * 2)
    linear[1] = 2.9 * 3 / np.sqrt(2)  # q has precision 3, the cavity 2
    found = _trust.bound(ledger(standard(8), linear, precision), 3.0)
    assert_allclose(brute(ledger(standard(8), linear, precision))[0][1], 2.9)
    assert_array_equal(found.held, [False, True])
    assert_allclose(brute(found.sites)[1][1], 4.855, rtol=2e-3)


# --- brute force ----------------------------------------------------------------------------------------------


def honest(rng: np.random.Generator, weights: Any, size: int, prior_sd: float = 10.0) -> Sites:
    """Sites of clients with so much information each, about one truth from the prior."""
    truth = rng.normal(0, prior_sd, size=size)
    linear, precision = [], []
    for weight in weights:
        B = rng.normal(size=(size, size + 2))
        Q = weight * B @ B.T
        linear.append(Q @ truth + np.linalg.cholesky(Q) @ rng.normal(size=size))
        precision.append(Q)
    return ledger(standard(size, prior_sd), linear, precision)


@pytest.mark.parametrize("largest", [1.0, 6.0, 13.0])
@pytest.mark.parametrize("trust", [0.3, 3.0])
def test_the_bound_holds_for_any_sites(largest: float, trust: float, rng: np.random.Generator) -> None:
    """Several of them wild; nobody's precision is touched, and what is within the bound to begin with not at all."""
    drawn = 0
    for _ in range(40):
        size, count = int(rng.integers(1, 6)), int(rng.integers(2, 9))
        before = honest(rng, 10 ** rng.uniform(-3, 3, size=count), size)
        wild = rng.random(count) < 0.3
        push = 10 ** rng.uniform(0, largest, size=count) * wild
        sites = _sites.update(before, before.linear + push[:, None] * rng.normal(size=(count, size)), before.precision)
        found = _trust.bound(sites, trust)
        assert_bounded(found.sites, trust)
        assert_array_equal(found.sites.precision, sites.precision)
        assert_array_equal(found.sites.linear[~found.held], sites.linear[~found.held])
        drawn += bool(np.any(found.held))
    assert drawn > 5


@pytest.mark.parametrize("weight", [1e-6, 1.0, 1e6])
def test_one_liar_is_held_back_and_the_honest_are_not(weight: float, rng: np.random.Generator) -> None:
    """Though beside it honest clients look influential, too, and one of them has 90 % of the rows."""
    for _ in range(20):
        before = honest(rng, [180.0, *np.ones(19)], 3)
        liar = int(rng.integers(1, 20))
        linear, precision = before.linear.copy(), before.precision.copy()
        precision[liar] *= weight
        dense = structure.unpack_precision(precision, before.structure)
        linear[liar] = dense[liar] @ (gaussian.mean(before.q) + 10.0 ** rng.uniform(1.3, 6) / min(weight, 1))
        found = _trust.bound(_sites.update(before, linear, precision), 3.0)
        assert np.flatnonzero(found.held).tolist() == [liar]
        assert_bounded(found.sites, 3.0)


def test_who_takes_all_precision_has_no_say(rng: np.random.Generator) -> None:
    before = honest(rng, np.ones(20), 3)
    linear, precision = before.linear.copy(), before.precision.copy()
    precision[7] = _sites.in_structure(-1e6 * np.eye(3), before.structure)
    linear[7] = -1e6
    found = _trust.bound(_sites.update(before, linear, precision), 3.0)
    assert np.flatnonzero(found.held).tolist() == np.flatnonzero(found.takes).tolist() == [7]
    without = _sites.update(before, before.linear * (np.arange(20) != 7)[:, None], before.precision * 1.0)
    alone = before.precision.copy()
    alone[7] = 0.0
    without = _sites.update(without, without.linear, alone)
    assert_allclose(found.sites.q.precision, without.q.precision, rtol=1e-6)
    assert_allclose(gaussian.mean(found.sites.q), gaussian.mean(without.q), rtol=1e-6)


@pytest.mark.parametrize("times", [1e8, 1e12, 1e20])
def test_who_gives_nearly_all_precision_is_cut_to_what_leaves_the_others_readable(times: float) -> None:
    """Others of precision 4 about 0, prior included: beyond 10^10 of that, cut; what it says of the mean stays."""
    linear, precision = np.zeros((4, 1)), np.ones((4, 1, 1))
    precision[2], linear[2] = times, times * 0.5
    found = _trust.bound(ledger(standard(1), linear, precision), 3.0)
    over = times > 1e10
    assert np.flatnonzero(found.held).tolist() == np.flatnonzero(found.gives).tolist() == [2] * over
    assert_allclose(found.sites.precision[2], min(times, 4e10), rtol=2e-3)
    assert_allclose(found.sites.linear[2] / found.sites.precision[2], 0.5)
    assert_array_equal(found.sites.precision[[0, 1, 3]], 1.0)


def test_precision_is_cut_only_in_the_direction_that_has_too_much(rng: np.random.Generator) -> None:
    before = honest(rng, np.ones(20), 3)
    precision, direction = structure.unpack_precision(before.precision, before.structure), rng.normal(size=3)
    sharp = 1e13 * np.outer(direction, direction)
    precision[4] += sharp
    linear = before.linear.copy()
    linear[4] += sharp @ gaussian.mean(before.q)
    found = _trust.bound(_sites.update(before, linear, _sites.in_structure(precision, before.structure)), 3.0)
    assert np.flatnonzero(found.held).tolist() == [4]
    across = np.linalg.svd(direction[None])[2][1:]
    sd, expected = (across @ np.linalg.inv(q.precision) @ across.T for q in (found.sites.q, before.q))
    assert np.all(np.diag(sd) < np.diag(expected) * (1 + 1e-6))
    assert_allclose(gaussian.mean(found.sites.q), gaussian.mean(before.q), rtol=1e-3)


@pytest.mark.parametrize("liars", [5, 8])
def test_where_many_lie_they_are_left_out_and_nobody_else_is_held(liars: int, rng: np.random.Generator) -> None:
    """So far that drawing in one after the other does not end; the mean is that of the others."""
    before = honest(rng, np.ones(20), 3)
    linear = before.linear.copy()
    linear[:liars] += 1e5 * rng.normal(size=(liars, 3))
    found = _trust.bound(_sites.update(before, linear, before.precision), 3.0)
    assert np.flatnonzero(found.held).tolist() == list(range(liars))
    assert_bounded(found.sites, 3.0)
    precision = (
        structure.unpack_precision(before.precision, before.structure)[liars:].sum(axis=0) + before.prior.precision
    )
    mean = np.linalg.solve(precision, before.prior.linear + before.linear[liars:].sum(axis=0))
    assert_allclose(gaussian.mean(found.sites.q), mean, rtol=1e-8)


def test_clients_that_all_disagree_end_within_the_bound() -> None:
    """As the last resort all sites are drawn in alike; here each is far from all others."""
    corners = 1e5 * np.concatenate([np.eye(4), -np.eye(4)])
    found = _trust.bound(ledger(standard(4), corners, np.stack([np.eye(4)] * 8)), 0.5)
    assert_bounded(found.sites, 0.5)
    assert np.all(np.isfinite(found.sites.linear))


def test_a_client_alone_is_left_alone() -> None:
    sites = ledger(standard(1), [[1e6]], [[[1.0]]])
    found = _trust.bound(sites, 0.5)
    assert found.sites is sites and not np.any(found.held)


@pytest.mark.parametrize(("count", "share"), [(2, 0.5), (2, 0.9), (3, 0.9), (20, 0.05), (20, 0.9)])
@pytest.mark.parametrize("size", [1, 8])
def test_honest_clients_are_held_back_as_seldom_as_c_says(
    count: int, share: float, size: int, rng: np.random.Generator
) -> None:
    """Fewer than the tails of m coordinates and of a norm, each of 0.27 %, for every client; a plain norm would not do.

    300 federations a case; Poisson noise of a bound that is expected is allowed for.
    """
    weights = np.full(count, (1 - share) / (count - 1))
    weights[0] = share
    held = plain = 0
    for _ in range(300):
        along, norm = brute(sites := honest(rng, 300 * weights, size))
        held += bool(np.any(_trust.bound(sites, 3.0).held))
        plain += bool(np.any(norm > 3.0))
        assert bool(np.any(_trust.bound(sites, 1e6).held)) is False
    expected = 300 * (size + 1) * 0.0027
    assert held <= expected + 3 * np.sqrt(expected)
    if size == 8 and share == 0.9:
        assert plain > 30


# --- what the server sees of noise ----------------------------------------------------------------------------


def test_moves_are_those_of_a_replaced_site(rng: np.random.Generator) -> None:
    """To first order: small changes against means and log sds of a q built anew."""
    before = honest(rng, np.ones(3), 2)
    d_linear, B = 1e-6 * rng.normal(size=(1, 2)), rng.normal(size=(2, 2))
    d_precision = 1e-6 * (B + B.T)[None]
    after = Gaussian(before.q.linear + d_linear[0], before.q.precision + d_precision[0])
    sd = gaussian.standard_deviations(before.q)
    expected = np.concatenate(
        [(gaussian.mean(after) - gaussian.mean(before.q)) / sd, np.log(gaussian.standard_deviations(after) / sd)]
    )
    assert_allclose(_trust.moves_of(before.q, d_linear, d_precision)[0], expected, rtol=1e-3, atol=1e-10)


@pytest.mark.parametrize("kind", ["noise", "drift", "fixed"])
def test_noise_scatters_and_a_drift_does_not(kind: str, rng: np.random.Generator) -> None:
    """A site that follows proposals T: noise about a value, one step beyond q each time, or a value from the start."""
    moves, site, noise = _trust.no_moves(1, 1), np.zeros(2), np.ones(1)
    for t in range(60):
        proposal = {"noise": rng.normal(size=2), "drift": site + 1.0, "fixed": np.ones(2)}[kind]
        step = max(1 / (t + 2), 0.1)
        moves = _trust.followed(moves, [0], (proposal - site)[None], step)
        site = site + step * (proposal - site)
    drift, allowed = float(np.abs(moves.mean).max()), 3 * np.sqrt(_trust.backed_variance(moves, noise))
    if kind == "noise":
        assert 0.5 < moves.scatter[0] < 2 and drift < allowed < 1.5
    else:
        assert moves.scatter[0] < 0.01 and allowed < 0.1
        assert drift == pytest.approx(1.0) if kind == "drift" else drift > allowed or drift < 1e-2


def test_one_odd_reply_weighs_no_more_after_averaging_has_begun_anew() -> None:
    """Six replies that agree, then one that is 10 sds off: 100 / 2 over six pairs, begun anew or not."""
    scatter = []
    for forget in (lambda moves: moves, _trust.averaged_anew):
        moves = _trust.no_moves(1, 1)
        for _ in range(6):
            moves = _trust.followed(moves, [0], np.zeros((1, 2)), 1.0)
        scatter.append(_trust.followed(forget(moves), [0], np.full((1, 2), 10.0), 1.0).scatter[0])
    assert_allclose(scatter, 50.0 / 6)


def test_the_word_of_one_client_buys_no_tolerance() -> None:
    moves = _trust.no_moves(3, 1)._replace(share=np.full(3, 0.5), scatter=np.array([0.0, 0.1, 4.0]))
    assert _trust.backed_variance(moves, np.array([1.0, 0.01, 0.01])) == pytest.approx(0.02)
    assert _trust.backed_variance(moves, np.array([0.01, 0.01, 1.0])) == pytest.approx(1.02)
    assert _trust.backed_variance(moves, np.array([0.01, 1.0, 0.01])) == pytest.approx(0.07)


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


def any_poison(rng: np.random.Generator) -> Callable[[Request, Reply], Any]:
    """Finite, not rejected, and otherwise of any size."""
    far, size = 10 ** rng.uniform(0, 5), 10 ** rng.uniform(-1, 6)
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
@pytest.mark.parametrize("seed", slow_but(range(3), 2))
def test_no_poison_pulls_beyond_the_bound_after_any_round(seed: int, trust: float, form: Any) -> None:
    """Of another size and direction in every round, in the warm start and, from a start without one, in EP."""
    held = 0
    for warm_start in (True, False):
        rng = np.random.default_rng(seed)
        taken = steps(
            lambda q, r, rng=rng: any_poison(rng)(q, r), 6, trust=trust, structure=form, warm_start=warm_start
        )
        assert taken[0].info.phase == ("warm start" if warm_start else "EP")
        for step in taken:
            after = step.state.sites
            assert gaussian.is_proper(after.q)
            assert_bounded(after, trust)
            assert ledger_gap(step.state) < 1e-9 * np.abs(after.precision).max()
            held += step.info.held_back
    assert held >= 4


def liar(request: Request, reply: Reply) -> Any:
    """A client that, once refinement has begun, says with honest precision that the mean is 10⁵ away."""
    if phase_of(request) == "warm start":
        return reply
    return with_message(reply, mean=reply.message["mean"] + 1e5)


def test_a_persistent_liar_pulls_by_c_and_is_named_with_its_direction(caplog: pytest.LogCaptureFixture) -> None:
    """The model is Gaussian: the others' sites are exact, and the liar's cavity is that of the honest run."""
    trust = 2.0
    with caplog.at_level(logging.WARNING, logger="fedppl"):
        taken = steps(liar, 30, trust=trust)
    last = taken[-1]
    along, norm = brute(last.state.sites)
    assert np.abs(along[1]).max() > 0.9 * trust or norm[1] > 0.9 * _trust.largest_norm(trust, 3)
    exact = gaussian.quotient(
        problems.regression_posterior(problems.regression(4)[1]),
        problems.regression_site(problems.regression(4)[1][CLIENT]),
    )
    off = gaussian.mean(last.state.sites.q) - gaussian.mean(exact)
    assert np.all(np.abs(off) <= trust * gaussian.standard_deviations(exact) * (1 + 1e-3))
    assert last.status is fedppl.Status.RUNNING and last.info.held_back == 1
    assert last.info.pulled_by == CLIENT and last.info.pull > trust
    assert_array_equal(last.state.clients.held, [False, True, False, False])
    assert f"{CLIENT} (pulls " in last.message and "clinic 0" not in last.message
    lines = [r.getMessage() for r in caplog.records if "held back" in r.getMessage()]
    assert lines and all(line.startswith(f"client {CLIENT} held back: it pulls ") for line in lines)


def test_without_trust_the_same_lie_moves_the_mean_by_far_more_and_shows_in_the_pulls() -> None:
    taken = steps(liar, 30, trust=None)
    assert np.isnan(taken[-1].info.pull) and taken[-1].info.held_back == 0
    assert np.abs(_trust.pulls(taken[-1].state.sites)[1]).max() > 1e4


@pytest.mark.parametrize(
    ("count", "sds", "trust"),
    [
        (1, 0.3, 3.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(2, 1.0, 3.0), (4, 1.0, None), (1, 1.0, None), (2, 0.3, None), (4, 0.3, 3.0)]
        ),
    ],
)
def test_a_client_that_claims_noise_and_goes_on_and_on_is_not_converged(
    count: int, sds: float, trust: float | None
) -> None:
    """Also as the only client, and as one of two; the message says who, and in which way."""

    def drift(request: Request, reply: Reply) -> Reply:
        if phase_of(request) == "warm start":
            return reply
        return attacks._moved(request, reply, sds, mc_error=np.array(1.0))

    model, clients = problems.regression(4)
    some = {name: clients[name] for name in [CLIENT, "clinic 0", "clinic 2", "clinic 3"][:count]}
    taken = steps(drift, 40, (model, some), trust=trust, tolerance=0.01)
    assert len(taken) == 40
    assert all(step.status is fedppl.Status.RUNNING for step in taken)
    if trust is None:
        assert "does not cancel" in taken[-1].message and f"client {CLIENT} +" in taken[-1].message
    elif count > 1:
        assert CLIENT in taken[-1].message


def test_what_a_client_says_of_skewness_is_told_as_its_word() -> None:
    def boast(request: Request, reply: Reply) -> Any:
        return reply if phase_of(request) == "warm start" else with_message(reply, skewness=np.array([9e3, 0, 0]))

    last = steps(boast, 30, trust=None, tolerance=0.01)[-1]
    assert last.status is fedppl.Status.CONVERGED
    assert f"(0.0 without client {CLIENT})" in last.message


def test_a_client_that_lied_once_does_no_lasting_harm() -> None:
    lied = []

    def once(request: Request, reply: Reply) -> Any:
        lied.append(request.round)
        return any_poison(np.random.default_rng(2))(request, reply) if len(lied) in (1, 4) else reply

    taken = steps(once, 40, tolerance=1e-6, trust=3.0)
    assert taken[-1].status is fedppl.Status.CONVERGED and len(lied) > 4
    assert sum(step.info.held_back for step in taken) > 0
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

    plain = steps(lambda q, r: r, 4, problems.regression(4), trust=3.0)
    assert_same_state(steps(boasting, 4, trust=3.0)[-1].state.sites, plain[-1].state.sites)
    misled = [step.info.change_mean for step in steps(boasting, 4, trust=None)]
    assert np.inf in misled
    assert np.inf not in [step.info.change_mean for step in plain]


@pytest.mark.parametrize(
    "name", slow_but(["2.9 sds a round", "far and sure", "unsure", "Hessian + 1e6", "gradient + 1e6"], "Hessian + 1e6")
)
def test_one_of_twenty_that_lies_is_held_back_and_named_alone(name: str) -> None:
    found = attacks.attack(problems.regression(20), attacks.ATTACKS[name], 30)
    assert found.met and found.off <= attacks.TRUST * 1.1, found
    assert not found.honest_named


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["precision x 100 a round, .5 sds", "precision x 30 a round, 1 sd", "wild"], "precision x 100 a round, .5 sds"
    ),
)
def test_a_precision_that_grows_hides_no_pull_and_puts_no_blame_on_others(name: str) -> None:
    found = attacks.attack(problems.regression(20), attacks.ATTACKS[name], 30)
    assert found.met and found.off <= attacks.TRUST * 1.1, found
    assert found.liar_named and not found.honest_named


@pytest.mark.slow
def test_who_lies_in_every_second_round_is_named_after_the_honest_one_too() -> None:
    found = attacks.attack(problems.logistic(20), attacks.ATTACKS["precision x 1e4 every second round"], 60)
    assert found.met and found.off <= attacks.TRUST * 1.1, found


def wards() -> tuple[fedppl.FederatedModel, dict[str, dict[str, Any]]]:
    """Falls on six wards by patient-days; the last counts its days in hours."""

    def ward(X: Any, y: Any, days: Any) -> Any:
        with pm.Model() as model:
            X, y, days = pm.Data("X", X), pm.Data("y", y), pm.Data("days", days)
            level, log_tau = pm.Normal("level", -3, 1), pm.Normal("log_tau", -1, 0.7)
            beta, z = pm.Normal("beta", 0, 0.5, shape=3), pm.Normal("z")
            pm.Poisson("falls", days * pm.math.exp(level + pm.math.exp(log_tau) * z + X @ beta), observed=y)
        return model

    clients = {}
    for k in range(6):
        rng = np.random.default_rng(k)
        X, days = rng.normal(size=(80, 3)), rng.integers(1, 20, 80).astype(float)
        base = -3 + 0.4 * np.random.default_rng(100 + k).normal()
        clients[f"ward {k}"] = {"X": X, "y": rng.poisson(days * np.exp(base + X @ [0.4, -0.3, 0.2])), "days": days}
    clients["ward 5"]["days"] = 24 * clients["ward 5"]["days"]
    return fedppl.FederatedModel(ward, shared=["level", "log_tau", "beta"]), clients


def test_a_client_in_another_unit_is_held_back_and_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    """Without another the rest may agree a little better: not enough to suspect that one."""
    model, clients = wards()
    with pytest.warns(fedppl.ConvergenceWarning):
        fit = fedppl.fit(model, clients, fedppl.EP(trust=3.0), progressbar=False, random_seed=1)
    held = [record.client for record in caplog.records if getattr(record, "status", "") == "held back"]
    assert not fit.status.ok and set(held) == {"ward 5"}
    assert "ward 5 (pulls" in fit.message and not any(f"ward {k}" in fit.message for k in range(5))


@pytest.mark.parametrize("sure", [1e2, 1e4])
def test_nothing_is_converged_where_a_client_cannot_be_left_out(sure: float) -> None:
    """Beside heavy tails one that is sure of a far place takes the mean along, and is named."""
    linear, precision = np.full((4, 1), 4.0), np.full((4, 1, 1), -0.05)
    linear[0], precision[0] = -20.0 * sure, sure
    sites = ledger(standard(1, 10.0), list(linear), list(precision))
    found = _trust.bound(sites, 3.0)
    assert found.unknown.tolist() == [True, False, False, False]


def test_who_pulls_alone_is_named_where_q_is_no_posterior() -> None:
    linear, precision = np.full((4, 1), 4.0), np.full((4, 1, 1), -0.05)
    for k, slope, said in ((2, 1e4, True), (2, 40.0, False), (0, -1e5, True)):
        pushed = linear.copy()
        pushed[k] += slope
        sites = ledger(standard(1, 10.0), list(pushed), list(precision))
        told = _rounds.pulls_alone(sites, np.array([15.0]))
        assert (f"client {k} pulls" in told) == said and not any(f"client {j} " in told for j in {0, 1, 2, 3} - {k})


@pytest.mark.parametrize(("step", "rounds"), [(1.0, 1), (0.5, 5), (0.1, 29)])
def test_who_is_held_back_stays_so_until_it_is_replaced(step: float, rounds: int) -> None:
    """Of a site that was drawn in, (1 − δ)^n is left after n replies: below 5 % it counts no more."""
    last = steps(liar, 6)[-1]
    sites, nobody = last.state.sites, np.zeros(4, dtype=bool)
    taken = Outcome(last.state, last.info)
    within = _trust.Bounded(sites, np.zeros((4, 3)), nobody, nobody, nobody, nobody, nobody)
    for count in range(1, rounds + 1):
        assert taken.state.clients.held[1] > 0
        taken = _rounds.hold_back(taken, [0, 1], within, 1.0, step)
        assert_allclose(taken.state.clients.held[1], (1 - step) ** count if count < rounds else 0.0)
        assert np.any(taken.state.clients.pull[1]) == (count < rounds)


def test_where_no_step_can_be_made_who_is_held_back_is_named_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    state = steps(liar, 6, trust=3.0)[-1].state
    worse = itertools.count()
    monkeypatch.setattr(_rounds._sites, "improper_cavities", lambda sites: next(worse))
    change = np.stack([np.zeros(6), -0.1 * state.sites.q.precision[np.triu_indices(3)]])
    taken = _rounds.damped_step(
        state,
        [0, 1],
        np.zeros((2, 3)),
        change,
        mc_errors=np.zeros(2),
        skewness=np.zeros((2, 3)),
        tolerance=0.01,
        largest=1.0,
        trust=3.0,
    )
    assert taken.message is not None
    assert taken.info.damping == 0 and "no step" in taken.message
    assert f"{CLIENT} (pulls " in taken.message
    assert not any(f"clinic {k}" in taken.message for k in (0, 2, 3))


# --- honest clients -------------------------------------------------------------------------------------------


def unequal() -> Any:
    """Ten clients, of which the first has 90 % of the rows."""
    rng = np.random.default_rng(4)
    data = {}
    for k, rows in enumerate([450, *[5, 6] * 4, 6]):
        X = rng.normal(size=(rows, 2))
        beta = np.array([1.0, -2.0]) + 0.5 * rng.normal(size=2)
        data[f"clinic {k}"] = {"X": X, "y": 0.5 + X @ beta + rng.normal(size=rows)}
    return problems.declared(problems.regression_builder, problems.REGRESSION_SHARED), data


HONEST: dict[str, Callable[[], Any]] = {
    "regression": problems.regression,
    "noise": problems.noise,
    "schools": problems.schools,
    "counts": problems.counts,
    "90 % of the rows": unequal,
    "two clients": lambda: problems.regression(2),
    "two wards": lambda: problems.logistic(2),
    "twenty wards": lambda: problems.logistic(20),
}


@problems.of_q
@pytest.mark.parametrize("name", slow_but(HONEST, "regression", "two clients"))
@pytest.mark.parametrize("how", ["all", "some", "no warm start", "diagonal"])
def test_honest_clients_reach_the_same_posterior(name: str, how: str) -> None:
    settings: dict[str, Any] = {"rounds": 100, "progressbar": False, "random_seed": 1}
    settings["participation"] = 0.6 if how == "some" else None
    form: Any = {"structure": "diagonal"} if how == "diagonal" else {"warm_start": how != "no warm start"}
    problem = HONEST[name]()
    without = fedppl.fit(*problem, fedppl.EP(tolerance=1e-3, **form), **settings)
    held = fedppl.fit(*problem, fedppl.EP(tolerance=1e-3, trust=3.0, **form), **settings)
    assert diagnostics.matched(without.status, without.message) and diagnostics.matched(held.status, held.message)
    sd = gaussian.standard_deviations(without.posterior)
    assert np.all(np.abs(gaussian.mean(held.posterior) - gaussian.mean(without.posterior)) < 0.01 * sd)
    assert_allclose(gaussian.standard_deviations(held.posterior), sd, rtol=0.01)
    assert "held back" not in held.message
    pulls = held.idata["fit"]["pull"]
    assert pulls.dims == ("client", "rows") and 0 < np.abs(pulls.to_numpy()).max() < 3.0


def test_a_trust_that_binds_nobody_changes_no_bit_of_refinement() -> None:
    model, clients = problems.regression()
    runs = [
        list(fedppl.rounds(model, clients, algorithm, rounds=6, random_seed=1, participation=4))
        for algorithm in (fedppl.EP(warm_start=False), fedppl.EP(warm_start=False, trust=3.0))
    ]
    for none, some in zip(*runs, strict=True):
        assert_same_state(
            none.state._replace(clients=none.state.clients._replace(pull=some.state.clients.pull)), some.state
        )
        assert some.info.held_back == 0 and some.info.pull < 3.0


def test_an_outlier_with_few_rows_is_held_back_and_that_is_said() -> None:
    """Ten times as far from the others as clients are from each other: the model does not hold for it."""
    model, clients = normal_means(12)
    odd = dict(clients)
    name = list(clients)[3]
    odd[name] = {"y": np.asarray(clients[name]["y"]) + 400.0}
    fit = problems.fit_some_rounds(model, odd, fedppl.EP(trust=3.0), rounds=30, progressbar=False, random_seed=1)
    assert fit.status is fedppl.Status.MAX_ROUNDS
    assert f"{name} (pulls mu by +" in fit.message


def test_for_a_client_alone_trust_does_nothing() -> None:
    """There are no others to protect from it."""
    model, clients = normal_means(1)
    fit = fedppl.fit(model, clients, fedppl.EP(trust=0.01), rounds=40, progressbar=False, random_seed=1)
    mean, variance = problems.normal_means_posterior(clients)
    assert fit.status is fedppl.Status.CONVERGED
    assert_allclose(gaussian.mean(fit.posterior), mean, atol=0.01 * np.sqrt(variance))
    assert_allclose(gaussian.covariance(fit.posterior), [[variance]], rtol=0.02)


def test_a_resumed_run_counts_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Interrupted in the warm start, while somebody is held back, and in the refinement."""
    model, clients = problems.noise(3, rows=60)
    algorithm = fedppl.EP(trust=0.3, tolerance=1e-9)

    def until(number: int, **settings: Any) -> fedppl.Round:
        found = fedppl.rounds(model, clients, algorithm, random_seed=1, **settings)
        return next(step for step in found if step.number == number)

    whole = until(14)
    parts = [until(number, checkpoint=tmp_path / "run.ckpt") for number in (2, 12, 14)]
    assert "held back" in caplog.text
    assert_same_state(parts[-1].state, whole.state)


# --- misuse ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", [0.0, -1.0, np.inf, np.nan])
def test_a_trust_that_is_no_positive_number_is_refused(trust: float) -> None:
    with pytest.raises(fedppl.DeclarationError, match=r"trust=.* must be above 0.*sds"):
        fedppl.EP(trust=trust)


def test_trust_is_among_the_settings() -> None:
    assert [fedppl.EP(trust=trust).settings["trust"] for trust in (None, 3.0)] == ["None", "3.0"]


# --- clients whose rows nobody can look at --------------------------------------------------------------------


def _place() -> Any:
    return pm.Normal("theta", pm.Normal("mu", 0, 100), 1)


def _rows(y: Any) -> pm.Model:
    with pm.Model() as model:
        pm.Normal("obs", _place(), 1, observed=pm.Data("y", y))
    return model


def _with_an_estimate(of: float) -> tuple[fedppl.FederatedModel, dict[str, Any]]:
    rng = np.random.default_rng(2)
    clients: dict[str, Any] = {f"site {k}": {"y": rng.normal(rng.normal(), 1, 30)} for k in range(6)}
    clients["paper"] = {"estimate": np.array(of), "covariance": np.array(0.04)}
    builders = {"rows": _rows, "estimate": fedppl.summaries.estimate(_place)}
    return fedppl.FederatedModel(builders, shared=["mu"]), clients


@pytest.mark.filterwarnings("ignore:fit ended:fedppl.ConvergenceWarning")
@pytest.mark.parametrize(
    ("of", "trust", "converged"),
    [
        pytest.param(0.5, None, True, marks=pytest.mark.slow),
        pytest.param(400.0, None, False, marks=pytest.mark.slow),
        (400.0, 2000.0, True),
    ],
)
def test_an_estimate_that_decides_alone_is_not_called_converged(of: float, trust: Any, converged: bool) -> None:
    """Unless the user says how far one may pull; closed form, with all variances known."""
    model, clients = _with_an_estimate(of)
    fit = fedppl.fit(model, clients, fedppl.EP(trust=trust), progressbar=False, random_seed=1)
    means = np.array([*(np.mean(one["y"]) for k, one in clients.items() if k != "paper"), of])
    weights = 1 / (1 + np.array([1 / 30] * 6 + [0.04]))
    assert gaussian.mean(fit.posterior)[0] == pytest.approx(weights @ means / (weights.sum() + 1e-4), abs=0.02)
    assert (fit.status is fedppl.Status.CONVERGED) is converged
    assert converged or ("client paper" in fit.message and "trust=3" in fit.message)


@pytest.mark.filterwarnings("ignore:fit ended:fedppl.ConvergenceWarning")
def test_neither_is_a_site_of_its_own() -> None:
    model, clients = normal_means(8)
    name = list(clients)[3]
    odd = {**clients, name: {"y": np.asarray(clients[name]["y"]) + 4000.0}}
    for engine, converged in ((fedppl.InProcess(), True), (fedppl.InProcess(policy=fedppl.policy.NO_RULES), False)):
        fit = fedppl.fit(model, odd, fedppl.EP(), engine=engine, progressbar=False, random_seed=1)
        assert (fit.status is fedppl.Status.CONVERGED) is converged, fit.message
        assert f"client {name}" in fit.message
