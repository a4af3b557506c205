"""Moments from gradients against closed forms and quadrature; a fitted t against densities whose moments are known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from fedppl.local import nested_laplace
from fedppl.numerics import importance
from fedppl.numerics.streams import whitened_points


@pytest.mark.parametrize("size", [31, 200])
def test_a_quadratic_log_weight_gives_its_gaussian_to_rounding(size: int) -> None:
    rng = np.random.default_rng(size)
    root = rng.normal(size=(size, size)) / np.sqrt(size)
    hessian, linear = -root @ root.T, rng.normal(size=size)
    z = whitened_points(size, importance.enough_gradients(size, 64), 3)
    found = importance.stein_moments(z, z @ linear + 0.5 * np.sum(z @ hessian * z, axis=1), linear + z @ hessian)
    assert found is not None
    covariance = np.linalg.inv(np.eye(size) - hessian)
    assert_allclose(found.moments.covariance, covariance, atol=1e-9)
    assert_allclose(found.moments.mean, covariance @ linear, atol=1e-9)
    assert found.remainder < 1e-9
    assert found.error < 1e-9
    assert_allclose(importance.skewness_by_gradients(z, found.off, np.eye(size)), 0, atol=1e-9)


def test_a_log_weight_that_is_no_quadratic_against_quadrature() -> None:
    # independent coordinates, each with the log weight a sin(z + 1) + b z: moments by quadrature of one of them. b
    # takes the mean gradient away, as it is away where q is right: then the quadratic is that of the density itself.
    size, a = 40, 0.3
    b = -a * np.exp(-0.5) * np.cos(1.0)
    z = whitened_points(size, 8 * importance.enough_gradients(size, 64), 1)
    found = importance.stein_moments(z, np.sum(a * np.sin(z + 1) + b * z, axis=1), a * np.cos(z + 1) + b)
    assert found is not None
    grid = np.linspace(-9, 9, 20_001)
    density = np.exp(-0.5 * grid**2 + a * np.sin(grid + 1) + b * grid)
    density /= density.sum()
    mean = density @ grid
    variance = density @ (grid - mean) ** 2
    skewness = density @ (grid - mean) ** 3 / variance**1.5
    # the remainder's second order is left to 1,312 points: sd of it is about .1, so .01 on average over coordinates
    assert_allclose(found.moments.mean.mean(), mean, atol=0.01)
    assert_allclose(np.diag(found.moments.covariance).mean(), variance, atol=0.015)
    assert np.max(np.abs(found.moments.mean - mean)) < 5 * max(found.error, 0.01)
    assert_allclose(importance.skewness_by_gradients(z, found.off, np.eye(size)).mean(), skewness, atol=0.03)


@pytest.mark.parametrize("size, many", [(40, 1), (40, 4), (120, 1)])
@pytest.mark.parametrize("a, b, c", [(0.3, 1.0, 0.0), (0.3, 0.5, -1.0), (0.1, 3.0, -1.0), (0.3, 0.2, 0.5)])
def test_the_error_of_moments_that_are_far_from_q_is_no_smaller_than_it_says(
    size: int, many: int, a: float, b: float, c: float
) -> None:
    """Log weights Σ a sin(z + 1) + b z + c z² / 2, by quadrature of one coordinate; the largest of many errors."""
    z = whitened_points(size, many * importance.enough_gradients(size, 64), 1)
    log_weights = np.sum(a * np.sin(z + 1) + b * z + c * z**2 / 2, axis=1)
    found = importance.stein_moments(z, log_weights, a * np.cos(z + 1) + b + c * z)
    assert found is not None
    grid = np.linspace(-12, 12, 20_001)
    density = np.exp(-0.5 * grid**2 + a * np.sin(grid + 1) + b * grid + c * grid**2 / 2)
    density /= density.sum()
    mean = density @ grid
    sd = np.sqrt(density @ (grid - mean) ** 2)
    assert np.max(np.abs(found.moments.mean - mean)) / sd < 2.5 * found.error


def test_weights_without_a_proper_quadratic_have_no_moments() -> None:
    z = whitened_points(31, 128, 0)
    assert importance.stein_moments(z, 0.5 * np.sum(z**2, axis=1), z) is None


def log_banana(x: np.ndarray) -> np.ndarray:
    """x₀ ~ N(1, 2²), x₁ | x₀ ~ N(x₀² / 4, 1)."""
    return -0.5 * ((x[:, 0] - 1) / 2) ** 2 - 0.5 * (x[:, 1] - x[:, 0] ** 2 / 4) ** 2


def test_a_t_fitted_to_a_banana_has_its_moments_and_knows_its_error() -> None:
    # E x₀² = 5, Var x₀² = 2·16 + 4·4·1 = 48, Cov(x₀, x₀²) = 2·1·4 = 8
    mean, covariance = np.array([1.0, 5 / 4]), np.array([[4.0, 2.0], [2.0, 1 + 48 / 16]])
    found = nested_laplace.sample(log_banana, np.zeros(2), np.eye(2), 7, 0.7)
    assert found is not None
    sd = np.sqrt(np.diag(covariance))
    assert np.max(np.abs(found.moments.mean - mean) / sd) < 5 * found.error
    assert found.error < 0.03
    assert_allclose(found.moments.covariance, covariance, rtol=0.1)


def test_a_start_far_too_narrow_and_off_is_found_back() -> None:
    found = nested_laplace.sample(lambda x: -0.5 * np.sum(x**2, axis=1), np.full(3, 4.0), 0.05 * np.eye(3), 0, 0.7)
    assert found is not None
    assert_allclose(found.moments.mean, 0, atol=0.05)
    assert_allclose(found.moments.covariance, np.eye(3), atol=0.1)


def test_a_density_whose_moments_do_not_exist_is_not_trusted() -> None:
    assert nested_laplace.sample(lambda x: -1.1 * np.log1p(x[:, 0] ** 2), np.zeros(1), np.eye(1), 0, 0.7) is None
    assert nested_laplace.sample(lambda x: np.full(len(x), -np.inf), np.zeros(1), np.eye(1), 0, 0.7) is None
