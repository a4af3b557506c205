"""Surrogates of many coordinates, against a density that bends and has known moments."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from fedppl.algorithms.sums.phases import Unit, chance_of_draws, moments_of, tilted, unit_of
from fedppl.algorithms.sums.trust import with_weight
from fedppl.numerics import surrogate
from fedppl.numerics.coordinates import declared
from fedppl.numerics.surrogate import Drawn, Places, Surrogate
from fedppl.types import Array

M, BENT = 10, 0.4
NONE: Places = np.zeros(0, dtype=np.intp)


def straight(z: Array) -> Array:
    """Standard normal coordinates of a density whose first bends with the square of the second."""
    x = z.copy()
    x[:, 0] -= BENT * (z[:, 1] ** 2 - 1.0)
    return x


def log_density(z: Array) -> Array:
    return np.asarray(-0.5 * np.sum(straight(z) ** 2, axis=1))


def moments() -> tuple[Array, Array]:
    variances = np.ones(M)
    variances[0] += 2.0 * BENT**2
    return np.zeros(M), np.diag(variances)


def values_at(count: int) -> tuple[Array, Array]:
    at = surrogate.candidates(surrogate.mixture(*moments(), count // 8, 0.25), NONE, 1)
    return at.u, log_density(at.u)


def fitted(count: int) -> Surrogate:
    found = surrogate.fitted(*values_at(count), *moments())
    assert found is not None
    return found


def drawn(of: Surrogate) -> Drawn:
    return surrogate.drawn(of, surrogate.mixture(*moments(), 512, 0.125), NONE, 2)


@pytest.fixture(scope="module")
def bent() -> Surrogate:
    return fitted(2400)


def test_a_polynomial_tells_what_bends_between_values(bent: Surrogate) -> None:
    z = np.random.default_rng(3).standard_normal((2000, M))
    z[:, 0] += BENT * (z[:, 1] ** 2 - 1.0)
    residual = surrogate.log_surrogate(bent, z) - log_density(z)
    quadratic = surrogate.fitted(*values_at(300), *moments())  # fewer values than a polynomial has terms
    assert quadratic is not None and quadratic.base.coefficients is None and bent.base.coefficients is not None
    assert np.std(residual) < 0.25 * np.std(surrogate.log_surrogate(quadratic, z) - log_density(z))


def test_a_polynomial_makes_up_no_peak_far_out(bent: Surrogate) -> None:
    rng = np.random.default_rng(4)
    away = rng.standard_normal((2000, M))
    away *= (rng.uniform(6.0, 40.0, 2000) / np.linalg.norm(away, axis=1))[:, None]
    assert np.max(surrogate.log_surrogate(bent, away)) < -8.0  # the highest value is near 0


def test_draws_that_are_moved_on_have_the_moments_of_the_density(bent: Surrogate) -> None:
    moved = surrogate.walked(bent, drawn(bent), NONE, 24, 5)
    mean, covariance = moments()
    chance = chance_of_draws(moved)
    assert chance < 0.05
    assert_allclose(moved.mean, mean, atol=4.0 * chance * np.sqrt(covariance[0, 0]))
    assert_allclose(np.diag(moved.covariance) / np.diag(covariance), 1.0, atol=8.0 * chance)


def test_copies_of_few_candidates_come_apart(bent: Surrogate) -> None:
    """A twentieth of the candidates has all of the weight."""
    of = drawn(bent)
    kept = np.where(np.arange(len(of.weights)) % 20 == 0, of.weights, 0.0)
    few = of._replace(weights=kept / kept.sum())
    copies = np.concatenate(surrogate.resampled(few, 512))
    moved = surrogate.walked(bent, few, NONE, 24, 5)
    assert len(np.unique(copies)) < 0.05 * len(of.weights)
    assert len(np.unique(moved.u, axis=0)) > 0.9 * len(moved.u)
    assert chance_of_draws(moved) < 0.5 * chance_of_draws(few)


def test_scales_that_are_coordinates_stay_positive() -> None:
    u = np.abs(np.random.default_rng(6).standard_normal((2400, M)))
    values = -0.5 * np.sum(u**2, axis=1)
    folded = np.arange(M)[:2]
    mean, covariance = u.mean(axis=0), np.cov(u.T)
    of = surrogate.fitted(u, values, mean, covariance)
    assert of is not None
    candidates = surrogate.drawn(of, surrogate.mixture(mean, covariance, 512, 0.125), folded, 2)
    assert np.min(surrogate.walked(of, candidates, folded, 8, 5).u[:, folded]) >= 0.0


def test_draws_are_put_right_on_scales_that_depend_on_each_other() -> None:
    """Components of a composition: each estimate has an error of its own, and none fits all of them exactly."""
    rng = np.random.default_rng(8)
    u = rng.standard_normal((4096, 2))
    x = np.column_stack([u, u @ [1.0, 1.0], u @ [1.0, -1.0]])
    equal = np.full(len(u), 1 / len(u))
    of = Drawn(u, np.zeros(len(u)), np.zeros(len(u)), equal, np.arange(len(u)) % 8, 0.0, 0.0, u.mean(axis=0), np.eye(2))
    unit = unit_of(x, equal)
    exact = np.array([0.05, -0.03]), np.array([1.1, 0.95])
    mean = np.array([0.05, -0.03, 0.02 + 1e-3, 0.08])
    second = np.array([1.1, 0.95, 2.051, 2.05]) + mean**2
    lengths = unit.length
    target = np.concatenate(
        [(mean - unit.center) / lengths, (second - 2 * unit.center * mean + unit.center**2) / lengths**2]
    )
    found = tilted(of, x, target, unit)
    assert found is not None
    assert_allclose(found.weights @ u, exact[0], atol=3e-3)


def test_draws_are_put_right_where_candidates_without_weight_lie_far_out() -> None:
    """By powers of z² alone one of these would get all of the weight."""
    rng, unit = np.random.default_rng(7), Unit(np.zeros(2), np.ones(2))
    u = np.concatenate([rng.standard_normal((4096, 2)), np.array([[53.0, 0.0], [0.0, -30.0]])])
    weights = np.where(np.arange(len(u)) < 4096, 1.0, 1e-12)
    weights /= weights.sum()
    of = Drawn(u, np.zeros(len(u)), np.zeros(len(u)), weights, np.arange(len(u)) % 8, 0.0, 0.0, weights @ u, np.eye(2))
    target = np.array([0.05, -0.03, 1.1, 0.95])
    found = tilted(of, u, target, unit)
    assert found is not None
    assert_allclose(moments_of(found.u, found.weights, unit), target, atol=1e-3)
    assert np.max(found.weights[4096:]) < 1e-6


def test_a_draw_without_weight_does_not_make_a_scale_infinite() -> None:
    """Its scale is beyond all numbers, and so is nothing times that."""
    u = np.append(np.linspace(-1.0, 1.0, 8), 800.0)[:, None]
    weights = np.append(np.full(8, 1.0), 1e-90) / 8.0
    drawn = Drawn(u, u[:, 0], u[:, 0], weights, np.arange(9) % 8, 0.0, 0.0, np.zeros(1), np.eye(1))
    kept = with_weight(drawn, u)
    assert_allclose(kept.weights @ np.exp(kept.u[:, 0]), np.mean(np.exp(u[:8, 0])), rtol=1e-12)
    assert len(kept.scramble) == len(kept.log_proposal) == len(kept.log_density) == 8


def test_coordinates_are_told_on_the_scales_that_variables_are_declared_on() -> None:
    labels = ("w_simplex__[0]", "mu", "w_simplex__[1]", "p_logodds__", "tau_log__")
    phi = np.array([[0.2, 9.0, -0.7, -1.0, 0.5], [1e3, 0.0, 0.0, 1e3, 1e3]])
    w = np.exp([0.2, -0.7, 0.5])
    natural = declared(labels, phi)
    assert_allclose(natural[0], [*(w / w.sum()), 1 / (1 + np.exp(1.0)), np.exp(0.5)])
    assert np.all(np.isfinite(natural))
    assert declared(("mu",), phi[:, :1]).shape == (2, 0)
