"""A log-likelihood on a grid: exact where it is a polynomial, smooth everywhere, and sensible beyond its ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose

from fedppl.model.interpreted import python_function
from fedppl.model.summaries import interpolated_logs as interpolated
from fedppl.model.summaries import rises_beyond

Function = Callable[[Any], Any]


@pytest.fixture(scope="module")
def evaluate() -> Any:
    """Values and slopes at points, of a function that is known on a grid."""
    at, grid, values = pt.dscalar(), pt.dvector(), pt.dvector()
    value = interpolated(at, grid, values)
    compiled = python_function([at, grid, values], [value, pt.grad(value, at)])

    def call(points: Any, grid: Any, values: Any) -> Any:
        return np.array([compiled(point, grid, values) for point in np.atleast_1d(points)]).T

    return call


UNEVEN = np.sort(np.concatenate([np.linspace(-2, 3, 9), [-1.9, 0.31, 0.32, 2.0]]))
INSIDE = np.linspace(-2, 3, 301)


def test_polynomials_of_degree_four_are_exact(evaluate: Any) -> None:
    coefficients = np.array([-0.3, 0.2, -1.1, 0.7, 2.0])
    found = evaluate(INSIDE, UNEVEN, np.polyval(coefficients, UNEVEN))
    assert_allclose(found[0], np.polyval(coefficients, INSIDE), atol=1e-9)
    assert_allclose(found[1], np.polyval(np.polyder(coefficients), INSIDE), atol=1e-8)


def test_a_parabola_is_exact_beyond_its_grid_too(evaluate: Any) -> None:
    points = np.array([-9.0, -2.5, 4.0, 30.0])
    found = evaluate(points, UNEVEN, -3 * (UNEVEN - 0.4) ** 2)
    assert_allclose(found, [-3 * (points - 0.4) ** 2, -6 * (points - 0.4)], rtol=1e-8)


WAVY = np.cumsum(np.random.default_rng(0).uniform(0.3, 0.7, size=11)) - 2


@pytest.mark.parametrize(
    ("grid", "values", "knots"),
    [
        (WAVY, np.log(0.3 + np.exp(-((WAVY - 0.5) ** 2))) + 0.1 * np.sin(5 * WAVY), WAVY[1:-1]),
        (WAVY, -2.5 * np.log1p(WAVY**2 / 0.1), WAVY[[0, -1]]),  # falls, and is convex
        (WAVY, -np.exp(WAVY), WAVY[[0, -1]]),  # falls at one end and rises to a plateau at the other
    ],
)
def test_value_slope_and_curvature_are_continuous(evaluate: Any, grid: Any, values: Any, knots: Any) -> None:
    step = 1e-6
    for knot in knots:
        points = knot + step * np.array([-2, -1, 1, 2])
        value, slope = evaluate(points, grid, values)
        assert_allclose(value[1], value[2], atol=1e-4)
        assert_allclose(slope[1], slope[2], atol=1e-4)
        curvature = np.diff(slope)[[0, 2]] / step
        assert_allclose(*curvature, atol=3e-3)  # third derivatives are below a thousand


def test_it_comes_as_near_as_points_are_dense(evaluate: Any) -> None:
    errors = []
    for n in (20, 40):
        grid = np.linspace(-2, 3, n)
        errors.append(np.abs(evaluate(INSIDE, grid, 3 * grid - 5 * np.exp(grid))[0] - 3 * INSIDE + 5 * np.exp(INSIDE)))
    assert errors[1].max() < errors[0].max() / 16 < 1e-3  # at least of fourth order


def test_a_plateau_goes_on_as_that_of_no_events(evaluate: Any) -> None:
    grid = np.linspace(-4, 3, 60)
    values = -3 * np.exp(grid)  # no event where 3 e^θ were expected
    assert (
        rises_beyond(grid, values)[0] == pytest.approx(3 * np.exp(-4), rel=0.01) and rises_beyond(grid, values)[1] == 0
    )
    points = np.array([-4.5, -6.0, -40.0])
    found = evaluate(points, grid, values)
    assert_allclose(found[0], -3 * np.exp(points), atol=2e-4)
    assert np.all(found[1] <= 0) and np.all(np.isfinite(evaluate([9.0, 900.0], grid, values)))


def test_a_falling_end_that_bends_outwards_falls_on(evaluate: Any) -> None:
    grid = np.linspace(-8, 8, 80)
    values = -2.5 * np.log1p(grid**2 / 4)  # Student's, convex in its tails
    found = evaluate([8.5, 20.0, 1000.0, -1000.0], grid, values)
    assert np.all(np.diff(found[0][:3]) < 0) and found[0][2] == pytest.approx(found[0][3])
    slope = evaluate([8.0], grid, values)[1, 0]
    assert 0.4 * slope > found[1][2] > slope  # a line in the end, half as steep at least


def test_nothing_is_learnt_from_a_flat_grid(evaluate: Any) -> None:
    grid = np.linspace(-1, 1, 7)
    assert rises_beyond(grid, np.full(7, -3.0)) == (0.0, 0.0)
    assert_allclose(evaluate([-50.0, 0.2, 50.0], grid, np.full(7, -3.0)), [[-3.0] * 3, [0.0] * 3], atol=1e-12)


def test_a_rise_that_has_no_end_is_seen() -> None:
    grid = np.linspace(0, 1, 9)
    assert rises_beyond(grid, grid**2)[1] == np.inf and rises_beyond(grid, -grid)[0] == np.inf
    assert rises_beyond(grid, -((grid - 3) ** 2))[1] == pytest.approx(8.0)  # twice the 4 that it does rise by
