"""Newton searches and difference Hessians, through real clients' compiled log densities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import lambertw

from fedppl.model.client import ClientModel
from fedppl.numerics import pairs
from fedppl.numerics.pairs import Modes, difference_hessian
from tests.support import problems


def search(client: ClientModel, phi: Any, theta: Any, limit: int = 100) -> Modes:
    """Inner mode at φ from θ, as the only one of many."""
    of, who = pairs.one(client.kernel, client.shared_size, client.packed), np.zeros(1, dtype=np.int64)
    found = pairs.modes(of, np.asarray(phi, dtype=float)[None], np.asarray(theta, dtype=float)[None], who, limit=limit)
    return Modes(*(part[0] for part in found))


def regression_client() -> ClientModel:
    model, data = problems.regression()
    return model.enrol(data)["clinic 2"]


def counts_client() -> ClientModel:
    model, data = problems.counts()
    return model.enrol(data)["unit 7"]


def noise_client() -> ClientModel:
    model, data = problems.noise(2)
    return model.enrol(data)["site 0"]


# --- inner mode -----------------------------------------------------------------------------------------------------


def test_a_quadratic_takes_one_step_to_its_mode() -> None:
    # β | μ, a, y: precision A = XᵀX + 4 I, mode A⁻¹ (Xᵀ(y − a) + 4 μ)
    client = regression_client()
    phi = np.array([0.7, -1.2, 0.4])
    X, y = client.arrays["X"], client.arrays["y"]
    A = X.T @ X + 4 * np.eye(2)
    mode = np.linalg.solve(A, X.T @ (y - phi[2]) + 4 * phi[:2])
    for theta in ([0.0, 0.0], [30.0, -50.0]):
        found = search(client, phi, theta, limit=3)  # one to go there, and those that notice the arrival
        assert found.arrived
        assert_allclose(found.theta, mode, rtol=1e-7)
        assert_allclose(found.root @ found.root.T, A, rtol=1e-7)
        assert_allclose(found.root, np.linalg.cholesky(A), rtol=1e-7, atol=1e-12)
        # ∂²ℓ/∂μ∂β = 4 I, ∂²ℓ/∂a∂β = −Σ x_i
        assert_allclose(found.cross, np.vstack([4 * np.eye(2), -X.sum(axis=0)]), rtol=1e-6, atol=1e-6)
        assert_allclose(found.scale, 1 / np.sqrt(np.diag(A)), rtol=1e-7)


def test_the_output_is_the_one_at_the_mode() -> None:
    client = regression_client()
    phi = np.array([0.7, -1.2, 0.4])
    found = search(client, phi, np.zeros(2))
    output = client.kernel(np.concatenate([phi, found.theta]), *client.packed)
    assert_array_equal(np.append(found.value, found.slopes), output)
    assert_allclose(output[4:], 0, atol=1e-5)


@pytest.mark.parametrize("mu", [-3.0, 0.5, 4.0])
def test_poisson_mode(mu: float) -> None:
    # y − e^θ − (θ − μ) / 0.09 = 0, so θ = c − W(0.09 e^c) with c = μ + 0.09 y; A = e^θ + 1 / 0.09
    client = counts_client()
    c = mu + 0.09 * client.arrays["y"]
    mode = c - lambertw(0.09 * np.exp(c)).real
    found = search(client, [mu], np.full(7, 2.0))
    assert found.arrived
    # the search ends at a decrement of 1e-10: within 1e-5 sd
    assert_allclose(found.theta, mode, atol=1e-5 * 0.3)
    assert_allclose(found.root @ found.root.T, np.diag(np.exp(mode) + 1 / 0.09), rtol=1e-5, atol=1e-5)
    assert_allclose(found.cross, np.full((1, 7), 1 / 0.09) * np.eye(7).sum(axis=0), rtol=1e-6)


def test_a_start_where_the_density_is_not_concave_still_leads_to_the_mode() -> None:
    # σ far too small and far too large
    client = noise_client()
    phi = np.array([1.0, -0.5, -1.0])
    reference = search(client, phi, client.initial)
    assert reference.arrived
    for theta in ([1.0, -0.5, -6.0], [5.0, 5.0, -4.0], [0.0, 0.0, 5.0]):
        found = search(client, phi, theta)
        assert found.arrived
        assert_allclose(found.theta, reference.theta, atol=1e-5)


def test_a_start_of_zero_density_is_not_finite() -> None:
    # σ = exp(−800) = 0
    client = noise_client()
    found = search(client, np.array([1.0, -0.5, -1.0]), [0.0, 0.0, -800.0])
    assert not found.arrived and not np.isfinite(found.value)


def rising_builder(y: Any) -> Any:
    """A log density that rises in θ for ever: the potential takes its prior away again."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        mu = pm.Normal("mu", 0, 1)
        theta = pm.Normal("theta", 0, 1)
        pm.Potential("rise", theta + theta**2 / 2)
        pm.Normal("obs", mu, 1, observed=y)
    return model


def test_a_density_without_a_mode_has_none() -> None:
    client = problems.declared(rising_builder, ("mu",)).enrol({"a": {"y": np.zeros(3)}})["a"]
    assert not search(client, [0.0], [0.0]).arrived


# --- difference Hessian ---------------------------------------------------------------------------------------------


def regression_curvature(X: Any) -> Any:
    """Negative Hessian of log p(y, β | μ, a) in (μ, a, β): 4 |β − μ|² + |y − a − Xβ|², halved."""
    eye, ones = np.eye(2), np.ones((len(X), 1))
    differences = 2 * np.hstack([-eye, np.zeros((2, 1)), eye])
    fit = np.hstack([np.zeros((len(X), 2)), ones, X])
    return differences.T @ differences + fit.T @ fit


def test_difference_hessian_of_a_quadratic(rng: np.random.Generator) -> None:
    client = regression_client()
    expected = -regression_curvature(client.arrays["X"])
    for scale in (0.01, 0.1, 1.0):
        x = rng.normal(size=5)
        before = x.copy()
        found = difference_hessian(client.kernel, x, np.full(5, scale), client.packed)
        assert_allclose(found, expected, rtol=1e-7, atol=1e-7)
        assert_array_equal(found, found.T)
        assert_array_equal(x, before)


def test_difference_hessian_leaves_its_arguments_alone() -> None:
    client = regression_client()
    x, scale = np.ones(5), np.full(5, 0.1)
    difference_hessian(client.kernel, x, scale, client.packed)
    assert_array_equal(x, np.ones(5))
    assert_array_equal(scale, np.full(5, 0.1))


def test_difference_hessian_of_poisson_counts(rng: np.random.Generator) -> None:
    # In (μ, θ): −n / 0.09, 1 / 0.09 across, −e^θ − 1 / 0.09 along θ. The error of a central difference over
    # h = 1e-3 scale is h² / 6 times the third derivative e^θ.
    client = counts_client()
    x = np.concatenate([[0.5], rng.normal(1, 0.5, size=7)])
    expected = np.diag(np.concatenate([[-7 / 0.09], -np.exp(x[1:]) - 1 / 0.09]))
    expected[0, 1:] = expected[1:, 0] = 1 / 0.09
    found = difference_hessian(client.kernel, x, np.full(8, 0.3), client.packed)
    assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_difference_hessian_where_it_is_indefinite() -> None:
    # log τ far below |θ − μ|: with e = y − Xθ, s = 1/σ², t = 1/τ²,
    # −½ s e·e − n log σ − ½ t |θ − μ|² − 2 log τ, apart from the prior −2 (log σ + ½)² of log σ
    client = noise_client()
    X, y = client.arrays["X"], client.arrays["y"]
    mu, log_tau, theta, log_sigma = np.array([0.0, 0.3]), -1.0, np.array([1.0, -0.5]), 0.2
    e, gap, s, t = y - X @ theta, theta - mu, np.exp(-2 * log_sigma), np.exp(-2 * log_tau)
    M, T, B, S = slice(0, 2), 2, slice(3, 5), 5
    expected = np.zeros((6, 6))
    expected[M, M] = -t * np.eye(2)
    expected[T, T] = -2 * t * gap @ gap
    expected[B, B] = -s * X.T @ X - t * np.eye(2)
    expected[S, S] = -2 * s * e @ e - 4
    expected[M, B] = expected[B, M] = t * np.eye(2)
    expected[M, T] = expected[T, M] = -2 * t * gap
    expected[B, T] = expected[T, B] = 2 * t * gap
    expected[B, S] = expected[S, B] = -2 * s * X.T @ e
    assert np.linalg.eigvalsh(expected)[-1] > 1
    x = np.concatenate([mu, [log_tau], theta, [log_sigma]])
    found = difference_hessian(client.kernel, x, np.full(6, 0.1), client.packed)
    # h²/6 times the fourth derivative, with h = 1e-4: eight digits
    assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
