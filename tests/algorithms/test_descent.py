"""Gradient steps at a client: against plain NumPy, and what rows and batches of a client's data are."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pymc as pm
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from fedppl import gaussian
from fedppl.gaussian import Gaussian
from fedppl.local.gradient_steps import Descent, Objective, _batches, check_batches, descend
from fedppl.model.client import ClientModel
from fedppl.numerics.prior import SharedPrior
from fedppl.types import DataError, LocalFailure
from tests.support import pooled, problems


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def client_of(problem: Any, which: int = 1) -> tuple[ClientModel, Any]:
    model, clients = problem()
    client_id = list(clients)[which]
    return model.enrol({client_id: clients[client_id]})[client_id], clients[client_id]


PLAIN = Objective(0.1, np.zeros((2, 2)), np.zeros(2))


# --- steps ----------------------------------------------------------------------------------------------------


def test_steps_on_a_quadratic_end_where_they_must() -> None:
    """x* + (I − ηH)ᵀ (x − x*) with H = s XᵀX + A and x* = H⁻¹ (s Xᵀy + b)."""
    client, d = client_of(pooled.linear)
    A, b = np.array([[0.4, 0.1], [0.1, 0.7]]), np.array([0.3, -0.2])
    x = descend(client, np.array([2.0, -1.0]), Objective(0.1, A, b), Descent(0.05, 13, None), rng())
    exact = pooled.after_steps(
        0.1 * d["X"].T @ d["X"] + A, 0.1 * d["X"].T @ d["y"] + b, np.array([2.0, -1.0]), 0.05, 13
    )
    assert_allclose(x, exact, rtol=1e-12)


def test_what_is_added_to_the_loss_is_added_for_shared_coordinates_only() -> None:
    """(μ, a, β) of the conjugate regression: its 5 x 5 precision without a cavity, scaled, and A in one corner."""
    client, d = client_of(problems.regression)
    columns = np.column_stack([np.zeros((len(d["y"]), 2)), np.ones(len(d["y"])), d["X"]])
    B = np.array([[-1.0, 0, 0, 1, 0], [0, -1.0, 0, 0, 1]])
    H = 0.05 * (columns.T @ columns + 4 * B.T @ B)
    linear = 0.05 * columns.T @ d["y"]
    A, b = 0.3 * np.eye(3), np.array([0.1, 0.2, 0.3])
    H[:3, :3] += A
    linear[:3] += b
    start = np.array([0.5, -0.5, 1.0, 0.2, 0.1])
    x = descend(client, start, Objective(0.05, A, b), Descent(0.1, 9, None), rng())
    assert_allclose(x, pooled.after_steps(H, linear, start, 0.1, 9), rtol=1e-11)


def test_a_share_of_a_prior_that_is_not_gaussian_is_in_the_slope() -> None:
    """p = N(1, 0.5²) handed over as "not Gaussian" beside N_0 = N(0, 3²): s · share · log p / N_0 is quadratic too."""
    client, d = client_of(pooled.linear)
    p, n0 = Gaussian(np.full(2, 4.0), 4.0 * np.eye(2)), client.layout.prior
    prior = SharedPrior(
        log_density=lambda phi: gaussian.log_kernel(p, phi),
        gradients=lambda phi: p.linear - phi @ p.precision,
        gaussian=n0,
        is_gaussian=False,
    )
    folded = dataclasses.replace(client, prior=prior)
    x = descend(folded, np.zeros(2), PLAIN._replace(prior_share=0.5), Descent(0.05, 6, None), rng())
    H = 0.1 * (d["X"].T @ d["X"] + 0.5 * (p.precision - n0.precision))
    b = 0.1 * (d["X"].T @ d["y"] + 0.5 * (p.linear - n0.linear))
    assert_allclose(x, pooled.after_steps(H, b, np.zeros(2), 0.05, 6), rtol=1e-10)
    without = descend(folded, np.zeros(2), PLAIN, Descent(0.05, 6, None), rng())
    assert np.max(np.abs(x - without)) > 1e-3


def test_arrays_that_are_read_only_will_do_and_stay_as_they_are() -> None:
    client, _ = client_of(pooled.linear)
    x, A, b = np.ones(2), np.eye(2), np.ones(2)
    for array in (x, A, b):
        array.flags.writeable = False
    for size in (None, 3):
        descend(client, x, Objective(0.1, A, b), Descent(0.05, 4, size), rng())
    assert_array_equal(x, np.ones(2))


@pytest.mark.parametrize(("steps", "rate"), [(30, 5.0), (2000, 5.0)])
def test_steps_that_diverge_name_the_learning_rate(steps: int, rate: float) -> None:
    """A loss that rises, and numbers that overflow."""
    client, _ = client_of(pooled.linear)
    with pytest.raises(LocalFailure, match=r"diverged; lower learning_rate=5"):
        descend(client, np.zeros(2), PLAIN, Descent(rate, steps, None), rng())


def test_batches_that_overflow_name_the_learning_rate() -> None:
    client, _ = client_of(pooled.linear)
    with pytest.raises(LocalFailure, match=r"diverged; lower learning_rate=50"):
        descend(client, np.zeros(2), PLAIN, Descent(50.0, 3000, 2), rng())


def test_a_loss_that_swings_a_little_is_no_divergence() -> None:
    """η between 1 / λ and 2 / λ overshoots in every step and arrives."""
    client, d = client_of(pooled.linear)
    rate = 1.9 / np.linalg.eigvalsh(0.1 * d["X"].T @ d["X"])[-1]
    x = descend(client, np.zeros(2), PLAIN, Descent(rate, 400, None), rng())
    assert_allclose(x, np.linalg.solve(d["X"].T @ d["X"], d["X"].T @ d["y"]), atol=1e-6)


# --- batches --------------------------------------------------------------------------------------------------


def test_an_epoch_of_batches_is_a_partition_and_the_next_one_another() -> None:
    found = list(_batches(12, Descent(0.1, 6, 4), rng()))
    for epoch in (found[:3], found[3:]):
        assert_array_equal(np.sort(np.concatenate(epoch)), np.arange(12))
    assert not np.array_equal(np.concatenate(found[:3]), np.concatenate(found[3:]))
    # what is left over at the end of an epoch makes no batch of its own
    assert [len(batch) for batch in _batches(10, Descent(0.1, 5, 4), rng())] == [4] * 5
    odd = list(_batches(10, Descent(0.1, 5, 4), rng()))
    assert len(np.unique(np.concatenate(odd[:2]))) == 8


@pytest.mark.parametrize("problem", [pooled.linear, problems.regression, pooled.logit])
def test_batch_gradients_of_an_epoch_average_to_the_full_gradient(problem: Any) -> None:
    """Mean over a partition of n/n_b (∇ log f(batch) − ∇ log f(∅)) + ∇ log f(∅): the prior of θ counts once."""
    client, _ = client_of(problem)
    x = 0.3 * rng(2).normal(size=client.shared_size + client.local_size)
    rows = client.rows
    size = next(size for size in (4, 5, 3) if rows % size == 0 and rows > size)
    none = client.kernel(x, *client.batch(np.arange(0)))[1:]
    parts = []
    for chosen in _batches(rows, Descent(0.1, rows // size, size), rng()):
        gradient = client.kernel(x, *client.batch(chosen))[1:]
        parts.append(rows / size * (gradient - none) + none)
        assert np.max(np.abs(parts[-1] - none)) > 0
    full = client.kernel(x, *client.packed)[1:]
    assert_allclose(np.mean(parts, axis=0), full, rtol=1e-11, atol=1e-11)
    assert np.max(np.abs(parts[0] - full)) > 1e-3  # a single one differs


def test_steps_in_batches_are_those_of_plain_numpy() -> None:
    """x ← x − η [s n/n_b X_bᵀ(X_b x − y_b) + A x − b] over the same rows."""
    client, d = client_of(pooled.linear)
    A, b = 0.3 * np.eye(2), np.array([0.3, -0.2])
    descent = Descent(0.05, 17, 3)
    x = np.array([1.0, 1.0])
    for chosen in _batches(len(d["y"]), descent, rng(7)):
        X, y = d["X"][chosen], d["y"][chosen]
        x = x - 0.05 * (0.1 * len(d["y"]) / 3 * X.T @ (X @ x - y) + A @ x - b)
    assert_allclose(descend(client, np.array([1.0, 1.0]), Objective(0.1, A, b), descent, rng(7)), x, rtol=1e-11)


def test_in_batches_the_prior_of_local_variables_counts_once() -> None:
    """Conjugate regression over x = (μ, a, β): rows weigh n/n_b, N(β; μ, ½²) weighs one."""
    client, d = client_of(problems.regression)
    rows, descent = len(d["y"]), Descent(0.3, 11, 3)
    columns = np.column_stack([np.zeros((rows, 2)), np.ones(rows), d["X"]])
    B = np.array([[-1.0, 0, 0, 1, 0], [0, -1.0, 0, 0, 1]])
    x = start = np.array([0.5, -0.5, 1.0, 0.2, 0.1])
    for chosen in _batches(rows, descent, rng(7)):
        Z, y = columns[chosen], d["y"][chosen]
        x = x - 0.3 * 0.1 * (rows / 3 * Z.T @ (Z @ x - y) + 4 * B.T @ B @ x)
    found = descend(client, start, Objective(0.1, np.zeros((3, 3)), np.zeros(3)), descent, rng(7))
    assert_allclose(found, x, rtol=1e-10)


@pytest.mark.parametrize("size", [10, 11, 500])
def test_a_batch_of_all_rows_is_no_batch(size: int) -> None:
    client, _ = client_of(pooled.linear)
    assert client.rows == 10
    whole = descend(client, np.ones(2), PLAIN, Descent(0.05, 8, None), rng(1))
    assert_array_equal(descend(client, np.ones(2), PLAIN, Descent(0.05, 8, size), rng(2)), whole)


# --- rows of a client's data ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["regression", "noise", "lasso", "logistic"])
def test_a_batch_is_a_client_with_those_rows(name: str) -> None:
    client, d = client_of(problems.ALL[name], which=0)
    chosen = np.array([4, 0, 3])
    other = problems.ALL[name]()[0].with_data(client, "fewer", {key: value[chosen] for key, value in d.items()})
    x = 0.2 * rng(3).normal(size=client.shared_size + client.local_size)
    assert_array_equal(client.kernel(x, *client.batch(chosen)), client.kernel(x, *other.packed))


def two_outcomes(y: Any, z: Any) -> Any:
    with pm.Model() as model:
        y, z = pm.Data("y", y), pm.Data("z", z)
        mu = pm.Normal("mu", 0, 1)
        pm.Normal("obs", mu, 1, observed=y)
        pm.Normal("more", mu, 1, observed=z)
    return model


def through_an_expression(y: Any, unit: Any) -> Any:
    with pm.Model() as model:
        y, unit = pm.Data("y", y), pm.Data("unit", unit)
        mu = pm.Normal("mu", 0, 1)
        pm.Normal("obs", mu, 1, observed=2.0 * y / unit)
    return model


def enrolled(builder: Any, **data: Any) -> ClientModel:
    return problems.declared(builder, ("mu",)).enrol({"a": data})["a"]


@pytest.mark.slow
def test_rows_are_what_is_observed() -> None:
    assert [client_of(problems.regression, k)[0].rows for k in range(3)] == [5, 8, 11]
    assert client_of(problems.schools)[0].rows == 1  # 0-d data
    assert enrolled(two_outcomes, y=np.ones(5), z=np.ones(5)).rows == 5
    assert enrolled(two_outcomes, y=np.ones(5), z=np.ones(3)).rows == 8
    assert enrolled(through_an_expression, y=np.ones(6), unit=np.array(2.0)).rows == 6
    assert enrolled(problems.without_containers, y=np.ones(4)).rows == 4


@pytest.mark.slow
def test_batches_that_are_sums_over_rows_pass_the_check() -> None:
    for name in ("regression", "noise", "lasso", "logistic", "transforms", "schools"):
        check_batches(client_of(problems.ALL[name], which=0)[0], 2)
    check_batches(enrolled(two_outcomes, y=np.ones(5), z=np.ones(5)), 2)
    check_batches(client_of(problems.counts)[0], None)  # no batches asked for


def test_batches_that_cannot_be_taken_are_refused() -> None:
    for client in (
        client_of(problems.counts)[0],
        enrolled(two_outcomes, y=np.ones(5), z=np.ones(3)),
        enrolled(problems.without_containers, y=np.ones(4)),
    ):
        with pytest.raises(DataError, match=rf"client '{client.client_id}'.*use batch_size=None"):
            check_batches(client, 2)
