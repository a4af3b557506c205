"""Whitened points, weighted moments, and the numbers that say how far to trust them."""

from __future__ import annotations

import hashlib

import arviz as az
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

from fedppl.local import _marginal
from fedppl.numerics.importance import (
    control_coefficients,
    controlled_moments,
    effective_size,
    enough_points,
    has_enough_points,
    normalise,
    pareto_k,
    resample,
    skewness,
    weighted_moments,
)
from fedppl.numerics.streams import cached, stream_of, whitened_points
from fedppl.types import Array

# --- points ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, points", [(1, 16), (1, 97), (3, 96), (8, 90), (30, 64), (2, 4096)])
def test_sample_mean_is_zero_and_sample_covariance_the_identity(size: int, points: int) -> None:
    z = whitened_points(size, points, 5)
    assert z.shape[1] == size
    assert len(z) >= points
    assert_allclose(z.mean(axis=0), 0, atol=1e-12)
    assert_allclose(z.T @ z / len(z), np.eye(size), atol=1e-12)


def test_fewer_points_than_dimensions_are_raised_to_what_whitening_needs() -> None:
    # the covariance of S antithetic pairs has rank at most S: it takes size + 1 pairs
    assert whitened_points(30, 2, 0).shape == (62, 30)


def test_points_are_antithetic() -> None:
    # so that every odd moment is zero: an odd log weight moves no variance
    z = whitened_points(4, 128, 1)
    assert_allclose(z[:64], -z[64:], atol=1e-12)
    assert_allclose(np.mean(z**3, axis=0), 0, atol=1e-12)


def test_streams_are_different_scrambles_and_each_is_kept() -> None:
    first, again, other = (whitened_points(2, 64, stream) for stream in (0, 0, 1))
    assert first is again
    # 32 pairs of each, none near one of the other's
    assert np.abs(first - other).max(axis=1).min() > 1e-6
    with pytest.raises(ValueError, match="read-only"):
        first[0, 0] = 1.0


def test_points_are_normal() -> None:
    # Kolmogorov's distance of 1024 independent normals is about 0.03; a scrambled Sobol set is closer.
    z = whitened_points(3, 1024, 2)
    for coordinate in z.T:
        assert stats.kstest(coordinate, "norm").statistic < 0.01
    assert_allclose(np.mean(z**4, axis=0), 3, atol=0.1)


def test_the_stream_of_a_client_is_fixed_by_its_name() -> None:
    # by digest, not hash(): equal in another process, whatever PYTHONHASHSEED
    assert stream_of("clinic 7") == int(hashlib.blake2b(b"clinic 7", digest_size=1).hexdigest(), 16)
    assert len({stream_of(f"client {k}") for k in range(1000)}) > 200
    assert {stream_of(f"client {k}") for k in range(1000)} <= set(range(256))


# --- weights --------------------------------------------------------------------------------------------------------


def test_weights_are_normalised_whatever_their_size() -> None:
    # far outside the range of exp; −inf is no weight at all
    weights = normalise(np.array([0.0, np.log(3.0), -np.inf]) + 5000)
    assert_allclose(weights, [0.25, 0.75, 0.0], rtol=1e-12)


def test_a_control_variate_hardly_adds_variance() -> None:
    """Of a control with the right tails it takes the error away, of one with made-up tails it adds hardly any."""
    errors: dict[str, list[list[float]]] = {"right": [], "made up": []}
    for seed in range(200):
        x = 2.0 * np.random.default_rng(seed).standard_t(4, 2_000)
        log_proposal = stats.t.logpdf(x / 2.0, 4)
        weights = normalise(stats.norm.logpdf(x) - log_proposal)
        for name, log_control, second in (
            ("right", stats.norm.logpdf(x, scale=1.02), 1.02**2),
            ("made up", stats.t.logpdf(x, 3), 3.0),
        ):
            control = normalise(log_control - log_proposal)
            squares = x[:, None] ** 2
            coefficient = float(control_coefficients(squares, weights, control)[0])
            off = second - float((control @ squares)[0])
            errors[name].append([float((weights @ squares)[0]) + share * off for share in (0.0, coefficient, 1.0)])
    without, chosen, whole = np.std(errors["right"], axis=0)
    assert chosen < 0.2 * without  # as the whole of it does
    assert chosen < 1.1 * whole
    without, chosen, whole = np.std(errors["made up"], axis=0)
    assert chosen < 1.15 * without
    assert whole > 1.5 * without, (without, chosen, whole)


def test_effective_size() -> None:
    assert effective_size(np.full(40, 1 / 40)) == pytest.approx(40)
    assert effective_size(np.array([1.0, 0, 0])) == 1
    assert effective_size(np.array([0.5, 0.5, 0, 0])) == pytest.approx(2)
    assert effective_size(np.array([0.75, 0.25])) == pytest.approx(1.6)  # 1 / (9/16 + 1/16)


def test_weighted_moments_are_those_of_the_repeated_sample(rng: np.random.Generator) -> None:
    points, counts = rng.normal(size=(30, 3)) ** 3, rng.integers(0, 5, size=30)
    found = weighted_moments(points, counts / counts.sum())
    repeated = np.repeat(points, counts, axis=0)
    assert_allclose(found.mean, repeated.mean(axis=0), rtol=1e-12)
    assert_allclose(found.covariance, np.cov(repeated, rowvar=False, bias=True), rtol=1e-10, atol=1e-12)
    assert_array_equal(found.covariance, found.covariance.T)


def test_skewness_is_that_of_the_repeated_sample(rng: np.random.Generator) -> None:
    points, counts = rng.normal(size=(30, 3)) ** 3, rng.integers(0, 5, size=30)
    repeated = np.repeat(points, counts, axis=0)
    assert_allclose(skewness(points, counts / counts.sum()), stats.skew(repeated), rtol=1e-10)


def test_resampling_is_systematic(rng: np.random.Generator) -> None:
    # every index comes up ⌊n w⌋ or ⌈n w⌉ times: no more Monte Carlo error than that
    weights = normalise(rng.normal(size=50))
    weights[7] = 0.0
    weights /= weights.sum()
    indices = resample(weights, 1000, rng)
    counts = np.bincount(indices, minlength=50)
    assert indices.shape == (1000,)
    assert np.all(np.abs(counts - 1000 * weights) < 1)
    assert counts[7] == 0
    # in random order, so that chains cut from them are alike: sorted indices would correlate with their place by 1
    assert abs(np.corrcoef(indices, np.arange(1000))[0, 1]) < 4 / np.sqrt(1000)


def test_resampling_is_unbiased(rng: np.random.Generator) -> None:
    # one draw at a time is a draw from the weights: counts of 4000 within 4 binomial sds
    weights = np.array([0.1, 0.2, 0.7])
    counts = np.bincount([resample(weights, 1, rng)[0] for _ in range(4000)], minlength=3)
    assert np.all(np.abs(counts - 4000 * weights) < 4 * np.sqrt(4000 * weights * (1 - weights)))


# --- Pareto k -------------------------------------------------------------------------------------------------------


def arviz_k(log_weights: np.ndarray) -> float:
    """ArviZ's estimate: az.psislw until 0.x, arviz_stats from 1.0."""
    if hasattr(az, "psislw"):
        return float(az.psislw(log_weights)[1])
    from arviz_stats.base import array_stats

    return float(array_stats.psislw(-log_weights)[1])  # takes log likelihoods, whose weights are inverse


@pytest.mark.parametrize("shape", [0.2, 0.5, 0.8, 1.2])
def test_pareto_k_of_a_known_tail(shape: float, rng: np.random.Generator) -> None:
    # w = U^(−k) is Pareto with shape k. The tail is 3 √10000 = 300 points, the sd of the estimate (1 + k) / √300,
    # and the prior draws it towards ½ by 10 points' worth.
    log_weights = shape * rng.exponential(size=10_000)
    expected = (300 * shape + 10 * 0.5) / 310
    assert abs(pareto_k(log_weights) - expected) < 4 * (1 + shape) / np.sqrt(300)


@pytest.mark.parametrize("shape", [0.1, 0.4, 0.7, 1.0])
@pytest.mark.parametrize("count", [100, 400, 2500])
def test_pareto_k_is_arviz_own(shape: float, count: int, rng: np.random.Generator) -> None:
    # sizes whose tail, min(n / 5, 3 √n), is a whole number: ArviZ rounds others up, this one down
    log_weights = shape * rng.exponential(size=count)
    assert pareto_k(log_weights) == pytest.approx(arviz_k(log_weights), abs=1e-6)
    # of normal weights, whose tail is not Pareto, and wherever their level lies
    other = 2 * rng.normal(size=count)
    assert pareto_k(other + 300) == pytest.approx(arviz_k(other), abs=1e-6)


def test_pareto_k_of_weights_without_a_tail() -> None:
    assert pareto_k(np.full(100, -3.0)) == -np.inf
    assert pareto_k(np.full(100, -3.0) + 1e-12 * np.arange(100)) == -np.inf
    # half the points share the largest weight
    assert pareto_k(np.where(np.arange(100) < 50, 0.0, -1.0)) == -np.inf


def test_pareto_k_of_too_few_points_is_bad() -> None:
    # 24 points have a tail of 4: no estimate, so no trust
    assert pareto_k(np.linspace(0, 1, 24)) == np.inf
    assert pareto_k(np.full(100, -np.inf)) == np.inf
    assert np.isfinite(pareto_k(np.linspace(0, 1, 25)))


def test_pareto_k_leaves_out_points_without_weight(rng: np.random.Generator) -> None:
    log_weights = rng.normal(size=400)
    with_holes = np.insert(log_weights, [3, 100, 399], -np.inf)
    assert pareto_k(with_holes) == pareto_k(log_weights)


# --- control variates -----------------------------------------------------------------------------------------------


def quadratic(z: np.ndarray, slope: np.ndarray, curvature: np.ndarray) -> np.ndarray:
    """b·z + ½ zᵀCz: normal x exp of it is N((I − C)⁻¹ b, (I − C)⁻¹)."""
    return z @ slope + 0.5 * np.einsum("si,ij,sj->s", z, curvature, z)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_quadratic_log_weights_give_exact_moments(size: int, rng: np.random.Generator) -> None:
    key = (size, enough_points(size, 96), 3)
    z = whitened_points(*key)
    root = rng.normal(size=(size, size))
    curvature = 0.5 * np.eye(size) - root @ root.T  # eigenvalues at most ½: both wider and narrower than N(0, I)
    slope = rng.normal(size=size)
    log_weights = quadratic(z, slope, curvature) + 17.0
    found, remainder, error = controlled_moments(z, log_weights, normalise(log_weights), key)
    covariance = np.linalg.inv(np.eye(size) - curvature)
    assert_allclose(found.covariance, covariance, atol=1e-10)
    assert_allclose(found.mean, covariance @ slope, atol=1e-10)
    assert remainder < 1e-10
    assert error == 0
    # which the plain weighted moments at as many points do not
    plain = weighted_moments(z, normalise(log_weights))
    assert np.abs(plain.covariance - covariance).max() > 1e-4


def nearly_quadratic(z: np.ndarray) -> np.ndarray:
    """A log weight with a cubic and a bounded part beside the quadratic one, in two dimensions."""
    curvature = np.array([[-0.6, 0.3], [0.3, 0.2]])
    return quadratic(z, np.array([0.4, -0.2]), curvature) - 0.02 * z[:, 0] ** 3 + 0.1 * np.sin(z[:, 0] + z[:, 1])


def test_nearly_quadratic_log_weights_have_a_small_part_of_the_error() -> None:
    # truth: Gauss-Hermite with 60 x 60 nodes, against which the error of all 32 streams is taken
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    grid = np.stack(np.meshgrid(nodes, nodes), axis=-1).reshape(-1, 2)
    truth = weighted_moments(grid, normalise(nearly_quadratic(grid) + np.log(np.outer(weights, weights).ravel())))
    errors: dict[str, list[float]] = {"plain": [], "controlled": []}
    for stream in range(32):
        key = (2, 96, stream)
        z = whitened_points(*key)
        log_weights = nearly_quadratic(z)
        w = normalise(log_weights)
        both = {"plain": weighted_moments(z, w), "controlled": controlled_moments(z, log_weights, w, key)[0]}
        for name, found in both.items():
            difference = np.append(found.mean - truth.mean, found.covariance - truth.covariance)
            errors[name].append(np.sum(difference**2))
    plain, controlled = (np.sqrt(np.mean(errors[name])) for name in ("plain", "controlled"))
    assert controlled < plain / 5
    assert controlled < 0.05  # plain: 0.15 to 0.2


def test_with_many_points_the_remainder_is_integrated_too() -> None:
    """The quadratic is a control variate, no approximation: its own moments are off by far more than the answer is."""
    key = (2, 8192, 0)
    z = whitened_points(*key)

    def log_weight(x: np.ndarray) -> np.ndarray:
        return nearly_quadratic(x) + 0.6 * np.sin(2 * x[:, 0]) + 0.5 * np.cos(2 * x[:, 1])

    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    grid = np.stack(np.meshgrid(nodes, nodes), axis=-1).reshape(-1, 2)
    truth = weighted_moments(grid, normalise(log_weight(grid) + np.log(np.outer(weights, weights).ravel())))
    found, _, _ = controlled_moments(z, log_weight(z), normalise(log_weight(z)), key)
    # two standard errors of independent points with a remainder of sd 0.6: 2 x 0.6 / √8192
    assert_allclose(found.mean, truth.mean, atol=0.013)
    assert_allclose(found.covariance, truth.covariance, atol=0.013)
    # moments of the fitted quadratic alone, by least squares here
    design = np.column_stack([np.ones(len(z)), z, z[:, 0] ** 2, z[:, 0] * z[:, 1], z[:, 1] ** 2])
    _, b1, b2, c11, c12, c22 = np.linalg.lstsq(design, log_weight(z), rcond=None)[0]
    covariance = np.linalg.inv(np.eye(2) - np.array([[2 * c11, c12], [c12, 2 * c22]]))
    assert np.abs(covariance @ [b1, b2] - truth.mean).max() > 0.03
    assert np.abs(covariance - truth.covariance).max() > 0.03


def test_the_remainder_is_what_a_quadratic_leaves_unexplained() -> None:
    # 0.3 (z³ − 3z) / √6 has mean 0, sd 0.3, and no part in the span of 1, z, z² under a standard normal
    key = (1, 4096, 0)
    z = whitened_points(*key)
    log_weights = quadratic(z, np.array([0.5]), np.array([[-0.5]])) + 0.3 * (z[:, 0] ** 3 - 3 * z[:, 0]) / np.sqrt(6)
    _, remainder, _ = controlled_moments(z, log_weights, normalise(log_weights), key)
    # the tails of the sample are finite: a few per cent less
    assert remainder == pytest.approx(0.3, rel=0.1)


def test_beyond_half_an_sd_of_remainder_the_error_is_told_and_true() -> None:
    """Over 64 streams: the root mean square of actual errors, in sds, against the mean of those that were stated.

    Antithetic points of a Sobol set do no worse than the independent ones that the estimate is of.
    """

    def log_weight(x: np.ndarray) -> np.ndarray:
        return np.asarray(1.5 * np.sin(3 * x[:, 0]) + 0.3 * x[:, 1])

    grid = np.linspace(-9, 9, 20_001)
    density = np.exp(-0.5 * grid**2 + 1.5 * np.sin(3 * grid))
    density /= density.sum()
    mean = density @ grid
    sd = np.sqrt(density @ (grid - mean) ** 2)
    actual, stated = [], []
    for stream in range(64):
        key = (2, 96, stream)
        z = whitened_points(*key)
        found, remainder, error = controlled_moments(z, log_weight(z), normalise(log_weight(z)), key)
        assert remainder > 0.5 and error > 0
        actual.append((found.mean[0] - mean) / sd)
        stated.append(error)
    assert np.sqrt(np.mean(np.square(actual))) < 1.2 * np.mean(stated)
    assert np.mean(stated) < 0.3


@pytest.mark.parametrize("case", ["a point without weight", "a quadratic that is no density", "hardly a density"])
def test_weights_that_no_gaussian_fits_fall_back_to_plain_moments(case: str) -> None:
    key = (2, 96, 0)
    z = whitened_points(*key)
    curvature = {"a quadratic that is no density": 1.2, "hardly a density": 0.97}.get(case, 0.0)
    log_weights = quadratic(z, np.array([0.3, 0.0]), curvature * np.eye(2))
    if case == "a point without weight":
        log_weights[5] = -np.inf
    weights = normalise(log_weights)
    (found, _, error), plain = controlled_moments(z, log_weights, weights, key), weighted_moments(z, weights)
    assert_array_equal(found.mean, plain.mean)
    assert_array_equal(found.covariance, plain.covariance)
    # standard error of a weighted mean of independent points, in sds
    parts = weights[:, None] * (z - plain.mean)
    assert_allclose(error, np.sqrt(np.max(np.sum(parts**2, axis=0) / np.diag(plain.covariance))), rtol=1e-10)
    assert error > 0.05


def test_controlled_covariance_stays_positive_definite() -> None:
    # a steep cubic, which a quadratic misses by far
    for stream in range(20):
        key = (1, 32, stream)
        z = whitened_points(*key)
        log_weights = -(np.abs(3 * z[:, 0] + 2) ** 3)
        found, _, _ = controlled_moments(z, log_weights, normalise(log_weights), key)
        assert found.covariance[0, 0] > 0


def test_points_are_raised_to_twice_the_coefficients_of_a_quadratic() -> None:
    assert enough_points(3, 16) == 2 * 10
    assert enough_points(3, 96) == 96
    assert enough_points(30, 96) == 2 * 496
    assert enough_points(40, 96) == 2 * 861


def test_from_31_coordinates_on_gradients_take_the_place_of_values() -> None:
    """Twice the coefficients of a quadratic are 992 in 30 coordinates and 1056 in 31."""
    assert has_enough_points(30) and not has_enough_points(31)
    taken = []

    def values(draws: np.ndarray) -> np.ndarray:
        taken.append("values")
        return np.asarray(0.1 * draws.sum(axis=1))

    def gradients(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        taken.append("gradients")
        return np.asarray(0.1 * draws.sum(axis=1)), np.full_like(draws, 0.1)

    for size in (30, 31):
        found = _marginal.moments(_marginal.Factor(values, gradients), np.ones(size), 2 * np.eye(size), 16, 3)
        assert found is not None
        # N(1, 4) e^{x / 10} is N(1.4, 4)
        assert_allclose(found.mean, 1.4, atol=1e-8)
        assert_allclose(found.covariance, 4 * np.eye(size), atol=1e-8)
    assert taken == ["values", "gradients"]


def test_points_are_kept_by_their_bytes_not_by_their_number() -> None:
    """Of 200 clients with 30 shared coordinates, designs alone would take gigabytes."""
    made: list[int] = []

    @cached(most_bytes=100 * 8 * 3)
    def points(size: int) -> Array:
        made.append(size)
        return np.zeros(size)

    for size in (100, 101, 98, 100, 99, 98, 100, 99, 101):
        points(size)
    assert made == [100, 101, 98, 99, 101]  # of the first three 101 was used longest ago when 99 came
    assert not points(101).flags.writeable
