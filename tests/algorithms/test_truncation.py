"""The correction's proposal truncated where sites answer: closed forms, what lies beyond, and whose rule it is."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose
from scipy import stats

import fedppl
from fedppl import DeclarationError, FederatedModel, Policy, gaussian
from fedppl.algorithms.ep import correction as _correction
from fedppl.contracts import Request
from fedppl.engine import guard as _guard
from fedppl.numerics import region
from fedppl.types import Status
from tests.support import problems

LENIENT: dict[str, Any] = {
    "rows": 0,
    "few_rows": 0,
    "parameters_per_row": np.inf,
    "events": 0,
    "cavity": np.inf,
    "requests": np.inf,
}
STANDARD = gaussian.from_moments(np.zeros(1), np.eye(1))


def fit(model: FederatedModel, clients: Any, correction: Any = None, policy: Policy | None = None) -> fedppl.Fit:
    algorithm = fedppl.EP(correction=correction or fedppl.Correction())
    engine = fedppl.InProcess() if policy is None else fedppl.InProcess(policy=policy)
    return fedppl.fit(model, clients, algorithm, engine=engine, progressbar=False, random_seed=1)


@functools.cache
def wide_and_narrow() -> tuple[FederatedModel, dict[str, Any], float, float]:
    """Rows about 0 with a known sd, whose posterior is half as wide as the prior; its sd, and log evidence."""

    def rows(y: Any) -> pm.Model:
        with pm.Model() as model:
            mu = pm.Normal("mu", 0, 1)
            pm.Normal("obs", mu, 2, observed=pm.Data("y", y))
        return model

    y = np.array([1.5, -1.0, 0.5, -1.5, 2.0, -2.0, 1.0, -0.5, 0.8, -0.8, 0.3, -0.3])
    clients = {"a": {"y": y[:4]}, "b": {"y": y[4:8]}, "c": {"y": y[8:]}}
    log_evidence = stats.multivariate_normal(np.zeros(12), 4 * np.eye(12) + 1).logpdf(y)
    return FederatedModel(rows, ["mu"]), clients, 0.5, float(log_evidence)


def test_a_gaussian_posterior_is_exact_with_a_radius_that_cuts_off_points() -> None:
    model, clients, sd, log_evidence = wide_and_narrow()
    for correction, policy in (
        (fedppl.Correction(radius=3.5 * sd), None),
        (None, Policy(**LENIENT, distance=3.5 * sd, correction=2**20)),
    ):
        found = fit(model, clients, correction, policy)
        held = found.state.correction
        assert found.status is Status.CONVERGED
        assert np.mean(~held.within) > _correction._LOST  # more than may be without a value
        assert np.all(np.abs(held.points[held.within]) <= 3.5 * sd)
        assert np.all(held.reweighted.weights[~held.within] == 0)
        assert_allclose(found.idata["fit"]["corrected_mean"], 0, atol=1e-8)
        assert_allclose(found.idata["fit"]["corrected_covariance"], sd**2, rtol=1e-8)
        assert found.log_evidence.value == pytest.approx(log_evidence, abs=1e-6)
        assert 1e-6 < found.log_evidence.error < 0.01  # what may lie beyond


def test_points_that_are_known_to_lie_beyond_are_not_asked_for() -> None:
    model, clients, sd, _ = wide_and_narrow()
    whole, cut = fit(model, clients), fit(model, clients, fedppl.Correction(radius=3.5 * sd))
    asked = [len(_correction.asked(one.state.correction)) for one in (whole, cut)]
    assert asked[1] == cut.state.correction.within.sum() < asked[0] == 1024


def test_schools_with_a_generous_radius_are_those_without_one() -> None:
    model, clients = problems.schools()
    whole = fit(model, clients)
    cut = fit(model, clients, policy=Policy(**LENIENT, distance=6.0, correction=2**20))
    one, other = whole.state.correction.reweighted, cut.state.correction.reweighted
    assert cut.status is Status.CONVERGED and not np.all(cut.state.correction.within)
    sd = np.sqrt(np.diag(one.covariance))
    assert np.abs((one.mean - other.mean) / sd).max() < 3 * np.hypot(one.error, other.error)
    assert_allclose(np.sqrt(np.diag(other.covariance)) / sd, 1, atol=3 * np.hypot(one.error, other.error))
    error = np.hypot(whole.log_evidence.error, cut.log_evidence.error)
    assert abs(whole.log_evidence.value - cut.log_evidence.value) < 3 * error


def test_a_radius_within_the_posterior_is_refused_with_the_site_that_has_it() -> None:
    model, clients, sd, _ = wide_and_narrow()
    with pytest.warns(fedppl.ConvergenceWarning, match=r"along mu.*radius=1\).*larger distance"):
        found = fit(model, clients, fedppl.Correction(radius=2 * sd))
    assert found.status is Status.STALLED
    assert "corrected_mean" not in found.idata["fit"]
    with pytest.warns(fedppl.ConvergenceWarning, match=r"site 'a' answers, by distance=1.2 of its policy"):
        fit(model, clients, policy=Policy(**LENIENT, distance=1.2, correction=2**20))


def test_the_least_of_what_sites_allow_holds_for_all() -> None:
    """Who answers last may allow least: what others said beyond is not used."""
    model, clients, sd, _ = wide_and_narrow()
    found = fit(model, clients)
    state, sites = found.state.correction, found.state.sites
    assert not np.any(np.isnan(state.residual)) and _correction.reached(state) == np.inf
    begun = state._replace(answered=np.array([True, True, False]))
    count = len(_correction.asked(begun))
    told = {"values": np.zeros(count), "errors": np.zeros(count), "constant": np.zeros(2)}
    reply = {**told, "proper": np.array(1.0), "reach": np.array(1.5)}
    after = _correction.take(begun, sites, {"c": reply})
    assert _correction.reached(after) == 1.5
    assert np.array_equal(np.isnan(after.residual), np.abs(after.points[:, 0]) > 1.5)
    assert len(_correction.asked(after)) < count
    odd = [np.array([0.0, 1e9]), np.array([np.nan, 0.0]), np.array([-np.inf, 0.0])]
    for wrong in ({"reach": np.array(-1.0)}, *({"constant": one} for one in odd)):
        assert _correction.implausible({**reply, **wrong}) is not None
    assert _correction.implausible(reply) is None
    before = begun._replace(constants=np.array([[0.0, 0.0], [0.0, 0.0], [-5.0, 0.1]]))
    assert np.array_equal(_correction.take(before, sites, {"c": reply}).constants[2], [-5.0, 0.1])
    away = {**reply, "values": np.where(reply["values"] > -1e290, reply["values"] - 1e12, reply["values"])}
    assert "rounding" in (_correction.implausible(away) or "")


def test_a_site_counts_the_points_that_it_answers_and_says_how_far_it_does() -> None:
    model, clients, sd, _ = wide_and_narrow()
    client = model.enrol(clients)["a"]
    algorithm = fedppl.EP(correction=fedppl.Correction())
    points = np.linspace(-3, 3, 61)[:, None]
    message = {
        "points": points,
        "count": np.array(61.0),
        "center": np.zeros(1),
        "prior_share": np.array(0.0),
        "reach": np.array(50.0),  # a word of the site's own
        "inside": np.ones(61, dtype=bool),
    }
    near = int(np.sum(np.abs(points) <= 2.0 + 1e-9))
    guard = _guard.in_memory(Policy(**LENIENT, distance=2.0 + 1e-9, correction=near), "a")
    admitted = _guard.admit(guard, algorithm, client, Request("a", 1, 1, (1,), message, "run"))
    assert admitted is not None and guard.read().points == near
    reply = algorithm.update_client(client, None, admitted.message, np.random.default_rng(0)).reply
    assert float(reply["reach"]) == pytest.approx(2.0)
    assert np.sum(reply["values"] > -1e290) == near
    assert _guard.admit(guard, algorithm, client, Request("a", 1, 2, (1,), message, "run")) is None  # none is left


def test_a_radius_without_any_point_in_it_ends_as_one_that_is_too_small_does() -> None:
    model, clients = problems.schools()
    with pytest.warns(fedppl.ConvergenceWarning, match="nothing could be corrected"):
        found = fit(model, clients, fedppl.Correction(radius=1e-9))
    assert found.status.value == "stalled"


@pytest.mark.parametrize("freedom, radius", [(np.inf, 3.5), (np.inf, 5.0), (3.0, 10.0), (5.0, 6.0)])
def test_what_lies_beyond_is_bounded_for_tails_that_fall_like_a_power(freedom: float, radius: float) -> None:
    points = np.linspace(-radius, radius, 20001)[:, None]
    weights = stats.t(freedom).pdf(points[:, 0])
    narrow = gaussian.from_moments(np.zeros(1), 0.01 * np.eye(1))
    found = region.beyond(STANDARD, radius, narrow, points, weights / weights.sum())
    exact = stats.t(freedom).sf(radius)
    assert np.all(found.mass >= exact) and np.all(found.mass < 25 * exact)
    wide = gaussian.from_moments(np.zeros(1), 4.0 * np.eye(1))
    assert region.beyond(STANDARD, radius, wide, points, weights / weights.sum()).mass.min() >= stats.norm.sf(
        radius / 2
    )
    assert not np.any(region.beyond(STANDARD, np.inf, wide, points, weights).effect)


@pytest.mark.parametrize("freedom, radius", [(3.0, 15.0), (2.5, 30.0), (2.2, 100.0), (np.inf, 3.3)])
def test_the_effect_of_what_lies_beyond_is_bounded_too(freedom: float, radius: float) -> None:
    """On a log sd; of a t it is known."""
    points = np.linspace(-radius, radius, 200_001)[:, None]
    weights = stats.t(freedom).pdf(points[:, 0])
    weights /= weights.sum()
    narrow = gaussian.from_moments(np.zeros(1), 0.01 * np.eye(1))
    found = region.beyond(STANDARD, radius, narrow, points, weights)
    exact = 0.5 * np.log(stats.t(freedom).var() / (weights @ points[:, 0] ** 2))
    assert exact < found.effect.sum() < 25 * exact + 0.1


@pytest.mark.parametrize("radius", [0, -1.0, np.inf, np.nan, "far", True])
def test_a_radius_out_of_range_is_refused(radius: Any) -> None:
    with pytest.raises(DeclarationError, match=r"radius=.*prior sds"):
        fedppl.Correction(radius=radius)
