"""Coordinates of a posterior: there and back, and the slope that a density takes on the way."""

from __future__ import annotations

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose
from scipy import stats

from fedppl.model.graph import SdsAndPartials
from fedppl.model.interpreted import PYTHON_MODE
from fedppl.numerics.coordinates import (
    Coordinates,
    Stretch,
    coordinates_of,
    log_slope,
    misfit,
    of_phi,
    plain,
    stretch_of,
    to_phi,
)
from fedppl.numerics.importance import normalise
from fedppl.types import SDS_AND_PARTIALS, Array, Variable, coordinate_labels


def _chosen(n: int, rng: np.random.Generator) -> tuple[Coordinates, Array]:
    """Coordinates of two means, a covariance of n effects and a scale, and points."""
    variables = (Variable("mu", (2,), "", None), Variable("root", (n * (n + 1) // 2,), SDS_AND_PARTIALS, None))
    labels = coordinate_labels((*variables, Variable("tau", (), "log", None)))
    phi = rng.normal(size=(20, len(labels)))
    return coordinates_of(labels, np.array([len(labels) - 1]), 0.5 * rng.normal(size=len(labels))), phi


def _stretched(coordinates: Coordinates, m: int, rng: np.random.Generator) -> Coordinates:
    """Two locations, along directions of their own, that spread with the last scale and the one before it."""
    scales, some = np.array([m - 1, m - 2]), rng.normal(size=(2, 2))
    stretch = Stretch(np.array([0, 1]), some[0], some, scales, some[1], np.array([2.0, -1.0]), rng.uniform(size=(2, 2)))
    return coordinates._replace(stretch=stretch)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_points_come_back_and_the_slope_is_that_of_differences(n: int) -> None:
    rng = np.random.default_rng(n)
    coordinates, phi = _chosen(n, rng)
    assert len(coordinates.blocks) == 1
    if n == 3:
        coordinates = _stretched(coordinates, phi.shape[1], rng)
    assert_allclose(to_phi(of_phi(phi, coordinates), coordinates), phi, atol=1e-10)
    step, m = 1e-5, phi.shape[1]
    ends = phi[:, None] + step * np.concatenate([np.eye(m), -np.eye(m)])
    u = of_phi(ends.reshape(-1, m), coordinates).reshape(len(phi), 2, m, m)
    jacobian = (u[:, 0] - u[:, 1]) / (2.0 * step)
    assert_allclose(log_slope(phi, coordinates), -np.linalg.slogdet(jacobian)[1], atol=1e-6)


def test_a_logarithm_is_that_of_the_covariance() -> None:
    """At the center it is 0, and along a multiple c of the center's covariance log c times the identity."""
    n = 3
    coordinates, _ = _chosen(n, np.random.default_rng(0))
    (block,) = coordinates.blocks
    entries = block.root[np.tril_indices(n)]
    transform = SdsAndPartials(n)
    for factor in (1.0, 2.5):
        root = np.sqrt(factor) * entries
        phi = np.zeros((1, 2 + len(entries) + 1))
        phi[0, block.places] = transform.forward(pm.math.stack(list(root))).eval(mode=PYTHON_MODE)
        logarithm = np.zeros((n, n))
        logarithm[np.tril_indices(n)] = of_phi(phi, coordinates)[0, block.places]
        assert_allclose(logarithm, np.log(factor) * np.eye(n), atol=1e-10)


def test_covariances_with_a_folded_scale_stay_as_they_are() -> None:
    variables = (Variable("root", (3,), SDS_AND_PARTIALS, None),)
    labels = coordinate_labels(variables)
    folded = np.array([2])
    assert not coordinates_of(labels, folded, np.zeros(3)).blocks
    assert len(coordinates_of(labels, folded[:0], np.zeros(3)).blocks) == 1


def test_a_scale_is_itself_near_zero_and_its_logarithm_far_out() -> None:
    coordinates = coordinates_of(("tau_log__",), np.array([0]), np.zeros(1))
    u = of_phi(np.array([[-9.0], [9.0]]), coordinates)[:, 0]
    assert_allclose(u, [np.exp(-9.0), 9.0 + np.log(2.0)], rtol=1e-6)
    far = np.array([[-40.0], [0.0], [700.0]])
    assert_allclose(to_phi(of_phi(far, coordinates), coordinates), far, rtol=1e-12)


def _kurtosis(x: Array) -> Array:
    return np.asarray(np.mean((x - x.mean(axis=0)) ** 4, axis=0) / np.var(x, axis=0) ** 2)


@pytest.mark.parametrize(("label", "power"), [("tau_log__", 1.0), ("precision_log__", -0.5)])
def test_locations_that_spread_with_a_scale_are_normal_once_stretched(label: str, power: float) -> None:
    """Two slopes that the effects of few groups move together, by a direction of neither."""
    rng, count, together = np.random.default_rng(3), 20_000, np.array([1.0, 0.8])
    logs = rng.normal(0, 1.0, count)
    slopes = rng.normal(size=(count, 2)) @ [[0.3, 0.1], [0.0, 0.4]]
    slopes += together * (np.exp(power * logs) * rng.normal(size=count))[:, None]
    phi = np.column_stack([slopes, logs, rng.normal(size=count)])
    labels = ("slope[0]", "slope[1]", label, "other")
    equal = np.full(count, 1 / count)
    coordinates = plain()._replace(stretch=stretch_of(labels, phi, equal))
    across = np.array([[1.0, 0.0], [0.0, 1.0], together, [0.8, -1.0]])
    assert np.all(_kurtosis(slopes @ across[:3].T) > 7)
    error = np.sqrt(96 / 1024)  # of a normal's kurtosis by the points that the directions are chosen by
    assert_allclose(_kurtosis(of_phi(phi, coordinates)[:, :2] @ across.T), 3.0, atol=4 * error)


def test_weighted_points_tell_the_same_as_draws() -> None:
    """Candidates of a wider t: those of largest weight alone would have neither a center nor tails."""
    rng, count = np.random.default_rng(5), 8192
    wide = stats.multivariate_t(np.zeros(2), 2.0 * np.eye(2), df=4, seed=rng)
    phi = wide.rvs(count)
    spread = np.sqrt(0.1 + np.exp(2.0 * phi[:, 1]))
    logs = stats.norm.logpdf(phi[:, 0], 0, spread) + stats.norm.logpdf(phi[:, 1]) - wide.logpdf(phi)
    weights = normalise(logs)
    stretch = stretch_of(("mu", "tau_log__"), phi, weights)
    ratio = _variances_at(stretch, np.array([[0.0, 2.0]])) / _variances_at(stretch, np.array([[0.0, -1.0]]))
    assert 0.4 < ratio[0, 0] / ((0.1 + np.exp(4.0)) / (0.1 + np.exp(-2.0))) < 2.5  # growth is on a grid of √10


def _variances_at(stretch: Stretch, phi: Array) -> Array:
    """By the slope of the coordinates: half its logarithm is that of the variance along one location."""
    return np.asarray(np.exp(2.0 * log_slope(phi, plain()._replace(stretch=stretch))))[:, None]


def test_where_a_stretch_has_its_center_is_no_misfit() -> None:
    rng = np.random.default_rng(6)
    phi = np.column_stack([rng.normal(size=500), rng.normal(size=500)])
    phi[:, 0] *= np.sqrt(0.1 + np.exp(2.0 * phi[:, 1]))
    equal, places = np.full(500, 1 / 500), np.array([0])
    stretch = stretch_of(("mu", "tau_log__"), phi, equal)
    moved = phi + [0.7, 0.0]
    shifted = stretch._replace(center=stretch.center + 0.7)
    assert_allclose(misfit(moved, equal, shifted, places), misfit(phi, equal, stretch, places))
    assert misfit(phi, equal, stretch, places) < misfit(phi, equal, plain().stretch, places) - 0.1


def test_locations_that_spread_with_no_scale_stay_as_they_are() -> None:
    rng = np.random.default_rng(4)
    labels = ("slope[0]", "slope[1]", "tau_log__", "sigma_log__")
    for count in (60, 2000):
        phi = rng.normal(size=(count, 4))
        assert not len(stretch_of(labels, phi, np.full(count, 1 / count)).places)
        assert not len(stretch_of(labels[:2], phi[:, :2], np.full(count, 1 / count)).places)


def test_plain_coordinates_are_those_that_are_sampled() -> None:
    phi = np.random.default_rng(1).normal(size=(5, 3))
    assert np.array_equal(of_phi(phi, plain()), phi) and np.array_equal(to_phi(phi, plain()), phi)
    assert np.array_equal(log_slope(phi, plain()), np.zeros(5))
