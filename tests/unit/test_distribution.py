"""Draws by slopes of a log density, and by Hamiltonian trajectories."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedppl.local.conditional_draws import draw_by_slopes, trajectories
from fedppl.types import Array

NODES = np.linspace(-9.0, 9.0, 85)
COUNT = 20_000


def drawn(slope: Any, nodes: Array = NODES) -> Array:
    x = np.sinh(nodes)
    with np.errstate(all="ignore"):
        slopes = np.repeat((slope(x) * np.cosh(nodes))[:, None], COUNT, axis=1)
    return np.sinh(draw_by_slopes(nodes, slopes, np.log(np.cosh(nodes)), np.random.default_rng(1)))


@pytest.mark.parametrize(
    ("slope", "distribution"),
    [
        (lambda x: -x, stats.norm()),
        (lambda x: -(x - 2.5) / 0.6**2, stats.norm(2.5, 0.6)),
        (lambda x: -2 * x / (1 + x**2), stats.cauchy()),
        (lambda x: -np.tanh(x / 2), stats.logistic()),
        (lambda x: 1 - np.exp(x), stats.gumbel_l()),  # an end that overflows
    ],
)
def test_draws_have_the_distribution(slope: Any, distribution: Any) -> None:
    found = distribution.cdf(drawn(slope))
    assert stats.kstest(found, "uniform").pvalue > 0.01
    for tail in (np.sum(found < 0.005), np.sum(found > 0.995)):
        assert stats.binomtest(int(tail), COUNT, 0.005).pvalue > 0.001


def test_each_column_has_a_density_of_its_own() -> None:
    means = np.array([[-1.0, 0.5], [1.5, 3.0]])
    slopes = -(np.sinh(NODES)[:, None, None, None] - means) * np.cosh(NODES)[:, None, None, None]
    slopes = np.broadcast_to(slopes, (len(NODES), 500, 2, 2))
    found = np.sinh(draw_by_slopes(NODES, slopes, np.log(np.cosh(NODES)), np.random.default_rng(2)))
    np.testing.assert_allclose(found.mean(axis=0), means, atol=0.2)


@pytest.mark.parametrize("d", [1, 4, 30])
def test_trajectories_leave_a_density_as_it_is_and_find_it(d: int) -> None:
    """Skewed, in sds of its curvature at the mode, and begun there."""
    rng, sd = np.random.default_rng(3), 1 / np.sqrt(3)

    def density(z: Array) -> tuple[Array, Array]:
        x = np.log(3.0) + sd * z
        return np.sum(3 * x - np.exp(x), axis=1), sd * (3 - np.exp(x))

    x = np.log(3.0) + sd * trajectories(density, np.zeros((4000, d)), rng)
    assert stats.kstest(stats.gamma(3).cdf(np.exp(x[:, 0])), "uniform").statistic < 0.03
    assert np.mean(x) == pytest.approx(0.9228, abs=0.03)  # digamma of 3


def test_trajectories_go_to_no_place_without_a_density() -> None:
    def density(z: Array) -> tuple[Array, Array]:
        inside = z[:, 0] > -0.5
        return np.where(inside, -0.5 * z[:, 0] ** 2, -np.inf), np.where(inside[:, None], -z, np.nan)

    ended = stats.truncnorm(-0.5, np.inf)
    z = trajectories(density, ended.rvs(size=(4000, 1), random_state=5), np.random.default_rng(4))
    assert z.min() > -0.5
    assert stats.kstest(ended.cdf(z[:, 0]), "uniform").pvalue > 0.01
