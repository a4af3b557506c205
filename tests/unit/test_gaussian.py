"""Gaussians in natural parameters against direct formulas and scipy.stats."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from scipy.stats import multivariate_normal

from fedppl import gaussian as ga
from fedppl.algorithms.one_shot.consensus import precision_from_draws
from fedppl.gaussian import Gaussian
from fedppl.types import LocalFailure
from tests.support.matrices import matrix, spd

Array = NDArray[np.float64]
few = settings(max_examples=20, derandomize=True, deadline=None, database=None)
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 6)
KINDS = ["full", "diagonal"]


def proper(rng: np.random.Generator, size: int, kind: str = "full", batch: tuple[int, ...] = ()) -> Gaussian:
    """Draw a proper Gaussian of either storage."""
    linear = rng.normal(size=(*batch, size))
    if kind == "diagonal":
        return Gaussian(linear, rng.uniform(0.2, 5.0, size=(*batch, size)))
    matrices = [spd(rng, size) for _ in range(int(np.prod(batch, dtype=int)))]
    return Gaussian(linear, np.array(matrices).reshape(*batch, size, size))


def improper(rng: np.random.Generator, size: int, kind: str = "full") -> Gaussian:
    """Draw a Gaussian whose precision has smallest eigenvalue −1 exactly up to rounding."""
    g = proper(rng, size, kind)
    if kind == "diagonal":
        g.precision[0] = -1.0
        return g
    shift = np.linalg.eigvalsh(g.precision)[0] + 1.0
    return Gaussian(g.linear, g.precision - shift * np.eye(size))


def scipy_of(g: Gaussian) -> Any:
    """Build the same distribution with scipy, by direct inversion."""
    inverse = np.linalg.inv(matrix(g))
    return multivariate_normal(inverse @ g.linear, (inverse + inverse.T) / 2)


def assert_same(a: Gaussian, b: Gaussian, rtol: float = 1e-12, atol: float = 1e-12) -> None:
    """Compare both natural parameters, shapes included."""
    assert a.precision.shape == b.precision.shape
    assert_allclose(a.linear, b.linear, rtol=rtol, atol=atol)
    assert_allclose(a.precision, b.precision, rtol=rtol, atol=atol)


# Algebra of densities


@given(seeds, sizes, st.sampled_from(KINDS), st.sampled_from(KINDS))
@few
def test_product_of_densities_up_to_a_constant(seed: int, size: int, first: str, second: str) -> None:
    """The sum log N_a(x) + log N_b(x) − log N_ab(x) must not depend on x."""
    rng = np.random.default_rng(seed)
    a, b = proper(rng, size, first), proper(rng, size, second)
    x = rng.normal(size=(7, size))
    ab = ga.product(a, b)
    rest = scipy_of(a).logpdf(x) + scipy_of(b).logpdf(x) - scipy_of(ab).logpdf(x)
    assert_allclose(rest, rest[0], rtol=1e-9, atol=1e-9)
    assert ab.precision.ndim == (1 if first == second == "diagonal" else 2)


def test_product_of_several_and_of_one() -> None:
    """Any number of factors adds up; none is refused because its size is unknown."""
    rng = np.random.default_rng(1)
    parts = [proper(rng, 3), improper(rng, 3), proper(rng, 3, "diagonal")]
    combined = ga.product(*parts)
    assert_allclose(combined.linear, sum(p.linear for p in parts))
    assert_allclose(combined.precision, sum(matrix(p) for p in parts))
    assert_same(ga.product(parts[0]), parts[0], rtol=0, atol=0)
    with pytest.raises(ValueError, match="one or more"):
        ga.product()


@given(seeds, sizes, st.sampled_from(KINDS), st.booleans())
@few
def test_quotient_undoes_product(seed: int, size: int, kind: str, indefinite: bool) -> None:
    """(a b) / b = a, also when b is improper."""
    rng = np.random.default_rng(seed)
    a = proper(rng, size, kind)
    b = improper(rng, size, kind) if indefinite else proper(rng, size, kind)
    assert_same(ga.quotient(ga.product(a, b), b), a)
    assert_allclose(ga.quotient(a, b).precision, a.precision - b.precision)


@given(seeds, sizes, st.sampled_from(KINDS), st.floats(-3.0, 3.0))
@few
def test_power_scales_the_log_kernel(seed: int, size: int, kind: str, exponent: float) -> None:
    """The log kernel of g^e is e times the log kernel of g."""
    rng = np.random.default_rng(seed)
    g, x = improper(rng, size, kind), rng.normal(size=(5, size))
    scaled = ga.power(g, exponent)
    assert_allclose(ga.log_kernel(scaled, x), exponent * ga.log_kernel(g, x), rtol=1e-11, atol=1e-11)
    assert scaled.precision.ndim == g.precision.ndim


def test_power_by_a_whole_number_is_repeated_product() -> None:
    """g³ = g g g and g⁰ is the neutral element."""
    g = proper(np.random.default_rng(2), 4)
    assert_same(ga.power(g, 3), ga.product(g, g, g))
    assert_same(ga.power(g, 0), Gaussian(np.zeros(4), np.zeros((4, 4))), rtol=0, atol=0)


# Moments


@given(seeds, sizes, st.sampled_from(KINDS))
@few
def test_moments_against_direct_inversion(seed: int, size: int, kind: str) -> None:
    """Mean, covariance and standard deviations, and back again."""
    rng = np.random.default_rng(seed)
    g = proper(rng, size, kind)
    sigma = np.linalg.inv(matrix(g))
    assert_allclose(ga.mean(g), sigma @ g.linear, rtol=1e-10, atol=1e-12)
    spread = ga.covariance(g)
    assert spread.shape == g.precision.shape
    assert_allclose(spread if kind == "full" else np.diag(spread), sigma, rtol=1e-10, atol=1e-12)
    assert_allclose(ga.standard_deviations(g), np.sqrt(np.diag(sigma)), rtol=1e-10)
    assert_same(ga.from_moments(ga.mean(g), spread), g, rtol=1e-9, atol=1e-9)


def test_results_are_exactly_symmetric() -> None:
    """Every matrix that comes out equals its transpose bit for bit, even if the input does not."""
    rng = np.random.default_rng(4)
    g = proper(rng, 7)
    skew = rng.normal(size=(7, 7))
    lopsided = Gaussian(g.linear, g.precision + skew - skew.T)
    sigma = ga.covariance(g)
    fixed, _ = ga.repair(improper(rng, 7), 0.1)
    draws = rng.normal(size=(20, 7))
    for result in (
        sigma,
        ga.from_moments(ga.mean(g), sigma).precision,
        ga.product(lopsided).precision,
        ga.quotient(lopsided, g).precision,
        fixed.precision,
        precision_from_draws(draws),
    ):
        assert_array_equal(result, result.T)
    assert_allclose(ga.mean(lopsided), ga.mean(g), rtol=1e-9)


@given(seeds, sizes)
@few
def test_affine_is_the_cholesky_factor_of_the_covariance(seed: int, size: int) -> None:
    """L is lower-triangular with positive diagonal and L Lᵀ = Q⁻¹, which makes it unique."""
    g = proper(np.random.default_rng(seed), size)
    centre, lower = ga.affine(g)
    assert_array_equal(lower, np.tril(lower))
    assert_allclose(lower, np.linalg.cholesky(np.linalg.inv(g.precision)), rtol=1e-9, atol=1e-11)
    assert_allclose(centre, ga.mean(g))


def test_affine_of_a_diagonal_is_its_standard_deviations() -> None:
    """The vector 1/√q."""
    centre, deviations = ga.affine(Gaussian(np.array([1.0, 2.0]), np.array([4.0, 0.25])))
    assert_array_equal(centre, [0.25, 8.0])
    assert_array_equal(deviations, [0.5, 2.0])


def test_units_do_not_matter() -> None:
    """Coordinates on scales 1e-8 and 1e8 keep full accuracy and are not taken for a defect."""
    rng = np.random.default_rng(5)
    g, units = proper(rng, 3), np.array([1e-8, 1.0, 1e8])
    rescaled = Gaussian(g.linear * units, g.precision * np.outer(units, units))
    assert ga.is_proper(rescaled) is True
    assert_allclose(ga.mean(rescaled) * units, ga.mean(g), rtol=1e-10)
    assert_allclose(ga.covariance(rescaled) * np.outer(units, units), ga.covariance(g), rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_draws_have_the_right_moments(kind: str) -> None:
    """Sample mean and covariance agree within 5 Monte Carlo standard errors."""
    g, n = proper(np.random.default_rng(6), 3, kind), 20_000
    draws = ga.draw(g, np.random.default_rng(7), n)
    assert draws.shape == (n, 3)
    sigma = np.linalg.inv(matrix(g))
    variances = np.diag(sigma)
    assert (np.abs(draws.mean(axis=0) - sigma @ g.linear) < 5 * np.sqrt(variances / n)).all()
    error = np.sqrt((np.outer(variances, variances) + sigma**2) / n)
    assert (np.abs(np.cov(draws.T) - sigma) < 5 * error).all()


def test_draws_are_the_affine_map_of_the_generator() -> None:
    """One generator state gives one set of draws, μ + z Lᵀ."""
    g = proper(np.random.default_rng(8), 4)
    centre, lower = ga.affine(g)
    normal = np.random.default_rng(9).standard_normal((6, 4))
    assert_allclose(ga.draw(g, np.random.default_rng(9), 6), centre + normal @ lower.T, rtol=1e-14)
    assert ga.draw(g, np.random.default_rng(9), 1).shape == (1, 4)
    with pytest.raises(ValueError, match="draws is 0"):
        ga.draw(g, np.random.default_rng(9), 0)


# Densities and divergence


@given(seeds, sizes, st.sampled_from(KINDS))
@few
def test_log_density_against_scipy(seed: int, size: int, kind: str) -> None:
    """The normalised density, for many points and for one, and its kernel up to a constant."""
    rng = np.random.default_rng(seed)
    g, x = proper(rng, size, kind), rng.normal(size=(6, size))
    expected = np.reshape(scipy_of(g).logpdf(x), -1)
    assert_allclose(ga.log_density(g, x), expected, rtol=1e-9, atol=1e-9)
    single = ga.log_density(g, x[0])
    assert np.shape(single) == ()
    assert_allclose(single, expected[0], rtol=1e-9, atol=1e-9)
    constant = ga.log_density(g, x) - ga.log_kernel(g, x)
    assert_allclose(constant, constant[0], rtol=1e-9, atol=1e-9)


@given(seeds, sizes, st.sampled_from(KINDS))
@few
def test_log_kernel_against_the_formula(seed: int, size: int, kind: str) -> None:
    """r·x − ½ xᵀQx point by point, improper allowed."""
    rng = np.random.default_rng(seed)
    g, x = improper(rng, size, kind), rng.normal(size=(4, size))
    expected = [g.linear @ point - 0.5 * point @ matrix(g) @ point for point in x]
    assert_allclose(ga.log_kernel(g, x), expected, rtol=1e-11, atol=1e-11)
    single = ga.log_kernel(g, x[1])
    assert np.shape(single) == ()
    assert_allclose(single, expected[1], rtol=1e-11, atol=1e-11)


@given(seeds, sizes, st.sampled_from(KINDS), st.sampled_from(KINDS))
@few
def test_kl_against_the_closed_form(seed: int, size: int, first: str, second: str) -> None:
    """Closed form with explicit inverses; positive unless equal; not symmetric."""
    rng = np.random.default_rng(seed)
    a, b = proper(rng, size, first), proper(rng, size, second)
    sigma_a, sigma_b = np.linalg.inv(matrix(a)), np.linalg.inv(matrix(b))
    shift = sigma_b @ b.linear - sigma_a @ a.linear
    log_ratio = np.linalg.slogdet(sigma_b)[1] - np.linalg.slogdet(sigma_a)[1]
    closed = 0.5 * (np.trace(matrix(b) @ sigma_a) - size + shift @ matrix(b) @ shift + log_ratio)
    value = ga.kl(a, b)
    assert type(value) is float
    assert_allclose(value, closed, rtol=1e-9, atol=1e-11)
    assert value > 0
    assert 0 <= ga.kl(a, a) < 1e-25


def test_kl_of_close_gaussians_does_not_cancel() -> None:
    """For Q_b = (1 + ε) Q_a the divergence is m ε²/4 to first order, far below the rounding of its terms."""
    a = proper(np.random.default_rng(10), 4)
    moved = 1e-7
    b = Gaussian(a.linear * (1 + moved), a.precision * (1 + moved))
    assert_allclose(ga.kl(a, b), 4 * moved**2 / 4, rtol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda g: ga.kl(g, g),
        lambda g: ga.log_density(g, np.zeros(2)),
        lambda g: ga.draw(g, np.random.default_rng(0), 1),
        lambda g: ga.repair(g, 0.1),
    ],
)
def test_one_at_a_time(function: Callable[[Gaussian], object]) -> None:
    """A batch is refused with the remedy."""
    with pytest.raises(ValueError, match="loop over a batch"):
        function(proper(np.random.default_rng(11), 2, "diagonal", (3,)))


# Properness


@pytest.mark.parametrize("kind", KINDS)
def test_is_proper(kind: str) -> None:
    """True, False for indefinite and singular, False for NaN and infinity, per batch entry."""
    rng = np.random.default_rng(12)
    good = proper(rng, 3, kind)
    assert ga.is_proper(good) is True
    bad = [improper(rng, 3, kind), Gaussian(np.zeros(3), np.zeros_like(good.precision))]
    for value in (np.nan, np.inf):
        corner, tail = good.precision.copy(), good.linear.copy()
        corner[(0,) * corner.ndim] = value
        tail[0] = value
        bad += [Gaussian(good.linear, corner), Gaussian(tail, good.precision)]
    for g in bad:
        assert ga.is_proper(g) is False
    stacked = Gaussian(*(np.stack(parts) for parts in zip(good, *bad, good, strict=True)))
    assert_array_equal(ga.is_proper(stacked), [True] + [False] * len(bad) + [True])


def test_rounding_is_not_definiteness() -> None:
    """Numerically singular precisions are refused however they are scaled, one by one and in a batch."""
    rng = np.random.default_rng(25)
    for size in (2, 5, 12):
        half = rng.normal(size=(60, size, size - 1)) * 10.0 ** rng.uniform(-8, 8, size=(60, size, 1))
        singular = Gaussian(np.zeros((60, size)), half @ half.mT)
        assert not np.any(ga.is_proper(singular))
        assert not any(ga.is_proper(Gaussian(*one)) for one in zip(*singular, strict=True))


def test_properness_of_a_large_batch() -> None:
    """Entries of one batch do not disturb each other, whether all are proper or not."""
    rng = np.random.default_rng(26)
    half, signs = rng.normal(size=(300, 8, 12)), np.where(rng.uniform(size=300) < 0.2, -1.0, 1.0)
    good = half @ half.mT
    assert np.all(ga.is_proper(Gaussian(np.zeros((300, 8)), good)))
    assert_array_equal(ga.is_proper(Gaussian(np.zeros((300, 8)), signs[:, None, None] * good)), signs > 0)


def test_singular_and_extreme_matrices_are_not_proper() -> None:
    """Rank one, a large coupling, and a coupling that overflows when scaled."""
    for rows in ([[1.0, 1.0], [1.0, 1.0]], [[1.0, 9.0], [9.0, 1.0]], [[1e-320, 1e10], [1e10, 1e-320]]):
        wide = np.eye(6)  # LAPACK gives up on an overflow only from five coordinates on
        wide[np.ix_([1, 4], [1, 4])] = rows
        for precision in (np.array(rows), wide):
            assert ga.is_proper(Gaussian(np.zeros(len(precision)), precision)) is False


NEEDS_PROPER: list[Callable[[Gaussian], object]] = [
    ga.mean,
    ga.covariance,
    ga.standard_deviations,
    ga.affine,
    lambda g: ga.draw(g, np.random.default_rng(0), 2),
    lambda g: ga.log_density(g, np.zeros(3)),
    lambda g: ga.kl(g, Gaussian(np.zeros(3), np.ones(3))),
    lambda g: ga.kl(Gaussian(np.zeros(3), np.ones(3)), g),
]


@pytest.mark.parametrize("function", NEEDS_PROPER)
@pytest.mark.parametrize("kind", KINDS)
def test_improper_is_refused_with_eigenvalue_and_remedy(function: Callable[[Gaussian], object], kind: str) -> None:
    """The message names the smallest eigenvalue, −1, and what to do; NaN is named too."""
    g = improper(np.random.default_rng(13), 3, kind)
    with pytest.raises(ValueError, match=r"smallest eigenvalue -1 .*repair\(g, floor\)"):
        function(g)
    g.precision[...] = np.nan
    with pytest.raises(ValueError, match="smallest eigenvalue is nan"):
        function(g)


def test_improper_batch_entry_is_located() -> None:
    """The message tells which entry of a batch is at fault."""
    g = proper(np.random.default_rng(14), 2, "diagonal", (2, 3))
    g.precision[1, 2, 0] = -0.5
    with pytest.raises(ValueError, match=r"batch index \(1, 2\) has smallest eigenvalue -0\.5"):
        ga.mean(g)


def test_bad_covariance_is_refused() -> None:
    """from_moments speaks of the covariance, not of a precision."""
    with pytest.raises(ValueError, match=r"covariance has smallest eigenvalue -1 .*shrunk"):
        ga.from_moments(np.zeros(2), np.array([[1.0, 2.0], [2.0, 1.0]]))


def test_shapes_are_checked() -> None:
    """Sizes that do not fit are refused before numpy broadcasts them."""
    one, two = Gaussian(np.zeros(1), np.ones(1)), Gaussian(np.zeros(2), np.ones(2))
    for combine in (ga.product, ga.quotient, ga.kl):
        with pytest.raises(ValueError, match=r"sizes \[1, 2\]"):
            combine(one, two)
    for misfit in (np.ones(3), np.ones((2, 3)), np.ones((1, 2)), np.ones((3, 2, 2))):
        with pytest.raises(ValueError, match="do not fit"):
            ga.power(Gaussian(np.zeros(2), misfit), 1.0)
    for evaluate in (ga.log_kernel, ga.log_density):
        with pytest.raises(ValueError, match=r"x of shape \(4, 1\)"):
            evaluate(two, np.zeros((4, 1)))


# Batches


@pytest.mark.parametrize("kind", KINDS)
def test_batched_equals_loop(kind: str) -> None:
    """Leading dimensions give the same as one Gaussian at a time."""
    rng = np.random.default_rng(15)
    a, b = proper(rng, 3, kind, (2, 4)), proper(rng, 3, kind, (2, 4))
    x, factors = rng.normal(size=(5, 3)), rng.uniform(0.1, 0.9, size=(2, 4))
    functions: dict[str, Callable[[Gaussian, Gaussian, Any], Any]] = {
        "product": lambda g, h, f: ga.product(g, h),
        "quotient": lambda g, h, f: ga.quotient(g, h),
        "power": lambda g, h, f: ga.power(g, -0.5),
        "powers": lambda g, h, f: ga.power(g, f),
        "mean": lambda g, h, f: ga.mean(g),
        "covariance": lambda g, h, f: ga.covariance(g),
        "standard_deviations": lambda g, h, f: ga.standard_deviations(g),
        "is_proper": lambda g, h, f: ga.is_proper(ga.quotient(g, h)),
        "log_kernel": lambda g, h, f: ga.log_kernel(g, x),
        "log_kernel of a point": lambda g, h, f: ga.log_kernel(g, x[0]),
        "affine": lambda g, h, f: ga.affine(g),
        "from_moments": lambda g, h, f: ga.from_moments(ga.mean(g), ga.covariance(g)),
    }
    for name, function in functions.items():
        together = function(a, b, factors)
        for index in np.ndindex(2, 4):
            alone = function(*(Gaussian(g.linear[index], g.precision[index]) for g in (a, b)), factors[index])
            for whole, part in zip(*((v if isinstance(v, tuple) else (v,)) for v in (together, alone)), strict=True):
                assert np.shape(whole)[:2] == (2, 4), name
                assert_allclose(whole[index], part, rtol=1e-11, atol=1e-13, err_msg=name)


def test_batch_broadcasts_against_one() -> None:
    """A batch of diagonal sites times one full prior; the factors of a batch have exact zeros too."""
    rng = np.random.default_rng(16)
    sites, prior = proper(rng, 3, "diagonal", (4,)), proper(rng, 3)
    combined = ga.product(sites, prior)
    for i in range(4):
        alone = ga.product(Gaussian(sites.linear[i], sites.precision[i]), prior)
        assert_same(Gaussian(combined.linear[i], combined.precision[i]), alone, rtol=0, atol=0)
    _, roots = ga.affine(combined)
    assert_array_equal(roots, np.tril(roots))


# Packing


@given(seeds, sizes, st.sampled_from([(), (3,), (2, 2)]))
@few
def test_triangle_round_trip(seed: int, size: int, batch: tuple[int, ...]) -> None:
    """Packing is row by row over the upper triangle; both round trips are exact, indefinite allowed."""
    rng = np.random.default_rng(seed)
    half = rng.normal(size=(*batch, size, size))
    symmetric = half + np.swapaxes(half, -1, -2)
    packed = ga.pack_triangle(symmetric)
    expected = [symmetric[..., i, j] for i in range(size) for j in range(i, size)]
    assert_array_equal(packed, np.stack(expected, axis=-1))
    assert_array_equal(ga.unpack_triangle(packed), symmetric)
    assert_array_equal(ga.pack_triangle(ga.unpack_triangle(packed)), packed)


@pytest.mark.parametrize("length", [0, 2, 4, 5, 7, 11])
def test_lengths_that_are_no_triangle(length: int) -> None:
    """Only 1, 3, 6, 10, ... unpack."""
    with pytest.raises(ValueError, match=rf"\({length},\).*m\(m\+1\)/2"):
        ga.unpack_triangle(np.zeros(length))


def test_a_number_is_no_packed_triangle() -> None:
    """A scalar has no last length, though a vector of one number is the triangle of a 1 by 1 matrix."""
    assert_array_equal(ga.unpack_triangle(np.array([2.0])), [[2.0]])
    with pytest.raises(ValueError, match=r"shape \(\) is no packed triangle"):
        ga.unpack_triangle(np.array(2.0))


def test_only_square_matrices_pack() -> None:
    """A rectangle has no triangle."""
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        ga.pack_triangle(np.zeros((2, 3)))


# Precision from draws


def test_precision_from_draws_is_unbiased() -> None:
    """The average over repetitions is within 5 standard errors of Q, and the usual n − 1 is not."""
    rng = np.random.default_rng(19)
    n, size, repetitions = 14, 3, 2500
    g = proper(rng, size)
    estimates = np.array([precision_from_draws(ga.draw(g, rng, n)) for _ in range(repetitions)])
    error = estimates.std(axis=0) / np.sqrt(repetitions)
    assert (np.abs(estimates.mean(axis=0) - g.precision) < 5 * error).all()
    for divisor in (n - size - 1, n - size - 3, n - 1):
        other = estimates.mean(axis=0) * divisor / (n - size - 2)
        assert (np.abs(other - g.precision) > 5 * error).any()


def test_precision_from_draws_against_the_formula() -> None:
    """(n − m − 2) S⁻¹, also on awkward scales and far from the origin."""
    draws = np.random.default_rng(20).normal(size=(12, 3))
    centred = draws - draws.mean(axis=0)
    expected = (12 - 3 - 2) * np.linalg.inv(centred.T @ centred)
    assert_allclose(precision_from_draws(draws), expected, rtol=1e-10, atol=1e-12)
    units = np.array([1e-9, 1.0, 1e9])
    assert_allclose(precision_from_draws(draws * units) * np.outer(units, units), expected, rtol=1e-9, atol=1e-12)
    assert_allclose(precision_from_draws(draws + 1e6), expected, rtol=1e-7)


def test_precision_from_draws_refuses() -> None:
    """Too few, constant, collinear and broken draws."""
    rng = np.random.default_rng(21)
    with pytest.raises(LocalFailure, match="raise draws="):
        precision_from_draws(rng.normal(size=(5, 3)))
    assert precision_from_draws(rng.normal(size=(6, 3))).shape == (3, 3)
    draws = rng.normal(size=(9, 3))
    draws[:, 1] = 0.1
    with pytest.raises(LocalFailure, match="raise draws="):
        precision_from_draws(draws)
    draws[:, 1] = 2 * draws[:, 0] - draws[:, 2] + 3
    with pytest.raises(LocalFailure, match="raise draws="):
        precision_from_draws(draws)
    draws[4, 2] = np.nan
    with pytest.raises(LocalFailure, match="raise draws="):
        precision_from_draws(draws)
    column = rng.normal(size=(5, 1))
    assert_allclose(precision_from_draws(column), 2 / (4 * column.var(ddof=1)), rtol=1e-12)


# Repair


@given(seeds, st.integers(2, 6), st.floats(1e-6, 0.5), st.sampled_from([-2.5, 2.5]))
@few
def test_repair_raises_eigenvalues_to_the_floor(seed: int, size: int, floor: float, largest: float) -> None:
    """Eigenvalues below the floor rise to it, the others and all eigenvectors and r stay; a second repair is idle."""
    rng = np.random.default_rng(seed)
    vectors, _ = np.linalg.qr(rng.normal(size=(size, size)))
    values = rng.uniform(-2.0, 2.0, size)
    values[:2] = largest, -1.0
    g = Gaussian(rng.normal(size=size), (vectors * values) @ vectors.T)
    fixed, smallest = ga.repair(g, floor)
    lifted = np.maximum(values, floor * 2.5)
    assert_allclose(fixed.precision, (vectors * lifted) @ vectors.T, rtol=1e-10, atol=1e-10)
    assert_array_equal(fixed.linear, g.linear)
    assert_allclose(smallest, values.min(), rtol=1e-10)
    assert ga.is_proper(fixed) is True
    assert_allclose(ga.mean(fixed), (vectors / lifted) @ (vectors.T @ g.linear), rtol=1e-7)
    assert ga.repair(fixed, floor)[0] is fixed


@pytest.mark.parametrize("kind", KINDS)
def test_repair_leaves_a_good_gaussian_alone(kind: str) -> None:
    """The same object comes back."""
    g = proper(np.random.default_rng(22), 4, kind)
    same, smallest = ga.repair(g, 1e-8)
    assert same is g and smallest == pytest.approx(np.linalg.eigvalsh(matrix(g))[0])


def test_repair_of_a_diagonal() -> None:
    """Stays diagonal; the arithmetic is exact."""
    g = Gaussian(np.array([1.0, 2.0, 3.0]), np.array([4.0, -3.0, 0.5]))
    before = g.precision.copy()
    fixed, smallest = ga.repair(g, 0.25)
    assert_same(fixed, Gaussian(g.linear, np.array([4.0, 1.0, 1.0])), rtol=0, atol=0)
    assert smallest == -3.0
    assert_array_equal(g.precision, before)


@pytest.mark.parametrize("order", list(permutations(range(4)))[::5])
def test_repair_keeps_zeros_between_blocks(order: tuple[int, ...]) -> None:
    """Equal eigenvalues in two blocks may mix their eigenvectors; the result must still pack, links being a chain."""
    chain = np.diag([-1.0] * 4) + np.diag([0.5] * 3, 1) + np.diag([0.5] * 3, -1)
    precision = np.zeros((8, 8))
    inner, outer = [2 * i for i in order], [2 * i + 1 for i in order]
    precision[np.ix_(inner, inner)] = precision[np.ix_(outer, outer)] = chain
    fixed, _ = ga.repair(Gaussian(np.ones(8), precision), 0.3)
    values, vectors = np.linalg.eigh(chain)
    expected = (vectors * np.maximum(values, 0.3 * np.abs(values).max())) @ vectors.T
    assert_allclose(fixed.precision[np.ix_(inner, inner)], expected, atol=1e-13)
    assert_array_equal(fixed.precision[np.ix_(inner, outer)], 0.0)


@given(seeds, st.integers(1, 20))
@few
def test_repair_is_proper_down_to_the_lowest_floor(seed: int, size: int) -> None:
    """Even a floor at the edge of rounding gives a Gaussian that every function accepts."""
    rng = np.random.default_rng(seed)
    half = rng.normal(size=(size, size))
    g = Gaussian(rng.normal(size=size), half + half.T)
    fixed, _ = ga.repair(g if np.trace(half) > 0 else ga.power(g, -1), 8 * size * np.finfo(float).eps)
    assert ga.is_proper(fixed) is True
    assert np.isfinite(ga.mean(fixed)).all()


def test_repair_refuses() -> None:
    """A floor out of range, a batch, a precision of zero and entries that are not finite."""
    g = proper(np.random.default_rng(23), 2)
    for floor in (0.0, -0.1, 1e-17, 1.0, np.nan):
        with pytest.raises(ValueError, match="floor is"):
            ga.repair(g, floor)
    with pytest.raises(ValueError, match="loop over a batch"):
        ga.repair(proper(np.random.default_rng(24), 2, "full", (3,)), 0.1)
    with pytest.raises(ValueError, match="precision is 0"):
        ga.repair(Gaussian(np.zeros(2), np.zeros((2, 2))), 0.1)
    with pytest.raises(ValueError, match="not finite"):
        ga.repair(Gaussian(g.linear, np.full((2, 2), np.nan)), 0.1)


def test_everything_public_is_listed_and_documented() -> None:
    """__all__ names what exists, and each has a docstring."""
    assert len(set(ga.__all__)) == len(ga.__all__)
    for name in ga.__all__:
        assert getattr(ga, name).__doc__, name
