"""The benchmark of HM1's simulations: its closed forms, and a run of its smallest case."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import hm1_simulation as simulation
from hm1_simulation import Task


def test_the_exact_fit_with_independent_clients_is_ridge_of_each() -> None:
    clients, theta, _ = simulation.generate(Task("I", 0))
    found = simulation.exact(clients, np.eye(2), np.array([0.01, 0.04]))
    for k, data in enumerate(clients.values()):
        X, noise = data["X"], (0.01, 0.04)[k]
        assert_allclose(found[k], np.linalg.solve(X.T @ X / noise + np.eye(theta.shape[1]), X.T @ data["y"] / noise))


@pytest.mark.parametrize("case", [*simulation.CASES, *simulation.FIFTH])
def test_cases_are_the_papers(case: str) -> None:
    clients, theta, omega = simulation.generate(Task(case, 1))
    rows = [len(data["y"]) for data in clients.values()]
    expected = {"I": [20, 200], "II": [40] * 30 + [275] * 70, "III": [20] * 100, "IV": [200] * 100}
    assert rows == expected.get(case, [20] * 100)
    assert theta.shape == (len(rows), 5 if case == "I" else 8)
    assert np.linalg.eigvalsh(omega)[0] > 0
    again = simulation.generate(Task(case, 1))[1]
    assert_allclose(again, theta)


def test_a_rmse_of_a_known_error() -> None:
    """An error of (1, 0, ...) in θ_1 alone: sqrt(mean x₁²) = 1 up to 1 / sqrt(2000), averaged over 100 clients."""
    theta = np.zeros((100, 8))
    estimate = theta.copy()
    estimate[0, 0] = 1.0
    assert simulation.a_rmse(Task("III", 0), estimate, theta) == pytest.approx(0.01, rel=0.1)


@pytest.mark.slow
def test_a_run_of_the_first_case() -> None:
    figures = simulation.one_run(Task("I", 0))
    assert figures["HM1"] == pytest.approx(figures["Bayes"], rel=0.05)
    assert figures["HM1"] == pytest.approx(figures["least squares"], rel=0.05)
    assert figures["Algorithm 1"] > 1.5 * figures["HM1"]  # the prior is over-weighted, as docs/hm1.md says
    assert len(figures["HM1 by round"]) <= simulation.ROUNDS
