"""Is a prior Gaussian, and which Gaussian stands in for one that is not: on densities written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from fedppl import DeclarationError, gaussian
from fedppl.gaussian import Gaussian
from fedppl.numerics.prior import SharedPrior, gaussian_prior, moment_match

MEAN = np.array([0.4, -2.0, 30.0])
COVARIANCE = np.array([[2.0, 0.3, 0.0], [0.3, 0.5, -0.2], [0.0, -0.2, 1.0]])


def line(mean: Any, covariance: Any) -> Callable[[Any], Any]:
    """Gradient of a Gaussian log density."""
    precision = np.linalg.inv(covariance)
    return lambda phi: precision @ (np.asarray(mean) - phi)


def student(mean: float, scale: float, nu: float = 5.0) -> Callable[[Any], Any]:
    """Gradient of a Student t log density: −(ν + 1) z / (ν + z²) / scale."""

    def gradient(phi: Any) -> Any:
        z = (phi - mean) / scale
        return -(nu + 1) * z / (nu + z**2) / scale

    return gradient


def test_a_gaussian_gradient_gives_its_natural_parameters() -> None:
    found = gaussian_prior(line(MEAN, COVARIANCE), np.zeros(3))
    assert found is not None
    assert_allclose(gaussian.mean(found), MEAN, rtol=1e-10)
    assert_allclose(gaussian.covariance(found), COVARIANCE, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("mean", "scale"), [(0.0, 1e-4), (5.0, 1e-3), (-1e4, 1e5), (1e6, 1.0)])
def test_scale_and_place_do_not_hide_a_gaussian(mean: float, scale: float) -> None:
    found = gaussian_prior(line([mean], [[scale**2]]), np.array([mean]))
    assert found is not None
    assert_allclose([gaussian.mean(found)[0], gaussian.standard_deviations(found)[0]], [mean, scale], rtol=1e-6)


@pytest.mark.parametrize(("mean", "scale"), [(0.0, 1.0), (0.0, 1e-3), (0.0, 1e5), (1e4, 1e-3), (-300.0, 20.0)])
def test_neither_does_it_make_a_student_t_a_gaussian(mean: float, scale: float) -> None:
    assert gaussian_prior(student(mean, scale), np.array([mean])) is None


def test_a_gradient_that_is_not_finite_is_not_gaussian() -> None:
    assert gaussian_prior(lambda phi: np.full_like(phi, np.nan), np.zeros(2)) is None


def test_one_coordinate_that_is_not_gaussian_is_enough() -> None:
    def gradient(phi: Any) -> Any:
        return np.array([-phi[0], student(0.0, 1.0)(phi[1])])

    assert gaussian_prior(gradient, np.zeros(2)) is None


@pytest.mark.parametrize("covector", [np.zeros(2), np.array([1.0, 0.0])])
def test_improper_gaussians_are_refused(covector: Any) -> None:
    """Constant density, and one that grows along an axis: Q has a zero eigenvalue."""
    with pytest.raises(DeclarationError, match=r"improper .* proper prior, for example pm.Normal\(0, 10\)"):
        gaussian_prior(lambda phi: covector - np.array([0.0, 1.0]) * phi, np.zeros(2))


def test_moment_match_of_light_tails_is_by_moments(rng: np.random.Generator) -> None:
    """Standard errors of a mean and a variance of n normals: σ/√n and σ² √(2/n)."""
    draws = MEAN + rng.normal(size=(4000, 3)) @ np.linalg.cholesky(COVARIANCE).T
    found = moment_match(draws)
    assert_allclose(gaussian.mean(found), draws.mean(axis=0), rtol=1e-10)
    assert_allclose(gaussian.covariance(found), np.cov(draws, rowvar=False), rtol=1e-8)
    assert np.all(np.abs(gaussian.mean(found) - MEAN) < 4 * np.sqrt(np.diag(COVARIANCE) / 4000))


def test_moment_match_of_heavy_tails_is_by_quartiles(rng: np.random.Generator) -> None:
    """Cauchy quartiles are median ± scale, so sd = 2 scale / 1.349; standard error of a quartile ≈ π scale / √n."""
    found = moment_match(3.0 + 0.5 * rng.standard_cauchy(size=(4000, 1)))
    assert gaussian.mean(found)[0] == pytest.approx(3.0, abs=4 * np.pi * 0.5 / np.sqrt(4000))
    assert gaussian.standard_deviations(found)[0] == pytest.approx(1.0 / 1.349, rel=0.15)


def test_log_ratio_and_its_derivatives() -> None:
    """p = Student t, N_0 = N(1, 4): log p − log N_0 up to a constant, gradient and Hessian in closed form."""
    n0 = Gaussian(np.array([0.25]), np.array([[0.25]]))
    prior = SharedPrior(
        log_density=lambda phi: -3.0 * np.log1p(phi[:, 0] ** 2 / 5),
        gradients=student(0.0, 1.0),
        gaussian=n0,
        is_gaussian=False,
    )
    phi = np.array([[0.3], [-2.0], [4.0]])
    expected = -3.0 * np.log1p(phi[:, 0] ** 2 / 5) + 0.125 * (phi[:, 0] - 1) ** 2
    assert_allclose(np.diff(prior.log_ratio(phi)), np.diff(expected), rtol=1e-12)
    x = 0.7
    assert_allclose(prior.log_ratio_gradient(np.array([x])), [-6 * x / (5 + x**2) + 0.25 * (x - 1)], rtol=1e-12)
    curvature = -6 * (5 - x**2) / (5 + x**2) ** 2 + 0.25
    assert_allclose(prior.log_ratio_hessian(np.array([x])), [[curvature]], rtol=1e-6)


def test_the_ratio_of_a_gaussian_prior_is_one() -> None:
    prior = SharedPrior(lambda phi: 1 / 0, lambda phi: 1 / 0, Gaussian(np.zeros(2), np.eye(2)), is_gaussian=True)
    assert not np.any(prior.log_ratio(np.ones((3, 2))))
    assert not np.any(prior.log_ratio_gradient(np.ones(2)))
    assert not np.any(prior.log_ratio_hessian(np.ones(2)))


def test_a_prior_is_computed_once_at_the_same_points() -> None:
    """All clients of a process are asked there; what they get is one array, which none may change."""
    calls = []

    def log_density(phi: Any) -> Any:
        calls.append(len(phi))
        return -np.abs(phi).sum(axis=1)

    prior = SharedPrior(log_density, np.negative, Gaussian(np.zeros(2), np.eye(2)), False)
    points = np.arange(6.0).reshape(3, 2)
    first, again = prior.log_ratio(points), prior.log_ratio(points.copy())
    assert calls == [3]
    assert_allclose(again, -np.abs(points).sum(axis=1) + 0.5 * np.sum(points**2, axis=1))
    with pytest.raises(ValueError, match="read-only"):
        first += 1.0
    assert_allclose(prior.log_ratio(points + 1.0), prior.log_ratio(points + 1.0))
    assert calls == [3, 3]
    for k in range(2000):  # what is kept has an end
        prior.log_ratio(points + k)
    assert len(prior._cache) < 1000
