"""Integrals over four and more local coordinates: sparse grids where these are correlated, lines where they are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pymc as pm
import pytest

from fedppl import FederatedModel, gaussian
from fedppl.local import integrate, log_factors
from fedppl.numerics.integral import by_sparse_grid
from fedppl.types import Array


def slopes(X: Any, y: Any) -> pm.Model:
    """Four coefficients of a client's own, of binary rows."""
    with pm.Model() as model:
        X, y = pm.Data("X", X), pm.Data("y", y)
        beta = pm.Normal("beta", pm.Normal("mu", 0, 1.5, shape=4), pm.HalfNormal("tau", 1), shape=4)
        pm.Bernoulli("obs", logit_p=X @ beta, observed=y)
    return model


def pupils(right: Any) -> pm.Model:
    """Abilities of five pupils, who answer six items."""
    with pm.Model() as model:
        right = pm.Data("right", right)
        slope, difficulty = pm.LogNormal("slope", 0, 0.5), pm.Normal("difficulty", 0, 1, shape=6)
        ability = pm.Normal("ability", 0, 1, shape=5)
        pm.Bernoulli("obs", logit_p=slope * (ability[:, None] - difficulty), observed=right)
    return model


def heavy(y: Any) -> pm.Model:
    """Five levels with long tails, whose sum is told."""
    with pm.Model() as model:
        y = pm.Data("y", y)
        level = pm.StudentT("level", nu=2, mu=pm.Normal("mu", 0, 1), sigma=1, shape=5)
        pm.Normal("obs", level.sum(), 3, observed=y)
    return model


def stacked(model: FederatedModel, data: Any) -> tuple[integrate.Stacked, Array, Array]:
    (stack,) = integrate.stacks(model.enrol(data))
    prior = stack.prior.gaussian
    center = gaussian.mean(prior)
    return stack, center + 0.3 * np.random.default_rng(3).normal(size=(48, len(center))), center


@pytest.mark.parametrize(("size", "level"), [(2, 3), (4, 4), (6, 3)])
def test_a_sparse_grid_has_the_moments_of_a_normal(size: int, level: int) -> None:
    rule = by_sparse_grid(size, level)
    assert np.isclose(rule.weights.sum(), 1.0)
    assert np.allclose(rule.weights @ rule.nodes.nodes**4, 3.0)
    assert np.isclose(rule.weights @ (rule.nodes.nodes[:, 0] * rule.nodes.nodes[:, 1]) ** 2, 1.0)


def test_correlated_effects_are_integrated_by_sparse_grids_as_by_sampled_nodes() -> None:
    rng = np.random.default_rng(1)
    X = np.column_stack([np.ones(30), rng.normal(size=(30, 3))])
    y = (rng.random(30) < 1 / (1 + np.exp(-X @ [0.3, 0.8, -0.5, 0.2]))).astype(int)
    stack, points, center = stacked(FederatedModel(slopes, ["mu", "tau"]), {"a": {"X": X, "y": y}})
    client = stack.client(0)
    found = log_factors.by_two_levels(client, points, center, 0.003)
    assert found is not None
    sampled, errors, _ = log_factors._sampled(client, points, center)
    assert np.max(np.abs(found[0] - sampled)) < 0.01
    assert 1.48 * np.median(np.abs(found[0] - sampled)) < 0.003 + np.median(np.abs(errors))
    exact = integrate.summed(stack, points, np.arange(48), center, 1)
    rough = integrate.summed(stack, points, np.arange(0), center, 1, roughly=True)
    assert np.max(np.abs(rough.values - exact.values - exact.left_out)) < 0.3 * np.max(np.abs(exact.left_out))


@pytest.mark.slow
def test_lines_along_independent_axes_have_the_density_at_the_center_as_their_base() -> None:
    right = (np.random.default_rng(2).random((5, 6)) < 0.5).astype(int)
    stack, points, center = stacked(FederatedModel(pupils, ["slope", "difficulty"]), {"a": {"right": right}})
    exact = integrate.summed(stack, points, np.arange(48), center, 1)
    rough = integrate.summed(stack, points, np.arange(0), center, 1, roughly=True)
    assert np.ptp(exact.left_out) > 0.005
    assert np.max(np.abs(rough.values - exact.values - exact.left_out)) < 0.0005


def test_heavy_tails_are_left_to_sampled_nodes() -> None:
    stack, points, center = stacked(FederatedModel(heavy, ["mu"]), {"a": {"y": np.array([9.0])}})
    assert log_factors._by_sparse_grids(stack.client(0), points, center) is None
