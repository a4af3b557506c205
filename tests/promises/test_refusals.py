"""Replies that cannot be used: all refused with one line that says why, as if the client had not replied."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import fedppl
from fedppl import gaussian
from fedppl.algorithms.ep import sites as _sites
from fedppl.algorithms.tolerances import LENGTHS
from fedppl.contracts import Reply, Request
from fedppl.gaussian import Gaussian
from fedppl.types import Layout, Variable
from tests.support import problems
from tests.support.faults import ALTERED, KINDS, Tampering, fitting, kind_of, with_message
from tests.support.markers import slow_but
from tests.support.states import arrays, assert_same_state

CLIENT = "site 1"
CASES = [(kind, name) for kind in KINDS for name in fitting(kind)]


KNOWN: dict[Any, Reply] = {}  # honest replies, which are the same in all of these runs until one is changed


def last_round(kind: str, change: Callable[[Request, Reply], Any]) -> fedppl.Round:
    """The first round of its kind, with one client's reply changed."""
    changed = []

    def once(request: Request, reply: Reply) -> Any:
        if request.client_id != CLIENT or kind_of(request) != kind:
            return reply
        changed.append(request.round)
        return change(request, reply)

    model, clients = problems.noise(3, rows=60)
    algorithm = fedppl.EP(tolerance=1e-9)
    found = fedppl.rounds(model, clients, algorithm, engine=Tampering(once, KNOWN), random_seed=1)
    step = next(step for step in found if changed)
    assert changed == [step.number]
    return step


@functools.cache
def without_reply(kind: str) -> fedppl.Round:
    return last_round(kind, lambda request, reply: None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_reply_makes_a_difference(kind: str) -> None:
    """Or the comparison below would be with the honest round."""
    honest = last_round(kind, lambda request, reply: reply)
    assert not honest.failures
    assert np.any(honest.state.sites.linear != without_reply(kind).state.sites.linear)


def test_there_are_sixty_alterations_of_each_kind() -> None:
    assert all(len(fitting(kind)) >= 60 for kind in KINDS)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_an_altered_reply_is_as_none_and_says_why(kind: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    alteration = ALTERED[name]
    with caplog.at_level(logging.WARNING, logger="fedppl"):
        step = last_round(kind, alteration.change)
    assert list(step.failures) == [CLIENT]
    assert re.search(alteration.reason, step.failures[CLIENT])
    lines = [record.getMessage() for record in caplog.records if record.name == "fedppl.run.one_round"]
    assert_same_state(step.state, without_reply(kind).state)  # which logs too, when it is computed here
    assert lines == [f"round {step.number}, client {CLIENT} skipped: {step.failures[CLIENT]}"]
    assert "\n" not in lines[0] and len(lines[0]) < 600


# --- what must not be refused ---------------------------------------------------------------------------------

BEYOND: dict[str, Callable[[Any], dict[str, Any]]] = {
    "hessian": lambda message: {"hessian": message["hessian"] * 1e30},
    "hessian, other sign": lambda message: {"hessian": message["hessian"] * -1e30},
    "gradient": lambda message: {"gradient": message["gradient"] * 1e30},
    "value": lambda message: {"value": np.array(-1e30)},
    "no density along the step": lambda message: {
        "value": np.array(-1e300),
        "ray": np.full_like(message["ray"], -1e300),
    },
    "smallest numbers": lambda message: {"value": np.array(-1.7e308), "ray": np.full_like(message["ray"], -1.7e308)},
}


@functools.cache
def undisturbed() -> Gaussian:
    *_, last = fedppl.rounds(*problems.noise(3, rows=60), fedppl.EP(tolerance=1e-6), random_seed=1)
    return last.state.sites.q


@pytest.mark.parametrize("name", slow_but(BEYOND, "gradient", "no density along the step"))
def test_after_a_step_an_expansion_beyond_measure_says_that_the_step_was_too_long(name: str) -> None:
    """Nobody is skipped, no site changes, the server goes back along the step, and the fit ends where it should."""
    changed: list[int] = []

    def once(request: Request, reply: Reply) -> Any:
        if changed or request.client_id != CLIENT or kind_of(request) != "after a step":
            return reply
        changed.append(request.round)
        return with_message(reply, **BEYOND[name](reply.message))

    model, clients = problems.noise(3, rows=60)
    algorithm = fedppl.EP(tolerance=1e-6)
    steps = list(fedppl.rounds(model, clients, algorithm, engine=Tampering(once), random_seed=1))
    (number,) = changed
    before, step = steps[number - 2].state, steps[number - 1]
    assert not step.failures
    assert_same_state(step.state.sites, before.sites)
    search = step.state.warm_start
    assert search.trial.chosen
    assert_array_equal(search.anchor, before.warm_start.anchor)
    share = search.trial.move / before.warm_start.trial.move
    assert np.allclose(share, share[0]) and np.any(np.isclose(share[0], LENGTHS))
    assert steps[-1].status is fedppl.Status.CONVERGED
    expected, q = undisturbed(), steps[-1].state.sites.q
    sd = gaussian.standard_deviations(expected)
    assert np.all(np.abs(gaussian.mean(q) - gaussian.mean(expected)) < 1e-4 * sd)
    assert np.allclose(gaussian.standard_deviations(q), sd, rtol=1e-4)


def layout(prior_sd: float) -> Layout:
    prior = Gaussian(np.zeros(2), np.eye(2) / prior_sd**2)
    return Layout((Variable("mu", (2,), "", None),), prior, True, "abc")


@pytest.mark.parametrize("prior_sd", [1.0, 1e3])
def test_a_million_rows_under_a_vague_prior_are_no_reason_to_refuse(prior_sd: float) -> None:
    """f = N(ȳ; μ, 0.1²/n), n just under 10⁶. Expanded 10 prior sds away, and as tilted moments against the prior."""
    sites = _sites.empty(layout(prior_sd), ("a", "b"), _sites.structure_of("full", layout(prior_sd)))
    far, packed = np.full(2, 10 * prior_sd), np.array([0.99e8, 0.0, 0.99e8])
    expansion = {"value": np.array(-0.5e8 * far @ far), "gradient": 0.99e8 * far, "hessian": -packed}
    assert _sites.implausible_expansion(sites, expansion) is None
    tilted = {"mean": far, "precision": packed, "skewness": np.zeros(2), "mc_error": np.array(0.9)}
    assert _sites.implausible_moments(sites, tilted) is None


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_units_do_not_matter(scale: float) -> None:
    """The rules are ratios: the same problem in another unit is judged alike."""
    sites = _sites.empty(layout(scale), ("a",), _sites.structure_of("full", layout(scale)))
    tilted = {"mean": np.ones(2) * scale, "precision": np.array([2.0, 0.5, 2.0]) / scale**2}
    rest = {"skewness": np.zeros(2), "mc_error": np.array(0.0)}
    assert _sites.implausible_moments(sites, {**tilted, **rest}) is None
    wild = {**tilted, "precision": tilted["precision"] * 1e15, **rest}
    assert "'precision' is 2.5e+15 times q's" in str(_sites.implausible_moments(sites, wild))
    expansion = {"value": np.array(1.0), "gradient": np.ones(2) / scale, "hessian": tilted["precision"]}
    assert _sites.implausible_expansion(sites, expansion) is None
    steep = {**expansion, "gradient": np.ones(2) / scale * 1e20}
    assert "'gradient'" in str(_sites.implausible_expansion(sites, steep))


def test_the_largest_that_passes_leaves_the_ledger_usable() -> None:
    """10^14 times q's precision, taken in and taken away again: the cavity is q to two digits, the next site exact."""
    sites = _sites.empty(layout(1.0), ("a", "b"), _sites.structure_of("full", layout(1.0)))
    known = np.array([[1.0, 2.0], [0.0, 0.0]]), np.array([[4.0, 1.0, 4.0], [0.0, 0.0, 0.0]])
    q = _sites.update(sites, *known)
    packed = 0.99e14 * np.array([5.0, 1.0, 5.0])
    rest = {"skewness": np.zeros(2), "mc_error": np.array(0.0)}
    assert _sites.implausible_moments(q, {"mean": np.array([0.3, -0.7]), "precision": packed, **rest}) is None
    linear, precision = known[0].copy(), known[1].copy()
    precision[1] += packed - _sites.in_structure(q.q.precision, q.structure)
    assert np.allclose(_sites.cavity(_sites.update(q, linear, precision), "b").precision, q.q.precision, rtol=0.05)
    precision[1] = 0.0
    assert_array_equal(_sites.update(q, linear, precision).q.precision, q.q.precision)
    assert len(arrays(q)) > 3
