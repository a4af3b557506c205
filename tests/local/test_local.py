"""Local inferences: the same closed forms for all of them, then what each one promises of its own."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.integrate import quad
from scipy.special import expit, gammaln, log_expit
from scipy.stats import norm

import fedppl
from fedppl import DeclarationError, gaussian
from fedppl.contracts import Draws, LocalInference, Moments, Target
from fedppl.gaussian import Gaussian
from fedppl.local import nested_laplace, nuts
from fedppl.local._marginal import values
from fedppl.local.target import log_tilted
from fedppl.model.client import ClientModel
from fedppl.testing import normal_means
from fedppl.types import LocalFailure
from tests.cases import EXACT, MEAN, WAYS, Way
from tests.support import page, problems

Array = Any

# --- the ways, and problems with a closed form ------------------------------------------------------------------------


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


class Case(NamedTuple):
    """A target with the closed form of its joint distribution over x = (φ, θ)."""

    target: Target
    joint: Gaussian

    @property
    def m(self) -> int:
        return self.target.client.shared_size

    @property
    def mean(self) -> Array:
        return gaussian.mean(self.joint)

    @property
    def covariance(self) -> Array:
        return gaussian.covariance(self.joint)


def means_case() -> Case:
    """(μ, θ): cavity on μ, 4 (θ − μ)² for θ ~ N(μ, ½²), Σ (y − θ)², all halved."""
    model, clients = normal_means()
    client = model.enrol(clients)["client 1"]
    y = client.arrays["y"]
    cavity = gaussian.from_moments(np.array([0.8]), np.array([[0.4]]))
    precision = np.array([[cavity.precision[0, 0] + 4, -4], [-4, 4 + len(y)]])
    joint = Gaussian(np.array([cavity.linear[0], y.sum()]), precision)
    # where q stands while EP is under way: off by most of an sd, and half as wide again
    global_ = gaussian.from_moments(np.array([0.9]), np.array([[0.4]]))
    return Case(Target(client, global_, cavity, 0.0), joint)


def regression_case() -> Case:
    """(μ, a, β): cavity on (μ, a), 4 |β − μ|², |y − a − Xβ|², all halved."""
    model, clients = problems.regression()
    client = model.enrol(clients)["clinic 2"]
    X, y = client.arrays["X"], client.arrays["y"]
    cavity = gaussian.from_moments(
        np.array([0.9, -1.7, 0.3]), np.array([[0.2, 0.05, 0.0], [0.05, 0.3, 0.1], [0.0, 0.1, 0.2]])
    )
    differences = 2 * np.hstack([-np.eye(2), np.zeros((2, 1)), np.eye(2)])
    fit = np.hstack([np.zeros((len(X), 2)), np.ones((len(X), 1)), X])
    precision = differences.T @ differences + fit.T @ fit
    precision[:3, :3] += cavity.precision
    linear = fit.T @ y
    linear[:3] += cavity.linear
    joint = Gaussian(linear, precision)
    mean, covariance = gaussian.mean(joint)[:3], gaussian.covariance(joint)[:3, :3]
    global_ = gaussian.from_moments(mean + 0.4 * np.sqrt(np.diag(covariance)), 1.5 * covariance)
    return Case(Target(client, global_, cavity, 0.0), joint)


def pooled_builder(y: Any) -> Any:
    """y ~ N(μ, 1), μ ~ N(0, 10²): nothing is local."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        mu = pm.Normal("mu", 0, 10)
        pm.Normal("obs", mu, 1, observed=y)
    return model


def pooled_case() -> Case:
    """μ alone: n from the data, the rest from the cavity."""
    y = np.array([0.3, 1.9, -0.4, 1.1])
    client = problems.declared(pooled_builder, ("mu",)).enrol({"a": {"y": y}})["a"]
    cavity = gaussian.from_moments(np.array([0.5]), np.array([[0.5]]))
    joint = Gaussian(cavity.linear + y.sum(), cavity.precision + 4)
    global_ = gaussian.from_moments(np.array([0.8]), np.array([[0.3]]))
    return Case(Target(client, global_, cavity, 0.0), joint)


CASES = {"means": means_case, "regression": regression_case, "pooled": pooled_case}


@functools.cache
def the_case(name: str) -> Case:
    return CASES[name]()


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return the_case(request.param)


def test_cases_agree_with_the_closed_forms_of_problems() -> None:
    """θ marginalised: site x cavity."""

    def means_site(data: Any) -> Gaussian:
        linear, precision = problems.normal_means_site(data["y"])
        return Gaussian(np.array([linear]), np.array([[precision]]))

    for name, site in (("means", means_site), ("regression", problems.regression_site)):
        case = the_case(name)
        mean, covariance = problems.tilted(site(case.target.client.arrays), case.target.cavity)
        assert_allclose(case.mean[: case.m], mean, rtol=1e-10)
        assert_allclose(case.covariance[: case.m, : case.m], covariance, rtol=1e-10)


def assert_within_error(mean: Array, covariance: Array, expected: Gaussian, ess: float, sds: float = 4.0) -> None:
    """Whitened by the truth, means have Monte Carlo sd 1 / √ESS, and covariances √(2 / ESS) or less."""
    root = np.linalg.cholesky(gaussian.covariance(expected))
    z = np.linalg.solve(root, mean - gaussian.mean(expected))
    assert np.abs(z).max() < sds / np.sqrt(ess)
    inner = np.linalg.solve(root, np.linalg.solve(root, covariance).T) - np.eye(len(root))
    assert np.abs(inner).max() < sds * np.sqrt(2 / ess)


def shared_part(case: Case) -> Gaussian:
    return gaussian.from_moments(case.mean[: case.m], case.covariance[: case.m, : case.m])


# --- the same closed forms for every way ------------------------------------------------------------------------------


def test_tilted_moments_are_the_closed_form(way: Way, case: Case) -> None:
    moments = way.local.tilted(case.target, np.random.default_rng(1))
    expected = shared_part(case)
    assert moments.mean.shape == (case.m,)
    assert moments.covariance.shape == moments.precision.shape == (case.m, case.m)
    assert moments.skewness.shape == (case.m,)
    if way.right == EXACT:
        assert_allclose(moments.mean, gaussian.mean(expected), rtol=0, atol=1e-6)
        assert_allclose(moments.covariance, gaussian.covariance(expected), rtol=0, atol=1e-6)
        assert_allclose(moments.precision, expected.precision, rtol=1e-5, atol=1e-5)
    elif way.right == MEAN:
        assert_allclose(moments.mean, gaussian.mean(expected), rtol=0, atol=1e-5)
    else:
        ess = min(moments.diagnostics["ess"], 1000.0)
        assert ess > 100
        assert_within_error(moments.mean, moments.covariance, expected, ess)
        # the precision is that of a covariance once more, less its bias of (m + 2) / ESS
        assert_within_error(moments.mean, np.linalg.inv(moments.precision), expected, ess, sds=5)


def test_precisions_are_symmetric_and_positive_definite(way: Way, case: Case) -> None:
    moments = way.local.tilted(case.target, np.random.default_rng(2))
    assert_array_equal(moments.precision, moments.precision.T)
    assert_allclose(moments.covariance, moments.covariance.T, rtol=1e-12)
    assert np.linalg.eigvalsh(moments.precision)[0] > 0
    assert np.linalg.eigvalsh(moments.covariance)[0] > 0


def test_draws_are_of_the_joint_closed_form(way: Way, case: Case) -> None:
    """Equation 8 of FedLin: (φ, θ) from p(y, θ | φ) q_{-k}(φ)."""
    drawn = way.local.draw(case.target, 500, 3, np.random.default_rng(3))
    d = case.target.client.local_size
    assert drawn.shared.shape == (3, 500, case.m)
    assert drawn.local.shape == (3, 500, d)
    sample = np.concatenate([drawn.shared, drawn.local], axis=-1).reshape(1500, -1)
    ess = min(drawn.diagnostics["ess"], 1500.0)
    assert ess > 150
    mean, covariance = sample.mean(axis=0), np.cov(sample, rowvar=False).reshape(case.m + d, case.m + d)
    if way.right == MEAN:
        # variances of a mean-field fit are those given all other coordinates: no larger than the true ones
        conditional = 1 / np.diag(case.joint.precision)
        assert np.abs((mean - case.mean) / np.sqrt(conditional)).max() < 4 / np.sqrt(ess)
        assert_allclose(np.diag(covariance), conditional, rtol=4 * np.sqrt(2 / ess))
    else:
        assert_within_error(mean, covariance, case.joint, ess)


def test_chains_are_alike_and_differ(way: Way) -> None:
    case = the_case("means")
    drawn = way.local.draw(case.target, 400, 2, np.random.default_rng(4))
    assert not np.any(np.all(drawn.shared[0] == drawn.shared[1]))
    # difference of two means, with an ESS no better than that of the whole
    sd = np.sqrt(case.covariance[0, 0] if way.right != MEAN else 1 / case.joint.precision[0, 0])
    difference = drawn.shared[0].mean() - drawn.shared[1].mean()
    assert abs(difference) < 4 * sd * np.sqrt(4 / min(drawn.diagnostics["ess"], 800.0))


def test_equal_generators_give_equal_numbers(way: Way) -> None:
    case, inference = the_case("regression"), way.local
    first, again, other = (inference.tilted(case.target, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert_same_moments(first, again)
    assert np.array_equal(first.mean, other.mean) is not way.seeds_matter
    drawn, redrawn, others = (inference.draw(case.target, 30, 2, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert_array_equal(drawn.shared, redrawn.shared)
    assert_array_equal(drawn.local, redrawn.local)
    assert not np.array_equal(drawn.shared, others.shared)


def assert_same_moments(a: Moments, b: Moments) -> None:
    for one, other in zip(a[:4], b[:4], strict=True):
        assert_array_equal(one, other)
    assert dict(a.diagnostics) == dict(b.diagnostics)


def test_diagnostics_are_floats(way: Way, case: Case) -> None:
    inference = way.local
    found: list[Moments | Draws] = [
        inference.tilted(case.target, np.random.default_rng(7)),
        inference.draw(case.target, 25, 2, np.random.default_rng(7)),
    ]
    for result in found:
        assert {type(value) for value in result.diagnostics.values()} == {float}
        assert not any(np.isnan(value) for value in result.diagnostics.values())
        assert result.diagnostics["ess"] > 0
        assert result.diagnostics.keys() <= page.diagnostics()


def test_names_are_for_reading(way: Way) -> None:
    inference = way.local
    assert inference.name
    assert inference.name.isprintable()
    inference.check(the_case("regression").target.client)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: fedppl.local.NestedLaplace(points=15), "points=15"),
        (lambda: fedppl.local.ADVI(points=15), "points=15"),
        (lambda: fedppl.local.ADVI(max_iterations=0), "max_iterations=0"),
        (lambda: fedppl.local.MeanField(points=0), "points=0"),
        (lambda: fedppl.local.GradientSteps(steps=0), "steps=0"),
        (lambda: fedppl.local.GradientSteps(learning_rate=0.0), "learning_rate=0.0"),
        (lambda: fedppl.local.GradientSteps(learning_rate=-1e-3), "learning_rate=-0.001"),
        (lambda: fedppl.local.GradientSteps(learning_rate=float("nan")), "learning_rate=nan"),
        (lambda: fedppl.local.NUTS(draws=9, chains=2), "draws=9"),
        (lambda: fedppl.local.NUTS(tune=0), "tune=0"),
        (lambda: fedppl.local.NUTS(chains=0), "chains=0"),
        (lambda: fedppl.local.NUTS(nuts_sampler="stan"), "'stan'"),
    ],
)
def test_settings_out_of_range_are_refused(build: Callable[[], LocalInference], words: str) -> None:
    with pytest.raises(DeclarationError, match=words):
        build()


def test_smallest_settings_are_taken() -> None:
    for build in (
        lambda: fedppl.local.NestedLaplace(points=16),
        lambda: fedppl.local.ADVI(points=16, max_iterations=1),
        lambda: fedppl.local.GradientSteps(steps=1),
        lambda: fedppl.local.NUTS(draws=20, tune=1, chains=1),
    ):
        assert isinstance(build(), LocalInference)


def test_nutpie_is_the_default_where_it_is_installed_and_refused_where_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def sampler(inference: LocalInference) -> str:
        return str(inference.tilted.keywords["settings"].sampler)  # type: ignore[attr-defined]

    monkeypatch.setattr(nuts, "_HAS_NUTPIE", True)
    assert sampler(fedppl.local.NUTS()) == "nutpie"
    assert sampler(fedppl.local.NUTS(nuts_sampler="pymc")) == "pymc"
    monkeypatch.setattr(nuts, "_HAS_NUTPIE", False)
    assert sampler(fedppl.local.NUTS()) == "pymc"
    with pytest.raises(DeclarationError, match=r"fedppl\[nutpie\]"):
        fedppl.local.NUTS(nuts_sampler="nutpie")


@pytest.mark.parametrize("build", [fedppl.local.NestedLaplace, fedppl.local.Laplace])
def test_kinks_are_refused_with_the_remedy(build: Callable[[], LocalInference]) -> None:
    model, clients = problems.lasso()
    client = next(iter(model.enrol(clients, kernel=False).values()))
    with pytest.raises(DeclarationError, match=r"an absolute value.*NUTS\(\)"):
        build().check(client)


def test_kinks_are_for_ways_without_curvature() -> None:
    model, clients = problems.lasso()
    client = next(iter(model.enrol(clients).values()))
    for build in (fedppl.local.NUTS, fedppl.local.ADVI, fedppl.local.MeanField):
        build().check(client)


# --- nested Laplace: log f_k and its expansion ------------------------------------------------------------------------


def log_marginal(client: ClientModel, phi: Array) -> Array:
    """log f_k at the rows of phi (S, m), by way of their mean."""
    return values(client, phi, phi.mean(axis=0), 0.0)


def quadrature(log_integrand: Callable[[float], float], centre: float, half_width: float) -> float:
    """Log of an integral by adaptive quadrature, scaled by the integrand at the centre."""
    scale = log_integrand(centre)
    value, _ = quad(
        lambda x: np.exp(log_integrand(x) - scale),
        centre - half_width,
        centre + half_width,
        epsabs=1e-13,
        epsrel=1e-12,
        limit=400,
        points=[centre],
    )
    return float(scale + np.log(value))


def test_log_marginal_of_a_conditionally_gaussian_model_is_exact() -> None:
    """log ∫ Π N(y; θ, 1) N(θ; μ, ½²) dθ by quadrature."""
    model, clients = normal_means()
    client = model.enrol(clients)["client 0"]
    y = client.arrays["y"]
    mu = np.array([-1.0, 0.4, 1.3, 3.0])
    expected = [
        quadrature(lambda t, m=m: float(norm.logpdf(y, t).sum() + norm.logpdf(t, m, 0.5)), (y.sum() + 4 * m) / 24, 3.0)
        for m in mu
    ]
    assert_allclose(log_marginal(client, mu[:, None]), expected, rtol=0, atol=1e-8)


def test_log_marginal_of_a_regression_is_the_normal_density(rng: np.random.Generator) -> None:
    case = the_case("regression")
    phi = rng.normal(size=(20, 3)) * 2
    expected = [problems.regression_log_marginal(case.target.client.arrays, row) for row in phi]
    assert_allclose(log_marginal(case.target.client, phi), expected, rtol=0, atol=1e-8)


def bernoulli_marginals(rows: int, mu: Array) -> tuple[Array, Array]:
    """Nested Laplace beside ∫ Π logit⁻¹(±θ) N(θ; μ, 0.7²) dθ by quadrature."""
    model, clients = problems.logistic(1, rows=rows)
    client = model.enrol(clients)["ward 0"]
    ones = int(client.arrays["y"].sum())

    def log_integrand(t: float, m: float) -> float:
        return float(ones * log_expit(t) + (rows - ones) * log_expit(-t) + norm.logpdf(t, m, 0.7))

    centre = np.log((ones + 0.5) / (rows - ones + 0.5))
    exact = [quadrature(lambda t, m=m: log_integrand(t, m), (centre + m) / 2, 6.0) for m in mu]
    return log_marginal(client, mu[:, None]), np.array(exact)


def test_log_marginal_of_bernoulli_data_is_off_by_the_laplace_error() -> None:
    # The leading terms of the error, ℓ'''' / (8 A²) + 5 ℓ'''² / (24 A³), are of the order of 1 / n: with 30 rows
    # below 0.01, and what matters, its change over φ, with it; with ten times the rows a small part of that.
    mu = np.linspace(-1.0, 1.5, 6)
    few, exact_few = bernoulli_marginals(30, mu)
    many, exact_many = bernoulli_marginals(300, mu)
    assert np.abs(few - exact_few).max() < 0.01
    assert np.abs(few - exact_few).max() > 1e-4  # it is an approximation
    assert np.abs(many - exact_many).max() < np.abs(few - exact_few).max() / 4


def test_log_marginal_of_poisson_counts_is_off_by_the_laplace_error() -> None:
    # One θ a row, so the integral is a product of 4, each with an error of e^θ (1 / 8 - 5 e^θ / (24 A)) / A² or so:
    # with e^θ = 3 and A = 14 below 0.002.
    model, clients = problems.counts()
    client = model.enrol(clients)["unit 4"]
    y = client.arrays["y"]
    mu = np.array([0.3, 1.0, 1.5])

    def log_integrand(t: float, count: int, m: float) -> float:
        return float(count * t - np.exp(t) - gammaln(count + 1) + norm.logpdf(t, m, 0.3))

    exact = [sum(quadrature(lambda t, c=c, m=m: log_integrand(t, c, m), m, 2.4) for c in y) for m in mu]
    found = log_marginal(client, mu[:, None])
    assert_allclose(found, exact, rtol=0, atol=4 * 0.002)
    assert np.abs(found - exact).max() > 1e-5


def test_log_marginal_where_there_is_no_density_is_minus_infinity() -> None:
    # τ = exp(−801) = 0 at one of the points; the one between, their mean, is not hurt by it
    client, point = noise_client(), np.array([[1.0, -0.5, -1.0]])
    found = log_marginal(client, point + [[0, 0, 0], [0, 0, -800], [0, 0, 800]])
    assert found[0] == log_marginal(client, point)[0]
    assert found[1] == -np.inf
    assert np.isfinite(found[2])


def test_log_marginal_hardly_depends_on_the_points_it_is_asked_at_together(rng: np.random.Generator) -> None:
    # Points are reached from an expansion at their mean. Where that leaves θ within 0.01 sd of its mode the value
    # stands, so that log det A, which moves by an sd's worth of skewness in an sd, is right to some 1e-3.
    client = noise_client()
    phi = np.array([1.0, -0.5, -1.0]) + 0.5 * rng.normal(size=(30, 3))
    together = log_marginal(client, phi)
    assert_allclose(together, [log_marginal(client, row[None])[0] for row in phi], rtol=0, atol=5e-3)


def noise_client() -> ClientModel:
    model, clients = problems.noise(2)
    return model.enrol(clients)["site 0"]


def test_expansion_of_a_gaussian_factor_is_the_factor(rng: np.random.Generator) -> None:
    """log f(φ) = log N(y; Zφ, I + ¼ XXᵀ): gradient r − Qφ, Hessian −Q, wherever it is expanded."""
    client = the_case("regression").target.client
    site = problems.regression_site(client.arrays)
    expand = fedppl.local.NestedLaplace().expand
    assert expand is not None
    for phi in (np.zeros(3), rng.normal(size=3), np.array([20.0, -30.0, 10.0])):
        found = expand(client, phi, 0.25)  # a Gaussian prior has no share
        assert found.value == pytest.approx(problems.regression_log_marginal(client.arrays, phi), abs=1e-7, rel=1e-10)
        gradient = site.linear - site.precision @ phi
        assert_allclose(found.gradient, gradient, rtol=1e-7, atol=1e-7)
        # a difference of gradients over 1e-3 or less: far away they are large, and their rounding counts
        assert_allclose(found.hessian, -site.precision, rtol=1e-7, atol=1e-7 * max(1.0, np.abs(gradient).max()))


def test_expansion_without_local_variables(rng: np.random.Generator) -> None:
    """log f(μ) = Σ log N(y; μ, 1)."""
    client = the_case("pooled").target.client
    y = client.arrays["y"]
    expand = fedppl.local.NestedLaplace().expand
    assert expand is not None
    found = expand(client, np.array([0.7]), 0.0)
    assert found.value == pytest.approx(norm.logpdf(y, 0.7).sum(), abs=1e-10)
    assert_allclose(found.gradient, [np.sum(y - 0.7)], atol=1e-8)
    assert_allclose(found.hessian, [[-4.0]], atol=1e-6)


def test_expansion_agrees_with_differences_of_log_marginal() -> None:
    """Local noise sd and scale of the coefficients: neither Gaussian nor separable."""
    client = noise_client()
    expand = fedppl.local.NestedLaplace().expand
    assert expand is not None
    phi, h = np.array([0.8, -0.3, -0.9]), 2e-3
    steps = [np.zeros(3)]
    for i in range(3):
        for j in range(i + 1):
            for a in (-1, 1):
                for b in (-1, 1):
                    steps.append(h * (a * np.eye(3)[i] + b * np.eye(3)[j]))
    found_there = log_marginal(client, phi + np.array(steps))
    around = {tuple(np.round(s / h)): v for s, v in zip(steps, found_there, strict=True)}

    def at(*s: float) -> float:
        return around[tuple(np.asarray(s, dtype=float))]

    gradient, hessian = np.zeros(3), np.zeros((3, 3))
    for i in range(3):
        e = np.eye(3)[i]
        gradient[i] = (at(*(2 * e)) - at(*(-2 * e))) / (4 * h)
        for j in range(i + 1):
            f = np.eye(3)[j]
            second = (at(*(e + f)) - at(*(e - f)) - at(*(f - e)) + at(*(-e - f))) / (4 * h**2)
            hessian[i, j] = hessian[j, i] = second
    found = expand(client, phi, 0.0)
    # A comes from forward differences over 1e-4 sd in one and from central ones in the other
    assert found.value == pytest.approx(at(0, 0, 0), abs=1e-4)
    # an error of forward differences that is the same at all points leaves their differences, which are right to
    # about 1e-8: 1e-8 / 4e-3 and 1e-8 / 4e-6
    assert_allclose(found.gradient, gradient, rtol=0, atol=1e-3)
    assert_allclose(found.hessian, hessian, rtol=0, atol=1e-2)


def test_expansion_of_bernoulli_data_is_near_the_exact_derivatives() -> None:
    """Exact: ∂ log f / ∂μ = E[θ − μ] / 0.49 and ∂² = Var[θ] / 0.49² − 1 / 0.49, of θ given y and μ by quadrature."""
    model, clients = problems.logistic(1, rows=30)
    client = model.enrol(clients)["ward 0"]
    ones = int(client.arrays["y"].sum())
    expand = fedppl.local.NestedLaplace().expand
    assert expand is not None
    theta = np.linspace(-6, 6, 20_001)
    for mu in (-0.5, 0.5, 1.5):
        logp = ones * log_expit(theta) + (30 - ones) * log_expit(-theta) + norm.logpdf(theta, mu, 0.7)
        weights = np.exp(logp - logp.max())
        weights /= weights.sum()
        mean = weights @ theta
        variance = weights @ (theta - mean) ** 2
        found = expand(client, np.array([mu]), 0.0)
        # the bias of Laplace at 30 rows, a hundredth of the posterior sd of μ that this client alone gives
        assert found.gradient[0] == pytest.approx((mean - mu) / 0.49, abs=0.01)
        assert found.hessian[0, 0] == pytest.approx(variance / 0.49**2 - 1 / 0.49, abs=0.01)


def rising_builder(y: Any) -> Any:
    """A log density that rises in θ for ever: the potential takes its prior away again."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        mu = pm.Normal("mu", 0, 1)
        theta = pm.Normal("theta", mu, 1)
        pm.Potential("rise", theta + (theta - mu) ** 2 / 2)
        pm.Normal("obs", mu, 1, observed=y)
    return model


def test_a_local_posterior_without_a_peak_is_a_failure_that_says_so() -> None:
    client = problems.declared(rising_builder, ("mu",)).enrol({"a": {"y": np.zeros(3)}})["a"]
    q = Gaussian(np.zeros(1), np.eye(1))
    inference = fedppl.local.NestedLaplace()
    assert inference.expand is not None
    with pytest.raises(LocalFailure, match="proper prior"):
        inference.expand(client, np.zeros(1), 0.0)
    with pytest.raises(LocalFailure, match="proper prior"):
        inference.tilted(Target(client, q, q, 0.0), np.random.default_rng(0))
    with pytest.raises(LocalFailure, match="proper prior"):
        inference.draw(Target(client, q, q, 0.0), 20, 1, np.random.default_rng(0))


# --- nested Laplace: where q is no proposal ---------------------------------------------------------------------------


def shifted(case: Case, sds: float) -> Target:
    """The same tilted distribution, with q `sds` of its sds away from it."""
    covariance = case.covariance[: case.m, : case.m]
    q = gaussian.from_moments(case.mean[: case.m] + sds * np.sqrt(np.diag(covariance)), covariance)
    return case.target._replace(global_=q)


@pytest.mark.parametrize("sds", [8.0, 30.0])
@pytest.mark.parametrize("name", ["means", "regression"])
def test_a_far_q_falls_back_to_a_fitted_t(name: str, sds: float) -> None:
    """Moments have a Monte Carlo error, and it is the one that is stated."""
    case = the_case(name)
    near = fedppl.local.NestedLaplace().tilted(case.target, np.random.default_rng(1))
    assert near.diagnostics["fallback"] == 0
    moments = fedppl.local.NestedLaplace().tilted(shifted(case, sds), np.random.default_rng(1))
    expected = shared_part(case)
    assert moments.diagnostics["fallback"] == 1
    sd = gaussian.standard_deviations(expected)
    # each error is from 8 scrambles: a t with 7 degrees of freedom is below 5 in 998 of 1000
    assert 0 < moments.diagnostics["mc_error"] < 0.03
    assert np.max(np.abs(moments.mean - gaussian.mean(expected)) / sd) < 5 * moments.diagnostics["mc_error"]
    assert_within_error(moments.mean, moments.covariance, expected, min(moments.diagnostics["ess"], 4000.0))
    assert_allclose(moments.precision @ moments.covariance, np.eye(case.m), atol=1e-10)


def test_a_far_q_without_fallback_is_a_failure_that_names_the_setting() -> None:
    with pytest.raises(LocalFailure, match="points=.*fallback=True"):
        fedppl.local.NestedLaplace(fallback=False).tilted(shifted(the_case("means"), 30.0), np.random.default_rng(1))


def test_an_improper_cavity_falls_back_to_nuts() -> None:
    """Precision −½ of the cavity and 3.3 of the factor: the tilted distribution is proper, the cavity is not."""
    case = the_case("means")
    y = case.target.client.arrays["y"]
    cavity = Gaussian(np.array([0.4]), np.array([[-0.5]]))
    linear, precision = problems.normal_means_site(y)
    expected = Gaussian(np.array([0.4 + linear]), np.array([[precision - 0.5]]))
    q = gaussian.from_moments(gaussian.mean(expected) + 20.0, gaussian.covariance(expected))
    moments = fedppl.local.NestedLaplace().tilted(Target(case.target.client, q, cavity, 0.0), np.random.default_rng(1))
    assert moments.diagnostics["fallback"] == 2
    assert moments.diagnostics["mc_error"] > 0
    ess = min(moments.diagnostics["ess"], 2000.0)
    assert_within_error(moments.mean, moments.covariance, expected, ess)


def test_what_takes_long_is_said_once_and_before_it_begins(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an improper cavity there is no other way than NUTS: whose it is, and what is faster."""
    case, before = the_case("means"), []

    def sampled(target: Target, rng: np.random.Generator) -> Any:
        before.append([record.getMessage() for record in caplog.records])
        return fedppl.local.NestedLaplace().tilted(case.target, rng)

    monkeypatch.setattr(nested_laplace, "NUTS", lambda: SimpleNamespace(tilted=sampled))
    case.target.client.__dict__.pop("_views", None)  # of other tests
    q = gaussian.from_moments(case.mean[: case.m] + 20.0, np.eye(case.m))
    cavity = Gaussian(np.zeros(case.m), -0.5 * np.eye(case.m))
    with caplog.at_level(logging.WARNING, logger="fedppl"):
        for _ in range(2):
            fedppl.local.NestedLaplace().tilted(Target(case.target.client, q, cavity, 0.0), np.random.default_rng(1))
    assert [len(said) for said in before] == [1, 1]
    assert all(word in before[0][0] for word in (case.target.client.client_id, "NUTS", "theta", "standardised"))


def test_draws_from_a_far_q_are_right() -> None:
    case = the_case("means")
    drawn = fedppl.local.NestedLaplace().draw(shifted(case, 30.0), 500, 2, np.random.default_rng(1))
    assert drawn.diagnostics["fallback"] > 0
    sample = np.concatenate([drawn.shared, drawn.local], axis=-1).reshape(1000, 2)
    assert_within_error(
        sample.mean(axis=0), np.cov(sample, rowvar=False), case.joint, min(drawn.diagnostics["ess"], 1000.0)
    )


def test_nested_laplace_keeps_q_where_it_is_already_right() -> None:
    """Constant weights: no Monte Carlo error at all, which is what lets errors of K clients not add up."""
    case = the_case("regression")
    target = case.target._replace(global_=shared_part(case))
    moments = fedppl.local.NestedLaplace(points=20).tilted(target, np.random.default_rng(1))
    # log f is known to 1e-8 or so, and the weights are constant to that
    assert_allclose(moments.mean, case.mean[:3], rtol=0, atol=1e-7)
    assert_allclose(moments.covariance, case.covariance[:3, :3], rtol=0, atol=1e-7)


def test_moments_of_bernoulli_data_are_those_of_quadrature() -> None:
    """Tilted distribution of μ on a grid over (μ, θ); Laplace's bias at 30 rows is below 1 % of an sd."""
    model, clients = problems.logistic(1, rows=30)
    client = model.enrol(clients)["ward 0"]
    ones = int(client.arrays["y"].sum())
    cavity = gaussian.from_moments(np.array([0.2]), np.array([[0.8]]))
    mu, theta = np.linspace(-5, 6, 801)[:, None], np.linspace(-5, 6, 801)[None]
    logp = ones * log_expit(theta) + (30 - ones) * log_expit(-theta) + norm.logpdf(theta, mu, 0.7)
    logp = logp + norm.logpdf(mu, 0.2, np.sqrt(0.8))
    weights = np.exp(logp - logp.max()).sum(axis=1)
    weights /= weights.sum()
    mean = weights @ mu[:, 0]
    variance = weights @ (mu[:, 0] - mean) ** 2
    q = gaussian.from_moments(np.array([mean + 0.1]), np.array([[1.2 * variance]]))
    moments = fedppl.local.NestedLaplace().tilted(Target(client, q, cavity, 0.0), np.random.default_rng(0))
    assert moments.mean[0] == pytest.approx(mean, abs=0.01 * np.sqrt(variance))
    assert moments.covariance[0, 0] == pytest.approx(variance, rel=0.02)
    # draws have exact weights: no bias of Laplace, and θ beside μ
    drawn = fedppl.local.NestedLaplace().draw(Target(client, q, cavity, 0.0), 2000, 1, np.random.default_rng(0))
    by_theta = np.exp(logp - logp.max()).sum(axis=0)
    by_theta /= by_theta.sum()
    theta_mean = by_theta @ theta[0]
    theta_sd = np.sqrt(by_theta @ (theta[0] - theta_mean) ** 2)
    ess = min(drawn.diagnostics["ess"], 2000.0)
    assert abs(drawn.local.mean() - theta_mean) < 4 * theta_sd / np.sqrt(ess)
    assert abs(drawn.local.std() / theta_sd - 1) < 4 / np.sqrt(2 * ess)
    assert expit(theta_mean) == pytest.approx(ones / 30, abs=0.1)


# --- a shared prior that is not Gaussian ------------------------------------------------------------------------------


def spread_builder(y: Any) -> Any:
    """y ~ N(0, τ²), τ ~ HalfCauchy(2), nothing local: one coordinate, log τ."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        tau = pm.HalfCauchy("tau", 2)
        pm.Normal("obs", 0, tau, observed=y)
    return model


def spread_client() -> ClientModel:
    # τ near 90, where a half-Cauchy prior is far from N_0, and four rows, so that it counts
    data = {"lab": {"y": 90 * np.array([0.4, -1.3, 0.9, 1.1])}}
    return problems.declared(spread_builder, ("tau",)).enrol(data)["lab"]


def spread_posterior(client: ClientModel, cavity: Gaussian) -> tuple[float, float, float]:
    """Mean, sd and mode of log τ under f x cavity x p / N_0: on x = log τ, p has the density e^x / (1 + e^{2x} / 4)."""
    y, x = client.arrays["y"], np.linspace(1, 10, 20_001)
    logp = -len(y) * x - 0.5 * np.sum(y**2) * np.exp(-2 * x) + x - np.log1p(np.exp(2 * x) / 4)
    logp += cavity.linear[0] * x - 0.5 * cavity.precision[0, 0] * x**2
    n0 = client.layout.prior
    logp -= n0.linear[0] * x - 0.5 * n0.precision[0, 0] * x**2
    weights = np.exp(logp - logp.max())
    weights /= weights.sum()
    mean = weights @ x
    return float(mean), float(np.sqrt(weights @ (x - mean) ** 2)), float(x[np.argmax(logp)])


def test_shares_of_all_clients_make_the_declared_prior() -> None:
    """Σ_k (expansion with share 1/K − without) + N_0 is log p(φ), its gradient and its Hessian, for μ and log τ."""
    model, data = problems.schools()
    clients = model.enrol(data)
    expand = fedppl.local.NestedLaplace().expand
    assert expand is not None
    n0 = next(iter(clients.values())).layout.prior
    assert not next(iter(clients.values())).layout.prior_is_gaussian
    found = []
    for phi in (np.array([3.0, 1.2]), np.array([-6.0, 2.5])):
        value, gradient, hessian = float(gaussian.log_kernel(n0, phi)), n0.linear - n0.precision @ phi, -n0.precision
        for client in clients.values():
            whole, bare = expand(client, phi, 1 / 8), expand(client, phi, 0.0)
            value += whole.value - bare.value
            gradient = gradient + whole.gradient - bare.gradient
            hessian = hessian + whole.hessian - bare.hessian
        # N(0, 5²) on μ and x / (1 + x²/25) with x = τ = e^{log τ}; s = x² / (25 + x²)
        s = np.exp(2 * phi[1]) / (25 + np.exp(2 * phi[1]))
        assert_allclose(gradient, [-phi[0] / 25, 1 - 2 * s], rtol=0, atol=1e-8)
        assert_allclose(hessian, [[-1 / 25, 0], [0, -4 * s * (1 - s)]], rtol=0, atol=1e-6)
        found.append(value - (-0.5 * phi[0] ** 2 / 25 + phi[1] - np.log1p(np.exp(2 * phi[1]) / 25)))
    assert found[0] == pytest.approx(found[1], abs=1e-8)  # up to one constant


def test_the_whole_share_gives_the_declared_prior_to_nested_laplace() -> None:
    client = spread_client()
    n0 = client.layout.prior
    mean, sd, _ = spread_posterior(client, n0)
    q = gaussian.from_moments(np.array([mean + 0.3 * sd]), np.array([[1.5 * sd**2]]))
    moments = fedppl.local.NestedLaplace(points=2048).tilted(Target(client, q, n0, 1.0), np.random.default_rng(0))
    # skewed, so not exact; the errors of 2048 quasi-random points stay below those of as many independent ones
    assert moments.mean[0] == pytest.approx(mean, abs=sd / np.sqrt(2048))
    assert np.sqrt(moments.covariance[0, 0]) == pytest.approx(sd, rel=2 / np.sqrt(2 * 2048))
    # and without the share the answer is another one
    bare = fedppl.local.NestedLaplace(points=2048).tilted(Target(client, q, n0, 0.0), np.random.default_rng(0))
    assert abs(bare.mean[0] - mean) > 4 * sd / np.sqrt(2048)


def test_the_whole_share_gives_the_declared_prior_to_the_other_ways(way: Way) -> None:
    client = spread_client()
    n0 = client.layout.prior
    mean, sd, mode = spread_posterior(client, n0)
    q = gaussian.from_moments(np.array([mean]), np.array([[sd**2]]))
    inference = way.local
    moments = inference.tilted(Target(client, q, n0, 1.0), np.random.default_rng(0))
    if inference.name in ("Laplace", "gradient steps"):
        # the mode; the grid has steps of 5e-4, and sd^-2 at the mode is that of a density skewed by 0.4
        assert moments.mean[0] == pytest.approx(mode, abs=1e-3)
        assert np.sqrt(moments.covariance[0, 0]) == pytest.approx(sd, rel=0.1)
    elif inference.name in ("ADVI", "mean field"):
        # the Gaussian nearest in KL(q, p): its mean is nearer than the mode is
        assert abs(moments.mean[0] - mean) < abs(mode - mean) / 2
        assert np.sqrt(moments.covariance[0, 0]) == pytest.approx(sd, rel=0.1)
    else:
        ess = min(moments.diagnostics["ess"], 1000.0)
        assert abs(moments.mean[0] - mean) < 4 * sd / np.sqrt(ess)
        assert abs(np.sqrt(moments.covariance[0, 0]) / sd - 1) < 4 / np.sqrt(2 * ess)


def test_log_tilted_is_site_times_cavity_times_share(rng: np.random.Generator) -> None:
    """And its gradient is its derivative."""
    model, data = problems.schools()
    client = model.enrol(data)["school A"]
    cavity = Gaussian(np.array([0.1, -0.2]), np.array([[0.3, 0.1], [0.1, 0.4]]))
    density = log_tilted(Target(client, cavity, cavity, 1 / 8))
    n0 = client.layout.prior

    def expected(x: Array) -> float:
        phi, tau = x[:2], np.exp(x[1])
        prior = -0.5 * phi[0] ** 2 / 25 + phi[1] - np.log1p(tau**2 / 25)
        share = (prior - float(gaussian.log_kernel(n0, phi))) / 8
        site = norm.logpdf(28.0, x[2], 15.0) + norm.logpdf(x[2], x[0], tau)
        return float(site + gaussian.log_kernel(cavity, phi) + share)

    points = rng.normal(size=(5, 3)) * [3, 0.5, 5] + [2, 1, 5]
    constant = density(points[0])[0] - expected(points[0])
    for x in points:
        value, gradient = density(x)
        assert value - expected(x) == pytest.approx(constant, abs=1e-8)
        slope = [(expected(x + h) - expected(x - h)) / 2e-5 for h in 1e-5 * np.eye(3)]
        assert_allclose(gradient, slope, rtol=1e-6, atol=1e-6)


# --- the joint mode, gradient steps, NUTS -----------------------------------------------------------------------------


def test_laplace_without_a_joint_mode_is_a_failure_that_names_others() -> None:
    client = problems.declared(rising_builder, ("mu",)).enrol({"a": {"y": np.zeros(3)}})["a"]
    q = Gaussian(np.zeros(1), np.eye(1))
    with pytest.raises(LocalFailure, match=r"NestedLaplace\(\) or fedppl.local.NUTS\(\)"):
        fedppl.local.Laplace().tilted(Target(client, q, q, 0.0), np.random.default_rng(0))


def test_variational_fit_that_has_not_converged_is_a_failure_that_names_the_setting() -> None:
    with pytest.raises(LocalFailure, match="max_iterations=1"):
        fedppl.local.MeanField(max_iterations=1).tilted(the_case("regression").target, np.random.default_rng(0))


@pytest.mark.parametrize("learning_rate", [0.09, 0.1, 1.0, 1e6])
def test_gradient_steps_that_diverge_are_a_failure_that_names_the_setting(learning_rate: float) -> None:
    """The largest curvature of `means` is 25: steps above 2 / 25 grow without bound, slowly or fast."""
    with pytest.raises(LocalFailure, match=f"learning_rate={learning_rate}"):
        fedppl.local.GradientSteps(steps=100, learning_rate=learning_rate).tilted(
            the_case("means").target, np.random.default_rng(0)
        )


def test_gradient_steps_that_have_not_arrived_say_so() -> None:
    """One small step from q's mean: the decrement is that of the Gaussian, gᵀ A⁻¹ g."""
    case = the_case("means")
    moments = fedppl.local.GradientSteps(steps=1, learning_rate=1e-3).tilted(case.target, np.random.default_rng(0))
    start = np.concatenate([gaussian.mean(case.target.global_), case.target.client.initial])
    x = start + 1e-3 * (case.joint.linear - case.joint.precision @ start)
    assert_allclose(moments.mean, x[:1], rtol=1e-10)
    gap = x - case.mean
    assert moments.diagnostics["decrement"] == pytest.approx(gap @ case.joint.precision @ gap, rel=1e-6)


def test_nuts_withholds_moments_of_chains_that_disagree() -> None:
    # of 50 draws a chain, R̂ is above 1.0001
    inference = fedppl.local.NUTS(draws=50, tune=50, rhat_limit=1.0001, nuts_sampler="pymc")
    target = the_case("means").target
    with pytest.raises(LocalFailure, match="R̂.*tune= and draws="):
        inference.tilted(target, np.random.default_rng(0))
    # but draws are not withheld
    drawn = inference.draw(target, 50, 2, np.random.default_rng(0))
    assert drawn.diagnostics["rhat"] > 1.0001


def test_nuts_reports_its_monte_carlo_error() -> None:
    moments = fedppl.local.NUTS(draws=100, tune=100, nuts_sampler="pymc").tilted(
        the_case("means").target, np.random.default_rng(0)
    )
    assert moments.diagnostics["mc_error"] == pytest.approx(1 / np.sqrt(min(moments.diagnostics["ess"], 200.0)))
    assert moments.diagnostics["divergences"] == 0


def test_nuts_shrinks_the_precision_of_its_draws() -> None:
    """The mean of an inverse Wishart: Q̂ = (n − m − 2) S⁻¹ with S the scatter of n effective draws."""
    case = the_case("regression")
    moments = fedppl.local.NUTS(draws=100, tune=100, nuts_sampler="pymc").tilted(case.target, np.random.default_rng(0))
    n = min(moments.diagnostics["ess"], 200.0)
    assert_allclose(moments.precision, (n - 3 - 2) * np.linalg.inv((n - 1) * moments.covariance), rtol=1e-9)


def test_nuts_runs_with_one_chain() -> None:
    inference = fedppl.local.NUTS(draws=200, tune=100, chains=1, nuts_sampler="pymc")
    moments = inference.tilted(the_case("means").target, np.random.default_rng(0))
    assert 0.99 < moments.diagnostics["rhat"] < 1.1


def test_nuts_samples_what_has_a_kink() -> None:
    """β ~ Laplace(0, e^{-log λ}), 20 rows: log λ by a grid over (β₁, β₂) for the density of β given log λ."""
    model, clients = problems.lasso()
    client = next(iter(model.enrol(clients).values()))
    X, y = client.arrays["X"], client.arrays["y"]
    cavity = Gaussian(np.zeros(1), np.eye(1))
    b = np.linspace(-1.5, 2.5, 161)
    beta = np.stack(np.meshgrid(b, b, indexing="ij"), axis=-1).reshape(-1, 2)
    likelihood = -0.5 * np.sum((y[:, None] - X @ beta.T) ** 2, axis=0)
    size = np.abs(beta).sum(axis=1)
    log_lambda = np.linspace(-5, 5, 401)
    logp = np.array([np.logaddexp.reduce(likelihood + 2 * v - np.exp(v) * size) - 0.5 * v**2 for v in log_lambda])
    weights = np.exp(logp - logp.max())
    weights /= weights.sum()
    mean = weights @ log_lambda
    sd = np.sqrt(weights @ (log_lambda - mean) ** 2)
    inference = fedppl.local.NUTS(draws=500, tune=400, nuts_sampler="pymc")
    moments = inference.tilted(Target(client, cavity, cavity, 0.0), np.random.default_rng(0))
    ess = min(moments.diagnostics["ess"], 1000.0)
    assert abs(moments.mean[0] - mean) < 4 * sd / np.sqrt(ess)
    assert abs(np.sqrt(moments.covariance[0, 0]) / sd - 1) < 4 / np.sqrt(2 * ess)
