"""Simulation-based calibration of the shared posterior, with the benchmark's own functions."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.calibration import p_values, ranks


def test_p_values_find_ranks_that_are_not_uniform() -> None:
    """Uniform ranks pass; ranks of a posterior that is half as wide as it should be do not."""
    rng = np.random.default_rng(0)
    uniform = rng.integers(0, 1000, size=(200, 1))
    narrow = np.where(
        rng.uniform(size=(200, 1)) < 0.5, rng.integers(0, 150, (200, 1)), rng.integers(850, 1000, (200, 1))
    )
    assert p_values(uniform)[0] > 0.01
    assert p_values(narrow)[0] < 1e-6


@pytest.mark.slow
def test_ranks_of_the_truth_are_uniform() -> None:
    """100 data sets of FedLin's Example 4.1 with 10 clients, truth from the prior: chi-square over ten bins."""
    found, converged = ranks(data_sets=100, clients=10, rows=30, coefficients=2, seed=1)
    assert converged == 100
    assert np.all(p_values(found) > 0.01)
