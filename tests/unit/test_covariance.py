"""Structures of Ω: closed forms, and what every one promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.optimize import minimize

from fedppl import DeclarationError, covariance
from fedppl.numerics.covariance import Covariance

STRUCTURES: dict[str, Covariance] = {
    "moving average": covariance.moving_average(),
    "trace-constrained": covariance.trace_constrained(),
    "trace 1": covariance.trace_constrained(trace=1.0),
    "exchangeable": covariance.exchangeable(),
    "low rank": covariance.low_rank(2),
    "Ledoit-Wolf": covariance.ledoit_wolf(),
}
K, D = 6, 4


def moment(seed: int = 0, count: int = K, size: int = D) -> tuple[Any, Any]:
    """Means (K, d), and their moment with the same posterior variance everywhere."""
    mean = np.random.default_rng(seed).normal(size=(count, size))
    return mean, mean @ mean.T / size + 0.1 * np.eye(count)


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("rank_one", [False, True])
def test_updates_are_symmetric_and_positive_definite(name: str, rank_one: bool) -> None:
    """Also where the moment is singular, as it is when K > d and nothing else is known."""
    mean, some = moment()
    if rank_one:
        mean = np.ones((K, D))
        some = mean @ mean.T / D
    omega = STRUCTURES[name].update(STRUCTURES[name].start(K), mean, some)
    assert_allclose(omega.matrix, omega.matrix.T)
    assert np.linalg.eigvalsh(omega.matrix)[0] > 0
    if omega.factor.shape[1]:
        assert_allclose(omega.matrix, omega.remainder * np.eye(K) + omega.factor @ omega.factor.T)


@pytest.mark.parametrize("name", STRUCTURES)
def test_all_start_at_the_identity(name: str) -> None:
    assert_allclose(STRUCTURES[name].start(K).matrix, np.eye(K))


def loss(omega: Any, some: Any) -> float:
    """What an M-step minimises: log |Ω| + tr(Ω⁻¹ M)."""
    return float(np.linalg.slogdet(omega)[1] + np.trace(np.linalg.solve(omega, some)))


def test_exchangeable_maximises_the_objective_among_its_kind() -> None:
    mean, some = moment()
    some = some + 1.0  # a common part, so that b > 0
    found = covariance.exchangeable().update(covariance.exchangeable().start(K), mean, some).matrix

    def of(x: Any) -> float:
        return loss(np.exp(x[0]) * np.eye(K) + np.exp(x[1]), some)

    best = minimize(of, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12})
    assert loss(found, some) == pytest.approx(best.fun, abs=1e-9)
    assert found[0, 1] == pytest.approx(np.exp(best.x[1]), rel=1e-4)


@pytest.mark.parametrize("common", [-0.9, -0.2])
def test_exchangeable_is_the_best_without_a_common_part_where_that_would_be_negative(common: float) -> None:
    """−log|Ω| − tr(Ω⁻¹ M) is largest at a = tr M / K."""
    moment = np.array([[1.0, common], [common, 2.0]])
    structure = covariance.exchangeable()
    found = structure.update(structure.start(2), np.zeros((2, 1)), moment).matrix
    assert_allclose(found, 1.5 * np.eye(2), rtol=1e-12)
    assert all(loss(found, moment) < loss(a * np.eye(2), moment) for a in (1.4, 1.6))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_low_rank_maximises_the_objective_among_its_kind(rank: int) -> None:
    """No small change of factors or remainder is better (Tipping and Bishop's closed form)."""
    mean, some = moment()
    structure = covariance.low_rank(rank)
    omega = structure.update(structure.start(K), mean, some)
    at = loss(omega.matrix, some)
    rng = np.random.default_rng(1)
    for _ in range(200):
        factor = omega.factor + 1e-3 * rng.normal(size=omega.factor.shape)
        remainder = omega.remainder * np.exp(1e-3 * rng.normal())
        assert loss(remainder * np.eye(K) + factor @ factor.T, some) >= at - 1e-12
    values = np.sort(np.linalg.eigvalsh(omega.matrix))
    assert_allclose(values[: K - rank], np.linalg.eigvalsh(some)[: K - rank].mean())


def test_moving_average_is_the_papers() -> None:
    mean, some = moment()
    structure = covariance.moving_average(0.25)
    omega = structure.update(structure.start(K), mean, some)
    assert_allclose(omega.matrix, 0.75 * np.eye(K) + 0.25 * some)
    assert not structure.to_the_end


def test_trace_constrained_is_the_square_root_with_its_trace() -> None:
    mean, some = moment()
    structure = covariance.trace_constrained(trace=1.0, floor=1e-12)
    omega = structure.update(structure.start(K), mean, some).matrix
    assert np.trace(omega) == pytest.approx(1.0)
    square = omega @ omega
    assert_allclose(square / np.trace(square), some / np.trace(some), rtol=1e-6, atol=1e-9)


def test_ledoit_wolf_has_the_published_intensity() -> None:
    """Written out: d² / n-averaged squared distances, draw by draw (their lemma 3.4)."""
    mean, _ = moment()
    draws = mean.T
    sample = draws.T @ draws / D
    m = np.trace(sample) / K
    d2 = np.sum((sample - m * np.eye(K)) ** 2) / K
    b2 = sum(np.sum((np.outer(x, x) - sample) ** 2) / K for x in draws) / D**2
    assert covariance.ledoit_wolf_intensity(draws) == pytest.approx(min(b2, d2) / d2)


def test_ledoit_wolf_trusts_many_draws_and_few_clients() -> None:
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(5000, 3)) * [1.0, 2.0, 3.0]
    assert covariance.ledoit_wolf_intensity(draws) < 0.01
    assert covariance.ledoit_wolf_intensity(rng.normal(size=(3, 200))) > 0.5
    assert covariance.ledoit_wolf_intensity(np.zeros((3, 4))) == 1.0


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda: covariance.moving_average(0.0), "alpha"),
        (lambda: covariance.moving_average(1.0), "alpha"),
        (lambda: covariance.trace_constrained(trace=-1.0), "trace"),
        (lambda: covariance.trace_constrained(floor=0.0), "floor"),
        (lambda: covariance.low_rank(0), "rank"),
        (lambda: covariance.low_rank(1.5), "rank"),  # type: ignore[arg-type]
        (lambda: covariance.low_rank(True), "rank"),
        (lambda: covariance.low_rank(6).start(6), "number of clients"),
    ],
)
def test_bad_settings_are_refused(build: Any, word: str) -> None:
    with pytest.raises(DeclarationError, match=word):
        build()
