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
from fedppl.gaussian import Gaussian
from fedppl.steps import _sites
from fedppl.types import Layout, Reply, Request, Variable
from tests import problems
from tests.faults import ALTERED, FIELDS, Tampering, phase_of
from tests.test_runs import arrays, assert_same_state

CLIENT = "site 1"
# Of three rounds of warm start the second, when every client has a site to keep, and the first of refinement.
AT = {"warm start": 2, "EP": 5}
CASES = [(phase, name) for phase in FIELDS for name, alteration in ALTERED.items() if alteration.phase in (None, phase)]


def last_round(phase: str, change: Callable[[Request, Reply], Any]) -> fedppl.Round:
    """The round in which one client's reply is changed."""

    def once(request: Request, reply: Reply) -> Any:
        if request.client_id == CLIENT and request.round == AT[phase]:
            assert phase_of(request) == phase
            return change(request, reply)
        return reply

    model, clients = problems.noise(3, rows=60)
    algorithm = fedppl.EP(tolerance=1e-9)
    return list(fedppl.rounds(model, clients, algorithm, engine=Tampering(once), rounds=AT[phase], random_seed=1))[-1]


@functools.cache
def without_reply(phase: str) -> fedppl.Round:
    return last_round(phase, lambda request, reply: None)


@pytest.mark.parametrize("phase", FIELDS)
def test_a_missing_reply_makes_a_difference(phase: str) -> None:
    """Or the comparison below would be with the honest round."""
    honest = last_round(phase, lambda request, reply: reply)
    assert not honest.failures
    assert np.any(honest.state.sites.linear != without_reply(phase).state.sites.linear)


def test_there_are_sixty_kinds_in_each_phase() -> None:
    assert all(sum(phase == wanted for phase, _ in CASES) >= 60 for wanted in FIELDS)


@pytest.mark.parametrize(("phase", "name"), CASES)
def test_an_altered_reply_is_as_none_and_says_why(phase: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    alteration = ALTERED[name]
    with caplog.at_level(logging.WARNING, logger="fedppl"):
        step = last_round(phase, alteration.change)
    assert list(step.failures) == [CLIENT]
    assert re.search(alteration.reason, step.failures[CLIENT])
    lines = [record.getMessage() for record in caplog.records if record.name == "fedppl.loop"]
    assert_same_state(step.state, without_reply(phase).state)  # which logs too, when it is computed here
    assert lines == [f"round {AT[phase]}, client {CLIENT} skipped: {step.failures[CLIENT]}"]
    assert "\n" not in lines[0] and len(lines[0]) < 600


# --- what must not be refused ---------------------------------------------------------------------------------


def layout(prior_sd: float) -> Layout:
    prior = Gaussian(np.zeros(2), np.eye(2) / prior_sd**2)
    return Layout((Variable("mu", (2,), "", None),), prior, True, "abc")


@pytest.mark.parametrize("prior_sd", [1.0, 1e3])
def test_a_million_rows_under_a_vague_prior_are_no_reason_to_refuse(prior_sd: float) -> None:
    """f = N(ȳ; μ, 0.1²/n), n just under 10⁶. Expanded 10 prior sds away, and as tilted moments against the prior."""
    sites = _sites.empty(layout(prior_sd), ("a", "b"), _sites.structure_of("full", layout(prior_sd)))
    far, packed = np.full(2, 10 * prior_sd), np.array([0.99e8, 0.0, 0.99e8])
    expansion = {"value": np.array(-0.5e8 * far @ far), "gradient": 0.99e8 * far, "hessian": -packed}
    assert _sites.absurd_expansion(sites, expansion) is None
    tilted = {"mean": far, "precision": packed, "skewness": np.zeros(2), "mc_error": np.array(0.9)}
    assert _sites.absurd_moments(sites, tilted) is None


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_units_do_not_matter(scale: float) -> None:
    """The rules are ratios: the same problem in another unit is judged alike."""
    sites = _sites.empty(layout(scale), ("a",), _sites.structure_of("full", layout(scale)))
    tilted = {"mean": np.ones(2) * scale, "precision": np.array([2.0, 0.5, 2.0]) / scale**2}
    rest = {"skewness": np.zeros(2), "mc_error": np.array(0.0)}
    assert _sites.absurd_moments(sites, {**tilted, **rest}) is None
    wild = {**tilted, "precision": tilted["precision"] * 1e15, **rest}
    assert "'precision' is 2.5e+15 times q's" in str(_sites.absurd_moments(sites, wild))
    expansion = {"value": np.array(1.0), "gradient": np.ones(2) / scale, "hessian": tilted["precision"]}
    assert _sites.absurd_expansion(sites, expansion) is None
    steep = {**expansion, "gradient": np.ones(2) / scale * 1e20}
    assert "'gradient'" in str(_sites.absurd_expansion(sites, steep))


def test_the_largest_that_passes_leaves_the_ledger_usable() -> None:
    """10^14 times q's precision, taken in and taken away again: the cavity is q to two digits, the next site exact."""
    sites = _sites.empty(layout(1.0), ("a", "b"), _sites.structure_of("full", layout(1.0)))
    known = np.array([[1.0, 2.0], [0.0, 0.0]]), np.array([[4.0, 1.0, 4.0], [0.0, 0.0, 0.0]])
    q = _sites.update(sites, *known)
    packed = 0.99e14 * np.array([5.0, 1.0, 5.0])
    rest = {"skewness": np.zeros(2), "mc_error": np.array(0.0)}
    assert _sites.absurd_moments(q, {"mean": np.array([0.3, -0.7]), "precision": packed, **rest}) is None
    linear, precision = known[0].copy(), known[1].copy()
    precision[1] += packed - _sites.in_structure(q.q.precision, q.structure)
    assert np.allclose(_sites.cavity(_sites.update(q, linear, precision), "b").precision, q.q.precision, rtol=0.05)
    precision[1] = 0.0
    assert_array_equal(_sites.update(q, linear, precision).q.precision, q.q.precision)
    assert len(arrays(q)) > 3
