"""Integrals over a local coordinate that are not smooth, or hardly bounded: right, or their errors say so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from scipy.special import logsumexp

from fedppl import FederatedModel
from fedppl.local import log_factors
from fedppl.local._conditional import Pair, by_pairs, by_two_rules
from fedppl.numerics.integral import Rule, smooth_over
from fedppl.types import Array
from tests.support.markers import slow_but

POINTS = np.linspace(-2.0, 2.0, 81)


def shifted(y: Any) -> pm.Model:
    """Times after an onset of the client's own: the density of y − e^θ has no second derivative at its end."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        onset = pm.math.exp(pm.Normal("theta", pm.Normal("mu", 0, 1), 1))
        pm.CustomDist("obs", onset, logp=lambda value, onset: pm.logp(pm.Gamma.dist(1.5, 1), value - onset), observed=y)
    return model


def kinked(y: Any) -> pm.Model:
    with pm.Model() as model:
        pm.Normal("obs", pm.Laplace("theta", pm.Normal("mu", 0, 1), 0.5), 1, observed=pm.Data("y", y))
    return model


def nothing_counted(y: Any) -> pm.Model:
    """Counts of zero, where θ is bounded below by its prior alone, however wide."""
    with pm.Model() as model:
        theta = pm.Normal("theta", 0, pm.math.exp(pm.Normal("log_tau", 5, 4)))
        pm.Poisson("obs", pm.math.exp(theta), observed=pm.Data("y", y))
    return model


def of_shifted(y: Array, mu: float, theta: Array) -> Array:
    return stats.norm.logpdf(theta, mu) + stats.gamma.logpdf(y[:, None] - np.exp(theta), 1.5).sum(axis=0)


def of_kinked(y: Array, mu: float, theta: Array) -> Array:
    return stats.laplace.logpdf(theta, mu, 0.5) + stats.norm.logpdf(y[:, None], theta).sum(axis=0)


def of_nothing(y: Array, log_tau: float, theta: Array) -> Array:
    return stats.norm.logpdf(theta, 0, np.exp(log_tau)) - len(y) * np.exp(theta)


def gamma_rate(y: Any) -> pm.Model:
    """Counts of a gamma rate, whose logarithm has a tail that falls as exp(shape · θ) where none was counted."""
    with pm.Model() as model:
        shape = pm.math.exp(pm.Normal("log_shape", 0, 1))
        rate = pm.Gamma("rate", alpha=shape, beta=2 * shape)
        pm.Poisson("obs", rate, observed=pm.Data("y", y))
    return model


@pytest.mark.parametrize("y", slow_but([[0, 0], [1, 0], [9, 3]], [1, 0]))
def test_what_thousands_of_clients_have_alike_does_not_add_up(y: list[int]) -> None:
    """log f_k of a gamma-Poisson client is that of a negative binomial distribution, but for a constant."""
    model = FederatedModel(gamma_rate, ["log_shape"])
    client = model.enrol({"a": {"y": np.array(y)}})["a"]
    points = np.linspace(-1.3, -0.5, 9)[:, None]
    found = log_factors.factor(client, points, points[4], 0.0)
    shape = np.exp(points[:, 0])
    exact = stats.nbinom.logpmf(sum(y), shape, 2 * shape / (2 * shape + len(y)))
    apart = found.values - exact
    assert_allclose(apart - apart.mean(), 0.0, atol=3e-5)


@pytest.mark.parametrize(
    "builder, density, y, points, grid",
    [
        pytest.param(
            *(shifted, of_shifted, [1.5, 2.0, 2.5, 4.0], POINTS, np.linspace(-12, 2, 200_001)), marks=pytest.mark.slow
        ),
        (kinked, of_kinked, [3.1, 3.4], POINTS, np.linspace(-12, 12, 200_001)),
        (nothing_counted, of_nothing, [0, 0], 4 + POINTS, np.concatenate([-np.geomspace(1e7, 30, 200_001), POINTS])),
    ],
)
def test_what_is_not_known_is_told(builder: Any, density: Any, y: Any, points: Array, grid: Array) -> None:
    y = np.array(y)
    grid = np.union1d(grid, np.linspace(-30, 5, 20_001))
    (client,) = (
        FederatedModel(builder, ["log_tau" if builder is nothing_counted else "mu"]).enrol({"a": {"y": y}}).values()
    )
    compute = log_factors.factor
    found = compute(client, points[:, None], points[40:41], 0.0)
    known = np.isfinite(found.values)
    width = np.log(np.gradient(grid))
    with np.errstate(over="ignore"):
        truth = np.array([logsumexp(density(y, point, grid) + width) for point in points])
    wrong = found.values - truth
    wrong = np.abs(wrong - np.median(wrong[known]))[known]
    assert known.mean() > 0.8
    assert np.all(wrong < 1e-3 + 5 * np.abs(found.errors[known]))


def one(values_and_errors: tuple[Array, Array]) -> tuple[Array, Array]:
    """Of one client."""
    values, errors = values_and_errors
    return values[None], errors[None]


def test_smooth_functions_are_computed_by_one_rule_and_kinked_ones_by_two() -> None:
    """The mean of e^(a|z|) or e^(a z) over a standard normal, at points a."""
    calls: list[int] = []

    def compute(points: Array, rule: Rule, kinked: bool) -> tuple[Array, Array]:
        calls.append(len(points))
        z = rule.nodes[:, 0]
        logs = rule.log_weights + points * (10 * np.abs(z - 0.31) if kinked else z)
        return logsumexp(logs, axis=1), np.zeros(len(points))

    points = np.linspace(-1, 1, 50)[:, None]
    (values,), (errors,) = by_two_rules(lambda _, some, rule: one(compute(points[some] / 4, rule, False)), 1, 50)
    assert calls == [50, 32] and np.allclose(values, points[:, 0] ** 2 / 32, atol=1e-5) and not np.any(errors)
    calls.clear()
    (values,), (errors,) = by_two_rules(lambda _, some, rule: one(compute(points[some], rule, True)), 1, 50)
    z = np.linspace(-15, 25, 400_001)
    truth = logsumexp(stats.norm.logpdf(z) + points * 10 * np.abs(z - 0.31), axis=1) + np.log(z[1] - z[0])
    assert calls == [50, 32, 50]
    assert np.all(np.abs(values - truth - np.median(values - truth)) < 1e-3 + 3 * np.abs(errors))


def test_what_is_held_against_nothing_agrees_with_nothing() -> None:
    points = np.linspace(-1, 1, 50)[:, None]

    def way(shift: float, known: float = 1.0) -> Any:
        def compute(places: Array) -> tuple[Array, Array]:
            some = points[places, 0]
            return np.where(np.abs(some) <= known, some * (1.0 + shift), np.nan), np.zeros(len(some))

        return compute

    ways = [way(0.0), way(0.0, known=0.1), way(0.01), way(0.03), way(0.03)]
    assert_allclose(by_pairs(ways, points, [Pair(0, 2, 2), Pair(0, 1, 1)])[0], points[:, 0] * 1.01)
    assert_allclose(by_pairs(ways, points, [Pair(2, 3, 3), Pair(3, 4, 4)])[0], points[:, 0] * 1.03)
    values, errors = by_pairs(ways, points, [Pair(0, 3, 3), Pair(0, 2, 2)])
    assert_allclose(values, points[:, 0] * 1.01)
    assert np.all(np.abs(errors) >= np.abs(values - points[:, 0]))


def test_what_was_computed_to_compare_is_not_computed_again() -> None:
    """And a small difference of a rule with few nodes is no end: others follow."""
    points, asked = np.linspace(-1, 1, 50)[:, None], list[tuple[int, int]]()

    def way(number: int, shift: float) -> Any:
        def compute(places: Array) -> tuple[Array, Array]:
            asked.append((number, len(places)))
            return points[places, 0] * (1.0 + shift), np.full(len(places), 0.1)

        return compute

    ways = [way(number, shift) for number, shift in enumerate((0.002, 0.0, 0.0))]
    values, errors = by_pairs(ways, points, [Pair(0, 1, 1, few=True), Pair(1, 2, 2)])
    assert_allclose(values, points[:, 0], atol=1e-12)
    assert_allclose(errors, 0.1, atol=1e-12)
    assert sorted(asked) == [(0, 32), (1, 18), (1, 32), (2, 32)]


def test_a_difference_of_two_rules_that_is_the_same_everywhere_is_an_error_too() -> None:
    points = np.linspace(-1, 1, 50)[:, None]

    def compute(some: Array, rule: Rule) -> tuple[Array, Array]:
        on_nodes = bool(np.any(np.abs(rule.nodes) < 1e-12))
        return some[:, 0] + (-0.027 if on_nodes else 0.038), np.zeros(len(some))

    (values,), (errors,) = by_two_rules(lambda _, some, rule: one(compute(points[some], rule)), 1, 50)
    assert_allclose(np.abs(values - points[:, 0]), 0.0055, rtol=1e-6)
    assert_allclose(np.abs(errors), 0.0325, rtol=1e-6)


def test_a_way_that_is_not_known_at_many_points_confirms_nothing() -> None:
    """The first is off by 3 where the second has no value."""
    points = np.linspace(-1, 1, 50)[:, None]
    x = points[:, 0]
    ways = [
        lambda some: (x[some] + 3.0 * (x[some] > 0.2), np.zeros(len(some))),
        lambda some: (np.where(x[some] > 0.2, np.nan, x[some]), np.zeros(len(some))),
        lambda some: (x[some], np.zeros(len(some))),
        lambda some: (x[some], np.zeros(len(some))),
    ]
    values, errors = by_pairs(ways, points, [Pair(0, 1, 1), Pair(2, 3, 3)])
    assert_allclose(values, points[:, 0], atol=1e-12)
    assert not np.any(errors)


def test_a_spline_knows_nothing_where_its_points_know_nothing() -> None:
    rng = np.random.default_rng(0)
    points = rng.normal(size=(400, 2))
    few = np.arange(0, 400, 4)
    values = np.where(points[few, 0] > 1.0, np.nan, 2.0)
    found = smooth_over(points, few, values, np.zeros(len(few)))
    known = np.isfinite(found[0])
    assert 0.7 < known.mean() < 0.95 and np.all(points[known, 0] < 1.6) and np.all(known[points[:, 0] < 0.4])
    assert_allclose(found[0][known], 2.0, atol=1e-6)
    assert not np.any(found[1][~known])
